"""Batches on the device before the training loop asks for them.

A thread reads the loader, and copies its batches on a stream of its own. For each it waits for
leave before it takes memory on the device::

    next(loader) -> pinned memory -> leave -> copy on the side stream -> event -> queue

and the training loop's stream waits for the event, not its thread. Leave for a batch is given as
the loop takes another: an event where its stream had left the one before. There are ``depth`` to
begin with. Who may write to memory when:

    pinned host memory   held by the thread until the event after its copy is done
    device memory        made on the thread's stream; the training loop's stream waits for the copy
                         before it reads, and ``record_stream`` keeps the memory until that stream
                         has done what it was given
    the whole device     the thread copies a batch when the device has left the one ``depth + 1``
                         before it

Batch ops of fastdata's loaders run on the thread's stream, after the copies, or on the CPU before
batches are sent. Batches of a store that lies on the device need no thread: they are cut on the
stream of the loop as it asks for them (``StoreCut``).
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.cuda

from fastdata.datasets.batch import map_batch, memory_of, moves_itself
from fastdata.datasets.reader import BatchRing
from fastdata.datasets.ring import is_plain
from fastdata.loaders.device import (
    DeviceLike,
    DeviceOps,
    PinnedMemory,
    StoreCut,
    Transform,
    WhereOps,
    allocated_bytes,
    begin_epoch,
    begin_thread,
    device_memory,
    host_memory,
    is_own,
    left_behind,
    move_object,
    resolve_device,
    ring_slots,
)
from fastdata.loaders.epochs import HELD_BY_USER, LoopCounts, profiled, sample_count
from fastdata.machine import format_bytes
from fastdata.pixels.images import Array
from fastdata.report import EpochReport, Line

if TYPE_CHECKING:
    from typing_extensions import Self

_PATIENCE_S = 10.0
"""How long the end of an epoch waits for a loader that does not answer; the thread then ends with
the process."""
_END = object()


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PrefetchReport(EpochReport):
    """How the latest epoch of a prefetcher went, complete or not.

    Batches, samples and times are those of the training loop; ``wait_s`` is how long it waited for
    the prefetcher. What the loader says of itself (path, engine, workers, memory) is the loader's.

    Args:
        device: where batches went; ``"cpu"`` where nothing was moved.
        pinned_bytes: host memory that this prefetcher has pinned, at most, in the sizes that
            torch's allocator takes.
        in_place_bytes: what was copied to the device from pinned memory where it lay,
        staged_bytes: after one more copy on the host to pinned memory,
        pageable_bytes: or from pageable memory, in parts by the driver.
        batch_ops: where they ran, and why there if on the CPU; empty where the loader has none of
            fastdata's.
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


class Epoch(Iterator[Any]):
    """The batches of a transfer, whose thread ends when this is dropped."""

    def __init__(self, transfer: Transfer, prefetcher: CudaPrefetcher) -> None:
        self._transfer = transfer
        self._prefetcher = prefetcher  # is kept alive
        self.close = weakref.finalize(self, transfer.stop)

    def __next__(self) -> Any:
        return self._transfer.receive()


class CudaPrefetcher:
    """Batches of a loader on the GPU, brought there while the GPU computes.

    A thread reads the loader and copies batches on a stream of its own, from pinned memory; the
    training loop gets tensors on the device and never waits for a copy. Batches that the threads of
    fastdata's loader gather are copied from where they lie, as is what the loader has pinned;
    others are copied once on the host, to pinned memory of torch's allocator. Where there is too
    little memory to pin, copies are pageable, which is said once.

    A batch may be any nesting of tuples, lists, dicts, namedtuples, dataclasses and
    ``SampleBatch``. Objects of other classes go by their own ``pin_memory()`` and ``to(device)``;
    one warning names a class that has tensors but no ``to``. Values that are not tensors, and
    tensors that are on a device already, pass through. The GPU work that made these in the loader
    is waited for; a loader that works on a stream of its own must let the current one wait for it.
    Without a GPU, and with ``device="cpu"``, batches stay where they are, and everything else is
    the same. Attributes that it has not are the loader's: ``dataset``, ``sampler``,
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
            cast to it on the device, before ``transform``; others keep their dtype, such as int64
            labels and tensors in objects that went by their own ``to``.
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
        MemoryBudgetError: when an epoch begins: ``storage="device"`` does not fit there.

    An exception of the loader or of ``transform`` is raised where its batch would have come. What a
    loader draws from global generators while it is read is drawn in the thread; what it draws for
    its first batch, in order. A loader must not write again to a pinned tensor that it has yielded:
    it is read when the copy runs, and not before. Pinned memory goes back to torch's allocator,
    which keeps it for the next one that asks, when the prefetcher is dropped, at the end of a
    ``with`` statement, or by ``close()``.

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
        self.loader: Any = loader
        self.device = resolve_device(device)
        self.depth = depth
        is_asked = channels_last or getattr(loader, "memory_format", None) is torch.channels_last
        self._cast = partial(_cast, dtype=dtype, channels_last=is_asked)
        cast = self._cast if dtype or is_asked else None
        self._finish = partial(_finish, transform=transform, cast=cast)
        self._ring: BatchRing | None = None
        self._live: weakref.WeakSet[Epoch] = weakref.WeakSet()
        # Of the latest epoch; of an empty one before the first.
        self._transfer = Transfer(iter(()), self.device, self._finish)
        self._pinned: PinnedMemory | None = None
        self._stream: Any = None
        if self.device.type == "cuda":
            self._pinned = PinnedMemory(self.device)
            self._ops = DeviceOps(loader, batch_ops, self.device)

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
        batches = getattr(self.loader, "batch_sampler", None)
        samplers = [getattr(holder, "sampler", None) for holder in (self.loader, batches)]
        listeners = {id(it): it for it in (self.loader, batches, *samplers)}  # once each
        for listener in listeners.values():
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
        read, ops, cut = self._ops.begin()
        if cut is not None:
            return self._begin_there(cut, pinned)
        finish = partial(self._finish, ops=ops)
        self._stream = self._stream or torch.cuda.Stream(self.device)
        cuda = {"stream": self._stream, "pinned": pinned, "depth": self.depth}
        if not is_own(loader):
            mark = getattr(loader, "state_dict", lambda: None)
            return Transfer(iter(loader), self.device, finish, mark=mark, **cuda)
        held = max(HELD_BY_USER, self.depth + 1)
        pinned.ring_slots = ring_slots(loader, held)
        self._ring = self._ring or BatchRing(pinned.ring_slots, pinned.allocate)
        iterator = begin_epoch(loader, self._ring, held, read)
        progress = iterator.progress
        progress.hand_over(progress.mark())  # what is read ahead of the user does not count
        marks = {"mark": progress.mark, "hand_over": progress.hand_over}
        return Transfer(iterator, self.device, finish, **marks, **cuda)

    def _begin_there(self, cut: StoreCut, pinned: PinnedMemory) -> Transfer:
        """An epoch of batches of a store on the device, made by the one who asks for them."""
        progress = cut.begin(self.loader, self._cast)
        marks = cut.marks  # not the cut itself, which holds a copy of the store
        progress.hand_over(marks[0])
        said = {"mark": lambda: marks[0], "hand_over": progress.hand_over}
        transfer = Transfer(cut, self.device, self._finish, pinned=pinned, **said)
        cut.send = transfer.send
        return transfer

    def report(self) -> PrefetchReport:
        ask = getattr(self.loader, "report", None)
        said = ask() if callable(ask) else None
        if not isinstance(said, EpochReport):
            said = EpochReport(path=f"batches of {type(self.loader).__name__}")
        latest = self._transfer
        values = dataclasses.asdict(said) | latest.counts.figures() | latest.sent_bytes
        if self._pinned is not None:
            values |= {
                "device": str(self.device),
                "pinning": self._pinned.reason,
                "pinned_bytes": self._pinned.ring_bytes + self._pinned.copies_bytes,
                "batch_ops": self._ops.described,
            }
        return PrefetchReport(**values)

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


def _finish(
    batch: Any, *, transform: Transform | None, cast: Transform | None, ops: Transform | None = None
) -> Any:
    """Batch ops, casts and the user's transform, in this order, on the calling thread's stream."""
    if ops is not None:
        batch = ops(batch)
    if cast is not None:
        batch = map_batch(cast, batch)
    if transform is None:
        return batch
    try:
        with torch.no_grad():
            return transform(batch)
    except StopIteration as error:  # which would end the epoch in silence
        raise RuntimeError("transform= raised StopIteration") from error


def _cast(tensor: Any, dtype: torch.dtype | None, channels_last: bool) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    is_image = tensor.dtype is torch.uint8 and tensor.ndim >= 4
    is_laid_out = channels_last and tensor.ndim == 4
    return tensor.to(
        dtype=dtype if tensor.is_floating_point() or is_image else None,
        memory_format=torch.channels_last if is_laid_out else torch.preserve_format,
    )


# An epoch


def _refuse_capture(device: torch.device) -> None:
    if not torch.backends.cuda.is_built():
        return  # such a build captures nothing, and the question below raises
    with torch.cuda.device(device):
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise RuntimeError(
            "next() of a CudaPrefetcher was called while a CUDA graph is captured, which "
            "cannot hold the arrival of a batch. Take the batch before the capture, and copy "
            "it to a tensor that the graph reads."
        )


def _event() -> Any:
    return torch.cuda.Event(blocking=True)  # a waiting thread must not spin


class BatchHandle(NamedTuple):
    """A batch on the device, or on its way there."""

    batch: Any
    samples: int
    mark: Any = None  # how far the loader was read
    ready: Any = None  # the event behind what is done to it on the side stream
    memory: Sequence[Any] = ()  # of the device, each with a ``record_stream`` method


Outcome = BatchHandle | BaseException
"""What comes of reading a batch; StopIteration at the end."""


@dataclasses.dataclass(eq=False)
class Transfer:
    """One epoch: a thread reads a loader's iterator and copies batches, at most ``depth`` ahead.

    The thread ends with the loader, or where something fails; another one begins if the user asks
    again. Without a stream there is none: batches stay where they are, and are read where they are
    asked for.
    """

    iterator: Iterator[Any]  # the loader's, made in the user's thread
    device: torch.device
    finish: Transform  # of each batch, on the stream that brought it
    stream: Any = None  # for the copies
    pinned: Any = None  # PinnedMemory, where there is a stream
    depth: int = 0
    mark: Callable[[], Any] = lambda: None  # how far the loader has read; called by who reads it
    # The user is there now; called in the user's thread.
    hand_over: Callable[[Any], Any] = lambda mark: None

    def __post_init__(self) -> None:
        self.counts = LoopCounts()
        self.seen: Any = None  # how far the loader had been read with the user's latest batch
        self.sent_bytes = dict.fromkeys(("in_place_bytes", "staged_bytes", "pageable_bytes"), 0)
        # What copies read on the host, until the events behind them.
        self._in_flight: deque[tuple[Any, list[Any]]] = deque()
        self._leave: SimpleQueue[Any] = SimpleQueue()
        for _ in range(self.depth):
            self._leave.put(_event())
        self._ready: SimpleQueue[Outcome] = SimpleQueue()
        self._is_stopped = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    # In the user's thread

    def receive(self) -> Any:
        """Return the next batch, or raise the exception in its place, or StopIteration at the end.

        The calling thread's stream is made to wait for it. The copy thread starts here and not
        before: what a loader draws for its first batch is drawn while the user waits.
        """
        if self._is_stopped:
            raise StopIteration
        if self.device.type == "cuda":
            _refuse_capture(self.device)
        asked_at = time.perf_counter()
        try:
            with profiled("fastdata: wait"):
                outcome = self._read_here() if self.stream is None else self._take()
        except BaseException:  # Ctrl-C, or torch's word on a killed worker
            self.stop()
            raise
        finally:
            self.counts.answer(asked_at)
        if self._is_stopped:  # by another thread, while this one waited
            raise StopIteration
        self.seen = outcome.mark if isinstance(outcome, BatchHandle) else self.mark()
        self.hand_over(self.seen)
        if self.pinned is not None:
            self.pinned.notices.give()
        if isinstance(outcome, BatchHandle):
            self.counts.batches += 1
            self.counts.samples += outcome.samples
            return outcome.batch
        if isinstance(outcome, StopIteration):
            self.stop()
        try:
            raise outcome
        finally:
            del outcome  # the exception would keep this frame, and it the exception

    def stop(self) -> None:
        """End the thread, and drop what was read ahead. Idempotent; nothing in a forked process."""
        if os.getpid() != self._pid or self._is_stopped:
            return
        self._is_stopped = True
        self._leave.put(None)
        thread = self._thread  # read once: the training loop's thread may drop it
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
        self.iterator = iter(())
        with suppress(Empty):
            while True:
                self._ready.get_nowait()  # the training loop's thread may take some, too
        self._ready.put(StopIteration())

    def _read_here(self) -> Outcome:
        try:
            batch = next(self.iterator)
            samples = sample_count(batch)
            return BatchHandle(self.finish(batch), samples, self.mark())
        except Exception as error:  # noqa: BLE001  # raised where the batch would have come
            return error

    def _take(self) -> Outcome:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "an iterator of a prefetcher works in the process that made it; call iter() in "
                "this one"
            )
        user_stream = torch.cuda.current_stream(self.device)
        if self._thread is None:
            # What a loader or transform reads may have been made there.
            self.stream.wait_stream(user_stream)
            thread = threading.Thread(target=self._run, name="fastdata-prefetch", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise RuntimeError(
                    f"CudaPrefetcher cannot start its thread: {error}. This process has "
                    f"{threading.active_count()} Python threads. Allow more (`ulimit -u`, or the "
                    "container's limit of processes), or use fewer workers."
                ) from error
            self._thread = thread
        outcome = self._ready.get()
        if isinstance(outcome, BatchHandle):
            left = _event()
            left.record(user_stream)
            user_stream.wait_event(outcome.ready)
            for owner in outcome.memory:
                owner.record_stream(user_stream)
            self._leave.put(left)
        elif not self._is_stopped:  # the thread has put it, and ends now
            thread = self._thread
            self._thread = None
            if thread is not None:
                thread.join()
        return outcome

    # In the copy thread

    def _run(self) -> None:
        outcome: BaseException = StopIteration()
        try:
            begin_thread(self.device)
            try:
                with torch.cuda.stream(self.stream):
                    while self._copy_next():
                        pass
                self.iterator = iter(())
            finally:
                # Of a lost device they stay: to free pinned memory asks it, and aborts the process.
                while self._in_flight:
                    self._let_go()
        except BaseException as error:  # noqa: BLE001  # raised where its batch would have come
            # Without this frame.
            outcome = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self._ready.put(outcome)
        del outcome  # it would keep this frame, and this frame it

    def _let_go(self) -> None:
        """Wait until the device has read a batch on the host, which others may have then."""
        ready, _ = self._in_flight[0]
        ready.synchronize()
        self._in_flight.popleft()

    def _copy_next(self) -> bool:
        """Bring one batch; whether there was one, and it is wanted."""
        if self._is_stopped:
            return False
        batch = next(self.iterator, _END)
        if batch is _END:
            return False
        mark = self.mark()
        samples = sample_count(batch)
        self._follow_makers(batch)
        batch, sources = self._stage(batch)
        left = self._leave.get()
        if left is None or self._is_stopped:
            return False
        try:
            # So the device never holds more than the queue, the loop's batch and this one.
            left.synchronize()
            if len(self._in_flight) == self.depth:
                self._let_go()
            ready = _event()
            self._in_flight.append((ready, sources))
            try:
                with profiled("fastdata: copy"):
                    batch = map_batch(self._copy, batch, moves_itself)
                batch = self.finish(batch)
            finally:
                del sources  # an exception keeps this frame
                ready.record(self.stream)
            memory = self._memory(batch)
        except BaseException:
            del batch
            self._leave.put(left)
            raise
        self._ready.put(BatchHandle(batch, samples, mark, ready, memory))
        return True

    def _follow_makers(self, batch: Any) -> None:
        """Let the side stream wait for tensors that the loader has made on the device.

        Its threads make them on the default stream, which is current in every new thread. Their
        memory belongs to that stream, and what is done to them here may read it later.
        """
        made = [
            it
            for it in device_memory(batch)
            if isinstance(it, torch.Tensor) and it.device == self.device
        ]
        if made:
            self.stream.wait_stream(torch.cuda.default_stream(self.device))
            for tensor in made:
                tensor.record_stream(self.stream)

    def _memory(self, batch: Any) -> list[Any]:
        """Return what the loop's stream must be recorded on; note what has stayed on the CPU."""
        held = memory_of(batch)
        memory = [it for it in held if not isinstance(it, torch.Tensor) or it.is_cuda]
        if len(memory) < len(held) and (kind := left_behind(batch)):
            self.pinned.notices.add(
                f"batches hold {kind}, whose tensors stay on the CPU: the class has no method "
                "to(device). Write one that returns the object on that device, and pin_memory() "
                "for copies that do not wait; or put the tensors into tuples, dicts or "
                "dataclasses, which are copied item by item."
            )
        return memory

    def _stage(self, batch: Any) -> tuple[Any, list[Any]]:
        """Replace what the device cannot read in place by pinned copies.

        Returns:
            The batch, and what of it is read on the host until the copies are done.
        """
        staged_bytes = 0
        sources: list[Any] = []

        def stage(value: Any) -> Any:
            nonlocal staged_bytes
            if isinstance(value, torch.Tensor):
                staged, size_bytes = self._stage_tensor(value)
                sources.append(staged)
            else:
                staged, size_bytes = self._stage_object(value)
                sources.append(staged)
                sources.extend(host_memory(staged))  # its own ``to`` may replace these in it
            staged_bytes += size_bytes
            return staged

        batch = map_batch(stage, batch, moves_itself)
        # Of each batch in flight one, the next, and one that torch has not found to be read yet.
        need_bytes = (self.depth + 2) * staged_bytes
        self.pinned.copies_bytes = max(need_bytes, self.pinned.copies_bytes)
        return batch, sources

    def _stage_tensor(self, value: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return a tensor, or a pinned copy of it, and the bytes for that."""
        if not _is_host_tensor(value):
            return value, 0
        road = "in_place_bytes"
        staged_bytes = 0
        if not value.is_pinned() or not _is_dense(value):
            pinned = self.pinned.pin(value)
            road = "pageable_bytes" if pinned is None else "staged_bytes"
            if pinned is not None:
                np.copyto(_as_array(pinned), _as_array(value))
                value = pinned
                staged_bytes = allocated_bytes(value.nbytes)
        self.sent_bytes[road] += value.nbytes
        return value, staged_bytes

    def _stage_object(self, value: Any) -> tuple[Any, int]:
        """Return an object of the user's own class, pinned if it can be, and the bytes for that."""
        host = host_memory(value)
        road = "in_place_bytes"
        staged_bytes = 0
        if not all(tensor.is_pinned() for tensor in host):
            pinned = self.pinned.pin_object(value)
            road = "pageable_bytes" if pinned is None else "staged_bytes"
            if pinned is not None:
                value = pinned
                staged_bytes = sum(allocated_bytes(tensor.nbytes) for tensor in host)
        self.sent_bytes[road] += sum(tensor.nbytes for tensor in host)
        return value, staged_bytes

    def send(self, tensor: torch.Tensor) -> Any:
        """Bring a tensor to the device, on the current stream."""
        staged, _ = self._stage(tensor)
        return self._copy(staged)

    def _copy(self, value: Any) -> Any:
        """Queue the copy of a tensor or object, one transfer if it is dense."""
        if _is_host_tensor(value):
            return value.to(self.device, non_blocking=value.is_pinned())
        if not isinstance(value, torch.Tensor):
            return move_object(value, self.device)
        return value.to(self.device) if value.device.type == "cpu" else value


def _is_host_tensor(value: Any) -> bool:
    """Whether it is a CPU tensor with elements, and bytes, dtype, shape and strides are all."""
    return type(value) is torch.Tensor and is_plain(value) and value.numel() > 0


def _as_array(tensor: torch.Tensor) -> Array:
    """View a plain tensor as an array, of integers of the same size: NumPy lacks some dtypes.

    ``Tensor.copy_`` would start a team of OpenMP threads on all cores for each thread that calls
    it. NumPy starts none, releases the GIL, and copies what has equal dense strides in one piece.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dtype = integers.get(tensor.itemsize, tensor.dtype)  # of 16 bytes are only complex numbers
    return tensor.view(dtype).numpy()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory: else torch would copy them first."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
