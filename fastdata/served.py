"""What a loader sees of a fastdata dataset: which samples, in which epoch, on which visit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Subset

from fastdata.batch import IndexBatch
from fastdata.dataset import PreparedDataset
from fastdata.visits import EpochVisits

__all__ = ["LoaderEpochs", "Served", "VisitedBatches"]

MOSTLY_FILLED = 0.9
"""Share of the samples from which on threads are worth it, although some of the rest are still to be prepared."""


class LoaderEpochs:
    """Counts a loader's epochs, for the random draws.

    A loader counts by itself, so that a second loader over the same data does not disturb it, but begins where earlier
    loaders of the dataset have got to: a loader made anew each epoch must not repeat its draws.
    """

    def __init__(self) -> None:
        self.current: int | None = None
        self._set: int | None = None

    def set(self, epoch: int) -> None:
        """Stay at ``epoch``."""
        self._set = epoch

    def begin(self, dataset: PreparedDataset) -> None:
        """Go on to the epoch set here, else the one set on the dataset, else the next."""
        self.current = dataset.begin_epoch(self.current) if self._set is None else self._set

    def resume(self, dataset: PreparedDataset, epoch: int, *, is_begun: bool) -> None:
        """Go on with ``epoch`` itself if it has begun, else as after the one before it."""
        self.current = epoch - 1
        self.begin(dataset)
        if is_begun:
            self.current = epoch

    def coming(self, dataset: PreparedDataset) -> int:
        """Number of the epoch that would begin now if none is set."""
        return dataset.epochs_begun if self.current is None else self.current + 1


@dataclass(frozen=True, slots=True)
class Served:
    """A fastdata dataset behind a loader, and which of its samples the loader sees: all, or those of a ``Subset``."""

    dataset: PreparedDataset
    subset: np.ndarray | None

    @classmethod
    def find(cls, dataset: Any) -> Served | None:
        """Look behind any ``Subset``; None if there is no fastdata dataset."""
        subset: np.ndarray | None = None
        while type(dataset) is Subset:
            indices = np.asarray(dataset.indices, dtype=np.int64)
            subset = indices if subset is None else indices[subset]
            dataset = dataset.dataset
        return cls(dataset, subset) if isinstance(dataset, PreparedDataset) else None

    @property
    def obstacle(self) -> str | None:
        """Why whole batches cannot be read; None if they can."""
        return self.dataset.batch_obstacle

    @property
    def is_filling(self) -> bool:
        """Whether many of the samples will be prepared when they are read, which processes do better than threads."""
        return self.obstacle is None and self.dataset.filled_share(self.subset) < MOSTLY_FILLED

    @property
    def sample_bytes(self) -> int | None:
        """Size of the image of every sample; None where they differ, or where whole batches cannot be read."""
        return self.dataset.served_bytes

    def positions(self, indices: list[int]) -> np.ndarray:
        """Positions in the dataset (int64, B) of indices that a sampler gave.

        Raises:
            IndexError: an index is out of range.
            TypeError: an index is no number.
        """
        index_B = np.asarray(indices, dtype=np.int64)
        if index_B.ndim != 1:
            raise TypeError(f"a batch of sample numbers is needed, and the sampler gave {indices!r}")
        return self.dataset.positions(index_B if self.subset is None else self.subset[index_B])


class VisitedBatches:
    """A batch sampler whose batches know which visit to each sample they are.

    It must not hold the loader: a persistent iterator, which the loader holds, holds it.
    """

    def __init__(self, batch_sampler: Any, served: Served, epochs: LoaderEpochs) -> None:
        self._batch_sampler, self._served, self._epochs = batch_sampler, served, epochs

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        visits = EpochVisits(self._served.dataset.index_count, self._epochs.current or 0)
        return (self._visit(indices, visits) for indices in iter(self._batch_sampler))

    def _visit(self, indices: list[int], visits: EpochVisits) -> list[int]:
        try:
            positions = self._served.positions(indices)
        except (IndexError, TypeError, ValueError):
            if self._served.dataset.own_reader is None:
                raise
            return indices
        return IndexBatch(indices, positions, visits.take(positions))
