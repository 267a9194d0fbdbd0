"""Readers of albumentations' transforms that turn, crop, pad, or convert to floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdata.pixels.known import known_name
from fastdata.pixels.state import Reader, State, UnknownStepError, need_movable, need_uint8
from fastdata.pixels.steps import Fill, Step

_BORDERS = ("PAD_CONSTANT", "PAD_EDGE", "PAD_SYMMETRIC", "PAD_WRAP", "PAD_REFLECT")
"""Border modes by OpenCV's numbers: constant, replicate, reflect, wrap, reflect 101."""
_TURNED: tuple[tuple[int, bool, bool], ...] = (
    (0, False, False),
    (1, False, False),
    (2, False, False),
    (3, False, False),
    (0, True, False),
    (3, True, False),
    (0, False, True),
    (1, True, False),
)
"""The symmetries of a square in albumentations' order (e, r90, r180, r270, v, hvt, h, t). Each is a
number of quarter turns counterclockwise, then a flip top to bottom or left to right."""
_TRANSPOSED = _TURNED[-1]
_STATISTICS = {
    "image": "OF_IMAGE",
    "image_per_channel": "OF_CHANNELS",
    "min_max": "RANGE_OF_IMAGE",
    "min_max_per_channel": "RANGE_OF_CHANNELS",
}
"""Modes of Normalize that compute their statistics from each image."""
_NUMPY_MAJOR = int(np.__version__.partition(".")[0])


def _turned(state: State, symmetry: tuple[int, bool, bool]) -> list[Step]:
    quarters, is_vertical, is_horizontal = symmetry
    steps = [state.step("turn", quarters=quarters)] if quarters else []
    if is_vertical or is_horizontal:
        steps.append(state.step("flip", is_vertical=is_vertical, p=1))
    return steps


def _read_flip(transform: Any, state: State) -> Step:
    need_movable(state)
    is_vertical = known_name(transform) == "A.VerticalFlip"
    return state.step("flip", is_vertical=is_vertical, p=1)


def _read_transpose(transform: Any, state: State) -> State:
    need_movable(state)
    return replace(state, steps=(*state.steps, *_turned(state, _TRANSPOSED)))


def _read_quarters(transform: Any, state: State) -> Step:
    need_movable(state)
    return state.choice([_turned(state, symmetry) for symmetry in _TURNED[:4]])


def _read_symmetry(transform: Any, state: State) -> Step:
    need_movable(state)
    return state.choice([_turned(state, symmetry) for symmetry in _TURNED])


# Borders and crops


def border_mode(transform: Any) -> str:
    """Return the name in records.h of a transform's border mode."""
    return _BORDERS[transform.border_mode]


def border_fill(transform: Any, state: State) -> Fill:
    """Return the fill for the border of an image or its mask: one value, or one per channel.

    Raises:
        UnknownStepError: the fill cannot be represented as uint8 values.
    """
    if border_mode(transform) != "PAD_CONSTANT":
        return (0,)
    given = transform.fill_mask if state.is_mask else transform.fill
    values = given if isinstance(given, (Sequence, np.ndarray)) else [given]
    # OpenCV uses a single value for the first of four channels only, but albumentations repeats a
    # float for all channels.
    if len(values) == 1 and not isinstance(given, (float, np.floating)):
        values = [*values, 0, 0, 0][: state.channels]
    elif len(values) not in (1, state.channels):
        raise UnknownStepError("has a fill for another number of channels")
    if not all(0 <= value <= 255 and value == int(value) for value in values):
        raise UnknownStepError("has a fill that is not a uint8 value")
    if state.floats:
        raise UnknownStepError("pads with a constant after the conversion to floats")
    return tuple(float(value) for value in values)


def _read_pad(transform: Any, state: State) -> Step:
    need_movable(state)
    padding = transform.padding
    values = list(padding) if isinstance(padding, Sequence) else [padding] * 2
    left, top, right, bottom = (values * 2)[:4] if len(values) == 2 else values
    border = {"left": left, "top": top, "right": right, "bottom": bottom}
    if min(border.values()) < 0:
        raise UnknownStepError("has a padding that is not supported")
    return state.step(
        "pad",
        fill=border_fill(transform, state),
        border={**border, "mode": border_mode(transform), "domain": "PIL_DOMAIN"},
    )


def _read_pad_if_needed(transform: Any, state: State) -> Step:
    return _pad_to(
        transform,
        state,
        transform.position,
        height=transform.min_height or 0,
        width=transform.min_width or 0,
        height_divisor=transform.pad_height_divisor or 0,
        width_divisor=transform.pad_width_divisor or 0,
    )


def _pad_to(transform: Any, state: State, position: str, **fields: Any) -> Step:
    need_movable(state)
    return state.step(
        "pad_to",
        fill=border_fill(transform, state),
        position=f"PLACE_{position.upper()}",
        mode=border_mode(transform),
        **fields,
    )


def _read_crop(transform: Any, state: State) -> State:
    """Read RandomCrop, CenterCrop and Crop, which may pad first."""
    need_movable(state)
    name = known_name(transform)
    if name == "A.Crop":
        height, width = transform.y_max, transform.x_max
        box = {
            "top": transform.y_min,
            "left": transform.x_min,
            "height": height - transform.y_min,
            "width": width - transform.x_min,
        }
        crop = state.step("cut", box=box)
    else:
        height, width = transform.height, transform.width
        crop = state.step("cut", box={"height": height, "width": width}, is_centered=True)
    if name == "A.RandomCrop":
        crop = state.step("crop", height=height, width=width)
    steps = [crop]
    if transform.pad_if_needed:
        pad = _pad_to(
            transform,
            state.inner(1),
            transform.pad_position,
            height=height,
            width=width,
            is_whole_behind=name == "A.Crop",
        )
        steps = [pad, crop]
    return replace(state, steps=(*state.steps, *steps))


# The kind of a sample


def _read_normalize(transform: Any, state: State) -> Step:
    need_uint8(state)
    if transform.normalization != "standard":
        if _NUMPY_MAJOR < 2:  # with NumPy 1 the results are float32
            raise UnknownStepError("computes its statistics from each image, which needs NumPy 2")
        statistic = _STATISTICS[transform.normalization]
        return state.step(
            "cast", dtype="FLOAT64", scaling="SCALE_NONE", means=0, statistic=statistic
        )
    assert state.channels is not None
    # The difference from the mean is multiplied, both in float32 (albucore's normalize_lut).
    mean = _for_channels(transform.mean_np, state.channels)
    factor = _for_channels(transform.denominator, state.channels)
    return state.step(
        "cast", dtype="FLOAT32", scaling="SCALE_AFTER", means=state.channels, mean=mean, std=factor
    )


def _for_channels(value: Any, channels: int) -> list[float]:
    """Return a number for each channel, as albucore's ``convert_value`` chooses them."""
    values = np.asarray(value)
    if values.dtype != np.float32 or values.ndim > 1 or not np.isfinite(values).all():
        raise UnknownStepError("has a mean or std that is not supported")
    values = values.reshape(-1)
    is_one = len(values) < channels or channels == 1
    return [float(values[0])] * channels if is_one else values[:channels].tolist()


def _read_to_float(transform: Any, state: State) -> Step:
    need_uint8(state)
    most = float(255 if transform.max_value is None else transform.max_value)
    if not (most > 0 and np.isfinite(most)):
        raise UnknownStepError("has a max_value that is not supported")
    return state.step("cast", dtype="FLOAT32", scaling="SCALE_NONE", means=1, mean=[0], std=[most])


def _read_from_float(transform: Any, state: State) -> State:
    """Read FromFloat, if it restores exactly the values before ToFloat."""
    is_plain = state.cast.get("scaling") == "SCALE_NONE" and not state.floats[1:]
    if not is_plain or transform.dtype != "uint8":
        raise UnknownStepError("gets samples that ToFloat did not make")
    levels = np.arange(256, dtype=np.float32)
    made = np.rint(levels / np.float32(state.cast["std"][0]) * np.float32(transform.max_value))
    if not np.array_equal(made, levels):
        raise UnknownStepError("does not give back the values before ToFloat")
    return replace(state, floats=())


def _read_to_tensor(transform: Any, state: State) -> State:
    if state.is_mask:
        if state.kind != "hw":
            raise UnknownStepError("gets masks with channels")
        return replace(state, kind="plane")
    return replace(state, kind="tensor")


def _read_nothing(transform: Any, state: State) -> State:
    return state


READERS: dict[str, Reader] = {
    "A.CenterCrop": _read_crop,
    "A.Crop": _read_crop,
    "A.D4": _read_symmetry,
    "A.FromFloat": _read_from_float,
    "A.HorizontalFlip": _read_flip,
    "A.NoOp": _read_nothing,
    "A.Normalize": _read_normalize,
    "A.Pad": _read_pad,
    "A.PadIfNeeded": _read_pad_if_needed,
    "A.RandomCrop": _read_crop,
    "A.RandomRotate90": _read_quarters,
    "A.SquareSymmetry": _read_symmetry,
    "A.ToFloat": _read_to_float,
    "A.ToTensorV2": _read_to_tensor,
    "A.Transpose": _read_transpose,
    "A.VerticalFlip": _read_flip,
}
"""A reader for each transform, by its name with ``A.`` before it."""
