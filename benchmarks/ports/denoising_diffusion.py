"""The data of denoising-diffusion-pytorch: images alone, a conversion before the first step."""

from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

CHANGES = {
    "from torch.utils.data import DataLoader, Dataset": (
        "from torch.utils.data import Dataset\nfrom fastdata import CachedDataset, DataLoader"
    ),
    "DataLoader(dataset,": "DataLoader(CachedDataset(dataset),",
}


def convert_image_to(mode: str, image: Any) -> Any:
    if image.mode != mode:
        return image.convert(mode)
    return image


class Images(Dataset[Any]):
    def __init__(self, folder: Path, size: int, flips: bool, mode: str | None) -> None:
        self.paths = sorted(folder.glob("**/*.jpg"))
        convert = partial(convert_image_to, mode) if mode else nn.Identity()
        self.transform = transforms.Compose(
            [
                transforms.Lambda(convert),
                transforms.Resize(size),
                transforms.RandomHorizontalFlip() if flips else nn.Identity(),
                transforms.CenterCrop(size),
                transforms.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index])
        return self.transform(image)


def make_loader(root: Path, workers: int) -> Any:
    dataset = Images(root / "train", size=128, flips=True, mode="RGB")
    return DataLoader(dataset, batch_size=16, shuffle=True, pin_memory=True, num_workers=workers)
