"""Memory that each thread keeps for intermediate images."""

from __future__ import annotations

import math
import threading

import numpy as np

from fastdata.pixels.arrays import Bytes, Shape


class Scratch(threading.local):
    """Named buffers of each thread, which grow to the largest size that was needed.

    Memory that is new costs more than most kernels that fill it: the system clears every page.
    """

    def take(self, name: str, shape: Shape) -> Bytes:
        """Return this thread's buffer of a name, with its earlier contents, at first zeros."""
        size = math.prod(shape)
        buffer = vars(self).get(name)  # the attributes of a threading.local are the thread's own
        if buffer is None or buffer.size < size:
            buffer = vars(self)[name] = np.zeros(size, np.uint8)
        return buffer[:size].reshape(shape)
