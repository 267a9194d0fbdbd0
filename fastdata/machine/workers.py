"""Running a job over tasks: in threads where it holds no GIL, else in processes that are forked.

Forked processes share all memory of the parent as it was, so that a job needs no pickling, only its
tasks and results. They are killed when a run ends, whatever the reason, and end by themselves
within a second of the parent.
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
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from fastdata.errors import IngestError
from fastdata.machine.ranks import signal_name

_T = TypeVar("_T")
_TASKS_AHEAD = 2
"""Of a worker: the one it is at, and the next."""
_PARENT_CHECK_S = 1.0


def run_tasks(
    job: Callable[[Any], _T],
    tasks: Sequence[Any],
    workers: int,
    *,
    forks: bool = True,
    cores: Collection[int] = (),
) -> Generator[_T, None, None]:
    """Yield what the job returns for each task, in any order; close the generator to end the workers.

    Args:
        job: called with one task; what it raises is raised here.
        tasks: can be pickled, and say as text what they are.
        workers: below 1 the job runs in the thread that asks.
        forks: whether workers are processes, if they can be; else the job is one for threads.
        cores: that workers may use, where those of this process are fewer.

    Raises:
        IngestError: a worker died.
    """
    if workers < 1:
        yield from map(job, tasks)
        return
    forks = (
        forks and sys.platform.startswith("linux") and not multiprocessing.current_process().daemon
    )
    threads = partial(ThreadPoolExecutor, workers, "fastdata-ingest", _use_cores, (cores,))
    pool = _ForkedPool(job, workers, cores) if forks else threads()
    running: dict[Future[Any], Any] = {}
    try:
        for future in _completed(
            pool, _attempt_job if forks else job, tasks, workers * _TASKS_AHEAD, running
        ):
            yield _answer(future.result(), running[future]) if forks else future.result()
    except BrokenProcessPool:
        assert isinstance(pool, _ForkedPool)
        raise pool.loss(list(running.values())) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _completed(
    pool: Executor,
    function: Callable[[Any], Any],
    tasks: Sequence[Any],
    ahead: int,
    running: dict[Future[Any], Any],
) -> Iterator[Future[Any]]:
    """Give a pool its tasks, so many ahead, and yield its futures as they are done; they are ``running`` till then."""
    waiting = iter(tasks)
    for task in itertools.islice(waiting, ahead):
        running[pool.submit(function, task)] = task
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            for task in itertools.islice(waiting, 1):
                running[pool.submit(function, task)] = task
            yield future
            del running[future]


def _answer(answer: bytes, task: Any) -> Any:
    result, error, text = pickle.loads(answer)
    if error is not None:
        raise error from IngestError(f"in a worker process, {task}:\n{text}")
    return result


class _ForkedPool(ProcessPoolExecutor):
    """Processes that know one job from their parent."""

    def __init__(self, job: Callable[[Any], Any], workers: int, cores: Collection[int]) -> None:
        super().__init__(
            workers, multiprocessing.get_context("fork"), _begin, (job, os.getpid(), cores)
        )
        self._creator = os.getpid()
        with (
            warnings.catch_warnings()
        ):  # Python 3.12 warns of forking beside threads; the child runs only our loop
            warnings.simplefilter("ignore", DeprecationWarning)
            with _interrupts_deferred():
                self.submit(os.getpid)  # which forks all of them
                self.workers = list(self._processes.values())

    def loss(self, tasks: Sequence[Any]) -> IngestError:
        """What is to be said of a worker that died, while these were prepared."""
        super().shutdown()  # by when it has ended the others, too
        codes = [worker.exitcode or 0 for worker in self.workers]
        code = next((code for code in codes if code not in (0, -signal.SIGTERM)), -signal.SIGTERM)
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        usual = " Out of memory is the usual reason: use fewer num_workers= or a smaller resize=."
        what = "; ".join(map(str, tasks))
        return IngestError(
            f"a worker process {how} while these were prepared: {what}.{usual * (code == -9)}"
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Kill the workers, which hold nothing that needs an orderly end; nothing in a forked process."""
        if os.getpid() == self._creator:
            for worker in self.workers:
                worker.kill()
            super().shutdown(wait, cancel_futures=cancel_futures)


_job: Callable[[Any], Any]
"""Of a forked worker."""


def _begin(job: Callable[[Any], Any], parent_pid: int, cores: Collection[int]) -> None:
    global _job
    _job = job
    _use_cores(cores)
    multiprocessing.current_process().name = "fastdata-ingest"
    # Ctrl-C reaches the whole group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what the parent left to its garbage collector is the parent's to finalise
    torch.set_num_threads(1)  # this process only: a forked OpenMP pool would hang
    threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()


def _use_cores(cores: Collection[int]) -> None:
    if cores:
        with contextlib.suppress(OSError):  # not permitted: those that there are
            os.sched_setaffinity(0, cores)  # of this thread


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


def _attempt_job(task: Any) -> bytes:
    return attempt(_job, task)


def attempt(job: Callable[[Any], Any], task: Any) -> bytes:
    """What the job returns, or else the error that it raises and its traceback, pickled."""
    try:
        return pickle.dumps((job(task), None, ""), protocol=5)
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent raises it
        text = traceback.format_exc()
        with contextlib.suppress(Exception):  # an error that cannot be pickled travels as text
            return pickle.dumps((None, error, text))
        return pickle.dumps((None, IngestError(text), text))


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends.

    Python drops exceptions in the hooks that run around a fork: a KeyboardInterrupt there would be
    lost in the parent, or leave a child half made.
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
