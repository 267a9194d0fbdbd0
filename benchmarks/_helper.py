"""Code that the benchmarks share: images, interleaved rounds, the table, the JSON.

Real images are used if ``--images FOLDER`` or an environment variable (FASTDATA_IMAGENET, FASTDATA_CIFAR) names a
folder with a folder for each class; otherwise images are synthetic (made by a formula).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from _processor import processor_facts
from fastdata.machine.limits import tree_pss_bytes, usable_cores
from fastdata.tools.figures import machine_facts, versions
from fastdata.tools.photos import write_photos

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from torchvision_ops import import_torchvision

if not import_torchvision():
    sys.exit(
        "the benchmarks compare with torchvision, which is not installed: pip install -c constraints.txt '.[bench]'"
    )

from torchvision import datasets, models, transforms

__all__ = [
    "Row",
    "class_folders",
    "datasets",
    "find_workers",
    "in_turns",
    "models",
    "on_ranks",
    "parser",
    "print_rows",
    "save_rows",
    "transforms",
    "vanilla_loader",
]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def lowest(self) -> float:
        return min(self.rounds)

    @property
    def highest(self) -> float:
        return max(self.rounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured quantity.

    Args:
        section: the question it belongs to.
        name: what was measured.
        unit: unit of the figures.
        rounds: one figure per round.
        against: name of the row of the same section by which its median is divided; empty for no ratio.
        target: what the ratio or the figure should reach, in words.
    """

    section: str
    name: str
    unit: str
    rounds: tuple[float, ...]
    against: str = ""
    target: str = ""

    @property
    def spread(self) -> Spread:
        return Spread(rounds=self.rounds)


def in_turns(
    competitors: dict[str, Callable[[], float]], rounds: int
) -> dict[str, tuple[float, ...]]:
    """Call each competitor once to warm up, then all of them in turns; return ``rounds`` figures of each."""
    for measure in competitors.values():
        measure()
    figures: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(rounds):
        for name, measure in competitors.items():
            figures[name].append(measure())
    return {name: tuple(row) for name, row in figures.items()}


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def vanilla_loader(dataset: Any, batch_size: int, num_workers: int) -> TorchDataLoader[Any]:
    """Return torch's loader with persistent workers, so that rounds do not include the start of workers."""
    return TorchDataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


def find_workers(make_loader: Callable[[int], Iterable[Any]], budget_s: float = 2.0) -> int:
    """Return the smallest number of workers, from 0 to the cores, whose rate is within two percent of the highest.

    A rate is the better of two passes of ``budget_s`` each. All numbers take turns: on a shared machine, one pass that
    another program disturbs would lead to a bad choice for the whole run.
    """
    rates = dict.fromkeys(range(usable_cores() + 1), 0.0)
    for _ in range(2):
        for count in rates:
            rate = images_per_s(make_loader(count), at_least_s=budget_s, whole_epochs=False)
            rates[count] = max(rates[count], rate)
    return min(count for count, rate in rates.items() if rate * 1.02 >= max(rates.values()))


@contextmanager
def class_folders(
    given: Path | None,
    *,
    count: int | None,
    size: tuple[int, int] = (512, 384),
    variable: str = "FASTDATA_IMAGENET",
) -> Iterator[tuple[Path, str]]:
    """Yield a folder of class folders with ``count`` files, and a text that names them.

    Real files are copied as often as needed. The folder is temporary, unless ``count`` is None: then it is the folder
    of the real files itself.
    """
    source = given or (Path(os.environ[variable]) if variable in os.environ else None)
    if source is not None and count is None:
        yield source, f"images of {source.name}"
        return
    with tempfile.TemporaryDirectory(prefix="fastdata-benchmark-") as folder:
        root = Path(folder)
        if source is None:
            write_photos(root, count=count or 400, size=size)
            yield root, f"{count or 400} synthetic images"
        else:
            found = sorted(
                path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES
            )
            _copy_to(root, found, count or len(found))
            yield root, f"{len(found)} images of {source.name} copied to {count} files"


def link_files(source: Path, root: Path, count: int) -> None:
    """Make ``count`` files in ``root`` that are hard links to the files in ``source``."""
    found = sorted(path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    for index in range(count):
        path = found[index % len(found)]
        target = root / path.parent.name / f"{index // len(found):05}_{path.name}"
        target.parent.mkdir(exist_ok=True)
        os.link(path, target)


def on_ranks(ranks: int, script: str, *arguments: object) -> Any:
    """Run a script under torchrun, one thread per rank; return the JSON that its rank 0 writes to ``--into``."""
    with tempfile.TemporaryDirectory(prefix="fastdata-benchmark-") as folder:
        into = Path(folder) / "figures.json"
        launcher = [
            "torch.distributed.run",
            "--standalone",
            "--local-addr=localhost",
            f"--nproc-per-node={ranks}",
        ]
        command = [
            sys.executable,
            "-m",
            *launcher,
            script,
            *map(str, arguments),
            "--into",
            str(into),
        ]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return json.loads(into.read_text("utf-8"))


def _copy_to(root: Path, found: list[Path], count: int) -> None:
    if not found:
        raise FileNotFoundError(
            f"there are no images ({', '.join(IMAGE_SUFFIXES)}) in the folder that --images or an environment variable "
            "names"
        )
    for index in range(count):
        path = found[index % len(found)]
        target = root / path.parent.name / f"{index // len(found):03}_{path.name}"
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument(
        "--images",
        type=Path,
        help="folder of class folders of images; default: $FASTDATA_IMAGENET, else synthetic images",
    )
    options.add_argument("--rounds", type=int, default=5, help="number of measured rounds")
    options.add_argument(
        "--json", type=Path, help="file to write every figure to, with versions and machine"
    )
    return options


def print_rows(rows: list[Row]) -> None:
    """Print a table of medians, ranges and ratios for each section."""
    facts = machine_facts()
    print(f"{facts['cpu_model']}, {facts['usable_cores']} cores, torch {versions()['torch']}")
    for section in dict.fromkeys(row.section for row in rows):
        print(f"\n{section}")
        members = {row.name: row for row in rows if row.section == section}
        for row in members.values():
            ratio = row.spread.median / members[row.against].spread.median if row.against else None
            words = f"{ratio:8.2f} x {row.against}" if ratio is not None else ""
            aim = f"  (to reach: {row.target})" if row.target else ""
            print(
                f"  {row.name:<34} {_figure(row.spread.median):>11} {row.unit:<9} {_range(row.spread):>22}{words}{aim}"
            )


def save_rows(rows: list[Row], path: Path | None, **settings: Any) -> None:
    """Write rounds, medians, settings, versions and machine to a JSON file; do nothing if ``path`` is None."""
    if path is None:
        return
    figures = [
        {
            "section": row.section,
            "name": row.name,
            "unit": row.unit,
            "median": row.spread.median,
            "rounds": row.rounds,
            "against": row.against,
            "target": row.target,
        }
        for row in rows
    ]
    document = {
        "figures": figures,
        "settings": {"date": date.today().isoformat()} | settings,
        "versions": versions(),
        "machine": machine_facts() | {"processor": processor_facts()},
    }
    path.write_text(json.dumps(document, indent=2, default=str) + "\n", "utf-8")


def epoch_rate(loader: Iterable[Any], at_least_s: float = 0.0) -> Callable[[], float]:
    """Return a function that measures images per second over whole epochs."""
    return lambda: images_per_s(loader, at_least_s=at_least_s)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def _range(spread: Spread) -> str:
    return f"{_figure(spread.lowest)} to {_figure(spread.highest)}"


def images_per_s(
    loader: Iterable[Any], *, at_least_s: float = 0.0, whole_epochs: bool = True
) -> float:
    """Return images per second of whole epochs, at least one, that together take ``at_least_s`` or longer.

    With ``whole_epochs=False`` reading stops with the batch after which ``at_least_s`` have passed.
    """
    images, start = 0, time.perf_counter()
    while True:
        for batch in loader:
            images += len(batch[0])
            if not whole_epochs and time.perf_counter() - start > at_least_s:
                break
        seconds = time.perf_counter() - start
        if seconds >= at_least_s or not images:
            return images / seconds


def first_batch_s(make_loader: Callable[[], Iterable[Any]]) -> float:
    start = time.perf_counter()
    batches = iter(make_loader())
    next(batches)
    # The time is taken before the loader is deleted, because that waits for its workers.
    return time.perf_counter() - start


@dataclass(slots=True)
class PeakMemory:
    """The highest PSS so far of this process and its descendants; a page that several of them share counts once."""

    size_bytes: int


@contextmanager
def peak_memory(every_s: float = 0.1) -> Iterator[PeakMemory]:
    """Measure memory in a thread until the block ends. That slows the block down, so do not time epochs in it."""
    peak, ended = PeakMemory(tree_pss_bytes()), threading.Event()

    def watch() -> None:
        is_over = False
        while not is_over:
            is_over = ended.wait(every_s)
            peak.size_bytes = max(peak.size_bytes, tree_pss_bytes())

    thread = threading.Thread(target=watch, name="fastdata-peak-memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
