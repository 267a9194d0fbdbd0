"""Writers of stores, in memory or on disk.

Any thread of any process that has a writer may use it. They share the file or memory block of the
samples, and the columns of the index.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastdata.errors import MemoryBudgetError
from fastdata.machine.blocks import ArrayBlock, Block
from fastdata.machine.units import format_bytes
from fastdata.pixels.arrays import Array, Bytes, Shape
from fastdata.pixels.samples import Form, SampleSpec
from fastdata.stores.disk import checksum
from fastdata.stores.disk_file import DiskFile
from fastdata.stores.source_codec import SourceDecoder
from fastdata.stores.store import ShapesDifferError, Store

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec

NO_LIMIT = 1 << 62
RAGGED_ALIGN_BYTES = 64
"""Raw samples of many shapes begin at multiples of this, so that their elements are aligned."""
_GROWTH_BYTES = 1 << 18
"""The least by which a file grows. A large file grows by a 32nd of its size."""
_USED = "used bytes"
"""Column with one number: the bytes of the file that are in use."""

_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """Form in which one part of all samples, such as the image, is stored.

    Args:
        spec: shape, dtype and form of the returned samples; the shape is None if they differ.
        dimensions: number of axes of each sample.
        codec: settings of the codec; None for raw samples.
    """

    spec: SampleSpec
    dimensions: int
    codec: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        dtype = np.dtype(self.spec.dtype)
        if dtype.hasobject or not dtype.itemsize or dtype.name != self.spec.dtype:
            raise ValueError(f"samples of {self.spec} cannot be stored")

    @property
    def is_table(self) -> bool:
        """True if raw samples are rows of one array, which on disk is a ``.npy`` file."""
        return self.codec is None and self.spec.shape is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterPlan(StoredPart):
    """A part of all samples, and the way its store is written.

    Args:
        coder: encoder of samples; None for raw samples. With a ``SourceDecoder`` the bytes of files
            are stored, and each sample is prepared when it is read.
        path: path of the new file on disk; None for memory.
        limit_bytes: the most bytes that may be reserved.
    """

    coder: Codec | SourceDecoder | None = None
    path: Path | None = None
    limit_bytes: int = NO_LIMIT


def write_any_shapes(
    write: Callable[[Sequence[WriterPlan]], _Made], plans: Sequence[WriterPlan]
) -> _Made:
    """Write samples as planned. If one has another shape, write all again with a shape for each.

    The plan comes from a few samples only, so others may have other shapes.
    """
    with contextlib.suppress(ShapesDifferError):
        return write(plans)
    return write([replace(plan, spec=replace(plan.spec, shape=None)) for plan in plans])


@dataclass(frozen=True, slots=True)
class Writer:
    """Writer of samples to a file, for any thread of any process that has it.

    In a table each sample has a fixed place. Other samples are stored in the order in which they
    are written, and the file grows as their sizes become known.

    Args:
        plan: plan of the store.
        file: file or memory block of the samples.
        index: columns of the index, see ``Store``.
    """

    plan: WriterPlan
    file: Block
    index: ArrayBlock

    @classmethod
    def open(cls, plan: WriterPlan, length: int) -> Writer:
        """Create a file for ``length`` samples. A table is reserved completely."""
        spec = plan.spec
        index: dict[str, Array] = {
            "offsets": np.zeros(length, np.int64),
            "sizes": np.zeros(length, np.int64),
            "shapes": np.zeros((length, plan.dimensions), np.int32),
            _USED: np.zeros(1, np.int64),
        }
        # With this header, ``np.load`` can read a table without fastdata.
        head = np.zeros(0, np.uint8)
        size_bytes = 1  # an empty file cannot be mapped
        if plan.is_table and spec.shape is not None:
            head = _array_head((length, *spec.shape), spec.dtype)
            sample_bytes = spec.sample_bytes
            size_bytes = head.size + length * sample_bytes
            index["offsets"] += head.size + np.arange(length) * sample_bytes
            index["sizes"] += sample_bytes
            index["shapes"] += np.array(spec.shape, np.int32)
        if plan.path is None:
            index["is_there"] = np.zeros(length, np.bool_)  # ``LazyStore`` sets it
            file = Block.create(size_bytes)
        else:
            index["sums"] = np.zeros(length, np.uint32)
            file = DiskFile.reserve(plan.path, size_bytes)
        file.write(0, head)
        return cls(plan, file, ArrayBlock.of(index, seal=False))

    def write(self, row: int, samples: Array, form: Form, shape: Shape | None = None) -> None:
        """Encode and store samples of one shape; more than one only in a table.

        Args:
            row: row of the first sample in the store.
            samples: values (n, *shape), or the bytes of a file for a ``SourceDecoder``.
            form: original form of the samples.
            shape: shape of the prepared sample, if it is known before the file is decoded.

        Raises:
            TypeError: the samples have another dtype, form or number of dimensions than the others.
            MemoryBudgetError: the samples do not fit within the limit.
            ShapesDifferError: the plan has a common shape, which the samples do not have.
            CacheError: the disk is full.
        """
        plan = self.plan
        spec = plan.spec
        data = np.ascontiguousarray(samples)
        if isinstance(plan.coder, SourceDecoder):
            shape = shape or plan.coder.sample(data[0].data).shape
        else:
            shape = samples.shape[1:]
            if samples.dtype != spec.dtype or form != spec.form:
                raise TypeError(
                    f"it is {_shown_form(form)} of {samples.dtype}, but other samples are "
                    f"{_shown_form(spec.form)} of {spec.dtype}; let the dataset, your "
                    "loader= or prepare= of CachedDataset return the same type for all samples"
                )
            if plan.coder is not None:
                encoded = plan.coder.encode(data[0, ...])  # data[0] may be a scalar
                data = np.frombuffer(encoded, np.uint8)[None]
        if spec.shape not in (None, shape):
            raise ShapesDifferError
        if len(shape) != plan.dimensions:
            raise TypeError(
                f"it has {len(shape)} dimensions, but other samples have {plan.dimensions}; let "
                "the dataset, your loader= or prepare= of CachedDataset return the same number of "
                "dimensions for all samples"
            )
        index = self.index
        # Without a lock, because each row is written by only one thread of one process.
        if not plan.is_table:
            index["offsets"][row] = self._take(data.nbytes)
            index["sizes"][row] = data.nbytes
            index["shapes"][row] = shape
        self.file.write(index["offsets"][row].item(), data)
        if "sums" in index:
            count = len(data)
            octets = data.reshape(-1).view(np.uint8).reshape(count, data.nbytes // count)
            index["sums"][row : row + count] = list(map(checksum, octets))

    def _take(self, size_bytes: int) -> int:
        """Reserve bytes of the file for a sample; return the offset of the first."""
        coder = self.plan.coder
        limit_bytes = self.plan.limit_bytes
        align_bytes = RAGGED_ALIGN_BYTES if coder is None else 1
        used = self.index[_USED]
        # Processes reserve bytes one after the other, under this lock, but write them at the same
        # time. Another process may have grown the file, so its size is read from the system. The
        # file grows by more than one sample, because reading how much memory is free takes long.
        with self.index.block.hold(0):
            start: int = used.item()
            end = start + -(-size_bytes // align_bytes) * align_bytes
            if end > limit_bytes:
                what = "prepared samples of many shapes"
                if coder is not None:
                    what = f"samples encoded by codec={coder.name!r}"
                raise MemoryBudgetError(
                    f"{what} need more than the {format_bytes(limit_bytes)} that are free"
                )
            if end > self.file.reserved_bytes():
                self.file.resize(min(end + max(end // 32, _GROWTH_BYTES), limit_bytes))
            # Set last, so that nothing is reserved if the file cannot grow.
            used[0] = end
        return start

    def finish(self, rows: Array) -> Store:
        """Seal the file, and return a store of the samples in ``rows``, which were written."""
        self.index.pop("is_there", None)
        used_bytes = self.index.pop(_USED).item()
        if not self.plan.is_table:
            self.file.resize(max(used_bytes, 1))
        self.file.seal()
        # The bytes of samples that were left out stay in the file, but their rows are removed.
        index = ArrayBlock.of({name: column[rows] for name, column in self.index.items()})
        self.index.close()
        return Store((self.file,), self.plan.spec, index, self.plan.coder)

    def close(self) -> None:
        """Discard everything that was written, including a file on disk. Idempotent."""
        self.file.close()
        self.index.close()
        if self.plan.path is not None:
            self.plan.path.unlink(missing_ok=True)


def _array_head(shape: Shape, dtype: str) -> Bytes:
    """Return the header that ``np.save`` writes before such an array: a multiple of 64 bytes."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    )
    return np.frombuffer(head.getvalue(), np.uint8)


_Opened = TypeVar("_Opened", bound="Store | Writer | Block")


def open_all(opening: Iterable[_Opened]) -> list[_Opened]:
    """Return all objects that an iterable opens; if one cannot be opened, close the others."""
    opened = []
    with contextlib.ExitStack() as cleanup:
        for each in opening:
            cleanup.callback(each.close)
            opened.append(each)
        cleanup.pop_all()
    return opened


_SHOWN_FORMS: dict[str, str] = {
    "hwc": "an array (H, W, C)",
    "hw": "an array (H, W)",
    "pil": "a PIL image",
    "array": "an array",
}


def _shown_form(form: Form) -> str:
    return _SHOWN_FORMS.get(form, f"a {form}")
