"""Drawn images that compress like photographs, for measurements without a dataset."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image


def write_photos(
    root: Path, *, count: int, classes: int = 8, size: tuple[int, int] = (512, 384)
) -> None:
    """Write JPEG files into class folders, in turns. Equal arguments give equal pixels.

    Args:
        root: folder for the class folders; made if needed.
        count: number of images.
        classes: number of classes.
        size: (width, height) in pixels.
    """

    def write(index: int) -> None:
        path = root / f"class{index % classes}" / f"{index:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo(index, size)).save(path, quality=90)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL
        list(pool.map(write, range(count)))


def photo(seed: int, size: tuple[int, int] = (512, 384)) -> npt.NDArray[np.uint8]:
    """Return smooth shapes of many colours with grain, uint8 (height, width, 3).

    The grain makes a JPEG of 512 x 384 px take 60 to 110 KB at quality 90, as photographs do.
    """
    rng = np.random.default_rng(seed)
    width, height = size
    colours = rng.integers(0, 256, (2 + height // 32, 2 + width // 32, 3), dtype=np.uint8)
    shapes = np.asarray(Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC))
    return np.clip(shapes + rng.normal(0, 9, (height, width, 1)), 0, 255).astype(np.uint8)
