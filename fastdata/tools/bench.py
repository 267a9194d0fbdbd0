"""``fastdata bench``: published recipes over one folder, by torchvision and by fastdata."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader

from fastdata.datasets.folder import ImageFolder
from fastdata.loaders.loader import DataLoader
from fastdata.machine.memory import cpu_model, usable_cores
from fastdata.pixels.images import IMAGE_EXTENSIONS
from fastdata.report import aligned, progress_bar
from fastdata.tools import (
    add_json,
    apart,
    check_folder,
    keep,
    measure,
    positive,
    shuffled,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RECIPES = ("crop", "rrc", "trivial", "randaug", "simclr")
CROP_PX = 224
PREPARED_PX = 256
_ROUNDS = 3
_RATE_S = 0.5
_operators: list[torch.library.Library] = []
"""Operators of a library count as long as it is held."""


# Transforms


def make_recipe(recipe: str, dtype: str) -> Any:
    """One of ``RECIPES`` by torchvision: those of its references, and the view of SimCLR's paper.

    Args:
        recipe: ``"crop"`` is what people write who resize once.
        dtype: ``"uint8"``, or ``"float32"``, which is normalised.
    """
    v1 = import_torchvision().transforms
    blur_px = CROP_PX // 20 * 2 + 1
    steps = {
        "crop": [v1.Resize(PREPARED_PX), v1.CenterCrop(PREPARED_PX), v1.RandomCrop(CROP_PX)],
        "rrc": [v1.RandomResizedCrop(CROP_PX)],
        "trivial": [v1.RandomResizedCrop(CROP_PX), v1.TrivialAugmentWide()],
        "randaug": [v1.RandomResizedCrop(CROP_PX), v1.RandAugment()],
        "simclr": [
            v1.RandomResizedCrop(CROP_PX),
            v1.RandomApply([v1.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
            v1.RandomGrayscale(p=0.2),
            v1.RandomApply([v1.GaussianBlur(blur_px, (0.1, 2.0))], p=0.5),
        ],
    }[recipe]
    last = [v1.PILToTensor()]
    if dtype == "float32":
        last = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return v1.Compose([steps[0], v1.RandomHorizontalFlip(), *steps[1:], *last])


def import_torchvision() -> Any:
    """Import torchvision, also one that is built for another torch.

    That one fails as it registers two operators of its library, which did not load. Its transforms
    need none: declared, they let the rest be imported.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        cure = "pip install 'fastdata[bench]'"
        raise ImportError(f"this needs torchvision, which is not installed: {cure}") from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "DEF")
    _operators.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    return importlib.import_module("torchvision")


def find_transform(words: str) -> Any:
    """The user's own transform, by ``MODULE:NAME``."""
    module, _, name = words.partition(":")
    if not (module and name):
        example = "--transform train:train_transform"
        raise ValueError(f"--transform {words} is not module:name, as in {example}")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as missing:
        raise ImportError(f"--transform {words}: {missing}") from missing
    finally:
        sys.path.remove(os.getcwd())


# Measuring


def run_bench(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both in turns and return what ``--json`` keeps."""
    names = options.recipe or ([] if options.transform else RECIPES)
    transforms = {name: make_recipe(name, options.dtype) for name in names}
    if options.transform:
        transforms[options.transform] = find_transform(options.transform)
    recipes = {}
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="fastdata-bench-")))
            _say("drawing images")
            write_photos(folder, count=options.images or 400, progress=True)
        paths = choose_images(folder, options.images or 1000)
        bar = stack.enter_context(progress_bar(len(transforms), "measuring", unit="recipe"))
        for name, transform in transforms.items():
            _say(f"measuring {name}")
            recipes[name] = _measure_recipe(folder, paths, name, transform, options)
            bar.update()
    return {
        "settings": vars(options),
        "images": len(paths),
        "recipes": recipes,
    }


def _say(words: str) -> None:
    """A line for each step where there is no bar."""
    if not sys.stderr.isatty():
        print(f"{words} ...", file=sys.stderr, flush=True)


def _measure_recipe(
    folder: Path, paths: list[str], name: str, transform: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Images a second of both, in turns, and the seconds that preparing took."""
    is_square = name in ("crop", options.transform)  # by its own first steps
    chosen: dict[str, Any] = {"is_valid_file": frozenset(paths).__contains__, "allow_empty": True}
    vanilla = import_torchvision().datasets.ImageFolder(
        os.path.abspath(folder), transform, **chosen
    )
    began = time.perf_counter()
    prepared = ImageFolder(
        os.path.abspath(folder),
        transform,
        resize=None if is_square else (PREPARED_PX, PREPARED_PX),
        storage="shared",
        **chosen,
    ).prepare()
    with prepared as ours:
        prepare_s = time.perf_counter() - began
        rates: dict[str, list[float]] = {"vanilla": [], "fastdata": []}
        for _ in range(_ROUNDS):
            rates["vanilla"].append(_rate(TorchDataLoader, vanilla, options))
            rates["fastdata"].append(_rate(DataLoader, ours, options))
    ratio = median(rates["fastdata"]) / median(rates["vanilla"])
    return {**rates, "ratio": ratio, "prepare_s": prepare_s}


def _rate(kind: Any, dataset: Any, options: argparse.Namespace) -> float:
    def work() -> float:
        loader = kind(
            dataset,
            options.batch_size,
            sampler=shuffled(dataset),
            num_workers=options.num_workers,
        )
        return measure(loader, seconds=_RATE_S, limit_s=4 * _RATE_S)

    return apart(work, limit_s=60)


def choose_images(root: Path, most: int) -> list[str]:
    """Absolute paths of at most so many images, spread evenly over the class folders."""
    check_folder(root)
    files = (os.path.abspath(path) for path in root.glob("*/**/*"))
    paths = sorted(path for path in files if path.lower().endswith(IMAGE_EXTENSIONS))
    if not paths:
        raise FileNotFoundError(
            f"{root} has no image in any class folder: images are expected as "
            f"{root}/<class>/<name>.jpg (also {', '.join(IMAGE_EXTENSIONS[1:])})"
        )
    count = min(most, len(paths))
    return [paths[index * len(paths) // count] for index in range(count)]


# Images like photographs, for whoever has none at hand


def write_photos(
    root: Path,
    *,
    count: int,
    classes: int = 8,
    size: tuple[int, int] = (512, 384),
    progress: bool = False,
) -> None:
    """Write JPEGs of ``size`` (width, height) into class folders, in turns.

    The same arguments give the same pixels.
    """

    def write(index: int) -> None:
        path = root / f"class{index % classes}" / f"{index:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo(index, size)).save(path, quality=90)

    bar = progress_bar(count, "drawing images", enabled=progress)
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL
        for _ in pool.map(write, range(count)):
            bar.update()


def photo(seed: int, size: tuple[int, int] = (512, 384)) -> npt.NDArray[np.uint8]:
    """One image of ``size`` (width, height), uint8: smooth shapes, weaker colour, a grain."""
    rng = np.random.default_rng(seed)
    width, height = size

    def smooth(cells: int) -> npt.NDArray[np.float32]:
        """Of about unit variance, in shapes of 1/cells of the width."""
        grid = rng.standard_normal((max(2, cells * height // width), cells), dtype=np.float32)
        return np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC))

    # Amplitudes fall as the shapes get finer, as the spectrum of photographs does; the fine end and
    # the grain are set so that 512x384 takes 60 to 110 KB at quality 90, as photographs of that
    # size do.
    amplitudes = {3: 50.0, 8: 38.0, 20: 28.0, 50: 17.0, 120: 17.0}
    luma = np.full((height, width), 120.0)
    for cells, amplitude in amplitudes.items():
        luma += amplitude * smooth(cells)
    tints = [30.0 * smooth(6) + 8.0 * smooth(40) for _ in range(3)]
    luma += 9.5 * rng.standard_normal((height, width), dtype=np.float32)
    planes = np.stack([luma + tint for tint in tints], axis=-1)
    return planes.clip(0, 255).astype(np.uint8)


# The command


def table(document: dict[str, Any]) -> Iterator[str]:
    """The figures as text: a row for each recipe, and a line to quote."""
    settings = document["settings"]
    recipes = document["recipes"]
    files = f"{document['images']:,} images ({settings['folder'] or 'drawn for this run'})"
    loader = f"batch {settings['batch_size']}, num_workers={settings['num_workers']}"
    yield f"{files}; {settings['dtype']}, {loader}; medians of {_ROUNDS} rounds in turns"
    yield ""
    rows = [["images/s", "torchvision + torch", "fastdata", "ratio", "prepare, once", ""]]
    for name, recipe in recipes.items():
        rates = [f"{median(recipe[side]):,.0f}" for side in ("vanilla", "fastdata")]
        rows.append([name, *rates, f"{recipe['ratio']:.1f}", f"{recipe['prepare_s']:.2f} s", ""])
    yield from aligned(rows)
    yield ""
    yield f"crop: Resize and CenterCrop {PREPARED_PX}, RandomCrop, flip. The other recipes:"
    yield "RandomResizedCrop, flip, and what their name says. torchvision reads the files, fastdata"
    yield f"squares of {PREPARED_PX} that are prepared once."
    ratios = [recipe["ratio"] for recipe in recipes.values()]
    times = " to ".join(f"{ratio:.1f}" for ratio in sorted({min(ratios), max(ratios)}))
    what = f"{', '.join(recipes)}; {cpu_model()}, {usable_cores()} cores"
    yield f"fastdata reads {times} times as many images a second as torchvision + torch ({what})"


def add_transform(parser: argparse.ArgumentParser, usual: str) -> None:
    text = f"a transform of your own, such as train:train_transform; {usual}"
    parser.add_argument("--transform", metavar="MODULE:NAME", help=text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = partial(parser.add_argument, type=positive, metavar="N")
    folder = "class folders of images; without it images are drawn"
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=folder)
    number("--images", help="images at most; default: 1000, or 400 drawn ones")
    recipe = "what to measure, several times if need be; default: all"
    parser.add_argument("--recipe", action="append", choices=RECIPES, help=recipe)
    add_transform(parser, "alone, or beside each --recipe")
    dtype = "float32 is normalised; default: %(default)s"
    parser.add_argument("--dtype", choices=("uint8", "float32"), default="uint8", help=dtype)
    number("--batch-size", default=64, help="images in a batch; default: %(default)s")
    workers = "of both loaders; default: usable cores, %(default)s here"
    number("--num-workers", default=usable_cores(), help=workers)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    document = run_bench(options)
    for line in table(document):
        print(line)
    keep(document, options)
    return 0
