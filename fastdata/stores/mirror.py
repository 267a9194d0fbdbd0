"""The files of a cache behind a URL: segments that were needed lately, on a local disk.

Below ``local_cache``, which all caches, ranks and runs of a machine share, a folder for each cache
holds its segments: runs of whole samples of its files, each a file of its own. What was needed
longest ago is deleted to make room; it stays readable for whoever has it mapped, so that nobody has
to say what is in use.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.errors import CacheError
from fastdata.machine.memory import format_bytes, parse_bytes
from fastdata.machine.shared import ArrayBlock
from fastdata.pixels.images import SampleSpec, addresses_of
from fastdata.report import log
from fastdata.sources.remote import Entry, Place
from fastdata.stores.readers import Bytes, Decoder, DiskStore, free_bytes

FETCH_BYTES = 64 << 20
"""On their way at once, where 50 ms at 1 GB/s are 48 MiB."""
_SEGMENT_BYTES = 1 << 20
_MOST_SEGMENTS = 1 << 15
"""About so many has a cache, or larger ones: a process may have 65,530 mappings."""
_LOCKS = 256
_SLACK = 32
"""Room is made for a 32nd of the limit at once: to find what was needed longest ago is a look at
every segment."""
_FOLDER = "mirror-"


class Segment(NamedTuple):
    """Bytes of a file of a cache."""

    name: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


class Mirror:
    """Some segments of some files of a place, in a local folder of at most so many bytes.

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
        self.place = place
        self.files = tuple(files)
        self.local_cache = local_cache
        digest = hashlib.sha256(json.dumps([place.url, *self.files]).encode()).hexdigest()
        self.folder = local_cache / f"{_FOLDER}{digest[:16]}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (local_cache / ".locks").mkdir(exist_ok=True)
            used_bytes = sum(size_bytes for _, size_bytes, _ in _list_segments(local_cache))
        except OSError as problem:
            raise CacheError(
                f"local_cache={str(local_cache)!r} cannot be written ({problem.strerror})"
            ) from problem
        self.limit_bytes = parse_bytes(limit, of=free_bytes(local_cache) + used_bytes)
        self._spare_bytes = 0
        self._turn = os.getpid(), threading.Lock()

    def whole(self, name: str) -> Segment:
        """All of a file."""
        size_bytes = next(file.size_bytes for file in self.files if file.name == name)
        return Segment(name, 0, size_bytes)

    def map(self, segments: Iterable[Segment]) -> dict[Segment, Bytes]:
        """The bytes of segments, read-only; what is not here is fetched.

        Two threads or processes never fetch the same segment: the second waits for the first.
        """
        mapped, missing = self._map_local(segments)
        if not missing:
            return mapped
        if self._turn[0] != os.getpid():  # a forked process never gets its parent's turn
            self._turn = os.getpid(), threading.Lock()
        with self._turn[1]:
            return mapped | self._fetch_all(missing)

    def _fetch_all(self, segments: Sequence[Segment]) -> dict[Segment, Bytes]:
        mapped, missing = self._map_local(segments)
        largest_bytes = max((segment.size_bytes for segment in missing), default=1)
        at_once = max(FETCH_BYTES // largest_bytes, 1)
        for first in range(0, len(missing), at_once):
            mapped |= self._fetch(missing[first : first + at_once])
        return mapped

    def forget(self, segment: Segment) -> None:
        """Have a segment fetched again, because what is here is of no use."""
        self.path(segment).unlink(missing_ok=True)

    def path(self, segment: Segment) -> Path:
        return self.folder / f"{segment.name}.{segment.start}-{segment.stop}"

    def _lock(self, name: str) -> AbstractContextManager[Any]:
        from filelock import FileLock  # 20 ms, which only they take

        return FileLock(self.local_cache / ".locks" / name)

    def _map_local(self, segments: Iterable[Segment]) -> tuple[dict[Segment, Bytes], list[Segment]]:
        """Those that are here, and the others."""
        mapped = {}
        missing = []
        for segment in segments:
            path = self.path(segment)
            if not segment.size_bytes:  # of samples without elements: nothing can be mapped
                mapped[segment] = np.zeros(0, np.uint8)
                continue
            try:
                os.utime(path)
                mapped[segment] = _map(path, segment.size_bytes)
            # RuntimeError: deleted meanwhile, or cut short as the machine lost its power.
            except (FileNotFoundError, RuntimeError):
                missing.append(segment)
        return mapped, missing

    def _fetch(self, segments: Sequence[Segment]) -> dict[Segment, Bytes]:
        with contextlib.ExitStack() as cleanup:
            locks = {zlib.crc32(str(self.path(segment)).encode()) % _LOCKS for segment in segments}
            for number in sorted(locks):  # in one order, or two would wait for each other
                cleanup.enter_context(self._lock(str(number)))
            # Whoever had the locks may have fetched some.
            mapped, missing = self._map_local(segments)
            self._make_room(sum(segment.size_bytes for segment in missing))
            coming = {segment: self.place.submit(*segment) for segment in missing}
            for future in coming.values():
                cleanup.callback(future.cancel)
            for segment, future in coming.items():
                mapped[segment] = self._keep(segment, future.result())
            return mapped

    def _keep(self, segment: Segment, data: bytes) -> Bytes:
        path = self.path(segment)
        # Which a killed process leaves to the next one that fetches it.
        part = path.with_name(f"{path.name}.part")
        try:
            self.folder.mkdir(exist_ok=True)
            part.write_bytes(data)
            mapped = _map(part, len(data))
            part.rename(path)
        except OSError as problem:
            part.unlink(missing_ok=True)
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CacheError(
                f"the disk of local_cache={str(self.local_cache)!r} is full. Free some space, or "
                "give a local_cache= on another one."
            ) from problem
        return mapped

    def _make_room(self, size_bytes: int) -> None:
        """Delete what was needed longest ago, of whatever cache, where there is no room."""
        if self._spare_bytes < size_bytes:
            self._spare_bytes = max(size_bytes, self.limit_bytes // _SLACK)
            with self._lock("room"):
                segments = sorted(_list_segments(self.local_cache))
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
        return Mirror, (self.place, self.files, self.local_cache, self.limit_bytes)


def _list_segments(local_cache: Path) -> Iterator[tuple[int, int, str]]:
    """When each segment of any mirror was needed, its bytes, its path."""
    for path in glob.iglob(os.path.join(glob.escape(str(local_cache)), f"{_FOLDER}*", "*")):
        with contextlib.suppress(FileNotFoundError):
            facts = os.stat(path)
            yield facts.st_mtime_ns, facts.st_size, path


def _map(path: Path, size_bytes: int) -> Bytes:
    """Map a file, without a descriptor that stays open; RuntimeError where it is shorter."""
    data: Bytes = torch.from_file(str(path), size=size_bytes, dtype=torch.uint8).numpy()
    data.flags.writeable = False
    return data


class MirroredStore(DiskStore):
    """Samples in segments of a mirror, which are fetched and mapped before they are read.

    They stay mapped until they are dropped. Checksums are looked at each time that a segment was
    mapped; a sample that fails is fetched once more.

    Args:
        names: of the files.
        index: of ``in_segments``.
    """

    def __init__(
        self,
        names: Sequence[str],
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None,
        mirror: Mirror,
    ) -> None:
        super().__init__((), spec, index, decoder)
        self.mirror = mirror
        self._names = names
        self._segments = index["segments"]
        self._segment_bytes = self._segments[:, 2] - self._segments[:, 1]
        self.size_bytes = int(self._segment_bytes.sum())
        self._bytes = _Mapped(self._map)
        # How often each segment was dropped, and what that was when each sample was checked.
        self._drops = np.zeros(len(self._segments), np.int32)
        self._checked = np.full(len(self), -1, np.int32)

    def ensure(self, index_B: np.ndarray) -> None:
        unchecked_B = index_B[self._checked[index_B] != self._drops[self._file_of[index_B]]]
        if len(unchecked_B):
            self.bring(unchecked_B)
            for index in unchecked_B.tolist():
                self._check(index)
                self._checked[index] = self._drops[self._file_of[index]]

    def _check(self, index: int) -> None:
        if not self._is_sound(index):
            place = self.mirror.place
            log.info("sample %d of %s is not as it was written; it is fetched again", index, place)
            self.mirror.forget(self._segment(self._file_of[index]))
            self._unmap(self._file_of[[index]])
            super()._check(index)

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        self.ensure(index_B)
        numbers, number_B = np.unique(self._file_of[index_B], return_inverse=True)
        mapped = [self._bytes[number] for number in numbers.tolist()]
        addresses_B: np.ndarray = addresses_of(mapped)[number_B] + self._offsets[index_B]
        held_B = addresses_B.view(_Addresses)
        held_B.mapped = mapped
        return held_B

    def _note_damage(self, index: int) -> str:
        path = self.mirror.place.at(self._segment(self._file_of[index]).name)
        return (
            f"its bytes in {path} are not those that were written, and came twice; the file was "
            "changed or is damaged there: build the cache anew"
        )

    # What of the files is here

    def bring(self, index_B: np.ndarray) -> None:
        self._map(np.unique(self._file_of[index_B]).tolist())

    def drop(self, index_B: np.ndarray, *, from_cache: bool = False) -> None:
        # What others have brought, too, is mapped again when it is read.
        self._unmap(np.unique(self._file_of[index_B]))

    def release(self) -> None:
        self._unmap(np.arange(len(self._segments)))

    def _unmap(self, numbers: np.ndarray) -> None:
        self._drops[numbers] += 1
        for number in numbers.tolist():
            self._bytes.pop(number, None)

    def _segment(self, number: int) -> Segment:
        file, start, stop = self._segments[number].tolist()
        return Segment(self._names[file], start, stop)

    def _map(self, numbers: Sequence[int]) -> None:
        away = {self._segment(number): number for number in numbers if number not in self._bytes}
        if not away:
            return
        need_bytes = int(self._segment_bytes[[*self._bytes, *away.values()]].sum())
        if need_bytes > self.mirror.limit_bytes:
            raise CacheError(
                f"half of what is free in {self.mirror.local_cache}, "
                f"{format_bytes(self.mirror.limit_bytes)}, is too small: "
                f"this process needs {format_bytes(need_bytes)} at once. Free some, or use "
                "ChunkedLoader with a smaller memory_limit= or chunk_samples=, which needs two "
                "chunks at a time."
            )
        for segment, data in self.mirror.map(away).items():
            self._bytes[away[segment]] = data

    def __reduce__(self) -> tuple[object, ...]:
        return MirroredStore, (self._names, self.spec, self.index, self._decoder, self.mirror)


class _Mapped(dict[int, Bytes]):
    """Segments that are mapped, by number; one that is not is mapped when it is asked for."""

    def __init__(self, map_segments: Callable[[Sequence[int]], None]) -> None:
        super().__init__()
        self._map_segments = map_segments

    def __missing__(self, number: int) -> Bytes:
        self._map_segments([number])
        return self[number]


class _Addresses(np.ndarray):
    """Addresses in segments, which stay mapped as long as these are held."""

    mapped: list[Bytes]


def in_segments(
    index: Mapping[str, np.ndarray], spec: SampleSpec, mirror: Mirror
) -> dict[str, np.ndarray]:
    """The index of a ``Store`` over segments of files, made of one over the files.

    It has ``segments``, int64 (S, 3), too: file, first byte, and the one after the last.
    """
    segment_bytes = _SEGMENT_BYTES
    while sum(file.size_bytes for file in mirror.files) > segment_bytes * _MOST_SEGMENTS:
        segment_bytes *= 2
    sizes = index.get("sizes")
    stops = index["offsets"] + (spec.sample_bytes if sizes is None else sizes)
    order = np.lexsort((index["offsets"], index["files"]))
    files = index["files"][order]
    starts = index["offsets"][order]
    is_first = np.diff(files, prepend=-1) != 0
    is_first |= np.diff(starts // segment_bytes, prepend=-1) != 0
    firsts = np.flatnonzero(is_first)
    stops = np.maximum.reduceat(stops[order], firsts)
    segments = np.stack([files[firsts], starts[firsts], stops], axis=1)
    numbers = np.empty(len(order), np.int32)
    numbers[order] = np.cumsum(is_first) - 1
    offsets = index["offsets"] - segments[numbers, 1]
    return {**index, "files": numbers, "offsets": offsets, "segments": segments}
