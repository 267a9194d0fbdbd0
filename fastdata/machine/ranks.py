"""Ranks of a distributed run: which one this process is, and how those of a machine share samples.

``torch.distributed`` tells the rank if a process group is up, else the launcher's environment
variables do.

Ranks meet at a file in a folder of their user. The first to lock it is the leader: it prepares, on
all cores of the job, writes handles of its memory into the file, and unlocks it. The others wait
for the lock, read the handles and attach through /proc/PID/fd. The kernel drops the lock of a
process that dies, and handles of a dead leader lead nowhere: then the next one leads.
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
    """The number of this process among all of its run, from 0 on."""

    rank: int
    world_size: int


def find_rank(rank: int | None = None, world_size: int | None = None) -> Rank:
    """Return the rank of this process: as given, from ``torch.distributed`` or the launcher.

    Without any of these it is 0 of 1.

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
    """Return a name that only the ranks of this run share; None if there are no other ranks."""
    rank = _known_rank()
    # Lightning starts its ranks without the variable RANK.
    is_lightnings = {"LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
    is_alone = not is_lightnings if rank is None else rank.world_size == 1
    if is_alone or get_worker_info() is not None or not sys.platform.startswith("linux"):
        return None
    values = [os.environ.get(name, "") for name in _RUN_VARIABLES]
    return "\n".join(values) if any(values) else _process_name(os.getppid())


def future_run() -> str | None:
    """Return a name for a run of which this process may become rank 0; None if that cannot be.

    Lightning makes the datasets first, and then starts the other ranks as its children. They find
    this name by the number of their parent.
    """
    is_worker = multiprocessing.parent_process() is not None or get_worker_info() is not None
    if is_worker or sys.modules.keys().isdisjoint(_SELF_LAUNCHED):
        return None
    return _process_name(os.getpid()) if hasattr(os, "memfd_create") else None


def _process_name(pid: int) -> str:
    return f"process {pid}"


def cores_of_job() -> set[int]:
    """Return the cores that all ranks of this run may use together.

    A launcher may bind each rank to a few cores. Together they may use those of their parent.
    """
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores


class Follower(NamedTuple):
    """A rank that attaches to what the leader has prepared."""

    value: Any
    leader: str  # such as "rank 0 (process 123)"


class Leader:
    """The rank that prepares for all ranks of a machine. Pickles as None.

    It holds the lock of the file until it publishes. From then on the file has handles of its
    memory, which others read until ``close``.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._end = weakref.finalize(self, _end_meeting, fd, path, os.getpid())

    def publish(self, value: Any, known: Sequence[Any]) -> None:
        """Give a value to all ranks that wait, and to those that come before ``close``.

        Args:
            value: what was prepared.
            known: objects that each rank has itself, such as the user's dataset. Only their places
                in this sequence are pickled.
        """
        places = {id(each): place for place, each in enumerate(known) if each is not None}
        data = io.BytesIO()
        pickler = pickle.Pickler(data, protocol=5)
        pickler.persistent_id = lambda each: places.get(id(each))  # type: ignore[method-assign]
        pickler.dump(value)
        # All of it is written before the lock is free: the next rank reads what is there.
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
        # The name first: a rank that gets the lock next finds the file nameless, and meets again.
        path.unlink(missing_ok=True)
        # Closing would not unlock: a forked process may share the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lead_or_follow(run: str, key: str, known: Sequence[Any]) -> Leader | Follower | None:
    """Become the leader of the ranks that make the same dataset, or wait for what it prepares.

    Args:
        run: name of the run.
        key: of the dataset.
        known: as for ``Leader.publish``.

    Returns:
        None, with a warning, if ranks cannot meet here.
    """
    try:
        folder = _meeting_folder()
        # Rank 0 of Lightning has prepared as the future run of its own process number.
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
            # The leader may have removed the file between our open and our lock. Then the lock is
            # on a file that no other rank can find.
            if not os.fstat(file.fileno()).st_nlink:
                continue
            found = _read_handles(path, known)
            if found is not None:
                return found
            # What is in the file are handles of a leader that has ended.
            file.truncate(0)
            _sweep(path)
            # A second descriptor of the same description, which the lock belongs to: closing this
            # file does not unlock it.
            return Leader(os.dup(file.fileno()), path)


def _read_handles(path: Path, known: Sequence[Any]) -> Follower | None:
    """Return what a leader has published, unless it did not yet, or has ended."""
    # Unpickled: the folder belongs to this user, and no other user can write to it.
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
    """Return the folder for files of ranks, which no other user may read or write.

    Raises:
        PermissionError: another user may.
    """
    folder = Path(tempfile.gettempdir(), f"fastdata-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _meeting_name(run: str, key: str) -> str:
    """Return the name of a file for the ranks of a run that make the same dataset.

    It also depends on when the machine was started, and on the process namespace: process numbers
    are valid only there.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    text = f"{boot}\n{os.stat('/proc/self/ns/pid').st_ino}\n{run}\n{key}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sweep(own: Path) -> None:
    """Remove the files of leaders that were killed."""
    for path in own.parent.iterdir():
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pid = file.readline().partition(b" ")[0]
            if path != own and not (pid and is_running(int(pid))):
                path.unlink()
