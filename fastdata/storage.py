"""Which storage prepared samples get: raw, encoded by one codec or another, or none.

Pure functions of numbers: nothing here asks the machine, measures or allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fastdata.errors import MemoryBudgetError
from fastdata.memory import Budget, format_bytes

__all__ = ["STORAGES", "CodecTrial", "Storage", "StoragePlan", "StorageReport", "choose_storage", "would_fit"]

Storage = Literal["device", "shared", "compressed", "disk", "none"]

STORAGES = ("auto", "device", "shared", "compressed", "disk", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecTrial:
    """What a codec made of a sample of the user's data.

    Args:
        codec: its name, or one name for each part of a sample, joined by ``+``.
        part_bytes: of each part of all samples, encoded; an estimate.
        ratio: raw bytes over encoded bytes.
        decode_per_s: samples that one core decodes in a second.
        lossless: whether every value comes back.
        obstacle: why the codec cannot be used here; its other figures are 0 then.
    """

    codec: str
    part_bytes: tuple[int, ...] = ()
    ratio: float = 0.0
    decode_per_s: float = 0.0
    lossless: bool = True
    obstacle: str | None = None

    @property
    def need_bytes(self) -> int:
        """Of all samples, encoded."""
        return sum(self.part_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoragePlan:
    """Where prepared samples are kept, by which codec if any, and one line that says why."""

    storage: Storage
    reason: str
    codec: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageReport:
    """What each codec makes of the user's data; printed as a table.

    Args:
        raw_bytes: of all samples as they are.
        budget: what they may take.
        trials: one for each codec.
        looked_at: how many samples were encoded and decoded for it.
    """

    raw_bytes: int
    budget: Budget
    trials: tuple[CodecTrial, ...]
    looked_at: int

    def __str__(self) -> str:
        rows = [("codec", "bytes", "ratio", "decode/s per core", "lossless", "would fit")]
        rows.append(("(raw)", format_bytes(self.raw_bytes), "1.00", "-", "yes", self._fits(self.raw_bytes)))
        for trial in self.trials:
            if trial.obstacle is not None:
                rows.append((trial.codec, "-", "-", "-", "-", f"no: {trial.obstacle}"))
                continue
            lossless = "yes" if trial.lossless else "no"
            figures = (format_bytes(trial.need_bytes), f"{trial.ratio:.2f}", f"{trial.decode_per_s:,.0f}")
            rows.append((trial.codec, *figures, lossless, self._fits(trial.need_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:]), row[5]]).rstrip() for row in rows
        ]
        free = f"{format_bytes(self.budget.bytes)} free ({self.budget.limited_by})"
        return "\n".join([*lines, f"{free}; figures from {self.looked_at} samples"])

    def _fits(self, need_bytes: int) -> str:
        return "yes" if need_bytes <= self.budget.bytes else "no"


def choose_storage(
    storage: str, raw_bytes: int, budget: Budget, trials: Sequence[CodecTrial] = (), *, only_lossless: bool = True
) -> StoragePlan:
    """Pick where prepared samples are kept.

    ``"device"`` keeps them as ``"shared"`` does; it is a prefetcher that copies them to its device, and holds what they
    take against what is free there. ``"auto"`` never chooses it: to ask a device for its free memory opens it in this
    process, which worker processes could then not be forked from safely, and what the model will need is not known yet.

    ``"auto"`` keeps them raw where that fits, else by the lossless codec that decodes fastest among those that fit,
    else nowhere. A codec that loses something is used only when it is asked for by name.

    Args:
        storage: ``"shared"`` or ``"device"`` (raw), ``"compressed"``, ``"none"`` or ``"auto"``; ``"disk"`` is no choice
            of memory.
        raw_bytes: what all samples take as they are.
        budget: what they may take.
        trials: what codecs would make of them; needed only where they are to be compressed or do not fit raw.
        only_lossless: whether codecs that lose something are left out, because the user named none.

    Raises:
        MemoryBudgetError: what was asked for does not fit; says what would.
        ValueError: the codec asked for cannot be used on these samples.

    Example:
        >>> budget = Budget(bytes=20 << 30, reserve_bytes=1 << 30, limited_by="system memory")
        >>> print(choose_storage("auto", 3 << 30, budget).reason)
        storage='shared': 3.0 GiB of 20.0 GiB free
    """
    if storage not in STORAGES or storage == "disk":
        in_memory = [name for name in STORAGES if name != "disk"]
        raise ValueError(f"storage={storage!r} is not known. Use one of {', '.join(map(repr, in_memory))}.")
    if storage == "none":
        return StoragePlan(storage="none", reason="storage='none': nothing is kept, every epoch decodes again")
    free = format_bytes(budget.bytes)
    kept: Storage = "device" if storage == "device" else "shared"
    if storage != "compressed" and raw_bytes <= budget.bytes:
        return StoragePlan(storage=kept, reason=f"storage={kept!r}: {format_bytes(raw_bytes)} of {free} free")
    if storage == kept:
        raise MemoryBudgetError(_too_large(f"storage={kept!r}", raw_bytes, budget, trials))
    usable = [trial for trial in trials if trial.obstacle is None]
    asked_for = [trial for trial in usable if trial.lossless or not only_lossless]
    fitting = [trial for trial in asked_for if trial.need_bytes <= budget.bytes]
    if fitting:
        return _compressed(max(fitting, key=lambda trial: trial.decode_per_s), raw_bytes, budget, storage)
    if storage == "auto":
        least = min([raw_bytes, *(trial.need_bytes for trial in asked_for)])
        bound = f"{free} free ({_bound(budget)})"
        return StoragePlan(storage="none", reason=f"storage='none': {format_bytes(least)} needed, {bound}")
    if not asked_for:
        reasons = "; ".join(f"{trial.codec}: {trial.obstacle}" for trial in trials)
        raise ValueError(f"storage='compressed' is not possible here: {reasons}.")
    least_trial = min(asked_for, key=lambda trial: trial.need_bytes)
    what = f"storage='compressed' with codec={least_trial.codec!r}"
    raise MemoryBudgetError(_too_large(what, least_trial.need_bytes, budget, trials))


def _compressed(trial: CodecTrial, raw_bytes: int, budget: Budget, storage: str) -> StoragePlan:
    raw = f"; raw needs {format_bytes(raw_bytes)}" if storage == "auto" else ""
    loss = "" if trial.lossless else ", lossy"
    reason = (
        f"storage='compressed', codec={trial.codec!r}{loss}: about {format_bytes(trial.need_bytes)} of "
        f"{format_bytes(budget.bytes)} free{raw}"
    )
    return StoragePlan(storage="compressed", codec=trial.codec, reason=reason)


def would_fit(trials: Sequence[CodecTrial], budget: Budget) -> str:
    """Say what to do where samples do not fit, in one sentence."""
    fitting = [trial for trial in trials if trial.obstacle is None and trial.need_bytes <= budget.bytes]
    cures = ["cache_dir= to keep them on disk", "a smaller resize=", "storage='none'"]
    if fitting:
        best = max(fitting, key=lambda trial: (trial.lossless, trial.decode_per_s))
        needs = f"{'' if best.lossless else 'lossy, '}about {format_bytes(best.need_bytes)}"
        cures.insert(0, f"storage='compressed' with codec={best.codec!r} ({needs})")
    return f"Use {', '.join(cures)}, or {_more_memory(budget.limited_by)}."


def _too_large(what: str, need_bytes: int, budget: Budget, trials: Sequence[CodecTrial]) -> str:
    need, free = format_bytes(need_bytes), format_bytes(budget.bytes)
    return f"{what} needs {need} but {free} is free ({_bound(budget)}). {would_fit(trials, budget)}"


def _bound(budget: Budget) -> str:
    shared = f" shared by {budget.ranks} ranks" if budget.ranks > 1 else ""
    return f"{budget.limited_by}{shared}, {format_bytes(budget.reserve_bytes)} kept in reserve"


def _more_memory(limited_by: str) -> str:
    """The cure that fits the bound; raising another one would not help."""
    cures = {"memory_limit=": "raise memory_limit=", "cgroup limit": "give the container or job more memory"}
    return cures.get(limited_by, "free some memory on this machine")
