"""Resuming inside an epoch: what a state holds, and how the rest of the epoch is found again.

Batches are read ahead of the user, and so is the sampler: what it says of itself is not what the user has seen. A state
therefore holds what the epoch's order was drawn from, and how many batches were handed over. Resuming draws the same
order again and passes over indices, never over samples.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastdata.randomness import Randomness, undisturbed
from fastdata.served import Served

__all__ = ["VERSION", "Bookmark", "IndexBatches", "Progress", "ReadAhead", "check_state"]

VERSION = 2


@dataclass(slots=True)
class Progress:
    """How far one epoch has come. Batches are numbered in the order of the sampler.

    Args:
        epoch: its number, which random draws are made from.
        start: what the order is drawn from, or None until the first index is drawn.
        is_begun: whether it is resumed inside; then nothing more is drawn from the global generators.
        base_seed: what worker processes are seeded from, and random draws where the dataset has no seed; None until it
            is drawn.
        keeps_seed: whether that was drawn by an earlier epoch of workers that persist.
        first: batches before this one were handed over when the epoch was resumed.
        ahead: batches after it that were handed over too; only without ``in_order``.
    """

    epoch: int | None = None
    start: dict[str, Any] | None = None
    is_begun: bool = False
    base_seed: int | None = None
    keeps_seed: bool = False
    first: int = 0
    ahead: tuple[int, ...] = ()
    drawn: int = 0  # since the epoch was resumed
    is_finished: bool = False
    resumed_from: dict[str, Any] | None = None  # holds until a batch is handed over
    _resumed_at: tuple[int, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._resumed_at = self.first, self.ahead

    def note(self, unread: Collection[int]) -> None:
        """Take down which batches drawn since the resume were not handed over yet."""
        first = min(unread, default=self.drawn)
        later = [] if self.drawn - first == len(unread) else [k for k in range(first, self.drawn) if k not in unread]
        self.first = self._number(first)
        old = self._resumed_at[1]
        self.ahead = tuple(sorted([*map(self._number, later), *(number for number in old if number > self.first)]))

    def _number(self, drawn: int) -> int:
        """Number in the epoch of a batch drawn since the resume."""
        first, ahead = self._resumed_at
        number = first + drawn
        for done in ahead:
            number += done <= number
        return number


@dataclass(slots=True)
class Bookmark:
    """The progress of the loader's latest epoch; shared with what draws its indices.

    Args:
        progress: how far the loader has handed batches over.
        handed: how far the user has got where a prefetcher reads ahead of them; None where none does.
    """

    progress: Progress = field(default_factory=lambda: Progress(is_finished=True))
    handed: Progress | None = None

    @property
    def seen(self) -> Progress:
        """How far the user has got."""
        return self.progress if self.handed is None else self.handed


class ReadAhead:
    """Counts the batches of an epoch where a prefetcher hands them over, not where it reads them.

    The prefetcher's thread takes a mark with each batch; the user's thread gives it back with the batch. Nothing is
    drawn or encoded in the thread: a mark is a copy of a few numbers. An epoch that has been left for a new one counts
    no more.
    """

    def __init__(self, bookmark: Bookmark) -> None:
        self._bookmark, self._progress = bookmark, bookmark.progress
        bookmark.handed = self.mark()

    def mark(self) -> Progress:
        """How far the loader has read."""
        return copy.copy(self._progress)

    def hand_over(self, mark: Progress) -> None:
        """Let the user be as far as the loader was at ``mark``."""
        if self._bookmark.progress is self._progress:
            self._bookmark.handed = mark


class IndexBatches:
    """A sampler that begins where the epoch stands.

    It must not hold the loader: a persistent iterator, which the loader holds, holds it.

    Args:
        sampler: gives the indices of each batch, or single ones.
        served: what is read by them; None where that is no fastdata dataset, or no batches are made.
        randomness: what ``sampler`` draws from.
        bookmark: knows how far the epoch has come, and is told what is drawn.
    """

    def __init__(self, sampler: Any, served: Served | None, randomness: Randomness, bookmark: Bookmark) -> None:
        self._sampler, self._served, self._randomness, self._bookmark = sampler, served, randomness, bookmark

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return _Drawing(self._sampler, self._served, self._randomness, self._bookmark.progress)


class _Drawing(Iterator[Any]):
    def __init__(self, sampler: Any, served: Served | None, randomness: Randomness, progress: Progress) -> None:
        self._sampler, self._served, self._randomness, self._progress = sampler, served, randomness, progress
        self._indices: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._indices is None:
            self._indices = self._open()
        self._progress.drawn += 1  # a sampler that fails has drawn a batch that cannot be had
        try:
            return next(self._indices)
        except StopIteration:
            self._progress.drawn -= 1
            raise

    def _open(self) -> Iterator[Any]:
        progress = self._progress
        if progress.start is None:
            progress.start = self._randomness.capture()
            return self._begin()
        if not progress.is_begun and self._randomness.libraries == ("torch",):
            # torch's generator moves on as at the start of any epoch. A sampler that is not torch's is not asked twice.
            next(iter(self._sampler), None)
        with undisturbed():
            self._randomness.restore(progress.start, with_epochs=progress.is_begun)
            rest = _pass_over(self._begin(), progress.first, progress.ahead)
            return itertools.chain(list(itertools.islice(rest, 1)), rest)  # samplers draw when first asked

    def _begin(self) -> Iterator[Any]:
        progress = self._progress
        indices: Iterator[Any] = iter(self._sampler)
        if self._served is None:
            return indices
        assert progress.base_seed is not None
        return self._served.visit(indices, progress.epoch or 0, progress.base_seed)


def _pass_over(indices: Iterator[Any], first: int, ahead: tuple[int, ...]) -> Iterator[Any]:
    rest = itertools.islice(enumerate(indices), first, None)
    return (each for number, each in rest if number not in ahead)


def check_state(state: dict[str, Any], loader: dict[str, Any]) -> None:
    """Check that a state is one of a loader like this.

    Args:
        state: as ``DataLoader.state_dict`` returned it.
        loader: what the state must agree with in its entry of the same name.

    Raises:
        ValueError: it is not; says what differs.
    """
    if state.get("version") != VERSION:
        raise ValueError(
            f"this is no state of a fastdata DataLoader of version {VERSION}: it has version "
            f"{state.get('version')!r} and the keys {sorted(state)}"
        )
    saved = state["loader"]
    differing = [
        f"{name} is {loader.get(name)!r}, in the state {saved.get(name)!r}"
        for name in dict.fromkeys([*saved, *loader])
        if saved.get(name) != loader.get(name)
    ]
    if differing:
        raise ValueError(
            f"the state is of another loader: {'; '.join(differing)}. Make the loader as it was when the state was "
            f"saved, or begin a new epoch without the state."
        )
