"""Stores of samples behind a URL, fetched in segments and read from the local disk.

A segment is a run of whole samples of about 1 MiB. If whole files were fetched instead, the first
batch would wait for a quarter of a cache. And if the local folder had room for half of the cache,
the process would fetch everything twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fastdata.errors import CacheError, SampleError
from fastdata.machine.blocks import ArrayBlock
from fastdata.machine.units import format_bytes
from fastdata.pixels.arrays import Array, Bytes
from fastdata.pixels.samples import SampleSpec, addresses_of
from fastdata.sources.remote import MISSING, Place, stat_files
from fastdata.stores.disk import DiskStore
from fastdata.stores.segments import Segment, SegmentFolder
from fastdata.stores.store import Decoder

FETCH_BYTES = 64 << 20
"""The most bytes that a process fetches at once. With a latency of 50 ms, 1 GB/s needs 48 MiB."""
_SEGMENT_BYTES = 1 << 20
_MOST_SEGMENTS = 20_000
"""The most segments of a store, which become larger instead: a process may have 65,530 mappings."""
_FILE_SHIFT = 40
"""Number of low bits for a segment's number, in a key with the number of its file in the high bits.
"""


class MirroredStore(DiskStore):
    """Samples in segments of files behind a URL, which are fetched and mapped before they are read.

    Segments stay mapped until they are evicted. Whenever a segment has been mapped, its samples are
    compared with their checksums again. The segment of a sample that fails is fetched a second
    time.

    Args:
        place: folder of the files behind the URL.
        names: name of each file.
        folder: folder of the segments on the local disk.
        spec: see ``Store``.
        index: index with segments as files, and the column ``segments``, int64 (S, 3): the number
            of the file, the first byte, and the byte after the last.
        decoder: see ``Store``.
    """

    def __init__(
        self,
        place: Place,
        names: Sequence[str],
        folder: SegmentFolder,
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None,
    ) -> None:
        super().__init__((), spec, index, decoder)
        self._place = place
        self._names = names
        self._folder = folder
        self._segments = index["segments"]
        self._segment_bytes = self._segments[:, 2] - self._segments[:, 1]
        self.size_bytes = int(self._segment_bytes.sum())
        # How often each segment was evicted, and how often it had been when each of its samples was
        # last checked. If the two are equal, the mapped bytes are those that were checked. After an
        # eviction they may differ: the segment may have been deleted, and fetched with an error.
        self._evictions = np.zeros(len(self._segments), np.int32)
        self._checked = np.full(len(self), -1, np.int32)

    @classmethod
    def open(
        cls,
        place: Place,
        sizes: Mapping[str, int],
        spec: SampleSpec,
        index: Mapping[str, Array],
        decoder: Decoder | None,
        local_cache: Path,
    ) -> MirroredStore:
        """Open a store over files that never change.

        Args:
            place: folder of the files behind the URL.
            sizes: size in bytes of each file, by name.
            spec: see ``Store``.
            index: columns of the index with these files, see ``Store``.
            decoder: see ``Store``.
            local_cache: local folder for the segments of all caches.

        Raises:
            CacheError: a file is missing or has another size.
            OSError: the local folder cannot be written.
            RemoteError: the server cannot be reached.
        """
        stats = stat_files((place, name) for name in sizes)
        for (name, size), stat in zip(sizes.items(), stats, strict=True):
            if stat == MISSING:
                raise CacheError(f"{place.at(name)} is missing: build the cache again")
            found_bytes, _ = stat
            if found_bytes not in (-1, size):  # -1: the server does not send sizes
                raise CacheError(
                    f"{place.at(name)} has {found_bytes:,} bytes, but {size:,} were written: "
                    "build the cache again"
                )
        folder = SegmentFolder.open(local_cache, place.url)
        segments = ArrayBlock.of(_in_segments(index, sum(sizes.values())))
        return cls(place, list(sizes), folder, spec, segments, decoder)

    @property
    def limit_bytes(self) -> int:
        """The most bytes that segments may take on the local disk."""
        return self._folder.limit_bytes

    def ensure(self, index_B: Array) -> None:
        """Fetch and map the segments of samples, and check samples that were not checked since."""
        is_checked_B = self._checked[index_B] == self._evictions[self._file_of[index_B]]
        unchecked = index_B[~is_checked_B]
        if not len(unchecked):
            return
        self.load(unchecked)
        for index in unchecked.tolist():
            # Read before the check: another thread may evict the segment after it.
            evictions = self._evictions[self._file_of[index]]
            self._check(index)
            self._checked[index] = evictions

    def _check(self, index: int) -> None:
        try:
            super()._check(index)
        except SampleError:
            # The network or the local disk may have caused the error: fetch the segment again,
            # once. It is deleted before it is unmapped, or another thread could map the bad bytes
            # again.
            self._folder.delete(self._segment(self._file_of[index]))
            self.evict(np.array([index]))
            super()._check(index)

    def addresses(self, index_B: Array) -> Array:
        self.ensure(index_B)
        numbers, number_B = np.unique(self._file_of[index_B], return_inverse=True)
        found = self._map(numbers.tolist())
        mapped = [found[number] for number in numbers.tolist()]
        addresses_B: Array = addresses_of(mapped)[number_B] + self._offsets[index_B]
        # Another thread may evict these segments while the core reads them. The result keeps them
        # mapped.
        held_B = addresses_B.view(_Addresses)
        held_B.mapped = mapped
        return held_B

    def _note_damage(self, index: int) -> str:
        name = self._segment(self._file_of[index]).name
        return (
            f"its bytes in {self._place.at(name)} are not those that were written, also when "
            "fetched again; the file was changed or is damaged there: build the cache again"
        )

    # Which segments are mapped

    def load(self, index_B: Array) -> None:
        """Map the segments of samples until they are evicted; fetch those that are missing."""
        self._map(np.unique(self._file_of[index_B]).tolist())

    def evict(self, index_B: Array, *, from_cache: bool = False) -> None:
        """Unmap the segments of samples.

        A segment that other samples still need is mapped again when they are read.
        """
        numbers = np.unique(self._file_of[index_B])
        self._evictions[numbers] += 1
        for number in numbers.tolist():
            self._bytes.pop(number, None)

    def evict_all(self) -> None:
        """Unmap all segments. They stay on the local disk."""
        self.evict(np.arange(len(self)))

    def _file_bytes(self, number: int) -> Bytes:
        mapped = self._bytes.get(number)
        return self._map([number])[number] if mapped is None else mapped

    def _map(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Map and return segments; fetch those that are not on the local disk.

        Callers use the returned mappings, because another thread may evict segments at any moment.
        """
        known = self._bytes
        mapped = {}
        away = []
        for number in numbers:
            data = known.get(number)
            if data is None:
                away.append(number)
            else:
                mapped[number] = data
        if away:
            self._check_limit([*known, *away])
            found = self._find(away)
            missing = [number for number in away if number not in found]
            if missing:
                found |= self._fetch(missing)
            # Only the new ones are added. One that was mapped before may have been evicted in the
            # meantime, and would come back.
            known.update(found)
            mapped |= found
        return mapped

    def _check_limit(self, numbers: Sequence[int]) -> None:
        need_bytes = int(self._segment_bytes[numbers].sum())
        if need_bytes > self.limit_bytes:
            raise CacheError(
                f"this process needs {format_bytes(need_bytes)} of segments at once, but half of "
                f"the free space in {self._folder.path.parent} is "
                f"{format_bytes(self.limit_bytes)}. "
                "Free some space, or use ChunkedLoader with a smaller memory_limit= or "
                "chunk_samples=, which needs only two chunks at a time."
            )

    def _find(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Map the segments that are on the local disk."""
        found = {number: self._folder.find(self._segment(number)) for number in numbers}
        return {number: data for number, data in found.items() if data is not None}

    def _fetch(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Fetch segments, and map them.

        If two threads or processes need the same segment, the second waits until the first has it.
        """
        fetched: dict[int, Bytes] = {}
        at_once = max(int(FETCH_BYTES // self._segment_bytes[numbers].max()), 1)
        # Only one thread of a process fetches at a time, so that at most FETCH_BYTES come at once.
        # Every fetch takes this lock first and those of its segments second, so that no two wait
        # for each other.
        with self.index.block.hold(os.getpid()):
            for first in range(0, len(numbers), at_once):
                some = numbers[first : first + at_once]
                with self._folder.hold(some):
                    # Another process may have fetched some while this one waited.
                    fetched |= self._find(some)
                    missing = [number for number in some if number not in fetched]
                    fetched |= self._fetch_together(missing)
        return fetched

    def _fetch_together(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        self._folder.make_room(int(self._segment_bytes[numbers].sum()))
        segments = {number: self._segment(number) for number in numbers}
        coming = {number: self._place.submit(*segments[number]) for number in numbers}
        try:
            return {
                number: self._folder.keep(segments[number], future.result())
                for number, future in coming.items()
            }
        finally:  # after an error, the other segments are not needed
            for future in coming.values():
                future.cancel()

    def _segment(self, number: int) -> Segment:
        file, start, stop = self._segments[number].tolist()
        return Segment(self._names[file], start, stop)

    def __reduce__(self) -> tuple[object, ...]:
        return MirroredStore, (
            self._place,
            self._names,
            self._folder,
            self.spec,
            self.index,
            self._decoder,
        )


class _Addresses(np.ndarray):
    """Addresses in segments, which stay mapped as long as this array or a view of it exists."""

    mapped: list[Bytes]


def _in_segments(index: Mapping[str, Array], size_bytes: int) -> dict[str, Array]:
    """Turn an index over files, of ``size_bytes`` in total, into an index over their segments."""
    segment_bytes = max(_SEGMENT_BYTES, -(-size_bytes // _MOST_SEGMENTS))
    starts = index["offsets"]
    # A sample belongs to the segment of its first byte. A segment ends after its last sample.
    keys = (index["files"].astype(np.int64) << _FILE_SHIFT) + starts // segment_bytes
    found, numbers = np.unique(keys, return_inverse=True)
    first = np.full(len(found), size_bytes)
    last = np.zeros(len(found), np.int64)
    np.minimum.at(first, numbers, starts)
    np.maximum.at(last, numbers, starts + index["sizes"])
    segments = np.stack([found >> _FILE_SHIFT, first, last], axis=1)
    offsets = starts - first[numbers]
    return {**index, "files": numbers.astype(np.int32), "offsets": offsets, "segments": segments}
