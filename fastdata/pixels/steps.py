"""The steps that fastdata knows, read as ops: ``READERS`` has one function for each name.

A reader looks at the attributes of the user's object, and gives the state of samples after it, or
says why it has to run as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastdata.pixels import core
from fastdata.pixels.compose import (
    Views,
    changed_part,
    flatten,
    is_v2,
    joint_steps,
    known_name,
    names_in,
    seen_through,
)
from fastdata.pixels.ops import Cast, Fill, Float64s, Op, Size, child, choice, sequence
from fastdata.pixels.state import (
    ERASE_MODE,
    State,
    UnknownStepError,
    domain_of,
    need_colours,
    need_movable,
    need_uint8,
    pair,
    read_border,
    read_borders,
    read_filters,
    read_range,
    read_warp,
    refuse,
    value_for,
)

_MASK_DTYPES = ("int64", "int32", "float32", "uint8")
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_Reader = Callable[[Any, int, State], State]


def recognise(step: Any, at: int, state: State) -> State:
    """Read one of the user's objects: the state after it, with its ops, whose draws ``at`` numbers.

    Raises:
        UnknownStepError: it has to run as it is.
    """
    refuse(type(step) is Views, "gives several views, which only the last step may")
    try:
        reader = READERS.get(known_name(step) or "")
        published = None if reader else seen_through(step, "blur")
        if published is not None:
            return _published(published, at, state)
        if reader is None:
            raise UnknownStepError(_why_unknown(step))
        if state.is_beside:
            return _read_beside(step, at, state, reader)
        refuse(
            state.kind in ("array", "mask", "video"),
            f"gets {state.kind}s, which are no images to batch ops",
        )
        return reader(step, at, state)
    except (AttributeError, TypeError, ValueError) as unread:
        raise UnknownStepError(f"has arguments that are not served: {unread}") from unread


def _why_unknown(step: Any) -> str:
    if changed_part(step) and type(step).__module__.startswith(("torchvision.", "timm.")):
        return f"has a {changed_part(step)} of its own, which fastdata does not see through"
    for name in ("transforms", "transform"):
        if hasattr(step, name):
            does = f"does more than to call its {name!r}; give that itself"
            return f"is not a known batch op, and {does}"
    return "is not a known batch op"


_MOVING = names_in(
    "CenterCrop Pad RandomAffine RandomApply RandomChoice RandomCrop RandomHorizontalFlip "
    "RandomOrder RandomPerspective RandomResize RandomResizedCrop RandomRotation "
    "RandomShortestSize RandomVerticalFlip Resize ToDtype"
)
"""What v2 does to masks as well, drawn once for both; others leave these as they are."""


def _read_beside(step: Any, at: int, state: State, reader: _Reader) -> State:
    """Read what v2 does to a mask beside its image."""
    refuse(not is_v2(step), "is not of torchvision.transforms.v2, and takes no masks")
    refuse(reader is _auto_augment, "does not accept masks")
    name = known_name(step)
    if name == "ToPureTensor":
        return replace(state, kind="tensor")
    return reader(step, at, state) if name in _MOVING and state.kind == "mask" else state


# Geometry


def _center_crop(step: Any, at: int, state: State) -> State:
    refuse(state.is_normalized, "may pad with 0 after Normalize")
    n = (0, 0, 0, 0, "PAD_CONSTANT", "PIL_DOMAIN", *pair(step.size))
    return need_movable(state).add(Op("STEP_CENTER_CROP", at, n))


def _random_crop(step: Any, at: int, state: State) -> State:
    need_movable(state)
    padding = step.padding
    if is_v2(step) and padding is not None:
        left, right, top, bottom = padding
        padding = [left, top, right, bottom]
    borders = read_borders(padding)
    pads_more = bool(step.pad_if_needed)
    border = ("PAD_CONSTANT", "PIL_DOMAIN")
    fill: Fill = (0,)
    if pads_more or any(borders):
        border, fill = read_border(step, state)
    if not is_v2(step) and border[0] != "PAD_CONSTANT" and any(borders) and pads_more:
        # v1 pads the padded image again, v2 once by the sum: it shows in all modes but constant.
        state = state.add(Op("STEP_PAD", at, (*borders, *border), fill=fill))
        borders = (0, 0, 0, 0)
    n = (*borders, *border, *pair(step.size), int(pads_more))
    return state.add(Op("STEP_CROP", at, n, fill=fill))


def _pad(step: Any, at: int, state: State) -> State:
    border, fill = read_border(step, state)
    return state.add(Op("STEP_PAD", at, (*read_borders(step.padding), *border), fill=fill))


def _resized_crop(step: Any, at: int, state: State) -> State:
    names = step.interpolation
    several = names if isinstance(names, (list, tuple)) else [names]  # timm draws one of two
    ratio = read_range(step.ratio)
    refuse(ratio[0] <= 0, f"has ratio={ratio}")
    ranges = (*read_range(step.scale), *ratio, *np.log(ratio).tolist())
    crops = []
    for name in several:
        n = (*pair(step.size), 0, 0, *read_filters(step, state, name))
        crops.append(Op("STEP_RESIZED_CROP", at, n, ranges))
    if len(crops) == 1:
        return state.add(crops[0])
    return _one_of([(crop,) for crop in crops], child(at, 0), state)


def _resize(step: Any, at: int, state: State) -> State:
    filters = read_filters(step, state, step.interpolation)
    name = known_name(step)
    longest = getattr(step, "max_size", None) or 0
    bound = 0
    sides: Sequence[int]
    if name == "RandomResize":
        longest = 0
        sides = range(step.min_size, step.max_size)
    elif name == "RandomShortestSize":
        bound = _BY_FACTOR
        sides = step.min_size
    elif isinstance(step.size, str):  # fastdata's own
        which, _, number = step.size.partition(":")
        bound = _BOUNDS[which]
        sides = [int(number)]
    else:
        sides = [step.size] if isinstance(step.size, int) else list(step.size or [])
        if len(sides) == 2:
            return state.add(Op("OP_RESIZE", at, (*pair(sides), 0, 0, *filters)))
        refuse(len(sides) != 1, f"has size={step.size!r}")
    lengths = tuple(Op("STEP_LENGTH", n=(int(side),)) for side in sides)
    return state.add(Op("OP_RESIZE", at, (0, 0, longest, bound, *filters), children=lengths))


_BY_FACTOR = 1
_BOUNDS = {"short": 2, "long": 3}
"""What OP_RESIZE of core.h calls its n[3]."""


def _rotation(step: Any, at: int, state: State) -> State:
    refuse(step.expand and state.kind != "pil", "expands tensors")
    warp = _warp("STEP_ROTATION", step, at, state, read_range(step.degrees))
    return state.add(replace(warp, n=(int(step.expand), *warp.n[1:])))


def _affine(step: Any, at: int, state: State) -> State:
    shear = (*(step.shear or ()), 0, 0, 0, 0)[:4]
    ranges = (step.degrees, step.translate or (0, 0), step.scale or (1, 1), shear[:2], shear[2:])
    return state.add(
        _warp(
            "OP_AFFINE", step, at, state, [number for each in ranges for number in read_range(each)]
        )
    )


def _perspective(step: Any, at: int, state: State) -> State:
    return state.add(_warp("OP_PERSPECTIVE", step, at, state, [float(step.distortion_scale)]))


def _warp(code: str, step: Any, at: int, state: State, ranges: Sequence[float]) -> Op:
    center = read_range(step.center) if getattr(step, "center", None) else ()
    n, fill = read_warp(step, state)
    v = (*ranges, *[0.0] * (10 - len(ranges)), *center)
    return Op(code, at, (*n[:-1], int(bool(center))), v, fill)


# Values


def _number(code: str, at: int, domain: str, low: float, high: float) -> Op:
    """An op with one number, uniform between two."""
    return Op(code, at, (0, domain), (low, high))


def _jitters(step: Any, at: int, state: State) -> list[tuple[Op, ...]]:
    """Brightness, contrast, saturation and hue of a step; no op for those that it leaves."""
    domain = domain_of(step, need_colours(state))
    ops: list[tuple[Op, ...]] = []
    for number, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        limits = getattr(step, name)
        jitter = limits and _number(
            f"OP_{name.upper()}", child(at, number), domain, *read_range(limits)
        )
        ops.append((jitter,) if jitter else ())
    return ops


def _color_jitter(step: Any, at: int, state: State) -> State:
    ops = [jitter for jitter in _jitters(step, at, state) if jitter]
    return _in_order(ops, at, state) if ops else state


def _photometric_distort(step: Any, at: int, state: State) -> State:
    def maybe(number: int, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return (choice(child(at, number), [ops], [float(step.p)]),)

    brightness, contrast, *others = (
        maybe(10 + k, ops) for k, ops in enumerate(_jitters(step, at, state))
    )
    middle = (*others[0], *others[1])
    state = replace(state, ops=(*state.ops, *brightness))
    state = _one_of([(*contrast, *middle), (*middle, *contrast)], child(at, 20), state)
    return replace(state, ops=(*state.ops, *maybe(22, (Op("OP_PERMUTE", child(at, 21)),))))


def _grey(step: Any, at: int, state: State, channels: int) -> State:
    return need_colours(state).add(Op("OP_GRAYSCALE", at, (channels, domain_of(step, state))))


def _grayscale(step: Any, at: int, state: State) -> State:
    channels = step.num_output_channels
    refuse(channels not in (1, 3), f"has num_output_channels={channels!r}")
    grey = _grey(step, at, state, channels)
    keeps_one = state.channels == 1 and domain_of(step, state) == "V1_DOMAIN"
    return grey if keeps_one else replace(grey, channels=channels)


def _rgb(step: Any, at: int, state: State) -> State:
    refuse(state.channels not in (1, 3), "makes RGB of images whose mode is not known")
    return state if state.channels == 3 else replace(_grey(step, at, state, 3), channels=3)


def _permute(step: Any, at: int, state: State) -> State:
    refuse((state.channels or 3) > 4, f"permutes {state.channels} channels")
    return need_uint8(state).add(Op("OP_PERMUTE", at))


def _blur(step: Any, at: int, state: State) -> State:
    width, height = step.kernel_size
    return need_colours(state).add(Op("OP_BLUR", at, (width, height), read_range(step.sigma)))


def _noise(step: Any, at: int, state: State) -> State:
    refuse(state.kind == "pil", "does not accept PIL images")
    refuse(state.is_normalized or state.is_erased, "comes after Normalize or erasing")
    if not state.floats:
        need_colours(state)
    gain = 1.0 if state.floats else 255.0
    return state.add(
        Op("OP_NOISE", at, (int(step.clip),), (step.mean, step.sigma, *[gain] * 4, *[0.0] * 4))
    )


def _erasing(step: Any, at: int, state: State) -> State:
    value = step.value
    fill: Fill | None = None
    if value is not None and not isinstance(value, str):
        fill = tuple(map(float, value if isinstance(value, (list, tuple)) else (value,)))
    ranges = (step.p, *read_range(step.scale), *np.log(read_range(step.ratio)).tolist())
    return _erase(at, state, ranges, (1, 1), fill, 0 if fill else 1)


def _timm_erasing(step: Any, at: int, state: State) -> State:
    refuse(step.num_splits > 1, "erases only some splits of a batch")
    mode = 1 if step.per_pixel else 2 if step.rand_color else 0
    ratio = list(map(math.exp, step.log_aspect_ratio))
    ranges = (step.probability, step.min_area, step.max_area, *np.log(ratio).tolist())
    counts = (step.min_count, step.max_count)
    return _erase(at, state, ranges, counts, None if mode else (0.0,), mode)


def _erase(
    at: int, state: State, ranges: Fill, counts: tuple[int, int], fill: Fill | None, mode: int
) -> State:
    refuse(state.kind == "pil", "does not accept PIL images")
    is_served = state.floats or (fill and all(0 <= v <= 255 for v in fill))
    refuse(not is_served, "erases uint8 with random values, or with others than 0 to 255")
    n = (*counts, 0, 0, 0, 0, mode)
    return state.add(Op("OP_ERASE", at, n, tuple(map(float, ranges)), fill or (0.0,)))


def _published(values: tuple[str, float, float, float], at: int, state: State) -> State:
    """Of what people publish for PIL images: the op, the range of its number, and the probability."""
    code, low, high, p = values
    refuse(need_colours(state).kind != "pil" or state.is_beside, "takes PIL images only")
    refuse(not 0 <= low <= high, f"blurs by {low} to {high} px")
    number = _number(code, child(at, 0), "PIL_DOMAIN", float(low), float(high))
    return state.add(choice(at, [(number,)], [float(p)]))


# Automatic augmentation

_CODES = {
    "Brightness": "OP_BRIGHTNESS",
    "Color": "OP_SATURATION",
    "Contrast": "OP_CONTRAST",
    "Sharpness": "OP_SHARPNESS",
    "AutoContrast": "OP_AUTOCONTRAST",
    "Equalize": "OP_EQUALIZE",
    "Invert": "OP_INVERT",
    "Posterize": "OP_POSTERIZE",
    "Solarize": "OP_SOLARIZE",
    "ShearX": "STEP_SHEAR_X",
    "ShearY": "STEP_SHEAR_Y",
    "TranslateX": "STEP_TRANSLATE_X",
    "TranslateY": "STEP_TRANSLATE_Y",
    "Rotate": "STEP_ROTATE",
}
_TORCHVISION_CODES = {**_CODES, "Identity": "OP_NOTHING"}
_TIMM_CODES = {
    **_CODES,
    "Desaturate": "OP_SATURATION",
    "SolarizeAdd": "OP_SOLARIZE_ADD",
    "GaussianBlur": "OP_BOX_BLUR",
    "GaussianBlurRand": "OP_BOX_BLUR",
}
_TIMM_SUFFIXES = {
    "Increasing": "TIMM_INCREASING",
    "Original": "TIMM_ORIGINAL",
    "Rel": "TIMM_RELATIVE",
}
_TIMM_BITS = {"Desaturate": "TIMM_DESATURATES", "GaussianBlurRand": "TIMM_DRAWS"}
_AUTO_BINS = 10
_ANY_PX = 1
_PIL_FILTERS = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC")


def _auto_augment(step: Any, at: int, state: State) -> State:
    mixes = known_name(step) == "AugMix"  # which makes tensors of PIL images
    n, fill = read_warp(step, replace(state, kind="tensor") if mixes else state)
    return state.add(read_augment(step, at, n, fill))


class Space:
    """What a step of torchvision, the user's own, chooses from, and how far: it depends on the size of the image."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.bins: int = getattr(step, "num_magnitude_bins", _AUTO_BINS)

    def levels(self, height: int, width: int) -> Float64s:
        """Magnitudes (names, bins), 0 where one has none."""
        table = self.table((height, width))
        return np.stack([np.zeros(self.bins) + _values(values) for values, _ in table.values()])

    def table(self, size: Size) -> dict[str, tuple[Any, bool]]:
        """Names of ops, the same for all sizes -> magnitudes, and if it takes a sign."""
        step, bins = self.step, self.bins
        if hasattr(step, "_AUGMENTATION_SPACE"):  # v2
            every = getattr(step, "all_ops", True)
            space = step._AUGMENTATION_SPACE if every else step._PARTIAL_AUGMENTATION_SPACE
            return {
                name: (function(bins, *size), signed) for name, (function, signed) in space.items()
            }
        depends_on_size = any(hasattr(step, name) for name in ("magnitude", "policies", "severity"))
        drawn: dict[str, tuple[Any, bool]] = step._augmentation_space(
            *((bins, size) if depends_on_size else (bins,))
        )
        return drawn

    def magnitudes(self) -> dict[str, Op]:
        """Names of ops -> what the core chooses from.

        Raises:
            ValueError: one is not known.
        """
        ops = {}
        for row, (name, (_, is_signed)) in enumerate(self.table((_ANY_PX, _ANY_PX)).items()):
            if name not in _TORCHVISION_CODES:
                raise ValueError(f"the op {name!r} is not known")
            ops[name] = Op("STEP_MAGNITUDE", n=(_TORCHVISION_CODES[name], int(is_signed), 0, row))
        return ops


def _values(values: Any) -> Any:
    return 0.0 if values is None else values.double().numpy()


def read_augment(step: Any, at: int, warp: tuple[int | str, ...], fill: Fill) -> Op:
    """RandAugment, TrivialAugmentWide, AutoAugment or AugMix; ``warp`` and ``fill`` are those of all its warps."""
    space = Space(step)
    magnitudes = space.magnitudes()
    is_share = int(hasattr(step, "_AUGMENTATION_SPACE"))  # thresholds, of v2
    common: dict[str, Any] = {"at": at, "fill": fill, "about": space}
    policies = getattr(step, "policies", None) or getattr(step, "_policies", None)
    if policies:
        pairs = tuple(_policy(magnitudes, *each) for policy in policies for each in policy)
        return Op("STEP_POLICIES", n=(*warp, 0, space.bins, 0, is_share), children=pairs, **common)
    children = tuple(magnitudes.values())
    if hasattr(step, "severity"):
        counts = (step.mixture_width, space.bins, step.severity, is_share, max(0, step.chain_depth))
        return Op(
            "STEP_AUG_MIX",
            n=(*warp, *counts),
            v=(float(step.alpha),),
            children=children,
            **common,
        )
    fixed = getattr(step, "magnitude", -1)
    drawn = (getattr(step, "num_ops", 1), space.bins, fixed, is_share)
    return Op("STEP_AUGMENT", n=(*warp, *drawn), children=children, **common)


def _policy(magnitudes: dict[str, Op], name: str, p: float, bin: int | None) -> Op:
    code, is_signed, _, row = magnitudes[name].n
    return Op("STEP_MAGNITUDE", n=(code, is_signed, bin or 0, row), v=(float(p),))


def read_timm_op(op: Any) -> Op:
    """Read an ``AugmentOp`` of timm's data/auto_augment.py, on PIL images.

    Raises:
        ValueError: its name is not known.
    """
    numbers = core.constants()
    bits, base = 0, op.name
    for suffix, name in _TIMM_SUFFIXES.items():
        bits |= numbers[name] * base.endswith(suffix)
        base = base.removesuffix(suffix)
    if base not in _TIMM_CODES:
        raise ValueError(f"the op {op.name!r} is not known")
    bits |= numbers.get(_TIMM_BITS.get(base, ""), 0)
    resample, fill = op.kwargs["resample"], op.kwargs["fillcolor"]
    several = resample if isinstance(resample, (list, tuple)) else (resample,)
    filters = [_PIL_FILTERS[int(mode)] for mode in several]
    is_relative = op.name.endswith("Rel")
    most = op.hparams.get(*(("translate_pct", 0.45) if is_relative else ("translate_const", 250)))
    magnitude = (op.prob, op.magnitude, op.magnitude_std, op.magnitude_max or 10.0, most)
    return Op(
        "STEP_TIMM_OP",
        n=(_TIMM_CODES[base], 0, "PIL_DOMAIN", 0, 1, 0, bits, len(several), *filters),
        v=tuple(map(float, magnitude)),
        fill=tuple(map(float, fill if isinstance(fill, (list, tuple)) else (fill,))),
    )


# Steps of steps


def _inners(step: Any, at: int, state: State) -> list[tuple[Op, ...]]:
    return [_inner([part], child(at, number), state) for number, part in enumerate(step.transforms)]


def _inner(steps: Sequence[Any], at: int, state: State) -> tuple[Op, ...]:
    """Ops of steps that only some samples take, and so leave what a sample is as it was."""
    before = after = replace(state, ops=())
    steps_of = joint_steps if state.is_beside else flatten
    for number, step in enumerate(step for part in steps for step in steps_of(part)):
        try:
            after = recognise(step, child(at, number), after)
        except UnknownStepError as unknown:
            raise UnknownStepError(f"contains {type(step).__name__}, which {unknown}") from unknown
    refuse(replace(after, ops=()) != before, "changes what only some samples are")
    return after.ops


def _one_of(
    sequences: Sequence[tuple[Op, ...]], at: int, state: State, weights: Any = None
) -> State:
    return state.add(choice(at, sequences, _shares(len(sequences), weights)))


def _in_order(sequences: Sequence[tuple[Op, ...]], at: int, state: State) -> State:
    return state.add(Op("STEP_ORDER", at, children=tuple(map(sequence, sequences))))


def _shares(count: int, weights: Any = None) -> tuple[float, ...]:
    """Where in [0, 1) the share of each ends."""
    ends = np.cumsum([1.0] * count if weights is None else [float(weight) for weight in weights])
    return (*(ends[:-1] / ends[-1]).tolist(), 1.0)


# Forms and floats


def _reform(step: Any, at: int, state: State) -> State:
    name = (known_name(step) or "").removeprefix("timm.")
    if name == "ToImage":
        return replace(state, kind="image")
    if name == "ToPureTensor":
        return replace(state, kind="tensor") if state.kind == "image" else state
    if name == "Identity":
        return state
    fast_collate = "timm's fast collate then stacks them"
    refuse(name == "ToNumpy", f"makes NumPy arrays ({fast_collate}); use MaybePILToTensor")
    if state.kind != "pil":
        refuse(not (is_v2(step) or name.startswith("Maybe")), "does not accept tensors")
        return state
    state = replace(state, kind="tensor")
    if name.endswith("PILToTensor"):
        return state
    return _cast(at, state, torch.get_default_dtype(), "divide")


def _dtype(step: Any, at: int, state: State) -> State:
    is_to_dtype, dtype = known_name(step) == "ToDtype", value_for(step.dtype, state, "dtypes")
    if state.is_beside and dtype is not None and isinstance(step.dtype, dict):
        name = _dtype_name(dtype)
        refuse(state.floats or name not in _MASK_DTYPES, f"converts masks to {dtype}")
        return replace(state, floats=(Cast(name).op(at),))
    if dtype is None or state.is_beside:
        return state
    if state.kind == "pil":
        refuse(not is_to_dtype, "does not accept PIL images")
        return state  # ToDtype leaves everything but tensors as it is
    if dtype == getattr(torch, state.dtype):
        return state
    refuse(state.dtype != "uint8", f"converts {state.dtype} to {dtype}")
    scaling = "multiply" if is_v2(step) else "divide"
    return _cast(at, state, dtype, "none" if is_to_dtype and not step.scale else scaling)


def _cast(at: int, state: State, dtype: Any, scaling: str) -> State:
    refuse(_dtype_name(dtype) not in _FLOATS, f"converts to {dtype}")
    return state.add(Cast(_dtype_name(dtype), scaling).op(at))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _normalize(step: Any, at: int, state: State) -> State:
    refuse(state.kind == "pil", "does not accept PIL images")
    refuse(not state.floats, "does not accept uint8")
    refuse(state.is_noisy and state.is_erased, "comes after random values")
    dtype = getattr(torch, state.dtype)
    mean, std = (
        torch.as_tensor(values, dtype=dtype).reshape(-1).tolist()
        for values in (step.mean, step.std)
    )
    lengths_agree = len(mean) == len(std) or 1 in (len(mean), len(std))
    if not (lengths_agree and all(map(math.isfinite, (*mean, *std))) and all(std)):
        raise UnknownStepError(f"has mean={step.mean} and std={step.std}")
    count = max(len(mean), len(std))
    mean, std = mean * (count // len(mean)), std * (count // len(std))
    (op, *others), cast = state.floats, state.cast
    assert cast is not None
    normalization = tuple(mean), tuple(std), is_v2(step) and not step.inplace
    cast = replace(cast, normalizations=(*cast.normalizations, normalization))
    return replace(state, floats=(cast.op(op.at), *(_normalized(op, mean, std) for op in others)))


def _normalized(op: Op, mean: Sequence[float], std: Sequence[float]) -> Op:
    """An op among floats after a Normalize that comes later."""
    if op.code == "OP_ERASE":
        return op if op.n[ERASE_MODE] else replace(op, fill=_normalize_each(op.fill, mean, std))
    (noise_mean, sigma), gain, low = op.v[:2], op.v[2:6], op.v[6:10]
    four_means, four_stds = ([*values, *[values[-1]] * 3][:4] for values in (mean, std))
    gain = _normalize_each(gain, [0.0] * 4, four_stds)
    low = _normalize_each(low, four_means, four_stds)
    return replace(op, v=(noise_mean, sigma, *gain, *low))


def _normalize_each(values: Fill, mean: Sequence[float], std: Sequence[float]) -> Fill:
    count = max(len(mean), len(values))
    each = zip(*(list(given) * (count // len(given)) for given in (values, mean, std)), strict=True)
    return tuple((value - less) / by for value, less, by in each)


def _timm_policies(step: Any, at: int, state: State) -> State:
    refuse(need_colours(state).kind != "pil", "does not accept tensors")
    if known_name(step) == "timm.AutoAugment":
        policies = [[read_timm_op(op) for op in policy] for policy in step.policy]
        return state.add(choice(at, policies, _shares(len(policies)), "STEP_TIMM"))
    for layer in range(step.num_layers):
        refuse(
            step.choice_weights is not None and step.num_layers > 1, "chooses without replacement"
        )
        policies = [[read_timm_op(op)] for op in step.ops]
        upto = _shares(len(policies), step.choice_weights)
        state = state.add(choice(child(at, layer), policies, upto, "STEP_TIMM"))
    return state


def _sometimes(read: _Reader) -> _Reader:
    """Read what a step with a probability ``p`` does."""

    def reader(step: Any, at: int, state: State) -> State:
        ops = read(step, child(at, 0), replace(state, ops=())).ops
        return state.add(choice(at, [ops], [float(step.p)]))

    return reader


def _value(code: str, attribute: str = "") -> _Reader:
    """Read a step that has one number."""

    def reader(step: Any, at: int, state: State) -> State:
        number = float(getattr(step, attribute, 0.0))
        return need_colours(state).add(_number(code, at, domain_of(step, state), number, number))

    return _sometimes(reader)


def _flip(vertical: bool) -> _Reader:
    return lambda step, at, state: need_movable(state).add(
        Op("STEP_FLIP", at, (int(vertical),), (float(step.p),))
    )


READERS: dict[str, _Reader] = {
    # Geometry
    "AlternatingFlip": lambda step, at, state: need_movable(state).add(Op("STEP_FLIP", at, (0, 1))),
    "CenterCrop": _center_crop,
    "Pad": _pad,
    "RandomAffine": _affine,
    "RandomCrop": _random_crop,
    "RandomHorizontalFlip": _flip(vertical=False),
    "RandomPerspective": _sometimes(_perspective),
    "RandomResizedCrop": _resized_crop,
    "RandomRotation": _rotation,
    "RandomVerticalFlip": _flip(vertical=True),
    **dict.fromkeys(("Resize", "RandomResize", "RandomShortestSize"), _resize),
    "timm.RandomResizedCropAndInterpolation": _resized_crop,
    # Values
    "ColorJitter": _color_jitter,
    "GaussianBlur": _blur,
    "GaussianNoise": _noise,
    "Grayscale": _grayscale,
    "RGB": _rgb,
    "RandomAdjustSharpness": _value("OP_SHARPNESS", "sharpness_factor"),
    "RandomAutocontrast": _value("OP_AUTOCONTRAST"),
    "RandomChannelPermutation": _permute,
    "RandomEqualize": _value("OP_EQUALIZE"),
    "RandomGrayscale": _sometimes(lambda step, at, state: _grey(step, at, state, 0)),
    "RandomInvert": _value("OP_INVERT"),
    "RandomPhotometricDistort": _photometric_distort,
    "RandomPosterize": _value("OP_POSTERIZE", "bits"),
    "RandomSolarize": _value("OP_SOLARIZE", "threshold"),
    "RandomErasing": _erasing,
    "timm.RandomErasing": _timm_erasing,
    # Steps of steps
    **dict.fromkeys(("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide"), _auto_augment),
    **dict.fromkeys(("timm.AutoAugment", "timm.RandAugment"), _timm_policies),
    "RandomApply": _sometimes(
        lambda step, at, state: replace(state, ops=_inner(list(step.transforms), at, state))
    ),
    "RandomChoice": lambda step, at, state: _one_of(_inners(step, at, state), at, state, step.p),
    "RandomOrder": lambda step, at, state: _in_order(_inners(step, at, state), at, state),
    # Forms and floats
    **dict.fromkeys(("ConvertImageDtype", "ToDtype"), _dtype),
    **dict.fromkeys(("Identity", "PILToTensor", "ToImage", "ToPureTensor", "ToTensor"), _reform),
    **dict.fromkeys(("timm.MaybePILToTensor", "timm.MaybeToTensor", "timm.ToNumpy"), _reform),
    "Normalize": _normalize,
}
