"""The batch ops as values: what a plan holds and a program executes, free of torchvision and of arrays.

``position`` is the op's place in the user's flattened transform; it numbers the op's random draws. ``domain`` tells
which of torchvision's functions the user would have run: ``"pil"`` on PIL images, ``"v1"`` or ``"v2"`` on tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Borders",
    "Cast",
    "CenterCrop",
    "Domain",
    "Flip",
    "Grayscale",
    "Normalize",
    "Op",
    "Pad",
    "PadMode",
    "RandomCrop",
    "RandomResizedCrop",
    "Reform",
]

Domain = Literal["pil", "v1", "v2"]
PadMode = Literal["constant", "edge", "reflect", "symmetric"]
Borders = tuple[int, int, int, int]
"""Pixels at the left, top, right and bottom, in torchvision's order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pad:
    """Add borders; ``fill`` has one value or one for each channel."""

    borders: Borders
    mode: PadMode
    fill: tuple[int, ...]
    domain: Domain


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomCrop:
    """A window at a random place of the (padded) image."""

    position: int
    height: int
    width: int
    borders: Borders
    pad_if_needed: bool
    mode: PadMode
    fill: tuple[int, ...]
    domain: Domain


@dataclass(frozen=True, kw_only=True, slots=True)
class CenterCrop:
    """The window in the middle; an image that is too small is padded with 0 first."""

    height: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """Mirror left and right, or top and bottom, with probability ``p``."""

    position: int
    vertical: bool
    p: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomResizedCrop:
    """A random box, resized."""

    position: int
    height: int
    width: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    interpolation: str
    antialias: bool
    domain: Domain


@dataclass(frozen=True, kw_only=True, slots=True)
class Grayscale:
    """Luma in one or three equal channels."""

    channels: int
    domain: Domain


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """uint8 to floating point; ``scaling`` is how torchvision maps 255 to 1, if it does."""

    dtype: Literal["float32", "float64"]
    scaling: Literal["divide", "multiply", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalize:
    """(x - mean) / std per channel; ``widens`` says that one channel becomes as many as there are means."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    widens: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Reform:
    """Changes what a sample is (an image, a tensor) and none of its values."""


Op = Pad | RandomCrop | CenterCrop | Flip | RandomResizedCrop | Grayscale | Cast | Normalize | Reform
