"""A plan's batch ops for batches that lie on a device: the draws and pixels of ``Program``, whole batches at a time.

Shape letters: N stored samples, B batch, C channels, H W stored size, h w size served, D draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdata.batchops.boxes import BoxKernel
from fastdata.batchops.fuse import Stage, channels_after, fuse_ops, values_of
from fastdata.batchops.kernels import Constants, GrayKernel, Kernel, WindowKernel
from fastdata.batchops.resample import BANDS_APART
from fastdata.batchops.values import Values, gray_channels
from fastdata.batchops.windows import Size
from fastdata.draws import sample_keys
from fastdata.plan import TransformPlan
from fastdata.plan.ops import Grayscale, Op, RandomResizedCrop
from fastdata.spec import SampleSpec

__all__ = ["DeviceProgram", "compile_device_ops", "device_obstacle"]

Tensor = torch.Tensor
Shape = tuple[int, ...]


def device_obstacle(plan: TransformPlan, spec: SampleSpec) -> str | None:
    """Say why the batch ops of a plan cannot run on a device; None if they can.

    Args:
        plan: of the dataset.
        spec: of its stored samples.
    """
    return plan.obstacle or _obstacle(plan.batch_ops, spec)


def compile_device_ops(
    plan: TransformPlan, spec: SampleSpec, *, dtype: torch.dtype | None = None, channels_last: bool = False
) -> DeviceProgram:
    """Compile the batch ops of a plan for devices; see ``DeviceProgram``.

    Raises:
        ValueError: ``device_obstacle`` says why not.
    """
    obstacle = device_obstacle(plan, spec)
    if obstacle is not None:
        raise ValueError(f"batch ops cannot run on the device: {obstacle}. Run them on the CPU.")
    return DeviceProgram(plan.batch_ops, spec, dtype=dtype, channels_last=channels_last)


class DeviceProgram:
    """Batch ops on dense uint8 batches that lie on a device; made by ``compile_device_ops``, safe from several threads.

    ``draw`` makes a batch's random numbers on the host, ``run`` its pixels, wherever the tensors lie that it is given.
    They are those of ``Program`` for the same seed, visits and indices: uint8 is bit-equal. Two things are not. Where
    torchvision resizes tensors in float32 (all of v1's), sums are added up in another order, and a pixel whose value is
    a half, within 1e-4, may be rounded the other way. Normalised floats come from one fused multiplication and
    addition, within 1e-6 of the larger of its two terms.

    In bytes moved for each pixel served, where F is the size of a float: crops, flips and repeating borders 2, a
    constant border 3 more, the conversion to floats 1 + F. So a normalised float32 crop moves 7 where a copy of it
    would move 8. See ``BoxKernel`` for RandomResizedCrop. Memory for all this comes from torch's allocator.

    Args:
        ops: of a plan.
        spec: of the samples.
        dtype: of what is served, instead of the plan's float32 or float64; rounded once. Uint8 stays uint8.
        channels_last: whether batches lie in memory with their channels last, which costs no other pass after crops,
            flips, RandomResizedCrop and conversions.

    Raises:
        ValueError: ``device_obstacle`` says why not.
    """

    def __init__(
        self, ops: tuple[Op, ...], spec: SampleSpec, *, dtype: torch.dtype | None = None, channels_last: bool = False
    ) -> None:
        obstacle = _obstacle(ops, spec)
        if obstacle is not None:
            raise ValueError(f"batch ops cannot run on the device: {obstacle}. Run them on the CPU.")
        self._args = (ops, spec, dtype, channels_last)
        self._channels_last = channels_last
        stages, values, self._stored_shape = fuse_ops(ops, spec), values_of(ops), _shape(spec)
        channels, *size = self._stored_shape
        self._kernels = _kernels_of(stages, (size[0], size[1]))
        self._floats = _Floats(values, dtype) if values else None
        self._served = (channels_after(stages, values, channels), *(self._kernels[-1].size if self._kernels else size))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._args

    @property
    def output(self) -> tuple[Shape, torch.dtype]:
        """Shape and dtype of each served sample."""
        return self._served, self._floats.dtype if self._floats else torch.uint8

    def draw(self, index_B: npt.NDArray[np.int64], visits_B: int | npt.NDArray[np.int64], seed: int) -> Tensor:
        """Draw what a batch needs, on the host.

        Args:
            index_B: which samples.
            visits_B: what draws are made from, as of ``fastdata.visits``: one for all samples, or one for each.
            seed: of the draws.

        Returns:
            int32 (D, B) in host memory, to be copied to the device as it is.
        """
        keys_B = sample_keys(seed, visits_B, index_B)
        drawn = [row for kernel in self._kernels for row in kernel.draw(keys_B, index_B)]
        draws_DB = np.empty((len(drawn), len(index_B)), np.int32)
        for row, numbers_B in zip(draws_DB, drawn, strict=True):
            row[...] = numbers_B
        return torch.from_numpy(draws_DB)

    def run(self, stored_BCHW: Tensor, draws_DB: Tensor) -> Tensor:
        """Serve a batch of stored samples.

        Args:
            stored_BCHW: uint8, as stored; only read.
            draws_DB: from ``draw``, on the same device.

        Returns:
            (B, C, h, w) of ``output``'s dtype, in fresh memory; the stored batch itself where there is nothing to do.
        """
        self._check(stored_BCHW)
        return self._run(stored_BCHW, None, draws_DB)

    def gather_run(self, store_NCHW: Tensor, index_B: Tensor, draws_DB: Tensor) -> Tensor:
        """Serve a batch from a store on the device: the first stage takes the samples from there, without a copy.

        Args:
            store_NCHW: uint8, contiguous; only read.
            index_B: int64, on the same device, each in [0, N); not checked, that would wait for the device.
            draws_DB: from ``draw`` for these indices, on the same device.
        """
        self._check(store_NCHW)
        if not self._kernels:
            return self._finish(store_NCHW.index_select(0, index_B))
        return self._run(store_NCHW, index_B, draws_DB)

    def _run(self, batch: Tensor, index_B: Tensor | None, draws_DB: Tensor) -> Tensor:
        draws_DB = draws_DB.to(torch.int64)
        first = 0
        for number, kernel in enumerate(self._kernels, 1):
            own = draws_DB[first : first + kernel.draws]
            batch = kernel.run(batch, index_B, own, self._channels_last and number == len(self._kernels))
            index_B, first = None, first + kernel.draws
        return self._finish(batch)

    def _finish(self, batch: Tensor) -> Tensor:
        if self._floats:
            batch = self._floats.convert(batch)
        return batch.contiguous(memory_format=torch.channels_last if self._channels_last else torch.contiguous_format)

    def _check(self, stored: Tensor) -> None:
        if stored.dtype != torch.uint8 or stored.shape[1:] != self._stored_shape:
            raise ValueError(
                f"the program is for uint8 samples of shape {self._stored_shape}, but got a batch of {stored.dtype} "
                f"and shape {tuple(stored.shape)}. Give it samples as they are stored."
            )


class _Floats:
    """Conversion to floats and normalisation in one pass over the pixels."""

    def __init__(self, values: Values, dtype: torch.dtype | None) -> None:
        self._values = values
        self._computed: torch.dtype = getattr(torch, values.dtype.name)
        self.dtype = dtype or self._computed
        shift, scale = values.shift_C11.astype(np.float64), values.scale_C11.astype(np.float64)
        self._constants = Constants(
            # A divisor that lies on the device: by a number of the host, CUDA multiplies with its rounded inverse.
            divisor=np.array([values.divisor or 1], values.dtype),
            scale=values.scale_C11,
            offset=(-shift * scale).astype(values.dtype),
        )

    def convert(self, source_BChw: Tensor) -> Tensor:
        """Convert uint8; the layout in memory stays the same."""
        constants, values = self._constants.on(source_BChw.device), self._values
        out = None
        if self.dtype != self._computed:  # rounded on the way to memory
            wide = source_BChw.expand(-1, max(source_BChw.shape[1], values.channels), -1, -1)
            out = torch.empty_like(wide, dtype=self.dtype)
        if values.divisor is not None:
            return torch.div(source_BChw, constants["divisor"], out=out)
        if values.shifts:
            return torch.addcmul(constants["offset"], source_BChw, constants["scale"], out=out)
        return torch.mul(source_BChw, constants["scale"], out=out)


def _kernels_of(stages: tuple[Stage, ...], size: Size) -> tuple[Kernel, ...]:
    """Kernels for the stages; a window of a resized box is part of its kernel."""
    kernels: list[Kernel] = []
    box: tuple[RandomResizedCrop, Size] | None = None
    for stage in stages:
        kernel: Kernel
        if isinstance(stage, RandomResizedCrop):
            box, kernel = (stage, size), BoxKernel(stage, size, None)
        elif isinstance(stage, Grayscale):
            box, kernel = None, GrayKernel(stage, size)
        else:
            kernel = WindowKernel(stage, size)
            if box and not kernel.is_padded:
                kernels.pop()
                kernel = BoxKernel(*box, kernel)
            box = None
        kernels.append(kernel)
        size = kernel.size
    return tuple(kernels)


def _obstacle(ops: tuple[Op, ...], spec: SampleSpec) -> str | None:
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, and not uint8 images (C, H, W)"
    stages = fuse_ops(ops, spec)
    channels = spec.shape[0]
    try:
        channels_after(stages, values_of(ops), channels)
        _kernels_of(stages, (spec.shape[1], spec.shape[2]))
    except ValueError as error:
        return str(error).rstrip(".")
    for stage in stages:
        if isinstance(stage, Grayscale):
            channels = gray_channels(stage, channels)
        elif isinstance(stage, RandomResizedCrop) and stage.domain == "pil" and channels not in BANDS_APART:
            return f"RandomResizedCrop of PIL images with {channels} channels, whose alpha Pillow treats apart"
    return None


def _shape(spec: SampleSpec) -> Shape:
    assert spec.shape is not None  # an obstacle otherwise
    return spec.shape


def _rebuild(ops: tuple[Op, ...], spec: SampleSpec, dtype: torch.dtype | None, channels_last: bool) -> DeviceProgram:
    return DeviceProgram(ops, spec, dtype=dtype, channels_last=channels_last)
