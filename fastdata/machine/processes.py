"""Other processes: the ranks of a distributed run, which share samples, and workers.

``torch.distributed`` says who a rank is where a process group is up, else the launcher's
environment variables do.

Ranks meet at a file in a folder of their user. Who locks it first is the leader: it prepares, on
all cores of the job, writes handles of its memory into the file, and unlocks it. The others wait
for the lock, read the handles and attach through /proc/PID/fd. The kernel drops the lock of a
process that dies, and handles of a dead leader lead nowhere: then the next one leads.

A job runs over tasks in threads where it holds no GIL, else in processes that are forked. These
share all memory of the parent as it was, so that a job needs no pickling, only its tasks and
results. Files that are open in the parent are opened again, so that each process reads from a
position of its own. Processes are killed when a run ends, whatever the reason, and end by
themselves within a second of the parent. If none can be forked, the job runs in threads, or in the
thread that asks if several threads may not run it at once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch.distributed
from torch.utils.data import get_worker_info

from fastdata.errors import IngestError, StoreGoneError
from fastdata.machine import is_running
from fastdata.machine.open_files import obstacle_to_forks, take_own_positions
from fastdata.report import log, warn_user

if sys.platform != "win32":
    import fcntl

_T = TypeVar("_T")
Job = Callable[[Any], Any]
_PARENT_CHECK_S = 1.0
_LAUNCHERS = (
    # torchrun, Lightning, Accelerate, DeepSpeed
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    # Open MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # MPICH, Intel MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # srun; a batch script is in no step
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables of rank, number of ranks, and number of ranks on this machine."""
_RUN_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
"""Equal on all ranks of a run, and different in another run or attempt."""
_SELF_LAUNCHED = ("lightning", "pytorch_lightning", "lightning_fabric")


class Rank(NamedTuple):
    rank: int
    world_size: int


def find_rank(rank: int | None = None, world_size: int | None = None) -> Rank:
    """This process's rank, as given, by ``torch.distributed`` or the launcher; else (0, 1).

    Raises:
        ValueError: there is no such rank.
    """
    found = _known_rank() or Rank(0, 1)
    rank = found.rank if rank is None else rank
    world_size = found.world_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank={rank} is not one of the world_size={world_size} ranks, which count from 0"
        )
    return Rank(rank, world_size)


def _known_rank() -> Rank | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
    for *names, _ in _LAUNCHERS:
        found = [os.environ.get(name, "") for name in names]
        if all(map(str.isdecimal, found)):
            return Rank(*map(int, found))
    return None


def local_ranks() -> int:
    """How many ranks share this machine, as the launcher says; 1 where none says so."""
    for *_, name in _LAUNCHERS:
        found = re.match(r"0*[1-9]\d*", os.environ.get(name, ""))  # Slurm's "4(x2)": on two nodes
        if found is not None:
            return int(found[0])
    return 1


def find_run() -> str | None:
    """A name that only the ranks of this run have; None where there are no others to meet."""
    rank = _known_rank()
    is_lightnings = {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()  # who has no RANK
    is_alone = not is_lightnings if rank is None else rank.world_size == 1
    if is_alone or get_worker_info() is not None or not sys.platform.startswith("linux"):
        return None
    values = [os.environ.get(name, "") for name in _RUN_VARIABLES]
    return "\n".join(values) if any(values) else _process_name(os.getppid())


def run_to_be() -> str | None:
    """A name for the run that this process may become rank 0 of.

    Lightning makes the datasets first, and then starts the other ranks as its children.
    """
    is_worker = multiprocessing.parent_process() is not None or get_worker_info() is not None
    if is_worker or sys.modules.keys().isdisjoint(_SELF_LAUNCHED):
        return None
    return _process_name(os.getpid()) if hasattr(os, "memfd_create") else None


def _process_name(pid: int) -> str:
    return f"process {pid}"


def cores_of_job() -> set[int]:
    """The cores that all ranks of this run may use together: those of their parent, too."""
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores


# The meeting


class Follower(NamedTuple):
    """What the leader, ``"rank 0 (process 123)"``, has prepared."""

    value: Any
    leader: str


class Leader:
    """The rank that prepares for all of a machine. Pickles as None."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._end = weakref.finalize(self, _leave, fd, path, os.getpid())

    def tell(self, value: Any, known: Sequence[Any]) -> None:
        """Let the others have it, and those to come, until ``close``.

        ``known`` is what every rank has of its own: it is told by its place there.
        """
        places = {id(each): place for place, each in enumerate(known) if each is not None}
        data = io.BytesIO()
        pickler = pickle.Pickler(data, protocol=5)
        pickler.persistent_id = lambda each: places.get(id(each))  # type: ignore[method-assign]
        pickler.dump(value)
        with open(self._fd, "wb", closefd=False) as file:
            file.write(f"{os.getpid()} {find_rank().rank}\n".encode())
            file.write(data.getbuffer())
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let nobody attach any more. Idempotent; nothing in a forked process."""
        self._end()

    def __reduce__(self) -> Any:
        return type(None), ()


def _leave(fd: int, path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_UN)  # which a forked process may have, too
    os.close(fd)


def lead_or_follow(run: str, key: str, known: Sequence[Any]) -> Leader | Follower | None:
    """Be the first of the ranks that make the same dataset, or wait for what the first prepares.

    None, with a warning, where they cannot meet.
    """
    try:
        folder = _meeting_folder()
        parent = folder / _meeting_name(_process_name(os.getppid()), key)
        found = _read_handles(parent, known) if parent.exists() else None
        return found or _meet(folder / _meeting_name(run, key), known)
    except OSError as obstacle:  # no /proc, no locks, or a folder of somebody else's
        warn_user(
            f"the ranks of this machine cannot meet ({obstacle}), so that each prepares and holds "
            "samples of its own. cache_dir= holds one copy on disk."
        )
        return None


def _meet(path: Path, known: Sequence[Any]) -> Leader | Follower:
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits while another rank prepares
            if not os.fstat(file.fileno()).st_nlink:  # its leader has left meanwhile
                continue
            found = _read_handles(path, known)
            if found is not None:
                return found
            file.truncate(0)
            _sweep(path)
            return Leader(os.dup(file.fileno()), path)


def _read_handles(path: Path, known: Sequence[Any]) -> Follower | None:
    """None where nothing is told, not all yet, or the process that told it has ended."""
    with path.open("rb") as file:
        told_by = file.readline().split()
        unpickler = pickle.Unpickler(file)
        unpickler.persistent_load = known.__getitem__  # type: ignore[method-assign]
        try:
            value = unpickler.load()
        except (EOFError, pickle.UnpicklingError, StoreGoneError):
            return None
    pid, rank = map(int, told_by)
    return Follower(value, f"rank {rank} (process {pid})")


def _meeting_folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"fastdata-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _meeting_name(run: str, key: str) -> str:
    """Of the machine since it was started, the processes seen here, the run and the dataset."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    text = f"{boot}\n{os.stat('/proc/self/ns/pid').st_ino}\n{run}\n{key}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sweep(own: Path) -> None:
    """Remove what killed leaders left."""
    for path in own.parent.iterdir():
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid = file.readline().partition(b" ")[0]
            if path != own and not (pid and is_running(int(pid))):
                path.unlink()


# Workers


def run_tasks(
    job: Callable[[Any], _T],
    tasks: Sequence[Any],
    workers: int,
    *,
    forks: bool = True,
    is_thread_safe: bool = True,
    cores: Collection[int] = (),
) -> Generator[_T, None, None]:
    """Yield what the job returns for each task, in order; close the generator to end the workers.

    Args:
        job: called with one task; what it raises is raised here.
        tasks: can be pickled, and say as text what they are.
        workers: below 2 the job runs in the thread that asks.
        forks: run the job in forked processes if that is possible, because it holds the GIL.
        is_thread_safe: True if several threads may run the job at once. If not, and if it cannot
            run in forked processes, it runs in the thread that asks, one task after the other.
        cores: that workers may use, where those of this process are fewer.

    Raises:
        IngestError: a worker died.
    """
    if workers > 1 and forks:
        obstacle = _obstacle_to_forks()
        if not obstacle:
            yield from _run_in_processes(job, tasks, workers, cores)
            return
        if not is_thread_safe:
            workers = 1
        _say_slower(obstacle, is_thread_safe=is_thread_safe)
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
            seed = torch.initial_seed()
            for answer in pool.map(attempt_job, tasks, itertools.count(seed)):
                yield settle(answer)
                done += 1
        except BrokenProcessPool:
            pool.shutdown()  # by when it has ended the others, too
            raise _loss(children, tasks[done : done + 2 * workers]) from None


def _run_in_threads(
    job: Callable[[Any], _T], tasks: Sequence[Any], workers: int, cores: Collection[int]
) -> Generator[_T, None, None]:
    threads = ThreadPoolExecutor(workers, "fastdata-ingest", _use_cores, (cores,))
    try:
        yield from threads.map(job, tasks)
    finally:
        threads.shutdown(cancel_futures=True)


def _obstacle_to_forks() -> str:
    """Return why no processes can be forked that do the same as this one; empty if they can."""
    if not sys.platform.startswith("linux"):
        return _NOT_LINUX
    if multiprocessing.current_process().daemon:
        return _DAEMON
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as problem:
        return f"processes need room for their locks in /dev/shm ({problem})"
    return obstacle_to_forks()


_NOT_LINUX = "processes are forked only on Linux"
_DAEMON = "a daemon process may not start others"


def _say_slower(obstacle: str, *, is_thread_safe: bool) -> None:
    how = "by threads" if is_thread_safe else "one after the other in this process"
    text = f"samples are prepared {how}, which may be slower: {obstacle}"
    if obstacle in (_NOT_LINUX, _DAEMON):  # the user cannot change it
        log.info("%s", text)
    else:
        warn_user(text)


def _loss(children: Sequence[BaseProcess], tasks: Sequence[Any]) -> IngestError:
    """What is to be said of a worker that died, while about these were prepared."""
    ended = -signal.SIGTERM  # as the others are by the pool
    code = next((it.exitcode for it in children if it.exitcode not in (0, None, ended)), ended)
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    text = f"a worker process {how} while these were prepared: {'; '.join(map(str, tasks))}."
    if code == -signal.SIGKILL:
        text += (
            " Out of memory is the usual reason: use fewer prepare_workers= or a smaller resize=."
        )
    return IngestError(text)


@contextlib.contextmanager
def forked(
    job: Job, workers: int = 1, cores: Collection[int] = (), *, threads: int | None = None
) -> Iterator[tuple[ProcessPoolExecutor, Sequence[BaseProcess]]]:
    """Forked processes in which ``attempt_job`` runs the job, and which have so many threads each.

    They, and the processes that they start, are killed in the end.
    """
    creator = os.getpid()
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, _begin, (job, creator, cores, threads))
    children: list[BaseProcess] = []
    try:
        # Ctrl-C waits till then: Python drops exceptions in the hooks that run around a fork.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():  # of threads: a child runs only our loop
                warnings.simplefilter("ignore", DeprecationWarning)
                pool.submit(os.getpid)  # which forks all of them
        finally:
            children += pool._processes.values()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        yield pool, children
    finally:
        if os.getpid() == creator:
            for child in children:  # they hold nothing that needs an orderly end
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(cast(int, child.pid), signal.SIGKILL)
                child.kill()  # where it has not yet made a group
            with contextlib.suppress(RuntimeError):  # of a thread that could not be started
                pool.shutdown(cancel_futures=True)


_job: Job
"""Of a forked worker."""
_NUMPY_SEEDS = 1 << 32
_TORCH_SEEDS = 1 << 63


def _begin(job: Job, parent_pid: int, cores: Collection[int], threads: int | None) -> None:
    global _job
    try:
        take_own_positions()
        _job = job
    except OSError as problem:
        _job = functools.partial(_refuse, str(problem))
    os.setpgid(0, 0)  # so that what it starts is ended with it, all at once
    _use_cores(cores)
    multiprocessing.current_process().name = "fastdata-ingest"
    # Ctrl-C is the parent's, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what the parent left to its garbage collector is the parent's to finalise
    if threads:
        torch.set_num_threads(threads)  # this process only: a forked OpenMP pool would hang
    threading.Thread(target=_end_with_parent, args=(parent_pid,), daemon=True).start()


def _refuse(problem: str, _: Any) -> None:
    raise IngestError(
        "a worker process must open the files that are open in this process again, to read each "
        f"from a position of its own, but that fails: {problem}. Use prepare_workers=1, or a "
        "dataset that opens its files in __getitem__ and closes them again."
    )


def _use_cores(cores: Collection[int]) -> None:
    if cores:
        with contextlib.suppress(OSError):  # not permitted: those that there are
            os.sched_setaffinity(0, cores)  # of this thread


def _end_with_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def attempt_job(task: Any, seed: int | None = None) -> bytes:
    """Run the job of a forked worker; with a seed, it draws from generators that are seeded so.

    Workers inherit the state of the global generators. Without seeds, what one of them draws at
    random would be what each of the others draws. Torch seeds its workers alike.
    """
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % _NUMPY_SEEDS)
        torch.default_generator.manual_seed(seed % _TORCH_SEEDS)
    return attempt(_job, task)


def attempt(job: Job, task: Any) -> bytes:
    """What the job returns, or the error that it raises and its traceback, pickled for ``settle``.

    An error that cannot be pickled travels as text, and so does an exit.
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
    """Return or raise what was sent."""
    result, error, text = pickle.loads(answer)
    if error is not None:
        raise error from IngestError(text)
    return result
