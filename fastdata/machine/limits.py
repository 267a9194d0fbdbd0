"""Cores and memory that this process may use: those of the machine, within its cgroups.

Only this module reads the files of Linux control groups (cgroups) and calls psutil.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_TABLE = Path("/proc/self/cgroup")


class Available(NamedTuple):
    """Memory that can be had now without swapping."""

    bytes: int
    limited_by: str  # "system memory" or "cgroup limit"


def usable_cores(cores: int | None = None) -> int:
    """The least of the CPU affinity and the cgroups' quotas, rounded up: 1.5 cores count as 2.

    ``cores`` in place of those of this process's affinity.
    """
    if cores is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for text in _read_cgroups("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        limit = re.fullmatch(r"(\d+)\s+([1-9]\d*)\s*", text)
        if limit is not None:
            cores = min(cores, math.ceil(int(limit[1]) / int(limit[2])))
    return max(1, cores)


def cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


_MEMORY_FILES = (
    "memory.current",
    "memory.usage_in_bytes",
    "memory.max",
    "memory.high",
    "memory.limit_in_bytes",
    "memory.stat",
)
"""Of versions 2 and 1: what is used, limits, and what of it is idle."""


def available_bytes() -> Available:
    """What can still be allocated: the least over the system and every enclosing cgroup.

    Version 2's ``memory.high`` counts as a limit: beyond it the kernel slows the process down
    instead of killing it. Page cache that nobody used lately (``inactive_file``) counts as free:
    the kernel drops it before it fails anything.
    """
    import psutil  # 7 ms, which only those functions take that ask it

    available = Available(psutil.virtual_memory().available, "system memory")
    for text in _read_cgroups(*_MEMORY_FILES):
        # No limit is "max", and -1 in version 1.
        used_bytes, *limits = map(int, re.findall(r"^\d+$", text, re.M) or [0])
        idle = map(int, re.findall(r"^(?:total_)?inactive_file (\d+)$", text, re.M))
        used_bytes = max(0, used_bytes - max(idle, default=0))
        for limit_bytes in limits:
            if limit_bytes - used_bytes < available.bytes:
                available = Available(max(0, limit_bytes - used_bytes), "cgroup limit")
    return available


def tree_pss_bytes(pid: int | None = None) -> int:
    """Sum the proportional set size (PSS) of a process, by default this one, and its descendants.

    PSS counts a page shared by n processes as 1/n in each, so the sum counts it once. Shared memory
    (memfd) counts where it is mapped and touched, not where it merely exists. Where the system has
    no PSS, or denies it, resident memory (RSS) stands in, which counts shared pages once per
    process. A descendant that ends meanwhile is left out.
    """
    import psutil

    root = psutil.Process(pid)
    total_bytes = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                total_bytes += process.memory_full_info().pss
            except (psutil.AccessDenied, AttributeError):
                total_bytes += process.memory_info().rss
    return total_bytes


def _read_cgroups(*names: str) -> list[str]:
    """The text of these files in each folder whose limits bind this process, innermost first.

    The table has lines of ``id:controllers:path``, where no controllers means version 2. Inside a
    container the path may be the host's, which is not there; then the mount's root, walked to last,
    is the container's own.
    """
    texts = []
    controller = names[0].partition(".")[0]
    for controllers, path in re.findall(r"^\d+:([^:]*):/*(.*)$", _read(CGROUP_TABLE), re.M):
        mounts = ["", "unified"]
        if controllers:
            mounts = [controllers, controller] if controller in controllers.split(",") else []
        inside = Path(os.path.normpath(f"/{path}")[1:])
        for mount in dict.fromkeys(mounts):
            for folder in (inside, *inside.parents):
                texts += [_read(*map((CGROUP_ROOT / mount / folder).joinpath, names))]
    return texts


def _read(*paths: Path) -> str:
    """The text of those files that can be read, a line each or more."""
    text = ""
    for path in paths:
        with contextlib.suppress(OSError):
            text += path.read_text(encoding="ascii", errors="replace") + "\n"
    return text
