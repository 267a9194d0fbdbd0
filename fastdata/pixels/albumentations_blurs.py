"""Readers of albumentations' transforms that blur, sharpen and compress.

Before a transform is read, the core and the user's own OpenCV both process one image. If their
pixels differ, the transform runs per sample.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdata.pixels.opencv_variants import matching
from fastdata.pixels.state import Reader, State, UnknownStepError, need_colours
from fastdata.pixels.steps import Step

# Limits of cv_blur.c and cv_sharpen.c. OpenCV filters with kernels larger than 11 by a Fourier
# transform, which rounds differently.
_MOST_MEAN = 99
_MOST_MEDIAN = 15
_MOST_MOTION = 11
_MOST_GAUSSIAN = 255
_MOST_SIGMA = 36


def _read_blur(transform: Any, state: State) -> Step:
    return _read_box(transform, state, _MOST_MEAN, is_median=False)


def _read_median(transform: Any, state: State) -> Step:
    return _read_box(transform, state, _MOST_MEDIAN, is_median=True)


def _read_box(transform: Any, state: State, most: int, *, is_median: bool) -> Step:
    need_colours(state)
    smallest, largest = _odd_range(transform.blur_limit, most)
    trial = Step("cv_blur", {"is_median": is_median, "smallest": 5, "largest": 5})
    _need_agreement(transform, trial, kernel=5)
    return state.step("cv_blur", is_median=is_median, smallest=smallest, largest=largest)


def _read_gaussian(transform: Any, state: State) -> Step:
    need_colours(state)
    smallest, largest = transform.blur_limit
    low, high = transform.sigma_limit
    if largest >= _MOST_GAUSSIAN or high > _MOST_SIGMA or not (0 <= low <= high and high > 0):
        raise UnknownStepError("has a blur_limit or a sigma_limit that is not supported")
    trial = Step("gaussian", {"sigma": (0.9, 0.9)})
    shares = np.exp(-0.5 * (np.arange(-3, 4) / 0.9) ** 2)
    _need_agreement(transform, trial, kernel=shares / shares.sum())
    return state.step("gaussian", smallest=smallest, largest=largest, sigma=(low, high))


def _read_motion(transform: Any, state: State) -> Step:
    need_colours(state)
    smallest, largest = _odd_range(transform.blur_limit, _MOST_MOTION)
    # Weights of 1/6: many sums are halves, where the last bit decides how a value is rounded.
    trial = Step("motion", {"smallest": 11, "largest": 11, "direction": (1, 1)})
    kernel = np.zeros((11, 11), np.float32)
    kernel[5, 5:] = np.float32(1) / np.float32(6)
    _need_agreement(transform, trial, kernel=kernel)
    return state.step(
        "motion",
        smallest=smallest,
        largest=largest,
        shifts=transform.allow_shifted,
        angle=transform.angle_range,
        direction=np.clip(transform.direction_range, -1, 1).tolist(),
    )


def _read_sharpen(transform: Any, state: State) -> Step:
    need_colours(state)
    is_gaussian = transform.method == "gaussian"
    size = transform.kernel_size if is_gaussian else 0
    if size > _MOST_GAUSSIAN or (size and size % 2 == 0):
        raise UnknownStepError("has a kernel_size that is not supported")
    fields = {"size": size, "sigma": transform.sigma}
    trial = Step("sharpen", {**fields, "alpha": (0.25, 0.25), "lightness": (1, 1)})
    matrix = np.full((3, 3), -0.25, np.float32)
    matrix[1, 1] = 3
    _need_agreement(transform, trial, alpha=0.25, sharpening_matrix=matrix)
    return state.step("sharpen", **fields, alpha=transform.alpha, lightness=transform.lightness)


def _read_unsharp_mask(transform: Any, state: State) -> Step:
    need_colours(state)
    smallest, largest = _odd_range(transform.blur_limit, _MOST_GAUSSIAN)
    trial = {"smallest": 5, "largest": 5, "alpha": (0.3, 0.3), "threshold": transform.threshold}
    _need_agreement(transform, Step("unsharp_mask", trial), ksize=5, sigma=0, alpha=0.3)
    return state.step(
        "unsharp_mask",
        smallest=smallest,
        largest=largest,
        threshold=transform.threshold,
        sigma=transform.sigma_limit,
        alpha=transform.alpha,
    )


def _read_downscale(transform: Any, state: State) -> Step:
    need_colours(state)
    if any(transform.interpolation_pair.values()):  # cv2.INTER_NEAREST is 0
        raise UnknownStepError("has an interpolation_pair that is not supported")
    low, high = transform.scale_range
    if not 0 < low <= high <= 1:
        raise UnknownStepError("has a scale_range that is not supported")
    _need_agreement(transform, Step("downscale", {"scale": (0.37, 0.37)}), scale=0.37)
    return state.step("downscale", scale=(low, high))


def _read_compression(transform: Any, state: State) -> Step:
    need_colours(state)
    if transform.compression_type != "jpeg":
        raise UnknownStepError("compresses to WebP")
    lowest, highest = transform.quality_range
    for quality in (80, 100):
        trial = Step("compress", {"lowest": quality, "highest": quality})
        _need_agreement(transform, trial, quality=quality, image_type=".jpg")
    return state.step("compress", lowest=lowest, highest=highest)


def _odd_range(limit: Sequence[int], most: int) -> tuple[int, int]:
    """Return the smallest and the largest odd number that albumentations draws."""
    low, high = (max(3, value + (value % 2 == 0)) for value in limit)
    high = max(low, high)
    if high > most:
        raise UnknownStepError(f"has kernels of more than {most} pixels a side")
    return low, high


def _need_agreement(transform: Any, trial: Step, **params: Any) -> None:
    """Refuse a transform if the core and the installed OpenCV give different pixels."""
    matching(functools.partial(transform.apply, **params), [trial])


READERS: dict[str, Reader] = {
    "A.Blur": _read_blur,
    "A.Downscale": _read_downscale,
    "A.GaussianBlur": _read_gaussian,
    "A.ImageCompression": _read_compression,
    "A.MedianBlur": _read_median,
    "A.MotionBlur": _read_motion,
    "A.Sharpen": _read_sharpen,
    "A.UnsharpMask": _read_unsharp_mask,
}
"""A reader for each transform, by its name with ``A.`` before it."""
