"""The command ``fastdata``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from fastdata.bench.run import BenchSettings, run_bench
from fastdata.bench.show import import_matplotlib, save_chart, save_json, table, versions
from fastdata.cache import inspect_caches, prune_caches, verify_cache
from fastdata.codecs import KNOWN_CODECS
from fastdata.decode import CenterCrop
from fastdata.errors import FastDataError
from fastdata.folder import ImageFolder
from fastdata.memory import format_bytes

__all__ = ["main"]

EXIT_DAMAGED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: words after ``fastdata``; None takes them from the process.

    Returns:
        0; 1 when ``inspect`` finds a cache damaged; 2 when the input is at fault, after one line on standard error; 130
        after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "bench" and options.crop > options.resize:
        parser.error(f"--crop {options.crop} is larger than the prepared square, --resize {options.resize}")
    commands = {"bench": _bench, "build": _build, "inspect": _inspect, "prune": _prune}
    try:
        with _plain_warnings():
            return commands[options.command](options)
    except KeyboardInterrupt:
        print("fastdata: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (FastDataError, ImportError, OSError, ValueError) as error:
        print(f"fastdata: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings as errors are shown: of a command, the line of code that led to them says nothing."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"fastdata: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _bench(options: argparse.Namespace) -> int:
    if options.plot:
        import_matplotlib()  # before the minutes of measuring, not after
    result = run_bench(
        BenchSettings(
            folder=options.folder,
            images=options.images,
            resize_px=options.resize,
            crop_px=options.crop,
            batch_size=options.batch_size,
            rounds=options.rounds,
            dtype=options.dtype,
            num_workers=options.num_workers,
            progress=sys.stderr.isatty(),
        )
    )
    print(table(result))
    if options.json:
        save_json(result, options.json)
        print(f"figures: {options.json}")
    if options.plot:
        save_chart(result, options.plot)
        print(f"chart: {options.plot}")
    return 0


def _build(options: argparse.Namespace) -> int:
    crop = None if options.crop is None else CenterCrop((options.crop, options.crop))
    dataset = ImageFolder(
        options.folder,
        crop,
        cache_dir=options.cache,
        resize=options.resize,
        codec=options.codec,
        on_error=options.on_error,
        fast_decode=options.fast_decode,
        num_workers=options.num_workers,
        progress=sys.stderr.isatty(),
    )
    with dataset:
        print(f"{len(dataset):,} samples; {dataset.storage_plan.reason}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    is_sound = True
    for found in inspect_caches(options.cache):
        print(found)
        is_sound = is_sound and not found.problem
        if options.verify:
            damaged = verify_cache(found)
            for line in damaged:
                print(f"  {line}")
            if not damaged:
                print("  verified   every sample is as it was written")
            is_sound = is_sound and not damaged
    return 0 if is_sound else EXIT_DAMAGED


def _prune(options: argparse.Namespace) -> int:
    removals = prune_caches(options.cache, gone=options.gone, dry_run=options.dry_run)
    for removal in removals:
        print(f"{removal.path}: {removal.reason} ({format_bytes(removal.size_bytes)})")
    if not removals:
        print("nothing to remove: no leftovers, and each cache can be read")
        return 0
    what = "would be removed" if options.dry_run else "removed"
    print(f"{format_bytes(sum(removal.size_bytes for removal in removals))} {what}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastdata", description="Image batches for PyTorch at memory speed.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench = commands.add_parser(
        "bench",
        help="measure a training epoch: torchvision and torch against fastdata, on your images",
        description="Measures training epochs over a folder of images, the usual road and fastdata's in turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = bench.add_argument
    add("folder", nargs="?", type=Path, metavar="FOLDER", help="class folders of images; without it images are drawn")
    add("--images", type=_positive, metavar="N", help="images at most; by default 4000, or 400 drawn ones")
    add("--resize", "--image-size", type=_positive, default=256, metavar="PX", help="side of the prepared square")
    add("--crop", type=_positive, default=224, metavar="PX", help="side of the random crop")
    add("--batch-size", type=_positive, default=64, metavar="N", help="images in a batch")
    add("--rounds", type=_positive, default=5, metavar="N", help="measured rounds")
    add("--dtype", choices=("uint8", "float32"), default="uint8", help="float32 is normalised")
    add(
        "--num-workers",
        type=_not_negative,
        metavar="N",
        help="of both loaders; by default the best for each",
    )
    add("--plot", type=Path, metavar="FILE", help="draw a bar chart (extra: plot)")
    add("--json", type=Path, metavar="FILE", help="keep every figure, with versions")
    _add_cache_commands(commands)
    return parser


def _add_cache_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    build = commands.add_parser(
        "build",
        help="prepare a folder of images into a cache, for cache_dir= of later runs",
        description="Prepares class folders of images as ImageFolder(FOLDER, transform, cache_dir=CACHE) does whose "
        "transform begins with Resize and CenterCrop of these sizes; such a dataset then starts from the cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = build.add_argument
    add("folder", type=Path, metavar="FOLDER", help="class folders of images")
    add("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    add("--resize", type=_positive, metavar="PX", help="length of the shorter side")
    add("--crop", type=_positive, metavar="PX", help="side of the square cut out of the centre")
    add("--codec", choices=("auto", "source", *KNOWN_CODECS), default="auto", help="raw where the disk has room: auto")
    add("--on-error", choices=("raise", "skip"), default="raise", help="what to do with a file that is no image")
    add("--fast-decode", action="store_true", help="about twice as fast, slightly other pixels")
    add("--num-workers", type=_positive, metavar="N", help="processes; by default all usable cores")
    inspect = commands.add_parser(
        "inspect",
        help="show what caches hold, and whether they are sound",
        description="Shows a cache, or all in a folder. Status 1 if one is damaged.",
    )
    inspect.add_argument("cache", type=Path, metavar="CACHE", help="a cache, or a folder that keeps caches")
    inspect.add_argument(
        "--verify",
        action="store_true",
        help="read every sample and mark damaged ones, which the next run prepares anew",
    )
    prune = commands.add_parser(
        "prune",
        help="remove caches that no run can use any more",
        description="Removes what dead writers left, and caches that cannot be read.",
    )
    prune.add_argument("cache", type=Path, metavar="CACHE", help="folder that keeps caches")
    prune.add_argument("--gone", action="store_true", help="also caches of folders that are not there now")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def _version() -> str:
    return f"fastdata {versions()['fastdata'] or '(not installed)'}"


def _positive(text: str) -> int:
    number = _not_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 0 or more")
    return int(text)
