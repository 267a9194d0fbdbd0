"""Everything between a dataset and the pipelines of its epochs: what is planned once, and the memory that stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdata import machine
from fastdata.batch import IndexBatch, collate
from fastdata.chunked.budget import CHUNKS_HELD, Needs, empties_cache, plan_chunks, plan_makers
from fastdata.chunked.chunks import Room
from fastdata.chunked.holding import InSlots, choose_holding, emptying_cache
from fastdata.chunked.order import EpochOrder, plan_epoch
from fastdata.chunked.pipeline import Flow, Pipeline, Way
from fastdata.chunked.readers import reader_of
from fastdata.dataset import PreparedDataset
from fastdata.errors import MemoryBudgetError
from fastdata.iterators import HELD_BY_USER
from fastdata.memory import parse_bytes
from fastdata.report import log
from fastdata.resume import Progress
from fastdata.ring import BatchRing
from fastdata.served import Served
from fastdata.stores.writers import ShapesDifferError

__all__ = ["Supply", "Wishes"]

_PIECES_PER_CHUNK = 32
_MOST_BYTES = 256 << 20
"""Of a chunk that is only read ahead: whatever its size, the order is the same, so that more would bring nothing."""
_MOST_MIXED_BYTES = 4 << 30
"""Of a chunk that is mixed: the larger, the better the order, but the later the first batch."""
_FLOAT_BYTES = 4
_ORDER_BYTES = 24
"""For each sample of the dataset while an epoch is planned: its key, its place, and sorting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """The arguments of a ``ChunkedLoader`` that say how samples are supplied; see there."""

    batch_size: int
    memory_limit: int | float | str
    chunk_samples: int | None
    mix_chunks: int | None
    num_workers: int | None
    collate_fn: Callable[[list[Any]], Any]

    def __post_init__(self) -> None:
        for name in ("batch_size", "chunk_samples", "mix_chunks", "num_workers"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}={count} must be at least 1")


class Supply:
    """Supplies the batches of any epoch, from any batch on.

    Args:
        served: the dataset, and which of its samples.
        order: of the epochs; where chunks are mixed, that is added here.
        wishes: of the user.
    """

    def __init__(self, served: Served, order: EpochOrder, wishes: Wishes) -> None:
        self._served, self._wishes = served, wishes
        served.dataset.refresh()
        self._read_after = served.dataset.read_after()
        reader = reader_of(served.dataset)
        layout = reader.look()
        reader.release()  # it is no memory that is in use: chunks will be there in its place
        self.is_mixed = order.shuffle and (wishes.mix_chunks is not None or reader.is_sequential)
        pieces = (wishes.mix_chunks or _PIECES_PER_CHUNK) if self.is_mixed else 1
        self._holding = holding = choose_holding(reader, layout, order, served.subset, pieces)
        self._rooms: list[Room] = []
        view = holding.view(served.dataset)
        self._obstacle = view.batch_obstacle
        cores = machine.usable_cores() if wishes.num_workers is None else wishes.num_workers
        served_bytes = view.served_bytes
        if served_bytes is None:  # samples one by one, then collated
            served_bytes = 2 * _FLOAT_BYTES * math.ceil(layout.sample_bytes)
        batch_bytes = served_bytes * wishes.batch_size
        in_use_bytes, free_bytes = machine.tree_pss_bytes(), machine.available_bytes().bytes
        limit_bytes = parse_bytes(wishes.memory_limit, of=free_bytes + in_use_bytes)
        most_makers = 1 if self._obstacle else holding.makers(cores)
        self._makers = plan_makers(most_makers, batch_bytes, limit_bytes - in_use_bytes)
        needs = Needs(
            in_use_bytes=in_use_bytes,
            sample_bytes=holding.sample_bytes,
            batch_bytes=batch_bytes,
            batches_held=self.batches_held,
            epoch_bytes=_ORDER_BYTES * order.length + CHUNKS_HELD * holding.chunk_bytes,
            batch_size=wishes.batch_size,
            samples=order.rank_samples,
            workers=1 if holding.is_light else cores,
            most_bytes=_MOST_MIXED_BYTES if self.is_mixed else _MOST_BYTES,
        )
        self.plan = plan_chunks(needs, limit_bytes, wishes.chunk_samples)
        self._empties_cache = empties_cache(reader.disk_bytes, free_bytes, self.plan)
        if self._empties_cache:
            self._holding = emptying_cache(holding)
        log.info("%s", self.plan)
        self._chunk_samples = self.plan.chunk_samples
        if self.is_mixed:
            piece = max(self.plan.chunk_samples // pieces, 1)
            order = replace(order, piece_samples=piece, chunk_samples=self.plan.chunk_samples)
        self.order = order

    @property
    def threads(self) -> int:
        """How many make batches."""
        return self._makers

    @property
    def ahead(self) -> int:
        """How many batches are made ahead."""
        return 2 * self._makers

    @property
    def batches_held(self) -> int:
        """How many batches exist at once."""
        return self.ahead + 1 + HELD_BY_USER

    @property
    def path(self) -> str:
        """The road of the batches, in one line."""
        each = "whole batches" if self._obstacle is None else f"samples one by one ({self._obstacle})"
        workers = "a thread" if self.plan.workers == 1 else f"{self.plan.workers} processes"
        makers = "a thread" if self.threads == 1 else f"{self.threads} threads"
        cache = ", the system's page cache emptied behind them" if self._empties_cache else ""
        chunks = f"chunks of {self._chunk_samples} samples, {self._holding.does} ahead by {workers}{cache}"
        return f"{chunks}; {each}, made by {makers}"

    def refresh(self) -> None:
        """Serve what the dataset's transform says now.

        Raises:
            ValueError: samples would have to be brought in another way.
        """
        dataset = self._served.dataset
        dataset.refresh()
        if dataset.read_after() != self._read_after:
            raise ValueError(
                "the dataset's loader, or what its transform begins with, was changed after this ChunkedLoader was "
                f"made: it brings samples after {self._read_after[1] or 'no step'}, and the transform now begins with "
                f"{dataset.read_after()[1] or 'none'}. Make the ChunkedLoader again."
            )
        self._obstacle = self._holding.view(dataset).batch_obstacle

    def start(self, progress: Progress, first_batch: int, batches: int, ring: BatchRing) -> Pipeline:
        """Begin to supply an epoch."""
        epoch = progress.epoch or 0
        dataset, holding = self._served.dataset, self._holding
        self._rooms = self._rooms or holding.rooms(CHUNKS_HELD, self._chunk_samples)
        stream = plan_epoch(self.order, epoch)
        flow = Flow(
            stream=stream if self._served.subset is None else self._served.subset[stream],
            batch_size=self._wishes.batch_size,
            batches=batches,
            chunk_batches=self._chunk_samples // self._wishes.batch_size,
            in_sequence=self.is_mixed,
        )
        way = Way(
            dataset=dataset,
            load=holding.load(self._rooms, with_targets=dataset.table is None),
            samples_per_task=holding.samples_per_task,
            make=_make_batch(self._wishes.collate_fn, epoch, dataset.seed_of(progress.base_seed or 0), ring),
            workers=self.plan.workers,
            threads=self.threads,
        )
        return Pipeline(flow, way, self._rooms, first_batch)

    def adapt(self, found: Exception) -> None:
        """Change the slots after samples turned out not to be like those looked at; no pipeline may be running.

        Raises:
            MemoryBudgetError: not even one batch fits.
        """
        self.close()
        if not isinstance(self._holding, InSlots):
            raise found
        if isinstance(found, ShapesDifferError):
            log.info("%s; samples are kept with their own shapes", found)
            self._holding = replace(self._holding, layout=self._holding.layout.any_shapes())
            return
        batches = self._chunk_samples // self._wishes.batch_size
        if batches == 1:
            raise MemoryBudgetError(
                f"a chunk is down to one batch of {self._chunk_samples} samples: {found}. Raise memory_limit or "
                "chunk_samples, or use a smaller batch_size or resize=."
            ) from found
        log.info("%s; chunks of half as many samples are loaded", found)
        rows = batches // 2 * self._wishes.batch_size
        roomier = self._holding.layout.with_room(self._chunk_samples / rows)
        self._holding = replace(self._holding, layout=roomier)
        self._chunk_samples = rows

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        while self._rooms:
            self._rooms.pop().close()


def _make_batch(
    collate_fn: Callable[[list[Any]], Any], epoch: int, seed: int, ring: BatchRing
) -> Callable[[PreparedDataset, np.ndarray], Any]:
    def make(dataset: PreparedDataset, index_B: np.ndarray) -> Any:
        batch = IndexBatch(index_B.tolist(), index_B, np.full_like(index_B, epoch), seed)
        if dataset.batch_obstacle is not None:
            return collate_fn(dataset.__getitems__(batch))
        if collate_fn is collate:
            return dataset.read_batch(batch, ring)
        return collate_fn(dataset.sample_batch(batch, ring))

    return make
