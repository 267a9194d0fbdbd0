"""The data of PyTorch's transfer-learning tutorial: class folders, random crops, flips."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader": "from fastdata import DataLoader, ImageFolder",
    "datasets.ImageFolder(": "ImageFolder(",
}

TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
)


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.ImageFolder(root / "train", TRAIN)
    return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
