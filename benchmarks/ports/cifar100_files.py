"""The data of pytorch-cifar100, read by its own class, whose items are (label, image)."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

CHANGES = {
    "from torch.utils.data import DataLoader, Dataset": (
        "from torch.utils.data import Dataset\nfrom fastdata import CachedDataset, DataLoader"
    ),
    "DataLoader(dataset,": "DataLoader(CachedDataset(dataset),",
}

TRAIN = transforms.Compose(
    [
        transforms.ToPILImage(),
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.RandomRotation(15),
        transforms.ToTensor(),
        transforms.Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ]
)


class CIFAR100Train(Dataset[Any]):
    def __init__(self, path: Path, transform: Any = None) -> None:
        with (path / "train").open("rb") as file:
            content = pickle.load(file, encoding="bytes")
        self.labels, self.pixels = content[b"fine_labels"], content[b"data"]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        label = self.labels[index]
        red, green, blue = self.pixels[index].reshape(3, 32, 32)
        image = np.dstack((red, green, blue))
        if self.transform:
            image = self.transform(image)
        return label, image


def make_loader(root: Path, workers: int) -> Any:
    dataset = CIFAR100Train(root / "cifar-100-python", TRAIN)
    return DataLoader(dataset, batch_size=128, shuffle=True, num_workers=workers)
