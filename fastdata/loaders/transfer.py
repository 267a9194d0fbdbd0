"""One epoch of a prefetcher: batches of a loader that are copied to the device.

Copies run on a side stream. The training loop's stream waits for them, not its thread. A batch is
copied into one of ``depth`` places on the device::

    next(loader) -> pinned memory -> place -> copy on the side stream -> ready -> the training loop

and the training loop gives the place back as it takes the batch. Who may write to memory when:

    pinned host memory   held until the event after its copy is done
    device memory        made on the side stream; the training loop's stream waits for the copy
                         before it reads, and ``record_stream`` keeps the memory until that stream
                         has done what it was given
    the whole device     a batch is copied when the device has left the one ``depth + 1`` before it

``copy_thread.py`` and ``loop_copies.py`` are the two ways to call this: from a thread of its own,
and from the training loop's. The schedules of ``tests/scenarios.py`` prove the order on a simulated
device; ``tests/mutants.py`` removes each line that waits, records, holds or bounds, and the
schedules must notice.
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
"""Stands for the end of a loader."""


class Place:
    """One of ``depth`` places on the device, and its events, which are used again and again.

    Attributes:
        left: recorded when the training loop takes the batch in the place: the device is then done
            with the batch before. Never recorded, it counts as done.
        ready: recorded behind the copy of the place's batch, and all other work on it.
    """

    # To make two events for each batch takes longer. Each may be recorded again only when nobody
    # needs its old state: ``left`` is done when the place is used again, the training loop's stream
    # has begun to wait for ``ready``, and the host has seen it done (``_release_oldest``).

    def __init__(self) -> None:
        # Blocking: a thread that waits must not spin.
        self.left = torch.cuda.Event(blocking=True)
        self.ready = torch.cuda.Event(blocking=True)


class Arrival(NamedTuple):
    """A batch that has arrived on the device, or is on its way there.

    Attributes:
        batch: the batch, after all work on it was queued.
        samples: number of samples in it.
        mark: how far the loader had been read with it.
        place: its place on the device; None on the CPU.
        memory: its memory on the device, each with a ``record_stream`` method.
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
    """One epoch that is read by the training loop's thread, as it asks for batches.

    Attributes:
        iterator: iterator of the loader, made in the user's thread.
        device: the device of the batches that are handed over.
        finish: does all other work on a batch there.
        sender: copies to the device; None on the CPU.
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
        stream: the side stream: of the copies, and of all other work on batches before the user
            has them.
        depth: batches on the device before the user takes them.
    """

    sender: Sender
    stream: torch.cuda.Stream
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        # What copies read on the host, until the events behind them.
        self._in_flight: deque[tuple[torch.cuda.Event, list[Any]]] = deque()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "an iterator of a prefetcher works in the process that made it; call iter() in "
                "this one"
            )

    def _queue_copy(self, batch: Any, sources: list[Any], place: Place) -> tuple[Any, list[Any]]:
        """Queue the copy of a staged batch, and all other work on it.

        Called with the side stream as the current one, when the device has left the place.

        Returns:
            The batch, and its memory on the device.
        """
        # Held before the first copy is queued: if one fails, those before it still read there.
        self._in_flight.append((place.ready, sources))
        try:
            with profiled("fastdata: copy"):
                batch = map_batch(self.sender.copy, batch, moves_itself)
            batch = self.finish(batch)
            memory = self._device_memory(batch)
        except BaseException:
            del batch  # the exception keeps this frame
            raise
        finally:
            del sources
            # Also after an error: whoever releases the sources waits for this event.
            place.ready.record(self.stream)
        return batch, memory

    def _hand_over(self, arrival: Arrival, user_stream: torch.cuda.Stream) -> Place:
        """Let the training loop's stream wait for a batch; return its place, to be used again."""
        place = arrival.place
        assert place is not None  # every batch that was copied has one
        # Recorded before the wait: the place is free after what the loop did to batches before.
        place.left.record(user_stream)
        user_stream.wait_event(place.ready)
        for owner in arrival.memory:
            owner.record_stream(user_stream)
        return place

    def _release_oldest(self) -> None:
        """Wait until the device has read a batch on the host, whose memory is then released."""
        ready, _ = self._in_flight[0]
        ready.synchronize()
        self._in_flight.popleft()

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
