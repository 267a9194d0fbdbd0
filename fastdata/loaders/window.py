"""Batch ops that only cut, pad and mirror, as one look-up on the device.

Relies on the core to draw one window for all of them.

Shape letters: N stored samples, K windows, B batch, C channels, H W size stored, h w size served.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from fastdata.pixels.arguments import MODES
from fastdata.pixels.arrays import Array, Int64s, Shape
from fastdata.pixels.plan import TransformPlan
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.steps import Step, place_of

Tensor = torch.Tensor

_WINDOW_STEPS = ("pad", "crop", "center_crop", "flip")
_FILLED = -1
"""Stands in the tables for a line that shows no stored line, but the fill colour."""


class Window:
    """All batch ops as one, if they only cut, pad and mirror samples.

    ``draw`` draws the windows of a batch on the host, and ``cut`` makes its pixels where the
    samples are. Draws and pixels are those of ``Program``, to the bit.

    Attributes:
        shape: of a sample as it is served, (C, h, w).
        tensors: what ``cut`` reads: the samples; two tables, of rows and of columns, with a line
            for each window, which has the stored rows (or columns) that it shows; and the fill
            colour.
    """

    # The core draws one window for all steps that it fuses (OP_WINDOW of records.h). All but its
    # place, and whether it is mirrored, is the same for all samples. So the tables have a line for
    # each place: 9 KiB for the crops of CIFAR (9 places along each axis, and mirrored). An index
    # for each pixel of a batch would be eight times as large as the batch.

    def __init__(self, program: Program, samples_NCHW: Tensor) -> None:
        stored_shape = channels, height, width = tuple(samples_NCHW.shape[1:])
        output = program.output(stored_shape)
        assert output is not None
        self.shape, _ = output
        self.tensors = [samples_NCHW]
        self._draw_ops = partial(_draw, program, stored_shape)
        [ops] = self._draw_ops(np.zeros(1, np.int64), 0, 0)
        if not len(ops):
            return  # samples are served as they are stored
        border = ops[0]["window"]["border"]
        mode = MODES[border["mode"]]
        top = int(border["top"])
        bottom = int(border["bottom"])
        left = int(border["left"])
        right = int(border["right"])
        row_Kh = _line_table(height, (top, bottom), mode, self.shape[1])
        column_Kw = _line_table(width, (left, right), mode, self.shape[2])
        tables = [row_Kh[:, None, :, None], column_Kw[:, None, None]]
        if mode == "constant" and top + bottom + left + right:
            # A record has room for four channels; more are filled with the value of the last.
            channel_C = np.arange(channels).clip(max=3)
            fill_C = ops[0]["fill"].astype(np.uint8)[channel_C]
            tables.append(fill_C[:, None, None])
        for table in tables:
            self.tensors.append(torch.from_numpy(table).to(samples_NCHW.device))

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw the windows of a batch, on the host.

        Returns:
            int32 (2, B): for each sample its line in the table of rows, and in that of columns.
            None if samples are served as they are stored.
        """
        if len(self.tensors) == 1:
            return None
        rows = len(self.tensors[1])
        columns = len(self.tensors[2])
        windows_B = self._draw_ops(index_B, visits_B, seed)["window"][:, 0]
        box_B = windows_B["box"]
        # The second half of each table has the mirrored windows.
        row_B = box_B["top"] + windows_B["mirrors_rows"] * (rows // 2)
        column_B = box_B["left"] + windows_B["mirrors_columns"] * (columns // 2)
        return torch.from_numpy(np.stack([row_B, column_B]))

    def cut(self, index_B: Tensor, line_2B: Tensor | None) -> Tensor:
        """Cut samples (B, C, h, w), int64 ``index_B``, to the windows that were drawn for them.

        All tensors are on one device. Indices are not checked, which would wait for the device.
        """
        samples_NCHW, *tables = self.tensors
        batch_BCHW = samples_NCHW.index_select(0, index_B)
        if line_2B is None:
            return batch_BCHW
        rows_K1h1, columns_K11w, *fill = tables
        row_B1h1 = rows_K1h1.index_select(0, line_2B[0])
        column_B11w = columns_K11w.index_select(0, line_2B[1])
        # Rows first, then columns of these. The indices are broadcast, not stored: the kernels read
        # a few numbers again and again. A line that is to be filled shows line 0 so far.
        lines_BChW = torch.take_along_dim(batch_BCHW, row_B1h1.clamp(min=0), dim=2)
        cut_BChw = torch.take_along_dim(lines_BChW, column_B11w.clamp(min=0), dim=3)
        if not fill:
            return cut_BChw
        is_filled_B1hw = (row_B1h1 < 0) | (column_B11w < 0)
        return torch.where(is_filled_B1hw, fill[0], cut_BChw)


def _line_table(stored: int, border: tuple[int, int], mode: str, length: int) -> Array:
    """Return which stored line each line of a window shows: for every window, then mirrored.

    Args:
        stored: number of rows, or columns, of a stored sample.
        border: number of lines that are added before and behind them.
        mode: of the border.
        length: number of lines of a window.
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


def window_obstacle(plan: TransformPlan, spec: SampleSpec) -> str:
    """Return why the batch ops before floats cannot cut a store on a device; empty if they can."""
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, not images (C, H, W)"
    steps = tuple(step for step in plan.batch_ops if step.name != "cast")
    unable = [step for step in steps if not _only_cuts(step)]
    if steps and not unable:
        # Several windows are left if the core cannot fuse them, such as a border of another colour.
        drawn = _draw(Program(steps, spec), spec.shape, np.zeros(1, np.int64), 0, 0)
        if drawn.shape[1] > 1:
            unable.append(steps[-1])
    if not unable:
        return ""
    text = plan.batch_texts[place_of(unable[0].at) - len(plan.prepare)]
    return f"{text} runs on the CPU"


def _only_cuts(step: Step) -> bool:
    """Return True if a step only chooses rows and columns, or fills them."""
    if step.name == "sequence":
        return all(map(_only_cuts, step.children))
    return step.name in _WINDOW_STEPS
