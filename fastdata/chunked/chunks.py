"""A chunk of samples, and where they are while they are served: in reused memory, or in mapped files."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastdata.blocks import ArrayBlock
from fastdata.chunked.readers import Layout, Reader, StoredSamples
from fastdata.chunked.store import ChunkStore, ChunkTargets
from fastdata.contents import Contents
from fastdata.dataset import PreparedDataset
from fastdata.errors import SampleError
from fastdata.ingest import SampleRoad
from fastdata.spec import SampleSpec
from fastdata.stores.writers import DenseWriter, Place, RaggedWriter

__all__ = ["BringIn", "Chunk", "FillSlots", "Results", "Room", "Run", "Slot", "Window"]


class Room(Protocol):
    """Where the samples of one chunk after the other are while they are served."""

    def rewind(self) -> None:
        """Make room for another chunk."""
        ...

    def enter(self, row: int, places: Sequence[Place]) -> None:
        """Note where a worker has put the parts of a sample; no places where that is known."""
        ...

    def view(self, dataset: PreparedDataset, arrived: Arrived) -> PreparedDataset:
        """The dataset as it serves a chunk's samples."""
        ...

    def drop(self, positions: np.ndarray) -> None:
        """Let go of the samples of a chunk; none of them is served any more."""
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """What of a chunk has been loaded; changes with the time.

    Args:
        rows: number of each of its positions within the chunk.
        is_there: bool (rows,).
        targets: by position, where only reading the samples tells them.
    """

    rows: dict[int, int]
    is_there: np.ndarray
    targets: dict[int, Any]


class Window:
    """Room in mapped files: nothing is copied, the samples are served from where they lie.

    Args:
        reader: of the samples.
        samples_per_task: that were brought at once, and are dropped so.
    """

    def __init__(self, reader: StoredSamples, samples_per_task: int) -> None:
        self._reader, self._samples_per_task = reader, samples_per_task

    def rewind(self) -> None:
        """Nothing: what was there is dropped already."""

    def enter(self, row: int, places: Sequence[Place]) -> None:
        """Nothing: the store knows."""

    def view(self, dataset: PreparedDataset, arrived: Arrived) -> PreparedDataset:
        """See ``Room``: the dataset itself."""
        return dataset

    def drop(self, positions: np.ndarray) -> None:
        """See ``Room``."""
        for start in range(0, len(positions), self._samples_per_task):
            self._reader.drop(positions[start : start + self._samples_per_task].tolist())

    def close(self) -> None:
        """Nothing: the memory is the store's."""


class Slot:
    """Memory for one chunk, reused for many.

    Args:
        layout: of the samples.
        rows: how many there is room for.
    """

    def __init__(self, layout: Layout, rows: int) -> None:
        self.layout, self.rows = layout, rows
        self.writers: list[DenseWriter | RaggedWriter] = []
        self._indices: list[ArrayBlock] = []
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self.close)
            for spec, shape, part_bytes in zip(layout.specs, layout.shapes, layout.part_bytes, strict=True):
                self.writers.append(_writer(spec, rows, part_bytes))
                zeros = np.zeros(rows, np.int64)
                columns: dict[str, np.ndarray] = {
                    "offsets": zeros,
                    "sizes": zeros,
                    "shapes": np.zeros((rows, len(shape)), np.int32),
                }
                self._indices.append(ArrayBlock(columns, seal=False))
            self.stores = [writer.live(index) for writer, index in zip(self.writers, self._indices, strict=True)]
            cleanup.pop_all()

    def rewind(self) -> None:
        """Make room for another chunk."""
        for writer in self.writers:
            writer.rewind()

    def enter(self, row: int, places: Sequence[Place]) -> None:
        """Note where a worker has put the parts of a sample; no places where it went to its row."""
        for index, place in zip(self._indices, places, strict=bool(places)):
            index["offsets"][row], index["sizes"][row], index["shapes"][row] = place

    def view(self, dataset: PreparedDataset, arrived: Arrived) -> PreparedDataset:
        """See ``Room``: the dataset over what is here."""
        layout = self.layout
        stores = [
            ChunkStore(store, arrived.rows, arrived.is_there, shape)
            for store, shape in zip(self.stores, layout.shapes, strict=True)
        ]
        table = dataset.table or ChunkTargets(dataset.sample_count, arrived.targets)
        return dataset.served_from(Contents(tuple(stores), table, layout.is_tuple, layout.target_is_part))

    def drop(self, positions: np.ndarray) -> None:
        """Nothing: the memory is used again."""

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for writer in self.writers:
            writer.close()
        for index in self._indices:
            index.close()


def _writer(spec: SampleSpec, rows: int, part_bytes: float) -> DenseWriter | RaggedWriter:
    if spec.is_dense:
        return DenseWriter(spec, rows)
    room = max(int(part_bytes * rows), 1)
    return RaggedWriter(spec, first_bytes=room, limit_bytes=room)


class Run(NamedTuple):
    """A task of a worker: samples that get neighbouring rows in a room."""

    room: int
    row: int
    positions: list[int]

    def __str__(self) -> str:
        return f"samples {', '.join(map(str, self.positions))}"


Results = list[tuple[int, "list[Place] | SampleError", "bytes | None"]]
"""Row of a sample, what became of it, its pickled target if it is wanted."""


@dataclass(frozen=True, slots=True)
class FillSlots:
    """What workers do: read samples and write them into a slot.

    Args:
        reader: of the samples.
        roads: what writes into each slot.
        with_targets: whether to bring the targets back.
    """

    reader: Reader
    roads: tuple[SampleRoad, ...]
    with_targets: bool

    def __call__(self, run: Run) -> Results:
        """Do one task."""
        self.reader.bring(run.positions)
        try:
            copied = self._copy(run) if self.reader.is_copied else None
            return copied or [self._one(run.room, row, position) for row, position in enumerate(run.positions, run.row)]
        finally:
            self.reader.drop(run.positions)

    def _copy(self, run: Run) -> Results | None:
        """Put all samples of a task into their rows at once; None where one is damaged, or they differ in shape."""
        writers, count = self.roads[run.room].writers, len(run.positions)
        dense = [writer for writer in writers if isinstance(writer, DenseWriter)]
        if len(dense) < len(writers):
            return None
        try:
            for part, writer in enumerate(dense):
                self.reader.copy_part(part, run.positions, writer.rows(run.row, count))
        except SampleError:  # of one of them: found out one by one
            return None
        return [(row, [], None) for row in range(run.row, run.row + count)]

    def _one(self, slot: int, row: int, position: int) -> tuple[int, list[Place] | SampleError, bytes | None]:
        road = self.roads[slot]
        try:
            sample = self.reader.read(position)
            road.check(position, sample)
            places = road.write(sample._replace(position=row))
        except SampleError as error:
            return row, error, None
        return row, places, pickle.dumps(sample.target, protocol=5) if self.with_targets else None


@dataclass(frozen=True, slots=True)
class BringIn:
    """What the worker of windows does: have samples in memory where they lie.

    Args:
        reader: of the samples.
    """

    reader: StoredSamples

    def __call__(self, run: Run) -> Results:
        """Do one task."""
        rows = range(run.row, run.row + len(run.positions))
        self.reader.bring(run.positions)
        try:
            self.reader.check(run.positions)
        except SampleError:  # of one of them: found out one by one
            return [(row, self._error(position), None) for row, position in zip(rows, run.positions, strict=True)]
        return [(row, [], None) for row in rows]

    def _error(self, position: int) -> list[Place] | SampleError:
        try:
            self.reader.check([position])
        except SampleError as error:
            return error
        return []


class Chunk:
    """Some samples of the epoch, from the moment they begin to load until the last of their batches is served.

    Args:
        positions: int64, of the samples in the dataset, in the order in which they are served.
        batches: how many are made of them.
        in_sequence: whether to read them in the order of the dataset.
    """

    def __init__(self, positions: np.ndarray, batches: int, *, in_sequence: bool = False) -> None:
        self.positions, self._in_sequence = positions, in_sequence
        self._batches_left = batches
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._arrived: Arrived | None = None  # made when the chunk begins: an epoch's all at once would take gigabytes
        self.errors: dict[int, SampleError] = {}
        self._view: PreparedDataset | None = None
        self.room_number = -1
        self._room: Room | None = None

    def begin(self, room_number: int, room: Room, dataset: PreparedDataset) -> PreparedDataset:
        """Take the room that the samples go to; return the dataset as it is served from there."""
        room.rewind()
        positions = np.sort(self.positions) if self._in_sequence else self.positions
        rows = dict(zip(positions.tolist(), range(len(positions)), strict=True))
        with self._changed:
            self.room_number, self._room, self.positions = room_number, room, positions
            self._arrived = arrived = Arrived(rows, np.zeros(len(positions), np.bool_), {})
            self._view = view = room.view(dataset, arrived)
            self._changed.notify_all()
        return view

    def tasks(self, samples_per_task: int) -> list[Run]:
        """What workers have to do."""
        positions = self.positions.tolist()
        return [
            Run(self.room_number, row, positions[row : row + samples_per_task])
            for row in range(0, len(positions), samples_per_task)
        ]

    def enter(self, results: Results) -> None:
        """Note what a worker has done."""
        room, arrived = self._room, self._arrived
        if room is None or arrived is None:
            return  # given up meanwhile
        with self._changed:
            for row, outcome, target in results:
                position = int(self.positions[row])
                if isinstance(outcome, SampleError):
                    self.errors[position] = outcome
                else:
                    room.enter(row, outcome)
                if target is not None:
                    arrived.targets[position] = pickle.loads(target)  # of this process's own child
                arrived.is_there[row] = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let who waits for samples that are not there have an error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def serve(self, positions: np.ndarray, make: Callable[[PreparedDataset], Any]) -> Any:
        """Wait until the samples at these positions are there, and make a batch of them.

        Raises:
            Exception: the chunk failed before they were; what failed it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._view is not None)
            view, arrived = self._view, self._arrived
            if view is not None and arrived is not None:
                rows = [arrived.rows[position] for position in positions.tolist()]
                self._changed.wait_for(lambda: self._failure is not None or arrived.is_there[rows].all())
            if view is None or arrived is None or not arrived.is_there[rows].all():
                assert self._failure is not None
                raise self._failure
        return make(view)

    def leave(self) -> bool:
        """Say that one batch has been made; whether it was the last, so that the room is free."""
        with self._changed:
            self._batches_left -= 1
            return self._batches_left == 0

    def end(self) -> None:
        """Let go of the samples and of all that is known of them, once none is served any more. Idempotent."""
        if self._room is not None:
            self._room.drop(self.positions)
        self._room, self._view, self._arrived = None, None, None
        self.positions = np.empty(0, np.int64)
