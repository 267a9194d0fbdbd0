"""The files of a part's samples, mapped read-only, and read past the mapping."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdata.errors import CacheError, StoreGoneError

__all__ = ["Run", "ShardMap", "runs_of"]

Bytes = npt.NDArray[np.uint8]

_FAULT_BYTES = 64 << 10
"""The kernel maps cached pages around the one that is touched: less than so many bytes before and after it."""


class Run(NamedTuple):
    """Samples that are read from a shard in one go: so many of those given, from the ``first`` on."""

    shard: int
    start: int
    size_bytes: int
    first: int
    samples: int


def runs_of(
    shards_B: np.ndarray,
    starts_B: np.ndarray,
    sizes_B: np.ndarray,
    *,
    gap_bytes: int = 0,
    most_bytes: int | None = None,
) -> Iterator[Run]:
    """Cut samples into runs that lie end to end in one shard.

    Args:
        shards_B: which file each lies in.
        starts_B: its first byte there.
        sizes_B: its bytes.
        gap_bytes: that may lie between two samples of a run.
        most_bytes: of a run, unless one sample alone is larger.

    Example:
        >>> runs = runs_of(np.array([0, 0, 1]), np.array([8, 12, 0]), np.array([4, 4, 4]))
        >>> [(run.shard, run.start, run.size_bytes, run.samples) for run in runs]
        [(0, 8, 8, 2), (1, 0, 4, 1)]
    """
    ends_B = starts_B + sizes_B
    gaps = starts_B[1:] - ends_B[:-1]
    is_cut = (shards_B[1:] != shards_B[:-1]) | (gaps < 0) | (gaps > gap_bytes)
    firsts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(starts_B)]
    for first, stop in itertools.pairwise(firsts):
        while first < stop:
            start, last = int(starts_B[first]), stop
            if most_bytes is not None:
                fitting = int(np.searchsorted(ends_B[first:stop], start + most_bytes, side="right"))
                last = first + max(fitting, 1)
            yield Run(int(shards_B[first]), start, int(ends_B[last - 1]) - start, first, last - first)
            first = last


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

    @property
    def size_bytes(self) -> int:
        """Of all shards."""
        return sum(self._sizes)

    def read_into(self, number: int, start: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes of a shard from ``start`` on; memory of the mapping is not touched.

        Where the file has lost its name since, or the system cannot read so, the mapping still has them.
        """
        with self._reopened(number) as descriptor:
            if descriptor is not None and hasattr(os, "preadv") and _read_all(descriptor, start, out):
                return
        out[:] = self.shards[number][start : start + out.size]

    def drop(self, number: int, start: int, size: int, *, from_cache: bool) -> None:
        """Let go of memory that caches bytes of a shard; nothing is lost, reading them again takes longer.

        Args:
            number: of the shard.
            start: the first byte.
            size: how many; what the kernel maps with them goes as well.
            from_cache: let go of the system's page cache too; pages that any process has mapped stay.
        """
        mapped = self._maps[number] if self._maps else None
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            first = max(start - _FAULT_BYTES, 0) // mmap.PAGESIZE * mmap.PAGESIZE
            stop = min(start + size + _FAULT_BYTES, len(mapped))
            mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)
        if from_cache and hasattr(os, "posix_fadvise"):
            with self._reopened(number) as descriptor:
                if descriptor is not None:
                    os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)

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


def _read_all(descriptor: int, start: int, out: Bytes) -> bool:
    """Fill ``out`` from a file; False where the disk fails or the file ends too early."""
    rest = out.data
    while rest.nbytes:
        try:
            done = os.preadv(descriptor, [rest], start)
        except OSError:
            return False
        if not done:
            return False
        rest, start = rest[done:], start + done
    return True
