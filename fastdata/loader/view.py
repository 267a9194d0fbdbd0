"""What a loader sees of the datasets behind ``Subset`` and ``ConcatDataset``: one, whose batches know their draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastdata.batch import EpochVisits, IndexBatch, Multiples, SampleBatch, as_numbers
from fastdata.dataset import PreparedDataset
from fastdata.reader import Reader, positions
from fastdata.ring import BatchRing
from fastdata.shared import collate_targets

MOSTLY_PREPARED = 0.9
"""Share of the samples from which on threads are worth it, although some of the rest are still to be prepared."""


class JoinedDatasets:
    """The fastdata datasets in a ``ConcatDataset`` as a loader asks them: as one, whose indices are theirs in a row.

    Each is read with its own transform, targets and draws, into its rows of the batch. One without a ``seed`` draws
    from that of the first that has one.
    """

    own_reader = None
    batch_ring: BatchRing | None = None

    def __init__(self, parts: Sequence[PreparedDataset]) -> None:
        self.parts = parts
        self._ends = np.cumsum([part.index_count for part in parts])
        self.options = next((part.options for part in parts if part.options.seed is not None), parts[0].options)

    def _pieces(self, index_B: np.ndarray) -> Iterator[tuple[PreparedDataset, np.ndarray, np.ndarray]]:
        """Each dataset that indices are of, which of them those are, and their positions in it."""
        for number, row_B, position_B in _split(index_B, self._ends):
            part = self.parts[number]
            yield part, row_B, positions(position_B, part.index_count)

    # What ``PreparedDataset`` has of the same name

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        if not self.has_own_items:
            return self.lease()().items(batch, self.batch_ring)
        samples: list[Any] = [None] * len(batch)
        for part, row_B, position_B in self._pieces(batch.positions):
            piece = IndexBatch(position_B.tolist(), position_B, batch.visits[row_B], part.seed_of(batch.seed))
            is_own = part.own_reader is not None
            read = [part.own_item(piece, k) for k in range(len(piece))] if is_own else part.__getitems__(piece)
            for row, sample in zip(row_B.tolist(), read, strict=True):
                samples[row] = sample
        return samples

    def lease(self) -> Callable[[], JoinedReader]:
        leases, ends = [part.lease() for part in self.parts], self._ends
        obstacle = self.batch_obstacle
        return lambda: JoinedReader(tuple(lease() for lease in leases), ends, obstacle)

    @property
    def has_own_items(self) -> bool:
        return any(part.has_own_items for part in self.parts)

    @property
    def index_count(self) -> int:
        return int(self._ends[-1])

    @property
    def batch_obstacle(self) -> str | None:
        obstacle = next(filter(None, (part.batch_obstacle for part in self.parts)), None)
        forms = {} if obstacle else dict.fromkeys(part.image_form for part in self.parts)
        return f"the datasets serve images that differ, {' and '.join(forms)}" if len(forms) > 1 else obstacle

    @property
    def device_obstacle(self) -> str:
        return self.batch_obstacle or "the samples of a ConcatDataset lie in several stores"

    @property
    def served_bytes(self) -> int | None:
        return None if self.batch_obstacle else self.parts[0].served_bytes

    @property
    def target_transform(self) -> Callable[[Any], Any] | None:
        return next(filter(None, (part.target_transform for part in self.parts)), None)

    @property
    def epoch(self) -> int | None:
        return next((part.epoch for part in self.parts if part.epoch is not None), None)

    def seed_of(self, base_seed: int) -> int:
        return base_seed if self.options.seed is None else self.options.seed

    def refresh(self) -> None:
        for part in self.parts:
            part.refresh()

    @property
    def is_fallback_said(self) -> bool:
        return all(part.is_fallback_said for part in self.parts)

    @is_fallback_said.setter
    def is_fallback_said(self, is_said: bool) -> None:
        for part in self.parts:
            part.is_fallback_said = is_said

    def fallback_notice(self) -> str:
        return next(filter(None, (part.fallback_notice() for part in self.parts)), "")

    def prepared_share(self, index: np.ndarray | None) -> float:
        assert index is not None
        pieces = [(part.prepared_share(position_B), len(position_B)) for part, _, position_B in self._pieces(index)]
        return sum(share * count for share, count in pieces) / max(len(index), 1)


class JoinedReader(NamedTuple):
    """The readers of several datasets as one, for a batch; whatever it has of a ``Reader``'s name is the same."""

    readers: tuple[Reader, ...]
    ends: np.ndarray
    obstacle: str | None

    @property
    def target_transform(self) -> Callable[[Any], Any] | None:
        return next(filter(None, (reader.target_transform for reader in self.readers)), None)

    def _batches(self, batch: IndexBatch) -> Iterator[tuple[Reader, np.ndarray, IndexBatch]]:
        for number, row_B, position_B in _split(batch.positions, self.ends):
            reader = self.readers[number]
            position_B = positions(position_B, len(reader.samples))
            seed = reader.seed_of(batch.seed)
            yield reader, row_B, IndexBatch(position_B.tolist(), position_B, batch.visits[row_B], seed)

    def items(self, batch: IndexBatch, ring: BatchRing | None = None) -> list[Any]:
        if self.obstacle is None:
            return self.sample_batch(batch, ring)
        samples: list[Any] = [None] * len(batch)
        for reader, row_B, piece in self._batches(batch):
            for row, sample in zip(row_B.tolist(), reader.items(piece), strict=True):
                samples[row] = sample
        return samples

    def read_batch(self, batch: IndexBatch, ring: BatchRing | None = None) -> Any:
        return self.readers[0].joined(self._read_tensors(batch, ring), lambda: self._read_targets(batch))

    def sample_batch(self, batch: IndexBatch, ring: BatchRing | None = None) -> SampleBatch:
        return self.readers[0].as_batch(self._read_tensors(batch, ring), lambda: self._targets_of(batch))

    def _read_tensors(self, batch: IndexBatch, ring: BatchRing | None) -> list[torch.Tensor]:
        outs = self.readers[0].room(len(batch), ring)
        for reader, row_B, piece in self._batches(batch):
            reader.read_into(outs, piece, row_B)
        return self.readers[0].as_tensors(outs)

    def _read_targets(self, batch: IndexBatch) -> Any:
        found = [(row_B, reader.read_targets(piece)) for reader, row_B, piece in self._batches(batch)]
        tensors = [target for _, target in found if isinstance(target, torch.Tensor)]
        if len(tensors) < len(found) or len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) != 1:
            return collate_targets(self._targets_of(batch))
        targets = tensors[0].new_empty((len(batch), *tensors[0].shape[1:]))
        for (row_B, _), tensor in zip(found, tensors, strict=True):
            targets[torch.from_numpy(row_B)] = tensor
        return targets

    def _targets_of(self, batch: IndexBatch) -> list[Any]:
        targets: list[Any] = [None] * len(batch)
        for reader, row_B, piece in self._batches(batch):
            for row, target in zip(row_B.tolist(), reader.targets_of(piece), strict=True):
                targets[row] = target
        return targets


def _split(index_B: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The number of each dataset that indices are of, which of them those are, and their indices in it."""
    number_B = np.searchsorted(ends, index_B, side="right")
    for number in np.unique(number_B).tolist():
        row_B = np.flatnonzero(number_B == number)
        yield number, row_B, index_B[row_B] - (ends[number - 1] if number else 0)


Served = PreparedDataset | JoinedDatasets


class EpochItems(Dataset[Any]):
    """The items of a ``ConcatDataset`` one by one, as a loader over all of it would draw them in an epoch."""

    def __init__(self, view: LoaderView) -> None:
        assert view.subset is not None
        self.dataset, self.positions = view.dataset, view.subset
        self._visits, self._seed = np.zeros_like(view.subset), 0

    def begin(self, items: np.ndarray, visits: np.ndarray, seed: int) -> None:
        """Begin an epoch, in which these are the visits of these items."""
        self._visits[items], self._seed = visits, seed

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Any:
        position_B, visits_B = self.positions[[index]], self._visits[[index]]
        return self.dataset.__getitems__(IndexBatch(position_B.tolist(), position_B, visits_B, self._seed))[0]


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
                if getattr(dataset, "own_reader", None) is None:
                    raise
                return None  # only a subclass's own methods know what these mean
            subset = indices if subset is None else indices[subset]
        if isinstance(dataset, PreparedDataset):
            return cls(dataset, subset)
        assert joined is not None
        return cls(parts[0] if len(parts) == 1 else JoinedDatasets(parts), joined if subset is None else joined[subset])

    @property
    def prepared_share(self) -> float:
        return self.dataset.prepared_share(self.subset)

    def visit(
        self,
        batches: Iterable[list[int]],
        epoch: int,
        base_seed: int,
        *,
        may_be_marked: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> Iterator[list[int]]:
        """The batches of an epoch, with what random draws are made from; a RepeatedIndex counts if they may have such.

        One whose indices only the dataset's own methods know the meaning of stays as it is; elsewhere an index that is
        out of range or no number is an error.
        """
        length = self.dataset.index_count
        multiples = None if self.subset is None else Multiples.find(self.subset, length)
        visits = EpochVisits(length if self.subset is None else len(self.subset), epoch, multiples, share)
        seed = self.dataset.seed_of(base_seed)

        def visited(indices: list[int]) -> list[int]:
            try:
                return self._visit(indices, visits, seed, may_be_marked)
            except (IndexError, TypeError, ValueError):
                if self.dataset.own_reader is None:
                    raise
                return indices

        return map(visited, batches)  # which goes on after an error, as torch's iterators do

    def _visit(self, indices: list[int], visits: EpochVisits, seed: int, may_be_marked: bool) -> IndexBatch:
        index_B = positions(as_numbers(indices), visits.length)
        positions_B, given = index_B, indices if may_be_marked else ()
        if self.subset is not None:
            indices = self.subset[index_B].tolist()
            positions_B = positions(self.subset[index_B], self.dataset.index_count)
        return IndexBatch(indices, positions_B, visits.take(index_B, given), seed)

    def fetched(self, dataset: Any) -> Any:
        """What is read in place of a loader's ``dataset``, so that what batches know is not lost."""
        if type(dataset) is ConcatDataset:
            return _VisitedConcat(dataset, self.dataset)
        return dataset if self.subset is None else _VisitedSubset(dataset, self.dataset)


def find_wrapped(dataset: Any) -> tuple[list[Served], str]:
    """The fastdata datasets in one that is none, of which they are asked for sample after sample; and the way back."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_joined = type(dataset) is ConcatDataset
    parts = dataset.datasets if is_joined else getattr(dataset, "__dict__", {}).values()
    parts = [part for part in parts if isinstance(part, Dataset) or is_joined]
    views = [LoaderView.find(part) for part in parts]
    ours = [view.dataset for view in views if view is not None]
    names = [type(part).__name__ for part, view in zip(parts, views, strict=True) if (view is None) == is_joined]
    if not ours or not names:
        return [], ""
    if is_joined:
        other = next(type(part) for part, view in zip(parts, views, strict=True) if view is None)
        name = f"{other.__module__}.{other.__qualname__}"
        return ours, f"{name} in the ConcatDataset is no fastdata dataset. Make a CachedDataset of it."
    return ours, (
        f"{type(dataset).__name__} asks its {names[0]} for each sample. Give the loader the {names[0]} itself: with "
        "return_index=True its items are (image, label, index); what else is done to them can be transform= or "
        "target_transform=."
    )


def _joined(dataset: Any, parts: list[PreparedDataset]) -> np.ndarray | None:
    """The indices of a dataset's samples among those of all ``parts`` in a row, which those behind it are added to.

    None if there is anything but fastdata datasets, or one that is as long as a subclass of one's own says.
    """
    if isinstance(dataset, PreparedDataset) and len(dataset) == dataset.index_count:
        if not any(dataset is part for part in parts):
            parts.append(dataset)
        before = itertools.takewhile(lambda part: part is not dataset, parts)
        return np.arange(len(dataset)) + sum(part.index_count for part in before)
    if type(dataset) is Subset:
        behind = _joined(dataset.dataset, parts)
        return None if behind is None else behind[as_numbers(dataset.indices)]
    if type(dataset) is ConcatDataset:
        found = [indices for part in dataset.datasets if (indices := _joined(part, parts)) is not None]
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
