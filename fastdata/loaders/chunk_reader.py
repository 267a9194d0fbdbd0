"""Reading chunks of samples from disk before their batches, and releasing them afterwards."""

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
"""Memory for each sample of a chunk in addition to its pixels: its position, and a flag."""

_NEIGHBOURS = 256
"""Number of neighbouring samples over which sizes are averaged. The largest of these averages
counts as the size of a sample: hardly any chunk has a larger one."""

_LOADED_AT_ONCE = 128
"""Number of samples that are read before checking again whether the epoch has ended."""


Located = Iterable[tuple[DiskStore, Int64s]]
"""Stores with the positions of samples in them."""


class ChunkReader:
    """Reads the chunks of an epoch before their batches, and releases each after its last batch.

    All of this is only hints to the stores. A sample that is not in memory is read when its batch
    needs it, and a sample that was released is read again, so batches are right in any case.

    Args:
        samples: samples of the epoch, in its order: int64.
        locate: function of samples that returns the stores that hold them, with their positions.
        chunk_samples: number of samples in each chunk except the last.
        batch_size: number of samples in a batch.
        is_remote: True if samples come over a network. They are then fetched batch by batch, and
            each batch waits for its own samples. A chunk on a disk is read in the order of its
            files, and its first batch waits for the whole chunk.
        from_cache: True if samples are also removed from the system's page cache.
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
        for _ in range(CHUNKS_HELD):  # one gives batches while the thread reads the next one
            self._begin()

    def when_loaded(self, indices: Iterator[int]) -> Iterator[int]:
        """Yield the indices of each chunk once it is in memory.

        A disk reads a whole chunk in the order of its files faster than batch by batch.
        """
        for number, chunk in enumerate(self._chunks):
            if number < len(self._coming) and not self._is_remote:
                self._coming[number].result()
            yield from itertools.islice(indices, len(chunk))

    def count_batch(self) -> None:
        """Count a batch that was returned; after a chunk's last batch, begin to read another."""
        self._handed += 1
        # No chunk is held any more if the loop calls next again after the last batch.
        is_held = self._released < len(self._coming)
        if is_held and self._handed % self._chunk_batches == 0:
            self._release()
            self._begin()

    def __reduce__(self) -> Any:
        """Pickle and copy as None, because chunks belong to one epoch in one process."""
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
                # Reading and releasing must use equal groups: the store counts how often each page
                # is held, and a group counts once.
                for group in _cut(positions, _LOADED_AT_ONCE):
                    yield store, group

    def _load(self, chunk: int) -> None:
        for store, positions in self._groups(chunk):
            if chunk < self._released:
                return  # the epoch has ended early
            # The same error is raised where the batch of the sample is read.
            with contextlib.suppress(FastDataError, OSError):
                store.load(positions)

    def _release(self) -> None:
        chunk = self._released
        self._released += 1
        future = self._coming[chunk]
        # Wait for the thread before evicting a chunk: what it loads later would stay in memory.
        if not future.cancel():
            future.result()
        elif not self._is_remote:  # batches may have fetched samples of a remote chunk themselves
            return
        for store, positions in self._groups(chunk):
            store.evict(positions, from_cache=self._from_cache)


def _cut(samples: Int64s, size: int) -> list[Int64s]:
    """Split samples into pieces of ``size``; the last one may be shorter."""
    return np.split(samples, range(size, len(samples), size))


class ChunkSampler(RankSampler):
    """A rank's samples in an order of chunks; yields the samples of a chunk once it is in memory.

    Args:
        order_of: function of ``world_size=`` that returns an order of chunks.
        begin_reading: function of an epoch's samples that begins to read their chunks; None if no
            samples are on disk.
        options: arguments of ``RankSampler``.
    """

    def __init__(
        self,
        order_of: Callable[..., Order],
        begin_reading: Callable[[Int64s], ChunkReader] | None,
        **options: Any,
    ) -> None:
        self.chunks: ChunkReader | None = None
        self._order_of = order_of
        self._begin_reading = begin_reading
        super().__init__(order=order_of(), **options)

    def find_ranks(self) -> None:
        super().find_ranks()
        self._order = self._order_of(world_size=self.num_replicas)
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
        mirrors: those of the stores that fetch their samples over a network.
        sample_bytes: memory of a sample in a chunk; see ``_NEIGHBOURS``.
        edges_bytes: memory of the two pages at the ends of a run of neighbours, which also hold
            other samples.
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
        """Return the largest number of samples in a chunk, at most ``samples``."""
        for mirror in self.mirrors:
            # Divide the mirror's space among the chunks of all ranks, and leave the space of one
            # more: blocks also hold samples of other chunks.
            share_bytes = mirror.limit_bytes // (local_ranks() * (CHUNKS_HELD + 1))
            samples = min(samples, int(share_bytes // self.sample_bytes))
        return samples

    def locate(self, samples: Int64s) -> Located:
        """Yield each store that holds some of the samples, and their positions in it."""
        parts = self._parts
        if parts.subset is not None:
            # The modulo turns negative indices, which count from the end, into positions.
            samples = np.sort(parts.subset[samples] % parts.index_count)
        pieces = np.split(samples, np.searchsorted(samples, parts.starts[1:]))
        for part, start, piece in zip(parts.datasets, parts.starts, pieces, strict=True):
            if len(piece):
                for store in _disk_stores(part):
                    yield store, piece - start


def _disk_stores(dataset: PreparedDataset) -> list[DiskStore]:
    kept = dataset._fastdata.reader.kept
    return [store for store in kept.stores if isinstance(store, DiskStore)] if kept else []
