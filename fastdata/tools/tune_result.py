"""The result of ``fastdata.tune``: its probes as a table, and the call to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fastdata.errors import counted
from fastdata.report import Line, Report

LoaderSettings = dict[str, Any]
"""Arguments of a ``DataLoader``. The argument ``workers`` is "auto", "thread" or "process"."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement of an empty loop.

    Args:
        settings: arguments of the loader.
        samples_per_s: rate of the loop; 0 if it failed.
        failed: the error, or the memory that batches would have needed; empty if it was measured.
    """

    settings: LoaderSettings
    samples_per_s: float = 0.0
    failed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TuneResult(Report):
    """The result of ``fastdata.tune``; shown as a table of all probes, with the call to paste.

    Args:
        best: arguments for ``DataLoader(dataset, shuffle=True, **result.best)``. ``workers`` is an
            argument of fastdata's loader, and only given if another engine than the usual one won.
        probes: all measurements in their order. The first one finds files and caches cold.
        seconds: time of the whole search.
        is_complete: True if the search ended by itself, False if ``max_seconds`` ended it.
    """

    best: LoaderSettings
    probes: Sequence[Probe]
    seconds: float
    is_complete: bool

    @property
    def samples_per_s(self) -> float:
        """Mean rate of the best settings, in their probes."""
        return fmean(rates_of(self.probes, self.best))

    @property
    def start_samples_per_s(self) -> float:
        """Mean rate of the settings that the search began with."""
        return fmean(rates_of(self.probes, self.probes[0].settings))

    @property
    def call(self) -> str:
        """The loader to paste into a script, shuffled as the probes were."""
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
            words = "best" if probe is last else probe.failed
            yield *values, f"{probe.samples_per_s:,.0f}", words
        rate = self.samples_per_s
        gain = rate / self.start_samples_per_s
        end = "nothing more to gain" if self.is_complete else "the time was over"
        yield f"{counted(len(self.probes), 'probe')} in {self.seconds:.1f} s: {end}"
        yield f"{rate:,.0f} samples/s, {gain:.2f} times the start's:"
        yield f"loader = {self.call}"


# Measuring


def used_settings(settings: LoaderSettings) -> LoaderSettings:
    """Return the settings that matter: without workers neither engine nor prefetching does."""
    unused = () if settings["num_workers"] else ("workers", "prefetch_factor")
    return {name: it for name, it in settings.items() if name not in unused and it != "auto"}


def rates_of(probes: Sequence[Probe], settings: LoaderSettings) -> list[float]:
    """Return the rates of settings, without the first probe, which is cold, if there are more."""
    return [probe.samples_per_s for probe in probes[1:] or probes if probe.settings == settings]
