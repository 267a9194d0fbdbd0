"""Filling a block with samples, from any worker, and sealing it as a store."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from fastdata.blocks import ArrayBlock, Block
from fastdata.codecs import Codec, SourceDecoder
from fastdata.errors import MemoryBudgetError
from fastdata.locks import ByteLocks
from fastdata.memory import format_bytes
from fastdata.spec import SampleSpec
from fastdata.stores.base import Store
from fastdata.stores.encoded import EncodedStore
from fastdata.stores.raw import DenseStore, RaggedStore

__all__ = [
    "ALIGN_BYTES",
    "DenseWriter",
    "EncodedWriter",
    "FileWriter",
    "Place",
    "Places",
    "RaggedWriter",
    "ShapesDifferError",
    "Writer",
]

ALIGN_BYTES = 64
"""Each raw sample of a shape of its own begins at a multiple of these."""
_GROWTH = 1 / 16


class Place(NamedTuple):
    """Where a sample lies: its row in a dense block or else its first byte; its bytes there; its shape."""

    start: int
    size_bytes: int
    shape: tuple[int, ...]


class Places(NamedTuple):
    """Where all samples of a store lie: int64 (N,), int64 (N,), int32 (N, dimensions)."""

    starts: np.ndarray
    sizes: np.ndarray
    shapes: np.ndarray


class ShapesDifferError(Exception):
    """A sample does not have the shape that the others have."""


class Writer(Protocol):
    """Puts prepared samples into a block, from any process that was forked with it or any thread."""

    spec: SampleSpec

    def write(self, index: int, array: np.ndarray) -> Place:
        """Store sample ``index``; it is there when ``flush`` returns."""
        ...

    def flush(self) -> None:
        """Finish what this thread has written."""
        ...

    def live(self, index: ArrayBlock) -> Store:
        """A store over the block while it is written to; what is not in the index yet must not be read.

        Args:
            index: ``offsets``, ``sizes`` and ``shapes`` as in ``Places``, filled in by the caller.
        """
        ...

    def finish(self, places: Places) -> Store:
        """Seal the block as a store of the samples that lie there, in that order; the store owns it from then on."""
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
        return Place(index, array.nbytes, array.shape)

    def rows(self, first: int, count: int) -> np.ndarray:
        """The memory of samples ``first`` to ``first + count``, to be written to: (count, *shape)."""
        assert self.spec.shape is not None
        return self._block.array(self.spec.dtype, (count, *self.spec.shape), first * self.spec.sample_bytes)

    def rewind(self) -> None:
        """Forget what was written; the memory is written again. Nobody may be reading it."""

    def flush(self) -> None:
        """See ``Writer``: everything is there at once."""

    def live(self, index: ArrayBlock) -> DenseStore:
        """See ``Writer``."""
        return DenseStore(self._block, self.spec, length=self._length)

    def finish(self, places: Places) -> DenseStore:
        """See ``Writer``."""
        self._block.seal()
        rows = None if len(places.starts) == self._length else places.starts
        return DenseStore(self._block, self.spec, length=len(places.starts), rows=rows)

    def close(self) -> None:
        """See ``Writer``."""
        self._block.close()


class _Heap:
    """A block in which samples lie in the order in which they are written; it grows as their sizes become known.

    Args:
        first_bytes: reserved at once.
        limit_bytes: the most that may be reserved.
        needed_for: what lies there, for the error.
    """

    def __init__(self, *, first_bytes: int, limit_bytes: int, needed_for: str) -> None:
        self._limit_bytes = limit_bytes
        self._needed_for = needed_for
        self._step_bytes = max(int(first_bytes * _GROWTH), 1 << 20)
        self.block = Block.create(max(min(first_bytes, limit_bytes), 1))
        self._state_block = ArrayBlock({"used and reserved": np.array([0, self.block.size_bytes])}, seal=False)
        self._open()

    def _open(self) -> None:
        self._state = self._state_block["used and reserved"]  # bytes; shared by all workers
        self._locks = ByteLocks(self._state_block.block)

    def append(self, data: np.ndarray, align_bytes: int = 1) -> int:
        """Copy an array behind what is there, and return its first byte.

        Raises:
            MemoryBudgetError: there is no room left within the limit.
        """
        with self._locks.hold(0):
            start, reserved_bytes = self._state.tolist()
            end = start + -(-data.nbytes // align_bytes) * align_bytes
            if end > reserved_bytes:
                self._grow(end)
            self._state[0] = end
        self.block.write(start, data)
        return int(start)

    def _grow(self, end: int) -> None:
        if end > self._limit_bytes:
            raise MemoryBudgetError(
                f"{self._needed_for} need more than the {format_bytes(self._limit_bytes)} that is free"
            )
        size_bytes = min(end + self._step_bytes, self._limit_bytes)
        self.block.grow(size_bytes)
        self._state[1] = size_bytes

    def seal(self) -> None:
        """Give back what was not used; the block is the caller's then."""
        used_bytes, reserved_bytes = self._state.tolist()
        self.block.grow(reserved_bytes)
        self.block.trim(used_bytes)
        self.block.seal()
        self._state_block.close()

    def rewind(self) -> None:
        """Begin again at the first byte, in the same memory."""
        self._state[0] = 0

    def close(self) -> None:
        """Give up all of it. Idempotent."""
        self.block.close()
        self._state_block.close()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_state", "_locks")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()


class RaggedWriter:
    """Samples of any shapes as they are, each beginning at a multiple of 64 bytes.

    Args:
        spec: ragged.
        first_bytes: reserved at once.
        limit_bytes: the most that may be reserved.
    """

    def __init__(self, spec: SampleSpec, *, first_bytes: int, limit_bytes: int) -> None:
        self.spec = spec
        needed_for = "prepared samples of many shapes"
        self._heap = _Heap(first_bytes=first_bytes, limit_bytes=limit_bytes, needed_for=needed_for)

    def write(self, index: int, array: np.ndarray) -> Place:
        """Store a sample behind those already there.

        Raises:
            MemoryBudgetError: there is no room left within the limit.
        """
        start = self._heap.append(np.ascontiguousarray(array), ALIGN_BYTES)
        return Place(start, array.nbytes, array.shape)

    def rewind(self) -> None:
        """Forget what was written; the memory is written again. Nobody may be reading it."""
        self._heap.rewind()

    def flush(self) -> None:
        """See ``Writer``: everything is there at once."""

    def live(self, index: ArrayBlock) -> RaggedStore:
        """See ``Writer``."""
        return RaggedStore(self._heap.block, self.spec, index)

    def finish(self, places: Places) -> RaggedStore:
        """See ``Writer``."""
        self._heap.seal()
        return self.live(ArrayBlock({"offsets": places.starts, "shapes": places.shapes}))

    def close(self) -> None:
        """See ``Writer``."""
        self._heap.close()


class EncodedWriter:
    """Samples encoded by a codec, end to end.

    Args:
        spec: of the samples before they are encoded; dense if all have one shape.
        codec: encodes them.
        first_bytes: reserved at once.
        limit_bytes: the most that may be reserved.
    """

    def __init__(self, spec: SampleSpec, codec: Codec, *, first_bytes: int, limit_bytes: int) -> None:
        self.spec = spec
        self._codec = codec
        needed_for = f"samples encoded by codec={codec.name!r}"
        self._heap = _Heap(first_bytes=first_bytes, limit_bytes=limit_bytes, needed_for=needed_for)

    def write(self, index: int, array: np.ndarray) -> Place:
        """Encode a sample and store it behind those already there.

        Raises:
            MemoryBudgetError: there is no room left within the limit.
            ShapesDifferError: it is not of the common shape.
        """
        if self.spec.shape not in (None, array.shape):
            raise ShapesDifferError(f"sample {index} has shape {array.shape}, those before it {self.spec.shape}")
        data = np.frombuffer(self._codec.encode(np.ascontiguousarray(array)), np.uint8)
        return Place(self._heap.append(data), data.nbytes, array.shape)

    def flush(self) -> None:
        """See ``Writer``: everything is there at once."""

    def live(self, index: ArrayBlock) -> EncodedStore:
        """See ``Writer``."""
        return EncodedStore(self._heap.block, self.spec, self._codec, index)

    def finish(self, places: Places) -> EncodedStore:
        """See ``Writer``."""
        self._heap.seal()
        return self.live(ArrayBlock({"offsets": places.starts, "sizes": places.sizes, "shapes": places.shapes}))

    def close(self) -> None:
        """See ``Writer``."""
        self._heap.close()


class FileWriter:
    """The bytes of image files as they are, end to end; each sample is prepared when it is read.

    Args:
        spec: of the prepared samples.
        decoder: prepares them.
        is_certain: whether the spec is dense for sure; else every file is opened once to learn its sample's shape.
        first_bytes: reserved at once.
        limit_bytes: the most that may be reserved.
    """

    spec = SampleSpec(shape=None, dtype="uint8", form="array")
    """Of what is written."""

    def __init__(
        self, spec: SampleSpec, decoder: SourceDecoder, *, is_certain: bool, first_bytes: int, limit_bytes: int
    ) -> None:
        self._prepared_spec, self._is_certain = spec, is_certain
        self._decoder = decoder
        self._heap = _Heap(first_bytes=first_bytes, limit_bytes=limit_bytes, needed_for="the files' own bytes")

    def write(self, index: int, array: np.ndarray) -> Place:
        """Store a file's bytes behind those already there.

        Raises:
            MemoryBudgetError: there is no room left within the limit.
            ShapesDifferError: the file was opened, and its sample is not of the common shape.
            Exception: the file was opened and is damaged.
        """
        common = self._prepared_spec.shape
        shape = common if self._is_certain and common is not None else self._decoder.sample(array.data).shape
        if common not in (None, shape):
            raise ShapesDifferError(f"sample {index} has shape {shape}, those before it {common}")
        return Place(self._heap.append(array), array.nbytes, shape)

    def flush(self) -> None:
        """See ``Writer``: everything is there at once."""

    def live(self, index: ArrayBlock) -> EncodedStore:
        """See ``Writer``."""
        return EncodedStore(self._heap.block, self._prepared_spec, self._decoder, index)

    def finish(self, places: Places) -> EncodedStore:
        """See ``Writer``."""
        self._heap.seal()
        return self.live(ArrayBlock({"offsets": places.starts, "sizes": places.sizes, "shapes": places.shapes}))

    def close(self) -> None:
        """See ``Writer``."""
        self._heap.close()
