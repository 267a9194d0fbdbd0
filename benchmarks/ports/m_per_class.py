"""The data of metric learning: pytorch-metric-learning's sampler of m items for each class."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader, Sampler": (
        "from torch.utils.data import Sampler\nfrom fastdata import DataLoader, ImageFolder"
    ),
    "datasets.ImageFolder(": "ImageFolder(",
}

TRAIN = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.RandomResizedCrop(224, scale=(0.16, 1), ratio=(0.75, 1.33)),
        transforms.RandomHorizontalFlip(0.5),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
)


class MPerClassSampler(Sampler[int]):
    """As the package's, which need not be installed."""

    def __init__(self, labels: Any, m: int, length: int) -> None:
        self.m, self.length = m, length
        self.indices_of = defaultdict(list)
        for index, label in enumerate(labels):
            self.indices_of[int(label)].append(index)
        self.labels = list(self.indices_of)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        chosen: list[int] = []
        while len(chosen) < self.length:
            np.random.shuffle(self.labels)
            for label in self.labels:
                chosen += np.random.choice(self.indices_of[label], self.m).tolist()
        return iter(chosen[: self.length])


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.ImageFolder(root / "train", TRAIN)
    sampler = MPerClassSampler(dataset.targets, m=4, length=len(dataset) // 32 * 32)
    return DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=workers, drop_last=True)
