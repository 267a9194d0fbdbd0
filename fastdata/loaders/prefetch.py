"""``CudaPrefetcher``: batches of a loader on the device before the training loop needs them.

Batches are copied on a side stream: by the training loop's thread if threads of fastdata's loader
read whole batches, else by a thread of the prefetcher. Batch ops run on this stream after the
copies, or on the CPU before batches are sent. If the samples are stored on the device, batches are
cut there on the training loop's stream, inside ``next()``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.cuda

from fastdata.datasets.buffers import BatchRing
from fastdata.datasets.trees import map_batch
from fastdata.errors import check_choices
from fastdata.loaders.copy_thread import ThreadTransfer
from fastdata.loaders.device import (
    DeviceLike,
    DeviceOps,
    Transform,
    WhereOps,
    begin_epoch,
    is_own,
    resolve_device,
    ring_slots,
)
from fastdata.loaders.floats import AS_MADE, Form
from fastdata.loaders.iterators import HELD_BY_USER, ThreadIter
from fastdata.loaders.loop_copies import LoopTransfer
from fastdata.loaders.pinned import PinnedMemory, Sender
from fastdata.loaders.resident import StoreCut
from fastdata.loaders.transfer import LoopEpoch
from fastdata.machine.units import format_bytes
from fastdata.report import EpochReport, Line

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PrefetchReport(EpochReport):
    """Figures of the latest epoch of a prefetcher, complete or not.

    Batches, samples and times are those of the training loop. ``wait_s`` is how long it waited for
    the prefetcher. Path, engine, workers and memory are those of the loader's report.

    Args:
        device: the device of the batches; ``"cpu"`` if nothing was moved.
        pinned_bytes: most bytes of host memory that this prefetcher has pinned at a time, in the
            block sizes of torch's allocator.
        in_place_bytes: bytes copied to the device directly from the loader's pinned memory.
        staged_bytes: bytes copied to pinned memory first, by one more copy on the host.
        pageable_bytes: bytes copied from ordinary memory, which takes longer.
        batch_ops: where the steps on whole batches ran, and why if on the CPU; empty for a dataset
            that is not fastdata's.
    """

    device: str = "cpu"
    pinned_bytes: int = 0
    in_place_bytes: int = 0
    staged_bytes: int = 0
    pageable_bytes: int = 0
    batch_ops: str = ""

    def _lines(self) -> Iterator[Line]:
        yield from super()._lines()
        if self.device == "cpu":
            yield "batches stay on the CPU"
            return
        yield (
            f"to {self.device}: {format_bytes(self.in_place_bytes)} straight from pinned memory, "
            f"{format_bytes(self.staged_bytes)} by one more host copy, "
            f"{format_bytes(self.pageable_bytes)} from pageable memory"
        )
        yield f"pinned at most {format_bytes(self.pinned_bytes)}"
        if self.batch_ops:
            yield f"batch ops: {self.batch_ops}"


class CudaPrefetcher:
    """Iterates over the batches of a loader on the GPU; they are copied while the GPU computes.

    Batches are copied on a CUDA stream of their own, from pinned memory. The training loop gets
    tensors on the device and does not wait for a copy. If the threads of fastdata's loader read
    whole batches and there is no ``transform``, ``next()`` queues the copies of all batches that
    are ready. Otherwise a thread reads the loader and queues them. Whole batches of these threads,
    and tensors that the loader has pinned, are copied directly. All others are first copied on the
    host, to pinned memory of torch's allocator. If there is too little memory to pin, copies come
    from ordinary memory, with one warning.

    A batch may be any nesting of tuples, lists, dicts, namedtuples, dataclasses and
    ``SampleBatch``. Objects of other classes are moved by their own ``pin_memory()`` and
    ``to(device)``; one warning names a class that has tensors but no ``to``. Values that are not
    tensors are not changed. Neither are tensors that are already on a device: the loop's GPU work
    on them begins after the work that made them.

    Without a GPU, and with ``device="cpu"``, batches stay where they are, and everything else is
    the same. All other attributes are the loader's: ``dataset``, ``sampler``, ``batch_size``,
    ``set_epoch``, ``state_dict`` ... ``state_dict()`` counts batches when the training loop gets
    them, not when they are read ahead.

    Args:
        loader: any iterable of batches. Each ``iter()`` of the prefetcher calls its ``iter()``.
        device: device of the batches; default: the current CUDA device, or the CPU without CUDA.
            For several devices use one process each (``torchrun``).
        depth: number of batches that wait on the device for the training loop. The GPU holds up to
            two more: the loop's, and one that is being copied. With 1 the loop may wait if some of
            its steps are much shorter than others.
        transform: called on each batch, on the device, in order, under ``torch.no_grad()``. It runs
            in the prefetcher's thread, where the loop's ``torch.autocast`` has no effect: use it
            inside of the function.
        dtype: floating-point tensors, and uint8 tensors of four or more dimensions (images), are
            cast to it on the device, before ``transform``. All others keep their dtype, such as
            int64 labels, and tensors in objects that are moved by their own ``to``.
        channels_last: give tensors of four dimensions this memory format, on the device, before
            ``transform``. This is also done if the loader has this ``memory_format``.
        batch_ops: where the batch ops of fastdata's loaders run: the steps of the transform that
            run on whole batches. ``"auto"``: if threads read, the CPU crops and augments, uint8 is
            sent, and the device converts and normalises; with ``storage="device"`` it does all of
            it. Else as ``"cpu"``: all run before batches are sent. ``"device"``: on the device, or
            an error. Random numbers and pixels are those of the CPU (floats within 1e-6).
            ``report().batch_ops`` gives the choice and the reason.

    Raises:
        DeviceError: torch does not see the device.
        ValueError: when an epoch begins: ``batch_ops="device"``, but they cannot run there.
        MemoryBudgetError: when an epoch begins: ``storage="device"`` does not fit there.

    An exception of the loader or of ``transform`` is raised instead of its batch. If a thread
    reads the loader, random numbers that the loader takes from global generators mix with those of
    the training loop in no fixed order. A loader of your own must not write again to a pinned
    tensor that it has yielded, because the tensor is read later, when the copy runs.

    ``close()``, the end of a ``with`` statement, or deleting the prefetcher gives its pinned memory
    back to torch's allocator, which keeps it for later use.

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
            raise ValueError(f"depth={depth}: it must be 1 or more, so that a batch is on its way")
        check_choices({"batch_ops": get_args(WhereOps)}, batch_ops=batch_ops)
        self.loader: Any = loader
        self.device = resolve_device(device)
        self.depth = depth
        is_channels_last = getattr(loader, "memory_format", None) is torch.channels_last
        form = Form(dtype, channels_last or is_channels_last)
        self._finish = Finish(transform, form)
        self._ring: BatchRing | None = None
        self._live: weakref.WeakSet[PrefetchIterator] = weakref.WeakSet()
        # The latest epoch; an empty one before the first.
        self._epoch = LoopEpoch(iterator=iter(()), device=self.device, finish=self._finish)
        self._pinned: PinnedMemory | None = None
        self._stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._pinned = PinnedMemory(self.device)
            self._ops = DeviceOps(loader, batch_ops, self.device, self._pinned, form)

    # Attributes of the loader

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # Special methods of the loader, such as those for copies, are not the prefetcher's.
        if name == "loader" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.loader, name)
        if is_own(self.loader):
            return value
        own = {"state_dict": self._user_state, "load_state_dict": self._load_user_state}
        return own.get(name, value)

    def _user_state(self) -> Any:
        seen = self._epoch.seen
        return self.loader.state_dict() if seen is None else seen

    def _load_user_state(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        self._epoch.seen = None

    # Epochs

    def __iter__(self) -> Iterator[Any]:
        if getattr(self.loader, "persistent_workers", False) or isinstance(self.loader, Iterator):
            # Otherwise two epochs would read the same iterator.
            for live in list(self._live):
                live.close()
        self._epoch = self._begin()
        iterator = PrefetchIterator(self._epoch, self)
        self._live.add(iterator)
        return iterator

    def _begin(self) -> LoopEpoch:
        """Begin an epoch of the loader, in the prefetcher's ring if the loader is fastdata's."""
        loader = self.loader
        if self._pinned is None:
            return LoopEpoch(iterator=iter(loader), device=self.device, finish=self._finish)
        work = self._ops.begin()
        if work.cut is not None:
            return self._begin_cut(work.cut, self._pinned)
        self._stream = self._stream or torch.cuda.Stream(self.device)
        begin = partial(
            self._begin_copies,
            device=self.device,
            finish=replace(self._finish, ops=work.finish),
            # Pinned at a time: a copy of each batch in flight, a copy of the next one, and one more
            # that torch's allocator keeps until it notices that the device has read it.
            sender=Sender(self.device, self._pinned, batches=self.depth + 2),
            stream=self._stream,
            depth=self.depth,
        )
        if not is_own(loader):
            mark = getattr(loader, "state_dict", lambda: None)
            return begin(iterator=iter(loader), mark=mark)
        held = max(HELD_BY_USER, self.depth + 1)
        self._pinned.ring_slots = ring_slots(loader, held)
        self._ring = self._ring or BatchRing(self._pinned.ring_slots, self._pinned.allocate)
        iterator = begin_epoch(loader, self._ring, held, work.read)
        progress = iterator.progress
        # A state that is saved before the first batch must not count batches that are read ahead.
        progress.mark_delivered(progress.mark())
        return begin(iterator=iterator, mark=progress.mark, mark_delivered=progress.mark_delivered)

    def _begin_copies(self, *, iterator: Iterator[Any], **options: Any) -> ThreadTransfer:
        """Begin an epoch whose copies are queued by the training loop if that is quick."""
        is_quick = isinstance(iterator, ThreadIter) and iterator.reads_whole
        # A transform may do anything, such as wait for the device.
        if is_quick and self._finish.transform is None:
            return LoopTransfer(iterator=iterator, **options)
        return ThreadTransfer(iterator=iterator, **options)

    def _begin_cut(self, begin: Callable[..., StoreCut], pinned: PinnedMemory) -> LoopEpoch:
        """Begin an epoch of batches that are cut from a store on the device, inside ``next()``."""
        sender = Sender(self.device, pinned)
        cut = begin(send=sender.send, cast=self._finish.cast)
        progress = cut.progress
        # ``mark`` outlives the iterator, so it must not refer to ``cut``, which keeps the copy of
        # the store in memory.
        marks = cut.marks
        progress.mark_delivered(marks[0])
        return LoopEpoch(
            iterator=cut,
            device=self.device,
            finish=self._finish,
            sender=sender,
            mark=lambda: marks[0],
            mark_delivered=progress.mark_delivered,
        )

    def report(self) -> PrefetchReport:
        """Return figures of the latest epoch: those of the loader's report, and of the copies."""
        report = getattr(self.loader, "report", None)
        loaded = report() if callable(report) else None
        if not isinstance(loaded, EpochReport):
            loaded = EpochReport(path=f"batches of {type(self.loader).__name__}")
        values = dataclasses.asdict(loaded) | self._epoch.counts.figures()
        if self._epoch.sender is not None:
            values |= self._epoch.sender.sent_bytes
        if self._pinned is not None:
            values |= {
                "device": str(self.device),
                "pinning": self._pinned.reason,
                "pinned_bytes": self._pinned.ring_bytes + self._pinned.copies_bytes,
                "batch_ops": self._ops.described,
            }
        return PrefetchReport(**values)

    def close(self) -> None:
        """End all iterators, and free pinned memory and copies of the store. Idempotent."""
        for iterator in list(self._live):
            iterator.close()
        self._ring = None
        if self._pinned is not None:
            self._pinned.forget()
            self._ops.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PrefetchIterator(Iterator[Any]):
    """The iterator of an epoch. The epoch ends when the iterator is deleted."""

    def __init__(self, epoch: LoopEpoch, prefetcher: CudaPrefetcher) -> None:
        self._epoch = epoch
        self._prefetcher = prefetcher  # it must live as long as the iterator
        # Runs once: when it is called, when the iterator is deleted, or when Python exits.
        self.close = weakref.finalize(self, epoch.stop)

    def __next__(self) -> Any:
        return self._epoch.receive()


@dataclass(frozen=True)
class Finish:
    """Work on each batch on the current stream: batch ops, casts, then the user's transform."""

    transform: Transform | None
    form: Form
    ops: Transform | None = None

    def __call__(self, batch: Any) -> Any:
        if self.ops is not None:
            batch = self.ops(batch)
        if self.form != AS_MADE:
            batch = map_batch(self.cast, batch)
        if self.transform is None:
            return batch
        try:
            with torch.no_grad():
                return self.transform(batch)
        except StopIteration as error:  # it would end the epoch silently
            raise RuntimeError("transform= raised StopIteration") from error

    def cast(self, tensor: Any) -> Any:
        """Give a tensor the dtype and memory format that the user chose.

        A tensor that already has them, such as a result of ``ToFloats``, is returned itself.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        is_image = tensor.dtype is torch.uint8 and tensor.ndim >= 4
        is_laid_out = self.form.channels_last and tensor.ndim == 4
        return tensor.to(
            dtype=self.form.dtype if tensor.is_floating_point() or is_image else None,
            memory_format=torch.channels_last if is_laid_out else torch.preserve_format,
        )
