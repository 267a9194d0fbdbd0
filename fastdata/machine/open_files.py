"""Open files of a process, and their positions in processes that are forked from it.

A file that is open has one position, which the kernel advances with each read. A forked process
gets the same open file, so that the position is shared: if two processes seek and read at the same
time, each reads where the other one has put the position. ``take_own_positions`` opens the files of
a forked process again, so that each has a position of its own.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Collection

if sys.platform != "win32":
    import fcntl

_DESCRIPTORS = "/proc/self/fd"
_OWN_MEMORY = "/memfd:fastdata"
"""Blocks of shared memory, which are read and written at given offsets."""


def take_own_positions() -> None:
    """Open each file that is open for reading again, at the same descriptor and position.

    For a forked process, before it reads anything. Objects of Python and of C libraries go on
    reading as if nothing had happened, each from its own position. Files that are only written,
    such as logs, and standard input and output keep the position that processes share.

    Raises:
        OSError: a file cannot be opened again.
    """
    for fd, access in _files_with_a_position().items():
        position = os.lseek(fd, 0, os.SEEK_CUR)
        again = os.open(_link(fd), access)
        try:
            os.lseek(again, position, os.SEEK_SET)
            os.dup2(again, fd, inheritable=os.get_inheritable(fd))
        finally:
            os.close(again)


def obstacle_to_forks() -> str:
    """Return which open file a forked process could not use; empty if there is none.

    A file cannot be opened again if another user opened it, or if its permissions were changed
    afterwards. LMDB notes its readers in a lock file, by process: an environment with locks must
    not be used after a fork.

    Nothing is opened to find out: closing a file drops the POSIX locks that this process has on it,
    such as those of a database.
    """
    try:
        files = _files_with_a_position()
    except OSError as problem:
        return f"open files cannot be listed ({problem})"
    paths = {}
    for fd in files:
        with contextlib.suppress(OSError):  # another thread has closed it
            paths[fd] = os.readlink(_link(fd))
    opened = set(paths.values())
    for fd, path in paths.items():
        wanted = os.R_OK if files[fd] == os.O_RDONLY else os.R_OK | os.W_OK
        with contextlib.suppress(OSError):
            if _is_lmdb_lock(path, opened):
                return (
                    f"an LMDB environment is open ({path}), which must not be used after a fork. "
                    "Open it with lock=False to use all cores"
                )
            if not os.access(_link(fd), wanted, effective_ids=True):
                return (
                    f"{path} is open, but this user may not open it again, and several processes "
                    "cannot read from one position. Close it, or change its permissions, to use "
                    "all cores"
                )
    return ""


def _is_lmdb_lock(path: str, opened: Collection[str]) -> bool:
    """Return True for the lock file of an LMDB environment, of a folder or of a file ``NAME``."""
    is_of_file = path.endswith("-lock") and path.removesuffix("-lock") in opened
    return is_of_file or path.endswith("/lock.mdb")


def _files_with_a_position() -> dict[int, int]:
    """Return the regular files that are read from their position: descriptor -> access mode."""
    streams = []
    for fd in range(3):
        with contextlib.suppress(OSError):
            streams.append(os.fstat(fd))
    files = {}
    for fd in map(int, os.listdir(_DESCRIPTORS)):
        with contextlib.suppress(OSError):  # closed since, such as what listed the folder
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            access = flags & os.O_ACCMODE
            status = os.fstat(fd)
            # Logs are opened for appending: all processes go on writing at their end.
            is_read = access != os.O_WRONLY and not flags & (os.O_APPEND | os.O_PATH)
            is_stream = any(os.path.samestat(status, stream) for stream in streams)
            is_memory = os.readlink(_link(fd)).startswith(_OWN_MEMORY)
            if stat.S_ISREG(status.st_mode) and is_read and not is_stream and not is_memory:
                files[fd] = access
    return files


def _link(fd: int) -> str:
    return f"{_DESCRIPTORS}/{fd}"
