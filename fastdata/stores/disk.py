"""Stores of samples in files on disk.

A sample is compared with its checksum when it is first read: a disk may fail, and other users may
write to the folder of a cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fastdata.errors import SampleError
from fastdata.pixels.arrays import Array, Bytes
from fastdata.stores.store import Store

if TYPE_CHECKING:
    from fastdata.stores.disk_file import DiskFile


_GAP_BYTES = 64
"""Samples with at most this gap between them, as alignment leaves, are loaded as one piece."""


class DiskStore(Store):
    """Samples in files on disk, each compared with its checksum before it is first read.

    The index has two more columns: ``sums``, the checksums; and ``checked``, a column that stays
    writable, 1 for a sample that some process has checked.
    """

    files: tuple[DiskFile, ...]

    def heaviest_bytes(self, samples: int) -> float:
        """Return the mean sample size in the run of ``samples`` neighbours with the most bytes."""
        samples = min(samples, len(self))
        ends = np.append(0, np.cumsum(self._sizes))
        run_bytes = ends[samples:] - ends[:-samples]
        return float(run_bytes.max() / samples)

    def ensure(self, index_B: Array) -> None:
        # All processes share this column, so each sample is checked once, by its first reader. Two
        # that read it at the same time both check it, which does no harm.
        checked = self.index["checked"]
        for index in index_B[checked[index_B] == 0].tolist():
            self._check(index)
            checked[index] = 1

    def _check(self, index: int) -> None:
        if checksum(self.stored(index)) != self.index["sums"][index]:
            raise SampleError(self._note_damage(index), index=index)

    def _note_damage(self, index: int) -> str:
        """Let the next build write the shard of a sample again; return the text of the error."""
        path = self.files[self._file_of[index]].path
        cure = "the next run over its source prepares it again"
        # Without its manifest the shard counts as incomplete, so the next build writes it.
        manifest = path.with_name(shard_manifest_name(path.stem.partition("-")[2]))
        try:
            manifest.unlink(missing_ok=True)
        except OSError as problem:
            cure = f"the damage cannot be recorded ({problem.strerror}): build {path.parent} again"
        return (
            f"its bytes in {path.parent} are not those that were written (the disk fails, or the "
            f"file was changed); {cure}"
        )

    # Which samples are in memory

    def load(self, index_B: Array) -> None:
        """Load samples into memory until they are evicted; see ``DiskFile``."""
        for file, start, size in self._pieces(index_B):
            file.load(start, size)

    def evict(self, index_B: Array, *, from_cache: bool = False) -> None:
        """Release the memory of samples. Pass the same samples as to one call of ``load``."""
        for file, start, size in self._pieces(index_B):
            file.evict(start, size, from_cache=from_cache)

    def evict_all(self) -> None:
        """Release the memory of all samples, however they were read."""
        for file in self.files:
            file.evict_all()

    def _pieces(self, index_B: Array) -> Iterator[tuple[DiskFile, int, int]]:
        """Yield the file, first byte and size of each run of samples that are stored end to end."""
        file_B = self._file_of[index_B]
        for number in np.unique(file_B).tolist():
            chosen = index_B[file_B == number]
            order = np.argsort(self._offsets[chosen])
            chosen = chosen[order]
            starts = self._offsets[chosen]
            stops = starts + self._sizes[chosen]
            # A piece ends where the next sample is further away, or is the same sample again.
            is_cut = np.abs(starts[1:] - stops[:-1]) > _GAP_BYTES
            first = starts[np.append(True, is_cut)].tolist()
            last = stops[np.append(is_cut, True)].tolist()
            for start, stop in zip(first, last, strict=True):
                yield self.files[number], start, stop - start


def shard_manifest_name(shard: str) -> str:
    """Return the name of the file that marks a shard as complete."""
    return f"shard-{shard}.npz"


def checksum(data: Bytes) -> int:
    """Return the CRC-32 of a sample's bytes.

    It depends on their order, so it also finds swapped pages and reversed rows. On a Xeon it reads
    64 MiB in 41 ms; a sum of words takes 10 ms. Each sample is checked once in a run.

    Example:
        >>> checksum(np.array([1, 2], np.uint8)) == checksum(np.array([2, 1], np.uint8))
        False
    """
    return zlib.crc32(data.data)
