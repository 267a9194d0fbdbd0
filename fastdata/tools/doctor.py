"""``fastdata doctor``: checks of this machine, each with what to do about it.

Each check looks at one thing and makes no CUDA context. A problem breaks training or slows it
badly; advice is for what may.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from fastdata.machine.blocks import Block
from fastdata.machine.budget import budget_bytes
from fastdata.machine.limits import available_bytes, usable_cores
from fastdata.machine.units import format_bytes
from fastdata.pixels.core.library import obstacle as core_obstacle
from fastdata.pixels.decode import jpeg_obstacle
from fastdata.report import Line, as_text
from fastdata.tools.figures import versions

NVIDIA = Path("/proc/driver/nvidia")
SYSTEM = Path("/sys")
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked, and what to do about it."""

    name: str
    found: str
    advice: str = ""
    problem: str = ""


def examine_machine() -> list[Check]:
    """Look at the machine as this process sees it; reads a few files and changes nothing."""
    return [*_cores(), *_memory(), *_libraries(), _torch(), *_numa()]


def _cores() -> Iterator[Check]:
    cores = usable_cores()
    all_cores = os.cpu_count() or cores
    problem = ""
    if cores == 1 < all_cores:
        problem = (
            "loading and training take turns on one core: give the job more "
            "(docker run --cpus, sbatch --cpus-per-task, taskset)"
        )
    yield Check("cores", f"{cores} of {all_cores}, by CPU affinity and cgroup quota", "", problem)
    # torch counts the cores of the affinity, but not the quota.
    threads = torch.get_num_threads()
    advice = f"export OMP_NUM_THREADS={cores}: more threads than usable cores wait for each other"
    yield Check("torch threads", f"{threads} for an operation", advice if threads > cores else "")


def _memory() -> Iterator[Check]:
    budget = budget_bytes(available_bytes())
    problem = "no image can be kept in memory: give the job more, or keep them on disk (cache_dir=)"
    yield Check("memory", str(budget), problem="" if budget.bytes else problem)
    folder = Path("/dev/shm")
    if folder.is_dir():
        # A batch of 256 float32 images of 224x224 is 147 MiB, and torch keeps two for each worker.
        free = shutil.disk_usage(folder).free
        advice = (
            "fastdata does not need it; for workers of torch's own loader: docker run --shm-size=8g"
        )
        yield Check("/dev/shm", f"{format_bytes(free)} free", "" if free >= 1 << 30 else advice)
    try:
        with closing(Block.create(1)) as block:
            path = block.path or os.path.realpath(f"/proc/self/fd/{block.fd}")
        # A file in a temporary folder works, too, but stays behind if the process is killed.
        is_file = hasattr(os, "memfd_create") and "memfd:" not in str(path)
        advice = "allow memfd_create (a container's seccomp profile, sysctl vm.memfd_noexec)"
        yield Check("shared memory", f"works: {path}", advice if is_file else "")
    except (OSError, MemoryError) as error:
        yield Check("shared memory", str(error), problem="allow memfd_create, or give TMPDIR room")


def _libraries() -> Iterator[Check]:
    installed = versions()
    yield Check("versions", ", ".join(f"{name} {it or '-'}" for name, it in installed.items()))
    obstacle = core_obstacle()
    problem = "install fastdata with pip; without its core every step runs per sample, in Python"
    found = obstacle or f"there, for {platform.machine()}"
    yield Check("compiled core", found, "", problem if obstacle else "")
    obstacle = jpeg_obstacle()
    advice = (
        "Pillow decodes whole images, which takes longer; its wheels for Linux and macOS "
        "bring what is needed: pip install --force-reinstall pillow"
    )
    found = obstacle or "decoded in the core by Pillow's libjpeg-turbo"
    yield Check("JPEG", found, advice if obstacle else "")
    if installed["torchvision"]:
        found = "can be imported"
        problem = ""
        try:
            importlib.import_module("torchvision")
        except (ImportError, OSError, RuntimeError) as error:
            found = f"cannot be imported: {error}"
            problem = f"install the two that belong together; this torch is {torch.__version__}"
        yield Check("torchvision", found, problem=problem)


def _torch() -> Check:
    # torch warns of a driver that fails, once in a process, and then returns False.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    toolkits = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = [f"{name} {version}" for name, version in toolkits.items() if version]
    # The reasons from the outside in: the container, the environment, the driver and the build.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{torch.__version__}, built for {' '.join(built) or 'the CPU only'}; sees {count} GPUs"
    if visible is not None:
        found += f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if count or not NVIDIA.exists():
        return Check("torch", found)
    found += ", but an NVIDIA driver is loaded"
    if not list(DEVICES.glob("nvidia[0-9]*")):
        return Check("torch", found, "this process is shown no device: docker run --gpus all")
    if visible in ("", "-1"):
        return Check("torch", found, "unset CUDA_VISIBLE_DEVICES, which hides them")
    problem = " ".join(str(warning.message) for warning in said)
    if torch.version.cuda is None:
        problem = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
    if not problem:
        problem = "compare nvidia-smi and python -m torch.utils.collect_env"
    return Check("torch", found, "", problem)


def _numa() -> Iterator[Check]:
    """Check the socket of each GPU: copies from another socket take twice as long, or longer."""
    for gpu in NVIDIA.glob("gpus/*"):
        files = SYSTEM / "bus/pci/devices" / gpu.name
        node = int((files / "numa_node").read_text())  # -1 on machines with one socket
        local_mask = int((files / "local_cpus").read_text().replace(",", ""), 16)
        usable = os.sched_getaffinity(0)
        near = sum(local_mask >> core & 1 for core in usable)
        found = f"GPU {gpu.name} at node {node}, with {near} of {len(usable)} usable cores"
        cure = f"numactl --cpunodebind={node}: copies from a far node's memory take twice as long"
        yield Check("NUMA", found, "" if near or node < 0 else cure)


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(options: argparse.Namespace) -> int:
    checks = examine_machine()
    print(as_text(report_lines(checks)))
    return int(any(check.problem for check in checks))


def report_lines(checks: Sequence[Check]) -> Iterator[Line]:
    """Yield a row for each check: problems are marked with ``!``, advice with ``->``."""
    for check in checks:
        yield f"{'!' if check.problem else ' '} {check.name}", check.found
        cure = check.problem or check.advice
        if cure:
            yield "", f"-> {cure}"
    yield from ("", f"problems: {sum(bool(check.problem) for check in checks)}")
