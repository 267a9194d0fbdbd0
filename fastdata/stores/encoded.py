"""Encoded samples end to end in a shared block, each decoded when it is read."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from fastdata.blocks import ArrayBlock, Block
from fastdata.spec import SampleSpec
from fastdata.stores.heap import HeapStore

__all__ = ["Decoder", "EncodedStore", "UndecodableError", "decode_sample"]


class Decoder(Protocol):
    """The half of a codec that reading needs; see ``fastdata.codecs.Codec``."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def decode(self, data: memoryview, out: np.ndarray) -> None:
        """Fill ``out``, C-contiguous and of the sample's shape and dtype."""
        ...


@runtime_checkable
class BatchDecoder(Protocol):
    """A decoder that does many samples for the price of few."""

    def decode_batch(self, data: np.ndarray, starts_B: np.ndarray, sizes_B: np.ndarray, out_B: np.ndarray) -> int:
        """Fill ``out_B`` from those parts of ``data``, uint8, up to the first damaged one; return how many it did."""
        ...


class UndecodableError(Exception):
    """A sample's bytes cannot be decoded; its cause is what the codec raised.

    Attributes:
        index: of the sample.
        codec: name of the codec.
        is_on_disk: whether the bytes are other ones than were written to disk; the message says how that is mended.
    """

    def __init__(self, message: str, *, index: int, codec: str, is_on_disk: bool = False) -> None:
        super().__init__(message)
        self.index, self.codec, self.is_on_disk = index, codec, is_on_disk


def decode_sample(decoder: Decoder, index: int, data: memoryview, out: np.ndarray) -> None:
    """Decode the bytes of one sample.

    Raises:
        UndecodableError: they are damaged.
    """
    try:
        decoder.decode(data, out)
    except Exception as cause:  # decoders raise anything; all of it is named and kept
        codec = decoder.name
        what = f"{len(data):,} bytes of codec {codec!r} cannot be decoded to {out.dtype} {list(out.shape)}"
        raise UndecodableError(f"{what}: {cause}", index=index, codec=codec) from cause


class EncodedStore(HeapStore):
    """Samples as a codec's bytes, decoded straight into the caller's memory.

    Args:
        block: sealed, unless samples are still to come.
        spec: of the decoded samples, dense or ragged.
        decoder: undoes what the samples were encoded with.
        index: ``offsets`` and ``sizes``, int64 (N,), the first byte and the number of bytes of each encoded sample;
            ``shapes``, int32 (N, ndim), of the decoded ones.
    """

    gives_views = False

    def __init__(self, block: Block, spec: SampleSpec, decoder: Decoder, index: ArrayBlock) -> None:
        super().__init__(block, spec, index)
        self._decoder, self._sizes = decoder, index["sizes"]

    def encoded(self, index: int) -> memoryview:
        """The bytes of one sample: a read-only view."""
        start = int(self._offsets[index])
        return self._bytes.data[start : start + int(self._sizes[index])]

    def read(self, index: int) -> np.ndarray:
        """One sample, decoded into fresh memory."""
        out = np.empty(self.shape(index), self._spec.dtype)
        self.read_into(index, out)
        return out

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Decode one sample.

        Raises:
            UndecodableError: its bytes are damaged.
        """
        decode_sample(self._decoder, index, self.encoded(index), out)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Decode the chosen samples, each to its place in ``out_B`` (B, *shape)."""
        decoded = 0
        if isinstance(self._decoder, BatchDecoder):
            decoded = self._decoder.decode_batch(self._bytes, self._offsets[index_B], self._sizes[index_B], out_B)
        for b, index in enumerate(index_B.tolist()[decoded:], decoded):
            self.read_into(index, out_B[b])

    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""
        self._sizes = self._sizes[:0].copy()
        super().close()

    def __reduce__(self) -> tuple[object, ...]:
        return EncodedStore, (self._block, self._spec, self._decoder, self._index)
