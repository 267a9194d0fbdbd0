"""How close to the speed of memory are batches made, and how long does preparing take?

Every section runs its competitors in turns: fastdata, torch's DataLoader over the original files, and a bare copy or
conversion of the same pixels on one thread, which is the limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _helper import (
    Row,
    class_folders,
    datasets,
    epoch_rate,
    find_workers,
    first_batch_s,
    images_per_s,
    in_turns,
    parser,
    peak_memory,
    print_rows,
    save_rows,
    seconds_of,
    transforms,
    vanilla_loader,
)
from fastdata import DataLoader, ImageFolder
from fastdata.machine.limits import tree_pss_bytes, usable_cores
from fastdata.tools.recipes import IMAGENET_MEAN, IMAGENET_STD

ROUND_S = 1.0
MB = 1e6

Measure = Callable[[], float]


def photo_transform(dtype: str) -> Any:
    last = {
        "uint8": [transforms.PILToTensor()],
        "float32": [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)],
    }
    return transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(256),
            transforms.RandomCrop(224),
            transforms.RandomHorizontalFlip(),
            *last[dtype],
        ]
    )


def loader_of(dataset: Any, batch_size: int, workers: int) -> DataLoader:
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=workers)


def best_loader(dataset: Any, batch_size: int) -> tuple[DataLoader, int]:
    workers = find_workers(partial(loader_of, dataset, batch_size), budget_s=ROUND_S)
    return loader_of(dataset, batch_size, workers), workers


def best_vanilla(root: Path, transform: Any, batch_size: int) -> tuple[Any, int]:
    originals = datasets.ImageFolder(str(root), transform)
    workers = find_workers(partial(vanilla_loader, originals, batch_size))
    return vanilla_loader(originals, batch_size, workers), workers


def copy_crops(count: int, batch_size: int, stored_px: int, crop_px: int) -> Measure:
    """Copy random windows of random planar images into one batch buffer with NumPy, on this thread."""
    rng = np.random.default_rng(0)
    store_NCHW = rng.integers(0, 256, (count, 3, stored_px, stored_px), np.uint8)
    out_BChw = np.empty((batch_size, 3, crop_px, crop_px), np.uint8)

    def run() -> float:
        copied, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < ROUND_S:
            chosen = rng.integers(0, count, batch_size).tolist()
            corners = rng.integers(0, stored_px - crop_px + 1, (batch_size, 2)).tolist()
            for row, (index, (top, left)) in enumerate(zip(chosen, corners, strict=True)):
                out_BChw[row] = store_NCHW[index, :, top : top + crop_px, left : left + crop_px]
            copied += batch_size
        return copied / seconds

    return run


def convert(batch_size: int, side_px: int) -> Measure:
    """Convert uint8 batches to float32 into one buffer with torch, on one thread."""
    sources = torch.randint(0, 256, (8, batch_size, 3, side_px, side_px), dtype=torch.uint8)
    out = torch.empty(sources.shape[1:], dtype=torch.float32)

    def run() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            converted, start = 0, time.perf_counter()
            while (seconds := time.perf_counter() - start) < ROUND_S:
                out.copy_(sources[converted // batch_size % len(sources)])
                converted += batch_size
            return converted / seconds
        finally:
            torch.set_num_threads(threads)

    return run


def photos_uint8(root: Path, rounds: int) -> list[Row]:
    """Compare photographs (224 crop and flip, uint8, batch 64) with the bare copy and with vanilla."""
    section = "224 crop + flip of 256x256, uint8, batch 64"
    vanilla, vanilla_workers = best_vanilla(root, photo_transform("uint8"), 64)
    with ImageFolder(
        str(root),
        photo_transform("uint8"),
        storage="shared",
    ).prepare() as prepared:
        ours, workers = best_loader(prepared, 64)
        rates = in_turns(
            {
                "copy": copy_crops(len(prepared), 64, 256, 224),
                "vanilla": epoch_rate(vanilla),
                "ours": epoch_rate(ours, ROUND_S),
            },
            rounds,
        )
    row = partial(Row, section=section, unit="images/s")
    return [
        row(name="copy of the crops, one thread", rounds=rates["copy"]),
        row(name=f"vanilla, {vanilla_workers} workers", rounds=rates["vanilla"]),
        row(
            name=f"fastdata, {workers} workers",
            rounds=rates["ours"],
            against="copy of the crops, one thread",
            target="0.6",
        ),
        row(
            name="fastdata, the same",
            rounds=rates["ours"],
            against=f"vanilla, {vanilla_workers} workers",
            target="75",
        ),
    ]


def photos_float32(root: Path, rounds: int) -> list[Row]:
    """Compare photographs, normalised to float32, with the bare conversion."""
    section = "224 crop + flip of 256x256, normalised float32, batch 64"
    with ImageFolder(
        str(root),
        photo_transform("float32"),
        storage="shared",
    ).prepare() as prepared:
        ours, workers = best_loader(prepared, 64)
        rates = in_turns({"convert": convert(64, 224), "ours": epoch_rate(ours, ROUND_S)}, rounds)
    row = partial(Row, section=section, unit="images/s")
    return [
        row(name="bare conversion, one thread", rounds=rates["convert"]),
        row(
            name=f"fastdata, {workers} workers",
            rounds=rates["ours"],
            against="bare conversion, one thread",
            target="0.5, or 20,000 images/s",
        ),
    ]


def small_112(cifar: Path, rounds: int) -> list[Row]:
    """Compare CIFAR at 112x112 (flip, uint8, batch 256) with the bare copy."""
    section = "flip of 112x112, uint8, batch 256"
    transform = transforms.Compose(
        [transforms.Resize(112), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    )
    with ImageFolder(
        str(cifar),
        transform,
        storage="shared",
    ).prepare() as prepared:
        ours, workers = best_loader(prepared, 256)
        copy = copy_crops(len(prepared), 256, 112, 112)
        rates = in_turns({"copy": copy, "ours": epoch_rate(ours, ROUND_S)}, rounds)
    row = partial(Row, section=section, unit="images/s")
    return [
        row(name="copy, one thread", rounds=rates["copy"]),
        row(
            name=f"fastdata, {workers} workers",
            rounds=rates["ours"],
            against="copy, one thread",
            target="0.5",
        ),
    ]


def small_32(cifar: Path, rounds: int) -> list[Row]:
    """Measure CIFAR at 32x32: padded crop, flip, normalised, batch 512."""
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ]
    )
    with ImageFolder(
        str(cifar),
        transform,
        storage="shared",
    ).prepare() as prepared:
        ours, workers = best_loader(prepared, 512)
        rates = in_turns({"ours": epoch_rate(ours, ROUND_S)}, rounds)
    return [
        Row(
            section="32x32, RandomCrop(32, padding=4) + flip + Normalize, float32, batch 512",
            name=f"fastdata, {workers} workers",
            unit="images/s",
            rounds=rates["ours"],
            target="250,000",
        )
    ]


def preparing(root: Path, rounds: int) -> list[Row]:
    """Compare preparing with one vanilla epoch."""
    vanilla, vanilla_workers = best_vanilla(root, photo_transform("uint8"), 64)
    count = len(vanilla.dataset)

    def build() -> None:
        ImageFolder(
            str(root),
            photo_transform("uint8"),
            storage="shared",
        ).prepare().close()

    rates = in_turns(
        {"vanilla": epoch_rate(vanilla), "ours": lambda: count / seconds_of(build)}, rounds
    )
    epoch = f"vanilla epoch, {vanilla_workers} workers"
    row = partial(Row, section="preparing, all cores", unit="images/s")
    return [
        row(name=epoch, rounds=rates["vanilla"]),
        row(name="prepare", rounds=rates["ours"], against=epoch, target="1.0"),
    ]


def first_batch_ms(make_loader: Callable[[], DataLoader]) -> float:
    return 1000 * first_batch_s(make_loader)


def latency_and_threads(root: Path, rounds: int) -> list[Row]:
    """Measure the time to the first batch of a new loader, and compare one thread with two."""
    with ImageFolder(
        str(root),
        photo_transform("uint8"),
        storage="shared",
    ).prepare() as prepared:
        make = partial(loader_of, prepared, 64)
        first = in_turns(
            {str(n): partial(first_batch_ms, partial(make, n)) for n in (1, 2)}, max(rounds, 5)
        )
        rates = in_turns({str(n): epoch_rate(make(n), ROUND_S) for n in (0, 1, 2)}, rounds)
    start = partial(
        Row, section="first batch after construction, batch 64", unit="ms", target="under 50"
    )
    row = partial(Row, section="threads, 224 crop + flip, uint8, batch 64", unit="images/s")
    return [
        *(start(name=f"{n} workers", rounds=first[n]) for n in first),
        *(row(name=f"{n} workers", rounds=rates[n], against="1 workers") for n in rates),
    ]


def memory(root: Path, rounds: int) -> list[Row]:
    """Compare the peak PSS of the process tree over 20 epochs with 4 workers with the size of the raw data."""
    del rounds
    after_epoch = []
    with (
        peak_memory() as peak,
        ImageFolder(
            str(root),
            photo_transform("uint8"),
            storage="shared",
        ).prepare() as data,
    ):
        raw_bytes = len(data) * 3 * 256 * 256
        loader = loader_of(data, 64, 4)
        for _ in range(20):
            images_per_s(loader)
            after_epoch.append(tree_pss_bytes(os.getpid()) / MB)
    row = partial(
        Row, section="memory with 4 workers over 20 epochs (PSS of the process tree)", unit="MB"
    )
    return [
        row(name="raw data", rounds=(raw_bytes / MB,)),
        row(
            name="peak",
            rounds=(peak.size_bytes / MB,),
            target=f"{1.15 * raw_bytes / MB + 400:,.0f} MB at most",
        ),
        row(name="after epoch 2", rounds=(after_epoch[1],)),
        row(
            name="after epoch 20",
            rounds=(after_epoch[-1],),
            against="after epoch 2",
            target="no growth",
        ),
    ]


SECTIONS = {
    "memory": memory,  # first: later, memory of other sections would count
    "photos_uint8": photos_uint8,
    "photos_float32": photos_float32,
    "latency_and_threads": latency_and_threads,
    "preparing": preparing,
    "small_112": small_112,
    "small_32": small_32,
}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--cifar",
        type=Path,
        help="folder of class folders of 32x32 images; default: $FASTDATA_CIFAR, else synthetic images",
    )
    options.add_argument(
        "--count",
        type=int,
        default=4000,
        help="number of files; photographs are copied as often as needed",
    )
    options.add_argument(
        "--small-count",
        type=int,
        default=10_000,
        help="number of files of small images; they are copied as often as needed",
    )
    options.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run"
    )
    chosen = options.parse_args()
    small = {"small_112", "small_32"}
    rows: list[Row] = []
    words = []
    photos = class_folders(chosen.images, count=chosen.count)
    smalls = class_folders(
        chosen.cifar, count=chosen.small_count, size=(32, 32), variable="FASTDATA_CIFAR"
    )
    for source, names in ((photos, set(SECTIONS) - small), (smalls, small)):
        if wanted := [name for name in SECTIONS if name in names & set(chosen.sections)]:
            with source as (root, what):
                words.append(what)
                for name in wanted:
                    rows += SECTIONS[name](root, chosen.rounds)
    print("; ".join(words))
    print_rows(rows)
    save_rows(rows, chosen.json, images=words, rounds=chosen.rounds, usable_cores=usable_cores())


if __name__ == "__main__":
    main()
