"""One epoch of a prefetcher: a thread reads the loader and copies its batches to the device.

The thread copies on a stream of its own. For each batch it waits for a permit before it takes
memory on the device::

    next(loader) -> pinned memory -> permit -> copy on the side stream -> event -> queue

and the training loop's stream waits for the event, not its thread. The loop gives a permit as it
takes a batch: an event where its stream had left the batch before. There are ``depth`` to begin
with. Who may write to memory when:

    pinned host memory   held by the thread until the event after its copy is done
    device memory        made on the thread's stream; the training loop's stream waits for the copy
                         before it reads, and ``record_stream`` keeps the memory until that stream
                         has done what it was given
    the whole device     the thread copies a batch when the device has left the one ``depth + 1``
                         before it

The schedules of ``tests/scenarios.py`` prove this on a simulated device; ``tests/mutants.py``
removes each line that waits, records, holds or bounds, and the schedules must notice.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.cuda

from fastdata.datasets.held_tensors import memory_of, moves_itself
from fastdata.datasets.trees import map_batch
from fastdata.loaders.iterators import LoopCounts, profiled, sample_count
from fastdata.loaders.pinned import Sender, begin_thread, device_memory, left_behind

_PATIENCE_S = 10.0
"""Time that the end of an epoch waits for a loader that does not answer. After it the thread is
left to end with the process."""
_END = object()


class Arrival(NamedTuple):
    """A batch that has arrived on the device, or is on its way there.

    Attributes:
        batch: after all work on it was queued.
        samples: in it.
        mark: how far the loader had been read with it.
        ready: the event behind that work on the side stream.
        memory: of the device, each with a ``record_stream`` method.
    """

    batch: Any
    samples: int
    mark: Any
    ready: torch.cuda.Event | None = None
    memory: Sequence[Any] = ()


Outcome = Arrival | BaseException
"""A batch, or the exception in its place; StopIteration at the end."""


@dataclass(eq=False, kw_only=True)
class LoopEpoch:
    """One epoch that is read by the training loop's thread, as it asks for batches.

    Attributes:
        iterator: of the loader, made in the user's thread.
        device: where batches are in the end.
        finish: what is done to each batch there.
        sender: what copies to the device; None on the CPU.
        mark: returns how far the loader has been read; called by the thread that reads it.
        mark_delivered: takes the mark of a batch that the user got; called in the user's thread.
    """

    iterator: Iterator[Any]
    device: torch.device
    finish: Callable[[Any], Any]
    sender: Sender | None = None
    mark: Callable[[], Any] = lambda: None
    mark_delivered: Callable[[Any], Any] = lambda mark: None

    def __post_init__(self) -> None:
        self.counts = LoopCounts()
        self.seen: Any = None  # the mark of the user's latest batch
        self._is_stopped = False
        self._pid = os.getpid()

    def receive(self) -> Any:
        """Return the next batch, or raise the exception in its place, or StopIteration at the end.

        Called in the training loop's thread.
        """
        if self._is_stopped:
            raise StopIteration
        if self.device.type == "cuda":
            _refuse_capture(self.device)
        asked_at = time.perf_counter()
        try:
            with profiled("fastdata: wait"):
                outcome = self._next()
        except BaseException:  # Ctrl-C, or torch's signal handler for a killed worker
            self.stop()
            raise
        finally:
            self.counts.answer(asked_at)
        if self._is_stopped:  # by another thread, while this one waited
            raise StopIteration
        self.seen = outcome.mark if isinstance(outcome, Arrival) else self.mark()
        self.mark_delivered(self.seen)
        if self.sender is not None:
            self.sender.pinned.give_warnings()
        if isinstance(outcome, Arrival):
            self.counts.batches += 1
            self.counts.samples += outcome.samples
            return outcome.batch
        if isinstance(outcome, StopIteration):
            self.stop()
        try:
            raise outcome
        finally:
            del outcome  # the exception would keep this frame, and it the exception

    def stop(self) -> None:
        """Drop what was read ahead. Idempotent; nothing in a forked process."""
        if os.getpid() != self._pid or self._is_stopped:
            return
        self._is_stopped = True
        self._end_thread()
        self.iterator = iter(())

    def _end_thread(self) -> None: ...

    def _next(self) -> Outcome:
        try:
            batch = next(self.iterator)
            samples = sample_count(batch)
            return Arrival(self.finish(batch), samples, self.mark())
        except Exception as error:  # noqa: BLE001  # raised where the batch would have come
            return error


@dataclass(eq=False, kw_only=True)
class Transfer(LoopEpoch):
    """One epoch that a thread reads and copies to the device, at most ``depth`` batches ahead.

    The thread ends with the loader, or where something fails; another one begins if the user asks
    again.

    Attributes:
        stream: of the copies, and of all other work on batches before the user has them.
        depth: batches on the device before the user takes them.
    """

    sender: Sender
    stream: torch.cuda.Stream
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        # What copies read on the host, until the events behind them.
        self._in_flight: deque[tuple[torch.cuda.Event, list[Any]]] = deque()
        self._permits: SimpleQueue[torch.cuda.Event | None] = SimpleQueue()
        for _ in range(self.depth):
            self._permits.put(_event())
        self._arrivals: SimpleQueue[Outcome] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # In the user's thread

    def _next(self) -> Outcome:
        """Take the next batch, and make the calling thread's stream wait for it.

        The copy thread starts here and not before: what a loader draws for its first batch is drawn
        while the user waits.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "an iterator of a prefetcher works in the process that made it; call iter() in "
                "this one"
            )
        user_stream = torch.cuda.current_stream(self.device)
        if self._thread is None:
            # What a loader or transform reads may have been made there.
            self.stream.wait_stream(user_stream)
            self._start_thread()
        outcome = self._arrivals.get()
        if isinstance(outcome, Arrival):
            # Recorded before the wait: the permit is for what the loop did to batches before.
            left = _event()
            left.record(user_stream)
            assert outcome.ready is not None  # it is of every batch that was copied
            user_stream.wait_event(outcome.ready)
            for owner in outcome.memory:
                owner.record_stream(user_stream)
            self._permits.put(left)
        elif not self._is_stopped:  # the thread has put it, and ends now
            thread = self._thread
            self._thread = None
            if thread is not None:
                thread.join()
        return outcome

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="fastdata-prefetch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise RuntimeError(
                f"CudaPrefetcher cannot start its thread: {error}. This process has "
                f"{threading.active_count()} Python threads. Allow more (`ulimit -u`, or the "
                "container's limit of processes), or use fewer workers."
            ) from error
        self._thread = thread

    def _end_thread(self) -> None:
        # Wakes a thread that waits for a permit. One that reads the loader sees ``_is_stopped``.
        self._permits.put(None)
        thread = self._thread  # read once: the training loop's thread may drop it
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
        with suppress(Empty):
            while True:
                self._arrivals.get_nowait()  # the training loop's thread may take some, too
        self._arrivals.put(StopIteration())  # for a loop that waits in another thread

    # In the copy thread

    def _run(self) -> None:
        outcome: BaseException = StopIteration()
        try:
            begin_thread(self.device)
            try:
                with torch.cuda.stream(self.stream):
                    while self._copy_next():
                        pass
                self.iterator = iter(())
            finally:
                # Of a lost device they stay: to free pinned memory asks it, and aborts the process.
                while self._in_flight:
                    self._release_oldest()
        except BaseException as error:  # noqa: BLE001  # raised where its batch would have come
            # Without this frame.
            outcome = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self._arrivals.put(outcome)
        del outcome  # it would keep this frame, and this frame it

    def _release_oldest(self) -> None:
        """Wait until the device has read a batch on the host, whose memory is then released."""
        ready, _ = self._in_flight[0]
        ready.synchronize()
        self._in_flight.popleft()

    def _copy_next(self) -> bool:
        """Copy one batch; return False if there is none, or it is not wanted any more."""
        if self._is_stopped:
            return False
        batch = next(self.iterator, _END)
        if batch is _END:
            return False
        mark = self.mark()
        samples = sample_count(batch)
        self._wait_for_makers(batch)
        batch, sources = self.sender.stage(batch)
        permit = self._permits.get()
        if permit is None or self._is_stopped:
            return False
        try:
            # So the device never holds more than the queue, the loop's batch and this one.
            permit.synchronize()
            if len(self._in_flight) == self.depth:
                self._release_oldest()
            ready = _event()
            # Held before the first copy is queued: if one fails, those before it still read there.
            self._in_flight.append((ready, sources))
            try:
                with profiled("fastdata: copy"):
                    batch = map_batch(self.sender.copy, batch, moves_itself)
                batch = self.finish(batch)
            finally:
                del sources  # an exception keeps this frame
                # Also after an error: whoever releases the sources waits for this event.
                ready.record(self.stream)
            memory = self._device_memory(batch)
        except BaseException:
            # No batch uses the permit, and the thread after this one would lack it.
            del batch
            self._permits.put(permit)
            raise
        self._arrivals.put(Arrival(batch, samples, mark, ready, memory))
        return True

    def _wait_for_makers(self, batch: Any) -> None:
        """Let the side stream wait for tensors that the loader has made on the device.

        Its threads make them on the default stream, which is current in every new thread. Their
        memory belongs to that stream, and what is done to them here may read it later.
        """
        made = [
            it
            for it in device_memory(batch)
            if isinstance(it, torch.Tensor) and it.device == self.device
        ]
        if made:
            self.stream.wait_stream(torch.cuda.default_stream(self.device))
            for tensor in made:
                tensor.record_stream(self.stream)

    def _device_memory(self, batch: Any) -> list[Any]:
        """Return what the loop's stream must be recorded on; warn of what has stayed on the CPU."""
        held = memory_of(batch)
        memory = [it for it in held if not isinstance(it, torch.Tensor) or it.is_cuda]
        kind = left_behind(batch) if len(memory) < len(held) else ""
        if kind:
            self.sender.pinned.add_warning(
                f"batches hold {kind}, whose tensors stay on the CPU: the class has no method "
                "to(device). Write one that returns the object on that device, and pin_memory() "
                "for copies that do not wait; or put the tensors into tuples, dicts or "
                "dataclasses, which are copied item by item."
            )
        return memory


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # a waiting thread must not spin


def _refuse_capture(device: torch.device) -> None:
    if not torch.backends.cuda.is_built():
        return  # such a build captures nothing, and the question below raises
    with torch.cuda.device(device):
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise RuntimeError(
            "next() of a CudaPrefetcher was called while a CUDA graph is captured, which "
            "cannot hold the arrival of a batch. Take the batch before the capture, and copy "
            "it to a tensor that the graph reads."
        )
