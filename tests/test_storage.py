"""The choice of a storage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fastdata.errors import MemoryBudgetError
from fastdata.memory import Budget
from fastdata.storage import CodecTrial, StorageReport, choose_storage

MIB, GIB = 1 << 20, 1 << 30
BUDGET = Budget(bytes=4 * GIB, reserve_bytes=512 * MIB, limited_by="cgroup limit")

LZ4 = CodecTrial(codec="lz4", part_bytes=(9 * GIB,), ratio=1.1, decode_per_s=20_000)
ZSTD = CodecTrial(codec="zstd", part_bytes=(4 * GIB,), ratio=2.5, decode_per_s=4_000)
SOURCE = CodecTrial(codec="source", part_bytes=(3 * GIB, GIB), ratio=2.5, decode_per_s=300)
JPEG = CodecTrial(codec="jpeg", part_bytes=(GIB,), ratio=10.0, decode_per_s=3_000, lossless=False)
REFUSED = CodecTrial(codec="zstd", obstacle="a sample is too large")
TEN = 10 * GIB


@pytest.mark.parametrize(
    ("storage", "raw_bytes", "trials", "only_lossless", "chosen"),
    [
        ("auto", GIB, (), True, ("shared", None)),
        ("auto", 4 * GIB, (), True, ("shared", None)),
        ("auto", 4 * GIB, (ZSTD,), True, ("shared", None)),
        ("auto", 4 * GIB + 1, (), True, ("none", None)),
        ("auto", TEN, (LZ4, ZSTD, SOURCE, JPEG), True, ("compressed", "zstd")),
        ("auto", TEN, (LZ4, SOURCE, JPEG), True, ("compressed", "source")),
        ("auto", TEN, (LZ4, REFUSED, SOURCE), True, ("compressed", "source")),
        ("auto", TEN, (LZ4, JPEG), True, ("none", None)),
        ("auto", TEN, (JPEG,), False, ("compressed", "jpeg")),
        ("shared", GIB, (), True, ("shared", None)),
        ("device", 4 * GIB, (ZSTD,), True, ("device", None)),
        ("compressed", GIB, (ZSTD, SOURCE, JPEG), True, ("compressed", "zstd")),
        ("compressed", GIB, (JPEG,), False, ("compressed", "jpeg")),
        ("none", GIB, (ZSTD,), True, ("none", None)),
    ],
)
def test_storage_is_chosen_by_need_budget_and_speed(
    storage: str,
    raw_bytes: int,
    trials: Sequence[CodecTrial],
    only_lossless: bool,
    chosen: tuple[str, str | None],
) -> None:
    """Raw if it fits to the last byte, else what decodes fastest of the lossless that fit; lossy only by name."""
    plan = choose_storage(storage, raw_bytes, BUDGET, trials, only_lossless=only_lossless)
    assert (plan.storage, plan.codec) == chosen


@pytest.mark.parametrize(
    ("storage", "raw_bytes", "trials", "reason"),
    [
        ("auto", GIB, (), "storage='shared': 1.0 GiB of 4.0 GiB free"),
        ("device", GIB, (), "storage='device': 1.0 GiB of 4.0 GiB free"),
        ("none", GIB, (), "storage='none': nothing is kept, every epoch decodes again"),
        (
            "auto",
            TEN,
            (ZSTD,),
            "storage='compressed', codec='zstd': about 4.0 GiB of 4.0 GiB free; raw needs 10.0 GiB",
        ),
        ("compressed", GIB, (JPEG,), "storage='compressed', codec='jpeg', lossy: about 1.0 GiB of 4.0 GiB free"),
        (
            "auto",
            TEN,
            (LZ4,),
            "storage='none': 9.0 GiB needed, 4.0 GiB free (cgroup limit, 512.0 MiB kept in reserve)",
        ),
    ],
)
def test_a_choice_says_why(storage: str, raw_bytes: int, trials: Sequence[CodecTrial], reason: str) -> None:
    """One line has the numbers that decided."""
    assert choose_storage(storage, raw_bytes, BUDGET, trials, only_lossless=False).reason == reason


def test_a_device_store_must_fit_the_host_too() -> None:
    """Its samples lie in the host's memory as well."""
    with pytest.raises(
        MemoryBudgetError, match=r"storage='device' needs 10\.0 GiB but 4\.0 GiB is free \(cgroup limit"
    ):
        choose_storage("device", TEN, BUDGET, [ZSTD])


@pytest.mark.parametrize(
    ("limited_by", "cure"),
    [
        ("cgroup limit", "give the container or job more memory"),
        ("system memory", "free some memory on this machine"),
        ("memory_limit=", "raise memory_limit="),
    ],
)
def test_shared_storage_that_does_not_fit_is_an_error_with_its_cure(limited_by: str, cure: str) -> None:
    """The message has need, free, the bound and the cure for that bound."""
    budget = Budget(bytes=4 * GIB, reserve_bytes=GIB, limited_by=limited_by)
    with pytest.raises(MemoryBudgetError) as caught:
        choose_storage("shared", int(9.3 * GIB), budget)
    assert str(caught.value) == (
        f"storage='shared' needs 9.3 GiB but 4.0 GiB is free ({limited_by}, 1.0 GiB kept in reserve). "
        f"Use cache_dir= to keep them on disk, a smaller resize=, storage='none', or {cure}."
    )
    assert isinstance(caught.value, MemoryError)


def test_what_does_not_fit_names_the_storage_that_would() -> None:
    """A lossless codec is named before a lossy one, which is called so."""
    with pytest.raises(MemoryBudgetError, match=r"Use storage='compressed' with codec='zstd' \(about 4\.0 GiB\), ca"):
        choose_storage("shared", TEN, BUDGET, [JPEG, ZSTD])
    with pytest.raises(MemoryBudgetError, match=r"codec='lz4' needs 9\.0 GiB .* codec='jpeg' \(lossy, about 1\.0 GiB"):
        choose_storage("compressed", TEN, BUDGET, [JPEG, LZ4])


def test_ranks_that_share_the_machine_are_named() -> None:
    """A budget that is small because eight ranks share it says so."""
    budget = Budget(bytes=GIB, reserve_bytes=GIB, limited_by="system memory", ranks=8)
    with pytest.raises(MemoryBudgetError, match=r"\(system memory shared by 8 ranks, "):
        choose_storage("shared", TEN, budget)


def test_a_codec_that_cannot_be_used_is_an_error_with_its_reason() -> None:
    """Where no codec is left, each says why."""
    with pytest.raises(ValueError, match=r"storage='compressed' is not possible here: zstd: a sample is too large\."):
        choose_storage("compressed", GIB, BUDGET, [REFUSED])


def test_an_unknown_storage_is_refused_with_the_known_ones() -> None:
    """A misspelt storage= lists the choices."""
    with pytest.raises(
        ValueError, match=r"storage='disk' is not known\. Use one of 'auto', 'device', 'shared', 'compressed', 'n"
    ):
        choose_storage("disk", 1, BUDGET)


def test_a_report_prints_as_a_table() -> None:
    """A line for each codec, in columns; an obstacle stands in place of figures."""
    report = StorageReport(raw_bytes=TEN, budget=BUDGET, trials=(LZ4, REFUSED, JPEG), looked_at=24)
    assert str(report).splitlines() == [
        "codec     bytes  ratio  decode/s per core  lossless  would fit",
        "(raw)  10.0 GiB   1.00                  -       yes  no",
        "lz4     9.0 GiB   1.10             20,000       yes  no",
        "zstd          -      -                  -         -  no: a sample is too large",
        "jpeg    1.0 GiB  10.00              3,000        no  yes",
        "4.0 GiB free (cgroup limit); figures from 24 samples",
    ]
