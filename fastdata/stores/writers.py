"""Filling a block of memory or a file with samples, from any worker, and sealing it as a store.

A store may also be filled by its readers: each sample is prepared on its first read, in whatever process that is.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastdata.errors import MemoryBudgetError, sample_error
from fastdata.images import SampleSpec, SourceDecoder
from fastdata.memory import format_bytes
from fastdata.report import warn_user
from fastdata.shared import ArrayBlock, Block, ByteLocks
from fastdata.stores.files import DiskFile
from fastdata.stores.readers import DenseStore, RaggedStore, Store, checksum

if TYPE_CHECKING:
    from fastdata.codecs import Codec

ALIGN_BYTES = 64
"""Each raw sample of a shape of its own begins at a multiple of these."""
_GROWTH = 1 / 16
_NO_LIMIT = 1 << 62


class Place(NamedTuple):
    """Where a sample lies: its row in a dense store or else its first byte; its bytes there; its shape."""

    start: int
    size_bytes: int
    shape: tuple[int, ...]


class Places(NamedTuple):
    """Where all samples of a store lie: int64 (N,), int64 (N,), int32 (N, dimensions)."""

    starts: np.ndarray
    sizes: np.ndarray
    shapes: np.ndarray


class ShapesDifferError(Exception):
    """A sample does not have the shape that the others have."""


class _FileWriter:
    """Puts samples into a file, from any thread, or process that was forked with it.

    A file on disk that is full is a CacheError. When it is finished ``columns`` are what a reader has to know, by row:
    ``sums``, the checksums, 0 where no sample was written; and of ragged samples ``offsets``, ``sizes`` and ``shapes``.
    """

    columns: Mapping[str, np.ndarray]

    def __init__(self, spec: SampleSpec, path: Path | None, size_bytes: int, length: int) -> None:
        self.spec = spec
        size_bytes = max(size_bytes, 1)
        self.file = Block.create(size_bytes) if path is None else DiskFile.reserve(path, size_bytes)
        self._written: ArrayBlock | None = None
        if path is not None:
            columns = {"sums": np.zeros(length, np.uint64), "starts": np.full(length, -1)}
            self._written = ArrayBlock(columns, seal=False)

    def _put(self, index: int, start: int, offset: int, data: np.ndarray) -> None:
        self.file.write(offset, data)
        if self._written is not None:
            self._written["sums"][index] = checksum(data.reshape(-1).view(np.uint8))
            self._written["starts"][index] = start

    def flush(self) -> None:
        """Finish what this thread has written."""
        if isinstance(self.file, DiskFile):
            self.file.flush()

    def close(self) -> None:
        """Give up what was written; a file stays where it is. Idempotent."""
        self.file.close()
        if self._written is not None:
            self._written.close()


class DenseWriter(_FileWriter):
    """Sample i goes to row i.

    Args:
        spec: dense.
        length: number of samples.
        path: of the new file on disk, a ``.npy`` one; None for memory.
    """

    def __init__(self, spec: SampleSpec, length: int, path: Path | None = None) -> None:
        head = b"" if path is None else _npy_head(spec, length)
        super().__init__(spec, path, len(head) + spec.sample_bytes * length, length)
        self._length, self._head_bytes = length, len(head)
        self.file.write(0, np.frombuffer(head, np.uint8))
        self.flush()  # by this process, not by those that are forked

    def write(self, index: int, array: np.ndarray) -> Place:
        """Raises ShapesDifferError where the sample is not of the common shape."""
        _check_shape(index, array.shape, self.spec)
        self._put(index, index, self._head_bytes + index * self.spec.sample_bytes, np.ascontiguousarray(array))
        return Place(index, array.nbytes, array.shape)

    def live(self, length: int, dimensions: int) -> DenseStore:
        """A store over memory while it is written to; what was not written yet must not be read."""
        return DenseStore(self.file, self.spec, self._length)

    def finish(self, places: Places) -> DenseStore:
        self.file.seal()
        if self._written is not None:
            self.columns = {"sums": self._written["sums"].copy()}
            self._written.close()
        index = None if len(places.starts) == self._length else ArrayBlock({"rows": places.starts})
        return DenseStore(self.file, self.spec, self._length, index, self._head_bytes)


class RaggedWriter(_FileWriter):
    """Samples of any sizes, in the order in which they are written: raw, encoded, or the bytes of image files.

    Raw ones begin at a multiple of 64 bytes, all others end to end. The file grows as their sizes become known.

    Args:
        spec: of the samples as they are served; dense if they are encoded and all have one shape.
        codec: encodes them. A ``SourceDecoder`` keeps files' bytes as they are: each is prepared when it is read.
        is_certain: whether the spec of files is dense for sure; else each is opened once to learn its sample's shape.
        path: of the new file on disk; None for memory.
        first_bytes: reserved at once.
        limit_bytes: the most that may be reserved.
        length: number of samples; only for a file on disk.
    """

    def __init__(
        self,
        spec: SampleSpec,
        codec: Codec | SourceDecoder | None = None,
        is_certain: bool = False,
        path: Path | None = None,
        /,
        *,
        first_bytes: int,
        limit_bytes: int = _NO_LIMIT,
        length: int = 0,
    ) -> None:
        is_source = isinstance(codec, SourceDecoder)
        of_bytes = SampleSpec(shape=None, dtype="uint8", form="array")
        super().__init__(of_bytes if is_source else spec, path, min(first_bytes, limit_bytes), length)
        self._served_spec, self._codec, self._is_certain = spec, codec, is_certain
        self._align_bytes = ALIGN_BYTES if codec is None else 1
        self._step_bytes, self._limit_bytes = max(int(first_bytes * _GROWTH), 1 << 20), limit_bytes
        self._ends = ArrayBlock({"used and reserved": np.array([0, self.file.size_bytes])}, seal=False)
        self._locks = ByteLocks(self._ends.block)

    def write(self, index: int, array: np.ndarray) -> Place:
        """Encode a sample and store it behind those already there.

        Raises:
            MemoryBudgetError: there is no room left within the limit.
            ShapesDifferError: it is not of the common shape.
            Exception: it cannot be encoded; or the file was opened and is damaged.
        """
        shape, data = array.shape, np.ascontiguousarray(array)
        if isinstance(self._codec, SourceDecoder):
            common = self._served_spec.shape
            shape = common if self._is_certain and common is not None else self._codec.sample(array.data).shape
        _check_shape(index, shape, self._served_spec)
        if self._codec is not None and not isinstance(self._codec, SourceDecoder):
            data = np.frombuffer(self._codec.encode(data), np.uint8)
        with self._locks.hold(0):
            start, reserved_bytes = self._ends["used and reserved"].tolist()
            end = start + max(-(-data.nbytes // self._align_bytes) * self._align_bytes, 1)
            if end > reserved_bytes:
                self._grow(end)
            self._ends["used and reserved"][0] = end
        self._put(index, start, start, data)
        return Place(start, data.nbytes, shape)

    def _grow(self, end: int) -> None:
        if end > self._limit_bytes:
            what = "prepared samples of many shapes"
            if self._codec is not None:
                is_source = isinstance(self._codec, SourceDecoder)
                what = "the files' own bytes" if is_source else f"samples encoded by codec={self._codec.name!r}"
            raise MemoryBudgetError(f"{what} need more than the {format_bytes(self._limit_bytes)} that is free")
        size_bytes = min(end + self._step_bytes, self._limit_bytes)
        self.file.grow(size_bytes)
        self._ends["used and reserved"][1] = size_bytes

    def rewind(self) -> None:
        self._ends["used and reserved"][0] = 0

    def live(self, length: int, dimensions: int) -> RaggedStore:
        """A store over memory while it is written to; what was not entered there yet must not be read."""
        starts, sizes = np.zeros((2, length), np.int64)
        shapes = np.zeros((length, dimensions), np.int32)
        index = ArrayBlock({"offsets": starts, "sizes": sizes, "shapes": shapes}, seal=False)
        return RaggedStore(self.file, self._served_spec, index, self._codec)

    def finish(self, places: Places) -> RaggedStore:
        used_bytes, reserved_bytes = self._ends["used and reserved"].tolist()
        self.file.grow(reserved_bytes)  # by other processes so far
        self.file.trim(used_bytes)
        self.file.seal()
        self._ends.close()
        columns = {"offsets": places.starts, "sizes": places.sizes, "shapes": places.shapes}
        if self._written is not None:
            is_kept = np.isin(self._written["starts"], places.starts)  # no two samples begin at one byte
            self.columns = columns | {"sums": self._written["sums"][is_kept]}
            self._written.close()
        return RaggedStore(self.file, self._served_spec, ArrayBlock(columns), self._codec)

    def close(self) -> None:
        super().close()
        self._ends.close()


Writer = DenseWriter | RaggedWriter


def _check_shape(index: int, shape: tuple[int, ...], spec: SampleSpec) -> None:
    if spec.shape not in (None, shape):
        raise ShapesDifferError(f"sample {index} has shape {shape}, those before it {spec.shape}")


def _npy_head(spec: SampleSpec, rows: int) -> bytes:
    """What ``np.save`` writes before an array (rows, *shape): a multiple of 64 bytes."""
    assert spec.shape is not None
    head = io.BytesIO()
    what = {"descr": np.dtype(spec.dtype).str, "fortran_order": False, "shape": (rows, *spec.shape)}
    np.lib.format.write_array_header_1_0(head, what)
    return head.getvalue()


class LazyFill:
    """Fills the stores of all parts of a dataset's samples, each sample once.

    Who reads a sample that is not there prepares and writes it, while others who want the same one wait. A reader that
    dies leaves the sample to the next one.

    Args:
        road: of the samples, a ``prepare.WritePath``; what its writers write to is reserved.
        length: number of samples.
        dimensions: of each part's samples.
    """

    def __init__(self, road: Any, length: int, dimensions: Sequence[int]) -> None:
        self._road = road
        self._is_out_of_room = False
        self._live = [writer.live(length, count) for writer, count in zip(road.writers, dimensions, strict=True)]
        self._marks = ArrayBlock({"is_there": np.zeros(length, np.bool_)}, seal=False)
        self._locks = ByteLocks(self._marks.block)
        self.is_there = self._marks["is_there"]  # (N,), for every process to see

    def stores(self) -> tuple[LazyStore, ...]:
        return tuple(LazyStore(store, self, part) for part, store in enumerate(self._live))

    def want(self, index: int) -> Any:
        """See to it that a sample is there; where there is no room for it, return it as it was read, else None.

        Raises:
            SampleError: it cannot be read or prepared.
        """
        if self.is_there[index]:
            return None
        with self._locks.hold(index):
            if self.is_there[index]:
                return None
            sample = self._road.read(index)
            if self._is_out_of_room:
                return sample
            try:
                places = self._road.write(sample)
            except ShapesDifferError as found:
                cause = ValueError(f"{found}, and fill='lazy' has taken these for the shape of all; use fill='eager'")
                raise sample_error(self._road.source.path(index), index, cause) from None
            except MemoryBudgetError:
                self._is_out_of_room = True
                there = f"{int(np.count_nonzero(self.is_there))} of {len(self.is_there)} samples"
                warn_user(f"the store is full with {there}; the others are prepared each time")
                return sample
            for store, place in zip(self._live, places, strict=True):
                if isinstance(store, RaggedStore):
                    store.enter(index, *place)
            self.is_there[index] = True
        return None

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.is_there = self.is_there[:0].copy()
        for part in (self._marks, *self._road.writers, *self._live):
            part.close()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "is_there"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self.is_there = self._marks["is_there"]


class LazyStore(Store):
    """One part of samples that are filled in as they are read.

    Args:
        store: of the part, over memory that is still written to.
        fill: fills it.
        part: which one it is.
    """

    gives_views = True  # whole samples should be asked for: some may have to be prepared to know their shape

    def __init__(self, store: Store, fill: LazyFill, part: int) -> None:
        self._store, self.fill, self._part = store, fill, part
        self.spec, self.size_bytes, self._is_full = store.spec, store.size_bytes, False

    @property
    def settled(self) -> Store:
        """What to read from: the plain store once all samples are there, until then this one."""
        self._is_full = self._is_full or bool(self.fill.is_there.all())
        return self._store if self._is_full else self

    def __len__(self) -> int:
        return len(self.fill.is_there)

    def read(self, index: int) -> np.ndarray:
        """One sample, prepared now if it is not there."""
        unsaved = self.fill.want(index)
        sample: np.ndarray = self._store.read(index) if unsaved is None else unsaved.parts[self._part].array
        return sample

    def read_into(self, index: int, out: np.ndarray) -> None:
        unsaved = self.fill.want(index)
        if unsaved is None:
            self._store.read_into(index, out)
        else:
            out[...] = unsaved.parts[self._part].array

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        if all(self.fill.want(index) is None for index in index_B.tolist()):
            self._store.gather_into(index_B, out_B)
        else:
            super().gather_into(index_B, out_B)

    def close(self) -> None:
        self.fill.close()
