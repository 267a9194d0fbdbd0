"""The order of an epoch: the indices of its batches, what these draw from, and how far it has come.

torch's iterators take an ``Order`` for the sampler. It moves a ``Progress`` on, which a state is
made of; resume.py.
"""

from __future__ import annotations

import base64
import copy
import itertools
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from fastdata.datasets.batch import (
    DrawKey,
    EpochVisits,
    IndexBatch,
    Multiples,
    RepeatedIndex,
    as_numbers,
)
from fastdata.datasets.dataset import PreparedDataset
from fastdata.datasets.reader import positions
from fastdata.loaders.samplers import EpochSampler
from fastdata.loaders.view import LoaderView

_DRAW_NOTHING = (
    torch_data.BatchSampler,
    torch_data.SequentialSampler,
    torch_data.DistributedSampler,
)
_PLAIN = (list, tuple, range, np.ndarray, torch.Tensor)
_DRAW_FROM_TORCH = (
    torch_data.RandomSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
)


@contextmanager
def undisturbed(*others: torch.Generator) -> Iterator[None]:
    """Leave torch's global generator, and others, as they were."""
    before = [
        (generator, generator.get_state()) for generator in (torch.default_generator, *others)
    ]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@dataclass(slots=True)
class Progress:
    """How far one epoch has come. Batches are numbered in the order of the sampler."""

    epoch: int | None = None  # its number, which random draws are made from
    start: dict[str, Any] | None = (
        None  # what the order is drawn from; None until the first index is drawn
    )
    is_begun: bool = False  # it is resumed inside: nothing more is drawn from the global generator
    base_seed: int | None = (
        None  # of worker processes, and of draws where the dataset has no seed; None until drawn
    )
    keeps_seed: bool = False  # that was drawn by an earlier epoch of workers that persist
    first: int = 0  # batches before this one were handed over
    ahead: tuple[
        int, ...
    ] = ()  # batches after it that were handed over too; only without ``in_order``
    passed: int = (
        0  # batches handed over before a sampler of fastdata's went on, which gives only later ones
    )
    drawn: int = 0  # since the epoch was begun or resumed
    is_finished: bool = False
    resumed_from: dict[str, Any] | None = None  # holds until a batch is handed over
    draws: DrawKey | None = None  # of the batch that was drawn last
    handed: Progress | None = (
        None  # how far the user has got where a prefetcher reads ahead of them
    )
    _resumed_at: tuple[int, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._resumed_at = self.first, self.ahead

    def note(self, unread: Collection[int]) -> None:
        """Take down how far the user has come, by the batches drawn that they have not got."""
        resumed_first, resumed_ahead = self._resumed_at
        if (
            type(unread) is range and not resumed_ahead
        ):  # the latest ones, where batches come in order
            self.first = resumed_first + self.drawn - len(unread)
            return
        first = min(unread, default=self.drawn)
        later = (
            []
            if self.drawn - first == len(unread)
            else [k for k in range(first, self.drawn) if k not in unread]
        )
        self.first = self._number(first)
        old = [number for number in resumed_ahead if number > self.first]
        self.ahead = tuple(sorted([*map(self._number, later), *old]))

    @property
    def latest(self) -> int:
        """Number of the batch that was drawn last."""
        return self.passed + self._number(self.drawn - 1)

    def _number(self, drawn: int) -> int:
        first, ahead = self._resumed_at
        number = first + drawn
        for done in ahead:
            number += done <= number
        return number

    def mark(self) -> Progress:
        """Return a copy, for a prefetcher's thread to take with each batch, and the user's to hand over with it."""
        mark = copy.copy(self)
        mark.handed = None
        return mark

    def hand_over(self, mark: Progress) -> None:
        self.handed = mark


class Order(Iterator[Any]):
    """The indices of the epoch that was begun last, from where it stands, and what they are drawn from.

    torch's iterators take it for the sampler. It does not hold the loader, which may hold such an
    iterator.
    """

    def __init__(
        self,
        sampler: Any,
        served: LoaderView | None,
        generator: torch.Generator | None,
        now: Callable[[], Progress],
    ) -> None:
        self._sampler, self._served, self._now = sampler, served, now
        self._samplers: list[Any] = []
        while sampler is not None and not any(sampler is each for each in self._samplers):
            self._samplers.append(sampler)
            inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
            sampler = None if _keeps_state(sampler) else inner
        last = self._samplers[-1] if self._samplers else None
        self.counted = last if isinstance(last, EpochSampler) else None
        self._is_torchs = all(
            type(each) in (*_DRAW_NOTHING, *_PLAIN, *_DRAW_FROM_TORCH) or each is self.counted
            for each in self._samplers
        )
        found = [generator, *(getattr(each, "generator", None) for each in self._samplers)]
        if not self._is_torchs or any(
            type(s) in _DRAW_FROM_TORCH and s.generator is None for s in self._samplers
        ):
            found.append(torch.default_generator)
        # Each once, torch's global one among them where it may be drawn from.
        self.generators = list(
            {id(each): each for each in found if isinstance(each, torch.Generator)}.values()
        )

    @property
    def sharing(self) -> dict[str, Any]:
        """Into what ranks and batches a sampler of fastdata's is shared out; nothing where that cannot be known."""
        counted: Any = self.counted
        outer = self._sampler
        is_known = outer is counted or (
            type(outer) is torch_data.BatchSampler and outer.sampler is counted
        )
        if counted is None or not is_known:
            return {}
        if not counted.has_begun:
            counted.find_ranks()
        size = outer.batch_size if isinstance(outer, torch_data.BatchSampler) else 1
        return {"batch_size": size, "world_size": counted.num_replicas}

    def batches(self, start: dict[str, Any] | None) -> int | None:
        """How many batches an epoch has that begins with ``start``."""
        sharing = self.sharing
        if self.counted is None or start is None or not sharing:
            return length_of(self._sampler)
        drop_last = self._sampler is not self.counted and self._sampler.drop_last
        position = start["samplers"][-1]["state"]["position"]
        return self.counted.batches_left(position, sharing["batch_size"], drop_last=drop_last)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Order:
        self._progress = self._now()
        self._indices: Iterator[Any] | None = None
        return self

    def __next__(self) -> Any:
        if self._indices is None:
            self._begin_epoch()
            self._indices = self._open(self._progress)
        self._progress.drawn += 1  # a sampler that fails has drawn a batch that cannot be had
        try:
            indices = next(self._indices)
        except StopIteration:
            self._progress.drawn -= 1
            raise
        if self._progress.drawn == self._length:
            # RandomSampler draws once more after its last index: now, before a state is taken of
            # where that leaves it.
            self._indices = itertools.chain(list(itertools.islice(self._indices, 1)), self._indices)
        rank, ranks = self._share
        # Among the batches of all ranks, so that no two draw the same.
        number = self._progress.latest * ranks + rank
        self._progress.draws = draws = DrawKey(self._seed, self._progress.epoch or 0, number)
        if isinstance(indices, IndexBatch):
            indices.draws = draws
        return indices

    def _begin_epoch(self) -> None:
        """Decide what cannot change in it."""
        served, shared = self._served, self._shared
        self._length = length_of(self._sampler) if self._is_torchs else None
        self._share = (0, 1) if shared is None else (shared.rank, shared.num_replicas)
        seed = None if served is None else served.seed
        self._seed = self._progress.base_seed or 0 if seed is None else seed

    @property
    def name(self) -> str:
        return " > ".join(type(sampler).__name__ for sampler in self._samplers)

    def capture(self) -> dict[str, Any]:
        return {
            "generators": [_pack(generator) for generator in self.generators],
            "samplers": [_capture(sampler) for sampler in self._samplers],
        }

    def _open(self, progress: Progress) -> Iterator[Any]:
        if progress.start is None:
            progress.start = self.capture()
            return self._begin(progress)
        if self.counted:  # another epoch may have been set on it since
            progress.start = progress.start | {"samplers": self.capture()["samplers"]}
        elif not progress.is_begun and self._is_torchs:
            # torch's generator moves on as at the start of any epoch. A sampler that is not torch's
            # is not asked twice.
            next(iter(self._sampler), None)
        with undisturbed():
            for generator, packed in zip(
                self.generators, progress.start["generators"], strict=True
            ):
                generator.set_state(_unpack(packed))
            for sampler, saved in zip(self._samplers, progress.start["samplers"], strict=True):
                if "state" in saved and sampler is not self.counted:
                    sampler.load_state_dict(copy.deepcopy(saved["state"]))
                if (
                    "epoch" in saved and progress.is_begun
                ):  # else it keeps one that was set on it since
                    sampler.set_epoch(saved["epoch"])
            numbered, ahead = (
                itertools.islice(enumerate(self._begin(progress)), progress.first, None),
                progress.ahead,
            )
            rest = map(itemgetter(1), filter(lambda each: each[0] not in ahead, numbered))
            # Samplers draw when first asked.
            return itertools.chain(list(itertools.islice(rest, 1)), rest)

    def _begin(self, progress: Progress) -> Iterator[Any]:
        indices: Iterator[Any] = iter(self._sampler)
        if self._served is None:
            return indices
        if self.counted:
            served, is_set = self._served, self.counted.is_set
            # Not where each epoch draws a seed, whose draws count from 0, nor where the epoch of
            # draws was set alone.
            if is_set or (
                served.epoch is None and (served.seed is not None or progress.keeps_seed)
            ):
                progress.epoch = self.counted.coming()["epoch"]
        assert progress.base_seed is not None
        shared, share = self._shared, (0, 1)
        is_torchs = type(shared) is torch_data.DistributedSampler
        if (
            is_torchs
            and type(self._sampler) is torch_data.BatchSampler
            and self._sampler.sampler is shared
        ):
            indices = _mark_padding(indices, shared)
        elif shared is not None and shared is not self.counted and not is_torchs:
            # Whose ranks may have one sample, in an order that nobody knows.
            share = (
                shared.rank,
                shared.num_replicas,
            )
        is_marked = is_torchs or self.counted is not None
        each_once = share == (0, 1) and not is_marked and _gives_each_once(self._sampler)
        return map(
            Visits(self._served, progress.epoch or 0, self._seed, is_marked, each_once, share),
            indices,
        )

    @property
    def _shared(self) -> Any:
        """The sampler that gives each rank its share; None where there is none that says so."""
        for each in self._samplers:
            if isinstance(getattr(each, "rank", None), int) and isinstance(
                getattr(each, "num_replicas", None), int
            ):
                return each
        return None


def _gives_each_once(sampler: Any) -> bool:
    """Whether no index comes twice in an epoch, as far as that is known."""
    inner = sampler.sampler if type(sampler) is torch_data.BatchSampler else None
    if type(inner) is torch_data.RandomSampler:
        return not inner.replacement and inner.num_samples == len(inner.data_source)
    return type(inner) is torch_data.SequentialSampler


class Visits:
    """Makes of the indices of each batch of an epoch those of samples, with what random draws are made from.

    Args:
        served: what is behind the loader.
        epoch: its number.
        seed: of its draws.
        is_marked: whether indices may be RepeatedIndex.
        each_once: whether no index comes twice.
        share: rank and number of ranks, where another rank may have the same sample.
    """

    def __init__(
        self,
        served: LoaderView,
        epoch: int,
        seed: int,
        is_marked: bool,
        each_once: bool,
        share: tuple[int, int],
    ) -> None:
        self._subset, self._count = served.subset, served.index_count
        self._length = self._count if self._subset is None else len(self._subset)
        self._is_own = isinstance(served.dataset, PreparedDataset) and served.has_own
        self._epoch, self._seed, self._is_marked = epoch, seed, is_marked
        multiples = None if self._subset is None else Multiples.find(self._subset, self._count)
        is_counted = not each_once or multiples is not None
        self._visits = EpochVisits(self._length, epoch, multiples, share) if is_counted else None

    def __call__(self, indices: list[int]) -> list[int]:
        """Raise an error where an index is out of range or no number; one that only the dataset knows stays."""
        try:
            return self._visited(indices)
        except (IndexError, TypeError, ValueError):
            if not self._is_own:
                raise
            return indices

    def _visited(self, indices: list[int]) -> IndexBatch:
        try:  # 5 us for 256 indices
            index_B = (
                np.asarray(array("q", indices)) if type(indices) is list else as_numbers(indices)
            )
        except TypeError:
            index_B = as_numbers(indices)  # which says what they are
        if (index_B.view(np.uint64) >= self._length).any():
            index_B = positions(index_B, self._length)
        if self._visits is None:
            visits_B = np.full(len(index_B), self._epoch, np.int64)
        else:
            visits_B = self._visits.take(index_B, indices if self._is_marked else ())
        if self._subset is not None:
            index_B = self._subset[index_B]
            indices = index_B.tolist()
            index_B = positions(index_B, self._count)
        batch = IndexBatch(indices)
        batch.positions = index_B
        batch.visits = visits_B
        batch.seed = self._seed
        return batch


def _mark_padding(batches: Iterator[list[int]], sampler: Any) -> Iterator[list[int]]:
    """Mark the samples that torch repeats, the first of an epoch, so that all ranks have equally many."""
    place = sampler.rank
    for batch in batches:
        places = range(place, place + len(batch) * sampler.num_replicas, sampler.num_replicas)
        place += len(places) * sampler.num_replicas
        earlier = (each // len(sampler.dataset) for each in places)
        yield (
            list(map(RepeatedIndex.mark, batch, earlier)) if place > len(sampler.dataset) else batch
        )


def _pack(
    generator: torch.Generator,
) -> str:  # some 4,000 characters for a Mersenne twister of 20,000 bits
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes(), 1)).decode()


def _unpack(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.uint8)


def _keeps_state(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


def _capture(sampler: Any) -> dict[str, Any]:
    if isinstance(sampler, EpochSampler):
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
