"""How long does it take to bring batches to the GPU?

python benchmarks/transfer.py [--batch-mib 38] [--steps 200] [--rounds 5] [--json FILE]

1. Waiting: how long the GPU's stream is idle between the end of a step and its next batch (CUDA events around
   ``next``), and how long the step is, compared with the same step on batches that are already on the GPU; with a
   step that keeps the GPU busy, and with one of many small kernels. Loaders are as fast as possible: batches in
   memory, gathered batches, and torch's own ways.
2. Bandwidth: bytes per second of the prefetcher with an empty step, compared with copying pinned blocks in turn.
3. Work on the device: each function in ``DEVICE_WORK`` on one batch, compared with the time that the device's memory
   needs for the same bytes.
4. Batch ops: crop, flip and Normalize of 256 x 256 images on the CPU, on the device, and from a store on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from _helper import Row, in_turns, print_rows, save_rows, transforms
from fastdata import CachedDataset, CudaPrefetcher, DataLoader
from fastdata.loaders.floats import ToFloats
from fastdata.pixels.split import split_transform
from fastdata.tools.recipes import IMAGENET_MEAN, IMAGENET_STD

MIB = 1 << 20
IMAGE_SHAPE = (3, 224, 224)
STORED_PX = 256
BATCHES_IN_TURN = 8
WARM_STEPS = 10
RESIDENT = "on the GPU already"
FLIP_AND_FLOATS = [
    transforms.RandomHorizontalFlip(),
    transforms.ConvertImageDtype(torch.float32),
    transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
]


def conversion_of(steps: list[Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the conversion that a prefetcher applies to uint8 batches of these steps."""
    plan = split_transform(transforms.Compose(steps), form="tensor")
    return ToFloats(plan.batch_ops[-1])


DEVICE_WORK: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], int]]] = {
    "cast to float16": (
        lambda images: images.to(torch.float16),
        lambda images: images.nbytes + 2 * images.numel(),
    ),
    "ToTensor, Normalize": (conversion_of(FLIP_AND_FLOATS), lambda images: 5 * images.numel()),
}
"""Name -> a function of a uint8 batch on the device, and one that returns the bytes that it must read and write."""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--batch-mib",
        type=int,
        default=38,
        help="size of a batch in MiB; 38 MiB are 256 images of 224 x 224",
    )
    options.add_argument("--steps", type=int, default=200, help="batches in a round")
    options.add_argument(
        "--step-ms",
        type=float,
        default=10.0,
        help="length of a step in ms; it must be longer than a copy",
    )
    options.add_argument("--rounds", type=int, default=5, help="number of measured rounds")
    options.add_argument(
        "--json", type=Path, help="file to write every figure to, with versions and machine"
    )
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none")
    batch_size = max(1, chosen.batch_mib * MIB // (3 * 224 * 224))
    batches = [
        torch.randint(0, 256, (batch_size, *IMAGE_SHAPE), dtype=torch.uint8)
        for _ in range(BATCHES_IN_TURN)
    ]
    rows = [
        *measure_waits(batches, chosen),
        *measure_bandwidth(batches, chosen),
        *measure_device_work(batches[0], chosen),
        *measure_batch_ops(batch_size, chosen),
    ]
    print(torch.cuda.get_device_name())
    print_rows(rows)
    settings = vars(chosen) | {
        "gpu": torch.cuda.get_device_name(),
        "batch_bytes": batches[0].nbytes,
    }
    save_rows(rows, chosen.json, **settings)


# 1. Waiting


def measure_waits(batches: list[torch.Tensor], chosen: argparse.Namespace) -> list[Row]:
    """Measure how long the GPU's stream waits for the batch of a step, and how long the step is, in ms."""
    steps = chosen.steps
    pinned = [batch.pin_memory() for batch in batches]
    resident = [batch.cuda() for batch in batches]
    samples = [(image, 0) for batch in batches for image in batch]
    rows = []
    with contextlib.ExitStack() as stack:
        dataset = stack.enter_context(CachedDataset(samples))
        loader = DataLoader(
            dataset, batch_sampler=Repeated(len(dataset), len(batches[0]), steps), num_workers=2
        )
        prefetched = {
            "prefetcher, pageable batches": stack.enter_context(
                CudaPrefetcher(InTurn(batches, steps))
            ),
            "prefetcher, pinned batches": stack.enter_context(
                CudaPrefetcher(InTurn(pinned, steps))
            ),
            "prefetcher, gathered by threads": stack.enter_context(CudaPrefetcher(loader)),
        }
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            RESIDENT: InTurn(resident, steps).__iter__,
            **{name: (lambda ahead=ahead: map(first, ahead)) for name, ahead in prefetched.items()},
            "to(device), pageable": lambda: (batch.to("cuda") for batch in InTurn(batches, steps)),
            "to(device), pinned": lambda: (batch.to("cuda") for batch in InTurn(pinned, steps)),
            "to(device, non_blocking), pinned": lambda: (
                batch.to("cuda", non_blocking=True) for batch in InTurn(pinned, steps)
            ),
        }
        for kind, step in {
            "busy": make_busy_step(chosen.step_ms),
            "launch-bound": make_launch_bound_step(),
        }.items():
            waits: dict[str, list[float]] = {name: [] for name in ways}
            lengths = in_turns(
                {
                    name: (
                        lambda make=make, step=step, wait=waits[name]: ms_per_step(
                            make(), step, wait
                        )
                    )  # type: ignore[misc]
                    for name, make in ways.items()
                },
                chosen.rounds,
            )
            for name in ways:
                rows.append(
                    Row(
                        section=f"the wait of a {kind} step for its batch of {batches[0].nbytes / MIB:.0f} MiB",
                        name=name,
                        unit="ms/step",
                        rounds=tuple(waits[name][1:]),
                        target="2 % of the step" if name.startswith("prefetcher") else "",
                    )
                )
                rows.append(
                    Row(
                        section=f"the length of a {kind} step",
                        name=name,
                        unit="ms/step",
                        rounds=lengths[name],
                        against="" if name == RESIDENT else RESIDENT,
                        target="1.02" if name.startswith("prefetcher") else "",
                    )
                )
        for name, prefetcher in prefetched.items():
            print(f"{name}: {prefetcher.report()}")
    return rows


class InTurn:
    """An iterable of ``steps`` batches: the given ones in turn, which together are larger than the device's cache."""

    def __init__(self, batches: list[torch.Tensor], steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        return islice(cycle(self.batches), self.steps)


class Repeated:
    """A batch sampler that goes over all samples in order, again and again, for ``steps`` batches."""

    def __init__(self, samples: int, batch_size: int, steps: int) -> None:
        self.batches = [list(range(low, low + batch_size)) for low in range(0, samples, batch_size)]
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        return islice(cycle(self.batches), self.steps)


def first(batch: Any) -> torch.Tensor:
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def make_busy_step(step_ms: float) -> Callable[[torch.Tensor], None]:
    """Return a step that reads the batch and then multiplies matrices for about ``step_ms``: the GPU is the limit."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16) / 64

    def products(count: int) -> None:
        product = matrix
        for _ in range(count):
            product = product @ matrix

    products(20)
    torch.cuda.synchronize()
    start = time.perf_counter()
    products(100)
    torch.cuda.synchronize()
    count = max(1, round(step_ms / (10 * (time.perf_counter() - start))))

    def step(images: torch.Tensor) -> None:
        images.view(-1)[::4096].sum()
        products(count)

    return step


def make_launch_bound_step(layers: int = 400) -> Callable[[torch.Tensor], None]:
    """Return a step of small kernels whose launch is the limit: it shows how much a prefetcher's thread delays it."""
    weight = torch.randn(64, 64, device="cuda") / 8

    def step(images: torch.Tensor) -> None:
        values = images.view(-1)[: 64 * 64].view(64, 64).float()
        for _ in range(layers // 2):
            values = torch.relu(values @ weight)

    return step


def ms_per_step(
    batches: Iterable[torch.Tensor], step: Callable[[torch.Tensor], None], waits: list[float]
) -> float:
    """Return the mean length of a step; append to ``waits`` the mean time that the stream waits for a batch."""
    iterator = iter(batches)
    stamps = []
    torch.cuda.synchronize()
    start = time.perf_counter()
    while True:
        asked, answered = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        asked.record()
        images = next(iterator, None)
        if images is None:
            break
        answered.record()
        step(images)
        stamps.append((asked, answered))
    torch.cuda.synchronize()
    length_ms = (time.perf_counter() - start) / len(stamps) * 1000
    waits.append(mean(asked.elapsed_time(answered) for asked, answered in stamps[WARM_STEPS:]))
    return length_ms


# 2. Bandwidth


def measure_bandwidth(batches: list[torch.Tensor], chosen: argparse.Namespace) -> list[Row]:
    pinned = [batch.pin_memory() for batch in batches]
    target = torch.empty_like(pinned[0], device="cuda")
    samples = [(image, 0) for batch in batches for image in batch]
    peak = "pinned blocks, copied in turn"
    with contextlib.ExitStack() as stack:
        dataset = stack.enter_context(CachedDataset(samples))
        sampler = Repeated(len(dataset), len(batches[0]), chosen.steps)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers="auto")
        ways = {
            peak: lambda: (
                target.copy_(batch, non_blocking=True) for batch in InTurn(pinned, chosen.steps)
            ),
            "prefetcher, pinned batches": stack.enter_context(
                CudaPrefetcher(InTurn(pinned, chosen.steps))
            ).__iter__,
            "prefetcher, pageable batches": stack.enter_context(
                CudaPrefetcher(InTurn(batches, chosen.steps))
            ).__iter__,
            "prefetcher, gathered by threads": stack.enter_context(CudaPrefetcher(loader)).__iter__,
        }
        figures = in_turns(
            {
                name: (lambda make=make: gb_per_s(make(), batches[0].nbytes * chosen.steps))  # type: ignore[misc]
                for name, make in ways.items()
            },
            chosen.rounds,
        )
    return [
        Row(
            section="host to device, with an empty step",
            name=name,
            unit="GB/s",
            rounds=rounds,
            against="" if name == peak else peak,
            target="0.9" if name == "prefetcher, pinned batches" else "",
        )
        for name, rounds in figures.items()
    ]


def gb_per_s(batches: Iterable[Any], size_bytes: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in batches:
        pass
    torch.cuda.synchronize()
    return size_bytes / (time.perf_counter() - start) / 1e9


# 3. Work on the device


def measure_device_work(batch: torch.Tensor, chosen: argparse.Namespace) -> list[Row]:
    images = batch.cuda()
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(block)
    copy = "copy of 1 GiB within the device"
    ways = {copy: lambda: device_gb_per_s(lambda: other.copy_(block), 2 * block.nbytes)} | {
        name: (lambda work=work, size=size: device_gb_per_s(lambda: work(images), size(images)))
        for name, (work, size) in DEVICE_WORK.items()
    }
    figures = in_turns(ways, chosen.rounds)
    return [
        Row(
            section="work on a batch on the device: its bytes a second",
            name=name,
            unit="GB/s",
            rounds=rounds,
            against="" if name == copy else copy,
        )
        for name, rounds in figures.items()
    ]


def device_gb_per_s(work: Callable[[], Any], size_bytes: int, repeats: int = 50) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return size_bytes * repeats / begin.elapsed_time(end) / 1e6


# 4. Batch ops


def measure_batch_ops(batch_size: int, chosen: argparse.Namespace) -> list[Row]:
    """Measure images per second of a loop with an empty step."""
    noise = torch.randint(0, 256, (16 * batch_size, 3, STORED_PX, STORED_PX), dtype=torch.uint8)
    samples = [(image, 0) for image in noise]
    crop = transforms.Compose([transforms.RandomCrop(224), *FLIP_AND_FLOATS])
    roads: dict[str, tuple[Any, Any]] = {
        "on the CPU": ("shared", "cpu"),
        "on the device": ("shared", "device"),
        "on the device, storage='device'": ("device", "device"),
    }
    with contextlib.ExitStack() as stack:
        ways = {}
        for name, (storage, where) in roads.items():
            dataset = stack.enter_context(CachedDataset(samples, transform=crop, storage=storage))
            loader = DataLoader(dataset, batch_size, shuffle=True, num_workers="auto")
            ways[name] = stack.enter_context(CudaPrefetcher(loader, batch_ops=where))
        figures = in_turns(
            {
                name: (lambda batches=batches: images_per_s(batches, len(samples)))
                for name, batches in ways.items()
            },  # type: ignore[misc]
            chosen.rounds,
        )
        for name, batches in ways.items():
            print(f"{name}: {batches.report()}")
    return [
        Row(
            section="224 crop, flip, Normalize of 256 x 256 images, with an empty step",
            name=name,
            unit="images/s",
            rounds=rounds,
            against="" if name == "on the CPU" else "on the CPU",
        )
        for name, rounds in figures.items()
    ]


def images_per_s(batches: Iterable[Any], samples: int, epochs: int = 5) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(epochs):
        for _ in batches:
            pass
    torch.cuda.synchronize()
    return samples * epochs / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
