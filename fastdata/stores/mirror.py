"""The files of a cache behind a URL: segments that were needed lately, on a local disk.

Below ``local_cache``, which all caches, ranks and runs of a machine share, a folder for each cache
holds its segments: equal pieces of its files, each whole or not there. What was needed longest ago
is deleted to make room. A process maps the segments that it needs at their places in one range of
addresses a file; one that is deleted stays readable for whoever has it mapped, so that nobody has
to say what is in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import mmap
import os
import re
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdata.errors import CacheError
from fastdata.machine.memory import format_bytes, parse_bytes
from fastdata.machine.shared import ArrayBlock
from fastdata.pixels.images import SampleSpec
from fastdata.report import log
from fastdata.sources.remote import Entry, Place
from fastdata.stores.readers import Decoder, DiskStore, free_bytes

FETCH_BYTES = 64 << 20
"""On their way at once, where 50 ms at 1 GB/s are 48 MiB."""
_SEGMENT_BYTES = 1 << 20
_MOST_SEGMENTS = 1 << 15
"""Of a cache, whose segments are doubled until they are so few: a process may have 65,530
mappings."""
_LOCKS = 256
_SLACK = 32
"""Room is made for a 32nd of the limit at once: to find what was needed longest ago is a look at
every segment."""
_FOLDER = "mirror-"
_MAP_FIXED = 0x10


class Segment(NamedTuple):
    name: str
    number: int


class Mirror:
    """Some of the segments of some files of a place, in a local folder of at most so many bytes.

    What some have mapped and others have deleted takes room beside these, until it is not mapped
    any more.

    Args:
        place: the cache.
        files: of it; they never change under their names, sizes and tags.
        local_cache: folder that all mirrors of a machine share.
        limit: for all of them: bytes, or a share of what is free and what they have.

    Raises:
        CacheError: the folder cannot hold them; says why and the cure.
        RemoteError: a file cannot be fetched.
    """

    def __init__(
        self, place: Place, files: Sequence[Entry], local_cache: Path, limit: int | float
    ) -> None:
        if sys.platform != "linux":
            raise CacheError(
                f"{place} is mirrored by means that only Linux has; copy it to a local disk and "
                "open that"
            )
        self.place = place
        self.files = tuple(files)
        self.sizes = {file.name: file.size_bytes for file in files}
        self.segment_bytes = _SEGMENT_BYTES
        while sum(self.sizes.values()) > self.segment_bytes * _MOST_SEGMENTS:
            self.segment_bytes *= 2
        self._all = local_cache
        what = json.dumps([place.url, self.segment_bytes, *self.files])
        digest = hashlib.sha256(what.encode()).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9._]+", "-", place.url.rpartition("/")[2]).strip(".-") or "cache"
        self.folder = self._all / f"{_FOLDER}{stem}-{digest[:12]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self._all / ".locks").mkdir(exist_ok=True)
            used_bytes = sum(size_bytes for _, size_bytes, _ in _list_segments(self._all))
        except OSError as problem:
            raise CacheError(
                f"local_cache={str(self._all)!r} cannot be written ({problem.strerror})"
            ) from problem
        self.limit_bytes = parse_bytes(limit, of=free_bytes(self._all) + used_bytes)
        self._spare_bytes = 0

    def segments(self, name: str) -> list[Segment]:
        return [
            Segment(name, number) for number in range(-(-self.sizes[name] // self.segment_bytes))
        ]

    def read(self, name: str) -> bytes:
        """A whole file."""
        found = {}
        for segment, fd in self.open(self.segments(name)):
            with os.fdopen(fd, "rb") as file:
                found[segment.number] = file.read()
        return b"".join(found[number] for number in range(len(found)))

    def forget(self, segments: Iterable[Segment]) -> None:
        """Have segments fetched again, because what is here is of no use."""
        for segment in segments:
            self._path(segment).unlink(missing_ok=True)

    def open(self, segments: Iterable[Segment]) -> Iterator[tuple[Segment, int]]:
        """Descriptors of segments, which the caller closes; what is not here is fetched.

        Two processes never fetch the same segment: the second waits for the first.
        """
        missing = []
        for segment in segments:
            fd = self._open_local(segment)
            if fd is None:
                missing.append(segment)
            else:
                yield segment, fd
        at_once = max(FETCH_BYTES // self.segment_bytes, 1)
        for first in range(0, len(missing), at_once):
            yield from self._fetch(missing[first : first + at_once])

    def _fetch(self, segments: Sequence[Segment]) -> Iterator[tuple[Segment, int]]:
        with contextlib.ExitStack() as cleanup:
            # In the same order by all, who can so wait for each other.
            for number in sorted(set(map(self._lock_number, segments))):
                cleanup.enter_context(self._lock(str(number)))
            away = []
            for segment in segments:
                fd = self._open_local(segment)  # whoever had the lock may have fetched it
                if fd is None:
                    away.append(segment)
                else:
                    yield segment, fd
            self._make_room(sum(map(self._size_of, away)))
            coming = [self._submit(segment) for segment in away]
            for future in coming:
                cleanup.callback(future.cancel)
            for segment, future in zip(away, coming, strict=True):
                yield segment, self._keep(segment, future.result())

    def _lock(self, name: str) -> AbstractContextManager[Any]:
        from filelock import FileLock  # 20 ms, which only they take

        return FileLock(self._all / ".locks" / name)

    def _lock_number(self, segment: Segment) -> int:
        return zlib.crc32(str(self._path(segment)).encode()) % _LOCKS

    def _path(self, segment: Segment) -> Path:
        return self.folder / f"{segment.name}.{segment.number}"

    def _size_of(self, segment: Segment) -> int:
        start = segment.number * self.segment_bytes
        return min(self.segment_bytes, self.sizes[segment.name] - start)

    def _open_local(self, segment: Segment) -> int | None:
        try:
            fd = os.open(self._path(segment), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(fd).st_size != self._size_of(segment):  # the machine lost its power
            os.close(fd)
            return None
        os.utime(fd)
        return fd

    def _submit(self, segment: Segment) -> Future[bytes]:
        start = segment.number * self.segment_bytes
        return self.place.submit(segment.name, start, start + self._size_of(segment))

    def _keep(self, segment: Segment, data: bytes) -> int:
        path = self._path(segment)
        # Which a killed process leaves to the next one that fetches it.
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(exist_ok=True)
            part.write_bytes(data)
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            part.rename(path)
        except OSError as problem:
            part.unlink(missing_ok=True)
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheError(
                f"the disk of local_cache={str(self._all)!r} is full. Free some space, or give a "
                "local_cache= on another one."
            ) from problem
        return fd

    def _make_room(self, size_bytes: int) -> None:
        """Delete what was needed longest ago, of whatever cache, where there is no room."""
        if self._spare_bytes < size_bytes:
            self._spare_bytes = max(size_bytes, self.limit_bytes // _SLACK)
            with self._lock("room"):
                segments = sorted(_list_segments(self._all))
                too_many_bytes = sum(each_bytes for _, each_bytes, _ in segments)
                too_many_bytes += self._spare_bytes - self.limit_bytes
                for _, each_bytes, path in segments:
                    if too_many_bytes <= 0:
                        break
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        too_many_bytes -= each_bytes
        self._spare_bytes -= size_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return Mirror, (self.place, self.files, self._all, self.limit_bytes)


def _list_segments(local_cache: Path) -> Iterator[tuple[int, int, str]]:
    """When each segment of any mirror was needed, its bytes, its path."""
    for folder in local_cache.glob(f"{_FOLDER}*"):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as files:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    facts = file.stat()
                    yield facts.st_mtime_ns, facts.st_size, file.path


class MirroredFile:
    """A range of addresses as large as a file: its segments that are mapped, and zeros."""

    def __init__(self, path: Path, size_bytes: int, segment_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.segment_bytes = segment_bytes
        self._map = mmap.mmap(
            -1, max(size_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ
        )

    def array(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(self._map, dtype, math.prod(shape)).reshape(shape)

    def map(self, number: int, fd: int | None) -> None:
        """Put a segment, or zeros, in the place of what is there, at once."""
        start = number * self.segment_bytes
        address = np.frombuffer(self._map, np.uint8).ctypes.data + start
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd is None else mmap.MAP_SHARED
        call = ctypes.CDLL(None, use_errno=True).mmap
        call.restype = ctypes.c_void_p
        found = call(
            ctypes.c_void_p(address),
            ctypes.c_size_t(min(self.segment_bytes, self.size_bytes - start)),
            mmap.PROT_READ,
            flags | _MAP_FIXED,
            -1 if fd is None else fd,
            ctypes.c_long(0),
        )
        if found != address:
            raise OSError(ctypes.get_errno(), f"{self.path.name} cannot be mapped")

    def release(self) -> None: ...

    def close(self) -> None: ...


class MirroredStore(DiskStore):
    """Samples in the files of a mirror, whose segments are fetched and mapped before they are read.

    Those that are brought are there until they are dropped; what is read without stays. Checksums
    are looked at after each time; a sample that fails is fetched once more.
    """

    def __init__(
        self,
        names: Sequence[str],
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None,
        mirror: Mirror,
    ) -> None:
        self._mirrored = {
            name: MirroredFile(mirror.folder / name, mirror.sizes[name], mirror.segment_bytes)
            for name in names
        }
        files: Any = self._mirrored.values()
        super().__init__(files, spec, index, decoder)
        self.mirror = mirror
        self._segments = [segment for name in names for segment in mirror.segments(name)]
        self._firsts = np.cumsum([0, *(len(mirror.segments(name)) for name in names)])
        # All of this process alone, as what is mapped.
        self._checked = np.zeros(len(self), np.uint8)
        self._sample_users = np.zeros(len(self), np.uint16)
        self._segment_users = np.zeros(len(self._segments), np.uint32)
        # By process: a forked one must not wait for its parent's threads.
        self._locks: dict[int, threading.Lock] = {}

    def expect(self, indices: Sequence[int]) -> None:
        self._have(np.array(indices, np.int64))

    def ensure(self, index_B: np.ndarray) -> None:
        unchecked = index_B[self._checked[index_B] == 0]
        self._have(unchecked)
        super().ensure(unchecked)

    def _have(self, index_B: np.ndarray) -> None:
        """Fetch samples that nobody has brought; they stay."""
        away = np.unique(index_B[self._sample_users[index_B] == 0])
        if len(away):
            self.bring(away)

    def _is_sound(self, index: int) -> bool:
        if super()._is_sound(index):
            return True
        place = self.mirror.place
        log.info("sample %d of %s is not as it was written; it is fetched again", index, place)
        with self._lock:
            self._checked[:] = 0  # samples beside it come again, too
            numbers = self._numbers(np.array([index]))
            self.mirror.forget(self._segments[number] for number in numbers.tolist())
            self._map(numbers)
        return super()._is_sound(index)

    def _note_damage(self, index: int) -> str:
        path = self.mirror.place.at(self.files[self._of[index]].path.name)
        return (
            f"its bytes in {path} are not those that were written, and came twice; the file was "
            "changed or is damaged there: build the cache anew"
        )

    # What of the files is here

    def bring(self, index_B: np.ndarray) -> None:
        numbers = self._numbers(index_B)
        with self._lock:
            needed = np.unique(numbers)
            self._map(needed[self._segment_users[needed] == 0])
            np.add.at(self._segment_users, numbers, 1)
            self._sample_users[index_B] += 1

    def drop(self, index_B: np.ndarray, *, from_cache: bool = False) -> None:
        with self._lock:
            brought = index_B[self._sample_users[index_B] > 0]
            numbers = self._numbers(brought)
            self._sample_users[brought] -= 1
            self._checked[brought[self._sample_users[brought] == 0]] = 0
            np.subtract.at(self._segment_users, numbers, 1)
            left = np.unique(numbers)
            for number in left[self._segment_users[left] == 0].tolist():
                segment = self._segments[number]
                self._mirrored[segment.name].map(segment.number, None)

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _numbers(self, index_B: np.ndarray) -> np.ndarray:
        """The segments of samples, counted over all files: int64, those of each sample in a row."""
        size = self.mirror.segment_bytes
        start_B = self._offsets[index_B]
        last_B = (start_B + np.maximum(self._sizes[index_B], 1) - 1) // size
        first_B = start_B // size
        count_B = last_B - first_B + 1
        within = np.arange(count_B.sum()) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        numbers: np.ndarray = within + np.repeat(first_B + self._firsts[self._of[index_B]], count_B)
        return numbers

    def _map(self, numbers: np.ndarray) -> None:
        need_bytes = np.count_nonzero(self._segment_users) + len(numbers)
        need_bytes *= self.mirror.segment_bytes
        if need_bytes > self.mirror.limit_bytes + self.mirror.segment_bytes:
            raise CacheError(
                f"half of what is free in {self.mirror.folder.parent}, "
                f"{format_bytes(self.mirror.limit_bytes)}, is too small: "
                f"this process needs {format_bytes(need_bytes)} at once. Free some, or use "
                "ChunkedLoader with a smaller memory_limit= or chunk_samples=, which needs two "
                "chunks at a time."
            )
        for segment, fd in self.mirror.open(self._segments[number] for number in numbers.tolist()):
            try:
                self._mirrored[segment.name].map(segment.number, fd)
            finally:
                os.close(fd)

    def __reduce__(self) -> tuple[object, ...]:
        return MirroredStore, (
            list(self._mirrored),
            self.spec,
            self.index,
            self._decoder,
            self.mirror,
        )
