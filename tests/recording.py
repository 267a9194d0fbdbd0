"""An accelerator made of CPU memory: it does everything as late as it may, and writes down what it was told.

Nothing queued on a stream happens until somebody waits for an event behind it. A copy from pinned memory reads its
source by address and keeps nothing alive, as the hardware does: what was overwritten or given back too early is seen in
the values, or in ``violations``.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["RecordingBackend", "RecordingStream", "place_of"]

POISON = 0x5A


class RecordingStream:
    """A queue of work."""

    def __init__(self, backend: RecordingBackend, device: torch.device, name: str) -> None:
        self.backend, self.device, self.name = backend, device, name
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def __repr__(self) -> str:
        return self.name

    def wait_event(self, event: RecordingEvent) -> None:
        self.backend.log.append(("wait", self, event))
        self.backend.queue(self, lambda: self.backend.run(event.stream, event.position))


class RecordingEvent:
    """Done when ``stream`` has done ``position`` pieces of work."""

    def __init__(self, stream: RecordingStream) -> None:
        self.stream, self.position = stream, len(stream.work)

    def query(self) -> bool:
        self.stream.backend.check()
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        self.stream.backend.check()
        self.stream.backend.log.append(("synchronize", self))
        self.stream.backend.run(self.stream, self.position)


class RecordingBackend:
    """A backend of as many devices as one likes.

    Args:
        is_late: whether work waits until an event behind it is waited for; else it is done at once.

    Attributes:
        lost: text of an error that every call to the device raises from now on, as after an error of a kernel.
    """

    def __init__(self, *, is_late: bool = True) -> None:
        self.is_late = is_late
        self.lost = ""
        self.log: list[tuple[Any, ...]] = []
        self.violations: list[str] = []
        self.streams: list[RecordingStream] = []
        self.pinned: dict[int, int] = {}
        self.registered = 0
        self.free = 1 << 30
        self.made: list[weakref.ref[torch.Tensor]] = []
        self._made_on: dict[int, torch.device] = {}
        self.copied_from: dict[str, list[tuple[int, int]]] = {}
        self._reads: list[tuple[int, int]] = []
        self._defaults: dict[torch.device, RecordingStream] = {}
        self._local = threading.local()
        self._lock = threading.RLock()

    # The methods of a backend

    def begin_thread(self) -> None:
        self.log.append(("begin_thread", threading.current_thread().name))

    def new_stream(self, device: torch.device) -> RecordingStream:
        self.streams.append(RecordingStream(self, device, f"side {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> RecordingStream:
        own = getattr(self._local, "streams", {})
        if device in own:
            return own[device]  # type: ignore[no-any-return]
        return self._defaults.setdefault(device, RecordingStream(self, device, f"default {device}"))

    @contextlib.contextmanager
    def working_on(self, streams: Sequence[RecordingStream]) -> Iterator[None]:
        before = getattr(self._local, "streams", {})
        self._local.streams = before | {stream.device: stream for stream in streams}
        yield
        self._local.streams = before

    def record(self, stream: RecordingStream) -> RecordingEvent:
        self.check()
        with self._lock:
            event = RecordingEvent(stream)
            self.log.append(("record", stream, event))
            return event

    def copy(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.check()
        target = torch.empty_like(source)
        target.untyped_storage().fill_(POISON)
        self._queue_copy(source, target, device)
        return target

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        made.untyped_storage().fill_(POISON)
        self._made_on[made.untyped_storage().data_ptr()] = device
        self.made.append(weakref.ref(made))
        return made

    def copy_into(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._queue_copy(source, target, self._made_on[target.untyped_storage().data_ptr()])

    def free_bytes(self, device: torch.device) -> int:
        return self.free

    def _queue_copy(self, source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
        stream = self.current_stream(device)
        address, size = source.data_ptr(), source.nbytes
        with self._lock:
            self.log.append(("copy", stream, place_of(target)))
            self.copied_from.setdefault(str(device), []).append((address, size))
        if not self.is_pinned(source):
            now = source.clone()
            self.queue(stream, lambda: target.copy_(now))
            return
        self._reads.append((address, size))
        self.queue(stream, lambda: self._read(target, address, size))

    def record_stream(self, tensor: torch.Tensor, stream: RecordingStream) -> None:
        self.log.append(("record_stream", place_of(tensor), stream))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._is_pinned(tensor.data_ptr(), tensor.nbytes)

    def register(self, memory: np.ndarray) -> bool:
        self.registered += 1
        if self._is_pinned(memory.ctypes.data, memory.nbytes):
            self.violations.append("memory was registered twice")
        with self._lock:
            self.pinned[memory.ctypes.data] = memory.nbytes
        return True

    def unregister(self, address: int) -> None:
        with self._lock:
            size = self.pinned.pop(address)
            if any(address <= read < address + size for read, _ in self._reads):
                self.violations.append("memory was unpinned while a copy was to read it")

    # What tests do with it

    def check(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)

    def pinned_memory(self, size_bytes: int) -> np.ndarray:
        """Memory that a user has pinned."""
        memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        with self._lock:
            self.pinned[memory.ctypes.data] = memory.nbytes
        return memory

    def queue(self, stream: RecordingStream, work: Callable[[], Any]) -> None:
        with self._lock:
            stream.work.append(work)
            if not self.is_late:
                self.run(stream, len(stream.work))

    def finish(self, device: str = "cuda:0") -> None:
        """Do all work of the calling thread's current stream, as a test that looks at values must."""
        stream = self.current_stream(torch.device(device))
        self.run(stream, len(stream.work))

    def run(self, stream: RecordingStream, position: int) -> None:
        with self._lock:
            while stream.done < position:
                work, stream.work[stream.done] = stream.work[stream.done], _nothing
                stream.done += 1
                work()

    def _read(self, target: torch.Tensor, address: int, size: int) -> None:
        self._reads.remove((address, size))
        if self._is_pinned(address, size):
            ctypes.memmove(target.data_ptr(), address, size)
        else:
            self.violations.append("a copy reads memory that is no longer pinned")

    def _is_pinned(self, address: int, size: int) -> bool:
        with self._lock:
            return any(start <= address and address + size <= start + room for start, room in self.pinned.items())


def place_of(tensor: torch.Tensor) -> int:
    """Where the memory lies that the tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def _nothing() -> None:
    pass
