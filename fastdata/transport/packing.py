"""A batch as a pickle of its structure, and the memory of its tensors and arrays apart."""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

__all__ = ["Packer", "StorageSharedError", "address_of", "is_plain", "lies_in"]

_WHOLE_STORAGE = 4
"""A tensor travels with its whole storage, as in torch, unless that is more than so many times its own extent."""


def address_of(array: np.ndarray) -> int:
    """Where the array's memory begins."""
    return int(array.__array_interface__["data"][0])


def lies_in(part: np.ndarray, whole: np.ndarray) -> bool:
    """Whether the memory of one contiguous array is within that of another."""
    start = address_of(part) - address_of(whole)
    return start >= 0 and start + part.nbytes <= whole.nbytes


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape, strides and memory are all there is to it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


class StorageSharedError(Exception):
    """Two tensors of a batch are small parts of one large storage: in torch's way they stay parts of one."""


class Packer(pickle.Pickler):
    """Pickles a batch, and puts the memory of its tensors and arrays aside as ``parts``: views, nothing is copied.

    Args:
        lease: memory that need not be copied to travel, so that storages in it always travel whole.
    """

    def __init__(self, lease: np.ndarray) -> None:
        self._lease = lease
        self._file = io.BytesIO()
        parts: list[np.ndarray] = []
        self.parts = parts
        # A callback that held the packer would make a cycle, and the slot's lease live until it is collected.
        super().__init__(self._file, 5, buffer_callback=lambda part: parts.append(np.frombuffer(part.raw(), np.uint8)))
        self.dispatch_table = ForkingPickler(io.BytesIO()).dispatch_table  # torch's way for all other tensors
        self._storages: dict[int, np.ndarray | None] = {}  # None: only a part of it was sent

    def pack(self, batch: Any) -> bytes:
        """Return the pickle."""
        self.dump(batch)
        return self._file.getvalue()

    def reducer_override(self, value: Any) -> Any:
        """Reduce plain tensors to the bytes behind them, the same for those that share a storage; arrays as torch's."""
        if type(value) is np.ndarray and (not value.flags.writeable or value.dtype.byteorder in "<>"):
            dtype = value.dtype if value.dtype.byteorder == "|" else value.dtype.newbyteorder("=")
            return value.astype(dtype).__reduce_ex__(5)  # through torch's queue it is native and may be written to
        if type(value) is not torch.Tensor or not is_plain(value):
            return NotImplemented
        size, strides, dtype = tuple(value.shape), value.stride(), value.dtype
        if not value.numel():
            return _tensor, (None, dtype, 0, size, strides)
        offset = value.storage_offset()
        storage = value.untyped_storage()
        key = storage.data_ptr()
        extent = 1 + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True))
        if key not in self._storages:
            octets = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            if octets.nbytes > _WHOLE_STORAGE * extent * value.itemsize and not lies_in(octets, self._lease):
                self._storages[key] = None
                start = offset * value.itemsize
                octets = octets[start : start + extent * value.itemsize]
                return _tensor, (octets, dtype, 0, size, strides)
            self._storages[key] = octets
        if self._storages[key] is None:
            raise StorageSharedError
        return _tensor, (self._storages[key], dtype, offset, size, strides)


def _tensor(
    octets: np.ndarray | None, dtype: torch.dtype, offset: int, size: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Make a tensor over ``octets``, which it keeps alive; None for a tensor without elements."""
    if octets is None:
        return torch.empty_strided(size, strides, dtype=dtype)
    storage = torch.frombuffer(octets, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, strides)
