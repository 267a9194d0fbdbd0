"""Five datasets for tune.py. The speed of each has another limit: waiting, CPU, the GIL, memory, or the workers."""

from __future__ import annotations

import io
import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from fastdata.tools.photos import photo

SAMPLES_PER_EPOCH = 4096
KEPT = 16  # number of different samples; all others repeat them


class Synthetic(Dataset[Any]):
    batch_size = 32

    def __len__(self) -> int:
        return SAMPLES_PER_EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.sample(index)), index % KEPT

    def sample(self, index: int) -> Any:
        raise NotImplementedError


class IoBound(Synthetic):
    """Sleeps for 2 to 6 ms, depending on the index, as if it read from a network file system."""

    def sample(self, index: int) -> Any:
        time.sleep(0.002 + 0.004 * (index * 2654435761 % 1000) / 1000)
        return np.full(64, index, np.float32)


class CpuBound(Synthetic):
    """Decodes and resizes a JPEG in native code, which releases the GIL, in one thread."""

    def __init__(self) -> None:
        self.files = [_jpeg(number) for number in range(KEPT)]

    def sample(self, index: int) -> Any:
        with Image.open(io.BytesIO(self.files[index % KEPT])) as image:
            return np.array(image.resize((128, 96), Image.Resampling.BILINEAR))


class GilBound(Synthetic):
    """Computes in pure Python for about a millisecond."""

    def sample(self, index: int) -> Any:
        total = index
        for number in range(20_000):
            total = (total * 31 + number) % 1_000_003
        return np.full(64, total, np.float32)


class MemoryBound(Synthetic):
    """Scales 3 MiB for each sample, which is little arithmetic for the memory that it moves."""

    batch_size = 8

    def __init__(self) -> None:
        self.arrays = np.random.default_rng(0).random((KEPT, 3, 512, 512), dtype=np.float32)

    def sample(self, index: int) -> Any:
        return self.arrays[index % KEPT] * np.float32(0.5)


class Trivial(Synthetic):
    """Returns a small array from memory: any worker costs more time than it saves."""

    def __init__(self) -> None:
        self.arrays = np.random.default_rng(0).random((KEPT, 64), dtype=np.float32)

    def sample(self, index: int) -> Any:
        return self.arrays[index % KEPT]


LOADERS = {
    "I/O-bound": IoBound,
    "CPU-bound": CpuBound,
    "GIL-bound": GilBound,
    "memory-bound": MemoryBound,
    "trivial": Trivial,
}


def _jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(photo(seed, (320, 240))).save(file, "JPEG", quality=90)
    return file.getvalue()
