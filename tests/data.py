"""Samples, datasets and images that several tests use.

A sample shows its index: its values are the index, or its image has its own grey level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from fastdata.pixels.samples import SampleSpec


class ArrayStore:
    """Samples in a list of arrays."""

    def __init__(
        self, samples: Sequence[np.ndarray], form: Any = "pil", *, gives_views: bool = True
    ) -> None:
        self.samples = list(samples)
        self.gives_views = gives_views
        shapes = {sample.shape for sample in samples}
        self.spec = SampleSpec(
            shape=shapes.pop() if len(shapes) == 1 else None, dtype=samples[0].dtype.name, form=form
        )

    def read(self, index: int) -> np.ndarray:
        view = self.samples[index].view()
        view.flags.writeable = False
        return view

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        return np.array([self.samples[i].ctypes.data for i in index_B.tolist()], np.int64)

    def jpeg_files(self, index_B: np.ndarray) -> None:
        return None

    def shape(self, index: int) -> tuple[int, ...]:
        return self.samples[index].shape

    def read_into(self, index: int, out: np.ndarray) -> None:
        out[...] = self.samples[index]

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        np.stack([self.samples[i] for i in index_B.tolist()], out=out_B)


def level_samples(
    count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8
) -> list[tuple[torch.Tensor, int]]:
    """Return ``count`` samples: a tensor of ``shape`` whose every value is the index, and the index."""
    return [(torch.full(shape, index, dtype=dtype), index) for index in range(count)]


class Levels(Dataset[Any]):
    """The samples of ``level_samples``, made when they are read. Values wrap at 251."""

    def __init__(self, count: int, shape: tuple[int, ...] = (3, 5, 6)) -> None:
        self.count = count
        self.shape = shape

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        index = range(self.count)[index]
        return torch.full(self.shape, index % 251, dtype=torch.uint8), index


class Numbers(Dataset[int]):
    """The numbers below ``length``."""

    def __init__(self, length: int = 11) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return range(self.length)[index]


class Stream(IterableDataset[Any]):
    """The items of ``data`` in their order, as an iterable dataset without a length."""

    def __init__(self, data: Any = range(5)) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def test_image(index: int, size: tuple[int, int]) -> np.ndarray:
    """Return a gradient in x, one in y, and a plane that tells ``index``: uint8 (height, width, 3)."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([x, y, np.full_like(x, index * 37 % 256)], axis=-1).astype(np.uint8)


test_image.__test__ = False


def save_image(path: Path, index: int, size: tuple[int, int]) -> None:
    """Write the ``index``-th test image, of width x height pixels."""
    Image.fromarray(test_image(index, size)).save(
        path, **({"quality": 95} if path.suffix == ".jpg" else {})
    )


def photo(mode: str = "RGB", size: tuple[int, int] = (53, 35), seed: int = 0) -> Image.Image:
    """Return waves with noise, so that every JPEG coefficient is in use; ``size`` is width, height."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    bands = len(Image.new(mode, (1, 1)).getbands())
    waves = [
        127 + 80 * np.sin(x / (3 + band)) * np.cos(y / (5 - band / 2)) for band in range(bands)
    ]
    noise = np.random.default_rng(seed).normal(0, 20, (height, width, bands))
    pixels = np.clip(np.stack(waves, axis=2) + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(
        pixels[:, :, 0] if bands == 1 else pixels, mode=None if bands in (1, 3) else mode
    )
