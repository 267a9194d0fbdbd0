"""Files on disk that processes share: reserved, written, sealed, mapped, and loaded before reads.

A file gets a name that no process has opened before. It is written, sealed, and never changed
again. Every process maps it read-only, so that the page cache holds one copy for all of them, and
for the next run.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fastdata.errors import CacheError, MemoryBudgetError, StoreGoneError
from fastdata.machine.blocks import OPEN_FLAGS, Block
from fastdata.machine.units import format_bytes
from fastdata.paths import open_file

_FAULT_BYTES = 64 << 10
"""Bytes that the kernel maps at once when one of their pages is touched."""
_TOUCHED_BYTES = 512
_HUGE_BYTES = 2 << 20
_MOST_AREAS = 8192
"""Areas of a file that get their own flags, of the 65,530 areas that a process may have. Pieces
that are loaded beyond them map more memory than they need."""


class DiskFile(Block):
    """A block on disk: ``reserve``, ``write``, ``seal``, ``array``; or ``open``, ``array``.

    Arrays keep the mapping alive, even if the file is deleted. A pickle holds the name and the
    descriptor: another process opens the same file again, and never a newer one with its name. A
    full disk raises a CacheError.
    """

    path: Path

    @cached_property
    def _borders(self) -> Counter[int]:
        """Count the loaded pieces that begin or end in each page. Two pieces may share a page."""
        # Without a lock, because a forked process could wait forever for a thread of its parent.
        # So threads may miscount a page. The page is then evicted early and read again.
        return Counter()

    @classmethod
    def reserve(cls, path: Path, size_bytes: int) -> DiskFile:
        """Create a file of this size, and reserve its room on the disk.

        Raises:
            CacheError: the disk is full, or the file cannot be written.
        """
        # O_EXCL: an existing file may be mapped by another process, and must not change.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
        file = cls(os.open(path, flags, 0o666), path)
        try:
            file.resize(size_bytes, at_once=True)
        except BaseException:
            file.close()
            path.unlink()
            raise
        return file

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> DiskFile:
        """Open an existing file for reading.

        Raises:
            CacheError: the file is missing or does not have ``size_bytes``.
        """
        try:
            file = cls(open_file(path), path, is_sealed=True)
        except OSError as problem:
            raise CacheError(f"{path} cannot be opened ({problem})") from problem
        if file.size_bytes != size_bytes:
            file.close()
            raise CacheError(
                f"{path} has {file.size_bytes:,} bytes, but {size_bytes:,} were written"
            )
        return file

    @classmethod
    def attach(cls, path: Path | None, *found: Any) -> Block:
        """Open the file again in another process.

        An update of the cache may have removed the file, or given its name to another. The process
        that opened it still has it, and on Linux it can be opened through that process's
        descriptor.

        Raises:
            StoreGoneError: neither leads to the file.
        """
        # The name comes first, because it works even if that process has ended.
        for name in (path, None):
            with contextlib.suppress(StoreGoneError):
                file = super().attach(name, *found)
                file.path = path
                return file
        raise StoreGoneError(
            f"the cache was deleted or changed while it was in use: {path} is gone or is another "
            "file, and the process that opened it cannot be reached; make the dataset again"
        )

    # Writing

    def _check_free(self, size_bytes: int) -> None:
        """Raise a CacheError if the disk has less free space."""
        if size_bytes > free_bytes(self.path.parent):
            raise _full(self.path.parent, f"it needs {format_bytes(size_bytes)} more")

    def _explained(self, problem: OSError, size_bytes: int) -> Exception:
        if self.is_sealed:
            return MemoryBudgetError(
                f"the {format_bytes(size_bytes)} of {self.path} cannot be mapped "
                f"({problem.strerror}), because this process needs as much address space. Raise "
                "the limit of that (ulimit -v) or of open files (ulimit -n), or use storage='none' "
                "or a smaller resize=."
            )
        if problem.errno in _FULL:
            return _full(self.path.parent, f"it ran out of room ({problem.strerror})")
        return CacheError(f"{self.path} cannot be written ({problem.strerror})")

    def seal(self) -> None:
        """Make the file read-only, and write all of it to the disk."""
        super().seal()
        with naming_full_disk(self.path.parent):
            os.fsync(self.fd)

    # Reading

    def load(self, start: int, size: int) -> None:
        """Load bytes into memory until ``evict``, so that reads do not wait for the disk."""
        mapped = self._map
        if mapped is None or not size:
            return
        first, stop = _pages(start, size)
        # When a page is touched, the kernel also maps the cached pages around it, up to 2 MiB, but
        # not beyond an area with other flags. So the piece becomes such an area, and reading it
        # maps only its own pages. The flags let the disk read ahead, and let the page cache keep
        # the file in huge pages, which are mapped at no cost.
        if not self._borders:
            _advise(mapped, *_pages(0, len(mapped)), "MADV_NOHUGEPAGE")
        if len(self._borders) < 2 * _MOST_AREAS:
            _advise(mapped, first, stop, "MADV_SEQUENTIAL", "MADV_HUGEPAGE")
        self._borders.update({first, stop - 1})
        # Touch a few bytes of each range that one fault maps, and then all bytes of the rest. NumPy
        # releases the GIL for more than 500 elements, so threads that make batches continue.
        data = np.frombuffer(mapped, np.uint8)[first * mmap.PAGESIZE : start + size]
        whole = data.size // _FAULT_BYTES * _FAULT_BYTES
        data[:whole].reshape(-1, _FAULT_BYTES)[:, :_TOUCHED_BYTES].max(initial=0)
        data[whole:].max(initial=0)

    def evict(self, start: int, size: int, *, from_cache: bool) -> None:
        """Release memory that was loaded. Nothing is lost, but reading it again takes longer.

        With ``from_cache`` the system's page cache releases it too, except for pages that another
        process has mapped.
        """
        mapped = self._map
        if mapped is None or not size:
            return
        first, stop = _pages(start, size)
        for border in {first, stop - 1}:
            self._borders[border] -= 1
            if self._borders[border] <= 0:
                del self._borders[border]
        # A page that another loaded piece shares stays.
        first += first in self._borders
        stop -= stop - 1 in self._borders
        # Unmapped last: until the flags are reset, a reader of a neighbour could map it again.
        _advise(mapped, first, stop, "MADV_NOHUGEPAGE", "MADV_NORMAL", "MADV_DONTNEED")
        if from_cache and hasattr(os, "posix_fadvise"):
            # The page cache releases a huge page only as a whole.
            first_byte = start // _HUGE_BYTES * _HUGE_BYTES
            stop_byte = -(-(start + size) // _HUGE_BYTES) * _HUGE_BYTES
            os.posix_fadvise(self.fd, first_byte, stop_byte - first_byte, os.POSIX_FADV_DONTNEED)

    def evict_all(self) -> None:
        """Release the memory of the whole file."""
        if self._map is not None:
            _advise(self._map, *_pages(0, len(self._map)), "MADV_DONTNEED")


def _pages(start: int, size: int) -> tuple[int, int]:
    """Return the first page of a range of bytes, and the page after its last."""
    return start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE)


def _advise(mapped: mmap.mmap, first: int, stop: int, *advice: str) -> None:
    """Give the kernel advice on pages, if it supports that."""
    start = first * mmap.PAGESIZE
    size = (stop - first) * mmap.PAGESIZE
    for name in advice:
        if size > 0 and hasattr(mmap, name):
            with contextlib.suppress(OSError):
                mapped.madvise(getattr(mmap, name), start, size)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into a CacheError with the free space and a cure."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in _FULL:
            raise
        raise _full(folder, f"it ran out of room ({problem.strerror})") from problem


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _full(folder: Path, what: str) -> CacheError:
    return CacheError(
        f"the disk of {folder.parent} is too full for the cache: {what}, "
        f"{format_bytes(free_bytes(folder))} are free. Free some space, or give another "
        "cache_dir=, a smaller resize=, or codec='zstd', which about halves raw samples."
    )
