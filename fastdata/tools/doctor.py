"""``fastdata doctor``: what this machine gives to training, and what to do about what is missing.

Each check looks at one thing and makes no CUDA context. A problem breaks training or slows it
badly; advice is for what may.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fastdata.machine import memory
from fastdata.machine.memory import format_bytes
from fastdata.machine.shared import Block
from fastdata.pixels import core, images
from fastdata.report import Line, Report
from fastdata.tools import versions

NVIDIA = Path("/proc/driver/nvidia")
SYSTEM = Path("/sys")
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    advice: str = ""  # what to do; empty if nothing
    is_problem: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class MachineReport(Report):
    """What this machine gives to training; problems are marked with ``!``, advice with ``->``."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> int:
        return sum(check.is_problem for check in self.checks)

    def _lines(self) -> Iterator[Line]:
        for check in self.checks:
            yield f"{'!' if check.is_problem else ' '} {check.name}", check.found
            if check.advice:
                yield "", f"-> {check.advice}"
        yield from ("", f"problems: {self.problems}")


def examine_machine() -> MachineReport:
    """Look at the machine as this process sees it; reads a few files and changes nothing."""
    return MachineReport((*_processor_and_memory(), *_libraries(), *_devices()))


# Processor and memory


def _processor_and_memory() -> Iterator[Check]:
    cores = memory.usable_cores()
    yield check_cores(cores)
    yield check_threads(cores)
    yield check_memory()
    if sys.platform == "linux":
        yield check_shm()
    yield check_shared_memory()


def check_cores(cores: int) -> Check:
    machine = os.cpu_count() or cores
    if cores >= machine:
        return Check("cores", f"{cores}, all that the machine has")
    found = f"{cores} of {machine} (CPU affinity or cgroup quota)"
    if cores > 1:
        return Check("cores", found)
    advice = "loading and training take turns on one core: give the job more "
    advice += "(docker run --cpus, sbatch --cpus-per-task, taskset)"
    return Check("cores", found, advice, True)


def check_threads(cores: int) -> Check:
    """Torch counts the affinity's cores and knows nothing of a quota."""
    threads = torch.get_num_threads()
    found = f"{threads} for an operation"
    if threads <= cores:
        return Check("torch threads", found)
    advice = f"export OMP_NUM_THREADS={cores}: more threads than usable cores wait for each other"
    return Check("torch threads", found, advice)


def check_memory() -> Check:
    budget = memory.budget_bytes(memory.available_bytes())
    if budget.bytes:
        count = budget.bytes // (256 * 256 * 3)
        return Check("memory", f"{budget}: {count:,} images of 256x256, raw")
    advice = "no image can be kept in memory: give the job more, or keep them on disk (cache_dir=)"
    return Check("memory", str(budget), advice, True)


def check_shm() -> Check:
    """A batch of 256 float32 images of 224x224 is 147 MiB; torch keeps two there for a worker."""
    folder = Path("/dev/shm")
    free_bytes = shutil.disk_usage(folder).free if folder.is_dir() else 0
    found = f"{format_bytes(free_bytes)} free"
    if free_bytes >= 1 << 30:
        return Check("/dev/shm", found)
    advice = "fastdata does not need it; for workers of torch's own loader: "
    return Check("/dev/shm", found, f"{advice}docker run --shm-size=8g")


def check_shared_memory() -> Check:
    kind = "memfd" if hasattr(os, "memfd_create") else "temporary files"
    try:
        Block.create(1).close()
    except MemoryError:  # which another check says
        pass
    except OSError as error:
        advice = "allow memfd_create (a container's seccomp profile), or give TMPDIR room"
        return Check("shared memory", f"{kind}: {error}", advice, True)
    return Check("shared memory", kind)


# Libraries


def _libraries() -> Iterator[Check]:
    installed = versions()
    shown = ("python", "fastdata", "numpy", "lz4", "zstandard")
    yield Check("versions", ", ".join(f"{name} {installed[name] or '-'}" for name in shown))
    yield check_core()
    yield check_jpeg(installed["pillow"])
    yield check_torchvision(installed["torchvision"])


def check_core() -> Check:
    obstacle = core.obstacle()
    if obstacle is None:
        return Check("compiled core", f"{Path(core.load()._name).stem} for {platform.machine()}")
    advice = "install fastdata with pip; without its core every step runs per sample, in Python"
    return Check("compiled core", obstacle, advice, True)


def check_jpeg(pillow: str | None) -> Check:
    found = f"Pillow {pillow} with libjpeg-turbo {images.libjpeg_version() or '-'}"
    obstacle = images.jpeg_obstacle()
    if not obstacle:
        return Check("JPEG", f"{found}, which the compiled core decodes by")
    advice = "Pillow decodes whole images, which takes longer; its wheels for Linux and macOS "
    advice += "bring what is needed: pip install --force-reinstall pillow"
    return Check("JPEG", f"{found}; {obstacle}", advice)


def check_torchvision(version: str | None) -> Check:
    if version is None:
        return Check("torchvision", "not installed; fastdata does not need it")
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        advice = f"install the two that belong together; this torch is {torch.__version__}"
        return Check("torchvision", f"{version} cannot be imported: {error}", advice, True)
    return Check("torchvision", version)


# Devices


def _devices() -> Iterator[Check]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield check_torch(count, " ".join(str(warning.message) for warning in said))
    for gpu in NVIDIA.glob("gpus/*"):
        check = check_numa(gpu)
        if check is not None:
            yield check


def check_torch(count: int, said: str) -> Check:
    """``said`` is what torch has warned of when it was asked for its GPUs."""
    toolkits = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = [f"{name} {version}" for name, version in toolkits.items() if version]
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
    if torch.version.cuda is None:
        advice = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
    else:
        advice = said or "compare nvidia-smi and python -m torch.utils.collect_env"
    return Check("torch", found, advice, True)


def check_numa(gpu: Path) -> Check | None:
    """Memory of another socket than the GPU's is copied to it at half the speed, or worse."""
    files = SYSTEM / "bus/pci/devices" / gpu.name
    node = int((files / "numa_node").read_text())
    if node < 0:  # the machine has no nodes
        return None
    local_mask = int((files / "local_cpus").read_text().replace(",", ""), 16)
    usable = os.sched_getaffinity(0)
    near = [core for core in usable if local_mask >> core & 1]
    found = f"GPU {gpu.name} at node {node}, with {len(near)} of {len(usable)} usable cores"
    if near:
        return Check("NUMA", found)
    advice = f"numactl --cpunodebind={node}: copies from a far node's memory take twice as long"
    return Check("NUMA", found, advice)


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(options: argparse.Namespace) -> int:
    report = examine_machine()
    print(report)
    return 1 if report.problems else 0
