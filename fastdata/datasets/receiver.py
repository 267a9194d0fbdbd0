"""The training loop's side of the transport: batches over the mapped slots of workers."""

from __future__ import annotations

import operator
import os
import pickle
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from fastdata.datasets.buffers import Lease
from fastdata.datasets.slots import FREE
from fastdata.errors import StoreGoneError
from fastdata.machine.blocks import is_running

if TYPE_CHECKING:
    from fastdata.datasets.slots import SlotAddress, Spans


class SentBatch:
    """A batch on its way to the training loop, where unpickling returns the batch itself."""

    def __init__(self, receive: Callable[..., Any], *sent: Any) -> None:
        self._sent = receive, sent

    def __reduce__(self) -> Any:
        return self._sent


class BatchReceiver:
    """The slots of workers that this process has mapped. Those of ended workers are dropped.

    Attributes:
        fresh_count: number of batches that came through torch's queue, because no slot was free.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self.fresh_count = 0
        # By the slot's name: its address, and the lease of the latest batch in it.
        self._mapped: dict[str, tuple[SlotAddress, Lease]] = {}

    def __reduce__(self) -> Any:
        return BatchReceiver.of, (self._token,)

    @classmethod
    def of(cls, token: str) -> BatchReceiver:
        """Return the receiver that all copies of a ``RingCollate`` in this process share."""
        return _receivers.setdefault(token, cls(token))

    @property
    def bytes_held(self) -> int:
        self._drop_ended()
        return sum(lease.buffer.nbytes for _, lease in list(self._mapped.values()))

    def receive(self, address: SlotAddress | None, spans: Spans, data: bytes) -> Any:
        """Return a batch.

        Args:
            address: address of the slot with the batch; None if ``data`` holds all of it.
            spans: offset and size in bytes of each part in the slot.
            data: pickle of the batch, without the parts in the slot.

        Raises:
            StoreGoneError: the worker has ended, and its slot with it.
        """
        if address is None:
            self.fresh_count += 1
            return pickle.loads(data)
        # The slot stays leased as long as a slice of its memory exists, or a tensor over a slice.
        whole = self.borrow(address)
        return pickle.loads(data, buffers=[whole[start : start + size] for start, size in spans])

    def borrow(self, address: SlotAddress) -> memoryview:
        """Return the memory of a slot, which becomes free when the last tensor over it is freed."""
        known, lease = self._mapped.get(address.name, (None, None))
        if lease is not None and known == address:
            memory = lease.buffer  # mapped already: a slot that has grown has another address
        else:
            self._drop_ended()
            # Opened through the worker's descriptor, which must still be open. The worker closes it
            # only when the slot is free. Our own descriptor is closed at once, because the mapping
            # does not need it and a process may have few descriptors.
            try:
                with closing(pickle.loads(address.block)) as opened:
                    memory = opened.array("uint8", (opened.size_bytes,))
            except StoreGoneError:
                raise StoreGoneError(
                    f"the DataLoader worker (pid {address.pid}) has ended, and this batch with it"
                ) from None
        # Every view keeps ``leased`` alive. When it is freed, the lease sets the first byte of the
        # slot to FREE. This runs no line of Python, because it may happen in any thread at any
        # moment. The earlier lease of this slot has run already: a worker fills a slot again only
        # once it is FREE.
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
    """Forget the leases in a forked process, because the batches still belong to its parent.

    Otherwise the parent's slot would become free when the child frees its copy of a batch.
    """
    for receiver in list(_receivers.values()):
        receiver._mapped.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_leases)
