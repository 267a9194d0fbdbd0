"""Tables that a transform is compiled to: their draws, and damaged tables, which the core refuses."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from torchvision import transforms as v1

from data import ArrayStore
from fastdata.pixels.core.calls import CoreError, Keys, Table, draw
from fastdata.pixels.core.library import load
from fastdata.pixels.program import Program
from fastdata.pixels.random_numbers import draw_integers, draw_uniform, sample_keys
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.split import split_transform
from fastdata.pixels.steps import Step, child, sequence
from fuzz_core import run_once
from levels import Levels
from test_transforms import images

pytestmark = pytest.mark.usefixtures("levels_agree")  # pixels of all levels of instruction sets

MACHINE = {"fuses": False, "resizes_fast": True, "chooses_order": False}
KEYS = sample_keys(7, 2, np.arange(300))
ONE = Keys(7, np.full(1, 2), np.zeros(1, np.int64))


def steps_of(*codes: str) -> np.ndarray:
    """Records of steps whose other fields are 0."""
    steps = np.zeros(len(codes), load().records["STEP"])
    steps["fills"] = 1
    steps["code"] = [load().numbers[code] for code in codes]
    return steps


def table_of(*rows: tuple[str, int, int]) -> Table:
    """Return a table with a step for each (code, place of the first child, number of children)."""
    steps = steps_of(*(code for code, _, _ in rows))
    for step, (_, first, count) in zip(steps, rows, strict=True):
        step["first"], step["count"] = first, count
    return Table(steps, {}, **MACHINE)


def reason_of(table: Table) -> str:
    with pytest.raises(CoreError) as refused:
        draw(table, ONE, np.array([[3, 8, 9]], np.int32))
    assert refused.value.place == 0
    return refused.value.reason


@pytest.mark.parametrize(
    "rows",
    [
        [("STEP_SEQUENCE", 0, 1)],
        [("STEP_SEQUENCE", 1, 1), ("STEP_CHOICE", 1, 1)],
        [
            ("STEP_SEQUENCE", 1, 2),
            ("STEP_SEQUENCE", 3, 1),
            ("STEP_SEQUENCE", 3, 1),
            ("STEP_FLIP", 0, 0),
        ],
        [("STEP_SEQUENCE", 1, 9)],
        [("STEP_SEQUENCE", 1, -1)],
        [("STEP_SEQUENCE", 0, 0), ("STEP_FLIP", 0, 0)],
        [("STEP_SEQUENCE", 1, 1), ("STEP_LENGTH", 0, 0)],
    ],
)
def test_tables_that_are_no_trees_are_refused(rows: list[tuple[str, int, int]]) -> None:
    """A step that is its own child, one of two parents, children beyond the end, and what cannot be drawn."""
    assert reason_of(table_of(*rows)) == "table"


def test_deep_tables_do_not_overflow_the_stack() -> None:
    """A million steps within each other are refused."""
    count = 1_000_000
    steps = steps_of("STEP_SEQUENCE").repeat(count)
    steps["first"], steps["count"] = np.arange(1, count + 1), 1
    steps["first"][-1] = steps["count"][-1] = 0
    assert reason_of(Table(steps, {}, **MACHINE)) == "table"


def test_more_ops_than_there_is_room_for_are_refused() -> None:
    """The error names the sample and its shape."""
    store = ArrayStore(images(3, (6, 5)))
    step = Step("resize", {"height": 6, "width": 5})
    program = Program((step,) * 300, store.spec)
    with pytest.raises(
        ValueError,
        match=r"sample 2, of shape \(3, 6, 5\), cannot be transformed in a batch: .* than the core",
    ):
        program.run_one(store, 2, 0, 0)


@pytest.mark.parametrize("border", [2**30, -9])
def test_a_crop_of_what_cannot_be_padded_is_refused(border: int) -> None:
    """Padding a padded image again is refused if the image in between is too large or has no pixel."""
    steps = steps_of("STEP_SEQUENCE", "STEP_CROP")
    steps["first"][0] = steps["count"][0] = 1
    crop = steps["crop"]
    for side in ("left", "top", "right", "bottom"):
        crop["border"][side][1] = border
    crop["height"][1] = crop["width"][1] = 5
    crop["pads_if_needed"][1] = True
    assert reason_of(Table(steps, {}, **MACHINE)) == "outside"


@pytest.mark.parametrize("seed", range(5))
def test_random_tables_are_served_or_refused(seed: int, levels_agree: Levels) -> None:
    """No random table ends the process; ``.ci/run`` tries many more of them, under AddressSanitizer."""
    levels_agree.compares = False  # some have infinities
    outcomes = {run_once(1000 * seed + number) for number in range(100)}
    assert {"served", "table"} <= outcomes


def test_fields_are_written_by_their_names() -> None:
    """A field is written where C reads it, and one that a record does not have is an error."""
    store = ArrayStore(images(1, (6, 5)))
    fields = {"height": 3, "width": 2, "interpolation": "NEAREST", "domain": "PIL_DOMAIN"}
    served = Program((Step("resize", fields),), store.spec).run_one(store, 0, 0, 0)
    assert served.shape == (3, 3, 2)
    wrong = Program((Step("resize", {**fields, "heigth": 3}),), store.spec)
    with pytest.raises(ValueError, match="heigth"):
        wrong.run_one(store, 0, 0, 0)


def test_draws_are_those_of_samplers() -> None:
    """The core's draws are the same function of key, step and number as those of samplers."""
    flip = Step("flip", {"p": 0.3}, at=5)
    crop = Step("crop", {"height": 4, "width": 3}, at=child(2, 7))
    program = Program(
        (sequence([crop]), flip), SampleSpec(shape=(3, 30, 40), dtype="uint8", form="pil")
    )
    windows = program.draw(np.arange(300), 2, 7, np.full((300, 3), (3, 30, 40), np.int32))[:, 0]
    windows = windows["window"]
    assert np.array_equal(windows["mirrors_columns"], draw_uniform(KEYS, 5, 0) < 0.3)
    for number, (side, count) in enumerate((("top", 27), ("left", 38))):
        drawn = draw_integers(KEYS, child(2, 7), number, count)
        assert np.array_equal(windows["box"][side], drawn)


def test_rotations_are_rounded_as_python_rounds() -> None:
    """Image.rotate rounds sine and cosine to 15 places."""
    step = v1.RandomRotation(180)
    plan = split_transform(step, prepared=0)
    program = Program(plan.batch_ops, SampleSpec(shape=(3, 30, 40), dtype="uint8", form="pil"))
    count = 20000
    matrices = program.draw(np.arange(count), 0, 0, np.full((count, 3), (3, 30, 40), np.int32))[
        :, 0
    ]["warp"]["map"]
    degrees = -180 + draw_uniform(sample_keys(0, 0, np.arange(count)), 0, 0) * 360
    for matrix, angle in zip(matrices.tolist(), degrees.tolist(), strict=True):
        radians = -math.radians(angle % 360.0)
        assert matrix[:2] == [round(math.cos(radians), 15), round(math.sin(radians), 15)]


def test_magnitudes_are_asked_for_each_size_once() -> None:
    """The user's transform computes the magnitudes of a size once, for all batches of a program."""
    asked = []

    class Counted(v1.RandAugment):
        __torchvision_equal__ = "RandAugment"

        def _augmentation_space(self, bins: int, size: tuple[int, int]) -> dict[str, Any]:
            asked.append(size)
            space: dict[str, Any] = super()._augmentation_space(bins, size)
            return space

    sizes = [(8 + n % 20, 9 + n // 20) for n in range(60)]
    store = ArrayStore(images(60, *sizes))
    plan = split_transform((Counted(), v1.CenterCrop(8)), prepared=0)
    program = Program(plan.batch_ops, store.spec)
    out = np.empty((60, 3, 8, 8), np.uint8)
    for _ in range(2):
        program.run(store, np.arange(60), 0, 0, out)
    known = set(sizes)
    assert [size for size in asked if size in known] == list(
        dict.fromkeys(size for size in asked if size in known)
    )
    fresh = Program(plan.batch_ops, store.spec)
    assert all(np.array_equal(out[index], fresh.run_one(store, index, 0, 0)) for index in range(60))


def test_a_batch_may_have_more_sizes_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A perspective is drawn for a whole batch at once: all its sizes need their magnitudes, also in two threads."""
    monkeypatch.setattr("fastdata.pixels.program._MOST_LEVELS", 4)
    store = ArrayStore(images(18, *((8 + n, 9) for n in range(18))))
    steps = (v1.RandAugment(), v1.RandomPerspective(), v1.CenterCrop(8))
    program = Program(split_transform(steps, prepared=0).batch_ops, store.spec)
    out = np.empty((18, 3, 8, 8), np.uint8)
    halves = np.split(np.arange(18), 2)
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda half: program.run(store, half, 0, 0, out[half[0] : half[0] + 9]), halves
            )
        )
    assert all(
        np.array_equal(out[index], program.run_one(store, index, 0, 0)) for index in range(18)
    )
