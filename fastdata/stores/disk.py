"""Samples in files, mapped into memory: the page cache holds one copy for all processes and for the next run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastdata.blocks import ArrayBlock
from fastdata.spec import SampleSpec
from fastdata.stores.encoded import Decoder, UndecodableError, decode_sample
from fastdata.stores.shards import Run, ShardMap, runs_of

__all__ = ["DAMAGE_PREFIX", "DiskStore", "checksum"]

Bytes = npt.NDArray[np.uint8]

DAMAGE_PREFIX = "damaged-"
"""Of the empty files that name rows found damaged, for the next run to prepare anew."""
_WORD_BYTES = 8
_GAP_BYTES = 64 << 10
"""Between samples that are still brought and dropped as one piece."""


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


class DiskStore:
    """Samples as they are, or as a codec's bytes, in mapped shards; see ``fastdata.stores.base.Store``.

    Every sample is held against its checksum when it is first read, by whichever process that is.

    Args:
        shards: the files.
        spec: of the samples as they are served.
        index: for each sample: ``shards``, which file; ``offsets`` and ``sizes``, its bytes there; ``shapes``;
            ``sums``, their checksum; ``rows``, its number among all that the files hold.
        name: of the part, for the marks of damaged rows.
        decoder: of encoded samples; None for raw ones.
        head_bytes: before the first row of a shard whose rows all have one size; None where they do not.
    """

    def __init__(
        self,
        shards: ShardMap,
        spec: SampleSpec,
        index: ArrayBlock,
        *,
        name: str,
        decoder: Decoder | None,
        head_bytes: int | None = None,
    ) -> None:
        self._name = name
        self._files, self._spec, self._index = shards, spec, index
        self._decoder, self._head_bytes = decoder, head_bytes
        self._marks = ArrayBlock({"checked": np.zeros(max(len(index["offsets"]), 1), np.uint8)}, seal=False)
        self._open()

    def _open(self) -> None:
        names = ("shards", "offsets", "sizes", "shapes", "sums")
        self._shards, self._offsets, self._sizes, self._shapes, self._sums = (self._index[name] for name in names)
        self._checked = self._marks["checked"]
        self._tables = [] if self._head_bytes is None or self._decoder else list(map(self._table, self._files.shards))

    def _table(self, shard: Bytes) -> np.ndarray:
        """The rows of a shard of raw samples of one shape."""
        assert self._spec.shape is not None
        values = shard[self._head_bytes :].view(self._spec.dtype)
        return values.reshape(-1, *self._spec.shape) if values.size else np.empty((0, *self._spec.shape), values.dtype)

    @property
    def spec(self) -> SampleSpec:
        """Shape, dtype and form of the samples."""
        return self._spec

    @property
    def size_bytes(self) -> int:
        """Bytes of the shards."""
        return self._files.size_bytes

    @property
    def gives_views(self) -> bool:
        """Whether samples lie in the files as they are served."""
        return self._decoder is None

    @property
    def codec(self) -> str:
        """Name of what encoded the samples; "raw" if nothing did."""
        return "raw" if self._decoder is None else self._decoder.name

    def heaviest_bytes(self, samples: int) -> float:
        """Bytes of a sample in the files, as the mean of so many neighbours, where they are largest."""
        ends = np.concatenate(([0], np.cumsum(self._sizes)))
        samples = min(samples, len(self))
        return float((ends[samples:] - ends[: len(ends) - samples]).max() / samples)

    def __len__(self) -> int:
        return len(self._offsets)

    def shape(self, index: int) -> tuple[int, ...]:
        """Shape of one sample."""
        return self._spec.shape or tuple(self._shapes[index].tolist())

    def stored(self, index: int) -> Bytes:
        """The bytes of one sample: a read-only view.

        Raises:
            UndecodableError: they are not what was written.
        """
        start = int(self._offsets[index])
        data: Bytes = self._files.shards[self._shards[index]][start : start + int(self._sizes[index])]
        if not self._checked[index]:
            self._enter(index, checksum(data))
        return data

    def read(self, index: int) -> np.ndarray:
        """One sample: a read-only view of a raw one, else decoded into fresh memory."""
        if self._decoder is None:
            return self.stored(index).view(self._spec.dtype).reshape(self.shape(index))
        out = np.empty(self.shape(index), self._spec.dtype)
        self.read_into(index, out)
        return out

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Put one sample into ``out``.

        Raises:
            UndecodableError: its bytes are damaged.
        """
        if self._decoder is None:
            out[...] = self.read(index)
            return
        decode_sample(self._decoder, index, self.stored(index).data, out)

    def gather_into(self, index_B: np.ndarray, out_B: np.ndarray) -> None:
        """Put the chosen samples into ``out_B`` (B, *shape); one call where they lie in one shard."""
        if not self._tables or not len(index_B):
            for b, index in enumerate(index_B.tolist()):
                self.read_into(index, out_B[b])
            return
        shards_B = self._shards[index_B]
        rows_B = (self._offsets[index_B] - self._head_bytes) // max(self._spec.sample_bytes, 1)
        if (shards_B == shards_B[0]).all():
            np.take(self._tables[shards_B[0]], rows_B, axis=0, out=out_B, mode="clip")
        else:
            for b, (shard, row) in enumerate(zip(shards_B.tolist(), rows_B.tolist(), strict=True)):
                out_B[b] = self._tables[shard][row]
        unchecked_B = self._checked[index_B] == 0
        if unchecked_B.any():
            self._check_copies(index_B, out_B, np.flatnonzero(unchecked_B))

    def addresses(self, index_B: np.ndarray) -> np.ndarray:
        """Where the chosen raw samples lie in memory: int64 (B,).

        Raises:
            UndecodableError: one that was not read before is damaged.
        """
        self.check(index_B)
        firsts = np.array([shard.__array_interface__["data"][0] for shard in self._files.shards], np.int64)
        addresses_B: np.ndarray = firsts[self._shards[index_B]] + self._offsets[index_B]
        return addresses_B

    def bring(self, index_B: np.ndarray) -> None:
        """Have samples in memory until they are dropped, and nothing else, however they are read."""
        for run in self._runs(index_B):
            self._files.bring(run.shard, run.start, run.size_bytes)

    def check(self, index_B: np.ndarray) -> None:
        """Hold those samples that were not read before against their checksums.

        Raises:
            UndecodableError: a sample is damaged.
        """
        for index in index_B[self._checked[index_B] == 0].tolist():
            self.stored(index)

    def drop(self, index_B: np.ndarray, *, from_cache: bool = False) -> None:
        """Let go of the mapping's memory of samples, which is read from the files again when needed.

        Args:
            index_B: int64 (B,), which; those that were brought at once are dropped at once.
            from_cache: let the system's page cache go of them too, unless another process has them mapped.
        """
        for run in self._runs(index_B):
            self._files.drop(run.shard, run.start, run.size_bytes, from_cache=from_cache)

    def release(self) -> None:
        """Let go of all memory of the mapping, whoever has read it; it is read from the files again when needed."""
        self._files.release()

    def _runs(self, index_B: np.ndarray) -> Iterator[Run]:
        """Where samples lie, in as few pieces as there are; workers write neighbours nearly in order."""
        shards, starts, sizes = self._shards[index_B], self._offsets[index_B], self._sizes[index_B]
        order = np.lexsort((starts, shards))
        return runs_of(shards[order], starts[order], sizes[order], gap_bytes=_GAP_BYTES)

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
        """Note that a sample is sound, or that the next run is to prepare it anew."""
        if found == int(self._sums[index]):
            self._checked[index] = 1
            return
        row = int(self._index["rows"][index])
        folder = self._files.folder
        try:
            Path(folder, f"{DAMAGE_PREFIX}{self._name}-{row}").touch()
            cure = "the next run over its source prepares it anew"
        except OSError:
            cure = f"build {folder} anew"
        raise UndecodableError(
            f"its bytes in {folder} are not those that were written (a failing disk, or a foreign hand); {cure}",
            index=index,
            codec=self.codec,
            is_on_disk=True,
        )

    def close(self) -> None:
        """Let go of the files; arrays handed out stay valid. Idempotent."""
        self._tables = []
        self._files.close()
        self._shards, self._offsets, self._sizes, self._shapes, self._sums, self._checked = (
            array[:0].copy()
            for array in (self._shards, self._offsets, self._sizes, self._shapes, self._sums, self._checked)
        )
        self._index.close()
        self._marks.close()

    def __getstate__(self) -> dict[str, object]:
        derived = ("_shards", "_offsets", "_sizes", "_shapes", "_sums", "_checked", "_tables")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()
