"""The data of weiaicunzai's pytorch-cifar100: crops, flips and rotations by up to 15 degrees."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader": "from fastdata import CachedDataset, DataLoader",
    "DataLoader(dataset,": "DataLoader(CachedDataset(dataset),",
}

TRAIN = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.RandomRotation(15),
        transforms.ToTensor(),
        transforms.Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ]
)


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.CIFAR100(root, train=True, transform=TRAIN)
    return DataLoader(dataset, batch_size=128, shuffle=True, num_workers=workers)
