"""Batches as they arrive in the training loop: tensors over slots, which are given back when the last one dies."""

from __future__ import annotations

import os
import pickle
import weakref
from typing import Any, NamedTuple

import numpy as np
from torch._utils import ExceptionWrapper

from fastdata.errors import StoreGoneError

__all__ = ["FREE", "LENT", "UNCOUNTED", "Arrivals", "LostBatchError", "Parcel", "Place"]

FREE, LENT = 0, 1
"""What the first byte of a slot says. Only its owner writes it: the worker lends, the parent gives back."""
UNCOUNTED = ""
"""Token of a parcel that holds nothing that could travel through a ring."""


class Place(NamedTuple):
    """Where the parent finds a slot: in which worker's ring, which one, and the pickled block, for the first time."""

    ring: str
    slot: int
    block_number: int
    descriptor: str
    block: bytes


class Parcel:
    """A batch on its way; unpickling it gives the batch."""

    def __init__(self, token: str, place: Place | None, spans: list[tuple[int, int]], data: bytes) -> None:
        self._parts = token, place, spans, data

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, self._parts


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
        return sum(memory.nbytes for memory in self.slots)

    @property
    def slots(self) -> list[np.ndarray]:
        """Memory of each slot, as long as no larger block has replaced it and its worker lives."""
        return [slot.memory for ring in list(self._rings.values()) for slot in list(ring.values())]

    def receive(self, place: Place, spans: list[tuple[int, int]], data: bytes) -> Any:
        """Rebuild a batch over its slot; give the slot back when nothing sees it any more."""
        mapped = self._map(place)
        lease = mapped.memory[:]
        weakref.finalize(lease, _give_back, mapped, os.getpid(), weakref.ref(self), place.ring).atexit = False
        whole = lease.data  # its slices keep the lease alive, and so does all that is made of them
        return pickle.loads(data, buffers=[whole[start : start + size] for start, size in spans])

    def drop(self, ring: str) -> None:
        """Forget the slots of a worker; batches in them stay valid."""
        self._rings.pop(ring, None)

    def _map(self, place: Place) -> _Mapped:
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


def _receive(token: str, place: Place | None, spans: list[tuple[int, int]], data: bytes) -> Any:
    """Unpickle a parcel: the batch, or where its worker has died, an error for the loader to raise."""
    if token == UNCOUNTED:
        return pickle.loads(data, buffers=[bytearray() for _ in spans])
    arrivals = Arrivals.of(token)
    if place is None:
        arrivals.fresh_count += 1
        return pickle.loads(data)
    try:
        return arrivals.receive(place, spans, data)
    except StoreGoneError:
        pid = place.descriptor.split("/")[2]
        lost = LostBatchError(f"the DataLoader worker (pid {pid}) has ended, and this batch with it.")
        return ExceptionWrapper((type(lost), lost, None), "when a batch was received")


def _give_back(mapped: _Mapped, pid: int, arrivals: weakref.ref[Arrivals], ring: str) -> None:
    if os.getpid() != pid:  # a forked process drops what it inherited; the batch is still its parent's
        return
    mapped.memory[0] = FREE
    owner = arrivals()
    if owner is not None and _has_ended(mapped.descriptor):
        owner.drop(ring)


def _has_ended(descriptor: str) -> bool:
    """Whether the process behind ``/proc/PID/fd/FD`` is gone, as far as this system can tell."""
    return os.path.exists("/proc/self/fd") and not os.path.lexists(descriptor)
