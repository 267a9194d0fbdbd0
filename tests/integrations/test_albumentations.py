"""albumentations, whose transforms take arrays by name."""

from __future__ import annotations

import pickle
from contextlib import nullcontext

import albumentations
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from PIL import Image
from torchvision import transforms as v1

from fastdata import CachedDataset, DataLoader, FastDataWarning

CROP = albumentations.CenterCrop(4, 3)


class Doubled(albumentations.ImageOnlyTransform):
    """A transform of the user's own."""

    def apply(self, img: np.ndarray, **_: object) -> np.ndarray:
        return img * 2


def images() -> list[tuple[Image.Image, int]]:
    draw = np.random.default_rng(0)
    return [(Image.fromarray(draw.integers(0, 256, (5, 6, 3), np.uint8)), i) for i in range(4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_its_compose_is_a_transform(workers: int) -> None:
    """Batches are of what it makes of the arrays, and one line says so if that runs on each sample."""
    for steps in ([albumentations.Normalize()], [Doubled(p=1), albumentations.Normalize()]):
        transform = albumentations.Compose([CROP, *steps, ToTensorV2()])
        with CachedDataset(images(), transform=transform) as dataset:
            warned = pytest.warns(FastDataWarning, match=r"Doubled\(.* is not a known batch op")
            with warned if steps[1:] else nullcontext():
                (batch,) = DataLoader(dataset, batch_size=4, num_workers=workers)
            made = [transform(image=np.asarray(image))["image"] for image, _ in images()]
            assert torch.equal(batch[0], torch.stack(made))
            assert torch.equal(pickle.loads(pickle.dumps(dataset))[2][0], made[2])


def test_it_may_stand_among_torchvisions_steps() -> None:
    """What follows gets the array that it makes."""
    with CachedDataset(images(), transform=v1.Compose([CROP, v1.ToTensor()])) as dataset:
        wanted = v1.functional.to_tensor(CROP(image=np.asarray(images()[1][0]))["image"])
        assert torch.equal(dataset[1][0], wanted)
