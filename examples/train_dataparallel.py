"""Train on several GPUs in one process, with DataParallel.

    python examples/train_dataparallel.py [FOLDER] [--steps 100] [--batch-size 256]

DataParallel gets the whole batch on the first GPU and sends parts of it to the others. One process per GPU
(train_ddp.py) is faster. FOLDER has one folder of images for each class; without FOLDER, images are drawn.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.utils.data import RandomSampler
from torchvision import transforms

from fastdata import CudaPrefetcher, DataLoader, ImageFolder
from fastdata.tools.photos import write_photos


def train_data_parallel(loader: DataLoader, devices: list[str], classes: int) -> float:
    """Train for two epochs, and return the images per second of the second.

    With one device, or on the CPU, DataParallel only calls the network.
    """
    network = make_network(classes).to(devices[0])
    model = DataParallel(network, devices if devices != ["cpu"] else None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: list[torch.Tensor]) -> int:
        images, labels = batch
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return len(labels)

    with CudaPrefetcher(loader, devices[0]) as batches:
        return images_per_s(batches, step, devices)


def make_network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, classes),
    )


def images_per_s(batches: CudaPrefetcher, step: Callable[[Any], int], devices: list[str]) -> float:
    """Run an epoch to warm up, then return the images per second of another one."""
    for batch in batches:
        step(batch)
    synchronize(devices)
    start = time.perf_counter()
    samples = sum(step(batch) for batch in batches)
    synchronize(devices)
    return samples / (time.perf_counter() - start)


def synchronize(devices: list[str]) -> None:
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", nargs="?")
    options.add_argument(
        "--steps", type=int, help="steps an epoch; default: 100, or 5 with fewer than two GPUs"
    )
    options.add_argument(
        "--batch-size", type=int, help="default: 256, or 16 with fewer than two GPUs"
    )
    chosen = options.parse_args(arguments)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    steps, batch_size = (100, 256) if len(devices) > 1 else (5, 16)
    if len(devices) < 2:
        print(
            f"torch sees {torch.cuda.device_count()} GPUs. Training on {devices[0]} in small steps."
        )
    steps, batch_size = chosen.steps or steps, chosen.batch_size or batch_size
    crop = [transforms.Resize(128), transforms.CenterCrop(128), transforms.RandomCrop(112)]
    transform = transforms.Compose(
        [*crop, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    with tempfile.TemporaryDirectory() as drawn:
        if chosen.folder is None:
            write_photos(Path(drawn), count=200, size=(192, 144))
        with ImageFolder(chosen.folder or drawn, transform).prepare() as data:
            sampler = RandomSampler(data, replacement=True, num_samples=steps * batch_size)
            loader = DataLoader(data, batch_size, sampler=sampler, num_workers="auto")
            classes = len(data.classes)
            print(f"DataParallel {train_data_parallel(loader, devices, classes):,.0f} images/s")
            print(loader.report())


if __name__ == "__main__":
    main()
