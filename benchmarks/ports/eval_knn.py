"""The data of DINO's eval_knn: a wrapper that gives the index instead of the label."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader": "from fastdata import DataLoader, ImageFolder",
    'dataset = ReturnIndexDataset(root / "train", transform=EVAL)': (
        'dataset = ImageFolder(root / "train", transform=EVAL, return_index=True)'
    ),
    "    samples, index = batch": "    samples, _, index = batch",
}
IS_DRAWN = False

EVAL = transforms.Compose(
    [
        transforms.Resize(256, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


class ReturnIndexDataset(datasets.ImageFolder):
    def __getitem__(self, idx: int) -> Any:
        img, _ = super().__getitem__(idx)
        return img, idx


def make_loader(root: Path, workers: int) -> Any:
    dataset = ReturnIndexDataset(root / "train", transform=EVAL)
    return DataLoader(dataset, batch_size=128, num_workers=workers, pin_memory=True)


def unpack(batch: Any) -> Any:
    """Take a batch apart as the loop over the loader does."""
    samples, index = batch
    return samples, index
