"""Where batches are staged, and when memory is pinned and let go."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from fastdata import machine, memory
from fastdata.machine import Available
from fastdata.prefetch.pinning import PinnedMemory
from fastdata.prefetch.staging import Flight, Slot, Staging
from recording import RecordingBackend

CUDA = torch.device("cuda", 0)


def workers_memory() -> np.ndarray:
    """A slot as worker processes fill it."""
    return np.frombuffer(mmap.mmap(-1, 4096), np.uint8)


def test_a_replaced_slot_is_unpinned_when_nothing_reads_it() -> None:
    """The first batch from its follower unpins it, after the copy that still reads it is done."""
    backend = RecordingBackend()
    pinned, flight = PinnedMemory(backend), Flight(backend, [Slot(), Slot()], 2)
    slots = [workers_memory()]
    staging = Staging(backend, pinned, flight, devices=1, slots_of_workers=lambda: slots)
    stream = backend.new_stream(CUDA)

    def send(memory: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(memory[64:128])
        staged = staging.stage(tensor)
        with backend.working_on([stream]):
            moved = backend.copy(staged.batch, CUDA)
        flight.add([backend.record(stream)], [staged.batch], staged.slot)
        return moved

    old = slots[0]
    old[:] = 3
    moved = send(old)
    assert old.ctypes.data in backend.pinned
    slots[:] = [workers_memory()]
    send(slots[0])
    assert list(backend.pinned) == [slots[0].ctypes.data]
    assert moved.unique().tolist() == [3]
    staging.close()
    assert backend.pinned == {}
    assert backend.violations == []
    assert (staging.counts.in_place, staging.counts.staged) == (2, 0)


def test_no_more_batches_than_the_limit_are_under_way() -> None:
    """One more waits for the oldest; what is done is let go without waiting."""
    backend = RecordingBackend()
    flight, stream = Flight(backend, [], 2), backend.new_stream(CUDA)
    done: list[int] = []
    for number in range(5):
        backend.queue(stream, lambda number=number: done.append(number))
        flight.add([backend.record(stream)], [], None)
        assert len(flight) <= 2
        assert len(done) == max(0, number - 1)
    flight.reap()
    assert len(flight) == 2
    backend.synchronize(backend.record(stream))
    flight.reap()
    assert len(flight) == 0


def test_pinned_memory_ends_at_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are pinned up to an eighth of what is free without them; further ones are ordinary memory."""
    reserve = memory.RESERVE_FLOOR_BYTES
    backend = RecordingBackend()
    pinned = PinnedMemory(backend)
    free = reserve + 8 * 8192
    monkeypatch.setattr(machine, "available_bytes", lambda: Available(bytes=free - pinned.bytes, limited_by="cgroup"))
    buffers = [pinned.allocate(4096) for _ in range(4)]
    assert [buffer.ctypes.data in backend.pinned for buffer in buffers] == [True, True, False, False]
    assert pinned.plan.is_short
    pinned.free(buffers[0])
    pinned.close()
    pinned.close()
    assert backend.pinned == {}
    assert pinned.most_bytes == 8192


def test_a_driver_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be registered is not tried again with each batch, and batches are staged."""
    backend = RecordingBackend()
    calls: list[int] = []
    monkeypatch.setattr(backend, "register", lambda memory: calls.append(1))
    slot = workers_memory()
    flight = Flight(backend, [Slot()], 1)
    staging = Staging(backend, PinnedMemory(backend), flight, devices=1, slots_of_workers=lambda: [slot])
    for _ in range(3):
        staged = staging.stage(torch.from_numpy(slot[64:128]))
        flight.add([], [staged.batch], staged.slot)
    assert (len(calls), staging.counts.in_place, staging.counts.staged) == (1, 0, 3)
    staging.close()
