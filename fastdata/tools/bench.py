"""``fastdata bench``: published recipes over one folder, by torchvision and by fastdata."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader

from fastdata.datasets.public import ImageFolder
from fastdata.loaders import DataLoader
from fastdata.machine.limits import cpu_model, usable_cores
from fastdata.report import Line, as_text
from fastdata.tools import (
    add_json,
    check_folder,
    in_subprocess,
    measure_rate,
    positive,
    shuffled,
    write_json,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RECIPES = ("crop", "rrc", "trivial", "randaug", "simclr")
CROP_PX = 224
PREPARED_PX = 256
_ROUNDS = 3
_RATE_S = 0.5


# Transforms


def make_recipe(recipe: str, dtype: str) -> Any:
    """Make a transform of torchvision's references, or the view of SimCLR's paper.

    Args:
        recipe: one of ``RECIPES``; ``"crop"`` resizes to one size and crops at random.
        dtype: ``"uint8"``, or ``"float32"``, which is normalised.
    """
    v1 = import_torchvision().transforms
    crop = [v1.RandomResizedCrop(CROP_PX)]
    if recipe == "crop":
        crop = [v1.Resize(PREPARED_PX), v1.CenterCrop(PREPARED_PX), v1.RandomCrop(CROP_PX)]
    more = {
        "trivial": [v1.TrivialAugmentWide()],
        "randaug": [v1.RandAugment()],
        "simclr": [
            v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v1.RandomGrayscale(p=0.2),
            v1.RandomApply([v1.GaussianBlur(CROP_PX // 20 * 2 + 1, (0.1, 2.0))], p=0.5),
        ],
    }
    last = [v1.PILToTensor()]
    if dtype == "float32":
        last = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return v1.Compose([*crop, v1.RandomHorizontalFlip(), *more.get(recipe, ()), *last])


def import_torchvision() -> Any:
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise ImportError(
            "this needs torchvision, which is not installed: pip install 'fastdata[bench]'"
        ) from error


def find_transform(words: str) -> Any:
    """Import the user's own transform by ``MODULE:NAME``, from the working directory, too."""
    if not all(words.partition(":")):
        raise ValueError(
            f"--transform {words} is not module:name, as in --transform train:train_transform"
        )
    sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(words)
    except AttributeError as missing:
        raise ImportError(f"--transform {words}: {missing}") from missing
    finally:
        sys.path.remove(os.getcwd())


# Measuring


Figures = dict[str, Any]
"""Figures of a recipe: images a second of each round, ``vanilla`` and ``fastdata``, the ``ratio`` of
their medians, and ``prepare_s``, the seconds that fastdata took to prepare the images."""


def run(options: argparse.Namespace) -> int:
    names = options.recipe or ([] if options.transform else RECIPES)
    transforms = {name: make_recipe(name, options.dtype) for name in names}
    if options.transform:
        transforms[options.transform] = find_transform(options.transform)
    recipes = {}
    with TemporaryDirectory(prefix="fastdata-bench-") as drawn:
        folder = options.folder or drawn
        check_folder(folder)
        if options.folder is None:
            _say("drawing images")
            write_photos(Path(drawn), count=options.images or 400)
        with ImageFolder(folder, storage="none") as every:
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
    """Yield a row for each recipe, and a line to quote."""
    yield (
        f"{count:,} images ({options.folder or 'drawn for this run'}); {options.dtype}, "
        f"batch {options.batch_size}, num_workers={options.num_workers}"
    )
    yield ""
    yield "images/s", "torchvision + torch", "fastdata", "ratio", "prepared once in"
    for name, recipe in recipes.items():
        rates = [f"{median(recipe[side]):,.0f}" for side in ("vanilla", "fastdata")]
        yield name, *rates, f"{recipe['ratio']:.1f}", f"{recipe['prepare_s']:.2f} s"
    yield ""
    yield f"crop: Resize and CenterCrop {PREPARED_PX}, RandomCrop, flip. The other recipes:"
    yield "RandomResizedCrop, flip, and what their name says. torchvision reads the files,"
    yield f"fastdata squares of {PREPARED_PX} that are prepared once; medians of {_ROUNDS} rounds."
    ratios = [recipe["ratio"] for recipe in recipes.values()]
    times = " to ".join(f"{ratio:.1f}" for ratio in sorted({min(ratios), max(ratios)}))
    yield (
        f"fastdata reads {times} times as many images/s as torchvision + torch "
        f"({', '.join(recipes)}; {cpu_model()}, {usable_cores()} cores)"
    )


def _say(words: str) -> None:
    print(f"{words} ...", file=sys.stderr, flush=True)


def _measure_recipe(
    folder: str, paths: list[str], name: str, transform: Any, options: argparse.Namespace
) -> Figures:
    def rate(kind: Any, dataset: Any) -> float:
        order = shuffled(dataset)
        workers = options.num_workers
        loader = kind(dataset, options.batch_size, sampler=order, num_workers=workers)
        return measure_rate(loader, seconds=_RATE_S, limit_s=4 * _RATE_S)

    # These transforms begin with a resize of their own.
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
        for _ in range(_ROUNDS):
            vanilla.append(in_subprocess(lambda: rate(TorchDataLoader, theirs), limit_s=60))
            fastdata.append(in_subprocess(lambda: rate(DataLoader, ours), limit_s=60))
    return {
        "vanilla": vanilla,
        "fastdata": fastdata,
        "ratio": median(fastdata) / median(vanilla),
        "prepare_s": prepare_s,
    }


def write_photos(
    root: Path, *, count: int, classes: int = 8, size: tuple[int, int] = (512, 384)
) -> None:
    """Write JPEGs of ``size`` (width, height) into class folders, in turns.

    The same arguments give the same pixels.
    """

    def write(index: int) -> None:
        path = root / f"class{index % classes}" / f"{index:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo(index, size)).save(path, quality=90)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL
        list(pool.map(write, range(count)))


def photo(seed: int, size: tuple[int, int] = (512, 384)) -> npt.NDArray[np.uint8]:
    """Draw smooth shapes of many colours with a grain, uint8 (height, width, 3).

    With this grain, 512x384 takes 60 to 110 KB at quality 90, as photographs of that size do.
    """
    rng = np.random.default_rng(seed)
    width, height = size
    colours = rng.integers(0, 256, (2 + height // 32, 2 + width // 32, 3), dtype=np.uint8)
    shapes = np.asarray(Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC))
    return np.clip(shapes + rng.normal(0, 9, (height, width, 1)), 0, 255).astype(np.uint8)


# The command


def add_transform(parser: argparse.ArgumentParser, usual: str) -> None:
    parser.add_argument(
        "--transform",
        metavar="MODULE:NAME",
        help=f"a transform of your own, such as train:train_transform; {usual}",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = partial(parser.add_argument, type=positive, metavar="N")
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        help="class folders of images; default: drawn images",
    )
    number("--images", help="images at most; default: 1000, or 400 drawn ones")
    parser.add_argument(
        "--recipe",
        action="append",
        choices=RECIPES,
        help="recipe to measure; may be given several times; default: all",
    )
    add_transform(parser, "measured alone, or in addition to each --recipe")
    parser.add_argument(
        "--dtype",
        choices=("uint8", "float32"),
        default="uint8",
        help="float32 is normalised; default: %(default)s",
    )
    number("--batch-size", default=64, help="images in a batch; default: %(default)s")
    number(
        "--num-workers",
        default=usable_cores(),
        help="of both loaders; default: usable cores, %(default)s here",
    )
    add_json(parser)
