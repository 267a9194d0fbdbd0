"""What the prefetcher asks of an accelerator, and who answers: CUDA, XPU, or a device without streams."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.cuda

__all__ = ["Backend", "BlockingBackend", "CudaBackend", "Event", "Stream", "StreamBackend", "open_backend"]

Stream = Any
Event = Any


class Backend(Protocol):
    """The seam to an accelerator. Streams and events are its own objects; all methods may be called from any thread."""

    can_pin: bool

    def new_stream(self, device: torch.device) -> Stream:
        """Make a stream."""

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream that the calling thread's work on ``device`` goes to."""

    def working_on(self, streams: Sequence[Stream]) -> contextlib.AbstractContextManager[None]:
        """Make these, of one device each, the calling thread's current streams, and the first one's device current."""

    def record(self, stream: Stream) -> Event:
        """Return an event that is done when all work queued on ``stream`` so far is."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let later work on ``stream`` wait for the event; the calling thread does not."""

    def is_done(self, event: Event) -> bool:
        """Whether the event has happened."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event has happened, others may run meanwhile."""

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Queue a copy of a dense host tensor on the calling thread's current stream of ``device``.

        A pinned source is read until an event recorded afterwards is done; another one only before this returns.
        """

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make an uninitialised contiguous tensor on a device, of the calling thread's current stream there."""

    def copy_into(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy as ``copy`` does, to a tensor on a device with the source's shape and strides."""

    def free_bytes(self, device: torch.device) -> int | None:
        """Memory of the device that a tensor could take; None where it does not tell."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in an accelerator's memory that streams use."""

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Keep the tensor's memory from being used again before the work that ``stream`` has when it dies is done."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the accelerator can read this host tensor by itself."""

    def allocate_pinned(self, size_bytes: int) -> np.ndarray | None:
        """Return pinned uint8 memory, or None if it cannot be had."""

    def free_pinned(self, memory: np.ndarray) -> None:
        """Give back what ``allocate_pinned`` returned; nothing may read it any more."""

    def register(self, memory: np.ndarray) -> bool:
        """Pin memory that somebody else has allocated; whether that was possible."""

    def unregister(self, memory: np.ndarray) -> None:
        """Undo ``register``; the memory must still be mapped, and nothing may be reading it."""


class StreamBackend:
    """A device type of torch with streams: ``torch.cuda``, ``torch.xpu``."""

    can_pin = True

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._local = threading.local()

    def new_stream(self, device: torch.device) -> Stream:
        """Make a stream of normal priority."""
        return self._module.Stream(device)

    def current_stream(self, device: torch.device) -> Stream:
        """Return the calling thread's."""
        return self._module.current_stream(device)

    @contextlib.contextmanager
    def working_on(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Enter the last one first: the current device is the one of the stream entered last.

        A new thread begins on device 0 and is never set back to it: that would make a context there, which costs some
        hundred megabytes of a device that this process may not use.
        """
        device_before = getattr(self._local, "device", None)
        self._local.device = streams[0].device
        self._module.set_device(streams[0].device)
        try:
            with contextlib.ExitStack() as stack:
                for stream in reversed(streams):
                    stack.enter_context(self._module.stream(stream))
                yield
        finally:
            self._local.device = device_before
            if device_before is not None:
                self._module.set_device(device_before)

    def record(self, stream: Stream) -> Event:
        """Record a new event."""
        event = self._event()
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Queue the wait."""
        stream.wait_event(event)

    def is_done(self, event: Event) -> bool:
        """Query."""
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """Block; torch lets go of the GIL."""
        event.synchronize()

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy as one transfer: a target with the source's strides needs no second host copy."""
        target = torch.empty_like(source, device=device)
        self.copy_into(source, target)
        return target

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Take it from torch's allocator."""
        return torch.empty(shape, dtype=dtype, device=device)

    def copy_into(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy without waiting, if the source is pinned."""
        target.copy_(source, non_blocking=self.is_pinned(source))

    def free_bytes(self, device: torch.device) -> int | None:
        """What the driver has free, and what torch's allocator holds unused and gives back when memory is short."""
        try:
            free: int = self._module.mem_get_info(device)[0]
        except (AttributeError, RuntimeError):  # XPU: torch < 2.6, or a device that does not tell
            return None
        unused: int = self._module.memory_reserved(device) - self._module.memory_allocated(device)
        return free + unused

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is of this device type."""
        return tensor.device.type == self._device.type

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Tell torch's allocator."""
        tensor.record_stream(stream)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Ask the driver; true for registered memory too."""
        return tensor.is_pinned()

    def allocate_pinned(self, size_bytes: int) -> np.ndarray | None:
        """Take it from torch's allocator, which rounds up to a power of two and keeps it."""
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError:
            return None

    def free_pinned(self, memory: np.ndarray) -> None:
        """Nothing to do: it goes back to torch's allocator when its last view dies."""

    def register(self, memory: np.ndarray) -> bool:
        """Not possible here."""
        return False

    def unregister(self, memory: np.ndarray) -> None:
        """Nothing was registered."""

    def _event(self) -> Event:
        return self._module.Event()


class CudaBackend(StreamBackend):
    """CUDA, and ROCm under the same names."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.cuda, device)
        self._runtime: Any = torch.cuda.cudart()

    def allocate_pinned(self, size_bytes: int) -> np.ndarray | None:
        """Register a mapping of its own: exactly so many pages, and shared ones, which a fork does not copy.

        In private pages a write after a fork goes to a copy, and the device would go on reading the old page.
        """
        memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        return memory if self.register(memory) else None

    def free_pinned(self, memory: np.ndarray) -> None:
        """Unregister it; its pages go when the last view dies."""
        self.unregister(memory)

    def register(self, memory: np.ndarray) -> bool:
        """Lock the pages and map them for the device."""
        with torch.cuda.device(self._device):  # a thread begins on device 0, which would get a context for nothing
            if int(self._runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0:
                return True
            self._forget_last_error()
        return False

    def unregister(self, memory: np.ndarray) -> None:
        """Unlock the pages."""
        with torch.cuda.device(self._device):
            if int(self._runtime.cudaHostUnregister(memory.ctypes.data)) != 0:
                self._forget_last_error()

    def _forget_last_error(self) -> None:
        """Let a failed call not be taken for that of a later kernel: CUDA keeps it for this thread's next check."""
        for _ in range(2):  # an allocation may report it before the kernel that is checked
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self._device)

    def _event(self) -> Event:
        return torch.cuda.Event(blocking=True)  # a waiting thread must not spin


class BlockingBackend:
    """A device without streams to choose from (MPS): every copy is over when it returns."""

    can_pin = False

    def new_stream(self, device: torch.device) -> Stream:
        """There is only one."""

    def current_stream(self, device: torch.device) -> Stream:
        """There is only one."""

    def working_on(self, streams: Sequence[Stream]) -> contextlib.AbstractContextManager[None]:
        """Change nothing."""
        return contextlib.nullcontext()

    def record(self, stream: Stream) -> Event:
        """Nothing is ever under way."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Return at once."""

    def is_done(self, event: Event) -> bool:
        """Always."""
        return True

    def synchronize(self, event: Event) -> None:
        """Return at once."""

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copy now."""
        return source.to(device)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate."""
        return torch.empty(shape, dtype=dtype, device=device)

    def copy_into(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def free_bytes(self, device: torch.device) -> int | None:
        """Memory is the host's."""
        return None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Nothing needs care."""
        return False

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Nothing to do."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Pinning is of no use here."""
        return False

    def allocate_pinned(self, size_bytes: int) -> np.ndarray | None:
        """Pinning is of no use here."""
        return None

    def free_pinned(self, memory: np.ndarray) -> None:
        """Nothing was allocated."""

    def register(self, memory: np.ndarray) -> bool:
        """Pinning is of no use here."""
        return False

    def unregister(self, memory: np.ndarray) -> None:
        """Nothing was registered."""


def open_backend(device: torch.device) -> Backend | None:
    """Return the backend of a device's type; None for the CPU, which needs none."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return CudaBackend(device)
    if device.type == "xpu":
        return StreamBackend(torch.xpu, device)
    return BlockingBackend()
