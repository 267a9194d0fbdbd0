"""The flow of one epoch: a thread has chunks filled one after the other, others make batches of them.

Batches never cross chunks, because chunks are whole batches. A batch is made as soon as its own samples are there, so
that the first one waits for no whole chunk. A room is free again when the last batch of its chunk is made: a batch is
a copy.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdata.chunked.chunks import Chunk, Results, Room, Run
from fastdata.crew import Crew
from fastdata.dataset import PreparedDataset

__all__ = ["Flow", "Pipeline", "Way"]

MakeBatch = Callable[[PreparedDataset, np.ndarray], Any]


class _ClosedError(Exception):
    """The epoch was given up; nobody sees this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Which samples come in which batches and chunks.

    Args:
        stream: int64, positions in the dataset in the order in which they are served.
        batch_size: samples in a batch; the last one may have fewer.
        batches: how many there are.
        chunk_batches: how many a chunk is made of.
        in_sequence: whether a chunk is read in the order of the dataset, not in that of the batches.
    """

    stream: np.ndarray
    batch_size: int
    batches: int
    chunk_batches: int
    in_sequence: bool

    def batch(self, number: int) -> np.ndarray:
        """Positions of one batch."""
        return self.stream[number * self.batch_size : (number + 1) * self.batch_size]

    def chunk_of(self, batch: int) -> int:
        """Number of the chunk that holds a batch."""
        return batch // self.chunk_batches

    def chunk(self, number: int, first_batch: int) -> Chunk:
        """One chunk, without the batches before ``first_batch``."""
        first = max(number * self.chunk_batches, first_batch)
        last = min((number + 1) * self.chunk_batches, self.batches)
        positions = self.stream[first * self.batch_size : last * self.batch_size]
        return Chunk(positions, last - first, in_sequence=self.in_sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How samples get from the dataset into batches.

    Args:
        dataset: whose samples they are.
        load: what workers do with a run of samples.
        samples_per_task: that a worker loads at once.
        make: makes a batch of positions, of a dataset that holds them.
        workers: processes that load; 1 is a thread.
        threads: that make batches.
    """

    dataset: PreparedDataset
    load: Callable[[Run], Results]
    samples_per_task: int
    make: MakeBatch
    workers: int
    threads: int


class Pipeline:
    """Makes the batches of an epoch from ``first_batch`` on; whoever makes it closes it.

    Args:
        flow: what comes when.
        way: how.
        rooms: where chunks go; they stay the caller's.
        first_batch: batches before it are passed over.
    """

    def __init__(self, flow: Flow, way: Way, rooms: Sequence[Room], first_batch: int) -> None:
        self._flow, self._way, self._rooms = flow, way, rooms
        self._first_chunk = flow.chunk_of(first_batch)
        last_chunk = flow.chunk_of(flow.batches - 1)
        self._chunks = [flow.chunk(number, first_batch) for number in range(self._first_chunk, last_chunk + 1)]
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for number in range(len(rooms)):
            self._free.put(number)
        self._closed = threading.Event()
        self._crew = Crew(way.load, way.workers)
        self._filler = threading.Thread(target=self._fill, name="fastdata-chunks", daemon=True)
        self._makers = ThreadPoolExecutor(way.threads, thread_name_prefix="fastdata-batches")
        self._filler.start()

    def submit(self, number: int) -> Future[Any]:
        """Begin to make a batch."""
        return self._makers.submit(self._make, number)

    def close(self) -> None:
        """End the threads and processes, whatever they are at. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._free.put(None)
        self._crew.kill()
        for chunk in self._chunks:
            chunk.fail(_ClosedError())
        if threading.current_thread() is not self._filler:
            self._filler.join()
        self._makers.shutdown(wait=threading.current_thread() not in self._makers._threads, cancel_futures=True)
        self._crew.close()
        for chunk in self._chunks:
            chunk.end()

    def _fill(self) -> None:
        """Have one chunk filled after the other, as slots come free."""
        for chunk in self._chunks:
            number = self._free.get()
            if number is None or self._closed.is_set():
                return
            try:
                chunk.begin(number, self._rooms[number], self._way.dataset)
                with contextlib.closing(self._crew.run(chunk.tasks(self._way.samples_per_task))) as finished:
                    for results in finished:
                        chunk.enter(results)
                        if self._closed.is_set():
                            return
            except BaseException as error:  # noqa: BLE001  # raised where the batch would have come
                for each in self._chunks:  # this one's and all later ones
                    each.fail(error)
                return

    def _make(self, number: int) -> Any:
        chunk = self._chunks[self._flow.chunk_of(number) - self._first_chunk]
        positions = self._flow.batch(number)
        try:
            return chunk.serve(positions, lambda view: self._way.make(view, self._undamaged(chunk, positions)))
        finally:
            if chunk.leave():
                chunk.end()
                self._free.put(chunk.room_number)

    def _undamaged(self, chunk: Chunk, positions: np.ndarray) -> np.ndarray:
        """Those of a batch's samples that could be prepared.

        Raises:
            SampleError: one cannot be, and may not be left out; or none can be.
        """
        damaged = [position for position in positions.tolist() if position in chunk.errors]
        if not damaged:
            return positions
        if self._way.dataset.options.on_error == "raise" or len(damaged) == len(positions):
            raise chunk.errors[damaged[0]]
        return positions[~np.isin(positions, damaged)]
