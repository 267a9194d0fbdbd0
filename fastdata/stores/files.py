"""What stores lie in: a block of shared memory, or a file on disk with the same face.

A file on disk is made under a name that nobody has opened before, written, sealed, and never
changed again; who opens it maps it read-only, so that the page cache holds one copy for all
processes and for the next run.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastdata.errors import CacheError, StoreGoneError
from fastdata.machine.memory import format_bytes
from fastdata.machine.shared import OPEN_FLAGS, Block
from fastdata.sources.remote import refuse_special

Bytes = npt.NDArray[np.uint8]

_PENDING_BYTES = 4 << 20
"""Of neighbouring samples that are written at once."""
_FAULT_BYTES = 64 << 10
"""The kernel maps about so much around a page that is touched."""
_TOUCHED_BYTES = 512
_HUGE_BYTES = 2 << 20
_MOST_AREAS = 8192
"""Of the 65,530 that a process may have; what is brought beyond them maps more memory than it
needs."""


class DiskFile(Block):
    """A block on disk: ``reserve``, ``write``, ``seal``, ``array``; or ``open``, ``array``.

    Arrays keep the mapping alive by themselves, also when the file is deleted. Pickles as its name:
    another process opens it again, and refuses another one that has taken its place. A disk that is
    full is a CacheError.
    """

    def __init__(self, path: Path, flags: int) -> None:
        fd = os.open(path, flags | OPEN_FLAGS, 0o666)
        super().__init__(fd, os.fstat(fd).st_size, None, sealed=flags == os.O_RDONLY, owner=False)
        self.path = path
        self._pending = _Pending()
        self._areas: dict[
            int, _Areas
        ] = {}  # by process: a forked one must not wait for a thread of its parent

    @classmethod
    def reserve(cls, path: Path, size_bytes: int) -> DiskFile:
        """Reserve a new file, so that a full disk is found before anything is prepared."""
        if size_bytes > free_bytes(path.parent):
            raise _full(path.parent, f"it takes {format_bytes(size_bytes)}")
        file = cls(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            file.grow(size_bytes)
        except BaseException:
            file.close()
            raise
        return file

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> DiskFile:
        """Raises CacheError where it is missing or has another size."""
        try:
            refuse_special(path)
            file = cls(path, os.O_RDONLY)
        except OSError as problem:
            many = (
                "; raise the limit of open files (ulimit -n)"
                if problem.errno == errno.EMFILE
                else ""
            )
            raise CacheError(
                f"{path} cannot be opened ({problem.strerror or problem}){many}"
            ) from problem
        if file.size_bytes != size_bytes:
            file.close()
            raise CacheError(
                f"{path} has {file.size_bytes:,} bytes where {size_bytes:,} were written"
            )
        return file

    # Writing

    def grow(self, size_bytes: int) -> None:
        """Reserve more, up to ``size_bytes`` in total."""
        if size_bytes > self.size_bytes:
            with naming_full_disk(self.path.parent):
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._fd, 0, size_bytes)
                else:
                    os.ftruncate(self._fd, size_bytes)
            self.size_bytes = size_bytes
            self._map = None

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy a C-contiguous array to byte ``offset``, at the latest on this thread's ``flush``.

        Neighbours are written at once: the system then caches and maps them in larger pieces.
        """
        pending = self._pending
        if offset != pending.first + len(pending.data) or len(pending.data) > _PENDING_BYTES:
            self.flush()
            pending.first = offset
        pending.data += data.reshape(-1).view(np.uint8).data

    def flush(self) -> None:
        pending = self._pending
        with naming_full_disk(self.path.parent):
            super().write(pending.first, np.frombuffer(pending.data, np.uint8))
        pending.first += len(pending.data)
        pending.data = bytearray()

    def seal(self) -> None:
        """See to it that all of it is on the disk."""
        self._map = None
        self.is_sealed = True
        with naming_full_disk(self.path.parent):
            os.fsync(self._fd)

    # Reading

    def _open_map(self) -> mmap.mmap:
        access = mmap.ACCESS_READ if self.is_sealed else mmap.ACCESS_WRITE
        return mmap.mmap(self._fd, self.size_bytes, access=access)

    def bring(self, start: int, size: int) -> None:
        """Have bytes in memory until ``drop``, so that nobody who reads them waits for the disk.

        Reading them then maps their pages and no others. The kernel maps what it has around a page
        that is touched, up to 2 MiB, but not across the border of an area with other flags: so they
        are made such an area. Its flags let the disk read ahead, and the page cache keep the file
        in huge pages, which are mapped at no cost.
        """
        mapped, (first, stop) = self._map, _pages(start, size)
        if mapped is None or not size:
            return
        areas = self._areas.setdefault(os.getpid(), _Areas())
        with areas.lock:
            if not areas.is_begun:
                areas.is_begun = True
                _advise(mapped, *_pages(0, len(mapped)), "MADV_NOHUGEPAGE")
            if len(areas.borders) < 2 * _MOST_AREAS:
                _advise(mapped, first, stop, "MADV_SEQUENTIAL", "MADV_HUGEPAGE")
            areas.borders.update({first, stop - 1})
        _touch(np.frombuffer(mapped, np.uint8)[first * mmap.PAGESIZE : start + size])

    def drop(self, start: int, size: int, *, from_cache: bool) -> None:
        """Let go of memory that was brought; nothing is lost, reading it again takes longer.

        ``from_cache``: let go of the system's page cache too; pages that any process has mapped
        stay.
        """
        mapped, (first, stop) = self._map, _pages(start, size)
        if mapped is None or not size:
            return
        areas = self._areas.setdefault(os.getpid(), _Areas())
        with areas.lock:
            for border in {first, stop - 1}:
                areas.borders[border] -= 1
                if areas.borders[border] <= 0:
                    del areas.borders[border]
            first += first in areas.borders
            stop -= stop - 1 in areas.borders
            # unmapped last, when nobody can map again
            _advise(mapped, first, stop, "MADV_NOHUGEPAGE", "MADV_NORMAL", "MADV_DONTNEED")
        if from_cache and hasattr(os, "posix_fadvise"):
            # A huge page goes as a whole or not at all.
            first_byte = start // _HUGE_BYTES * _HUGE_BYTES
            stop_byte = -(-(start + size) // _HUGE_BYTES) * _HUGE_BYTES
            os.posix_fadvise(self._fd, first_byte, stop_byte - first_byte, os.POSIX_FADV_DONTNEED)

    def release(self) -> None:
        if self._map is not None:
            _advise(self._map, *_pages(0, len(self._map)), "MADV_DONTNEED")

    def __reduce__(self) -> tuple[object, ...]:
        return _open_again, (self.path, self.size_bytes, self._inode())


def _open_again(path: Path, size_bytes: int, inode: int) -> DiskFile:
    try:
        file = DiskFile.open(path, size_bytes)
    except CacheError as gone:
        raise StoreGoneError(
            f"the cache was deleted or changed while it was in use: {gone}"
        ) from gone
    if os.fstat(file._fd).st_ino != inode:
        file.close()
        raise StoreGoneError(f"{path} was replaced while it was in use; make the dataset again")
    return file


class _Pending(threading.local):
    """Neighbouring bytes that a thread has yet to write."""

    def __init__(self) -> None:
        self.first = 0
        self.data = bytearray()


class _Areas:
    """The pages that brought pieces begin or end in, how often: two may share one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_begun = False
        self.borders: Counter[int] = Counter()


def _touch(data: Bytes) -> None:
    """Read a little of every so many bytes, without the GIL: NumPy keeps it for 500 elements."""
    whole = data.size // _FAULT_BYTES * _FAULT_BYTES
    data[:whole].reshape(-1, _FAULT_BYTES)[:, :_TOUCHED_BYTES].max(initial=0)
    data[whole:][:_TOUCHED_BYTES].max(initial=0)
    data[-_TOUCHED_BYTES:].max(initial=0)


def _pages(start: int, size: int) -> tuple[int, int]:
    return start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE)


def _advise(mapped: mmap.mmap, first: int, stop: int, *advice: str) -> None:
    """Give the kernel advice on pages, where it takes any."""
    for name in advice:
        if stop > first and hasattr(mmap, name):
            with contextlib.suppress(OSError):
                mapped.madvise(
                    getattr(mmap, name), first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE
                )


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder, which need not be there yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk into a CacheError that says what is free, and the cure."""
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise CacheError(
                f"a file of the cache in {folder.parent} would be larger than this process may "
                "write. Raise the limit (ulimit -f), or give codec='zstd' or a smaller resize=."
            ) from problem
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full(folder, f"it ran out of room ({problem.strerror})") from problem


def _full(folder: Path, what: str) -> CacheError:
    return CacheError(
        f"the disk of {folder.parent} is too full for the cache: {what}, "
        f"{format_bytes(free_bytes(folder))} are free. Free some space, or give another "
        "cache_dir=, a smaller resize=, or codec='zstd', which about halves raw samples."
    )
