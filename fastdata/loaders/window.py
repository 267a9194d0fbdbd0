"""Batch ops that only cut, pad and mirror, done by one indexing operation on the device.

The core draws one window for all of them.

Shape letters: N stored samples, K windows, B batch, C channels, H W size stored, h w size served.
"""

from __future__ import annotations

import numpy as np
import torch

from fastdata.pixels.arguments import MODES
from fastdata.pixels.arrays import Array, Int64s, Shape
from fastdata.pixels.plan import TransformPlan, text_of_transform
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.steps import Step, place_of

Tensor = torch.Tensor

_WINDOW_STEPS = ("pad", "crop", "center_crop", "flip")
_FILLED = -1
"""Marks a line in the tables that has the fill colour instead of a stored line."""


class Window:
    """Runs all batch ops at once, if they only cut, pad and mirror samples.

    ``draw`` draws the windows of a batch on the host. ``cut`` makes the pixels on the device of the
    samples. Draws and pixels are exactly those of ``Program``.

    Attributes:
        shape: shape of a sample in a batch, (C, h, w).
        tensors: the inputs of ``cut``: the samples; a table of rows and one of columns, whose line
            k has the indices of the stored rows (or columns) of window k; and the fill colour, if
            there is one.
    """

    # The core draws one window for all steps that it fuses (OP_WINDOW of records.h). Windows differ
    # only in their place, and in whether they are mirrored. So each table has a line for each
    # place: 9 KiB for the crops of CIFAR (9 places along each axis, and mirrored). An index for
    # each pixel of a batch would be eight times as large as the batch.

    def __init__(self, program: Program, samples_NCHW: Tensor) -> None:
        self._program = program
        self._stored = tuple(samples_NCHW.shape[1:])
        output = program.output(self._stored)
        assert output is not None
        self.shape, _ = output
        self.tensors = [samples_NCHW]
        ops_S = _draw_one(program, self._stored)
        if len(ops_S) == 0:
            return  # samples are not changed
        for table in _tables(ops_S[0], self._stored, self.shape):
            on_host = torch.from_numpy(table)
            self.tensors.append(on_host.to(samples_NCHW.device))

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw the windows of a batch, on the host.

        Returns:
            int32 (2, B): the line of each sample in the table of rows, and in that of columns.
            None if samples are not changed.
        """
        if len(self.tensors) == 1:
            return None
        _, rows, columns, *_ = self.tensors
        shape_13 = np.array([self._stored], np.int32)
        shapes_B3 = shape_13.repeat(len(index_B), axis=0)
        ops_BS = self._program.draw(index_B, visits_B, seed, shapes_B3)
        windows_B = ops_BS["window"][:, 0]
        box_B = windows_B["box"]
        # The second half of each table has the mirrored windows.
        row_B = box_B["top"] + windows_B["mirrors_rows"] * (len(rows) // 2)
        column_B = box_B["left"] + windows_B["mirrors_columns"] * (len(columns) // 2)
        line_2B = np.stack([row_B, column_B])
        return torch.from_numpy(line_2B)

    def cut(self, index_B: Tensor, line_2B: Tensor | None) -> Tensor:
        """Cut samples (B, C, h, w), int64 ``index_B``, to the windows that were drawn for them.

        All tensors are on one device. Indices are not checked: a check would wait for the device.
        """
        samples_NCHW, *tables = self.tensors
        batch_BCHW = samples_NCHW.index_select(0, index_B)
        if line_2B is None:
            return batch_BCHW
        rows_K1h1, columns_K11w, *fill = tables
        row_B1h1 = rows_K1h1.index_select(0, line_2B[0])
        column_B11w = columns_K11w.index_select(0, line_2B[1])
        # Rows first, then columns of these. The indices are broadcast, not copied: the kernels read
        # a few numbers again and again. Lines to be filled have the pixels of line 0 at first.
        shown_B1h1 = row_B1h1.clamp(min=0)
        shown_B11w = column_B11w.clamp(min=0)
        lines_BChW = batch_BCHW.take_along_dim(shown_B1h1, dim=2)
        cut_BChw = lines_BChW.take_along_dim(shown_B11w, dim=3)
        if not fill:
            return cut_BChw
        fills_row = row_B1h1 < 0
        fills_column = column_B11w < 0
        is_filled_B1hw = fills_row | fills_column
        return torch.where(is_filled_B1hw, fill[0], cut_BChw)


def _tables(op: Array, stored: Shape, served: Shape) -> list[Array]:
    """Return the tables of rows and of columns, and the fill colour if a line may be filled.

    Each table broadcasts over a batch (B, C, h, w). ``op`` is any record that was drawn.
    """
    channels, stored_height, stored_width = stored
    _, height, width = served
    border = op["window"]["border"]
    mode = MODES[border["mode"]]
    above_below = (int(border["top"]), int(border["bottom"]))
    left_right = (int(border["left"]), int(border["right"]))
    row_Kh = _line_table(stored_height, above_below, mode, height)
    column_Kw = _line_table(stored_width, left_right, mode, width)
    rows_K1h1 = row_Kh.reshape(-1, 1, height, 1)
    columns_K11w = column_Kw.reshape(-1, 1, 1, width)
    tables = [rows_K1h1, columns_K11w]
    if mode == "constant" and any(above_below + left_right):
        # A record has room for four channels; all others are filled with the value of the last.
        channel_C = np.arange(channels).clip(max=3)
        fill_C = op["fill"].astype(np.uint8)[channel_C]
        tables.append(fill_C.reshape(-1, 1, 1))
    return tables


def _line_table(stored: int, border: tuple[int, int], mode: str, length: int) -> Array:
    """Return the indices of the stored lines in each window: all windows, then all mirrored ones.

    Args:
        stored: number of rows, or columns, of a stored sample.
        border: number of lines that are added before and after them.
        mode: mode of the border.
        length: number of lines of a window.
    """
    fill = {"constant_values": _FILLED} if mode == "constant" else {}
    lines = np.arange(stored)
    lines = np.pad(lines, border, mode, **fill)  # type: ignore[call-overload]
    windows: Array = np.lib.stride_tricks.sliding_window_view(lines, length)
    mirrored = windows[:, ::-1]
    return np.concatenate([windows, mirrored])


def _draw_one(program: Program, shape: Shape) -> Array:
    """Draw the core's ops for a sample of this shape: records ``OP`` (S,)."""
    index_1 = np.zeros(1, np.int64)
    shape_13 = np.array([shape], np.int32)
    ops_1S = program.draw(index_1, 0, 0, shape_13)
    return ops_1S[0, :]


def window_obstacle(plan: TransformPlan, spec: SampleSpec) -> str:
    """Return why batch ops cannot cut samples on a device; empty if they can.

    The conversion to floats is not considered: it always can run there.
    """
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, not images (C, H, W)"
    steps = tuple(step for step in plan.batch_ops if step.name != "cast")
    unable = [step for step in steps if not _only_cuts(step)]
    if steps and not unable:
        # Several windows are left if the core cannot fuse them, such as a border of another colour.
        ops_S = _draw_one(Program(steps, spec), spec.shape)
        if len(ops_S) > 1:
            unable.append(steps[-1])
    if not unable:
        return ""
    place = place_of(unable[0].at)
    transform = plan.batched[place - len(plan.prepare)]
    return f"{text_of_transform(transform)} runs on the CPU"


def _only_cuts(step: Step) -> bool:
    """Return True if a step only chooses rows and columns, or fills them."""
    if step.name == "sequence":
        return all(map(_only_cuts, step.children))
    return step.name in _WINDOW_STEPS
