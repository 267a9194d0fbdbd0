"""``fastdata build``: prepare a folder of images and store them as a cache."""

from __future__ import annotations

import argparse

from fastdata.datasets.folder import ImageFolder
from fastdata.errors import counted
from fastdata.paths import is_url
from fastdata.pixels.plan import Transform
from fastdata.stores.codecs import KNOWN_CODECS
from fastdata.tools.arguments import add_storage_options, check_folder, positive


def add_build(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fastdata build``."""
    add = parser.add_argument
    add("root", metavar="FOLDER", help="folder with one folder of images for each class")
    add("cache_dir", metavar="CACHE", help="folder for caches: cache_dir= of later runs")
    add(
        "--resize",
        type=positive,
        metavar="PX",
        help="resize the shorter side to this length; default: keep the size",
    )
    add(
        "--crop",
        dest="transform",
        type=side,
        metavar="PX",
        help="cut a square of this side out of the centre; default: keep the whole image",
    )
    add(
        "--codec",
        choices=("auto", "source", *KNOWN_CODECS),
        default="auto",
        help="how images are stored; default: auto, which is raw pixels if the disk has room",
    )
    add(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="what to do with a file that is not an image: stop (raise), or leave it out (skip); "
        "default: %(default)s",
    )
    add(
        "--prepare-workers",
        type=positive,
        metavar="N",
        help="number of threads or processes that prepare images; default: the usable cores",
    )
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="prepare on this machine, or on a Ray cluster (needs Ray: pip install ray); "
        "default: %(default)s",
    )
    add(
        "--shard-size",
        dest="shard_bytes",
        metavar="SIZE",
        help="least size of the files (shards) of the cache, such as 256MiB; most are below twice "
        "this size. A build that was stopped continues after its last complete shard",
    )
    add_storage_options(parser)


def side(text: str) -> Transform:
    """Parse the side of a square, and return torchvision's ``CenterCrop`` of that size."""
    from torchvision.transforms import CenterCrop  # takes 1 s, so only this option imports it

    crop: Transform = CenterCrop(positive(text))
    return crop


def build(options: argparse.Namespace) -> int:
    """Make the cache and print its size; return the exit status."""
    if not is_url(options.root):
        check_folder(options.root)
    with ImageFolder.build_cache(**vars(options)) as dataset:
        print(f"{counted(len(dataset), 'sample')}; {dataset.storage_plan.reason}")
    return 0
