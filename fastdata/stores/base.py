"""What every store can do once it is sealed."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fastdata.spec import SampleSpec

__all__ = ["Store"]


class Store(Protocol):
    """Prepared samples, read by index; sealed, so safe from any number of threads and processes.

    Pickles as a handle. Indices are positions in [0, N); they are checked by the dataset, not here.
    """

    @property
    def spec(self) -> SampleSpec:
        """Shape, dtype and form of the samples."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the samples take."""
        ...

    def __len__(self) -> int: ...

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one sample."""
        ...

    def read(self, index: int) -> np.ndarray:
        """One sample, read-only: a view where the store can, else a fresh array."""
        ...

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Copy the chosen samples into ``out_B`` (B, *shape), C-contiguous; dense stores only; allocates nothing."""
        ...

    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""
        ...
