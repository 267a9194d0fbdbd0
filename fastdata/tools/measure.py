"""Samples a second of a loader without a model.

``measure`` is an empty loop with a warm-up. ``in_subprocess`` runs it in a forked copy of this
process: what the loop draws, reads, caches or breaks stays there, and its memory, threads and
worker processes end with it.
"""

from __future__ import annotations

import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar, cast

import torch
from torch.utils.data import RandomSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastdata.datasets.dataset import PreparedDataset
from fastdata.loaders.iterators import sample_count
from fastdata.machine.limits import available_bytes
from fastdata.machine.workers import attempt_job, forked, settle

_T = TypeVar("_T")

_WARM_UP = 0.125
"""Share of the measuring time after which a loader that reads far ahead counts as warm."""


def measure_rate(loader: Iterable[object], *, seconds: float, limit_s: float = math.inf) -> float:
    """Return samples a second of an empty loop over a loader, without the start of its workers.

    If epochs are shorter than ``seconds``, whole epochs are measured. A batch without tensors
    counts as one sample.

    Args:
        loader: any iterable of batches.
        seconds: time to measure.
        limit_s: seconds after which the loop ends with what it has; checked when a batch comes.

    Raises:
        ValueError: the loader gives no batch.
    """
    # Batches of several workers come in turns, often all at once: whole turns are counted.
    turn = max(1, getattr(loader, "num_workers", 0))
    # What workers have read ahead before the start would be counted as read in no time.
    ahead = turn * (1 + (getattr(loader, "prefetch_factor", None) or 0))
    end = time.perf_counter() + limit_s
    in_epochs = 0
    spent_s = 0.0
    while spent_s < seconds:
        began = start = now = time.perf_counter()
        samples = before_start = 0
        for count, batch in enumerate(loader, 1):
            samples += sample_count(batch) or 1
            now = time.perf_counter()
            if count % turn:
                continue
            is_enough = start > began and now - start >= seconds
            if is_enough or now > end:
                return (samples - before_start) / (now - start)
            has_waited = count > turn and now - began >= _WARM_UP * seconds
            if start == began and (count >= ahead or has_waited):
                start = now
                before_start = samples
        if not samples:
            raise ValueError("the loader gives no batch to measure")
        in_epochs += samples
        spent_s += now - began
    return in_epochs / spent_s


def shuffled(dataset: Sized, seed: int = 0) -> RandomSampler:
    """Return shuffled indices without an end; equal seeds give equal orders."""
    generator = torch.Generator().manual_seed(seed)
    return RandomSampler(dataset, num_samples=1 << 60, generator=generator)


def is_kept(dataset: object) -> bool:
    """Return True if a dataset keeps prepared samples."""
    return isinstance(dataset, PreparedDataset) and dataset._fastdata.storage_plan.storage != "none"


def _leave_worker_processes() -> None:
    """Let no iterator in a forked copy end its worker processes: they are the parent's.

    A notebook keeps the iterator of an epoch that failed. torch's code would raise an error for
    each of its workers, because a process can end its own children only.
    """
    for value in gc.get_objects():
        if issubclass(type(value), _MultiProcessingDataLoaderIter):
            value._shutdown = True


def in_subprocess(work: Callable[[], _T], *, limit_s: float | None) -> _T:
    """Return what ``work`` returns, or raise what it raises, from a forked copy of this process.

    On systems other than Linux, where forks are unsafe or missing, it runs in this process.

    Raises:
        TimeoutError: it took longer than ``limit_s`` seconds.
        RuntimeError: the process was killed, or has raised an error that cannot be pickled.
    """
    if sys.platform != "linux":
        return work()
    available_bytes()  # imports psutil now, and not in a thread that may hold a lock at the fork

    def job(_: str) -> _T:
        warnings.simplefilter("ignore")  # the user's own run shows them
        _leave_worker_processes()
        # Threads of the parent do not exist in the copy. OpenMP's pool would wait for its own for
        # ever, but a new thread gets a new pool.
        return ThreadPoolExecutor(1).submit(work).result()

    with forked(job) as (pool, [process]):
        answer = pool.submit(attempt_job, "measuring")
        if not wait([answer], limit_s).done:
            raise TimeoutError(f"no answer within {limit_s:.1f} s")
        try:
            return cast("_T", settle(answer.result()))
        except BrokenProcessPool:
            pool.shutdown()
            raise RuntimeError(
                f"the measuring process has ended with exit code {process.exitcode}"
            ) from None
