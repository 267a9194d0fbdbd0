"""albumentations, whose transforms take arrays by name."""

from __future__ import annotations

import pickle

import albumentations
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from PIL import Image
from torchvision import transforms as v1

from fastdata import CachedDataset, DataLoader, FastDataWarning

CROP = albumentations.CenterCrop(4, 3)


def images() -> list[tuple[Image.Image, int]]:
    draw = np.random.default_rng(0)
    return [(Image.fromarray(draw.integers(0, 256, (5, 6, 3), np.uint8)), i) for i in range(4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_its_compose_is_a_transform(workers: int) -> None:
    """Batches are of what it makes of the arrays, and one line says that it runs on each sample."""
    transform = albumentations.Compose([CROP, albumentations.Normalize(), ToTensorV2()])
    with CachedDataset(images(), transform=transform) as dataset:
        with pytest.warns(FastDataWarning, match=r"Compose\(.* is not a known batch op"):
            (batch,) = DataLoader(dataset, batch_size=4, num_workers=workers)
        wanted = torch.stack([transform(image=np.asarray(image))["image"] for image, _ in images()])
        assert torch.equal(batch[0], wanted)
        assert torch.equal(pickle.loads(pickle.dumps(dataset))[2][0], wanted[2])


def test_it_may_stand_among_torchvisions_steps() -> None:
    """What follows gets the array that it makes."""
    with CachedDataset(images(), transform=v1.Compose([CROP, v1.ToTensor()])) as dataset:
        wanted = v1.functional.to_tensor(CROP(image=np.asarray(images()[1][0]))["image"])
        assert torch.equal(dataset[1][0], wanted)
