"""The command ``fastdata``."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Callable, Sequence

from fastdata.errors import FastDataError
from fastdata.tools import bench, diagnose, doctor, tune
from fastdata.tools.build import add_build, build
from fastdata.tools.figures import version
from fastdata.tools.inspect import add_inspect, inspect
from fastdata.tools.prune import add_prune, prune

COMMANDS = {
    "bench": (
        bench.add_arguments,
        bench.run,
        "measure published recipes on your images: torchvision and torch against fastdata",
        "fastdata bench\n  fastdata bench imagenet/train --recipe rrc --json bench.json",
    ),
    "tune": (
        tune.add_arguments,
        tune.run,
        "find the fastest settings of a loader over a folder, and print the call to paste",
        "fastdata tune imagenet/train --transform train:train_transform --batch-size 256",
    ),
    "doctor": (
        doctor.add_arguments,
        doctor.run,
        "look at what this machine gives to training; status 1 if there is a problem",
        "fastdata doctor\n  docker run --gpus all IMAGE fastdata doctor",
    ),
    "diagnose": (
        diagnose.add_arguments,
        diagnose.run,
        "run a training script for some batches and say what limits it",
        "fastdata diagnose train.py --epochs 1\n  fastdata diagnose --batches 300 train.py",
    ),
    "build": (
        add_build,
        build,
        "prepare a folder of images into a cache, for cache_dir= of runs with these sizes",
        "fastdata build imagenet/train /data/caches --resize 256 --crop 256\n"
        "  fastdata build imagenet/train /data/caches --codec lz4 --on-error skip",
    ),
    "inspect": (
        add_inspect,
        inspect,
        "show what caches hold, and whether they are sound; status 1 if one is damaged",
        "fastdata inspect /data/caches --verify",
    ),
    "prune": (
        add_prune,
        prune,
        "remove what dead writers left, and caches that no run can use any more",
        "fastdata prune /data/caches --gone --dry-run",
    ),
}
"""Commands by name: add options, run, help, examples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the words after ``fastdata``, by default the process's, and return the exit status.

    That is 0; 1 when ``inspect`` finds a cache damaged, ``doctor`` a problem, or the script of
    ``diagnose`` fails; 2 when the input is at fault, after one line on standard error; 130 after
    Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.__dict__.pop("command")
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may not have every name of a file
        sys.stdout.reconfigure(errors="backslashreplace")
    # A warning is one plain line here: the line of code that it comes from is none of the user's.
    with warnings.catch_warnings():
        if command is not diagnose.run:  # whose warnings are of the user's own script
            warnings.showwarning = lambda message, *_, **__: _say(message)
        try:
            return command(options)
        except KeyboardInterrupt:
            _say("interrupted")
            return 130
        except (FastDataError, ImportError, OSError, ValueError) as error:
            _say(error)
            return 2


def _say(message: object) -> None:
    print(f"fastdata: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastdata", description="Image batches for PyTorch at memory speed."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"fastdata {version('fastdata') or '(not installed)'}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add_arguments, run, text, examples) in COMMANDS.items():
        child = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n  {examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        child.set_defaults(command=run)
        add_arguments(child)
    return parser


if __name__ == "__main__":
    sys.exit(main())
