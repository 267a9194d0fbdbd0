"""How many samples are in memory at once: a pure function of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fastdata.errors import MemoryBudgetError
from fastdata.memory import format_bytes

__all__ = ["CHUNKS_HELD", "ChunkPlan", "Needs", "empties_cache", "plan_chunks", "plan_makers"]

CHUNKS_HELD = 2
"""One is served while the next one loads."""
WORKER_BYTES = 48 << 20
"""Allowed for a process that decodes: 8 to 13 MiB were its own on ImageNet photographs, and 12 megapixels take 36."""
RESERVE_BYTES = 64 << 20
RESERVE_SHARE = 0.05
"""Left for what nobody can foresee, such as the training loop's own growth."""
_BATCHES_SHARE = 0.25
"""Of what is free for chunks and batches: more batches ahead bring less than larger chunks do."""
_ENOUGH_BATCHES = 4
"""In a chunk; with fewer, workers are given up for memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a chunked loader needs memory for.

    Args:
        in_use_bytes: of the process tree before anything is loaded.
        sample_bytes: of a sample in a chunk; for samples of many shapes, the mean of those looked at and some more.
        batch_bytes: of one served batch.
        batches_held: that exist at once.
        epoch_bytes: of the epoch's order, and of chunks besides their samples.
        batch_size: samples in a batch.
        samples: of an epoch.
        workers: processes that prepare samples, at most; 1 is none beside this one.
        most_bytes: of a chunk; more than this would bring nothing.
    """

    in_use_bytes: int
    sample_bytes: float
    batch_bytes: int
    batches_held: int
    epoch_bytes: int
    batch_size: int
    samples: int
    workers: int
    most_bytes: int

    def fixed_bytes(self, workers: int) -> int:
        """Everything but the chunks."""
        processes = WORKER_BYTES * (workers if workers > 1 else 0)
        return self.in_use_bytes + self.batch_bytes * self.batches_held + self.epoch_bytes + processes


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """What is in memory at once; ``print(loader.plan)`` shows it.

    Args:
        limit_bytes: ``memory_limit``, for all memory of this process and its children, Python and torch included.
        in_use_bytes: of these when the loader was made.
        reserve_bytes: left alone.
        batches_bytes: of the batches that exist at once, and of the epoch's order and the like.
        workers: processes that prepare samples; 1 is a thread of this process.
        chunk_samples: in one chunk, whole batches.
        chunk_bytes: of one chunk; two are in memory.
    """

    limit_bytes: int
    in_use_bytes: int
    reserve_bytes: int
    batches_bytes: int
    workers: int
    chunk_samples: int
    chunk_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What the process tree is expected to take at most."""
        workers_bytes = WORKER_BYTES * (self.workers if self.workers > 1 else 0)
        return self.in_use_bytes + self.batches_bytes + workers_bytes + CHUNKS_HELD * self.chunk_bytes

    def __str__(self) -> str:
        workers = "1 thread" if self.workers == 1 else f"{self.workers} processes"
        return (
            f"{CHUNKS_HELD} chunks of {self.chunk_samples} samples, {format_bytes(self.chunk_bytes)} each, loaded by "
            f"{workers}; with {format_bytes(self.batches_bytes)} of batches and the {format_bytes(self.in_use_bytes)} "
            f"in use before, {format_bytes(self.peak_bytes)} of memory_limit={format_bytes(self.limit_bytes)}"
        )


def plan_chunks(needs: Needs, limit_bytes: int, chunk_samples: int | None = None) -> ChunkPlan:
    """Decide how large chunks are and how many workers load them.

    Args:
        needs: of the loader.
        limit_bytes: for the whole process tree.
        chunk_samples: as the user wants it, rounded down to whole batches, at least one; None for what fits.

    Raises:
        MemoryBudgetError: not even a batch a chunk fits, or not what the user wants; says need, limit and cure.
    """
    reserve = max(RESERVE_BYTES, int(limit_bytes * RESERVE_SHARE))
    batch_samples_bytes = max(needs.sample_bytes * needs.batch_size, 1)
    most = -(-needs.samples // needs.batch_size)
    wanted = None if chunk_samples is None else min(max(chunk_samples // needs.batch_size, 1), most)
    useful = min(most, max(int(needs.most_bytes // batch_samples_bytes), _ENOUGH_BATCHES))
    workers, fitting = needs.workers, 0
    for workers in range(max(needs.workers, 1), 0, -1):
        room = limit_bytes - reserve - needs.fixed_bytes(workers)
        fitting = int(room // (CHUNKS_HELD * batch_samples_bytes))
        if fitting >= (min(_ENOUGH_BATCHES, most) if wanted is None else wanted):
            break
    batches = min(fitting, useful) if wanted is None else wanted
    if fitting < max(batches, 1):
        raise _too_little(needs, limit_bytes, reserve, max(batches, 1))
    return ChunkPlan(
        limit_bytes=limit_bytes,
        in_use_bytes=needs.in_use_bytes,
        reserve_bytes=reserve,
        batches_bytes=needs.batch_bytes * needs.batches_held + needs.epoch_bytes,
        workers=workers,
        chunk_samples=batches * needs.batch_size,
        chunk_bytes=int(batches * batch_samples_bytes),
    )


def plan_makers(most: int, batch_bytes: int, free_bytes: int) -> int:
    """Decide how many threads make batches, each of them two ahead: at least one.

    Args:
        most: that could.
        batch_bytes: of one batch.
        free_bytes: for chunks and batches.

    Example:
        >>> plan_makers(64, batch_bytes=154 << 20, free_bytes=7 << 30)
        5
    """
    return max(1, min(most, int(free_bytes * _BATCHES_SHARE) // (2 * max(batch_bytes, 1))))


def empties_cache(disk_bytes: int, free_bytes: int, plan: ChunkPlan) -> bool:
    """Decide whether the system's page cache is to let go of a file's pages once they are served.

    Kept, they make the next epoch read memory instead of the disk: 30,364 against 5,695 images/s in
    ``benchmarks/chunked.py``. Where they cannot all stay, they would push out what others need and count against a
    cgroup's limit, and most of them would be gone when they are read again.

    Args:
        disk_bytes: of all files that an epoch reads.
        free_bytes: of the machine or the cgroup before the loader takes its own.
        plan: of the loader.
    """
    return disk_bytes > free_bytes - (plan.peak_bytes - plan.in_use_bytes) - plan.reserve_bytes


def _too_little(needs: Needs, limit_bytes: int, reserve: int, batches: int) -> MemoryBudgetError:
    chunk_bytes = int(batches * needs.batch_size * needs.sample_bytes)
    need = needs.fixed_bytes(1) + reserve + CHUNKS_HELD * chunk_bytes
    held = needs.batches_held * needs.batch_bytes + needs.epoch_bytes
    return MemoryBudgetError(
        f"memory_limit={format_bytes(limit_bytes)} is for the whole process tree, and at least {format_bytes(need)} is "
        f"needed: {format_bytes(needs.in_use_bytes)} is in use already, {CHUNKS_HELD} chunks of "
        f"{batches * needs.batch_size} samples take {format_bytes(CHUNKS_HELD * chunk_bytes)}, batches "
        f"{format_bytes(held)}, and {format_bytes(reserve)} stays in reserve. Raise memory_limit, or use a smaller "
        "batch_size, chunk_samples or resize=."
    )
