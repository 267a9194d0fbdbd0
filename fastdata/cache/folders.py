"""Names and locks of the folders of a ``cache_dir``."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from fastdata.cache.manifest import Manifest
from fastdata.errors import CacheError, SampleError
from fastdata.memory import format_bytes
from fastdata.report import log
from fastdata.stores.disk import DAMAGE_PREFIX

HAS_FLOCK = sys.platform != "win32"
if HAS_FLOCK:
    import fcntl

__all__ = [
    "PARTIAL",
    "REPLACED",
    "beside",
    "locked",
    "remove_folder",
    "remove_strays",
    "strays_in",
    "workers_file",
    "writable",
    "written_through",
]

PARTIAL, REPLACED = ".partial", ".replaced"
"""Endings of a cache that is being written, and of one whose place was taken."""
_SAY_AGAIN_S = 30.0
_ASK_AGAIN_S = 0.05
_ORPHANS_S = 60.0
"""Workers of a dead writer end within a second and the samples they are at; what lives longer is no such worker."""
_SYNC_EVERY_S = 0.5


def beside(home: Path, suffix: str) -> Path:
    """Folder of a cache that is being written or was replaced."""
    return home.with_name(home.name + suffix)


def workers_file(home: Path) -> Path:
    """File whose lock the workers of a cache's writer hold; there only while it is written, or after it was killed."""
    return home.with_name(f".{home.name}.workers")


@contextlib.contextmanager
def locked(home: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a cache's writer; the system frees it when its holder and its workers die, however that comes.

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
        with _workers_awaited(home, wait=wait):
            yield
    finally:
        lock.release()


@contextlib.contextmanager
def _workers_awaited(home: Path, *, wait: bool) -> Iterator[None]:
    """Wait for workers whose writer was killed, and let the next writer wait for those forked meanwhile.

    They live up to a second longer than the writer and write on into the same files, while ``FileLock`` is free with
    its holder's death: it is closed in forked processes. This lock is inherited. Only with the writer's lock held.
    """
    if not HAS_FLOCK:
        yield
        return
    path = workers_file(home)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for_workers(fd, _ORPHANS_S if wait else 0, path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)  # nobody looks at it without the writer's lock
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _wait_for_workers(fd: int, patience_s: float, path: Path) -> None:
    give_up = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not patience_s:
                raise Timeout(str(path)) from None
        except OSError:  # a file system without such locks
            return
        if time.monotonic() > give_up:
            log.warning("a process that a killed writer forked still holds %s after %.0f s", path, patience_s)
            return
        time.sleep(_ASK_AGAIN_S)


@contextlib.contextmanager
def writable(cache_dir: Path, why: Callable[[], str]) -> Iterator[None]:
    """Make a folder if it is not there, and say of one that cannot be written or is full what its cache needs.

    Args:
        cache_dir: the folder.
        why: says why it has to be written at all.

    Raises:
        CacheError: in place of the system's own error.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as problem:
        if isinstance(problem, (CacheError, SampleError)):
            raise
        shown = f"cache_dir={str(cache_dir)!r}"
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = f", {format_bytes(shutil.disk_usage(cache_dir).free)} are free" if cache_dir.is_dir() else ""
            raise CacheError(
                f"{shown} has no room to finish the cache ({problem.strerror}){free}. Free some space, or give "
                "another cache_dir=, another codec= or a smaller resize=."
            ) from problem
        if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise
        if problem.errno in (errno.ENOTDIR, errno.EEXIST):
            raise CacheError(f"{shown} is no folder: {problem.filename} is a file. Name another one.") from problem
        raise CacheError(
            f"{shown} cannot be written ({problem.strerror}), and {why()}. Name a folder that can be written, or run "
            "`fastdata build` where it can."
        ) from problem


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _size_of(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


def strays_in(folder: Path, manifest: Manifest) -> list[Path]:
    """Files that a writer left that died, or leaves that is still at work."""
    belong = manifest.file_names()
    return [
        Path(entry.path)
        for entry in os.scandir(folder)
        if entry.name not in belong
        and not entry.name.startswith(DAMAGE_PREFIX)
        and entry.is_file(follow_symlinks=False)
    ]


def remove_strays(folder: Path, manifest: Manifest) -> None:
    """Remove what a writer left that died. Only with the writer's lock held."""
    for path in strays_in(folder, manifest):
        path.unlink()


@contextlib.contextmanager
def written_through(folder: Path) -> Iterator[None]:
    """Write what gets into a folder's shards through to the disk all along, so that little is left to do at the end.

    Left alone, the kernel begins after 30 s, and a build would end with waiting for the disk while all cores idle.
    """
    is_over = threading.Event()

    def sync() -> None:
        while not is_over.wait(_SYNC_EVERY_S):
            with contextlib.suppress(OSError):  # files come and go; whoever needs them there syncs them himself
                for entry in os.scandir(folder):
                    _sync_data(entry.path)

    thread = threading.Thread(target=sync, name="fastdata-sync", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _sync_data(path: str) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        getattr(os, "fdatasync", os.fsync)(fd)
    finally:
        os.close(fd)
