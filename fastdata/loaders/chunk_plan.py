"""The memory plan of a ``ChunkedLoader``: the size of its chunks and the number of its workers.

All functions are pure functions of numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdata.errors import MemoryBudgetError
from fastdata.machine.units import format_bytes

CHUNKS_HELD = 2
"""Number of chunks in memory: one gives batches while the next one is read."""

PROCESS_BYTES = 48 << 20
"""Memory planned for a process that decodes. It took 8 to 13 MiB of its own with ImageNet
photographs, and a photograph of 12 megapixels takes 36 MiB."""

_RESERVE_BYTES = 64 << 20
"""Least memory that stays unused, for the growth of the training loop and all else that is not
planned."""

_RESERVE_SHARE = 0.05
"""Share of the limit that stays unused, if that is more than ``_RESERVE_BYTES``."""

_FIGURE_BYTES = 16 << 20
"""An error rounds the needed memory up to this unit, because memory in use differs in each run."""

_BATCHES_SHARE = 0.25
"""Most of the free memory that batches may take: more batches help less than larger chunks."""

ENOUGH_BATCHES = 4
"""Number of batches that a chunk should have; if they do not fit, there are fewer workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """The memory of a ``ChunkedLoader``; ``print(loader.plan)`` shows it.

    Args:
        limit_bytes: ``memory_limit``, for this process and its children.
        in_use_bytes: memory that these used when the loader was made.
        reserve_bytes: memory that stays unused.
        batches_bytes: memory for batches, worker processes, the epoch's order and the like.
        workers: number of threads or processes that make batches.
        chunk_samples: samples in one chunk, a multiple of the batch size; 0 if no samples are on
            disk.
        chunk_bytes: memory of one chunk; two chunks are in memory.
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
        """Memory in use while two chunks are in memory."""
        return self.in_use_bytes + self.batches_bytes + CHUNKS_HELD * self.chunk_bytes

    def __str__(self) -> str:
        chunks = "no chunks, because no samples are on disk"
        if self.chunk_samples:
            chunks = (
                f"{CHUNKS_HELD} chunks of {self.chunk_samples} samples, "
                f"{format_bytes(self.chunk_bytes)} each"
            )
        return (
            f"{chunks}; with {format_bytes(self.batches_bytes)} for batches and "
            f"{format_bytes(self.in_use_bytes)} that were in use before, this needs "
            f"{format_bytes(self.peak_bytes)} of memory_limit={format_bytes(self.limit_bytes)}"
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
    """Decide the number of samples in a chunk, and the number of workers that make batches.

    Args:
        limit_bytes: memory limit for this process and its children.
        in_use_bytes: memory in use before anything is loaded.
        fixed_bytes: memory that does not depend on the result: the epoch's order, the batches that
            the loop holds, and what chunks need in addition to their samples.
        batch_bytes: memory of one batch; each worker has two.
        batch_size: samples in a batch.
        samples: samples of this rank in an epoch.
        worker_bytes: memory of each worker in addition to its batches.
        most_workers: maximum number of workers.
        sample_bytes: memory of a sample in a chunk; 0 if no samples are on disk.
        most_samples: maximum number of samples in a chunk; more would not help.
        chunk_samples: the user's choice, rounded down to whole batches; None for as many as fit.

    Raises:
        MemoryBudgetError: chunks of one batch do not fit, or the user's choice does not.
    """
    reserve_bytes = max(_RESERVE_BYTES, int(limit_bytes * _RESERVE_SHARE))
    free_bytes = limit_bytes - in_use_bytes - reserve_bytes
    held_bytes = CHUNKS_HELD * sample_bytes * batch_size  # for each batch of a chunk
    most_batches = -(-samples // batch_size)
    batches: float = min(ENOUGH_BATCHES, most_batches)
    if chunk_samples is not None:
        batches = min(max(chunk_samples // batch_size, 1), most_batches)
    # First choose the workers that fit together with the smallest useful chunks; then let the
    # chunks take the memory that is left.
    each_bytes = 2 * batch_bytes + worker_bytes
    fitting = (free_bytes - fixed_bytes - batches * held_bytes) // each_bytes
    ahead = free_bytes * _BATCHES_SHARE // (2 * batch_bytes)
    workers = int(max(min(most_workers, fitting, ahead), 1))
    batches_bytes = fixed_bytes + workers * each_bytes
    if held_bytes and chunk_samples is None:
        useful = max(most_samples // batch_size, ENOUGH_BATCHES)
        batches = max(min((free_bytes - batches_bytes) // held_bytes, useful, most_batches), 1)
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
    """Return the error message for a limit that is too low, with a limit that would be enough."""
    need_bytes = max(plan.peak_bytes + _RESERVE_BYTES, plan.peak_bytes / (1 - _RESERVE_SHARE))
    need_mib = (math.ceil(need_bytes / _FIGURE_BYTES) + 1) * _FIGURE_BYTES >> 20
    chunks = ""
    if plan.chunk_samples:
        chunks = (
            f"{CHUNKS_HELD} chunks of {plan.chunk_samples} samples take "
            f"{format_bytes(CHUNKS_HELD * plan.chunk_bytes)}, "
        )
    return (
        f"memory_limit={format_bytes(plan.limit_bytes)} is too low: this process and its children "
        f"need at least {need_mib:,} MiB. {format_bytes(plan.in_use_bytes)} are in use already, "
        f"{chunks}batches take {format_bytes(plan.batches_bytes)}, and the rest is a reserve. "
        "Raise memory_limit, or use a smaller batch_size, chunk_samples or resize=."
    )


def empties_cache(disk_bytes: int, free_bytes: int, plan: ChunkPlan) -> bool:
    """Decide whether to remove samples from the system's page cache after their last batch.

    If all samples on disk fit into the page cache, they stay there, and the next epoch reads memory
    instead of the disk: 30,364 against 5,695 images/s in ``benchmarks/chunked.py``. If they do not
    fit, most of them would be gone before they are read again, and would push out other files.
    """
    return disk_bytes > free_bytes - (plan.peak_bytes - plan.in_use_bytes) - plan.reserve_bytes
