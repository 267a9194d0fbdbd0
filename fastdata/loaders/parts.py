"""The fastdata datasets of a loader, also inside ``Subset`` and ``ConcatDataset``, read as one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastdata.datasets.buffers import Allocate, Output, new_buffer
from fastdata.datasets.dataset import PreparedDataset, index_count
from fastdata.datasets.mixed_sizes import check_alike
from fastdata.datasets.reader import Reader
from fastdata.datasets.samples import ReaderHandle
from fastdata.datasets.visits import IndexBatch, as_numbers
from fastdata.machine.tables import collate_targets
from fastdata.pixels.arrays import Array
from fastdata.pixels.random_numbers import sample_keys

_T = TypeVar("_T")

_J = TypeVar("_J")

_Piece = tuple[int, Array, IndexBatch]
"""The number of a dataset, the rows that its samples have in a batch, and these samples."""

_PART_SALT_1 = np.array([0x70617274])
"""Makes the seeds of the parts of a ``ConcatDataset`` differ from the keys of samples."""


class JoinedReader:
    """Reads a batch from several datasets, with the interface of ``Reader``."""

    def __init__(self, readers: Sequence[Reader], starts: Array) -> None:
        self.readers = readers
        self._starts = starts
        self.target_transform = _first(reader.target_transform for reader in readers)
        self.obstacle = _first(reader.obstacle for reader in readers)
        self.obstacle_if_alike = _first(reader.obstacle_if_alike for reader in readers)
        self.served_bytes: int | None = None
        if self.obstacle_if_alike is None:
            self.obstacle_if_alike = _difference(reader.kinds_of_images for reader in readers)
            self.obstacle = self.obstacle or _difference(reader.image_form for reader in readers)
            if self.obstacle is None:
                self.served_bytes = readers[0].served_bytes

    def __call__(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> Any:
        readers = self.readers
        first = readers[0]
        is_last = batch.channels_last and self.can_write_channels_last
        pieces = list(self._pieces(batch))
        sources: list[Any] = [None] * len(pieces)
        outputs = first.outputs
        if self.obstacle is not None:  # samples differ in shape: look at those of this batch
            sources = [readers[number].open(piece) for number, _, piece in pieces]
            outputs = self._outputs_of(pieces, sources)
        outs = first.allocate(len(batch), outputs, allocate, channels_last=is_last)
        # Each dataset writes its rows directly into the batch, so nothing is copied to join them.
        for (number, row_B, piece), opened in zip(pieces, sources, strict=True):
            readers[number].read_into(outs, piece, row_B, opened)
        parts = first.as_tensors(outs)
        if not first.has_target_column:
            parts.append(self.collated_targets(batch))
        if first.has_index:
            indices = self.in_order(batch, [_positions] * len(readers))
            parts.append(torch.tensor(indices))
        return first.to_batch(parts)

    def _outputs_of(self, pieces: Sequence[_Piece], sources: Sequence[Any]) -> list[Output]:
        """Return shape and dtype of each column of a batch.

        Raises:
            MixedSizesError: samples are served in several shapes.
        """
        names = []
        shapes = []
        for (number, _, piece), opened in zip(pieces, sources, strict=True):
            reader = self.readers[number]
            shapes.append(reader.shapes_of(piece, opened))
            where = f"of dataset {number} of {len(self.readers)}"
            names += [f"{reader.name_of(piece, row)} {where}" for row in range(len(piece))]
        outputs = []
        columns = zip(*shapes, strict=True)
        alike = self.readers[0].alike
        for (_, dtype), shapes_of_each in zip(alike, columns, strict=True):
            shapes_BD = np.concatenate(shapes_of_each)
            check_alike(shapes_BD, names.__getitem__)
            shape = tuple(shapes_BD[0].tolist())
            outputs.append((shape, dtype))
        return outputs

    @property
    def outputs(self) -> list[Output]:
        """Shape and dtype of each column; only valid if ``obstacle`` is None."""
        return self.readers[0].outputs

    @property
    def can_write_channels_last(self) -> bool:
        return all(each.can_write_channels_last for each in self.readers)

    def read_into(self, outs: list[Array], batch: IndexBatch) -> None:
        """Read a batch's images into arrays, as ``Reader.read_into`` does."""
        for number, row_B, piece in self._pieces(batch):
            self.readers[number].read_into(outs, piece, row_B)

    def collated_targets(self, batch: IndexBatch) -> Any:
        """Return the targets of a batch as ``default_collate`` returns them."""
        reads = [reader.targets.of_each for reader in self.readers]
        return collate_targets(self.in_order(batch, reads))

    def items(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> list[Any]:
        """Return the items of a batch; each dataset allocates memory for its own."""
        return self.in_order(batch, [reader.items for reader in self.readers])

    def in_order(self, batch: IndexBatch, reads: Sequence[Callable[..., list[Any]]]) -> list[Any]:
        """Return what each dataset's function in ``reads`` returns, in the order of the batch."""
        found: dict[int, Any] = {}
        for number, row_B, piece in self._pieces(batch):
            items = reads[number](piece)
            found |= zip(row_B.tolist(), items, strict=True)
        return [found[row] for row in range(len(found))]

    def _pieces(self, batch: IndexBatch) -> Iterator[_Piece]:
        """Yield for each dataset in a batch: its number, the rows of its samples, their batch."""
        number_B = np.searchsorted(self._starts, batch.positions, side="right") - 1
        for number in np.unique(number_B).tolist():
            row_B = np.flatnonzero(number_B == number)
            position_B = batch.positions[row_B] - self._starts[number]
            seed = self.readers[number].stored.options.seed
            if seed is None:
                seed = batch.seed
            if number:  # another seed, so that equal indices of two datasets have independent draws
                seed = int(sample_keys(seed, number, _PART_SALT_1)[0])
            visit_B = batch.visits[row_B]
            piece = IndexBatch.of(position_B.tolist(), position_B, visit_B, seed)
            yield number, row_B, piece


def _positions(batch: IndexBatch) -> list[int]:
    """Return the index of each sample in its own dataset."""
    return list(batch.positions.tolist())


@dataclass(frozen=True)
class JoinedHandle:
    """The handles of several datasets, which are read as one."""

    handles: list[ReaderHandle]
    starts: Array

    reason = ""

    @property
    def reader(self) -> JoinedReader:
        """A reader for one batch.

        Raises:
            StoreGoneError: a dataset was closed.
        """
        return JoinedReader([handle() for handle in self.handles], self.starts)


AnyReader = Reader | JoinedReader

AnyHandle = ReaderHandle | JoinedHandle


@dataclass(frozen=True, slots=True)
class Parts:
    """The fastdata datasets that a loader reads, as one.

    Their indices are put in a row, as in a ``ConcatDataset``. Each dataset is read with its own
    transform, targets and draws, into its rows of the batch. A dataset without a ``seed`` takes the
    seed of the first that has one.

    Attributes:
        datasets: the datasets; empty if the loader reads anything else.
        subset: indices of the samples that the loader sees; None for all.
        starts: index of the first sample of each dataset.
    """

    datasets: Sequence[PreparedDataset]
    subset: Array | None
    starts: Array

    @classmethod
    def find(cls, dataset: Any) -> Parts:
        """Find the datasets, also inside ``Subset`` and ``ConcatDataset``.

        If a ``ConcatDataset`` also has other datasets, none are found.
        """
        datasets: list[PreparedDataset] = []
        subset = None
        # Not isinstance: a proxy may pretend to have the class of the object inside it.
        if issubclass(type(dataset), PreparedDataset):
            datasets.append(dataset)
        else:
            try:
                subset = _join(dataset, datasets)
            except TypeError:
                datasets.clear()
        counts = np.array(list(map(index_count, datasets)), np.int64)
        starts = np.cumsum(counts) - counts
        return cls(datasets, subset, starts)

    def __getitems__(self, batch: IndexBatch) -> list[Any]:
        readers = [dataset._fastdata.reader for dataset in self.datasets]
        reads = [dataset.__getitems__ for dataset in self.datasets]
        return JoinedReader(readers, self.starts).in_order(batch, reads)

    @property
    def index_count(self) -> int:
        """The number of valid indices, which begin at 0."""
        return sum(map(index_count, self.datasets))  # not stored: the user may assign samples

    @property
    def epoch(self) -> int | None:
        """The epoch that the user set on a dataset; None if loaders count epochs."""
        return _first(it._fastdata.epoch_number for it in self.datasets)

    @property
    def seed(self) -> int | None:
        """The first ``seed`` that the user gave to a dataset; None if there is none."""
        return _first(dataset._fastdata.stored.options.seed for dataset in self.datasets)

    def reader(self) -> AnyReader | None:
        """Return the reader of an epoch that begins now, with all changes by the user."""
        readers = [dataset._fastdata.refresh() for dataset in self.datasets]
        return self._one(readers, JoinedReader)

    def latest(self) -> AnyReader | None:
        """Return the latest reader. Do not keep it: it keeps the samples in memory."""
        readers = [dataset._fastdata.reader for dataset in self.datasets]
        return self._one(readers, JoinedReader)

    def handle(self) -> AnyHandle | None:
        """Return the handle of an epoch that begins now."""
        handles = [dataset._fastdata.handle for dataset in self.datasets]
        return self._one(handles, JoinedHandle)

    def _one(self, each: list[_T], join: Callable[[list[_T], Array], _J]) -> _T | _J | None:
        if len(each) > 1:
            return join(each, self.starts)
        return each[0] if each else None

    @property
    def prepared_share(self) -> float:
        """The share of samples that are stored already, in the dataset where it is smallest."""
        index = None if len(self.datasets) > 1 else self.subset
        shares = [1.0]
        for dataset in self.datasets:
            stored = dataset._fastdata.reader.stored
            if stored.kept is not None:
                shares.append(stored.filled_share(index))
        return min(shares)

    def fetched(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return a loader's ``dataset``, or a copy that passes whole batches to these datasets.

        torch's ``Subset`` and ``ConcatDataset`` make plain lists of the indices of a batch, without
        the numbers that its draws follow.
        """
        if self.subset is None:
            return dataset
        # A copy, so that it has the user's attributes, which worker_init_fn may read.
        whole: Any = copy.copy(dataset)
        whole.__class__ = _WholeConcat if type(dataset) is ConcatDataset else _WholeSubset
        whole.behind = replace(self, subset=None)
        if len(self.datasets) == 1:
            whole.behind = self.datasets[0]
        return whole  # type: ignore[no-any-return]


def _difference(forms: Iterable[str]) -> str | None:
    """Return the obstacle if the datasets have images of several forms."""
    different = dict.fromkeys(forms)
    if len(different) < 2:
        return None
    return f"the datasets serve images that differ, {' and '.join(different)}"


def _first(given: Iterable[_T | None]) -> _T | None:
    return next((value for value in given if value is not None), None)


def _join(dataset: Any, found: list[PreparedDataset]) -> Array:
    """Return the indices of a dataset's samples among those of all ``found``, and add new ones.

    Raises:
        TypeError: there is a dataset of another kind, or a subclass with another ``__len__`` than
            its samples have, or indices that are not whole numbers.
    """
    if type(dataset) is Subset:
        return _join(dataset.dataset, found)[as_numbers(dataset.indices)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([_join(each, found) for each in dataset.datasets])
    is_ours = issubclass(type(dataset), PreparedDataset)
    if not is_ours or len(dataset) != index_count(dataset):
        raise TypeError
    start = 0
    for part in found:
        if part is dataset:
            break
        start += index_count(part)
    else:
        found.append(dataset)
    return np.arange(start, start + len(dataset))


class _Whole(Dataset[Any]):
    """Passes batches to the datasets ``behind``, where torch's class would make lists of them."""

    behind: PreparedDataset | Parts

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if isinstance(indices, IndexBatch):
            return self.behind.__getitems__(indices)
        return [self[index] for index in indices]


class _WholeSubset(_Whole, Subset[Any]): ...


class _WholeConcat(_Whole, ConcatDataset[Any]): ...
