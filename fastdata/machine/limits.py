"""Cores and memory that this process may use: those of the machine, within its cgroups.

Only this module reads the files of Linux control groups (cgroups).
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
    """Memory that can be allocated now without swapping."""

    bytes: int
    limited_by: str  # "system memory" or "cgroup limit"


def usable_cores(cores: int | None = None) -> int:
    """Return the number of cores that this process may use.

    It is the least of the CPU affinity and the quotas of its cgroups. 1.5 cores count as 2.

    Args:
        cores: number of cores to use instead of the CPU affinity.
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
    """Return the name of the processor."""
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
"""Files of cgroups of both versions: first the usage, then limits, then details of the usage."""


def available_bytes() -> Available:
    """Return the memory that can still be allocated: the least of the system's and each cgroup's.

    ``memory.high`` of cgroup version 2 counts as a limit: beyond it the kernel slows the process
    down instead of killing it. Page cache that was not used lately (``inactive_file``) counts as
    free, because the kernel drops it before an allocation fails.
    """
    import psutil  # not at the top: it takes 7 ms

    available = Available(psutil.virtual_memory().available, "system memory")
    for text in _read_cgroups(*_MEMORY_FILES):
        # Without a limit a file has "max" or, in version 1, -1: neither is a line of digits.
        used_bytes, *limits = map(int, re.findall(r"^\d+$", text, re.M) or [0])
        idle = map(int, re.findall(r"^(?:total_)?inactive_file (\d+)$", text, re.M))
        used_bytes = max(0, used_bytes - max(idle, default=0))
        for limit_bytes in limits:
            if limit_bytes - used_bytes < available.bytes:
                available = Available(max(0, limit_bytes - used_bytes), "cgroup limit")
    return available


def tree_pss_bytes(pid: int | None = None) -> int:
    """Sum the proportional set size (PSS) of a process, by default this one, and its descendants.

    PSS counts a page that n processes share as 1/n in each, so that the sum counts it once. Shared
    memory (memfd) counts in the processes that map and touch it. If the system has no PSS, or
    denies it, resident memory (RSS) is summed, which counts a shared page once per process. A
    descendant that ends in the meantime is left out.
    """
    import psutil

    root = psutil.Process(pid)
    total_bytes = 0
    for process in [root, *root.children(recursive=True)]:
        # A process may end between being listed and being read.
        with contextlib.suppress(psutil.NoSuchProcess):
            try:
                total_bytes += process.memory_full_info().pss
            except (psutil.AccessDenied, AttributeError):
                total_bytes += process.memory_info().rss
    return total_bytes


def _read_cgroups(*names: str) -> list[str]:
    """Return the text of these files for each cgroup that binds this process, innermost first.

    The table has lines of ``id:controllers:path``, where no controllers means version 2. In a
    container the path may be one of the host, which does not exist there. Then the root of the
    mount, which comes last, is the container's own group.
    """
    texts = []
    controller = names[0].partition(".")[0]
    for controllers, path in re.findall(r"^\d+:([^:]*):/*(.*)$", _read(CGROUP_TABLE), re.M):
        # Version 2 is mounted at the root or, if version 1 is in use too, as "unified". Version 1
        # has a mount for each controller, often named after several ("cpu,cpuacct").
        mounts = ["", "unified"]
        if controllers:
            mounts = [controllers, controller] if controller in controllers.split(",") else []
        inside = Path(os.path.normpath(f"/{path}")[1:])
        for mount in dict.fromkeys(mounts):
            for folder in (inside, *inside.parents):
                texts += [_read(*map((CGROUP_ROOT / mount / folder).joinpath, names))]
    return texts


def _read(*paths: Path) -> str:
    """Return the text of those files that can be read, each starting on a new line."""
    text = ""
    for path in paths:
        with contextlib.suppress(OSError):
            text += path.read_text(encoding="ascii", errors="replace") + "\n"
    return text
