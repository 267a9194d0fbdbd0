"""A plan's batch ops for batches that lie on a device: windows, casts and Normalize, whole batches at a time.

Every shape is known beforehand, what differs between samples is where rows and columns come from, which the host draws.
Nothing asks the device for a value, so the host never waits. Steps of other kinds run in the compiled core before the
transfer, which then sends the uint8 that is served.

Shape letters: N stored samples, B batch, C channels, H W size sent, h w size served.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdata.core import Code
from fastdata.images import SampleSpec
from fastdata.transforms.cpu import Program
from fastdata.transforms.ops import (
    MODES,
    WINDOWS,
    Int64s,
    draw_cast,
    draw_center_crop,
    draw_flip,
    size_after,
    step_number,
)
from fastdata.transforms.plan import TransformPlan

Tensor = torch.Tensor
Shape = tuple[int, ...]


def device_obstacle(plan: TransformPlan, spec: SampleSpec) -> str | None:
    """Say why the batch ops of a plan cannot run on a device, on samples of this spec; None if they can."""
    if plan.obstacle is not None:
        return plan.obstacle
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, and not uint8 images (C, H, W)"
    if any(op.draw is draw_cast for op in plan.batch_ops[:-1]):
        return "erasing or noise comes after the conversion to floats"
    try:
        return None if Program(plan.batch_ops, spec).output(spec.shape) else "the images that are served differ in size"
    except ValueError as error:
        return str(error).rstrip(".")


class DeviceProgram:
    """Batch ops on dense uint8 batches, the last of them on a device; safe from several threads.

    ``host`` is what runs before the transfer, and ``host_step`` the step that asks for it; None and empty where samples
    are sent as they are stored. ``draw`` makes a batch's random numbers on the host, ``run`` its pixels, wherever the
    tensors lie that it is given. They are those of ``Program`` for the same seed, visits and indices: uint8 is
    bit-equal, normalised floats come from one fused multiplication and addition, within 1e-6 of its larger term.

    In bytes moved for each pixel served, where F is the size of a float: rows and columns of windows 4, a constant
    border 3 more, the conversion to floats 1 + F.

    Args:
        plan: of the dataset; has no ``device_obstacle``.
        spec: of the samples.
        dtype: of what is served, instead of the plan's float32 or float64; rounded once. Uint8 stays uint8.
        channels_last: whether batches lie in memory with their channels last.
    """

    def __init__(
        self, plan: TransformPlan, spec: SampleSpec, *, dtype: torch.dtype | None = None, channels_last: bool = False
    ) -> None:
        assert spec.shape is not None
        ops, self._layout = plan.batch_ops, torch.channels_last if channels_last else torch.contiguous_format
        self._floats: _Floats | None = None
        if ops and ops[-1].draw is draw_cast:
            self._floats, ops = _Floats(dtype, **ops[-1].arguments), ops[:-1]
        served = Program(plan.batch_ops, spec).output(spec.shape)
        assert served is not None
        self.output: tuple[Shape, torch.dtype] = (served[0], self._floats.dtype if self._floats else torch.uint8)
        self.host: Program | None = None
        self.host_step = ""
        self._fill: tuple[float, ...] | None = None
        self._windows = Program(ops, spec)
        self.sent_shape: Shape = spec.shape
        others = [op for op in ops if op.draw not in WINDOWS]
        self._draws = bool(ops)
        if others or not self._fits(spec.shape):
            self.host, self._draws = self._windows, False
            channels, _ = size_after(ops, spec.shape[0], None)
            self.sent_shape = (channels, *served[0][1:])
            asking = next((op for op in others or ops if op.draw not in (draw_center_crop, draw_flip)), ops[0])
            self.host_step = plan.batch_texts[step_number(asking.at) - len(plan.prepare)]

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw where the rows and columns of a batch come from, on the host, for what ``Program.run`` is given.

        Returns:
            int16 (B, h + w), -1 for what is filled; None where samples are served whole as they are sent.
        """
        if not self._draws:
            return None
        if not len(index_B):
            return torch.empty((0, sum(self.output[0][1:])), dtype=torch.int16)
        records_SB = self._records(index_B, visits_B, seed, self.sent_shape)
        axes = [_positions(records_SB, self.sent_shape[1 + axis], axis) for axis in (0, 1)]
        return torch.from_numpy(np.concatenate(axes, axis=1).astype(np.int16))

    def run(self, stored_NCHW: Tensor, draws: Tensor | None, index_B: Tensor | None = None) -> Tensor:
        """Serve a batch, uint8 as stored or as ``host`` made it, which is only read; draws lie on the same device.

        ``index_B``, int64 and on the same device, chooses from a store there, contiguous, whose samples are not copied
        whole; it is not checked to be in [0, N), which would wait for the device.

        Returns:
            (B, C, h, w) of ``output``'s dtype, in fresh memory; the batch itself where there is nothing to do.
        """
        batch = stored_NCHW
        if draws is not None:
            batch = self._cut(stored_NCHW, index_B, draws)
        elif index_B is not None:
            batch = stored_NCHW.index_select(0, index_B)
        batch = self._floats.convert(batch) if self._floats else batch
        return batch.contiguous(memory_format=self._layout)

    def _records(self, index_B: Int64s, visits_B: int | Int64s, seed: int, shape: Shape) -> npt.NDArray[Any]:
        shapes_B3 = np.full((len(index_B), 3), shape, np.int32)
        return self._windows.draw(index_B, visits_B, seed, shapes_B3).records

    def _fits(self, shape: Shape) -> bool:
        records = self._records(np.zeros(1, np.int64), 0, 0, shape)[:, 0]
        filled = [r for r in records if r["n"][:4].any() and r["n"][8] >> 8 == MODES.index("constant")]
        fills = {tuple(record["v"][8 : 8 + min(4, shape[0])].tolist()) for record in filled}
        self._fill = next(iter(fills), None)
        return len(fills) < 2 and max(shape[1:]) < 1 << 15

    def _cut(self, stored_NCHW: Tensor, index_B: Tensor | None, draws: Tensor) -> Tensor:
        count, channels, height, width = stored_NCHW.shape
        rows = self.output[0][1]
        places = draws.to(torch.int64)
        row_Bh, column_Bw = places[:, :rows], places[:, rows:]
        if index_B is None:
            index_B = torch.arange(count, device=stored_NCHW.device)
        planes_C = torch.arange(0, channels * height, height, device=stored_NCHW.device)
        lines = ((index_B * (channels * height))[:, None] + planes_C)[:, :, None] + row_Bh.clamp(min=0)[:, None, :]
        taken = stored_NCHW.reshape(-1, width).index_select(0, lines.view(-1)).view(*lines.shape, width)
        columns = column_Bw.clamp(min=0)[:, None, None, :].expand(-1, channels, rows, -1)
        cut = taken.gather(3, columns)
        if self._fill is None:
            return cut
        outside = (row_Bh < 0)[:, None, :, None] | (column_Bw < 0)[:, None, None, :]
        for c in range(channels):
            cut[:, c].masked_fill_(outside[:, 0], int(self._fill[min(c, len(self._fill) - 1)]))
        return cut


class _Floats:
    """Conversion to floats and normalisation in one pass over the pixels."""

    def __init__(self, asked: torch.dtype | None, dtype: str, scaling: str, normalizations: Any) -> None:
        served: torch.dtype = getattr(torch, dtype)
        self._computed = torch.float64 if served == torch.float64 else torch.float32
        self.dtype = asked or served
        self._channels = max((len(mean) for mean, *_ in normalizations), default=1)
        self._divides = scaling == "divide" and not normalizations
        scale = np.full(self._channels, 1.0 if scaling == "none" else 1 / 255)
        offset = np.zeros(self._channels)
        for mean, std, _ in normalizations:
            scale, offset = scale / np.array(std), (offset - np.array(mean)) / np.array(std)
        # A divisor that lies on the device: by a number of the host, CUDA multiplies with its rounded inverse.
        self._host = [torch.tensor([255.0], dtype=self._computed)]
        self._host += [torch.tensor(each, dtype=self._computed)[:, None, None] for each in (scale, offset)]
        self._on: dict[torch.device, list[Tensor]] = {}
        self._shifts = bool(offset.any())

    def convert(self, source_BChw: Tensor) -> Tensor:
        """Convert uint8; the layout in memory stays the same."""
        device = source_BChw.device
        if device not in self._on:  # the only copies that block; two threads at once may both make them
            self._on[device] = [tensor.to(device) for tensor in self._host]
        divisor, scale, offset = self._on[device]
        out = None
        if self.dtype != self._computed:  # rounded on the way to memory
            wide = source_BChw.expand(-1, max(source_BChw.shape[1], self._channels), -1, -1)
            out = torch.empty_like(wide, dtype=self.dtype)
        if self._divides:
            return torch.div(source_BChw, divisor, out=out)
        if self._shifts:
            return torch.addcmul(offset, source_BChw, scale, out=out)
        return torch.mul(source_BChw, scale, out=out)


def _positions(records_SB: npt.NDArray[Any], length: int, axis: int) -> Int64s:
    """Where each row (axis 0) or column (axis 1) served comes from; -1 for what is filled."""
    place_BL = np.broadcast_to(np.arange(length, dtype=np.int64), (records_SB.shape[1], length))
    for record_B in records_SB[records_SB["code"][:, 0] == Code.WINDOW]:
        n = record_B["n"].astype(np.int64)
        wanted = int(n[0, 6 + axis])
        step = np.arange(wanted)
        is_mirrored_B = (n[:, 8] & (2 if axis == 0 else 1)).astype(bool)
        at_BL = np.where(is_mirrored_B[:, None], wanted - 1 - step, step) + (n[:, 4 + axis] - n[:, 1 - axis])[:, None]
        at_BL = _mirrored_into(at_BL, place_BL.shape[1], MODES[int(n[0, 8]) >> 8])
        place_BL = np.where(at_BL < 0, -1, np.take_along_axis(place_BL, np.maximum(at_BL, 0), axis=1))
    return place_BL


def _mirrored_into(at: Int64s, length: int, mode: str) -> Int64s:
    """The place in the image of a place beyond its borders; -1 where these are constant."""
    if mode == "constant":
        return np.where((at >= 0) & (at < length), at, -1)
    if mode == "edge":
        return np.clip(at, 0, length - 1)
    edge = 0 if mode == "symmetric" else 1
    period = max(2 * (length - edge), 1)
    folded = at % period
    return np.where(folded < length, folded, period - 1 + edge - folded)
