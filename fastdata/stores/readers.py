"""Reading samples, of one shape or of many, raw or encoded, from memory or from files on disk.

A sample is a sequence of parts: the image, or each value of a tuple such as (image, mask), and
behind these the targets that are images themselves. Each part has a store, and ``KeptSamples`` puts
samples together again.

A file on disk is made under a name that nobody has opened before, written, sealed, and never
changed again; who opens it maps it read-only, so that the page cache holds one copy for all
processes and for the next run.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fastdata.errors import (
    CacheError,
    ChannelsError,
    FastDataError,
    MemoryBudgetError,
    SampleError,
    StoreGoneError,
    sample_error,
)
from fastdata.machine.blocks import OPEN_FLAGS, ArrayBlock, Block
from fastdata.machine.ranks import Leader
from fastdata.machine.tables import SampleTable, collate_targets
from fastdata.machine.units import format_bytes
from fastdata.paths import open_file
from fastdata.pixels.arrays import Array, Bytes, Shape
from fastdata.pixels.decode import open_libjpeg
from fastdata.pixels.samples import SampleSpec, addresses_of, present
from fastdata.sources.source import ItemKeys
from fastdata.stores.source_codec import SourceDecoder

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec

Decoder: TypeAlias = "Codec | SourceDecoder"
SOURCE = "source"

_GAP_BYTES = 64
"""Between samples that are still brought and dropped as one piece: what alignment leaves. Pieces
must not overlap."""
_FAULT_BYTES = 64 << 10
"""The kernel maps about so much around a page that is touched."""
_TOUCHED_BYTES = 512
_HUGE_BYTES = 2 << 20
_MOST_AREAS = 8192
"""Of the 65,530 that a process may have; what is brought beyond them maps more memory than it
needs."""


class ShapesDifferError(FastDataError, ValueError):
    """A sample does not have the shape that the others have."""


class Store:
    """Prepared samples in memory or files, read by index; pickles as a handle.

    Samples are raw, of one shape or each of its own, or each is the bytes of a codec. A store is
    sealed, so that any number of threads and processes can read it at once. Indices are positions
    in [0, N); the dataset checks them, the store does not. Every method that reads raises a
    SampleError, without a path, for a sample that is damaged; the others can still be read.

    Args:
        files: sealed, unless samples are still to come.
        spec: of the samples as they are served.
        index: columns with a row for each sample. ``offsets``, int64 (N,): its first byte.
            ``sizes``, int64 (N,): its bytes. ``shapes``, int32 (N, ndim). ``files``, int32 (N,):
            the file that it is in; missing if there is one file.
        decoder: decodes samples into the caller's memory; None for raw samples.

    Attributes:
        gives_views: True if samples are stored as they are served, so that ``read`` copies nothing.
        shapes: of all samples, (N, ndim).
    """

    def __init__(
        self,
        files: Sequence[Block],
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None = None,
    ) -> None:
        self.files = tuple(files)
        self.spec = spec
        self.index = index
        self.gives_views = decoder is None
        self.size_bytes = sum(file.size_bytes for file in files)
        self._decoder = decoder
        mapped = [file.array("uint8", (file.size_bytes,)) for file in files]
        for data in mapped:
            data.flags.writeable = False
        self._bytes = dict(enumerate(mapped))
        self._addresses = addresses_of(mapped)
        self._offsets = index["offsets"]
        self._sizes = index["sizes"]
        self.shapes = index["shapes"]
        self._file_of = index.get("files", np.broadcast_to(np.int32(0), len(self)))
        # Samples that are raw and have one shape are rows of one table in each file.
        self._row_bytes = spec.sample_bytes if decoder is None and spec.is_dense else 0

    @property
    def codec(self) -> str:
        """Name of the codec of the samples."""
        return "raw" if self._decoder is None else self._decoder.name

    def filled_share(self, index_B: Array | None = None) -> float:
        """Return the share of the samples, or of the chosen ones, that are prepared already."""
        return 1.0

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch what preparing these samples needs, if they are still to be prepared."""
        return

    def ensure(self, index_B: Array) -> None:
        """Check that samples are there and are those that were written, before they are read.

        Raises:
            SampleError: a sample is damaged, or cannot be prepared.
        """
        return

    def __len__(self) -> int:
        return len(self._offsets)

    def shape(self, index: int) -> Shape:
        return self.spec.shape or tuple(self.shapes[index].tolist())

    def stored(self, index: int) -> Bytes:
        """Return the bytes of one sample, a read-only view."""
        start = int(self._offsets[index])
        stop = start + int(self._sizes[index])
        return self._file_bytes(self._file_of[index])[start:stop]

    def _file_bytes(self, number: int) -> Bytes:
        """Return a file as it is mapped into memory."""
        return self._bytes[number]

    def addresses(self, index_B: Array) -> Array:
        """Return the addresses of raw samples in memory, int64 (B,)."""
        self.ensure(index_B)
        addresses_B: Array = self._addresses[self._file_of[index_B]] + self._offsets[index_B]
        return addresses_B

    def jpeg_files(self, index_B: Array) -> tuple[Array, Array] | None:
        """Return addresses and sizes of JPEG files, int64 (B,); None if the core decodes none."""
        decoder = self._decoder
        if decoder is None or not decoder.makes_jpeg_files or open_libjpeg()[0] is None:
            return None
        return self.addresses(index_B), self._sizes[index_B]

    def read(self, index: int) -> Array:
        """Return one sample: a read-only view if samples are raw, else a new array."""
        if self.gives_views:
            self.ensure(np.array([index]))
            return self._view(index)
        out = np.empty(self.shape(index), self.spec.dtype)
        self.read_into(index, out)
        return out

    def _view(self, index: int) -> Array:
        return self.stored(index).view(self.spec.dtype).reshape(self.shape(index))

    def read_into(self, index: int, out: Array) -> None:
        """Copy or decode one sample into ``out``, which is C-contiguous and has its shape."""
        self.ensure(np.array([index]))
        if self._decoder is None:
            out[...] = self._view(index)
            return
        data = self.stored(index).data
        try:
            self._decoder.decode(data, out)
        except MemoryError:
            raise
        except Exception as cause:  # decoders raise anything; all of it is named and kept
            raise SampleError(
                f"{len(data):,} bytes of codec {self.codec!r} in the store: {cause}", index=index
            ) from cause

    def gather_into(self, index_B: Array, out_B: Array) -> None:
        """Copy or decode samples of one shape into ``out_B`` (B, *shape), C-contiguous."""
        if self._decoder is not None:
            for b, index in enumerate(index_B.tolist()):
                self.read_into(index, out_B[b, ...])  # a view of no dimensions, too
            return
        self.ensure(index_B)
        numbers = np.unique(self._file_of[index_B]).tolist()
        if not self._row_bytes or len(numbers) != 1:
            for b, index in enumerate(index_B.tolist()):
                out_B[b] = self._view(index)
            return
        # All are rows of one table: one call copies them, without Python for each sample.
        starts_B = self._offsets[index_B]
        data = self._file_bytes(numbers[0])
        first = starts_B[0] % self._row_bytes
        length = (data.size - first) // self._row_bytes
        table = np.ndarray((length, *out_B.shape[1:]), self.spec.dtype, data.data, first)
        np.take(table, starts_B // self._row_bytes, axis=0, out=out_B, mode="clip")

    def close(self) -> None:
        """Close the files; arrays handed out stay valid. Nothing can be read then. Idempotent."""
        self._bytes.clear()
        for file in self.files:
            file.close()
        self.index.close()

    def __reduce__(self) -> Any:
        return type(self), (self.files, self.spec, self.index, self._decoder)


class DiskStore(Store):
    """Samples in files on disk, each compared with its checksum before it is first read.

    The index has two more columns: ``sums``, the checksums, and ``checked``, which can be written:
    1 for a sample that some process has read before.
    """

    files: tuple[DiskFile, ...]

    def heaviest_bytes(self, samples: int) -> float:
        """Return the largest mean size of so many neighbours."""
        samples = min(samples, len(self))
        ends = np.append(0, np.cumsum(self._sizes))
        return float((ends[samples:] - ends[:-samples]).max() / samples)

    def ensure(self, index_B: Array) -> None:
        checked = self.index["checked"]
        for index in index_B[checked[index_B] == 0].tolist():
            self._check(index)
            checked[index] = 1

    def _check(self, index: int) -> None:
        if checksum(self.stored(index)) != self.index["sums"][index]:
            raise SampleError(self._note_damage(index), index=index)

    def _note_damage(self, index: int) -> str:
        """Let the next build write the shard of a sample again; return the text of the error."""
        path = self.files[self._file_of[index]].path
        cure = "the next run over its source prepares it again"
        try:
            path.with_name(receipt_name(path.stem.partition("-")[2])).unlink(missing_ok=True)
        except OSError as problem:
            cure = f"that cannot be noted ({problem.strerror}): build {path.parent} again"
        return (
            f"its bytes in {path.parent} are not those that were written (a failing disk, or a "
            f"foreign hand); {cure}"
        )

    # Which samples are in memory

    def load(self, index_B: Array) -> None:
        """Load samples into memory, and nothing else, until they are evicted; see ``DiskFile``."""
        for file, start, size in self._pieces(index_B):
            file.load(start, size)

    def evict(self, index_B: Array, *, from_cache: bool = False) -> None:
        """Give back their memory; what was loaded by one call must be evicted by one call."""
        for file, start, size in self._pieces(index_B):
            file.evict(start, size, from_cache=from_cache)

    def evict_all(self) -> None:
        """Give back the memory of all samples, whatever read them."""
        for file in self.files:
            file.evict_all()

    def _pieces(self, index_B: Array) -> Iterator[tuple[DiskFile, int, int]]:
        """Yield file, first byte and size of each run of samples that lie end to end."""
        file_B = self._file_of[index_B]
        for number in np.unique(file_B).tolist():
            chosen = index_B[file_B == number]
            chosen = chosen[np.argsort(self._offsets[chosen])]
            starts = self._offsets[chosen]
            stops = starts + self._sizes[chosen]
            is_cut = np.abs(starts[1:] - stops[:-1]) > _GAP_BYTES
            first = starts[np.append(True, is_cut)].tolist()
            last = stops[np.append(is_cut, True)].tolist()
            for start, stop in zip(first, last, strict=True):
                yield self.files[number], start, stop - start


def receipt_name(shard: str) -> str:
    """Return the name of the file that marks a shard as complete."""
    return f"shard-{shard}.npz"


def checksum(data: Bytes) -> int:
    """Return the CRC-32 of a sample's bytes.

    It depends on their order, so it also sees swapped pages and reversed rows. On a Xeon it reads
    64 MiB in 41 ms, where a sum of words takes 10 ms; a run checks each sample once.

    Example:
        >>> checksum(np.array([1, 2], np.uint8)) == checksum(np.array([2, 1], np.uint8))
        False
    """
    return zlib.crc32(data.data)


# Samples of their parts


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How samples are put together from their parts.

    Args:
        is_tuple: True if samples are tuples of parts.
        target_is_part: True if the target is an image, which is the last part.
        keys: of items that are dicts or namedtuples.
        mask_places: places of the images in targets that are tuples; these are the last parts.
    """

    is_tuple: bool = False
    target_is_part: bool = False
    keys: ItemKeys | None = None
    mask_places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        keys = self.keys
        if keys and (keys.image not in keys.names or len({*keys.names}) < len(keys.names)):
            raise ValueError(f"its keys do not fit: {keys}")

    @property
    def target_parts(self) -> int:
        """Count the parts that are images of targets; they are the last ones."""
        return self.target_is_part + len(self.mask_places)


@dataclass(frozen=True)
class KeptSamples(Layout):
    """Stored samples and their targets, with the interface of a ``Source``.

    Args:
        stores: one for each part.
        table: of the targets, except for those that are parts.
        shared_by: lets other ranks of the machine attach to the stores.
    """

    stores: tuple[Store, ...]
    table: SampleTable
    opening = None
    is_remote = False
    shared_by: Leader | None = None

    @property
    def images(self) -> Store:
        """The store of the first part."""
        return self.stores[0]

    def __len__(self) -> int:
        return len(self.table)

    def expect(self, indices: Sequence[int]) -> None:
        self.images.expect(indices)

    def path(self, index: int) -> str | None:
        return self.table.path(index) if self.table.has_paths else None

    def read(self, index: int) -> tuple[Any, Any]:
        """Return sample and target as they were before they were stored, in new memory."""
        stores = self.stores[: len(self.stores) - self.target_parts]
        parts = tuple(self._owned(store, index) for store in stores)
        return (parts if self.is_tuple else parts[0]), self.target(index)

    def target(self, index: int) -> Any:
        if self.target_is_part:
            return self._owned(self.stores[-1], index)
        target = self.table.target(index)
        if not self.mask_places:
            return target
        values = list(target)
        stores = self.stores[-len(self.mask_places) :]
        for place, store in zip(self.mask_places, stores, strict=True):
            values[place] = self._owned(store, index)
        return tuple(values)

    def collated_targets(self, index_B: Array) -> Any:
        """Return the targets of a batch as ``default_collate`` makes them."""
        if self.target_parts:
            return collate_targets([self.target(index) for index in index_B.tolist()])
        return self.table.collated_targets(index_B)

    def _owned(self, store: Store, index: int) -> Any:
        """Read a part into new memory."""
        with self.naming_damage():
            array = store.read(index)
        if store.gives_views:
            array = array.copy()
        return present(array, store.spec.form)

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Add the path of a sample to the error that a store raises for it."""
        try:
            yield
        except SampleError as damaged:
            index = damaged.index
            path = self.path(index)
            if damaged.path == path:
                raise
            cause = damaged.__cause__
            if cause is not None and self.images.codec == SOURCE:  # the file is at fault
                raise sample_error(path, index, cause) from cause
            what = str(damaged).partition("cannot be read: ")[2]
            raise SampleError(what, index=index, path=path) from cause
        except ChannelsError as wrong:
            path = self.path(wrong.index)
            raise SampleError(wrong.reason, index=wrong.index, path=path) from wrong


# Files on disk


class DiskFile(Block):
    """A block on disk: ``reserve``, ``write``, ``seal``, ``array``; or ``open``, ``array``.

    Arrays keep the mapping alive by themselves, also when the file is deleted. Pickles as its name
    and descriptor: another process opens the same file again, and never another one that has taken
    its place. A full disk raises a CacheError.
    """

    path: Path

    @cached_property
    def _borders(self) -> Counter[int]:
        """Count the loaded pieces that begin or end in a page: two pieces may share it."""
        # No lock: a forked process could wait for a thread of its parent for ever. Threads may
        # miscount a page, which is then evicted early and read again.
        return Counter()

    @classmethod
    def reserve(cls, path: Path, size_bytes: int) -> DiskFile:
        """Reserve a new file; remove it if there is no room for it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
        file = cls(os.open(path, flags, 0o666), path)
        try:
            file.resize(size_bytes, at_once=True)
        except BaseException:
            file.close()
            path.unlink()
            raise
        return file

    @classmethod
    def open(cls, path: Path, size_bytes: int) -> DiskFile:
        """Open a file to be read.

        Raises:
            CacheError: it is missing or has another size.
        """
        try:
            file = cls(open_file(path), path, is_sealed=True)
        except OSError as problem:
            raise CacheError(f"{path} cannot be opened ({problem})") from problem
        if file.size_bytes != size_bytes:
            file.close()
            raise CacheError(
                f"{path} has {file.size_bytes:,} bytes where {size_bytes:,} were written"
            )
        return file

    @classmethod
    def attach(cls, path: Path | None, *found: Any) -> Block:
        """Open the file again in another process.

        An update of the cache may have removed it, or another file has its name. The process that
        opened it still has it, and Linux gives it to others by that process's descriptor.
        """
        for name in (path, None):
            with contextlib.suppress(StoreGoneError):
                file = super().attach(name, *found)
                file.path = path
                return file
        raise StoreGoneError(
            f"the cache was deleted or changed while it was in use: {path} is gone, or another "
            "file, and the process that had opened it cannot give it; make the dataset again"
        )

    # Writing

    def _check_free(self, size_bytes: int) -> None:
        """Refuse more than the disk has."""
        if size_bytes > free_bytes(self.path.parent):
            raise _full(self.path.parent, f"it needs {format_bytes(size_bytes)} more")

    @contextlib.contextmanager
    def _refusing(self, size_bytes: int) -> Iterator[None]:
        """Turn errors of the system into those of a file that is read, or written."""
        try:
            with naming_full_disk(self.path.parent):
                yield
        except CacheError:
            raise
        except OSError as problem:
            if not self.is_sealed:
                raise CacheError(f"{self.path} cannot be written ({problem.strerror})") from None
            raise MemoryBudgetError(
                f"the {format_bytes(size_bytes)} of {self.path} cannot be mapped "
                f"({problem.strerror}), for which this process needs as much address space. Raise "
                "that limit (ulimit -v), or that of open files (ulimit -n), or give storage='none' "
                "or a smaller resize=."
            ) from None

    def seal(self) -> None:
        """Write all of it to the disk."""
        super().seal()
        with naming_full_disk(self.path.parent):
            os.fsync(self.fd)

    # Reading

    def load(self, start: int, size: int) -> None:
        """Load bytes into memory until ``evict``, so that no reader of them waits for the disk."""
        mapped = self._map
        if mapped is None or not size:
            return
        first, stop = _pages(start, size)
        # When a page is touched, the kernel also maps what it has around it, up to 2 MiB, but not
        # beyond an area with other flags. So the piece becomes such an area, and reading it maps
        # its own pages alone. The flags let the disk read ahead, and let the page cache keep the
        # file in huge pages, which are mapped at no cost.
        if not self._borders:
            _advise(mapped, *_pages(0, len(mapped)), "MADV_NOHUGEPAGE")
        if len(self._borders) < 2 * _MOST_AREAS:
            _advise(mapped, first, stop, "MADV_SEQUENTIAL", "MADV_HUGEPAGE")
        self._borders.update({first, stop - 1})
        # Touch a little of every so many bytes. NumPy does so without the GIL, unless there are
        # fewer than 500 elements.
        data = np.frombuffer(mapped, np.uint8)[first * mmap.PAGESIZE : start + size]
        whole = data.size // _FAULT_BYTES * _FAULT_BYTES
        data[:whole].reshape(-1, _FAULT_BYTES)[:, :_TOUCHED_BYTES].max(initial=0)
        data[whole:].max(initial=0)

    def evict(self, start: int, size: int, *, from_cache: bool) -> None:
        """Give back memory that was loaded; nothing is lost, but reading it again takes longer.

        With ``from_cache`` the system's page cache gives it back, too, except for pages that some
        process has mapped.
        """
        mapped = self._map
        if mapped is None or not size:
            return
        first, stop = _pages(start, size)
        for border in {first, stop - 1}:
            self._borders[border] -= 1
            if self._borders[border] <= 0:
                del self._borders[border]
        # A page that another piece shares stays.
        first += first in self._borders
        stop -= stop - 1 in self._borders
        # Unmapped last: until the flags are back, a reader next to it could map it again.
        _advise(mapped, first, stop, "MADV_NOHUGEPAGE", "MADV_NORMAL", "MADV_DONTNEED")
        if from_cache and hasattr(os, "posix_fadvise"):
            # The page cache gives back a huge page as a whole or not at all.
            first_byte = start // _HUGE_BYTES * _HUGE_BYTES
            stop_byte = -(-(start + size) // _HUGE_BYTES) * _HUGE_BYTES
            os.posix_fadvise(self.fd, first_byte, stop_byte - first_byte, os.POSIX_FADV_DONTNEED)

    def evict_all(self) -> None:
        if self._map is not None:
            _advise(self._map, *_pages(0, len(self._map)), "MADV_DONTNEED")


def _pages(start: int, size: int) -> tuple[int, int]:
    """Return the first page of a range of bytes, and the one behind its last."""
    return start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE)


def _advise(mapped: mmap.mmap, first: int, stop: int, *advice: str) -> None:
    """Give the kernel advice on pages, if it takes any."""
    start = first * mmap.PAGESIZE
    size = (stop - first) * mmap.PAGESIZE
    for name in advice:
        if size > 0 and hasattr(mmap, name):
            with contextlib.suppress(OSError):
                mapped.madvise(getattr(mmap, name), start, size)


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk of a folder, which need not exist yet."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(there).free


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk into a CacheError that says what is free, and the cure."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in _FULL:
            raise
        raise _full(folder, f"it ran out of room ({problem.strerror})") from problem


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _full(folder: Path, what: str) -> CacheError:
    return CacheError(
        f"the disk of {folder.parent} is too full for the cache: {what}, "
        f"{format_bytes(free_bytes(folder))} are free. Free some space, or give another "
        "cache_dir=, a smaller resize=, or codec='zstd', which about halves raw samples."
    )
