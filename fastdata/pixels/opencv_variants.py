"""Arithmetic of the installed OpenCV, found by comparing the pixels of one image.

Builds of OpenCV differ: they round a product and a sum once or twice, or use vectors of different
lengths. A step that depends on this is compared with the user's own library, once per process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fastdata.pixels.arrays import Array
from fastdata.pixels.opencv_trials import try_step
from fastdata.pixels.state import UnknownStepError
from fastdata.pixels.steps import Step

_HEIGHT = 179
_WIDTH = 331
"""The size of the image. OpenCV starts threads for images of 2**16 pixels or more, and workers that
are forked later would wait for these threads forever. The width is not a multiple of a vector."""
_ODD = 0x9E3779B1


def matching(apply: Callable[[Array], Array], candidates: Iterable[Step]) -> Step:
    """Return the first step that gives the pixels of ``apply``.

    Args:
        apply: takes and returns an image, uint8 (H, W, 3).
        candidates: steps with fixed values.

    Raises:
        UnknownStepError: no candidate gives these pixels.
    """
    image_HWC = _image()
    # A copy, because the library may write to its input.
    wanted_HWC = apply(image_HWC.copy())
    for step in candidates:
        made_HWC, _ = try_step(step, image_HWC)
        if np.array_equal(made_HWC, wanted_HWC):
            return step
    raise UnknownStepError("differs in this build of OpenCV")


def _image() -> Array:
    """Return an image whose pixels have 59,249 different colours, uint8 (H, W, 3)."""
    # Multiples of an odd number reach all colours of 24 bits before one repeats.
    numbers = np.arange(_HEIGHT * _WIDTH, dtype=np.uint32)
    numbers *= _ODD
    colours = numbers.view(np.uint8).reshape(_HEIGHT, _WIDTH, 4)
    return np.ascontiguousarray(colours[:, :, 1:])
