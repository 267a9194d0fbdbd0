"""Visits of samples: the numbers that determine the random draws of each read.

A visit is ``epoch + (k << 32)``, where k counts the earlier visits to a sample in the same epoch.
So a sampler that repeats samples gets different draws for each repetition. Without repetitions a
visit is the epoch.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastdata.errors import counted
from fastdata.pixels.arrays import Array
from fastdata.pixels.random_numbers import sample_keys

if TYPE_CHECKING:
    from fastdata.datasets.draws import DrawKey
    from fastdata.datasets.reader import Reader
    from fastdata.machine.ranks import Rank


REPEAT_SHIFT = 32
"""Number of low bits of a visit that hold the epoch. The bits above count visits in the epoch."""


def as_numbers(indices: Any) -> Array:
    """Return indices of samples as int64 (B,).

    Raises:
        TypeError: an index is not a whole number; torch's datasets raise it too.
    """
    if isinstance(indices, (np.ndarray, torch.Tensor)):
        found = np.asarray(indices)
        if found.ndim == 1 and found.dtype.kind in "iu":
            return found.astype(np.int64, copy=False)
    return np.asarray(array("q", indices))


def positions(index_B: Array, length: int) -> Array:
    """Return indices as int64 (B,) in [0, length); negative ones count from the end.

    Raises:
        IndexError: an index is not in [-length, length).
    """
    # As unsigned numbers, negative ones are too large as well, so one comparison finds both.
    if not (index_B.view(np.uint64) >= length).any():
        return index_B
    wrong = index_B[(index_B < -length) | (index_B >= length)]
    if len(wrong):
        raise IndexError(
            f"index {wrong[0]} is out of range for a dataset of {counted(length, 'sample')}"
        )
    return index_B % length


class IndexBatch(list[int]):
    """The sample indices of one batch, and the numbers that determine its random draws.

    The indices are those of the sampler. For a ``Subset`` they are indices in the fastdata dataset
    inside it, and for a ``ConcatDataset`` indices in the sequence of all its datasets.

    Attributes:
        positions: int64 (B,), the same indices, none of them negative.
        visits: int64 (B,), the visit of each sample: the epoch, and how often the sample came
            before in the same epoch (as with ``WeightedRandomSampler``).
        seed: seed of the dataset, or base seed of the epoch.
        draws: key that a ``collate_fn`` draws from; None if no loader counts batches.
        channels_last: True to get images in ``torch.channels_last`` if the core can write that.
    """

    positions: Array
    visits: Array
    seed: int
    draws: DrawKey | None = None
    channels_last: bool = False

    @classmethod
    def of(cls, indices: Iterable[int], positions: Array, visits: Array, seed: int) -> IndexBatch:
        batch = cls(indices)
        batch.positions = positions
        batch.visits = visits
        batch.seed = seed
        return batch

    def rows(self, row_R: Array) -> IndexBatch:
        """Return a batch of some rows. Their samples keep their draws."""
        position_R = self.positions[row_R]
        return IndexBatch.of(position_R.tolist(), position_R, self.visits[row_R], self.seed)


@dataclasses.dataclass
class OwnItem:
    """The item that a subclass's own ``__getitem__`` is making for a loader.

    With a seed, every read of a fastdata dataset in this method has its own visit. The first read
    has the item's visit if it has the item's index. The visits of the others follow from that and
    from the number of earlier reads of any dataset. So two crops of one image differ, and so do
    those of two datasets.

    Attributes:
        samples: ``DatasetSamples`` of the dataset that the item belongs to.
        position: index of the item in the dataset.
        visit: visit of the item; see ``IndexBatch``.
        seed: seed of the dataset; with None, reads draw from torch's generator.
        reads: number of earlier reads.
    """

    samples: object
    position: int
    visit: int
    seed: int | None
    reads: int = 0

    def visits(self, index_B: Array) -> Array:
        """Count one read for each index, and return their visits: int64 (B,)."""
        first = self.reads
        self.reads += len(index_B)
        given = [self.visit] if first == 0 and self.position in index_B[:1] else []
        if len(given) == len(index_B):  # most items read their own sample once
            return np.array(given, np.int64)
        read_B = np.arange(first, self.reads)
        visit_B: Array = sample_keys(self.visit, read_B, np.array([self.position])).view(np.int64)
        visit_B[: len(given)] = given
        return visit_B


# A user's ``__getitem__`` that calls ``super().__getitem__`` has no argument for the item, and it
# may read other fastdata datasets as well. So the item is in a context variable, of which each
# thread and each call of ``_own_items`` has its own value.
OWN_ITEM: ContextVar[OwnItem | None] = ContextVar("fastdata_item", default=None)


def number_visits(indices: Sequence[int], reader: Reader, epoch: int | None) -> IndexBatch:
    """Return the batch of these indices, with the numbers that determine its random draws.

    A loader of fastdata passes an ``IndexBatch``, which has these numbers already. Other reads draw
    a seed from torch's generator, unless the dataset has a ``seed`` and the user has set its
    ``epoch``.
    """
    if not isinstance(indices, (list, np.ndarray, torch.Tensor)):
        indices = list(indices)  # an iterator can be read only once
    index_B = positions(as_numbers(indices), reader.length)
    if isinstance(indices, IndexBatch) and np.array_equal(index_B, indices.positions):
        return indices  # a method of a subclass may have sorted or shortened the list
    item = OWN_ITEM.get()
    if item is not None and item.seed is not None:
        return IndexBatch.of(indices, index_B, item.visits(index_B), item.seed)
    before_B = _count_within(index_B, np.zeros(len(index_B), np.int64))
    _apply_marks(indices, before_B)
    seed = reader.stored.options.seed
    if seed is None or epoch is None:
        seed = draw_seed() if reader.may_draw else 0
    visit_B = (before_B << REPEAT_SHIFT) + (epoch or 0)
    return IndexBatch.of(indices, index_B, visit_B, seed)


def draw_seed() -> int:
    """Draw 63 bits from torch's CPU generator; in a loader's threads, from the batch's generator.

    No other function draws from a global generator. torchvision's transforms draw from the same
    generator, so ``manual_seed``, ``fork_rng`` and worker processes have the expected effect.
    """
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu").item())


class RepeatedIndex(int):
    """An index that came before in its epoch, on any rank, so it must draw other numbers.

    Attributes:
        occurrence: how often it came before, 1 or more.
    """

    occurrence: int

    @classmethod
    def mark(cls, index: int, occurrence: int) -> int:
        """Return the index, with its occurrence unless it is the first."""
        if not occurrence:
            return index
        marked = cls(index)
        marked.occurrence = occurrence
        return marked


class EpochVisits:
    """Numbers the visits of an epoch, and turns a loader's indices into an ``IndexBatch``.

    A sample that comes several times in an epoch gets another visit each time. Visits are numbered
    by the marks of a RankSampler, or by how often the index came before. A ``Subset`` that has a
    sample several times adds the number of the copy.

    Args:
        count: number of samples in the datasets.
        subset: indices of the samples that the loader sees; None for all.
        may_repeat: False if no index comes twice in the epoch.
        rank: rank of this process: several ranks may read the same samples.
        epoch: epoch of the draws.
        seed: seed of the draws.
    """

    def __init__(
        self,
        count: int,
        subset: Array | None,
        *,
        may_repeat: bool,
        rank: Rank,
        epoch: int,
        seed: int,
    ) -> None:
        self._count = count
        self._subset = subset
        self._rank = rank
        self._epoch = epoch
        self._seed = seed
        self._length = count if subset is None else len(subset)
        # The largest number of copies of a sample in the subset, and for each index of the subset
        # the number of earlier copies.
        self._copies = 1
        self._earlier = np.zeros(0, np.int64)
        if subset is not None and count:
            self._earlier = count_earlier(np.zeros(count, np.uint32), subset % count)
            self._copies += int(self._earlier.max(initial=0))
        self._seen: Array | None = None  # how often each index came in the epoch
        if may_repeat or self._copies > 1:
            self._seen = np.zeros(self._length, np.uint32)

    def index_batch(self, indices: Any) -> Any:
        """Return the batch of a sampler's indices; anything else is returned unchanged."""
        if not hasattr(indices, "__iter__"):
            return indices  # the dataset raises torch's error
        # Read only once, because a second pass may give other indices, or none. A plain list is
        # made, because array() takes twice as long for a subclass.
        listed = indices if type(indices) is list else list(indices)
        try:
            index_B = np.asarray(array("q", listed))
            if (index_B.view(np.uint64) >= self._length).any():
                index_B = positions(index_B, self._length)
        except (IndexError, OverflowError, TypeError, ValueError):
            return indices  # the dataset's own __getitem__ takes them, or raises
        visit_B = np.zeros(len(index_B), np.int64)  # np.full would take two more calls
        visit_B += self._epoch
        if self._seen is not None:
            before_B = count_earlier(self._seen, index_B)
            _apply_marks(listed, before_B)
            if self._copies > 1:
                before_B = before_B * self._copies + self._earlier[index_B]
            # Ranks that read the same samples count separately: rank r of W has the repeats r,
            # r + W, r + 2 W, ...
            rank, world_size = self._rank
            visit_B += before_B * world_size + rank << REPEAT_SHIFT
        if self._subset is not None:
            index_B = self._subset[index_B]
            listed = index_B.tolist()
            index_B = positions(index_B, self._count)
        return IndexBatch.of(listed, index_B, visit_B, self._seed)


def count_earlier(seen: Array, index_B: Array) -> Array:
    """Return how often each index came before, including in this batch; count it in ``seen``."""
    before_B: Array = seen[index_B].astype(np.int64)
    # ``at`` counts repetitions too. With a plain 1 it takes fifty times as long.
    np.add.at(seen, index_B, seen.dtype.type(1))
    return _count_within(index_B, before_B)


def _count_within(index_B: Array, before_B: Array) -> Array:
    """Add to ``before_B`` how often each index came before in this batch, and return it."""
    if len(index_B) < 2:  # the usual case where samples are read one by one
        return before_B
    order = index_B.argsort(kind="stable")
    sorted_B = index_B[order]
    if (sorted_B[1:] == sorted_B[:-1]).any():  # without repetitions this is half of the time
        before_B[order] += np.arange(len(order)) - sorted_B.searchsorted(sorted_B)
    return before_B


def _apply_marks(given: Any, before_B: Array) -> None:
    """Write the occurrence of each ``RepeatedIndex`` in a list to ``before_B``."""
    if not isinstance(given, list) or RepeatedIndex not in set(map(type, given)):
        return
    for row, index in enumerate(given):
        if isinstance(index, RepeatedIndex):
            before_B[row] = index.occurrence
