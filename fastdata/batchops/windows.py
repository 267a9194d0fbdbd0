"""Where the windows lie: crops, flips and paddings of one stage, fused to one window per sample.

A stage is a run of ops that together cut one window out of the (padded) image and mirror it. Everything here is
arithmetic on (B,) arrays or plain integers; no pixel is touched.

Shape letters: B batch. H W are the sizes before a stage, h w after it: one integer for all samples, or an array (B,).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.draws import UInt64s, draw_integers, draw_uniform
from fastdata.plan.ops import Borders, CenterCrop, Domain, Flip, Pad, PadMode, RandomCrop

__all__ = ["Length", "Padding", "Size", "WindowOp", "Windows", "joins", "padding_of", "place_windows", "size_after"]

WindowOp = Pad | RandomCrop | CenterCrop | Flip
Size = tuple[int, int]
Length = int | npt.NDArray[np.int64]
"""A number of pixels: one for all samples, or one each."""
Flags = npt.NDArray[np.bool_]

NO_BORDERS: Borders = (0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """How the borders of a stage are filled."""

    mode: PadMode = "constant"
    fill: tuple[int, ...] = (0,)
    domain: Domain = "pil"


@dataclass(kw_only=True, slots=True)
class Windows:
    """The windows of a batch: (height, width) at (top, left) of the image with ``borders`` around it, then mirrored."""

    height: Length
    width: Length
    top: Length = 0
    left: Length = 0
    flip_v: Flags | None = None
    flip_h: Flags | None = None
    borders: tuple[Length, Length, Length, Length] = NO_BORDERS

    def flip(self, flags: Flags, vertical: bool) -> None:
        """Mirror those samples that are flagged."""
        if vertical:
            self.flip_v = flags if self.flip_v is None else self.flip_v ^ flags
        else:
            self.flip_h = flags if self.flip_h is None else self.flip_h ^ flags

    def pad(self, left: Length, top: Length, right: Length, bottom: Length) -> None:
        """Add borders; the window still covers the whole image."""
        self.borders = (left, top, right, bottom)
        self.height = self.height + top + bottom
        self.width = self.width + left + right

    def crop(self, top: Length, left: Length, height: int, width: int) -> None:
        """Cut at (top, left) as seen after the flips so far: a crop of a mirrored image is another crop, mirrored."""
        if self.flip_v is not None:
            top = np.where(self.flip_v, self.height - height - top, top)
        if self.flip_h is not None:
            left = np.where(self.flip_h, self.width - width - left, left)
        self.top, self.left = self.top + top, self.left + left
        self.height, self.width = height, width


def joins(stage: list[WindowOp], op: WindowOp, size: Size | None) -> bool:
    """Whether ``op`` may join the stage: one that adds borders must come first, or after flips that leave them alone.

    Args:
        stage: the ops so far.
        op: the next one.
        size: (H, W) before ``op`` where all samples have one, else None.
    """
    if not stage or not _may_pad(op, size):
        return True
    if not all(isinstance(before, Flip) for before in stage) or isinstance(op, (CenterCrop, Flip)):
        return False
    left, top, right, bottom = op.borders
    return left == right and top == bottom


def size_after(op: WindowOp, size: Size | None) -> Size | None:
    """(h, w) after an op; None if it is not the same for all samples."""
    if isinstance(op, (RandomCrop, CenterCrop)):
        return op.height, op.width
    if isinstance(op, Pad) and size is not None:
        left, top, right, bottom = op.borders
        return size[0] + top + bottom, size[1] + left + right
    return size


def padding_of(stage: tuple[WindowOp, ...]) -> Padding | None:
    """How the borders of a stage are filled, at most one of whose ops adds any; None if only CenterCrop may, with 0."""
    for op in stage:
        if isinstance(op, Pad) or (isinstance(op, RandomCrop) and (op.pad_if_needed or any(op.borders))):
            return Padding(mode=op.mode, fill=op.fill, domain=op.domain)
    return None


def place_windows(
    stage: tuple[WindowOp, ...],
    height_B: Length,
    width_B: Length,
    keys_B: UInt64s,
    index_B: npt.NDArray[np.int64],
) -> Windows:
    """Draw the windows of a batch.

    Args:
        stage: its ops, in order.
        height_B: heights before the stage.
        width_B: widths before it.
        keys_B: from ``draws.sample_keys``.
        index_B: positions of the samples, for errors.

    Raises:
        ValueError: an image is smaller than its crop, as in torchvision.
    """
    windows = Windows(height=height_B, width=width_B)
    for op in stage:
        if isinstance(op, Flip):
            windows.flip(draw_uniform(keys_B, op.position, 0) < op.p, op.vertical)
        elif isinstance(op, Pad):
            windows.pad(*op.borders)
        elif isinstance(op, CenterCrop):
            _place_center(windows, op)
        else:
            _place_random(windows, op, keys_B, index_B)
    return windows


def _place_random(windows: Windows, op: RandomCrop, keys_B: UInt64s, index_B: npt.NDArray[np.int64]) -> None:
    left, top, right, bottom = op.borders
    if op.pad_if_needed:
        # torchvision adds the missing length on both sides, so the place of the image stays random.
        more_v = _positive(op.height - (windows.height + top + bottom))
        more_h = _positive(op.width - (windows.width + left + right))
        windows.pad(left + more_h, top + more_v, right + more_h, bottom + more_v)
    elif any(op.borders):
        windows.pad(left, top, right, bottom)
    _check_fits(windows, op, index_B)
    windows.crop(
        draw_integers(keys_B, op.position, 0, windows.height - op.height + 1),
        draw_integers(keys_B, op.position, 1, windows.width - op.width + 1),
        op.height,
        op.width,
    )


def _place_center(windows: Windows, op: CenterCrop) -> None:
    missing_v, missing_h = _positive(op.height - windows.height), _positive(op.width - windows.width)
    if np.any(missing_v) or np.any(missing_h):
        windows.pad(missing_h // 2, missing_v // 2, (missing_h + 1) // 2, (missing_v + 1) // 2)
    windows.crop(_half(windows.height - op.height), _half(windows.width - op.width), op.height, op.width)


def _check_fits(windows: Windows, op: RandomCrop, index_B: npt.NDArray[np.int64]) -> None:
    small_B = np.broadcast_to((windows.height < op.height) | (windows.width < op.width), index_B.shape)
    if not small_B.any():
        return
    worst = int(np.argmax(small_B))
    height, width = (int(np.broadcast_to(n, index_B.shape)[worst]) for n in (windows.height, windows.width))
    raise ValueError(
        f"Required crop size {(op.height, op.width)} is larger than input image size {(height, width)} "
        f"of sample {int(index_B[worst])}. Use pad_if_needed=True, a smaller crop, or a Resize before it."
    )


def _may_pad(op: WindowOp, size: Size | None) -> bool:
    if isinstance(op, Pad):
        return any(op.borders)
    if isinstance(op, RandomCrop):
        left, top, right, bottom = op.borders
        needed = size is None or size[0] + top + bottom < op.height or size[1] + left + right < op.width
        return any(op.borders) or (op.pad_if_needed and needed)
    if isinstance(op, CenterCrop):
        return size is None or size[0] < op.height or size[1] < op.width
    return False


def _positive(length: Length) -> Length:
    result: Any = np.maximum(length, 0)
    return result if isinstance(length, np.ndarray) else int(result)


def _half(length: Length) -> Length:
    """Python's ``round(length / 2)``: halves to the even number, as torchvision does."""
    result: Any = np.rint(np.asarray(length) / 2).astype(np.int64)
    return result if isinstance(length, np.ndarray) else int(result)
