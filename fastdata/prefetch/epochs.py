"""One epoch of a prefetcher, and what is counted of it."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fastdata.iterators import LoopTimes
from fastdata.prefetch.batches import count_samples
from fastdata.prefetch.feed import Failed, Feed, Over, Ready
from fastdata.prefetch.staging import CopyCounts, Slot

__all__ = ["Counts", "Epoch", "NoMarks", "StateMarks", "Unmoved"]


@dataclasses.dataclass(slots=True)
class Counts(LoopTimes):
    """What the training loop got in an epoch."""

    batches: int = 0
    samples: int = 0
    copies: CopyCounts = dataclasses.field(default_factory=CopyCounts)


class Epoch(Iterator[Any]):
    """One epoch of batches on devices.

    Args:
        feed: brings them.
        counts: what is counted.
        slots: the staging buffers that the feed fills.
        rings: where they go when the feed no longer needs them.
        hand_out: what the user gets of a batch that is ready; keeps the prefetcher alive as long as this.
    """

    def __init__(
        self,
        feed: Feed,
        counts: Counts,
        *,
        slots: list[Slot],
        rings: list[list[Slot]],
        hand_out: Callable[[Ready], Any],
    ) -> None:
        self._feed, self._counts, self._hand_out = feed, counts, hand_out
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end, feed, slots, rings)
        self._is_over = False

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError("an iterator of a prefetcher works in the process that made it; call iter() in this one")
        if self._is_over:
            raise StopIteration
        item = self._receive()
        if isinstance(item, Over):
            self.close()
            raise StopIteration
        if isinstance(item, Failed):
            try:
                raise item.error
            finally:
                del item  # the exception would keep this frame, and it the exception
        self._counts.batches += 1
        self._counts.samples += item.samples
        return self._hand_out(item)

    def close(self) -> None:
        """End the thread and let go of what it has read ahead. Idempotent."""
        self._is_over = True
        self._end()

    def _receive(self) -> Ready | Failed | Over:
        asked_at = self._counts.ask()
        try:
            return self._feed.receive()
        except BaseException:  # Ctrl-C, or torch's word on a killed worker
            self.close()
            raise
        finally:
            self._counts.answer(asked_at)


def _end(feed: Feed, slots: list[Slot], rings: list[list[Slot]]) -> None:
    feed.stop()
    if not feed.is_alive:
        rings.append(slots)


class Unmoved(Iterator[Any]):
    """One epoch of batches that stay where they are; ``finish`` is called with each and its number."""

    def __init__(self, iterator: Iterator[Any], counts: Counts, finish: Callable[[Any, int], Any]) -> None:
        self._iterator, self._counts, self._finish = iterator, counts, finish
        self._number = 0

    def __next__(self) -> Any:
        asked_at = self._counts.ask()
        try:
            batch = next(self._iterator)
            number, self._number = self._number, self._number + 1
            samples = count_samples(batch)
            finished = self._finish(batch, number)
            self._counts.samples += samples
            self._counts.batches += 1
            return finished
        finally:
            self._counts.answer(asked_at)


class StateMarks:
    """Marks of a loader that only knows how far it was read: its state after each batch."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.state: Any = None
        """The loader's state when the user's latest batch had been read; None before the first."""

    def mark(self) -> Any:
        """Take the loader's state."""
        return self._loader.state_dict()

    def hand_over(self, mark: Any) -> None:
        """Keep it."""
        self.state = mark


class NoMarks:
    """Marks of a loader that cannot be resumed."""

    def mark(self) -> Any:
        """Nothing to note."""

    def hand_over(self, mark: Any) -> None:
        """Nothing to keep."""
