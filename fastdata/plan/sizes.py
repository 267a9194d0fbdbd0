"""Sizes that follow from a user's steps, without running them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fastdata.plan.steps import interpolation_name, pair, torchvision_name

__all__ = ["read_center_crop", "read_resize", "shape_after"]

_SMOOTH: dict[str, Literal["bilinear", "bicubic"]] = {"bilinear": "bilinear", "bicubic": "bicubic"}
"""The filters that ``fastdata.decode`` knows, by torchvision's names."""
_SAME_SHAPE = ("Identity", "PILToTensor", "RGB", "ToImage", "ToPureTensor")


def read_resize(step: Any) -> tuple[int | tuple[int, int], Literal["bilinear", "bicubic"]] | None:
    """Size, as ``fastdata.decode`` takes it, and filter of a torchvision ``Resize``; None for anything else."""
    if torchvision_name(step) != "Resize" or step.max_size is not None:
        return None
    smooth = _SMOOTH.get(interpolation_name(step.interpolation))
    if smooth is None:
        return None
    sides = [step.size] if isinstance(step.size, int) else list(step.size)
    return (sides[0] if len(sides) == 1 else pair(sides)), smooth


def read_center_crop(step: Any) -> tuple[int, int] | None:
    """(height, width) of a torchvision ``CenterCrop``; None for anything else."""
    return pair(step.size) if torchvision_name(step) == "CenterCrop" else None


def shape_after(steps: Iterable[Any]) -> tuple[int, int, int] | None:
    """Shape (C, H, W) that RGB images of any size have after deterministic steps; None where it depends on the image.

    Example:
        >>> shape_after([]) is None
        True
    """
    channels, size = 3, None
    for step in steps:
        name = torchvision_name(step)
        if name == "Resize":
            sides = [step.size] if isinstance(step.size, int) else list(step.size or [])
            if len(sides) == 2:
                size = pair(sides)
            elif size is None or size[0] != size[1] or len(sides) != 1:  # the shorter side: a square stays one
                size = None
            else:
                size = (sides[0], sides[0])
        elif name == "CenterCrop":
            size = pair(step.size)
        elif name == "Grayscale":
            channels = step.num_output_channels
        elif name == "exif_transpose":
            size = size if size and size[0] == size[1] else None
        elif name not in _SAME_SHAPE:
            return None
    return None if size is None else (channels, *size)
