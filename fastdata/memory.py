"""How much memory prepared samples may take.

Pure functions of numbers: nothing here asks the machine or allocates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastdata.errors import MemoryBudgetError
from fastdata.machine import Available

__all__ = [
    "Budget",
    "PinningPlan",
    "budget_bytes",
    "check_device_room",
    "choose_pinning",
    "format_bytes",
    "parse_bytes",
]

MIB = 1 << 20
RESERVE_FLOOR_BYTES = 512 * MIB
RESERVE_SHARE = 0.05
_FACTORS = {"B": 1} | {
    f"{prefix}{unit}".upper(): base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for unit, base in (("B", 1000), ("iB", 1024))
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Memory that prepared samples may take.

    Args:
        bytes: what may be spent, the reserve already taken off.
        reserve_bytes: left alone for everything else on the machine.
        limited_by: ``"system memory"``, ``"cgroup limit"`` or ``"memory_limit="``.
        ranks: processes that share what is available, each with samples of its own; ``bytes`` is the part of one.
    """

    bytes: int
    reserve_bytes: int
    limited_by: str
    ranks: int = 1


def parse_bytes(value: int | float | str, *, of: int) -> int:
    """Read a number of bytes as users write it.

    Args:
        value: bytes as an int; a share of ``of`` as a float in (0, 1]; or a number with its unit, decimal (KB, MB, GB,
            TB) or binary (KiB, MiB, GiB, TiB), in any case.
        of: what a share refers to, in bytes.

    Example:
        >>> parse_bytes("500MB", of=0), parse_bytes(0.5, of=1000), parse_bytes("8 GiB", of=0)
        (500000000, 500, 8589934592)
    """
    amount = _amount(value, of)
    if amount is None:
        raise ValueError(
            f"memory of {value!r} is not understood. "
            "Give bytes as an int, a share of the free memory as a float in (0, 1], or text such as '8GiB' or '500MB'."
        )
    return amount


def format_bytes(count: int) -> str:
    """Write a number of bytes for people, in binary units with one decimal.

    Example:
        >>> format_bytes(1_288_490_189)
        '1.2 GiB'
    """
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if round(size, 1) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def budget_bytes(available: Available, memory_limit: int | float | str | None = None, *, ranks: int = 1) -> Budget:
    """Decide how much of the available memory prepared samples may take.

    The larger of 512 MiB and 5 % of what is available stays in reserve: batches, workers and the page cache live on it.

    Args:
        available: what the machine can still give.
        memory_limit: the user's own bound, see ``parse_bytes``; a share refers to the available memory. It can only
            lower the budget.
        ranks: processes of a distributed run that share it, each with samples of its own.

    Example:
        >>> budget_bytes(Available(bytes=20 << 30, limited_by="system memory"), "4GiB").bytes == 4 << 30
        True
    """
    reserve = max(RESERVE_FLOOR_BYTES, int(available.bytes * RESERVE_SHARE))
    free = max(0, available.bytes - reserve) // ranks
    if memory_limit is not None and (limit := parse_bytes(memory_limit, of=available.bytes)) < free:
        return Budget(bytes=limit, reserve_bytes=reserve, limited_by="memory_limit=")
    return Budget(bytes=free, reserve_bytes=reserve, limited_by=available.limited_by, ranks=ranks)


# Pinning

PINNING_FLOOR_BYTES = 64 << 10
"""CUDA brings pageable memory up to this size to the device without waiting for it (CUDA C++ Programming Guide,
asynchronous concurrent execution): pinning gains nothing."""
PINNING_SHARE = 1 / 8
"""Locked pages cannot be swapped or dropped: more than a small part of the free memory would starve the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PinningPlan:
    """Whether batches lie in pinned memory, and one line that says why.

    Args:
        pin: whether.
        reason: why.
        is_short: memory is all that is missing.
        is_own_choice: nobody has asked for it by ``True`` or ``False``.
    """

    pin: bool
    reason: str
    is_short: bool = False
    is_own_choice: bool = True


def choose_pinning(
    *,
    has_accelerator: bool,
    batch_bytes: int | None,
    pinned_bytes: int,
    budget: Budget,
    copies_wait: bool = False,
) -> PinningPlan:
    """Decide whether memory for batches is pinned.

    Args:
        has_accelerator: there is a device that copies from pinned memory by itself.
        batch_bytes: size of a batch; None where it is not known before one is read.
        pinned_bytes: what would be pinned in all.
        budget: what is free, with what is pinned already.
        copies_wait: whether a copy from memory that is not pinned waits for all that its stream has to do, however
            small it is, as torch's ``copy_`` does; then small batches gain from it too.

    Example:
        >>> budget = Budget(bytes=16 << 30, reserve_bytes=1 << 30, limited_by="system memory")
        >>> choose_pinning(has_accelerator=True, batch_bytes=38 << 20, pinned_bytes=76 << 20, budget=budget).reason
        'pinned: 76.0 MiB of 16.0 GiB free'
    """
    if not has_accelerator:
        return PinningPlan(pin=False, reason="not pinned: there is no CUDA or XPU device")
    if batch_bytes is None:
        return PinningPlan(pin=False, reason="not pinned: how large batches are is not known before one is read")
    if batch_bytes <= PINNING_FLOOR_BYTES and not copies_wait:
        return PinningPlan(pin=False, reason=f"not pinned: {format_bytes(batch_bytes)} a batch gain nothing from it")
    need, free = format_bytes(pinned_bytes), format_bytes(budget.bytes)
    if pinned_bytes > budget.bytes * PINNING_SHARE:
        share = f"at most {PINNING_SHARE:.1%} of {free} free ({budget.limited_by}) is locked"
        return PinningPlan(pin=False, reason=f"not pinned: {need} needed, {share}", is_short=True)
    return PinningPlan(pin=True, reason=f"pinned: {need} of {free} free")


# Devices

DEVICE_SHARE = 1 / 2
"""What samples may take of a device's free memory: the rest is for the model, its gradients and activations."""


def check_device_room(need_bytes: int, free_bytes: int, device: str) -> None:
    """Check that a copy of all samples may lie on a device.

    Args:
        need_bytes: of the copy.
        free_bytes: on the device.
        device: its name.

    Raises:
        MemoryBudgetError: it may not.
    """
    if need_bytes > free_bytes * DEVICE_SHARE:
        raise MemoryBudgetError(
            f"storage='device' needs {format_bytes(need_bytes)} on {device}, but takes at most {DEVICE_SHARE:.0%} of "
            f"the {format_bytes(free_bytes)} that are free there, to leave room for the model. Use storage='shared', "
            f"which sends each batch there, a smaller resize=, or free memory of the device."
        )


def _amount(value: object, of: int) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    if isinstance(value, float):
        return int(value * of) if 0 < value <= 1 else None
    if not isinstance(value, str):
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)\s*", value, re.IGNORECASE | re.ASCII)
    if match is None or match[2].upper() not in _FACTORS:
        return None
    return int(float(match[1]) * _FACTORS[match[2].upper()])
