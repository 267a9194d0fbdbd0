"""How chunks are held: in slots of memory that samples are put into, or in mapped files, where they lie anyway."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdata.chunked.chunks import BringIn, Chunk, FillSlots, Results, Room, Run, Slot, Window
from fastdata.chunked.order import EpochOrder
from fastdata.chunked.readers import Layout, Reader, StoredSamples
from fastdata.dataset import PreparedDataset
from fastdata.ingest import SampleRoad
from fastdata.preparation import Steps

__all__ = ["Holding", "InSlots", "InWindows", "choose_holding", "emptying_cache"]

_PREPARED_PER_TASK = 8
_COPIED_PER_TASK = 32
_BROUGHT_PER_TASK = 128
_MOST_PIECES = 1024
"""Of a chunk in mapped files: each is brought and dropped by itself."""


@dataclass(frozen=True, slots=True)
class InSlots:
    """Chunks in memory that is used again and again: see ``Slot``.

    Args:
        reader: of the samples.
        layout: of a slot.
    """

    reader: Reader
    layout: Layout

    chunk_bytes = 0
    """Memory of a chunk besides its samples."""

    @property
    def does(self) -> str:
        """What is done to samples ahead, in a word."""
        return "copied" if self.reader.is_copied else "prepared"

    @property
    def is_light(self) -> bool:
        """Whether one thread of this process loads as fast as several processes."""
        return self.reader.is_copied

    @property
    def sample_bytes(self) -> float:
        """Memory of a sample in a chunk."""
        return self.layout.sample_bytes

    @property
    def samples_per_task(self) -> int:
        """How many samples a worker loads at once."""
        return _COPIED_PER_TASK if self.reader.is_copied else _PREPARED_PER_TASK

    def makers(self, cores: int) -> int:
        """How many threads make batches, beside those that load."""
        return max(1, cores - 1 if self.is_light else cores // 4)

    def view(self, dataset: PreparedDataset) -> PreparedDataset:
        """The dataset as a chunk serves it, to be looked at, not read."""
        with Slot(self.layout, 1) as slot:
            return Chunk(np.zeros(1, np.int64), 1).begin(0, slot, dataset)

    def rooms(self, count: int, samples: int) -> list[Room]:
        """Room for so many chunks of so many samples."""
        return [Slot(self.layout, samples) for _ in range(count)]

    def load(self, rooms: Sequence[Room], *, with_targets: bool) -> Callable[[Run], Results]:
        """What workers do."""
        slots = [room for room in rooms if isinstance(room, Slot)]
        roads = tuple(SampleRoad(self.reader.source, Steps(()), tuple(slot.writers)) for slot in slots)
        return FillSlots(self.reader, roads, with_targets=with_targets)


@dataclass(frozen=True, slots=True)
class InWindows:
    """Chunks in mapped files: see ``Window``.

    Args:
        reader: of the samples.
        pieces: of neighbouring samples in a chunk.
        lone_share: how many of the samples have no neighbour in their chunk, from 0 to 1.
    """

    reader: StoredSamples
    pieces: int
    lone_share: float

    does = "mapped"
    is_light = True
    samples_per_task = _BROUGHT_PER_TASK

    @property
    def sample_bytes(self) -> float:
        """See ``InSlots``."""
        return self.reader.mapped_bytes + self.lone_share * self._edge_bytes

    @property
    def chunk_bytes(self) -> int:
        """Memory of a chunk besides its samples."""
        return self.pieces * self._edge_bytes

    @property
    def is_frugal(self) -> bool:
        """Whether not much more is mapped than the samples take."""
        return self.pieces <= _MOST_PIECES and self.sample_bytes <= 2 * self.reader.mapped_bytes

    @property
    def _edge_bytes(self) -> int:
        """Of a piece: the rest of the pages that it begins and ends in, at most."""
        return 2 * mmap.PAGESIZE * len(self.reader.contents.stores)

    def makers(self, cores: int) -> int:
        """See ``InSlots``: loading takes next to nothing."""
        return max(1, cores)

    def view(self, dataset: PreparedDataset) -> PreparedDataset:
        """See ``InSlots``."""
        return dataset

    def rooms(self, count: int, samples: int) -> list[Room]:
        """See ``InSlots``."""
        return [Window(self.reader, self.samples_per_task) for _ in range(count)]

    def load(self, rooms: Sequence[Room], *, with_targets: bool) -> Callable[[Run], Results]:
        """See ``InSlots``."""
        return BringIn(self.reader)


Holding = InSlots | InWindows


def choose_holding(
    reader: Reader, layout: Layout, order: EpochOrder, subset: np.ndarray | None, pieces: int
) -> Holding:
    """Choose windows where samples are served from mapped files and little more than these is mapped, else slots.

    Args:
        reader: of the samples.
        layout: of samples like these.
        order: of the epochs, before chunks are mixed.
        subset: int64, which samples of the dataset are served; None for all.
        pieces: of neighbouring samples that a chunk is made of.
    """
    if isinstance(reader, StoredSamples) and reader.is_mapped:
        windows = InWindows(reader, pieces, _lone_share(order, subset))
        if windows.is_frugal:
            return windows
    return InSlots(reader, layout)


def emptying_cache(holding: Holding) -> Holding:
    """The same, but the system's page cache lets go of what was served as well."""
    reader = holding.reader
    return (
        replace(holding, reader=replace(reader, empties_cache=True)) if isinstance(reader, StoredSamples) else holding
    )


def _lone_share(order: EpochOrder, subset: np.ndarray | None) -> float:
    """How many of the samples of a piece have no neighbour in it, at most."""
    if order.world_size > 1 and not order.shuffle:
        return 1.0  # each rank has every so manieth
    if subset is None or len(subset) <= 1:
        return 0.0
    steps = np.diff(subset)
    return float((steps != 1).mean()) if (steps > 0).all() else 1.0
