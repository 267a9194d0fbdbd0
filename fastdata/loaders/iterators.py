"""Iterators over one epoch, whose batches are made by threads or in the training loop.

``CountedIterator`` is the base class of all iterators; the one with processes is in
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
"""Memory that batches reuse: for threads, or for worker processes."""

MakeBatch = Callable[[IndexBatch, BatchRing], Any]

HELD_BY_USER = 2
"""Batches that the training loop may hold before new memory is needed: the current one and the
next."""


def profiled(name: str) -> AbstractContextManager[Any]:
    """Name a span of time for torch's profiler.

    If no profiler runs, this takes 0.3 us; torch's ``record_function`` takes 4 us.
    """
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """Reads and collates a batch, in any thread.

    It holds neither the loader nor the iterator: a reference from a thread would keep a dropped
    iterator, and its threads, alive.

    Attributes:
        fetch: reads the samples if there is no handle.
        handle: handle of the fastdata dataset's reader; None if a method of the user's own class
            must be called for each index.
        ring: memory for batches.
        collate_fn: the loader's ``collate_fn``.
        in_thread: True in a thread, False in the training loop, where the user's code may draw
            from torch's global generator.
        channels_last: True if batches must have this memory format.
        read: makes a batch from indices, and replaces all other attributes; None for the usual way.
    """

    fetch: Callable[[Any], Any]
    handle: AnyHandle | None
    ring: BatchRing
    collate_fn: Collate
    in_thread: bool
    channels_last: bool
    read: MakeBatch | None

    @property
    def is_whole(self) -> bool:
        """True if batches are read whole, and no code of the user is called for them."""
        if self.read is not None:
            return True
        reader = None if self.handle is None else self.handle.reader
        if reader is None or reader.obstacle_if_alike is not None:
            return False
        return self.collate_fn is collate and reader.target_transform is None

    def __call__(self, indices: Any, draws: DrawKey) -> Any:
        with profiled("fastdata: read"):
            read = self.fetch
            is_collated = False
            may_draw = self.in_thread  # True if the user's own code runs in a thread
            if self.handle is not None and isinstance(indices, IndexBatch):
                # An empty batch takes the usual way, where collating it raises torch's error.
                if self.read is not None and indices:
                    return self.read(indices, self.ring)
                # Inlined, not `reader_of(handle)`: every batch runs this line.
                reader = self.handle.reader
                if reader is None:
                    raise StoreGoneError(self.handle.reason)
                is_whole = reader.obstacle_if_alike is None
                is_collated = is_whole and self.collate_fn is collate and len(indices) > 0
                read = partial(reader if is_collated else reader.items, allocate=self.ring.lease)
                may_draw &= not is_whole or reader.target_transform is not None
            # Threads share torch's global generator. The user's code gets a generator of the batch
            # instead, so that a batch is the same in whichever thread it is made. In the training
            # loop it draws from the global generator, as with torch's loader.
            with BatchDraws(draws.for_reading()) if may_draw else nullcontext():
                batch = read(indices)
            if not is_collated:
                batch = draws.collate(self.collate_fn, batch)
            return as_channels_last(batch) if self.channels_last else batch


@dataclass(slots=True)
class LoopCounts:
    """Counts of the batches and samples that the training loop got, and of its time.

    Attributes:
        ring: memory that the batches use.
        batches: number of batches.
        samples: number of samples in these batches.
        wait_s: seconds that the loop waited for batches.
        begun_at: when the loop first called ``next``, by ``time.perf_counter``.
        left_at: when the latest ``next`` returned. Between these two the loop waited or was busy.
    """

    ring: Slots | None = None
    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    begun_at: float = 0.0
    left_at: float = 0.0

    def add_wait(self, called_at: float) -> None:
        """Add the time since ``next`` was called, at ``called_at``, to the time waited."""
        self.left_at = time.perf_counter()
        self.wait_s += self.left_at - called_at
        self.begun_at = self.begun_at or called_at

    def times(self) -> tuple[float, float]:
        """Return the seconds that the loop waited, and the seconds that it was busy."""
        return self.wait_s, self.left_at - self.begun_at - self.wait_s

    def figures(self) -> dict[str, Any]:
        """Return the counts as fields of an ``EpochReport``."""
        wait_s, busy_s = self.times()
        return {
            "batches": self.batches,
            "samples": self.samples,
            "wait_s": wait_s,
            "busy_s": busy_s,
        }


def sample_count(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 0 without tensors, or for a scalar."""
    if type(batch) is list and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return batch[0].size(0)  # the usual batch, without a search
    try:
        return next(it.size(0) for it in leaves_of(batch) if isinstance(it, torch.Tensor))
    except Exception:  # noqa: BLE001  # users' types may raise anything
        return 0


class CountedIterator(torch_loader._BaseDataLoaderIter):
    """An iterator that counts its batches, and the time that the training loop waits for them."""

    # Persistent workers keep their iterator: these attributes and ``progress`` are then replaced
    # for each epoch.
    counts: LoopCounts
    ring: Slots | None = None  # memory that batches use
    handle: AnyHandle | None = None  # has no reader once the dataset is closed: the epoch ends

    ended = ""  # why the epoch ended early; empty if it did not
    after_batch: Callable[[], Any] | None = None
    _task_info: Any = ()  # batches whose indices were drawn, not yet returned; torch's own name

    def __init__(self, view: EpochLoader, progress: Progress) -> None:
        self.progress = progress
        super().__init__(view)  # type: ignore[arg-type]  # it has a loader's attributes

    # torch's ``__init__`` draws a base seed and assigns it. The draw must happen, so that the
    # user's generator advances as with torch. A resumed epoch then ignores it, and keeps the base
    # seed of its state.

    @property
    def _base_seed(self) -> Any:
        return self.progress.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: float) -> None:
        if self.progress.base_seed is None:
            self.progress.base_seed = int(drawn)

    def stop(self) -> None:
        """End the iterator's threads, if there are any."""

    def __next__(self) -> Any:
        if self.ended:
            raise RuntimeError(f"this iterator has no more batches: {self.ended}")
        counts = self.counts
        progress = self.progress
        called_at = time.perf_counter()
        try:
            if self.handle is not None and self.handle.reader is None:
                raise StoreGoneError(self.handle.reason)
            # For datasets with a length, torch's ``__next__`` adds only an entry for the profiler,
            # which takes 10 us. It is skipped if no profiler runs.
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
            # Also after an error: a batch that failed counts as returned. Otherwise a resumed epoch
            # would stop at the same batch again.
            progress.handed = progress.drawn - len(self._task_info)
            counts.add_wait(called_at)
            if self.after_batch is not None:
                self.after_batch()


class InlineIter(CountedIterator, torch_loader._SingleProcessDataLoaderIter):
    """torch's engine in the training loop, with counts."""


class ThreadIter(CountedIterator):
    """Batches in order: read ahead by threads, or read in the training loop if there are none.

    An exception is raised when its batch is due. The threads end with the epoch, or when the
    iterator is dropped, for example after ``break``.

    Args:
        view: the loader, with its settings for this epoch.
        progress: position in the epoch.
        read: makes a batch. It must not refer to the iterator: threads hold ``read``, so that a
            dropped iterator would never be freed.
        threads: number of threads; 0 reads in the training loop.
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
            # A finaliser, not ``__del__``: it does not refer to the iterator, and also runs when
            # Python exits.
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

    @property
    def reads_whole(self) -> bool:
        """True if threads read whole batches into the ring, without code of the user's."""
        return self._threads is not None and self._read.is_whole

    def has_next(self) -> bool:
        """Return True if ``next`` would not wait for the threads."""
        return bool(self._task_info) and self._task_info[0].done()

    def _receive(self, threads: ThreadPoolExecutor) -> Any:
        """Return the next batch, or raise its exception, and submit a later one."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this iterator of a DataLoader belongs to process {self._pid}, whose threads read "
                f"its batches. Process {os.getpid()} was forked from it, and a fork does not copy "
                "threads. Call iter() on the DataLoader in the process that reads the batches, or "
                "use num_workers=0."
            )
        if not self._task_info:
            self._submit(threads)
        if not self._task_info:
            self.stop()
            raise StopIteration
        # The batch stays first in the queue while the loop waits: it is still due if a timeout or
        # Ctrl-C interrupts the wait.
        future = self._task_info[0]
        try:
            # A TimeoutError that the batch itself raised is returned here, not raised.
            error = future.exception(float(self._timeout) or None)
        except FutureTimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        if isinstance(error, (IngestError, MemoryBudgetError)):  # all later batches would fail too
            self.ended = f"the epoch ended with {type(error).__name__}: {error}"
            self.stop()
        else:
            self._task_info.popleft()
        try:
            return future.result()
        finally:
            # The traceback of an exception holds this frame, and this frame would hold the
            # exception: a cycle that keeps the batch's memory until the next garbage collection.
            del future, error
            self._submit(threads)

    def _submit(self, threads: ThreadPoolExecutor) -> None:
        """Submit batches to the threads until enough are read ahead."""
        while not self.ended and len(self._task_info) < self._ahead:
            try:
                indices = next(self._sampler_iter)
                # This fails if the system allows no further thread.
                future = threads.submit(self._read, indices, self.progress.draws)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001  # raised when its batch is due
                future = Future()
                future.set_exception(error)
            self._task_info.append(future)


def _stop(threads: ThreadPoolExecutor) -> None:
    """End the threads, and drop the batches that were not begun.

    Two cases must not wait for the threads to end. If one of them dropped the last reference to the
    iterator, it would wait for itself. If the garbage collector called this while the same thread
    holds a lock of ``threading`` that joining takes, it would wait for that lock.
    """
    lock = getattr(threading, "_shutdown_locks_lock", None)  # up to Python 3.12
    is_locked = lock is not None and lock.locked()
    is_own = threading.get_ident() in {thread.ident for thread in threads._threads}
    threads.shutdown(wait=not is_own and not is_locked, cancel_futures=True)
