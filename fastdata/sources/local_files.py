"""Files of this machine with the methods of fsspec's file systems, and folders for one user."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fastdata.faults import fault_of
from fastdata.paths import open_file

_FLEETING = "fastdata-remote-"

_FLEETING_S = 60.0
"""Age from which a folder without a lock is taken for one of a process that was killed."""


@contextlib.contextmanager
def fleeting_folder() -> Iterator[Path]:
    """Make a folder for files on their way to or from a URL. Remove those of killed processes."""
    from filelock import FileLock  # takes 20 ms, which other uses of this module need not wait

    _sweep(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=_FLEETING) as folder, FileLock(Path(folder, "lock")):
        yield Path(folder)


@cache  # looking through a folder of temporary files takes longer than reading a sample
def _sweep(parent: str) -> None:
    from filelock import FileLock

    for left in Path(parent).glob(f"{_FLEETING}*"):
        with contextlib.suppress(OSError):  # also Timeout, for a folder that is in use
            found = left.lstat()
            is_own = stat.S_ISDIR(found.st_mode) and made_by_this_user(left)
            # A folder that was just made may have no lock yet.
            if is_own and time.time() - found.st_mtime > _FLEETING_S:
                with FileLock(left / "lock").acquire(timeout=0):
                    shutil.rmtree(left)


def leave_out(problem: OSError) -> None:
    """Leave out a folder without permission, as torchvision does; raise if a disk fails."""
    if fault_of(problem) == "machine":
        raise problem


class LocalFiles:
    """Files of this machine, with the methods of fsspec's file systems that ``Place`` calls."""

    @staticmethod
    def _strip_protocol(url: str) -> str:
        return url

    @staticmethod
    def info(path: str) -> dict[str, int]:
        found = os.stat(path)
        return {"size": found.st_size, "mtime": found.st_mtime_ns}

    @classmethod
    def find(cls, top: str, *, detail: bool) -> dict[str, dict[str, int]]:
        files = {}
        for folder, _, names in os.walk(top, onerror=leave_out):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    files[path] = cls.info(path)
        return files

    @staticmethod
    def cat_file(path: str, start: int, end: int | None) -> bytes:
        with open(path, "rb", opener=open_file) as stream:
            stream.seek(start)
            return stream.read(-1 if end is None else end - start)

    @staticmethod
    def pipe_file(path: str, data: bytes) -> None:
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        # A reader finds either the old file or the new one, even after a crash, because the bytes
        # are on the disk before the name is.
        fresh = os.path.join(folder, f".{uuid.uuid4().hex}.new")
        try:
            with open(fresh, "xb") as stream:  # not tempfile, which would ignore the user's umask
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(fresh, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)

    rm_file = staticmethod(os.unlink)


def made_by_this_user(path: Path) -> bool:
    """Return True if a file or link belongs to this user. Always True on Windows."""
    return not hasattr(os, "getuid") or path.lstat().st_uid == os.getuid()


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can write to, unless it exists; return it.

    Raises:
        PermissionError: a link, or a folder that others can write to, has this name.
        OSError: the folder cannot be made.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    is_open = hasattr(os, "getuid") and found.st_mode & 0o022
    if is_open or not stat.S_ISDIR(found.st_mode) or not made_by_this_user(path):
        raise PermissionError(
            errno.EPERM,
            "a folder that only this user can write to is needed, but this is a link, belongs to "
            "another user, or can be written by others: remove it, or give another local_cache=",
            str(path),
        )
    return path
