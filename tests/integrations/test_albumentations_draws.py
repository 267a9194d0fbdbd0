"""Crops, borders, turns and compositions are drawn as albumentations draws them, in 20,000 draws of each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from albumentations_cases import Served, albumentations, assert_alike, parameters
from test_albumentations_compose import COMPOSITIONS

DRAWS = 20_000
SHAPE = (31, 40, 3)
A = albumentations


def test_random_crops() -> None:
    """Left and top of the box."""
    transform = A.RandomCrop(20, 30)
    [boxes] = Served(transform, np.zeros(SHAPE, np.uint8)).ops(SHAPE, DRAWS)["window"]["box"].T
    coords = [each["crop_coords"] for each in parameters(transform, np.zeros(SHAPE), DRAWS)]
    lefts, tops = np.array(coords).T[:2]
    assert_alike(boxes["left"], lefts)
    assert_alike(boxes["top"], tops)


@pytest.mark.parametrize("make", [A.PadIfNeeded, A.RandomCrop, A.CenterCrop])
def test_borders_at_random_places(make: Any) -> None:
    """Left and top border, of PadIfNeeded and of crops that pad first."""
    how = {} if make is A.PadIfNeeded else {"pad_if_needed": True}
    name = "pad_position" if how else "position"
    transform = make(40, 51, **how, **{name: "random"})
    ops = Served(transform, np.zeros(SHAPE, np.uint8)).ops(SHAPE, DRAWS)
    theirs = [
        each.get("pad_params", each) for each in parameters(transform, np.zeros(SHAPE), DRAWS)
    ]
    for side in ("left", "top"):
        ours = ops[:, 0]["window"]["border"][side]
        assert_alike(ours, [each[f"pad_{side}"] for each in theirs])


@pytest.mark.parametrize(
    ("make", "name"), [(A.RandomRotate90, "factor"), (A.D4, "group_element")], ids=["turns", "D4"]
)
def test_symmetries(make: Any, name: str) -> None:
    """How often each of them comes."""
    transform = make()
    ops = Served(transform, np.zeros(SHAPE, np.uint8)).ops(SHAPE, DRAWS)
    drawn = [each[name] for each in parameters(transform, np.zeros(SHAPE), DRAWS)]
    found = [op.tobytes() for op in ops]
    # Which op is which symmetry, test_albumentations_compose.py shows by pixels.
    ours, theirs = (np.unique(each, return_counts=True)[1] for each in (found, drawn))
    assert len(ours) == len(theirs)
    expected = DRAWS / len(ours)
    for counts in (ours, theirs):
        assert np.abs(counts - expected).max() < 4 * np.sqrt(expected)


@pytest.mark.parametrize("case", COMPOSITIONS)
def test_compositions(case: str) -> None:
    """How often each outcome comes."""
    array = np.zeros((4, 4, 3), np.uint8)
    array[0, 1] = 255  # tells all eight symmetries apart
    transform = COMPOSITIONS[case]()
    transform.set_random_state(np.random.default_rng(3), random.Random(3))
    theirs = [transform(image=array)["image"][..., 0].argmax() for _ in range(DRAWS)]
    ours = [pixels[..., 0].argmax() for pixels in Served(transform, array).pixels([array] * DRAWS)]
    assert_alike(ours, theirs)
