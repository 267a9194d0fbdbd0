"""How close to the speed of its memory does a GPU run batch ops?

Each section is one batch of samples that are already in a store on the device. Its rows are the time to crop and
convert them by ops of torch, and by fastdata's kernel; the time of the conversion alone; and the time in which the
device copies as many bytes as a batch that is read and written once. That copy is the limit for any kernel. The last
row is the time of the random draws on the host.

Without a GPU it runs on the CPU at a small size. That shows that the code works, and nothing about its speed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from _helper import Row, in_turns, parser, print_rows, save_rows, transforms
from fastdata.loaders.device_cut import DeviceCut
from fastdata.loaders.driver import find_kernel
from fastdata.loaders.floats import ToFloats
from fastdata.loaders.window import Window, window_obstacle
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.split import split_transform
from fastdata.tools.recipes import IMAGENET_MEAN, IMAGENET_STD

BATCHES = 8
"""Batches in one measurement. Their samples differ, so that no cache holds them."""
SEED = 0

Measure = Callable[[], float]


class Samples:
    """Random images of one size in a store on a device, and batches of their indices."""

    gives_views = True

    def __init__(self, device: torch.device, batch_size: int, side_px: int, batches: int) -> None:
        self.device, self.batch_size, self.batches = device, batch_size, batches
        self.spec = SampleSpec(shape=(3, side_px, side_px), dtype="uint8", form="pil")
        self.store = torch.randint(
            0, 256, (batches * batch_size, 3, side_px, side_px), dtype=torch.uint8, device=device
        )
        order = np.random.default_rng(0).permutation(len(self.store)).reshape(batches, batch_size)
        self.index = list(order)
        self.index_on_device = [torch.from_numpy(rows).to(device) for rows in order]

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        return self.store.data_ptr() + index_B * self.store[0].nbytes


def milliseconds(device: torch.device, run: Callable[[int], object], batches: int) -> float:
    """Return the mean milliseconds of a batch, on a GPU by its own clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        for number in range(batches):
            run(number)
        return 1000 * (time.perf_counter() - start) / batches
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    for number in range(batches):
        run(number)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / batches


def copy_of(samples: Samples, size_bytes: int) -> Callable[[int], object]:
    """Return a function that copies within the device; bytes read and bytes written together are ``size_bytes``."""
    source = torch.randint(0, 256, (samples.batches, size_bytes // 2), dtype=torch.uint8).to(
        samples.device
    )
    target = torch.empty_like(source)
    return lambda number: target[number].copy_(source[number])


def section(title: str, steps: list[Any], samples: Samples, rounds: int) -> list[Row]:
    plan = split_transform(transforms.Compose(steps), form="pil")
    program, cast = Program(plan.batch_ops, samples.spec).without_cast()
    assert not window_obstacle(plan, samples.spec)
    window = Window(program, samples.store)
    draws = [window.draw(index_B, 0, SEED).to(samples.device) for index_B in samples.index]
    served = window.cut(samples.index_on_device[0], draws[0])
    convert = ToFloats(cast) if cast else None
    # Each pixel served is read once as uint8 and written once.
    size_bytes = served.numel() * (5 if cast else 1 + 1)

    def run(number: int) -> object:
        images = window.cut(samples.index_on_device[number], draws[number])
        return convert(images) if convert else images

    runs: dict[str, Callable[[int], object]] = {
        "copy of as many bytes": copy_of(samples, size_bytes),
        "cut of a store, ops of torch": run,
    }
    if samples.device.type == "cuda":
        cut = DeviceCut(window, convert, lambda images: images)
        kernel = find_kernel(samples.device.index)
        if kernel is not None and all(kernel.is_right.values()):
            runs["cut of a store, kernel"] = lambda number: cut(
                samples.index_on_device[number], draws[number]
            )
    if convert is not None:
        runs["conversion alone"] = lambda number: convert(served)
    if samples.device.type == "cpu":
        runs["Program.run, on the CPU"] = cpu_run(plan, samples)
    measures: dict[str, Measure] = {
        name: partial(milliseconds, samples.device, run, samples.batches)
        for name, run in runs.items()
    }
    measures["draw, on the host"] = partial(
        milliseconds,
        torch.device("cpu"),
        lambda number: window.draw(samples.index[number], 0, SEED),
        samples.batches,
    )
    figures = in_turns(measures, rounds)
    words = f"{title}: {samples.batch_size} x {samples.spec.shape} to {window.shape}, {size_bytes / 1e6:,.1f} MB"
    return [
        Row(
            section=words,
            name=name,
            unit="ms",
            rounds=figures[name],
            against="copy of as many bytes" if name.startswith(("cut", "conversion")) else "",
        )
        for name in figures
    ]


def cpu_run(plan: Any, samples: Samples) -> Callable[[int], object]:
    prog = Program(plan.batch_ops, samples.spec)
    shape, dtype = prog.output(samples.spec.shape) or ((), np.dtype(np.uint8))
    out = np.empty((samples.batch_size, *shape), dtype)
    return lambda number: prog.run(samples, samples.index[number], 0, SEED, out)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--batch-size", type=int, default=256, help="images in a batch, on a GPU")
    options.add_argument("--side", type=int, default=256, help="stored height and width in pixels")
    options.add_argument(
        "--crop", type=int, default=224, help="height and width of crops in pixels"
    )
    chosen = options.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    batch_size, batches = chosen.batch_size, BATCHES
    if device.type == "cpu":
        print(
            "No CUDA device: 8 images per batch on the CPU, only to check that the script runs. Ignore the figures."
        )
        batch_size, batches = 8, 2
    else:
        print(torch.cuda.get_device_name(device), file=sys.stderr)
    samples = Samples(device, batch_size, chosen.side, batches)
    crop = [transforms.RandomCrop(chosen.crop), transforms.RandomHorizontalFlip()]
    padded = [transforms.RandomCrop(chosen.crop, padding=16), crop[1]]
    floats = [transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    rows = [
        *section("crop + flip, uint8", [*crop, transforms.PILToTensor()], samples, chosen.rounds),
        *section("crop + flip, normalised float32", [*crop, *floats], samples, chosen.rounds),
        *section(
            "padded crop + flip, normalised float32", [*padded, *floats], samples, chosen.rounds
        ),
    ]
    print_rows(rows)
    save_rows(
        rows,
        chosen.json,
        device=str(device),
        batch_size=batch_size,
        side_px=chosen.side,
        crop_px=chosen.crop,
    )


if __name__ == "__main__":
    main()
