"""The order of an epoch: the indices of its batches, and what their random draws are made from.

torch's iterators take ``Epochs`` for the sampler. Its iterators move a ``Progress`` on, which it
makes a state of, to resume inside an epoch.

Batches are read ahead of the user, and so is the sampler. A state therefore holds what the epoch's
order was drawn from, and how many batches were handed over. Resuming draws the same order again and
passes over indices, never over samples. Of a RankSampler, which begins anywhere, a state holds the
position in the order of all ranks, so that other ranks and batches can go on.

What an order can be drawn from is recorded: for torch's own samplers their generators, for one that
nobody knows also torch's global one; Python's and NumPy's never.
"""

from __future__ import annotations

import base64
import copy
import itertools
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from fastdata.datasets.batch import (
    REPEAT_SHIFT,
    DrawKey,
    IndexBatch,
    as_numbers,
    count_earlier,
    occurrences,
    positions,
)
from fastdata.loaders.samplers import RankSampler, State, name_differences
from fastdata.loaders.view import LoaderView

_KNOWN = (
    torch_data.RandomSampler,
    torch_data.SubsetRandomSampler,
    torch_data.WeightedRandomSampler,
    torch_data.BatchSampler,
    torch_data.SequentialSampler,
    torch_data.DistributedSampler,
    RankSampler,
    *(list, tuple, range, np.ndarray, torch.Tensor),
)
"""Samplers that draw from torch's generators only, or not at all."""
VERSION = 4
"""Of states."""


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


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far one epoch has come.

    Attributes:
        epoch: its number, which random draws are made from; None before the first.
        base_seed: of worker processes, and of draws where the dataset has no seed; None until
            drawn.
        keeps_seed: that was drawn by an earlier epoch of workers that persist.
        start: what the order is drawn from; None until the first index is drawn.
        state: that it goes on from, which holds until a batch is handed over.
        is_begun: that state is one inside the epoch; nothing more is drawn from the global
            generator.
        first: batches handed over before that.
        drawn: batches whose indices were drawn.
        handed: of these, those that were handed over.
        draws: of the batch that was drawn last.
        seen: the mark that the user has come to where a prefetcher reads ahead of them.
    """

    epoch: int | None = None
    base_seed: int | None = None
    keeps_seed: bool = False
    start: State | None = None
    state: State | None = None
    is_begun: bool = False
    first: int = 0
    drawn: int = 0
    handed: int = 0
    is_finished: bool = False
    draws: DrawKey | None = None
    seen: tuple[int, bool] | None = None

    def mark(self) -> tuple[int, bool]:
        """Batches handed over and whether those are all; a prefetcher's thread takes it along."""
        return self.handed, self.is_finished

    def hand_over(self, mark: tuple[int, bool]) -> None:
        self.seen = mark

    @property
    def pending(self) -> State | None:
        """The state that it goes on from, while no batch was handed over."""
        return self.state if (self.seen or self.mark()) == (self.first, False) else None


class Epochs:
    """The epochs of a loader: how far the latest has come, which comes next, and states of both.

    Iterating gives the indices of the batches of the epoch that was begun last. It does not hold
    the loader, which may hold an iterator of torch's that holds this.

    Args:
        sampler: gives the indices of each batch, or single ones.
        served: None where they are no samples of a fastdata dataset.
        generator: the loader's.
        seeds_once: only the first epoch draws a base seed, as in torch where workers persist.

    Attributes:
        channels_last: what batches of indices are told; see ``IndexBatch``.
    """

    def __init__(
        self,
        sampler: Any,
        served: LoaderView | None,
        generator: torch.Generator | None,
        *,
        seeds_once: bool,
    ) -> None:
        self.progress = Progress(is_finished=True)
        self.served = served
        self.channels_last = False
        self.sampler = sampler
        self._generator = generator
        self._seeds_once = seeds_once
        self._set: int | None = None  # number of the coming epochs, by the user
        self.samplers = _nested(sampler)
        last = self.samplers[-1] if self.samplers else None
        self.ranked = last if isinstance(last, RankSampler) else None
        self.is_known = all(type(each) in _KNOWN or each is self.ranked for each in self.samplers)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return _EpochIndices(self, self.progress)

    @property
    def _generators(self) -> list[torch.Generator]:
        """Those that an order is drawn from."""
        of_samplers = [getattr(each, "generator", False) for each in self.samplers]
        found = [self._generator, *of_samplers]
        if None in of_samplers or not self.is_known:
            found.append(torch.default_generator)
        return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))

    @property
    def batch_size(self) -> int | None:
        """Samples in each batch of a rank where a RankSampler is shared out; else None."""
        if self.ranked is None:
            return None
        if not self.ranked.has_begun:
            self.ranked.find_ranks()
        if self.sampler is self.ranked:
            return 1
        outer = self.sampler
        is_batched = type(outer) is torch_data.BatchSampler and outer.sampler is self.ranked
        return outer.batch_size if is_batched else None

    def _identity(self, loader: State) -> State:
        """What a state and the loader that takes it must have alike."""
        identity = loader | {
            "generators": len(self._generators),
            "sampler": " > ".join(type(sampler).__name__ for sampler in self.samplers),
        }
        size = self.batch_size
        if size is not None:
            identity["batch_size"] = size
        if self.ranked is not None:
            identity |= {"world_size": self.ranked.num_replicas, "order": self.ranked.identity}
        return identity

    def capture(self) -> State:
        """What the order is drawn from."""
        return {
            "generators": [_pack(generator) for generator in self._generators],
            "samplers": [_capture(sampler) for sampler in self.samplers],
        }

    def restore(self, start: State, *, is_begun: bool) -> None:
        """Let generators and samplers draw the order that they drew once."""
        for generator, packed in zip(self._generators, start["generators"], strict=True):
            generator.set_state(_unpack(packed))
        for sampler, saved in zip(self.samplers, start["samplers"], strict=True):
            if "state" in saved and sampler is not self.ranked:
                sampler.load_state_dict(copy.deepcopy(saved["state"]))
            if "epoch" in saved and is_begun:  # else it may have been set since
                sampler.set_epoch(saved["epoch"])

    def set_epoch(self, epoch: int) -> None:
        self._set = epoch
        if self.ranked is not None:
            self.ranked.set_epoch(epoch)

    def begin(self) -> Progress:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        state = self.progress.pending
        kept = self._kept_seed
        if state is None or not self._goes_on(state):
            self.progress = Progress(
                epoch=self._chosen(self._next_number), base_seed=kept, keeps_seed=kept is not None
            )
            return self.progress
        is_begun = state["is_begun"]
        passed = state["num_yielded"]
        number = state["epoch"] or 0
        self.progress = Progress(
            epoch=number if is_begun else self._chosen(number),
            base_seed=state["base_seed"],
            keeps_seed=state["keeps_seed"] or kept is not None,
            start=state["start"],
            state=state,
            is_begun=is_begun,
            first=passed,
            drawn=passed,
            handed=passed,
        )
        return self.progress

    def _goes_on(self, state: State) -> bool:
        """Put a RankSampler where the state stands; False if another epoch begins.

        It was told to, or there is no batch left of the one that the state stands in.
        """
        ranked = self.ranked
        if ranked is None:
            return True
        saved = state["start"]["samplers"][-1]["state"]
        is_set = ranked.is_set
        if is_set and ranked.epoch != saved["epoch"]:
            return not state["is_begun"]
        ranked.load_state_dict(saved)
        ranked.is_set = is_set
        size = self.batch_size
        if is_set or not state["is_begun"] or size is None:
            return True
        if ranked.batches_left(size, drop_last=self.sampler.drop_last):
            return True
        ranked.load_state_dict(saved | {"epoch": saved["epoch"] + 1, "position": 0})
        return False

    def state(self, loader: State) -> State:
        """Where the latest epoch stands; ``loader``: what another one must have alike."""
        progress = self.progress
        if progress.pending is not None:
            return copy.deepcopy(progress.pending)
        handed, is_over = progress.seen or progress.mark()
        ranked = self.ranked
        size = self.batch_size
        reached: State | None = None
        if ranked is None or size is None:
            is_over = is_over or handed == length_of(self.sampler)
        elif progress.start is not None:
            begun = copy.copy(ranked)  # which may have been told of another epoch since
            begun.load_state_dict(progress.start["samplers"][-1]["state"])
            batches = handed - progress.first
            reached = begun.state_dict(batches, size, drop_last=self.sampler.drop_last)
            is_over = is_over or reached["epoch"] != begun.epoch
        if is_over:
            handed = 0
            progress = self._coming()
        start = copy.deepcopy(progress.start) or self.capture()
        if reached is not None and not is_over:
            start["samplers"][-1]["state"] = reached
        return {
            "version": VERSION,
            "num_yielded": handed,
            "is_begun": not is_over,
            "epoch": progress.epoch,
            "base_seed": progress.base_seed,
            "keeps_seed": progress.keeps_seed,
            "start": start,
            "loader": self._identity(loader),
        }

    def _coming(self) -> Progress:
        """How the next epoch would begin if it began now."""
        seed = kept = self._kept_seed
        with undisturbed(*self._generators):
            if seed is None:
                drawn = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
                seed = int(drawn)
            start = self.capture()
        if self.ranked is not None and self.ranked.has_begun:  # one that was set is over too
            start["samplers"][-1]["state"]["epoch"] = self.ranked.epoch + 1
        return Progress(
            epoch=self._next_number, start=start, base_seed=seed, keeps_seed=kept is not None
        )

    def load(self, state: State, loader: State) -> None:
        """Let the next epoch be that of a state.

        Raises:
            ValueError: it is of another loader; says what differs.
        """
        if state:
            self._check(state, self._identity(loader))
        if state or self.progress.pending:
            self.progress = Progress(
                epoch=self.progress.epoch,
                base_seed=self._kept_seed,
                state=copy.deepcopy(state),
                is_finished=not state,
            )
        if self.ranked is not None:
            self.ranked.is_set = False  # an epoch that is set from now on counts

    def _check(self, state: State, own: State) -> None:
        if state.get("version") != VERSION:
            raise ValueError(
                f"this is no state of a fastdata DataLoader of version {VERSION}: it has version "
                f"{state.get('version')!r} and the keys {sorted(state)}"
            )
        saved = state["loader"]
        if self.batch_size is not None:  # how samples are shared out may differ
            free = dict.fromkeys(("batch_size", "world_size", "sampler_length"))
            saved, own = saved | free, own | free
        differing = name_differences(saved, own)
        if differing:
            raise ValueError(
                f"the state is of another loader: {differing}. Make the loader as it was when the "
                "state was saved, or begin a new epoch without the state."
            )

    @property
    def _kept_seed(self) -> int | None:
        return self.progress.base_seed if self._seeds_once else None

    @property
    def _next_number(self) -> int:
        """Number of the coming epoch, as draws count it: those of a new base seed from 0."""
        latest = self.progress.epoch
        has_seed = self.served is not None and self.served.seed is not None
        is_counted = has_seed or self._kept_seed is not None
        return latest + 1 if is_counted and latest is not None else 0

    def _chosen(self, number: int) -> int:
        """The number of the epoch that the user has set, or ``number``."""
        of_dataset = None if self.served is None else self.served.epoch
        chosen = of_dataset if self._set is None else self._set
        return number if chosen is None else chosen


class _EpochIndices(Iterator[Any]):
    """The indices of an epoch's batches, from where it stands, with what their draws are made from.

    Samplers are begun, and draw, when the first is asked for.
    """

    def __init__(self, epochs: Epochs, progress: Progress) -> None:
        self._epochs = epochs
        self._progress = progress
        self._indices: Iterator[Any] | None = None

    def __next__(self) -> Any:
        progress = self._progress
        if self._indices is None:
            self._indices = self._begin()
        progress.drawn += 1  # a sampler that fails has drawn a batch that cannot be had
        try:
            indices = next(self._indices)
        except StopIteration:
            progress.drawn -= 1
            raise
        if progress.drawn == self._last:
            # RandomSampler draws once more after its last index: now, before a state is taken of
            # where that leaves it.
            self._indices = _with_first(self._indices)
        number = progress.drawn - 1
        if self._shared is not None:  # among the batches of all ranks, so that no two draw the same
            number = number * self._shared.num_replicas + self._shared.rank
        progress.draws = DrawKey(self._seed, progress.epoch or 0, number)
        if isinstance(indices, IndexBatch):
            indices.draws = progress.draws
            indices.channels_last = self._epochs.channels_last
        return indices

    def _begin(self) -> Iterator[Any]:
        """Put the samplers where the epoch stands, and give the batches that are still to come."""
        epochs = self._epochs
        progress = self._progress
        served = epochs.served
        ranked = epochs.ranked
        seed = None if served is None else served.seed
        self._seed = progress.base_seed or 0 if seed is None else seed
        self._last = length_of(epochs.sampler) if epochs.is_known else None
        # Where there is one rank some have None.
        shares = (each for each in epochs.samplers if getattr(each, "num_replicas", None))
        self._shared: Any = next(shares, None)
        # Not where each epoch draws a seed, whose draws count from 0, nor where the epoch of draws
        # was set alone.
        is_counted = seed is not None or progress.keeps_seed
        if (
            ranked is not None
            and served is not None
            and (ranked.is_set or (is_counted and served.epoch is None))
        ):
            progress.epoch = ranked.coming()["epoch"]
        if progress.start is None:
            progress.start = epochs.capture()
            return self._with_draws(iter(epochs.sampler))
        if ranked is not None:  # another epoch may have been set on it since
            progress.start = progress.start | {"samplers": epochs.capture()["samplers"]}
        elif not progress.is_begun and epochs.is_known:
            # torch's generator moves on as at the start of any epoch. A sampler that is not known
            # is not asked twice.
            next(iter(epochs.sampler), None)
        with undisturbed():
            epochs.restore(progress.start, is_begun=progress.is_begun)
            indices = self._with_draws(iter(epochs.sampler))
            # A RankSampler begins where the epoch stands.
            passed = progress.first if epochs.batch_size is None else 0
            return _with_first(itertools.islice(indices, passed, None))

    def _with_draws(self, indices: Iterator[Any]) -> Iterator[Any]:
        epochs = self._epochs
        if epochs.served is None:
            return indices
        epoch = self._progress.epoch or 0
        draws = _BatchDraws(epochs, epochs.served, epoch, self._seed, self._shared)
        # Only a subclass of one's own may know what an index means.
        is_own = len(epochs.served.parts) == 1 and epochs.served.has_own
        return map(draws.attempt if is_own else draws, indices)


def _with_first(indices: Iterator[Any]) -> Iterator[Any]:
    """The same, whose first one is drawn now."""
    return itertools.chain(list(itertools.islice(indices, 1)), indices)


def _nested(sampler: Any) -> list[Any]:
    """A sampler and those in it, as far as their states are not part of its own."""
    if sampler is None:
        return []
    if _keeps_state(sampler):
        return [sampler]
    inner = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
    return [sampler, *_nested(inner)]


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
        epochs: of the loader.
        served: what is behind it.
        epoch: its number.
        seed: of its draws.
        shared: a sampler that gives each rank its share.
    """

    def __init__(
        self, epochs: Epochs, served: LoaderView, epoch: int, seed: int, shared: Any
    ) -> None:
        self._subset = served.subset
        self._count = served.index_count
        self._length = self._count if self._subset is None else len(self._subset)
        self._epoch = epoch
        self._seed = seed
        self._rank = 0
        self._ranks = 1
        if shared is not epochs.ranked and type(shared) not in _KNOWN:
            # Nobody knows whether other ranks have the same samples.
            self._rank = shared.rank
            self._ranks = shared.num_replicas
        self._earlier = _earlier_of(self._subset, self._count)
        is_plain = self._earlier is None and _gives_each_once(epochs.sampler)
        self._seen = None if is_plain else np.zeros(self._length, np.uint32)

    def attempt(self, indices: list[int]) -> list[int]:
        """The indices as they are where they are none of samples."""
        try:
            return self(indices)
        except (IndexError, TypeError, ValueError):
            return indices

    def __call__(self, indices: list[int]) -> IndexBatch:
        try:  # 5 us for 256 indices
            is_list = type(indices) is list
            index_B = np.asarray(array("q", indices)) if is_list else as_numbers(indices)
        except TypeError:
            index_B = as_numbers(indices)  # which says what they are
        if (index_B.view(np.uint64) >= self._length).any():
            index_B = positions(index_B, self._length)
        visit_B = np.full(len(index_B), self._epoch, np.int64)
        if self._seen is not None:
            before_B = count_earlier(self._seen, index_B)
            for row, occurrence in occurrences(indices):
                before_B[row] = occurrence
            if self._earlier is not None:
                before_B = before_B * (int(self._earlier.max()) + 1) + self._earlier[index_B]
            visit_B += before_B * self._ranks + self._rank << REPEAT_SHIFT
        if self._subset is not None:
            index_B = self._subset[index_B]
            indices = index_B.tolist()
            index_B = positions(index_B, self._count)
        batch = IndexBatch(indices)
        batch.positions = index_B
        batch.visits = visit_B
        batch.seed = self._seed
        return batch


def _earlier_of(subset: np.ndarray | None, count: int) -> np.ndarray | None:
    """Of each index of a Subset, how many smaller ones are of the same sample; None if none are."""
    if subset is None or not count:
        return None
    earlier = count_earlier(np.zeros(count, np.uint32), subset % count)
    return earlier if earlier.any() else None


def _pack(generator: torch.Generator) -> str:
    """Some 4,000 characters for a Mersenne twister of 20,000 bits."""
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes(), 1)).decode()


def _unpack(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.uint8)


def _keeps_state(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


def _capture(sampler: Any) -> State:
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
