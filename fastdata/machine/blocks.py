"""Blocks of memory that processes share, and locks on their bytes.

On Linux a block is a ``memfd``: it has no name, so the kernel frees it with its last user whatever
happens (kill -9 included), and the size of ``/dev/shm`` does not matter. If that is refused, it is
a temporary file that has lost its name; without ``/proc`` it is a named one, removed by its creator
or, if that dies first, by the next process that creates a block.

A forked process inherits a block. Pickling one (spawn, forkserver, other ranks of the machine)
sends a handle of about a hundred bytes; unpickling opens the creator's descriptor and copies
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastdata.errors import MemoryBudgetError, StoreGoneError
from fastdata.machine import limits
from fastdata.machine.units import format_bytes

if sys.platform != "win32":
    import fcntl

_ALIGN_BYTES = 64
_CHECKED_BYTES = 1 << 20
"""Smaller reservations are not compared with the free memory: that takes longer than to reserve."""
_FILE_PREFIX = "fastdata-block-"
_THREADS = threading.RLock()
_READ_ONLY = {"access": mmap.ACCESS_READ}
if sys.platform != "win32":
    # A private mapping: kernels before 6.7 refuse shared ones of a write-sealed memfd, even
    # read-only ones.
    _READ_ONLY = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ}

OPEN_FLAGS = getattr(os, "O_BINARY", 0)

_Field = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and first byte of an array."""


class Block:
    """A range of memory shared between processes.

    Lifecycle: ``create``, write by ``write`` or through ``array()``, ``seal``, read through
    ``array()``. Once it is sealed, no process can write to the memory. Arrays that were returned
    before must be gone by then.

    Arrays keep the memory alive by themselves. ``close`` gives back the descriptor and this
    object's mapping.

    Args:
        fd: descriptor of the memory, which the block owns from now on.
        path: of the file, if it has a name.
        is_sealed: True if the memory is read-only.
        is_owner: True if the file is removed with the block.
    """

    def __init__(
        self, fd: int, path: Path | None, *, is_sealed: bool = False, is_owner: bool = False
    ) -> None:
        self.path = path
        self.fd = fd
        self.size_bytes = self.reserved_bytes()
        self.is_sealed = is_sealed
        self._map: mmap.mmap | None = None
        self._close = weakref.finalize(self, _release, fd, path if is_owner else None, os.getpid())
        # At exit only a file needs to be removed. The user's own exit handlers run later, and may
        # still read from a memfd, which the kernel frees.
        self._close.atexit = path is not None

    @classmethod
    def create(cls, size_bytes: int, *, portable: bool = False) -> Block:
        """Reserve memory, which reads as zeros: without a name unless ``portable``."""
        block = cls(*(_open_temporary() if portable else _open_memory()), is_owner=True)
        try:
            block.resize(size_bytes, at_once=True)
        except BaseException:
            block.close()
            raise
        return block

    def resize(self, size_bytes: int, *, at_once: bool = False) -> None:
        """Reserve ``size_bytes`` in total, or change nothing; arrays keep their range.

        With ``at_once`` the kernel sets the memory aside now, so that want of memory is an error
        here instead of a bus error later. Otherwise it does so as ``write`` needs it, and no writer
        waits for all of it.
        """
        more_bytes = size_bytes - self.reserved_bytes()
        self._check_free(more_bytes)
        try:
            if at_once and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size_bytes)
            else:
                os.ftruncate(self.fd, size_bytes)
        except OSError as problem:
            raise self._explained(problem, more_bytes) from None
        self.size_bytes = size_bytes
        # The next ``array`` maps all of it. Arrays over the old mapping show the same pages.
        self._map = None

    def reserved_bytes(self) -> int:
        """Return the current size: other processes may have changed it."""
        return os.fstat(self.fd).st_size

    # The next two are of memory; ``DiskFile`` has others, of a disk.

    def _check_free(self, size_bytes: int) -> None:
        """Refuse to reserve more than the machine has.

        A memfd has no limit of its own: asked for more than there is, the kernel would fill the
        machine and then kill.
        """
        if size_bytes < _CHECKED_BYTES:
            return
        available = limits.available_bytes()
        if size_bytes > available.bytes:
            free = format_bytes(available.bytes)
            raise _refusal(size_bytes, f": {free} is free ({available.limited_by})")

    def _explained(self, problem: OSError, size_bytes: int) -> Exception:
        """Return a MemoryBudgetError if the system lacks room for the bytes, or ``problem``."""
        if problem.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            return problem
        return _refusal(size_bytes, f" ({problem.strerror})")

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy a C-contiguous array to byte ``offset``.

        Writing by descriptor avoids the page faults of a new mapping, and also works after another
        process has grown the block.

        Raises:
            MemoryBudgetError: the machine has no memory left for it.
        """
        rest = memoryview(data.reshape(-1).view(np.uint8).data)
        if not hasattr(os, "pwrite"):
            self.array("uint8", (rest.nbytes,), offset)[:] = rest
            return
        try:
            while rest.nbytes:
                written = os.pwrite(self.fd, rest, offset)
                rest = rest[written:]
                offset += written
        except OSError as problem:
            raise self._explained(problem, rest.nbytes) from None

    def array(self, dtype: str, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """View memory from byte ``offset`` on, without a copy; read-only if the block is sealed."""
        if self._map is None:
            if not self._close.alive:
                raise StoreGoneError("the dataset was closed; create it again to read from it")
            how = _READ_ONLY if self.is_sealed else {"access": mmap.ACCESS_WRITE}
            try:
                self._map = mmap.mmap(self.fd, self.size_bytes, **how)
            except OSError as problem:  # a limit of address space
                raise self._explained(problem, self.size_bytes) from None
        return np.frombuffer(self._map, dtype, math.prod(shape), offset).reshape(shape)

    def seal(self) -> None:
        """Make the block read-only for everybody; on Linux the kernel enforces it."""
        self._map = None
        self.is_sealed = True
        if self.path is None and sys.platform != "win32":
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            # The kernel refuses while any process maps it for writing. Then only our own views are
            # read-only.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    @contextlib.contextmanager
    def hold(self, *places: int) -> Iterator[None]:
        """Wait for the locks of these bytes, and hold them; not twice in one thread.

        One thread of one process holds a byte at a time. The bytes are only names: none is written.
        The kernel drops the lock of a process that dies. If it has no such locks (macOS, gVisor),
        the whole block is locked; on Windows only the threads of this process lock each other out.
        """
        if sys.platform == "win32":
            with _THREADS:
                yield
            return
        # A lock belongs to an open file description. A new one is opened for each ``hold``, which
        # therefore excludes other threads and forked processes too, and is not dropped when a copy
        # of the block is closed. (POSIX locks belong to the process and would do neither.)
        fd = os.open(self.path or f"/proc/self/fd/{self.fd}", os.O_RDWR | OPEN_FLAGS)
        try:
            try:
                # All processes lock in one order: two could otherwise wait for each other.
                for place in sorted(places):
                    _change_lock(fd, fcntl.F_WRLCK, place, 1)
            except (AttributeError, OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            # Closing is not enough: a process that was forked meanwhile shares the description.
            fcntl.flock(fd, fcntl.LOCK_UN)
            with contextlib.suppress(AttributeError, OSError):
                _change_lock(fd, fcntl.F_UNLCK, 0, 0)
            os.close(fd)

    def close(self) -> None:
        """Release the descriptor and the mapping. Idempotent; arrays stay valid."""
        self._map = None
        self._close()

    def __reduce__(self) -> Any:
        if not self._close.alive:
            raise StoreGoneError(
                "the dataset was closed; a closed dataset cannot be sent to another process"
            )
        inode = os.fstat(self.fd).st_ino
        found = os.getpid(), self.fd, inode, self.size_bytes, self.is_sealed
        return self.attach, (self.path, *found)

    @classmethod
    def attach(
        cls, path: Path | None, pid: int, fd: int, inode: int, size_bytes: int, is_sealed: bool
    ) -> Block:
        """Open another process's block: ``/proc/PID/fd/FD``, or ``path`` if it has a name.

        A process number may have been given to another process since. So a descriptor is refused
        if it leads to another inode, or to fewer bytes.
        """
        flags = (os.O_RDONLY if is_sealed else os.O_RDWR) | OPEN_FLAGS
        try:
            fd = os.open(path or f"/proc/{pid}/fd/{fd}", flags)
        except OSError as error:
            raise StoreGoneError(_why_gone(pid, error)) from None
        block = cls(fd, path, is_sealed=is_sealed)
        if os.fstat(fd).st_ino != inode or block.size_bytes < size_bytes:
            block.close()
            raise StoreGoneError(_why_gone(pid))
        return block


def _why_gone(pid: int, error: OSError | None = None) -> str:
    """Return the message for a block of process ``pid`` that cannot be opened."""
    if not is_running(pid):
        why = f"process {pid}, which held the prepared samples, has ended"
    elif error is None or isinstance(error, FileNotFoundError):
        why = (
            f"process {pid} has closed the dataset, or the process that held the prepared samples "
            "has ended and its number was given to another"
        )
    else:
        why = (
            f"the prepared samples of process {pid} cannot be reached from this process "
            f"({error.strerror})"
        )
    return (
        f"{why}. A pickled dataset is a handle: it opens only on the same machine, and only while "
        "the dataset that it was made from is open. Keep that open, or keep the samples on disk by "
        "cache_dir=."
    )


def _open_memory() -> tuple[int, Path | None]:
    """Open a memfd, or a file that loses its name at once.

    Without ``/proc`` other processes could open neither: then the file keeps its name.
    """
    if not os.path.exists("/proc/self/fd"):
        return _open_temporary()
    try:
        return os.memfd_create("fastdata", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), None
    except (AttributeError, OSError):  # a container's seccomp profile, vm.memfd_noexec=2
        with tempfile.TemporaryFile(buffering=0) as file:
            return os.dup(file.fileno()), None


def _open_temporary() -> tuple[int, Path]:
    """Create the temporary file of a block, and remove those of processes that have ended."""
    folder = Path(tempfile.gettempdir())
    for stale in folder.glob(f"{_FILE_PREFIX}*"):
        pid = stale.name.removeprefix(_FILE_PREFIX).partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)):
            with contextlib.suppress(OSError):
                stale.unlink()
    fd, path = tempfile.mkstemp(prefix=f"{_FILE_PREFIX}{os.getpid()}-")
    return fd, Path(path)


def _refusal(size_bytes: int, why: str) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"{format_bytes(size_bytes)} of shared memory cannot be reserved{why}. "
        "Use storage='none', a smaller resize=, or free some memory."
    )


def _release(fd: int, path: Path | None, creator_pid: int) -> None:
    # A forked process inherits the finaliser. It closes its descriptor, but the file is its
    # parent's to remove.
    with contextlib.suppress(OSError):
        os.close(fd)
        if path is not None and os.getpid() == creator_pid:
            path.unlink()


def _change_lock(fd: int, kind: int, start: int, size: int) -> None:
    """Lock bytes for an open file description once they are free, or unlock them; see fcntl(2)."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, size, 0))


class ArrayBlock(dict[str, np.ndarray]):
    """Named arrays in one block; pickles as a handle."""

    def __init__(self, block: Block, layout: list[_Field]) -> None:
        super().__init__()
        self.block = block
        self._layout = layout
        data = block.array("uint8", (block.size_bytes,)).data
        for name, dtype, shape, start in layout:
            self[name] = np.ndarray(shape, dtype, data, start)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], *, seal: bool = True) -> ArrayBlock:
        """Copy arrays to a new block."""
        layout = []
        end = 0
        for name, array in arrays.items():
            layout.append((name, array.dtype.str, array.shape, end))
            end += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        block = Block.create(max(end, 1))
        for name, _, _, start in layout:
            block.write(start, np.ascontiguousarray(arrays[name]))
        if seal:
            block.seal()
        return cls(block, layout)

    def __reduce__(self) -> Any:
        return ArrayBlock, (self.block, self._layout)

    def close(self) -> None:
        """Release the block. Idempotent; arrays stay valid."""
        self.clear()
        self.block.close()


def is_running(pid: int) -> bool:
    """Return True if a process of this number exists, of any user."""
    if os.name != "posix":
        import psutil

        return psutil.pid_exists(pid)
    # Nothing is imported: a process that was forked while another thread imported has half of that
    # module.
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
