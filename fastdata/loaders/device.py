"""What a prefetcher has of a device: which it is, pinned memory, and batch ops that end there.

Batches are sent as the uint8 that the compiled core makes, and become floats on the device. Where
the samples lie there already (``storage="device"``), they are cut there too, if they are only cut,
padded and mirrored; what differs between samples is which window of its rows and columns each is,
and that the host draws. Nothing asks the device for a value, so the host never waits.

Shape letters: N stored samples, B batch, C channels, H W size stored, h w size served.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.cuda

from fastdata.datasets.batch import (
    IndexBatch,
    is_container,
    leaves_of,
    map_batch,
    memory_of,
    moves_itself,
)
from fastdata.datasets.dataset import handle_of, storage_of
from fastdata.datasets.reader import BatchRing, Reader
from fastdata.datasets.samples import ReaderHandle
from fastdata.errors import DeviceError, kind_of
from fastdata.loaders import DataLoader
from fastdata.loaders.epochs import JoinedReader, LoaderView
from fastdata.machine import budget_bytes, check_device_room, choose_pinning, format_bytes, limits
from fastdata.pixels import TransformPlan
from fastdata.pixels.core import Int64s, Shape
from fastdata.pixels.images import SampleSpec
from fastdata.pixels.ops import MODES, Op, step_number
from fastdata.pixels.program import Program
from fastdata.report import log, warn_user
from fastdata.stores.readers import Store

_T = TypeVar("_T")
Tensor = torch.Tensor
Ints = npt.NDArray[Any]
DeviceLike = str | int | torch.device
Transform = Callable[[Any], Any]
Read = Callable[[IndexBatch, BatchRing], Any]
Send = Callable[[Tensor], Tensor]
WhereOps = Literal["auto", "device", "cpu"]

CHUNK_BYTES = 32 << 20
"""What of a store is copied at a time."""
GROUP_BYTES = 64 << 20
"""Of small batches that are cut at once, as floats: to launch kernels takes longer than they do."""
_EXCHANGE_MODE = "cudaThreadExchangeStreamCaptureMode"
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_WINDOWS = ("STEP_PAD", "STEP_CROP", "STEP_CENTER_CROP", "STEP_FLIP")
_FILLED = -1


def resolve_device(device: DeviceLike | None) -> torch.device:
    """Return the device asked for, with its number; None is the current one, or the CPU.

    Raises:
        DeviceError: torch does not see it.
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


# Pinned memory


class PinnedMemory:
    """What a prefetcher has of torch's pinned memory: its loader's ring, and copies of batches.

    The ring may take the share of the free memory that ``choose_pinning`` allows; a larger one
    stays ordinary memory, whose batches are copied. Safe from any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = ""  # what is said of it
        self._refusal = ""
        self.notices = Notices()
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
            budget = budget_bytes(limits.available_bytes())
            plan = choose_pinning(need_bytes, budget, has_accelerator=True)
            is_allowed = plan.pin
            self._ring = f"ring {plan.reason}"
        slot = None
        if is_allowed:
            slot = self.pin(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
        if slot is None:
            return np.empty(size_bytes, np.uint8)
        self.ring_bytes = max(need_bytes, self.ring_bytes)
        return slot.numpy()

    def pin(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return pinned memory for such a tensor, dense; None where the driver refuses."""
        return self._unless_refused(lambda: torch.empty_like(like, pin_memory=True))

    def pin_object(self, value: Any) -> Any:
        """Return an object of the user's own class with its tensors pinned, by its ``pin_memory``.

        None if its class has no such method, some tensors are on a device, or the driver refuses.
        """
        if not hasattr(type(value), "pin_memory") or device_memory(value):
            return None

        def pin() -> Any:
            pinned = value.pin_memory()
            return value if pinned is None else pinned  # some classes pin in place

        return self._unless_refused(pin)

    def _unless_refused(self, pin: Callable[[], _T]) -> _T | None:
        if self._refusal:
            return None
        try:
            return pin()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._refusal = f"not pinned: the driver refuses to ({reason})"
            self.notices.add(
                f"batches go to {self._device} from pageable memory, which takes longer: "
                f"{self._refusal}"
            )
            return None


class Notices:
    """Warnings from a prefetcher's thread, given once each in the training loop's thread."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._waiting: deque[str] = deque()

    def add(self, words: str) -> None:
        if words not in self._known:
            self._known.add(words)
            self._waiting.append(words)

    def give(self) -> None:
        while self._waiting:
            warn_user(self._waiting.popleft())


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
    exchange_mode = getattr(names, _EXCHANGE_MODE, None)
    if exchange_mode is None:
        log.info(
            "%s is not found: capture CUDA graphs before iter() of a CudaPrefetcher", _EXCHANGE_MODE
        )
    else:
        exchange_mode(ctypes.byref(ctypes.c_int(_RELAXED)))


def device_memory(batch: Any) -> list[Any]:
    """Return what must not be freed while a stream reads a batch, each with ``record_stream``."""
    return [it for it in memory_of(batch) if not isinstance(it, Tensor) or it.is_cuda]


def host_memory(value: Any) -> list[Tensor]:
    """Return the tensors of a value, at any depth, that have elements in ordinary memory."""
    found = [it for it in memory_of(value) if isinstance(it, Tensor)]
    return [it for it in found if it.device.type == "cpu" and it.numel()]


def move_object(value: Any, device: torch.device) -> Any:
    """Move an object to a device by its own ``to``, without waiting where that can be asked for."""
    if not host_memory(value) and not hasattr(value, "device"):
        return value  # ``to`` may mean something else, such as a conversion of units
    try:
        moved = value.to(device, non_blocking=True)
    except TypeError:  # it, or a part of it, has no such parameter
        moved = value.to(device)
    return value if moved is None else moved  # some classes move in place


def left_behind(batch: Any) -> str:
    """Return the class of an object in a batch that cannot be moved and has tensors on the CPU."""
    objects = leaves_of(batch, is_leaf=lambda value: not is_container(value))
    names = (kind_of(it) for it in objects if not moves_itself(it) and host_memory(it))
    return next(names, "")


# Where batch ops run


def is_own(loader: Any) -> bool:
    """Return True if fastdata's own class defines how the loader is iterated."""
    begins = {"__iter__", "_get_iterator"}
    definer = next((kind for kind in type(loader).__mro__ if begins & vars(kind).keys()), object)
    # ChunkedLoader is imported only where somebody uses it.
    return definer is DataLoader or definer.__module__ == "fastdata.loaders.chunked"


def begin_epoch(loader: Any, ring: BatchRing, held: int, read: Read | None) -> Any:
    """Begin an epoch of a loader that ``is_own``, in a prefetcher's ring."""
    if isinstance(loader, DataLoader):
        return loader._fastdata.iterate(loader, ring, held, read)
    return loader.iterate(ring, held, read)


def ring_slots(loader: Any, held: int) -> int:
    """Return how many buffers a ring for a loader that ``is_own`` needs."""
    if isinstance(loader, DataLoader):
        return loader._fastdata.ring_slots(loader, held)
    slots: int = loader.ring_slots(held)
    return slots


class DeviceOps:
    """The batch ops of a loader, epoch after epoch, and copies of its stores on the device.

    Attributes:
        described: where they run in the latest epoch, and why; empty where the loader has none.
    """

    def __init__(self, loader: Any, asked: WhereOps, device: torch.device) -> None:
        self.described = ""
        self._loader = loader
        self._asked = asked
        self._device = device
        self._served = LoaderView.find(getattr(loader, "dataset", None))
        # Of each the copy: samples may be prepared again between epochs.
        self._copies: weakref.WeakKeyDictionary[Store, Tensor] = weakref.WeakKeyDictionary()
        self._has_warned = False

    def begin(self) -> tuple[Read | None, Transform | None, StoreCut | None]:
        """What reads and what finishes the batches of an epoch, or cuts them of a store there.

        Each is None where the CPU does it.

        Raises:
            ValueError: they are to be finished on the device, and cannot.
            MemoryBudgetError: the store does not fit there.
        """
        self.described = ""
        reader = self._served.reader()  # which notices what was changed in place
        if reader is None:
            return None, None, None
        has_store = "device" in map(storage_of, self._served.parts)
        obstacle = self._obstacle(reader)
        if obstacle is not None or isinstance(reader, JoinedReader):
            self.described = f"on the CPU: {obstacle}"
            if has_store and self._asked != "cpu":
                self._warn_of_the_store(obstacle)
            return None, None, None
        handle = handle_of(self._served.parts[0])
        _, casts = reader.without_cast
        converts = [None if cast is None else _to_floats(cast) for cast in casts]
        why = _store_obstacle(reader) if has_store else ""
        if has_store and not why:
            return None, None, self._cut_of(_store(reader), handle, converts[0])
        if has_store:
            self._warn_of_the_store(why)
        if not any(casts):
            kinds = " and ".join({str(dtype)[6:]: None for dtype in reader.dtypes})
            self.described = f"on the CPU: {why or f'they serve {kinds}, which is sent as it is'}"
            return None, None, None
        self.described = f"on {self._device}, the conversion only{why and f': {why}'}"
        return partial(_read, handle), partial(_finish, handle, converts), None

    def _cut_of(self, store: Store, handle: ReaderHandle, convert: Transform | None) -> StoreCut:
        if store not in self._copies:
            self._copies[store] = _upload(store, self._device)
        size = format_bytes(_size_bytes(store))
        self.described = f"on {self._device}, from a copy of the store there ({size})"
        return StoreCut(handle, self._copies[store], convert)

    def _obstacle(self, reader: Reader | JoinedReader) -> str | None:
        if not isinstance(self._loader, DataLoader) or not is_own(self._loader):
            kind = kind_of(self._loader)
            obstacle: str | None = f"the loader is {kind}, not fastdata's DataLoader in batches"
        else:
            obstacle = self._loader._fastdata.device_obstacle(self._loader) or reader.obstacle
        if obstacle is None:
            if isinstance(reader, JoinedReader):
                obstacle = "the samples of a ConcatDataset lie in several stores"
            elif not any(reader.without_cast[1]):
                codes = {op.code for column in reader.columns for op in column.plan.batch_ops}
                if "OP_CAST" in codes:
                    obstacle = "erasing or noise comes after the conversion to floats"
        if self._asked == "device" and obstacle is not None:
            raise ValueError(
                f"batch_ops='device' is not possible here: {obstacle}. Use batch_ops='auto'."
            )
        return "batch_ops='cpu'" if self._asked == "cpu" else obstacle

    def _warn_of_the_store(self, why: str | None) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(f"storage='device' has no effect: {why}")

    def close(self) -> None:
        """Give back the memory on the device. Idempotent; a later epoch copies again."""
        self._copies.clear()


def _read(handle: ReaderHandle, batch: IndexBatch, ring: BatchRing) -> list[Any]:
    """The parts of a batch as they are sent."""
    sent, _ = handle().without_cast
    return sent.read_batch(batch, ring.lease, sent.targets)


def _finish(handle: ReaderHandle, converts: list[Transform | None], batch: list[Any]) -> Any:
    pairs = zip_longest(batch, converts)
    made = [part if convert is None else convert(part) for part, convert in pairs]
    return handle().to_batch(made)


def _to_floats(cast: Op) -> Transform:
    """Conversion to floats and normalisation of uint8, in one pass over the pixels."""
    scaling = cast.n[1]
    unit = 1.0 if scaling == "SCALE_NONE" else 255.0
    mean, std = np.array(cast.v or (0.0, 1.0)).reshape(-1, 2).T
    # A divisor that lies on the device: by a number of the host, CUDA multiplies with its rounded
    # inverse.
    divides = scaling == "SCALE_DIVIDE" and not cast.v
    scale = unit * std if divides else 1 / (unit * std)
    both = np.stack([scale, -mean / std])[:, :, None, None]
    served = getattr(torch, str(cast.n[0]).lower())
    # Halves are rounded once.
    both_2C11 = torch.tensor(both, dtype=torch.promote_types(served, torch.float32))

    def convert(source_BChw: Tensor) -> Tensor:
        nonlocal both_2C11
        if both_2C11.device != source_BChw.device:
            # Pinned, the thread does not wait for the copy.
            both_2C11 = both_2C11.pin_memory().to(source_BChw.device, non_blocking=True)
        if source_BChw.is_cuda:
            both_2C11.record_stream(torch.cuda.current_stream(source_BChw.device))
        scale, offset = both_2C11
        if divides:
            return torch.div(source_BChw, scale).to(served)
        return torch.addcmul(offset, source_BChw, scale).to(served)

    return convert


# A store on the device


class StoreCut(Iterator[Any]):
    """Batches of the samples of a dataset, dense uint8, that lie on the device.

    They come on the stream of who asks for them; small ones are cut several at once. An error of
    the loader is raised where its batch would have come.

    Args:
        handle: of the dataset.
        samples_NCHW: the samples.
        convert: to floats; None where uint8 is served.

    Attributes:
        marks: how far the loader had come with the latest batch.
        send: brings a tensor to the device.
    """

    send: Send

    def __init__(
        self, handle: ReaderHandle, samples_NCHW: Tensor, convert: Transform | None
    ) -> None:
        self._handle = handle
        self._device = samples_NCHW.device
        self._convert = convert
        self._stream: Any = None  # that batches were cut on
        [program] = handle().without_cast[0].programs
        self._window = Window(program, samples_NCHW)
        # Images, targets and mark of batches that were cut; indices of those that are to be, each
        # alone; and what comes after these.
        self._made: deque[tuple[Any, Any, Any]] = deque()
        self._waiting: deque[tuple[IndexBatch, Any, Any]] = deque()
        self._ends: list[Exception] = []

    def begin(self, loader: DataLoader[Any], cast: Transform) -> Any:
        """Begin an epoch, whose images are all given to ``cast``; gives its ``progress``."""
        path = f"whole batches, cut on {self._device}"
        read = partial(_read_targets, self._handle)
        self._indices = loader._fastdata.iterate(loader, BatchRing(0), read=read, alone=path)
        self._cast = cast
        self.marks = [self._indices.progress.mark()]
        return self._indices.progress

    def __next__(self) -> Any:
        if not self._made:
            self._make()
        if not self._made:
            self.marks[0] = self._indices.progress.mark()
            raise self._ends.pop()
        images, targets, self.marks[0] = self._made.popleft()
        batch = self._handle().to_batch([images, _sent(targets, self.send)])
        now = torch.cuda.current_stream(self._device)
        if now != self._stream:  # the loop has changed to another
            now.wait_stream(self._stream)
            for owner in device_memory(batch):
                owner.record_stream(now)
        return batch

    @torch.inference_mode(False)  # which may hold where the first of several is asked for
    def _make(self) -> None:
        """Cut the next batches at once or, where that fails, as for want of memory, one by one."""
        if not (self._waiting or self._ends):
            self._read()
            try:
                if self._waiting:
                    self._made += self._cut(self._waiting)
                    self._waiting.clear()
            except Exception as problem:  # noqa: BLE001  # raised where a batch has it alone
                log.info("%d batches are cut one by one: %s", len(self._waiting), str(problem))
        if self._waiting:
            batch = self._waiting.popleft()
            self.marks[0] = batch[2]
            self._made += self._cut([batch])

    def _read(self) -> None:
        """Read the next batches, up to the end, or to one that cannot be had."""
        room_bytes = GROUP_BYTES
        while not self._waiting or room_bytes > 0:
            try:
                found = next(self._indices, None)
            except Exception as error:  # noqa: BLE001  # raised where its batch would have come
                self._ends.append(error)
                break
            if found is None:
                self._ends.append(StopIteration())
                break
            _, batch, targets = found
            self._waiting.append((batch, targets, self._indices.progress.mark()))
            room_bytes -= 4 * prod(self._window.shape) * len(batch)

    def _cut(self, batches: Iterable[Any]) -> Iterable[Any]:
        group, targets, marks = zip(*batches, strict=True)
        numbers = self._handle().numbers
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # constants were sent on it
        self._stream = stream
        for tensor in self._window.tensors:
            tensor.record_stream(stream)
        index_B = np.concatenate([batch.positions for batch in group])
        visits_B = np.concatenate([batch.visits for batch in group])
        draws = self._window.draw(index_B, visits_B, group[0].seed)
        draws = None if draws is None else self.send(draws)
        images = self._window.cut(self.send(torch.from_numpy(index_B)), draws)
        if self._convert is not None:
            images = self._convert(images)
        # Not as views, of which autograd refuses some uses.
        sizes = list(map(len, group))
        parts = self._cast(images).unsafe_split_with_sizes(sizes)
        if numbers is not None:
            targets = self.send(torch.from_numpy(numbers[index_B])).unsafe_split_with_sizes(sizes)
        return zip(parts, targets, marks, strict=True)


def _read_targets(handle: ReaderHandle, batch: IndexBatch, ring: BatchRing) -> list[Any]:
    """Indices and targets, behind a tensor that tells how many there are."""
    reader = handle()
    # Numbers of several batches are sent at once.
    targets = reader.targets(batch) if reader.numbers is None else None
    return [torch.from_numpy(batch.positions), batch, targets]


def _upload(store: Store, device: torch.device) -> torch.Tensor:
    """Copy a dense uint8 store to (N, C, H, W) on the current stream, which owns it; waits.

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


def _sent(targets: Any, send: Send) -> Any:
    return map_batch(lambda it: send(it) if isinstance(it, Tensor) else it, targets)


def _store(reader: Reader) -> Store:
    assert reader.kept is not None
    return reader.kept.images


def _size_bytes(store: Store) -> int:
    return len(store) * store.spec.sample_bytes


def _store_obstacle(reader: Reader) -> str:
    """Why batches cannot be cut of a reader's store on a device; empty if they can."""
    if len(reader.columns) > 1:
        return "several views of an image, or image and mask, are made on the CPU"
    return window_obstacle(reader.plan, _store(reader).spec)


def window_obstacle(plan: TransformPlan, spec: SampleSpec) -> str:
    """Why the batch ops before floats cannot cut a store on a device; empty if they can."""
    if spec.shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(spec.shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {spec.shape}, not images (C, H, W)"
    ops = tuple(op for op in plan.batch_ops if op.code != "OP_CAST")
    unable = next((op for op in ops if not _only_cuts(op)), None)
    if unable is None and ops:
        drawn = _drawn(Program(ops, spec), spec.shape, np.zeros(1, np.int64), 0, 0)
        unable = None if drawn.shape[1] == 1 else ops[-1]
    if unable is None:
        return ""
    return f"{plan.batch_texts[step_number(unable.at) - len(plan.prepare)]} runs on the CPU"


class Window:
    """What all batch ops are together, where they only cut, pad and mirror samples.

    ``draw`` makes a batch's random numbers on the host, and ``cut`` its pixels, where the samples
    lie. They are those of ``Program``, to the bit.

    Attributes:
        shape: of a sample as it is served, (C, h, w).
        tensors: what ``cut`` reads.
    """

    # The core draws one OP_WINDOW for all ops that it fuses. As core.h says, its ``n`` are the
    # border that is added first (0 to 3: left, top, right, bottom), the window's first row and
    # column in that (4, 5) and its size (6, 7), and whether it is mirrored (8: bit 0 its columns,
    # bit 1 its rows; from bit 8 on the border's mode). ``v`` from 8 on is the border's colour. All
    # but the window's place, and whether it is mirrored, is the same for all samples.

    def __init__(self, program: Program, samples_NCHW: Tensor) -> None:
        stored_shape = tuple(samples_NCHW.shape[1:])
        output = program.output(stored_shape)
        assert output is not None
        self.shape, _ = output
        self.tensors = [samples_NCHW]
        self._records = partial(_drawn, program, stored_shape)
        self._starts = []  # by axis, the number of places where a window may begin
        self._fill = []  # a value for each channel
        [records] = self._records(np.zeros(1, np.int64), 0, 0)
        if not len(records):
            return
        left, top, right, bottom, *_, flags = records[0]["n"].tolist()
        mode: Any = MODES[flags >> 8]
        is_constant = mode == "constant"
        fill: Any = {"constant_values": _FILLED} if is_constant else {}
        for axis, border in ((1, (top, bottom)), (2, (left, right))):
            lines = np.pad(np.arange(stored_shape[axis]), border, mode, **fill)
            # Where the lines of each window come from, and then of each that is mirrored.
            windows = np.lib.stride_tricks.sliding_window_view(lines, self.shape[axis])
            both = torch.from_numpy(np.concatenate([windows, windows[:, ::-1]]))
            self.tensors.append(both.to(samples_NCHW.device))
            self._starts.append(len(windows))
        if is_constant and left + top + right + bottom:
            colour = records[0]["v"][8:].astype(int).tolist()
            self._fill = [colour[min(c, 3)] for c in range(stored_shape[0])]

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw the windows of a batch, on the host.

        Returns:
            int32 (2, B): of the rows, and of the columns, which window it is. None where samples
            are served as they are stored.
        """
        if not self._starts:
            return None
        n_B9 = self._records(index_B, visits_B, seed)["n"][:, 0]
        flip_B = n_B9[:, 8]
        rows, columns = self._starts
        number_2B = np.stack(
            [n_B9[:, 4] + (flip_B >> 1 & 1) * rows, n_B9[:, 5] + (flip_B & 1) * columns]
        )
        return torch.from_numpy(number_2B)

    def cut(self, index_B: Tensor, number_2B: Tensor | None) -> Tensor:
        """Serve samples (B, C, h, w), int64 ``index_B``, by what was drawn for them.

        All lie on one device. Indices are not checked, which would wait for the device.
        """
        samples_NCHW, *lines = self.tensors
        batch_BCHW = samples_NCHW.index_select(0, index_B)
        if number_2B is None:
            return batch_BCHW
        channels, _, width = batch_BCHW.shape[1:]
        row_Bh, column_Bw = map(Tensor.index_select, lines, (0, 0), number_2B)
        # Rows first, then columns of these: an index for each pixel would be read from memory.
        at_B1h1 = row_Bh.clamp(min=0)[:, None, :, None]
        lines_BChW = batch_BCHW.gather(2, at_B1h1.expand(-1, channels, -1, width))
        at_B11w = column_Bw.clamp(min=0)[:, None, None]
        cut = lines_BChW.gather(3, at_B11w.expand(-1, channels, row_Bh.shape[1], -1))
        if self._fill:
            is_filled_Bhw = (row_Bh < 0)[:, :, None] | (column_Bw < 0)[:, None]
            for plane_Bhw, value in zip(cut.unbind(1), self._fill, strict=True):
                plane_Bhw.masked_fill_(is_filled_Bhw, value)
        return cut


def _drawn(
    program: Program, shape: Shape, index_B: Int64s, visits_B: int | Int64s, seed: int
) -> Ints:
    """What the core would do to samples of one shape, ``core.OP`` (B, S)."""
    return program.draw(index_B, visits_B, seed, np.full((len(index_B), 3), shape, np.int32))


def _only_cuts(op: Op) -> bool:
    """Whether an op only says where rows and columns come from, or that they are filled."""
    is_sequence = op.code == "STEP_SEQUENCE"
    return all(map(_only_cuts, op.children)) if is_sequence else op.code in _WINDOWS
