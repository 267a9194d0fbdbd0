"""Filling a block of memory or a file with samples, from any worker, and sealing it as a store."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastdata.errors import MemoryBudgetError
from fastdata.machine.memory import format_bytes
from fastdata.machine.shared import ArrayBlock, Block, ByteLocks
from fastdata.pixels.images import Form, SampleSpec, SourceDecoder
from fastdata.stores.files import DiskFile
from fastdata.stores.readers import FileStore, checksum

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec

ALIGN_BYTES = 64
"""Each raw sample of a shape of its own begins at a multiple of these."""
_CHUNK_BYTES = 64 << 20
"""Reserved at a time: a thread does it while others decode."""
_NO_LIMIT = 1 << 62
_ENDS = "used and reserved"


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
        first_bytes: about what samples take, unless they are a table.
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
        """Whether samples are one array (rows, *shape), raw; on disk a ``.npy`` file."""
        return self.codec is None and self.spec.is_dense

    def of_any_shapes(self) -> WriterPlan:
        shape = self.spec.shape
        dimensions = self.dimensions if shape is None else len(shape)
        return replace(self, spec=replace(self.spec, shape=None), dimensions=dimensions)


class Writer:
    """Puts samples into a file, from any thread, or process that has it.

    In a table each has its place. All others lie in the order in which they are written, and the
    file grows as their sizes become known.

    Args:
        plan: of the store.
        file: that is written to.
        index: of the store, as ``FileStore`` has it.
    """

    def __init__(self, plan: WriterPlan, file: Block, index: ArrayBlock) -> None:
        self.plan = plan
        self.file = file
        self.spec = plan.spec
        if isinstance(plan.codec, SourceDecoder):
            self.spec = SampleSpec(shape=None, dtype="uint8", form="array")
        self.index = index
        self._columns = dict(index)  # to find a view takes longer than to use it
        self._locks = ByteLocks(index.block)

    @classmethod
    def open(cls, plan: WriterPlan, length: int) -> Writer:
        """Of a new file with so many rows."""
        head = b""
        index = {"offsets": np.zeros(length, np.int64)}
        if plan.is_table:
            head = b"" if plan.path is None else _npy_head(plan.spec, length)
            index["offsets"] = len(head) + np.arange(length) * plan.spec.sample_bytes
            size_bytes = len(head) + length * plan.spec.sample_bytes
        else:
            index["sizes"] = np.zeros(length, np.int64)
            index["shapes"] = np.zeros((length, plan.dimensions), np.int32)
            size_bytes = min(plan.first_bytes, plan.limit_bytes)
            if plan.path is None:
                size_bytes = min(size_bytes, _CHUNK_BYTES)
        size_bytes = max(size_bytes, 1)
        index[_ENDS] = np.array([0, size_bytes])
        if plan.path is None:
            file = Block.create(size_bytes)
        else:
            index["sums"] = np.zeros(length, np.uint64)
            path = plan.path.with_name(plan.path.name + (".npy" if plan.is_table else ".bin"))
            file = DiskFile.reserve(path, size_bytes)
        file.write(0, np.frombuffer(head, np.uint8))
        writer = cls(plan, file, ArrayBlock(index, seal=False))
        writer.flush()  # by this process, not by those that are forked
        return writer

    def write(self, row: int, array: np.ndarray, form: Form) -> None:
        """Store a sample, encoded if it is to be.

        Raises:
            TypeError: it is not of the type that is stored.
            MemoryBudgetError: there is no room left within the limit.
            ShapesDifferError: it is not of the common shape, or has more or fewer dimensions than
                the others.
            CacheError: the disk is full.
            Exception: it cannot be encoded; or the file was opened and is damaged.
        """
        if (array.dtype.name, form) != (self.spec.dtype, self.spec.form):
            others = f"the others are of {self.spec.dtype} {self.spec.form}"
            cure = "give all samples one type in prepare="
            raise TypeError(f"it is of {array.dtype} {form}, {others}; {cure}")
        codec = self.plan.codec
        common = self.plan.spec.shape
        shape = array.shape
        data = np.ascontiguousarray(array)
        if isinstance(codec, SourceDecoder):
            is_known = self.plan.is_certain and common is not None
            shape = (common or ()) if is_known else codec.sample(array.data).shape
        if common not in (None, shape):
            raise ShapesDifferError(f"sample {row} has shape {shape}, those before it {common}")
        if codec is not None and not isinstance(codec, SourceDecoder):
            data = np.frombuffer(codec.encode(data), np.uint8)
        columns = self._columns
        if self.plan.is_table:
            start = columns["offsets"][row].item()
        else:
            dimensions = columns["shapes"].shape[1]
            if len(shape) != dimensions:
                counts = f"{len(shape)} dimensions, those before it {dimensions}"
                raise ShapesDifferError(f"sample {row} has {counts}")
            start = self._take(data.nbytes)
            columns["offsets"][row] = start
            columns["sizes"][row] = data.nbytes
            columns["shapes"][row] = shape
        self.file.write(start, data)
        if "sums" in columns:
            columns["sums"][row] = checksum(data.reshape(-1).view(np.uint8))

    def _take(self, size_bytes: int) -> int:
        """The first byte of so many that are nobody else's."""
        align_bytes = ALIGN_BYTES if self.plan.codec is None else 1
        ends = self._columns[_ENDS]
        with self._locks.hold(0):
            start: int = ends[0].item()
            end = start + max(-(-size_bytes // align_bytes) * align_bytes, 1)
            if end > ends[1]:
                self._grow(end)
            ends[0] = end
        return start

    def _grow(self, end: int) -> None:
        plan = self.plan
        if end > plan.limit_bytes:
            what = "prepared samples of many shapes"
            if isinstance(plan.codec, SourceDecoder):
                what = "the files' own bytes"
            elif plan.codec is not None:
                what = f"samples encoded by codec={plan.codec.name!r}"
            limit = format_bytes(plan.limit_bytes)
            raise MemoryBudgetError(f"{what} need more than the {limit} that is free")
        # Of what is expected a sixteenth, so that little stays unused.
        more_bytes = min(max(plan.first_bytes // 16, 1 << 20), _CHUNK_BYTES)
        size_bytes = min(end + more_bytes, plan.limit_bytes)
        self.file.grow(size_bytes)
        self._columns[_ENDS][1] = size_bytes

    def flush(self) -> None:
        """Finish what this thread has written."""
        if isinstance(self.file, DiskFile):
            self.file.flush()

    def finish(self, rows: np.ndarray) -> FileStore:
        """Seal the file, and give the samples in these rows, all that were written, as a store."""
        used_bytes, reserved_bytes = self._columns.pop(_ENDS).tolist()
        if not self.plan.is_table:
            self.file.grow(reserved_bytes)  # by other processes so far
            self.file.trim(used_bytes)
        self.file.seal()
        index = ArrayBlock({name: column[rows] for name, column in self._columns.items()})
        self._columns = {}
        self.index.close()
        return FileStore((self.file,), self.plan.spec, index, self.plan.codec)

    def close(self) -> None:
        """Give up what was written, a file on disk included. Idempotent."""
        self.file.close()
        self._columns = {}
        self.index.close()
        if isinstance(self.file, DiskFile):
            self.file.path.unlink(missing_ok=True)

    def __reduce__(self) -> tuple[object, ...]:
        return Writer, (self.plan, self.file, self.index)


def open_writers(plans: Sequence[WriterPlan], length: int) -> tuple[Writer, ...]:
    """The writer of each part of samples; none stays open where one cannot be made."""
    with contextlib.ExitStack() as cleanup:
        writers = []
        for plan in plans:
            writers.append(Writer.open(plan, length))
            cleanup.callback(writers[-1].close)
        cleanup.pop_all()
    return tuple(writers)


def _npy_head(spec: SampleSpec, rows: int) -> bytes:
    """What ``np.save`` writes before an array (rows, *shape): a multiple of 64 bytes."""
    assert spec.shape is not None
    head = io.BytesIO()
    shape = (rows, *spec.shape)
    what = {"descr": np.dtype(spec.dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, what)
    return head.getvalue()
