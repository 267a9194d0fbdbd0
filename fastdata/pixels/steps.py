"""Steps of a transform as values, and the table that they are compiled to.

A step holds the fields of its record in core/records.h by their names. From a step the core draws
an op for each sample; nothing here draws or touches a pixel.
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
"""Values by the names of a record's fields; enumerators by their names, nested records as such."""

# A step's number times 2**10 is where its draws begin in a sample's stream of 2**64, so there are
# 2**54 numbers. Those of steps that are nested deeper are folded into as many: a prime, so that no
# two steps near each other get the same one. The core does the same (`child` of draw.c).
_CHILDREN = 1 << 10
_NUMBERS = (1 << 54) - 33
_FUSED_ROWS = 1 << 10


@dataclass(frozen=True, slots=True)
class Step:
    """One record of a transform's table.

    Attributes:
        name: which record of core/records.h it is, such as ``"resized_crop"``.
        at: number of its random draws.
        levels: gives the magnitudes of a policy for a height and a width.
    """

    name: str
    fields: Fields = field(default_factory=dict)
    at: int = 0
    fill: Fill = (0,)
    children: Steps = ()
    levels: Callable[[int, int], Float64s] | None = None


Steps = tuple[Step, ...]


def child(at: int, number: int) -> int:
    """Return the number of what a step draws within itself, or of a step within it."""
    return ((at + 1) * _CHILDREN + number) % _NUMBERS


def place_of(at: int) -> int:
    """Return the place in the transform of a step, from its number or that of a step within it."""
    # `child` undone as often as it was done: steps of the user's have numbers below 1024.
    while at >= _CHILDREN:
        at = at // _CHILDREN - 1
    return at


def sequence(steps: Iterable[Step], end: float = 0.0) -> Step:
    """Return steps as one; ``end`` is where its share in [0, 1) ends, where it is one choice."""
    return Step("sequence", {"end": end}, children=tuple(steps))


def flatten_steps(steps: Steps) -> list[Step]:
    """Return all steps in the order of their records: a sequence, then children level by level."""
    every = [sequence(steps)]
    # The core finds the children of each step behind those of the step before it (`is_tree`).
    level: Sequence[Step] = every
    while level:
        level = [inner for step in level for inner in step.children]
        every += level
    return every


def compile_table(every: Sequence[Step]) -> Table:
    """Make the table of flattened steps, for which no magnitudes are known yet."""
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
        # Torch's threads are not started for pipelines that do not need them.
        fuses=is_torchs and _torch_fuses(),
        # Torch has no kernel for uint8 elsewhere, and v2 takes float32.
        resizes_fast=platform.machine() in ("aarch64", "arm64")
        or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"),
        chooses_order=pillow_chooses_order(),
    )


def _write(record: Array, fields: Fields, numbers: Mapping[str, int]) -> None:
    """Write fields into a record by their names; arrays may be given shorter than they are."""
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
    """Return True if torch's product of large matrices rounds a product and its addition once.

    MKL does on some CPUs.

    (1 + 2**-12)**2 - (1 + 2**-11) is 2**-24, and 0 where the square is rounded first.
    """
    make = functools.partial(torch.tensor, dtype=torch.float32, device="cpu")
    row = make([-1 - 2**-11, 1 + 2**-12, 1.0])
    column = make([[1.0], [1 + 2**-12], [0.0]]).expand(1, 3, 2)
    return bool(row.expand(1, _FUSED_ROWS, 3).bmm(column).any())
