"""The device of a prefetcher, and which of a loader's batch ops end there.

Batches are sent as the uint8 that the compiled core makes, and become floats on the device. If the
samples are there already (``storage="device"``), they are cut there too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.cuda

from fastdata.datasets.buffers import BatchRing
from fastdata.datasets.reader import Reader
from fastdata.datasets.samples import ReaderHandle
from fastdata.datasets.visits import IndexBatch
from fastdata.errors import DeviceError, kind_of
from fastdata.loaders.iterators import CountedIterator
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.mixing import Mixing, mix_parts, read_parts, served_mixing
from fastdata.loaders.parts import AnyReader, JoinedReader, Parts
from fastdata.loaders.pinned import PinnedMemory
from fastdata.loaders.resident import StoreCut, size_bytes, upload
from fastdata.loaders.window import window_obstacle
from fastdata.machine.units import format_bytes
from fastdata.pixels.steps import Step
from fastdata.report import warn_user
from fastdata.stores.store import Store

Tensor = torch.Tensor
DeviceLike = str | int | torch.device
Transform = Callable[[Any], Any]
Read = Callable[[IndexBatch, BatchRing], Any]
WhereOps = Literal["auto", "device", "cpu"]


def resolve_device(device: DeviceLike | None) -> torch.device:
    """Return a device with its number; for None the current CUDA device, or the CPU without one.

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
            f"device={str(device)!r} is neither the CPU nor a CUDA device; leave batches on the "
            "CPU."
        )
    if (resolved.index or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise DeviceError(
            f"device={str(device)!r} was asked for, but torch sees {count or 'no'} CUDA "
            f"device{'s' * (count > 1)}: this is torch {torch.__version__}, and "
            f"CUDA_VISIBLE_DEVICES is {visible!r}. Name one that is there, install a build of "
            "torch for this machine's accelerator and its driver (`python -m "
            "torch.utils.collect_env` shows both), or leave device=None, which is the CPU where "
            "there is no accelerator."
        )
    if resolved != torch.device("cuda"):  # it has a number
        return resolved
    current = torch.cuda.current_device()
    # Each rank has to choose its device. One that forgot would send its batches to that of rank 0.
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    if device is None and not current and 0 < rank < count:
        warn_user(
            f"batches of the process with LOCAL_RANK={rank} go to cuda:0, which is its current "
            f"device, as those of rank 0 do. Call torch.cuda.set_device({rank}) first, or pass "
            f"device='cuda:{rank}' (or 'cuda:0')."
        )
    return torch.device("cuda", current)


def is_own(loader: Any) -> bool:
    """Return True if fastdata's own class defines how the loader is iterated.

    A subclass of the user's with its own ``__iter__`` may change batches: it must be called.
    """
    begins = {"__iter__", "_get_iterator"}
    definer = next((kind for kind in type(loader).__mro__ if begins & vars(kind).keys()), object)
    # ChunkedLoader is imported only where somebody uses it.
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


class Form(NamedTuple):
    """The form of the tensors that a prefetcher serves.

    Attributes:
        dtype: dtype of floating-point tensors and of images; None if they keep theirs.
        channels_last: True if tensors of four dimensions have this memory format.
    """

    dtype: torch.dtype | None = None
    channels_last: bool = False


class DeviceWork(NamedTuple):
    """The part of an epoch's batch ops that runs on the device; by default none does.

    Attributes:
        read: makes the batches that are sent, instead of the loader.
        finish: finishes batches on the device.
        cut: makes the iterator over batches that are cut from a store on the device.
    """

    read: Read | None = None
    finish: Transform | None = None
    cut: Callable[..., StoreCut] | None = None


class DeviceOps:
    """The batch ops of a loader, epoch after epoch, and copies of its stores on the device.

    Args:
        loader: the prefetcher's.
        asked: where the user wants batch ops to end.
        device: the prefetcher's.
        pinned: gives warnings in the user's thread.
        form: the form in which images are served.

    Attributes:
        described: where batch ops run in the latest epoch, and the reason; empty without any.
    """

    def __init__(
        self,
        loader: Any,
        asked: WhereOps,
        device: torch.device,
        pinned: PinnedMemory,
        form: Form,
    ) -> None:
        self.described = ""
        self._loader = loader
        self._asked = asked
        self._device = device
        self._pinned = pinned
        self._form = form
        self._parts = Parts.find(getattr(loader, "dataset", None))
        # By store: samples may be prepared again between epochs.
        self._copies: weakref.WeakKeyDictionary[Store, Tensor] = weakref.WeakKeyDictionary()

    def begin(self) -> DeviceWork:
        """Decide what the device does in an epoch that begins now.

        Raises:
            ValueError: batch ops are to be finished on the device, and cannot.
            MemoryBudgetError: the store does not fit there.
        """
        self.described = ""
        reader = self._parts.reader()  # which notices what was changed in place
        if reader is None:
            return DeviceWork()
        storages = [it._fastdata.storage_plan.storage for it in self._parts.datasets]
        is_for_store = "device" in storages
        work = DeviceWork()
        why = self._obstacle(reader)
        if not why:
            assert isinstance(reader, Reader)
            if is_for_store:
                why = _store_obstacle(reader) or self._mix_obstacle(reader)
                if not why:
                    return self._cut(reader)
            work = self._convert(reader)
        if is_for_store and self._asked != "cpu":
            self._pinned.add_warning(f"storage='device' has no effect: {why}")
        if work.finish is not None:
            mixes = " and the mix" if self._mixing(reader) else ""
            self.described = f"on {self._device}, the conversion{mixes} only{why and f': {why}'}"
        else:
            self.described = f"on the CPU: {why or _sent_as_it_is(reader)}"
        return work

    def _cut(self, reader: Reader) -> DeviceWork:
        """Cut batches from a copy of the store, which is made in the first epoch."""
        store = _store_of(reader)
        if store not in self._copies:
            self._copies[store] = upload(store, self._device)
        size = format_bytes(size_bytes(store))
        self.described = f"on {self._device}, from a copy of the store there ({size})"
        handle = self._parts.datasets[0]._fastdata.handle
        [convert] = _conversions(reader, self._form)
        return DeviceWork(cut=partial(StoreCut, self._loader, handle, self._copies[store], convert))

    def _convert(self, reader: Reader) -> DeviceWork:
        """Send uint8, and convert it to floats on the device."""
        mixing = self._mixing(reader)
        # Mixing computes with the floats of the dataset, as on the CPU, and is cast afterwards.
        converts = _conversions(reader, self._form if mixing is None else Form())
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
        """Return how batches are mixed, if they are."""
        found = served_mixing(self._loader.collate_fn, reader)
        return found if isinstance(found, Mixing) else None

    def _mix_obstacle(self, reader: AnyReader) -> str:
        """Return why batches are sent, and not cut on the device, if they are mixed there."""
        mixing = self._mixing(reader)
        return f"{mixing.mixer.name} of collate_fn= mixes batches" if mixing else ""

    def _obstacle(self, reader: AnyReader) -> str:
        """Return why batch ops run on the CPU; empty if the device may finish them."""
        loader = self._loader
        if not isinstance(loader, DataLoader) or not is_own(loader):
            obstacle = f"the loader is {kind_of(loader)}, not fastdata's DataLoader in batches"
        else:
            obstacle = loader._fastdata.device_obstacle(loader) or _obstacle_of(reader)
        if self._asked == "device" and obstacle:
            raise ValueError(
                f"batch_ops='device' is not possible here: {obstacle}. Use batch_ops='auto'."
            )
        return "batch_ops='cpu'" if self._asked == "cpu" else obstacle

    def close(self) -> None:
        """Free the copies on the device. Idempotent; a later epoch copies again."""
        self._copies.clear()


def _obstacle_of(reader: AnyReader) -> str:
    """Return why the device cannot finish the batches of a reader; empty if it can."""
    if reader.obstacle_if_alike is not None:
        return reader.obstacle_if_alike
    if isinstance(reader, JoinedReader):
        return "the samples of a ConcatDataset lie in several stores"
    casts = reader.without_cast[1]
    for column, cast in zip(reader.columns, casts, strict=True):
        if cast is not None and column.plan.kind in ("hwc", "hw"):
            return "images are arrays (H, W, C); end with ToTensorV2()"
        if cast is not None and cast.fields.get("statistic"):
            return "Normalize takes its numbers from each image"
    steps = [step for column in reader.columns for step in column.plan.batch_ops]
    if not any(casts) and any(step.name == "cast" for step in steps):
        return "erasing or noise comes after the conversion to floats"
    return ""


def _store_obstacle(reader: Reader) -> str:
    """Return why batches cannot be cut from a reader's store on a device; empty if they can."""
    if len(reader.columns) > 1:
        return "several views of an image, or image and mask, are made on the CPU"
    if reader.plan.kind in ("hwc", "hw"):
        return "images are arrays (H, W, C); end with ToTensorV2()"
    return window_obstacle(reader.plan, _store_of(reader).spec)


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
    return f"they serve {' and '.join(kinds)}, which is sent as it is"


def _read(handle: ReaderHandle, batch: IndexBatch, ring: BatchRing) -> list[Any]:
    """Read the parts of a batch, without the conversion to floats."""
    sent, _ = handle().without_cast
    return sent.read_batch(batch, ring.lease, sent.targets.collated)


def _finish(handle: ReaderHandle, converts: Sequence[Transform | None], parts: list[Any]) -> Any:
    """Make a batch of the parts that were sent."""
    pairs = zip_longest(parts, converts)
    made = [part if convert is None else convert(part) for part, convert in pairs]
    return handle().to_batch(made)


class ToFloats:
    """Converts uint8 to floats and normalises them, in one pass over the pixels.

    The pass computes in float32 (in float64 if the dataset serves float64), rounds once to the
    dtype that is served, and writes its memory format. So the result equals, to the bit, that of a
    float32 batch which is then cast with ``Tensor.to``; and it is within half a unit in the last
    place of the dtype, plus the error of float32, of the exact value.

    Args:
        cast: the step that makes floats.
        form: the form in which batches are served. Its dtype is left to a later cast where that
            rounds twice: floats that the dataset serves as float16 are rounded to float16 first.
    """

    def __init__(self, cast: Step, form: Form = Form()) -> None:  # noqa: B008  # it is immutable
        scaling = cast.fields["scaling"]
        is_unscaled = scaling in ("SCALE_NONE", "SCALE_AFTER")
        unit = 1.0 if is_unscaled else 255.0
        normalizes = cast.fields["means"] > 0
        mean = np.array(cast.fields["mean"] if normalizes else [0.0])
        std = np.array(cast.fields["std"] if normalizes else [1.0])
        if scaling == "SCALE_AFTER":
            std = 1 / std  # the field holds what is multiplied by
        # By a number of the host CUDA multiplies with its rounded inverse, so that the divisor is a
        # tensor on the device.
        self._divides = scaling in ("SCALE_DIVIDE", "SCALE_NONE") and not mean.any()
        self._divides = self._divides and normalizes == is_unscaled
        scale = unit * std
        both = np.stack([scale if self._divides else 1 / scale, -mean / std])
        own: torch.dtype = getattr(torch, cast.fields["dtype"].lower())
        # Half floats are computed as float32 and rounded once, as on the CPU.
        kind = torch.promote_types(own, torch.float32)
        self._both_2C11 = torch.tensor(both[:, :, None, None], dtype=kind)
        wanted = form.dtype or own
        rounds_once = own is kind and wanted.is_floating_point
        self._dtype = wanted if rounds_once else own
        self._layout = torch.channels_last if form.channels_last else torch.preserve_format

    def __call__(self, source_BChw: Tensor) -> Tensor:
        if self._both_2C11.device != source_BChw.device:
            # Pinned, the thread does not wait for the copy.
            pinned = self._both_2C11.pin_memory()
            self._both_2C11 = pinned.to(source_BChw.device, non_blocking=True)
        if source_BChw.is_cuda:
            # It may be used on several streams, and dropped while one of them still reads it.
            self._both_2C11.record_stream(torch.cuda.current_stream(source_BChw.device))
        scale, offset = self._both_2C11
        # One channel becomes three where means and deviations of three are given.
        channels = max(source_BChw.shape[1], scale.shape[0])
        # Both ops compute in the dtype that their inputs promote to, on the CPU and on CUDA, and
        # round as they write. ``addcmul(...).to(...)`` makes a float32 copy in between: 424 MB of
        # traffic for 256 images of 224 x 224 in float16, where this takes 116 MB.
        like = source_BChw.expand(-1, channels, -1, -1)
        out = torch.empty_like(like, dtype=self._dtype, memory_format=self._layout)
        if self._divides:
            return torch.div(source_BChw, scale, out=out)
        return torch.addcmul(offset, source_BChw, scale, out=out)
