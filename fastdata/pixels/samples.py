"""Samples as they are stored, and back as the dataset gave them.

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
    from PIL import Image


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


def addresses_of(arrays: Sequence[Array]) -> Int64s:
    return np.array([array.__array_interface__["data"][0] for array in arrays], np.int64)
