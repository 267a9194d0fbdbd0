"""The order of a loader's epochs, and states from which an epoch is resumed.

torch's iterators get a ``Resume`` as their sampler. Iterating over it updates a ``Progress``, from
which a state is made. Batches are read ahead of the training loop, so the generators have already
drawn more than the loop has seen. A state therefore holds the generators as they were when the
epoch's order was drawn, and the number of batches that the loop got. Resuming draws the same order
again and skips that many batches of indices, without reading their samples.

A ``RankSampler`` can begin anywhere: its state is the position in the order of all ranks, from
which another number of ranks or another batch size can continue.
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

_END = object()  # not None, which a sampler may yield

VERSION = 1
"""Version of the format of states."""

_NO_SIZE = (
    "the batch size was changed within this epoch, but a state only counts batches: an epoch that "
    "is resumed from it may repeat some samples and leave out others. Change the batch size "
    "between epochs, or save a state at the end of the epoch."
)


class Resume:
    """The epochs of a loader: the position in the latest, the number of the next, and their states.

    Iterating yields, for the epoch that was begun last, the indices of each batch. It holds no
    reference to the loader: the loader may hold an iterator of torch, which holds this object, and
    a cycle would keep them alive. Samplers are an argument of each call, because the user may
    replace the loader's attributes.

    Args:
        parts: the fastdata datasets that the loader reads.
        seeds_once: True if only the first epoch draws a base seed, as in torch if workers persist.
        is_batched: True if samplers yield the indices of a batch, False if single indices.

    Attributes:
        channels_last: True if batches must have this memory format; see ``IndexBatch``.
    """

    def __init__(self, parts: Parts, *, seeds_once: bool, is_batched: bool) -> None:
        self.progress = Progress(is_finished=True)
        self.parts = parts
        self.channels_last = False
        self._seeds_once = seeds_once
        self._is_batched = is_batched
        self._set_number: int | None = None  # epoch number that the user set
        self._chain = SamplerChain((), None, [()], None)  # of the latest epoch

    def __len__(self) -> int:
        return len(self._chain.outer)

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.progress, self._chain)

    def copied(self) -> Resume:
        """Return a copy whose epochs continue independently of this object's."""
        other = copy.copy(self)
        other.progress = copy.copy(self.progress)
        return other

    def set_epoch(self, epoch: int, chain: SamplerChain) -> None:
        """Set the epoch that draws and the order of a ``RankSampler`` depend on from now on."""
        self._set_number = operator.index(epoch)
        if chain.ranked is not None:
            chain.ranked.set_epoch(epoch)

    # An epoch

    def begin(self, chain: SamplerChain) -> Progress:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        # A state is kept until a batch is returned, so that several iterators may begin with it:
        # Lightning drops a first iterator without reading a batch.
        state = self.progress.pending
        if state is not None and chain.ranked is not None:
            is_taken = chain.ranked.resume(rank_state(state["start"]))
            if state["is_begun"] and not is_taken:
                state = None  # another epoch was set on the sampler
        progress = self._following() if state is None else Progress.resumed(state)
        chosen = self.parts.epoch if self._set_number is None else self._set_number
        if chosen is not None and not progress.is_begun:
            progress.epoch = chosen
        progress.waits_for_next = chain.has_set_epoch
        self.progress = progress
        self._chain = chain
        return progress

    def _batches(self, progress: Progress, chain: SamplerChain) -> Iterator[Any]:
        """Yield the indices of an epoch's coming batches, and set the keys of their draws.

        Samplers begin, and draw the order, at the first ``next``. The epoch ends when the sampler
        ends, whatever its length was before.
        """
        seed = self.parts.seed
        if seed is None:
            seed = progress.base_seed or 0
        progress.epoch = epoch = self._epoch_of_draws(progress, chain)
        visits = self._visits(epoch, seed, chain)
        rank, ranks = chain.rank
        counts_samples = type(chain.outer) is BatchSampler
        awaits_last_draw = chain.ends_with_a_draw
        # A RankSampler begins at its position, so there is nothing to skip.
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
                # torch's RandomSampler draws once more after its last index. Let it draw now: a
                # state taken after the last batch must hold the generator as the next epoch finds
                # it.
                indices = _drawn_ahead(indices)
                awaits_last_draw = False
            if visits is not None:
                batch = visits.index_batch(batch)
            if to_skip:
                to_skip -= 1
                continue
            progress.drawn += 1
            # The number counts the batches of all ranks, so that no two batches have equal draws.
            progress.draws = DrawKey(seed, epoch, (progress.drawn - 1) * ranks + rank)
            if isinstance(batch, IndexBatch):
                batch.draws = progress.draws
                batch.channels_last = self.channels_last
            yield batch

    def _epoch_of_draws(self, progress: Progress, chain: SamplerChain) -> int:
        """Return the epoch that random draws depend on: the RankSampler's, or the loader's."""
        if chain.ranked is None or not self.parts.datasets:
            return progress.epoch
        # If no epoch was set on the sampler, it is still the loader's epoch in two cases: each
        # epoch draws a base seed (then its number is 0), or the user set the epoch of a dataset.
        is_counted = self._is_counted and self.parts.epoch is None
        if not (chain.ranked.is_set or is_counted):
            return progress.epoch
        epoch: int = chain.ranked.coming()["epoch"]
        return epoch

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
        """Return the sampler's iterator for an epoch, with the order of a loaded state if any."""
        sampler = chain.outer
        if progress.start is None:
            progress.start = chain.capture()
            return iter(sampler)
        if chain.ranked is not None:  # another epoch may have been set on it since
            progress.start = progress.start | {"samplers": chain.capture()["samplers"]}
        elif not progress.is_begun and torch.default_generator in chain.generators:
            # The saved order is drawn below, while the global generator is put aside. Draw from it
            # here, so that it advances as in a run without interruption: a script that restores
            # torch's global generator gets the same later epochs.
            next(iter(sampler), None)
        with torch.random.fork_rng(devices=[]):
            chain.restore(progress.start, is_begun=progress.is_begun)
            return _drawn_ahead(iter(sampler))

    # States

    def state(self, loader: StateDict, chain: SamplerChain) -> StateDict:
        """Return the position in the latest epoch.

        Args:
            loader: values that a loader which loads the state must share.
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
            is_over |= handed == progress.drawn and latest.is_spent(progress.counted)
        else:
            # Another epoch may have been set on the sampler since.
            begun = rank_state(start)
            reached = latest.ranked.state_dict(
                handed - progress.first, size, drop_last=latest.outer.drop_last, begun=begun
            )
            is_over |= reached["epoch"] != begun["epoch"]
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
        """Return the next epoch as it would begin now, and the states that its order depends on."""
        progress = self._following()
        # Draw the base seed as the next iterator will, capture the states after it, and undo the
        # draw.
        generator = chain.generator or torch.default_generator
        before = generator.get_state()
        if progress.base_seed is None:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            progress.base_seed = int(drawn)
        start = chain.capture()
        generator.set_state(before)
        if chain.ranked is not None and chain.ranked.has_begun:  # also if set_epoch chose the epoch
            rank_state(start)["epoch"] = chain.ranked.epoch + 1
        return progress, start

    def _following(self) -> Progress:
        """Return the epoch after the latest one; it is number 0 if each epoch draws a base seed."""
        latest = self.progress
        return Progress(
            epoch=latest.epoch + 1 if self._is_counted else 0,
            base_seed=latest.base_seed if self._seeds_once else None,
        )

    def load(self, state: StateDict, loader: StateDict, chain: SamplerChain) -> None:
        """Continue the epoch of a state with the next iterator.

        Raises:
            ValueError: the state comes from another loader; the message names the differences.
        """
        if state:
            if state.get("version") != VERSION:
                raise ValueError(
                    f"this is not a state of fastdata's DataLoader in version {VERSION}: it has "
                    f"version {state.get('version')!r} and the keys {sorted(state)}. Load what "
                    "state_dict() of this loader returned, or begin a new epoch without a state."
                )
            # A RankSampler's position can be resumed with other ranks and batches.
            shares = ("batch_size", "world_size", "sampler_length")
            free = {} if chain.batch_size is None else dict.fromkeys(shares)
            own = loader | chain.identity()
            differing = name_differences(state["loader"] | free, own | free)
            if differing:
                raise ValueError(
                    f"the state comes from another loader: {differing}. Make the loader as it was "
                    "when the state was saved, or begin a new epoch without the state."
                )
        self.progress = Progress(
            epoch=self.progress.epoch,
            base_seed=self.progress.base_seed,
            state=copy.deepcopy(state),
            is_finished=not state,
        )
        ranked = chain.ranked
        if ranked is not None:
            ranked.is_set = False  # only a set_epoch after this call overrides the state's epoch
            if not (state or ranked.has_begun):
                # Forget the position of an earlier loaded state from which no batch was read.
                ranked.position = 0

    @property
    def _is_counted(self) -> bool:
        """True if draws depend on the epoch's number; False if each epoch draws a base seed."""
        return self._seeds_once or self.parts.seed is not None


def _drawn_ahead(indices: Iterator[Any]) -> Iterator[Any]:
    """Draw the next item of an iterator now, and return an equal iterator."""
    return itertools.chain(list(itertools.islice(indices, 1)), indices)
