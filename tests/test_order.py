"""The order of batches: every kind of sampler and batch sampler, compared with torch's loader."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data import DataLoader as TorchLoader

from data import Levels
from fastdata import CachedDataset, DataLoader, FastDataWarning

COUNT = 17
INLINE: dict[str, Any] = {}
THREADS = {"num_workers": 2, "workers": "thread"}
ENGINES = pytest.mark.parametrize("engine", [INLINE, THREADS], ids=["inline", "threads"])


class OneShot:
    """An iterable that gives its numbers in the first pass only, and is no iterator."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = iter(numbers)

    def __iter__(self) -> Iterator[int]:
        return self._numbers


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda numbers: np.array(numbers, np.int64),
    "small array": lambda numbers: np.array(numbers, np.int8),
    "tensor": lambda numbers: torch.tensor(numbers, dtype=torch.int64),
    "generator": lambda numbers: (number for number in numbers),
    "map": lambda numbers: map(int, numbers),
    "islice": lambda numbers: itertools.islice(iter(numbers), len(numbers)),
    "NumPy's numbers": lambda numbers: [np.int32(number) for number in numbers],
    "one-element tensors": lambda numbers: [torch.tensor(number) for number in numbers],
    "floats": lambda numbers: [float(number) for number in numbers],
    "text": lambda numbers: list(map(str, numbers)),
    "bytes": lambda numbers: bytes(number % COUNT for number in numbers),
    "dict": dict.fromkeys,
    "one-shot": OneShot,
}
"""Kinds of batches that a batch sampler may yield."""


class Batches:
    """A batch sampler that makes each batch when it is needed."""

    def __init__(self, batches: list[list[int]], form: str) -> None:
        self._batches = batches
        self._form = form

    def __iter__(self) -> Iterator[Any]:
        return map(FORMS[self._form], self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _outcome(loader: Any) -> list[Any]:
    """Return all batches of an epoch, and the type of the exception that ended it."""
    found: list[Any] = []
    try:
        for images, labels in loader:
            found.append((images.tolist(), labels.tolist()))
    except Exception as error:  # noqa: BLE001  # which one is the question
        found.append(type(error))
    return found


def _random_batches(rng: random.Random) -> list[list[int]]:
    """Return uneven batches with repeated and negative indices; a few are empty or have a wrong index."""
    low, high = rng.choice([(0, COUNT), (-COUNT, COUNT), (-COUNT, COUNT), (-COUNT - 1, COUNT + 1)])
    sizes = [rng.randrange(0 if rng.random() < 0.1 else 1, 10) for _ in range(rng.randrange(6))]
    return [[rng.randrange(low, high) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize("form", FORMS)
@ENGINES
def test_batch_samplers_of_every_shape_are_torchs(engine: dict[str, Any], form: str) -> None:
    """Batches, and the types of errors, are those of torch's loader, with every kind of batch sampler."""
    rng = random.Random(form)
    with CachedDataset(Levels(COUNT, (1, 2, 3))) as cached:
        for _ in range(12):
            batches = _random_batches(rng)
            wanted = _outcome(
                TorchLoader(Levels(COUNT, (1, 2, 3)), batch_sampler=Batches(batches, form))
            )
            for dataset in (cached, Levels(COUNT, (1, 2, 3))):
                loader = DataLoader(dataset, batch_sampler=Batches(batches, form), **engine)
                assert _outcome(loader) == wanted, batches
            torchs = TorchLoader(cached, batch_sampler=Batches(batches, form))
            assert _outcome(torchs) == wanted, batches


@pytest.mark.parametrize("form", FORMS)
@ENGINES
def test_samplers_of_every_shape_are_torchs(engine: dict[str, Any], form: str) -> None:
    """Every kind of sampler gives torch's batches and torch's errors."""
    rng = random.Random(form)
    with CachedDataset(Levels(COUNT, (1, 2, 3))) as cached:
        for _ in range(12):
            numbers = [number for batch in _random_batches(rng) for number in batch]
            size = rng.randrange(1, 6)
            wanted = _outcome(
                TorchLoader(Levels(COUNT, (1, 2, 3)), size, sampler=FORMS[form](numbers))
            )
            for dataset in (cached, Levels(COUNT, (1, 2, 3))):
                loader = DataLoader(dataset, size, sampler=FORMS[form](numbers), **engine)
                assert _outcome(loader) == wanted, numbers


# Samplers that change while they are read


def _sizes(loader: Any, change: Callable[[Any, int], None]) -> tuple[list[int], list[int]]:
    """Return the sizes of an epoch's batches, and its labels, if ``change`` is called after each batch."""
    sizes = []
    labels = []
    for number, (_, label_B) in enumerate(loader):
        sizes.append(len(label_B))
        labels += label_B.tolist()
        change(loader, number)
    return sizes, labels


@pytest.mark.parametrize("trial", range(10))
def test_a_batch_size_may_change_within_an_epoch(trial: int) -> None:
    """Batches have the sizes of torch's loader, shuffled or not, with and without drop_last."""
    rng = random.Random(trial)
    steps = [rng.randrange(1, 8) for _ in range(20)]
    options = {
        "batch_size": rng.randrange(1, 8),
        "drop_last": rng.random() < 0.3,
        "shuffle": rng.random() < 0.7,
    }

    def change(loader: Any, number: int) -> None:
        loader.batch_sampler.batch_size = steps[number]

    with CachedDataset(Levels(COUNT, (1, 2, 3))) as cached:
        found = []
        for make, dataset in (
            (TorchLoader, Levels(COUNT, (1, 2, 3))),
            (DataLoader, cached),
            (DataLoader, Levels(COUNT, (1, 2, 3))),
        ):
            generator = torch.Generator().manual_seed(trial)
            loader = make(dataset, generator=generator, **options)
            found.append(([_sizes(loader, change) for _ in range(2)], generator.initial_seed()))
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("shuffle", [False, True])
def test_threads_lose_no_sample_where_a_batch_size_changes(shuffle: bool) -> None:
    """Batches that were read ahead keep their size, later ones have the new size, and each sample comes once."""

    def change(loader: Any, number: int) -> None:
        loader.batch_sampler.batch_size = 2

    with CachedDataset(Levels(COUNT, (1, 2, 3))) as cached:
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(
            cached, batch_size=4, shuffle=shuffle, generator=generator, num_workers=1
        )
        sizes, labels = _sizes(loader, change)
        assert sorted(labels) == list(range(COUNT))
        assert sizes == [4, 4, 4, 2, 2, 1]
        assert loader.state_dict()["num_yielded"] == 0


def test_a_state_says_that_it_does_not_count_batches_of_several_sizes() -> None:
    """A state warns within an epoch whose batch size has changed, but not after its end or in another epoch."""
    loader = DataLoader(Levels(COUNT, (1, 2, 3)), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.batch_sampler.batch_size = 3
    with pytest.warns(FastDataWarning, match="batch size was changed within this epoch"):
        loader.state_dict()
    list(iterator)
    loader.state_dict()
    loader.batch_sampler.batch_size = 4
    for start in ({}, state):
        loader.load_state_dict(start)
        for _ in loader:
            loader.state_dict()


def test_a_sampler_may_grow_while_it_is_read() -> None:
    """A list that the training loop extends is read to its end, as torch reads it."""

    def grow(numbers: list[int], _: Any, number: int) -> None:
        if number < 5:
            numbers += [number, number + 1]

    with CachedDataset(Levels(COUNT, (1, 2, 3))) as cached:
        found = []
        for make, dataset in (
            (TorchLoader, Levels(COUNT, (1, 2, 3))),
            (DataLoader, cached),
            (DataLoader, Levels(COUNT, (1, 2, 3))),
        ):
            numbers = [7, 8, 9, 10]
            loader = make(dataset, batch_size=2, sampler=numbers)
            found.append(_sizes(loader, lambda *given, numbers=numbers: grow(numbers, *given)))
            batches = [[1, 2], [3]]
            loader = make(dataset, batch_sampler=batches)
            found.append(
                _sizes(loader, lambda _, n, batches=batches: batches.extend([[n]] * (n < 4)))
            )
        assert found[:2] == found[2:4] == found[4:]
        assert len(found[0][0]) == 7


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("engine", [INLINE, THREADS], ids=["inline", "threads"])
def test_a_state_with_the_last_batch_has_the_generator_of_the_next_epoch(
    engine: dict[str, Any], drop_last: bool
) -> None:
    """A state after the last batch resumes with the next epoch, whatever the sizes of the batches were."""

    def make() -> Any:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(
            Levels(COUNT, (1, 2, 3)),
            4,
            shuffle=True,
            drop_last=drop_last,
            generator=generator,
            **engine,
        )

    loader = make()
    iterator = iter(loader)
    read = 0
    while read + drop_last < COUNT:
        read += len(next(iterator)[1])
        loader.batch_sampler.batch_size = 4 if drop_last else 2
    state = loader.state_dict()
    assert list(iterator) == []
    resumed = make()
    resumed.load_state_dict(state)
    wanted = make()
    list(wanted)
    assert _outcome(resumed) == _outcome(wanted)


# Loaders that never end: subclasses as they are published, each around a sampler that begins again


class Repeat:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


def _ultralytics(base: Any) -> Any:
    class InfiniteDataLoader(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    return InfiniteDataLoader


def _timm(base: Any) -> Any:
    class MultiEpochsDataLoader(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            if self.batch_sampler is None:
                self.sampler = Repeat(self.sampler)
            else:
                self.batch_sampler = Repeat(self.batch_sampler)
            self._DataLoader__initialized = True
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.sampler if self.batch_sampler is None else self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return MultiEpochsDataLoader


def _cosplace(base: Any) -> Any:
    class InfiniteDataLoader(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.dataset_iterator = super().__iter__()

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            try:
                return next(self.dataset_iterator)
            except StopIteration:
                self.dataset_iterator = super().__iter__()
                return next(self.dataset_iterator)

    return InfiniteDataLoader


@pytest.mark.parametrize(
    ("published", "batch_size"),
    [(_ultralytics, 4), (_timm, 4), (_timm, None), (_cosplace, 4), (_cosplace, None)],
)
@ENGINES
def test_endless_loaders_go_on_as_torchs(
    engine: dict[str, Any], published: Callable[[Any], Any], batch_size: int | None
) -> None:
    """Three published subclasses that repeat their sampler give torch's batches for three and a half epochs."""
    length = -(-COUNT // batch_size) if batch_size else COUNT
    with CachedDataset(Levels(COUNT, (1, 2, 3))) as cached:
        found = []
        for base, dataset in (
            (TorchLoader, Levels(COUNT, (1, 2, 3))),
            (DataLoader, cached),
            (DataLoader, Levels(COUNT, (1, 2, 3))),
        ):
            order = RandomSampler(range(COUNT), generator=torch.Generator().manual_seed(3))
            options = {} if base is TorchLoader else engine
            loader = published(base)(dataset, batch_size=batch_size, sampler=order, **options)
            labels: list[Any] = []
            while len(labels) < length * 7 // 2:
                left = length * 7 // 2 - len(labels)
                labels += [
                    label.tolist() if batch_size else label
                    for _, label in itertools.islice(loader, left)
                ]
            found.append(labels)
        assert found[0] == found[1] == found[2]


@ENGINES
def test_the_sampler_in_use_is_the_one_that_the_loader_has(engine: dict[str, Any]) -> None:
    """If the user replaces a batch sampler, or the sampler in it, later epochs and states use the new one."""
    with CachedDataset(Levels(COUNT, (1, 2, 3))) as cached:
        loader = DataLoader(cached, batch_size=4, **engine)
        object.__setattr__(loader, "batch_sampler", [[3, 1], [2]])
        assert [labels.tolist() for _, labels in loader] == [[3, 1], [2]]
        object.__setattr__(loader, "batch_sampler", BatchSampler(range(7), 3, drop_last=False))
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        loader.batch_sampler.sampler = range(6, -1, -1)
        assert [labels.tolist() for _, labels in iterator] == [[3, 4, 5], [6]]
        assert [labels.tolist() for _, labels in loader] == [[6, 5, 4], [3, 2, 1], [0]]
        loader.batch_sampler.sampler = range(7)
        loader.load_state_dict(state)
        assert [labels.tolist() for _, labels in loader] == [[3, 4, 5], [6]]
