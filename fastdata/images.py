"""Files and bytes to images, images to stored arrays, and back: the only door to PIL and simplejpeg.

An image is opened by PIL or, an ordinary JPEG where it is installed, by simplejpeg: the same libjpeg-turbo with the
same settings, without PIL's copies. Both give the very pixels of torchvision's default loader.

Shape letters: C channels, H W size of an image.
"""

from __future__ import annotations

import functools
import io
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

try:
    import simplejpeg
except ImportError:  # no wheel for this platform
    simplejpeg = None

from fastdata.errors import kind_of

if TYPE_CHECKING:
    from PIL import Image  # 10 ms, which only those functions take that make images

Array = npt.NDArray[Any]
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File name endings of images, torchvision's ``IMG_EXTENSIONS``."""
Interpolation = Literal["bilinear", "bicubic"]
Size = int | tuple[int, int]  # of a resize, as torchvision takes it: the shorter side, or (height, width)
Room = Callable[[tuple[int, ...]], Array | None]  # memory for an array of a shape, where there is any
_MOST_KEPT_BYTES = 1 << 25
Bound = Size | str  # or "short:320" or "long:500": no side of that kind is longer, and nothing is enlarged


# Samples to stored arrays and back

Form = Literal["pil", "tensor", "array", "image", "mask", "video", "boxes"]
"""What a sample was before it was stored, hence what per-sample code must be given; the last are torchvision's
``tv_tensors``. Boxes, which have a format and a canvas besides, are never samples, only beside them."""
_TV_TENSORS: dict[Form, str] = {"image": "Image", "mask": "Mask", "video": "Video", "boxes": "BoundingBoxes"}
_WIDE_MODES = {"I;16": (1, "uint16"), "I": (1, "int32"), "F": (1, "float32")}
_MODES = {"L": (1, "uint8"), "RGB": (3, "uint8"), "RGBA": (4, "uint8"), **_WIDE_MODES}
"""PIL's modes that can be stored -> planes and dtype; those of uint8 are named after their planes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """Shape, dtype and form of prepared samples."""

    shape: tuple[int, ...] | None  # of every sample, (C, H, W) for images; None when each has its own (ragged)
    dtype: str  # as NumPy names it
    form: Form  # PIL images are stored planar (C, H, W), all others as they are

    @property
    def is_dense(self) -> bool:
        return self.shape is not None

    @property
    def sample_bytes(self) -> int:
        if self.shape is None:
            raise ValueError("ragged samples have no common size")
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Planes:
    """A decoded image that is planar already, uint8 (C, H, W): stored as a PIL image would be, without making one."""

    pixels: Array


def to_stored(sample: Any, *, is_mask: bool = False) -> tuple[Array, Form]:
    """Give a sample's values, and what the sample was: of a PIL image new memory (C, H, W), of all others a view.

    Of a mask with a palette, as VOC's, the values are the labels, without their colours.
    """
    if isinstance(sample, Planes):
        return sample.pixels, "pil"
    if is_pil(sample):
        if is_mask and sample.mode == "P":
            return np.array(sample)[None], "pil"
        if sample.mode not in _MODES:
            raise TypeError(
                f"a PIL image of mode {sample.mode!r} cannot be stored; modes {', '.join(_MODES)} can. Convert it "
                "before it is stored: prepare=lambda im: im.convert('RGB'), or np.array(im) for a mask of labels."
            )
        planes, dtype = _MODES[sample.mode]
        array = np.empty((planes, sample.height, sample.width), dtype)
        _pack_planes(sample, array)
        return array, "pil"
    if isinstance(sample, np.ndarray):
        if sample.dtype.hasobject:
            raise TypeError("an array of Python objects cannot be stored; give it a numeric dtype")
        return sample, "array"
    if not isinstance(sample, torch.Tensor):
        raise TypeError(
            f"a sample of type {type(sample).__name__} cannot be stored; PIL images, tensors and NumPy arrays can. "
            "Return one of these from the dataset or from prepare=."
        )
    if sample.device.type != "cpu":
        raise TypeError(f"a tensor on {sample.device} cannot be stored; give .cpu() of it")
    form = _form_of(sample)
    if form is None:
        raise TypeError(
            f"{kind_of(sample)} cannot be stored without losing what it is beside its values. Return it as or "
            "within the target, which is kept as it is, or give .as_subclass(torch.Tensor) of it."
        )
    try:
        return sample.detach().as_subclass(torch.Tensor).numpy(force=True), form
    except TypeError as unsupported:
        raise TypeError(f"a tensor of {sample.dtype} cannot be stored: {unsupported}") from unsupported


def is_pil(value: Any) -> TypeGuard[Image.Image]:
    # As long as nobody has imported PIL there is no image of it; a module that is being imported may lack the class.
    return isinstance(value, getattr(sys.modules.get("PIL.Image"), "Image", ()))


def decoded_shape(sample: Any) -> tuple[int, int, int] | None:
    """Shape (C, H, W) of a PIL image of 1 or 3 channels of uint8; None of anything else."""
    if not is_pil(sample) or sample.mode not in ("L", "RGB"):
        return None
    return _MODES[sample.mode][0], sample.height, sample.width


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image, or numbers in two or more dimensions that are nothing but their values."""
    if isinstance(value, np.ndarray):
        return value.ndim > 1 and not value.dtype.hasobject
    if isinstance(value, torch.Tensor):
        return value.ndim > 1 and _form_of(value) is not None
    return is_pil(value)


def _form_of(tensor: torch.Tensor) -> Form | None:
    """What a tensor is; None for classes whose tensors may be more than their values."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return "tensor"
    names = _TV_TENSORS if kind.__module__.startswith("torchvision.tv_tensors") else {}
    return next((form for form, name in names.items() if name == kind.__name__ and form != "boxes"), None)


def _pack_planes(image: Image.Image, out_CHW: Array) -> None:
    if out_CHW.dtype != np.uint8:
        out_CHW[0] = np.asarray(image)
        return
    # PIL packs a plane at a time: 42 us for 3 x 256 x 256; np.asarray(image).transpose(2, 0, 1) takes 93 us.
    for plane, band in zip(out_CHW, image.mode, strict=True):
        plane[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(plane.shape)


def mode_of(channels: int, dtype: str) -> str | None:
    """PIL's mode of images that are stored so; None where there is none."""
    return next((mode for mode, stored in _MODES.items() if stored == (channels, dtype)), None)


def to_pil(array_CHW: Array) -> Image.Image:
    """Make the PIL image that was stored as ``array_CHW``; it owns its pixels."""
    from PIL import Image

    bands, height, width = array_CHW.shape
    mode = mode_of(bands, array_CHW.dtype.name)
    if mode is None:
        raise TypeError(
            f"an array of {bands} channels of {array_CHW.dtype} is no PIL image; give 1, 3 or 4 channels of uint8"
        )
    # Merging zero-copy views of the planes takes 33 us for 3 x 256 x 256, transpose and fromarray 310 us.
    planes = [np.ascontiguousarray(plane) for plane in array_CHW]
    if bands == 1:
        return Image.frombytes(mode, (width, height), planes[0].tobytes())
    return Image.merge(mode, [Image.frombuffer("L", (width, height), plane, "raw", "L", 0, 1) for plane in planes])


class _NoExif:
    """Stands for the EXIF of images that come without it from a store, and of those made of them.

    To answer that there is none would leave an image lying on its side that the user's own step turns upright.
    """

    def __bool__(self) -> bool:
        raise LookupError(
            "a stored image has no EXIF data, such as its orientation, any more. Give PIL.ImageOps.exif_transpose "
            "itself as the first step of the transform, or as prepare=, to turn images upright before they are stored; "
            "storage='none' keeps nothing and shows images as their files have them."
        )

    def __eq__(self, other: object) -> bool:
        # What PIL's getexif, hence exif_transpose, does first with it is to see whether it is what was read before.
        return self is other or (other is None and bool(self))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "<not stored>"

    def __reduce__(self) -> str:
        return "_NO_EXIF"


_NO_EXIF = _NoExif()


def without_exif(sample: Any) -> Any:
    """Let a stored image, or those in a tuple, say so when it is asked for its EXIF."""
    for part in sample if isinstance(sample, tuple) else (sample,):
        if is_pil(part):
            part.info["exif"] = _NO_EXIF
    return sample


def to_image(planes: Planes) -> Image.Image:
    image: Image.Image = without_exif(to_pil(planes.pixels))
    return image


def present(array: Array, form: Form) -> Any:
    """Give a stored array as what the sample was."""
    if form == "pil":
        return to_pil(array)
    return array if form == "array" else torch.from_numpy(array).as_subclass(tensor_class(form))


def shown_class(form: Form) -> type[torch.Tensor] | type[np.ndarray]:
    """Of an image in a list of samples."""
    return np.ndarray if form == "array" else tensor_class(form)


def tensor_class(form: Form) -> type[torch.Tensor]:
    if form not in _TV_TENSORS:
        return torch.Tensor
    name, module = _TV_TENSORS[form], sys.modules.get("torchvision.tv_tensors")
    if module is None:
        raise ImportError(
            f"samples are torchvision's tv_tensors.{name}, which this process has not imported. Write "
            "`import torchvision.tv_tensors` before the first of them is read."
        )
    found: type[torch.Tensor] = getattr(module, name)
    return found


# Files and bytes to images


def load_image(path: str | os.PathLike[str]) -> Image.Image:
    """Open an image file as torchvision's default loader does: mode RGB, the same pixels, ``info`` and errors."""
    with open(path, "rb") as stream:
        return _open(stream)


def decode_image(data: bytes | memoryview) -> Image.Image:
    return _open(io.BytesIO(data))


def _open(stream: BinaryIO) -> Image.Image:
    from PIL import Image

    pixels = _turbo_pixels(stream)
    if pixels is None:
        return _open_with_pil(stream)
    image = Image.fromarray(pixels)
    stream.seek(0)
    image.info = Image.open(stream).info  # 50 us, 100 us where there is EXIF
    return image


def decode_pixels(stream: BinaryIO, *, into: Room | None = None) -> Array:
    """The pixels of ``load_image`` alone, uint8 (H, W, 3), C-contiguous; ``into`` gives memory for a shape."""
    pixels = _turbo_pixels(stream, into=into)
    return np.ascontiguousarray(_open_with_pil(stream)) if pixels is None else pixels


class _PlanesLoader:
    """Opens image files, or their bytes, as planes."""

    def __call__(self, path: str) -> Planes:
        with open(path, "rb") as stream:
            return Planes(self._open(stream))

    def decode(self, data: bytes | memoryview) -> Planes:
        return Planes(self._open(io.BytesIO(data)))

    _open: Callable[[BinaryIO], Array]


@dataclass(frozen=True)
class PixelLoader(_PlanesLoader):
    """Prepares the pixels of an image file without a PIL image in between."""

    prepare: Callable[[Array], Array]  # of (H, W, 3) makes planes (C, h, w), uint8

    def _open(self, stream: BinaryIO) -> Array:
        return self.prepare(decode_pixels(stream, into=_decoded_room))


@dataclass(frozen=True)
class FastLoader(_PlanesLoader):
    """Opens an image file, resizes it and crops its centre, about twice as fast as PIL does.

    Torch's kernel does what ``Resize(resize, antialias=True)`` and ``CenterCrop(crop)`` do in PIL, with weights of
    fewer bits: on 500 ImageNet photographs (500 x 375) the result is within 2 levels of 255, 0.002 on average, at 600
    images/s on one core where PIL gives 345 (to 256). The kernel and the decoder run without the GIL.

    A large JPEG is decoded at a fraction of its size, k/8 with simplejpeg or 1/2, 1/4, 1/8 with PIL, that is at least
    twice the target. The pixels then differ by 1 to 3 levels of 255 on average, at sharp edges by more than 100; an
    image smaller than about four times the target is decoded exactly.
    """

    resize: Size
    interpolation: Interpolation = "bilinear"
    crop: tuple[int, int] | None = None  # (height, width) at the centre, beyond the image filled with 0

    def _open(self, stream: BinaryIO) -> Array:
        target = self.resize
        if isinstance(target, int):
            from PIL import Image

            header = Image.open(stream)
            stream.seek(0)
            target = _resized_size(header.height, header.width, target)
        least = target[0] * _SCALE_GAP, target[1] * _SCALE_GAP
        pixels = _turbo_pixels(stream, least)
        if pixels is None:
            pixels = np.array(_open_with_pil(stream, least))
        planes = torch.from_numpy(pixels).permute(2, 0, 1)
        if pixels.shape[:2] != target:
            planes = torch.nn.functional.interpolate(planes[None], target, mode=self.interpolation, antialias=True)[0]
        array_CHW: Array = planes.numpy()
        if self.crop is not None:
            sides = list(zip(array_CHW.shape[1:], self.crop, strict=True))
            pads = [max(0, wanted - there) for there, wanted in sides]
            if any(pads):
                array_CHW = np.pad(array_CHW, [(0, 0), *((pad // 2, (pad + 1) // 2) for pad in pads)])
            top, left = (max(0, _cut_start(there, wanted)) for there, wanted in sides)
            array_CHW = array_CHW[:, top : top + self.crop[0], left : left + self.crop[1]]
        return np.ascontiguousarray(array_CHW)


def decoder_of(loader: Callable[[str], Any]) -> Callable[[memoryview], Any] | None:
    """What makes of a file's bytes what ``loader`` makes of the file; None for loaders of others."""
    if loader is load_image:
        return decode_image
    return loader.decode if isinstance(loader, _PlanesLoader) else None


@dataclass(frozen=True, slots=True)
class SourceDecoder:
    """Codec ``"source"``: a sample is kept as the bytes of its own file, and prepared anew on each read.

    Exact, and as slow as opening the file. There is nothing to encode.
    """

    open_bytes: Callable[[memoryview], Any]
    prepare: Callable[[Any], Any]  # of what the file was opened as makes a PIL image, an array or a tensor

    name = "source"
    lossless = True

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}

    def sample(self, data: memoryview) -> Array:
        return to_stored(self.prepare(self.open_bytes(data)))[0]

    def decode(self, data: memoryview, out: Array) -> None:
        """Prepare the sample of one file into ``out``, or raise ``ValueError`` for another shape or dtype."""
        sample = self.sample(data)
        if sample.shape != out.shape or sample.dtype != out.dtype:
            raise ValueError(f"it comes out as {sample.dtype} {list(sample.shape)}; all samples must be alike")
        out[...] = sample


_SCALE_GAP = 2
"""A scaled decode stays at least this much larger than the target, the rule of PIL's ``reducing_gap``."""


def _open_with_pil(stream: BinaryIO, least: tuple[int, int] | None = None) -> Image.Image:
    from PIL import Image

    image: Image.Image = Image.open(stream)
    if least is not None and image.format in ("JPEG", "MPO"):
        image.draft("RGB", least[::-1])
    return image.convert("RGB")


def _turbo_pixels(stream: BinaryIO, least: tuple[int, int] | None = None, *, into: Room | None = None) -> Array | None:
    """Decode with simplejpeg, (H, W, 3), at the smallest scale not below ``least``; None, rewound, where PIL must."""
    from PIL import Image

    start = b"\xff\xd8\xff"
    if simplejpeg is not None and stream.read(len(start)) == start:
        limit = math.inf if Image.MAX_IMAGE_PIXELS is None else Image.MAX_IMAGE_PIXELS
        min_height, min_width = least or (0, 0)
        # Scales above 1/2 have no vectorised inverse DCT and take longer than a full decode, hence min_factor=2.
        # fastdct and fastupsample save 2 % and change every pixel by 1.1 levels on average: not used.
        scale = {"min_height": min_height, "min_width": min_width, "min_factor": 2}
        pixels = _decode_turbo(start + stream.read(), lambda height, width, _: height * width <= limit, into, **scale)
        if pixels is not None:
            return pixels
    stream.seek(0)
    return None


def _decode_turbo(
    data: bytes | memoryview,
    fits: Callable[[int, int, str], bool],
    into: Room | None = None,
    **options: Any,
) -> Array | None:
    """Pixels of a JPEG whose height, width and colours fit, if they are PIL's; None for others, damaged ones too."""
    try:
        *found, subsampling = simplejpeg.decode_jpeg_header(data)
        if found[2] in ("YCbCr", "Gray") and subsampling in agreed_subsamplings() and fits(*found):
            buffer = None if into is None else into((*found[:2], 3))
            pixels: Array = simplejpeg.decode_jpeg(data, buffer=buffer, **options)
            return pixels
    except (ValueError, KeyError, RuntimeError):  # PIL decides whether a damaged file is an error, and words it
        pass
    return None


@functools.cache
def agreed_subsamplings() -> frozenset[str]:
    """The chroma subsamplings that simplejpeg decodes to PIL's pixels here; none if PIL is built with another libjpeg.

    Measured once per process (3 ms) on noise, where any difference in the inverse DCT, upsampling or colour conversion
    shows.
    """
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (35, 53, 3), dtype=np.uint8)
    files = {name: simplejpeg.encode_jpeg(noise, colorsubsampling=name) for name in ("444", "422", "420", "440", "411")}
    files["Gray"] = simplejpeg.encode_jpeg(noise[:, :, :1].copy(), colorspace="GRAY", colorsubsampling="Gray")
    return frozenset(
        name
        for name, data in files.items()
        if np.array_equal(simplejpeg.decode_jpeg(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    )


def jpeg_support() -> tuple[str | None, int]:
    """PIL's libjpeg-turbo, None if it has another libjpeg, and how many subsamplings simplejpeg may decode."""
    from PIL import features

    return features.version_feature("libjpeg_turbo"), len(agreed_subsamplings()) if simplejpeg else 0


# Resizing and cropping


@dataclass(frozen=True, slots=True)
class Resize:
    """Resizes PIL images to the very pixels of torchvision's ``Resize(size)``, bilinear."""

    size: Bound

    __torchvision_equal__ = "Resize"
    interpolation = "bilinear"
    max_size = None
    antialias = True

    def __post_init__(self) -> None:
        sides: tuple[Any, ...] = tuple(self.size) if isinstance(self.size, (tuple, list)) else (self.size, self.size)
        if isinstance(self.size, str):
            kind, _, number = self.size.partition(":")
            sides = (int(number), 1) if kind in ("short", "long") and number.isdecimal() else ()
        if len(sides) != 2 or any(not isinstance(side, int) or side < 1 for side in sides):
            raise ValueError(
                f"resize={self.size!r} is no size. Give the shorter side in pixels, (height, width), or a bound "
                'such as "short:320" or "long:500".'
            )

    def __call__(self, image: Any) -> Image.Image:
        from PIL import Image

        if not isinstance(image, Image.Image):
            raise TypeError(f"resize= works on PIL images, not on {kind_of(image)}; resize it in prepare=")
        height, width = _resized_size(image.height, image.width, self.size)
        return image if (width, height) == image.size else image.resize((width, height), Image.Resampling.BILINEAR)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cuts the centre, (height, width), out of PIL images: the very pixels of torchvision's ``CenterCrop(size)``."""

    size: tuple[int, int]

    __torchvision_equal__ = "CenterCrop"

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.size
        left, top = _cut_start(image.width, width), _cut_start(image.height, height)
        return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True, slots=True)
class RGB:
    """Converts PIL images to mode RGB, as ``image.convert("RGB")`` within a transform does."""

    __torchvision_equal__ = "RGB"

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB")


TO_RGB = RGB()


def _cut_start(there: int, wanted: int) -> int:
    """Where torchvision's CenterCrop begins: it pads first, the odd pixel right and below, and then rounds."""
    return round((there - wanted) / 2) if there >= wanted else -((wanted - there) // 2)


def _resized_size(height: int, width: int, resize: Bound) -> tuple[int, int]:
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


@functools.cache
def pillow_chooses_order() -> bool:
    """Whether this Pillow resizes columns first where more than twice as much height as width is lost.

    Older ones, up to 12 at least, always resize rows first. Each pass rounds to uint8, so it shows in the last bit.
    ``horizontal_first`` in Pillow's src/libImaging/Resample.c is the source of the rule.
    """
    from PIL import Image

    probe = Image.fromarray((np.arange(48) ** 2 * 37 % 256).astype(np.uint8).reshape(12, 4))
    whole, columns_first, rows_first = (
        image.resize((3, 3), Image.Resampling.BILINEAR).tobytes()
        for image in (probe, *(probe.resize(size, Image.Resampling.BILINEAR) for size in ((4, 3), (3, 12))))
    )
    return whole == columns_first != rows_first


# Planes to JPEG files and back
#
# A photograph of 3 x 256 x 256 (quality 92; 4:4:4 and 4:2:0) to planar memory, on one core: 428 and 316 us by
# simplejpeg into interleaved memory that is reused and one strided copy, 430 and 431 us by PIL packing a plane at a
# time, 501 and 499 us by np.asarray(image).transpose(2, 0, 1). The first two give the same pixels.


class Scratch(threading.local):
    """Memory that each thread keeps for its own intermediate images; grows to the largest need, then is reused.

    Fresh pages cost more than most kernels that fill them.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Give the thread's buffer of that name; its contents are what was left in it, at first zeros."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.zeros(round_up_8(size), np.uint8)
        return buffer[:size].reshape(shape)


def _decoded_room(shape: tuple[int, ...]) -> Array | None:
    """Memory that the thread keeps, unless an image is unusually large."""
    return _scratch.take("decoded", shape) if math.prod(shape) <= _MOST_KEPT_BYTES else None


def round_up_8(count: int) -> int:
    return -(-count // 8) * 8


_scratch = Scratch()


def from_raw(mode: str, size: tuple[int, int], data: bytes) -> Image.Image:
    """The PIL image of a mode and of (width, height) whose ``tobytes()`` are these; ValueError where they cannot be."""
    from PIL import Image

    planes, dtype = _MODES.get(mode, (0, "uint8"))
    if not planes or math.prod(size) * planes * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"{len(data):,} bytes are no image of mode {mode!r} and {size[0]} x {size[1]} px")
    return Image.frombytes(mode, size, data)


def encode_image(image_CHW: Array, kind: str, **options: Any) -> bytes:
    """Encode stored planes as an image file of a kind that PIL knows."""
    stream = io.BytesIO()
    to_pil(image_CHW).save(stream, kind, **options)
    return stream.getvalue()


def encode_planes(image_CHW: Array, *, quality: int, subsampling: str) -> bytes:
    """Encode an image of uint8, 1 or 3 planes, as a baseline JPEG; the planes are read where they lie."""
    return encode_image(image_CHW, "JPEG", quality=quality, subsampling=subsampling)


def decode_planes_into(data: memoryview, out_CHW: Array) -> None:
    """Decode a JPEG file, which is not trusted, into planar memory: uint8, 1 or 3 planes, C-contiguous.

    Raises:
        OSError: the file is damaged.
        ValueError: its header says another size or number of planes than ``out_CHW`` has; nothing was decoded.
    """
    channels, height, width = out_CHW.shape
    mode, colours, target = {1: ("L", "Gray", "GRAY"), 3: ("RGB", "YCbCr", "RGB")}[channels]
    if simplejpeg is not None:
        pixels_HWC = _scratch.take("pixels", (height, width, 3)) if channels == 3 else out_CHW
        decoded = _decode_turbo(
            data, lambda *found: found == (height, width, colours), lambda _: pixels_HWC, colorspace=target
        )
        if decoded is not None:
            if channels == 3:
                out_CHW[...] = pixels_HWC.transpose(2, 0, 1)
            return
    from PIL.JpegImagePlugin import JpegImageFile

    try:
        # Not Image.open: only JPEG is meant, and its size is held against ``out`` rather than a limit of pixels.
        image = JpegImageFile(io.BytesIO(data))
    except SyntaxError as problem:
        raise OSError(f"no JPEG file ({problem})") from problem
    if image.size != (width, height) or image.mode != mode:
        raise ValueError(f"it is a JPEG of {image.width} x {image.height} px in mode {image.mode}")
    _pack_planes(image, out_CHW)
