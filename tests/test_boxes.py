"""(image, boxes) under v2's joint transforms: one geometry for both, on whole batches."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset
from torch.utils.data import DataLoader as TorchDataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

from fastdata import CachedDataset, DataLoader
from fastdata.shared import SampleTable

SIZE = 40, 60
FORMATS = [("XYXY", torch.float32), ("XYXY", torch.int64), ("XYWH", torch.float32), ("XYWH", torch.int32)]
TO_FLOAT = [v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)]
STEPS = {
    "flip": [v2.RandomHorizontalFlip(1.0)],
    "vertical flip": [v2.RandomVerticalFlip(1.0)],
    "center crop": [v2.CenterCrop((20, 30))],
    "pad": [v2.Pad([1, 2, 3, 4], fill=7)],
    "resize": [v2.Resize((31, 77))],
    "shorter side": [v2.Resize(25, max_size=33)],
    "padded crop": [v2.ClampBoundingBoxes(), v2.RandomCrop((44, 64), padding=2)],
    "whole crop": [v2.RandomResizedCrop((32, 48), scale=(1, 1), ratio=(1.5, 1.5))],
    "sanitize": [v2.SanitizeBoundingBoxes(min_size=9)],
    "sanitize boxes": [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=9, labels_getter=None)],
    "all": [v2.Resize((50, 50)), v2.CenterCrop(30), v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes(min_size=3)],
    "sometimes": [v2.RandomApply([v2.RandomHorizontalFlip(1.0), v2.Resize((20, 30))], 1.0), v2.Resize((30, 30))],
    "colours": [v2.Grayscale(3), v2.RandomHorizontalFlip(0.0)],
}


def target(count: int, number: int, format: str = "XYXY", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A target with boxes that may reach out of the image, as detection datasets have them."""
    generator = torch.Generator().manual_seed(number)
    corner = torch.rand(count, 2, generator=generator) * torch.tensor([50.0, 30.0])
    size = torch.rand(count, 2, generator=generator) * 30 + 1
    boxes = torch.cat([corner, corner + size if format == "XYXY" else size], 1).to(dtype)
    boxed = tv_tensors.BoundingBoxes(boxes, format=format, canvas_size=SIZE)
    return {"boxes": boxed, "labels": torch.arange(count), "image_id": number, "file": f"{number}.jpg"}


def samples(count: int = 8, *, how_many: Callable[[int], int] = lambda n: n % 4, **form: Any) -> list[Any]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, *SIZE), np.uint8)
    return [(tv_tensors.Image(pixels[n]), target(how_many(n), n, **form)) for n in range(count)]


def as_lists(batch: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*batch, strict=True))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_boxes_are_torchvisions(name: str, format: str, dtype: torch.dtype) -> None:
    """What v2 makes of image, boxes and labels is served in batches and alone; all else of a target stays."""
    data, both = samples(format=format, dtype=dtype), v2.Compose([*STEPS[name], *TO_FLOAT])
    if name == "sanitize boxes":
        data = [(image, {"boxes": it["boxes"], "name": "no labels"}) for image, it in data]
    with CachedDataset(data, transforms=both, progress=False) as dataset:
        loader = DataLoader(dataset, batch_size=4, collate_fn=as_lists)
        served = [pair for batch in loader for pair in zip(*batch, strict=True)]
        assert loader.report().path.startswith("whole batches")
        for pair, alone, given in zip(served, [dataset[n] for n in range(8)], data, strict=True):
            image, wanted = both(*given)
            for found_image, found in (pair, alone):
                assert torch.equal(found_image, image)
                check_boxes(found["boxes"], wanted["boxes"], exactly=format == "XYXY" or not dtype.is_floating_point)
                assert list(found) == list(wanted)
                assert all(torch.as_tensor(found[key] == wanted[key]).all() for key in wanted if key != "boxes")


def check_boxes(found: Any, wanted: Any, *, exactly: bool = False) -> None:
    assert (found.format, found.canvas_size, found.dtype) == (wanted.format, wanted.canvas_size, wanted.dtype)
    torch.testing.assert_close(found, wanted, atol=0 if exactly else 1e-4, rtol=0)


@pytest.mark.parametrize("wanted", ["XYXY", "xywh", "CXCYWH", tv_tensors.BoundingBoxFormat.CXCYWH])
def test_formats_are_converted(wanted: Any) -> None:
    """Any format becomes any other, and is moved on in that."""
    both = v2.Compose([v2.ConvertBoundingBoxFormat(wanted), v2.RandomVerticalFlip(1.0), v2.Resize((30, 30)), *TO_FLOAT])
    for format in ("XYXY", "XYWH"):
        data = samples(format=format)
        with CachedDataset(data, transforms=both, progress=False) as dataset:
            for (_, found), given in zip(DataLoader(dataset, batch_size=None), data, strict=True):
                check_boxes(found["boxes"], both(*given)[1]["boxes"])


@pytest.mark.parametrize(
    "steps",
    [
        [v2.RandomCrop((25, 35))],
        [v2.RandomCrop((60, 70), pad_if_needed=True)],
        [v2.RandomResizedCrop((40, 40), scale=(0.3, 0.9), interpolation=v2.InterpolationMode.NEAREST)],
        [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()],
        [v2.RandomChoice([v2.RandomHorizontalFlip(1.0), v2.RandomCrop(SIZE, padding=9)])],
        [v2.RandomOrder([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.RandomCrop(SIZE, padding=9)])],
        [v2.RandomApply([v2.RandomResizedCrop(SIZE, interpolation=v2.InterpolationMode.NEAREST)]), v2.CenterCrop(30)],
    ],
)
def test_boxes_follow_the_random_geometry_of_their_image(steps: list[Any]) -> None:
    """Under the middle of a box lies the pixel that lay there before, whatever was drawn."""
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]].astype(np.uint8)
    image = tv_tensors.Image(np.stack([columns, rows, np.full_like(rows, 255)]))
    spots = torch.cartesian_prod(torch.arange(4.0, 60, 8), torch.arange(4.0, 40, 8))
    boxes = torch.cat([spots, spots + 1], 1)
    boxed = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=SIZE)
    both = v2.Compose([*steps, v2.ToPureTensor()])
    with CachedDataset([(image, {"spots": boxed})] * 64, transforms=both, progress=False) as dataset:
        assert dataset.plan.boxes is not None, dataset.plan
        moved = set()
        for images, targets in DataLoader(dataset, batch_size=32, collate_fn=as_lists):
            for pixels, found in zip(images, (it["spots"] for it in targets), strict=True):
                assert type(found) is torch.Tensor  # the last step says so
                is_whole = (found[:, 2] - found[:, 0] > 0.6) & (found[:, 3] - found[:, 1] > 0.6)
                moved.add(tuple(found[0].tolist()))
                x, y = ((found[is_whole, :2] + found[is_whole, 2:]) / 2).long().T
                under = pixels[:2, y, x].T.float()
                assert len(under)
                assert (under - spots[is_whole]).abs().max() <= 1
        assert len(moved) > 2


def test_batches_have_one_size_or_are_lists() -> None:
    """Where images keep their sizes, each is served alone, by the same core and in the same way."""
    wide = [(tv_tensors.Image(torch.zeros(3, 40, 60 + n, dtype=torch.uint8)), target(n, n)) for n in range(4)]
    for n, (_, it) in enumerate(wide):
        it["boxes"] = tv_tensors.wrap(it["boxes"], like=it["boxes"], canvas_size=(40, 60 + n))
    both = v2.Compose([v2.RandomHorizontalFlip(1.0), *TO_FLOAT])
    with CachedDataset(wide, transforms=both, progress=False) as dataset:
        for (image, found), given in zip(dataset, wide, strict=True):
            assert torch.equal(image, both(*given)[0])
            check_boxes(found["boxes"], both(*given)[1]["boxes"], exactly=True)
        assert "differ in shape" in DataLoader(dataset, batch_size=2).report().path


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_boxes_are_the_same_whoever_reads_them(num_workers: int, workers: Any) -> None:
    """Threads, processes and torch's own loader draw the same; a ConcatDataset reads its parts."""
    both = v2.Compose([v2.RandomCrop((25, 35)), v2.SanitizeBoundingBoxes(), *TO_FLOAT])
    data = samples()
    with CachedDataset(data, transforms=both, seed=3, progress=False) as dataset:
        dataset.set_epoch(0)
        wanted = [dataset[n] for n in range(8)]
        how = {"batch_size": 4, "num_workers": num_workers, "collate_fn": as_lists}
        for make, whole in ((DataLoader, dataset), (TorchDataLoader, dataset), (DataLoader, ConcatDataset([dataset]))):
            dataset.set_epoch(0)
            own = {"workers": workers} if make is DataLoader and num_workers else {}
            found = [pair for batch in make(whole, **how, **own) for pair in zip(*batch, strict=True)]
            for (image, it), (wanted_image, expected) in zip(found, wanted, strict=True):
                assert torch.equal(image, wanted_image)
                check_boxes(it["boxes"], expected["boxes"], exactly=True)
                assert torch.equal(it["labels"], expected["labels"])


def test_as_many_boxes_each_are_stacked() -> None:
    """``default_collate`` does with targets what it would without fastdata, an error of its own included."""
    both = v2.Compose([v2.RandomHorizontalFlip(1.0), *TO_FLOAT])
    with CachedDataset(samples(how_many=lambda n: 2), transforms=both, progress=False) as dataset:
        images, found = next(iter(DataLoader(dataset, batch_size=4)))
        assert (images.shape, found["boxes"].shape, found["labels"].shape) == ((4, 3, *SIZE), (4, 2, 4), (4, 2))
        assert found["file"] == [f"{n}.jpg" for n in range(4)]
    uneven = CachedDataset(samples(), transforms=both, progress=False)
    with uneven, pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(DataLoader(uneven, batch_size=4)))


def test_targets_that_do_not_collate_go_to_a_collate_fn() -> None:
    """So they do under a transform of the image alone."""
    image_only = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    with CachedDataset(samples(), transform=image_only, progress=False) as dataset:
        loader = DataLoader(dataset, batch_size=4, collate_fn=as_lists)
        assert [len(it["labels"]) for _, targets in loader for it in targets] == [0, 1, 2, 3] * 2
        assert loader.report().path.startswith("whole batches")


def test_boxes_alone_are_a_target() -> None:
    """As v2 takes them."""
    data = [(image, it["boxes"]) for image, it in samples()]
    both = v2.Compose([v2.CenterCrop(30), v2.SanitizeBoundingBoxes(labels_getter=None), *TO_FLOAT])
    with CachedDataset(data, transforms=both, progress=False) as dataset:
        for (_, found), given in zip(DataLoader(dataset, batch_size=None), data, strict=True):
            check_boxes(found, both(*given)[1], exactly=True)


@pytest.mark.parametrize(
    ("steps", "change", "reason"),
    [
        ([v2.RandomRotation(9)], {}, "which moves boxes one by one"),
        ([v2.RandomIoUCrop()], {}, "RandomIoUCrop.* which is not a known batch op"),
        ([v2.Pad(2, padding_mode="edge")], {}, "padding_mode='edge', which takes no boxes"),
        ([v2.SanitizeBoundingBoxes(labels_getter=lambda it: None)], {}, "a labels_getter of its own"),
        ([v2.ConvertBoundingBoxFormat("XYXYXYXY")], {}, "makes boxes of format XYXYXYXY"),
        ([v2.RandomApply([v2.SanitizeBoundingBoxes()])], {}, "contains SanitizeBoundingBoxes"),
        ([v2.ToDtype({tv_tensors.BoundingBoxes: torch.float64, "others": None})], {}, "converts boxes"),
        ([], {"boxes": torch.zeros(1, 4)}, "or with one tv_tensors.BoundingBoxes"),
        (
            [],
            {"more": tv_tensors.BoundingBoxes([0, 0, 1, 1], format="XYXY", canvas_size=SIZE)},
            "or with one tv_tensors.BoundingBoxes",
        ),
        ([], {"mask": tv_tensors.Mask(torch.zeros(1, 2, 2))}, "targets hold other images, .* as 'mask'"),
        (
            [],
            {"boxes": tv_tensors.BoundingBoxes([0.0] * 5, format="XYWHR", canvas_size=SIZE)},
            "boxes are of format XYWHR",
        ),
    ],
)
def test_what_is_not_served_says_why(steps: list[Any], change: dict[str, Any], reason: str) -> None:
    """It runs on each sample, as written."""
    data = [(image, it | change) for image, it in samples(how_many=lambda n: 2)]
    with CachedDataset(data, transforms=v2.Compose([*steps, *TO_FLOAT]), progress=False) as dataset:
        assert dataset.plan.boxes is None
        assert re.search(reason, dataset.plan.obstacle or "")


def test_boxes_of_another_canvas_run_as_written() -> None:
    """Where only the images were resized, v2 moves boxes by their own canvas, and so do we."""
    both = v2.Compose([v2.Resize((80, 120)), *TO_FLOAT])
    with CachedDataset(samples(), transforms=both, prepare=v2.Resize((20, 30)), progress=False) as dataset:
        assert "boxes of sample 0 lie on a canvas of another size" in (dataset.plan.obstacle or "")
        given = samples()[3]
        check_boxes(dataset[3][1]["boxes"], both(*given)[1]["boxes"], exactly=True)


@pytest.mark.parametrize(
    "more",
    [{"pair": (tv_tensors.Mask(torch.zeros(2, 2)), 3)}, {"crowd": {"boxes": target(1, 1)["boxes"]}}, {"late": None}],
)
def test_what_v2_would_move_is_never_left_behind(more: dict[str, Any]) -> None:
    """Masks and boxes in tuples, in dicts, or in some targets only, keep all of it to v2."""
    data = [(image, it | more) for image, it in samples()]
    if "late" in more:
        data[5][1]["late"] = target(2, 2)["boxes"]
    both = v2.Compose([v2.RandomHorizontalFlip(1.0), *TO_FLOAT])
    with CachedDataset(data, transforms=both, progress=False) as dataset:
        assert f"as {next(iter(more))!r}" in (dataset.plan.obstacle or "")


def test_labels_of_another_number_than_boxes_are_an_error() -> None:
    """Which sample has them is said; and at once, that there are none."""
    both = v2.Compose([v2.SanitizeBoundingBoxes(), *TO_FLOAT])
    short = CachedDataset([(image, it | {"labels": torch.zeros(1)}) for image, it in samples()], transforms=both)
    with (
        short,
        pytest.raises(ValueError, match="sample 2 has 2 boxes and 1 labels; SanitizeBoundingBoxes needs as many"),
    ):
        short.__getitems__([1, 2])
    without = [(image, {"boxes": it["boxes"], "name": "x"}) for image, it in samples()]
    with pytest.raises(ValueError, match=r"needs a tensor with 'label' in its key, but found \['boxes', 'name'\]"):
        CachedDataset(without, transforms=both, progress=False)


def test_values_that_numpy_does_not_know_are_kept() -> None:
    """A bfloat16, a gradient or a number beyond int64 beside boxes, or as the target, comes back as it was."""
    odd = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True), 2**64 - 1]
    for value in odd:
        targets = [it | {"value": value} for _, it in samples()]
        for table in (SampleTable(targets), SampleTable([value] * 3)):
            found = table.target(1)
            found = found["value"] if isinstance(found, dict) else found
            assert type(found) is type(value)
            assert torch.equal(torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(value, dtype=torch.float64))
            table.close()


def test_targets_of_several_lengths_are_kept_without_pickles() -> None:
    """Boxes, labels and what else is in a dict come back as they were, in a copy elsewhere too."""
    targets = [it for _, it in samples()]
    table = SampleTable(targets)
    assert [place.target_kind for place in table.target_places] == ["boxes", "rows", "number", "object"]
    for found in (table, pickle.loads(pickle.dumps(table))):
        for n, wanted in enumerate(targets):
            it = found.target(n)
            assert list(it) == list(wanted)
            check_boxes(it["boxes"], wanted["boxes"], exactly=True)
            assert torch.equal(it["labels"], wanted["labels"])
            assert it["file"] == wanted["file"]
    table.close()
