"""One epoch of a prefetcher whose batches are copied by the training loop's own thread.

Threads of fastdata's loader read whole batches into pinned memory. What is left is to queue a copy
and a few kernels for each batch, which takes tens of microseconds. The training loop does this
inside ``next()``, for all batches that the readers have finished. A thread for it would compete
with the training loop for the GIL (pytorch#77139), which delays each kernel of a small step.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.cuda

from fastdata.loaders.copy_thread import ThreadTransfer
from fastdata.loaders.iterators import ThreadIter, sample_count
from fastdata.loaders.pinned import host_memory
from fastdata.loaders.transfer import END, Arrival, Outcome, Place

_LARGE_BYTES = 1 << 20
"""A host copy of as many bytes would hold up the training loop."""


@dataclass(eq=False, kw_only=True)
class LoopTransfer(ThreadTransfer):
    """One epoch whose copies are queued inside ``next()``.

    ``next()`` waits for the readers only if no batch is on the device. It waits for the device only
    if, besides, the device has not left the batch ``depth + 1`` before: then ``depth`` steps of the
    training loop are still queued there.

    If batches are not read into pinned memory, which the first one shows, they need a host copy.
    Then a thread copies them, as in ``ThreadTransfer``.

    Attributes:
        iterator: reads whole batches, by threads and without code of the user's.
    """

    # Host order, in one thread (``close`` may come from another; ``_lock`` is for that):
    #   wait for ``left`` of a place -> queue the copy of batch i -> record ``ready``
    #   next(): record ``left`` -> the training loop's stream waits for ``ready`` -> batch i

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.iterator, ThreadIter)
        self._readers: ThreadIter | None = self.iterator
        # Held while copies are queued, and while ``_end`` drops them; never to wait for a reader.
        self._lock = threading.Lock()
        # Empty ones in the order in which the device leaves them; with the batches on the device
        # they are ``depth``.
        self._empty = deque(Place() for _ in range(self.depth))
        # Batches on the device, and behind them an exception or the end (at most one).
        self._queue: deque[Outcome] = deque()
        self._is_begun = False
        self._is_by_thread = False

    def _next(self) -> Outcome:
        """Take the next batch, and make the calling thread's stream wait for it."""
        if self._is_by_thread:
            return super()._next()
        self._check_process()
        with self._lock:
            self._queue_finished()
            is_empty = not self._queue
        if is_empty:
            # Not under the lock: ``close`` in another thread must not wait for the readers.
            batch = self._read()
            if not self._is_begun and _needs_host_copy(batch):
                self._is_by_thread = True
                self.iterator = chain([batch], self.iterator)
                return super()._next()
            with self._lock:
                self._is_begun = True
                if self._is_stopped:
                    return StopIteration()
                self._queue.append(self._copy(batch))
                del batch
                self._queue_finished()
        with self._lock:
            if self._is_stopped:  # which has dropped the queue
                return StopIteration()
            outcome = self._queue.popleft()
            if isinstance(outcome, Arrival):
                user_stream = torch.cuda.current_stream(self.device)
                self._empty.append(self._hand_over(outcome, user_stream))
            return outcome

    def _queue_finished(self) -> None:
        """Queue copies of the batches that the readers have finished, without waiting."""
        # Nothing is read behind an exception until the training loop has got it.
        while self._is_begun and self._has_room():
            if self._readers is None or not self._readers.has_next():
                return
            self._queue.append(self._copy(self._read()))

    def _has_room(self) -> bool:
        """Return True if a batch can be copied without waiting for the device."""
        if self._is_stopped or not self._empty or not self._empty[0].left.query():
            return False
        if self._queue and not isinstance(self._queue[-1], Arrival):
            return False
        # The place's last copy, whose sources are released next.
        return len(self._in_flight) < self.depth or self._in_flight[0][0].query()

    def _read(self) -> Any:
        """Return the next batch of the readers, their exception, or ``END``; wait for it."""
        try:
            return next(self.iterator, END)
        except Exception as error:  # noqa: BLE001  # raised where its batch would have come
            # Without this frame.
            return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)

    def _copy(self, batch: Any) -> Outcome:
        """Queue the copy of what ``_read`` has returned, after waiting for a place."""
        try:
            if batch is END:
                self._release_all()
                return StopIteration()
            if isinstance(batch, Exception):
                return batch
            mark = self.mark()
            samples = sample_count(batch)
            place = self._empty[0]
            # So the device never holds more than the queue, the loop's batch and this one. Done
            # already where ``_has_room`` is true.
            place.left.synchronize()
            if len(self._in_flight) == self.depth:
                self._release_oldest()
            # Not in the modes that the training loop may have entered. In inference mode a batch
            # would be one that cannot be trained on later.
            modes = torch.inference_mode(mode=False), _without_autocast()
            with modes[0], modes[1], torch.cuda.stream(self.stream):
                self._wait_for_makers(batch)
                batch, sources = self.sender.stage(batch)
                batch, memory = self._queue_copy(batch, sources, place)
            self._empty.popleft()
            return Arrival(batch, samples, mark, place, memory)
        except Exception as error:  # noqa: BLE001  # raised where its batch would have come
            return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)

    def _release_all(self) -> None:
        while self._in_flight:
            self._release_oldest()

    def _end(self) -> None:
        if self._is_by_thread:
            super()._end()
        with self._lock:
            # It holds batches that nobody took. Its threads end with its last reference.
            self._readers = None
            self._queue.clear()
            if self._is_by_thread:
                return
            try:
                # The next epoch's readers write to this memory.
                self._release_all()
            except RuntimeError:
                # The device is lost, which ``next`` has raised or will raise. The memory is kept:
                # to free pinned memory asks the device, and aborts the process.
                return


def _without_autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled() else nullcontext()


def _needs_host_copy(batch: Any) -> bool:
    """Return True if a batch has a large tensor that is not pinned."""
    if isinstance(batch, Exception):  # which refers to its frames, and these to tensors
        return False
    return any(it.nbytes >= _LARGE_BYTES and not it.is_pinned() for it in host_memory(batch))
