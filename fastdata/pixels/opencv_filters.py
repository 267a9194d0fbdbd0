"""The core's filters that resize like the installed OpenCV, found by comparing pixels."""

from __future__ import annotations

import functools
import math
import sys

import numpy as np

from fastdata.pixels.arrays import Array, Shape
from fastdata.pixels.opencv_trials import try_step
from fastdata.pixels.state import UnknownStepError
from fastdata.pixels.steps import Step

_FILTERS = (
    ("CV_NEAREST",),
    ("CV_LINEAR",),
    ("CV_IPP_CUBIC", "CV_CUBIC"),
    ("CV_AREA",),
    ("CV_LANCZOS",),
    ("CV_LINEAR_EXACT",),
    ("CV_NEAREST_EXACT",),  # OpenCV up to 4; OpenCV 5 rounds ties neither like this nor like Pillow
)
"""Filters of records.h by OpenCV's number of the interpolation (``cv2.INTER_NEAREST`` is 0)."""
_SIZES = (((8, 30), (20, 10)), ((23, 31), (29, 47)), ((40, 36), (20, 12)), ((41, 34), (19, 40)))
"""Heights and widths to try, before and after the resize."""


@functools.cache
def opencv_filter(interpolation: int) -> str:
    """Return the name in records.h of the filter that gives the pixels of the installed OpenCV.

    OpenCV must have been imported, as albumentations does.

    Raises:
        UnknownStepError: no filter of the core gives its pixels.
    """
    found = [name for name in _FILTERS[interpolation] if _agrees(name, interpolation)]
    if not found:
        raise UnknownStepError("resizes by an interpolation that differs in this build of OpenCV")
    return found[0]


def _agrees(name: str, interpolation: int) -> bool:
    """Return True if a filter gives OpenCV's pixels for grey and for coloured images."""
    cv2 = sys.modules["cv2"]
    for shape, (height, width) in _SIZES:
        for channels in (1, 3):
            image = _pattern((*shape, channels))
            fields = {"height": height, "width": width, "interpolation": name}
            found, _ = try_step(Step("resize", fields), image)
            wanted = cv2.resize(image, (width, height), interpolation=interpolation)
            if not np.array_equal(found, wanted.reshape(found.shape)):
                return False
    return True


def _pattern(shape: Shape) -> Array:
    """Return an image whose values do not repeat periodically: squares modulo a prime."""
    count = math.prod(shape)
    numbers = np.arange(count, dtype=np.int64)
    levels = (numbers**2 * 37 % 257).astype(np.uint8)
    return levels.reshape(shape)
