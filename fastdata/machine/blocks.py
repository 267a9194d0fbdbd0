"""Blocks of memory that processes share, and locks on their bytes.

On Linux a block is a ``memfd``. It has no name, so the kernel frees it when the last process that
uses it ends, even after ``kill -9``. The size of ``/dev/shm`` does not limit it. If the system
refuses a ``memfd``, the block is a temporary file whose name is removed at once. Without ``/proc``
other processes could not open such a file, so it keeps its name. Its creator removes it or, if the
creator dies first, the next process that creates a block does.

A forked process inherits a block. A pickled block (spawn, forkserver, other ranks of the machine)
is a handle of about a hundred bytes; unpickling opens the creator's descriptor and copies nothing.
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
"""Smaller reservations are not compared with the free memory, because the comparison takes longer
than the reservation."""
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
    ``array()``. After ``seal`` no process can write to the memory. Arrays that were returned
    earlier must be gone by then.

    An array keeps the memory alive, even after ``close``, which releases the descriptor and this
    object's reference to the mapping.

    Args:
        fd: descriptor of the memory, which the block owns from now on.
        path: path of the file; None if the memory has no name.
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
        # At exit only a file with a name needs to be removed. The kernel frees a memfd, and the
        # user's exit handlers, which run later, may still read from it.
        self._close.atexit = path is not None

    @classmethod
    def create(cls, size_bytes: int, *, portable: bool = False) -> Block:
        """Reserve ``size_bytes`` of zeros, in a file with a name if ``portable``.

        Raises:
            MemoryBudgetError: the machine has less free memory.
        """
        block = cls(*(_open_temporary() if portable else _open_memory()), is_owner=True)
        try:
            block.resize(size_bytes, at_once=True)
        except BaseException:
            block.close()
            raise
        return block

    def resize(self, size_bytes: int, *, at_once: bool = False) -> None:
        """Change the size to ``size_bytes``, or change nothing; arrays keep their range.

        With ``at_once`` the kernel sets the memory aside now, so that a lack of memory is an error
        here instead of a bus error later. Otherwise the kernel sets pages aside as ``write`` fills
        them, so that no writer waits for all of them.

        Raises:
            MemoryBudgetError: the machine has less free memory.
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
        """Return the current size in bytes, which other processes may have changed."""
        return os.fstat(self.fd).st_size

    # The next two methods are about memory. ``DiskFile`` overrides them with those about a disk.

    def _check_free(self, size_bytes: int) -> None:
        """Raise a MemoryBudgetError if the machine has less than ``size_bytes`` of free memory.

        A memfd has no limit of its own. Without this check the kernel would first fill the memory
        of the machine, and then kill processes.
        """
        if size_bytes < _CHECKED_BYTES:
            return
        available = limits.available_bytes()
        if size_bytes > available.bytes:
            free = format_bytes(available.bytes)
            raise _refusal(size_bytes, f": {free} is free ({available.limited_by})")

    def _explained(self, problem: OSError, size_bytes: int) -> Exception:
        """Return a MemoryBudgetError if the system lacks room for the bytes, else ``problem``."""
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
        """Make the block read-only for all processes; on Linux the kernel enforces it."""
        self._map = None
        self.is_sealed = True
        if self.path is None and sys.platform != "win32":
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            # The kernel refuses to seal while any process maps the memory for writing. In that case
            # only the arrays of this object are read-only.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    @contextlib.contextmanager
    def hold(self, *offsets: int) -> Iterator[None]:
        """Wait for the locks of the bytes at these offsets, and hold them.

        At any time only one thread of one process holds the lock of a byte. A thread that already
        holds one of them would wait forever. The bytes only name the locks: they are neither read
        nor written, and may be beyond the end. The kernel releases the locks of a process that
        dies. Without such locks (macOS, gVisor) the whole block is locked. On Windows only the
        threads of this process exclude each other.
        """
        if sys.platform == "win32":
            with _THREADS:
                yield
            return
        # These locks belong to an open file description. Each ``hold`` opens a new one, so that it
        # also excludes other threads and forked processes. Closing a copy of the block does not
        # release the locks. (POSIX locks belong to the process: they would not exclude threads, and
        # any close of the file would release them.)
        fd = os.open(self.path or f"/proc/self/fd/{self.fd}", os.O_RDWR | OPEN_FLAGS)
        try:
            try:
                # All processes lock in the same order. Otherwise two could wait for each other.
                for offset in sorted(offsets):
                    _change_lock(fd, fcntl.F_WRLCK, offset, 1)
            except (AttributeError, OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            # Closing alone would not unlock: a process that was forked in the meantime shares the
            # description, and with it the lock.
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
        handle = (self.path, os.getpid(), self.fd, inode, self.size_bytes, self.is_sealed)
        return self.attach, handle

    @classmethod
    def attach(
        cls, path: Path | None, pid: int, fd: int, inode: int, size_bytes: int, is_sealed: bool
    ) -> Block:
        """Open another process's block: ``/proc/PID/fd/FD``, or ``path`` if it has a name.

        By now the process number may belong to another process. So a descriptor is refused if it
        leads to another inode, or to fewer bytes.

        Raises:
            StoreGoneError: the block cannot be opened.
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
            "has ended and its number now belongs to another process"
        )
    else:
        why = (
            f"the prepared samples of process {pid} cannot be reached from this process "
            f"({error.strerror})"
        )
    return (
        f"{why}. A pickled dataset is a handle: it opens only on the same machine, and only while "
        "the dataset that it was made from is open. Keep that dataset open, or keep the samples on "
        "disk with cache_dir=."
    )


def _open_memory() -> tuple[int, Path | None]:
    """Open a memfd, or a temporary file without a name if the system refuses a memfd.

    Without ``/proc`` other processes could open neither. Then the temporary file has a name.
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
    # A forked process inherits the finaliser. It closes its own descriptor, but only the creator
    # may remove the file.
    with contextlib.suppress(OSError):
        os.close(fd)
        if path is not None and os.getpid() == creator_pid:
            path.unlink()


def _change_lock(fd: int, kind: int, start: int, size: int) -> None:
    """Wait until bytes are free, and lock them for an open file description; or unlock them."""
    # A `struct flock` of 64-bit Linux: type, whence, start, length, process (0 for such locks).
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, size, 0))


class ArrayBlock(dict[str, np.ndarray]):
    """Named arrays in one block. Pickles as a handle, without the arrays."""

    def __init__(self, block: Block, layout: list[_Field]) -> None:
        super().__init__()
        self.block = block
        self._layout = layout
        data = block.array("uint8", (block.size_bytes,)).data
        for name, dtype, shape, start in layout:
            self[name] = np.ndarray(shape, dtype, data, start)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], *, seal: bool = True) -> ArrayBlock:
        """Copy arrays to a new block, which is read-only if ``seal``."""
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
    """Return True if there is a process with this number, of any user."""
    if os.name != "posix":
        import psutil

        return psutil.pid_exists(pid)
    # Nothing is imported here. If this process was forked while another thread imported a module,
    # it has only half of that module.
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
