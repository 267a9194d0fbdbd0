"""Reused host memory for batches."""

from __future__ import annotations

import threading

import numpy as np
import torch

from fastdata.datasets.buffers import BatchRing, allocate_batch

UINT8 = np.dtype("uint8")


def taken(ring: BatchRing, shape: tuple[int, ...], dtype: np.dtype = UINT8) -> np.ndarray:
    """Return an array over memory of the ring."""
    [array] = allocate_batch(shape[0], [(shape[1:], dtype)], ring.lease)
    return array


def test_memory_returns_when_the_last_tensor_is_freed() -> None:
    """A buffer is reused only after every tensor over it, including views, is gone."""
    ring = BatchRing(1)
    tensor = torch.from_numpy(taken(ring, (2, 3)))
    address, view = tensor.data_ptr(), tensor[1:]
    del tensor
    assert taken(ring, (2, 3)).ctypes.data != address
    del view
    assert taken(ring, (2, 3)).ctypes.data == address


def test_a_held_batch_is_never_overwritten() -> None:
    """Batches that the user holds keep their values however many more are leased."""
    ring = BatchRing(2)
    held = []
    for value in range(6):
        array = taken(ring, (4,))
        array[:] = value
        held.append(torch.from_numpy(array))
    assert [tensor.tolist() for tensor in held] == [[value] * 4 for value in range(6)]
    assert ring.fresh_count == 4


def test_a_smaller_batch_reuses_a_larger_buffer_and_a_larger_one_replaces_it() -> None:
    """The last batch of an epoch needs no new memory, also with another dtype."""
    ring = BatchRing(1)
    address = taken(ring, (8, 4)).ctypes.data
    small = taken(ring, (2,), np.dtype("float32"))
    assert (small.ctypes.data, small.dtype, small.shape) == (address, np.float32, (2,))
    del small
    assert taken(ring, (100,)).shape == (100,)
    assert ring.fresh_count == 0


def test_threads_never_share_a_buffer() -> None:
    """Two threads that lease and drop buffers see only their own values."""
    ring = BatchRing(3)
    wrong: list[int] = []

    def use(value: int) -> None:
        for _ in range(2000):
            array = taken(ring, (64,))
            array[:] = value
            if not (array == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=use, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_buffers_come_from_the_given_allocator() -> None:
    """A buffer that is too small is replaced by a larger one; a leased one stays."""
    made: list[int] = []

    def allocate(size_bytes: int) -> np.ndarray:
        made.append(size_bytes)
        return np.empty(size_bytes, np.uint8)

    ring = BatchRing(2, allocate)
    held = taken(ring, (128,))
    del held
    larger = taken(ring, (192,))
    taken(ring, (2,))
    assert made == [128, 192, 64]  # in whole cache lines
    assert ring.bytes_held == 256
    assert larger.nbytes == 192
