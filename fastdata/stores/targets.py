"""Targets of samples as columns of numbers and JSON, without pickle."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from itertools import filterfalse, islice
from typing import Any

import numpy as np
import torch

from fastdata.machine.tables import target_columns
from fastdata.pixels.arrays import Array

Columns = dict[str, Any]
"""Columns of an index by name: arrays, or values for JSON."""

_COLUMN_KINDS: dict[str, Callable[[Array], Any]] = {
    "number": np.asarray,
    "tensor": torch.from_numpy,
    "array": list,
    "scalar": list,
}
"""Kinds of targets that are one column of numbers, each with the function to make them from it."""


def pack_targets(targets: Sequence[Any] | Array) -> Columns:
    """Return targets as columns. ``targets.json`` names the kind and the column of each.

    Raises:
        ValueError: they are neither numbers, arrays of one shape, values that JSON returns
            unchanged, nor tuples of these.
    """
    columns: Columns = {}
    columns["targets.json"] = _pack_targets(targets, columns)
    return columns


def _pack_targets(targets: Sequence[Any] | Array, columns: Columns) -> Any:
    """Add the columns of targets, and return the JSON that describes them."""
    found, kind = target_columns(targets)
    if kind in _COLUMN_KINDS:
        name = f"targets.{len(columns)}"
        columns[name] = found["targets"]
        return {kind: name}
    # Tuples of one length become a column for each position, so that numbers in them stay compact.
    if {*map(type, targets)} == {tuple} and targets[0] and len({*map(len, targets)}) == 1:
        return [_pack_targets(place, columns) for place in zip(*targets, strict=True)]
    targets = list(targets)
    if _is_json(targets):
        return {"json": targets}
    others = [
        f"{reprlib.repr(target)} ({type(target).__name__})"
        for target in islice(filterfalse(_is_json, targets), 2)
    ]
    raise ValueError(
        "cache_dir= can store targets that are numbers, strings, arrays of one shape, lists or "
        "dicts of numbers and strings (with strings as keys), or tuples of these, all of one "
        f"length. It found {' and '.join(others)}. Let the dataset return such targets, and convert them to what "
        "you need in target_transform=."
    )


def _is_json(value: object) -> bool:
    """Return True if JSON returns a value unchanged."""
    # Texts are compared, because 1 == 1.0 == True. A tuple would become a list, and an int key a
    # string.
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def unpack_targets(packed: Any, columns: Columns, count: int) -> Any:
    """Return the targets that ``packed`` describes.

    Raises:
        Exception: of any kind, if they are damaged or their number is not ``count``.
    """
    if isinstance(packed, list):
        places = [as_list(unpack_targets(place, columns, count)) for place in packed]
        if not places:
            raise ValueError("its targets are empty tuples")
        return list(zip(*places, strict=True))
    [(kind, found)] = packed.items()
    if kind == "json":
        if not isinstance(found, list) or len(found) != count:
            raise ValueError(f"its targets are not a list of {count}")
        return found
    column = columns[found]
    is_number = column.dtype.kind in "iufb" and column.dtype.isnative
    if not is_number or column.shape[:1] != (count,):
        given = f"{column.dtype}{list(column.shape)}"
        raise ValueError(f"{found} are {given}, but numbers[{count}] are needed")
    return _COLUMN_KINDS[kind](column)


def as_list(targets: Any) -> list[Any]:
    """Return unpacked targets as Python values, one for each sample."""
    return list(targets.tolist() if isinstance(targets, np.ndarray) else targets)
