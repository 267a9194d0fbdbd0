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


def plan_chunks(
    limit_bytes: int,
    *,
    in_use_bytes: int,
    fixed_bytes: int,
    batch_bytes: int,
    batch_size: int,
    samples: int,
    worker_bytes: int,
    most_workers: int,
    sample_bytes: float = 0,
    most_bytes: int = 0,
    chunk_samples: int | None = None,
) -> ChunkPlan:
    """Decide how large chunks are and how many workers make batches.

    Args:
        limit_bytes: for the whole process tree.
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
        chunk_samples: as the user wants it, rounded down to whole batches; None for what fits.

    Raises:
        MemoryBudgetError: not even a batch a chunk fits, or not what the user wants.
    """
    reserve_bytes = max(_RESERVE_BYTES, int(limit_bytes * _RESERVE_SHARE))
    free_bytes = limit_bytes - in_use_bytes - reserve_bytes
    held_bytes = CHUNKS_HELD * sample_bytes * batch_size  # of chunks, for each of their batches
    most = -(-samples // batch_size)
    wanted = min(_ENOUGH_BATCHES, most)
    if chunk_samples is not None:
        wanted = min(max(chunk_samples // batch_size, 1), most)
    each_bytes = 2 * batch_bytes + worker_bytes
    fitting = (free_bytes - fixed_bytes - wanted * held_bytes) // each_bytes
    ahead = free_bytes * _BATCHES_SHARE // (2 * batch_bytes)
    workers = int(max(min(most_workers, fitting, ahead), 1))
    batches_bytes = fixed_bytes + workers * each_bytes
    batches = wanted
    if not sample_bytes:
        batches = 0
    elif chunk_samples is None:
        useful = max(int(CHUNKS_HELD * most_bytes // held_bytes), _ENOUGH_BATCHES)
        batches = max(min(int((free_bytes - batches_bytes) // held_bytes), useful, most), 1)
    plan = ChunkPlan(
        limit_bytes=limit_bytes,
        in_use_bytes=in_use_bytes,
        reserve_bytes=reserve_bytes,
        batches_bytes=batches_bytes,
        workers=workers,
        chunk_samples=batches * batch_size,
        chunk_bytes=int(batches * batch_size * sample_bytes),
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


def shuffle_quality(order: EpochOrder, rank: int, epoch: int, batch_size: int) -> float:
    """How far from a global shuffle one rank's order of an epoch is: 1 is as good, 0 is no shuffle.

    ``(D_source - D) / (D_source - D_global)``, cut to [0, 1], where D is the mean over the batches
    of the Kolmogorov-Smirnov distance between the source positions in the batch and the uniform
    distribution over the dataset. It matters for data sorted by class or by time: the distance
    bounds how far the share of any stretch of the data in a batch is from its share in the whole.

    Example:
        >>> shuffle_quality(EpochOrder(length=1000), 0, 0, batch_size=10)
        1.0
        >>> shuffle_quality(EpochOrder(length=1000, shuffle=False), 0, 0, batch_size=10)
        0.0
    """
    length = order.length
    plain = EpochOrder(length=length, seed=order.seed)
    own = plan_epoch(order, epoch)[rank :: order.world_size]
    best = _distance(np.resize(plan_epoch(plain, 0), len(own)), length, batch_size)
    worst = _distance(np.resize(np.arange(length), len(own)), length, batch_size)
    if order.shuffle and (worst <= best or order.piece_samples == 1):
        return 1.0
    value = (worst - _distance(own, length, batch_size)) / max(worst - best, 1e-12)
    return min(max(value, 0.0), 1.0)


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
