"""The steps that fastdata knows, read as ops: ``READERS`` has one function for each name.

A reader looks at the attributes of the user's object, and gives its op, or says why the step has to
run as it is. Where more than pixels changes, it gives the state of samples after the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from fastdata.pixels.compose import (
    Views,
    flatten,
    is_v2,
    joint_steps,
    known_name,
    names_in,
    published,
)
from fastdata.pixels.core import CONSTANTS, Float64s
from fastdata.pixels.ops import (
    Op,
    Ops,
    State,
    UnknownStepError,
    choice,
    domain_of,
    in_order,
    interpolation_name,
    maybe,
    need_colours,
    need_movable,
    need_tensor,
    need_uint8,
    pair,
    read_border,
    read_borders,
    read_filters,
    read_warp,
    several,
    value_for,
)

_MASK_DTYPES = (torch.int64, torch.int32, torch.float32, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_Reader = Callable[[Any, State], Op | State]


def recognise(step: Any, state: State) -> State:
    """Read one of the user's objects: the state after it, with its ops.

    Raises:
        UnknownStepError: it has to run as it is.
    """
    name = known_name(step)
    read = READERS.get(name, _read_published)
    if type(step) is Views:
        raise UnknownStepError("gives several views, which only the last step may")
    try:
        if state.is_beside and name in READERS:
            read = _read_beside
        elif state.kind in ("array", "mask", "video"):
            raise UnknownStepError("gets what is no image to batch ops")
        found = read(step, state)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as unread:
        raise UnknownStepError(f"has arguments that are not served: {unread}") from unread
    after = state.add(found) if isinstance(found, Op) else found
    return replace(after, at=state.at + 1)


def _read_published(step: Any, state: State) -> Op:
    """Read what people publish for PIL images."""
    values = published(step)
    if values is None:
        raise UnknownStepError("is not a known batch op")
    code, low, high, p = values
    need_colours(state)
    if state.kind != "pil" or state.is_beside:
        raise UnknownStepError("takes PIL images only")
    if not 0 <= low <= high:
        raise UnknownStepError("blurs by a radius that is not served")
    return maybe(state, [_number(code, state.inner(), "PIL_DOMAIN", low, high)], p)


_POLICIES = {
    "AugMix": "STEP_AUG_MIX",
    "AutoAugment": "STEP_POLICIES",
    "RandAugment": "STEP_AUGMENT",
    "TrivialAugmentWide": "STEP_AUGMENT",
}
_MOVING = names_in(
    "CenterCrop ConvertImageDtype Pad RandomAffine RandomApply RandomChoice RandomCrop "
    "RandomHorizontalFlip RandomOrder RandomPerspective RandomResize RandomResizedCrop "
    "RandomRotation RandomShortestSize RandomVerticalFlip Resize ToDtype"
)
"""What v2 does to masks as well, drawn once for both; others leave these as they are."""


def _read_beside(step: Any, state: State) -> Op | State:
    """Read what v2 does to a mask beside its image."""
    name = known_name(step)
    if not is_v2(step):
        raise UnknownStepError("is not of torchvision.transforms.v2, and takes no masks")
    if name in _POLICIES:
        raise UnknownStepError("does not accept masks")
    if name == "ToPureTensor":
        return replace(state, kind="tensor")
    is_moved = name in _MOVING and state.kind == "mask"
    return READERS[name](step, state) if is_moved else state


# Geometry


def _center_crop(step: Any, state: State) -> Op:
    if state.is_normalized:
        raise UnknownStepError("may pad with 0 after Normalize")
    need_movable(state)
    return state.op("STEP_CENTER_CROP", pair(step.size))


def _flip(step: Any, state: State) -> Op:
    need_movable(state)
    n = [known_name(step) == name for name in ("RandomVerticalFlip", "AlternatingFlip")]
    return state.op("STEP_FLIP", n, [getattr(step, "p", 0)])  # an AlternatingFlip has none


def _pad(step: Any, state: State) -> Op:
    border, fill = read_border(step, state)
    return state.op("STEP_PAD", (*read_borders(step.padding), *border), fill=fill)


def _random_crop(step: Any, state: State) -> Op:
    need_movable(state)
    borders = read_borders(step.padding)
    pads = step.pad_if_needed or any(borders)
    border, fill = read_border(step, state) if pads else (("PAD_CONSTANT", "PIL_DOMAIN"), (0.0,))
    n = (*borders, *border, *pair(step.size), step.pad_if_needed, is_v2(step))
    return state.op("STEP_CROP", n, fill=fill)


def _resized_crop(step: Any, state: State) -> Op:
    if step.ratio[0] <= 0:
        raise UnknownStepError("has a ratio that is not served")
    ranges = (*step.scale, *step.ratio, *np.log(step.ratio))
    size = (*pair(step.size), 0, 0)
    crops = [
        [state.op("STEP_RESIZED_CROP", (*size, *read_filters(step, state, name)), ranges)]
        for name in several(step.interpolation)  # timm draws one of two
    ]
    if len(crops) == 1:
        return crops[0][0]
    return choice(state.inner(), crops)


_BOUNDS = {"RandomShortestSize": 1, "short": 2, "long": 3}
"""What OP_RESIZE of core.h calls its n[3], of a step and of fastdata's own sizes."""


def _resize(step: Any, state: State) -> Op:
    filters = read_filters(step, state, step.interpolation)
    name = known_name(step)
    longest = getattr(step, "max_size", None) or 0
    if name == "RandomResize":
        sides: Iterable[int] = range(step.min_size, step.max_size)
        longest = 0
    elif name == "RandomShortestSize":
        sides = step.min_size
    elif isinstance(step.size, str):
        name, _, side = step.size.partition(":")
        sides = [int(side)]
    else:
        sides = several(step.size or ())
        if len(sides) == 2 and not longest:
            return state.op("OP_RESIZE", (*pair(sides), 0, 0, *filters))
        if len(sides) != 1 or 0 < longest <= sides[0]:
            raise UnknownStepError("has a size that is not served")
    lengths = [Op("STEP_LENGTH", n=(int(side),)) for side in sides]
    n = (0, 0, longest, _BOUNDS.get(name, 0), *filters)
    return state.op("OP_RESIZE", n, children=lengths)


def _rotation(step: Any, state: State) -> Op:
    if step.expand and state.kind != "pil":
        raise UnknownStepError("expands tensors")
    return _warp("STEP_ROTATION", step, state, step.degrees)


def _affine(step: Any, state: State) -> Op:
    ranges = (*step.degrees, *(step.translate or (0, 0)), *(step.scale or (1, 1)))
    return _warp("OP_AFFINE", step, state, (*ranges, *(step.shear or ())))


def _warp(code: str, step: Any, state: State, ranges: Iterable[float]) -> Op:
    n, fill = read_warp(step, state)
    center = getattr(step, "center", None) or (0, 0)
    return state.op(code, n, (*center, *ranges), fill)


# Values


def _number(code: str, state: State, domain: str, low: float, high: float) -> Op:
    """An op with one number, uniform between two."""
    return state.op(code, (0, domain), (low, high))


_VALUES = {
    "RandomAdjustSharpness": ("OP_SHARPNESS", "sharpness_factor"),
    "RandomAutocontrast": ("OP_AUTOCONTRAST", ""),
    "RandomEqualize": ("OP_EQUALIZE", ""),
    "RandomInvert": ("OP_INVERT", ""),
    "RandomPosterize": ("OP_POSTERIZE", "bits"),
    "RandomSolarize": ("OP_SOLARIZE", "threshold"),
}
"""Steps that have a probability and at most one number, and the attribute that holds it."""


def _value(step: Any, state: State) -> Op:
    need_colours(state)
    code, attribute = _VALUES[known_name(step)]
    number = getattr(step, attribute, 0)
    is_of_levels = number >= 0 and (number <= 255 or code == "OP_SHARPNESS")
    is_served = is_of_levels or state.kind == "pil"
    if code == "OP_POSTERIZE":
        is_served = type(number) is int and 1 <= number <= 8
    if not is_served:
        raise UnknownStepError("has a number that is not served")
    return _number(code, state, domain_of(step, state), number, number)


def _jitters(step: Any, state: State) -> list[Op]:
    """Brightness, contrast, saturation and hue of a step, but for those that it leaves."""
    need_colours(state)
    domain = domain_of(step, state)
    return [
        _number(f"OP_{name.upper()}", state.inner(number), domain, *getattr(step, name))
        for number, name in enumerate(("brightness", "contrast", "saturation", "hue"))
        if getattr(step, name)
    ]


def _photometric_distort(step: Any, state: State) -> Op:
    children = [*_jitters(step, state), state.inner(21).op("OP_PERMUTE")]
    return state.op("STEP_PHOTOMETRIC", v=[step.p], children=children)


def _grey(step: Any, state: State, channels: int = 0) -> Op:
    need_colours(state)
    return state.op("OP_GRAYSCALE", (channels, domain_of(step, state)))


def _grayscale(step: Any, state: State) -> State:
    channels = step.num_output_channels
    if channels not in (1, 3):
        raise UnknownStepError("makes other than 1 or 3 channels")
    grey = state.add(_grey(step, state, channels))
    keeps_one = state.channels == 1 and domain_of(step, state) == "V1_DOMAIN"
    return grey if keeps_one else replace(grey, channels=channels)


def _rgb(step: Any, state: State) -> State:
    if state.channels not in (1, 3):
        raise UnknownStepError("makes RGB of images whose mode is not known")
    if state.channels == 3:
        return state
    return replace(state.add(_grey(step, state, 3)), channels=3)


def _permute(step: Any, state: State) -> Op:
    if (state.channels or 3) > 4:
        raise UnknownStepError("permutes more than 4 channels")
    need_uint8(state)
    return state.op("OP_PERMUTE")


def _blur(step: Any, state: State) -> Op:
    need_colours(state)
    return state.op("OP_BLUR", pair(step.kernel_size), step.sigma)


def _noise(step: Any, state: State) -> Op:
    need_tensor(state)
    is_erased = any(op.code == "OP_ERASE" for op in state.floats)
    if state.is_normalized or is_erased:
        raise UnknownStepError("comes after Normalize or erasing")
    if not state.floats:
        need_colours(state)
    return state.op("OP_NOISE", (step.clip,), (step.mean, step.sigma))


def _erasing(step: Any, state: State) -> Op:
    # v1 calls normal numbers "random", and v2 None.
    is_random = step.value is None or isinstance(step.value, str)
    fill = (0,) if is_random else several(step.value)
    ranges = (step.p, *step.scale, *np.log(step.ratio))
    return _erase(state, ranges, (1, 1), fill, int(is_random))


def _timm_erasing(step: Any, state: State) -> Op:
    """With 0, or normal numbers, one for each pixel or one for each channel."""
    if step.num_splits > 1:
        raise UnknownStepError("erases only some splits of a batch")
    mode = 1 if step.per_pixel else 2 * bool(step.rand_color)
    ranges = (step.probability, step.min_area, step.max_area, *step.log_aspect_ratio)
    return _erase(state, ranges, (step.min_count, step.max_count), (0,), mode)


def _erase(
    state: State, ranges: Iterable[float], counts: tuple[int, int], fill: Sequence[Any], mode: int
) -> Op:
    need_tensor(state)
    if len(fill) > 4:
        raise UnknownStepError("erases with more than 4 values")
    if not state.floats and (mode or not all(0 <= value <= 255 for value in fill)):
        raise UnknownStepError("erases uint8 with random values, or with others than 0 to 255")
    # Places 2 to 5 are those of the box, which is drawn.
    n = (*counts, 0, 0, 0, 0, mode, state.is_normalized)
    return state.op("OP_ERASE", n, ranges, tuple(map(float, fill)) or (0.0,))


# Automatic augmentation


def _auto_augment(step: Any, state: State) -> Op:
    """RandAugment, TrivialAugmentWide, AutoAugment or AugMix."""
    code = _POLICIES[known_name(step)]
    mixes = code == "STEP_AUG_MIX"  # which makes tensors of PIL images
    warp, fill = read_warp(step, replace(state, kind="tensor") if mixes else state)
    space = _augmentation_space(step, 1, 1)
    rows = list(space)
    policies: Any = getattr(step, "policies", None) or getattr(step, "_policies", ())
    chosen = [*chain.from_iterable(policies)] or [(row, 1, None) for row in rows]
    children = [
        Op(
            "STEP_MAGNITUDE",
            n=(CONSTANTS[f"POLICY_{name}"], space[name][1], bin or 0, rows.index(name)),
            v=(float(p),),
        )
        for name, p, bin in chosen
    ]
    n = (
        *warp,
        getattr(step, "mixture_width", getattr(step, "num_ops", 1)),
        _bins_of(step),
        getattr(step, "severity", getattr(step, "magnitude", -1)),
        hasattr(step, "_AUGMENTATION_SPACE"),  # thresholds are shares, of v2
        getattr(step, "chain_depth", 0),
    )
    op = state.op(code, n, [getattr(step, "alpha", 1)], fill, children)
    return replace(op, levels=partial(_levels, step))


def _bins_of(step: Any) -> int:
    return getattr(step, "num_magnitude_bins", 10)


def _augmentation_space(step: Any, height: int, width: int) -> dict[str, tuple[Any, bool]]:
    """Names of ops, the same for all sizes -> magnitudes, and whether they take a sign."""
    bins = _bins_of(step)
    with torch.device("cpu"):  # whatever the default is
        if hasattr(step, "_AUGMENTATION_SPACE"):  # v2
            space = step._AUGMENTATION_SPACE
            if not getattr(step, "all_ops", True):
                space = step._PARTIAL_AUGMENTATION_SPACE
            return {name: (make(bins, height, width), sign) for name, (make, sign) in space.items()}
        sizes = () if known_name(step) == "TrivialAugmentWide" else ((height, width),)
        return dict(step._augmentation_space(bins, *sizes))


def _levels(step: Any, height: int, width: int) -> Float64s:
    """Magnitudes (names, bins) for images of a size, 0 where one has none."""
    space = _augmentation_space(step, height, width)
    levels = np.zeros((len(space), _bins_of(step)))
    for row, (values, _) in zip(levels, space.values(), strict=True):
        if values is not None:
            row[:] = values.tolist()  # of any dtype
    return levels


def _timm_policies(step: Any, state: State) -> Op | State:
    need_colours(state)
    if state.kind != "pil":
        raise UnknownStepError("does not accept tensors")
    if known_name(step) == "timm.AutoAugment":
        policies = [list(map(_timm_op, policy)) for policy in step.policy]
        return choice(state, policies, code="STEP_TIMM")
    weights = step.choice_weights
    if weights is not None and step.num_layers > 1:
        raise UnknownStepError("chooses without replacement")
    ops = [[_timm_op(op)] for op in step.ops]
    for layer in range(step.num_layers):
        state = state.add(choice(state.inner(layer), ops, weights, "STEP_TIMM"))
    return state


def _timm_op(op: Any) -> Op:
    """Read an ``AugmentOp`` of timm's data/auto_augment.py, on PIL images."""
    name, ending = re.findall("(.*?)(Increasing|Original|Rel|)$", op.name)[0]
    flag = CONSTANTS.get(f"TIMM_{ending or name}", 0)
    modes = several(op.kwargs["resample"])
    filters = [interpolation_name(int(mode)).upper() for mode in modes]
    most_level = op.magnitude_max or 10
    most = op.hparams.get("translate_const", 250)
    if ending == "Rel":
        most = op.hparams.get("translate_pct", 0.45)
    return Op(
        "STEP_TIMM_OP",
        n=(CONSTANTS[f"POLICY_{name}"], 0, "PIL_DOMAIN", 0, 1, 0, flag, len(filters), *filters),
        v=tuple(map(float, (op.prob, op.magnitude, op.magnitude_std, most_level, most))),
        fill=tuple(map(float, several(op.kwargs["fillcolor"]))),
    )


# Steps of steps


def _inner_each(step: Any, state: State) -> list[Ops]:
    """Ops of each step of a step."""
    return [_inner([part], state.inner(number)) for number, part in enumerate(step.transforms)]


def _inner(steps: Iterable[Any], state: State) -> Ops:
    """Ops of steps that only some samples take, and so leave what a sample is as it was."""
    before = after = replace(state.inner(), ops=())
    steps_of = joint_steps if state.is_beside else flatten
    for step in chain.from_iterable(map(steps_of, steps)):
        try:
            after = recognise(step, after)
        except UnknownStepError as unknown:
            raise UnknownStepError(f"contains {type(step).__name__}, which {unknown}") from unknown
    if replace(after, ops=(), at=before.at) != before:
        raise UnknownStepError("changes what only some samples are")
    return after.ops


def _sometimes(read: Callable[[Any, State], Op]) -> _Reader:
    """Read what a step with a probability ``p`` does."""

    def reader(step: Any, state: State) -> Op:
        return maybe(state, [read(step, state.inner())], step.p)

    return reader


# Forms and floats


def _to_tensor(step: Any, state: State) -> State:
    """Read ToTensor, PILToTensor, and those of timm."""
    name = known_name(step).removeprefix("timm.")
    if name == "ToNumpy":
        raise UnknownStepError("makes NumPy arrays; use MaybePILToTensor")
    if state.kind != "pil":
        if not (is_v2(step) or name.startswith("Maybe")):
            raise UnknownStepError("does not accept tensors")
        return state
    state = replace(state, kind="tensor")
    if name.endswith("PILToTensor"):
        return state
    return state.add(_cast(state, torch.get_default_dtype(), "DIVIDE"))


def _dtype(step: Any, state: State) -> Op | State:
    """ToDtype, or v1's ConvertImageDtype, which always scales."""
    is_to_dtype = known_name(step) == "ToDtype"
    dtype = value_for(step.dtype, state)
    is_for_masks = isinstance(step.dtype, dict) or not is_to_dtype
    if state.is_beside and dtype is not None and is_for_masks:
        if dtype not in _MASK_DTYPES or state.floats:
            raise UnknownStepError("converts masks to a dtype that is not served")
        return _cast(state, dtype, "NONE")
    if dtype is None or state.is_beside:  # a dtype for all is for images only
        return state
    if state.kind == "pil":
        if not is_to_dtype:  # which leaves everything but tensors as it is
            need_tensor(state)
        return state
    if dtype == getattr(torch, state.dtype):
        return state
    if state.floats or dtype not in _FLOATS:
        raise UnknownStepError("converts to a dtype that is not served")
    if is_to_dtype and not step.scale:
        return _cast(state, dtype, "NONE")
    return _cast(state, dtype, "MULTIPLY" if is_v2(step) else "DIVIDE")


def _cast(state: State, dtype: torch.dtype, scaling: str) -> Op:
    name = str(dtype).removeprefix("torch.").upper()
    return state.op("OP_CAST", (name, f"SCALE_{scaling}"))


def _normalize(step: Any, state: State) -> State:
    need_tensor(state)
    if not state.floats:
        raise UnknownStepError("does not accept uint8")
    if state.is_normalized:
        raise UnknownStepError("comes after another Normalize")
    dtype = getattr(torch, state.dtype)
    given = [
        torch.as_tensor(values, dtype=dtype, device="cpu").flatten()
        for values in (step.mean, step.std)
    ]
    both = torch.stack(torch.broadcast_tensors(*given), 1)
    is_known = 1 <= len(both) <= CONSTANTS["MAX_MEANS"] and both.isfinite().all()
    if not (is_known and both[:, 1].all()):
        raise UnknownStepError("has a mean or std that is not served")
    # One channel becomes as many as there are means, where torch may broadcast.
    widens = is_v2(step) and not step.inplace
    cast, *others = state.floats
    n = (*cast.n, len(both), widens)
    normalised = replace(cast, n=n, v=tuple(both.flatten().tolist()))
    return replace(state, floats=(normalised, *others))


READERS: dict[str, _Reader] = {
    # Geometry
    "AlternatingFlip": _flip,
    "CenterCrop": _center_crop,
    "Pad": _pad,
    "RandomAffine": _affine,
    "RandomCrop": _random_crop,
    "RandomHorizontalFlip": _flip,
    "RandomPerspective": _sometimes(
        lambda step, state: _warp("OP_PERSPECTIVE", step, state, [step.distortion_scale])
    ),
    "RandomResize": _resize,
    "RandomResizedCrop": _resized_crop,
    "RandomRotation": _rotation,
    "RandomShortestSize": _resize,
    "RandomVerticalFlip": _flip,
    "Resize": _resize,
    "timm.RandomResizedCropAndInterpolation": _resized_crop,
    # Values
    **dict.fromkeys(_VALUES, _sometimes(_value)),
    "ColorJitter": lambda step, state: in_order(state, [[op] for op in _jitters(step, state)]),
    "GaussianBlur": _blur,
    "GaussianNoise": _noise,
    "Grayscale": _grayscale,
    "RGB": _rgb,
    "RandomChannelPermutation": _permute,
    "RandomErasing": _erasing,
    "RandomGrayscale": _sometimes(_grey),
    "RandomPhotometricDistort": _photometric_distort,
    "timm.RandomErasing": _timm_erasing,
    # Steps of steps
    **dict.fromkeys(_POLICIES, _auto_augment),
    "RandomApply": lambda step, state: maybe(state, _inner(step.transforms, state.inner()), step.p),
    "RandomChoice": lambda step, state: choice(state, _inner_each(step, state), step.p),
    "RandomOrder": lambda step, state: in_order(state, _inner_each(step, state)),
    "timm.AutoAugment": _timm_policies,
    "timm.RandAugment": _timm_policies,
    # Forms and floats
    "ConvertImageDtype": _dtype,
    "Identity": lambda step, state: state,
    "Normalize": _normalize,
    "PILToTensor": _to_tensor,
    "ToDtype": _dtype,
    "ToImage": lambda step, state: replace(state, kind="image"),
    "ToPureTensor": lambda step, state: (
        replace(state, kind="tensor") if state.kind == "image" else state
    ),
    "ToTensor": _to_tensor,
    "timm.MaybePILToTensor": _to_tensor,
    "timm.MaybeToTensor": _to_tensor,
    "timm.ToNumpy": _to_tensor,
}
