"""``fastdata build``: prepare a folder of images into a cache."""

from __future__ import annotations

import argparse

from fastdata.datasets.folder import ImageFolder
from fastdata.errors import counted
from fastdata.paths import is_url
from fastdata.pixels.plan import Transform
from fastdata.stores.codecs import KNOWN_CODECS
from fastdata.tools.arguments import add_storage_options, check_folder, positive


def add_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("root", metavar="FOLDER", help="class folders of images")
    add("cache_dir", metavar="CACHE", help="folder that keeps caches")
    add(
        "--resize",
        type=positive,
        metavar="PX",
        help="length of the shorter side; default: unchanged",
    )
    add(
        "--crop",
        dest="transform",
        type=side,
        metavar="PX",
        help="side of the square cut out of the centre; default: all",
    )
    add(
        "--codec",
        choices=("auto", "source", *KNOWN_CODECS),
        default="auto",
        help="default: auto, which is raw if the disk has room",
    )
    add(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="if a file is not an image: stop, or leave it out; default: %(default)s",
    )
    add(
        "--prepare-workers",
        type=positive,
        metavar="N",
        help="processes; by default all usable cores",
    )
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="prepare by this machine, or by a Ray cluster (extra: ray); default: %(default)s",
    )
    add(
        "--shard-size",
        dest="shard_bytes",
        metavar="SIZE",
        help="write shards of this size to twice as much, such as 256MiB; a stopped build "
        "continues after the last one",
    )
    add_storage_options(parser)


def side(text: str) -> Transform:
    """Parse the side of a square, and return torchvision's step that cuts it out of the centre."""
    from torchvision.transforms import CenterCrop  # 1 s, which only this option takes

    crop: Transform = CenterCrop(positive(text))
    return crop


def build(options: argparse.Namespace) -> int:
    if not is_url(options.root):
        check_folder(options.root)
    with ImageFolder.build_cache(**vars(options)) as dataset:
        print(f"{counted(len(dataset), 'sample')}; {dataset.storage_plan.reason}")
    return 0
