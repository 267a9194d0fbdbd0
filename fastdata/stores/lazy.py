"""Stores that are filled by their readers: each sample is prepared when it is first read.

Training begins at once, instead of after all samples are prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastdata.pixels.arrays import Array
from fastdata.stores.store import Store

if TYPE_CHECKING:
    from fastdata.stores.ingest import StoreFiller


class LazyStore(Store):
    """Samples of one shape, each prepared and written by its first reader.

    Other readers of the same sample wait. If its reader dies, the next one prepares it.
    """

    def __init__(self, filler: StoreFiller) -> None:
        [writer] = filler.writers
        super().__init__((writer.file,), writer.plan.spec, writer.index)
        self._filler = filler
        self._is_there = writer.index["is_there"]  # bool (N,), shared by all processes

    def expect(self, indices: Sequence[int]) -> None:
        missing = [index for index in indices if not self._is_there[index]]
        self._filler.preparer.source.expect(missing)

    def filled_share(self, index_B: Array | None = None) -> float:
        is_there = self._is_there if index_B is None else self._is_there[index_B]
        return float(np.count_nonzero(is_there) / max(is_there.size, 1))

    def ensure(self, index_B: Array) -> None:
        """Prepare and write those samples that are still missing.

        Raises:
            SampleError: a sample cannot be read or prepared. The others are written.
        """
        # Checked without a lock, because a sample that is there stays and never changes.
        missing = np.unique(index_B[~self._is_there[index_B]]).tolist()
        if not missing:
            return
        # Each sample has its own lock. If a process is killed, the kernel releases its locks, and
        # the next reader prepares the samples.
        with self.index.block.hold(*missing):
            # Another reader may have prepared some while this one waited.
            left = [index for index in missing if not self._is_there[index]]
            written = self._filler.write(left)
            # Set after the pixels are written, for readers without a lock, and before the locks are
            # released, for those that wait.
            self._is_there[list(written.targets)] = True
        for error in written.errors.values():
            raise error

    def __reduce__(self) -> tuple[object, ...]:
        return LazyStore, (self._filler,)
