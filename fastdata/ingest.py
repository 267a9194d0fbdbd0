"""Ingest: Source -> prepare -> Store, once per dataset, on all usable cores. The only writer of a store.

The parent hands out short runs of sample numbers and shows progress; workers read, prepare and write straight into the
shared block. Workers are forked processes where the platform can fork, else threads (Pillow decodes without the GIL).
Whatever happens, a killed worker or Ctrl-C included, no worker outlives ``ingest`` and an unfinished block is freed.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from typing import Any, Literal, Protocol

import numpy as np
import torch

from fastdata.blocks import Block
from fastdata.decode import sample_error, to_stored
from fastdata.errors import IngestError, MemoryBudgetError, SampleError
from fastdata.memory import format_bytes
from fastdata.report import log, progress_bar
from fastdata.sources import Source
from fastdata.spec import SampleSpec
from fastdata.stores.base import Store
from fastdata.stores.raw import DenseStore, RaggedStore

__all__ = ["Forecast", "Ingested", "OnError", "forecast", "ingest"]

OnError = Literal["raise", "skip"]

_SAMPLES_PER_TASK = 8
_TASKS_AHEAD = 2
_PROBES = 8
_ALIGN_BYTES = 64
_GROWTH = 1 / 16
_PARENT_CHECK_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a store of a source will look like, told from a few samples spread over it.

    Args:
        spec: dense if all samples looked at have one shape.
        need_bytes: exact for dense samples, else the mean of those looked at times N.
    """

    spec: SampleSpec
    need_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingested:
    """A filled, sealed store.

    Args:
        store: the samples.
        kept: their positions in the source, in order.
        targets: one per kept sample, as the source gave them.
        skipped: an error per sample left out.
    """

    store: Store
    kept: Sequence[int]
    targets: list[Any]
    skipped: list[SampleError]


def forecast(source: Source, prepare: Callable[[Any], Any]) -> Forecast:
    """Prepare a few samples to learn shape, dtype and size of all.

    Raises:
        SampleError: none of the samples looked at can be read; the first one's error.
    """
    count = len(source)
    if count == 0:
        return Forecast(spec=SampleSpec(shape=(0,), dtype="uint8", form="array"), need_bytes=0)
    prepared: list[np.ndarray] = []
    errors: list[SampleError] = []
    form: Any = None
    for index in sorted({round(k * (count - 1) / _PROBES) for k in range(_PROBES + 1)}):
        try:
            array, form = to_stored(_prepared(source, prepare, index)[0])
            prepared.append(array)
        except SampleError as error:
            errors.append(error)
    if not prepared:
        raise errors[0]
    shapes = {array.shape for array in prepared}
    spec = SampleSpec(shape=shapes.pop() if len(shapes) == 1 else None, dtype=prepared[0].dtype.name, form=form)
    mean_bytes = sum(_padded(array.nbytes) for array in prepared) / len(prepared)
    return Forecast(spec=spec, need_bytes=spec.sample_bytes * count if spec.is_dense else math.ceil(mean_bytes * count))


def ingest(
    source: Source,
    prepare: Callable[[Any], Any],
    expected: Forecast,
    *,
    limit_bytes: int,
    workers: int,
    on_error: OnError = "raise",
    progress: bool = True,
    description: str = "fastdata",
) -> Ingested:
    """Fill a store with every sample of a source.

    Args:
        source: read from the worker processes, each sample once.
        prepare: called on each sample; gives a PIL image, an array or a tensor.
        expected: from ``forecast``. Samples that turn out to differ in shape make the store ragged.
        limit_bytes: the most the store may take.
        workers: processes (or threads); 1 prepares in this process.
        on_error: ``"raise"`` at the first sample that cannot be prepared, or ``"skip"`` and list it.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        MemoryBudgetError: ragged samples turned out larger than ``limit_bytes``.
        IngestError: a worker died, or no sample at all could be prepared.
    """
    try:
        return _ingest(source, prepare, expected, limit_bytes, workers, on_error, progress, description)
    except _ShapesDiffer as found:
        log.info("%s; samples are stored one by one with their own shapes", found)
    spec = SampleSpec(shape=None, dtype=expected.spec.dtype, form=expected.spec.form)
    ragged = Forecast(spec=spec, need_bytes=expected.need_bytes)
    return _ingest(source, prepare, ragged, limit_bytes, workers, on_error, progress, description)


def _ingest(
    source: Source,
    prepare: Callable[[Any], Any],
    expected: Forecast,
    limit_bytes: int,
    workers: int,
    on_error: OnError,
    progress: bool,
    description: str,
) -> Ingested:
    results: list[_Written | SampleError | None] = [None] * len(source)
    skipped = 0
    with contextlib.ExitStack() as cleanup:
        writer_type = _DenseWriter if expected.spec.is_dense else _RaggedWriter
        writer = writer_type(expected, len(source), limit_bytes)
        cleanup.callback(writer.close)
        tasks = cleanup.enter_context(contextlib.closing(_run(_Job(source, prepare, writer), len(source), workers)))
        with progress_bar(len(source), description, enabled=progress) as bar:
            for task in tasks:
                for index, result in task:
                    if isinstance(result, SampleError):
                        if on_error == "raise":
                            raise result
                        skipped += 1
                        bar.set_postfix(skipped=skipped, refresh=False)
                    results[index] = result
                bar.update(len(task))
        written = [(index, result) for index, result in enumerate(results) if isinstance(result, _Written)]
        errors = [result for result in results if isinstance(result, SampleError)]
        if errors and not written:
            raise IngestError(f"none of the {len(errors)} samples can be prepared; the first: {errors[0]}")
        tasks.close()
        store = writer.finish([result for _, result in written])
        cleanup.pop_all()
    return Ingested(
        store=store,
        kept=range(len(results)) if not errors else [index for index, _ in written],
        targets=[pickle.loads(result.target) for _, result in written],
        skipped=errors,
    )


# One sample


class _ShapesDiffer(Exception):
    """A sample does not have the shape that the others have."""


@dataclass(frozen=True, slots=True)
class _Written:
    """Where a sample lies: its row in a dense block or first byte in a ragged one; and its pickled target."""

    place: int
    shape: tuple[int, ...]
    target: bytes


_Task = list[tuple[int, "_Written | SampleError"]]


def _prepared(source: Source, prepare: Callable[[Any], Any], index: int) -> tuple[Any, Any]:
    """Read and prepare one sample; every failure of either is a SampleError that names it."""
    try:
        sample, target = source.read(index)
        return prepare(sample), target
    except (MemoryError, SampleError):
        raise
    except Exception as cause:
        raise sample_error(source.path(index), index, cause) from cause


class _Writer(Protocol):
    """Puts prepared samples into a block, from any worker."""

    block: Block

    def write(self, index: int, array: np.ndarray) -> int: ...
    def finish(self, written: list[_Written]) -> Store: ...
    def close(self) -> None: ...


class _DenseWriter:
    """Sample i goes to row i."""

    def __init__(self, expected: Forecast, length: int, limit_bytes: int) -> None:
        self._spec = expected.spec
        self._length = length
        self.block = Block.create(max(expected.need_bytes, 1))

    def write(self, index: int, array: np.ndarray) -> int:
        if array.shape != self._spec.shape:
            raise _ShapesDiffer(f"sample {index} has shape {array.shape}, those before it {self._spec.shape}")
        self.block.write(index * self._spec.sample_bytes, array)
        return index

    def finish(self, written: list[_Written]) -> DenseStore:
        self.block.seal()
        rows = None if len(written) == self._length else np.array([each.place for each in written], np.int64)
        return DenseStore(self.block, self._spec, length=len(written), rows=rows)

    def close(self) -> None:
        self.block.close()


class _RaggedWriter:
    """Samples lie in the order in which they were prepared; the block grows as their sizes become known."""

    def __init__(self, expected: Forecast, length: int, limit_bytes: int) -> None:
        self._spec = expected.spec
        self._limit_bytes = limit_bytes
        self._step_bytes = max(int(expected.need_bytes * _GROWTH), 1 << 20)
        self._lock = multiprocessing.get_context("fork").Lock() if _can_fork() else threading.Lock()
        self.block = Block.create(max(min(expected.need_bytes, limit_bytes), 1))
        self._state_block = Block.create(16)
        self._state = self._state_block.array("int64", (2,))  # bytes used, bytes reserved; shared by all workers
        self._state[1] = self.block.size_bytes

    def write(self, index: int, array: np.ndarray) -> int:
        with self._lock:
            start, reserved_bytes = self._state.tolist()
            end = start + _padded(array.nbytes)
            if end > reserved_bytes:
                self._grow(end)
            self._state[0] = end
        self.block.write(start, np.ascontiguousarray(array))
        return start

    def _grow(self, end: int) -> None:
        if end > self._limit_bytes:
            raise MemoryBudgetError(
                f"prepared samples of many shapes need more than the {format_bytes(self._limit_bytes)} that is free. "
                f"Use resize=, storage='none', or a higher memory_limit=."
            )
        size_bytes = min(end + self._step_bytes, self._limit_bytes)
        self.block.grow(size_bytes)
        self._state[1] = size_bytes

    def finish(self, written: list[_Written]) -> RaggedStore:
        used_bytes, reserved_bytes = self._state.tolist()
        self.block.grow(reserved_bytes)
        self.block.trim(used_bytes)
        self.block.seal()
        self._state_block.close()
        shapes = {len(each.shape) for each in written}
        if len(shapes) > 1:
            raise IngestError(f"samples have {' and '.join(map(str, sorted(shapes)))} dimensions; make them alike")
        return RaggedStore(
            self.block,
            self._spec,
            offsets=np.array([each.place for each in written], np.int64),
            shapes=np.array([each.shape for each in written], np.int32).reshape(len(written), -1),
        )

    def close(self) -> None:
        self.block.close()
        self._state_block.close()


@dataclass(slots=True)
class _Job:
    """What a worker does with a run of sample numbers."""

    source: Source
    prepare: Callable[[Any], Any]
    writer: _DenseWriter | _RaggedWriter
    stop: threading.Event = field(default_factory=threading.Event)

    def __call__(self, indices: range) -> _Task:
        return [(index, self._one(index)) for index in indices if not self.stop.is_set()]

    def _one(self, index: int) -> _Written | SampleError:
        try:
            prepared, target = _prepared(self.source, self.prepare, index)
            array, form = to_stored(prepared)
        except SampleError as error:
            return error
        except TypeError as cause:
            return sample_error(self.source.path(index), index, cause)
        spec = self.writer._spec
        if array.dtype.name != spec.dtype or form != spec.form:
            found, usual = f"a {array.dtype.name} {form} sample", f"{spec.dtype} {spec.form} ones"
            cause = TypeError(f"it is {found} among {usual}; give all samples one type in prepare=")
            return sample_error(self.source.path(index), index, cause)
        return _Written(self.writer.write(index, array), array.shape, pickle.dumps(target, protocol=5))


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


# Many samples


def _run(job: _Job, length: int, workers: int) -> Iterator[_Task]:
    """Yield finished tasks in any order, from as many workers as the work is worth."""
    tasks = [range(i, min(i + _SAMPLES_PER_TASK, length)) for i in range(0, length, _SAMPLES_PER_TASK)]
    workers = min(workers, len(tasks) // _TASKS_AHEAD)
    if workers <= 1:
        yield from map(job, tasks)
    elif _can_fork():
        yield from _run_in_processes(job, tasks, workers)
    else:
        yield from _run_in_threads(job, tasks, workers)


def _can_fork() -> bool:
    """Whether workers can be forked: not on macOS (unsafe) and Windows, nor from a daemonic worker process."""
    return sys.platform.startswith("linux") and not multiprocessing.current_process().daemon


def _run_in_threads(job: _Job, tasks: Sequence[range], workers: int) -> Iterator[_Task]:
    queue = iter(tasks)
    executor = ThreadPoolExecutor(workers, thread_name_prefix="fastdata-ingest")
    try:
        running: set[Future[_Task]] = {
            executor.submit(job, task) for task in itertools.islice(queue, workers * _TASKS_AHEAD)
        }
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {executor.submit(job, task) for task in itertools.islice(queue, len(done))}
            for future in done:
                yield future.result()
    finally:
        job.stop.set()
        executor.shutdown(wait=True, cancel_futures=True)


def _run_in_processes(job: _Job, tasks: Iterable[range], workers: int) -> Iterator[_Task]:
    queue = deque(tasks)
    crew = [_Worker(job) for _ in range(workers)]
    try:
        for worker in crew * _TASKS_AHEAD:
            worker.give(queue)
        while any(worker.tasks for worker in crew):
            by_handle = {worker.connection: worker for worker in crew if worker.tasks}
            for handle in wait_for_any(list(by_handle)):
                worker = by_handle[handle]  # type: ignore[index]
                yield worker.take()
                worker.give(queue)
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """A forked process that runs tasks sent over a pipe."""

    def __init__(self, job: _Job) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.tasks: deque[range] = deque()
        self._process = context.Process(
            target=_serve, args=(theirs, self.connection, job, os.getpid()), name="fastdata-ingest", daemon=True
        )
        with warnings.catch_warnings():  # Python 3.12 warns of forking beside threads; the child runs only our loop
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def give(self, queue: deque[range]) -> None:
        """Send the next task, if there is one; a dead worker is noticed by ``take``."""
        if queue:
            self.tasks.append(queue.popleft())
            with contextlib.suppress(BrokenPipeError):
                self.connection.send_bytes(pickle.dumps(self.tasks[-1]))

    def take(self) -> _Task:
        """Receive a finished task, or raise what the worker raised."""
        try:
            result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        task = self.tasks.popleft()
        if isinstance(result, _Failure):
            raise result.error from IngestError(f"in a worker process, samples {task[0]} to {task[-1]}:\n{result.text}")
        return result  # type: ignore[no-any-return]

    def end(self) -> None:
        """Kill and reap the process; it holds nothing that needs an orderly end."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()

    def _death(self) -> IngestError:
        self._process.join()
        task, code = self.tasks[0], self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cure = " Out of memory is the usual reason: use fewer num_workers= or a smaller resize=." if code == -9 else ""
        return IngestError(
            f"worker process {self._process.pid} {how} while it prepared samples {task[0]} to {task[-1]}.{cure}"
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that is no sample's fault, with its traceback as text."""

    error: BaseException
    text: str


def _serve(connection: Connection, parents_end: Connection, job: _Job, parent_pid: int) -> None:
    """Run tasks until killed, or until the parent is gone."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what the parent left to its garbage collector is the parent's to finalise
    torch.set_num_threads(1)  # this process only: a forked OpenMP pool would hang
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while os.getppid() == parent_pid:
            if connection.poll(_PARENT_CHECK_S):
                connection.send_bytes(_attempt(job, pickle.loads(connection.recv_bytes())))


def _attempt(job: _Job, task: range) -> bytes:
    try:
        return pickle.dumps(job(task), protocol=5)
    except Exception as error:
        text = traceback.format_exc()
        with contextlib.suppress(Exception):  # an error that cannot be pickled travels as text
            return pickle.dumps(_Failure(error, text))
        return pickle.dumps(_Failure(IngestError(text), text))
