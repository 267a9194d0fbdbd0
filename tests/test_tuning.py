"""``fastdata.tune``: its search, and the probes that the search is made of."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastdata import DataLoader, ImageFolder
from fastdata.machine.budget import Budget
from fastdata.tools.measure import in_subprocess, measure_rate, shuffled
from fastdata.tools.tune import ascend, tune

WORKERS = (0, 1, 2, 4, 8)


class Samples:
    """Small samples, each of which takes ``seconds``; notes what was read in its own process."""

    transform = None

    def __init__(self, count: int = 64, seconds: float = 0.0, side: int = 4) -> None:
        self.count, self.seconds, self.side = count, seconds, side
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        if self.seconds:
            time.sleep(self.seconds)
        random.random(), np.random.rand(), torch.rand(1)
        return torch.zeros(1, self.side, self.side), index


# The search


def climb(
    space: dict[str, Any], start: dict[str, Any], rate: Callable[..., float]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the settings at which ``ascend`` ends if rates are exact, and the challengers that it measured."""
    asked = []

    def wins(challenger: dict[str, Any], best: dict[str, Any]) -> bool:
        asked.append(challenger)
        return rate(**challenger) > rate(**best)

    return [start, *ascend(space, start, wins)][-1], asked


@pytest.mark.parametrize("best_workers", WORKERS)
@pytest.mark.parametrize("best_engine", ["auto", "thread"])
def test_the_search_climbs_to_the_top(best_workers: int, best_engine: str) -> None:
    """From the middle, the search finds the only top of a hill, wherever that is, without looking at all settings."""
    space = {"num_workers": WORKERS, "workers": ("auto", "thread"), "prefetch_factor": (2, 4, 8)}

    def rate(num_workers: int, workers: str, prefetch_factor: int) -> float:
        distance = abs(WORKERS.index(num_workers) - WORKERS.index(best_workers)) + abs(
            prefetch_factor - 4
        )
        return 100 - distance + (workers == best_engine)

    start = {"num_workers": 2, "workers": "auto", "prefetch_factor": 2}
    found, asked = climb(space, start, rate)
    assert found == {"num_workers": best_workers, "workers": best_engine, "prefetch_factor": 4}
    assert len({tuple(each.values()) for each in asked}) < 5 * 2 * 3
    assert climb(space, start, rate)[1] == asked


def test_the_search_always_tries_no_worker() -> None:
    """Reading in the training loop is tried even where one worker is slower than two."""
    rates = {0: 10.0, 1: 2.0, 2: 3.0, 4: 1.0, 8: 0.5}
    found, asked = climb(
        {"num_workers": WORKERS}, {"num_workers": 2}, lambda num_workers: rates[num_workers]
    )
    assert found == {"num_workers": 0}
    assert [each["num_workers"] for each in asked] == [4, 1, 0]


def test_threads_are_tried_before_no_worker() -> None:
    """Two threads are found although no worker beats all processes."""

    def rate(num_workers: int, workers: str) -> float:
        return 5.0 if num_workers == 0 else {"auto": 4.0, "thread": 9.0}[workers] / num_workers

    space = {"num_workers": WORKERS, "workers": ("auto", "thread")}
    assert climb(space, {"num_workers": 2, "workers": "auto"}, rate)[0] == {
        "num_workers": 1,
        "workers": "thread",
    }


def test_a_second_round_looks_at_earlier_parameters_again() -> None:
    """If the second parameter changes the best value of the first, the search returns to the first."""

    def rate(num_workers: int, workers: str) -> float:
        return {"auto": {1: 3, 2: 4, 4: 2}, "thread": {1: 1, 2: 5, 4: 9}}[workers][num_workers]

    space = {"num_workers": (1, 2, 4), "workers": ("auto", "thread")}
    assert climb(space, {"num_workers": 2, "workers": "auto"}, rate)[0] == {
        "num_workers": 4,
        "workers": "thread",
    }


# Rates


class Clock:
    """Stands in for ``time``: only the loader lets it go on."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Bursts:
    """A loader of so many workers, whose batches of ten come together, every ``burst_s``, after a late start."""

    prefetch_factor = 2

    def __init__(
        self, clock: Clock, num_workers: int, burst_s: float, batches: int = 10_000
    ) -> None:
        self.clock, self.num_workers, self.burst_s, self.batches = (
            clock,
            num_workers,
            burst_s,
            batches,
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.clock.now += 5.0
        for number in range(self.batches):
            if number % self.num_workers == 0:
                self.clock.now += self.burst_s
            yield torch.zeros(10, 3)


@pytest.mark.parametrize("burst_s", [0.001, 0.3])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_rate_is_of_the_steady_loop(
    workers: int, burst_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start-up is left out, and batches that come in bursts are counted with the time between them."""
    monkeypatch.setattr("fastdata.tools.measure.time", clock := Clock())
    rate = measure_rate(Bursts(clock, workers, burst_s), seconds=1.0)
    assert rate == pytest.approx(10 * workers / burst_s)
    assert clock.now >= 5.99


def test_epochs_too_short_to_warm_up_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an epoch has two batches, the start of the epoch is part of the measured time."""
    monkeypatch.setattr("fastdata.tools.measure.time", clock := Clock())
    rate = measure_rate(Bursts(clock, 1, 5.0, batches=2), seconds=1.0)
    assert rate == pytest.approx(20 / 15)


def test_a_loader_without_batches_is_refused() -> None:
    """A loader without batches is an error, not an endless loop."""
    with pytest.raises(ValueError, match="gives no batch to measure"):
        measure_rate([], seconds=0.1)


def test_orders_without_an_end_are_permutations() -> None:
    """Each epoch has every index once; equal seeds give equal orders, other ones others."""
    first, again, other = (iter(shuffled(range(50), seed)) for seed in (1, 1, 2))
    epochs = [[next(first) for _ in range(50)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]
    assert [next(again) for _ in range(50)] == epochs[0] != [next(other) for _ in range(50)]


# A process of its own


def test_a_subprocess_changes_nothing_here() -> None:
    """Random draws and changes in the forked process stay there; its result is returned."""
    samples, states = Samples(), (random.getstate(), torch.get_rng_state())
    assert (
        in_subprocess(lambda: len([samples[i] for i in range(3)] + samples.read), limit_s=20) == 6
    )
    assert samples.read == []
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


def test_a_subprocess_runs_torchs_own_threads() -> None:
    """An operation of several threads ends there, though this process has used its pool before the fork."""
    ones = torch.ones(1 << 20)
    assert torch.sort(ones + ones).values.sum() == 2 << 20
    assert in_subprocess(lambda: float(torch.sort(ones + ones).values.sum()), limit_s=30) == 2 << 20


class OddError(Exception):
    """Cannot be unpickled: it takes two arguments and hands one on."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def fail(error: BaseException) -> None:
    raise error


def test_a_subprocess_raises_what_was_raised() -> None:
    """An exception arrives as it is; one that cannot be sent as its text; a killed process says how it ended."""
    with pytest.raises(KeyError, match="absent"):
        in_subprocess(lambda: fail(KeyError("absent")), limit_s=20)
    with pytest.raises(RuntimeError, match="OddError: 3"):
        in_subprocess(lambda: fail(OddError(1, 2)), limit_s=20)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        in_subprocess(lambda: sys.exit(3), limit_s=20)
    with pytest.raises(RuntimeError, match="exit code -9"):
        in_subprocess(lambda: os.kill(os.getpid(), signal.SIGKILL), limit_s=20)


def test_a_subprocess_ends_its_workers() -> None:
    """A measurement that takes too long is killed, with its worker processes."""
    loader = torch.utils.data.DataLoader(Samples(seconds=30), num_workers=2)
    with pytest.raises(TimeoutError, match=r"took longer than 0\.5 s"):
        in_subprocess(lambda: next(iter(loader)), limit_s=0.5)


# tune


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make probes as short and as many as allowed, so that a loaded machine changes nothing."""
    monkeypatch.setattr("fastdata.tools.judge._PROBES", 1000)


def quick(dataset: Any, **options: Any) -> Any:
    return tune(dataset, **{"batch_size": 4, "max_seconds": 100, "progress": False} | options)


def test_workers_are_found_for_samples_that_wait() -> None:
    """Eight workers are chosen if each sample waits for 100 ms, and a loader accepts the result unchanged.

    On a loaded machine, shorter waits would hardly differ from the time to start and end eight processes.
    """
    samples = Samples(seconds=0.1)
    result = quick(samples, parameters={"num_workers": (0, 8)})
    assert result.best == {"num_workers": 8, "batch_size": 4}
    assert result.samples_per_s > 3 * result.start_samples_per_s
    with (
        pytest.warns(UserWarning, match="8 worker processes")
        if len(os.sched_getaffinity(0)) < 8
        else nullcontext()
    ):
        assert DataLoader(samples, **result.best).num_workers == 8
    assert samples.read == []


def test_threads_are_found_for_samples_that_wait() -> None:
    """With the engine ``thread``, more threads than cores are used for samples that wait."""
    many = len(os.sched_getaffinity(0)) + 6
    loader = DataLoader(Samples(seconds=0.001), 4, num_workers=many, workers="thread")
    assert f"read by {many} threads" in loader.report().path
    assert quick(
        Samples(seconds=0.02), parameters={"num_workers": (many,), "workers": ("thread",)}
    ).best == {
        "num_workers": many,
        "workers": "thread",
        "batch_size": 4,
    }


def test_tuning_leaves_the_users_process_alone() -> None:
    """Neither global generators nor the dataset change."""
    samples = Samples()
    states = random.getstate(), torch.get_rng_state().tolist()
    quick(samples, parameters={"num_workers": (0, 1)})
    assert (random.getstate(), torch.get_rng_state().tolist()) == states
    assert samples.read == []


def test_batches_that_do_not_fit_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that need more than the free memory are listed with their need, and not measured."""
    budget = Budget(20 << 20, 0, "system memory")
    monkeypatch.setattr("fastdata.tools.judge.budget_bytes", lambda _: budget)
    samples = Samples(count=1024, side=256)  # 256 KiB each
    space = {"num_workers": (2,), "prefetch_factor": (2, 64)}
    result = quick(samples, parameters=space)
    refused = [probe for probe in result.probes if probe.failed]
    assert [probe.settings["prefetch_factor"] for probe in refused] == [64]
    assert "batches would need 130.0 MiB, but 20.0 MiB is free" in refused[0].failed


def test_the_batch_size_may_be_tuned_too() -> None:
    """The search begins with its first value, and not with a batch size that is not among them."""
    result = quick(Samples(), parameters={"num_workers": (0,), "batch_size": (8, 16)})
    assert result.probes[0].settings["batch_size"] == 8
    assert result.best["batch_size"] in (8, 16)


def test_a_loader_is_refused() -> None:
    """The error has the call with the dataset of the loader."""
    with pytest.raises(TypeError, match=r"tune\(loader\.dataset, batch_size=5\)"):
        tune(torch.utils.data.DataLoader([1, 2], batch_size=5))


def test_what_the_dataset_raises_is_raised() -> None:
    """An error of the first samples is raised unchanged, before anything is measured."""

    class Broken(Samples):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError(f"no file for sample {index}")

    with pytest.raises(FileNotFoundError, match="no file for sample 0"):
        quick(Broken())


def test_a_setting_that_fails_loses() -> None:
    """If a dataset raises errors in worker processes, settings without them win, and the table has the error."""

    class Alone(Samples):
        def __getitem__(self, index: int) -> Any:
            if torch.utils.data.get_worker_info() is not None:
                raise OSError("one reader at a time")
            return super().__getitem__(index)

    result = quick(Alone(), parameters={"num_workers": (0, 8)})
    assert result.best["num_workers"] == 0
    assert "OSError: Caught OSError in DataLoader worker process" in str(result)


def test_the_time_limit_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time is over, the best settings so far are the result; without any probe it is an error."""
    result = quick(Samples(seconds=0.05), max_seconds=1)
    assert not result.is_complete
    assert result.best["batch_size"] == 4
    result = quick(Samples(seconds=0.1), max_seconds=0.1, parameters={"num_workers": (0,)})
    assert (len(result.probes), result.is_complete) == (1, False)
    assert result.samples_per_s == result.start_samples_per_s > 0
    assert "1 measurement in" in str(result)
    monkeypatch.setattr("fastdata.tools.judge._GRACE_S", 0.5)
    with pytest.raises(TimeoutError, match="took longer than"):
        quick(Samples(seconds=1.2), max_seconds=0.1, parameters={"num_workers": (0,)})


def test_some_of_an_unprepared_dataset_are_prepared(image_folder: Callable[..., Path]) -> None:
    """Probes read prepared samples, as later epochs do; torch's generator keeps its state."""
    transforms = pytest.importorskip("torchvision.transforms")
    with ImageFolder(image_folder(), transforms.PILToTensor(), resize=(8, 8)) as dataset:
        state = torch.get_rng_state()
        result = quick(dataset, parameters={"num_workers": (0,)})
        assert dataset.filled_share() == 1
        assert torch.equal(torch.get_rng_state(), state)
    assert result.samples_per_s > 0


def test_a_result_is_shown_with_the_call_to_paste() -> None:
    """The table has a row for each probe, names the best, and ends with a line for the script."""
    result = quick(Samples(), parameters={"num_workers": (0, 1)})
    lines = repr(result).splitlines()
    assert len(lines) == len(result.probes) + 4
    assert sum(line.endswith("  best") for line in lines) == 1
    workers = result.best["num_workers"]
    call = f"DataLoader(dataset, batch_size=4, shuffle=True, num_workers={workers})"
    assert lines[-1] == f"loader = {result.call}" == f"loader = {call}"
