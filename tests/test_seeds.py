"""The seeds of random draws in batch ops: torch's seeds, or a number of the user's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, default_collate
from torch.utils.data import DataLoader as TorchLoader
from torchvision import transforms as v1
from torchvision.transforms import v2

from fastdata import CachedDataset, ChunkedLoader, DataLoader, Views

CROP = v1.Compose([v1.RandomCrop((4, 3)), v1.RandomHorizontalFlip()])
PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (23, 3, 9, 8), np.uint8))

PERSIST = {"num_workers": 2, "persistent_workers": True}
ENGINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "inline": (DataLoader, {}),
    "threads": (DataLoader, {"num_workers": 2, "workers": "thread"}),
    "processes": (DataLoader, {"num_workers": 2, "workers": "process"}),
    "torch, processes": (TorchLoader, {"num_workers": 2}),
    "torch, one process": (TorchLoader, {"num_workers": 1}),
    "persistent threads": (DataLoader, PERSIST | {"workers": "thread"}),
    "persistent processes": (DataLoader, PERSIST | {"workers": "process"}),
    "torch, persistent processes": (TorchLoader, PERSIST),
}
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)
OURS = [name for name, (loader_class, _) in ENGINES.items() if loader_class is DataLoader]

Epoch = list[Any]


class Single(CachedDataset):
    """A dataset with its own ``__getitem__``."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Pairs(list[Any]):
    targets = range(len(PIXELS))


def _images(
    kind: type[CachedDataset] = CachedDataset, transform: Any = CROP, **options: Any
) -> CachedDataset:
    pairs = Pairs((image, i) for i, image in enumerate(PIXELS))
    return kind(pairs, transform=transform, **options)


@pytest.fixture
def images() -> Iterator[CachedDataset]:
    with _images() as dataset:
        yield dataset


def _epochs(dataset: Any, engine: str, count: int = 2, **options: Any) -> list[Epoch]:
    loader_class, arguments = ENGINES[engine]
    loader = loader_class(dataset, batch_size=5, **arguments, **options)
    return [_plain(loader) for _ in range(count)]


def _plain(loader: Any) -> Epoch:
    return [(pixels.tolist(), labels.tolist()) for pixels, labels in loader]


@EVERY_ENGINE
def test_torchs_seed_decides_the_draws(images: CachedDataset, engine: str) -> None:
    """Two loaders over one dataset draw the same for equal manual_seed, and else not; two epochs differ."""
    outcome = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outcome.append(_epochs(images, engine))
    assert outcome[0] == outcome[1]
    for a, b in (
        (outcome[0][0], outcome[0][1]),
        (outcome[0][0], outcome[2][0]),
        (outcome[0][1], outcome[2][1]),
    ):
        assert all(x != y for x, y in zip(a, b, strict=True))


@EVERY_ENGINE
def test_the_loaders_generator_decides_the_draws(images: CachedDataset, engine: str) -> None:
    """With generator= its seed counts, and the global seed does not."""
    outcome = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        outcome.append(
            _epochs(images, engine, generator=torch.Generator().manual_seed(seed), shuffle=True)
        )
    assert outcome[0] == outcome[1]
    assert outcome[0] != outcome[2]


def test_every_engine_draws_alike(images: CachedDataset) -> None:
    """For one manual_seed all engines give equal epochs; persistent workers draw a base seed once."""
    outcome = {}
    for engine in OURS:
        torch.manual_seed(1)
        outcome[engine] = _epochs(Subset(images, range(20)), engine, count=3)
    inline, persistent = outcome["inline"], outcome["persistent threads"]
    for engine, epochs in outcome.items():
        assert epochs == (persistent if "persistent" in engine else inline), engine
    assert persistent[0] == inline[0]
    assert persistent[1] != inline[1]


@pytest.mark.parametrize("engine", ["torch, processes", "torch, persistent processes"])
def test_torchs_workers_have_new_draws(images: CachedDataset, engine: str) -> None:
    """Under torch's loader a sample has other draws than in the last epoch, and than other samples."""
    same = torch.zeros(23, 3, 9, 8, dtype=torch.uint8) + PIXELS[:1]
    with CachedDataset([(image, 0) for image in same], transform=CROP, seed=5) as dataset:
        epochs = [
            [image for images, _ in epoch for image in images]
            for epoch in _epochs(dataset, engine, 4)
        ]
    assert all(len({json.dumps(epoch[i]) for epoch in epochs}) > 1 for i in range(23))
    assert len({json.dumps(image) for image in epochs[0]}) > 5


def test_an_epoch_is_repeated_by_its_seed(images: CachedDataset) -> None:
    """A loader that is seeded again repeats its epoch, as torch's does."""
    loader = DataLoader(images, batch_size=5, shuffle=True, num_workers=2)
    outcome = []
    for _ in range(2):
        torch.manual_seed(1)
        outcome.append(_plain(loader))
    assert outcome[0] == outcome[1]


def test_torchs_loader_without_workers() -> None:
    """Each epoch and each manual_seed has other draws; a new dataset and the same seed have the same."""
    outcome = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with _images() as dataset:
            loader = TorchLoader(dataset, batch_size=5)
            outcome.append([_plain(loader) for _ in range(3)])
    assert outcome[0] == outcome[1]
    assert all(a != b for a, b in zip(outcome[0], outcome[2], strict=True))
    assert len({json.dumps(epoch) for epoch in outcome[0]}) == 3


def test_loaders_that_take_turns_have_new_draws(images: CachedDataset) -> None:
    """A torch loader with persistent workers does not repeat draws if another reads the samples in between."""
    training, other = (
        TorchLoader(images, batch_size=5, **PERSIST),
        TorchLoader(images, batch_size=5, num_workers=1),
    )
    epochs = []
    for _ in range(3):
        epochs += [_plain(training), _plain(other)]
    assert len({json.dumps(epoch) for epoch in epochs}) == 6


@pytest.mark.parametrize("engine", OURS)
def test_a_number_fixes_the_draws(engine: str) -> None:
    """With a number torch's seeds do not count; loaders over new datasets begin alike, and epochs differ."""
    outcome = []
    for seed, torchs_seed in ((5, 1), (5, 2), (6, 1)):
        torch.manual_seed(torchs_seed)
        with _images(seed=seed) as dataset:
            outcome.append(_epochs(dataset, engine))
    assert outcome[0] == outcome[1]
    assert outcome[0][0] != outcome[0][1]
    assert outcome[0][0] != outcome[2][0]


def test_a_new_loader_begins_at_epoch_0() -> None:
    """A loader counts its epochs, not the dataset; an epoch that is set on the dataset counts for all."""
    with _images(seed=5) as dataset:
        loader = DataLoader(dataset, batch_size=5)
        first, second = _plain(loader), _plain(loader)
        assert _plain(DataLoader(dataset, batch_size=5, num_workers=2)) == first
        dataset.set_epoch(1)
        assert _plain(DataLoader(dataset, batch_size=5)) == _plain(loader) == second


@pytest.mark.parametrize(
    "engine", ["inline", "threads", "processes", "torch, processes", "torch, one process"]
)
def test_a_set_epoch_changes_the_draws_of_a_seed(images: CachedDataset, engine: str) -> None:
    """Under one seed of torch, each set_epoch on the dataset has other draws."""
    outcome = []
    for epoch in (0, 3, 3):
        images.set_epoch(epoch)
        torch.manual_seed(1)
        outcome.append(_epochs(images, engine, count=1))
    assert outcome[0] != outcome[1] == outcome[2]


def test_a_set_epoch_reaches_workers_that_persist() -> None:
    """Draws of a seed follow the epoch in every worker; a view has its own epoch."""
    with _images(seed=5) as dataset:
        dataset.set_epoch(0)
        view = dataset.with_transform(CROP)
        of_epoch_0 = _plain(TorchLoader(view, batch_size=5))
        loader = TorchLoader(dataset, batch_size=4, shuffle=True, **PERSIST)
        for epoch in range(3):
            dataset.set_epoch(epoch)
            served = {
                label: image
                for images, labels in _plain(loader)
                for image, label in zip(images, labels, strict=True)
            }
            images, _ = default_collate([dataset[i] for i in range(len(dataset))])
            assert served == dict(enumerate(images.tolist()))
        view.set_epoch(0)
        assert _plain(TorchLoader(view, batch_size=5)) == of_epoch_0
        assert default_collate([dataset[i] for i in range(5)])[0].tolist() != of_epoch_0[0][0]


# Where no loader of fastdata's reads


READS: dict[str, Callable[[Any], Any]] = {
    "an item": lambda dataset: dataset[3][0],
    "a batch": lambda dataset: default_collate(dataset.__getitems__([3, 0, 3]))[0],
    "an item by an own method": lambda dataset: dataset[3][0],
    "a batch by an own method": lambda dataset: default_collate(dataset.__getitems__([3, 0, 3]))[0],
}


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("read", READS)
def test_reads_follow_torchs_generator(read: str, seed: int | None) -> None:
    """Reads differ, the same manual_seed repeats them, fork_rng undoes them; seed= alone has no effect."""
    numpy_state = np.random.get_state()[1].copy()  # type: ignore[index]
    kind = Single if "own" in read else CachedDataset
    outcome = []
    with _images(kind, seed=seed) as dataset:
        for torchs_seed in (1, 1, 2):
            torch.manual_seed(torchs_seed)
            outcome.append([READS[read](dataset).tolist() for _ in range(8)])
        with torch.random.fork_rng(devices=[]):
            first = READS[read](dataset)
        assert torch.equal(READS[read](dataset), first)
    assert outcome[0] == outcome[1] != outcome[2]
    assert len({json.dumps(pixels) for pixels in outcome[0]}) > 4
    assert (np.random.get_state()[1] == numpy_state).all()  # type: ignore[index]


@pytest.mark.parametrize("read", READS)
def test_a_read_takes_one_number_if_something_is_random(read: str) -> None:
    """Each call, and each item of an own method, takes one number from torch's generator; other reads take none."""
    kind = Single if "own" in read else CachedDataset
    count = 3 if read == "a batch by an own method" else 1
    floats = v2.ToDtype(torch.float32, scale=True)
    for steps, drawn in (
        ([v1.CenterCrop(4), floats, v1.Normalize([0.5] * 3, [0.2] * 3)], 0),
        ([v1.RandomCrop(4), v2.Identity(), floats], count),
        ([v1.CenterCrop(4), Views(v1.CenterCrop(3), v1.RandomCrop(3))], count),
    ):
        with _images(kind, v1.Compose(steps)) as dataset:
            torch.manual_seed(1)
            READS[read](dataset)
            after = torch.get_rng_state()
        torch.manual_seed(1)
        for _ in range(drawn):
            torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("loader_class", [TorchLoader, DataLoader])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:samples are read one by one")
def test_images_and_masks_stay_aligned_by_seeds(loader_class: Any, workers: int) -> None:
    """The same seed before each read keeps two datasets aligned, whatever was read from one before."""
    with _images() as images, _images() as masks:
        for index in (0, 1, 1):
            images[index]
        loader = loader_class(Aligned(images, masks), batch_size=5, num_workers=workers)
        epochs = [[torch.cat(parts) for parts in zip(*loader, strict=True)] for _ in range(2)]
    for image, mask in epochs:
        assert torch.equal(image, mask)
    assert not torch.equal(epochs[0][0], epochs[1][0])


class Aligned(Dataset[Any]):
    """Sets the same seed before it reads an image and its mask, as segmentation scripts do."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int) -> Any:
        seed = int(torch.randint(2**31, ()))
        read = []
        for part in self.parts:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                read.append(part[index][0])
        return read


class Fixed(CachedDataset):
    """Sets the index as seed, so that a sample is augmented equally in all epochs."""

    def __getitem__(self, index: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return super().__getitem__(index)


@pytest.mark.parametrize("engine", [name for name in ENGINES if "threads" not in name])
@pytest.mark.filterwarnings("ignore:samples are read one by one")
def test_an_own_method_may_seed_by_the_index(engine: str) -> None:
    """Without seed=, an own __getitem__ that calls manual_seed(index) gives the same crop in all epochs."""
    with _images(Fixed) as dataset:
        first, second = _epochs(dataset, engine)
    assert first == second


@pytest.mark.parametrize("engine", OURS)
@pytest.mark.filterwarnings("ignore:samples are read one by one")
def test_an_own_method_with_a_seed_follows_it(engine: str) -> None:
    """With seed=, manual_seed in the method has no effect; epochs differ, and every engine draws the same."""
    with _images(Fixed, seed=5) as dataset, _images(seed=5) as plain:
        epochs = _epochs(dataset, engine)
        assert epochs == _epochs(plain, "inline")
    assert epochs[0] != epochs[1]


class Mixed(CachedDataset):
    """Reads batches of another dataset, but none for the first samples."""

    def __init__(self, other: CachedDataset, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.other = other

    def __getitem__(self, index: int) -> Any:
        others = self.other.__getitems__([index] * (index // 9))
        crop, label = super().__getitem__(index)
        assert all(not torch.equal(crop, other) for other, _ in others)
        return crop, label


@pytest.mark.filterwarnings("ignore:samples are read one by one")
def test_an_own_method_may_read_batches_of_another_dataset() -> None:
    """Their draws differ from those of the item, and follow the seed; batches may be empty."""
    with _images(seed=5) as other:
        pairs = Pairs((image, i) for i, image in enumerate(PIXELS))
        with Mixed(other, pairs, transform=CROP, seed=5) as dataset:
            assert _epochs(dataset, "inline") == _epochs(dataset, "threads")


SAME = [(PIXELS[0], 0)] * 20


class Beside(CachedDataset):
    """Adds the same sample of another dataset."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], self.other[index][0]


class Both(Dataset[Any]):
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(SAME)

    def __getitem__(self, index: int) -> Any:
        return [part[index][0] for part in self.parts]


def _beside(first: CachedDataset, second: CachedDataset) -> CachedDataset:
    beside = Beside(SAME, transform=first.transform, seed=first.reader().stored.options.seed)
    beside.other = second
    return beside


TOGETHER: dict[str, Callable[[Any, Any], Any]] = {
    "joined": lambda first, second: ConcatDataset([first, second]),
    "subsets": lambda *parts: ConcatDataset([Subset(part, range(20)) for part in parts]),
    "stacked": StackDataset,
    "wrapped": Both,
    "in an own method": _beside,
}


@pytest.mark.parametrize("together", TOGETHER)
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("engine", ["inline", "threads", "torch, processes"])
@pytest.mark.filterwarnings("ignore:samples are read one by one")
def test_two_datasets_draw_independently(together: str, engine: str, seed: int | None) -> None:
    """Sample i of two datasets has two crops, which are the same for the same seeds."""
    crop = v1.RandomCrop((2, 2))
    outcome = []
    for _ in range(2):
        torch.manual_seed(1)
        with (
            CachedDataset(SAME, transform=crop, seed=seed) as first,
            CachedDataset(SAME, transform=crop, seed=seed) as second,
        ):
            loader_class, arguments = ENGINES[engine]
            loader = loader_class(TOGETHER[together](first, second), batch_size=4, **arguments)
            epoch = [batch[0] if together in ("joined", "subsets") else batch for batch in loader]
            if together in ("joined", "subsets"):
                images = torch.cat(epoch)
                ones, others = images[:20], images[20:]
            else:
                ones, others = (
                    torch.cat([part[0] if type(part) is list else part for part in parts])
                    for parts in zip(*epoch, strict=True)
                )
        outcome.append((ones.clone(), others.clone()))
    assert sum(map(torch.equal, ones, others)) < 5  # of 56 places of a crop
    assert all(map(torch.equal, *outcome))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_epoch_of_a_seed_decides_every_read(workers: int) -> None:
    """With seed= and set_epoch, sample i is equal in items, batches and torch's loader; epochs share no draws."""
    places = torch.arange(30 * 30, dtype=torch.int32).view(1, 30, 30)
    image = torch.cat([places % 256, places // 256, places * 0]).to(torch.uint8)
    epochs = []
    with CachedDataset([(image, 0)] * 5, transform=v1.RandomCrop(4), seed=5) as dataset:
        dataset.set_epoch(0)
        torchs = TorchLoader(dataset, batch_size=2, sampler=[0, 1, 2, 3, 4, 3], num_workers=workers)
        ours = DataLoader(dataset, batch_size=5, num_workers=workers)
        for epoch in range(4):
            dataset.set_epoch(epoch)
            alone = torch.stack([dataset[index][0] for index in range(5)])
            for _ in range(2):
                read = torch.cat([images for images, _ in torchs])
                assert torch.equal(read[:5], alone)
                assert torch.equal(read[5], alone[3])
                assert torch.equal(next(iter(ours))[0], alone)
            first, again = (image for image, _ in dataset.__getitems__([3, 3]))
            assert torch.equal(first, alone[3])
            assert not torch.equal(first, again)
            epochs.append({json.dumps(each.tolist()) for each in (*alone, again)})
    assert all(len(epoch) == 6 for epoch in epochs)
    assert len(set.union(*epochs)) > 22  # of 729 places of a crop


@pytest.mark.parametrize("seen", [2, 5], ids=["within", "after"])
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("engine", OURS)
def test_a_resume_keeps_the_draws(engine: str, epochs: int, seen: int) -> None:
    """In a process with another seed, the rest of an epoch and the epochs after it have the same draws."""
    generator = torch.Generator().manual_seed(1)
    with _images() as dataset:
        loader = DataLoader(
            dataset, batch_size=5, generator=generator, shuffle=True, **ENGINES[engine][1]
        )
        for _ in range(epochs - 1):
            _plain(loader)
        iterator = iter(loader)
        for _ in range(seen):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = _plain(iterator)
        expected = [*([rest] if rest else []), _plain(loader), _plain(loader)]
    torch.manual_seed(99)
    with _images() as dataset:
        loader = DataLoader(
            dataset, batch_size=5, generator=torch.Generator(), shuffle=True, **ENGINES[engine][1]
        )
        loader.load_state_dict(state)
        assert [_plain(loader) for _ in expected] == expected


# Chunked


def _chunked(dataset: Any) -> ChunkedLoader:
    return ChunkedLoader(dataset, 5, memory_limit="64GiB", chunk_samples=10, num_workers=1)


def test_a_chunked_loader_follows_torchs_seed(images: CachedDataset) -> None:
    """It takes the same numbers from torch as DataLoader, and draws equally in each set epoch; none with a number."""

    def two_epochs(loader: Any, seed: int) -> tuple[Epoch, Epoch, list[int]]:
        torch.manual_seed(seed)
        loader.set_epoch(1)
        return _plain(loader), _plain(loader), torch.get_rng_state().tolist()

    with _chunked(images) as loader:
        ours, other = two_epochs(loader, 1), two_epochs(loader, 2)
    order = [label for _, labels in ours[0] for label in labels]
    assert ours == two_epochs(DataLoader(images, batch_size=5, sampler=order), 1)
    assert ours[0] not in (ours[1], other[0])
    with _images(seed=5) as fixed, _chunked(fixed) as loader:
        before = torch.get_rng_state()
        _plain(loader)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seen", [2, 5], ids=["within", "after"])
def test_a_resume_of_a_chunked_loader_keeps_the_draws(images: CachedDataset, seen: int) -> None:
    """The rest of an epoch, and the next one, have the draws of a run without a stop."""
    with _chunked(images) as loader:
        iterator = iter(loader)
        for _ in range(seen):
            next(iterator)
        before = torch.get_rng_state()
        state = json.loads(json.dumps(loader.state_dict()))
        assert torch.equal(torch.get_rng_state(), before)
        expected = _plain(iterator) or _plain(loader)
    torch.manual_seed(99)
    with _images() as dataset, _chunked(dataset) as loader:
        loader.load_state_dict(state)
        assert _plain(loader) == expected


MIX = v2.RandomChoice([v2.MixUp(num_classes=23), v2.CutMix(num_classes=23)])


def _mixed(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return MIX(images.float(), labels)


def _noisy(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return images + torch.rand(2)[0] + torch.randn(images.shape) * torch.nn.functional.dropout(
        images + 1.0
    ), labels


WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1, "workers": "thread"},
    {"num_workers": 3, "workers": "thread"},
    {"num_workers": 1, "workers": "process"},
    {"num_workers": 2, "workers": "process"},
    {"num_workers": 2},
]


@pytest.mark.parametrize("collate_fn", [_mixed, _noisy])
def test_a_collate_fn_draws_the_same_in_any_worker(images: CachedDataset, collate_fn: Any) -> None:
    """Torch's draws in a collate_fn depend on base seed and batch number, not on the worker."""
    outcome = []
    for options, seed in [*((options, 1) for options in WORKERS), (WORKERS[0], 2)]:
        torch.manual_seed(seed)
        loader = DataLoader(
            Subset(images, range(22)), batch_size=5, collate_fn=collate_fn, **options
        )
        outcome.append([_plain(loader) for _ in range(2)])
    *equal, other = outcome
    assert all(each == equal[0] for each in equal)
    assert other != equal[0]
    assert equal[0][0] != equal[0][1]


class Halved:
    """A step that fastdata does not know."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image // 2


SLOWLY: dict[str, Any] = {
    "an unknown step": lambda: _images(transform=v1.Compose([*CROP.transforms, Halved()]), seed=3),
    "batch_ops off": lambda: _images(transform=Halved(), batch_ops=False, seed=3),
    "an own method": lambda: _images(Single, seed=3),
    "a target_transform": lambda: _images(target_transform=abs, seed=3),
}


@pytest.mark.filterwarnings("ignore:samples are read one by one")
@pytest.mark.parametrize("name", SLOWLY)
def test_a_collate_fn_draws_alike_however_samples_are_read(name: str) -> None:
    """Samples that are prepared or changed one by one are mixed equally with any number of workers."""
    outcome = []
    for workers in (0, 1, 2):
        with SLOWLY[name]() as dataset:
            loader = DataLoader(dataset, batch_size=5, collate_fn=_mixed, num_workers=workers)
            outcome.append([_plain(loader) for _ in range(2)])
    assert outcome[0] == outcome[1] == outcome[2]
    assert outcome[0][0] != outcome[0][1]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_resumed_collate_fn_keeps_its_draws(images: CachedDataset, workers: str) -> None:
    """After a resume inside the epoch, each batch is mixed as in a run without a stop."""
    arguments: dict[str, Any] = {
        "batch_size": 5,
        "num_workers": 2,
        "workers": workers,
        "collate_fn": _mixed,
    }
    loader = DataLoader(images, **arguments)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = loader.state_dict()
    rest = _plain(batches)
    again = DataLoader(images, **arguments)
    again.load_state_dict(state)
    assert _plain(again) == rest


@pytest.mark.filterwarnings("ignore:samples are read one by one")
@pytest.mark.parametrize("transform", [CROP, Halved()])
def test_a_collate_fn_leaves_the_users_generator_alone(transform: Any) -> None:
    """A loop draws the same numbers while batches are mixed as with torch's workers."""
    after = []
    with _images(transform=transform) as images:
        for loader_class, workers in ((TorchLoader, 1), (DataLoader, 0), (DataLoader, 2)):
            torch.manual_seed(1)
            loader = loader_class(images, batch_size=5, num_workers=workers, collate_fn=_mixed)
            after.append([torch.rand(()).item() for _ in loader])
    assert after[0] == after[1] == after[2]


def _torchs(label: int) -> float:
    return label + torch.rand(()).item()


def _numpys(label: int) -> float:
    return label + np.random.rand()


def _pythons(label: int) -> float:
    return label + random.random()


@pytest.mark.parametrize("noise", [_torchs, _numpys, _pythons])
def test_a_target_transform_that_draws_is_seeded_as_torchs(noise: Any) -> None:
    """Labels, and draws of the loop, follow manual_seed as with torch's workers: the same labels."""
    outcome = []
    with _images(transform=v1.CenterCrop(3), target_transform=noise, seed=3) as dataset:
        for loader_class in (TorchLoader, DataLoader, DataLoader):
            torch.manual_seed(1)
            loader = loader_class(dataset, batch_size=5, num_workers=2)
            outcome.append(
                [(labels.tolist(), torch.rand(()).item()) for _ in range(2) for _, labels in loader]
            )
    assert outcome[0] == outcome[1] == outcome[2]


def _numpys_mix(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return images + np.random.rand(), np.random.permutation(labels.numpy())


def _pythons_mix(samples: list[Any]) -> Any:
    random.shuffle(samples)
    return default_collate(samples)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [_numpys_mix, _pythons_mix])
def test_a_collate_fn_draws_from_other_generators_as_with_torch(
    collate_fn: Any, workers: int
) -> None:
    """Draws from NumPy's and Python's generators equal those of torch's loader with as many workers."""
    outcome = []
    with _images(transform=v1.CenterCrop(3)) as dataset:
        for loader_class in (TorchLoader, DataLoader, DataLoader):
            torch.manual_seed(1)
            np.random.seed(1)
            random.seed(1)
            loader = loader_class(dataset, 5, num_workers=workers, collate_fn=collate_fn)
            outcome.append([_plain(loader) for _ in range(2)])
    if workers:
        reason = "collate_fn= may draw from Python's or NumPy's generators"
        assert reason in loader.report().path
    assert outcome[0] == outcome[1] == outcome[2]


@pytest.mark.parametrize(
    "how", ["read as a whole", "read one by one", "no fastdata dataset", "in chunks"]
)
def test_threads_draw_nothing_from_the_loops_generator(how: str) -> None:
    """With threads, labels follow seed, epoch and batch, and the loop draws the numbers that it would draw alone."""
    outcome = []
    options: dict[str, Any] = {
        "target_transform": _torchs,
        "batch_ops": how != "read one by one",
    }
    with _images(**options) as dataset:
        for threads in (1, 3, 3):
            torch.manual_seed(1)
            if how == "in chunks":
                loader: Any = ChunkedLoader(dataset, 5, memory_limit="64GiB", chunk_samples=10)
            else:
                source = NoisyPairs() if how == "no fastdata dataset" else dataset
                loader = DataLoader(source, batch_size=5, num_workers=threads, workers="thread")
            batches = iter(loader)
            alone = torch.get_rng_state()
            outcome.append(([labels.tolist() for _, labels in batches], torch.rand(()).item()))
            torch.set_rng_state(alone)
            assert torch.rand(()).item() == outcome[-1][1]
            if how == "in chunks":
                loader.close()
    assert outcome[0] == outcome[1] == outcome[2]


class NoisyPairs:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        return PIXELS[index], _torchs(index)


def test_a_generator_given_to_a_draw_is_kept(images: CachedDataset) -> None:
    """A collate_fn with its own generator gets that generator's numbers."""
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(
        images, batch_size=5, collate_fn=lambda samples: torch.rand(2, generator=own)
    )
    drawn = [numbers.tolist() for numbers in loader]
    own.manual_seed(3)
    assert drawn == [torch.rand(2, generator=own).tolist() for _ in range(5)]


def test_a_chunked_loaders_collate_fn_draws_the_same_each_run(images: CachedDataset) -> None:
    """With equal seeds two chunked loaders mix equally, and with other seeds they do not."""
    outcome = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with ChunkedLoader(
            images, 5, memory_limit="64GiB", chunk_samples=10, collate_fn=_mixed
        ) as loader:
            outcome.append(_plain(loader))
    assert outcome[0] == outcome[1]
    assert outcome[0] != outcome[2]
