"""Batch ops and stores on the prefetcher's device: the same batches as on the CPU, and fewer bytes sent."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from conftest import FolderMaker
from data import save_image
from fastdata import (
    CachedDataset,
    CudaPrefetcher,
    DataLoader,
    FastDataWarning,
    ImageFolder,
    Views,
    collate,
)
from fastdata.errors import MemoryBudgetError
from fastdata.loaders import resident
from fastdata.stores.store import Store
from simcuda import Sim

CUDA = torch.device("cuda", 0)
LENGTH, SHAPE = 23, (3, 8, 6)
STORED_BYTES = 3 * 8 * 6
SERVED_BYTES = 3 * 7 * 5
NORM_BYTES = 2 * 3 * 4
"""What an epoch sends once: a factor and a summand of each channel."""
CROP = [v1.RandomCrop((7, 5), padding=1), v1.RandomHorizontalFlip()]
FLOATS = [v1.ConvertImageDtype(torch.float32), v1.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))]
STEPS: dict[str, Sequence[Any]] = {
    "crop and flip, uint8": CROP,
    "flip alone": [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()],
    "crop and flip, normalised": [*CROP, *FLOATS],
    "normalised": FLOATS,
    "grayscale": [v1.Grayscale(3), v1.RandomVerticalFlip()],
}
ON_THE_CPU: dict[str, Sequence[Any]] = {
    "several gathers": [
        v1.RandomCrop((7, 5)),
        v1.Pad(2, fill=9),
        v1.RandomCrop((8, 6)),
        v1.RandomHorizontalFlip(),
    ],
    "resized": [v2.RandomResizedCrop((5, 4), antialias=True), v2.RandomHorizontalFlip()],
    "resized, normalised": [
        v2.RandomHorizontalFlip(),
        v2.RandomResizedCrop((5, 4), antialias=True),
        *FLOATS,
    ],
    "resized sometimes": [v2.RandomApply([v2.Resize((8, 6))]), *FLOATS],
    "two colours": [v1.RandomHorizontalFlip(), v1.Pad(1, fill=9), v1.Pad(1)],
}
"""Steps that run in the core before the transfer."""
RUNS_ON_THE_CPU = r"(RandomResizedCrop|RandomApply|Pad|RandomHorizontalFlip)\(.*\) runs on the CPU"


def cached(steps: Sequence[Any], **options: Any) -> CachedDataset:
    """Return a dataset whose image i is random and differs from all others; its target is i."""
    generator = torch.Generator().manual_seed(1)
    samples = [
        (torch.randint(0, 256, SHAPE, dtype=torch.uint8, generator=generator), i)
        for i in range(LENGTH)
    ]
    transform = v1.Compose(list(steps)) if steps else None
    return CachedDataset(samples, transform=transform, seed=0, **options)


@pytest.fixture
def dataset() -> Iterator[CachedDataset]:
    with cached(STEPS["crop and flip, normalised"]) as made:
        yield made


def loader_of(dataset: Any, epoch: int = 3, **options: Any) -> DataLoader:
    """Return a loader that gives the same batches each time."""
    loader = DataLoader(
        dataset, **{"batch_size": 4, "generator": torch.Generator().manual_seed(5)} | options
    )
    loader.set_epoch(epoch)
    return loader


def on_device(loader: Any, **options: Any) -> CudaPrefetcher:
    return CudaPrefetcher(loader, CUDA, **options)


def taken(batches: Any) -> list[Any]:
    """Return all batches on the host, dicts in the order of their keys."""
    found = []
    for batch in batches:
        is_dict = isinstance(batch, dict)
        found.append(
            {key: batch[key].cpu() for key in batch} if is_dict else [part.cpu() for part in batch]
        )
    return found


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Check that batches are equally many, with equal shapes, dtypes, labels and pixels (floats within 1e-5)."""
    assert len(found) == len(expected)
    for (images, labels), (right, numbers) in zip(found, expected, strict=True):
        assert labels.tolist() == numbers.tolist()
        assert (images.shape, images.dtype) == (right.shape, right.dtype)
        if right.is_floating_point():
            torch.testing.assert_close(
                images, right, rtol=0, atol=2e-3 if right.dtype is torch.float16 else 1e-5
            )
        else:
            assert torch.equal(images, right)


def mirrors(gpu: Sim) -> list[Any]:
    """Return the copies of the store that are on the device."""
    made = [tensor() for tensor in gpu.made]
    return [tensor for tensor in made if tensor is not None and tensor.shape == (LENGTH, *SHAPE)]


# The same batches


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("storage", ["shared", "device"])
def test_batches_are_those_of_the_cpu(
    gpu: Sim, steps: Sequence[Any], num_workers: int, storage: Any
) -> None:
    """Two shuffled epochs with a smaller last batch equal those of the CPU."""
    with cached(steps, storage=storage) as dataset:
        plain = loader_of(dataset, shuffle=True)
        with on_device(loader_of(dataset, shuffle=True, num_workers=num_workers)) as batches:
            for epoch in (3, 4):
                plain.set_epoch(epoch)
                batches.set_epoch(epoch)
                expected = list(plain)
                assert_same(taken(batches), expected)
            is_finished_there = storage == "device" or expected[0][0].is_floating_point()
            assert batches.report().batch_ops.startswith("on cuda:0") is is_finished_there
            assert (batches.report().samples, batches.report().fresh_batches) == (LENGTH, 0)
    assert len({labels.tolist()[0] for _, labels in expected}) > 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", ON_THE_CPU.values(), ids=ON_THE_CPU.keys())
@pytest.mark.parametrize("storage", ["shared", "device"])
def test_unsupported_steps_run_before_the_transfer(
    gpu: Sim, steps: Sequence[Any], num_workers: int, storage: Any
) -> None:
    """If the device cannot do a step, only uint8 batches are sent, the store is not copied, and one warning says so."""
    with cached(steps, storage=storage) as dataset:
        expected = list(loader_of(dataset))
        served_bytes = expected[0][0][0].numel()
        batches = on_device(loader_of(dataset, num_workers=num_workers))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                batches.set_epoch(3)
                gpu.sent.clear()
                assert_same(taken(batches), expected)
        floats = expected[0][0].is_floating_point()
        assert sum(gpu.sent) == LENGTH * (served_bytes + 8) + floats * NORM_BYTES
        where = "on cuda:0, the conversion only" if floats else "on the CPU"
        why = f": {RUNS_ON_THE_CPU}" if storage == "device" else ".*"
        assert re.fullmatch(where + why, batches.report().batch_ops)
        assert not mirrors(gpu)
    assert [warning.category for warning in caught] == [FastDataWarning] * (storage == "device")
    for warning in caught:
        assert re.fullmatch(
            f"storage='device' has no effect: {RUNS_ON_THE_CPU}", str(warning.message)
        )


@pytest.mark.parametrize("codec", ["lz4", "jpeg"])
def test_encoded_samples_are_decoded_into_the_batch_that_is_sent(gpu: Sim, codec: str) -> None:
    """Samples of a compressed store are decoded on the host and converted on the device."""
    with cached([*CROP, *FLOATS], storage="compressed", codec=codec) as dataset:
        expected = list(loader_of(dataset))
        batches = on_device(loader_of(dataset, num_workers=1))
        assert_same(taken(batches), expected)
        assert batches.report().batch_ops == "on cuda:0, the conversion only"


@pytest.mark.parametrize("storage", ["shared", "device"])
def test_a_subset_gets_its_own_samples(gpu: Sim, storage: Any) -> None:
    """A Subset gives its own samples from the store, and new draws for repeated ones."""
    with cached(CROP, storage=storage) as dataset:
        subset = Subset(dataset, [22, 3, 3, 17, 8])
        expected = list(loader_of(subset))
        assert_same(taken(on_device(loader_of(subset, num_workers=1))), expected)


@pytest.mark.parametrize("storage", ["shared", "device"])
def test_batches_of_dicts_are_dicts(gpu: Sim, storage: Any) -> None:
    """Items that are dicts arrive as one dict of batches."""
    samples = [{"label": i, "image": torch.full(SHAPE, i, dtype=torch.uint8)} for i in range(8)]
    transform = v1.Compose([*CROP, v1.ConvertImageDtype(torch.float32)])
    with CachedDataset(samples, transform=transform, seed=0, storage=storage) as dataset:
        expected = [(batch["image"], batch["label"]) for batch in loader_of(dataset)]
        batches = on_device(loader_of(dataset, num_workers=1))
        found = taken(batches)
        assert batches.report().batch_ops.startswith("on cuda:0")
    assert [list(batch) for batch in found] == [["label", "image"]] * 2
    assert_same([(batch["image"], batch["label"]) for batch in found], expected)


def test_joined_datasets_are_finished_on_the_cpu(dataset: CachedDataset, gpu: Sim) -> None:
    """Stores of several datasets are read on the host: the report says so, and batch_ops='device' is an error."""
    with dataset.with_transform(dataset.transform) as other:
        joined = ConcatDataset([dataset, other])
        expected = list(loader_of(joined))
        batches = on_device(loader_of(joined, num_workers=1))
        assert_same(taken(batches), expected)
        assert (
            batches.report().batch_ops
            == "on the CPU: the samples of a ConcatDataset are in several stores"
        )
        with pytest.raises(
            ValueError,
            match="batch_ops='device' is not possible here: the samples of a ConcatDataset",
        ):
            list(on_device(loader_of(joined, num_workers=1), batch_ops="device"))


def test_batches_held_to_the_end_are_right(dataset: CachedDataset, gpu: Sim) -> None:
    """No buffer is filled again before its copy is done."""
    expected = list(loader_of(dataset))
    held = list(on_device(loader_of(dataset, num_workers=2), depth=3))
    assert_same(taken(held), expected)


@pytest.mark.parametrize("storage", ["shared", "device"])
def test_a_resumed_epoch_goes_on_with_the_same_draws(gpu: Sim, storage: Any) -> None:
    """A state after two batches gives the remaining ones, on the device and on the CPU."""
    with cached(STEPS["crop and flip, normalised"], storage=storage) as dataset:
        expected = list(loader_of(dataset, shuffle=True))
        batches = on_device(loader_of(dataset, shuffle=True, num_workers=2))
        epoch = iter(batches)
        first = [next(epoch), next(epoch)]
        state = batches.state_dict()
        batches.close()
        assert state["num_yielded"] == 2
        assert_same(taken(first), expected[:2])
        for where in ("device", "cpu"):
            again = on_device(loader_of(dataset, shuffle=True, num_workers=1), batch_ops=where)
            again.load_state_dict(state)
            assert_same(taken(again), expected[2:])
            again.close()


def test_casts_and_layout_are_those_of_the_cpus_batches(gpu: Sim) -> None:
    """dtype= and channels_last= have the same effect on floats and uint8 images, and transform= gets a pair."""
    seen: list[Any] = []

    def note(batch: Any) -> Any:
        seen.append([type(batch), *(part.dtype for part in batch)])
        return batch

    for steps in (STEPS["crop and flip, normalised"], CROP):
        with cached(steps) as dataset:
            options = {"dtype": torch.float16, "channels_last": True, "transform": note}
            made = taken(on_device(loader_of(dataset), **options))
            assert all(
                images.is_contiguous(memory_format=torch.channels_last) for images, _ in made
            )
            assert_same(made, [[images.half(), labels] for images, labels in loader_of(dataset)])
    assert all(entry == [list, torch.float16, torch.int64] for entry in seen)


def test_a_new_transform_counts_from_the_next_epoch(gpu: Sim) -> None:
    """Batches of the next epoch equal those of the CPU with the new transform."""
    with cached(CROP) as dataset:
        batches = on_device(loader_of(dataset))
        assert_same(taken(batches), list(loader_of(dataset)))
        dataset.transform = v1.Compose(FLOATS)
        assert_same(taken(batches), list(loader_of(dataset)))


# The bus and the streams


def test_uint8_crosses_the_bus(dataset: CachedDataset, gpu: Sim) -> None:
    """uint8 images and labels are sent, not the float32 that the CPU would make."""
    batches = on_device(loader_of(dataset, num_workers=1))
    for _ in range(2):
        gpu.sent.clear()
        list(batches)
    assert sum(gpu.sent) == LENGTH * (SERVED_BYTES + 8) + NORM_BYTES
    gpu.sent.clear()
    list(on_device(loader_of(dataset), batch_ops="cpu"))
    assert sum(gpu.sent) == LENGTH * (4 * SERVED_BYTES + 8)


def test_batches_are_sent_from_where_they_were_made(dataset: CachedDataset, gpu: Sim) -> None:
    """Threads write batches to pinned memory, from which they are sent; only labels are copied first."""
    batches = on_device(loader_of(dataset, num_workers=2))
    list(batches)
    report = batches.report()
    assert report.in_place_bytes == LENGTH * SERVED_BYTES
    assert (report.staged_bytes, report.pageable_bytes) == (LENGTH * 8, 0)


# Where they run


class PerSample:
    def __call__(self, image: Any) -> Any:
        return image.clone()


@pytest.mark.parametrize(
    ("steps", "options", "reason"),
    [
        (
            CROP,
            {"workers": "process", "num_workers": 1},
            "batches come from 1 worker process, with batches in shared memory, because work",
        ),
        (CROP, {"collate_fn": lambda samples: collate(samples)}, "collate_fn= is your own"),
        ([*CROP, PerSample()], {"workers": "thread"}, "the transform works per sample: "),
        (CROP, {}, "batches are uint8, and sent unchanged"),
        (CROP, {"num_workers": 1}, "batches are uint8, and sent unchanged"),
    ],
)
def test_the_report_says_why_ops_run_on_the_cpu(
    gpu: Sim, steps: Sequence[Any], options: dict[str, Any], reason: str
) -> None:
    """The report gives the reason, and batches are the loader's own."""
    with cached(steps) as dataset:
        batches = on_device(loader_of(dataset, **options))
        if not isinstance(steps[-1], PerSample):
            assert_same(taken(batches), list(loader_of(dataset)))
        list(batches)
        report = batches.report()
        assert report.batch_ops.startswith(f"on the CPU: {reason}")
        assert f"batch ops: {report.batch_ops}" in str(report).splitlines()


def test_the_loader_of_torch_keeps_its_batches(dataset: CachedDataset, gpu: Sim) -> None:
    """Batches of torch's loader are made on the CPU, as the report says; for plain tensors it says nothing."""
    batches = on_device(TorchLoader(dataset, batch_size=4))
    assert len(list(batches)) == 6
    assert batches.report().batch_ops.startswith(
        "on the CPU: the loader is a DataLoader of torch.utils.data.dataloader, not fastdata's"
    )
    plain = on_device([torch.zeros(2, 3)])
    list(plain)
    assert plain.report().batch_ops == ""
    assert "batch ops" not in str(plain.report())


def test_a_loader_that_is_iterated_in_a_way_of_its_own_keeps_its_batches(
    dataset: CachedDataset, gpu: Sim
) -> None:
    """A subclass with its own ``__iter__`` is iterated by it, and the report says that batch ops run on the CPU."""

    class Renamed(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            return ({"images": images, "labels": labels} for images, labels in super().__iter__())

    batches = on_device(Renamed(dataset, batch_size=4))
    assert [sorted(batch) for batch in batches] == [["images", "labels"]] * 6
    assert batches.report().batch_ops.startswith(
        "on the CPU: the loader is a Renamed of test_prefetch_ops, not fastdata's DataLoader"
    )


def test_samples_without_batch_ops_are_sent_unchanged(gpu: Sim) -> None:
    """Without batch ops nothing is computed on the device."""
    with cached(()) as dataset:
        batches = on_device(loader_of(dataset))
        assert_same(taken(batches), list(loader_of(dataset)))
        assert batches.report().batch_ops.endswith("uint8, and sent unchanged")


def test_ops_are_on_the_device_while_a_lazy_store_is_filled(
    gpu: Sim, image_folder: FolderMaker
) -> None:
    """The first epoch, in which samples are still being prepared, equals one from the full store."""
    steps = [v1.Resize((8, 6)), v1.RandomHorizontalFlip(), v1.ToTensor()]
    with ImageFolder(str(image_folder()), transform=v1.Compose(steps), seed=0) as dataset:
        batches = on_device(loader_of(dataset, num_workers=1))
        first = [[images.clone(), labels.clone()] for images, labels in taken(batches)]
        assert batches.report().batch_ops == "on cuda:0, the conversion only"
        assert_same(taken(batches), first)
        assert batches.report().batch_ops == "on cuda:0, the conversion only"


@pytest.mark.parametrize("storage", ["none", "shared", "compressed"])
def test_floats_are_made_on_the_device_of_images_of_any_size(
    gpu: Sim, image_folder: FolderMaker, storage: Any
) -> None:
    """Images of any size, stored or not, are cropped on the host, sent as uint8, and converted on the device."""
    root = image_folder()
    save_image(root / "cat" / "larger.jpg", 7, (17, 13))
    transform = v1.Compose([v1.RandomResizedCrop(6), v1.ToTensor(), v1.Normalize(0.5, 0.2)])
    with ImageFolder(str(root), transform=transform, seed=0, storage=storage) as dataset:
        expected = list(loader_of(dataset))
        batches = on_device(loader_of(dataset, num_workers=2))
        assert_same(taken(batches), expected)
        assert batches.report().batch_ops == "on cuda:0, the conversion only"
        assert sum(gpu.sent) == len(dataset) * (3 * 6 * 6 + 8) + 2 * 4


def test_floats_of_several_views_are_made_on_the_device(gpu: Sim) -> None:
    """Each view has its own conversion on the device, or none."""
    with cached(CROP) as dataset:
        dataset.transform = Views(v1.Compose([*CROP, *FLOATS]), v1.Compose(CROP))
        expected = list(loader_of(dataset))
        found = list(on_device(loader_of(dataset, num_workers=1)))
    for k, is_float in enumerate((True, False)):
        of_view = [(batch[0][k].cpu(), batch[1].cpu()) for batch in found]
        assert_same(of_view, [(images[k], labels) for images, labels in expected])
        assert of_view[0][0].is_floating_point() is is_float


def test_a_loop_that_changes_its_stream_has_whole_batches(gpu: Sim) -> None:
    """Batches are right if the loop changes its stream, although several were cut together on the first one."""
    with cached([*CROP, *FLOATS], storage="device") as dataset:
        expected = list(loader_of(dataset))
        found = []
        epoch = iter(on_device(loader_of(dataset)))
        for _ in expected:
            with torch.cuda.stream(torch.cuda.Stream()):
                found.append([part.cpu() for part in next(epoch)])
    assert_same(found, expected)


def test_an_error_of_the_sampler_comes_behind_the_batches_before_it(gpu: Sim) -> None:
    """Batches before the error arrive, although they are cut together with later ones."""

    class Failing(list[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            yield from super().__iter__()
            raise KeyError("no more")

    with cached([*CROP, *FLOATS], storage="device") as dataset:
        batches = iter(on_device(DataLoader(dataset, batch_sampler=Failing([[1, 2], [3]]))))
        assert [next(batches)[1].tolist() for _ in range(2)] == [[1, 2], [3]]
        with pytest.raises(KeyError, match="no more"):
            next(batches)


@pytest.mark.parametrize("steps", [[], [v2.RandomHorizontalFlip()]], ids=["alone", "flipped"])
@pytest.mark.parametrize("storage", ["shared", "device"])
def test_gray_images_are_sent_with_one_channel(gpu: Sim, steps: list[Any], storage: Any) -> None:
    """Normalisation with three means makes three channels on the device."""
    floats = v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    samples = [(image[:1], label) for image, label in list(cached(()))]
    transform = v2.Compose([*steps, *floats])
    with CachedDataset(samples, transform=transform, seed=0, storage=storage) as dataset:
        batches = on_device(loader_of(dataset))
        assert_same(taken(batches), list(loader_of(dataset)))
        assert batches.report().batch_ops.startswith("on cuda:0")


def test_a_failing_batch_leaves_the_others_in_order(gpu: Sim) -> None:
    """If one of several batches fails, the others arrive in order; each target is read once, texts too."""
    asked = []

    def shown(number: int) -> str:
        asked.append(number)
        return {6: None}.get(number, f"n{number}").upper()  # type: ignore[union-attr]

    indices = [[1, 2], [LENGTH], [3], [5, 6], [7]]
    with cached(CROP, storage="device", target_transform=shown) as dataset:
        loader = DataLoader(dataset, batch_sampler=indices, workers="thread")
        found: list[Any] = []
        epoch = iter(on_device(loader))
        while True:
            try:
                found.append(next(epoch)[1])
            except StopIteration:
                break
            except (AttributeError, IndexError) as error:
                found.append(type(error))
    assert found == [("N1", "N2"), IndexError, ("N3",), AttributeError, ("N7",)]
    assert asked == [1, 2, 3, 5, 6, 7]


def test_the_end_of_an_epoch_is_not_taken_for_too_little_memory(
    gpu: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of an epoch the log does not say that batches are cut one by one."""
    caplog.set_level("INFO", "fastdata")
    with cached([*CROP, *FLOATS], storage="device") as dataset:
        assert len(list(on_device(loader_of(dataset)))) > 1
    assert "one by one" not in caplog.text


def test_batches_are_cut_one_by_one_if_memory_is_short(
    gpu: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so. A batch that does not fit is an error in its place, also in the state; no other is lost."""
    caplog.set_level("INFO", "fastdata")
    with cached([*CROP, *FLOATS], storage="device") as dataset:
        expected = list(loader_of(dataset))
        loader = on_device(loader_of(dataset))
        epoch = iter(loader)
        first = [part.cpu() for part in next(epoch)]
        assert gpu.peak_bytes > 4 * gpu.live_bytes / 3  # several are cut at once
        epoch = iter(loader)
        gpu.limit_bytes = gpu.live_bytes + (gpu.peak_bytes - gpu.live_bytes) // 2
        found = [[part.cpu() for part in next(epoch)] for _ in range(2)]
        assert "batches are cut one by one: CUDA out of memory" in caplog.text
        limit_bytes, gpu.limit_bytes = gpu.limit_bytes, 0
        with pytest.raises(torch.cuda.OutOfMemoryError):
            next(epoch)
        state = loader.state_dict()
        gpu.limit_bytes = limit_bytes
        found += [[part.cpu() for part in batch] for batch in epoch]
        again = loader_of(dataset)
        again.load_state_dict(state)
        rest = taken(again)
    assert_same(found, expected[:2] + expected[3:])
    assert_same(rest, expected[3:])
    assert_same([first], expected[:1])


@pytest.mark.parametrize("storage", ["shared", "device"])
def test_images_with_masks_are_cut_before_the_transfer(gpu: Sim, storage: Any) -> None:
    """Images with masks are cut on the host, and a warning says that the store is not on the device."""
    steps = v2.Compose([v2.RandomCrop((5, 4)), v2.RandomHorizontalFlip()])
    samples = [
        (tv_tensors.Image(image), tv_tensors.Mask(image[:1])) for image, _ in list(cached(()))
    ]
    with CachedDataset(samples, transforms=steps, seed=0, storage=storage) as dataset:
        expected = list(loader_of(dataset))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_same(taken(on_device(loader_of(dataset, num_workers=1))), expected)
    assert ["image and mask" in str(it.message) for it in caught] == [True] * (storage == "device")


def test_erasing_of_floats_runs_on_the_cpu(gpu: Sim) -> None:
    """With batch_ops='device', erasing of floats is an error; a dataset of floats without steps is no such case."""
    why = "not possible here: erasing or noise comes after"
    with cached([*FLOATS, v1.RandomErasing()]) as dataset, pytest.raises(ValueError, match=why):
        iter(on_device(loader_of(dataset), batch_ops="device"))
    with CachedDataset([(torch.ones(SHAPE), 0)]) as dataset:
        batches = on_device(loader_of(dataset))
        list(batches)
        assert batches.report().batch_ops == ("on the CPU: batches are float32, and sent unchanged")


def test_ops_that_must_be_on_the_device_and_cannot_are_an_error(
    dataset: CachedDataset, gpu: Sim
) -> None:
    """The error gives the reason; another value of batch_ops= is refused."""
    loader = loader_of(dataset, workers="process", num_workers=1)
    batches = on_device(loader, batch_ops="device")
    with pytest.raises(
        ValueError, match=r"batch_ops='device' is not possible here: batches come from 1 worker"
    ):
        iter(batches)
    with pytest.raises(ValueError, match="batch_ops='gpu' is not one of 'auto', 'device', 'cpu'"):
        CudaPrefetcher([], device="cpu", batch_ops="gpu")  # type: ignore[arg-type]


def test_a_closed_dataset_is_an_error_with_ops_on_the_device(
    dataset: CachedDataset, gpu: Sim
) -> None:
    """The loop gets the error of a closed dataset, as without a prefetcher."""
    batches = iter(on_device(loader_of(dataset)))
    dataset.close()
    with pytest.raises(RuntimeError, match="the dataset was closed"):
        next(batches)


# storage="device"


def mirrored(**options: Any) -> CachedDataset:
    return cached(CROP, storage="device", **options)


def test_a_store_on_the_device_is_sent_once(gpu: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is sent in chunks. After that, only positions, draws, labels and the tables of windows are sent."""
    monkeypatch.setattr(resident, "CHUNK_BYTES", 5 * STORED_BYTES + 7)
    with mirrored() as dataset, on_device(loader_of(dataset, num_workers=1)) as batches:
        expected = list(loader_of(dataset))
        assert_same(taken(batches), expected)
        fill_bytes = 3
        batch_bytes = LENGTH * (8 + 2 * 4 + 8) + 2 * 4 * (7 + 5) * 8 + fill_bytes
        assert [gpu.sent.count(size * STORED_BYTES) for size in (5, 3)] == [4, 1]
        gpu.sent.clear()
        assert_same(taken(batches), expected)
        assert sum(gpu.sent) == batch_bytes
        assert dataset.storage == "device"
        assert dataset[3][0].shape == (3, 7, 5)
        assert batches.report().batch_ops == "on cuda:0, from a copy of the store there (3.2 KiB)"
        assert len(mirrors(gpu)) == 1


@pytest.mark.parametrize("refuses", [False, True])
def test_a_store_is_copied_from_two_chunks_that_threads_fill(
    gpu: Sim, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """The chunks are pinned unless the driver refuses; then batches that are cut together need one copy."""
    monkeypatch.setattr(resident, "CHUNK_BYTES", 5 * STORED_BYTES + 7)
    gpu.refuses_to_pin = refuses
    with mirrored() as dataset, on_device(loader_of(dataset, num_workers=3)) as batches:
        epoch = iter(batches)
        assert gpu.counts["asynchronous copies"] == (0 if refuses else 5)
        assert len(gpu.sent) == 5 + 3  # and two tables of lines, and a fill
        with pytest.warns(FastDataWarning, match="pageable") if refuses else nullcontext():
            assert_same(taken(epoch), list(loader_of(dataset)))
        assert len(gpu.sent) == 5 + 3 + 1
        assert batches.report().pinned_bytes == (0 if refuses else 2 * 1024)


def test_a_store_that_cannot_be_read_leaves_nothing_on_the_device(
    gpu: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is raised at the start of the epoch; the next epoch copies the store again."""
    monkeypatch.setattr(resident, "CHUNK_BYTES", 5 * STORED_BYTES)
    whole = Store.gather_into

    def broken(store: Store, index_B: np.ndarray, out_B: np.ndarray) -> None:
        if 12 in index_B:
            raise OSError("sample 12 cannot be read")
        whole(store, index_B, out_B)

    with mirrored() as dataset, on_device(loader_of(dataset, num_workers=2)) as batches:
        with monkeypatch.context() as patched:
            patched.setattr(Store, "gather_into", broken)
            with pytest.raises(OSError, match="sample 12"):
                iter(batches)
        assert not mirrors(gpu)
        assert_same(taken(batches), list(loader_of(dataset)))


def test_samples_that_are_prepared_again_are_sent_again(gpu: Sim) -> None:
    """After a new transform was assigned, the new samples are sent, and the old copy is freed."""
    with cached([v1.Grayscale(3), *CROP], storage="device") as dataset:
        batches = on_device(loader_of(dataset))
        taken(batches)
        dataset.transform = v1.Compose([v1.Resize(SHAPE[1:]), *CROP])
        assert_same(taken(batches), list(loader_of(dataset)))
        assert len(mirrors(gpu)) == 1


def test_close_gives_the_device_memory_back(gpu: Sim) -> None:
    """``close`` and dropping the prefetcher free the copy; an epoch after ``close`` copies the store again."""
    with mirrored() as dataset:
        batches = on_device(loader_of(dataset))
        epoch = iter(batches)
        next(epoch)
        assert len(mirrors(gpu)) == 1
        batches.close()
        assert not mirrors(gpu)
        assert len(list(batches)) == 6
        assert len(mirrors(gpu)) == 1
        del epoch, batches
        gc.collect()
        assert not mirrors(gpu)


def test_a_store_that_leaves_no_room_for_the_model_is_an_error(gpu: Sim) -> None:
    """A store may take half of the free memory; the error has need, free memory and cure, in each epoch."""
    need = LENGTH * STORED_BYTES
    with mirrored() as dataset:
        gpu.free_bytes = 2 * need - 1
        batches = on_device(loader_of(dataset))
        for _ in range(2):
            with pytest.raises(MemoryBudgetError) as caught:
                next(iter(batches))
        assert str(caught.value) == (
            "storage='device' needs 3.2 KiB on cuda:0, but takes at most 50% of the 6.5 KiB that are free there, to "
            "leave room for the model. Use storage='shared', which sends each batch there, a smaller resize=, or free "
            "memory of the device."
        )
        assert not mirrors(gpu)
        gpu.free_bytes = 2 * need
        assert len(list(on_device(loader_of(dataset)))) == 6


def test_a_device_store_that_is_not_used_warns_once(gpu: Sim) -> None:
    """With worker processes batches come from the host's copy, with one warning; with batch_ops='cpu' without it."""
    with mirrored() as dataset:
        batches = on_device(loader_of(dataset, workers="process", num_workers=1))
        with pytest.warns(
            FastDataWarning,
            match=r"storage='device' has no effect: batches come from 1 worker process",
        ):
            assert_same(taken(batches), list(loader_of(dataset)))
        list(batches)
        asked = on_device(loader_of(dataset), batch_ops="cpu")
        assert_same(taken(asked), list(loader_of(dataset)))
        assert not mirrors(gpu)


def test_a_device_store_serves_without_a_device(dataset: CachedDataset) -> None:
    """Without a device, loaders and prefetchers read the host's copy."""
    with mirrored() as dataset:
        expected = list(loader_of(dataset))
        assert_same(list(CudaPrefetcher(loader_of(dataset, num_workers=1), device="cpu")), expected)


def test_a_store_on_the_device_without_batch_ops_is_gathered_there(gpu: Sim) -> None:
    """Without batch ops, batches are the stored samples."""
    with cached((), storage="device") as dataset, on_device(loader_of(dataset)) as batches:
        assert_same(taken(batches), list(loader_of(dataset)))
        assert sum(gpu.sent) == LENGTH * (STORED_BYTES + 8 + 8)


def test_samples_left_out_are_left_out_on_the_device(gpu: Sim, image_folder: FolderMaker) -> None:
    """A store with unused rows is copied sample by sample, in the dataset's order."""
    root = image_folder()
    damaged = sorted(root.rglob("*.jpg"))[1]
    damaged.write_bytes(b"no image")
    steps = v1.Compose([v1.Resize((8, 6)), v1.RandomHorizontalFlip(), v1.PILToTensor()])
    with pytest.warns(FastDataWarning, match="1 of 6 samples"):
        dataset = ImageFolder(str(root), transform=steps, storage="device", on_error="skip")
    with dataset, on_device(loader_of(dataset)) as batches:
        assert len(dataset) == 5
        assert_same(taken(batches), list(loader_of(dataset)))


def test_a_device_store_of_files_is_filled_at_construction(image_folder: FolderMaker) -> None:
    """storage='device' is filled when the dataset is made, and not in the first epoch."""
    steps = v1.Compose([v1.Resize((8, 6)), v1.RandomHorizontalFlip(), v1.PILToTensor()])
    with ImageFolder(str(image_folder()), transform=steps, storage="device") as dataset:
        assert dataset.filled_share() == 1
        assert dataset.storage_plan.reason.startswith("storage='device': 864 B of ")
