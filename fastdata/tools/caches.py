"""``fastdata build``, ``inspect``, ``export`` and ``prune``: caches that outlive a run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdata.datasets.folder import ImageFolder
from fastdata.errors import counted, is_url
from fastdata.machine.memory import format_bytes
from fastdata.pixels.images import CenterCrop
from fastdata.stores.cache import inspect_caches, prune_caches
from fastdata.stores.codecs import KNOWN_CODECS
from fastdata.tools import output
from fastdata.tools.export import export_cache


def _add_storage_options(parser: argparse.ArgumentParser) -> None:
    secrets = (
        "JSON of fsspec's options for URLs, such as credentials, which must not stand in a command"
    )
    parser.add_argument("--storage-options", type=_json, metavar="FILE", help=secrets)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {problem}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text} holds no JSON object, such as {{"anon": true}}')
    return found


def add_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="class folders of images")
    add("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    add(
        "--resize",
        type=output.positive,
        metavar="PX",
        help="length of the shorter side; default: as it is",
    )
    add(
        "--crop",
        type=output.positive,
        metavar="PX",
        help="side of the square cut out of the centre; default: all",
    )
    codecs = ("auto", "source", *KNOWN_CODECS)
    add(
        "--codec",
        choices=codecs,
        default="auto",
        help="default: auto, which is raw where the disk has room",
    )
    on_error = "what to do with a file that is no image; default: %(default)s"
    add("--on-error", choices=("raise", "skip"), default="raise", help=on_error)
    add(
        "--prepare-workers",
        type=output.positive,
        metavar="N",
        help="processes; by default all usable cores",
    )
    engines = "what prepares: this machine, or a Ray cluster (extra: ray); default: %(default)s"
    add("--engine", choices=("local", "ray"), default="local", help=engines)
    sizes = "write shards of about this size, such as 256MiB; a stopped build goes on after them"
    add("--shard-size", dest="shard_bytes", metavar="SIZE", help=sizes)
    _add_storage_options(parser)


def build(options: argparse.Namespace) -> int:
    arguments = vars(options)
    folder = arguments.pop("folder")
    cache = arguments.pop("cache")
    crop = arguments.pop("crop")
    if not is_url(folder):
        output.check_folder(folder)
    centre = CenterCrop((crop, crop)) if crop else None
    with ImageFolder.build_cache(folder, centre, cache_dir=cache, **arguments) as dataset:
        print(f"{counted(len(dataset), 'sample')}; {dataset.storage_plan.reason}")
    return 0


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cache", type=Path, metavar="CACHE", help="a cache, or a folder that keeps caches"
    )
    marks = "read every sample and mark damaged ones, which the next run prepares anew"
    parser.add_argument("--verify", action="store_true", help=marks)
    _add_storage_options(parser)
    output.add_json(parser)


def inspect(options: argparse.Namespace) -> int:
    """Show caches; the status is 1 if one is damaged."""
    caches = inspect_caches(options.cache, options.storage_options, verify=options.verify)
    documents = []
    for found in caches:
        print(found)
        samples = found.manifest.count if found.manifest else 0
        documents.append({**asdict(found), "samples": samples})
    output.keep({"caches": documents}, options)
    return int(any(found.problem or found.damaged for found in caches))


def add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cache", type=Path, metavar="CACHE", help="a cache, or a folder that keeps one")
    add("out", type=Path, metavar="OUT", help="the folder to make")
    add("--to", choices=("webdataset", "folder"), required=True, help="what to write")
    formats = "default: %(default)s, which is lossless"
    add("--image-format", choices=("png", "jpeg"), default="png", help=formats)
    qualities = "1 to 100, of JPEG; by default 95"
    add("--quality", type=output.positive, metavar="N", help=qualities)
    sizes = "most bytes of images in a tar; default: %(default)s"
    add("--shard-size", default="256MiB", metavar="SIZE", help=sizes)
    _add_storage_options(parser)


def export(options: argparse.Namespace) -> int:
    done = export_cache(**vars(options))
    pixels = "the pixels of the cache" if done.lossless else "pixels changed by lossy compression"
    print(f"{done.folder}: {done.samples:,} samples as {options.image_format} files, {pixels}")
    return 0


def add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    parser.add_argument(
        "--gone", action="store_true", help="also caches of folders that are not there now"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")


def prune(options: argparse.Namespace) -> int:
    removals = prune_caches(options.cache, gone=options.gone, dry_run=options.dry_run)
    for removal in removals:
        print(f"{removal.path}: {removal.reason} ({format_bytes(removal.size_bytes)})")
    if not removals:
        print("nothing to remove: no leftovers, and each cache can be read")
        return 0
    size = format_bytes(sum(removal.size_bytes for removal in removals))
    print(f"{size} {'would be removed' if options.dry_run else 'removed'}")
    return 0
