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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdata.errors import CacheError
from fastdata.machine.memory import format_bytes, parse_bytes
from fastdata.machine.shared import ArrayBlock
from fastdata.pixels.images import SampleSpec
from fastdata.report import log
from fastdata.sources.remote import Entry, Place
from fastdata.stores.files import free_bytes
from fastdata.stores.readers import Decoder, DiskStore, UndecodableError, checksum

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
        limit: for all of them: bytes, ``"200GiB"``, or a share of what is free and what they have.

    Raises:
        CacheError: the folder cannot hold them; says why and the cure.
        RemoteError: a file cannot be fetched.
    """

    def __init__(
        self,
        place: Place,
        files: Sequence[Entry],
        local_cache: str | os.PathLike[str],
        limit: int | float | str,
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
        self._all = Path(local_cache).expanduser().absolute()
        digest = hashlib.sha256(
            json.dumps([place.url, self.segment_bytes, *self.files]).encode()
        ).hexdigest()
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

    def at(self, name: str) -> str:
        return self.place.at(name)

    def read(self, name: str, *, again: bool = False) -> bytes:
        """A whole file; fetched ``again`` where what is here is of no use."""
        segments = [
            Segment(name, number) for number in range(-(-self.sizes[name] // self.segment_bytes))
        ]
        if again:
            self.forget(segments)
        found = {}
        for segment, fd in self.open(segments):
            with os.fdopen(fd, "rb") as file:
                found[segment] = file.read()
        return b"".join(found[segment] for segment in segments)

    def forget(self, segments: Iterable[Segment]) -> None:
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
        from filelock import FileLock  # 20 ms, which only they take

        with contextlib.ExitStack() as cleanup:
            # In the same order by all, who can so wait for each other.
            for number in sorted({self._lock_number(segment) for segment in segments}):
                cleanup.enter_context(FileLock(self._all / ".locks" / str(number)))
            away = []
            for segment in segments:
                fd = self._open_local(segment)  # whoever had the lock may have fetched it
                if fd is None:
                    away.append(segment)
                else:
                    yield segment, fd
            self._make_room(sum(map(self._size_of, away)))
            coming = [(segment, self._submit(segment)) for segment in away]
            for _, future in coming:
                cleanup.callback(future.cancel)
            for segment, future in coming:
                yield segment, self._keep(segment, future.result())

    def _path(self, segment: Segment) -> Path:
        return self.folder / f"{segment.name}.{segment.number}"

    def _size_of(self, segment: Segment) -> int:
        return min(
            self.segment_bytes, self.sizes[segment.name] - segment.number * self.segment_bytes
        )

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

    def _lock_number(self, segment: Segment) -> int:
        digest = hashlib.blake2b(str(self._path(segment)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % _LOCKS

    def _submit(self, segment: Segment) -> Future[bytes]:
        start = segment.number * self.segment_bytes
        return self.place.submit(segment.name, start, start + self._size_of(segment))

    def _keep(self, segment: Segment, data: bytes) -> int:
        path = self._path(segment)
        # Which a killed process leaves to the next one that fetches it.
        part = path.with_name(f"{path.name}.part")
        path.parent.mkdir(exist_ok=True)
        try:
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
        from filelock import FileLock

        if self._spare_bytes < size_bytes:
            room_bytes = max(size_bytes, self.limit_bytes // _SLACK)
            with FileLock(self._all / ".lock"):
                segments = sorted(_list_segments(self._all))
                used_bytes = sum(each_bytes for _, each_bytes, _ in segments)
                for _, each_bytes, path in segments:
                    if used_bytes + room_bytes <= self.limit_bytes:
                        break
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                        used_bytes -= each_bytes
            self._spare_bytes = room_bytes
        self._spare_bytes -= size_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return Mirror, (self.place, self.files, self._all, self.limit_bytes)


def _list_segments(local_cache: Path) -> Iterator[tuple[int, int, str]]:
    """When each segment of any mirror was needed, its bytes, its path."""
    with os.scandir(local_cache) as folders:
        for folder in folders:
            if folder.name.startswith(_FOLDER):
                with contextlib.suppress(FileNotFoundError), os.scandir(folder.path) as files:
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
        self._address = np.frombuffer(self._map, np.uint8).__array_interface__["data"][0]

    def array(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(self._map, dtype, math.prod(shape)).reshape(shape)

    def map(self, number: int, fd: int) -> None:
        self._replace(number, mmap.MAP_SHARED, fd)

    def unmap(self, number: int) -> None:
        self._replace(number, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def _replace(self, number: int, flags: int, fd: int) -> None:
        start = number * self.segment_bytes
        length = min(self.segment_bytes, self.size_bytes - start)
        fixed = 0x10  # MAP_FIXED: takes the place of what was mapped there, at once
        address = ctypes.c_void_p(self._address + start)
        call = ctypes.CDLL(None, use_errno=True).mmap
        call.restype = ctypes.c_void_p
        sizes = ctypes.c_size_t(length), mmap.PROT_READ, flags | fixed, fd, ctypes.c_long(0)
        if call(address, *sizes) != address.value:
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
        self.mirror = mirror
        self._names = tuple(names)
        size = mirror.segment_bytes
        self._mirrored = [
            MirroredFile(mirror.folder / name, mirror.sizes[name], size) for name in names
        ]
        super().__init__(self._mirrored, spec, index, decoder)  # type: ignore[arg-type]
        self._marks.close()
        self._checked = np.zeros(max(len(self), 1), np.uint8)  # of this process alone
        self._readers = np.zeros(len(self._checked), np.uint16)  # that need each sample here
        self._firsts = np.cumsum([0, *(-(-file.size_bytes // size) for file in self._mirrored)])
        # Samples that need each segment of all files.
        self._users = np.zeros(self._firsts[-1], np.uint32)
        self._locks: dict[
            int, threading.Lock
        ] = {}  # by process: a forked one must not wait for its parent's threads

    def expect(self, indices: Sequence[int]) -> None:
        self._have(np.array(indices, np.int64))

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        self.check(index_B)
        super().gather_into(index_B, out_B)

    def check(self, index_B: np.ndarray) -> None:
        unchecked = index_B[self._checked[index_B] == 0]
        self._have(unchecked)
        super().check(unchecked)

    def _check(self, index: int) -> None:
        if not self._checked[index]:
            self._have(np.array([index]))
            super()._check(index)

    def _have(self, index_B: np.ndarray) -> None:
        """Fetch samples that nobody has brought; they stay."""
        away = np.unique(index_B[self._readers[index_B] == 0])
        if len(away):
            self.bring(away)

    def _enter(self, index: int, found: int) -> None:
        wanted = int(self._sums[index])
        if found != wanted:
            log.info(
                "sample %d of %s is not as it was written; it is fetched again",
                index,
                self.mirror.place,
            )
            with self._lock:
                self._checked[:] = 0  # samples beside it come again, too
                numbers = np.unique(self._segments(np.array([index])))
                self.mirror.forget(map(self._segment, numbers.tolist()))
                self._map(numbers)
            found = checksum(self.stored(index))
        if found != wanted:
            name = self._names[self._of[index]]
            what = f"its bytes in {self.mirror.at(name)} are not those that were written, "
            what += "and came twice; the file was changed or is damaged there: build the cache anew"
            raise UndecodableError(what, index=index, codec=self.codec, is_on_disk=True)
        self._checked[index] = 1

    # What of the files is here

    def bring(self, index_B: np.ndarray) -> None:
        segments = self._segments(index_B)
        with self._lock:
            needed = np.unique(segments)
            self._map(needed[self._users[needed] == 0])
            np.add.at(self._users, segments, 1)
            self._readers[index_B] += 1

    def drop(self, index_B: np.ndarray, *, from_cache: bool = False) -> None:
        with self._lock:
            brought = index_B[self._readers[index_B] > 0]
            segments = self._segments(brought)
            self._readers[brought] -= 1
            self._checked[brought[self._readers[brought] == 0]] = 0
            np.subtract.at(self._users, segments, 1)
            left = np.unique(segments)
            for number in left[self._users[left] == 0].tolist():
                file = self._file_of(number)
                self._mirrored[file].unmap(number - int(self._firsts[file]))

    @property
    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _segments(self, index_B: np.ndarray) -> np.ndarray:
        """The segments of samples, counted over all files: int64, those of each sample in a row."""
        size = self.mirror.segment_bytes
        first_B = self._offsets[index_B] // size
        count_B = (
            (self._offsets[index_B] + np.maximum(self._sizes[index_B], 1) - 1) // size - first_B + 1
        )
        first_B = first_B + self._firsts[self._of[index_B]]
        within = np.arange(count_B.sum()) - np.repeat(np.cumsum(count_B) - count_B, count_B)
        segments: np.ndarray = np.repeat(first_B, count_B) + within
        return segments

    def _file_of(self, number: int) -> int:
        return int(np.searchsorted(self._firsts, number, side="right")) - 1

    def _segment(self, number: int) -> Segment:
        file = self._file_of(number)
        return Segment(self._names[file], number - int(self._firsts[file]))

    def _map(self, numbers: np.ndarray) -> None:
        need_bytes = (np.count_nonzero(self._users) + len(numbers)) * self.mirror.segment_bytes
        if need_bytes > self.mirror.limit_bytes + self.mirror.segment_bytes:
            raise CacheError(
                f"half of what is free in {self.mirror.folder.parent}, "
                f"{format_bytes(self.mirror.limit_bytes)}, is too small: "
                f"this process needs {format_bytes(need_bytes)} at once. Free some, or use "
                "ChunkedLoader with a smaller memory_limit= or chunk_samples=, which needs two "
                "chunks at a time."
            )
        files = dict(zip(self._names, self._mirrored, strict=True))
        for segment, fd in self.mirror.open(map(self._segment, numbers.tolist())):
            try:
                files[segment.name].map(segment.number, fd)
            finally:
                os.close(fd)

    def __reduce__(self) -> tuple[object, ...]:
        return MirroredStore, (self._names, self.spec, self.index, self._decoder, self.mirror)
