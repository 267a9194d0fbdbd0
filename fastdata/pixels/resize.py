"""Resize and RGB for PIL images, with the pixels of torchvision's transforms."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdata.errors import kind_of

if TYPE_CHECKING:
    from PIL import Image

Size = int | tuple[int, int]
"""The length of the shorter side, or (height, width), as torchvision's Resize takes it."""
Bound = Size | str
"""A size, or a limit for the shorter or longer side, such as "short:320" or "long:500". Images
within the limit keep their size."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Resize PIL images to the pixels of torchvision's ``Resize(size)``, bilinear."""

    size: Bound

    __torchvision_equal__ = "Resize"
    interpolation = "bilinear"
    max_size = None
    antialias = True

    def __post_init__(self) -> None:
        size: Any = self.size
        sides = size if isinstance(size, (tuple, list)) else (size, size)
        is_pair = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        if not (is_pair or re.fullmatch(r"(short|long):0*[1-9]\d*", str(size))):
            raise ValueError(
                f"resize={self.size!r} is not a size. Give the shorter side in pixels, "
                '(height, width), or a limit such as "short:320" or "long:500".'
            )

    def __call__(self, image: Any) -> Image.Image:
        from PIL import Image

        if not isinstance(image, Image.Image):
            raise TypeError(
                f"resize= needs PIL images, but the sample is {kind_of(image)}. Leave resize= out, "
                "and resize in your loader=, in prepare= of CachedDataset, or by the first step of "
                "the transform."
            )
        height, width = _resized_size(image.height, image.width, self.size)
        # Like torchvision, return an image of this size without a copy.
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling.BILINEAR)


@dataclass(frozen=True, slots=True)
class RGB:
    """Convert PIL images to mode RGB, as ``image.convert("RGB")`` in a transform does."""

    __torchvision_equal__ = "RGB"

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB")


TO_RGB = RGB()


def _resized_size(height: int, width: int, size: Bound) -> tuple[int, int]:
    """Return the height and width of an image after resizing."""
    if not isinstance(size, (int, str)):
        return size
    kind, _, number = str(size).rpartition(":")
    side = int(number)
    # int() rounds down, as in _compute_resized_output_size of torchvision's functional.py.
    shorter, longer = sorted((height, width))
    sides = side, int(side * longer / shorter)
    if kind == "long":
        sides = max(1, int(side * shorter / longer)), side
    if kind and sides > (shorter, longer):  # nothing is enlarged
        sides = shorter, longer
    return sides[::-1] if height > width else sides


@functools.cache
def pillow_chooses_order() -> bool:
    """Return True if the installed Pillow may resize columns before rows, if that is less work.

    Pillow up to 12 always resizes rows first. Each pass rounds to uint8, so the order changes the
    last bit. The rule is ``horizontal_first`` in Pillow's src/libImaging/Resample.c.
    """
    from PIL import Image

    # Compare one resize with two resizes of one pass each, rows first.
    bilinear = Image.Resampling.BILINEAR
    image = Image.fromarray((np.arange(48) ** 2 * 37 % 256).astype(np.uint8).reshape(12, 4))
    rows_first = image.resize((3, 12), bilinear).resize((3, 3), bilinear)
    return image.resize((3, 3), bilinear).tobytes() != rows_first.tobytes()
