"""``fastdata.diagnose``: what a training loop spends its time on, and what would make it faster.

It measures four things: the unchanged loop, the loader without a model, the parts of one sample,
and the loader over samples that are kept in memory. All but the first run in forked processes, so
that they cannot disturb the user's script. ``Diagnosis`` derives the limit and the advice.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Subset

from fastdata.datasets.cached import CachedDataset
from fastdata.datasets.dataset import PreparedDataset
from fastdata.loaders.loader import DataLoader
from fastdata.machine.budget import budget_bytes
from fastdata.machine.limits import available_bytes, usable_cores
from fastdata.machine.units import format_bytes
from fastdata.pixels.albumentations_objects import is_of_albumentations
from fastdata.pixels.compose import flatten_transform
from fastdata.tools.arguments import positive
from fastdata.tools.diagnosis import Diagnosis, Part
from fastdata.tools.figures import file_to_write
from fastdata.tools.measure import in_subprocess, is_kept, measure_rate, shuffled
from fastdata.tools.timed_loop import EnoughError, TimedLoop, in_prefetcher, run_script

_Figures = dict[str, Any]
"""Values of fields of ``Diagnosis``, by name."""

_RATE_S = 1.0
"""Seconds to measure a loader."""

_SAMPLES_S = 1.5
"""Most seconds to measure the parts of samples."""

_PATIENCE_S = 30.0
"""Most seconds to wait for one measurement."""

_SAMPLES = 32
"""Most samples whose parts are measured."""

_MOST_KEPT = 256
"""Most samples that are kept in memory for a measurement."""

_CLEAR = 1.15
"""Least gain from keeping samples in memory that is worth a change of the script."""


def diagnose(
    loader: Iterable[Any], step: Callable[[Any], Any] | None = None, *, batches: int = 100
) -> Diagnosis:
    """Run a training loop, and return what limits it.

    ``step`` is really called, so it trains your model for up to ``batches`` steps: save the weights
    before, or pass a copy of the model. A loader of fastdata counts this as an epoch. All other
    measurements run in forked processes.

    Args:
        loader: any torch ``DataLoader``, also fastdata's, or a ``CudaPrefetcher``. For any other
            iterable of batches only the loop is measured.
        step: the training step, called with each batch; by default nothing is called.
        batches: most batches to run, at least 2, and not more than one epoch. The first one is not
            counted.

    Returns:
        A ``Diagnosis`` to print. Its ``limit`` is one word, such as ``"decode"`` or ``"model"``.

    Raises:
        ValueError: the loader gave fewer than two batches.
        Exception: an error of the loader or of ``step``, unchanged.

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
        raise ValueError(
            f"the loader gave too few batches for a diagnosis: {loop.batches}, but at least 2 are "
            "needed. Use batches= of at least 2, a smaller batch_size, or a larger dataset."
        )
    return _examine(loop)


def _examine(loop: TimedLoop) -> Diagnosis:
    """Return the diagnosis of a loop that has run, and measure its loader on its own.

    The measurements end with the first that fails; the diagnosis then has a note.
    """
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
    # The order matters: the loader with samples in memory is compared with the loader alone.
    for what, work in _MEASUREMENTS.items() if is_torchs else ():
        try:
            figures = in_subprocess(partial(work, loader, diagnosis), limit_s=_PATIENCE_S)
            diagnosis = replace(diagnosis, **figures)
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything here
            reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
            return replace(diagnosis, note=f"not measured: {what}: {reason}")
    return diagnosis


def _loader_alone(loader: Any, diagnosis: Diagnosis) -> _Figures:
    """Measure a copy of the user's loader, without its persistent workers."""
    # With persistent workers, iterating the loader itself would restart its iterator, whose workers
    # are processes of the parent.
    other = copy.copy(loader)
    other.__dict__ |= {"_iterator": None, "pin_memory": False, "persistent_workers": False}
    return {"loader_per_s": measure_rate(other, seconds=_RATE_S, limit_s=6 * _RATE_S)}


def _when_kept(loader: Any, diagnosis: Diagnosis) -> _Figures:
    """Measure the loader with samples in memory; return no figures unless it is clearly faster."""
    dataset = loader.dataset
    base = _in_subsets(dataset)
    is_indexed = loader.batch_size is not None and not isinstance(dataset, IterableDataset)
    if diagnosis.limit == "model" or is_kept(base) or not is_indexed:
        return {}
    if type(getattr(base, "transforms", None)).__name__ not in ("NoneType", "StandardTransform"):
        raise ValueError("the dataset's transform also takes the target")
    some = range(0, len(dataset), math.ceil(len(dataset) / _MOST_KEPT))
    transform = getattr(base, "transform", None)
    # CachedDataset runs the transform itself, on stored samples.
    with _transform_instead(base, None if transform is None else _unchanged):
        dataset[0]  # if _unchanged raises an error, CachedDataset must not wrap it
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
    kept_in = (
        f"measured on {len(some):,} of them; all {len(dataset):,} need {need}, and "
        f"{budget_bytes(available_bytes())}"
    )
    return {"kept_per_s": rate, "kept": kept_in}


def _unchanged(*given: Any, **named: Any) -> Any:
    """Stand for a transform of the image alone, called as torchvision's or albumentations' are."""
    if len(given) + len(named) > 1:
        raise ValueError("the dataset's transform also takes the target")
    return named or given[0]


def _steps_of(transform: Any) -> tuple[Any, ...]:
    """Return the steps of a dataset's transform that are timed one by one."""
    # A dataset calls those of albumentations by name, with the image alone or with a mask.
    return (transform,) if is_of_albumentations(transform) else flatten_transform(transform)


def _parts(loader: Any, diagnosis: Diagnosis) -> _Figures:
    """Measure the parts of making a sample: reading, each step of the transform, and collating."""
    if loader.num_workers:
        torch.set_num_threads(1)  # as in worker processes; this is a forked process too
    dataset = loader.dataset
    base = _in_subsets(dataset)
    is_ours = isinstance(base, PreparedDataset)
    steps = () if is_ours else _steps_of(getattr(base, "transform", None))
    step_costs = np.zeros((len(steps), 2))

    # The steps are timed inside the dataset's own __getitem__; the rest of its time is reading.
    def timed(*given: Any, **named: Any) -> Any:
        for step, cost in zip(steps, step_costs, strict=True):
            began = _clock()
            given = (step(*given, **named),)
            cost += _clock() - began
        return given[0]

    is_stream = isinstance(dataset, IterableDataset)
    samples = iter(dataset) if is_stream else map(dataset.__getitem__, loader.sampler)
    read = []
    with contextlib.nullcontext() if is_ours else _transform_instead(base, timed):
        next(samples)  # the first sample also waits for imports and tables
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


_MEASUREMENTS = {
    "the loader alone": _loader_alone,
    "the parts of a sample": _parts,
    "the loader with samples in memory": _when_kept,
}
"""Measurements next to the loop, by the name that a note gives them."""


def _clock() -> np.ndarray:
    """Return this thread's time without its waits for a core, and its CPU time, both in seconds.

    While the thread waits for a disk or a network, only the first grows. If the system does not
    count how long threads wait for cores, the first is plain time.
    """
    ready_ns = 0
    with (
        contextlib.suppress(OSError, IndexError),
        open("/proc/thread-self/schedstat", "rb", buffering=0) as file,
    ):
        # The three numbers of proc(5): ns on a core, ns waiting for a core, number of time slices.
        ready_ns = int(file.read().split()[1])
    return np.array([time.perf_counter() - ready_ns / 1e9, time.thread_time()])


def _in_subsets(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


@contextlib.contextmanager
def _transform_instead(dataset: Any, transform: Any) -> Iterator[None]:
    """Replace the transform of a dataset like those of torchvision while a ``with`` block runs."""
    own = getattr(dataset, "transform", None)
    joint = getattr(dataset, "transforms", None)  # torchvision's StandardTransform also holds it
    holders: list[Any] = [it for it in (dataset, joint) if hasattr(it, "transform")]
    for holder in holders:
        holder.transform = transform
    try:
        yield
    finally:
        for holder in holders:
            holder.transform = own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fastdata diagnose``."""
    add = parser.add_argument
    add(
        "--batches",
        type=positive,
        default=100,
        metavar="N",
        help="number of batches to measure; default: %(default)s",
    )
    add(
        "--html",
        type=file_to_write,
        metavar="FILE",
        help="also write the report as a web page, one file that you can share",
    )
    add("script", type=Path, metavar="SCRIPT", help="your training script")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of your script")


def run(options: argparse.Namespace) -> int:
    """Run the script, print its diagnosis, and return the exit status."""
    script = options.script
    if not script.is_file():
        raise FileNotFoundError(
            f"{script} is not a file. Give a training script, and its own arguments after it."
        )
    try:
        loops = run_script(script, options.arguments, options.batches)
    except Exception:  # noqa: BLE001  # the script's own
        traceback.print_exc()
        return 1
    loop = max(loops, key=lambda loop: loop.wait_s + loop.busy_s, default=None)
    if loop is None or loop.batches < 2:
        raise ValueError(
            f"{script} has ended without a loop over two or more batches of a torch DataLoader. "
            "Give a script that trains, with arguments that make it run at least two steps, and "
            "--batches of at least 2."
        )
    diagnosis = _examine(loop)
    print(diagnosis)
    if options.html:
        options.html.write_text(diagnosis.as_page(), "utf-8")
        print(f"page: {options.html}")
    return 0
