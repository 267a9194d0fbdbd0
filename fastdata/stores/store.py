"""Stores: prepared samples in memory or files, read by index.

The index of a store (offset, size and shape of each sample) is an ``ArrayBlock``, so that all
processes share one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fastdata.errors import FastDataError, SampleError
from fastdata.machine.blocks import ArrayBlock, Block
from fastdata.pixels.arrays import Array, Bytes, Shape
from fastdata.pixels.decode import open_libjpeg
from fastdata.pixels.samples import SampleSpec, addresses_of

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec
    from fastdata.stores.source_codec import SourceDecoder

Decoder: TypeAlias = "Codec | SourceDecoder"


class ShapesDifferError(FastDataError, ValueError):
    """A sample does not have the shape that the probed samples have; see ``write_any_shapes``."""


class Store:
    """Prepared samples in memory or files, read by index. Pickles as a handle.

    Samples are raw, of one shape or of many, or they are encoded by a codec. A store is sealed, so
    any number of threads and processes can read it at once. Indices are positions in [0, N). The
    dataset checks them; the store does not. Every method that reads raises a SampleError, without a
    path, for a damaged sample; the others can still be read.

    Args:
        files: files or memory of the samples. They are sealed, unless samples are still written.
        spec: shape, dtype and form of the samples that are returned.
        index: columns with a row for each sample. ``offsets``, int64 (N,): its first byte.
            ``sizes``, int64 (N,): its size in bytes. ``shapes``, int32 (N, ndim). ``files``, int32
            (N,): the number of its file; missing if there is only one file.
        decoder: decoder of samples into the caller's memory; None for raw samples.

    Attributes:
        gives_views: True if samples are raw, so that ``read`` copies nothing.
        shapes: shape of each sample, (N, ndim).
        size_bytes: size of all files together.
    """

    def __init__(
        self,
        files: Sequence[Block],
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None = None,
    ) -> None:
        self.files = tuple(files)
        self.spec = spec
        self.index = index
        self.gives_views = decoder is None
        self.size_bytes = sum(file.size_bytes for file in files)
        self._decoder = decoder
        mapped = [file.array("uint8", (file.size_bytes,)) for file in files]
        for data in mapped:
            data.flags.writeable = False
        self._bytes = dict(enumerate(mapped))
        self._addresses = addresses_of(mapped)
        self._offsets = index["offsets"]
        self._sizes = index["sizes"]
        self.shapes = index["shapes"]
        self._file_of = index.get("files", np.broadcast_to(np.int32(0), len(self)))
        # Raw samples of one shape are rows of a table in each file, with this many bytes in a row.
        self._row_bytes = 0
        if decoder is None and spec.shape is not None:
            self._row_bytes = spec.sample_bytes

    @property
    def codec(self) -> str:
        """Name of the codec of the samples."""
        return "raw" if self._decoder is None else self._decoder.name

    def filled_share(self, index_B: Array | None = None) -> float:
        """Return the share of all samples, or of those with ``index_B``, that is prepared."""
        return 1.0

    def expect(self, indices: Sequence[int]) -> None:
        """Begin to fetch the files of those samples that still have to be prepared."""

    def ensure(self, index_B: Array) -> None:
        """Check before a read that samples exist and have not changed since they were written.

        Raises:
            SampleError: a sample is damaged, or cannot be prepared.
        """

    def __len__(self) -> int:
        return len(self._offsets)

    def shape(self, index: int) -> Shape:
        return self.spec.shape or tuple(self.shapes[index].tolist())

    def stored(self, index: int) -> Bytes:
        """Return the bytes of one sample as a read-only view."""
        start = int(self._offsets[index])
        stop = start + int(self._sizes[index])
        return self._file_bytes(self._file_of[index])[start:stop]

    def _file_bytes(self, number: int) -> Bytes:
        """Return the bytes of a file, mapped into memory."""
        return self._bytes[number]

    def addresses(self, index_B: Array) -> Array:
        """Return the addresses of raw samples in memory, int64 (B,)."""
        self.ensure(index_B)
        addresses_B: Array = self._addresses[self._file_of[index_B]] + self._offsets[index_B]
        return addresses_B

    def jpeg_files(self, index_B: Array) -> tuple[Array, Array] | None:
        """Return the addresses and sizes of the samples' JPEG files, each int64 (B,).

        Return None if the samples are not JPEG files, or libjpeg cannot be loaded.
        """
        decoder = self._decoder
        if decoder is None or not decoder.makes_jpeg_files or open_libjpeg()[0] is None:
            return None
        return self.addresses(index_B), self._sizes[index_B]

    def read(self, index: int) -> Array:
        """Return one sample: a read-only view if samples are raw, otherwise a new array."""
        if self.gives_views:
            self.ensure(np.array([index]))
            return self._view(index)
        out = np.empty(self.shape(index), self.spec.dtype)
        self.read_into(index, out)
        return out

    def _view(self, index: int) -> Array:
        return self.stored(index).view(self.spec.dtype).reshape(self.shape(index))

    def read_into(self, index: int, out: Array) -> None:
        """Copy or decode one sample into ``out``, a C-contiguous array of the sample's shape."""
        self.ensure(np.array([index]))
        if self._decoder is None:
            out[...] = self._view(index)
            return
        data = self.stored(index).data
        try:
            self._decoder.decode(data, out)
        except MemoryError:  # the sample is not at fault
            raise
        except Exception as cause:  # decoders raise anything
            raise SampleError(
                f"{len(data):,} bytes of codec {self.codec!r} in the store cannot be decoded: "
                f"{cause}",
                index=index,
            ) from cause

    def gather_into(self, index_B: Array, out_B: Array) -> None:
        """Copy or decode samples of one shape into ``out_B`` (B, *shape), C-contiguous."""
        if self._decoder is not None:
            for b, index in enumerate(index_B.tolist()):
                self.read_into(index, out_B[b, ...])  # out_B[b] may be a scalar, this is a view
            return
        self.ensure(index_B)
        file_B = self._file_of[index_B]
        is_one_table = self._row_bytes and len(file_B) and (file_B == file_B[0]).all()
        if not is_one_table:
            for b, index in enumerate(index_B.tolist()):
                out_B[b] = self._view(index)
            return
        # All samples are rows of one table, and one call copies them: 256 samples of 32 x 32 px in
        # a tenth of the time. The table begins after the header of its file.
        starts_B = self._offsets[index_B]
        data = self._file_bytes(int(file_B[0]))
        head_bytes = starts_B[0] % self._row_bytes
        length = (data.size - head_bytes) // self._row_bytes
        table = np.ndarray((length, *out_B.shape[1:]), self.spec.dtype, data.data, head_bytes)
        np.take(table, starts_B // self._row_bytes, axis=0, out=out_B, mode="clip")

    def close(self) -> None:
        """Close the files. After that, nothing can be read. Idempotent."""
        # A mapping exists as long as an array over it, so arrays that were returned stay valid.
        self._bytes.clear()
        for file in self.files:
            file.close()
        self.index.close()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.files, self.spec, self.index, self._decoder)
