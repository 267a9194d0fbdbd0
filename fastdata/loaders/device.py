"""The device of a prefetcher, and the batch ops that run there.

Batches are sent as the uint8 that the compiled core makes, and are converted to floats on the
device. If the samples are already there (``storage="device"``), they are cut there too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
import torch.cuda

from fastdata.datasets.buffers import BatchRing
from fastdata.datasets.reader import Reader
from fastdata.datasets.samples import ReaderHandle
from fastdata.datasets.visits import IndexBatch
from fastdata.errors import DeviceError, kind_of
from fastdata.loaders.floats import AS_MADE, Form, ToFloats
from fastdata.loaders.iterators import CountedIterator
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.mixing import Mixing, mix_parts, read_parts, served_mixing
from fastdata.loaders.parts import AnyReader, JoinedReader, Parts
from fastdata.loaders.pinned import PinnedMemory
from fastdata.loaders.resident import StoreCut, size_bytes, upload
from fastdata.loaders.window import window_obstacle
from fastdata.machine import limits
from fastdata.machine.units import format_bytes
from fastdata.report import warn_user
from fastdata.stores.store import Store

Tensor = torch.Tensor
DeviceLike = str | int | torch.device
Transform = Callable[[Any], Any]
Read = Callable[[IndexBatch, BatchRing], Any]
WhereOps = Literal["auto", "device", "cpu"]


def resolve_device(device: DeviceLike | None) -> torch.device:
    """Return a device with its number. None: the current CUDA device, or the CPU without CUDA.

    Raises:
        DeviceError: torch does not see the device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None and not count:
        return torch.device("cpu")
    resolved = torch.device("cuda" if device is None else device)
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise DeviceError(
            f"device={str(device)!r} is neither the CPU nor a CUDA device. Use device='cpu' and "
            "copy the batches yourself."
        )
    if (resolved.index or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise DeviceError(
            f"device={str(device)!r} was asked for, but torch sees {count or 'no'} CUDA "
            f"device{'s' * (count > 1)}: this is torch {torch.__version__}, and "
            f"CUDA_VISIBLE_DEVICES is {visible!r}. Choose a device that exists, install a build of "
            "torch for this machine's accelerator and driver (`python -m torch.utils.collect_env` "
            "shows both), or leave device=None, which means the CPU if there is no accelerator."
        )
    if resolved != torch.device("cuda"):  # it has a number
        return resolved
    current = torch.cuda.current_device()
    # Each rank has to choose its device. Otherwise its batches go to the device of rank 0.
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    if device is None and not current and 0 < rank < count:
        warn_user(
            f"batches of the process with LOCAL_RANK={rank} go to cuda:0, its current device, as "
            f"those of rank 0 do. Call torch.cuda.set_device({rank}) first, or pass "
            f"device='cuda:{rank}' (or 'cuda:0' if this is what you want)."
        )
    return torch.device("cuda", current)


def is_own(loader: Any) -> bool:
    """Return True if a class of fastdata defines how the loader is iterated.

    A user's subclass with its own ``__iter__`` may change batches, so it must be called.
    """
    begins = {"__iter__", "_get_iterator"}
    definer = next((kind for kind in type(loader).__mro__ if begins & vars(kind).keys()), object)
    # Compare by name: ChunkedLoader is imported only if the user imports it.
    return definer is DataLoader or definer.__module__ == "fastdata.loaders.chunked"


def begin_epoch(loader: Any, ring: BatchRing, held: int, read: Read | None) -> CountedIterator:
    """Begin an epoch of a loader that ``is_own``, in a prefetcher's ring."""
    if isinstance(loader, DataLoader):
        return loader._fastdata.iterate(loader, ring, held, read)
    iterator: CountedIterator = loader.iterate(ring, held, read)
    return iterator


def ring_slots(loader: Any, held: int) -> int:
    """Return the number of buffers that a ring for a loader that ``is_own`` needs."""
    if isinstance(loader, DataLoader):
        return loader._fastdata.ring_slots(loader, held)
    slots: int = loader.ring_slots(held)
    return slots


class DeviceWork(NamedTuple):
    """The part of an epoch's batch ops that runs on the device; by default nothing.

    Attributes:
        read: reads the batches to send, instead of the loader's own reading.
        finish: completes batches on the device.
        cut: makes the iterator of batches that are cut from a store on the device.
    """

    read: Read | None = None
    finish: Transform | None = None
    cut: Callable[..., StoreCut] | None = None


class DeviceOps:
    """The batch ops of a loader, epoch after epoch, and copies of its stores on the device.

    Args:
        loader: the prefetcher's.
        where: the user's choice of where batch ops run.
        device: the prefetcher's device.
        pinned: collects warnings, which it gives in the user's thread.
        form: dtype and memory format of the images.

    Attributes:
        described: where batch ops run in the latest epoch, and why; empty without batch ops.
    """

    def __init__(
        self,
        loader: Any,
        where: WhereOps,
        device: torch.device,
        pinned: PinnedMemory,
        form: Form,
    ) -> None:
        self.described = ""
        self._loader = loader
        self._where = where
        self._device = device
        self._pinned = pinned
        self._form = form
        self._parts = Parts.find(getattr(loader, "dataset", None))
        # One copy for each store: samples may be prepared again between epochs.
        self._copies: weakref.WeakKeyDictionary[Store, Tensor] = weakref.WeakKeyDictionary()

    def begin(self) -> DeviceWork:
        """Decide what the device does in an epoch that begins now.

        Raises:
            ValueError: ``batch_ops="device"``, but batch ops cannot run there.
            MemoryBudgetError: the store does not fit there.
        """
        self.described = ""
        reader = self._parts.reader()  # this also detects transforms that were changed in place
        if reader is None:
            return DeviceWork()
        storages = [it._fastdata.storage_plan.storage for it in self._parts.datasets]
        is_for_store = "device" in storages
        work = DeviceWork()
        mixing = None
        why = self._obstacle(reader)
        if not why:
            assert isinstance(reader, Reader)
            mixing = self._mixing(reader)
            if is_for_store:
                why = _store_obstacle(reader, mixing)
                if not why:
                    return self._cut(reader)
            work = self._convert(reader, mixing)
        if is_for_store and self._where != "cpu":
            self._pinned.add_warning(f"storage='device' has no effect: {why}")
        if work.finish is not None:
            mixes = " and the mix" if mixing else ""
            self.described = f"on {self._device}, the conversion{mixes} only{why and f': {why}'}"
        else:
            self.described = f"on the CPU: {why or _sent_as_it_is(reader)}"
        return work

    def _cut(self, reader: Reader) -> DeviceWork:
        """Cut batches from a copy of the store, which is made in the first epoch."""
        store = _store_of(reader)
        if store not in self._copies:
            threads = max(1, min(self._loader.num_workers, limits.usable_cores()))
            self._copies[store] = upload(store, self._device, self._pinned, threads)
        size = format_bytes(size_bytes(store))
        self.described = f"on {self._device}, from a copy of the store there ({size})"
        handle = self._parts.datasets[0]._fastdata.handle
        [convert] = _conversions(reader, self._form)
        return DeviceWork(cut=partial(StoreCut, self._loader, handle, self._copies[store], convert))

    def _convert(self, reader: Reader, mixing: Mixing | None) -> DeviceWork:
        """Send uint8, and convert it to floats on the device."""
        # Batches are mixed in the dataset's float dtype, as on the CPU, and cast afterwards.
        converts = _conversions(reader, self._form if mixing is None else AS_MADE)
        if not any(converts):
            return DeviceWork()
        handle = self._parts.datasets[0]._fastdata.handle
        if mixing is not None:
            [convert] = converts
            return DeviceWork(
                partial(read_parts, mixing, handle), partial(mix_parts, mixing, convert)
            )
        return DeviceWork(partial(_read, handle), partial(_finish, handle, converts))

    def _mixing(self, reader: AnyReader) -> Mixing | None:
        """Return how batches are mixed; None if they are not mixed."""
        found = served_mixing(self._loader.collate_fn, reader)
        return found if isinstance(found, Mixing) else None

    def _obstacle(self, reader: AnyReader) -> str:
        """Return why batch ops run on the CPU; empty if the device may complete them."""
        loader = self._loader
        if not isinstance(loader, DataLoader) or not is_own(loader):
            obstacle = (
                f"the loader is {kind_of(loader)} of {type(loader).__module__}, "
                "not fastdata's DataLoader"
            )
        else:
            obstacle = loader._fastdata.device_obstacle(loader) or _obstacle_of(reader)
        if self._where == "device" and obstacle:
            raise ValueError(
                f"batch_ops='device' is not possible here: {obstacle}. Use batch_ops='auto'."
            )
        return "batch_ops='cpu'" if self._where == "cpu" else obstacle

    def close(self) -> None:
        """Free the copies on the device. Idempotent; a later epoch copies again."""
        self._copies.clear()


def _obstacle_of(reader: AnyReader) -> str:
    """Return why the device cannot complete the batches of a reader; empty if it can."""
    if reader.obstacle_if_alike is not None:
        return reader.obstacle_if_alike
    if isinstance(reader, JoinedReader):
        return "the samples of a ConcatDataset are in several stores"
    casts = reader.without_cast[1]
    for column, cast in zip(reader.columns, casts, strict=True):
        if cast is not None and column.plan.kind in ("hwc", "hw"):
            return "images are arrays (H, W, C); end with ToTensorV2()"
        if cast is not None and cast.fields.get("statistic"):
            return "Normalize computes its statistics from each image"
    steps = [step for column in reader.columns for step in column.plan.batch_ops]
    if not any(casts) and any(step.name == "cast" for step in steps):
        return "erasing or noise comes after the conversion to floats"
    return ""


def _store_obstacle(reader: Reader, mixing: Mixing | None) -> str:
    """Return why batches cannot be cut from a reader's store on a device; empty if they can."""
    if len(reader.columns) > 1:
        return "several views of an image, or image and mask, are made on the CPU"
    if reader.plan.kind in ("hwc", "hw"):
        return "images are arrays (H, W, C); end with ToTensorV2()"
    found = window_obstacle(reader.plan, _store_of(reader).spec)
    return found or (f"{mixing.mixer.name} of collate_fn= mixes batches" if mixing else "")


def _store_of(reader: Reader) -> Store:
    assert reader.kept is not None
    return reader.kept.images


def _conversions(reader: Reader, form: Form) -> list[ToFloats | None]:
    """Return the final float cast of each column, made for the device; None without one."""
    _, casts = reader.without_cast
    return [None if cast is None else ToFloats(cast, form) for cast in casts]


def _sent_as_it_is(reader: AnyReader) -> str:
    assert isinstance(reader, Reader)
    kinds = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in reader.dtypes)
    return f"batches are {' and '.join(kinds)}, and sent unchanged"


def _read(handle: ReaderHandle, batch: IndexBatch, ring: BatchRing) -> list[Any]:
    """Read the parts of a batch without converting them to floats."""
    sent, _ = handle().without_cast
    return sent.read_batch(batch, ring.lease, sent.targets.collated)


def _finish(handle: ReaderHandle, converts: Sequence[Transform | None], parts: list[Any]) -> Any:
    """Convert the parts that were sent, and make a batch of them."""
    pairs = zip_longest(parts, converts)
    made = [part if convert is None else convert(part) for part, convert in pairs]
    return handle().to_batch(made)
