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
    open_file,
    sample_error,
)
from fastdata.machine import format_bytes
from fastdata.machine.ranks import Leader
from fastdata.machine.shared import OPEN_FLAGS, ArrayBlock, Block, SampleTable, collate_targets
from fastdata.pixels.core import Array, Bytes, Shape
from fastdata.pixels.images import SampleSpec, SourceDecoder, addresses_of, open_libjpeg, present
from fastdata.sources import ItemKeys

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec

Decoder: TypeAlias = "Codec | SourceDecoder"
SOURCE = "source"

_GAP_BYTES = 64
"""Between samples that are still brought and dropped as one piece: what alignment leaves. Pieces
must not overlap."""
_FILE_SHIFT = 44
"""Of a file's number, in one number with that of a byte."""
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

    They are raw, of one shape or each of its own, or the bytes of a codec for each. Sealed, so safe
    from any number of threads and processes. Indices are positions in [0, N); they are checked by
    the dataset, not here. What reads samples raises a SampleError, without a path, for one
    that is damaged; the others can still be read.

    Args:
        files: sealed, unless samples are still to come.
        spec: of the samples as they are served.
        index: by sample ``offsets``, int64 (N,), its first byte. Unless they are raw and of one
            shape, so that they lie as rows of a table, ``sizes``, int64 (N,), its bytes, and
            ``shapes``, int32 (N, ndim). Of several files ``files``, int32 (N,), the one that it is
            in.
        decoder: decodes samples straight into the caller's memory; None for raw ones.

    Attributes:
        gives_views: whether ``read`` costs nothing, because samples lie there as they are served.
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
        length = len(self._offsets)
        shape = np.array(spec.shape or (), np.int32)
        self._row_bytes = spec.sample_bytes if decoder is None and spec.is_dense else 0
        self._sizes = index.get("sizes", np.broadcast_to(np.int64(self._row_bytes), length))
        self.shapes = index.get("shapes", np.broadcast_to(shape, (length, len(shape))))
        self._file_of = index.get("files", np.broadcast_to(np.int32(0), length))

    @property
    def codec(self) -> str:
        return "raw" if self._decoder is None else self._decoder.name

    def filled_share(self, index_B: Array | None = None) -> float:
        """How many of the samples, or of those chosen, are there; 1 where all are."""
        return 1.0

    def expect(self, indices: Sequence[int]) -> None:
        """Say which samples are read next; worth something where they are yet to be prepared."""
        return

    def ensure(self, index_B: Array) -> None:
        """See to it that samples are there and are those that were written, before they are read.

        Raises:
            SampleError: one is not.
        """
        return

    def __len__(self) -> int:
        return len(self._offsets)

    def shape(self, index: int) -> Shape:
        return self.spec.shape or tuple(self.shapes[index].tolist())

    def stored(self, index: int) -> Bytes:
        """The bytes of one sample: a read-only view."""
        start = int(self._offsets[index])
        return self._bytes[self._file_of[index]][start : start + int(self._sizes[index])]

    def addresses(self, index_B: Array) -> Array:
        """Where the chosen raw samples lie in memory: int64 (B,)."""
        self.ensure(index_B)
        addresses_B: Array = self._addresses[self._file_of[index_B]] + self._offsets[index_B]
        return addresses_B

    def jpeg_files(self, index_B: Array) -> tuple[Array, Array] | None:
        """Addresses and sizes of samples, int64 (B,), where the core decodes them; else None."""
        if not getattr(self._decoder, "makes_jpeg_files", False) or open_libjpeg()[0] is None:
            return None
        return self.addresses(index_B), self._sizes[index_B]

    def read(self, index: int) -> Array:
        """One sample, read-only: a view where samples are raw, else a fresh array."""
        if self.gives_views:
            self.ensure(np.array([index]))
            return self._view(index)
        out = np.empty(self.shape(index), self.spec.dtype)
        self.read_into(index, out)
        return out

    def _view(self, index: int) -> Array:
        return self.stored(index).view(self.spec.dtype).reshape(self.shape(index))

    def read_into(self, index: int, out: Array) -> None:
        """Put one sample into ``out``, C-contiguous and of its shape."""
        if self._decoder is None:
            out[...] = self.read(index)
            return
        self.ensure(np.array([index]))
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
        """Put samples of one shape into ``out_B`` (B, *shape), C-contiguous.

        In one call where one table has them.
        """
        if self._decoder is not None:
            for b, index in enumerate(index_B.tolist()):
                self.read_into(index, out_B[b, ...])  # of no dimensions too
            return
        self.ensure(index_B)
        numbers = {*self._file_of[index_B].tolist()}
        if not self._row_bytes or len(numbers) != 1:
            for b, index in enumerate(index_B.tolist()):
                out_B[b] = self._view(index)
            return
        starts_B = self._offsets[index_B]
        data = self._bytes[numbers.pop()][starts_B[0] % self._row_bytes :]
        whole = data[: data.size // self._row_bytes * self._row_bytes]
        table = whole.view(self.spec.dtype).reshape(-1, *out_B.shape[1:])
        np.take(table, starts_B // self._row_bytes, axis=0, out=out_B, mode="clip")

    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""
        self._bytes = {}
        vars(self).update(
            {name: it[:0].copy() for name, it in vars(self).items() if isinstance(it, np.ndarray)}
        )
        for file in self.files:
            file.close()
        self.index.close()

    def __reduce__(self) -> Any:
        return type(self), (self.files, self.spec, self.index, self._decoder)


class DiskStore(Store):
    """Samples in files on disk, each held against its checksum before it is first read.

    Its index has by sample also ``sums``, its checksum, and ``checked``, which can be written:
    whether any process has read it before.
    """

    files: tuple[DiskFile, ...]

    def heaviest_bytes(self, samples: int) -> float:
        """The mean size of those so many neighbours that are the heaviest."""
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
        """Have the next build write the shard of a sample again; gives what to say."""
        path = self.files[self._file_of[index]].path
        cure = "the next run over its source prepares it anew"
        try:
            path.with_name(receipt_name(path.stem.partition("-")[2])).unlink(missing_ok=True)
        except OSError as problem:
            cure = f"that cannot be noted ({problem.strerror}): build {path.parent} anew"
        return (
            f"its bytes in {path.parent} are not those that were written (a failing disk, or a "
            f"foreign hand); {cure}"
        )

    # What of the files is in memory

    def bring(self, index_B: Array) -> None:
        """Have samples in memory until they are dropped, and nothing else; see ``DiskFile``."""
        for file, start, size in self._pieces(index_B):
            file.bring(start, size)

    def drop(self, index_B: Array, *, from_cache: bool = False) -> None:
        """Let go of their memory; those that were brought at once are dropped at once."""
        for file, start, size in self._pieces(index_B):
            file.drop(start, size, from_cache=from_cache)

    def release(self) -> None:
        for file in self.files:
            file.release()

    def _pieces(self, index_B: Array) -> Iterator[tuple[DiskFile, int, int]]:
        """File, first byte and size of each piece in which chosen samples lie end to end."""
        starts_B = self._offsets[index_B] + (self._file_of[index_B].astype(np.int64) << _FILE_SHIFT)
        order_B = np.argsort(starts_B)
        starts_B = starts_B[order_B]
        stops_B = starts_B + self._sizes[index_B[order_B]]
        gaps = starts_B[1:] - stops_B[:-1]
        is_cut = (gaps < 0) | (gaps > _GAP_BYTES)
        starts = starts_B[np.append(True, is_cut)].tolist()
        stops = stops_B[np.append(is_cut, True)].tolist()
        for start, stop in zip(starts, stops, strict=True):
            number, first = divmod(start, 1 << _FILE_SHIFT)
            yield self.files[number], first, stop - start


def receipt_name(shard: str) -> str:
    """Of the file that says that a shard is complete; without it the shard is written anew."""
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
    """How samples are put together of their parts.

    Args:
        is_tuple: whether they are tuples of parts.
        target_is_part: whether targets are the last part.
        keys: of items that are dicts.
        mask_places: of targets that are tuples, the places of images, which are the last parts.
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
        """How many of the parts, the last ones, are of targets."""
        return self.target_is_part + len(self.mask_places)


@dataclass(frozen=True)
class KeptSamples(Layout):
    """The kept samples of a dataset, and their targets; a source of them, too.

    Args:
        stores: one for each part.
        table: of the targets that are no parts.
        shared_by: tells other ranks of the machine where they lie.
    """

    stores: tuple[Store, ...]
    table: SampleTable
    opening = None
    is_remote = False
    shared_by: Leader | None = None

    @property
    def images(self) -> Store:
        """The first part."""
        return self.stores[0]

    def __len__(self) -> int:
        return len(self.table)

    def expect(self, indices: Sequence[int]) -> None:
        self.images.expect(indices)

    def path(self, index: int) -> str | None:
        return self.table.path(index) if self.table.has_paths else None

    def read(self, index: int) -> tuple[Any, Any]:
        """Sample and target as they were before they were stored, in memory of the caller's own."""
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
        """What ``default_collate`` makes of the targets of a batch."""
        if self.target_parts:
            return collate_targets([self.target(index) for index in index_B.tolist()])
        return self.table.collated_targets(index_B)

    def _owned(self, store: Store, index: int) -> Any:
        with self.naming_damage():
            array = store.read(index)
        return present(array.copy() if store.gives_views else array, store.spec.form)

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Have a store's error of a damaged sample name its path."""
        try:
            yield
        except SampleError as damaged:
            index = damaged.index
            path = self.path(index)
            if damaged.path == path:
                raise
            cause = damaged.__cause__
            if cause is not None and self.images.codec == SOURCE:  # what is wrong with the file
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
    its place. A disk that is full is a CacheError.
    """

    path: Path

    @cached_property
    def _borders(self) -> Counter[int]:
        """The pages that brought pieces begin or end in, how often: two may share one.

        Threads may miscount one, which is then dropped early and read again.
        """
        return Counter()

    @classmethod
    def reserve(cls, path: Path, size_bytes: int) -> DiskFile:
        """Reserve a new file, which is removed where there is no room for it."""
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
        """Raises CacheError where it is missing or has another size."""
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

        Where an update of the cache has removed it, or another file has its name, the process that
        opened it still has it, and the system gives it to others by that descriptor (Linux).
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

    def _ask_for(self, size_bytes: int) -> None:
        """Refuse what the disk does not have, so that it is found before anything is prepared."""
        if size_bytes > free_bytes(self.path.parent):
            raise _full(self.path.parent, f"it takes {format_bytes(size_bytes)}")

    def _named(self, problem: OSError, size_bytes: int) -> Exception:
        if self.is_sealed:
            return MemoryBudgetError(
                f"the {format_bytes(size_bytes)} of {self.path} cannot be mapped "
                f"({problem.strerror}), for which this process needs as much address space. Raise "
                "that limit (ulimit -v), or that of open files (ulimit -n), or give storage='none' "
                "or a smaller resize=."
            )
        if problem.errno in _FULL:
            return _full(self.path.parent, f"it ran out of room ({problem.strerror})")
        return CacheError(f"{self.path} cannot be written ({problem.strerror})")

    def seal(self) -> None:
        """See to it that all of it is on the disk."""
        super().seal()
        with naming_full_disk(self.path.parent):
            os.fsync(self.fd)

    # Reading

    def bring(self, start: int, size: int) -> None:
        """Have bytes in memory until ``drop``, so that nobody who reads them waits for the disk.

        Reading them then maps their pages and no others. The kernel maps what it has around a page
        that is touched, up to 2 MiB, but not across the border of an area with other flags: so they
        are made such an area. Its flags let the disk read ahead, and the page cache keep the file
        in huge pages, which are mapped at no cost.
        """
        mapped = self._map
        if mapped is None or not size:
            return
        first, stop = _pages(start, size)
        if not self._borders:
            _advise(mapped, *_pages(0, len(mapped)), "MADV_NOHUGEPAGE")
        if len(self._borders) < 2 * _MOST_AREAS:
            _advise(mapped, first, stop, "MADV_SEQUENTIAL", "MADV_HUGEPAGE")
        self._borders.update({first, stop - 1})
        # A little of every so many bytes, without the GIL: NumPy keeps it for 500 elements.
        data = np.frombuffer(mapped, np.uint8)[first * mmap.PAGESIZE : start + size]
        whole = data.size // _FAULT_BYTES * _FAULT_BYTES
        data[:whole].reshape(-1, _FAULT_BYTES)[:, :_TOUCHED_BYTES].max(initial=0)
        data[whole:].max(initial=0)

    def drop(self, start: int, size: int, *, from_cache: bool) -> None:
        """Let go of memory that was brought; nothing is lost, reading it again takes longer.

        ``from_cache``: let go of the system's page cache too; pages that any process has mapped
        stay.
        """
        mapped = self._map
        if mapped is None or not size:
            return
        first, stop = _pages(start, size)
        for border in {first, stop - 1}:
            self._borders[border] -= 1
            if self._borders[border] <= 0:
                del self._borders[border]
        first += first in self._borders
        stop -= stop - 1 in self._borders
        # unmapped last, when nobody can map again
        _advise(mapped, first, stop, "MADV_NOHUGEPAGE", "MADV_NORMAL", "MADV_DONTNEED")
        if from_cache and hasattr(os, "posix_fadvise"):
            # A huge page goes as a whole or not at all.
            first_byte = start // _HUGE_BYTES * _HUGE_BYTES
            stop_byte = -(-(start + size) // _HUGE_BYTES) * _HUGE_BYTES
            os.posix_fadvise(self.fd, first_byte, stop_byte - first_byte, os.POSIX_FADV_DONTNEED)

    def release(self) -> None:
        if self._map is not None:
            _advise(self._map, *_pages(0, len(self._map)), "MADV_DONTNEED")


def _pages(start: int, size: int) -> tuple[int, int]:
    return start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE)


def _advise(mapped: mmap.mmap, first: int, stop: int, *advice: str) -> None:
    """Give the kernel advice on pages, where it takes any."""
    for name in advice:
        if stop > first and hasattr(mmap, name):
            with contextlib.suppress(OSError):
                mapped.madvise(
                    getattr(mmap, name), first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE
                )


def free_bytes(folder: Path) -> int:
    """Free space on the disk of a folder, which need not be there yet."""
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
