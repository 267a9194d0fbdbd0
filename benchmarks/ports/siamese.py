"""The data of siamese-triplet: each item is a random pair, drawn when it is read."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader, Dataset": (
        "from torch.utils.data import Dataset\nfrom fastdata import CachedDataset, DataLoader"
    ),
    "DataLoader(dataset,": "DataLoader(CachedDataset(dataset),",
}

NORMALIZED = transforms.Compose(
    [transforms.ToTensor(), transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2, 0.2, 0.2))]
)


class Siamese(Dataset[Any]):
    def __init__(self, images: Any) -> None:
        self.images, self.transform = images, images.transform
        self.labels = np.array(images.targets)
        self.indices_of = {label: np.where(self.labels == label)[0] for label in {*self.labels}}

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        target = np.random.randint(0, 2)
        label = self.labels[index]
        if target == 1:
            other = index
            while other == index:
                other = np.random.choice(self.indices_of[label])
        else:
            other_label = np.random.choice(list({*self.indices_of} - {label}))
            other = np.random.choice(self.indices_of[other_label])
        pair = [Image.fromarray(self.images.data[each]) for each in (index, other)]
        if self.transform is not None:
            pair = [self.transform(image) for image in pair]
        return tuple(pair), target


def make_loader(root: Path, workers: int) -> Any:
    dataset = Siamese(datasets.CIFAR10(root, train=True, transform=NORMALIZED))
    return DataLoader(dataset, batch_size=128, shuffle=True, num_workers=workers)
