"""Files and bytes to images.

The compiled core decodes ordinary JPEGs through the libjpeg-turbo that Pillow is linked to: the
same decoder without Pillow's copies, so the pixels are those of torchvision's default loader. It
can decode a part of an image without the rest. Pillow opens all other files.

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
"""EXIF's orientations from this one on exchange height and width."""
Loader = Callable[[Any], Any]
Buffer = bytes | memoryview
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File name endings of images, torchvision's ``IMG_EXTENSIONS``."""


# Once per process, because it opens a library and compares its version.
@functools.cache
def open_libjpeg() -> tuple[Jpeg | None, str]:
    """Return Pillow's own libjpeg-turbo for the core, or None and why Pillow decodes alone."""
    from PIL import _imaging

    try:
        return Jpeg(_imaging.__file__), ""
    except OSError as obstacle:
        return None, str(obstacle)


def jpeg_obstacle() -> str:
    """Return why Pillow decodes alone; nothing if the core decodes."""
    return open_libjpeg()[1]


def load_image(path: AnyPath, *, upright: bool = False) -> Image.Image:
    """Open an image file in mode RGB, as torchvision's default loader does.

    ``upright`` turns it by the orientation in its EXIF.
    """
    with open(path, "rb", opener=open_file) as stream:
        return _open(stream, upright)


def read_size(path: AnyPath, *, upright: bool = False) -> tuple[int, int]:
    """Return height and width of an image file, from its header.

    ``upright`` gives those of the image after it is turned by the orientation in its EXIF.
    """
    from PIL import Image
    from PIL.ExifTags import Base

    with open(path, "rb", opener=open_file) as stream:
        image: Image.Image = Image.open(stream)
        width, height = image.size
        is_turned = upright and image.getexif().get(Base.Orientation, 1) >= _TRANSPOSED
    return (width, height) if is_turned else (height, width)


def decode_image(data: Buffer, *, upright: bool = False) -> Image.Image:
    """Open the bytes of an image file, as ``load_image`` does."""
    return _open(io.BytesIO(data), upright)


def _open(stream: BinaryIO, upright: bool) -> Image.Image:
    from PIL import Image, ImageOps

    image: Image.Image = Image.open(stream)
    if upright:
        image = ImageOps.exif_transpose(image)
    return image.convert("RGB")


class OpenedImages(Samples):
    """Images for the core: JPEG files in memory whose headers were read, or pixels.

    Pillow decodes the files that the core cannot decode, and files that turn out to be damaged: its
    pixels take the place of the file, or it raises its own error.

    Args:
        sources_B: addresses of files.
        sizes_B: sizes of files in bytes.
        by_pillow: returns the pixels (C, H, W) of image ``b`` as Pillow decodes them.
        shapes_B3: shapes (C, H, W) that the files should have: Pillow decodes files with another
            one. None if any shape will do.
        how: options of ``jpeg_headers``.
    """

    # The core reads addresses and sizes of this object's own arrays, which `leave_to_pillow`
    # changes between two calls: the batch that met a damaged file goes on from that image.

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
        self._alive: list[Array] = []  # whose memory the core reads by address
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
        """Open files.

        Args:
            files: the bytes of each.
            by_pillow: as in the constructor.
            upright: turn images by the orientation in their EXIF.
            channels: of all images; None keeps one channel for gray files.
        """
        from PIL import Image

        arrays = [np.frombuffer(data, np.uint8) for data in files]
        sizes_B = np.array([data.size for data in arrays], np.int64)
        # Larger images are left to Pillow, which warns of them as decompression bombs or refuses
        # them.
        most = Image.MAX_IMAGE_PIXELS or math.inf
        how: dict[str, Any] = {"upright": upright, "channels": channels, "most_pixels": most}
        opened = cls(addresses_of(arrays), sizes_B, by_pillow, **how)
        opened._alive += arrays
        return opened

    def leave_to_pillow(self, b: int) -> None:
        """Replace the file of image ``b`` by its pixels, decoded by Pillow.

        Raises:
            Exception: Pillow cannot decode it. The image stays a file.
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

    The file is not trusted: its size is compared before memory is filled.

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
    # False means that the file has another shape or is damaged. Pillow finds out which, and raises
    # the error that users know.
    if jpeg is not None and jpeg.decode(np.frombuffer(data, np.uint8), out_CHW):
        return
    from PIL.JpegImagePlugin import JpegImageFile

    try:
        # Image.open would also accept other formats, and compare the size with its own limit.
        image = JpegImageFile(io.BytesIO(data))
    except SyntaxError as problem:
        raise OSError(f"not a JPEG file ({problem})") from problem
    if image.size != (width, height) or image.mode != {1: "L", 3: "RGB"}[channels]:
        raise ValueError(f"it is a JPEG of {image.width} x {image.height} px in mode {image.mode}")
    pack_planes(image, out_CHW)
