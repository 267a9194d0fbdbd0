"""Memory that each thread keeps for intermediate images."""

from __future__ import annotations

import math
import threading

import numpy as np

from fastdata.pixels.arrays import Bytes, Shape

# Planes to JPEG files and back


class Scratch(threading.local):
    """Memory that each thread keeps for intermediate images; grows to the largest need.

    Fresh pages cost more than most kernels that fill them.
    """

    def take(self, name: str, shape: Shape) -> Bytes:
        """Give the thread's buffer of that name, with what was left in it, at first zeros."""
        size = math.prod(shape)
        buffer = vars(self).get(name)
        if buffer is None or buffer.size < size:
            buffer = vars(self)[name] = np.zeros(round_up_8(size), np.uint8)
        return buffer[:size].reshape(shape)


def round_up_8(count: int) -> int:
    return -(-count // 8) * 8
