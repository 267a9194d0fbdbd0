"""Resuming inside an epoch: what a state holds, and how the rest of the epoch is found again.

Batches are read ahead of the user, and so is the sampler: what it says of itself is not what the
user has seen. A state therefore holds what the epoch's order was drawn from, and how many batches
were handed over. Resuming draws the same order again and passes over indices, never over samples.
fastdata's own samplers begin anywhere: of them a state holds the place in the order of all ranks
that the batches handed over lead to, so that other ranks and batches can go on.

Only what an order can be drawn from is recorded: for an epoch in sequence nothing, for torch's own
samplers their generators, for one that nobody knows also torch's global one; Python's and NumPy's
never.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fastdata.loaders.order import Order, Progress, undisturbed
from fastdata.loaders.view import LoaderView

VERSION = 3


def draw_base_seed(generator: torch.Generator | None = None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


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

    ``sampler`` gives the indices of each batch, or single ones; ``served`` is None where they are
    no samples of a fastdata dataset. With ``seeds_once`` only the first epoch draws a base seed, as
    in torch where workers persist.
    """

    def __init__(
        self, sampler: Any, served: LoaderView | None, epochs: LoaderEpochs, *, seeds_once: bool
    ) -> None:
        self.progress = Progress(is_finished=True)
        self._sampler, self.served, self._epochs, self._seeds_once = (
            sampler,
            served,
            epochs,
            seeds_once,
        )
        self._loaded: dict[str, Any] | None = None
        self._before: dict[
            str, Any
        ] = {}  # where a sampler that counts its epochs stood before one was loaded

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
            self.progress = Progress(
                epoch=epochs.current, base_seed=kept, keeps_seed=kept is not None
            )
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
        is_over = progress.is_finished or (
            progress.first == order.batches(progress.start) and not progress.ahead
        )
        if is_over:  # how the next epoch would begin if it began now
            kept, epoch = self._kept_seed, self._coming_number(self.served) if self.served else None
            with undisturbed(*order.generators):
                seed = draw_base_seed(generator) if kept is None else kept
                progress = Progress(
                    epoch, order.capture(), base_seed=seed, keeps_seed=kept is not None
                )
            if (
                progress.start and order.counted and order.counted.has_begun
            ):  # one that was set is over too
                progress.start["samplers"][-1]["state"]["epoch"] = order.counted.epoch + 1
        start, first = copy.deepcopy(progress.start) or order.capture(), progress.first
        if order.counted and (sharing := order.sharing) and not progress.ahead:
            reached = start["samplers"][-1]["state"]
            reached["position"] = order.counted.advance(
                reached["position"], first, sharing["batch_size"]
            )
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
            order.counted.load_state_dict(
                state["start"]["samplers"][-1]["state"] if state else self._before
            )

    def _put_back(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Where a sampler that counts its epochs was asked in vain, let it go on with a state all the same.

        None where another epoch begins: it was told to, or has no batch left of the one that the
        state stands in.
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
        if (
            order.sharing
            and not state["ahead"]
            and not counted.is_set
            and order.batches(state["start"]) == 0
        ):
            counted.load_state_dict(
                counted.state_dict(1, order.sharing["batch_size"], drop_last=True)
            )
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


def check_state(
    state: dict[str, Any], loader: dict[str, Any], sharing: dict[str, Any] | None = None
) -> None:
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
    if (
        sharing
        and state["ahead"]
        and any(saved.get(name) != value for name, value in sharing.items())
    ):
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
