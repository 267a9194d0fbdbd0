"""Samples per second of a loader without a model.

``measure_rate`` is an empty loop with a warm-up. ``in_subprocess`` runs it in a forked copy of this
process. So its random draws, caches and errors do not change this process, and its memory, threads
and worker processes end with the copy.
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
"""Share of the measuring time after which a loader that reads far ahead counts as warmed up."""


def measure_rate(loader: Iterable[object], *, seconds: float, limit_s: float = math.inf) -> float:
    """Return samples per second of an empty loop over a loader, without the start of its workers.

    If epochs are shorter than ``seconds``, whole epochs are measured, including that start. A batch
    without tensors counts as one sample.

    Args:
        loader: any iterable of batches.
        seconds: time to measure.
        limit_s: seconds after which the loop ends with the samples so far; checked at each batch.

    Raises:
        ValueError: the loader gives no batch.
    """
    # Workers finish at about the same time, so their batches come in bursts: count whole turns of
    # all workers.
    turn = max(1, getattr(loader, "num_workers", 0))
    # Batches that were read ahead before the start would count as read in no time: begin after
    # them.
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
    """Return a sampler of shuffled indices without an end; equal seeds give equal orders."""
    return RandomSampler(
        dataset, num_samples=1 << 60, generator=torch.Generator().manual_seed(seed)
    )


def is_kept(dataset: object) -> bool:
    """Return True if a dataset stores prepared samples."""
    return isinstance(dataset, PreparedDataset) and dataset._fastdata.storage_plan.storage != "none"


def _leave_worker_processes() -> None:
    """Keep the iterators of a forked copy from ending the worker processes of the parent.

    A notebook may still hold the iterator of an epoch that failed. torch would try to end its
    workers when the copy exits, and raise an error for each: a process can only end its own
    children.
    """
    for value in gc.get_objects():
        if issubclass(type(value), _MultiProcessingDataLoaderIter):
            value._shutdown = True


def in_subprocess(work: Callable[[], _T], *, limit_s: float | None) -> _T:
    """Run ``work`` in a forked copy of this process; return its result or raise its error.

    On systems other than Linux, where forks are unsafe or missing, it runs in this process.

    Args:
        work: function without arguments; its result is pickled.
        limit_s: most seconds to wait; None waits without a limit.

    Raises:
        TimeoutError: it took longer than ``limit_s``.
        RuntimeError: the process was killed, or raised an error that cannot be pickled.
    """
    if sys.platform != "linux":
        return work()
    # Import psutil now: if another thread imported it at the moment of the fork, the copy would
    # inherit a locked import lock.
    available_bytes()

    def job(_: str) -> _T:
        warnings.simplefilter("ignore")  # the user's own run shows them
        _leave_worker_processes()
        # A fork does not copy threads. OpenMP's pool of this thread would wait forever for its
        # missing threads, but a new thread gets a new pool.
        return ThreadPoolExecutor(1).submit(work).result()

    with forked(job) as (pool, [process]):
        answer = pool.submit(attempt_job, "measuring")
        if not wait([answer], limit_s).done:
            raise TimeoutError(f"the measurement took longer than {limit_s:.1f} s")
        try:
            return cast("_T", settle(answer.result()))
        except BrokenProcessPool:
            pool.shutdown()
            raise RuntimeError(
                f"the process that measures has ended with exit code {process.exitcode}; -9 means "
                "that it was killed, often because memory ran out"
            ) from None
