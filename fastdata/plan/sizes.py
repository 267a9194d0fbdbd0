"""Sizes in a user's resize and centre crop, for loaders that do both themselves."""

from __future__ import annotations

from typing import Any, Literal

from fastdata.plan.steps import interpolation_name, pair, torchvision_name

__all__ = ["read_center_crop", "read_resize"]


def read_resize(step: Any) -> tuple[int | tuple[int, int], Literal["bilinear", "bicubic"]] | None:
    """Size, as ``fastdata.decode`` takes it, and filter of a torchvision ``Resize``; None for anything else."""
    if torchvision_name(step) != "Resize" or step.max_size is not None:
        return None
    name = interpolation_name(step.interpolation)
    if name not in ("bilinear", "bicubic"):
        return None
    sides = [step.size] if isinstance(step.size, int) else list(step.size)
    return (sides[0] if len(sides) == 1 else pair(sides)), name  # type: ignore[return-value]  # narrowed above


def read_center_crop(step: Any) -> tuple[int, int] | None:
    """(height, width) of a torchvision ``CenterCrop``; None for anything else."""
    return pair(step.size) if torchvision_name(step) == "CenterCrop" else None
