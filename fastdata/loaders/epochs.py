"""One epoch of a loader: what it sees of the fastdata datasets behind, and who reads batches.

``Parts`` looks behind ``Subset`` and ``ConcatDataset``. A ``BatchMaker`` reads a batch in any
thread, and the iterators hand batches over. They move a ``Progress`` on.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait as wait_for
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch.autograd import profiler
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory as copy_to_pinned

from fastdata.datasets.batch import Collate, collate
from fastdata.datasets.buffers import Allocate, BatchRing, allocate_batch, new_buffer
from fastdata.datasets.dataset import (
    PreparedDataset,
    index_count,
)
from fastdata.datasets.draws import BatchDraws, DrawKey
from fastdata.datasets.reader import Reader
from fastdata.datasets.receiver import BatchReceiver
from fastdata.datasets.samples import ReaderHandle
from fastdata.datasets.transport import RingCollate
from fastdata.datasets.trees import as_channels_last, leaves_of
from fastdata.datasets.visits import IndexBatch, as_numbers
from fastdata.errors import IngestError, MemoryBudgetError, StoreGoneError
from fastdata.loaders.samplers import StateDict
from fastdata.machine.tables import collate_targets
from fastdata.pixels.arrays import Array
from fastdata.pixels.random_numbers import sample_keys

_T = TypeVar("_T")
_J = TypeVar("_J")
_PART_SALT_1 = np.array([0x70617274])
"""Keeps the seeds of a ``ConcatDataset``'s parts apart from the keys of samples."""
_END_S = 5.0  # how long a killed worker may take to die


class JoinedReader:
    """Reads a batch from several datasets, with the interface of ``Reader``."""

    def __init__(self, readers: Sequence[Reader], starts: Array) -> None:
        self._readers = readers
        self._starts = starts
        self.obstacle = _first(reader.obstacle for reader in readers)
        forms = {} if self.obstacle else {reader.image_form: None for reader in readers}
        if len(forms) > 1:
            self.obstacle = f"the datasets serve images that differ, {' and '.join(forms)}"
        self.target_transform = _first(reader.target_transform for reader in readers)
        self.served_bytes = None if self.obstacle else readers[0].served_bytes

    def __call__(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> Any:
        readers = self._readers
        first = readers[0]
        is_last = batch.channels_last and all(each.can_write_channels_last for each in readers)
        outs = allocate_batch(len(batch), first.outputs, allocate, channels_last=is_last)
        for number, row_B, piece in self._pieces(batch):
            readers[number].read_into(outs, piece, row_B)
        parts = list(map(torch.Tensor.view, map(torch.from_numpy, outs), first.dtypes))
        if not first.has_target_column:
            of_each = self.in_order(batch, [reader.targets.of_each for reader in readers])
            parts.append(collate_targets(of_each))
        return first.to_batch(parts)

    def items(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> list[Any]:
        return self.in_order(batch, [reader.items for reader in self._readers])

    def in_order(self, batch: IndexBatch, reads: Sequence[Callable[..., list[Any]]]) -> list[Any]:
        """Return what each dataset's function in ``reads`` returns, in the order of the batch."""
        found: dict[int, Any] = {}
        for number, row_B, piece in self._pieces(batch):
            found |= zip(row_B.tolist(), reads[number](piece), strict=True)
        return [found[row] for row in range(len(found))]

    def _pieces(self, batch: IndexBatch) -> Iterator[tuple[int, Array, IndexBatch]]:
        """Yield, for each dataset in a batch, its number, the rows of its samples, and their batch."""
        number_B = np.searchsorted(self._starts, batch.positions, side="right") - 1
        for number in np.unique(number_B).tolist():
            row_B = np.flatnonzero(number_B == number)
            position_B = batch.positions[row_B] - self._starts[number]
            own_seed = self._readers[number].stored.options.seed
            seed = batch.seed if own_seed is None else own_seed
            if number:  # so that the same index in two datasets has independent draws
                seed = int(sample_keys(seed, number, _PART_SALT_1)[0])
            piece = IndexBatch.of(position_B.tolist(), position_B, batch.visits[row_B], seed)
            yield number, row_B, piece


@dataclass(frozen=True)
class JoinedHandle:
    """The handles of several datasets, which are read as one."""

    handles: list[ReaderHandle]
    starts: Array

    @property
    def is_closed(self) -> bool:
        return any(handle.is_closed for handle in self.handles)

    def __call__(self) -> JoinedReader:
        return JoinedReader([handle() for handle in self.handles], self.starts)


AnyReader = Reader | JoinedReader
AnyHandle = ReaderHandle | JoinedHandle


@dataclass(frozen=True, slots=True)
class Parts:
    """The fastdata datasets that a loader reads, as one.

    Their indices are put in a row, as in a ``ConcatDataset``. Each dataset is read with its own
    transform, targets and draws, into its rows of the batch. A dataset without a ``seed`` takes the
    seed of the first that has one.

    Attributes:
        datasets: the datasets; empty if the loader reads anything else.
        subset: indices of the samples that the loader sees; None for all.
        starts: index of the first sample of each dataset.
    """

    datasets: Sequence[PreparedDataset]
    subset: Array | None
    starts: Array

    @classmethod
    def find(cls, dataset: Any) -> Parts:
        """Find the datasets in any ``Subset`` and ``ConcatDataset``; none next to other datasets."""
        datasets = []
        subset = None
        # Not isinstance: a proxy may give the class of what it is around for its own.
        if issubclass(type(dataset), PreparedDataset):
            datasets.append(dataset)
        else:
            try:
                subset = _join(dataset, datasets)
            except TypeError:
                datasets.clear()
        return cls(datasets, subset, np.cumsum([0, *map(index_count, datasets)])[:-1])

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        joined = JoinedReader([it._fastdata.reader for it in self.datasets], self.starts)
        return joined.in_order(batch, [dataset.__getitems__ for dataset in self.datasets])

    @property
    def index_count(self) -> int:
        """The number of indices, from 0 on, that may be asked for."""
        return sum(map(index_count, self.datasets))  # samples may have been assigned since

    @property
    def epoch(self) -> int | None:
        """The epoch that the user set on a dataset; None if loaders count epochs."""
        return _first(it._fastdata.epoch_number for it in self.datasets)

    @property
    def seed(self) -> int | None:
        """The first ``seed`` that the user gave to a dataset; None if there is none."""
        return _first(dataset._fastdata.stored.options.seed for dataset in self.datasets)

    def reader(self) -> AnyReader | None:
        """Return the reader of an epoch that begins now, with all changes made in place."""
        readers = [dataset._fastdata.refresh() for dataset in self.datasets]
        return self._one(readers, JoinedReader)

    def latest(self) -> AnyReader | None:
        """Return the latest reader. Do not keep it: it keeps the samples in memory."""
        return self._one([it._fastdata.reader for it in self.datasets], JoinedReader)

    def handle(self) -> AnyHandle | None:
        """Return the handle of an epoch that begins now."""
        return self._one([it._fastdata.handle for it in self.datasets], JoinedHandle)

    def _one(self, each: list[_T], join: Callable[[list[_T], Array], _J]) -> _T | _J | None:
        if len(each) > 1:
            return join(each, self.starts)
        return each[0] if each else None

    @property
    def prepared_share(self) -> float:
        """The share of samples that are stored already, of the dataset with the fewest."""
        index = None if len(self.datasets) > 1 else self.subset
        readers = [dataset._fastdata.reader for dataset in self.datasets]
        shares = (1.0 if it.kept is None else it.stored.filled_share(index) for it in readers)
        return min(shares, default=1.0)

    def fetched(self, dataset: Any) -> Any:
        """Return a loader's ``dataset``, or a copy that passes whole batches to these datasets.

        torch's ``Subset`` and ``ConcatDataset`` make plain lists of the indices of a batch, without
        the numbers that its draws follow.
        """
        if self.subset is None:
            return dataset
        whole = copy.copy(dataset)
        whole.__class__ = _WholeConcat if type(dataset) is ConcatDataset else _WholeSubset
        whole.behind = self.datasets[0] if len(self.datasets) == 1 else replace(self, subset=None)
        return whole


def _first(given: Iterable[_T | None]) -> _T | None:
    return next((value for value in given if value is not None), None)


def _join(dataset: Any, found: list[PreparedDataset]) -> Array:
    """Return the indices of a dataset's samples among those of all ``found``, and add its found.

    Raises:
        TypeError: there is a dataset of another kind, or a subclass with another ``__len__`` than
            its samples have, or indices that are not whole numbers.
    """
    if type(dataset) is Subset:
        return _join(dataset.dataset, found)[as_numbers(dataset.indices)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([_join(each, found) for each in dataset.datasets])
    is_ours = issubclass(type(dataset), PreparedDataset)
    if not is_ours or len(dataset) != index_count(dataset):
        raise TypeError
    start = 0
    for part in found:
        if part is dataset:
            break
        start += index_count(part)
    else:
        found.append(dataset)
    return np.arange(start, start + len(dataset))


class _Whole(Dataset[Any]):
    """Passes batches to the datasets ``behind``, where torch's class would make lists of them."""

    behind: PreparedDataset | Parts

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, IndexBatch):
            return self.behind.__getitems__(indices)
        return [self[index] for index in indices]


class _WholeSubset(_Whole, Subset[Any]): ...


class _WholeConcat(_Whole, ConcatDataset[Any]): ...


Slots = BatchRing | BatchReceiver
MakeBatch = Callable[[Any, BatchRing], Any]
HELD_BY_USER = 2
"""Batches that the training loop may hold without costing new memory: the current one and one
looked ahead."""


class Engine(NamedTuple):
    """Threads or processes that read batches, their number (0: the training loop), and why."""

    kind: Literal["thread", "process"]
    path: str
    workers: int


def profiled(name: str) -> AbstractContextManager[Any]:
    """Let a profiler show what runs within; 0.3 us without one, where torch's own takes 4 us."""
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
                reader = self.handle()
                is_whole = reader.obstacle is None
                is_collated = is_whole and self.collate_fn is collate and len(indices) > 0
                read = partial(reader if is_collated else reader.items, allocate=self.ring.lease)
                may_draw &= not is_whole or reader.target_transform is not None
            with BatchDraws(draws.apart()) if may_draw else nullcontext():
                batch = read(indices)
            if not is_collated:
                batch = draws.collated(self.collate_fn, batch)
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
        self.left_at = time.perf_counter()
        self.wait_s += self.left_at - asked_at
        self.begun_at = self.begun_at or asked_at

    def figures(self) -> dict[str, Any]:
        """Return the fields of an ``EpochReport``."""
        return {
            "batches": self.batches,
            "samples": self.samples,
            "wait_s": self.wait_s,
            "busy_s": self.left_at - self.begun_at - self.wait_s,
        }


Mark = tuple[int, bool]
"""The number of batches handed over, and True if those are all."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """The position in one epoch.

    Attributes:
        epoch: number of the epoch, which random draws follow; -1 before the first.
        base_seed: seed of worker processes, and of draws if the dataset has no seed; None until it
            is drawn.
        start: states of generators and samplers when the order was drawn; None before that.
        state: loaded state that the epoch goes on from, which holds until a batch is handed over.
        is_begun: True if that state is one inside the epoch; nothing more is drawn from the global
            generator.
        first: number of batches handed over before that.
        drawn: number of batches whose indices were drawn.
        handed: number of these that were handed over.
        counted: how much of the sampler's length was drawn: samples, or batches.
        is_finished: True once there are no more batches.
        draws: the ``DrawKey`` of the batch that was drawn last.
        seen: the mark of the user's latest batch, if a prefetcher reads ahead of the user.
    """

    epoch: int = -1
    base_seed: int | None = None
    start: StateDict | None = None
    state: StateDict | None = None
    is_begun: bool = False
    first: int = 0
    drawn: int = 0
    handed: int = 0
    counted: int = 0
    is_finished: bool = False
    draws: Any = None
    seen: Mark | None = None

    @classmethod
    def resumed(cls, state: StateDict) -> Progress:
        """Return the progress of an epoch that begins where a state was saved."""
        passed = state["num_yielded"]
        return cls(
            epoch=state["epoch"],
            base_seed=state["base_seed"],
            start=state["start"],
            state=state,
            is_begun=state["is_begun"],
            first=passed,
            drawn=passed,
            handed=passed,
        )

    def mark(self) -> Mark:
        """Return the position now; a prefetcher's thread sends it with the batch."""
        return self.handed, self.is_finished

    def hand_over(self, mark: Mark) -> None:
        self.seen = mark

    @property
    def pending(self) -> StateDict | None:
        """The state that it goes on from, while no batch was handed over."""
        return self.state if (self.seen or self.mark()) == (self.first, False) else None


def sample_count(batch: Any) -> int:
    """Return the length of the first tensor in a batch; 0 if it has none, or no length."""
    if type(batch) is list and batch and type(batch[0]) is torch.Tensor and batch[0].ndim:
        return batch[0].size(0)  # most are
    try:
        return next(it.size(0) for it in leaves_of(batch) if isinstance(it, torch.Tensor))
    except Exception:  # noqa: BLE001  # users' types raise anything, and counting stops nobody
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

    def __init__(self, view: Any, progress: Progress) -> None:
        self.progress = progress
        super().__init__(view)

    @property
    def _base_seed(self) -> Any:
        return self.progress.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: Any) -> None:
        if self.progress.base_seed is None:
            self.progress.base_seed = drawn

    def stop(self) -> None:
        """End the threads of the iterator, if it has some."""

    def __next__(self) -> Any:
        if self.ended:
            raise RuntimeError(f"this iterator has no more batches: {self.ended}")
        counts = self.counts
        progress = self.progress
        asked_at = time.perf_counter()
        try:
            if self.handle is not None and self.handle.is_closed:
                self.handle()  # raises
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
            progress.handed = progress.drawn - len(self._task_info)
            counts.answer(asked_at)
            if self.after_batch is not None:
                self.after_batch()


class InlineIter(CountedIterator, torch_loader._SingleProcessDataLoaderIter):
    """torch's engine in the training loop, counted."""


def _watched(parent_pid: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run torch's worker loop with a watch over the process that started the worker.

    torch's watch takes the parent when the loop begins for the one to watch. After a slow
    ``worker_init_fn`` that may be the process that adopts the children of a killed parent. Written
    for torch 2.4 to 2.13; a torch without this class keeps its own watch.
    """
    watch = getattr(torch_worker, "ManagerWatchdog", None)
    if watch is not None:
        watchdog = watch()
        watchdog.manager_pid = parent_pid
        torch_worker.ManagerWatchdog = lambda: watchdog  # type: ignore[assignment, misc]
    work(*arguments)


class ProcessIter(CountedIterator, torch_loader._MultiProcessingDataLoaderIter):
    """torch's worker processes, counted, with batches that come through a shared ring."""

    _put_later = 0  # number of batches to ask workers for at ``next``

    def __init__(self, view: Any, progress: Progress, *, held: int) -> None:
        if not isinstance(view.collate_fn, RingCollate):
            slots = view.prefetch_factor + 1 + held
            view.collate_fn = RingCollate(view.collate_fn, slots=slots)
        self.ring = view.collate_fn.receiver
        context = (view.multiprocessing_context or multiprocessing).get_context()
        # A forkserver's child is not a child of this process.
        if context.get_start_method() != "forkserver":
            view.multiprocessing_context = copy.copy(context)
            view.multiprocessing_context.Process = lambda *, target, **options: context.Process(
                target=partial(_watched, os.getpid(), target), **options
            )
        self._workers: list[Any] = []
        try:
            super().__init__(view, progress)
        except BaseException:
            # Ctrl-C, or no more processes: torch ends only workers that have a status.
            self._workers_status = [True] * len(self._workers)
            self._shutdown = not self._workers
            raise

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        # Lightning calls ``set_epoch`` between ``iter`` and ``next``: ask for no batch before.
        ahead = self._prefetch_factor
        self._prefetch_factor = 0
        try:
            super()._reset(loader, first_iter)
            self._put_later = ahead * self._num_workers
        finally:  # workers that persist begin again after Ctrl-C
            self._prefetch_factor = ahead

    def _next_data(self) -> Any:
        while self._put_later:
            self._put_later -= 1
            self._try_put_index()
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _try_get_data(self, *timeout: float) -> Any:
        try:
            return super()._try_get_data(*timeout)  # type: ignore[no-untyped-call]
        except StoreGoneError:
            # A killed worker loses its memory first and dies later. torch's signal handler then
            # raises in this thread: here, and not in ``__del__``, which could only print it.
            ending = wait_for([worker.sentinel for worker in self._workers], timeout=_END_S)
            for worker in self._workers:
                if worker.sentinel in ending:
                    worker.join()
            raise

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        try:
            return super()._process_data(data, worker_idx)  # type: ignore[no-untyped-call]
        except Exception as error:
            # The exception and torch's frames, which hold this iterator, hold each other: a cycle
            # that the collector takes apart in an order in which each worker takes 5 s to end. The
            # worker's traceback is in the message.
            error.__traceback__ = None
            raise error


class ThreadIter(CountedIterator):
    """Batches read ahead by threads, or in the training loop when there are none; always in order.

    An exception is raised in the place of its batch. Threads end with the epoch, or when the
    iterator is dropped, as by ``break``. Therefore ``read``, which makes a batch of its indices and
    draws, must not refer to the iterator.
    """

    def __init__(self, view: Any, progress: Progress, read: BatchMaker, *, threads: int) -> None:
        super().__init__(view, progress)
        self.ring = read.ring
        self._read = read
        self._task_info = deque[Future[Any]]()
        self._ahead = threads * (view.prefetch_factor or 1)
        self._threads: Any = None
        self._pid = os.getpid()
        if threads:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="fastdata-loader")
            self.stop = weakref.finalize(self, _stop, self._threads)  # type: ignore[method-assign]

    def _next_data(self) -> Any:
        if self._threads is None:
            indices = next(self._sampler_iter)
            batch = self._read(indices, self.progress.draws)
        else:
            batch = self._receive()
        return copy_to_pinned(batch) if self._pin_memory else batch

    def _receive(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this iterator of a DataLoader was begun in process {self._pid}, whose threads "
                f"read its batches. Process {os.getpid()} was forked from it and does not have "
                "them. Call iter() on the DataLoader in the process that reads the batches, or use "
                "num_workers=0."
            )
        if not self._task_info:
            self._submit()
        if not self._task_info:
            self.stop()
            raise StopIteration
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
            self._submit()

    def _submit(self) -> None:
        """Ask the threads for batches until enough are read ahead."""
        while not self.ended and len(self._task_info) < self._ahead:
            try:
                indices = next(self._sampler_iter)
            except StopIteration:
                return
            except Exception as error:  # noqa: BLE001  # raised in the place of its batch
                future: Future[Any] = Future()
                future.set_exception(error)
            else:
                future = self._threads.submit(self._read, indices, self.progress.draws)
            self._task_info.append(future)


def _stop(threads: ThreadPoolExecutor) -> None:
    """End the threads; batches that are not begun are dropped.

    Do not wait in a thread that drops the last reference, which would wait for itself; nor in one
    that the garbage collector interrupts while it holds the lock of ``threading`` that a join takes.
    """
    lock = getattr(threading, "_shutdown_locks_lock", None)  # until Python 3.12
    is_own = threading.get_ident() in {thread.ident for thread in threads._threads}
    threads.shutdown(wait=not is_own and not (lock and lock.locked()), cancel_futures=True)
