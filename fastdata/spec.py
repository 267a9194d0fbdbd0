"""What a prepared sample looks like.

Shape letters, here and in every kernel: N stored samples, B batch, C channels, H W stored size, h w size served.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["Form", "SampleSpec"]

Form = Literal["pil", "tensor", "array", "image", "mask", "video"]
"""What a sample was before it was stored, hence what per-sample code must be given; the last three are torchvision's
``tv_tensors``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """Shape, dtype and form of prepared samples.

    Args:
        shape: of every sample, ``(C, H, W)`` for images; None when each sample has its own (ragged).
        dtype: element type as NumPy names it.
        form: ``"pil"`` images are stored planar (C, H, W) and given back as PIL images; all others
            are stored as they are.

    Example:
        >>> SampleSpec(shape=(3, 256, 256), dtype="uint8", form="pil").sample_bytes
        196608
    """

    shape: tuple[int, ...] | None
    dtype: str
    form: Form

    @property
    def is_dense(self) -> bool:
        """Whether all samples have one shape."""
        return self.shape is not None

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample; only for dense samples."""
        if self.shape is None:
            raise ValueError("ragged samples have no common size")
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize
