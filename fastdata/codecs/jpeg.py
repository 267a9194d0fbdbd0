"""JPEG: seven to nine times smaller photographs, for the price of exactness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastdata.codecs.base import Array, Settings, bytes_of, check_out, refuse
from fastdata.decode import decode_planes_into, encode_planes
from fastdata.errors import CodecError
from fastdata.spec import SampleSpec

__all__ = ["JpegCodec"]

FORMAT = 1
LONGEST_SIDE_PX = 65_500
"""Of libjpeg; the standard's own limit is 65,535."""
SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegCodec:
    """**Lossy**: samples are re-encoded at their prepared size and come back slightly changed.

    Only images of uint8, (3, H, W) or (1, H, W), for in anything else (labels, depths, tables) a change is an error.
    ImageNet photographs at 256 x 256: ratio 7 with the defaults.

    Encoded bytes, format 1: one baseline JPEG file (ITU-T T.81) with a JFIF header, YCbCr as JFIF has it or grey. Which
    pixels it decodes to is libjpeg-turbo's (accurate integer inverse DCT, smooth chroma upsampling).

    Args:
        quality: 1 to 95, libjpeg's scale. 92 changes ImageNet pixels by 2 levels of 255 on average.
        subsampling: of the colours, ``"4:4:4"`` (none), ``"4:2:2"`` or ``"4:2:0"``.

    Example:
        >>> codec = JpegCodec()
        >>> grey, out = np.full((3, 32, 32), 128, np.uint8), np.empty((3, 32, 32), np.uint8)
        >>> codec.decode(memoryview(codec.encode(grey)), out)
        >>> bool((out == grey).all())
        True
    """

    quality: int = 92
    subsampling: str = "4:4:4"

    name: ClassVar[str] = "jpeg"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.quality <= 95:
            raise ValueError(f"quality of codec 'jpeg' is {self.quality}; it must be 1 to 95. Exact codecs: lz4, zstd")
        if self.subsampling not in SUBSAMPLINGS:
            known = ", ".join(SUBSAMPLINGS)
            raise ValueError(f"subsampling of codec 'jpeg' is {self.subsampling!r}; it must be {known}")

    def encode(self, sample: Array) -> bytes:
        """Encode a planar uint8 image.

        Raises:
            ValueError: it is none; the message says why that matters.
        """
        if (reason := _obstacle(sample.shape, sample.dtype)) is not None:
            raise refuse(self.name, sample, reason)
        bytes_of(sample)
        return encode_planes(sample, quality=self.quality, subsampling=self.subsampling)

    def decode(self, data: memoryview, out: Array) -> None:
        """Fill ``out``; the size in the file's header is held against it before any pixel is decoded."""
        check_out(out)
        if (reason := _obstacle(out.shape, out.dtype)) is not None:
            raise refuse(self.name, out, reason)
        try:
            decode_planes_into(data, out)
        except (OSError, ValueError) as problem:
            raise CodecError(
                f"codec {self.name!r} found {len(data):,} bytes that give no image of {out.shape}: {problem}. "
                "The data are damaged or belong to another sample; prepare the samples anew."
            ) from problem

    def obstacle(self, spec: SampleSpec) -> str | None:
        """Why such samples are not images that may change a little."""
        return _obstacle(spec.shape, np.dtype(spec.dtype))

    def settings(self) -> Settings:
        """Name, format and arguments."""
        return {"name": self.name, "format": FORMAT, "quality": self.quality, "subsampling": self.subsampling}


def _obstacle(shape: tuple[int, ...] | None, dtype: np.dtype[np.generic]) -> str | None:
    exact = "use codec='zstd' or 'lz4', which keep them exactly"
    if dtype != np.uint8:
        return f"JPEG keeps 8 bits, not {dtype}; {exact}"
    if shape is None:
        return None
    if len(shape) == 2:
        return f"an array (H, W) looks like a label mask, and a lossy codec would change labels; {exact}"
    if len(shape) != 3 or shape[0] not in (1, 3):
        return f"JPEG keeps images of 1 or 3 planes (C, H, W), not {shape}; {exact}"
    if not all(1 <= side <= LONGEST_SIDE_PX for side in shape[1:]):
        return f"JPEG keeps sides of 1 to {LONGEST_SIDE_PX:,} px, not {shape[1]} x {shape[2]}; {exact}"
    return None
