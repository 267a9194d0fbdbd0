"""The files of a part's samples, mapped read-only."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdata.errors import CacheError, StoreGoneError

__all__ = ["Run", "ShardMap", "runs_of"]

Bytes = npt.NDArray[np.uint8]

_FAULT_BYTES = 64 << 10
"""The kernel maps about so much around a page that is touched."""
_TOUCHED_BYTES = 512
_HUGE_BYTES = 2 << 20
_MOST_AREAS = 8192
"""Of the 65,530 that a process may have; what is brought beyond them maps more memory than it needs."""


class Run(NamedTuple):
    """A piece of a shard that samples lie in."""

    shard: int
    start: int
    size_bytes: int


def runs_of(shards_B: np.ndarray, starts_B: np.ndarray, sizes_B: np.ndarray, *, gap_bytes: int = 0) -> Iterator[Run]:
    """Cut samples into runs that lie end to end in one shard.

    Args:
        shards_B: which file each lies in.
        starts_B: its first byte there.
        sizes_B: its bytes.
        gap_bytes: that may lie between two samples of a run.

    Example:
        >>> runs = runs_of(np.array([0, 0, 1]), np.array([8, 12, 0]), np.array([4, 4, 4]))
        >>> [(run.shard, run.start, run.size_bytes) for run in runs]
        [(0, 8, 8), (1, 0, 4)]
    """
    ends_B = starts_B + sizes_B
    gaps = starts_B[1:] - ends_B[:-1]
    is_cut = (shards_B[1:] != shards_B[:-1]) | (gaps < 0) | (gaps > gap_bytes)
    cuts = np.flatnonzero(is_cut) + 1
    if len(shards_B):
        for first, stop in itertools.pairwise([0, *cuts.tolist(), len(shards_B)]):
            yield Run(int(shards_B[first]), int(starts_B[first]), int(ends_B[stop - 1] - starts_B[first]))


class _Areas:
    """What one process has brought: of which shards, and shard and page that each of it begins or ends in, how often.

    Two of them can share such a page; all others are one's own.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shards: set[int] = set()
        self.borders: Counter[tuple[int, int]] = Counter()

    def leave(self, borders: set[tuple[int, int]]) -> None:
        """Count one less of each."""
        for border in borders:
            self.borders[border] -= 1
            if self.borders[border] <= 0:
                del self.borders[border]


class ShardMap:
    """The shards of one part, mapped read-only.

    Pickles as their names: another process opens them again, and refuses others that have taken their place.

    Args:
        folder: holds them.
        names: file of each.
        sizes: bytes of each, as they were written.

    Raises:
        CacheError: a file is missing or has another size.
    """

    def __init__(self, folder: str, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.folder = folder
        self._names, self._sizes = tuple(names), tuple(sizes)
        self.inodes: tuple[int, ...] = ()
        self.shards: list[Bytes] = []
        self._maps: list[mmap.mmap | None] = []
        self._open()

    def _open(self) -> None:
        maps: list[mmap.mmap | None] = []
        inodes = []
        for name, size in zip(self._names, self._sizes, strict=True):
            path = Path(self.folder, name)
            try:
                with path.open("rb") as stream:
                    found = os.fstat(stream.fileno())
                    if found.st_size != size:
                        raise CacheError(f"{path} has {found.st_size:,} bytes where {size:,} were written")
                    mapped = mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_READ) if size else None
            except OSError as problem:
                if isinstance(problem, CacheError):
                    raise
                many = "; raise the limit of open files (ulimit -n)" if problem.errno == errno.EMFILE else ""
                raise CacheError(f"{path} cannot be opened ({problem.strerror}){many}") from problem
            maps.append(mapped)
            inodes.append(found.st_ino)
        self.shards = [np.frombuffer(b"" if mapped is None else mapped, np.uint8) for mapped in maps]
        self._maps, self.inodes = maps, tuple(inodes)
        self._areas: dict[int, _Areas] = {}  # by process: a forked one must not wait for a thread of its parent

    @property
    def size_bytes(self) -> int:
        """Of all shards."""
        return sum(self._sizes)

    def bring(self, number: int, start: int, size: int) -> None:
        """Have bytes of a shard in memory until ``drop``, so that nobody waits for the disk when they are read.

        Reading them then maps their pages and no others. The kernel maps what it has around a page that is touched, up
        to 2 MiB, but not across the border of an area with other flags: so they are made such an area. Its flags let
        the disk read ahead, and the page cache keep the file in huge pages, which are mapped at no cost.
        """
        mapped = self._maps[number] if self._maps else None
        if mapped is None or not size:
            return
        first, stop = _pages(start, size)
        areas = self._areas.setdefault(os.getpid(), _Areas())
        with areas.lock:
            if number not in areas.shards:
                areas.shards.add(number)
                _advise(mapped, "MADV_NOHUGEPAGE", *_pages(0, len(mapped)))
            if len(areas.borders) < 2 * _MOST_AREAS:
                _advise(mapped, "MADV_SEQUENTIAL", first, stop)
                _advise(mapped, "MADV_HUGEPAGE", first, stop)
            areas.borders.update({(number, first), (number, stop - 1)})
        _touch(self.shards[number][first * mmap.PAGESIZE : start + size])

    def drop(self, number: int, start: int, size: int, *, from_cache: bool) -> None:
        """Let go of memory that caches bytes of a shard; nothing is lost, reading them again takes longer.

        Args:
            number: of the shard.
            start: the first byte.
            size: how many.
            from_cache: let go of the system's page cache too; pages that any process has mapped stay.
        """
        mapped = self._maps[number] if self._maps else None
        if mapped is not None and size:
            first, stop = _pages(start, size)
            areas = self._areas.setdefault(os.getpid(), _Areas())
            with areas.lock:
                areas.leave({(number, first), (number, stop - 1)})
                first += (number, first) in areas.borders
                stop -= (number, stop - 1) in areas.borders
                for advice in ("MADV_NOHUGEPAGE", "MADV_NORMAL", "MADV_DONTNEED"):  # unmapped when nobody can map again
                    _advise(mapped, advice, first, stop)
        if from_cache and hasattr(os, "posix_fadvise"):
            first_byte = start // _HUGE_BYTES * _HUGE_BYTES  # a huge page goes as a whole or not at all
            stop_byte = -(-(start + size) // _HUGE_BYTES) * _HUGE_BYTES
            with self._reopened(number) as descriptor:
                if descriptor is not None:
                    os.posix_fadvise(descriptor, first_byte, stop_byte - first_byte, os.POSIX_FADV_DONTNEED)

    def release(self) -> None:
        """Let go of all memory that the mappings take; what is read again is mapped again."""
        for mapped in self._maps:
            if mapped is not None:
                _advise(mapped, "MADV_DONTNEED", *_pages(0, len(mapped)))

    @contextlib.contextmanager
    def _reopened(self, number: int) -> Iterator[int | None]:
        """A descriptor of a shard's file for a moment; None where the file is not there under its name any more.

        To keep one open for each shard would take as many again as the mappings do.
        """
        try:
            descriptor = os.open(Path(self.folder, self._names[number]), os.O_RDONLY)
        except OSError:
            yield None
            return
        try:
            yield descriptor if os.fstat(descriptor).st_ino == self.inodes[number] else None
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let go of the files; arrays handed out stay valid. Idempotent."""
        self.shards, self._maps = [], []

    def __getstate__(self) -> tuple[str, tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
        return self.folder, self._names, self._sizes, self.inodes

    def __setstate__(self, state: tuple[str, tuple[str, ...], tuple[int, ...], tuple[int, ...]]) -> None:
        self.folder, self._names, self._sizes, inodes = state
        try:
            self._open()
        except CacheError as gone:
            raise StoreGoneError(f"the cache was deleted or changed while it was in use: {gone}") from gone
        if self.inodes != inodes:
            raise StoreGoneError(f"the cache in {self.folder} was replaced while it was in use; make the dataset again")


def _touch(data: Bytes) -> None:
    """Read a little of every so many bytes, without the GIL: NumPy keeps it for less than 500 elements."""
    whole = data.size // _FAULT_BYTES * _FAULT_BYTES
    data[:whole].reshape(-1, _FAULT_BYTES)[:, :_TOUCHED_BYTES].max(initial=0)
    data[whole:][:_TOUCHED_BYTES].max(initial=0)
    data[-_TOUCHED_BYTES:].max(initial=0)


def _pages(start: int, size: int) -> tuple[int, int]:
    """The first page that bytes lie in, and the one behind the last."""
    return start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE)


def _advise(mapped: mmap.mmap, advice: str, first: int, stop: int) -> None:
    """Give the kernel advice on pages, where it takes any: it is about memory and time, never about what is read."""
    if stop > first and hasattr(mmap, advice):
        with contextlib.suppress(OSError):
            mapped.madvise(getattr(mmap, advice), first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE)
