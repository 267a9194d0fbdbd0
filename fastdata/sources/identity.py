"""Texts that identify datasets, for the keys of caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastdata.pixels.fingerprint import fingerprint, name_of

_LISTS = ["_fastdata_identity", "samples", "targets"]
"""Attributes that list the samples or targets of a dataset."""
_CHANGES = ["transform", "target_transform", "transforms", "loader"]
"""Attributes that open and change a dataset's samples."""


def describe_dataset(dataset: Any, cache_key: str | None = None) -> str:
    """Return the class of a dataset and a hash of everything in it.

    With a ``cache_key`` the hash covers only the key, the lists of its samples, and the attributes
    that change the samples, such as ``transform``.
    """
    *subsets, inner = unwrapped(dataset)
    kind = name_of(type(inner)) or type(inner).__qualname__
    if cache_key is None:
        return f"{kind} {fingerprint(dataset)}"
    listed: list[Any] = [cache_key]
    for subset in subsets:
        listed += [type(subset), list(subset.indices)]
    listed += [getattr(inner, name, None) for name in (*_LISTS, *_CHANGES)]
    return f"{kind} {fingerprint(listed, cache_key)}"


def is_listed(dataset: Any) -> bool:
    """Return True if a dataset has a list of its samples or targets."""
    *_, inner = unwrapped(dataset)
    return any(hasattr(inner, name) for name in _LISTS)


def unwrapped(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and, if it is a subset, the dataset inside it, and so on."""
    yield dataset
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
        yield dataset
