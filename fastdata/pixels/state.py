"""The state of a sample between two transforms, from which their readers learn what they may do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdata.pixels.arrays import Float64s
from fastdata.pixels.samples import Form
from fastdata.pixels.steps import Fill, Step, Steps, child, sequence

Reader = Callable[[Any, "State"], "Step | State"]
"""Reads one of the user's objects as a step, or as the state of samples after it."""


_OF_FLOATS = ("erase", "noise", "coarse_dropout", "grid_dropout")
"""Steps that are made on floats, where they come after the conversion."""


class UnknownStepError(Exception):
    """A transform must run as the user wrote it; the message gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A sample before a transform, and the steps that it went through so far.

    Attributes:
        at: the number of the next transform's draws.
        steps: those on uint8.
        floats: the conversion to floats, normalised or not, and erasing and noise behind it.
        is_beside: True for the mask next to an image, which v2 puts through the same transforms.
    """

    kind: Form
    channels: int | None = None
    at: int = 0
    steps: Steps = ()
    floats: Steps = ()
    is_beside: bool = False

    @property
    def all_steps(self) -> Steps:
        return (*self.steps, *self.floats)

    @property
    def dtype(self) -> str:
        return str(self.floats[0].fields["dtype"]).lower() if self.floats else "uint8"

    @property
    def is_normalized(self) -> bool:
        fields = self.floats[0].fields if self.floats else {}
        return bool(fields.get("means") or fields.get("statistic"))

    def add(self, step: Step) -> State:
        is_of_floats = self.floats and step.name in _OF_FLOATS
        if step.name == "cast" or is_of_floats:
            return replace(self, floats=(*self.floats, step))
        # All others move or change uint8. Behind a conversion only those are read that move pixels
        # (`need_movable`), and it is the same to move them before it.
        return replace(self, steps=(*self.steps, step))

    def step(
        self,
        name: str,
        *,
        fill: Fill = (0,),
        children: Iterable[Step] = (),
        levels: Callable[[int, int], Float64s] | None = None,
        **fields: Any,
    ) -> Step:
        """Return a step whose draws have this state's number."""
        return Step(name, fields, self.at, fill, tuple(children), levels)

    def inner(self, number: int = 0) -> State:
        """Return this state for a step within a step, whose draws have a number of their own."""
        return replace(self, at=child(self.at, number))

    def maybe(self, steps: Iterable[Step], p: float) -> Step:
        """Return steps that a sample goes through with a probability."""
        return self.step("choice", children=[sequence(steps, float(p))])

    def choice(
        self, sequences: Sequence[Iterable[Step]], weights: Any = None, name: str = "choice"
    ) -> Step:
        """Return a step that is one of several sequences."""
        ends = np.cumsum(np.ones(len(sequences)) if weights is None else weights, dtype=np.float64)
        shares = (ends / ends[-1]).tolist()
        return self.step(name, children=map(sequence, sequences, shares))

    def in_order(self, sequences: Iterable[Iterable[Step]]) -> Step:
        """Return several sequences in random order."""
        return self.step("order", children=map(sequence, sequences))


def need_tensor(state: State) -> None:
    if state.kind == "pil":
        raise UnknownStepError("does not accept PIL images")


def need_uint8(state: State) -> None:
    if state.floats:
        raise UnknownStepError("comes after the conversion to floats")


def need_colours(state: State) -> None:
    if state.channels not in (None, 1, 3):
        raise UnknownStepError("gets images of other than 1 or 3 channels")
    need_uint8(state)


def need_movable(state: State) -> None:
    """Refuse geometry behind erasing or noise on floats, which would have to move along."""
    if state.floats[1:]:
        raise UnknownStepError("comes after erasing or noise among floats")
