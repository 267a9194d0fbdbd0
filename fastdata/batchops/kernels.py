"""The stages of batch ops on whole batches that lie on a device: few kernels, no loop over samples, no wait for it.

Every shape is known beforehand, what differs between samples is index arithmetic: a window is where its rows and
columns come from, and one gather takes all of them. Nothing asks the device for a value, so the host never waits.
Constants go to a device when a stage first runs there; that copy is the only one that blocks.

Shape letters: N stored samples, B batch, C channels, H W size before a stage, h w after it, R lines of all images,
D draws of a stage.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastdata.batchops.fuse import WindowStage, place_stage
from fastdata.batchops.pixels import source_positions
from fastdata.batchops.values import LUMA, PIL_LUMA, gray_channels
from fastdata.batchops.windows import Size
from fastdata.draws import UInt64s
from fastdata.plan.ops import Grayscale

__all__ = ["Constants", "GrayKernel", "Kernel", "WindowKernel", "take"]

Tensor = torch.Tensor
Int64s = npt.NDArray[np.int64]

WINDOW_DRAWS = 4


class Constants:
    """Arrays that a stage needs, copied once to each device on which it runs."""

    def __init__(self, **arrays: npt.ArrayLike) -> None:
        self._arrays = arrays
        self._on: dict[torch.device, dict[str, Tensor]] = {}

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """Give them on a device. Two threads at once may both copy; either copy serves."""
        if device not in self._on:
            tensors = {name: torch.as_tensor(np.ascontiguousarray(array)) for name, array in self._arrays.items()}
            self._on[device] = {name: tensor.to(device) for name, tensor in tensors.items()}
        return self._on[device]


class Kernel(Protocol):
    """A stage for dense samples of one size."""

    size: Size
    """(h, w) after it."""
    draws: int
    """Integers that it needs for each sample."""

    def draw(self, keys_B: UInt64s, index_B: Int64s) -> list[Int64s]:
        """Draw them, on the host: ``draws`` arrays (B,)."""
        ...

    def run(self, stored_NCHW: Tensor, index_B: Tensor | None, draws_DB: Tensor, channels_last: bool) -> Tensor:
        """Do the batch.

        Args:
            stored_NCHW: uint8; only read.
            index_B: int64, which of them are the batch; None if they are the batch.
            draws_DB: int64, what ``draw`` gave.
            channels_last: whether the result should lie in memory with its channels last, as far as that costs nothing.

        Returns:
            uint8 (B, C, h, w).
        """
        ...


class WindowKernel:
    """Crops, flips and padding: one gather; with a constant border, another pass that fills it.

    A window of a mirrored and padded image is, along each axis, a list of positions in the stored one.

    Args:
        stage: what to do.
        size: (H, W).

    Raises:
        ValueError: the images are too small for it.
    """

    draws = WINDOW_DRAWS

    def __init__(self, stage: WindowStage, size: Size) -> None:
        self._stage, self._stored = stage, size
        nothing_drawn = place_stage(stage, size, np.zeros(1, np.uint64), np.zeros(1, np.int64))
        self.size: Size = (int(nothing_drawn.height), int(nothing_drawn.width))
        left, top, right, bottom = (int(border) for border in nothing_drawn.borders)
        self.is_padded = any((left, top, right, bottom))
        mode = stage.padding.mode
        self._is_filled = self.is_padded and mode == "constant"
        self._constants = Constants(
            rows=np.arange(self.size[0]),
            columns=np.arange(self.size[1]),
            row_at=source_positions(size[0], top, bottom, mode),
            column_at=source_positions(size[1], left, right, mode),
            fill=np.array(stage.padding.fill, np.uint8)[:, None, None],
        )

    def draw(self, keys_B: UInt64s, index_B: Int64s) -> list[Int64s]:
        """First row and step, first column and step: a mirrored window is walked backwards."""
        windows = place_stage(self._stage, self._stored, keys_B, index_B)
        drawn = []
        for first, flip, length in (
            (windows.top, windows.flip_v, self.size[0]),
            (windows.left, windows.flip_h, self.size[1]),
        ):
            backwards = np.broadcast_to(False if flip is None else flip, keys_B.shape)
            drawn += [np.where(backwards, first + (length - 1), first), np.where(backwards, -1, 1)]
        return drawn

    def positions(self, draws_DB: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (B, h) and columns (B, w) of the padded image that the windows show."""
        constants = self._constants.on(draws_DB.device)
        row, row_step, column, column_step = draws_DB[:, :, None].unbind()
        return (
            torch.addcmul(row, row_step, constants["rows"]),
            torch.addcmul(column, column_step, constants["columns"]),
        )

    def run(self, stored_NCHW: Tensor, index_B: Tensor | None, draws_DB: Tensor, channels_last: bool) -> Tensor:
        """See ``Kernel``."""
        row_Bh, column_Bw = self.positions(draws_DB)
        constants = self._constants.on(stored_NCHW.device)
        if self.is_padded:
            row_Bh, column_Bw = constants["row_at"][row_Bh], constants["column_at"][column_Bw]
        # Outside, at -1, it takes some other pixel, to be filled.
        crops = take(stored_NCHW, index_B, row_Bh, column_Bw, channels_last)
        if not self._is_filled:
            return crops
        inside_Bhw = (row_Bh >= 0)[:, :, None] & (column_Bw >= 0)[:, None]
        return torch.where(inside_Bhw[:, None], crops, constants["fill"], out=crops)


class GrayKernel:
    """Grayscale, by the formula of its domain, on one channel; the others are views of it."""

    draws = 0

    def __init__(self, op: Grayscale, size: Size) -> None:
        self._op = op
        self.size = size

    def draw(self, keys_B: UInt64s, index_B: Int64s) -> list[Int64s]:
        """Nothing."""
        return []

    def run(self, stored_NCHW: Tensor, index_B: Tensor | None, draws_DB: Tensor, channels_last: bool) -> Tensor:
        """See ``Kernel``."""
        source_BCHW = stored_NCHW if index_B is None else stored_NCHW.index_select(0, index_B)
        channels = source_BCHW.shape[1]
        if channels in (1, 2):
            luma = source_BCHW[:, :1]
        else:
            luma = _LUMAS[self._op.domain](source_BCHW[:, :1], source_BCHW[:, 1:2], source_BCHW[:, 2:3])
        return luma.expand(-1, gray_channels(self._op, channels), -1, -1)


def take(
    stored_NCHW: Tensor, index_B: Tensor | None, row_Bh: Tensor, column_Bw: Tensor, channels_last: bool = False
) -> Tensor:
    """Gather a grid of pixels of each sample: all its rows at those columns, in one kernel."""
    count, channels, height, width = stored_NCHW.shape
    planes_C = torch.arange(0, channels * height, height, device=stored_NCHW.device)
    index_B = torch.arange(count, device=stored_NCHW.device) if index_B is None else index_B
    first_BC = (index_B * (channels * height))[:, None] + planes_C
    lines_RW = stored_NCHW.reshape(-1, width)
    if channels_last:
        lines = first_BC[:, None, :] + row_Bh[:, :, None]
        return lines_RW[lines[:, :, None, :], column_Bw[:, None, :, None]].permute(0, 3, 1, 2)
    lines = first_BC[:, :, None] + row_Bh[:, None, :]
    return lines_RW[lines[..., None], column_Bw[:, None, None, :]]


def _pil_luma(red: Tensor, green: Tensor, blue: Tensor) -> Tensor:
    luma = red.to(torch.int32) * PIL_LUMA[0] + 0x8000
    return luma.add_(green, alpha=PIL_LUMA[1]).add_(blue, alpha=PIL_LUMA[2]).bitwise_right_shift_(16).to(torch.uint8)


def _v1_luma(red: Tensor, green: Tensor, blue: Tensor) -> Tensor:
    # Products are rounded before they are added: alpha= would fuse the two on a GPU.
    return (red * LUMA[0]).add_(green * LUMA[1]).add_(blue * LUMA[2]).to(torch.uint8)


def _v2_luma(red: Tensor, green: Tensor, blue: Tensor) -> Tensor:
    """Float32 with fused additions, in integers: not every device fuses, nor has float64.

    Scaled by 2**27 the weights are integers, sums are exact in int64, and each conversion to float32 rounds once.
    """
    luma = (red.to(torch.int64) * _SCALED_LUMA[0]).to(torch.float32)
    for channel, weight in ((green, _SCALED_LUMA[1]), (blue, _SCALED_LUMA[2])):
        luma = luma.to(torch.int64).add_(channel, alpha=weight).to(torch.float32)
    return luma.to(torch.int64).bitwise_right_shift_(_LUMA_BITS).to(torch.uint8)


_LUMA_BITS = 27
_SCALED_LUMA = tuple(int(np.float32(weight) * 2**_LUMA_BITS) for weight in LUMA)
_LUMAS = {"pil": _pil_luma, "v1": _v1_luma, "v2": _v2_luma}
