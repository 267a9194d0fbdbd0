"""Files and bytes to images, images to stored arrays, and back: the only door to PIL.

An image is opened by PIL or, an ordinary JPEG, by the compiled core, through the libjpeg-turbo that
PIL is linked to: the same decoder without PIL's copies, so the very pixels of torchvision's default
loader, and of a part of an image without decoding the rest.

Shape letters: C channels, H W size of an image.
"""

from __future__ import annotations

import functools
import io
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeGuard

import numpy as np
import torch

from fastdata.errors import AnyPath, kind_of, open_file
from fastdata.pixels.arrays import Array, Bytes, Int32s, Int64s, Shape
from fastdata.pixels.core.calls import Samples
from fastdata.pixels.core.jpeg import Jpeg, jpeg_headers

if TYPE_CHECKING:
    from PIL import Image  # 10 ms, which only those functions take that make images

Loader = Callable[[Any], Any]
Buffer = bytes | memoryview
IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""File name endings of images, torchvision's ``IMG_EXTENSIONS``."""
# Of a resize, as torchvision takes it: the shorter side, or (height, width).
Size = int | tuple[int, int]
# Or "short:320" or "long:500": no side of that kind is longer, and nothing is enlarged.
Bound = Size | str


# Samples to stored arrays and back

Form = Literal["pil", "tensor", "array", "image", "mask", "video"]
"""What a sample was before it was stored, hence what per-sample code must be given; the last are
torchvision's ``tv_tensors``. Boxes, which have a format and a canvas besides, are never samples,
only beside them."""
_TV_TENSORS: dict[str, Form] = {"Image": "image", "Mask": "mask", "Video": "video"}
_WIDE_MODES = {"I;16": (1, "uint16"), "I": (1, "int32"), "F": (1, "float32")}
_MODES = {"L": (1, "uint8"), "RGB": (3, "uint8"), "RGBA": (4, "uint8"), **_WIDE_MODES}
"""PIL's modes that can be stored -> planes and dtype; those of uint8 are named after their
planes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """Shape, dtype and form of prepared samples."""

    # Of every sample, (C, H, W) for images; None when each has its own (ragged).
    shape: Shape | None
    dtype: str  # as NumPy names it
    form: Form  # PIL images are stored planar (C, H, W), all others as they are

    @property
    def is_dense(self) -> bool:
        return self.shape is not None

    @property
    def sample_bytes(self) -> int:
        """Of dense samples."""
        assert self.shape is not None
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


_NUMERIC_KINDS = "biufc"
"""Of NumPy's dtypes: bool, signed and unsigned integers, floats, complex numbers."""


def to_stored(sample: Any, *, is_mask: bool = False) -> tuple[Array, Form]:
    """Give a sample's values, and what it was.

    Of a PIL image they are new memory (C, H, W), of all others a view. Of a mask with a palette, as
    VOC's, they are the labels, without their colours.
    """
    if is_pil(sample):
        is_palette = sample.mode == "P" and is_mask
        if sample.mode not in _MODES and not is_palette:
            raise TypeError(
                f"a PIL image of mode {sample.mode!r} cannot be stored; modes {', '.join(_MODES)} "
                "can. Convert it before it is stored: prepare=lambda im: im.convert('RGB'), or "
                "np.array(im) for a mask of labels."
            )
        if is_palette or sample.mode in _WIDE_MODES:
            return np.array(sample)[None], "pil"
        array = np.empty((len(sample.mode), sample.height, sample.width), np.uint8)
        pack_planes(sample, array)
        return array, "pil"
    if isinstance(sample, np.ndarray):
        if sample.dtype.kind not in _NUMERIC_KINDS:
            raise TypeError(f"an array of {sample.dtype} cannot be stored; give it a numeric dtype")
        return sample.astype(sample.dtype.newbyteorder("="), copy=False), "array"
    if not isinstance(sample, torch.Tensor):
        raise TypeError(
            f"a sample of type {type(sample).__name__} cannot be stored; PIL images, tensors and "
            "NumPy arrays can. Return one of these from the dataset or from prepare=."
        )
    if sample.device.type != "cpu":
        raise TypeError(f"a tensor on {sample.device} cannot be stored; give .cpu() of it")
    form = form_of(sample)
    if form is None:
        raise TypeError(
            f"{kind_of(sample)} cannot be stored without losing what it is beside its values. "
            "Return it as or within the target, which is kept as it is, or give "
            ".as_subclass(torch.Tensor) of it."
        )
    try:
        return sample.detach().as_subclass(torch.Tensor).numpy(force=True), form
    except (TypeError, RuntimeError) as problem:  # NumPy has no bfloat16, and no sparse arrays
        raise TypeError(
            f"a tensor of {sample.dtype}, {sample.layout}, cannot be stored ({problem}); give "
            ".float() or .to_dense() of it"
        ) from problem


def is_pil(value: Any) -> TypeGuard[Image.Image]:
    # Nobody who has not imported PIL has an image; a module that is being imported may lack it.
    return isinstance(value, getattr(sys.modules.get("PIL.Image"), "Image", ()))


def decoded_shape(sample: Any) -> tuple[int, int, int] | None:
    """Shape (C, H, W) of a PIL image of 1 or 3 channels of uint8; None of anything else."""
    if is_pil(sample) and sample.mode in ("L", "RGB"):
        return _MODES[sample.mode][0], sample.height, sample.width
    return None


def is_image(value: Any) -> bool:
    """Whether a value is a PIL image, or plain numbers in two or more dimensions."""
    if isinstance(value, np.ndarray):
        return value.ndim > 1 and not value.dtype.hasobject
    if isinstance(value, torch.Tensor):
        return value.ndim > 1 and form_of(value) is not None
    return is_pil(value)


def form_of(tensor: torch.Tensor) -> Form | None:
    """What a tensor is; None for classes whose tensors may be more than their values."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return "tensor"
    is_theirs = kind.__module__.startswith("torchvision.tv_tensors")
    return _TV_TENSORS.get(kind.__name__) if is_theirs else None


def pack_planes(image: Image.Image, out_CHW: Array) -> None:
    # A plane at a time: 42 us for 3 x 256 x 256, where a transposed copy takes 93 us.
    for plane, band in zip(out_CHW, image.mode, strict=True):
        plane[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(plane.shape)


def to_pil(array_CHW: Array) -> Image.Image:
    """Make the PIL image that was stored as ``array_CHW``; it owns its pixels."""
    from PIL import Image

    bands, height, width = array_CHW.shape
    mode = {stored: mode for mode, stored in _MODES.items()}.get((bands, array_CHW.dtype.name))
    if mode is None:
        raise TypeError(
            f"an array of {bands} channels of {array_CHW.dtype} is no PIL image; give 1, 3 or 4 "
            "channels of uint8"
        )
    size = width, height
    if bands == 1:
        return Image.frombytes(mode, size, array_CHW.tobytes())
    # Merging views takes 33 us for 3 x 256 x 256, transpose and fromarray 310 us.
    planes = map(np.ascontiguousarray, array_CHW)
    return Image.merge(
        mode, [Image.frombuffer("L", size, plane, "raw", "L", 0, 1) for plane in planes]
    )


class _NoExif:
    """Stands for the EXIF of images that come without it from a store, and of those made of them.

    That there is none would leave lying on its side what the user's own step turns upright.
    """

    def __bool__(self) -> bool:
        raise LookupError(
            "a stored image has no EXIF data, such as its orientation, any more. Give "
            "PIL.ImageOps.exif_transpose itself as the first step of the transform, or as "
            "prepare=, to turn images upright before they are stored; "
            "storage='none' keeps nothing and shows images as their files have them."
        )

    def __eq__(self, other: object) -> bool:
        # PIL's getexif, hence exif_transpose, first asks whether it is what was read before.
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


def present(array: Array, form: Form) -> Any:
    """Give a stored array as what the sample was."""
    if form == "pil":
        return to_pil(array)
    return array if form == "array" else torch.from_numpy(array).as_subclass(tensor_class(form))


def shown_class(form: Form) -> type[torch.Tensor] | type[np.ndarray]:
    """Of an image in a list of samples."""
    return np.ndarray if form == "array" else tensor_class(form)


def tensor_class(form: Form) -> type[torch.Tensor]:
    if form not in _TV_TENSORS.values():
        return torch.Tensor
    name = form.capitalize()
    module = sys.modules.get("torchvision.tv_tensors")
    if module is None:
        raise ImportError(
            f"samples are torchvision's tv_tensors.{name}, which this process has not imported. "
            "Write `import torchvision.tv_tensors` before the first of them is read."
        )
    found: type[torch.Tensor] = getattr(module, name)
    return found


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


@dataclass(frozen=True, slots=True)
class Opening:
    """How a loader that fastdata knows opens image files.

    Args:
        loader: makes a sample of a file's bytes.
        form: of samples: PIL images, or tensors, uint8 (C, H, W).
        is_upright: whether it turns images as their EXIF says.
        channels: that it makes of every JPEG; None where a gray one has one, others three.
    """

    loader: Loader = decode_image
    form: Form = "pil"
    is_upright: bool = False
    channels: int | None = 3

    def decode(self, data: Buffer) -> Any:
        """What the loader makes of a file of these bytes."""
        if self.form == "pil":
            return self.loader(data)
        return self.loader(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))

    def decode_pixels(self, data: Buffer, *, upright: bool) -> Array:
        """The same as pixels (C, H, W), of a PIL image turned as EXIF says if it is ``upright``."""
        sample = self.decode(data)
        if self.form == "pil":
            from PIL import ImageOps

            return to_stored(ImageOps.exif_transpose(sample) if upright else sample)[0]
        if sample.dtype is not torch.uint8 or sample.ndim != 3:
            raise TypeError(
                f"it is decoded to {sample.dtype} {list(sample.shape)}, and of a loader that "
                "fastdata knows it takes uint8 (C, H, W) only. Give a function of your own that "
                "calls it as loader=."
            )
        return np.ascontiguousarray(sample.numpy())


_OF_PIL = Opening()
_TENSOR_LOADERS = {
    ("torchvision", "decode_image"),
    ("torchcodec", "decode_image"),
    ("torchcodec", "decode_jpeg"),
}
"""Package and name of functions that may be loaders that fastdata knows."""


def opening_of(loader: Loader | None) -> Opening | None:
    """How a loader opens files, where fastdata can do the same; None for others' loaders."""
    if loader is load_image:
        return _OF_PIL
    called = loader.func if isinstance(loader, functools.partial) else loader
    package = str(getattr(called, "__module__", "")).partition(".")[0]
    is_known = (package, getattr(called, "__name__", "")) in _TENSOR_LOADERS
    return _probe(loader) if is_known else None


@functools.cache
def _probe(loader: Loader) -> Opening | None:
    """What a loader of tensors does with JPEG files; None if its pixels are not Pillow's."""
    probes = [_make_probe("RGB"), _make_probe("L")]
    opening = Opening(loader, "tensor")
    try:
        with warnings.catch_warnings():
            # torchvision 0.29 warns in torchvision.io, which is an error under ``python -W error``.
            warnings.simplefilter("ignore")
            found = [opening.decode_pixels(data, upright=False) for data in probes]
    except Exception:  # noqa: BLE001  # of a version that takes something else
        return None
    _, height, width = found[0].shape
    is_upright = height > width
    wanted = [_OF_PIL.decode_pixels(data, upright=is_upright) for data in probes]
    channels = len(found[1])
    wanted[1] = wanted[1][:channels]
    if not all(map(np.array_equal, wanted, found)):
        return None
    return replace(opening, is_upright=is_upright, channels=3 if channels == 3 else None)


def _make_probe(mode: str) -> bytes:
    """A JPEG file whose colours lie at half the size, turned on its side by its EXIF."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (21, 35, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(stream, "JPEG", exif=exif)
    return stream.getvalue()


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


def addresses_of(arrays: Sequence[Array]) -> Int64s:
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)


@dataclass(frozen=True, slots=True)
class SourceDecoder:
    """Codec ``"source"``: a sample is kept as its file's bytes, and prepared on each read.

    Exact, and as slow as opening the file. There is nothing to encode.
    """

    open_bytes: Callable[[memoryview], Any]
    # Of what the file was opened as makes a PIL image, an array or a tensor.
    prepare: Callable[[Any], Any]
    makes_jpeg_files: bool = False  # that the core may decode, as nothing is done to images

    name = "source"
    lossless = True

    def settings(self) -> dict[str, Any]:
        return {"name": self.name}

    def sample(self, data: memoryview) -> Array:
        return to_stored(self.prepare(self.open_bytes(data)))[0]

    def decode(self, data: memoryview, out: Array) -> None:
        """Prepare the sample of one file; ``ValueError`` where ``out`` is of another type."""
        sample = self.sample(data)
        if sample.shape != out.shape or sample.dtype != out.dtype:
            raise ValueError(
                f"it comes out as {sample.dtype} {list(sample.shape)}; all samples must be alike"
            )
        out[...] = sample


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
        size: Any = self.size
        sides = size if isinstance(size, (tuple, list)) else (size, size)
        is_pair = len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides)
        if not (is_pair or re.fullmatch(r"(short|long):0*[1-9]\d*", str(size))):
            raise ValueError(
                f"resize={self.size!r} is no size. Give the shorter side in pixels, "
                '(height, width), or a bound such as "short:320" or "long:500".'
            )

    def __call__(self, image: Any) -> Image.Image:
        from PIL import Image

        if not isinstance(image, Image.Image):
            raise TypeError(
                f"resize= works on PIL images, not on {kind_of(image)}; resize it in prepare="
            )
        height, width = _resized_size(image.height, image.width, self.size)
        if (width, height) == image.size:
            return image
        return image.resize((width, height), Image.Resampling.BILINEAR)


@dataclass(frozen=True, slots=True)
class RGB:
    """Converts PIL images to mode RGB, as ``image.convert("RGB")`` within a transform does."""

    __torchvision_equal__ = "RGB"

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB")


TO_RGB = RGB()


def _resized_size(height: int, width: int, size: Bound) -> tuple[int, int]:
    if not isinstance(size, (int, str)):
        return size
    kind, _, number = str(size).rpartition(":")
    side = int(number)
    shorter, longer = sorted((height, width))
    sides = side, int(side * longer / shorter)
    if kind == "long":
        sides = max(1, int(side * shorter / longer)), side
    if kind and sides > (shorter, longer):  # nothing is enlarged
        sides = shorter, longer
    return sides[::-1] if height > width else sides


@functools.cache
def pillow_chooses_order() -> bool:
    """Whether this Pillow resizes columns first where twice as much height as width is lost.

    Older ones, up to 12 at least, always resize rows first. Each pass rounds to uint8, so it shows
    in the last bit. ``horizontal_first`` in Pillow's src/libImaging/Resample.c is the source of the
    rule.
    """
    from PIL import Image

    bilinear = Image.Resampling.BILINEAR
    image = Image.fromarray((np.arange(48) ** 2 * 37 % 256).astype(np.uint8).reshape(12, 4))
    rows_first = image.resize((3, 12), bilinear).resize((3, 3), bilinear)
    return image.resize((3, 3), bilinear).tobytes() != rows_first.tobytes()


# Planes to JPEG files and back


class Scratch(threading.local):
    """Memory that each thread keeps for intermediate images; grows to the largest need.

    Fresh pages cost more than most kernels that fill them.
    """

    def take(self, name: str, shape: Shape) -> Bytes:
        """Give the thread's buffer of that name, with what was left in it, at first zeros."""
        size = math.prod(shape)
        buffer = vars(self).get(name)
        if buffer is None or buffer.size < size:
            buffer = vars(self)[name] = np.zeros(round_up_8(size), np.uint8)
        return buffer[:size].reshape(shape)


def round_up_8(count: int) -> int:
    return -(-count // 8) * 8


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
