"""Resuming inside an epoch: what a state holds, and how the rest of the epoch is found again.

Batches are read ahead of the user, and so is the sampler: what it says of itself is not what the user has seen. A state
therefore holds what the epoch's order was drawn from, and how many batches were handed over. Resuming draws the same
order again and passes over indices, never over samples. fastdata's own samplers begin anywhere: of them a state holds
the place in the order of all ranks that the batches handed over lead to, so that other ranks and batches can go on.

Only what an order can be drawn from is recorded: for an epoch in sequence nothing, for torch's own samplers their
generators, for one that nobody knows also torch's global one; Python's and NumPy's never.
"""

from __future__ import annotations

import base64
import copy
import itertools
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from fastdata.batch import DrawKey, IndexBatch, RepeatedIndex
from fastdata.loader.view import LoaderView
from fastdata.samplers import EpochSampler

VERSION = 3

_DRAW_NOTHING = (torch_data.BatchSampler, torch_data.SequentialSampler, torch_data.DistributedSampler)
_PLAIN = (list, tuple, range, np.ndarray, torch.Tensor)
_DRAW_FROM_TORCH = (torch_data.RandomSampler, torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler)


def draw_base_seed(generator: torch.Generator | None = None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


@contextmanager
def undisturbed(*others: torch.Generator) -> Iterator[None]:
    """Leave torch's global generator, and others, as they were."""
    before = [(generator, generator.get_state()) for generator in (torch.default_generator, *others)]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@dataclass(slots=True)
class Progress:
    """How far one epoch has come. Batches are numbered in the order of the sampler."""

    epoch: int | None = None  # its number, which random draws are made from
    start: dict[str, Any] | None = None  # what the order is drawn from; None until the first index is drawn
    is_begun: bool = False  # it is resumed inside: nothing more is drawn from the global generator
    base_seed: int | None = None  # of worker processes, and of draws where the dataset has no seed; None until drawn
    keeps_seed: bool = False  # that was drawn by an earlier epoch of workers that persist
    first: int = 0  # batches before this one were handed over
    ahead: tuple[int, ...] = ()  # batches after it that were handed over too; only without ``in_order``
    passed: int = 0  # batches handed over before a sampler of fastdata's went on, which gives only later ones
    drawn: int = 0  # since the epoch was begun or resumed
    is_finished: bool = False
    resumed_from: dict[str, Any] | None = None  # holds until a batch is handed over
    draws: DrawKey | None = None  # of the batch that was drawn last
    handed: Progress | None = None  # how far the user has got where a prefetcher reads ahead of them
    _resumed_at: tuple[int, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._resumed_at = self.first, self.ahead

    def note(self, unread: Collection[int]) -> None:
        first = min(unread, default=self.drawn)
        later = [] if self.drawn - first == len(unread) else [k for k in range(first, self.drawn) if k not in unread]
        self.first = self._number(first)
        old = self._resumed_at[1]
        self.ahead = tuple(sorted([*map(self._number, later), *(number for number in old if number > self.first)]))

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


class LoaderEpochs:
    """Counts a loader's epochs from 0, for the random draws: those that follow a base seed, from 0 for each."""

    current: int | None = None
    _set: int | None = None

    def set(self, epoch: int) -> None:
        self._set = epoch

    def begin(self, epoch: int, served: LoaderView) -> None:
        chosen = served.epoch if self._set is None else self._set
        self.current = epoch if chosen is None else chosen

    def resume(self, state: dict[str, Any], served: LoaderView) -> None:
        """Go on with the epoch of a loader's state: that one if it has begun, else as ``begin``."""
        if state["is_begun"]:
            self.current = state["epoch"]
        else:
            self.begin(state["epoch"], served)

    def coming(self, *, is_counted_anew: bool = False) -> int:
        """Number of the epoch that would begin now if none is set."""
        return 0 if self.current is None or is_counted_anew else self.current + 1


class Checkpoints:
    """How far the latest epoch of a loader has come, which comes next, and the state that one is resumed from.

    ``sampler`` gives the indices of each batch, or single ones; ``served`` is None where they are no samples of a
    fastdata dataset. With ``seeds_once`` only the first epoch draws a base seed, as in torch where workers persist.
    """

    def __init__(self, sampler: Any, served: LoaderView | None, epochs: LoaderEpochs, *, seeds_once: bool) -> None:
        self.progress = Progress(is_finished=True)
        self._sampler, self.served, self._epochs, self._seeds_once = sampler, served, epochs, seeds_once
        self._loaded: dict[str, Any] | None = None
        self._before: dict[str, Any] = {}  # where a sampler that counts its epochs stood before one was loaded

    def order(self, generator: torch.Generator | None) -> Order:
        return Order(self._sampler, self.served, generator, lambda: self.progress)

    def begin(self) -> Progress:
        state, self._loaded = self._loaded or self._seen.resumed_from, None
        state = state and self._put_back(state)
        is_passed = state is not None and bool(self.order(None).sharing) and not state["ahead"]
        kept, epochs = self._kept_seed, self._epochs
        if state is None:
            if self.served:
                epochs.begin(self._coming_number(self.served), self.served)
            self.progress = Progress(epoch=epochs.current, base_seed=kept, keeps_seed=kept is not None)
            return self.progress
        if self.served and state["epoch"] is not None:
            epochs.resume(state, self.served)
        self.progress = Progress(
            epoch=epochs.current,
            start=state["start"],
            is_begun=state["is_begun"],
            base_seed=state["base_seed"],
            keeps_seed=kept is not None or state["keeps_seed"],
            first=0 if is_passed else state["num_yielded"],
            ahead=tuple(state["ahead"]),
            passed=state["num_yielded"] if is_passed else 0,
            resumed_from=state,
        )
        return self.progress

    def state(self, generator: torch.Generator | None, identity: dict[str, Any]) -> dict[str, Any]:
        progress, order = self._seen, self.order(generator)
        held = self._loaded or progress.resumed_from
        if held is not None:
            return copy.deepcopy(held)
        is_over = progress.is_finished or (progress.first == order.batches(progress.start) and not progress.ahead)
        if is_over:  # how the next epoch would begin if it began now
            kept, epoch = self._kept_seed, self._coming_number(self.served) if self.served else None
            with undisturbed(*order.generators):
                seed = draw_base_seed(generator) if kept is None else kept
                progress = Progress(epoch, order.capture(), base_seed=seed, keeps_seed=kept is not None)
            if progress.start and order.counted and order.counted.has_begun:  # one that was set is over too
                progress.start["samplers"][-1]["state"]["epoch"] = order.counted.epoch + 1
        start, first = copy.deepcopy(progress.start) or order.capture(), progress.first
        if order.counted and (sharing := order.sharing) and not progress.ahead:
            reached = start["samplers"][-1]["state"]
            reached["position"] = order.counted.advance(reached["position"], first, sharing["batch_size"])
            first += progress.passed
        return {
            "version": VERSION,
            "num_yielded": first,
            "ahead": list(progress.ahead),
            "is_begun": not is_over,
            "epoch": progress.epoch,
            "base_seed": progress.base_seed,
            "keeps_seed": progress.keeps_seed,
            "start": start,
            "loader": identity,
        }

    def load(self, state: dict[str, Any], identity: dict[str, Any]) -> None:
        order, held = self.order(None), self._loaded or self._seen.resumed_from
        if state:
            check_state(state, identity, order.sharing)
        self._loaded = copy.deepcopy(state) or None
        self.progress.resumed_from = self._seen.resumed_from = None
        if order.counted and (state or held):  # now, so that an epoch can be set on it afterwards
            self._before = self._before if held else order.counted.coming()
            order.counted.load_state_dict(state["start"]["samplers"][-1]["state"] if state else self._before)

    def _put_back(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Where a sampler that counts its epochs was asked in vain, let it go on with a state all the same.

        None where another epoch begins: it was told to, or has no batch left of the one that the state stands in.
        """
        order = self.order(None)
        counted, saved = order.counted, state["start"]["samplers"][-1:]
        if counted is None:
            return state
        if counted.has_begun:
            counted.load_state_dict(saved[0]["state"])
        if not state["is_begun"]:
            return state
        if counted.coming() != saved[0]["state"]:
            return None
        if order.sharing and not state["ahead"] and not counted.is_set and order.batches(state["start"]) == 0:
            counted.load_state_dict(counted.state_dict(1, order.sharing["batch_size"], drop_last=True))
            return None
        return state

    @property
    def _seen(self) -> Progress:
        return self.progress.handed or self.progress

    @property
    def _kept_seed(self) -> int | None:
        return self.progress.base_seed if self._seeds_once else None

    def _coming_number(self, served: LoaderView) -> int:
        """Number of the epoch that would begin now, as random draws count it: those of a new base seed from 0."""
        return self._epochs.coming(is_counted_anew=served.seed is None and self._kept_seed is None)


class Order(Iterator[Any]):
    """The indices of the epoch that was begun last, from where it stands, and what they are drawn from.

    torch's iterators take it for the sampler. It does not hold the loader, which may hold such an iterator.
    """

    def __init__(
        self, sampler: Any, served: LoaderView | None, generator: torch.Generator | None, now: Callable[[], Progress]
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
        if not self._is_torchs or any(type(s) in _DRAW_FROM_TORCH and s.generator is None for s in self._samplers):
            found.append(torch.default_generator)
        # Each once, torch's global one among them where it may be drawn from.
        self.generators = list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    @property
    def sharing(self) -> dict[str, Any]:
        """Into what ranks and batches a sampler of fastdata's is shared out; nothing where that cannot be known."""
        counted: Any = self.counted
        outer = self._sampler
        is_known = outer is counted or (type(outer) is torch_data.BatchSampler and outer.sampler is counted)
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
            self._indices = self._open(self._progress)
        self._progress.drawn += 1  # a sampler that fails has drawn a batch that cannot be had
        try:
            indices = next(self._indices)
        except StopIteration:
            self._progress.drawn -= 1
            raise
        if self._is_torchs and self._progress.drawn == length_of(self._sampler):
            # RandomSampler draws once more after its last index: now, before a state is taken of where that leaves it.
            self._indices = itertools.chain(list(itertools.islice(self._indices, 1)), self._indices)
        self._progress.draws = self._draws()
        if isinstance(indices, IndexBatch):
            indices.draws = self._progress.draws
        return indices

    def _draws(self) -> DrawKey:
        seed, number, shared = self._progress.base_seed or 0, self._progress.latest, self._shared
        if shared is not None:  # among the batches of all ranks, so that no two draw the same
            number = number * shared.num_replicas + shared.rank
        if self._served is not None and self._served.seed is not None:
            seed = self._served.seed
        return DrawKey(seed, self._progress.epoch or 0, number)

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
            # torch's generator moves on as at the start of any epoch. A sampler that is not torch's is not asked twice.
            next(iter(self._sampler), None)
        with undisturbed():
            for generator, packed in zip(self.generators, progress.start["generators"], strict=True):
                generator.set_state(_unpack(packed))
            for sampler, saved in zip(self._samplers, progress.start["samplers"], strict=True):
                if "state" in saved and sampler is not self.counted:
                    sampler.load_state_dict(copy.deepcopy(saved["state"]))
                if "epoch" in saved and progress.is_begun:  # else it keeps one that was set on it since
                    sampler.set_epoch(saved["epoch"])
            numbered, ahead = itertools.islice(enumerate(self._begin(progress)), progress.first, None), progress.ahead
            rest = map(itemgetter(1), filter(lambda each: each[0] not in ahead, numbered))
            return itertools.chain(list(itertools.islice(rest, 1)), rest)  # samplers draw when first asked

    def _begin(self, progress: Progress) -> Iterator[Any]:
        indices: Iterator[Any] = iter(self._sampler)
        if self._served is None:
            return indices
        if self.counted:
            served, is_set = self._served, self.counted.is_set
            # Not where each epoch draws a seed, whose draws count from 0, nor where the epoch of draws was set alone.
            if is_set or (served.epoch is None and (served.seed is not None or progress.keeps_seed)):
                progress.epoch = self.counted.coming()["epoch"]
        assert progress.base_seed is not None
        shared, share = self._shared, (0, 1)
        is_torchs = type(shared) is torch_data.DistributedSampler
        if is_torchs and type(self._sampler) is torch_data.BatchSampler and self._sampler.sampler is shared:
            indices = _mark_padding(indices, shared)
        elif shared is not None and shared is not self.counted and not is_torchs:
            share = shared.rank, shared.num_replicas  # whose ranks may have one sample, in an order that nobody knows
        return self._served.visit(
            indices,
            progress.epoch or 0,
            progress.base_seed,
            may_be_marked=is_torchs or self.counted is not None,
            share=share,
        )

    @property
    def _shared(self) -> Any:
        """The sampler that gives each rank its share; None where there is none that says so."""
        for each in self._samplers:
            if isinstance(getattr(each, "rank", None), int) and isinstance(getattr(each, "num_replicas", None), int):
                return each
        return None


def _mark_padding(batches: Iterator[list[int]], sampler: Any) -> Iterator[list[int]]:
    """Mark the samples that torch repeats, the first of an epoch, so that all ranks have equally many."""
    place = sampler.rank
    for batch in batches:
        places = range(place, place + len(batch) * sampler.num_replicas, sampler.num_replicas)
        place += len(places) * sampler.num_replicas
        earlier = (each // len(sampler.dataset) for each in places)
        yield list(map(RepeatedIndex.mark, batch, earlier)) if place > len(sampler.dataset) else batch


def _pack(generator: torch.Generator) -> str:  # some 4,000 characters for a Mersenne twister of 20,000 bits
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


def check_state(state: dict[str, Any], loader: dict[str, Any], sharing: dict[str, Any] | None = None) -> None:
    """Check that a state is of a loader like this, whose values its entry ``"loader"`` must equal.

    Not those that are only how samples are shared out, where there is a ``sharing``.

    Raises:
        ValueError: it is not; says what differs.
    """
    if state.get("version") != VERSION:
        raise ValueError(
            f"this is no state of a fastdata DataLoader of version {VERSION}: it has version "
            f"{state.get('version')!r} and the keys {sorted(state)}"
        )
    saved, free = state["loader"], {*sharing, "sampler_length"} if sharing else set()
    if sharing and state["ahead"] and any(saved.get(name) != value for name, value in sharing.items()):
        raise ValueError(
            "the state was saved while batches were still to come that others had overtaken (in_order=False): it can "
            f"only be loaded with batch_size={saved.get('batch_size')} and {saved.get('world_size')} ranks, as it was "
            f"saved, not with batch_size={sharing['batch_size']} and {sharing['world_size']}."
        )
    differing = [
        f"{name} is {loader.get(name)!r}, in the state {saved.get(name)!r}"
        for name in dict.fromkeys([*saved, *loader])
        if saved.get(name) != loader.get(name) and name not in free
    ]
    if differing:
        raise ValueError(
            f"the state is of another loader: {'; '.join(differing)}. Make the loader as it was when the state was "
            f"saved, or begin a new epoch without the state."
        )
