"""Reversible prediction: a sample minus what its neighbours let one expect.

A sample is taken as planes of rows, each row filled up to whole words of 8 bytes, and a word as
**one integer**. So one ``add.accumulate`` of words undoes "minus the row above" for 8 bytes at a
time, and one multiplication undoes "minus the element to the left" within each word, because modulo
2**64

    word - (word << 8)  ==  word * (1 - 2**8)     and     (1 - 2**8) * 0x0101010101010101  ==  1.

Borrows between the bytes of a word are part of the residual and vanish with it: exact, and 0.4 %
larger than byte by byte. Both undone, 3 x 256 x 256 bytes take 65 us on one core, 3.0 GB/s, where
``np.cumsum`` of bytes takes 430 us (benchmarks/codecs.py). The two together are the planar
predictor left + above - (left of above), except that the first element of each word is predicted
from above alone.

Elements of 2, 4 or 8 bytes use the same words with wider elements (``lane``); their residuals are
then split into byte planes, so that the bytes that are nearly always equal stand together.

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

from fastdata.pixels.images import Scratch, round_up_8

Bytes = npt.NDArray[np.uint8]
WORD = np.dtype("<u8")
SHORTEST_ROW_BYTES = 32
"""Shorter rows are joined: to fill them up to whole words would cost more than prediction gains."""


class Filter(IntFlag):
    """What was done to a sample before compression, in order; its first byte when encoded."""

    NONE = 0
    GREEN = 1
    """Plane 1 of 3 was subtracted from planes 0 and 2, element by element."""
    ABOVE = 2
    """From each word the word one row above was subtracted, both little-endian integers."""
    LEFT = 4
    """Within each word, from each element the one to its left: ``word - (word << element
    bits)``."""
    SPLIT = 8
    """A bias was added (0x80 in each byte but the highest), then all lowest bytes, all second
    ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a sample's bytes are laid out as words."""

    planes: int
    rows: int  # of a plane; a sample of one axis is one row
    row_bytes: int
    lane: int  # bytes of an element, 1, 2, 4 or 8
    green: bool  # whether there are 3 planes of equal size, so that Filter.GREEN is possible

    @property
    def wide(self) -> int:
        """Bytes of a row filled up to whole words."""
        return round_up_8(self.row_bytes)

    @property
    def words(self) -> tuple[int, int, int]:
        """Shape (P, R, K); the only row of a one-axis sample becomes a column of words."""
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
    if lane not in (1, 2, 4, 8):
        lane = 1
    axes = list(shape)
    row_bytes = dtype.itemsize
    while axes:
        row_bytes *= axes.pop()
        if row_bytes >= SHORTEST_ROW_BYTES:
            break
    rows = axes.pop() if axes else 1
    green = len(shape) >= 3 and shape[0] == 3
    return Layout(planes=math.prod(axes), rows=rows, row_bytes=row_bytes, lane=lane, green=green)


def apply_filter(sample: Bytes, layout: Layout, chosen: Filter) -> Bytes:
    """Filter a sample's bytes.

    Returns:
        New memory of ``layout.size`` bytes, or the sample if nothing is to do.
    """
    if not chosen:
        return sample
    lane = layout.lane
    elements = sample.view(f"<u{lane}")
    if Filter.GREEN in chosen:
        red, green, blue = elements.reshape(3, -1)
        elements = np.stack([red - green, green, blue - green])
    rows = elements.reshape(layout.planes, layout.rows, -1)
    if not layout.is_whole:
        fill = (layout.wide - layout.row_bytes) // lane
        rows = np.pad(rows, ((0, 0), (0, 0), (0, fill)), mode="edge")
    words = np.ascontiguousarray(rows).view(WORD).reshape(layout.words)
    if Filter.ABOVE in chosen:
        words = np.concatenate([words[:, :1], words[:, 1:] - words[:, :-1]], axis=1)
    if Filter.LEFT in chosen and lane < WORD.itemsize:
        words = words - (words << np.uint64(8 * lane))
    filtered = words.ravel()
    if Filter.SPLIT in chosen:
        biased = filtered.view(f"<u{lane}") + _bias(lane)
        filtered = biased.view(np.uint8).reshape(-1, lane).T.ravel()
    return filtered.view(np.uint8)


def undo_filter(
    filtered: Bytes, layout: Layout, chosen: Filter, out: Bytes, scratch: Scratch
) -> None:
    """Undo ``apply_filter``, in long calls on whole arrays: NumPy gives up the GIL during each.

    ``filtered``, ``layout.size`` bytes that begin on a multiple of 8, is overwritten and may be
    ``out`` itself.
    """
    lane = layout.lane
    if Filter.SPLIT in chosen:
        filtered = _join(filtered, lane, scratch)
    words = filtered.view(WORD).reshape(layout.words)
    if Filter.LEFT in chosen and lane < WORD.itemsize:
        ones = sum(1 << shift for shift in range(0, 64, 8 * lane))  # 1 in each element of a word
        words *= np.uint64(ones)
    if Filter.ABOVE in chosen:
        np.add.accumulate(words, axis=1, out=words)
    if filtered.ctypes.data != out.ctypes.data:
        rows = filtered.reshape(layout.planes, layout.rows, layout.wide)[..., : layout.row_bytes]
        out.reshape(rows.shape)[...] = rows
    if Filter.GREEN in chosen:
        red, green, blue = out.view(f"<u{lane}").reshape(3, -1)
        red += green
        blue += green


def _bias(lane: int) -> Any:
    return np.dtype(f"<u{lane}").type(sum(0x80 << shift for shift in range(0, 8 * lane - 8, 8)))


def _join(split: Bytes, lane: int, scratch: Scratch) -> Bytes:
    """Put byte planes together.

    Widening whole planes is 5 times as fast as copying bytes to every lane-th place.
    """
    dtype = np.dtype(f"<u{lane}")
    joined = scratch.take("joined", (split.size,))
    elements = joined.view(dtype)
    shifted = scratch.take("shifted", (split.size,)).view(dtype)
    lowest, *higher = split.reshape(lane, -1)
    elements[...] = lowest
    for position, plane in enumerate(higher, start=1):
        shifted[...] = plane
        shifted <<= dtype.type(8 * position)
        elements |= shifted
    elements -= _bias(lane)
    return joined
