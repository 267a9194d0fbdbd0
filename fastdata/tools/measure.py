"""How fast a loader is without a model, measured beside the user's process and not in it.

``apart`` runs a measurement in a forked copy of this process: what it draws, reads, caches or breaks stays there, and
its memory, threads and worker processes end with it. ``measure_rate`` is an empty loop with a warm-up, in slices whose
spread says how certain the rate is; ``differs`` is the test whether two rates are more than noise apart.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import random
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Sampler

from fastdata.batch import flatten
from fastdata.errors import MemoryBudgetError
from fastdata.loader import DataLoader
from fastdata.loader.epochs import end_with_parent, sample_count
from fastdata.memory import available_bytes, format_bytes, reserve_bytes

_T = TypeVar("_T")
_MOST_SLICES = 8
_LEAST_SLICES = 3
_LOOK_S = 1.0  # between looks at what memory is left: beside threads that hold the GIL one can take 0.4 s
_HOPELESS = 3.0
"""Two slices that are so many times slower than the rate to beat end the measurement; one may be a stall."""
_unclosed: list[Any] | None = None
"""In a process of its own: loops that were left, so that nobody waits for their workers, which are killed with it."""


class Rate(NamedTuple):
    """Samples a second of a loader without a model, as ``measure_rate`` found them."""

    samples_per_s: float
    error: float  # standard error of it; infinite where there were not two slices
    slices: int
    seconds: float  # of all slices; what came before them is left out
    batch_bytes: int = 0  # of the tensors in the largest batch
    is_cut: bool = False  # ended early: it could not reach the rate to beat

    def joined(self, other: Rate) -> Rate:
        """One rate of two measurements of the same; what both differ by counts as spread."""
        seconds, slices = self.seconds + other.seconds, self.slices + other.slices
        mean = (self.samples_per_s * self.seconds + other.samples_per_s * other.seconds) / seconds
        within = math.hypot(self.error * self.seconds, other.error * other.seconds) / seconds
        between = abs(self.samples_per_s - other.samples_per_s) / 2
        most = max(self.batch_bytes, other.batch_bytes)
        return Rate(mean, max(within, between), slices, seconds, most, self.is_cut and other.is_cut)


def differs(one: Rate, other: Rate) -> bool:
    """Whether two rates are further apart than their noise explains: Welch's t-test of their slices, at 5 %.

    The quantile of Student's distribution is Cornish and Fisher's expansion (Abramowitz and Stegun, 26.7.5), which is
    within 3 % from two degrees of freedom on.
    """
    if math.isinf(one.error) or math.isinf(other.error):
        return False
    squares = one.error**2, other.error**2
    if not any(squares):
        return one.samples_per_s != other.samples_per_s
    parts = [square**2 / (rate.slices - 1) for square, rate in zip(squares, (one, other), strict=True)]
    freedom = sum(squares) ** 2 / sum(parts)
    quantile = 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
    return abs(one.samples_per_s - other.samples_per_s) > quantile * math.sqrt(sum(squares))


def measure_rate(
    loader: Iterable[Any], *, window_s: float, limit_s: float = math.inf, to_beat: Rate | None = None
) -> Rate:
    """Loop over a loader, epoch after epoch, until it has been measured for ``window_s`` and in three slices.

    What its workers need to start, and what they have read ahead by then, is left out. A slice is of equally many
    batches of each worker, as those come in turns.

    Args:
        loader: what to measure.
        window_s: seconds to measure, at most 8 slices.
        limit_s: seconds after which the latest slice is the last one; looked at where a batch comes.
        to_beat: ends the measurement as soon as it is clear that this rate is not reached.

    Raises:
        MemoryBudgetError: hardly any memory is left for others.
        ValueError: the loader gives no batch.
    """
    least_bytes = reserve_bytes(available_bytes().bytes)
    begun = look_at = time.perf_counter()
    found: list[tuple[int, float]] = []
    rate = Rate(0.0, math.inf, 0, 0.0)
    slices = _slices(loader, window_s / _MOST_SLICES)
    if _unclosed is not None:
        _unclosed.append(slices)
    for samples, seconds, batch_bytes in slices:
        found.append((samples, seconds))
        rate = _rate_of(found, max(batch_bytes, rate.batch_bytes))
        if to_beat is not None and rate.slices > 1 and rate.samples_per_s < to_beat.samples_per_s:
            most = max(count / slice_s for count, slice_s in found)
            if most * _HOPELESS < to_beat.samples_per_s or (rate.slices >= _LEAST_SLICES and differs(rate, to_beat)):
                return rate._replace(is_cut=True)
        is_enough = rate.slices >= _LEAST_SLICES and rate.seconds >= window_s
        if is_enough or time.perf_counter() - begun > limit_s:
            return rate
        if time.perf_counter() < look_at:
            continue
        look_at, free = time.perf_counter() + _LOOK_S, available_bytes()
        if free.bytes < least_bytes:
            raise MemoryBudgetError(f"only {format_bytes(free.bytes)} is free ({free.limited_by}) while it runs")
    return rate


def _slices(loader: Any, slice_s: float) -> Iterator[tuple[int, float, int]]:
    """Samples, seconds and bytes of the largest batch of one slice after the other."""
    period = max(1, getattr(loader, "num_workers", 0))
    ahead = period * (1 + (getattr(loader, "prefetch_factor", None) or 0))
    while True:
        begun = since = time.perf_counter()
        total = samples = count = most_bytes = slices = 0
        is_warm = False
        for batch in loader:
            count, samples = count + 1, samples + sample_count(batch)
            if count == 1:
                most_bytes = _bytes_in(batch)
            if count % period:
                continue
            now = time.perf_counter()
            if is_warm:
                if now - since < slice_s:
                    continue
                slices += 1
                yield samples, now - since, most_bytes  # what its taker does counts: meanwhile workers read ahead
            else:  # nothing is left of what was read while workers started
                is_warm = count >= ahead or (count > period and now - since >= slice_s)
            total, samples, since = total + samples, 0, now
        if not count:
            raise ValueError("the loader gives no batch to measure")
        if not slices:  # epochs are so short that their beginning belongs to them
            yield total + samples, time.perf_counter() - begun, most_bytes


def _bytes_in(batch: Any) -> int:
    return sum(each.nbytes for each in flatten(batch)[0] if isinstance(each, torch.Tensor))


def _rate_of(slices: list[tuple[int, float]], batch_bytes: int) -> Rate:
    samples, seconds = (sum(column) for column in zip(*slices, strict=True))
    rates = [count / slice_s for count, slice_s in slices]
    error = statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else math.inf
    return Rate(samples / seconds, error, len(rates), seconds, batch_bytes)


class EndlessOrder(Sampler[int]):
    """Shuffled indices below ``length``, epoch after epoch without an end; equal seeds give equal orders."""

    def __init__(self, length: int, *seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length  # of an epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self.seed)
        while True:
            yield from rng.permutation(self.length).tolist()


_SHARED = ("dataset", "batch_size", "num_workers", "collate_fn", "drop_last", "timeout", "worker_init_fn")
_WITH_WORKERS = ("multiprocessing_context", "prefetch_factor")


def rebuilt(loader: TorchDataLoader[Any], **changes: Any) -> TorchDataLoader[Any]:
    """A loader of the same class over other samples or by other workers, which pins nothing.

    Args:
        loader: torch's or ours, in batches of a map-style dataset.
        changes: arguments that are others. Without a ``sampler`` samples are shuffled without an end.
    """
    arguments = {name: getattr(loader, name) for name in _SHARED} | changes
    if arguments["num_workers"]:
        arguments = {name: getattr(loader, name) for name in _WITH_WORKERS if loader.num_workers} | arguments
    arguments.setdefault("sampler", EndlessOrder(len(arguments["dataset"]), 0))
    if isinstance(loader, DataLoader):
        return DataLoader(**{"workers": loader.workers} | arguments)
    return TorchDataLoader(**arguments)


# A process of its own


def apart(work: Callable[[], _T], *, limit_s: float) -> _T:
    """Return what ``work`` returns, or raise what it raises, from a forked copy of this process; it ends with us.

    ``work`` runs in a thread: what a library has started in threads of this process is dead in the copy, OpenMP's pool
    among it, which waits for its threads for ever; a thread that is new gets a pool of its own. Elsewhere than
    on Linux, where forks are not safe or not there, it runs here, and only global random generators are put back.

    Raises:
        TimeoutError: it took longer than ``limit_s`` seconds.
        RuntimeError: the process was killed, or has raised what cannot be sent.
    """
    if sys.platform != "linux":
        with undisturbed_generators():
            return work()
    available_bytes()  # imports what its threads would import while it forks
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process: Any = multiprocessing.get_context("fork").Process(target=_answer, args=(work, sending, receiving))
    process.start()
    with contextlib.suppress(OSError):  # here and there: whoever comes first
        os.setpgid(process.pid, process.pid)
    sending.close()
    try:
        if not receiving.poll(limit_s if math.isfinite(limit_s) else None):
            raise TimeoutError(f"no answer within {limit_s:.1f} s")
        has_failed, outcome = pickle.loads(receiving.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeError(f"the measuring process has ended with exit code {process.exitcode}") from None
    finally:
        receiving.close()
        _end(process)
    if has_failed:
        raise outcome
    return cast(_T, outcome)


def _answer(work: Callable[[], Any], sending: Connection, receiving: Connection) -> None:
    global _unclosed
    _unclosed = []
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # so that its workers are ended with it, all at once
    receiving.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # the user's own run says them
    threading.Thread(target=end_with_parent, kwargs={"whole_group": True}, daemon=True).start()

    def run() -> None:
        try:
            answer = pickle.dumps((False, work()))
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            answer = pickle.dumps((True, _sendable(error)))
        with contextlib.suppress(OSError):  # nobody waits for it any more
            sending.send_bytes(answer)

    thread = threading.Thread(target=run, name="fastdata-probe")
    thread.start()
    thread.join()
    os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    try:
        return cast(BaseException, pickle.loads(pickle.dumps(error)))
    except Exception:  # noqa: BLE001  # whatever the pickling of a user's exception raises
        return RuntimeError(f"{type(error).__name__}: {error}")


def _end(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    process.close()


@contextlib.contextmanager
def undisturbed_generators() -> Iterator[None]:
    """Put Python's, NumPy's and torch's global generators back to where they were."""
    python, legacy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(torchs)
