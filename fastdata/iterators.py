"""The iterators of one epoch: torch's two, counted, and one that reads ahead with threads."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils.pin_memory import pin_memory as copy_to_pinned

from fastdata.engine import Engine
from fastdata.memory import PinningPlan
from fastdata.report import EpochReport
from fastdata.resume import Progress
from fastdata.ring import BatchRing
from fastdata.stored import StoredReader
from fastdata.transport import Arrivals, LostBatchError, RingCollate

__all__ = [
    "HELD_BY_USER",
    "InlineIter",
    "LoopTimes",
    "Prefetched",
    "ProcessIter",
    "Tally",
    "ThreadIter",
    "sample_count",
]

_END_S = 1.0
"""A process that has let go of its memory takes less to end."""
HELD_BY_USER = 2
"""Batches that the training loop may hold without costing new memory: the current one and one looked ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefetched:
    """How a prefetcher reads an epoch.

    Args:
        ring: where threads gather batches.
        held: batches that it and the user may hold at a time without costing new memory.
        stored: reads batches in place of the dataset, where batch ops run on the device; threads only.
    """

    ring: BatchRing
    held: int
    stored: StoredReader | None = None


@dataclass(slots=True)
class LoopTimes:
    """How long the training loop has waited for batches, and been busy between them."""

    wait_s: float = 0.0
    busy_s: float = 0.0
    _left_at: float | None = None

    def ask(self) -> float:
        """Note that the loop asks for a batch, and return when."""
        now = time.perf_counter()
        if self._left_at is not None:
            self.busy_s += now - self._left_at
        return now

    def answer(self, asked_at: float) -> None:
        """Note that it was answered."""
        self._left_at = time.perf_counter()
        self.wait_s += self._left_at - asked_at


class Tally(LoopTimes):
    """Counts of the epoch in progress."""

    def __init__(
        self, engine: Engine, ring: BatchRing | Arrivals | None = None, pinning: PinningPlan | None = None
    ) -> None:
        super().__init__()
        self._engine = engine
        self._pinning = pinning.reason if pinning else ""
        self._ring = ring
        self._fresh_before = ring.fresh_count if ring else 0
        self.batches = self.samples = 0

    def report(self) -> EpochReport:
        """The counts as the user sees them."""
        return EpochReport(
            path=self._engine.path,
            engine=self._engine.reader,
            workers=self._engine.workers,
            batches=self.batches,
            samples=self.samples,
            wait_s=self.wait_s,
            busy_s=self.busy_s,
            fresh_batches=self._ring.fresh_count - self._fresh_before if self._ring else 0,
            bytes_held=self._ring.bytes_held if self._ring else 0,
            pinning=self._pinning,
        )


class Tallied(torch_loader._BaseDataLoaderIter):
    """An iterator that counts what it hands over and how long it kept the user waiting."""

    def __init__(self, loader: Any) -> None:
        self._tally = Tally(Engine(kind="process", path=""))
        self._progress: Progress = loader._bookmark.progress
        generator = torch.Generator() if self._progress.keeps_seed else loader.generator
        served = loader._served
        dataset = loader.dataset if served is None else served.fetched(loader.dataset)
        starting: Any = _Starting(loader, dataset=dataset, generator=generator)
        super().__init__(starting)

    @property
    def _base_seed(self) -> int:
        """What torch seeds workers from; a resumed epoch's is the one it began with, persistent workers keep theirs."""
        assert self._progress.base_seed is not None
        return self._progress.base_seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        if self._progress.base_seed is None:
            self._progress.base_seed = drawn

    def _unread(self) -> Collection[int]:
        """Batches whose indices were drawn but that were not handed over."""
        return ()

    def _note_progress(self) -> None:
        if self._dataset_kind == torch_loader._DatasetKind.Iterable:
            self._progress.first = self._num_yielded
        else:
            self._progress.note(self._unread())

    def __next__(self) -> Any:
        tally = self._tally
        asked_at = tally.ask()
        try:
            batch = super().__next__()
            tally.batches += 1
            self._progress.resumed_from = None
            tally.samples += sample_count(batch) if self._auto_collation else 1
            return batch
        except StopIteration:
            self._progress.is_finished, self._progress.resumed_from = True, None
            raise
        finally:
            self._note_progress()
            tally.answer(asked_at)


class InlineIter(Tallied, torch_loader._SingleProcessDataLoaderIter):
    """torch's engine in the training loop, counted."""


class ProcessIter(Tallied, torch_loader._MultiProcessingDataLoaderIter):
    """torch's worker processes, counted, with batches that come through a shared ring."""

    def __init__(self, loader: Any, *, held: int = HELD_BY_USER, **instead: Any) -> None:
        ring_collate = loader.collate_fn
        if not isinstance(ring_collate, RingCollate):
            ring_collate = RingCollate(ring_collate, slots=loader.prefetch_factor + 1 + held)
        self.arrivals = ring_collate.arrivals
        super().__init__(_Starting(loader, collate_fn=ring_collate, **instead))

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except RuntimeError as error:
            if isinstance(error, LostBatchError):
                _await_one(self._workers)
            dead = [_describe_end(number, worker) for number, worker in enumerate(self._workers) if worker.exitcode]
            if not dead or type(error) not in (RuntimeError, LostBatchError):
                raise
            message, cause = f"{str(error).rstrip(' .')}. {' '.join(dead)}", error.__cause__
        if cause is not None:
            cause.__traceback__ = cause.__context__ = None
        raise RuntimeError(
            message
        ) from cause  # without torch's frames, which would hold it and this iterator in a cycle

    def _unread(self) -> Collection[int]:
        return self._task_info.keys()

    def _process_data(self, data: Any, worker_idx: int) -> Any:
        try:
            return super()._process_data(data, worker_idx)
        except Exception as error:
            # torch's frames hold the exception, and it them and this iterator: a cycle that the collector takes apart
            # in an order in which ending the workers costs 5 s for each. The worker's traceback is in the message.
            error.__traceback__ = None
            raise error


class _Starting:
    """A loader as torch's iterator sees it while it starts, with other attributes in place of some."""

    def __init__(self, loader: Any, **instead: Any) -> None:
        self._loader = loader
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _await_one(workers: list[Any]) -> None:
    """Wait until the process that has let go of its memory can also be asked how it ended."""
    sentinels = [worker.sentinel for worker in workers]
    for sentinel in wait(sentinels, timeout=_END_S):
        workers[sentinels.index(sentinel)].join(_END_S)


def _describe_end(number: int, worker: Any) -> str:
    """Which worker ended how, in a sentence."""
    code = worker.exitcode
    if code > 0:
        return f"Worker {number} (pid {worker.pid}) exited with status {code}."
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"Worker {number} (pid {worker.pid}) was killed by signal {-code} ({name})."


class ThreadIter(Tallied):
    """Batches read ahead by threads, or in the training loop when there are none; always in order.

    An exception is raised where its batch would have come. Threads end with the epoch, on ``break`` as soon as the
    iterator is dropped.

    Args:
        loader: the DataLoader.
        read: turns a batch's indices into a batch, in any thread; it must not hold the iterator.
        threads: how many, 0 to read in the caller's.
    """

    def __init__(self, loader: Any, read: Callable[[Any], Any], *, threads: int) -> None:
        _refuse_as_torch(loader)
        super().__init__(loader)
        self._read = read
        self._pending: deque[Future[Any]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._ahead = 0
        if threads:
            self._threads = ThreadPoolExecutor(threads, thread_name_prefix="fastdata-loader")
            self._stop = weakref.finalize(self, _stop, self._threads)
            self._ahead = threads * loader.prefetch_factor
            if not _may_be_set_an_epoch(loader):
                self._start()

    def _next_data(self) -> Any:
        self._start()
        if self._threads is None:
            batch = self._read(self._next_index())
        elif self._pending:
            batch = self._receive()
        else:
            self._stop()
            raise StopIteration
        return copy_to_pinned(batch) if self._pin_memory else batch

    def _start(self) -> None:
        """Begin to read ahead, once: at ``iter()``, or where its sampler may yet be told the epoch, at ``next()``."""
        for _ in range(self._ahead):
            self._submit()
        self._ahead = 0

    def _receive(self) -> Any:
        future = self._pending[0]
        try:
            future.exception(self._timeout or None)  # only waits: the batch's own TimeoutError is returned
        except FutureTimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from None
        self._pending.popleft()
        try:
            return future.result()
        finally:
            del future  # an exception would keep it, and it the exception
            self._submit()

    def _unread(self) -> Collection[int]:
        return range(self._progress.drawn - len(self._pending), self._progress.drawn)

    def _submit(self) -> None:
        """Start reading the next batch; an exception of the sampler takes the place of its batch."""
        assert self._threads is not None
        try:
            indices = self._next_index()
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  # raised where its batch would have come
            failed: Future[Any] = Future()
            failed.set_exception(error)
            self._pending.append(failed)
        else:
            self._pending.append(self._threads.submit(self._read, indices))


def _may_be_set_an_epoch(loader: Any) -> bool:
    """Whether a sampler has ``set_epoch``; Lightning calls it after ``iter()`` when it resumes."""
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(hasattr(sampler, "set_epoch") for sampler in samplers)


def _refuse_as_torch(loader: Any) -> None:
    """Raise what torch's iterators do for arguments that its loader lets pass."""
    if loader.num_workers == 0 and loader.timeout != 0:
        raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
    if loader.num_workers > 0 and loader.prefetch_factor <= 0:
        raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")


def _stop(threads: ThreadPoolExecutor) -> None:
    """End the threads; batches not begun are dropped. A thread that drops the last reference cannot wait for itself."""
    threads.shutdown(wait=threading.current_thread() not in threads._threads, cancel_futures=True)


def sample_count(batch: Any) -> int:
    """Length of the first tensor in a batch; 0 if it has none, or is of a kind that cannot tell."""
    try:
        return _first_length(batch)
    except Exception:  # noqa: BLE001  # users' types raise anything, and what is only counted must stop nobody
        return 0


def _first_length(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((count for part in parts if (count := _first_length(part))), 0)
