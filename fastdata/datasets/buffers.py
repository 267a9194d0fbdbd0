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


def rows_of(images: torch.Tensor, kind: type) -> Sequence[Any]:
    """The images of a batch, views of it."""
    if kind is np.ndarray:
        arrays = images.numpy()
        return [arrays[row, ...] for row in range(len(arrays))]
    rows = images.unbind(0)
    return rows if kind is torch.Tensor else [row.as_subclass(kind) for row in rows]


ALIGN_BYTES = 64


Output = tuple[Shape, np.dtype[Any]]

Allocate = Callable[[int], memoryview]


def allocate_batch(
    count: int, outputs: list[Output], allocate: Allocate, *, channels_last: bool = False
) -> list[Array]:
    """Memory for so many samples of each shape and dtype, all in one piece.

    (B, C, h, w) may lie as (B, h, w, C).
    """
    pieces = []
    end = 0
    for shape, dtype in outputs:
        length = count * math.prod(shape)
        pieces.append((shape, dtype, length, end))
        end += -(-length * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
    memory = allocate(end)
    arrays = []
    for shape, dtype, length, start in pieces:
        values = np.frombuffer(memory, dtype, length, start)
        if channels_last:
            channels, height, width = shape
            arrays.append(values.reshape(count, height, width, channels).transpose(0, 3, 1, 2))
        else:
            arrays.append(values.reshape(count, *shape))
    return arrays


def new_buffer(size_bytes: int) -> memoryview:
    """Memory that nobody takes back."""
    return np.empty(size_bytes, np.uint8).data


# Memory that is reused


class Lease(weakref.ref[np.ndarray]):
    """A reference to an array that was leased; its callback runs no line of Python.

    In one, Ctrl-C would be an error that is printed and forgotten, and the training loop would go
    on.
    """

    __slots__ = ("buffer", "set_state")
    buffer: Array
    set_state: Callable[[int], None]


class BatchRing:
    """Up to ``slots`` buffers, each lent as an array until that array dies.

    They are ordinary memory, or ``allocate(size_bytes)`` gives a uint8 array of that size; it is
    called from the threads that take.
    Safe from several threads: a buffer is taken and given back by single deque operations, because
    an array may die at any moment, also in a thread that is just taking one.
    """

    def __init__(self, slots: int, allocate: Callable[[int], Array] | None = None) -> None:
        self._allocate = allocate or partial(np.empty, dtype=np.uint8)
        self._free: deque[Lease | None] = deque([None] * slots)  # None: of no buffer yet
        self._leases: dict[int, Lease] = {}  # by id, those that came back too
        self._slots = slots
        self.fresh_count = 0  # how often all slots were lent and the batch got memory of its own

    def __reduce__(self) -> Any:
        """A copy lends memory of its own."""
        return BatchRing, (self._slots,)

    @property
    def bytes_held(self) -> int:
        return sum(lease.buffer.nbytes for lease in list(self._leases.values()))

    def lease(self, size_bytes: int) -> memoryview:
        """Memory that is lent as long as anything over it lives."""
        try:
            lease = self._free.pop()
        except IndexError:
            self.fresh_count += 1
            return new_buffer(size_bytes)
        buffer = None if lease is None else self._leases.pop(id(lease)).buffer
        if buffer is None or buffer.nbytes < size_bytes:
            buffer = self._allocate(size_bytes)
        leased = buffer[:size_bytes]
        lease = Lease(leased, self._free.append)
        lease.buffer = buffer
        self._leases[id(lease)] = lease
        return leased.data  # arrays over it refer to it, those over the array to the buffer
