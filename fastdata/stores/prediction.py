"""Reversible prediction: each element of a sample minus its prediction from its neighbours.

A sample is treated as planes of rows. Each row is padded to whole words of 8 bytes, and a word is
**one integer**. So one ``add.accumulate`` of words undoes "minus the row above" for 8 bytes at a
time. One multiplication undoes "minus the element to the left" within each word, because modulo
2**64

    word - (word << 8)  ==  word * (1 - 2**8)     and     (1 - 2**8) * 0x0101010101010101  ==  1.

Borrows between the bytes of a word are part of the residual, and are undone with it. The result is
exact, and 0.4 % larger than with subtraction byte by byte. Undoing both steps takes 65 us for
3 x 256 x 256 bytes on one core, 3.0 GB/s, while ``np.cumsum`` of bytes takes 430 us
(benchmarks/codecs.py). Together they are the planar predictor left + above - (left of above),
except that the first element of each word is predicted only from above.

Elements of 2, 4 or 8 bytes are first split into byte planes: all lowest bytes, all second bytes,
and so on. Each byte plane is then predicted like any other plane.

Shape letters: P planes, R rows, K words of a row.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fastdata.pixels.arrays import Bytes, Shape

_WORD = np.dtype("<u8")

WORD_BYTES = 8

_SHORTEST_ROW_BYTES = 32
"""Shorter rows are joined, because padding them to words would cost more than prediction gains."""

# The steps of a filter, applied in the order GREEN, SPLIT, ABOVE, LEFT. Their sum is the first byte
# of the encoded sample.
GREEN = 1
"""Plane 1 of 3 was subtracted from planes 0 and 2, byte by byte."""

ABOVE = 2
"""From each word, the word one row above was subtracted, as little-endian integers."""

LEFT = 4
"""Within each word, from each byte the byte to its left was subtracted: ``word - (word << 8)``."""

SPLIT = 8
"""Elements of several bytes were split into planes: all lowest bytes, all second bytes ..."""


class WordLayout(NamedTuple):
    """Layout of a sample's bytes as words.

    Attributes:
        lane: bytes of an element, 1, 2, 4 or 8, which is the number of its byte planes.
        rows: number of planes, rows of a plane, and bytes of a row. A sample with one axis is one
            row.
        words: P, R and K. If a plane has only one row, this becomes a column of words.
        filters: filters to try. The last one has all possible steps.
    """

    lane: int
    rows: tuple[int, int, int]
    words: tuple[int, int, int]
    filters: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.words) * WORD_BYTES


@lru_cache(maxsize=256)
def layout_of(shape: Shape, dtype: np.dtype[Any]) -> WordLayout:
    """Return the layout of samples of a shape and type."""
    lane = dtype.itemsize
    if dtype.kind == "c":
        lane //= 2
    if lane not in (1, 2, 4, 8):
        lane = 1
    axes = list(shape)
    row_bytes = dtype.itemsize // lane
    while axes:
        row_bytes *= axes.pop()
        if row_bytes >= _SHORTEST_ROW_BYTES:
            break
    rows = axes.pop() if axes else 1
    planes = lane * math.prod(axes)
    word_count = _round_up_to_words(row_bytes) // WORD_BYTES
    words = planes, rows, word_count
    if rows == 1:
        words = planes, word_count, 1
    filters = [0, ABOVE, ABOVE | LEFT]
    if len(shape) >= 3 and shape[0] == 3:
        filters.append(ABOVE | LEFT | GREEN)
    if lane > 1:
        filters = [0, *(SPLIT | chosen for chosen in filters)]
    if not math.prod(shape):
        filters = [0]
    return WordLayout(
        lane=lane,
        rows=(planes, rows, row_bytes),
        words=words,
        filters=tuple(filters),
    )


def apply_filter(sample: Bytes, layout: WordLayout, chosen: int) -> Bytes:
    """Apply the filter ``chosen`` to a sample's bytes.

    Returns:
        New memory of ``layout.size`` bytes, or the sample itself if ``chosen`` is 0.
    """
    if not chosen:
        return sample
    if chosen & GREEN:
        colours = sample.reshape(3, -1).copy()
        colours[::2] -= colours[1]
        sample = colours.ravel()
    elements = sample.reshape(-1, layout.lane)
    rows = elements.T.reshape(layout.rows)
    planes, row_count, row_bytes = layout.rows
    filled = np.empty((planes, row_count, _round_up_to_words(row_bytes)), np.uint8)
    filled[..., :row_bytes] = rows
    filled[..., row_bytes:] = rows[..., -1:]
    words = filled.view(_WORD).reshape(layout.words)
    if chosen & ABOVE:
        words[:, 1:] -= words[:, :-1]  # NumPy copies the operand, because it overlaps the result
    if chosen & LEFT:
        words -= words << np.uint64(8)
    return words.ravel().view(np.uint8)


def undo_filter(filtered: Bytes, layout: WordLayout, chosen: int, out: Bytes) -> None:
    """Undo ``apply_filter``, in long calls on whole arrays: NumPy releases the GIL in each.

    Args:
        filtered: ``layout.size`` bytes at an address that is a multiple of 8. Overwritten. May be
            ``out`` itself if elements have one byte.
        layout: layout of the sample.
        chosen: filter that was applied.
        out: bytes of the sample. Filled completely.
    """
    words = filtered.view(_WORD).reshape(layout.words)
    if chosen & LEFT:
        # A factor with 1 in each byte adds to each byte all bytes to its left.
        words *= np.uint64(0x0101_0101_0101_0101)
    if chosen & ABOVE:
        np.add.accumulate(words, axis=1, out=words)
    if filtered.ctypes.data != out.ctypes.data:
        planes, rows, row_bytes = layout.rows
        whole_rows = filtered.reshape(planes, rows, -1)[..., :row_bytes]
        if layout.lane == 1:
            out.reshape(layout.rows)[...] = whole_rows
        else:
            _merge_planes(whole_rows.reshape(layout.lane, -1), out)
    if chosen & GREEN:
        colours = out.reshape(3, -1)
        colours[::2] += colours[1]


def _round_up_to_words(size_bytes: int) -> int:
    """Return ``size_bytes``, rounded up to a multiple of a word's size."""
    return -(-size_bytes // WORD_BYTES) * WORD_BYTES


def _merge_planes(planes: Bytes, out: Bytes) -> None:
    """Join byte planes, the lowest first, to elements.

    Widening whole planes is 5 times as fast as copying bytes to every second or fourth place.
    """
    dtype = np.dtype(f"<u{len(planes)}")
    elements = out.view(dtype)
    elements[...] = planes[0]
    for position, plane in enumerate(planes[1:], start=1):
        elements |= plane.astype(dtype) << dtype.type(8 * position)
