"""A user's own dataset, wrapped in one line: its transform, its attributes and its items."""

from __future__ import annotations

import functools
import random
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torch.utils.data import DataLoader as TorchLoader

from conftest import FolderMaker
from fastdata import (
    CachedDataset,
    CudaPrefetcher,
    DataLoader,
    FastDataWarning,
    ImageFolder,
    plan_transform,
)
from fastdata.loaders import fallbacks

torchvision = pytest.importorskip("torchvision")
T = torchvision.transforms

LAST = [T.ToTensor(), T.Normalize((0.5,) * 3, (0.25,) * 3)]
RANDOM = T.Compose([T.RandomCrop(16, 4), T.RandomHorizontalFlip(), *LAST])
KNOWN = T.Compose([T.CenterCrop(12), *LAST])


class Pictures(torchvision.datasets.VisionDataset):  # type: ignore[misc, name-defined]
    """Images in memory, read as by torchvision's CIFAR10."""

    def __init__(self, count: int = 20, **transforms: Any) -> None:
        super().__init__(".", **transforms)
        self.data = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), np.uint8)
        self.targets = [index % 3 for index in range(count)]
        self.classes = ["a", "b", "c"]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image, target = Image.fromarray(self.data[index]), self.targets[index]
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


class Joint(Pictures):
    """The same images, read as by torchvision's VOC datasets."""

    def __getitem__(self, index: int) -> Any:
        image, target = Image.fromarray(self.data[index]), self.targets[index]
        return (image, target) if self.transforms is None else self.transforms(image, target)


class Scaled(Pictures):
    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image * 2, target


class TwoCalls(Pictures):
    def __getitem__(self, index: int) -> Any:
        self.transform(Image.fromarray(self.data[index]))
        return super().__getitem__(index)


class Named(Dataset[Any]):
    """Dicts, with a transform that this dataset calls itself."""

    def __init__(self, transform: Any = None) -> None:
        self.inside = Pictures()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: int) -> Any:
        image, label = self.inside[index]
        return {"label": label, "image": self.transform(image) if self.transform else image}


@pytest.mark.parametrize("kind", [Pictures, Joint], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("transform", [RANDOM, KNOWN], ids=["random", "known"])
def test_the_transform_of_a_dataset_runs_on_whole_batches(kind: Any, transform: Any) -> None:
    inner = kind(transform=transform, target_transform=lambda target: target + 10)
    with (
        CachedDataset(inner, seed=1) as dataset,
        CachedDataset(kind(), transform=transform, seed=1) as by_hand,
    ):
        assert dataset.plan.is_batched
        dataset.set_epoch(0)
        by_hand.set_epoch(0)
        assert dataset.transform is transform
        assert inner.transform is transform  # the user's own object is not changed
        for ours, theirs in zip(dataset, by_hand, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert ours[1] == theirs[1] + 10


@pytest.mark.parametrize("kind", [Pictures, Joint], ids=lambda kind: kind.__name__)
def test_a_transform_that_was_replaced_has_the_effect_that_it_has_in_the_dataset(kind: Any) -> None:
    """A dataset that calls ``transforms``, where torchvision keeps the first transform, goes on to use it."""
    inner = kind(transform=KNOWN)
    inner.transform = T.Compose([T.CenterCrop(10), *LAST])
    with CachedDataset(inner) as dataset:
        assert dataset[3][0].shape == inner[3][0].shape


def test_the_transform_of_a_dataset_in_a_subset_runs_on_whole_batches() -> None:
    part, _ = random_split(Pictures(transform=RANDOM), [5, 15])
    with CachedDataset(part) as dataset:
        assert dataset.plan.is_batched
        assert len({dataset[0][0].sum().item() for _ in range(8)}) > 1  # it is drawn again


class Odd:
    """An object like Cython's functions, whose type has no name of a module."""

    __module__ = property(lambda self: "odd")  # type: ignore[assignment]

    def __call__(self, image: Any) -> Any:
        return image


def test_the_transform_of_a_dataset_with_functions_of_cython_runs_on_whole_batches() -> None:
    """A table of pandas holds such functions; the transform is taken over in spite of that."""
    inner = Pictures(transform=T.Compose([Odd(), RANDOM]))
    inner.table = Odd()
    with CachedDataset(inner) as dataset:
        assert dataset.transform is inner.transform
        assert len(dataset.plan.unknown) == 1


def test_the_transform_of_items_that_are_dicts_runs_on_whole_batches() -> None:
    with CachedDataset(Named(RANDOM)) as dataset:
        batch = next(iter(DataLoader(dataset, batch_size=4)))
        assert dataset.plan.is_batched
        assert batch["image"].shape == (4, 3, 16, 16)


@pytest.mark.parametrize("kind", [Scaled, TwoCalls], ids=lambda kind: kind.__name__)
def test_a_dataset_that_does_more_keeps_its_transform(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomCrop\(.*random, but each sample is stored"):
        CachedDataset(kind(transform=RANDOM))
    with CachedDataset(kind(transform=KNOWN)) as dataset:
        assert dataset.transform is None
        assert torch.equal(dataset[2][0], kind(transform=KNOWN)[2][0])


def test_an_unknown_transform_runs_once_unless_it_draws() -> None:
    calls = []

    def brighten(image: Any) -> Any:
        calls.append(1)
        return image.point(lambda value: min(value + 1, 255))

    with CachedDataset(Pictures(transform=T.Compose([brighten, *LAST]))) as dataset:
        assert dataset.transform is None
        calls.clear()
        dataset[0]
        assert not calls

    def draw(image: Any) -> Any:
        return image.rotate(random.randrange(360))

    state = random.getstate()
    with CachedDataset(Pictures(transform=T.Compose([draw, *LAST]))) as dataset:
        assert random.getstate() == state
        assert dataset.transform is not None
        assert len({dataset[0][0].sum().item() for _ in range(8)}) > 1


class Kaggle(Dataset[Any]):
    """Arrays, read as in notebooks with albumentations."""

    def __init__(self, transform: Any, *, has_masks: bool = False) -> None:
        self.transform, self.has_masks = transform, has_masks

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        image = np.random.default_rng(index).integers(0, 256, (16, 16, 3), np.uint8)
        if self.has_masks:
            both = self.transform(image=image, mask=image[:, :, 0])
            return both["image"], both["mask"]
        return self.transform(image=image)["image"], index


def test_albumentations_in_a_dataset_run_on_whole_batches() -> None:
    albumentations = pytest.importorskip("albumentations")
    pytorch = pytest.importorskip("albumentations.pytorch")
    steps = [albumentations.HorizontalFlip(p=0.5), albumentations.Normalize(), pytorch.ToTensorV2()]
    with CachedDataset(Kaggle(albumentations.Compose(steps))) as dataset:
        assert dataset.plan.is_batched
        images, labels = next(iter(DataLoader(dataset, batch_size=4)))
        assert images.shape == (4, 3, 16, 16)
        assert labels.tolist() == [0, 1, 2, 3]
    with CachedDataset(Kaggle(albumentations.Compose(steps), has_masks=True)) as dataset:
        images, masks = next(iter(DataLoader(dataset, batch_size=4)))
        assert images.shape == (4, 3, 16, 16)
        assert masks.shape == (4, 16, 16)


class LabelFirst(Pictures):
    """Items (label, image), as in pytorch-cifar100; the images have several modes."""

    modes = ("RGB", "L", "P", "CMYK", "RGBA")

    def __getitem__(self, index: int) -> Any:
        image, target = Image.fromarray(self.data[index]), self.targets[index]
        image = image.convert(self.modes[index % len(self.modes)])
        return target, self.transform(image)


def test_the_image_of_an_item_may_be_its_second_value() -> None:
    with CachedDataset(LabelFirst(transform=T.Compose([to_rgb, *RANDOM.transforms]))) as dataset:
        assert dataset.plan.is_batched
        assert dataset[4][0] == 1
        labels, images = next(iter(DataLoader(dataset, batch_size=20)))
        assert labels.tolist() == [index % 3 for index in range(20)]
        assert images.shape == (20, 3, 16, 16)


def test_images_become_rgb_before_a_random_crop() -> None:
    """A batch needs one number of channels, and not all modes can be stored."""
    steps = [T.RandomCrop(12), T.RandomHorizontalFlip(), to_rgb, T.ToTensor()]
    with CachedDataset(LabelFirst(transform=T.Compose(steps))) as dataset:
        assert dataset.plan.is_batched
        _, images = next(iter(DataLoader(dataset, batch_size=20)))
    gray = images[1::5]  # of mode L
    assert torch.equal(gray[:, 0], gray[:, 2])


class Arrays(Kaggle):
    """Arrays (H, W, C) or tensors, passed to torchvision's transforms."""

    def __init__(self, transform: Any, change: Any) -> None:
        super().__init__(transform)
        self.change = change

    def __getitem__(self, index: int) -> Any:
        pixels = np.random.default_rng(index).integers(0, 256, (16, 14, 3), np.uint8)
        return self.transform(self.change(pixels)), index


@pytest.mark.parametrize("change", [np.array, lambda pixels: pixels[:, :, 0], T.ToTensor()])
@pytest.mark.parametrize("first", [T.ToPILImage(), T.ToTensor()], ids=lambda step: repr(step))
def test_arrays_become_images_of_torchvision(change: Any, first: Any) -> None:
    transform = T.Compose([first, T.RandomHorizontalFlip(1.0), T.CenterCrop(9), T.ToTensor()])
    if isinstance(first, T.ToTensor):
        if isinstance(change, T.ToTensor):
            pytest.skip("ToTensor takes no tensors")
        transform.transforms.pop()
    inner = Arrays(transform, change)
    with CachedDataset(inner) as dataset:
        assert dataset.plan.is_batched
        images, _ = next(iter(DataLoader(dataset, batch_size=9)))
    assert torch.equal(images, torch.stack([inner[index][0] for index in range(9)]))


def test_attributes_are_those_of_the_dataset_inside() -> None:
    inner = Pictures(transform=RANDOM)
    with CachedDataset(inner) as dataset:
        assert dataset.classes == ["a", "b", "c"]
        assert dataset.data is inner.data
        assert list(dataset.targets) == inner.targets
        assert not hasattr(dataset, "indices")
        with pytest.raises(
            AttributeError, match="a CachedDataset has no attribute nope, and a Pict"
        ):
            _ = dataset.nope
    with CachedDataset(Subset(inner, [1, 2])) as dataset:
        assert not hasattr(dataset, "dataset")
        assert not hasattr(dataset, "indices")


class Partners(Pictures):
    """Two pictures, of which the second is drawn when an item is read, as for a Siamese network."""

    def __getitem__(self, index: int) -> Any:
        other = random.randrange(len(self))
        return (super().__getitem__(index)[0], super().__getitem__(other)[0]), index == other


class Masks(Dataset[Any]):
    """Dicts of an image and a mask, as in Pytorch-UNet."""

    def __init__(self, **others: Any) -> None:
        self.others = others

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 6, 5), float(index))
        return {"image": image, "mask": torch.full((6, 5), index), **self.others}


class Pairs(Dataset[Any]):
    """Files of images and masks, listed as torchvision's datasets list their files."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(folder / f"{i}.png"), str(folder / f"mask{i}.png")) for i in range(3)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return tuple(np.array(Image.open(path)) for path in self.samples[index])


def test_a_mask_that_changes_makes_a_cache_new(tmp_path: Path) -> None:
    """Every file that ``samples`` lists for a sample counts, not only the first."""
    dataset = Pairs(tmp_path)
    for path in (path for paths in dataset.samples for path in paths):
        Image.new("L", (6, 5), 1).save(path)
    for level in (1, 70):
        Image.new("L", (6, 5), level).save(tmp_path / "mask1.png")
        with CachedDataset(dataset, cache_dir=tmp_path / "cache") as cached:
            assert [target.max() for _, target in cached] == [1, level, 1]


def test_strings_of_dicts_are_lists_in_a_batch() -> None:
    """They are a list, as in torch's loader, also next to a number."""
    image = torch.zeros(3, 2, 2, dtype=torch.uint8)
    items = [{"image": image, "name": str(k), "size": k} for k in range(3)]
    with CachedDataset(items) as dataset:
        batch = next(iter(DataLoader(dataset, batch_size=3)))
        assert batch["name"] == ["0", "1", "2"]
        assert batch["size"].tolist() == [0, 1, 2]


def test_dicts_of_an_image_and_a_mask_come_back(tmp_path: Path) -> None:
    for others in ({}, {"name": "x", "size": 3}):
        with CachedDataset(Masks(**others), cache_dir=tmp_path, cache_key=str(others)) as dataset:
            assert dataset[4].keys() == {"image", "mask", *others}
            assert torch.equal(dataset[4]["mask"], torch.full((6, 5), 4))
            loader = DataLoader(dataset, batch_size=4)
            batch = next(iter(loader))
            assert loader.report().path.startswith("whole batches")
            assert batch["mask"].dtype == torch.int64
            for name, value in next(iter(TorchLoader(Masks(**others), batch_size=4))).items():
                same = torch.equal if isinstance(value, torch.Tensor) else list.__eq__
                assert same(batch[name], value)


@dataclass(frozen=True)
class Example:
    image: torch.Tensor
    label: int
    weight: float

    def __post_init__(self) -> None:
        assert isinstance(self.label, int)  # of one sample: a batch has a tensor


def test_dataclasses_come_back() -> None:
    items = [Example(torch.full((3, 2, 2), k, dtype=torch.uint8), k, k / 2) for k in range(5)]
    with CachedDataset(items) as dataset:
        assert dataset[3].label == 3
        assert torch.equal(dataset[3].image, items[3].image)
        batch = next(iter(DataLoader(dataset, batch_size=5)))
        assert type(batch) is Example
        assert batch.label.tolist() == [0, 1, 2, 3, 4]
        assert batch.weight.tolist() == [0, 0.5, 1, 1.5, 2]
        assert batch.image.shape == (5, 3, 2, 2)


def test_return_index_adds_the_index() -> None:
    with CachedDataset(Pictures(), transform=RANDOM, return_index=True) as dataset:
        assert dataset[3][2] == 3
        assert type(dataset[3][2]) is int
        assert [index for *_, index in dataset.__getitems__([5, 2])] == [5, 2]
        order = torch.Generator().manual_seed(1)
        for kind in (DataLoader, TorchLoader):
            order.manual_seed(1)
            loader = kind(dataset, batch_size=8, shuffle=True, generator=order)
            images, labels, indices = next(iter(loader))
            assert images.shape == (8, 3, 16, 16)
            assert labels.tolist() == [index % 3 for index in indices.tolist()]
            assert len(set(indices.tolist())) == 8
        _, _, indices = next(
            iter(CudaPrefetcher(DataLoader(Subset(dataset, [4, 9]), batch_size=2)))
        )
        assert indices.tolist() == [4, 9]
        both = DataLoader(ConcatDataset([dataset, dataset]), batch_size=40)
        assert next(iter(both))[2].tolist() == [*range(20), *range(20)]
    with CachedDataset(Masks(), return_index=True) as dataset:
        assert dataset[2]["index"] == 2
        assert next(iter(DataLoader(dataset, batch_size=3)))["index"].tolist() == [0, 1, 2]
    images = [torch.zeros(3, 2, 2, dtype=torch.uint8)] * 3
    with CachedDataset(images, return_index=True) as dataset:
        assert dataset[1][1] == 1


def test_an_index_that_items_have_already_is_not_overwritten() -> None:
    with CachedDataset(Masks(index=70), return_index=True) as dataset:
        with pytest.raises(ValueError, match=r"return_index=True adds .* Rename it"):
            dataset[0]
        with pytest.raises(ValueError, match=r"return_index=True adds .* Rename it"):
            next(iter(DataLoader(dataset, batch_size=2)))


def test_a_cache_of_a_dataset_with_its_index_is_another_one(
    image_folder: FolderMaker, tmp_path: Path
) -> None:
    """A dataset of fastdata that adds the index of each sample has a cache of its own."""
    root = image_folder(per_class=1)
    for added in (False, True, False):
        inner = ImageFolder(root, storage="none", return_index=added)
        with CachedDataset(inner, cache_dir=tmp_path) as dataset:
            assert dataset[1][1:] == ((1, 1) if added else (1,))


def test_return_index_adds_the_index_of_samples_that_are_read_one_by_one() -> None:
    with CachedDataset(Pictures(), transform=lambda image: image, return_index=True) as dataset:
        assert dataset[6][2] == 6


def convert(mode: str, image: Any) -> Any:
    if image.mode != mode:
        return image.convert(mode)
    return image


def to_rgb(picture: Any) -> Any:
    if picture.mode != "RGB":
        picture = picture.convert("RGB")
    return picture


def test_conversions_to_rgb_are_known() -> None:
    steps: list[Any] = [
        torch.nn.Identity(),
        T.Lambda(functools.partial(convert, "RGB")),
        functools.partial(convert, "RGB"),
        T.Lambda(to_rgb),
        lambda image: image.convert("RGB") if image.mode != "RGB" else image,
    ]
    plan = plan_transform(T.Compose([*steps, T.RandomHorizontalFlip(), T.ToTensor()]))
    assert plan.is_batched
    assert len(plan.prepare) == len(steps)
    gray = plan_transform(T.Compose([functools.partial(convert, "L"), T.ToTensor()]))
    assert not gray.is_batched


def test_a_lambda_is_named_by_its_function() -> None:
    plan = plan_transform(T.Compose([T.Lambda(lambda image: image.rotate(3)), T.ToTensor()]))
    assert "<lambda> (test_own_datasets.py, line " in str(plan.obstacle)


def test_a_loader_says_once_how_items_are_read_only_once(
    image_folder: FolderMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallbacks, "_HINTED", set())
    with pytest.warns(
        FastDataWarning, match=r"nothing is cached.* CachedDataset\(Pictures\(...\)\)"
    ):
        iter(DataLoader(Pictures(transform=RANDOM)))
    with pytest.warns(FastDataWarning, match=r"\(Named\(...\)\).* before Subset or random_split"):
        iter(DataLoader(Subset(Named(RANDOM), [1])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        iter(DataLoader(Pictures(transform=RANDOM)))
        iter(DataLoader(Masks(), workers="process"))
        with CachedDataset(Pictures(), transform=KNOWN) as dataset:
            iter(DataLoader(dataset, batch_size=None))  # single samples, by choice
        iter(DataLoader(range(3)))  # it may hold anything
        iter(DataLoader(Partners(transform=KNOWN)))  # CachedDataset refuses it
    with pytest.warns(
        FastDataWarning, match=r"CachedDataset\(Masks\(...\)\) reads each item once\. Pass"
    ):
        iter(DataLoader(Masks()))
    folder = torchvision.datasets.ImageFolder(image_folder())
    with pytest.warns(FastDataWarning, match=r" fastdata\.ImageFolder\(...\) reads each item once"):
        iter(DataLoader(folder))


def test_the_report_is_of_the_last_epoch_that_had_batches() -> None:
    with CachedDataset(Pictures(), transform=KNOWN) as dataset:
        loader = DataLoader(dataset, batch_size=5)
        assert loader.report().batches == 0
        assert len(list(loader)) == 4
        unread = iter(loader)
        assert loader.report().batches == 4
        next(unread)
        assert loader.report().batches == 1
