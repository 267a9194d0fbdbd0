"""Batch ops of a prefetched loader: on its device, or on the CPU before batches are sent there; and stores kept there.

Shape letters: N stored samples, C channels, H W stored size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from fastdata.datasets.batch import stacked
from fastdata.datasets.dataset import PreparedDataset, lease_of
from fastdata.datasets.reader import DeviceBatch, Lease
from fastdata.datasets.ring import BatchRing
from fastdata.errors import kind_of
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.view import LoaderView
from fastdata.machine.memory import check_device_room, format_bytes
from fastdata.pixels import TransformPlan
from fastdata.pixels.device import DeviceProgram
from fastdata.report import warn_user
from fastdata.stores.readers import Store

WhereOps = Literal["auto", "device", "cpu"]
Read = Callable[[Any, BatchRing], DeviceBatch]
Ops = Callable[[Any], Any]

CHUNK_BYTES = 32 << 20
"""What of a store is copied at a time."""
MOST_TIMES_SERVED = 1.5
"""Up to so many times the bytes are sent. To gather 256 samples of 256 x 256 takes the host as long
as to crop them to 224 x 224 (9.0 and 8.5 ms on a thread), at 1.3 times the bytes: beyond that the
device's work spares the host none."""


def is_own(loader: Any) -> bool:
    """Whether it is fastdata's: who defines how it is iterated also says how it is read into given memory."""
    begins = {"__iter__", "_get_iterator"}
    definer = next((kind for kind in type(loader).__mro__ if begins & vars(kind).keys()), object)
    return "iterate" in vars(definer)


def fallback_reason(
    asked: WhereOps,
    obstacle: str | None,
    *,
    stored_bytes: int,
    served_bytes: int,
    is_mirrored: bool = False,
) -> str | None:
    """Say why batch ops run on the CPU; None if on the device, where samples are sent as stored, or lie (mirrored).

    Raises:
        ValueError: they are to run on the device, and there is an obstacle.

    Example:
        >>> fallback_reason("auto", None, stored_bytes=786_432, served_bytes=3_072)
        'a sample as stored is 768.0 KiB, after the batch ops 3.0 KiB'
    """
    if asked == "cpu":
        return "batch_ops='cpu'"
    if obstacle is not None and asked == "device":
        raise ValueError(
            f"batch_ops='device' is not possible here: {obstacle}. Use batch_ops='auto'."
        )
    if (
        obstacle is not None
        or asked == "device"
        or is_mirrored
        or stored_bytes <= served_bytes * MOST_TIMES_SERVED
    ):
        return obstacle
    stored, served = format_bytes(stored_bytes), format_bytes(served_bytes)
    return f"a sample as stored is {stored}, after the batch ops {served}"


class DeviceOps:
    """The batch ops of a prefetcher's loader, epoch after epoch, and the copy of its store on the device.

    ``options`` are those of ``DeviceProgram``.
    """

    def __init__(self, loader: Any, asked: WhereOps, device: torch.device, **options: Any) -> None:
        self._loader = loader
        self._asked = asked
        self._device = device
        self._served = LoaderView.find(getattr(loader, "dataset", None))
        self._options = options
        self._compiled: tuple[TransformPlan, DeviceProgram] | None = None
        self._lock = threading.Lock()
        self._mirror: torch.Tensor | None = None
        self._has_warned = False
        self.described = (
            ""  # where they run in the latest epoch, and why; empty where the loader has none
        )

    def begin(self) -> tuple[Read, Ops] | None:
        """Say what reads the batches of an epoch and what finishes them; None if the CPU does it all.

        Raises:
            ValueError: as ``fallback_reason``.
        """
        self.described = ""
        if self._served is None:
            return None
        served = self._served.dataset
        served.reader()  # which notices what was changed in place
        dataset = self._served.parts[0]  # several have an obstacle
        obstacle: str | None = (
            f"the loader is {kind_of(self._loader)}, not fastdata's DataLoader in batches"
        )
        if isinstance(self._loader, DataLoader) and is_own(self._loader):
            obstacle = self._loader.device_obstacle()
        is_kept_there = dataset.storage == "device"
        if obstacle is None and not dataset.plan.batch_ops and not is_kept_there:
            return None
        program = self._compile(dataset) if obstacle is None else None
        reason = fallback_reason(
            self._asked,
            obstacle,
            stored_bytes=math.prod(program.sent_shape) if program else 0,
            served_bytes=self._served.latest().served_bytes or 0,
            is_mirrored=is_kept_there and program is not None and program.host is None,
        )
        lease = lease_of(dataset)
        is_there = False
        where = f"on {self._device}"
        unused = ""
        if program is None or reason is not None:
            where = f"on the CPU: {reason}"
            unused = f", batches are made on the CPU: {reason}"
        elif program.host is not None:
            unused = f": {program.host_step} runs on the CPU"
            where += f", the conversion only{unused}"
        elif is_kept_there:
            is_there = True
            where += (
                f", from a copy of the store there ({format_bytes(_size_bytes(_store(lease)))})"
            )
        self.described = where
        if unused and is_kept_there and self._asked != "cpu" and not self._has_warned:
            self._has_warned = True
            warn_user(f"storage='device' has no effect{unused}")
        if program is None or reason is not None:
            return None
        read = partial(_read, lease, program, is_there)
        return read, partial(self.run, program, lease if is_there else None)

    def _compile(self, dataset: PreparedDataset) -> DeviceProgram:
        if (
            self._compiled is None or self._compiled[0] is not dataset.plan
        ):  # the user may have replaced it
            self._compiled = (
                dataset.plan,
                DeviceProgram(dataset.plan, _store(lease_of(dataset)).spec, **self._options),
            )
        return self._compiled[1]

    def run(self, program: DeviceProgram, lease: Lease | None, batch: DeviceBatch) -> Any:
        """Make the images of a stored batch on the device that it lies on; or, with a lease, of a copy of the store."""
        if lease is None:
            return stacked(program.run(batch.samples, batch.draws), batch.targets, batch.keys)
        with self._lock:  # two iterators may be the first
            if self._mirror is None:
                self._mirror = _upload(_store(lease), self._device)
            store_NCHW = self._mirror
        return stacked(
            program.run(store_NCHW, batch.draws, batch.samples), batch.targets, batch.keys
        )

    def close(self) -> None:
        """Give back the memory on the device. Idempotent; a later epoch copies again."""
        with self._lock:
            self._mirror = None


def _upload(store: Store, device: torch.device) -> torch.Tensor:
    """Copy a dense uint8 store to (N, C, H, W) on the caller's current stream, which owns the memory; blocks.

    Raises:
        MemoryBudgetError: there is too little memory on the device.
    """
    spec = store.spec
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] + unused_bytes
    check_device_room(_size_bytes(store), free_bytes, str(device))
    assert spec.shape is not None
    copy_NCHW = torch.empty((len(store), *spec.shape), dtype=torch.uint8, device=device)
    rows = max(1, CHUNK_BYTES // max(spec.sample_bytes, 1))
    chunk = np.empty((min(rows, len(store)), *spec.shape), np.uint8)
    for start in range(0, len(store), rows):
        index = np.arange(start, min(start + rows, len(store)))
        store.gather_into(index, chunk[: len(index)])
        copy_NCHW[start : start + len(index)].copy_(torch.from_numpy(chunk[: len(index)]))  # waits
    return copy_NCHW


def _read(
    lease: Lease, program: DeviceProgram, is_there: bool, batch: Any, ring: BatchRing
) -> DeviceBatch:
    return lease().read_for_device(program, batch, ring, only_places=is_there)


def _store(lease: Lease) -> Store:
    kept = lease().kept
    assert kept is not None
    return kept.images


def _size_bytes(store: Store) -> int:
    return len(store) * store.spec.sample_bytes
