"""Locks between threads and processes that end with their holder."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Iterator

from fastdata.blocks import Block

HAS_RECORD_LOCKS = sys.platform != "win32"
if HAS_RECORD_LOCKS:
    import fcntl

__all__ = ["ByteLocks"]

_RETRY_S = 0.001


class ByteLocks:
    """A lock for each byte of a block, held by one thread of one process at a time.

    Between processes they are POSIX record locks, which the kernel drops when their holder dies, however that comes; no
    byte is written. The block must not be closed while a lock is held. Pickles as the block does.

    Where there are no record locks (Windows), only threads lock each other out.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._holders: dict[int, _Holder] = {}

    @contextlib.contextmanager
    def hold(self, byte: int) -> Iterator[None]:
        """Wait for the lock of one byte, and hold it; not twice in one thread."""
        holder = self._holders.setdefault(os.getpid(), _Holder())  # a forked process holds none of its parent's
        with holder.changed:
            holder.changed.wait_for(lambda: byte not in holder.bytes)
            holder.bytes.add(byte)
        try:
            _lock_record(self._block.fileno(), byte)
            yield
        finally:
            if HAS_RECORD_LOCKS and not self._block.closed:
                fcntl.lockf(self._block.fileno(), fcntl.LOCK_UN, 1, byte)
            with holder.changed:
                holder.bytes.discard(byte)
                holder.changed.notify_all()

    def __reduce__(self) -> tuple[object, ...]:
        return ByteLocks, (self._block,)


class _Holder:
    """The bytes that threads of this process hold: record locks are the whole process's."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.bytes: set[int] = set()


def _lock_record(fd: int, byte: int) -> None:
    while HAS_RECORD_LOCKS:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, byte)
        except OSError as error:
            # Processes, not threads, own records: two that each hold one and wait for one look deadlocked to the kernel
            # although other threads hold than wait.
            if error.errno != errno.EDEADLK:
                raise
            time.sleep(_RETRY_S)
        else:
            return
