"""What this process may use of the machine: cores and memory.

The only module that knows psutil and the files of Linux control groups (cgroups). Its answers are numbers; what follows
from them is decided elsewhere. The functions that read cgroups take the folder they start from, so that a test can lay
one out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Available", "available_bytes", "local_ranks", "tree_pss_bytes", "usable_cores"]

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_TABLE = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 62
"""cgroup v1 writes "no limit" as the largest page-aligned int64; anything this large is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Available:
    """Memory that can be had now without swapping, and what bounds it.

    Args:
        bytes: what could be allocated on top of what is in use.
        limited_by: the bound, in words for an error message: ``"system memory"`` or ``"cgroup limit"``.
    """

    bytes: int
    limited_by: str


def usable_cores(*, root: Path = CGROUP_ROOT, table: Path = CGROUP_TABLE) -> int:
    """Count the cores this process may use, at least 1.

    The least of the CPU affinity and the cgroup's CPU quota, rounded up: a container limited to 1.5 cores gets 2.

    Example:
        >>> usable_cores() >= 1
        True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in cgroup_folders(root, _read(table), "cpu") if (quota := cpu_quota(folder)) is not None]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def local_ranks() -> int:
    """Read how many ranks of a distributed run share this machine (``LOCAL_WORLD_SIZE``, as torchrun sets it).

    Raises:
        ValueError: the variable is no positive whole number.

    Example:
        >>> local_ranks() >= 1
        True
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = _whole(text)
    if not ranks:
        raise ValueError(f"LOCAL_WORLD_SIZE={text!r} is no number of ranks; unset it, or set it to 1 or more")
    return ranks


def available_bytes(*, root: Path = CGROUP_ROOT, table: Path = CGROUP_TABLE) -> Available:
    """Find how much memory can still be allocated, the least over the system and every enclosing cgroup.

    A cgroup's page cache that nobody used lately (``inactive_file``) counts as free: the kernel drops it before it
    fails anything.

    Example:
        >>> available_bytes().bytes > 0
        True
    """
    folders = cgroup_folders(root, _read(table), "memory")
    free = [free for folder in folders if (free := cgroup_free(folder)) is not None]
    system = int(psutil.virtual_memory().available)
    if free and min(free) < system:
        return Available(bytes=min(free), limited_by="cgroup limit")
    return Available(bytes=system, limited_by="system memory")


def tree_pss_bytes(pid: int | None = None) -> int:
    """Sum the proportional set size (PSS) of a process and all its descendants.

    PSS counts a page shared by n processes as 1/n in each, so the sum counts it once. Shared memory (memfd) counts
    where it is mapped and touched, not where it merely exists. Where the system has no PSS, or denies it, resident
    memory (RSS) stands in, which counts shared pages once per process. A descendant that ends meanwhile is left out.

    Args:
        pid: root of the tree, this process by default.

    Raises:
        ProcessLookupError: there is no such process.

    Example:
        >>> tree_pss_bytes() > 1_000_000
        True
    """
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess as gone:
        raise ProcessLookupError(f"no process with id {pid}") from gone
    return sum(_pss_bytes(process) for process in tree)


def cgroup_folders(root: Path, table_text: str, controller: str) -> Iterator[Path]:
    """Yield the folders whose limits on ``controller`` bind this process, innermost first.

    Args:
        root: where cgroups are mounted, usually ``/sys/fs/cgroup``.
        table_text: text of ``/proc/self/cgroup``, lines of ``id:controllers:path``; no controllers means version 2.
        controller: ``"cpu"`` or ``"memory"``.

    Inside a container the path may be the host's, which is not there; then the mount's root, walked to last, is the
    container's own.
    """
    for line in table_text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mounts = [root, root / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / controllers, root / controller]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth])


def cpu_quota(folder: Path) -> float | None:
    """Read one cgroup's CPU quota in cores, of version 2 or 1; None where it has none."""
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    quota_us, period_us = _whole(quota), _whole(period)
    if quota_us is None or not period_us:
        return None
    return quota_us / period_us


def cgroup_free(folder: Path) -> int | None:
    """Read how many bytes one cgroup may still allocate, of version 2 or 1; None where it sets no limit.

    Version 2's ``memory.high`` counts as a limit: beyond it the kernel slows the process down instead of killing it.
    """
    for limits, usage_name, cache_key in (
        (("memory.max", "memory.high"), "memory.current", "inactive_file"),
        (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    ):
        found = [limit for name in limits if (limit := _whole(_read(folder / name))) is not None]
        usage = _whole(_read(folder / usage_name))
        if found and usage is not None and min(found) < UNLIMITED_BYTES:
            used = max(0, usage - _stat(_read(folder / "memory.stat"), cache_key))
            return max(0, min(found) - used)
    return None


def _pss_bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", full.rss))
    except psutil.NoSuchProcess:
        return 0
    except (psutil.AccessDenied, OSError, NotImplementedError):
        return _rss_bytes(process)


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except (psutil.Error, OSError):
        return 0


def _stat(text: str, key: str) -> int:
    """Value of ``key`` in the lines ``key value`` of a ``memory.stat``, 0 where it is missing."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _whole(value) or 0
    return 0


def _whole(text: str) -> int | None:
    """A non-negative whole number; None for ``max``, ``-1`` (version 1's "none") and a missing file's empty text."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
