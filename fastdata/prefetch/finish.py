"""What is done to a batch once it lies on its device, on the stream that brought it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastdata.prefetch.batches import map_tensors

__all__ = ["Finish"]

_IMAGE_DIMENSIONS = 4
_CPU = torch.device("cpu")


class Finish:
    """Batch ops, casts and the user's transform, in this order.

    Args:
        ops: called with the batch and its device first; for batch operations that run there.
        dtype: floating-point tensors, and uint8 tensors of four or more dimensions, are cast to it.
        channels_last: whether tensors of four dimensions get this memory format.
        transform: the user's, called last.
    """

    def __init__(
        self,
        *,
        ops: Callable[[Any, torch.device], Any] | None = None,
        dtype: torch.dtype | None = None,
        channels_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise ValueError(f"dtype={dtype!r} is no floating-point torch.dtype, such as torch.float16")
        self._ops, self.dtype, self.channels_last, self._transform = ops, dtype, channels_last, transform

    def with_ops(self, ops: Callable[[Any, torch.device], Any]) -> Finish:
        """Return the same with other batch ops."""
        return Finish(ops=ops, dtype=self.dtype, channels_last=self.channels_last, transform=self._transform)

    @property
    def is_nothing(self) -> bool:
        """Whether batches stay as they are."""
        return self._ops is None and self.dtype is None and not self.channels_last and self._transform is None

    def __call__(self, batch: Any, device: torch.device, number: int) -> Any:
        """Return the finished batch; an exception of the transform names the batch's number in the epoch."""
        if self._ops is not None:
            batch = self._ops(batch, device)
        if self.dtype is not None or self.channels_last:
            batch = map_tensors(batch, lambda tensor: self._cast(tensor, device))
        if self._transform is None:
            return batch
        try:
            return self._transform(batch)
        except Exception as error:
            raise _numbered(error, number) from error

    def _cast(self, tensor: Any, device: torch.device) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.device not in (device, _CPU):
            return tensor
        is_image = tensor.dtype is torch.uint8 and tensor.ndim >= _IMAGE_DIMENSIONS
        dtype = self.dtype if self.dtype and (tensor.is_floating_point() or is_image) else tensor.dtype
        if self.channels_last and tensor.ndim == _IMAGE_DIMENSIONS:
            return tensor.to(dtype=dtype, memory_format=torch.channels_last)
        return tensor.to(dtype=dtype)


def _numbered(error: Exception, number: int) -> Exception:
    """An exception of the same type, where one can be made, as torch does for those of workers."""
    message = f"transform= failed on batch {number}: {type(error).__name__}: {error}"
    if isinstance(error, StopIteration):  # would end the training loop's epoch in silence
        return RuntimeError(message)
    try:
        return type(error)(message)
    except Exception:  # noqa: BLE001  # a user's type may raise anything where it is made of a message
        return RuntimeError(message)
