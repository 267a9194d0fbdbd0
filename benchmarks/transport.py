"""How long does a batch take from a worker process to the training loop?

Every section runs three loaders in turns over the same Dataset object, with two persistent worker processes: torch's
DataLoader, the same with RingCollate as its collate_fn, and fastdata's DataLoader. Rows are images per second, and
CPU time (user and system time of all processes) per image. The last sections are the start of a second epoch, and
four loaders at once. To see that these do not need /dev/shm, run the script with a small one:

    unshare -m sh -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm && python benchmarks/transport.py --only loaders'
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

from _helper import Row, in_turns, parser, print_rows, save_rows, transforms
from fastdata import CachedDataset, DataLoader, collate
from fastdata.datasets.transport import RingCollate
from fastdata.tools.photos import photo

BATCH = 64
WORKERS = 2
TORCH, RING, OURS = "torch DataLoader", "torch DataLoader, RingCollate", "fastdata DataLoader"


class Tensors(Dataset[Any]):
    """Samples that are in memory already, so that only the cost of the transport is measured."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype, length: int) -> None:
        self.images = torch.randint(0, 255, (count, *shape)).to(dtype)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.images[index % len(self.images)], index


class Lists(Tensors):
    """Tensors with ``__getitems__`` that returns a list of samples."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Gathered(Tensors):
    """Tensors with ``__getitems__`` that gathers a whole batch into new memory."""

    def __getitems__(self, indices: list[int]) -> Any:
        index_B = torch.tensor(indices) % len(self.images)
        return torch.index_select(self.images, 0, index_B), index_B


class Photos(Dataset[Any]):
    """PIL images with a transform that runs in Python for each sample."""

    def __init__(self, length: int) -> None:
        self.images = [Image.fromarray(photo(index, (256, 256))) for index in range(32)]
        self.length = length
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.ColorJitter(0.4, 0.4, 0.4),
                transforms.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index % len(self.images)]), index


def as_is(samples: Any) -> Any:
    return samples


def roads(dataset: Any, collate_fn: Callable[[Any], Any] = collate) -> dict[str, Any]:
    options = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True}
    return {
        TORCH: TorchDataLoader(dataset, collate_fn=collate_fn, **options),
        RING: TorchDataLoader(dataset, collate_fn=RingCollate(collate_fn), **options),
        OURS: DataLoader(dataset, collate_fn=collate_fn, workers="process", **options),
    }


def tree_cpu_s() -> float:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(
        times.user + times.system for times in (process.cpu_times() for process in processes)
    )


def epoch(loader: Any, cpu_us: list[float]) -> float:
    """Return images per second of one epoch; append its CPU time per image to ``cpu_us``."""
    images, cpu_s, start = 0, tree_cpu_s(), time.perf_counter()
    for batch in loader:
        images += len(batch[0])
    seconds = time.perf_counter() - start
    cpu_us.append((tree_cpu_s() - cpu_s) / images * 1e6)
    return images / seconds


def measure_roads(
    section: str, loaders: dict[str, Any], rounds: int, targets: tuple[str, str]
) -> list[Row]:
    cpu_us: dict[str, list[float]] = {name: [] for name in loaders}
    rates = in_turns(
        {
            name: (lambda name=name, loader=loader: epoch(loader, cpu_us[name]))
            for name, loader in loaders.items()
        },
        rounds,
    )
    aims = dict(zip((RING, OURS), targets, strict=True))
    speed = [
        Row(
            section=section,
            name=name,
            unit="images/s",
            rounds=rates[name],
            target=aims.get(name, ""),
            **_than(name),
        )
        for name in loaders
    ]
    cost_section = f"{section}: CPU time"
    cost = [
        Row(
            section=cost_section,
            name=name,
            unit="us/image",
            rounds=tuple(cpu_us[name][1:]),
            **_than(name),
        )
        for name in loaders
    ]
    return speed + cost


def _than(name: str) -> dict[str, str]:
    return {} if name == TORCH else {"against": TORCH}


def samples_by_getitems(rounds: int) -> list[Row]:
    dataset = Lists(256, (224, 224, 3), torch.uint8, 2048)
    return measure_roads(
        "64x224x224x3 uint8, lists by __getitems__", roads(dataset), rounds, (">= 2", ">= 3")
    )


def batches_by_getitems(rounds: int) -> list[Row]:
    dataset = Gathered(256, (224, 224, 3), torch.uint8, 2048)
    loaders = roads(dataset, as_is)
    return measure_roads(
        "64x224x224x3 uint8, tensors by __getitems__", loaders, rounds, (">= 2", ">= 3")
    )


def stored_by_getitems(rounds: int) -> list[Row]:
    planar = (
        (torch.randint(0, 255, (3, 256, 256), dtype=torch.uint8), index) for index in range(1024)
    )
    steps = transforms.Compose([transforms.RandomCrop(224), transforms.RandomHorizontalFlip()])
    with CachedDataset(list(planar), transform=steps) as dataset:
        section = "CachedDataset, 224 crop + flip, uint8"
        return measure_roads(section, roads(dataset), rounds, (">= 2", ">= 3"))


def floats(rounds: int) -> list[Row]:
    dataset = Lists(128, (3, 224, 224), torch.float32, 1024)
    return measure_roads("64x3x224x224 float32", roads(dataset), rounds, (">= 2", ">= 3"))


def pil_transform(rounds: int) -> list[Row]:
    section = "PIL RandomResizedCrop, ColorJitter, ToTensor"
    return measure_roads(section, roads(Photos(512)), rounds, (">= 1, less CPU", ">= 1, less CPU"))


def second_epoch(rounds: int) -> list[Row]:
    """Measure the time from iter() to the first batch, with persistent workers."""

    def first_batch_ms(loader: Any) -> float:
        start = time.perf_counter()
        batches: Iterator[Any] = iter(loader)
        next(batches)
        seconds = time.perf_counter() - start
        for _ in batches:
            pass
        return seconds * 1e3

    loaders = roads(Lists(128, (3, 224, 224), torch.float32, 512))
    times = in_turns(
        {name: (lambda loader=loader: first_batch_ms(loader)) for name, loader in loaders.items()},
        rounds,
    )
    section = "first batch of a later epoch, persistent workers"
    return [
        Row(
            section=section,
            name=name,
            unit="ms",
            rounds=times[name],
            target="<= 1" * (name != TORCH),
            **_than(name),
        )
        for name in loaders
    ]


def four_loaders(rounds: int) -> list[Row]:
    """Read batches of four loaders of fastdata in turns; each has more bytes in its slots than 64 MB of /dev/shm."""
    loaders = [roads(Lists(128, (3, 224, 224), torch.float32, 512))[OURS] for _ in range(4)]

    def run() -> float:
        start = time.perf_counter()
        images = sum(len(batch[0]) for batches in zip(*loaders, strict=True) for batch in batches)
        return images / (time.perf_counter() - start)

    rates = in_turns({OURS: run}, rounds)
    size_mb = shutil.disk_usage("/dev/shm").total / 1e6
    held_mb = sum(loader.report().bytes_held for loader in loaders) / 1e6
    section = f"4 loaders at once, /dev/shm of {size_mb:,.0f} MB, rings of {held_mb:,.0f} MB"
    return [Row(section=section, name=OURS, unit="images/s", rounds=rates[OURS], target="works")]


SECTIONS: dict[str, Callable[[int], list[Row]]] = {
    "lists": samples_by_getitems,
    "tensors": batches_by_getitems,
    "stored": stored_by_getitems,
    "floats": floats,
    "pil": pil_transform,
    "epochs": second_epoch,
    "loaders": four_loaders,
}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--only", choices=SECTIONS, action="append", help="sections to run; default: all"
    )
    given = options.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in given.only or SECTIONS for row in SECTIONS[name](given.rounds)]
    print_rows(rows)
    save_rows(rows, given.json, batch=BATCH, workers=WORKERS)


if __name__ == "__main__":
    main()
