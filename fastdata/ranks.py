"""Ranks: which process of a distributed run this is, and how the ranks of one machine share what they prepare.

Who a rank is says ``torch.distributed`` where a process group is up, else the launcher by its environment variables.

Ranks meet at the name of an abstract Unix socket. Who comes first is the host: it prepares, hands the others' workers
their part of the samples, and sends everybody the descriptors of the memory that these lie in. There is nothing in the
file system, and nobody waits for a rank that does not come.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import re
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from torch.utils.data import get_worker_info

from fastdata.errors import IngestError, StoreGoneError
from fastdata.report import log, warn_user
from fastdata.shared import Block

if sys.platform != "win32":
    import fcntl

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),  # torchrun, Lightning, Accelerate, DeepSpeed
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),  # srun; a batch script is in no step
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
        raise ValueError(f"rank={rank} is not one of the world_size={world_size} ranks, which count from 0")
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
    name, text = next(((name, os.environ[name]) for *_, name in _LAUNCHERS if name in os.environ), ("", "1"))
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
        is_subprocess: it may be a child of the first rank, which was no rank yet when it made its dataset (Lightning).
    """

    rank: int
    world_size: int
    name: str
    is_subprocess: bool = False


def find_run() -> Run | None:
    """The run that this process is a rank of; None where there are no others, or no way to meet them."""
    environ, is_subprocess = os.environ, False
    known = _known_rank(environ)
    if known is None and environ.keys() >= {"LOCAL_RANK", "WORLD_SIZE"}:  # Lightning's, who has no RANK
        known = Rank(int(environ["LOCAL_RANK"]), int(environ["WORLD_SIZE"]))
    if not sys.platform.startswith("linux") or known is None or known.world_size == 1 or get_worker_info() is not None:
        return None
    parent = multiprocessing.parent_process()
    if "TORCHELASTIC_ERROR_FILE" in environ:  # .../attempt_0/RANK/error.json, in a folder of the launcher's own
        owner = os.path.dirname(os.path.dirname(environ["TORCHELASTIC_ERROR_FILE"]))
    elif "PMIX_NAMESPACE" in environ or "OMPI_MCA_ess_base_jobid" in environ:
        owner = environ.get("PMIX_NAMESPACE") or environ["OMPI_MCA_ess_base_jobid"]
    elif "SLURM_STEP_ID" in environ:
        owner = " ".join(environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
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
        known.rank, known.world_size, "\n".join([owner, *(environ.get(name, "") for name in names)]), is_subprocess
    )


def _describe_process(pid: int) -> str:
    """Its number and when it began, as far as that is to be seen: no other process of this machine has both."""
    with contextlib.suppress(OSError, IndexError):
        return f"{pid} {_stat(pid)[19]}"
    return str(pid)


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` behind the name of the program (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


# What is sent: objects whose blocks travel as descriptors, and what both sides have by name

_FDS_AT_ONCE = 64  # the kernel takes 253
_HEAD = struct.Struct("!QI")


class _Pickler(pickle.Pickler):
    """Pickles blocks as the numbers of descriptors, where there are to be any, and what is known by its name."""

    def __init__(self, file: io.BytesIO, known: Mapping[str, Any], *, sends_descriptors: bool) -> None:
        super().__init__(file, protocol=5)
        self._names = {id(value): name for name, value in known.items() if value is not None}
        self._sends_descriptors = sends_descriptors
        self.blocks: list[Block] = []

    def persistent_id(self, value: Any) -> Any:
        if id(value) in self._names:
            return self._names[id(value)]
        if not isinstance(value, Block) or not self._sends_descriptors:
            return None
        if not any(value is block for block in self.blocks):
            self.blocks.append(value)
        number = next(number for number, block in enumerate(self.blocks) if block is value)
        return number, value.size_bytes, value.is_sealed, os.fstat(value.fileno()).st_ino


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, known: Mapping[str, Any], fds: list[int]) -> None:
        super().__init__(io.BytesIO(data))
        self._known, self._fds = known, fds
        self._blocks: dict[int, Block] = {}

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, str):
            return self._known[name]
        number, size_bytes, is_sealed, inode = name
        if os.fstat(self._fds[number]).st_ino != inode:
            raise StoreGoneError("the rank that prepared the samples has closed its dataset meanwhile")
        if number not in self._blocks:
            self._blocks[number] = Block(self._fds[number], size_bytes, None, sealed=is_sealed, owner=False)
        return self._blocks[number]


def _pickled(value: Any, known: Mapping[str, Any], *, sends_descriptors: bool = True) -> tuple[bytes, list[Block]]:
    file = io.BytesIO()
    pickler = _Pickler(file, known, sends_descriptors=sends_descriptors)
    pickler.dump(value)
    return file.getvalue(), pickler.blocks


class _Line:
    """Messages over a Unix socket: bytes, and descriptors beside them (SCM_RIGHTS)."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.pid, self.uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.pidfd = -1
        with contextlib.suppress(OSError, AttributeError):  # it has ended, is not to be seen, or Python knows none
            self.pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        self._socket.sendall(_HEAD.pack(len(data), len(fds)) + data)
        for start in range(0, len(fds), _FDS_AT_ONCE):
            socket.send_fds(self._socket, [b"."], fds[start : start + _FDS_AT_ONCE])

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message; the descriptors are the caller's. EOFError: the other side has ended or left."""
        size, count = _HEAD.unpack(self._read(_HEAD.size))
        data = self._read(size)
        fds: list[int] = []
        try:
            while len(fds) < count:
                wanted = min(count - len(fds), _FDS_AT_ONCE)
                byte, some, _, _ = socket.recv_fds(self._socket, 1, wanted, socket.MSG_CMSG_CLOEXEC)
                fds += some
                if not byte:
                    raise EOFError
                if len(some) < wanted:
                    raise OSError(errno.EMFILE, "too many open files for those that hold the samples; raise ulimit -n")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return data, fds

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            parts.append(self._socket.recv(min(size, 1 << 20)))
            size -= len(parts[-1])
            if not parts[-1]:
                raise EOFError
        return b"".join(parts)

    def ended(self) -> str:
        """How the process of the other side ended, after the end of the line was seen."""
        with contextlib.suppress(OSError, ValueError):
            select.select([self.pidfd], [], [], _END_S)
        return how_ended(self.pid, self.pidfd)

    def close(self) -> None:
        self._socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


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


# The meeting

_MEET_S = 10.0
_RETRY_S = 0.01
_END_S = 1.0
_GREETING_S = 10.0


def meet(run: Run, key: str, known: Mapping[str, Any]) -> Host | Guest | None:
    """Meet the ranks that make the same dataset: the first to come hosts the others. None where that cannot be.

    The place is the name of an abstract Unix socket, which one process holds at a time, and the kernel frees when that
    ends. It follows from the machine since it was started, the user, what processes are seen, the run, and the key.
    What is ``known`` to all of them is sent by its name.
    """
    with contextlib.suppress(OSError):  # a sandbox without /proc, or such sockets
        found = _meet_at(_place_of(run, key), run, known)
        if found is not None:
            return found
    warn_user(
        "the ranks of this machine cannot meet, so that each prepares and holds samples of its own. cache_dir= holds "
        "one copy on disk; share='off' is without this warning."
    )
    return None


def _meet_at(name: str, run: Run, known: Mapping[str, Any]) -> Host | Guest | None:
    deadline = time.monotonic() + _MEET_S
    while time.monotonic() < deadline:
        with contextlib.ExitStack() as cleanup:
            door = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                door.bind(name)
                door.listen(socket.SOMAXCONN)
                cleanup.pop_all()
                return Host(door, run, known)
            except OSError as taken:
                if taken.errno != errno.EADDRINUSE:
                    raise
            try:
                door.connect(name)
            except ConnectionRefusedError:  # it does not listen yet, or no more
                time.sleep(_RETRY_S)
                continue
            cleanup.pop_all()
        line = _Line(door)
        if line.uid == os.getuid():
            return Guest(line, run, known)
        line.close()
        break
    return None


def _place_of(run: Run, key: str) -> str:
    boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/pid").st_ino
    text = "\n".join([boot, str(os.getuid()), str(namespace), run.name, key])
    return f"\0fastdata-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


class Lent(NamedTuple):
    """A worker process of another rank."""

    connection: Connection
    pid: int
    rank: int
    is_extra: bool
    """It has cores that the host has not."""


class Host:
    """The first rank of a meeting: it prepares, with the workers that the others lend, and tells them what came of it.

    Once all is prepared a thread answers those who come later, until ``close``. Pickles as None.
    """

    def __init__(self, door: socket.socket, run: Run, known: Mapping[str, Any]) -> None:
        self._door, self._run, self._known = door, run, known
        self._guests: dict[_Line, int] = {}
        self._told: tuple[bytes, list[Block]] = b"", []  # nothing yet
        self._round = 0  # of what was told
        self._thread: threading.Thread | None = None
        self._end = weakref.finalize(self, _shut, door, os.getpid())
        _close_doors_in_children()
        _HOSTS.add(self)

    def tell(self, kind: str, value: Any) -> None:
        """Tell all guests, and those to come."""
        self._round += 1
        self._told = _pickled((kind, self._run.rank, self._round, value), self._known)
        for guest in self._guests:
            self._tell(guest)

    def _tell(self, guest: _Line) -> None:
        data, blocks = self._told
        with contextlib.suppress(OSError):  # it has ended, which is noticed where it is waited for
            if data:
                guest.send(data, [block.fileno() for block in blocks])

    def refuse(self, error: BaseException) -> None:
        """Tell all guests why nothing was prepared, and close."""
        sent: BaseException = IngestError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # what cannot be pickled, or made again, is sent as text
            sent = pickle.loads(pickle.dumps(error)) if isinstance(error, Exception) else sent
        with contextlib.suppress(OSError, IngestError):  # guests whom nobody had time for
            while select.select([self._door], [], [], 0)[0]:
                self.answer(self._door)
        self.tell("failed", sent)
        self.close()

    # While samples are prepared

    def to_watch(self) -> list[Any]:
        """What ``multiprocessing.connection.wait`` is to wait for."""
        return [self._door, *self._guests, *(guest.pidfd for guest in self._guests if guest.pidfd >= 0)]

    def answer(self, ready: Any) -> list[Lent]:
        """See who came, or what a guest has sent; return the workers that it lends.

        Raises:
            IngestError: it has ended.
        """
        if ready is self._door:
            guest = None
            with contextlib.suppress(OSError):
                guest = _let_in(self._door)
            if guest is not None:
                self._guests[guest[0]] = guest[1]
                self._tell(guest[0])
                _say_shared(guest[1], guest[0].pid, self._run.rank)
            return []
        line = next((guest for guest in self._guests if ready in (guest, guest.pidfd)), None)
        if line is None:
            return []
        try:
            if ready == line.pidfd:
                raise EOFError
            data, fds = line.receive()
        except (EOFError, ConnectionError):
            who = f"rank {self._guests[line]} (process {line.pid}) {line.ended()}"
            raise IngestError(f"{who} while the ranks of this machine prepared samples together") from None
        sent = json.loads(data)
        if sent["round"] != self._round:  # it was told something else meanwhile
            for fd in fds:
                os.close(fd)
            return []
        is_extra = os.sched_getaffinity(0).isdisjoint(sent["cores"])
        each = zip(fds, sent["pids"], strict=True)
        return [Lent(Connection(fd), pid, self._guests[line], is_extra) for fd, pid in each]

    # Afterwards

    def serve(self) -> None:
        """Let guests go, and answer those who come later."""
        self._leave_guests()
        arguments = self._door, self._told, self._run
        self._thread = threading.Thread(target=_serve, args=arguments, name="fastdata-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more. Idempotent; nothing in a forked process."""
        self._end()
        self._leave_guests()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _leave_guests(self) -> None:
        while self._guests:
            self._guests.popitem()[0].close()

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


_HOSTS: weakref.WeakSet[Host] = weakref.WeakSet()


@cache
def _close_doors_in_children() -> None:
    """See to it that a forked process does not hold a place that its parent has left, or died at."""

    def forget() -> None:
        for host in _HOSTS:
            host._end()
            host._leave_guests()
            host._thread = None

    os.register_at_fork(after_in_child=forget)


def _shut(door: socket.socket, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)  # wakes the thread that answers
    door.close()


def _let_in(door: socket.socket) -> tuple[_Line, int] | None:
    """A guest and its rank; None for one of another user, or that has left already."""
    connection, _ = door.accept()
    connection.settimeout(_GREETING_S)
    line = _Line(connection)
    try:
        if line.uid == os.getuid():
            return line, json.loads(line.receive()[0])["rank"]
    except (EOFError, OSError, ValueError, KeyError):
        pass
    line.close()
    return None


def _serve(door: socket.socket, told: tuple[bytes, list[Block]], run: Run) -> None:
    data, blocks = told
    with door:  # whatever ends this thread, who comes then must not wait
        while True:
            try:
                guest = _let_in(door)
            except OSError:
                return
            if guest is None:
                continue
            line, rank = guest
            with contextlib.closing(line), contextlib.suppress(OSError):
                line.send(data, [block.fileno() for block in blocks])
                _say_shared(rank, line.pid, run.rank)


def _say_shared(rank: int, pid: int, host: int) -> None:
    log.info("rank %d (process %d) shares what rank %d prepares", rank, pid, host)


class Guest:
    """A rank that came to a host."""

    def __init__(self, line: _Line, run: Run, known: Mapping[str, Any]) -> None:
        self._line, self.host, self._known = line, "", known
        with contextlib.suppress(OSError):  # noticed by ``receive``
            line.send(json.dumps({"rank": run.rank}).encode())

    def receive(self) -> tuple[str, Any]:
        """Wait for what the host tells; ``"left"`` if it has left, or ended, before it told anything.

        Raises:
            IngestError: it has ended.
            Exception: what it has raised itself.
        """
        try:
            data, fds = self._line.receive()
        except (EOFError, ConnectionError):
            if not self.host:
                return "left", None
            who = f"{self.host} {self._line.ended()}"
            raise IngestError(f"{who} while it prepared samples for all ranks of this machine") from None
        kind, rank, self._round, value = _Unpickler(data, self._known, fds).load()
        self.host = f"rank {rank} (process {self._line.pid})"
        if kind == "failed":
            raise value from IngestError(f"in {self.host}")
        return kind, value

    def lend(self, workers: Sequence[tuple[int, int]]) -> None:
        """Let the host use workers: the descriptor of each one's connection, and its process."""
        cores, pids = sorted(os.sched_getaffinity(0)), [pid for _, pid in workers]
        text = json.dumps({"pids": pids, "cores": cores, "round": self._round})
        with contextlib.suppress(OSError):  # noticed by ``receive``
            self._line.send(text.encode(), [fd for fd, _ in workers])

    def close(self) -> None:
        self._line.close()


# The second way, of a process whose launcher starts the other ranks when it has made its dataset: /proc/PID/fd


class Notice:
    """What a process has prepared, for its children to find under a key. Pickles as None."""

    def __init__(self, key: str, value: Any, known: Mapping[str, Any]) -> None:
        data, _ = _pickled(value, known, sends_descriptors=False)
        self._block = Block(os.memfd_create(_notice_name(key), os.MFD_CLOEXEC), len(data), None, owner=True)
        self._block.write(0, np.frombuffer(data, np.uint8))

    def close(self) -> None:
        self._block.close()

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


def may_become_rank() -> bool:
    """Whether this may be the first rank of a run whose launcher, Lightning's, starts the others later."""
    is_main = multiprocessing.parent_process() is None and get_worker_info() is None
    return is_main and hasattr(os, "memfd_create") and not sys.modules.keys().isdisjoint(_SELF_LAUNCHED)


def read_notice(key: str, known: Mapping[str, Any]) -> Any:
    """What the parent process has prepared under a key; None where that is nothing, or is not to be seen."""
    folder, link = Path(f"/proc/{os.getppid()}/fd"), f"/memfd:{_notice_name(key)} (deleted)"
    with contextlib.suppress(OSError):
        for entry in list(folder.iterdir()):
            with contextlib.suppress(OSError, StoreGoneError):  # closed meanwhile
                if os.readlink(entry) == link and entry.stat().st_uid == os.getuid():
                    return _Unpickler(entry.read_bytes(), known, []).load()
    return None


_SELF_LAUNCHED = ("lightning", "pytorch_lightning", "lightning_fabric")


def _notice_name(key: str) -> str:
    return f"fastdata-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}"
