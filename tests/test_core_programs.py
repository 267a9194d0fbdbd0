"""Thousands of random programs on images of random shapes: torchvision's pixels, and no read outside of an image.

``.ci/run`` runs them under AddressSanitizer and UBSan as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from data import ArrayStore
from fastdata import CachedDataset, DataLoader
from fastdata.pixels.program import Program
from fastdata.pixels.split import split_transform
from test_steps import LEVELS
from test_transforms import EPOCH, SEED, reference, to_form

pytestmark = pytest.mark.usefixtures("levels_agree")  # pixels of all levels of instruction sets

SIDES = (1, 2, 3, 5, 8, 15, 16, 17, 33, 63, 64, 65, 100, 131)
MODES = ("constant", "edge", "reflect", "symmetric")
FILTERS = ("nearest", "nearest-exact", "bilinear", "bicubic")

Pick = Callable[..., Any]

GEOMETRY: dict[str, Callable[[Any, Pick], Any]] = {
    "CenterCrop": lambda api, pick: api.CenterCrop((pick(*SIDES), pick(*SIDES))),
    "Pad": lambda api, pick: api.Pad(
        [pick(0, 1, 4, 9) for _ in range(4)], pick(0, 7), pick(*MODES)
    ),
    "RandomCrop": lambda api, pick: api.RandomCrop(
        (pick(*SIDES), pick(*SIDES)),
        pick(None, 1, (2, 5)),
        pick(True, True, False),
        padding_mode=pick(*MODES),
    ),
    "RandomHorizontalFlip": lambda api, pick: api.RandomHorizontalFlip(),
    "RandomVerticalFlip": lambda api, pick: api.RandomVerticalFlip(),
    "RandomResizedCrop": lambda api, pick: api.RandomResizedCrop(
        (pick(*SIDES), pick(*SIDES)),
        interpolation=v1.InterpolationMode(pick(*FILTERS)),
        antialias=True,
    ),
    "Resize": lambda api, pick: api.Resize(
        pick(pick(*SIDES), (pick(*SIDES), pick(*SIDES))),
        v1.InterpolationMode(pick(*FILTERS)),
        antialias=True,
    ),
}
VALUES: dict[str, Callable[[Any, Pick], Any]] = {
    "ColorJitter": lambda api, pick: api.ColorJitter(0.5, 0.5, 0.5, pick(0.1, 0.5)),
    "GaussianBlur": lambda api, pick: api.GaussianBlur((pick(1, 3, 5), pick(1, 3, 7)), (0.1, 2.0)),
    "RandomAffine": lambda api, pick: api.RandomAffine(
        40, (0.3, 0.3), (0.5, 1.5), 20, fill=pick(0, 9)
    ),
    "RandomAdjustSharpness": lambda api, pick: api.RandomAdjustSharpness(pick(0.0, 1.7), 1.0),
    "RandomAutocontrast": lambda api, pick: api.RandomAutocontrast(1.0),
    "RandomEqualize": lambda api, pick: api.RandomEqualize(1.0),
    "RandomGrayscale": lambda api, pick: api.RandomGrayscale(1.0),
    "RandomInvert": lambda api, pick: api.RandomInvert(1.0),
    "RandomPerspective": lambda api, pick: api.RandomPerspective(0.6, 1.0),
    "RandomPosterize": lambda api, pick: api.RandomPosterize(pick(1, 3, 7), 1.0),
    "RandomRotation": lambda api, pick: api.RandomRotation(
        180, pick(*map(v1.InterpolationMode, FILTERS[::2]))
    ),
    "RandomSolarize": lambda api, pick: api.RandomSolarize(pick(0, 100, 255), 1.0),
    "TrivialAugmentWide": lambda api, pick: api.TrivialAugmentWide(),
}
DRAWN = {
    "ColorJitter",
    "GaussianBlur",
    "RandomAffine",
    "RandomPerspective",
    "RandomRotation",
    "TrivialAugmentWide",
}
"""Steps that only run here: test_steps.py compares their pixels with torchvision's, by the same draws."""


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("form", ["pil", "tensor"])
@pytest.mark.parametrize("api", ["v1", "v2"])
def test_random_programs(api: str, form: str, number: int) -> None:
    """A program of exact steps gives torchvision's pixels; it is refused only if torchvision raises an error, too."""
    rng = np.random.default_rng([number, api == "v1", form == "pil"])

    def pick(*of: Any) -> Any:
        return of[rng.integers(len(of))]

    compared = 0
    for _ in range(100):
        channels = pick(1, 3, 3, 4)
        steps = GEOMETRY if channels == 4 else GEOMETRY | VALUES
        names = [pick(*steps) for _ in range(rng.integers(1, 5))]
        program_steps = tuple(steps[name](v1 if api == "v1" else v2, pick) for name in names)
        shapes = [(channels, pick(*SIDES), pick(*SIDES)) for _ in range(2)]
        store = ArrayStore([rng.integers(0, 256, shape, np.uint8) for shape in shapes], form)
        plan = split_transform(program_steps, form=store.spec.form, channels=channels, prepared=0)
        assert not plan.per_sample, plan.obstacle
        program = Program(plan.batch_ops, store.spec)
        is_exact = not DRAWN & {*names} and all(LEVELS[name, api, form] == 0 for name in names)
        for index in range(2):
            try:
                served = program.run_one(store, index, EPOCH, SEED)
            except ValueError:
                with pytest.raises((ValueError, RuntimeError, IndexError)):
                    reference(program_steps, to_form(store.samples[index], form), index)
                continue
            if is_exact:
                wanted = reference(program_steps, to_form(store.samples[index], form), index)
                assert np.array_equal(served, wanted), (program_steps, shapes[index])
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("side_px", [32, 31])  # rows of float32 that are whole vectors, or not
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_large_batches_have_the_values_of_small_ones(
    side_px: int, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    """The size of a batch changes no value, in any dtype and layout, also where values are erased."""
    pixels = np.random.default_rng(0).integers(0, 256, (96, 3, 40, 50), np.uint8)
    items = [(torch.from_numpy(image), number) for number, image in enumerate(pixels)]
    to_floats = [v2.ToDtype(dtype, scale=True), v2.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])]
    steps = [v2.RandomCrop(side_px), v2.RandomHorizontalFlip(), *to_floats, v2.RandomErasing()]
    dataset = CachedDataset(items, transform=v2.Compose(steps), seed=3, storage="shared")
    large, small = (
        [images for images, _ in DataLoader(dataset, size, memory_format=memory_format)]
        for size in (96, 2)
    )
    assert torch.equal(large[0], torch.cat(small))
