"""The road the benchmark compares with: torchvision's ImageFolder and transforms under torch's DataLoader.

Where torchvision cannot be imported, the few classes here stand in for it. They give the same pixels with the same
Pillow calls and the same random draws (tests/test_bench.py compares them), and name the class they equal in
``__torchvision_equal__``, by which ``plan_transform`` knows them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from fastdata.decode import IMAGE_EXTENSIONS

__all__ = ["Rival", "find_rival"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Compose:
    """Applies one transform after the other."""

    __torchvision_equal__ = "Compose"

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Resize:
    """Brings the shorter side to ``size`` pixels, bilinear."""

    __torchvision_equal__ = "Resize"
    interpolation = "bilinear"
    max_size = None
    antialias = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        short, long = min(width, height), max(width, height)
        other = int(self.size * long / short)
        new = (self.size, other) if width <= height else (other, self.size)
        return image if new == image.size else image.resize(new, Image.Resampling.BILINEAR)


class CenterCrop:
    """Cuts ``size`` x ``size`` pixels out of the middle; the image must be at least that large."""

    __torchvision_equal__ = "CenterCrop"

    def __init__(self, size: int) -> None:
        self.size = (size, size)

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.size
        top = round((image.height - height) / 2.0)
        left = round((image.width - width) / 2.0)
        return image.crop((left, top, left + width, top + height))


class RandomCrop:
    """Cuts ``size`` x ``size`` pixels out of a random place; the image must be at least that large."""

    __torchvision_equal__ = "RandomCrop"
    padding = None
    pad_if_needed = False
    fill = 0
    padding_mode = "constant"

    def __init__(self, size: int) -> None:
        self.size = (size, size)

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.size
        if image.size == (width, height):
            return image
        top = int(torch.randint(0, image.height - height + 1, (1,)).item())
        left = int(torch.randint(0, image.width - width + 1, (1,)).item())
        return image.crop((left, top, left + width, top + height))


class RandomHorizontalFlip:
    """Mirrors every other image."""

    __torchvision_equal__ = "RandomHorizontalFlip"
    p = 0.5

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < self.p else image


class PILToTensor:
    """Gives uint8 (C, H, W)."""

    __torchvision_equal__ = "PILToTensor"

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class ToTensor:
    """Gives float32 (C, H, W) in 0 to 1."""

    __torchvision_equal__ = "ToTensor"

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


class Normalize:
    """Subtracts ``mean`` and divides by ``std``, per channel."""

    __torchvision_equal__ = "Normalize"
    inplace = False

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        mean = torch.as_tensor(self.mean, dtype=tensor.dtype).view(-1, 1, 1)
        std = torch.as_tensor(self.std, dtype=tensor.dtype).view(-1, 1, 1)
        return tensor.clone().sub_(mean).div_(std)


class ImageFolder(Dataset[tuple[Any, int]]):
    """Class folders of images, decoded at every access."""

    def __init__(
        self,
        root: str,
        transform: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> None:
        self.transform = transform
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (os.path.join(folder, name), label)
            for label, name_of_class in enumerate(classes)
            for folder, _, names in sorted(os.walk(os.path.join(root, name_of_class), followlinks=True))
            for name in sorted(names)
            if (is_valid_file or _is_image)(os.path.join(folder, name))
        ]
        if not self.samples and not allow_empty:
            raise FileNotFoundError(f"no images under {root}")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB")
        return (self.transform(image) if self.transform else image), label


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """The classes of the vanilla road.

    Args:
        name: what the table calls it.
        folder: the ImageFolder class.
        transforms: holder of the transform classes, by torchvision's names.
    """

    name: str
    folder: Callable[..., Dataset[tuple[Any, int]]]
    transforms: Any

    def training_transform(self, resize_px: int, crop_px: int, dtype: str) -> Any:
        """Resize and centre crop to a square, then random crop and flip, as uint8 or as normalised float32."""
        t = self.transforms
        last = [t.PILToTensor()] if dtype == "uint8" else [t.ToTensor(), t.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
        square = [t.Resize(resize_px), t.CenterCrop(resize_px)]
        return t.Compose([*square, t.RandomCrop(crop_px), t.RandomHorizontalFlip(), *last])


def find_rival() -> Rival:
    """Choose torchvision if it can be imported, else the equal classes of this module; the name says which."""
    try:
        torchvision = importlib.import_module("torchvision")
        transforms = importlib.import_module("torchvision.transforms")
    except (ImportError, RuntimeError):  # RuntimeError: torchvision was built for another torch
        return Rival(name="torchvision's equal", folder=ImageFolder, transforms=_Equal)
    return Rival(name="torchvision", folder=torchvision.datasets.ImageFolder, transforms=transforms)


class _Equal:
    """The classes of this module by torchvision's names."""

    Compose = Compose
    Resize = Resize
    CenterCrop = CenterCrop
    RandomCrop = RandomCrop
    RandomHorizontalFlip = RandomHorizontalFlip
    PILToTensor = PILToTensor
    ToTensor = ToTensor
    Normalize = Normalize


def _is_image(path: str) -> bool:
    return path.lower().endswith(IMAGE_EXTENSIONS)
