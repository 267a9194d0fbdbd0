"""The data of milesial's Pytorch-UNet: dicts of an image and a mask, resized when they are read."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, random_split

CHANGES = {
    "from torch.utils.data import DataLoader, Dataset, random_split": (
        "from torch.utils.data import Dataset, random_split\n"
        "from fastdata import CachedDataset, DataLoader"
    ),
    "random_split(dataset,": "random_split(CachedDataset(dataset),",
}
IS_DRAWN = False


class BasicDataset(Dataset[Any]):
    def __init__(self, images: Path, masks: Path, scale: float) -> None:
        self.images, self.masks, self.scale = images, masks, scale
        self.ids = sorted(path.stem for path in images.iterdir())
        self.mask_values = sorted({v for i in self.ids for v in np.unique(self.open_mask(i))})

    def open_mask(self, name: str) -> Any:
        return Image.open(next(self.masks.glob(f"{name}.*")))

    def preprocess(self, image: Any, is_mask: bool) -> Any:
        size = int(self.scale * image.width), int(self.scale * image.height)
        filters = Image.Resampling
        pixels = np.asarray(image.resize(size, filters.NEAREST if is_mask else filters.BICUBIC))
        if is_mask:
            mask = np.zeros(pixels.shape, np.int64)
            for number, value in enumerate(self.mask_values):
                mask[pixels == value] = number
            return mask
        pixels = pixels.transpose(2, 0, 1)
        return pixels / 255.0 if (pixels > 1).any() else pixels

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        name = self.ids[index]
        image = self.preprocess(Image.open(next(self.images.glob(f"{name}.*"))), is_mask=False)
        mask = self.preprocess(self.open_mask(name), is_mask=True)
        return {
            "image": torch.as_tensor(image.copy()).float().contiguous(),
            "mask": torch.as_tensor(mask.copy()).long().contiguous(),
        }


def make_loader(root: Path, workers: int) -> Any:
    dataset = BasicDataset(root / "imgs", root / "masks", scale=0.5)
    tenth = len(dataset) // 10
    split = torch.Generator().manual_seed(0)
    train, _ = random_split(dataset, [len(dataset) - tenth, tenth], generator=split)
    return DataLoader(train, batch_size=4, shuffle=True, num_workers=workers, pin_memory=True)
