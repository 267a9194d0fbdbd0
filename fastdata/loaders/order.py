"""The order of an epoch: the indices of its batches, and what their random draws are made from.

torch's iterators take ``EpochIndices`` for the sampler. It moves a ``Progress`` on, which a state
is made of; resume.py.
"""

from __future__ import annotations

import base64
import copy
import itertools
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import data as torch_data

from fastdata.datasets.batch import (
    DrawKey,
    IndexBatch,
    RepeatedIndex,
    as_numbers,
    count_earlier,
    positions,
)
from fastdata.datasets.dataset import PreparedDataset
from fastdata.loaders.samplers import RankSampler
from fastdata.loaders.view import LoaderView

_DRAW_FROM_TORCH = (
    torch_data.RandomSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
)
_KNOWN = (
    *_DRAW_FROM_TORCH,
    torch_data.BatchSampler,
    torch_data.SequentialSampler,
    torch_data.DistributedSampler,
    RankSampler,
    *(list, tuple, range, np.ndarray, torch.Tensor),
)
"""Samplers that draw from torch's generators only, or not at all."""
_REPEAT_SHIFT = (
    32  # a visit to a sample is the epoch, and above it how often the sample came before
)


@contextmanager
def undisturbed(*others: torch.Generator) -> Iterator[None]:
    """Leave torch's global generator, and others, as they were."""
    generators = [torch.default_generator, *others]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Mark(NamedTuple):
    """How far an epoch was handed over, since it was begun or resumed."""

    batches: int
    is_finished: bool


@dataclass(slots=True)
class Progress:
    """How far one epoch has come.

    Attributes:
        epoch: its number, which random draws are made from.
        start: what the order is drawn from; None until the first index is drawn.
        is_begun: it is resumed inside; nothing more is drawn from the global generator.
        base_seed: of worker processes, and of draws where the dataset has no seed; None until
            drawn.
        keeps_seed: that was drawn by an earlier epoch of workers that persist.
        offset: batches handed over before it was resumed.
        skipped: of these, those that the sampler gives again.
        drawn: batches whose indices were drawn since it was begun or resumed.
        handed: of these, those that were handed over.
        resumed_from: a state, which holds until a batch is handed over.
        draws: of the batch that was drawn last.
        seen: how far the user has come where a prefetcher reads ahead of them.
    """

    epoch: int | None = None
    start: dict[str, Any] | None = None
    is_begun: bool = False
    base_seed: int | None = None
    keeps_seed: bool = False
    offset: int = 0
    skipped: int = 0
    drawn: int = 0
    handed: int = 0
    is_finished: bool = False
    resumed_from: dict[str, Any] | None = None
    draws: DrawKey | None = None
    seen: Mark | None = None

    def mark(self) -> Mark:
        """For a prefetcher's thread to take with each batch, to be handed over with it."""
        return Mark(self.handed, self.is_finished)

    def hand_over(self, mark: Mark) -> None:
        self.seen = mark

    @property
    def pending(self) -> dict[str, Any] | None:
        """The state that it was resumed from, while no batch was handed over."""
        return self.resumed_from if (self.seen or self.mark()) == Mark(0, False) else None


class EpochIndices(Iterator[Any]):
    """The indices of the epoch that was begun last, from where it stands, and their draws.

    It does not hold the loader, which may hold an iterator of torch's that holds this.

    Attributes:
        channels_last: what batches of indices are told; see ``IndexBatch``.
    """

    channels_last: bool = False

    def __init__(
        self,
        sampler: Any,
        served: LoaderView | None,
        generator: torch.Generator | None,
        now: Callable[[], Progress],
    ) -> None:
        self._sampler = sampler
        self._served = served
        self._now = now
        self._samplers = _nested(sampler)
        last = self._samplers[-1] if self._samplers else None
        self.ranked = last if isinstance(last, RankSampler) else None
        self._is_known = all(type(s) in _KNOWN or s is self.ranked for s in self._samplers)
        generators = [generator, *(getattr(s, "generator", None) for s in self._samplers)]
        if not self._is_known or any(
            type(s) in _DRAW_FROM_TORCH and s.generator is None for s in self._samplers
        ):
            generators.append(torch.default_generator)
        found = [each for each in generators if isinstance(each, torch.Generator)]
        self.generators = list({id(each): each for each in found}.values())

    @property
    def sharing(self) -> dict[str, int]:
        """Into what ranks and batches a RankSampler is shared out; empty where that is unknown."""
        outer = self._sampler
        ranked = self.ranked
        is_batched = type(outer) is torch_data.BatchSampler and outer.sampler is ranked
        if ranked is None or not (outer is ranked or is_batched):
            return {}
        if not ranked.has_begun:
            ranked.find_ranks()
        batch_size = outer.batch_size if is_batched else 1
        return {"batch_size": batch_size, "world_size": ranked.num_replicas}

    def batches(self, start: dict[str, Any] | None) -> int | None:
        """How many batches an epoch has that begins with ``start``."""
        sharing = self.sharing
        if self.ranked is None or start is None or not sharing:
            return length_of(self._sampler)
        drop_last = self._sampler is not self.ranked and self._sampler.drop_last
        position = start["samplers"][-1]["state"]["position"]
        return self.ranked.batches_left(position, sharing["batch_size"], drop_last=drop_last)

    @property
    def name(self) -> str:
        return " > ".join(type(sampler).__name__ for sampler in self._samplers)

    def capture(self) -> dict[str, Any]:
        """What the order is drawn from."""
        return {
            "generators": [_pack(generator) for generator in self.generators],
            "samplers": [_capture(sampler) for sampler in self._samplers],
        }

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> EpochIndices:
        self._progress = self._now()
        self._indices: Iterator[Any] | None = None
        return self

    def __next__(self) -> Any:
        progress = self._progress
        if self._indices is None:
            self._begin_epoch()
            self._indices = self._open(progress)
        progress.drawn += 1  # a sampler that fails has drawn a batch that cannot be had
        try:
            indices = next(self._indices)
        except StopIteration:
            progress.drawn -= 1
            raise
        if progress.drawn == self._length:
            # RandomSampler draws once more after its last index: now, before a state is taken of
            # where that leaves it.
            self._indices = itertools.chain(list(itertools.islice(self._indices, 1)), self._indices)
        # Among the batches of all ranks, so that no two draw the same.
        number = (progress.offset + progress.drawn - 1) * self._ranks + self._rank
        progress.draws = draws = DrawKey(self._seed, progress.epoch or 0, number)
        if isinstance(indices, IndexBatch):
            indices.draws = draws
            indices.channels_last = self.channels_last
        return indices

    def _begin_epoch(self) -> None:
        """Decide what cannot change in it."""
        shared = self._rank_aware
        self._length = length_of(self._sampler) if self._is_known else None
        self._rank = 0 if shared is None else shared.rank
        self._ranks = 1 if shared is None else shared.num_replicas
        seed = None if self._served is None else self._served.seed
        self._seed = self._progress.base_seed or 0 if seed is None else seed

    def _open(self, progress: Progress) -> Iterator[Any]:
        if progress.start is None:
            progress.start = self.capture()
            return self._begin(progress)
        if self.ranked is not None:  # another epoch may have been set on it since
            progress.start = progress.start | {"samplers": self.capture()["samplers"]}
        elif not progress.is_begun and self._is_known:
            # torch's generator moves on as at the start of any epoch. A sampler that is not known
            # is not asked twice.
            next(iter(self._sampler), None)
        with undisturbed():
            for generator, packed in zip(
                self.generators, progress.start["generators"], strict=True
            ):
                generator.set_state(_unpack(packed))
            for sampler, saved in zip(self._samplers, progress.start["samplers"], strict=True):
                if "state" in saved and sampler is not self.ranked:
                    sampler.load_state_dict(copy.deepcopy(saved["state"]))
                if "epoch" in saved and progress.is_begun:  # else it may have been set since
                    sampler.set_epoch(saved["epoch"])
            rest = itertools.islice(self._begin(progress), progress.skipped, None)
            # Samplers draw when first asked.
            return itertools.chain(list(itertools.islice(rest, 1)), rest)

    def _begin(self, progress: Progress) -> Iterator[Any]:
        indices: Iterator[Any] = iter(self._sampler)
        served = self._served
        if served is None:
            return indices
        if self.ranked is not None:
            # Not where each epoch draws a seed, whose draws count from 0, nor where the epoch of
            # draws was set alone.
            is_counted = served.seed is not None or progress.keeps_seed
            if self.ranked.is_set or (served.epoch is None and is_counted):
                progress.epoch = self.ranked.coming()["epoch"]
        shared = self._rank_aware
        # Of another sampler nobody knows whether other ranks have the same samples.
        is_unknown = shared is not None and type(shared) not in _KNOWN and shared is not self.ranked
        return map(
            _BatchDraws(
                served,
                progress.epoch or 0,
                self._seed,
                rank=self._rank if is_unknown else 0,
                ranks=self._ranks if is_unknown else 1,
                is_counted=not _gives_each_once(self._sampler),
            ),
            indices,
        )

    @property
    def _rank_aware(self) -> Any:
        """The sampler that gives each rank its share; None where there is none that says so."""
        for each in self._samplers:
            numbers = (getattr(each, "rank", None), getattr(each, "num_replicas", None))
            if all(isinstance(number, int) for number in numbers):
                return each
        return None


def _nested(sampler: Any) -> list[Any]:
    """A sampler and those in it, as far as their states are not part of its own."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        if _keeps_state(sampler):
            break
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    return found


def _gives_each_once(sampler: Any) -> bool:
    """Whether no index comes twice in an epoch, as far as that is known."""
    inner = sampler.sampler if type(sampler) is torch_data.BatchSampler else None
    if type(inner) is torch_data.RandomSampler:
        return not inner.replacement and inner.num_samples == len(inner.data_source)
    return type(inner) is torch_data.SequentialSampler


class _BatchDraws:
    """Makes of the indices of each batch those of samples, with what their draws are made from.

    A sample that comes again in the epoch is told apart: by a RankSampler's marks, else by how
    often its index came before; and where a ``Subset`` has several indices of it, by which it is.

    Args:
        served: what is behind the loader.
        epoch: its number.
        seed: of its draws.
        rank, ranks: where another rank may have the same sample.
        is_counted: whether an index may come twice.
    """

    def __init__(
        self,
        served: LoaderView,
        epoch: int,
        seed: int,
        *,
        rank: int,
        ranks: int,
        is_counted: bool,
    ) -> None:
        self._subset = served.subset
        self._count = served.index_count
        self._length = self._count if self._subset is None else len(self._subset)
        self._is_own = isinstance(served.dataset, PreparedDataset) and served.has_own
        self._epoch = epoch
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._earlier = _earlier_of(self._subset, self._count)
        is_plain = not is_counted and self._earlier is None
        self._seen = None if is_plain else np.zeros(self._length, np.uint32)

    def __call__(self, indices: list[int]) -> list[int]:
        """Raise an error where an index is out of range, unless only the dataset knows."""
        try:
            return self._batch_of(indices)
        except (IndexError, TypeError, ValueError):
            if not self._is_own:
                raise
            return indices

    def _batch_of(self, indices: list[int]) -> IndexBatch:
        try:  # 5 us for 256 indices
            fast = type(indices) is list
            index_B = np.asarray(array("q", indices)) if fast else as_numbers(indices)
        except TypeError:
            index_B = as_numbers(indices)  # which says what they are
        if (index_B.view(np.uint64) >= self._length).any():
            index_B = positions(index_B, self._length)
        if self._seen is None:
            visit_B = np.full(len(index_B), self._epoch, np.int64)
        else:
            visit_B = self._repeated(index_B, indices, self._seen)
        if self._subset is not None:
            index_B = self._subset[index_B]
            indices = index_B.tolist()
            index_B = positions(index_B, self._count)
        batch = IndexBatch(indices)
        batch.positions = index_B
        batch.visits = visit_B
        batch.seed = self._seed
        return batch

    def _repeated(self, index_B: np.ndarray, indices: list[int], seen: np.ndarray) -> np.ndarray:
        before_B = count_earlier(seen, index_B)
        if RepeatedIndex in set(map(type, indices)):
            for k, index in enumerate(indices):
                if isinstance(index, RepeatedIndex):
                    before_B[k] = index.occurrence
        if self._earlier is not None:
            before_B = before_B * (int(self._earlier.max()) + 1) + self._earlier[index_B]
        visit_B: np.ndarray = self._epoch + (before_B * self._ranks + self._rank << _REPEAT_SHIFT)
        return visit_B


def _earlier_of(subset: np.ndarray | None, count: int) -> np.ndarray | None:
    """Of each index of a Subset, how many smaller ones are of the same sample; None if none are."""
    if subset is None or not len(subset):
        return None
    sample_of = np.where(subset < 0, subset + count, subset)
    if sample_of.min() < 0 or sample_of.max() >= count:
        return None  # who reads them is told
    earlier = count_earlier(np.zeros(count, np.uint32), sample_of)
    return earlier if earlier.any() else None


def _pack(generator: torch.Generator) -> str:
    """Some 4,000 characters for a Mersenne twister of 20,000 bits."""
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes(), 1)).decode()


def _unpack(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.uint8)


def _keeps_state(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


def _capture(sampler: Any) -> dict[str, Any]:
    if isinstance(sampler, RankSampler):
        return {"state": sampler.coming()}
    captured = {"state": copy.deepcopy(sampler.state_dict())} if _keeps_state(sampler) else {}
    if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
        captured["epoch"] = sampler.epoch
    return captured


def length_of(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
