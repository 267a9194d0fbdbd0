"""The codec "source": files kept as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastdata.pixels.arrays import Array
from fastdata.pixels.samples import to_stored


@dataclass(frozen=True, slots=True)
class SourceDecoder:
    """Codec ``"source"``: a sample is kept as its file's bytes, and prepared on each read.

    Exact, and as slow as opening the file. There is nothing to encode.
    """

    open_bytes: Callable[[memoryview], Any]
    # Of what the file was opened as makes a PIL image, an array or a tensor.
    prepare: Callable[[Any], Any]
    makes_jpeg_files: bool = False  # that the core may decode, as nothing is done to images

    name = "source"
    lossless = True

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}

    def sample(self, data: memoryview) -> Array:
        return to_stored(self.prepare(self.open_bytes(data)))[0]

    def decode(self, data: memoryview, out: Array) -> None:
        """Prepare the sample of one file; ``ValueError`` where ``out`` is of another type."""
        sample = self.sample(data)
        if sample.shape != out.shape or sample.dtype != out.dtype:
            raise ValueError(
                f"it comes out as {sample.dtype} {list(sample.shape)}; all samples must be alike"
            )
        out[...] = sample
