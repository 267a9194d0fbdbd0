"""One epoch of a prefetcher whose batches are copied by the training loop's own thread.

Threads of fastdata's loader read whole batches into pinned memory. After that, each batch needs
only one queued copy and a few kernels, which takes tens of microseconds. The training loop does
this inside ``next()``, for all batches that the readers have finished. A separate thread would
compete with the training loop for the GIL (pytorch#77139), which delays each kernel of a small
step.
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
"""A copy on the host of at least this size would delay the training loop."""


@dataclass(eq=False, kw_only=True)
class LoopTransfer(ThreadTransfer):
    """One epoch whose copies are queued inside ``next()``.

    ``next()`` waits for the readers only if no batch is on the device. It waits for the device only
    if, in addition, the device has not finished the batch ``depth + 1`` before: then ``depth``
    steps of the training loop are still queued there.

    If the first batch is not in pinned memory, batches need a copy on the host. Then a thread
    copies them, as in ``ThreadTransfer``.

    Attributes:
        iterator: reads whole batches with threads, and without the user's code.
    """

    # Order on the host, in one thread (``_lock`` is needed because another one may call ``close``):
    #   wait for ``left`` of a place -> queue the copy of batch i -> record ``ready``
    #   next(): record ``left`` -> the training loop's stream waits for ``ready`` -> batch i

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.iterator, ThreadIter)
        self._readers: ThreadIter | None = self.iterator
        # Held while copies are queued, and while ``_end`` drops them; never while waiting for a
        # reader.
        self._lock = threading.Lock()
        # Free places in the order in which the device leaves them. Together with the places of
        # batches on the device there are ``depth``.
        self._empty = deque(Place() for _ in range(self.depth))
        # Batches on the device, and the exception or the end that follows them (at most one).
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
            if self._is_stopped:  # the queue was dropped
                return StopIteration()
            outcome = self._queue.popleft()
            if isinstance(outcome, Arrival):
                user_stream = torch.cuda.current_stream(self.device)
                self._empty.append(self._hand_over(outcome, user_stream))
            return outcome

    def _queue_finished(self) -> None:
        """Queue copies of the batches that the readers have finished, without waiting."""
        # After an exception nothing is read until the training loop has received it.
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
        # The oldest copy must be done, because its sources are released before the next copy.
        return len(self._in_flight) < self.depth or self._in_flight[0][0].query()

    def _read(self) -> Any:
        """Wait for the next batch of the readers; return it, their exception, or ``END``."""
        try:
            return next(self.iterator, END)
        except Exception as error:  # noqa: BLE001  # raised where its batch would have come
            # Without this frame.
            return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)

    def _copy(self, batch: Any) -> Outcome:
        """Queue the copy of a result of ``_read``, after waiting for a place."""
        try:
            if batch is END:
                self._release_all()
                return StopIteration()
            if isinstance(batch, Exception):
                return batch
            mark = self.mark()
            samples = sample_count(batch)
            place = self._empty[0]
            # This limits the batches on the device: those in the queue, the loop's and this one.
            # It returns at once if ``_has_room`` was true.
            place.left.synchronize()
            if len(self._in_flight) == self.depth:
                self._release_oldest()
            # Leave the modes that the training loop may have entered. A batch that is made in
            # inference mode could not be used for training later.
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
            # The iterator holds batches that were not taken. Its threads end with its last
            # reference; ``stop`` drops the other one.
            self._readers = None
            self._queue.clear()
            if self._is_by_thread:
                return
            try:
                # Wait for the copies: the next epoch's readers write to the memory that they read.
                self._release_all()
            except RuntimeError:
                # The device is lost; ``next`` has raised this error, or will raise it. The memory
                # is kept: freeing pinned memory would call the device, which aborts the process.
                return


def _without_autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", enabled=False) if torch.is_autocast_enabled() else nullcontext()


def _needs_host_copy(batch: Any) -> bool:
    """Return True if a batch has a large tensor that is not pinned."""
    if isinstance(batch, Exception):  # its frames refer to tensors, but they are not copied
        return False
    return any(it.nbytes >= _LARGE_BYTES and not it.is_pinned() for it in host_memory(batch))
