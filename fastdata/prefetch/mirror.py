"""A copy of a dataset's raw store on each device, which batches are gathered from there.

Shape letters: N stored samples, C channels, H W stored size.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from fastdata.memory import check_device_room
from fastdata.prefetch.backends import Backend, Event
from fastdata.prefetch.pinning import PinnedMemory
from fastdata.stores.base import Store

__all__ = ["Mirror"]

CHUNK_BYTES = 32 << 20
"""What is copied at a time, from one of two pinned buffers while the other one is filled."""


class Mirror:
    """Copies of a store on devices, each made when it is first asked for.

    Args:
        store: dense uint8, complete.
        backend: of the devices.
        pinned: gives the buffers.
    """

    def __init__(self, store: Store, backend: Backend, pinned: PinnedMemory) -> None:
        self._store, self._backend, self._pinned = store, backend, pinned
        self._lock = threading.Lock()
        self._copies: dict[torch.device, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """What a copy takes."""
        return len(self._store) * self._store.spec.sample_bytes

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the samples (N, C, H, W) on a device, ready for later work on the caller's current stream.

        The first call for a device blocks for as long as the copy takes. The memory belongs to the caller's stream.

        Raises:
            MemoryBudgetError: there is too little memory on the device.
        """
        with self._lock:
            if device not in self._copies:
                self._copies[device] = self._upload(device)
            return self._copies[device]

    def close(self) -> None:
        """Give back the memory on all devices. Idempotent; a later ``on`` copies again."""
        with self._lock:
            self._copies.clear()

    def _upload(self, device: torch.device) -> torch.Tensor:
        free_bytes = self._backend.free_bytes(device)
        if free_bytes is not None:
            check_device_room(self.size_bytes, free_bytes, str(device))
        store, spec = self._store, self._store.spec
        assert spec.shape is not None
        copy_NCHW = self._backend.allocate((len(store), *spec.shape), torch.uint8, device)
        rows = min(max(1, CHUNK_BYTES // max(spec.sample_bytes, 1)), max(len(store), 1))
        buffers = [self._pinned.allocate(rows * spec.sample_bytes) for _ in range(2)]
        events: list[Event | None] = [None, None]
        try:
            for number, start in enumerate(range(0, len(store), rows)):
                index = np.arange(start, min(start + rows, len(store)))
                turn = number % 2
                self._wait(events[turn])
                chunk = buffers[turn][: len(index) * spec.sample_bytes].reshape(len(index), *spec.shape)
                store.gather_into(index, chunk)
                self._backend.copy_into(torch.from_numpy(chunk), copy_NCHW[start : start + len(index)])
                events[turn] = self._backend.record(self._backend.current_stream(device))
        finally:
            for event, buffer in zip(events, buffers, strict=True):
                self._wait(event)
                self._pinned.free(buffer)
        return copy_NCHW

    def _wait(self, event: Event | None) -> None:
        if event is not None:
            self._backend.synchronize(event)
