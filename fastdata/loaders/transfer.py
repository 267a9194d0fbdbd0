"""One epoch's batches, brought from the host to a device ahead of the training loop.

For each batch the copy thread waits for leave before it takes memory on the device::

    next(loader) -> pinned memory -> leave -> copy on the side stream -> event -> queue

and the training loop's stream waits for the event, not its thread. Leave for a batch is given as the
loop takes another: an event where its stream had left the one before. There are ``depth`` to begin
with.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.cuda

from fastdata.datasets.batch import flatten, memory_of
from fastdata.datasets.ring import is_plain
from fastdata.loaders.epochs import LoopCounts, sample_count, shown_as
from fastdata.machine import memory as host_memory
from fastdata.machine.memory import budget_bytes, choose_pinning
from fastdata.report import log

_PATIENCE_S = 10.0
"""How long the end of an epoch waits for a loader that does not answer; the thread then ends with
the process."""
_EXCHANGE_MODE = "cudaThreadExchangeStreamCaptureMode"
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_END = object()


# Pinned memory


@dataclasses.dataclass(slots=True)
class CopyCounts:
    """Copies of tensors to the device since the epoch began.

    From pinned memory where they lay (``in_place``), after one more copy on the host to pinned
    memory (``staged``), or from pageable memory, in parts by the driver (``pageable``).
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


class PinnedMemory:
    """What a prefetcher has of torch's pinned memory: its loader's ring, and copies of batches.

    The ring may take the share of the free memory that ``choose_pinning`` allows; a larger one
    stays ordinary memory, whose batches are copied. Safe from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = ""  # what is said of it
        self._refusal = ""
        self.ring_slots = 0
        self.ring_bytes = 0
        self.copies_bytes = 0

    @property
    def reason(self) -> str:
        copies = "copies pinned" if self.copies_bytes else ""
        said = filter(None, (self._ring, copies, self._refusal))
        return "; ".join(said) or "nothing pinned yet"

    def allocate(self, size_bytes: int) -> np.ndarray:
        """Return uint8 memory for one of the ring's slots, pinned if all may be."""
        begin_thread(self._device)
        need_bytes = self.ring_slots * allocated_bytes(size_bytes)
        is_allowed = need_bytes <= self.ring_bytes
        if not is_allowed:
            plan = choose_pinning(
                has_accelerator=True,
                batch_bytes=need_bytes,
                pinned_bytes=need_bytes,
                budget=budget_bytes(host_memory.available_bytes()),
                copies_wait=True,
            )
            is_allowed = plan.pin
            self._ring = f"ring {plan.reason}"
        slot = self.pin(torch.empty(size_bytes, dtype=torch.uint8)) if is_allowed else None
        if slot is None:
            return np.empty(size_bytes, np.uint8)
        self.ring_bytes = max(need_bytes, self.ring_bytes)
        return slot.numpy()

    def pin(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return pinned memory for such a tensor, dense; None where the driver refuses."""
        if self._refusal:
            return None
        try:
            return torch.empty_like(like, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._refusal = f"not pinned: the driver refuses to ({reason})"
            return None


def allocated_bytes(size_bytes: int) -> int:
    """What torch's allocator takes: the next power of two."""
    return 1 << max(size_bytes - 1, 0).bit_length()


def begin_thread(device: torch.device) -> None:
    """Prepare a thread of the prefetcher or its loader for asking CUDA for events and memory.

    A thread begins on device 0, where a context would take memory that nobody may want. And while
    the training loop captures a graph in torch's default mode ("global"), such calls are forbidden
    and end the capture, unless their thread has said that it minds none.
    """
    torch.cuda.set_device(device)
    # Torch loads libcudart for all to see.
    names = ctypes.CDLL(None) if os.name == "posix" else None
    exchange_mode: Any = getattr(names, _EXCHANGE_MODE, None)
    if exchange_mode is None:
        log.info(
            "%s is not found: capture CUDA graphs before iter() of a CudaPrefetcher", _EXCHANGE_MODE
        )
    else:
        exchange_mode(ctypes.byref(ctypes.c_int(_RELAXED)))


# The copy thread


def _event() -> Any:
    return torch.cuda.Event(blocking=True)  # a waiting thread must not spin


class BatchHandle(NamedTuple):
    """A batch on the device, or on its way there."""

    batch: Any
    samples: int
    mark: Any = None  # how far the loader was read
    ready: Any = None  # the event behind what is done to it on the side stream
    memory: Sequence[torch.Tensor] = ()


Outcome = BatchHandle | BaseException | None
"""What comes of reading a batch; None at the end."""


@dataclasses.dataclass(eq=False)
class Transfer:
    """One epoch: a thread reads a loader's iterator and copies batches, at most ``depth`` ahead.

    The thread ends with the loader, or where something fails; another one begins if the user asks
    again. Without a stream there is none: batches stay where they are, and are read where they are
    asked for.
    """

    iterator: Iterator[Any]  # the loader's, made in the user's thread
    device: torch.device
    finish: Callable[[Any, int], Any]  # of batch i, on the stream that brought it
    stream: Any = None  # for the copies
    pinned: Any = None
    depth: int = 0
    mark: Callable[[], Any] = lambda: None  # how far the loader has read; called by who reads it
    # The user is there now; called in the user's thread.
    hand_over: Callable[[Any], Any] = lambda mark: None

    def __post_init__(self) -> None:
        self.counts = LoopCounts()
        self.copies = CopyCounts()
        self.read_s = 0.0  # how long the thread waited for the loader
        self.copy_s = 0.0  # and for copies and what follows
        self.seen: Any = None  # how far the loader had been read with the user's latest batch
        self._number = -1  # of the latest batch
        # What copies read on the host, until the events behind them.
        self._in_flight: deque[tuple[Any, list[Any]]] = deque()
        self._leave: SimpleQueue[Any] = SimpleQueue()
        for _ in range(self.depth):
            self._leave.put(_event())
        self._ready: SimpleQueue[Outcome] = SimpleQueue()
        self._stopped = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    # In the user's thread

    def receive(self) -> Any:
        """Return the next batch, or raise the exception in its place, or StopIteration at the end.

        The calling thread's stream is made to wait for it. The copy thread starts here and not
        before: what a loader draws for its first batch is drawn while the user waits.
        """
        if self._stopped.is_set():
            raise StopIteration
        asked_at = self.counts.ask()
        try:
            with shown_as("fastdata: wait"):
                outcome = self._read_here() if self.stream is None else self._take()
        except BaseException:  # Ctrl-C, or torch's word on a killed worker
            self.stop()
            raise
        finally:
            self.counts.answer(asked_at)
        if self._stopped.is_set():  # by another thread, while this one waited
            raise StopIteration
        self.seen = outcome.mark if isinstance(outcome, BatchHandle) else self.mark()
        self.hand_over(self.seen)
        if isinstance(outcome, BatchHandle):
            self.counts.batches += 1
            self.counts.samples += outcome.samples
            return outcome.batch
        if outcome is None:
            self.stop()
            raise StopIteration
        try:
            raise outcome
        finally:
            del outcome  # the exception would keep this frame, and it the exception

    def stop(self) -> None:
        """End the thread, and drop what was read ahead. Idempotent; nothing in a forked process."""
        if os.getpid() != self._pid or self._stopped.is_set():
            return
        self._stopped.set()
        self._leave.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)
        self.iterator = iter(())
        while not self._ready.empty():
            self._ready.get()
        self._ready.put(None)

    def _read_here(self) -> Outcome:
        try:
            batch = next(self.iterator)
            self._number += 1
            samples = sample_count(batch)
            return BatchHandle(self.finish(batch, self._number), samples)
        except StopIteration:
            return None
        except Exception as error:  # noqa: BLE001  # raised where the batch would have come
            return error

    def _take(self) -> Outcome:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "an iterator of a prefetcher works in the process that made it; call iter() in "
                "this one"
            )
        # A build without CUDA captures nothing, and what it has in place of the question raises.
        if torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "next() of a CudaPrefetcher was called while a CUDA graph is captured, which "
                "cannot hold the arrival of a batch. Take the batch before the capture, and copy "
                "it to a tensor that the graph reads."
            )
        user_stream = torch.cuda.current_stream(self.device)
        if self._thread is None:
            # What a loader or transform reads may have been made there.
            self.stream.wait_stream(user_stream)
            self._thread = threading.Thread(target=self._run, name="fastdata-prefetch", daemon=True)
            self._thread.start()
        outcome = self._ready.get()
        if isinstance(outcome, BatchHandle):
            left = _event()
            left.record(user_stream)
            user_stream.wait_event(outcome.ready)
            for tensor in outcome.memory:
                if tensor.device.type == "cuda":
                    tensor.record_stream(user_stream)
            self._leave.put(left)
        elif outcome is not None:  # the last that its thread has done
            self._thread.join()
            self._thread = None
        return outcome

    # In the copy thread

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            begin_thread(self.device)
            try:
                with torch.cuda.stream(self.stream):
                    while self._copy_next():
                        pass
                self.iterator = iter(())
            finally:
                while self._in_flight:
                    self._let_go()
        except BaseException as error:  # noqa: BLE001  # raised where its batch would have come
            # Without this frame.
            failure = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        self._in_flight.clear()  # of a lost device, which reads nothing any more
        self._ready.put(failure)
        del failure  # it would keep this frame, and this frame it

    def _let_go(self) -> None:
        """Wait until the device has read a batch on the host, which others may have then."""
        ready, _ = self._in_flight[0]
        ready.synchronize()
        self._in_flight.popleft()

    def _copy_next(self) -> bool:
        """Bring one batch; whether there was one, and it is wanted."""
        if self._stopped.is_set():
            return False
        asked_at = time.perf_counter()
        batch = next(self.iterator, _END)
        begun_at = time.perf_counter()
        self.read_s += begun_at - asked_at
        if batch is _END:
            return False
        mark = self.mark()
        self._number += 1
        samples = sample_count(batch)
        tensors, build = flatten(batch)
        del batch
        self._stage(tensors)
        self.copy_s += time.perf_counter() - begun_at
        left = self._leave.get()
        if left is None or self._stopped.is_set():
            return False
        try:
            # So the device never holds more than the queue, the loop's batch and this one.
            left.synchronize()
            if len(self._in_flight) == self.depth:
                self._let_go()
            begun_at = time.perf_counter()
            ready = _event()
            self._in_flight.append((ready, tensors))
            try:
                with shown_as("fastdata: copy"):
                    batch = build([self._copy(tensor) for tensor in tensors])
                batch = self.finish(batch, self._number)
            finally:
                del tensors  # an exception keeps this frame
                ready.record(self.stream)
            memory = [part for tensor in flatten(batch)[0] for part in memory_of(tensor)]
            self.copy_s += time.perf_counter() - begun_at
        except BaseException:
            self._leave.put(left)
            raise
        self._ready.put(BatchHandle(batch, samples, mark, ready, memory))
        return True

    def _stage(self, tensors: list[Any]) -> None:
        """Put pinned copies in place of what the device cannot read where it lies."""
        staged_bytes = 0
        for k, tensor in enumerate(tensors):
            if not _is_host_tensor(tensor):
                continue
            kind = "in_place"
            if not tensor.is_pinned() or not _is_dense(tensor):
                pinned = self.pinned.pin(tensor)
                kind = "pageable" if pinned is None else "staged"
                if pinned is not None:
                    tensors[k] = pinned.copy_(tensor)
                    staged_bytes += allocated_bytes(tensor.nbytes)
            self.copies.add(kind, tensor.nbytes)
        # Of each batch in flight one, the next one, and one that torch has not found to be read yet.
        need_bytes = (self.depth + 2) * staged_bytes
        self.pinned.copies_bytes = max(need_bytes, self.pinned.copies_bytes)

    def _copy(self, tensor: Any) -> Any:
        """Queue the copy of a tensor, one transfer if it is dense; others go in torch's own way."""
        if _is_host_tensor(tensor):
            return tensor.to(self.device, non_blocking=tensor.is_pinned())
        return tensor.to(self.device) if tensor.data.device.type == "cpu" else tensor


def _is_host_tensor(value: Any) -> bool:
    """Whether it is a CPU tensor with elements, and bytes, dtype, shape and strides are all."""
    return type(value) is torch.Tensor and is_plain(value) and value.numel() > 0


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory: else torch would copy them first."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
