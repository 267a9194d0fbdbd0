"""The training loop's end of the transport: batches over the mapped slots of workers."""

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
    """A batch on its way to the training loop. Unpickling it there gives the batch itself."""

    def __init__(self, receive: Callable[..., Any], *sent: Any) -> None:
        self._sent = receive, sent

    def __reduce__(self) -> Any:
        return self._sent


class BatchReceiver:
    """The slots of workers that this process has mapped; those of ended workers are dropped.

    Attributes:
        fresh_count: number of batches that came in torch's way, because all slots were leased.
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
        """Return the one that all copies of a ``RingCollate`` in this process share."""
        return _receivers.setdefault(token, cls(token))

    @property
    def bytes_held(self) -> int:
        self._drop_ended()
        return sum(lease.buffer.nbytes for _, lease in list(self._mapped.values()))

    def receive(self, address: SlotAddress | None, spans: Spans, data: bytes) -> Any:
        """Return the batch of which ``data`` is the structure, and ``spans`` of a slot the parts.

        Without an ``address`` all of the batch is in ``data``.
        """
        if address is None:
            self.fresh_count += 1
            return pickle.loads(data)
        # The slot stays leased while a slice of its memory lives, or a tensor over a slice.
        whole = self.borrow(address)
        return pickle.loads(data, buffers=[whole[start : start + size] for start, size in spans])

    def borrow(self, address: SlotAddress) -> memoryview:
        """Return the memory of a slot, which is given back when the last tensor over it dies."""
        known, lease = self._mapped.get(address.name, (None, None))
        if lease is not None and known == address:
            memory = lease.buffer  # mapped already; a slot that has grown has another address
        else:
            self._drop_ended()
            # Opened by the worker's descriptor, which must be open until here; the worker closes it
            # only when the slot is free. Our own is closed at once: the mapping does not need it,
            # and a process may have few descriptors.
            try:
                with closing(pickle.loads(address.block)) as opened:
                    memory = opened.array("uint8", (opened.size_bytes,))
            except StoreGoneError:
                raise StoreGoneError(
                    f"the DataLoader worker (pid {address.pid}) has ended, and this batch with it"
                ) from None
        # When ``leased`` dies, which every view of it keeps alive, the lease sets the first byte of
        # the slot to FREE. No line of Python runs then, as it could in any thread at any moment.
        # The lease before this one has run: a worker fills a slot again only once it is FREE.
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
    """Forget leases in a forked process: the batches are still its parent's.

    Otherwise a slot would be freed when the copy of a batch dies in the child.
    """
    for receiver in list(_receivers.values()):
        receiver._mapped.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_leases)
