"""The state of a sample between two transforms, which decides what readers may accept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdata.pixels.arrays import Float64s
from fastdata.pixels.samples import Form
from fastdata.pixels.steps import Fields, Fill, Step, Steps, child, sequence

Reader = Callable[[Any, "State"], "Step | State"]
"""Function that reads one of the user's objects as a step, or as the state of samples after it."""


_OF_FLOATS = ("erase", "noise", "coarse_dropout", "grid_dropout")
"""Steps that run on floats if they come after the conversion to floats."""


class UnknownStepError(Exception):
    """A transform must run as the user wrote it; the message gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The kind of a sample before a transform, and the steps so far.

    Attributes:
        kind: form of the sample.
        channels: number of channels; None if it is not known.
        at: number of the next transform's draws.
        steps: the steps on uint8.
        floats: the conversion to floats, with or without Normalize, then erasing and noise.
        is_mask: True for the mask that belongs to an image and goes through its transforms.
    """

    kind: Form
    channels: int | None = None
    at: int = 0
    steps: Steps = ()
    floats: Steps = ()
    is_mask: bool = False

    @property
    def all_steps(self) -> Steps:
        return (*self.steps, *self.floats)

    @property
    def cast(self) -> Fields:
        """Fields of the conversion to floats; empty if there is none."""
        return self.floats[0].fields if self.floats else {}

    @property
    def dtype(self) -> str:
        return str(self.cast.get("dtype", "uint8")).lower()

    @property
    def is_normalized(self) -> bool:
        return bool(self.cast.get("means") or self.cast.get("statistic"))

    def add(self, step: Step) -> State:
        if step.name == "cast" or (self.floats and step.name in _OF_FLOATS):
            return replace(self, floats=(*self.floats, step))
        # All other steps move or change uint8. After the conversion to floats only steps that move
        # pixels are accepted (`need_movable`), and these give the same if they run before it.
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
        """Return a step whose draws have the number of this state."""
        return Step(name, fields, self.at, fill, tuple(children), levels)

    def inner(self, number: int = 0) -> State:
        """Return this state for a step inside a step, whose draws have another number."""
        return replace(self, at=child(self.at, number))

    def maybe(self, steps: Iterable[Step], p: float) -> Step:
        """Return a step that runs ``steps`` with probability ``p``, or nothing."""
        return self.step("choice", children=[sequence(steps, float(p))])

    def choice(
        self, sequences: Sequence[Iterable[Step]], weights: Any = None, name: str = "choice"
    ) -> Step:
        """Return a step that runs one of several sequences, chosen at random by weights."""
        ends = np.cumsum(np.ones(len(sequences)) if weights is None else weights, dtype=np.float64)
        shares = (ends / ends[-1]).tolist()
        return self.step(name, children=map(sequence, sequences, shares))

    def in_order(self, sequences: Iterable[Iterable[Step]]) -> Step:
        """Return a step that runs all sequences, in random order."""
        return self.step("order", children=map(sequence, sequences))


def need_tensor(state: State) -> None:
    if state.kind == "pil":
        raise UnknownStepError("does not accept PIL images")


def need_uint8(state: State) -> None:
    if state.floats:
        raise UnknownStepError("comes after the conversion to floats")


def need_colours(state: State) -> None:
    if state.channels not in (None, 1, 3):
        raise UnknownStepError("gets images with neither 1 nor 3 channels")
    need_uint8(state)


def need_movable(state: State) -> None:
    """Refuse steps that move pixels if they cannot run before the conversion to floats.

    Erasing and noise on floats would have to move, too. Other pixels would change the statistics
    that albumentations' Normalize takes from each image.
    """
    if state.floats[1:]:
        raise UnknownStepError("comes after erasing or noise on floats")
    if state.cast.get("statistic"):
        raise UnknownStepError("comes after a Normalize with statistics of each image")
