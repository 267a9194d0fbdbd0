"""Stores of samples behind a URL, fetched in segments and read from the local disk.

A segment is a run of whole samples of about 1 MiB. To fetch whole files instead makes the first
batch wait for a quarter of a cache, and a local folder of half its size fetch everything twice.
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
"""The most that a process fetches at once: 50 ms of latency at 1 GB/s are 48 MiB."""
_SEGMENT_BYTES = 1 << 20
_MOST_SEGMENTS = 20_000
"""A store that would have more has larger ones: a process may have 65,530 mappings."""
_FILE_SHIFT = 40
"""Bits of a segment's number, in a key that has the number of its file above them."""


class MirroredStore(DiskStore):
    """Samples in segments of files behind a URL, which are fetched and mapped before they are read.

    Segments stay mapped until they are evicted. Checksums are compared each time that a segment was
    mapped; a sample that fails is fetched once more.

    Args:
        place: of the files.
        names: of the files.
        folder: of the segments.
        spec: as ``Store`` has it.
        index: over segments, with ``segments``, int64 (S, 3): number of the file, first byte, and
            the one behind the last.
        decoder: as ``Store`` has it.
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
        # How often each segment was evicted; and of each sample that number at its last check. If
        # they are equal, the bytes that are mapped are those that were checked: what was evicted
        # may have been deleted, and fetched again with another error.
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
        """Open a store over files of these sizes, which never change; ``index`` is over the files.

        Raises:
            CacheError: a file is missing or has another size.
            OSError: the folder cannot be written.
            RemoteError: the place cannot be reached.
        """
        stats = stat_files((place, name) for name in sizes)
        for (name, size), stat in zip(sizes.items(), stats, strict=True):
            if stat == MISSING:
                raise CacheError(f"{place.at(name)} is missing: build the cache again")
            found_bytes, _ = stat
            if found_bytes not in (-1, size):  # -1: the server tells no sizes
                raise CacheError(
                    f"{place.at(name)} has {found_bytes:,} bytes where {size:,} were written: "
                    "build the cache again"
                )
        folder = SegmentFolder.open(local_cache, place.url)
        segments = ArrayBlock.of(_in_segments(index, sum(sizes.values())))
        return cls(place, list(sizes), folder, spec, segments, decoder)

    @property
    def limit_bytes(self) -> int:
        """The most that segments may take on the local disk."""
        return self._folder.limit_bytes

    def ensure(self, index_B: Array) -> None:
        """Fetch and map the segments of samples, and check those that were not since then."""
        is_checked_B = self._checked[index_B] == self._evictions[self._file_of[index_B]]
        unchecked = index_B[~is_checked_B]
        if not len(unchecked):
            return
        self.load(unchecked)
        for index in unchecked.tolist():
            self._check(index)
            self._checked[index] = self._evictions[self._file_of[index]]

    def _check(self, index: int) -> None:
        try:
            super()._check(index)
        except SampleError:
            # The error may be of the way here, or of the local disk: fetch the segment again, once.
            # Deleted before it is unmapped: another thread could map the same bytes in between.
            self._folder.delete(self._segment(self._file_of[index]))
            self.evict(np.array([index]))
            super()._check(index)

    def addresses(self, index_B: Array) -> Array:
        self.ensure(index_B)
        numbers, number_B = np.unique(self._file_of[index_B], return_inverse=True)
        found = self._map(numbers.tolist())
        mapped = [found[number] for number in numbers.tolist()]
        addresses_B: Array = addresses_of(mapped)[number_B] + self._offsets[index_B]
        # Another thread may evict these segments while the core reads them.
        held_B = addresses_B.view(_Addresses)
        held_B.mapped = mapped
        return held_B

    def _note_damage(self, index: int) -> str:
        name = self._segment(self._file_of[index]).name
        return (
            f"its bytes in {self._place.at(name)} are not those that were written, and came twice; "
            "the file was changed or is damaged there: build the cache again"
        )

    # Which segments are mapped

    def load(self, index_B: Array) -> None:
        """Map the segments of samples until they are evicted, and fetch those that are not here."""
        self._map(np.unique(self._file_of[index_B]).tolist())

    def evict(self, index_B: Array, *, from_cache: bool = False) -> None:
        """Unmap the segments of samples.

        One that other samples still need is mapped again when they are read.
        """
        numbers = np.unique(self._file_of[index_B])
        self._evictions[numbers] += 1
        for number in numbers.tolist():
            self._bytes.pop(number, None)

    def evict_all(self) -> None:
        """Unmap all segments; those on the local disk stay there."""
        self.evict(np.arange(len(self)))

    def _file_bytes(self, number: int) -> Bytes:
        mapped = self._bytes.get(number)
        return self._map([number])[number] if mapped is None else mapped

    def _map(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Map segments, and fetch those that are not on the local disk.

        They are returned: another thread may evict them at any moment.
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
            # Not those that were mapped before: they would come back if they were evicted
            # meanwhile.
            known.update(found)
            mapped |= found
        return mapped

    def _check_limit(self, numbers: Sequence[int]) -> None:
        need_bytes = int(self._segment_bytes[numbers].sum())
        if need_bytes > self.limit_bytes:
            raise CacheError(
                f"half of what is free in {self._folder.path.parent}, "
                f"{format_bytes(self.limit_bytes)}, "
                f"is too small: this process needs {format_bytes(need_bytes)} at once. Free some, "
                "or use ChunkedLoader with a smaller memory_limit= or chunk_samples=, which needs "
                "two chunks at a time."
            )

    def _find(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Map the segments that are on the local disk."""
        found = {number: self._folder.find(self._segment(number)) for number in numbers}
        return {number: data for number, data in found.items() if data is not None}

    def _fetch(self, numbers: Sequence[int]) -> dict[int, Bytes]:
        """Fetch segments, and map them.

        Two threads or processes never fetch the same segment: the second one waits for the first.
        """
        fetched: dict[int, Bytes] = {}
        at_once = max(int(FETCH_BYTES // self._segment_bytes[numbers].max()), 1)
        # One thread of a process at a time, so that it fetches no more than FETCH_BYTES at once.
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
        finally:  # after an error the others are not needed
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
    """Addresses in segments, which stay mapped as long as this array, or a view of it, lives."""

    mapped: list[Bytes]


def _in_segments(index: Mapping[str, Array], size_bytes: int) -> dict[str, Array]:
    """Turn an index over files, of ``size_bytes`` in total, into one over their segments."""
    segment_bytes = max(_SEGMENT_BYTES, -(-size_bytes // _MOST_SEGMENTS))
    starts = index["offsets"]
    # A sample is in the segment that its first byte is in, and each segment ends with its last one.
    keys = (index["files"].astype(np.int64) << _FILE_SHIFT) + starts // segment_bytes
    found, numbers = np.unique(keys, return_inverse=True)
    first = np.full(len(found), size_bytes)
    last = np.zeros(len(found), np.int64)
    np.minimum.at(first, numbers, starts)
    np.maximum.at(last, numbers, starts + index["sizes"])
    segments = np.stack([found >> _FILE_SHIFT, first, last], axis=1)
    offsets = starts - first[numbers]
    return {**index, "files": numbers.astype(np.int32), "offsets": offsets, "segments": segments}
