"""Whatever table the core gets, it reads and writes only its own memory.

    python tests/fuzz_core.py [--seconds 60] [--seed 0]

Random trees of random steps, some of them with damaged records, are drawn and served over random images. Each of them
is served or refused. ``.ci/run`` runs this script under AddressSanitizer, which ends it at any other access to memory.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from fastdata.pixels.core.calls import (
    Blending,
    CoreError,
    Keys,
    Samples,
    Table,
    describe_output,
    draw,
    serve,
)
from fastdata.pixels.core.library import load

__all__ = ["run_once"]

SIDES = (1, 2, 3, 7, 16, 33, 64, 65)
SMALL = (*range(-1, 10), 16, 33, 64)
HUGE = (-(2**31), 2**31 - 1, 2**20, -1000)
REALS = (0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 3.0, 9.0, -0.5, -90.0, 33.0)
EXTREME = (np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-300, 2.0**31)
KNOWN: dict[str, tuple[int, ...]] = {
    "domain": (0, 0, 1, 2),
    "interpolation": (0, 0, 2, 2, 4, *range(7, 15)),
    "border": (0, 1, 2, 3, 4),
    "lanes": (0, 8, 16),
    "frame": (0, 1, 2, 3),
    "mode": (0, 1, 2, 3, 4),
    "position": (0, 1, 4, 5),
    "quarters": (0, 1, 2, 3),
    "statistic": (0, 0, 1, 2, 3, 4),
    "kind": (*range(1, 13), 13, 15, 17),
    "interpolations": (2,),
    "dtype": tuple(range(7)),
    "scaling": (0, 1, 2, 3),
    "means": (0, 1, 3),
    "bins": (4, 9),
    "bin": (0, 1, 3),
    "row": (0, 1, 3),
    "fewest": (0, 1),
    "most": (1, 2),
    "channels": (0, 1, 3),
}
"""Usual values of the fields of these names; all other fields have one of ``SMALL`` or ``REALS``."""
CHILDREN = ("length", "bucket", "magnitude", "timm_op")
CHILD_OF = {
    "resize": "length",
    "max_size": "length",
    "cover_bucket": "bucket",
    "bucket_crop": "bucket",
    "augment": "magnitude",
    "policies": "magnitude",
    "aug_mix": "magnitude",
    "photometric": "sequence",
    "timm": "timm_policy",
    "timm_policy": "timm_op",
}
DEPTH = 3
MOST_PIXELS = 1 << 20
LEVELS = 40
DTYPES = (np.uint8, np.float32, np.float64, np.float16, np.uint16, np.int32, np.int64)
"""Dtypes by their numbers in records.h."""


class Fuzz:
    """One random table, image and output."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.wild = self.pick(0.0, 0.0, 0.02, 0.2)
        every = (name for name in load().numbers if name.startswith("STEP_"))
        names = [name.removeprefix("STEP_").lower() for name in every]
        self.names = [
            name for name in names if name not in CHILDREN or self.rng.random() < self.wild
        ]

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def table(self) -> np.ndarray:
        """Return steps that are a tree, unless a few words of their records are damaged."""
        names, depths, counts = ["sequence"], [0], []
        while len(counts) < len(names):
            name, depth = names[len(counts)], depths[len(counts)]
            children = self.children(name, depth)
            counts.append(len(children))
            names += children
            depths += [depth + 1] * len(children)
        table = np.zeros(len(names), load().records["STEP"])
        first = 1
        for record, name, count in zip(table, names, counts, strict=True):
            self.fill(record, "sequence" if name == "timm_policy" else name)
            record["first"], record["count"] = first if count else 0, count
            first += count
        if self.rng.random() < self.wild:
            words = table.view(np.int32).reshape(-1)
            words[self.rng.integers(len(words), size=3)] = [
                self.pick(*SMALL, *HUGE) for _ in range(3)
            ]
        return table

    def children(self, name: str, depth: int) -> list[str]:
        count = 5 if name == "photometric" else int(self.rng.integers(1, 5))
        if name in CHILD_OF:
            return [CHILD_OF[name]] * count * (1 + (name == "policies"))
        if name in ("choice", "order", "some"):
            return ["sequence"] * count
        if name == "sequence" and depth < DEPTH:
            return [self.pick(*self.names) for _ in range(count)]
        return []

    def fill(self, record: Any, name: str) -> None:
        """Give all fields of a step random values."""
        record["code"] = load().numbers[f"STEP_{name.upper()}"]
        record["fills"] = self.pick(1, 1, 1, 3)
        record["at"] = self.rng.integers(2**20)
        record["fill"] = [float(self.pick(0, 0, 9, 255)) for _ in range(4)]
        self.fill_fields(record[name])

    def fill_fields(self, record: Any) -> None:
        for name in record.dtype.names:
            field = record[name]
            if field.dtype.names:
                self.fill_fields(field)
            elif field.shape:
                field[:] = [self.value(name, field.dtype) for _ in field]
            else:
                record[name] = self.value(name, field.dtype)

    def value(self, name: str, dtype: np.dtype[Any]) -> float:
        is_wild = self.rng.random() < self.wild
        if dtype.kind == "f":
            return self.pick(*EXTREME) if is_wild else self.pick(*REALS)
        if is_wild:
            return self.pick(*HUGE)
        return self.pick(*KNOWN.get(name, SMALL))


def run_once(seed: int) -> str:
    """Draw and serve one random table; return "served", "large", or the reason of the refusal."""
    fuzz = Fuzz(seed)
    steps, levels = fuzz.table(), np.linspace(-1, 30, LEVELS)
    shape = (fuzz.pick(1, 3, 3, 4), fuzz.pick(*SIDES), fuzz.pick(*SIDES))
    image = fuzz.rng.integers(0, 256, shape, np.uint8).copy()
    facts: dict[str, Any] = {
        "fuses": fuzz.pick(True, False),
        "resizes_fast": True,
        "chooses_order": fuzz.pick(True, False),
    }
    known: dict[tuple[int, int, int], Any] = {}
    while True:
        table = Table(steps, known, **facts)
        try:
            return _serve(fuzz, table, image)
        except CoreError as refused:
            if refused.reason != "levels" or len(known) > LEVELS:
                return refused.reason
            height, width = refused.numbers["height"], refused.numbers["width"]
            known[refused.step, height, width] = levels


def _serve(fuzz: Fuzz, table: Table, image: np.ndarray) -> str:
    index, shape = fuzz.rng.integers(2**62, size=1), np.array([image.shape], np.int32)
    keys = Keys(0, np.zeros(1, np.int64), index)
    draw(table, keys, shape, is_probe=True)
    ops, after = draw(table, keys, shape)
    channels, height, width = after[0].tolist()
    if channels * height * width > 4 * MOST_PIXELS or any(
        _pixels(op) > MOST_PIXELS for op in ops[0]
    ):
        return "large"
    served = (1, channels, height, width)
    out = np.empty(served, DTYPES[table.record["values"]["dtype"]])
    if fuzz.pick(False, True):
        out = np.empty((1, height, width, channels), out.dtype).transpose(0, 3, 1, 2)
    source = np.array([image.ctypes.data], np.int64)
    serve(Samples(source, shape), keys, [describe_output(table, out)], first=0, last=1)
    _blend(fuzz, table, out)
    return "served"


def _blend(fuzz: Fuzz, table: Table, out: np.ndarray) -> None:
    """Mix rows from two samples of noise, by any shares, in any box, to any row."""
    converts = fuzz.pick(False, True)
    size = out[0].size * (1 if converts else out.itemsize)
    samples = fuzz.rng.integers(0, 256, (2, size), np.uint8)
    rows = np.zeros(3, load().records["Blended"])
    rows["own"], rows["partner"] = samples.ctypes.data, samples.ctypes.data + size
    for record in rows:
        record["row"] = fuzz.pick(0, 0, 0, -1, 1, *HUGE)
        record["after"] = fuzz.pick(0, 1, *HUGE)
        for name in ("share", "partner_share"):
            record[name] = fuzz.pick(*REALS, *EXTREME)
        for name in ("top", "left", "height", "width"):
            record["box"][name] = fuzz.pick(0, 0, 1, 2, 7, *(HUGE if fuzz.wild else (3,)))
    with contextlib.suppress(CoreError, ValueError):
        Blending(rows, describe_output(table, out), converts=converts).write()


def _pixels(op: Any) -> int:
    """Return the number of pixels of the image that an op makes; 0 if its record does not have the size."""
    numbers = load().numbers
    if op["code"] == numbers["OP_WINDOW"]:
        size = op["window"]["box"]
    elif op["code"] == numbers["OP_RESIZE"]:
        size = op["resize"]
    elif op["code"] == numbers["OP_WARP"]:
        size = op["warp"]
    elif op["code"] == numbers["OP_CV_WARP"]:
        size = op["cv_warp"]
    else:
        return 0
    return int(size["height"]) * int(size["width"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="seconds to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first table")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    end, seed = time.monotonic() + arguments.seconds, arguments.seed
    while time.monotonic() < end:
        outcomes[run_once(seed)] += 1
        seed += 1
    sys.stdout.write(
        f"{seed - arguments.seed} tables from seed {arguments.seed} on: {dict(outcomes)}\n"
    )


if __name__ == "__main__":
    main()
