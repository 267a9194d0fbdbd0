"""One epoch of a prefetcher: batches of a loader that are copied to the device.

Copies run on a side stream. The training loop's stream waits for them, but its thread does not. A
batch is copied into one of ``depth`` places on the device::

    next(loader) -> pinned memory -> place -> copy on the side stream -> ready -> the training loop

and the place is free again when the training loop takes the batch. Rules for memory:

    pinned host memory   kept until the event after its copy is done
    device memory        allocated on the side stream. The training loop's stream waits for the copy
                         before it reads. ``record_stream`` keeps the memory until the work that is
                         queued on that stream is done
    the whole device     a batch is copied only after the device has finished the work on the batch
                         ``depth + 1`` before it

There are two ways to run this: from a separate thread (``copy_thread.py``), or from the training
loop's thread (``loop_copies.py``). ``tests/scenarios.py`` tries many schedules on a simulated
device. ``tests/mutants.py`` removes each line that waits, records, holds or bounds, and some
schedule must fail.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.cuda

from fastdata.datasets.held_tensors import memory_of, moves_itself
from fastdata.datasets.trees import map_batch
from fastdata.loaders.iterators import LoopCounts, profiled, sample_count
from fastdata.loaders.pinned import Sender, device_memory, left_behind

END = object()
"""Marks the end of a loader."""


class Place:
    """One of ``depth`` places for a batch on the device, and its two events.

    Attributes:
        left: recorded on the training loop's stream when the loop takes the place's batch. When it
            is done, the device has finished the loop's work on the batches before. If it was never
            recorded, it counts as done.
        ready: recorded after the copy of the place's batch and all other work on it.
    """

    # Events are recorded again, because new ones for each batch would take longer. An event may be
    # recorded again only when its old state is not needed: ``left`` is done before the place is
    # used again. For ``ready``, the training loop's stream already waits for its old state, and the
    # host has waited for it (``_release_oldest``).

    def __init__(self) -> None:
        # Blocking: a thread that waits must not spin.
        self.left = torch.cuda.Event(blocking=True)
        self.ready = torch.cuda.Event(blocking=True)


class Arrival(NamedTuple):
    """A batch that has arrived on the device, or is on its way there.

    Attributes:
        batch: the batch, after all work on it was queued.
        samples: number of samples in it.
        mark: position of the loader after this batch.
        place: its place on the device; None on the CPU.
        memory: objects that hold its device memory, each with a ``record_stream`` method.
    """

    batch: Any
    samples: int
    mark: Any
    place: Place | None = None
    memory: Sequence[Any] = ()


Outcome = Arrival | BaseException
"""A batch, or the exception in its place; StopIteration at the end."""


@dataclass(eq=False, kw_only=True)
class LoopEpoch:
    """One epoch that the training loop's thread reads when it calls ``next()``.

    Attributes:
        iterator: iterator of the loader, made in the user's thread.
        device: the device of the batches that the user gets.
        finish: does all other work on a batch there.
        sender: copies to the device; None on the CPU.
        mark: returns the position of the loader; called by the thread that reads it.
        mark_delivered: called in the user's thread, with the mark of each batch that the user gets.
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
        called_at = time.perf_counter()
        try:
            with profiled("fastdata: wait"):
                outcome = self._next()
        except BaseException:  # Ctrl-C, or torch's signal handler for a killed worker
            self.stop()
            raise
        finally:
            self.counts.add_wait(called_at)
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
            del outcome  # otherwise exception and frame keep each other alive

    def stop(self) -> None:
        """Drop the batches that were read ahead. Idempotent; does nothing in a forked process."""
        if os.getpid() != self._pid or self._is_stopped:
            return
        self._is_stopped = True
        self._end()
        self.iterator = iter(())

    def _end(self) -> None: ...

    def _next(self) -> Outcome:
        try:
            batch = next(self.iterator)
            samples = sample_count(batch)
            return Arrival(self.finish(batch), samples, self.mark())
        except Exception as error:  # noqa: BLE001  # raised where the batch would have come
            return error


@dataclass(eq=False, kw_only=True)
class Transfer(LoopEpoch):
    """One epoch whose batches are copied to the device, at most ``depth`` ahead.

    Attributes:
        stream: the side stream, for copies and all other work on batches before the user gets them.
        depth: number of batches on the device before the user takes them.
    """

    sender: Sender
    stream: torch.cuda.Stream
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        # Host memory that copies read, with the events after these copies.
        self._in_flight: deque[tuple[torch.cuda.Event, list[Any]]] = deque()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "an iterator of a prefetcher works only in the process that made it: call iter() "
                "in this process"
            )

    def _queue_copy(self, batch: Any, sources: list[Any], place: Place) -> tuple[Any, list[Any]]:
        """Queue the copy of a staged batch, and all other work on it.

        The side stream must be the current one, and the place must be free.

        Returns:
            The batch, and its memory on the device.
        """
        # Keep the sources before the first copy is queued: if a copy fails, the copies before it
        # still read from them.
        self._in_flight.append((place.ready, sources))
        try:
            with profiled("fastdata: copy"):
                batch = map_batch(self.sender.copy, batch, moves_itself)
            batch = self.finish(batch)
            memory = self._device_memory(batch)
        except BaseException:
            del batch  # because the exception keeps this frame
            raise
        finally:
            del sources
            # Also after an error: the sources are released only after this event.
            place.ready.record(self.stream)
        return batch, memory

    def _hand_over(self, arrival: Arrival, user_stream: torch.cuda.Stream) -> Place:
        """Make the training loop's stream wait for a batch; return its place, which is free."""
        place = arrival.place
        assert place is not None  # every batch that was copied has one
        # Record before the wait: the place depends on the loop's work on earlier batches only.
        place.left.record(user_stream)
        user_stream.wait_event(place.ready)
        for owner in arrival.memory:
            owner.record_stream(user_stream)
        return place

    def _release_oldest(self) -> None:
        """Wait until the device has read the oldest batch on the host, and release its memory."""
        ready, _ = self._in_flight[0]
        ready.synchronize()
        self._in_flight.popleft()

    def _wait_for_makers(self, batch: Any) -> None:
        """Make the side stream wait for tensors that the loader has made on the device.

        The loader's threads make them on the default stream, which is current in every new thread.
        Their memory belongs to that stream, and work on the side stream may read it later.
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
        """Return a batch's objects with device memory; warn if some tensors stay on the CPU."""
        held = memory_of(batch)
        memory = [it for it in held if not isinstance(it, torch.Tensor) or it.is_cuda]
        kind = left_behind(batch) if len(memory) < len(held) else ""
        if kind:
            self.sender.pinned.add_warning(
                f"batches hold {kind}, whose tensors stay on the CPU: the class has no method "
                "to(device). Write one that returns the object on that device, and pin_memory() "
                "for copies that do not block; or put the tensors into tuples, dicts or "
                "dataclasses, which are copied item by item."
            )
        return memory


def _refuse_capture(device: torch.device) -> None:
    if not torch.backends.cuda.is_built():
        return  # such a build cannot capture, and the call below would raise
    with torch.cuda.device(device):
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise RuntimeError(
            "next() of a CudaPrefetcher was called while a CUDA graph is captured, but a graph "
            "cannot wait for a new batch. Take the batch before the capture, and copy it to a "
            "tensor that the graph reads."
        )
