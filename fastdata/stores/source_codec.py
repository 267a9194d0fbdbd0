"""The codec "source", which stores files unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastdata.pixels.arrays import Array
from fastdata.pixels.samples import to_stored

SOURCE = "source"


@dataclass(frozen=True, slots=True)
class SourceDecoder:
    """Codec ``"source"``: the bytes of a sample's file are stored, and prepared on each read.

    It is exact, and as slow as opening the file. Nothing is encoded.

    Attributes:
        open_bytes: function that decodes a file.
        prepare: function that turns the result into a PIL image, an array or a tensor. None if the
            result is the values of the sample.
        makes_jpeg_files: True if decoded images are not changed, so that the core may decode them.
    """

    open_bytes: Callable[[memoryview], Any]
    prepare: Callable[[Any], Any] | None
    makes_jpeg_files: bool = False

    name = SOURCE
    lossless = True

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}

    def sample(self, data: memoryview) -> Array:
        """Return the values of the sample that the bytes of a file hold."""
        opened = self.open_bytes(data)
        return opened if self.prepare is None else to_stored(self.prepare(opened))[0]

    def decode(self, data: memoryview, out: Array) -> None:
        """Write the values of the sample that the bytes of a file hold to ``out``.

        Raises:
            ValueError: the sample has another shape or dtype than ``out``.
        """
        sample = self.sample(data)
        if sample.shape != out.shape or sample.dtype != out.dtype:
            raise ValueError(
                f"it is now {sample.dtype} {list(sample.shape)}, but {out.dtype} {list(out.shape)} "
                "is needed: the loader and the steps must give a file the same shape and dtype on "
                "every read"
            )
        out[...] = sample
