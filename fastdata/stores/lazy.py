"""Stores that are filled by their readers: each sample is prepared when it is first read.

Training begins at once, without a wait until all samples are prepared.
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
    """Samples of one shape, each of which is prepared and written by its first reader.

    Other readers of the same sample wait. A reader that dies leaves it to the next one.
    """

    def __init__(self, filler: StoreFiller) -> None:
        [writer] = filler.writers
        super().__init__((writer.file,), writer.plan.spec, writer.index)
        self._filler = filler
        self._is_there = writer.index["is_there"]  # (N,), shared by all processes

    def expect(self, indices: Sequence[int]) -> None:
        missing = [index for index in indices if not self._is_there[index]]
        self._filler.preparer.source.expect(missing)

    def filled_share(self, index_B: Array | None = None) -> float:
        is_there = self._is_there if index_B is None else self._is_there[index_B]
        return float(np.count_nonzero(is_there) / max(is_there.size, 1))

    def ensure(self, index_B: Array) -> None:
        """Prepare and write the samples that are not there yet.

        Raises:
            SampleError: a sample cannot be read or prepared; the others stay.
        """
        # Without a lock: once a sample is there, it stays and never changes.
        missing = np.unique(index_B[~self._is_there[index_B]]).tolist()
        if not missing:
            return
        # A lock for each sample. The kernel frees those of a process that is killed: then the next
        # reader prepares the sample.
        with self.index.block.hold(*missing):
            # Another reader may have prepared some while this one waited.
            left = [index for index in missing if not self._is_there[index]]
            written = self._filler.write(left)
            # Set after the pixels were written, and before the locks are freed.
            self._is_there[list(written.targets)] = True
        for error in written.errors.values():
            raise error

    def __reduce__(self) -> tuple[object, ...]:
        return LazyStore, (self._filler,)
