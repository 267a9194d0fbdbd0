"""The order of an epoch: the indices of its batches, and what their random draws are made from.

torch's iterators take ``EpochIndices`` for the sampler. It moves a ``Progress`` on, which
``Checkpoints`` make a state of, to resume inside an epoch.

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
from collections.abc import Callable, Iterator
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
from fastdata.loaders.samplers import RankSampler, name_differences
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
        seen: the mark that the user has come to where a prefetcher reads ahead of them.
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
    seen: tuple[int, bool] | None = None

    def mark(self) -> tuple[int, bool]:
        """Batches handed over and whether those are all; a prefetcher's thread takes it along."""
        return self.handed, self.is_finished

    def hand_over(self, mark: tuple[int, bool]) -> None:
        self.seen = mark

    @property
    def pending(self) -> dict[str, Any] | None:
        """The state that it was resumed from, while no batch was handed over."""
        return self.resumed_from if (self.seen or self.mark()) == (0, False) else None


class EpochIndices(Iterator[Any]):
    """The indices of an epoch's batches, from where it stands, and their draws.

    It does not hold the loader, which may hold an iterator of torch's that holds this.

    Args:
        sampler: gives the indices of each batch, or single ones.
        served: None where they are no samples of a fastdata dataset.
        generator: the loader's.
        now: the epoch that was begun last, which ``iter`` goes on with.
        channels_last: what batches of indices are told; see ``IndexBatch``.
    """

    def __init__(
        self,
        sampler: Any,
        served: LoaderView | None,
        generator: torch.Generator | None,
        now: Callable[[], Progress],
        *,
        channels_last: bool = False,
    ) -> None:
        self._sampler = sampler
        self._served = served
        self._now = now
        self._channels_last = channels_last
        self._samplers = _nested(sampler)
        last = self._samplers[-1] if self._samplers else None
        self.ranked = last if isinstance(last, RankSampler) else None
        self._is_known = all(type(s) in _KNOWN or s is self.ranked for s in self._samplers)
        generators = [generator, *(getattr(s, "generator", None) for s in self._samplers)]
        if not self._is_known or any(
            type(s) in _DRAW_FROM_TORCH and s.generator is None for s in self._samplers
        ):
            generators.append(torch.default_generator)
        found = (each for each in generators if isinstance(each, torch.Generator))
        self.generators = list(dict.fromkeys(found))

    @property
    def shared_batch_size(self) -> int | None:
        """Samples in each batch of a rank where a RankSampler is shared out; else None."""
        outer = self._sampler
        ranked = self.ranked
        if ranked is None:
            return None
        if not ranked.has_begun:
            ranked.find_ranks()
        is_batched = type(outer) is torch_data.BatchSampler and outer.sampler is ranked
        return outer.batch_size if is_batched else 1 if outer is ranked else None

    def batches(self, start: dict[str, Any] | None) -> int | None:
        """How many batches an epoch has that begins with ``start``."""
        size = self.shared_batch_size
        if self.ranked is None or start is None or size is None:
            return length_of(self._sampler)
        position = start["samplers"][-1]["state"]["position"]
        return self.ranked.batches_left(position, size, drop_last=self._sampler.drop_last)

    @property
    def identity(self) -> dict[str, Any]:
        """What a state and the loader that takes it must have alike."""
        identity = {
            "generators": len(self.generators),
            "sampler": " > ".join(type(sampler).__name__ for sampler in self._samplers),
        }
        size = self.shared_batch_size
        if size is not None:
            identity["batch_size"] = size
        if self.ranked is not None:
            identity |= {"world_size": self.ranked.num_replicas, "order": self.ranked.identity}
        return identity

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
            seed = None if self._served is None else self._served.seed
            self._seed = progress.base_seed or 0 if seed is None else seed
            self._shared: Any = next(filter(_is_shared, self._samplers), None)
            self._length = length_of(self._sampler) if self._is_known else None
            self._indices = self._rest(progress)
        progress.drawn += 1  # a sampler that fails has drawn a batch that cannot be had
        try:
            batch = next(self._indices)
        except StopIteration:
            progress.drawn -= 1
            raise
        if progress.drawn == self._length:
            # RandomSampler draws once more after its last index: now, before a state is taken of
            # where that leaves it.
            self._indices = _with_first(self._indices)
        number = progress.offset + progress.drawn - 1
        if self._shared is not None:  # among the batches of all ranks, so that no two draw the same
            number = number * self._shared.num_replicas + self._shared.rank
        progress.draws = DrawKey(self._seed, progress.epoch or 0, number)
        if isinstance(batch, IndexBatch):
            batch.draws = progress.draws
            batch.channels_last = self._channels_last
        return batch

    def _rest(self, progress: Progress) -> Iterator[Any]:
        """The batches of the epoch that are still to come."""
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
            start = progress.start
            for generator, packed in zip(self.generators, start["generators"], strict=True):
                generator.set_state(_unpack(packed))
            for sampler, saved in zip(self._samplers, start["samplers"], strict=True):
                if "state" in saved and sampler is not self.ranked:
                    sampler.load_state_dict(copy.deepcopy(saved["state"]))
                if "epoch" in saved and progress.is_begun:  # else it may have been set since
                    sampler.set_epoch(saved["epoch"])
            # Samplers draw when first asked.
            rest = itertools.islice(self._begin(progress), progress.skipped, None)
            return _with_first(rest)

    def _begin(self, progress: Progress) -> Iterator[Any]:
        served, shared = self._served, self._shared
        indices: Iterator[Any] = iter(self._sampler)
        if served is None:
            return indices
        if self.ranked is not None:
            # Not where each epoch draws a seed, whose draws count from 0, nor where the epoch of
            # draws was set alone.
            is_counted = served.seed is not None or progress.keeps_seed
            if self.ranked.is_set or (served.epoch is None and is_counted):
                progress.epoch = self.ranked.coming()["epoch"]
        # Of another sampler nobody knows whether other ranks have the same samples.
        is_unknown = shared is not None and type(shared) not in _KNOWN and shared is not self.ranked
        draws = _BatchDraws(
            served,
            progress.epoch or 0,
            self._seed,
            rank=shared.rank if is_unknown else 0,
            ranks=shared.num_replicas if is_unknown else 1,
            is_counted=not _gives_each_once(self._sampler),
        )
        return map(draws, indices)


def _with_first(indices: Iterator[Any]) -> Iterator[Any]:
    """The same, whose first one is drawn now."""
    return itertools.chain(list(itertools.islice(indices, 1)), indices)


def _is_shared(sampler: Any) -> bool:
    """Whether it gives each rank its share, and says so."""
    numbers = (getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None))
    return all(isinstance(number, int) for number in numbers)


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
        self._is_own = len(served.parts) == 1 and served.has_own
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
            is_list = type(indices) is list
            index_B = np.asarray(array("q", indices)) if is_list else as_numbers(indices)
        except TypeError:
            index_B = as_numbers(indices)  # which says what they are
        if (index_B.view(np.uint64) >= self._length).any():
            index_B = positions(index_B, self._length)
        visit_B = self._visits(index_B, indices)
        if self._subset is not None:
            index_B = self._subset[index_B]
            indices = index_B.tolist()
            index_B = positions(index_B, self._count)
        batch = IndexBatch(indices)
        batch.positions = index_B
        batch.visits = visit_B
        batch.seed = self._seed
        return batch

    def _visits(self, index_B: np.ndarray, indices: list[int]) -> np.ndarray:
        if self._seen is None:
            return np.full(len(index_B), self._epoch, np.int64)
        before_B = count_earlier(self._seen, index_B)
        for k, occurrence in occurrences(indices):
            before_B[k] = occurrence
        if self._earlier is not None:
            before_B = before_B * (int(self._earlier.max()) + 1) + self._earlier[index_B]
        visit_B: np.ndarray = self._epoch + (before_B * self._ranks + self._rank << REPEAT_SHIFT)
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


class Checkpoints:
    """How far the latest epoch of a loader has come, which comes next, and states of both.

    Args:
        sampler: gives the indices of each batch, or single ones.
        served: None where they are no samples of a fastdata dataset.
        seeds_once: only the first epoch draws a base seed, as in torch where workers persist.
    """

    def __init__(self, sampler: Any, served: LoaderView | None, *, seeds_once: bool) -> None:
        self.progress = Progress(is_finished=True)
        self.served = served
        self._sampler = sampler
        self._seeds_once = seeds_once
        self._epoch: int | None = None  # number of the latest
        self._set: int | None = None  # of the coming ones, by the user
        self._loaded: dict[str, Any] | None = None

    def indices(
        self, generator: torch.Generator | None = None, *, channels_last: bool = False
    ) -> EpochIndices:
        return EpochIndices(
            self._sampler,
            self.served,
            generator,
            lambda: self.progress,
            channels_last=channels_last,
        )

    def set_epoch(self, epoch: int) -> None:
        self._set = epoch
        ranked = self.indices().ranked
        if ranked is not None:
            ranked.set_epoch(epoch)

    def begin(self) -> Progress:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        state = self._loaded or self.progress.pending
        self._loaded = None
        kept = self._kept_seed
        indices = self.indices()
        if state is None or not _goes_on(state, indices):
            self._epoch = self._chosen(self._next_number)
            self.progress = Progress(epoch=self._epoch, base_seed=kept, keeps_seed=kept is not None)
            return self.progress
        is_begun = state["is_begun"]
        if state["epoch"] is not None:
            self._epoch = state["epoch"] if is_begun else self._chosen(state["epoch"])
        self.progress = Progress(
            epoch=self._epoch,
            start=state["start"],
            is_begun=is_begun,
            base_seed=state["base_seed"],
            keeps_seed=kept is not None or state["keeps_seed"],
            offset=state["num_yielded"],
            skipped=0 if indices.shared_batch_size else state["num_yielded"],
            resumed_from=state,
        )
        return self.progress

    def state(self, generator: torch.Generator | None, identity: dict[str, Any]) -> dict[str, Any]:
        progress = self.progress
        pending = self._loaded or progress.pending
        if pending is not None:
            return copy.deepcopy(pending)
        indices = self.indices(generator)
        handed, is_over = progress.seen or progress.mark()
        is_over = is_over or progress.skipped + handed == indices.batches(progress.start)
        if is_over:
            handed = 0
            progress = self._coming(indices, generator)
        start = copy.deepcopy(progress.start) or indices.capture()
        size = indices.shared_batch_size
        if indices.ranked is not None and size is not None:
            reached = start["samplers"][-1]["state"]
            reached["position"] = indices.ranked.advance(reached["position"], handed, size)
        return {
            "version": VERSION,
            "num_yielded": progress.offset + handed,
            "is_begun": not is_over,
            "epoch": progress.epoch,
            "base_seed": progress.base_seed,
            "keeps_seed": progress.keeps_seed,
            "start": start,
            "loader": identity,
        }

    def _coming(self, indices: EpochIndices, generator: torch.Generator | None) -> Progress:
        """How the next epoch would begin if it began now."""
        seed = kept = self._kept_seed
        with undisturbed(*indices.generators):
            if kept is None:
                seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
            start = indices.capture()
        if indices.ranked is not None and indices.ranked.has_begun:  # one that was set is over too
            start["samplers"][-1]["state"]["epoch"] = indices.ranked.epoch + 1
        return Progress(self._next_number, start, base_seed=seed, keeps_seed=kept is not None)

    def load(self, state: dict[str, Any], identity: dict[str, Any]) -> None:
        """Let the next epoch be that of a state.

        Raises:
            ValueError: it is of another loader; says what differs.
        """
        indices = self.indices()
        if state:
            _check(state, identity, is_shared=indices.shared_batch_size is not None)
        self._loaded = copy.deepcopy(state) or None
        self.progress.resumed_from = None
        if indices.ranked is not None:
            indices.ranked.is_set = False  # an epoch that is set from now on counts

    @property
    def _kept_seed(self) -> int | None:
        return self.progress.base_seed if self._seeds_once else None

    @property
    def _next_number(self) -> int | None:
        """Number of the coming epoch, as draws count it: those of a new base seed from 0."""
        if self.served is None:
            return None
        if self._epoch is None or (self.served.seed is None and self._kept_seed is None):
            return 0
        return self._epoch + 1

    def _chosen(self, number: int | None) -> int | None:
        """The number of the epoch that the user has set, or ``number``."""
        if self.served is None:
            return None
        chosen = self.served.epoch if self._set is None else self._set
        return number if chosen is None else chosen


def _goes_on(state: dict[str, Any], indices: EpochIndices) -> bool:
    """Put a RankSampler where the state stands; False if another epoch begins.

    It was told to, or there is no batch left of the one that the state stands in.
    """
    ranked = indices.ranked
    if ranked is None:
        return True
    saved = state["start"]["samplers"][-1]["state"]
    is_set = ranked.is_set
    if is_set and ranked.epoch != saved["epoch"]:
        return not state["is_begun"]
    ranked.load_state_dict(saved)
    ranked.is_set = is_set
    if state["is_begun"] and not is_set and indices.batches(state["start"]) == 0:
        ranked.load_state_dict(saved | {"epoch": saved["epoch"] + 1, "position": 0})
        return False
    return True


def _check(state: dict[str, Any], own: dict[str, Any], *, is_shared: bool) -> None:
    """Check that a state is of a loader like this; how samples are shared out may differ."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"this is no state of a fastdata DataLoader of version {VERSION}: it has version "
            f"{state.get('version')!r} and the keys {sorted(state)}"
        )
    saved = state["loader"]
    if is_shared:
        free = dict.fromkeys(("batch_size", "world_size", "sampler_length"))
        saved, own = saved | free, own | free
    differing = name_differences(saved, own)
    if differing:
        raise ValueError(
            f"the state is of another loader: {differing}. Make the loader as it was when the "
            "state was saved, or begin a new epoch without the state."
        )
