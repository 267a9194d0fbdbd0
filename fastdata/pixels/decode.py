"""Files and bytes to images.

An image is opened by PIL or, an ordinary JPEG, by the compiled core, through the libjpeg-turbo that
PIL is linked to: the same decoder without PIL's copies, so the very pixels of torchvision's default
loader, and of a part of an image without decoding the rest.

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


Loader = Callable[[Any], Any]

Buffer = bytes | memoryview

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File name endings of images, torchvision's ``IMG_EXTENSIONS``."""


# Files and bytes to images


@functools.cache
def open_libjpeg() -> tuple[Jpeg | None, str]:
    """PIL's own libjpeg-turbo for the core; or None and why PIL decodes alone."""
    from PIL import _imaging

    try:
        return Jpeg(_imaging.__file__), ""
    except OSError as obstacle:
        return None, str(obstacle)


def jpeg_obstacle() -> str:
    """Why PIL decodes alone; empty where the core does."""
    return open_libjpeg()[1]


def load_image(path: AnyPath, *, upright: bool = False) -> Image.Image:
    """Open an image file as torchvision's default loader does: mode RGB.

    Turn it as its EXIF says if it shall be ``upright``.
    """
    with open(path, "rb", opener=open_file) as stream:
        return _open(stream, upright)


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
    """Images for the core: JPEG files as they lie in memory, opened by their headers, or pixels.

    Args:
        sources_B: addresses of files.
        sizes_B: their bytes.
        by_pillow: gives the pixels (C, H, W) of image ``b`` where the core does not decode its
            file, and where that turns out to be damaged; what it raises is raised.
        shapes_B3: that files have which the core may decode; None where any will do.
        how: files are opened, as ``jpeg_headers`` has it.
    """

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
        self._alive: list[Array] = []
        self._turns_B = np.zeros(len(sizes_B), np.int32)
        found_B3 = np.zeros((len(sizes_B), 3), np.int32)
        jpeg, _ = open_libjpeg()
        if jpeg is not None:
            found_B3, self._turns_B = jpeg_headers(sources_B, sizes_B, **how)
            self.files = jpeg.address, self._sizes_B.ctypes.data, self._turns_B.ctypes.data
        super().__init__(sources_B.copy(), found_B3)
        is_left_B = self._turns_B == 0
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
        """Files, turned as their EXIF says if ``upright``; with ``channels`` None gray stays so."""
        from PIL import Image

        arrays = [np.frombuffer(data, np.uint8) for data in files]
        sizes_B = np.array([data.size for data in arrays], np.int64)
        most = Image.MAX_IMAGE_PIXELS or math.inf
        how: dict[str, Any] = {"upright": upright, "channels": channels, "most_pixels": most}
        opened = cls(addresses_of(arrays), sizes_B, by_pillow, **how)
        opened._alive += arrays
        return opened

    def leave_to_pillow(self, b: int) -> None:
        """Have image ``b`` decoded by PIL, or raise what is wrong with it."""
        pixels = self._by_pillow(b)
        self._sizes_B[b] = 0  # pixels from here on; what was damaged stays a file
        self._alive.append(pixels)
        self.sources_B[b] = pixels.ctypes.data
        self.shapes_B3[b] = pixels.shape


def encode_image(image_CHW: Array, kind: str, **options: Any) -> bytes:
    """Encode stored planes as an image file of a kind that PIL knows."""
    stream = io.BytesIO()
    to_pil(image_CHW).save(stream, kind, **options)
    return stream.getvalue()


def decode_planes_into(data: memoryview, out_CHW: Array) -> None:
    """Decode a JPEG file, which is not trusted, into planes: uint8, 1 or 3, C-contiguous.

    Raises:
        OSError: the file is damaged.
        ValueError: its header says another size or number of planes than ``out_CHW`` has; nothing
            was decoded.
    """
    channels, height, width = out_CHW.shape
    jpeg, _ = open_libjpeg()
    if jpeg is not None and jpeg.decode(np.frombuffer(data, np.uint8), out_CHW):
        return
    from PIL.JpegImagePlugin import JpegImageFile

    try:
        # Not Image.open: only JPEG is meant, and its size is held against ``out``, not a limit.
        image = JpegImageFile(io.BytesIO(data))
    except SyntaxError as problem:
        raise OSError(f"no JPEG file ({problem})") from problem
    if image.size != (width, height) or image.mode != {1: "L", 3: "RGB"}[channels]:
        raise ValueError(f"it is a JPEG of {image.width} x {image.height} px in mode {image.mode}")
    pack_planes(image, out_CHW)
