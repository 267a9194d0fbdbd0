"""Datasets that draw at random when they are read, which must not be stored.

A store keeps each item as it was first read. If a dataset augments its items, or picks partners for
them, every epoch would see the same draws. Two looks find that: at the dataset's transforms, of
which some are known to be random, and at a few items, which are read several times.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastdata.pixels.compose import draws_in_vain, flatten, is_random
from fastdata.pixels.describe import name_of
from fastdata.pixels.images import is_pil
from fastdata.report import warn_user
from fastdata.sources import DatasetSource, Source

if TYPE_CHECKING:
    from fastdata.stores.prepare import Options

_TRANSFORM_NAMES = ("transforms", "transform", "target_transform")
_CALLED_NAMES = (*_TRANSFORM_NAMES, "set_transform")
_TORCH = "torch's generator"
_MOST_READS = 8
"""Of one item. A flip with probability 1/2 goes unseen in one of 128 datasets whose generator
cannot be seen either."""
_READS_S = 0.02
"""Time after which no item is read a third time."""
_FIRST_READS_S = 1.0
"""Time after which no other item is read; one is read twice in any case."""
_MOST_OBJECTS = 20_000
_MOST_PARTS = 1_000
"""Of one list or dictionary."""
_MOST_CHARACTERS = 60
"""Of a transform's text, which for albumentations fills a page."""


# Transforms that are known to be random


def refuse_random_steps(dataset: Any) -> None:
    """Refuse a dataset whose transform, or that of a dataset inside it, is known to be random.

    Raises:
        ValueError: names the steps.
    """
    found = [
        f"{' '.join(repr(step).split())} in {owner}.{name}"
        for owner, name, step in _own_steps(dataset)
        # Under another name it may stay unused.
        if name in _TRANSFORM_NAMES and is_random(step)
    ]
    if found:
        raise ValueError(
            f"{', '.join(dict.fromkeys(found))}: random, but samples are kept as they are first "
            "read, so that every epoch would see the same draws. Make the dataset without it, and "
            "give it to CachedDataset as transform=, or as transforms= where it takes the target "
            "too; or use storage='none'. frozen=True keeps one draw for all epochs."
        )


def _own_steps(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the steps of a dataset's transforms and of those inside it: owner, name, step."""
    calls = {name: getattr(dataset, name, None) for name in _TRANSFORM_NAMES}
    both: Any = calls["transforms"]
    if type(both).__name__ == "StandardTransform":
        del calls["transforms"]
        code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
        if "transforms" in getattr(code, "co_names", ()):  # else its dataset asks for each
            calls = {"transforms": both.transform, "target_transform": both.target_transform}
    shown = getattr(dataset, "format", None)
    if isinstance(shown, dict) and shown.get("type") == "custom":  # Hugging Face's
        calls["set_transform"] = shown.get("format_kwargs", {}).get("transform")
    for name, call in getattr(dataset, "__dict__", {}).items():
        if name not in _TRANSFORM_NAMES and callable(call):
            calls[name] = call
    owner = type(dataset).__name__
    yield from ((owner, name, step) for name, call in calls.items() for step in flatten(call))
    parts = getattr(dataset, "datasets", None)
    parts = list(parts.values()) if isinstance(parts, dict) else parts
    each = parts if isinstance(parts, (list, tuple)) else ()
    for part in (getattr(dataset, "dataset", None), *each):
        if part is not None:
            yield from _own_steps(part)


# Items that are read several times


def refuse_draws(source: Source, options: Options) -> None:
    """Refuse a dataset that draws when it is read; with a ``cache_key`` only warn of it.

    A few of its items are read, each at least twice. Generators that moved are set back.

    Raises:
        ValueError: says what differed or moved, and what to do.
    """
    if options.frozen or not isinstance(source, DatasetSource):
        return
    steps = list(_own_steps(source.dataset))
    ignored = _TORCH if any(draws_in_vain(step) for _, _, step in steps) else ""
    found = _what_differs(source, ignored=ignored)
    if not found:
        return
    causes = [
        f"{_shown(step)} in {owner}.{name}"
        for owner, name, step in steps
        if is_random(step) or (is_random(step) is None and name in _CALLED_NAMES)
    ]
    if causes:
        found += f", perhaps through {', '.join(dict.fromkeys(causes))}"
    text = f"{type(source.dataset).__name__} draws at random when it is read: {found}."
    if options.cache_key is None:
        raise ValueError(
            f"{text} CachedDataset keeps each item as it was first read, so that every epoch would "
            "see the same draw. Move what is random into transform= of CachedDataset, or give "
            "storage='none' to read the dataset in every epoch. frozen=True keeps one draw for all "
            "epochs."
        )
    warn_user(
        f"{text} The cache keeps each item as it was first read, so that every epoch sees the same "
        "draw. Give frozen=True if that is what you want; else move what is random into transform= "
        "of CachedDataset."
    )


def _shown(step: Any) -> str:
    text = " ".join(repr(step).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _what_differs(source: DatasetSource, *, ignored: str) -> str:
    """Return what differed when items were read again, or which generator moved; else nothing."""
    generators = _find_generators(source.dataset)
    before = [read() for read, _ in generators.values()]
    try:
        return _read_again(source, generators, ignored)
    except Exception:  # noqa: BLE001  # user code raises anything; preparing names the sample
        return ""
    finally:
        for (read, write), state in zip(generators.values(), before, strict=True):
            if not _is_same(read(), state):
                write(state)


def _read_again(source: DatasetSource, generators: Mapping[str, _Generator], ignored: str) -> str:
    last = len(source) - 1
    indices = sorted({0, last // 2, last}) if last >= 0 else []
    first: dict[int, Any] = {}
    begun = time.perf_counter()
    for index in indices:
        first[index] = source.read(index)
        states = [read() for read, _ in generators.values()]
        if found := _difference(first[index], source.read(index), index):
            return found
        # A dataset may seed them by the index: then they are where they were.
        for (name, (read, _)), state in zip(generators.items(), states, strict=True):
            if name != ignored and not _is_same(read(), state):
                return f"reading its items moves {name.partition(' #')[0]}"
        if time.perf_counter() - begun > _FIRST_READS_S:
            break
    for _ in range(_MOST_READS - 2):
        if time.perf_counter() - begun > _READS_S:
            break
        for index, item in first.items():
            if found := _difference(item, source.read(index), index):
                return found
    return ""


def _difference(item: Any, again: Any, index: int) -> str:
    for name, one, other in zip(("sample", "target"), item, again, strict=False):
        if not _is_same(one, other):
            return f"item {index} has another {name} each time"
    return ""


def _is_same(one: Any, other: Any) -> bool:
    """True if two values have the same content, NaN being equal to itself.

    Objects that say nothing of their content count as the same.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return torch.equal(_octets(one), _octets(other))
    if isinstance(one, (np.ndarray, np.generic)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        if one.dtype.hasobject:
            return _is_same(one.tolist(), other.tolist())
        return bool(one.tobytes() == other.tobytes())
    if is_pil(one):
        return (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if hasattr(one, "__dict__"):
        return _is_same(vars(one), vars(other))
    says_nothing = type(one).__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    return says_nothing or bool(one == other)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# Random number generators

_Generator = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What reads and what writes the state of a generator."""
_ATOMS = (str, bytes, int, float, bool, type(None), np.ndarray, torch.Tensor, types.ModuleType)


def _find_generators(dataset: Any) -> dict[str, _Generator]:
    """Return the global generators and those that a dataset can reach, by their names."""
    found: dict[str, _Generator] = {
        "Python's random generator": (random.getstate, random.setstate),
        "NumPy's global generator": (np.random.get_state, np.random.set_state),
        _TORCH: (torch.get_rng_state, torch.set_rng_state),
    }
    for number, generator in enumerate(_reachable_generators(dataset)):
        found[f"a {type(generator).__name__} that it holds #{number}"] = _access(generator)
    return found


def _access(generator: Any) -> _Generator:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    return generator.get_state, generator.set_state


def _reachable_generators(dataset: Any) -> Iterator[Any]:
    """Yield the generators in a dataset, in what it holds and in the globals that its code names.

    Of large datasets only the first objects are looked at.
    """
    queue = deque([dataset])
    met: set[int] = set()
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    while queue and len(met) < _MOST_OBJECTS:
        value = queue.popleft()
        if id(value) in met or isinstance(value, _ATOMS):
            continue
        met.add(id(value))
        if isinstance(value, kinds):
            # What draws from the system has no state.
            if not isinstance(value, random.SystemRandom):
                yield value
        else:
            queue.extend(itertools.islice(_parts_of(value), _MOST_PARTS))


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield what a value refers to; of code that is installed nothing."""
    if isinstance(value, (type, types.FunctionType)) and name_of(value) is not None:
        return
    if isinstance(value, type):
        yield from vars(value).values()
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, value.__closure__)
        yield from (value.__globals__.get(name) for name in _names_in(value.__code__))
    else:
        yield from gc.get_referents(value)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that code and the functions in it look up."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)
