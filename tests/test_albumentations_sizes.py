"""albumentations' resizes and resized crops: OpenCV's pixels, and albumentations' draws."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from albumentations_cases import (
    Served,
    albumentations,
    assert_alike,
    assert_pixels,
    images,
    parameters,
    refusal_of,
    serve,
)
from fastdata import CachedDataset, DataLoader, ImageFolder
from fastdata.pixels.opencv_filters import opencv_filter

A = albumentations
cv2 = pytest.importorskip("cv2")

NEAREST, LINEAR, CUBIC, AREA, LANCZOS, LINEAR_EXACT, NEAREST_EXACT = range(7)
FILTERS = [NEAREST, LINEAR, AREA, LANCZOS, LINEAR_EXACT]
if cv2.__version__ < "5":
    FILTERS.append(NEAREST_EXACT)
# Twice and three times as large as the results, odd, small, and narrow.
SIZES = ((32, 40), (48, 60), (37, 101), (7, 5), (150, 18), (3, 90), (1, 1))
RESULTS = ((16, 20), (48, 33), (5, 64))
CUBIC_SHARE = 1e-4
"""Largest share of pixels that may be one level off if OpenCV uses Intel's IPP: those next to half a level."""

STEADY = {
    "Resize, smaller by areas": lambda: A.Resize(30, 33, area_for_downscale="image"),
    "Resize, areas of masks": lambda: A.Resize(20, 18, area_for_downscale="image_mask"),
    "LongestMaxSize": lambda: A.LongestMaxSize(45),
    "LongestMaxSize, of one": lambda: A.LongestMaxSize([21], interpolation=AREA),
    "LongestMaxSize, both": lambda: A.LongestMaxSize(max_size_hw=(30, 25)),
    "SmallestMaxSize": lambda: A.SmallestMaxSize(17, area_for_downscale="image"),
    "SmallestMaxSize, both": lambda: A.SmallestMaxSize(max_size_hw=(20, 26)),
    "SmallestMaxSize, height": lambda: A.SmallestMaxSize(max_size_hw=(19, None)),
    "SmallestMaxSize, width": lambda: A.SmallestMaxSize(max_size_hw=(None, 23)),
    "behind a crop": lambda: A.Compose([A.CenterCrop(31, 17, pad_if_needed=True), A.Resize(9, 14)]),
    "before a crop": lambda: A.Compose([A.Resize(70, 80), A.CenterCrop(31, 17)]),
}


def assert_steady(transform: Any, arrays: list[np.ndarray]) -> None:
    for array, pixels in zip(arrays, serve(transform, arrays), strict=True):
        wanted = transform(image=array.copy())["image"]
        assert (pixels.shape, pixels.dtype) == (wanted.shape, wanted.dtype)
        assert np.array_equal(pixels, wanted), array.shape


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("interpolation", FILTERS)
def test_each_interpolation_has_the_pixels_of_opencv(interpolation: int, channels: int) -> None:
    """Pixels equal OpenCV's exactly, for images that grow or shrink, and for parts of the result."""
    arrays = images(*SIZES, channels=channels)
    for height, width in RESULTS:
        resize = A.Resize(height, width, interpolation=interpolation)
        assert_steady(resize, arrays)
        assert_steady(A.Compose([resize, A.Crop(5, 3, 12, 5)]), arrays)


@pytest.mark.parametrize("has_ipp", [True, False])
def test_cubic_pixels_are_those_of_opencv(has_ipp: bool) -> None:
    """Cubic pixels equal those of OpenCV's own code exactly; few differ by one level from those of Intel's IPP."""
    if not hasattr(cv2, "ipp") or not cv2.ipp.useIPP():
        pytest.skip("this OpenCV has no IPP")
    arrays = images(*SIZES)
    cv2.ipp.setUseIPP(has_ipp)
    opencv_filter.cache_clear()
    try:
        off = []
        for height, width in RESULTS:
            transform = A.Resize(height, width, interpolation=CUBIC)
            for array, pixels in zip(arrays, serve(transform, arrays), strict=True):
                off.append(np.abs(pixels.astype(int) - transform.apply(array)).ravel())
    finally:
        cv2.ipp.setUseIPP(True)
        opencv_filter.cache_clear()
    assert np.concatenate(off).max() <= has_ipp
    assert np.concatenate(off).mean() <= CUBIC_SHARE


@pytest.mark.parametrize("case", STEADY)
def test_resizes_have_the_pixels_of_albumentations(case: str) -> None:
    """Pixels and sizes equal albumentations' exactly, also before and after other steps."""
    assert_steady(STEADY[case](), images(*SIZES[:-2]))


CROPS = {
    "RandomResizedCrop": lambda: A.RandomResizedCrop((24, 28)),
    "RandomResizedCrop, of few": lambda: A.RandomResizedCrop(
        (24, 28), scale=(0.5, 0.9), ratio=(2.0, 3.0)
    ),
    "RandomResizedCrop, by areas": lambda: A.RandomResizedCrop(
        (24, 28), area_for_downscale="image", interpolation=NEAREST
    ),
    "RandomSizedCrop": lambda: A.RandomSizedCrop((9, 31), (20, 16)),
    "RandomSizedCrop, wide": lambda: A.RandomSizedCrop(
        (20, 50), (12, 30), w2h_ratio=1.7, area_for_downscale="image_mask"
    ),
}


def coords_of(ops: np.ndarray, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return albumentations' corners of the box that a resize takes."""
    box = {name: int(ops[0]["resize"]["box"][name]) for name in ("top", "left", "height", "width")}
    right, bottom = box["left"] + box["width"], box["top"] + box["height"]
    return {"crop_coords": (box["left"], box["top"], right, bottom)}


@pytest.mark.parametrize("case", CROPS)
def test_crops_have_the_pixels_of_albumentations(case: str) -> None:
    """Pixels equal albumentations' exactly, for the box that was drawn."""
    assert_pixels(CROPS[case](), images((40, 50)) * 12, coords_of)


def compare_crops(transform: Any, count: int) -> None:
    """Compare heights, widths and places of the boxes that are drawn."""
    array = images((40, 50))[0]
    boxes = Served(transform, array).ops(array.shape, count)[:, 0]["resize"]["box"]
    theirs = np.array([each["crop_coords"] for each in parameters(transform, array, count)])
    left, top, right, bottom = theirs.T
    height, width = bottom - top, right - left
    for name, wanted in {"left": left, "top": top, "height": height, "width": width}.items():
        assert_alike(boxes[name], wanted)
    assert_alike(boxes["width"] * boxes["height"], width * height)


def compare_borders(count: int) -> None:
    """Compare the corners of RandomCropFromBorders, and what is inside of them."""
    transform, array = A.RandomCropFromBorders(0.2, 0.4, 0.0, 0.35), images((23, 31))[0]
    boxes = Served(transform, array).ops(array.shape, count)[:, 0]["window"]["box"]
    theirs = np.array([each["crop_coords"] for each in parameters(transform, array, count)])
    rights, bottoms = boxes["left"] + boxes["width"], boxes["top"] + boxes["height"]
    for ours, wanted in zip((boxes["left"], boxes["top"], rights, bottoms), theirs.T, strict=True):
        assert_alike(ours, wanted)
    for box, pixels in zip(boxes, serve(transform, [array] * 20), strict=False):
        coords = (box["left"], box["top"], box["left"] + box["width"], box["top"] + box["height"])
        assert np.array_equal(pixels, transform.apply(array, crop_coords=coords))


def compare_sizes(count: int) -> None:
    """Compare the sizes of RandomScale and of a list of lengths."""
    array = images((40, 53))[0]
    for transform in (A.RandomScale((-0.4, 0.7), p=1), A.SmallestMaxSize([12, 31, 47])):
        sizes = Served(transform, array).ops(array.shape, count)[:, 0]["resize"]
        scales = [each["scale"] for each in parameters(transform, array, count)]
        rounded = int if isinstance(transform, A.RandomScale) else round
        assert_alike(sizes["width"], [rounded(53 * scale) for scale in scales])
        assert_alike(sizes["height"], [rounded(40 * scale) for scale in scales])


@pytest.mark.parametrize("case", CROPS)
def test_crops_are_drawn_alike(case: str) -> None:
    """Boxes have albumentations' distributions; tests/integrations/ compares more draws."""
    compare_crops(CROPS[case](), 1500)


def test_what_borders_lose_is_drawn_alike() -> None:
    """RandomCropFromBorders cuts off as much of each side as albumentations does, and its pixels are the box's."""
    compare_borders(1500)


def test_scales_and_lengths_are_drawn_alike() -> None:
    """Sizes of RandomScale, and of a list of lengths, have albumentations' distributions."""
    compare_sizes(1500)


def test_scaled_images_have_the_pixels_of_albumentations() -> None:
    """RandomScale gives albumentations' pixels; images that shrink are averaged if area_for_downscale asks for it."""
    transform = A.RandomScale(0.5, p=1, area_for_downscale="image")
    arrays = images((20, 33)) * 6
    sizes = Served(transform, arrays[0]).ops(arrays[0].shape, len(arrays))[:, 0]["resize"]
    for array, pixels, size in zip(arrays, serve(transform, arrays), sizes, strict=True):
        chosen = AREA if size["height"] < 20 else LINEAR
        shape = (int(size["width"]), int(size["height"]))
        assert np.array_equal(pixels, cv2.resize(array, shape, interpolation=chosen))


MASKED = {
    "nearest": lambda: A.RandomResizedCrop((20, 24), interpolation=NEAREST),
    "areas": lambda: A.RandomResizedCrop(
        (20, 24), interpolation=AREA, area_for_downscale="image_mask"
    ),
    "areas of images": lambda: A.RandomSizedCrop(
        (25, 32), (20, 24), mask_interpolation=AREA, area_for_downscale="image"
    ),
    "exact": lambda: A.SmallestMaxSize(
        20, interpolation=LINEAR_EXACT, mask_interpolation=LINEAR_EXACT
    ),
}


@pytest.mark.parametrize("case", MASKED)
def test_masks_have_the_box_of_their_image_and_their_own_interpolation(case: str) -> None:
    """A mask has the box of its image; if both have one interpolation, they have the same pixels."""
    arrays = images((32, 40))[:1] * 6
    items = [(array, array[..., 0].copy()) for array in arrays]
    with CachedDataset(items, transforms=A.Compose([A.NoOp(), MASKED[case]()])) as dataset:
        assert dataset.plan.is_batched, dataset.plan.obstacle
        [[batch, masks]] = DataLoader(dataset, batch_size=6)
        assert np.array_equal(batch[..., 0], masks)


def test_masks_are_not_mixed_by_default() -> None:
    """By default, masks are resized by the nearest pixel, so that their classes are not mixed."""
    items = [(array, array[..., 0] // 128 * 255) for array in images((32, 40))]
    with CachedDataset(items, transforms=A.Compose([A.RandomResizedCrop((50, 60))])) as dataset:
        [[batch, masks]] = DataLoader(dataset, batch_size=2)
        assert set(masks.unique().tolist()) == {0, 255}
        assert len(batch.unique()) > 200


@pytest.mark.parametrize("interpolation", [NEAREST, LINEAR, CUBIC, AREA, LANCZOS])
def test_of_files_only_what_is_cropped_is_decoded(interpolation: int, tmp_path: Path) -> None:
    """Samples of files of which only the crop is decoded equal those of whole images."""
    for number, array in enumerate(images((90, 130), (140, 80))):
        (tmp_path / str(number)).mkdir()
        Image.fromarray(array).save(tmp_path / str(number) / "0.jpg")
    crop = A.RandomResizedCrop((50, 60), scale=(0.2, 0.9), interpolation=interpolation)
    found = []
    for storage in ("none", "shared"):
        transform = A.Compose([crop, A.RandomCrop(20, 30)])
        with ImageFolder(tmp_path, transform=transform, storage=storage, seed=5) as dataset:
            assert dataset.plan.is_batched, dataset.plan.obstacle
            [[batch, _]] = DataLoader(dataset, batch_size=4)
            found.append(batch)
    assert torch.equal(*found)


REFUSED = {
    "comes after the conversion to floats": lambda: A.Compose([A.ToFloat(), A.Resize(4, 4)]),
    "may draw crops without pixels": lambda: A.RandomSizedCrop((1, 9), (8, 8), w2h_ratio=0.4),
}


def test_nearest_exact_rounds_ties_as_the_installed_opencv_does() -> None:
    """A step that the core would round differently runs as written."""
    array = np.arange(108, dtype=np.uint8).reshape(6, 6, 3)
    transform = A.Compose([A.RandomScale((0.5, 0.5), p=1, interpolation=NEAREST_EXACT)])
    with CachedDataset([(array, 0)], transform=transform) as dataset:
        assert np.array_equal(dataset[0][0], transform(image=array)["image"])


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_says_why(reason: str) -> None:
    """A transform with unsupported arguments runs per sample, and the plan gives the reason."""
    assert reason in refusal_of(REFUSED[reason]())


@pytest.fixture
def fresh_filters() -> Iterator[None]:
    """Forget the filters that were found, before and after a test."""
    opencv_filter.cache_clear()
    yield
    opencv_filter.cache_clear()


def test_an_opencv_with_other_pixels_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, fresh_filters: None
) -> None:
    """If no filter of the core has OpenCV's pixels for an interpolation, resizes by that one run per sample."""
    resize = cv2.resize

    def other(image: np.ndarray, dsize: Any, **options: Any) -> np.ndarray:
        return resize(image, dsize, **options) ^ (options["interpolation"] == LINEAR)

    monkeypatch.setattr(cv2, "resize", other)
    assert "differs in this build of OpenCV" in refusal_of(A.Resize(9, 9))
    assert refusal_of(A.Resize(9, 9, interpolation=NEAREST)) == ""
