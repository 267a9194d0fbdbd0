"""Filling a block of memory or a file with samples, from any worker, and sealing it as a store.

A store may also be filled by its readers: each sample is prepared on its first read, in whatever
process that is.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastdata.errors import MemoryBudgetError, SampleError, sample_error
from fastdata.machine.memory import format_bytes
from fastdata.machine.shared import ArrayBlock, Block, ByteLocks
from fastdata.pixels.images import SampleSpec, SourceDecoder
from fastdata.report import warn_user
from fastdata.stores.files import DiskFile
from fastdata.stores.readers import FileStore, Store, checksum

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec

ALIGN_BYTES = 64
"""Each raw sample of a shape of its own begins at a multiple of these."""
_GROWTH = 1 / 16
_AT_ONCE = 16
"""Samples that a reader prepares while others wait for them."""
_NO_LIMIT = 1 << 62


class Extent(NamedTuple):
    """Where a sample lies: its first byte, its bytes there; and its shape."""

    start: int
    size_bytes: int
    shape: tuple[int, ...]


class ShapesDifferError(Exception):
    """A sample does not have the shape that the others have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterPlan:
    """A store that is to be written.

    Args:
        spec: of the samples as they are served; dense if all have one shape.
        dimensions: of their shapes, where they may differ or are encoded.
        codec: encodes them. A ``SourceDecoder`` keeps files' bytes as they are: each is prepared
            when it is read.
        is_certain: whether the spec of files is dense for sure; else each is opened once to learn
            its sample's shape.
        path: of the new file on disk, without its ending; None for memory.
        first_bytes: reserved at once, unless samples are a table.
        limit_bytes: the most that may be reserved.
    """

    spec: SampleSpec
    dimensions: int = 0
    codec: Codec | SourceDecoder | None = None
    is_certain: bool = False
    path: Path | None = None
    first_bytes: int = 1
    limit_bytes: int = _NO_LIMIT

    @property
    def is_table(self) -> bool:
        """Whether samples are raw and of one shape: one array (rows, *shape), on disk a ``.npy`` file."""
        return self.codec is None and self.spec.is_dense

    def of_any_shapes(self) -> WriterPlan:
        shape = self.spec.shape
        dimensions = self.dimensions if shape is None else len(shape)
        return replace(self, spec=replace(self.spec, shape=None), dimensions=dimensions)


class Writer:
    """Puts samples into a file, from any thread, or process that was forked with it.

    In a table each has its place. All others lie in the order in which they are written, raw ones
    from multiples of 64 bytes on, encoded ones end to end, and the file grows as their sizes become
    known.

    Args:
        plan: of the store.
        length: number of its rows; 0 if only the caller is to know where samples lie.

    Attributes:
        spec: of what is written.
    """

    def __init__(self, plan: WriterPlan, length: int = 0) -> None:
        self.plan, self.spec, head = plan, plan.spec, b""
        index = {"offsets": np.zeros(length, np.int64)}
        if isinstance(plan.codec, SourceDecoder):
            self.spec = SampleSpec(shape=None, dtype="uint8", form="array")
        if plan.is_table:
            head = b"" if plan.path is None else _npy_head(plan.spec, length)
            index["offsets"] = len(head) + np.arange(length) * plan.spec.sample_bytes
            size_bytes = len(head) + length * plan.spec.sample_bytes
        else:
            index["sizes"], index["shapes"] = (
                np.zeros(length, np.int64),
                np.zeros((length, plan.dimensions), np.int32),
            )
            size_bytes = min(plan.first_bytes, plan.limit_bytes)
        index["used and reserved"] = np.array([0, max(size_bytes, 1)])
        if plan.path is None:
            self.file: Block = Block.create(max(size_bytes, 1))
        else:
            index["sums"] = np.zeros(length, np.uint64)
            path = plan.path.with_name(plan.path.name + (".npy" if plan.is_table else ".bin"))
            self.file = DiskFile.reserve(path, max(size_bytes, 1))
        self._index, self._length = ArrayBlock(index, seal=False), length
        self._columns = dict(self._index)  # to find a view takes longer than to use it
        self._locks = ByteLocks(self._index.block)
        self.file.write(0, np.frombuffer(head, np.uint8))
        self.flush()  # by this process, not by those that are forked

    def write(self, row: int, array: np.ndarray) -> Extent:
        """Store a sample, encoded if it is to be.

        Raises:
            MemoryBudgetError: there is no room left within the limit.
            ShapesDifferError: it is not of the common shape, or has more or fewer dimensions than
                the others.
            CacheError: the disk is full.
            Exception: it cannot be encoded; or the file was opened and is damaged.
        """
        codec, common, shape, data = (
            self.plan.codec,
            self.plan.spec.shape,
            array.shape,
            np.ascontiguousarray(array),
        )
        if isinstance(codec, SourceDecoder):
            shape = (
                common
                if self.plan.is_certain and common is not None
                else codec.sample(array.data).shape
            )
        if common not in (None, shape):
            raise ShapesDifferError(f"sample {row} has shape {shape}, those before it {common}")
        if codec is not None and not isinstance(codec, SourceDecoder):
            data = np.frombuffer(codec.encode(data), np.uint8)
        start: int = (
            self._columns["offsets"][row].item() if self.plan.is_table else self._take(data.nbytes)
        )
        self.file.write(start, data)
        if self._length:
            self._enter(row, start, data, shape)
        return Extent(start, data.nbytes, shape)

    def _take(self, size_bytes: int) -> int:
        """The first byte of so many that are nobody else's."""
        align_bytes = ALIGN_BYTES if self.plan.codec is None else 1
        with self._locks.hold(0):
            start: int
            start, reserved_bytes = self._columns["used and reserved"].tolist()
            end = start + max(-(-size_bytes // align_bytes) * align_bytes, 1)
            if end > reserved_bytes:
                self._grow(end)
            self._columns["used and reserved"][0] = end
        return start

    def _grow(self, end: int) -> None:
        codec, limit_bytes = self.plan.codec, self.plan.limit_bytes
        if end > limit_bytes:
            what = "prepared samples of many shapes"
            if codec is not None:
                is_source = isinstance(codec, SourceDecoder)
                what = (
                    "the files' own bytes"
                    if is_source
                    else f"samples encoded by codec={codec.name!r}"
                )
            raise MemoryBudgetError(
                f"{what} need more than the {format_bytes(limit_bytes)} that is free"
            )
        size_bytes = min(end + max(int(self.plan.first_bytes * _GROWTH), 1 << 20), limit_bytes)
        self.file.grow(size_bytes)
        self._columns["used and reserved"][1] = size_bytes

    def _enter(self, row: int, start: int, data: np.ndarray, shape: tuple[int, ...]) -> None:
        index = self._columns
        if not self.plan.is_table:
            if len(shape) != index["shapes"].shape[1]:
                counts = f"{len(shape)} dimensions, those before it {index['shapes'].shape[1]}"
                raise ShapesDifferError(f"sample {row} has {counts}")
            index["offsets"][row], index["sizes"][row], index["shapes"][row] = (
                start,
                data.nbytes,
                shape,
            )
        if "sums" in index:
            index["sums"][row] = checksum(data.reshape(-1).view(np.uint8))

    def flush(self) -> None:
        """Finish what this thread has written."""
        if isinstance(self.file, DiskFile):
            self.file.flush()

    def rewind(self) -> None:
        """Begin again, over what was written."""
        self._columns["used and reserved"][0] = 0

    def live(self) -> FileStore:
        """A store over memory while it is written to; rows that were not written yet must not be read."""
        return FileStore((self.file,), self.plan.spec, self._index, self.plan.codec)

    def finish(self, rows: np.ndarray) -> FileStore:
        """Seal the file, and give the samples in these rows, all that were written, as a store."""
        used_bytes, reserved_bytes = self._columns["used and reserved"].tolist()
        if not self.plan.is_table:
            self.file.grow(reserved_bytes)  # by other processes so far
            self.file.trim(used_bytes)
        self.file.seal()
        columns = {
            name: column[rows]
            for name, column in self._columns.items()
            if name != "used and reserved"
        }
        self._let_go()
        return FileStore((self.file,), self.plan.spec, ArrayBlock(columns), self.plan.codec)

    def close(self) -> None:
        """Give up what was written, a file on disk included. Idempotent."""
        self.file.close()
        self._let_go()
        if isinstance(self.file, DiskFile):
            self.file.path.unlink(missing_ok=True)

    def _let_go(self) -> None:
        self._columns = {}
        self._index.close()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_columns"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._columns = dict(self._index)


def open_writers(plans: Sequence[WriterPlan], length: int) -> tuple[Writer, ...]:
    """The writer of each part of samples; none stays open where one cannot be made."""
    with contextlib.ExitStack() as cleanup:
        writers = []
        for plan in plans:
            writers.append(Writer(plan, length))
            cleanup.callback(writers[-1].close)
        cleanup.pop_all()
    return tuple(writers)


def _npy_head(spec: SampleSpec, rows: int) -> bytes:
    """What ``np.save`` writes before an array (rows, *shape): a multiple of 64 bytes."""
    assert spec.shape is not None
    head = io.BytesIO()
    what = {"descr": np.dtype(spec.dtype).str, "fortran_order": False, "shape": (rows, *spec.shape)}
    np.lib.format.write_array_header_1_0(head, what)
    return head.getvalue()


class LazyFill:
    """Fills the stores of all parts of a dataset's samples, each sample once.

    Who reads a sample that is not there prepares and writes it, while others who want the same one
    wait. A reader that dies leaves the sample to the next one.

    Args:
        path: of the samples, a ``prepare.WritePath``; what its writers write to is reserved.
        length: number of samples.
    """

    def __init__(self, path: Any, length: int) -> None:
        self._path, self.holds_gil = path, path.forks
        self._is_out_of_room = False
        self._live = [writer.live() for writer in path.writers]
        self._marks = ArrayBlock({"is_there": np.zeros(length, np.bool_)}, seal=False)
        self._locks = ByteLocks(self._marks.block)
        self.is_there = self._marks["is_there"]  # (N,), for every process to see

    def stores(self) -> tuple[LazyStore, ...]:
        return tuple(LazyStore(store, self, part) for part, store in enumerate(self._live))

    def expect(self, indices: Sequence[int]) -> None:
        self._path.source.expect([index for index in indices if not self.is_there[index]])

    def want(self, index_B: np.ndarray) -> dict[int, Any]:
        """See to it that samples are there; those that there is no room for are returned, as they were read.

        Raises:
            SampleError: one cannot be read or prepared; what is there of the others stays.
        """
        missing, unsaved = np.unique(index_B[~self.is_there[index_B]]).tolist(), dict[int, Any]()
        for first in range(0, len(missing), _AT_ONCE):
            group = missing[first : first + _AT_ONCE]
            with self._locks.hold(*group):
                unsaved |= self._fill([index for index in group if not self.is_there[index]])
        return unsaved

    def _fill(self, indices: Sequence[int]) -> dict[int, Any]:
        unsaved, errors = dict[int, Any](), list[SampleError]()
        for index, sample in zip(indices, self._path.read_all(indices), strict=True):
            if isinstance(sample, SampleError):
                errors.append(sample)
            elif self._is_out_of_room or not self._is_written(sample):
                unsaved[index] = sample.copied()
            else:
                self.is_there[index] = True
        if errors:
            raise errors[0]
        return unsaved

    def _is_written(self, sample: Any) -> bool:
        """Write a sample; False where there is no room any more."""
        try:
            self._path.write(sample)
        except ShapesDifferError as found:
            index = sample.position
            cause = ValueError(
                f"{found}, and fill='lazy' has taken these for the shape of all; use fill='eager'"
            )
            raise sample_error(self._path.source.path(index), index, cause) from None
        except MemoryBudgetError:
            self._is_out_of_room = True
            there = f"{int(np.count_nonzero(self.is_there))} of {len(self.is_there)} samples"
            warn_user(f"the store is full with {there}; the others are prepared each time")
        return not self._is_out_of_room

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.is_there = self.is_there[:0].copy()
        for part in (self._marks, *self._path.writers, *self._live):
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

    gives_views = (
        True  # whole samples should be asked for: some may have to be prepared to know their shape
    )

    def __init__(self, store: Store, fill: LazyFill, part: int) -> None:
        self._store, self._fill, self._part = store, fill, part
        self.spec, self.size_bytes, self._is_full = store.spec, store.size_bytes, False

    def expect(self, indices: Sequence[int]) -> None:
        if self._part == 0:
            self._fill.expect(indices)

    @property
    def settled(self) -> Store:
        """The plain store once all samples are there."""
        self._is_full = self._is_full or bool(self._fill.is_there.all())
        return self._store if self._is_full else self

    @property
    def holds_gil(self) -> bool:
        return self.settled is self and self._fill.holds_gil

    def filled_share(self, index_B: np.ndarray | None = None) -> float:
        is_there_B = self._fill.is_there if index_B is None else self._fill.is_there[index_B]
        return float(np.count_nonzero(is_there_B) / max(is_there_B.size, 1))

    def __len__(self) -> int:
        return len(self._fill.is_there)

    def read_all(self, index_B: np.ndarray) -> list[np.ndarray]:
        """Samples, prepared now if they are not there."""
        unsaved = self._fill.want(index_B)
        return [self._read(index, unsaved) for index in index_B.tolist()]

    def _read(self, index: int, unsaved: Mapping[int, Any]) -> np.ndarray:
        if index not in unsaved:
            return self._store.read(index)
        sample: np.ndarray = unsaved[index].parts[self._part].array
        return sample

    def read(self, index: int) -> np.ndarray:
        return self.read_all(np.array([index]))[0]

    def read_into(self, index: int, out: np.ndarray) -> None:
        self.gather_into(np.array([index]), out[None])

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        unsaved = self._fill.want(index_B)
        if not unsaved:
            self._store.gather_into(index_B, out_B)
            return
        for index, out in zip(index_B.tolist(), out_B, strict=True):
            out[...] = self._read(index, unsaved)

    def close(self) -> None:
        self._fill.close()
