"""The single transforms inside a user's transform, which may be nested."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch

from fastdata.pixels.albumentations_objects import PACKAGE
from fastdata.pixels.callables import seen_through, seen_through_pair
from fastdata.pixels.known import is_changed, is_v2, known_name
from fastdata.pixels.own_transforms import (
    LONG_MASK,
    AlbumentationsPair,
    AlbumentationsTransform,
)
from fastdata.pixels.published import converts_to_rgb
from fastdata.pixels.resize import TO_RGB


def flatten_transform(transform: Any) -> tuple[Any, ...]:
    """Return the single transforms inside a transform, a tuple of transforms, or None.

    A callable of the user that only calls other transforms is replaced by these. If it returns
    several results, as MoCo's two crops do, it is replaced by ``Views``.
    """
    singles: list[Any] = []
    waiting = [transform]
    while waiting:
        current = waiting.pop()
        if current is None:
            continue
        parts = _parts_of(current)
        if parts is None:
            singles.append(current)
        else:
            waiting += reversed(parts)
    return tuple(singles)


def _parts_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms that a transform consists of; None if it is a single one."""
    kind = type(transform)
    name = known_name(transform)
    if kind is tuple or (kind is torch.nn.Sequential and not is_changed(transform)):
        return tuple(transform)
    if name == "Compose":
        return tuple(transform.transforms)
    if name == "ImageClassification":
        return _transforms_of_preset(transform, str(vars(transform)))
    if str(kind.__module__).startswith(PACKAGE):
        return wrapped_parts(transform)
    if name == "Lambda" and getattr(transform, "types", (object,)) == (object,):
        return _called_by(transform.lambd)
    return None if name or kind is AlbumentationsTransform else _called_by(transform)


def _called_by(call: Any) -> Sequence[Any] | None:
    """Return the transforms that a callable of the user calls; None if it does anything else."""
    return (TO_RGB,) if converts_to_rgb(call) else seen_through(call)


def wrapped_parts(transform: Any) -> tuple[AlbumentationsTransform, ...]:
    """Return the transforms that an object of albumentations always calls one after the other.

    A Compose with boxes or key points is one transform, because it changes these too.
    """
    if known_name(transform) not in ("A.Compose", "A.Sequential") or transform.p < 1:
        return (AlbumentationsTransform(transform),)
    if transform.processors:
        return (AlbumentationsTransform(transform),)
    return tuple(part for each in transform.transforms for part in wrapped_parts(each))


def joint_transforms(transforms: Any) -> tuple[Any, ...]:
    """Return the single transforms inside a transform that takes an image and its mask.

    These are the transforms of v2's nested Compose, or of albumentations' Compose. The latter may
    be in a callable of the user that calls it with both. Other callables are returned unchanged.
    """
    if type(transforms) is AlbumentationsPair:
        return wrapped_parts(transforms.transform)
    if known_name(transforms) != "Compose" or not is_v2(transforms):
        seen = None if known_name(transforms) else seen_through_pair(transforms)
        if seen is None:
            return (transforms,)
        parts = ((each,) if each is LONG_MASK else wrapped_parts(each) for each in seen)
        return tuple(chain.from_iterable(parts))
    return tuple(each for part in transforms.transforms for each in joint_transforms(part))


# Cached, so that each call returns the same objects until an attribute of the preset changes.
@lru_cache(maxsize=16)
def _transforms_of_preset(preset: Any, attributes: str) -> tuple[Any, ...]:
    """Return the steps of ``weights.transforms()`` (torchvision's transforms/_presets.py)."""
    theirs = sys.modules["torchvision.transforms"]  # already imported: it defines the preset
    options = {"interpolation": preset.interpolation, "antialias": preset.antialias}
    return (
        theirs.Resize(preset.resize_size, **options),
        theirs.CenterCrop(preset.crop_size),
        theirs.PILToTensor(),
        theirs.ConvertImageDtype(torch.float),
        theirs.Normalize(preset.mean, preset.std),
    )
