"""Two GPUs in one process: parts of each batch straight from host memory, beside DataParallel.

DataParallel gets the whole batch on the first GPU and sends the second one its half from there. The prefetcher copies
each half to its own GPU ahead of need. One process per GPU (DistributedDataParallel) is faster than either.

python examples/two_gpus.py [--steps 100] [--batch-size 256]
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DataParallel, gather, parallel_apply, replicate

from fastdata import CachedDataset, CudaPrefetcher, DataLoader


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def train_data_parallel(loader: DataLoader, devices: list[str]) -> float:
    """Images a second with torch's DataParallel, which scatters from the first device."""
    model = DataParallel(make_model().to(devices[0]), devices)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: list[torch.Tensor]) -> int:
        images, labels = batch
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return len(labels)

    with CudaPrefetcher(loader, devices[0], dtype=torch.float32) as batches:
        return images_per_s(batches, step, devices)


def train_in_parts(loader: DataLoader, devices: list[str]) -> float:
    """Images a second where each device gets its own part, and replicas of the model run side by side."""
    model = make_model().to(devices[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(parts: list[list[torch.Tensor]]) -> int:
        replicas = replicate(model, devices[: len(parts)])
        outputs = parallel_apply(replicas, [(images,) for images, _ in parts], devices=devices[: len(parts)])
        losses = [
            nn.functional.cross_entropy(output, labels, reduction="sum").view(1)
            for output, (_, labels) in zip(outputs, parts, strict=True)
        ]
        samples = sum(len(labels) for _, labels in parts)
        optimizer.zero_grad()
        (gather(losses, devices[0]).sum() / samples).backward()
        optimizer.step()
        return samples

    with CudaPrefetcher(loader, devices, dtype=torch.float32) as batches:
        return images_per_s(batches, step, devices)


def images_per_s(batches, step, devices: list[str]) -> float:
    for batch in batches:  # an epoch to warm up
        step(batch)
    synchronize(devices)
    start = time.perf_counter()
    samples = sum(step(batch) for batch in batches)
    synchronize(devices)
    return samples / (time.perf_counter() - start)


def synchronize(devices: list[str]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=100, help="steps an epoch")
    options.add_argument("--batch-size", type=int, default=256)
    chosen = options.parse_args(arguments)
    found = torch.cuda.device_count()
    if found < 2:
        print(f"This example needs two GPUs; torch sees {found}. CudaPrefetcher(loader) works with one, or none.")
        return
    devices = ["cuda:0", "cuda:1"]
    images = torch.randint(0, 256, (1024, 3, 112, 112), dtype=torch.uint8)
    with CachedDataset([(image, i % 10) for i, image in enumerate(images)], progress=False) as dataset:
        sampler = torch.utils.data.RandomSampler(
            dataset, replacement=True, num_samples=chosen.steps * chosen.batch_size
        )
        loader = DataLoader(dataset, batch_size=chosen.batch_size, sampler=sampler, num_workers="auto")
        print(f"DataParallel                      {train_data_parallel(loader, devices):,.0f} images/s")
        print(f"parts by CudaPrefetcher           {train_in_parts(loader, devices):,.0f} images/s")


if __name__ == "__main__":
    main()
