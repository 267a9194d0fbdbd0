"""From a loader's batch on the host to the same batch on its devices, ahead of the training loop.

For each batch the thread waits for memory before it takes any::

    next(loader) -> pinned memory -> a place in the queue -> the GPU has left an older batch -> copies -> event -> queue

and the training loop's stream waits for the event, not its thread.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from fastdata import memory as host_memory
from fastdata.batch import flatten, memory_of
from fastdata.loader.epochs import LoopTimes, shown_as
from fastdata.memory import PinningPlan, budget_bytes, choose_pinning
from fastdata.prefetch.backend import CudaBackend, Event, Stream
from fastdata.ring import Arrivals, BatchRing, address_of, is_plain

BLOCK_BYTES = 64 << 10
"""Staged tensors up to this size (labels, draws) go to the device as one block, by one copy. What the user keeps of a
block keeps all of it, so larger ones stay apart."""
_ALIGN_BYTES = 16
_PAGE_BYTES = 4096
_LONG_WAIT_S = 0.05
"""The copy of a batch takes less: up to 1.2 GB at 25 GB/s."""
_PATIENCE_S = 10.0
"""How long the end of an epoch waits for a loader that does not answer; the thread then ends with the process."""

# Batches as lists of tensors


def count_samples(tensors: Sequence[Any]) -> int:
    """Length of the first one that has a length; 0 if none has."""
    return next((t.size(0) for t in tensors if isinstance(t, torch.Tensor) and t.ndim), 0)


def cut(tensors: Sequence[Any], devices: int) -> list[list[Any]]:
    """Cut tensors in nearly equal shards, larger ones first; as many as there are samples where those are fewer.

    Those of another length than the first one go to every shard whole.
    """
    samples = count_samples(tensors)
    shards = max(1, min(samples, devices))
    if shards == 1:
        return [list(tensors)]
    is_batch = [isinstance(t, torch.Tensor) and t.ndim > 0 and len(t) == samples for t in tensors]
    pieces = [t.tensor_split(shards) if cuts else [t] * shards for t, cuts in zip(tensors, is_batch, strict=True)]
    return [list(shard) for shard in zip(*pieces, strict=True)]


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own if its elements fill a range of memory, in any order of dimensions; else those of a copy that does."""
    return torch.empty_like(tensor, device="meta").stride()


def _view(octets: torch.Tensor, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return octets.view(tensor.dtype).as_strided(tensor.shape, strides)


def _is_host_tensor(value: Any) -> bool:
    """Whether it is a CPU tensor that its bytes, dtype, shape and strides tell all about."""
    return type(value) is torch.Tensor and is_plain(value)


# Pinned memory


@dataclasses.dataclass(slots=True)
class CopyCounts:
    """Copies of tensors to devices since the epoch began.

    From pinned memory where they lay (``in_place``), after one more copy on the host to pinned memory (``staged``), or
    from pageable memory, in parts by the driver (``pageable``).
    """

    in_place: int = 0
    in_place_bytes: int = 0
    staged: int = 0
    staged_bytes: int = 0
    pageable: int = 0
    pageable_bytes: int = 0

    def add(self, kind: str, size_bytes: int) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        setattr(self, f"{kind}_bytes", getattr(self, f"{kind}_bytes") + size_bytes)

    @property
    def device_bytes(self) -> int:
        return self.in_place_bytes + self.staged_bytes + self.pageable_bytes


class PinnedMemory:
    """Host memory that a prefetcher has pinned, its own and workers' slots, until it dies. Safe from any thread."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self._pid = os.getpid()
        self._lock = threading.RLock()  # memory may die in a thread that is in here
        self._unpins: dict[int, Callable[[], Any]] = {}
        self.refused: set[tuple[int, int]] = set()  # and not tried again
        self.bytes = self.most_bytes = 0
        self.plan = PinningPlan(pin=False, reason="nothing pinned yet")  # the latest; one against pinning stands

    def allocate(self, size_bytes: int) -> np.ndarray:
        """Return uint8 memory, pinned if that may be; ``BatchRing`` takes from here.

        What is pinned is a mapping of its own: exactly so many pages, and shared ones. In private pages a write after
        a fork goes to a copy, and the device would go on reading the old page.
        """
        if size_bytes:
            memory = np.frombuffer(mmap.mmap(-1, -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES), np.uint8)
            if self._pin(memory, (0, size_bytes)):
                return memory
        return np.empty(size_bytes, np.uint8)

    def adopt(self, memory: np.ndarray) -> bool:
        """Pin memory of others; whether it is pinned."""
        key = address_of(memory), memory.nbytes
        return key[0] in self._unpins or self._pin(memory, key)

    def free(self, memory: np.ndarray) -> None:
        """Unpin memory, which no copy may read any more, before it dies."""
        self._unpins.get(address_of(memory), lambda: None)()

    def close(self) -> None:
        """Unpin everything; no copy may read any of it any more. A forked process leaves it to its parent."""
        for unpin in list(self._unpins.values()):
            unpin()

    def _pin(self, buffer: np.ndarray, key: tuple[int, int]) -> bool:
        with self._lock:
            if key in self.refused:
                return False
            size_bytes, free = key[1], budget_bytes(host_memory.available_bytes())
            plan = choose_pinning(
                has_accelerator=True,
                batch_bytes=size_bytes,
                pinned_bytes=self.bytes + size_bytes,
                budget=free._replace(bytes=free.bytes + self.bytes),  # what is pinned was free once
                copies_wait=True,
            )
            if plan.pin and not self.backend.register(buffer):
                plan = PinningPlan(pin=False, reason="not pinned: the driver refuses to", is_short=True)
            self.plan = self.plan if self.plan.is_short else plan
            if not plan.pin:
                self.refused.add(key)
                return False
            address = address_of(buffer)
            unpin = weakref.finalize(buffer, self._unpin, address, buffer.nbytes)  # runs before it is unmapped
            unpin.atexit = False
            self._unpins[address] = unpin
            self.bytes += buffer.nbytes
            self.most_bytes = max(self.most_bytes, self.bytes)
            return True

    def _unpin(self, address: int, size_bytes: int) -> None:
        if os.getpid() == self._pid:
            with self._lock:
                del self._unpins[address]
                self.bytes -= size_bytes
                self.backend.unregister(address)


# The thread

Arrival = tuple[Any, list[Any], list[Event], list[list[torch.Tensor]], int]
"""How far the loader was read; a batch's parts, one for each of the first devices; when each part is there; the memory
of each; samples."""
Outcome = Arrival | BaseException | None
"""What comes of reading a batch; None at the end."""


@dataclasses.dataclass(eq=False)
class Feed:
    """One epoch: reads a loader's iterator in a thread and brings batches to devices, at most ``depth`` ahead.

    The thread ends with the loader, or where something fails; it begins anew if the user asks again. Where nothing is
    pinned, there is none: batches stay where they are, and are read where they are asked for.
    """

    iterator: Iterator[Any] | None  # the loader's, made in the user's thread
    devices: list[torch.device]  # where batches, or their shards, go
    finish: Callable[[Any, torch.device, int], Any] | None = None  # of a part of batch i, on the stream that brought it
    pinned: PinnedMemory | None = None  # of the devices' backend
    streams: list[Stream] = dataclasses.field(default_factory=list)  # one of each device, for the copies
    depth: int = 0
    rings: list[BatchRing] = dataclasses.field(default_factory=list)  # staging buffers that no epoch uses
    arrivals: Arrivals | None = None  # slots of the loader's workers
    mark: Callable[[], Any] = lambda: None  # how far the loader has read; called by who reads it
    hand_over: Callable[[Any], Any] = lambda mark: None  # the user is there now; called in the user's thread

    def __post_init__(self) -> None:
        self.times, self.copies = LoopTimes(), CopyCounts()
        self.batches = self.samples = 0
        self.read_s = self.copy_s = 0.0  # how long the thread waited for the loader, and for copies and what follows
        self.seen: Any = None  # how far the loader had been read with the user's latest batch
        self._number = 0
        self._backend: Any = self.pinned and self.pinned.backend
        self._staging = self.rings.pop() if self.rings else BatchRing(self.depth, self.pinned)
        self._in_flight: deque[tuple[list[Event], list[list[Any]]]] = deque()
        """Copies under way, oldest first: when they are done, and what they read from, which is held until then."""
        self._places: SimpleQueue[list[Event]] = SimpleQueue()
        """Each free place in the queue: the events at which the devices are done with what came before."""
        for _ in range(self.depth):
            self._places.put([])
        self._ready: SimpleQueue[Outcome] = SimpleQueue()
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    # In the user's thread

    def receive(self) -> list[Any]:
        """Return the parts of the next batch, or raise the exception in its place, or StopIteration at the end.

        The calling thread's streams are made to wait for it. The prefetcher's thread starts here and not before: what a
        loader draws for its first batch is drawn while the user waits.
        """
        if self._stopped.is_set():
            raise StopIteration
        asked_at = self.times.ask()
        try:
            with shown_as("fastdata: wait"):
                outcome = self._read_here() if self.pinned is None else self._take()
        except BaseException:  # Ctrl-C, or torch's word on a killed worker
            self.stop()
            raise
        finally:
            self.times.answer(asked_at)
        if self._stopped.is_set():  # by another thread, while this one waited
            raise StopIteration
        mark, parts, _, _, samples = outcome if isinstance(outcome, tuple) else (self.mark(), [], [], [], 0)
        if mark is not None:
            self.seen = mark
            self.hand_over(mark)
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome  # the exception would keep this frame, and it the exception
        if outcome is None:
            self.stop()
            raise StopIteration
        self.batches, self.samples = self.batches + 1, self.samples + samples
        return parts

    def stop(self) -> None:
        """End the thread, and drop what was read ahead. Idempotent. A forked process leaves both to its parent."""
        if os.getpid() != self._pid or self._stopped.is_set():
            return
        self._stopped.set()
        self._places.put([])
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
        self.iterator = self.arrivals = None
        while not self._ready.empty():
            self._ready.get()
        self._ready.put(None)
        if self._thread is None or not self._thread.is_alive():
            self.rings.append(self._staging)

    def _read_here(self) -> Outcome:
        try:
            batch = next(self.iterator or iter(()))
            number, self._number = self._number, self._number + 1
            tensors, build = flatten(batch)
            shards = cut(tensors, len(self.devices))
            parts = [batch] if len(shards) == 1 else [build(shard) for shard in shards]
            if self.finish is not None:
                parts = [self.finish(*each, number) for each in zip(parts, self.devices, strict=False)]
            return None, parts, [], [], count_samples(tensors)
        except StopIteration:
            return None
        except Exception as error:  # noqa: BLE001  # raised where the batch would have come
            return error

    def _take(self) -> Outcome:
        if os.getpid() != self._pid:
            raise RuntimeError("an iterator of a prefetcher works in the process that made it; call iter() in this one")
        streams = [self._backend.current_stream(device) for device in self.devices]
        left = [self._backend.record(stream) for stream in streams]
        if self._thread is None:
            for stream, event in zip(self.streams, left, strict=True):
                stream.wait_event(event)  # what a loader or transform reads may have been made on the user's
            self._thread = threading.Thread(target=self._run, name="fastdata-prefetch", daemon=True)
            self._thread.start()
        outcome = self._ready.get()
        if isinstance(outcome, tuple):
            self._places.put(left)
            for stream, event, memory in zip(streams, *outcome[2:4], strict=False):
                stream.wait_event(event)
                for tensor in memory:
                    self._backend.record_stream(tensor, stream)
        elif outcome is not None:  # the last that its thread has done
            self._thread.join()
            self._thread = None
        return outcome

    # In the thread

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._backend.begin_thread()
            with self._backend.working_on(self.streams):
                while self._bring_next():
                    pass
            self.iterator = None
        except BaseException as error:  # noqa: BLE001  # raised where its batch would have come
            failure = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # without this frame
        while self._in_flight:
            try:
                self._let_go(0)
            except Exception as error:  # noqa: BLE001  # the device is lost, and reads nothing any more
                failure = failure or error
        self._ready.put(failure)
        del failure  # it would keep this frame, and this frame it

    def _bring_next(self) -> bool:
        """Bring one batch; whether there was one, and it is wanted."""
        while self._in_flight and all(event.query() for event in self._in_flight[0][0]):
            self._let_go(len(self._in_flight) - 1)
        if self._stopped.is_set() or self.iterator is None:
            return False
        asked_at = time.perf_counter()
        try:
            holder = [next(self.iterator)]
        except StopIteration:
            return False
        finally:
            self.read_s += time.perf_counter() - asked_at
        arrival = self._bring(holder)
        if arrival is not None:
            self._ready.put(arrival)
        return arrival is not None

    def _bring(self, holder: list[Any]) -> Arrival | None:
        """Bring the batch in ``holder``, which is emptied: nobody else may keep it alive while this waits."""
        mark, number, self._number = self.mark(), self._number, self._number + 1
        tensors, build = flatten(holder.pop())
        samples, shards = count_samples(tensors), cut(tensors, len(self.devices))
        begun_at = time.perf_counter()
        blocks = self._stage(tensors, shards)
        self.copy_s += time.perf_counter() - begun_at
        tensors, streams, place = [], self.streams[: len(shards)], self._take_place()
        if self._stopped.is_set():
            return None
        try:
            for event in place:  # the batch before those in the queue: devices never hold more of them than that
                event.synchronize()
            begun_at = time.perf_counter()
            events: list[Event] = []
            self._in_flight.append((events, shards))
            try:
                with shown_as("fastdata: copy"):
                    moved = [self._copy(*each) for each in zip(shards, blocks, self.devices, strict=False)]
            finally:
                events += [self._backend.record(stream) for stream in streams]
            del blocks  # of the staging buffer
            self._let_go(self.depth)
            parts = [build(tensors) for tensors in moved]
            if self.finish is not None:
                for part, stream in enumerate(streams):
                    with self._backend.working_on([stream]):
                        parts[part] = self.finish(parts[part], self.devices[part], number)
                moved = [flatten(part)[0] for part in parts]
                events = [self._backend.record(stream) for stream in streams]
            self.copy_s += time.perf_counter() - begun_at
        except BaseException:
            self._places.put(place)
            raise
        return mark, parts, events, [[part for t in tensors for part in memory_of(t)] for tensors in moved], samples

    def _take_place(self) -> list[Event]:
        """Wait until the user has taken a batch; if that takes long, let go of the memory of copies, which are done.

        To wait for the copies first would leave the copy engine idle where a step is shorter than a copy.
        """
        try:
            return self._places.get(timeout=_LONG_WAIT_S)
        except Empty:
            self._let_go(0)
            return self._places.get()

    def _stage(self, tensors: list[Any], shards: list[list[Any]]) -> list[Any]:
        """Copy to a pinned buffer what the devices cannot read where it lies, and put the copies in ``shards``.

        Returns:
            of each shard, the part of the buffer that small tensors fill; None where there is none.
        """
        spans: list[tuple[int, int, int]] = []  # shard, tensor, where it begins
        blocks, end = [slice(0)] * len(shards), 0
        for number, shard in enumerate(shards):
            begin = end
            for size_bytes, k in sorted((t.nbytes, k) for k, t in enumerate(shard) if not self._is_readable(t)):
                spans.append((number, k, end))
                if size_bytes <= BLOCK_BYTES:
                    blocks[number] = slice(begin, end + size_bytes)
                end += -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        octets = torch.empty(0, dtype=torch.uint8)
        if spans:
            self._let_go(self.depth - 1)  # batches in flight may have all of the ring's buffers
            octets = torch.from_numpy(self._staging.take((end,), np.dtype(np.uint8)))
        is_pinned, staged = bool(spans) and self._backend.is_pinned(octets), {k for _, k, _ in spans}
        for k, tensor in enumerate(tensors):
            if _is_host_tensor(tensor) and tensor.numel():
                kind = "in_place" if k not in staged else "staged" if is_pinned else "pageable"
                self.copies.add(kind, tensor.nbytes)
        if not is_pinned:
            return [None] * len(shards)
        for number, k, begin in spans:
            tensor = shards[number][k]
            copied = _view(octets[begin : begin + tensor.nbytes], tensor, dense_strides(tensor))
            shards[number][k] = copied.copy_(tensor)
        return [octets[block] if block.stop else None for block in blocks]

    def _is_readable(self, tensor: Any) -> bool:
        """Whether devices can read it where it lies, or in its own way; the slot of a worker is pinned for it."""
        if not _is_host_tensor(tensor) or not tensor.numel():
            return True
        if dense_strides(tensor) != tensor.stride():
            return False
        address, pinned, arrivals = tensor.data_ptr(), self.pinned, self.arrivals
        slots = [slot for slot in arrivals.slots if 0 <= address - address_of(slot) < slot.nbytes] if arrivals else []
        return self._backend.is_pinned(tensor) or any(pinned is not None and pinned.adopt(slot) for slot in slots)

    def _copy(self, shard: list[Any], block: torch.Tensor | None, device: torch.device) -> list[Any]:
        """Queue the copies of a shard, one for all tensors in the block."""
        first, size_bytes = (0, 0) if block is None else (block.data_ptr(), block.nbytes)
        copied = None if block is None else self._backend.copy(block, device)
        moved = []
        for tensor in shard:
            if not _is_host_tensor(tensor):
                lies_on = tensor.device if isinstance(tensor, torch.Tensor) else tensor.data.device
                moved.append(tensor.to(device) if lies_on.type == "cpu" else tensor)
            elif copied is not None and 0 <= (begin := tensor.data_ptr() - first) < size_bytes:
                moved.append(_view(copied[begin : begin + tensor.nbytes], tensor, tensor.stride()))
            else:
                moved.append(self._backend.copy(tensor, device))
        return moved

    def _let_go(self, most: int) -> None:
        """Wait until at most so many batches are in flight, and let go of what older ones read, lost device or not."""
        while len(self._in_flight) > most:
            events, shards = self._in_flight.popleft()
            try:
                for event in events:
                    event.synchronize()
            finally:
                shards.clear()  # an exception keeps this frame
