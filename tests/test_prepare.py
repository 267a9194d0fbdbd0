"""Preparation: several workers read every sample once, and end in every case."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from fastdata import CachedDataset, FastDataWarning, ImageFolder
from fastdata.errors import CacheError, IngestError, MemoryBudgetError, SampleError
from fastdata.machine import limits
from fastdata.pixels.samples import SampleSpec
from fastdata.stores.writer import Writer, WriterPlan
from fresh import Interpreters

PARENT = os.getpid()


def cached(samples: Any, **options: Any) -> CachedDataset:
    """Return a dataset that two workers prepare, unless the options differ."""
    return CachedDataset(samples, **{"prepare_workers": 2, "storage": "shared", **options})


def dense(count: int) -> list[tuple[np.ndarray, int]]:
    return [(np.full((2, 3), i, np.int16), i * 10) for i in range(count)]


def ragged(count: int) -> list[tuple[np.ndarray, int]]:
    return [(np.full((1 + i % 3, 2), i, np.int16), i * 10) for i in range(count)]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("make", [dense, ragged])
def test_every_sample_is_stored_at_its_index(make: Any, workers: int) -> None:
    """With any number of workers, sample and target i of the dataset are those of the source."""
    samples = make(100)
    with cached(samples, prepare_workers=workers) as dataset:
        assert dataset.targets == [target for _, target in samples]
        for (mine, _), (array, _) in zip(dataset, samples, strict=True):
            np.testing.assert_array_equal(mine, array)
        assert (dataset.reader().obstacle is None) == (make is dense)


def test_samples_that_differ_late_are_stored_with_their_own_shapes() -> None:
    """A shape that no probed sample had is found during the fill, and no sample is lost."""
    samples = dense(100)
    samples[37] = (np.full((5, 5), 9, np.int16), 370)
    with cached(samples) as dataset:
        assert "differ in shape" in str(dataset.reader().obstacle)
        assert dataset[37][0].tolist() == [[9] * 5] * 5
        assert dataset[99][0].tolist() == [[99] * 3] * 2


def test_each_sample_is_prepared_once_and_by_every_worker() -> None:
    """The values show which process made them: two workers, and not this process."""
    context = multiprocessing.get_context("fork")
    came = {3: context.Event(), 20: context.Event()}  # samples of two tasks

    def who(sample: np.ndarray) -> np.ndarray:
        index = int(sample[0, 0])
        if os.getpid() != PARENT and index in came:
            came[index].set()
            assert came[23 - index].wait(60)  # for the other worker
        return np.full(1, os.getpid())

    with cached(dense(100), prepare=who) as dataset:
        makers = {int(sample[0]) for sample, _ in dataset}
    assert len(makers) == 2
    assert PARENT not in makers


def open_image(path: str) -> Image.Image:
    return Image.open(path).convert("RGB")


@pytest.mark.parametrize("loader", [None, open_image])
def test_files_that_fastdata_decodes_are_prepared_by_threads(
    image_folder: Any, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process is forked for them; for a user's loader there are as many as requested."""
    root, fork, forked = image_folder(per_class=40), os.fork, []
    monkeypatch.setattr(os, "fork", lambda: forked.append(1) or fork())
    with ImageFolder(
        root,
        loader=loader,
        prepare_workers=2,
    ).prepare() as dataset:
        assert len({np.asarray(image).tobytes() for image, _ in dataset}) == 80
    assert len(forked) == (0 if loader is None else 2)


class Failing:
    """Samples of which some cannot be read."""

    def __init__(self, count: int, bad: set[int]) -> None:
        self.count, self.bad = count, bad
        self.samples = [f"/data/{i}.jpg" for i in range(count)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index in self.bad:
            raise ValueError("broken pixels")
        return np.full((2,), index % 256, np.uint8), index


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_sample_is_named(workers: int) -> None:
    """The error has path, index and cause, and no worker survives it."""
    with pytest.raises(SampleError, match=r"sample 61, .*/data/61\.jpg.*broken pixels") as caught:
        cached(Failing(100, {61}), prepare_workers=workers)
    assert (caught.value.index, caught.value.path) == (61, "/data/61.jpg")


def test_bad_samples_are_left_out_when_asked() -> None:
    """With on_error="skip" the others keep their order, and the errors are listed."""
    bad = {0, 7, 50, 99}
    kept = [index for index in range(100) if index not in bad]
    with pytest.warns(match="4 of 100 samples"):
        dataset = cached(Failing(100, bad), on_error="skip")
    with dataset:
        assert dataset.targets == kept
        assert [int(sample[0]) for sample, _ in dataset] == kept
        assert [sample.tolist() for sample, _ in dataset.__getitems__([95, 0])] == [
            [98, 98],
            [1, 1],
        ]
        assert [error.index for error in dataset.skipped] == sorted(bad)


def test_samples_left_out_here_and_there_are_not_in_a_row(tmp_path: Any) -> None:
    """Any number below 1 % may be left out, in memory and on disk."""
    bad = set(range(7, 12_000, 110))
    for options in ({"storage": "shared"}, {"storage": "auto", "cache_dir": tmp_path}):
        with pytest.warns(match=f"{len(bad)} of 12000 samples"):
            dataset = cached(Failing(12_000, bad), on_error="skip", cache_key="k", **options)
        with dataset:
            assert len(dataset) == 12_000 - len(bad)


def test_damaged_samples_of_one_shard_are_a_share_of_all(tmp_path: Any) -> None:
    """The 20 damaged samples of one small shard may be left out: they are less than 1 % of all."""
    bad = set(range(1_024, 1_044))
    options = {"on_error": "skip", "cache_dir": tmp_path, "cache_key": "k", "shard_bytes": 512}
    for engine in ("local", ThreadPoolExecutor(2)):
        with pytest.warns(match="20 of 4096 samples"):
            dataset = CachedDataset.build_cache(
                Failing(4_096, bad), engine=engine, **options | {"cache_key": str(engine)}
            )
        with dataset:
            assert len(dataset) == 4_096 - 20


def test_too_many_left_out_samples_are_an_error_in_every_run(tmp_path: Any) -> None:
    """One of 40 samples of each shard is damaged: no run leaves a cache that the next one would open."""
    bad = set(range(3, 4_096, 40))
    options = {"on_error": "skip", "cache_dir": tmp_path, "cache_key": "k", "shard_bytes": 64}
    for _ in range(2):
        problem = r"\d\d of 4,096 samples cannot be prepared, more than"
        with pytest.raises(IngestError, match=problem) as caught:
            CachedDataset.build_cache(Failing(4_096, bad), **options)
        assert "or leave it out" not in str(caught.value)


def test_samples_left_out_in_a_row_are_an_error(tmp_path: Any) -> None:
    """A hundred neighbours are an error although they are less than 1 %, in memory and on disk."""
    bad = set(range(7_000, 7_100))
    for options in ({"storage": "shared"}, {"storage": "auto", "cache_dir": tmp_path}):
        with pytest.raises(IngestError, match=r"100 samples in a row, up to 7099, cannot"):
            cached(Failing(12_000, bad), on_error="skip", cache_key="k", **options)


def test_a_source_without_one_good_sample_is_an_error() -> None:
    """If every sample would be skipped, it is an error."""
    with pytest.raises(SampleError, match="broken pixels"):
        cached(Failing(30, set(range(30))), on_error="skip")


def test_samples_of_another_type_are_bad_samples(tmp_path: Any) -> None:
    """A float sample among int16 ones, and one with more dimensions among ragged ones, are named or left out."""
    samples = dense(40)
    samples[9] = (np.zeros((2, 3), np.float32), 0)
    with pytest.raises(
        SampleError,
        match=r"sample 9 .*it is an array of float32, but other samples are an array of int16",
    ):
        cached(samples)
    samples = ragged(40)
    samples[9] = (np.zeros((2, 3, 4), np.int16), 0)
    options = {"cache_dir": tmp_path, "cache_key": "k", "shard_bytes": 32}
    for make in (cached, partial(CachedDataset.build_cache, **options)):
        problem = r"^sample 9 .*it has 3 dimensions, but other samples have 2"
        with pytest.raises(SampleError, match=problem):
            make(samples)
        with pytest.warns(match="1 of 40 samples"):
            make(samples, on_error="skip").close()


def test_ragged_samples_beyond_the_budget_stop_the_fill() -> None:
    """Ragged samples that exceed the limit raise an error with the limit, and free the block."""
    samples = [(np.zeros(100_000 if i % 10 == 3 else 10 + i % 2, np.uint8), 0) for i in range(200)]
    with pytest.raises(
        MemoryBudgetError, match=r"more than the 1\.0 MiB that are free.*Use storage='compressed'"
    ):
        cached(samples, memory_limit="1MiB")


def test_samples_are_not_stored_for_the_systems_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason of the system is reported, and not that memory is full."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(os, "ftruncate", refuse)
    reason = r"storage='none': .* of shared memory cannot be reserved \(File too large\)"
    with pytest.warns(FastDataWarning, match=rf"{reason}\. Every epoch decodes again"):
        dataset = cached(dense(10), storage="auto")
    assert re.fullmatch(reason, dataset.storage_plan.reason)
    dataset.close()


def test_a_failed_reservation_is_reported_in_whole_sentences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block's error is followed by a sentence on what would fit."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryBudgetError, match=r"free some memory\. Use [^.]") as caught:
        cached(dense(10))
    assert ".." not in str(caught.value)


def test_a_killed_worker_is_named() -> None:
    """A worker that dies is at once an error with its signal and samples, not a hang."""

    def prepare(sample: Any) -> Any:
        if os.getpid() != PARENT and sample[0, 0] == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with pytest.raises(
        IngestError,
        match=r"was killed by SIGKILL during one of these tasks: .*range\(64, 80\).*Out of memory",
    ):
        cached(dense(100), prepare=prepare)


class OddError(MemoryError):
    """An error that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


@pytest.mark.parametrize("error", [MemoryError, OddError])
def test_an_error_that_is_no_samples_fault_comes_with_its_traceback(error: type[Exception]) -> None:
    """It keeps type and text, with the worker's traceback as cause; one that cannot be pickled comes as text."""

    def prepare(sample: Any) -> Any:
        if os.getpid() != PARENT and sample[0, 0] == 70:
            raise error("no such thing")
        return sample

    with pytest.raises((MemoryError, IngestError), match="no such thing") as caught:
        cached(dense(100), prepare=prepare)
    assert (caught.type is error) == (error is MemoryError)
    assert "in a worker process, range(64, 80)" in str(caught.value.__cause__)


def test_a_full_disk_is_no_samples_fault(tmp_path: Any) -> None:
    """A failed write to a cache is a CacheError, and no sample is left out."""
    (tmp_path / "cache").write_text("a file")
    with pytest.raises((CacheError, OSError)):
        cached(
            dense(10), storage="auto", cache_dir=tmp_path / "cache", cache_key="k", on_error="skip"
        )


SCRIPT = """
    import sys, time
    import numpy as np
    from fastdata import CachedDataset, FastDataWarning, ImageFolder

    def slow(sample):
        time.sleep(0.05)
        return sample

    print("begin", flush=True)
    CachedDataset([(np.zeros(3, np.uint8), 0)] * 10_000, prepare=slow, prepare_workers=2, storage="shared")
"""


@pytest.mark.parametrize(
    "kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name
)
def test_no_worker_survives_its_parent(kill: signal.Signals, fresh: Interpreters) -> None:
    """Ctrl-C, SIGTERM and kill -9 of the parent end every worker."""
    with (
        tempfile.TemporaryFile() as errors,
        fresh.piped(SCRIPT, stderr=errors.fileno()) as (process, output),
    ):
        assert output.readline() == b"begin\n"
        workers = _children(process.pid, 2)
        if kill is signal.SIGINT:
            os.killpg(process.pid, kill)  # as a terminal does
        else:
            os.kill(process.pid, kill)
        process.wait(60)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert alive == []


def _children(pid: int, count: int) -> list[psutil.Process]:
    while len(children := psutil.Process(pid).children()) != count:
        time.sleep(0.01)  # until the test's timeout
    return children


def test_ctrl_c_in_the_middle_of_a_fork_is_not_lost(fresh: Interpreters) -> None:
    """An interrupt during a fork is raised once all workers are forked, and none survives."""
    script = """
        import os, signal
        import numpy as np
        from fastdata import CachedDataset, FastDataWarning, ImageFolder
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
        CachedDataset([(np.zeros(3, np.uint8), 0)] * 1000, prepare_workers=2)
    """
    done = fresh.run(script)
    assert done.returncode == -signal.SIGINT
    assert "ignored" not in done.stderr
    assert done.stderr.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("is_own", [False, True])
def test_this_process_prepares_where_others_get_no_locks(
    image_folder: Any, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """A full /dev/shm is reported and costs no sample: Pillow runs in threads, user code in one thread."""

    def fail(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("multiprocessing.context.BaseContext.Lock", fail)
    monkeypatch.setattr("fastdata.pixels.core.library.obstacle", lambda: "there is no library")
    threads = set()
    original = Image.Image.convert

    def convert(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return original(*arguments, **options)

    monkeypatch.setattr(Image.Image, "convert", convert)
    loader, how = None, "by threads"
    if is_own:
        loader, how = open_image, "one after the other in this process"
    dataset = ImageFolder(image_folder(per_class=20), loader=loader, prepare_workers=2)
    with pytest.warns(FastDataWarning, match=rf"{how}.* /dev/shm .*No space left on device"):
        dataset.prepare()
    with dataset:
        assert len({np.asarray(image).tobytes() for image, _ in dataset}) == 40
    assert (threads == {threading.main_thread()}) == is_own


def test_no_worker_stays_where_a_thread_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit of processes (ulimit -u) an error is raised, and the exit does not wait for workers."""

    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("concurrent.futures.process._ExecutorManagerThread.start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cached(dense(100))


def test_a_daemonic_process_prepares_by_itself(fresh: Interpreters) -> None:
    """If no process may be forked, as in a DataLoader worker, one thread runs the user's code."""
    script = """
        import multiprocessing, os, threading
        import numpy as np
        from fastdata import CachedDataset, FastDataWarning, ImageFolder
        from fastdata.errors import SampleError

        def work():
            def meet(sample):
                assert threading.current_thread() is threading.main_thread()
                return sample

            samples = [(np.full(1 + i % 2, i, np.uint8), i) for i in range(100)]
            with CachedDataset(samples, prepare=meet, prepare_workers=2) as dataset:
                assert [int(sample[0]) for sample, _ in dataset] == list(range(100))
            samples[70] = samples[70][0].astype(np.float32), 70
            try:
                CachedDataset(samples, prepare_workers=2)
            except SampleError as error:
                assert error.index == 70
            else:
                raise AssertionError("no error")
            assert threading.active_count() == 1

        process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        process.start()
        process.join()
        raise SystemExit(process.exitcode)
    """
    done = fresh.run(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_room_that_another_process_has_reserved_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on_disk: bool
) -> None:
    """Samples of 3 and 1.5 MiB by two processes do not need 5.5 MiB in addition to the 4 in use."""
    spec = SampleSpec(shape=None, dtype="uint8", form="array")
    path = tmp_path / "0" if is_on_disk else None
    writer = Writer.open(WriterPlan(spec=spec, dimensions=1, path=path), 2)
    with contextlib.closing(pickle.loads(pickle.dumps(writer)).file) as theirs:
        other = Writer(writer.plan, theirs, writer.index)
        other.write(0, np.ones((1, 3 << 20), np.uint8), "array")
    free = {"bytes": 2 << 20}
    monkeypatch.setattr(limits, "available_bytes", lambda: limits.Available(free["bytes"], "x"))
    monkeypatch.setattr("fastdata.stores.disk_file.free_bytes", lambda folder: free["bytes"])
    writer.write(1, np.full((1, 3 << 19), 2, np.uint8), "array")
    free["bytes"] = 0
    with contextlib.closing(writer.finish(np.arange(2))) as store:
        assert [set(store.read(k).tolist()) for k in range(2)] == [{1}, {2}]


@pytest.mark.parametrize("storage", ["shared", "none"])
def test_samples_of_the_other_byte_order_keep_their_values(storage: str) -> None:
    """Big-endian samples, as in FITS files, keep their values on this machine."""
    swapped = np.dtype(np.int32).newbyteorder("S")
    samples = [(np.arange(k, k + 3, dtype=swapped), k) for k in range(4)]
    with cached(samples, storage=storage) as dataset:
        assert [sample.tolist() for sample, _ in dataset] == [[k, k + 1, k + 2] for k in range(4)]
