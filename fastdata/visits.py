"""Which visit to a sample this is: the number that its random draws are made from.

A visit is ``epoch + (k << 32)`` where k counts earlier visits to the sample in the same epoch. Samplers that repeat
samples thus get different draws for each repetition, and everyone else gets the epoch.
"""

from __future__ import annotations

import numpy as np

from fastdata.blocks import Block

__all__ = ["EpochVisits", "SharedVisits"]

_REPEAT_SHIFT = 32


class EpochVisits:
    """Visits of one epoch in the order in which a sampler draws them; for a loader that knows its epoch."""

    def __init__(self, length: int, epoch: int) -> None:
        self._epoch = epoch
        self._seen = np.zeros(length, np.uint32)

    def take(self, index_B: np.ndarray) -> np.ndarray:
        """Return the visits (int64, B) of the next batch and remember them."""
        visits_B: np.ndarray = self._epoch + (_count(self._seen, index_B) << _REPEAT_SHIFT)
        return visits_B


class SharedVisits:
    """Visits counted per sample in shared memory; for readers that are told no epoch, such as torch's own loader.

    They are counted for each reader, such as an iterator with its workers: from 0 for a new one, on for one that
    persists. Reading each sample once per epoch gives each epoch's number, whatever process reads it. A sample knows
    its two latest readers, so that loaders may take turns and the visits of one that persists do not begin again.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._block = Block.create(8 + 4 * length * 2 * 2)

    def take(self, index_B: np.ndarray, reader: int) -> np.ndarray:
        """Return the visits (int64, B) of a reader to some samples and count them."""
        number = np.uint32(reader & 0xFFFFFFFF)
        readers, seen = self._readers, self._seen
        others = index_B[readers[0, index_B] != number]
        if len(others):
            others = np.unique(others)
            known = np.where(readers[1, others] == number, seen[1, others], 0)
            readers[1, others], seen[1, others] = readers[0, others], seen[0, others]
            readers[0, others], seen[0, others] = number, known
        visits_B: np.ndarray = self._epoch[0] + _count(seen[0], index_B)
        return visits_B

    def restart(self, epoch: int) -> None:
        """Let the next visit to each sample be ``epoch``."""
        self._epoch[0] = epoch
        self._seen[:] = 0

    def close(self) -> None:
        """Give back the memory. Idempotent."""
        self._block.close()

    @property
    def _epoch(self) -> np.ndarray:
        return self._block.array("int64", (1,))

    @property
    def _readers(self) -> np.ndarray:
        """Whose visits are counted, uint32 (2, N): the latest reader of each sample, and the one before."""
        return self._block.array("uint32", (2, self._length), 8)

    @property
    def _seen(self) -> np.ndarray:
        """How many of each of them, uint32 (2, N)."""
        return self._block.array("uint32", (2, self._length), 8 + 4 * 2 * self._length)


def _count(seen: np.ndarray, index_B: np.ndarray) -> np.ndarray:
    """Return how often each index came before, earlier ones of the same batch included, and count it in ``seen``."""
    before_B: np.ndarray = seen[index_B].astype(np.int64)
    order = np.argsort(index_B, kind="stable")
    sorted_B = index_B[order]
    is_repeat_B = sorted_B[1:] == sorted_B[:-1]
    if not is_repeat_B.any():
        seen[index_B] += 1
        return before_B
    starts = np.flatnonzero(np.concatenate(([True], ~is_repeat_B)))
    lengths = np.diff(np.append(starts, len(order)))
    before_B[order] += np.arange(len(order)) - np.repeat(starts, lengths)
    np.add.at(seen, index_B, 1)  # seven times slower than the line above, but counts repetitions
    return before_B
