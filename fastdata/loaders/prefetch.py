"""Batches on the device before the training loop asks for them.

A thread reads the loader, finds the batch pinned or pins it, and copies it on a stream of its own
(``feed``). Who may write to memory when:

    pinned host memory   held by the thread until the event after its copy is done
    device memory        made on the thread's stream; the training loop's stream waits for the copy
    before it reads, and
                         ``record_stream`` keeps the memory until that stream has done what it was
                         given
    a store on a device  made, read and given back on the thread's stream only (``device``)
    the whole device     the thread copies a batch when the device has left the one ``depth + 1``
    before it

Batch ops of fastdata's loaders run on the thread's stream, behind the copies.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.cuda

from fastdata.datasets.batch import flatten
from fastdata.datasets.ring import BatchRing
from fastdata.errors import DeviceError
from fastdata.loaders.device_ops import DeviceOps, Ops, WhereOps, is_own
from fastdata.loaders.epochs import HELD_BY_USER
from fastdata.loaders.feed import CopyCounts, Feed, Pinned
from fastdata.machine.memory import format_bytes
from fastdata.report import EpochReport, Line, warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

DeviceLike = str | int | torch.device
Transform = Callable[[Any], Any]

_IMAGE_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
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
        figures = super(PrefetchReport, self).as_dict()
        return figures | {f"copies_{name}": figure for name, figure in copies.items()}

    def _lines(self) -> Iterator[Line]:
        yield from super(PrefetchReport, self)._lines()
        if self.device == "cpu":
            yield "batches stay on the CPU"
            return
        copies = self.copies
        yield (
            f"to {self.device}: {format_bytes(copies.device_bytes)}, of it "
            f"{format_bytes(copies.in_place_bytes)} straight from pinned memory "
            f"({copies.in_place} tensors), "
            f"{format_bytes(copies.staged_bytes)} by one more host copy ({copies.staged}), "
            f"{format_bytes(copies.pageable_bytes)} from pageable memory ({copies.pageable})"
        )
        yield f"pinned at most {format_bytes(self.pinned_bytes)}"
        if self.batch_ops:
            yield f"batch ops: {self.batch_ops}"


class Epoch(Iterator[Any]):
    """What a feed has brought, handed out; its thread ends when this is dropped."""

    def __init__(self, feed: Feed, prefetcher: CudaPrefetcher) -> None:
        self._feed = feed
        self._prefetcher = prefetcher  # is kept alive
        self.close = weakref.finalize(self, feed.stop)

    def __next__(self) -> Any:
        batch = self._feed.receive()
        self._prefetcher.say_pageable(self._feed)
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
        batch_ops: where the batch ops of fastdata's loaders run, first of all. ``"auto"``: on the
            device, with the draws and pixels of the CPU (floats within 1e-6), if threads read whole
            batches and samples are not much larger as they are stored, which is how they are sent
            then; else, and with ``"cpu"``, before they are sent. ``"device"``: there, whatever is
            sent. ``report().batch_ops`` says where and why.

    Raises:
        DeviceError: torch does not see the device.
        ValueError: when an epoch begins: batch ops are to run on the device and cannot.
        MemoryBudgetError: in place of the first batch: ``storage="device"`` does not fit there.

    An exception of the loader or of ``transform`` is raised where its batch would have come. What a
    loader draws from global generators while it is read is drawn in the thread; what it draws for
    its first batch, in order. A loader must not write again to a pinned tensor that it has yielded:
    it is read when the copy runs, and not before. Pinned memory goes back to torch's allocator,
    which keeps it for whoever asks next, when the prefetcher is dropped, at the end of a ``with``
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
        self.loader = loader
        self.device = _resolve_device(device)
        self.depth = depth
        is_asked = channels_last or getattr(loader, "memory_format", None) is torch.channels_last
        casts: dict[str, Any] = {"dtype": dtype, "channels_last": is_asked}
        self._finishing = {**casts, "transform": transform}
        self._ring: BatchRing | None = None
        self._live: weakref.WeakSet[Epoch] = weakref.WeakSet()
        # Of the latest epoch; of an empty one before the first.
        self._feed = Feed(None, self.device)
        self._has_warned = False
        self._pinned: Pinned | None = None
        self._stream: Any = None
        if self.device.type == "cuda":
            self._pinned = Pinned(self.device)
            self._ops = DeviceOps(loader, batch_ops, self.device, **casts)

    # The loader's face

    def __len__(self) -> int:
        loader: Any = self.loader  # one without a length says so itself
        return len(loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith(
            "__"
        ):  # how to copy or pickle a loader is no answer for its prefetcher
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.loader, name)
        if is_own(self.loader):
            return value
        own = {"state_dict": self._user_state, "load_state_dict": self._load_user_state}
        return own.get(name, value)

    def set_epoch(self, epoch: int) -> None:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        sampler = getattr(self.loader, "sampler", None)
        inner = getattr(batch_sampler, "sampler", None)
        listeners: dict[int, Any] = {
            id(one): one for one in (self.loader, sampler, batch_sampler, inner)
        }
        for listener in listeners.values():
            if hasattr(listener, "set_epoch"):
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
        finish: Callable[..., Any] | None = None
        begun = None if self._pinned is None else self._ops.begin()
        read, ops = begun or (None, None)
        if ops or any(self._finishing.values()):
            finish = partial(_finish, device=self.device, ops=ops, **self._finishing)
        if self._pinned is None:
            self._feed = Feed(iter(self.loader), self.device, finish)
        else:
            self._feed = self._begin(self._pinned, finish, read)
        epoch = Epoch(self._feed, self)
        self._live.add(epoch)
        return epoch

    def _begin(self, pinned: Pinned, finish: Callable[..., Any] | None, read: Any) -> Feed:
        """An epoch of the loader, in the prefetcher's ring where it is fastdata's."""
        loader: Any = self.loader
        self._stream = self._stream or torch.cuda.Stream(self.device)
        device = {"stream": self._stream, "pinned": pinned, "depth": self.depth}
        if not is_own(loader):
            mark = getattr(loader, "state_dict", lambda: None)
            return Feed(iter(loader), self.device, finish, mark=mark, **device)
        held = max(HELD_BY_USER, self.depth + 1)
        pinned.ring_slots = loader.ring_slots(held)
        self._ring = self._ring or BatchRing(pinned.ring_slots, pinned.allocate)
        iterator = loader.iterate(self._ring, held, read)
        progress = loader.read_ahead()
        hand_over = progress.hand_over
        return Feed(
            iterator, self.device, finish, mark=progress.mark, hand_over=hand_over, **device
        )

    def report(self) -> PrefetchReport:
        ask = getattr(self.loader, "report", None)
        said = ask() if callable(ask) else None
        if not isinstance(said, EpochReport):
            said = EpochReport(path=f"batches of {type(self.loader).__name__}")
        feed = self._feed
        values: dict[str, Any] = {
            field.name: getattr(said, field.name) for field in dataclasses.fields(EpochReport)
        }
        values |= {
            "batches": feed.batches,
            "samples": feed.samples,
            "wait_s": feed.times.wait_s,
            "busy_s": feed.times.busy_s,
            "read_s": feed.read_s,
            "copy_s": feed.copy_s,
        }
        if self._pinned is not None:
            values |= {
                "device": str(self.device),
                "pinning": self._pinned.reason,
                "pinned_bytes": self._pinned.ring_bytes + self._pinned.copies_bytes,
                "copies": feed.copies,
                "batch_ops": self._ops.described,
            }
        return PrefetchReport(**values)

    def close(self) -> None:
        """End live iterators, give back pinned memory and copies of the store. Idempotent."""
        for epoch in list(self._live):
            epoch.close()
        self._ring = None
        if self._pinned is not None:
            self._ops.close()
            self._pinned.ring_bytes = 0
            self._pinned.copies_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def say_pageable(self, feed: Feed) -> None:
        """Warn, once, that batches of an epoch go to the device the slow way, and why."""
        if self._has_warned or not feed.copies.pageable or self._pinned is None:
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
    ops: Ops | None,
    transform: Transform | None,
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
    is_image = tensor.dtype is torch.uint8 and tensor.ndim >= _IMAGE_DIMENSIONS
    layout = (
        torch.channels_last
        if channels_last and tensor.ndim == _IMAGE_DIMENSIONS
        else torch.preserve_format
    )
    return tensor.to(
        dtype=dtype if tensor.is_floating_point() or is_image else None, memory_format=layout
    )


def _resolve_device(device: DeviceLike | None) -> torch.device:
    """Return the device asked for, with its number; None is the current one, or the CPU.

    Raises:
        DeviceError: torch does not see it.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if isinstance(device, (list, tuple)):
        raise DeviceError(
            f"device={device!r} is a list, and one process brings batches to one device. Start a "
            "process for each GPU (torchrun), or give a module of DataParallel whole batches on "
            "its first device."
        )
    resolved = torch.device(("cuda" if count else "cpu") if device is None else device)
    if resolved.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"device={str(device)!r} is neither the CPU nor a CUDA device; leave batches on the "
            "CPU."
        )
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
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
    if resolved == torch.device("cuda"):
        resolved = torch.device("cuda", torch.cuda.current_device())
        rank = int(os.environ.get("LOCAL_RANK") or 0)
        if device is None and not resolved.index and 0 < rank < count:
            warn_user(
                f"batches of the process with LOCAL_RANK={rank} go to cuda:0, which is its current "
                f"device, as those of rank 0 do. Call torch.cuda.set_device({rank}) first, or pass "
                f"device='cuda:{rank}' (or 'cuda:0')."
            )
    return resolved
