"""Refuse datasets that draw at random when they are read, because a store keeps one draw.

If a dataset augments its items, or picks partners for them, every epoch would see the same draws.
Two checks find such a dataset. One looks for steps in its transforms that are known to be random.
The other reads a few items several times and compares the results.
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
"""Number of times that an item is read. If its generator cannot be found, a dataset that flips an
image with probability 1/2 is not noticed in one of 128 cases."""

_READS_S = 0.02
"""Seconds after which no item is read a third time."""

_FIRST_READS_S = 1.0
"""Seconds after which no other item is read. One item is read twice in any case."""

_MOST_CHARACTERS = 60
"""Length of a transform's text in an error. That of albumentations would fill a page."""


def refuse_random_steps(dataset: Any) -> None:
    """Refuse a dataset if its transform, or that of a dataset inside it, is known to be random.

    Raises:
        ValueError: it is random. The message names the steps.
    """
    found = [
        f"{' '.join(repr(step).split())} in {owner}.{name}"
        for owner, name, step in _own_steps(dataset)
        # Attributes with other names may be unrelated to the items.
        if name in _TRANSFORM_NAMES and is_random(step)
    ]
    if found:
        raise ValueError(
            f"{', '.join(dict.fromkeys(found))}: random, but each sample is stored when it is "
            "first read, so every epoch would see the same draws. Make the dataset without this "
            "transform, and give the transform to CachedDataset: as transform=, as transforms= if "
            "it takes the target too, or as transform=Views(transform, transform) for two views of "
            "an image. Or use storage='none'. frozen=True keeps one draw for all epochs."
        )


def _own_steps(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (owner, attribute, step) for the transforms of a dataset and of those inside it."""
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
    """Return the functions that a dataset may call on its items, by the name of the attribute."""
    attributes = getattr(dataset, "__dict__", {})
    calls = {name: call for name, call in attributes.items() if callable(call)}
    calls |= {name: getattr(dataset, name, None) for name in _TRANSFORM_NAMES}
    both = calls["transforms"]
    if type(both).__name__ == "StandardTransform":
        # torchvision's datasets call either this or the other two, which the user may have changed.
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
    """Refuse a dataset that draws when it is read; with a ``cache_key``, only warn.

    A few of its items are read, each at least twice. Afterwards every generator has its earlier
    state again.

    Raises:
        ValueError: the dataset draws at random. The message says how that was noticed.
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
        f"{type(dataset).__name__} draws at random when it is read: {found}. CachedDataset stores "
        "each item when it is first read, so every epoch would see the same draw. Move the random "
        "part into transform= of CachedDataset (for two views of an image: transform=Views(weak, "
        "strong)), or use storage='none' to read the dataset in every epoch. frozen=True keeps one "
        "draw for all epochs."
    )
    if options.cache_key is None:
        raise ValueError(message)
    warn_user(message)


def _shown(step: object) -> str:
    """Return the text of a step in one line, cut off if it is long."""
    text = " ".join(repr(step).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _what_differs(source: DatasetSource, generators: Sequence[FoundGenerator]) -> str:
    """Return what differed when items were read again, or which generator they drew from, or ""."""
    before = [state_of(each.generator) for each in generators]
    try:
        return _read_again(source, generators)
    except Exception:  # noqa: BLE001  # user code raises anything; preparing will raise it again
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
        # The states after two reads of one item are compared, not those before and after one read.
        # A dataset may seed generators with the index: then both reads leave the same states.
        after = contents_of(state_of(each.generator) for each in generators)
        for each, one, other in zip(generators, states, after, strict=True):
            if one != other and not each.moves_in_vain:
                return f"reading its items takes numbers from {each.name}"
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
    """Read an item again, and return a text on what differs from its first read, or ""."""
    again = contents_of(source.read(index))
    for name, one, other in zip(("sample", "target"), first[index], again, strict=False):
        if one != other:
            return f"item {index} has another {name} each time"
    return ""


def contents_of(values: Iterable[object]) -> list[str]:
    """Return a hash of the content of each value, or "" if the content cannot be hashed."""
    hashes = []
    for value in values:
        try:
            hashes.append(fingerprint(value, cache_key="", covers_code=False))
        except Exception:  # noqa: BLE001  # objects of users raise anything when they are read
            hashes.append("")
    return hashes
