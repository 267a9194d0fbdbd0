"""What a loader sees of the fastdata datasets behind ``Subset`` and ``ConcatDataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastdata.datasets.batch import IndexBatch, as_numbers
from fastdata.datasets.dataset import (
    PreparedDataset,
    epoch_of,
    handle_of,
    index_count,
    latest_reader,
    own_reader,
)
from fastdata.datasets.reader import Reader, ReaderHandle, Take, fresh, room
from fastdata.machine.shared import collate_targets
from fastdata.pixels.images import Array

MOSTLY_PREPARED = 0.9
"""Share of the samples from which on threads are worth it, although the rest are still to be
prepared."""


class JoinedHandle:
    """Of the readers of several datasets."""

    def __init__(self, handles: Sequence[ReaderHandle], ends: Array) -> None:
        self._handles = handles
        self._ends = ends

    def __call__(self) -> JoinedReader:
        return JoinedReader([handle() for handle in self._handles], self._ends)

    reader = property(__call__)


class JoinedReader:
    """The readers of several datasets as one, for a batch; what it has of a ``Reader`` is alike."""

    def __init__(self, readers: Sequence[Reader], ends: Array) -> None:
        self._readers = readers
        self._ends = ends
        self.obstacle = next(filter(None, (reader.obstacle for reader in readers)), None)
        forms = {} if self.obstacle else {reader.image_form: None for reader in readers}
        if len(forms) > 1:
            self.obstacle = f"the datasets serve images that differ, {' and '.join(forms)}"
        transforms = (reader.target_transform for reader in readers)
        self.target_transform = next(filter(None, transforms), None)
        self.served_bytes = None if self.obstacle else readers[0].served_bytes

    def __call__(self, batch: IndexBatch, take: Take = fresh) -> Any:
        readers, first = self._readers, self._readers[0]
        is_last = batch.channels_last and all(each.can_write_channels_last for each in readers)
        outs = room(len(batch), first.outputs, take, channels_last=is_last)
        for number, row_B, piece in self._pieces(batch):
            readers[number].read_into(outs, piece, row_B)
        targets = None
        if first.plan.mask is None:
            of_each = self.in_order(batch, lambda k, piece: readers[k].targets_of(piece))
            targets = collate_targets(of_each)
        tensors = list(map(torch.Tensor.view, map(torch.from_numpy, outs), first.dtypes))
        return first.joined(tensors, targets)

    def items(self, batch: IndexBatch, take: Take = fresh) -> list[Any]:
        return self.in_order(batch, lambda k, piece: self._readers[k].items(piece))

    def in_order(
        self, batch: IndexBatch, read: Callable[[int, IndexBatch], list[Any]]
    ) -> list[Any]:
        """What is read of each sample by the number of its dataset, in the order of the batch."""
        found: dict[int, Any] = {}
        for number, row_B, piece in self._pieces(batch):
            found |= zip(row_B.tolist(), read(number, piece), strict=True)
        return [found[row] for row in range(len(found))]

    def _pieces(self, batch: IndexBatch) -> Iterator[tuple[int, Array, IndexBatch]]:
        """The number of each dataset with indices in a batch, their rows, and its own batch."""
        number_B = np.searchsorted(self._ends, batch.positions, side="right")
        for number in np.unique(number_B).tolist():
            row_B = np.flatnonzero(number_B == number)
            position_B = batch.positions[row_B] - (self._ends[number - 1] if number else 0)
            own_seed = self._readers[number].stored.options.seed
            seed = batch.seed if own_seed is None else own_seed
            piece = IndexBatch.of(position_B.tolist(), position_B, batch.visits[row_B], seed)
            yield number, row_B, piece


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
    subset: Array | None
    ends: Array

    @classmethod
    def find(cls, dataset: Any) -> LoaderView | None:
        """Look behind any ``Subset`` and ``ConcatDataset``; None if anything else is there."""
        parts: list[PreparedDataset] = []
        if isinstance(dataset, PreparedDataset):
            parts.append(dataset)
            subset = None
        else:
            subset = _joined(dataset, parts)
            if subset is None:
                return None
        return cls(parts, subset, np.cumsum([index_count(part) for part in parts]))

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        joined = JoinedReader(list(map(latest_reader, self.parts)), self.ends)
        return joined.in_order(batch, lambda k, piece: self.parts[k].__getitems__(piece))

    @property
    def has_own(self) -> bool:
        """Whether a subclass's own methods make items, so that only it can be asked for batches."""
        return any(own_reader(part) is not None for part in self.parts)

    @property
    def index_count(self) -> int:
        """Indices from 0 to this, exclusive, may be asked for."""
        return sum(map(index_count, self.parts))  # samples may have been assigned since

    @property
    def epoch(self) -> int | None:
        """As the user set it on a dataset."""
        return next((epoch for epoch in map(epoch_of, self.parts) if epoch is not None), None)

    @property
    def seed(self) -> int | None:
        """As the user gave it to a dataset."""
        seeds = (latest_reader(part).stored.options.seed for part in self.parts)
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
        return min(1.0 if it.kept is None else it.stored.filled_share(index) for it in readers)

    def fetched(self, dataset: Any) -> Any:
        """What is read in place of a loader's ``dataset``, so that batches keep their draws."""
        if self.subset is None:
            return dataset
        kind = _WholeConcat if type(dataset) is ConcatDataset else _WholeSubset
        whole = kind.__new__(kind)
        vars(whole).update(vars(dataset))
        whole.behind = self.parts[0] if len(self.parts) == 1 else replace(self, subset=None)
        return whole


def _joined(dataset: Any, parts: list[PreparedDataset]) -> Array | None:
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
        try:
            return None if whole is None else whole[as_numbers(dataset.indices)]
        except TypeError:  # only a subclass's own methods know what these mean
            return None
    if type(dataset) is not ConcatDataset:
        return None
    pieces = [_joined(each, parts) for each in dataset.datasets]
    known = [piece for piece in pieces if piece is not None]
    return np.concatenate(known) if len(known) == len(pieces) else None


class _Whole(Dataset[Any]):
    """Hands batches to what is ``behind``, where torch's own class would make lists of them."""

    behind: PreparedDataset | LoaderView

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, IndexBatch):
            return self.behind.__getitems__(indices)
        whole = getattr(super(), "__getitems__", None)
        return whole(indices) if whole else [self[index] for index in indices]


class _WholeSubset(_Whole, Subset[Any]): ...


class _WholeConcat(_Whole, ConcatDataset[Any]): ...


def fallback_notice(dataset: PreparedDataset) -> str:
    """Which code of the user's own runs on each sample unasked, and the cure; else empty."""
    own = own_reader(dataset)
    if own:
        return (
            f"{type(dataset).__name__}.{own} is called for each sample. Write what it does as "
            "transform= or target_transform= instead."
        )
    reader = latest_reader(dataset)
    plan = reader.plan
    kept = reader.kept
    is_known = not any(view.per_sample for view in plan.each)
    is_asked_for = not reader.stored.options.batch_ops or reader.pair_transform is not None
    if is_asked_for or kept is None or kept.is_tuple or is_known:
        return ""
    return (
        f"{plan.obstacle}, so that it runs in Python on each sample. Give it as prepare= if it "
        "does the same each time, or as CudaPrefetcher(transform=) if it can take whole batches; "
        "or write steps that are served in its place: docs/served-steps.md."
    )


def wrapped_notice(dataset: Any) -> str:
    """How to have whole batches where a fastdata dataset is asked for sample after sample."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    for inner in (*getattr(dataset, "datasets", ()), *getattr(dataset, "__dict__", {}).values()):
        if isinstance(inner, Dataset) and LoaderView.find(inner) is not None:
            name = type(inner).__name__
            return (
                f"{type(dataset).__name__} asks its {name} for each sample. Give the loader the "
                f"{name} itself: what is done to its items can be transform= or target_transform=. "
                "Beside it in a ConcatDataset, make a CachedDataset of any other."
            )
    return ""
