"""The data of DINO: two large and eight small crops of each image, with blurs and solarisation by Pillow."""

import random
from pathlib import Path
from typing import Any

from PIL import ImageFilter, ImageOps
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

CHANGES = {
    "from torch.utils.data import DataLoader, DistributedSampler": (
        "from torch.utils.data import DistributedSampler\n"
        "from fastdata import DataLoader, ImageFolder"
    ),
    "datasets.ImageFolder(": "ImageFolder(",
}

BICUBIC = transforms.InterpolationMode.BICUBIC


class GaussianBlur:
    def __init__(self, p: float, radius_min: float = 0.1, radius_max: float = 2.0) -> None:
        self.prob = p
        self.radius_min, self.radius_max = radius_min, radius_max

    def __call__(self, img: Any) -> Any:
        do_it = random.random() <= self.prob
        if not do_it:
            return img
        return img.filter(
            ImageFilter.GaussianBlur(radius=random.uniform(self.radius_min, self.radius_max))
        )


class Solarization:
    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, img: Any) -> Any:
        if random.random() < self.p:
            return ImageOps.solarize(img)
        else:  # noqa: RET505  # as it was published, by which fastdata knows it
            return img


class Crops:
    def __init__(self, local_crops: int = 8) -> None:
        jitter = transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
        colours = transforms.Compose(
            [
                transforms.RandomHorizontalFlip(p=0.5),
                transforms.RandomApply([jitter], p=0.8),
                transforms.RandomGrayscale(p=0.2),
            ]
        )
        normalize = transforms.Compose(
            [
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )
        large = transforms.RandomResizedCrop(224, scale=(0.4, 1.0), interpolation=BICUBIC)
        small = transforms.RandomResizedCrop(96, scale=(0.05, 0.4), interpolation=BICUBIC)
        self.first = transforms.Compose([large, colours, GaussianBlur(1.0), normalize])
        self.second = transforms.Compose(
            [large, colours, GaussianBlur(0.1), Solarization(0.2), normalize]
        )
        self.local_crops = local_crops
        self.local = transforms.Compose([small, colours, GaussianBlur(p=0.5), normalize])

    def __call__(self, image: Any) -> Any:
        crops = []
        crops.append(self.first(image))
        crops.append(self.second(image))
        for _ in range(self.local_crops):
            crops.append(self.local(image))  # noqa: PERF401  # as it was published
        return crops


def make_loader(root: Path, workers: int) -> Any:
    dataset = datasets.ImageFolder(root / "train", transform=Crops())
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    return DataLoader(
        dataset,
        sampler=sampler,
        batch_size=16,
        num_workers=workers,
        pin_memory=True,
        drop_last=True,
    )
