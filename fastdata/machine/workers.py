"""Running a job over tasks: in threads where it holds no GIL, else in processes that are forked.

Forked processes share all memory of the parent as it was, so that a job needs no pickling, only its
tasks and results. They are killed when a run ends, whatever the reason, and end by themselves
within a second of the parent.
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
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from fastdata.errors import IngestError
from fastdata.machine.ranks import signal_name

_T = TypeVar("_T")
_PARENT_CHECK_S = 1.0


def run_tasks(
    job: Callable[[Any], _T],
    tasks: Sequence[Any],
    workers: int,
    *,
    forks: bool = True,
    cores: Collection[int] = (),
) -> Generator[_T, None, None]:
    """Yield what the job returns for each task, in order; close the generator to end the workers.

    Args:
        job: called with one task; what it raises is raised here.
        tasks: can be pickled, and say as text what they are.
        workers: below 1 the job runs in the thread that asks.
        forks: whether workers are processes, if they can be; else the job is one for threads.
        cores: that workers may use, where those of this process are fewer.

    Raises:
        IngestError: a worker died.
    """
    can_fork = sys.platform.startswith("linux") and not multiprocessing.current_process().daemon
    if workers < 1:
        yield from map(job, tasks)
    elif forks and can_fork:
        yield from _run_forked(job, tasks, workers, cores)
    else:
        pool = ThreadPoolExecutor(workers, "fastdata-ingest", _use_cores, (cores,))
        try:
            yield from pool.map(job, tasks)
        finally:
            pool.shutdown(cancel_futures=True)


def _run_forked(
    job: Callable[[Any], _T], tasks: Sequence[Any], workers: int, cores: Collection[int]
) -> Generator[_T, None, None]:
    creator = os.getpid()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (job, creator, cores))
    children: list[BaseProcess] = []
    done = 0
    try:
        with _forking():
            pool.submit(os.getpid)  # which forks all of them
            children += pool._processes.values()
        for task, answer in zip(tasks, pool.map(_attempt_job, tasks), strict=True):
            result, error, text = pickle.loads(answer)
            if error is not None:
                raise error from IngestError(f"in a worker process, {task}:\n{text}")
            yield result
            done += 1
    except BrokenProcessPool:
        pool.shutdown()  # by when it has ended the others, too
        raise _loss(children, tasks[done : done + 2 * workers]) from None
    finally:
        if os.getpid() == creator:
            for child in children:
                child.kill()  # they hold nothing that needs an orderly end
            pool.shutdown(cancel_futures=True)


def _loss(children: Sequence[BaseProcess], tasks: Sequence[Any]) -> IngestError:
    """What is to be said of a worker that died, while about these were prepared."""
    codes = [child.exitcode or 0 for child in children]
    code = next((code for code in codes if code not in (0, -signal.SIGTERM)), -signal.SIGTERM)
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    text = f"a worker process {how} while these were prepared: {'; '.join(map(str, tasks))}."
    if code == -signal.SIGKILL:
        text += (
            " Out of memory is the usual reason: use fewer prepare_workers= or a smaller resize=."
        )
    return IngestError(text)


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Fork, although there are threads: the child runs only our loop.

    Ctrl-C waits till then: Python drops exceptions in the hooks that run around a fork.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


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
