"""Codec ``"source"``: a sample is kept as the bytes of its own file, and prepared anew on each read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdata.decode import to_stored

__all__ = ["SourceDecoder"]


@dataclass(frozen=True, slots=True)
class SourceDecoder:
    """Decodes the bytes of image files and prepares the images: exact, and as slow as opening the file.

    There is nothing to encode: the format is the file's own.

    Args:
        open_bytes: makes an image of a file's bytes.
        prepare: called on each image; gives a PIL image, an array or a tensor.
    """

    open_bytes: Callable[[memoryview], Any]
    prepare: Callable[[Any], Any]

    name = "source"

    def sample(self, data: memoryview) -> np.ndarray:
        """Prepare the sample of one file; whatever the decoder raises for it."""
        return to_stored(self.prepare(self.open_bytes(data)))[0]

    def decode(self, data: memoryview, out: np.ndarray) -> None:
        """Prepare the sample of one file into ``out``.

        Raises:
            ValueError: it has another shape or dtype than ``out``.
        """
        sample = self.sample(data)
        if sample.shape != out.shape or sample.dtype != out.dtype:
            raise ValueError(f"it comes out as {sample.dtype} {list(sample.shape)}; all samples must be alike")
        out[...] = sample
