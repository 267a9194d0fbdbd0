"""The loader for data larger than memory: a DataLoader in an order of chunks, of which two are in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from fastdata.datasets.batch import RepeatedIndex, count_earlier
from fastdata.datasets.cached import CachedDataset
from fastdata.datasets.dataset import PreparedDataset, index_count, stored_of
from fastdata.datasets.ring import BatchRing
from fastdata.loaders.chunk_plan import (
    CHUNKS_HELD,
    PROCESS_BYTES,
    ChunkPlan,
    EpochOrder,
    Needs,
    ShuffleQuality,
    empties_cache,
    plan_chunks,
    plan_earlier,
    plan_epoch,
    shuffle_quality,
)
from fastdata.loaders.epochs import HELD_BY_USER
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.order import Progress
from fastdata.loaders.residency import Residency
from fastdata.loaders.samplers import EpochSampler
from fastdata.loaders.view import LoaderView
from fastdata.machine import memory
from fastdata.machine.ranks import find_rank, local_ranks
from fastdata.report import EpochReport, log
from fastdata.stores.mirror import FETCH_BYTES, MirroredStore
from fastdata.stores.readers import DiskStore

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ChunkedLoader", "ShuffleQuality"]

_PIECES_PER_CHUNK = 32
_MOST_BYTES = 256 << 20
"""Of a chunk that is only read ahead: whatever its size, the order is the same, so that more would
bring nothing."""
_MOST_MIXED_BYTES = 4 << 30
"""Of a chunk that is mixed: the larger, the better the order, but the later the first batch."""
_MOST_FETCHED_BYTES = 512 << 20
"""Of a mixed chunk that comes over a network, at 100 MB/s in five seconds."""
_LEAST_FETCHED = 8
"""Chunks of an epoch, so that the next one comes while one is decoded."""
_PIECE_BYTES = 4 << 20
"""Of what lies side by side in a chunk that comes over a network: many small requests would take
long."""
_ORDER_BYTES = 24
"""For each sample of the dataset while an epoch is planned: its key, its place, and sorting."""
_ENTRY_BYTES = 256
"""For each sample of a chunk, besides its own: where it lies, and that it is there."""
_NEIGHBOURS = 256
"""Fewer than a chunk or a piece of one has, mostly: their mean is hardly above that of the heaviest
so many."""
_SAMPLE_BYTES = 4 * 3 * 224 * 224
"""Of a sample in a batch where only running the transform would tell."""


class ChunkSampler(EpochSampler):
    """The samples of one rank in the order of each epoch; positions count this rank's samples.

    Attributes:
        order: what it follows from.
        residency: of the epoch that has begun, which is told what chunk comes next.
    """

    def __init__(self, order: EpochOrder, rank: int | None, world_size: int | None) -> None:
        self.order = order
        self.position = 0
        self.rank = order.rank
        self.num_replicas = order.world_size
        self.residency: Residency | None = None
        self._given = rank, world_size
        self._planned: tuple[int, EpochOrder, np.ndarray] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        order = asdict(self.order)
        del order["rank"]  # all ranks stand at the same batch: one's state does for all
        if self.order.piece_samples == 1:
            order["chunk_samples"] = None  # says nothing about the order
        return order

    def __len__(self) -> int:
        return self.order.rank_samples

    def batches_left(self, position: int, batch_size: int = 1, *, drop_last: bool = False) -> int:
        left = len(self) - position
        return left // batch_size if drop_last else -(-left // batch_size)

    def advance(self, position: int, batches: int, batch_size: int) -> int:
        return position + batches * batch_size

    def find_ranks(self) -> None:
        super().find_ranks()
        self.order = replace(self.order, rank=self.rank, world_size=self.num_replicas)

    def coming_stream(self) -> np.ndarray:
        """The samples that the next iterator gives, int64 (n,)."""
        coming = self.coming()
        self.find_ranks()
        return self._stream_of(coming["epoch"])[coming["position"] :]

    def _stream_of(self, epoch: int) -> np.ndarray:
        if self._planned is None or self._planned[:2] != (epoch, self.order):
            self._planned = epoch, self.order, plan_epoch(self.order, epoch)
        return self._planned[2]

    def __iter__(self) -> Iterator[int]:
        self._begin()
        stream = self._stream_of(self.epoch)
        earlier = self._count_earlier(stream)
        size = self.order.chunk_samples
        for number, start in enumerate(range(self.position, len(stream), size)):
            if self.residency is not None:
                self.residency.will_need(number)
            chunk = stream[start : start + size].tolist()
            if earlier is None:
                yield from chunk
            else:
                yield from map(RepeatedIndex.mark, chunk, earlier[start : start + size].tolist())

    def _count_earlier(self, stream: np.ndarray) -> np.ndarray | None:
        """How often each sample came before, on lower ranks or here; None where none is repeated to fill the ranks."""
        if len(stream) * self.order.world_size <= self.order.length:
            return None
        seen = np.zeros(self.order.length, np.uint32)
        count_earlier(seen, plan_earlier(self.order, self.epoch))
        return count_earlier(seen, stream)


class ChunkedLoader:
    """Trains on data larger than memory: a ``DataLoader`` in an order of chunks, under a memory limit.

    Chunk k + 1 is read from disk while chunk k is served, which is let go of then. Samples that are
    kept nowhere are prepared anew each epoch, in an order that is shuffled globally. Every sample
    comes exactly once an epoch, with the pixels that ``DataLoader`` over the same dataset held in
    memory would serve in the epoch of the same number. It is no subclass of torch's loader, which
    Accelerate and Lightning would make anew over the dataset alone, but has ``__iter__`` and
    ``__len__``, ``dataset``, ``batch_size`` and ``drop_last``.

    Args:
        dataset: a fastdata dataset with ``cache_dir=``, whose samples are read from disk; or any
            other map-style dataset, which is read as a ``DataLoader`` reads it. A path is opened as
            ``CachedDataset.from_cache(path, as_tensors=True)``: images come as tensors (C, H, W) of
            the pixels that the cache holds, uint8 of photographs, without any transform.
        batch_size: samples in a batch.
        memory_limit: for all memory of this process and its children, Python and torch included
            (the sum of their proportional set sizes): bytes, ``"1GiB"``, or a fraction of what is
            free. What is in use now, batches and workers are taken off, chunks get the rest, so
            make the loader after the model. See ``plan``. Each rank has a limit of its own.
        shuffle: whether to shuffle; else samples come in the order of the dataset.
        drop_last: whether to drop the last batch if it is not full. Over several ranks, samples
            that cannot be shared out evenly are dropped too; else the first ones are repeated, as
            torch's ``DistributedSampler`` does.
        chunk_samples: samples in a chunk, rounded down to whole batches; by default what fits.
        mix_chunks: of how many pieces of neighbouring samples a chunk is made, from all over the
            dataset; within the chunk they are mixed. Reading is sequential then, and the shuffle
            not quite global: see ``shuffle_quality``. By default 32 where samples lie on disk and
            are best read in sequence, elsewhere the shuffle is global.
        num_workers: threads or processes that make batches, at most; by default the usable cores.
            Fewer where memory is short.
        collate_fn: as torch's; the default is ``fastdata.collate``.
        seed: of the order, which all ranks must share. Random draws of transforms follow the
            dataset's own seed; where that is None, a base seed that is drawn for each epoch from
            torch's generator, as by torch's loader.
        rank: which share of each epoch to serve; by default that of ``torch.distributed``, or of
            the environment that torchrun sets.
        world_size: number of shares.
        storage_options, local_cache, local_limit: of a cache at a URL, of which the machine keeps
        what it needs; see
            ``fastdata.datasets.dataset.DatasetOptions``. Two chunks of every rank of the machine
            must have room.

    Raises:
        MemoryBudgetError: ``memory_limit`` leaves no room for batches and two chunks of one batch.

    A damaged sample raises ``SampleError`` where its batch would come, and the next batch can be
    asked for. One iterator is open at a time: the next one ends it.

    Example:
        >>> squares = [(torch.full((1, 2, 2), i), i * i) for i in range(10)]
        >>> with ChunkedLoader(squares, batch_size=4, memory_limit="2GiB", num_workers=1) as loader:
        ...     batches = [targets.tolist() for images, targets in loader]
        >>> [len(batch) for batch in batches], sorted(sum(batches, []))
        ([4, 4, 2], [0, 1, 4, 9, 16, 25, 36, 49, 64, 81])
    """

    plan: ChunkPlan | None = None
    """What is in memory at once; None for an empty dataset."""

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
        storage_options: Mapping[str, Any] | None = None,
        local_cache: str | os.PathLike[str] | None = None,
        local_limit: int | float | str | None = None,
    ) -> None:
        counts = {"batch_size": batch_size, "chunk_samples": chunk_samples}
        counts |= {"mix_chunks": mix_chunks, "num_workers": num_workers}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name}={count} must be at least 1")
        found = find_rank(rank, world_size)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._is_closed = False
        self._epoch: weakref.ref[_Epoch] | None = None
        with contextlib.ExitStack() as cleanup:
            if isinstance(dataset, (str, bytes, os.PathLike)):
                mirrored = {"local_cache": local_cache, "local_limit": local_limit}
                opened = _open_path(
                    os.fsdecode(dataset), storage_options=storage_options, **mirrored
                )
                dataset = cleanup.enter_context(opened)
            if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
                raise TypeError(
                    f"ChunkedLoader reads samples by index, which {type(dataset).__name__} has no way for. Give it a "
                    "map-style dataset, such as fastdata.ImageFolder(root, cache_dir=...)."
                )
            self.dataset = dataset
            self._view = LoaderView.find(dataset)
            self._stores = [store for part in _parts_of(self._view) for store in _disk_stores(part)]
            order = EpochOrder(
                length=len(dataset),
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
                rank=found.rank,
                world_size=found.world_size,
                chunk_samples=len(dataset) or 1,
            )
            cores = num_workers or memory.usable_cores()
            if order.rank_samples:
                order = self._plan(order, memory_limit, chunk_samples, mix_chunks, cores)
            has_seed = self._view is not None and self._view.seed is not None
            self._sampler = ChunkSampler(order, rank, world_size)
            self._loader: DataLoader[Any] = DataLoader(
                dataset,
                batch_size,
                sampler=self._sampler,
                num_workers=self.plan.workers if self.plan else 0,
                collate_fn=collate_fn,
                drop_last=drop_last,
                generator=torch.Generator() if has_seed else None,
                workers="thread" if self._stores else "auto",
            )
            self.collate_fn = self._loader.collate_fn
            self._owned = cleanup.pop_all()

    def _plan(
        self,
        order: EpochOrder,
        memory_limit: int | float | str,
        chunk_samples: int | None,
        mix: int | None,
        most_workers: int,
    ) -> EpochOrder:
        """Plan batches and chunks, and return the order that they give."""
        view = self._view
        for store in self._stores:
            store.release()  # it is no memory that is in use: chunks will be there in its place
        reader = None if view is None else view.dataset.reader()
        is_served = reader is not None and reader.obstacle is None
        is_mixed = order.shuffle and bool(self._stores)
        most_bytes, pieces = self._most_of_chunk(order, mix) if is_mixed else (_MOST_BYTES, 1)
        pages_bytes = 2 * mmap.PAGESIZE * len(self._stores)
        in_use_bytes = memory.tree_pss_bytes()
        free_bytes = memory.available_bytes().bytes
        limit_bytes = memory.parse_bytes(
            memory_limit, of=free_bytes // local_ranks() + in_use_bytes
        )
        served_bytes = None if reader is None else reader.served_bytes
        batch_bytes = (served_bytes or _SAMPLE_BYTES) * self.batch_size
        mirrored = [store for store in self._stores if isinstance(store, MirroredStore)]
        fetch_bytes = CHUNKS_HELD * FETCH_BYTES * len(mirrored)
        fixed_bytes = fetch_bytes + _ORDER_BYTES * order.length + CHUNKS_HELD * pieces * pages_bytes
        # Of what local_limit= leaves, one share is what others' blocks waste.
        room_bytes = min((store.mirror.limit_bytes for store in mirrored), default=1 << 62)
        room_bytes //= local_ranks() * (CHUNKS_HELD + 1)
        mapped_bytes = sum(store.heaviest_bytes(_NEIGHBOURS) for store in self._stores)
        mapped_bytes += _lone_share(order, view) * pages_bytes
        needs = Needs(
            in_use_bytes=in_use_bytes,
            fixed_bytes=fixed_bytes + (1 + HELD_BY_USER) * batch_bytes,
            batch_bytes=batch_bytes,
            batch_size=self.batch_size,
            samples=order.rank_samples,
            worker_bytes=0 if is_served or self._stores else PROCESS_BYTES,
            most_workers=1 if self._stores and not is_served else most_workers,
            sample_bytes=_ENTRY_BYTES + mapped_bytes if self._stores else 0,
            most_bytes=min(most_bytes, room_bytes),
        )
        self.plan = plan = plan_chunks(limit_bytes, needs, chunk_samples)
        log.info("%s", plan)
        if not self._stores:
            return order
        self._empties_cache = empties_cache(
            sum(store.size_bytes for store in self._stores), free_bytes, plan
        )
        piece_samples = max(plan.chunk_samples // pieces, 1) if is_mixed else 1
        return replace(order, piece_samples=piece_samples, chunk_samples=plan.chunk_samples)

    def _most_of_chunk(self, order: EpochOrder, mix: int | None) -> tuple[int, int]:
        """The most bytes of a chunk that is mixed, and of how many pieces it is made."""
        fetched_bytes = sum(
            store.size_bytes for store in self._stores if isinstance(store, MirroredStore)
        )
        if not fetched_bytes:
            return _MOST_MIXED_BYTES, mix or _PIECES_PER_CHUNK
        share = order.rank_samples / order.length / _LEAST_FETCHED
        most_bytes = min(_MOST_FETCHED_BYTES, int(share * fetched_bytes))
        segment_bytes = max(
            store.mirror.segment_bytes for store in self._stores if isinstance(store, MirroredStore)
        )
        # So that few of its segments are others', too.
        piece_bytes = max(_PIECE_BYTES, 4 * segment_bytes)
        return most_bytes, mix or min(_PIECES_PER_CHUNK, max(most_bytes // piece_bytes, 1))

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        return self.iterate()

    def iterate(
        self, ring: BatchRing | None = None, held: int = HELD_BY_USER, read: None = None
    ) -> Any:
        """Begin an epoch, as ``iter`` does; for a prefetcher as that of a DataLoader."""
        if self._is_closed:
            raise RuntimeError("the loader was closed; make it again to go on")
        self._end("another one of the same loader was begun")
        batches = self._loader.iterate(ring, held)
        epoch = _Epoch(batches, self._begin_chunks)
        self._epoch = weakref.ref(epoch)
        return epoch

    def _begin_chunks(self) -> Residency | None:
        """Begin to read the chunks of the epoch that comes; None where no samples lie on disk."""
        if self._stores:
            self._sampler.residency = Residency(
                _locator(self._view),
                self._sampler.coming_stream(),
                self._sampler.order.chunk_samples,
                self.batch_size,
                from_cache=self._empties_cache,
            )
        return self._sampler.residency

    def _end(self, reason: str) -> None:
        epoch = self._epoch() if self._epoch else None
        if epoch is not None:
            epoch.end(reason)

    def set_epoch(self, epoch: int) -> None:
        """Make the order and the random draws of the coming epochs those of ``epoch``, until it is set again."""
        self._loader.set_epoch(epoch)

    def shuffle_quality(self, epoch: int = 0) -> ShuffleQuality:
        """How far the order of an epoch is from a global shuffle, of this rank; reads no data."""
        return shuffle_quality(self._sampler.order, epoch, self.batch_size)

    def report(self) -> EpochReport:
        """How the latest epoch went, complete or not; ``.path`` says how batches are read, and why."""
        report = self._loader.report()
        if not self._stores:
            return report
        cache = ", the system's page cache emptied behind them" if self._empties_cache else ""
        chunks = (
            f"chunks of {self._sampler.order.chunk_samples} samples, read ahead by a thread{cache}"
        )
        return replace(report, path=f"{chunks}; {report.path}")

    def ring_slots(self, held: int) -> int:
        return self._loader.ring_slots(held)

    def read_ahead(self) -> Progress:
        return self._loader.read_ahead()

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest epoch stands, as ``DataLoader.state_dict``; the same on every rank."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the one of ``state``, without the batches handed over before; only the rest is read.

        Raises:
            ValueError: the state is of a loader over another dataset, or with another order.
        """
        self._loader.load_state_dict(state)

    def close(self) -> None:
        """End what runs and give the memory back; batches handed over stay valid. Idempotent."""
        self._is_closed = True
        self._end("the loader was closed")
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Epoch:
    """The batches of an epoch; with the first one chunks begin to be read, each further one is told to them."""

    def __init__(
        self, batches: Iterator[Any], begin_chunks: Callable[[], Residency | None]
    ) -> None:
        self._batches = batches
        self._begin_chunks = begin_chunks
        self._residency: Residency | None = None
        self._is_begun = False
        self._ended = ""

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self._ended:
            raise RuntimeError(f"this iterator has no more batches: {self._ended}")
        if not self._is_begun:
            self._is_begun = True
            self._residency = self._begin_chunks()
            if self._residency is not None:
                # There are threads, which read no more then.
                stop = getattr(self._batches, "stop", None)
                weakref.finalize(self, _close, self._residency, stop)
        try:
            return next(self._batches)
        except StopIteration:
            self.end("")
            raise
        finally:
            if self._residency is not None:
                self._residency.passed()

    def end(self, reason: str) -> None:
        self._ended = reason
        if self._residency is not None:
            _close(self._residency, getattr(self._batches, "stop", None))
            self._residency = None


def _close(residency: Residency, stop: Callable[[], Any] | None) -> None:
    """Let go of what is in memory once nobody reads it any more, which would map it again."""
    if stop is not None:
        stop()
    residency.close()


def _parts_of(view: LoaderView | None) -> Sequence[PreparedDataset]:
    return [] if view is None else view.parts


def _disk_stores(dataset: PreparedDataset) -> list[DiskStore]:
    """The files that its samples are served from."""
    kept = stored_of(dataset).kept
    return [store for store in kept.stores if isinstance(store, DiskStore)] if kept else []


def _locator(
    view: LoaderView | None,
) -> Callable[[np.ndarray], Iterable[tuple[DiskStore, np.ndarray]]]:
    """What says of samples of a loader in which files they lie, and where in these."""
    parts = _parts_of(view)
    subset = None if view is None else view.subset
    ends = np.cumsum(list(map(index_count, parts)))

    def located(samples: np.ndarray) -> Iterator[tuple[DiskStore, np.ndarray]]:
        # -1 is the last one.
        index = samples if subset is None else np.sort(subset[samples] % ends[-1])
        for part, end in zip(parts, ends.tolist(), strict=True):
            first = end - index_count(part)
            mine = index[(first <= index) & (index < end)] - first
            for store in _disk_stores(part) if len(mine) else ():
                yield store, mine

    return located


def _open_path(path: str, **remote: Any) -> CachedDataset:
    try:
        return CachedDataset.from_cache(path, as_tensors=True, **remote)
    except FileNotFoundError as missing:
        raise TypeError(
            f"{path!r} is neither a dataset nor a cache; open it first, as in ImageFolder({path!r}, storage='none')"
        ) from missing


def _lone_share(order: EpochOrder, view: LoaderView | None) -> float:
    """How many of the samples have no neighbour in their chunk, from 0 to 1."""
    subset = None if view is None else view.subset
    if order.world_size > 1 and not order.shuffle:
        return 1.0  # each rank has every so manieth
    if subset is None or len(subset) <= 1:
        return 0.0
    steps = np.diff(subset)
    return float((steps != 1).mean()) if (steps > 0).all() else 1.0
