"""Windows, casts and Normalize of a plan, for whole batches that lie on a device.

The host draws from which row and column of the stored sample each served one comes, the device
gathers them. It is asked for no value, so the host never waits. Steps of other kinds run in the
core before the transfer, which then sends the uint8 that is served.

Shape letters: N stored samples, B batch, C channels, H W size sent, h w size served, L = h + w.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdata.pixels.images import SampleSpec
from fastdata.pixels.ops import MODES, Cast, Int32s, Int64s, Op, size_after, step_number
from fastdata.pixels.plan import TransformPlan
from fastdata.pixels.program import Program

Tensor = torch.Tensor
Shape = tuple[int, ...]

_WINDOWS = ("STEP_PAD", "STEP_CROP", "STEP_CENTER_CROP", "STEP_FLIP")
"""Ops that become windows alone, as many of any sample."""
_MIRRORED = (2, 1)
"""Bits of a window's record: upside down, left to right."""


def device_obstacle(plan: TransformPlan, spec: SampleSpec) -> str | None:
    """Why the batch ops of a plan cannot run on a device, on samples of this spec; None if they can."""
    if plan.obstacle is not None:
        return plan.obstacle
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        found = f"{spec.dtype} of shape {spec.shape}"
        return f"the stored samples are {found}, and not uint8 images (C, H, W)"
    if any(op.code == "OP_CAST" for op in plan.batch_ops[:-1]):
        return "erasing or noise comes after the conversion to floats"
    try:
        output = Program(plan.batch_ops, spec).output(spec.shape)
    except ValueError as error:
        return str(error).rstrip(".")
    return None if output else "the images that are served differ in size"


class DeviceProgram:
    """Batch ops on dense uint8 batches, the last of them on a device; safe from several threads.

    ``host`` is what runs before the transfer, and ``host_step`` the step that asks for it; None and
    empty where samples are sent as they are stored. Pixels are those of ``Program`` for the same
    seed, visits and indices: uint8 is bit-equal, normalised floats come from one fused
    multiplication and addition, within 1e-6 of its larger term.

    Args:
        plan: of the dataset; has no ``device_obstacle``.
        spec: of the samples.
        dtype: of what is served, instead of the plan's float32 or float64; rounded once. Uint8
            stays uint8.
        channels_last: whether batches lie in memory with their channels last.
    """

    def __init__(
        self,
        plan: TransformPlan,
        spec: SampleSpec,
        *,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
    ) -> None:
        served = Program(plan.batch_ops, spec).output(spec.shape)
        assert served is not None
        assert spec.shape is not None
        ops = plan.batch_ops
        self._floats: _Floats | None = None
        if ops and ops[-1].code == "OP_CAST":
            self._floats = _Floats(dtype, ops[-1].about)
            ops = ops[:-1]
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.output: tuple[Shape, torch.dtype] = (
            served[0],
            self._floats.dtype if self._floats else torch.uint8,
        )
        self.sent_shape: Shape = spec.shape
        self.host: Program | None = None
        self.host_step = ""
        self._program = Program(ops, spec)
        self._windows: list[tuple[Shape, str | None]] = []  # size cut from, mode of its borders
        self._fill: list[int] = []
        if not all(op.code in _WINDOWS for op in ops) or not self._fits():
            channels, _ = size_after(ops, spec.shape[0], None)
            self.sent_shape = (channels, *served[0][1:])
            self.host = self._program
            self.host_step = plan.batch_texts[step_number(_asking(ops).at) - len(plan.prepare)]
            self._windows = []

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw the places of a batch on the host, for what ``run`` is given.

        Returns:
            int16 (B, h + w): the row of the sample sent that each row served comes from, then the
            columns; -1 is filled. None where samples are served whole as they are sent.
        """
        if not self._windows:
            return None
        rows, columns = self.output[0][1:]
        place_BL = np.empty((len(index_B), rows + columns), np.int16)
        if len(index_B):
            records_SB = self._records(index_B, visits_B, seed).T
            place_BL[:, :rows] = self._places(records_SB, 0, rows)
            place_BL[:, rows:] = self._places(records_SB, 1, columns)
        return torch.from_numpy(place_BL)

    def run(
        self, stored_NCHW: Tensor, draws: Tensor | None, index_B: Tensor | None = None
    ) -> Tensor:
        """Serve a batch, uint8 as stored or as ``host`` made it; draws lie on the same device.

        ``index_B``, int64 and on the same device, chooses from a store there, contiguous, whose
        samples are not copied whole; it is not checked to be in [0, N), which would wait for the
        device.

        Returns:
            (B, C, h, w) of ``output``'s dtype, in fresh memory; the batch itself where there is
            nothing to do.
        """
        batch = stored_NCHW
        if draws is not None:
            batch = self._cut(stored_NCHW, index_B, draws.to(torch.int64))
        elif index_B is not None:
            batch = stored_NCHW.index_select(0, index_B)
        if self._floats is not None:
            batch = self._floats.convert(batch)
        return batch.contiguous(memory_format=self._layout)

    def _records(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> npt.NDArray[Any]:
        shapes_B3 = np.full((len(index_B), 3), self.sent_shape, np.int32)
        return self._program.draw(index_B, visits_B, seed, shapes_B3)

    def _fits(self) -> bool:
        """Note the windows; whether one pass can cut them: one fill, and places that are int16."""
        size = self.sent_shape[1:]
        fills = []
        for record in self._records(np.zeros(1, np.int64), 0, 0)[0]:
            n = record["n"].tolist()
            mode = MODES[n[8] >> 8] if any(n[:4]) else None
            if mode == "constant":
                fills.append(record["v"][8:12].astype(int).tolist())
            self._windows.append((size, mode))
            size = (n[6], n[7])
        self._fill = fills[0] if fills else []
        return all(fill == fills[0] for fill in fills) and max(self.sent_shape[1:]) < 1 << 15

    def _places(self, records_SB: npt.NDArray[Any], axis: int, length: int) -> Int32s:
        """Follow each row (axis 0) or column (axis 1) served back through the windows."""
        place_BL = np.arange(length, dtype=np.int32)[None]
        outside_BL = None
        # A window alone is a first place and a step, of each sample: what is small stays small.
        first_B1 = np.zeros((1, 1), np.int32)
        step_B1 = np.ones((1, 1), np.int32)
        for record_B, (size, mode) in zip(records_SB[::-1], self._windows[::-1], strict=True):
            n_B1 = record_B["n"].T[:, :, None]
            is_mirrored_B1 = (n_B1[8] & _MIRRORED[axis]) != 0
            first_B1 = np.where(is_mirrored_B1, n_B1[6 + axis] - 1 - first_B1, first_B1)
            first_B1 = first_B1 + n_B1[4 + axis] - n_B1[1 - axis]
            step_B1 = np.where(is_mirrored_B1, -step_B1, step_B1)
            if mode is None:
                continue
            place_BL = step_B1 * place_BL + first_B1
            first_B1 = np.zeros_like(first_B1)
            step_B1 = np.ones_like(step_B1)
            if mode in ("symmetric", "reflect"):
                place_BL = _reflected(place_BL, size[axis], edge=mode == "reflect")
                continue
            inside_BL = place_BL.clip(0, size[axis] - 1)
            if mode == "constant":
                is_new_BL = inside_BL != place_BL
                outside_BL = is_new_BL if outside_BL is None else outside_BL | is_new_BL
            place_BL = inside_BL
        place_BL = step_B1 * place_BL + first_B1
        return place_BL if outside_BL is None else np.where(outside_BL, np.int32(-1), place_BL)

    def _cut(self, stored_NCHW: Tensor, index_B: Tensor | None, place_BL: Tensor) -> Tensor:
        count, channels, height, width = stored_NCHW.shape
        rows = self.output[0][1]
        device = stored_NCHW.device
        inside_BL = place_BL.clamp(min=0) if self._fill else place_BL
        if index_B is None:
            index_B = torch.arange(count, device=device)
        channel_C = torch.arange(channels, device=device)
        plane_BC = channel_C.add(index_B[:, None], alpha=channels)
        line_BCh = inside_BL[:, None, :rows].add(plane_BC[:, :, None], alpha=height)
        lines = stored_NCHW.reshape(-1, width).index_select(0, line_BCh.view(-1))
        column_BChw = inside_BL[:, None, None, rows:].expand(-1, channels, rows, -1)
        cut = lines.view(*line_BCh.shape, width).gather(3, column_BChw)
        if self._fill:
            outside_BL = place_BL < 0
            outside_Bhw = outside_BL[:, :rows, None] | outside_BL[:, None, rows:]
            for c in range(channels):
                cut[:, c].masked_fill_(outside_Bhw, self._fill[min(c, 3)])
        return cut


def _asking(ops: tuple[Op, ...]) -> Op:
    """The op that the device has no form of, or else one that pads."""
    return min(ops, key=lambda op: (op.code in _WINDOWS, op.code not in ("STEP_PAD", "STEP_CROP")))


def _reflected(place_BL: Int32s, length: int, *, edge: bool) -> Int32s:
    """Places beyond the borders, mirrored; the pixels there come twice unless it is an ``edge``."""
    shift = 0 if edge else 1
    period = max(2 * (length - 1 + shift), 1)
    folded_BL = place_BL % period
    return np.minimum(folded_BL, period - shift - folded_BL)


class _Floats:
    """Conversion to floats and normalisation in one pass over the pixels."""

    def __init__(self, asked: torch.dtype | None, cast: Cast) -> None:
        served: torch.dtype = getattr(torch, cast.dtype)
        self.dtype = asked or served
        self._computed = torch.float64 if served == torch.float64 else torch.float32
        self._channels = max((len(mean) for mean, *_ in cast.normalizations), default=1)
        self._divides = cast.scaling == "divide" and not cast.normalizations
        scale = np.full(self._channels, 1.0 if cast.scaling == "none" else 1 / 255)
        offset = np.zeros(self._channels)
        for mean, std, _ in cast.normalizations:
            scale = scale / np.array(std)
            offset = (offset - np.array(mean)) / np.array(std)
        self._affine = torch.tensor(np.stack([offset, scale]), dtype=self._computed)
        self._on: dict[torch.device, Tensor] = {}

    def convert(self, source_BChw: Tensor) -> Tensor:
        """Convert uint8; the layout in memory stays the same."""
        device = source_BChw.device
        out = None
        if self.dtype != self._computed:  # rounded on the way to memory
            wide = source_BChw.expand(-1, max(source_BChw.shape[1], self._channels), -1, -1)
            out = torch.empty_like(wide, dtype=self.dtype)
        if self._divides:
            # Not by a number of the host: CUDA multiplies with its rounded inverse.
            divisor = torch.full((1,), 255.0, dtype=self._computed, device=device)
            return torch.div(source_BChw, divisor, out=out)
        if device not in self._on:  # two threads at once may both bring it there
            self._on[device] = self._affine.to(device)[:, :, None, None]
        offset_C11, scale_C11 = self._on[device]
        return torch.addcmul(offset_C11, source_BChw, scale_C11, out=out)
