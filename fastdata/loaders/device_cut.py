"""Batches that are cut from samples on a device: by the package's CUDA kernel, or by ops of torch.

The kernel (``cut_kernel.cu``) reads and writes each pixel once. The ops make several copies of a
batch.

Shape letters: N stored samples, B batch, C channels, H W size stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.cuda

from fastdata.loaders.driver import Kernel, find_kernel
from fastdata.loaders.floats import ToFloats
from fastdata.loaders.window import Window
from fastdata.report import log

Tensor = torch.Tensor

_DTYPES = [torch.uint8, torch.float32, torch.float16, torch.bfloat16]
"""Dtypes that the kernel writes, in the order of its enumerators."""
_STEPS = 7
"""Steps between the samples that are compared before the kernel is used."""
_AXES = ("stored", "shape", "steps")
_NUMBERS = ("scales", "divides", "dtype")
_TABLES = ("row_table", "column_table", "fill")
_POINTERS = ("out", "samples", "index", "constants", "lines", *_TABLES)


class _Arguments(ctypes.Structure):
    """The struct ``Cut`` of cut_kernel.cu."""

    _fields_ = (
        *((name, ctypes.c_longlong * 4) for name in _AXES),
        *((name, ctypes.c_longlong) for name in (*_NUMBERS, *_POINTERS)),
    )


class DeviceCut:
    """Cuts batches from a window's samples, and converts them.

    Before the kernel makes its first batch of a dtype and memory format, it makes a few samples
    that are compared with those of torch's ops. If they differ, it is not used.

    Args:
        window: cuts on the device of its samples.
        convert: converts images to floats; None if batches are uint8.
        cast: gives all images their final dtype and memory format.
    """

    def __init__(
        self, window: Window, convert: ToFloats | None, cast: Callable[[Tensor], Tensor]
    ) -> None:
        self._window = window
        self._convert = convert
        self._cast = cast
        self._device = window.tensors[0].device
        self._dtype = torch.uint8
        self._layout = torch.contiguous_format
        if convert is not None:
            self._dtype = convert.dtype
            if convert.is_channels_last:
                self._layout = torch.channels_last
        self._kernel = self._find_kernel()

    def __call__(self, index_B: Tensor, line_2B: Tensor | None) -> Tensor:
        """Return samples, int64 ``index_B``, cut to the windows that were drawn for them.

        All tensors are on one device. The work is queued on its current stream.
        """
        if self._kernel is None:
            images = self._by_ops(index_B, line_2B)
        else:
            images = self._by_kernel(self._kernel, index_B, line_2B)
        return self._cast(images)

    def _by_ops(self, index_B: Tensor, line_2B: Tensor | None) -> Tensor:
        images = self._window.cut(index_B, line_2B)
        return images if self._convert is None else self._convert(images)

    def _by_kernel(self, kernel: Kernel, index_B: Tensor, line_2B: Tensor | None) -> Tensor:
        samples_NCHW, *tables = self._window.tensors
        channels, height, width = self._window.shape
        tensors = {"samples": samples_NCHW, "index": index_B}
        if line_2B is not None:
            tensors |= {"lines": line_2B} | dict(zip(_TABLES, tables, strict=False))
        scales = divides = 0
        if self._convert is not None:
            tensors["constants"] = self._convert.constants(self._device)
            scales = tensors["constants"].shape[1]
            divides = self._convert.divides
        out = torch.empty(
            (len(index_B), max(channels, scales), height, width),
            dtype=self._dtype,
            device=self._device,
            memory_format=self._layout,
        )
        arguments = _Arguments(
            stored=samples_NCHW.shape,
            shape=out.shape,
            steps=out.stride(),
            scales=scales,
            divides=divides,
            dtype=_DTYPES.index(self._dtype),
            out=out.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )
        if out.numel():
            stream = torch.cuda.current_stream(self._device).cuda_stream
            kernel.launch(arguments, len(out), height * width, stream)
        return out

    def _find_kernel(self) -> Kernel | None:
        """Return the kernel, if it can make these batches and has made some of them right."""
        is_float64 = self._convert is not None and self._convert.is_float64
        if is_float64 or self._dtype not in _DTYPES:
            log.info("batches are cut by ops of torch: the kernel computes in float32")
            return None
        kernel = find_kernel(self._device.index)
        if kernel is None:
            return None
        form = self._dtype, self._layout
        if form not in kernel.is_right:
            kernel.is_right[form] = self._is_right(kernel)
        return kernel if kernel.is_right[form] else None

    def _is_right(self, kernel: Kernel) -> bool:
        """Compare a few samples with those of torch's ops. This waits for the device."""
        # Samples, rows and columns from the first to the last, mirrored or not.
        ends = [len(tensor) - 1 for tensor in self._window.tensors[:3]]
        steps = [[end * step // _STEPS for step in range(_STEPS + 1)] for end in ends]
        spread = torch.tensor(steps, device="cpu").to(self._device)
        line_2B = spread[1:].int() if len(ends) > 1 else None
        problem = "its pixels differ from those of the ops"
        is_right = False
        try:
            made = self._by_kernel(kernel, spread[0], line_2B).cpu().float()
            right = self._by_ops(spread[0], line_2B).cpu().float()
            # A half float may be rounded to a neighbour.
            room = torch.finfo(self._dtype).eps if self._dtype.is_floating_point else 0
            is_right = torch.allclose(made, right, rtol=room, atol=1e-6, equal_nan=True)
        except Exception as error:  # noqa: BLE001  # the ops may still work
            problem = str(error)
        if not is_right:
            log.warning("batches are cut by ops of torch, not by the kernel: %s", problem)
        return is_right
