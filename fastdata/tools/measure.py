"""What commands share: how fast a loader is without a model, and what they take and keep.

``measure`` is an empty loop with a warm-up.
``apart`` runs it in a forked copy of this process: what the loop draws, reads, caches or breaks
stays there, and its memory, threads and worker processes end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import pickle
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from torch.utils.data import Sampler

from fastdata.errors import refuse_remote
from fastdata.loaders.epochs import sample_count
from fastdata.machine.memory import available_bytes, cpu_model, usable_cores
from fastdata.machine.processes import end_with_parent

_T = TypeVar("_T")
_WARM_UP = 0.125
"""Share of the seconds to measure after which a loader is warm that has much to read ahead."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Samples that a loader has given in some seconds."""

    samples: int
    seconds: float

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.samples + other.samples, self.seconds + other.seconds)


def measure(loader: Iterable[Any], *, seconds: float, limit_s: float = math.inf) -> Rate:
    """Loop over a loader, epoch after epoch, until that was measured for ``seconds``.

    What its workers need to start, and what they have read ahead by then, is left out.

    Args:
        loader: what to measure.
        seconds: to measure.
        limit_s: seconds after which it ends with what there is; looked at where a batch comes.

    Raises:
        ValueError: the loader gives no batch.
    """
    end = time.perf_counter() + limit_s
    rate = _measure_epoch(loader, seconds, end)
    while rate.seconds < seconds and time.perf_counter() < end:
        rate += _measure_epoch(loader, seconds - rate.seconds, end)
    return rate


def _measure_epoch(loader: Any, seconds: float, end: float) -> Rate:
    """An epoch, or as much of it as is needed, without its start; of a very short one the whole."""
    # Batches of several workers come in turns, often all at once: whole turns are counted.
    turns = max(1, getattr(loader, "num_workers", 0))
    ahead = turns * (1 + (getattr(loader, "prefetch_factor", None) or 0))
    began = time.perf_counter()
    since = began
    is_warm = False
    whole = 0
    samples = 0
    count = 0
    for count, batch in enumerate(loader, start=1):
        whole += sample_count(batch)
        samples += sample_count(batch)
        now = time.perf_counter()
        if count % turns:
            continue
        if now > end or (is_warm and now - since >= seconds):
            return Rate(samples, now - since)
        has_waited = count > turns and now - began >= _WARM_UP * seconds
        if not is_warm and (count >= ahead or has_waited):
            is_warm = True
            since = now
            samples = 0
    if not count:
        raise ValueError("the loader gives no batch to measure")
    if not samples:
        return Rate(whole, time.perf_counter() - began)
    return Rate(samples, time.perf_counter() - since)


class EndlessOrder(Sampler[int]):
    """Shuffled indices below ``length`` without an end; equal seeds give equal orders."""

    def __init__(self, length: int, *seed: int) -> None:
        self.length = length
        self.seed = seed

    def __len__(self) -> int:
        return self.length  # of an epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self.seed)
        while True:
            yield from rng.permutation(self.length).tolist()


# A process of its own


def apart(work: Callable[[], _T], *, limit_s: float) -> _T:
    """Return what ``work`` returns, or raise what it raises, from a forked copy of this process.

    Elsewhere than on Linux, where forks are not safe or not there, it runs here.

    Raises:
        TimeoutError: it took longer than ``limit_s`` seconds.
        RuntimeError: the process was killed, or has raised what cannot be sent.
    """
    if sys.platform != "linux":
        return work()
    available_bytes()  # imports what its threads would import while it forks
    receiving, sending = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_answer, args=(work, sending, os.getpid()))
    process.start()
    sending.close()
    try:
        if not receiving.poll(limit_s if math.isfinite(limit_s) else None):
            raise TimeoutError(f"no answer within {limit_s:.1f} s")
        has_failed, outcome = pickle.loads(receiving.recv_bytes())
    except EOFError:
        process.join()
        code = process.exitcode
        raise RuntimeError(f"the measuring process has ended with exit code {code}") from None
    finally:
        receiving.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(cast(int, process.pid), signal.SIGKILL)
        process.kill()  # where it has not yet made a group
        process.join()
        process.close()
    if has_failed:
        raise outcome
    return cast(_T, outcome)


def _answer(work: Callable[[], Any], sending: Connection, parent_pid: int) -> None:
    os.setpgid(0, 0)  # so that its workers are ended with it, all at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # the user's own run says them
    watch = partial(end_with_parent, parent_pid, whole_group=True)
    threading.Thread(target=watch, daemon=True).start()

    def run() -> None:
        try:
            answer = pickle.dumps((False, work()))
        except BaseException as error:  # noqa: BLE001  # the parent raises it
            answer = pickle.dumps((True, _sendable(error)))
        with contextlib.suppress(OSError):  # nobody waits for it any more
            sending.send_bytes(answer)

    # What a library has started in threads of the parent is dead in the copy, OpenMP's pool among
    # it, which waits for its threads for ever; a thread that is new gets a pool of its own.
    thread = threading.Thread(target=run, name="fastdata-measure")
    thread.start()
    thread.join()
    os._exit(0)


def _sendable(error: BaseException) -> BaseException:
    try:
        return cast(BaseException, pickle.loads(pickle.dumps(error)))
    except Exception:  # noqa: BLE001  # whatever the pickling of a user's exception raises
        return RuntimeError(f"{type(error).__name__}: {error}")


# Arguments of commands, and the JSON that they write


def add_json(parser: argparse.ArgumentParser) -> None:
    help_text = "keep every figure, with versions"
    parser.add_argument("--json", type=Path, metavar="FILE", help=help_text)


def check_json(options: argparse.Namespace) -> None:
    """Raise what would otherwise be raised after minutes of measuring."""
    file = getattr(options, "json", None)
    if file and not file.parent.is_dir():
        raise FileNotFoundError(f"--json {file}: there is no folder {file.parent}")


def keep(document: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the figures, if they were asked for, with the versions and the machine."""
    if options.json:
        facts = {"versions": versions(), "machine": machine_facts()}
        options.json.write_text(json.dumps(document | facts, indent=2, default=str) + "\n", "utf-8")
        print(f"figures: {options.json}")


def check_folder(folder: Path) -> None:
    refuse_remote(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: give the root of class folders of images")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter, None for those not installed."""
    packages = ("fastdata", "torch", "torchvision", "numpy", "pillow", "lz4", "zstandard")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def machine_facts() -> dict[str, Any]:
    return {
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "usable_cores": usable_cores(),
        "system": platform.platform(),
    }
