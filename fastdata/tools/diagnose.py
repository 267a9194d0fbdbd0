"""``fastdata.diagnose``: where a training loop's time goes, and what would make it shorter.

Measured are the loop as it is, the loader without a model, what one sample costs in its parts, and
the loader over samples that are kept in memory; all but the first in forked processes.
``Diagnosis`` makes words of the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Subset

from fastdata.datasets.cached import CachedDataset
from fastdata.datasets.dataset import PreparedDataset
from fastdata.loaders.epochs import sample_count
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.prefetch import CudaPrefetcher
from fastdata.machine.memory import (
    available_bytes,
    budget_bytes,
    format_bytes,
    thread_clock,
    usable_cores,
)
from fastdata.pixels.compose import flatten
from fastdata.report import Line, Report
from fastdata.tools.measure import EndlessOrder, Rate, apart, measure, positive

_RATE_S = 1.0
_SAMPLES_S = 1.5
_PATIENCE_S = 30.0
_SAMPLES = 32
_MOST_KEPT = 256
_HARDLY = 0.1
"""A loop that waits less is as fast as its model."""
_CLEAR = 1.15
"""Keeping samples must gain so much to be worth a change of the script."""

LIMITS = {
    "model": ("the model", "no faster loader would help: make the step faster"),
    "host-to-device": ("copying to the device", "send fewer bytes: uint8 batches, cast by dtype="),
    "disk": ("reading from disk or network", "keep samples in memory, or wait with more workers"),
    "decode": ("decoding", "decode once and keep the samples: storage= of ImageFolder"),
    "transform": ("the transform", "run its steps on whole batches: transform= of ImageFolder"),
    "collate": ("collate_fn", "return tensors of one shape, which are stacked without Python"),
    "workers": ("the number of workers", "use every core, or let fastdata.tune choose num_workers"),
    "loader": ("the loader", "it is no torch DataLoader over samples: its parts are not known"),
}
"""What limits a loop, in words, and what to do."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of making a sample costs one core, waiting for others than a core included."""

    name: str
    kind: Literal["read", "transform", "collate"]
    seconds: float
    cpu_s: float

    @property
    def limit(self) -> str:
        if self.kind != "read":
            return self.kind
        return "disk" if self.cpu_s < self.seconds / 2 else "decode"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Diagnosis(Report):
    """Where a training loop's time goes; shown as one line, the table behind it, and advice.

    Args:
        batches: that the times are means of; the first one is left out.
        batch_size: samples in a batch, in the mean.
        wait_s: of each step of the loop, for data.
        step_s: of each step of the loop, for all else.
        workers: of the loader.
        usable_cores: of the machine.
        is_prefetched: whether a CudaPrefetcher moves batches.
        loader_per_s: samples a second of an empty loop over the loader.
        parts: of making a sample.
        kept_per_s: samples a second of the loader if samples were kept in memory, where that is
            clearly faster.
        kept: what that would take.
        imports: from fastdata in place of torchvision's and torch's, where the loader is theirs.
        notes: what could not be measured.
    """

    batches: int
    batch_size: float
    wait_s: float
    step_s: float
    workers: int = 0
    usable_cores: int = 1
    is_prefetched: bool = False
    loader_per_s: float | None = None
    parts: tuple[Part, ...] = ()
    kept_per_s: float | None = None
    kept: str = ""
    imports: str = ""
    notes: tuple[str, ...] = ()

    @property
    def waited(self) -> float:
        """Share of each step in which the model had nothing to do."""
        return self.wait_s / (self.wait_s + self.step_s)

    @property
    def loop_per_s(self) -> float:
        return self.batch_size / (self.wait_s + self.step_s)

    @property
    def model_per_s(self) -> float:
        return self.batch_size / max(self.step_s, 1e-9)

    @property
    def limit(self) -> str:
        """What the loop is limited by, such as ``"decode"`` or ``"model"``."""
        if self.waited <= _HARDLY:
            return "model"
        if self.is_prefetched and (self.loader_per_s or 0) > 1.5 * self.loop_per_s:
            return "host-to-device"
        if not self.parts:
            return "loader"
        costs: dict[str, float] = {}
        for part in self.parts:
            costs[part.limit] = costs.get(part.limit, 0.0) + part.seconds
        largest = max(costs, key=lambda limit: costs[limit])
        return "workers" if self.workers < self.usable_cores and largest != "disk" else largest

    @property
    def line(self) -> str:
        """The diagnosis in one line."""
        words = f"The loop waits {_percent(self.waited)} of each step for data; "
        words += f"{LIMITS[self.limit][0]} is the limit; "
        if self.loader_per_s is not None:
            words += f"the loader could feed {self.loader_per_s:,.0f} samples/s, "
        return f"{words}the model could take {self.model_per_s:,.0f}"

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, with the figures that say so."""
        cure = LIMITS[self.limit][1]
        if self.limit == "model" or self.kept_per_s is None:
            return (cure,)
        return cure, f"samples in memory: {self.kept_per_s:,.0f} samples/s, tried; {self.kept}"

    def _lines(self) -> Iterator[Line]:
        yield from (self.line, "")
        yield f"a step, mean of {self.batches}", "", ""
        yield "  wait for data", _ms(self.wait_s), _percent(self.waited)
        yield "  step", _ms(self.step_s), _percent(1 - self.waited)
        yield "the loop", f"{self.loop_per_s:,.0f}", "samples/s"
        if self.loader_per_s is not None:
            words = f"samples/s, {self.workers} workers"
            yield "the loader alone", f"{self.loader_per_s:,.0f}", words
        if self.parts:
            yield "a sample, on one core", "", ""
        for part in self.parts:
            waits = f"CPU {_ms(part.cpu_s)}" if part.limit == "disk" else ""
            yield f"  {part.kind}: {part.name}", _ms(part.seconds), waits
        yield ""
        yield from (f"- {line}" for line in self.advice)
        yield from (f"({note})" for note in self.notes)
        if not self.imports or self.kept_per_s is None or self.limit == "model":
            return
        limit = "model" if self.model_per_s < self.kept_per_s else "loader"
        loop = min(self.model_per_s, self.kept_per_s)
        yield ""
        yield "change the imports, and keep the script:"
        yield f"    from fastdata import {self.imports}"
        yield (
            f"which would bring the loader from {self.loader_per_s:,.0f} to "
            f"{self.kept_per_s:,.0f} samples/s, and the loop from {self.loop_per_s:,.0f} to "
            f"about {loop:,.0f}: the {limit} is the limit then"
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.3g} ms"


# Loops


def diagnose(
    loader: Iterable[Any], step: Callable[[Any], Any] | None = None, *, batches: int = 100
) -> Diagnosis:
    """Run a training loop and say where its time goes.

    The loop is run over one epoch at most, all else in forked processes. A loader of fastdata's
    counts the epoch. What the loader or ``step`` raises in the loop is raised here.

    Args:
        loader: any torch ``DataLoader``, fastdata's among them, or a ``CudaPrefetcher``. Of other
            iterables of batches only the loop is measured.
        step: called with each batch; without it nothing is done with them.
        batches: to run at most, at least 2; the first one is not counted.

    Raises:
        ValueError: the loader gave fewer than two batches.

    Example:
        >>> batches = [torch.zeros(4, 3)] * 20
        >>> diagnose(batches, lambda batch: [batch.exp() for _ in range(99)]).limit
        'model'
    """
    if batches < 2:
        raise ValueError(f"batches={batches}: at least 2 are needed, the first one is not counted")
    loop = TimedLoop(loader)
    for batch in islice(loop, batches):
        if step is not None:
            step(batch)
    loop.end_step()
    if loop.batches < 2:
        raise ValueError(f"the loader gave {loop.batches} batches, and a diagnosis needs 2")
    return _examine(loop)


class TimedLoop:
    """A loader whose loops are timed, but for the first batch, which workers start for.

    ``wait_s`` is how long the loop waited for ``batches``, ``busy_s`` how long it was busy.

    Example:
        >>> loop = TimedLoop([1, 2, 3])
        >>> sum(loop), loop.batches, loop.wait_s < 1
        (6, 3, True)
    """

    def __init__(self, loader: Any, most_batches: int | None = None) -> None:
        self.loader = loader
        self.wait_s = 0.0
        self.busy_s = 0.0
        self.batches = 0
        self.samples = 0
        self._most_batches = most_batches
        self._left_at: float | None = None

    def __iter__(self) -> Iterator[Any]:
        return self.over(iter(self.loader))

    def over(self, iterator: Any) -> Iterator[Any]:
        self._left_at = None  # what lies between two epochs is no step
        while True:
            self.end_step()
            if self.batches == self._most_batches:
                raise _EnoughError
            asked_at = time.perf_counter()
            batch = next(iterator, self)
            if batch is self:
                return
            self._left_at = time.perf_counter()
            if self.batches:
                self.wait_s += self._left_at - asked_at
            self.batches += 1
            self.samples += sample_count(batch)
            yield batch

    def end_step(self) -> None:
        if torch.cuda.is_initialized():
            # Else the GPU's work would count as a wait for the next batch, or as nothing.
            torch.cuda.current_stream().synchronize()
        if self._left_at is not None:
            self.busy_s += time.perf_counter() - self._left_at
            self._left_at = None


class _EnoughError(BaseException):
    """Ends a script whose loop has been seen for long enough; no ``except Exception`` keeps it."""


@contextlib.contextmanager
def _timed_loaders(loops: dict[int, TimedLoop], batches: int) -> Iterator[None]:
    """Time all loops over loaders; of a prefetcher and the loader in it, the prefetcher's."""
    kinds: tuple[Any, ...] = (TorchDataLoader, DataLoader, CudaPrefetcher)
    begins = {kind: kind.__iter__ for kind in kinds}
    inside: list[Any] = []

    def timed(begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed_iter(loader: Any) -> Any:
            if inside:
                return begin(loader)
            inside.append(loader)
            try:
                iterator = begin(loader)
            finally:
                inside.clear()
            # Prefetchers may be made anew.
            loop = loops.setdefault(id(_in_prefetcher(loader)), TimedLoop(loader, batches))
            return loop.over(iterator)

        return timed_iter

    for kind, begin in begins.items():
        kind.__iter__ = timed(begin)
    try:
        yield
    finally:
        for kind, begin in begins.items():
            kind.__iter__ = begin


def _in_prefetcher(loader: Any) -> Any:
    return loader.loader if isinstance(loader, CudaPrefetcher) else loader


# The loader alone


def _examine(loop: TimedLoop) -> Diagnosis:
    """The figures of the loop with those of the loader alone."""
    loader = _in_prefetcher(loop.loader)
    notes: list[str] = []
    figures: dict[str, Any] = {
        "batches": loop.batches - 1,
        "batch_size": loop.samples / loop.batches,
        "wait_s": loop.wait_s / (loop.batches - 1),
        "step_s": loop.busy_s / (loop.batches - 1),
        "usable_cores": usable_cores(),
        "is_prefetched": loader is not loop.loader,
    }
    if isinstance(loader, TorchDataLoader):
        figures["workers"] = loader.num_workers
        if not isinstance(loader, DataLoader):
            is_folder = type(loader.dataset).__name__ == "ImageFolder"
            figures["imports"] = f"DataLoader, {'ImageFolder' if is_folder else 'CachedDataset'}"
        with _noting(notes, "the loader alone"):
            figures["loader_per_s"] = _rate(loader)
            figures["parts"] = tuple(apart(partial(_parts, loader), limit_s=_PATIENCE_S))
        with _noting(notes, "keeping samples in memory"):
            if "parts" in figures and Diagnosis(**figures).limit != "model":
                figures |= _when_kept(loader, figures["loader_per_s"])
    return Diagnosis(**figures, notes=tuple(notes))


@contextlib.contextmanager
def _noting(notes: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # of the user's code, under settings of ours
        reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        notes.append(f"not measured: {what}: {reason}")


def _rate(loader: Any) -> float:
    """Samples a second of a loader like the user's, which leaves its workers alone."""

    def work() -> Rate:
        other = copy.copy(loader)
        other.__dict__ |= {"_iterator": None, "pin_memory": False, "persistent_workers": False}
        return measure(other, seconds=_RATE_S, limit_s=6 * _RATE_S)

    return apart(work, limit_s=_PATIENCE_S).samples_per_s


def _when_kept(loader: Any, now_per_s: float) -> dict[str, Any]:
    """The rate if fastdata kept the samples in memory, where that is clearly faster."""
    dataset = loader.dataset
    is_kept = isinstance(dataset, PreparedDataset) and dataset.storage != "none"
    if is_kept or isinstance(dataset, IterableDataset) or loader.batch_size is None:
        return {}
    count = min(len(dataset), _MOST_KEPT)
    index = np.linspace(0, len(dataset), count, endpoint=False, dtype=int).tolist()

    def work() -> tuple[float, int]:
        bare, transform = _split(dataset)
        kept = CachedDataset(Subset(bare, index), transform=transform, storage="shared")
        other = DataLoader(
            kept,
            loader.batch_size,
            sampler=EndlessOrder(count, 0),
            num_workers=min(loader.num_workers, usable_cores()),
            collate_fn=loader.collate_fn,
        )
        rate = measure(other, seconds=_RATE_S, limit_s=6 * _RATE_S)
        return rate.samples_per_s, kept.storage_report().raw_bytes

    rate, some_bytes = apart(work, limit_s=_PATIENCE_S)
    if rate < _CLEAR * now_per_s:
        return {}
    need = format_bytes(some_bytes * len(dataset) // count)
    budget = budget_bytes(available_bytes())
    return {"kept_per_s": rate, "kept": f"all {len(dataset):,} need {need}, and {budget}"}


# What a sample costs


def _parts(loader: Any) -> list[Part]:
    """What the parts of a sample cost, in the calling thread."""
    if loader.num_workers:
        torch.set_num_threads(1)  # as workers do
    timed = _TimedSteps()
    dataset = loader.dataset
    if not isinstance(dataset, PreparedDataset):
        with contextlib.suppress(Exception):  # one that cannot be copied is read as a whole
            bare, transform = _split(dataset)
            timed.steps = flatten(transform)
            dataset = _with_transform(bare, timed)
    is_stream = isinstance(dataset, IterableDataset)
    samples = iter(dataset) if is_stream else (dataset[index] for index in loader.sampler)
    next(samples)  # which pays for imports and tables
    timed.costs.clear()
    began = _clock()
    read = []
    for sample in islice(samples, _SAMPLES):
        read.append(sample)
        if (_clock() - began)[0] > _SAMPLES_S:
            break
    spent = _clock() - began - sum(timed.costs.values(), np.zeros(2))
    is_kept = isinstance(dataset, PreparedDataset) and dataset.storage != "none"
    kind = "transform" if is_kept else "read"
    parts = [_part(type(dataset).__name__, kind, spent, len(read))]
    for (_, name), cost in timed.costs.items():
        parts.append(_part(name, "transform", cost, len(read)))
    joined = read[0]
    if loader.batch_sampler is not None:
        joined = read[: loader.batch_size]
    began = _clock()
    loader.collate_fn(joined)
    collate = getattr(loader.collate_fn, "__name__", "collate_fn")
    return [*parts, _part(collate, "collate", _clock() - began, len(joined))]


def _part(name: str, kind: Any, costs: np.ndarray, count: int) -> Part:
    seconds, cpu_s = np.maximum(costs / count, 0).tolist()
    return Part(name, kind, seconds, cpu_s)


def _clock() -> np.ndarray:
    """Seconds of one core, waiting for others than a core included; and CPU seconds."""
    return np.array(thread_clock())


class _TimedSteps:
    """A transform that adds up what its steps cost."""

    def __init__(self) -> None:
        self.steps: tuple[Any, ...] = ()
        self.costs: dict[tuple[int, str], np.ndarray] = {}

    def __call__(self, sample: Any) -> Any:
        for number, step in enumerate(self.steps):
            began = _clock()
            sample = step(sample)
            key = number, shorten(" ".join(repr(step).split()), 44, placeholder=" ...")
            self.costs[key] = self.costs.get(key, 0.0) + _clock() - began
        return sample


def _split(dataset: Any) -> tuple[Any, Any]:
    """A dataset of torchvision's manners without its transform, and that.

    Raises:
        ValueError: its transform takes the target, too.
    """
    base = dataset
    while type(base) is Subset:
        base = base.dataset
    if type(getattr(base, "transforms", None)).__name__ not in ("NoneType", "StandardTransform"):
        raise ValueError("its transform takes the target too")
    return _with_transform(dataset, None), getattr(base, "transform", None)


def _with_transform(dataset: Any, transform: Any) -> Any:
    """A copy of a dataset, or of one within, under another transform."""
    if isinstance(dataset, PreparedDataset):
        return dataset.with_transform(transform)
    other = copy.copy(dataset)
    if type(dataset) is Subset:
        other.dataset = _with_transform(dataset.dataset, transform)
    elif hasattr(dataset, "transform"):
        other.transform = transform
    if getattr(dataset, "transforms", None) is not None:  # torchvision's, which holds the same one
        other.transforms = copy.copy(dataset.transforms)
        other.transforms.transform = transform
    return other


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    batches = "to measure; default: %(default)s"
    add("--batches", type=positive, default=100, metavar="N", help=batches)
    add("script", type=Path, metavar="SCRIPT", help="the script that trains")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")


def run(options: argparse.Namespace) -> int:
    script = options.script
    if not script.is_file():
        cure = "give the script that trains, then its own arguments"
        raise FileNotFoundError(f"{script} is no file: {cure}")
    try:
        loops = run_script(script, options.arguments, options.batches)
    except Exception:  # noqa: BLE001  # the script's own
        traceback.print_exc()
        return 1
    loop = max(loops, key=lambda loop: loop.wait_s + loop.busy_s, default=None)
    if loop is None or loop.batches < 2:
        raise ValueError(f"{script} has no loop over a torch DataLoader of two batches or more")
    print(_examine(loop))
    return 0


def run_script(script: Path, arguments: list[str], batches: int) -> list[TimedLoop]:
    """Run a script as ``__main__`` until a loop over a loader has had so many batches."""
    # Not runpy's: the script's workers may have to import from the module when it has ended.
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    loops: dict[int, TimedLoop] = {}
    try:
        with _timed_loaders(loops, batches):
            exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
    except _EnoughError:
        pass
    except SystemExit as end:
        if end.code:
            raise
    return list(loops.values())
