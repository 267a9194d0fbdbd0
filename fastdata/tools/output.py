"""What the commands print, keep and draw: aligned rows, JSON with versions and the machine, charts."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastdata.errors import refuse_remote
from fastdata.machine.memory import cpu_model, usable_cores

GREY, BLUE = "#9aa5b1", "#2f7ed8"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right, but for words at the end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *figures, words in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, figures, widths[1:]), words]
        lines.append("  ".join(cells).rstrip())
    return lines


def add_files(parser: argparse.ArgumentParser, *, plots: bool = False) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep every figure, with versions"
    )
    if plots:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a chart (extra: plot)")


def check_files(options: argparse.Namespace) -> None:
    """Raise what would otherwise be raised after minutes of measuring.

    Raises:
        FileNotFoundError: there is no folder for a file.
        ImportError: nothing can draw.
    """
    for name in ("json", "plot"):
        file = getattr(options, name, None)
        if file and not file.parent.is_dir():
            raise FileNotFoundError(f"--{name} {file}: there is no folder {file.parent}")
    if getattr(options, "plot", None):
        import_matplotlib()


def keep(
    document: dict[str, Any],
    options: argparse.Namespace,
    plot: Callable[[Path], object] | None = None,
) -> None:
    """Write the files that were asked for: figures with the versions and the machine that they are of, and a chart."""
    if options.json:
        facts = {"versions": versions(), "machine": machine_facts()}
        options.json.write_text(json.dumps(document | facts, indent=2, default=str) + "\n", "utf-8")
        print(f"figures: {options.json}")
    if plot and options.plot:
        plot(options.plot)
        print(f"chart: {options.plot}")


def check_folder(folder: Path) -> None:
    """Raise what would otherwise be an error without a cure.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is a URL.
    """
    refuse_remote(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give the root of class folders of images")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def import_matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        message = "a chart needs matplotlib, which is not installed: pip install 'fastdata[plot]'"
        raise ImportError(message) from error


def bars(
    file: Path | str, rows: Sequence[tuple[str, float, bool]], unit: str, title: str = ""
) -> None:
    """Draw a bar for each (name, value, whether it stands out), without pyplot, whose backend is the user's choice."""
    import_matplotlib()
    size = (8.0, 1.4 + 0.32 * len(rows))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    colours = [BLUE if stands_out else GREY for _, _, stands_out in rows]
    drawn = axes.barh(range(len(rows)), [value for _, value, _ in rows], color=colours)
    axes.bar_label(drawn, [f"{value:,.4g}" for _, value, _ in rows], padding=4)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set(title=title, xlabel=unit)
    axes.title.set(fontsize="small", wrap=True)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    figure.savefig(file, dpi=150)


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
