"""albumentations' Compose in whole batches: pixels, masks, and transforms that run per sample."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from albumentations_cases import Served, albumentations, assert_alike, images, refusal_of, serve
from fastdata import CachedDataset, DataLoader, FastDataWarning, plan_transform

A = albumentations
ToTensorV2 = pytest.importorskip("albumentations.pytorch").ToTensorV2

SIZES = ((9, 12), (16, 16), (7, 5), (33, 20))
REFLECT_101, WRAP, REFLECT, REPLICATE = 4, 3, 2, 1

STEADY = {
    "HorizontalFlip": lambda: A.HorizontalFlip(p=1),
    "VerticalFlip": lambda: A.VerticalFlip(p=1),
    "Transpose": lambda: A.Transpose(p=1),
    "NoOp": lambda: A.NoOp(p=1),
    "CenterCrop": lambda: A.CenterCrop(5, 4),
    "CenterCrop, padded": lambda: A.CenterCrop(13, 15, pad_if_needed=True, fill=9.0),
    "CenterCrop, at a corner": lambda: A.CenterCrop(
        13, 15, pad_if_needed=True, pad_position="bottom_left", border_mode=REFLECT_101
    ),
    "Crop": lambda: A.Crop(1, 2, 5, 7),
    "Crop, padded": lambda: A.Crop(1, 3, 14, 30, pad_if_needed=True, fill=(1.0, 2.0, 3.0)),
    "Crop, padded before it": lambda: A.Crop(
        1, 3, 14, 30, pad_if_needed=True, pad_position="bottom_right", border_mode=REPLICATE
    ),
    "PadIfNeeded": lambda: A.PadIfNeeded(20, 21, fill=(5.0, 6.0, 7.0)),
    "PadIfNeeded, to a multiple": lambda: A.PadIfNeeded(
        None,
        None,
        pad_height_divisor=8,
        pad_width_divisor=6,
        border_mode=WRAP,
        position="top_right",
    ),
    "PadIfNeeded, far": lambda: A.PadIfNeeded(90, 70, border_mode=REFLECT, position="top_left"),
    "Pad": lambda: A.Pad((1, 2, 3, 4), fill=200),
    "Pad, wide": lambda: A.Pad(17, border_mode=REFLECT_101),
    "Normalize": lambda: A.Normalize(),
    "Normalize, one number": lambda: A.Normalize(mean=0.3, std=0.7),
    "Normalize, other numbers": lambda: A.Normalize((0.1, 0.9, 0.3), (0.2, 1.7, 0.01), 171.0),
    "Normalize, of the image": lambda: A.Normalize(normalization="image"),
    "Normalize, of channels": lambda: A.Normalize(normalization="image_per_channel"),
    "Normalize, range of the image": lambda: A.Normalize(normalization="min_max"),
    "Normalize, range of channels": lambda: A.Compose(
        [A.Transpose(p=1), A.Normalize(normalization="min_max_per_channel"), ToTensorV2()]
    ),
    "ToFloat": lambda: A.ToFloat(),
    "ToFloat, of another range": lambda: A.ToFloat(max_value=77),
    "FromFloat": lambda: A.Compose([A.ToFloat(), A.FromFloat()]),
    "ToTensorV2": lambda: A.Compose([A.Normalize(), ToTensorV2()]),
    "Compose": lambda: A.Compose(
        [
            A.Sequential([A.PadIfNeeded(40, 40), A.Compose([A.VerticalFlip(p=1)])], p=1),
            A.Normalize(),
        ]
    ),
}


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("case", STEADY)
def test_pixels_are_those_of_albumentations(case: str, channels: int) -> None:
    """Samples equal albumentations' exactly, floats too, with the same shapes, dtypes and classes."""
    transform = STEADY[case]()
    if channels == 1 and ("(1.0" in str(transform) or "(5.0" in str(transform)):
        pytest.skip("a fill for three channels")
    arrays = images(*SIZES, channels=channels)
    for array, pixels in zip(arrays, serve(transform, arrays), strict=True):
        wanted = transform(image=array.copy())["image"]
        assert type(pixels) is type(wanted)
        assert (pixels.shape, pixels.dtype) == (wanted.shape, wanted.dtype)
        assert np.array_equal(np.asarray(pixels), np.asarray(wanted))


SYMMETRIES = {
    "RandomRotate90": (lambda: A.RandomRotate90(), "factor", (0, 1, 2, 3)),
    "D4": (lambda: A.D4(), "group_element", ("e", "r90", "r180", "r270", "v", "hvt", "h", "t")),
    "SquareSymmetry": (
        lambda: A.SquareSymmetry(),
        "group_element",
        ("e", "r90", "r180", "r270", "v", "hvt", "h", "t"),
    ),
}


@pytest.mark.parametrize("name", SYMMETRIES)
def test_symmetries_are_drawn_alike(name: str) -> None:
    """Each outcome is one of albumentations', and all of them are equally frequent."""
    make, parameter, every = SYMMETRIES[name]
    [array, _] = images((6, 6))
    transform = make()
    outcomes = [transform.apply(array, **{parameter: value}).tobytes() for value in every]
    found = [outcomes.index(pixels.tobytes()) for pixels in serve(transform, [array] * 800)]
    assert_alike(found, np.arange(800) % len(every))


def test_images_that_are_not_square_are_turned() -> None:
    """A quarter turn exchanges height and width, so images that are not square are served one by one."""
    arrays = images((6, 9))[:1] * 40
    shapes = {pixels.shape for pixels in serve(A.RandomRotate90(), arrays)}
    assert shapes == {(6, 9, 3), (9, 6, 3)}


@pytest.mark.parametrize("position", ["center", "random"])
def test_random_crops_are_windows_of_the_padded_image(position: str) -> None:
    """RandomCrop cuts the same windows as albumentations, for the same random numbers."""
    transform = A.RandomCrop(8, 10, pad_if_needed=True, pad_position=position, fill=3.0)
    arrays = images((5, 14))[:1] * 30
    ops = Served(transform, arrays[0]).ops(arrays[0].shape, 30)["window"]
    for array, pixels, (pad, cut) in zip(arrays, serve(transform, arrays), ops, strict=True):
        border, box = pad["border"], cut["box"]
        coords = (box["left"], box["top"], box["left"] + 10, box["top"] + 8)
        padding = {f"pad_{side}": int(border[side]) for side in ("top", "bottom", "left", "right")}
        wanted = transform.apply(array, crop_coords=coords, pad_params=padding)
        assert np.array_equal(pixels, wanted)
        assert padding["pad_top"] + padding["pad_bottom"] == 3
        assert position == "random" or padding["pad_top"] == 1
    assert len(np.unique(ops[:, 1]["box"]["left"])) == 5


def dyed(transform: Any, arrays: list[np.ndarray]) -> list[tuple[int, int]]:
    """Return which flips each image went through, found from the place of its first pixel."""
    return [
        tuple(map(int, np.argwhere(pixels[..., 0] == 255)[0]))
        for pixels in serve(transform, arrays)
    ]


COMPOSITIONS = {
    "p": lambda: A.HorizontalFlip(p=0.3),
    "Compose": lambda: A.Compose([A.HorizontalFlip(p=0.4), A.VerticalFlip(p=0.8)], p=0.5),
    "Sequential": lambda: A.Compose([A.Sequential([A.HorizontalFlip(p=0.4), A.NoOp()])]),
    "OneOf": lambda: A.OneOf([A.HorizontalFlip(p=0.1), A.VerticalFlip(p=0.3), A.NoOp(p=0)], p=0.6),
    "OneOf, of compositions": lambda: A.OneOf(
        [
            A.Sequential([A.HorizontalFlip(p=0.2)], p=0.1),
            A.SomeOf([A.VerticalFlip(p=0.5)], n=1, p=0.5),
            A.OneOrOther(A.VerticalFlip(p=0.1), A.NoOp(), p=0.9),
        ],
        p=1,
    ),
    "SomeOf": lambda: A.SomeOf(
        [A.HorizontalFlip(p=0.9), A.VerticalFlip(p=0.6), A.Transpose(p=0.5)], n=2, p=0.8
    ),
    "RandomOrder": lambda: A.RandomOrder(
        [A.HorizontalFlip(p=0.9), A.VerticalFlip(p=0.6), A.Transpose(p=0.5)], n=2
    ),
    "OneOrOther": lambda: A.OneOrOther(A.HorizontalFlip(p=0.1), A.VerticalFlip(p=0.2), p=0.3),
}


@pytest.mark.parametrize("case", COMPOSITIONS)
def test_compositions_are_drawn_alike(case: str) -> None:
    """Each outcome of a composition is as frequent as in albumentations."""
    array = np.zeros((4, 4, 3), np.uint8)
    array[0, 1] = 255  # tells all eight symmetries apart
    transform = COMPOSITIONS[case]()
    # One generator for all: with a seed, each has its own, and all of them draw the same numbers.
    transform.set_random_state(np.random.default_rng(3), random.Random(3))
    theirs = [transform(image=array)["image"][..., 0].argmax() for _ in range(1500)]
    ours = [pixels[..., 0].argmax() for pixels in serve(transform, [array] * 1500)]
    assert_alike(ours, theirs)


REFUSED = {
    "is not a known batch op": lambda: A.RandomRain(),
    "contains RandomRain, which is not a known batch op": lambda: A.OneOf(
        [A.RandomRain(), A.NoOp()]
    ),
    "changes the kind of only some samples": lambda: A.ToFloat(p=0.5),
    "draws transforms with replacement": lambda: A.SomeOf([A.NoOp()], n=2, replace=True),
    "has a fill that is not a uint8 value": lambda: A.Pad(1, fill=0.5),
    "has a fill for another number of channels": lambda: A.Pad(1, fill=(1.0, 2.0)),
    "comes after the conversion to floats": lambda: A.Compose([A.Normalize(), A.Normalize()]),
    "comes after a Normalize with statistics of each image": lambda: A.Compose(
        [A.Normalize(normalization="image"), A.RandomCrop(4, 4)]
    ),
    "pads with a constant after the conversion": lambda: A.Compose([A.ToFloat(), A.Pad(1)]),
    "gets samples that ToFloat did not make": lambda: A.FromFloat(),
    "has bbox_params or keypoint_params": lambda: A.Compose(
        [A.NoOp()], bbox_params=A.BboxParams("yolo", label_fields=[])
    ),
    "needs uint8 arrays": lambda: A.Compose([ToTensorV2(), A.NoOp()]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_says_why(reason: str) -> None:
    """A transform with unsupported arguments runs per sample, and the plan gives the reason."""
    assert reason in refusal_of(REFUSED[reason]())


def test_a_transform_alone_has_a_plan() -> None:
    """For arrays (H, W, 3), because albumentations needs the number of channels."""
    assert plan_transform(A.Compose([A.RandomCrop(8, 8), A.Normalize(), ToTensorV2()])).is_batched


def test_a_later_version_is_served_while_its_attributes_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transform of a later version runs in batches; with another attribute, it runs per sample and is named."""
    monkeypatch.setattr(A, "__version__", "2.0.9")
    flips = A.Compose([A.OneOf([A.HorizontalFlip(), A.VerticalFlip()]), A.D4(), A.Normalize()])
    assert refusal_of(flips) == ""
    flips[1].mode = "new"
    text = "is from albumentations 2.0.9, where its attributes differ from those in 2.0.8: mode"
    assert text in refusal_of(flips)
    monkeypatch.setattr(A, "__version__", "1.4.24")
    assert "is from albumentations 1.4.24, but batch ops need 2.0.8 or later" in refusal_of(flips)


def test_a_method_of_the_users_own_is_called() -> None:
    """A transform with a replaced method runs per sample."""
    flip = A.HorizontalFlip(p=1)
    flip.apply = lambda image, **_: image
    assert "has a method apply of its own" in refusal_of(flip)


@pytest.mark.parametrize("is_pil", [True, False])
def test_batches_are_what_default_collate_makes_of_its_results(is_pil: bool) -> None:
    """Arrays (H, W, C) become tensors (B, H, W, C), and those of ToTensorV2 (B, C, H, W)."""
    arrays = images((9, 12), (9, 12))
    items = [(Image.fromarray(array) if is_pil else array, i) for i, array in enumerate(arrays)]
    steps = [A.CenterCrop(8, 7), A.HorizontalFlip(p=1), A.Normalize()]
    for tail in ([], [ToTensorV2()]):
        transform = A.Compose([*steps, *tail])
        wanted = [torch.as_tensor(transform(image=array)["image"]) for array in arrays]
        with CachedDataset(items, transform=transform) as dataset:
            assert "CenterCrop" in str(dataset.plan.prepare)
            assert dataset.plan.is_batched
            [[batch, labels]] = DataLoader(dataset, batch_size=4)
            assert batch.is_contiguous()
            assert torch.equal(batch, torch.stack(wanted))
            assert labels.tolist() == [0, 1, 2, 3]
            assert torch.equal(torch.as_tensor(dataset[2][0]), wanted[2])
            assert type(dataset[2][0]) is (torch.Tensor if tail else np.ndarray)


def test_arrays_without_a_transform_come_as_they_are() -> None:
    """Arrays without a transform are returned as they were given, although they are stored in planes."""
    for channels in (3, 1):
        arrays = images((9, 12), (9, 12), channels=channels)
        with CachedDataset([(array, 0) for array in arrays]) as dataset:
            [[batch, _]] = DataLoader(dataset, batch_size=4)
            assert np.array_equal(batch.numpy(), np.stack(arrays))
            assert np.array_equal(dataset[3][0], arrays[3])
            assert dataset[3][0].flags.c_contiguous


@pytest.mark.parametrize("is_pil", [True, False])
@pytest.mark.parametrize("is_tensor", [True, False])
def test_masks_are_moved_with_their_images(is_pil: bool, is_tensor: bool) -> None:
    """Masks are moved by the draws of their images; transforms of values do not change them."""
    arrays = images((16, 20))[:1] * 12
    masks = [array[..., 0].copy() for array in arrays]
    items: list[Any] = list(zip(arrays, masks, strict=True))
    if is_pil:
        items = [(Image.fromarray(image), Image.fromarray(mask)) for image, mask in items]
    tail = [A.Normalize((0, 0, 0), (1, 1, 1), 1.0), *([ToTensorV2()] if is_tensor else [])]
    some = A.OneOf([A.HorizontalFlip(), A.VerticalFlip(), A.NoOp()], p=0.7)
    steps = [A.PadIfNeeded(18, 18, fill=9.0, fill_mask=9.0), A.RandomCrop(12, 12), some, A.D4()]
    with CachedDataset(items, transforms=A.Compose([*steps, *tail])) as dataset:
        assert dataset.plan.is_batched, dataset.plan.obstacle
        [[batch, moved]] = DataLoader(dataset, batch_size=12)
        first = batch[:, 0] if is_tensor else batch[..., 0]
        assert moved.dtype == torch.uint8
        assert torch.equal(first, moved.float())
        assert len({mask.numpy().tobytes() for mask in moved}) > 5
        image, mask = dataset[5]
        assert np.array_equal(np.asarray(mask), np.asarray(image)[0 if is_tensor else (..., 0)])
        assert type(mask) is type(image) is (torch.Tensor if is_tensor else np.ndarray)


def test_boxes_go_through_albumentations_own_code() -> None:
    """A target that is a dict is passed to albumentations by name, and its results are the new target."""
    arrays = images((10, 10))
    items = [(array, {"bboxes": np.array([[1.0, 2, 4, 6]]), "labels": [3]}) for array in arrays]
    boxes = A.BboxParams("pascal_voc", label_fields=["labels"])
    transforms = A.Compose([A.HorizontalFlip(p=1)], bbox_params=boxes)
    with CachedDataset(items, transforms=transforms) as dataset:
        image, target = dataset[1]
        assert np.array_equal(image, arrays[1][:, ::-1])
        assert np.allclose(target["bboxes"], [[6, 2, 9, 6]])
        assert target["labels"] == [3]


FLIP = A.Compose([A.HorizontalFlip(p=1), A.Normalize()])
CROP = A.RandomCrop(6, 6)


class Called:
    """A transform in an object of the user's own."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Any:
        return self.transform(image=np.array(image))["image"]


def flip_both(image: Any, mask: Any) -> Any:
    made = FLIP(image=np.array(image), mask=np.array(mask))
    return made["image"], made["mask"]


def flip_apart(image: Any, mask: Any) -> Any:
    return CROP(image=image)["image"], CROP(image=mask)["image"]


def flip_twice(image: Any, mask: Any) -> Any:
    first = CROP(image=np.asarray(image), mask=np.asarray(mask))
    made = CROP(image=np.asarray(image), mask=np.asarray(mask))
    return first["image"], made["mask"]


TENSORS = A.Compose([A.HorizontalFlip(p=1), ToTensorV2()])


def flip_to_labels(image: Any, mask: Any) -> Any:
    made = TENSORS(image=np.array(image), mask=np.array(mask))
    return made["image"], made["mask"].long()


SEEN = {
    "function": lambda image: FLIP(image=np.asarray(image))["image"],
    "object": Called(FLIP),
    "without np.array": lambda image: FLIP(image=image)["image"],
}


@pytest.mark.parametrize("case", SEEN)
def test_callables_that_only_call_it_are_seen_through(case: str) -> None:
    """Callables that only call albumentations, in the forms that people write, run in whole batches."""
    arrays = images((6, 8))
    items = [(array, 0) for array in arrays]
    if case != "without np.array":
        items = [(Image.fromarray(array), 0) for array in arrays]
    with CachedDataset(items, transform=SEEN[case]) as dataset:
        assert dataset.plan.is_batched, dataset.plan
        [[batch, _]] = DataLoader(dataset, batch_size=2)
        assert np.array_equal(batch[1], FLIP(image=arrays[1])["image"])


def test_callables_of_image_and_mask_are_seen_through() -> None:
    """A callable must pass image and mask in one call; in separate calls, or two calls, the draws would differ."""
    arrays = images((6, 8))
    items = [(array, array[..., 0].copy()) for array in arrays]
    with CachedDataset(items, transforms=flip_both) as dataset:
        assert dataset.plan.is_batched, dataset.plan
        [[batch, masks]] = DataLoader(dataset, batch_size=2)
        assert np.array_equal(batch[1], FLIP(image=arrays[1])["image"])
        assert np.array_equal(masks[1], arrays[1][:, ::-1, 0])
    with CachedDataset(items, transforms=flip_to_labels) as dataset:
        assert dataset.plan.is_batched, dataset.plan
        [[_, masks]] = DataLoader(dataset, batch_size=2)
        assert masks.dtype == torch.int64
        assert np.array_equal(masks[0], arrays[0][:, ::-1, 0])
        assert torch.equal(dataset[0][1], masks[0])
    for apart in (flip_apart, flip_twice):
        with CachedDataset(items, transforms=apart) as dataset:
            assert not dataset.plan.is_batched
            assert dataset[0][0].shape == (6, 6, 3)


def test_a_step_of_pil_images_behind_np_array_is_not_seen_through() -> None:
    """A step of PIL images that would get an array may treat it differently, so it runs per sample."""
    plan = plan_transform(lambda image: torchvision_flip(np.array(image)))
    assert plan.per_sample


def test_images_that_become_int64_are_not_seen_through() -> None:
    """``long()`` is recognised for masks only, because images are not labels."""
    plan = plan_transform(lambda image: TENSORS(image=np.array(image))["image"].long())
    assert "<lambda>" in str(plan.per_sample)


def torchvision_flip(image: Any) -> Any:
    return image


class Brighter(A.ImageOnlyTransform):
    """A transform of the user's own; of some samples it drops a channel, if it is asked to."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__(p=1)
        self.channels = channels

    def apply(self, img: np.ndarray, **_: Any) -> np.ndarray:
        return np.maximum(img, 100)[..., : self.channels]


@pytest.mark.parametrize("channels", [3, 2])
@pytest.mark.parametrize("before", [[], [A.VerticalFlip(p=1)]], ids=["first", "later"])
def test_what_follows_an_unknown_step_is_served_on_whole_batches(
    before: list[Any], channels: int
) -> None:
    """Steps after an unknown one run on whole batches if it keeps the channels; otherwise albumentations runs them."""
    arrays = images((9, 12))
    norm = A.Normalize(0.2, 0.7)
    for tail in ([], [ToTensorV2()]):
        transform = A.Compose([*before, Brighter(channels), A.HorizontalFlip(p=1), norm, *tail])
        with CachedDataset([(array, 0) for array in arrays], transform=transform) as dataset:
            assert "after them, on whole batches:  HorizontalFlip" in str(dataset.plan)
            [[batch, _]] = DataLoader(dataset, batch_size=2)
            wanted = [torch.as_tensor(transform(image=array)["image"]) for array in arrays]
            assert torch.equal(batch, torch.stack(wanted))
            assert np.array_equal(dataset[1][0], wanted[1])


def test_a_transform_that_would_leave_the_mask_behind_is_named() -> None:
    """A transform that moves masks, given as ``transform=``, gets only images here, so a warning names it."""
    items = [(image, image[..., 0]) for image in images((9, 12), (9, 12))]
    flips = A.Compose([A.OneOf([A.HorizontalFlip(), A.VerticalFlip()]), ToTensorV2()])
    colours = A.Compose([A.RandomBrightnessContrast(), ToTensorV2()])
    with (
        CachedDataset(items, transform=flips) as dataset,
        pytest.warns(
            FastDataWarning, match=r"transform= gets the image only, so OneOf\(.*with an s"
        ),
    ):
        iter(DataLoader(dataset, workers="process"))  # as with threads
    for chosen in (
        {"transforms": flips},
        {"transform": colours},
        {"transform": flips, "target_transform": np.flip},
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with CachedDataset(items, **chosen) as dataset:
                iter(DataLoader(dataset))


def test_a_function_of_image_and_mask_that_is_not_seen_through_is_named() -> None:
    """The warning and the plan name the function, and do not ask for masks of another kind."""
    items = [(image, image[..., 0]) for image in images((9, 12), (9, 12))]
    with CachedDataset(items, transforms=flip_apart) as dataset:
        assert "is not a known batch op" in str(dataset.plan.obstacle)
        with pytest.warns(FastDataWarning, match=r"one by one.*flip_apart.* is not a known"):
            iter(DataLoader(dataset))
