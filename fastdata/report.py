"""What the user is told: progress of a preparation, warnings, and how an epoch went."""

from __future__ import annotations

import inspect
import logging
import math
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from tqdm.auto import tqdm

from fastdata.errors import FastDataWarning

EngineKind = Literal["thread", "process", "inline"]

log = logging.getLogger("fastdata")


class _Bar(tqdm):  # type: ignore[type-arg]  # generic in the stubs only
    monitor_interval = 0  # tqdm's monitor would be a thread that outlives the preparation
    # tqdm's own lock is a semaphore that forked processes share: one that is killed while it draws,
    # or only makes a bar, would leave it taken, and every later bar of its relatives would wait
    # forever.
    _lock = threading.RLock()


def progress_bar(
    total: int, description: str, *, unit: str = "img", enabled: bool = True
) -> tqdm[Any]:
    """A bar in a terminal or a notebook; nothing elsewhere, or if not enabled."""
    options: dict[str, Any] = {}  # a terminal's bar heeds TQDM_DISABLE
    if not enabled:
        options["disable"] = True
    elif not sys.stderr.isatty():
        options["disable"] = None  # a notebook has one all the same
    return _Bar(
        total=total, desc=description, unit=unit, dynamic_ncols=True, mininterval=0.5, **options
    )


def warn_user(message: str) -> None:
    """Warn, naming the user's line that called into fastdata."""
    frame = inspect.currentframe()
    depth = 1
    while frame and frame.f_globals.get("__name__", "").startswith("fastdata."):
        frame = frame.f_back
        depth += 1
    warnings.warn(message, FastDataWarning, stacklevel=depth)


Line = str | tuple[str, ...]
"""Of a report: text, or a row of a table."""


def as_text(lines: Iterable[Line]) -> str:
    """Lines, tables aligned: figures to the right between a name and words at the end."""
    texts: list[Any] = []
    for kind, found in groupby(lines, type):
        rows: list[Any] = list(found)
        if kind is str:
            texts += rows
            continue
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *figures, words in rows:
            cells = [name.ljust(widths[0]), *map(str.rjust, figures, widths[1:]), words]
            texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


class Report(ABC):
    """What shows itself as lines of text and tables."""

    __slots__ = ()

    @abstractmethod
    def _lines(self) -> Iterable[Line]: ...

    def __repr__(self) -> str:
        return as_text(self._lines())


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EpochReport(Report):
    """How the latest epoch of a loader went, complete or not.

    How to read it: where the loop waits for data more than a few percent of the time, the loader is
    what limits training, and ``path`` says what it does and why. Where it hardly waits, no faster
    loader would help.

    Args:
        path: the way the batches took and why, in one line; its wording may change.
        engine: where batches were read: in a ``"thread"``, a ``"process"`` or, ``"inline"``, the
            training loop.
        workers: how many threads or processes; 0 for ``"inline"``.
        batches: batches handed over; after a resume, since then.
        samples: samples in them, by the length of a batch's first tensor; with ``batch_size=None``
            one for each.
        wait_s: seconds the training loop waited for a batch.
        busy_s: seconds the training loop spent between batches, in the user's code.
        fresh_batches: batches that got new memory because the user still held every reusable
            buffer.
        bytes_held: memory that the loader keeps for reuse by coming batches, lent batches included.
        pinning: whether batches lie in pinned memory, and why; empty where nobody asked.
        prepared: share of the samples that are prepared by now; less than 1 while they are on their
            first read.
    """

    path: str
    engine: EngineKind = "inline"
    workers: int = 0
    batches: int = 0
    samples: int = 0
    wait_s: float = 0.0
    busy_s: float = 0.0
    fresh_batches: int = 0
    bytes_held: int = 0
    pinning: str = ""
    prepared: float = 1.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second of the whole loop, waiting and user code together."""
        return self.samples / (self.wait_s + self.busy_s or math.inf)

    @property
    def wait_share(self) -> float:
        """Share of the loop's time that it waited for data, from 0 to 1."""
        return self.wait_s / (self.wait_s + self.busy_s or math.inf)

    def as_dict(self) -> dict[str, float]:
        """The figures, flat, for a logger: ``wandb.log(loader.report().as_dict())``."""
        values = asdict(self).items()
        figures = {name: it for name, it in values if isinstance(it, (int, float))}
        return figures | {"samples_per_s": self.samples_per_s, "wait_share": self.wait_share}

    def _lines(self) -> Iterator[Line]:
        fresh = f"{self.fresh_batches} batches got new memory, as all was in use"
        rate = f"{self.samples:,} samples, {self.samples_per_s:,.0f} samples/s"
        yield self.path
        yield "batches", f"{self.batches:,}", rate
        yield "waited for data", f"{self.wait_s:.2f} s", f"{100 * self.wait_share:.0f} %"
        yield "in the training loop", f"{self.busy_s:.2f} s", ""
        held = f"{self.bytes_held / (1 << 20):.1f} MiB"
        yield "held for batches", held, fresh if self.fresh_batches else ""
        if self.pinning:
            yield self.pinning
        if self.prepared < 1:
            yield f"{self.prepared:.0%} of the samples are prepared so far"
