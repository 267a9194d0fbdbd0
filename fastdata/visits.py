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

    Reading each sample once per epoch gives each epoch's number, whatever process reads it.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._block = Block.create(8 + 4 * length)

    def take(self, index_B: np.ndarray) -> np.ndarray:
        """Return the visits (int64, B) of some samples and count them."""
        visits_B: np.ndarray = self._epoch[0] + _count(self._seen, index_B)
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
    def _seen(self) -> np.ndarray:
        return self._block.array("uint32", (self._length,), 8)


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
