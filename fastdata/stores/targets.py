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
"""Columns of an index by name: arrays, or the values of JSON."""

_COLUMN_KINDS: dict[str, Callable[[Array], Any]] = {
    "number": np.asarray,
    "tensor": torch.from_numpy,
    "array": list,
    "scalar": list,
}
"""Kinds of targets that are one column of numbers, and what makes them of the column."""


def pack_targets(targets: Sequence[Any] | Array) -> Columns:
    """Return targets as columns. ``targets.json`` names the kind and the column of each.

    Raises:
        ValueError: they are neither numbers, arrays of one shape, values that JSON gives back as
            they are, nor tuples of these.
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
    # Tuples of one length become a column for each place, so that numbers in them stay compact.
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
        "cache_dir= keeps targets that are numbers, arrays of one shape, texts, lists of these and "
        "dicts of these with texts as keys, or tuples of one length. It found "
        f"{' and '.join(others)}. Give such targets from the dataset, and make "
        "what you need of them in target_transform=."
    )


def _is_json(value: object) -> bool:
    """Return True if JSON returns the same value that it was given."""
    # By its text, because 1 == 1.0 == True, and a tuple or an int key would come back as another.
    try:
        return repr(json.loads(json.dumps(value))) == repr(value)
    except (TypeError, ValueError):
        return False


def unpack_targets(packed: Any, columns: Columns, count: int) -> Any:
    """Return the targets that ``packed`` describes; raise some error if there are not ``count``."""
    if isinstance(packed, list):
        places = [as_list(unpack_targets(place, columns, count)) for place in packed]
        if not places:
            raise ValueError("targets are tuples of nothing")
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
        raise ValueError(f"{found} are {given} where numbers[{count}] are needed")
    return _COLUMN_KINDS[kind](column)


def as_list(targets: Any) -> list[Any]:
    """Return unpacked targets as Python values, one for each sample."""
    return list(targets.tolist() if isinstance(targets, np.ndarray) else targets)
