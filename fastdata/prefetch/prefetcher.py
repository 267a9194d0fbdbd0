"""The prefetchers: a loader's face, and batches that already lie on the device."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fastdata.iterators import HELD_BY_USER, Prefetched
from fastdata.loader import DataLoader
from fastdata.prefetch.backends import Backend, Stream, open_backend
from fastdata.prefetch.batches import count_samples, shard_sizes, split_batch
from fastdata.prefetch.devices import DeviceLike, current_accelerator, current_cuda, resolve_devices
from fastdata.prefetch.epochs import Counts, Epoch, NoMarks, StateMarks, Unmoved
from fastdata.prefetch.feed import Feed, Marks, Ready
from fastdata.prefetch.finish import Finish
from fastdata.prefetch.ops import BatchOps, WhereOps
from fastdata.prefetch.pinning import PinnedMemory
from fastdata.prefetch.report import PrefetchReport
from fastdata.prefetch.staging import Flight, Slot, Staging
from fastdata.report import EpochReport, warn_user
from fastdata.ring import BatchRing
from fastdata.stored import StoredReader

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CudaPrefetcher", "DevicePrefetcher", "Prefetcher"]


class Prefetcher:
    """A loader whose batches lie on devices; use ``CudaPrefetcher`` or ``DevicePrefetcher``.

    Args:
        loader: any iterable of batches.
        devices: where batches go; several get a shard of each batch.
        backend: of the devices; None leaves batches where they are.
        in_shards: whether a batch is a list of one part for each device.
        depth: batches on the devices that the training loop has not taken yet.
        finish: what is done to batches there.
        batch_ops: where those of fastdata's loaders run.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        devices: list[torch.device],
        backend: Backend | None,
        in_shards: bool = False,
        depth: int = 2,
        finish: Finish | None = None,
        batch_ops: WhereOps = "auto",
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: at least one batch must be on its way")
        if batch_ops not in ("auto", "device", "cpu"):
            raise ValueError(f"batch_ops={batch_ops!r} is not one of 'auto', 'device', 'cpu'")
        self._loader = loader
        self._devices, self._backend, self._in_shards, self.depth = devices, backend, in_shards, depth
        self._finish = finish or Finish()
        self._streams: list[Stream] = []
        self._rings: list[list[Slot]] = []
        self._gathering: BatchRing | None = None
        self._pinned: PinnedMemory | None = None
        self._ops: BatchOps | None = None
        self._live: weakref.WeakSet[Epoch] = weakref.WeakSet()
        self._counts = Counts()
        self._marks: StateMarks | None = None
        self._has_warned = False
        if backend is not None:
            self._pinned = PinnedMemory(backend)
            self._ops = BatchOps(loader, batch_ops, self._finish, backend, self._pinned)
            self._unpin = weakref.finalize(self, self._pinned.close)

    # The loader's face

    def __len__(self) -> int:
        loader: Any = self._loader  # one without a length says so itself
        return len(loader)

    def __getattr__(self, name: str) -> Any:
        """Reach through to the loader: what it has not, a prefetcher of it must not seem to have."""
        if name == "_loader" or name.startswith("__"):  # how to copy or pickle a loader is no answer for its prefetcher
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._loader, name)
        own = {} if self._is_own else {"state_dict": self._user_state, "load_state_dict": self._load_user_state}
        return own.get(name, value)

    @property
    def loader(self) -> Iterable[Any]:
        """What is prefetched."""
        return self._loader

    @property
    def device(self) -> torch.device:
        """Where batches lie; the first one of several devices."""
        return self._devices[0]

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader and its samplers the epoch, each that can be told."""
        loader: Any = self._loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        inner = getattr(batch_sampler, "sampler", None)
        listeners: list[Any] = [loader, getattr(loader, "sampler", None), batch_sampler, inner]
        told: list[Any] = []
        for listener in listeners:
            if hasattr(listener, "set_epoch") and not any(listener is one for one in told):
                listener.set_epoch(epoch)
                told.append(listener)

    @property
    def _is_own(self) -> bool:
        """Whether the loader is fastdata's, which tells how far it was read and gathers where it is told."""
        return isinstance(self._loader, DataLoader) and type(self._loader).__iter__ is DataLoader.__iter__

    def _user_state(self) -> Any:
        loader: Any = self._loader
        return self._marks.state if self._marks and self._marks.state is not None else loader.state_dict()

    def _load_user_state(self, state: Any) -> None:
        loader: Any = self._loader
        loader.load_state_dict(state)
        self._marks = None

    # Epochs

    def __iter__(self) -> Iterator[Any]:
        if getattr(self._loader, "persistent_workers", False) or isinstance(self._loader, Iterator):
            for epoch in list(self._live):  # both would read the same iterator
                epoch.close()
        self._marks = None
        self._counts = Counts()
        if self._backend is None:
            return Unmoved(iter(self._loader), self._counts, self._finish_unmoved)
        epoch = self._begin(self._backend)
        self._live.add(epoch)
        return epoch

    def report(self) -> PrefetchReport:
        """How the latest epoch went, complete or not, what was pinned, and why."""
        asked: Any = getattr(self._loader, "report", None)
        said = asked() if callable(asked) else None
        base = said if isinstance(said, EpochReport) else EpochReport(path=f"batches of {type(self._loader).__name__}")
        fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(EpochReport)}
        counts, pinned = self._counts, self._pinned
        return PrefetchReport(
            **fields
            | {
                "batches": counts.batches,
                "samples": counts.samples,
                "wait_s": counts.wait_s,
                "busy_s": counts.busy_s,
                "pinning": pinned.plan.reason if pinned else base.pinning,
            },
            devices=tuple(map(str, self._devices)) if pinned else ("cpu",),
            pinned_bytes=pinned.most_bytes if pinned else 0,
            copies=counts.copies,
            batch_ops=self._ops.describe(self._devices) if self._ops else "",
        )

    def close(self) -> None:
        """End live iterators, unpin all memory, drop copies of the store. Idempotent; a later epoch begins anew."""
        for epoch in list(self._live):
            epoch.close()
        if self._ops is not None:
            self._ops.close()
        self._rings, self._gathering = [], None
        if self._pinned is not None:
            self._pinned.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, backend: Backend) -> Epoch:
        assert self._pinned is not None
        assert self._ops is not None
        on_device = self._ops.begin()
        iterator, marks = self._open_loader(on_device[0] if on_device else None)
        if not self._streams:
            self._streams = [backend.new_stream(device) for device in self._devices]
        slots = self._rings.pop() if self._rings else [Slot() for _ in range(self.depth)]
        flight = Flight(backend, slots, self.depth)
        staging = Staging(
            backend,
            self._pinned,
            flight,
            devices=len(self._devices),
            slots_of_workers=_slots_of_workers(self._loader, iterator),
        )
        self._counts.copies = staging.counts
        feed = Feed(
            iterator,
            backend=backend,
            devices=self._devices,
            streams=self._streams,
            depth=self.depth,
            staging=staging,
            flight=flight,
            finish=self._finish.with_ops(on_device[1]) if on_device else self._finish,
            marks=marks,
        )
        return Epoch(feed, self._counts, slots=slots, rings=self._rings, hand_out=self._hand_out)

    def _open_loader(self, stored: StoredReader | None) -> tuple[Iterator[Any], Marks]:
        loader: Any = self._loader
        if not self._is_own:
            iterator = iter(loader)
            self._marks = StateMarks(loader) if hasattr(loader, "state_dict") else None
            return iterator, self._marks or NoMarks()
        held = max(HELD_BY_USER, self.depth + 1)
        if self._gathering is None:
            self._gathering = BatchRing(loader.ring_slots(held), self._pinned)
        iterator = loader.iterate(Prefetched(ring=self._gathering, held=held, stored=stored))
        return iterator, loader.read_ahead()

    def _finish_unmoved(self, batch: Any, number: int) -> Any:
        shards = [batch]
        if self._in_shards:
            shards = split_batch(batch, shard_sizes(count_samples(batch), len(self._devices)))
        if not self._finish.is_nothing:
            pairs = zip(shards, self._devices, strict=False)
            shards = [self._finish(shard, device, number) for shard, device in pairs]
        return shards if self._in_shards else shards[0]

    def _hand_out(self, item: Ready) -> Any:
        self._warn_once()
        return item.parts if self._in_shards else item.parts[0]

    def _warn_once(self) -> None:
        plan = self._pinned.plan if self._pinned else None
        if plan is not None and plan.is_short and self._counts.copies.pageable and not self._has_warned:
            self._has_warned = True
            warn_user(f"batches go to {self.device} from pageable memory, which takes longer: {plan.reason}")


class CudaPrefetcher(Prefetcher):
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
        transform: called on each batch, or part of one, on the device, in the thread and on its stream, in order.
        dtype: floating-point tensors, and uint8 tensors of four or more dimensions (images), are cast to it on the
            device, before ``transform``; others, such as int64 labels, keep their dtype.
        channels_last: give tensors of four dimensions this memory format, on the device, before ``transform``.
        batch_ops: where the batch ops of fastdata's loaders run, first of all. ``"auto"``: on the device, with the
            draws and pixels of the CPU (floats within 1e-6), if threads read whole batches and samples are not much
            larger as they are stored, which is how they are sent then; else, and with ``"cpu"``, before they are sent.
            ``"device"``: there, whatever is sent. ``report().batch_ops`` says where and why.

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
        transform: Callable[[Any], Any] | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
        batch_ops: WhereOps = "auto",
    ) -> None:
        devices = resolve_devices(device, self._default_device)
        super().__init__(
            loader,
            devices=devices,
            backend=open_backend(devices[0]),
            in_shards=isinstance(device, (list, tuple)),
            depth=depth,
            finish=Finish(dtype=dtype, channels_last=channels_last, transform=transform),
            batch_ops=batch_ops,
        )

    _default_device: Callable[[], torch.device] = staticmethod(current_cuda)


class DevicePrefetcher(CudaPrefetcher):
    """``CudaPrefetcher`` for whichever accelerator the machine has: CUDA, ROCm, XPU, MPS.

    The arguments are those of ``CudaPrefetcher``; ``device=None`` is the current accelerator, or the CPU where there is
    none. On MPS, which has no streams to choose from, batches are copied in the thread without pinning.

    Example:
        >>> next(iter(DevicePrefetcher([torch.zeros(2)], device="cpu")))
        tensor([0., 0.])
    """

    _default_device = staticmethod(current_accelerator)


def _slots_of_workers(loader: Any, iterator: Any) -> Callable[[], Any]:
    """Make the function that says what memory worker processes fill; it must not hold the iterator."""
    collate_fn = getattr(loader, "collate_fn", None)
    arrivals = getattr(iterator, "arrivals", None) or getattr(collate_fn, "arrivals", None)
    return (lambda: arrivals.slots) if arrivals is not None else list
