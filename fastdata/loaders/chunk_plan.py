"""How many samples are in memory at once, and the order of an epoch: pure functions of numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.errors import MemoryBudgetError
from fastdata.machine.memory import format_bytes
from fastdata.pixels.draws import sample_keys

Int64s = npt.NDArray[np.int64]

CHUNKS_HELD = 2
"""One is served while the next one is read."""
PROCESS_BYTES = 48 << 20
"""Allowed for a process that decodes: 8 to 13 MiB were its own on ImageNet photographs, and 12
megapixels take 36."""
_RESERVE_BYTES = 64 << 20
_RESERVE_SHARE = 0.05
"""Left for what nobody can foresee, such as the training loop's own growth."""
_FIGURE_BYTES = 16 << 20
"""What an error asks for is rounded up to them: what is in use differs from run to run."""
_BATCHES_SHARE = 0.25
"""Of what is free: more batches ahead bring less than larger chunks do."""
_ENOUGH_BATCHES = 4
"""In a chunk; with fewer, workers are given up for memory."""
_ORDER_SALT = 0x6F72646572  # keeps the order apart from what transforms draw with the same seed


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """What is in memory at once; ``print(loader.plan)`` shows it.

    Args:
        limit_bytes: ``memory_limit``, for this process and its children.
        in_use_bytes: of these when the loader was made.
        reserve_bytes: left alone.
        batches_bytes: of batches, worker processes, the epoch's order and the like.
        workers: that make batches.
        chunk_samples: in one chunk, whole batches; 0 where no samples lie on disk.
        chunk_bytes: of one chunk; two are in memory.
    """

    limit_bytes: int
    in_use_bytes: int
    reserve_bytes: int
    batches_bytes: int
    workers: int
    chunk_samples: int = 0
    chunk_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.in_use_bytes + self.batches_bytes + CHUNKS_HELD * self.chunk_bytes

    def __str__(self) -> str:
        chunks = "no chunks, because no samples lie on disk"
        if self.chunk_samples:
            size = format_bytes(self.chunk_bytes)
            chunks = f"{CHUNKS_HELD} chunks of {self.chunk_samples} samples, {size} each"
        return (
            f"{chunks}; with {format_bytes(self.batches_bytes)} of batches and the "
            f"{format_bytes(self.in_use_bytes)} in use before, {format_bytes(self.peak_bytes)} "
            f"of memory_limit={format_bytes(self.limit_bytes)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What batches and chunks take.

    Args:
        in_use_bytes: before anything is loaded.
        fixed_bytes: of the epoch's order, the batches that the loop holds, and chunks besides
            their samples.
        batch_bytes: of one batch; each worker has two ahead.
        batch_size: samples in a batch.
        samples: of an epoch.
        worker_bytes: of each worker besides its batches.
        most_workers: that may be.
        sample_bytes: of a sample in a chunk; 0 where none lie on disk.
        most_bytes: of a chunk; more than this would bring nothing.
    """

    in_use_bytes: int
    fixed_bytes: int
    batch_bytes: int
    batch_size: int
    samples: int
    worker_bytes: int
    most_workers: int
    sample_bytes: float = 0
    most_bytes: int = 0

    def batches_bytes(self, workers: int) -> int:
        return self.fixed_bytes + workers * (2 * self.batch_bytes + self.worker_bytes)


def plan_chunks(limit_bytes: int, needs: Needs, chunk_samples: int | None = None) -> ChunkPlan:
    """Decide how large chunks are and how many workers make batches.

    Args:
        limit_bytes: for the whole process tree.
        needs: of the data.
        chunk_samples: as the user wants it, rounded down to whole batches; None for what fits.

    Raises:
        MemoryBudgetError: not even a batch a chunk fits, or not what the user wants.
    """
    reserve_bytes = max(_RESERVE_BYTES, int(limit_bytes * _RESERVE_SHARE))
    free_bytes = limit_bytes - needs.in_use_bytes - reserve_bytes
    batch_bytes = needs.sample_bytes * needs.batch_size  # in a chunk
    most = -(-needs.samples // needs.batch_size)
    wanted = min(_ENOUGH_BATCHES, most)
    if chunk_samples is not None:
        wanted = min(max(chunk_samples // needs.batch_size, 1), most)
    workers = needs.most_workers
    while workers > 1:
        left_bytes = free_bytes - needs.batches_bytes(workers)
        is_enough = left_bytes >= CHUNKS_HELD * wanted * batch_bytes
        if is_enough and 2 * workers * needs.batch_bytes <= free_bytes * _BATCHES_SHARE:
            break
        workers -= 1
    batches = 0
    if batch_bytes:
        batches = wanted
        if chunk_samples is None:
            left_bytes = free_bytes - needs.batches_bytes(workers)
            useful = max(int(needs.most_bytes // batch_bytes), _ENOUGH_BATCHES)
            batches = max(min(int(left_bytes // (CHUNKS_HELD * batch_bytes)), useful, most), 1)
    plan = ChunkPlan(
        limit_bytes=limit_bytes,
        in_use_bytes=needs.in_use_bytes,
        reserve_bytes=reserve_bytes,
        batches_bytes=needs.batches_bytes(workers),
        workers=workers,
        chunk_samples=batches * needs.batch_size,
        chunk_bytes=int(batches * batch_bytes),
    )
    if plan.peak_bytes + reserve_bytes > limit_bytes:
        raise MemoryBudgetError(_too_little(plan))
    return plan


def _too_little(plan: ChunkPlan) -> str:
    need_bytes = max(plan.peak_bytes + _RESERVE_BYTES, plan.peak_bytes / (1 - _RESERVE_SHARE))
    need_mib = (math.ceil(need_bytes / _FIGURE_BYTES) + 1) * _FIGURE_BYTES >> 20
    chunks = ""
    if plan.chunk_samples:
        size = format_bytes(CHUNKS_HELD * plan.chunk_bytes)
        chunks = f"{CHUNKS_HELD} chunks of {plan.chunk_samples} samples take {size}, "
    return (
        f"memory_limit={format_bytes(plan.limit_bytes)} is for the whole process tree, and at "
        f"least {need_mib:,} MiB is needed: {format_bytes(plan.in_use_bytes)} is in use already, "
        f"{chunks}batches {format_bytes(plan.batches_bytes)}, and the rest stays in reserve. Raise "
        "memory_limit, or use a smaller batch_size, chunk_samples or resize=."
    )


def empties_cache(disk_bytes: int, free_bytes: int, plan: ChunkPlan) -> bool:
    """Decide whether the system's page cache is to let go of files' pages once they are served.

    Kept, they make the next epoch read memory instead of the disk: 30,364 against 5,695 images/s
    in ``benchmarks/chunked.py``. Where not all can stay beside the loader, most would be gone when
    they are read again.
    """
    return disk_bytes > free_bytes - (plan.peak_bytes - plan.in_use_bytes) - plan.reserve_bytes


# The order


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """What the order of every epoch follows from.

    Args:
        length: number of samples.
        shuffle: whether they are shuffled at all.
        seed: of the order.
        piece_samples: neighbours that stay together until they are mixed within their chunk; 1
            shuffles globally.
        chunk_samples: over how many samples pieces are mixed.
        drop_last: whether ranks drop what cannot be shared out evenly; else the first samples are
            repeated.
        world_size: number of ranks.
    """

    length: int
    shuffle: bool = True
    seed: int = 0
    piece_samples: int = 1
    chunk_samples: int = 1
    drop_last: bool = False
    world_size: int = 1

    @property
    def rank_samples(self) -> int:
        spare = 0 if self.drop_last else self.world_size - 1
        return (self.length + spare) // self.world_size

    @property
    def identity(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.piece_samples == 1:
            fields["chunk_samples"] = None  # says nothing about the order
        return fields


def plan_epoch(order: EpochOrder, epoch: int) -> Int64s:
    """Positions in the dataset in the order of all ranks; rank r of W has places r, r + W, ...

    Each position comes once, but for those dropped or repeated to give all ranks equally many.
    Shuffled, the samples are cut into pieces of neighbours, the pieces are put in random order,
    each rank takes a stretch of them, and within each chunk of the stretch samples are mixed. With
    pieces of one sample that is a random permutation of all.

    Example:
        >>> plan_epoch(EpochOrder(length=5, shuffle=False, world_size=2), 0)[1::2]
        array([1, 3, 0])
        >>> sorted(plan_epoch(EpochOrder(length=5, piece_samples=2, chunk_samples=4), 0).tolist())
        [0, 1, 2, 3, 4]
    """
    count = order.rank_samples
    size = order.piece_samples
    if not order.shuffle:
        return np.resize(np.arange(order.length), count * order.world_size)
    stream = _shuffled(order, epoch, np.arange(-(-order.length // size)), 0)
    if size > 1:
        stream = (stream[:, None] * size + np.arange(size)).reshape(-1)
        stream = stream[stream < order.length]  # the last piece may be shorter
    by_rank = np.resize(stream, (order.world_size, count))
    for start in range(0, count if size > 1 else 0, order.chunk_samples):
        for row in by_rank:
            chunk = row[start : start + order.chunk_samples]
            # Keys of samples are those behind all pieces' keys.
            chunk[:] = _shuffled(order, epoch, chunk, order.length)
    in_turn: Int64s = by_rank.T.reshape(-1)
    return in_turn


def _shuffled(order: EpochOrder, epoch: int, things: Int64s, first_key: int) -> Int64s:
    """``things`` in the order of their keys."""
    keys = sample_keys(order.seed ^ _ORDER_SALT, epoch, things + first_key)
    shuffled: Int64s = things[np.argsort(keys, kind="stable")]
    return shuffled


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleQuality:
    """How far from a global shuffle an order is: 1 is as good as one, 0 is the source's own order.

    ``value = (D_source - D) / (D_source - D_global)``, cut to [0, 1], where D is the mean over the
    batches of an epoch of the Kolmogorov-Smirnov distance between the source positions in the batch
    and the uniform distribution over the dataset. It matters for data sorted by class or by time:
    the distance bounds how far the share of any stretch of the data in a batch is from its share in
    the whole.

    Args:
        value: in [0, 1].
        batch_distance: D of the order.
        global_distance: D of a global shuffle; not 0, because a batch is a sample.
        source_distance: D of the source's order.
    """

    value: float
    batch_distance: float
    global_distance: float
    source_distance: float

    def __str__(self) -> str:
        return (
            f"shuffle quality {self.value:.3f} (1 = global shuffle, 0 = source order): batches are "
            f"{self.batch_distance:.3f} from an even draw of the data (Kolmogorov-Smirnov); of a "
            f"global shuffle {self.global_distance:.3f}, in source order {self.source_distance:.3f}"
        )


def shuffle_quality(order: EpochOrder, rank: int, epoch: int, batch_size: int) -> ShuffleQuality:
    """Measure one rank's order of one epoch; reads no data.

    Example:
        >>> shuffle_quality(EpochOrder(length=1000), 0, 0, batch_size=10).value
        1.0
        >>> shuffle_quality(EpochOrder(length=1000, shuffle=False), 0, 0, batch_size=10).value
        0.0
    """
    length = order.length
    count = order.rank_samples
    plain = EpochOrder(length=length, seed=order.seed)
    own = plan_epoch(order, epoch)[rank :: order.world_size]
    ours = _distance(own, length, batch_size)
    best = _distance(np.resize(plan_epoch(plain, 0), count), length, batch_size)
    worst = _distance(np.resize(np.arange(length), count), length, batch_size)
    is_global = order.shuffle and (worst <= best or order.piece_samples == 1)
    value = 1.0 if is_global else min(max((worst - ours) / max(worst - best, 1e-12), 0.0), 1.0)
    return ShuffleQuality(
        value=value, batch_distance=ours, global_distance=best, source_distance=worst
    )


def _distance(positions: Int64s, length: int, batch_size: int) -> float:
    """Mean Kolmogorov-Smirnov distance of the full batches from the uniform distribution."""
    size = max(min(batch_size, len(positions)), 1)
    full = len(positions) // size
    if not full:
        return 0.0
    reached = (np.sort(positions[: full * size].reshape(full, size), axis=1) + 0.5) / length
    above = np.arange(1, size + 1) / size - reached
    below = reached - np.arange(size) / size
    return float(np.maximum(above, below).max(axis=1).mean())
