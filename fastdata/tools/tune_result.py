"""The result of ``fastdata.tune``: its measurements as a table, and the call to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fastdata.errors import counted
from fastdata.report import Line, Report

LoaderSettings = dict[str, Any]
"""Arguments of a ``DataLoader`` by name; ``workers`` is "auto", "thread" or "process"."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement of an empty loop.

    Args:
        settings: arguments of the loader.
        samples_per_s: samples per second of the loop; 0 if it failed.
        failed: the error, or the memory that batches would have needed; empty if all went well.
    """

    settings: LoaderSettings
    samples_per_s: float = 0.0
    failed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TuneResult(Report):
    """The result of ``fastdata.tune``; printed as a table of all probes, with the call to paste.

    Args:
        best: arguments for ``DataLoader(dataset, shuffle=True, **result.best)``. They include
            ``workers`` only if another value than the default ``"auto"`` won; torch's own loader
            does not have this argument.
        probes: all measurements in their order. The first one fills caches, and does not count.
        seconds: time of the whole search.
        is_complete: True if the search was finished, False if ``max_seconds`` ended it.
    """

    best: LoaderSettings
    probes: Sequence[Probe]
    seconds: float
    is_complete: bool

    @property
    def samples_per_s(self) -> float:
        """Mean samples per second of the best settings, over their probes."""
        return fmean(rates_of(self.probes, self.best))

    @property
    def start_samples_per_s(self) -> float:
        """Mean samples per second of the settings that the search began with."""
        return fmean(rates_of(self.probes, self.probes[0].settings))

    @property
    def call(self) -> str:
        """The code of the best loader, to paste into a script; shuffled, as the probes were."""
        words = "dataset"
        for name, value in {"batch_size": None, "shuffle": True, **self.best}.items():
            words += f", {name}={value!r}"
        return f"DataLoader({words})"

    def _lines(self) -> Iterator[Line]:
        names: dict[str, None] = {}
        for probe in self.probes:
            names |= dict.fromkeys(probe.settings)
            if probe.settings == self.best:
                last = probe
        yield *names, "samples/s", ""
        for probe in self.probes:
            values = [str(probe.settings.get(name, "-")) for name in names]
            words = probe.failed
            if probe is last:
                words = "best"
            elif probe is self.probes[0]:
                words = "warm-up"
            yield *values, f"{probe.samples_per_s:,.0f}", words
        rate = self.samples_per_s
        gain = rate / self.start_samples_per_s
        end = "no other setting is faster" if self.is_complete else "the time limit was reached"
        yield f"{counted(len(self.probes), 'measurement')} in {self.seconds:.1f} s: {end}"
        yield (
            f"{rate:,.0f} samples/s on average with the best settings, {gain:.2f} times as many as "
            "with the first settings:"
        )
        yield f"loader = {self.call}"


def used_settings(settings: LoaderSettings) -> LoaderSettings:
    """Return the settings that have an effect.

    Without workers, ``workers`` and ``prefetch_factor`` have none. "auto" is the default.
    """
    unused = () if settings["num_workers"] else ("workers", "prefetch_factor")
    return {name: it for name, it in settings.items() if name not in unused and it != "auto"}


def rates_of(probes: Sequence[Probe], settings: LoaderSettings) -> list[float]:
    """Return the samples per second of the probes of these settings.

    The first probe of all is left out if there are others: its caches were still empty.
    """
    return [probe.samples_per_s for probe in probes[1:] or probes if probe.settings == settings]
