"""Steps of a transform as values, and the table that they are compiled to.

A step holds the fields of its record in core/records.h by their names. The core draws an op from a
step for each sample; this file neither draws nor changes pixels.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastdata.pixels.arrays import Array, Float64s
from fastdata.pixels.core.calls import Table
from fastdata.pixels.core.library import load
from fastdata.pixels.resize import pillow_chooses_order

Fill = tuple[float, ...]
"""One value, or one for each channel."""
Fields = Mapping[str, Any]
"""Values of a record by the names of its fields: an enumerator is given by its name, a nested
record as another mapping."""

# The draws of step `at` begin at place at * 2**10 of a sample's stream, which has 2**64 numbers, so
# `at` must be below 2**54. Numbers of nested steps would grow beyond that: they are taken modulo a
# prime, so that steps near each other do not get the same number. `child` of draw.c does the same.
_CHILDREN = 1 << 10
_NUMBERS = (1 << 54) - 33
_FUSED_ROWS = 1 << 10


@dataclass(frozen=True, slots=True)
class Step:
    """One record of a transform's table.

    Attributes:
        name: name of its record in core/records.h, such as ``"resized_crop"``.
        fields: values of the record's fields.
        at: number of its random draws.
        fill: values for pixels from outside the image, one or one for each channel.
        children: the steps inside it.
        levels: function of height and width that returns the magnitudes of a policy.
    """

    name: str
    fields: Fields = field(default_factory=dict)
    at: int = 0
    fill: Fill = (0,)
    children: Steps = ()
    levels: Callable[[int, int], Float64s] | None = None


Steps = tuple[Step, ...]


def child(at: int, number: int) -> int:
    """Return the number of the draws of a step inside step ``at``."""
    return ((at + 1) * _CHILDREN + number) % _NUMBERS


def place_of(at: int) -> int:
    """Return the place of a step in the user's transform, from its number or one inside it."""
    # Undo `child` until the number is below 1024, as those of the user's transforms are.
    while at >= _CHILDREN:
        at = at // _CHILDREN - 1
    return at


def sequence(steps: Iterable[Step], end: float = 0.0) -> Step:
    """Return steps as one step; as one of several choices, its share of [0, 1) ends at ``end``."""
    return Step("sequence", {"end": end}, children=tuple(steps))


def flatten_steps(steps: Steps) -> list[Step]:
    """Return all steps in the order of their records: a sequence, then children level by level."""
    every = [sequence(steps)]
    # The core expects the children of each step right after those of the step before (`is_tree`).
    level: Sequence[Step] = every
    while level:
        level = [inner for step in level for inner in step.children]
        every += level
    return every


def compile_table(every: Sequence[Step]) -> Table:
    """Return the table of flattened steps, without magnitudes of policies."""
    core = load()
    records = np.zeros(len(every), core.records["STEP"])
    first = 1
    for record, step in zip(records, every, strict=True):
        record["code"] = core.numbers[f"STEP_{step.name.upper()}"]
        record["at"] = step.at
        record["first"] = first
        record["count"] = len(step.children)
        record["fills"] = len(step.fill)
        record["fill"] = np.resize(step.fill, record["fill"].shape)
        _write(record[step.name], step.fields, core.numbers)
        first += len(step.children)
    shown = str([step.fields for step in every])
    is_torchs = "V1_DOMAIN" in shown or "V2_DOMAIN" in shown
    return Table(
        records,
        {},
        # Only asked if needed, because torch starts its threads for that.
        fuses=is_torchs and _torch_fuses(),
        # On other machines torch has no kernel for uint8, and v2 resizes in float32.
        resizes_fast=platform.machine() in ("aarch64", "arm64")
        or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"),
        chooses_order=pillow_chooses_order(),
    )


def _write(record: Array, fields: Fields, numbers: Mapping[str, int]) -> None:
    """Write fields into a record by their names; a sequence may be shorter than the array."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _write(record[name], value, numbers)
        elif isinstance(value, str):
            record[name] = numbers[value]
        elif isinstance(value, Sequence):
            record[name][: len(value)] = [numbers.get(each, each) for each in value]
        else:
            record[name] = value


@functools.cache
def _torch_fuses() -> bool:
    """Return True if torch's product of large matrices fuses multiplication and addition.

    MKL does so on some CPUs: it rounds once, after the addition. The test computes
    (1 + 2**-12)**2 - (1 + 2**-11), which is 2**-24, but 0 if the square is rounded first.
    """
    make = functools.partial(torch.tensor, dtype=torch.float32, device="cpu")
    row = make([-1 - 2**-11, 1 + 2**-12, 1.0])
    column = make([[1.0], [1 + 2**-12], [0.0]]).expand(1, 3, 2)
    return bool(row.expand(1, _FUSED_ROWS, 3).bmm(column).any())
