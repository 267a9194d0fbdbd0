"""Batch ops that only cut, pad and mirror, as one look-up on the device.

Shape letters: N stored samples, B batch, C channels, H W size stored, h w size served.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.cuda

from fastdata.pixels.arguments import MODES
from fastdata.pixels.arrays import Array, Int64s, Shape
from fastdata.pixels.plan import TransformPlan
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.steps import Step, place_of

if TYPE_CHECKING:
    from fastdata.loaders.resident import Tensor

_WINDOWS = ("pad", "crop", "center_crop", "flip")

_FILLED = -1


def window_obstacle(plan: TransformPlan, spec: SampleSpec) -> str:
    """Return why the batch ops before floats cannot cut a store on a device; empty if they can."""
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, not images (C, H, W)"
    steps = tuple(step for step in plan.batch_ops if step.name != "cast")
    unable = next((step for step in steps if not _only_cuts(step)), None)
    if unable is None and steps:
        # Windows that the core does not fuse to one, such as a border around a cropped image.
        drawn = _draw(Program(steps, spec), spec.shape, np.zeros(1, np.int64), 0, 0)
        unable = None if drawn.shape[1] == 1 else steps[-1]
    if unable is None:
        return ""
    return f"{plan.batch_texts[place_of(unable.at) - len(plan.prepare)]} runs on the CPU"


def _only_cuts(step: Step) -> bool:
    """Return True if a step only chooses rows and columns, or fills them."""
    if step.name == "sequence":
        return all(map(_only_cuts, step.children))
    return step.name in _WINDOWS


class Window:
    """All batch ops as one, if they only cut, pad and mirror samples.

    ``draw`` makes a batch's random numbers on the host, and ``cut`` its pixels, where the samples
    are. They are those of ``Program``, to the bit.

    Attributes:
        shape: of a sample as it is served, (C, h, w).
        tensors: what ``cut`` reads: the samples; then, of rows and of columns, which stored line
            each line of each window shows.
    """

    # The core draws one window for all steps that it fuses (OP_WINDOW of records.h). All but its
    # place, and whether it is mirrored, is the same for all samples.

    def __init__(self, program: Program, samples_NCHW: Tensor) -> None:
        stored_shape = tuple(samples_NCHW.shape[1:])
        output = program.output(stored_shape)
        assert output is not None
        self.shape, _ = output
        self.tensors = [samples_NCHW]
        self._draw_ops = partial(_draw, program, stored_shape)
        self._fill: list[int] = []  # a value for each channel
        [ops] = self._draw_ops(np.zeros(1, np.int64), 0, 0)
        if not len(ops):
            return
        border = ops[0]["window"]["border"]
        left, top, right, bottom = (
            int(border[side]) for side in ("left", "top", "right", "bottom")
        )
        mode = MODES[border["mode"]]
        for axis, border in ((1, (top, bottom)), (2, (left, right))):
            table = _line_table(stored_shape[axis], border, mode, self.shape[axis])
            self.tensors.append(torch.from_numpy(table).to(samples_NCHW.device))
        if mode == "constant" and left + top + right + bottom:
            colour = ops[0]["fill"].astype(int).tolist()
            self._fill = [colour[min(c, 3)] for c in range(stored_shape[0])]

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw the windows of a batch, on the host.

        Returns:
            int32 (2, B): of the rows, and of the columns, which window it is. None where samples
            are served as they are stored.
        """
        if len(self.tensors) == 1:
            return None
        _, rows, columns = map(len, self.tensors)
        windows_B = self._draw_ops(index_B, visits_B, seed)["window"][:, 0]
        # The second half of each table has the mirrored windows.
        row_B = windows_B["box"]["top"] + windows_B["mirrors_rows"] * (rows // 2)
        column_B = windows_B["box"]["left"] + windows_B["mirrors_columns"] * (columns // 2)
        return torch.from_numpy(np.stack([row_B, column_B]))

    def cut(self, index_B: Tensor, number_2B: Tensor | None) -> Tensor:
        """Serve samples (B, C, h, w), int64 ``index_B``, by what was drawn for them.

        All are on one device. Indices are not checked, which would wait for the device.
        """
        samples_NCHW, *tables = self.tensors
        batch_BCHW = samples_NCHW.index_select(0, index_B)
        if number_2B is None:
            return batch_BCHW
        channels, _, width = batch_BCHW.shape[1:]
        row_Bh = tables[0].index_select(0, number_2B[0])
        column_Bw = tables[1].index_select(0, number_2B[1])
        # Rows first, then columns of these: an index for each pixel would be read from memory.
        at_B1h1 = row_Bh.clamp(min=0)[:, None, :, None]
        lines_BChW = batch_BCHW.gather(2, at_B1h1.expand(-1, channels, -1, width))
        at_B11w = column_Bw.clamp(min=0)[:, None, None]
        cut = lines_BChW.gather(3, at_B11w.expand(-1, channels, row_Bh.shape[1], -1))
        if self._fill:
            is_filled_Bhw = (row_Bh < 0)[:, :, None] | (column_Bw < 0)[:, None]
            for plane_Bhw, value in zip(cut.unbind(1), self._fill, strict=True):
                plane_Bhw.masked_fill_(is_filled_Bhw, value)
        return cut


def _line_table(stored: int, border: tuple[int, int], mode: str, length: int) -> Array:
    """Return which stored line each line of a window shows: of every window, then mirrored.

    Args:
        stored: rows, or columns, of a stored sample.
        border: lines that are added before and behind them.
        mode: of the border. One of a constant colour shows no line: ``_FILLED``.
        length: lines of a window.
    """
    fill = {"constant_values": _FILLED} if mode == "constant" else {}
    lines = np.pad(np.arange(stored), border, mode, **fill)  # type: ignore[call-overload]
    windows: Array = np.lib.stride_tricks.sliding_window_view(lines, length)
    return np.concatenate([windows, windows[:, ::-1]])


def _draw(
    program: Program, shape: Shape, index_B: Int64s, visits_B: int | Int64s, seed: int
) -> Array:
    """Draw the core's ops for samples of one shape: records ``OP`` (B, S)."""
    return program.draw(index_B, visits_B, seed, np.full((len(index_B), 3), shape, np.int32))
