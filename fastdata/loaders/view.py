"""What a loader sees of the fastdata datasets behind ``Subset`` and ``ConcatDataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastdata.datasets.batch import IndexBatch, as_numbers
from fastdata.datasets.dataset import (
    PreparedDataset,
    epoch_of,
    handle_of,
    index_count,
    latest_reader,
    own_reader,
    stored_of,
)
from fastdata.datasets.reader import Reader, ReaderHandle, Take, fresh, room
from fastdata.machine.shared import collate_targets
from fastdata.pixels.compose import cure_for

MOSTLY_PREPARED = 0.9
"""Share of the samples from which on threads are worth it, although the rest are still to be
prepared."""


class JoinedHandle:
    """Of the readers of several datasets."""

    def __init__(self, handles: Sequence[ReaderHandle], ends: np.ndarray) -> None:
        self._handles = handles
        self._ends = ends

    def __call__(self) -> JoinedReader:
        return JoinedReader([handle() for handle in self._handles], self._ends)

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

    def __call__(self, batch: IndexBatch, take: Take = fresh) -> Any:
        first = self.readers[0]
        can = batch.channels_last and all(each.can_write_channels_last for each in self.readers)
        outs = room(len(batch), first.outputs, take, channels_last=can)
        for number, row_B, piece in _pieces(batch, self.ends, self.readers):
            self.readers[number].read_into(outs, piece, row_B)
        each = [] if first.plan.mask else self._gather(batch, Reader.targets_of)
        targets = collate_targets(each) if each else None
        return first.joined(first.as_tensors(outs), targets)

    def items(self, batch: IndexBatch, take: Take = fresh) -> list[Any]:
        return self._gather(batch, Reader.items)

    def _gather(
        self, batch: IndexBatch, read: Callable[[Reader, IndexBatch], list[Any]]
    ) -> list[Any]:
        pieces = _pieces(batch, self.ends, self.readers)
        return _in_order(
            (row_B, read(self.readers[number], piece)) for number, row_B, piece in pieces
        )


def _pieces(
    batch: IndexBatch, ends: np.ndarray, readers: Sequence[Reader]
) -> Iterator[tuple[int, np.ndarray, IndexBatch]]:
    """The number of each dataset with indices in a batch, their rows, and its own batch."""
    number_B = np.searchsorted(ends, batch.positions, side="right")
    for number in np.unique(number_B).tolist():
        row_B = np.flatnonzero(number_B == number)
        position_B = batch.positions[row_B] - (ends[number - 1] if number else 0)
        seed = readers[number].seed_of(batch.seed)
        piece = IndexBatch.of(position_B.tolist(), position_B, batch.visits[row_B], seed)
        yield number, row_B, piece


def _in_order(pieces: Iterable[tuple[np.ndarray, list[Any]]]) -> list[Any]:
    """What was read of each sample, in the order of the batch."""
    found = {
        row: value
        for row_B, values in pieces
        for row, value in zip(row_B.tolist(), values, strict=True)
    }
    return [found[row] for row in range(len(found))]


@dataclass(frozen=True, slots=True)
class LoaderView:
    """What is fastdata's behind a loader.

    Several datasets, of a ``ConcatDataset``, count as one whose indices are theirs in a row. Each
    is read with its own transform, targets and draws, into its rows of the batch; one without a
    ``seed`` draws from that of the first that has one.

    Attributes:
        parts: the datasets.
        subset: which of their samples the loader sees; None: all.
        ends: of each dataset, the index behind its last.
    """

    parts: Sequence[PreparedDataset]
    subset: np.ndarray | None
    ends: np.ndarray

    @classmethod
    def find(cls, dataset: Any) -> LoaderView | None:
        """Look behind any ``Subset`` and ``ConcatDataset``; None if anything else is there."""
        subsets: list[Subset[Any]] = []
        while type(dataset) is Subset:
            subsets.append(dataset)
            dataset = dataset.dataset
        parts: list[PreparedDataset] = []
        subset: np.ndarray | None = None
        if isinstance(dataset, PreparedDataset):
            parts.append(dataset)
        elif type(dataset) is ConcatDataset:
            subset = _joined(dataset, parts)
        if not parts or (subset is None and type(dataset) is ConcatDataset):
            return None
        for each in reversed(subsets):
            try:
                indices = as_numbers(each.indices)
            except TypeError:
                if len(parts) > 1 or own_reader(parts[0]) is None:
                    raise
                return None  # only a subclass's own methods know what these mean
            subset = indices if subset is None else subset[indices]
        return cls(parts, subset, np.cumsum([index_count(part) for part in parts]))

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        pieces = _pieces(batch, self.ends, list(map(latest_reader, self.parts)))
        return _in_order(
            (row_B, self.parts[number].__getitems__(piece)) for number, row_B, piece in pieces
        )

    @property
    def has_own(self) -> bool:
        """Whether a subclass's own methods make items, so that only it can be asked for batches."""
        return any(own_reader(part) is not None for part in self.parts)

    @property
    def index_count(self) -> int:
        """Indices from 0 to this, exclusive, may be asked for."""
        return sum(map(index_count, self.parts))

    @property
    def epoch(self) -> int | None:
        """As the user set it on a dataset."""
        return next((epoch for epoch in map(epoch_of, self.parts) if epoch is not None), None)

    @property
    def seed(self) -> int | None:
        """As the user gave it to a dataset."""
        seeds = (stored_of(part).options.seed for part in self.parts)
        return next((seed for seed in seeds if seed is not None), None)

    def reader(self) -> Reader | JoinedReader:
        """What a coming epoch is served by, after what was changed in place."""
        return self._one([part.reader() for part in self.parts])

    def latest(self) -> Reader | JoinedReader:
        """What was served last; not to be held, with the memory that it holds."""
        return self._one(list(map(latest_reader, self.parts)))

    def _one(self, readers: list[Reader]) -> Reader | JoinedReader:
        return readers[0] if len(readers) == 1 else JoinedReader(readers, self.ends)

    def handle(self) -> ReaderHandle | JoinedHandle:
        """What an epoch reads by that begins now."""
        handles = list(map(handle_of, self.parts))
        return handles[0] if len(handles) == 1 else JoinedHandle(handles, self.ends)

    @property
    def prepared_share(self) -> float:
        """Share of the samples that will not be prepared and kept when they are read; the least."""
        index = None if len(self.parts) > 1 else self.subset
        readers = map(latest_reader, self.parts)
        return min(1.0 if it.kept is None else it.filled_share(index) for it in readers)

    def fetched(self, dataset: Any) -> Any:
        """What is read in place of a loader's ``dataset``, so that batches keep their draws."""
        behind = self.parts[0] if len(self.parts) == 1 else replace(self, subset=None)
        if type(dataset) is ConcatDataset:
            return _WholeConcat(dataset, behind)
        return dataset if self.subset is None else _WholeSubset(dataset, behind)


def _joined(dataset: Any, parts: list[PreparedDataset]) -> np.ndarray | None:
    """The indices of a dataset's samples among those of all ``parts`` in a row; adds its own parts.

    None if there is anything but fastdata datasets, or one that is as long as a subclass of one's
    own says.
    """
    if isinstance(dataset, PreparedDataset) and len(dataset) == index_count(dataset):
        number = next((k for k, part in enumerate(parts) if part is dataset), len(parts))
        parts[number:] = parts[number:] or [dataset]
        return np.arange(len(dataset)) + sum(map(index_count, parts[:number]))
    if type(dataset) is Subset:
        whole = _joined(dataset.dataset, parts)
        return None if whole is None else whole[as_numbers(dataset.indices)]
    if type(dataset) is not ConcatDataset:
        return None
    pieces: list[np.ndarray] = []
    for each in dataset.datasets:
        indices = _joined(each, parts)
        if indices is None:
            return None
        pieces.append(indices)
    return np.concatenate(pieces)


class _Whole(Dataset[Any]):
    """Hands batches to what is ``behind``, where torch's own class would make lists of them."""

    behind: PreparedDataset | LoaderView

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, IndexBatch):
            return self.behind.__getitems__(indices)
        whole = getattr(super(), "__getitems__", None)
        return whole(indices) if whole else [self[index] for index in indices]


class _WholeSubset(_Whole, Subset[Any]):
    def __init__(self, subset: Subset[Any], behind: PreparedDataset | LoaderView) -> None:
        super().__init__(subset.dataset, subset.indices)
        self.behind = behind


class _WholeConcat(_Whole, ConcatDataset[Any]):
    def __init__(self, concat: ConcatDataset[Any], behind: PreparedDataset | LoaderView) -> None:
        super().__init__(concat.datasets)
        self.behind = behind


def fallback_notice(reader: Reader) -> str:
    """Which code of the user's own runs on each sample unasked, and the cure; else empty."""
    plan, kept = reader.plan, reader.kept
    unknown = plan.first_unknown
    is_asked_for = not reader.options.batch_ops or reader.pair_transform is not None
    if is_asked_for or kept is None or kept.is_tuple or unknown is None:
        return ""
    cure = cure_for(unknown)
    if not cure and plan.views:
        cure = "Write steps that are served in its place: docs/served-steps.md."
    elif not cure:
        cure = (
            "Give it as prepare= if it does the same each time, or as CudaPrefetcher(transform=) "
            "if it can take whole batches."
        )
    return f"{plan.obstacle}, so that it runs in Python on each sample. {cure}"


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
