"""Files and bytes to images.

Shape letters: C channels, H W size of an image.

An image is opened by one of three roads. The first two give the very pixels of torchvision's default loader:

* PIL, for every format it knows;
* simplejpeg, for ordinary JPEG files where it is installed: the same libjpeg-turbo with the same settings, without
  PIL's copies;
* ``load_resized``, only where a difference of at most 2 levels of 255 is acceptable: it resizes in torch's vectorised
  kernel.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fastdata.decode.stored import Planes

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

__all__ = [
    "IMAGE_EXTENSIONS",
    "JPEG_START",
    "Bound",
    "CenterCrop",
    "FastLoader",
    "Interpolation",
    "PixelLoader",
    "Resize",
    "Size",
    "agreed_subsamplings",
    "decode_image",
    "decode_pixels",
    "decoder_of",
    "load_image",
    "load_resized",
    "pillow_chooses_order",
]

Array = npt.NDArray[Any]
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File name endings of images, torchvision's ``IMG_EXTENSIONS``."""
Interpolation = Literal["bilinear", "bicubic"]
Size = int | tuple[int, int]
"""Of a resize, as torchvision takes it: (height, width), or the length of the shorter side."""
Bound = Size | str
"""The same, or ``"short:320"`` or ``"long:500"``: no side of that kind is longer, and nothing is enlarged."""
JPEG_START = b"\xff\xd8\xff"
DRAFT_FORMATS = ("JPEG", "MPO")
SCALE_GAP = 2.0
"""A scaled decode stays at least this much larger than the target, the rule of PIL's ``reducing_gap``."""


def load_image(path: str | os.PathLike[str], *, fast_target: tuple[int, int] | None = None) -> Image.Image:
    """Open an image file as torchvision's default loader does: mode RGB, the same pixels and ``info``.

    Args:
        path: the file.
        fast_target: (height, width) to which the image is going to be resized. A large JPEG is then decoded at a
            fraction of its size, k/8 with simplejpeg or 1/2, 1/4, 1/8 with PIL, that is at least twice the target. Its
            pixels differ from those of a full decode by 1 to 3 levels of 255 on average after the resize, at sharp
            edges by more than 100; an image smaller than about four times the target is decoded exactly.

    Raises:
        OSError: whatever PIL raises for this file; simplejpeg's complaints are never seen.
    """
    with open(path, "rb") as stream:
        return _open(stream, fast_target)


def decode_image(data: bytes | memoryview, *, fast_target: tuple[int, int] | None = None) -> Image.Image:
    """Decode an encoded image like ``load_image`` does from a file."""
    return _open(io.BytesIO(data), fast_target)


def decode_pixels(stream: BinaryIO) -> Array:
    """The pixels of ``load_image`` alone, uint8 (H, W, 3), C-contiguous.

    Raises:
        OSError: whatever PIL raises for this file.
    """
    pixels = _turbo_pixels(stream, None)
    return np.ascontiguousarray(_open_with_pil(stream, None)) if pixels is None else pixels


def decoder_of(loader: Callable[[str], Any]) -> Callable[[memoryview], Any] | None:
    """What makes of a file's bytes what ``loader`` makes of the file; None for loaders of others."""
    if loader is load_image:
        return decode_image
    decode: Callable[[memoryview], Any] | None = getattr(loader, "decode", None)
    return decode if isinstance(loader, (FastLoader, PixelLoader)) else None


def load_resized(
    path: str | os.PathLike[str],
    resize: Size,
    *,
    crop: tuple[int, int] | None = None,
    interpolation: Interpolation = "bilinear",
    scaled: bool = False,
) -> Array:
    """Open an image file, resize it and crop its centre, about twice as fast as PIL does.

    Torch's kernel does what ``Resize(resize, antialias=True)`` and ``CenterCrop(crop)`` do in PIL, with weights of
    fewer bits: on 500 ImageNet photographs (500 x 375) the result is within 2 levels of 255, 0.002 on average, at 600
    images/s on one core where PIL gives 345 (to 256). The kernel and the decoder run without the GIL.

    Args:
        path: the file.
        resize: (height, width), or the length of the shorter side.
        crop: (height, width) at the centre, beyond the image filled with 0.
        interpolation: filter, widened by the factor of the reduction.
        scaled: decode large JPEGs at a fraction of their size first; the difference is that of
            ``load_image(fast_target=)``.

    Returns:
        uint8 (3, H, W), contiguous, the caller's own.
    """
    with open(path, "rb") as stream:
        return _open_resized(stream, resize, crop, interpolation, scaled)


@dataclass(frozen=True, slots=True)
class FastLoader:
    """Opens an image file at its prepared size: ``load_resized`` with ``scaled=True``.

    Args:
        resize: see ``load_resized``, like the other two.
        interpolation: see there.
        crop: see there.
    """

    resize: Size
    interpolation: Interpolation
    crop: tuple[int, int] | None

    def __call__(self, path: str) -> Planes:
        """Open one file."""
        return Planes(load_resized(path, self.resize, crop=self.crop, interpolation=self.interpolation, scaled=True))

    def decode(self, data: bytes | memoryview) -> Planes:
        """Open the bytes of one file."""
        return Planes(_open_resized(io.BytesIO(data), self.resize, self.crop, self.interpolation, scaled=True))


@dataclass(frozen=True, slots=True)
class PixelLoader:
    """Opens an image file and prepares its pixels, without a PIL image in between.

    Args:
        prepare: makes uint8 planes (C, h, w) of pixels (H, W, 3).
    """

    prepare: Callable[[Array], Array]

    def __call__(self, path: str) -> Planes:
        """Open one file."""
        with open(path, "rb") as stream:
            return Planes(self.prepare(decode_pixels(stream)))

    def decode(self, data: bytes | memoryview) -> Planes:
        """Open the bytes of one file."""
        return Planes(self.prepare(decode_pixels(io.BytesIO(data))))


@dataclass(frozen=True, slots=True)
class Resize:
    """Resizes PIL images to the very pixels of torchvision's ``Resize(size)``, bilinear.

    Args:
        size: the length of the shorter side, or (height, width), or ``"short:320"``: at most that, never enlarged.

    Example:
        >>> Resize(25)(Image.new("RGB", (60, 50))).size
        (30, 25)
        >>> Resize("short:320")(Image.new("RGB", (60, 50))).size
        (60, 50)
    """

    size: Bound

    __torchvision_equal__ = "Resize"
    interpolation = "bilinear"
    max_size = None
    antialias = True

    def __post_init__(self) -> None:
        sides: tuple[Any, ...] = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        if isinstance(self.size, str):
            kind, _, number = self.size.partition(":")
            sides = (int(number), 1) if kind in ("short", "long") and number.isdecimal() else ()
        if len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in sides):
            raise ValueError(
                f"resize={self.size!r} is no size. Give the shorter side in pixels, (height, width), or a bound "
                'such as "short:320" or "long:500".'
            )

    def __call__(self, image: Any) -> Image.Image:
        """Resize one image; one that has the size already is returned as it is."""
        if not isinstance(image, Image.Image):
            raise TypeError(f"resize= works on PIL images, not on a {type(image).__name__}; resize it in prepare=")
        height, width = _resized_size(image.height, image.width, self.size)
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling.BILINEAR)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cuts the centre out of PIL images: the very pixels of torchvision's ``CenterCrop(size)``.

    Args:
        size: (height, width).

    Example:
        >>> CenterCrop((4, 6))(Image.new("RGB", (9, 5))).size
        (6, 4)
    """

    size: tuple[int, int]

    __torchvision_equal__ = "CenterCrop"

    def __call__(self, image: Image.Image) -> Image.Image:
        """Cut one image; a smaller one is padded with black."""
        height, width = self.size
        left = (image.width - width) / 2
        top = (image.height - height) / 2
        # torchvision pads first, the odd pixel right and below, and then rounds where the cut begins.
        x = -((width - image.width) // 2) if image.width < width else round(left)
        y = -((height - image.height) // 2) if image.height < height else round(top)
        return image.crop((x, y, x + width, y + height))


def _open(stream: BinaryIO, fast_target: tuple[int, int] | None) -> Image.Image:
    pixels = _turbo_pixels(stream, fast_target)
    if pixels is None:
        return _open_with_pil(stream, fast_target)
    image = Image.fromarray(pixels)
    stream.seek(0)
    image.info = Image.open(stream).info  # 50 us, 100 us where there is EXIF
    return image


def _open_with_pil(stream: BinaryIO, fast_target: tuple[int, int] | None) -> Image.Image:
    image: Image.Image = Image.open(stream)
    if fast_target is not None and image.format in DRAFT_FORMATS:
        height, width = _with_gap(fast_target)
        image.draft("RGB", (width, height))
    return image.convert("RGB")


def _turbo_pixels(stream: BinaryIO, fast_target: tuple[int, int] | None) -> Array | None:
    """Decode with simplejpeg, (H, W, 3); None, with the stream rewound, for what PIL must decode."""
    start = stream.read(len(JPEG_START)) if simplejpeg is not None else b""
    if start == JPEG_START:
        data = start + stream.read()
        pixels = _decode_turbo(data, fast_target)
        if pixels is not None:
            return pixels
    stream.seek(0)
    return None


def _decode_turbo(data: bytes, fast_target: tuple[int, int] | None) -> Array | None:
    min_height, min_width = (0, 0) if fast_target is None else _with_gap(fast_target)
    try:
        height, width, colours, subsampling = simplejpeg.decode_jpeg_header(data)
        if colours not in ("YCbCr", "Gray") or subsampling not in agreed_subsamplings() or _is_huge(height * width):
            return None
        # Scales above 1/2 have no vectorised inverse DCT and take longer than a full decode, hence min_factor=2.
        # fastdct and fastupsample save 2 % and change every pixel by 1.1 levels on average: not used.
        pixels: Array = simplejpeg.decode_jpeg(data, min_height=min_height, min_width=min_width, min_factor=2)
    except (ValueError, KeyError, RuntimeError):  # PIL decides whether a damaged file is an error, and words it
        return None
    return pixels


@functools.cache
def agreed_subsamplings() -> frozenset[str]:
    """The chroma subsamplings that simplejpeg decodes to PIL's pixels here; none if PIL is built with another libjpeg.

    Measured once per process (3 ms) on noise, where any difference in the inverse DCT, upsampling or colour conversion
    shows.
    """
    noise = np.random.default_rng(0).integers(0, 256, (35, 53, 3), dtype=np.uint8)
    files = {name: simplejpeg.encode_jpeg(noise, colorsubsampling=name) for name in ("444", "422", "420", "440", "411")}
    files["Gray"] = simplejpeg.encode_jpeg(
        np.ascontiguousarray(noise[:, :, :1]), colorspace="GRAY", colorsubsampling="Gray"
    )
    return frozenset(
        name
        for name, data in files.items()
        if np.array_equal(simplejpeg.decode_jpeg(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    )


@functools.cache
def pillow_chooses_order() -> bool:
    """Whether this Pillow resizes columns first where more than twice as much height as width is lost.

    Older ones, up to 12 at least, always resize rows first. Each pass rounds to uint8, so it shows in the last bit.
    ``horizontal_first`` in Pillow's src/libImaging/Resample.c is the source of the rule.
    """
    probe = Image.fromarray((np.arange(48) ** 2 * 37 % 256).astype(np.uint8).reshape(12, 4))
    whole, columns_first, rows_first = (
        image.resize((3, 3), Image.Resampling.BILINEAR).tobytes()
        for image in (probe, *(probe.resize(size, Image.Resampling.BILINEAR) for size in ((4, 3), (3, 12))))
    )
    return whole == columns_first != rows_first


def _is_huge(pixels: int) -> bool:
    """Whether PIL would warn of a decompression bomb or refuse it."""
    return Image.MAX_IMAGE_PIXELS is not None and pixels > Image.MAX_IMAGE_PIXELS


def _with_gap(target: tuple[int, int]) -> tuple[int, int]:
    return int(target[0] * SCALE_GAP), int(target[1] * SCALE_GAP)


def _open_resized(
    stream: BinaryIO,
    resize: Size,
    crop: tuple[int, int] | None,
    interpolation: Interpolation,
    scaled: bool,
) -> Array:
    target = (resize, resize) if isinstance(resize, int) else resize
    size: tuple[int, int] | None = None
    if scaled and isinstance(resize, int):
        size = _image_size(stream)
        target = _resized_size(*size, resize)
    pixels = _turbo_pixels(stream, target if scaled else None)
    if pixels is None:
        pixels = np.array(_open_with_pil(stream, target if scaled else None))
    height, width = size if size is not None else (pixels.shape[0], pixels.shape[1])
    planes = _resize(pixels, _resized_size(height, width, resize), interpolation)
    return np.ascontiguousarray(planes if crop is None else _centre(planes, crop))


def _image_size(stream: BinaryIO) -> tuple[int, int]:
    """Height and width from the file's header, the stream rewound."""
    image = Image.open(stream)
    stream.seek(0)
    return image.height, image.width


def _resized_size(height: int, width: int, resize: Bound) -> tuple[int, int]:
    """Output size of torchvision's Resize: the longer side is cut, not rounded."""
    if isinstance(resize, str):
        kind, _, number = resize.partition(":")
        bound, shorter, longer = int(number), min(height, width), max(height, width)
        if (shorter if kind == "short" else longer) <= bound:
            return height, width
        if kind == "short":
            return _resized_size(height, width, bound)
        other = max(1, int(bound * shorter / longer))
        return (bound, other) if height > width else (other, bound)
    if not isinstance(resize, int):
        return resize
    if width <= height:
        return int(resize * height / width), resize
    return resize, int(resize * width / height)


def _resize(pixels_HWC: Array, size: tuple[int, int], interpolation: Interpolation) -> Array:
    planes = torch.from_numpy(pixels_HWC).permute(2, 0, 1)
    if pixels_HWC.shape[:2] != size:
        planes = torch.nn.functional.interpolate(planes[None], size, mode=interpolation, antialias=True)[0]
    array: Array = planes.numpy()
    return array


def _centre(planes_CHW: Array, crop: tuple[int, int]) -> Array:
    """What torchvision's CenterCrop cuts: a smaller image is padded with 0 first, the odd pixel right and below."""
    pads = [max(0, wanted - there) for wanted, there in zip(crop, planes_CHW.shape[1:], strict=True)]
    if any(pads):
        planes_CHW = np.pad(planes_CHW, [(0, 0), *((pad // 2, (pad + 1) // 2) for pad in pads)])
    top, left = (round((there - wanted) / 2) for wanted, there in zip(crop, planes_CHW.shape[1:], strict=True))
    return planes_CHW[:, top : top + crop[0], left : left + crop[1]]
