"""What does it cost to bring batches to the GPU?

python benchmarks/transfer.py [--batch-mib 38] [--steps 100] [--rounds 5] [--json FILE]

1. Step time: a step of matrix products on each batch, against the same step on a batch that lies on the GPU already.
   The loader is as fast as can be: batches in memory, gathered ones, and those of torch's ways.
2. Bandwidth: bytes a second of the prefetcher with an empty step, against one pinned block copied again and again.
3. Work on the device: what is registered in ``DEVICE_WORK``, a batch each time, against its bytes over the bandwidth of
   the device's memory.
4. Batch ops: crop, flip and Normalize of 256 x 256 images on the CPU, on the device, and there from a store on it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _helper import Row, in_turns, print_rows, save_rows, transforms
from fastdata import CachedDataset, CudaPrefetcher, DataLoader, plan_transform
from fastdata.bench.vanilla import IMAGENET_MEAN, IMAGENET_STD
from fastdata.spec import SampleSpec
from fastdata.transforms.device import DeviceProgram

MIB = 1 << 20
IMAGE_SHAPE = (3, 224, 224)
STORED_PX = 256
FLIP_AND_FLOATS = [
    transforms.RandomHorizontalFlip(),
    transforms.ConvertImageDtype(torch.float32),
    transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
]
CROP_STEPS = [transforms.RandomCrop(192), *FLIP_AND_FLOATS]


def program_of(steps: list[Any]) -> DeviceProgram:
    spec = SampleSpec(shape=IMAGE_SHAPE, dtype="uint8", form="tensor")
    return DeviceProgram(plan_transform(transforms.Compose(steps), form="tensor"), spec)


def ops_work(steps: list[Any]) -> tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], int]]:
    """Batch ops with the draws of one batch, and what they must move: each pixel served, read and written once."""
    program = program_of(steps)
    shape, dtype = program.output

    @cache
    def draws(count: int, device: torch.device) -> torch.Tensor:
        return program.draw(np.arange(count), 0, 0).to(device)

    return (
        lambda images: program.run(images, draws(len(images), images.device)),
        lambda images: len(images) * prod(shape) * (1 + dtype.itemsize),
    )


DEVICE_WORK: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], int]]] = {
    "cast to float16": (lambda images: images.to(torch.float16), lambda images: images.nbytes + 2 * images.numel()),
    "crop, flip, Normalize": ops_work(CROP_STEPS),
}
"""Name -> what runs on a uint8 batch on the device, and the bytes that it must read and write at least."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batch-mib", type=int, default=38, help="size of a batch; 38 are 256 images of 224 x 224")
    options.add_argument("--steps", type=int, default=100, help="batches a round")
    options.add_argument("--step-ms", type=float, default=10.0, help="length of a step; more than a copy takes")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--json", type=Path, help="keep every figure, with versions")
    chosen = options.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none")
    batch_size = max(1, chosen.batch_mib * MIB // (3 * 224 * 224))
    batch = torch.randint(0, 256, (batch_size, *IMAGE_SHAPE), dtype=torch.uint8)
    rows = [
        *measure_steps(batch, chosen),
        *measure_bandwidth(batch, chosen),
        *measure_device_work(batch, chosen),
        *measure_batch_ops(batch_size, chosen),
    ]
    print(torch.cuda.get_device_name())
    print_rows(rows)
    settings = vars(chosen) | {"gpu": torch.cuda.get_device_name(), "batch_bytes": batch.nbytes}
    save_rows(rows, chosen.json, **settings)


# 1. Steps


def measure_steps(batch: torch.Tensor, chosen: argparse.Namespace) -> list[Row]:
    step = make_step(chosen.step_ms)
    steps = chosen.steps
    pinned = batch.pin_memory()
    resident = batch.cuda()
    samples = [(image, 0) for image in batch]
    with contextlib.ExitStack() as stack:
        dataset = stack.enter_context(CachedDataset(samples, progress=False))
        sampler = Repeated(len(dataset), steps)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        prefetched = {
            "prefetcher, pageable batches": stack.enter_context(CudaPrefetcher([batch] * steps)),
            "prefetcher, pinned batches": stack.enter_context(CudaPrefetcher([pinned] * steps)),
            "prefetcher, gathered by threads": stack.enter_context(CudaPrefetcher(loader)),
        }
        ways: dict[str, Callable[[], Iterable[Any]]] = {
            "on the GPU already": lambda: (resident for _ in range(steps)),
            **{name: (lambda batches=batches: map(first, batches)) for name, batches in prefetched.items()},
            "to(device), pageable": lambda: (batch.to("cuda") for _ in range(steps)),
            "to(device), pinned": lambda: (pinned.to("cuda") for _ in range(steps)),
            "to(device, non_blocking), pinned": lambda: (pinned.to("cuda", non_blocking=True) for _ in range(steps)),
        }
        figures = in_turns(
            {name: (lambda make=make: ms_per_step(make(), step, steps)) for name, make in ways.items()}, chosen.rounds
        )
        print(prefetched["prefetcher, gathered by threads"].report())
    return [
        Row(
            section=f"a step of about {chosen.step_ms:g} ms and its batch of {batch.nbytes / MIB:.0f} MiB",
            name=name,
            unit="ms/step",
            rounds=rounds,
            against="" if name == "on the GPU already" else "on the GPU already",
            target="1.02" if name.startswith("prefetcher") else "",
        )
        for name, rounds in figures.items()
    ]


class Repeated:
    """A batch sampler that gives all samples, ``steps`` times."""

    def __init__(self, samples: int, steps: int) -> None:
        self.samples, self.steps = samples, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(self.samples)) for _ in range(self.steps))


def first(batch: Any) -> torch.Tensor:
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def make_step(step_ms: float) -> Callable[[torch.Tensor], None]:
    """A step that reads the batch and then multiplies matrices for about so long."""
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


def ms_per_step(batches: Iterable[torch.Tensor], step: Callable[[torch.Tensor], None], steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for images in batches:
        step(images)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1000


# 2. Bandwidth


def measure_bandwidth(batch: torch.Tensor, chosen: argparse.Namespace) -> list[Row]:
    pinned = batch.pin_memory()
    target = torch.empty_like(pinned, device="cuda")
    samples = [(image, 0) for image in batch]
    with contextlib.ExitStack() as stack:
        dataset = stack.enter_context(CachedDataset(samples, progress=False))
        loader = DataLoader(dataset, batch_sampler=Repeated(len(dataset), chosen.steps), num_workers="auto")
        ways = {
            "pinned block, copied again and again": lambda: (
                target.copy_(pinned, non_blocking=True) for _ in range(chosen.steps)
            ),
            "prefetcher, pinned batches": stack.enter_context(CudaPrefetcher([pinned] * chosen.steps)).__iter__,
            "prefetcher, pageable batches": stack.enter_context(CudaPrefetcher([batch] * chosen.steps)).__iter__,
            "prefetcher, gathered by threads": stack.enter_context(CudaPrefetcher(loader)).__iter__,
        }
        figures = in_turns(
            {
                name: (lambda make=make: gb_per_s(make(), batch.nbytes * chosen.steps))  # type: ignore[misc]
                for name, make in ways.items()
            },
            chosen.rounds,
        )
    peak = "pinned block, copied again and again"
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
    """Images a second of a loop with an empty step."""
    noise = torch.randint(0, 256, (4 * batch_size, 3, STORED_PX, STORED_PX), dtype=torch.uint8)
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
            dataset = stack.enter_context(CachedDataset(samples, transform=crop, storage=storage, progress=False))
            loader = DataLoader(dataset, batch_size, shuffle=True, num_workers="auto")
            ways[name] = stack.enter_context(CudaPrefetcher(loader, batch_ops=where))
        figures = in_turns(
            {name: (lambda batches=batches: images_per_s(batches, len(samples))) for name, batches in ways.items()},  # type: ignore[misc]
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
