"""Batches of stored samples whose batch ops are still to run, on the device that a prefetcher brings them to.

Shape letters: N stored samples, B batch, C channels, H W size sent, h w size served.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.batch import IndexBatch
from fastdata.dataset import PreparedDataset
from fastdata.ring import BatchRing
from fastdata.spec import SampleSpec
from fastdata.transforms import TransformPlan
from fastdata.transforms.device import DeviceProgram, device_obstacle

__all__ = ["StoredBatch", "StoredReader", "plan_and_spec", "stored_obstacle"]


class StoredBatch(NamedTuple):
    """A batch that a ``DeviceProgram`` makes the images of. All its tensors have one row for each sample.

    Attributes:
        samples: uint8 (B, C, H, W) as stored or as the core made them, or int64 (B,), where they lie in a copy of the
            store on the device.
        draws: int16 (B, h + w); None where samples are served as they are sent.
        targets: as ``PreparedDataset.read_batch`` gives them.
    """

    samples: torch.Tensor
    draws: torch.Tensor | None
    targets: Any


class StoredReader:
    """Reads batches of a dataset without their batch ops, but with what those draw; safe from several threads.

    Args:
        dataset: has no ``stored_obstacle``.
        program: draws.
        only_places: give the samples' positions in the store, not the samples.
    """

    def __init__(self, dataset: PreparedDataset, program: DeviceProgram, *, only_places: bool = False) -> None:
        self._dataset, self._program, self._only_places = dataset, program, only_places

    def read(self, batch: IndexBatch, ring: BatchRing) -> StoredBatch:
        """Read one batch; its samples lie in memory of ``ring``. Arguments as of ``PreparedDataset.read_batch``."""
        dataset, index_B = self._dataset, batch.positions
        dataset._check_open()
        draws = self._program.draw(index_B, batch.visits, batch.seed)
        samples = torch.from_numpy(index_B.copy()) if self._only_places else self._gather(batch, ring)
        return StoredBatch(samples, draws, dataset._targets(index_B))

    def _gather(self, batch: IndexBatch, ring: BatchRing) -> torch.Tensor:
        contents, host, index_B = self._dataset.kept, self._program.host, batch.positions
        assert contents is not None
        out_BCHW = ring.take((len(index_B), *self._program.sent_shape), np.dtype(np.uint8))
        with contents.naming_damage():
            if host is None:
                contents.images.gather_into(index_B, out_BCHW)
            else:
                host.run(contents.images, index_B, batch.visits, batch.seed, out_BCHW)
        return torch.from_numpy(out_BCHW)


def stored_obstacle(dataset: PreparedDataset) -> str | None:
    """Say why a dataset's batch ops cannot run on a device; None if they can."""
    if dataset.batch_obstacle is not None:
        return dataset.batch_obstacle
    if dataset.kept is None:
        return "samples are kept nowhere, and files are decoded on the CPU"
    return device_obstacle(*plan_and_spec(dataset))


def plan_and_spec(dataset: PreparedDataset) -> tuple[TransformPlan, SampleSpec]:
    """Give what a ``DeviceProgram`` needs of a dataset that keeps its samples."""
    assert dataset.kept is not None
    return dataset.plan, dataset.kept.images.spec
