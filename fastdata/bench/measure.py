"""Timing of epochs and sampling of memory."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from fastdata.machine import tree_pss_bytes

__all__ = ["Loader", "PeakMemory", "Spread", "best_workers", "first_batch_s", "images_per_s", "peak_memory"]

Loader = Iterable[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Images a second of several rounds."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.rounds)

    @property
    def lowest(self) -> float:
        """Slowest round."""
        return min(self.rounds)

    @property
    def highest(self) -> float:
        """Fastest round."""
        return max(self.rounds)


def images_per_s(loader: Loader, *, at_least_s: float = 0.0) -> float:
    """Run whole epochs until ``at_least_s`` has passed, one at least, and return images a second."""
    images = 0
    start = time.perf_counter()
    while True:
        images += sum(len(batch[0]) for batch in loader)
        seconds = time.perf_counter() - start
        if seconds >= at_least_s or not images:
            return images / seconds


def first_batch_s(make_loader: Callable[[], Loader]) -> float:
    """Seconds from the construction of a loader to its first batch."""
    start = time.perf_counter()
    next(iter(make_loader()))
    return time.perf_counter() - start


def best_workers(make_loader: Callable[[int], Loader], candidates: Iterable[int], *, budget_s: float) -> int:
    """The number of workers with the highest rate: the better of two passes, taken in turns, of ``budget_s`` each.

    Two passes, because on a shared machine one that is disturbed would choose badly for the whole run. A rate within
    two percent of a smaller number's is not worth its workers.
    """
    rates = dict.fromkeys(candidates, 0.0)
    for _ in range(2):
        for count in rates:
            rates[count] = max(rates[count], _rate_of_a_pass(make_loader(count), budget_s))
    best = min(rates)
    for count, rate in sorted(rates.items()):
        if rate > rates[best] * 1.02:
            best = count
    return best


@dataclass(kw_only=True, slots=True)
class PeakMemory:
    """Highest memory seen so far, in bytes of PSS: pages shared by several processes of the tree count once."""

    size_bytes: int = 0
    samples: int = field(default=0, repr=False)

    def sample(self) -> None:
        """Look once; reading the kernel's figures takes milliseconds, so this stays out of timed epochs."""
        self.size_bytes = max(self.size_bytes, tree_pss_bytes(os.getpid()))
        self.samples += 1


@contextmanager
def peak_memory(every_s: float = 0.1) -> Iterator[PeakMemory]:
    """Sample the memory of this process and all below it from a thread, until the block ends."""
    peak = PeakMemory()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every_s):
            peak.sample()

    thread = threading.Thread(target=watch, name="fastdata-peak-memory", daemon=True)
    peak.sample()
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak.sample()


def _rate_of_a_pass(loader: Loader, budget_s: float) -> float:
    """Images a second until the budget is spent: part of an epoch, or several where one is too short to judge by."""
    images = 0
    start = time.perf_counter()
    for batch in chain.from_iterable(repeat(loader)):
        images += len(batch[0])
        if time.perf_counter() - start > budget_s:
            break
    return images / (time.perf_counter() - start)
