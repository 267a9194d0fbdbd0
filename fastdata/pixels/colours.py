"""Readers of transforms that change the values of pixels, or blur or erase them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdata.pixels.arguments import domain_of, pair, several
from fastdata.pixels.known import known_name
from fastdata.pixels.published import published
from fastdata.pixels.state import State, UnknownStepError, need_colours, need_tensor, need_uint8
from fastdata.pixels.steps import Step

VALUES = {
    "RandomAdjustSharpness": ("SHARPNESS", "sharpness_factor"),
    "RandomAutocontrast": ("AUTOCONTRAST", ""),
    "RandomEqualize": ("EQUALIZE", ""),
    "RandomInvert": ("INVERT", ""),
    "RandomPosterize": ("POSTERIZE", "bits"),
    "RandomSolarize": ("SOLARIZE", "threshold"),
}
"""Transforms with a probability and at most one number, and the attribute that holds it."""


def read_value(transform: Any, state: State) -> Step:
    need_colours(state)
    kind, attribute = VALUES[known_name(transform)]
    number = getattr(transform, attribute, 0)
    is_of_levels = number >= 0 and (number <= 255 or kind == "SHARPNESS")
    is_served = is_of_levels or state.kind == "pil"
    if kind == "POSTERIZE":
        is_served = type(number) is int and 1 <= number <= 8
    if not is_served:
        raise UnknownStepError("has a number that is not supported")
    return state.step(
        "value", kind=kind, domain=domain_of(transform, state), low=number, high=number
    )


def read_published(transform: Any, state: State) -> Step:
    """Read a transform of PIL images whose code was published with a paper."""
    values = published(transform)
    if values is None:
        raise UnknownStepError("is not a known batch op")
    kind, low, high, p = values
    need_colours(state)
    if state.kind != "pil" or state.is_mask:
        raise UnknownStepError("takes PIL images only")
    if not 0 <= low <= high:
        raise UnknownStepError("blurs by a radius that is not supported")
    step = state.inner().step("value", kind=kind, domain="PIL_DOMAIN", low=low, high=high)
    return state.maybe([step], p)


def read_jitter(transform: Any, state: State) -> Step:
    return state.in_order([[step] for step in _jitters(transform, state)])


def read_photometric_distort(transform: Any, state: State) -> Step:
    # Numbers 10 to 20 and 22 are for the draws of the step itself (`draw_photometric`).
    children = [*_jitters(transform, state), state.inner(21).step("permute")]
    return state.step("photometric", p=transform.p, children=children)


def _jitters(transform: Any, state: State) -> list[Step]:
    """Read brightness, contrast, saturation and hue, without those that are not changed."""
    need_colours(state)
    domain = domain_of(transform, state)
    steps = []
    for number, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        bounds = getattr(transform, name)
        if bounds:
            low, high = bounds
            inner = state.inner(number)
            steps.append(inner.step("value", kind=name.upper(), domain=domain, low=low, high=high))
    return steps


def read_grey(transform: Any, state: State, channels: int = 0) -> Step:
    need_colours(state)
    return state.step("grayscale", channels=channels, domain=domain_of(transform, state))


def read_grayscale(transform: Any, state: State) -> State:
    channels = transform.num_output_channels
    if channels not in (1, 3):
        raise UnknownStepError("makes neither 1 nor 3 channels")
    grey = state.add(read_grey(transform, state, channels))
    # v1 returns tensors of one channel unchanged, even if num_output_channels is 3.
    keeps_one = state.channels == 1 and domain_of(transform, state) == "V1_DOMAIN"
    return grey if keeps_one else replace(grey, channels=channels)


def read_rgb(transform: Any, state: State) -> State:
    if state.channels not in (1, 3):
        raise UnknownStepError("makes RGB of images whose mode is not known")
    if state.channels == 3:
        return state
    return replace(state.add(read_grey(transform, state, 3)), channels=3)


def read_permute(transform: Any, state: State) -> Step:
    if (state.channels or 3) > 4:  # MAX_CHANNELS of core.h
        raise UnknownStepError("permutes more than 4 channels")
    need_uint8(state)
    return state.step("permute")


def read_blur(transform: Any, state: State) -> Step:
    need_colours(state)
    width, height = pair(transform.kernel_size)
    low, high = transform.sigma
    return state.step("blur", width=width, height=height, low=low, high=high)


def read_noise(transform: Any, state: State) -> Step:
    need_tensor(state)
    is_erased = any(step.name == "erase" for step in state.floats)
    if state.is_normalized or is_erased:
        raise UnknownStepError("comes after Normalize or erasing")
    if not state.floats:
        need_colours(state)
    return state.step(
        "noise", clips=transform.clip, mean=float(transform.mean), sigma=float(transform.sigma)
    )


def read_erasing(transform: Any, state: State) -> Step:
    # v1 calls normal numbers "random", and v2 None.
    is_random = transform.value is None or isinstance(transform.value, str)
    return _erase(
        state,
        (0,) if is_random else several(transform.value),
        "NORMAL_PIXELS" if is_random else "FILLED",
        fewest=1,
        most=1,
        p=transform.p,
        scale=transform.scale,
        log_ratio=np.log(transform.ratio).tolist(),
    )


def read_timm_erasing(transform: Any, state: State) -> Step:
    """Read timm's erasing: with 0, or with normal numbers for each pixel or for each channel."""
    if transform.num_splits > 1:
        raise UnknownStepError("erases only some splits of a batch")
    mode = "FILLED"
    if transform.per_pixel:
        mode = "NORMAL_PIXELS"
    elif transform.rand_color:
        mode = "NORMAL_CHANNELS"
    return _erase(
        state,
        (0,),
        mode,
        fewest=transform.min_count,
        most=transform.max_count,
        p=transform.probability,
        scale=(transform.min_area, transform.max_area),
        log_ratio=transform.log_aspect_ratio,
    )


def _erase(state: State, fill: Sequence[Any], mode: str, **fields: Any) -> Step:
    need_tensor(state)
    if len(fill) > 4:
        raise UnknownStepError("erases with more than 4 values")
    is_level = all(0 <= value <= 255 for value in fill)
    if not state.floats and (mode != "FILLED" or not is_level):
        raise UnknownStepError("erases uint8 with random values, or with values outside 0 to 255")
    values = tuple(map(float, fill)) or (0.0,)
    is_normalized = state.is_normalized
    return state.step("erase", fill=values, mode=mode, is_normalized=is_normalized, **fields)
