"""``fastdata.diagnose``: where a training loop's time goes, and what would make it shorter.

It measures the loop as it is, the loader without a model, the parts of one sample, and the loader
over samples that are kept in memory; all but the first in forked processes. ``Diagnosis`` derives
the limit and the advice from these figures.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Subset

from fastdata.datasets.dataset import PreparedDataset
from fastdata.datasets.public import CachedDataset
from fastdata.errors import counted
from fastdata.loaders import DataLoader
from fastdata.loaders.epochs import sample_count
from fastdata.loaders.prefetch import CudaPrefetcher
from fastdata.machine.budget import budget_bytes
from fastdata.machine.limits import available_bytes, usable_cores
from fastdata.machine.units import format_bytes
from fastdata.pixels.compose import flatten
from fastdata.report import Line, Report
from fastdata.tools import in_subprocess, is_kept, measure_rate, positive, shuffled

_RATE_S = 1.0
_SAMPLES_S = 1.5
_PATIENCE_S = 30.0
_SAMPLES = 32
_MOST_KEPT = 256
_HARDLY = 0.1
"""A loop that waits for a smaller share of its time is limited by the model."""
_CLEAR = 1.15
"""Least gain of keeping samples that is worth a change of the script."""

LIMITS = {
    "model": ("the model", "no faster loader would help: make the step faster"),
    "host-to-device": ("copying to the device", "send fewer bytes: uint8 batches, cast by dtype="),
    "disk": ("reading from disk or network", "keep samples in memory, or wait with more workers"),
    "decode": ("decoding", "decode once and keep the samples: storage= of ImageFolder"),
    "transform": ("the transform", "run its steps on whole batches: transform= of ImageFolder"),
    "collate": ("collate_fn", "return tensors of one shape, which are stacked without Python"),
    "workers": ("the number of workers", "use every core, or let fastdata.tune choose num_workers"),
    "loader": ("the loader", "it is no torch DataLoader over samples, so its parts are unknown"),
}
"""Name and cure of each thing that can limit a loop."""


@dataclass(frozen=True, slots=True)
class Part:
    """Cost of one part of a sample, on one core, without the time that it waited for a core.

    ``seconds`` includes waiting for disks and networks, ``cpu_s`` does not.
    """

    kind: str
    name: str
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
        batches: number of batches that the times are means of, without the first one.
        batch_size: mean number of samples in a batch.
        wait_s: mean time in each step of the loop that waits for data.
        step_s: mean time of the rest of each step.
        workers: number of the loader's workers.
        usable_cores: number of cores that this process may use.
        is_prefetched: True if a CudaPrefetcher moves batches.
        loader_per_s: samples a second of an empty loop over the loader.
        parts: cost of each part of making a sample.
        kept_per_s: samples a second of the loader if samples were kept in memory; None unless that
            is clearly faster.
        kept: memory that this would need.
        imports: names to import from fastdata instead of torchvision and torch, if the loader is
            torch's.
        note: figures that could not be measured, and why.
    """

    batches: int
    batch_size: float
    wait_s: float
    step_s: float
    workers: int = 0
    usable_cores: int = 1
    is_prefetched: bool = False
    loader_per_s: float | None = None
    parts: Sequence[Part] = ()
    kept_per_s: float | None = None
    kept: str = ""
    imports: str = ""
    note: str = ""

    @property
    def waited(self) -> float:
        """Share of each step that waits for data."""
        return self.wait_s / (self.wait_s + self.step_s)

    @property
    def loop_per_s(self) -> float:
        return self.batch_size / (self.wait_s + self.step_s)

    @property
    def model_per_s(self) -> float:
        return self.batch_size / max(self.step_s, 1e-9)

    @property
    def limit(self) -> str:
        """The key in ``LIMITS`` of what limits the loop, such as ``"decode"`` or ``"model"``."""
        if self.waited <= _HARDLY:
            return "model"
        if self.is_prefetched and (self.loader_per_s or 0) > 1.5 * self.loop_per_s:
            return "host-to-device"
        if not self.parts:
            return "loader"
        costs = dict.fromkeys([part.limit for part in self.parts], 0.0)
        for part in self.parts:
            costs[part.limit] += part.seconds
        largest = max(costs, key=costs.__getitem__)
        return "workers" if self.workers < self.usable_cores and largest != "disk" else largest

    @property
    def line(self) -> str:
        """The diagnosis in one line."""
        loader = ""
        if self.loader_per_s is not None:
            loader = f"the loader could feed {self.loader_per_s:,.0f} samples/s, "
        return (
            f"The loop waits {_percent(self.waited)} of each step for data; "
            f"{LIMITS[self.limit][0]} is the limit; "
            f"{loader}the model could take {self.model_per_s:,.0f}"
        )

    @property
    def advice(self) -> tuple[str, ...]:
        """The cures, with the figures that they follow from."""
        cures = [LIMITS[self.limit][1]]
        if self.limit != "model" and self.kept_per_s is not None:
            cures.append(f"samples in memory: {self.kept_per_s:,.0f} samples/s, tried; {self.kept}")
        return tuple(cures)

    def _lines(self) -> Iterator[Line]:
        yield from (self.line, "")
        yield f"a step, mean of {self.batches}", "", ""
        yield "  wait for data", _ms(self.wait_s), _percent(self.waited)
        yield "  step", _ms(self.step_s), _percent(1 - self.waited)
        yield "the loop", f"{self.loop_per_s:,.0f}", "samples/s"
        if self.loader_per_s is not None:
            yield (
                "the loader alone",
                f"{self.loader_per_s:,.0f}",
                f"samples/s, {counted(self.workers, 'worker')}",
            )
        if self.parts:
            yield "a sample, on one core", "", ""
        for part in self.parts:
            waits = f"CPU {_ms(part.cpu_s)}" if part.limit == "disk" else ""
            yield f"  {part.kind}: {part.name}", _ms(part.seconds), waits
        yield ""
        yield from (f"- {line}" for line in self.advice)
        if self.note:
            yield f"({self.note})"
        if not self.imports or self.kept_per_s is None or self.limit == "model":
            return
        loop, limit = min((self.kept_per_s, "loader"), (self.model_per_s, "model"))
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
    """Run a training loop and return where its time goes.

    The loop runs over one epoch at most, which a loader of fastdata counts. All else is measured in
    forked processes. Errors of the loader or of ``step`` in the loop are raised here.

    Args:
        loader: any torch ``DataLoader``, also fastdata's, or a ``CudaPrefetcher``. For any other
            iterable of batches only the loop is measured.
        step: called with each batch; default: do nothing.
        batches: most batches to run, at least 2; the first one is not counted.

    Raises:
        ValueError: the loader gave fewer than two batches.

    Example:
        >>> batches = [torch.zeros(4, 3)] * 20
        >>> diagnose(batches, lambda batch: [batch.exp() for _ in range(99)]).limit
        'model'
    """
    loop = TimedLoop(loader, batches)
    with contextlib.suppress(EnoughError):
        for batch in loop:
            if step is not None:
                step(batch)
    if loop.batches < 2:
        raise ValueError(f"the loader gave {loop.batches} batches, and a diagnosis needs 2")
    return _examine(loop)


@dataclass
class TimedLoop:
    """A loader whose loops are timed, without the first batch, which workers start for.

    ``wait_s`` is the time that loops waited for ``batches``, ``busy_s`` the time in between.

    Example:
        >>> loop = TimedLoop([1, 2, 3])
        >>> sum(loop), loop.batches, loop.wait_s < 1
        (6, 3, True)
    """

    loader: Any
    most_batches: int | None = None
    wait_s: float = 0.0
    busy_s: float = 0.0
    batches: int = 0
    samples: int = 0

    def __iter__(self) -> Iterator[Any]:
        return self.over(iter(self.loader))

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        asked_at = time.perf_counter()
        for batch in iterator:
            came_at = time.perf_counter()
            self.samples += sample_count(batch) or 1
            yield batch
            if torch.cuda.is_initialized():
                # Without it, the GPU's work would count as a wait for the next batch, or not at all.
                torch.cuda.current_stream().synchronize()
            done_at = time.perf_counter()
            if self.batches:
                self.wait_s += came_at - asked_at
                self.busy_s += done_at - came_at
            self.batches += 1
            if self.batches == self.most_batches:
                raise EnoughError
            asked_at = done_at


class EnoughError(BaseException):
    """Ends a script after enough batches; not an Exception, which the script may catch."""


def in_prefetcher(loader: Any) -> Any:
    return loader.loader if isinstance(loader, CudaPrefetcher) else loader


# The loader without the loop


def _examine(loop: TimedLoop) -> Diagnosis:
    """Return the figures of the loop with those of the loader alone, up to the first that fails."""
    loader = in_prefetcher(loop.loader)
    is_torchs = isinstance(loader, TorchDataLoader)
    imports = ""
    if is_torchs and not isinstance(loader, DataLoader):
        is_folder = type(loader.dataset).__name__ == "ImageFolder"
        imports = f"DataLoader, {'ImageFolder' if is_folder else 'CachedDataset'}"
    steps = loop.batches - 1
    diagnosis = Diagnosis(
        batches=steps,
        batch_size=loop.samples / loop.batches,
        wait_s=loop.wait_s / steps,
        step_s=loop.busy_s / steps,
        workers=loader.num_workers if is_torchs else 0,
        usable_cores=usable_cores(),
        is_prefetched=loader is not loop.loader,
        imports=imports,
    )
    for what, work in _BESIDE.items() if is_torchs else ():
        try:
            figures = in_subprocess(partial(work, loader, diagnosis), limit_s=_PATIENCE_S)
            diagnosis = replace(diagnosis, **figures)
        except Exception as error:  # noqa: BLE001  # of the user's code, under settings of ours
            reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
            return replace(diagnosis, note=f"not measured: {what}: {reason}")
    return diagnosis


def _loader_alone(loader: Any, diagnosis: Diagnosis) -> dict[str, Any]:
    """Measure a copy of the user's loader, whose persistent workers are left alone."""
    other = copy.copy(loader)
    other.__dict__ |= {"_iterator": None, "pin_memory": False, "persistent_workers": False}
    return {"loader_per_s": measure_rate(other, seconds=_RATE_S, limit_s=6 * _RATE_S)}


def _when_kept(loader: Any, diagnosis: Diagnosis) -> dict[str, Any]:
    """Measure the loader with samples kept in memory; no figures unless that is clearly faster."""
    dataset = loader.dataset
    base = _in_subsets(dataset)
    is_indexed = loader.batch_size is not None and not isinstance(dataset, IterableDataset)
    if diagnosis.limit == "model" or is_kept(base) or not is_indexed:
        return {}
    if type(getattr(base, "transforms", None)).__name__ not in ("NoneType", "StandardTransform"):
        raise ValueError("its transform takes the target too")
    some = range(0, len(dataset), math.ceil(len(dataset) / _MOST_KEPT))
    transform = getattr(base, "transform", None)
    with _transform_instead(base, None):
        kept = CachedDataset(Subset(dataset, some), transform=transform, storage="shared")
        other = DataLoader(
            kept,
            loader.batch_size,
            sampler=shuffled(kept),
            num_workers=min(loader.num_workers, usable_cores()),
            collate_fn=loader.collate_fn,
        )
        rate = measure_rate(other, seconds=_RATE_S, limit_s=6 * _RATE_S)
        need = format_bytes(kept.storage_report().raw_bytes * len(dataset) // len(some))
    if rate < _CLEAR * (diagnosis.loader_per_s or 0):
        return {}
    kept_in = f"all {len(dataset):,} need {need}, and {budget_bytes(available_bytes())}"
    return {"kept_per_s": rate, "kept": kept_in}


def _parts(loader: Any, diagnosis: Diagnosis) -> dict[str, Any]:
    """Measure the parts of a sample, in the calling thread."""
    if loader.num_workers:
        torch.set_num_threads(1)  # as in workers
    dataset = loader.dataset
    base = _in_subsets(dataset)
    is_ours = isinstance(base, PreparedDataset)
    steps = () if is_ours else flatten(getattr(base, "transform", None))
    step_costs = np.zeros((len(steps), 2))

    def timed(sample: Any) -> Any:
        for step, cost in zip(steps, step_costs, strict=True):
            began = _clock()
            sample = step(sample)
            cost += _clock() - began
        return sample

    is_stream = isinstance(dataset, IterableDataset)
    samples = iter(dataset) if is_stream else map(dataset.__getitem__, loader.sampler)
    read = []
    with contextlib.nullcontext() if is_ours else _transform_instead(base, timed):
        next(samples)  # the first one pays for imports and tables
        step_costs[:] = 0
        began = _clock()
        for sample in islice(samples, _SAMPLES):
            read.append(sample)
            if (_clock() - began)[0] > _SAMPLES_S:
                break
        spent = _clock() - began - step_costs.sum(axis=0)
    costs = [("transform" if is_kept(base) else "read", type(dataset).__name__, spent / len(read))]
    for step, cost in zip(steps, step_costs, strict=True):
        costs.append(("transform", shorten(repr(step), 44, placeholder=" ..."), cost / len(read)))
    joined = read[0]
    count = 1
    if loader.batch_sampler is not None:
        joined = read[: loader.batch_size]
        count = len(joined)
    began = _clock()
    loader.collate_fn(joined)
    name = getattr(loader.collate_fn, "__name__", "collate_fn")
    costs.append(("collate", name, (_clock() - began) / count))
    return {"parts": [Part(kind, name, *np.maximum(cost, 0)) for kind, name, cost in costs]}


_BESIDE = {
    "the loader alone": _loader_alone,
    "what a sample costs": _parts,
    "keeping samples in memory": _when_kept,
}


def _clock() -> np.ndarray:
    """Return seconds in which this thread did not wait for a core, and its CPU seconds.

    The first grows faster than the second while the thread waits for a disk or a network. If the
    system does not count how long threads wait for cores, the first is plain time.
    """
    ready_ns = 0
    with (
        contextlib.suppress(OSError, IndexError),
        open("/proc/thread-self/schedstat", "rb", buffering=0) as file,
    ):
        ready_ns = int(file.read().split()[1])  # proc(5): ran, could have run, slices
    return np.array([time.perf_counter() - ready_ns / 1e9, time.thread_time()])


def _in_subsets(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


@contextlib.contextmanager
def _transform_instead(dataset: Any, transform: Any) -> Iterator[None]:
    """Replace the transform of a dataset like torchvision's while this block runs."""
    own = getattr(dataset, "transform", None)
    joint = getattr(dataset, "transforms", None)  # torchvision's StandardTransform holds it, too
    holders: list[Any] = [it for it in (dataset, joint) if hasattr(it, "transform")]
    for holder in holders:
        holder.transform = transform
    try:
        yield
    finally:
        for holder in holders:
            holder.transform = own


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--batches",
        type=positive,
        default=100,
        metavar="N",
        help="to measure; default: %(default)s",
    )
    add("script", type=Path, metavar="SCRIPT", help="the script that trains")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")


def run(options: argparse.Namespace) -> int:
    script = options.script
    if not script.is_file():
        raise FileNotFoundError(
            f"{script} is no file: give the script that trains, then its own arguments"
        )
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
    """Run a script as ``__main__`` until a loop over a loader has run this many batches.

    If a prefetcher reads a loader, only the prefetcher's loop is timed.
    """
    # runpy would remove the module at its end, but the script's workers may still import from it.
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    loops: dict[int, TimedLoop] = {}
    kinds: list[Any] = [TorchDataLoader, DataLoader, CudaPrefetcher]
    begins = {kind: kind.__iter__ for kind in kinds}

    def begin_timed(loader: Any, begin: Callable[[Any], Any]) -> Any:
        # A prefetcher may be made for each epoch: its loops are told apart by the loader in it.
        loop = loops.setdefault(id(in_prefetcher(loader)), TimedLoop(loader, batches))
        is_in_prefetcher = type(loop.loader) is not type(loader)
        return begin(loader) if is_in_prefetcher else loop.over(begin(loader))

    for kind, begin in begins.items():
        kind.__iter__ = lambda loader, begin=begin: begin_timed(loader, begin)
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
    except EnoughError:
        pass
    except SystemExit as end:
        if end.code:
            raise
    finally:
        for kind, begin in begins.items():
            kind.__iter__ = begin
    return list(loops.values())
