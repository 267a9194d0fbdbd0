"""The command line of ``fastdata``."""

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
        "measure fastdata against torchvision and torch, with published recipes on your images",
        "fastdata bench\n  fastdata bench imagenet/train --recipe rrc --json bench.json",
    ),
    "tune": (
        tune.add_arguments,
        tune.run,
        "find the fastest DataLoader settings for a folder of images; prints the call to paste",
        "fastdata tune imagenet/train --transform train:train_transform --batch-size 256",
    ),
    "doctor": (
        doctor.add_arguments,
        doctor.run,
        "check this machine: cores, memory, libraries, GPUs; exit status 1 if there is a problem",
        "fastdata doctor\n  docker run --gpus all IMAGE fastdata doctor",
    ),
    "diagnose": (
        diagnose.add_arguments,
        diagnose.run,
        "run a training script for some batches and show what limits its speed",
        "fastdata diagnose train.py --epochs 1\n  fastdata diagnose --batches 300 train.py",
    ),
    "build": (
        add_build,
        build,
        "prepare a folder of images once, as a cache for cache_dir= of later runs",
        "fastdata build imagenet/train /data/caches --resize 256 --crop 256\n"
        "  fastdata build imagenet/train /data/caches --codec lz4 --on-error skip",
    ),
    "inspect": (
        add_inspect,
        inspect,
        "show the contents of caches; exit status 1 if one is damaged",
        "fastdata inspect /data/caches --verify",
    ),
    "prune": (
        add_prune,
        prune,
        "remove caches that no run can use: unfinished and unreadable ones",
        "fastdata prune /data/caches --gone --dry-run",
    ),
}
"""Commands by name: function that adds options, function that runs, help, examples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    The status is 0 if all is well. It is 1 if ``inspect`` finds a damaged cache, ``doctor`` finds a
    problem, or the script of ``diagnose`` fails; 2 if the input is wrong, after one line on
    standard error; and 130 after Ctrl-C.

    Args:
        arguments: the words after ``fastdata``; by default those of this process.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.__dict__.pop("command")
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of file names
        sys.stdout.reconfigure(errors="backslashreplace")
    # Warnings are printed as one plain line: the line of code that raised them is fastdata's, and
    # does not help the user.
    with warnings.catch_warnings():
        if command is not diagnose.run:  # its warnings come from the user's own script
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
        prog="fastdata",
        description="Image batches for PyTorch at memory speed. "
        "'fastdata COMMAND --help' shows the options of a command.",
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
