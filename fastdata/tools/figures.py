"""Measurements of a command as JSON, with versions and machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path

from fastdata.machine.limits import cpu_model, usable_cores


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the argument ``--json``."""
    parser.add_argument(
        "--json",
        type=file_to_write,
        metavar="FILE",
        help="also write the results as JSON, with versions and machine",
    )


def file_to_write(text: str) -> Path:
    """Parse the path of a file to write; its folder must exist."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a file in a folder that exists")
    return path


def write_json(document: dict[str, object], options: argparse.Namespace) -> None:
    """Write a document with versions and machine, if ``--json`` was given."""
    if options.json:
        document |= {"versions": versions(), "machine": machine_facts()}
        options.json.write_text(json.dumps(document, indent=2, default=str) + "\n", "utf-8")
        print(f"figures: {options.json}")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of related packages; None for one that is not installed."""
    packages = ("fastdata", "torch", "torchvision", "numpy", "pillow", "lz4", "zstandard")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def machine_facts() -> dict[str, str | int | None]:
    return {
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
    }
