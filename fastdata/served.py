"""What a loader sees of a fastdata dataset: which samples, in which epoch, on which visit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Subset

from fastdata.batch import IndexBatch
from fastdata.dataset import PreparedDataset
from fastdata.visits import EpochVisits

__all__ = ["LoaderEpochs", "Served"]

MOSTLY_FILLED = 0.9
"""Share of the samples from which on threads are worth it, although some of the rest are still to be prepared."""


class LoaderEpochs:
    """Counts a loader's epochs from 0, for the random draws: those that follow a base seed, from 0 for each."""

    def __init__(self) -> None:
        self.current: int | None = None
        self._set: int | None = None

    def set(self, epoch: int) -> None:
        """Stay at ``epoch``."""
        self._set = epoch

    def begin(self, epoch: int, dataset: PreparedDataset) -> None:
        """Go on to the epoch set here, else the one set on the dataset, else ``epoch``."""
        chosen = dataset.epoch if self._set is None else self._set
        self.current = epoch if chosen is None else chosen

    def resume(self, state: dict[str, Any], dataset: PreparedDataset) -> None:
        """Go on with the epoch of a loader's state: that one if it has begun, else as ``begin``."""
        if state["is_begun"]:
            self.current = state["epoch"]
        else:
            self.begin(state["epoch"], dataset)

    def coming(self, *, is_counted_anew: bool = False) -> int:
        """Number of the epoch that would begin now if none is set."""
        return 0 if self.current is None or is_counted_anew else self.current + 1


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
        is_kept = self.obstacle is None and self.dataset.kept is not None
        return is_kept and self.dataset.filled_share(self.subset) < MOSTLY_FILLED

    @property
    def sample_bytes(self) -> int | None:
        """Size of the image of every sample; None where they differ, or where whole batches cannot be read."""
        return self.dataset.served_bytes

    def visit(self, batches: Iterable[list[int]], epoch: int, base_seed: int) -> Iterator[list[int]]:
        """The batches of an epoch, with what random draws are made from.

        One whose indices only the dataset's own methods know the meaning of stays as it is.

        Raises:
            IndexError: an index is out of range.
            TypeError: an index is no number.
        """
        visits, seed = EpochVisits(self.dataset.index_count, epoch), self.dataset.seed_of(base_seed)
        for indices in batches:
            batch = indices
            try:
                batch = self._visit(indices, visits, seed)
            except (IndexError, TypeError, ValueError):
                if self.dataset.own_reader is None:
                    raise
            yield batch

    def _visit(self, indices: list[int], visits: EpochVisits, seed: int) -> IndexBatch:
        index_B = np.asarray(indices, dtype=np.int64)
        if index_B.ndim != 1:
            raise TypeError(f"a batch of sample numbers is needed, and the sampler gave {indices!r}")
        if self.subset is not None:
            index_B = self.subset[index_B]
            indices = index_B.tolist()
        positions_B = self.dataset.positions(index_B, self.dataset.index_count)
        return IndexBatch(indices, positions_B, visits.take(positions_B), seed)

    def fetched(self, dataset: Any) -> Any:
        """What is read in place of a loader's ``dataset``, so that what batches know is not lost."""
        return dataset if self.subset is None else _VisitedSubset(dataset, self.dataset)


class _VisitedSubset(Subset[Any]):
    """A ``Subset`` that hands batches to the dataset behind it as they are; torch's makes plain lists of them."""

    def __init__(self, subset: Subset[Any], behind: PreparedDataset) -> None:
        super().__init__(subset.dataset, subset.indices)
        self._behind = behind

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, IndexBatch):
            return self._behind.__getitems__(indices)
        return super().__getitems__(indices)
