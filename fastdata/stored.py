"""Batches of stored samples whose batch ops are still to run, on the device that a prefetcher brings them to.

Shape letters: N stored samples, B batch, C channels, H W stored size, D draws.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.batch import IndexBatch
from fastdata.batchops import DeviceProgram, device_obstacle
from fastdata.dataset import PreparedDataset
from fastdata.plan import TransformPlan
from fastdata.ring import BatchRing
from fastdata.spec import SampleSpec

__all__ = ["StoredBatch", "StoredReader", "plan_and_spec", "stored_obstacle"]


class StoredBatch(NamedTuple):
    """A batch that a ``DeviceProgram`` makes the images of. All its tensors have one row for each sample.

    Attributes:
        samples: uint8 (B, C, H, W) as stored, or int64 (B,), where they lie in a copy of the store on the device.
        draws: int32 (B, D); None where nothing is drawn.
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
        draws_DB = self._program.draw(index_B, batch.visits, batch.seed)
        samples = torch.from_numpy(index_B.copy()) if self._only_places else self._gather(index_B, ring)
        draws_BD = draws_DB.t().contiguous() if len(draws_DB) else None
        return StoredBatch(samples, draws_BD, dataset._targets(index_B))

    def _gather(self, index_B: np.ndarray, ring: BatchRing) -> torch.Tensor:
        contents = self._dataset.kept
        assert contents is not None
        shape = contents.images.spec.shape
        assert shape is not None
        out_BCHW = ring.take((len(index_B), *shape), np.dtype(np.uint8))
        with contents.naming_damage():
            contents.images.gather_into(index_B, out_BCHW)
        return torch.from_numpy(out_BCHW)


def stored_obstacle(dataset: PreparedDataset) -> str | None:
    """Say why a dataset's batch ops cannot run on a device; None if they can."""
    if dataset.batch_obstacle is not None:
        return dataset.batch_obstacle
    return device_obstacle(*plan_and_spec(dataset))


def plan_and_spec(dataset: PreparedDataset) -> tuple[TransformPlan, SampleSpec]:
    """Give what ``compile_device_ops`` needs of a dataset that keeps its samples."""
    assert dataset.kept is not None
    return dataset.plan, dataset.kept.images.spec
