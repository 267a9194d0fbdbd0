"""Memory for batches: allocated in one piece, and reused once its last tensor is freed.

New memory makes batches slow, because the kernel maps and clears every page before it is written. A
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
"""A cache line. Each piece of a buffer begins at a multiple of it."""
Output = tuple[Shape, np.dtype[Any]]
"""Shape and dtype of a sample in a batch."""
Allocate = Callable[[int], memoryview]
"""Function that takes a number of bytes and returns memory of that size."""


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
    """Return memory that is used only once."""
    return np.empty(size_bytes, np.uint8).data


def rows_of(images: torch.Tensor, kind: type) -> Sequence[Any]:
    """Return the samples of a batch as views of it, of a class such as ``tv_tensors.Image``."""
    if kind is np.ndarray:
        arrays = images.numpy()
        return [arrays[row, ...] for row in range(len(arrays))]
    rows = images.unbind(0)
    return rows if kind is torch.Tensor else [row.as_subclass(kind) for row in rows]


class Lease(weakref.ref[np.ndarray]):
    """A weak reference to a leased array, with the values that its callback needs.

    The callback must be a function in C. Ctrl-C could interrupt Python code in it: the exception
    would be printed and ignored, and the training loop would continue.

    Attributes:
        buffer: memory of the array.
        set_state: function that sets the state of a slot, which another process reads.
    """

    __slots__ = ("buffer", "set_state")
    buffer: Array
    set_state: Callable[[int], None]


class BatchRing:
    """Up to ``slots`` buffers, each leased as an array until that array is freed.

    Safe to use from several threads.

    Args:
        slots: number of buffers.
        allocate: function that takes a number of bytes and returns a uint8 array. It is called in
            the thread that leases. Default: ordinary memory.

    Attributes:
        fresh_count: number of batches that got new memory, because all slots were leased.
    """

    def __init__(self, slots: int, allocate: Callable[[int], Array] | None = None) -> None:
        self._allocate = allocate or partial(np.empty, dtype=np.uint8)
        # An array may be freed at any moment, even in a thread that is about to lease a buffer. So
        # a buffer is taken and returned by single operations of a deque, which are atomic. (A lock
        # could be held by the same thread already.)
        self._free: deque[Lease | None] = deque([None] * slots)  # None for a slot without buffer
        # By id. This keeps the leases alive: Python never calls the callback of a weak reference
        # that has been freed itself.
        self._leases: dict[int, Lease] = {}
        self._slots = slots
        self.fresh_count = 0

    def __reduce__(self) -> Any:
        """Pickle as a new ring, without the memory."""
        return BatchRing, (self._slots,)

    @property
    def bytes_held(self) -> int:
        # A list is made in one step, because other threads may lease buffers during the sum.
        return sum(lease.buffer.nbytes for lease in list(self._leases.values()))

    def lease(self, size_bytes: int) -> memoryview:
        """Return memory that returns to the ring when the last array or tensor over it is freed."""
        try:
            lease = self._free.pop()
        except IndexError:
            self.fresh_count += 1
            return new_buffer(size_bytes)
        buffer = None if lease is None else self._leases.pop(id(lease)).buffer
        if buffer is None or buffer.nbytes < size_bytes:
            buffer = self._allocate(size_bytes)
        # The lease itself returns to the ring, with its buffer. This frame holds ``leased``, so the
        # callback cannot run before the lease is complete.
        leased = buffer[:size_bytes]
        lease = Lease(leased, self._free.append)
        lease.buffer = buffer
        self._leases[id(lease)] = lease
        # Arrays over this memoryview keep ``leased`` alive. NumPy views of ``leased`` itself would
        # refer only to its base, the buffer, and ``leased`` would be freed too early.
        return leased.data
