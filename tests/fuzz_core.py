"""The core reads and writes nothing beside its memory, whatever table it is given.

    python tests/fuzz_core.py [--seconds 60] [--seed 0]

Draws and serves random trees of random steps, and some whose records are damaged, over random images. Each is served or
refused; whether memory was touched that is not its own, AddressSanitizer says, under which ``.ci/run`` has this run.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from fastdata.pixels import core

__all__ = ["run_once"]

SIDES = (1, 2, 3, 7, 16, 33, 64, 65)
SMALL = (*range(-1, 10), 16, 33, 64)
HUGE = (-(2**31), 2**31 - 1, 2**20, -1000)
REALS = (0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 3.0, 9.0, -0.5, -90.0, 33.0)
EXTREME = (np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-300, 2.0**31)
NOT_DRAWN = (
    *(
        "OP_WINDOW",
        "OP_TURN",
        "OP_SOLARIZE_ADD",
        "OP_MIX_BEGIN",
        "OP_MIX_ADD",
        "OP_MIX_END",
        "STEP_LENGTH",
    ),
    *("STEP_MAGNITUDE", "STEP_TIMM_OP", "STEP_TIMM_POLICY"),
    *("STEP_SHEAR_X", "STEP_SHEAR_Y", "STEP_TRANSLATE_X", "STEP_TRANSLATE_Y", "STEP_ROTATE"),
)
CHILD_OF = {
    "OP_RESIZE": "STEP_LENGTH",
    "STEP_AUGMENT": "STEP_MAGNITUDE",
    "STEP_POLICIES": "STEP_MAGNITUDE",
    "STEP_AUG_MIX": "STEP_MAGNITUDE",
    "STEP_PHOTOMETRIC": "STEP_SEQUENCE",
    "STEP_TIMM": "STEP_TIMM_POLICY",
    "STEP_TIMM_POLICY": "STEP_TIMM_OP",
}
DEPTH = 3
MOST_PIXELS = 1 << 20
LEVELS = 40
DTYPES = (np.uint8, np.float32, np.float64, np.float16, np.uint16, np.int32, np.int64)
"""As core.h numbers them."""


class Fuzz:
    """One random table, image and output."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.wild = self.pick(0.0, 0.0, 0.02, 0.2)
        every = sorted(name for name in core.CONSTANTS if name.startswith(("OP_", "STEP_")))
        self.codes = [
            name for name in every if name not in NOT_DRAWN or self.rng.random() < self.wild
        ]

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def table(self) -> np.ndarray:
        """Steps that are a tree, but for damage."""
        rows, waiting = [], [("STEP_SEQUENCE", 0)]
        for code, depth in waiting:  # which grows as it is walked
            children = self.children(code, depth)
            rows.append(self.step(code, len(waiting) if children else 0, len(children)))
            waiting.extend((name, depth + 1) for name in children)
        table = np.array(rows, core.STEP)
        if self.rng.random() < self.wild:
            words = table.view(np.int32).reshape(-1)
            words[self.rng.integers(len(words), size=3)] = [
                self.pick(*SMALL, *HUGE) for _ in range(3)
            ]
        return table

    def children(self, code: str, depth: int) -> list[str]:
        count = 5 if code == "STEP_PHOTOMETRIC" else int(self.rng.integers(1, 5))
        if code in CHILD_OF:
            return [CHILD_OF[code]] * count * (1 + (code == "STEP_POLICIES"))
        if code in ("STEP_CHOICE", "STEP_ORDER"):
            return ["STEP_SEQUENCE"] * count
        if code == "STEP_SEQUENCE" and depth < DEPTH:
            return [self.pick(*self.codes) for _ in range(count)]
        return []

    def step(self, code: str, first: int, count: int) -> tuple[Any, ...]:
        n = [
            int(self.pick(*HUGE) if self.rng.random() < self.wild else self.pick(*SMALL))
            for _ in range(12)
        ]
        v = [
            float(self.pick(*EXTREME) if self.rng.random() < self.wild else self.pick(*REALS))
            for _ in range(12)
        ]
        domain, filters = self.pick(0, 1, 2), (0, 2, 4)
        if self.rng.random() > self.wild:  # where domains and interpolations stand
            n[1:3] = (domain, domain) if code.startswith("OP_") else (self.pick(*filters), domain)
            n[4:6] = self.pick(0, 1, 2, 3), domain
            if code in ("OP_AFFINE", "OP_PERSPECTIVE"):
                n[1] = self.pick(*filters)
            if code == "OP_CAST":
                n[:4] = [int(self.rng.integers(most)) for most in (7, 3, 4, 2)]
            if code in ("STEP_MAGNITUDE", "STEP_TIMM_OP"):
                n[0] = core.CONSTANTS[self.pick(*self.codes, *NOT_DRAWN[-5:])]
                n[1:4], n[7:12] = (
                    (self.pick(*filters[:2]), domain, self.pick(0, 1)),
                    (1, 2, 2, 2, 2),
                )
        fill = [float(self.pick(0, 0, 9, 255)) for _ in range(4)]
        if code == "STEP_TIMM_POLICY":
            code = "STEP_SEQUENCE"
        return (
            core.CONSTANTS[code],
            first,
            count,
            self.pick(1, 1, 1, 3),
            int(self.rng.integers(2**20)),
            n,
            v,
            fill,
        )


def run_once(seed: int) -> str:
    """Draw and serve one random table; gives what became of it."""
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
        table = core.make_table(steps, known, **facts)
        try:
            return _serve(fuzz, table, image)
        except core.CoreError as refused:
            if refused.reason != "NEEDS_LEVELS" or len(known) > LEVELS:
                return refused.reason
            known[refused.step, refused.numbers[0], refused.numbers[1]] = levels


def _serve(fuzz: Fuzz, table: core.Table, image: np.ndarray) -> str:
    index, shape = fuzz.rng.integers(2**62, size=1), np.array([image.shape], np.int32)
    keys = core.Keys(0, np.zeros(1, np.int64), index)
    core.draw(table, keys, shape, is_probe=True)
    ops, after = core.draw(table, keys, shape)
    channels, height, width = after[0].tolist()
    if channels * height * width > 4 * MOST_PIXELS or any(
        _pixels(op) > MOST_PIXELS for op in ops[0]
    ):
        return "large"
    out = np.empty((1, channels, height, width), DTYPES[table.values.dtype])
    batch = core.Batch(
        table=ctypes.addressof(table),
        out_B=out.ctypes.data,
        out_bytes=out.nbytes,
        channels=channels,
        height=height,
        width=width,
        channels_last=bool(fuzz.pick(False, True)),
    )
    source = np.array([image.ctypes.data], np.int64)
    core.serve(core.Samples(source, shape), keys, [batch])
    return "served"


def _pixels(op: Any) -> int:
    """Of the image that an op makes, where its records say so."""
    places = {
        "OP_WINDOW": (6, 7),
        "OP_RESIZE": (4, 5),
        "OP_AFFINE": (0, 1),
        "OP_PERSPECTIVE": (0, 1),
    }
    of_code = {core.CONSTANTS[name]: place for name, place in places.items()}
    height, width = of_code.get(int(op["code"]), (8, 8))
    return int(op["n"][height]) * int(op["n"][width])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
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
