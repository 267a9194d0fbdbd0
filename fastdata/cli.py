"""The command ``fastdata``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdata.bench.run import BenchSettings, run_bench
from fastdata.bench.show import import_matplotlib, save_chart, save_json, table, versions
from fastdata.errors import FastDataError

__all__ = ["main"]

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: words after ``fastdata``; None takes them from the process.

    Returns:
        0; 2 when the input is at fault, after one line on standard error; 130 after Ctrl-C.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.crop > options.resize:
        parser.error(f"--crop {options.crop} is larger than the prepared square, --resize {options.resize}")
    try:
        return _bench(options)
    except KeyboardInterrupt:
        print("fastdata: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (FastDataError, ImportError, OSError) as error:
        print(f"fastdata: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


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
    return parser


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
