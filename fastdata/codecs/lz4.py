"""LZ4: the fastest to decode, for samples that repeat themselves (masks, drawings, synthetic and medical images)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import lz4.block as lz4_block
import numpy as np
import numpy.typing as npt

from fastdata.codecs.base import Array, Settings, bytes_of, check_out, size_error, too_large
from fastdata.spec import SampleSpec

__all__ = ["Lz4Codec"]

FORMAT = 1
HIGHEST_LEVEL = 12
MOST_BYTES = 0x7E000000
"""Of a sample: the library's ``LZ4_MAX_INPUT_SIZE``."""
MOST_DATA_BYTES = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Lz4Codec:
    """Lossless; photographs hardly shrink (ratio 1.06), masks and drawings do.

    Encoded bytes, format 1: one block as the LZ4 Block Format Description defines it
    (github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without a size before or a checksum behind it, of the
    sample's memory in C order and the byte order of its dtype. A flipped bit may so go unnoticed; a size never does.

    Args:
        level: with ``high_compression`` 1 to 12, 0 for the library's 9; without it the acceleration, where 0
            is none and larger is faster and worse.
        high_compression: search longer while encoding; decoding takes the same time or less.

    Example:
        >>> codec = Lz4Codec()
        >>> mask, out = np.zeros((64, 64), np.int64), np.empty((64, 64), np.int64)
        >>> data = codec.encode(mask)
        >>> len(data) < 200
        True
        >>> codec.decode(memoryview(data), out)
        >>> bool((out == mask).all())
        True
    """

    level: int = 0
    high_compression: bool = False

    name: ClassVar[str] = "lz4"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.level < 0 or (self.high_compression and self.level > HIGHEST_LEVEL):
            most = f"{HIGHEST_LEVEL} with high_compression" if self.high_compression else "any acceleration"
            raise ValueError(f"level of codec 'lz4' is {self.level}; it must be 0 to {most}")

    def encode(self, sample: Array) -> bytes:
        """Encode any sample without Python objects."""
        data = bytes_of(sample)
        if self.high_compression:
            return bytes(
                lz4_block.compress(data, mode="high_compression", compression=self.level or 9, store_size=False)
            )
        return bytes(lz4_block.compress(data, mode="fast", acceleration=self.level or 1, store_size=False))

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``, with nothing in between where the library can be called directly."""
        target = check_out(out)
        written = _decompress(data, target)
        if written < 0:
            raise size_error(self.name, f"{len(data):,} bytes that are no block of at most that size", out)
        if written != target.size:
            raise size_error(self.name, f"a block of {written:,} bytes", out)

    def decode_batch(
        self, data: npt.NDArray[np.uint8], starts_B: npt.NDArray[np.int64], sizes_B: npt.NDArray[np.int64], out_B: Array
    ) -> int:
        """Fill ``out_B`` from the blocks at ``starts_B`` of ``data``, up to the first damaged one.

        A small block takes less time to decode than to be made a ``memoryview`` and handed to ``decode``: 30,000 masks
        of 256 x 256 a second that way, 100,000 here.

        Returns:
            How many blocks were decoded; none where lz4's library cannot be called directly.
        """
        call, size = _library_call(), out_B[:1].nbytes
        is_inside = (starts_B >= 0) & (sizes_B > 0) & (starts_B <= data.size - sizes_B) & (sizes_B <= MOST_DATA_BYTES)
        if call is None or not 0 < size <= MOST_BYTES or not is_inside.all():
            return 0
        check_out(out_B)
        first_out = out_B.ctypes.data
        for b, (start, data_size) in enumerate(
            zip((starts_B + data.ctypes.data).tolist(), sizes_B.tolist(), strict=True)
        ):
            if call(start, first_out + b * size, data_size, size) != size:
                return b
        return len(starts_B)

    def obstacle(self, spec: SampleSpec) -> str | None:
        """None, but for samples of several GB."""
        return too_large(spec, MOST_BYTES)

    def settings(self) -> Settings:
        """Name, format and arguments."""
        return {
            "name": self.name,
            "format": FORMAT,
            "level": self.level,
            "high_compression": self.high_compression,
        }


def _decompress(data: memoryview, out: npt.NDArray[np.uint8]) -> int:
    """Fill the beginning of ``out`` and return the bytes written, or a negative number for what is no block."""
    call = _library_call()
    if call is not None and 0 < len(data) <= MOST_DATA_BYTES and out.size <= MOST_BYTES:
        source = np.frombuffer(data, np.uint8)
        return int(call(source.ctypes.data, out.ctypes.data, source.size, out.size))
    try:
        raw = lz4_block.decompress(data, uncompressed_size=out.size)
    except (lz4_block.LZ4BlockError, ValueError, OverflowError):
        return -1
    out[: len(raw)] = np.frombuffer(raw, np.uint8)
    return len(raw)


@functools.cache
def _library_call() -> Callable[[int, int, int, int], int] | None:
    """``LZ4_decompress_safe`` of the library that lz4 itself uses; None where its extension does not show it.

    The package decodes only into new ``bytes``, which must then be copied: 23,000 images/s of 3 x 256 x 256, where this
    call reaches 28,000 (benchmarks/codecs.py). It belongs to liblz4's stable interface since its first release, never
    reads or writes outside the two sizes, and runs without the GIL.
    """
    try:
        call = ctypes.CDLL(lz4_block._block.__file__).LZ4_decompress_safe
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    call.restype = ctypes.c_int
    return cast("Callable[[int, int, int, int], int]", call)
