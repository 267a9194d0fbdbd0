"""Iterators of one epoch, whose batches are made by threads or in the training loop.

What all iterators have in common is ``CountedIterator``; that of processes is in
``worker_processes``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils.pin_memory import pin_memory as copy_to_pinned

from fastdata.datasets.batch import Collate, collate
from fastdata.datasets.buffers import BatchRing
from fastdata.datasets.draws import BatchDraws, DrawKey
from fastdata.datasets.receiver import BatchReceiver
from fastdata.datasets.trees import as_channels_last, leaves_of
from fastdata.datasets.visits import IndexBatch
from fastdata.errors import IngestError, MemoryBudgetError, StoreGoneError

if TYPE_CHECKING:
    from fastdata.loaders.internals import EpochLoader
    from fastdata.loaders.parts import AnyHandle
    from fastdata.loaders.progress import Progress


Slots = BatchRing | BatchReceiver
"""Reused memory of batches: of threads, or of worker processes."""

MakeBatch = Callable[[IndexBatch, BatchRing], Any]

HELD_BY_USER = 2
"""Batches that the training loop may hold without new memory: the current one and the next."""


def profiled(name: str) -> AbstractContextManager[Any]:
    """Name a span for a profiler; without one it takes 0.3 us, where torch's takes 4 us."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """Reads and collates a batch, in any thread; holds neither loader nor iterator.

    Attributes:
        fetch: reads samples if there is no handle.
        handle: handle of the reader of the fastdata dataset; None if a method of the user's own
            must be called for each index.
        ring: memory for batches.
        collate_fn: the user's.
        in_thread: True outside the training loop, which may draw from torch's generator too.
        channels_last: True if batches are to have this memory format.
        read: makes a batch of indices instead of all this.
    """

    fetch: Callable[[Any], Any]
    handle: AnyHandle | None
    ring: BatchRing
    collate_fn: Collate
    in_thread: bool
    channels_last: bool
    read: MakeBatch | None

    def __call__(self, indices: Any, draws: DrawKey) -> Any:
        with profiled("fastdata: read"):
            read = self.fetch
            is_collated = False
            may_draw = self.in_thread  # the user's own code
            if self.handle is not None and isinstance(indices, IndexBatch):
                # Collating an empty batch raises torch's error.
                if self.read is not None and indices:
                    return self.read(indices, self.ring)
                # Not by a call: this is on the way of each batch.
                reader = self.handle.reader
                if reader is None:
                    raise StoreGoneError(self.handle.reason)
                is_whole = reader.obstacle_if_alike is None
                is_collated = is_whole and self.collate_fn is collate and len(indices) > 0
                read = partial(reader if is_collated else reader.items, allocate=self.ring.lease)
                may_draw &= not is_whole or reader.target_transform is not None
            # Threads share torch's generator: code of the user's draws from the batch's own
            # numbers, so that a batch is the same whichever thread makes it. Not in the training
            # loop, where torch's loader draws from the generator too.
            with BatchDraws(draws.for_reading()) if may_draw else nullcontext():
                batch = read(indices)
            if not is_collated:
                batch = draws.collate(self.collate_fn, batch)
            return as_channels_last(batch) if self.channels_last else batch


@dataclass(slots=True)
class LoopCounts:
    """Batches and samples that the training loop got, and its time.

    Attributes:
        ring: memory that batches come through.
        batches: number of batches.
        samples: number of samples in them.
        wait_s: seconds that the loop waited.
        begun_at: time of its first request.
        left_at: time of the last answer; between these it waited or was busy.
    """

    ring: Slots | None = None
    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    begun_at: float = 0.0
    left_at: float = 0.0

    def answer(self, asked_at: float) -> None:
        """Count the time since a request, and end its waiting."""
        self.left_at = time.perf_counter()
        self.wait_s += self.left_at - asked_at
        self.begun_at = self.begun_at or asked_at

    def times(self) -> tuple[float, float]:
        """Return the seconds that the loop waited, and those that it was busy."""
        return self.wait_s, self.left_at - self.begun_at - self.wait_s

    def figures(self) -> dict[str, Any]:
        """Return the fields of an ``EpochReport``."""
        wait_s, busy_s = self.times()
        return {
            "batches": self.batches,
            "samples": self.samples,
            "wait_s": wait_s,
            "busy_s": busy_s,
        }


def sample_count(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 0 if it has none, or no length."""
    if type(batch) is list and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return batch[0].size(0)  # the usual batch, without a search
    try:
        return next(it.size(0) for it in leaves_of(batch) if isinstance(it, torch.Tensor))
    except Exception:  # noqa: BLE001  # users' types may raise anything
        return 0


class CountedIterator(torch_loader._BaseDataLoaderIter):
    """An iterator that counts what it hands over and how long it kept the user waiting."""

    # These and ``progress`` are replaced for each epoch of persistent workers.
    counts: LoopCounts
    ring: Slots | None = None  # memory that batches come through
    handle: AnyHandle | None = None  # once the dataset is closed it ends the epoch

    ended = ""  # the reason if no more batches come, although there are some
    after_batch: Callable[[], Any] | None = None
    _task_info: Any = ()  # batches that were drawn, but not handed over; torch's own name

    def __init__(self, view: EpochLoader, progress: Progress) -> None:
        self.progress = progress
        super().__init__(view)  # type: ignore[arg-type]  # it has a loader's attributes

    # torch's ``__init__`` draws a base seed and assigns it. The draw must take place, so that the
    # user's generator moves as with torch; a resumed epoch keeps the seed of its state.

    @property
    def _base_seed(self) -> Any:
        return self.progress.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: float) -> None:
        if self.progress.base_seed is None:
            self.progress.base_seed = int(drawn)

    def stop(self) -> None:
        """End the threads of the iterator, if it has some."""

    def __next__(self) -> Any:
        if self.ended:
            raise RuntimeError(f"this iterator has no more batches: {self.ended}")
        counts = self.counts
        progress = self.progress
        asked_at = time.perf_counter()
        try:
            if self.handle is not None and self.handle.reader is None:
                raise StoreGoneError(self.handle.reason)
            # torch's ``__next__`` takes 10 us for a profiler's entry, and does nothing else for
            # datasets that have a length.
            is_stream = self._dataset_kind == torch_loader._DatasetKind.Iterable
            is_plain = not is_stream and not profiler._is_profiler_enabled
            batch = self._next_data() if is_plain else super().__next__()
            counts.batches += 1
            counts.samples += sample_count(batch) if self._auto_collation else 1
            return batch
        except StopIteration:
            progress.is_finished = True
            raise
        finally:
            # Also after an error: a batch that failed counts as handed over, or a resumed epoch
            # would fail again.
            progress.handed = progress.drawn - len(self._task_info)
            counts.answer(asked_at)
            if self.after_batch is not None:
                self.after_batch()


class InlineIter(CountedIterator, torch_loader._SingleProcessDataLoaderIter):
    """torch's engine in the training loop, counted."""


class ThreadIter(CountedIterator):
    """Batches read ahead by threads, or in the training loop when there are none; always in order.

    An exception is raised when its batch is due. Threads end with the epoch, or when the
    iterator is dropped, as by ``break``. Therefore ``read``, which makes a batch of its indices and
    draws, must not refer to the iterator.
    """

    def __init__(
        self, view: EpochLoader, progress: Progress, read: BatchMaker, *, threads: int
    ) -> None:
        super().__init__(view, progress)
        self.ring = read.ring
        self._read = read
        self._task_info = deque[Future[Any]]()
        self._ahead = threads * (view.prefetch_factor or 1)
        self._threads: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        if threads:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="fastdata-loader")
            # Not ``__del__``: the finaliser holds the threads alone, and runs at exit too.
            self.stop = weakref.finalize(self, _stop, self._threads)  # type: ignore[method-assign]
            if not progress.waits_for_next:
                self._submit(self._threads)

    def _next_data(self) -> Any:
        if self._threads is None:
            indices = next(self._sampler_iter)
            batch = self._read(indices, self.progress.draws)
        else:
            batch = self._receive(self._threads)
        return copy_to_pinned(batch) if self._pin_memory else batch

    def _receive(self, threads: ThreadPoolExecutor) -> Any:
        """Return the next batch, or raise its exception, and ask for a later one."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this iterator of a DataLoader was begun in process {self._pid}, whose threads "
                f"read its batches. Process {os.getpid()} was forked from it and does not have "
                "them. Call iter() on the DataLoader in the process that reads the batches, or use "
                "num_workers=0."
            )
        if not self._task_info:
            self._submit(threads)
        if not self._task_info:
            self.stop()
            raise StopIteration
        # It stays in the list while it is awaited: after a timeout or Ctrl-C it is still due.
        future = self._task_info[0]
        try:
            # The batch's own TimeoutError is returned.
            error = future.exception(float(self._timeout) or None)
        except FutureTimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        if isinstance(error, (IngestError, MemoryBudgetError)):  # no batch comes after it
            self.ended = f"the epoch ended with {type(error).__name__}: {error}"
            self.stop()
        else:
            self._task_info.popleft()
        try:
            return future.result()
        finally:
            del future, error  # an exception would keep them, and they the exception
            self._submit(threads)

    def _submit(self, threads: ThreadPoolExecutor) -> None:
        """Ask the threads for batches until enough are read ahead."""
        while not self.ended and len(self._task_info) < self._ahead:
            try:
                indices = next(self._sampler_iter)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001  # raised when its batch is due
                future: Future[Any] = Future()
                future.set_exception(error)
            else:
                future = threads.submit(self._read, indices, self.progress.draws)
            self._task_info.append(future)


def _stop(threads: ThreadPoolExecutor) -> None:
    """End the threads; batches that are not begun are dropped.

    Do not wait in a thread that drops the last reference, which would wait for itself; nor in one
    that the garbage collector interrupts while it holds the lock of ``threading`` that a join
    takes.
    """
    lock = getattr(threading, "_shutdown_locks_lock", None)  # until Python 3.12
    is_locked = lock is not None and lock.locked()
    is_own = threading.get_ident() in {thread.ident for thread in threads._threads}
    threads.shutdown(wait=not is_own and not is_locked, cancel_futures=True)
