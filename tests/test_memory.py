"""Cores and memory of the machine, read from simulated cgroups and this process, and the choices from them."""

from __future__ import annotations

import multiprocessing
import os
import re
import types
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest

from fastdata.errors import MemoryBudgetError
from fastdata.machine import limits
from fastdata.machine.budget import (
    Budget,
    CodecTrial,
    StorageReport,
    budget_bytes,
    check_device_room,
    choose_pinning,
    choose_storage,
)
from fastdata.machine.limits import Available, available_bytes, tree_pss_bytes, usable_cores
from fastdata.machine.units import format_bytes, parse_bytes

MIB, GIB = 1 << 20, 1 << 30


def lay_out(root: Path, files: dict[str, str]) -> Path:
    """Write ``files``: path below the root -> text."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits, "CGROUP_TABLE", tmp_path / "table")
    return tmp_path / "table"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits, "CGROUP_ROOT", tmp_path / "cgroup")
    return tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "900000 100000\n"}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.cfs_quota_us": "150000\n", "cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.cfs_quota_us": "50000\n"}, 8),
        ({"cpu.max": "nonsense\n"}, 8),
        ({"job/cpu.max": "100000 100000\n", "cpu.max": "200000 100000\n"}, 1),
        ({}, 8),
    ],
)
def test_cores_are_the_quotas_rounded_up(
    root: Path, table: Path, files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both versions a tenth of a core counts as one; "max", -1, damaged and missing files set no limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    table.write_text("0::/job\n")
    lay_out(root, files)
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("files", "free_mib"),
    [
        ({"memory.max": f"{100 * MIB}", "memory.current": f"{60 * MIB}"}, 40),
        (
            {
                "memory.max": f"{100 * MIB}",
                "memory.current": f"{60 * MIB}",
                "memory.stat": f"inactive_file {20 * MIB}\n",
            },
            60,
        ),
        ({"memory.max": "max", "memory.current": f"{60 * MIB}"}, None),
        ({"memory.max": "max", "memory.high": f"{80 * MIB}", "memory.current": f"{60 * MIB}"}, 20),
        ({"memory.max": f"{50 * MIB}", "memory.current": f"{60 * MIB}"}, 0),
        ({"memory.max": f"{50 * MIB}"}, None),
        ({"memory.limit_in_bytes": f"{100 * MIB}", "memory.usage_in_bytes": f"{30 * MIB}"}, 70),
        (
            {
                "memory.limit_in_bytes": f"{100 * MIB}",
                "memory.usage_in_bytes": f"{30 * MIB}",
                "memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}\n",
            },
            80,
        ),
        ({"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}, None),
        ({}, None),
    ],
)
def test_free_memory_of_one_cgroup(
    root: Path, table: Path, files: dict[str, str], free_mib: int | None
) -> None:
    """It is the limit minus the usage, with idle page cache as free, at least 0; without a limit the system's."""
    table.write_text("0::/\n")
    lay_out(root, files)
    found = available_bytes()
    assert found.limited_by == ("system memory" if free_mib is None else "cgroup limit")
    assert free_mib is None or found.bytes == free_mib * MIB


@pytest.mark.parametrize("folder", ["cpu,cpuacct/x/y", "cpu/x/y", "cpu/x", "cpu,cpuacct", "cpu"])
def test_enclosing_cgroups_of_version_1_bind(
    root: Path, table: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota of each enclosing cgroup counts, by whatever name its controllers are mounted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    table.write_text("4:memory:/a\n3:cpu,cpuacct:/x/y\n")
    lay_out(root, {f"{folder}/cpu.cfs_quota_us": "2", f"{folder}/cpu.cfs_period_us": "1"})
    assert usable_cores() == 2


@pytest.mark.parametrize("text", ["", "garbage", "1:name=systemd:/\n"])
def test_a_table_without_the_controller_binds_nothing(root: Path, table: Path, text: str) -> None:
    """Other controllers, damaged lines and an empty table name no memory folder of version 1."""
    table.write_text(text)
    lay_out(root, {"memory/memory.limit_in_bytes": "9", "memory/memory.usage_in_bytes": "3"})
    assert available_bytes().limited_by == "system memory"


def test_the_tightest_enclosing_memory_limit_counts(root: Path, table: Path) -> None:
    """A limit of an outer cgroup counts even if the inner one has a larger limit."""
    table.write_text("0::/job/step\n")
    lay_out(
        root,
        {
            "job/step/memory.max": str(900 * MIB),
            "job/step/memory.current": "0",
            "job/memory.max": str(2 * MIB),
            "job/memory.current": str(MIB),
        },
    )
    found = available_bytes()
    assert (found.bytes, found.limited_by) == (MIB, "cgroup limit")


def test_a_container_finds_its_limit_at_the_mount(root: Path, table: Path) -> None:
    """If the table names a path of the host that does not exist here, the mount's own files count."""
    table.write_text("5:memory:/docker/0123abc\n")
    lay_out(
        root,
        {
            "memory/memory.limit_in_bytes": str(8 * MIB),
            "memory/memory.usage_in_bytes": str(3 * MIB),
        },
    )
    assert available_bytes().bytes == 5 * MIB


def test_without_cgroups_system_memory_counts(root: Path, table: Path) -> None:
    """Without a table, or with a limit above the system's memory, psutil's number counts."""
    found = available_bytes()
    assert found.limited_by == "system memory"
    assert 0 < found.bytes <= psutil.virtual_memory().total
    table.write_text("0::/\n")
    lay_out(root, {"memory.max": str(1 << 60), "memory.current": "0"})
    assert available_bytes().limited_by == "system memory"


def _hold(size_bytes: int, ready: object, done: object) -> None:
    held = np.ones(size_bytes, np.uint8)
    ready.set()  # type: ignore[attr-defined]
    done.wait()  # type: ignore[attr-defined]
    del held


def test_memory_of_descendants_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that fills 64 MiB adds about that much to the tree, and its own tree is smaller than this one."""

    def without_files(process: psutil.Process) -> object:
        """Return the memory of a process without the pages of files, which other processes may share."""
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        return types.SimpleNamespace(pss=int(re.findall(r"^Pss_Anon: *(\d+)", text, re.M)[0]) << 10)

    monkeypatch.setattr(psutil.Process, "memory_full_info", without_files)
    before = tree_pss_bytes()
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(64 * MIB, ready, done))
    child.start()
    try:
        assert ready.wait(60)
        assert tree_pss_bytes() - before > 60 * MIB
        assert child.pid is not None
        assert tree_pss_bytes(child.pid) < tree_pss_bytes()
    finally:
        done.set()
        child.join()
        child.close()


def test_resident_memory_replaces_pss_if_that_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that denies PSS gives RSS instead of an error."""

    def deny(process: psutil.Process) -> object:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", deny)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    assert tree_pss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_a_process_that_vanishes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descendant that ends between being listed and being read counts 0."""

    def vanish(process: psutil.Process) -> object:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", vanish)
    monkeypatch.setattr(psutil.Process, "memory_info", vanish)
    assert tree_pss_bytes() == 0


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
    """Ints are bytes, floats shares of 1000, and strings numbers with a decimal or binary unit."""
    assert parse_bytes(value, of=1000) == count


@pytest.mark.parametrize(
    "value",
    [-1, 0.0, -0.5, 1.5, True, "8", "8G", "GiB", "-8GiB", "8 iB", "lots", float("nan"), None],
)
def test_amounts_that_could_mean_two_things_are_refused(value: object) -> None:
    """Amounts such as "8G", 1.5 and True are errors that show the value and the valid forms."""
    with pytest.raises(
        ValueError, match=r"is not an amount of memory. Give bytes as an int, .* such as '8GiB'"
    ) as caught:
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
    """Amounts have one decimal, and never 1024.0 of a unit."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("available", "limit", "bytes_", "reserve", "limited_by"),
    [
        (900 * MIB, None, 810 * MIB, 90 * MIB, "cgroup limit"),
        (100 * GIB, None, 90 * GIB, 10 * GIB, "cgroup limit"),
        (100 * GIB, "8GiB", 8 * GIB, 10 * GIB, "memory_limit="),
        (100 * GIB, 0.5, 50 * GIB, 10 * GIB, "memory_limit="),
        (100 * GIB, "1TiB", 90 * GIB, 10 * GIB, "cgroup limit"),
        (1024 * GIB, None, 1008 * GIB, 16 * GIB, "cgroup limit"),
        (0, None, 0, 0, "cgroup limit"),
    ],
)
def test_the_budget_keeps_a_reserve(
    available: int, limit: float | str | None, bytes_: int, reserve: int, limited_by: str
) -> None:
    """The reserve is 10 %, at most 16 GiB; memory_limit= can only lower the rest."""
    budget = budget_bytes(Available(bytes=available, limited_by="cgroup limit"), limit)
    assert budget == Budget(bytes=bytes_, reserve_bytes=reserve, limited_by=limited_by)


BIG = Budget(bytes=16 * GIB, reserve_bytes=GIB, limited_by="system memory")


@pytest.mark.parametrize(
    ("has_accelerator", "pinned_bytes", "pin", "words"),
    [
        (True, 76 << 20, True, "pinned: 76.0 MiB of 16.0 GiB free"),
        (True, 2 * GIB, True, "pinned: 2.0 GiB"),
        (
            True,
            2 * GIB + 1,
            False,
            "not pinned: 2.0 GiB needed, but at most 12.5% of 16.0 GiB free",
        ),
        (True, None, False, "not known before one is read"),
        (False, 76 << 20, False, "no CUDA or XPU device"),
    ],
)
def test_pinning_follows_device_and_free_memory(
    has_accelerator: bool, pinned_bytes: int | None, pin: bool, words: str
) -> None:
    """With a device, up to an eighth of the free memory is pinned; otherwise the reason is given."""
    plan = choose_pinning(pinned_bytes, BIG, has_accelerator=has_accelerator)
    assert plan.pin == pin
    assert words in plan.reason


@pytest.mark.parametrize(("free", "fits"), [(2 * GIB, True), (2 * GIB - 1, False)])
def test_a_copy_of_all_samples_takes_half_of_a_device_at_most(free: int, fits: bool) -> None:
    """One byte more than half of the free memory is refused."""
    with (
        nullcontext()
        if fits
        else pytest.raises(MemoryBudgetError, match=r"needs 1\.0 GiB on cuda:1, .*at most 50%")
    ):
        check_device_room(GIB, free, "cuda:1")


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
    ],
)
def test_storage_is_chosen_by_need_budget_and_speed(
    storage: str,
    raw_bytes: int,
    trials: Sequence[CodecTrial],
    only_lossless: bool,
    chosen: tuple[str, str | None],
) -> None:
    """Raw if it fits exactly, else the fastest lossless codec that fits; lossy codecs only by name."""
    plan = choose_storage(storage, raw_bytes, BUDGET, trials, only_lossless=only_lossless)
    assert (plan.storage, plan.codec) == chosen


@pytest.mark.parametrize(
    ("storage", "raw_bytes", "trials", "reason"),
    [
        ("auto", GIB, (), "storage='shared': 1.0 GiB of 4.0 GiB free"),
        ("device", GIB, (), "storage='device': 1.0 GiB of 4.0 GiB free"),
        (
            "auto",
            TEN,
            (ZSTD,),
            "storage='compressed', codec='zstd': about 4.0 GiB of 4.0 GiB free; raw needs 10.0 GiB",
        ),
        (
            "compressed",
            GIB,
            (JPEG,),
            "storage='compressed', codec='jpeg', lossy: about 1.0 GiB of 4.0 GiB free; raw needs 1.0 GiB",
        ),
        (
            "auto",
            TEN,
            (LZ4,),
            "storage='none': needs 9.0 GiB but 4.0 GiB is free (cgroup limit, 512.0 MiB kept in reserve)",
        ),
    ],
)
def test_a_choice_says_why(
    storage: str, raw_bytes: int, trials: Sequence[CodecTrial], reason: str
) -> None:
    """The reason is one line with the numbers of the decision."""
    assert choose_storage(storage, raw_bytes, BUDGET, trials, only_lossless=False).reason == reason


def test_a_device_store_must_fit_the_host_too() -> None:
    """Samples for a device need the host's memory as well."""
    with pytest.raises(
        MemoryBudgetError,
        match=r"storage='device' needs 10\.0 GiB but 4\.0 GiB is free \(cgroup limit",
    ):
        choose_storage("device", TEN, BUDGET, [ZSTD])


@pytest.mark.parametrize(
    ("limited_by", "bound", "cure"),
    [
        (
            "cgroup limit",
            "4.0 GiB is free (cgroup limit, 1.0 GiB kept in reserve)",
            "give the container or job more memory",
        ),
        (
            "system memory",
            "4.0 GiB is free (system memory, 1.0 GiB kept in reserve)",
            "free some memory on this machine",
        ),
        ("memory_limit=", "memory_limit= allows 4.0 GiB", "raise memory_limit="),
    ],
)
def test_shared_storage_that_does_not_fit_is_an_error_with_its_cure(
    limited_by: str, bound: str, cure: str
) -> None:
    """The message has the need, the limit that applies, and the cure for that limit."""
    budget = Budget(bytes=4 * GIB, reserve_bytes=GIB, limited_by=limited_by)
    with pytest.raises(MemoryBudgetError) as caught:
        choose_storage("shared", int(9.3 * GIB), budget)
    assert str(caught.value) == (
        f"storage='shared' needs 9.3 GiB but {bound}. "
        f"Use cache_dir= to keep them on disk, a smaller resize=, storage='none', or {cure}."
    )
    assert isinstance(caught.value, MemoryError)


def test_an_error_names_a_storage_that_would_fit() -> None:
    """A lossless codec is preferred to a lossy one, which is called lossy."""
    with pytest.raises(
        MemoryBudgetError,
        match=r"Use storage='compressed' with codec='zstd' \(about 4\.0 GiB\), ca",
    ):
        choose_storage("shared", TEN, BUDGET, [JPEG, ZSTD])
    with pytest.raises(
        MemoryBudgetError,
        match=r"storage='compressed' needs 9\.0 GiB .* codec='jpeg' \(lossy, about 1\.0 GiB",
    ):
        choose_storage("compressed", TEN, BUDGET, [JPEG, LZ4])


def test_ranks_that_share_the_machine_are_named() -> None:
    """The message says that eight ranks share the budget."""
    budget = Budget(bytes=GIB, reserve_bytes=GIB, limited_by="system memory", ranks=8)
    with pytest.raises(MemoryBudgetError, match=r"\(system memory shared by 8 ranks, "):
        choose_storage("shared", TEN, budget)


def test_a_codec_that_cannot_be_used_is_an_error_with_its_reason() -> None:
    """If no codec can be used, the error has the reason for each."""
    with pytest.raises(
        ValueError,
        match=r"storage='compressed' is not possible here: zstd: a sample is too large\.",
    ):
        choose_storage("compressed", GIB, BUDGET, [REFUSED])


def test_a_report_prints_as_a_table() -> None:
    """It has a line for each codec, in columns; an obstacle replaces the numbers."""
    report = StorageReport(raw_bytes=TEN, budget=BUDGET, trials=(LZ4, REFUSED, JPEG), probed=24)
    assert str(report).splitlines() == [
        "codec     bytes  ratio  decode/s per core  lossless  fits",
        "(raw)  10.0 GiB   1.00                inf       yes  no",
        "lz4     9.0 GiB   1.10             20,000       yes  no",
        "zstd          -      -                  -         -  no: a sample is too large",
        "jpeg    1.0 GiB  10.00              3,000        no  yes",
        "4.0 GiB is free (cgroup limit, 512.0 MiB kept in reserve); figures from 24 samples",
    ]
