"""One epoch of 224 crops: torchvision with torch's loader, and fastdata. Run by ``pytest benchmarks/``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

from _helper import datasets, transforms, vanilla_loader
from fastdata import DataLoader, ImageFolder, collate
from fastdata.machine.limits import usable_cores

BATCH = 64
LAST = {
    "uint8": [transforms.PILToTensor()],
    "float32": [
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ],
}

pytest.importorskip("pytest_benchmark")


@pytest.fixture(params=["uint8", "float32"])
def transform(request: pytest.FixtureRequest) -> Any:
    steps = [transforms.Resize(256), transforms.CenterCrop(256), transforms.RandomCrop(224)]
    return transforms.Compose([*steps, transforms.RandomHorizontalFlip(), *LAST[request.param]])


@pytest.fixture
def prepared(photos: Path, transform: Any) -> Iterator[ImageFolder]:
    with ImageFolder(
        str(photos),
        transform,
        storage="shared",
    ).prepare() as dataset:
        yield dataset


def count_images(loader: Any) -> int:
    return sum(len(images) for images, _ in loader)


def test_vanilla(benchmark: Any, photos: Path, transform: Any) -> None:
    """Measure torchvision's ImageFolder and torch's DataLoader, with a worker per core."""
    loader = vanilla_loader(datasets.ImageFolder(str(photos), transform), BATCH, usable_cores())
    assert benchmark.pedantic(count_images, (loader,), rounds=3, warmup_rounds=1) == 400


def test_fastdata(benchmark: Any, prepared: ImageFolder) -> None:
    """Measure fastdata's ImageFolder and DataLoader."""
    loader = DataLoader(prepared, batch_size=BATCH, shuffle=True, num_workers=usable_cores())
    assert benchmark.pedantic(count_images, (loader,), rounds=10, warmup_rounds=2) == 400


def test_fastdata_in_torchs_loader(benchmark: Any, prepared: ImageFolder) -> None:
    """Measure fastdata's ImageFolder in torch's DataLoader without workers."""
    loader = TorchDataLoader(prepared, batch_size=BATCH, shuffle=True, collate_fn=collate)
    assert benchmark.pedantic(count_images, (loader,), rounds=10, warmup_rounds=2) == 400


def test_preparation(benchmark: Any, photos: Path, transform: Any) -> None:
    """Measure preparing: decode and resize all images once."""

    def prepare() -> int:
        with ImageFolder(
            str(photos),
            transform,
            storage="shared",
        ).prepare() as dataset:
            return len(dataset)

    assert benchmark.pedantic(prepare, rounds=3) == 400
