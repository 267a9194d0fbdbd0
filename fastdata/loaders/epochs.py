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
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import profiler
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils.pin_memory import pin_memory as copy_to_pinned

from fastdata.datasets.batch import BatchDraws, DrawKey, as_channels_last, collate, flatten
from fastdata.datasets.reader import ReaderHandle
from fastdata.datasets.ring import BatchReceiver, BatchRing, RingCollate
from fastdata.errors import IngestError, MemoryBudgetError
from fastdata.loaders.order import Progress
from fastdata.loaders.view import JoinedHandle
from fastdata.machine.memory import PinningPlan
from fastdata.report import EpochReport

Slots = BatchRing | BatchReceiver
HELD_BY_USER = 2
"""Batches that the training loop may hold without costing new memory: the current one and one
looked ahead."""


class Engine(NamedTuple):
    """Who reads batches, how many (0: the training loop), and why."""

    kind: Literal["thread", "process"]
    path: str
    workers: int = 0


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
        if self.read is not None:
            return self.read(indices, self.ring)
        batch = self._make(indices, draws)
        return as_channels_last(batch) if self.channels_last else batch

    def _make(self, indices: Any, draws: DrawKey) -> Any:
        handle = self.handle
        reader = None if handle is None else handle.reader or handle()
        is_whole = reader is not None and reader.obstacle is None
        # Whether no code of the user's own reads.
        is_ours = reader is not None and is_whole and reader.target_transform is None
        with nullcontext() if is_ours or not self.in_thread else BatchDraws(draws.apart()):
            if reader is not None and is_whole and self.collate_fn is collate:
                return reader(indices, self.ring)
            if reader is not None:
                samples = reader.items(indices, self.ring)
            elif getattr(self.dataset, "__getitems__", None):
                samples = self.dataset.__getitems__(indices)
            else:
                samples = [self.dataset[index] for index in indices]
        return draws.collated(self.collate_fn, samples)


@dataclass(slots=True)
class LoopCounts:
    """What the training loop has got, how long it waited for it, and was busy in between."""

    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    _left_at: float | None = None

    def ask(self) -> float:
        now = time.perf_counter()
        if self._left_at is not None:
            self.busy_s += now - self._left_at
        return now

    def answer(self, asked_at: float) -> None:
        self._left_at = time.perf_counter()
        self.wait_s += self._left_at - asked_at

    def figures(self) -> dict[str, float]:
        """As in an ``EpochReport``."""
        names = ("batches", "samples", "wait_s", "busy_s")
        return {name: getattr(self, name) for name in names}


class Tally:
    """What a loader reports of the epoch in progress."""

    def __init__(self, engine: Engine, pinning: PinningPlan, ring: Slots | None = None) -> None:
        self.counts = LoopCounts()
        self._engine = engine
        self._pinning = pinning
        self._ring = ring
        self._fresh_before = ring.fresh_count if ring else 0

    def report(self) -> EpochReport:
        engine, ring = self._engine, self._ring
        figures: dict[str, Any] = self.counts.figures()
        return EpochReport(
            path=engine.path,
            engine=engine.kind if engine.workers else "inline",
            workers=engine.workers,
            fresh_batches=ring.fresh_count - self._fresh_before if ring else 0,
            bytes_held=ring.bytes_held if ring else 0,
            pinning=self._pinning.reason,
            **figures,
        )


def sample_count(batch: Any) -> int:
    """Length of the first tensor in a batch; 0 if it has none, or cannot tell; 1 of a scalar."""
    if type(batch) is list and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return batch[0].size(0)  # most are
    try:
        tensors = [it for it in flatten(batch)[0] if isinstance(it, torch.Tensor)]
        return next((it.size(0) for it in tensors if it.ndim), len(tensors[:1]))
    except Exception:  # noqa: BLE001  # users' types raise anything, and counting stops nobody
        return 0


class TorchView:
    """A loader as torch's iterators see it while they start, some attributes replaced."""

    collate_fn: Any

    def __init__(self, loader: torch_loader.DataLoader[Any], **instead: Any) -> None:
        self._loader = loader
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Counted(torch_loader._BaseDataLoaderIter):
    """An iterator that counts what it hands over and how long it kept the user waiting."""

    # Of the epoch, as ``progress``; an iterator of persistent workers gets new ones for the next.
    counts: LoopCounts
    ring: Slots | None = None  # that batches come through
    # Of what is read; ends the epoch once the dataset is closed.
    handle: ReaderHandle | JoinedHandle | None = None

    def __init__(self, view: TorchView, progress: Progress) -> None:
        self.progress = progress
        super().__init__(view)  # type: ignore[arg-type]

    @property
    def _base_seed(self) -> int:
        assert self.progress.base_seed is not None
        return self.progress.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        if self.progress.base_seed is None:
            self.progress.base_seed = drawn

    @property
    def _unread(self) -> int:
        """Of the batches drawn in this epoch, how many were not handed over."""
        return 0

    def _next_batch(self) -> Any:
        return super().__next__()

    def __next__(self) -> Any:
        counts, progress = self.counts, self.progress
        asked_at = counts.ask()
        try:
            if self.handle is not None and self.handle.reader is None:
                self.handle()
            batch = self._next_batch()
            counts.batches += 1
            counts.samples += sample_count(batch) if self._auto_collation else 1
            return batch
        except StopIteration:
            progress.is_finished = True
            raise
        finally:
            progress.handed = progress.drawn - self._unread
            counts.answer(asked_at)


def _may_be_told(loader: Any) -> bool:
    """Whether a sampler has ``set_epoch``: Lightning calls it between ``iter()`` and ``next()``.

    Nothing is read ahead before ``next`` then; else from ``iter()`` on, as by torch's loader.
    """
    inner = getattr(loader.batch_sampler, "sampler", None)
    samplers = (loader.sampler, loader.batch_sampler, inner)
    return any(hasattr(sampler, "set_epoch") for sampler in samplers)


class InlineIter(Counted, torch_loader._SingleProcessDataLoaderIter):
    """torch's engine in the training loop, counted."""


class ProcessIter(Counted, torch_loader._MultiProcessingDataLoaderIter):
    """torch's worker processes, counted, with batches that come through a shared ring."""

    _put_later = 0  # batches that workers are asked for at ``next``
    _is_waiting = False

    def __init__(self, view: TorchView, progress: Progress, *, held: int) -> None:
        if not isinstance(view.collate_fn, RingCollate):
            view.collate_fn = RingCollate(view.collate_fn, slots=view.prefetch_factor + 1 + held)
        self.ring = self.receiver = view.collate_fn.receiver
        super().__init__(view, progress)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._put_later = 0
        self._is_waiting = _may_be_told(loader)
        super()._reset(loader, first_iter)
        self._is_waiting = False

    def _try_put_index(self) -> None:
        if self._is_waiting:
            self._put_later += 1
        else:
            super()._try_put_index()

    def _next_data(self) -> Any:
        while self._put_later:
            self._put_later -= 1
            self._try_put_index()
        return super()._next_data()  # type: ignore[no-untyped-call]

    @property
    def _unread(self) -> int:
        return len(self._task_info)

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
        view: TorchView,
        progress: Progress,
        ring: BatchRing,
        read: Callable[[Any, Any], Any],
        *,
        threads: int,
    ) -> None:
        if (
            view.num_workers == 0 and view.timeout != 0
        ):  # what torch's loader lets pass, and its iterators do not
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        if view.num_workers > 0 and view.prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"
            )
        super().__init__(view, progress)
        self.ring = ring
        self._ahead = 0  # batches to submit at ``next``
        self._read = partial(_read_batch, read)
        self._pending: deque[Future[Any]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        if threads:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="fastdata-loader")
            self.stop = weakref.finalize(self, _stop, self._threads)
            self._ahead = threads * view.prefetch_factor
            if not _may_be_told(view):
                self._start()

    def _next_batch(self) -> Any:
        # torch's own takes 10 us to tell a profiler of itself, and does nothing else here.
        return super()._next_batch() if profiler._is_profiler_enabled else self._next_data()

    def _next_data(self) -> Any:
        if self._ahead:
            self._start()
        if self._threads is None:
            batch = self._read(next(self._sampler_iter), self.progress.draws)
        elif self._pending:
            batch = self._receive()
        else:
            self.stop()
            raise StopIteration
        return copy_to_pinned(batch) if self._pin_memory else batch

    def _start(self) -> None:
        for _ in range(self._ahead):
            self._submit()
        self._ahead = 0

    def _receive(self) -> Any:
        future = self._pending[0]
        try:
            # Only waits: the batch's own TimeoutError is returned.
            future.exception(self._timeout or None)
        except FutureTimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        # And no batch comes after it.
        is_lost = isinstance(future.exception(), (IngestError, MemoryBudgetError))
        if not is_lost:
            self._pending.popleft()
        try:
            return future.result()
        finally:
            del future  # an exception would keep it, and it the exception
            if not is_lost:
                self._submit()

    @property
    def _unread(self) -> int:
        return len(self._pending)

    def _submit(self) -> None:
        assert self._threads is not None
        try:
            indices = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  # raised where its batch would have come
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._pending.append(failed)
        else:
            self._pending.append(self._threads.submit(self._read, indices, self.progress.draws))


def _read_batch(read: Callable[[Any, Any], Any], indices: Any, draws: DrawKey | None) -> Any:
    with shown_as("fastdata: read"):
        return read(indices, draws)


def _stop(threads: ThreadPoolExecutor) -> None:
    """End the threads; batches not begun are dropped.

    A thread that drops the last reference cannot wait for itself, nor can one that the garbage
    collector interrupts where it holds the lock of ``threading`` that a join takes.
    """
    lock = getattr(threading, "_shutdown_locks_lock", None)  # until Python 3.12
    is_own = threading.get_ident() in {thread.ident for thread in threads._threads}
    threads.shutdown(wait=not is_own and not (lock and lock.locked()), cancel_futures=True)
