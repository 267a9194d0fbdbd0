"""Errors for samples that the core refused, with the reason in words for the user."""

from __future__ import annotations

from collections.abc import Sequence

from fastdata.errors import ChannelsError, counted
from fastdata.pixels.core.calls import CoreError
from fastdata.pixels.steps import Step

_NOT_SERVED = (
    "sample {{index}}, of shape {{shape}}, cannot be transformed in a batch: {}. Use "
    "batch_ops=False, or leave the sample out."
)
# The text for crops begins as torchvision's error does.
_TEXTS = {
    "crop": (
        "Required crop size ({crop_height}, {crop_width}) is larger than input image size "
        "({height}, {width}) of sample {index}. Use pad_if_needed=True, a smaller crop, or a "
        "Resize before it."
    ),
    "border": (
        "padding (left {left}, top {top}, right {right}, bottom {bottom}) in mode {mode!r} is too "
        "large for the image size ({height}, {width}) of sample {index}. Use padding_mode='edge' "
        "or a smaller padding."
    ),
    "blur": (
        "GaussianBlur with kernel_size={kernel} needs larger images than sample {index}, which has "
        "{height} x {width} px. Use a smaller kernel or a larger resize."
    ),
    "cells": (
        "GridDistortion with num_steps={cells} needs larger images than sample {index}, which has "
        "{height} x {width} px. Use fewer steps or a larger resize."
    ),
    "hole": (
        "the holes of a dropout are larger than sample {index}, which has {height} x {width} px. "
        "Use smaller holes or a larger resize."
    ),
    "shape": (
        "sample {index} has the shape ({channels}, {height}, {width}) after the transform, but the "
        "samples of this batch must have ({room_channels}, {room_height}, {room_width}). Crop or "
        "resize to one size, and convert all images to one number of channels: by Grayscale(3), or "
        "by prepare=lambda image: image.convert('RGB') of a CachedDataset."
    ),
    "outside": _NOT_SERVED.format("a step would leave no pixel of it, or it has none"),
    "op": _NOT_SERVED.format("a step does not support its number of channels"),
    "table": _NOT_SERVED.format("a step needs more memory than the core has for it"),
}


def error_of(step: Step, refused: CoreError, index: int, shape: Sequence[int]) -> ValueError:
    """Return the error for a sample that the core refused at a step.

    Args:
        step: the step.
        refused: reason and numbers from the core.
        index: index of the sample.
        shape: shape of the stored sample.
    """
    if refused.reason == "channels":
        return _channels_error(step, refused.numbers["channels"], index)
    border = step.fields.get("border", {})
    text = _TEXTS[refused.reason].format(
        index=index,
        shape=tuple(map(int, shape)),
        mode=str(border.get("mode")).removeprefix("PAD_").lower(),
        kernel=(step.fields.get("width"), step.fields.get("height")),
        **refused.numbers,
    )
    return ValueError(text)


def _channels_error(step: Step, channels: int, index: int) -> ChannelsError:
    needs = f"fill={step.fill} has {len(step.fill)} values"
    if step.name == "cast":
        needs = f"Normalize has {step.fields['means']} means"
    elif step.name == "erase":
        needs = f"erasing has {len(step.fill)} values"
    return ChannelsError(
        f"it has {counted(channels, 'channel')}, but {needs}. Give one value per channel, and "
        "convert all images to one number of channels: by Grayscale(3), or by prepare=lambda "
        "image: image.convert('RGB') of a CachedDataset.",
        index,
    )
