"""Messages to the user: progress of a preparation, warnings, and reports of epochs."""

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
from html import escape
from itertools import groupby
from typing import Any, Literal

from fastdata.errors import FastDataWarning

EngineKind = Literal["thread", "process", "inline"]

log = logging.getLogger("fastdata")

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm warns, and shows bars as text.
    warnings.simplefilter("ignore")
    from tqdm.auto import tqdm


class _Bar(tqdm):  # type: ignore[type-arg]  # generic in the stubs only
    monitor_interval = 0  # tqdm's monitor is a thread that would outlive the preparation
    # tqdm's own lock is a semaphore that forked processes share. A process that is killed while it
    # draws a bar, or only makes one, would never release it, and every later bar in the processes
    # that share it would wait forever.
    _lock = threading.RLock()


def progress_bar(
    total: int, description: str, *, unit: str = "img", enabled: bool = True
) -> tqdm[Any]:
    """Return a progress bar, which shows nothing outside of terminals and notebooks.

    Args:
        total: number of items.
        description: text in front of the bar.
        unit: name of one item.
        enabled: False shows nothing.
    """
    options: dict[str, Any] = {}  # in a terminal the variable TQDM_DISABLE decides
    if not (enabled and hasattr(sys.stderr, "isatty")):  # some streams have only `write`
        options["disable"] = True
    elif not sys.stderr.isatty():
        options["disable"] = None  # tqdm draws in notebooks only
    return _Bar(
        total=total, desc=description, unit=unit, dynamic_ncols=True, mininterval=0.5, **options
    )


def warn_user(message: str) -> None:
    """Warn, and name the line of the user's code that called fastdata."""
    # From Python 3.12 on, `skip_file_prefixes` of warnings.warn would do this.
    frame = inspect.currentframe()
    depth = 1
    while frame and frame.f_globals.get("__name__", "").startswith("fastdata."):
        frame = frame.f_back
        depth += 1
    warnings.warn(message, FastDataWarning, stacklevel=depth)


Line = str | tuple[str, ...]
"""A line of a report: text, or a row of a table."""


def as_text(lines: Iterable[Line]) -> str:
    """Return lines as text, with the columns of tables aligned.

    A row has a name, then figures, which are aligned to the right, and text at its end.
    """
    # Consecutive rows are one table.
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
    """A value that is shown as lines of text and tables; a notebook shows one table."""

    __slots__ = ()

    @abstractmethod
    def _lines(self) -> Iterable[Line]: ...

    def __repr__(self) -> str:
        return as_text(self._lines())

    def _repr_html_(self) -> str:
        """Return the lines as the rows of a table, which notebooks show instead of ``repr``."""
        rows = ""
        for line in self._lines():
            if isinstance(line, str):
                rows += f"<tr><td colspan=9>{escape(line)}</td></tr>"
            else:
                rows += f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>"
        return f"<table>{rows}</table>"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EpochReport(Report):
    """Speed and memory of the latest epoch of a loader, complete or not.

    If the training loop waits for data more than about 10 % of the time, the loader limits
    training, and ``path`` shows how it reads and why. If the loop waits less, a faster loader would
    not help.

    Args:
        path: how batches are read and why, in one line; its wording may change.
        engine: where batches were read: in a ``"thread"``, a ``"process"`` or in the training loop
            (``"inline"``).
        workers: number of threads or processes; 0 for ``"inline"``.
        batches: number of batches that the loop received, since the resume if there was one.
        samples: number of samples in these batches, by the length of a batch's first tensor; one
            for each batch if ``batch_size=None``.
        wait_s: seconds the training loop waited for a batch.
        busy_s: seconds the training loop spent between batches, in the user's code.
        fresh_batches: number of batches in new memory, because the user still held all buffers.
        bytes_held: bytes that the loader keeps for reuse, including those of batches in use.
        pinning: line that says if batches are in pinned memory, and why; empty if pinning was not
            requested.
        prepared: share of the samples that are prepared; below 1 until each was read once.
        epochs: (seconds waited, seconds busy) of each of the latest epochs, oldest first.
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
    epochs: tuple[tuple[float, float], ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the whole loop, with waiting and the user's code."""
        return self.samples / (self.wait_s + self.busy_s or math.inf)

    @property
    def wait_share(self) -> float:
        """Share of the loop's time in which it waited for data, from 0 to 1."""
        return self.wait_s / (self.wait_s + self.busy_s or math.inf)

    def plot(self) -> Any:
        """Return a figure of the seconds that each epoch waited and was busy. Needs matplotlib."""
        from fastdata.pictures import show_bars

        names = [f"epoch {number}" for number, _ in enumerate(self.epochs, 1)]
        waited = [wait_s for wait_s, _ in self.epochs]
        busy = [busy_s for _, busy_s in self.epochs]
        parts = {"waited for data": waited, "in the training loop": busy}
        return show_bars(names, parts, "seconds")

    def as_dict(self) -> dict[str, float]:
        """Return the figures for a logger: ``wandb.log(loader.report().as_dict())``."""
        values = asdict(self).items()
        figures = {name: it for name, it in values if isinstance(it, (int, float))}
        return figures | {"samples_per_s": self.samples_per_s, "wait_share": self.wait_share}

    def _lines(self) -> Iterator[Line]:
        fresh = f"{self.fresh_batches} batches got new memory, because all buffers were in use"
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
