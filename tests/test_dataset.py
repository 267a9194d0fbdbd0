"""``CachedDataset``: samples, transforms, items and options."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
import re
import weakref
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1
from torchvision.datasets import VisionDataset
from torchvision.transforms import v2

from children import send_sample
from conftest import FolderMaker, shown
from data import level_samples
from fastdata import (
    CachedDataset,
    CudaPrefetcher,
    DataLoader,
    FastDataError,
    FastDataWarning,
    ImageFolder,
    ImageManifest,
    SampleBatch,
    Views,
    collate,
)
from fastdata.datasets.visits import IndexBatch
from fastdata.errors import SampleError, StoreGoneError
from fastdata.stores.options import DatasetOptions, Options
from leftovers import open_descriptors

CROP = v1.Compose([v1.RandomCrop((4, 3)), v1.RandomHorizontalFlip(), v1.ToTensor()])


class Images:
    """PIL images of 6 x 5 pixels whose red plane is their index."""

    def __init__(self, count: int = 8, sizes: int = 1) -> None:
        self.count, self.sizes = count, sizes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = np.random.default_rng(index).integers(
            0, 256, (5, 6 + index % self.sizes, 3), np.uint8
        )
        pixels[..., 0] = index
        return Image.fromarray(pixels), index * 10


def cached(dataset: Any, **options: Any) -> CachedDataset:
    return CachedDataset(dataset, **options)


def memfd_count() -> int:
    """Return the number of descriptors and mappings of shared blocks in this process."""
    return sum(target.startswith("/memfd:fastdata") for _, target in open_descriptors())


@pytest.mark.parametrize("sizes", [1, 2], ids=["dense", "ragged"])
def test_samples_equal_the_datasets_own(sizes: int) -> None:
    """Without a transform each image and target equals the wrapped dataset's, from a dense and a ragged store."""
    images = Images(40, sizes)
    with cached(images) as dataset:
        assert dataset.storage == "shared"
        for index in (0, 7, 39, -1):
            mine, target = dataset[index]
            wanted, wanted_target = images[index % 40]
            assert (mine.mode, target) == (wanted.mode, wanted_target)
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(wanted))


@pytest.mark.parametrize("api", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("sizes", [1, 2], ids=["dense", "ragged"])
@pytest.mark.parametrize("size", [(3, 3), (2, 3), (8, 3), (2, 9), (8, 9)], ids=shown)
def test_a_mirrored_image_is_cropped_and_padded_as_torchvision_does(
    api: Any, sizes: int, size: tuple[int, int]
) -> None:
    """In whole batches, an odd pixel of a centre crop is on the side where torchvision has it after a flip."""
    mirrored = [api.RandomVerticalFlip(1.0), api.RandomHorizontalFlip(1.0)]
    transform = api.Compose([*mirrored, api.CenterCrop(size), api.PILToTensor()])
    images = Images(4, sizes)
    with cached(images, transform=transform) as dataset:
        assert dataset.reader().obstacle is None
        for index, (mine, _) in enumerate(dataset.__getitems__(range(4))):
            assert torch.equal(mine, transform(images[index][0]))


@pytest.mark.parametrize("sizes", [1, 2], ids=["dense", "ragged"])
@pytest.mark.parametrize("size", [(5, 3), (3, 5), (5, 5)], ids=shown)
def test_a_crop_of_a_crop_is_padded_if_needed(sizes: int, size: tuple[int, int]) -> None:
    """A larger crop after a smaller one adds border, not the pixels that the smaller one cut off."""
    flip, middle = v1.RandomVerticalFlip(1.0), v1.CenterCrop((3, 3))
    images = Images(6, sizes)
    transform = v1.Compose(
        [flip, middle, v1.RandomCrop(size, pad_if_needed=True, fill=200), v1.PILToTensor()]
    )
    with cached(images, transform=transform) as dataset:
        assert dataset.reader().obstacle is None
        for index, (mine, _) in enumerate(dataset.__getitems__(range(6))):
            more_h, more_v = size[1] - 3, size[0] - 3
            padded = v1.functional.pad(middle(flip(images[index][0])), [more_h, more_v], fill=200)
            crops = [
                v1.functional.pil_to_tensor(v1.functional.crop(padded, top, left, *size))
                for top in range(more_v + 1)
                for left in range(more_h + 1)
            ]
            assert any(torch.equal(mine, crop) for crop in crops)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.full((3, 4), i, dtype=torch.int16),
        lambda i: torch.full((2, 4, 4), float(i)),
        lambda i: np.full((5, 2), i, np.float64),
        lambda i: np.full((3, 3, 3), i, np.uint8),
        lambda i: Image.new("L", (3, 4), i),
        lambda i: Image.new("RGBA", (3, 4), (i, 2, 3, 4)),
        lambda i: Image.new("F", (3, 4), i / 7),
        lambda i: Image.fromarray(np.full((4, 3), i * 1000, np.uint16)),
    ],
)
def test_samples_of_any_type_come_back(make: Any) -> None:
    """Tensors, arrays and PIL images of other modes keep type, dtype, shape and every value."""
    with cached([(make(i), i) for i in range(5)]) as dataset:
        for index in range(5):
            mine, wanted = dataset[index][0], make(index)
            assert type(mine) is type(wanted)
            if isinstance(wanted, Image.Image):
                assert mine.mode == wanted.mode
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(wanted))


def test_changing_a_sample_does_not_change_the_store() -> None:
    """Returned samples and batches belong to the user: changing them changes nothing else."""
    with cached([(torch.zeros(2), torch.zeros(1)) for _ in range(4)]) as dataset:
        image, target = dataset[0]
        image += 1
        target += 1
        batch = collate(dataset.__getitems__([0, 1]))
        batch[0] += 1
        assert dataset[0][0].tolist() == [0, 0]
        assert dataset[0][1].tolist() == [0]
        assert collate(dataset.__getitems__([0, 1]))[0].sum() == 0


def test_prepare_runs_before_the_store_is_filled() -> None:
    """prepare=, then resize=, then the transform's leading steps run once, and their result is stored."""
    images = Images(3)
    options = {
        "prepare": lambda image: image.convert("L"),
        "resize": (8, 9),
        "transform": v1.CenterCrop(7),
    }
    with cached(images, **options) as dataset:
        wanted = v1.CenterCrop(7)(v1.Resize((8, 9))(images[2][0].convert("L")))
        assert dataset[2][0].mode == "L"
        np.testing.assert_array_equal(np.asarray(dataset[2][0]), np.asarray(wanted))


class Pairs(VisionDataset):
    """A dataset like torchvision's, which passes image and target to ``transforms``."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        pair = Image.new("RGB", (9, 8), (index, 0, 0)), index
        return pair if self.transforms is None else self.transforms(*pair)


class Single(Pairs):
    """A dataset that uses only ``transform``, like torchvision's folders and digits."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = Image.new("RGB", (9, 8), (index, 0, 0))
        return image if self.transform is None else self.transform(image), index


class Wrapping:
    """A user's own dataset over another one."""

    def __init__(self, dataset: Any, transform: Any = None) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        image, target = self.dataset[index]
        return image if self.transform is None else self.transform(image), target


def turn(image: Any) -> Any:
    """Rotate an image: a step that fastdata does not know."""
    return image if image.width else None


CROPPED = v1.Compose([v1.RandomResizedCrop(4), v1.ToTensor()])


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (
            Single("", transform=CROPPED),
            r"RandomResizedCrop\(size=\(4, 4\).*\) in Single\.transform",
        ),
        (Pairs("", transform=CROPPED), r"RandomResizedCrop\(.*\) in Pairs\.transform"),
        (
            Pairs("", transforms=v2.RandomHorizontalFlip()),
            r"RandomHorizontalFlip\(p=0\.5\) in Pairs\.transforms",
        ),
        (
            Pairs("", target_transform=v1.RandomCrop(4)),
            r"RandomCrop\(.*\) in Pairs\.target_transform",
        ),
        (
            Subset(Single("", transform=CROPPED), [1, 0]),
            r"RandomResizedCrop\(.*\) in Single\.transform",
        ),
        (
            ConcatDataset([Pairs(""), Subset(Pairs("", transform=CROPPED), [0])]),
            r"RandomResizedCrop\(.*\) in Pairs\.transform",
        ),
        (
            Wrapping(Wrapping(Single("")), torch.nn.Sequential(v2.ColorJitter(0.5))),
            r"ColorJitter\(.*Wrapping\.trans",
        ),
        (
            Single("", transform=v1.RandomApply([v1.Pad(1)])),
            r"RandomApply\(.*\) in Single\.transform",
        ),
        (Single("", transform=Views(v1.ToTensor(), CROPPED)), r"Views\(.*\) in Single\.transform"),
        (Single("", transform=v1.GaussianBlur(3)), r"GaussianBlur\(.*\) in Single\.transform"),
        (
            Single("", transform=v1.TrivialAugmentWide()),
            r"TrivialAugmentWide\(.*\) in Single\.transform",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else type(given).__name__,
)
def test_frozen_draws_are_refused(dataset: Any, named: str) -> None:
    """Random steps of torchvision are named with the cure; where nothing is kept they may stay.

    With a step of the user's own behind it, a transform cannot be taken out of the dataset.
    """
    with pytest.raises(
        ValueError, match=rf"^{named}.*: random, but .* as transform=, as transforms="
    ) as refused:
        cached(dataset, prepare=turn)
    assert str(refused.value).count(" in ") == 1  # each step once
    with cached(dataset, storage="none") as served:
        assert len(served) == len(dataset)


def test_frozen_draws_can_be_allowed() -> None:
    """With frozen=True one draw of each item is stored, and every epoch sees it."""
    with cached(Single("", transform=CROPPED), frozen=True) as dataset:
        assert torch.equal(dataset[0][0], dataset[0][0])


def test_frozen_draws_of_our_own_datasets_are_refused() -> None:
    """A fastdata dataset that augments is refused like torchvision's."""
    named = r"RandomResizedCrop\(.*\) in CachedDataset\.transform: random"
    with cached(Images(2), transform=CROPPED) as inner, pytest.raises(ValueError, match=named):
        cached(inner)


def test_random_steps_that_are_not_called_may_stay() -> None:
    """A dataset may call its transform in any way, and may hold random steps that it does not call."""
    dataset = Single("", transform=v1.Compose([v1.Resize(4), turn, v1.ToTensor()]))
    dataset.image_transform = v1.Compose([v1.RandomCrop(2), v1.ToTensor()])
    dataset.loader, dataset.to_size = turn, v1.Resize(4)
    cached(dataset).close()


@pytest.mark.parametrize(
    "dataset",
    [
        Single(
            "",
            transform=v1.Compose([v1.Resize(4), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)]),
        ),
        Single(
            "", transform=v1.Compose([v1.GaussianBlur(3, sigma=1.0), v1.RandomRotation((90, 90))])
        ),
        Pairs("", transforms=v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])),
        Pairs("", target_transform=lambda label: label + 1),
        ConcatDataset(
            [Pairs("", transform=ImageOps.exif_transpose), Subset(Wrapping(Pairs("")), [0])]
        ),
    ],
)
def test_steps_that_do_the_same_each_time_may_stay(dataset: Any) -> None:
    """Deterministic steps of torchvision, and functions that rename labels, are neither refused nor warned about."""
    with cached(dataset) as kept:
        assert len(kept) == len(dataset)


def test_a_transform_that_was_replaced_is_looked_at_where_it_is_used() -> None:
    """Torchvision keeps the first transform in ``transforms``, which only some of its datasets call."""
    single, pairs = Single("", transform=CROPPED), Pairs("", transform=CROPPED)
    single.transform = pairs.transform = v1.ToTensor()
    cached(single).close()
    with pytest.raises(ValueError, match=r"RandomResizedCrop\(.*\) in Pairs\.transforms: random"):
        cached(pairs, prepare=turn)


@pytest.mark.parametrize("sizes", [1, 2], ids=["dense", "ragged"])
def test_a_batch_is_its_samples(sizes: int) -> None:
    """A batch equals the stacked samples that are read one by one in the same epoch."""
    with (
        cached(Images(8, sizes), transform=CROP, seed=5) as one,
        cached(Images(8, sizes), transform=CROP, seed=5) as many,
    ):
        for epoch in range(3):
            one.set_epoch(epoch)
            many.set_epoch(epoch)
            batch = many.__getitems__([3, 0, 6])
            assert isinstance(batch, SampleBatch)
            images, targets = collate(batch)
            assert torch.equal(images, torch.stack([one[i][0] for i in (3, 0, 6)]))
            assert targets.tolist() == [30, 0, 60]
            by_torch = default_collate(batch)
            assert torch.equal(by_torch[0], images)
            assert torch.equal(by_torch[1], targets)


def test_a_closed_dataset_in_a_concatenation_is_said_to_be_closed() -> None:
    """A loader over it and an open dataset can be made, but reading raises an error that says so."""
    with cached(Images(4)) as other, cached(Images(4)) as dataset:
        dataset.close()
        loader = DataLoader(ConcatDataset([other, dataset]), batch_size=2)
        with pytest.raises(StoreGoneError, match="the dataset was closed"):
            list(loader)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_another_process_reads_the_same_store(method: str) -> None:
    """A process started by any method reads the parent's memory."""
    context = multiprocessing.get_context(method)
    with cached([(torch.full((3,), i), i * 10) for i in range(8)]) as dataset:
        connection, theirs = context.Pipe()
        process = context.Process(target=send_sample, args=(dataset, 2, theirs))
        process.start()
        theirs.close()
        assert connection.recv() == ([2, 2, 2], 20)
        process.join()
        process.close()
        connection.close()


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_known_steps_behind_an_unknown_one_have_torchvisions_pixels(storage: Any) -> None:
    """Known steps run on whole batches of its results, or per sample as written if these are not PIL images."""

    def turn(sample: Image.Image) -> Image.Image:
        return sample.transpose(Image.Transpose.ROTATE_90)

    last = [v1.Resize((7, 8)), v1.CenterCrop(4), v1.ToTensor(), v1.Normalize((0.5,), (0.25,))]
    steps = v1.Compose([v1.Resize((5, 4)), turn, *last])
    with cached(Images(6), transform=steps, storage=storage) as dataset:
        batch = dataset.__getitems__([4, 1])
        assert isinstance(batch, SampleBatch)
        for k, index in enumerate((4, 1)):
            wanted = steps(Images(6)[index][0])
            assert torch.equal(batch[k][0], wanted)
            assert torch.equal(dataset[index][0], wanted)
        assert collate(batch)[1].tolist() == [40, 10]
        dataset.transform = v1.Compose([v1.Resize((5, 4)), np.array, v1.ToTensor()])
        batch = dataset.__getitems__([4, 1])
        assert not isinstance(batch, SampleBatch)
        assert torch.equal(batch[0][0], dataset.transform(Images(6)[4][0]))


def test_per_sample_steps_get_what_they_would_have_got() -> None:
    """An unknown step after known ones gets a PIL image, or a tensor after ToTensor, and runs once per sample."""
    seen: list[Any] = []

    def look(sample: Any) -> Any:
        seen.append(sample)
        return sample

    steps = [v1.Resize((5, 4)), v1.RandomHorizontalFlip(1.0), look]
    with cached(Images(8), transform=v1.Compose([*steps, v1.ToTensor()])) as dataset:
        wanted = v1.functional.to_tensor(v1.functional.hflip(v1.Resize((5, 4))(Images(8)[3][0])))
        assert torch.equal(dataset[3][0], wanted)
        assert isinstance(seen[0], Image.Image)
        batch = dataset.__getitems__([1, 2])
        assert isinstance(batch, SampleBatch)
        assert len(seen) == 3
        assert dataset.reader().obstacle is not None
        assert "per sample" in dataset.reader().obstacle


def test_targets_of_a_batch_are_collated_as_by_torch() -> None:
    """Any targets are collated as by default_collate, after target_transform."""
    for targets in (
        [1, 2, 3],
        [0.5, 1.5, 2.5],
        ["a", "b", "c"],
        [torch.ones(2)] * 3,
        [{"x": 1}, {"x": 2}, {"x": 3}],
    ):
        with cached([(torch.zeros(1), target) for target in targets]) as dataset:
            wanted = default_collate([(torch.zeros(1), target) for target in targets])[1]
            found = collate(dataset.__getitems__([0, 1, 2]))[1]
            assert type(found) is type(wanted)
            assert str(found) == str(wanted)
            assert getattr(found, "dtype", None) == getattr(wanted, "dtype", None)
    with cached(
        [(torch.zeros(1), i) for i in range(3)], target_transform=lambda target: target + 0.5
    ) as dataset:
        assert collate(dataset.__getitems__([2, 0]))[1].tolist() == [2.5, 0.5]
        assert dataset[1][1] == 1.5
        assert dataset.targets == [0, 1, 2]


def test_a_changed_list_is_collated_as_it_is() -> None:
    """A SampleBatch that was changed is collated from its new samples."""
    with cached(level_samples(5, (2,), torch.int64)) as dataset:
        batch = dataset.__getitems__([0, 1, 2])
        batch[1] = dataset[4]
        assert collate(batch)[1].tolist() == [0, 4, 2]
        batch = dataset.__getitems__([0, 1, 2])
        batch.reverse()
        assert collate(batch)[0][:, 0].tolist() == [2, 1, 0]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_has_the_types_of_single_samples(parts: int) -> None:
    """Arrays stay arrays over the batch's memory, and strings of dicts are collated to a list, as by torch."""
    dicts = [{"image": np.full((2, 3), i, np.int16), "name": f"number {i}"} for i in range(6)]
    with cached(dicts) as dataset:
        whole = (
            ConcatDataset([Subset(dataset, [5, 4, 3]), Subset(dataset, [0])])
            if parts > 1
            else dataset
        )
        loader = DataLoader(whole, batch_size=2, collate_fn=lambda samples: samples)
        samples = [sample for batch in loader for sample in batch]
        for sample, expected in zip(samples, (whole[k] for k in range(len(whole))), strict=True):
            assert type(sample["image"]) is np.ndarray
            assert sample["image"].dtype == np.int16
            assert np.array_equal(sample["image"], expected["image"])
            assert sample["name"] == expected["name"]
        names = [batch["name"] for batch in DataLoader(whole, batch_size=2)]
        assert (
            names[0]
            == default_collate([whole[0], whole[1]])["name"]
            == [samples[0]["name"], samples[1]["name"]]
        )
        with CudaPrefetcher(loader, device="cpu") as batches:
            assert type(next(iter(batches))[1]["image"]) is np.ndarray


def test_arrays_and_tensors_are_not_joined_to_one_batch() -> None:
    """A ConcatDataset of both returns each sample unchanged, although shape and dtype are equal."""
    arrays, tensors = [(np.zeros(3, np.float32), 0)], [(torch.zeros(3), 1)]
    with cached(arrays) as first, cached(tensors) as second:
        (batch,) = DataLoader(ConcatDataset([first, second]), batch_size=2, collate_fn=list)
        assert [type(sample[0]) for sample in batch] == [np.ndarray, torch.Tensor]


def _replace(samples: list[Any]) -> None:
    for sample in samples:
        sample["image"] = sample["image"] + 1


def _add(samples: list[Any]) -> None:
    for k, sample in enumerate(samples):
        sample["size"] = k


def _rename(samples: list[Any]) -> None:
    for sample in samples:
        sample["pixels"] = sample.pop("image")


def _write(samples: list[Any]) -> None:
    for sample in samples:
        sample["image"] += 1
        sample["boxes"].add_(7)
        sample["tags"].append(5)


@pytest.mark.parametrize("change", [_replace, _add, _rename, _write])
@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_changes_of_samples_in_a_collate_fn_count(change: Any, kind: Any) -> None:
    """Changes that a collate_fn makes before it calls ``default_collate`` are in the batch, as with torch."""

    def make(samples: list[Any]) -> Any:
        change(samples)
        return default_collate(samples)

    dicts = [{"image": kind([[i, 0.5]]), "boxes": torch.tensor([i]), "tags": [i]} for i in range(4)]
    with cached(dicts) as dataset:
        expected = make([dataset[k] for k in range(4)])
        for options in (
            {},
            {"num_workers": 1, "workers": "thread"},
            {"num_workers": 1, "workers": "process"},
        ):
            (found,) = DataLoader(dataset, batch_size=4, collate_fn=make, **options)
            assert str(found) == str(expected)


def test_changes_of_views_and_targets_in_a_collate_fn_count() -> None:
    """A replaced view, and a list of targets that grows, are in the batch."""

    def make(samples: list[Any]) -> Any:
        for views, target in samples:
            views[1] = views[0] + 1
            target.append(3)
        return default_collate(samples)

    samples = [(image, [label]) for image, label in map(Images(3).__getitem__, range(3))]
    with cached(samples, transform=Views(v1.ToTensor(), v1.ToTensor())) as dataset:
        (((first, second), targets),) = DataLoader(dataset, batch_size=3, collate_fn=make)
        assert torch.equal(second, first + 1)
        assert [column.tolist() for column in targets] == [[0, 10, 20], [3, 3, 3]]


def test_a_transform_that_begins_alike_is_served_from_the_same_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is prepared again if only steps after the stored ones differ."""
    with cached(
        Images(4), transform=v1.Compose([v1.Resize((4, 4)), v1.RandomCrop(3), v1.ToTensor()])
    ) as dataset:
        stores = dataset.reader().kept.stores
        dataset.transform = v1.Compose([v1.Resize((4, 4)), v1.ToTensor()])
        assert dataset[0][0].shape == (3, 4, 4)
        assert dataset.reader().kept.stores is stores
        assert not caplog.records


def test_a_transform_that_begins_otherwise_has_samples_prepared_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Samples and batches equal those of a dataset made with it, and one line is logged."""
    other = v1.Compose([v1.Grayscale(), v1.Resize((2, 3)), v1.ToTensor()])
    with (
        cached(Images(4), transform=v1.Compose([v1.Resize((4, 4)), v1.ToTensor()])) as dataset,
        cached(Images(4), transform=other) as wanted,
    ):
        dataset.transform = other
        assert (
            "samples are prepared again: the new transform does not begin with Resize"
            in caplog.text
        )
        assert str(dataset.plan) == str(wanted.plan)
        assert all(
            torch.equal(mine[0], theirs[0]) for mine, theirs in zip(dataset, wanted, strict=True)
        )
        assert torch.equal(
            dataset.__getitems__([2, 0]).stacked[0], wanted.__getitems__([2, 0]).stacked[0]
        )
        assert dataset.targets == wanted.targets


@pytest.mark.parametrize("storage", ["shared", "compressed"])
def test_an_assignment_that_fails_changes_nothing(storage: Any) -> None:
    """A dataset that cannot be prepared again works as before, and can be once the cause is gone."""
    images = Images(4)
    old = v1.Compose([v1.Resize((4, 4)), v1.ToTensor()])
    with cached(images, transform=old, storage=storage) as dataset:
        before = [dataset[i][0] for i in range(4)]
        sizes = images.sizes
        del images.sizes
        with pytest.raises(SampleError, match="sizes"):
            dataset.transform = v1.Resize((5, 5))
        assert dataset.transform is old
        assert all(torch.equal(dataset[i][0], before[i]) for i in range(4))
        loader = DataLoader(dataset, batch_size=4)
        assert torch.equal(next(iter(loader))[0], torch.stack(before))
        images.sizes = sizes
        dataset.transform = v1.Compose([v1.Resize((5, 5)), v1.ToTensor()])
        assert dataset[3][0].shape == (3, 5, 5)


def test_a_failure_without_room_for_two_stores_leaves_the_dataset_open() -> None:
    """If the old samples had to be dropped first, the next read prepares them again."""
    broken: set[int] = set()

    class Breakable(Images):
        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            if index in broken:
                raise OSError("broken")
            return super().__getitem__(index)

    old = v1.Compose([v1.Resize((4, 4)), v1.PILToTensor()])
    with cached(Breakable(4), transform=old, memory_limit=250) as dataset:
        before = dataset[3][0]
        broken.add(3)
        with pytest.raises(SampleError, match="broken"):
            dataset.transform = v1.Compose([v1.Resize((3, 4)), v1.PILToTensor()])
        assert dataset.transform is old
        assert dataset.filled_share() == 0
        broken.clear()
        assert torch.equal(dataset[3][0], before)
        assert dataset.filled_share() == 1
        broken.add(3)
        with pytest.raises(SampleError, match="broken"):
            dataset.transform = v1.Compose([v1.Resize((3, 4)), v1.PILToTensor()])
    with pytest.raises(StoreGoneError, match="was closed"):
        dataset[0]


@pytest.mark.parametrize("threads", [0, 2])
def test_closing_ends_an_epoch_from_before_another_transform(threads: int) -> None:
    """An epoch keeps the samples that it began with until the dataset is closed; then it raises an error."""
    with cached(Images(12), transform=v1.Compose([v1.Resize((4, 4)), v1.ToTensor()])) as dataset:
        batches = iter(DataLoader(dataset, batch_size=2, num_workers=threads))
        shape = next(batches)[0].shape
        dataset.transform = v1.Compose([v1.Resize((2, 3)), v1.ToTensor()])
        assert next(batches)[0].shape == shape
    with pytest.raises(StoreGoneError, match="was closed"):
        next(batches)


def test_two_views_serve_one_store() -> None:
    """Each view has its own transform; the memory is freed with the last of them."""
    before = memfd_count()
    train = cached(
        Images(4),
        transform=v1.Compose([v1.Resize((4, 4)), v1.RandomHorizontalFlip(1), v1.ToTensor()]),
    )
    val = train.with_transform(v1.Compose([v1.Resize((4, 4)), v1.ToTensor()]))
    assert val.reader().kept is train.reader().kept
    assert torch.equal(train[1][0].flip(-1), val[1][0])
    train.close()
    with pytest.raises(StoreGoneError):
        train[1]
    assert val[1][0].shape == (3, 4, 4)
    val.close()
    assert memfd_count() == before


def test_a_view_that_begins_otherwise_has_its_own_store() -> None:
    """The first view still returns its own samples."""
    with (
        cached(Images(4), transform=v1.Resize((4, 4))) as train,
        train.with_transform(v1.Resize((2, 2))) as val,
    ):
        assert (train[0][0].size, val[0][0].size) == ((4, 4), (2, 2))
        assert val.reader().kept is not train.reader().kept


@pytest.mark.parametrize("name", ["samples", "targets"])
def test_lists_are_not_assigned(name: str) -> None:
    """Assigning lists, as scripts do with torchvision's datasets, is refused at once with the cure."""
    with (
        cached(Images(4)) as dataset,
        pytest.raises(AttributeError, match=rf"{name} of this Cached.*Subset"),
    ):
        setattr(dataset, name, [])


def test_without_storage_nothing_is_read_in_advance() -> None:
    """storage="none" reads sample and target together on demand; targets alone are read one by one."""
    reads: list[int] = []

    class Counted(Images):
        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            reads.append(index)
            return super().__getitem__(index)

    with cached(Counted(8), storage="none", transform=v1.ToTensor()) as dataset:
        assert (reads, len(dataset)) == ([], 8)
        assert dataset[3][1] == 30
        assert [target for _, target in dataset.__getitems__([1, 2])] == [10, 20]
        assert reads == [3, 1, 2]
        dataset.transform = v1.Compose([v1.Resize((3, 4)), v1.ToTensor()])
        assert dataset[0][0].shape == (3, 3, 4)
        assert dataset.targets[5] == 50


class Dicts(Images):
    """The same images as dicts, with the values of ``keys`` next to the image."""

    def __init__(self, *keys: str) -> None:
        super().__init__(8)
        self.keys = keys

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        values = {
            "image": image,
            "label": target,
            "name": f"name {index}",
            "boxes": torch.tensor([index, 1.5]),
        }
        return {key: values[key] for key in self.keys}


class Transformed(Dicts):
    """The dataset that torch's own loader reads, for comparison."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        return item | {"image": v1.functional.to_tensor(item["image"])}


KEYS = [("image", "label"), ("label", "image"), ("name", "image", "boxes"), ("image",)]
STORAGES: tuple[dict[str, Any], ...] = (
    {"storage": "shared"},
    {"storage": "compressed"},
    {"storage": "none"},
)


@pytest.mark.parametrize("keys", KEYS, ids=shown)
@pytest.mark.parametrize("options", STORAGES, ids=shown)
def test_dicts_stay_dicts(keys: tuple[str, ...], options: dict[str, Any]) -> None:
    """Items, lists of them and batches have the keys of the dataset's items, in order, as in torch's loader."""
    wanted = [
        default_collate([Transformed(*keys)[i] for i in order]) for order in ([3, 1, 7], [0, 2])
    ]
    with cached(Dicts(*keys), transform=v1.ToTensor(), **options) as dataset:
        assert list(dataset[2]) == list(keys)
        more: dict[str, Any]
        for more in (
            {},
            {"num_workers": 2},
            {"num_workers": 2, "workers": "process"},
            {"collate_fn": _collate_items},
        ):
            batches = list(DataLoader(dataset, batch_sampler=[[3, 1, 7], [0, 2]], **more))
            assert [list(batch) for batch in batches] == [list(keys)] * 2
            for batch, right in zip(batches, wanted, strict=True):
                assert all(np.array_equal(batch[key], right[key]) for key in keys)
        if options["storage"] != "none":
            assert DataLoader(dataset).report().path.startswith("whole batches")
            copy = pickle.loads(pickle.dumps(dataset.__getitems__([1, 2])))
            assert [type(item) for item in copy] == [dict, dict]


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


class Triple(NamedTuple):
    image: torch.Tensor
    label: int
    name: str


class Alone(NamedTuple):
    image: torch.Tensor


@pytest.mark.parametrize("kind", [Pair, Triple, Alone])
@pytest.mark.parametrize("options", [*STORAGES, {"storage": "disk"}], ids=shown)
def test_namedtuples_stay_namedtuples(
    kind: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items and batches have the dataset's own class, as in torch's loader, also from a cache."""
    values = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i, str(i)) for i in range(4)]
    items = [kind(*value[: len(kind._fields)]) for value in values]
    wanted: list[Any] = list(TorchLoader(items, batch_size=2))  # type: ignore[arg-type]
    if options["storage"] == "disk":
        options = {"cache_dir": tmp_path, "cache_key": "k"}
    for more in ({}, {"num_workers": 2}, {"num_workers": 1, "workers": "process"}):
        with CachedDataset(items, **options) as dataset:
            assert [type(dataset[0]), *map(type, dataset.__getitems__([0, 1]))] == [kind] * 3
            batches = list(DataLoader(dataset, batch_size=2, **more))
            assert list(map(type, batches)) == [kind] * 2
            for batch, right in zip(batches, wanted, strict=True):
                for part, right_part in zip(batch, right, strict=True):
                    assert type(part) is type(right_part)
                    assert all(map(np.array_equal, part, right_part))
    if options.get("cache_dir"):
        monkeypatch.delattr(f"{__name__}.{kind.__name__}")
        with CachedDataset.from_cache(tmp_path) as dataset:
            assert type(dataset[0]) is tuple  # the class is not there


def _collate_items(items: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: default_collate([item[key] for item in items]) for key in items[0]}


def test_joint_transforms_replace_both_others() -> None:
    """As in torchvision, a transform that is assigned next to them is not called."""
    pairs = [(torch.zeros(3, 4, 4, dtype=torch.uint8), 7)]
    for storage in ("shared", "none"):
        with CachedDataset(pairs, transforms=lambda *pair: pair, storage=storage) as dataset:
            dataset.target_transform = str
            assert dataset[0][1] == 7


def test_dicts_are_transformed() -> None:
    """Each transform gets the image, the target or both, and its result is stored under their keys."""
    with cached(
        Dicts("label", "image"), transform=turn, target_transform=lambda label: label + 1
    ) as dataset:
        assert np.array_equal(dataset[3]["image"], turn(Images()[3][0]))
        assert (list(dataset[3]), dataset[3]["label"]) == (["label", "image"], 31)
        assert [item["label"] for item in dataset.__getitems__([1, 2])] == [11, 21]
    with cached(
        Dicts("label", "image"), transforms=lambda image, label: (image.size, -label)
    ) as dataset:
        assert dataset[3] == {"label": -30, "image": (6, 5)}


def test_dicts_are_kept_in_a_cache(tmp_path: Any) -> None:
    """Items from a cache are dicts, with the dataset and without it."""
    for names in (("image", "label"), ("name", "image", "label")):
        options: dict[str, Any] = {"cache_dir": tmp_path / str(len(names)), "cache_key": "k"}
        for _ in range(2):
            with cached(Dicts(*names), **options) as dataset:
                assert (list(dataset[3]), dataset[3]["label"]) == (list(names), 30)
        with CachedDataset.from_cache(options["cache_dir"], transform=v1.ToTensor()) as dataset:
            [batch] = DataLoader(dataset, batch_size=8)
            assert (list(batch), batch["label"].tolist()) == (list(names), list(range(0, 80, 10)))


def test_dicts_that_have_no_image_are_refused() -> None:
    """The error has the keys and a cure, and does not advise on_error="skip", which would not help."""
    with pytest.raises(
        SampleError, match=r"dict of label, without an image, but .* Correct the dataset\.$"
    ) as refused:
        cached(Dicts("label"))
    assert "on_error" not in str(refused.value)


def test_dicts_and_pairs_together_come_one_by_one() -> None:
    """A ConcatDataset of both has no whole batches."""
    with (
        cached(Dicts("image", "label"), transform=CROP) as dicts,
        cached(Images(), transform=CROP) as pairs,
    ):
        loader = DataLoader(ConcatDataset([dicts, pairs]), collate_fn=list, batch_size=16)
        [items] = loader
        assert [isinstance(item, dict) for item in items] == [True] * 8 + [False] * 8
        assert "serve images that differ" in loader.report().path
        twice: Any = DataLoader(ConcatDataset([dicts, Subset(dicts, [1])]), batch_size=9)
        assert [batch["label"].tolist() for batch in twice] == [[*range(0, 80, 10), 10]]


def test_a_function_of_batches_that_draws_is_named() -> None:
    """The error about draws names a function that a Hugging Face dataset calls on its own batches."""

    class Drawing(Dicts):
        def __getitem__(self, index: int) -> Any:
            torch.rand(())
            return super().__getitem__(index)

    dataset: Any = Drawing("image", "label")
    dataset.format = {"type": "custom", "format_kwargs": {"transform": turn}}
    with pytest.raises(ValueError, match=r"turn.* in Drawing\.set_transform\. "):
        cached(dataset)


def test_a_tensor_dataset_is_one_of_samples_and_targets() -> None:
    """A TensorDataset of images and labels needs no changes, and gives whole batches."""
    images, labels = (
        torch.arange(4 * 3 * 6 * 5, dtype=torch.uint8).view(4, 3, 6, 5),
        torch.tensor([7, 5, 3, 1]),
    )
    with cached(TensorDataset(images, labels)) as dataset:
        [batch] = DataLoader(dataset, batch_size=4)
        assert torch.equal(batch[0], images)
        assert torch.equal(batch[1], labels)


def test_skipping_needs_storage() -> None:
    """on_error="skip" with storage="none" warns that it has no effect."""
    with pytest.warns(
        FastDataWarning, match="storage='none' prepares them only when they are read"
    ):
        cached(Images(4), storage="none", on_error="skip").close()


def test_wrong_indices_are_named() -> None:
    """An index out of range is an IndexError that names it, so that iteration ends."""
    with cached([(torch.zeros(1), 0)] * 3) as dataset:
        assert len(list(dataset)) == 3
        with pytest.raises(IndexError, match="index 3 is out of range for a dataset of 3 samples"):
            dataset[3]
        with pytest.raises(IndexError, match="index out of range"):
            dataset.targets[999]
        with pytest.raises(IndexError, match="index -4 is out of range for a dataset of 3 samples"):
            dataset.__getitems__([0, -4])
        for wrong in ("1", 1.0, slice(2)):
            with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
                dataset[wrong]


def test_wrong_options_are_named() -> None:
    """A misspelt option is an error with the choices."""
    with pytest.raises(
        ValueError,
        match="storage='ram' is not one of 'auto', 'device', 'shared', 'compressed', 'disk', 'none'",
    ):
        cached([(torch.zeros(1), 0)], storage="ram")
    with pytest.raises(TypeError, match="has no __getitem__ or no __len__"):
        cached(iter([1]))
    for kind, wrong, meant in (
        (CachedDataset, "storge", "Did you mean storage="),
        (CachedDataset, "transfrom", "Did you mean transform="),
        (CachedDataset, "fast_decode", r"help\(CachedDataset\) lists"),
        (ImageFolder, "cachedir", "Did you mean cache_dir="),
        (ImageManifest, "prepare_worker", "Did you mean prepare_workers="),
    ):
        with pytest.raises(
            TypeError, match=rf"^{kind.__name__}\(\) has no argument {wrong}=\. {meant}"
        ):
            kind([(torch.zeros(1), 0)], **{wrong: 1})
    with pytest.raises(TypeError, match="prepare_workers='4' must be an int or None"):
        cached([(torch.zeros(1), 0)], prepare_workers="4")
    with pytest.raises(ValueError, match="prepare_workers=-1 must be 0 or more; leave it out"):
        cached(Images(4), prepare_workers=-1)
    with pytest.raises(TypeError, match="batch_ops=1 must be True or False"):
        cached([(torch.zeros(1), 0)], batch_ops=1)
    with pytest.raises(ValueError, match=r"resize=2\.5 is not a size"):
        cached([(torch.zeros(1), 0)], resize=2.5)


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([1], "item 0 of list is an int, but a"),
        ([(1, 2)], "a sample of type int cannot be stored"),
        (Wrapping([(1, 2, 3)]), "too many values"),
        ([{1: 2}], "is a dict of 1, without an image"),
    ],
)
def test_items_of_another_kind_are_named(items: Any, named: str) -> None:
    """The error shows the kind of item, with the right article, and its cure is to correct the dataset."""
    with pytest.raises(
        SampleError, match=rf"sample 0 cannot be read: .*{named}.* Correct the dataset"
    ):
        cached(items)


LEVELS = [torch.full((3, 5, 4), i, dtype=torch.uint8) for i in range(6)]
FORMS = {
    "pairs": [(image, 10 * i) for i, image in enumerate(LEVELS)],
    "triples": [(image, 10 * i, str(i)) for i, image in enumerate(LEVELS)],
    "alone": LEVELS,
    "tuples of one": TensorDataset(torch.stack(LEVELS)),
    "dicts": [{"image": image, "label": 10 * i} for i, image in enumerate(LEVELS)],
    "PIL images": [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in LEVELS],
}


def equal(mine: Any, wanted: Any) -> bool:
    """Return True if two items or batches are equal in type, structure and values."""
    if isinstance(wanted, torch.Tensor):
        return torch.equal(mine, wanted)
    if isinstance(wanted, dict):
        return list(mine) == list(wanted) and all(equal(mine[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (tuple, list)):
        return (
            type(mine) is type(wanted)
            and all(map(equal, mine, wanted))
            and len(mine) == len(wanted)
        )
    return bool(mine == wanted)


@pytest.mark.parametrize("form", FORMS)
def test_items_of_any_form_come_in_whole_batches(form: str, tmp_path: Path) -> None:
    """Items, and batches of every loader, equal those of the dataset, also from a cache."""
    items = FORMS[form]
    transform = v1.PILToTensor() if form == "PIL images" else None
    theirs = items if transform is None else LEVELS
    wanted = list(TorchLoader(theirs, batch_size=4))
    options: dict[str, Any] = {"transform": transform}
    with (
        cached(items, **options) as kept,
        cached(items, cache_dir=tmp_path, cache_key="x", **options) as on_disk,
        cached(items, storage="none", **options) as none,
    ):
        for dataset in (kept, on_disk, none):
            assert all(equal(dataset[i], theirs[i]) for i in range(6))
            for loader in (DataLoader(dataset, batch_size=4), TorchLoader(dataset, batch_size=4)):
                assert equal(list(loader), wanted)
            assert equal(
                list(DataLoader(dataset, batch_size=4, collate_fn=default_collate)), wanted
            )
        assert DataLoader(kept, batch_size=4).report().path.startswith("whole batches")
        [batch] = DataLoader(Subset(kept, [5, 2]), batch_size=2)
        assert equal(batch, default_collate([theirs[5], theirs[2]]))
        assert equal(list(CudaPrefetcher(DataLoader(kept, batch_size=4))), wanted)


@pytest.mark.parametrize(
    "items",
    [
        [(LEVELS[0], 1), (LEVELS[1], 1, 2)],
        [(LEVELS[0], 1, 2), LEVELS[1]],
        [(LEVELS[0], 1), {"image": LEVELS[1], "label": 1}],
        [{"image": LEVELS[1], "label": 1}, (LEVELS[0], 1)],
    ],
)
def test_items_of_several_forms_are_refused(items: Any) -> None:
    """The first item that differs in form from those before it is named."""
    with pytest.raises(
        SampleError,
        match=r"item 1 of list .*but items before it are .*\. All items must have the same form",
    ):
        cached(items)


@pytest.mark.parametrize("make", [Wrapping, lambda it: Subset(Wrapping(Subset(it, [0, 1])), [0])])
def test_a_wrapper_that_reads_sample_by_sample_warns(make: Any) -> None:
    """A user's dataset around a fastdata one warns once, and the warning suggests transform=."""
    with cached(Images(4), transform=CROP) as dataset:
        loader = DataLoader(make(dataset), batch_size=2)
        with pytest.warns(
            FastDataWarning, match=r"Wrapping reads each sample from its .* Pass the .*transform="
        ) as warned:
            assert [len(batch) for batch in loader] == [len(batch) for batch in loader]
        assert len(warned) == 1
        list(DataLoader(make(dataset), batch_size=2))


def test_a_concat_with_another_kind_of_dataset_warns() -> None:
    """It warns once; a ConcatDataset of fastdata datasets alone does not."""
    theirs = [(CROP(image), target) for image, target in (Images(2)[0], Images(2)[1])]
    with cached(Images(4), transform=CROP) as dataset, cached(theirs) as ours:
        mixed = DataLoader(ConcatDataset([dataset, theirs]), batch_size=2)
        with pytest.warns(
            FastDataWarning,
            match=r"ConcatDataset reads each sample from its CachedDataset\. .* wrap these in CachedDataset",
        ) as warned:
            assert len(list(mixed)) == len(list(mixed))
        assert len(warned) == 1
        list(DataLoader(ConcatDataset([dataset, ours]), batch_size=2))


def test_targets_beyond_int64_are_refused() -> None:
    """A batch cannot hold them, as in torch; a user's collate_fn may take them."""
    with cached(
        [(torch.zeros(3, 2, 2, dtype=torch.uint8), (1 << 63) + i) for i in range(2)]
    ) as dataset:
        with pytest.raises(ValueError, match="Overflow"):
            next(iter(DataLoader(dataset, batch_size=2)))
        assert next(iter(DataLoader(dataset, batch_size=2, collate_fn=list)))[1][1] == (1 << 63) + 1


MODES = ["RGB", "RGB", "L", "RGB", "RGBA"]
NORMALIZED = v1.Compose([v1.RandomCrop(4), v1.ToTensor(), v1.Normalize((0.5,) * 3, (0.5,) * 3)])


@pytest.mark.parametrize(
    "make", [lambda image, i: (image, i), lambda image, i: {"image": image, "label": i}]
)
def test_an_image_of_another_mode_is_named(make: Any) -> None:
    """A sample with the wrong number of channels for a step is named, with the cure."""
    items = [make(Image.new(mode, (6, 5)), i) for i, mode in enumerate(MODES)]
    with cached(items, transform=NORMALIZED) as dataset:
        assert collate(dataset.__getitems__([0, 1, 3])) is not None
        for wrong in (2, 4):
            channels = "1 channel" if wrong == 2 else "4 channels"
            for batch in ([wrong, 0], [0, wrong]):
                with pytest.raises(
                    (SampleError, ValueError), match=rf"sample {wrong} .*prepare=lambda image"
                ):
                    dataset.__getitems__(batch)
            with pytest.raises(
                SampleError,
                match=rf"sample {wrong} .* it has {channels}, but Normalize has 3 means",
            ):
                dataset[wrong]
    with cached(items, transform=NORMALIZED, prepare=lambda image: image.convert("RGB")) as dataset:
        [batch] = DataLoader(dataset, batch_size=5)
        images = batch["image"] if isinstance(batch, dict) else batch[0]
        assert images.shape == (5, 3, 4, 4)


def test_a_first_image_that_no_step_is_for_is_named() -> None:
    """If the first sample shows it, the transform is refused at once."""
    with pytest.raises(
        SampleError, match=r"sample 0 cannot be read: it has 1 channel, but Normalize has 3 means\."
    ):
        cached([(Image.new("L", (6, 5)), 0)] * 2, transform=NORMALIZED)


def test_the_plan_shows_what_runs_before_the_transform() -> None:
    """``prepare=`` and ``resize=`` are printed with the transform's own first steps, once."""

    def grey(image: Any) -> Any:
        return image.convert("L")

    options = {
        "prepare": grey,
        "resize": (8, 9),
        "transform": v1.Compose([v1.CenterCrop(7), v1.ToTensor()]),
    }
    for storage in ("shared", "none"):
        with cached(Images(3), storage=storage, **options) as dataset:
            first, *rest = str(dataset.plan).splitlines()
            assert re.search(
                r"prepare, .*grey.*, Resize\(size=\(8, 9\)\), CenterCrop\(size=\(7, 7\)\)$", first
            )
            assert "grey" not in "".join(rest)


def test_the_plan_of_items_that_are_not_stored_calls_none_a_pil_image() -> None:
    """Without a transform, the reason is the storage: items may be tensors as well."""
    with cached(level_samples(2, (3, 4, 4)), storage="none") as dataset:
        assert "one by one, because storage='none' prepares every sample" in str(dataset.plan)


def test_the_plan_of_files_that_are_not_stored(image_folder: FolderMaker) -> None:
    """Its first steps run on every read, and the report's reason is the step that is not fast."""
    transform = v1.Compose([v1.Resize((8, 8)), v1.RandomHorizontalFlip(), v1.ToTensor()])
    with ImageFolder(image_folder(), transform, storage="none", batch_ops=False) as dataset:
        assert str(dataset.plan).startswith("prepare, on every read:       Resize(size=(8, 8)")
        assert ">on every read<" in dataset.plan._repr_html_()
        assert "because batch_ops=False" in str(DataLoader(dataset).report())
    root = image_folder(root="more")
    with ImageFolder(root, transform, storage="compressed", codec="source") as dataset:
        assert str(dataset.plan).startswith("prepare, on every read:       Resize(size=(8, 8)")


@pytest.mark.parametrize("kind", [CachedDataset, ImageFolder, ImageManifest])
def test_help_shows_every_option(kind: Any) -> None:
    """The help of each dataset has every option with its default and meaning."""
    shown = inspect.signature(kind).parameters
    hints = get_type_hints(Options)
    for name, value in get_type_hints(DatasetOptions).items():
        assert value == hints[name]
        assert shown[name].default == inspect.signature(Options).parameters[name].default
        assert re.search(rf"^    {name}: \S", kind.__doc__, re.MULTILINE)
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in shown.values())


def test_a_closed_dataset_says_so() -> None:
    """Reading after close is an error, closing twice is not; memory is freed, and earlier batches stay valid."""
    open_before = memfd_count()
    dataset = cached(level_samples(3, (2,), torch.int64), transform=None)
    batch = collate(dataset.__getitems__([1, 2]))
    dataset.close()
    dataset.close()
    assert batch[0].tolist() == [[1, 1], [2, 2]]
    assert memfd_count() == open_before
    with pytest.raises(StoreGoneError, match="was closed"):
        dataset[0]
    with pytest.raises(FastDataError, match="was closed"):
        pickle.dumps(dataset)
    with pytest.raises(StoreGoneError, match="was closed"):
        dataset.storage_report()


def test_printing_tells_storage_and_transform() -> None:
    """The repr shows length, storage with its reason, and the transform."""
    with cached(Images(4), transform=v1.Compose([v1.Resize((4, 4)), v1.ToTensor()])) as dataset:
        text = repr(dataset)
    head = "Dataset CachedDataset\n    Number of datapoints: 4\n    Storage: "
    assert text.startswith(f"{head}storage='shared': 192 B of ")
    assert "\n    Transform: Compose(\n" in text
    assert "Resize(size=(4, 4)" in text
    assert repr(dataset).startswith(f"{head}closed\n")
    with cached(Images(4), storage="none", target_transform=str) as dataset:
        assert repr(dataset).endswith("\n    Target transform: <class 'str'>")


def test_without_a_compiled_core_steps_run_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples equal torchvision's, one by one, from memory, and report and plan say what is missing."""
    monkeypatch.setattr("fastdata.pixels.core.library.obstacle", lambda: "there is no library")
    images = [(Image.new("RGB", (8, 6), (index, 2 * index, 7)), index) for index in range(5)]
    steps = v1.Compose([v1.Pad(1), v1.RandomHorizontalFlip(), v1.ToTensor()])
    with CachedDataset(images, transform=steps, storage="shared") as dataset:
        loader = DataLoader(dataset, batch_size=5)
        ((batch, labels),) = loader
        assert "there is no library" in loader.report().path
        assert "there is no library" in str(dataset.plan)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(batch, torch.stack([v1.ToTensor()(v1.Pad(1)(image)) for image, _ in images]))


@pytest.mark.parametrize("modes", [["L", "RGB"], ["RGB", "L"], ["RGB", "RGBA"]], ids="-".join)
def test_images_of_several_modes_are_converted_each(modes: list[str]) -> None:
    """A conversion to RGB is not a batch op if some images need it and others do not."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 9, 3), np.uint8)
    samples = [(Image.fromarray(pixels).convert(mode), n) for n, mode in enumerate(modes)]
    transform = v1.Compose(
        [v1.RandomResizedCrop((8, 9), (1, 1), (1.125, 1.125)), v2.RGB(), v1.PILToTensor()]
    )
    with cached(samples, transform=transform) as dataset:
        for image, (wanted, _) in zip(dataset, samples, strict=True):
            assert torch.equal(image[0], v1.functional.pil_to_tensor(wanted.convert("RGB")))


def test_a_copy_is_a_separate_view() -> None:
    """``copy.copy`` gives a second dataset over the same store, which still works after the first is closed."""
    with cached(Images()) as dataset:
        other = copy.copy(dataset)
        other.transform = v1.PILToTensor()
        assert isinstance(other[1][0], torch.Tensor)
        other.close()
        assert isinstance(dataset[1][0], Image.Image)


def test_an_image_that_cannot_be_served_is_named() -> None:
    """If a step leaves no pixel of an image, the error has its index and shape."""
    samples = [Images()[0], (Image.new("RGB", (300, 1)), 1)]
    transform = v1.Compose(
        [v1.RandomHorizontalFlip(), v1.Resize(32, max_size=60), v1.PILToTensor()]
    )
    words = r"sample 1, of shape \(3, 1, 300\), cannot be transformed in a batch: a step would leave no pixel of it"
    with cached(samples, transform=transform) as dataset, pytest.raises(ValueError, match=words):
        dataset[1]


def test_advice_is_not_worth_an_error(image_folder: Any) -> None:
    """An image that is smaller than the crop is an error when it is read, not when the dataset is made."""
    root = image_folder(("a",), 24, (300, 280))
    Image.new("RGB", (3, 3)).save(sorted((root / "a").iterdir())[3])
    with ImageFolder(
        root,
        v1.RandomCrop(4),
        storage="shared",
    ).prepare() as dataset:
        assert len(dataset) == 24


def test_what_did_not_fit_is_kept_once_a_smaller_transform_comes() -> None:
    """If samples did not fit, ``storage="auto"`` decides again for a transform with other first steps."""
    noise = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
    items = [(Image.fromarray(pixels), index) for index, pixels in enumerate(noise)]
    with pytest.warns(FastDataWarning, match="Every epoch decodes again"):
        dataset = CachedDataset(items, memory_limit=8000, prepare_workers=1)
    with dataset:
        assert dataset.storage == "none"
        dataset.transform = v1.RandomHorizontalFlip(1.0)
        assert dataset.storage == "none"
        dataset.transform = v1.Compose([v1.CenterCrop(16), v1.PILToTensor()])
        assert dataset.storage == "shared"
        assert np.array_equal(dataset[4][0].permute(1, 2, 0), noise[4, 8:24, 8:24])


@pytest.mark.parametrize(("memory_limit", "is_kept"), [(None, True), (200, False)])
def test_a_store_is_dropped_before_samples_are_prepared_again(
    memory_limit: int | None, is_kept: bool
) -> None:
    """Two stores are in memory at once only if there is room for both."""
    stores: list[Any] = []
    left: list[bool] = []

    def note(image: torch.Tensor) -> torch.Tensor:
        left.extend(store() is not None for store in stores)
        return image

    items = level_samples(4, (3, 8, 8))
    with CachedDataset(
        items,
        prepare=note,
        transform=v1.CenterCrop(4),
        prepare_workers=1,
        memory_limit=memory_limit,
    ) as dataset:
        assert dataset.reader().kept is not None
        stores.append(weakref.ref(dataset.reader().kept.images))
        dataset.transform = v1.CenterCrop(2)
        assert dataset[3][0].shape == (3, 2, 2)
        assert left[0]  # where a few samples are looked at
        assert left[-1] is is_kept


def test_a_reader_is_frozen() -> None:
    """A transform that is assigned, or changed in place, affects only later readers."""
    with CachedDataset(level_samples(4, (1, 4, 4))) as dataset:
        dataset.transform = crop = v2.RandomCrop(2)
        reader = dataset.reader()
        crop.size = (3, 3)
        later = dataset.reader()
        dataset.transform = v2.RandomCrop(1)
        for each, side in ((reader, 2), (later, 3), (dataset.reader(), 1)):
            images, targets = each(
                IndexBatch.of([3, 1], np.array([3, 1]), np.zeros(2, np.int64), 0)
            )
            assert images.shape == (2, 1, side, side)
            assert targets.tolist() == images[:, 0, 0, 0].tolist() == [3, 1]
        del reader, later, each
    with pytest.raises(StoreGoneError):
        dataset.reader()


def test_a_target_that_equals_another_counts_as_changed() -> None:
    """A collate function that turns class numbers into floats gets a batch of floats."""
    images = level_samples(4, (3, 2, 2))

    def to_floats(samples: Any) -> Any:
        samples[:] = [(image, float(target)) for image, target in samples]
        return default_collate(samples)

    with cached(images) as dataset:
        [(_, targets)] = DataLoader(dataset, batch_size=4, collate_fn=to_floats)
    assert targets.dtype == torch.float64
