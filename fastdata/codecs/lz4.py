"""LZ4: the fastest to decode, for samples that repeat themselves (masks, drawings, synthetic and medical images)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastdata.codecs.base import Array, Settings, bytes_of, check_out, size_error, too_large
from fastdata.spec import SampleSpec

try:
    import lz4.block as lz4_block
except ImportError:  # said when a codec is made, not when fastdata is imported
    lz4_block = None

__all__ = ["Lz4Codec"]

FORMAT = 1
HIGHEST_LEVEL = 12
MOST_BYTES = 0x7E000000
"""Of a block, by its specification."""


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
        if lz4_block is None:
            raise ImportError("codec 'lz4' needs the package lz4, which is not installed: pip install lz4")
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
        """Fill ``out``, by way of a ``bytes`` of its size: lz4 has no call that decodes into given memory."""
        target = check_out(out)
        try:
            raw = lz4_block.decompress(data, uncompressed_size=target.size)
        except (lz4_block.LZ4BlockError, ValueError) as problem:
            raise size_error(self.name, f"{len(data):,} bytes that are no block of at most that size", out) from problem
        if len(raw) != target.size:
            raise size_error(self.name, f"a block of {len(raw):,} bytes", out)
        target[...] = np.frombuffer(raw, np.uint8)

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
