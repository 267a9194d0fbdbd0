"""``fastdata.tune``: the loader's settings that read a dataset fastest on this machine.

The search is coordinate ascent: one parameter at a time is moved while that wins, until a whole
round over all of them changes nothing (``ascend``, which measures nothing itself). ``Judge``
measures and says who wins.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import Subset

from fastdata.datasets.batch import collate, leaves_of
from fastdata.datasets.public import ImageFolder
from fastdata.errors import MemoryBudgetError, counted
from fastdata.loaders import DataLoader
from fastdata.machine.budget import budget_bytes
from fastdata.machine.limits import available_bytes, usable_cores
from fastdata.machine.units import format_bytes
from fastdata.report import Line, Report, progress_bar
from fastdata.tools import check_folder, in_subprocess, is_kept, measure_rate, positive, shuffled
from fastdata.tools.bench import add_transform, find_transform, make_recipe

Settings = dict[str, Any]

_WORKERS_PER_GPU = 4  # the usual rule; where the search begins
_CLEAR = 1.25
"""What is so many times as fast is not measured again."""
_WORTH = 1.03
"""What costs more must be so many times as fast; what costs less may be as much slower."""
_BATCH_S = 0.1
"""A batch of a probe takes a worker about this long, where it may be smaller than the user's."""
_PROBES = 80
_GRACE_S = 2.0
_MOSTLY_PREPARED = 0.9
"""Share of the samples from which on threads are worth it, although the rest are still to be
prepared."""
_SAMPLES_PREPARED = 512


@dataclass(frozen=True, slots=True)
class Probe:
    """One measurement of an empty loop.

    Args:
        settings: of the loader.
        samples_per_s: of the loop; 0 where it failed.
        failed: why nothing was measured: what was raised, or would not have fit into memory.
    """

    settings: Settings
    samples_per_s: float = 0.0
    failed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TuneResult(Report):
    """What ``fastdata.tune`` found; shown as a table of all probes, with the call to paste.

    Args:
        best: arguments of ``DataLoader(dataset, shuffle=True, **result.best)``. The argument
            ``workers`` is fastdata's own; it is there only where another engine than the usual one
            won.
        probes: all that was measured, in this order. The first one finds files and caches cold.
        seconds: that it took in all.
        is_complete: whether the search ended by itself, and not by ``max_seconds``.
    """

    best: Settings
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


def tune(
    dataset: Any,
    *,
    batch_size: int = 64,
    max_seconds: float = 60.0,
    parameters: Mapping[str, Sequence[Any]] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    progress: bool = True,
) -> TuneResult:
    """Measure which settings of a ``DataLoader`` read a dataset fastest, one parameter at a time.

    Each probe is an empty loop (no model) over shuffled samples in a forked process of its own,
    after a warm-up. What wins by less than 25 % is measured again, in turns with what it beat.
    What costs more processes or memory must gain 3 %. The search begins with the usual rule of 4
    workers per GPU, or with as many as there are cores.

    No process is left behind. Probes of a dataset that is slow to read are in smaller batches of
    the same samples.

    Args:
        dataset: any map-style dataset, fastdata's or not. Of one that is still being prepared, up
            to 512 samples are prepared for the probes, and stay so.
        batch_size: samples in a batch.
        max_seconds: time box; the best so far is the result when it is over.
        parameters: names of the loader's arguments and the values to choose from, numbers in
            ascending order; default: ``num_workers``, ``workers`` (threads or processes) and
            ``prefetch_factor``.
        collate_fn: the loader's; default ``fastdata.collate``.
        progress: show a progress bar on standard error.

    Returns:
        A ``TuneResult``: ``DataLoader(dataset, shuffle=True, **result.best)``; ``print(result)``
        shows all probes.

    Raises:
        TimeoutError: no probe ended within ``max_seconds``.
        Exception: whatever the dataset raises with the settings to begin with, as one that is
            empty or cannot be read by index does.

    Example:
        >>> squares = [(float(i), i * i) for i in range(50)]
        >>> options = {"parameters": {"num_workers": (0, 1)}, "max_seconds": 2, "progress": False}
        >>> result = tune(squares, batch_size=5, **options)
        >>> len(DataLoader(squares, **result.best))
        10
    """
    space = parameters or _usual_space(dataset)
    usual = min(_WORKERS_PER_GPU, usable_cores())
    counts = space.get("num_workers", [usual])
    start = {name: values[0] for name, values in space.items()}
    start["num_workers"] = min(counts, key=lambda count: abs(count - usual))
    start["batch_size"] = batch_size
    began = time.perf_counter()
    with progress_bar(math.ceil(max_seconds), "tuning", unit="s", enabled=progress) as bar:
        judge = Judge(_prepared(dataset), collate_fn or collate, began + max_seconds, bar)
        best = start
        judge.probe(start)  # finds files and caches cold
        is_complete = False
        with suppress(TimeoutError):
            judge.probe(start)
            for better in ascend(space, start, judge.wins):
                best = better
            is_complete = True
    return TuneResult(
        best=used_settings(best),
        probes=judge.probes,
        seconds=time.perf_counter() - began,
        is_complete=is_complete,
    )


# The search


def ascend(
    space: Mapping[str, Sequence[Any]], start: Settings, wins: Callable[[Settings, Settings], bool]
) -> Iterator[Settings]:
    """Coordinate ascent: move one parameter at a time while the challenger wins; yields winners.

    No worker at all is not fewer of them but another engine, which has no further parameters: it
    comes last.
    """
    best = start
    before = None
    while best != before:
        before = best
        for name, values in space.items():
            if name == "num_workers" and start[name]:
                values = [value for value in values if value]
            for direction in (1, -1):
                ordered = values[::direction]
                for value in ordered[ordered.index(best[name]) + 1 :]:
                    challenger = best | {name: value}
                    if not wins(challenger, best):
                        break
                    best = challenger
                    yield best
    no_worker = best | {"num_workers": 0}
    if best["num_workers"] and 0 in space.get("num_workers", ()) and wins(no_worker, best):
        yield no_worker


def _usual_space(dataset: Any) -> dict[str, Sequence[Any]]:
    cores = usable_cores()
    engine = DataLoader(dataset, num_workers=1).report().engine
    return {
        "num_workers": sorted({0, 1, 2, 4, 8, 16, cores, 2 * cores, 4 * cores}),
        "workers": ("auto", "process" if engine == "thread" else "thread"),
        "prefetch_factor": (2, 4, 8),
    }


def _prepared(dataset: Any) -> Any:
    """Return the dataset, or some samples of one that is still being prepared, prepared now."""
    if not is_kept(dataset) or dataset.filled_share() >= _MOSTLY_PREPARED:
        return dataset
    chosen = islice(shuffled(dataset), min(len(dataset), _SAMPLES_PREPARED))
    some = Subset(dataset, sorted(chosen))
    own = torch.Generator()
    for _ in DataLoader(some, 16, num_workers="auto", collate_fn=list, generator=own):
        pass
    return some


# Measuring


def used_settings(settings: Settings) -> Settings:
    """Return the settings that matter: without workers neither engine nor prefetching does."""
    unused = () if settings["num_workers"] else ("workers", "prefetch_factor")
    return {name: it for name, it in settings.items() if name not in unused and it != "auto"}


def rates_of(probes: Sequence[Probe], settings: Settings) -> list[float]:
    """Return the rates of settings, without the first probe, which is cold, if there are more."""
    used = used_settings(settings)
    return [probe.samples_per_s for probe in probes[1:] or probes if probe.settings == used]


def _cost(settings: Settings) -> tuple[float, int]:
    """Return processes and batches that settings take, which decide between equally fast ones."""
    workers = settings["num_workers"] * (0.5 if settings.get("workers") == "thread" else 1)
    return workers, settings.get("prefetch_factor", 2)


@dataclass
class Judge:
    """Measures settings, holds the probes, and decides which of two wins."""

    dataset: Any
    collate_fn: Any
    deadline: float
    bar: Any
    probes: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probe_s = min(1.0, max(0.2, (self.deadline - time.perf_counter()) / _PROBES))
        self.sample_s, self.sample_bytes = in_subprocess(self._look, limit_s=None)

    def _look(self) -> tuple[float, int]:
        """Return seconds and bytes of a sample; errors of the dataset are raised to the user."""
        self.dataset[0]
        began = time.perf_counter()
        tensors = leaves_of(self.collate_fn([self.dataset[0]]))
        seconds = time.perf_counter() - began
        return seconds, sum(getattr(tensor, "nbytes", 0) for tensor in tensors)

    def wins(self, challenger: Settings, best: Settings) -> bool:
        """Return True if a challenger is better than the best, measured again if that is close."""
        if used_settings(challenger) == used_settings(best):
            return False
        if not rates_of(self.probes, challenger):
            self.probe(challenger)
        least = (
            1 / _WORTH if _cost(used_settings(challenger)) < _cost(used_settings(best)) else _WORTH
        )
        is_close = least < self._gain(challenger, best) < _CLEAR
        if is_close and len(rates_of(self.probes, challenger)) == 1:
            self.probe(best)
            self.probe(challenger)
        return self._gain(challenger, best) > least

    def _gain(self, challenger: Settings, best: Settings) -> float:
        return fmean(rates_of(self.probes, challenger)) / fmean(rates_of(self.probes, best))

    def probe(self, settings: Settings) -> None:
        """Measure settings, or note why they cannot be measured.

        Raises:
            TimeoutError: the time is over.
            Exception: the first two probes, of the settings to begin with, fail.
        """
        used = used_settings(settings)
        began = time.perf_counter()
        left_s = max(0.0, self.deadline - began)
        if self.probes and left_s < self.probe_s:
            raise TimeoutError
        try:
            probe = Probe(used, self._measure(used, left_s))
        except Exception as error:  # a user's dataset raises anything
            if len(self.probes) < 2 or isinstance(error, TimeoutError):
                raise
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            probe = Probe(used, failed=failed)
        self.probes.append(probe)
        self.bar.update(round(time.perf_counter() - began))

    def _measure(self, settings: Settings, left_s: float) -> float:
        batches = 2 + settings["num_workers"] * settings.get("prefetch_factor", 2)
        need = batches * settings["batch_size"] * self.sample_bytes
        budget = budget_bytes(available_bytes())
        if need > budget.bytes:
            raise MemoryBudgetError(f"batches would take {format_bytes(need)}, but {budget}")
        options = dict(settings)
        if not hasattr(self.dataset, "__getitems__"):
            most = int(_BATCH_S / max(self.sample_s, 1e-9))
            options["batch_size"] = min(options["batch_size"], max(1, most))
        order = shuffled(self.dataset, len(self.probes))

        def work() -> float:
            loader = DataLoader(self.dataset, sampler=order, collate_fn=self.collate_fn, **options)
            return measure_rate(loader, seconds=self.probe_s, limit_s=left_s)

        return in_subprocess(work, limit_s=left_s + _GRACE_S)


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="class folders of images")
    add_transform(parser, "default: 256 px squares, random crop to 224, flip, float32")
    add(
        "--batch-size",
        type=positive,
        default=64,
        metavar="N",
        help="images in a batch; default: %(default)s",
    )
    add(
        "--storage",
        choices=("auto", "shared", "compressed", "none"),
        default="auto",
        help="as ImageFolder's: auto is what fits, none tunes decoding; default: %(default)s",
    )
    add(
        "--seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="time for all of it; default: %(default)g",
    )


def run(options: argparse.Namespace) -> int:
    check_folder(options.folder)
    own = options.transform
    transform = find_transform(own) if own else make_recipe("crop", "float32")
    with ImageFolder(options.folder, transform, storage=options.storage) as dataset:
        print(dataset.storage_plan.reason)
        print(tune(dataset, batch_size=options.batch_size, max_seconds=options.seconds))
    return 0
