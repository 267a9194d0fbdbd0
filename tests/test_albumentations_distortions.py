"""albumentations' distortions: its pixels for the same places, which are computed from the drawn ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from albumentations_cases import (
    Served,
    albumentations,
    images,
    normal_numbers,
    refusal_of,
    serve,
)
from fastdata import CachedDataset, DataLoader
from fastdata.pixels import opencv_warps
from fastdata.pixels.random_numbers import draw_uniform
from fastdata.pixels.steps import Step

A = albumentations
cv2 = pytest.importorskip("cv2")
maps = pytest.importorskip("albumentations.augmentations.geometric.functional")

SIZES = ((40, 31), (33, 147), (19, 16))
NEAREST, LINEAR, AREA, CUBIC = 0, 1, 3, 2
GAMMA = 0x9E3779B97F4A7C15  # from one number of a SplitMix64 stream to the next
Places = tuple[np.ndarray, np.ndarray]


def grid_places(transform: Any, op: Any, shape: tuple[int, ...], index: int) -> Places:
    """Return the columns and rows that pixels come from, computed from the widths of the op's cells."""
    low, high = transform.distort_limit
    key = np.array([op["cv_grid"]["key"]], np.uint64)
    count = transform.num_steps + 1
    drawn = [float(draw_uniform(key, 0, draw)[0]) for draw in range(2 * count)]
    widths = [1 + (low + each * (high - low)) for each in drawn]
    steps = {"steps_x": widths[:count], "steps_y": widths[count:]}
    if transform.normalized:
        steps = maps.normalize_grid_distortion_steps(
            shape[:2], transform.num_steps, *steps.values()
        )
    return maps.generate_grid(shape[:2], num_steps=transform.num_steps, **steps)


def lens_places(transform: Any, op: Any, shape: tuple[int, ...], index: int) -> Places:
    if transform.mode == "camera":
        return maps.get_camera_matrix_distortion_maps(shape[:2], float(op["cv_lens"]["amount"]))
    return maps.get_fisheye_distortion_maps(shape[:2], float(op["cv_lens"]["amount"]))


class Noise:
    """A generator that gives the noise of one sample."""

    def __init__(self, step: Step, key: int, index: int) -> None:
        self.step = step
        self.key = key
        self.index = index

    def standard_normal(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return the numbers that fastdata's own noise adds, in fields one below the other."""
        numbers = normal_numbers(self.step.at, self.index, (shape[0] * shape[1], shape[2]))
        return numbers.astype(dtype).reshape(shape)

    def uniform(self, low: float, high: float, size: tuple[int, ...]) -> np.ndarray:
        """Return numbers of 24 bits, each one step of the stream after the last."""
        numbers = np.arange(np.prod(size), dtype=np.uint64) * np.uint64(GAMMA)
        drawn = draw_uniform(numbers + np.uint64(self.key), 0, 0)
        shares = np.floor(drawn * 2**24) / 2**24
        return (low + shares * (high - low)).reshape(size)


def elastic_places(transform: Any, op: Any, shape: tuple[int, ...], index: int) -> Places:
    """Return the places that albumentations finds from the noise of a sample."""
    [step] = Served(transform, np.zeros(shape, np.uint8)).steps
    transform.random_generator = Noise(step, op["cv_elastic"]["key"], index)
    found = transform.get_params_dependent_on_data({"shape": shape}, {})
    return found["map_x"], found["map_y"]


def differences(transform: Any, find: Callable[..., Places], *sizes: tuple[int, int]) -> np.ndarray:
    """Return by how many levels pixels differ from those of ``apply`` with the same places."""
    found = []
    for size in sizes:
        arrays = images(size, size, channels=1 if size[0] == 33 else 3)
        ops = Served(transform, arrays[0]).ops(arrays[0].shape, len(arrays))[:, 0]
        for index, (array, pixels) in enumerate(zip(arrays, serve(transform, arrays), strict=True)):
            map_x, map_y = find(transform, ops[index], array.shape, index)
            wanted = transform.apply(array.copy(), map_x=map_x, map_y=map_y)
            assert pixels.shape == wanted.shape
            found.append(np.abs(pixels.astype(int) - wanted).ravel())
    return np.concatenate(found)


GRIDS = {
    "": {},
    "nearest": {"interpolation": NEAREST, "distort_limit": (0.2, 0.6), "border_mode": 1},
    "beyond the image": {"normalized": False, "distort_limit": (0.3, 0.9), "fill": 117.0},
    "filled in three channels": {"normalized": False, "distort_limit": 1, "fill": (1.0, 2.0, 3.0)},
    "filled in one of three": {"normalized": False, "distort_limit": 1, "fill": (90.0,)},
    "of one cell": {"num_steps": 1, "border_mode": 4, "interpolation": AREA, "normalized": False},
    "of eight cells": {"num_steps": 8, "border_mode": 2, "distort_limit": 0.9},
    "of sixteen cells": {"num_steps": 16, "border_mode": 3, "normalized": False},
}


@pytest.mark.parametrize("case", GRIDS)
def test_grids_give_the_pixels_of_apply(case: str) -> None:
    """Pixels equal those of ``apply`` exactly, for the drawn widths of cells."""
    sizes = SIZES[:1] if "channels" in case else SIZES  # the fill is for three
    transform = A.GridDistortion(**GRIDS[case], p=1)
    assert not differences(transform, grid_places, *sizes).any()


def test_more_cells_than_pixels_leave_the_first_pixel() -> None:
    """With more cells than pixels, all pixels become the first one, as in albumentations without normalization."""
    transform = A.GridDistortion(9, normalized=False, p=1)
    assert not differences(transform, grid_places, (6, 5)).any()


LENSES = {
    "": {},
    "strong": {"distort_limit": 1, "fill": 9.0},
    "nearest": {"distort_limit": (-0.5, -0.3), "interpolation": NEAREST, "border_mode": 4},
}


@pytest.mark.parametrize("case", LENSES)
def test_lenses_give_the_pixels_of_apply(case: str) -> None:
    """Pixels equal those of ``apply`` exactly, for the drawn amount."""
    transform = A.OpticalDistortion(**LENSES[case], p=1)
    assert not differences(transform, lens_places, *SIZES).any()


@pytest.mark.parametrize("interpolation", [NEAREST, LINEAR])
def test_fish_eyes_give_nearly_the_pixels_of_apply(interpolation: int) -> None:
    """Places may differ in the last bit, which moves a few of them to the next fraction of a pixel."""
    transform = A.OpticalDistortion(0.6, interpolation, mode="fisheye", border_mode=2, p=1)
    off = differences(transform, lens_places, (150, 201), (33, 147))
    assert (off > 0).mean() < 0.001
    assert interpolation == NEAREST or off.max() <= 8  # 1/32 of a pixel, with OpenCV up to 4


ELASTIC = {
    "": {"alpha": 300},
    "narrow": {"alpha": 40, "sigma": 1, "border_mode": 1},
    "approximate": {"alpha": 90, "sigma": 8, "approximate": True, "fill": 200.0},
    "the same along both sides": {"alpha": 60, "sigma": 5.3, "same_dxdy": True, "border_mode": 4},
    "uniform": {"alpha": 30, "sigma": 4, "noise_distribution": "uniform"},
    "nearest": {"alpha": 60, "sigma": 4, "interpolation": NEAREST},
    "far": {"alpha": 9000, "sigma": 9, "border_mode": 3},
}


@pytest.mark.parametrize("case", ELASTIC)
def test_elastic_transforms_give_the_pixels_of_apply(case: str) -> None:
    """Pixels equal those of ``apply`` exactly, for the drawn noise."""
    transform = A.ElasticTransform(**ELASTIC[case], p=1)
    assert not differences(transform, elastic_places, *SIZES, (1, 9)).any()


MADE = {
    "GridDistortion": lambda **how: A.GridDistortion(normalized=False, distort_limit=0.6, **how),
    "OpticalDistortion": lambda **how: A.OpticalDistortion(0.9, **how),
    "ElasticTransform": lambda **how: A.ElasticTransform(120, 5, **how),
}


@pytest.mark.parametrize("case", MADE)
def test_masks_are_distorted_with_their_images(case: str) -> None:
    """Masks are distorted by the places of their images, with their own interpolation: the nearest pixel."""
    [array, _] = images((30, 41))
    items = [(array, array[..., 0].copy())] * 6
    for interpolation in (NEAREST, LINEAR):
        transform = MADE[case](interpolation=interpolation, fill=255.0, fill_mask=255.0, p=0.9)
        with CachedDataset(items, transforms=A.Compose([transform])) as dataset:
            assert dataset.plan.is_batched, dataset.plan.obstacle
            [[batch, masks]] = DataLoader(dataset, batch_size=6)
        are_equal = np.array_equal(batch[..., 0].numpy(), masks.numpy())
        assert are_equal == (interpolation == NEAREST)
        assert len(np.unique(masks.numpy(), axis=0)) > 3


REFUSED = {
    "has an interpolation that is not supported": lambda: A.GridDistortion(interpolation=CUBIC),
    "has more than 127 steps": lambda: A.GridDistortion(128),
    "has a sigma that is not between 1 and 127": lambda: A.ElasticTransform(sigma=128),
    "has a fill that is not a uint8 value": lambda: A.OpticalDistortion(fill=0.5),
    "comes after the conversion to floats": lambda: A.Compose(
        [A.Normalize(), A.ElasticTransform()]
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_says_why(reason: str) -> None:
    """A transform with unsupported arguments runs per sample, and the plan gives the reason."""
    assert reason in refusal_of(REFUSED[reason]())


def test_images_smaller_than_the_grid_are_named() -> None:
    """An image with fewer pixels than cells is named in the error; albumentations divides by zero."""
    [array, _] = images((6, 5))
    with pytest.raises(ValueError, match=r"num_steps=7 .* sample 0, which has 6 x 5 px"):
        serve(A.GridDistortion(7, p=1), [array])


def test_another_opencv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the core does not have the pixels of the installed OpenCV, distortions run per sample."""
    remap = cv2.remap
    monkeypatch.setattr(cv2, "remap", lambda *args, **named: remap(*args, **named) ^ 1)
    opencv_warps.opencv_remap.cache_clear()
    assert "by a map that differs in this build of OpenCV" in refusal_of(A.GridDistortion())
    opencv_warps.opencv_remap.cache_clear()
