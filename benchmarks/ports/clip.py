"""The data of a CLIP-like training: a CSV file of paths and captions, which are tokenised when read."""

import csv
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

CHANGES = {
    "from torch.utils.data import DataLoader, Dataset": (
        "from torch.utils.data import Dataset\nfrom fastdata import CachedDataset, DataLoader"
    ),
    "        dataset,\n": "        CachedDataset(dataset),\n",
}


def to_rgb(image: Any) -> Any:
    return image.convert("RGB")


TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(
            224, scale=(0.9, 1.0), interpolation=transforms.InterpolationMode.BICUBIC
        ),
        to_rgb,
        transforms.ToTensor(),
        transforms.Normalize((0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758)),
    ]
)


def tokenize(text: str, length: int = 77) -> torch.Tensor:
    tokens = torch.zeros(length, dtype=torch.long)
    encoded = text.encode()[:length]
    tokens[: len(encoded)] = torch.tensor(list(encoded))
    return tokens


class CsvDataset(Dataset[Any]):
    def __init__(self, path: Path, transforms: Any) -> None:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.images = [path.parent / row["file"] for row in rows]
        self.captions = [row["caption"] for row in rows]
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.transforms(Image.open(self.images[index]))
        text = tokenize(self.captions[index])
        return image, text


def make_loader(root: Path, workers: int) -> Any:
    dataset = CsvDataset(root / "train.csv", TRAIN)
    return DataLoader(
        dataset,
        batch_size=64,
        shuffle=True,
        num_workers=workers,
        pin_memory=True,
        drop_last=True,
    )
