"""Batches on the device before the training loop asks for them.

A thread reads the loader, finds the batch pinned or pins it, and copies it on a stream of its own
(``transfer``). Who may write to memory when:

    pinned host memory   held by the thread until the event after its copy is done
    device memory        made on the thread's stream; the training loop's stream waits for the copy
    before it reads, and
                         ``record_stream`` keeps the memory until that stream has done what it was
                         given
    a store on a device  made, read and given back on the thread's stream only (``DeviceOps``)
    the whole device     the thread copies a batch when the device has left the one ``depth + 1``
    before it

Batch ops of fastdata's loaders run on the thread's stream, after the copies, or on the CPU before
batches are sent.

Shape letters: N stored samples, C channels, H W stored size.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.cuda

from fastdata.datasets.batch import flatten, stacked
from fastdata.datasets.dataset import handle_of
from fastdata.datasets.reader import BatchRing, DeviceBatch, ReaderHandle
from fastdata.errors import DeviceError, kind_of
from fastdata.loaders.epochs import HELD_BY_USER
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.transfer import CopyCounts, PinnedMemory, Transfer
from fastdata.loaders.view import LoaderView
from fastdata.machine.memory import check_device_room, format_bytes
from fastdata.pixels.device import DeviceProgram
from fastdata.report import EpochReport, Line, warn_user
from fastdata.stores.readers import Store

if TYPE_CHECKING:
    from typing_extensions import Self

DeviceLike = str | int | torch.device
Transform = Callable[[Any], Any]
WhereOps = Literal["auto", "device", "cpu"]
Read = Callable[[Any, BatchRing], DeviceBatch]

CHUNK_BYTES = 32 << 20
"""What of a store is copied at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PrefetchReport(EpochReport):
    """How the latest epoch of a prefetcher went, complete or not.

    Batches, samples and times are those of the training loop; ``wait_s`` is how long it waited for
    the prefetcher. What the loader says of itself (path, engine, workers, memory) is the loader's.

    Args:
        device: where batches went; ``"cpu"`` where nothing was moved.
        read_s: seconds its thread waited for the loader.
        copy_s: seconds its thread was busy with copies, waited for them, and for what follows them
            on the device.
        pinned_bytes: host memory that this prefetcher has pinned, at most, in the sizes that
            torch's allocator takes.
        copies: copies of tensors, by where they were copied from.
        batch_ops: where they ran, and why there if on the CPU; empty where the loader has none of
            fastdata's.
    """

    device: str = "cpu"
    read_s: float = 0.0
    copy_s: float = 0.0
    pinned_bytes: int = 0
    copies: CopyCounts = dataclasses.field(default_factory=CopyCounts)
    batch_ops: str = ""

    def as_dict(self) -> dict[str, float]:
        copies = dataclasses.asdict(self.copies)
        return super().as_dict() | {f"copies_{name}": figure for name, figure in copies.items()}

    def _lines(self) -> Iterator[Line]:
        yield from super()._lines()
        if self.device == "cpu":
            yield "batches stay on the CPU"
            return
        copies = self.copies
        sent_bytes = copies.in_place_bytes + copies.staged_bytes + copies.pageable_bytes
        yield (
            f"to {self.device}: {format_bytes(sent_bytes)}, of it "
            f"{format_bytes(copies.in_place_bytes)} straight from pinned memory "
            f"({copies.in_place} tensors), "
            f"{format_bytes(copies.staged_bytes)} by one more host copy ({copies.staged}), "
            f"{format_bytes(copies.pageable_bytes)} from pageable memory ({copies.pageable})"
        )
        yield f"pinned at most {format_bytes(self.pinned_bytes)}"
        if self.batch_ops:
            yield f"batch ops: {self.batch_ops}"


class Epoch(Iterator[Any]):
    """The batches of a transfer, whose thread ends when this is dropped."""

    def __init__(self, transfer: Transfer, prefetcher: CudaPrefetcher) -> None:
        self._transfer = transfer
        self._prefetcher = prefetcher  # is kept alive
        self.close = weakref.finalize(self, transfer.stop)

    def __next__(self) -> Any:
        batch = self._transfer.receive()
        if self._transfer.copies.pageable:
            self._prefetcher.warn_of_pageable()
        return batch


class CudaPrefetcher:
    """Batches of a loader on the GPU, brought there while the GPU computes.

    A thread reads the loader and copies batches on a stream of its own, from pinned memory; the
    training loop gets tensors on the device and never waits for a copy. Batches that the threads of
    fastdata's loader gather are copied from where they lie, as is what the loader has pinned;
    others are copied once on the host, to pinned memory of torch's allocator. Where there is too
    little memory to pin, copies are pageable, which is said once.

    A batch may be any nesting of tuples, lists, dicts, namedtuples, dataclasses and
    ``SampleBatch``; values that are no tensors, and tensors that lie on a device already, pass
    through. Without a GPU, and with ``device="cpu"``, batches stay where they are, and everything
    else is the same. Attributes that it has not are the loader's: ``dataset``, ``sampler``,
    ``batch_sampler``, ``batch_size``, ``state_dict`` ...; ``state_dict()`` counts batches as the
    training loop gets them, whatever was read ahead.

    Args:
        loader: any iterable of batches; each ``iter`` of the prefetcher is one of the loader.
        device: where batches go; default the current CUDA device, or the CPU where there is none.
            Several take a process each (``torchrun``).
        depth: batches that lie on the device before the training loop takes them. The GPU holds up
            to two more: the loop's, and one that is being copied. A depth of 1 leaves less room for
            a loop that varies.
        transform: called on each batch, on the device, in the thread and on its stream, in order,
            under ``torch.no_grad()``. The loop's autocast and inference mode do not hold in that
            thread: enter them inside.
        dtype: floating-point tensors, and uint8 tensors of four or more dimensions (images), are
            cast to it on the device, before ``transform``; others, such as int64 labels, keep their
            dtype.
        channels_last: give tensors of four dimensions this memory format, on the device, before
            ``transform``; they also have it where the loader has ``memory_format``.
        batch_ops: where the batch ops of fastdata's loaders end, first of all. ``"auto"``: on the
            device, with the draws and pixels of the CPU (floats within 1e-6), if threads read whole
            batches: uint8 is sent and converted there, or with ``storage="device"`` also cut there.
            Else, and with ``"cpu"``, before they are sent. ``"device"``: there, or an error.
            ``report().batch_ops`` says where and why.

    Raises:
        DeviceError: torch does not see the device.
        ValueError: when an epoch begins: batch ops are to run on the device and cannot.
        MemoryBudgetError: in place of the first batch: ``storage="device"`` does not fit there.

    An exception of the loader or of ``transform`` is raised where its batch would have come. What a
    loader draws from global generators while it is read is drawn in the thread; what it draws for
    its first batch, in order. A loader must not write again to a pinned tensor that it has yielded:
    it is read when the copy runs, and not before. Pinned memory goes back to torch's allocator,
    which keeps it for the next one that asks, when the prefetcher is dropped, at the end of a ``with``
    statement, or by ``close()``.

    Example:
        >>> loader = [torch.zeros(2, 3), torch.ones(2, 3)]
        >>> batches = CudaPrefetcher(loader, device="cpu", transform=lambda batch: batch + 1)
        >>> len(batches), [batch.mean().item() for batch in batches]
        (2, [1.0, 2.0])
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: DeviceLike | None = None,
        *,
        depth: int = 2,
        transform: Transform | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
        batch_ops: WhereOps = "auto",
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: at least one batch must be on its way")
        if batch_ops not in ("auto", "device", "cpu"):
            raise ValueError(f"batch_ops={batch_ops!r} is not one of 'auto', 'device', 'cpu'")
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise ValueError(
                f"dtype={dtype!r} is no floating-point torch.dtype, such as torch.float16"
            )
        self.loader: Any = loader
        self.device = _resolve_device(device)
        self.depth = depth
        is_asked = channels_last or getattr(loader, "memory_format", None) is torch.channels_last
        casts: dict[str, Any] = {"dtype": dtype, "channels_last": is_asked}
        self._finish = partial(_finish, device=self.device, transform=transform, **casts)
        self._ring: BatchRing | None = None
        self._live: weakref.WeakSet[Epoch] = weakref.WeakSet()
        # Of the latest epoch; of an empty one before the first.
        self._transfer = Transfer(iter(()), self.device, self._finish)
        self._has_warned = False
        self._pinned: PinnedMemory | None = None
        self._stream: Any = None
        if self.device.type == "cuda":
            self._pinned = PinnedMemory(self.device)
            self._ops = DeviceOps(loader, batch_ops, self.device, dtype)

    # The loader's face

    def __len__(self) -> int:
        return len(self.loader)  # one without a length says so itself

    def __getattr__(self, name: str) -> Any:
        # How to copy or pickle a loader is no answer for its prefetcher.
        if name == "loader" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.loader, name)
        if is_own(self.loader):
            return value
        own = {"state_dict": self._user_state, "load_state_dict": self._load_user_state}
        return own.get(name, value)

    def set_epoch(self, epoch: int) -> None:
        for holder in (self.loader, getattr(self.loader, "batch_sampler", None)):
            listeners: list[Any] = [holder, getattr(holder, "sampler", None)]
            for listener in listeners:
                if hasattr(listener, "set_epoch"):
                    listener.set_epoch(epoch)

    def _user_state(self) -> Any:
        seen = self._transfer.seen
        return self.loader.state_dict() if seen is None else seen

    def _load_user_state(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        self._transfer.seen = None

    # Epochs

    def __iter__(self) -> Iterator[Any]:
        if getattr(self.loader, "persistent_workers", False) or isinstance(self.loader, Iterator):
            for epoch in list(self._live):  # both would read the same iterator
                epoch.close()
        self._transfer = self._begin()
        epoch = Epoch(self._transfer, self)
        self._live.add(epoch)
        return epoch

    def _begin(self) -> Transfer:
        """An epoch of the loader, in the prefetcher's ring where it is fastdata's."""
        loader = self.loader
        pinned = self._pinned
        if pinned is None:
            return Transfer(iter(loader), self.device, self._finish)
        read, ops = self._ops.begin()
        finish = partial(self._finish, ops=ops)
        self._stream = self._stream or torch.cuda.Stream(self.device)
        cuda = {"stream": self._stream, "pinned": pinned, "depth": self.depth}
        if not is_own(loader):
            mark = getattr(loader, "state_dict", lambda: None)
            return Transfer(iter(loader), self.device, finish, mark=mark, **cuda)
        held = max(HELD_BY_USER, self.depth + 1)
        pinned.ring_slots = loader.ring_slots(held)
        self._ring = self._ring or BatchRing(pinned.ring_slots, pinned.allocate)
        iterator = loader.iterate(self._ring, held, read)
        progress = loader.read_ahead()
        marks = {"mark": progress.mark, "hand_over": progress.hand_over}
        return Transfer(iterator, self.device, finish, **marks, **cuda)

    def report(self) -> PrefetchReport:
        ask = getattr(self.loader, "report", None)
        said = ask() if callable(ask) else None
        if not isinstance(said, EpochReport):
            said = EpochReport(path=f"batches of {type(self.loader).__name__}")
        latest = self._transfer
        values: dict[str, Any] = {
            field.name: getattr(said, field.name) for field in dataclasses.fields(EpochReport)
        }
        values |= latest.counts.figures()
        if self._pinned is not None:
            values |= {
                "device": str(self.device),
                "pinning": self._pinned.reason,
                "pinned_bytes": self._pinned.ring_bytes + self._pinned.copies_bytes,
                "copies": latest.copies,
                "batch_ops": self._ops.described,
            }
        return PrefetchReport(**values, read_s=latest.read_s, copy_s=latest.copy_s)

    def close(self) -> None:
        """End live iterators, give back pinned memory and copies of the store. Idempotent."""
        for epoch in list(self._live):
            epoch.close()
        self._ring = None
        if self._pinned is not None:
            self._pinned.ring_bytes = 0
            self._pinned.copies_bytes = 0
            self._ops.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warn_of_pageable(self) -> None:
        """Say, once, that batches go to the device the slow way, and why."""
        if self._has_warned or self._pinned is None:
            return
        self._has_warned = True
        warn_user(
            f"batches go to {self.device} from pageable memory, which takes longer: "
            f"{self._pinned.reason}"
        )


def _finish(
    batch: Any,
    number: int,
    *,
    device: torch.device,
    transform: Transform | None,
    ops: Transform | None = None,
    **casts: Any,
) -> Any:
    """Batch ops, casts and the user's transform, in this order, on the calling thread's stream."""
    if ops is not None:
        batch = ops(batch)
    if any(casts.values()):
        tensors, build = flatten(batch)
        batch = build([_cast(tensor, device, **casts) for tensor in tensors])
    if transform is None:
        return batch
    try:
        with torch.no_grad():
            return transform(batch)
    except Exception as error:
        message = f"transform= failed on batch {number}: {type(error).__name__}: {error}"
        # The former ends epochs in silence.
        kind = RuntimeError if isinstance(error, StopIteration) else type(error)
        try:
            named = kind(message)
        except Exception:  # noqa: BLE001  # a user's type may raise anything
            named = RuntimeError(message)
        raise named from error


def _cast(tensor: Any, device: torch.device, dtype: torch.dtype | None, channels_last: bool) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.device not in (device, torch.device("cpu")):
        return tensor
    is_image = tensor.dtype is torch.uint8 and tensor.ndim >= 4
    is_laid_out = channels_last and tensor.ndim == 4
    return tensor.to(
        dtype=dtype if tensor.is_floating_point() or is_image else None,
        memory_format=torch.channels_last if is_laid_out else torch.preserve_format,
    )


def _resolve_device(device: DeviceLike | None) -> torch.device:
    """Return the device asked for, with its number; None is the current one, or the CPU.

    Raises:
        DeviceError: torch does not see it.
    """
    if isinstance(device, (list, tuple)):
        raise DeviceError(
            f"device={device!r} is a list, and one process brings batches to one device. Start a "
            "process for each GPU (torchrun), or give a module of DataParallel whole batches on "
            "its first device."
        )
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
        built = torch.version.cuda or getattr(torch.version, "hip", None) or "the CPU only"
        raise DeviceError(
            f"device={str(device)!r} was asked for, but torch sees {count or 'no'} CUDA "
            f"device{'s' * (count > 1)}: torch {torch.__version__} is built for {built}, "
            f"CUDA_VISIBLE_DEVICES is {visible!r}. Name one that is there, install a build of "
            "torch for this machine's accelerator and its driver (`python -m "
            "torch.utils.collect_env` shows both), or leave device=None, which is the CPU where "
            "there is no accelerator."
        )
    if resolved != torch.device("cuda"):
        return resolved
    current = torch.cuda.current_device()
    rank = int(os.environ.get("LOCAL_RANK") or 0)
    if device is None and not current and 0 < rank < count:
        warn_user(
            f"batches of the process with LOCAL_RANK={rank} go to cuda:0, which is its current "
            f"device, as those of rank 0 do. Call torch.cuda.set_device({rank}) first, or pass "
            f"device='cuda:{rank}' (or 'cuda:0')."
        )
    return torch.device("cuda", current)


# Where batch ops run


def is_own(loader: Any) -> bool:
    """Whether it is fastdata's: who defines how it is iterated also defines ``iterate``."""
    begins = {"__iter__", "_get_iterator"}
    definer = next((kind for kind in type(loader).__mro__ if begins & vars(kind).keys()), object)
    return "iterate" in vars(definer)


class DeviceOps:
    """The batch ops of a loader, epoch after epoch, and the copy of its store on the device.

    Attributes:
        described: where they run in the latest epoch, and why; empty where the loader has none.
    """

    def __init__(
        self, loader: Any, asked: WhereOps, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self.described = ""
        self._loader = loader
        self._asked = asked
        self._device = device
        self._served = LoaderView.find(getattr(loader, "dataset", None))
        self._dtype = dtype
        self._mirror: torch.Tensor | None = None
        self._has_warned = False

    def begin(self) -> tuple[Read | None, Transform | None]:
        """What reads the batches of an epoch, what finishes them; None if the CPU does it all.

        Raises:
            ValueError: they are to be finished on the device, and cannot.
        """
        self.described = ""
        if self._served is None:
            return None, None
        self._served.reader()  # which notices what was changed in place
        dataset = self._served.parts[0]  # several have an obstacle
        has_mirror = dataset.storage == "device"
        obstacle = self._obstacle()
        if obstacle is not None and self._asked == "device":
            raise ValueError(
                f"batch_ops='device' is not possible here: {obstacle}. Use batch_ops='auto'."
            )
        reason = "batch_ops='cpu'" if self._asked == "cpu" else obstacle
        if obstacle is None and not dataset.plan.batch_ops and not has_mirror:
            return None, None
        if reason is not None:
            self.described = f"on the CPU: {reason}"
            if has_mirror:
                self._warn_of_mirror(f", batches are made on the CPU: {reason}")
            return None, None
        handle = handle_of(dataset)
        store = _store(handle)
        program = DeviceProgram(dataset.plan, store.spec, dtype=self._dtype, is_there=has_mirror)
        self.described = f"on {self._device}"
        if program.host is None:
            size = format_bytes(_size_bytes(store))
            self.described += f", from a copy of the store there ({size})"
        else:
            why = f": {program.host_step} runs on the CPU" if program.host_step else ""
            self.described += f", the conversion only{why}"
            if has_mirror:
                self._warn_of_mirror(why)
            if not program.converts:
                self.described = f"on the CPU{why or ': they serve uint8, which is sent as it is'}"
                return None, None

        def read(batch: Any, ring: BatchRing) -> DeviceBatch:
            return handle().read_for_device(program, batch, ring.take)

        return read, partial(self._run, program, handle)

    def _obstacle(self) -> str | None:
        if isinstance(self._loader, DataLoader) and is_own(self._loader):
            return self._loader.device_obstacle()
        return f"the loader is {kind_of(self._loader)}, not fastdata's DataLoader in batches"

    def _warn_of_mirror(self, why: str) -> None:
        if self._asked != "cpu" and not self._has_warned:
            self._has_warned = True
            warn_user(f"storage='device' has no effect{why}")

    def _run(self, program: DeviceProgram, handle: ReaderHandle, batch: DeviceBatch) -> Any:
        """Make the images of a batch on its device."""
        if program.host is not None:
            images = program.run(batch.samples, None)
        else:
            if self._mirror is None:
                self._mirror = _upload(_store(handle), self._device)
            images = program.run(self._mirror, batch.draws, batch.samples)
        return stacked(images, batch.targets, batch.keys)

    def close(self) -> None:
        """Give back the memory on the device. Idempotent; a later epoch copies again."""
        self._mirror = None


def _upload(store: Store, device: torch.device) -> torch.Tensor:
    """Copy a dense uint8 store to (N, C, H, W) on the caller's current stream, which owns it; waits.

    Raises:
        MemoryBudgetError: there is too little memory on the device.
    """
    shape = store.spec.shape
    assert shape is not None
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] + unused_bytes
    check_device_room(_size_bytes(store), free_bytes, str(device))
    copy_NCHW = torch.empty((len(store), *shape), dtype=torch.uint8, device=device)
    start = 0
    for part in copy_NCHW.split(max(1, CHUNK_BYTES // store.spec.sample_bytes)):
        chunk = np.empty((len(part), *shape), np.uint8)
        store.gather_into(np.arange(start, start + len(part)), chunk)
        part.copy_(torch.from_numpy(chunk))
        start += len(part)
    return copy_NCHW


def _store(handle: ReaderHandle) -> Store:
    kept = handle().kept
    assert kept is not None
    return kept.images


def _size_bytes(store: Store) -> int:
    return len(store) * store.spec.sample_bytes
