"""The choice of threads or processes for a loader, and of pinning, with the reasons.

Threads start in microseconds, share the dataset without copying it, and return batches by
reference. The compiled core runs without the GIL, so threads run in parallel. Processes are needed
where Python code runs for each sample.
"""

from __future__ import annotations

import threading
from operator import index
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate

from fastdata.datasets.batch import collate
from fastdata.errors import counted
from fastdata.loaders.buckets import BucketSampler
from fastdata.loaders.mixing import Mixing, served_mixing
from fastdata.loaders.parts import AnyReader, Parts
from fastdata.machine import limits
from fastdata.machine.budget import PinningPlan, budget_bytes, choose_pinning
from fastdata.pixels.decode import jpeg_obstacle
from fastdata.pixels.draws import may_draw

if TYPE_CHECKING:
    from fastdata.loaders.loader import DataLoader


def choose_engine(loader: DataLoader[Any], parts: Parts, workers: str) -> Engine:
    """Choose threads or processes for the next epoch of a loader.

    Args:
        loader: the loader, for its arguments.
        parts: the fastdata datasets that it reads.
        workers: ``"auto"``, ``"thread"`` or ``"process"``.
    """
    count = index(loader.num_workers)  # it may be a NumPy integer
    reader = parts.latest()
    obstacle = _thread_obstacle(loader, parts, reader, workers)
    if obstacle is not None and (count or reader is None):
        path = "torch's engine in the training loop"
        if count:
            path = f"{count} worker process{'es' * (count > 1)}, with batches in shared memory"
        return Engine("process", f"{path}, because {obstacle}", count)
    path = "whole batches"
    why = reader and _reading_obstacle(loader, reader)
    is_whole = reader is not None and why is None
    mixing = served_mixing(loader.collate_fn, reader) if is_whole else ""
    note = mixing if isinstance(mixing, str) else f"mixed by {mixing.mixer.name} of collate_fn="
    note = note and f"; {note}"
    if not is_whole:
        path = "samples one by one" + (f" ({why})" if reader else "")
    elif getattr(reader, "kept", True) is None and jpeg_obstacle():
        path += f" of files that Pillow decodes whole ({jpeg_obstacle()})"
    if count == 0:
        return Engine("thread", f"{path}, read in the training loop: num_workers=0{note}", 0)
    if not threading.main_thread().is_alive():
        return Engine("thread", f"{path}, read at exit, when no thread can be started{note}", 0)
    # Whole batches keep every core busy, so more threads than cores would only take memory. Samples
    # that are read one by one may wait for a disk or a network, where more threads help.
    threads = min(count, limits.usable_cores()) if is_whole else count
    return Engine("thread", f"{path}, read by {counted(threads, 'thread')}{note}", threads)


def _thread_obstacle(
    loader: DataLoader[Any], parts: Parts, reader: AnyReader | None, workers: str
) -> str | None:
    """Return the reason to use torch's engine instead of threads; None if threads can be used."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset is read in order"
    if loader.batch_sampler is None:
        return "batch_size=None asks for single samples"
    if workers != "auto":
        return "workers='process'" if workers == "process" else None
    if reader is None:
        return f"{type(loader.dataset).__name__} is not a fastdata dataset"
    if any(may_draw(dataset.target_transform) for dataset in parts.datasets):
        return "target_transform= may draw random numbers"
    why = _reading_obstacle(loader, reader)
    if loader.collate_fn in (collate, default_collate):
        return why
    if isinstance(served_mixing(loader.collate_fn, reader), Mixing):
        return None
    # The user's own collate_fn may need what worker_init_fn prepares.
    init = getattr(loader.worker_init_fn, "func", loader.worker_init_fn)
    is_lightnings = getattr(init, "__name__", "") == "pl_worker_init_function"  # it only seeds
    if init is not None and not is_lightnings:
        return "worker_init_fn is for worker processes"
    if may_draw(loader.collate_fn, from_torch=False):
        return "collate_fn= may draw from Python's or NumPy's generators"
    return why


def _reading_obstacle(loader: DataLoader[Any], reader: AnyReader) -> str | None:
    """Return why a loader's batches need Python code per sample; None if they do not."""
    # Samples of different shapes can only be stacked if each batch has one shape. The user's own
    # collate_fn may pad them, which is Python code per sample.
    stacks = loader.collate_fn in (collate, default_collate)
    if stacks or isinstance(loader.batch_sampler, BucketSampler):
        return reader.obstacle_if_alike
    return reader.obstacle


def plan_pinning(loader: DataLoader[Any], reader: AnyReader | None) -> PinningPlan:
    """Decide whether ``pin_memory="auto"`` pins the batches of a loader, and give the reason."""
    pinned_bytes = None
    sample_bytes = None if reader is None else reader.served_bytes
    if sample_bytes and loader.batch_size:
        under_way = max(1, loader.num_workers * (loader.prefetch_factor or 0)) + 1
        pinned_bytes = sample_bytes * loader.batch_size * under_way
    has_accelerator = torch.cuda.is_available() or torch.xpu.is_available()
    budget = budget_bytes(limits.available_bytes())
    return choose_pinning(pinned_bytes, budget, has_accelerator=has_accelerator)


class Engine(NamedTuple):
    """The choice of threads or processes for an epoch.

    Attributes:
        kind: threads, or torch's engine.
        path: how batches are read, and why: a line of ``report()``.
        workers: number of threads or processes; 0 reads in the training loop.
    """

    kind: Literal["thread", "process"]
    path: str
    workers: int
