"""Memory of each thread for intermediate images."""

from __future__ import annotations

import math
import threading

import numpy as np

from fastdata.pixels.arrays import Bytes, Shape


class Scratch(threading.local):
    """Named buffers of each thread, which grow to the largest size that was needed.

    They are reused because new memory costs more time than most kernels that fill it: the system
    clears every new page.
    """

    def take(self, name: str, shape: Shape) -> Bytes:
        """Return this thread's buffer of this name: zeros at first, then its earlier contents."""
        size = math.prod(shape)
        buffer = vars(self).get(name)  # each thread has its own attributes of a threading.local
        if buffer is None or buffer.size < size:
            buffer = vars(self)[name] = np.zeros(size, np.uint8)
        return buffer[:size].reshape(shape)
