"""``fastdata bench``: the speed of published recipes over one folder, with and without fastdata."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from fastdata.datasets.folder import ImageFolder
from fastdata.loaders.loader import DataLoader
from fastdata.machine.limits import cpu_model, usable_cores
from fastdata.pixels.plan import Transform
from fastdata.report import Line, as_text
from fastdata.tools.arguments import check_folder, positive
from fastdata.tools.figures import add_json, write_json
from fastdata.tools.measure import in_subprocess, measure_rate, shuffled
from fastdata.tools.photos import write_photos
from fastdata.tools.recipes import (
    PREPARED_PX,
    RECIPES,
    add_transform,
    find_transform,
    import_torchvision,
    make_recipe,
)

_ROUNDS = 3

_RATE_S = 0.5


Figures = dict[str, Any]
"""Measurements of a recipe. ``vanilla`` (torchvision and torch) and ``fastdata``: images per second
of each round. ``ratio``: the ratio of their medians. ``prepare_s``: seconds in which fastdata
prepared the images."""


def run(options: argparse.Namespace) -> int:
    """Measure all recipes and print the report; return the exit status."""
    names = options.recipe or ([] if options.transform else RECIPES)
    transforms = {name: make_recipe(name, options.dtype) for name in names}
    if options.transform:
        import_torchvision()  # declares missing operators before the user's module imports it
        transforms[options.transform] = find_transform(options.transform)
    recipes = {}
    with TemporaryDirectory(prefix="fastdata-bench-") as drawn:
        folder = options.folder or drawn
        check_folder(folder)
        if options.folder is None:
            _say("making images")
            write_photos(Path(drawn), count=options.images or 400)
        with ImageFolder(folder, storage="none") as every:
            # Images are spread evenly over the folder, so that all classes are included.
            count = min(options.images or 1000, len(every))
            paths = [every.samples[index * len(every) // count][0] for index in range(count)]
        for name, transform in transforms.items():
            _say(f"measuring {name}")
            recipes[name] = _measure_recipe(folder, paths, name, transform, options)
    print(as_text(_report_lines(recipes, count, options)))
    write_json({"settings": vars(options), "images": count, "recipes": recipes}, options)
    return 0


def _report_lines(
    recipes: dict[str, Figures], count: int, options: argparse.Namespace
) -> Iterator[Line]:
    """Yield a row for each recipe, and a summary in one line."""
    yield (
        f"{count:,} images ({options.folder or 'synthetic'}), {options.dtype} batches of "
        f"{options.batch_size}, num_workers={options.num_workers}"
    )
    yield ""
    yield "images/s", "torchvision + torch", "fastdata", "ratio", "prepared once in"
    for name, recipe in recipes.items():
        rates = [f"{median(recipe[side]):,.0f}" for side in ("vanilla", "fastdata")]
        yield name, *rates, f"{recipe['ratio']:.1f}", f"{recipe['prepare_s']:.2f} s"
    yield ""
    yield (
        "torchvision decodes the files. fastdata reads images that it prepared once; for recipes\n"
        f"these are squares of {PREPARED_PX} px. Figures are medians of {_ROUNDS} rounds."
    )
    ratios = [recipe["ratio"] for recipe in recipes.values()]
    times = " to ".join(f"{ratio:.1f}" for ratio in sorted({min(ratios), max(ratios)}))
    yield (
        f"fastdata reads {times} times as many images/s as torchvision + torch "
        f"({', '.join(recipes)}; {cpu_model()}, {usable_cores()} usable cores)."
    )


def _say(words: str) -> None:
    print(f"{words} ...", file=sys.stderr, flush=True)


def _measure_recipe(
    folder: str, paths: list[str], name: str, transform: Transform, options: argparse.Namespace
) -> Figures:
    def rate(kind: type[TorchDataLoader[Any]], dataset: Any) -> float:
        loader = kind(
            dataset,
            options.batch_size,
            sampler=shuffled(dataset),
            num_workers=options.num_workers,
        )
        return measure_rate(loader, seconds=_RATE_S, limit_s=4 * _RATE_S)

    # These transforms begin with their own resize.
    is_square = name in ("crop", options.transform)
    resize = None if is_square else (PREPARED_PX, PREPARED_PX)
    chosen: dict[str, Any] = {"is_valid_file": frozenset(paths).__contains__, "allow_empty": True}
    theirs = import_torchvision().datasets.ImageFolder(folder, transform, **chosen)
    began = time.perf_counter()
    with ImageFolder(folder, transform, resize=resize, storage="shared", **chosen) as ours:
        ours.prepare()
        prepare_s = time.perf_counter() - began
        vanilla = []
        fastdata = []
        # The two take turns, so that changes of the clock rate or of other load affect both.
        for _ in range(_ROUNDS):
            vanilla.append(in_subprocess(lambda: rate(TorchDataLoader, theirs), limit_s=60))
            fastdata.append(in_subprocess(lambda: rate(DataLoader, ours), limit_s=60))
    return {
        "vanilla": vanilla,
        "fastdata": fastdata,
        "ratio": median(fastdata) / median(vanilla),
        "prepare_s": prepare_s,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fastdata bench``."""
    number = partial(parser.add_argument, type=positive, metavar="N")
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="folder with one folder of images for each class; default: synthetic images, made for "
        "this run",
    )
    number("--images", help="most images to read; default: 1000, or 400 synthetic ones")
    parser.add_argument(
        "--recipe",
        action="append",
        choices=RECIPES,
        help="recipe to measure; may be repeated; default: all. crop: Resize and CenterCrop to "
        "256 px, RandomCrop, flip. The others: RandomResizedCrop (rrc), flip, and then "
        "TrivialAugmentWide (trivial), RandAugment (randaug), or the colours and blur of SimCLR",
    )
    add_transform(parser, "measured alone, or in addition to each --recipe")
    parser.add_argument(
        "--dtype",
        choices=("uint8", "float32"),
        default="uint8",
        help="type of the batches; float32 ones are normalised; default: %(default)s",
    )
    number("--batch-size", default=64, help="images in a batch; default: %(default)s")
    number(
        "--num-workers",
        default=usable_cores(),
        help="workers of both loaders; default: the usable cores, here %(default)s",
    )
    add_json(parser)
