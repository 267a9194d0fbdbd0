"""How fast are batches of photographs that keep their shape, compared with a bucket sampler over torchvision?

This is the recipe of diffusion trainings: each photograph is resized and cropped to the one of a few sizes that crops
the least, and each batch has one size. Written by hand, that is a dataset that resizes and crops each image to its
bucket, and a batch sampler for torch's DataLoader, with its best number of workers. Epochs after the first one are
measured. Give ``--images`` a folder of photographs: synthetic images all have one size.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader

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
)
from fastdata import DataLoader, ImageFolder
from fastdata.loaders.buckets import BucketSampler, ResizeToBucket, find_buckets
from fastdata.tools.recipes import IMAGENET_MEAN, IMAGENET_STD

BATCH = 32
COUNT = 8
MULTIPLE_OF = 32
ROUND_S = 3.0

BY_HAND = "by hand: torchvision + torch"
KEPT = "fastdata, in memory"
UNKEPT = "fastdata, storage='none'"

Bucket = tuple[int, int]


class BucketedFolder(datasets.ImageFolder):
    """The usual code of a training: resize each image to cover the bucket of the nearest aspect ratio, then crop it."""

    def __init__(self, root: str, buckets: list[Bucket], crop: str, last: Any) -> None:
        super().__init__(root)
        self.crop, self.last = crop, last
        self.bucket_of = []
        for path, _ in self.samples:
            with Image.open(path) as image:
                ratio = image.width / image.height
            nearest = min(
                buckets, key=lambda size: max(ratio * size[0] / size[1], size[1] / size[0] / ratio)
            )
            self.bucket_of.append(nearest)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = self.loader(path)
        height, width = self.bucket_of[index]
        scale = max(height / image.height, width / image.width)
        size = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
        image = transforms.functional.resize(image, size)
        if self.crop == "random":
            image = transforms.RandomCrop((height, width))(image)
        else:
            image = transforms.functional.center_crop(image, [height, width])
        return self.last(image), label


class ByHand:
    """Batches of one bucket each, in random order."""

    def __init__(self, bucket_of: list[Bucket], batch_size: int) -> None:
        self.bucket_of, self.batch_size = bucket_of, batch_size

    def batches(self) -> list[list[int]]:
        members = defaultdict(list)
        for index in random.sample(range(len(self.bucket_of)), len(self.bucket_of)):
            members[self.bucket_of[index]].append(index)
        batches = [
            indices[first : first + self.batch_size]
            for indices in members.values()
            for first in range(0, len(indices), self.batch_size)
        ]
        random.shuffle(batches)
        return batches

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())


def by_hand(root: Path, buckets: list[Bucket], crop: str, last: Any, workers: int) -> Any:
    dataset = BucketedFolder(str(root), buckets, crop, last)
    sampler = ByHand(dataset.bucket_of, BATCH)
    return TorchDataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )


def ours(
    root: Path, buckets: list[Bucket], crop: Any, last: Any, **how: Any
) -> tuple[ImageFolder, DataLoader[Any]]:
    """Return a dataset, and a loader with its best number of workers."""
    steps = transforms.Compose([ResizeToBucket(buckets, crop), last])
    dataset = ImageFolder(str(root), steps, **how)
    make = partial(DataLoader, dataset, batch_sampler=BucketSampler(dataset, BATCH))
    workers = find_workers(lambda count: make(num_workers=count), budget_s=1.0)
    return dataset, make(num_workers=workers, persistent_workers=workers > 0)


def crop_rows(root: Path, buckets: list[Bucket], crop: str, rounds: int) -> list[Row]:
    last = transforms.Compose(
        [
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    hand = partial(by_hand, root, buckets, crop, last)
    kept, loader = ours(root, buckets, crop, last, storage="shared")
    unkept, unkept_loader = ours(root, buckets, crop, last, storage="none")
    with kept, unkept:
        rates = in_turns(
            {
                BY_HAND: epoch_rate(hand(find_workers(hand)), ROUND_S),
                KEPT: epoch_rate(loader, ROUND_S),
                UNKEPT: epoch_rate(unkept_loader, ROUND_S),
            },
            rounds,
        )
        print(f"{crop}: {loader.report().path}; {unkept_loader.report().path}")
    row = partial(Row, section=f"buckets, {crop} crop, flip, float32", unit="images/s")
    return [
        row(name=BY_HAND, rounds=rates[BY_HAND]),
        row(name=KEPT, rounds=rates[KEPT], against=BY_HAND, target="8 x"),
        row(name=UNKEPT, rounds=rates[UNKEPT], against=BY_HAND),
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--count", type=int, default=1000, help="number of image files")
    options.add_argument(
        "--pixels", type=int, default=256 * 256, help="area of each bucket in pixels, about"
    )
    arguments = options.parse_args()
    with class_folders(arguments.images, count=arguments.count) as (root, which):
        with ImageFolder(str(root)) as images:
            buckets = find_buckets(images, COUNT, arguments.pixels, MULTIPLE_OF)
        rows = []
        for crop in ("center", "random"):
            rows += crop_rows(root, buckets, crop, arguments.rounds)
    print_rows(rows)
    save_rows(rows, arguments.json, images=which, buckets=buckets, batch_size=BATCH)


if __name__ == "__main__":
    main()
