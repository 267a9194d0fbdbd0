"""Ranks of a distributed run: the rank of this process, and sharing of samples on one machine.

The rank comes from ``torch.distributed`` if a process group exists, else from the launcher's
environment variables.

Ranks meet at a file in a folder of their user. The first to lock the file is the leader. It
prepares the samples on all cores of the job, writes handles of its memory into the file, and
unlocks it. The others wait for the lock, read the handles and attach through /proc/PID/fd. If the
leader dies, the kernel releases its lock and its handles can no longer be opened: then the next
rank becomes the leader.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import multiprocessing
import os
import pickle
import re
import stat
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed
from torch.utils.data import get_worker_info

from fastdata.errors import StoreGoneError
from fastdata.machine.blocks import is_running
from fastdata.report import warn_user

if sys.platform != "win32":
    import fcntl

_LAUNCHERS = (
    # torchrun, Lightning, Accelerate, DeepSpeed
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    # Open MPI
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # MPICH, Intel MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # srun; a batch script, which is not a rank, has no variables of a step
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Environment variables with the rank, the number of ranks, and that of ranks on this machine."""

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
"""Environment variables that are equal on all ranks of a run, and differ between runs and restarts.
"""

_SELF_LAUNCHED = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Packages by which a process may start the other ranks as its children."""


class Rank(NamedTuple):
    """The number of this process among the ``world_size`` processes of its run, from 0 on."""

    rank: int
    world_size: int


def find_rank(rank: int | None = None, world_size: int | None = None) -> Rank:
    """Return the rank of this process: the given one, torch.distributed's, or the launcher's.

    Without any of these it is rank 0 of 1.

    Raises:
        ValueError: the rank is not below the world size.
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
    """Return the number of ranks on this machine, from the launcher; 1 without one."""
    for *_, name in _LAUNCHERS:
        found = re.match(r"0*[1-9]\d*", os.environ.get(name, ""))  # Slurm's "4(x2)": on two nodes
        if found is not None:
            return int(found[0])
    return 1


def find_run() -> str | None:
    """Return a name that only the ranks of this run share; None if this process shares nothing."""
    rank = _known_rank()
    # Lightning starts its ranks without the variable RANK.
    is_lightning = {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
    is_alone = not is_lightning if rank is None else rank.world_size == 1
    if is_alone or get_worker_info() is not None or not sys.platform.startswith("linux"):
        return None
    values = [os.environ.get(name, "") for name in _RUN_VARIABLES]
    return "\n".join(values) if any(values) else _process_name(os.getppid())


def future_run() -> str | None:
    """Return a name for a run in which this process may become rank 0; None if it cannot.

    Under Lightning a process makes the datasets first, and then starts the other ranks as its
    children. They find this name by the process number of their parent.
    """
    is_worker = multiprocessing.parent_process() is not None or get_worker_info() is not None
    if is_worker or sys.modules.keys().isdisjoint(_SELF_LAUNCHED):
        return None
    return _process_name(os.getpid()) if hasattr(os, "memfd_create") else None


def _process_name(pid: int) -> str:
    return f"process {pid}"


def cores_of_job() -> set[int]:
    """Return the cores that all ranks of this run may use together.

    A launcher may bind each rank to a few cores. Together the ranks may use those of their parent.
    """
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores


class Follower(NamedTuple):
    """A rank that attaches to the samples that the leader has prepared."""

    value: Any
    leader: str  # such as "rank 0 (process 123)"


class Leader:
    """The rank that prepares for all ranks of a machine. Pickles as None.

    It holds the lock of the file until it publishes. From then on the file holds handles of its
    memory, which others may read until ``close``.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._end = weakref.finalize(self, _end_meeting, fd, path, os.getpid())

    def publish(self, value: Any, known: Sequence[Any]) -> None:
        """Give a value to all ranks that wait, and to those that come before ``close``.

        Args:
            value: the prepared samples.
            known: objects that every rank has, such as the user's dataset. Instead of such an
                object, only its place in this sequence is pickled.
        """
        places = {id(each): place for place, each in enumerate(known) if each is not None}
        data = io.BytesIO()
        pickler = pickle.Pickler(data, protocol=5)
        pickler.persistent_id = lambda each: places.get(id(each))  # type: ignore[method-assign]
        pickler.dump(value)
        # Everything is written before the lock is released, because the next rank to get the lock
        # reads the file at once.
        with open(self._fd, "wb", closefd=False) as file:
            file.write(f"{os.getpid()} {find_rank().rank}\n".encode())
            file.write(data.getbuffer())
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let no further rank attach. Idempotent; does nothing in a forked process."""
        self._end()

    def __reduce__(self) -> Any:
        return type(None), ()


def _end_meeting(fd: int, path: Path, pid: int) -> None:
    if os.getpid() == pid:
        # The name is removed first: a rank that gets the lock next sees that the file has no name,
        # and opens another.
        path.unlink(missing_ok=True)
        # Closing alone would not unlock: a forked process may share the open file.
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lead_or_follow(run: str, key: str, known: Sequence[Any]) -> Leader | Follower | None:
    """Become the leader of the ranks that make the same dataset, or wait for the leader's samples.

    Args:
        run: name of the run.
        key: key of the dataset.
        known: objects that every rank has, as for ``Leader.publish``.

    Returns:
        None, with a warning, if the ranks of this machine cannot meet.
    """
    try:
        folder = _meeting_folder()
        # Rank 0 of Lightning has prepared as the future run of its own process number.
        parent = folder / _meeting_name(_process_name(os.getppid()), key)
        found = _read_handles(parent, known) if parent.exists() else None
        return found or _meet(folder / _meeting_name(run, key), known)
    except OSError as obstacle:  # no /proc, no locks, or a folder that others can write to
        warn_user(
            f"the ranks of this machine cannot share samples ({obstacle}): each prepares and holds "
            "its own copy. Use cache_dir= to share one copy on disk."
        )
        return None


def _meet(path: Path, known: Sequence[Any]) -> Leader | Follower:
    while True:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits while another rank prepares
            # The leader may have removed the file between our open and our lock. Then the lock is
            # on a file that no other rank can find.
            if not os.fstat(file.fileno()).st_nlink:
                continue
            found = _read_handles(path, known)
            if found is not None:
                return found
            # The file is empty, or holds the handles of a leader that has ended.
            file.truncate(0)
            _sweep(path)
            # The lock belongs to the open file, which the second descriptor keeps open: leaving
            # this block does not unlock it.
            return Leader(os.dup(file.fileno()), path)


def _read_handles(path: Path, known: Sequence[Any]) -> Follower | None:
    """Return what a leader has published; None if there is nothing yet, or the leader has ended."""
    # Unpickling is safe: the folder belongs to this user, and no other user can write to it.
    with path.open("rb") as file:
        leader = file.readline().split()
        unpickler = pickle.Unpickler(file)
        unpickler.persistent_load = known.__getitem__  # type: ignore[method-assign]
        try:
            value = unpickler.load()
        except (EOFError, pickle.UnpicklingError, StoreGoneError):
            return None
    pid, rank = map(int, leader)
    return Follower(value, f"rank {rank} (process {pid})")


def _meeting_folder() -> Path:
    """Return the folder for the files of ranks, which only this user may read or write.

    Raises:
        PermissionError: another user may read or write it.
    """
    folder = Path(tempfile.gettempdir(), f"fastdata-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} must be a folder that only this user may read and write: remove it"
        )
    return folder


def _meeting_name(run: str, key: str) -> str:
    """Return the name of a file for the ranks of a run that make the same dataset.

    It also depends on the last start of the machine and on the process namespace, because a process
    number means another process after a restart and in another namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    text = f"{boot}\n{os.stat('/proc/self/ns/pid').st_ino}\n{run}\n{key}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sweep(own: Path) -> None:
    """Remove the files of leaders that were killed."""
    for path in own.parent.iterdir():
        with contextlib.suppress(OSError), path.open("rb") as file:
            # Raises an error while the leader of the file prepares, so that the file stays.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid = file.readline().partition(b" ")[0]
            if path != own and not (pid and is_running(int(pid))):
                path.unlink()
