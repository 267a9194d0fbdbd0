"""How fast is a compiled program on one thread, compared with that of another tree of these sources?

    python benchmarks/program.py [--beside PATH_OF_ANOTHER_TREE] [--json benchmarks/results/program.json]

Trees take turns, each in its own process. Figures are images per second of CPU time: the median of the rounds, and
their spread. "loader" rows are whole batches of a DataLoader. In "channels last" rows the core writes that format; in
the row "by torch" torch converts the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _processor import processor_facts

HERE = Path(__file__).parents[1]
NORMS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ROUND_S = 0.5
LENGTH = 512


class Samples:
    """Random images of one size, in memory."""

    gives_views = True

    def __init__(self, side_px: int) -> None:
        from fastdata.pixels.samples import SampleSpec

        rng = np.random.default_rng(0)
        coarse = torch.from_numpy(rng.integers(0, 256, (LENGTH, 3, 8, 8)).astype(np.float32))
        smooth = torch.nn.functional.interpolate(coarse, (side_px, side_px), mode="bilinear")
        self.samples_NCHW = smooth.byte().numpy()
        self.spec = SampleSpec(shape=(3, side_px, side_px), dtype="uint8", form="pil")

    def shape(self, index: int) -> tuple[int, ...]:
        return self.samples_NCHW[index].shape

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        first: int = self.samples_NCHW.ctypes.data
        return first + index_B * self.samples_NCHW[0].nbytes


def recipes(transforms: Any) -> Iterator[tuple[str, int, int, list[Any]]]:
    """Yield (name, stored side in pixels, batch size, steps) of each recipe."""
    flip, floats = (
        transforms.RandomHorizontalFlip(),
        [transforms.ToTensor(), transforms.Normalize(*NORMS)],
    )
    crop = transforms.RandomResizedCrop(224)
    jitter = transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)
    yield "CIFAR crop, flip, float32", 32, 256, [transforms.RandomCrop(32, 4), flip, *floats]
    yield "CIFAR the same, batch 1", 32, 1, [transforms.RandomCrop(32, 4), flip, *floats]
    yield "CIFAR float32 alone", 32, 256, floats
    yield "crop, flip, uint8", 256, 64, [transforms.RandomCrop(224), flip, transforms.PILToTensor()]
    yield "RandomResizedCrop", 256, 64, [crop, flip, *floats]
    yield "ColorJitter", 256, 64, [transforms.RandomCrop(224), jitter, *floats]
    blur = transforms.RandomApply([transforms.GaussianBlur(23, (0.1, 2.0))], 0.5)
    jitters = transforms.RandomApply([transforms.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8)
    yield "SimCLR", 256, 64, [crop, flip, jitters, transforms.RandomGrayscale(0.2), blur, *floats]
    yield "TrivialAugmentWide", 256, 64, [crop, flip, transforms.TrivialAugmentWide(), *floats]
    yield "RandAugment", 256, 64, [crop, flip, transforms.RandAugment(), *floats]
    yield "AutoAugment", 256, 64, [crop, flip, transforms.AutoAugment(), *floats]


def copy_rate(side_px: int, crop_px: int) -> float:
    """Return how many windows NumPy copies into one buffer in a second of CPU time."""
    store, out = Samples(side_px).samples_NCHW, np.empty((64, 3, crop_px, crop_px), np.uint8)
    rng, copied, start = np.random.default_rng(0), 0, time.process_time()
    while time.process_time() - start < ROUND_S:
        corners = rng.integers(0, side_px - crop_px + 1, (64, 2)).tolist()
        for row, (index, (top, left)) in enumerate(
            zip(rng.integers(0, LENGTH, 64).tolist(), corners, strict=True)
        ):
            out[row] = store[index, :, top : top + crop_px, left : left + crop_px]
        copied += 64
    return copied / (time.process_time() - start)


def rates(names: list[str]) -> dict[str, float]:
    from torchvision_ops import import_torchvision

    import_torchvision()
    from torchvision import transforms

    from fastdata.pixels.program import Program
    from fastdata.pixels.split import split_transform

    found = {"bare copy of crops": copy_rate(256, 224)}
    stores: dict[int, Samples] = {}
    for name, side_px, batch, steps in recipes(transforms):
        if names and not any(part in name for part in names):
            continue
        store = stores.setdefault(side_px, Samples(side_px))
        plan = split_transform(transforms.Compose(steps), prepared=0)
        program = Program(plan.batch_ops, store.spec)
        output = program.output(store.spec.shape)
        assert output is not None
        out, done, rng = np.empty((batch, *output[0]), output[1]), 0, np.random.default_rng(0)
        program.run(store, rng.integers(0, LENGTH, batch), 0, 0, out)
        order = [rng.integers(0, LENGTH, batch) for _ in range(64)]
        start = time.process_time()
        while (seconds := time.process_time() - start) < ROUND_S:
            program.run(store, order[done % 64], done, 0, out)
            done += 1
        found[name] = done * batch / seconds
    for name, options in LOADERS.items():
        if not names or any(part in name for part in names):
            found |= loader_rate(name, transforms, **options)
    return found


LOADERS: dict[str, dict[str, Any]] = {
    "loader, CIFAR, batch 256": {"batch_size": 256},
    "loader, CIFAR, batch 1,024": {"batch_size": 1024},
    "loader, CIFAR, batch 1,024, 2 threads": {"batch_size": 1024, "num_workers": 2},
    "loader, CIFAR, channels last": {"batch_size": 256, "channels_last": "core"},
    "loader, CIFAR, channels last by torch": {"batch_size": 256, "channels_last": "torch"},
    "loader, 224, channels last": {"batch_size": 64, "side_px": 256, "channels_last": "core"},
    "loader, 224, channels last by torch": {
        "batch_size": 64,
        "side_px": 256,
        "channels_last": "torch",
    },
}


class Items(torch.utils.data.Dataset[Any]):
    """Stored images with labels."""

    def __init__(self, side_px: int) -> None:
        self.samples_NCHW = torch.from_numpy(Samples(side_px).samples_NCHW)
        self.repeats = 20 if side_px < 64 else 1

    def __len__(self) -> int:
        return LENGTH * self.repeats

    def __getitem__(self, index: int) -> Any:
        return self.samples_NCHW[index % LENGTH], index % 10


def loader_rate(
    name: str, transforms: Any, side_px: int = 32, channels_last: str = "", **options: Any
) -> dict[str, float]:
    """Return images per second of a loader: of CPU time, or with threads of wall time.

    The result is empty if this tree's DataLoader does not have an option that the row needs.
    """
    from fastdata import CachedDataset, DataLoader

    crop = transforms.RandomCrop(32, 4) if side_px == 32 else transforms.RandomCrop(224)
    floats = [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(*NORMS)]
    steps = transforms.Compose([crop, transforms.RandomHorizontalFlip(), *floats])
    dataset = CachedDataset(Items(side_px), transform=steps, seed=1, storage="shared")
    if channels_last == "core":
        options["memory_format"] = torch.channels_last
    try:
        loader = DataLoader(dataset, shuffle=True, drop_last=True, **options)
    except TypeError:
        return {}
    clock = time.perf_counter if "num_workers" in options else time.process_time
    torch.set_num_threads(1)
    done, start = 0, 0.0
    for epoch in range(1000):
        if epoch == 1:
            start, done = clock(), 0
        if epoch and clock() - start > ROUND_S:
            break
        for images, _ in loader:
            if channels_last == "torch":
                images = images.contiguous(memory_format=torch.channels_last)
            done += len(images)
    return {name: done / (clock() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path, help="another tree of fastdata to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="number of measured rounds")
    parser.add_argument("--json", type=Path, help="file to write every figure to")
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the rates of this process as JSON (the script calls itself with it)",
    )
    parser.add_argument(
        "names", nargs="*", help="measure only recipes with one of these words in their name"
    )
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(rates(arguments.names)))
        return
    trees = [HERE] if arguments.beside is None else [arguments.beside, HERE]
    results: list[dict[str, list[float]]] = [{} for _ in trees]
    for _ in range(arguments.rounds):
        for tree, result in zip(trees, results, strict=True):
            path = os.pathsep.join((str(tree), str(HERE / "tests")))
            command = [sys.executable, __file__, "--once", *arguments.names]
            text = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True
            )
            for name, rate in json.loads(text.stdout).items():
                result.setdefault(name, []).append(rate)
    rows = {name: row_of([result.get(name, []) for result in results]) for name in results[-1]}
    for name, row in rows.items():
        ratio = f"  {row['ratio']:.2f} times" if "ratio" in row else ""
        before = f"{row['before']['median']:12,.0f}" if "before" in row else ""
        print(f"{name:36}{before}{row['now']['median']:12,.0f}{ratio}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(about(arguments) | {"images_per_s": rows}, indent=1))


def row_of(rates_of_trees: list[list[float]]) -> dict[str, Any]:
    *before, now = [
        {"median": statistics.median(found), "least": min(found), "most": max(found)}
        for found in rates_of_trees
        if found
    ]
    row: dict[str, Any] = {"now": now}
    if before:
        row |= {"before": before[0], "ratio": now["median"] / before[0]["median"]}
    return row


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return facts about the measurement: rounds, the other tree, processor, load, version of torch."""
    git = ["git", "-C", str(arguments.beside or HERE), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True)
    return {
        "script": "benchmarks/program.py",
        "rounds": arguments.rounds,
        "before": found.stdout.strip() if arguments.beside else None,
        "processor": processor_facts(),
        "load_1_min": os.getloadavg()[0],
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
