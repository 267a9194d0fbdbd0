"""Parameters of albumentations' blurs, compression and dropouts, in enough draws to tell distributions apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from albumentations_cases import Served, albumentations, assert_alike, images, parameters
from test_albumentations_blurs import BLURS

A = albumentations
DRAWS = 20_000


def numbers_of(params: dict[str, Any]) -> list[float]:
    """Return what can be compared of the parameters of ``apply``: numbers, and marks of kernels."""
    found: list[float] = []
    for value in params.values():
        if isinstance(value, np.ndarray) and value.ndim:
            found += [len(value), value.flat[value.size // 2], value.flat[0]]
        elif isinstance(value, (int, float, np.generic)) and not isinstance(value, bool):
            found.append(float(value))
    return found


@pytest.mark.parametrize("case", BLURS)
def test_parameters_have_albumentations_distributions(case: str) -> None:
    """Sizes, sigmas, shares and qualities."""
    transform, name, params_of = BLURS[case]
    array = images((24, 31))[0]
    ops = Served(transform, array).ops(array.shape, DRAWS)
    drawn = parameters(transform, array, DRAWS)
    # Sharpen's matrix is None where a Gaussian sharpens.
    names = [key for key in params_of(ops[0, 0][name]) if drawn[0][key] is not None]
    made = [params_of(op[name]) for op in ops[:, 0]]
    ours, theirs = (
        [numbers_of({key: params[key] for key in names}) for params in each]
        for each in (made, drawn)
    )
    for one, other in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert_alike(np.round(one, 9), np.round(other, 9))


def test_scales_have_albumentations_distribution() -> None:
    transform = A.Downscale((0.2, 0.9), p=1)
    array = images((24, 31))[0]
    ours = Served(transform, array).ops(array.shape, DRAWS)[:, 0]["downscale"]["scale"]
    assert_alike(ours, [each["scale"] for each in parameters(transform, array, DRAWS)])


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_holes_range": (1, 4)},
        {"num_holes_range": (2, 3), "hole_height_range": (2, 9), "hole_width_range": (3, 60)},
    ],
)
def test_holes_have_albumentations_distributions(arguments: dict[str, Any]) -> None:
    """Their number, sides and places; a hole of no height counts as one."""
    transform = A.CoarseDropout(**arguments, p=1)
    array = images((40, 53))[0]
    ops = Served(transform, array).ops(array.shape, DRAWS)
    code = ops[0, 0]["code"]
    drawn = [each["holes"] for each in parameters(transform, array, DRAWS)]
    assert_alike((ops["code"] == code).sum(axis=1), list(map(len, drawn)))
    box = ops[:, 0]["erase"]["box"]
    left, top, right, bottom = np.array([holes[0] for holes in drawn]).T
    assert_alike(box["left"], left)
    assert_alike(box["top"], top)
    assert_alike(box["width"], right - left)
    assert_alike(box["height"], bottom - top)


@pytest.mark.parametrize(
    "arguments", [{"random_offset": True}, {"unit_size_range": (4, 9), "shift_xy": (1, 2)}]
)
def test_grids_have_albumentations_distributions(arguments: dict[str, Any]) -> None:
    """The share of an image that is filled, and the first pixel that is, in 4,000 images."""
    transform = A.GridDropout(**arguments, p=1)
    arrays = [np.full((40, 53, 1), 255, np.uint8)] * 4000
    drawn = parameters(transform, arrays[0], len(arrays))
    made = [transform.apply(arrays[0].copy(), **params) for params in drawn]
    served = Served(transform, arrays[0]).pixels(arrays)
    shares = [[(image == 0).mean() for image in each] for each in (served, made)]
    firsts = [[np.argmax(image.ravel() == 0) for image in each] for each in (served, made)]
    assert_alike(*shares)
    assert_alike(*firsts)
