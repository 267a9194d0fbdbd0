"""Ranks: which process of a distributed run this is, and how the ranks of one machine share what they prepare.

Who a rank is says ``torch.distributed`` where a process group is up, else the launcher by its
environment variables.

Ranks meet at a file in a folder of their user. Who locks it first is the leader: it prepares, on
all cores of the job, while the others wait, and map its memory through /proc/PID/fd then. The
kernel ends the locks of who dies, and nobody waits for a rank that does not come.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import re
import select
import signal
import stat
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from torch.utils.data import get_worker_info

from fastdata import errors
from fastdata.errors import FastDataError, IngestError, SampleError, StoreGoneError
from fastdata.machine.shared import Block
from fastdata.report import log, warn_user

if sys.platform != "win32":
    import fcntl

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, Lightning, Accelerate, DeepSpeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    (
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
    ),  # srun; a batch script is in no step
)
"""Variables of rank, number of ranks, and number of those on this machine."""


class Rank(NamedTuple):
    rank: int
    world_size: int


def find_rank(rank: int | None = None, world_size: int | None = None) -> Rank:
    """This process's rank, of ``torch.distributed`` or the launcher's; (0, 1) where there is neither.

    What is given is taken as it is.

    Raises:
        ValueError: there is no such rank.
    """
    found = _known_rank(os.environ) or Rank(0, 1)
    rank = found.rank if rank is None else rank
    world_size = found.world_size if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank={rank} is not one of the world_size={world_size} ranks, which count from 0"
        )
    return Rank(rank, world_size)


def _known_rank(environ: Mapping[str, str]) -> Rank | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
    for rank, world_size, _ in _LAUNCHERS:
        texts = environ.get(rank, ""), environ.get(world_size, "")
        if all(text.isdecimal() for text in texts):
            return Rank(int(texts[0]), int(texts[1]))
    return None


def local_ranks() -> int:
    """How many ranks of a distributed run share this machine, as the launcher says it; 1 where none says so."""
    name, text = next(
        ((name, os.environ[name]) for *_, name in _LAUNCHERS if name in os.environ), ("", "1")
    )
    ranks = re.match(r"\d+", text)  # Slurm's "4(x2)": four on each of two nodes
    if ranks is None or not int(ranks[0]):
        raise ValueError(f"{name}={text!r} is no number of ranks; unset it, or set it to 1 or more")
    return int(ranks[0])


# The run


class Run(NamedTuple):
    """What the ranks of one run on this machine have in common, and no other run has.

    Args:
        rank: of this process.
        world_size: number of ranks, on other machines too.
        name: of the run, and of the attempt where the launcher restarts it.
        is_subprocess: it may be a child of the first rank, which was no rank yet when it made its
            dataset (Lightning).
    """

    rank: int
    world_size: int
    name: str
    is_subprocess: bool = False


def find_run() -> Run | None:
    """The run that this process is a rank of; None where there are no others, or no way to meet them."""
    environ, is_subprocess = os.environ, False
    known = _known_rank(environ)
    if known is None and environ.keys() >= {
        "LOCAL_RANK",
        "WORLD_SIZE",
    }:  # Lightning's, who has no RANK
        known = Rank(int(environ["LOCAL_RANK"]), int(environ["WORLD_SIZE"]))
    if (
        not sys.platform.startswith("linux")
        or known is None
        or known.world_size == 1
        or get_worker_info() is not None
    ):
        return None
    parent = multiprocessing.parent_process()
    if (
        "TORCHELASTIC_ERROR_FILE" in environ
    ):  # .../attempt_0/RANK/error.json, in a folder of the launcher's own
        owner = os.path.dirname(os.path.dirname(environ["TORCHELASTIC_ERROR_FILE"]))
    elif "PMIX_NAMESPACE" in environ or "OMPI_MCA_ess_base_jobid" in environ:
        owner = environ.get("PMIX_NAMESPACE") or environ["OMPI_MCA_ess_base_jobid"]
    elif "SLURM_STEP_ID" in environ:
        owner = " ".join(
            environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")
        )
    elif parent is not None and parent.pid is not None:  # mp.spawn
        owner = _describe_process(parent.pid)
    elif "TORCHELASTIC_RUN_ID" in environ or "PMI_RANK" in environ:
        owner = _describe_process(os.getppid())
    elif "MASTER_PORT" in environ:
        owner, is_subprocess = "", known.rank > 0
    else:
        return None
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return Run(
        known.rank,
        known.world_size,
        "\n".join([owner, *(environ.get(name, "") for name in names)]),
        is_subprocess,
    )


def _describe_process(pid: int) -> str:
    """Its number and when it began, as far as that is to be seen: no other process of this machine has both."""
    with contextlib.suppress(OSError, IndexError):
        return f"{pid} {_stat(pid)[19]}"
    return str(pid)


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the name of the program (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


# What is told: values whose blocks are handles, and what both sides have by name


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=5)
        self._names = {id(value): name for name, value in known.items() if value is not None}

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def persistent_load(self, name: str) -> Any:
        return self._known[name]


class Notice:
    """What a process has prepared, for others to find under a key in its descriptors. Pickles as None."""

    def __init__(self, key: str, value: Any, known: Mapping[str, Any]) -> None:
        file = io.BytesIO()
        _Pickler(file, known).dump(value)
        data = np.frombuffer(file.getbuffer(), np.uint8)
        self._block = Block(
            os.memfd_create(_notice_name(key), os.MFD_CLOEXEC), len(data), None, owner=True
        )
        self._block.write(0, data)

    def close(self) -> None:
        self._block.close()

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


def read_notice(pid: int, key: str, known: Mapping[str, Any]) -> Any:
    """What a process of this user has prepared under a key; None where that is nothing, or is not to be seen."""
    link = f"/memfd:{_notice_name(key)} (deleted)"
    with contextlib.suppress(OSError):
        for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(OSError, StoreGoneError):  # closed meanwhile
                if os.readlink(entry) == link and entry.stat().st_uid == os.getuid():
                    return _Unpickler(entry.read_bytes(), known).load()
    return None


def _notice_name(key: str) -> str:
    return f"fastdata-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"


_SELF_LAUNCHED = ("lightning", "pytorch_lightning", "lightning_fabric")


def may_become_rank() -> bool:
    """Whether this may be the first rank of a run whose launcher, Lightning's, starts the others later."""
    is_main = multiprocessing.parent_process() is None and get_worker_info() is None
    return (
        is_main
        and hasattr(os, "memfd_create")
        and not sys.modules.keys().isdisjoint(_SELF_LAUNCHED)
    )


_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""linux/pidfd.h; since Linux 6.15 it tells how a process ended that is reaped already."""


def how_ended(pid: int, pidfd: int = -1) -> str:
    """``"was killed by SIGKILL"`` or the like, of a process that need not be this one's child."""
    status = None
    with contextlib.suppress(OSError, IndexError, ValueError):
        state, *_, last = _stat(pid)
        status = int(last) if state == "Z" else None
        if state not in "ZX":
            return "has left"
    if status is None and pidfd >= 0:
        info = bytearray(struct.pack("<Q56x", _PIDFD_INFO_EXIT))
        with contextlib.suppress(OSError):
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
            found, status_then = struct.unpack("<Q52xi", info)
            status = status_then if found & _PIDFD_INFO_EXIT else None
    if status is None:
        return "has ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def signal_name(number: int) -> str:
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


# The meeting: a file of this user, whose locks end with who holds them

# Bytes of the file that the leader locks: for as long as it shares, and until it tells.
_IS_LED, _IS_PREPARING = (
    0,
    1,
)
_RETRY_S = 0.01
_END_S = 1.0


class Follower(NamedTuple):
    """What the leader, ``"rank 0 (process 123)"``, has prepared."""

    value: Any
    leader: str


class Leader:
    """The rank that prepares for all of a machine. Pickles as None."""

    def __init__(self, fd: int, path: Path, key: str, run: Run) -> None:
        self._key = key
        self._notice: Notice | None = None
        self._file = {"rank": run.rank, "pid": os.getpid()}
        self._fd = fd
        self._end = weakref.finalize(self, _leave, fd, path, os.getpid())
        _LED.add(path)
        self._write({})

    def tell(self, value: Any, known: Mapping[str, Any]) -> None:
        """Let the others have it, and those to come, until ``close``."""
        self._notice = Notice(self._key, value, known)
        self._write({"is_ready": True})
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _IS_PREPARING)

    def refuse(self, error: BaseException) -> None:
        """Tell the others why nothing was prepared, and close."""
        where = {"index": error.index, "path": error.path} if isinstance(error, SampleError) else {}
        self._write({"error": type(error).__name__, "text": str(error), "where": where})
        self.close()

    def _write(self, said: Mapping[str, Any]) -> None:
        os.pwrite(self._fd, json.dumps({**self._file, **said}).encode() + b"\n", 0)

    def close(self) -> None:
        """Let nobody attach any more. Idempotent; nothing in a forked process."""
        self._end()
        if self._notice is not None:
            self._notice.close()

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


_LED: set[Path] = set()
"""By this process, whose locks would end with any descriptor of their file that it closes."""


def _leave(fd: int, path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
        _LED.discard(path)
    os.close(fd)  # which ends the locks


def lead_or_follow(run: Run, key: str, known: Mapping[str, Any]) -> Leader | Follower | None:
    """Be the first of the ranks that make the same dataset, or wait for what that has prepared.

    They meet at a file whose name follows from the machine since it was started, the user, what
    processes are seen, the run, and the key. What is ``known`` to all of them is told by its name.
    None where that cannot be.

    Raises:
        IngestError: the leader has ended.
        Exception: what it has raised itself.
    """
    try:
        path = _meeting_folder() / _place_of(run, key)
        while True:
            met = _met(path, run, key, known)
            if met is not None:
                return met
            time.sleep(_RETRY_S)
    except OSError as obstacle:  # a sandbox without /proc or locks, or a folder of somebody else's
        if isinstance(obstacle, FastDataError):
            raise
        warn_user(
            f"the ranks of this machine cannot meet ({obstacle}), so that each prepares and holds samples of its own. "
            "cache_dir= holds one copy on disk; share='off' is without this warning."
        )
        return None


def _met(path: Path, run: Run, key: str, known: Mapping[str, Any]) -> Leader | Follower | None:
    """None where who leads has left, or has only begun."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if _is_locked(fd, _IS_LED):
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, _IS_PREPARING)
            if (
                not path.exists() or os.stat(path).st_ino != os.fstat(fd).st_ino
            ):  # its leader left meanwhile
                return None
            os.ftruncate(fd, 0)
            leader, fd = Leader(fd, path, key, run), -1
            _sweep(path.parent)
            return leader
        return _follow(fd, run, key, known)
    finally:
        if fd >= 0:
            os.close(fd)


def _follow(fd: int, run: Run, key: str, known: Mapping[str, Any]) -> Follower | None:
    said = _said(fd)
    if said is None:
        return None
    name, pidfd = f"rank {said['rank']} (process {said['pid']})", -1
    with contextlib.suppress(OSError, AttributeError):  # it has ended, or Python knows none
        pidfd = os.pidfd_open(said["pid"])
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH, 1, _IS_PREPARING)  # waits
        said = _said(fd) or said
        if "error" in said:
            raise _error_of(said) from IngestError(f"in {name}")
        if "is_ready" not in said:
            with contextlib.suppress(OSError, ValueError):
                select.select([pidfd], [], [], _END_S)
            how = how_ended(said["pid"], pidfd)
            raise IngestError(
                f"{name} {how} while it prepared samples for all ranks of this machine"
            )
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    found = read_notice(said["pid"], key, known)
    if found is None:
        return None
    log.info("rank %d (process %d) shares what %s prepares", run.rank, os.getpid(), name)
    return Follower(found, name)


def _said(fd: int) -> dict[str, Any] | None:
    line, is_whole, _ = os.pread(fd, 1 << 20, 0).partition(b"\n")
    said: dict[str, Any] | None = json.loads(line) if is_whole else None
    return said


def _error_of(said: Mapping[str, Any]) -> Exception:
    kind, text = getattr(errors, said["error"], None), said["text"]
    if kind is SampleError:
        return SampleError(text, **said["where"])
    return kind(text) if kind is not None else IngestError(f"{said['error']}: {text}")


def _is_locked(fd: int, byte: int) -> bool:
    """Lock a byte, if nobody has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _meeting_folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"fastdata-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not this user's alone")
    return folder


def _sweep(folder: Path) -> None:
    """Remove what killed leaders left."""
    for path in set(folder.iterdir()) - _LED:
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            if _is_locked(file.fileno(), _IS_LED):
                path.unlink()


def _place_of(run: Run, key: str) -> str:
    boot, namespace = (
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        os.stat("/proc/self/ns/pid").st_ino,
    )
    text = "\n".join([boot, str(namespace), run.name, key])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def cores_of_job() -> set[int]:
    """The cores that all ranks of this run may use together: those of the process that started them, too."""
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        cores |= os.sched_getaffinity(os.getppid())
    return cores
