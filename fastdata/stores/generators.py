"""Random number generators that a dataset may draw from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch

from fastdata.pixels.draws import is_always_applied, reachable

_MOST_OBJECTS = 20_000
"""The most objects that are searched."""

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator

_PYTHON: random.Random = random.random.__self__  # type: ignore[attr-defined]

_GLOBAL: dict[str, Generator] = {
    "Python's random generator": _PYTHON,
    "NumPy's global generator": np.random.random.__self__,  # type: ignore[attr-defined]
    "torch's generator": torch.default_generator,
}


class FoundGenerator(NamedTuple):
    """A random number generator that a dataset may draw from.

    Attributes:
        name: name of the generator, for a message.
        generator: generator object of Python, NumPy or torch.
        moves_in_vain: True if only transforms that are always applied draw from it, so that the
            numbers do not matter.
    """

    name: str
    generator: Generator
    moves_in_vain: bool


def find_generators(dataset: Any, *, moves_torch: bool) -> list[FoundGenerator]:
    """Return the global generators and those that a dataset can reach.

    Args:
        dataset: dataset whose attributes and code are searched.
        moves_torch: True if the dataset has torchvision transforms that draw from torch's generator
            in vain.
    """
    objects = list(islice(reachable(dataset, skips_installed=True), _MOST_OBJECTS))
    in_vain = _moved_in_vain(objects)
    if moves_torch:
        in_vain.add(id(torch.default_generator))
    # Generators are compared by identity, because different ones may have the same state. A global
    # generator that a dataset holds keeps its global name.
    held = [value for value in objects if _has_state(value)]
    named: dict[int, tuple[str, Generator]] = {
        id(each): (f"a {type(each).__name__} that it holds", each) for each in held
    }
    named |= {id(each): (name, each) for name, each in _GLOBAL.items()}
    return [
        FoundGenerator(name, each, moves_in_vain=key in in_vain)
        for key, (name, each) in named.items()
    ]


def _moved_in_vain(values: Sequence[Any]) -> set[int]:
    """Return the ids of generators from which only transforms that are always applied draw.

    Albumentations' transforms draw a number to decide if they are applied, even if they always are,
    such as ``Resize``. Older versions draw it from Python's generator.
    """
    in_vain: set[int] = set()
    for_a_choice: set[int] = set()
    for value in values:
        is_applied = is_always_applied(value)
        if is_applied is not None:
            parts = islice(reachable(value, skips_installed=True), _MOST_OBJECTS)
            held = {id(each) for each in parts if _has_state(each)}
            (in_vain if is_applied else for_a_choice).update(held or {id(_PYTHON)})
    return in_vain - for_a_choice


def _has_state(value: object) -> TypeGuard[Generator]:
    """Return True for a generator, except one that reads random bytes of the operating system."""
    return isinstance(value, Generator) and not isinstance(value, random.SystemRandom)


def state_of(generator: Generator) -> Any:
    """Return the state of a generator of Python, NumPy or torch."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state()


def set_state(generator: Generator, state: Any) -> None:
    """Set a state that ``state_of`` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
