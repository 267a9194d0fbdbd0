"""Errors for samples that the core refused: the reason, in words for the user."""

from __future__ import annotations

from collections.abc import Sequence

from fastdata.errors import ChannelsError, counted
from fastdata.pixels.core.calls import CoreError
from fastdata.pixels.steps import Step

_NOT_SERVED = (
    "sample {{index}}, of shape {{shape}}, cannot be served: {}. Use batch_ops=False, or leave it "
    "out."
)
# The texts for crops and borders begin as torchvision's errors do.
_TEXTS = {
    "crop": (
        "Required crop size ({crop_height}, {crop_width}) is larger than input image size "
        "({height}, {width}) of sample {index}. Use pad_if_needed=True, a smaller crop, or a "
        "Resize before it."
    ),
    "border": (
        "padding ({left}, {top}, {right}, {bottom}) (left, top, right, bottom) in mode {mode!r} is "
        "too large for the image size ({height}, {width}) of sample {index}. Use "
        "padding_mode='edge' or a smaller padding."
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
        "sample {index} comes out as ({channels}, {height}, {width}), but the batch has room for "
        "({room_channels}, {room_height}, {room_width}) each. Crop or resize to one size, and give "
        "all images one number of channels: by Grayscale(3), or a CachedDataset's "
        "prepare=lambda image: image.convert('RGB')."
    ),
    "outside": _NOT_SERVED.format("a step would leave no pixel of it"),
    "op": _NOT_SERVED.format("a step is not for its number of channels"),
    "table": _NOT_SERVED.format("it asks for more than the core has room for"),
}


def error_of(step: Step, refused: CoreError, index: int, shape: Sequence[int]) -> ValueError:
    """Return the error for a sample of this shape that a step was not for."""
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
        f"it has {counted(channels, 'channel')}, but {needs}. Give as many as there are "
        "channels, and all images one number of these: by Grayscale(3), or a CachedDataset's "
        "prepare=lambda image: image.convert('RGB').",
        index,
    )
