"""albumentations' distortions are drawn as albumentations draws them, in 20,000 draws of each."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from albumentations_cases import Served, albumentations, assert_alike

A = albumentations

DRAWS = 20_000
HEIGHT, WIDTH = 13, 17
PIXELS = ((0, 0), (6, 3), (12, 16), (4, 11))
DISTORTIONS = {
    "grid": lambda: A.GridDistortion(distort_limit=(-0.4, 0.6), border_mode=1, p=1),
    "grid that is not normalized": lambda: A.GridDistortion(3, normalized=False, p=1),
    "lens": lambda: A.OpticalDistortion((-0.6, 0.9), border_mode=1, p=1),
    "fish eye": lambda: A.OpticalDistortion((-0.6, 0.9), mode="fisheye", border_mode=1, p=1),
    "elastic": lambda: A.ElasticTransform(30, 2, border_mode=1, p=1),
    "elastic, the same along both sides": lambda: A.ElasticTransform(
        20, 1, same_dxdy=True, approximate=True, border_mode=1, p=1
    ),
    "elastic, uniform": lambda: A.ElasticTransform(
        20, 2, noise_distribution="uniform", border_mode=1, p=1
    ),
}


@pytest.mark.parametrize("case", DISTORTIONS)
def test_places_are_drawn_alike(case: str) -> None:
    """Levels tell how far a pixel came along x in one channel, and along y in another one."""
    transform: Any = DISTORTIONS[case]()
    array = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    array[..., 0] = np.arange(WIDTH) * 15
    array[..., 1] = np.arange(HEIGHT)[:, None] * 20
    served = np.stack(Served(transform, array).pixels([array] * DRAWS))
    transform.set_random_state(np.random.default_rng(3), random.Random(3))
    wanted = np.stack([transform(image=array)["image"] for _ in range(DRAWS)])
    for y, x in PIXELS:
        for channel in (0, 1):
            assert_alike(served[:, y, x, channel], wanted[:, y, x, channel])
    # Both sides of a place, and places of a row, depend on each other as they do there.
    for one, other in (((6, 3, 0), (6, 3, 1)), ((4, 11, 0), (4, 9, 0))):
        first, second = (slice(None), *one), (slice(None), *other)
        assert_alike(*(each[first].astype(int) + each[second] for each in (served, wanted)))
