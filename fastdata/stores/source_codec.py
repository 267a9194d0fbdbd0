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
        open_bytes: decodes a file.
        prepare: makes a PIL image, an array or a tensor of the result.
        makes_jpeg_files: True if nothing more is done to images, so that the core may decode them.
    """

    open_bytes: Callable[[memoryview], Any]
    prepare: Callable[[Any], Any]
    makes_jpeg_files: bool = False

    name = SOURCE
    lossless = True

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}

    def sample(self, data: memoryview) -> Array:
        """Return the values of the sample in a file."""
        return to_stored(self.prepare(self.open_bytes(data)))[0]

    def decode(self, data: memoryview, out: Array) -> None:
        """Write the values of the sample in a file to ``out``.

        Raises:
            ValueError: they have another shape or dtype.
        """
        sample = self.sample(data)
        if sample.shape != out.shape or sample.dtype != out.dtype:
            raise ValueError(
                f"it comes out as {sample.dtype} {list(sample.shape)}, but all samples need one "
                "shape and dtype"
            )
        out[...] = sample
