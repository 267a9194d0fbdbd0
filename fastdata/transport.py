"""Batches from a worker process to the training loop without fresh memory.

torch's queue puts every tensor of every batch into a new shared file, whose pages are faulted in twice. Here a worker
lays a batch out in a slot, a shared block that it uses again and again, and sends where the parts lie. The training
loop gets tensors over the slot; the slot is free again when the last of them has died.

    worker:  samples -> collate, stacking into a free slot -> Parcel (pickle of the structure, place of the slot)
    parent:  unpickling a Parcel -> the structure, with tensors and arrays over the mapped slot

The first byte of a slot says whose turn it is. Only its owner writes it: the worker lends, the parent gives back. The
slots belong to the worker, so that those of a killed one are garbage that the kernel collects with its last mapping.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Subset, get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import fetch as torch_fetch
from torch.utils.data._utils.worker import _worker_loop

from fastdata.batch import collate as default_collate
from fastdata.blocks import Block
from fastdata.errors import MemoryBudgetError, StoreGoneError

__all__ = ["Arrivals", "LostBatchError", "RingCollate"]

_ALIGN_BYTES = 64
_PAGE_BYTES = 4096
_STATE_BYTES = _ALIGN_BYTES
"""The state byte has a cache line of its own before the data."""
_FREE, _LENT = 0, 1
_WHOLE_STORAGE = 4
"""A tensor travels with its whole storage, as in torch, unless that is more than so many times its own extent."""
_UNCOUNTED = ""
"""Token of a parcel that holds nothing that could travel through a ring."""
_FETCHES = tuple(
    fetcher.fetch.__code__ for fetcher in (torch_fetch._MapDatasetFetcher, torch_fetch._IterableDatasetFetcher)
)


class RingCollate:
    """A collate function that sends batches from worker processes through reused shared memory.

    Give it to any ``torch.utils.data.DataLoader`` as ``collate_fn``; ``fastdata.DataLoader`` uses it by itself. In a
    worker process it must be the ``collate_fn`` itself, not called by another one. Anywhere else, as with
    ``num_workers=0``, it is ``collate``.

    The batch may be any nesting that pickles. Plain CPU tensors and contiguous NumPy arrays in it travel through the
    ring and keep dtype, shape and strides; sparse, quantized, gradient-requiring tensors and tensor subclasses travel
    in torch's way. What the training loop receives is its own: memory is reused when the last tensor over it has died.
    ``default_collate``, also when called by ``collate``, stacks straight into the ring.

    Args:
        collate: turns samples into a batch, as a DataLoader's ``collate_fn``.
        slots: batches per worker that may be under way or held by the training loop at a time; further ones travel in
            torch's way. Slots are made when needed, each as large as the largest batch it carried.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(torch.arange(6), batch_size=3, num_workers=1, collate_fn=RingCollate())
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
    """

    def __init__(self, collate: Callable[[Any], Any] = default_collate, *, slots: int = 8) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: a worker needs at least one slot")
        self.collate, self.slots = collate, slots
        self._token = secrets.token_hex(8)
        self._ring: _Ring | None = None
        self.arrivals = Arrivals.of(self._token)
        """What this process holds of the workers' rings."""

    def __call__(self, samples: Any) -> Any:
        """Collate; in a worker process return a ``Parcel`` that unpickles as the batch."""
        if not _called_by_worker_loop():
            return self.collate(samples)
        if self._ring is None or self._ring.pid != os.getpid():
            self._ring = _Ring(self._token, self.slots)
            self._ring.serve(get_worker_info().dataset)  # type: ignore[union-attr]  # the worker loop has set it
        return self._ring.send(self.collate, samples)

    def __getstate__(self) -> dict[str, Any]:
        return {"collate": self.collate, "slots": self.slots, "_token": self._token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ring=None, arrivals=Arrivals.of(state["_token"]))


def _called_by_worker_loop() -> bool:
    """Whether ``RingCollate.__call__`` returns to a worker's main loop, which sends what it gets.

    Worker processes may also have loaders of their own, which hand batches to code in the same process.
    """
    if get_worker_info() is None:
        return False
    fetch = sys._getframe(2)
    return fetch.f_code in _FETCHES and fetch.f_back is not None and fetch.f_back.f_code is _worker_loop.__code__


# In the worker


class _Place(NamedTuple):
    """Where the parent finds a slot: in which worker's ring, which one, and the pickled block, for the first time."""

    ring: str
    slot: int
    block_number: int
    descriptor: str
    block: bytes


class _Parcel:
    """A batch on its way; unpickling it gives the batch."""

    def __init__(self, token: str, place: _Place | None, spans: list[tuple[int, int]], data: bytes) -> None:
        self._parts = token, place, spans, data

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, self._parts


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
        return self.memory[0] == _FREE and (self.lease is None or self.lease() is None)

    def replace(self, size_bytes: int) -> None:
        """Take a larger block; memory of the old one stays valid for those who see it.

        Raises:
            MemoryBudgetError: there is not so much memory; the slot stays as it is.
        """
        block = Block.create(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        if self.block:
            self.block.close()
        self.block, self.number = block, self.number + 1
        self.memory = block.array("uint8", (block.size_bytes,))
        self.pickled = pickle.dumps(block)
        self.descriptor = f"/proc/{os.getpid()}/fd/{block.__reduce__()[1][0].fd}"  # type: ignore[index]

    def lend(self) -> np.ndarray:
        """Return the slot's memory as an array that keeps it from being taken again while anything sees it."""
        lease = self.memory[:]
        self.lease = weakref.ref(lease)
        return lease


class _Ring:
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
        while type(dataset) is Subset:
            dataset = dataset.dataset
        if hasattr(dataset, "batch_ring"):
            dataset.batch_ring = self

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Lend the array that the coming batch is made of, as ``BatchRing.take`` does."""
        self._next = self._begin()
        memory = self._next.reserve(math.prod(shape) * dtype.itemsize) if self._next else None
        return np.empty(shape, dtype) if memory is None else np.frombuffer(memory, dtype).reshape(shape)

    def send(self, collate: Callable[[Any], Any], samples: Any) -> _Parcel:
        """Collate into a free slot, else in torch's way."""
        filling, self._next = self._next or self._begin(), None
        if filling is None:
            return self._by_torch(collate(samples))
        with _stacking_into(filling):
            batch = collate(samples)
        try:
            spans, data = filling.pack(batch)
        except (MemoryBudgetError, _StorageSharedError):
            return self._by_torch(batch)
        if not spans:
            return _Parcel(_UNCOUNTED, None, [], data)
        slot = filling.slot
        slot.memory[0] = _LENT
        place = _Place(self.name, self._slots.index(slot), slot.number, slot.descriptor, slot.pickled)
        return _Parcel(self._token, place, spans, data)

    def _by_torch(self, batch: Any) -> _Parcel:
        return _Parcel(self._token, None, [], bytes(ForkingPickler.dumps(batch)))

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

    def __init__(self, ring: _Ring, slot: _Slot) -> None:
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
        packer = _Packer(self._lease)
        data = packer.pack(batch)
        starts, end = self._lay_out(packer.parts, self._lease)
        if end > self._lease.nbytes:
            grown = self.slot.number >= 0
            starts, end = self._lay_out(packer.parts, None)
            self.slot.replace(end + end // 8 if grown else end)  # batches that differ in size: leave room for others
            self._lease = self.slot.lend()
        self._ring.largest_bytes = max(self._ring.largest_bytes, end)
        base = _address(self._lease)
        for part, start in zip(packer.parts, starts, strict=True):
            if _address(part) != base + start:
                self._lease[start : start + part.nbytes] = part
        return [(start, part.nbytes) for start, part in zip(starts, packer.parts, strict=True)], data

    def _lay_out(self, parts: list[np.ndarray], lease: np.ndarray | None) -> tuple[list[int], int]:
        """Offsets of the parts, those in ``lease`` where they are and the others behind; and the end."""
        starts, end = [], self._end if lease is not None else _STATE_BYTES
        for part in parts:
            if lease is not None and _lies_in(part, lease):
                starts.append(_address(part) - _address(lease))
            else:
                starts.append(end)
                end = _aligned(end + part.nbytes)
        return starts, end


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _lies_in(part: np.ndarray, whole: np.ndarray) -> bool:
    start = _address(part) - _address(whole)
    return start >= 0 and start + part.nbytes <= whole.nbytes


@contextlib.contextmanager
def _stacking_into(filling: _Filling) -> Iterator[None]:
    """Make ``default_collate`` stack into the slot, whoever calls it, where torch makes a new shared file."""
    functions: Any = torch_collate.default_collate_fn_map
    torchs = functions.get(torch.Tensor)

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if not all(type(sample) is torch.Tensor and _is_plain(sample) for sample in batch) or not first.numel():
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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape, strides and memory are all there is to it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


class _StorageSharedError(Exception):
    """Two tensors of a batch are small parts of one large storage: in torch's way they stay parts of one."""


class _Packer(pickle.Pickler):
    """Pickles a batch, and puts the memory of its tensors and arrays aside as ``parts``: views, nothing is copied.

    Args:
        lease: memory that need not be copied to travel, so that storages in it always travel whole.
    """

    def __init__(self, lease: np.ndarray) -> None:
        self._lease = lease
        self._file = io.BytesIO()
        parts: list[np.ndarray] = []
        self.parts = parts
        # A callback that held the packer would make a cycle, and the slot's lease live until it is collected.
        super().__init__(self._file, 5, buffer_callback=lambda part: parts.append(np.frombuffer(part.raw(), np.uint8)))
        self.dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table  # torch's way for all other tensors
        self._storages: dict[int, np.ndarray | None] = {}  # None: only a part of it was sent

    def pack(self, batch: Any) -> bytes:
        """Return the pickle."""
        self.dump(batch)
        return self._file.getvalue()

    def reducer_override(self, value: Any) -> Any:
        """Reduce a plain tensor to the bytes behind it; the same bytes for tensors that share a storage."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return NotImplemented
        size, strides, dtype = tuple(value.shape), value.stride(), value.dtype
        if not value.numel():
            return _tensor, (None, dtype, 0, size, strides)
        offset = value.storage_offset()
        storage = value.untyped_storage()
        key = storage.data_ptr()
        extent = 1 + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
        if key not in self._storages:
            octets = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            if octets.nbytes > _WHOLE_STORAGE * extent * value.itemsize and not _lies_in(octets, self._lease):
                self._storages[key] = None
                start = offset * value.itemsize
                octets = octets[start : start + extent * value.itemsize]
                return _tensor, (octets, dtype, 0, size, strides)
            self._storages[key] = octets
        if self._storages[key] is None:
            raise _StorageSharedError
        return _tensor, (self._storages[key], dtype, offset, size, strides)


def _tensor(
    octets: np.ndarray | None, dtype: torch.dtype, offset: int, size: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Make a tensor over ``octets``, which it keeps alive; None for a tensor without elements."""
    if octets is None:
        return torch.empty_strided(size, strides, dtype=dtype)
    storage = torch.frombuffer(octets, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, strides)


# In the parent


class LostBatchError(StoreGoneError):
    """A batch arrived after the process that holds its memory had ended."""


class _Mapped(NamedTuple):
    block_number: int
    descriptor: str
    memory: np.ndarray


class Arrivals:
    """The slots of workers that this process has mapped, each once; those of ended workers are dropped."""

    def __init__(self) -> None:
        self.fresh_count = 0
        """Batches that came in torch's way, because all slots were lent or for what they hold."""
        self._rings: dict[str, dict[int, _Mapped]] = {}

    @classmethod
    def of(cls, token: str) -> Arrivals:
        """Return the one that all copies of a ``RingCollate`` in this process share."""
        return _arrivals.setdefault(token, cls())

    @property
    def bytes_held(self) -> int:
        """Memory of all slots that batches have come in, lent or free."""
        return sum(slot.memory.nbytes for ring in list(self._rings.values()) for slot in list(ring.values()))

    def receive(self, place: _Place, spans: list[tuple[int, int]], data: bytes) -> Any:
        """Rebuild a batch over its slot; give the slot back when nothing sees it any more."""
        mapped = self._map(place)
        lease = mapped.memory[:]
        weakref.finalize(lease, _give_back, mapped, os.getpid(), weakref.ref(self), place.ring).atexit = False
        whole = lease.data  # its slices keep the lease alive, and so does all that is made of them
        return pickle.loads(data, buffers=[whole[start : start + size] for start, size in spans])

    def drop(self, ring: str) -> None:
        """Forget the slots of a worker; batches in them stay valid."""
        self._rings.pop(ring, None)

    def _map(self, place: _Place) -> _Mapped:
        slots = self._rings.setdefault(place.ring, {})
        mapped = slots.get(place.slot)
        if mapped is None or mapped.block_number != place.block_number:
            for name, ring in list(self._rings.items()):
                if any(_has_ended(slot.descriptor) for slot in list(ring.values())[:1]):
                    self.drop(name)
            with pickle.loads(place.block) as block:
                memory = block.array("uint8", (block.size_bytes,))
            mapped = _Mapped(place.block_number, place.descriptor, memory)
            self._rings.setdefault(place.ring, slots)[place.slot] = mapped
        return mapped


_arrivals: weakref.WeakValueDictionary[str, Arrivals] = weakref.WeakValueDictionary()


def _receive(token: str, place: _Place | None, spans: list[tuple[int, int]], data: bytes) -> Any:
    """Unpickle a parcel: the batch, or where its worker has died, an error for the loader to raise."""
    arrivals = Arrivals.of(token)
    if place is None:
        arrivals.fresh_count += token != _UNCOUNTED
        return pickle.loads(data)
    try:
        return arrivals.receive(place, spans, data)
    except StoreGoneError:
        pid = place.descriptor.split("/")[2]
        lost = LostBatchError(f"the DataLoader worker (pid {pid}) has ended, and this batch with it.")
        return ExceptionWrapper((type(lost), lost, None), "when a batch was received")  # type: ignore[no-untyped-call]


def _give_back(mapped: _Mapped, pid: int, arrivals: weakref.ref[Arrivals], ring: str) -> None:
    if os.getpid() != pid:  # a forked process drops what it inherited; the batch is still its parent's
        return
    mapped.memory[0] = _FREE
    owner = arrivals()
    if owner is not None and _has_ended(mapped.descriptor):
        owner.drop(ring)


def _has_ended(descriptor: str) -> bool:
    """Whether the process behind ``/proc/PID/fd/FD`` is gone, as far as this system can tell."""
    return os.path.exists("/proc/self/fd") and not os.path.lexists(descriptor)
