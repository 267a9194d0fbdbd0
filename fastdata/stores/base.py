"""What every store can do once it is sealed."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fastdata.spec import SampleSpec

__all__ = ["Store"]


class Store(Protocol):
    """Prepared samples, read by index; sealed, so safe from any number of threads and processes.

    Pickles as a handle. Indices are positions in [0, N); they are checked by the dataset, not here. What reads encoded
    samples raises UndecodableError for one that is damaged; the others can still be read.
    """

    @property
    def spec(self) -> SampleSpec:
        """Shape, dtype and form of the samples."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the samples take."""
        ...

    @property
    def gives_views(self) -> bool:
        """Whether ``read`` costs nothing, because samples lie there as they are served."""
        ...

    def __len__(self) -> int: ...

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one sample."""
        ...

    def read(self, index: int) -> np.ndarray:
        """One sample, read-only: a view where the store can, else a fresh array."""
        ...

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Put one sample into ``out``, C-contiguous and of its shape."""
        ...

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Copy the chosen samples into ``out_B`` (B, *shape), C-contiguous; dense stores only."""
        ...

    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""
        ...
