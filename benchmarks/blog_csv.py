"""How long does an epoch over a CSV of photographs take: decoded on the fly, preloaded in the process, or by fastdata?

A CSV names JPEGs of 512x384 with labels. They are resized to 128x96, then centre crop 64 and a random flip, in
batches of 100, with one worker, and a 3x3 convolution per batch. The second form is a list of resized images in the
process, the solution of a blog post.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from _helper import (
    Row,
    class_folders,
    in_turns,
    parser,
    print_rows,
    save_rows,
    seconds_of,
    transforms,
)
from fastdata import DataLoader, ImageManifest

BATCH = 100
WORKERS = 1
RESIZE = transforms.Resize((96, 128))
AUGMENT = [transforms.CenterCrop(64), transforms.RandomHorizontalFlip(), transforms.ToTensor()]


class OnTheFly(Dataset[Any]):
    """Reads, decodes and resizes at every access."""

    def __init__(self, manifest: Path) -> None:
        with open(manifest, newline="", encoding="utf-8") as file:
            self.rows = [
                (manifest.parent / row["file"], int(row["label"])) for row in csv.DictReader(file)
            ]
        self.augment = transforms.Compose(AUGMENT)

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, index: int) -> Image.Image:
        with Image.open(self.rows[index][0]) as image:
            return RESIZE(image.convert("RGB"))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.augment(self.image(index)), self.rows[index][1]


class Preloaded(OnTheFly):
    """Keeps a list of resized images in the process."""

    def __init__(self, manifest: Path) -> None:
        super().__init__(manifest)
        self.images = [super(Preloaded, self).image(index) for index in range(len(self.rows))]

    def image(self, index: int) -> Image.Image:
        return self.images[index]


def epoch_s(loader: Iterable[Any], layer: torch.nn.Module) -> float:
    def epoch() -> None:
        for images, _ in loader:
            layer(images)

    with torch.inference_mode():
        return seconds_of(epoch)


def write_manifest(root: Path) -> Path:
    """Write a CSV with ``file,label`` for every image below ``root``; the label is the number of the class folder."""
    files = sorted(path for path in root.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    labels = {
        name: label for label, name in enumerate(sorted({path.parent.name for path in files}))
    }
    manifest = root / "train.csv"
    with open(manifest, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["file", "label"])
        table.writerows((path.relative_to(root), labels[path.parent.name]) for path in files)
    return manifest


def measure(manifest: Path, rounds: int) -> list[Row]:
    built: dict[str, Any] = {}

    def build(name: str, make: Any) -> float:
        def keep() -> None:
            built[name] = make()

        return seconds_of(keep)

    whole = transforms.Compose([RESIZE, *AUGMENT])
    prepare_s = {
        "on the fly": build("on the fly", partial(OnTheFly, manifest)),
        "preloaded list": build("preloaded list", partial(Preloaded, manifest)),
        "fastdata": build(
            "fastdata",
            partial(
                ImageManifest,
                manifest,
                root=manifest.parent,
                file="file",
                label="label",
                transform=whole,
            ),
        ),
    }
    layer = torch.nn.Conv2d(3, 16, 3)
    loaders = {
        name: (DataLoader if name == "fastdata" else TorchDataLoader)(
            dataset, batch_size=BATCH, shuffle=True, num_workers=WORKERS
        )
        for name, dataset in built.items()
    }
    epochs = in_turns(
        {name: partial(epoch_s, loader, layer) for name, loader in loaders.items()}, rounds
    )
    convolution = in_turns(
        {
            "": partial(
                epoch_s, [(torch.rand(BATCH, 3, 64, 64), 0)] * len(loaders["fastdata"]), layer
            )
        },
        rounds,
    )
    built["fastdata"].close()
    count = len(loaders["fastdata"].dataset)
    return [
        *(
            Row(section="preparation, once", name=name, unit="s", rounds=(s,))
            for name, s in prepare_s.items()
        ),
        *(
            Row(
                section=f"epoch of {count:,} images",
                name=name,
                unit="s",
                rounds=row,
                against="on the fly",
            )
            for name, row in epochs.items()
        ),
        Row(
            section=f"epoch of {count:,} images",
            name="the convolutions alone",
            unit="s",
            rounds=convolution[""],
            against="on the fly",
        ),
    ]


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--count", type=int, default=2000, help="number of image files")
    chosen = options.parse_args()
    with class_folders(chosen.images, count=chosen.count) as (root, what):
        rows = measure(write_manifest(root), chosen.rounds)
    print(what)
    print_rows(rows)
    save_rows(rows, chosen.json, images=what, batch=BATCH, workers=WORKERS)


if __name__ == "__main__":
    main()
