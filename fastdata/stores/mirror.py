"""Samples of a cache behind a URL: what was needed lately lies on a local disk.

Below ``local_cache``, which all caches, ranks and runs of a machine share, a folder for each cache
holds its segments: runs of whole samples of its files, each a file of its own. What was needed
longest ago is deleted to make room; it stays readable for whoever has it mapped, so that nobody has
to say what is in use.

Several users may share ``local_cache``. Each has folders of its own in it, which only it can write
to: what another user could put there, such as a link, would be read, written or deleted instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from fastdata.errors import CacheError, RemoteError, SampleError
from fastdata.machine import format_bytes, parse_bytes
from fastdata.machine.shared import ArrayBlock
from fastdata.pixels.core import Array, Bytes
from fastdata.pixels.images import SampleSpec, addresses_of
from fastdata.sources.remote import (
    MISSING,
    Place,
    facts_of,
    made_by_this_user,
    private_folder,
)
from fastdata.stores.readers import Decoder, DiskStore, free_bytes, naming_full_disk

FETCH_BYTES = 64 << 20
"""On their way at once, where 50 ms at 1 GB/s are 48 MiB."""
_SHARE = 0.5
"""Of what is free on the disk and what is kept there, for all caches."""
_SEGMENT_BYTES = 1 << 20
_MOST_SEGMENTS = 20_000
"""Of a store that has larger ones, too: a process may have 65,530 mappings."""
_LOCKS = 256
_SLACK = 32
"""Room is made for a 32nd of the limit at once: to find what was needed longest ago is a look at
every segment."""
_FOLDER = "mirror-"
_FILE_SHIFT = 40
"""Of a file's number, in one number with that of a segment."""


class MirroredStore(DiskStore):
    """Samples in segments of files behind a URL, which are fetched and mapped before they are read.

    They stay mapped until they are dropped. Checksums are looked at each time that a segment was
    mapped; a sample that fails is fetched once more.

    Args:
        place: of the files.
        names: of the files.
        spec: as ``Store`` has it, and ``decoder``.
        index: over segments, with ``segments``, int64 (S, 3): file, first byte, and the one after
            the last.
        folder: of the segments, in the one that all stores of a machine share.
        limit_bytes: the most that may lie in that. What some have mapped and others have deleted
            takes room beside it.
    """

    def __init__(
        self,
        place: Place,
        names: Sequence[str],
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None,
        folder: Path,
        limit_bytes: int,
    ) -> None:
        super().__init__((), spec, index, decoder)
        self.limit_bytes = limit_bytes
        self._place = place
        self._names = names
        self._folder = folder
        self._segments = index["segments"]
        self._segment_bytes = self._segments[:, 2] - self._segments[:, 1]
        self.size_bytes = int(self._segment_bytes.sum())
        self._bytes = _Mapped()
        self._bytes.store = weakref.proxy(self)
        # How often each segment was dropped, and what that was when each sample was checked.
        self._drops = np.zeros(len(self._segments), np.int32)
        self._checked = np.full(len(self), -1, np.int32)
        self._spare_bytes = 0

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
        """Of files of these sizes, which never change under their names; ``index`` is over them.

        Raises:
            CacheError: a file is missing or has another size.
            OSError: the folder cannot be written.
            RemoteError: the place cannot be reached.
        """
        there = {}
        with contextlib.suppress(RemoteError):  # a server may list no folders, or no sizes
            there = place.find().result()
        unsure = [name for name in sizes if there.get(name, MISSING)[0] != sizes[name]]
        asked = facts_of((place, name) for name in unsure)
        for name, found in zip(unsure, asked, strict=True):
            if found == MISSING:
                raise CacheError(f"{place.at(name)} is missing: build the cache again")
            if found[0] not in (-1, sizes[name]):
                raise CacheError(
                    f"{place.at(name)} has {found[0]:,} bytes where {sizes[name]:,} were written: "
                    "build the cache again"
                )
        local_cache.mkdir(parents=True, exist_ok=True)
        private_folder(_locks_in(local_cache))
        digest = hashlib.sha256(f"{_user()} {place.url}".encode()).hexdigest()
        folder = private_folder(local_cache / f"{_FOLDER}{digest[:16]}")
        kept_bytes = sum(each_bytes for _, each_bytes, _ in _list_segments(local_cache))
        limit_bytes = parse_bytes(_SHARE, of=free_bytes(local_cache) + kept_bytes)
        segments = ArrayBlock.of(_in_segments(index, spec, sum(sizes.values())))
        return cls(place, list(sizes), spec, segments, decoder, folder, limit_bytes)

    def ensure(self, index_B: Array) -> None:
        unchecked_B = index_B[self._checked[index_B] != self._drops[self._file_of[index_B]]]
        if len(unchecked_B):
            self.bring(unchecked_B)
            for index in unchecked_B.tolist():
                self._check(index)
                self._checked[index] = self._drops[self._file_of[index]]

    def _check(self, index: int) -> None:
        try:
            super()._check(index)
        except SampleError:
            self._path(self._file_of[index]).unlink(missing_ok=True)
            self.drop(np.array([index]))
            super()._check(index)

    def addresses(self, index_B: Array) -> Array:
        self.ensure(index_B)
        numbers, number_B = np.unique(self._file_of[index_B], return_inverse=True)
        mapped = [self._bytes[number] for number in numbers.tolist()]
        addresses_B: Array = addresses_of(mapped)[number_B] + self._offsets[index_B]
        held_B = addresses_B.view(_Addresses)
        held_B.mapped = mapped
        return held_B

    def _note_damage(self, index: int) -> str:
        name, *_ = self._segment(self._file_of[index])
        return (
            f"its bytes in {self._place.at(name)} are not those that were written, and came twice; "
            "the file was changed or is damaged there: build the cache anew"
        )

    # What of the files is mapped

    def bring(self, index_B: Array) -> None:
        self._map(np.unique(self._file_of[index_B]).tolist())

    def drop(self, index_B: Array, *, from_cache: bool = False) -> None:
        # What others have brought, too, is mapped again when it is read.
        numbers = np.unique(self._file_of[index_B])
        self._drops[numbers] += 1
        for number in numbers.tolist():
            self._bytes.pop(number, None)

    def release(self) -> None:
        self.drop(np.arange(len(self)))

    def _map(self, numbers: Sequence[int]) -> None:
        """Map segments; what is not here is fetched.

        Two threads or processes never fetch the same segment: the second waits for the first.
        """
        away = [number for number in numbers if number not in self._bytes]
        if not away:
            return
        need_bytes = int(self._segment_bytes[[*self._bytes, *away]].sum())
        if need_bytes > self.limit_bytes:
            raise CacheError(
                f"half of what is free in {self._folder.parent}, {format_bytes(self.limit_bytes)}, "
                f"is too small: this process needs {format_bytes(need_bytes)} at once. Free some, "
                "or use ChunkedLoader with a smaller memory_limit= or chunk_samples=, which needs "
                "two chunks at a time."
            )
        missing = self._map_local(away)
        if not missing:
            return
        with self.index.block.hold(os.getpid()):  # of the threads of a process one at a time
            at_once = max(FETCH_BYTES // self._segment_bytes[missing].max(), 1)
            for first in range(0, len(missing), at_once):
                self._fetch(missing[first : first + at_once])

    def _map_local(self, numbers: Sequence[int]) -> list[int]:
        """Map the segments that are here; gives the others."""
        missing = []
        for number in numbers:
            size_bytes = int(self._segment_bytes[number])
            if not size_bytes:  # of samples without elements: nothing can be mapped
                self._bytes[number] = np.zeros(0, np.uint8)
                continue
            path = self._path(number)
            try:
                if not stat.S_ISREG(path.lstat().st_mode):  # a link: its target is not ours
                    raise FileNotFoundError(path)
                os.utime(path)
                self._bytes[number] = _map_file(path, size_bytes)
            # RuntimeError: deleted meanwhile, or cut short as the machine lost its power.
            except (FileNotFoundError, RuntimeError):
                missing.append(number)
        return missing

    # What of the files is here

    def _segment(self, number: int) -> tuple[str, int, int]:
        file, start, stop = self._segments[number].tolist()
        return self._names[file], start, stop

    def _path(self, number: int) -> Path:
        name, start, stop = self._segment(number)
        return self._folder / f"{name}.{start}-{stop}"

    def _fetch(self, numbers: Sequence[int]) -> None:
        with contextlib.ExitStack() as cleanup:
            # In one order, or two would wait for each other.
            for lock in sorted({number % _LOCKS for number in numbers}):
                cleanup.enter_context(FileLock(_locks_in(self._folder.parent) / str(lock)))
            # Whoever had the locks may have fetched some.
            missing = self._map_local(numbers)
            self._make_room(int(self._segment_bytes[missing].sum()))
            coming = {number: self._place.submit(*self._segment(number)) for number in missing}
            for future in coming.values():
                cleanup.callback(future.cancel)
            for number, future in coming.items():
                self._bytes[number] = self._keep(self._path(number), future.result())

    def _keep(self, path: Path, data: bytes) -> Bytes:
        # Which a killed process leaves to the next one that fetches it.
        part = path.with_name(f"{path.name}.part")
        with naming_full_disk(self._folder):
            private_folder(self._folder)
            part.unlink(missing_ok=True)
            with part.open("xb") as file:  # which follows no link
                file.write(data)
        mapped = _map_file(part, len(data))
        part.rename(path)
        return mapped

    def _make_room(self, size_bytes: int) -> None:
        """Delete what was needed longest ago, of whatever cache, where there is no room."""
        self._spare_bytes -= size_bytes
        if self._spare_bytes >= 0:
            return
        spare_bytes = max(size_bytes, self.limit_bytes // _SLACK)
        with FileLock(_locks_in(self._folder.parent) / "room"):
            segments = sorted(_list_segments(self._folder.parent))
            kept_bytes = sum(each_bytes for _, each_bytes, _ in segments)
            for _, each_bytes, path in segments:
                if kept_bytes + spare_bytes <= self.limit_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    kept_bytes -= each_bytes
        self._spare_bytes = spare_bytes - size_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return MirroredStore, (
            self._place,
            self._names,
            self.spec,
            self.index,
            self._decoder,
            self._folder,
            self.limit_bytes,
        )


class _Mapped(dict[int, Bytes]):
    """Segments that are mapped, by number; one that is not is mapped when it is asked for."""

    store: MirroredStore

    def __missing__(self, number: int) -> Bytes:
        self.store._map([number])
        return self[number]


class _Addresses(np.ndarray):
    """Addresses in segments, which stay mapped as long as these are held."""

    mapped: list[Bytes]


def _map_file(path: Path, size_bytes: int) -> Bytes:
    """Map a file, without a descriptor that stays open; RuntimeError where it is shorter."""
    data = torch.from_file(str(path), size=size_bytes, dtype=torch.uint8).numpy()
    data.flags.writeable = False
    return data


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else ""


def _locks_in(local_cache: Path) -> Path:
    return local_cache / f".locks-{_user()}"


def _list_segments(local_cache: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield of each segment of this user when it was needed, its bytes and its path.

    No link is followed: what is listed may be deleted.
    """
    for folder in local_cache.glob(f"{_FOLDER}*"):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.lstat().st_mode) or not made_by_this_user(folder):
                continue
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    facts = path.lstat()
                    yield facts.st_mtime_ns, facts.st_size, path


def _in_segments(index: Mapping[str, Array], spec: SampleSpec, size_bytes: int) -> dict[str, Array]:
    """The index of a ``MirroredStore``, made of one over files of so many bytes."""
    segment_bytes = max(_SEGMENT_BYTES, -(-size_bytes // _MOST_SEGMENTS))
    starts = index["offsets"]
    sizes = index.get("sizes")
    stops = starts + (spec.sample_bytes if sizes is None else sizes)
    keys = (index["files"].astype(np.int64) << _FILE_SHIFT) + starts // segment_bytes
    pieces, numbers = np.unique(keys, return_inverse=True)
    begins = np.full(len(pieces), size_bytes)
    ends = np.zeros(len(pieces), np.int64)
    np.minimum.at(begins, numbers, starts)
    np.maximum.at(ends, numbers, stops)
    segments = np.stack([pieces >> _FILE_SHIFT, begins, ends], axis=1)
    offsets = starts - begins[numbers]
    return {**index, "files": numbers.astype(np.int32), "offsets": offsets, "segments": segments}
