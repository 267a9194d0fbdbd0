"""A plan's batch ops for batches that lie on a device: windows, casts and Normalize, whole batches at a time.

Every shape is known beforehand, what differs between samples is where rows and columns come from,
which the host draws. Nothing asks the device for a value, so the host never waits. Steps of other
kinds run in the compiled core before the transfer, which then sends the uint8 that is served.

Shape letters: N stored samples, B batch, C channels, H W size sent, h w size served.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdata.pixels.images import SampleSpec
from fastdata.pixels.ops import MODES, Cast, Int64s, size_after, step_number
from fastdata.pixels.plan import TransformPlan
from fastdata.pixels.program import Program

Tensor = torch.Tensor
Shape = tuple[int, ...]

_WINDOWS = ("STEP_PAD", "STEP_CROP", "STEP_CENTER_CROP", "STEP_FLIP")
"""Ops that become windows alone, as many of any sample."""


def device_obstacle(plan: TransformPlan, spec: SampleSpec) -> str | None:
    """Say why the batch ops of a plan cannot run on a device, on samples of this spec; None if they can."""
    if plan.obstacle is not None:
        return plan.obstacle
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, and not uint8 images (C, H, W)"
    if any(op.code == "OP_CAST" for op in plan.batch_ops[:-1]):
        return "erasing or noise comes after the conversion to floats"
    try:
        return (
            None
            if Program(plan.batch_ops, spec).output(spec.shape)
            else "the images that are served differ in size"
        )
    except ValueError as error:
        return str(error).rstrip(".")


class DeviceProgram:
    """Batch ops on dense uint8 batches, the last of them on a device; safe from several threads.

    ``host`` is what runs before the transfer, and ``host_step`` the step that asks for it; None and
    empty where samples are sent as they are stored. ``draw`` makes a batch's random numbers on the
    host, ``run`` its pixels, wherever the tensors lie that it is given. They are those of
    ``Program`` for the same seed, visits and indices: uint8 is bit-equal, normalised floats come
    from one fused multiplication and addition, within 1e-6 of its larger term.

    In bytes moved for each pixel served, where F is the size of a float: rows and columns of
    windows 4, a constant border 3 more, the conversion to floats 1 + F. A crop, mirrored or not, is
    8 kernels, one that is padded 12.

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
        assert spec.shape is not None
        ops, self._layout = (
            plan.batch_ops,
            torch.channels_last if channels_last else torch.contiguous_format,
        )
        self._floats: _Floats | None = None
        if ops and ops[-1].code == "OP_CAST":
            self._floats, ops = _Floats(dtype, ops[-1].about), ops[:-1]
        served = Program(plan.batch_ops, spec).output(spec.shape)
        assert served is not None
        self.output: tuple[Shape, torch.dtype] = (
            served[0],
            self._floats.dtype if self._floats else torch.uint8,
        )
        self.host: Program | None = None
        self.host_step = ""
        self._fill: tuple[float, ...] | None = None
        self._program = Program(ops, spec)
        self._windows: list[_Window] = []
        self._constants: dict[torch.device, list[Tensor]] = {}
        self.sent_shape: Shape = spec.shape
        others = [op for op in ops if op.code not in _WINDOWS]
        if others or not self._fits(spec.shape):
            self.host = self._program
            self._windows.clear()
            channels, _ = size_after(ops, spec.shape[0], None)
            self.sent_shape = (channels, *served[0][1:])
            asking = next(
                (op for op in others or ops if op.code not in ("STEP_CENTER_CROP", "STEP_FLIP")),
                ops[0],
            )
            self.host_step = plan.batch_texts[step_number(asking.at) - len(plan.prepare)]

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw where the rows and columns of a batch come from, on the host, for what ``run`` is given.

        Returns:
            int16 (B, windows, 4): for rows, then for columns, the place of the first one, and the
                step to the next, 1
            or -1, in what the window is cut from. None where samples are served whole as they are
            sent.
        """
        if not self._windows:
            return None
        draws_BS4 = np.empty((len(index_B), len(self._windows), 4), np.int16)
        if not len(index_B):
            return torch.from_numpy(draws_BS4)
        for s, record_B in enumerate(self._records(index_B, visits_B, seed, self.sent_shape).T):
            n = record_B["n"]
            for axis, mirror_bit in ((0, 2), (1, 1)):
                step_B = np.where(n[:, 8] & mirror_bit, -1, 1)
                last_B = np.where(n[:, 8] & mirror_bit, n[:, 6 + axis] - 1, 0)
                draws_BS4[:, s, 2 * axis] = n[:, 4 + axis] - n[:, 1 - axis] + last_B
                draws_BS4[:, s, 2 * axis + 1] = step_B
        return torch.from_numpy(draws_BS4)

    def run(
        self, stored_NCHW: Tensor, draws: Tensor | None, index_B: Tensor | None = None
    ) -> Tensor:
        """Serve a batch, uint8 as stored or as ``host`` made it, which is only read; draws lie on the same device.

        ``index_B``, int64 and on the same device, chooses from a store there, contiguous, whose
        samples are not copied whole; it is not checked to be in [0, N), which would wait for the
        device.

        Returns:
            (B, C, h, w) of ``output``'s dtype, in fresh memory; the batch itself where there is
            nothing to do.
        """
        batch = stored_NCHW
        if draws is not None:
            batch = self._cut(stored_NCHW, index_B, draws)
        elif index_B is not None:
            batch = stored_NCHW.index_select(0, index_B)
        batch = self._floats.convert(batch) if self._floats else batch
        return batch.contiguous(memory_format=self._layout)

    def _records(
        self, index_B: Int64s, visits_B: int | Int64s, seed: int, shape: Shape
    ) -> npt.NDArray[Any]:
        shapes_B3 = np.full((len(index_B), 3), shape, np.int32)
        return self._program.draw(index_B, visits_B, seed, shapes_B3)

    def _fits(self, shape: Shape) -> bool:
        """Whether one pass can cut all windows, which are noted: one fill, and places that are int16."""
        records = self._records(np.zeros(1, np.int64), 0, 0, shape)[0]
        size = shape[1], shape[2]
        for record in records:
            n = record["n"]
            wanted = int(n[6]), int(n[7])
            mode = MODES[int(n[8]) >> 8] if n[:4].any() else None
            self._windows.append(_Window(cut_from=size, size=wanted, mode=mode))
            size = wanted
        filled = [
            r for r, window in zip(records, self._windows, strict=True) if window.mode == "constant"
        ]
        fills = {tuple(record["v"][8 : 8 + min(4, shape[0])].tolist()) for record in filled}
        self._fill = next(iter(fills), None)
        return len(fills) < 2 and max(shape[1:]) < 1 << 15

    def _on(self, device: torch.device, channels: int, height: int) -> list[Tensor]:
        """Constants of ``_cut`` there: the first row of each plane, the fill, and what each window asks for."""
        if device not in self._constants:  # two threads at once may both make them
            fill = self._fill or (0,)
            fill_C = torch.tensor(
                [int(fill[min(c, len(fill) - 1)]) for c in range(channels)], dtype=torch.uint8
            )
            host = [torch.arange(0, channels * height, height), fill_C[:, None, None]]
            host += [constant for window in self._windows for constant in window.constants()]
            self._constants[device] = [send(constant, device) for constant in host]
        return self._constants[device]

    def _cut(self, stored_NCHW: Tensor, index_B: Tensor | None, draws_BS4: Tensor) -> Tensor:
        count, channels, height, width = stored_NCHW.shape
        rows = self.output[0][1]
        first_row_C, fill_C11, *constants = self._on(stored_NCHW.device, channels, height)
        place_BL, outside_BL = self._places(draws_BS4.to(torch.int64), constants)
        row_Bh = place_BL[:, :rows]
        column_Bw = place_BL[:, rows:]
        if index_B is None:
            index_B = torch.arange(count, device=stored_NCHW.device)
        line_BCh = (row_Bh[:, None] + first_row_C[:, None]).add_(
            index_B[:, None, None], alpha=channels * height
        )
        taken = (
            stored_NCHW.reshape(-1, width)
            .index_select(0, line_BCh.view(-1))
            .view(*line_BCh.shape, width)
        )
        cut = taken.gather(3, column_Bw[:, None, None, :].expand(-1, channels, rows, -1))
        if outside_BL is None:
            return cut
        outside_Bhw = outside_BL[:, :rows, None] | outside_BL[:, None, rows:]
        return torch.where(outside_Bhw[:, None], fill_C11, cut)

    def _places(self, draws_BS4: Tensor, constants: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Where each row, then each column served comes from, and whether it is filled instead."""
        place_BL = outside_BL = None
        for s, window in enumerate(self._windows):
            step_L, zero_L, last_L, start_L = constants[4 * s : 4 * s + 4]
            rows = window.size[0]
            at_BL = draws_BS4.new_empty((len(draws_BS4), len(step_L)))
            for part, axis in ((slice(rows), 0), (slice(rows, None), 1)):
                first_B1, step_B1 = (
                    draws_BS4[:, s, 2 * axis, None],
                    draws_BS4[:, s, 2 * axis + 1, None],
                )
                torch.addcmul(first_B1, step_B1, step_L[part], out=at_BL[:, part])
            inside_BL = at_BL
            if window.mode in ("symmetric", "reflect"):
                inside_BL = _reflected(at_BL, last_L, edge=window.mode == "reflect")
            elif window.mode is not None:
                inside_BL = torch.clamp(at_BL, zero_L, last_L)
            is_new_BL = inside_BL.ne(at_BL) if window.mode == "constant" else None
            if place_BL is None:
                place_BL, outside_BL = inside_BL, is_new_BL
                continue
            before_BL = inside_BL + start_L
            place_BL = place_BL.gather(1, before_BL)
            if outside_BL is not None:
                outside_BL = outside_BL.gather(1, before_BL)
                outside_BL = outside_BL if is_new_BL is None else outside_BL | is_new_BL
            else:
                outside_BL = is_new_BL
        assert place_BL is not None
        return place_BL, outside_BL


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """What is the same in a batch: the height and width it is cut from and has; how borders are made, if there are."""

    cut_from: tuple[int, int]
    size: tuple[int, int]
    mode: str | None

    def constants(self) -> list[Tensor]:
        """For each row, then each column: its number, 0, the last place it may come from, and where its kind begins."""
        step_L = torch.cat([torch.arange(length) for length in self.size])
        last_L = torch.cat(
            [torch.full((n,), c - 1) for n, c in zip(self.size, self.cut_from, strict=True)]
        )
        start_L = torch.cat(
            [torch.full((n,), s) for n, s in zip(self.size, (0, self.cut_from[0]), strict=True)]
        )
        return [step_L, torch.zeros_like(step_L), last_L, start_L]


def _reflected(at_BL: Tensor, last_L: Tensor, *, edge: bool) -> Tensor:
    """The place in the image of a place beyond its borders, whose own pixels come twice unless it is an ``edge``."""
    shift = 0 if edge else 1
    period_L = (2 * last_L + 2 * shift).clamp(min=1)
    folded_BL = at_BL.remainder(period_L)
    return torch.minimum(folded_BL, period_L - shift - folded_BL)


def send(constant: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that the calling thread does not wait for."""
    if device.type != "cuda":
        return constant.to(device)
    return constant.pin_memory().to(device, non_blocking=True)


class _Floats:
    """Conversion to floats and normalisation in one pass over the pixels."""

    def __init__(self, asked: torch.dtype | None, cast: Cast) -> None:
        served: torch.dtype = getattr(torch, cast.dtype)
        scaling, normalizations = cast.scaling, cast.normalizations
        self._computed = torch.float64 if served == torch.float64 else torch.float32
        self.dtype = asked or served
        self._channels = max((len(mean) for mean, *_ in normalizations), default=1)
        self._divides = scaling == "divide" and not normalizations
        scale = np.full(self._channels, 1.0 if scaling == "none" else 1 / 255)
        offset = np.zeros(self._channels)
        for mean, std, _ in normalizations:
            scale, offset = scale / np.array(std), (offset - np.array(mean)) / np.array(std)
        # A divisor that lies on the device: by a number of the host, CUDA multiplies with its
        # rounded inverse.
        self._host = [torch.tensor([255.0], dtype=self._computed)]
        self._host += [
            torch.tensor(each, dtype=self._computed)[:, None, None] for each in (scale, offset)
        ]
        self._on: dict[torch.device, list[Tensor]] = {}
        self._shifts = bool(offset.any())

    def convert(self, source_BChw: Tensor) -> Tensor:
        """Convert uint8; the layout in memory stays the same."""
        device = source_BChw.device
        if device not in self._on:  # two threads at once may both make them
            self._on[device] = [send(tensor, device) for tensor in self._host]
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
