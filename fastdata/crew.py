"""A crew of workers: forked processes where the platform can fork, else threads.

Forked workers share all memory of the parent as it was, so that a job needs no pickling, and are killed when the crew
is done with, whatever the reason. They end by themselves within a second of the parent.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from fastdata.errors import IngestError

__all__ = ["Crew", "run_tasks"]

_T = TypeVar("_T")
Task = Any
"""What a job is called with: a range of sample numbers, or anything that can be pickled and says as text what it is."""
Job = Callable[[Task], _T]

_TASKS_AHEAD = 2
_PARENT_CHECK_S = 1.0


def run_tasks(job: Job[_T], tasks: Sequence[Task], workers: int) -> Generator[_T, None, None]:
    """Yield what ``job`` returns for each task, in any order; close the generator to end the workers.

    Args:
        job: called with one task, in a worker; its results are pickled between processes.
        tasks: ranges of sample numbers.
        workers: at most so many; 1 or less runs the job here.

    Raises:
        IngestError: a worker died.
        Exception: whatever the job raises; the other tasks are given up.
    """
    with contextlib.closing(Crew(job, min(workers, len(tasks) // _TASKS_AHEAD))) as crew:
        yield from crew.run(tasks)


class Crew(Generic[_T]):
    """Workers that stay for several rounds of tasks; whoever makes it closes it.

    Args:
        job: called with one task, in a worker; its results are pickled between processes.
        workers: processes, forked now; threads, started for each round, where the platform cannot fork. 1 or less runs
            the job in the thread that calls ``run``.
    """

    def __init__(self, job: Job[_T], workers: int) -> None:
        self._job, self._count = job, workers
        self._workers: list[_Worker] = []
        if workers <= 1 or not _can_fork():
            return
        try:
            with _interrupts_deferred():
                for _ in range(workers):
                    self._workers.append(_Worker(job))
        except BaseException:
            self.close()
            raise

    def run(self, tasks: Sequence[Task]) -> Generator[_T, None, None]:
        """Yield what the job returns for each task, in any order.

        A round that is left early, or by an exception, is the crew's last.

        Raises:
            IngestError: a worker died.
            Exception: whatever the job raises.
        """
        if self._workers:
            yield from self._run_in_processes(tasks)
        elif self._count > 1:
            yield from _run_in_threads(self._job, tasks, self._count)
        else:
            yield from map(self._job, tasks)

    def _run_in_processes(self, tasks: Sequence[Task]) -> Generator[_T, None, None]:
        queue = deque(tasks)
        for worker in self._workers * _TASKS_AHEAD:
            worker.give(queue)
        by_handle: dict[object, _Worker] = {worker.connection: worker for worker in self._workers}
        while busy := [worker.connection for worker in self._workers if worker.tasks]:
            for handle in wait_for_any(busy):
                worker = by_handle[handle]
                yield worker.take()
                worker.give(queue)

    def kill(self) -> None:
        """Let a round that another thread waits in fail now; close the crew when that has."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """Kill and reap the workers; they hold nothing that needs an orderly end. Idempotent."""
        while self._workers:
            self._workers.pop().end()


def _can_fork() -> bool:
    """Whether workers can be forked: not on macOS (unsafe) and Windows, nor from a daemonic worker process."""
    return sys.platform.startswith("linux") and not multiprocessing.current_process().daemon


def _run_in_threads(job: Job[_T], tasks: Sequence[Task], workers: int) -> Generator[_T, None, None]:
    queue = iter(tasks)
    executor = ThreadPoolExecutor(workers, thread_name_prefix="fastdata-ingest")
    try:
        running: set[Future[_T]] = {
            executor.submit(job, task) for task in itertools.islice(queue, workers * _TASKS_AHEAD)
        }
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {executor.submit(job, task) for task in itertools.islice(queue, len(done))}
            for future in done:
                yield future.result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends.

    Python drops exceptions in the hooks that run around a fork: a KeyboardInterrupt there would be lost in the parent,
    or leave a child half made.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])


class _Worker:
    """A forked process that runs tasks sent over a pipe."""

    def __init__(self, job: Job[Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.tasks: deque[Task] = deque()
        self._process = context.Process(
            target=_serve, args=(theirs, self.connection, job, os.getpid()), name="fastdata-ingest", daemon=True
        )
        with warnings.catch_warnings():  # Python 3.12 warns of forking beside threads; the child runs only our loop
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def give(self, queue: deque[Task]) -> None:
        """Send the next task, if there is one; a dead worker is noticed by ``take``."""
        if queue:
            self.tasks.append(queue.popleft())
            with contextlib.suppress(BrokenPipeError):
                self.connection.send_bytes(pickle.dumps(self.tasks[-1]))

    def take(self) -> Any:
        """Receive a finished task, or raise what the worker raised."""
        try:
            result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        task = self.tasks.popleft()
        if isinstance(result, _Failure):
            raise result.error from IngestError(f"in a worker process, {_in_words(task)}:\n{result.text}")
        return result

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self._process.kill()

    def end(self) -> None:
        """Kill and reap the process."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()

    def _death(self) -> IngestError:
        self._process.join()
        task, code = self.tasks[0], self._process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        cure = " Out of memory is the usual reason: use fewer num_workers= or a smaller resize=." if code == -9 else ""
        return IngestError(f"worker process {self._process.pid} {how} while it prepared {_in_words(task)}.{cure}")


def _in_words(task: Task) -> str:
    return f"samples {task[0]} to {task[-1]}" if isinstance(task, range) else str(task)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that is no sample's fault, with its traceback as text."""

    error: BaseException
    text: str


def _serve(connection: Connection, parents_end: Connection, job: Job[Any], parent_pid: int) -> None:
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


def _attempt(job: Job[Any], task: Task) -> bytes:
    try:
        return pickle.dumps(job(task), protocol=5)
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent raises it
        text = traceback.format_exc()
        with contextlib.suppress(Exception):  # an error that cannot be pickled travels as text
            return pickle.dumps(_Failure(error, text))
        return pickle.dumps(_Failure(IngestError(text), text))
