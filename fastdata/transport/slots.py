"""The slots of a worker process: shared blocks that it fills with batches again and again."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset
from torch.utils.data._utils import collate as torch_collate

from fastdata.blocks import Block
from fastdata.errors import MemoryBudgetError
from fastdata.transport.arrivals import FREE, LENT, UNCOUNTED, Parcel, Place
from fastdata.transport.packing import Packer, StorageSharedError, address_of, is_plain, lies_in

__all__ = ["Ring"]

_ALIGN_BYTES = 64
_PAGE_BYTES = 4096
_STATE_BYTES = _ALIGN_BYTES
"""The state byte has a cache line of its own before the data."""


class _Slot:
    """A shared block of this worker: its memory, and who may still see it in this process."""

    def __init__(self) -> None:
        self.block: Block | None = None
        self.number = -1
        self.pickled = b""
        self.descriptor = ""
        self.memory = np.zeros(_STATE_BYTES, np.uint8)
        self.lease: weakref.ref[np.ndarray] | None = None

    def is_free(self) -> bool:
        """Neither the parent nor anything in this process, such as a batch that ``collate`` remembers, uses it."""
        return self.memory[0] == FREE and (self.lease is None or self.lease() is None)

    def replace(self, size_bytes: int) -> None:
        """Take a larger block; memory of the old one stays valid for those who see it.

        Raises:
            MemoryBudgetError: there is not so much memory; the slot stays as it is.
        """
        # Without /proc the parent could not find a block that has no name.
        nameless = hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")
        block = Block.create(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES, portable=not nameless)
        if self.block:
            self.block.close()
        self.block, self.number = block, self.number + 1
        self.memory = block.array("uint8", (block.size_bytes,))
        self.pickled = pickle.dumps(block)
        self.descriptor = f"/proc/{os.getpid()}/fd/{block.fileno()}"

    def lend(self) -> np.ndarray:
        """Return the slot's memory as an array that keeps it from being taken again while anything sees it."""
        lease = self.memory[:]
        self.lease = weakref.ref(lease)
        return lease


class Ring:
    """The slots of one worker."""

    def __init__(self, token: str, slot_limit: int) -> None:
        self.pid = os.getpid()
        self.name = secrets.token_hex(8)
        self.largest_bytes = 0
        self._token = token
        self._slots: list[_Slot] = []
        self._slot_limit = slot_limit
        self._next: _Filling | None = None

    def serve(self, dataset: Any) -> None:
        """Let a fastdata dataset, also behind ``Subset``, write its batches straight into slots."""
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        if hasattr(dataset, "batch_ring"):
            dataset.batch_ring = self

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Lend the array that the coming batch is made of, as ``BatchRing.take`` does."""
        self._next = self._begin()
        memory = self._next.reserve(math.prod(shape) * dtype.itemsize) if self._next else None
        return np.empty(shape, dtype) if memory is None else np.frombuffer(memory, dtype).reshape(shape)

    def send(self, collate: Callable[[Any], Any], samples: Any) -> Parcel:
        """Collate into a free slot, else in torch's way."""
        filling, self._next = self._next or self._begin(), None
        if filling is None:
            return self._by_torch(collate(samples))
        with _stacking_into(filling):
            batch = collate(samples)
        try:
            spans, data = filling.pack(batch)
        except (MemoryBudgetError, StorageSharedError):
            return self._by_torch(batch)
        if not any(size_bytes for _, size_bytes in spans):
            return Parcel(UNCOUNTED, None, spans, data)
        slot = filling.slot
        slot.memory[0] = LENT
        place = Place(self.name, self._slots.index(slot), slot.number, slot.descriptor, slot.pickled)
        return Parcel(self._token, place, spans, data)

    def _by_torch(self, batch: Any) -> Parcel:
        return Parcel(self._token, None, [], bytes(ForkingPickler.dumps(batch)))

    def _begin(self) -> _Filling | None:
        """Start to fill a free slot; None if all are lent or there is no memory for another one."""
        slot = next((slot for slot in self._slots if slot.is_free()), None)
        try:
            if slot is None:
                if len(self._slots) == self._slot_limit:
                    return None
                slot = _Slot()
                if self.largest_bytes:
                    slot.replace(self.largest_bytes)
                self._slots.append(slot)
        except MemoryBudgetError:
            return None
        return _Filling(self, slot)


class _Filling:
    """A slot that a batch is being written to, from front to back."""

    def __init__(self, ring: Ring, slot: _Slot) -> None:
        self.slot = slot
        self._ring = ring
        self._lease = slot.lend()
        self._end = _STATE_BYTES

    def reserve(self, size_bytes: int) -> memoryview | None:
        """Memory in the slot, or None if it is full."""
        start, end = self._end, self._end + size_bytes
        if end > self._lease.nbytes:
            return None
        self._end = _aligned(end)
        return self._lease.data[start:end]

    def pack(self, batch: Any) -> tuple[list[tuple[int, int]], bytes]:
        """Bring every part of the batch into the slot.

        Returns:
            (offset, bytes) of each part, and the pickle of all else.

        Raises:
            MemoryBudgetError: the slot is too small and there is no memory for a larger one.
        """
        packer = Packer(self._lease)
        data = packer.pack(batch)
        starts, end = self._lay_out(packer.parts, self._lease)
        if end > self._lease.nbytes:
            grown = self.slot.number >= 0
            starts, end = self._lay_out(packer.parts, None)
            self.slot.replace(end + end // 8 if grown else end)  # batches that differ in size: leave room for others
            self._lease = self.slot.lend()
        self._ring.largest_bytes = max(self._ring.largest_bytes, end)
        base = address_of(self._lease)
        for part, start in zip(packer.parts, starts, strict=True):
            if address_of(part) != base + start:
                self._lease[start : start + part.nbytes] = part
        return [(start, part.nbytes) for start, part in zip(starts, packer.parts, strict=True)], data

    def _lay_out(self, parts: list[np.ndarray], lease: np.ndarray | None) -> tuple[list[int], int]:
        """Offsets of the parts, those in ``lease`` where they are and the others behind; and the end."""
        starts, end = [], self._end if lease is not None else _STATE_BYTES
        for part in parts:
            if lease is not None and lies_in(part, lease):
                starts.append(address_of(part) - address_of(lease))
            else:
                starts.append(end)
                end = _aligned(end + part.nbytes)
        return starts, end


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


@contextlib.contextmanager
def _stacking_into(filling: _Filling) -> Iterator[None]:
    """Make ``default_collate`` stack into the slot, whoever calls it, where torch makes a new shared file."""
    functions: Any = torch_collate.default_collate_fn_map
    torchs = functions.get(torch.Tensor)

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if not all(type(sample) is torch.Tensor and is_plain(sample) for sample in batch) or not first.numel():
            return torchs(batch, collate_fn_map=collate_fn_map)
        memory = filling.reserve(len(batch) * first.numel() * first.itemsize)
        out = torch.frombuffer(memory, dtype=first.dtype) if memory else first.new_empty(len(batch) * first.numel())
        return torch.stack(tuple(batch), 0, out=out.view(len(batch), *first.shape))

    if torchs is not torch_collate.collate_tensor_fn:  # the user has set their own
        yield
        return
    functions[torch.Tensor] = stack
    try:
        yield
    finally:
        functions[torch.Tensor] = torchs
