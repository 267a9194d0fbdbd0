"""The loader for data larger than memory: an order of chunks, and which of them are in memory, over a DataLoader."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from fastdata import memory
from fastdata.batch import EpochVisits, Multiples, collate
from fastdata.chunked.plan import (
    CHUNKS_HELD,
    ChunkPlan,
    EpochOrder,
    ShuffleQuality,
    empties_cache,
    plan_chunks,
    plan_earlier,
    plan_epoch,
    plan_threads,
    shuffle_quality,
)
from fastdata.chunked.residency import Chunk, Residency, Samples
from fastdata.dataset import CachedDataset, PreparedDataset
from fastdata.errors import MemoryBudgetError
from fastdata.loader import DataLoader
from fastdata.loader.epochs import HELD_BY_USER
from fastdata.loader.resume import LoaderEpochs, Progress, check_state
from fastdata.loader.view import EpochItems, JoinedDatasets, LoaderView, Served
from fastdata.memory import parse_bytes
from fastdata.ranks import find_rank, local_ranks
from fastdata.reader import positions
from fastdata.report import EpochReport, log
from fastdata.ring import BatchRing

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ChunkedLoader", "ShuffleQuality"]

_PIECES_PER_CHUNK = 32
_MOST_BYTES = 256 << 20
"""Of a chunk that is only read ahead: whatever its size, the order is the same, so that more would bring nothing."""
_MOST_MIXED_BYTES = 4 << 30
"""Of a chunk that is mixed: the larger, the better the order, but the later the first batch."""
_MOST_FETCHED_BYTES = 512 << 20
"""Of a mixed chunk that comes over a network, at 100 MB/s in five seconds."""
_LEAST_FETCHED = 8
"""Chunks of an epoch, so that the next one comes while one is decoded."""
_PIECE_BYTES = 4 << 20
"""Of what lies side by side in a chunk that comes over a network: many small requests would take long."""
_MOST_KEPT_BYTES = 1 << 20  # of one whose samples are in memory anyway
_ORDER_BYTES = 24  # for each sample of the dataset while an epoch is planned: its key, its place, and sorting
_ENTRY_BYTES = 256  # for each sample of a chunk, besides its own: in what batch it comes, and that it is there
_NEIGHBOURS = 256
"""Fewer than a chunk or a piece of one has, mostly: their mean is hardly above that of the heaviest so many."""
_STATE = ("epoch", "base_seed", "num_yielded", "is_begun")


class ChunkedLoader:
    """Trains on data larger than memory: chunk k + 1 loads in the background while chunk k is served, then is dropped.

    Every sample comes exactly once an epoch, with the pixels that ``DataLoader`` over the same dataset held in memory
    would serve in the epoch that is set to the same number. It is no subclass of torch's loader, which Accelerate and
    Lightning would make anew over the dataset alone, but has ``__iter__`` and ``__len__``, ``dataset``, ``batch_size``
    and ``drop_last``.

    Args:
        dataset: a fastdata dataset, ``Subset`` of one, or any map-style dataset of (sample, target). With
            ``storage="none"`` samples are prepared anew each epoch, by worker processes; else they are read from where
            they are kept. A path is opened as ``CachedDataset.from_cache(path, as_tensors=True)``: images come as
            tensors (C, H, W) of the pixels that the cache holds, uint8 of photographs, without any transform.
        batch_size: samples in a batch.
        memory_limit: for all memory of this process and its children, Python and torch included (the sum of their
            proportional set sizes): bytes, ``"1GiB"``, or a fraction of what is free. What is in use now, batches and
            workers are taken off, chunks get the rest, so make the loader after the model. See ``plan``. Each rank has
            a limit of its own.
        shuffle: whether to shuffle; else samples come in the order of the dataset.
        drop_last: whether to drop the last batch if it is not full. Over several ranks, samples that cannot be shared
            out evenly are dropped too; else the first ones are repeated, as torch's ``DistributedSampler`` does.
        chunk_samples: samples in a chunk, rounded down to whole batches; by default what fits.
        mix_chunks: of how many pieces of neighbouring samples a chunk is made, from all over the dataset; within the
            chunk they are mixed. Reading is sequential then, and the shuffle not quite global: see
            ``shuffle_quality``. By default 32 where samples lie on disk and are best read in sequence, elsewhere the
            shuffle is global.
        num_workers: processes that prepare samples, at most; by default the usable cores. Fewer where memory is short.
        collate_fn: as torch's; the default is ``fastdata.collate``.
        seed: of the order, which all ranks must share. Random draws of transforms follow the dataset's own seed; where
            that is None, a base seed that is drawn for each epoch from torch's generator, as by torch's loader.
        rank: which share of each epoch to serve; by default that of ``torch.distributed``, or of the environment that
            torchrun sets.
        world_size: number of shares.
        storage_options, local_cache, local_limit: of a cache at a URL, of which the machine keeps what it needs; see
            ``fastdata.dataset.DatasetOptions``. Two chunks of every rank of the machine must have room.

    Raises:
        MemoryBudgetError: ``memory_limit`` leaves no room for two chunks of one batch.
        SampleError: none of the samples looked at can be read.

    A damaged sample raises ``SampleError`` where its batch would come, and the next batch can be asked for. Under the
    dataset's ``on_error="skip"`` it is left out, and its batch is smaller. One iterator is open at a time: the next
    one ends it.

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
        counts = (batch_size, chunk_samples, mix_chunks, num_workers)
        for name, count in zip(("batch_size", "chunk_samples", "mix_chunks", "num_workers"), counts, strict=True):
            if count is not None and count < 1:
                raise ValueError(f"{name}={count} must be at least 1")
        self.batch_size, self.drop_last, self.shuffle = batch_size, drop_last, shuffle
        self.collate_fn = collate if collate_fn is None else collate_fn
        rank, world_size = find_rank(rank, world_size)
        self._epochs, self._is_closed = LoaderEpochs(), False
        self._samples: Samples | None = None
        self._residency: Residency | None = None
        with contextlib.ExitStack() as cleanup:
            if isinstance(dataset, (str, bytes, os.PathLike)):
                mirrored = {"local_cache": local_cache, "local_limit": local_limit}
                opened = _open_path(os.fsdecode(dataset), storage_options=storage_options, **mirrored)
                dataset = cleanup.enter_context(opened)
            self.dataset, (self._behind, self._subset, self._items) = dataset, _find_served(dataset, cleanup)
            self._served: Served = self._behind if self._items is None else self._items.dataset
            self._order = EpochOrder(
                length=len(dataset), shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
            )
            cores, threads = num_workers or memory.usable_cores(), 1
            if self._order.rank_samples:
                threads = self._plan(memory_limit, chunk_samples, mix_chunks, cores)
            numbers: Any = range(self._order.rank_samples)
            self._loader = DataLoader(  # of the numbers of an epoch's samples; the residency reads what they stand for
                numbers,
                batch_size,
                num_workers=threads,
                drop_last=drop_last,
                generator=None if self._served.options.seed is None else torch.Generator(),
                workers="thread",
            )
            self._owned = cleanup.pop_all()

    def _plan(self, memory_limit: int | float | str, chunk_samples: int | None, mix: int | None, cores: int) -> int:
        """Plan chunks and batches, and return how many threads make batches."""
        dataset, order = self._behind, self._order
        self._served.refresh()
        self._read_after = dataset.read_after()
        self._read_steps = dataset.plan.prepare_text
        self._samples = samples = Samples(dataset)
        view, pages = samples.view(Chunk()), 0 if samples.is_copied else 2 * mmap.PAGESIZE * len(samples.on_disk)
        self._is_mixed = order.shuffle and (mix is not None or bool(samples.on_disk))
        most_bytes, most_pieces = _MOST_MIXED_BYTES if self._is_mixed else _MOST_BYTES, _PIECES_PER_CHUNK
        if samples.mirrored:
            share = order.rank_samples / max(order.length, 1) / _LEAST_FETCHED
            most_bytes = min(_MOST_FETCHED_BYTES, int(share * sum(store.size_bytes for store in samples.mirrored)))
            most_pieces = min(most_pieces, max(most_bytes // _PIECE_BYTES, 1))
        pieces = (mix or most_pieces) if self._is_mixed else 1
        in_use_bytes, free_bytes = memory.tree_pss_bytes(), memory.available_bytes().bytes
        limit_bytes = parse_bytes(memory_limit, of=free_bytes // local_ranks() + in_use_bytes)
        served_bytes = view.served_bytes or 2 * 4 * math.ceil(samples.slot_bytes)  # floats one by one, then collated
        most_threads = 1 if view.batch_obstacle else max(1, cores // 4 if samples.is_copied else cores)
        batch_bytes = served_bytes * self.batch_size
        threads = plan_threads(most_threads, batch_bytes, limit_bytes - in_use_bytes)
        besides_bytes = samples.fetch_bytes + _ORDER_BYTES * order.length + CHUNKS_HELD * pieces * pages
        mapped_bytes = sum(store.heaviest_bytes(_NEIGHBOURS) for store in samples.on_disk)
        mapped_bytes += _lone_share(order, self._subset) * pages
        room_bytes = samples.room_bytes // local_ranks() // (CHUNKS_HELD + 1)  # one is what others' blocks waste
        planned = partial(
            plan_chunks,
            limit_bytes,
            in_use_bytes=in_use_bytes,
            sample_bytes=_ENTRY_BYTES + (samples.slot_bytes if samples.is_copied else mapped_bytes),
            batch_size=self.batch_size,
            samples=order.rank_samples,
            most_workers=cores if samples.is_copied else 1,
            most_bytes=min(most_bytes, room_bytes) if samples.is_copied or samples.on_disk else _MOST_KEPT_BYTES,
            chunk_samples=chunk_samples,
        )
        try:
            plan = planned(batches_bytes=besides_bytes + batch_bytes * (2 * threads + 1 + HELD_BY_USER))
        except MemoryBudgetError:
            if threads == 1:
                raise
            threads = 1
            plan = planned(batches_bytes=besides_bytes + batch_bytes * (2 + 1 + HELD_BY_USER))
        self.plan = plan
        log.info("%s", plan)
        samples.empties_cache = empties_cache(sum(store.size_bytes for store in samples.on_disk), free_bytes, plan)
        samples.chunk_batches = plan.chunk_samples // self.batch_size
        if self._is_mixed:
            piece_samples = max(plan.chunk_samples // pieces, 1)
            self._order = replace(order, piece_samples=piece_samples, chunk_samples=plan.chunk_samples)
        return threads

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Any:
        return self.iterate()

    def iterate(self, ring: BatchRing | None = None, held: int = HELD_BY_USER, read: None = None) -> Any:
        """Begin an epoch, as ``iter`` does; for a prefetcher as that of a DataLoader."""
        if self._is_closed:
            raise RuntimeError("the loader was closed; make it again to go on")
        if self._samples is None or self.plan is None:
            return self._loader.iterate(ring, held)
        if self._residency is not None:
            self._residency.close("another one of the same loader was begun")
        behind = self._behind
        self._served.refresh()
        if behind.read_after() != self._read_after:
            raise ValueError(
                "the dataset's loader, or what its transform begins with, was changed after this ChunkedLoader was "
                f"made: it brings samples after {self._read_steps or 'no step'}, and the transform now begins with "
                f"{behind.plan.prepare_text or 'none'}. Make the ChunkedLoader again."
            )
        self._samples.dataset = behind.frozen()
        self._samples.open(self.plan.chunk_samples)
        self._residency = residency = Residency(
            self._samples, self.collate_fn, self.batch_size, self.plan.workers, in_sequence=self._is_mixed
        )
        try:
            iterator = self._loader.iterate(ring, held, residency.read)
            iterator.lease = self._samples.dataset.lease()
            weakref.finalize(iterator, residency.close, "it was dropped")
            self._begin_epoch(residency, iterator.progress)
        except BaseException:
            residency.close("it could not begin")
            raise
        return iterator

    def _begin_epoch(self, residency: Residency, progress: Progress) -> None:
        dataset, subset = self._served, self._subset
        if progress.resumed_from is None:
            self._epochs.begin(self._epochs.coming(), dataset)
        else:
            self._epochs.resume(progress.resumed_from, dataset)
        epoch = self._epochs.current or 0
        stream = plan_epoch(self._order, epoch)
        places = subset if self._items is None else self._items.positions
        multiples = None if places is None else Multiples.find(places, dataset.index_count)
        counted = EpochVisits(self._order.length, epoch, multiples)
        if self._order.rank:
            counted.take(plan_earlier(self._order, epoch))  # what lower ranks draw is not drawn again
        visits = counted.take(stream)
        seed = dataset.seed_of(progress.base_seed or 0)
        if self._items is not None:
            self._items.begin(stream, visits, seed)
        residency.begin(stream if subset is None else subset[stream], visits, progress.first, epoch, seed)

    def set_epoch(self, epoch: int) -> None:
        """Make the order and the random draws of the coming epochs those of ``epoch``, until it is set again."""
        self._epochs.set(epoch)

    def shuffle_quality(self, epoch: int = 0) -> ShuffleQuality:
        """How far the order of an epoch is from a global shuffle, of this rank; reads no data."""
        return shuffle_quality(self._order, epoch, self.batch_size)

    def report(self) -> EpochReport:
        """How the latest epoch went, complete or not; ``.path`` says how batches are read, and why."""
        report, samples, plan = self._loader.report(), self._samples, self.plan
        if samples is None or plan is None:
            return report
        chunk_samples, does = samples.chunk_batches * self.batch_size, "prepared" if samples.is_copied else "mapped"
        workers = "a thread" if plan.workers == 1 else f"{plan.workers} processes"
        cache = ", the system's page cache emptied behind them" if samples.empties_cache else ""
        obstacle = samples.view(Chunk()).batch_obstacle
        each = "whole batches" if obstacle is None else f"samples one by one ({obstacle})"
        threads = "a thread" if report.workers == 1 else f"{report.workers} threads"
        chunks = f"chunks of {chunk_samples} samples, {does} ahead by {workers}{cache}"
        return replace(report, path=f"{chunks}; {each}, made by {threads}")

    def ring_slots(self, held: int) -> int:
        return self._loader.ring_slots(held)

    def read_ahead(self) -> Progress:
        return self._loader.read_ahead()

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest epoch stands, as a small dict of plain values.

        Batches count once they are handed over. After the last one the state is the beginning of the next epoch.
        """
        state = self._loader.state_dict()
        if state["epoch"] is None:
            state["epoch"] = self._epochs.current if state["is_begun"] else self._epochs.coming()
        return {name: state[name] for name in _STATE} | {"version": state["version"], "loader": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next epoch be the one of ``state``, without the batches handed over before; only the rest is read.

        Raises:
            ValueError: the state is of a loader over another dataset, or with other batches or another order.
        """
        if state:
            check_state(state, self._identity())
            state = self._loader.state_dict() | {name: state[name] for name in _STATE}
        self._loader.load_state_dict(state)

    def _identity(self) -> dict[str, Any]:
        order = asdict(self._order)
        del order["rank"]  # all ranks stand at the same batch: one's state does for all
        if order["piece_samples"] == 1:
            order["chunk_samples"] = None  # says nothing about the order
        return {"batch_size": self.batch_size, **order}

    def close(self) -> None:
        """End what runs and give the memory back; batches handed over stay valid. Idempotent."""
        self._is_closed = True
        if self._residency is not None:
            self._residency.close("the loader was closed")
        if self._samples is not None:
            self._samples.close()
        self._owned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _find_served(
    dataset: Any, owned: contextlib.ExitStack
) -> tuple[PreparedDataset, np.ndarray | None, EpochItems | None]:
    """The fastdata dataset behind what the user gives, or one made of it, which ``owned`` closes; and its samples.

    Of several datasets in a ``ConcatDataset`` one of their items is made, each as its own dataset draws it in an epoch.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"ChunkedLoader reads samples by index, which {type(dataset).__name__} has no way for. Give it a map-style "
            "dataset, such as fastdata.ImageFolder(root, storage='none')."
        )
    view = LoaderView.find(dataset)
    items = EpochItems(view) if view is not None and isinstance(view.dataset, JoinedDatasets) else None
    if view is None or not isinstance(view.dataset, PreparedDataset):
        one = CachedDataset(dataset if items is None else items, storage="none", progress=False)
        return owned.enter_context(one), None, items
    served, subset = view.dataset, view.subset
    count = len(dataset) if subset is None else int(subset.max(initial=-1)) + 1
    if count > served.sample_count:
        raise ValueError(
            f"ChunkedLoader brings the sample of each index, but {type(served).__name__} has {count} indices "
            f"and {served.sample_count} samples. Use a DataLoader, or leave __len__ as it is."
        )
    return served, subset if subset is None else positions(subset, served.sample_count), None


def _open_path(path: str, **remote: Any) -> CachedDataset:
    try:
        return CachedDataset.from_cache(path, as_tensors=True, **remote)
    except FileNotFoundError as missing:
        raise TypeError(
            f"{path!r} is neither a dataset nor a cache; open it first, as in ImageFolder({path!r}, storage='none')"
        ) from missing


def _lone_share(order: EpochOrder, subset: np.ndarray | None) -> float:
    """How many of the samples have no neighbour in their chunk, from 0 to 1."""
    if order.world_size > 1 and not order.shuffle:
        return 1.0  # each rank has every so manieth
    if subset is None or len(subset) <= 1:
        return 0.0
    steps = np.diff(subset)
    return float((steps != 1).mean()) if (steps > 0).all() else 1.0
