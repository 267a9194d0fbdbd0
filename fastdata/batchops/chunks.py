"""Small dense samples: crop, flip and normalise a chunk of them with a handful of NumPy calls, not a loop over samples.

A chunk is gathered with its mirrored samples together at the end; these are mirrored in one go, all are copied into
padded scratch, and one indexing operation over all the windows of the scratch takes each sample's own, in the order of
the batch.

Shape letters: K samples of a chunk, C channels, H W stored size, h w size served.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.batchops.pixels import BIG, LITTLE, Bytes, fill_borders
from fastdata.batchops.readable import Readable
from fastdata.batchops.values import Values
from fastdata.batchops.windows import Padding, Windows
from fastdata.scratch import Scratch, round_up_8

__all__ = ["MAX_MIRRORED_BYTES", "MAX_SAMPLE_BYTES", "PLAIN_SHARE", "serve_chunks", "serve_mirrored"]

MAX_SAMPLE_BYTES = 24 << 10
"""Where the gain over a loop ends for padded or converted samples: 2.8-fold at 3 x 40 x 40, none at 3 x 96 x 96."""
PLAIN_SHARE = 3
"""Of that, the part at which it ends for samples that are only cropped and mirrored: 3 x 48 x 48."""
MAX_MIRRORED_BYTES = 64 << 10
"""Where whole images, some of them mirrored, are large enough for a loop over them."""
_MAX_CHUNK = 128
_MIRRORED_CHUNK = 64
_GROUPS = 4
"""Ways to be mirrored: not, left to right, top to bottom, both."""
_CHUNK_BYTES = 1536 << 10
"""Of the chunk as it is served. Larger than the second cache, because NumPy gives the GIL back for every call: CIFAR
crops as float32 at 384 KiB and 64 samples, 253,000 images/s with one thread and 191,000 with two; at 1536 KiB and 128
samples, 264,000 and 287,000."""

Int64s = npt.NDArray[np.int64]


def serve_chunks(
    store: Readable,
    index_B: Int64s,
    windows: Windows,
    padding: Padding,
    values: Values | None,
    out_BChw: npt.NDArray[Any],
    scratch: Scratch,
) -> None:
    """Serve a batch of dense samples, all of whose windows have one size.

    Args:
        store: dense.
        index_B: which samples.
        windows: one stage's; its borders are plain integers.
        padding: how the borders are filled.
        values: the conversion to floats, or None for uint8.
        out_BChw: C-contiguous; filled completely.
        scratch: the thread's.
    """
    chunk = _Chunk(store, windows, padding, out_BChw, scratch)
    for start in range(0, len(index_B), chunk.length):
        part = slice(start, start + chunk.length)
        crops = chunk.cut(store, index_B, part, None if values else out_BChw[part])
        if values:
            values.apply_chunk(crops, out_BChw[part])


def serve_mirrored(
    store: Readable, index_B: Int64s, mirrored_B: npt.NDArray[np.bool_], out_BCHW: Bytes, scratch: Scratch
) -> None:
    """Serve whole dense images of which some are mirrored left to right.

    Few long calls: a loop over 112x112 images is as fast in one thread, 170,000 images/s, but gains nothing from a
    second one, because every call waits for the GIL.

    Args:
        store: dense; rows are whole words.
        index_B: which samples.
        mirrored_B: which of them are mirrored.
        out_BCHW: C-contiguous; filled completely.
        scratch: the thread's.
    """
    gathered = scratch.take("gathered", (_MIRRORED_CHUNK, *out_BCHW.shape[1:]))
    words_BCHw = out_BCHW.view(LITTLE)
    for start in range(0, len(index_B), _MIRRORED_CHUNK):
        part = slice(start, start + _MIRRORED_CHUNK)
        for is_mirrored in (False, True):
            places = np.flatnonzero(mirrored_B[part] == is_mirrored)
            images = gathered[: len(places)]
            store.gather_into(index_B[part][places], images)
            if is_mirrored:
                words_BCHw[part][places] = images.view(BIG)[..., ::-1]
            else:
                out_BCHW[part][places] = images


class _Chunk:
    """The scratch of a batch's chunks, and how to cut windows out of it."""

    def __init__(
        self, store: Readable, windows: Windows, padding: Padding, out_BChw: npt.NDArray[Any], scratch: Scratch
    ) -> None:
        assert store.spec.shape is not None
        channels, rows, columns = store.spec.shape
        left, top, right, bottom = (int(border) for border in windows.borders)
        self.length = max(1, min(_MAX_CHUNK, len(out_BChw), _CHUNK_BYTES // max(1, out_BChw[0].nbytes)))
        self.padding = padding
        self.offsets = ((top, bottom), (left, right))
        self.size = out_BChw.shape[2:]
        padded_size = (rows + top + bottom, columns + left + right)
        self.is_padded = padded_size != (rows, columns)
        self.is_whole = self.size == (rows, columns) and not self.is_padded
        shape = (self.length, channels, rows, columns)
        self.gathered_bytes = scratch.take("gathered", (math.prod(shape) + 8,))
        self.gathered_KCHW = self.gathered_bytes[: math.prod(shape)].reshape(shape)
        self.mirrored_bytes = scratch.take("mirrored", (round_up_8(math.prod(shape)),))
        self.padded_KCHW = scratch.take("padded", (self.length, channels, *padded_size))
        self.windows_KCyxhw = np.lib.stride_tricks.sliding_window_view(self.padded_KCHW, self.size, axis=(2, 3))
        self._place(windows, len(out_BChw), padded_size)
        self.is_filled = padding.mode == "constant" and (left, top) == (right, bottom)
        if self.is_filled and self.is_padded:  # once for all chunks
            fill_borders(self.padded_KCHW, (left, top, columns, rows), padding)

    def _place(self, windows: Windows, count: int, padded_size: tuple[int, int]) -> None:
        """Where each window lies once its sample is mirrored: counted from the other side."""
        self.top_B, self.left_B = np.broadcast_to(windows.top, count), np.broadcast_to(windows.left, count)
        group_B = np.arange(count) // self.length * _GROUPS
        if windows.flip_h is not None:
            self.left_B = np.where(windows.flip_h, padded_size[1] - self.size[1] - self.left_B, self.left_B)
            group_B += windows.flip_h
        if windows.flip_v is not None:
            self.top_B = np.where(windows.flip_v, padded_size[0] - self.size[0] - self.top_B, self.top_B)
            group_B += 2 * windows.flip_v
        # Sorted by chunk, then by how they are mirrored; place_B is where in its chunk a sample then lies.
        self.order_B = np.argsort(group_B, kind="stable")
        self.place_B = np.empty_like(self.order_B)
        self.place_B[self.order_B] = np.arange(count) % self.length
        self.counts = np.bincount(group_B, minlength=-(-count // self.length) * _GROUPS).reshape(-1, _GROUPS).tolist()

    def cut(self, store: Readable, index_B: Int64s, part: slice, out: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        """Give the windows of one chunk: (K, C, h, w), in ``out`` if there is one."""
        order = self.order_B[part]
        gathered, padded = self.gathered_KCHW[: len(order)], self.padded_KCHW[: len(order)]
        store.gather_into(index_B[order], gathered)
        start = 0
        for group, count in enumerate(self.counts[part.start // self.length]):
            if count:
                self._lay_out(gathered, slice(start, start + count), group)
                start += count
        if self.is_whole:
            return np.take(padded, self.place_B[part], axis=0, out=gathered if out is None else out, mode="clip")
        crops = self.windows_KCyxhw[self.place_B[part], :, self.top_B[part], self.left_B[part]]
        if out is not None:
            out[...] = crops
        return crops

    def _lay_out(self, gathered_KCHW: Bytes, those: slice, group: int) -> None:
        """Copy samples that are all mirrored in the same way into their padded places."""
        flip_h, flip_v = bool(group & 1), bool(group & 2)
        images = self._mirror(those) if flip_h else gathered_KCHW[those]
        if flip_v:
            images = images[:, :, ::-1]
        padded = self.padded_KCHW[those]
        if not self.is_padded:
            padded[...] = images
            return
        (top, bottom), (left, right) = self.offsets
        top, left = bottom if flip_v else top, right if flip_h else left
        height, width = images.shape[2:]
        padded[..., top : top + height, left : left + width] = images
        if not self.is_filled:
            fill_borders(padded, (left, top, width, height), self.padding)

    def _mirror(self, those: slice) -> Bytes:
        """Mirror many images in one long loop: all bytes in reverse, then samples, channels and rows back in order."""
        shape = (those.stop - those.start, *self.gathered_KCHW.shape[1:])
        size = math.prod(shape)
        wide = round_up_8(size)
        start = those.start * (size // shape[0])
        mirrored = self.mirrored_bytes[:wide]
        mirrored.view(LITTLE)[...] = self.gathered_bytes[start : start + wide].view(BIG)[::-1]
        return mirrored[wide - size :].reshape(shape)[::-1, ::-1, ::-1]
