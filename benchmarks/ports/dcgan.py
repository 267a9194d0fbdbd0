"""The data of PyTorch's DCGAN example: small square images in [-1, 1]."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader": "from fastdata import DataLoader, ImageFolder",
    "datasets.ImageFolder(": "ImageFolder(",
}
IS_DRAWN = False

SQUARE = transforms.Compose(
    [
        transforms.Resize(64),
        transforms.CenterCrop(64),
        transforms.ToTensor(),
        transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ]
)


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.ImageFolder(root=root / "train", transform=SQUARE)
    return DataLoader(dataset, batch_size=64, shuffle=True, num_workers=workers)
