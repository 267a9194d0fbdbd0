"""How fast a loader is without a model: what bench, tune and diagnose all ask.

``measure`` is an empty loop with a warm-up, in slices whose spread says how certain the rate is;
``differs`` tests whether two rates are more than noise apart. ``apart`` measures in a forked copy
of this process: what the loop draws, reads, caches or breaks stays there, and its memory, threads
and worker processes end with it.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Sampler

from fastdata.datasets.dataset import PreparedDataset, latest_reader
from fastdata.loaders.epochs import end_with_parent, sample_count
from fastdata.machine.memory import available_bytes, tree_pss_bytes

_T = TypeVar("_T")
_MOST_SLICES = 8
_LEAST_SLICES = 3
_HOPELESS = 3.0
"""Two slices that are so many times slower than the rate to beat end the measurement; one may be a
stall."""
_left_open: list[Any] | None = None
"""In a process of its own: loops that were left, so that nobody waits for their workers, which are
killed with it."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples a second of a loader without a model, with the slices of time that say how certain that is."""

    slices: tuple[
        tuple[int, float], ...
    ] = ()  # samples and seconds; what came before them is left out
    memory_bytes: int = 0  # of this process and all below it at the end (PSS)
    is_cut: bool = False  # ended early: it could not reach the rate to beat

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.slices)

    @property
    def samples_per_s(self) -> float:
        return sum(samples for samples, _ in self.slices) / self.seconds if self.slices else 0.0

    @property
    def error(self) -> float:
        """Standard error of the rate; infinite where there are not two slices."""
        if len(self.slices) < 2:
            return math.inf
        rates = [samples / seconds for samples, seconds in self.slices]
        return statistics.stdev(rates) / math.sqrt(len(rates))

    def __add__(self, other: Rate) -> Rate:
        """One rate of two measurements of the same, in turns with others: what both differ by counts as spread."""
        return Rate(self.slices + other.slices, max(self.memory_bytes, other.memory_bytes))


def differs(one: Rate, other: Rate) -> bool:
    """Whether two rates are further apart than their noise explains: Welch's t-test of their slices, at 5 %.

    The quantile of Student's distribution is Cornish and Fisher's expansion (Abramowitz and Stegun,
    26.7.5), which is within 3 % from two degrees of freedom on.
    """
    distance = abs(one.samples_per_s - other.samples_per_s)
    variance = one.error**2 + other.error**2
    if math.isinf(variance) or not variance:
        return not variance and distance > 0
    freedom = variance**2 / sum(rate.error**4 / (len(rate.slices) - 1) for rate in (one, other))
    quantile = 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
    return distance > quantile * math.sqrt(variance)


def measure(
    loader: Iterable[Any], *, seconds: float, limit_s: float = math.inf, to_beat: Rate | None = None
) -> Rate:
    """Loop over a loader, epoch after epoch, until it has been measured for ``seconds`` and in three slices.

    What its workers need to start, and what they have read ahead by then, is left out. A slice is
    of equally many batches of each worker, as those come in turns.

    Args:
        loader: what to measure.
        seconds: to measure, in at most 8 slices.
        limit_s: seconds after which the latest slice is the last one; looked at where a batch
            comes.
        to_beat: ends the measurement as soon as it is clear that this rate is not reached.

    Raises:
        ValueError: the loader gives no batch.
    """
    began = time.perf_counter()
    rate = Rate()
    loop = _slices(loader, seconds / _MOST_SLICES)
    if _left_open is not None:
        _left_open.append(loop)
    for piece in loop:
        rate = Rate((*rate.slices, piece))
        is_cut = to_beat is not None and _is_hopeless(rate, to_beat)
        is_enough = len(rate.slices) >= _LEAST_SLICES and rate.seconds >= seconds
        if is_cut or is_enough or time.perf_counter() - began > limit_s:
            return Rate(rate.slices, tree_pss_bytes(), is_cut)
    raise ValueError("the loader gives no batch to measure")


def _slices(loader: Any, slice_s: float) -> Iterator[tuple[int, float]]:
    """Samples and seconds of one slice after the other, without an end."""
    turns = max(1, getattr(loader, "num_workers", 0))
    ahead = turns * (1 + (getattr(loader, "prefetch_factor", None) or 0))
    while True:
        began = since = time.perf_counter()
        total = samples = count = 0
        is_warm = has_slices = False
        for batch in loader:
            count += 1
            samples += sample_count(batch)
            if count % turns:
                continue
            now = time.perf_counter()
            if is_warm and now - since < slice_s:
                continue
            if is_warm:
                has_slices = True
                # What its taker does counts: meanwhile workers read ahead.
                yield (
                    samples,
                    now - since,
                )
            else:  # until nothing is left of what was read while workers started
                is_warm = count >= ahead or (count > turns and now - since >= slice_s)
            total += samples
            samples = 0
            since = now
        if not count:
            return
        if not has_slices:  # epochs are so short that their beginning belongs to them
            yield total + samples, time.perf_counter() - began


def _is_hopeless(rate: Rate, to_beat: Rate) -> bool:
    if len(rate.slices) < 2 or rate.samples_per_s >= to_beat.samples_per_s:
        return False
    best = max(samples / seconds for samples, seconds in rate.slices)
    return best * _HOPELESS < to_beat.samples_per_s or (
        len(rate.slices) >= _LEAST_SLICES and differs(rate, to_beat)
    )


class EndlessOrder(Sampler[int]):
    """Shuffled indices below ``length``, epoch after epoch without an end; equal seeds give equal orders."""

    def __init__(self, length: int, *seed: int) -> None:
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length  # of an epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self.seed)
        while True:
            yield from rng.permutation(self.length).tolist()


def stored_bytes(dataset: PreparedDataset) -> int:
    """What the samples that a dataset keeps take; 0 where it keeps none."""
    kept = latest_reader(dataset).kept
    return sum(store.size_bytes for store in kept.stores) if kept else 0


# A process of its own


def apart(work: Callable[[], _T], *, limit_s: float) -> _T:
    """Return what ``work`` returns, or raise what it raises, from a forked copy of this process; it ends with us.

    ``work`` runs in a thread: what a library has started in threads of this process is dead in the
    copy, OpenMP's pool among it, which waits for its threads for ever; a thread that is new gets a
    pool of its own. Elsewhere than on Linux, where forks are not safe or not there, it runs here,
    and only global random generators are put back.

    Raises:
        TimeoutError: it took longer than ``limit_s`` seconds.
        RuntimeError: the process was killed, or has raised what cannot be sent.
    """
    if sys.platform != "linux":
        with undisturbed_generators():
            return work()
    available_bytes()  # imports what its threads would import while it forks
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process: Any = multiprocessing.get_context("fork").Process(
        target=_answer, args=(work, sending, receiving)
    )
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
        raise RuntimeError(
            f"the measuring process has ended with exit code {process.exitcode}"
        ) from None
    finally:
        receiving.close()
        _end(process)
    if has_failed:
        raise outcome
    return cast(_T, outcome)


def _answer(work: Callable[[], Any], sending: Connection, receiving: Connection) -> None:
    global _left_open
    _left_open = []
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

    thread = threading.Thread(target=run, name="fastdata-measure")
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
    python = random.getstate()
    numpy = np.random.get_state()
    torchs = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
