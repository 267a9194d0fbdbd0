"""A pool of workers: threads for jobs that hold no GIL, else forked processes where the platform can fork.

Forked workers share all memory of the parent as it was, so that a job needs no pickling, only its tasks and results.
They are killed when the pool is closed, whatever the reason, and end by themselves within a second of the parent. A
``ProcessPoolExecutor`` cannot tell which task a killed worker was at, waits for running ones when it is shut down, and
leaves its workers behind a killed parent.
"""

from __future__ import annotations

import contextlib
import gc
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
from multiprocessing.connection import wait as wait_for_any
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

from fastdata.errors import IngestError
from fastdata.ranks import Host, Lent, how_ended, signal_name

_T = TypeVar("_T")
_TASKS_AHEAD = 2
_TASKS_EXPECTED = 8
"""Ahead of a worker that is to fetch what they need meanwhile."""
_PARENT_CHECK_S = 1.0


class WorkerPool(Generic[_T]):
    """Workers that stay for several rounds of tasks; whoever makes it closes it.

    Args:
        job: called with one task, in a worker.
        workers: at most so many.
        may_run_here: 1 or less runs the job in the thread that calls ``run``.
        expect: called with each task as soon as a worker has it; of more tasks ahead then.
        forks: whether workers are processes, if they can be; else the job is one for threads.
    """

    def __init__(
        self,
        job: Callable[[Any], _T],
        workers: int,
        *,
        may_run_here: bool = True,
        expect: Callable[[Any], None] | None = None,
        forks: bool = True,
    ) -> None:
        self._job, self._pid, self._expect = job, os.getpid(), expect
        self._ahead = _TASKS_AHEAD if expect is None else _TASKS_EXPECTED
        self._workers: list[_Worker] = []
        if workers < 1 or (workers == 1 and may_run_here):
            return
        forks = forks and sys.platform.startswith("linux") and not multiprocessing.current_process().daemon
        kind = _ForkedWorker if forks else _ThreadWorker
        try:
            with _interrupts_deferred():
                for _ in range(workers):
                    self._workers.append(kind(job, expect))
        except BaseException:
            self.close()
            raise

    def run(self, tasks: Sequence[Any], host: Host | None = None) -> Generator[_T, None, None]:
        """Yield what the job returns for each task, in any order; a round that is left early is the pool's last.

        Tasks are ranges of sample numbers, or anything that can be pickled and says as text what it is. What the job
        raises is raised here; a worker that died is an IngestError. Workers that the guests of a ``host`` lend take
        part, each in place of one of the pool's own unless it has cores of its own.
        """
        if self._workers:
            queue = deque(tasks)
            for worker in self._workers * self._ahead:
                worker.give(queue)
            while busy := {worker.connection: worker for worker in self._workers if worker.tasks}:
                for ready in wait_for_any([*busy, *(host.to_watch() if host else ())]):
                    if ready in busy:
                        yield busy[ready].take()
                        busy[ready].give(queue)
                    elif host is not None:
                        self._take_on(host.answer(ready), queue)
        elif self._expect is not None:
            for k, task in enumerate(tasks):
                for coming in tasks[k + self._ahead - 1 : k + self._ahead] if k else tasks[: self._ahead]:
                    self._expect(coming)
                yield self._job(task)
        else:
            yield from map(self._job, tasks)

    def _take_on(self, lent: Sequence[Lent], queue: deque[Any]) -> None:
        for each in lent:
            worker = _LentWorker(each)
            own = [it for it in self._workers if not isinstance(it, _LentWorker) and not it.is_retired]
            if not each.is_extra and len(own) > 1:
                own[-1].is_retired = True
            self._workers.append(worker)
            for _ in range(self._ahead):
                worker.give(queue)

    def lend(self) -> list[tuple[int, int]]:
        """The descriptor of each worker's connection, and its process: for another process to give them tasks."""
        return [(worker.connection.fileno(), worker.pid) for worker in self._workers]

    def kill(self) -> None:
        """Let a round that another thread waits in fail now; close the pool when that has."""
        for worker in self._workers if os.getpid() == self._pid else ():
            worker.kill()

    def close(self) -> None:
        """Kill and reap the workers; they hold nothing that needs an orderly end. Idempotent.

        A forked process lets its parent's go.
        """
        if os.getpid() != self._pid:
            self._workers.clear()
        while self._workers:
            worker = self._workers.pop()
            worker.kill()
            worker.close()


def run_tasks(
    job: Callable[[Any], _T],
    tasks: Sequence[Any],
    workers: int,
    host: Host | None = None,
    *,
    may_run_here: bool = True,
    expect: Callable[[Any], None] | None = None,
    forks: bool = True,
) -> Generator[_T, None, None]:
    """A round of a pool of its own; close the generator to end the workers."""
    workers = min(workers, len(tasks) // _TASKS_AHEAD)
    with contextlib.closing(WorkerPool(job, workers, may_run_here=may_run_here, expect=expect, forks=forks)) as pool:
        yield from pool.run(tasks, host)


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
    """A process that runs tasks sent over a connection."""

    name = "worker process"

    def __init__(self, connection: Any, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.tasks: deque[Any] = deque()
        self.is_retired = False

    def give(self, queue: deque[Any]) -> None:
        """Send the next task, if there is one; a dead worker is noticed by ``take``."""
        if queue and not self.is_retired:
            self.tasks.append(queue.popleft())
            with contextlib.suppress(BrokenPipeError):
                self.connection.send_bytes(pickle.dumps(self.tasks[-1]))

    def take(self) -> Any:
        """Receive a finished task, or raise what the worker raised."""
        task = self.tasks[0]
        what = f"samples {task[0]} to {task[-1]}" if isinstance(task, range) else str(task)
        try:
            received = self.connection.recv_bytes()
        except (EOFError, OSError):  # also in the middle of a result
            how = self.ended()
            usual = " Out of memory is the usual reason: use fewer num_workers= or a smaller resize="
            cure = f"{usual}." if "SIGKILL" in how else ""
            raise IngestError(f"{self.name} {self.pid} {how} while it prepared {what}.{cure}") from None
        result, error, text = pickle.loads(received)
        self.tasks.popleft()
        if error is not None:
            raise error from IngestError(f"in a {self.name}, {what}:\n{text}")
        return result

    def ended(self) -> str:
        return how_ended(self.pid)

    def kill(self) -> None: ...

    def close(self) -> None:
        self.connection.close()


class _LentWorker(_Worker):
    """One of another rank, which ends it."""

    def __init__(self, lent: Lent) -> None:
        super().__init__(lent.connection, lent.pid)
        self.name = f"worker process of rank {lent.rank},"


class _ForkedWorker(_Worker):
    def __init__(self, job: Callable[[Any], Any], expect: Callable[[Any], None] | None) -> None:
        context = multiprocessing.get_context("fork")
        connection, theirs = context.Pipe()
        arguments = (theirs, connection, job, expect, os.getpid())
        self._process = context.Process(target=_work, args=arguments, name="fastdata-ingest", daemon=True)
        with warnings.catch_warnings():  # Python 3.12 warns of forking beside threads; the child runs only our loop
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        super().__init__(connection, self._process.pid or 0)

    def ended(self) -> str:
        self._process.join()
        code = self._process.exitcode or 0
        return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.join()
        self._process.close()
        super().close()


class _ThreadWorker(_Worker):
    """A thread of this process: its task is told as to a process, so that other processes may lend and borrow it."""

    name = "worker thread of process"

    def __init__(self, job: Callable[[Any], Any], expect: Callable[[Any], None] | None) -> None:
        connection, theirs = multiprocessing.Pipe()
        super().__init__(connection, os.getpid())
        arguments = (theirs, job, expect, lambda: not connection.closed)
        self._thread = threading.Thread(target=_serve, args=arguments, name="fastdata-ingest", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # what it is at is finished first
            self.connection.close()

    def close(self) -> None:
        self._thread.join()


def _work(
    connection: Any,
    inherited: Any,
    job: Callable[[Any], Any],
    expect: Callable[[Any], None] | None,
    parent_pid: int,
) -> None:
    inherited.close()  # the parent's end, so that its death ends the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what the parent left to its garbage collector is the parent's to finalise
    torch.set_num_threads(1)  # this process only: a forked OpenMP pool would hang
    _serve(connection, job, expect, lambda: os.getppid() == parent_pid)


def _serve(
    connection: Any, job: Callable[[Any], Any], expect: Callable[[Any], None] | None, is_wanted: Callable[[], bool]
) -> None:
    """Do the tasks that come over a connection, in their order, until its other end is gone."""
    tasks: deque[Any] = deque()
    with contextlib.closing(connection), contextlib.suppress(EOFError, OSError):
        while is_wanted():
            while connection.poll(0 if tasks else _PARENT_CHECK_S):
                tasks.append(pickle.loads(connection.recv_bytes()))
                if expect is not None:
                    expect(tasks[-1])
            if tasks:
                connection.send_bytes(attempt(job, tasks.popleft()))


def attempt(job: Callable[[Any], Any], task: Any) -> bytes:
    """What the job returns, or else the error that it raises and its traceback, pickled."""
    try:
        return pickle.dumps((job(task), None, ""), protocol=5)
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent raises it
        text = traceback.format_exc()
        with contextlib.suppress(Exception):  # an error that cannot be pickled travels as text
            return pickle.dumps((None, error, text))
        return pickle.dumps((None, IngestError(text), text))
