"""What a loader sees of the datasets behind ``Subset`` and ``ConcatDataset``: one, whose batches know their draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
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
from fastdata.datasets.reader import Lease, Reader, positions
from fastdata.datasets.ring import Ring, ring_of
from fastdata.machine.shared import collate_targets

MOSTLY_PREPARED = 0.9
"""Share of the samples from which on threads are worth it, although some of the rest are still to
be prepared."""


class JoinedDatasets:
    """The fastdata datasets in a ``ConcatDataset`` as a loader asks them: as one, whose indices are theirs in a row.

    Each is read with its own transform, targets and draws, into its rows of the batch. One without
    a ``seed`` draws from that of the first that has one.
    """

    def __init__(self, parts: Sequence[PreparedDataset]) -> None:
        self.parts = parts
        self.ends = np.cumsum([index_count(part) for part in parts])

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        leases = [lease_of(part) for part in self.parts]
        if not any(map(own_reader, self.parts)):
            return JoinedReader([lease() for lease in leases], self.ends).items(
                batch, ring_of(self)
            )
        samples: list[Any] = [None] * len(batch)
        for number, row_B, position_B in _split(batch.positions, self.ends):
            part = self.parts[number]
            position_B = positions(position_B, index_count(part))
            seed = leases[number]().seed_of(batch.seed)
            piece = IndexBatch.of(position_B.tolist(), position_B, batch.visits[row_B], seed)
            for row, sample in zip(row_B.tolist(), part.__getitems__(piece), strict=True):
                samples[row] = sample
        return samples

    def reader(self) -> JoinedReader:
        return JoinedReader([part.reader() for part in self.parts], self.ends)


class JoinedLease:
    """Of the readers of several datasets."""

    def __init__(self, leases: Sequence[Lease], ends: np.ndarray) -> None:
        self._leases, self._ends = leases, ends

    def __call__(self) -> JoinedReader:
        return JoinedReader([lease() for lease in self._leases], self._ends)

    reader = property(__call__)


class JoinedReader:
    """The readers of several datasets as one, for a batch; whatever it has of a ``Reader``'s name is the same."""

    def __init__(self, readers: Sequence[Reader], ends: np.ndarray) -> None:
        self.readers, self.ends = readers, ends
        self.obstacle = next((reader.obstacle for reader in readers if reader.obstacle), None)
        self.target_transform = next(
            (it.target_transform for it in readers if it.target_transform is not None), None
        )
        self.own = next((reader.own for reader in readers if reader.own), "")
        self.options = next(
            (it.options for it in readers if it.options.seed is not None), readers[0].options
        )
        forms = {} if self.obstacle else dict.fromkeys(reader.image_form for reader in readers)
        if len(forms) > 1:
            self.obstacle = f"the datasets serve images that differ, {' and '.join(forms)}"
        self.served_bytes = None if self.obstacle else readers[0].served_bytes
        self.device_obstacle = (
            self.obstacle or "the samples of a ConcatDataset lie in several stores"
        )

    def seed_of(self, base_seed: int) -> int:
        return base_seed if self.options.seed is None else self.options.seed

    def _batches(self, batch: IndexBatch) -> Iterator[tuple[Reader, np.ndarray, IndexBatch]]:
        for number, row_B, position_B in _split(batch.positions, self.ends):
            reader = self.readers[number]
            position_B = positions(position_B, reader.length)
            seed = reader.seed_of(batch.seed)
            yield (
                reader,
                row_B,
                IndexBatch.of(position_B.tolist(), position_B, batch.visits[row_B], seed),
            )

    def __call__(self, batch: IndexBatch, ring: Ring | None = None) -> Any:
        tensors, first = self._tensors(batch, ring), self.readers[0]
        return first.joined(tensors, None if first.plan.mask else self._targets(batch))

    def items(self, batch: IndexBatch, ring: Ring | None = None) -> list[Any]:
        if self.obstacle is not None:
            return self._gathered(batch, lambda reader, piece: reader.items(piece))
        tensors, first = self._tensors(batch, ring), self.readers[0]
        targets = (
            None
            if first.plan.mask
            else self._gathered(batch, lambda reader, piece: reader.targets_of(piece))
        )
        return first.sample_batch(tensors, targets)

    def _gathered(
        self, batch: IndexBatch, read: Callable[[Reader, IndexBatch], list[Any]]
    ) -> list[Any]:
        """What the readers have of each sample, in the order of the batch."""
        gathered: list[Any] = [None] * len(batch)
        for reader, row_B, piece in self._batches(batch):
            for row, value in zip(row_B.tolist(), read(reader, piece), strict=True):
                gathered[row] = value
        return gathered

    def _tensors(self, batch: IndexBatch, ring: Ring | None) -> list[torch.Tensor]:
        outs = self.readers[0].room(len(batch), ring)
        for reader, row_B, piece in self._batches(batch):
            reader.read_into(outs, piece, row_B)
        return self.readers[0].as_tensors(outs)

    def _targets(self, batch: IndexBatch) -> Any:
        found = [(row_B, reader.targets(piece)) for reader, row_B, piece in self._batches(batch)]
        tensors = [target for _, target in found if isinstance(target, torch.Tensor)]
        if (
            len(tensors) < len(found)
            or len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) != 1
        ):
            return collate_targets(
                self._gathered(batch, lambda reader, piece: reader.targets_of(piece))
            )
        targets = tensors[0].new_empty((len(batch), *tensors[0].shape[1:]))
        for (row_B, _), tensor in zip(found, tensors, strict=True):
            targets[torch.from_numpy(row_B)] = tensor
        return targets

    def filled_share(self, index: np.ndarray) -> float:
        pieces = [
            (self.readers[number], position_B) for number, _, position_B in _split(index, self.ends)
        ]
        return sum(prepared_share(reader, each) * len(each) for reader, each in pieces) / max(
            len(index), 1
        )


def prepared_share(reader: Reader | JoinedReader, index: np.ndarray | None) -> float:
    """Share of the samples, or of those of ``index``, that will not be prepared and kept when they are read."""
    if isinstance(reader, JoinedReader):
        assert index is not None
        return reader.filled_share(index)
    return 1.0 if reader.kept is None else reader.filled_share(index)


def _split(index_B: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The number of each dataset that indices are of, which of them those are, and their indices in it."""
    number_B = np.searchsorted(ends, index_B, side="right")
    for number in np.unique(number_B).tolist():
        row_B = np.flatnonzero(number_B == number)
        yield number, row_B, index_B[row_B] - (ends[number - 1] if number else 0)


Served = PreparedDataset | JoinedDatasets


class LoaderView(NamedTuple):
    """What is fastdata's behind a loader, and which of its samples the loader sees; None: all of them as they are."""

    dataset: Served
    subset: np.ndarray | None

    @classmethod
    def find(cls, dataset: Any) -> LoaderView | None:
        """Look behind any ``Subset`` and ``ConcatDataset``; None if there is anything but fastdata datasets."""
        subsets: list[Subset[Any]] = []
        while type(dataset) is Subset:
            subsets.append(dataset)
            dataset = dataset.dataset
        parts: list[PreparedDataset] = []
        joined = _joined(dataset, parts) if type(dataset) is ConcatDataset else None
        if joined is None and not isinstance(dataset, PreparedDataset):
            return None
        subset: np.ndarray | None = None
        for each in subsets:  # another dataset's indices may be anything
            try:
                indices = as_numbers(each.indices)
            except TypeError:
                if not isinstance(dataset, PreparedDataset) or own_reader(dataset) is None:
                    raise
                return None  # only a subclass's own methods know what these mean
            subset = indices if subset is None else indices[subset]
        if isinstance(dataset, PreparedDataset):
            return cls(dataset, subset)
        assert joined is not None
        return cls(
            parts[0] if len(parts) == 1 else JoinedDatasets(parts),
            joined if subset is None else joined[subset],
        )

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
        dataset = self.dataset
        return (
            int(dataset.ends[-1]) if isinstance(dataset, JoinedDatasets) else index_count(dataset)
        )

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
        return prepared_share(self.latest(), self.subset)

    def lease(self) -> Lease | JoinedLease:
        """What an epoch reads by that begins now."""
        if isinstance(self.dataset, JoinedDatasets):
            return JoinedLease([lease_of(part) for part in self.parts], self.dataset.ends)
        return lease_of(self.dataset)

    def fetched(self, dataset: Any) -> Any:
        """What is read in place of a loader's ``dataset``, so that what batches know is not lost."""
        if type(dataset) is ConcatDataset:
            return _VisitedConcat(dataset, self.dataset)
        return dataset if self.subset is None else _VisitedSubset(dataset, self.dataset)


def find_wrapped(dataset: Any) -> tuple[list[PreparedDataset], str]:
    """The fastdata datasets in one that is none, of which they are asked for sample after sample; and the way back."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_joined = type(dataset) is ConcatDataset
    parts = dataset.datasets if is_joined else getattr(dataset, "__dict__", {}).values()
    parts = [part for part in parts if isinstance(part, Dataset) or is_joined]
    views = [LoaderView.find(part) for part in parts]
    ours = [part for view in views if view is not None for part in view.parts]
    names = [
        type(part).__name__
        for part, view in zip(parts, views, strict=True)
        if (view is None) == is_joined
    ]
    if not ours or not names:
        return [], ""
    if is_joined:
        other = next(type(part) for part, view in zip(parts, views, strict=True) if view is None)
        name = f"{other.__module__}.{other.__qualname__}"
        return (
            ours,
            f"{name} in the ConcatDataset is no fastdata dataset. Make a CachedDataset of it.",
        )
    return ours, (
        f"{type(dataset).__name__} asks its {names[0]} for each sample. Give the loader the {names[0]} itself: with "
        "return_index=True its items are (image, label, index); what else is done to them can be transform= or "
        "target_transform=."
    )


def _joined(dataset: Any, parts: list[PreparedDataset]) -> np.ndarray | None:
    """The indices of a dataset's samples among those of all ``parts`` in a row, which those behind it are added to.

    None if there is anything but fastdata datasets, or one that is as long as a subclass of one's
    own says.
    """
    if isinstance(dataset, PreparedDataset) and len(dataset) == index_count(dataset):
        if not any(dataset is part for part in parts):
            parts.append(dataset)
        before = itertools.takewhile(lambda part: part is not dataset, parts)
        return np.arange(len(dataset)) + sum(map(index_count, before))
    if type(dataset) is Subset:
        behind = _joined(dataset.dataset, parts)
        return None if behind is None else behind[as_numbers(dataset.indices)]
    if type(dataset) is ConcatDataset:
        found = [
            indices for part in dataset.datasets if (indices := _joined(part, parts)) is not None
        ]
        return np.concatenate(found) if len(found) == len(dataset.datasets) else None
    return None


class _Visited(Dataset[Any]):
    """Hands batches to what is ``behind`` as they are, where torch's own would make plain lists or samples of them."""

    behind: Served

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, IndexBatch):
            return self.behind.__getitems__(indices)
        whole = getattr(super(), "__getitems__", None)
        return whole(indices) if whole else [self[index] for index in indices]


class _VisitedSubset(_Visited, Subset[Any]):
    def __init__(self, subset: Subset[Any], behind: Served) -> None:
        super().__init__(subset.dataset, subset.indices)
        self.behind = behind


class _VisitedConcat(_Visited, ConcatDataset[Any]):
    def __init__(self, concat: ConcatDataset[Any], behind: Served) -> None:
        super().__init__(concat.datasets)
        self.behind = behind
