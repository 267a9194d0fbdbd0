"""The order of an epoch: the indices of its batches, and what their random draws are made from.

torch's iterators get an ``Resume`` as their sampler. Its iterators update a ``Progress``, and a
state is made of that, to resume inside an epoch.

Batches are read ahead of the user, and so are indices. A state therefore holds the generators that
the epoch's order was drawn from, and how many batches were handed over. Resuming draws the same
order again and skips indices, without reading their samples. A RankSampler can begin anywhere: its
state is the position in the order of all ranks, so that another number of ranks or another batch
size can go on from there.

A state has the generators of torch's own samplers, also torch's global one if they draw from it. Of
any other sampler it has what that keeps itself: ``state_dict()``, or the epoch that was set.
"""

from __future__ import annotations

import base64
import copy
import itertools
import operator
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data import dataloader as torch_loader

from fastdata.datasets.draws import DrawKey
from fastdata.datasets.visits import REPEAT_SHIFT, IndexBatch, count_earlier, occurrences, positions
from fastdata.loaders.epochs import Parts, Progress
from fastdata.loaders.samplers import RankSampler, StateDict, name_differences
from fastdata.machine.ranks import Rank
from fastdata.report import warn_user

_END = object()
VERSION = 1
"""The version of states."""
_NO_SIZE = (
    "the batch size was changed within this epoch, and a state counts batches only: an epoch that is "
    "resumed from it may repeat some samples and leave out others. Change the batch size between "
    "epochs, or save a state at the end of the epoch."
)


@dataclass(frozen=True, slots=True)
class SamplerChain:
    """A loader's sampler, the samplers inside it, and the generators that they draw from.

    Attributes:
        outer: gives the indices of each batch, or single ones.
        generator: the loader's.
        each: ``outer`` first, then the sampler that it reads, and so on, up to one that holds the
            states of those inside it.
        ranked: the innermost one if it is a ``RankSampler``.
    """

    outer: Any
    generator: torch.Generator | None
    each: list[Any]
    ranked: RankSampler | None

    @classmethod
    def of(cls, loader: torch_loader.DataLoader[Any]) -> SamplerChain:
        """Return the samplers and generators of an epoch of a loader that begins now."""
        outer = loader._index_sampler
        each = _nested(outer)
        ranked = each[-1] if isinstance(each[-1], RankSampler) else None
        if ranked is not None and not ranked.has_begun:
            ranked.find_ranks()
        return cls(outer, loader.generator, each, ranked)

    @property
    def batch_size(self) -> int | None:
        """Samples in each batch of a rank, where they tell a RankSampler's position; else None."""
        if self.ranked is None:
            return None
        if self.outer is self.ranked:
            return 1
        is_batched = type(self.outer) is BatchSampler and self.outer.sampler is self.ranked
        return self.outer.batch_size if is_batched else None

    @property
    def sharing(self) -> Any:
        """The sampler that divides the samples among ranks; None if none does."""
        # Some have None as their number of ranks, if there is one.
        return next((each for each in self.each if getattr(each, "num_replicas", None)), None)

    @property
    def rank(self) -> Rank:
        sharing = self.sharing
        return Rank(0, 1) if sharing is None else Rank(sharing.rank, sharing.num_replicas)

    @property
    def ranks_may_overlap(self) -> bool:
        """True if several ranks may read the same samples, and no mark tells them apart."""
        sharing = self.sharing
        if sharing is None or sharing is self.ranked:
            return False
        return type(sharing) is not DistributedSampler

    def is_spent(self, counted: int) -> bool:
        """Return True if no batch can follow, as far as lengths tell.

        The batches of a BatchSampler may change in size within an epoch, so that their samples are
        counted; of other samplers, what they give.
        """
        outer = self.outer
        if type(outer) is not BatchSampler:
            return counted == length_of(outer)
        length = length_of(outer.sampler)
        if length is None:
            return False
        least = outer.batch_size if outer.drop_last else 1
        return length - counted < least

    def has_changed_size(self, progress: Progress) -> bool:
        """Return True if torch's BatchSampler got another ``batch_size`` within the epoch."""
        outer = self.outer
        if type(outer) is not BatchSampler or self.batch_size is not None:
            return False
        whole = progress.drawn * outer.batch_size
        return progress.counted not in (whole, length_of(outer.sampler))

    @property
    def ends_with_a_draw(self) -> bool:
        """True if the sampler draws once more after its last index, and others can see that.

        RandomSampler does. Without a ``generator`` it draws from one of its own.
        """
        last = self.each[-1]
        return type(last) is RandomSampler and last.generator is not None

    @property
    def generators(self) -> list[torch.Generator]:
        """Generators that the order is drawn from, each once."""
        found = [getattr(sampler, "generator", False) for sampler in self.each]
        if None in found:
            found.append(torch.default_generator)
        found.insert(0, self.generator)
        return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))

    def capture(self) -> StateDict:
        """Return the states of generators and samplers, from which the order can be drawn again."""
        return {
            "generators": [_pack(generator) for generator in self.generators],
            "samplers": [_capture(sampler) for sampler in self.each],
        }

    def restore(self, start: StateDict, *, is_begun: bool) -> None:
        """Put generators and samplers back to what was captured, but for a RankSampler."""
        for generator, packed in zip(self.generators, start["generators"], strict=True):
            generator.set_state(_unpack(packed))
        for sampler, saved in zip(self.each, start["samplers"], strict=True):
            if sampler is self.ranked:
                continue
            if "state" in saved:
                sampler.load_state_dict(copy.deepcopy(saved["state"]))
            if "epoch" in saved and is_begun:  # else the user may have set the coming epoch
                sampler.set_epoch(saved["epoch"])

    def identity(self) -> StateDict:
        """Return the values in which a state and the loader that takes it must agree."""
        identity: StateDict = {
            "generators": len(self.generators),
            "sampler": " > ".join(type(sampler).__name__ for sampler in self.each),
        }
        if self.ranked is not None:
            identity |= {"world_size": self.ranked.num_replicas, "order": self.ranked.identity}
        return identity


class Resume:
    """The epochs of a loader: the position in the latest, the number of the next, and their states.

    Iterating yields the indices of the batches of the epoch that was begun last. There is no
    reference to the loader, which may hold an iterator of torch's that holds this. Samplers are an
    argument of each call, because the attributes of a loader may be replaced.

    Args:
        parts: the fastdata datasets behind the loader.
        seeds_once: only the first epoch draws a base seed, as in torch if workers persist.
        is_batched: samplers give the indices of a batch, not single ones.

    Attributes:
        channels_last: memory format that the batches of indices ask for; see ``IndexBatch``.
    """

    def __init__(self, parts: Parts, *, seeds_once: bool, is_batched: bool) -> None:
        self.progress = Progress(is_finished=True)
        self.parts = parts
        self.channels_last = False
        self._seeds_once = seeds_once
        self._is_batched = is_batched
        self._set: int | None = None  # number of the coming epochs, by the user
        self._chain = SamplerChain((), None, [()], None)  # of the latest epoch

    def __len__(self) -> int:
        return len(self._chain.outer)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.progress, self._chain)

    def copied(self) -> Resume:
        """Return epochs that go on from here on their own."""
        other = copy.copy(self)
        other.progress = copy.copy(self.progress)
        return other

    def set_epoch(self, epoch: int, chain: SamplerChain) -> None:
        self._set = operator.index(epoch)
        if chain.ranked is not None:
            chain.ranked.set_epoch(epoch)

    # An epoch

    def begin(self, chain: SamplerChain) -> Progress:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        state = self.progress.pending
        if state is not None and chain.ranked is not None:
            is_taken = chain.ranked.resume(rank_state(state["start"]))
            if state["is_begun"] and not is_taken:
                state = None  # the sampler was told to begin another epoch
        progress = self._following()
        if state is not None:
            progress = Progress.resumed(state)
        chosen = self.parts.epoch if self._set is None else self._set
        if chosen is not None and not progress.is_begun:
            progress.epoch = chosen
        self.progress = progress
        self._chain = chain
        return progress

    def _batches(self, progress: Progress, chain: SamplerChain) -> Iterator[Any]:
        """Yield the indices of an epoch's coming batches, and set the keys of their draws.

        Samplers are begun, and draw, when the first batch is asked for. The epoch ends with the
        sampler, whatever its length was before.
        """
        parts = self.parts
        ranked = chain.ranked
        seed = parts.seed
        if seed is None:
            seed = progress.base_seed or 0
        # The sampler's epoch is that of draws too, unless each epoch draws a seed, whose draws count
        # from 0, or the epoch of draws was set alone.
        is_counted = self._is_counted and parts.epoch is None
        if ranked is not None and parts.datasets and (ranked.is_set or is_counted):
            progress.epoch = ranked.coming()["epoch"]
        epoch = progress.epoch
        rank, ranks = chain.rank
        draw: Callable[[Any], Any] | None = None
        if parts.datasets:
            others = chain.rank if chain.ranks_may_overlap else Rank(0, 1)
            draw = index_batches(parts, chain.outer, epoch, seed, others)
        is_cut = type(chain.outer) is BatchSampler
        is_seen = chain.ends_with_a_draw
        # A RankSampler begins at its position, so that nothing is skipped.
        to_skip = progress.first if chain.batch_size is None else 0
        indices = self._begun(progress, chain)
        while True:
            batch: Any = next(indices, _END)
            if batch is _END:
                return
            if self._is_batched and hasattr(batch, "__next__"):
                batch = list(batch)  # read by ``draw``, and by other threads and processes
            progress.counted += len(batch) if is_cut else 1
            if is_seen and chain.is_spent(progress.counted):
                # Let the sampler draw its last numbers now, so that a state that is taken with the
                # last batch has the generator as it is when the next epoch begins.
                indices = _drawn_ahead(indices)
                is_seen = False
            if draw is not None:
                batch = draw(batch)
            if to_skip:
                to_skip -= 1
                continue
            progress.drawn += 1
            # Numbered among the batches of all ranks, so that no two have the same draws.
            progress.draws = DrawKey(seed, epoch, (progress.drawn - 1) * ranks + rank)
            if isinstance(batch, IndexBatch):
                batch.draws = progress.draws
                batch.channels_last = self.channels_last
            yield batch

    def _begun(self, progress: Progress, chain: SamplerChain) -> Iterator[Any]:
        """Return the sampler's iterator for an epoch, begun as in the epoch of a loaded state."""
        sampler = chain.outer
        if progress.start is None:
            progress.start = chain.capture()
            return iter(sampler)
        if chain.ranked is not None:  # another epoch may have been set on it since
            progress.start = progress.start | {"samplers": chain.capture()["samplers"]}
        elif not progress.is_begun and torch.default_generator in chain.generators:
            # torch's generator moves on as at the start of any epoch.
            next(iter(sampler), None)
        with torch.random.fork_rng(devices=[]):
            chain.restore(progress.start, is_begun=progress.is_begun)
            return _drawn_ahead(iter(sampler))

    # States

    def state(self, loader: StateDict, chain: SamplerChain) -> StateDict:
        """Return the position in the latest epoch.

        Args:
            loader: values in which another loader must agree.
            chain: samplers of an epoch that would begin now.
        """
        progress = self.progress
        if progress.pending is not None:
            return copy.deepcopy(progress.pending)
        latest = chain if progress.start is None else self._chain
        handed, is_over = progress.seen or progress.mark()
        start = copy.deepcopy(progress.start) or latest.capture()
        size = latest.batch_size
        if latest.ranked is None or size is None:
            is_spent = handed == progress.drawn and latest.is_spent(progress.counted)
            is_over = is_over or is_spent
        else:
            # Another epoch may have been set on the sampler since.
            begun = rank_state(start)
            reached = latest.ranked.state_dict(
                handed - progress.first, size, drop_last=latest.outer.drop_last, begun=begun
            )
            is_over = is_over or reached["epoch"] != begun["epoch"]
            begun |= reached
        if is_over:
            handed = 0
            latest = chain
            progress, start = self._coming(chain)
        elif latest.has_changed_size(progress):
            warn_user(_NO_SIZE)
        return {
            "version": VERSION,
            "num_yielded": handed,
            "is_begun": not is_over,
            "epoch": progress.epoch,
            "base_seed": progress.base_seed,
            "start": start,
            "loader": loader | latest.identity(),
        }

    def _coming(self, chain: SamplerChain) -> tuple[Progress, StateDict]:
        """Return the next epoch as it would begin now, and the states that its order follows."""
        progress = self._following()
        generator = chain.generator or torch.default_generator
        before = generator.get_state()
        if progress.base_seed is None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            progress.base_seed = int(drawn)
        start = chain.capture()
        generator.set_state(before)
        if chain.ranked is not None and chain.ranked.has_begun:  # one that was set is over too
            rank_state(start)["epoch"] = chain.ranked.epoch + 1
        return progress, start

    def _following(self) -> Progress:
        """Return the epoch after the latest; draws of a new base seed count epochs from 0."""
        latest = self.progress
        return Progress(
            epoch=latest.epoch + 1 if self._is_counted else 0,
            base_seed=latest.base_seed if self._seeds_once else None,
        )

    def load(self, state: StateDict, loader: StateDict, chain: SamplerChain) -> None:
        """Let the next epoch be that of a state.

        Raises:
            ValueError: the state is of another loader; the message names the differences.
        """
        if state:
            if state.get("version") != VERSION:
                raise ValueError(
                    f"this is not a state of a fastdata DataLoader of version {VERSION}: it has "
                    f"version {state.get('version')!r} and the keys {sorted(state)}"
                )
            # A RankSampler's position can be resumed with other ranks and batches.
            shares = ("batch_size", "world_size", "sampler_length")
            free = {} if chain.batch_size is None else dict.fromkeys(shares)
            own = loader | chain.identity()
            differing = name_differences(state["loader"] | free, own | free)
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
        ranked = chain.ranked
        if ranked is not None:
            ranked.is_set = False  # an epoch that is set from now on counts
            if not (state or ranked.has_begun):  # the iterator of a loaded state was not asked
                ranked.position = 0

    @property
    def _is_counted(self) -> bool:
        return self._seeds_once or self.parts.seed is not None


def _drawn_ahead(indices: Iterator[Any]) -> Iterator[Any]:
    """Draw the next indices now."""
    return itertools.chain(list(itertools.islice(indices, 1)), indices)


def _nested(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers inside it whose states it does not hold."""
    inner = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
    return [sampler] if inner is None or _keeps_state(sampler) else [sampler, *_nested(inner)]


def _gives_each_once(sampler: Any) -> bool:
    """True if it is certain that no index comes twice in an epoch."""
    inner = sampler.sampler if type(sampler) is BatchSampler else None
    if type(inner) is RandomSampler:
        return not inner.replacement and inner.num_samples == len(inner.data_source)
    return type(inner) is SequentialSampler


def index_batches(
    parts: Parts, sampler: Any, epoch: int, seed: int, rank: Rank
) -> Callable[[Any], Any]:
    """Return a function that makes an ``IndexBatch`` of the indices that a sampler gave.

    A sample that comes several times in an epoch gets another visit each time. These are numbered
    by the marks of a RankSampler, or by how often the index came before; and by the place in a
    ``Subset`` that has the sample several times.

    Args:
        parts: the datasets.
        sampler: the sampler that gives the batches.
        epoch: the epoch that draws follow.
        seed: the seed that draws follow.
        rank: distinguishes ranks that may read the same samples.
    """
    subset = parts.subset
    count = parts.index_count
    length = count if subset is None else len(subset)
    earlier: Any = None  # for each index, the number of smaller ones of the same sample
    copies = 1
    if subset is not None and count:
        earlier = count_earlier(np.zeros(count, np.uint32), subset % count)
        copies += int(earlier.max(initial=0))
    seen = None
    if copies > 1 or not _gives_each_once(sampler):
        seen = np.zeros(length, np.uint32)

    def draw(indices: Any) -> Any:
        if not hasattr(indices, "__iter__"):
            return indices  # the dataset raises torch's error
        # Read once: a second pass may give other indices, or none. A plain list, because array()
        # takes twice as long for a subclass.
        listed = indices if type(indices) is list else list(indices)
        try:
            index_B = np.asarray(array("q", listed))
            if (index_B.view(np.uint64) >= length).any():
                index_B = positions(index_B, length)
        except (IndexError, OverflowError, TypeError, ValueError):
            return indices  # the dataset's own __getitem__ takes them, or it raises
        visit_B = np.zeros(len(index_B), np.int64)  # np.full takes two calls more
        visit_B += epoch
        if seen is not None:
            before_B = count_earlier(seen, index_B)
            for row, occurrence in occurrences(listed):
                before_B[row] = occurrence
            if copies > 1:
                before_B = before_B * copies + earlier[index_B]
            # Ranks that overlap count separately: rank r of W has the repeats r, r + W, ...
            visit_B += before_B * rank.world_size + rank.rank << REPEAT_SHIFT
        if subset is not None:
            index_B = subset[index_B]
            listed = index_B.tolist()
            index_B = positions(index_B, count)
        return IndexBatch.of(listed, index_B, visit_B, seed)

    return draw


def _pack(generator: torch.Generator) -> str:
    """Return the state of a generator as text: about 4,000 characters."""
    return base64.b64encode(zlib.compress(generator.get_state().numpy().tobytes(), 1)).decode()


def _unpack(packed: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.uint8)


def rank_state(start: StateDict) -> StateDict:
    """Return the RankSampler's state in what ``SamplerChain.capture`` returned."""
    state: StateDict = start["samplers"][-1]["state"]
    return state


def _keeps_state(sampler: Any) -> bool:
    return hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")


def _capture(sampler: Any) -> StateDict:
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
