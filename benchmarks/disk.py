"""How long does it take to store prepared samples on disk, and how soon does the next run start?

Building a cache and filling shared memory take turns. A run from a filled cache is timed in its own process (without
imports). Reading files into memory is compared with ``cat`` of the same files.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from _helper import (
    Row,
    class_folders,
    in_turns,
    parser,
    print_rows,
    save_rows,
    seconds_of,
    transforms,
)
from fastdata import CachedDataset, ImageFolder
from fastdata.machine.limits import usable_cores

START = """
import sys, time
from fastdata import ImageFolder
start = time.perf_counter()
dataset = ImageFolder(sys.argv[1], cache_dir=sys.argv[2], resize=(32, 32))
if sys.argv[3] == "batch":
    dataset.__getitems__(range(0, len(dataset), len(dataset) // 64))
print(time.perf_counter() - start)
"""


def building(root: Path, work: Path, rounds: int) -> list[Row]:
    """Compare preparing photographs into shared memory with preparing them into a cache on disk."""
    transform = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(256)])
    count = sum(1 for path in root.rglob("*") if path.is_file())
    made = iter(range(10_000))

    def build(on_disk: bool) -> float:
        options = {"cache_dir": work / f"build-{next(made)}"} if on_disk else {"storage": "shared"}
        return count / seconds_of(
            lambda: ImageFolder(str(root), transform, **options).prepare().close()
        )

    rates = in_turns({"shared": partial(build, False), "disk": partial(build, True)}, rounds)
    row = partial(
        Row, section=f"preparing {count} photographs at 256x256, all cores", unit="images/s"
    )
    return [
        row(name="into shared memory", rounds=rates["shared"]),
        row(
            name="into a cache, synced",
            rounds=rates["disk"],
            against="into shared memory",
            target="0.95",
        ),
    ]


def starting(root: Path, work: Path, rounds: int, count: int) -> list[Row]:
    """Measure how long a run with a filled cache of many small images takes to its dataset, and to its first batch."""
    many = _many_links(root, work / "many", count)
    cache_dir = work / "start"
    first_s = seconds_of(
        lambda: ImageFolder(str(many), cache_dir=cache_dir, resize=(32, 32)).close()
    )

    def start(what: str) -> float:
        command = [sys.executable, "-c", START, str(many), str(cache_dir), what]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    seconds = in_turns({what: partial(start, what) for what in ("dataset", "batch")}, rounds)
    row = partial(
        Row, section=f"start from a filled cache, {count:,} images, without imports", unit="s"
    )
    return [
        row(name="first run, all prepared", rounds=(first_s,)),
        row(name="dataset", rounds=seconds["dataset"]),
        row(name="dataset and first batch", rounds=seconds["batch"], target="0.5 s at most"),
    ]


def reading(work: Path, rounds: int, size_mib: int) -> list[Row]:
    """Compare raw samples read in order from the page cache with ``cat``; the first reads check each sample."""
    side = 256
    count = (size_mib << 20) // (3 * side * side)
    images = _Noise(count, side)
    options: dict[str, Any] = {
        "cache_dir": work / "reading",
        "cache_key": f"noise {count}",
    }
    CachedDataset(images, **options).prepare().close()
    files = [path for path in (work / "reading").glob("*/part0-*.npy") if "sums" not in path.name]
    size_mb = sum(path.stat().st_size for path in files) / 1e6
    out = np.empty((64, 3, side, side), np.uint8)

    def read(store: Any) -> None:
        for first in range(0, count, len(out)):
            index_B = np.arange(first, min(first + len(out), count))
            store.gather_into(index_B, out[: len(index_B)])

    def ours(is_again: bool) -> float:
        with CachedDataset(images, **options) as dataset:
            store = dataset.reader().kept.images  # type: ignore[union-attr]  # what loaders read from
            if is_again:
                read(store)
            return size_mb / seconds_of(lambda: read(store))

    def cat(command: str) -> float:
        return size_mb / seconds_of(
            lambda: subprocess.run(["sh", "-c", command, "-", *files], check=True)
        )

    rates = in_turns(
        {
            "cat": partial(cat, 'cat "$@" > /dev/null'),
            "first": partial(ours, False),
            "again": partial(ours, True),
        },
        rounds,
    )
    row = partial(
        Row, section=f"raw samples in order from the page cache, {size_mb:,.0f} MB", unit="MB/s"
    )
    against = "cat to /dev/null"
    return [
        row(name=against, rounds=rates["cat"]),
        row(
            name="first reads, each sample checked",
            rounds=rates["first"],
            against=against,
            target="0.5",
        ),
        row(name="later reads", rounds=rates["again"], against=against, target="0.5"),
    ]


class _Noise(Dataset[Any]):
    """Images of noise, all equal."""

    def __init__(self, count: int, side: int) -> None:
        self._count = count
        self._image = torch.from_numpy(
            np.random.default_rng(0).integers(0, 256, (3, side, side), np.uint8)
        )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._image, index


def _many_links(root: Path, target: Path, count: int) -> Path:
    """Make class folders of ``count`` hard links to the files of ``root``; return ``target``."""
    found = sorted(path for path in root.rglob("*") if path.is_file())
    for index in range(count):
        path = found[index % len(found)]
        link = target / path.parent.name / f"{index // len(found):04}_{path.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, link)
    return target


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--small",
        type=Path,
        help="folder of class folders of small images; default: $FASTDATA_CIFAR, else synthetic images",
    )
    options.add_argument(
        "--count",
        type=int,
        default=2000,
        help="number of files; photographs are copied as often as needed",
    )
    options.add_argument(
        "--small-count", type=int, default=60_000, help="number of links to the small images"
    )
    options.add_argument(
        "--read-mib", type=int, default=2048, help="size of the raw samples to read, in MiB"
    )
    options.add_argument("--work", type=Path, help="folder in which a temporary folder is made")
    options.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run"
    )
    chosen = options.parse_args()
    rows: list[Row] = []
    for name in chosen.sections:
        with tempfile.TemporaryDirectory(prefix="fastdata-disk-", dir=chosen.work) as folder:
            rows += SECTIONS[name](chosen, Path(folder))
    print_rows(rows)
    save_rows(rows, chosen.json, rounds=chosen.rounds, usable_cores=usable_cores())


def _building(chosen: argparse.Namespace, work: Path) -> list[Row]:
    with class_folders(chosen.images, count=chosen.count) as (root, _):
        return building(root, work, chosen.rounds)


def _starting(chosen: argparse.Namespace, work: Path) -> list[Row]:
    with class_folders(chosen.small, count=2000, size=(32, 32), variable="FASTDATA_CIFAR") as (
        root,
        _,
    ):
        return starting(root, work, chosen.rounds, chosen.small_count)


def _reading(chosen: argparse.Namespace, work: Path) -> list[Row]:
    return reading(work, chosen.rounds, chosen.read_mib)


SECTIONS = {"building": _building, "starting": _starting, "reading": _reading}


if __name__ == "__main__":
    main()
