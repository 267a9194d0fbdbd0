"""Raw samples end to end in a shared block."""

from __future__ import annotations

import numpy as np

from fastdata.blocks import ArrayBlock, Block
from fastdata.spec import SampleSpec
from fastdata.stores.heap import HeapStore

__all__ = ["DenseStore", "RaggedStore"]


class DenseStore:
    """Samples of one shape: one array (N, *shape) in a block.

    Args:
        block: row r starts at byte ``r * spec.sample_bytes``; sealed, unless samples are still to come.
        spec: dense.
        rows: int64 (N,), the row of each sample where some rows are not in use (skipped samples), else None.
        length: N.
    """

    gives_views = True

    def __init__(self, block: Block, spec: SampleSpec, *, length: int, rows: np.ndarray | None = None) -> None:
        self._block = block
        self._spec = spec
        self._length = length
        self._index = None if rows is None else ArrayBlock({"rows": rows})
        self._open()

    def _open(self) -> None:
        assert self._spec.shape is not None
        row_count = self._block.size_bytes // max(self._spec.sample_bytes, 1)
        self._samples = self._block.array(self._spec.dtype, (row_count, *self._spec.shape))
        self._samples.flags.writeable = False
        self._rows = None if self._index is None else self._index["rows"]

    @property
    def spec(self) -> SampleSpec:
        """Shape, dtype and form of the samples."""
        return self._spec

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the samples take."""
        return self._block.size_bytes

    def __len__(self) -> int:
        return self._length

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one sample."""
        shape: tuple[int, ...] = self._samples.shape[1:]
        return shape

    def read(self, index: int) -> np.ndarray:
        """One sample: a read-only view."""
        sample: np.ndarray = self._samples[index if self._rows is None else self._rows[index]]
        return sample

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Copy one sample."""
        out[...] = self.read(index)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Copy the chosen samples into ``out_B`` (B, *shape); one call, at memory speed; allocates nothing."""
        rows_B = index_B if self._rows is None else self._rows[index_B]
        np.take(self._samples, rows_B, axis=0, out=out_B, mode="clip")

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        """Where the chosen samples lie in memory: int64 (B,)."""
        rows_B = index_B if self._rows is None else self._rows[index_B]
        addresses_B: np.ndarray = self._samples.__array_interface__["data"][0] + rows_B * self._spec.sample_bytes
        return addresses_B

    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""
        self._samples = self._samples[:0].copy()  # no view: a view would keep the mapping
        self._block.close()
        if self._index is not None:
            self._rows = None
            self._index.close()

    def __getstate__(self) -> tuple[Block, SampleSpec, int, ArrayBlock | None]:
        return self._block, self._spec, self._length, self._index

    def __setstate__(self, state: tuple[Block, SampleSpec, int, ArrayBlock | None]) -> None:
        self._block, self._spec, self._length, self._index = state
        self._open()


class RaggedStore(HeapStore):
    """Samples that each have a shape of their own, in any order in a block; ``spec`` is ragged."""

    gives_views = True

    def read(self, index: int) -> np.ndarray:
        """One sample: a read-only view."""
        sample: np.ndarray = np.ndarray(
            self.shape(index), self._spec.dtype, self._bytes.data, int(self._offsets[index])
        )
        return sample

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Copy one sample."""
        out[...] = self.read(index)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Not for ragged samples."""
        raise TypeError("ragged samples have no common shape to be gathered in")

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        """Where the chosen samples lie in memory: int64 (B,)."""
        addresses_B: np.ndarray = self._bytes.__array_interface__["data"][0] + self._offsets[index_B]
        return addresses_B

    def __reduce__(self) -> tuple[object, ...]:
        return RaggedStore, (self._block, self._spec, self._index)
