"""Targets and class names in a cache: plain arrays, checked when they are read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastdata.cache.manifest import ArrayFile, Manifest, read_array
from fastdata.errors import CacheError
from fastdata.table import SampleTable

__all__ = ["LABELS", "keep_labels", "keep_targets", "read_classes", "read_targets"]

LABELS = ("targets", "classes")
"""Names of the arrays that say what samples are, not where."""
Columns = dict[str, np.ndarray]


def keep_targets(targets: Sequence[Any]) -> tuple[str, Columns]:
    """Targets as arrays to be kept, and how they are to be read.

    Raises:
        ValueError: they are neither numbers, arrays of one shape, nor plain values that JSON keeps.
    """
    with contextlib.closing(SampleTable(targets)) as table:
        return keep_labels(table, np.arange(len(targets)))


def keep_labels(table: SampleTable, chosen: np.ndarray) -> tuple[str, Columns]:
    """The same for chosen samples of a table, with the names of its classes.

    Raises:
        ValueError: as of ``keep_targets``.
    """
    classes = {} if table.class_to_idx is None else {"classes": _to_json(table.class_to_idx)}
    array = table.target_array()
    if array is None:
        return "json", {"targets": _texts([table.target(i) for i in chosen.tolist()]), **classes}
    return f"{table.target_kind}:{array.dtype.name}:{array.ndim}", {"targets": array[chosen], **classes}


def _texts(targets: list[Any]) -> np.ndarray:
    try:
        data = _to_json(targets)
        is_same = repr(json.loads(data.tobytes())) == repr(targets)
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        kinds = ", ".join(sorted({type(target).__name__ for target in targets}))
        raise ValueError(
            f"cache_dir= keeps targets that are numbers, arrays of one shape, texts, or lists and dicts of these, and "
            f"not {kinds}. Give such targets from the dataset, and make what you need of them in target_transform=."
        )
    return data


def read_targets(folder: Path, manifest: Manifest, count: int) -> Any:
    """Targets of the samples that were kept, in their order: numbers in one array, else a list.

    Args:
        folder: of the cache.
        manifest: its manifest.
        count: how many samples were kept.

    Raises:
        CacheError: there are none, or they are damaged.
    """
    kind, file = manifest.target_kind, manifest.arrays.get("targets")
    if file is None or kind is None:
        raise CacheError(
            f"{folder} holds no targets: it was built by an earlier version of fastdata. Build it again, or open the "
            "dataset that it was made from once more with cache_dir=, where it can be written"
        )
    if kind == "json":
        targets = _from_json(folder, file)
        if not isinstance(targets, list) or len(targets) != count:
            raise CacheError(f"{folder} holds no list of {count} targets")
        return targets
    what, dtype, dimensions = kind.split(":")
    array = read_array(folder, file, dtype, (count, *[-1] * (int(dimensions) - 1)))
    if what == "number":
        return array
    return list(torch.from_numpy(array) if what == "tensor" else array)


def read_classes(folder: Path, manifest: Manifest) -> dict[str, int] | None:
    """Number of each class; None where classes have no names.

    Raises:
        CacheError: they are damaged.
    """
    file = manifest.arrays.get("classes")
    if file is None:
        return None
    classes = _from_json(folder, file)
    if not isinstance(classes, dict) or not all(type(number) is int for number in classes.values()):
        raise CacheError(f"{folder} holds no numbers of classes")
    return classes


def _to_json(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _from_json(folder: Path, file: ArrayFile) -> Any:
    data = read_array(folder, file, "uint8", (-1,))
    try:
        return json.loads(data.tobytes())
    except (ValueError, RecursionError) as problem:
        raise CacheError(f"{folder / file.name} cannot be read: {problem}") from problem
