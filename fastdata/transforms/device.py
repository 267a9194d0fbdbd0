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
from fastdata.draws import sample_keys
from fastdata.spec import SampleSpec
from fastdata.transforms.cpu import Program, finish_noise
from fastdata.transforms.ops import MODES, Cast, CenterCrop, Drawing, Flip, Normalize, Pad, step_position
from fastdata.transforms.plan import TransformPlan

Tensor = torch.Tensor
Int64s = npt.NDArray[np.int64]
Shape = tuple[int, ...]


def device_obstacle(plan: TransformPlan, spec: SampleSpec) -> str | None:
    """Say why the batch ops of a plan cannot run on a device; None if they can.

    Args:
        plan: of the dataset.
        spec: of its stored samples.
    """
    if plan.obstacle is not None:
        return plan.obstacle
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, and not uint8 images (C, H, W)"
    ops, _ = finish_noise(plan.batch_ops)
    if any(isinstance(op, Cast) for op in ops):
        return "erasing or noise comes after the conversion to floats"
    try:
        for op in plan.batch_ops:
            op.channels_after(spec.shape[0])
    except ValueError as error:
        return str(error).rstrip(".")
    return None if Program(plan.batch_ops, spec).output(spec.shape) else "the images that are served differ in size"


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

    Raises:
        ValueError: ``device_obstacle`` says why not.
    """

    def __init__(
        self,
        plan: TransformPlan,
        spec: SampleSpec,
        *,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
    ) -> None:
        obstacle = device_obstacle(plan, spec)
        if obstacle is not None:
            raise ValueError(f"batch ops cannot run on the device: {obstacle}. Run them on the CPU.")
        assert spec.shape is not None
        self._channels_last = channels_last
        ops, normalizations = finish_noise(plan.batch_ops)
        casts = [op for op in plan.batch_ops if isinstance(op, Cast)]
        self._spec, self._windows = spec, ops
        self.host: Program | None = None
        self.host_step = ""
        self._fill: tuple[float, ...] | None = None
        others = [op for op in ops if not isinstance(op, (Pad, Flip, CenterCrop))]
        if others or not self._fits():
            self.host, self._windows = Program(ops, spec), ()
            asking = others[0] if others else max(ops, key=lambda op: isinstance(op, Pad))
            self.host_step = plan.batch_texts[step_position(asking.position) - len(plan.prepare)]
        served = (self.host or Program(ops, spec)).output(spec.shape)
        assert served is not None
        self.sent_shape: Shape = served[0] if self.host else spec.shape
        self._floats = _Floats(casts[0], normalizations, dtype) if casts else None
        size = served[0][1:]
        channels = spec.shape[0]
        for op in plan.batch_ops:
            channels = op.channels_after(channels)
        self.output: tuple[Shape, torch.dtype] = (
            (channels, *size),
            self._floats.dtype if self._floats else torch.uint8,
        )

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw where the rows and columns of a batch come from, on the host.

        Args:
            index_B: which samples.
            visits_B: what draws are made from, as of ``fastdata.visits``: one for all samples, or one for each.
            seed: of the draws.

        Returns:
            int16 (B, h + w), -1 for what is filled; None where samples are served whole as they are sent.
        """
        if not self._windows:
            return None
        if not len(index_B):
            return torch.empty((0, sum(self.output[0][1:])), dtype=torch.int16)
        records = self._draw(index_B, visits_B, seed)
        axes = (_positions(records, self.sent_shape[1], 0), _positions(records, self.sent_shape[2], 1))
        return torch.from_numpy(np.concatenate(axes, axis=1).astype(np.int16))

    def run(self, sent_BCHW: Tensor, draws: Tensor | None) -> Tensor:
        """Serve a batch.

        Args:
            sent_BCHW: uint8, as stored or as ``host`` made it; only read.
            draws: from ``draw``, on the same device.

        Returns:
            (B, C, h, w) of ``output``'s dtype, in fresh memory; the batch itself where there is nothing to do.
        """
        self._check(sent_BCHW)
        if draws is None:
            return self._finish(sent_BCHW)
        return self._finish(self._cut(sent_BCHW, None, draws))

    def gather_run(self, store_NCHW: Tensor, index_B: Tensor, draws: Tensor | None) -> Tensor:
        """Serve a batch from a store on the device; rows are taken from there, without a copy of samples.

        Args:
            store_NCHW: uint8, contiguous; only read.
            index_B: int64, on the same device, each in [0, N); not checked, that would wait for the device.
            draws: from ``draw`` for these indices, on the same device.
        """
        self._check(store_NCHW)
        if draws is None:
            return self._finish(store_NCHW.index_select(0, index_B))
        return self._finish(self._cut(store_NCHW, index_B, draws))

    def _draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> npt.NDArray[Any]:
        shape = self._spec.shape
        assert shape is not None
        height_B, width_B = (np.full(len(index_B), length, np.int64) for length in shape[1:])
        drawing = Drawing(sample_keys(seed, visits_B, index_B), index_B, height_B, width_B, shape[0])
        for op in self._windows:
            op.draw(drawing)
        return drawing.records()

    def _fits(self) -> bool:
        """Whether windows can be one list of rows and one of columns: all constant borders have one fill."""
        assert self._spec.shape is not None
        records = self._draw(np.zeros(1, np.int64), 0, 0)[0]
        filled = [r for r in records if r["n"][:4].any() and r["n"][8] >> 8 == MODES.index("constant")]
        fills = {tuple(record["v"][8 : 8 + min(4, self._spec.shape[0])].tolist()) for record in filled}
        self._fill = next(iter(fills), None)
        return len(fills) < 2 and max(self._spec.shape[1:]) < 1 << 15

    def _cut(self, stored_NCHW: Tensor, index_B: Tensor | None, draws: Tensor) -> Tensor:
        """Take all rows, then all columns of those: two indices at once would be spread out over every pixel."""
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

    def _finish(self, batch: Tensor) -> Tensor:
        if self._floats:
            batch = self._floats.convert(batch)
        return batch.contiguous(memory_format=torch.channels_last if self._channels_last else torch.contiguous_format)

    def _check(self, sent: Tensor) -> None:
        if sent.dtype != torch.uint8 or sent.shape[1:] != self.sent_shape:
            raise ValueError(
                f"the program is for uint8 samples of shape {self.sent_shape}, but got a batch of {sent.dtype} "
                f"and shape {tuple(sent.shape)}. Give it samples as they are stored."
            )


class _Floats:
    """Conversion to floats and normalisation in one pass over the pixels."""

    def __init__(self, cast: Cast, normalizations: tuple[Normalize, ...], dtype: torch.dtype | None) -> None:
        served: torch.dtype = getattr(torch, cast.dtype)
        self._computed = torch.float64 if served == torch.float64 else torch.float32
        self.dtype = dtype or served
        self._channels = max((len(step.mean) for step in normalizations), default=1)
        self._divides = cast.scaling == "divide" and not normalizations
        scale = np.full(self._channels, 1.0 if cast.scaling == "none" else 1 / 255)
        offset = np.zeros(self._channels)
        for step in normalizations:
            scale, offset = scale / np.array(step.std), (offset - np.array(step.mean)) / np.array(step.std)
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


def _positions(records_BS: npt.NDArray[Any], length: int, axis: int) -> Int64s:
    """Where each row (axis 0) or column (axis 1) served comes from; -1 for what is filled."""
    place_BL = np.broadcast_to(np.arange(length, dtype=np.int64), (len(records_BS), length))
    for record_B in records_BS.T:
        n = record_B["n"].astype(np.int64)
        applies_B = record_B["code"] == Code.WINDOW
        before_B, first_B = n[:, 1 - axis], n[:, 4 + axis]
        wanted = int(n[0, 6 + axis])
        step = np.arange(wanted)
        is_mirrored_B = (n[:, 8] & (2 if axis == 0 else 1)).astype(bool) & applies_B
        at_BL = first_B[:, None] + np.where(is_mirrored_B[:, None], wanted - 1 - step, step) - before_B[:, None]
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
