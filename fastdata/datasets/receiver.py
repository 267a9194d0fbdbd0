"""The training loop's end of the transport: batches over the mapped slots of workers."""

from __future__ import annotations

import operator
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
