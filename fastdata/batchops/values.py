"""What happens to the values of a window: luma, conversion to floating point, normalisation.

Shape letters: C channels, H W size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.batchops.pixels import Bytes
from fastdata.plan.ops import Cast, Domain, Grayscale, Normalize

__all__ = ["LUMA", "PIL_LUMA", "Values", "gray_channels", "gray_into"]

Floats = npt.NDArray[Any]
LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue of torchvision's tensor functional; PIL has its own."""
PIL_LUMA = (19595, 38470, 7471)
"""Those of Pillow's ``convert("L")``, in 2**16ths: L24 in src/libImaging/Convert.c."""


class Values:
    """Conversion to floats and normalisation, as one subtraction and one multiplication: ``(x - shift) * scale``.

    torchvision divides by 255, subtracts the mean and divides by the deviation. Folded to two operations the result is
    within 1e-6 of it for the usual deviations; without Normalize it is bit-equal.

    Args:
        cast: the conversion.
        normalizations: in order.

    Attributes:
        dtype: what comes out.
        channels: as many as there are means, 1 for any number of channels.
        widens: whether one channel becomes as many as there are means.
        divisor: what to divide by instead, where no other way is bit-equal; or None.
        shift_C11: subtracted first, if ``shifts``.
        scale_C11: multiplied by then, if ``scales``.
    """

    def __init__(self, cast: Cast, normalizations: tuple[Normalize, ...]) -> None:
        self.dtype = np.dtype(cast.dtype)
        self.channels = max((len(n.mean) for n in normalizations), default=1)
        self.widens = all(n.widens for n in normalizations if len(n.mean) > 1)
        self.divisor = self.dtype.type(255) if cast.scaling == "divide" and not normalizations else None
        factor = np.full(self.channels, 1.0 if cast.scaling == "none" else 1 / 255)
        offset = np.zeros(self.channels)
        for step in normalizations:
            factor = factor / np.array(step.std)
            offset = (offset - np.array(step.mean)) / np.array(step.std)
        self.shift_C11 = self._constant(-offset / factor)
        self.scale_C11 = self._constant(factor)
        self.shifts = bool(self.shift_C11.any())
        self.scales = not bool((self.scale_C11 == 1).all())
        self._flat: dict[tuple[int, ...], tuple[Floats, Floats]] = {}

    def apply(self, source_CHW: Bytes, out_CHW: Floats) -> None:
        """Convert one image."""
        np.copyto(out_CHW, source_CHW)
        self._finish(out_CHW, self.shift_C11, self.scale_C11)

    def apply_chunk(self, source_KCHW: Bytes, out_KCHW: Floats) -> None:
        """Convert a few small images; ``out`` is C-contiguous."""
        np.copyto(out_KCHW, source_KCHW)
        if self.channels == 1:
            self._finish(out_KCHW.reshape(-1), self.shift_C11[0, 0, 0], self.scale_C11[0, 0, 0])
            return
        # NumPy spends 0.1 us on every inner loop; constants as long as the chunk make it one.
        shift, scale = self._flat_constants(out_KCHW.shape)
        self._finish(out_KCHW.reshape(-1), shift, scale)

    def _finish(self, out: Floats, shift: Any, scale: Any) -> None:
        if self.divisor is not None:
            out /= self.divisor
            return
        if self.shifts:
            out -= shift
        if self.scales:
            out *= scale

    def _flat_constants(self, shape_KCHW: tuple[int, ...]) -> tuple[Floats, Floats]:
        known = self._flat.get(shape_KCHW[1:])
        if known is None or len(known[0]) < np.prod(shape_KCHW):
            shift, scale = (np.broadcast_to(c, shape_KCHW).reshape(-1) for c in (self.shift_C11, self.scale_C11))
            known = self._flat[shape_KCHW[1:]] = (shift, scale)
        size = int(np.prod(shape_KCHW))
        return known[0][:size], known[1][:size]

    def _constant(self, values_C: npt.NDArray[np.float64]) -> Floats:
        return values_C.astype(self.dtype)[:, None, None]


def gray_channels(op: Grayscale, channels: int) -> int:
    """Channels after Grayscale; torchvision's v1 leaves tensors of one channel as they are."""
    return 1 if op.domain == "v1" and channels == 1 else op.channels


def gray_into(source_CHW: Bytes, domain: Domain, out_CHW: Bytes) -> None:
    """Write the luma of an image into each channel of ``out``, by the formula of the domain."""
    channels = source_CHW.shape[0]
    if channels in (1, 2):
        out_CHW[...] = source_CHW[:1]
    elif domain == "pil":
        out_CHW[...] = _pil_luma(source_CHW)
    elif domain == "v1":
        red, green, blue = (source_CHW[c] * np.float32(weight) for c, weight in enumerate(LUMA))
        out_CHW[...] = (red + green + blue).astype(np.uint8)
    else:
        out_CHW[...] = _fused_luma(source_CHW)


def _pil_luma(source_CHW: Bytes) -> npt.NDArray[np.uint32]:
    red, green, blue = (source_CHW[c].astype(np.uint32) for c in range(3))
    luma: npt.NDArray[np.uint32] = (red * PIL_LUMA[0] + green * PIL_LUMA[1] + blue * PIL_LUMA[2] + 0x8000) >> 16
    return luma


def _fused_luma(source_CHW: Bytes) -> Bytes:
    """Luma by torch's ``add(alpha=)``, which multiplies and adds in one rounding: exact in float64, then rounded."""
    luma: npt.NDArray[np.floating[Any]] = source_CHW[0] * np.float32(LUMA[0])
    for c in (1, 2):
        luma = (luma + source_CHW[c] * np.float64(np.float32(LUMA[c]))).astype(np.float32)
    return luma.astype(np.uint8)
