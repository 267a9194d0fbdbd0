"""Memory that threads keep for intermediate results: fresh pages cost more than most kernels that fill them."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt

__all__ = ["Scratch", "round_up_8"]


class Scratch(threading.local):
    """Memory that each thread keeps for its own intermediate images; grows to the largest need, then is reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Give the thread's buffer of that name; its contents are what was left in it, at first zeros."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.zeros(round_up_8(size), np.uint8)
        return buffer[:size].reshape(shape)


def round_up_8(count: int) -> int:
    """Return the next multiple of 8."""
    return -(-count // 8) * 8
