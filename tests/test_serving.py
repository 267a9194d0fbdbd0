"""What batches obey: what is changed after a dataset was made."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1
from torchvision.transforms import v2

from conftest import FolderMaker
from fastdata import CachedDataset, ChunkedLoader, CudaPrefetcher, DataLoader, ImageFolder

LENGTH, SHAPE = 11, (3, 8, 6)
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
    """Image i is random and i's own; its target is i."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=generator), i) for i in range(length)]


def cached(kind: type[CachedDataset] = CachedDataset, *steps: Any, **options: Any) -> Any:
    return kind(samples(), transform=v1.Compose(list(steps)) if steps else None, progress=False, seed=0, **options)


def chunked(data: Any) -> ChunkedLoader:
    return ChunkedLoader(data, 4, memory_limit="64GiB", chunk_samples=8, num_workers=1, shuffle=False)


def epoch_of(loader: Any) -> list[torch.Tensor]:
    """Each part of all samples of an epoch."""
    columns = zip(*loader, strict=True)
    return [torch.cat([torch.as_tensor(part) for part in column]) for column in columns]


# What is set, and changed in place


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


def test_a_loader_set_later_is_obeyed_or_refused(image_folder: FolderMaker) -> None:
    """Where nothing is kept the new loader opens the files of the next epoch; elsewhere it is an error."""
    root = image_folder()

    def black(path: str) -> Any:
        return Image.new("RGB", (12, 10))

    with ImageFolder(root, v1.PILToTensor(), storage="none", progress=False) as unkept:
        loader = DataLoader(unkept, batch_size=4, num_workers=2)
        assert epoch_of(loader)[0].any()
        with chunked(unkept) as chunks:
            unkept.loader = black
            assert unkept.loader is black
            assert not epoch_of(loader)[0].any()
            with pytest.raises(ValueError, match=r"loader.*was changed after this ChunkedLoader was.*again"):
                iter(chunks)
    with ImageFolder(root, v1.PILToTensor(), progress=False) as kept:
        with pytest.raises(ValueError, match=r"kept as the loader .*storage='none'"):
            kept.loader = black
        assert epoch_of(DataLoader(kept, batch_size=4))[0].any()
    fast = ImageFolder(root, v1.Resize(6), storage="none", fast_decode=True, progress=False)
    with fast, pytest.raises(ValueError, match="cannot be combined with loader="):
        fast.loader = black


@EVERY_LOADER
def test_a_step_changed_in_place_counts_from_the_next_epoch(loader_of: Callable[..., Any]) -> None:
    """Another probability, a step more, and another list of steps are what the next epoch does."""
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
def test_arguments_changed_in_place_are_noticed(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    """A value inside a list, a tensor or an array of a step is seen as well, by batches and single samples."""
    with cached(CachedDataset, v1.ConvertImageDtype(torch.float32), make()) as dataset:
        before = dataset[3][0]
        change(dataset.transform.transforms[1])
        wanted = dataset.transform(samples()[3][0])
        assert not torch.allclose(before, wanted)
        torch.testing.assert_close(dataset[3][0], wanted)
        torch.testing.assert_close(epoch_of(DataLoader(dataset, batch_size=4))[0][3], wanted)
        torch.testing.assert_close(epoch_of(TorchLoader(dataset, batch_size=4))[0][3], wanted)


def test_stored_steps_changed_in_place_are_refused() -> None:
    """Where samples are stored after a step, changing it is an error for every reader; undoing it mends all."""
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
                ValueError, match=r"stored after .*CenterCrop.*4, 6.* now begins with .*2, 2.*new dataset"
            ):
                read()
        steps[0].size = (4, 6)
        steps.insert(1, v1.Pad(1))
        assert dataset[0][0].shape == (3, 6, 8)
        steps.pop(0)
        with pytest.raises(ValueError, match="now begins with"):
            dataset[0]


def test_steps_before_a_chunk_changed_in_place_are_refused() -> None:
    """A chunked loader over samples that are kept nowhere brings them after steps that must stay as they are."""
    with cached(CachedDataset, v1.CenterCrop((4, 6)), storage="none") as dataset, chunked(dataset) as loader:
        assert epoch_of(loader)[0].shape == (LENGTH, 3, 4, 6)
        dataset.transform.transforms.append(v1.CenterCrop(2))
        with pytest.raises(ValueError, match=r"brings samples after .*4, 6.*Make the ChunkedLoader again"):
            iter(loader)
        with chunked(dataset) as again:
            assert epoch_of(again)[0].shape == (LENGTH, 3, 2, 2)
        assert epoch_of(DataLoader(dataset, batch_size=4))[0].shape == (LENGTH, 3, 2, 2)


def test_a_transform_replaced_within_an_epoch_is_never_half_obeyed() -> None:
    """A step per sample that comes in the middle of an epoch is run for all batches after it."""
    with cached() as dataset:
        batches = iter(DataLoader(dataset, batch_size=4))
        next(batches)
        dataset.transform = v1.Lambda(lambda image: image // 2)
        images, _ = next(batches)
        assert torch.equal(images, torch.stack([image // 2 for image, _ in samples()[4:8]]))
