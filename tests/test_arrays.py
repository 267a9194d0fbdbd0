"""Arrays that are not images are served in whole batches, together with images or labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import StackDataset

from fastdata import CachedDataset, DataLoader
from fastdata.loaders.buckets import BucketSampler

COUNT = 10
LATENTS = np.random.default_rng(0).standard_normal((COUNT, 4, 2, 3), dtype=np.float32)
TEXTS = np.random.default_rng(1).standard_normal((COUNT, 5)).astype(np.float16)
NAMES = [f"sample {number}" for number in range(COUNT)]

ITEMS: dict[str, Callable[[Any, Any], Any]] = {
    "alone": lambda latents, texts: latents,
    "pairs": lambda latents, texts: StackDataset(latents, texts),
    "tuples": lambda latents, texts: StackDataset(latents, texts, range(COUNT), NAMES),
    "tensors": lambda latents, texts: StackDataset(torch.from_numpy(LATENTS), texts, NAMES),
    "dicts": lambda latents, texts: [
        {"input": latents[n], "text": texts[n], "number": float(n), "name": NAMES[n]}
        for n in range(COUNT)
    ],
}


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return (
            type(ours) is torch.Tensor and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        )
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("form", ITEMS)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_default_collate(tmp_path: Path, form: str, workers: int) -> None:
    """Arrays in files, alone or with other values, come in whole batches, and single items are unchanged."""
    np.save(tmp_path / "latents.npy", LATENTS)
    np.save(tmp_path / "texts.npy", TEXTS)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("latents", "texts")]
    source = ITEMS[form](*mapped)
    with CachedDataset(source) as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=workers)
        ours = list(loader)
        assert loader.report().path.startswith("whole batches")
        # Copies, because torch would warn of arrays that cannot be written to.
        copied = ITEMS[form](LATENTS, TEXTS)
        assert all(map(equal, ours, TorchLoader(copied, batch_size=4)))
        assert all(equal(dataset[index], copied[index]) for index in range(COUNT))


def test_targets_of_several_kinds_are_gathered_by_place() -> None:
    """Tuples of one length get a column for each position; other targets are stored unchanged."""
    rows = [(np.full(3, n), n, f"name {n}", [n]) for n in range(6)]
    for targets in (rows, [*rows[:5], rows[5][:2]], [*rows[:5], list(rows[5])]):
        with CachedDataset([(torch.zeros(2), target) for target in targets]) as dataset:
            assert all(map(equal, (dataset[n][1] for n in range(6)), targets))
            assert [type(target) for target in dataset.targets] == list(map(type, targets))


def test_sequences_of_one_length_are_whole_batches() -> None:
    """A BucketSampler groups arrays of any number of dimensions by their shapes."""
    rows = [(np.full((1 + n % 3, 2), n, np.float32), n) for n in range(12)]
    with CachedDataset(rows) as dataset:
        loader = DataLoader(dataset, batch_sampler=BucketSampler(dataset, 4))
        found = {tuple(batch.shape): numbers.tolist() for batch, numbers in loader}
        assert loader.report().path.startswith("whole batches")
    assert {shape: sorted(numbers) for shape, numbers in found.items()} == {
        (4, 1 + n, 2): [n, n + 3, n + 6, n + 9] for n in range(3)
    }
