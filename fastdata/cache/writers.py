"""Writing samples into shards, from any worker; see ``fastdata.stores.writers.Writer``."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastdata.blocks import ArrayBlock
from fastdata.cache.manifest import Part, Shard, write_array
from fastdata.cache.opening import open_part
from fastdata.codecs import Codec, SourceDecoder
from fastdata.errors import CacheError
from fastdata.locks import ByteLocks
from fastdata.memory import format_bytes
from fastdata.spec import SampleSpec
from fastdata.stores.base import Store
from fastdata.stores.disk import checksum
from fastdata.stores.writers import Place, Places, ShapesDifferError

__all__ = ["HeapWriter", "TableWriter", "free_bytes"]

SHARD_BYTES = 128 << 20
MAX_SHARDS = 128
"""Of a part as first written: every process keeps a descriptor open for each, and 1,024 is a usual limit."""
HEAD_BYTES = 128
"""Before the first row of a table: what NumPy writes for such arrays, a multiple of 64."""
_PENDING_BYTES = 4 << 20
"""Of neighbouring rows that are written at once, at most."""
_ALIGN_BYTES = 64
_SHARD_BITS = 44
"""A place in a heap is the number of its shard, and below so many bits the byte there."""


class _Pending(threading.local):
    """Neighbouring rows that a thread has yet to write."""

    def __init__(self) -> None:
        self.first, self.count = 0, 0
        self.rows: np.ndarray | None = None


class TableWriter:
    """Raw samples of one shape: sample i goes to row i of a row of ``.npy`` files.

    The files are reserved at once, so that a full disk is found before anything is prepared.

    Args:
        folder: where to write.
        part: which part of the samples this is.
        spec: dense.
        length: number of samples.
        first_shard: number of the first file.

    Raises:
        CacheError: the disk is too full.
    """

    rows: np.ndarray

    def __init__(self, folder: Path, part: int, spec: SampleSpec, length: int, *, first_shard: int = 0) -> None:
        self.spec, self.part = spec, Part(name=f"part{part}", spec=spec, codec=None, shards=())
        self._folder, self._length = folder, length
        self._pending = _Pending()
        shard_bytes = max(SHARD_BYTES, spec.sample_bytes * length // MAX_SHARDS)
        self._rows = max(shard_bytes // spec.sample_bytes, 1)
        self._names = [f"part{part}-{first_shard + k:05}" for k in range(-(-length // self._rows))]
        self._sums = ArrayBlock({"sums": np.zeros(max(length, 1), np.uint64)}, seal=False)
        try:
            _check_room(folder, spec.sample_bytes * length)
            for k, name in enumerate(self._names):
                self._reserve(f"{name}.npy", min(self._rows, length - k * self._rows))
        except BaseException:
            self._sums.close()
            raise

    def _reserve(self, name: str, rows: int) -> None:
        assert self.spec.shape is not None
        head = io.BytesIO()
        what = {"descr": np.dtype(self.spec.dtype).str, "fortran_order": False, "shape": (rows, *self.spec.shape)}
        np.lib.format.write_array_header_1_0(head, what)
        assert len(head.getbuffer()) == HEAD_BYTES, "NumPy writes longer headers only for more dimensions than these"
        size_bytes = HEAD_BYTES + rows * self.spec.sample_bytes
        with (self._folder / name).open("wb") as file, _naming_full_disk(self._folder):
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            else:
                os.truncate(file.fileno(), size_bytes)
            file.write(head.getbuffer())

    def write(self, index: int, array: np.ndarray) -> Place:
        """Store sample ``index``.

        Raises:
            ShapesDifferError: it is not of the common shape.
            CacheError: the disk is full.
        """
        if array.shape != self.spec.shape:
            raise ShapesDifferError(f"sample {index} has shape {array.shape}, those before it {self.spec.shape}")
        pending, size_bytes = self._pending, self.spec.sample_bytes
        if pending.rows is None:
            pending.rows = np.empty((max(_PENDING_BYTES // size_bytes, 1), size_bytes), np.uint8)
        if index != pending.first + pending.count or index % self._rows == 0 or pending.count == len(pending.rows):
            self.flush()
            pending.first = index
        row_B = pending.rows[pending.count]
        row_B[:] = _bytes_of(array)
        pending.count += 1
        self._sums["sums"][index] = checksum(row_B)
        return Place(index, array.nbytes, array.shape)

    def flush(self) -> None:
        """See ``Writer``. Neighbours are written at once: the system then caches and maps them in larger pieces.

        Raises:
            CacheError: the disk is full.
        """
        pending = self._pending
        if pending.rows is None or not pending.count:
            return
        shard, row = divmod(pending.first, self._rows)
        offset = HEAD_BYTES + row * self.spec.sample_bytes
        _write_at(self._folder / f"{self._names[shard]}.npy", offset, pending.rows[: pending.count].reshape(-1))
        pending.count = 0

    def live(self, index: ArrayBlock) -> Store:
        """Not for caches: they are read when they are complete."""
        raise TypeError("a cache is read when it is complete")

    def finish(self, places: Places) -> Store:
        """See ``Writer``; ``part`` and ``rows`` say afterwards what was written, and where."""
        sums, shards = self._sums["sums"], []
        for k, name in enumerate(self._names):
            first, last = k * self._rows, min((k + 1) * self._rows, self._length)
            path = self._folder / f"{name}.npy"
            _sync(path)
            arrays = {"sums": write_array(self._folder, f"{name}-sums.npy", sums[first:last])}
            shards.append(Shard(name=path.name, size_bytes=path.stat().st_size, rows=last - first, arrays=arrays))
        self.part, self.rows = replace(self.part, shards=tuple(shards)), places.starts
        self._sums.close()
        return open_part(self._folder, self.part, self.rows, None)

    def close(self) -> None:
        """Give up; the files are the folder's. Idempotent."""
        self._sums.close()


class HeapWriter:
    """Samples of any sizes end to end in ``.bin`` files: encoded ones, files as they are, or raw ones of many shapes.

    Args:
        folder: where to write.
        part: which part of the samples this is.
        spec: of the samples as they are served.
        codec: encodes them; None keeps them raw. A ``SourceDecoder`` keeps the bytes of files as they are.
        length: number of samples.
        expected_bytes: about what all of them take.
        settings: of the codec, for the manifest.
        is_certain: whether the spec of files kept as they are is dense for sure; else every file is opened once.
        first_shard: number of the first file.

    Raises:
        CacheError: the disk is too full.
    """

    def __init__(
        self,
        folder: Path,
        part: int,
        spec: SampleSpec,
        codec: Codec | SourceDecoder | None,
        *,
        length: int,
        expected_bytes: int,
        settings: dict[str, Any] | None,
        is_certain: bool = False,
        first_shard: int = 0,
    ) -> None:
        self._is_certain = is_certain
        is_source = isinstance(codec, SourceDecoder)
        self.spec = SampleSpec(shape=None, dtype="uint8", form="array") if is_source else spec
        self.part = Part(name=f"part{part}", spec=spec, codec=settings, shards=())
        self._folder, self._codec, self._name, self._first_shard = folder, codec, f"part{part}", first_shard
        self._shard_bytes = max(SHARD_BYTES, expected_bytes // MAX_SHARDS)
        self._align_bytes = _ALIGN_BYTES if codec is None else 1
        _check_room(folder, expected_bytes)
        self._block = ArrayBlock(
            {
                "end": np.zeros(1, np.int64),
                "sums": np.zeros(max(length, 1), np.uint64),
                "starts": np.full(max(length, 1), -1, np.int64),
            },
            seal=False,
        )
        self._locks = ByteLocks(self._block.block)

    def write(self, index: int, array: np.ndarray) -> Place:
        """Encode a sample and store it behind those already there.

        Raises:
            ShapesDifferError: it is not of the common shape.
            CacheError: the disk is full.
        """
        shape, data = self._encode(array)
        if self.part.spec.shape not in (None, shape):
            raise ShapesDifferError(f"sample {index} has shape {shape}, those before it {self.part.spec.shape}")
        with self._locks.hold(0):
            start = int(self._block["end"][0])
            end = start + -(-data.nbytes // self._align_bytes) * self._align_bytes
            if (end & ((1 << _SHARD_BITS) - 1)) >= self._shard_bytes:
                end = ((end >> _SHARD_BITS) + 1) << _SHARD_BITS
            self._block["end"][0] = end
        _write_at(self._path(start >> _SHARD_BITS), start & ((1 << _SHARD_BITS) - 1), data)
        self._block["sums"][index] = checksum(data)
        self._block["starts"][index] = start
        return Place(start, data.nbytes, shape)

    def _encode(self, array: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
        """Shape of the sample as it is served, and the bytes to keep."""
        if self._codec is None:
            return array.shape, _bytes_of(array)
        if not isinstance(self._codec, SourceDecoder):
            return array.shape, np.frombuffer(self._codec.encode(np.ascontiguousarray(array)), np.uint8)
        common = self.part.spec.shape
        shape = common if self._is_certain and common is not None else self._codec.sample(array.data).shape
        return shape, _bytes_of(array)

    def _path(self, shard: int) -> Path:
        return self._folder / f"{self._name}-{self._first_shard + shard:05}.bin"

    def flush(self) -> None:
        """See ``Writer``: everything is there at once."""

    def live(self, index: ArrayBlock) -> Store:
        """Not for caches: they are read when they are complete."""
        raise TypeError("a cache is read when it is complete")

    def finish(self, places: Places) -> Store:
        """See ``Writer``; ``part`` and ``rows`` say afterwards what was written, and where."""
        starts = self._block["starts"]
        by_start = np.argsort(starts, kind="stable")
        sums = self._block["sums"][by_start[np.searchsorted(starts, places.starts, sorter=by_start)]]
        order = np.argsort(places.starts, kind="stable")
        shards = []
        numbers = places.starts[order] >> _SHARD_BITS
        for number in range(int(numbers[-1]) + 1 if len(numbers) else 0):
            chosen = order[np.searchsorted(numbers, number) : np.searchsorted(numbers, number, "right")]
            path = self._path(number)
            path.touch()
            _sync(path)
            columns = {
                "sums": sums[chosen],
                "offsets": places.starts[chosen] & ((1 << _SHARD_BITS) - 1),
                "sizes": places.sizes[chosen],
                "shapes": places.shapes[chosen],
            }
            arrays = {name: write_array(self._folder, f"{path.stem}-{name}.npy", it) for name, it in columns.items()}
            shards.append(Shard(name=path.name, size_bytes=path.stat().st_size, rows=len(chosen), arrays=arrays))
        self.part = replace(self.part, shards=tuple(shards))
        self.rows = np.empty(len(order), np.int64)
        self.rows[order] = np.arange(len(order))
        self._block.close()
        return open_part(self._folder, self.part, self.rows, self._codec)

    def close(self) -> None:
        """Give up; the files are the folder's. Idempotent."""
        self._block.close()


@contextlib.contextmanager
def _naming_full_disk(folder: Path) -> Iterator[None]:
    """Turn the system's complaint about a full disk into what is free, and the cure.

    Raises:
        CacheError: in place of the system's own error.
    """
    try:
        yield
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise CacheError(
                f"a file of the cache in {folder.parent} would be larger than this process may write. Raise the limit "
                "(ulimit -f), or give codec='zstd' or a smaller resize=."
            ) from problem
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _full(folder, f"it ran out of room ({problem.strerror})") from problem


def _full(folder: Path, what: str) -> CacheError:
    return CacheError(
        f"the disk of {folder.parent} is too full for the cache: {what}, {format_bytes(free_bytes(folder))} are free. "
        "Free some space, or give another cache_dir=, a smaller resize=, or codec='zstd', which about halves raw "
        "samples."
    )


def free_bytes(folder: Path) -> int:
    """What the disk of a folder, or of the nearest folder above it that there is, can still take."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not hasattr(os, "statvfs"):
        import shutil

        return shutil.disk_usage(folder).free
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _check_room(folder: Path, need_bytes: int) -> None:
    if need_bytes > free_bytes(folder):
        raise _full(folder, f"it takes {format_bytes(need_bytes)}")


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _write_at(path: Path, offset: int, data: np.ndarray) -> None:
    """Copy bytes to their place in a file that may be written by others at the same time."""
    rest = memoryview(data.data)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with _naming_full_disk(path.parent):
            while rest.nbytes:
                if hasattr(os, "pwrite"):
                    written = os.pwrite(fd, rest, offset)
                else:
                    os.lseek(fd, offset, os.SEEK_SET)
                    written = os.write(fd, rest)
                rest, offset = rest[written:], offset + written
    finally:
        os.close(fd)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
