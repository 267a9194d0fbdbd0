"""Open files of a process, and their positions in processes that are forked from it.

An open file has one position, which the kernel advances with each read. A forked process gets the
same open file, so that both processes share the position: if they seek and read at the same time,
one reads where the other has moved the position. ``take_own_positions`` opens the files of a forked
process again, so that each process has its own position.
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
"""Name of fastdata's own blocks of shared memory. They are accessed at offsets, without a
position."""


def take_own_positions() -> None:
    """Open each file that is open for reading again, at the same descriptor and position.

    Call this in a forked process before it reads anything. File objects of Python and of C
    libraries then continue to read, each from its own position. Files that are only written, such
    as logs, and standard input and output keep the shared position.

    Raises:
        OSError: a file cannot be opened again.
    """
    for fd, access in _files_with_a_position().items():
        position = os.lseek(fd, 0, os.SEEK_CUR)
        # `dup` would share the position. Opening the link in /proc does not, and it works for a
        # file that has been renamed or deleted.
        again = os.open(_link(fd), access)
        try:
            # The number stays the same, because file objects hold only that.
            os.lseek(again, position, os.SEEK_SET)
            os.dup2(again, fd, inheritable=os.get_inheritable(fd))
        finally:
            os.close(again)


def obstacle_in_files() -> str:
    """Return a message about an open file that a forked process could not use, or "".

    A file cannot be opened again if this user may not read it: its permissions may have changed, or
    the process has changed its user. LMDB records its readers in a lock file, by process: an
    environment with locks must not be used after a fork.

    The check opens no file: closing it again would release the POSIX locks that this process has on
    the file, such as those of a database.
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
    """Return True for the lock file of an LMDB environment, which is a folder or a single file."""
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
        with contextlib.suppress(OSError):  # closed by now, as the descriptor of listdir is
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            access = flags & os.O_ACCMODE
            status = os.fstat(fd)
            # Logs are opened for appending: every process writes at their end.
            is_read = access != os.O_WRONLY and not flags & (os.O_APPEND | os.O_PATH)
            is_stream = any(os.path.samestat(status, stream) for stream in streams)
            is_memory = os.readlink(_link(fd)).startswith(_OWN_MEMORY)
            if stat.S_ISREG(status.st_mode) and is_read and not is_stream and not is_memory:
                files[fd] = access
    return files


def _link(fd: int) -> str:
    return f"{_DESCRIPTORS}/{fd}"
