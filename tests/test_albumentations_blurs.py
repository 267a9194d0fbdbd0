"""albumentations' blurs, sharpening, compression and dropouts in whole batches, with the pixels of OpenCV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from albumentations_cases import albumentations, assert_pixels, images, refusal_of, serve
from fastdata import CachedDataset, DataLoader

A = albumentations
functional = pytest.importorskip("albumentations.augmentations.blur.functional")

SIZES = ((9, 12), (1, 1), (2, 70), (33, 20), (41, 37), (64, 21))
"""Sizes with rows that end with a whole vector of OpenCV, and with rows that do not."""


class Replayed:
    """A generator that gives the numbers that were drawn."""

    def __init__(self, *drawn: float) -> None:
        self.drawn = list(drawn)

    def uniform(self, low: float, high: float) -> float:
        return self.drawn.pop(0)


def motion_kernel(op: Any) -> np.ndarray:
    size, reach = int(op["size"]), op["size"] // 2 / 2
    shifts = Replayed(op["shift_x"] / reach, op["shift_y"] / reach)
    angle, direction = float(op["angle"]), float(op["direction"])
    kernel = functional.create_motion_kernel(size, angle, direction, True, shifts)
    return kernel.astype(np.float32) / np.sum(kernel)


def gaussian_kernel(op: Any) -> np.ndarray:
    return functional.create_gaussian_kernel_1d(float(op["sigma"]), int(op["size"]))


def sharpening(op: Any) -> dict[str, Any]:
    alpha, lightness = float(op["alpha"]), float(op["lightness"])
    matrix = A.Sharpen._Sharpen__generate_sharpening_matrix(alpha, lightness)
    return {"alpha": alpha, "sharpening_matrix": matrix}


def unsharp(op: Any) -> dict[str, Any]:
    sigma, alpha = float(op["sigma"]), float(op["alpha"])
    return {"ksize": int(op["size"]), "sigma": sigma, "alpha": alpha}


BLURS = {
    "Blur": (A.Blur(9, p=1), "cv_blur", lambda op: {"kernel": int(op["size"])}),
    "Blur, wide": (A.Blur((21, 23), p=1), "cv_blur", lambda op: {"kernel": int(op["size"])}),
    "MedianBlur": (A.MedianBlur((3, 9), p=1), "cv_blur", lambda op: {"kernel": int(op["size"])}),
    "GaussianBlur": (A.GaussianBlur(p=1), "gaussian", lambda op: {"kernel": gaussian_kernel(op)}),
    "GaussianBlur, sized": (
        A.GaussianBlur((3, 8), (0.1, 2), p=1),
        "gaussian",
        lambda op: {"kernel": gaussian_kernel(op)},
    ),
    "MotionBlur": (A.MotionBlur(11, p=1), "motion", lambda op: {"kernel": motion_kernel(op)}),
    "Sharpen": (A.Sharpen((0, 1), (0, 3), p=1), "sharpen", sharpening),
    "Sharpen, gaussian": (A.Sharpen(method="gaussian", p=1), "sharpen", sharpening),
    "UnsharpMask": (A.UnsharpMask((3, 9), p=1), "unsharp_mask", unsharp),
    "UnsharpMask, with sigma": (
        A.UnsharpMask((3, 9), (0.5, 2.0), (0.5, 1.0), 3, p=1),
        "unsharp_mask",
        unsharp,
    ),
    "ImageCompression": (
        A.ImageCompression("jpeg", (1, 100), p=1),
        "compress",
        lambda op: {"quality": int(op["quality"]), "image_type": ".jpg"},
    ),
}
"""Transforms, and the parameters of ``apply`` of the op that was drawn, by its name."""


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("case", BLURS)
def test_pixels_are_those_of_opencv(case: str, channels: int) -> None:
    """Pixels equal OpenCV's exactly: sums of floats are rounded in its order, also after the last vector of a row."""
    transform, name, params_of = BLURS[case]
    arrays = images(*SIZES, *SIZES, channels=channels)
    if channels == 1 and name == "compress":
        arrays = [array[..., None] for array in arrays]  # albumentations returns a dimension more
    assert_pixels(transform, arrays, lambda ops, shape: params_of(ops[0][name]))


@pytest.mark.parametrize("channels", [3, 1])
def test_downscaling_takes_the_pixels_of_opencv(channels: int) -> None:
    """Downscale gives OpenCV's pixels exactly, if at least one pixel of each side is left."""
    transform = A.Downscale((0.1, 1.0), p=1)
    arrays = images((13, 18), (64, 33), (40, 41), channels=channels) * 3
    scales = lambda ops, shape: {"scale": float(ops[0]["downscale"]["scale"])}  # noqa: E731
    assert_pixels(transform, arrays, scales)
    with pytest.raises(ValueError, match="leave no pixel"):
        serve(A.Downscale((0.1, 0.1), p=1), images((4, 40)))


# Dropouts


def holes_of(ops: np.ndarray, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    boxes = [op["erase"]["box"] for op in ops if op["erase"]["box"]["height"]]
    holes = [
        (box["left"], box["top"], box["left"] + box["width"], box["top"] + box["height"])
        for box in boxes
    ]
    return {"holes": np.array(holes, np.int64).reshape(-1, 4), "seed": 0}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_holes_range": (3, 9), "hole_height_range": (2, 90), "hole_width_range": (0.1, 5)},
        {"hole_height_range": (0.0, 0.99), "fill": (1, 2.9, 255)},
        {"hole_width_range": (0.5, 0.5), "fill": [7, 8, 9]},
    ],
)
def test_coarse_holes_are_filled(arguments: dict[str, Any]) -> None:
    """Holes in shares of a side or in pixels, filled with one value or one for each channel."""
    transform = A.CoarseDropout(**arguments, p=1)
    assert_pixels(transform, images((9, 12), (33, 20), (16, 16)) * 4, holes_of)


def test_holes_after_normalize_hold_the_fill_itself() -> None:
    """After Normalize, holes have the numbers that the user gave, also with p < 1."""
    arrays = images((20, 30)) * 20
    pipeline = A.Compose([A.Normalize(), A.CoarseDropout(fill=-7.25, p=0.5), A.GridDropout(p=0.2)])
    plain = serve(A.Normalize(), arrays[:1])[0]
    kinds = set()
    for pixels in serve(pipeline, arrays)[::2]:
        is_kept = (pixels == plain).all(axis=2)
        assert set(np.unique(pixels[~is_kept])) <= {np.float32(-7.25), np.float32(0)}
        kinds.add((bool((pixels == -7.25).any()), bool((pixels == 0).any())))
    assert {(False, False), (True, False), (False, True)} <= kinds


@pytest.mark.parametrize(("fill", "counts"), [("random", 400), ("random_uniform", 1)])
@pytest.mark.parametrize("is_float", [False, True])
def test_holes_of_random_values(fill: str, counts: int, is_float: bool) -> None:
    """Random values of holes are uniform over the dtype's range: one for each value, or one for each channel."""
    hole = {"num_holes_range": (1, 1), "hole_height_range": (40, 40), "hole_width_range": (40, 40)}
    dropout = A.CoarseDropout(**hole, fill=fill, p=1)
    transform = A.Compose([A.ToFloat(), dropout]) if is_float else dropout
    holes = np.stack(serve(transform, images((40, 40)) * 200)).astype(float)
    found = holes.reshape(400, -1, 3)
    assert all(len(np.unique(each)) > 200 for each in found) if counts > 1 else True
    assert counts > 1 or (found == found[:, :1]).all()
    values = found[:, 0] if is_float else found[:, 0] / 256
    assert values.min() < 0.02
    assert values.max() > 0.98
    assert abs(values.mean() - 0.5) < 0.05
    assert abs(np.corrcoef(found[:, 0].T)[0, 1]) < 0.2


@pytest.mark.parametrize("dropout", [A.CoarseDropout, A.GridDropout])
@pytest.mark.parametrize("fill_mask", [None, 5])
def test_masks_get_holes_of_their_own_value(dropout: Any, fill_mask: int | None) -> None:
    """A mask has the holes of its image, filled with fill_mask, or none if that is None."""
    items = [(np.full((20, 31, 3), 9, np.uint8), np.full((20, 31), 9, np.uint8))] * 30
    pipeline = A.Compose([dropout(fill=0, fill_mask=fill_mask, p=0.5)])
    with CachedDataset(items, transforms=pipeline) as dataset:
        assert dataset.plan.is_batched, dataset.plan.obstacle
        [[pixels, masks]] = DataLoader(dataset, batch_size=30)
    holes = pixels[..., 0] == 0
    assert 5 < holes.any(dim=(1, 2)).sum() < 25
    assert torch.equal(masks, torch.where(holes, fill_mask or 9, 9).to(torch.uint8))


# What is left to albumentations


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (A.CoarseDropout(fill="inpaint_telea"), "fills by 'inpaint_telea'"),
        (A.CoarseDropout(fill=300), "a fill outside of 0 to 255"),
        (A.CoarseDropout(fill=(1, 2)), "a fill for another number of channels"),
        (A.CoarseDropout(num_holes_range=(1, 1000)), "more than 128 holes"),
        (A.GridDropout(unit_size_range=(5, 5)), "a unit_size_range that is not supported"),
        (A.Blur((3, 201)), "kernels of more than 99 pixels"),
        (A.MedianBlur((3, 17)), "kernels of more than 15 pixels"),
        (A.MotionBlur((3, 13)), "kernels of more than 11 pixels"),
        (A.GaussianBlur(sigma_limit=(1, 99)), "a sigma_limit that is not supported"),
        (A.Sharpen(method="gaussian", kernel_size=301), "a kernel_size that is not supported"),
        (A.ImageCompression("webp"), "compresses to WebP"),
        (
            A.Downscale(interpolation_pair={"downscale": 1, "upscale": 0}),
            "an interpolation_pair that is not supported",
        ),
        (A.Compose([A.Normalize(), A.Blur()]), "after the conversion to floats"),
    ],
    ids=str,
)
def test_other_arguments_are_left_to_albumentations(transform: Any, reason: str) -> None:
    """The reason why a transform runs per sample names the argument."""
    assert reason in refusal_of(transform)


def test_a_build_of_opencv_with_other_pixels_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform whose pixels the core does not have runs per sample."""
    monkeypatch.setattr(A.Blur, "apply", lambda self, img, **params: img)
    assert "differs in this build of OpenCV" in refusal_of(A.Blur())


def test_holes_that_do_not_fit_are_refused() -> None:
    """If no hole fits into an image, the error names the sample; albumentations raises an error, too."""
    transform = A.CoarseDropout(hole_height_range=(50, 60), hole_width_range=(3, 4), p=1)
    with pytest.raises(ValueError, match="larger than sample 0, which has 9 x 12 px"):
        serve(transform, images((9, 12)))
    with pytest.raises(ValueError, match="larger than sample 0"):
        serve(A.GridDropout(unit_size_range=(10, 20), p=1), images((9, 12)))
