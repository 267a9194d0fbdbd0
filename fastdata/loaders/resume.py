"""The order of a loader's epochs, and states from which an epoch is resumed.

torch's iterators get a ``Resume`` as their sampler. Its iterators update a ``Progress``, from which
a state is made. Batches are read ahead of the user, and so are indices. A state therefore holds the
generators that the epoch's order was drawn from, and how many batches were handed over. Resuming
draws the same order again and skips indices, without reading their samples. A RankSampler can begin
anywhere: its state is the position in the order of all ranks, so that another number of ranks or
another batch size can go on from there.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from fastdata.datasets.draws import DrawKey
from fastdata.datasets.visits import EpochVisits, IndexBatch
from fastdata.loaders.parts import Parts
from fastdata.loaders.progress import Progress
from fastdata.loaders.sampler_chain import SamplerChain, rank_state
from fastdata.loaders.samplers import StateDict, name_differences
from fastdata.machine.ranks import Rank
from fastdata.report import warn_user

_END = object()  # a sampler may give None

VERSION = 1
"""The version of states."""

_NO_SIZE = (
    "the batch size was changed within this epoch, and a state counts batches only: an epoch "
    "that is "
    "resumed from it may repeat some samples and leave out others. Change the batch size between "
    "epochs, or save a state at the end of the epoch."
)


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
        """Return a copy, whose epochs that go on from here on their own."""
        other = copy.copy(self)
        other.progress = copy.copy(self.progress)
        return other

    def set_epoch(self, epoch: int, chain: SamplerChain) -> None:
        """Choose the epoch that draws and a RankSampler's order follow from now on."""
        self._set = operator.index(epoch)
        if chain.ranked is not None:
            chain.ranked.set_epoch(epoch)

    # An epoch

    def begin(self, chain: SamplerChain) -> Progress:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        # A state stays pending until a batch is handed over, so that it may begin several times:
        # Lightning drops a first iterator without asking it for a batch.
        state = self.progress.pending
        if state is not None and chain.ranked is not None:
            is_taken = chain.ranked.resume(rank_state(state["start"]))
            if state["is_begun"] and not is_taken:
                state = None  # another epoch was set on the sampler
        progress = self._following()
        if state is not None:
            progress = Progress.resumed(state)
        chosen = self.parts.epoch if self._set is None else self._set
        if chosen is not None and not progress.is_begun:
            progress.epoch = chosen
        progress.waits_for_next = chain.has_set_epoch
        self.progress = progress
        self._chain = chain
        return progress

    def _batches(self, progress: Progress, chain: SamplerChain) -> Iterator[Any]:
        """Yield the indices of an epoch's coming batches, and set the keys of their draws.

        Samplers are begun, and draw, when the first batch is asked for. The epoch ends with the
        sampler, whatever its length was before.
        """
        seed = self.parts.seed
        if seed is None:
            seed = progress.base_seed or 0
        progress.epoch = epoch = self._epoch_of_draws(progress, chain)
        visits = self._visits(epoch, seed, chain)
        rank, ranks = chain.rank
        counts_samples = type(chain.outer) is BatchSampler
        awaits_last_draw = chain.ends_with_a_draw
        # A RankSampler begins at its position, so that nothing is skipped.
        to_skip = progress.first if chain.batch_size is None else 0
        indices = self._begun(progress, chain)
        while True:
            batch: Any = next(indices, _END)
            if batch is _END:
                return
            if self._is_batched and hasattr(batch, "__next__"):
                batch = list(batch)  # read here, and by other threads and processes
            progress.counted += len(batch) if counts_samples else 1
            if awaits_last_draw and chain.is_spent(progress.counted):
                # Let the sampler draw its last numbers now: a state that is taken with the last
                # batch must have the generator of the next epoch's beginning.
                indices = _drawn_ahead(indices)
                awaits_last_draw = False
            if visits is not None:
                batch = visits.index_batch(batch)
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

    def _epoch_of_draws(self, progress: Progress, chain: SamplerChain) -> int:
        """Return the RankSampler's epoch, so that draws follow the same one, or the loader's."""
        # The loader's if each epoch draws a seed, whose draws count from 0, or if the user set the
        # epoch of draws alone.
        is_counted = self._is_counted and self.parts.epoch is None
        if chain.ranked is None or not self.parts.datasets:
            return progress.epoch
        if chain.ranked.is_set or is_counted:
            epoch: int = chain.ranked.coming()["epoch"]
            return epoch
        return progress.epoch

    def _visits(self, epoch: int, seed: int, chain: SamplerChain) -> EpochVisits | None:
        parts = self.parts
        if not parts.datasets:
            return None
        return EpochVisits(
            parts.index_count,
            parts.subset,
            may_repeat=not chain.gives_each_once,
            rank=chain.rank if chain.ranks_may_overlap else Rank(0, 1),
            epoch=epoch,
            seed=seed,
        )

    def _begun(self, progress: Progress, chain: SamplerChain) -> Iterator[Any]:
        """Return the sampler's iterator for an epoch, begun as in the epoch of a loaded state."""
        sampler = chain.outer
        if progress.start is None:
            progress.start = chain.capture()
            return iter(sampler)
        if chain.ranked is not None:  # another epoch may have been set on it since
            progress.start = progress.start | {"samplers": chain.capture()["samplers"]}
        elif not progress.is_begun and torch.default_generator in chain.generators:
            # The saved order is drawn below from a generator's copy. torch's global generator moves
            # on as in a run without interruption: a script that restores it finds the same later
            # epochs.
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
        # Draw the base seed as the next iterator will, capture what follows it, and undo the draw.
        generator = chain.generator or torch.default_generator
        before = generator.get_state()
        if progress.base_seed is None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            progress.base_seed = int(drawn)
        start = chain.capture()
        generator.set_state(before)
        if chain.ranked is not None and chain.ranked.has_begun:  # an epoch that was set is over too
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
            if not (state or ranked.has_begun):
                # Forget the position of a loaded state whose iterator was not asked for a batch.
                ranked.position = 0

    @property
    def _is_counted(self) -> bool:
        """True if epochs get other draws by their number; else each draws a base seed."""
        return self._seeds_once or self.parts.seed is not None


def _drawn_ahead(indices: Iterator[Any]) -> Iterator[Any]:
    """Draw the next indices now."""
    return itertools.chain(list(itertools.islice(indices, 1)), indices)
