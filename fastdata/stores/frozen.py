"""Refuse datasets that draw at random when they are read, because a store keeps one draw.

If a dataset augments its items, or picks partners for them, every epoch would see the same draws.
Two checks find that: the steps of the dataset's transforms, of which some are known to be random,
and a few items, which are read several times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastdata.pixels.compose import flatten_transform
from fastdata.pixels.draws import draws_in_vain, is_random
from fastdata.pixels.fingerprint import fingerprint
from fastdata.report import warn_user
from fastdata.sources.items import DatasetSource
from fastdata.sources.source import Source
from fastdata.stores.generators import find_generators, set_state, state_of

if TYPE_CHECKING:
    from fastdata.stores.generators import FoundGenerator
    from fastdata.stores.options import Options


_TRANSFORM_NAMES = ("transforms", "transform", "target_transform")

_CALLED_NAMES = (*_TRANSFORM_NAMES, "set_transform")

_MOST_READS = 8
"""Reads of one item. If a generator cannot be found, one of 128 datasets that flip an image with
probability 1/2 is taken for one that does not."""

_READS_S = 0.02
"""Time after which no item is read a third time."""

_FIRST_READS_S = 1.0
"""Time after which no other item is read; one is read twice in any case."""

_MOST_CHARACTERS = 60
"""Length of a transform's text in an error. That of albumentations would fill a page."""


def refuse_random_steps(dataset: Any) -> None:
    """Refuse a dataset whose transform, or that of a dataset inside it, is known to be random.

    Raises:
        ValueError: names the steps.
    """
    found = [
        f"{' '.join(repr(step).split())} in {owner}.{name}"
        for owner, name, step in _own_steps(dataset)
        # An attribute with another name need not be called on the items.
        if name in _TRANSFORM_NAMES and is_random(step)
    ]
    if found:
        raise ValueError(
            f"{', '.join(dict.fromkeys(found))}: random, but samples are stored as they are first "
            "read, so that every epoch would see the same draws. Make the dataset without it, and "
            "give it to CachedDataset as transform=, or as transforms= if it takes the target "
            "too; or use storage='none'. frozen=True keeps one draw for all epochs."
        )


def _own_steps(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the steps of a dataset's transforms and of those inside it: owner, name, step."""
    owner = type(dataset).__name__
    for name, call in _own_calls(dataset).items():
        for step in flatten_transform(call):
            yield owner, name, step
    inside = [getattr(dataset, "dataset", None)]
    match getattr(dataset, "datasets", None):
        case dict() as named:
            inside += named.values()
        case [*listed]:
            inside += listed
    for part in inside:
        if part is not None:
            yield from _own_steps(part)


def _own_calls(dataset: Any) -> dict[str, Any]:
    """Return what a dataset may call on its items, by the name of the attribute."""
    attributes = getattr(dataset, "__dict__", {})
    calls = {name: call for name, call in attributes.items() if callable(call)}
    calls |= {name: getattr(dataset, name, None) for name in _TRANSFORM_NAMES}
    both = calls["transforms"]
    if type(both).__name__ == "StandardTransform":
        # torchvision's datasets call either this or the other two, which may have been changed.
        calls["transforms"] = None
        code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
        if "transforms" in getattr(code, "co_names", ()):
            calls["transform"] = None
            calls |= {"transforms": both.transform, "target_transform": both.target_transform}
    match getattr(dataset, "format", None):  # of Hugging Face's datasets
        case {"type": "custom", "format_kwargs": {"transform": call}}:
            calls["set_transform"] = call
    return calls


def refuse_draws(source: Source, options: Options) -> None:
    """Refuse a dataset that draws when it is read; with a ``cache_key``, only warn of it.

    A few of its items are read, each at least twice. Afterwards every generator has the state that
    it had before.

    Raises:
        ValueError: says what differed or moved, and what to do.
    """
    if options.frozen or not isinstance(source, DatasetSource) or source.is_format:
        return
    dataset = source.dataset
    steps = list(_own_steps(dataset))
    moves_torch = any(draws_in_vain(step) for _, _, step in steps)
    found = _what_differs(source, find_generators(dataset, moves_torch=moves_torch))
    if not found:
        return
    causes = []
    for owner, name, step in steps:
        draws = is_random(step)
        if draws or (draws is None and name in _CALLED_NAMES):
            causes.append(f"{_shown(step)} in {owner}.{name}")
    if causes:
        found += f", perhaps through {', '.join(dict.fromkeys(causes))}"
    message = (
        f"{type(dataset).__name__} draws at random when it is read: {found}. CachedDataset keeps "
        "each item as it was first read, so that every epoch would see the same draw. Move what is "
        "random into transform= of CachedDataset, or give storage='none' to read the dataset in "
        "every epoch. frozen=True keeps one draw for all epochs."
    )
    if options.cache_key is None:
        raise ValueError(message)
    warn_user(message)


def _shown(step: object) -> str:
    """Return the text of a step in one line, cut off if it is long."""
    text = " ".join(repr(step).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _what_differs(source: DatasetSource, generators: Sequence[FoundGenerator]) -> str:
    """Return what differed when items were read again, or which generator moved; else nothing."""
    before = [state_of(each.generator) for each in generators]
    try:
        return _read_again(source, generators)
    except Exception:  # noqa: BLE001  # user code raises anything; preparing names the sample
        return ""
    finally:
        for each, state in zip(generators, before, strict=True):
            set_state(each.generator, state)


def _read_again(source: DatasetSource, generators: Sequence[FoundGenerator]) -> str:
    """Read the first, middle and last item several times; see ``_what_differs``."""
    last = len(source) - 1
    first: dict[int, list[str]] = {}
    begun = time.perf_counter()
    for index in sorted({0, last // 2, last}):
        first[index] = contents_of(source.read(index))
        states = contents_of(state_of(each.generator) for each in generators)
        if found := _difference(first, source, index):
            return found
        # Two reads of one item are compared, not the states before and after one: a dataset may
        # seed generators by the index, and then both reads leave the same states.
        after = contents_of(state_of(each.generator) for each in generators)
        for each, one, other in zip(generators, states, after, strict=True):
            if one != other and not each.moves_in_vain:
                return f"reading its items moves {each.name}"
        if time.perf_counter() - begun > _FIRST_READS_S:
            break
    for _ in range(_MOST_READS - 2):
        if time.perf_counter() - begun > _READS_S:
            break
        for index in first:
            if found := _difference(first, source, index):
                return found
    return ""


def _difference(first: Mapping[int, Sequence[str]], source: DatasetSource, index: int) -> str:
    """Read an item again, and say what is not as it was when it was first read."""
    again = contents_of(source.read(index))
    for name, one, other in zip(("sample", "target"), first[index], again, strict=False):
        if one != other:
            return f"item {index} has another {name} each time"
    return ""


def contents_of(values: Iterable[object]) -> list[str]:
    """Return a hash of the content of each value; all values that do not show it have the same."""
    hashes = []
    for value in values:
        try:
            hashes.append(fingerprint(value, cache_key="", covers_code=False))
        except Exception:  # noqa: BLE001  # objects of users raise anything when they are read
            hashes.append("")
    return hashes
