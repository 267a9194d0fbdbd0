"""Batches on the device before the training loop asks for them.

A thread reads the loader, finds the batch pinned or pins it, and copies it on a stream of its own (``copies``). Who may
write to memory when:

    pinned host memory   held by the thread until the event after its copy is done
    device memory        made on the thread's stream; the training loop's stream waits for the copy before it reads, and
                         ``record_stream`` keeps the memory until that stream has done what it was given
    a store on a device  made, read and given back on the thread's stream only (``device``)
    the whole device     the thread copies a batch when the device has left the one ``depth + 1`` before it

Batch ops of fastdata's loaders run on the thread's stream, behind the copies. All that an accelerator does goes through
``backend.CudaBackend``, or an object with its methods.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fastdata.batch import flatten
from fastdata.loader.epochs import HELD_BY_USER
from fastdata.memory import format_bytes
from fastdata.prefetch.backend import CPU, CudaBackend, DeviceLike, Stream, resolve_devices
from fastdata.prefetch.copies import CopyCounts, Feed, PinnedMemory
from fastdata.prefetch.device import DeviceOps, Ops, WhereOps, is_own
from fastdata.report import EpochReport, warn_user
from fastdata.ring import BatchRing

if TYPE_CHECKING:
    from typing_extensions import Self

Transform = Callable[[Any], Any]

_IMAGE_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchReport(EpochReport):
    """How the latest epoch of a prefetcher went, complete or not.

    Batches, samples and times are those of the training loop; ``wait_s`` is how long it waited for the prefetcher.
    What the loader says of itself (path, engine, workers, memory) is the loader's.

    Args:
        devices: where batches went; ``("cpu",)`` where nothing was moved.
        read_s: seconds its thread waited for the loader.
        copy_s: seconds its thread was busy with copies, waited for them, and for what follows them on the device.
        pinned_bytes: the most host memory that was pinned at a time, by this prefetcher.
        copies: copies of tensors, by where they were copied from.
        batch_ops: where they ran, and why there if on the CPU; empty where the loader has none of fastdata's.
    """

    devices: tuple[str, ...] = ("cpu",)
    read_s: float = 0.0
    copy_s: float = 0.0
    pinned_bytes: int = 0
    copies: CopyCounts = dataclasses.field(default_factory=CopyCounts)
    batch_ops: str = ""

    def __str__(self) -> str:
        lines = super(PrefetchReport, self).__str__().splitlines()
        if self.devices == ("cpu",):
            return "\n".join([*lines, "batches stay on the CPU"])
        copies = self.copies
        lines += [
            f"to {', '.join(self.devices)}: {format_bytes(copies.device_bytes)}, of it "
            f"{format_bytes(copies.in_place_bytes)} straight from pinned memory ({copies.in_place} tensors), "
            f"{format_bytes(copies.staged_bytes)} by one more host copy ({copies.staged}), "
            f"{format_bytes(copies.pageable_bytes)} from pageable memory ({copies.pageable})",
            f"pinned at most {format_bytes(self.pinned_bytes)}",
        ]
        return "\n".join([*lines, *([f"batch ops: {self.batch_ops}"] if self.batch_ops else [])])


class Epoch(Iterator[Any]):
    """What a feed has brought, handed out; its thread ends when this is dropped."""

    def __init__(self, feed: Feed, hand_out: Callable[[list[Any]], Any]) -> None:
        self._feed, self._hand_out = feed, hand_out  # which keeps the prefetcher alive
        self.close = weakref.finalize(self, feed.stop)

    def __next__(self) -> Any:
        return self._hand_out(self._feed.receive())


class CudaPrefetcher:
    """Batches of a loader on the GPU, brought there while the GPU computes.

    A thread reads the loader and copies batches on a stream of its own, from pinned memory; the training loop gets
    tensors on the device and never waits for a copy. Batches that fastdata's loader gathers, or that its worker
    processes write to their shared ring, are copied from where they lie; others are copied once on the host, to one of
    ``depth`` pinned buffers. Where there is too little memory to pin, copies are pageable, which is said once.

    A batch may be any nesting of tuples, lists, dicts, namedtuples, dataclasses and ``SampleBatch``; values that are no
    tensors, and tensors that lie on a device already, pass through. Without a GPU, and with ``device="cpu"``, batches
    stay where they are, and everything else is the same. Attributes that it has not are the loader's: ``dataset``,
    ``sampler``, ``batch_sampler``, ``batch_size``, ``state_dict`` ...; ``state_dict()`` counts batches as the training
    loop gets them, whatever was read ahead.

    Args:
        loader: any iterable of batches; each ``iter`` of the prefetcher is one of the loader.
        device: where batches go; default the current CUDA device, or the CPU where there is none. A list of devices
            splits each batch along its first dimension into nearly equal parts and yields the list of them: each is
            copied straight to its device; a batch of fewer samples gives as many parts as it has samples. Tensors of
            another length than the first one, and all that is no tensor, go to every device.
        depth: batches that lie on the device before the training loop takes them. The GPU holds up to two more: the
            loop's, and one that is being copied. A depth of 1 leaves less room for a loop that varies.
        transform: called on each batch, or part of one, on the device, in the thread and on its stream, in order, under
            ``torch.no_grad()``. The loop's autocast and inference mode do not hold in that thread: enter them inside.
        dtype: floating-point tensors, and uint8 tensors of four or more dimensions (images), are cast to it on the
            device, before ``transform``; others, such as int64 labels, keep their dtype.
        channels_last: give tensors of four dimensions this memory format, on the device, before ``transform``.
        batch_ops: where the batch ops of fastdata's loaders run, first of all. ``"auto"``: on the device, with the
            draws and pixels of the CPU (floats within 1e-6), if threads read whole batches and samples are not much
            larger as they are stored, which is how they are sent then; else, and with ``"cpu"``, before they are sent.
            ``"device"``: there, whatever is sent. ``report().batch_ops`` says where and why.
        backend: speaks to devices that are not CUDA's: an object with the methods of
            ``fastdata.prefetch.backend.CudaBackend``; name them with ``device=``.

    Raises:
        DeviceError: torch does not see the device.
        ValueError: when an epoch begins: batch ops are to run on the device and cannot.
        MemoryBudgetError: in place of the first batch: ``storage="device"`` does not fit there.

    An exception of the loader or of ``transform`` is raised where its batch would have come. What a loader
    draws from global generators while it is read is drawn in the thread; what it draws for its first batch, in order.
    Pinned memory is given back when the prefetcher is dropped, at the end of a ``with`` statement, or by ``close()``.

    Example:
        >>> loader = [torch.zeros(2, 3), torch.ones(2, 3)]
        >>> batches = CudaPrefetcher(loader, device="cpu", transform=lambda batch: batch + 1)
        >>> len(batches), [batch.mean().item() for batch in batches]
        (2, [1.0, 2.0])
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: DeviceLike | Sequence[DeviceLike] | None = None,
        *,
        depth: int = 2,
        transform: Transform | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
        batch_ops: WhereOps = "auto",
        backend: CudaBackend | None = None,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: at least one batch must be on its way")
        if batch_ops not in ("auto", "device", "cpu"):
            raise ValueError(f"batch_ops={batch_ops!r} is not one of 'auto', 'device', 'cpu'")
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise ValueError(f"dtype={dtype!r} is no floating-point torch.dtype, such as torch.float16")
        self._devices = resolve_devices(device, is_known=backend is not None)
        self.loader, self.device, self.depth = loader, self._devices[0], depth
        if backend is None and self.device != CPU:
            backend = CudaBackend(self.device)
        self._in_shards = isinstance(device, (list, tuple))
        casts: dict[str, Any] = {"dtype": dtype, "channels_last": channels_last}
        self._finishing = {**casts, "transform": transform}
        self._streams: list[Stream] = []
        self._rings: list[BatchRing] = []
        self._gathering: BatchRing | None = None
        self._live: weakref.WeakSet[Epoch] = weakref.WeakSet()
        self._feed = Feed(None, self._devices)  # of the latest epoch; of an empty one before the first
        self._has_warned = False
        self._pinned: PinnedMemory | None = None
        if backend is not None:
            self._pinned = PinnedMemory(backend)
            self._ops = DeviceOps(loader, batch_ops, self._devices, self._pinned, **casts)
            weakref.finalize(self, self._pinned.close)

    # The loader's face

    def __len__(self) -> int:
        loader: Any = self.loader  # one without a length says so itself
        return len(loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # how to copy or pickle a loader is no answer for its prefetcher
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.loader, name)
        own = {} if is_own(self.loader) else {"state_dict": self._user_state, "load_state_dict": self._load_user_state}
        return own.get(name, value)

    def set_epoch(self, epoch: int) -> None:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        inner = getattr(batch_sampler, "sampler", None)
        listeners: list[Any] = [self.loader, getattr(self.loader, "sampler", None), batch_sampler, inner]
        for listener in {id(one): one for one in listeners if hasattr(one, "set_epoch")}.values():
            listener.set_epoch(epoch)

    def _user_state(self) -> Any:
        loader: Any = self.loader
        return loader.state_dict() if self._feed.seen is None else self._feed.seen

    def _load_user_state(self, state: Any) -> None:
        loader: Any = self.loader
        loader.load_state_dict(state)
        self._feed.seen = None

    # Epochs

    def __iter__(self) -> Iterator[Any]:
        if getattr(self.loader, "persistent_workers", False) or isinstance(self.loader, Iterator):
            for epoch in list(self._live):  # both would read the same iterator
                epoch.close()
        read, ops = (self._ops.begin() if self._pinned else None) or (None, None)
        finish = partial(_finish, ops=ops, **self._finishing) if ops or any(self._finishing.values()) else None
        loader: Any = self.loader
        if self._pinned is None:
            self._feed = Feed(iter(loader), self._devices, finish)
            return Epoch(self._feed, self._hand_out)
        if self._pinned.refused:  # there may be room by now
            self._pinned.refused.clear()
            self._rings.clear()
        reset = getattr(getattr(loader, "_iterator", None), "_reset", None)
        if isinstance(reset, partial) and reset.args[0] is self._pinned:
            del loader._iterator._reset
        if is_own(loader):
            held = max(HELD_BY_USER, self.depth + 1)
            self._gathering = self._gathering or BatchRing(loader.ring_slots(held), self._pinned)
            iterator = loader.iterate(self._gathering, held, read)
            read_ahead = loader.read_ahead()
            marks = {"mark": read_ahead.mark, "hand_over": read_ahead.hand_over}
        else:
            iterator, marks = iter(loader), {"mark": getattr(loader, "state_dict", lambda: None)}
        if getattr(loader, "_iterator", None) is not None:
            loader._iterator._reset = partial(_reset_for_others, self._pinned, self._live)
        self._streams = self._streams or [self._pinned.backend.new_stream(device) for device in self._devices]
        pinning = {"pinned": self._pinned, "rings": self._rings, "arrivals": _arrivals(loader, iterator)}
        self._feed = Feed(iterator, self._devices, finish, streams=self._streams, depth=self.depth, **pinning, **marks)
        epoch = Epoch(self._feed, self._hand_out)
        self._live.add(epoch)
        return epoch

    def report(self) -> PrefetchReport:
        asked: Any = getattr(self.loader, "report", None)
        said = asked() if callable(asked) else None
        base = said if isinstance(said, EpochReport) else EpochReport(path=f"batches of {type(self.loader).__name__}")
        feed, pinned = self._feed, self._pinned
        fields: dict[str, Any] = {field.name: getattr(base, field.name) for field in dataclasses.fields(EpochReport)}
        fields |= {"batches": feed.batches, "samples": feed.samples}
        fields |= {"wait_s": feed.times.wait_s, "busy_s": feed.times.busy_s}
        fields |= {"read_s": feed.read_s, "copy_s": feed.copy_s}
        if pinned is not None:
            fields |= {"pinning": pinned.plan.reason, "pinned_bytes": pinned.most_bytes, "copies": feed.copies}
            fields |= {"devices": tuple(map(str, self._devices)), "batch_ops": self._ops.described}
        return PrefetchReport(**fields)

    def close(self) -> None:
        """End live iterators, unpin all memory, drop copies of the store. Idempotent; a later epoch begins anew."""
        for epoch in list(self._live):
            epoch.close()
        self._rings, self._gathering = [], None
        if self._pinned is not None:
            self._ops.close()
            self._pinned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_out(self, parts: list[Any]) -> Any:
        plan = self._pinned.plan if self._pinned else None
        if plan is not None and plan.is_short and self._feed.copies.pageable and not self._has_warned:
            self._has_warned = True
            warn_user(f"batches go to {self.device} from pageable memory, which takes longer: {plan.reason}")
        return parts if self._in_shards else parts[0]


def _finish(
    batch: Any, device: torch.device, number: int, *, ops: Ops | None, transform: Transform | None, **casts: Any
) -> Any:
    """Batch ops, casts and the user's transform, in this order, on the calling thread's stream."""
    if ops is not None:
        batch = ops(batch, device)
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
        kind = RuntimeError if isinstance(error, StopIteration) else type(error)  # the former ends epochs in silence
        try:
            named = kind(message)
        except Exception:  # noqa: BLE001  # a user's type may raise anything where it is made of a message
            named = RuntimeError(message)
        raise named from error


def _cast(tensor: Any, device: torch.device, dtype: torch.dtype | None, channels_last: bool) -> Any:
    if not isinstance(tensor, torch.Tensor) or tensor.device not in (device, CPU):
        return tensor
    is_image = tensor.dtype is torch.uint8 and tensor.ndim >= _IMAGE_DIMENSIONS
    layout = torch.channels_last if channels_last and tensor.ndim == _IMAGE_DIMENSIONS else torch.preserve_format
    return tensor.to(dtype=dtype if tensor.is_floating_point() or is_image else None, memory_format=layout)


def _arrivals(loader: Any, iterator: Any) -> Any:
    return getattr(iterator, "arrivals", None) or getattr(getattr(loader, "collate_fn", None), "arrivals", None)


def _reset_for_others(pinned: PinnedMemory, live: weakref.WeakSet[Epoch], loader: Any, *arguments: Any) -> None:
    """Reset an iterator as torch does for an epoch of persistent workers, that another one than the prefetcher reads.

    Workers fill the same slots for whoever reads the loader next. A slot is free once the user's last reference has
    died, and a copy that does not wait (``non_blocking=True``) may then be reading it still: from ordinary memory that
    cannot be, and for its own pinned memory torch's allocator notes an event, but not for what others registered. So
    slots stay pinned between epochs of the prefetcher, and not for others. torch's loader, too, begins an epoch of
    persistent workers by ``_reset``, and by nothing else that could be told.
    """
    for epoch in list(live):
        epoch.close()
    arrivals = _arrivals(loader, loader._iterator)
    for slot in arrivals.slots if arrivals else ():
        pinned.free(slot)
    del loader._iterator._reset
    loader._iterator._reset(loader, *arguments)
