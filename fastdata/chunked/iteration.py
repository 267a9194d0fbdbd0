"""One pass over a chunked loader's epoch."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from fastdata.chunked.pipeline import Pipeline
from fastdata.errors import IngestError, MemoryBudgetError
from fastdata.iterators import Tally, sample_count
from fastdata.resume import Progress
from fastdata.stores.writers import ShapesDifferError

__all__ = ["ChunkedIter"]

StartPipeline = Callable[[int], Pipeline]
Adapt = Callable[[Exception], None]


class ChunkedIter(Iterator[Any]):
    """Batches in order, made ahead; an exception is raised where its batch would have come.

    Threads and processes end with the epoch, or as soon as the iterator is dropped.

    Args:
        start: makes the pipeline from a batch on.
        adapt: changes what ``start`` makes after samples turned out not to be as expected; raises if that cannot be.
        progress: the epoch, and how many of its batches were handed over.
        batches: how many there are in the epoch.
        ahead: how many are made ahead.
        tally: counts them.
    """

    def __init__(
        self, start: StartPipeline, adapt: Adapt, *, progress: Progress, batches: int, ahead: int, tally: Tally
    ) -> None:
        self._start, self._adapt = start, adapt
        self._progress, self._batches = progress, batches
        self._ahead, self._tally = ahead, tally
        self._ended: str | None = None
        self._pending: deque[Future[Any]] = deque()
        self._stop: Callable[[], object] = lambda: None
        if not self._is_over:
            self._begin()

    @property
    def _is_over(self) -> bool:
        return self._progress.first >= self._batches

    def end(self, reason: str) -> None:
        """Give the rest up; asking for it raises with this reason. Idempotent."""
        self._ended = self._ended or reason
        self._pending.clear()
        self._stop()

    def __next__(self) -> Any:
        tally = self._tally
        asked_at = tally.ask()
        try:
            batch = self._next_batch()
            tally.batches += 1
            tally.samples += sample_count(batch)
            return batch
        finally:
            tally.answer(asked_at)

    def _next_batch(self) -> Any:
        if self._is_over:
            self.end("the epoch is over")
            raise StopIteration
        if self._ended is not None:
            raise RuntimeError(f"this iterator has no more batches: {self._ended}")
        while True:
            future = self._pending[0]
            try:
                batch = future.result()
            except (ShapesDifferError, MemoryBudgetError) as found:
                self._begin_again(found)
                continue
            except IngestError as error:
                self.end(str(error))
                raise
            except Exception:
                self._advance()
                raise
            finally:
                del future  # an exception would keep it, and it the exception
            self._advance()
            return batch

    def _advance(self) -> None:
        self._pending.popleft()
        self._progress.first += 1
        self._submit()

    def _begin_again(self, found: Exception) -> None:
        """Make the batches that were not handed over anew, otherwise."""
        self._pending.clear()
        self._stop()
        self._adapt(found)
        self._begin()

    def _begin(self) -> None:
        self._pipeline = self._start(self._progress.first)
        self._stop = weakref.finalize(self, self._pipeline.close)
        self._next = self._progress.first
        for _ in range(self._ahead):
            self._submit()

    def _submit(self) -> None:
        if self._next < self._batches:
            self._pending.append(self._pipeline.submit(self._next))
            self._next += 1
