"""The collate function that sends batches through a ring."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as torch_fetch
from torch.utils.data._utils.worker import _worker_loop

from fastdata.batch import collate as default_collate
from fastdata.transport.arrivals import Arrivals
from fastdata.transport.slots import Ring

__all__ = ["RingCollate"]

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
    Only a process that is forked while a batch lives must copy what it uses after its parent has let go of it.
    ``default_collate``, also when called by ``collate``, stacks straight into the ring.

    Args:
        collate: turns samples into a batch, as a DataLoader's ``collate_fn``.
        slots: batches per worker that may be under way or held by the training loop at a time; further ones travel in
            torch's way. Slots are made when needed, each as large as the largest batch it carried.

    Example:
        >>> import torch
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
        self._ring: Ring | None = None
        self.arrivals = Arrivals.of(self._token)
        """What this process holds of the workers' rings."""

    def __call__(self, samples: Any) -> Any:
        """Collate; in a worker process return a ``Parcel`` that unpickles as the batch."""
        worker = get_worker_info()
        if worker is None or not _called_by_worker_loop():
            return self.collate(samples)
        if self._ring is None or self._ring.pid != os.getpid():
            self._ring = Ring(self._token, self.slots)
            self._ring.serve(worker.dataset)
        return self._ring.send(self.collate, samples)

    def __getstate__(self) -> dict[str, Any]:
        return {"collate": self.collate, "slots": self.slots, "_token": self._token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ring=None, arrivals=Arrivals.of(state["_token"]))


def _called_by_worker_loop() -> bool:
    """Whether ``RingCollate.__call__`` returns to a worker's main loop, which sends what it gets.

    Worker processes may also have loaders of their own, which hand batches to code in the same process.
    """
    fetch = sys._getframe(2)
    return fetch.f_code in _FETCHES and fetch.f_back is not None and fetch.f_back.f_code is _worker_loop.__code__
