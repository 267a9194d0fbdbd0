"""Filling a block with samples, from any worker, and sealing it as a store."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Protocol

import numpy as np

from fastdata.blocks import Block
from fastdata.errors import MemoryBudgetError
from fastdata.memory import format_bytes
from fastdata.spec import SampleSpec
from fastdata.stores.base import Store
from fastdata.stores.raw import DenseStore, RaggedStore

__all__ = ["DenseWriter", "Place", "RaggedWriter", "ShapesDifferError", "Writer", "padded_bytes"]

_ALIGN_BYTES = 64
_GROWTH = 1 / 16

Place = tuple[int, tuple[int, ...]]
"""Where a sample lies, its row in a dense block or its first byte in a ragged one; and its shape."""


class ShapesDifferError(Exception):
    """A sample does not have the shape that the others have."""


class Writer(Protocol):
    """Puts prepared samples into a block, from any process that was forked with it or any thread."""

    spec: SampleSpec

    def write(self, index: int, array: np.ndarray) -> Place:
        """Store sample ``index``."""
        ...

    def finish(self, places_N: np.ndarray, shapes_N: np.ndarray) -> Store:
        """Seal the block as a store of the samples that lie there, in that order; the store owns it from then on.

        Args:
            places_N: int64.
            shapes_N: int32 (N, dimensions).
        """
        ...

    def close(self) -> None:
        """Give up what was written. Idempotent."""
        ...


class DenseWriter:
    """Sample i goes to row i.

    Args:
        spec: dense.
        length: number of samples.
    """

    def __init__(self, spec: SampleSpec, length: int) -> None:
        self.spec = spec
        self._length = length
        self._block = Block.create(max(spec.sample_bytes * length, 1))

    def write(self, index: int, array: np.ndarray) -> Place:
        """Store sample ``index``.

        Raises:
            ShapesDifferError: it is not of the common shape.
        """
        if array.shape != self.spec.shape:
            raise ShapesDifferError(f"sample {index} has shape {array.shape}, those before it {self.spec.shape}")
        self._block.write(index * self.spec.sample_bytes, np.ascontiguousarray(array))
        return index, array.shape

    def finish(self, places_N: np.ndarray, shapes_N: np.ndarray) -> DenseStore:
        """See ``Writer``."""
        self._block.seal()
        rows = None if len(places_N) == self._length else places_N
        return DenseStore(self._block, self.spec, length=len(places_N), rows=rows)

    def close(self) -> None:
        """See ``Writer``."""
        self._block.close()


class RaggedWriter:
    """Samples lie in the order in which they are written; the block grows as their sizes become known.

    Args:
        spec: ragged.
        first_bytes: reserved at once.
        limit_bytes: the most that may be reserved.
    """

    def __init__(self, spec: SampleSpec, *, first_bytes: int, limit_bytes: int) -> None:
        self.spec = spec
        self._limit_bytes = limit_bytes
        self._step_bytes = max(int(first_bytes * _GROWTH), 1 << 20)
        self._lock = multiprocessing.get_context("fork").Lock() if hasattr(os, "fork") else threading.Lock()
        self._block = Block.create(max(min(first_bytes, limit_bytes), 1))
        self._state_block = Block.create(16)
        self._state = self._state_block.array("int64", (2,))  # bytes used, bytes reserved; shared by all workers
        self._state[1] = self._block.size_bytes

    def write(self, index: int, array: np.ndarray) -> Place:
        """Store a sample behind those already there.

        Raises:
            MemoryBudgetError: there is no room left within the limit.
        """
        with self._lock:
            start, reserved_bytes = self._state.tolist()
            end = start + padded_bytes(array.nbytes)
            if end > reserved_bytes:
                self._grow(end)
            self._state[0] = end
        self._block.write(start, np.ascontiguousarray(array))
        return int(start), array.shape

    def _grow(self, end: int) -> None:
        if end > self._limit_bytes:
            raise MemoryBudgetError(
                f"prepared samples of many shapes need more than the {format_bytes(self._limit_bytes)} that is free. "
                f"Use resize=, storage='none', or a higher memory_limit=."
            )
        size_bytes = min(end + self._step_bytes, self._limit_bytes)
        self._block.grow(size_bytes)
        self._state[1] = size_bytes

    def finish(self, places_N: np.ndarray, shapes_N: np.ndarray) -> RaggedStore:
        """See ``Writer``."""
        used_bytes, reserved_bytes = self._state.tolist()
        self._block.grow(reserved_bytes)
        self._block.trim(used_bytes)
        self._block.seal()
        self._state_block.close()
        return RaggedStore(self._block, self.spec, offsets=places_N, shapes=shapes_N)

    def close(self) -> None:
        """See ``Writer``."""
        self._block.close()
        self._state_block.close()


def padded_bytes(size_bytes: int) -> int:
    """Room that a sample of so many bytes takes in a ragged block, whose samples begin at multiples of 64 bytes."""
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
