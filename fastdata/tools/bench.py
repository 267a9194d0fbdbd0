"""``fastdata bench``: published recipes over one folder, by torchvision and torch (vanilla) and by fastdata."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from fastdata.datasets.folder import ImageFolder
from fastdata.errors import MemoryBudgetError
from fastdata.loaders.loader import DataLoader
from fastdata.machine.memory import cpu_model, usable_cores
from fastdata.pixels import images
from fastdata.report import progress_bar
from fastdata.tools import output
from fastdata.tools.measure import EndlessOrder, measure
from fastdata.tools.photos import write_photos

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RECIPES = ("crop", "rrc", "trivial", "randaug", "simclr")
OWN_RECIPES = ("crop", "rrc", "simclr")
"""Those that need nothing of torchvision's, which alone has the tables of the others'
magnitudes."""
_RATE_S = 0.5

Step = Callable[..., Any]
"""Makes a step of torchvision's class of that name, with these attributes."""


# Transforms


def recipe_steps(step: Step, recipe: str, *, crop_px: int, resize_px: int, dtype: str) -> list[Any]:
    """The steps of one of ``RECIPES``.

    Args:
        step: makes each of them of its torchvision name and attributes.
        recipe: ``"crop"`` is what people write who resize once; ``"rrc"``, ``"trivial"`` and
            ``"randaug"`` are those of torchvision's references; ``"simclr"`` is the view of its
            paper, as public reimplementations write it.
        crop_px: side of what comes out.
        resize_px: side of the square that ``"crop"`` is cut of.
        dtype: ``"uint8"``, or ``"float32"``, which is normalised.
    """
    side = (crop_px, crop_px)
    flip = step("RandomHorizontalFlip", p=0.5)
    last = [step("PILToTensor")]
    if dtype == "float32":
        last = [step("ToTensor"), step("Normalize", mean=IMAGENET_MEAN, std=IMAGENET_STD)]
    if recipe == "crop":
        resize = step("Resize", size=resize_px)
        square = step("CenterCrop", size=(resize_px, resize_px))
        return [resize, square, step("RandomCrop", size=side), flip, *last]
    first = step("RandomResizedCrop", size=side, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    if recipe == "trivial":
        return [first, flip, step("TrivialAugmentWide"), *last]
    if recipe == "randaug":
        return [first, flip, step("RandAugment"), *last]
    if recipe == "rrc":
        return [first, flip, *last]
    near = (0.2, 1.8)
    width = crop_px // 20 * 2 + 1
    jitter = step("ColorJitter", brightness=near, contrast=near, saturation=near, hue=(-0.2, 0.2))
    jitters = step("RandomApply", transforms=[jitter], p=0.8)
    grey = step("RandomGrayscale", p=0.2)
    blur = step("GaussianBlur", kernel_size=(width, width), sigma=(0.1, 2.0))
    blurs = step("RandomApply", transforms=[blur], p=0.5)
    return [first, flip, jitters, grey, blurs, *last]


def import_torchvision() -> tuple[Any, str]:
    """Torchvision, or None, and what to say of that.

    Built for another torch it fails to import, as it registers two operators of its library, which
    did not load. Its transforms need none: declared, they let the rest be imported.
    """
    try:
        return importlib.import_module("torchvision"), ""
    except ImportError:
        return None, "torchvision is not installed here: pip install 'fastdata[bench]'"
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            return None, f"torchvision cannot be imported here: {error}"
        _declare_operators()
        note = (
            f"torchvision {output.version('torchvision')} is for another torch than this {torch.__version__}: its "
            "operators do not load; its transforms, which need none, are what is measured."
        )
        return importlib.import_module("torchvision"), note


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "DEF")
    _declared.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name in list(sys.modules):  # what was half imported
        if name.split(".")[0] == "torchvision":
            del sys.modules[name]


_declared: list[Any] = []
"""Operators of a library count as long as it is held."""


def own_step(name: str, **attributes: Any) -> Any:
    """A step for fastdata alone, which reads it as torchvision's of that name."""
    if name in ("Resize", "CenterCrop"):
        return getattr(images, name)(**attributes)
    usual = {"interpolation": "bilinear", "antialias": True, "inplace": False}
    pads = {"padding": None, "pad_if_needed": False, "fill": 0, "padding_mode": "constant"}
    return type(name, (), {"__torchvision_equal__": name} | usual | pads | attributes)()


class OneByOne(Dataset[Any]):
    """Samples read and transformed one at a time, as torchvision does, but by fastdata's own steps."""

    def __init__(self, root: str, transform: Any, **options: Any) -> None:
        self.whole = ImageFolder(root, transform, storage="none", **options)

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Any:
        return self.whole[index]


def add_transform(parser: argparse.ArgumentParser, usual: str) -> None:
    text = f"a transform of your own, such as train:train_transform; {usual}"
    parser.add_argument("--transform", metavar="MODULE:NAME", help=text)


def find_transform(words: str | None) -> Any:
    """The user's own transform, by ``MODULE:NAME``, or rrc's as normalised float32."""
    if words is None:
        torchvision, _ = import_torchvision()
        return _transform("rrc", torchvision, crop_px=224, resize_px=256, dtype="float32")
    module, _, name = words.partition(":")
    if not (module and name):
        raise ValueError(
            f"--transform {words} is not module:name, as in --transform train:train_transform"
        )
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as missing:
        raise ImportError(f"--transform {words}: {missing}") from missing
    finally:
        sys.path.remove(os.getcwd())


def _transform(recipe: str, torchvision: Any, **sizes: Any) -> Any:
    if torchvision is None:
        return tuple(recipe_steps(own_step, recipe, **sizes))
    v1 = torchvision.transforms
    return v1.Compose(
        recipe_steps(lambda name, **attributes: getattr(v1, name)(**attributes), recipe, **sizes)
    )


# Measuring


def run_bench(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both in turns and return what ``--json`` keeps; leaves no file, process or thread."""
    torchvision, note = import_torchvision()
    if torchvision is None:
        note += "; trivial and randaug need it, the others are held against fastdata's own steps, one by one"
    transforms = _chosen(options, torchvision, note)
    make_vanilla = torchvision.datasets.ImageFolder if torchvision else OneByOne
    workers: dict[str, int] = {}
    recipes = {}
    with ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="fastdata-bench-")))
            _say("drawing images")
            write_photos(folder, count=options.images or 400, progress=True)
        paths = choose_images(folder, options.images or 1000)
        bytes_each = sum(map(os.path.getsize, paths)) // len(paths)
        root = os.path.abspath(folder)
        chosen: dict[str, Any] = {
            "is_valid_file": frozenset(paths).__contains__,
            "allow_empty": True,
        }
        bar = stack.enter_context(progress_bar(len(transforms), "measuring", unit="recipe"))
        for name, transform in transforms.items():
            _say(f"measuring {name}")
            began = time.perf_counter()
            is_square = name in ("crop", options.transform)  # by its own first steps
            size = None if is_square else (options.resize_px, options.resize_px)
            with _prepared(root, transform, resize=size, **chosen) as ours:
                prepare_s = time.perf_counter() - began
                vanilla = make_vanilla(root, transform, **chosen)
                sides = {"vanilla": (TorchDataLoader, vanilla), "fastdata": (DataLoader, ours)}
                if not workers:  # the first recipe chooses for all
                    workers = {side: _best_workers(options, *pair) for side, pair in sides.items()}
                recipes[name] = _in_turns(options, sides, workers) | {"prepare_s": prepare_s}
            bar.update()
    return {
        "settings": vars(options),
        "images": len(paths),
        "mean_file_bytes": bytes_each,
        "vanilla": "torchvision + torch" if torchvision else "fastdata's steps one by one + torch",
        "note": note,
        "num_workers": workers,
        "recipes": recipes,
    }


def _say(words: str) -> None:
    """A line for each step where there is no bar."""
    if not sys.stderr.isatty():
        print(f"{words} ...", file=sys.stderr, flush=True)


def _chosen(options: argparse.Namespace, torchvision: Any, note: str) -> dict[str, Any]:
    """The transform of each recipe, under its name: those asked for, by default all that can be made."""
    sizes = {"crop_px": options.crop_px, "resize_px": options.resize_px, "dtype": options.dtype}
    if options.crop_px > options.resize_px:
        raise ValueError(
            f"--crop {options.crop_px} is larger than the prepared square, --resize {options.resize_px}"
        )
    known = RECIPES if torchvision else OWN_RECIPES
    names = options.recipe or (() if options.transform else known)
    if not set(names) <= set(known):
        raise ImportError(note)
    transforms = {name: _transform(name, torchvision, **sizes) for name in names}
    if options.transform:
        transforms[options.transform] = find_transform(options.transform)
    return transforms


def _prepared(root: str, transform: Any, **options: Any) -> ImageFolder:
    try:
        return ImageFolder(
            root, transform, storage="shared", fill="eager", progress=False, **options
        )
    except MemoryBudgetError as error:
        problem = str(error).partition(". Use ")[0]
        raise MemoryBudgetError(f"{problem}. Use fewer --images or a smaller --resize.") from error


def _best_workers(options: argparse.Namespace, kind: Any, dataset: Any) -> int:
    if options.num_workers is not None:
        return int(options.num_workers)
    cores = usable_cores()
    counts = sorted({0, 1, cores // 2, cores})
    return max(counts, key=lambda count: _rate(options, kind, dataset, count))


def _rate(options: argparse.Namespace, kind: Any, dataset: Any, workers: int) -> float:
    order = EndlessOrder(len(dataset), 0)
    loader = kind(dataset, options.batch_size, sampler=order, num_workers=workers)
    return measure(loader, seconds=_RATE_S, limit_s=4 * _RATE_S).samples_per_s


def _in_turns(
    options: argparse.Namespace, sides: dict[str, Any], workers: dict[str, int]
) -> dict[str, Any]:
    rates: dict[str, Any] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, (kind, dataset) in sides.items():
            rates[side].append(_rate(options, kind, dataset, workers[side]))
    ratio = median(rates["fastdata"]) / median(rates["vanilla"])
    return rates | {"ratio": ratio}


def choose_images(root: Path, most: int) -> list[str]:
    """Absolute paths of at most so many images, spread evenly over the class folders.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: it is a URL.
    """
    output.check_folder(root)
    files = (os.path.abspath(path) for path in root.glob("*/**/*"))
    found = sorted(path for path in files if path.lower().endswith(images.IMAGE_EXTENSIONS))
    if not found:
        raise FileNotFoundError(
            f"{root} has no image in any class folder: images are expected as {root}/<class>/<name>.jpg "
            f"(also {', '.join(images.IMAGE_EXTENSIONS[1:])})"
        )
    count = min(most, len(found))
    return [found[index * len(found) // count] for index in range(count)]


# Words


def table(document: dict[str, Any]) -> Iterator[str]:
    """The figures as text: a row for each recipe, and a line to quote."""
    settings = document["settings"]
    recipes = document["recipes"]
    vanilla = document["vanilla"]
    machine = f"{cpu_model()}, {usable_cores()} cores"
    files = f"{document['images']:,} images ({settings['folder'] or 'drawn for this run'})"
    size = f"{document['mean_file_bytes'] / 1000:.0f} kB a file"
    yield f"{files}, {size}; {settings['dtype']}, batch {settings['batch_size']}; {settings['rounds']} rounds in turns"
    yield machine
    yield ""
    rows = [
        ["images/s, median", vanilla, "fastdata", "ratio", "lowest to highest", "prepare, once", ""]
    ]
    rows += [_row(name, recipe) for name, recipe in recipes.items()]
    workers = map(str, document["num_workers"].values())
    rows.append(["num_workers, the best", *workers, "", "", "", ""])
    yield from output.aligned(rows)
    yield ""
    if document["note"]:
        yield document["note"]
    if not set(RECIPES).isdisjoint(recipes):
        square = settings["resize_px"]
        yield f"crop: Resize and CenterCrop {square}, RandomCrop, flip. The others: RandomResizedCrop, flip, and what"
        yield f"their name says. Vanilla reads the files, fastdata squares of {square} that are prepared once."
    ratios = sorted(recipe["ratio"] for recipe in recipes.values())
    times = f"{ratios[0]:.1f} to {ratios[-1]:.1f}" if len(ratios) > 1 else f"{ratios[0]:.1f}"
    yield f"fastdata reads {times} times as many images a second as {vanilla} ({', '.join(recipes)}; {machine})"


def _row(name: str, recipe: dict[str, Any]) -> list[str]:
    theirs = recipe["vanilla"]
    ours = recipe["fastdata"]
    ratios = sorted(our / their for our, their in zip(ours, theirs, strict=True))
    return [
        name,
        f"{median(theirs):,.0f}",
        f"{median(ours):,.0f}",
        f"{recipe['ratio']:.1f}",
        f"{ratios[0]:.1f} to {ratios[-1]:.1f}",
        f"{recipe['prepare_s']:.2f} s",
        "",
    ]


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="class folders of images; without it images are drawn",
    )
    add(
        "--images",
        type=output.positive,
        metavar="N",
        help="images at most; by default 1000, or 400 drawn ones",
    )
    recipes = "what to measure, several times if need be; by default all of them"
    add("--recipe", action="append", choices=RECIPES, help=recipes)
    add_transform(parser, "alone, or beside each --recipe")
    side = "side of the prepared square; default: %(default)s"
    add("--resize", dest="resize_px", default=256, type=output.positive, metavar="PX", help=side)
    crop = "side of the random crop; default: %(default)s"
    add("--crop", dest="crop_px", default=224, type=output.positive, metavar="PX", help=crop)
    dtypes = "float32 is normalised; default: %(default)s"
    add("--dtype", choices=("uint8", "float32"), default="uint8", help=dtypes)
    add(
        "--batch-size",
        type=output.positive,
        default=64,
        metavar="N",
        help="images in a batch; default: %(default)s",
    )
    add(
        "--rounds",
        type=output.positive,
        default=3,
        metavar="N",
        help="measured rounds; default: %(default)s",
    )
    add(
        "--num-workers", type=int, metavar="N", help="of both loaders; by default the best for each"
    )
    output.add_files(parser, plots=True)


def run(options: argparse.Namespace) -> int:
    document = run_bench(options)
    for line in table(document):
        print(line)

    def plot(file: Path) -> None:
        rows = []
        for name, recipe in document["recipes"].items():
            rows.append((f"{name}: {document['vanilla']}", median(recipe["vanilla"]), False))
            rows.append((f"{name}: fastdata", median(recipe["fastdata"]), True))
        output.bars(file, rows, "images/s")

    output.keep(document, options, plot)
    return 0
