"""Batches from worker processes, in memory that is reused when the user lets go of it.

Torch's queue between processes makes and maps new memory for each batch. A worker's ring hands out
the same few shared blocks again and again, as ``BatchRing`` does within a process:

    worker:  samples -> collate, stacking into a free slot -> SentBatch (pickle of the structure,
        address of the slot)
    parent:  unpickling a SentBatch -> the structure, with tensors and arrays over the mapped slot
"""

from __future__ import annotations

import secrets
import sys
import threading
import weakref
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, get_worker_info
from torch.utils.data._utils import collate as torch_collate

from fastdata.datasets.batch import Collate
from fastdata.datasets.batch import collate as default_collate
from fastdata.datasets.buffers import new_buffer
from fastdata.datasets.receiver import BatchReceiver, SentBatch
from fastdata.datasets.slots import Slot
from fastdata.datasets.visits import IndexBatch
from fastdata.report import warn_user

_LOOP_MODULE = "torch.utils.data._utils.worker"
_FETCH_MODULE = "torch.utils.data._utils.fetch"


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
        # A loader of fastdata's has numbered the batch, for the draws of the collate function.
        numbered = (it.draws for it in fetch.f_locals.values() if isinstance(it, IndexBatch))
        draws = next(numbered, None)
        collate = self.collate if draws is None else partial(draws.collate, self.collate)
        if self._ring is None:  # made here, so that each worker process has its own
            self._ring = WorkerRing(self.receiver, self.slots, worker.dataset)
        return self._ring.send(collate, samples)


def _fetch_of_worker_loop() -> FrameType | None:
    """Return the call of torch's fetcher that a ``RingCollate`` returns to.

    None if it returns to other code, or in another thread than the worker's main one. The caller
    then needs the batch itself.
    """
    # torch passes neither this nor the indices to a collate function, so the frames of the callers
    # are read. In torch 2.4 to 2.13 a worker's loop, a function in ``_utils.worker``, calls a
    # method of a class in ``_utils.fetch`` with the indices, and this calls the collate function.
    # Names of functions and arguments differ between versions and are not used.
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
    """Warn once in each worker process if torch's loop is not among the callers."""
    caller: FrameType | None = frame
    while caller is not None:
        if _module_of(caller) == _LOOP_MODULE:
            return  # a collate function or a loader of the user's runs in the worker
        caller = caller.f_back
    _warn_once(
        "batches of this worker process travel through its own queue, which takes longer than "
        f"through fastdata's ring: no function of {_LOOP_MODULE} of torch {torch.__version__} runs "
        "it. Use torch's or fastdata's DataLoader, and a version of torch that fastdata supports."
    )


class WorkerRing:
    """The slots of one worker process, which fills one at a time."""

    def __init__(
        self, receiver: BatchReceiver, slots: int, dataset: Dataset[Any] | None = None
    ) -> None:
        self._receiver = receiver
        self._slots = [Slot() for _ in range(slots)]
        self._filled: Slot | None = None
        dataset = getattr(dataset, "behind", dataset)
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        # The dataset writes its batches straight into a slot; it finds the ring by ``ring_of``.
        _worker_rings[id(dataset)] = self

    def lease(self, size_bytes: int) -> memoryview:
        """Return memory for the next batch: in a slot if possible, else new."""
        self._begin()
        memory = None if self._filled is None else self._filled.reserve(size_bytes)
        return memory or new_buffer(size_bytes)

    def send(self, collate: Collate, samples: Any) -> SentBatch:
        """Collate samples into a slot, and return what torch's queue sends instead of the batch."""
        if self._filled is None:
            self._begin()
        try:
            batch = self._collate(collate, samples)
            packed = None if self._filled is None else self._filled.pack(batch)
            if packed is None:  # no slot is free, or memory is short: the batch travels itself
                packed = None, [], bytes(ForkingPickler.dumps(batch))
            # The method pickles as that of the receiver with the same token, which in the training
            # loop's process is the one that was made with the collate function.
            return SentBatch(self._receiver.receive, *packed)
        finally:
            self._end()

    def _begin(self) -> None:
        """Choose a free slot to fill; none if all are leased."""
        self._end()  # a batch that was begun and never sent, because reading its samples failed
        self._filled = next((slot for slot in self._slots if slot.is_free), None)
        if self._filled is not None:
            self._filled.lease()

    def _end(self) -> None:
        """Drop the worker's own reference to the slot, which is free when no view of it lives."""
        if self._filled is not None:
            self._filled.leased = None
            self._filled = None

    def _collate(self, collate: Collate, samples: Any) -> Any:
        """Collate samples; torch's ``default_collate`` stacks tensors straight into the slot."""
        functions = torch_collate.default_collate_fn_map
        torchs = torch_collate.collate_tensor_fn
        if self._filled is None or functions.get(torch.Tensor) is not torchs:
            return collate(samples)  # a function of the user's in this table is left alone
        # The table is the process's own, and a worker collates in one thread only.
        functions[torch.Tensor] = self._filled.stack
        try:
            return collate(samples)
        finally:
            functions[torch.Tensor] = torchs


_worker_rings: weakref.WeakValueDictionary[int, WorkerRing] = weakref.WeakValueDictionary()
"""The ring of the worker process for each dataset that it reads, by the id of the dataset."""


def ring_of(dataset: Dataset[Any]) -> WorkerRing | None:
    """Return the ring for the batches of a dataset; None outside of a worker process."""
    return _worker_rings.get(id(dataset))
