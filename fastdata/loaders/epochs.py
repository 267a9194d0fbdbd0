"""One epoch of a loader: who reads its batches, and the iterators that hand them over."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.autograd import profiler
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils.pin_memory import pin_memory as copy_to_pinned

from fastdata.datasets.batch import (
    BatchDraws,
    DrawKey,
    IndexBatch,
    as_channels_last,
    collate,
    flatten,
)
from fastdata.datasets.reader import BatchRing, ReaderHandle
from fastdata.datasets.ring import BatchReceiver, RingCollate
from fastdata.errors import IngestError, MemoryBudgetError
from fastdata.loaders.order import Progress
from fastdata.loaders.view import JoinedHandle
from fastdata.machine.memory import PinningPlan
from fastdata.report import EpochReport

Slots = BatchRing | BatchReceiver
AnyLoader: TypeAlias = "torch_loader.DataLoader[Any]"
HELD_BY_USER = 2
"""Batches that the training loop may hold without costing new memory: the current one and one
looked ahead."""


class Engine(NamedTuple):
    """Who reads batches, how many (0: the training loop), and why."""

    kind: Literal["thread", "process"]
    path: str
    workers: int


def shown_as(name: str) -> AbstractContextManager[Any]:
    """Let a profiler show what runs within; 0.3 us without one, where torch's own takes 4 us."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """Reads and collates a batch, in any thread; holds neither loader nor iterator.

    Attributes:
        dataset: what is read where there is no handle.
        handle: of the reader of the fastdata dataset behind it; None where only the dataset knows
            what an index means.
        ring: that batches take memory from.
        collate_fn: the user's.
        in_thread: whether that is outside the loop, which may draw from torch's generator too.
        channels_last: whether batches are to lie so.
        read: makes a batch of indices in place of all this.
    """

    dataset: Any
    handle: ReaderHandle | JoinedHandle | None
    ring: BatchRing
    collate_fn: Callable[[Any], Any]
    in_thread: bool
    channels_last: bool = False
    read: Callable[[Any, BatchRing], Any] | None = None

    def __call__(self, indices: Any, draws: DrawKey) -> Any:
        with shown_as("fastdata: read"):
            handle = self.handle if isinstance(indices, IndexBatch) else None
            if self.read is not None and handle is not None:
                return self.read(indices, self.ring)
            reader = None if handle is None else handle.reader or handle()
            is_whole = reader is not None and reader.obstacle is None
            # Whether no code of the user's own reads.
            is_ours = reader is not None and is_whole and reader.target_transform is None
            is_collated = is_whole and self.collate_fn is collate
            with nullcontext() if is_ours or not self.in_thread else BatchDraws(draws.apart()):
                if reader is not None:
                    read = reader if is_collated else reader.items
                    batch = read(indices, self.ring.take)
                elif getattr(self.dataset, "__getitems__", None):
                    batch = self.dataset.__getitems__(indices)
                else:
                    batch = [self.dataset[index] for index in indices]
            if not is_collated:
                batch = draws.collated(self.collate_fn, batch)
            return as_channels_last(batch) if self.channels_last else batch


@dataclass(slots=True)
class LoopCounts:
    """What the training loop has got, and how long it waited for it.

    Attributes:
        begun_at: when it asked first.
        left_at: when it was last answered; between these it waited or was busy.
    """

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    begun_at: float = 0.0
    left_at: float = 0.0

    def answer(self, asked_at: float) -> None:
        self.left_at = time.perf_counter()
        self.wait_s += self.left_at - asked_at
        self.begun_at = self.begun_at or asked_at

    def figures(self) -> dict[str, float]:
        """As in an ``EpochReport``."""
        return {
            "batches": self.batches,
            "samples": self.samples,
            "wait_s": self.wait_s,
            "busy_s": self.left_at - self.begun_at - self.wait_s,
        }


@dataclass(kw_only=True, slots=True)
class Tally(LoopCounts):
    """What a loader reports of the epoch in progress."""

    engine: Engine
    pinning: PinningPlan
    ring: Slots | None = None  # that batches come through

    def report(self, prepared: float) -> EpochReport:
        figures: dict[str, Any] = self.figures()
        if self.ring is not None:
            figures["fresh_batches"] = self.ring.fresh_count
            figures["bytes_held"] = self.ring.bytes_held
        return EpochReport(
            path=self.engine.path,
            engine=self.engine.kind if self.engine.workers else "inline",
            workers=self.engine.workers,
            pinning=self.pinning.reason,
            prepared=prepared,
            **figures,
        )


def sample_count(batch: Any) -> int:
    """Length of the first tensor in a batch; 0 if it has none, or cannot tell."""
    if type(batch) is list and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return batch[0].size(0)  # most are
    try:
        return next(it.size(0) for it in flatten(batch)[0] if isinstance(it, torch.Tensor))
    except Exception:  # noqa: BLE001  # users' types raise anything, and counting stops nobody
        return 0


class Counted(torch_loader._BaseDataLoaderIter):
    """An iterator that counts what it hands over and how long it kept the user waiting."""

    # Of the epoch, as ``progress``; an iterator of persistent workers gets new ones for the next.
    counts: LoopCounts
    ring: Slots | None = None  # that batches come through
    # Of what is read; ends the epoch once the dataset is closed.
    handle: ReaderHandle | JoinedHandle | None = None

    ended = ""  # why no more batches come, although there are some
    after_batch: Callable[[], Any] | None = None
    _task_info: Any = ()  # batches that were drawn, but not handed over; torch's own name

    def __init__(self, view: AnyLoader, progress: Progress) -> None:
        self.progress = progress
        super().__init__(view)

    @property
    def _base_seed(self) -> int:
        assert self.progress.base_seed is not None
        return self.progress.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        if self.progress.base_seed is None:
            self.progress.base_seed = drawn

    def stop(self) -> None:
        """End its threads, if it has some."""

    def __next__(self) -> Any:
        if self.ended:
            raise RuntimeError(f"this iterator has no more batches: {self.ended}")
        counts = self.counts
        progress = self.progress
        asked_at = time.perf_counter()
        try:
            if self.handle is not None and self.handle.reader is None:
                self.handle()
            # torch's own takes 10 us to tell a profiler of itself, and does nothing else for
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
            progress.handed = progress.drawn - len(self._task_info)
            counts.answer(asked_at)
            if self.after_batch is not None:
                self.after_batch()


def _may_be_told(loader: AnyLoader) -> bool:
    """Whether a sampler has ``set_epoch``: Lightning calls it between ``iter()`` and ``next()``.

    Nothing is read ahead before ``next`` then; else from ``iter()`` on, as by torch's loader.
    """
    outer = loader.batch_sampler
    samplers = (loader.sampler, outer, getattr(outer, "sampler", None))
    return any(hasattr(sampler, "set_epoch") for sampler in samplers)


class InlineIter(Counted, torch_loader._SingleProcessDataLoaderIter):
    """torch's engine in the training loop, counted."""


class ProcessIter(Counted, torch_loader._MultiProcessingDataLoaderIter):
    """torch's worker processes, counted, with batches that come through a shared ring."""

    _put_later = 0  # batches that workers are asked for at ``next``

    def __init__(self, view: AnyLoader, progress: Progress, *, held: int) -> None:
        if not isinstance(view.collate_fn, RingCollate):
            slots = (view.prefetch_factor or 0) + 1 + held
            view.collate_fn = RingCollate(view.collate_fn, slots=slots)
        self.ring = self.receiver = view.collate_fn.receiver
        super().__init__(view, progress)

    def _reset(self, loader: AnyLoader, first_iter: bool = False) -> None:
        ahead = self._prefetch_factor
        if _may_be_told(loader):
            self._prefetch_factor = 0
        try:
            super()._reset(loader, first_iter)
            self._put_later = (ahead - self._prefetch_factor) * self._num_workers
        finally:  # workers that persist begin again after Ctrl-C
            self._prefetch_factor = ahead

    def _next_data(self) -> Any:
        while self._put_later:
            self._put_later -= 1
            self._try_put_index()
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        try:
            return super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]
        except Exception as error:
            # torch's frames hold the exception, and it them and this iterator: a cycle that the
            # collector takes apart in an order in which ending the workers costs 5 s for each. The
            # worker's traceback is in the message.
            error.__traceback__ = None
            raise error


class ThreadIter(Counted):
    """Batches read ahead by threads, or in the training loop when there are none; always in order.

    An exception is raised where its batch would have come. Threads end with the epoch, on ``break``
    as soon as the iterator is dropped, so that ``read``, which turns the indices and the draws of a
    batch into it, must not hold it.
    """

    def __init__(
        self,
        view: AnyLoader,
        progress: Progress,
        ring: BatchRing,
        read: Callable[[Any, Any], Any],
        *,
        threads: int,
    ) -> None:
        super().__init__(view, progress)
        self.ring = ring
        self._read = read
        self._task_info = deque[Future[Any]]()
        self._ahead = threads * (view.prefetch_factor or 1)
        self._threads: ThreadPoolExecutor | None = None
        if threads:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="fastdata-loader")
            self.stop = weakref.finalize(self, _stop, self._threads)  # type: ignore[method-assign]
            if not _may_be_told(view):
                self._submit(self._threads)

    def _next_data(self) -> Any:
        if self._threads is None:
            batch = self._read(next(self._sampler_iter), self.progress.draws)
        else:
            batch = self._receive(self._threads)
        return copy_to_pinned(batch) if self._pin_memory else batch

    def _receive(self, threads: ThreadPoolExecutor) -> Any:
        if not self._task_info:
            self._submit(threads)
        if not self._task_info:
            self.stop()
            raise StopIteration
        future = self._task_info[0]
        try:
            # The batch's own TimeoutError is returned.
            error = future.exception(self._timeout or None)
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
        """Have as many batches read as are to be ahead."""
        while not self.ended and len(self._task_info) < self._ahead:
            try:
                indices = next(self._sampler_iter)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001  # raised where its batch would have come
                future: Future[Any] = Future()
                future.set_exception(error)
            else:
                future = threads.submit(self._read, indices, self.progress.draws)
            self._task_info.append(future)


def _stop(threads: ThreadPoolExecutor) -> None:
    """End the threads; batches not begun are dropped.

    A thread that drops the last reference cannot wait for itself, nor can one that the garbage
    collector interrupts where it holds the lock of ``threading`` that a join takes.
    """
    lock = getattr(threading, "_shutdown_locks_lock", None)  # until Python 3.12
    is_own = threading.get_ident() in {thread.ident for thread in threads._threads}
    threads.shutdown(wait=not is_own and not (lock and lock.locked()), cancel_futures=True)
