"""The data of kuangliu's pytorch-cifar: torchvision's CIFAR10, padded crops, flips."""

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
        transforms.ToTensor(),
        transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ]
)


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.CIFAR10(root, train=True, transform=TRAIN)
    return DataLoader(dataset, batch_size=128, shuffle=True, num_workers=workers)
