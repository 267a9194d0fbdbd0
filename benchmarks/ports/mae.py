"""The data of MAE's pretraining: bicubic random crops for each rank."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader, DistributedSampler": (
        "from torch.utils.data import DistributedSampler\n"
        "from fastdata import DataLoader, ImageFolder"
    ),
    "datasets.ImageFolder(": "ImageFolder(",
}

TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(
            224, scale=(0.2, 1.0), interpolation=transforms.InterpolationMode.BICUBIC
        ),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.ImageFolder(root / "train", transform=TRAIN)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=64,
        num_workers=workers,
        pin_memory=True,
        drop_last=True,
    )
