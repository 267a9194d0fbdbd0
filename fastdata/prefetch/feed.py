"""The thread that brings an epoch's batches to the device ahead of the training loop.

For each batch the thread waits for memory before it takes any::

    next(loader) -> pinned memory -> a place in the queue -> the GPU has left an older batch -> copies -> event -> queue

and the training loop's stream waits for the event, not its thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from fastdata.prefetch.backends import Backend, Event, Stream
from fastdata.prefetch.batches import count_samples, is_host_tensor, map_tensors, memory_of, split_batch, tensors_in
from fastdata.prefetch.finish import Finish
from fastdata.prefetch.staging import Flight, Staged, Staging

__all__ = ["Failed", "Feed", "Marks", "Over", "Ready"]

_PATIENCE_S = 10.0
"""How long the end of an epoch waits for a loader that does not answer; the thread then ends with the process."""


class Marks(Protocol):
    """Notes how far a loader has read, and counts it where the batch is handed over."""

    def mark(self) -> Any:
        """How far the loader has read; called in the thread."""

    def hand_over(self, mark: Any) -> None:
        """Let the user be there; called in the user's thread."""


@dataclass(slots=True)
class Ready:
    """A batch on its devices: one part for each of the first devices, and when it is there."""

    parts: list[Any]
    events: list[Event]
    samples: int
    mark: Any


@dataclass(slots=True)
class Failed:
    """An exception in a batch's place."""

    error: BaseException
    mark: Any


@dataclass(slots=True)
class Over:
    """The end of the epoch."""

    mark: Any


class _Tokens:
    """A semaphore without a lock: a finalizer may give at any moment, also in a thread that is just taking."""

    def __init__(self, count: int) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self.give()

    def give(self) -> None:
        self._queue.put(None)

    def take(self) -> None:
        self._queue.get()

    def take_at_once(self) -> bool:
        """Take one if there is one; whether there was."""
        try:
            self._queue.get_nowait()
        except Empty:
            return False
        return True


class Feed:
    """Reads a loader's iterator in a thread and brings batches to devices, at most ``depth`` ahead.

    Args:
        iterator: the loader's, made in the user's thread.
        backend: the devices' backend.
        devices: where batches, or their shards, go.
        streams: one of each device, for the copies.
        depth: batches on the devices that the user has not taken.
        staging: finds pinned memory.
        flight: holds what is being read.
        finish: runs on the devices.
        marks: counts batches for a resume.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        *,
        backend: Backend,
        devices: list[torch.device],
        streams: list[Stream],
        depth: int,
        staging: Staging,
        flight: Flight,
        finish: Finish,
        marks: Marks,
    ) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._backend, self._devices, self._streams = backend, devices, streams
        self._staging, self._flight, self._finish, self._marks = staging, flight, finish, marks
        self._places = _Tokens(depth)
        self._left: deque[list[Event]] = deque([] for _ in range(depth))
        """For each free place in the queue: the events at which the devices are done with what came before."""
        self._asked_again = _Tokens(0)
        self._ready: SimpleQueue[Ready | Failed | Over] = SimpleQueue()
        self._number = 0
        self._has_failed = False
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    # In the user's thread

    def receive(self) -> Ready | Failed | Over:
        """Return what comes next; the calling thread's streams are made to wait for it.

        The thread starts here and not before: what a loader draws for its first batch is drawn while the user waits.
        """
        streams = [self._backend.current_stream(device) for device in self._devices]
        left = [self._backend.record(stream) for stream in streams]
        if self._thread is None:
            self._start(left)
        elif self._has_failed:
            self._has_failed = False
            self._asked_again.give()
        item = self._ready.get()
        if item.mark is not None:
            self._marks.hand_over(item.mark)
        if isinstance(item, Ready):
            self._left.append(left)
            self._places.give()
            for part, event, stream in zip(item.parts, item.events, streams, strict=False):
                self._backend.wait(stream, event)
                self._leave_to(part, stream)
        self._has_failed = isinstance(item, Failed)
        return item

    def stop(self) -> None:
        """End the thread; what it has read ahead is dropped. Idempotent; a forked process leaves it to its parent."""
        if os.getpid() != self._pid:
            return
        self._stopped.set()
        self._places.give()
        self._asked_again.give()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
        self._iterator = None
        while not self._ready.empty():
            self._ready.get()
        self._ready.put(Over(None))

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self, left: list[Event]) -> None:
        for stream, event in zip(self._streams, left, strict=True):
            self._backend.wait(stream, event)  # what a loader or transform reads may have been made on the user's
        self._thread = threading.Thread(target=self._run, name="fastdata-prefetch", daemon=True)
        self._thread.start()

    def _leave_to(self, part: Any, stream: Stream) -> None:
        """Let the user's stream own the memory too: it is used again when the work queued there is done."""
        for tensor in tensors_in(part):
            for strided in memory_of(tensor):
                if self._backend.holds(strided):
                    self._backend.record_stream(strided, stream)

    # In the thread

    def _run(self) -> None:
        try:
            with self._backend.working_on(self._streams):
                while self._bring_next():
                    pass
        except BaseException as error:  # noqa: BLE001  # whatever it is, the user's thread raises it
            self._ready.put(Failed(error, None))
        finally:
            self._iterator = None
            try:
                self._staging.close()
            finally:
                self._ready.put(Over(None))  # nobody waits for a thread that has ended

    def _bring_next(self) -> bool:
        """Bring one batch; whether another one may come."""
        self._flight.reap()
        if self._stopped.is_set() or self._iterator is None:
            return False
        try:
            holder = [next(self._iterator)]
        except StopIteration:
            self._ready.put(Over(self._marks.mark()))
            return False
        except BaseException as error:  # noqa: BLE001  # raised where its batch would have come
            self._fail(error)
        else:
            if self._stopped.is_set():
                return False
            try:
                item = self._bring(holder)
            except BaseException as error:  # noqa: BLE001  # likewise
                self._fail(error)
            else:
                if item is not None:
                    self._ready.put(item)
                return item is not None
        self._asked_again.take()  # reading on after an exception is the user's to decide; nothing here holds it now
        return not self._stopped.is_set()

    def _fail(self, error: BaseException) -> None:
        """Hand an exception over, without the frame of this thread's loop."""
        traceback = error.__traceback__ and error.__traceback__.tb_next
        self._ready.put(Failed(error.with_traceback(traceback), self._marks.mark()))

    def _bring(self, holder: list[Any]) -> Ready | None:
        """Bring the batch in ``holder``, which is emptied: nobody else may keep it alive while this waits."""
        mark, samples = self._marks.mark(), count_samples(holder[0])
        number, self._number = self._number, self._number + 1
        staged = self._staging.stage(holder.pop())
        self._take_place()
        if self._stopped.is_set():
            self._staging.drop(staged)
            return None
        left = self._left.popleft()
        try:
            for event in left:  # the batch before those in the queue: devices never hold more of them than that
                self._backend.synchronize(event)
            parts, events = self._copy(staged)
            if not self._finish.is_nothing:
                pairs = zip(parts, self._devices, strict=False)
                parts = [self._finish_on(part, device, number) for part, device in pairs]
                events = [self._backend.record(stream) for stream in self._streams[: len(parts)]]
        except BaseException:
            self._staging.drop(staged)
            self._left.appendleft(left)
            self._places.give()
            raise
        return Ready(parts, events, samples, mark)

    def _take_place(self) -> None:
        """Wait until the user has taken a batch; meanwhile let go of the memory of copies that are done."""
        if not self._places.take_at_once():
            self._flight.drain()
            self._places.take()

    def _copy(self, staged: Staged) -> tuple[list[Any], list[Event]]:
        """Queue the copies of a batch, which the flight then holds in place of ``staged``."""
        shards = split_batch(staged.batch, staged.sizes)
        used = self._streams[: len(shards)]
        try:
            pairs = zip(shards, self._devices, strict=False)
            parts = [map_tensors(shard, partial(self._to, device=device)) for shard, device in pairs]
        finally:
            events = [self._backend.record(stream) for stream in used]
            sources, slot = tensors_in(staged.batch), staged.slot
            staged.batch = staged.slot = None
            self._flight.add(events, sources, slot)
        return parts, events

    def _to(self, tensor: Any, device: torch.device) -> Any:
        if is_host_tensor(tensor):
            return self._backend.copy(tensor, device)
        lies_on = tensor.device if isinstance(tensor, torch.Tensor) else tensor.data.device
        return tensor.to(device) if lies_on.type == "cpu" else tensor

    def _finish_on(self, part: Any, device: torch.device, number: int) -> Any:
        stream = self._streams[self._devices.index(device)]
        with self._backend.working_on([stream]):
            return self._finish(part, device, number)
