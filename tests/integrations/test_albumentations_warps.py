"""The draws of albumentations' warps have albumentations' distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from albumentations_cases import Served, albumentations, assert_alike, parameters

A = albumentations

DRAWS = 20_000
HEIGHT, WIDTH = 60, 91
MAPS = {
    "Affine": lambda: A.Affine(
        rotate=(-30, 50),
        scale={"x": (0.7, 1.4), "y": (0.9, 1.1)},
        translate_px={"x": (-3, 4), "y": (0, 9)},
        shear={"x": (-9, 12), "y": (0, 5)},
        p=1,
    ),
    "Affine, in parts of the side": lambda: A.Affine(
        translate_percent={"x": (-0.2, 0.1), "y": (0.0, 0.3)}, p=1
    ),
    "Affine, of one ratio": lambda: A.Affine(scale=(0.5, 1.1), keep_ratio=True, p=1),
    "Affine, balanced": lambda: A.Affine(scale=(0.5, 4.0), balanced_scale=True, p=1),
    "Affine, balanced on one side": lambda: A.Affine(
        scale={"x": (0.5, 1.0), "y": (1.0, 3.0)}, balanced_scale=True, p=1
    ),
    "Rotate": lambda: A.Rotate(p=1),
    "SafeRotate": lambda: A.SafeRotate((-20, 70), p=1),
    "Perspective": lambda: A.Perspective(keep_size=False, p=1),
    "Perspective, wide": lambda: A.Perspective((0.1, 0.4), keep_size=False, p=1),
    "Perspective, expanded": lambda: A.Perspective(keep_size=False, fit_output=True, p=1),
}


def test_shift_scale_rotate_draws_its_matrices_alike() -> None:
    """It is the one that most people use."""
    with pytest.warns(UserWarning, match="special case of Affine"):
        transform = A.ShiftScaleRotate(p=1)
    compare_matrices(transform)


@pytest.mark.parametrize("case", MAPS)
def test_matrices_are_drawn_alike(case: str) -> None:
    """Each number of a matrix has albumentations' distribution, and so has the size."""
    compare_matrices(MAPS[case]())


def compare_matrices(transform: Any) -> None:
    array = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    theirs = parameters(transform, array, DRAWS)
    drawn = Served(transform, array).ops(array.shape, DRAWS)["cv_warp"][:, 0]
    maps = drawn["map"].reshape(-1, 3, 3)
    maps[~maps.any(axis=(1, 2))] = np.eye(3)  # where nothing moves there is no op
    ours = np.linalg.inv(maps)
    ours /= ours[:, 2:, 2:]
    wanted = np.stack([params["matrix"] for params in theirs])
    for row, column in np.ndindex(3, 3):
        # What is the same in all draws, and the same after rounding, is no distribution.
        both = ours[:, row, column], wanted[:, row, column]
        if np.ptp(both) > 1e-9:
            assert_alike(*(np.round(each, 9) for each in both))
    if "max_width" in theirs[0]:
        assert_alike(drawn["width"], [params["max_width"] for params in theirs])
        assert_alike(drawn["height"], [params["max_height"] for params in theirs])


def test_frames_are_drawn_alike() -> None:
    """Those that grow with the turned image, and those that lose its borders."""
    array = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    grown = A.Affine(rotate=(-40, 40), scale=(0.5, 1.5), fit_output=True, p=1)
    theirs = [params["output_shape"] for params in parameters(grown, array, DRAWS)]
    drawn = Served(grown, array).ops(array.shape, DRAWS)["cv_warp"][:, 0]
    assert_alike(drawn["height"], [height for height, _ in theirs])
    assert_alike(drawn["width"], [width for _, width in theirs])

    cut = A.Rotate((-40, 40), crop_border=True, p=1)
    found = parameters(cut, array, DRAWS)
    box = Served(cut, array).ops(array.shape, DRAWS)["window"]["box"][:, 1]
    assert_alike(box["left"], [params["x_min"] for params in found])
    assert_alike(box["height"], [params["y_max"] - params["y_min"] for params in found])
