"""Images that show their index and count their reads, for tests of other libraries, and records of their runs."""

# ruff: noqa: E402  (torchvision can only be imported after its operations were declared)

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchvision_ops import import_torchvision

import_torchvision()

from torchvision import transforms as v1

from fastdata import CachedDataset
from fastdata.datasets.buffers import Allocate, new_buffer
from fastdata.datasets.samples import DatasetSamples
from fastdata.datasets.visits import IndexBatch
from fastdata.machine.blocks import Block

COUNT = 23
"""Samples: no multiple of a batch, nor of two ranks."""
PIXELS = 4 * 3 * 3

Batch = tuple[list[int], list[float]]
"""Indices and pixel sums of the samples of a batch; the sum tells how a sample was cropped and flipped."""


class CountingImages(CachedDataset):
    """Random 6 x 5 images with their index as target, cropped and flipped in whole batches; counts how it is read.

    It has no ``__getitem__`` and ``__getitems__`` of its own, because these would make the batches.
    """

    def __init__(self) -> None:
        pixels = torch.from_numpy(
            np.random.default_rng(0).integers(0, 256, (COUNT, 3, 6, 5), np.uint8)
        )
        self._calls = Block.create(2 * 8)
        transform = v1.Compose(
            [v1.RandomCrop((4, 3)), v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32)]
        )
        super().__init__([(pixels[i], i) for i in range(COUNT)], transform=transform, seed=0)
        self._fastdata = CountingSamples.of(self._fastdata, self._calls)

    @property
    def reads(self) -> np.ndarray:
        """Return int64 (2,) in shared memory: samples read one by one, and lists of samples read whole."""
        return self._calls.array("int64", (2,))

    def close(self) -> None:
        super().close()
        self._calls.close()


class CountingSamples(DatasetSamples):
    """Samples with readers that count."""

    _calls: Block

    @classmethod
    def of(cls, samples: DatasetSamples, calls: Block) -> CountingSamples:
        counting = cls.__new__(cls)
        vars(counting).update(vars(samples), _calls=calls)
        counting._read_by(samples.reader)
        return counting

    def close(self) -> None:
        self.reader = getattr(self.reader, "_reader", self.reader)
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_calls": self._calls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._calls = state["_calls"]
        super().__setstate__(state)

    def _read_by(self, reader: Any) -> None:
        super()._read_by(CountingReader(reader, self._calls))  # type: ignore[arg-type]


class CountingReader:
    """A reader that counts its calls."""

    def __init__(self, reader: Any, calls: Block) -> None:
        self._reader, self._calls = reader, calls

    def _count(self, kind: int) -> None:
        with self._calls.hold(kind):  # two workers that add at the same time would count once
            self._calls.array("int64", (2,))[kind] += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def __call__(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> Any:
        return self._reader(batch, allocate)

    def item(self, batch: IndexBatch) -> Any:
        self._count(0)
        return self._reader.item(batch)

    def items(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> Any:
        self._count(1)
        return self._reader.items(batch, allocate)


def see(batch: Any) -> Batch:
    """Return the values of a batch that a record keeps."""
    images, labels = batch
    weights = torch.arange(1, PIXELS + 1, dtype=torch.float64)
    return labels.tolist(), (images.flatten(1).double() @ weights).tolist()


def labels_of(epoch: Iterable[Batch]) -> list[int]:
    """Return the indices of an epoch's samples, in order."""
    return [label for labels, _ in epoch for label in labels]


def draws_of(epoch: Iterable[Batch]) -> dict[int, float]:
    """Return the crop and flip of each sample of an epoch, by index."""
    return {
        label: draw for labels, draws in epoch for label, draw in zip(labels, draws, strict=True)
    }


def repeated(epochs_of_ranks: Sequence[Sequence[Batch]]) -> int:
    """Return the number of samples that came again in one epoch of all ranks; every sample must have come."""
    counts = Counter(label for epoch in epochs_of_ranks for label in labels_of(epoch))
    assert sorted(counts) == list(range(COUNT))
    return counts.total() - COUNT


def save(folder: Path, rank: int, seen: dict[str, Any]) -> None:
    """Save the record of a rank, for ``load``."""
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the records of two ranks."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
