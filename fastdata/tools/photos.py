"""Images like photographs, drawn for whoever has none at hand."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from fastdata.report import progress_bar


def write_photos(
    root: Path,
    *,
    count: int,
    classes: int = 8,
    size: tuple[int, int] = (512, 384),
    progress: bool = False,
) -> None:
    """Write JPEGs of ``size`` (width, height) into class folders, in turns.

    The same arguments give the same pixels.
    """

    def write(index: int) -> None:
        path = root / f"class{index % classes}" / f"{index:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo(index, size)).save(path, quality=90)

    bar = progress_bar(count, "drawing images", enabled=progress)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL
        for _ in pool.map(write, range(count)):
            bar.update()


def photo(seed: int, size: tuple[int, int] = (512, 384)) -> npt.NDArray[np.uint8]:
    """One image of ``size`` (width, height), uint8: smooth shapes, weaker colour, a grain."""
    rng = np.random.default_rng(seed)
    width, height = size

    def smooth(cells: int) -> npt.NDArray[np.float32]:
        """Of about unit variance, in shapes of 1/cells of the width."""
        grid = rng.standard_normal((max(2, cells * height // width), cells), dtype=np.float32)
        return np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC))

    # Amplitudes fall as the shapes get finer, as the spectrum of photographs does; the fine end and
    # the grain are set so that 512x384 takes 60 to 110 KB at quality 90, as photographs of that
    # size do.
    amplitudes = {3: 50.0, 8: 38.0, 20: 28.0, 50: 17.0, 120: 17.0}
    luma = np.full((height, width), 120.0)
    for cells, amplitude in amplitudes.items():
        luma += amplitude * smooth(cells)
    tints = [30.0 * smooth(6) + 8.0 * smooth(40) for _ in range(3)]
    luma += 9.5 * rng.standard_normal((height, width), dtype=np.float32)
    planes = np.stack([luma + tint for tint in tints], axis=-1)
    return planes.clip(0, 255).astype(np.uint8)
