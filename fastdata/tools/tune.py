"""``fastdata.tune``: the loader's settings that read a dataset fastest on this machine, found by measuring.

The search is coordinate ascent: one parameter at a time is moved while that wins, until a whole
round over all of them changes nothing (``ascend``, which measures nothing itself). ``_Judge``
measures and says who wins. Equal seeds read equal samples in each probe; which probes follow
depends on the rates found alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import IterableDataset

from fastdata.datasets.batch import collate, flatten
from fastdata.datasets.dataset import PreparedDataset, prepared_anew
from fastdata.datasets.folder import ImageFolder
from fastdata.errors import MemoryBudgetError, kind_of
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.prefetch import CudaPrefetcher
from fastdata.loaders.view import MOSTLY_PREPARED, LoaderView
from fastdata.machine.memory import (
    available_bytes,
    budget_bytes,
    format_bytes,
    tree_pss_bytes,
    usable_cores,
)
from fastdata.machine.ranks import local_ranks
from fastdata.report import progress_bar
from fastdata.tools import bench, output
from fastdata.tools.measure import (
    EndlessOrder,
    Rate,
    apart,
    differs,
    measure,
    stored_bytes,
    undisturbed_generators,
)

Settings = dict[str, Any]
Outcome = Literal["measured", "cut short", "not started", "failed"]

PARAMETERS = ("num_workers", "workers", "prefetch_factor", "batch_size")
_WORKERS_PER_GPU = 4  # the usual rule; where the search begins
_BATCH_SIZE = 64
_CLEAR = 1.25
"""A rate that is so many times another one, and beyond the noise, is not measured again."""
_WORTH = 0.03
"""What costs more memory or processes must gain at least this share, and what costs less may lose
less than this."""
_BATCH_S = 0.1
"""A batch of a probe takes a worker about this long, where it may be smaller than the user's."""
_PROBES = 80
_LEAST_PROBE_S = 0.2
_MOST_PROBE_S = 1.0
_GRACE_S = 2.0
_SAMPLES_PREPARED = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One measurement of an empty loop, or why there was none.

    Args:
        settings: of the loader, and of the dataset where its storage is tuned.
        outcome: ``"cut short"`` as soon as it could not win; ``"not started"`` where memory would
            not have sufficed.
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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TuneResult:
    """What ``fastdata.tune`` found; shown as a table of all probes.

    Args:
        best: arguments of ``DataLoader(dataset, shuffle=True, **result.best)``. The argument
            ``workers`` is fastdata's own; it is there only where another engine than the usual one
            won.
        best_storage: the dataset's ``storage``; empty unless it was tuned.
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

    @property
    def call(self) -> str:
        """The loader to paste into a script, shuffled as the probes were."""
        settings = {"batch_size": self.best["batch_size"], "shuffle": True} | self.best
        return f"DataLoader(dataset, {_in_words(settings)})"

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return asdict(self)

    def plot(self, file: str | Path) -> None:
        """Draw the rate of each probe as a bar, the best in another colour (extra: plot)."""
        shown = [probe for probe in self.probes if probe.samples_per_s]
        rows = [
            (_in_words(probe.settings), probe.samples_per_s, self._is_best(probe))
            for probe in shown
        ]
        output.bars(file, rows, "samples/s, an empty loop")

    def _is_best(self, probe: Probe) -> bool:
        return _split(probe.settings) == (self.best, self.best_storage)

    def __repr__(self) -> str:
        names = list(dict.fromkeys(name for probe in self.probes for name in probe.settings))
        rows = [[*names, "samples/s", "+-", "seconds", ""]]
        for probe in self.probes:
            outcome = "best" if self._is_best(probe) else probe.outcome
            words = "" if outcome == "measured" else f"{outcome}: {probe.reason}".removesuffix(": ")
            values = [str(probe.settings.get(name, "-")) for name in names]
            figures = [
                f"{figure:,.0f}" if figure else "-" for figure in (probe.samples_per_s, probe.error)
            ]
            rows.append([*values, *figures, f"{probe.seconds:.1f}", words])
        gain = self.samples_per_s / self.start_samples_per_s if self.start_samples_per_s else 1.0
        best = _in_words(self.best | self.best_storage)
        return "\n".join(
            [
                *output.aligned(rows),
                f"best: {best}: {self.samples_per_s:,.0f} samples/s, {gain:.2f} times the start's",
                f"{len(self.probes)} probes in {self.seconds:.1f} s; ended as {self.ended}",
            ]
        )


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
    """Measure which settings of a ``DataLoader`` read a dataset fastest, one parameter at a time.

    Each probe is an empty loop (no model) in a forked process of its own, over samples shuffled by
    ``seed``, after a warm-up. It is cut short as soon as it cannot win. Two rates that are within
    their noise (Welch's t-test of time slices, at 5 %), or less than 25 % apart, are measured again
    in turns where that can change who wins. What costs more processes or memory must gain 3 %. The
    search begins with the usual rule of 4 workers per GPU, or with as many as there are cores.

    Neither the dataset nor random generators of this process change, no process is left behind.
    Probes of a dataset that is slow to read are in smaller batches of the same samples.

    Args:
        dataset: any map-style dataset, fastdata's or not. Of one that is still being prepared, up
            to 512 samples are prepared for the probes.
        batch_size: samples in a batch, which is then not tuned; by default it is, from 64 on.
        max_seconds: time box; the best so far is the result when it is over.
        parameters: names of what to tune, in this order, of ``num_workers``, ``workers`` (the
            engine: threads or processes), ``prefetch_factor``, ``batch_size``, and, for a fastdata
                dataset, ``storage``;
            or a mapping of names to the values to choose from, numbers in ascending order.
        device: where batches go by a ``CudaPrefetcher``; probes with one run in this process, which
            alone can use it.
        collate_fn: the loader's; default ``fastdata.collate``.
        memory_limit: the most memory that a probe may take, as datasets have it; default: what is
            free.
        seed: of the order that samples are read in.
        progress: show a progress bar on standard error.

    Returns:
        A ``TuneResult``: ``DataLoader(dataset, shuffle=True, **result.best)``; ``print(result)``
        shows all probes.

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
        judge = _Judge(
            dataset=dataset,
            seed=seed,
            deadline=began + max_seconds,
            probe_s=min(_MOST_PROBE_S, max(_LEAST_PROBE_S, max_seconds / _PROBES)),
            collate_fn=collate_fn,
            device=device,
            memory_limit=memory_limit,
            stack=stack,
            bar=stack.enter_context(
                progress_bar(math.ceil(max_seconds), "tuning", unit="s", enabled=progress)
            ),
        )
        judge.begin(start)
        try:
            best = ascend(space, start, judge.wins)
            ended = "a whole round changed nothing"
        except _TimeOverError:
            best = judge.best
            ended = f"{max_seconds:g} s were over"
    loader, stored = _split(best)
    return TuneResult(
        best=loader,
        best_storage=stored,
        samples_per_s=judge.rates[_canonical(best)].samples_per_s,
        start_samples_per_s=judge.rates[_canonical(start)].samples_per_s,
        probes=tuple(judge.probes),
        seconds=time.perf_counter() - began,
        ended=ended,
    )


# The search


def ascend(
    space: Mapping[str, Sequence[Any]], start: Settings, wins: Callable[[Settings, Settings], bool]
) -> Settings:
    """Coordinate ascent: move one parameter at a time while the challenger wins, until a round changes nothing.

    No worker at all is not fewer of them but another engine, which has no further parameters: it
    comes last in a round.
    """
    best = start
    before = None
    while best != before:
        before = best
        for name, values in space.items():
            is_kept_for_later = name == "num_workers" and best[name]
            best = _along(
                name, [value for value in values if value or not is_kept_for_later], best, wins
            )
        if (
            best["num_workers"]
            and 0 in space.get("num_workers", ())
            and wins(best | {"num_workers": 0}, best)
        ):
            best = best | {"num_workers": 0}
    return best


def _along(
    name: str, values: Sequence[Any], best: Settings, wins: Callable[[Settings, Settings], bool]
) -> Settings:
    if not all(isinstance(value, int) for value in values):  # no order to climb along
        for value in values:
            if value != best[name] and wins(best | {name: value}, best):
                best = best | {name: value}
        return best
    position = first = values.index(best[name])
    for direction in (1, -1):
        stride = 1
        while stride:
            target = position + direction * stride
            if 0 <= target < len(values) and wins(best | {name: values[target]}, best):
                best = best | {name: values[target]}
                position = target
                stride = 2  # what is jumped over is the next round's
            else:
                stride -= 1
        if position != first:
            break
    return best


def _space(dataset: Any, batch_size: int | None, parameters: Any) -> dict[str, Sequence[Any]]:
    """Values to choose from for each parameter that is tuned."""
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise TypeError(
            f"tune() reads samples by index, and {type(dataset).__name__} has no __getitem__ and __len__. Give a "
            "map-style dataset, such as the one that your DataLoader is made of."
        )
    if len(dataset) == 0:
        raise ValueError("tune() has nothing to read: the dataset is empty")
    cores = usable_cores()
    view = LoaderView.find(dataset)
    is_batched = view is not None and view.latest().obstacle is None
    known: dict[str, Sequence[Any]] = {
        "num_workers": sorted(
            {0, cores, *(2**power for power in range(max(16, 4 * cores).bit_length()))}
        ),
        "workers": ("auto", "process" if is_batched else "thread"),
        "prefetch_factor": (2, 4, 8),
        "batch_size": tuple(
            size for size in (16, 32, 64, 128, 256, 512, 1024) if size <= len(dataset)
        )
        or (1,),
        "storage": ("shared", "compressed", "none"),
    }
    space = (
        dict(parameters)
        if isinstance(parameters, Mapping)
        else {name: known.get(name, ()) for name in parameters}
    )
    if unknown := sorted(set(space) - set(known)):
        raise ValueError(f"parameters={unknown} are not known; tune() knows {', '.join(known)}")
    if "storage" in space and not isinstance(dataset, PreparedDataset):
        raise ValueError(
            f"storage can be tuned for fastdata's datasets, not for {kind_of(dataset)}: give "
            "CachedDataset(dataset), or leave it out of parameters="
        )
    if set(space.get("storage", ())) - set(known["storage"]):
        raise ValueError(
            f"storage={list(space['storage'])} cannot be tuned; choose of {', '.join(known['storage'])}"
        )
    if batch_size is not None:
        space.pop("batch_size", None)
    for name, values in space.items():
        if not values:
            raise ValueError(f"parameters= has no value for {name}")
    return space


def _start(space: Mapping[str, Sequence[Any]], batch_size: int | None, dataset: Any) -> Settings:
    """The usual rule of workers, 64 samples in a batch, the dataset's own storage, and the first value of all else."""
    start = {name: values[0] for name, values in space.items()}
    workers = min(_WORKERS_PER_GPU, max(1, usable_cores() // local_ranks()))
    start["num_workers"] = _nearest(space.get("num_workers", [workers]), workers)
    start["batch_size"] = batch_size or _nearest(
        space.get("batch_size", [_BATCH_SIZE]), _BATCH_SIZE
    )
    if "storage" in space and dataset.storage in space["storage"]:
        start["storage"] = dataset.storage
    return start


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: abs(value - wanted))


def _canonical(settings: Settings) -> tuple[tuple[str, Any], ...]:
    """What makes a difference of settings: without workers neither their engine nor what they read ahead does."""
    idle = () if settings["num_workers"] else ("workers", "prefetch_factor")
    return tuple((name, value) for name, value in settings.items() if name not in idle)


def _split(settings: Settings) -> tuple[Settings, Settings]:
    """Arguments of the loader, and of the dataset."""
    loader = dict(_canonical(settings))
    if loader.get("workers") == "auto":
        del loader["workers"]
    stored = {name: loader.pop(name) for name in ("storage",) if name in loader}
    return loader, stored


def _in_words(settings: Settings) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _cost(settings: Settings) -> tuple[float, ...]:
    """What settings take besides time, by which equally fast ones are told apart."""
    workers = settings["num_workers"] * (0.5 if settings.get("workers") == "thread" else 1)
    return workers, settings["batch_size"] * (1 + workers * (settings.get("prefetch_factor") or 2))


# Measuring


class _TimeOverError(Exception):
    """The time box is full."""


def _look(dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> tuple[float, int]:
    """Seconds and bytes of a sample, of a few that are read after a first one."""
    read = getattr(dataset, "__getitems__", None) or (
        lambda indices: [dataset[index] for index in indices]
    )
    read([0])
    start = time.perf_counter()
    tensors = flatten(collate_fn(read([0, len(dataset) // 2])))[0]
    return (time.perf_counter() - start) / 2, sum(
        getattr(tensor, "nbytes", 0) for tensor in tensors
    ) // 2


def _measure(make_loader: Callable[[], Any], **limits: Any) -> tuple[Rate, int]:
    """The rate, and the memory that each worker process has taken."""
    own_bytes = tree_pss_bytes()
    loader = make_loader()
    rate = measure(loader, **limits)
    if not (
        isinstance(loader, DataLoader)
        and loader.num_workers
        and loader.report().engine == "process"
    ):
        return rate, 0
    return rate, max(0, rate.memory_bytes - own_bytes) // loader.num_workers


@dataclass(kw_only=True, slots=True)
class _Judge:
    """Measures settings, remembers what it found, and says which of two wins."""

    dataset: Any
    seed: int
    deadline: float
    probe_s: float
    collate_fn: Any
    device: Any
    memory_limit: Any
    stack: ExitStack  # closes the datasets that are prepared for probes
    bar: Any
    best: Settings = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)
    rates: dict[Any, Rate] = field(default_factory=dict)
    confirmed: set[Any] = field(default_factory=set)
    worker_bytes: int = 0
    sample_s: float = 0.0
    sample_bytes: int = 0
    datasets: dict[Any, Any] = field(default_factory=dict)

    def begin(self, start: Settings) -> None:
        """Look at a few samples, then measure the settings to begin with, after a turn that does not count.

        That turn finds files and caches cold. What the dataset raises is raised.
        """
        self.best = start
        look = partial(_look, self._dataset(start), self.collate_fn or collate)
        self.sample_s, self.sample_bytes = self._run(look, math.inf)
        self._check_memory(start)
        self._probe(start, seconds=self.probe_s / 2)
        self.rates.clear()
        self._probe(start)

    def wins(self, challenger: Settings, best: Settings) -> bool:
        """Whether a challenger is better than the best so far, measured if need be, both in turns if that is close."""
        mine = _canonical(challenger)
        theirs = _canonical(best)
        if mine == theirs:
            return False
        if mine not in self.rates:
            self._try(challenger, self.rates[theirs])
        if self.rates[mine].is_cut:
            return False
        is_cheaper = _cost(challenger) < _cost(best)
        least = 1 - _WORTH if is_cheaper else 1 + _WORTH
        ratio, is_sure = self._compare(mine, theirs)
        if ratio > least and mine not in self.confirmed and not (is_sure and ratio > _CLEAR):
            self.confirmed.add(mine)
            self._probe(best)
            self._probe(challenger)
            ratio, is_sure = self._compare(mine, theirs)
        is_winner = ratio > least and (is_cheaper or is_sure)
        if is_winner:
            self.best = challenger
        return is_winner

    def _compare(self, mine: Any, theirs: Any) -> tuple[float, bool]:
        rate = self.rates[mine]
        return rate.samples_per_s / self.rates[theirs].samples_per_s, differs(
            rate, self.rates[theirs]
        )

    def _try(self, settings: Settings, to_beat: Rate) -> None:
        """Measure settings that nothing is known of; those that fail, or would not fit, lose."""
        began = time.perf_counter()
        try:
            self._check_memory(settings)
            self._probe(settings, to_beat)
        except _TimeOverError:
            raise
        except MemoryBudgetError as error:
            self._note(settings, "not started", began, Rate(is_cut=True), str(error))
        except Exception as error:  # noqa: BLE001  # a user's dataset raises anything
            self._note(
                settings, "failed", began, Rate(is_cut=True), f"{type(error).__name__}: {error}"
            )

    def _probe(
        self, settings: Settings, to_beat: Rate | None = None, seconds: float | None = None
    ) -> None:
        """Measure, and join that with what is known.

        Raises:
            _TimeOverError: there is no time for it.
        """
        began = time.perf_counter()
        left_s = self.deadline - began
        if left_s < self.probe_s and self.rates:
            raise _TimeOverError
        make = partial(self._loader, settings, self._dataset(settings), number=len(self.probes))
        work = partial(
            _measure, make, seconds=seconds or self.probe_s, limit_s=left_s, to_beat=to_beat
        )
        try:
            rate, worker_bytes = self._run(work, left_s + _GRACE_S)
        except TimeoutError:
            if self.rates:
                raise _TimeOverError from None
            raise TimeoutError(
                f"no probe ended within max_seconds: {_in_words(settings)}, and a sample takes {self.sample_s:.2f} s. "
                "Give it more seconds, or a smaller batch_size."
            ) from None
        self.worker_bytes = max(self.worker_bytes, worker_bytes)
        self._note(settings, "cut short" if rate.is_cut else "measured", began, rate)

    def _note(
        self, settings: Settings, outcome: Outcome, began: float, rate: Rate, reason: str = ""
    ) -> None:
        key = _canonical(settings)
        took_s = time.perf_counter() - began
        self.bar.update(min(round(took_s), self.bar.total - self.bar.n))
        self.rates[key] = self.rates[key] + rate if key in self.rates else rate
        self.probes.append(
            Probe(
                settings=dict(key),
                outcome=outcome,
                samples_per_s=rate.samples_per_s,
                error=rate.error if len(rate.slices) > 1 else 0.0,
                seconds=took_s,
                reason=reason.partition("\n")[0],
            )
        )

    def _run(self, work: Callable[[], Any], limit_s: float) -> Any:
        if self.device is None:
            return apart(work, limit_s=limit_s)
        with undisturbed_generators():
            return work()

    def _loader(self, settings: Settings, dataset: Any, number: int) -> Any:
        """A loader of these settings over an order without an end, or a prefetcher of it."""
        options, _ = _split(settings)
        if not hasattr(dataset, "__getitems__"):
            options["batch_size"] = min(
                options["batch_size"], max(1, int(_BATCH_S / max(self.sample_s, 1e-9)))
            )
        order = EndlessOrder(len(dataset), self.seed, number)
        loader = DataLoader(dataset, sampler=order, collate_fn=self.collate_fn, **options)
        return loader if self.device is None else CudaPrefetcher(loader, self.device)

    def _dataset(self, settings: Settings) -> Any:
        """The dataset, or some samples of it, kept as the settings say or where the rest is still to be prepared."""
        view = LoaderView.find(self.dataset)
        if view is None or not isinstance(view.dataset, PreparedDataset):
            return self.dataset
        storage = settings.get("storage", view.dataset.storage)
        if "storage" not in settings and (
            view.dataset.storage == "none" or view.prepared_share >= MOSTLY_PREPARED
        ):
            return self.dataset
        if storage not in self.datasets:
            indices = np.arange(view.index_count) if view.subset is None else view.subset
            some = np.random.default_rng(self.seed).permutation(indices)[:_SAMPLES_PREPARED]
            prepared = prepared_anew(view.dataset, sorted(some.tolist()), storage=storage)
            self.datasets[storage] = self.stack.enter_context(prepared)
        return self.datasets[storage]

    def _check_memory(self, settings: Settings) -> None:
        """Raise MemoryBudgetError if batches, worker processes or samples would take more than there is."""
        workers = settings["num_workers"]
        need = (
            (2 + workers * (settings.get("prefetch_factor") or 2))
            * settings["batch_size"]
            * self.sample_bytes
        )
        if settings.get("workers", "auto") != "thread":
            need = max(need, workers * self.worker_bytes)
        if settings.get("storage", "none") != "none":
            some = self._dataset(settings)
            need += stored_bytes(some) * len(self.dataset) // len(some)
        budget = budget_bytes(available_bytes(), self.memory_limit)
        if need > budget.bytes:
            raise MemoryBudgetError(
                f"{_in_words(settings)} would take about {format_bytes(need)}, but {budget}"
            )


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="class folders of images")
    bench.add_transform(
        parser, "by default a random resized crop to 224 and a flip, as normalised float32"
    )
    parser.add_argument(
        "--batch-size", type=size_or_auto, default=64, metavar="N", help="or auto; default: 64"
    )
    kept = "as ImageFolder's: auto is what fits, none tunes decoding; default: %(default)s"
    parser.add_argument(
        "--storage", choices=("auto", "shared", "compressed", "none"), default="auto", help=kept
    )
    parser.add_argument("--tune-storage", action="store_true", help="tune storage, too")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="time for all of it; default: 60"
    )
    output.add_files(parser, plots=True)


def size_or_auto(text: str) -> int | None:
    return None if text == "auto" else output.positive(text)


def run(options: argparse.Namespace) -> int:
    output.check_folder(options.folder)
    transform = bench.find_transform(options.transform)
    parameters = (*PARAMETERS, "storage") if options.tune_storage else PARAMETERS
    is_as_it_is = options.transform or options.storage == "none"
    resize = None if is_as_it_is else (256, 256)
    with ImageFolder(options.folder, transform, resize=resize, storage=options.storage) as dataset:
        print(dataset.storage_plan.reason)
        result = tune(
            dataset,
            batch_size=options.batch_size,
            max_seconds=options.seconds,
            parameters=parameters,
        )
    print(result)
    output.keep(result.as_dict(), options, result.plot)
    if result.best_storage:
        print(
            f"dataset = ImageFolder({str(options.folder)!r}, transform, {_in_words(result.best_storage)})"
        )
    print(f"loader = {result.call}")
    return 0
