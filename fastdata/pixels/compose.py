"""The steps that a transform consists of, nested or not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from fastdata.pixels.callables import seen_through
from fastdata.pixels.known import is_changed, is_v2, known_name
from fastdata.pixels.own_transforms import AlbumentationsStep


def flatten(transform: Any) -> tuple[Any, ...]:
    """The steps of a transform, nested or not, of several in a tuple, a single one, or None.

    Callables of the user's own are seen through where they only call steps. One that returns
    several results, as MoCo's two crops, is read as ``Views``.
    """
    steps: list[Any] = []
    waiting = [transform]
    while waiting:
        step = waiting.pop()
        if step is None:
            continue
        parts = _parts_of(step)
        if parts is None:
            steps.append(step)
        else:
            waiting += reversed(parts)
    return tuple(steps)


def _parts_of(step: Any) -> Sequence[Any] | None:
    """The steps that a step consists of; None where it is a single one."""
    kind = type(step)
    name = known_name(step)
    if kind is tuple or (kind is torch.nn.Sequential and not is_changed(step)):
        return tuple(step)
    if name == "Compose":
        return tuple(step.transforms)
    if name == "ImageClassification":
        return _steps_of_preset(step, str(vars(step)))
    if kind.__module__.startswith("albumentations."):
        return (AlbumentationsStep(step),)
    if name == "Lambda" and getattr(step, "types", (object,)) == (object,):
        return seen_through(step.lambd)
    return None if name or kind is AlbumentationsStep else seen_through(step)


def joint_steps(transforms: Any) -> tuple[Any, ...]:
    """The steps of v2's nested Compose: what else is seen through takes one sample at a time."""
    if known_name(transforms) != "Compose" or not is_v2(transforms):
        return (transforms,)
    return tuple(step for part in transforms.transforms for step in joint_steps(part))


@lru_cache(maxsize=16)  # so that they are the same at each call, until attributes change
def _steps_of_preset(preset: Any, attributes: str) -> tuple[Any, ...]:
    """The steps of what ``weights.transforms()`` gives, torchvision's transforms/_presets.py."""
    theirs = sys.modules["torchvision.transforms"]  # which the preset is a part of
    options = {"interpolation": preset.interpolation, "antialias": preset.antialias}
    return (
        theirs.Resize(preset.resize_size, **options),
        theirs.CenterCrop(preset.crop_size),
        theirs.PILToTensor(),
        theirs.ConvertImageDtype(torch.float),
        theirs.Normalize(preset.mean, preset.std),
    )
