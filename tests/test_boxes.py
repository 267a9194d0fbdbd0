"""(image, boxes) under v2's joint transforms: pixels are kept, and the user's own steps run on each pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset
from torch.utils.data import DataLoader as TorchDataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

from fastdata import CachedDataset, DataLoader
from fastdata.machine.tables import SampleTable

SIZE = 40, 60
TO_FLOAT = [v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)]
STEPS = {
    "flip": [v2.RandomHorizontalFlip(1.0)],
    "resize": [v2.Resize((31, 77))],
    "rotation": [v2.RandomRotation((9, 9))],
    "all": [
        v2.Resize((50, 50)),
        v2.CenterCrop(30),
        v2.ClampBoundingBoxes(),
        v2.SanitizeBoundingBoxes(min_size=3),
    ],
    "format": [v2.ConvertBoundingBoxFormat("CXCYWH"), v2.RandomVerticalFlip(1.0)],
}


def target(count: int, number: int) -> dict[str, Any]:
    """Return a target with boxes that may reach out of the image, as detection datasets have them."""
    generator = torch.Generator().manual_seed(number)
    corner = torch.rand(count, 2, generator=generator) * torch.tensor([50.0, 30.0])
    boxes = torch.cat([corner, corner + torch.rand(count, 2, generator=generator) * 30 + 1], 1)
    boxed = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=SIZE)
    return {
        "boxes": boxed,
        "labels": torch.arange(count),
        "image_id": number,
        "file": f"{number}.jpg",
    }


def samples(count: int = 8) -> list[Any]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, *SIZE), np.uint8)
    return [(tv_tensors.Image(pixels[n]), target(n % 4, n)) for n in range(count)]


def as_lists(batch: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*batch, strict=True))


def check_boxes(found: Any, wanted: Any) -> None:
    assert (found.format, found.canvas_size, found.dtype) == (
        wanted.format,
        wanted.canvas_size,
        wanted.dtype,
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", STEPS)
def test_pairs_are_torchvisions(name: str) -> None:
    """Image, boxes and labels equal v2's, in batches and alone; other values of a target stay as they are."""
    data, both = samples(), v2.Compose([*STEPS[name], *TO_FLOAT])
    with CachedDataset(data, transforms=both) as dataset:
        loader = DataLoader(dataset, batch_size=4, collate_fn=as_lists)
        served = [pair for batch in loader for pair in zip(*batch, strict=True)]
        for pair, alone, given in zip(served, [dataset[n] for n in range(8)], data, strict=True):
            image, wanted = both(*given)
            for found_image, found in (pair, alone):
                assert torch.equal(found_image, image)
                check_boxes(found["boxes"], wanted["boxes"])
                assert list(found) == list(wanted)
                assert all(
                    torch.as_tensor(found[key] == wanted[key]).all()
                    for key in wanted
                    if key != "boxes"
                )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pairs_are_the_same_whoever_reads_them(num_workers: int) -> None:
    """Torch's own loader and a ConcatDataset read them too."""
    both = v2.Compose([v2.CenterCrop(30), v2.SanitizeBoundingBoxes(), *TO_FLOAT])
    data = samples()
    with CachedDataset(data, transforms=both) as dataset:
        for make, whole in (
            (DataLoader, dataset),
            (TorchDataLoader, dataset),
            (DataLoader, ConcatDataset([dataset])),
        ):
            batches = make(whole, batch_size=4, num_workers=num_workers, collate_fn=as_lists)
            found = [pair for batch in batches for pair in zip(*batch, strict=True)]
            for (image, it), given in zip(found, data, strict=True):
                wanted_image, wanted = both(*given)
                assert torch.equal(image, wanted_image)
                check_boxes(it["boxes"], wanted["boxes"])
                assert torch.equal(it["labels"], wanted["labels"])


def test_targets_that_do_not_collate_go_to_a_collate_fn() -> None:
    """With a transform of the image alone, images are still read in whole batches."""
    image_only = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    with CachedDataset(samples(), transform=image_only) as dataset:
        loader = DataLoader(dataset, batch_size=4, collate_fn=as_lists)
        assert [len(it["labels"]) for _, targets in loader for it in targets] == [0, 1, 2, 3] * 2
        assert loader.report().path.startswith("whole batches")
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
            next(iter(DataLoader(dataset, batch_size=4)))


def test_boxes_alone_are_a_target() -> None:
    """A target may consist of boxes only, which v2 transforms together with the image."""
    data = [(image, it["boxes"]) for image, it in samples()]
    both = v2.Compose([v2.CenterCrop(30), v2.SanitizeBoundingBoxes(labels_getter=None), *TO_FLOAT])
    with CachedDataset(data, transforms=both) as dataset:
        for (_, found), given in zip(DataLoader(dataset, batch_size=None), data, strict=True):
            check_boxes(found, both(*given)[1])
        assert "only images with a tv_tensors.Mask run on whole batches" in (
            dataset.plan.obstacle or ""
        )


def test_values_that_numpy_does_not_know_are_kept() -> None:
    """A bfloat16, a gradient or a number beyond int64 next to boxes, or as the target, comes back as it was."""
    odd = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True), 2**64 - 1]
    for value in odd:
        targets = [it | {"value": value} for _, it in samples()]
        for table in (SampleTable(targets), SampleTable([value] * 3)):
            found = table.target(1)
            found = found["value"] if isinstance(found, dict) else found
            assert type(found) is type(value)
            assert torch.equal(
                torch.as_tensor(found, dtype=torch.float64),
                torch.as_tensor(value, dtype=torch.float64),
            )
            table.close()
