"""What tells one dataset from another, for the keys of caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastdata.pixels.fingerprint import describe, name_of

_LISTS = ["_fastdata_identity", "samples", "targets"]
"""Attributes that tell a dataset from others of its class."""

_CHANGES = ["transform", "target_transform", "transforms", "loader"]
"""What opens and changes its samples."""


def describe_dataset(dataset: Any, cache_key: str | None = None) -> str:
    """Text for any dataset: its class, and a hash of all of it; or of its lists and the key."""
    *subsets, inner = unwrapped(dataset)
    kind = name_of(type(inner)) or type(inner).__qualname__
    if cache_key is None:
        return f"{kind} {describe(dataset)}"
    listed: list[Any] = [(type(subset), list(subset.indices)) for subset in subsets]
    listed += [getattr(inner, name, None) for name in _LISTS + _CHANGES]
    listed.append(cache_key)
    return f"{kind} {describe(listed, cache_key)}"


def is_listed(dataset: Any) -> bool:
    """Whether a list of samples or targets tells a dataset from others of its class."""
    *_, inner = unwrapped(dataset)
    return any(hasattr(inner, name) for name in _LISTS)


def unwrapped(dataset: Any) -> Iterator[Any]:
    """A subset of a subset, each, and last the dataset that they are of."""
    yield dataset
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
        yield dataset
