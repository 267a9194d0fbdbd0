"""Readers of albumentations' transforms that move pixels: affine, perspective and distortions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fastdata.pixels.albumentations_geometry import border_fill
from fastdata.pixels.known import known_name
from fastdata.pixels.opencv_warps import opencv_program, opencv_remap
from fastdata.pixels.state import Reader, State, UnknownStepError, need_uint8
from fastdata.pixels.steps import Fields, Fill, Step

_INTERPOLATIONS = {0: "NEAREST", 1: "BILINEAR", 3: "BILINEAR"}
"""Interpolations by OpenCV's numbers: nearest, linear, and area, which warps treat as linear."""
_MOST_CELLS = 127  # MOST_CELLS of cv_distort.c
_MOST_SIGMA = 127  # MOST_RADIUS of cv_elastic.c is four times that
_APPROXIMATE = 17
"""Side of the kernel of an elastic transform that is approximate, in pixels."""
_BORDERS = ("CV_CONSTANT", "CV_REPLICATE", "CV_REFLECT", "CV_WRAP", "CV_REFLECT_101")


def _read_warp(
    transform: Any, state: State, find_program: Callable[[], Fields] = opencv_program
) -> tuple[Fields, Fill]:
    """Read the fields of a ``CvWarp``, and the fill."""
    need_uint8(state)
    if state.channels not in (1, 3):
        raise UnknownStepError("gets images with neither 1 nor 3 channels")
    given = transform.mask_interpolation if state.is_mask else transform.interpolation
    if given not in _INTERPOLATIONS:
        raise UnknownStepError("has an interpolation that is not supported")
    fields = {
        "interpolation": _INTERPOLATIONS[given],
        "border": _BORDERS[transform.border_mode],
        **find_program(),
    }
    return fields, border_fill(transform, state)


def _read_affine(transform: Any, state: State) -> Step:
    """Read Affine and ShiftScaleRotate."""
    warp, fill = _read_warp(transform, state)
    moves = transform.translate_px or transform.translate_percent or {"x": (0, 0), "y": (0, 0)}
    is_relative = transform.translate_px is None
    if not is_relative and any(int(low) > int(high) for low, high in moves.values()):
        raise UnknownStepError("has an empty range of translations")
    return state.step(
        "cv_affine",
        fill=fill,
        warp=warp,
        frame="EXPANDS_FRAME" if transform.fit_output else "KEEPS_FRAME",
        is_relative=is_relative,
        keeps_ratio=transform.keep_ratio,
        is_balanced=transform.balanced_scale,
        degrees=transform.rotate,
        scale_x=transform.scale["x"],
        scale_y=transform.scale["y"],
        move_x=moves["x"],
        move_y=moves["y"],
        shear_x=transform.shear["x"],
        shear_y=transform.shear["y"],
    )


def _read_rotate(transform: Any, state: State) -> Step:
    """Read Rotate and SafeRotate."""
    warp, fill = _read_warp(transform, state)
    frame = "KEEPS_FRAME"
    if known_name(transform) == "A.SafeRotate":
        frame = "SHRINKS_IMAGE"
    elif transform.crop_border:
        frame = "CROPS_BORDER"
    return state.step(
        "cv_affine",
        fill=fill,
        warp=warp,
        frame=frame,
        degrees=transform.limit,
        scale_x=(1, 1),
        scale_y=(1, 1),
    )


def _read_alone(
    transform: Any, state: State, find_program: Callable[[], Fields] = opencv_program
) -> tuple[Fields, Fill]:
    """Read the fields and the fill of a transform that passes its fill to OpenCV unchanged."""
    warp, fill = _read_warp(transform, state, find_program)
    # OpenCV uses a single number for the first channel, and fills the others with 0.
    is_one = np.size(transform.fill_mask if state.is_mask else transform.fill) == 1
    return {**warp, "fills_first": is_one}, fill


def _read_perspective(transform: Any, state: State) -> Step:
    warp, fill = _read_alone(transform, state)
    return state.step(
        "cv_perspective",
        fill=fill,
        warp=warp,
        keeps_size=transform.keep_size,
        expands=transform.fit_output,
        scale=transform.scale,
    )


def _read_grid(transform: Any, state: State) -> Step:
    warp, fill = _read_alone(transform, state, opencv_remap)
    if transform.num_steps > _MOST_CELLS:
        raise UnknownStepError(f"has more than {_MOST_CELLS} steps")
    return state.step(
        "cv_grid",
        fill=fill,
        warp=warp,
        cells=transform.num_steps,
        is_normalized=transform.normalized,
        limit=transform.distort_limit,
    )


def _read_lens(transform: Any, state: State) -> Step:
    warp, fill = _read_alone(transform, state, opencv_remap)
    return state.step(
        "cv_lens",
        fill=fill,
        warp=warp,
        is_fisheye=transform.mode == "fisheye",
        limit=transform.distort_limit,
    )


def _read_elastic(transform: Any, state: State) -> Step:
    warp, fill = _read_alone(transform, state, opencv_remap)
    if not 1 <= transform.sigma <= _MOST_SIGMA:
        raise UnknownStepError(f"has a sigma that is not between 1 and {_MOST_SIGMA}")
    return state.step(
        "cv_elastic",
        fill=fill,
        warp=warp,
        size=_APPROXIMATE if transform.approximate else 0,
        is_shared=transform.same_dxdy,
        is_uniform=transform.noise_distribution == "uniform",
        alpha=transform.alpha,
        sigma=transform.sigma,
    )


READERS: dict[str, Reader] = {
    "A.Affine": _read_affine,
    "A.ElasticTransform": _read_elastic,
    "A.GridDistortion": _read_grid,
    "A.OpticalDistortion": _read_lens,
    "A.Perspective": _read_perspective,
    "A.Rotate": _read_rotate,
    "A.SafeRotate": _read_rotate,
    "A.ShiftScaleRotate": _read_affine,
}
"""A reader for each transform, by its name with ``A.`` before it."""
