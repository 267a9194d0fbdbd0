"""The machine: its limits, what follows for storage and pinning, shared memory, and other processes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastdata.errors import MemoryBudgetError
from fastdata.machine.limits import Available
from fastdata.report import Line, Report


def is_running(pid: int) -> bool:
    if os.name != "posix":
        import psutil

        return psutil.pid_exists(pid)
    # Without an import: a process that is forked while another thread imports has half a module.
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


_UNITS = ("", "K", "M", "G", "T")


def parse_bytes(value: int | float | str, *, of: int) -> int:
    """Bytes as users write them: an int, a share of ``of`` as a float, or text with a unit."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I)?)?B\s*", value, re.I | re.A)
        if match is not None:
            number, unit, is_binary = match.groups(default="")
            return int(float(number) * (1024 if is_binary else 1000) ** _UNITS.index(unit.upper()))
    elif isinstance(value, float) and 0 < value <= 1:
        return int(value * of)
    elif type(value) is int and value >= 0:  # no bool
        return value
    raise ValueError(
        f"memory of {value!r} is not understood. "
        "Give bytes as an int, a share of the free memory as a float in (0, 1], or text such as "
        "'8GiB' or '500MB'."
    )


def format_bytes(count: int) -> str:
    """Write bytes for people, as ``'1.2 GiB'``."""
    size: float = count
    unit = ""
    for larger in _UNITS[1:]:
        if round(size, 1) < 1024:
            break
        size /= 1024
        unit = f"{larger}i"
    return f"{size:.1f} {unit}B" if unit else f"{count} B"


# The budget

RESERVE_SHARE = 1 / 10
RESERVE_CEILING_BYTES = 16 << 30


class Budget(NamedTuple):
    """Memory that prepared samples may take."""

    bytes: int  # what may be spent, the reserve already taken off
    reserve_bytes: int  # left alone for everything else on the machine
    limited_by: str  # "system memory", "cgroup limit" or "memory_limit="
    ranks: int = 1  # processes that share what is available; `bytes` is the part of one

    def __str__(self) -> str:
        """What there is and why not more, as the rest of a sentence."""
        if self.limited_by == "memory_limit=":  # which is below what is free less the reserve
            return f"memory_limit= allows {format_bytes(self.bytes)}"
        sharing = f" shared by {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{format_bytes(self.bytes)} is free ({self.limited_by}{sharing}, "
            f"{format_bytes(self.reserve_bytes)} kept in reserve)"
        )


def budget_bytes(
    available: Available, memory_limit: int | float | str | None = None, *, ranks: int = 1
) -> Budget:
    """What samples may take; the user's ``memory_limit`` can only lower it."""
    # Left to batches, workers and the page cache.
    reserve = min(int(available.bytes * RESERVE_SHARE), RESERVE_CEILING_BYTES)
    free = max(0, available.bytes - reserve) // ranks
    if memory_limit is not None:
        limit = parse_bytes(memory_limit, of=available.bytes)
        if limit < free:
            return Budget(limit, reserve, "memory_limit=")
    return Budget(free, reserve, available.limited_by, ranks)


# The storage

Storage = Literal["device", "shared", "compressed", "disk", "none"]


class CodecTrial(NamedTuple):
    """What a codec made of a sample of the user's data."""

    codec: str  # its name, or one name for each part of a sample, joined by "+"
    part_bytes: tuple[int, ...] = ()  # of each part of all samples, encoded; an estimate
    ratio: float = 0.0  # raw bytes over encoded bytes
    decode_per_s: float = 0.0  # samples that one core decodes in a second
    lossless: bool = True
    obstacle: str | None = None  # why the codec cannot be used here; the figures are 0 then
    coders: tuple[Any, ...] = ()  # of each part

    @property
    def need_bytes(self) -> int:
        return sum(self.part_bytes)


class StoragePlan(NamedTuple):
    """Where prepared samples are kept, by which codec if any, and one line that says why."""

    storage: Storage
    reason: str
    codec: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StorageReport(Report):
    """What each codec makes of the user's data; shown as a table."""

    raw_bytes: int  # of all samples as they are
    budget: Budget  # what they may take
    trials: tuple[CodecTrial, ...]
    looked_at: int  # how many samples were encoded and decoded for it

    def _lines(self) -> Iterator[Line]:
        raw = CodecTrial("(raw)", (self.raw_bytes,), 1.0, math.inf)
        yield "codec", "bytes", "ratio", "decode/s per core", "lossless", "fits"
        words = ("no", "yes")
        for trial in (raw, *self.trials):
            if trial.obstacle is not None:
                yield trial.codec, *"----", f"no: {trial.obstacle}"
                continue
            yield (
                trial.codec,
                format_bytes(trial.need_bytes),
                f"{trial.ratio:.2f}",
                f"{trial.decode_per_s:,.0f}",
                words[trial.lossless],
                words[trial.need_bytes <= self.budget.bytes],
            )
        yield f"{self.budget}; figures from {self.looked_at} samples"


def choose_storage(
    storage: str,
    raw_bytes: int,
    budget: Budget,
    trials: Sequence[CodecTrial] = (),
    *,
    only_lossless: bool = True,
) -> StoragePlan:
    """Pick where prepared samples are kept; not asked where ``"disk"`` or ``"none"`` is given.

    ``"auto"`` keeps them raw where that fits, else by the lossless codec that decodes fastest among
    those that fit, else nowhere. A codec that loses something is used only when it is asked for by
    name. ``trials`` are needed only where samples are to be compressed or do not fit raw.

    ``"device"`` keeps them as ``"shared"`` does; it is a prefetcher that copies them to its device,
    and holds what they take against what is free there. ``"auto"`` never chooses it: to ask a
    device for its free memory opens it in this process, which worker processes could then not be
    forked from safely, and what the model will need is not known yet.

    Example:
        >>> budget = Budget(bytes=20 << 30, reserve_bytes=1 << 30, limited_by="system memory")
        >>> print(choose_storage("auto", 3 << 30, budget).reason)
        storage='shared': 3.0 GiB of 20.0 GiB free
    """
    need = format_bytes(raw_bytes)
    free = format_bytes(budget.bytes)
    kept: Storage = "device" if storage == "device" else "shared"
    if storage != "compressed" and raw_bytes <= budget.bytes:
        return StoragePlan(kept, f"storage={kept!r}: {need} of {free} free")
    if storage != kept:
        usable = fitting(trials, only_lossless=only_lossless)
        fast = fitting(usable, budget.bytes)
        if fast:
            best = fast[0]
            reason = (
                f"storage='compressed', codec={best.codec!r}{'' if best.lossless else ', lossy'}: "
                f"about {format_bytes(best.need_bytes)} of {free} free; raw needs {need}"
            )
            return StoragePlan("compressed", reason, best.codec)
        need = format_bytes(min((trial.need_bytes for trial in usable), default=raw_bytes))
        if storage == "auto":
            return StoragePlan("none", f"storage='none': needs {need} but {budget}")
        if not usable:
            reasons = "; ".join(f"{trial.codec}: {trial.obstacle}" for trial in trials)
            raise ValueError(f"storage='compressed' is not possible here: {reasons}.")
    raise MemoryBudgetError(
        f"storage={storage!r} needs {need} but {budget}. {would_fit(trials, budget)}"
    )


def fitting(
    trials: Sequence[CodecTrial], free_bytes: float = math.inf, *, only_lossless: bool = False
) -> list[CodecTrial]:
    """Codecs that can be used and need no more than what is free, the fastest decoder first."""
    found = [
        trial
        for trial in trials
        if trial.obstacle is None and (trial.lossless or not only_lossless)
        if trial.need_bytes <= free_bytes
    ]
    return sorted(found, key=lambda trial: trial.decode_per_s, reverse=True)


def would_fit(trials: Sequence[CodecTrial], budget: Budget) -> str:
    """Name what the user can do, the cure of the bound last: raising another one would not help."""
    fits = fitting(trials, budget.bytes)
    cures = ["cache_dir= to keep them on disk", "a smaller resize=", "storage='none'"]
    if fits:
        best = max(fits, key=lambda trial: trial.lossless)
        needs = f"{'' if best.lossless else 'lossy, '}about {format_bytes(best.need_bytes)}"
        cures.insert(0, f"storage='compressed' with codec={best.codec!r} ({needs})")
    more = {
        "memory_limit=": "raise memory_limit=",
        "cgroup limit": "give the container or job more memory",
        "system memory": "free some memory on this machine",
    }
    return f"Use {', '.join(cures)}, or {more[budget.limited_by]}."


DEVICE_SHARE = 1 / 2
"""What samples may take of a device's free memory: the rest is for the model, its gradients and
activations."""


def check_device_room(need_bytes: int, free_bytes: int, device: str) -> None:
    if need_bytes > free_bytes * DEVICE_SHARE:
        raise MemoryBudgetError(
            f"storage='device' needs {format_bytes(need_bytes)} on {device}, but takes at most "
            f"{DEVICE_SHARE:.0%} of the {format_bytes(free_bytes)} that are free there, to leave "
            "room for the model. Use storage='shared', which sends each batch there, a smaller "
            "resize=, or free memory of the device."
        )


# Pinning

PINNING_SHARE = 1 / 8
"""Locked pages cannot be swapped or dropped: more than a small part of the free memory would starve
the machine."""


class PinningPlan(NamedTuple):
    """Whether batches lie in pinned memory, and one line that says why; none where one asked."""

    pin: bool
    reason: str = ""


def choose_pinning(
    pinned_bytes: int | None, budget: Budget, *, has_accelerator: bool
) -> PinningPlan:
    """Decide whether memory for batches is pinned.

    Args:
        pinned_bytes: in all; None where it is not known before a batch is read.
        budget: with what is pinned already.
        has_accelerator: there is a device that copies from pinned memory by itself.
    """
    free = format_bytes(budget.bytes)
    if not has_accelerator:
        refusal = "there is no CUDA or XPU device"
    elif pinned_bytes is None:
        refusal = "how large batches are is not known before one is read"
    elif pinned_bytes > budget.bytes * PINNING_SHARE:
        refusal = (
            f"{format_bytes(pinned_bytes)} needed, at most {PINNING_SHARE:.1%} of {free} free "
            f"({budget.limited_by}) is locked"
        )
    else:
        return PinningPlan(True, f"pinned: {format_bytes(pinned_bytes)} of {free} free")
    return PinningPlan(False, f"not pinned: {refusal}")


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
