"""Reversible prediction: a sample minus what its neighbours let one expect, which compresses better.

A sample is taken as planes of rows, each row filled up to whole words of 8 bytes, and a word as **one integer**. So one
``add.accumulate`` of words undoes "minus the row above" for 8 bytes at a time, and one multiplication undoes "minus the
element to the left" within each word, because modulo 2**64

    word - (word << 8)  ==  word * (1 - 2**8)     and     (1 - 2**8) * 0x0101010101010101  ==  1 - 2**64  ==  1.

Borrows between the bytes of a word are part of the residual and vanish with it: exact, and 0.4 % larger than byte by
byte. Both undone, 3 x 256 x 256 bytes take 65 us on one core, 3.0 GB/s, where ``np.cumsum`` of bytes takes 430 us
(benchmarks/codecs.py). The two together are the planar predictor left + above - (left of above), except that the first
element of each word is predicted from above alone.

Elements of 2, 4 or 8 bytes use the same words with wider elements (``lane``); their residuals are then split into byte
planes, so that the bytes that are nearly always equal stand together.

Shape letters: P planes, R rows, K words of a row.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.images import Scratch, round_up_8

Bytes = npt.NDArray[np.uint8]
WORD = np.dtype("<u8")
SHORTEST_ROW_BYTES = 32
"""Shorter rows are joined, because filling them up to whole words would cost more than prediction gains."""


class Filter(IntFlag):
    """What was done to a sample before compression, in this order; the first byte of an encoded sample."""

    NONE = 0
    GREEN = 1
    """Plane 1 of 3 was subtracted from planes 0 and 2, element by element."""
    ABOVE = 2
    """From each word the word one row above was subtracted, both little-endian integers."""
    LEFT = 4
    """Within each word, from each element the one to its left: ``word - (word << bits of an element)``."""
    SPLIT = 8
    """Elements had a bias added (0x80 in each byte but the highest), then all lowest bytes, all second bytes ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a sample's bytes are laid out as words."""

    planes: int
    rows: int  # of a plane; a sample of one axis is one row
    row_bytes: int
    lane: int  # bytes of an element, 1, 2, 4 or 8
    wide: int  # bytes of a row filled up to whole words
    green: bool  # whether there are 3 planes of equal size, so that Filter.GREEN is possible

    @property
    def words(self) -> tuple[int, int, int]:
        """Shape (P, R, K) of the words; the only row of a one-axis sample becomes a column of words."""
        if self.planes * self.rows == 1:
            return 1, self.wide // 8, 1
        return self.planes, self.rows, self.wide // 8

    @property
    def is_whole(self) -> bool:
        return self.wide == self.row_bytes

    @property
    def size(self) -> int:
        return self.planes * self.rows * self.wide


@functools.lru_cache(maxsize=256)
def layout_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Layout:
    lane = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    lane = lane if lane in (1, 2, 4, 8) else 1
    axes, row = list(shape), dtype.itemsize
    while axes:
        row *= axes.pop()
        if row >= SHORTEST_ROW_BYTES:
            break
    rows = axes.pop() if axes else 1
    green = len(shape) >= 3 and shape[0] == 3
    return Layout(planes=math.prod(axes), rows=rows, row_bytes=row, lane=lane, wide=round_up_8(row), green=green)


def apply_filter(sample: Bytes, layout: Layout, chosen: Filter) -> Bytes:
    """Filter a sample's bytes; the result is new memory of ``layout.size`` bytes, or the sample if nothing is to do."""
    if not chosen:
        return sample
    elements = sample.view(f"<u{layout.lane}")
    if Filter.GREEN in chosen:
        planes = elements.reshape(3, -1)
        elements = np.stack([planes[0] - planes[1], planes[1], planes[2] - planes[1]])
    rows = elements.reshape(layout.planes, layout.rows, -1)
    if not layout.is_whole:
        rows = np.pad(rows, ((0, 0), (0, 0), (0, (layout.wide - layout.row_bytes) // layout.lane)), mode="edge")
    words = np.ascontiguousarray(rows).view(WORD).reshape(layout.words)
    if Filter.ABOVE in chosen:
        words = np.concatenate([words[:, :1], words[:, 1:] - words[:, :-1]], axis=1)
    if Filter.LEFT in chosen and layout.lane < WORD.itemsize:
        words = words - (words << np.uint64(8 * layout.lane))
    filtered = np.ascontiguousarray(words).reshape(-1)
    if Filter.SPLIT in chosen:
        biased = filtered.view(f"<u{layout.lane}") + _bias(layout.lane)
        return np.ascontiguousarray(biased.view(np.uint8).reshape(-1, layout.lane).T).reshape(-1)
    return filtered.view(np.uint8)


def undo_filter(filtered: Bytes, layout: Layout, chosen: Filter, out: Bytes, scratch: Scratch) -> None:
    """Undo ``apply_filter``, in long calls on whole arrays: NumPy gives up the GIL during each of them.

    ``filtered``, ``layout.size`` bytes that begin on a multiple of 8, is overwritten and may be ``out`` itself.
    """
    if Filter.SPLIT in chosen:
        filtered = _join(filtered, layout.lane, scratch)
    words = filtered.view(WORD).reshape(layout.words)
    if Filter.LEFT in chosen and layout.lane < WORD.itemsize:
        ones = sum(1 << shift for shift in range(0, 64, 8 * layout.lane))  # 1 in each element of a word
        np.multiply(words, np.uint64(ones), out=words)
    if Filter.ABOVE in chosen:
        np.add.accumulate(words, axis=1, out=words)
    if filtered.ctypes.data != out.ctypes.data:
        rows = out.reshape(layout.planes, layout.rows, layout.row_bytes)
        rows[...] = filtered.reshape(layout.planes, layout.rows, layout.wide)[..., : layout.row_bytes]
    if Filter.GREEN in chosen:
        red, green, blue = out.view(f"<u{layout.lane}").reshape(3, -1)
        np.add(red, green, out=red)
        np.add(blue, green, out=blue)


def _bias(lane: int) -> Any:
    return np.dtype(f"<u{lane}").type(sum(0x80 << shift for shift in range(0, 8 * lane - 8, 8)))


def _join(split: Bytes, lane: int, scratch: Scratch) -> Bytes:
    """Put byte planes together; widening whole planes is 5 times as fast as copying bytes to every lane-th place."""
    dtype = np.dtype(f"<u{lane}")
    planes = split.reshape(lane, -1)
    joined = scratch.take("joined", (split.size,))
    elements, shifted = joined.view(dtype), scratch.take("shifted", (split.size,)).view(dtype)
    elements[...] = planes[0]
    for position in range(1, lane):
        shifted[...] = planes[position]
        np.left_shift(shifted, dtype.type(8 * position), out=shifted)
        np.bitwise_or(elements, shifted, out=elements)
    np.subtract(elements, _bias(lane), out=elements)
    return joined
