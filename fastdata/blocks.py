"""Shared-memory blocks: memory that processes share and nothing leaves behind.

On Linux a block is a ``memfd``: it has no name, so the kernel frees it with its last user whatever happens (kill -9
included), and the size of ``/dev/shm`` does not matter. Elsewhere it is a memory-mapped temporary file, removed by its
creator and, should that die first, swept by the next process that creates a block.

A forked process inherits a block. Pickling one (spawn, forkserver, other ranks of the machine) sends a handle of about
a hundred bytes; unpickling opens the creator's descriptor and copies nothing.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastdata import machine
from fastdata.errors import MemoryBudgetError, StoreGoneError

__all__ = ["ArrayBlock", "Block", "BlockHandle"]

_ALIGN_BYTES = 64
_FILE_PREFIX = "fastdata-block-"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class BlockHandle:
    """Where another process finds a block: ``/proc/PID/fd/FD``, or the file ``path`` where there is no memfd.

    ``inode`` guards against a recycled process number: a descriptor that leads to another file is refused.
    """

    pid: int
    fd: int
    inode: int
    size_bytes: int
    sealed: bool
    path: str | None


class Block:
    """A range of memory shared between processes.

    Lifecycle: ``create`` -> ``write`` or write through ``array()`` -> ``seal`` -> read through ``array()``. Once sealed
    the memory cannot be written by anybody; arrays handed out before sealing must be gone by then.

    Arrays keep the memory alive by themselves; ``close`` gives back the descriptor and this object's mapping.
    """

    def __init__(self, handle: BlockHandle, fd: int, *, owner: bool) -> None:
        """Use ``Block.create``, or unpickle a block."""
        self._fd = fd
        self._inode = handle.inode
        self._size_bytes = handle.size_bytes
        self._sealed = handle.sealed
        self._path = handle.path
        self._map: mmap.mmap | None = None
        self._close = weakref.finalize(self, _release, fd, handle.path if owner else None, os.getpid())

    @classmethod
    def create(cls, size_bytes: int, *, portable: bool = not hasattr(os, "memfd_create")) -> Block:
        """Reserve ``size_bytes`` of shared memory, which read as zeros.

        Args:
            size_bytes: at least 1.
            portable: use a temporary file in place of a memfd; the default where there is no memfd.

        Raises:
            MemoryBudgetError: the memory cannot be reserved; nothing stays allocated.
        """
        if size_bytes < 1:
            raise ValueError(f"a block needs at least 1 byte, got {size_bytes}")
        fd, path = _open_file() if portable else (_open_memfd(), None)
        try:
            _reserve(fd, 0, size_bytes)
        except BaseException:
            _release(fd, path, os.getpid())
            raise
        handle = BlockHandle(os.getpid(), fd, os.fstat(fd).st_ino, size_bytes, sealed=False, path=path)
        return cls(handle, fd, owner=True)

    @property
    def size_bytes(self) -> int:
        """Bytes reserved."""
        return self._size_bytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` has run."""
        return not self._close.alive

    def grow(self, size_bytes: int) -> None:
        """Reserve more, up to ``size_bytes`` in total; arrays handed out before keep their old range.

        Raises:
            MemoryBudgetError: the memory cannot be reserved; the block keeps its old size.
        """
        if size_bytes > self._size_bytes:
            _reserve(self._fd, self._size_bytes, size_bytes - self._size_bytes)
            self._size_bytes, self._map = size_bytes, None

    def trim(self, size_bytes: int) -> None:
        """Give back what lies beyond ``size_bytes``, in this process and every later one."""
        if size_bytes < self._size_bytes:
            self._map = None
            os.ftruncate(self._fd, max(size_bytes, 1))
            self._size_bytes = max(size_bytes, 1)

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy a C-contiguous array to byte ``offset``, without mapping the pages it lands in.

        Writing by descriptor spares the page faults of a fresh mapping and works for ranges that another process has
        reserved meanwhile.
        """
        rest = memoryview(data.reshape(-1).view(np.uint8).data)
        if hasattr(os, "pwrite"):
            while rest.nbytes:
                written = os.pwrite(self._fd, rest, offset)
                rest, offset = rest[written:], offset + written
        else:
            self.array("uint8", (rest.nbytes,), offset)[:] = rest

    def array(self, dtype: str, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """View ``shape`` elements of ``dtype`` from byte ``offset`` on: no copy; read-only once the block is sealed."""
        count = math.prod(shape)
        if offset < 0 or offset + count * np.dtype(dtype).itemsize > self._size_bytes:
            raise ValueError(f"{dtype}{list(shape)} at byte {offset} exceeds the block of {self._size_bytes} bytes")
        return np.frombuffer(self._mapping(), dtype, count, offset).reshape(shape)

    def seal(self) -> None:
        """Make the block read-only for everybody; on Linux the kernel enforces it."""
        if self._sealed:
            return
        self._map = None
        self._sealed = True
        if self._path is None:
            import fcntl

            with contextlib.suppress(OSError):  # somebody still maps it for writing: then only our views are read-only
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)

    def fileno(self) -> int:
        """The descriptor, while the block is open."""
        return self._fd

    def close(self) -> None:
        """Give back the descriptor and the mapping; arrays handed out stay valid. Idempotent."""
        self._map = None
        self._close()

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        if self.closed:
            raise StoreGoneError("the dataset was closed; a closed dataset cannot be sent to another process")
        handle = BlockHandle(os.getpid(), self._fd, self._inode, self._size_bytes, self._sealed, self._path)
        return _attach, (handle,)

    def _mapping(self) -> mmap.mmap:
        if self.closed:
            raise StoreGoneError("the dataset was closed; create it again to read from it")
        if self._map is None:
            if self._sealed and sys.platform != "win32":
                # A private mapping: kernels before 6.7 refuse shared ones of a write-sealed memfd, even read-only ones.
                self._map = mmap.mmap(self._fd, self._size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
            else:
                access = mmap.ACCESS_READ if self._sealed else mmap.ACCESS_WRITE
                self._map = mmap.mmap(self._fd, self._size_bytes, access=access)
        return self._map


class ArrayBlock(Mapping[str, np.ndarray]):
    """Named arrays packed into one block; a mapping that pickles as a handle.

    Args:
        arrays: copied into the block.
        seal: whether they are read-only from then on, for everybody.

    Example:
        >>> with ArrayBlock({"targets": np.arange(3)}) as arrays:
        ...     arrays["targets"].tolist()
        [0, 1, 2]
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], *, seal: bool = True) -> None:
        layout: dict[str, tuple[str, tuple[int, ...], int]] = {}
        end = 0
        for name, array in arrays.items():
            layout[name] = (array.dtype.str, array.shape, end)
            end += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._layout = layout
        self.block = Block.create(max(end, 1))
        for name, (dtype, shape, offset) in layout.items():
            self.block.array(dtype, shape, offset)[...] = arrays[name]
        if seal:
            self.block.seal()

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape, offset = self._layout[name]
        return self.block.array(dtype, shape, offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)

    @property
    def size_bytes(self) -> int:
        """Bytes reserved."""
        return self.block.size_bytes

    def close(self) -> None:
        """Give back the block; arrays handed out stay valid. Idempotent."""
        self.block.close()

    def __enter__(self) -> ArrayBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _attach(handle: BlockHandle) -> Block:
    """Open the block behind a handle."""
    path = handle.path or f"/proc/{handle.pid}/fd/{handle.fd}"
    flags = (os.O_RDONLY if handle.sealed else os.O_RDWR) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise StoreGoneError(
            f"process {handle.pid}, which holds the prepared samples, cannot be reached ({error.strerror}). A pickled "
            f"dataset is a handle: it works only on the same machine while that process lives."
        ) from None
    found = os.fstat(fd)
    if found.st_ino != handle.inode or found.st_size < handle.size_bytes:
        os.close(fd)
        raise StoreGoneError(
            f"process {handle.pid}, which held the prepared samples, has ended and its number was given to another."
        )
    return Block(handle, fd, owner=False)


def _open_memfd() -> int:
    return os.memfd_create("fastdata", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _open_file() -> tuple[int, str]:
    """Create the temporary file of a portable block, after sweeping those of processes that are gone."""
    folder = Path(tempfile.gettempdir())
    for stale in folder.glob(f"{_FILE_PREFIX}*"):
        pid = stale.name.removeprefix(_FILE_PREFIX).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            with contextlib.suppress(OSError):
                stale.unlink()
    path = folder / f"{_FILE_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o600), str(path)


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # a file in use cannot be removed there: trying is the test
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _reserve(fd: int, offset: int, size_bytes: int) -> None:
    """Make the kernel set the memory aside now, so that running out is an error here and no bus error later.

    A memfd has no limit of its own: asked for more than there is, the kernel would fill the machine and then kill.
    """
    available = machine.available_bytes()
    if size_bytes > available.bytes:
        raise MemoryBudgetError(
            f"{size_bytes / _GIB:.2f} GiB of shared memory cannot be reserved: {available.bytes / _GIB:.2f} GiB is "
            f"free ({available.limited_by}). Use storage='none', a smaller resize=, or free some memory."
        )
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, offset, size_bytes)
        else:
            os.ftruncate(fd, offset + size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        os.ftruncate(fd, offset)
        raise MemoryBudgetError(
            f"{size_bytes / _GIB:.2f} GiB of shared memory cannot be reserved ({error.strerror}). "
            f"Use storage='none', a smaller resize=, or free some memory."
        ) from None


def _release(fd: int, path: str | None, creator_pid: int) -> None:
    """Close the descriptor; the creator also removes the file of a portable block."""
    with contextlib.suppress(OSError):
        os.close(fd)
    if path is not None and os.getpid() == creator_pid:
        with contextlib.suppress(OSError):
            os.unlink(path)
