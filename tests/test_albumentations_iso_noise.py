"""ISONoise: albumentations' pixels for the same noise, and noise of the same distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from albumentations_cases import (
    Served,
    albumentations,
    assert_alike,
    images,
    normal_numbers,
    parameters,
    refusal_of,
    serve,
)
from fastdata.pixels.random_numbers import draw_uniform
from fastdata.pixels.steps import child

A = albumentations
functional = pytest.importorskip("albumentations.augmentations.pixel.functional")

GAMMA = 0x9E3779B97F4A7C15  # from one number of a SplitMix64 stream to the next
MOST_GRAINS = 63
STRONG = {"color_shift": (0.5, 1), "intensity": (0.5, 2)}


class Noise:
    """A generator that gives the noise of one sample, as the core draws it."""

    def __init__(self, op: Any, at: int, index: int) -> None:
        self.op = op
        self.at = at
        self.index = index

    def poisson(self, expected: Any, size: tuple[int, int]) -> np.ndarray:
        """Return for each number of 32 bits how many sums of probabilities it reaches."""
        [mean] = np.ravel(expected)
        numbers = np.arange(math.prod(size), dtype=np.uint64) * np.uint64(GAMMA)
        drawn = np.floor(draw_uniform(numbers + self.op["grain_key"], 0, 0) * 2**32)
        logs = [n * math.log(mean) - mean - math.lgamma(n + 1) for n in range(MOST_GRAINS)]
        sums = np.floor(np.minimum(np.cumsum(np.exp(logs)), 1) * 2**32)
        return np.searchsorted(sums, drawn, side="right").reshape(size)

    def normal(self, mean: float, deviation: float, size: tuple[int, int]) -> np.ndarray:
        numbers = normal_numbers(child(self.at, 0), self.index, size)
        return mean + deviation * numbers.astype(np.float64)


@pytest.mark.parametrize(
    ("arguments", "levels", "share"),
    [({}, 1, 1e-4), ({"intensity": (4, 9), "color_shift": (0, 0)}, 1, 1e-4), (STRONG, 12, 2e-3)],
    ids=["", "grains", "colours"],
)
def test_pixels_are_those_of_the_same_noise(
    arguments: dict[str, Any], levels: int, share: float
) -> None:
    """Very few pixels differ, most of them by one level: in OpenCV's vectors, hues below 0 become other reds."""
    transform = A.ISONoise(**arguments, p=1)
    arrays = images((40, 31), (90, 121))
    found = []
    for index, (array, pixels) in enumerate(zip(arrays, serve(transform, arrays), strict=True)):
        served = Served(transform, array)
        op = served.ops(array.shape, len(arrays))["cv_iso"][index, 0]
        noise = Noise(op, served.steps[0].at, index)
        wanted = functional.iso_noise(array, op["colour"], op["intensity"], noise)
        assert not np.array_equal(pixels, array)
        found.append(np.abs(pixels.astype(int) - wanted).ravel())
    off = np.concatenate(found)
    assert off.max() <= levels
    assert (off > 0).mean() <= share


def test_noise_is_drawn_alike() -> None:
    """Noise has albumentations' distribution in both halves of an image of two colours."""
    array = np.full((40, 200, 3), (40, 90, 60), np.uint8)
    array[20:] = (30, 60, 200)
    transform = A.ISONoise(color_shift=(1, 1), intensity=(6, 6), p=1)
    [made] = serve(transform, [array])
    wanted = transform.apply(array, color_shift=1, intensity=6, random_seed=1)
    for half in (slice(20), slice(20, 40)):
        for channel in range(3):
            assert_alike(made[half, :, channel], wanted[half, :, channel])


def test_parameters_are_drawn_alike() -> None:
    """Each parameter is uniform in its range."""
    transform = A.ISONoise(color_shift=(0.1, 0.7), intensity=(0.3, 3), p=1)
    array = np.zeros((4, 4, 3), np.uint8)
    ops = Served(transform, array).ops(array.shape, 4000)["cv_iso"][:, 0]
    theirs = parameters(transform, array, 4000)
    assert_alike(ops["colour"], [each["color_shift"] for each in theirs])
    assert_alike(ops["intensity"], [each["intensity"] for each in theirs])
    assert len(np.unique(ops["key"])) == len(np.unique(ops["grain_key"])) == 4000


def test_what_is_not_served_says_why() -> None:
    """A transform with unsupported arguments runs per sample, and the plan gives the reason."""
    assert "has an intensity above 16" in refusal_of(A.ISONoise(intensity=(1, 17)))
    assert "needs images with 3 channels" in refusal_of(A.ISONoise(), channels=1)
