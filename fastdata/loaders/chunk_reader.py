"""Chunks of samples that are read from disk ahead of their batches, and released after them."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from fastdata.datasets.dataset import PreparedDataset
from fastdata.errors import FastDataError
from fastdata.loaders.chunk_plan import CHUNKS_HELD
from fastdata.loaders.orders import Int64s, Order
from fastdata.loaders.parts import Parts
from fastdata.loaders.samplers import RankSampler
from fastdata.machine.ranks import local_ranks
from fastdata.stores.disk import DiskStore
from fastdata.stores.mirror import MirroredStore

_ENTRY_BYTES = 256
"""Memory for each sample of a chunk next to its bytes: its position, and a flag."""

_NEIGHBOURS = 256
"""Number of neighbours whose mean size is hardly below that of a chunk, for the heaviest."""

_LOADED_AT_ONCE = 128
"""Samples that are read between two checks for the end of the epoch."""


Located = Iterable[tuple[DiskStore, Int64s]]


class ChunkReader:
    """Reads the chunks of an epoch ahead of their batches, and releases each after its last batch.

    Only hints are given: a sample that is not in memory is read when it is needed, and one that was
    released is read again.

    Args:
        samples: samples of the epoch, in its order.
        locate: returns the stores that hold samples, and their positions there.
        chunk_samples: samples in each chunk but the last.
        batch_size: samples in a batch.
        is_remote: True if samples come over a network: batch by batch, and each batch is waited for
            when it is read. A chunk on a disk is read in the order of its files, and waited for as
            a whole.
        from_cache: True to remove samples from the system's page cache, too.
    """

    def __init__(
        self,
        samples: Int64s,
        *,
        locate: Callable[[Int64s], Located],
        chunk_samples: int,
        batch_size: int,
        is_remote: bool,
        from_cache: bool,
    ) -> None:
        self._chunks = _cut(samples, chunk_samples)
        self._locate = locate
        self._chunk_batches = chunk_samples // batch_size
        self._run_samples = batch_size if is_remote else chunk_samples
        self._is_remote = is_remote
        self._from_cache = from_cache
        self._handed = 0
        self._released = 0
        self._pid = os.getpid()
        self._coming: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fastdata-chunks")
        for _ in range(CHUNKS_HELD):  # one is served while the thread reads the next one
            self._begin()

    def when_loaded(self, indices: Iterator[int]) -> Iterator[int]:
        """Yield indices once their chunk is read: in sequence, which is faster than by batches."""
        for number, chunk in enumerate(self._chunks):
            if number < len(self._coming) and not self._is_remote:
                self._coming[number].result()
            yield from itertools.islice(indices, len(chunk))

    def count_batch(self) -> None:
        """Note that one more batch was handed over; the last one of a chunk makes room."""
        self._handed += 1
        # Nothing is held if the loop asks again after the last batch.
        is_held = self._released < len(self._coming)
        if is_held and self._handed % self._chunk_batches == 0:
            self._release()
            self._begin()

    def __reduce__(self) -> Any:
        """Pickle and copy as None: chunks belong to one epoch in one process."""
        return type(None), ()

    def close(self) -> None:
        """End the thread and release all chunks. Idempotent; does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        for _ in self._coming[self._released :]:
            self._release()
        self._thread.shutdown()

    def _begin(self) -> None:
        chunk = len(self._coming)
        if chunk < len(self._chunks):
            self._coming.append(self._thread.submit(self._load, chunk))

    def _groups(self, chunk: int) -> Located:
        """Yield the samples of a chunk in the groups in which they are read and released."""
        for run in _cut(self._chunks[chunk], self._run_samples):
            for store, positions in self._locate(np.sort(run)):
                # Groups are the same both times: the store counts the pages of a group once.
                for group in _cut(positions, _LOADED_AT_ONCE):
                    yield store, group

    def _load(self, chunk: int) -> None:
        for store, positions in self._groups(chunk):
            if chunk < self._released:
                return  # the epoch was left
            # The error is raised again when the batch of the sample is read.
            with contextlib.suppress(FastDataError, OSError):
                store.load(positions)

    def _release(self) -> None:
        chunk = self._released
        self._released += 1
        future = self._coming[chunk]
        # A chunk must not be evicted while the thread still loads it: that would stay in memory.
        if not future.cancel():
            future.result()
        elif not self._is_remote:  # batches may have fetched a remote chunk themselves
            return
        for store, positions in self._groups(chunk):
            store.evict(positions, from_cache=self._from_cache)


def _cut(samples: Int64s, size: int) -> list[Int64s]:
    """Split samples into pieces of a size, the last of which may be shorter."""
    return np.split(samples, range(size, len(samples), size))


class ChunkSampler(RankSampler):
    """A rank's samples in an order of chunks; gives the samples of a chunk once they are read.

    Args:
        make: returns an order of chunks for a ``world_size``.
        begin_reading: begins to read the chunks of an epoch's samples; None if none are on disk.
        options: arguments of ``RankSampler``.
    """

    def __init__(
        self,
        make: Callable[..., Order],
        begin_reading: Callable[[Int64s], ChunkReader] | None,
        **options: Any,
    ) -> None:
        self.chunks: ChunkReader | None = None
        self._make = make
        self._begin_reading = begin_reading
        super().__init__(order=make(), **options)

    def find_ranks(self) -> None:
        super().find_ranks()
        self._order = self._make(world_size=self.num_replicas)
        self.order_length = self._order.num_samples
        super().find_ranks()

    def _when_loaded(self, indices: Iterator[int], samples: Int64s) -> Iterator[int]:
        if self._begin_reading is None:
            return indices
        self.chunks = self._begin_reading(samples)
        return self.chunks.when_loaded(indices)

    def count_batch(self) -> None:
        if self.chunks is not None:
            self.chunks.count_batch()


class DiskSamples:
    """The samples of a loader that are stored on disk.

    Attributes:
        stores: the stores of all datasets of the loader.
        mirrors: the stores that fetch their samples over a network.
        sample_bytes: bytes of a sample in a chunk: the mean of the heaviest neighbours.
        edges_bytes: bytes of the pages at both ends of neighbours, which others' samples share.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.stores = [store for part in parts.datasets for store in _disk_stores(part)]
        self.mirrors = [store for store in self.stores if isinstance(store, MirroredStore)]
        self.sample_bytes = _ENTRY_BYTES + sum(it.heaviest_bytes(_NEIGHBOURS) for it in self.stores)
        self.edges_bytes = 2 * mmap.PAGESIZE * len(self.stores)

    @property
    def has_gaps(self) -> bool:
        """True if samples that follow each other in the loader are not neighbours in the files."""
        subset = self._parts.subset
        return subset is not None and bool((np.diff(subset) != 1).any())

    def most_in_chunk(self, samples: int) -> int:
        """Return the most samples of a chunk, not more than ``samples``."""
        for mirror in self.mirrors:
            # Of what the mirror may take, one share is what others' blocks waste.
            share_bytes = mirror.limit_bytes // (local_ranks() * (CHUNKS_HELD + 1))
            samples = min(samples, int(share_bytes // self.sample_bytes))
        return samples

    def locate(self, samples: Int64s) -> Located:
        """Yield each store that holds some of the samples, and their positions in it."""
        parts = self._parts
        if parts.subset is not None:
            # -1 is the last one.
            samples = np.sort(parts.subset[samples] % parts.index_count)
        pieces = np.split(samples, np.searchsorted(samples, parts.starts[1:]))
        for part, start, piece in zip(parts.datasets, parts.starts, pieces, strict=True):
            if len(piece):
                for store in _disk_stores(part):
                    yield store, piece - start


def _disk_stores(dataset: PreparedDataset) -> list[DiskStore]:
    kept = dataset._fastdata.reader.kept
    return [store for store in kept.stores if isinstance(store, DiskStore)] if kept else []
