"""Slots of shared memory into which a worker process packs batches.

The first byte of a slot is its state: it shows which process may use the slot. The worker sets it
to LEASED, the training loop sets it back to FREE, and neither writes it while it is the other's
turn. The worker owns the slots: if it is killed, the kernel frees a slot with its last mapping.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from fastdata.datasets.buffers import ALIGN_BYTES
from fastdata.errors import MemoryBudgetError
from fastdata.machine.blocks import Block
from fastdata.pixels.arrays import Array, Shape

FREE = 0
LEASED = 1
"""The states of a slot: the value of its first byte."""
STATE_BYTES = ALIGN_BYTES
"""The state has its own cache line, because two processes write it."""
_PAGE_BYTES = 4096
_MOST_STORAGE = 4
"""A tensor is sent with its whole storage if this has at most so many times the tensor's bytes."""


class SlotAddress(NamedTuple):
    """The address by which the training loop finds a slot.

    Attributes:
        pid: process number of the worker.
        name: name of the slot, which never changes.
        block: pickled handle of the block of shared memory, which changes when the slot grows.
    """

    pid: int
    name: str
    block: bytes


Spans = list[tuple[int, int]]
"""Offset and bytes of each part of a batch in its slot."""


class Slot:
    """A shared block of this worker, filled from front to back.

    Attributes:
        memory: memory of the block; before the first batch, ordinary memory with only a state.
        address: address for the training loop; None before the first batch.
        leased: the memory while a batch is written to it, as a new array object, which exists as
            long as any view of it in this process; None in between.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(STATE_BYTES, np.uint8)
        self.address: SlotAddress | None = None
        self._name = secrets.token_hex(8)
        self._block: Block | None = None
        self.lease()
        self.leased: Array | None = None

    @property
    def is_free(self) -> bool:
        # The training loop may still hold the batch, and so may this process, for example in a
        # dataset that caches.
        return self.memory[0] == FREE and self._latest() is None

    def lease(self) -> None:
        """Begin to fill the slot from its front."""
        # A new array object each time. Every view of its memory keeps it alive, so it is freed
        # together with the last view of this batch. The weak reference notices that, without any
        # counting.
        self.leased = self.memory[:]
        self._latest = weakref.ref(self.leased)
        self._end = STATE_BYTES

    def reserve(self, size_bytes: int) -> memoryview | None:
        """Return the next bytes of the slot, or None if it is full."""
        start = self._end
        if self.leased is None or start + size_bytes > self.leased.nbytes:
            return None
        self._end = _aligned(start + size_bytes)
        return self.leased.data[start : start + size_bytes]

    def stack(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        """Collate tensors as torch's ``collate_tensor_fn`` does, plain tensors into the slot."""
        first = batch[0]
        if all(type(sample) is torch.Tensor and is_plain(sample) for sample in batch):
            memory = self.reserve(len(batch) * first.nbytes)
            if not memory:
                return torch.stack(tuple(batch))  # raises torch's error if sizes differ
            out = torch.frombuffer(memory, dtype=first.dtype)
            return torch.stack(tuple(batch), 0, out=out.view(len(batch), *first.shape))
        return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)

    def pack(self, batch: Any) -> tuple[SlotAddress | None, Spans, bytes] | None:
        """Write every part of a batch to the slot.

        Returns:
            Address, spans and pickle for ``BatchReceiver.receive``; None if memory is too small.
        """
        packer = _Packer(self)
        packer.dump(batch)
        parts = [np.frombuffer(part.raw(), np.uint8) for part in packer.parts]
        try:
            spans = self._lay_out(parts)
        except MemoryBudgetError:
            return None
        # From here on the slot belongs to the training loop, which sets the state back to FREE. The
        # state is set before the address leaves this process. If it were set later, it could
        # overwrite a FREE that the loop has written in the meantime, and the slot would be lost.
        self.memory[0] = LEASED
        return self.address, spans, packer.file.getvalue()

    def offset_of(self, part: Array) -> int | None:
        """Return the offset of a part that is in the slot already; None for any other memory."""
        offset = part.ctypes.data - self.memory.ctypes.data
        return offset if 0 <= offset <= self.memory.nbytes - part.nbytes else None

    def _lay_out(self, parts: list[Array], *, is_full: bool = False) -> Spans:
        """Copy those parts to the slot that are not in it yet; return the spans of all parts."""
        if is_full or self.address is None:
            self._grow(sum(_aligned(part.nbytes) for part in parts))
        spans = []
        for part in parts:
            start = self.offset_of(part)
            if start is None:
                start = self._end
                memory = self.reserve(part.nbytes)
                if memory is None:  # start again, in a block that is large enough for all parts
                    return self._lay_out(parts, is_full=True)
                memory[:] = part.data
            spans.append((start, part.nbytes))
        return spans

    def _grow(self, size_bytes: int) -> None:
        """Replace the block by a larger one. Batches in the old one stay valid.

        Raises:
            MemoryBudgetError: there is too little memory. The slot stays unchanged.
        """
        # Batches differ in size, so from the second block on, an eighth more is reserved.
        size_bytes += STATE_BYTES + (size_bytes // 8 if self._block else 0)
        block = Block.create(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        # The training loop maps a block only when it receives a batch, and until then the block
        # must stay open here. This slot is free, so every batch in the old block has been received.
        if self._block:
            self._block.close()
        self._block = block
        self.memory = block.array("uint8", (block.size_bytes,))
        self.address = SlotAddress(os.getpid(), self._name, pickle.dumps(block))
        self.lease()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is only a dtype, shape and strides over CPU memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (
            tensor.requires_grad
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
        )
    )


class _Packer(pickle.Pickler):
    """Pickle the structure of a batch, with the memory of its tensors and arrays in ``parts``.

    Tensors that share a storage still share it afterwards, because the whole storage is one part. A
    tensor with a much larger storage, which is not in the slot, is pickled as torch does it.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.file = io.BytesIO()
        self.parts: list[pickle.PickleBuffer] = []
        super().__init__(self.file, 5, buffer_callback=self.parts.append)
        # torch's reducers, which pickle all other tensors.
        self.dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table
        self._storages: dict[int, Array] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and not value.flags.writeable:
            # Through torch's queue it would arrive as a writable array. A copy does so here too.
            return value.copy("K").__reduce_ex__(5)
        if type(value) is not torch.Tensor or not is_plain(value) or not value.numel():
            return NotImplemented
        storage = value.untyped_storage()
        # Identified by its address, because torch makes a new Python object for a storage in each
        # call. The arrays in the dict hold the memory, so no other storage gets the same address.
        octets = self._storages.get(storage.data_ptr())
        if octets is None:
            octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            is_small = octets.nbytes > _MOST_STORAGE * value.nbytes
            if is_small and self._slot.offset_of(octets) is None:
                return NotImplemented
            self._storages[storage.data_ptr()] = octets
        size = tuple(value.shape)
        return _tensor, (octets, value.dtype, value.storage_offset(), size, value.stride())


def _tensor(
    octets: Array, dtype: torch.dtype, offset: int, size: Shape, strides: Shape
) -> torch.Tensor:
    """Return a tensor over the memory of a storage; the pickle of a batch calls it by name."""
    storage = torch.frombuffer(octets, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, strides)
