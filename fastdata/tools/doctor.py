"""``fastdata doctor``: what this machine gives to training, and what to do about what is missing.

``examine_machine`` asks; each ``check_`` decides of the numbers alone. A problem breaks training or
slows it badly, advice is for what may; most checks have neither.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fastdata.machine import memory
from fastdata.machine.memory import Budget, format_bytes
from fastdata.machine.shared import Block
from fastdata.pixels import core, images
from fastdata.tools import output

if sys.platform != "win32":
    import resource


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    advice: str = ""  # what to do; empty if nothing
    is_problem: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class MachineReport:
    """What this machine gives to training; printed as a list, problems marked with ``!``, advice behind ``->``."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> int:
        return sum(check.is_problem for check in self.checks)

    def __repr__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(
                f"{'!' if check.is_problem else ' '} {check.name.ljust(width)}  {check.found}"
            )
            if check.advice:
                lines.append(f"  {' ' * width}  -> {check.advice}")
        count = f"{self.problems or 'no'} problem{'s' * (self.problems != 1)}"
        return "\n".join([*lines, "", f"{count}{', marked with !' * bool(self.problems)}"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"problems": self.problems}


def examine_machine(
    *, cgroup_root: Path = memory.CGROUP_ROOT, cgroup_table: Path = memory.CGROUP_TABLE
) -> MachineReport:
    """Look at the machine as this process sees it; reads a few files, makes no CUDA context and changes nothing."""
    cores = memory.usable_cores(root=cgroup_root, table=cgroup_table)
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores + 1
    available = memory.available_bytes(root=cgroup_root, table=cgroup_table)
    method = (
        multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0]
    )
    checks = [
        check_cores(usable=cores, machine=os.cpu_count() or cores, affinity=affinity),
        check_threads(torch.get_num_threads(), cores=cores, omp=os.environ.get("OMP_NUM_THREADS")),
        check_memory(memory.budget_bytes(available)),
        *_limits(cores),
        check_start_method(method),
        *_libraries(),
        *_devices(),
    ]
    return MachineReport(checks=tuple(checks))


# Processor, memory, limits


def check_cores(*, usable: int, machine: int, affinity: int) -> Check:
    if usable >= machine:
        return Check("cores", f"{usable}, all that the machine has")
    why, cure = ("cgroup quota", "docker run --cpus, a pod's CPU limit")
    if affinity <= usable:
        why, cure = ("CPU affinity", "taskset, sbatch --cpus-per-task")
    is_one = usable == 1
    advice = f"loading and training take turns on one core: give the job more ({cure})" * is_one
    return Check("cores", f"{usable} of {machine} ({why})", advice, is_one)


def check_threads(threads: int, *, cores: int, omp: str | None) -> Check:
    """Torch counts the affinity's cores and knows nothing of a quota.

    On one core of an AMD EPYC a loop of small convolutions and products made 26 rounds a second
    with one thread, 24 to 22 with eight and 20 to 18 with sixteen.
    """
    found = f"{threads} for an operation{f' (OMP_NUM_THREADS={omp})' if omp else ''}"
    advice = (
        f"export OMP_NUM_THREADS={cores}: more threads than usable cores wait for each other"
        * (threads > cores)
    )
    return Check("torch threads", found, advice)


def check_memory(budget: Budget) -> Check:
    if budget.bytes:
        return Check(
            "memory", f"{budget}: {budget.bytes // (256 * 256 * 3):,} images of 256x256, raw"
        )
    bound = "give the container or job more" if budget.limited_by == "cgroup limit" else "free some"
    advice = f"no image can be kept in memory: {bound}, or keep them on disk (cache_dir=)"
    return Check("memory", str(budget), advice, True)


def check_shm(*, size_bytes: int, free_bytes: int) -> Check:
    """A batch of 256 float32 images of 224x224 is 147 MiB, and torch's loader keeps two for each worker there."""
    found = (
        f"{format_bytes(free_bytes)} of {format_bytes(size_bytes)} free" if size_bytes else "none"
    )
    advice = "fastdata does not need it; for worker processes of torch's own loader: docker run --shm-size=8g"
    return Check("/dev/shm", found, advice * (free_bytes < 1 << 30))


def check_shared_memory(*, is_memfd: bool, obstacle: str) -> Check:
    found = "memfd" if is_memfd else "temporary files: this system has no memfd"
    if not obstacle:
        return Check("shared memory", found)
    advice = (
        "allow memfd_create (a container's seccomp profile)"
        if is_memfd
        else "give TMPDIR a folder with room"
    )
    return Check("shared memory", f"{found}: {obstacle}", advice, True)


def check_locked(limit_bytes: int | None, *, has_infiniband: bool) -> Check:
    """What CUDA pins is locked by its driver, which does not ask for this limit; InfiniBand's drivers do."""
    found = (
        "unlimited"
        if limit_bytes is None
        else f"{format_bytes(limit_bytes)}; what CUDA pins does not count"
    )
    advice = "ulimit -l unlimited (docker run --ulimit memlock=-1): NCCL over InfiniBand needs it"
    return Check("locked memory", found, advice * (has_infiniband and limit_bytes is not None))


def check_open_files(soft: int | None, hard: int | None, *, cores: int) -> Check:
    """A script with 8 worker processes held 68 descriptors open, with 16 111; of torch's own loader 90 and 142."""
    need = 64 + 8 * cores
    if soft is None or soft >= max(need, 1024):
        return Check("open files", "unlimited" if soft is None else f"{soft:,}")
    most = min(hard or 65536, 65536)
    cure = f"ulimit -n {most}" if most > soft else "raise the hard limit, then ulimit -n"
    advice = f"{cure}: a worker process for each core needs about {need}, batches that are kept need more"
    return Check("open files", f"{soft:,}", advice, soft < need)


def check_start_method(method: str) -> Check:
    if method == "fork":
        return Check("start method", "fork: worker processes inherit the dataset")
    advice = "worker processes need the script's work under if __name__ == '__main__', and no lambda in transforms"
    return Check("start method", f"{method}: the dataset is pickled for worker processes", advice)


def _limits(cores: int) -> Iterator[Check]:
    if sys.platform == "linux":
        usage = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
        yield check_shm(
            size_bytes=usage.total if usage else 0, free_bytes=usage.free if usage else 0
        )
    obstacle = ""
    try:
        Block.create(1).close()
    except MemoryError:  # which another check says
        pass
    except OSError as error:
        obstacle = str(error)
    yield check_shared_memory(is_memfd=hasattr(os, "memfd_create"), obstacle=obstacle)
    if sys.platform != "win32":
        (locked, _), (soft, hard) = map(_bounds, (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
        yield check_locked(locked, has_infiniband=any(Path("/sys/class/infiniband").glob("*")))
        yield check_open_files(soft, hard, cores=cores)


def _bounds(kind: int) -> list[int | None]:
    return [
        None if bound == resource.RLIM_INFINITY else bound for bound in resource.getrlimit(kind)
    ]


# Libraries


def check_core(library: str, obstacle: str | None) -> Check:
    if obstacle is None:
        return Check("compiled core", library)
    advice = "install fastdata with pip; without its core every step runs per sample, in Python"
    return Check("compiled core", obstacle, advice, True)


def check_jpeg(*, pillow: str, turbo: str | None, obstacle: str) -> Check:
    """``obstacle``: why the compiled core cannot decode by Pillow's libjpeg-turbo; empty where it can."""
    found = f"Pillow {pillow} with {f'libjpeg-turbo {turbo}' if turbo else 'another libjpeg than turbo'}"
    if not obstacle:
        return Check("JPEG", f"{found}, which the compiled core decodes by")
    advice = "Pillow decodes whole images, which takes longer. Its wheels for Linux and macOS bring libjpeg-turbo as a "
    advice += "shared library: pip install --force-reinstall pillow"
    return Check("JPEG", f"{found}; {obstacle}", advice)


def check_torchvision(version: str | None, *, torch_version: str, obstacle: str) -> Check:
    if version is None or not obstacle:
        return Check("torchvision", version or "not installed; fastdata does not need it")
    found = f"{version} cannot be imported: {obstacle}"
    advice = f"install the two that belong together; this torch is {torch_version}"
    return Check("torchvision", found, advice, True)


def _libraries() -> Iterator[Check]:
    versions = output.versions()
    named = ", ".join(
        f"{name} {versions[name] or '-'}"
        for name in ("python", "fastdata", "numpy", "lz4", "zstandard")
    )
    yield Check("versions", named)
    obstacle = core.obstacle()
    level = "-" if obstacle else Path(core.load()._name).stem[-1]
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    yield check_core(f"for x86-64-v{level}" if is_x86 else f"for {platform.machine()}", obstacle)
    turbo, problem = images.libjpeg_version(), images.jpeg_obstacle()
    yield check_jpeg(pillow=versions["pillow"] or "-", turbo=turbo, obstacle=problem)
    problem = ""
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        problem = str(error)
    yield check_torchvision(
        versions["torchvision"], torch_version=torch.__version__, obstacle=problem
    )


# Devices

LEAST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""CUDA -> the oldest branch of NVIDIA's drivers for it (CUDA Toolkit Release Notes, minor version
compatibility)."""


def check_torch(
    version: str,
    *,
    toolkit: str,  # that torch is built for, such as "CUDA 12.8"; empty for the CPU only
    devices: int,  # that torch sees
    driver: str,  # version of NVIDIA's; empty if none is loaded
    nodes: int,  # NVIDIA's devices in this process's /dev
    visible: str | None,  # CUDA_VISIBLE_DEVICES
    said: str,  # by torch, when it was asked for devices
) -> Check:
    setting = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    built = f"{version}, built for {toolkit or 'the CPU only'}"
    found = f"{built}; sees {devices or 'no'} GPU{'s' * (devices > 1)}{setting}"
    if devices or not driver:
        return Check("torch", found if devices else f"{found}, and no NVIDIA driver is loaded")
    found += f", but the NVIDIA driver {driver} is loaded"
    if not nodes:
        advice = (
            "this process is shown no device: docker run --gpus all, or ask the scheduler for one"
        )
        return Check("torch", found, advice)
    if visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        return Check(
            "torch", found, "unset CUDA_VISIBLE_DEVICES, which hides them, to train on them"
        )
    kind, _, toolkit_version = toolkit.partition(" ")
    least = LEAST_DRIVERS.get(toolkit_version.partition(".")[0], 0)
    advice = said or "nvidia-smi and python -m torch.utils.collect_env show both sides"
    if kind != "CUDA":
        advice = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
    elif int(driver.partition(".")[0]) < least:
        advice = f"{toolkit} needs driver {least} or newer: update it, or install a torch built for an older CUDA"
    return Check("torch", found, advice, True)


def check_gpu(
    number: int, name: str, *, total_bytes: int, free_bytes: int, busy_percent: int | None
) -> Check:
    """What other programs take of a GPU; ``busy_percent`` is None where nobody counts."""
    busy = "" if busy_percent is None else f", {busy_percent} % busy"
    found = f"{name}, {format_bytes(free_bytes)} of {format_bytes(total_bytes)} free{busy}"
    is_taken = free_bytes < total_bytes / 2 or (busy_percent or 0) > 10
    advice = "another program uses it (nvidia-smi shows which): training shares it" * is_taken
    return Check(f"GPU {number}", found, advice)


def check_numa(gpu_nodes: set[int], core_nodes: set[int]) -> Check:
    """Memory of another socket than the GPU's is copied to it at half the speed, or worse."""
    found = f"GPUs at node {_listed(gpu_nodes)}, usable cores at {_listed(core_nodes)}"
    advice = f"numactl --cpunodebind={_listed(gpu_nodes)}: copies from the far node's memory take twice as long or more"
    return Check("NUMA", found, advice * gpu_nodes.isdisjoint(core_nodes))


def _listed(numbers: set[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


def driver_version(table: str) -> str:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", table)
    return found[1] if found else ""


def _devices() -> Iterator[Check]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    toolkits = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    table = Path("/proc/driver/nvidia/version")
    yield check_torch(
        torch.__version__,
        toolkit=" and ".join(f"{name} {version}" for name, version in toolkits.items() if version),
        devices=devices,
        driver=driver_version(table.read_text("utf-8") if table.exists() else ""),
        nodes=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        said=" ".join(str(warning.message).partition(" (Triggered")[0] for warning in said),
    )
    if devices and torch.version.cuda:
        yield from _gpus()
    gpus = [
        Path("/sys/bus/pci/devices", path.name, "numa_node") for path in table.parent.glob("gpus/*")
    ]
    # Which says that there are no nodes.
    gpu_nodes = {int(path.read_text()) for path in gpus if path.exists()} - {-1}
    cores = os.sched_getaffinity(0) if gpu_nodes else ()
    folders = [Path(f"/sys/devices/system/cpu/cpu{core}") for core in cores]
    core_nodes = {int(node.name[4:]) for folder in folders for node in folder.glob("node*")}
    if core_nodes:
        yield check_numa(gpu_nodes, core_nodes)


def _gpus() -> Iterator[Check]:
    """Each of the machine's GPUs, hidden ones too, asked without opening it."""
    try:
        with warnings.catch_warnings():
            # An older package of the same name says that it is deprecated.
            warnings.simplefilter("ignore")
            nvml = importlib.import_module("pynvml")
    except ImportError:
        advice = "pip install nvidia-ml-py, to see their memory and use, here and in training"
        yield Check("GPUs", "names, memory and use are unknown", advice)
        return
    nvml.nvmlInit()
    for number in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        name, size = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:  # a GPU that is cut into instances counts nothing
            busy = None
        name = name if isinstance(name, str) else name.decode()
        yield check_gpu(
            number, name, total_bytes=size.total, free_bytes=size.free, busy_percent=busy
        )
    nvml.nvmlShutdown()


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output.add_files(parser)


def run(options: argparse.Namespace) -> int:
    report = examine_machine()
    print(report)
    output.keep(report.as_dict(), options)
    return 1 if report.problems else 0
