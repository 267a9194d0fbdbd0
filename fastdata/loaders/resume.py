"""Resuming inside an epoch: what a state holds, and how the rest of the epoch is found again.

Batches are read ahead of the user, and so is the sampler. A state therefore holds what the epoch's
order was drawn from, and how many batches were handed over. Resuming draws the same order again and
passes over indices, never over samples. Of a RankSampler, which begins anywhere, a state holds the
place in the order of all ranks, so that other ranks and batches can go on.

What an order can be drawn from is recorded: for torch's own samplers their generators, for one that
nobody knows also torch's global one; Python's and NumPy's never.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fastdata.loaders.order import EpochIndices, Progress, undisturbed
from fastdata.loaders.samplers import name_differences
from fastdata.loaders.view import LoaderView

VERSION = 4


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

    def indices(self, generator: torch.Generator | None) -> EpochIndices:
        return EpochIndices(self._sampler, self.served, generator, lambda: self.progress)

    def set_epoch(self, epoch: int) -> None:
        self._set = epoch
        ranked = self.indices(None).ranked
        if ranked is not None:
            ranked.set_epoch(epoch)

    def begin(self) -> Progress:
        """Begin the next epoch, or the rest of the one whose state was loaded."""
        state = self._loaded or self.progress.pending
        self._loaded = None
        kept = self._kept_seed
        if state is None or not self._goes_on(state):
            self._epoch = self._chosen(self._next_number)
            self.progress = Progress(epoch=self._epoch, base_seed=kept, keeps_seed=kept is not None)
            return self.progress
        if state["epoch"] is not None:
            is_begun = state["is_begun"]
            self._epoch = state["epoch"] if is_begun else self._chosen(state["epoch"])
        self.progress = Progress(
            epoch=self._epoch,
            start=state["start"],
            is_begun=state["is_begun"],
            base_seed=state["base_seed"],
            keeps_seed=kept is not None or state["keeps_seed"],
            offset=state["num_yielded"],
            skipped=0 if self.indices(None).sharing else state["num_yielded"],
            resumed_from=state,
        )
        return self.progress

    def _goes_on(self, state: dict[str, Any]) -> bool:
        """Put a RankSampler where the state stands; False if another epoch begins.

        It was told to, or there is no batch left of the one that the state stands in.
        """
        indices = self.indices(None)
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
        sharing = indices.sharing
        if indices.ranked is not None and sharing:
            reached = start["samplers"][-1]["state"]
            reached["position"] = indices.ranked.advance(
                reached["position"], handed, sharing["batch_size"]
            )
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
        kept = self._kept_seed
        with undisturbed(*indices.generators):
            seed = draw_base_seed(generator) if kept is None else kept
            start = indices.capture()
        if indices.ranked is not None and indices.ranked.has_begun:  # one that was set is over too
            start["samplers"][-1]["state"]["epoch"] = indices.ranked.epoch + 1
        return Progress(self._next_number, start, base_seed=seed, keeps_seed=kept is not None)

    def load(self, state: dict[str, Any], identity: dict[str, Any]) -> None:
        indices = self.indices(None)
        if state:
            check_state(state, identity, free=set(indices.sharing))
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
        is_new = self._epoch is None or (self.served.seed is None and self._kept_seed is None)
        return 0 if is_new or self._epoch is None else self._epoch + 1

    def _chosen(self, number: int | None) -> int | None:
        """The number of the epoch that the user has set, or ``number``."""
        if self.served is None:
            return None
        chosen = self.served.epoch if self._set is None else self._set
        return number if chosen is None else chosen


def draw_base_seed(generator: torch.Generator | None = None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def check_state(state: dict[str, Any], loader: dict[str, Any], free: set[str]) -> None:
    """Check that a state is of a loader like this, whose values its entry ``"loader"`` must equal.

    Args:
        state: what ``state_dict`` gave.
        loader: the values.
        free: those that are only how samples are shared out, if there are any.

    Raises:
        ValueError: it is not; says what differs.
    """
    if state.get("version") != VERSION:
        raise ValueError(
            f"this is no state of a fastdata DataLoader of version {VERSION}: it has version "
            f"{state.get('version')!r} and the keys {sorted(state)}"
        )
    if free:
        free = free | {"sampler_length"}
    saved, own = (
        {name: value for name, value in each.items() if name not in free}
        for each in (state["loader"], loader)
    )
    differing = name_differences(saved, own)
    if differing:
        raise ValueError(
            f"the state is of another loader: {differing}. Make the loader as it was when the "
            "state was saved, or begin a new epoch without the state."
        )
