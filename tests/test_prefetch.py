"""CudaPrefetcher on a simulated device: the order of batches, who owns their memory, and how an epoch ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fastdata import CudaPrefetcher, FastDataWarning
from fastdata.loaders import pinned
from fresh import Interpreters
from simcuda import Sim, SimThread

CUDA = torch.device("cuda", 0)


def on_device(loader: Any, **options: Any) -> CudaPrefetcher:
    return CudaPrefetcher(loader, CUDA, **options)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fastdata-prefetch"]


class Loader:
    """A loader that makes batch i when it is requested: a 3 x 5 tensor full of i, and i."""

    def __init__(self, length: int = 20, fail_at: int = -1) -> None:
        self.length, self.fail_at = length, fail_at
        self.read = 0
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.most_alive = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return _Reading(self)


class _Reading:
    def __init__(self, loader: Loader) -> None:
        self.loader, self.number = loader, -1

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> Any:
        self.number += 1
        loader = self.loader
        if self.number == loader.length:
            raise StopIteration
        if self.number == loader.fail_at:
            raise LookupError(f"batch {self.number} is missing")
        loader.read += 1
        images = torch.full((3, 5), float(self.number))
        loader.alive.add(images)
        loader.most_alive = max(loader.most_alive, len(loader.alive))
        return images, self.number


# What batches hold


def test_every_batch_arrives_in_order(gpu: Sim) -> None:
    """Each batch has the loader's values when it arrives."""
    seen = []
    for images, number in on_device(Loader()):
        seen.append((images.unique().tolist(), number))
    assert seen == [([float(i)], i) for i in range(20)]


def test_a_slot_is_not_filled_again_before_its_copy_is_done(gpu: Sim) -> None:
    """All values are right, also if copies run only when something waits, long after the batch arrived."""
    batches = [images for images, _ in on_device(Loader(), depth=2)]
    assert [images.unique().tolist() for images in batches] == [[float(i)] for i in range(20)]


def test_one_stream_serves_all_epochs(gpu: Sim) -> None:
    """Fifty epochs use one side stream, and pin memory once for at most depth + 2 copies."""
    batches = on_device(Loader(3), depth=2)
    for _ in range(50):
        assert len(list(batches)) == 3
    assert len(gpu.streams) == 2
    assert gpu.counts["cudaHostAlloc"] <= 4


def test_memory_is_bounded_over_a_thousand_batches(gpu: Sim) -> None:
    """Pinned memory is depth + 2 copies, few host batches live at a time, and none is left at the end."""
    loader = Loader(1000)
    batches = on_device(loader, depth=2)
    for images, _ in batches:
        del images
    assert gpu.counts["cudaHostAlloc"] <= 4
    assert batches.report().pinned_bytes == 4 * 64
    assert loader.most_alive <= 4
    assert len(loader.alive) == 0


def test_the_thread_reads_no_further_than_it_may(gpu: Sim) -> None:
    """While the user has the first batch, at most ``depth`` more and one staged batch are read."""
    loader = Loader(100)
    batches = iter(on_device(loader, depth=3))
    next(batches)
    (thread,) = prefetch_threads()
    wait_until(lambda: loader.read == 5)
    thread.join(0.05)
    assert loader.read == 5


def wait_until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    while not condition():  # until the test's timeout
        event.wait(0.001)


@pytest.fixture
def four_threads() -> Iterator[None]:
    """Let operations of torch use four threads each."""
    count = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("four_threads")
def test_large_batches_are_staged_in_one_thread(gpu: Sim) -> None:
    """The copy thread starts no other threads, whatever the size and layout of a batch."""
    images = torch.zeros(4, 3, 128, 128)
    batches = [images, images.to(memory_format=torch.channels_last), images.bfloat16()[:, :, ::2]]
    process = psutil.Process()
    before, threads = process.num_threads(), []

    def transform(batch: Any) -> Any:
        threads.append(process.num_threads())
        return batch

    arrived = list(on_device(batches, transform=transform))
    assert threads == [before + 1] * 3
    strides = [torch.empty_like(batch).stride() for batch in batches]
    assert [batch.stride() for batch in arrived] == strides


def test_pinned_memory_of_the_user_is_copied_from_in_place(gpu: Sim) -> None:
    """A pinned tensor is not copied on the host, and lives until its copy to the device is done."""
    pinned = torch.full((3, 5), 7.0).pin_memory()
    batches = on_device([pinned])
    (moved,) = batches
    assert torch.equal(moved.cpu(), torch.full((3, 5), 7.0))
    report = batches.report()
    assert (report.in_place_bytes, report.staged_bytes, report.pageable_bytes) == (60, 0, 0)


def test_the_next_copy_is_queued_before_the_last_one_is_done(
    gpu: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a copy is not done, the thread queues the next one; host memory is released later."""
    loader = Loader(100)
    batches = iter(on_device(loader, depth=2))
    next(batches)
    wait_until(lambda: loader.read == 4)
    prefetch_threads()[0].join(0.05)
    assert gpu.streams[1].done < gpu.streams[1].queued


def test_a_runtime_without_the_capture_mode_function_is_logged(
    gpu: Sim, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If CUDA's function is not found, the log gives the cure, and all batches still arrive."""
    monkeypatch.setattr(pinned, "ctypes", types.SimpleNamespace(CDLL=lambda name: None))
    with caplog.at_level("INFO", logger="fastdata"):
        assert len(list(on_device(Loader(3)))) == 3
    (message,) = caplog.messages
    assert (
        "cudaThreadExchangeStreamCaptureMode is not found: capture CUDA graphs before iter()"
        in message
    )


def test_next_inside_a_capture_is_refused(gpu: Sim) -> None:
    """The error gives the cure; the capture continues, and a new ``iter`` begins a complete epoch."""
    batches = on_device(Loader(3))
    epoch = iter(batches)
    gpu.begin_capture()
    with pytest.raises(
        RuntimeError, match=r"while a CUDA graph is captured.*Take the batch before the capture"
    ):
        next(epoch)
    assert gpu.end_capture()
    assert [number for _, number in batches] == [0, 1, 2]


def test_a_capture_on_the_prefetchers_device_is_refused() -> None:
    """A capture is refused on the prefetcher's device, whatever the current one is; on another it continues."""
    with Sim(devices=2).installed() as sim:
        epoch = iter(CudaPrefetcher(Loader(3), "cuda:1"))
        with torch.cuda.device(1):
            sim.begin_capture()
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            next(epoch)
        assert sim.end_capture()
        epoch = iter(CudaPrefetcher(Loader(3), "cuda:1"))
        sim.begin_capture()
        assert next(epoch)[1] == 0
        assert sim.end_capture()
        del epoch
    assert not sim.violations


# How it ends


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_lost_device_ends_the_epoch_in_good_order(gpu: Sim, goes_on: bool) -> None:
    """The loop gets the error, the thread ends without one, and memory is freed although copies never end."""
    loader = Loader(100)
    batches = on_device(loader)
    epoch = iter(batches)
    next(epoch)
    wait_until(lambda: loader.read == 4)
    gpu.lost = "CUDA error: an illegal memory access was encountered"
    for _ in range(1 + goes_on):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            next(epoch)
        if not goes_on:
            break
        epoch = iter(batches)
    del epoch
    assert prefetch_threads() == []
    assert len(loader.alive) == 0
    batches.close()


def test_an_empty_loader_gives_no_batch(gpu: Sim) -> None:
    """An empty loader causes no copy, and leaves no thread behind."""
    assert list(on_device([])) == []
    assert prefetch_threads() == []


def test_break_ends_the_thread_at_once(gpu: Sim) -> None:
    """After a break the thread has ended, and batches that were read ahead are freed."""
    loader = Loader(100)
    for _ in on_device(loader):
        break
    assert prefetch_threads() == []
    assert len(loader.alive) == 0


def test_a_thread_that_cannot_start_is_an_error_with_the_reason(
    gpu: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the system's text and the cure; the epoch is over, and the next one is complete."""
    batches = on_device(Loader(3))

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(SimThread, "start", refused)
        epoch = iter(batches)
        with pytest.raises(RuntimeError, match=r"start its thread: can't start new.*`ulimit -u`"):
            next(epoch)
    assert next(epoch, "end") == "end"
    assert [number for _, number in batches] == [0, 1, 2]


def test_a_broken_epoch_does_not_disturb_the_next(gpu: Sim) -> None:
    """After a break the next epoch is complete and in order."""
    batches = on_device(Loader(6))
    for _ in batches:
        break
    assert [number for _, number in batches] == list(range(6))


def test_a_staged_batch_that_is_dropped_frees_its_buffer(gpu: Sim) -> None:
    """Epochs that end while a batch waits in a pinned buffer leave all buffers free."""
    loader = Loader(100)
    batches = on_device(loader, depth=2)
    for broken in range(1, 6):
        epoch = iter(batches)
        next(epoch)
        # One is handed over, two are there, one is staged.
        wait_until(lambda broken=broken: loader.read == 4 * broken)
        del epoch
    assert len(list(batches)) == 100
    assert gpu.counts["cudaHostAlloc"] <= 4


def test_failures_that_are_kept_hold_no_buffer(gpu: Sim) -> None:
    """A user who keeps the exceptions of a transform still gets later batches from pinned memory."""

    def transform(batch: Any) -> Any:
        if batch[1] < 6:
            raise ValueError("no such image")
        return batch

    batches = on_device(Loader(10), depth=2, transform=transform)
    epoch, kept = iter(batches), []
    for _ in range(6):
        with pytest.raises(ValueError, match="no such image") as caught:
            next(epoch)
        kept.append(caught.value)
    assert [number for _, number in epoch] == [6, 7, 8, 9]
    assert (batches.report().staged_bytes, batches.report().pageable_bytes) == (600, 0)


def test_two_iterators_go_side_by_side(gpu: Sim) -> None:
    """Two iterators at the same time give a complete epoch each, with right values."""
    batches = on_device(Loader(8), depth=1)
    pairs = list(zip(batches, batches, strict=True))
    assert [(a[0].unique().item(), b[0].unique().item()) for a, b in pairs] == [
        (i, i) for i in range(8)
    ]


def test_a_finished_iterator_stays_finished(gpu: Sim) -> None:
    """After the end, each ``next`` raises StopIteration."""
    batches = iter(on_device(Loader(1)))
    next(batches)
    for _ in range(3):
        assert next(batches, "end") == "end"


def test_close_ends_live_iterators(gpu: Sim) -> None:
    """After ``with`` no thread runs; a later epoch begins with the first batch."""
    with on_device(Loader(9)) as batches:
        epoch = iter(batches)
        next(epoch)
    assert prefetch_threads() == []
    assert next(epoch, "end") == "end"
    assert len(list(batches)) == 9


def test_an_exception_comes_after_the_batches_before_it(gpu: Sim) -> None:
    """The loader's own exception is raised in place of its batch, and the loop may continue after it."""
    batches = iter(on_device(Loader(5, fail_at=2)))
    assert [next(batches)[1], next(batches)[1]] == [0, 1]
    with pytest.raises(LookupError, match="batch 2 is missing") as caught:
        next(batches)
    assert any(
        entry.name == "__next__" and "test_prefetch" in str(entry.path)
        for entry in caught.traceback[1:]
    )
    assert [number for _, number in batches] == [3, 4]


def test_nothing_is_read_after_an_exception_before_next(gpu: Sim) -> None:
    """After an exception the thread has ended, and reads no further batch before the next ``next``."""
    loader = Loader(5, fail_at=2)
    batches = iter(on_device(loader))
    for _ in range(2):
        next(batches)
    with pytest.raises(LookupError, match="batch 2 is missing"):
        next(batches)
    assert (loader.read, prefetch_threads()) == (2, [])
    del batches


def test_a_failed_epoch_keeps_nothing_alive(gpu: Sim) -> None:
    """Thread and batches are freed with the iterator and the exception, without the garbage collector."""
    loader = Loader(5, fail_at=2)
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            list(on_device(loader))
        assert prefetch_threads() == []
        assert len(loader.alive) == 0
    finally:
        gc.enable()


def test_a_dropped_prefetcher_is_freed(gpu: Sim) -> None:
    """A dropped prefetcher frees torch's loader and its dataset, without the garbage collector."""
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    gone = [weakref.ref(loader), weakref.ref(loader.dataset)]
    gc.disable()
    try:
        batches = on_device(loader)
        list(batches)
        del loader, batches
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_an_exception_of_iter_is_raised_by_iter(gpu: Sim) -> None:
    """An exception of the loader's ``iter`` is raised by the prefetcher's ``iter``, in the user's thread."""

    class Broken:
        def __iter__(self) -> Any:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        iter(on_device(Broken()))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_thread(gpu: Sim) -> None:
    """Ctrl-C while the loop waits is raised there, and the thread has ended."""
    is_first_there = threading.Event()

    def loader() -> Iterator[Any]:
        yield torch.zeros(2)
        is_first_there.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        yield torch.zeros(2)

    def train(batches: Iterator[Any]) -> None:
        next(batches)
        is_first_there.set()
        threading.Event().wait(5)  # the signal comes here, or in the next line
        next(batches)

    batches = iter(on_device(loader()))
    with pytest.raises(KeyboardInterrupt):
        train(batches)
    del batches
    assert prefetch_threads() == []


def test_the_iterator_is_made_in_the_users_thread_and_read_in_another(gpu: Sim) -> None:
    """``iter`` runs in the calling thread, ``next`` in the prefetcher's, never at the same time for one loader."""
    seen: dict[str, str] = {}

    class Watching:
        def __iter__(self) -> Iterator[torch.Tensor]:
            seen["iter"] = threading.current_thread().name
            return self._read()

        def _read(self) -> Iterator[torch.Tensor]:
            seen["next"] = threading.current_thread().name
            yield torch.zeros(2)

    list(on_device(Watching()))
    assert seen == {"iter": threading.current_thread().name, "next": "fastdata-prefetch"}


def test_nothing_is_read_before_the_first_batch_is_asked_for(gpu: Sim) -> None:
    """``iter`` alone starts no thread, so the loader's first draws are made while the user waits."""
    loader = Loader()
    batches = iter(on_device(loader))
    assert (loader.read, prefetch_threads()) == (0, [])
    del batches


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_go_on_with_an_iterator(gpu: Sim) -> None:
    """In a forked process ``next`` raises, and the process ends normally; the parent's epoch continues."""
    batches = iter(on_device(Loader(6)))
    next(batches)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            next(batches)
        except RuntimeError as error:
            code = 0 if "works only in the process that made it" in str(error) else 2
        del batches
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert [number for _, number in batches] == [1, 2, 3, 4, 5]


def test_the_interpreter_ends_with_a_live_iterator(fresh: Interpreters) -> None:
    """A script that stops in the middle of an epoch ends without any output."""
    code = """
import atexit
import contextlib
simulated = contextlib.ExitStack()
atexit.register(simulated.close)  # registered first, it runs after the prefetcher's own end
import torch
from fastdata import CudaPrefetcher
from simcuda import Sim
simulated.enter_context(Sim().installed())
batches = iter(CudaPrefetcher([torch.zeros(2)] * 50, "cuda:0"))
next(batches)
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    done = fresh.run(code, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


# What is pinned


def test_a_driver_that_refuses_to_pin_is_tried_once(gpu: Sim) -> None:
    """After one refusal no batch tries to pin again, and all batches arrive."""
    gpu.refuses_to_pin = True
    batches = on_device(Loader(3))
    words = r"pageable memory, which takes longer: not pinned: the driver refuses to pin memory \(CUDA error"
    with pytest.warns(FastDataWarning, match=words):
        assert [images[0, 0].item() for images, _ in batches] == [0, 1, 2]
    assert gpu.counts["cudaHostAlloc"] == 1
    assert batches.report().pageable_bytes == 180


def test_pageable_memory_warns_once(gpu: Sim) -> None:
    """One warning for all epochs points to the user's line, and the report gives the reason."""
    gpu.refuses_to_pin = True
    batches = on_device(Loader(3))
    with pytest.warns(FastDataWarning, match="pageable memory") as caught:
        values = [images for images, _ in batches] + [images for images, _ in batches]
    assert [images.unique().item() for images in values] == [0, 1, 2, 0, 1, 2]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    report = batches.report()
    assert (report.pageable_bytes, report.staged_bytes, report.pinned_bytes) == (180, 0, 0)
    assert "not pinned" in report.pinning


def test_larger_batches_replace_the_buffers(gpu: Sim) -> None:
    """Pinned memory grows to the size of the larger batches, and no further."""
    sizes = [10, 5000, 20, 9000, 9000, 30]
    moved = list(on_device([torch.full((size,), 1, dtype=torch.uint8) for size in sizes]))
    assert [tensor.sum().item() for tensor in moved] == sizes


def test_the_report_reads_well(gpu: Sim) -> None:
    """The report has the device, the pinned memory with its reason, and the ways of the copies."""
    batches = on_device(Loader(4))
    list(batches)
    report = batches.report()
    assert (report.batches, report.samples, report.device) == (4, 12, "cuda:0")
    assert report.staged_bytes == 240
    text = str(report)
    assert "to cuda:0: 0 B straight from pinned memory, 240 B by one more host copy" in text
    assert "pinned at most 256 B" in text
    assert "copies pinned" in text
    assert repr(report) == text
    assert report.as_dict()["staged_bytes"] == 240


# What is done on the device


def test_finishing_work_runs_in_the_thread_on_its_stream(gpu: Sim) -> None:
    """Casts come before the user's transform, which runs without gradients; the user's stream keeps its results."""
    calls: list[Any] = []
    weight = torch.ones(5, requires_grad=True, device="cuda")

    def transform(batch: Any) -> Any:
        calls.append((threading.current_thread().name, gpu.current_stream(CUDA), batch[0].dtype))
        return batch[0] * weight

    (made,) = on_device(Loader(1), transform=transform, dtype=torch.float16)
    side = gpu.streams[1]
    assert calls == [("fastdata-prefetch", side, torch.float16)]
    assert not made.requires_grad
    assert made.block.uses == {gpu.current_stream(CUDA)}


def test_a_failing_transform_fails_in_its_place(gpu: Sim) -> None:
    """The error of a transform is raised instead of its batch; batches before and after it arrive."""

    def transform(batch: Any) -> Any:
        if batch[1] == 3:
            raise ValueError("negative size")
        return batch

    batches = iter(on_device(Loader(6), transform=transform))
    assert [next(batches)[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="negative size"):
        next(batches)
    assert [number for _, number in batches] == [4, 5]


@pytest.mark.parametrize("device", [CUDA, "cpu"])
def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch(
    gpu: Sim, device: Any
) -> None:
    """A transform's StopIteration is an error like any other, not a silent end."""

    def transform(batch: Any) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="transform= raised StopIteration"):
        list(CudaPrefetcher(Loader(2), device, transform=transform))


def test_depth_must_be_positive() -> None:
    """depth=0 is an error."""
    with pytest.raises(ValueError, match="depth=0"):
        CudaPrefetcher([], depth=0)
