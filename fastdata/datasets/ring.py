"""Batches from worker processes, in memory that is reused when the user lets go of it.

Torch's queue between processes makes and maps new memory for each batch. A worker's ring hands out
the same few shared blocks again and again, as ``BatchRing`` does within a process:

    worker:  samples -> collate, stacking into a free slot -> SentBatch (pickle of the structure,
        address of the slot)
    parent:  unpickling a SentBatch -> the structure, with tensors and arrays over the mapped slot

The first byte of a slot says whose turn it is. Only its owner writes it: the worker lends, the
parent gives back. The slots belong to the worker, so that those of a killed one are garbage that
the kernel collects with its last mapping.
"""

from __future__ import annotations

import io
import operator
import os
import pickle
import secrets
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, get_worker_info
from torch.utils.data._utils import collate as torch_collate

from fastdata.datasets.batch import Collate, IndexBatch
from fastdata.datasets.batch import collate as default_collate
from fastdata.datasets.reader import ALIGN_BYTES, Lease, new_buffer
from fastdata.errors import MemoryBudgetError, StoreGoneError
from fastdata.machine.blocks import Block, is_running
from fastdata.pixels.arrays import Array, Shape
from fastdata.report import warn_user

_LOOP_MODULE = "torch.utils.data._utils.worker"
_FETCH_MODULE = "torch.utils.data._utils.fetch"
FREE = 0
LEASED = 1
_PAGE_BYTES = 4096
STATE_BYTES = ALIGN_BYTES  # the first byte of a slot has a cache line of its own before the data
# A tensor travels with its whole storage, as in torch, up to so many times its own bytes.
_WHOLE_STORAGE = 4


class SlotAddress(NamedTuple):
    """How the training loop finds a slot."""

    pid: int  # of the worker
    name: str
    block: bytes  # pickled


Spans = list[tuple[int, int]]
"""Offset and bytes of each part of a batch in its slot."""


class RingCollate:
    """A collate function that sends batches from worker processes through reused shared memory.

    Give it to any ``torch.utils.data.DataLoader`` as ``collate_fn``; ``fastdata.DataLoader`` uses
    it by itself. In a worker process it must be the ``collate_fn`` itself, not called by another
    one. Anywhere else, as with ``num_workers=0``, it is ``collate``.

    The batch may be any nesting that pickles. Plain CPU tensors and contiguous NumPy arrays in it
    travel through the ring and keep dtype, shape and strides; sparse, quantized, gradient-requiring
    tensors and tensor subclasses travel in torch's way. What the training loop receives is its own:
    memory is reused when the last tensor over it has died. Only a process that is forked while a
    batch lives must copy what it uses after its parent has let go of it. ``default_collate``, also
    when called by ``collate``, stacks straight into the ring.

    Args:
        collate: turns samples into a batch, as a DataLoader's ``collate_fn``.
        slots: batches per worker that may be under way or held by the training loop at a time;
            further ones travel in torch's way. Slots are made when needed, each as large as the
            largest batch it carried.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> ring = RingCollate()
        >>> loader = DataLoader(torch.arange(6), batch_size=3, num_workers=1, collate_fn=ring)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(self, collate: Collate = default_collate, *, slots: int = 8) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: a worker needs at least one slot")
        self.collate = collate
        self.slots = slots
        self.receiver = BatchReceiver.of(secrets.token_hex(8))
        self._ring: WorkerRing | None = None

    def __call__(self, samples: Any) -> Any:
        worker = get_worker_info()
        fetch = None if worker is None else _fetch_of_worker_loop()
        if worker is None or fetch is None:
            return self.collate(samples)
        # fastdata's loaders number their batches, for what a collate function draws.
        numbered = (it.draws for it in fetch.f_locals.values() if isinstance(it, IndexBatch))
        draws = next(numbered, None)
        collate = self.collate if draws is None else partial(draws.collated, self.collate)
        if self._ring is None:
            self._ring = WorkerRing(self.receiver, self.slots, worker.dataset)
        return self._ring.send(collate, samples)


def _fetch_of_worker_loop() -> FrameType | None:
    """Return the call of torch's fetcher that a ``RingCollate`` returns to.

    None if it returns to other code, or in another thread than a worker process's own: the caller
    then needs the batch itself.
    """
    # torch passes neither this nor the indices to a collate function, so that the frames of the
    # callers are read. In torch 2.4 to 2.13 a worker's loop, a function in ``_utils.worker``, calls
    # a method of a class in ``_utils.fetch`` with the indices, and that the collate function. Names
    # of functions and arguments differ between versions and are not used.
    frame = sys._getframe(2)
    caller = frame.f_back
    if threading.current_thread() is not threading.main_thread():
        return None
    if caller is not None and _module_of(caller) == _LOOP_MODULE:
        return frame if _module_of(frame) == _FETCH_MODULE else None
    _warn_of_unknown_loop(frame)
    return None


def _module_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


@cache
def _warn_once(text: str) -> None:
    warn_user(text)


def _warn_of_unknown_loop(frame: FrameType) -> None:
    """Warn once in each worker process whose loop is not found among its frames."""
    caller: FrameType | None = frame
    while caller is not None:
        if _module_of(caller) == _LOOP_MODULE:
            return  # a collate function or a loader of the user's runs in the worker
        caller = caller.f_back
    _warn_once(
        "batches of this worker process travel through its own queue, which takes longer than "
        f"through fastdata's ring: no function of {_LOOP_MODULE} of torch {torch.__version__} runs "
        "it. Use torch's or fastdata's DataLoader, and a version of torch that fastdata knows."
    )


# The worker's end


class WorkerRing:
    """The slots of one worker, of which one at a time is filled."""

    def __init__(self, receiver: BatchReceiver, slots: int, dataset: Any = None) -> None:
        self._receiver = receiver
        self._slots = [Slot() for _ in range(slots)]
        self._filled: Slot | None = None
        dataset = getattr(dataset, "behind", dataset)
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        # It gathers its batches straight into a slot, by ``lease``.
        _worker_rings[id(dataset)] = self

    def lease(self, size_bytes: int) -> memoryview:
        self._begin()
        memory = None if self._filled is None else self._filled.reserve(size_bytes)
        return memory or new_buffer(size_bytes)

    def send(self, collate: Collate, samples: Any) -> SentBatch:
        if self._filled is None:
            self._begin()
        try:
            batch = self._collate(collate, samples)
            packed = None if self._filled is None else self._filled.pack(batch)
            if packed is None:
                packed = None, [], bytes(ForkingPickler.dumps(batch))
            return SentBatch(self._receiver.receive, *packed)
        finally:
            self._end()

    def _begin(self) -> None:
        """Choose a free slot to fill; none if all are lent."""
        self._end()  # of a batch that never came
        self._filled = next((slot for slot in self._slots if slot.is_free), None)
        if self._filled is not None:
            self._filled.lease()

    def _end(self) -> None:
        if self._filled is not None:
            self._filled.leased = None
            self._filled = None

    def _collate(self, collate: Collate, samples: Any) -> Any:
        """Collate; torch's ``default_collate`` stacks tensors straight into the slot."""
        functions = torch_collate.default_collate_fn_map
        torchs = torch_collate.collate_tensor_fn
        if self._filled is None or functions.get(torch.Tensor) is not torchs:
            return collate(samples)  # maybe by what the user has set
        functions[torch.Tensor] = self._filled.stack
        try:
            return collate(samples)
        finally:
            functions[torch.Tensor] = torchs


_worker_rings: weakref.WeakValueDictionary[int, WorkerRing] = weakref.WeakValueDictionary()
"""By the dataset that a worker process reads."""


def ring_of(dataset: Any) -> WorkerRing | None:
    """Where a dataset's batches are to lie, in the worker process that reads it."""
    return _worker_rings.get(id(dataset))


class Slot:
    """A shared block of this worker, filled from front to back.

    Attributes:
        memory: of the block; only a state before the first batch.
        address: where the training loop finds it; None before the first batch.
        leased: the memory, while a batch is brought into it: an array that lives as long as anything
            over it in this process.
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
        return self.memory[0] == FREE and self._latest() is None

    def lease(self) -> None:
        self.leased = self.memory[:]
        self._latest = weakref.ref(self.leased)
        self._end = STATE_BYTES

    def reserve(self, size_bytes: int) -> memoryview | None:
        """The next bytes, or None if it is full."""
        start = self._end
        if self.leased is None or start + size_bytes > self.leased.nbytes:
            return None
        self._end = _aligned(start + size_bytes)
        return self.leased.data[start : start + size_bytes]

    def stack(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        """Torch's ``collate_tensor_fn``, which stacks plain tensors here."""
        first = batch[0]
        if all(type(sample) is torch.Tensor and is_plain(sample) for sample in batch):
            memory = self.reserve(len(batch) * first.nbytes)
            if not memory:
                return torch.stack(tuple(batch))  # whose error names sizes that differ
            out = torch.frombuffer(memory, dtype=first.dtype)
            return torch.stack(tuple(batch), 0, out=out.view(len(batch), *first.shape))
        return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)

    def pack(self, batch: Any) -> tuple[SlotAddress | None, Spans, bytes] | None:
        """Bring every part of a batch here; None where there is no memory for it."""
        packer = _Packer(self)
        packer.dump(batch)
        parts = [np.frombuffer(part.raw(), np.uint8) for part in packer.parts]
        try:
            spans = self._lay_out(parts)
        except MemoryBudgetError:
            return None
        self.memory[0] = LEASED
        return self.address, spans, packer.file.getvalue()

    def offset_of(self, part: Array) -> int | None:
        """Where a part lies that was made here; None of any other."""
        offset = part.ctypes.data - self.memory.ctypes.data
        return offset if 0 <= offset <= self.memory.nbytes - part.nbytes else None

    def _lay_out(self, parts: list[Array], *, is_full: bool = False) -> Spans:
        """Copy what is not here."""
        if is_full or self.address is None:
            self._grow(sum(_aligned(part.nbytes) for part in parts))
        spans = []
        for part in parts:
            start = self.offset_of(part)
            if start is None:
                start = self._end
                memory = self.reserve(part.nbytes)
                if memory is None:
                    return self._lay_out(parts, is_full=True)
                memory[:] = part.data
            spans.append((start, part.nbytes))
        return spans

    def _grow(self, size_bytes: int) -> None:
        """Take a larger block, or raise and stay; the old one stays valid for those who see it."""
        # Batches differ in size: leave room from the second on.
        size_bytes += STATE_BYTES + (size_bytes // 8 if self._block else 0)
        block = Block.create(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        if self._block:
            self._block.close()
        self._block = block
        self.memory = block.array("uint8", (block.size_bytes,))
        self.address = SlotAddress(os.getpid(), self._name, pickle.dumps(block))
        self.lease()


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


# A batch as a pickle of its structure, and the memory of its tensors and arrays apart


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape, strides and memory are all there is to it."""
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
    """Pickles a batch; the memory of tensors and arrays goes to ``parts``, views without a copy.

    A tensor brings its whole storage, which others may share; where that is much larger than the
    tensor and not in the slot, torch's way does.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.file = io.BytesIO()
        self.parts: list[pickle.PickleBuffer] = []
        super().__init__(self.file, 5, buffer_callback=self.parts.append)
        # Torch's way for all other tensors.
        self.dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table
        self._storages: dict[int, Array] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and not value.flags.writeable:
            return value.copy("K").__reduce_ex__(5)  # through torch's queue it may be written to
        if type(value) is not torch.Tensor or not is_plain(value) or not value.numel():
            return NotImplemented
        storage = value.untyped_storage()
        octets = self._storages.get(storage.data_ptr())
        if octets is None:
            octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            is_small = octets.nbytes > _WHOLE_STORAGE * value.nbytes
            if is_small and self._slot.offset_of(octets) is None:
                return NotImplemented
            self._storages[storage.data_ptr()] = octets
        offset = value.storage_offset()
        size = tuple(value.shape)
        strides = value.stride()
        return _tensor, (octets, value.dtype, offset, size, strides)


def _tensor(
    octets: Array, dtype: torch.dtype, offset: int, size: Shape, strides: Shape
) -> torch.Tensor:
    storage = torch.frombuffer(octets, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, strides)


# The training loop's end


class SentBatch:
    """A batch on its way: who receives it, and of what; unpickling it gives the batch."""

    def __init__(self, receive: Callable[..., Any], *sent: Any) -> None:
        self._sent = receive, sent

    def __reduce__(self) -> Any:
        return self._sent


class BatchReceiver:
    """The slots of workers that this process has mapped; those of ended workers are dropped."""

    def __init__(self, token: str) -> None:
        self._token = token
        self.fresh_count = 0  # batches that came in torch's way, because all slots were lent
        # By name: the address, and who is told when the latest batch dies.
        self._mapped: dict[str, tuple[SlotAddress, Lease]] = {}

    def __reduce__(self) -> Any:
        return BatchReceiver.of, (self._token,)

    @classmethod
    def of(cls, token: str) -> BatchReceiver:
        """Return the one that all copies of a ``RingCollate`` in this process share."""
        return _receivers.setdefault(token, cls(token))

    @property
    def bytes_held(self) -> int:
        self._drop_ended()
        return sum(lease.buffer.nbytes for _, lease in list(self._mapped.values()))

    def receive(self, address: SlotAddress | None, spans: Spans, data: bytes) -> Any:
        """The batch of this structure, whose parts lie in spans of a slot.

        Without one ``data`` is all of it.
        """
        if address is None:
            self.fresh_count += 1
            return pickle.loads(data)
        # Its slices keep it lent, and so does all that is made of them.
        whole = self.borrow(address)
        return pickle.loads(data, buffers=[whole[start : start + size] for start, size in spans])

    def borrow(self, address: SlotAddress) -> memoryview:
        """The memory of a slot, which is given back when the last that is made of it dies."""
        known, lease = self._mapped.get(address.name, (None, None))
        if lease is not None and known == address:
            memory = lease.buffer
        else:
            self._drop_ended()
            try:
                with closing(pickle.loads(address.block)) as opened:
                    memory = opened.array("uint8", (opened.size_bytes,))
            except StoreGoneError:
                raise StoreGoneError(
                    f"the DataLoader worker (pid {address.pid}) has ended, and this batch with it"
                ) from None
        leased = memory[:]
        lease = Lease(leased, _GIVE_BACK)
        lease.buffer = memory
        lease.set_state = memory[:1].fill
        self._mapped[address.name] = address, lease
        return leased.data

    def _drop_ended(self) -> None:
        """Forget the slots of workers that have ended."""
        for address, _ in list(self._mapped.values()):
            if not is_running(address.pid):
                self._mapped.pop(address.name, None)


_receivers: weakref.WeakValueDictionary[str, BatchReceiver] = weakref.WeakValueDictionary()
_GIVE_BACK = operator.methodcaller("set_state", FREE)


def _forget_leases() -> None:
    """Have a forked process drop what it inherits: the batches are still its parent's."""
    for receiver in list(_receivers.values()):
        receiver._mapped.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_leases)
