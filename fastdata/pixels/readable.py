"""The interface of a store that a program reads samples from."""

from __future__ import annotations

from typing import Protocol

from fastdata.pixels.arrays import Array, Int64s, Shape


class Readable(Protocol):
    """Samples that are read by index: uint8 (C, H, W), or (H, W) for masks."""

    @property
    def gives_views(self) -> bool:
        """True if samples are in memory as plain pixels, which need no decoding."""

    def shape(self, index: int, /) -> Shape:
        """Return the shape of one sample."""

    def read(self, index: int, /) -> Array:
        """Return one sample, as a view or a new array."""

    def read_into(self, index: int, out: Array, /) -> None:
        """Decode one sample into memory of its shape."""

    def addresses(self, index_B: Int64s, /) -> Int64s:
        """Return the addresses of samples that are in memory."""

    def jpeg_files(self, index_B: Int64s, /) -> tuple[Int64s, Int64s] | None:
        """Return addresses and sizes of JPEG files for the core; None if there are none."""

    def gather_into(self, index_B: Int64s, out_B: Array, /) -> None:
        """Copy samples, unchanged, into memory of shape (B, *shape)."""
