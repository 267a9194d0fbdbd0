"""Pinned host memory: what of it there is, how much, and why there is not more."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Hashable, Iterable

import numpy as np

from fastdata import machine
from fastdata.memory import PinningPlan, budget_bytes, choose_pinning
from fastdata.prefetch.backends import Backend
from fastdata.transport import address_of

__all__ = ["PinnedMemory"]

_PAGE_BYTES = 4096


class PinnedMemory:
    """Host memory that a prefetcher has pinned, its own and what it found others' batches in.

    Memory stays mapped as long as it is pinned here. Safe from several threads.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the collector may call ``close`` in a thread that is in here
        self._own: dict[int, np.ndarray] = {}
        self._adopted: dict[Hashable, dict[int, np.ndarray]] = {}
        self._refused: set[tuple[int, int]] = set()
        self.most_bytes = 0
        """The most that was pinned at a time."""
        self.plan = PinningPlan(pin=False, reason="nothing pinned yet")
        """The latest decision; one against pinning stands."""

    @property
    def bytes(self) -> int:
        """How much is pinned now."""
        adopted = (memory for parts in self._adopted.values() for memory in parts.values())
        return sum(memory.nbytes for memory in [*self._own.values(), *adopted])

    def allocate(self, size_bytes: int) -> np.ndarray:
        """Return uint8 memory, pinned if the memory rules and the system allow; ``BatchRing`` takes from here."""
        memory = self.allocate_part(size_bytes, size_bytes, 1) if size_bytes else None
        return np.empty(size_bytes, np.uint8) if memory is None else memory

    def allocate_part(self, size_bytes: int, batch_bytes: int, count: int) -> np.ndarray | None:
        """Return pinned memory for a part of a batch, the first of ``count`` to be allocated; None if it may not be."""
        with self._lock:
            if not self._decide(batch_bytes, size_bytes * count, key=(size_bytes, batch_bytes)):
                return None
            memory = self._backend.allocate_pinned(-(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
            if memory is None:
                self._refuse("the driver has no pinned memory to give", key=(size_bytes, batch_bytes))
                return None
            self._own[address_of(memory)] = memory
            self.most_bytes = max(self.most_bytes, self.bytes)
            return memory

    def free(self, buffer: np.ndarray) -> None:
        """Take back memory that was allocated here, and that no copy reads any more."""
        with self._lock:
            memory = self._own.pop(address_of(buffer), None)
            if memory is not None:
                self._backend.free_pinned(memory)

    def adopt(self, memory: np.ndarray, owner: Hashable) -> bool:
        """Pin memory of others until ``let_go``; whether it is pinned."""
        key = address_of(memory), memory.nbytes
        with self._lock:
            adopted = self._adopted.setdefault(owner, {})
            if key[0] in adopted:
                return True
            if not self._decide(memory.nbytes, memory.nbytes, key=key):
                return False
            if not self._backend.register(memory):
                self._refuse("the driver cannot pin the memory that workers fill", key=key)
                return False
            adopted[key[0]] = memory
            self.most_bytes = max(self.most_bytes, self.bytes)
            return True

    def stale(self, owner: Hashable, current: Iterable[np.ndarray]) -> bool:
        """Whether the owner has adopted memory that is not in ``current``."""
        return not self._adopted.get(owner, {}).keys() <= {address_of(memory) for memory in current}

    def let_go(self, owner: Hashable, kept: Iterable[np.ndarray] = ()) -> None:
        """Unpin what the owner has adopted, but for ``kept``; no copy may read it any more."""
        addresses = {address_of(memory) for memory in kept}
        with self._lock:
            self._refused.clear()
            adopted = self._adopted.pop(owner, {})
            for address in [address for address in adopted if address not in addresses]:
                self._backend.unregister(adopted.pop(address))
            if adopted:
                self._adopted[owner] = adopted

    def close(self) -> None:
        """Unpin everything; no copy may read any of it any more. A forked process leaves it to its parent."""
        if os.getpid() != self._pid:
            return
        for owner in list(self._adopted):
            self.let_go(owner)
        with self._lock:
            while self._own:
                self._backend.free_pinned(self._own.popitem()[1])

    def _decide(self, batch_bytes: int, more_bytes: int, *, key: tuple[int, int]) -> bool:
        if key in self._refused:
            return False
        held_bytes = self.bytes
        free = budget_bytes(machine.available_bytes())
        plan = choose_pinning(
            has_accelerator=self._backend.can_pin,
            batch_bytes=batch_bytes,
            pinned_bytes=held_bytes + more_bytes,
            budget=dataclasses.replace(free, bytes=free.bytes + held_bytes),  # what is pinned was free once
            copies_wait=True,
        )
        if not self.plan.is_short:
            self.plan = plan
        if not plan.pin:
            self._refused.add(key)
        return plan.pin

    def _refuse(self, reason: str, *, key: tuple[int, int]) -> None:
        self._refused.add(key)
        self.plan = PinningPlan(pin=False, reason=f"not pinned: {reason}", is_short=True)
