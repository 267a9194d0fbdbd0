"""Decoding of files and bytes to images.

The compiled core decodes ordinary JPEGs with the libjpeg-turbo that Pillow is linked to. It is the
same decoder, so the pixels are those of torchvision's default loader, without Pillow's copies. The
core can also decode only a part of an image. Pillow opens all other files.

Shape letters: C channels, H W size of an image.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fastdata.paths import AnyPath, open_file
from fastdata.pixels.arrays import Array, Int32s, Int64s
from fastdata.pixels.core.calls import Samples
from fastdata.pixels.core.jpeg import Jpeg, jpeg_headers
from fastdata.pixels.samples import addresses_of, pack_planes, to_pil

if TYPE_CHECKING:
    from PIL import Image

_TRANSPOSED = 5
"""From this number on, EXIF's orientations exchange height and width."""
Loader = Callable[[Any], Any]
Buffer = bytes | memoryview
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File name endings of images, torchvision's ``IMG_EXTENSIONS``."""


# Once per process, because it opens a library and compares its version.
@functools.cache
def open_libjpeg() -> tuple[Jpeg | None, str]:
    """Return Pillow's own libjpeg-turbo for the core, or None and the reason why it is not used."""
    from PIL import _imaging

    try:
        return Jpeg(_imaging.__file__), ""
    except OSError as obstacle:
        return None, str(obstacle)


def jpeg_obstacle() -> str:
    """Return why the core cannot decode JPEGs, so that Pillow does; empty if it can."""
    return open_libjpeg()[1]


def load_image(path: AnyPath, *, upright: bool = False) -> Image.Image:
    """Open an image file in mode RGB, as torchvision's default loader does.

    Args:
        path: path or URL of the file.
        upright: True to turn the image by the orientation in its EXIF.
    """
    with open(path, "rb", opener=open_file) as stream:
        return _open(stream, upright)


def read_size(path: AnyPath, *, upright: bool = False) -> tuple[int, int]:
    """Return height and width of an image file in pixels, from its header.

    Args:
        path: path or URL of the file.
        upright: True for the size after the image is turned by the orientation in its EXIF.
    """
    from PIL import Image
    from PIL.ExifTags import Base

    with open(path, "rb", opener=open_file) as stream:
        image: Image.Image = Image.open(stream)
        width, height = image.size
        is_turned = upright and image.getexif().get(Base.Orientation, 1) >= _TRANSPOSED
    return (width, height) if is_turned else (height, width)


def decode_image(data: Buffer, *, upright: bool = False) -> Image.Image:
    """Decode the bytes of an image file, as ``load_image`` does."""
    return _open(io.BytesIO(data), upright)


def _open(stream: BinaryIO, upright: bool) -> Image.Image:
    from PIL import Image, ImageOps

    image: Image.Image = Image.open(stream)
    if upright:
        image = ImageOps.exif_transpose(image)
    return image.convert("RGB")


class OpenedImages(Samples):
    """Images for the core: JPEG files in memory whose headers were read, or pixels.

    Pillow decodes the files that the core cannot decode, and files that turn out to be damaged. Its
    pixels then replace the file, or it raises its own error.

    Args:
        sources_B: addresses of the files in memory.
        sizes_B: sizes of the files in bytes.
        by_pillow: function of ``b`` that decodes image ``b`` with Pillow and returns its pixels
            (C, H, W).
        shapes_B3: shapes (C, H, W) that the images must have; Pillow decodes files with another
            shape. None allows any shape.
        how: options of ``jpeg_headers``.
    """

    # The core reads the addresses and sizes from arrays that belong to this object.
    # `leave_to_pillow` changes them between two calls of the core: after a damaged file, the batch
    # continues with that image.

    def __init__(
        self,
        sources_B: Int64s,
        sizes_B: Int64s,
        by_pillow: Callable[[int], Array],
        shapes_B3: Int32s | None = None,
        **how: Any,
    ) -> None:
        self._sizes_B = sizes_B.copy()
        self._by_pillow = by_pillow
        self._alive: list[Array] = []  # keeps memory alive that the core reads by its address
        self._turns_B = np.zeros(len(sizes_B), np.int32)
        found_B3 = np.zeros((len(sizes_B), 3), np.int32)
        jpeg, _ = open_libjpeg()
        if jpeg is not None:
            found_B3, self._turns_B = jpeg_headers(sources_B, sizes_B, **how)
            self.files = jpeg.address, self._sizes_B.ctypes.data, self._turns_B.ctypes.data
        super().__init__(sources_B.copy(), found_B3)
        is_left_B = self._turns_B == 0  # the core does not decode these
        if shapes_B3 is not None:
            is_left_B |= (found_B3 != shapes_B3).any(axis=1)
        for b in np.flatnonzero(is_left_B).tolist():
            self.leave_to_pillow(b)

    @classmethod
    def of_files(
        cls,
        files: Sequence[Buffer],
        by_pillow: Callable[[int], Array],
        *,
        upright: bool = False,
        channels: int | None = 3,
    ) -> OpenedImages:
        """Read the headers of files.

        Args:
            files: the bytes of each file.
            by_pillow: as in the constructor.
            upright: True to turn images by the orientation in their EXIF.
            channels: number of channels of all images; None keeps one channel for gray files.
        """
        from PIL import Image

        arrays = [np.frombuffer(data, np.uint8) for data in files]
        sizes_B = np.array([data.size for data in arrays], np.int64)
        # Larger images are left to Pillow: it warns that they may be decompression bombs, or
        # refuses them.
        most = Image.MAX_IMAGE_PIXELS or math.inf
        how: dict[str, Any] = {"upright": upright, "channels": channels, "most_pixels": most}
        opened = cls(addresses_of(arrays), sizes_B, by_pillow, **how)
        opened._alive += arrays
        return opened

    def leave_to_pillow(self, b: int) -> None:
        """Replace the file of image ``b`` by its pixels, decoded by Pillow.

        Raises:
            Exception: Pillow cannot decode it; the error is Pillow's. The image stays a file.
        """
        pixels = self._by_pillow(b)
        self._sizes_B[b] = 0  # marks pixels for the core
        self._alive.append(pixels)
        self.sources_B[b] = pixels.ctypes.data
        self.shapes_B3[b] = pixels.shape


def encode_jpeg(image_CHW: Array, quality: int, subsampling: str) -> bytes:
    """Return stored planes as a JPEG file, written by Pillow."""
    stream = io.BytesIO()
    to_pil(image_CHW).save(stream, "JPEG", quality=quality, subsampling=subsampling)
    return stream.getvalue()


def decode_planes_into(data: memoryview, out_CHW: Array) -> None:
    """Decode a JPEG file into planes.

    The file may come from anywhere, so its size is checked before memory is written.

    Args:
        data: the file's bytes.
        out_CHW: 1 or 3 planes of uint8, C-contiguous.

    Raises:
        OSError: the file is damaged.
        ValueError: the size or the number of planes in its header is not that of ``out_CHW``;
            nothing was decoded.
    """
    channels, height, width = out_CHW.shape
    jpeg, _ = open_libjpeg()
    # False means that the file has another shape or is damaged. Then Pillow decodes it, and raises
    # the error that users know.
    if jpeg is not None and jpeg.decode(np.frombuffer(data, np.uint8), out_CHW):
        return
    from PIL.JpegImagePlugin import JpegImageFile

    try:
        # Not Image.open, which would accept other formats, and refuse images above its own limit.
        image = JpegImageFile(io.BytesIO(data))
    except SyntaxError as problem:
        raise OSError(f"not a JPEG file ({problem})") from problem
    if image.size != (width, height) or image.mode != {1: "L", 3: "RGB"}[channels]:
        raise ValueError(f"it is a JPEG of {image.width} x {image.height} px in mode {image.mode}")
    pack_planes(image, out_CHW)
