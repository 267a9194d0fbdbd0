"""The plan of a ``ChunkedLoader``: how large chunks are, and how many workers make batches.

Pure functions of numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdata.errors import MemoryBudgetError
from fastdata.machine.units import format_bytes

# Chunks of data larger than memory

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

ENOUGH_BATCHES = 4
"""In a chunk; with fewer, workers are given up for memory."""


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
            chunks = (
                f"{CHUNKS_HELD} chunks of {self.chunk_samples} samples, "
                f"{format_bytes(self.chunk_bytes)} each"
            )
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
    most_samples: int = 0,
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
        most_samples: of a chunk; more than this would bring nothing.
        chunk_samples: as the user wants it, rounded down to whole batches; None for what fits.

    Raises:
        MemoryBudgetError: not even a batch a chunk fits, or not what the user wants.
    """
    reserve_bytes = max(_RESERVE_BYTES, int(limit_bytes * _RESERVE_SHARE))
    free_bytes = limit_bytes - in_use_bytes - reserve_bytes
    held_bytes = CHUNKS_HELD * sample_bytes * batch_size  # of chunks, for each of their batches
    most = -(-samples // batch_size)
    batches: float = min(ENOUGH_BATCHES, most)
    if chunk_samples is not None:
        batches = min(max(chunk_samples // batch_size, 1), most)
    each_bytes = 2 * batch_bytes + worker_bytes
    fitting = (free_bytes - fixed_bytes - batches * held_bytes) // each_bytes
    ahead = free_bytes * _BATCHES_SHARE // (2 * batch_bytes)
    workers = int(max(min(most_workers, fitting, ahead), 1))
    batches_bytes = fixed_bytes + workers * each_bytes
    if held_bytes and chunk_samples is None:
        useful = max(most_samples // batch_size, ENOUGH_BATCHES)
        batches = max(min((free_bytes - batches_bytes) // held_bytes, useful, most), 1)
    size = int(batches) * batch_size if held_bytes else 0
    plan = ChunkPlan(
        limit_bytes=limit_bytes,
        in_use_bytes=in_use_bytes,
        reserve_bytes=reserve_bytes,
        batches_bytes=batches_bytes,
        workers=workers,
        chunk_samples=size,
        chunk_bytes=int(size * sample_bytes),
    )
    if plan.peak_bytes + reserve_bytes > limit_bytes:
        raise MemoryBudgetError(_too_little(plan))
    return plan


def _too_little(plan: ChunkPlan) -> str:
    need_bytes = max(plan.peak_bytes + _RESERVE_BYTES, plan.peak_bytes / (1 - _RESERVE_SHARE))
    need_mib = (math.ceil(need_bytes / _FIGURE_BYTES) + 1) * _FIGURE_BYTES >> 20
    chunks = ""
    if plan.chunk_samples:
        chunks = (
            f"{CHUNKS_HELD} chunks of {plan.chunk_samples} samples take "
            f"{format_bytes(CHUNKS_HELD * plan.chunk_bytes)}, "
        )
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
