"""Measurements (probes) of a loader's settings, and the choice of the better one of two."""

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
"""Settings with more workers or memory must be faster by this factor to win; settings with fewer
win even if they are slower, up to this factor."""

_BATCH_S = 0.1
"""Most seconds that a worker may need for a batch of a probe. If samples are slow to read, batches
of probes are smaller."""

_PROBES = 80
"""Number of probes for which the time of a search should suffice."""

_GRACE_S = 2.0
"""Seconds that a probe may take longer than the time that is left."""

_MOSTLY_PREPARED = 0.9
"""Share of prepared samples from which on probes are as fast as later epochs."""

_SAMPLES_PREPARED = 512
"""Number of samples that are prepared for probes of a dataset that is still being prepared."""


@dataclass
class Judge:
    """Measures settings, holds the probes, and decides which of two settings wins.

    Attributes:
        dataset: the dataset to read.
        collate_fn: the loader's ``collate_fn``.
        deadline: end of the search, by ``time.perf_counter``.
        bar: progress bar, in seconds.
        probes: all probes so far, in their order.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any]
    deadline: float
    bar: tqdm[Any]
    probes: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A probe must be short enough for a whole search, but long enough for a steady rate.
        self.probe_s = min(1.0, max(0.2, (self.deadline - time.perf_counter()) / _PROBES))
        self.sample_s, self.sample_bytes = in_subprocess(self._measure_sample, limit_s=None)

    def _measure_sample(self) -> tuple[float, int]:
        """Return the seconds and bytes of a sample; errors of the dataset are raised unchanged."""
        # The first read may open files and fill caches, so it is not measured.
        self.dataset[0]
        began = time.perf_counter()
        tensors = leaves_of(self.collate_fn([self.dataset[0]]))
        seconds = time.perf_counter() - began
        return seconds, sum(getattr(tensor, "nbytes", 0) for tensor in tensors)

    def wins(self, challenger: LoaderSettings, best: LoaderSettings) -> bool:
        """Return True if a challenger is better than the best; close results are measured again."""
        new = used_settings(challenger)
        old = used_settings(best)
        if new == old:
            return False
        if not rates_of(self.probes, new):
            self.probe(new)
        least = 1 / _WORTH if _cost(new) < _cost(old) else _WORTH
        is_close = least < self._gain(new, old) < _CLEAR
        if is_close and len(rates_of(self.probes, new)) == 1:
            # The two take turns, so that changes of other load on the machine affect both.
            self.probe(old)
            self.probe(new)
        return self._gain(new, old) > least

    def _gain(self, challenger: LoaderSettings, best: LoaderSettings) -> float:
        return fmean(rates_of(self.probes, challenger)) / fmean(rates_of(self.probes, best))

    def probe(self, settings: LoaderSettings) -> None:
        """Measure settings and store the result, or the reason why they cannot be measured.

        Raises:
            TimeoutError: the time is over.
            Exception: one of the first two probes, with the initial settings, has failed.
        """
        began = time.perf_counter()
        left_s = max(0.0, self.deadline - began)
        if self.probes and left_s < self.probe_s:
            raise TimeoutError
        try:
            probe = Probe(settings, self._measure(settings, left_s))
        except Exception as error:  # a user's dataset may raise anything
            # With the initial settings, the error comes from the dataset and not from a setting.
            if len(self.probes) < 2 or isinstance(error, TimeoutError):
                raise
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            probe = Probe(settings, failed=failed)
        self.probes.append(probe)
        self.bar.update(round(time.perf_counter() - began))

    def _measure(self, settings: LoaderSettings, left_s: float) -> float:
        # One batch is in the loop, one is being made, and workers have read the others ahead.
        batches = 2 + settings["num_workers"] * settings.get("prefetch_factor", 2)
        need = batches * settings["batch_size"] * self.sample_bytes
        budget = budget_bytes(available_bytes())
        if need > budget.bytes:
            raise MemoryBudgetError(f"batches would need {format_bytes(need)}, but {budget}")
        options = dict(settings)
        # A dataset that reads whole batches is fast, and its speed depends on the batch size: keep
        # that size.
        if not hasattr(self.dataset, "__getitems__"):
            most = int(_BATCH_S / max(self.sample_s, 1e-9))
            options["batch_size"] = min(options["batch_size"], max(1, most))
        order = shuffled(self.dataset, len(self.probes))

        def work() -> float:
            loader = DataLoader(self.dataset, sampler=order, collate_fn=self.collate_fn, **options)
            return measure_rate(loader, seconds=self.probe_s, limit_s=left_s)

        return in_subprocess(work, limit_s=left_s + _GRACE_S)


def prepare_some(dataset: Any) -> Any:
    """Return the dataset if it needs no preparation, else some of its samples, prepared now."""
    if not is_kept(dataset) or dataset.filled_share() >= _MOSTLY_PREPARED:
        return dataset
    chosen = islice(shuffled(dataset), min(len(dataset), _SAMPLES_PREPARED))
    some = Subset(dataset, sorted(chosen))
    own = torch.Generator()  # without it the loader would draw its seed from the global generator
    for _ in DataLoader(some, 16, num_workers="auto", collate_fn=list, generator=own):
        pass
    return some


def _cost(settings: LoaderSettings) -> tuple[float, int]:
    """Return the cost of settings, which decides between equally fast ones: workers, then batches.

    A thread counts as half a process.
    """
    workers = settings["num_workers"] * (0.5 if settings.get("workers") == "thread" else 1)
    return workers, settings.get("prefetch_factor", 2)
