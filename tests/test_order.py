"""Orders of batches: every kind of sampler and batch sampler beside torch's loader."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from fastdata import CachedDataset, DataLoader

COUNT = 17
INLINE: dict[str, Any] = {}
THREADS = {"num_workers": 2, "workers": "thread"}
ENGINES = pytest.mark.parametrize("engine", [INLINE, THREADS], ids=["inline", "threads"])


class Samples(Dataset[Any]):
    """Images whose pixels are their index."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: Any) -> Any:
        return torch.full((1, 2, 3), range(COUNT)[index], dtype=torch.uint8), range(COUNT)[index]


class OneShot:
    """Gives its numbers in the first pass only, without being an iterator."""

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
    """A batch sampler that makes each batch when it is asked for."""

    def __init__(self, batches: list[list[int]], form: str) -> None:
        self._batches = batches
        self._form = form

    def __iter__(self) -> Iterator[Any]:
        return map(FORMS[self._form], self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def _outcome(loader: Any) -> list[Any]:
    """All batches of an epoch, and the type of the exception that ended it."""
    found: list[Any] = []
    try:
        for images, labels in loader:
            found.append((images.tolist(), labels.tolist()))
    except Exception as error:  # noqa: BLE001  # which one is the question
        found.append(type(error))
    return found


def _random_batches(rng: random.Random) -> list[list[int]]:
    """Uneven batches with repeated and negative indices; rarely an empty batch, or a wrong index."""
    low, high = rng.choice([(0, COUNT), (-COUNT, COUNT), (-COUNT, COUNT), (-COUNT - 1, COUNT + 1)])
    sizes = [rng.randrange(0 if rng.random() < 0.1 else 1, 10) for _ in range(rng.randrange(6))]
    return [[rng.randrange(low, high) for _ in range(size)] for size in sizes]


@pytest.mark.parametrize("form", FORMS)
@ENGINES
def test_batch_samplers_of_every_shape_are_torchs(engine: dict[str, Any], form: str) -> None:
    """Batches, and the type of an error, are those of torch's loader over the same samples, in both loaders."""
    rng = random.Random(form)
    with CachedDataset(Samples()) as cached:
        for _ in range(12):
            batches = _random_batches(rng)
            wanted = _outcome(TorchLoader(Samples(), batch_sampler=Batches(batches, form)))
            for dataset in (cached, Samples()):
                loader = DataLoader(dataset, batch_sampler=Batches(batches, form), **engine)
                assert _outcome(loader) == wanted, batches
            torchs = TorchLoader(cached, batch_sampler=Batches(batches, form))
            assert _outcome(torchs) == wanted, batches


@pytest.mark.parametrize("form", FORMS)
@ENGINES
def test_samplers_of_every_shape_are_torchs(engine: dict[str, Any], form: str) -> None:
    """Samplers are cut into torch's batches, with torch's errors."""
    rng = random.Random(form)
    with CachedDataset(Samples()) as cached:
        for _ in range(12):
            numbers = [number for batch in _random_batches(rng) for number in batch]
            size = rng.randrange(1, 6)
            wanted = _outcome(TorchLoader(Samples(), size, sampler=FORMS[form](numbers)))
            for dataset in (cached, Samples()):
                loader = DataLoader(dataset, size, sampler=FORMS[form](numbers), **engine)
                assert _outcome(loader) == wanted, numbers
