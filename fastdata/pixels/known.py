"""Which steps are known by name: torchvision's, timm's and Pillow's, by their exact class.

Neither torchvision nor timm is imported here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PREPARABLE = names_in("Resize CenterCrop Grayscale Pad RGB Identity exif_transpose")

_REFORMING = names_in("ToImage PILToTensor ToPureTensor timm.MaybePILToTensor")


# Names

LIBRARIES = ("torchvision.transforms", "timm.data")


def known_name(step: Any) -> str:
    """Name of torchvision's or timm's transforms' class, or of ImageOps' functions; else empty.

    Timm's stand behind ``"timm."``.
    A step that was changed on the object itself is nobody's but the user's. A class that says
    ``__torchvision_equal__ = "RandomCrop"`` is taken at its word: same attributes, same pixels.
    """
    kind = type(step)
    if not kind.__module__.startswith(LIBRARIES):
        of_pillow = getattr(step, "__module__", None) == "PIL.ImageOps"
        # Vars: a subclass is not equal any more.
        return str(step.__name__ if of_pillow else vars(kind).get("__torchvision_equal__", ""))
    if is_changed(step):
        return ""
    return f"timm.{kind.__name__}" if kind.__module__.startswith("timm.") else str(kind.__name__)


def is_v2(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms.v2")


def is_changed(step: Any) -> bool:
    """Whether an object has hooks, or something in the place of its class's."""
    kind: Any = type(step)
    held: dict[str, Any] = getattr(step, "__dict__", {})
    is_hooked = held.get("_forward_pre_hooks") or held.get("_forward_hooks")
    return bool(is_hooked) or not _members(kind).isdisjoint(held)


@cache
def _members(kind: Any) -> frozenset[str]:
    return frozenset(dir(kind))


def is_preparable(step: Any) -> bool:
    """Whether a step may run once per sample, before it is stored: deterministic, keeps uint8."""
    return known_name(step) in _PREPARABLE or is_reforming(step)


def is_reforming(step: Any) -> bool:
    """Whether a step changes what a uint8 sample is, and none of its values."""
    name = known_name(step)
    is_cast = name in ("ToDtype", "ConvertImageDtype")
    return name in _REFORMING or (is_cast and step.dtype == torch.uint8)
