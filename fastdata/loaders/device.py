"""What a prefetcher has of a device: which it is, pinned memory, and batch ops that end there.

What a batch is made of is sent as the uint8 that is served, drawn and cut by the compiled core, and
becomes floats on the device. Where the samples lie there already (``storage="device"``), they are
cut there too, if they are only cut, padded and mirrored; what differs between samples is where rows
and columns come from, which the host draws. (Samples that are sent gain nothing by that: to draw
for the device takes the host as long as to cut.) Nothing asks the device for a value, so the host
never waits.

Shape letters: N stored samples, B batch, C channels, H W size sent, h w size served, L h + w or one
of them.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.cuda

from fastdata.datasets.batch import IndexBatch, stacked
from fastdata.datasets.dataset import ReaderHandle, handle_of
from fastdata.datasets.reader import BatchRing, Reader, room
from fastdata.errors import DeviceError, kind_of
from fastdata.loaders.epochs import JoinedReader, LoaderView
from fastdata.loaders.loader import DataLoader
from fastdata.machine import memory as host_memory
from fastdata.machine.memory import budget_bytes, check_device_room, choose_pinning, format_bytes
from fastdata.pixels.core import Int64s
from fastdata.pixels.images import SampleSpec
from fastdata.pixels.ops import MODES, Op, step_number
from fastdata.pixels.plan import TransformPlan
from fastdata.pixels.program import Program
from fastdata.report import log, warn_user
from fastdata.sources import ItemKeys
from fastdata.stores.readers import Store

Tensor = torch.Tensor
Shape = tuple[int, ...]
Ints = npt.NDArray[Any]
DeviceLike = str | int | torch.device
Transform = Callable[[Any], Any]
WhereOps = Literal["auto", "device", "cpu"]

CHUNK_BYTES = 32 << 20
"""What of a store is copied at a time."""
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
        self.unsaid = ""  # what the user is to be warned of
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
            budget = budget_bytes(host_memory.available_bytes())
            plan = choose_pinning(need_bytes, budget, has_accelerator=True)
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
            self.unsaid = (
                f"batches go to {self._device} from pageable memory, which takes longer: "
                f"{self._refusal}"
            )
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


# Where batch ops run


def is_own(loader: Any) -> bool:
    """Whether it is fastdata's: who defines how it is iterated also defines ``iterate``."""
    begins = {"__iter__", "_get_iterator"}
    definer = next((kind for kind in type(loader).__mro__ if begins & vars(kind).keys()), object)
    return "iterate" in vars(definer)


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
        # Of each the copy, once there is one: samples may be prepared again between epochs.
        self._mirrors: weakref.WeakKeyDictionary[Store, list[Tensor]] = weakref.WeakKeyDictionary()
        self._uploading = threading.Lock()
        self._has_warned = False

    def begin(self) -> tuple[Callable[[Any, BatchRing], DeviceBatch] | None, Transform | None]:
        """What reads the batches of an epoch, what finishes them; None if the CPU does it all.

        Raises:
            ValueError: they are to be finished on the device, and cannot.
        """
        self.described = ""
        reader = self._served.reader()  # which notices what was changed in place
        if reader is None:
            return None, None
        dataset = self._served.parts[0]  # several have an obstacle
        has_mirror = dataset.storage == "device"
        obstacle = self._obstacle(reader)
        if self._asked == "cpu":
            obstacle = "batch_ops='cpu'"
        elif self._asked == "device" and obstacle is not None:
            raise ValueError(
                f"batch_ops='device' is not possible here: {obstacle}. Use batch_ops='auto'."
            )
        if obstacle is not None:
            self._say_on_the_cpu(obstacle, has_mirror=has_mirror)
            return None, None
        handle = handle_of(dataset)
        store = _store(handle)
        program = DeviceProgram(dataset.plan, store.spec, is_there=has_mirror)
        where = f"from a copy of the store there ({format_bytes(_size_bytes(store))})"
        if program.host is not None:
            why = f"{program.host_step} runs on the CPU" if program.host_step else ""
            if program.to_floats is None:
                why = why or "they serve uint8, which is sent as it is"
            if why:
                self._say_on_the_cpu(why, has_mirror=has_mirror)
            if program.to_floats is None:
                return None, None
            where = f"the conversion only{why and f': {why}'}"
        self.described = f"on {self._device}, {where}"
        mirror = self._mirrors.setdefault(store, [])
        return partial(_read, program, handle), partial(self._run, program, handle, mirror)

    def _obstacle(self, reader: Reader | JoinedReader) -> str | None:
        if not isinstance(self._loader, DataLoader) or not is_own(self._loader):
            return f"the loader is {kind_of(self._loader)}, not fastdata's DataLoader in batches"
        obstacle = self._loader.device_obstacle() or reader.obstacle
        if obstacle is not None:
            return obstacle
        if isinstance(reader, JoinedReader):
            return "the samples of a ConcatDataset lie in several stores"
        if reader.kept is None:
            return "samples are kept nowhere, and files are decoded on the CPU"
        if len(reader.columns) > 1:
            return "several views of an image, or image and mask, are made on the CPU"
        return device_obstacle(reader.plan, reader.kept.images.spec)

    def _say_on_the_cpu(self, why: str, *, has_mirror: bool) -> None:
        self.described = f"on the CPU: {why}"
        if has_mirror and self._asked != "cpu" and not self._has_warned:
            self._has_warned = True
            warn_user(f"storage='device' has no effect: {why}")

    def _run(
        self,
        program: DeviceProgram,
        handle: ReaderHandle,
        mirror: list[Tensor],
        batch: DeviceBatch,
    ) -> Any:
        """Make the images of a batch on its device."""
        if program.host is not None:
            images = program.run(batch.samples, None)
        else:
            with self._uploading:  # a thread of another epoch may be the first, too
                if not mirror:
                    mirror.append(_upload(_store(handle), self._device))
            images = program.run(mirror[0], batch.draws, batch.samples)
        return stacked(images, batch.targets, batch.keys)

    def close(self) -> None:
        """Give back the memory on the device. Idempotent; a later epoch copies again."""
        for mirror in self._mirrors.values():
            mirror.clear()


class DeviceBatch(NamedTuple):
    """A batch that a ``DeviceProgram`` makes the images of; one row for each sample.

    ``samples`` are uint8 (B, C, h, w), or int64 (B,), where they lie in a copy of the store on the
    device; ``draws`` of these int16 (B, h + w), where rows and columns come from, None where they
    are served whole.
    """

    samples: torch.Tensor
    draws: torch.Tensor | None
    targets: Any
    keys: ItemKeys | None


def _read(
    program: DeviceProgram, handle: ReaderHandle, batch: IndexBatch, ring: BatchRing
) -> DeviceBatch:
    reader = handle()
    kept = reader.kept
    assert kept is not None
    index_B = batch.positions
    draws = None
    if program.host is None:
        draws = program.draw(index_B, batch.visits, batch.seed)
        samples = index_B.copy()
    else:
        if reader.stored.is_remote:
            reader.expect(batch)
        [samples] = room(len(index_B), [(program.shape, np.dtype(np.uint8))], ring.take)
        with kept.naming_damage():
            program.host.run(kept.images, index_B, batch.visits, batch.seed, samples)
    return DeviceBatch(torch.from_numpy(samples), draws, reader.targets(batch), reader.keys)


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


def _store(handle: ReaderHandle) -> Store:
    kept = handle().kept
    assert kept is not None
    return kept.images


def _size_bytes(store: Store) -> int:
    return len(store) * store.spec.sample_bytes


# Batch ops on a device


def device_obstacle(plan: TransformPlan, spec: SampleSpec) -> str | None:
    """Why the batch ops of a plan cannot run on a device, on samples of this spec; None if so."""
    shape = spec.shape
    if plan.obstacle is not None:
        return plan.obstacle
    if shape is None:
        return "the stored samples have different shapes"
    if spec.dtype != "uint8" or len(shape) != 3:
        return f"the stored samples are {spec.dtype} of shape {shape}, not uint8 images (C, H, W)"
    if any(op.code == "OP_CAST" for op in plan.batch_ops[:-1]):
        return "erasing or noise comes after the conversion to floats"
    output = Program(plan.batch_ops, spec).output(shape)
    return None if output else "the images that are served differ in size"


class DeviceProgram:
    """Batch ops on dense uint8 batches, the last of them on a device; safe from several threads.

    ``host`` is what runs before the transfer; None where samples are taken from a store on the
    device. There ``draw`` makes a batch's random numbers on the host. ``run`` makes its pixels,
    wherever the tensors lie that it is given. They are those of ``Program`` for the same seed,
    visits and indices: uint8 is bit-equal, normalised floats come from one fused multiplication and
    addition, within 1e-6 of its larger term.

    In bytes moved for each pixel served, where F is the size of a float: rows and columns 4, a
    constant border 3 more, the conversion to floats 1 + F.

    Args:
        plan: of the dataset; has no ``device_obstacle``.
        spec: of the samples.
        is_there: whether the store lies on the device.

    Attributes:
        shape: of a sample as uint8, (C, h, w).
        to_floats: what follows; None where uint8 is served.
        host_step: the step that keeps a store on the device from being read; empty if none does.
    """

    def __init__(self, plan: TransformPlan, spec: SampleSpec, *, is_there: bool = True) -> None:
        ops = plan.batch_ops
        self.to_floats: Transform | None = None
        if ops and ops[-1].code == "OP_CAST":
            self.to_floats = _to_floats(ops[-1])
            ops = ops[:-1]
        self._program = Program(ops, spec)
        assert spec.shape is not None
        cut = self._program.output(spec.shape)
        assert cut is not None
        self.shape: Shape = cut[0]
        self._stored_shape: Shape = spec.shape
        # Of each row, and of each column, with the border around them, where it comes from.
        self._lines: list[Ints] = []
        self._fill: list[int] = []  # a value for each channel
        self.host_step = ""
        self.host: Program | None = None if is_there else self._program
        unable = self._plan_window(ops) if is_there else None
        if unable is not None:
            self.host_step = plan.batch_texts[step_number(unable.at) - len(plan.prepare)]
            self.host = self._program

    # The core draws one OP_WINDOW for all ops that it fuses. As core.h says, its ``n`` are the
    # border that is added first (0 to 3: left, top, right, bottom), the window's first row and
    # column in that (4, 5) and its size (6, 7), and whether it is mirrored (8: bit 0 its columns,
    # bit 1 its rows; from bit 8 on the border's mode). ``v`` from 8 on is the border's colour. All
    # but the window's place, and whether it is mirrored, is the same for all samples.

    def _plan_window(self, ops: tuple[Op, ...]) -> Op | None:
        """Note the window that all ops are together; return the op, if any, that is none."""
        unable = next((op for op in ops if not _only_cuts(op)), None)
        if unable is not None or not ops:
            return unable
        window, *others = self._records(np.zeros(1, np.int64), 0, 0)[0]
        if others:
            return ops[-1]
        left, top, right, bottom, *_, flags = window["n"].tolist()
        mode: Any = MODES[flags >> 8]
        is_constant = mode == "constant"
        fill: Any = {"constant_values": _FILLED} if is_constant else {}
        dtype = np.promote_types(np.int16, np.min_scalar_type(-max(self._stored_shape)))
        for length, border in zip(
            self._stored_shape[1:], ((top, bottom), (left, right)), strict=True
        ):
            self._lines.append(np.pad(np.arange(length, dtype=dtype), border, mode, **fill))
        if is_constant and left + top + right + bottom:
            colour = window["v"][8:].astype(int).tolist()
            self._fill = [colour[min(c, 3)] for c in range(self._stored_shape[0])]
        return None

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Tensor | None:
        """Draw where the rows and columns of a batch come from, on the host, for ``run``.

        Returns:
            int16 (B, h + w), of huge samples int32: the row sent of each row served, then the
            columns, -1 where it is filled. None where samples are served whole as they are sent.
        """
        if not self._lines:
            return None
        n_B9 = self._records(index_B, visits_B, seed)["n"][:, 0]
        sources = []
        for axis, lines in enumerate(self._lines):
            length = self.shape[1 + axis]
            is_mirrored_B1 = n_B9[:, 8:] >> (1 - axis) & 1
            first_B1 = n_B9[:, 4 + axis, None] + is_mirrored_B1 * (length - 1)
            sources.append(lines[first_B1 + (1 - 2 * is_mirrored_B1) * np.arange(length)])
        return torch.from_numpy(np.concatenate(sources, axis=1))

    def run(
        self, stored_NCHW: Tensor, draws: Tensor | None, index_B: Tensor | None = None
    ) -> Tensor:
        """Serve a batch, uint8 as stored or as ``host`` made it, which is only read.

        ``draws`` lie on the same device. ``index_B``, int64 and there too, chooses from a store; it
        is not checked to be in [0, N), which would wait for the device.

        Returns:
            (B, C, h, w), in fresh memory; the batch itself where there is nothing to do.
        """
        batch = stored_NCHW if index_B is None else stored_NCHW.index_select(0, index_B)
        if draws is not None:
            batch = self._cut(batch, draws)
        return self.to_floats(batch) if self.to_floats else batch

    def _records(self, index_B: Int64s, visits_B: int | Int64s, seed: int) -> Ints:
        shapes_B3 = np.full((len(index_B), 3), self._stored_shape, np.int32)
        return self._program.draw(index_B, visits_B, seed, shapes_B3)

    def _cut(self, batch_BCHW: Tensor, source_BL: Tensor) -> Tensor:
        channels, _, width = batch_BCHW.shape[1:]
        rows = self.shape[1]
        at_BL = source_BL.to(torch.int64)
        if self._fill:
            at_BL = at_BL.clamp(min=0)
        # Rows first, then columns of these: an index for each pixel would be read from memory.
        row_B1h1 = at_BL[:, None, :rows, None]
        column_B11w = at_BL[:, None, None, rows:]
        lines_BChW = batch_BCHW.gather(2, row_B1h1.expand(-1, channels, -1, width))
        cut = lines_BChW.gather(3, column_B11w.expand(-1, channels, rows, -1))
        if self._fill:
            is_filled_BL = source_BL < 0
            is_filled_Bhw = is_filled_BL[:, :rows, None] | is_filled_BL[:, None, rows:]
            for plane_Bhw, value in zip(cut.unbind(1), self._fill, strict=True):
                plane_Bhw.masked_fill_(is_filled_Bhw, value)
        return cut


def _only_cuts(op: Op) -> bool:
    """Whether an op only says where rows and columns come from, or that they are filled."""
    is_sequence = op.code == "STEP_SEQUENCE"
    return all(map(_only_cuts, op.children)) if is_sequence else op.code in _WINDOWS


def _to_floats(cast: Op) -> Callable[[Tensor], Tensor]:
    """Conversion to floats and normalisation of uint8, in one pass over the pixels."""
    scaling = cast.n[1]
    scale = np.array([1.0 if scaling == "SCALE_NONE" else 1 / 255])
    offset = np.zeros(1)
    if cast.v:  # of each mean and standard deviation
        mean, std = np.array(cast.v).reshape(-1, 2).T
        scale = scale / std
        offset = -mean / std
    divides = scaling == "SCALE_DIVIDE" and not cast.v
    if divides:
        # A divisor that lies on the device: by a number of the host, CUDA multiplies with its
        # rounded inverse.
        scale = np.array([255.0])
    both = np.stack(np.broadcast_arrays(scale, offset))[:, :, None, None]
    served: torch.dtype = getattr(torch, str(cast.n[0]).lower())
    # Halves are rounded once.
    both_2C11 = torch.tensor(both, dtype=torch.promote_types(served, torch.float32))

    def convert(source_BChw: Tensor) -> Tensor:
        nonlocal both_2C11
        if both_2C11.device != source_BChw.device:
            # Pinned, the thread does not wait for the copy.
            both_2C11 = both_2C11.pin_memory().to(source_BChw.device, non_blocking=True)
        scale, offset = both_2C11
        if divides:
            return torch.div(source_BChw, scale).to(served)
        return torch.addcmul(offset, source_BChw, scale).to(served)

    return convert
