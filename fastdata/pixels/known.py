"""Names of the transforms that fastdata knows, of torchvision, timm, albumentations and Pillow.

None of these libraries is imported. A transform is recognised by the module and name of its class,
which must be exactly the library's class, not a subclass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from fastdata.pixels.albumentations_objects import (
    PACKAGE,
    name_in_albumentations,
    names_in,
    varies,
)
from fastdata.pixels.own_transforms import AlbumentationsTransform

LIBRARIES = ("torchvision.transforms", "timm.data", PACKAGE)


PREPARABLE = names_in(
    "CenterCrop CoverBucket CropToBucket Grayscale Identity Pad RGB Resize ToPILImage "
    "exif_transpose"
)
REFORMING = names_in("ToImage PILToTensor ToPureTensor timm.MaybePILToTensor")
_PREPARABLE_ARRAYS = names_in(
    "A.CenterCrop A.Crop A.LongestMaxSize A.NoOp A.Pad A.PadIfNeeded A.Resize A.SmallestMaxSize"
)
"""Transforms of albumentations that may run once per sample, if they draw nothing at random."""


def known_name(transform: Any) -> str:
    """Return the name of a transform that fastdata knows; an empty text for all others.

    The name is that of a class of torchvision, or of timm with the prefix ``"timm."``, or of
    albumentations with the prefix ``"A."``, or of a function of ``PIL.ImageOps``. An object whose
    methods were replaced is not known. A class with ``__torchvision_equal__ = "RandomCrop"``
    declares that it has the attributes and the pixels of torchvision's class of that name.
    """
    kind = type(transform)
    if kind is AlbumentationsTransform:
        return known_name(transform.transform)
    module = str(kind.__module__)  # Cython's functions have a descriptor there
    if module.startswith(PACKAGE):
        name = name_in_albumentations(transform)
        return name and f"A.{name}"
    if kind is torch.nn.Identity:
        return "" if is_changed(transform) else "Identity"
    if not module.startswith(LIBRARIES):
        if getattr(transform, "__module__", None) == "PIL.ImageOps":
            return str(transform.__name__)
        # A subclass may differ, so the attribute is not inherited.
        return str(vars(kind).get("__torchvision_equal__", ""))
    if is_changed(transform):
        return ""
    return f"timm.{kind.__name__}" if module.startswith("timm.") else str(kind.__name__)


def is_v2(transform: Any) -> bool:
    """Return True for a transform of ``torchvision.transforms.v2``."""
    return str(type(transform).__module__).startswith("torchvision.transforms.v2")


def is_changed(transform: Any) -> bool:
    """Return True if an object has hooks of torch, or has replaced a method of its class."""
    # An attribute of the object, such as a patched `forward`, overrides the method of its class.
    kind: Any = type(transform)
    held: dict[str, Any] = getattr(transform, "__dict__", {})
    is_hooked = held.get("_forward_pre_hooks") or held.get("_forward_hooks")
    return bool(is_hooked) or not _members(kind).isdisjoint(held)


@cache
def _members(kind: Any) -> frozenset[str]:
    return frozenset(dir(kind))


def is_preparable(transform: Any) -> bool:
    """Return True if a transform may run once per sample, before the sample is stored.

    Such a transform draws nothing at random, and keeps uint8.
    """
    name = known_name(transform)
    if name in _PREPARABLE_ARRAYS:
        return not varies(getattr(transform, "transform", transform))
    return name in PREPARABLE or is_reforming(transform)


def is_reforming(transform: Any) -> bool:
    """Return True if a transform changes the type of a uint8 sample, but not its values."""
    name = known_name(transform)
    is_cast = name in ("ToDtype", "ConvertImageDtype")
    return name in REFORMING or (is_cast and transform.dtype == torch.uint8)
