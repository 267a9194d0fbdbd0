"""Which samples of files on disk are in memory: the chunk that is served, and the next one, which a thread reads ahead.

These are hints: a sample that is not there is read when it is asked for, and one that was let go is
read again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from fastdata.errors import FastDataError
from fastdata.loaders.chunk_plan import CHUNKS_HELD
from fastdata.stores.readers import DiskStore

Located = Callable[[np.ndarray], Iterable[tuple[DiskStore, np.ndarray]]]

_AT_ONCE = 128
"""Samples between two looks whether the epoch has ended."""


class Residency:
    """Reads the chunks of one epoch ahead of their batches, and lets go of each behind its last one.

    Args:
        located: the stores that samples of the epoch lie in, and their positions there.
        stream: the samples of the epoch in their order, int64 (n,).
        chunk_samples: in each chunk, whole batches.
        batch_size: samples in a batch.
        from_cache: whether the system's page cache lets go of samples, too.
    """

    def __init__(
        self,
        located: Located,
        stream: np.ndarray,
        chunk_samples: int,
        batch_size: int,
        *,
        from_cache: bool,
    ) -> None:
        self._located = located
        self._stream = stream
        self._chunk_samples = chunk_samples
        self._batch_size = batch_size
        self._from_cache = from_cache
        self._handed = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._coming: dict[int, Future[None]] = {}
        self._brought: dict[int, list[tuple[DiskStore, np.ndarray]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fastdata-chunks")
        for chunk in range(CHUNKS_HELD):
            self._begin(chunk)

    def will_need(self, chunk: int) -> None:
        """Wait for a chunk that is on its way: its reader reads in sequence, faster than batches would."""
        if chunk in self._coming:
            self._coming[chunk].result()

    def passed(self) -> None:
        """Note that one more batch was handed over; the last one of a chunk makes room for another."""
        self._handed += self._batch_size
        if self._handed % self._chunk_samples == 0:
            served = self._handed // self._chunk_samples - 1
            self._release(served)
            self._begin(served + CHUNKS_HELD)

    def close(self) -> None:
        """End the thread, and let go of what is there. Idempotent; nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)
        for chunk in list(self._coming):
            self._release(chunk)

    def _begin(self, chunk: int) -> None:
        first = chunk * self._chunk_samples
        if first < len(self._stream):
            samples = np.sort(self._stream[first : first + self._chunk_samples])
            self._coming[chunk] = self._thread.submit(self._bring, chunk, samples)

    def _bring(self, chunk: int, samples: np.ndarray) -> None:
        brought = self._brought.setdefault(chunk, [])
        for store, positions in self._located(samples):
            for start in range(0, len(positions), _AT_ONCE):
                if self._is_closed:
                    return
                some = positions[start : start + _AT_ONCE]
                with contextlib.suppress(
                    FastDataError, OSError
                ):  # raised where its batch would come
                    store.bring(some)
                    brought.append((store, some))

    def _release(self, chunk: int) -> None:
        future = self._coming.pop(chunk)
        if not future.cancel():
            future.result()
        for store, positions in self._brought.pop(chunk, ()):
            store.drop(positions, from_cache=self._from_cache)
