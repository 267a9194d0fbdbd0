"""How fast is a compiled program, on one thread, and beside that of another tree of these sources?

    python benchmarks/program.py [--beside PATH_OF_ANOTHER_TREE]

Trees run in turns, each in a process of its own; images per second of CPU time, the median of the rounds.
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

HERE = Path(__file__).parents[1]
NORMS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ROUND_S = 0.5
LENGTH = 512


class Samples:
    """Random images of one size, in memory."""

    gives_views = True

    def __init__(self, side_px: int) -> None:
        from fastdata.pixels.images import SampleSpec

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
    """Name, stored side, batch, steps."""
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
    """Windows copied by NumPy into one buffer."""
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

    from fastdata.pixels import plan_transform
    from fastdata.pixels.program import Program

    found = {"bare copy of crops": copy_rate(256, 224)}
    stores: dict[int, Samples] = {}
    for name, side_px, batch, steps in recipes(transforms):
        if names and not any(part in name for part in names):
            continue
        store = stores.setdefault(side_px, Samples(side_px))
        plan = plan_transform(transforms.Compose(steps), prepared=0)
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
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--once", action="store_true", help="print the rates of this process as JSON"
    )
    parser.add_argument("names", nargs="*", help="parts of the recipes' names; all of them without")
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
    for name in results[-1]:
        medians = [statistics.median(result[name]) for result in results]
        ratio = f"  {medians[1] / medians[0]:.2f} times" if len(medians) > 1 else ""
        print(f"{name:28}" + "".join(f"{median:12,.0f}" for median in medians) + ratio)


if __name__ == "__main__":
    main()
