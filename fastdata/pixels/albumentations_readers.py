"""Read albumentations' transforms as steps: ``READERS``, probabilities, and compositions.

Each file of readers has its own table ``READERS``. Its functions read what a transform does when it
is applied. This file reads how often it is applied.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fastdata.pixels import (
    albumentations_blurs,
    albumentations_colours,
    albumentations_dropouts,
    albumentations_geometry,
    albumentations_sizes,
    albumentations_warps,
)
from fastdata.pixels.albumentations_objects import albumentations_obstacle
from fastdata.pixels.known import known_name
from fastdata.pixels.state import Reader, State, UnknownStepError
from fastdata.pixels.steps import Step, Steps

READERS: dict[str, Reader] = {
    **albumentations_geometry.READERS,
    **albumentations_sizes.READERS,
    **albumentations_colours.READERS,
    **albumentations_blurs.READERS,
    **albumentations_dropouts.READERS,
    **albumentations_warps.READERS,
}
"""A reader of each transform, by its name with ``A.`` before it."""


def read_wrapped(transform: Any, state: State) -> State:
    """Read a transform in its wrapper, and return the state after it."""
    return _read(transform.transform, state)


def _read(transform: Any, state: State, *, is_forced: bool = False) -> State:
    """Read an object of albumentations.

    ``is_forced=True``: the composition around it applies it whatever its ``p``, unless that is 0.
    """
    name = known_name(transform)
    if name not in READERS and name not in _COMPOSITIONS:
        raise UnknownStepError(albumentations_obstacle(transform) or "is not a known batch op")
    if getattr(transform, "processors", None):
        raise UnknownStepError("has bbox_params or keypoint_params, which are not supported")
    state = _as_pixels(state)
    before = replace(state.inner(), steps=())
    p = transform.p
    if name in _COMPOSITIONS:
        found: Step | State = _COMPOSITIONS[name](transform, before)
        # These two draw even if they are forced: SomeOf (and RandomOrder) whether it is applied at
        # all, OneOrOther which of its transforms is applied.
        if name in ("A.OneOrOther", "A.SomeOf", "A.RandomOrder"):
            p = 1 if name == "A.OneOrOther" else p
            is_forced = False
    elif state.is_mask and "mask" not in transform.targets:
        return state
    else:
        found = READERS[name](transform, before)
    after = before.add(found) if isinstance(found, Step) else found
    # A probability of 0 stays 0, even if the transform is forced.
    if is_forced and (p > 0 or name in _COMPOSITIONS):
        p = 1
    if p < 1:
        after = _sometimes(before, after, state, p)
    return replace(after, steps=(*state.steps, *after.steps), at=state.at)


def _sometimes(before: State, after: State, state: State, p: float) -> State:
    """Return the state after steps that are applied to a sample with a probability."""
    made = len(before.floats)
    is_same = replace(after, steps=(), floats=before.floats) == before
    if not is_same or after.floats[:made] != before.floats or (after.floats and not made):
        raise UnknownStepError("changes the kind of only some samples")
    floats = (*before.floats, *_maybe(after.floats[made:], p, state))  # holes among floats
    return replace(after, steps=_maybe(after.steps, p, state), floats=floats)


def _maybe(steps: Steps, p: float, state: State) -> Steps:
    if [step.name for step in steps] == ["flip"]:  # a flip has its own probability
        return (replace(steps[0], fields={**steps[0].fields, "p": p * steps[0].fields["p"]}),)
    return (state.maybe(steps, p),) if steps else ()


def _as_pixels(state: State) -> State:
    """Return the state of samples as arrays; the wrapper converts PIL images to arrays."""
    if state.kind in ("hwc", "hw"):
        return state
    if state.kind != "pil":
        raise UnknownStepError("needs uint8 arrays (H, W, C), but gets other samples")
    if state.channels not in (1, 3, 4):
        raise UnknownStepError("gets images with different numbers of channels")
    return replace(state, kind="hw" if state.channels == 1 else "hwc")


def _read_each(transforms: Iterable[Any], state: State, *, is_forced: bool) -> list[Steps]:
    """Read transforms of which only some are applied: they must not change the state."""
    found = []
    for number, transform in enumerate(transforms):
        before = replace(state.inner(number), steps=())
        try:
            after = _read(transform, before, is_forced=is_forced)
        except UnknownStepError as unknown:
            name = type(transform).__name__
            raise UnknownStepError(f"contains {name}, which {unknown}") from unknown
        if replace(after, steps=()) != before:
            raise UnknownStepError("changes the kind of only some samples")
        found.append(after.steps)
    return found


def _read_sequence(transform: Any, state: State) -> State:
    """Read Compose and Sequential."""
    after = state
    for number, each in enumerate(transform.transforms):
        try:
            after = replace(_read(each, replace(after, at=state.inner(number).at)), at=state.at)
        except UnknownStepError as unknown:
            raise UnknownStepError(f"contains {type(each).__name__}, which {unknown}") from unknown
    return after


def _read_one_of(transform: Any, state: State) -> Step:
    each = _read_each(transform.transforms, state, is_forced=True)
    return state.choice(each, transform.transforms_ps)


def _read_one_or_other(transform: Any, state: State) -> Step:
    first, *_, last = _read_each(transform.transforms, state, is_forced=True) * 2
    return state.choice([first, last], [transform.p, 1 - transform.p])


def _read_some_of(transform: Any, state: State) -> Step:
    each = _read_each(transform.transforms, state, is_forced=False)
    if transform.replace and transform.n > 1:
        raise UnknownStepError("draws transforms with replacement")
    keeps_order = known_name(transform) == "A.SomeOf"
    step = state.choice(each, name="some")
    return replace(step, fields={"count": transform.n, "keeps_order": keeps_order})


_COMPOSITIONS: dict[str, Reader] = {
    "A.Compose": _read_sequence,
    "A.OneOf": _read_one_of,
    "A.OneOrOther": _read_one_or_other,
    "A.RandomOrder": _read_some_of,
    "A.Sequential": _read_sequence,
    "A.SomeOf": _read_some_of,
}
