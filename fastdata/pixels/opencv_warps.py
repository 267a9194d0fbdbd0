"""The core's program that warps images like the installed OpenCV, found by comparing pixels.

OpenCV up to 4 rounds places to 1/32 of a pixel. OpenCV 5 computes them in floats. How long its
vectors are, and whether it rounds each product, depends on the processor.
"""

from __future__ import annotations

import functools
import sys

import numpy as np

from fastdata.pixels.arrays import Shape
from fastdata.pixels.opencv_trials import try_step
from fastdata.pixels.state import UnknownStepError
from fastdata.pixels.steps import Fields, Step

_PROGRAMS: tuple[Fields, ...] = (
    {"lanes": 0, "fuses": False},
    {"lanes": 16, "fuses": True},
    {"lanes": 8, "fuses": True},
    {"lanes": 8, "fuses": False},
)
"""Fields of a ``CvWarp``: no vectors (OpenCV up to 4), vectors of 16 floats (AVX2), or vectors of 8
(NEON; SSE4 does not fuse products)."""

# Far from the image, places are rounded to large steps, so the programs differ in many pixels. Rows
# are 14 pixels longer than a multiple of 16, so vectors of 8 and of 16 floats end at different
# columns.
_FAR: Fields = {"degrees": (1, 1), "scale_x": (1 / 900, 1 / 900), "scale_y": (0.9, 0.9)}
_TRIALS: tuple[tuple[str, Fields, Shape], ...] = (
    *(("cv_affine", {**_FAR, "move_x": (move, move)}, (40, 62)) for move in range(8)),
    ("cv_perspective", {"keeps_size": True, "scale": (0.1, 0.1)}, (9, 2990)),
)
"""Steps without their ``warp``, and the heights and widths of the images to try them on."""
_GRID: Shape = (9, 2990)
_ROW = 3
"""The size of the image to try a grid on, and the row that is compared."""


@functools.cache
def opencv_program() -> Fields:
    """Return the fields of a ``CvWarp`` that give the pixels of the installed OpenCV.

    OpenCV must have been imported, as albumentations does.

    Raises:
        UnknownStepError: no program of the core gives its pixels.
    """
    for program in _PROGRAMS:
        if all(_agrees(program, channels, *trial) for trial in _TRIALS for channels in (3, 1)):
            return program
    raise UnknownStepError("moves pixels by a warp that differs in this build of OpenCV")


@functools.cache
def opencv_remap() -> Fields:
    """Return the fields of a ``CvWarp`` that give the pixels of the installed OpenCV's ``remap``.

    Raises:
        UnknownStepError: no program of the core gives its pixels.
    """
    program = opencv_program()
    if not all(_remaps_alike(program, channels) for channels in (3, 1)):
        raise UnknownStepError("moves pixels by a map that differs in this build of OpenCV")
    return program


def _agrees(program: Fields, channels: int, name: str, fields: Fields, shape: Shape) -> bool:
    """Return True if a program gives the same first row of a warped image as OpenCV."""
    cv2 = sys.modules["cv2"]
    warp, rows = (cv2.warpAffine, 2) if name == "cv_affine" else (cv2.warpPerspective, 3)
    image = np.random.default_rng(0).integers(0, 256, (*shape, channels), np.uint8)
    for interpolation, number in (("NEAREST", cv2.INTER_NEAREST), ("BILINEAR", cv2.INTER_LINEAR)):
        how = {**program, "interpolation": interpolation, "border": "CV_REFLECT_101"}
        made, ops = try_step(Step(name, {**fields, "warp": how}), image)
        # One row: for two, OpenCV 5 starts threads, and this process may be forked later.
        wanted = warp(
            image,
            ops[0]["cv_warp"]["map"].reshape(3, 3)[:rows],
            (shape[1], 1),
            flags=number | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REFLECT_101,
        )
        if not np.array_equal(made[:1], wanted.reshape(1, -1, channels)):
            return False
    return True


def _remaps_alike(program: Fields, channels: int) -> bool:
    """Return True if a program gives the same row of a remapped image as OpenCV."""
    cv2 = sys.modules["cv2"]
    image = np.random.default_rng(0).integers(0, 256, (*_GRID, channels), np.uint8)
    # A grid of one cell is wider and higher than the image by its limit.
    rows, columns = (np.linspace(0, 1.3 * side, side, dtype=np.float32) for side in _GRID)
    places = np.stack([columns, np.full_like(columns, rows[_ROW])], axis=-1)
    cell: Fields = {"cells": 1, "limit": (0.3, 0.3)}
    for interpolation, number in (("NEAREST", cv2.INTER_NEAREST), ("BILINEAR", cv2.INTER_LINEAR)):
        how = {**program, "interpolation": interpolation, "border": "CV_REFLECT_101"}
        made, _ = try_step(Step("cv_grid", {**cell, "warp": how}), image)
        wanted = cv2.remap(image, places[None], None, number, borderMode=cv2.BORDER_REFLECT_101)
        if not np.array_equal(made[_ROW], wanted.reshape(-1, channels)):
            return False
    return True
