"""Segments of remote caches on the local disk: stored, mapped, and deleted to make room.

All caches, ranks and runs of a machine share the folder ``local_cache``. It has a folder for each
cache, in which every segment is a file. The segments that were unused for longest are deleted to
make room. A deleted segment stays readable for every process that has it mapped, so no process has
to announce what it uses.

Several users may share ``local_cache``. Each of them has folders of their own in it. In a common
folder, another user could place a link, and this process would read, overwrite or delete its
target.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock

from fastdata.machine.units import parse_bytes
from fastdata.pixels.arrays import Bytes
from fastdata.sources.local_files import made_by_this_user, private_folder
from fastdata.stores.disk_file import free_bytes, naming_full_disk

_SHARE = 0.5
"""Share of the free space that all caches may take; space of their segments counts as free."""
_LOCKS = 256
"""Number of lock files. A segment uses that of its number modulo this."""
_SLACK = 32
"""Room for a 32nd of the limit is made at once, because to find the oldest segments, all have to be
listed."""
_FOLDER = "mirror-"


class Segment(NamedTuple):
    """A run of whole samples in a file of a cache: bytes ``start`` to ``stop``."""

    name: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class SegmentFolder:
    """The segments of one cache on the local disk.

    Attributes:
        path: path of the folder.
        limit_bytes: the most bytes that the segments of all caches may take. Deleted segments that
            some process still has mapped take space in addition.
    """

    path: Path
    limit_bytes: int
    # Bytes of room that this process has made and still has to use. Pickles do not include it:
    # another process would use the same room a second time.
    _spare_bytes: int = 0

    @classmethod
    def open(cls, local_cache: Path, url: str) -> SegmentFolder:
        """Make the folder for the cache at a URL.

        Raises:
            OSError: the folder cannot be written, or others can write to it.
        """
        local_cache.mkdir(parents=True, exist_ok=True)
        private_folder(_locks_in(local_cache))
        digest = hashlib.sha256(f"{_user()} {url}".encode()).hexdigest()
        path = private_folder(local_cache / f"{_FOLDER}{digest[:16]}")
        kept_bytes = sum(size_bytes for _, size_bytes, _ in _list_segments(local_cache))
        return cls(path, parse_bytes(_SHARE, of=free_bytes(local_cache) + kept_bytes))

    def find(self, segment: Segment) -> Bytes | None:
        """Map a segment, and record the time of its use; return None if it is not on the disk."""
        if not segment.size_bytes:  # samples without elements: an empty file cannot be mapped
            return np.zeros(0, np.uint8)
        path = self._path(segment)
        try:
            if not stat.S_ISREG(path.lstat().st_mode):  # a link, whose target is not ours
                return None
            # Another process may delete the file at any moment. Then one of these lines fails, and
            # the segment is fetched again. Once the file is mapped, its bytes stay.
            os.utime(path)
            return _map_file(path, segment.size_bytes)
        # torch's RuntimeError: another process has just deleted the file, or a crash cut it off.
        except (FileNotFoundError, RuntimeError):
            return None

    def keep(self, segment: Segment, data: bytes) -> Bytes:
        """Write the bytes of a fetched segment, and map them."""
        path = self._path(segment)
        # Written and mapped under another name first: under its own name a file is always complete,
        # and may be deleted to make room at any moment. If this process is killed here, the next
        # one that fetches the segment removes the part.
        part = path.with_name(f"{path.name}.part")
        with naming_full_disk(self.path):
            private_folder(self.path)
            part.unlink(missing_ok=True)
            with part.open("xb") as file:  # mode x follows no link
                file.write(data)
        # Another process may delete the part to make room before it is mapped or renamed. Then the
        # bytes in memory are used.
        with contextlib.suppress(FileNotFoundError, RuntimeError):
            mapped = _map_file(part, len(data))
            part.rename(path)
            return mapped
        return np.frombuffer(data, np.uint8)

    def delete(self, segment: Segment) -> None:
        self._path(segment).unlink(missing_ok=True)

    @contextlib.contextmanager
    def hold(self, numbers: Iterable[int]) -> Iterator[None]:
        """Hold the locks of segments with these numbers, against all processes of the machine."""
        locks = _locks_in(self.path.parent)
        with contextlib.ExitStack() as held:
            # All processes lock in the same order. Otherwise two could wait for each other.
            for number in sorted({number % _LOCKS for number in numbers}):
                held.enter_context(FileLock(locks / str(number)))
            yield

    def make_room(self, size_bytes: int) -> None:
        """Delete the segments that were unused for longest, until ``size_bytes`` have room."""
        self._spare_bytes -= size_bytes
        if self._spare_bytes >= 0:
            return
        spare_bytes = max(size_bytes, self.limit_bytes // _SLACK)
        # Only one process at a time: two would delete twice as much as is needed.
        with FileLock(_locks_in(self.path.parent) / "room"):
            segments = sorted(_list_segments(self.path.parent))
            kept_bytes = sum(each_bytes for _, each_bytes, _ in segments)
            for _, each_bytes, path in segments:
                if kept_bytes + spare_bytes <= self.limit_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    kept_bytes -= each_bytes
        self._spare_bytes = spare_bytes - size_bytes

    def _path(self, segment: Segment) -> Path:
        return self.path / f"{segment.name}.{segment.start}-{segment.stop}"

    def __reduce__(self) -> tuple[object, ...]:
        return SegmentFolder, (self.path, self.limit_bytes)


def _map_file(path: Path, size_bytes: int) -> Bytes:
    """Map a file without keeping its descriptor open.

    Raises:
        RuntimeError: the file is missing or shorter than ``size_bytes``.
    """
    data = torch.from_file(str(path), size=size_bytes, dtype=torch.uint8).numpy()
    data.flags.writeable = False
    return data


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else ""


def _locks_in(local_cache: Path) -> Path:
    return local_cache / f".locks-{_user()}"


def _list_segments(local_cache: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield the time of last use, the size in bytes and the path of each segment of this user.

    Links are not followed, because the listed files may be deleted.
    """
    for folder in local_cache.glob(f"{_FOLDER}*"):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.lstat().st_mode) or not made_by_this_user(folder):
                continue
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    yield found.st_mtime_ns, found.st_size, path
