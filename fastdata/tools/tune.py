"""``fastdata.tune``: the loader's settings that serve a dataset fastest on this machine, found by measuring.

The search is coordinate ascent: one parameter at a time is moved while that wins, until a whole round over all of them
changes nothing (``ascend``, which measures nothing itself). ``_Judge`` measures and says who wins, ``probe.py`` how
fast a loader is. Equal seeds read equal samples in each probe; which probes follow depends on the rates found alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import IterableDataset

from fastdata.batch import collate, flatten
from fastdata.dataset import PreparedDataset, prepared_anew
from fastdata.errors import MemoryBudgetError, kind_of
from fastdata.loader import DataLoader
from fastdata.loader.view import MOSTLY_PREPARED, LoaderView
from fastdata.memory import (
    Budget,
    StorageReport,
    available_bytes,
    budget_bytes,
    format_bytes,
    tree_pss_bytes,
    usable_cores,
)
from fastdata.prefetch import CudaPrefetcher
from fastdata.ranks import local_ranks
from fastdata.report import progress_bar
from fastdata.tools.bench import chart
from fastdata.tools.measure import EndlessOrder, Rate, apart, differs, measure_rate, undisturbed_generators

Settings = dict[str, Any]
Outcome = Literal["measured", "cut short", "not started", "failed"]

PARAMETERS = ("num_workers", "workers", "prefetch_factor", "batch_size")
_STORED = ("storage", "codec")
_WORKERS_PER_GPU = 4  # the usual rule; where the search begins
_BATCH_SIZE = 64
_CLEAR = 1.25
"""A rate that is so many times another one, and beyond the noise, is not measured again."""
_WORTH = 0.03
"""What costs more memory or processes must gain at least this share, and what costs less may lose less than this."""
_BATCH_S = 0.1
"""A batch of a probe takes a worker about this long, where it may be smaller than the user's."""
_WINDOWS, _LEAST_WINDOW_S, _MOST_WINDOW_S = 80, 0.2, 1.0
_GRACE_S = 2.0
_LOOKED_AT = 4
_KEPT_FOR_PROBES = 512
_LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One measurement of an empty loop, or why there was none.

    Args:
        settings: of the loader, and of the dataset where its storage is tuned.
        outcome: ``"cut short"`` as soon as it could not win; ``"not started"`` where memory would not have sufficed.
        samples_per_s: of the loop; 0 where nothing was measured.
        error: standard error of it; 0 where it is not known.
        seconds: that the probe took in all.
        reason: what ``outcome`` follows from, where it is not ``"measured"``.
    """

    settings: Settings
    outcome: Outcome
    samples_per_s: float = 0.0
    error: float = 0.0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult:
    """What ``fastdata.tune`` found; ``print`` shows each probe.

    Args:
        best: arguments of ``DataLoader(dataset, **result.best)``. The argument ``workers`` is fastdata's own; it is
            there only where another engine than the usual one won.
        best_storage: arguments of the dataset, such as ``storage`` and ``codec``; empty unless they were tuned.
        samples_per_s: of the best, over all probes of it.
        start_samples_per_s: of the settings that the search began with.
        probes: all that was measured, in this order.
        seconds: that it took in all.
        ended: why it ended.
    """

    best: Settings
    best_storage: Settings
    samples_per_s: float
    start_samples_per_s: float
    probes: tuple[Probe, ...]
    seconds: float
    ended: str

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)

    def plot(self, file: str | Path) -> None:
        """Draw the rate of each probe as a bar, the best in another colour (extra: plot)."""
        shown = [probe for probe in self.probes if probe.samples_per_s]
        colours = ["#2f7ed8" if self._is_best(probe) else "#9aa5b1" for probe in shown]
        rates, errors = zip(*((probe.samples_per_s, probe.error) for probe in shown), strict=True)
        with chart(file, width=7.0, height=1.2 + 0.32 * len(shown), feature="plot()") as axes:
            bars = axes.barh(range(len(shown)), rates, xerr=errors, color=colours)
            axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=4)
            axes.set_yticks(range(len(shown)), [_in_words(probe.settings) for probe in shown])
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set_xlabel("samples/s, an empty loop")

    def _is_best(self, probe: Probe) -> bool:
        return _of_loader(probe.settings) == self.best and _of_dataset(probe.settings) == self.best_storage

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for probe in self.probes for name in probe.settings))
        rows = [(*names, "samples/s", "+-", "seconds", "")]
        for probe in self.probes:
            figures = f"{probe.samples_per_s:,.0f}" if probe.samples_per_s else "-"
            error = f"{probe.error:,.0f}" if probe.error else "-"
            said = "best" if self._is_best(probe) else "" if probe.outcome == "measured" else probe.outcome
            words = f"{said}: {probe.reason}" if probe.reason else said
            rows.append(
                (*(f"{probe.settings.get(n, '-')}" for n in names), figures, error, f"{probe.seconds:.1f}", words)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
        gain = self.samples_per_s / self.start_samples_per_s if self.start_samples_per_s else 1.0
        best = ", ".join(f"{name}={value!r}" for name, value in (self.best | self.best_storage).items())
        last = f"best: {best}: {self.samples_per_s:,.0f} samples/s, {gain:.2f} times the start's"
        return "\n".join([*lines, last, f"{len(self.probes)} probes in {self.seconds:.1f} s; ended as {self.ended}"])


def tune(
    dataset: Any,
    *,
    batch_size: int | None = None,
    max_seconds: float = 60.0,
    parameters: Iterable[str] | Mapping[str, Sequence[Any]] = PARAMETERS,
    device: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    memory_limit: int | float | str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> TuneResult:
    """Measure which settings of a ``DataLoader`` serve a dataset fastest, one parameter at a time.

    Each probe is an empty loop (no model) in a forked process of its own, over samples shuffled by ``seed``, after a
    warm-up. It is cut short as soon as it cannot win. Two rates that are within their noise (Welch's t-test of time
    slices, at 5 %), or less than 25 % apart, are measured again in turns where that can change who wins. What costs
    more processes or memory must gain 3 %. The search begins with the usual rule of 4 workers per GPU, or with as many
    as there are cores.

    Neither the dataset nor random generators of this process change, no process is left behind. Probes of a dataset
    that is slow to read are in smaller batches of the same samples.

    Args:
        dataset: any map-style dataset, fastdata's or not. Of one that is still being prepared, up to 512 samples are
            prepared for the probes.
        batch_size: samples in a batch, which is then not tuned; by default it is, from 64 on.
        max_seconds: time box; the best so far is the result when it is over.
        parameters: names of what to tune, in this order, of ``num_workers``, ``workers`` (the engine: threads or
            processes), ``prefetch_factor``, ``batch_size``, and, for a fastdata dataset, ``storage`` and ``codec``;
            or a mapping of names to the values to choose from, numbers in ascending order.
        device: where batches go by a ``CudaPrefetcher``; probes with one run in this process, which alone can use it.
        collate_fn: the loader's; default ``fastdata.collate``.
        memory_limit: the most memory that a probe may take, as datasets have it; default: what is free.
        seed: of the order that samples are read in.
        progress: show a progress bar on standard error.

    Returns:
        A ``TuneResult``: ``DataLoader(dataset, **result.best)``; ``print(result)`` shows all probes.

    Raises:
        TypeError: the dataset cannot be read by index.
        ValueError: a parameter is not known, has no values, or the dataset is empty.
        MemoryBudgetError: not even the settings to begin with fit ``memory_limit``.
        Exception: whatever the dataset raises with the settings to begin with.

    Example:
        >>> squares = [(float(i), i * i) for i in range(50)]
        >>> result = tune(squares, batch_size=5, parameters={"num_workers": (0, 1)}, max_seconds=2, progress=False)
        >>> len(DataLoader(squares, **result.best))
        10
    """
    if max_seconds <= 0:
        raise ValueError(f"max_seconds={max_seconds}: probes take time")
    space = _space(dataset, batch_size, parameters)
    start = _start(space, batch_size, dataset)
    began = time.perf_counter()
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(math.ceil(max_seconds), "tuning", unit="s", enabled=progress))
        judge = _Judge(
            dataset=dataset,
            seed=seed,
            deadline=began + max_seconds,
            window_s=min(_MOST_WINDOW_S, max(_LEAST_WINDOW_S, max_seconds / _WINDOWS)),
            collate_fn=collate_fn,
            device=device,
            memory_limit=memory_limit,
            tunes_batches="batch_size" in space,
            stack=stack,
            bar=bar,
        )
        judge.begin(start)
        try:
            best, ended = ascend(space, start, judge.wins), "a whole round changed nothing"
        except _TimeOverError:
            best, ended = judge.best, f"{max_seconds:g} s were over"
    return TuneResult(
        best=_of_loader(best),
        best_storage=_of_dataset(best),
        samples_per_s=judge.rates[_canonical(best)].samples_per_s,
        start_samples_per_s=judge.rates[_canonical(start)].samples_per_s,
        probes=tuple(judge.probes),
        seconds=time.perf_counter() - began,
        ended=ended,
    )


# The search


def ascend(space: Mapping[str, Sequence[Any]], start: Settings, wins: Callable[[Settings, Settings], bool]) -> Settings:
    """Coordinate ascent: move one parameter at a time while the challenger wins, until a round changes nothing.

    No worker at all is not fewer of them but another engine, which has no further parameters: it comes last in a round.
    """
    best, has_changed = start, True
    while has_changed:
        before = best
        for name, values in space.items():
            is_kept_for_later = name == "num_workers" and best[name]
            best = _along(name, [value for value in values if value or not is_kept_for_later], best, wins)
        if best["num_workers"] and 0 in space.get("num_workers", ()) and wins(best | {"num_workers": 0}, best):
            best = best | {"num_workers": 0}
        has_changed = best != before
    return best


def _along(name: str, values: Sequence[Any], best: Settings, wins: Callable[[Settings, Settings], bool]) -> Settings:
    if not all(isinstance(value, int) for value in values):  # no order to climb along
        for value in values:
            if value != best[name] and wins(best | {name: value}, best):
                best = best | {name: value}
        return best
    place = first = values.index(best[name])
    for direction in (1, -1):
        stride = 1
        while stride:
            target = place + direction * stride
            is_there = 0 <= target < len(values)
            if is_there and wins(best | {name: values[target]}, best):
                best, place, stride = (
                    best | {name: values[target]},
                    target,
                    2,
                )  # what is jumped over is the next round's
            else:
                stride -= 1
        if place != first:
            break
    return best


def _space(dataset: Any, batch_size: int | None, parameters: Any) -> dict[str, Sequence[Any]]:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"tune() reads samples by index, and {type(dataset).__name__} has no __getitem__ and __len__. Give a "
            "map-style dataset, such as the one that your DataLoader is made of."
        )
    if len(dataset) == 0:
        raise ValueError("tune() has nothing to read: the dataset is empty")
    cores = usable_cores()
    counts = [0, *(1 << power for power in range((max(16, 4 * cores)).bit_length()))]
    view = LoaderView.find(dataset)
    is_whole = view is not None and view.latest().obstacle is None
    known: dict[str, Sequence[Any]] = {
        "num_workers": sorted({*counts, cores}),
        "workers": ("auto", "process" if is_whole else "thread"),
        "prefetch_factor": (2, 4, 8),
        "batch_size": tuple(size for size in (16, 32, 64, 128, 256, 512, 1024) if size <= len(dataset)) or (1,),
        "storage": ("shared", "compressed", "none"),
        "codec": ("auto", "source", "lz4", "zstd"),
    }
    given = dict(parameters) if isinstance(parameters, Mapping) else {name: known.get(name, ()) for name in parameters}
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"parameters={unknown} are not known; tune() knows {', '.join(known)}")
    stored = [name for name in _STORED if name in given]
    if stored and not isinstance(dataset, PreparedDataset):
        raise ValueError(
            f"{stored[0]} can be tuned for fastdata's datasets, not for {kind_of(dataset)}: give "
            "CachedDataset(dataset), or leave it out of parameters="
        )
    if batch_size is not None:
        given.pop("batch_size", None)
    for name, values in given.items():
        if not values:
            raise ValueError(f"parameters= has no value for {name}")
        if name in _STORED and set(values) - {*known[name], "device", "jpeg"}:
            raise ValueError(f"{name}={list(values)} cannot be tuned; choose of {', '.join(known[name])}")
    return given


def _start(space: Mapping[str, Sequence[Any]], batch_size: int | None, dataset: Any) -> Settings:
    """The usual rule of workers, 64 samples in a batch, the dataset's own storage, and the first value of all else."""
    start = {name: values[0] for name, values in space.items()}
    workers = min(_WORKERS_PER_GPU, max(1, usable_cores() // local_ranks()))
    start["num_workers"] = _nearest(space.get("num_workers", [workers]), workers)
    start["batch_size"] = batch_size or _nearest(space.get("batch_size", [_BATCH_SIZE]), _BATCH_SIZE)
    for name in _STORED:
        own = {"storage": getattr(dataset, "storage", None), "codec": "auto"}[name]
        if own in space.get(name, ()):
            start[name] = own
    return start


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: abs(value - wanted))


def _canonical(settings: Settings) -> tuple[tuple[str, Any], ...]:
    """What makes a difference of settings: without workers neither their engine nor what they read ahead does."""
    idle = set() if settings.get("num_workers") else {"workers", "prefetch_factor"}
    idle |= {"codec"} if settings.get("storage", "compressed") != "compressed" else set()
    return tuple((name, value) for name, value in settings.items() if name not in idle)


def _of_loader(settings: Settings) -> Settings:
    return {
        name: value
        for name, value in _canonical(settings)
        if name not in _STORED and (name, value) != ("workers", "auto")
    }


def _of_dataset(settings: Settings) -> Settings:
    return {name: value for name, value in _canonical(settings) if name in _STORED}


def _in_words(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


class _TimeOverError(Exception):
    """The time box is full."""


def _look(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> tuple[float, int]:
    """Seconds and bytes of a sample, of a few that are read one by one."""
    count, whole = len(dataset), getattr(dataset, "__getitems__", None)
    began, seconds, size_bytes = time.perf_counter(), math.inf, 0
    for number in range(min(count, _LOOKED_AT)):
        start, index = time.perf_counter(), count * number // _LOOKED_AT
        tensors = flatten(collate_fn(whole([index]) if whole else [dataset[index]]))[0]
        seconds = min(seconds, time.perf_counter() - start)
        size_bytes = max(size_bytes, sum(getattr(tensor, "nbytes", 0) for tensor in tensors))
        if time.perf_counter() - began > _LOOK_S:
            break
    return seconds, size_bytes


def _measure(make_loader: Callable[[], Any], **how: Any) -> tuple[Rate, int]:
    """The rate, and the memory that each worker process has taken."""
    own = tree_pss_bytes()
    loader = make_loader()
    rate = measure_rate(loader, **how)
    is_process = isinstance(loader, DataLoader) and loader.num_workers and loader.report().engine == "process"
    return rate, max(0, tree_pss_bytes() - own) // loader.num_workers if is_process else 0


@dataclass(kw_only=True, slots=True)
class _Judge:
    """Measures settings, remembers what it found, and says which of two wins."""

    dataset: Any
    seed: int
    deadline: float
    window_s: float
    collate_fn: Any
    device: Any
    memory_limit: Any
    tunes_batches: bool
    stack: ExitStack
    """Closes the datasets that are prepared for probes."""
    bar: Any
    best: Settings = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    rates: dict[Any, Rate] = field(default_factory=dict)
    turns: Counter[Any] = field(default_factory=Counter)
    """How often settings were measured to the end of the window."""
    worker_bytes: int = 0
    sample_s: float = 0.0
    sample_bytes: int = 0
    datasets: dict[Any, Any] = field(default_factory=dict)
    report: StorageReport | None = None

    def begin(self, start: Settings) -> None:
        """Look at a few samples, then measure the settings to begin with, after a turn that does not count.

        That turn finds files and caches cold. What the dataset raises is raised.
        """
        look = partial(_look, self._dataset(start), self.collate_fn or collate)
        self.best, (self.sample_s, self.sample_bytes) = start, self._run(look, math.inf)
        self._refuse_too_large(start)
        for window_s in (self.window_s / 2, self.window_s):
            self.rates.clear()
            self.turns.clear()
            self._probe(start, None, window_s)

    def wins(self, challenger: Settings, best: Settings) -> bool:
        """Whether a challenger is better than the best so far, measured if need be, both in turns if that is close."""
        one, other = _canonical(challenger), _canonical(best)
        if one == other:
            return False
        if one not in self.rates:
            try:
                self._refuse_too_large(challenger)
            except MemoryBudgetError as error:
                self._lose(one, "not started", error)
            else:
                self._probe(challenger, self.rates[other])
        if self._is_close(one, other, is_cheaper=_cost(challenger) < _cost(best)):
            for settings, key in ((best, other), (challenger, one)):
                if self.turns[key] < 2 + (key == other):
                    self._probe(settings, None)
        is_winner = self._is_better(challenger, best)
        if is_winner:
            self.best = challenger
        return is_winner

    def _is_close(self, one: Any, other: Any, *, is_cheaper: bool) -> bool:
        """Whether another look may change who wins: not where one costs more and gains nothing."""
        mine, theirs = self.rates[one], self.rates[other]
        if mine.is_cut or not mine.samples_per_s or self.turns[one] > 1:
            return False
        ratio = mine.samples_per_s / theirs.samples_per_s
        if ratio < 1 + _WORTH and not is_cheaper:
            return False
        return not differs(mine, theirs) or 1 / _CLEAR < ratio < _CLEAR

    def _is_better(self, challenger: Settings, best: Settings) -> bool:
        mine, theirs = self.rates[_canonical(challenger)], self.rates[_canonical(best)]
        if mine.is_cut or not mine.samples_per_s:
            return False
        gain = mine.samples_per_s / theirs.samples_per_s - 1
        if _cost(challenger) < _cost(best):
            return gain > -_WORTH
        return gain > _WORTH and differs(mine, theirs)

    def _probe(self, settings: Settings, to_beat: Rate | None, window_s: float | None = None) -> None:
        """Measure, and join that with what is known; a failure is a rate of 0, but raised where nothing is known yet.

        Raises:
            _TimeOverError: there is no time for it.
        """
        began, key, window_s = time.perf_counter(), _canonical(settings), window_s or self.window_s
        remaining_s = self.deadline - began
        if remaining_s < window_s and self.rates:
            raise _TimeOverError
        how = {"window_s": window_s, "limit_s": remaining_s, "to_beat": to_beat}
        try:
            make = partial(self._loader, settings, self._dataset(settings), number=len(self.probes))
            rate, worker_bytes = self._run(partial(_measure, make, **how), remaining_s + _GRACE_S)
        except TimeoutError:
            if self.rates:
                raise _TimeOverError from None
            raise TimeoutError(
                f"no probe ended within max_seconds: {_in_words(settings)}, and a sample takes {self.sample_s:.2f} s. "
                "Give it more seconds, or a smaller batch_size."
            ) from None
        except Exception as error:  # a user's dataset raises anything
            if not self.rates:
                raise
            self._lose(key, "failed", error, time.perf_counter() - began)
            return
        finally:
            self.bar.update(min(round(time.perf_counter() - began), self.bar.total - self.bar.n))
        outcome: Outcome = "cut short" if rate.is_cut else "measured"
        seconds = time.perf_counter() - began
        known = rate.error if math.isfinite(rate.error) else 0.0
        figures: dict[str, Any] = {"samples_per_s": rate.samples_per_s, "error": known, "seconds": seconds}
        self.probes.append(Probe(settings=dict(key), outcome=outcome, **figures))
        self.rates[key] = self.rates[key].joined(rate) if key in self.rates else rate
        self.turns[key] += 1
        in_batches = (1 + (settings.get("prefetch_factor") or 2)) * rate.batch_bytes
        self.worker_bytes = max(self.worker_bytes, worker_bytes - in_batches)

    def _lose(self, key: Any, outcome: Outcome, error: Exception, seconds: float = 0.0) -> None:
        name = "" if isinstance(error, MemoryBudgetError) else f"{type(error).__name__}: "
        reason = f"{name}{error}".partition("\n")[0]
        self.probes.append(Probe(settings=dict(key), outcome=outcome, reason=reason, seconds=seconds))
        self.rates[key] = Rate(0.0, 0.0, 1, 0.0, is_cut=True)

    def _run(self, work: Callable[[], Any], limit_s: float) -> Any:
        if self.device is None:
            return apart(work, limit_s=limit_s)
        with undisturbed_generators():
            return work()

    def _loader(self, settings: Settings, dataset: Any, number: int) -> Any:
        """A loader of these settings over an order without an end, or a prefetcher of it."""
        options = _of_loader(settings)
        if not self.tunes_batches and not hasattr(dataset, "__getitems__"):
            options["batch_size"] = min(options["batch_size"], max(1, int(_BATCH_S / max(self.sample_s, 1e-9))))
        order = EndlessOrder(len(dataset), self.seed, number)
        loader = DataLoader(dataset, sampler=order, collate_fn=self.collate_fn, **options)
        return loader if self.device is None else CudaPrefetcher(loader, self.device)

    def _dataset(self, settings: Settings) -> Any:
        """The dataset, or some samples of it, kept as the settings say or where the rest is still to be prepared."""
        view, stored = LoaderView.find(self.dataset), {name: settings[name] for name in _STORED if name in settings}
        if view is None or not isinstance(view.dataset, PreparedDataset):
            return self.dataset
        served = view.dataset
        is_filling = served.storage != "none" and view.prepared_share < MOSTLY_PREPARED
        if not stored and not is_filling:
            return self.dataset
        options = {"storage": "compressed"} | stored if stored else {"storage": served.storage}
        key = tuple(options.items())
        if key not in self.datasets:
            places = np.arange(view.index_count) if view.subset is None else view.subset
            some = np.random.default_rng(self.seed).permutation(places)[:_KEPT_FOR_PROBES]
            self.datasets[key] = self.stack.enter_context(prepared_anew(served, sorted(some.tolist()), **options))
        return self.datasets[key]

    def _refuse_too_large(self, settings: Settings) -> None:
        """Raise MemoryBudgetError if batches, worker processes and samples would take more than there is."""
        workers, ahead = settings["num_workers"], settings.get("prefetch_factor") or 2
        batches = workers * ahead + 2
        need = batches * settings["batch_size"] * self.sample_bytes
        if settings.get("workers", "auto") != "thread":
            need += workers * self.worker_bytes
        budget = budget_bytes(available_bytes(), self.memory_limit)
        if need > budget.bytes:
            raise MemoryBudgetError(f"{_in_words(settings)} would take about {format_bytes(need)}, but {budget}")
        if settings.get("storage") in ("shared", "compressed"):
            self._refuse_stored(settings, budget)

    def _refuse_stored(self, settings: Settings, budget: Budget) -> None:
        report = self.report = self.report or self.dataset.storage_report()
        codec = settings.get("codec", "auto")
        needs = [trial.need_bytes for trial in report.trials if codec in ("auto", trial.codec) and not trial.obstacle]
        need = report.raw_bytes if settings["storage"] == "shared" else min(needs, default=0)
        if need > budget.bytes:
            raise MemoryBudgetError(f"all samples would take {format_bytes(need)}, but {budget}")


def _cost(settings: Settings) -> tuple[float, ...]:
    """What settings take besides time, by which equally fast ones are told apart."""
    workers = settings["num_workers"] * (0.5 if settings.get("workers") == "thread" else 1)
    return workers, settings["batch_size"] * (1 + workers * (settings.get("prefetch_factor") or 2))
