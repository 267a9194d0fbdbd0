"""DataLoader next to torch's: the same batches, orders, errors and warnings."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ImageOps
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1

from conftest import shown
from data import Stream, level_samples
from fastdata import CachedDataset, DataLoader, FastDataWarning, Views, collate
from fastdata.machine import limits
from fresh import Interpreters

AUGMENT = v1.Compose(
    [v1.RandomCrop((4, 3)), v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32)]
)


@pytest.fixture
def images() -> Iterator[CachedDataset]:
    """23 random 6 x 5 images with their index as target, augmented in whole batches."""
    with _images() as dataset:
        yield dataset


def _images(transform: Any = AUGMENT, count: int = 23) -> CachedDataset:
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 3, 6, 5), np.uint8))
    return CachedDataset([(pixels[i], i) for i in range(count)], transform=transform, seed=0)


def _labels(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


def _equal(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(x, wanted_x) and torch.equal(y, wanted_y)
        for (x, y), (wanted_x, wanted_y) in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 5},
        {"batch_size": 5, "drop_last": True},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 4, "shuffle": True, "generator": 11},
        {"batch_size": 6, "sampler": [5, 3, 21, -1, 0, 7]},
        {"batch_sampler": [[1, 2], [0], [7, 5, 4]]},
        {"batch_sampler": BatchSampler(SequentialSampler(range(23)), 10, drop_last=False)},
    ],
    ids=shown,
)
def test_batches_are_torchs(num_workers: int, options: dict[str, Any]) -> None:
    """For one seed, two epochs equal those of torch's loader over an equal dataset: order, sizes, pixels and draws."""
    outcome = []
    for make in (DataLoader, TorchLoader):
        torch.manual_seed(4)
        chosen = dict(options)
        if "generator" in chosen:
            chosen["generator"] = torch.Generator().manual_seed(chosen["generator"])
        with _images() as dataset:
            loader = make(dataset, num_workers=num_workers if make is DataLoader else 0, **chosen)
            outcome.append([])
            for epoch in range(2):
                if make is TorchLoader:  # which does not tell the dataset its epoch
                    dataset.set_epoch(epoch)
                outcome[-1] += loader
            assert len(loader) * 2 == len(outcome[-1])
        outcome.append(torch.random.get_rng_state().tolist()[:16])
    assert _equal(outcome[0], outcome[2])
    assert outcome[1] == outcome[3]


def test_the_loader_is_generic_like_torchs() -> None:
    """``DataLoader[int]`` is a type, and calling it makes a loader, as with torch's loader."""
    for kind in (TorchLoader, DataLoader):
        loader = kind[int](range(3))  # type: ignore[arg-type]
        assert type(loader) is kind
        assert [batch.tolist() for batch in loader] == [[0], [1], [2]]


def test_worker_processes_and_threads_serve_the_same(images: CachedDataset) -> None:
    """Threads, processes and torch's own loader with processes give equal epochs, draws of set epochs included."""
    epochs = []
    for make, options in (
        (DataLoader, {"workers": "thread"}),
        (DataLoader, {"workers": "process"}),
        (DataLoader, {"workers": "process", "persistent_workers": True}),
        (TorchLoader, {}),
    ):
        with _images() as dataset:
            loader = make(dataset, batch_size=4, num_workers=2, **options)
            served = []
            for epoch in range(2):
                dataset.set_epoch(epoch)
                served += [(x.clone(), y.clone()) for x, y in loader]
            epochs.append(served)
            del loader
    for other in epochs[1:]:
        assert _equal(other, epochs[0])


@pytest.mark.parametrize(
    "last", [v1.ConvertImageDtype(torch.float32), torch.Tensor.float], ids=["whole", "one by one"]
)
def test_parts_of_a_dataset_are_drawn_alike(last: Any) -> None:
    """Over a Subset of a Subset all engines make the draws of a set epoch, also for repeated and negative indices."""
    epochs = []
    for options in (
        {},
        {"num_workers": 2, "workers": "thread"},
        {"num_workers": 2, "workers": "process"},
    ):
        with _images(v1.Compose([v1.RandomCrop((4, 3)), last])) as dataset:
            part = Subset(Subset(dataset, [20, 3, -4, 7]), [3, 1, 2])
            loader = DataLoader(part, batch_size=2, sampler=[0, 1, 1, 2, 0, 2, 1], **options)
            loader.set_epoch(5)
            epochs.append([(images.clone(), labels.clone()) for images, labels in loader])
    assert [label for _, labels in epochs[0] for label in labels.tolist()] == [
        7,
        3,
        3,
        19,
        7,
        19,
        3,
    ]
    for other in epochs[1:]:
        assert _equal(other, epochs[0])


def test_repeated_samples_get_new_draws() -> None:
    """A sample that a sampler repeats gets new draws each time, the same with any number of workers."""
    epochs = []
    for num_workers in (0, 2):
        with _images() as dataset:
            loader = DataLoader(dataset, batch_size=8, sampler=[3] * 24, num_workers=num_workers)
            epochs.append(torch.cat([x for x, _ in loader]))
    assert torch.equal(epochs[0], epochs[1])
    assert len({tuple(image.flatten().tolist()) for image in epochs[0]}) > 5


def test_an_early_break_does_not_change_the_next_epoch() -> None:
    """Draws depend on the epoch, not on how many batches were read ahead of a break."""
    epochs = []
    for num_workers in (0, 3):
        with _images() as dataset:
            loader = DataLoader(dataset, batch_size=2, num_workers=num_workers)
            next(iter(loader))
            epochs.append(list(loader))
    assert _equal(epochs[0], epochs[1])


def test_a_set_epoch_is_served_until_it_is_set_again(images: CachedDataset) -> None:
    """After set_epoch every epoch has the draws of that epoch, until another one is set."""
    loader = DataLoader(images, batch_size=23)
    first, second = list(loader), list(loader)
    assert not _equal(first, second)
    loader = DataLoader(images, batch_size=23, num_workers=1)
    loader.set_epoch(0)
    assert _equal(list(loader), first)
    loader.set_epoch(1)
    assert _equal(list(loader), second)


def test_a_subset_is_served_whole(images: CachedDataset) -> None:
    """Subset, nested Subset and random_split keep the fast path, with the batches of torch's loader."""
    subset = Subset(Subset(images, [4, 9, 2, 17]), [3, 0, 1])
    loader = DataLoader(subset, batch_size=2, num_workers=1)
    assert _labels(loader) == [[17, 4], [9]]
    assert loader.report().path.startswith("whole batches")
    parts = random_split(images, [10, 13], torch.Generator().manual_seed(0))
    for part in parts:
        assert _labels(DataLoader(part, batch_size=4)) == _labels(TorchLoader(part, batch_size=4))
    with pytest.raises(IndexError):
        list(DataLoader(subset, sampler=[3]))


CENTER = v1.Compose([v1.CenterCrop((4, 3)), v1.ConvertImageDtype(torch.float32)])


def _half(first: int, transform: Any = CENTER, target: Any = None, **options: Any) -> CachedDataset:
    """Return eleven of 22 images of 6 x 5 pixels, with their number as target, or with ``target`` of it."""
    pixels = torch.from_numpy(
        np.random.default_rng(first).integers(0, 256, (11, 3, 6, 5), np.uint8)
    )
    samples = [(pixels[i], (target or int)(first + i)) for i in range(11)]
    return CachedDataset(samples, transform=transform, **{"seed": 0} | options)


def _twice(_: Any) -> Any:
    both = [_half(0), _half(11)]
    return ConcatDataset(
        [
            Subset(both[0], [3, -1, 3]),
            ConcatDataset([both[1], Subset(ConcatDataset(both), [4, 15])]),
        ]
    )


JOINED: dict[str, Any] = {
    "two": lambda options: ConcatDataset([_half(0, **options), _half(11, **options)]),
    "part": lambda options: Subset(
        ConcatDataset([_half(0, **options), _half(11)]), [21, 0, -4, 5, 12, 11]
    ),
    "nested, and again": _twice,
    "one, and again": lambda _: ConcatDataset([each := _half(0), Subset(each, [4, 2])]),
    "seeds": lambda options: ConcatDataset([_half(0, **options), _half(11, seed=3)]),
    "transforms": lambda options: ConcatDataset(
        [_half(0, **options), _half(11, v1.Compose([v1.Grayscale(3), CENTER]))]
    ),
    "targets": lambda options: ConcatDataset(
        [_half(0, **options), _half(11, target_transform=lambda target: -target)]
    ),
    "types of target": lambda _: ConcatDataset(
        [_half(0, target=float), _half(11, target=np.float32)]
    ),
    "lists of targets": lambda _: ConcatDataset(
        [_half(0, target=lambda i: [i, -i]) for _ in range(2)]
    ),
    "target arrays": lambda _: ConcatDataset(
        [_half(0, target=lambda i: np.full((2, 2), i)) for _ in range(2)]
    ),
    "no step": lambda options: ConcatDataset([_half(0, None, **options), _half(11, None)]),
    "encoded": lambda options: ConcatDataset(
        [_half(0, storage="compressed", codec="lz4"), _half(11)]
    ),
    "bfloat16": lambda _: ConcatDataset(
        [_half(i, v1.ConvertImageDtype(torch.bfloat16)) for i in (0, 11)]
    ),
}
JOINED["random_split"] = lambda options: random_split(
    JOINED["two"](options), [9, 13], torch.Generator()
)[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", JOINED)
def test_joined_datasets_are_served_whole(name: str, num_workers: int) -> None:
    """Two epochs over a ConcatDataset are torch's, in whole batches: order, pixels and targets."""
    epochs: list[list[Any]] = []
    for make in (DataLoader, TorchLoader):
        torch.manual_seed(4)
        chosen = {"num_workers": num_workers} if make is DataLoader else {}
        loader = make(JOINED[name]({}), batch_size=4, shuffle=True, **chosen)
        epochs.append([[*loader], [*loader]])
        if make is DataLoader:
            assert loader.report().path.startswith("whole batches")
    for ours, theirs in zip(*epochs, strict=True):
        assert len(ours) == len(theirs)
        for mine, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


def test_joined_datasets_draw_alike_in_every_engine() -> None:
    """With one manual_seed, threads and processes give the same epoch, also to the user's own collate_fn."""
    epochs = []
    for options in (
        {},
        {"num_workers": 2},
        {"num_workers": 2, "collate_fn": _collate_samples},
        {"num_workers": 2, "workers": "process"},
    ):
        torch.manual_seed(4)
        joined = JOINED["two"]({"seed": None, "transform": AUGMENT})
        loader = DataLoader(joined, batch_size=4, shuffle=True, **options)
        loader.set_epoch(3)
        epochs.append([(images.clone(), labels.clone()) for images, labels in loader])
    for other in epochs[1:]:
        assert _equal(other, epochs[0])


def _collate_samples(samples: list[Any]) -> Any:
    return default_collate([(image, target) for image, target in samples])


def test_joined_datasets_go_to_other_processes() -> None:
    """A spawned process opens each dataset of a ConcatDataset and reads the same batches."""
    options: dict[str, Any] = {
        "num_workers": 1,
        "workers": "process",
        "multiprocessing_context": "forkserver",
    }
    assert _labels(DataLoader(JOINED["no step"]({}), batch_size=11, **options)) == [
        [*range(11)],
        [*range(11, 22)],
    ]


class Doubled(CachedDataset):
    """A dataset whose own ``__getitem__`` doubles the targets."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image * 2, target


@pytest.mark.parametrize("num_workers", [0, 2])
def test_joined_datasets_that_differ_come_one_by_one(num_workers: int) -> None:
    """The report names the difference, and the samples are equal to those of torch's loader."""
    samples = level_samples(5, (3, 6, 5))
    for make, why in (
        (
            lambda: _half(11, v1.CenterCrop(3)),
            r"differ, Tensor(3, 4, 3) of float32 and Tensor(3, 3, 3) of uint8",
        ),
        (
            lambda: Doubled(samples, transform=CENTER, seed=0),
            "Doubled has a __getitem__ of its own",
        ),
        (lambda: _half(11, lambda pixels: pixels + 1), "the transform works per sample"),
    ):
        epochs = []
        for loader_of, options in ((DataLoader, {"num_workers": num_workers}), (TorchLoader, {})):
            loader = loader_of(
                ConcatDataset([_half(0), make()]), collate_fn=list, batch_size=3, **options
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FastDataWarning)
                epochs.append(
                    [(image.clone(), target) for batch in loader for image, target in batch]
                )
            if loader_of is DataLoader:
                assert why in loader.report().path
        for (image, target), (wanted_image, wanted_target) in zip(*epochs, strict=True):
            assert torch.equal(image, wanted_image)
            assert target == wanted_target


def test_joined_datasets_warn_once() -> None:
    """The reason why one dataset is read sample by sample is a warning of the first loader only."""
    joined = ConcatDataset([_half(0), _half(11, lambda pixels: pixels.float())])
    with pytest.warns(
        FastDataWarning, match="samples are read one by one, .*runs in Python on each sample"
    ):
        iter(DataLoader(joined))
    iter(DataLoader(joined))  # a warning would be an error


def test_a_resume_over_joined_datasets_keeps_the_draws() -> None:
    """The rest of a resumed epoch has the samples and draws of an uninterrupted one."""
    loaders = [
        DataLoader(JOINED["two"]({"seed": None}), batch_size=4, shuffle=True, num_workers=1)
        for _ in range(2)
    ]
    batches = iter(loaders[0])
    next(batches)
    loaders[1].load_state_dict(loaders[0].state_dict())
    assert _equal(list(loaders[1]), list(batches))


def test_joined_datasets_of_others_are_torchs(images: CachedDataset) -> None:
    """A ConcatDataset that contains other datasets, or one shorter than its samples, is read as torch reads it."""

    class Short(CachedDataset):
        def __len__(self) -> int:
            return 3

    with Short([(torch.zeros(3, 4, 3), i) for i in range(5)]) as short:
        for other in (short, TensorDataset(torch.zeros(3, 3, 4, 3), torch.arange(3))):
            loader = DataLoader(ConcatDataset([images, other]), batch_size=26)
            assert _labels(loader) == [[*range(23), 0, 1, 2]]
            assert "ConcatDataset is not a fastdata dataset" in loader.report().path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_belongs_to_the_user(images: CachedDataset, num_workers: int) -> None:
    """Batches that the user keeps, and views of them, are never overwritten."""
    loader = DataLoader(images, batch_size=3, num_workers=num_workers)
    kept = [(x[1:], y, x.clone()) for _ in range(4) for x, y in loader]
    assert all(torch.equal(view, copy[1:]) for view, _, copy in kept)
    assert loader.report().fresh_batches > 0


def test_memory_is_reused_when_the_user_lets_go(images: CachedDataset) -> None:
    """A loop that drops its batches needs no new memory after the first ones."""
    loader = DataLoader(images, batch_size=3, num_workers=2)
    addresses = {x.data_ptr() for _ in range(10) for x, _ in loader}
    assert loader.report().fresh_batches == 0
    assert len(addresses) <= 7


def test_a_collate_fn_gets_the_list_of_samples(images: CachedDataset) -> None:
    """The user's own collate_fn gets a list of (image, target) pairs, as with torch."""

    def pick(samples: list[Any]) -> Any:
        return [target for _, target in samples], torch.stack([image for image, _ in samples]).sum()

    outcome = []
    for make in (DataLoader, TorchLoader):
        with _images() as dataset:
            dataset.set_epoch(0)
            outcome.append(list(make(dataset, batch_size=4, collate_fn=pick)))
    assert outcome[0] == outcome[1]


class Flaky:
    """Samples of which the fifth cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise FileNotFoundError(2, "sample 4, /data/4.jpg is gone")
        return index


def test_an_exception_comes_at_its_place() -> None:
    """Batches before and after the failing one arrive, and the exception keeps its type and text."""
    iterator = iter(DataLoader(Flaky(), batch_size=2, num_workers=2, workers="thread"))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(FileNotFoundError, match=r"sample 4, /data/4\.jpg is gone"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[6, 7]]


def test_a_samplers_exception_comes_at_its_place(images: CachedDataset) -> None:
    """A sampler that fails in the middle raises after the batches that it gave."""

    def sampler() -> Iterator[int]:
        yield from range(3)
        raise RuntimeError("no more")

    class Once:
        def __iter__(self) -> Iterator[int]:
            return sampler()

    iterator = iter(DataLoader(images, sampler=Once(), num_workers=2))
    assert [next(iterator)[1].item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="no more"):
        next(iterator)


def _reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastdata-loader")]


def _fail_in_the_first_batch(loader: Any) -> None:
    for _ in loader:
        raise ZeroDivisionError


def test_a_batch_that_no_thread_can_read_is_an_error_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the system refuses a thread in the middle of an epoch, only the batch that needed it is lost."""
    submit = ThreadPoolExecutor.submit
    calls = itertools.count()

    def refuse_one(self: ThreadPoolExecutor, *arguments: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("can't start new thread")
        return submit(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse_one)
    with CachedDataset(level_samples(6, (1, 2, 2))) as dataset:
        batches = iter(DataLoader(dataset, num_workers=1, prefetch_factor=2))
        found = [next(batches)[1].item() for _ in range(3)]
        with pytest.raises(RuntimeError, match="can't start new thread"):
            next(batches)
        found += [labels.item() for _, labels in batches]
    assert found == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("how", ["exhausted", "break", "exception", "dropped"])
def test_no_thread_outlives_an_epoch(images: CachedDataset, how: str) -> None:
    """Threads end with the epoch, a break, an exception or the iterator itself, and the next epoch is whole."""
    loader = DataLoader(images, batch_size=2, num_workers=3)
    if how == "exhausted":
        iterator = iter(loader)
        assert len(list(iterator)) == 12
    elif how == "break":
        for _ in loader:
            break
    elif how == "exception":
        with pytest.raises(ZeroDivisionError):
            _fail_in_the_first_batch(loader)
    else:
        iterators = [iter(loader), iter(loader)]
        for iterator in iterators:
            next(iterator)
        assert _reader_threads()
        del iterator
        del iterators
    gc.collect()
    assert _reader_threads() == []
    assert [label for batch in _labels(loader) for label in batch] == list(range(23))


@pytest.mark.skipif(
    not hasattr(threading, "_shutdown_locks_lock"), reason="Python 3.13 has no such lock"
)
def test_garbage_collection_within_threading_does_not_deadlock(images: CachedDataset) -> None:
    """An iterator that is dropped while a lock of ``threading`` is held still ends its threads."""
    loader = DataLoader(images, 2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
        del iterator
        gc.collect()
    assert len(_labels(loader)) == 12


@pytest.mark.parametrize(
    ("workers", "persistent"), [("thread", False), ("process", False), ("process", True)]
)
def test_an_epoch_set_after_iter_is_the_one_read(
    images: CachedDataset, workers: Any, persistent: bool
) -> None:
    """If a sampler has set_epoch, workers start at next(): Lightning calls set_epoch between iter() and next()."""
    sampler: DistributedSampler[Any] = DistributedSampler(images, num_replicas=1, rank=0)
    options: dict[str, Any] = {
        "num_workers": 2,
        "workers": workers,
        "persistent_workers": persistent,
    }
    loader = DataLoader(images, batch_size=4, sampler=sampler, **options)
    before = _labels(loader)
    iterator = iter(loader)
    sampler.set_epoch(1)
    late = [labels.tolist() for _, labels in iterator]
    assert late == _labels(loader) != before


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_dropped_loader_is_gone_at_once(images: CachedDataset, workers: Any) -> None:
    """No reference cycle holds loader or iterator: threads and persistent workers end with the last reference."""
    gc.disable()
    try:
        loader = DataLoader(
            images, batch_size=4, num_workers=2, workers=workers, persistent_workers=True
        )
        iterator = iter(loader)
        next(iterator)
        gone = weakref.ref(loader), weakref.ref(iterator)
        del loader, iterator
        assert [reference() for reference in gone] == [None, None]
        assert _reader_threads() == []
    finally:
        gc.enable()


def test_two_epochs_can_run_at_once(images: CachedDataset) -> None:
    """Two iterators of one loader do not disturb each other."""
    loader = DataLoader(images, batch_size=4, num_workers=2)
    pairs = list(zip(loader, loader, strict=True))
    assert all(torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize("timeout_s", [0.05, np.float32(0.05)], ids=["float", "numpy"])
def test_a_slow_batch_times_out(timeout_s: Any) -> None:
    """timeout= raises an error with torch's message."""
    release = threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            release.wait(10)
            return index

    loader = DataLoader(Slow(), num_workers=1, timeout=timeout_s, workers="thread")
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.05\d* seconds"):
        next(iterator)
    release.set()


def test_other_datasets_are_read_as_by_torch() -> None:
    """Other datasets, streams and batch_size=None behave as in torch, and the report says so."""
    tensors = TensorDataset(torch.arange(7), torch.arange(7) * 2)
    for dataset, options, reason in (
        (tensors, {"batch_size": 3}, "TensorDataset is not a fastdata dataset"),
        (
            tensors,
            {"batch_size": 3, "num_workers": 2},
            "2 worker processes, with batches in shared memory, because TensorDataset is not",
        ),
        (tensors, {"batch_size": None}, "batch_size=None asks for single samples"),
        (Stream(), {"batch_size": 2}, "an IterableDataset is read in order"),
    ):
        loader = DataLoader(dataset, **options)
        ours, theirs = list(loader), list(TorchLoader(dataset, **options))
        assert str(ours) == str(theirs)
        assert reason in loader.report().path
    assert repr(loader).startswith("DataLoader of Stream: an unknown number of batches of")


def test_the_report_names_engine_and_reason(images: CachedDataset) -> None:
    """report().path names engine and reason for every way a loader can be made."""
    slow = v1.Compose([v1.Lambda(lambda image: +image), v1.ConvertImageDtype(torch.float32)])
    with _images(slow) as per_sample, _images() as renamed, _images() as noisy:
        renamed.target_transform = {n: n for n in range(23)}.get
        noisy.target_transform = lambda label: label + torch.rand(())
        for dataset, options, path in (
            (images, {"num_workers": 1}, "whole batches, read by 1 thread"),
            (images, {}, "whole batches, read in the training loop: num_workers=0"),
            (
                images,
                {"num_workers": 1, "workers": "process"},
                "1 worker process, with batches in shared memory, because workers='process'",
            ),
            (
                images,
                {"num_workers": 1, "worker_init_fn": print},
                "by 1 thread",
            ),
            (
                images,
                {"num_workers": 1, "worker_init_fn": print, "collate_fn": list},
                "worker_init_fn is for worker processes",
            ),
            (renamed, {"num_workers": 1}, "whole batches, read by 1 thread"),
            (
                noisy,
                {"num_workers": 1},
                "1 worker process, with batches in shared memory, because target_transform= may draw random numbers",
            ),
            (noisy, {"num_workers": 1, "workers": "thread"}, "whole batches, read by 1 thread"),
            (noisy, {}, "whole batches, read in the training loop: num_workers=0"),
            (per_sample, {}, "is not a known batch op), read in the training loop: num_workers=0"),
            (per_sample, {"num_workers": 1}, "the transform works per sample: Lambda"),
            (
                per_sample,
                {"num_workers": 1, "workers": "thread"},
                "is not a known batch op), read by 1 thread",
            ),
        ):
            assert path in DataLoader(dataset, **options).report().path


def test_a_lost_fast_path_warns_once() -> None:
    """The warning names the step and the cure, and points to the line that began the epoch."""
    steps = [v1.RandomCrop(4), v1.Lambda(lambda image: +image), v1.ConvertImageDtype(torch.float32)]
    with _images(v1.Compose(steps)) as dataset:
        text = r"whole batches: Lambda\(.*test_loader.py, line \d+\)\) is not a known batch op, so it runs in "
        with pytest.warns(
            FastDataWarning, match=rf"{text}Python on each sample\. If it gives .*prepare="
        ) as said:
            list(DataLoader(dataset, batch_size=4))
        assert said[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(DataLoader(dataset, batch_size=4))


class GaussianBlur:
    """A user's own class with the name of a torchvision transform."""

    def __call__(self, image: Any) -> Any:
        return image * 1


class Solarization:
    def __call__(self, image: Any) -> Any:
        return ImageOps.solarize(image, 100) if image.getbbox() else image


LAST = [v1.RandomCrop(4), v1.ConvertImageDtype(torch.float32)]


@pytest.mark.parametrize(
    ("transform", "cure"),
    [
        (v1.Compose([Solarization(), *LAST]), r"in your loader=, or as prepare= of CachedDataset"),
        (
            v1.Compose([v1.RandomApply([Solarization()]), *LAST]),
            r"sample\. Pass it to CudaPrefetcher",
        ),
        (
            Views(v1.Compose([v1.Lambda(lambda image: +image), *LAST])),
            r"docs/served-steps.md lists the steps that fastdata runs",
        ),
    ],
)
def test_the_warning_of_a_lost_fast_path_gives_the_cure(transform: Any, cure: str) -> None:
    """The cure is known steps, also in views; otherwise prepare=, or transform= of the prefetcher."""
    with (
        _images(transform) as dataset,
        pytest.warns(FastDataWarning, match=rf"on each .*{cure}"),
    ):
        DataLoader(dataset, batch_size=4).__iter__()


class Own(CachedDataset):
    """A subclass with its own method to read samples."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


def test_an_overridden_method_that_costs_the_fast_path_warns() -> None:
    """A warning names the overridden method; there is none if the user chose to read samples one by one."""
    samples = level_samples(4, (3, 4, 4))
    with (
        Own(samples) as own,
        pytest.warns(FastDataWarning, match=r"Own\.__getitem__ is called"),
    ):
        list(DataLoader(own))
    transform = v1.Lambda(lambda image: +image)
    with (
        warnings.catch_warnings(),
        CachedDataset(samples, transform=transform, batch_ops=False) as asked,
        CachedDataset(samples, transform=transform) as processes,
    ):
        warnings.simplefilter("error")
        list(DataLoader(asked))
        list(DataLoader(processes, num_workers=1, workers="process"))


def test_the_report_counts_the_epoch(images: CachedDataset) -> None:
    """The report has the right number of batches and samples, and its times are plausible."""
    loader = DataLoader(images, batch_size=4, num_workers=1)
    for _ in loader:
        time.sleep(0.002)
    report = loader.report()
    assert (report.batches, report.samples) == (6, 23)
    assert report.busy_s >= 0.012
    assert "6  23 samples" in str(report)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"batch_size": 0},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"multiprocessing_context": "fork"},
    ],
    ids=shown,
)
def test_wrong_arguments_are_torchs_errors(images: CachedDataset, options: dict[str, Any]) -> None:
    """Arguments that torch refuses raise torch's errors, with the same type and text."""
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        TorchLoader(images, **options)
    with pytest.raises(theirs.type) as ours:
        DataLoader(images, **options)
    assert str(ours.value) == str(theirs.value)


def test_an_unknown_engine_is_refused(images: CachedDataset) -> None:
    """The error for a wrong workers= lists the choices."""
    with pytest.raises(ValueError, match="workers='threads' is not one of"):
        DataLoader(images, workers="threads")  # type: ignore[arg-type]


def test_samplers_are_reachable(images: CachedDataset) -> None:
    """The attributes that frameworks use exist: sampler, batch_sampler, dataset, and the sampler's set_epoch."""
    sampler = DistributedSampler(images, num_replicas=2, rank=1, shuffle=True)
    loader = DataLoader(images, batch_size=4, sampler=sampler, num_workers=1)
    assert loader.sampler is sampler
    assert loader.batch_sampler.sampler is sampler  # type: ignore[union-attr]
    sampler.set_epoch(3)
    assert [y for batch in _labels(loader) for y in batch] == list(sampler)
    weighted = WeightedRandomSampler([1.0] * 23, 50)
    assert (
        sum(map(len, _labels(DataLoader(images, batch_size=8, sampler=weighted, num_workers=2))))
        == 50
    )


def test_no_warning_is_raised_for_threads_beyond_the_cores(images: CachedDataset) -> None:
    """Torch warns of more processes than cores; threads are limited to the cores instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(images, batch_size=4, num_workers=500)
        assert len(list(loader)) == 6
    assert loader.report().workers < 500


def test_the_collate_of_torch_works_too(images: CachedDataset) -> None:
    """Passing torch's default_collate gives the same batches."""
    with _images() as other:
        mine = list(DataLoader(images, batch_size=5, num_workers=1))
        assert _equal(
            list(DataLoader(other, batch_size=5, num_workers=1, collate_fn=default_collate)), mine
        )


@pytest.mark.parametrize("collate_fn", [collate, default_collate])
def test_known_collate_functions_are_not_checked_for_draws(
    images: CachedDataset, monkeypatch: pytest.MonkeyPatch, collate_fn: Any
) -> None:
    """The two default functions draw nothing, so they run without the generator that makes others slower."""
    monkeypatch.setattr("fastdata.datasets.draws.BatchDraws", None)
    loader = DataLoader(images, batch_size=23, collate_fn=collate_fn)
    assert [labels.tolist() for _, labels in loader] == [[*range(23)]]


def test_ctrl_c_in_the_loop_leaves_at_once(fresh: Interpreters) -> None:
    """Ctrl-C ends a process with reader threads, and only the KeyboardInterrupt is printed."""
    script = """
        import os, signal, torch
        from fastdata import CachedDataset, DataLoader, FastDataWarning
        dataset = CachedDataset([(torch.zeros(3, 64, 64), i) for i in range(500)])
        for images, labels in DataLoader(dataset, batch_size=2, num_workers=2):
            os.kill(os.getpid(), signal.SIGINT)
    """
    done = fresh.run(script)
    assert done.stderr.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert done.returncode != 0


def test_a_loader_serves_in_a_handler_of_atexit() -> None:
    """A loader works when no thread can be started any more, also in a handler registered before fastdata's."""
    script = """
        import atexit
        atexit.register(lambda: print(sum(int(labels.sum()) for _, labels in loader), loader.report().workers))
        import torch
        from fastdata import CachedDataset, DataLoader
        dataset = CachedDataset([(torch.zeros(3, 4, 4), i) for i in range(10)])
        loader = DataLoader(dataset, batch_size=2, num_workers=2)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.stderr) == (["45", "0"], "")


@pytest.mark.parametrize(
    ("cores", "ranks", "asks", "workers"),
    [
        (1, 1, {}, 0),
        (1, 1, {"persistent_workers": True}, 1),
        (2, 1, {}, 1),
        (2, 1, {"timeout": 3}, 1),
        (8, 1, {}, 7),
        (8, 4, {}, 1),
        (8, 3, {}, 1),
        (64, 8, {}, 7),
        (2, 8, {}, 0),
        (2, 8, {"prefetch_factor": 3}, 1),
        (1, 1, {"multiprocessing_context": "fork"}, 1),
    ],
)
def test_auto_leaves_a_core_to_the_training_loop(
    cores: int, ranks: int, asks: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_workers='auto' is a rank's share of the cores minus one; it is 0 only if no argument needs workers."""
    monkeypatch.setattr(limits, "usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert DataLoader(range(3), num_workers="auto", workers="thread", **asks).num_workers == workers  # type: ignore[arg-type]


def test_auto_is_a_number_once_the_loader_is_made(
    images: CachedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is read when a loader is made; from then on ``num_workers`` is a plain number."""
    monkeypatch.setattr(limits, "usable_cores", lambda: 12)
    assert DataLoader(images, num_workers="auto").num_workers == 11
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    loader = DataLoader(images, batch_size=4, num_workers="auto")
    assert (loader.num_workers, loader.prefetch_factor) == (2, 2)
    assert _labels(loader) == _labels(DataLoader(images, batch_size=4))


def test_other_words_for_num_workers_are_refused(images: CachedDataset) -> None:
    """The error for a misspelt "auto" shows the text that was found."""
    with pytest.raises(ValueError, match="num_workers='all' is neither a number nor 'auto'"):
        DataLoader(images, num_workers="all")  # type: ignore[arg-type]


def test_a_subsets_indices_may_change_between_epochs(images: CachedDataset) -> None:
    """An epoch reads the indices that the Subset has when it begins, as with torch's loader."""
    part = Subset(images, [0, 1, 2])
    loader = DataLoader(part, batch_size=2)
    assert _labels(loader) == [[0, 1], [2]]
    part.indices = [5, 6, 7]
    assert _labels(loader) == [[5, 6], [7]]


def test_a_subset_of_another_dataset_has_any_indices() -> None:
    """Indices of a Subset may be any keys that its dataset accepts."""

    class Named(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: Any) -> int:
            return {"a": 1, "b": 2}[index]

    loader = DataLoader(Subset(Named(), ["a", "b"]), batch_size=2)  # type: ignore[list-item]
    assert [batch.tolist() for batch in loader] == [[1, 2]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_behind_a_wrong_index_still_come(images: CachedDataset, num_workers: int) -> None:
    """The error comes in the place of its batch, as in torch's iterators."""
    batches = iter(
        DataLoader(images, batch_sampler=[[0, 1], [99, 2], [3, 4]], num_workers=num_workers)
    )
    assert next(batches)[1].tolist() == [0, 1]
    with pytest.raises(IndexError, match="index 99 is out of range"):
        next(batches)
    assert next(batches)[1].tolist() == [3, 4]


@pytest.mark.parametrize(("workers", "count"), [("thread", 0), ("thread", 1), ("process", 1)])
def test_freeing_a_batch_runs_no_python_code(workers: Any, count: int) -> None:
    """Freeing a batch runs no Python code, in which a Ctrl-C would be printed and lost."""
    pixels = level_samples(8, (3, 4, 4))
    with CachedDataset(pixels) as dataset:
        batches = iter(DataLoader(dataset, batch_size=2, num_workers=count, workers=workers))
        batch = next(batches)
        called: list[str] = []
        sys.setprofile(
            lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None
        )
        del batch
        sys.setprofile(None)
        assert called == []
        assert len(list(batches)) == 3
