"""The memory budget, and the choices that follow from it: storage of samples, pinning of batches.

These are pure functions of numbers. ``limits`` reads what the machine has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fastdata.errors import MemoryBudgetError
from fastdata.machine.limits import Available
from fastdata.machine.units import format_bytes, parse_bytes
from fastdata.report import Line, Report

RESERVE_SHARE = 1 / 10
RESERVE_CEILING_BYTES = 16 << 30


class Budget(NamedTuple):
    """Memory that prepared samples may take."""

    bytes: int  # without the reserve
    reserve_bytes: int  # for everything else on the machine
    limited_by: str  # "system memory", "cgroup limit" or "memory_limit="
    ranks: int = 1  # processes that share what is available; `bytes` is for one of them

    def __str__(self) -> str:
        """Return the budget and its bound, as the rest of a sentence."""
        if self.limited_by == "memory_limit=":  # a reserve is left in any case
            return f"memory_limit= allows {format_bytes(self.bytes)}"
        sharing = f" shared by {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"{format_bytes(self.bytes)} is free ({self.limited_by}{sharing}, "
            f"{format_bytes(self.reserve_bytes)} kept in reserve)"
        )


def budget_bytes(
    available: Available, memory_limit: int | float | str | None = None, *, ranks: int = 1
) -> Budget:
    """Return the memory that prepared samples may take.

    Args:
        available: memory that can be allocated now.
        memory_limit: the user's limit, which can only lower the budget: bytes, a share of what is
            available, or text with a unit. It is for one rank.
        ranks: number of ranks on this machine that share the memory.
    """
    # Batches, workers and the page cache need memory, too.
    reserve = min(int(available.bytes * RESERVE_SHARE), RESERVE_CEILING_BYTES)
    free = max(0, available.bytes - reserve) // ranks
    if memory_limit is not None:
        limit = parse_bytes(memory_limit, of=available.bytes)
        if limit < free:
            return Budget(limit, reserve, "memory_limit=")
    return Budget(free, reserve, available.limited_by, ranks)


Storage = Literal["device", "shared", "compressed", "disk", "none"]


class CodecTrial(NamedTuple):
    """The measured size and speed of a codec on some of the user's samples."""

    codec: str  # its name, or one name for each part of a sample, joined by "+"
    part_bytes: tuple[int, ...] = ()  # estimate of each part's encoded bytes, over all samples
    ratio: float = 0.0  # raw bytes over encoded bytes
    decode_per_s: float = 0.0  # samples that one core decodes in a second
    lossless: bool = True
    obstacle: str | None = None  # why the codec cannot be used here; the figures are 0 then
    coders: tuple[Any, ...] = ()  # codec object of each part

    @property
    def need_bytes(self) -> int:
        return sum(self.part_bytes)


class StoragePlan(NamedTuple):
    """The storage of prepared samples, as ``dataset.storage_plan``.

    Attributes:
        storage: where samples are stored, such as ``"shared"``.
        reason: the reason in one line, with the memory that is needed and free.
        codec: name of the codec; None if samples are stored raw.
    """

    storage: Storage
    reason: str
    codec: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class StorageReport(Report):
    """Sizes and speeds of all codecs on some of the user's samples; printed as a table.

    Args:
        raw_bytes: bytes of all samples without a codec.
        budget: memory that all samples may take.
        trials: a measurement of each codec.
        probed: number of samples that were encoded and decoded.
    """

    raw_bytes: int
    budget: Budget
    trials: tuple[CodecTrial, ...]
    probed: int

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
        yield f"{self.budget}; figures from {self.probed} samples"


def choose_storage(
    storage: str,
    raw_bytes: int,
    budget: Budget,
    trials: Sequence[CodecTrial] = (),
    *,
    only_lossless: bool = True,
) -> StoragePlan:
    """Choose the storage of prepared samples, for each ``storage=`` except "disk" and "none".

    ``"auto"`` stores raw samples if they fit. If not, it uses the lossless codec that decodes
    fastest among those that fit, and stores nothing if none fits. A lossy codec is used only if the
    user names it. ``trials`` are needed only to compress samples, or if they do not fit raw.

    ``"device"`` stores samples as ``"shared"`` does. A prefetcher copies them to its device, and
    compares their size with the memory that is free there. ``"auto"`` never chooses it: reading the
    free memory of a device initialises the device in this process, and then worker processes can no
    longer be forked safely. The memory that the model needs is not known yet either.

    Raises:
        MemoryBudgetError: the samples do not fit in the requested storage.
        ValueError: ``storage="compressed"``, but no codec can be used.

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
    # Raw samples do not fit, or the user wants compressed ones.
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
    """Return the trials of codecs that can be used and fit, the fastest to decode first."""
    found = [
        trial
        for trial in trials
        if trial.obstacle is None and (trial.lossless or not only_lossless)
        if trial.need_bytes <= free_bytes
    ]
    return sorted(found, key=lambda trial: trial.decode_per_s, reverse=True)


def would_fit(trials: Sequence[CodecTrial], budget: Budget) -> str:
    """Return what the user can do: storages that would fit, or more of what limits the budget."""
    fits = fitting(trials, budget.bytes)  # with lossy codecs, because the user chooses
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
"""Share of a device's free memory that samples may take. The rest is for the model."""


def check_device_room(need_bytes: int, free_bytes: int, device: str) -> None:
    """Raise a MemoryBudgetError if samples take too much of a device's free memory."""
    if need_bytes > free_bytes * DEVICE_SHARE:
        raise MemoryBudgetError(
            f"storage='device' needs {format_bytes(need_bytes)} on {device}, but takes at most "
            f"{DEVICE_SHARE:.0%} of the {format_bytes(free_bytes)} that are free there, to leave "
            "room for the model. Use storage='shared', which sends each batch there, a smaller "
            "resize=, or free memory of the device."
        )


PINNING_SHARE = 1 / 8
"""Share of the free memory that may be pinned. The system cannot swap or drop pinned pages."""


class PinningPlan(NamedTuple):
    """The choice whether batches are pinned, with the reason in one line if fastdata chose."""

    pin: bool
    reason: str = ""


def choose_pinning(
    pinned_bytes: int | None, budget: Budget, *, has_accelerator: bool
) -> PinningPlan:
    """Decide if memory for batches is pinned.

    Args:
        pinned_bytes: bytes of all batches together; None if unknown before one is read.
        budget: free memory of this machine.
        has_accelerator: True if a device can copy from pinned memory on its own.
    """
    free = format_bytes(budget.bytes)
    if not has_accelerator:
        refusal = "there is no CUDA or XPU device"
    elif pinned_bytes is None:
        refusal = "the size of a batch is not known before one is read"
    elif pinned_bytes > budget.bytes * PINNING_SHARE:
        refusal = (
            f"{format_bytes(pinned_bytes)} needed, but at most {PINNING_SHARE:.1%} of {free} free "
            f"({budget.limited_by}) may be pinned"
        )
    else:
        return PinningPlan(True, f"pinned: {format_bytes(pinned_bytes)} of {free} free")
    return PinningPlan(False, f"not pinned: {refusal}")
