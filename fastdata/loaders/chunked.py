"""The loader for data larger than memory: a ``DataLoader`` that reads samples in chunks."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from fastdata.datasets.buffers import BatchRing
from fastdata.loaders.chunk_order import chunked
from fastdata.loaders.chunk_plan import (
    CHUNKS_HELD,
    ENOUGH_BATCHES,
    PROCESS_BYTES,
    ChunkPlan,
    empties_cache,
    plan_chunks,
)
from fastdata.loaders.chunk_reader import ChunkReader, ChunkSampler, DiskSamples
from fastdata.loaders.iterators import HELD_BY_USER, CountedIterator
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.parts import Parts
from fastdata.loaders.samplers import StateDict
from fastdata.machine import limits
from fastdata.machine.ranks import find_rank, local_ranks
from fastdata.machine.units import parse_bytes
from fastdata.report import EpochReport
from fastdata.stores.mirror import FETCH_BYTES

_PIECES_PER_CHUNK = 32

_CHUNK_BYTES = 256 << 20
"""Size of a chunk. Its 32 pieces are 8 MiB each: a hard disk then reads longer than it seeks."""

_FETCHED_CHUNK_BYTES = 512 << 20
"""Size of a chunk that comes over a network: five seconds at 100 MB/s. Its pieces are larger than
the segments in which they are fetched."""

_ORDER_BYTES = 64
"""Memory for each sample of the dataset while the order is drawn: its key, place, and sorting."""

_SAMPLE_BYTES = 4 * 3 * 224 * 224
"""Assumed size of a sample in a batch, if only running the transform would show it."""


class ChunkedLoader(contextlib.AbstractContextManager["ChunkedLoader"]):
    """A ``DataLoader`` for data larger than memory: it reads chunks and keeps a memory limit.

    While the batches of one chunk are made, the next chunk is read from disk; after its last batch
    a chunk is released. Each sample comes once in an epoch (with several ranks see ``drop_last``),
    with the pixels that a ``DataLoader`` over the same dataset in memory gives in the epoch of the
    same number. Samples that are not stored on disk are prepared again in each epoch, and shuffled
    globally.

    It is not a subclass of torch's loader, because Accelerate and Lightning would make that loader
    again without these arguments. A pickle or copy keeps its plan.

    Args:
        dataset: a fastdata dataset with ``cache_dir=``, whose samples are read from disk; or any
            other map-style dataset, which is read as ``DataLoader`` reads it. To open a cache
            without its images, also one at a URL, use ``CachedDataset.from_cache``. For a cache at
            a URL, ``local_cache`` needs room for two chunks of every rank of the machine.
        batch_size: number of samples in a batch.
        memory_limit: limit for all memory of this process and its children, with Python and torch
            (memory that they share counts once): bytes, ``"1GiB"``, or a fraction of the free
            memory. Chunks get what is left after the memory in use now, batches and workers, so
            make the loader after the model; see ``plan``. Each rank has a limit of its own.
        shuffle: False keeps the order of the dataset.
        drop_last: True drops the last batch if it is not full. With several ranks it also drops
            samples that cannot be divided evenly; False repeats the first samples instead, as
            torch's ``DistributedSampler`` does.
        chunk_samples: number of samples in a chunk, rounded down to whole batches; two such chunks
            must fit into the limit. By default a chunk has 256 MiB of samples, or 512 MiB if they
            come over a network; if two do not fit, smaller parts of a chunk are read ahead. The
            order depends on this number and on ``mix_chunks``, so all ranks must use the same.
        mix_chunks: number of pieces in a chunk. A piece is a run of neighbouring samples; the
            pieces of a chunk come from random places of the dataset, and all of their samples are
            shuffled. The default is 32 if samples are stored on disk, else the shuffle is global.
        num_workers: maximum number of threads or processes that make batches; by default the number
            of usable cores. There are fewer if memory is short, but at least one.
        collate_fn: as in torch; the default is ``fastdata.collate``.
        seed: seed of the order; all ranks must use the same. The random numbers of transforms
            depend on the dataset's own seed. If it has none, torch's generator gives a base seed
            for each epoch, as in torch's loader.
        rank: number of this rank; by default that of ``torch.distributed``, or of torchrun's
            environment variables.
        world_size: number of ranks, with the same default.

    Attributes:
        plan: the planned memory, a ``ChunkPlan``; print it.

    Raises:
        MemoryBudgetError: ``memory_limit`` is too small for the batches and two chunks of one batch
            each.

    A damaged sample raises ``SampleError`` instead of its batch; ``next`` then gives the next one.
    Only one iterator is open at a time: a new one ends the one before.

    Example:
        >>> import tempfile
        >>> from fastdata import CachedDataset
        >>> squares = [(torch.full((1, 2, 2), i), i * i) for i in range(10)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dataset = CachedDataset(squares, cache_dir=folder, cache_key="squares")
        ...     with ChunkedLoader(dataset, 4, memory_limit="2GiB") as loader:
        ...         batches = [targets.tolist() for images, targets in loader]
        >>> [len(batch) for batch in batches], sorted(sum(batches, []))
        ([4, 4, 2], [0, 1, 4, 9, 16, 25, 36, 49, 64, 81])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        memory_limit: int | float | str,
        shuffle: bool = True,
        drop_last: bool = False,
        chunk_samples: int | None = None,
        mix_chunks: int | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._live = weakref.WeakSet[CountedIterator]()  # the latest iterator, if it is in use
        _check_map_style(dataset)
        BatchSampler([], batch_size, drop_last)  # raises torch's error for a wrong batch size
        self.dataset = dataset
        self._parts = Parts.find(dataset)
        self._disk = DiskSamples(self._parts)
        stores = self._disk.stores
        is_mixed = shuffle and bool(stores)
        pieces = 1
        if is_mixed:
            pieces = mix_chunks or _PIECES_PER_CHUNK
        ranks = find_rank(rank, world_size).world_size
        order_of = partial(
            chunked, len(dataset), shuffle=shuffle, drop_last=drop_last, world_size=ranks
        )
        samples = order_of().num_samples // ranks
        # The order is decided before memory is measured: ranks with different limits must share it.
        mixed_samples = self._mixed_samples(samples, chunk_samples)
        self.plan = self._plan(
            memory_limit, samples, ranks, chunk_samples, mixed_samples, pieces, num_workers
        )
        begin_reading = None
        if stores:
            disk_bytes = sum(store.size_bytes for store in stores)
            free_bytes = limits.available_bytes().bytes
            self._empties_cache = empties_cache(disk_bytes, free_bytes, self.plan)
            begin_reading = partial(
                ChunkReader,
                locate=self._disk.locate,
                chunk_samples=self.plan.chunk_samples,
                batch_size=batch_size,
                is_remote=bool(self._disk.mirrors),
                from_cache=self._empties_cache,
            )
        if is_mixed:
            order_of = partial(
                order_of, piece_samples=max(mixed_samples // pieces, 1), chunk_samples=mixed_samples
            )
        self._sampler = ChunkSampler(
            order_of, begin_reading, seed=seed, rank=rank, world_size=world_size
        )
        self._loader = DataLoader(
            dataset,
            batch_size,
            sampler=self._sampler,
            num_workers=self.plan.workers,
            collate_fn=collate_fn,
            drop_last=drop_last,
            # If the dataset has a seed, nothing may be drawn from torch's global generator.
            generator=torch.Generator() if self._parts.seed is not None else None,
            workers="thread" if stores else "auto",
        )
        self.collate_fn = self._loader.collate_fn

    def _mixed_samples(self, samples: int, chunk_samples: int | None) -> int:
        """Return how many of one rank's ``samples`` are mixed with each other.

        It depends only on arguments and stores, never on the free memory: it decides the order,
        which must be equal on all ranks, and when an epoch is resumed on another machine.
        """
        least = 1
        if chunk_samples is None:
            least = ENOUGH_BATCHES
            most_bytes = _FETCHED_CHUNK_BYTES if self._disk.mirrors else _CHUNK_BYTES
            chunk_samples = int(most_bytes // self._disk.sample_bytes)
        batches = max(chunk_samples // self.batch_size, least)
        return min(batches, -(-samples // self.batch_size)) * self.batch_size

    def _plan(
        self,
        memory_limit: int | float | str,
        samples: int,
        ranks: int,
        chunk_samples: int | None,
        mixed_samples: int,
        pieces: int,
        num_workers: int | None,
    ) -> ChunkPlan:
        """Plan the memory of batches, and of the chunks that are read ahead.

        Args:
            memory_limit: the user's argument.
            samples: number of samples of this rank in an epoch.
            ranks: number of ranks that share the order.
            chunk_samples: the user's argument.
            mixed_samples: number of samples that the order mixes; a chunk has at most as many.
            pieces: number of pieces that these samples consist of.
            num_workers: the user's argument.
        """
        disk = self._disk
        for store in disk.stores:
            store.evict_all()  # what other loaders left in memory would count as in use
        # Plan everything except chunks first: workers with two batches each, the order, and the
        # batches that the loop holds. Chunks get the rest.
        reader = self._parts.reader()
        served_bytes = None if reader is None else reader.served_bytes
        batch_bytes = (served_bytes or _SAMPLE_BYTES) * self.batch_size
        in_use_bytes = limits.tree_pss_bytes()
        share_bytes = limits.available_bytes().bytes // local_ranks() + in_use_bytes
        most_workers = limits.usable_cores() if num_workers is None else num_workers
        worker_bytes = 0
        if served_bytes is None:
            # Samples are read one by one. From memory-mapped files one thread does that, because
            # others would wait for the GIL; all other samples come from worker processes.
            if disk.stores:
                most_workers = 1
            else:
                worker_bytes = PROCESS_BYTES
        fixed_bytes = _ORDER_BYTES * len(self.dataset) + (1 + HELD_BY_USER) * batch_bytes
        fixed_bytes += CHUNKS_HELD * (pieces * disk.edges_bytes + FETCH_BYTES * len(disk.mirrors))
        plan = partial(
            plan_chunks,
            parse_bytes(memory_limit, of=share_bytes),
            in_use_bytes=in_use_bytes,
            fixed_bytes=fixed_bytes,
            batch_bytes=batch_bytes,
            batch_size=self.batch_size,
            samples=samples,
            worker_bytes=worker_bytes,
            most_workers=most_workers,
            most_samples=disk.most_in_chunk(mixed_samples),
            chunk_samples=chunk_samples,
        )
        if not disk.stores:
            return plan(sample_bytes=0)
        # A sample that is read without its neighbours also takes the pages at its two ends. No two
        # samples of a chunk are neighbours if the loader skips some, or if other ranks have them.
        alone_bytes = disk.sample_bytes + disk.edges_bytes
        if disk.has_gaps or (ranks > 1 and not self.shuffle):
            return plan(sample_bytes=alone_bytes)
        found = plan(sample_bytes=disk.sample_bytes)
        # A chunk smaller than what the order mixes has only some samples of each piece, which are
        # not neighbours either.
        if self.shuffle and found.chunk_samples < mixed_samples:
            return plan(sample_bytes=alone_bytes)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_live": ()}  # iterators belong to this process

    def __copy__(self) -> ChunkedLoader:
        """Return a loader over the same samples, with the same plan and with epochs of its own."""
        shared = (
            self.dataset,
            self._parts,
            self.collate_fn,
            *self._parts.datasets,
            *self._disk.stores,
        )
        return copy.deepcopy(self, {id(each): each for each in shared})

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> CountedIterator:
        return self.iterate()

    def iterate(
        self, ring: BatchRing | None = None, held: int = HELD_BY_USER, read: None = None
    ) -> CountedIterator:
        """Begin an epoch, as ``iter`` does.

        Args:
            ring: memory of a prefetcher for the batches; None for the loader's own.
            held: number of batches that the user may hold at a time before new memory is needed.
            read: not used; a prefetcher passes it to every loader.
        """
        # Two open epochs would need twice the planned memory.
        self._end("another iterator of the same loader was begun")
        iterator = self._loader._fastdata.iterate(self._loader, ring, held)
        if self._disk.stores:
            # A dropped iterator releases its chunks, after its threads have ended.
            iterator.after_batch = self._sampler.count_batch
            end = weakref.finalize(iterator, _close_chunks, self._sampler, iterator.stop)
            iterator.stop = end  # type: ignore[method-assign]
        self._live = weakref.WeakSet([iterator])
        return iterator

    def _end(self, reason: str) -> None:
        """End the latest iterator; from then on its ``next`` raises an error with the reason."""
        for iterator in self._live:
            iterator.ended = reason
            iterator.stop()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the order and random numbers depend on, until it is set again."""
        self._loader.set_epoch(epoch)

    def report(self) -> EpochReport:
        """Return figures of the latest epoch; ``.path`` describes how batches are read, and why."""
        report = self._loader.report()
        if not self.plan.chunk_samples:
            return report
        cache = ", removed from the system's page cache afterwards" if self._empties_cache else ""
        chunks = f"chunks of {self.plan.chunk_samples} samples, read ahead by a thread"
        return replace(report, path=f"{chunks}{cache}; {report.path}")

    def ring_slots(self, held: int) -> int:
        """Return the number of buffers for threads, if the user keeps ``held`` batches."""
        return self._loader._fastdata.ring_slots(self._loader, held)

    def state_dict(self) -> StateDict:
        """Return the position in the latest epoch, as ``DataLoader.state_dict`` does."""
        return self._loader.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Continue the epoch of ``state`` with the next iterator; only its rest is read.

        Raises:
            ValueError: the state is of a loader with another dataset, order, or number of ranks.
        """
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """End the epoch and release its memory. Batches that you hold stay valid. Idempotent."""
        self._end("the loader was closed")

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_map_style(dataset: object) -> None:
    has_no_index = isinstance(dataset, (str, bytes, os.PathLike, IterableDataset))
    if has_no_index or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "ChunkedLoader needs a map-style dataset (one with __getitem__), but got "
            f"{type(dataset).__name__}. Pass fastdata.ImageFolder(root, cache_dir=...), or "
            "CachedDataset.from_cache(path) to open a cache."
        )


def _close_chunks(sampler: ChunkSampler, stop: Callable[[], Any]) -> None:
    """End the threads that read samples, then release the samples, which threads would reload."""
    stop()
    chunks = sampler.chunks
    sampler.chunks = None
    if chunks is not None:
        chunks.close()
