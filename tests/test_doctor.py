"""``fastdata doctor``: what is a problem, what is advised, and what the command makes of this very machine."""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fastdata.machine.memory import Budget
from fastdata.pixels import core
from fastdata.tools import doctor
from fastdata.tools.cli import main
from fastdata.tools.doctor import Check, MachineReport, examine_machine

MIB, GIB = 1 << 20, 1 << 30
BUDGET = {"reserve_bytes": 512 * MIB, "limited_by": "cgroup limit"}
JPEG = {"pillow": "12.0", "turbo": "3.1", "obstacle": ""}
NVIDIA = {
    "toolkit": "CUDA 12.8",
    "devices": 0,
    "driver": "570.86.15",
    "nodes": 2,
    "visible": None,
    "said": "",
}


@pytest.mark.parametrize(
    ("check", "found"),
    [
        (doctor.check_cores(usable=8, machine=8, affinity=8), "8, all that the machine has"),
        (doctor.check_cores(usable=1, machine=1, affinity=1), "1, all that the machine has"),
        (doctor.check_cores(usable=4, machine=8, affinity=4), "4 of 8 (CPU affinity)"),
        (doctor.check_cores(usable=4, machine=8, affinity=8), "4 of 8 (cgroup quota)"),
        (doctor.check_threads(4, cores=4, omp=None), "4 for an operation"),
        (doctor.check_threads(1, cores=4, omp="1"), "1 for an operation (OMP_NUM_THREADS=1)"),
        (
            doctor.check_memory(Budget(bytes=GIB, **BUDGET)),
            "1.0 GiB is free (cgroup limit, 512.0 MiB kept in reserve): 5,461 images of 256x256, raw",
        ),
        (doctor.check_shm(size_bytes=8 * GIB, free_bytes=GIB), "1.0 GiB of 8.0 GiB free"),
        (doctor.check_shared_memory(is_memfd=True, obstacle=""), "memfd"),
        (
            doctor.check_shared_memory(is_memfd=False, obstacle=""),
            "temporary files: this system has no memfd",
        ),
        (doctor.check_locked(None, has_infiniband=True), "unlimited"),
        (
            doctor.check_locked(8 * MIB, has_infiniband=False),
            "8.0 MiB; what CUDA pins does not count",
        ),
        (doctor.check_open_files(None, None, cores=8), "unlimited"),
        (doctor.check_open_files(1024, 4096, cores=8), "1,024"),
        (doctor.check_start_method("fork"), "fork: worker processes inherit the dataset"),
        (doctor.check_core("for arm64", None), "for arm64"),
        (
            doctor.check_jpeg(**JPEG),
            "Pillow 12.0 with libjpeg-turbo 3.1, which the compiled core decodes by",
        ),
        (doctor.check_torchvision("0.28", torch_version="2.13", obstacle=""), "0.28"),
        (
            doctor.check_torchvision(
                None, torch_version="2.13", obstacle="No module named 'torchvision'"
            ),
            "not installed; fastdata does not need it",
        ),
        (
            doctor.check_torch("2.13", **NVIDIA | {"devices": 2, "visible": "0,1"}),
            "2.13, built for CUDA 12.8; sees 2 GPUs (CUDA_VISIBLE_DEVICES='0,1')",
        ),
        (
            doctor.check_torch("2.13", **NVIDIA | {"toolkit": "", "driver": "", "nodes": 0}),
            "2.13, built for the CPU only; sees no GPU, and no NVIDIA driver is loaded",
        ),
        (doctor.check_numa({1}, {0, 1}), "GPUs at node 1, usable cores at 0,1"),
        (
            doctor.check_gpu(0, "H100", total_bytes=80 * GIB, free_bytes=79 * GIB, busy_percent=0),
            "H100, 79.0 GiB of 80.0 GiB free, 0 % busy",
        ),
        (
            doctor.check_gpu(
                1, "H100", total_bytes=80 * GIB, free_bytes=40 * GIB, busy_percent=None
            ),
            "H100, 40.0 GiB of 80.0 GiB free",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_fine_is_only_named(check: Check, found: str) -> None:
    """A machine as it should be is told in one line each, without advice."""
    assert (check.found, check.advice, check.is_problem) == (found, "", False)


@pytest.mark.parametrize(
    ("check", "advice"),
    [
        (doctor.check_threads(64, cores=2, omp=None), "export OMP_NUM_THREADS=2: "),
        (doctor.check_threads(8, cores=2, omp="8"), "export OMP_NUM_THREADS=2: "),
        (doctor.check_shm(size_bytes=64 * MIB, free_bytes=64 * MIB), "docker run --shm-size=8g"),
        (doctor.check_shm(size_bytes=0, free_bytes=0), "fastdata does not need it"),
        (doctor.check_locked(8 * MIB, has_infiniband=True), "ulimit -l unlimited"),
        (doctor.check_open_files(256, 4096, cores=8), "ulimit -n 4096: "),
        (doctor.check_open_files(256, None, cores=8), "ulimit -n 65536: "),
        (doctor.check_open_files(256, 256, cores=8), "raise the hard limit, then ulimit -n: "),
        (doctor.check_start_method("forkserver"), "under if __name__ == '__main__'"),
        (
            doctor.check_jpeg(**JPEG | {"obstacle": "it is linked to none"}),
            "Pillow decodes whole images",
        ),
        (doctor.check_numa({1}, {0}), "numactl --cpunodebind=1: "),
        (doctor.check_torch("2.13", **NVIDIA | {"nodes": 0}), "docker run --gpus all"),
        (doctor.check_torch("2.13", **NVIDIA | {"visible": ""}), "unset CUDA_VISIBLE_DEVICES"),
        (doctor.check_torch("2.13", **NVIDIA | {"visible": "-1"}), "unset CUDA_VISIBLE_DEVICES"),
        (
            doctor.check_gpu(
                0, "H100", total_bytes=80 * GIB, free_bytes=39 * GIB, busy_percent=None
            ),
            "another program uses it",
        ),
        (
            doctor.check_gpu(0, "H100", total_bytes=80 * GIB, free_bytes=79 * GIB, busy_percent=98),
            "another program uses it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_may_hurt_is_advised(check: Check, advice: str) -> None:
    """The advice says what to type; it is no problem yet."""
    assert advice in check.advice
    assert not check.is_problem


@pytest.mark.parametrize(
    ("check", "advice"),
    [
        (doctor.check_cores(usable=1, machine=8, affinity=1), "taskset, sbatch --cpus-per-task"),
        (
            doctor.check_cores(usable=1, machine=8, affinity=8),
            "docker run --cpus, a pod's CPU limit",
        ),
        (doctor.check_memory(Budget(bytes=0, **BUDGET)), "give the container or job more"),
        (
            doctor.check_memory(Budget(bytes=0, **BUDGET | {"limited_by": "system memory"})),
            "free some",
        ),
        (doctor.check_shared_memory(is_memfd=True, obstacle="[Errno 1]"), "allow memfd_create"),
        (
            doctor.check_shared_memory(is_memfd=False, obstacle="[Errno 28]"),
            "give TMPDIR a folder with room",
        ),
        (doctor.check_open_files(127, 4096, cores=8), "ulimit -n 4096: "),
        (doctor.check_core("", "no core-level*.so"), "every step runs per sample"),
        (
            doctor.check_torchvision(
                "0.28", torch_version="2.13+cpu", obstacle="operator torchvision::nms"
            ),
            "install the two that belong together; this torch is 2.13+cpu",
        ),
        (
            doctor.check_torch("2.13", **NVIDIA | {"toolkit": ""}),
            "install a build of torch for CUDA",
        ),
        (
            doctor.check_torch("2.13", **NVIDIA | {"toolkit": "ROCm 6.4"}),
            "install a build of torch for CUDA",
        ),
        (
            doctor.check_torch("2.13", **NVIDIA | {"driver": "470.57.02"}),
            "CUDA 12.8 needs driver 525 or newer: update it",
        ),
        (
            doctor.check_torch("2.13", **NVIDIA | {"toolkit": "CUDA 13.0"}),
            "CUDA 13.0 needs driver 580 or newer",
        ),
        (
            doctor.check_torch("2.13", **NVIDIA | {"said": "CUDA unknown error"}),
            "CUDA unknown error",
        ),
        (doctor.check_torch("2.13", **NVIDIA | {"visible": "0"}), "nvidia-smi"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_breaks_training_is_a_problem(check: Check, advice: str) -> None:
    """It comes with what to do, and counts for the exit status."""
    assert advice in check.advice
    assert check.is_problem
    report = MachineReport(checks=(check, Check(name="versions", found="python 3.14")))
    assert report.problems == 1
    first, second, *_, last = str(report).splitlines()
    assert first.startswith(f"! {check.name}")
    assert second.strip() == f"-> {check.advice}"
    assert last == "1 problem, marked with !"


def test_a_report_is_aligned_and_plain_values() -> None:
    """All that was found begins in one column; JSON has what is printed."""
    checks = (
        Check(name="cores", found="2"),
        Check(name="start method", found="spawn", advice="no lambda"),
    )
    report = MachineReport(checks=checks)
    assert str(report) == (
        "  cores         2\n  start method  spawn\n                -> no lambda\n\nno problems"
    )
    assert json.loads(json.dumps(report.as_dict())) == {
        "checks": [
            {"name": "cores", "found": "2", "advice": "", "is_problem": False},
            {"name": "start method", "found": "spawn", "advice": "no lambda", "is_problem": False},
        ],
        "problems": 0,
    }


def test_a_container_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control group's quota and memory are those that are told, and a library beyond the quota's threads is said."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "table").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{900 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{200 * MIB}\n")
    found = {
        one.name: one
        for one in examine_machine(cgroup_root=tmp_path, cgroup_table=tmp_path / "table").checks
    }
    assert found["cores"].found == "2 of 8 (cgroup quota)"
    assert found["torch threads"].advice.startswith("export OMP_NUM_THREADS=2")
    assert found["memory"].found.startswith(
        "630.0 MiB is free (cgroup limit, 70.0 MiB kept in reserve)"
    )


def test_all_that_was_asked_for_is_looked_at() -> None:
    """Each of the machine's sides has its line, and none of them is empty."""
    checks = examine_machine().checks
    assert [
        check.name
        for check in checks
        if check.name != "/dev/shm" and not check.name.startswith("GPU")
    ] == [
        *(
            "cores",
            "torch threads",
            "memory",
            "shared memory",
            "locked memory",
            "open files",
            "start method",
        ),
        *("versions", "compiled core", "JPEG", "torchvision", "torch"),
    ]
    assert all(check.found for check in checks)


def test_what_cannot_be_made_or_loaded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused memfd, a missing core and a torchvision of another torch are told with what they raised."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def import_(name: str) -> None:
        raise RuntimeError(f"operator {name}::nms does not exist")

    monkeypatch.setattr(doctor.Block, "create", refuse)
    monkeypatch.setattr(core, "obstacle", lambda: "no core-level*.so")
    monkeypatch.setattr(importlib, "import_module", import_)
    found = {one.name: one for one in examine_machine().checks}
    assert "Operation not permitted" in found["shared memory"].found
    assert found["compiled core"].found == "no core-level*.so"
    assert found["torchvision"].found.endswith(
        "cannot be imported: operator torchvision::nms does not exist"
    )
    assert all(found[name].is_problem for name in ("shared memory", "compiled core", "torchvision"))


def test_what_torch_says_of_cuda_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning that torch gives instead of devices is advice, and is not printed besides."""

    def unavailable() -> bool:
        warnings.warn(
            "CUDA initialization: CUDA unknown error (Triggered internally at x.cpp:1.)",
            stacklevel=1,
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    told = {}
    monkeypatch.setattr(
        doctor,
        "check_torch",
        lambda version, **facts: told.update(facts) or Check(name="", found=""),
    )
    assert examine_machine().checks
    assert (told["toolkit"], told["devices"], told["said"]) == (
        "CUDA 12.8",
        0,
        "CUDA initialization: CUDA unknown error",
    )


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 24 22:53:39 UTC 2024",
            "535.161.08",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
            "570.86.15",
        ),
        ("", ""),
    ],
)
def test_the_driver_is_read(line: str, version: str) -> None:
    """Both of NVIDIA's kernel modules name their version, behind an architecture that has digits too."""
    assert doctor.driver_version(f"{line}\nGCC version:  gcc version 12.3.0\n") == version


class UncountedError(Exception):
    """What NVML raises for a GPU that is cut into instances."""


@pytest.mark.parametrize("is_cut", [False, True])
def test_gpus_are_named_by_nvml(is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, memory and use of each GPU, as far as they are counted; NVML is closed again."""

    def rates(handle: int) -> Any:
        if is_cut:
            raise UncountedError
        return types.SimpleNamespace(gpu=7)

    is_open = []
    nvml = types.SimpleNamespace(
        NVMLError=UncountedError,
        nvmlInit=lambda: is_open.append(True),
        nvmlShutdown=is_open.pop,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetName=lambda handle: [b"H100", "H200"][handle],
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(
            total=80 * GIB, free=(80 - 60 * handle) * GIB
        ),
        nvmlDeviceGetUtilizationRates=rates,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    first, second = (check for check in examine_machine().checks if check.name.startswith("GPU"))
    assert first.found == f"H100, 80.0 GiB of 80.0 GiB free{'' if is_cut else ', 7 % busy'}"
    assert second.advice
    assert is_open == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (unnamed,) = (check for check in examine_machine().checks if check.name.startswith("GPU"))
    assert unnamed.advice.startswith("pip install nvidia-ml-py")


def test_the_command_keeps_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status is 1 only where there is a problem; ``--json`` has each check, versions and the machine."""
    fine = Check(name="cores", found="2")
    bad = Check(name="memory", found="0 B", advice="free some", is_problem=True)
    for checks, status in (((fine,), 0), ((fine, bad), 1)):
        monkeypatch.setattr(
            doctor, "examine_machine", lambda checks=checks: MachineReport(checks=checks)
        )
        assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == status
        assert ("-> free some" in capsys.readouterr().out) == bool(status)
        document = json.loads((tmp_path / "doctor.json").read_text())
        assert [check["name"] for check in document["checks"]] == [check.name for check in checks]
        assert document["problems"] == status
        assert {"versions", "machine"} <= set(document)


def narrow() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (70, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs affinities")
def test_limits_of_the_process_are_those_told() -> None:
    """``python -m fastdata.tools doctor`` sees the limits that it was started with, and prints no traceback."""
    words = [sys.executable, "-m", "fastdata.tools", "doctor"]
    done = subprocess.run(
        words, capture_output=True, text=True, preexec_fn=narrow, check=False, timeout=60
    )
    assert "! open files     70" in done.stdout
    assert "cores          1" in done.stdout
    assert done.stderr == ""
    assert done.returncode == 1
