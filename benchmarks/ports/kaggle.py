"""The data of a Kaggle notebook: a table of pandas, files read by OpenCV, albumentations."""

from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812  # as everybody does
import cv2
import pandas as pd
import torch
from albumentations.pytorch import ToTensorV2
from torch.utils.data import DataLoader, Dataset

CHANGES = {
    "from torch.utils.data import DataLoader, Dataset": (
        "from torch.utils.data import Dataset\nfrom fastdata import CachedDataset, DataLoader"
    ),
    "DataLoader(dataset,": "DataLoader(CachedDataset(dataset),",
}

TRAIN = A.Compose(
    [
        A.Resize(256, 256),
        A.HorizontalFlip(p=0.5),
        A.ShiftScaleRotate(shift_limit=0.05, scale_limit=0.1, rotate_limit=15, p=0.5),
        A.RandomBrightnessContrast(p=0.2),
        A.Normalize(),
        ToTensorV2(),
    ]
)


class TrainDataset(Dataset[Any]):
    def __init__(self, df: Any, root: Path, transform: Any = None) -> None:
        self.df, self.root, self.transform = df, root, transform
        self.file_names, self.labels = df["file"].values, df["label"].values

    def __len__(self) -> int:
        return len(self.df)

    def __getitem__(self, index: int) -> Any:
        image = cv2.imread(str(self.root / self.file_names[index]))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        if self.transform:
            image = self.transform(image=image)["image"]
        label = torch.tensor(self.labels[index]).long()
        return image, label


def make_loader(root: Path, workers: int) -> Any:
    dataset = TrainDataset(pd.read_csv(root / "train.csv"), root, TRAIN)
    return DataLoader(dataset, batch_size=32, shuffle=True, num_workers=workers, pin_memory=True)
