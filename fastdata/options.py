"""How a dataset is prepared: the keyword arguments that all fastdata datasets share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from fastdata.codecs import KNOWN_CODECS
from fastdata.decode import Bound
from fastdata.ingest import OnError
from fastdata.storage import STORAGES

__all__ = ["Options"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a dataset is prepared; the keyword arguments that all fastdata datasets share."""

    storage: Literal["auto", "device", "shared", "compressed", "disk", "none"] = "auto"
    codec: Any = "auto"
    resize: Bound | None = None
    fill: Literal["auto", "eager", "lazy"] = "auto"
    memory_limit: int | float | str | None = None
    progress: bool = True
    seed: int | None = None
    batch_ops: Literal["auto", "off"] = "auto"
    on_error: OnError = "raise"
    fast_decode: bool = False
    num_workers: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_key: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, choices))}")
        if isinstance(self.codec, str) and self.codec not in _CODECS:
            known = ", ".join(map(repr, _CODECS))
            raise ValueError(f"codec={self.codec!r} is not one of {known}, nor an object with encode and decode")
        if self.fill == "lazy" and self.on_error == "skip":
            raise ValueError(
                "fill='lazy' finds a damaged sample only when it is read, too late for on_error='skip'; "
                "use fill='eager', or on_error='raise'"
            )
        if self.fill == "lazy" and self.storage == "device":
            raise ValueError(
                "storage='device' copies all samples to the GPU at once, and fill='lazy' does not have them yet; use "
                "fill='eager', or storage='shared'"
            )
        self._check_cache()

    def _check_cache(self) -> None:
        if self.cache_dir is None:
            if self.storage == "disk":
                raise ValueError("storage='disk' keeps samples in a folder; name it with cache_dir=")
            if self.cache_key is not None:
                raise ValueError("cache_key= says when a cache is still right; it needs cache_dir=")
            return
        if self.storage not in ("auto", "disk"):
            raise ValueError(
                f"cache_dir= keeps samples on disk, from where the page cache serves them; storage={self.storage!r} "
                "does not. Leave one of them out; codec= compresses on disk as well."
            )
        if self.fill == "lazy":
            raise ValueError("fill='lazy' prepares samples in memory; a cache is written whole. Leave out fill=.")


_CODECS = ("auto", "source", *KNOWN_CODECS)
_CHOICES = {
    "storage": STORAGES,
    "fill": ("auto", "eager", "lazy"),
    "batch_ops": ("auto", "off"),
    "on_error": ("raise", "skip"),
}
