"""Jobs that run over tasks in threads or in forked processes.

A job that releases the GIL runs in threads, any other in forked processes. A forked process has the
parent's memory as it was at the fork, so that only tasks and results are pickled, not the job.
Files that are open in the parent are opened again, so that each process reads from its own
position. The processes are killed when a run ends for any reason, and end within a second if the
parent dies. If processes cannot be forked, the job runs in threads, or in the calling thread if it
is not thread-safe.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import random
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
from typing import Any, TypeVar, cast

import numpy as np
import torch.distributed

from fastdata.errors import IngestError
from fastdata.machine.open_files import obstacle_in_files, take_own_positions
from fastdata.report import log, warn_user

_T = TypeVar("_T")
Job = Callable[[Any], Any]
_PARENT_CHECK_S = 1.0
_NUMPY_SEEDS = 1 << 32
_TORCH_SEEDS = 1 << 63
_NOT_LINUX = "processes are forked only on Linux"
_DAEMON = "a daemon process may not start others"


def run_tasks(
    job: Callable[[Any], _T],
    tasks: Sequence[Any],
    workers: int,
    *,
    forks: bool = True,
    is_thread_safe: bool = True,
    cores: Collection[int] = (),
) -> Generator[_T, None, None]:
    """Yield the result of the job for each task, in order. Close the generator to end the workers.

    Args:
        job: function of one task. Its errors are raised here.
        tasks: arguments of the job, which can be pickled. Their text is shown in errors.
        workers: number of threads or processes; below 2 the job runs in the calling thread.
        forks: True for a job that holds the GIL: it runs in forked processes if possible.
        is_thread_safe: True if several threads may run the job at once. If not, and if it cannot
            run in forked processes, it runs in the calling thread, one task after the other.
        cores: cores that workers may use, if this process is bound to fewer.

    Raises:
        IngestError: a worker process died. The text has the tasks that it may have run.
    """
    if workers > 1 and forks:
        obstacle = obstacle_to_forks()
        if not obstacle:
            yield from _run_in_processes(job, tasks, workers, cores)
            return
        if not is_thread_safe:
            workers = 1
        _report_slower(obstacle, is_thread_safe=is_thread_safe)
    if workers > 1:
        yield from _run_in_threads(job, tasks, workers, cores)
    else:
        yield from map(job, tasks)


def _run_in_processes(
    job: Callable[[Any], _T], tasks: Sequence[Any], workers: int, cores: Collection[int]
) -> Generator[_T, None, None]:
    done = 0
    with forked(job, workers, cores, threads=1) as (pool, children):
        try:
            for answer in pool.map(attempt_job, tasks, itertools.count(torch.initial_seed())):
                yield settle(answer)
                done += 1
        except BrokenProcessPool:
            pool.shutdown()  # waits until the other processes have ended, too
            raise _loss(children, tasks[done : done + 2 * workers]) from None


def _run_in_threads(
    job: Callable[[Any], _T], tasks: Sequence[Any], workers: int, cores: Collection[int]
) -> Generator[_T, None, None]:
    threads = ThreadPoolExecutor(workers, "fastdata-ingest", _use_cores, (cores,))
    try:
        yield from threads.map(job, tasks)
    finally:
        threads.shutdown(cancel_futures=True)


def obstacle_to_forks() -> str:
    """Return why a forked process could not do the same work as this one; empty if it can."""
    if not sys.platform.startswith("linux"):
        return _NOT_LINUX
    if multiprocessing.current_process().daemon:
        return _DAEMON
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as problem:
        return f"processes need room for their locks in /dev/shm ({problem})"
    return obstacle_in_files()


def _report_slower(obstacle: str, *, is_thread_safe: bool) -> None:
    how = "by threads" if is_thread_safe else "one after the other in this process"
    text = f"samples are prepared {how}, which may be slower: {obstacle}"
    if obstacle in (_NOT_LINUX, _DAEMON):  # the user cannot change it
        log.info("%s", text)
    else:
        warn_user(text)


def _loss(children: Sequence[BaseProcess], tasks: Sequence[Any]) -> IngestError:
    """Return the error for a worker that died while it ran one of ``tasks``."""
    ended = -signal.SIGTERM  # the pool ends the other workers with this signal
    code = next((it.exitcode for it in children if it.exitcode not in (0, None, ended)), ended)
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    text = f"a worker process {how} during one of these tasks: {'; '.join(map(str, tasks))}."
    if code == -signal.SIGKILL:
        text += (
            " Out of memory is the usual reason: use fewer prepare_workers= or a smaller resize=."
        )
    return IngestError(text)


@contextlib.contextmanager
def forked(
    job: Job, workers: int = 1, cores: Collection[int] = (), *, threads: int | None = None
) -> Iterator[tuple[ProcessPoolExecutor, Sequence[BaseProcess]]]:
    """Fork ``workers`` processes in which ``attempt_job`` runs the job.

    When the block ends, they are killed, with all processes that they have started. Each uses
    ``threads`` threads for torch's operations, or as many as the parent if that is None.

    Yields:
        The pool of the processes, and the processes.
    """
    creator = os.getpid()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (job, creator, cores, threads))
    children: list[BaseProcess] = []
    try:
        # Ctrl-C is blocked during the fork: Python would drop a KeyboardInterrupt that is raised in
        # one of the hooks that run around a fork.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # Python warns about forks of a process with threads, because a child may need a lock
            # that another thread held. These children run only our loop, which takes no such lock.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pool.submit(os.getpid)  # forks all of them
        finally:
            children += pool._processes.values()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        yield pool, children
    finally:
        if os.getpid() == creator:
            # The children are killed at once, because they hold nothing that they must release.
            for child in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(cast("int", child.pid), signal.SIGKILL)
                child.kill()  # for one that has no process group yet
            with contextlib.suppress(RuntimeError):  # its thread could not be started
                pool.shutdown(cancel_futures=True)


_job: Job
"""The job of a forked worker, which inherits it without pickling."""


def _begin(job: Job, parent_pid: int, cores: Collection[int], threads: int | None) -> None:
    """Set up a forked process for its job."""
    global _job
    try:
        take_own_positions()
        _job = job
    except OSError as problem:
        # An error raised here would only break the pool, without a reason. The first task raises
        # it.
        _job = functools.partial(_refuse, str(problem))
    os.setpgid(0, 0)  # its own group, so that the processes that it starts are killed with it
    _use_cores(cores)
    multiprocessing.current_process().name = "fastdata-ingest"
    # A terminal sends Ctrl-C to the parent, which then kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Garbage of the parent must not be finalised here: that could close what the parent still uses.
    gc.freeze()
    if threads:
        # For this process only. OpenMP's threads are not forked: an operation would wait for them
        # forever.
        torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()


def _refuse(problem: str, _: Any) -> None:
    raise IngestError(
        "a worker process must reopen the files that this process has open, to read each from its "
        f"own position, but that fails: {problem}. Use prepare_workers=1, or a dataset that opens "
        "its files in __getitem__ and closes them again."
    )


def _use_cores(cores: Collection[int]) -> None:
    if cores:
        with contextlib.suppress(OSError):  # not permitted: the cores stay the same
            os.sched_setaffinity(0, cores)  # of the calling thread


def _end_with_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def attempt_job(task: Any, seed: int | None = None) -> bytes:
    """Run the job of a forked worker. With a seed, the global generators are seeded first.

    Workers inherit the state of the global generators. Without seeds, all would draw the same
    numbers. torch seeds its workers in the same way.
    """
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % _NUMPY_SEEDS)
        torch.default_generator.manual_seed(seed % _TORCH_SEEDS)
    return attempt(_job, task)


def attempt(job: Job, task: Any) -> bytes:
    """Run a job, and pickle its result, or its error and traceback, for ``settle``.

    An error that cannot be pickled is sent as text, and so is a ``SystemExit``.
    """
    try:
        return pickle.dumps((job(task), None, ""), protocol=5)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the parent raises it
        text = f"in a worker process, {task}:\n{traceback.format_exc()}"
        with contextlib.suppress(Exception):
            answer = pickle.dumps((None, error, text))
            if isinstance(pickle.loads(answer)[1], Exception):
                return answer
        return pickle.dumps((None, IngestError(f"{type(error).__name__}: {error}"), text))


def settle(answer: bytes) -> Any:
    """Return the result of an ``attempt``, or raise its error."""
    result, error, text = pickle.loads(answer)
    if error is not None:
        raise error from IngestError(text)
    return result
