"""Host memory for batches, reused when the user lets go of it.

Fresh memory is what makes batches slow: every page of it is faulted in and cleared before it is written. A ring hands
out the same few buffers again and again. Who owns a buffer is decided by references, never by counting batches: it
comes back when the last tensor over it has died.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Protocol

import numpy as np

__all__ = ["BatchRing", "Memory"]


class Memory(Protocol):
    """Where a ring's buffers come from; called from the threads that take."""

    def allocate(self, size_bytes: int) -> np.ndarray:
        """Return uint8 memory of at least this size."""

    def free(self, buffer: np.ndarray) -> None:
        """Take back what ``allocate`` returned; nobody sees it any more."""


class _OrdinaryMemory:
    def allocate(self, size_bytes: int) -> np.ndarray:
        return np.empty(size_bytes, np.uint8)

    def free(self, buffer: np.ndarray) -> None:
        pass


class BatchRing:
    """Up to ``slots`` buffers, each lent as an array and back when that array dies.

    Args:
        slots: how many.
        memory: where buffers come from; ordinary memory if None.

    Example:
        >>> ring = BatchRing(1)
        >>> first = ring.take((2, 3), np.dtype("uint8"))
        >>> ring.take((2, 3), np.dtype("uint8")).shape, ring.fresh_count   # the only slot is lent: new memory
        ((2, 3), 1)
        >>> del first
        >>> ring.take((2, 3), np.dtype("uint8")).shape, ring.fresh_count
        ((2, 3), 1)

    Safe from several threads: a buffer is taken and given back by single deque operations, because a finaliser may run
    at any moment, also in a thread that is just taking one.
    """

    def __init__(self, slots: int, memory: Memory | None = None) -> None:
        self._memory: Memory = memory or _OrdinaryMemory()
        self._free: deque[np.ndarray | None] = deque([None] * slots)  # None: a slot whose buffer is not allocated yet
        self.fresh_count = 0
        """How often all slots were lent and the batch got memory of its own."""
        self._grown_bytes: list[int] = []

    @property
    def bytes_held(self) -> int:
        """Memory of all slots, lent or free; batches with memory of their own are the user's."""
        return sum(self._grown_bytes)

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Lend an uninitialised C-contiguous array; a tensor made with ``torch.from_numpy`` keeps it lent."""
        size_bytes = math.prod(shape) * dtype.itemsize
        try:
            buffer = self._free.pop()
        except IndexError:
            self.fresh_count += 1
            return np.empty(shape, dtype)
        if buffer is None or buffer.nbytes < size_bytes:
            old_bytes = 0 if buffer is None else buffer.nbytes
            if buffer is not None:
                self._memory.free(buffer)
            buffer = self._memory.allocate(size_bytes)
            self._grown_bytes.append(buffer.nbytes - old_bytes)
        lent = buffer[:size_bytes].view(dtype).reshape(shape)
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent
