"""What the prefetcher asks of an accelerator, and CUDA's answers; another one is a class with the same methods.

Streams have torch's ``wait_event``, events ``query`` and ``synchronize``; nobody else looks into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.cuda

from fastdata.errors import DeviceError
from fastdata.report import log

Stream = Any
Event = Any
DeviceLike = str | int | torch.device

CPU = torch.device("cpu")
_EXCHANGE_MODE = "cudaThreadExchangeStreamCaptureMode"
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


class CudaBackend:
    """CUDA, and ROCm under the same names; ``device`` is the first that batches go to. Methods are for any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: Any = torch.cuda.cudart()
        names = ctypes.CDLL(None) if os.name == "posix" else None  # torch loads libcudart for all to see
        self._exchange_mode: Any = getattr(names, _EXCHANGE_MODE, None)
        if self._exchange_mode is None:
            log.info("%s is not found: capture CUDA graphs before iter() of a CudaPrefetcher", _EXCHANGE_MODE)

    def begin_thread(self) -> None:
        """Prepare the calling thread, which is the prefetcher's own.

        It begins on device 0, where a context would cost some hundred megabytes that this process may not use. And
        while the training loop captures a CUDA graph (in torch's mode "global"), no thread may ask for events, allocate
        or register, unless it has declared to mind only captures of its own.
        """
        torch.cuda.set_device(self._device)
        if self._exchange_mode is not None:
            self._exchange_mode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))

    def new_stream(self, device: torch.device) -> Stream:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> Stream:
        """Return the calling thread's."""
        return torch.cuda.current_stream(device)

    @contextlib.contextmanager
    def working_on(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Make these, of one device each, the calling thread's current streams, and the first one's device current."""
        with contextlib.ExitStack() as stack:
            for stream in reversed(streams):
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event(blocking=True)  # a waiting thread must not spin
        event.record(stream)
        return event

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Queue a copy of a dense host tensor on the calling thread's current stream of ``device``.

        A pinned source is read until an event recorded afterwards is done; another one only before this returns.
        """
        target = torch.empty_like(source, device=device)  # with the source's strides: one transfer, no host copy
        self.copy_into(source, target)
        return target

    def copy_into(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy as ``copy`` does, to a tensor on a device with the source's shape and strides."""
        target.copy_(source, non_blocking=self.is_pinned(source))

    def free_bytes(self, device: torch.device) -> int:
        """Memory of the device that a tensor could take."""
        unused: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep a device tensor's memory from being used again before the work that ``stream`` then has is done."""
        if tensor.device.type == "cuda":
            tensor.record_stream(stream)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def register(self, memory: np.ndarray) -> bool:
        """Pin memory that others have allocated, from its first byte; whether it is pinned then."""
        with torch.cuda.device(self._device):  # else device 0 would get a context for nothing
            if int(self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
                return True
            self._forget_last_error()
        return False

    def unregister(self, address: int) -> None:
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):  # the device may be lost
            if int(self._runtime.cudaHostUnregister(address)) != 0:
                self._forget_last_error()

    def _forget_last_error(self) -> None:
        """Let a failed call not be taken for that of a later kernel: CUDA keeps it for this thread's next check."""
        for _ in range(2):  # an allocation may report it before the kernel that is checked
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)


def resolve_devices(device: DeviceLike | Sequence[DeviceLike] | None, *, is_known: bool) -> list[torch.device]:
    """Return the devices asked for, each with its number where it has one; None is the current one, or the CPU.

    Args:
        device: one, or a list of them.
        is_known: a backend of the user's own answers for them; else they are the CPU or what CUDA sees.

    Raises:
        DeviceError: torch does not see one of them, or they cannot be used together.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked: list[Any] = list(device) if isinstance(device, (list, tuple)) else [device]
    if not asked:
        raise DeviceError("device=[] names no device; give at least one, or leave device=None")
    devices = [torch.device(("cuda" if count else "cpu") if one is None else one) for one in asked]
    if count:
        current = torch.device("cuda", torch.cuda.current_device())
        devices = [current if one == torch.device("cuda") else one for one in devices]
    if len({one.type for one in devices}) > 1:
        raise DeviceError(f"device={device!r} mixes kinds of devices; shards of a batch go to devices of one kind")
    if len(set(devices)) < len(devices) and devices[0] != CPU:
        raise DeviceError(f"device={device!r} names a device twice; name each once")
    for one in () if is_known else devices:
        if one.type not in ("cpu", "cuda"):
            raise DeviceError(
                f"device={str(one)!r} is neither the CPU nor a CUDA device. For another kind, pass backend=, an object "
                f"with the methods of fastdata.prefetch.backend.CudaBackend, or leave batches on the CPU."
            )
        if one.type == "cuda" and (one.index or 0) >= count:
            raise DeviceError(f"device={str(one)!r} was asked for, but torch sees {_what_torch_sees(count)}")
    return devices


def _what_torch_sees(count: int) -> str:
    toolkits = {"CUDA": getattr(torch.version, "cuda", None), "ROCm": getattr(torch.version, "hip", None)}
    built = " and ".join(f"{name} {version}" for name, version in toolkits.items() if version) or "the CPU only"
    visible = repr(os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
    torch_is = f"torch {torch.__version__} is built for {built}, CUDA_VISIBLE_DEVICES is {visible}."
    if count:
        return f"{count} CUDA device{'s' if count > 1 else ''}, numbered from 0: {torch_is}"
    return (
        f"no CUDA device: {torch_is} Install a build of torch for this machine's accelerator and its driver (`python -m"
        f" torch.utils.collect_env` shows both), or leave device=None: batches then stay on the CPU where there is no "
        f"accelerator."
    )
