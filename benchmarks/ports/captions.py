"""The data of a captioning tutorial: captions of several lengths, padded by ``collate_fn``."""

import json
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

TRAIN = transforms.Compose(
    [
        transforms.Resize((256, 256)),
        transforms.RandomCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
)


class Captions(Dataset[Any]):
    def __init__(self, root: Path, transform: Any = None) -> None:
        self.root, self.transform = root, transform
        self.rows = json.loads((root / "captions.json").read_text("utf-8"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        image = Image.open(self.root / row["file"]).convert("RGB")
        if self.transform is not None:
            image = self.transform(image)
        return image, torch.Tensor(row["caption"])


def pad(data: Any) -> Any:
    data.sort(key=lambda pair: len(pair[1]), reverse=True)
    images, captions = zip(*data, strict=True)
    lengths = [len(caption) for caption in captions]
    targets = torch.zeros(len(captions), max(lengths)).long()
    for row, caption in enumerate(captions):
        targets[row, : lengths[row]] = caption
    return torch.stack(images, 0), targets, lengths


def make_loader(root: Path, workers: int) -> Any:
    dataset = Captions(root, TRAIN)
    return DataLoader(
        dataset,
        batch_size=64,
        shuffle=True,
        num_workers=workers,
        collate_fn=pad,
    )
