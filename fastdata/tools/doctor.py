"""``fastdata doctor``: checks of this machine, each with its cure.

Each check looks at one thing, and none makes a CUDA context. A problem stops training or makes it
much slower. Advice is given for something that may do so.
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
    """One thing that was checked.

    Attributes:
        name: what was checked.
        found: what was found.
        advice: what to do about something that may slow training down; empty if nothing.
        problem: what to do about a problem; empty if there is none.
    """

    name: str
    found: str
    advice: str = ""
    problem: str = ""


def examine_machine() -> list[Check]:
    """Return the checks of the machine, as this process sees it; changes nothing."""
    return [*_cores(), *_memory(), *_libraries(), _torch(), *_numa()]


def _cores() -> Iterator[Check]:
    cores = usable_cores()
    all_cores = os.cpu_count() or cores
    problem = ""
    if cores == 1 < all_cores:
        problem = (
            "loading and training must share one core: give the job more cores "
            "(docker run --cpus, sbatch --cpus-per-task, taskset)"
        )
    yield Check("cores", f"{cores} of {all_cores}, by CPU affinity and cgroup quota", "", problem)
    # torch counts the cores of the affinity, but ignores the quota of the cgroup.
    threads = torch.get_num_threads()
    advice = f"export OMP_NUM_THREADS={cores}: more threads than usable cores wait for each other"
    yield Check("torch threads", f"{threads} per operation", advice if threads > cores else "")


def _memory() -> Iterator[Check]:
    budget = budget_bytes(available_bytes())
    problem = (
        "there is no memory for images: give the job more memory, or store them on disk "
        "(cache_dir=)"
    )
    yield Check("memory", str(budget), problem="" if budget.bytes else problem)
    folder = Path("/dev/shm")
    if folder.is_dir():
        # A batch of 256 float32 images of 224x224 is 147 MiB, and torch keeps two for each worker.
        free = shutil.disk_usage(folder).free
        advice = (
            "fastdata does not use it, but the workers of torch's own loader do: "
            "docker run --shm-size=8g"
        )
        yield Check("/dev/shm", f"{format_bytes(free)} free", "" if free >= 1 << 30 else advice)
    try:
        with closing(Block.create(1)) as block:
            path = block.path or os.path.realpath(f"/proc/self/fd/{block.fd}")
        # Without memfd a file in a temporary folder is used. It stays behind if the process is
        # killed.
        is_file = hasattr(os, "memfd_create") and "memfd:" not in str(path)
        advice = "allow memfd_create (a container's seccomp profile, sysctl vm.memfd_noexec)"
        yield Check("shared memory", f"works: {path}", advice if is_file else "")
    except (OSError, MemoryError) as error:
        yield Check(
            "shared memory", str(error), problem="allow memfd_create, or free room in TMPDIR"
        )


def _libraries() -> Iterator[Check]:
    installed = versions()
    yield Check("versions", ", ".join(f"{name} {it or '-'}" for name, it in installed.items()))
    obstacle = core_obstacle()
    problem = (
        "install fastdata with pip: without its compiled core all transforms run in Python, for "
        "each sample"
    )
    found = obstacle or f"works, built for {platform.machine()}"
    yield Check("compiled core", found, "", problem if obstacle else "")
    obstacle = jpeg_obstacle()
    advice = (
        "Pillow decodes whole images instead, which takes longer. Its wheels for Linux and macOS "
        "have the library that is needed: pip install --force-reinstall pillow"
    )
    found = obstacle or "the compiled core decodes with Pillow's libjpeg-turbo"
    yield Check("JPEG", found, advice if obstacle else "")
    if installed["torchvision"]:
        found = "can be imported"
        problem = ""
        try:
            importlib.import_module("torchvision")
        except (ImportError, OSError, RuntimeError) as error:
            found = f"cannot be imported: {error}"
            problem = f"install the torchvision that was built for torch {torch.__version__}"
        yield Check("torchvision", found, problem=problem)


def _torch() -> Check:
    # If the driver fails, torch warns once per process and then returns False.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    toolkits = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = [f"{name} {version}" for name, version in toolkits.items() if version]
    # Why torch may see no GPU, from the outside in: container, environment, build, driver.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{torch.__version__}, built for {' '.join(built) or 'the CPU only'}; sees {count} GPUs"
    if visible is not None:
        found += f" (CUDA_VISIBLE_DEVICES={visible!r})"
    if count or not NVIDIA.exists():
        return Check("torch", found)
    found += ", but an NVIDIA driver is loaded"
    if not list(DEVICES.glob("nvidia[0-9]*")):
        return Check("torch", found, "this container has no GPU device: docker run --gpus all")
    if visible in ("", "-1"):
        return Check("torch", found, "unset CUDA_VISIBLE_DEVICES, which hides the GPUs")
    problem = " ".join(str(warning.message) for warning in said)
    if torch.version.cuda is None:
        problem = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
    if not problem:
        problem = "compare the outputs of nvidia-smi and python -m torch.utils.collect_env"
    return Check("torch", found, "", problem)


def _numa() -> Iterator[Check]:
    """Check for each GPU that usable cores are on its socket.

    Copies from the memory of another socket take twice as long, or longer.
    """
    for gpu in NVIDIA.glob("gpus/*"):
        files = SYSTEM / "bus/pci/devices" / gpu.name
        try:
            node = int((files / "numa_node").read_text())  # -1 on machines with one socket
            local_mask = int((files / "local_cpus").read_text().replace(",", ""), 16)
        except OSError:  # a container may hide parts of /sys
            continue
        usable = os.sched_getaffinity(0)
        near = sum(local_mask >> core & 1 for core in usable)
        found = f"GPU {gpu.name} is at node {node}, as are {near} of {len(usable)} usable cores"
        cure = (
            f"start the job with numactl --cpunodebind={node}: copies from the memory of another "
            "node take twice as long"
        )
        yield Check("NUMA", found, "" if near or node < 0 else cure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: ``fastdata doctor`` has none."""


def run(options: argparse.Namespace) -> int:
    """Print the checks; return 1 if there is a problem."""
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
