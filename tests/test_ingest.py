"""Filling stores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fastdata.errors import IngestError, MemoryBudgetError, SampleError
from fastdata.ingest import Ingested, forecast, ingest
from fastdata.sources import DatasetSource
from fastdata.stores.writers import DenseWriter, RaggedWriter, Writer

PLENTY = 1 << 30


def _as_they_are(sample: Any) -> Any:
    return sample


def _fill(
    samples: Any, prepare: Any = _as_they_are, *, workers: int = 2, limit_bytes: int = PLENTY, **options: Any
) -> Ingested:
    source = DatasetSource(samples)
    expected = forecast(source, prepare)
    spec = expected.specs[0]

    def make_writers(any_shapes: bool) -> list[Writer]:
        if spec.is_dense and not any_shapes:
            return [DenseWriter(spec, len(source))]
        ragged = replace(spec, shape=None)
        return [RaggedWriter(ragged, first_bytes=expected.need_bytes, limit_bytes=limit_bytes)]

    return ingest(source, prepare, make_writers, workers=workers, progress=False, **options)


def _dense(count: int) -> list[tuple[np.ndarray, int]]:
    return [(np.full((2, 3), i, np.int16), i * 10) for i in range(count)]


def _ragged(count: int) -> list[tuple[np.ndarray, int]]:
    return [(np.full((1 + i % 3, 2), i, np.int16), i * 10) for i in range(count)]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("make", [_dense, _ragged])
def test_every_sample_is_stored_at_its_index(make: Any, workers: int) -> None:
    """Whatever the number of workers, sample i of the store is sample i of the source, and so is its target."""
    samples = make(100)
    filled = _fill(samples, workers=workers)
    assert filled.targets == [target for _, target in samples]
    assert len(filled.stores[0]) == 100
    for index, (array, _) in enumerate(samples):
        np.testing.assert_array_equal(filled.stores[0].read(index), array)
        assert filled.stores[0].shape(index) == array.shape
    assert filled.stores[0].spec.is_dense == (make is _dense)
    filled.stores[0].close()


def test_gathering_equals_reading_one_by_one() -> None:
    """A dense store copies chosen samples, repeated ones too, into the caller's memory."""
    filled = _fill(_dense(40))
    out = np.empty((3, 2, 3), np.int16)
    filled.stores[0].gather_into(np.array([7, 0, 7]), out)
    assert out[:, 0, 0].tolist() == [7, 0, 7]
    filled.stores[0].close()


def test_samples_that_differ_late_make_the_store_ragged() -> None:
    """A shape that none of the samples looked at had is found during the fill, and nothing is lost."""
    samples = _dense(100)
    samples[37] = (np.full((5, 5), 9, np.int16), 370)
    filled = _fill(samples)
    assert not filled.stores[0].spec.is_dense
    assert filled.stores[0].read(37).tolist() == [[9] * 5] * 5
    assert filled.stores[0].read(99).tolist() == [[99] * 3] * 2
    filled.stores[0].close()


class _Failing:
    """Samples of which some cannot be read."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self.count, self.bad = count, bad
        self.samples = [f"/data/{i}.jpg" for i in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self.bad:
            raise ValueError("broken pixels")
        return np.full((2,), index, np.uint8), index


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_sample_is_named(workers: int) -> None:
    """The error names path, index and cause, and no worker survives it."""
    with pytest.raises(SampleError, match=r"sample 61, .*/data/61\.jpg.*broken pixels") as caught:
        _fill(_Failing(100, {61}), workers=workers)
    assert (caught.value.index, caught.value.path) == (61, "/data/61.jpg")


def test_bad_samples_are_left_out_when_asked() -> None:
    """With on_error="skip" the rest keeps its order, and the errors are listed."""
    bad = {0, 7, 50, 99}
    filled = _fill(_Failing(100, bad), on_error="skip")
    kept = [index for index in range(100) if index not in bad]
    assert list(filled.kept) == kept
    assert filled.targets == kept
    assert [filled.stores[0].read(k)[0] for k in range(96)] == kept
    out = np.empty((2, 2), np.uint8)
    filled.stores[0].gather_into(np.array([95, 0]), out)
    assert out[:, 0].tolist() == [98, 1]
    assert [error.index for error in filled.skipped] == sorted(bad)
    filled.stores[0].close()


def test_a_source_without_one_good_sample_is_an_error() -> None:
    """Skipping everything is no data set."""
    with pytest.raises(SampleError, match="broken pixels"):
        _fill(_Failing(30, set(range(30))), on_error="skip")


def test_samples_of_another_type_are_bad_samples() -> None:
    """One float sample among int16 ones is an error that names it."""
    samples = _dense(40)
    samples[9] = (np.zeros((2, 3), np.float32), 0)
    with pytest.raises(SampleError, match=r"sample 9 .*float32 array sample among int16 array ones"):
        _fill(samples)


def test_ragged_samples_beyond_the_budget_stop_the_fill() -> None:
    """Ragged samples that turn out larger than the limit raise, name the limit, and free the block."""
    samples = [(np.zeros(10 if i % 10 else 100_000, np.uint8), 0) for i in range(200)]
    with pytest.raises(MemoryBudgetError, match=r"more than the 1\.0 MiB that is free"):
        _fill(samples, limit_bytes=1 << 20)


def _kill_self(sample: Any) -> Any:
    if sample[0, 0] == 70:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_killed_worker_is_named() -> None:
    """A worker that dies is an error with its signal and samples at once, not a hang."""
    parent = os.getpid()

    def prepare(sample: Any) -> Any:
        return _kill_self(sample) if os.getpid() != parent else sample

    with pytest.raises(IngestError, match=r"was killed by SIGKILL while it prepared samples 64 to 79.*Out of memory"):
        _fill(_dense(100), prepare)


SCRIPT = """
    import sys, time
    import numpy as np
    from fastdata.ingest import ingest
    from fastdata.sources import DatasetSource
    from fastdata.spec import SampleSpec
    from fastdata.stores.writers import DenseWriter

    def slow(sample):
        time.sleep(0.05)
        return sample

    source = DatasetSource([(np.zeros(3, np.uint8), 0)] * 10_000)
    spec = SampleSpec(shape=(3,), dtype="uint8", form="array")
    print("begin", flush=True)
    ingest(source, slow, lambda any_shapes: [DenseWriter(spec, 10_000)], workers=2, progress=False)
"""


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_no_worker_survives_its_parent(kill: signal.Signals) -> None:
    """Ctrl-C, a polite kill and kill -9 of the parent end every worker."""
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begin\n"
        workers = _children(process.pid, 2)
        if kill is signal.SIGINT:
            os.killpg(process.pid, kill)  # as a terminal does
        else:
            process.send_signal(kill)
        process.communicate(timeout=20)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []


def _children(pid: int, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children()
        if len(children) == count:
            return children
    raise AssertionError(f"process {pid} has {len(children)} workers, not {count}")


def test_a_daemonic_process_prepares_with_threads(tmp_path: Path) -> None:
    """Where no process may be forked, as in a DataLoader worker, threads fill the store just as well."""
    script = """
        import multiprocessing
        import numpy as np
        from fastdata.ingest import ingest
        from fastdata.sources import DatasetSource
        from fastdata.spec import SampleSpec
        from fastdata.stores.writers import RaggedWriter

        def work():
            source = DatasetSource([(np.full(1 + i % 2, i, np.uint8), i) for i in range(100)])
            same = lambda sample: sample
            spec = SampleSpec(shape=None, dtype="uint8", form="array")
            writer = RaggedWriter(spec, first_bytes=99, limit_bytes=1 << 30)
            filled = ingest(source, same, lambda any_shapes: [writer], workers=2, progress=False)
            assert [filled.stores[0].read(i)[0] for i in range(100)] == list(range(100))

        process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        process.start()
        process.join()
        raise SystemExit(process.exitcode)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
