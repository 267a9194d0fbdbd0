"""How a dataset is prepared: the keyword arguments that all fastdata datasets share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastdata.decode import Size
from fastdata.ingest import OnError

__all__ = ["Options"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a dataset is prepared; the keyword arguments that all fastdata datasets share."""

    storage: Literal["auto", "shared", "none"] = "auto"
    resize: Size | None = None
    fill: Literal["eager"] = "eager"
    memory_limit: int | float | str | None = None
    progress: bool = True
    seed: int = 0
    batch_ops: Literal["auto", "off"] = "auto"
    on_error: OnError = "raise"
    fast_decode: bool = False
    num_workers: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, choices))}")


_CHOICES = {
    "storage": ("auto", "shared", "none"),
    "fill": ("eager",),
    "batch_ops": ("auto", "off"),
    "on_error": ("raise", "skip"),
}
