"""Memory for batches: allocated in one piece, and reused once its last tensor has died.

New memory makes batches slow: every page is faulted in and cleared before it is written. A
``BatchRing`` leases the same few buffers again and again.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fastdata.pixels.arrays import Array, Shape

ALIGN_BYTES = 64
"""A cache line; each piece of a buffer begins at a multiple of it."""
Output = tuple[Shape, np.dtype[Any]]
"""Shape and dtype of a served sample."""
Allocate = Callable[[int], memoryview]
"""Takes a number of bytes and returns memory of that size."""


def allocate_batch(
    count: int,
    outputs: list[Output],
    allocate: Allocate,
    *,
    channels_last: Sequence[bool] | None = None,
) -> list[Array]:
    """Return an array (count, *shape) for each output, all in one piece of memory.

    Outputs with ``channels_last`` are stored as (B, h, w, C), and the arrays are (B, C, h, w).
    """
    pieces = []
    end = 0
    for shape, dtype in outputs:
        length = count * math.prod(shape)
        pieces.append((shape, dtype, length, end))
        end += -(-length * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
    memory = allocate(end)
    arrays = []
    for number, (shape, dtype, length, start) in enumerate(pieces):
        values = np.frombuffer(memory, dtype, length, start)
        if channels_last and channels_last[number]:
            channels, height, width = shape
            arrays.append(values.reshape(count, height, width, channels).transpose(0, 3, 1, 2))
        else:
            arrays.append(values.reshape(count, *shape))
    return arrays


def new_buffer(size_bytes: int) -> memoryview:
    """Return memory that is used once."""
    return np.empty(size_bytes, np.uint8).data


def rows_of(images: torch.Tensor, kind: type) -> Sequence[Any]:
    """Return the samples of a batch as views of it, of a class such as ``tv_tensors.Image``."""
    if kind is np.ndarray:
        arrays = images.numpy()
        return [arrays[row, ...] for row in range(len(arrays))]
    rows = images.unbind(0)
    return rows if kind is torch.Tensor else [row.as_subclass(kind) for row in rows]


class Lease(weakref.ref[np.ndarray]):
    """A weak reference to an array that was leased, with what its callback needs.

    The callback must be a function in C. Python code in it could be interrupted by Ctrl-C, which
    would be printed and forgotten, and the training loop would go on.

    Attributes:
        buffer: the memory of the array.
        set_state: sets the state of a slot that another process reads.
    """

    __slots__ = ("buffer", "set_state")
    buffer: Array
    set_state: Callable[[int], None]


class BatchRing:
    """Up to ``slots`` buffers, each leased as an array until that array dies.

    Safe from several threads.

    Args:
        slots: number of buffers.
        allocate: takes a number of bytes and returns a uint8 array, in the thread that leases;
            ordinary memory by default.

    Attributes:
        fresh_count: number of batches that got new memory, because all slots were leased.
    """

    def __init__(self, slots: int, allocate: Callable[[int], Array] | None = None) -> None:
        self._allocate = allocate or partial(np.empty, dtype=np.uint8)
        # A buffer is taken and given back by single operations of a deque, which are atomic,
        # because an array may die at any moment, also in a thread that is just taking a buffer.
        self._free: deque[Lease | None] = deque([None] * slots)  # None for a slot without buffer
        # By id. Keeps the leases alive: the callback of a weak reference that has died itself is
        # never called.
        self._leases: dict[int, Lease] = {}
        self._slots = slots
        self.fresh_count = 0

    def __reduce__(self) -> Any:
        """Pickle as a ring with memory of its own."""
        return BatchRing, (self._slots,)

    @property
    def bytes_held(self) -> int:
        # A list is made in one step; other threads lease buffers while they are counted.
        return sum(lease.buffer.nbytes for lease in list(self._leases.values()))

    def lease(self, size_bytes: int) -> memoryview:
        """Return memory that comes back when the last array or tensor over it has died."""
        try:
            lease = self._free.pop()
        except IndexError:
            self.fresh_count += 1
            return new_buffer(size_bytes)
        buffer = None if lease is None else self._leases.pop(id(lease)).buffer
        if buffer is None or buffer.nbytes < size_bytes:
            buffer = self._allocate(size_bytes)
        # The lease itself is what comes back to the ring, with its buffer. This frame holds
        # ``leased``, so the callback cannot run before the lease is complete.
        leased = buffer[:size_bytes]
        lease = Lease(leased, self._free.append)
        lease.buffer = buffer
        self._leases[id(lease)] = lease
        # Arrays over this memory keep ``leased`` alive; arrays made of ``leased`` itself would
        # refer to its base, the buffer, and let it die too early.
        return leased.data
