"""Conversion of samples to stored arrays, and back to the form that the dataset gave.

Shape letters: C channels, H W size of an image.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np
import torch

from fastdata.errors import kind_of
from fastdata.pixels.arrays import Array, Int64s, Shape

if TYPE_CHECKING:
    from PIL import Image  # takes 10 ms, so only functions that make images import it

Form = Literal["pil", "tensor", "array", "hwc", "hw", "plane", "image", "mask", "video"]
"""The type of a sample before it was stored; code that runs per sample gets this type again.

``hwc`` and ``hw`` are NumPy arrays of uint8 pixels, (H, W, C) and (H, W), as OpenCV and
albumentations use them; ``array`` is any other NumPy array. ``plane`` is a tensor (H, W) made from
an array. ``image``, ``mask`` and ``video`` are torchvision's ``tv_tensors``. Its boxes also have a
format and a canvas size, so they can be targets but not samples."""
_MOST_CHANNELS = 4
"""Most channels of an array (H, W, C) that is stored as planes."""
_TV_TENSORS: dict[str, Form] = {"Image": "image", "Mask": "mask", "Video": "video"}
_WIDE_MODES = {"I;16": (1, "uint16"), "I": (1, "int32"), "F": (1, "float32")}
_MODES = {"L": (1, "uint8"), "RGB": (3, "uint8"), "RGBA": (4, "uint8"), **_WIDE_MODES}
"""Pillow's modes that can be stored -> number and dtype of planes. The name of a mode of uint8 has
one letter for each plane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """Shape, dtype and form of prepared samples.

    Attributes:
        shape: shape of every sample, (C, H, W) for images; None if samples differ in shape.
        dtype: name of NumPy's dtype.
        form: type of a sample before it was stored. PIL images and arrays of pixels are stored as
            planes (C, H, W), all others unchanged.
    """

    shape: Shape | None
    dtype: str
    form: Form

    @property
    def is_dense(self) -> bool:
        return self.shape is not None

    @property
    def sample_bytes(self) -> int:
        """Size of each sample in bytes; only if all samples have one shape."""
        assert self.shape is not None
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


_NUMERIC_KINDS = "biufc"
"""NumPy's kinds of dtypes: bool, signed and unsigned integers, floats, complex numbers."""


def to_stored(sample: Any, *, is_mask: bool = False) -> tuple[Array, Form]:
    """Return the values of a sample as an array, and the sample's form.

    The values of a PIL image, or of an array (H, W, C), are copied to planes (C, H, W); the values
    of other samples are a view.

    Args:
        sample: a PIL image, a tensor or a NumPy array.
        is_mask: True to take the numbers of an image with a palette, which are labels in Pascal
            VOC, instead of its colours.

    Raises:
        TypeError: the sample cannot be stored; the text has the way to convert it.
    """
    if is_pil(sample):
        is_palette = sample.mode == "P" and is_mask
        if sample.mode not in _MODES and not is_palette:
            raise TypeError(
                f"a PIL image of mode {sample.mode!r} cannot be stored, only the modes "
                f"{', '.join(_MODES)}. Convert it before it is stored, in the dataset, in your "
                "loader= or in prepare= of CachedDataset: im.convert('RGB'), or np.array(im) for a "
                "mask of labels."
            )
        # One plane of numbers that must not change.
        if is_palette or sample.mode in _WIDE_MODES:
            return np.array(sample)[None], "pil"
        array = np.empty((len(sample.mode), sample.height, sample.width), np.uint8)
        pack_planes(sample, array)
        return array, "pil"
    if isinstance(sample, np.ndarray):
        if sample.dtype.kind not in _NUMERIC_KINDS:
            raise TypeError(
                f"an array of {sample.dtype} cannot be stored. Convert it to a numeric dtype, in "
                "the dataset, in your loader= or in prepare= of CachedDataset."
            )
        if sample.dtype == np.uint8 and sample.ndim == 2:
            return sample[None], "hw"
        if sample.dtype == np.uint8 and sample.ndim == 3 and 1 <= sample.shape[2] <= _MOST_CHANNELS:
            planes = np.empty((sample.shape[2], *sample.shape[:2]), np.uint8)
            # One plane at a time, as in `pack_planes`.
            for channel, plane in enumerate(planes):
                plane[...] = sample[..., channel]
            return planes, "hwc"
        # The core and caches need the byte order of this machine.
        return sample.astype(sample.dtype.newbyteorder("="), copy=False), "array"
    if not isinstance(sample, torch.Tensor):
        raise TypeError(
            f"a sample of type {type(sample).__name__} cannot be stored, only PIL images, tensors "
            "and NumPy arrays. Return one of these from the dataset, from your loader= or from "
            "prepare= of CachedDataset."
        )
    if sample.device.type != "cpu":
        raise TypeError(f"a tensor on {sample.device} cannot be stored. Return its .cpu().")
    form = form_of(sample)
    if form is None:
        raise TypeError(
            f"{kind_of(sample)} cannot be stored as a sample, because it may hold more than "
            "values. Return it as the target, which is stored unchanged, or return its "
            ".as_subclass(torch.Tensor)."
        )
    # `force` also computes lazy conjugate and negative views.
    try:
        return sample.detach().as_subclass(torch.Tensor).numpy(force=True), form
    except (TypeError, RuntimeError) as problem:  # NumPy has neither bfloat16 nor sparse arrays
        raise TypeError(
            f"a tensor of {sample.dtype}, {sample.layout}, cannot be stored ({problem}). Return "
            "its .float() or .to_dense()."
        ) from problem


def is_pil(value: Any) -> TypeGuard[Image.Image]:
    """Return True for a PIL image. PIL is not imported: before that, no value can be one."""
    # Another thread may be importing PIL.Image right now, before its class exists.
    return isinstance(value, getattr(sys.modules.get("PIL.Image"), "Image", ()))


def decoded_shape(sample: Any, *, is_array: bool = False) -> tuple[int, int, int] | None:
    """Return the shape (C, H, W) of a PIL image with 1 or 3 channels of uint8, else None.

    ``is_array=True`` also accepts arrays (H, W, C) and (H, W) of uint8.
    """
    if is_pil(sample) and sample.mode in ("L", "RGB"):
        return _MODES[sample.mode][0], sample.height, sample.width
    if is_array and isinstance(sample, np.ndarray) and sample.dtype == np.uint8:
        height, width, *channels = sample.shape
        return (*(channels or [1]), height, width)
    return None


def is_image(value: Any) -> bool:
    """Return True for a PIL image, and for arrays and tensors of two or more dimensions."""
    if isinstance(value, np.ndarray):
        return value.ndim > 1 and not value.dtype.hasobject
    if isinstance(value, torch.Tensor):
        return value.ndim > 1 and form_of(value) is not None
    return is_pil(value)


def form_of(tensor: torch.Tensor) -> Form | None:
    """Return the form of a tensor; None for subclasses, which may hold more than values."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return "tensor"
    is_theirs = kind.__module__.startswith("torchvision.tv_tensors")
    return _TV_TENSORS.get(kind.__name__) if is_theirs else None


def pack_planes(image: Image.Image, out_CHW: Array) -> None:
    """Copy the pixels of a PIL image of uint8 into planes."""
    # One plane at a time: 42 us for 3 x 256 x 256; a transposed copy takes 93 us.
    for plane, band in zip(out_CHW, image.mode, strict=True):
        plane[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(plane.shape)


def to_pil(array_CHW: Array) -> Image.Image:
    """Return a stored array as a PIL image, with a copy of its pixels."""
    from PIL import Image

    bands, height, width = array_CHW.shape
    mode = {stored: mode for mode, stored in _MODES.items()}.get((bands, array_CHW.dtype.name))
    if mode is None:
        raise TypeError(
            f"an array with {bands} channels of {array_CHW.dtype} cannot be a PIL image. Store 1, "
            "3 or 4 channels of uint8."
        )
    size = width, height
    if bands == 1:
        return Image.frombytes(mode, size, array_CHW.tobytes())
    # Merging views takes 33 us for 3 x 256 x 256; transpose and fromarray take 310 us.
    planes = map(np.ascontiguousarray, array_CHW)
    return Image.merge(
        mode, [Image.frombuffer("L", size, plane, "raw", "L", 0, 1) for plane in planes]
    )


class _NoExif:
    """Stands for the EXIF data of images from a store, which were not stored; any use raises.

    Without it, ``exif_transpose`` in the user's code would silently leave images on their side.
    """

    def __bool__(self) -> bool:
        raise LookupError(
            "this image comes from a store, which does not keep EXIF data such as the orientation. "
            "To turn images upright before they are stored, pass PIL.ImageOps.exif_transpose as "
            "the first step of the transform, or as prepare= of CachedDataset. With storage='none' "
            "images are read from their files, with their EXIF data."
        )

    def __eq__(self, other: object) -> bool:
        # exif_transpose calls getexif, which first compares this with the EXIF data that it read
        # last: None.
        return self is other or (other is None and bool(self))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "<not stored>"

    def __reduce__(self) -> str:
        return "_NO_EXIF"


_NO_EXIF = _NoExif()


def without_exif(sample: Any) -> Any:
    """Return a stored image (or a tuple with some) that raises if its EXIF data are used."""
    # Pillow copies `info` to the images that it makes from this one.
    for part in sample if isinstance(sample, tuple) else (sample,):
        if is_pil(part):
            part.info["exif"] = _NO_EXIF
    return sample


def from_stored(array: Array, form: Form) -> Any:
    """Return a stored array in the form that the sample had before."""
    if form == "pil":
        return to_pil(array)
    if form == "hwc":
        return np.ascontiguousarray(array.transpose(1, 2, 0))
    if form in ("hw", "plane"):
        array = array[0]
    is_array = form in ("array", "hw")
    return array if is_array else as_kind(torch.from_numpy(array), form)


def as_kind(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """Return a tensor of the class that a form names, such as ``tv_tensors.Image``."""
    made = tensor_class(form)
    # torch 2.4 refuses as_subclass where draws are those of the batch (a dispatch mode).
    return tensor if made is torch.Tensor else tensor.as_subclass(made)


def batch_of_form(batch: torch.Tensor, form: Form) -> torch.Tensor:
    """Return a batch (B, C, H, W) in the shape in which ``default_collate`` stacks this form."""
    if form == "hwc":
        return batch.permute(0, 2, 3, 1)
    return batch[:, 0] if form in ("hw", "plane") else batch


def shown_shape(shape: Shape, form: Form) -> Shape:
    """Return the shape that the user sees of a sample of this form, which is stored in planes."""
    if form == "hwc":
        return *shape[1:], shape[0]
    return shape[1:] if form in ("hw", "plane") else shape


def shown_class(form: Form) -> type[torch.Tensor] | type[np.ndarray]:
    """Return the class of an image of this form in a list of samples."""
    return np.ndarray if form in ("array", "hwc", "hw") else tensor_class(form)


def tensor_class(form: Form) -> type[torch.Tensor]:
    """Return the class of the tensors of a form.

    Raises:
        ImportError: it is a class of torchvision, which this process has not imported.
    """
    if form not in _TV_TENSORS.values():
        return torch.Tensor
    # fastdata never imports torchvision: the import takes 1 s, and it may not be installed.
    name = form.capitalize()
    module = sys.modules.get("torchvision.tv_tensors")
    if module is None:
        raise ImportError(
            f"samples are torchvision's tv_tensors.{name}, but this process has not imported them. "
            "Write `import torchvision.tv_tensors` before the first sample is read."
        )
    found: type[torch.Tensor] = getattr(module, name)
    return found


def addresses_of(arrays: Sequence[Array]) -> Int64s:
    """Return the addresses of arrays in memory."""
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
