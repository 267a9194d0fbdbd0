"""One pass of a stage over a batch, sample by sample: the road of large images, of ragged samples and of single ones.

A pass is made for a batch, with all its draws made at once and turned into Python numbers; ``run`` then does one
sample. ``slot`` names its part of the scratch, so that no pass overwrites what it reads.

Shape letters: B batch, C channels, H W size before the pass, h w size after it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastdata.batchops.pixels import Bytes, Mirror, mirror_into, pad_into
from fastdata.batchops.resample import draw_boxes, resize_into
from fastdata.batchops.values import Values, gray_channels, gray_into
from fastdata.batchops.windows import Length, Padding, Windows
from fastdata.draws import UInt64s
from fastdata.plan.ops import Grayscale, RandomResizedCrop
from fastdata.scratch import Scratch

__all__ = ["BoxPass", "GrayPass", "Pass", "WindowPass"]


class Pass(Protocol):
    """A stage with its draws for one batch."""

    size: tuple[Length, Length]
    """(h, w) after it."""

    def run(self, source_CHW: Bytes, b: int, out_Chw: Bytes | None, scratch: Scratch) -> Bytes:
        """Do sample ``b`` of the batch.

        Args:
            source_CHW: read only.
            b: its place in the batch.
            out_Chw: where the result should go, C-contiguous; None to choose.
            scratch: the thread's.

        Returns:
            ``out_Chw`` filled, or a view of the source or of scratch that lasts until the next call.
        """
        ...


class WindowPass:
    """Crops, flips and padding."""

    def __init__(self, windows: Windows, padding: Padding, count: int, slot: str) -> None:
        self.slot = slot
        self.size = (windows.height, windows.width)
        self.padding = padding
        self.is_padded = any(np.any(border) for border in windows.borders)
        left, top, right, bottom = (_numbers(border, count) for border in windows.borders)
        self.borders = list(zip(left, top, right, bottom, strict=True)) if self.is_padded else []
        self.flips_v = windows.flip_v is not None
        self.mirrored = [False] * count if windows.flip_h is None else windows.flip_h.tolist()
        self.boxes = list(
            zip(
                _numbers(windows.top, count),
                _numbers(windows.left, count),
                _numbers(windows.height, count),
                _numbers(windows.width, count),
                [False] * count if windows.flip_v is None else windows.flip_v.tolist(),
                self.mirrored,
                strict=True,
            )
        )

    def run(self, source_CHW: Bytes, b: int, out_Chw: Bytes | None, scratch: Scratch) -> Bytes:
        """See ``Pass``."""
        top, left, height, width, flip_v, flip_h = self.boxes[b]
        if self.is_padded:
            source_CHW = self._pad(source_CHW, b, scratch)
        crop = source_CHW[:, top : top + height, left : left + width]
        if flip_v:
            crop = crop[:, ::-1]
        if not flip_h:
            return crop
        if out_Chw is None or out_Chw.shape != crop.shape:
            out_Chw = scratch.take(self.slot + "mirrored", crop.shape)
        mirror_into(crop, out_Chw, scratch)
        return out_Chw

    def run_all(
        self, sources: list[Bytes], values: Values | None, out_BChw: npt.NDArray[Any], scratch: Scratch
    ) -> None:
        """Do a whole dense batch to which no borders are added: the shortest loops.

        Args:
            sources: the batch's samples.
            values: the conversion to floats that follows, or None for uint8.
            out_BChw: of the shape that is served.
            scratch: the thread's.
        """
        crops = self._cut(sources)
        if values is None:
            for b, crop in enumerate(crops):
                if not self.mirrored[b]:
                    out_BChw[b] = crop
            Mirror(out_BChw, scratch).put_all([(b, crop) for b, crop in enumerate(crops) if self.mirrored[b]])
            return
        one = scratch.take(self.slot + "one", (1, *crops[0].shape) if crops else (1, 0, 0, 0))
        mirror = Mirror(one, scratch)
        for b, crop in enumerate(crops):
            if self.mirrored[b]:
                mirror.put(0, crop)
            values.apply(one[0] if self.mirrored[b] else crop, out_BChw[b])

    def _cut(self, sources: list[Bytes]) -> list[Bytes]:
        """The windows of dense sources, top and bottom exchanged already."""
        if sources and self.is_whole(sources[0]):
            return sources
        return [
            source[:, top : top + height, left : left + width][:, :: -1 if flip_v else 1]
            for source, (top, left, height, width, flip_v, _) in zip(sources, self.boxes, strict=True)
        ]

    def is_whole(self, source_CHW: Bytes) -> bool:
        """Whether all windows are whole dense images, at most mirrored left to right."""
        height, width = self.size
        return not self.flips_v and (height, width) == source_CHW.shape[1:]

    def _pad(self, source_CHW: Bytes, b: int, scratch: Scratch) -> Bytes:
        left, top, right, bottom = self.borders[b]
        if not (left or top or right or bottom):
            return source_CHW
        channels, height, width = source_CHW.shape
        padded = scratch.take(self.slot + "padded", (channels, height + top + bottom, width + left + right))
        pad_into(source_CHW, left, top, self.padding, padded)
        return padded


class BoxPass:
    """RandomResizedCrop."""

    def __init__(self, op: RandomResizedCrop, height_B: Length, width_B: Length, keys_B: UInt64s, slot: str) -> None:
        self.slot = slot
        self.size: tuple[Length, Length] = (op.height, op.width)
        self.op = op
        self.boxes = draw_boxes(op, height_B, width_B, keys_B).T.tolist()

    def run(self, source_CHW: Bytes, b: int, out_Chw: Bytes | None, scratch: Scratch) -> Bytes:
        """See ``Pass``."""
        top, left, height, width = self.boxes[b]
        shape = (source_CHW.shape[0], self.op.height, self.op.width)
        if out_Chw is None or out_Chw.shape != shape:
            out_Chw = scratch.take(self.slot + "resized", shape)
        resize_into(source_CHW[:, top : top + height, left : left + width], self.op, out_Chw)
        return out_Chw


class GrayPass:
    """Grayscale."""

    def __init__(self, op: Grayscale, height_B: Length, width_B: Length, slot: str) -> None:
        self.slot = slot
        self.size = (height_B, width_B)
        self.op = op

    def run(self, source_CHW: Bytes, b: int, out_Chw: Bytes | None, scratch: Scratch) -> Bytes:
        """See ``Pass``."""
        shape = (gray_channels(self.op, source_CHW.shape[0]), *source_CHW.shape[1:])
        if out_Chw is None or out_Chw.shape != shape:
            out_Chw = scratch.take(self.slot + "gray", shape)
        gray_into(source_CHW, self.op.domain, out_Chw)
        return out_Chw


def _numbers(length: Length, count: int) -> list[int]:
    numbers: list[int] = np.broadcast_to(length, count).tolist()
    return numbers
