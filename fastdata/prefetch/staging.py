"""Bringing a host batch where the accelerator can read it, and keeping it there until it has been read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastdata.prefetch.backends import Backend, Event
from fastdata.prefetch.batches import count_samples, is_dense, is_host_tensor, map_tensors, shard_sizes, tensors_in
from fastdata.prefetch.pinning import PinnedMemory
from fastdata.transport import address_of

__all__ = ["CopyCounts", "Flight", "Slot", "Staged", "Staging"]

_ALIGN_BYTES = 64


@dataclass(slots=True)
class CopyCounts:
    """Copies of tensors since the epoch began.

    Args:
        in_place: copied to the device from where they lay.
        in_place_bytes: size of those.
        staged: first copied to pinned memory on the host.
        staged_bytes: size of those.
        pageable: copied to the device from pageable memory, in parts by the driver.
        pageable_bytes: size of those.
    """

    in_place: int = 0
    in_place_bytes: int = 0
    staged: int = 0
    staged_bytes: int = 0
    pageable: int = 0
    pageable_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """What was copied to devices."""
        return self.in_place_bytes + self.staged_bytes + self.pageable_bytes


@dataclass(slots=True)
class Slot:
    """A pinned buffer of a staging ring."""

    memory: np.ndarray | None = None


@dataclass(slots=True)
class Staged:
    """A batch ready to be copied.

    Args:
        batch: the batch, with the tensors to copy from.
        sizes: lengths of its shards.
        slot: the buffer that some of them lie in.
    """

    batch: Any
    sizes: list[int]
    slot: Slot | None = None


@dataclass(slots=True)
class _Held:
    events: list[Event]
    sources: list[Any]
    slot: Slot | None


@dataclass
class Flight:
    """Copies under way, oldest first. What they read from is held here, and let go when they are done.

    Args:
        backend: knows when they are.
        free: slots that nothing is read from.
        limit: how many batches may be under way.
    """

    backend: Backend
    free: list[Slot]
    limit: int
    _held: deque[_Held] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, events: list[Event], sources: list[Any], slot: Slot | None) -> None:
        """Hold the sources of a batch until its events are done."""
        self._held.append(_Held(events, sources, slot))
        while len(self._held) > self.limit:
            self.wait_for_oldest()

    def take_slot(self) -> Slot:
        """Return a slot that nothing is read from; waits for the oldest copy if there is none."""
        while not self.free:
            self.wait_for_oldest()
        return self.free.pop()

    def reap(self) -> None:
        """Let go of what is done, without waiting."""
        while self._held and all(self.backend.is_done(event) for event in self._held[0].events):
            self._let_go()

    def drain(self) -> None:
        """Wait for all copies."""
        while self._held:
            self.wait_for_oldest()

    def wait_for_oldest(self) -> None:
        """Wait for the copies of the oldest batch."""
        for event in self._held[0].events:
            self.backend.synchronize(event)
        self._let_go()

    def _let_go(self) -> None:
        held = self._held.popleft()
        if held.slot is not None:
            self.free.append(held.slot)


class Staging:
    """Finds pinned memory for batches: where they lie, else in a slot of a ring that is allocated once.

    Args:
        backend: copies from it.
        pinned: what is pinned.
        flight: whose slots are the ring.
        devices: how many each batch is split over.
        slots_of_workers: the memory that worker processes fill.
    """

    def __init__(
        self,
        backend: Backend,
        pinned: PinnedMemory,
        flight: Flight,
        *,
        devices: int,
        slots_of_workers: Callable[[], list[np.ndarray]],
    ) -> None:
        self._backend, self._pinned, self._flight = backend, pinned, flight
        self._devices, self._slots_of_workers = devices, slots_of_workers
        self.counts = CopyCounts()

    def stage(self, batch: Any) -> Staged:
        """Return the batch with every host tensor in pinned memory where that may be, and pageable elsewhere."""
        sizes = shard_sizes(count_samples(batch), self._devices)
        tensors = [tensor for tensor in tensors_in(batch) if is_host_tensor(tensor)]
        in_place = {id(t) for t in tensors if self._is_readable(t, sizes) and self._is_pinned(t)}
        rest = [tensor for tensor in tensors if id(tensor) not in in_place and tensor.numel()]
        slot, replaced = self._fill_slot(rest, sizes, sum(t.nbytes for t in tensors))
        for tensor in tensors:
            self._count(tensor, is_in_place=id(tensor) in in_place, is_staged=id(tensor) in replaced)
        return Staged(map_tensors(batch, lambda t: replaced.get(id(t), t)), sizes, slot)

    def drop(self, staged: Staged) -> None:
        """Take back the buffer of a batch that is not to be copied. Idempotent."""
        slot, staged.slot = staged.slot, None
        if slot is not None:
            self._flight.free.append(slot)

    def close(self) -> None:
        """Wait for all copies, and unpin what workers fill."""
        self._flight.drain()
        self._pinned.let_go(self)

    def _is_readable(self, tensor: torch.Tensor, sizes: list[int]) -> bool:
        """Whether it and its shards can be copied in one piece."""
        shard = tensor.narrow(0, 0, sizes[0]) if tensor.ndim and len(tensor) == sum(sizes) else tensor
        return is_dense(shard)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._backend.is_pinned(tensor) or self._adopt(tensor)

    def _adopt(self, tensor: torch.Tensor) -> bool:
        """Pin the worker's slot that the tensor lies in, if it lies in one."""
        address = tensor.data_ptr()
        slots = self._slots_of_workers()
        for memory in slots:
            if 0 <= address - address_of(memory) < memory.nbytes:
                if self._pinned.stale(self, slots):
                    self._flight.drain()
                    self._pinned.let_go(self, slots)
                return self._pinned.adopt(memory, self)
        return False

    def _fill_slot(
        self, tensors: list[torch.Tensor], sizes: list[int], batch_bytes: int
    ) -> tuple[Slot | None, dict[int, torch.Tensor]]:
        """Copy tensors to a slot; returns them by the id of the original. None and nothing if pinning is not to be."""
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if not end:
            return None, {}
        slot = self._flight.take_slot()
        if not self._make_room(slot, end, batch_bytes):
            self._flight.free.append(slot)
            return None, {}
        octets = torch.from_numpy(slot.memory)
        copies = {}
        try:
            for tensor, start in zip(tensors, starts, strict=True):
                flat = octets[start : start + tensor.nbytes].view(tensor.dtype)
                copies[id(tensor)] = flat.as_strided(tensor.shape, self._strides(tensor, sizes)).copy_(tensor)
        except BaseException:
            self._flight.free.append(slot)
            raise
        return slot, copies

    def _strides(self, tensor: torch.Tensor, sizes: list[int]) -> tuple[int, ...]:
        """Strides of a tensor's copy: its own, if it and its shards can then be copied in one piece."""
        keeps = is_dense(tensor) and self._is_readable(tensor, sizes)
        return tensor.stride() if keeps else torch.empty(tensor.shape, device="meta").stride()

    def _make_room(self, slot: Slot, size_bytes: int, batch_bytes: int) -> bool:
        if slot.memory is not None and slot.memory.nbytes >= size_bytes:
            return True
        if slot.memory is not None:
            self._pinned.free(slot.memory)
        missing = 1 + sum(other.memory is None for other in self._flight.free)
        slot.memory = self._pinned.allocate_part(size_bytes, batch_bytes, missing)
        return slot.memory is not None

    def _count(self, tensor: torch.Tensor, *, is_in_place: bool, is_staged: bool) -> None:
        counts = self.counts
        if is_in_place:
            counts.in_place, counts.in_place_bytes = counts.in_place + 1, counts.in_place_bytes + tensor.nbytes
        elif is_staged:
            counts.staged, counts.staged_bytes = counts.staged + 1, counts.staged_bytes + tensor.nbytes
        else:
            counts.pageable, counts.pageable_bytes = counts.pageable + 1, counts.pageable_bytes + tensor.nbytes
