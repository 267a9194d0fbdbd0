"""Rules that all batches follow: a subclass's own methods, and changes after a dataset was made."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, ConcatDataset, SequentialSampler, Subset
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from conftest import FolderMaker
from fastdata import CachedDataset, ChunkedLoader, CudaPrefetcher, DataLoader, ImageFolder, Views
from fastdata.errors import StoreGoneError
from fastdata.pixels import program

LENGTH, SHAPE = 11, (3, 8, 6)
NORM = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
CROP = [v1.RandomCrop((7, 5), padding=1), v1.RandomHorizontalFlip()]
LOADERS: dict[str, Callable[..., Any]] = {
    "inline": lambda data: DataLoader(data, batch_size=4),
    "threads": lambda data: DataLoader(data, batch_size=4, num_workers=2, workers="thread"),
    "processes": lambda data: DataLoader(data, batch_size=4, num_workers=2),
    "torch, inline": lambda data: TorchLoader(data, batch_size=4),
    "torch, processes": lambda data: TorchLoader(data, batch_size=4, num_workers=2),
    "prefetched": lambda data: CudaPrefetcher(DataLoader(data, batch_size=4, num_workers=1)),
}
EVERY_LOADER = pytest.mark.parametrize("loader_of", LOADERS.values(), ids=LOADERS)


def samples(length: int = LENGTH) -> list[tuple[torch.Tensor, int]]:
    """Return samples whose image i is random and different, and whose target is i."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=generator), i)
        for i in range(length)
    ]


def cached(kind: type[CachedDataset] = CachedDataset, *steps: Any, **options: Any) -> Any:
    options = {"seed": 0, **options}
    return kind(samples(), transform=v1.Compose(list(steps)) if steps else None, **options)


def chunked(data: Any) -> ChunkedLoader:
    return ChunkedLoader(
        data, 4, memory_limit="64GiB", chunk_samples=8, num_workers=1, shuffle=False
    )


def epoch_of(loader: Any) -> list[torch.Tensor]:
    """Return each part of all samples of an epoch."""
    columns = zip(*loader, strict=True)
    return [torch.cat([torch.as_tensor(part) for part in column]) for column in columns]


class Numbered(CachedDataset):
    """Returns the index too, as many training scripts need."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return 255 - image, -target, index


# Methods of a subclass's own


@EVERY_LOADER
@pytest.mark.parametrize("storage", ["shared", "none"])
def test_batches_are_made_of_an_own_getitem(loader_of: Callable[..., Any], storage: str) -> None:
    """A subclass's __getitem__ makes every sample of every batch, from the samples of the dataset without it."""
    with (
        cached(Numbered, v1.CenterCrop((7, 5)), storage=storage) as own,
        cached(storage=storage) as plain,
    ):
        images, targets, numbers = epoch_of(loader_of(own))
        wanted = torch.stack([255 - v1.CenterCrop((7, 5))(plain[i][0]) for i in range(LENGTH)])
        assert torch.equal(images, wanted)
        assert (targets.tolist(), numbers.tolist()) == (
            [-i for i in range(LENGTH)],
            list(range(LENGTH)),
        )
        subset = epoch_of(loader_of(Subset(own, [5, 2])))
        assert torch.equal(subset[0], wanted[[5, 2]])
        assert subset[2].tolist() == [5, 2]


@pytest.mark.parametrize("storage", ["shared", "disk"])
def test_chunks_are_served_through_an_own_getitem(storage: str, tmp_path: Any) -> None:
    """The chunked loader's batches equal the DataLoader's, with the own __getitem__ and random draws."""
    kept = {"cache_dir": tmp_path, "cache_key": "x"} if storage == "disk" else {"storage": storage}
    with (
        cached(Numbered, *CROP, **kept) as own,
        cached(Numbered, *CROP) as other,
        chunked(own) as loader,
    ):
        plain = DataLoader(other, batch_size=4)
        for epoch in (2, 0):
            loader.set_epoch(epoch)
            plain.set_epoch(epoch)
            found, wanted = epoch_of(loader), epoch_of(plain)
            assert all(
                torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True)
            )
        assert "Numbered has a __getitem__ of its own" in loader.report().path


def test_an_own_getitem_draws_as_the_dataset_without_it() -> None:
    """With any engine, crops under a subclass's __getitem__ equal those of the plain dataset in the same epoch."""
    with cached(Numbered, *CROP) as own, cached(CachedDataset, *CROP) as plain:
        for epoch in (0, 5):
            wanted = DataLoader(plain, batch_size=4)
            wanted.set_epoch(epoch)
            images, _ = epoch_of(wanted)
            for name in ("inline", "threads", "processes"):
                loader = LOADERS[name](own)
                loader.set_epoch(epoch)
                assert torch.equal(255 - epoch_of(loader)[0], images)


class TwoCrops(CachedDataset):
    """Two views of each image, and one of its neighbour."""

    def __getitem__(self, index: int) -> Any:
        neighbour = (index + 1) % len(self)
        return (
            super().__getitem__(index)[0],
            super().__getitem__(index)[0],
            super().__getitem__(neighbour)[0],
        )


def test_further_reads_of_an_own_getitem_have_new_draws() -> None:
    """Two reads of one image in an item are two crops, and every engine makes the same ones."""
    with cached(TwoCrops, v1.RandomCrop((3, 2))) as own:
        epochs = []
        for name in ("inline", "threads", "processes"):
            loader = LOADERS[name](own)
            loader.set_epoch(3)
            epochs.append(epoch_of(loader))
        first, second, neighbour = epochs[0]
        assert sum(map(torch.equal, first, second)) < LENGTH / 2
        assert sum(map(torch.equal, first.roll(-1, 0), neighbour)) < LENGTH / 2
        assert all(
            torch.equal(a, b) for other in epochs[1:] for a, b in zip(epochs[0], other, strict=True)
        )


class Listed(CachedDataset):
    """Returns the index too, for whole batches."""

    def __getitems__(self, indices: Any) -> Any:
        return [
            (255 - image, -target, i)
            for i, (image, target) in zip(indices, super().__getitems__(indices), strict=True)
        ]


@pytest.mark.parametrize("kind", [Numbered, Listed])
@pytest.mark.parametrize("name", ["inline", "threads", "processes"])
def test_own_methods_behind_a_subset_draw_as_the_dataset_without_them(
    name: str, kind: type[CachedDataset]
) -> None:
    """They get indices of the dataset and the epoch's draws; an own __getitem__ only with seed=."""
    chosen = [5, 2, -1, 5]
    for seed in (0, None) if kind is Listed else (0,):
        with (
            cached(kind, *CROP, seed=seed) as own,
            cached(CachedDataset, *CROP, seed=seed) as plain,
        ):
            epochs = []
            for data in (plain, own, own):
                torch.manual_seed(len(epochs) // 2)
                loader = LOADERS[name](Subset(data, chosen))
                loader.set_epoch(7)
                epochs.append(epoch_of(loader))
            assert torch.equal(255 - epochs[1][0], epochs[0][0])
            assert torch.equal(epochs[2][0], epochs[1][0]) == (seed == 0)
            assert epochs[1][1].tolist() == [-5, -2, -10, -5]
            assert epochs[1][2].tolist() == [5, 2, LENGTH - 1, 5]


def test_a_batch_that_an_own_method_changes_is_read_as_changed() -> None:
    """An own __getitems__ may sort, shorten or replace the indices, and gets those samples."""

    class Sorted(CachedDataset):
        def __getitems__(self, indices: Any) -> Any:
            indices.sort(reverse=True)
            indices.pop()
            return super().__getitems__(indices)

    with cached(Sorted, *CROP) as own:
        for name in ("inline", "threads", "processes"):
            assert epoch_of(LOADERS[name](own))[1].tolist() == [3, 2, 1, 7, 6, 5, 10, 9]


def test_the_report_names_the_own_method() -> None:
    """report() names the method that prevents whole batches, with any engine."""

    class Whole(CachedDataset):
        def __getitems__(self, indices: Any) -> Any:
            return [(image, -target) for image, target in super().__getitems__(indices)]

    with cached(Numbered) as numbered, cached(Whole) as whole:
        for workers in ("auto", "thread"):
            loader = DataLoader(numbered, num_workers=1, workers=workers)
            assert "Numbered has a __getitem__ of its own" in loader.report().path
        loader = DataLoader(whole, batch_size=4)
        assert epoch_of(loader)[1].tolist() == [-i for i in range(LENGTH)]
        assert "Whole has a __getitems__ of its own" in loader.report().path
        with chunked(whole) as chunks:
            assert epoch_of(chunks)[1].tolist() == [-i for i in range(LENGTH)]


class Shorter(CachedDataset):
    def __len__(self) -> int:
        return 5


class Repeated(CachedDataset):
    """Every sample comes three times in an epoch."""

    times = 3

    def __len__(self) -> int:
        return self.times * super().__len__()

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % super().__len__())


@EVERY_LOADER
def test_an_own_length_is_obeyed(loader_of: Callable[..., Any]) -> None:
    """A shorter __len__ ends the epoch earlier; a longer one with its own __getitem__ repeats samples."""
    with cached(Shorter) as shorter, cached(Repeated, v1.RandomCrop((3, 2))) as repeated:
        assert epoch_of(loader_of(shorter))[1].tolist() == [0, 1, 2, 3, 4]
        images, targets = epoch_of(loader_of(repeated))
        assert targets.tolist() == [*range(LENGTH)] * 3
        assert sum(map(torch.equal, images[:LENGTH], images[LENGTH : 2 * LENGTH])) < LENGTH / 2


def test_a_length_that_only_counts_more_raises() -> None:
    """Without a __getitem__ for the additional indices, they are an IndexError, and no other memory is read."""

    class Longer(CachedDataset):
        def __len__(self) -> int:
            return 20

    class LongerStill(Longer):
        def __getitems__(self, indices: Any) -> Any:
            return super().__getitems__(indices)

    for kind in (Longer, LongerStill):
        with cached(kind) as longer:
            with pytest.raises(IndexError, match="out of range for a dataset of 11 samples"):
                list(DataLoader(longer, batch_size=20))
            with pytest.raises(IndexError):
                longer[11]
    with cached(Shorter) as shorter, chunked(shorter) as loader:
        assert epoch_of(loader)[1].tolist() == [0, 1, 2, 3, 4]
    with cached(Repeated) as repeated, chunked(repeated) as loader:
        assert epoch_of(loader)[1].tolist() == [*range(LENGTH)] * 3


@pytest.mark.parametrize("name", ["inline", "processes"])
def test_an_own_getitem_may_take_any_index(name: str) -> None:
    """A subclass's __getitem__ gets a sampler's items unchanged, such as pairs of number and size."""

    class Sized(CachedDataset):
        def __getitem__(self, index: Any) -> Any:
            number, size = index
            return super().__getitem__(number)[0][:, :size], size

    pairs = [(i, 3 + i // 4) for i in range(8)]
    with cached(Sized) as own:
        sampler = BatchSampler(SequentialSampler(pairs), 4, drop_last=False)
        batches = [[pairs[i] for i in batch] for batch in sampler]
        loader = DataLoader(own, batch_sampler=batches, num_workers=2 * (name == "processes"))
        assert [tuple(images.shape) for images, _ in loader] == [(4, 3, 3, 6), (4, 3, 4, 6)]
        loader = DataLoader(Subset(own, pairs), batch_size=4, num_workers=2 * (name == "processes"))
        assert [tuple(images.shape) for images, _ in loader] == [(4, 3, 3, 6), (4, 3, 4, 6)]


@pytest.mark.parametrize("wrong", [1.0, "1", None, (1, 2)])
def test_an_index_that_is_no_whole_number_raises_torchs_error(wrong: Any) -> None:
    """A float or a string, alone, in a batch or in a Subset, is a TypeError and never rounded."""
    with cached() as dataset:
        for read in (dataset.__getitem__, lambda index: dataset.__getitems__([0, index])):
            with pytest.raises(TypeError):
                read(wrong)
        for arguments in ((dataset, [0, wrong]), (Subset(dataset, [0, wrong]), [0, 1])):
            with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
                list(DataLoader(arguments[0], batch_size=2, sampler=arguments[1]))
        assert [
            target for _, target in dataset.__getitems__([np.int32(3), torch.tensor(1), True])
        ] == [3, 1, 1]


@EVERY_LOADER
def test_a_target_transform_set_later_is_obeyed(loader_of: Callable[..., Any]) -> None:
    """The next epoch of the same loader has the new targets."""
    with cached() as dataset, chunked(dataset) as chunks:
        for loader in (loader_of(dataset), chunks):
            dataset.target_transform = None
            assert epoch_of(loader)[1].tolist() == list(range(LENGTH))
            dataset.target_transform = _tenfold
            assert epoch_of(loader)[1].tolist() == [10 * i for i in range(LENGTH)]


def _tenfold(target: int) -> int:
    return 10 * target


# Changes in place


@EVERY_LOADER
def test_a_step_changed_in_place_counts_from_the_next_epoch(loader_of: Callable[..., Any]) -> None:
    """The next epoch uses another probability, an added step, and another list of steps."""
    with cached(CachedDataset, v1.RandomHorizontalFlip(0.0)) as dataset, chunked(dataset) as chunks:
        steps = dataset.transform.transforms
        stored = torch.stack([image for image, _ in samples()])
        for loader in (loader_of(dataset), chunks):
            steps[:] = [v1.RandomHorizontalFlip(0.0)]
            assert torch.equal(epoch_of(loader)[0], stored)
            steps[0].p = 1.0
            assert torch.equal(epoch_of(loader)[0], stored.flip(-1))
            steps.append(v1.RandomVerticalFlip(1.0))
            assert torch.equal(epoch_of(loader)[0], stored.flip(-1).flip(-2))
            steps.append(v1.CenterCrop((4, 2)))
            assert torch.equal(epoch_of(loader)[0], stored.flip(-1).flip(-2)[:, :, 2:6, 2:4])
            steps[:] = [v1.Lambda(lambda image: image // 2)]
            assert torch.equal(epoch_of(loader)[0], stored // 2)
            assert type(loader) is TorchLoader or "works per sample: Lambda" in str(loader.report())


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: v1.Normalize([0.5] * 3, [0.5] * 3), lambda step: step.mean.__setitem__(0, 0.25)),
        (lambda: v1.Normalize([0.5] * 3, torch.full((3,), 0.5)), lambda step: step.std.mul_(2)),
        (lambda: v1.Normalize(np.full(3, 0.5), [0.5] * 3), lambda step: step.mean.fill(0.25)),
        (lambda: v2.Normalize([0.5] * 3, [0.5] * 3), lambda step: setattr(step, "mean", [0.1] * 3)),
    ],
    ids=["list", "tensor", "array", "attribute"],
)
def test_arguments_changed_in_place_are_noticed(
    make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    """Batches and single samples use a changed value inside a list, a tensor or an array of a step."""
    with cached(CachedDataset, v1.ConvertImageDtype(torch.float32), make()) as dataset:
        before = dataset[3][0]
        change(dataset.transform.transforms[1])
        wanted = dataset.transform(samples()[3][0])
        assert not torch.allclose(before, wanted)
        torch.testing.assert_close(dataset[3][0], wanted)
        torch.testing.assert_close(epoch_of(DataLoader(dataset, batch_size=4))[0][3], wanted)
        torch.testing.assert_close(epoch_of(TorchLoader(dataset, batch_size=4))[0][3], wanted)


def hooked(step: Any) -> Any:
    step.register_forward_hook(lambda module, given, made: made // 2)
    return step


def shadowed(step: Any, **methods: Any) -> Any:
    vars(step).update(methods)
    return step


class Flips(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flip = v2.RandomVerticalFlip(1.0)

    def __call__(self, image: Any) -> Any:
        return super().__call__(image) // 2

    def forward(self, image: Any) -> Any:
        return self.flip(image)


class MoreFlips(Flips):
    """Inherits a step, and does more than to call it."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: hooked(v1.RandomVerticalFlip(1.0)),
        lambda: hooked(v2.RandomVerticalFlip(1.0)),
        lambda: hooked(v2.Compose([v2.RandomVerticalFlip(1.0)])),
        lambda: hooked(torch.nn.Sequential(v1.RandomVerticalFlip(1.0))),
        lambda: hooked(v2.CenterCrop((4, 6))),
        lambda: shadowed(v1.RandomVerticalFlip(1.0), forward=lambda image: image // 2),
        lambda: shadowed(v2.RandomVerticalFlip(1.0), transform=lambda image, params: image // 2),
        lambda: v1.RandomApply(
            [shadowed(v1.RandomInvert(1.0), forward=lambda image: image // 2)], 1.0
        ),
        lambda: MoreFlips(),
        lambda: shadowed(v2.Pad(1, fill={torch.Tensor: 10, "others": 200}), fill=90),
    ],
)
def test_a_step_changed_on_its_object_is_run_as_it_is(make: Callable[[], Any]) -> None:
    """A method or hook of an object, and code that its class runs around ``forward``, are always run."""
    image = samples()[3][0]
    with cached(CachedDataset, make()) as dataset:
        assert torch.equal(dataset[3][0], dataset.transform(image))
        assert torch.equal(
            epoch_of(DataLoader(dataset, batch_size=4))[0][3], dataset.transform(image)
        )


def test_a_hook_added_later_is_noticed() -> None:
    """It counts from the next epoch, and so does its removal."""
    with cached(CachedDataset, v2.RandomVerticalFlip(1.0)) as dataset:
        flipped = samples()[3][0].flip(-2)
        assert torch.equal(dataset[3][0], flipped)
        hook = dataset.transform.transforms[0].register_forward_hook(
            lambda module, given, made: made // 2
        )
        assert torch.equal(dataset[3][0], flipped // 2)
        hook.remove()
        assert torch.equal(dataset[3][0], flipped)


@pytest.mark.parametrize("api", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    "within",
    [
        lambda api, step: api.RandomApply([step], 1.0),
        lambda api, step: api.RandomApply(torch.nn.ModuleList([step]), 1.0),
        lambda api, step: api.RandomChoice([step]),
        lambda api, step: api.RandomOrder([step]),
        lambda api, step: api.RandomOrder(
            [api.Compose([api.RandomApply([api.Compose([step])], 1.0)])]
        ),
    ],
    ids=["RandomApply", "ModuleList", "RandomChoice", "RandomOrder", "nested"],
)
def test_a_change_in_place_within_another_step_is_noticed(
    within: Callable[[Any, Any], Any], api: Any
) -> None:
    """The next epoch uses a changed value of a step inside others, at any depth."""
    step = api.RandomVerticalFlip(0.0)
    with cached(CachedDataset, within(api, step)) as dataset:
        image = samples()[3][0]
        assert torch.equal(epoch_of(DataLoader(dataset, batch_size=4))[0][3], image)
        step.p = 1.0
        assert torch.equal(epoch_of(DataLoader(dataset, batch_size=4))[0][3], image.flip(-2))
        assert torch.equal(dataset[3][0], image.flip(-2))


class Turning:
    """Calls a step that is stored elsewhere, as in training with several stages."""

    turn: Any

    def method(self, image: Any) -> Any:
        return self.turn(image)


def _closure() -> tuple[Any, Callable[[Any], None]]:
    turn = v2.RandomVerticalFlip(0.0)

    def change(step: Any) -> None:
        nonlocal turn
        turn = step

    return lambda image: turn(image), change


def _method() -> tuple[Any, Callable[[Any], None]]:
    owner = Turning()
    owner.turn = v2.RandomVerticalFlip(0.0)
    return owner.method, lambda step: setattr(owner, "turn", step)


def _global() -> tuple[Any, Callable[[Any], None]]:
    space: dict[str, Any] = {"steps": [v2.RandomVerticalFlip(0.0)]}
    exec("def run(image):\n for step in steps: image = step(image)\n return image", space)
    return v2.Compose([v2.Lambda(space["run"])]), lambda step: space["steps"].append(step)


@pytest.mark.parametrize("make", [_closure, _method, _global])
def test_a_step_that_a_function_reads_elsewhere_is_the_one_that_is_there_now(
    make: Callable[[], Any],
) -> None:
    """In each epoch, a function, method or lambda uses the present step from outside of it."""
    transform, change = make()
    with cached(CachedDataset, transform) as dataset:
        image = samples()[3][0]
        loader = DataLoader(dataset, batch_size=4)
        assert torch.equal(epoch_of(loader)[0][3], image)
        change(v2.RandomVerticalFlip(1.0))
        assert torch.equal(epoch_of(loader)[0][3], image.flip(-2))
        assert torch.equal(dataset[3][0], image.flip(-2))


def test_a_preset_changed_in_place_is_noticed() -> None:
    """The next epoch uses changed attributes of ``weights.transforms()``."""
    preset = ImageClassification(crop_size=3, resize_size=4, mean=(0.0,) * 3, std=(1.0,) * 3)
    images = [(Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)), 0)] * 4
    with CachedDataset(images, transform=preset) as dataset:
        loader = DataLoader(dataset, batch_size=4)
        assert torch.equal(epoch_of(loader)[0][3], preset(images[3][0]))
        preset.mean = [0.1, 0.2, 0.3]
        assert torch.equal(epoch_of(loader)[0][3], preset(images[3][0]))
        assert torch.equal(dataset[3][0], preset(images[3][0]))


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_a_change_in_place_behind_an_unknown_step_is_noticed(storage: str) -> None:
    """Changed known steps after an unknown one run on whole batches with their new values."""

    class Own:
        def __call__(self, image: Any) -> Any:
            return image.copy() if image else image

        def __repr__(self) -> str:
            raise AttributeError("a step that cannot show itself is served, too")

    flip = v1.RandomVerticalFlip(0.0)
    steps = v1.Compose([Own(), flip, v1.PILToTensor()])
    images = [(Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)), 0)] * 4
    with CachedDataset(images, transform=steps, storage=storage) as dataset:
        assert dataset.plan.last is not None
        before = dataset[0][0]
        flip.p = 1.0
        [(served, _)] = DataLoader(dataset, batch_size=4)
        assert torch.equal(served[3], before.flip(-2))
        assert torch.equal(dataset[3][0], before.flip(-2))


def test_stored_steps_changed_in_place_are_refused() -> None:
    """Changing a step after which samples are stored is an error for every reader; undoing it ends the error."""
    with cached(CachedDataset, v1.CenterCrop((4, 6)), v1.RandomHorizontalFlip(1.0)) as dataset:
        steps = dataset.transform.transforms
        steps[0].size = (2, 2)
        reads = [
            lambda: dataset[0],
            lambda: iter(DataLoader(dataset)),
            lambda: next(iter(TorchLoader(dataset))),
            lambda: next(iter(TorchLoader(dataset, num_workers=1))),
            lambda: iter(CudaPrefetcher(DataLoader(dataset))),
            lambda: chunked(dataset),
            lambda: pickle.dumps(dataset),
        ]
        for read in reads:
            with pytest.raises(
                ValueError,
                match=r"stored after .*CenterCrop.*4, 6.* now begins with .*2, 2.*assign another transform",
            ):
                read()
        steps[0].size = (4, 6)
        steps.insert(1, v1.Pad(1))
        assert dataset[0][0].shape == (3, 6, 8)
        steps.pop(0)
        with pytest.raises(ValueError, match="now begins with"):
            dataset[0]


def test_steps_of_samples_that_are_not_stored_may_change() -> None:
    """The next epoch of any loader uses the changed steps."""
    with (
        cached(CachedDataset, v1.CenterCrop((4, 6)), storage="none") as dataset,
        chunked(dataset) as loader,
    ):
        assert epoch_of(loader)[0].shape == (LENGTH, 3, 4, 6)
        dataset.transform.transforms.append(v1.CenterCrop(2))
        assert epoch_of(loader)[0].shape == (LENGTH, 3, 2, 2)
        assert epoch_of(DataLoader(dataset, batch_size=4))[0].shape == (LENGTH, 3, 2, 2)


def threaded(data: Any) -> DataLoader:
    return DataLoader(data, batch_size=4, num_workers=2, workers="thread")


def prefetched(data: Any) -> CudaPrefetcher:
    return CudaPrefetcher(threaded(data), device="cpu")


def inline(data: Any) -> DataLoader:
    return DataLoader(data, batch_size=4)


def of_two(data: Any) -> DataLoader:
    return threaded(ConcatDataset([data, Subset(data, [0, 1])]))


EPOCHS = pytest.mark.parametrize("loader_of", [inline, threaded, prefetched, of_two, chunked])


@EPOCHS
@pytest.mark.parametrize("storage", ["shared", "none"])
@pytest.mark.parametrize("step", [v1.Lambda(lambda image: image // 2), v1.CenterCrop((2, 4))])
@pytest.mark.parametrize("first", [v1.CenterCrop((4, 3)), v1.Lambda(lambda image: image + 1)])
def test_an_epoch_serves_the_transform_that_it_began_with(
    first: Any, step: Any, storage: str, loader_of: Callable[..., Any]
) -> None:
    """A transform that is assigned during an epoch, also of another shape, counts from the next one."""
    with cached(CachedDataset, first, storage=storage) as dataset:
        loader = loader_of(dataset)
        wanted = {label: first(image) for image, label in samples()}
        batches = iter(loader)
        images, labels = next(batches)
        dataset.transform = step
        for images, labels in batches:
            assert torch.equal(images, torch.stack([wanted[label] for label in labels.tolist()]))
        wanted = {label: step(image) for image, label in samples()}
        for images, labels in loader:
            assert torch.equal(images, torch.stack([wanted[label] for label in labels.tolist()]))


@EPOCHS
@pytest.mark.parametrize("storage", ["shared", "compressed", "none"])
def test_closing_a_dataset_ends_its_epochs(storage: str, loader_of: Callable[..., Any]) -> None:
    """The next batch is a StoreGoneError; earlier batches stay valid."""
    with cached(CachedDataset, v1.RandomCrop((4, 3)), storage=storage) as dataset:
        loader = loader_of(dataset)
        batches = iter(loader)
        images, _ = next(batches)
        before = images.clone()
    with pytest.raises(StoreGoneError, match="the dataset was closed"):
        list(batches)
    assert torch.equal(images, before)
    with pytest.raises(StoreGoneError, match="the dataset was closed"):
        iter(loader)


@pytest.mark.parametrize("storage", ["shared", "disk"])
def test_a_batch_that_is_being_read_keeps_its_samples(
    storage: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset that is closed while the core reads frees its memory after that batch, and not before."""
    serve, mapped = program.serve, "memfd:fastdata" if storage == "shared" else str(tmp_path)
    kept_on_disk = {"cache_dir": tmp_path, "cache_key": "samples"} if storage == "disk" else {}
    before = Path("/proc/self/maps").read_text().count(mapped)
    dataset = cached(CachedDataset, v1.RandomHorizontalFlip(1.0), **kept_on_disk)
    iterator = iter(DataLoader(dataset, batch_size=4))

    def close_and_serve(*arguments: Any, **options: Any) -> None:
        dataset.close()
        gc.collect()
        serve(*arguments, **options)

    monkeypatch.setattr(program, "serve", close_and_serve)
    images, _ = next(iterator)
    assert torch.equal(images, torch.stack([image.flip(-1) for image, _ in samples()[:4]]))
    assert Path("/proc/self/maps").read_text().count(mapped) == before


# Several views of an image

HALF = v1.Compose([v1.RandomCrop((4, 3)), v1.ConvertImageDtype(torch.float32)])
SMALL = v1.Compose([v1.CenterCrop(6), v1.ToTensor()])
VIEWS = Views(
    v1.Compose([v1.RandomResizedCrop((7, 5), antialias=True), v1.RandomInvert()]), *[HALF] * 2
)


def views_of(loader: Any) -> list[torch.Tensor]:
    """Return each view of all samples of an epoch."""
    batches = [images for images, _ in loader]
    assert {type(views) for views in batches} == {list}
    return [torch.cat(view) for view in zip(*batches, strict=True)]


@EVERY_LOADER
@pytest.mark.parametrize("storage", ["shared", "compressed"])
def test_views_are_whole_batches_of_their_own(loader_of: Callable[..., Any], storage: str) -> None:
    """With any engine each view is one tensor with its own shape and dtype, and has its own draws."""
    with cached(storage=storage).with_transform(VIEWS) as dataset:
        assert dataset.reader().obstacle is None
        dataset.set_epoch(0)
        views = views_of(loader_of(dataset))
        assert [(view.shape, view.dtype) for view in views] == [
            ((LENGTH, 3, 7, 5), torch.uint8),
            *[((LENGTH, 3, 4, 3), torch.float32)] * 2,
        ]
        assert not torch.equal(views[1], views[2])
        dataset.set_epoch(0)
        alone = [dataset[i][0] for i in range(LENGTH)]
        assert all(
            torch.equal(torch.stack(each), view)
            for each, view in zip(zip(*alone, strict=True), views, strict=True)
        )
        with dataset.with_transform(VIEWS.transforms[0]) as first:
            assert torch.equal(epoch_of(loader_of(first))[0], views[0])


class Crops:
    """MoCo's two crops, as its users write them."""

    def __init__(self, base_transform: Any) -> None:
        self.base_transform = base_transform

    def __call__(self, image: Any) -> Any:
        q = self.base_transform(image)
        k = self.base_transform(image)
        return [q, k]


@pytest.mark.parametrize(
    ("transform", "kind"),
    [
        (Crops(HALF), list),
        (lambda image: (HALF(image), HALF(image)), tuple),
        (v1.Compose([v1.Pad(1), Views(HALF, HALF)]), list),
    ],
)
def test_callables_that_return_several_crops_are_read_as_views(transform: Any, kind: type) -> None:
    """Two calls in one list or tuple, and views after shared steps, are read as Views of these."""
    with (
        cached().with_transform(transform) as dataset,
        cached(batch_ops=False).with_transform(transform) as plain,
    ):
        assert dataset.reader().obstacle is None
        assert plain.reader().obstacle is not None
        assert type(dataset[0][0]) is type(plain[0][0]) is kind
        assert [view.shape for view in views_of(DataLoader(dataset, batch_size=4))] == [
            (LENGTH, 3, 4, 3)
        ] * 2


def halve(image: Any) -> Any:
    return image.point(lambda level: level // 2)


FLIP, OTHER_FLIP = v1.RandomHorizontalFlip(1.0), v1.RandomVerticalFlip(1.0)
HALVED = v1.Compose([FLIP, halve, OTHER_FLIP, v1.ToTensor()])
FLIPPED = v1.Compose([FLIP, v1.ToTensor()])
SPLIT = {
    "one view": Views(HALVED, FLIPPED),
    "both": Crops(v1.Compose([FLIP, v1.RandomApply([halve], 1.0), OTHER_FLIP, v1.ToTensor()])),
    "a tuple": lambda image: (HALVED(image), FLIPPED(image)),
    "at the end": Views(
        v1.Compose([FLIP, v1.ToTensor(), lambda image: image / 2]),
        v1.Compose([FLIP, v1.ToTensor()]),
    ),
    "PIL images": Views(FLIP, v1.Compose([OTHER_FLIP, halve])),
}


@EVERY_LOADER
@pytest.mark.parametrize("storage", ["shared", "none"])
@pytest.mark.parametrize("name", SPLIT)
def test_views_with_a_step_that_is_not_known(
    name: str, storage: str, loader_of: Callable[..., Any]
) -> None:
    """Steps before and after an unknown one run on whole batches, and each view has the result of its own steps."""
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image, _ in samples()]
    pairs, transform = [(image, k) for k, image in enumerate(images)], SPLIT[name]
    if name == "PIL images":
        loader_of = partial(TorchLoader, batch_size=4, collate_fn=list)
    with CachedDataset(pairs, transform=transform, storage=storage, seed=0) as dataset:
        batches = list(loader_of(dataset))
        if name == "PIL images":
            views = [(k, each) for batch in batches for each, k in batch]
        else:
            views = [
                (k, each)
                for batch, labels in batches
                for k, *each in zip(labels.tolist(), *batch, strict=True)
            ]
        for k, each in [*views, (3, dataset[3][0])]:
            wanted = transform(images[k])
            assert all(
                np.array_equal(mine, theirs) for mine, theirs in zip(each, wanted, strict=True)
            )
        assert type(dataset[3][0]) is type(wanted)


def test_known_steps_around_one_that_is_not_give_whole_batches() -> None:
    """The core runs all known steps around a published blur, and at the end of each view."""
    image = Image.fromarray(samples()[0][0].permute(1, 2, 0).numpy())
    with CachedDataset([(image, 0)] * 4, transform=SPLIT["both"]) as dataset:
        first, second = (views for views, _ in dataset.__getitems__([0, 1]))
        for mine, other in zip(first, second, strict=True):  # of one batch's memory
            assert mine.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_encoded_samples_are_decoded_once_for_all_views() -> None:
    """The codec decodes each sample of a batch once, however many views it has."""
    decoded = []

    class Counting:
        def encode(self, array: np.ndarray) -> bytes:
            return array.tobytes()

        def decode(self, data: memoryview, out: np.ndarray) -> None:
            decoded.append(len(data))
            out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)

    with cached(storage="compressed", codec=Counting(), prepare_workers=1).with_transform(
        VIEWS
    ) as dataset:
        decoded.clear()
        dataset.__getitems__([0, 3, 5])
        assert len(decoded) == 3


def test_files_that_are_not_stored_give_whole_batches_of_views(image_folder: FolderMaker) -> None:
    """Without storage each view has the same pixels as from a store."""
    root, views = (
        image_folder(),
        Views(v1.Compose([v1.Resize(9), v1.RandomCrop(8), v1.PILToTensor()]), SMALL),
    )
    with ImageFolder(root, transform=views, storage="none", seed=0) as read:
        assert read.reader().obstacle is None
        with ImageFolder(root, transform=views, storage="shared", seed=0) as kept:
            for mine, theirs in zip(
                *(views_of(DataLoader(each, batch_size=4)) for each in (read, kept)), strict=True
            ):
                assert torch.equal(mine, theirs)


def test_an_argument_changed_in_a_view_is_noticed() -> None:
    """The steps inside views are compared before each epoch, like those of any transform."""
    with cached().with_transform(Views(v1.CenterCrop(4), v1.CenterCrop(3))) as dataset:
        dataset.transform.transforms[1].size = (2, 2)
        assert views_of(DataLoader(dataset, batch_size=4))[1].shape == (LENGTH, 3, 2, 2)


# Image and mask

MASK, NEAREST = tv_tensors.Mask, v1.InterpolationMode.NEAREST
FILLED = {MASK: 255, "others": 7}
TO_PAIR = [
    v2.ToImage(),
    v2.ToDtype({tv_tensors.Image: torch.float32, MASK: torch.int64, "others": None}, scale=True),
    v2.Normalize(NORM[0], NORM[1]),
    v2.ToPureTensor(),
]
FIXED: dict[str, Any] = {
    "CenterCrop": v2.CenterCrop((6, 25)),
    "Pad": v2.Pad((1, 2, 3, 4), fill=FILLED),
    "Pad, mirrored": v2.Pad(3, padding_mode="reflect"),
    "RandomCrop": v2.RandomCrop((26, 22), padding=(1, 2, 3, 4), fill=FILLED),
    "RandomHorizontalFlip": v2.RandomHorizontalFlip(1.0),
    "RandomVerticalFlip": v2.RandomVerticalFlip(1.0),
    "RandomResizedCrop": v2.RandomResizedCrop((11, 14), (1.0, 1.0), (18 / 20, 18 / 20)),
    "Resize": v2.Resize(23),
    "Resize, smaller": v2.Resize((7, 13), interpolation=v1.InterpolationMode.BICUBIC),
    "RandomResize": v2.RandomResize(31, 32),
    "RandomShortestSize": v2.RandomShortestSize([23], max_size=29),
    "RandomRotation": v2.RandomRotation((33, 33), v1.InterpolationMode.BILINEAR, fill=FILLED),
    "RandomAffine": v2.RandomAffine((20, 20), scale=(1.25, 1.25), shear=(5, 5, -7, -7), fill=5),
    "RandomApply": v2.RandomApply(
        [v2.RandomVerticalFlip(1.0), v2.RandomInvert(1.0), v2.Pad(1)], p=1.0
    ),
    "colours": v2.Compose(
        [v2.RandomSolarize(130, 1.0), v2.Grayscale(3), v2.RandomPosterize(3, 1.0)]
    ),
}


def pairs(
    kind: str = "pil", size: tuple[int, int] = (20, 18), length: int = 5
) -> list[tuple[Any, Any]]:
    """Return random images, PIL or tensors, and masks of 21 classes."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for _ in range(length):
        image = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)
        mask = torch.randint(0, 21, (1, *size), dtype=torch.uint8, generator=generator)
        shown: Any = (
            Image.fromarray(image.permute(1, 2, 0).numpy())
            if kind == "pil"
            else tv_tensors.Image(image)
        )
        made.append((shown, MASK(mask if kind == "pil" else mask[0])))
    return made


def paired(samples: Any, *steps: Any, **options: Any) -> CachedDataset:
    return CachedDataset(samples, transforms=v2.Compose(list(steps)), **{"seed": 0, **options})


@pytest.mark.parametrize("kind", ["pil", "tensor"])
@pytest.mark.parametrize("step", FIXED.values(), ids=FIXED)
def test_masks_move_as_torchvision_moves_them(step: Any, kind: str) -> None:
    """Without random draws, the masks and images of a batch are bit-equal to v2's."""
    with paired(pairs(kind), step, *TO_PAIR) as dataset:
        assert dataset.reader().obstacle is None
        images, masks = next(iter(DataLoader(dataset, batch_size=5)))
        wanted = [v2.Compose([step, *TO_PAIR])(*pair) for pair in pairs(kind)]
        assert masks.dtype == torch.int64
        assert torch.equal(masks, torch.stack([mask for _, mask in wanted]))
        exactly = 0 if kind == "pil" else 1 / 255 / 0.2 + 1e-5
        torch.testing.assert_close(
            images, torch.stack([image for image, _ in wanted]), rtol=0, atol=exactly
        )


EXACT = v1.InterpolationMode.NEAREST_EXACT


@pytest.mark.parametrize(
    "step",
    [
        v2.Resize(31, interpolation=EXACT),
        v2.RandomResize(31, 32, interpolation=EXACT),
        v2.RandomShortestSize(13, interpolation=EXACT),
        v2.RandomResizedCrop((11, 14), (1.0, 1.0), (18 / 20, 18 / 20), interpolation=EXACT),
        v2.RandomAffine((30, 30), scale=(0.5, 0.5), fill=128.7),
        v2.RandomSolarize(-1, 1.0),
        v2.ConvertImageDtype(torch.float32),
        v2.Compose([v2.ConvertImageDtype(torch.float64), v2.RandomVerticalFlip(1.0)]),
    ],
    ids=repr,
)
def test_rare_arguments_do_to_masks_what_they_do_in_torchvision(step: Any) -> None:
    """They have torchvision's effect, in whole batches or as written, even if v2 treats a mask like an image."""
    with paired(pairs("tensor"), step) as dataset:
        for served, pair in zip(dataset, pairs("tensor"), strict=True):
            for got, wanted in zip(served, step(*pair), strict=True):
                assert got.dtype == wanted.dtype
                assert torch.equal(got, wanted)


@EVERY_LOADER
@pytest.mark.parametrize(
    "steps",
    [
        [v2.RandomResizedCrop((9, 7), interpolation=NEAREST), v2.RandomHorizontalFlip()],
        [
            v2.RandomResize(12, 40, interpolation=NEAREST),
            v2.RandomCrop(16, pad_if_needed=True, fill=3),
        ],
        [
            v2.RandomAffine(40, (0.1, 0.3), (0.5, 1.5), 20, fill=9),
            v2.RandomPerspective(interpolation=NEAREST, fill=1),
        ],
        [
            v2.RandomOrder([v2.RandomRotation(30), v2.RandomVerticalFlip()]),
            v2.RandomApply([v2.RandomCrop((20, 18), 3)]),
        ],
        [
            v2.RandomChoice(
                [v2.RandomHorizontalFlip(1.0), v2.RandomRotation(90), v2.GaussianNoise(0.0, 0.0)]
            )
        ],
    ],
)
def test_image_and_mask_share_their_draws(steps: list[Any], loader_of: Callable[..., Any]) -> None:
    """A mask that equals its image still does after any random geometry, and a single sample equals its batch."""
    shown = [
        (tv_tensors.Image(mask.expand(3, -1, -1)), mask)
        for _, mask in pairs("tensor", length=LENGTH)
    ]
    with paired(shown, *steps) as dataset:
        dataset.set_epoch(0)
        images, masks = epoch_of(loader_of(dataset))
        assert torch.equal(images, masks[:, None].expand(-1, 3, -1, -1))
        assert not torch.equal(masks, torch.stack([mask for _, mask in shown]))
        dataset.set_epoch(0)
        image, mask = dataset[3]
        assert (type(image), type(mask)) == (tv_tensors.Image, MASK)
        assert torch.equal(image, images[3])
        assert torch.equal(mask, masks[3])


def test_pairs_of_many_sizes_are_whole_batches() -> None:
    """Images and masks stored in their own sizes, or encoded, equal those that are read one by one."""
    samples = [pairs("tensor", (14 + i, 20 - i), 1)[0] for i in range(8)]
    steps = [v2.RandomResizedCrop((9, 7)), v2.RandomHorizontalFlip(), *TO_PAIR]
    batches = []
    for options in (
        {},
        {"storage": "compressed"},
        {"storage": "compressed", "codec": ("lz4", "zstd")},
    ):
        with paired(samples, *steps, **options) as dataset:
            batches.append(next(iter(DataLoader(dataset, batch_size=8))))
            dataset.set_epoch(0)
            assert all(
                torch.equal(mine, whole[5])
                for mine, whole in zip(dataset[5], batches[-1], strict=True)
            )
    assert all(
        torch.equal(a, b) for other in batches[1:] for a, b in zip(batches[0], other, strict=True)
    )


class OwnStep(v2.Transform):
    """A user's own step of v2."""


@pytest.mark.parametrize(
    ("transforms", "samples", "reason"),
    [
        (
            v2.Compose([OwnStep(), *TO_PAIR]),
            pairs(),
            "contains OwnStep(), which is not a known batch op",
        ),
        (v2.Compose([v2.RandAugment(), *TO_PAIR]), pairs(), "which does not accept masks"),
        (
            v2.Compose([v2.Pad(1, fill=(1, 2, 3)), *TO_PAIR]),
            pairs(),
            "has a fill for each channel of tensors",
        ),
        (
            v2.Compose([v2.Pad(1, fill={MASK: 1}), *TO_PAIR]),
            pairs(),
            "a dict without a value for such samples",
        ),
        (
            v2.RandomApply([v2.Lambda(v2.RandomVerticalFlip())]),
            pairs(),
            "contains Lambda, which is not a known",
        ),
        (v1.Compose([v2.ToImage()]), pairs(), "is not a known batch op"),
        (v2.RandomHorizontalFlip(), pairs(), "leaves images as PIL images"),
        (lambda image, mask: (len(mask), 0), pairs(), "is not a known batch op"),
        (
            v2.Compose(TO_PAIR),
            [(image, image) for image, _ in pairs()],
            "images with a uint8 tv_tensors.Mask",
        ),
        (
            v2.Compose(TO_PAIR),
            [(image, 3) for image, _ in pairs()],
            "only images with a tv_tensors.Mask",
        ),
        (
            v2.Compose(TO_PAIR),
            [(image, MASK(mask.expand(2, -1, -1))) for image, mask in pairs()],
            "(2, 20, 18)",
        ),
        (
            v2.RandomCrop(4),
            [(pairs("tensor")[0][0], pairs("tensor", (20, 17))[0][1])],
            "the mask of sample 0 is not as large as its image",
        ),
    ],
)
def test_pairs_without_whole_batches_have_a_reason(
    transforms: Any, samples: Any, reason: str
) -> None:
    """Transforms that cannot run on whole batches run as written on each pair, and the plan has the reason."""
    with CachedDataset(samples, transforms=transforms) as dataset:
        assert reason in (dataset.reader().obstacle or "")
        assert dataset.plan.per_sample == (transforms,)


def test_transforms_changed_in_place_are_noticed() -> None:
    """A joint transform, and a fill in its dict, may be changed between epochs like any other."""
    pad = v2.Pad(1, fill=dict(FILLED))
    with paired(pairs("tensor"), pad) as dataset:
        assert epoch_of(DataLoader(dataset))[1][0, 0, 0] == 255
        pad.fill[MASK] = 4
        assert epoch_of(DataLoader(dataset))[1][0, 0, 0] == 4
        dataset.transforms = v2.Compose([v2.CenterCrop(3)])
        assert epoch_of(DataLoader(dataset))[0].shape == (5, 3, 3, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cached().with_transform(VIEWS),
        lambda: paired(pairs("tensor"), v2.RandomCrop(4), *TO_PAIR),
        lambda: paired(pairs("tensor", (30, 31)), v2.RandomCrop(4), *TO_PAIR, storage="compressed"),
    ],
)
def test_views_and_pairs_of_several_datasets_share_batches(make: Callable[[], Any]) -> None:
    """Batches over a ConcatDataset have the views, or images and masks, of each dataset in their rows."""

    def parts(pairs: Any) -> list[Any]:
        listed = [first if isinstance(first, list) else [first, second] for first, second in pairs]
        return list(zip(*listed, strict=True))

    with make() as one, make() as two:
        joined = ConcatDataset([one, two])
        alone = parts(DataLoader(one, batch_size=4))
        loader = DataLoader(joined, batch_size=4, num_workers=1)
        batches = parts(loader)
        assert loader.report().path.startswith("whole batches")
        single = DataLoader(joined, batch_size=4, collate_fn=list)
        samples = parts(sample for batch in single for sample in batch)
        for first, served, wanted in zip(alone, batches, samples, strict=True):
            assert torch.equal(torch.cat(served), torch.stack(wanted))
            assert torch.equal(torch.cat(served)[: len(one)], torch.cat(first))
