"""Batches on a device ahead of need: ownership of memory, order, and the end of an epoch."""

from __future__ import annotations

import contextlib
import gc
import math
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastdata import CudaPrefetcher, FastDataWarning, memory
from fastdata.memory import Available
from fastdata.prefetch import copies
from fastdata.prefetch.backend import CudaBackend
from fastdata.prefetch.copies import PinnedMemory
from recording import RecordingBackend, place_of

CUDA = torch.device("cuda", 0)


def on_device(loader: Any, backend: Any, **options: Any) -> CudaPrefetcher:
    return CudaPrefetcher(loader, CUDA, backend=backend, **options)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fastdata-prefetch"]


class Loader:
    """Batch i is made when it is asked for: a 3 x 5 tensor full of i, and i."""

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


def test_every_batch_arrives_in_order(backend: RecordingBackend) -> None:
    """Batches hold the loader's values, read as soon as each is handed over."""
    seen = []
    for images, number in on_device(Loader(), backend):
        backend.finish()
        seen.append((images.unique().tolist(), number))
    assert seen == [([float(i)], i) for i in range(20)]


def test_a_slot_is_not_filled_again_before_its_copy_is_done(backend: RecordingBackend) -> None:
    """All values are right even if copies happen only when somebody waits, long after the batch was handed over."""
    batches = [images for images, _ in on_device(Loader(), backend, depth=2)]
    backend.finish()
    assert [images.unique().tolist() for images in batches] == [[float(i)] for i in range(20)]


def test_the_users_stream_waits_for_every_batch(backend: RecordingBackend) -> None:
    """A batch is handed over after the user's stream was told to wait for the event behind its copy, and to own it."""
    user = backend.current_stream(CUDA)
    for images, _ in on_device(Loader(5), backend):
        (side,) = backend.streams
        copied = backend.log.index(("copy", side, place_of(images)))
        waited = next(i for i in reversed(range(len(backend.log))) if backend.log[i][:2] == ("wait", user))
        event = backend.log[waited][2]
        recorded = backend.log.index(("record", side, event))
        owned = max(i for i, entry in enumerate(backend.log) if entry == ("record_stream", place_of(images), user))
        assert copied < recorded < waited < owned


def test_the_side_stream_begins_after_what_the_user_has_queued(backend: RecordingBackend) -> None:
    """Before its first copy the side stream waits for an event of the user's stream."""
    user = backend.current_stream(CUDA)
    next(iter(on_device(Loader(5), backend)))
    (side,) = backend.streams
    waits = [i for i, entry in enumerate(backend.log) if entry[:2] == ("wait", side)]
    assert waits[0] < next(i for i, entry in enumerate(backend.log) if entry[0] == "copy")
    assert backend.log[waits[0]][2].stream is user


def test_a_batch_is_copied_when_the_device_has_left_an_older_one(backend: RecordingBackend) -> None:
    """Before batch i is copied, the work on batch i - depth - 1 is done, so the device holds a bounded number."""
    done: list[int] = []
    copied_after: list[tuple[int, list[int]]] = []
    user = backend.current_stream(CUDA)
    copy = backend.copy

    def noting(source: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied_after.append((len(copied_after), list(done)))
        return copy(source, device)

    backend.copy = noting  # type: ignore[method-assign]
    for _, number in on_device(Loader(10), backend, depth=2):
        backend.queue(user, lambda number=number: done.append(number))
    assert all(finished[: i - 2] == list(range(i - 2)) for i, finished in copied_after)
    assert len(copied_after) == 10


def test_one_stream_serves_all_epochs(backend: RecordingBackend) -> None:
    """Fifty epochs make one side stream, and pin memory once."""
    batches = on_device(Loader(3), backend, depth=2)
    for _ in range(50):
        assert len(list(batches)) == 3
    assert (len(backend.streams), backend.registered) == (1, 2)


def test_memory_is_bounded_over_a_thousand_batches(backend: RecordingBackend) -> None:
    """Pinned memory is depth buffers, host batches alive at a time are few, and none is left at the end."""
    loader = Loader(1000)
    batches = on_device(loader, backend, depth=2)
    for images, _ in batches:
        del images
    assert backend.registered == 2
    assert sum(backend.pinned.values()) == batches.report().pinned_bytes == 2 * 4096
    assert loader.most_alive <= 4
    assert len(loader.alive) == 0


def test_the_thread_reads_no_further_than_it_may(backend: RecordingBackend) -> None:
    """While the user holds the first batch, at most depth more and one staged are read."""
    loader = Loader(100)
    batches = iter(on_device(loader, backend, depth=3))
    next(batches)
    (thread,) = prefetch_threads()
    wait_until(lambda: loader.read == 5)
    thread.join(0.05)
    assert loader.read == 5


def wait_until(condition: Callable[[], bool]) -> None:
    event = threading.Event()
    for _ in range(3000):
        if condition():
            return
        event.wait(0.001)
    pytest.fail("did not happen")


def test_pinned_memory_of_the_user_is_copied_from_in_place(backend: RecordingBackend) -> None:
    """A tensor that is pinned already needs no host copy, and lives until its copy is done."""
    room = backend.pinned_memory(4096)
    pinned = torch.from_numpy(room[:60]).view(torch.float32).view(3, 5)
    pinned.fill_(7)
    batches = on_device([pinned], backend)
    (moved,) = batches
    backend.finish()
    assert torch.equal(moved, torch.full((3, 5), 7.0))
    copies = batches.report().copies
    assert (copies.in_place, copies.staged, copies.pageable) == (1, 0, 0)
    backend.unregister(room.ctypes.data)


def test_a_source_lives_until_its_copy_is_done(backend: RecordingBackend) -> None:
    """A tensor copied in place is held until its event, and let go then, while the epoch still runs."""
    rooms = [backend.pinned_memory(4096) for _ in range(4)]
    sources = [torch.from_numpy(room) for room in rooms]
    refs = [weakref.ref(source) for source in sources]

    def loader() -> Iterator[torch.Tensor]:
        while sources:
            yield sources.pop(0)

    alive_when_read: list[bool] = []
    read = backend._read

    def noting(target: torch.Tensor, address: int, size: int) -> None:
        alive_when_read.append(refs[len(alive_when_read)]() is not None)
        read(target, address, size)

    backend._read = noting  # type: ignore[method-assign]
    batches = iter(on_device(loader(), backend, depth=1))
    next(batches)
    wait_until(lambda: len(sources) == 1 and len(alive_when_read) == 2)
    wait_until(lambda: refs[1]() is None)
    assert len(list(batches)) == 3
    assert alive_when_read == [True] * 4
    del batches
    assert [ref() for ref in refs] == [None] * 4
    for room in rooms:
        backend.unregister(room.ctypes.data)


def test_the_next_copy_is_queued_before_the_last_one_is_done(
    backend: RecordingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the user is about to take a batch, the thread waits for that and not for copies; later it lets them go."""
    monkeypatch.setattr(copies, "_LONG_WAIT_S", 60)
    loader = Loader(100)
    batches = iter(on_device(loader, backend, depth=2))
    next(batches)
    wait_until(lambda: loader.read == 4)
    prefetch_threads()[0].join(0.05)
    (side,) = backend.streams
    assert side.done < len(side.work)


def test_the_thread_prepares_itself_before_all_else(backend: RecordingBackend) -> None:
    """Once an epoch, before it asks the device for anything."""
    batches = on_device(Loader(3), backend)
    for epochs in (1, 2):
        list(batches)
        assert backend.log.count(("begin_thread", "fastdata-prefetch")) == epochs
    kinds = [entry[0] for entry in backend.log]
    assert kinds.index("begin_thread") < kinds.index("copy")


@pytest.mark.skipif(os.name != "posix", reason="CUDA's runtime is looked up as Linux does")
def test_the_thread_minds_no_capture_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA is told so, because a graph that the training loop captures would forbid the thread all it does."""
    told: list[Any] = []

    class Runtime:
        def __init__(self, name: None) -> None: ...

        def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
            told.append(mode._obj.value)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr("ctypes.CDLL", Runtime)
    CudaBackend(CUDA).begin_thread()
    assert told == [CUDA, 1]  # cudaStreamCaptureModeThreadLocal


def test_a_runtime_that_cannot_be_told_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where CUDA's function is not found, the log says what to do, and the thread begins all the same."""
    devices: list[Any] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    with caplog.at_level("INFO", logger="fastdata"):
        CudaBackend(CUDA).begin_thread()
    assert devices == [CUDA]
    (message,) = caplog.messages
    assert "cudaThreadExchangeStreamCaptureMode is not found: capture CUDA graphs before iter()" in message


# How it ends


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_lost_device_ends_the_epoch_in_good_order(goes_on: bool) -> None:
    """The loop gets the error, no exception leaves the thread, and memory is let go though no copy will be done."""
    backend, loader = RecordingBackend(), Loader(100)
    batches = on_device(loader, backend)
    epoch = iter(batches)
    next(epoch)
    wait_until(lambda: loader.read == 4)
    backend.lost = "CUDA error: an illegal memory access was encountered"
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
    assert backend.pinned == {}


def test_an_empty_loader_gives_no_batch(backend: RecordingBackend) -> None:
    """No batch, no copy, no thread left."""
    assert list(on_device([], backend)) == []
    assert prefetch_threads() == []


def test_break_ends_the_thread_at_once(backend: RecordingBackend) -> None:
    """The thread is joined when the loop is left, and what was read ahead is gone."""
    loader = Loader(100)
    for _ in on_device(loader, backend):
        break
    assert prefetch_threads() == []
    assert len(loader.alive) == 0


def test_a_broken_epoch_does_not_disturb_the_next(backend: RecordingBackend) -> None:
    """After a break the next epoch is complete and in order."""
    batches = on_device(Loader(6), backend)
    for _ in batches:
        break
    assert [number for _, number in batches] == list(range(6))


def test_a_batch_that_was_staged_in_vain_gives_its_buffer_back(backend: RecordingBackend) -> None:
    """Epochs that are left while a batch waits in a pinned buffer do not use the buffers up."""
    loader = Loader(100)
    batches = on_device(loader, backend, depth=2)
    for broken in range(1, 6):
        epoch = iter(batches)
        next(epoch)
        wait_until(lambda broken=broken: loader.read == 4 * broken)  # one is handed over, two are there, one is staged
        del epoch
    assert len(list(batches)) == 100
    assert backend.registered == 2


def test_failures_that_are_kept_hold_no_buffer(backend: RecordingBackend) -> None:
    """Whoever collects the exceptions of a transform still gets the batches behind them from pinned memory."""

    def transform(batch: Any) -> Any:
        if batch[1] < 6:
            raise ValueError("no such image")
        return batch

    batches = on_device(Loader(10), backend, depth=2, transform=transform)
    epoch, kept = iter(batches), []
    for _ in range(6):
        with pytest.raises(ValueError, match="no such image") as caught:
            next(epoch)
        kept.append(caught.value)
    assert [number for _, number in epoch] == [6, 7, 8, 9]
    assert (batches.report().copies.staged, batches.report().copies.pageable) == (10, 0)


def test_two_iterators_go_side_by_side(backend: RecordingBackend) -> None:
    """Each of two live iterators gives its own complete epoch, with right values."""
    batches = on_device(Loader(8), backend, depth=1)
    pairs = list(zip(batches, batches, strict=True))
    backend.finish()
    assert [(a[0].unique().item(), b[0].unique().item()) for a, b in pairs] == [(i, i) for i in range(8)]


def test_a_finished_iterator_stays_finished(backend: RecordingBackend) -> None:
    """``next`` after the end is StopIteration, again and again."""
    batches = iter(on_device(Loader(1), backend))
    next(batches)
    for _ in range(3):
        assert next(batches, "end") == "end"


def test_close_ends_live_iterators_and_unpins(backend: RecordingBackend) -> None:
    """After ``with`` no thread runs and nothing is pinned; a later epoch begins anew."""
    with on_device(Loader(9), backend) as batches:
        epoch = iter(batches)
        next(epoch)
    assert (prefetch_threads(), backend.pinned) == ([], {})
    assert next(epoch, "end") == "end"
    assert len(list(batches)) == 9


def test_a_dropped_prefetcher_unpins(backend: RecordingBackend) -> None:
    """Its iterator keeps it alive; then its memory is given back without ``close``."""
    epoch = iter(on_device(Loader(9), backend))
    next(epoch)
    assert backend.pinned
    del epoch
    assert backend.pinned == {}


def test_an_exception_comes_after_the_batches_before_it(backend: RecordingBackend) -> None:
    """The loader's own exception, with its traceback, in its place; the loop may go on behind it."""
    batches = iter(on_device(Loader(5, fail_at=2), backend))
    assert [next(batches)[1], next(batches)[1]] == [0, 1]
    with pytest.raises(LookupError, match="batch 2 is missing") as caught:
        next(batches)
    assert any(entry.name == "__next__" and "test_prefetch" in str(entry.path) for entry in caught.traceback[1:])
    assert [number for _, number in batches] == [3, 4]


def test_nothing_is_read_behind_an_exception_until_the_loop_asks(backend: RecordingBackend) -> None:
    """The thread has ended by then: a loop that gives up waits for no further batch of a slow loader."""
    loader = Loader(5, fail_at=2)
    batches = iter(on_device(loader, backend))
    for _ in range(2):
        next(batches)
    with pytest.raises(LookupError, match="batch 2 is missing"):
        next(batches)
    assert (loader.read, prefetch_threads()) == (2, [])
    del batches


def test_a_failed_epoch_keeps_nothing_alive(backend: RecordingBackend) -> None:
    """Without the cycle collector, thread and batches go with the iterator and the exception."""
    loader = Loader(5, fail_at=2)
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            list(on_device(loader, backend))
        assert prefetch_threads() == []
        assert len(loader.alive) == 0
    finally:
        gc.enable()


def test_an_exception_of_iter_is_raised_by_iter(backend: RecordingBackend) -> None:
    """The loader's iterator is made in the user's thread, where its exception belongs."""

    class Broken:
        def __iter__(self) -> Any:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        iter(on_device(Broken(), backend))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_thread(backend: RecordingBackend) -> None:
    """A KeyboardInterrupt while the loop waits is raised there, and the thread is gone."""

    def loader() -> Iterator[Any]:
        yield torch.zeros(2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        yield torch.zeros(2)

    def train(batches: Iterator[Any]) -> None:
        next(batches)
        threading.Event().wait(5)  # the signal comes here, or in the next line
        next(batches)

    batches = iter(on_device(loader(), backend))
    with pytest.raises(KeyboardInterrupt):
        train(batches)
    del batches
    assert prefetch_threads() == []


def test_the_iterator_is_made_in_the_users_thread_and_read_in_another(backend: RecordingBackend) -> None:
    """``iter`` runs in the calling thread, ``next`` in the prefetcher's, never at the same time for one loader."""
    seen: dict[str, str] = {}

    class Watching:
        def __iter__(self) -> Iterator[torch.Tensor]:
            seen["iter"] = threading.current_thread().name
            return self._read()

        def _read(self) -> Iterator[torch.Tensor]:
            seen["next"] = threading.current_thread().name
            yield torch.zeros(2)

    list(on_device(Watching(), backend))
    assert seen == {"iter": threading.current_thread().name, "next": "fastdata-prefetch"}


def test_nothing_is_read_before_the_first_batch_is_asked_for(backend: RecordingBackend) -> None:
    """``iter`` alone starts no thread: what the loader draws first is drawn while the user waits."""
    loader = Loader()
    batches = iter(on_device(loader, backend))
    assert (loader.read, prefetch_threads()) == (0, [])
    del batches


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_go_on_with_an_iterator(backend: RecordingBackend) -> None:
    """There it raises and ends in good order, and the parent goes on."""
    batches = iter(on_device(Loader(6), backend))
    next(batches)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            next(batches)
        except RuntimeError as error:
            code = 0 if "works in the process that made it" in str(error) else 2
        del batches
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert [number for _, number in batches] == [1, 2, 3, 4, 5]


def test_the_interpreter_ends_with_a_live_iterator() -> None:
    """A script that ends in the middle of an epoch ends, without a word."""
    code = """
import torch
from fastdata import CudaPrefetcher
from recording import RecordingBackend
batches = iter(CudaPrefetcher([torch.zeros(2)] * 50, "cuda:0", backend=RecordingBackend()))
next(batches)
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


# What is pinned


class Slots:
    """A loader whose batches lie in slots, as worker processes fill them; ``before(i)`` is called before each."""

    def __init__(self, count: int, before: Callable[[int], Any] = lambda number: None) -> None:
        self.slots = [new_slot()]
        self.count, self.before = count, before
        self.arrivals = self
        self.collate_fn = self

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.count):
            self.before(number)
            batch = torch.from_numpy(self.slots[0][64:128])
            batch.fill_(number)
            yield batch
            del batch


def new_slot() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, 4096), np.uint8)


def test_a_replaced_slot_is_pinned_as_long_as_a_copy_reads_it(backend: RecordingBackend) -> None:
    """It is unpinned when its last reader lets go, and its follower is pinned; each is registered once."""

    def replace(number: int) -> None:
        loader.slots = [new_slot()]

    loader = Slots(6, replace)
    with CudaPrefetcher(loader, "cuda:0", depth=2, backend=backend) as batches:
        arrived = list(batches)
        backend.finish()
        assert [batch.unique().tolist() for batch in arrived] == [[number] for number in range(6)]
        assert list(backend.pinned) == [loader.slots[0].ctypes.data]
        copies = batches.report().copies
        assert (copies.in_place, copies.staged, backend.registered) == (6, 0, 6)
    assert backend.pinned == {}


def test_pinned_memory_ends_at_its_share(monkeypatch: pytest.MonkeyPatch, backend: RecordingBackend) -> None:
    """Buffers are pinned up to an eighth of what is free without them; further ones are ordinary memory."""
    pinned = PinnedMemory(backend)  # type: ignore[arg-type]
    free = math.ceil(8 * 8192 / (1 - memory.RESERVE_SHARE))
    monkeypatch.setattr(memory, "available_bytes", lambda: Available(bytes=free - pinned.bytes, limited_by="cgroup"))
    buffers = [pinned.allocate(4096) for _ in range(4)]
    assert [buffer.ctypes.data in backend.pinned for buffer in buffers] == [True, True, False, False]
    assert pinned.plan.is_short
    pinned.free(buffers[0])
    assert list(backend.pinned) == [buffers[1].ctypes.data]
    pinned.close()
    pinned.close()
    assert backend.pinned == {}
    assert pinned.most_bytes == 8192


def test_a_driver_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch, backend: RecordingBackend) -> None:
    """Memory that cannot be registered is not tried again with each batch, and batches come all the same."""
    asked: list[int] = []
    monkeypatch.setattr(backend, "register", lambda memory: asked.append(memory.ctypes.data))
    loader = Slots(3)
    batches = CudaPrefetcher(loader, "cuda:0", backend=backend)
    with pytest.warns(UserWarning, match="from pageable memory, which takes longer: not pinned: the driver refuses to"):
        assert len(list(batches)) == 3
    assert asked.count(loader.slots[0].ctypes.data) == 1
    assert len(asked) == 2
    assert batches.report().copies.pageable == 3


def test_too_little_memory_to_pin_is_said_once(backend: RecordingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches come all the same, from pageable memory; one warning for all epochs, and the report says why."""
    monkeypatch.setattr(memory, "available_bytes", lambda: Available(bytes=100, limited_by="cgroup limit"))
    batches = on_device(Loader(3), backend)
    with pytest.warns(FastDataWarning, match=r"pageable memory.*64 B.*cgroup limit") as caught:
        values = [images for images, _ in batches] + [images for images, _ in batches]
    backend.finish()
    assert [images.unique().item() for images in values] == [0, 1, 2, 0, 1, 2]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    report = batches.report()
    assert (report.copies.pageable, report.copies.staged, report.pinned_bytes) == (3, 0, 0)
    assert "not pinned" in report.pinning


def test_larger_batches_replace_the_buffers(backend: RecordingBackend) -> None:
    """Buffers grow one by one, and the old ones are unpinned."""
    sizes = [10, 5000, 20, 9000, 9000, 30]
    moved = list(on_device([torch.full((size,), 1, dtype=torch.uint8) for size in sizes], backend))
    backend.finish()
    assert [tensor.sum().item() for tensor in moved] == sizes
    assert sum(backend.pinned.values()) <= 2 * 12288


def test_the_report_reads_well(backend: RecordingBackend) -> None:
    """It says where batches went, what was pinned and why, and how copies were made."""
    batches = on_device(Loader(4), backend)
    list(batches)
    report = batches.report()
    assert (report.batches, report.samples, report.devices) == (4, 12, ("cuda:0",))
    assert (report.copies.staged, report.copies.staged_bytes) == (4, 240)
    text = str(report)
    assert "to cuda:0: 240 B" in text
    assert "pinned at most 8.0 KiB" in text
    assert "pinned: " in text


# What is done on the device


def test_finishing_work_runs_in_the_thread_on_its_stream(backend: RecordingBackend) -> None:
    """Casts come first, then the user's transform, without gradients; what it makes is the user's stream's to keep."""
    calls: list[Any] = []
    weight = torch.ones(5, requires_grad=True)

    def transform(batch: Any) -> Any:
        backend.finish()
        calls.append((threading.current_thread().name, backend.current_stream(CUDA), batch[0].dtype))
        return batch[0] * weight

    (made,) = on_device(Loader(1), backend, transform=transform, dtype=torch.float16)
    (side,) = backend.streams
    assert calls == [("fastdata-prefetch", side, torch.float16)]
    assert not made.requires_grad
    assert ("record_stream", place_of(made), backend.current_stream(CUDA)) in backend.log


def test_a_failing_transform_names_the_batch(backend: RecordingBackend) -> None:
    """The type stays, the batch's number is in the message, and batches before and after it come."""

    def transform(batch: Any) -> Any:
        if batch[1] == 3:
            raise ValueError("negative size")
        return batch

    batches = iter(on_device(Loader(6), backend, transform=transform))
    assert [next(batches)[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="transform= failed on batch 3: ValueError: negative size") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, ValueError)
    assert [number for _, number in batches] == [4, 5]


def test_a_transform_that_raises_stop_iteration_does_not_end_the_epoch(backend: RecordingBackend) -> None:
    """It is an error like any other, not a silent end."""

    def transform(batch: Any) -> Any:
        raise StopIteration

    with pytest.raises(RuntimeError, match="transform= failed on batch 0"):
        list(on_device(Loader(2), backend, transform=transform))


# Several devices

TWO = [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_each_device_gets_its_part_straight_from_pinned_memory(backend: RecordingBackend) -> None:
    """Parts are cut from one staged batch: one host copy, one device copy for each, each on a stream of its device."""
    images = torch.arange(15.0).view(5, 3)
    batches = CudaPrefetcher([(images, "names")], TWO, backend=backend)
    ((first, second),) = batches
    backend.finish("cuda:0")
    backend.finish("cuda:1")
    assert torch.equal(first[0], images[:3])
    assert torch.equal(second[0], images[3:])
    assert (first[1], second[1]) == ("names", "names")
    assert [stream.device for stream in backend.streams] == TWO
    assert [size for _, size in backend.copied_from["cuda:0"]] == [36]
    assert [size for _, size in backend.copied_from["cuda:1"]] == [24]
    assert batches.report().copies.staged == 1


def test_fewer_samples_than_devices_give_fewer_parts(backend: RecordingBackend) -> None:
    """One sample goes to the first device; an empty part is never made."""
    batches = CudaPrefetcher([torch.ones(1, 3), torch.ones(4, 3)], TWO, backend=backend)
    assert [[len(part) for part in parts] for parts in batches] == [[1], [2, 2]]


def test_depth_must_be_positive() -> None:
    """Zero batches ahead are refused."""
    with pytest.raises(ValueError, match="depth=0"):
        CudaPrefetcher([], depth=0)
