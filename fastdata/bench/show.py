"""A result as a table, as JSON and as a chart."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdata.bench.run import BenchResult, Road
from fastdata.machine import usable_cores

__all__ = ["import_matplotlib", "machine_facts", "save_chart", "save_json", "table", "versions"]

MIB = 2**20


def table(result: BenchResult) -> str:
    """The two roads side by side, in plain text."""
    settings = result.settings
    roads = (result.vanilla, result.fastdata)
    rows = [
        ("", *(road.name for road in roads)),
        ("num_workers, the best", *(str(road.num_workers) for road in roads)),
        ("prepare, once", "-", f"{result.fastdata.prepare_s:.2f} s"),
        ("first batch", *(f"{road.first_batch_s * 1000:,.0f} ms" for road in roads)),
        ("images/s, median", *(f"{road.images_per_s.median:,.0f}" for road in roads)),
        ("  lowest to highest", *(_range(road) for road in roads)),
        ("ratio", "1.0", f"{result.ratio:.1f}"),
        ("peak memory, PSS", *(f"{road.peak_pss_bytes / MIB:,.0f} MiB" for road in roads)),
        ("first epoch, all told", *(f"{_first_epoch_s(result, road):.2f} s" for road in roads)),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows]
    source = str(settings.folder) if settings.folder else "drawn for this run"
    facts = machine_facts()
    return "\n".join(
        [
            f"{result.images:,} images ({source}), {result.mean_file_bytes / 1000:.0f} kB a file",
            f"Resize + CenterCrop {settings.resize_px}, RandomCrop {settings.crop_px} + flip, {settings.dtype}, "
            f"batch {settings.batch_size}; {settings.rounds} rounds in turns",
            f"{facts['cpu_model']}, {facts['usable_cores']} cores",
            "",
            *lines,
            "",
            "First epoch: preparation and one epoch, files in the page cache. "
            f"Memory before either: {result.start_pss_bytes / MIB:,.0f} MiB.",
        ]
    )


def save_json(result: BenchResult, path: Path) -> None:
    """Write every figure, the settings, the versions and the machine."""
    figures = asdict(result)
    figures["ratio"] = result.ratio
    document = {"figures": figures, "versions": versions(), "machine": machine_facts()}
    path.write_text(json.dumps(document, indent=2, default=str) + "\n", "utf-8")


def save_chart(result: BenchResult, path: Path) -> None:
    """Draw images/s, median with its range, as bars from zero.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib = import_matplotlib()
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    roads = (result.vanilla, result.fastdata)
    names = [road.name for road in roads]
    medians = [road.images_per_s.median for road in roads]
    below = [road.images_per_s.median - road.images_per_s.lowest for road in roads]
    above = [road.images_per_s.highest - road.images_per_s.median for road in roads]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    bars = axes.bar(names, medians, yerr=[below, above], capsize=6, color=["#9aa5b1", "#2f7ed8"])
    axes.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=6)
    axes.margins(y=0.15)
    axes.set_ylabel("images/s")
    axes.set_title(f"{result.images:,} images, batch {result.settings.batch_size}: {result.ratio:.0f} times")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def import_matplotlib() -> Any:
    """matplotlib, or an ImportError that says how to get it."""
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install 'fastdata[plot]'") from error


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter, None for those not installed."""
    names = ("fastdata", "torch", "torchvision", "numpy", "pillow", "simplejpeg", "lz4", "zstandard")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


def machine_facts() -> dict[str, Any]:
    """The processor and how much of it there is."""
    return {
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
    }


def _first_epoch_s(result: BenchResult, road: Road) -> float:
    return road.prepare_s + result.images / road.images_per_s.median


def _range(road: Road) -> str:
    return f"{road.images_per_s.lowest:,.0f} to {road.images_per_s.highest:,.0f}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
