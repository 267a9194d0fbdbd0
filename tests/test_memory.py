"""Budget and storage choice, as tables of numbers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from fastdata.errors import MemoryBudgetError
from fastdata.machine import Available
from fastdata.memory import (
    Budget,
    budget_bytes,
    check_device_room,
    choose_pinning,
    format_bytes,
    parse_bytes,
)

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (0, 0),
        (1234, 1234),
        (0.5, 500),
        (1.0, 1000),
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("2TB", 2 * 10**12),
        ("17B", 17),
    ],
)
def test_bytes_are_read_as_users_write_them(value: float | str, count: int) -> None:
    """Ints are bytes, floats shares of 1000, texts numbers with a decimal or binary unit."""
    assert parse_bytes(value, of=1000) == count


@pytest.mark.parametrize(
    "value", [-1, 0.0, -0.5, 1.5, True, "8", "8G", "GiB", "-8GiB", "8 iB", "lots", float("nan"), None]
)
def test_amounts_that_could_mean_two_things_are_refused(value: object) -> None:
    """No guess is made about "8G", 1.5 or True; the error shows the value and the forms that work."""
    with pytest.raises(ValueError, match=r"is not understood. Give bytes as an int, .* such as '8GiB'") as caught:
        parse_bytes(value, of=1000)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (int(9.3 * GIB), "9.3 GiB"),
        (5 * 1024 * GIB, "5.0 TiB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_fits(count: int, text: str) -> None:
    """One decimal, and never 1024.0 of a unit."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("available", "limit", "bytes_", "reserve", "limited_by"),
    [
        (4 * GIB, None, 4 * GIB - 512 * MIB, 512 * MIB, "cgroup limit"),
        (100 * GIB, None, 95 * GIB, 5 * GIB, "cgroup limit"),
        (100 * GIB, "8GiB", 8 * GIB, 5 * GIB, "memory_limit="),
        (100 * GIB, 0.5, 50 * GIB, 5 * GIB, "memory_limit="),
        (100 * GIB, "1TiB", 95 * GIB, 5 * GIB, "cgroup limit"),
        (100 * MIB, None, 0, 512 * MIB, "cgroup limit"),
    ],
)
def test_the_budget_keeps_a_reserve(
    available: int, limit: float | str | None, bytes_: int, reserve: int, limited_by: str
) -> None:
    """The reserve is 512 MiB or 5 %, the larger; memory_limit= only lowers what is left."""
    budget = budget_bytes(Available(bytes=available, limited_by="cgroup limit"), limit)
    assert budget == Budget(bytes=bytes_, reserve_bytes=reserve, limited_by=limited_by)


BIG = Budget(bytes=16 * GIB, reserve_bytes=GIB, limited_by="system memory")


@pytest.mark.parametrize(
    ("has_accelerator", "batch_bytes", "pinned_bytes", "pin", "words", "is_short"),
    [
        (True, 38 << 20, 76 << 20, True, "pinned: 76.0 MiB of 16.0 GiB free", False),
        (True, 1 * GIB, 2 * GIB, True, "pinned: 2.0 GiB", False),
        (True, 1 * GIB, 2 * GIB + 1, False, "not pinned: 2.0 GiB needed, at most 12.5% of 16.0 GiB free", True),
        (True, 64 << 10, 128 << 10, False, "64.0 KiB a batch gain nothing", False),
        (True, (64 << 10) + 1, 128 << 10, True, "pinned: 128.0 KiB", False),
        (True, None, 0, False, "not known before one is read", False),
        (False, 38 << 20, 76 << 20, False, "no CUDA or XPU device", False),
    ],
)
def test_pinning_follows_device_batch_and_free_memory(
    has_accelerator: bool, batch_bytes: int | None, pinned_bytes: int, pin: bool, words: str, is_short: bool
) -> None:
    """Pinned are batches worth it, for a device, up to an eighth of the free memory; else the reason says why not."""
    plan = choose_pinning(
        has_accelerator=has_accelerator, batch_bytes=batch_bytes, pinned_bytes=pinned_bytes, budget=BIG
    )
    assert (plan.pin, plan.is_short) == (pin, is_short)
    assert words in plan.reason


def test_small_batches_are_pinned_where_a_copy_would_wait() -> None:
    """The prefetcher's copies from pageable memory wait for their stream, however small they are."""
    plan = choose_pinning(has_accelerator=True, batch_bytes=100, pinned_bytes=200, budget=BIG, copies_wait=True)
    assert plan.pin


@pytest.mark.parametrize(("free", "fits"), [(2 * GIB, True), (2 * GIB - 1, False)])
def test_a_copy_of_all_samples_takes_half_of_a_device_at_most(free: int, fits: bool) -> None:
    """To the byte; the other half is the model's."""
    with nullcontext() if fits else pytest.raises(MemoryBudgetError, match=r"needs 1\.0 GiB on cuda:1, .*at most 50%"):
        check_device_room(GIB, free, "cuda:1")
