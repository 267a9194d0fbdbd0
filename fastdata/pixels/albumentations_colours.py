"""Readers of albumentations' transforms that change the values of pixels.

Most of them become tables of 256 values. All need uint8: after a conversion to floats they run per
sample. If pixels depend on the build of OpenCV, the core is compared with the installed one first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastdata.pixels.opencv_variants import matching
from fastdata.pixels.state import Reader, State, UnknownStepError, need_colours, need_uint8
from fastdata.pixels.steps import Step

_MOST_CHANNELS = 4  # MAX_CHANNELS of core.h
_MOST_TILES = 1 << 12  # MOST_TILES of cv_clahe.c
_MOST_INTENSITY = 16  # MOST_INTENSITY of cv_noise.c
_GREYS = {
    "weighted_average": "GREY_WEIGHTED",
    "from_lab": "GREY_LIGHTNESS",
    "desaturation": "GREY_DESATURATION",
    "average": "GREY_AVERAGE",
    "max": "GREY_LARGEST",
}


def _need_few_channels(state: State) -> None:
    need_uint8(state)
    if (state.channels or _MOST_CHANNELS) > _MOST_CHANNELS:
        raise UnknownStepError(f"gets images with more than {_MOST_CHANNELS} channels")


def _scaled(bounds: Sequence[float], factor: float) -> tuple[float, float]:
    low, high = bounds
    return low * factor, high * factor


# Tables


def _read_brightness_contrast(transform: Any, state: State) -> Step:
    _need_few_channels(state)
    low, high = transform.contrast_limit
    return state.step(
        "cv_linear",
        added="SHARE_OF_255" if transform.brightness_by_max else "SHARE_OF_MEAN",
        is_safe=transform.ensure_safe_range,
        alpha=(1.0 + low, 1.0 + high),
        beta=transform.brightness_limit,
    )


def _read_gamma(transform: Any, state: State) -> Step:
    return _shared(state, "CHANNEL_GAMMA", transform.gamma_limit)


def _shared(state: State, kind: str, bounds: Sequence[float]) -> Step:
    """Return a step that draws one number for all channels."""
    _need_few_channels(state)
    low, high = bounds
    return state.step("cv_channels", kind=kind, is_shared=True, low=(low,), high=(high,))


def _each(state: State, kind: str, bounds: Sequence[Sequence[float]]) -> Step:
    """Return a step that draws a number for each channel."""
    _need_few_channels(state)
    lows, highs = zip(*bounds, strict=True)
    return state.step("cv_channels", kind=kind, low=lows, high=highs)


def _read_invert(transform: Any, state: State) -> Step:
    _need_few_channels(state)
    return state.step("value", kind="INVERT")


def _read_solarize(transform: Any, state: State) -> Step:
    _need_few_channels(state)
    low, high = _scaled(transform.threshold_range, 255)
    return state.step("value", kind="SOLARIZE", low=low, high=high)


def _read_posterize(transform: Any, state: State) -> Step:
    is_of_each = isinstance(transform.num_bits, list)
    bits = transform.num_bits if is_of_each else [transform.num_bits]
    if not all(1 <= low <= high <= 8 for low, high in bits):
        raise UnknownStepError("keeps a number of bits that is not supported")
    if not is_of_each:
        return _shared(state, "CHANNEL_POSTERIZE", bits[0])
    if len(bits) != state.channels:
        raise UnknownStepError("has num_bits for another number of channels")
    return _each(state, "CHANNEL_POSTERIZE", bits)


def _read_rgb_shift(transform: Any, state: State) -> Step:
    need_colours(state)
    ranges = transform.noise_params["ranges"]
    return _each(state, "CHANNEL_ADD", [_scaled(bounds, 255) for bounds in ranges])


def _read_channel_shuffle(transform: Any, state: State) -> State | Step:
    _need_few_channels(state)
    return state if state.channels == 1 else state.step("permute")


def _read_channel_dropout(transform: Any, state: State) -> Step:
    _need_few_channels(state)
    fewest, most = transform.channel_drop_range
    if most >= (state.channels or 0):
        raise UnknownStepError("may drop as many channels as images have")
    if not 0 <= transform.fill <= 255:
        raise UnknownStepError("has a fill outside of 0 to 255")
    return state.step("cv_drop", fill=(float(transform.fill),), fewest=fewest, most=most)


# Histograms


def _read_equalize(transform: Any, state: State) -> Step:
    need_colours(state)
    if transform.mask is not None:
        raise UnknownStepError("equalizes only the pixels of a mask")
    is_of_luma = not transform.by_channels
    _agreeing(transform, "luma" if is_of_luma else transform.mode)
    kind = "EQUALIZE_CV" if transform.mode == "cv" else "EQUALIZE_PIL"
    return state.step("cv_histogram", kind=kind, is_of_luma=is_of_luma)


def _read_auto_contrast(transform: Any, state: State) -> Step:
    _need_few_channels(state)
    if transform.ignore is not None:
        raise UnknownStepError("ignores a value")
    # With a cutoff, NumPy 1 counts pixels in float64.
    if transform.cutoff and (np.float32(1) + 1.0).dtype != np.float32:
        raise UnknownStepError("has a cutoff, which needs NumPy 2")
    _agreeing(transform, transform.method)
    kind = "STRETCH_CDF" if transform.method == "cdf" else "STRETCH_PIL"
    return state.step("cv_histogram", kind=kind, cutoff=float(transform.cutoff))


def _read_clahe(transform: Any, state: State) -> Step:
    need_colours(state)
    _agreeing(transform)
    columns, rows = transform.tile_grid_size
    if not (columns > 0 and rows > 0 and columns * rows <= _MOST_TILES):
        raise UnknownStepError("has a number of tiles that is not supported")
    if min(transform.clip_limit) <= 0:
        raise UnknownStepError("has a clip_limit of 0 or less")
    return state.step("cv_clahe", columns=columns, rows=rows, limit=transform.clip_limit)


# Colours


def _read_grey(transform: Any, state: State) -> State | Step:
    need_colours(state)
    channels = transform.num_output_channels
    if transform.method not in _GREYS:
        raise UnknownStepError(f"makes grey by method={transform.method!r}")
    if channels not in (1, 3):
        raise UnknownStepError("makes neither 1 nor 3 channels")
    if state.channels == 1:
        return state  # albumentations leaves it unchanged, with a warning
    if channels == 1 and state.channels is None:
        raise UnknownStepError("gets images with different numbers of channels")
    if (type(transform).__name__, transform.method) in _TRIALS:
        _agreeing(transform, transform.method)
    step = state.step("cv_grey", method=_GREYS[transform.method], channels=channels)
    return step if channels == 3 else replace(state.add(step), channels=1, kind="hw")


def _read_hsv(transform: Any, state: State) -> Step:
    need_colours(state)
    return state.step(
        "cv_hsv",
        hue=transform.hue_shift_limit,
        saturation=transform.sat_shift_limit,
        value=transform.val_shift_limit,
        **_agreeing(transform),
    )


def _read_jitter(transform: Any, state: State) -> Step:
    need_colours(state)
    _agreeing(transform, "contrast")
    hue = _agreeing(transform, "hue")
    saturation = _agreeing(transform, "saturation")
    contrast = state.inner(1)
    steps = [
        state.inner(0).step("cv_linear", alpha=transform.brightness),
        contrast.step("cv_linear", added="GREY_THAT_STAYS", alpha=transform.contrast),
        state.inner(2).step("cv_saturation", factor=transform.saturation, **saturation),
        state.inner(3).step("cv_hsv", hue=_scaled(transform.hue, 180), **hue),
    ]
    return state.in_order([[step] for step in steps])


# Noise


def _read_gauss_noise(transform: Any, state: State) -> Step:
    need_uint8(state)
    if transform.noise_scale_factor != 1:
        raise UnknownStepError("resizes its noise")
    return state.step(
        "cv_noise",
        is_shared=not transform.per_channel,
        mean=transform.mean_range,
        sigma=transform.std_range,
    )


def _read_multiplicative_noise(transform: Any, state: State) -> Step:
    _need_few_channels(state)
    bounds = transform.multiplier
    is_shared = not transform.per_channel
    if transform.elementwise:
        return state.step("cv_noise", multiplies=True, is_shared=is_shared, range=bounds)
    if is_shared:
        return _shared(state, "CHANNEL_MULTIPLY", bounds)
    return _each(state, "CHANNEL_MULTIPLY", [bounds] * _MOST_CHANNELS)


def _read_iso_noise(transform: Any, state: State) -> Step:
    need_uint8(state)
    if state.channels != 3:
        raise UnknownStepError("needs images with 3 channels")
    if max(transform.intensity) > _MOST_INTENSITY:
        raise UnknownStepError(f"has an intensity above {_MOST_INTENSITY}")
    return state.step("cv_iso", colour=transform.color_shift, intensity=transform.intensity)


# The build of OpenCV


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """One step with fixed values, and the call of albumentations that does the same.

    Attributes:
        arguments: of the transform's class.
        parameters: of its ``apply``.
        variants: fields of the step that depend on the build, the most common ones first.
    """

    step: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    variants: Sequence[Mapping[str, int]] = ({},)


def _jitter(which: int, **parameters: float) -> dict[str, Any]:
    """Return parameters of ColorJitter that apply only one of its four changes."""
    unchanged = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    return {**unchanged, **parameters, "order": [which]}


_FUSED = ({"fuses": 1}, {"fuses": 0})
# Pixels in a vector of OpenCV: 32 with AVX2, 16 with SSE and NEON.
_HSV = [{"vector": size, "fuses": fuses} for fuses in (1, 0) for size in (32, 16, 64, 8, 1)]
_TRIALS = {
    ("AutoContrast", "cdf"): _Trial(step="cv_histogram", fields={"kind": "STRETCH_CDF"}),
    ("AutoContrast", "pil"): _Trial(
        step="cv_histogram", fields={"kind": "STRETCH_PIL"}, arguments={"method": "pil"}
    ),
    ("CLAHE", ""): _Trial(
        step="cv_clahe",
        fields={"columns": 8, "rows": 8, "limit": (3.0, 3.0)},
        parameters={"clip_limit": 3.0},
    ),
    ("ColorJitter", "contrast"): _Trial(
        step="cv_linear",
        fields={"added": "GREY_THAT_STAYS", "alpha": (0.7, 0.7)},
        parameters=_jitter(1, contrast=0.7),
    ),
    ("ColorJitter", "hue"): _Trial(
        step="cv_hsv",
        fields={"hue": (45.0, 45.0)},
        parameters=_jitter(3, hue=0.25),
        variants=_HSV,
    ),
    ("ColorJitter", "saturation"): _Trial(
        step="cv_saturation",
        fields={"factor": (1.3, 1.3)},
        parameters=_jitter(2, saturation=1.3),
        variants=_FUSED,
    ),
    ("Equalize", "cv"): _Trial(
        step="cv_histogram", fields={"kind": "EQUALIZE_CV"}, parameters={"mask": None}
    ),
    ("Equalize", "pil"): _Trial(
        step="cv_histogram",
        fields={"kind": "EQUALIZE_PIL"},
        arguments={"mode": "pil"},
        parameters={"mask": None},
    ),
    ("Equalize", "luma"): _Trial(
        step="cv_histogram",
        fields={"kind": "EQUALIZE_CV", "is_of_luma": 1},
        arguments={"by_channels": False},
        parameters={"mask": None},
    ),
    ("HueSaturationValue", ""): _Trial(
        step="cv_hsv",
        fields={"hue": (45.0, 45.0), "saturation": (20.0, 20.0), "value": (-9.0, -9.0)},
        parameters={"hue_shift": 45.0, "sat_shift": 20.0, "val_shift": -9.0},
        variants=_HSV,
    ),
    ("ToGray", "from_lab"): _Trial(
        step="cv_grey",
        fields={"channels": 3, "method": "GREY_LIGHTNESS"},
        arguments={"method": "from_lab"},
    ),
    ("ToGray", "weighted_average"): _Trial(step="cv_grey", fields={"channels": 3}),
}
"""Trials by the class of a transform, and the part of it that depends on OpenCV."""


def _agreeing(transform: Any, part: str = "") -> dict[str, Any]:
    """Return the fields of a step that depend on the build of OpenCV.

    Raises:
        UnknownStepError: no value of them gives the pixels of this build.
    """
    kind: Any = type(transform)
    return dict(_variant(kind, part))


@functools.cache
def _variant(kind: Any, part: str) -> Mapping[str, int]:
    trial = _TRIALS[kind.__name__, part]
    apply = functools.partial(kind(**trial.arguments).apply, **trial.parameters)
    candidates = [Step(trial.step, {**trial.fields, **variant}) for variant in trial.variants]
    found = matching(apply, candidates)
    return {name: found.fields[name] for name in trial.variants[0]}


READERS: dict[str, Reader] = {
    "A.AutoContrast": _read_auto_contrast,
    "A.CLAHE": _read_clahe,
    "A.ChannelDropout": _read_channel_dropout,
    "A.ChannelShuffle": _read_channel_shuffle,
    "A.ColorJitter": _read_jitter,
    "A.Equalize": _read_equalize,
    "A.GaussNoise": _read_gauss_noise,
    "A.HueSaturationValue": _read_hsv,
    "A.ISONoise": _read_iso_noise,
    "A.InvertImg": _read_invert,
    "A.MultiplicativeNoise": _read_multiplicative_noise,
    "A.Posterize": _read_posterize,
    "A.RGBShift": _read_rgb_shift,
    "A.RandomBrightnessContrast": _read_brightness_contrast,
    "A.RandomGamma": _read_gamma,
    "A.Solarize": _read_solarize,
    "A.ToGray": _read_grey,
}
"""A reader for each transform, by its name with ``A.`` before it."""
