"""Reading samples, of one shape or of many, raw or encoded, from memory or from files on disk."""

from __future__ import annotations

import itertools
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from fastdata.machine.shared import ArrayBlock, Block
from fastdata.pixels.images import SampleSpec, SourceDecoder, open_libjpeg
from fastdata.stores.files import Bytes, DiskFile

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec

Decoder: TypeAlias = "Codec | SourceDecoder"

_WORD_BYTES = 8
_GAP_BYTES = 64
"""Between samples that are still brought and dropped as one piece: what alignment leaves. Pieces
must not overlap."""


class Store(Protocol):
    """Prepared samples, read by index; sealed, so safe from any number of threads and processes.

    Pickles as a handle. Indices are positions in [0, N); they are checked by the dataset, not here.
    What reads encoded samples raises UndecodableError for one that is damaged; the others can still
    be read.

    Attributes:
        gives_views: whether ``read`` costs nothing, because samples lie there as they are served.
    """

    spec: SampleSpec
    size_bytes: int
    gives_views: bool

    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def read_into(self, index: int, out: np.ndarray) -> None:
        """Put one sample into ``out``, C-contiguous and of its shape."""

    @abstractmethod
    def close(self) -> None:
        """Give back the memory; arrays handed out stay valid. Idempotent."""

    def filled_share(self, index_B: np.ndarray | None = None) -> float:
        """How many of the samples, or of those chosen, are there; 1 where all are."""
        return 1.0

    def expect(self, indices: Sequence[int]) -> None:
        """Say which samples are read next; worth something where they are yet to be prepared."""
        return

    def shape(self, index: int) -> tuple[int, ...]:
        return self.spec.shape or self.read(index).shape

    def shapes(self) -> np.ndarray | None:
        """The shape of every sample, (N, ndim); None where not all are known yet."""
        shape = self.spec.shape
        return None if shape is None else np.broadcast_to(np.array(shape), (len(self), len(shape)))

    def read(self, index: int) -> np.ndarray:
        """One sample, read-only: a view where the store can, else a fresh array."""
        out = np.empty(self.shape(index), self.spec.dtype)
        self.read_into(index, out)
        return out

    def read_all(self, index_B: np.ndarray) -> list[np.ndarray]:
        return list(map(self.read, index_B.tolist()))

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Put samples of one shape into ``out_B`` (B, *shape), C-contiguous."""
        for index, out in zip(index_B.tolist(), out_B, strict=True):
            self.read_into(index, out)


class ShapesDifferError(Exception):
    """A sample does not have the shape that the others have."""


class UndecodableError(Exception):
    """A sample's bytes cannot be decoded; its cause is what the codec raised.

    Attributes:
        index: of the sample.
        codec: name of the codec.
        is_on_disk: whether the bytes are other ones than were written to disk; the message says how
            that is mended.
    """

    def __init__(self, message: str, *, index: int, codec: str, is_on_disk: bool = False) -> None:
        super().__init__(message)
        self.index = index
        self.codec = codec
        self.is_on_disk = is_on_disk


class FileStore(Store):
    """Samples in files: raw, of one shape or each of its own, or the bytes of a codec for each.

    Args:
        files: sealed, unless samples are still to come.
        spec: of the samples as they are served.
        index: by sample ``offsets``, int64 (N,), its first byte. Unless they are raw and of one
            shape, so that they lie as rows of a table, ``sizes``, int64 (N,), its bytes, and
            ``shapes``, int32 (N, ndim). Of several files ``files``, int32 (N,), the one that it is
            in.
        decoder: decodes samples straight into the caller's memory; None for raw ones.
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
        self._decoder = decoder
        self.size_bytes = sum(file.size_bytes for file in files)
        self._dtype = np.dtype(spec.dtype)
        self.gives_views = decoder is None
        self._bytes = [file.array("uint8", (file.size_bytes,)) for file in files]
        for data in self._bytes:
            data.flags.writeable = False
        self._addresses = np.array(
            [data.__array_interface__["data"][0] for data in self._bytes], np.int64
        )
        # Of a table.
        self._row_bytes = spec.sample_bytes if decoder is None and spec.is_dense else 0
        self._offsets = index["offsets"]
        self._shapes = index.get("shapes")
        length = self._offsets.shape
        self._sizes = (
            index["sizes"]
            if "sizes" in index
            else np.broadcast_to(np.int64(spec.sample_bytes), length)
        )
        self._of = index["files"] if "files" in index else np.broadcast_to(np.int32(0), length)

    def __len__(self) -> int:
        return len(self._offsets)

    def shape(self, index: int) -> tuple[int, ...]:
        if self.spec.shape is not None or self._shapes is None:
            return self.spec.shape or ()
        return tuple(self._shapes[index].tolist())

    def shapes(self) -> np.ndarray | None:
        return super().shapes() if self._shapes is None else self._shapes

    def stored(self, index: int) -> Bytes:
        """The bytes of one sample: a read-only view."""
        start = int(self._offsets[index])
        data: Bytes = self._bytes[self._of[index]][start : start + int(self._sizes[index])]
        return data

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        """Where the chosen raw samples lie in memory: int64 (B,)."""
        addresses_B: np.ndarray = self._addresses[self._of[index_B]] + self._offsets[index_B]
        return addresses_B

    def jpeg_files(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Addresses and sizes of samples, int64 (B,), where the core decodes them; else None."""
        if not getattr(self._decoder, "makes_jpeg_files", False) or open_libjpeg()[0] is None:
            return None
        return FileStore.addresses(self, index_B), self._sizes[index_B]

    def read(self, index: int) -> np.ndarray:
        if not self.gives_views:
            return super().read(index)
        data = self._bytes[self._of[index]].data
        shape = self.spec.shape or self.shape(index)
        sample: np.ndarray = np.ndarray(shape, self._dtype, data, self._offsets[index])
        return sample

    def read_into(self, index: int, out: np.ndarray) -> None:
        if self._decoder is None:
            out[...] = self.read(index)
            return
        data = self.stored(index).data
        try:
            self._decoder.decode(data, out)
        except Exception as cause:  # decoders raise anything; all of it is named and kept
            codec = self._decoder.name
            to = f"{out.dtype} {list(out.shape)}"
            what = f"{len(data):,} bytes of codec {codec!r} cannot be decoded to {to}"
            raise UndecodableError(f"{what}: {cause}", index=index, codec=codec) from cause

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Put samples into ``out_B`` (B, *shape); in one call where one table has them."""
        row_bytes = self._row_bytes if len(out_B) else 0
        number = int(self._of[index_B[0]]) if row_bytes else 0
        if not row_bytes or (len(self._bytes) > 1 and (self._of[index_B] != number).any()):
            super().gather_into(index_B, out_B)
            return
        data = self._bytes[number]
        starts_B = self._offsets[index_B]
        first = int(starts_B[0]) % row_bytes
        shape = (len(data) - first) // row_bytes, *out_B.shape[1:]
        table: np.ndarray = np.ndarray(shape, self._dtype, data.data, first)
        np.take(table, (starts_B - first) // row_bytes, axis=0, out=out_B, mode="clip")

    def close(self) -> None:
        self._bytes = []
        vars(self).update(
            {name: it[:0].copy() for name, it in vars(self).items() if isinstance(it, np.ndarray)}
        )
        for file in self.files:
            file.close()
        self.index.close()

    def __reduce__(self) -> tuple[object, ...]:
        return FileStore, (self.files, self.spec, self.index, self._decoder)


class DiskStore(FileStore):
    """Samples in files on disk, each held against its checksum when it is first read.

    Whatever reads a sample raises UndecodableError where its bytes are not those that were written.

    Args:
        files, spec, index, decoder: as of ``FileStore``; by sample also ``sums``, its checksum.
        marks: a byte for each sample that says whether it was read before; made where there are
            none.
    """

    def __init__(
        self,
        files: Sequence[DiskFile],
        spec: SampleSpec,
        index: ArrayBlock,
        decoder: Decoder | None = None,
        marks: ArrayBlock | None = None,
    ) -> None:
        super().__init__(files, spec, index, decoder)
        self._disk_files = tuple(files)
        self.codec = "raw" if decoder is None else decoder.name
        self._sums = index["sums"]
        self._marks = marks or ArrayBlock(
            {"checked": np.zeros(max(len(self), 1), np.uint8)}, seal=False
        )
        self._checked = self._marks["checked"]

    def heaviest_bytes(self, samples: int) -> float:
        """The mean size of those so many neighbours that are the heaviest."""
        ends = np.concatenate(([0], np.cumsum(self._sizes)))
        samples = min(samples, len(self))
        return float((ends[samples:] - ends[: len(ends) - samples]).max() / samples)

    def read(self, index: int) -> np.ndarray:
        self._check(index)
        return super().read(index)

    def read_into(self, index: int, out: np.ndarray) -> None:
        self._check(index)
        super().read_into(index, out)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        super().gather_into(index_B, out_B)
        # Those that were copied in one call.
        unchecked = np.flatnonzero(self._checked[index_B] == 0)
        if len(unchecked):
            self._check_copies(index_B, out_B, unchecked)

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        self.check(index_B)
        return super().addresses(index_B)

    def jpeg_files(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        self.check(index_B)
        return super().jpeg_files(index_B)

    def check(self, index_B: np.ndarray) -> None:
        """Hold those samples that were not read before against their checksums."""
        for index in index_B[self._checked[index_B] == 0].tolist():
            self._check(index)

    def _check(self, index: int) -> None:
        if not self._checked[index]:
            self._enter(index, checksum(self.stored(index)))

    def _check_copies(self, index_B: np.ndarray, out_B: np.ndarray, chosen: np.ndarray) -> None:
        """Hold copies against the checksums; all in one call where rows are whole words."""
        bytes_B = out_B.reshape(len(out_B), -1).view(np.uint8)
        if bytes_B.shape[1] % _WORD_BYTES == 0 and len(chosen) == len(out_B):
            sums_B = bytes_B.view("<u8").sum(axis=1, dtype=np.uint64)
            if (sums_B == self._sums[index_B]).all():
                self._checked[index_B] = 1
                return
        for b in chosen.tolist():
            self._enter(int(index_B[b]), checksum(bytes_B[b]))

    def _enter(self, index: int, found: int) -> None:
        if found == int(self._sums[index]):
            self._checked[index] = 1
            return
        path = self._disk_files[self._of[index]].path
        shard = path.stem.partition("-")[2]
        try:
            path.with_name(receipt_name(shard)).unlink(missing_ok=True)
            cure = "the next run over its source prepares it anew"
        except OSError as problem:
            cure = f"that cannot be noted ({problem.strerror}): build {path.parent} anew"
        what = f"its bytes in {path.parent} are not those that were written"
        text = f"{what} (a failing disk, or a foreign hand); {cure}"
        raise UndecodableError(text, index=index, codec=self.codec, is_on_disk=True)

    # What of the files is in memory

    def bring(self, index_B: np.ndarray) -> None:
        """Have samples in memory until they are dropped, and nothing else; see ``DiskFile``."""
        for file, start, size in self._runs(index_B):
            file.bring(start, size)

    def drop(self, index_B: np.ndarray, *, from_cache: bool = False) -> None:
        """Let go of their memory; those that were brought at once are dropped at once."""
        for file, start, size in self._runs(index_B):
            file.drop(start, size, from_cache=from_cache)

    def release(self) -> None:
        for file in self._disk_files:
            file.release()

    def _runs(self, index_B: np.ndarray) -> Iterator[tuple[DiskFile, int, int]]:
        """File, first byte and size of each piece in which chosen samples lie end to end."""
        numbers = self._of[index_B]
        starts = self._offsets[index_B]
        stops = starts + self._sizes[index_B]
        order = np.lexsort((starts, numbers))
        numbers = numbers[order]
        starts = starts[order]
        ends = stops[order]
        gaps = starts[1:] - ends[:-1]
        cuts = np.flatnonzero((numbers[1:] != numbers[:-1]) | (gaps < 0) | (gaps > _GAP_BYTES)) + 1
        for first, stop in itertools.pairwise(
            [0, *cuts.tolist(), len(order)] if len(order) else []
        ):
            yield (
                self._disk_files[numbers[first]],
                int(starts[first]),
                int(ends[stop - 1] - starts[first]),
            )

    def close(self) -> None:
        super().close()
        self._marks.close()

    def __reduce__(self) -> tuple[object, ...]:
        return DiskStore, (self.files, self.spec, self.index, self._decoder, self._marks)


def receipt_name(shard: str) -> str:
    """Of the file that says that a shard is complete; without it the shard is written anew."""
    return f"shard-{shard}.npz"


def receipts_in(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name.startswith("shard-")}


def checksum(data: Bytes) -> int:
    """Sum of the bytes as little-endian 64-bit words, modulo 2**64, the last filled with zeros.

    Any change within one word is seen, and so are missing and zeroed pages. It runs at 28 GB/s
    where CRC-32 runs at 3, so that every sample can be checked on its first read.

    Example:
        >>> checksum(np.array([1, 0, 0, 0, 0, 0, 0, 0, 2], np.uint8))
        3
    """
    whole = data.size // _WORD_BYTES * _WORD_BYTES
    total = int(data[:whole].view("<u8").sum(dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) & 0xFFFF_FFFF_FFFF_FFFF
