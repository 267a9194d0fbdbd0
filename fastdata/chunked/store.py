"""What a dataset serves a chunk's samples from, by their positions in the dataset."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdata.spec import SampleSpec
from fastdata.stores.base import Store

__all__ = ["ChunkStore", "ChunkTargets"]


class ChunkStore:
    """Some samples of a dataset, by their positions there; see ``fastdata.stores.base.Store``.

    Args:
        store: of the chunk's rows.
        rows: row of each position.
        is_there: bool (rows,), whether the sample of each row has arrived; changes with the time.
        shape: of some sample.
    """

    gives_views = True

    def __init__(self, store: Store, rows: dict[int, int], is_there: np.ndarray, shape: tuple[int, ...]) -> None:
        self._store, self._rows, self._is_there, self._some_shape = store, rows, is_there, shape

    @property
    def spec(self) -> SampleSpec:
        """Shape, dtype and form of the samples."""
        return self._store.spec

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the samples take."""
        return self._store.size_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one sample; where it is not here, of some other, with as many dimensions."""
        row = self._rows.get(index)
        return self._some_shape if row is None or not self._is_there[row] else self._store.shape(row)

    def read(self, index: int) -> np.ndarray:
        """One sample: a read-only view.

        Raises:
            LookupError: it is not here.
        """
        row = self._rows.get(index)
        if row is None or not self._is_there[row]:
            raise _not_here(index)
        return self._store.read(row)

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Copy one sample."""
        self._store.read_into(self._rows[index], out)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Copy the chosen samples into ``out_B`` (B, *shape)."""
        rows = self._rows
        self._store.gather_into(np.array([rows[index] for index in index_B.tolist()], np.int64), out_B)

    def close(self) -> None:
        """Nothing: the memory is the slot's."""


class ChunkTargets:
    """The targets of a chunk's samples where only reading the samples told them; see ``fastdata.contents.Table``."""

    has_paths = False

    def __init__(self, length: int, targets: dict[int, Any]) -> None:
        self._length, self._targets = length, targets

    def __len__(self) -> int:
        return self._length

    def path(self, index: int) -> str:
        """Not for samples that are no files."""
        raise LookupError(f"sample {index} is no file")

    def target(self, index: int) -> Any:
        """The target of one sample."""
        if index not in self._targets:
            raise _not_here(index)
        return self._targets[index]

    def target_array(self) -> np.ndarray | None:
        """None: they are single values."""
        return None

    def close(self) -> None:
        """Nothing: they go with the chunk."""


def _not_here(index: int) -> LookupError:
    return LookupError(
        f"sample {index} is not in memory with the one asked for: a __getitem__ that reads other samples than its own "
        "needs a DataLoader, not a ChunkedLoader"
    )
