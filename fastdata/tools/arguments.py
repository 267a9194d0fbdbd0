"""Arguments that several commands have, and their checks."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fastdata.paths import AnyPath, refuse_remote


def check_folder(
    folder: AnyPath, wanted: str = "a folder that has one folder of images for each class"
) -> None:
    """Check that a folder exists on this machine.

    Raises:
        FileNotFoundError: there is no such folder; the text names what is ``wanted``.
        ValueError: it is a URL.
    """
    refuse_remote(folder)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder} is not a folder on this machine. Give {wanted}.")


def positive(text: str) -> int:
    """Parse a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage-options",
        type=_json,
        metavar="FILE",
        help="JSON file with options of fsspec for URLs, such as credentials",
    )


def _json(text: str) -> dict[str, Any]:
    try:
        return {**json.loads(Path(text).read_text("utf-8"))}
    except (OSError, ValueError, TypeError) as problem:
        raise argparse.ArgumentTypeError(
            f'{text} is not a file with a JSON object, such as {{"anon": true}}: {problem}'
        ) from None
