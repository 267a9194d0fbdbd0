"""Host memory that batches are copied from on their way to a device, pinned if possible.

A device reads pinned memory directly, while the host continues. Other memory is first copied to
pinned memory of torch's allocator. If the driver refuses to pin memory, it copies in parts.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.cuda

from fastdata.datasets.held_tensors import memory_of, moves_itself
from fastdata.datasets.slots import is_plain
from fastdata.datasets.trees import is_container, leaves_of, map_batch
from fastdata.errors import kind_of
from fastdata.machine import limits
from fastdata.machine.budget import budget_bytes, choose_pinning
from fastdata.pixels.arrays import Array
from fastdata.report import log, warn_user

_T = TypeVar("_T")
_EXCHANGE_MODE = "cudaThreadExchangeStreamCaptureMode"
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_IN_PLACE = "in_place_bytes"
_STAGED = "staged_bytes"
_PAGEABLE = "pageable_bytes"


class PinnedMemory:
    """The pinned memory of a prefetcher: buffers of its loader's ring, and copies of batches.

    The ring may use the share of the free memory that ``choose_pinning`` allows. A larger ring
    stays in ordinary memory, and its batches are copied. Any thread may call the methods.

    Attributes:
        ring_slots: number of buffers in the ring; either all of them are pinned, or none.
        ring_bytes: bytes pinned for the ring.
        copies_bytes: most bytes pinned for copies at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.ring_slots = 0
        self.ring_bytes = 0
        self.copies_bytes = 0
        self._device = device
        self._ring_reason = ""
        self._refusal = ""
        self._lock = threading.Lock()  # held to pin the ring
        self._spares: list[Array] = []  # buffers of the ring that are pinned, and not used yet
        self._warnings: dict[str, bool] = {}  # text -> whether it was given

    @property
    def reason(self) -> str:
        """Why memory is pinned, or is not, for a report."""
        copies = "copies pinned" if self.copies_bytes else ""
        reasons = filter(None, (self._ring_reason, copies, self._refusal))
        return "; ".join(reasons) or "nothing pinned yet"

    def allocate(self, size_bytes: int) -> Array:
        """Return uint8 memory for one of the ring's buffers, pinned if all of them may be pinned.

        The first call pins all buffers, while the training loop waits for its first batch anyway.
        Pinning holds a lock of the driver that kernel launches need. Later it would delay the
        kernels of a step (by 45 ms on an H100).
        """
        # Called in threads of the loader.
        begin_thread(self._device)
        with self._lock:
            while self._spares:
                spare = self._spares.pop()
                if spare.nbytes >= size_bytes:
                    return spare
            if not self._may_pin(self.ring_slots * allocated_bytes(size_bytes)):
                return np.empty(size_bytes, np.uint8)
            is_first = not self.ring_bytes
            pinned = self._pin_bytes(size_bytes)
            if pinned is None:
                return np.empty(size_bytes, np.uint8)
            self.ring_bytes = max(self.ring_slots * allocated_bytes(size_bytes), self.ring_bytes)
            if is_first:
                others = [self._pin_bytes(size_bytes) for _ in range(self.ring_slots - 1)]
                self._spares = [other for other in others if other is not None]
            return pinned

    def _may_pin(self, need_bytes: int) -> bool:
        """Decide whether all buffers of the ring may be pinned, or none."""
        if need_bytes <= self.ring_bytes:
            return True
        plan = choose_pinning(
            need_bytes, budget_bytes(limits.available_bytes()), has_accelerator=True
        )
        self._ring_reason = f"ring {plan.reason}"
        return plan.pin

    def _pin_bytes(self, size_bytes: int) -> Array | None:
        pinned = self.pin(torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
        return None if pinned is None else pinned.numpy()

    def forget(self) -> None:
        """Release the unused buffers, and reset the counts to 0."""
        with self._lock:
            self._spares.clear()
            self.ring_bytes = 0
            self.copies_bytes = 0

    def pin(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return dense pinned memory for a tensor like this; None if the driver refuses."""
        return self._unless_refused(lambda: torch.empty_like(like, pin_memory=True))

    def pin_object(self, value: Any) -> Any:
        """Pin the tensors of an object of the user's own class, by its ``pin_memory``.

        Return None if its class has no such method, some tensors are on a device, or the driver
        refuses.
        """
        if not hasattr(type(value), "pin_memory") or device_memory(value):
            return None
        # In a tuple, to tell two cases apart: a class that pins in place returns None, and
        # ``_unless_refused`` returns None for a refusal.
        pinned = self._unless_refused(lambda: (value.pin_memory(),))
        if pinned is None:
            return None
        [copy] = pinned
        return value if copy is None else copy

    def _unless_refused(self, pin: Callable[[], _T]) -> _T | None:
        if self._refusal:  # another attempt would cost time for each batch
            return None
        try:
            return pin()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._refusal = f"not pinned: the driver refuses to pin memory ({reason})"
            self.add_warning(
                f"batches are copied to {self._device} from pageable memory, which takes longer: "
                f"{self._refusal}"
            )
            return None

    def add_warning(self, text: str) -> None:
        """Keep a warning until ``give_warnings`` is called in the training loop's thread."""
        self._warnings.setdefault(text, False)

    def give_warnings(self) -> None:
        """Give each warning once. Called in the user's thread, so that it shows the user's line."""
        for text, is_given in list(self._warnings.items()):
            if not is_given:
                self._warnings[text] = True
                warn_user(text)


class Sender:
    """Copies tensors from the host to a device, on the current stream.

    Attributes:
        sent_bytes: bytes that were sent in each way: ``in_place_bytes`` from pinned memory of the
            loader, ``staged_bytes`` after a copy to pinned memory, ``pageable_bytes`` from ordinary
            memory.
    """

    def __init__(self, device: torch.device, pinned: PinnedMemory, batches: int = 1) -> None:
        self.pinned = pinned
        self.sent_bytes = {_IN_PLACE: 0, _STAGED: 0, _PAGEABLE: 0}
        self._device = device
        self._batches = batches  # number of batches whose copies are pinned at a time

    def stage(self, batch: Any) -> tuple[Any, list[Any]]:
        """Replace tensors that the device cannot read in place by pinned copies.

        Returns:
            The batch, and a list of the host memory that the device reads: keep it until the
            copies are done.
        """
        sources: list[Any] = []
        staged_bytes = 0

        def stage_value(value: Any) -> Any:
            nonlocal staged_bytes
            staged, size_bytes = self._stage_value(value)
            staged_bytes += size_bytes
            sources.append(staged)
            if not isinstance(staged, torch.Tensor):
                sources.extend(host_memory(staged))  # its own ``to`` may replace these tensors
            return staged

        batch = map_batch(stage_value, batch, moves_itself)
        self.pinned.copies_bytes = max(self._batches * staged_bytes, self.pinned.copies_bytes)
        return batch, sources

    def _stage_value(self, value: Any) -> tuple[Any, int]:
        """Return a tensor or object, or a pinned copy of it, and the bytes of the copy."""
        if not isinstance(value, torch.Tensor):
            parts = host_memory(value)
        elif _is_host_tensor(value):
            parts = [value]
        else:
            return value, 0
        size_bytes = sum(part.nbytes for part in parts)
        if all(part.is_pinned() and _is_dense(part) for part in parts):
            self.sent_bytes[_IN_PLACE] += size_bytes
            return value, 0
        copy = self._pinned_copy(value)
        if copy is None:
            self.sent_bytes[_PAGEABLE] += size_bytes
            return value, 0
        self.sent_bytes[_STAGED] += size_bytes
        return copy, sum(allocated_bytes(part.nbytes) for part in parts)

    def _pinned_copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self.pinned.pin_object(value)
        copy = self.pinned.pin(value)
        if copy is not None:
            np.copyto(_as_array(copy), _as_array(value))
        return copy

    def copy(self, value: Any) -> Any:
        """Queue the copy of a staged tensor or object: one transfer if it is dense."""
        if not isinstance(value, torch.Tensor):
            return _move_object(value, self._device)
        if _is_host_tensor(value):
            return value.to(self._device, non_blocking=value.is_pinned())
        return value.to(self._device) if value.device.type == "cpu" else value

    def send(self, tensor: torch.Tensor) -> Any:
        """Stage and copy one tensor."""
        staged, _ = self.stage(tensor)
        return self.copy(staged)


def begin_thread(device: torch.device) -> None:
    """Prepare a thread of the prefetcher or its loader for CUDA events and pinned memory.

    A new thread uses device 0. If the prefetcher uses another device, a CUDA context on device 0
    would waste memory. While the training loop captures a graph in torch's default mode ("global"),
    unsafe calls from other threads end the capture, unless these threads use the relaxed mode.
    """
    torch.cuda.set_device(device)
    # torch has no function for this. It loads libcudart with global symbols.
    symbols = ctypes.CDLL(None) if os.name == "posix" else None
    exchange_mode = getattr(symbols, _EXCHANGE_MODE, None)
    if exchange_mode is None:
        log.info(
            "%s is not found: capture CUDA graphs before iter() of a CudaPrefetcher", _EXCHANGE_MODE
        )
    else:
        exchange_mode(ctypes.byref(ctypes.c_int(_RELAXED)))


def allocated_bytes(size_bytes: int) -> int:
    """Return the bytes that torch's allocator uses for a pinned block of this size.

    It is the next power of two, unless the user's allocator settings limit that: with
    ``PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:16`` larger blocks keep their own size.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    limits_mib = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb:(\d+)", settings)
    if any(size_bytes > int(limit_mib) << 20 for limit_mib in limits_mib):
        return size_bytes
    return 1 << max(size_bytes - 1, 0).bit_length()


def device_memory(batch: Any) -> list[Any]:
    """Return the objects of a batch that hold device memory, each with ``record_stream``."""
    return [it for it in memory_of(batch) if not isinstance(it, torch.Tensor) or it.is_cuda]


def host_memory(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, at any depth, that have elements in host memory."""
    return [
        it
        for it in memory_of(value)
        if isinstance(it, torch.Tensor) and it.device.type == "cpu" and it.numel()
    ]


def left_behind(batch: Any) -> str:
    """Return the class of an object in a batch that cannot be moved and has tensors on the CPU."""
    objects = leaves_of(batch, is_leaf=lambda value: not is_container(value))
    names = (kind_of(it) for it in objects if not moves_itself(it) and host_memory(it))
    return next(names, "")


def _move_object(value: Any, device: torch.device) -> Any:
    """Move an object to a device by its own ``to``, without waiting if it has such an option."""
    if not host_memory(value) and not hasattr(value, "device"):
        return value  # ``to`` may mean something else, such as a conversion of units
    try:
        moved = value.to(device, non_blocking=True)
    except TypeError:  # it, or a part of it, has no such parameter
        moved = value.to(device)
    return value if moved is None else moved  # some classes move in place


def _is_host_tensor(value: torch.Tensor) -> bool:
    """Return True for a plain CPU tensor that has elements and is not of a subclass."""
    return type(value) is torch.Tensor and is_plain(value) and value.numel() > 0


def _as_array(tensor: torch.Tensor) -> Array:
    """View a plain tensor as an array of integers of the same size: NumPy lacks some dtypes.

    ``Tensor.copy_`` would start a team of OpenMP threads on all cores for each thread that calls
    it. NumPy starts none and releases the GIL. If both arrays are dense and have the same strides,
    it copies them in one piece.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    dtype = integers.get(tensor.itemsize, tensor.dtype)  # only complex numbers have 16 bytes
    return tensor.view(dtype).numpy()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements fill a range of memory; otherwise torch copies them first."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
