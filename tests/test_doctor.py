"""``fastdata doctor``: its problems and advice on simulated machines, and its report on this one."""

from __future__ import annotations

import importlib
import os
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdata.machine.budget import Budget
from fastdata.report import as_text
from fastdata.tools.doctor import Check, examine_machine, report_lines
from fresh import RUN_COMMAND, Interpreters

MIB = 1 << 20


def examined(name: str) -> Check:
    return next(check for check in examine_machine() if check.name == name)


def test_each_side_of_the_machine_has_its_line() -> None:
    """No check is empty, and a machine without faults gets no advice."""
    names = ["cores", "torch threads", "memory", "/dev/shm", "shared memory", "versions"]
    names += ["compiled core", "JPEG", "torchvision", "torch"]
    checks = examine_machine()
    assert [check.name for check in checks if check.name != "NUMA"] == names
    assert all(check.found for check in checks)
    assert examined("compiled core").problem == examined("shared memory").problem == ""


@pytest.mark.parametrize(
    ("name", "change", "found", "advice", "is_problem"),
    [
        ("cores", {"usable_cores": 8, "os.cpu_count": 8}, "8 of 8", "", False),
        ("cores", {"usable_cores": 4, "os.cpu_count": 8}, "4 of 8", "", False),
        ("cores", {"usable_cores": 1, "os.cpu_count": 8}, "1 of 8", "--cpus", True),
        ("torch threads", {"torch.get_num_threads": 1}, "1 per operation", "", False),
        (
            "torch threads",
            {"torch.get_num_threads": 8, "usable_cores": 2},
            "8 per operation",
            "export OMP_NUM_THREADS=2: ",
            False,
        ),
        (
            "memory",
            {"budget_bytes": Budget(0, 512 * MIB, "cgroup limit")},
            "0 B is free",
            "store them on disk (cache_dir=)",
            True,
        ),
        (
            "/dev/shm",
            {"shutil.disk_usage": types.SimpleNamespace(free=64 * MIB)},
            "64.0 MiB free",
            "docker run --shm-size=8g",
            False,
        ),
        ("compiled core", {"core_obstacle": "no core-level*.so"}, "no core", "with pip", True),
        ("JPEG", {"jpeg_obstacle": "it is linked to none"}, "it is", "whole images", False),
    ],
)
def test_what_is_missing_comes_with_advice(
    name: str,
    change: dict[str, Any],
    found: str,
    advice: str,
    is_problem: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The advice says what to type; what breaks training is a problem."""
    for target, value in change.items():
        place = f"fastdata.tools.doctor.{target}"
        monkeypatch.setattr(place, lambda *_, value=value: value)
    check = examined(name)
    assert check.found.startswith(found)
    said = check.problem if is_problem else check.advice
    assert advice in said
    assert bool(check.problem or check.advice) == bool(advice)


def test_what_cannot_be_made_or_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused memfd and a torchvision for another torch are reported with the error that they raised."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def import_(name: str) -> None:
        raise RuntimeError(f"operator {name}::nms does not exist")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "memfd" not in examined("shared memory").found
    assert "vm.memfd_noexec" in examined("shared memory").advice
    monkeypatch.setattr("fastdata.tools.doctor.Block.create", refuse)
    monkeypatch.setattr(importlib, "import_module", import_)
    for name, words in (
        ("shared memory", "Operation not permitted"),
        ("torchvision", "cannot be imported: operator torchvision::nms does not exist"),
    ):
        assert words in examined(name).found
        assert examined(name).problem


@pytest.mark.parametrize(
    ("devices", "toolkit", "visible", "advice", "is_problem"),
    [
        (("nvidia0",), "12.8", None, "CUDA unknown error", True),
        (("nvidia0",), None, None, "install a build of torch for CUDA", True),
        (("nvidia0",), "12.8", "", "unset CUDA_VISIBLE_DEVICES", False),
        ((), "12.8", None, "docker run --gpus all", False),
    ],
)
def test_a_gpu_that_torch_does_not_see(
    devices: tuple[str, ...],
    toolkit: str | None,
    visible: str | None,
    advice: str,
    is_problem: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check names the reason: driver, build, environment variable or container."""

    def unavailable() -> bool:
        warnings.warn("CUDA initialization: CUDA unknown error", stacklevel=1)
        return False

    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr("fastdata.tools.doctor.NVIDIA", tmp_path)
    monkeypatch.setattr("fastdata.tools.doctor.DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check = examined("torch")
    assert advice in (check.problem if is_problem else check.advice)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinities")
@pytest.mark.parametrize(
    ("near", "advice"), [(1, ""), (0, "start the job with numactl --cpunodebind=1: ")]
)
def test_a_far_gpu_is_reported(
    near: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no usable core is at the node of a GPU, the advice is to start the job at that node."""
    (tmp_path / "nvidia/gpus/0000:17:00.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0").mkdir(parents=True)
    device = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    (device / "numa_node").write_text("1\n")
    usable = sum(1 << core for core in os.sched_getaffinity(0))
    local_mask = usable if near else 1 << 40
    (device / "local_cpus").write_text(f"{local_mask >> 32:08x},{local_mask & 0xFFFFFFFF:08x}\n")
    monkeypatch.setattr("fastdata.tools.doctor.NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr("fastdata.tools.doctor.SYSTEM", tmp_path / "sys")
    check = examined("NUMA")
    count = len(os.sched_getaffinity(0))
    words = f"is at node 1, as are {near * count} of {count} usable cores"
    assert check.found == f"GPU 0000:17:00.0 {words}"
    assert check.advice.startswith(advice)
    assert bool(check.advice) == bool(advice)


def test_a_gpu_that_sys_does_not_list_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container without parts of /sys the other checks are reported."""
    (tmp_path / "nvidia/gpus/0000:17:00.0").mkdir(parents=True)
    monkeypatch.setattr("fastdata.tools.doctor.NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr("fastdata.tools.doctor.SYSTEM", tmp_path / "sys")
    assert "NUMA" not in {check.name for check in examine_machine()}


def test_a_report_is_aligned() -> None:
    """All that was found begins in one column, problems are marked, advice stands below."""
    checks = (Check("cores", "1", problem="more"), Check("torch threads", "2"))
    assert as_text(report_lines(checks)) == (
        "! cores          1\n                 -> more\n  torch threads  2\n\nproblems: 1"
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinities")
def test_the_command_sees_its_own_process(fresh: Interpreters) -> None:
    """``python -m fastdata.tools doctor`` sees the cores it was given, and prints no traceback."""
    narrow = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    done = fresh.run(f"{narrow}\n{RUN_COMMAND}", "doctor")
    assert "cores          1" in done.stdout
    assert done.stderr == ""
    assert done.returncode in (0, 1)
