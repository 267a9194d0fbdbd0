"""Photo-like JPEGs for a machine that has no photographs at hand."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from fastdata.report import progress_bar

__all__ = ["photo", "write_photos"]

QUALITY = 90
# Cells of a grid across the width, amplitude. Amplitudes fall as the grids get finer, as the spectrum of photographs
# does; the fine end and the grain are set so that 512x384 takes 60 to 110 KB, as photographs of that size do.
OCTAVES = ((3, 50.0), (8, 38.0), (20, 28.0), (50, 17.0), (120, 17.0))
GRAIN = 9.5


def write_photos(
    root: Path, *, count: int, classes: int = 8, size: tuple[int, int] = (512, 384), progress: bool = False
) -> None:
    """Write ``count`` JPEGs of ``size`` (width, height) into class folders under ``root``.

    The same arguments give the same pixels. Blocks until all are written; a thread per core draws, because Pillow
    releases the GIL.
    """
    paths = [root / f"class{index % classes}" / f"{index:05}.jpg" for index in range(count)]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)

    def write(index: int) -> None:
        Image.fromarray(photo(index, size)).save(paths[index], quality=QUALITY)

    with ThreadPoolExecutor(os.cpu_count()) as pool, progress_bar(count, "drawing images", enabled=progress) as bar:
        try:
            for _ in pool.map(write, range(count)):
                bar.update()
        finally:
            pool.shutdown(cancel_futures=True)


def photo(seed: int, size: tuple[int, int] = (512, 384)) -> npt.NDArray[np.uint8]:
    """One image of ``size`` (width, height): smooth shapes of falling size, weaker colour, a grain over it all.

    Returns:
        uint8 (height, width, 3).

    Example:
        >>> photo(0, (64, 48)).shape
        (48, 64, 3)
    """
    rng = np.random.default_rng(seed)
    width, height = size
    luma = np.sum([amplitude * _smooth(rng, cells, size) for cells, amplitude in OCTAVES], axis=0)
    colour = [30.0 * _smooth(rng, 6, size) + 8.0 * _smooth(rng, 40, size) for _ in range(3)]
    grain = GRAIN * rng.standard_normal((height, width), dtype=np.float32)
    planes = [120.0 + luma + tint + grain for tint in colour]
    pixels: npt.NDArray[np.uint8] = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
    return pixels


def _smooth(rng: np.random.Generator, cells: int, size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """A random field of about unit variance whose shapes are 1/``cells`` of the width."""
    width, height = size
    grid = rng.standard_normal((max(2, cells * height // width), cells), dtype=np.float32)
    return np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
