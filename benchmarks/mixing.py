"""How fast are MixUp and CutMix in ``collate_fn``, run as the last step of a batch, and called on each batch?

    python benchmarks/mixing.py [--workers 0] [--json benchmarks/results/mixing.json]

The recipe is RandomResizedCrop, flip and Normalize to float32, in batches of 64, prepared at 256x256; timm's
FastCollateMixup mixes uint8, without Normalize. In "called" rows a function hides the transform, so that fastdata
does not find it and calls it on each batch. Rounds are interleaved and give images per second of CPU time, so that
other programs on the machine have little effect; with workers they give images per second of wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from _helper import Row, class_folders, in_turns, parser, print_rows, save_rows, transforms
from fastdata import DataLoader, ImageFolder

CLASSES = 1000
COUNT = 512
NORMS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def mixes() -> dict[str, Callable[[Any], Any]]:
    """Return recipes of torchvision, each as people write it in a ``collate_fn``."""
    from torchvision.transforms import v2

    cutmix = v2.CutMix(num_classes=CLASSES)
    mixup = v2.MixUp(num_classes=CLASSES)
    either = v2.RandomChoice([cutmix, mixup])
    return {
        "CutMix": lambda batch: cutmix(*default_collate(batch)),
        "MixUp": lambda batch: mixup(*default_collate(batch)),
        "RandomChoice of both": lambda batch: either(*default_collate(batch)),
    }


def timms() -> dict[str, Callable[[Any], Any]]:
    from timm.data.mixup import FastCollateMixup

    options: dict[str, Any] = {"cutmix_alpha": 1.0, "num_classes": CLASSES}
    modes = ("batch", "pair", "elem")
    return {f"FastCollateMixup, {mode}": FastCollateMixup(mode=mode, **options) for mode in modes}


def called(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that hides a recipe: fastdata does not recognise code that has a condition."""
    return lambda batch: collate_fn(batch) if batch else None


def rate(loader: Any, *, is_wall: bool) -> Callable[[], float]:
    """Return a function that measures images per second over an epoch."""
    clock = time.perf_counter if is_wall else time.process_time

    def measure() -> float:
        start = clock()
        images = sum(len(batch[0]) for batch in loader)
        return images / (clock() - start)

    return measure


def measure(
    section: str, dataset: Any, recipes: dict[str, Callable[[Any], Any]], options: Any
) -> list[Row]:
    plain = "without mixing"
    loaders = {plain: None, **recipes}
    loaders |= {f"{name}, called": called(recipe) for name, recipe in recipes.items()}
    competitors = {
        name: rate(
            DataLoader(
                dataset,
                batch_size=64,
                shuffle=True,
                drop_last=True,
                collate_fn=collate_fn,
                num_workers=options.workers,
                persistent_workers=options.workers > 0,
            ),
            is_wall=options.workers > 0,
        )
        for name, collate_fn in loaders.items()
    }
    figures = in_turns(competitors, options.rounds)
    unit = "images/s" if options.workers else "per CPU s"
    return [
        Row(
            section=section,
            name=name,
            unit=unit,
            rounds=rounds,
            against="" if name == plain else plain,
            target=">= 0.85" if name in recipes else "",
        )
        for name, rounds in figures.items()
    ]


def main() -> None:
    """Measure both sections."""
    made = parser(str(__doc__).splitlines()[0])
    made.add_argument("--workers", type=int, default=0, help="number of workers")
    options = made.parse_args()
    crop = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]
    floats = [*crop, transforms.ToTensor(), transforms.Normalize(*NORMS)]
    with class_folders(options.images, count=COUNT) as (root, images):
        sections = {
            "torchvision, float32": (floats, mixes()),
            "timm, uint8": ([*crop, transforms.PILToTensor()], timms()),
        }
        rows = []
        for section, (steps, recipes) in sections.items():
            transform = transforms.Compose(steps)
            with ImageFolder(root, transform=transform, resize=(256, 256), seed=0) as dataset:
                rows += measure(section, dataset, recipes, options)
    print_rows(rows)
    save_rows(rows, options.json, images=images, batch=64, workers=options.workers)


if __name__ == "__main__":
    main()
