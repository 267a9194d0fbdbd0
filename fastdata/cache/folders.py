"""Names and locks of the folders of a ``cache_dir``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fastdata.cache.manifest import Manifest
from fastdata.memory import format_bytes
from fastdata.report import log
from fastdata.stores.disk import DAMAGE_PREFIX

__all__ = ["PARTIAL", "REPLACED", "beside", "locked", "remove_strays"]

PARTIAL, REPLACED = ".partial", ".replaced"
"""Endings of a cache that is being written, and of one whose place was taken."""
_SAY_AGAIN_S = 30.0


def beside(home: Path, suffix: str) -> Path:
    """Folder of a cache that is being written or was replaced."""
    return home.with_name(home.name + suffix)


@contextlib.contextmanager
def locked(home: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a cache's writer; the system frees it when its holder dies, however that comes.

    Args:
        home: folder of the cache, which need not be there.
        wait: for another writer to end; else TimeoutError at once.
    """
    lock = FileLock(home.with_name(f".{home.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise
        log.warning("another process is writing %s; this one waits for it", home)
        while True:
            try:
                lock.acquire(timeout=_SAY_AGAIN_S)
                break
            except Timeout:
                log.warning("still waiting: %s are there", format_bytes(_size_of(beside(home, PARTIAL))))
    try:
        yield
    finally:
        lock.release()


def _size_of(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


def remove_strays(folder: Path, manifest: Manifest) -> int:
    """Remove what a writer left that died; the bytes gained. Only with the writer's lock held."""
    belong, gained = manifest.file_names(), 0
    for entry in list(os.scandir(folder)):
        if (
            entry.name not in belong
            and not entry.name.startswith(DAMAGE_PREFIX)
            and entry.is_file(follow_symlinks=False)
        ):
            gained += entry.stat(follow_symlinks=False).st_size
            os.unlink(entry.path)
    return gained
