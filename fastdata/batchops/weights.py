"""How much each pixel of a line counts when RandomResizedCrop resizes it, for every length that a box can have.

The libraries themselves are asked: a comb of impulses, so wide apart that no two reach one pixel of the result, goes
through Pillow's or torch's own resize, and what comes out are the weights, rounded as the library rounds them. No
formula of a filter is kept twice.

Shape letters: L length of a line, w its length when resized, K taps, P distance between impulses.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fastdata.batchops.resample import PIL_FILTERS, resizes_in_float
from fastdata.plan.ops import RandomResizedCrop

__all__ = ["Arithmetic", "LineWeights", "weigh_lines"]

Arithmetic = Literal["index", "integer", "float"]
Array = npt.NDArray[Any]

_PIL_BITS = 22
"""``PRECISION_BITS`` in Pillow's src/libImaging/Resample.c: weights for 8-bit images are multiples of 2**-22."""
_TORCH_MOST_BITS = 22
"""Torch's weights for uint8 have as many places as fit an int16, at most these: see
``_compute_index_ranges_int16_weights`` in its aten/src/ATen/native/cpu/UpSampleKernel.cpp."""
_REACH_PX = {"nearest": 1, "nearest-exact": 1, "box": 1, "bilinear": 1, "hamming": 1, "bicubic": 2, "lanczos": 3}
"""How far a filter looks to each side where it does not shrink, rounded up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineWeights:
    """Weights for lines of each length up to one, resized to one length; row 0 of each table is empty.

    Attributes:
        arithmetic: ``"index"`` copies one pixel. ``"integer"`` sums in int32, rounds, shifts and clips to uint8 after
            each axis, as Pillow does and torch for uint8. ``"float"`` sums in float32 and rounds once, after both axes.
        starts: int64 (L, w), the first pixel that counts.
        weights: int32 or float32 (K, L, w); 0 where there is no such pixel.
        bits: int32 (L,), binary places of integer weights.
    """

    arithmetic: Arithmetic
    starts: npt.NDArray[np.int64]
    weights: Array
    bits: npt.NDArray[np.int32]

    @property
    def half(self) -> Array:
        """(L,) of the weights' dtype: half of what is cut off, to be added; 0 for floats."""
        return ((1 << self.bits) >> 1).astype(self.weights.dtype)

    @property
    def overshoots(self) -> bool:
        """Whether integer sums can leave the range of uint8: weights are negative, or add up to too much."""
        brightest_Lw = 255 * self.weights.sum(axis=0, dtype=np.int64) + self.half[:, None].astype(np.int64)
        return bool((self.weights < 0).any() or (brightest_Lw >> self.bits[:, None] > 255).any())


def weigh_lines(op: RandomResizedCrop, longest_px: int, out_px: int) -> LineWeights:
    """Give the weights for one axis of an op, whose boxes are at most ``longest_px`` long there.

    Up to 256 pixels to 224 take 0.1 s the first time.
    """
    return _weigh_lines(
        op.domain == "pil",
        op.interpolation,
        op.antialias,
        op.domain != "pil" and resizes_in_float(op),
        longest_px,
        out_px,
    )


@functools.lru_cache(maxsize=8)
def _weigh_lines(
    by_pillow: bool, interpolation: str, antialias: bool, in_float: bool, longest_px: int, out_px: int
) -> LineWeights:
    arithmetic: Arithmetic = "float" if in_float else "integer"
    if interpolation in ("nearest", "nearest-exact"):
        arithmetic = "index"
    rows = []
    for length in range(1, longest_px + 1):
        comb_PL = _comb(length, out_px, _REACH_PX[interpolation])
        if by_pillow:
            response_Pw, bits = _ask_pillow(comb_PL, out_px, interpolation), _PIL_BITS
        else:
            response_Pw, bits = _ask_torch(comb_PL, out_px, interpolation, antialias, in_float)
        rows.append((*_trim(*_in_order(response_Pw, length)), bits))
    return _pack(rows, arithmetic)


def _comb(length: int, out_px: int, reach_px: int) -> Array:
    """Impulses at every P-th pixel, in each of the P possible phases: (P, L)."""
    period = 2 * (math.ceil(reach_px * max(1.0, length / out_px)) + 1) + 1
    positions = np.arange(length)
    comb_PL = np.zeros((period, length))
    comb_PL[positions % period, positions] = 1
    return comb_PL


def _ask_pillow(comb_PL: Array, out_px: int, interpolation: str) -> Array:
    """Weights as integers: Pillow rounds the results of 32-bit images as it rounds the weights of 8-bit ones."""
    image = Image.fromarray((comb_PL * (1 << _PIL_BITS)).astype(np.int32))
    return np.asarray(image.resize((out_px, len(comb_PL)), PIL_FILTERS[interpolation]))


def _ask_torch(comb_PL: Array, out_px: int, interpolation: str, antialias: bool, in_float: bool) -> tuple[Array, int]:
    smooth = interpolation in ("bilinear", "bicubic")
    response = torch.nn.functional.interpolate(
        torch.from_numpy(comb_PL).to(torch.float32 if in_float else torch.float64)[None, None],
        size=[len(comb_PL), out_px],
        mode=interpolation,
        align_corners=False if smooth else None,
        antialias=antialias and smooth,
    )
    response_Pw: Array = response[0, 0].numpy()
    if in_float:
        return response_Pw, 0
    bits = _places(float(response_Pw.max()))
    return np.trunc(response_Pw * (1 << bits) + np.copysign(0.5, response_Pw)).astype(np.int32), bits


def _places(largest: float) -> int:
    """The most binary places with which the largest weight still fits an int16, as torch counts them."""
    bits = 0
    while bits < _TORCH_MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    return bits


def _in_order(response_Pw: Array, length: int) -> tuple[Array, Array]:
    """Turn what each phase of the comb gave into the weights of P neighbouring pixels, and say which is the first."""
    period, out_px = response_Pw.shape
    first_w = np.floor((np.arange(out_px) + 0.5) * (length / out_px)).astype(np.int64) - period // 2
    pixel_Pw = first_w + np.arange(period)[:, None]
    return first_w, np.take_along_axis(response_Pw, pixel_Pw % period, axis=0)


def _trim(first_w: Array, weights_Pw: Array) -> tuple[Array, Array]:
    """Drop the pixels before the first that counts, and after the last."""
    counts_Pw = weights_Pw != 0
    before_w = counts_Pw.argmax(axis=0)
    taps = len(counts_Pw) - int((counts_Pw[::-1].argmax(axis=0) + before_w).min())
    wide_Pw = np.concatenate([weights_Pw, np.zeros_like(weights_Pw)])
    return first_w + before_w, np.take_along_axis(wide_Pw, before_w + np.arange(taps)[:, None], axis=0)


def _pack(rows: list[tuple[Array, Array, int]], arithmetic: Arithmetic) -> LineWeights:
    """One table for all lengths, with as many taps as the one that needs most."""
    out_px = len(rows[0][0])
    most = max(len(weights) for _, weights, _ in rows)
    dtype = np.float32 if arithmetic == "float" else np.int32
    starts_Lw = np.zeros((len(rows) + 1, out_px), np.int64)
    weights_KLw = np.zeros((most, len(rows) + 1, out_px), dtype)
    bits_L = np.zeros(len(rows) + 1, np.int32)
    for length, (starts_w, weights_Kw, bits) in enumerate(rows, 1):
        starts_Lw[length], bits_L[length] = starts_w, bits
        weights_KLw[: len(weights_Kw), length] = weights_Kw
    return LineWeights(arithmetic=arithmetic, starts=starts_Lw, weights=weights_KLw, bits=bits_L)
