"""Samples that are stored on the device (``storage="device"``), and batches that are cut there.

The window of each sample is drawn on the host. Samples are cut, padded and mirrored on the device.
No value is read back from the device, so the host never waits for it.

Shape letters: N stored samples, B batch, C channels, H W size stored, h w size served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.cuda

from fastdata.datasets.buffers import BatchRing
from fastdata.datasets.samples import ReaderHandle
from fastdata.datasets.trees import map_batch
from fastdata.datasets.visits import IndexBatch
from fastdata.loaders.device_cut import DeviceCut
from fastdata.loaders.floats import ToFloats
from fastdata.loaders.loader import DataLoader
from fastdata.loaders.pinned import PinnedMemory, allocated_bytes, device_memory
from fastdata.loaders.progress import Progress
from fastdata.loaders.window import Window
from fastdata.machine.budget import check_device_room
from fastdata.report import log
from fastdata.stores.store import Store

Tensor = torch.Tensor
Transform = Callable[[Any], Any]
Send = Callable[[Tensor], Tensor]

CHUNK_BYTES = 32 << 20
"""Size of the chunks in which a store is copied. Two of them are in host memory."""
GROUP_BYTES = 64 << 20
"""Small batches are cut together, up to this size in float32. A kernel for each single batch would
take longer to launch than to run."""


class Indices(NamedTuple):
    """Indices and targets of a batch before it is cut.

    Attributes:
        batch: the indices of its samples.
        targets: None if all targets are numbers: these are sent for several batches together.
        mark: position of the loader after this batch.
    """

    batch: IndexBatch
    targets: Any
    mark: Any


class StoreCut(Iterator[Any]):
    """One epoch of batches that are cut from a dataset's samples on the device.

    They are cut on the stream of the thread that calls ``next``; small batches together. An error
    of the loader is raised instead of its batch.

    Args:
        loader: the loader of the dataset.
        handle: the dataset's handle to its reader.
        samples_NCHW: all stored samples on the device, uint8.
        convert: converts images to floats; None if batches are uint8.
        send: copies a tensor to the device.
        cast: gives all images their final dtype and memory format.

    Attributes:
        progress: progress of the loader's epoch.
        marks: a list of one: the position of the loader after the latest batch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        handle: ReaderHandle,
        samples_NCHW: Tensor,
        convert: ToFloats | None,
        *,
        send: Send,
        cast: Transform,
    ) -> None:
        self._handle = handle
        self._device = samples_NCHW.device
        self._send = send
        # The stream of the latest work: the constants of the cut, later batches.
        self._stream = torch.cuda.current_stream(self._device)
        [program] = handle().without_cast[0].programs
        self._window = Window(program, samples_NCHW)
        self._make = DeviceCut(self._window, convert, cast)
        read = partial(_read_targets, handle)
        path = f"whole batches, cut on {self._device}"
        self._indices = loader._fastdata.iterate(
            loader, BatchRing(0), read=read, inline_reason=path
        )
        self.progress: Progress = self._indices.progress
        self.marks = [self.progress.mark()]
        # Batches that were read, and the exception or the end that follows them (at most one).
        self._group: deque[Indices] = deque()
        self._ends: list[Exception] = []
        # Batches that were cut: images, targets and mark.
        self._cuts: deque[tuple[Tensor, Any, Any]] = deque()

    def __next__(self) -> Any:
        if not self._cuts:
            self._cut_next()
        images, targets, self.marks[0] = self._cuts.popleft()
        batch = self._handle().to_batch([images, _send_all(targets, self._send)])
        now = torch.cuda.current_stream(self._device)
        if now != self._stream:
            # The loop has changed its stream since the group was cut. The new one must not read
            # before the cut is done, nor the allocator reuse the memory before it has read.
            now.wait_stream(self._stream)
            for owner in device_memory(batch):
                owner.record_stream(now)
        return batch

    def _cut_next(self) -> None:
        """Cut the next batches together, or only the first one if there is too little memory."""
        if not (self._group or self._ends):
            self._read_group()
        if not self._group:
            self.marks[0] = self.progress.mark()
            raise self._ends.pop()
        try:
            self._cuts += self._cut(self._group)
            self._group.clear()
            return
        except Exception as problem:  # noqa: BLE001  # raised below if it comes again for one batch
            log.info("%d batches are cut one by one: %s", len(self._group), str(problem))
        first = self._group.popleft()
        self.marks[0] = first.mark
        self._cuts += self._cut([first])

    def _read_group(self) -> None:
        """Read batches that will be cut together, up to an exception or the end."""
        room_bytes = GROUP_BYTES
        while not self._group or room_bytes > 0:
            try:
                found = next(self._indices, None)
            except Exception as error:  # noqa: BLE001  # raised where its batch would have come
                self._ends.append(error)
                return
            if found is None:
                # Not the loader's own exception: its traceback would keep the frame of
                # ``__next__``, which keeps a batch.
                self._ends.append(StopIteration())
                return
            _, batch, targets = found
            self._group.append(Indices(batch, targets, self.progress.mark()))
            room_bytes -= 4 * prod(self._window.shape) * len(batch)

    @torch.inference_mode(False)  # it may be on where the first batch of a group is requested
    def _cut(self, group: Collection[Indices]) -> Iterable[tuple[Tensor, Any, Any]]:
        stream = torch.cuda.current_stream(self._device)
        if self._stream != stream:
            stream.wait_stream(self._stream)  # constants were sent on it
        self._stream = stream
        for tensor in self._window.tensors:
            # The prefetcher may drop them while this stream still reads them.
            tensor.record_stream(stream)
        batches, targets, marks = zip(*group, strict=True)
        index_B = np.concatenate([batch.positions for batch in batches])
        visits_B = np.concatenate([batch.visits for batch in batches])
        small = [torch.from_numpy(index_B)]
        line_2B = self._window.draw(index_B, visits_B, batches[0].seed)
        if line_2B is not None:
            small.append(line_2B)
        numbers = self._handle().targets.numbers
        if numbers is not None:
            small.append(torch.from_numpy(numbers[index_B]))
        sent = _send_together(small, self._send)
        images = self._make(sent[0], None if line_2B is None else sent[1])
        # "unsafe": the parts do not count as views, for which autograd forbids some operations.
        sizes = list(map(len, batches))
        parts = images.unsafe_split_with_sizes(sizes)
        if numbers is not None:
            targets = sent[-1].unsafe_split_with_sizes(sizes)
        return zip(parts, targets, marks, strict=True)


def _read_targets(handle: ReaderHandle, batch: IndexBatch, ring: BatchRing) -> list[Any]:
    """Return a list: a tensor as long as the batch, which is counted, then indices and targets."""
    reader = handle()
    targets = reader.targets.collated(batch) if reader.targets.numbers is None else None
    return [torch.from_numpy(batch.positions), batch, targets]


def _send_together(tensors: Sequence[Tensor], send: Send) -> list[Tensor]:
    """Copy dense tensors to the device in one block of memory, by one copy."""
    flat = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
    block = send(torch.from_numpy(np.concatenate(flat)))
    parts = block.split([part.nbytes for part in flat])
    return [
        part.view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _send_all(targets: Any, send: Send) -> Any:
    return map_batch(lambda it: send(it) if isinstance(it, Tensor) else it, targets)


class _Chunk:
    """Host memory for a part of a store, on its way to the device.

    Attributes:
        memory: uint8 (samples, C, H, W); pinned, unless the driver refuses.
        is_read: recorded after the latest copy from this memory.
    """

    def __init__(self, part: Tensor, pinned: PinnedMemory) -> None:
        self.memory = torch.empty(part.shape, dtype=torch.uint8, device="cpu")
        self.is_read = torch.cuda.Event(blocking=True)
        memory = pinned.pin(self.memory)
        if memory is not None:
            self.memory = memory
            pinned.copies_bytes = max(pinned.copies_bytes, 2 * allocated_bytes(memory.nbytes))


def upload(store: Store, device: torch.device, pinned: PinnedMemory, threads: int) -> Tensor:
    """Copy a dense uint8 store to (N, C, H, W) on the current stream, and wait for it.

    Two chunks of host memory are used in turn: threads fill one while the device reads the other.

    Args:
        store: the samples.
        device: the device to copy them to.
        pinned: pins the chunks.
        threads: number of threads that fill a chunk.

    Raises:
        MemoryBudgetError: there is too little memory on the device.
    """
    shape = store.spec.shape
    assert shape is not None
    unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] + unused_bytes
    check_device_room(size_bytes(store), free_bytes, str(device))
    copy_NCHW = torch.empty((len(store), *shape), dtype=torch.uint8, device=device)
    parts = copy_NCHW.split(max(1, CHUNK_BYTES // store.spec.sample_bytes))
    chunks = [_Chunk(parts[0], pinned) for _ in parts[:2]]
    stream = torch.cuda.current_stream(device)
    with ThreadPoolExecutor(threads, thread_name_prefix="fastdata-upload") as pool:
        for number, part in enumerate(parts):
            chunk = chunks[number % 2]
            chunk.is_read.synchronize()
            filled = chunk.memory[: len(part)]
            first = number * len(parts[0])
            indices = np.arange(first, first + len(part))
            shares = np.array_split(filled.numpy(), threads)
            list(pool.map(store.gather_into, np.array_split(indices, threads), shares))
            part.copy_(filled, non_blocking=True)
            chunk.is_read.record(stream)
    for chunk in chunks:
        chunk.is_read.synchronize()
    return copy_NCHW


def size_bytes(store: Store) -> int:
    return len(store) * store.spec.sample_bytes
