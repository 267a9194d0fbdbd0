"""The command ``fastdata``."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

from fastdata.bench import RECIPES, BenchSettings, import_extra, run_bench, save_chart, table, versions
from fastdata.cache import inspect_caches, prune_caches, verify_cache
from fastdata.codecs import KNOWN_CODECS
from fastdata.errors import FastDataError
from fastdata.folder import ImageFolder
from fastdata.images import CenterCrop
from fastdata.memory import format_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words after ``fastdata``, by default the process's, and return the exit status.

    That is 0; 1 when ``inspect`` finds a cache damaged; 2 when the input is at fault, after one line on standard error;
    130 after Ctrl-C.
    """
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    if command is _bench and options["crop_px"] > options["resize_px"]:
        parser.error(f"--crop {options['crop_px']} is larger than the prepared square, --resize {options['resize_px']}")
    format_before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"fastdata: {_in_flags(message, options)}\n"
    try:
        return int(command(**options))
    except KeyboardInterrupt:
        print("fastdata: interrupted", file=sys.stderr)
        return 130
    except (FastDataError, ImportError, OSError, ValueError) as error:
        print(f"fastdata: {_in_flags(error, options)}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = format_before


def _in_flags(message: object, options: Iterable[str]) -> str:
    """What the library says of its arguments, as flags of the command: ``on_error='skip'`` is ``--on-error skip``."""
    names = "|".join(name.removesuffix("_px") for name in options)
    words = re.sub(rf"\b({names})=(?:'(\w+)'|True)?", lambda said: f"--{said[1]} {said[2] or ''}".strip(), str(message))
    flags = re.sub(r"--\w+", lambda flag: flag[0].replace("_", "-"), words)
    return flags.replace("cache_dir=", "CACHE ")


def _bench(*, json: Path | None, plot: Path | None, **settings: Any) -> int:
    if plot:
        import_extra("matplotlib", "plot", feature="--plot")  # before the minutes of measuring, not after
    document = run_bench(BenchSettings(**settings, progress=True))
    print(table(document))
    if json:
        json.write_text(dumps(document, indent=2, default=str) + "\n", "utf-8")
        print(f"figures: {json}")
    if plot:
        save_chart(document, plot)
        print(f"chart: {plot}")
    return 0


def _build(*, folder: Path, cache: Path, crop: int | None, **options: Any) -> int:
    centre = None if crop is None else CenterCrop((crop, crop))
    with ImageFolder(folder, centre, cache_dir=cache, **options) as dataset:
        print(f"{len(dataset):,} samples; {dataset.storage_plan.reason}")
    return 0


def _inspect(*, cache: Path, verify: bool) -> int:
    is_sound = True
    for found in inspect_caches(cache):
        print(found)
        damaged = verify_cache(found) if verify else []
        for line in damaged:
            print(f"  {line}")
        if verify and not damaged:
            print("  verified   every sample is as it was written")
        is_sound = is_sound and not found.problem and not damaged
    return 0 if is_sound else 1


def _prune(*, cache: Path, gone: bool, dry_run: bool) -> int:
    removals = prune_caches(cache, gone=gone, dry_run=dry_run)
    for removal in removals:
        print(f"{removal.path}: {removal.reason} ({format_bytes(removal.size_bytes)})")
    size = format_bytes(sum(removal.size_bytes for removal in removals))
    done = f"{size} {'would be removed' if dry_run else 'removed'}"
    print(done if removals else "nothing to remove: no leftovers, and each cache can be read")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdata", description="Image batches for PyTorch at memory speed.")
    parser.add_argument(
        "--version", action="version", version=f"fastdata {versions()['fastdata'] or '(not installed)'}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    bench = commands.add_parser(
        "bench",
        help="measure a training epoch: torchvision and torch against fastdata, on your images",
        description="Measures training epochs over a folder of images: torchvision and torch, and fastdata, in turns.",
    )
    bench.set_defaults(command=_bench)
    add = bench.add_argument
    add("folder", nargs="?", type=Path, metavar="FOLDER", help="class folders of images; without it images are drawn")
    add("--images", type=_positive, metavar="N", help="images at most; by default 1000, or 400 drawn ones")
    recipes = "what to measure, several times if need be; by default all of them"
    add("--recipe", action="append", choices=RECIPES, help=recipes)
    add("--transform", metavar="MODULE:NAME", help="a transform of your own, such as train:train_transform")
    size = partial(add, type=_positive, metavar="PX")
    size(
        "--resize",
        "--image-size",
        dest="resize_px",
        default=256,
        help="side of the prepared square; default: %(default)s",
    )
    size("--crop", dest="crop_px", default=224, help="side of the random crop; default: %(default)s")
    add("--batch-size", type=_positive, default=64, metavar="N", help="images in a batch; default: %(default)s")
    add("--rounds", type=_positive, default=3, metavar="N", help="measured rounds; default: %(default)s")
    add("--dtype", choices=("uint8", "float32"), default="uint8", help="float32 is normalised; default: %(default)s")
    add("--num-workers", type=_whole, metavar="N", help="of both loaders; by default the best for each")
    add("--plot", type=Path, metavar="FILE", help="draw a bar chart (extra: plot)")
    add("--json", type=Path, metavar="FILE", help="keep every figure, with versions")

    build = commands.add_parser(
        "build",
        help="prepare a folder of images into a cache, for cache_dir= of later runs",
        description="Prepares class folders of images as ImageFolder(FOLDER, transform, cache_dir=CACHE) does whose "
        "transform begins with Resize and CenterCrop of these sizes; such a dataset then starts from the cache.",
    )
    build.set_defaults(command=_build)
    add = build.add_argument
    add("folder", type=Path, metavar="FOLDER", help="class folders of images")
    add("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    add("--resize", type=_positive, metavar="PX", help="length of the shorter side; default: as it is")
    add("--crop", type=_positive, metavar="PX", help="side of the square cut out of the centre; default: all")
    codecs = ("auto", "source", *KNOWN_CODECS)
    add("--codec", choices=codecs, default="auto", help="default: auto, which is raw where the disk has room")
    on_error = "what to do with a file that is no image; default: %(default)s"
    add("--on-error", choices=("raise", "skip"), default="raise", help=on_error)
    add("--fast-decode", action="store_true", help="about twice as fast, slightly other pixels")
    add("--num-workers", type=_positive, metavar="N", help="processes; by default all usable cores")

    inspect = commands.add_parser(
        "inspect",
        help="show what caches hold, and whether they are sound",
        description="Shows a cache, or all in a folder. Status 1 if one is damaged.",
    )
    inspect.set_defaults(command=_inspect)
    inspect.add_argument("cache", type=Path, metavar="CACHE", help="a cache, or a folder that keeps caches")
    marks = "read every sample and mark damaged ones, which the next run prepares anew"
    inspect.add_argument("--verify", action="store_true", help=marks)

    prune = commands.add_parser(
        "prune",
        help="remove caches that no run can use any more",
        description="Removes what dead writers left, and caches that cannot be read.",
    )
    prune.set_defaults(command=_prune)
    prune.add_argument("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    prune.add_argument("--gone", action="store_true", help="also caches of folders that are not there now")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if (number := _whole(text)) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
