"""Published training transforms of torchvision, and the user's own transform by its name."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import pkgutil
import sys
from types import ModuleType

import torch

from fastdata.pixels.plan import Transform

IMAGENET_MEAN = (0.485, 0.456, 0.406)

IMAGENET_STD = (0.229, 0.224, 0.225)

RECIPES = ("crop", "rrc", "trivial", "randaug", "simclr")

CROP_PX = 224

PREPARED_PX = 256


def make_recipe(recipe: str, dtype: str) -> Transform:
    """Return a training transform of torchvision's references, or the one of the SimCLR paper.

    Args:
        recipe: one of ``RECIPES``; ``"crop"`` resizes to one size and crops at random.
        dtype: ``"uint8"``, or ``"float32"`` for normalised tensors.
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
    # uint8 batches have a quarter of the size, and can be normalised on the GPU.
    last = [v1.PILToTensor()]
    if dtype == "float32":
        last = [v1.ToTensor(), v1.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    made: Transform = v1.Compose([*crop, v1.RandomHorizontalFlip(), *more.get(recipe, ()), *last])
    return made


def import_torchvision() -> ModuleType:
    """Import torchvision, even if it was built for another version of torch.

    In that case its compiled library does not load, and the import fails where it registers two
    operators of that library. The transforms need neither, so both are declared here, and the
    import is repeated.

    Raises:
        ImportError: torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise ImportError(
            "this command needs torchvision, which is not installed: pip install torchvision"
        ) from error
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare_operators()
    return importlib.import_module("torchvision")


@functools.cache  # the operators exist for as long as the library object does
def _declare_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def find_transform(words: str) -> Transform:
    """Import the user's own transform by its ``MODULE:NAME``, also from the working directory."""
    if not all(words.partition(":")):
        raise ValueError(
            f"--transform {words} does not have the form MODULE:NAME, as in "
            "--transform train:train_transform"
        )
    # An installed command does not have the working directory on sys.path.
    sys.path.insert(0, os.getcwd())
    try:
        found: Transform = pkgutil.resolve_name(words)
        return found
    except AttributeError as missing:
        raise ImportError(f"--transform {words}: {missing}") from missing
    finally:
        sys.path.remove(os.getcwd())


def add_transform(parser: argparse.ArgumentParser, help_end: str) -> None:
    """Add the argument ``--transform``; ``help_end`` is the end of its help."""
    parser.add_argument(
        "--transform",
        metavar="MODULE:NAME",
        help="your own transform: MODULE:NAME imports it, such as train:train_transform from "
        f"train.py; {help_end}",
    )
