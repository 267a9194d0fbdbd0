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
import operator
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastdata.datasets.batch import (
    REPEAT_SHIFT,
    DrawKey,
    IndexBatch,
    count_earlier,
    occurrences,
    positions,
)
from fastdata.loaders.epochs import LoaderView, Progress
from fastdata.loaders.samplers import RankSampler, State, name_differences

_KNOWN = {
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    BatchSampler,
    SequentialSampler,
    DistributedSampler,
    list,
    tuple,
    range,
    np.ndarray,
    torch.Tensor,
}
"""Samplers that draw from torch's generators only, or not at all."""
VERSION = 4
"""Of states."""


class Epochs:
    """The epochs of a loader: how far the latest has come, which comes next, and states of both.

    Iterating gives the indices of the batches of the epoch that was begun last. It does not hold
    the loader, which may hold an iterator of torch's that holds this.

    Args:
        sampler: gives the indices of each batch, or single ones.
        served: what of them is fastdata's.
        generator: the loader's.
        seeds_once: only the first epoch draws a base seed, as in torch where workers persist.
        is_batched: the sampler gives the indices of a batch, not single ones.

    Attributes:
        channels_last: what batches of indices are told; see ``IndexBatch``.
    """

    def __init__(
        self,
        sampler: Any,
        served: LoaderView,
        generator: torch.Generator | None,
        *,
        seeds_once: bool,
        is_batched: bool,
    ) -> None:
        self.progress = Progress(is_finished=True)
        self.served = served
        self.channels_last = False
        self.sampler = sampler
        self._generator = generator
        self._seeds_once = seeds_once
        self._is_batched = is_batched
        self._set: int | None = None  # number of the coming epochs, by the user
        self._samplers = _nested(sampler)
        told = [*self._samplers, getattr(sampler, "sampler", None)]
        self._may_be_told = any(hasattr(each, "set_epoch") for each in told)
        last = self._samplers[-1]
        self._ranked = last if isinstance(last, RankSampler) else None
        kinds = {type(each) for each in self._samplers if each is not self._ranked}
        self._is_known = kinds <= _KNOWN

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.progress)

    def set_epoch(self, epoch: int) -> None:
        self._set = operator.index(epoch)
        if self._ranked is not None:
            self._ranked.set_epoch(epoch)

    # An epoch

    def begin(self) -> Progress:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        state = self.progress.pending
        ranked = self._ranked
        if state is not None and ranked is not None:
            saved = _rank_state(state["start"])
            is_set = ranked.is_set
            if not is_set or ranked.epoch == saved["epoch"]:
                ranked.load_state_dict(saved)
                ranked.is_set = is_set
            elif state["is_begun"]:
                state = None  # the sampler was told to begin another epoch
        progress = self._following()
        if state is not None:
            passed = state["num_yielded"]
            progress = Progress(
                epoch=state["epoch"] or 0,
                base_seed=state["base_seed"],
                start=state["start"],
                state=state,
                is_begun=state["is_begun"],
                first=passed,
                drawn=passed,
                handed=passed,
            )
        chosen = self.served.epoch if self._set is None else self._set
        if chosen is not None and not progress.is_begun:
            progress.epoch = chosen
        progress.may_be_told = self._may_be_told
        self.progress = progress
        return progress

    def _batches(self, progress: Progress) -> Iterator[Any]:
        """The indices of an epoch's batches, from where it stands, and notes their draws.

        Samplers are begun, and draw, when the first is asked for.
        """
        served = self.served
        ranked = self._ranked
        own_seed = served.seed
        seed = progress.base_seed or 0 if own_seed is None else own_seed
        # Not where each epoch draws a seed, whose draws count from 0, nor where the epoch of draws
        # was set alone.
        is_counted = self._is_counted and served.epoch is None
        if ranked is not None and served.parts and (ranked.is_set or is_counted):
            progress.epoch = ranked.coming()["epoch"]
        epoch = progress.epoch
        # Where there is one rank some have None.
        sharing = (each for each in self._samplers if getattr(each, "num_replicas", None))
        shared = next(sharing, None)
        rank, ranks = (shared.rank, shared.num_replicas) if shared else (0, 1)
        last = length_of(self.sampler) if self._is_known and ranked is None else None
        is_seeded = any(getattr(each, "generator", None) for each in self._samplers)
        if served.parts:
            # Of others nobody knows whether several ranks have the same samples.
            is_apart = shared is ranked or type(shared) in _KNOWN
            apart = (0, 1) if is_apart else (rank, ranks)
            draw = _index_batches(served, self.sampler, epoch, seed, *apart)
        indices = self._begun(progress)
        if self._is_batched:
            indices = map(_as_list, indices)
        if served.parts:
            indices = map(draw, indices)
        if self._batch_size is None:  # else the sampler begins where the epoch stands
            indices = itertools.islice(indices, progress.first, None)
        for batch in indices:
            progress.drawn += 1
            if progress.drawn == last and is_seeded:
                # RandomSampler draws once more after its last index: now, before a state is taken
                # of where that leaves its generator; one that it makes for the epoch nobody sees.
                next(indices, None)
            # Among the batches of all ranks, so that no two draw the same.
            progress.draws = DrawKey(seed, epoch, (progress.drawn - 1) * ranks + rank)
            if isinstance(batch, IndexBatch):
                batch.draws = progress.draws
                batch.channels_last = self.channels_last
            yield batch
            if progress.drawn == last:
                return

    def _begun(self, progress: Progress) -> Iterator[Any]:
        """Begin the samplers as the epoch's were begun."""
        if progress.start is None:
            progress.start = self._capture()
            return iter(self.sampler)
        if self._ranked is not None:  # another epoch may have been set on it since
            progress.start = progress.start | {"samplers": self._capture()["samplers"]}
        elif not progress.is_begun and self._is_known:
            # torch's generator moves on as at the start of any epoch. A sampler that is not known
            # is not asked twice.
            next(iter(self.sampler), None)
        with torch.random.fork_rng(devices=[]):
            for generator, packed in zip(
                self._generators, progress.start["generators"], strict=True
            ):
                generator.set_state(_unpack(packed))
            for sampler, saved in zip(self._samplers, progress.start["samplers"], strict=True):
                if "state" in saved and sampler is not self._ranked:
                    sampler.load_state_dict(copy.deepcopy(saved["state"]))
                if "epoch" in saved and progress.is_begun:  # else it may have been set since
                    sampler.set_epoch(saved["epoch"])
            indices = iter(self.sampler)
            return itertools.chain(list(itertools.islice(indices, 1)), indices)

    # States

    def state(self, loader: State) -> State:
        """Where the latest epoch stands; ``loader``: what another one must have alike."""
        progress = self.progress
        if progress.pending is not None:
            return copy.deepcopy(progress.pending)
        handed, is_over = progress.seen or progress.mark()
        start = copy.deepcopy(progress.start) or self._capture()
        ranked = self._ranked
        size = self._batch_size
        if ranked is None or size is None:
            is_over = is_over or handed == length_of(self.sampler)
        else:
            # The sampler may have been told of another epoch since.
            begun = _rank_state(start)
            reached = ranked.state_dict(
                handed - progress.first, size, drop_last=self.sampler.drop_last, begun=begun
            )
            is_over = is_over or reached["epoch"] != begun["epoch"]
            begun |= reached
        if is_over:
            handed = 0
            progress, start = self._coming()
        return {
            "version": VERSION,
            "num_yielded": handed,
            "is_begun": not is_over,
            "epoch": progress.epoch,
            "base_seed": progress.base_seed,
            "start": start,
            "loader": self._identity(loader),
        }

    def _coming(self) -> tuple[Progress, State]:
        """How the next epoch would begin if it began now, and what its order is drawn from."""
        progress = self._following()
        generator = self._generator or torch.default_generator
        before = generator.get_state()
        if progress.base_seed is None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            progress.base_seed = int(drawn)
        start = self._capture()
        generator.set_state(before)
        if self._ranked is not None and self._ranked.has_begun:  # one that was set is over too
            _rank_state(start)["epoch"] = self._ranked.epoch + 1
        return progress, start

    def _following(self) -> Progress:
        """The epoch after the latest; draws of a new base seed count epochs from 0."""
        latest = self.progress
        return Progress(
            epoch=latest.epoch + 1 if self._is_counted else 0,
            base_seed=latest.base_seed if self._seeds_once else None,
        )

    def load(self, state: State, loader: State) -> None:
        """Let the next epoch be that of a state.

        Raises:
            ValueError: it is of another loader; says what differs.
        """
        if state:
            if state.get("version") != VERSION:
                raise ValueError(
                    f"this is no state of a fastdata DataLoader of version {VERSION}: it has "
                    f"version {state.get('version')!r} and the keys {sorted(state)}"
                )
            # How samples are shared out may differ.
            shares = ("batch_size", "world_size", "sampler_length")
            free = {} if self._batch_size is None else dict.fromkeys(shares)
            differing = name_differences(state["loader"] | free, self._identity(loader) | free)
            if differing:
                raise ValueError(
                    f"the state is of another loader: {differing}. Make the loader as it was when "
                    "the state was saved, or begin a new epoch without the state."
                )
        self.progress = Progress(
            epoch=self.progress.epoch,
            base_seed=self.progress.base_seed,
            state=copy.deepcopy(state),
            is_finished=not state,
        )
        ranked = self._ranked
        if ranked is not None:
            ranked.is_set = False  # an epoch that is set from now on counts
            if not (state or ranked.has_begun):  # the iterator of a loaded state was not asked
                ranked.position = 0

    def _identity(self, loader: State) -> State:
        """What a state and the loader that takes it must have alike."""
        identity = loader | {
            "generators": len(self._generators),
            "sampler": " > ".join(type(sampler).__name__ for sampler in self._samplers),
        }
        if self._ranked is not None:
            identity |= {"world_size": self._ranked.num_replicas, "order": self._ranked.identity}
        return identity

    def _capture(self) -> State:
        """What the order is drawn from."""
        return {
            "generators": [_pack(generator) for generator in self._generators],
            "samplers": [_capture(sampler) for sampler in self._samplers],
        }

    @property
    def _generators(self) -> list[torch.Generator]:
        """Those that an order is drawn from."""
        of_samplers = [getattr(each, "generator", False) for each in self._samplers]
        found = [self._generator, *of_samplers]
        if None in of_samplers or not self._is_known:
            found.append(torch.default_generator)
        return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))

    @property
    def _batch_size(self) -> int | None:
        """Samples in each batch of a rank where a RankSampler is shared out; else None."""
        ranked = self._ranked
        if ranked is None:
            return None
        if not ranked.has_begun:
            ranked.find_ranks()
        outer = self.sampler
        if outer is ranked:
            return 1
        is_batched = type(outer) is BatchSampler and outer.sampler is ranked
        return outer.batch_size if is_batched else None

    @property
    def _is_counted(self) -> bool:
        return self._seeds_once or self.served.seed is not None


def _nested(sampler: Any) -> list[Any]:
    """A sampler and those in it, as far as their states are not part of its own."""
    inner = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
    return [sampler] if inner is None or _keeps_state(sampler) else [sampler, *_nested(inner)]


def _as_list(indices: Any) -> Any:
    """Return the indices of a batch as a list if they can be read only once, else as they are.

    A batch is read by another thread or process, and once more where an epoch is resumed.
    """
    return list(indices) if isinstance(indices, Iterator) else indices


def _gives_each_once(sampler: Any) -> bool:
    """Whether no index comes twice in an epoch, as far as that is known."""
    inner = sampler.sampler if type(sampler) is BatchSampler else None
    if type(inner) is RandomSampler:
        return not inner.replacement and inner.num_samples == len(inner.data_source)
    return type(inner) is SequentialSampler


def _index_batches(
    served: LoaderView, sampler: Any, epoch: int, seed: int, rank: int, ranks: int
) -> Callable[[Any], Any]:
    """What makes of each batch's indices those of samples, with what their draws are made from.

    A sample that comes again in the epoch is told apart: by a RankSampler's marks, else by how
    often its index came before; and where a ``Subset`` has several indices of it, by which it is.
    """
    subset = served.subset
    count = served.index_count
    length = count if subset is None else len(subset)
    earlier: Any = None  # of each index, how many smaller ones are of its sample
    copies = 1
    if subset is not None and count:
        earlier = count_earlier(np.zeros(count, np.uint32), subset % count)
        copies += int(earlier.max(initial=0))
    seen = None
    if copies > 1 or not _gives_each_once(sampler):
        seen = np.zeros(length, np.uint32)

    def draw(indices: Any) -> Any:
        if not isinstance(indices, Iterable):
            return indices  # the dataset raises torch's error
        batch = IndexBatch(indices)  # read once: a second pass may give other indices, or none
        try:
            index_B = np.asarray(array("q", batch))
            if (index_B.view(np.uint64) >= length).any():
                index_B = positions(index_B, length)
        except (IndexError, OverflowError, TypeError, ValueError):
            return indices  # the dataset's own __getitem__ takes them, or it raises
        visit_B = np.full(len(index_B), epoch, np.int64)
        if seen is not None:
            before_B = count_earlier(seen, index_B)
            for row, occurrence in occurrences(batch):
                before_B[row] = occurrence
            if copies > 1:
                before_B = before_B * copies + earlier[index_B]
            visit_B += before_B * ranks + rank << REPEAT_SHIFT
        if subset is not None:
            index_B = subset[index_B]
            batch = IndexBatch(index_B.tolist())
            index_B = positions(index_B, count)
        batch.positions = index_B
        batch.visits = visit_B
        batch.seed = seed
        return batch

    return draw


def _pack(generator: torch.Generator) -> str:
    """Some 4,000 characters for a Mersenne twister of 20,000 bits."""
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes(), 1)).decode()


def _unpack(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.uint8)


def _rank_state(start: State) -> State:
    """That of the RankSampler in what an order is drawn from."""
    state: State = start["samplers"][-1]["state"]
    return state


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
