"""How fast are albumentations' recipes in fastdata, compared with torch's loader, and with torchvision's recipe?

"Vanilla" reads the original files in each epoch, with the number of workers that is best on this machine; fastdata
has them in memory at 256x256. All take turns. The third recipe transforms images and masks together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from _helper import (
    Row,
    class_folders,
    datasets,
    epoch_rate,
    find_workers,
    in_turns,
    parser,
    print_rows,
    save_rows,
    transforms,
    vanilla_loader,
)
from fastdata import CachedDataset, DataLoader, ImageFolder
from fastdata.tools.recipes import IMAGENET_MEAN, IMAGENET_STD

os.environ.setdefault(
    "NO_ALBUMENTATIONS_UPDATE", "1"
)  # it would ask the network for a newer version
import albumentations as A  # noqa: N812
from albumentations.pytorch import ToTensorV2

BATCH = 64
ROUND_S = 2.0
SIDE_PX = 224
STORED = (256, 256)

VANILLA, OURS, PEER = (
    "albumentations + torch, from files",
    "fastdata, albumentations",
    "fastdata, torchvision's recipe",
)


def floats() -> list[Any]:
    return [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]


def kaggle_steps() -> list[Any]:
    return [
        A.Resize(SIDE_PX, SIDE_PX),
        A.HorizontalFlip(),
        A.Affine(scale=(0.9, 1.1), rotate=(-45, 45), translate_percent=(-0.0625, 0.0625), p=0.5),
        A.RandomBrightnessContrast(),
        A.HueSaturationValue(),
        A.CoarseDropout(),
        A.Normalize(),
        ToTensorV2(),
    ]


RECIPES: dict[str, tuple[Callable[[], list[Any]], Callable[[], list[Any]], str]] = {
    "RandomResizedCrop, HorizontalFlip, Normalize": (
        lambda: [
            A.RandomResizedCrop((SIDE_PX, SIDE_PX)),
            A.HorizontalFlip(),
            A.Normalize(),
            ToTensorV2(),
        ],
        lambda: [
            transforms.RandomResizedCrop(SIDE_PX),
            transforms.RandomHorizontalFlip(),
            *floats(),
        ],
        "15 x vanilla, 0.9 x torchvision's",
    ),
    "Kaggle's usual": (
        kaggle_steps,
        lambda: [
            transforms.Resize((SIDE_PX, SIDE_PX)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply(
                [
                    transforms.RandomAffine(
                        45,
                        (0.0625, 0.0625),
                        (0.9, 1.1),
                        interpolation=transforms.InterpolationMode.BILINEAR,
                    )
                ]
            ),
            transforms.RandomApply([transforms.ColorJitter(0.2, 0.2)]),
            transforms.RandomApply([transforms.ColorJitter(saturation=0.2, hue=0.1)]),
            *floats(),
            transforms.RandomErasing(),
        ],
        "12 x vanilla",
    ),
}


class Pairs:
    """Images, and their masks in files next to them."""

    def __init__(self, root: Path, transform: Any = None) -> None:
        self.images = sorted(root.rglob("*.jpg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = np.asarray(Image.open(self.images[index]).convert("RGB"))
        mask = np.asarray(Image.open(self.images[index].with_suffix(".png")))
        if self.transform is None:
            return image, mask
        made = self.transform(image=image, mask=mask)
        return made["image"], made["mask"]


def write_masks(root: Path) -> None:
    """Resize every image to the stored size, and write a mask next to it."""
    for path in root.rglob("*.jpg"):
        image = Image.open(path).convert("RGB").resize(STORED)
        image.save(path, quality=90)
        image.convert("L").point(lambda level: level // 32).save(path.with_suffix(".png"))


def loader_of(dataset: Any) -> DataLoader[Any]:
    """Return a loader with its best number of workers."""
    make = partial(DataLoader, dataset, batch_size=BATCH, shuffle=True)
    workers = find_workers(lambda count: make(num_workers=count), budget_s=1.0)
    return make(num_workers=workers, persistent_workers=workers > 0)


def vanilla_of(dataset: Any) -> Any:
    make = partial(vanilla_loader, dataset, BATCH)
    return make(find_workers(make))


def recipe_rows(root: Path, name: str, rounds: int) -> list[Row]:
    theirs, peers, target = RECIPES[name]
    composed = A.Compose(theirs())
    vanilla = datasets.ImageFolder(
        str(root), lambda image: composed(image=np.asarray(image))["image"]
    )
    how: dict[str, Any] = {"storage": "shared", "resize": STORED}
    with (
        ImageFolder(str(root), A.Compose(theirs()), **how).prepare() as dataset,
        ImageFolder(str(root), transforms.Compose(peers()), **how).prepare() as peer,
    ):
        loader = loader_of(dataset)
        print(f"{name}: {loader.report().path}\n{dataset.plan}")
        rates = in_turns(
            {
                VANILLA: epoch_rate(vanilla_of(vanilla), ROUND_S),
                OURS: epoch_rate(loader, ROUND_S),
                PEER: epoch_rate(loader_of(peer), ROUND_S),
            },
            rounds,
        )
    return rows_of(name, rates, target)


def pair_rows(root: Path, rounds: int) -> list[Row]:
    name = "image and mask: RandomCrop, D4, RandomBrightnessContrast, Normalize"
    write_masks(root)

    def composed() -> Any:
        steps = [A.RandomCrop(SIDE_PX, SIDE_PX), A.D4(), A.RandomBrightnessContrast()]
        return A.Compose([*steps, A.Normalize(), ToTensorV2()])

    with CachedDataset(Pairs(root), transforms=composed(), storage="shared").prepare() as dataset:
        loader = loader_of(dataset)
        print(f"{name}: {loader.report().path}\n{dataset.plan}")
        rates = in_turns(
            {
                VANILLA: epoch_rate(vanilla_of(Pairs(root, composed())), ROUND_S),
                OURS: epoch_rate(loader, ROUND_S),
            },
            rounds,
        )
    return rows_of(name, rates, "10 x vanilla")


def rows_of(section: str, rates: dict[str, tuple[float, ...]], target: str) -> list[Row]:
    row = partial(Row, section=section, unit="images/s")
    rows = [row(name=VANILLA, rounds=rates[VANILLA])]
    rows.append(row(name=OURS, rounds=rates[OURS], against=VANILLA, target=target))
    if PEER in rates:
        rows += [
            row(name=PEER, rounds=rates[PEER]),
            row(name=f"{OURS}.", rounds=rates[OURS], against=PEER),
        ]
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=400, help="number of image files")
    options.add_argument(
        "--recipe", action="append", help="only recipes with this word in their name"
    )
    given = options.parse_args()

    def is_wanted(name: str) -> bool:
        return not given.recipe or any(word in name for word in given.recipe)

    rows: list[Row] = []
    with class_folders(given.images, count=given.count) as (root, source):
        for name in RECIPES:
            if is_wanted(name):
                rows += recipe_rows(root, name, given.rounds)
        if is_wanted("image and mask"):
            rows += pair_rows(root, given.rounds)
    print_rows(rows)
    save_rows(
        rows,
        given.json,
        source=source,
        batch=BATCH,
        albumentations=A.__version__,
        rounds=given.rounds,
    )


if __name__ == "__main__":
    main()
