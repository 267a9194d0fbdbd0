"""What the machine gives, read from laid-out cgroup folders and from this very process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from fastdata.machine import available_bytes, cgroup_folders, cgroup_free, cpu_quota, tree_pss_bytes, usable_cores

MIB = 1 << 20


def lay_out(root: Path, files: dict[str, str]) -> Path:
    """Write ``files``, path below root -> text."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.cfs_quota_us": "50000\n"}, None),
        ({"cpu.max": "nonsense\n"}, None),
        ({}, None),
    ],
)
def test_cpu_quota_of_one_cgroup(root: Path, files: dict[str, str], cores: float | None) -> None:
    """Both versions give the quota in cores, and "max", -1, damaged and missing files give none."""
    assert cpu_quota(lay_out(root, files)) == cores


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
def test_free_memory_of_one_cgroup(root: Path, files: dict[str, str], free_mib: int | None) -> None:
    """The limit less the usage, idle page cache counted as free and never below 0; None without a limit."""
    assert cgroup_free(lay_out(root, files)) == (None if free_mib is None else free_mib * MIB)


def test_nested_cgroups_are_walked_up_in_both_versions() -> None:
    """Every enclosing folder binds the process, from the innermost to the mount."""
    folders = [
        str(folder) for folder in cgroup_folders(Path("/c"), "4:memory:/a/b\n3:cpu,cpuacct:/x\n0::/s\n", "memory")
    ]
    assert folders == ["/c/memory/a/b", "/c/memory/a", "/c/memory", "/c/s", "/c", "/c/unified/s", "/c/unified"]
    cpu = [str(folder) for folder in cgroup_folders(Path("/c"), "3:cpu,cpuacct:/x\n", "cpu")]
    assert cpu == ["/c/cpu,cpuacct/x", "/c/cpu,cpuacct", "/c/cpu/x", "/c/cpu"]


@pytest.mark.parametrize("text", ["", "garbage", "1:name=systemd:/\n"])
def test_a_table_without_the_controller_binds_nothing(text: str) -> None:
    """Lines of other controllers, damaged lines and an empty table name no memory folder of version 1."""
    assert not [f for f in cgroup_folders(Path("/c"), text, "memory") if "memory" in f.parts]


def test_the_tightest_enclosing_memory_limit_counts(root: Path, table: Path) -> None:
    """A limit on an outer cgroup binds even if the inner one has a larger one."""
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
    found = available_bytes(root=root, table=table)
    assert (found.bytes, found.limited_by) == (MIB, "cgroup limit")


def test_a_container_finds_its_limit_at_the_mount(root: Path, table: Path) -> None:
    """Where the table names a path of the host that is not there, the mount's own files count."""
    table.write_text("5:memory:/docker/0123abc\n")
    lay_out(root, {"memory/memory.limit_in_bytes": str(8 * MIB), "memory/memory.usage_in_bytes": str(3 * MIB)})
    assert available_bytes(root=root, table=table).bytes == 5 * MIB


def test_without_cgroups_system_memory_counts(root: Path, table: Path) -> None:
    """No table, or a limit above what the system has, leaves psutil's figure."""
    found = available_bytes(root=root, table=table)
    assert found.limited_by == "system memory"
    assert 0 < found.bytes <= psutil.virtual_memory().total
    table.write_text("0::/\n")
    lay_out(root, {"memory.max": str(1 << 60), "memory.current": "0"})
    assert available_bytes(root=root, table=table).limited_by == "system memory"


@pytest.mark.parametrize(("quota", "cores"), [("10000 100000", 1), ("max 100000", None), ("100000000 100000", None)])
def test_usable_cores_are_the_least_of_affinity_and_quota(
    root: Path, table: Path, quota: str, cores: int | None
) -> None:
    """A tenth of a core counts as one; no quota or a large one leaves the affinity."""
    table.write_text("0::/job\n")
    lay_out(root, {"job/cpu.max": quota})
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert usable_cores(root=root, table=table) == (cores or affinity)


def test_quotas_round_up(root: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5 cores of 8 are 3."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    table.write_text("0::/\n")
    lay_out(root, {"cpu.max": "250000 100000"})
    assert usable_cores(root=root, table=table) == 3


def _hold(size_bytes: int, ready: object, done: object) -> None:
    held = np.ones(size_bytes, np.uint8)
    ready.set()  # type: ignore[attr-defined]
    done.wait()  # type: ignore[attr-defined]
    del held


def test_memory_of_descendants_counts() -> None:
    """A child that fills 64 MiB adds about as much to the tree, and the child's own tree is smaller than this one."""
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


def test_resident_memory_stands_in_where_pss_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that refuses PSS gives RSS instead of an error."""

    def deny(process: psutil.Process) -> object:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", deny)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
    assert tree_pss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_a_process_that_vanishes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descendant that ends between listing and reading counts 0."""

    def vanish(process: psutil.Process) -> object:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", vanish)
    assert tree_pss_bytes() == 0


def test_a_missing_root_process_is_an_error() -> None:
    """Asking for a tree that does not exist names the process."""
    with pytest.raises(ProcessLookupError, match="no process with id 2147483646"):
        tree_pss_bytes(2147483646)
