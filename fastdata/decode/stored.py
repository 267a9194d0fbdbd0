"""Images to stored arrays and back.

Shape letters: C channels, H W size of an image.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fastdata.spec import Form, SampleSpec

__all__ = [
    "Planes",
    "is_image",
    "pack_planes",
    "present",
    "spec_of",
    "tensor_class",
    "to_image",
    "to_pil",
    "to_stored",
    "without_exif",
]

Array = npt.NDArray[Any]
PLANES = {"L": "L", "RGB": "RGB", "RGBA": "RGBA"}
"""PIL modes of uint8 planes, and the raw mode that packs each plane."""
SCALARS = {"I;16": "uint16", "I": "int32", "F": "float32"}
"""PIL modes of one wide channel, and its dtype."""
CLASSES: dict[Form, str] = {"image": "Image", "mask": "Mask", "video": "Video"}
"""Those of ``torchvision.tv_tensors`` that are nothing but their values."""


@dataclass(frozen=True, slots=True)
class Planes:
    """A decoded image that is planar already, uint8 (C, H, W): stored as a PIL image would be, without making one."""

    pixels: Array
    """(C, H, W), C-contiguous."""


def spec_of(sample: Any) -> SampleSpec:
    """Tell how a sample would be stored, without touching its pixels.

    Raises:
        TypeError: samples of this kind cannot be stored; the message says what to do.

    Example:
        >>> spec_of(Image.new("RGB", (6, 5)))
        SampleSpec(shape=(3, 5, 6), dtype='uint8', form='pil')
    """
    if isinstance(sample, Image.Image):
        bands, dtype = _layout(sample.mode)
        return SampleSpec(shape=(bands, sample.height, sample.width), dtype=dtype, form="pil")
    array, form = _view(sample)
    return SampleSpec(shape=array.shape, dtype=array.dtype.name, form=form)


def to_stored(sample: Any) -> tuple[Array, Form]:
    """Give a sample's values as an array, and what the sample was.

    A PIL image gives a new planar (C, H, W) array. A tensor or an array gives a view of its own memory.

    Raises:
        TypeError: samples of this kind cannot be stored; the message says what to do.

    Example:
        >>> array, form = to_stored(Image.new("RGB", (6, 5)))
        >>> array.shape, form
        ((3, 5, 6), 'pil')
    """
    if isinstance(sample, Planes):
        return sample.pixels, "pil"
    if not isinstance(sample, Image.Image):
        return _view(sample)
    spec = spec_of(sample)
    array = np.empty(spec.shape or (), spec.dtype)
    pack_planes(sample, array)
    return array, "pil"


def is_image(value: Any) -> bool:
    """Whether a value is an image of any kind, a mask too: a PIL image, or numbers in two or more dimensions.

    Tensors that are more than their values, such as ``BoundingBoxes``, are none.
    """
    if isinstance(value, np.ndarray):
        return value.ndim > 1 and not value.dtype.hasobject
    if isinstance(value, torch.Tensor):
        return value.ndim > 1 and _form_of(value) is not None
    return isinstance(value, Image.Image)


def to_pil(array_CHW: Array) -> Image.Image:
    """Make the PIL image that was stored as ``array_CHW``; it owns its pixels.

    Example:
        >>> to_pil(np.zeros((3, 5, 6), np.uint8))  # doctest: +ELLIPSIS
        <PIL.Image.Image image mode=RGB size=6x5 at ...>
    """
    bands, height, width = array_CHW.shape
    mode = _mode_of(bands, array_CHW.dtype)
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
    """Make PIL images, the sample or in it, refuse to be asked for EXIF data that was lost."""
    for part in sample if isinstance(sample, tuple) else (sample,):
        if isinstance(part, Image.Image):
            part.info["exif"] = _NO_EXIF
    return sample


def to_image(planes: Planes) -> Image.Image:
    """Make the PIL image of planes."""
    image: Image.Image = without_exif(to_pil(planes.pixels))
    return image


def present(array: Array, form: Form) -> Any:
    """Give stored values the form that the sample had: a PIL image, or a tensor or array over ``array`` itself."""
    if form == "pil":
        return to_pil(array)
    return array if form == "array" else torch.from_numpy(array).as_subclass(tensor_class(form))


def tensor_class(form: Form) -> type[torch.Tensor]:
    """The class of tensors of a form.

    Raises:
        ImportError: it is torchvision's, which this process has not imported.
    """
    if form not in CLASSES:
        return torch.Tensor
    module = sys.modules.get("torchvision.tv_tensors")
    if module is None:
        raise ImportError(
            f"samples are torchvision's tv_tensors.{CLASSES[form]}, which this process has not imported. Write "
            "`import torchvision.tv_tensors` before the first of them is read."
        )
    found: type[torch.Tensor] = getattr(module, CLASSES[form])
    return found


def _layout(mode: str) -> tuple[int, str]:
    """Number of channels and dtype of a PIL mode."""
    if mode in PLANES:
        return len(PLANES[mode]), "uint8"
    if mode in SCALARS:
        return 1, SCALARS[mode]
    stored = ", ".join([*PLANES, *SCALARS])
    raise TypeError(
        f"a PIL image of mode {mode!r} cannot be stored; modes {stored} can. "
        "Convert it before it is stored: prepare=lambda im: im.convert('RGB'), or np.array(im) for a mask of labels."
    )


def _mode_of(bands: int, dtype: np.dtype[Any]) -> str:
    for mode in (*PLANES, *SCALARS):
        if _layout(mode) == (bands, dtype.name):
            return mode
    raise TypeError(f"an array of {bands} channels of {dtype} is no PIL image; give 1, 3 or 4 channels of uint8")


def pack_planes(image: Image.Image, out_CHW: Array) -> None:
    """Copy an image's pixels to planar memory of its size."""
    if image.mode in SCALARS:
        out_CHW[0] = np.asarray(image)
        return
    # PIL packs a plane at a time: 42 us for 3 x 256 x 256; np.asarray(image).transpose(2, 0, 1) takes 93 us.
    for plane, band in zip(out_CHW, PLANES[image.mode], strict=True):
        plane[...] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(plane.shape)


def _view(sample: Any) -> tuple[Array, Form]:
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
            f"a {type(sample).__name__} cannot be stored without losing what it is beside its values. Return it as or "
            "within the target, which is kept as it is, or give .as_subclass(torch.Tensor) of it."
        )
    try:
        return sample.detach().as_subclass(torch.Tensor).numpy(force=True), form
    except TypeError as unsupported:
        raise TypeError(f"a tensor of {sample.dtype} cannot be stored: {unsupported}") from unsupported


def _form_of(tensor: torch.Tensor) -> Form | None:
    """What a tensor is; None for classes whose tensors may be more than their values."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return "tensor"
    is_torchvisions = kind.__module__.startswith("torchvision.tv_tensors")
    return next((form for form, name in CLASSES.items() if is_torchvisions and name == kind.__name__), None)
