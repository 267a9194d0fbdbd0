"""What a loader sees of the fastdata datasets behind ``Subset`` and ``ConcatDataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastdata.datasets.batch import IndexBatch, as_numbers
from fastdata.datasets.dataset import (
    PreparedDataset,
    index_count,
    latest_reader,
    lease_of,
    own_reader,
    stored_of,
)
from fastdata.datasets.reader import Lease, Reader
from fastdata.datasets.ring import Ring
from fastdata.machine.shared import collate_targets

MOSTLY_PREPARED = 0.9
"""Share of the samples from which on threads are worth it, although the rest are still to be
prepared."""


class JoinedDatasets:
    """The datasets in a ``ConcatDataset`` as one, whose indices are theirs in a row.

    Each is read with its own transform, targets and draws, into its rows of the batch. One without
    a ``seed`` draws from that of the first that has one.
    """

    def __init__(self, parts: Sequence[PreparedDataset]) -> None:
        self.parts = parts
        self.ends = np.cumsum([index_count(part) for part in parts])

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        parts = self.parts
        seeds = [latest_reader(part).seed_of(batch.seed) for part in parts]
        return _gathered(
            batch, self.ends, seeds, lambda number, piece: parts[number].__getitems__(piece)
        )

    def reader(self) -> JoinedReader:
        return JoinedReader([part.reader() for part in self.parts], self.ends)


class JoinedLease:
    """Of the readers of several datasets."""

    def __init__(self, leases: Sequence[Lease], ends: np.ndarray) -> None:
        self._leases = leases
        self._ends = ends

    def __call__(self) -> JoinedReader:
        return JoinedReader([lease() for lease in self._leases], self._ends)

    reader = property(__call__)


class JoinedReader:
    """The readers of several datasets as one, for a batch; what it has of a ``Reader`` is alike."""

    def __init__(self, readers: Sequence[Reader], ends: np.ndarray) -> None:
        self.readers = readers
        self.ends = ends
        self.obstacle = next((reader.obstacle for reader in readers if reader.obstacle), None)
        forms = {} if self.obstacle else dict.fromkeys(reader.image_form for reader in readers)
        if len(forms) > 1:
            self.obstacle = f"the datasets serve images that differ, {' and '.join(forms)}"
        transforms = [reader.target_transform for reader in readers]
        self.target_transform = next(filter(None, transforms), None)
        self.served_bytes = None if self.obstacle else readers[0].served_bytes
        several = "the samples of a ConcatDataset lie in several stores"
        self.device_obstacle = self.obstacle or several

    def __call__(self, batch: IndexBatch, ring: Ring | None = None) -> Any:
        first = self.readers[0]
        can = batch.channels_last and all(each.can_write_channels_last for each in self.readers)
        outs = first.room(len(batch), ring, channels_last=can)
        for number, row_B, piece in _pieces(batch, self.ends, self._seeds(batch)):
            self.readers[number].read_into(outs, piece, row_B)
        targets = None
        if not first.plan.mask:
            targets = collate_targets(
                self._gather(batch, lambda reader, piece: reader.targets_of(piece))
            )
        return first.joined(first.as_tensors(outs), targets)

    def items(self, batch: IndexBatch, ring: Ring | None = None) -> list[Any]:
        return self._gather(batch, lambda reader, piece: reader.items(piece))

    def _gather(
        self, batch: IndexBatch, read: Callable[[Reader, IndexBatch], list[Any]]
    ) -> list[Any]:
        return _gathered(
            batch,
            self.ends,
            self._seeds(batch),
            lambda number, piece: read(self.readers[number], piece),
        )

    def _seeds(self, batch: IndexBatch) -> list[int]:
        return [reader.seed_of(batch.seed) for reader in self.readers]


def _pieces(
    batch: IndexBatch, ends: np.ndarray, seeds: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, IndexBatch]]:
    """The number of each dataset with indices in a batch, their rows, and its own batch."""
    number_B = np.searchsorted(ends, batch.positions, side="right")
    for number in np.unique(number_B).tolist():
        row_B = np.flatnonzero(number_B == number)
        position_B = batch.positions[row_B] - (ends[number - 1] if number else 0)
        visit_B = batch.visits[row_B]
        yield number, row_B, IndexBatch.of(position_B.tolist(), position_B, visit_B, seeds[number])


def _gathered(
    batch: IndexBatch,
    ends: np.ndarray,
    seeds: Sequence[int],
    read: Callable[[int, IndexBatch], list[Any]],
) -> list[Any]:
    """What the datasets have of each sample, in the order of the batch."""
    gathered: list[Any] = [None] * len(batch)
    for number, row_B, piece in _pieces(batch, ends, seeds):
        for row, value in zip(row_B.tolist(), read(number, piece), strict=True):
            gathered[row] = value
    return gathered


@dataclass(frozen=True, slots=True)
class LoaderView:
    """What is fastdata's behind a loader, and which of its samples the loader sees (None: all)."""

    dataset: PreparedDataset | JoinedDatasets
    subset: np.ndarray | None

    @classmethod
    def find(cls, dataset: Any) -> LoaderView | None:
        """Look behind any ``Subset`` and ``ConcatDataset``; None if anything else is there."""
        subsets: list[Subset[Any]] = []
        while type(dataset) is Subset:
            subsets.append(dataset)
            dataset = dataset.dataset
        parts: list[PreparedDataset] = []
        subset: np.ndarray | None = None
        if type(dataset) is ConcatDataset:
            subset = _joined(dataset, parts)
            if subset is None:
                return None
            dataset = parts[0] if len(parts) == 1 else JoinedDatasets(parts)
        elif not isinstance(dataset, PreparedDataset):
            return None
        for each in reversed(subsets):
            try:
                indices = as_numbers(each.indices)
            except TypeError:
                if not isinstance(dataset, PreparedDataset) or own_reader(dataset) is None:
                    raise
                return None  # only a subclass's own methods know what these mean
            subset = indices if subset is None else subset[indices]
        return cls(dataset, subset)

    @property
    def parts(self) -> Sequence[PreparedDataset]:
        return self.dataset.parts if isinstance(self.dataset, JoinedDatasets) else [self.dataset]

    @property
    def has_own(self) -> bool:
        """Whether a subclass's own methods make items, so that only it can be asked for batches."""
        return any(own_reader(part) is not None for part in self.parts)

    @property
    def index_count(self) -> int:
        """Indices from 0 to this, exclusive, may be asked for."""
        return sum(index_count(part) for part in self.parts)

    @property
    def epoch(self) -> int | None:
        """As the user set it on a dataset."""
        return next((part.epoch for part in self.parts if part.epoch is not None), None)

    @property
    def seed(self) -> int | None:
        """As the user gave it to a dataset."""
        seeds = (stored_of(part).options.seed for part in self.parts)
        return next((seed for seed in seeds if seed is not None), None)

    def latest(self) -> Reader | JoinedReader:
        """What was served last; not to be held, with the memory that it holds."""
        if isinstance(self.dataset, JoinedDatasets):
            return JoinedReader([latest_reader(part) for part in self.parts], self.dataset.ends)
        return latest_reader(self.dataset)

    @property
    def prepared_share(self) -> float:
        """Share of the samples that will not be prepared and kept when they are read; the least."""
        index = None if isinstance(self.dataset, JoinedDatasets) else self.subset
        readers = [latest_reader(part) for part in self.parts]
        return min(1.0 if it.kept is None else it.filled_share(index) for it in readers)

    def lease(self) -> Lease | JoinedLease:
        """What an epoch reads by that begins now."""
        if isinstance(self.dataset, JoinedDatasets):
            return JoinedLease([lease_of(part) for part in self.parts], self.dataset.ends)
        return lease_of(self.dataset)

    def fetched(self, dataset: Any) -> Any:
        """What is read in place of a loader's ``dataset``, so that batches keep their draws."""
        if type(dataset) is ConcatDataset:
            return _WholeConcat(dataset, self.dataset)
        return dataset if self.subset is None else _WholeSubset(dataset, self.dataset)


def _joined(dataset: Any, parts: list[PreparedDataset]) -> np.ndarray | None:
    """The indices of a dataset's samples among those of all ``parts`` in a row; adds its own parts.

    None if there is anything but fastdata datasets, or one that is as long as a subclass of one's
    own says.
    """
    if isinstance(dataset, PreparedDataset) and len(dataset) == index_count(dataset):
        known = [dataset is part for part in parts]
        number = known.index(True) if True in known else len(parts)
        parts[number:] = parts[number:] or [dataset]
        return np.arange(len(dataset)) + sum(map(index_count, parts[:number]))
    if type(dataset) is Subset:
        whole = _joined(dataset.dataset, parts)
        return None if whole is None else whole[as_numbers(dataset.indices)]
    if type(dataset) is not ConcatDataset:
        return None
    found = [_joined(part, parts) for part in dataset.datasets]
    whole_parts = [indices for indices in found if indices is not None]
    return np.concatenate(whole_parts) if len(whole_parts) == len(found) else None


class _Whole(Dataset[Any]):
    """Hands batches to what is ``behind``, where torch's own class would make lists of them."""

    behind: PreparedDataset | JoinedDatasets

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, IndexBatch):
            return self.behind.__getitems__(indices)
        whole = getattr(super(), "__getitems__", None)
        return whole(indices) if whole else [self[index] for index in indices]


class _WholeSubset(_Whole, Subset[Any]):
    def __init__(self, subset: Subset[Any], behind: PreparedDataset | JoinedDatasets) -> None:
        super().__init__(subset.dataset, subset.indices)
        self.behind = behind


class _WholeConcat(_Whole, ConcatDataset[Any]):
    def __init__(
        self, concat: ConcatDataset[Any], behind: PreparedDataset | JoinedDatasets
    ) -> None:
        super().__init__(concat.datasets)
        self.behind = behind


def wrapped_notice(dataset: Any) -> str:
    """How to have whole batches where a fastdata dataset is asked for sample after sample."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        views = [LoaderView.find(part) for part in dataset.datasets]
        if not any(views):
            return ""
        other = type(dataset.datasets[views.index(None)]) if None in views else ConcatDataset
        name = f"{other.__module__}.{other.__qualname__}"
        return f"{name} in the ConcatDataset is no fastdata dataset. Make a CachedDataset of it."
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, Dataset) and LoaderView.find(value) is not None:
            name = type(value).__name__
            return (
                f"{type(dataset).__name__} asks its {name} for each sample. Give the loader the "
                f"{name} itself: what is done to its items can be transform= or target_transform=."
            )
    return ""
