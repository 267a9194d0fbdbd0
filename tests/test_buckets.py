"""Images of several shapes: buckets, and batches of one size each."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1
from torchvision.transforms import functional, v2

from data import level_samples, photo
from fastdata import CachedDataset, CudaPrefetcher, DataLoader, FastDataWarning, ImageFolder
from fastdata.errors import MixedSizesError
from fastdata.loaders.buckets import BucketSampler, ResizeToBucket, find_buckets

SIZES = [(24, 24), (20, 28), (28, 20), (16, 36)]
COUNT = 30
PHOTOS = [
    photo(size=(int(width), int(height)), seed=seed)
    for seed, (width, height) in enumerate(np.random.default_rng(0).integers(15, 70, (COUNT, 2)))
]
SHAPES = [(height % 3, 7) for height in range(1, 24)]
FORMS = {"PIL": PHOTOS, "tensors": [functional.pil_to_tensor(image) for image in PHOTOS]}


def cached(images: Any = PHOTOS, *steps: Any, **options: Any) -> CachedDataset:
    pairs = [(image, number) for number, image in enumerate(images)]
    return CachedDataset(pairs, transform=v1.Compose(steps), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for number, image in enumerate(PHOTOS):
        (root / "ab"[number % 2]).mkdir(exist_ok=True)
        image.save(root / "ab"[number % 2] / f"{number}.jpg")
    return root


def kept_share(size: tuple[int, int], bucket: tuple[int, int]) -> float:
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    return bucket[0] * bucket[1] / (size[0] * size[1] * scale**2)


def covered(image: Any) -> tuple[Any, tuple[int, int]]:
    """Resize an image by torchvision to cover its bucket; return it as a tensor, and the bucket."""
    size = functional.get_dimensions(image)[1:]
    h, w = bucket = max(SIZES, key=lambda bucket: kept_share(size, bucket))
    scale = max(h / size[0], w / size[1])
    sides = [max(h, int(size[0] * scale + 0.5)), max(w, int(size[1] * scale + 0.5))]
    big = functional.resize(image, sides, antialias=True)
    return (big if isinstance(big, torch.Tensor) else functional.pil_to_tensor(big)), bucket


def is_part_of(part: torch.Tensor, whole: torch.Tensor) -> bool:
    h, w = part.shape[1:]
    windows = whole.unfold(1, h, 1).unfold(2, w, 1)  # (C, tops, lefts, h, w)
    return bool((windows == part[:, None, None]).all(dim=(0, 3, 4)).any())


# Pixels


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("before", [[], [v1.RandomHorizontalFlip(0)]], ids=["prepared", "read"])
def test_pixels_are_those_of_torchvisions_resize_and_crop(form: str, before: list[Any]) -> None:
    """In a dataset and as a plain callable, each image gets the bucket that keeps most of it."""
    last = [v1.PILToTensor()] if form == "PIL" else []
    to_bucket = ResizeToBucket(SIZES)
    dataset = cached(FORMS[form], *before, to_bucket, *last)
    assert not dataset.plan.per_sample
    assert len(dataset.plan.prepare) == 2 * (not before)
    for number, image in enumerate(FORMS[form]):
        big, bucket = covered(image)
        expected = functional.center_crop(big, list(bucket))
        found = dataset[number][0].int()
        # The core sums floats in another order, as for torchvision's Resize of tensors.
        assert (found - expected.int()).abs().max() <= (form == "tensors" and bool(before)), number
        assert torch.equal(v1.Compose([to_bucket, *last])(image), expected), number


def test_random_crops_are_parts_of_the_resized_image() -> None:
    """Each possible place of the crop is equally likely, and an image is resized once."""
    steps = ResizeToBucket(SIZES, crop="random"), v1.PILToTensor()
    dataset = cached(PHOTOS, *steps)
    assert len(dataset.plan.prepare) == 1
    for number, image in enumerate(PHOTOS):
        big, bucket = covered(image)
        for drawn in (dataset[number][0], v1.Compose(steps)(image)):
            assert drawn.shape[1:] == bucket
            assert is_part_of(drawn, big)
    row = torch.arange(9, dtype=torch.uint8).expand(1, 4, 9)
    with cached([row] * 300, ResizeToBucket([(4, 4)], crop="random"), seed=0) as rows:
        lefts = Counter(image[0, 0, 0].item() for image, _ in map(rows.__getitem__, range(300)))
    assert sorted(lefts) == [0, 1, 2, 3, 4, 5]
    assert min(lefts.values()) > 25


def test_bicubic_images_are_torchvisions() -> None:
    """``interpolation=`` has the same effect as in torchvision's Resize."""
    [image] = PHOTOS[:1]
    dataset = cached([image], ResizeToBucket([(20, 20)], interpolation="bicubic"), v2.PILToTensor())
    side = 20 * max(image.size) / min(image.size)
    sides = [20, int(side + 0.5)] if image.width > image.height else [int(side + 0.5), 20]
    big = functional.resize(image, sides, v1.InterpolationMode.BICUBIC)
    assert torch.equal(
        dataset[0][0], functional.pil_to_tensor(functional.center_crop(big, [20, 20]))
    )


# Batches


@pytest.mark.parametrize("crop", ["center", "random"])
def test_each_batch_has_one_size_however_it_is_read(folder: Path, crop: Any) -> None:
    """All storages, engines and numbers of workers give the same whole batches."""
    steps = [ResizeToBucket(SIZES, crop), v1.RandomHorizontalFlip(), v1.ToTensor()]
    ways = [
        ("shared", {}),
        ("shared", {"num_workers": 2}),
        ("shared", {"num_workers": 1, "workers": "process"}),
        ("shared", {"collate_fn": lambda samples: torch.utils.data.default_collate(samples)}),
        ("compressed", {"num_workers": 1}),
        ("none", {"num_workers": 2}),
    ]
    expected: list[Any] = []
    for storage, how in ways:
        codec = {"codec": "lz4"} if storage == "compressed" else {}
        dataset = ImageFolder(folder, v1.Compose(steps), storage=storage, seed=1, **codec)
        loader = DataLoader(dataset, batch_sampler=BucketSampler(dataset, 4), **how)
        batches = [(images, labels.tolist()) for images, labels in loader]
        assert "worker process" in loader.report().path or "whole" in loader.report().path
        assert {tuple(images.shape[2:]) for images, _ in batches} == set(SIZES)
        expected = expected or batches
        for (images, labels), (same, same_labels) in zip(batches, expected, strict=True):
            assert torch.equal(images, same)
            assert labels == same_labels
        dataset.close()
    assert sum(len(images) for images, _ in expected) == COUNT


def test_prefetchers_and_torchs_loader_take_bucketed_batches(folder: Path) -> None:
    """A prefetcher without a GPU returns them unchanged, and torch's loader stacks them."""
    dataset = ImageFolder(folder, v1.Compose([ResizeToBucket(SIZES), v1.ToTensor()]))
    sampler = BucketSampler(dataset, 5)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    ours = [tuple(images.shape) for images, _ in CudaPrefetcher(loader)]
    theirs = [tuple(images.shape) for images, _ in TorchLoader(dataset, batch_sampler=sampler)]
    assert Counter(shape[2:] for shape in ours) == Counter(shape[2:] for shape in theirs)
    assert sum(shape[0] for shape in theirs) == COUNT


def test_subsets_and_joined_datasets_are_read_whole() -> None:
    """A batch over a ConcatDataset may mix its datasets; a Subset gives only its own samples."""
    steps = ResizeToBucket(SIZES), v1.PILToTensor()
    both = ConcatDataset([cached(PHOTOS[:9], *steps), cached(PHOTOS[9:], *steps)])
    half = Subset(both, range(5, 25))
    loader = DataLoader(half, batch_sampler=BucketSampler(half, 3))
    found = [(images, number) for images, number in loader]
    assert "whole batches" in loader.report().path
    assert sum(len(images) for images, _ in found) == len(half)
    # Labels number the samples of each dataset.
    numbers = sorted(number for _, labels in found for number in labels.tolist())
    assert numbers == sorted([*range(5, 9), *range(16)])


# The sampler


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"weights": [1, 0, 2] * 7 + [1, 4]}])
def test_ranks_divide_the_batches(world_size: int, options: dict[str, Any]) -> None:
    """All ranks get equally many batches of one shape each; together they are the batches of one rank."""
    alone = BucketSampler(SHAPES, 4, world_size=1, rank=0, **options)
    ranks = [
        BucketSampler(SHAPES, 4, world_size=world_size, rank=rank, **options)
        for rank in range(world_size)
    ]
    for _ in range(2):
        expected = list(alone)
        shares = [list(sampler) for sampler in ranks]
        assert {len(share) for share in shares} == {len(ranks[0])}
        together = [batch for step in zip(*shares, strict=True) for batch in step]
        assert together[: len(expected)] == expected
        assert together[len(expected) :] == expected[: len(together) - len(expected)]
        assert all(len({SHAPES[index] for index in batch}) == 1 for batch in expected)
        seen = Counter(itertools.chain(*expected))
        if not options:
            assert seen == Counter(range(len(SHAPES)))
        else:
            assert {len(batch) for batch in expected} == {4}
            assert not options.get("weights") or 1 not in seen


def test_weights_are_shares_of_an_epoch() -> None:
    """Each sample comes as often as its weight says, whatever its bucket."""
    weights = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 0.5])
    shapes = [(1, 2), (2, 1), (1, 2), (2, 1), (3, 3), (1, 2)]
    sampler = BucketSampler(shapes, 4, weights=weights, num_samples=40_000)
    counts = np.bincount(np.concatenate(list(sampler)), minlength=6)
    assert counts[0] == 0
    assert np.abs(counts / counts.sum() - weights / weights.sum()).max() < 0.015


def test_epochs_differ_and_resume_on_other_ranks() -> None:
    """A state of two ranks can be resumed on one; another batch size is refused."""
    steps = ResizeToBucket(SIZES, crop="random"), v1.PILToTensor()
    dataset = cached(PHOTOS, *steps, seed=0)
    loaders = [
        DataLoader(dataset, batch_sampler=BucketSampler(dataset, 4, rank=rank, world_size=2))
        for rank in (0, 1)
    ]
    whole = [list(loader) for loader in loaders]
    again = [iter(loader) for loader in loaders]
    second = [[next(iterator) for _ in range(2)] for iterator in again]
    state = json.loads(json.dumps(loaders[0].state_dict()))
    rest = [list(iterator) for iterator in again]
    alone = DataLoader(dataset, batch_sampler=BucketSampler(dataset, 4, rank=0, world_size=1))
    alone.load_state_dict(state)
    resumed = list(alone)
    expected = [batch for step in zip(*rest, strict=True) for batch in step]
    assert [labels.tolist() for _, labels in resumed] == [
        labels.tolist() for _, labels in expected
    ][: len(resumed)]
    assert torch.equal(resumed[0][0], expected[0][0])
    assert [labels.tolist() for _, labels in second[0]] != [
        labels.tolist() for _, labels in whole[0][:2]
    ]
    other = DataLoader(dataset, batch_sampler=BucketSampler(dataset, 3, rank=0, world_size=1))
    with pytest.raises(ValueError, match=r"comes from another loader: .*'batch_size': 3"):
        other.load_state_dict(state)


def test_without_shuffling_batches_follow_the_dataset() -> None:
    """Samples of one shape stay in order, and batches are sorted by their first samples."""
    shapes = [(1, 1), (2, 2), (1, 1), (1, 1), (2, 2), (3, 3)]
    sampler = BucketSampler(np.array(shapes), 2, shuffle=False)
    assert list(sampler) == [[0, 2], [1, 4], [3], [5]] == list(sampler)


# Finding buckets


def test_buckets_are_found_by_ratio(folder: Path) -> None:
    """Two groups of aspect ratios give two buckets, from file headers and from stored images alike."""
    shapes = [(3, 40, 60)] * 5 + [(3, 41, 60), (3, 60, 30), (3, 61, 30)]
    images = [(torch.zeros(shape, dtype=torch.uint8), 0) for shape in shapes]
    assert find_buckets(CachedDataset(images), 2, 4096, multiple_of=1) == [(91, 45), (52, 78)]
    waiting = ImageFolder(folder)
    found = find_buckets(waiting, 4, 24 * 24, multiple_of=4)
    assert waiting.filled_share() == 0
    assert found == find_buckets(waiting.prepare(), 4, 24 * 24, multiple_of=4)
    assert len(found) == 4
    assert all(height % 4 == width % 4 == 0 for height, width in found)


# Errors


class Unknown(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 4 + index, 5), index


def test_wrong_arguments_are_refused() -> None:
    """Invalid buckets, datasets without known shapes, and sizes that are drawn at random are errors."""
    for wrong, text in (
        ([], "there are no buckets"),
        ([(8, 0)], r"\(8, 0\) is not the size of a bucket"),
        ([8], "8 is not the size of a bucket"),
    ):
        with pytest.raises(ValueError, match=text):
            ResizeToBucket(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neither 'center' nor 'random'"):
        ResizeToBucket(SIZES, crop="middle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sizes of the samples of a Unknown are not known"):
        BucketSampler(Unknown(), 4)
    with pytest.raises(TypeError, match="PIL images or tensors"):
        ResizeToBucket(SIZES)(np.zeros((9, 9, 3)))
    with pytest.raises(ValueError, match="not known before they are read"):
        BucketSampler(CachedDataset(Unknown(), storage="none"), 4)
    with pytest.raises(ValueError, match="after the transform is drawn at random"):
        BucketSampler(cached(PHOTOS, v2.RandomResize(10, 20), v2.PILToTensor()), 4)
    with pytest.raises(ValueError, match="2 weights for 23 samples"):
        BucketSampler(SHAPES, 4, weights=[1, 2])
    with pytest.raises(ValueError, match="batch_size=0"):
        BucketSampler(SHAPES, 0)
    with pytest.raises(ValueError, match="count=0"):
        find_buckets(cached(PHOTOS), 0, 100)
    with pytest.warns(FastDataWarning, match="Begin the transform with ResizeToBucket"):
        BucketSampler([(side, 1) for side in range(60)], 8)


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_a_batch_of_several_sizes_names_two_samples(folder: Path, storage: Any) -> None:
    """The error has two files, their sizes and the cure; the user's own collate_fn gets such samples."""
    dataset = ImageFolder(folder, v1.ToTensor(), storage=storage)
    first, other = (dataset[index][0].shape for index in (0, 1))
    with pytest.raises(
        MixedSizesError, match=r"sample 0 \(.*0\.jpg\) is .* and sample 1 \("
    ) as raised:
        next(iter(DataLoader(dataset, batch_size=4)))
    for text in (str(tuple(first)), str(tuple(other)), "BucketSampler", "RandomResizedCrop"):
        assert text in str(raised.value)
    pads = DataLoader(dataset, batch_size=4, collate_fn=lambda samples: samples, num_workers=0)
    images = [image for image, _ in itertools.chain(*pads)]
    assert all(torch.equal(image, dataset[index][0]) for index, image in enumerate(images))
    assert len(images) == COUNT


@pytest.mark.parametrize("form", ["tensor", "array"])
@pytest.mark.parametrize("storage", ["shared", "none"])
def test_masks_of_several_sizes_are_named_like_images(storage: Any, form: str) -> None:
    """If masks differ in shape, the error names two samples with their shapes, and the cure."""
    masks = [torch.zeros(height, 6, dtype=torch.uint8) for height in (5, 7)]
    targets = masks if form == "tensor" else [mask.numpy() for mask in masks]
    pairs = [(torch.zeros(3, 6, 6, dtype=torch.uint8), target) for target in targets]
    shapes = r"sample 0 of the batch is \(5, 6\) and sample 1 is \(7, 6\)\. Give all images"
    with (
        CachedDataset(pairs, storage=storage) as dataset,
        pytest.raises(MixedSizesError, match=shapes),
    ):
        list(DataLoader(dataset, batch_size=2))


def test_boxes_are_not_taken_for_images_of_several_modes() -> None:
    """One box and three boxes, (1, 4) and (3, 4), differ in their number, not in their channels."""
    pairs = [(torch.zeros(3, 6, 6, dtype=torch.uint8), np.zeros((n, 4))) for n in (1, 3)]
    with (
        CachedDataset(pairs) as dataset,
        pytest.raises(MixedSizesError, match=r"\(3, 4\)\. Give all images \(and masks\)"),
    ):
        list(DataLoader(dataset, batch_size=2))


def test_images_of_several_modes_get_their_own_cure() -> None:
    """If a batch has grey and RGB images, the error advises to convert them, not to resize them."""
    pairs = [(photo(mode, (6, 5)), 0) for mode in ("RGB", "L")]
    with (
        CachedDataset(pairs, transform=v1.ToTensor()) as dataset,
        pytest.raises(
            MixedSizesError, match=r"\(1, 5, 6\)\. Give all images the same number of ch"
        ),
    ):
        list(DataLoader(dataset, batch_size=2))


def test_samples_of_any_dataset_are_named_by_their_place() -> None:
    """Errors name samples of other datasets by their place in the batch, in processes too; other errors are torch's."""
    for workers in (0, 1):
        with pytest.raises(MixedSizesError, match=r"sample 0 of the batch is \(3, 4, 5\) and samp"):
            list(DataLoader(Unknown(), batch_size=2, num_workers=workers))
    with pytest.raises(RuntimeError, match="each element in list of batch"):
        list(DataLoader([[1, 2], [3]], batch_size=2))  # type: ignore[arg-type]
    assert len(list(DataLoader(level_samples(4, (2, 2)), batch_size=2))) == 2  # type: ignore[arg-type]
