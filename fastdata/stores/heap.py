"""What stores of samples that lie end to end in a shared block have in common."""

from __future__ import annotations

from fastdata.blocks import ArrayBlock, Block
from fastdata.spec import SampleSpec

__all__ = ["HeapStore"]


class HeapStore:
    """Where each sample begins in a block, and its shape; how it is read from there is its subclasses' to say.

    Args:
        block: sealed, unless samples are still to come.
        spec: of the samples as they are served.
        index: ``offsets``, int64 (N,), the first byte of each sample; ``shapes``, int32 (N, ndim).
    """

    def __init__(self, block: Block, spec: SampleSpec, index: ArrayBlock) -> None:
        self._block, self._spec, self._index = block, spec, index
        self._bytes = block.array("uint8", (block.size_bytes,))
        self._bytes.flags.writeable = False
        self._offsets, self._shapes = index["offsets"], index["shapes"]

    @property
    def spec(self) -> SampleSpec:
        """Shape, dtype and form of the samples as they are served."""
        return self._spec

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the samples take."""
        return self._block.size_bytes

    def __len__(self) -> int:
        return len(self._offsets)

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one sample."""
        return self._spec.shape or tuple(self._shapes[index].tolist())

    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""
        self._bytes = self._bytes[:0].copy()  # no view: a view would keep the mapping
        self._offsets, self._shapes = self._offsets[:0].copy(), self._shapes[:0].copy()
        self._block.close()
        self._index.close()
