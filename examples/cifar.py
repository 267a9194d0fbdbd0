"""Train a small network on CIFAR-10 images in class folders.

    python examples/cifar.py [FOLDER] [--epochs 10]    10 class folders of 32x32 images; without one, some are drawn

A tenth of the images is used for validation. The drawn images are easy on purpose: discs of ten colours in noise.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Subset
from torchvision import transforms

from fastdata import DataLoader, ImageFolder

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def train_and_validate(folder: Path, epochs: int) -> float:
    """Train, print a line per epoch, and return the last validation accuracy."""
    torch.manual_seed(0)
    last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    augment = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *last]
    )
    with (
        ImageFolder(str(folder), augment) as train,
        ImageFolder(str(folder), transforms.Compose(last)) as valid,
    ):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
        held_out = len(order) // 10
        train_loader = DataLoader(
            Subset(train, order[held_out:]), batch_size=128, shuffle=True, num_workers=1
        )
        valid_loader = DataLoader(Subset(valid, order[:held_out]), batch_size=512)
        model = network(len(train.classes))
        steps = epochs * len(train_loader)
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        accuracy = 0.0
        for epoch in range(epochs):
            start = time.perf_counter()
            loss = train_epoch(model, train_loader, optimizer, schedule)
            accuracy = validate(model, valid_loader)
            seconds = time.perf_counter() - start
            print(
                f"epoch {epoch + 1:2}: {seconds:5.1f} s, loss {loss:.3f}, accuracy {100 * accuracy:.1f} %",
                flush=True,
            )
        return accuracy


def network(classes: int) -> nn.Module:
    """Return a network of three stages of 3x3 convolutions, with about 100,000 weights."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    layers = [*stage(3, 32), *stage(32, 64), *stage(64, 128)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, schedule: object
) -> float:
    """Train on all images once, and return the mean loss."""
    model.train()
    losses = []
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.inference_mode()
def validate(model: nn.Module, loader: DataLoader) -> float:
    """Return the share of validation images that are recognised."""
    model.eval()
    right = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return torch.cat(right).mean().item()


def draw_images(root: Path, per_class: int) -> None:
    """Draw ten class folders. Each class has discs of one colour, anywhere in a picture of noise."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (10, 3))
    y, x = np.mgrid[:32, :32]
    for label, colour in enumerate(colours):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for index in range(per_class):
            top, left, radius = rng.integers((8, 8, 5), (24, 24, 12))
            disc = ((y - top) ** 2 + (x - left) ** 2 < radius**2)[..., None]
            pixels = np.where(disc, colour, 128) + rng.normal(0, 40, (32, 32, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{index:04}.png")


def main(arguments: list[str] | None = None) -> float:
    """Train on the folder given, or on drawn images."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--per-class", type=int, default=400, help="images drawn per class")
    chosen = options.parse_args(arguments)
    if chosen.folder:
        return train_and_validate(chosen.folder, chosen.epochs)
    with tempfile.TemporaryDirectory() as drawn:
        draw_images(Path(drawn), chosen.per_class)
        return train_and_validate(Path(drawn), chosen.epochs)


if __name__ == "__main__":
    main()
