"""What the commands print and keep: aligned rows, and JSON with versions and the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from fastdata.errors import refuse_remote
from fastdata.machine.memory import cpu_model, usable_cores


def add_json(parser: argparse.ArgumentParser) -> None:
    help_text = "keep every figure, with versions"
    parser.add_argument("--json", type=Path, metavar="FILE", help=help_text)


def check_json(options: argparse.Namespace) -> None:
    """Raise what would otherwise be raised after minutes of measuring."""
    file = getattr(options, "json", None)
    if file and not file.parent.is_dir():
        raise FileNotFoundError(f"--json {file}: there is no folder {file.parent}")


def keep(document: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the figures, if they were asked for, with the versions and the machine."""
    if options.json:
        facts = {"versions": versions(), "machine": machine_facts()}
        options.json.write_text(json.dumps(document | facts, indent=2, default=str) + "\n", "utf-8")
        print(f"figures: {options.json}")


def check_folder(folder: Path) -> None:
    refuse_remote(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give the root of class folders of images")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter, None for those not installed."""
    packages = ("fastdata", "torch", "torchvision", "numpy", "pillow", "lz4", "zstandard")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def machine_facts() -> dict[str, Any]:
    return {
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
    }
