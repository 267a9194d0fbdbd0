"""Probes of a loader's settings, and which of two settings wins."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

from fastdata.datasets.trees import leaves_of
from fastdata.errors import MemoryBudgetError
from fastdata.loaders.loader import DataLoader
from fastdata.machine.budget import budget_bytes
from fastdata.machine.limits import available_bytes
from fastdata.machine.units import format_bytes
from fastdata.tools.measure import in_subprocess, is_kept, measure_rate, shuffled
from fastdata.tools.tune_result import Probe, rates_of, used_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tqdm import tqdm

    from fastdata.tools.tune_result import LoaderSettings

_CLEAR = 1.25
"""Settings that are faster by this factor win without a second measurement."""

_WORTH = 1.03
"""Settings that cost more must be faster by this factor; cheaper ones may be slower by it."""

_BATCH_S = 0.1
"""Most seconds that a worker reads for a batch of a probe; slow samples come in smaller batches."""

_PROBES = 80

_GRACE_S = 2.0

_MOSTLY_PREPARED = 0.9
"""Share of prepared samples from which probes of the dataset are as fast as later epochs."""

_SAMPLES_PREPARED = 512


@dataclass
class Judge:
    """Measures settings, holds the probes, and decides which of two wins."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    deadline: float
    bar: tqdm[Any]
    probes: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Short enough for a whole search, and long enough for a steady rate.
        self.probe_s = min(1.0, max(0.2, (self.deadline - time.perf_counter()) / _PROBES))
        self.sample_s, self.sample_bytes = in_subprocess(self._look, limit_s=None)

    def _look(self) -> tuple[float, int]:
        """Return seconds and bytes of a sample; errors of the dataset are raised to the user."""
        # The first read may open files and fill caches.
        self.dataset[0]
        began = time.perf_counter()
        tensors = leaves_of(self.collate_fn([self.dataset[0]]))
        seconds = time.perf_counter() - began
        return seconds, sum(getattr(tensor, "nbytes", 0) for tensor in tensors)

    def wins(self, challenger: LoaderSettings, best: LoaderSettings) -> bool:
        """Return True if a challenger is better than the best, measured again if that is close."""
        asked = used_settings(challenger)
        before = used_settings(best)
        if asked == before:
            return False
        if not rates_of(self.probes, asked):
            self.probe(asked)
        least = 1 / _WORTH if _cost(asked) < _cost(before) else _WORTH
        is_close = least < self._gain(asked, before) < _CLEAR
        if is_close and len(rates_of(self.probes, asked)) == 1:
            # In turns, so that a load that comes or goes meanwhile affects both.
            self.probe(before)
            self.probe(asked)
        return self._gain(asked, before) > least

    def _gain(self, challenger: LoaderSettings, best: LoaderSettings) -> float:
        return fmean(rates_of(self.probes, challenger)) / fmean(rates_of(self.probes, best))

    def probe(self, settings: LoaderSettings) -> None:
        """Measure settings, or note why they cannot be measured.

        Raises:
            TimeoutError: the time is over.
            Exception: the first two probes, of the settings to begin with, fail.
        """
        began = time.perf_counter()
        left_s = max(0.0, self.deadline - began)
        if self.probes and left_s < self.probe_s:
            raise TimeoutError
        try:
            probe = Probe(settings, self._measure(settings, left_s))
        except Exception as error:  # a user's dataset raises anything
            # With the settings to begin with, an error is the dataset's and not of a setting.
            if len(self.probes) < 2 or isinstance(error, TimeoutError):
                raise
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            probe = Probe(settings, failed=failed)
        self.probes.append(probe)
        self.bar.update(round(time.perf_counter() - began))

    def _measure(self, settings: LoaderSettings, left_s: float) -> float:
        # One batch is in the loop and one is being made, besides those that workers read ahead.
        batches = 2 + settings["num_workers"] * settings.get("prefetch_factor", 2)
        need = batches * settings["batch_size"] * self.sample_bytes
        budget = budget_bytes(available_bytes())
        if need > budget.bytes:
            raise MemoryBudgetError(f"batches would take {format_bytes(need)}, but {budget}")
        options = dict(settings)
        # A dataset that reads whole batches is fast, and its rate depends on their size.
        if not hasattr(self.dataset, "__getitems__"):
            most = int(_BATCH_S / max(self.sample_s, 1e-9))
            options["batch_size"] = min(options["batch_size"], max(1, most))
        order = shuffled(self.dataset, len(self.probes))

        def work() -> float:
            loader = DataLoader(self.dataset, sampler=order, collate_fn=self.collate_fn, **options)
            return measure_rate(loader, seconds=self.probe_s, limit_s=left_s)

        return in_subprocess(work, limit_s=left_s + _GRACE_S)


def _prepared(dataset: Any) -> Any:
    """Return the dataset, or some samples of one that is still being prepared, prepared now."""
    if not is_kept(dataset) or dataset.filled_share() >= _MOSTLY_PREPARED:
        return dataset
    chosen = islice(shuffled(dataset), min(len(dataset), _SAMPLES_PREPARED))
    some = Subset(dataset, sorted(chosen))
    own = torch.Generator()  # the loader would else draw its seed from the global one
    for _ in DataLoader(some, 16, num_workers="auto", collate_fn=list, generator=own):
        pass
    return some


def _cost(settings: LoaderSettings) -> tuple[float, int]:
    """Return processes and batches that settings take, which decide between equally fast ones."""
    workers = settings["num_workers"] * (0.5 if settings.get("workers") == "thread" else 1)
    return workers, settings.get("prefetch_factor", 2)
