"""Reading samples: dense ones, which have one shape; ragged ones, encoded or not; and either from files on disk."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from fastdata.images import SampleSpec, SourceDecoder
from fastdata.shared import ArrayBlock, Block
from fastdata.stores.files import Bytes, DiskFile

if TYPE_CHECKING:
    from fastdata.codecs import Codec

Decoder: TypeAlias = "Codec | SourceDecoder"

DAMAGE_PREFIX = "damaged-"
"""Of the empty files that name rows found damaged, for the next run to prepare anew."""
_WORD_BYTES = 8
_GAP_BYTES = 64
"""Between samples that are still brought and dropped as one piece: what alignment leaves. Pieces must not overlap."""


class Store(Protocol):
    """Prepared samples, read by index; sealed, so safe from any number of threads and processes.

    Pickles as a handle. Indices are positions in [0, N); they are checked by the dataset, not here. What reads encoded
    samples raises UndecodableError for one that is damaged; the others can still be read.

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

    def shape(self, index: int) -> tuple[int, ...]:
        return self.spec.shape or self.read(index).shape

    def read(self, index: int) -> np.ndarray:
        """One sample, read-only: a view where the store can, else a fresh array."""
        out = np.empty(self.shape(index), self.spec.dtype)
        self.read_into(index, out)
        return out

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Put the chosen samples into ``out_B`` (B, *shape), C-contiguous; only where all have one shape."""
        for index, out in zip(index_B.tolist(), out_B, strict=True):
            self.read_into(index, out)


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


class _FileStore(Store):
    """Samples end to end in one file, which is sealed unless samples are still to come."""

    def __init__(self, file: Block, spec: SampleSpec, index: ArrayBlock | None) -> None:
        self.file, self.spec, self.size_bytes, self._index = file, spec, file.size_bytes, index
        self._bytes: Bytes = file.array("uint8", (file.size_bytes,))
        self._bytes.flags.writeable = False

    @property
    def address(self) -> int:
        """Where the file's first byte is in memory."""
        address: int = self._bytes.__array_interface__["data"][0]
        return address

    @abstractmethod
    def spans(self, index_B: Any) -> tuple[np.ndarray, np.ndarray]:
        """First byte in the file and number of bytes of the chosen samples: int64 (B,) each."""

    def stored(self, index: int) -> Bytes:
        """The bytes of one sample: a read-only view."""
        start, size = map(int, self.spans(index))
        return self._bytes[start : start + size]

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        """Where the chosen raw samples lie in memory: int64 (B,)."""
        addresses_B: np.ndarray = self.address + self.spans(index_B)[0]
        return addresses_B

    def close(self) -> None:
        let_go(self)
        self.file.close()
        if self._index is not None:
            self._index.close()


class DenseStore(_FileStore):
    """Samples of one shape: one array (rows, *shape).

    Args:
        file: row r starts at byte ``head_bytes + r * spec.sample_bytes``.
        spec: dense.
        length: number of rows.
        index: ``rows``, int64 (N,), the row of each sample where some are not in use (skipped samples), else None.
        head_bytes: before the first row.
    """

    gives_views = True

    def __init__(
        self, file: Block, spec: SampleSpec, length: int, index: ArrayBlock | None = None, head_bytes: int = 0
    ) -> None:
        super().__init__(file, spec, index)
        assert spec.shape is not None
        self._samples = file.array(spec.dtype, (length, *spec.shape), head_bytes)
        self._samples.flags.writeable = False
        self._rows = None if index is None else index["rows"]
        self._length, self._head_bytes = length, head_bytes

    def __len__(self) -> int:
        return len(self._samples if self._rows is None else self._rows)

    def spans(self, index_B: Any) -> tuple[np.ndarray, np.ndarray]:
        rows_B = index_B if self._rows is None else self._rows[index_B]
        starts_B: np.ndarray = self._head_bytes + rows_B * self.spec.sample_bytes
        return starts_B, np.full_like(starts_B, self.spec.sample_bytes)

    def read(self, index: int) -> np.ndarray:
        sample: np.ndarray = self._samples[index if self._rows is None else self._rows[index]]
        return sample

    def read_into(self, index: int, out: np.ndarray) -> None:
        out[...] = self.read(index)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Copy the chosen samples into ``out_B`` (B, *shape); one call, at memory speed; allocates nothing."""
        rows_B = index_B if self._rows is None else self._rows[index_B]
        np.take(self._samples, rows_B, axis=0, out=out_B, mode="clip")

    def __reduce__(self) -> tuple[object, ...]:
        return DenseStore, (self.file, self.spec, self._length, self._index, self._head_bytes)


class RaggedStore(_FileStore):
    """Raw samples that each have a shape of their own, or the bytes of a codec for each.

    Args:
        file: has them in any order.
        spec: of the samples as they are served; ragged if they are raw.
        index: ``offsets`` and ``sizes``, int64 (N,), first byte and size of each; ``shapes``, int32 (N, ndim).
        decoder: decodes samples straight into the caller's memory; None for raw ones.
    """

    def __init__(self, file: Block, spec: SampleSpec, index: ArrayBlock, decoder: Decoder | None = None) -> None:
        super().__init__(file, spec, index)
        self._offsets, self._sizes, self._shapes = index["offsets"], index["sizes"], index["shapes"]
        self._decoder = decoder
        self.gives_views = decoder is None

    def __len__(self) -> int:
        return len(self._offsets)

    def shape(self, index: int) -> tuple[int, ...]:
        return self.spec.shape or tuple(self._shapes[index].tolist())

    def enter(self, index: int, start: int, size_bytes: int, shape: tuple[int, ...]) -> None:
        """Say where a sample lies, of one over memory that is still written to."""
        self._offsets[index], self._sizes[index], self._shapes[index] = start, size_bytes, shape

    def spans(self, index_B: Any) -> tuple[np.ndarray, np.ndarray]:
        return self._offsets[index_B], self._sizes[index_B]

    def read(self, index: int) -> np.ndarray:
        if not self.gives_views:
            return super().read(index)
        start = int(self._offsets[index])
        sample: np.ndarray = np.ndarray(self.shape(index), self.spec.dtype, self._bytes.data, start)
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
            what = f"{len(data):,} bytes of codec {codec!r} cannot be decoded to {out.dtype} {list(out.shape)}"
            raise UndecodableError(f"{what}: {cause}", index=index, codec=codec) from cause

    def __reduce__(self) -> tuple[object, ...]:
        return RaggedStore, (self.file, self.spec, self._index, self._decoder)


class DiskStore(Store):
    """Samples in files on disk, each held against its checksum when it is first read, by whichever process that is.

    Whatever reads a sample raises UndecodableError where its bytes are not those that were written.

    Args:
        stores: over one file each, in which all samples are encoded alike.
        spec: of the samples as they are served.
        index: for each sample ``files``, which store has it; ``rows``, its index there; ``sums``, its checksum.
        codec: name of what encoded the samples; "raw" if nothing did.
        marks: a byte for each sample that says whether it was read before; made where there are none.
    """

    def __init__(
        self,
        stores: Sequence[DenseStore | RaggedStore],
        spec: SampleSpec,
        index: ArrayBlock,
        codec: str = "raw",
        marks: ArrayBlock | None = None,
    ) -> None:
        self._stores, self.spec, self._index, self.codec = tuple(stores), spec, index, codec
        self._of, self._rows, self._sums = index["files"], index["rows"], index["sums"]
        self._marks = marks or ArrayBlock({"checked": np.zeros(max(len(self._rows), 1), np.uint8)}, seal=False)
        self._checked = self._marks["checked"]
        self.gives_views, self.size_bytes = codec == "raw", sum(store.size_bytes for store in self._stores)
        self._files = [store.file for store in self._stores if isinstance(store.file, DiskFile)]

    def heaviest_bytes(self, samples: int) -> float:
        """The mean size of those so many neighbours that are the heaviest."""
        _, _, sizes = self.spans(np.arange(len(self)))
        ends = np.concatenate(([0], np.cumsum(sizes)))
        samples = min(samples, len(self))
        return float((ends[samples:] - ends[: len(ends) - samples]).max() / samples)

    def __len__(self) -> int:
        return len(self._rows)

    def shape(self, index: int) -> tuple[int, ...]:
        return self.spec.shape or self._stores[self._of[index]].shape(self._rows[index])

    def spans(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """File, first byte there and number of bytes of the chosen samples: int64 (B,) each."""
        files_B, starts_B, sizes_B = self._of[index_B], np.empty_like(index_B), np.empty_like(index_B)
        for number, store in enumerate(self._stores):
            is_there = files_B == number
            starts_B[is_there], sizes_B[is_there] = store.spans(self._rows[index_B[is_there]])
        return files_B, starts_B, sizes_B

    def read(self, index: int) -> np.ndarray:
        if not self.gives_views:
            return super().read(index)
        self._check(index)
        store: Store = self._stores[self._of[index]]
        return store.read(self._rows[index])

    def read_into(self, index: int, out: np.ndarray) -> None:
        self._check(index)
        try:
            self._stores[self._of[index]].read_into(self._rows[index], out)
        except UndecodableError as damaged:
            damaged.index = index
            raise

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Put the chosen samples into ``out_B`` (B, *shape); one call where they lie raw in one file."""
        files_B = self._of[index_B]
        if not (self.gives_views and len(files_B) and (files_B == files_B[0]).all()):
            super().gather_into(index_B, out_B)
            return
        unchecked = np.flatnonzero(self._checked[index_B] == 0)
        self._stores[files_B[0]].gather_into(self._rows[index_B], out_B)
        if len(unchecked):
            self._check_copies(index_B, out_B, unchecked)

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        self.check(index_B)
        files_B, starts_B, _ = self.spans(index_B)
        addresses_B: np.ndarray = np.array([store.address for store in self._stores])[files_B] + starts_B
        return addresses_B

    def check(self, index_B: np.ndarray) -> None:
        """Hold those samples that were not read before against their checksums."""
        for index in index_B[self._checked[index_B] == 0].tolist():
            self._check(index)

    def _check(self, index: int) -> None:
        if not self._checked[index]:
            self._enter(index, checksum(self._stores[self._of[index]].stored(self._rows[index])))

    def _check_copies(self, index_B: np.ndarray, out_B: np.ndarray, chosen: np.ndarray) -> None:
        """Hold copies that are warm from copying against the checksums; all in one call where rows are whole words."""
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
        path = self._files[self._of[index]].path
        try:
            path.with_name(f"{DAMAGE_PREFIX}{path.name}-{self._rows[index]}").touch()
            cure = "the next run over its source prepares it anew"
        except OSError as problem:
            cure = f"that cannot be noted ({problem.strerror}): build {path.parent} anew"
        what = f"its bytes in {path.parent} are not those that were written (a failing disk, or a foreign hand); {cure}"
        raise UndecodableError(what, index=index, codec=self.codec, is_on_disk=True)

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
        for file in self._files:
            file.release()

    def _runs(self, index_B: np.ndarray) -> Iterator[tuple[DiskFile, int, int]]:
        """File, first byte and size of each piece of a file in which chosen samples lie end to end."""
        numbers, starts, sizes = self.spans(index_B)
        order = np.lexsort((starts, numbers))
        numbers, starts, ends = numbers[order], starts[order], (starts + sizes)[order]
        gaps = starts[1:] - ends[:-1]
        cuts = np.flatnonzero((numbers[1:] != numbers[:-1]) | (gaps < 0) | (gaps > _GAP_BYTES)) + 1
        for first, stop in itertools.pairwise([0, *cuts.tolist(), len(order)] if len(order) else []):
            yield self._files[numbers[first]], int(starts[first]), int(ends[stop - 1] - starts[first])

    def close(self) -> None:
        for store in self._stores:
            store.close()
        let_go(self)
        self._index.close()
        self._marks.close()

    def __reduce__(self) -> tuple[object, ...]:
        return DiskStore, (self._stores, self.spec, self._index, self.codec, self._marks)


def let_go(owner: object) -> None:
    """Empty all arrays that are attributes, and keep no view: that would keep its mapping."""
    vars(owner).update({name: it[:0].copy() for name, it in vars(owner).items() if isinstance(it, np.ndarray)})


def checksum(data: Bytes) -> int:
    """Sum of the bytes as little-endian 64-bit words, modulo 2**64, the last word filled up with zeros.

    Any change within one word is seen, and so are missing and zeroed pages. It runs at 28 GB/s where CRC-32 runs at 3,
    so that every sample can be checked on its first read.

    Example:
        >>> checksum(np.array([1, 0, 0, 0, 0, 0, 0, 0, 2], np.uint8))
        3
    """
    whole = data.size // _WORD_BYTES * _WORD_BYTES
    total = int(data[:whole].view("<u8").sum(dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) & 0xFFFF_FFFF_FFFF_FFFF
