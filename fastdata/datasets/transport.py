"""Batches from worker processes, in memory that is reused once the user has freed it.

torch's queue between processes makes and maps new memory for each batch. A worker's ring uses the
same few shared blocks again and again, as ``BatchRing`` does within a process:

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

    torch makes new shared memory for each batch; this class uses a few blocks (a ring) again and
    again, which takes less time. Pass it to any ``torch.utils.data.DataLoader`` as ``collate_fn``.
    ``fastdata.DataLoader`` uses it by itself. In a worker process it must be the ``collate_fn``
    itself, and not be called by another one. Anywhere else, for example with ``num_workers=0``, it
    only calls ``collate``.

    The batch may be any nesting that can be pickled. Plain CPU tensors and contiguous NumPy arrays
    in it travel through the ring and keep dtype, shape and strides. Sparse, quantized and
    gradient-requiring tensors and tensor subclasses travel through torch's queue. You may keep a
    batch as long as you like: its memory is reused only when the last tensor over it is freed. A
    process that you fork meanwhile must copy the batch before its parent drops it.
    ``default_collate``, even if ``collate`` calls it, stacks samples directly into the ring.

    Args:
        collate: function that turns samples into a batch, like a DataLoader's ``collate_fn``.
        slots: number of batches per worker that may be in transit, or held by the training loop, at
            the same time. Further batches travel through torch's queue. Slots are made when needed,
            and each is as large as the largest batch that it has carried.

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
            raise ValueError(f"slots={slots} must be 1 or more: a worker needs a slot for a batch")
        self.collate = collate
        self.slots = slots
        self.receiver = BatchReceiver.of(secrets.token_hex(8))
        self._ring: WorkerRing | None = None

    def __call__(self, samples: Any) -> Any:
        worker = get_worker_info()
        fetch = None if worker is None else _fetch_of_worker_loop()
        if worker is None or fetch is None:
            return self.collate(samples)
        # A loader of fastdata has numbered the batch, for the draws of the collate function.
        numbered = (it.draws for it in fetch.f_locals.values() if isinstance(it, IndexBatch))
        draws = next(numbered, None)
        collate = self.collate if draws is None else partial(draws.collate, self.collate)
        if self._ring is None:  # made here, so that each worker process has its own ring
            self._ring = WorkerRing(self.receiver, self.slots, worker.dataset)
        return self._ring.send(collate, samples)


def _fetch_of_worker_loop() -> FrameType | None:
    """Return the frame of torch's fetcher that has called a ``RingCollate``.

    Return None if other code has called it, or another thread than the worker's main thread. Such a
    caller needs the batch itself.
    """
    # torch passes neither its caller nor the indices to a collate function, so the frames of the
    # callers are read. In torch 2.4 to 2.13 a worker's loop, a function in ``_utils.worker``, calls
    # a method of a class in ``_utils.fetch`` with the indices, and this calls the collate function.
    # The names of functions and arguments differ between versions, so they are not used.
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
            return  # the user's own collate function or loader calls it in the worker
        caller = caller.f_back
    _warn_once(
        "batches of this worker process do not travel through fastdata's ring, which would be "
        f"faster: no function of {_LOOP_MODULE} of torch {torch.__version__} is running this "
        "process. Use the DataLoader of torch or fastdata, and a version of torch that fastdata "
        "supports."
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
        # The dataset writes its batches directly into a slot. It finds the ring by ``ring_of``.
        _worker_rings[id(dataset)] = self

    def lease(self, size_bytes: int) -> memoryview:
        """Return memory for the next batch: in a slot if one is free, else new memory."""
        self._begin()
        memory = None if self._filled is None else self._filled.reserve(size_bytes)
        return memory or new_buffer(size_bytes)

    def send(self, collate: Collate, samples: Any) -> SentBatch:
        """Collate samples into a slot, and return the object that torch's queue sends instead."""
        if self._filled is None:
            self._begin()
        try:
            batch = self._collate(collate, samples)
            packed = None if self._filled is None else self._filled.pack(batch)
            if packed is None:  # no slot is free, or memory is too small: send the whole batch
                packed = None, [], bytes(ForkingPickler.dumps(batch))
            # The method is pickled with the token of its receiver. In the training loop's process
            # this token leads to the receiver that was made with the collate function.
            return SentBatch(self._receiver.receive, *packed)
        finally:
            self._end()

    def _begin(self) -> None:
        """Choose a free slot to fill, or no slot if all are leased."""
        self._end()  # of a batch that was never sent, because reading its samples failed
        self._filled = next((slot for slot in self._slots if slot.is_free), None)
        if self._filled is not None:
            self._filled.lease()

    def _end(self) -> None:
        """Drop the worker's own reference to the slot, which is free once no view of it exists."""
        if self._filled is not None:
            self._filled.leased = None
            self._filled = None

    def _collate(self, collate: Collate, samples: Any) -> Any:
        """Collate samples. torch's ``default_collate`` stacks tensors directly into the slot."""
        functions = torch_collate.default_collate_fn_map
        torchs = torch_collate.collate_tensor_fn
        if self._filled is None or functions.get(torch.Tensor) is not torchs:
            return collate(samples)  # the user has put another function in this table: keep it
        # Changing the table is safe: it belongs to this process, which collates in one thread only.
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
