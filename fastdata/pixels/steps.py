"""The steps that fastdata knows, read as ops: ``READERS`` has one function for each name.

A reader looks at the attributes of the user's object, and gives the state of samples after it, or
says why it has to run as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastdata.pixels.augment import read_augment, read_timm_op
from fastdata.pixels.compose import (
    Views,
    changed_part,
    flatten,
    is_library,
    is_v2,
    joint_steps,
    known_name,
    names_in,
    seen_through,
)
from fastdata.pixels.images import Form, tensor_class
from fastdata.pixels.ops import MODES, Cast, Domain, Fill, Op, child, choice, domain_name, sequence

_PIL_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_TENSOR_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")
_MASK_DTYPES = ("int64", "int32", "float32", "uint8")
_FLOATS = ("float32", "float64", "float16", "bfloat16")
_ERASE_MODE = 6
"""Place among an erasing's numbers of what it fills with: 0, its fill; 1 and 2, normal numbers."""


class UnknownStepError(Exception):
    """A step that must run as the user wrote it; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a sample is before a step, and the ops that made it so."""

    kind: Form
    channels: int | None = None
    ops: tuple[Op, ...] = ()
    """On uint8."""
    floats: tuple[Op, ...] = ()
    """The conversion to floats, with all normalisations, and what runs after it."""
    is_beside: bool = False
    """Whether it is the mask of an image, that v2 takes the same steps with."""

    @property
    def dtype(self) -> str:
        return self.cast.dtype if self.cast else "uint8"

    @property
    def cast(self) -> Cast | None:
        return self.floats[0].about if self.floats else None

    @property
    def is_normalized(self) -> bool:
        return bool(self.cast and self.cast.normalizations)

    @property
    def is_erased(self) -> bool:
        """Whether rectangles among the floats are."""
        return any(op.code == "OP_ERASE" for op in self.floats)

    @property
    def is_noisy(self) -> bool:
        """Whether random numbers lie among the floats."""
        return any(
            op.code == "OP_NOISE" or (op.code == "OP_ERASE" and op.n[_ERASE_MODE])
            for op in self.floats
        )

    def add(self, op: Op) -> State:
        if op.code == "OP_CAST" or (self.floats and op.code in ("OP_ERASE", "OP_NOISE")):
            return replace(self, floats=(*self.floats, op))
        # What moves pixels is done before the conversion, with which it commutes: its reader admits
        # nothing else.
        return replace(self, ops=(*self.ops, op))


def recognise(step: Any, at: int, state: State) -> State:
    """Read one of the user's objects: the state after it, with its ops, whose draws ``at`` numbers.

    Raises:
        UnknownStepError: it has to run as it is.
    """
    _refuse(type(step) is Views, "gives several views, which only the last step may")
    try:
        reader = READERS.get(known_name(step) or "")
        published = None if reader else seen_through(step, "blur")
        if published is not None:
            return _published(published, at, state)
        if reader is None:
            raise UnknownStepError(_why_unknown(step))
        if state.is_beside:
            return _read_beside(step, at, state, reader)
        _refuse(
            state.kind in ("array", "mask", "video"),
            f"gets {state.kind}s, which are no images to batch ops",
        )
        return reader(step, at, state)
    except (AttributeError, TypeError, ValueError) as unread:
        raise UnknownStepError(f"has arguments that are not served: {unread}") from unread


def _why_unknown(step: Any) -> str:
    changed = changed_part(step) if is_library(step) else ""
    if changed:
        return f"has a {changed} of its own, which fastdata does not see through"
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
    _refuse(not is_v2(step), "is not of torchvision.transforms.v2, and takes no masks")
    _refuse(reader is _auto_augment, "does not accept masks")
    name = known_name(step)
    if name == "ToPureTensor":
        return replace(state, kind="tensor")
    return reader(step, at, state) if name in _MOVING and state.kind == "mask" else state


# Geometry


def _center_crop(step: Any, at: int, state: State) -> State:
    _refuse(state.is_normalized, "may pad with 0 after Normalize")
    height, width = pair(step.size)
    return _movable(state).add(
        Op("STEP_CENTER_CROP", at, (0, 0, 0, 0, "PAD_CONSTANT", "PIL_DOMAIN", height, width))
    )


def _random_crop(step: Any, at: int, state: State) -> State:
    _movable(state)
    height, width = pair(step.size)
    borders = _borders(step.padding)
    if is_v2(step) and step.padding is not None:
        left, right, top, bottom = step.padding
        borders = _borders((left, top, right, bottom))
    pads_more = bool(step.pad_if_needed)
    border: tuple[str, str] = ("PAD_CONSTANT", "PIL_DOMAIN")
    fill: Fill = (0,)
    if pads_more or any(borders):
        border, fill = _border(step, state)
        if not is_v2(step) and border[0] != "PAD_CONSTANT" and any(borders) and pads_more:
            # v1 pads the padded image again, v2 pads once by the sum; it shows in all modes but
            # constant.
            state, borders = (
                state.add(Op("STEP_PAD", at, (*borders, *border), fill=fill)),
                (0, 0, 0, 0),
            )
    return state.add(
        Op("STEP_CROP", at, (*borders, *border, height, width, int(pads_more)), fill=fill)
    )


def _pad(step: Any, at: int, state: State) -> State:
    border, fill = _border(step, state)
    return state.add(Op("STEP_PAD", at, (*_borders(step.padding), *border), fill=fill))


def _resized_crop(step: Any, at: int, state: State) -> State:
    names = step.interpolation
    several = names if isinstance(names, (list, tuple)) else [names]  # timm draws one of two
    (height, width), scale, ratio = pair(step.size), _range(step.scale), _range(step.ratio)
    _refuse(ratio[0] <= 0, f"has ratio={ratio}")
    ranges = (*scale, *ratio, *np.log(ratio).tolist())
    crops = [
        Op("STEP_RESIZED_CROP", at, (height, width, 0, 0, *_filters(step, state, name)), ranges)
        for name in several
    ]
    return (
        state.add(crops[0])
        if len(crops) == 1
        else _one_of([(crop,) for crop in crops], child(at, 0), state)
    )


def _resize(step: Any, at: int, state: State) -> State:
    filters, name = _filters(step, state, step.interpolation), known_name(step)

    def resize(sides: Sequence[int], longest: int | None = None, bound: int = 0) -> State:
        lengths = tuple(Op("STEP_LENGTH", n=(side,)) for side in sides)
        return state.add(
            Op("OP_RESIZE", at, (0, 0, longest or 0, bound, *filters), children=lengths)
        )

    if name == "RandomResize":
        return resize(range(step.min_size, step.max_size))
    if name == "RandomShortestSize":
        return resize(step.min_size, step.max_size, _BY_FACTOR)
    if isinstance(step.size, str):  # fastdata's own
        which, _, number = step.size.partition(":")
        return resize([int(number)], bound=_BOUNDS[which])
    sides = [step.size] if isinstance(step.size, int) else list(step.size or [])
    if len(sides) == 2:
        return state.add(Op("OP_RESIZE", at, (*pair(sides), 0, 0, *filters)))
    _refuse(len(sides) != 1, f"has size={step.size!r}")
    return resize([int(sides[0])], step.max_size)


_BY_FACTOR = 1
_BOUNDS = {"short": 2, "long": 3}
"""What OP_RESIZE of core.h calls its n[3]."""


def _rotation(step: Any, at: int, state: State) -> State:
    _refuse(step.expand and _domain(step, state) != "pil", "expands tensors")
    return state.add(
        _warp("STEP_ROTATION", step, at, state, _range(step.degrees), expands=bool(step.expand))
    )


def _affine(step: Any, at: int, state: State) -> State:
    shear = (*(step.shear or ()), 0, 0, 0, 0)[:4]
    ranges = (step.degrees, step.translate or (0, 0), step.scale or (1, 1), shear[:2], shear[2:])
    return state.add(
        _warp("OP_AFFINE", step, at, state, [number for each in ranges for number in _range(each)])
    )


def _perspective(step: Any, at: int, state: State) -> State:
    return state.add(_warp("OP_PERSPECTIVE", step, at, state, [float(step.distortion_scale)]))


def _warp(
    code: str, step: Any, at: int, state: State, ranges: Sequence[float], *, expands: bool = False
) -> Op:
    center = _range(step.center) if getattr(step, "center", None) else ()
    warp = _warped(step, state)
    _, *how = warp["n"]
    how[-1] = int(bool(center))
    return Op(
        code,
        at,
        (int(expands), *how),
        (*ranges, *[0.0] * (10 - len(ranges)), *center),
        warp["fill"],
    )


# Values

_JITTERED = ("brightness", "contrast", "saturation", "hue")


def _number(code: str, at: int, domain: Domain, low: float = 0.0, high: float = 0.0) -> Op:
    """An op with one number, uniform between two."""
    return Op(code, at, (0, domain_name(domain)), (low, high))


def _jitters(step: Any, at: int, state: State) -> list[tuple[Op, ...]]:
    """Brightness, contrast, saturation and hue of a step that has ranges of these; none for those that it leaves."""
    ops: list[tuple[Op, ...]] = []
    domain = _domain(step, _colours(state))
    for number, name in enumerate(_JITTERED):
        limits = getattr(step, name)
        code = f"OP_{name.upper()}"
        ops.append(
            () if limits is None else (_number(code, child(at, number), domain, *_range(limits)),)
        )
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


def _grayscale(step: Any, at: int, state: State) -> State:
    _colours(state)
    channels, domain = step.num_output_channels, _domain(step, state)
    _refuse(channels not in (1, 3), f"has num_output_channels={channels!r}")
    state = state.add(Op("OP_GRAYSCALE", at, (channels, domain_name(domain))))
    return state if domain == "v1" and state.channels == 1 else replace(state, channels=channels)


def _rgb(step: Any, at: int, state: State) -> State:
    _refuse(state.channels not in (1, 3), "makes RGB of images whose mode is not known")
    if state.channels == 3:
        return state
    domain = _domain(step, _colours(state))
    return replace(state.add(Op("OP_GRAYSCALE", at, (3, domain_name(domain)))), channels=3)


def _random_grayscale(step: Any, at: int, state: State) -> State:
    domain = _domain(step, _colours(state))
    return state.add(Op("OP_GRAYSCALE", at, (0, domain_name(domain))))


def _permute(step: Any, at: int, state: State) -> State:
    _refuse((state.channels or 3) > 4, f"permutes {state.channels} channels")
    return _uint8(state).add(Op("OP_PERMUTE", at))


def _blur(step: Any, at: int, state: State) -> State:
    width, height = step.kernel_size
    return _colours(state).add(Op("OP_BLUR", at, (width, height), _range(step.sigma)))


def _noise(step: Any, at: int, state: State) -> State:
    _refuse(state.kind == "pil", "does not accept PIL images")
    _refuse(state.is_normalized or state.is_erased, "comes after Normalize or erasing")
    if not state.floats:
        _colours(state)
    gain = 1.0 if state.floats else 255.0
    return state.add(
        Op("OP_NOISE", at, (int(step.clip),), (step.mean, step.sigma, *[gain] * 4, *[0.0] * 4))
    )


def _erasing(step: Any, at: int, state: State) -> State:
    _refuse(state.kind == "pil", "does not accept PIL images")
    fill: Fill | None
    per_pixel, counts = True, (1, 1)
    if known_name(step) == "timm.RandomErasing":
        _refuse(step.num_splits > 1, "erases only some splits of a batch")
        p, scale = step.probability, (step.min_area, step.max_area)
        low, high = map(math.exp, step.log_aspect_ratio)
        fill, per_pixel = (
            None if step.per_pixel or step.rand_color else (0.0,),
            bool(step.per_pixel),
        )
        ratio, counts = (low, high), (step.min_count, step.max_count)
    else:
        p, scale, ratio, value = step.p, _range(step.scale), _range(step.ratio), step.value
        values = value if isinstance(value, (list, tuple)) else (value,)
        fill = None if value is None or isinstance(value, str) else tuple(map(float, values))
    if not state.floats and (fill is None or not all(0 <= v <= 255 for v in fill)):
        raise UnknownStepError("erases uint8 with random values, or with others than 0 to 255")
    mode = 0 if fill is not None else 1 if per_pixel else 2
    ranges = (float(p), *map(float, scale), *np.log(ratio).tolist())
    return state.add(Op("OP_ERASE", at, (*counts, 0, 0, 0, 0, mode), ranges, fill or (0.0,)))


def _published(values: tuple[str, float, float, float], at: int, state: State) -> State:
    """Of what people publish for PIL images: the op, the range of its number, and the probability."""
    code, low, high, p = values
    _refuse(_colours(state).kind != "pil" or state.is_beside, "takes PIL images only")
    _refuse(not 0 <= low <= high, f"blurs by {low} to {high} px")
    number = _number(code, child(at, 0), "pil", float(low), float(high))
    return state.add(choice(at, [(number,)], [float(p)]))


# Automatic augmentation


def _auto_augment(step: Any, at: int, state: State) -> State:
    mixes = known_name(step) == "AugMix"  # which makes tensors of PIL images
    warp = _warped(step, replace(state, kind="tensor") if mixes else state)
    return state.add(read_augment(step, at, warp))


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
    _refuse(replace(after, ops=()) != before, "changes what only some samples are")
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
        return replace(state, kind="tensor" if state.kind == "image" else state.kind)
    if name == "Identity":
        return state
    _refuse(
        name == "ToNumpy",
        "makes NumPy arrays (timm's fast collate then stacks them); use MaybePILToTensor",
    )
    if state.kind != "pil":
        _refuse(not (is_v2(step) or name.startswith("Maybe")), "does not accept tensors")
        return state
    state = replace(state, kind="tensor")
    return (
        state
        if name.endswith("PILToTensor")
        else _cast(at, state, torch.get_default_dtype(), "divide")
    )


def _dtype(step: Any, at: int, state: State) -> State:
    is_to_dtype, dtype = known_name(step) == "ToDtype", _of_kind(step.dtype, state, "dtypes")
    if state.is_beside and dtype is not None and isinstance(step.dtype, dict):
        name = _dtype_name(dtype)
        _refuse(state.floats or name not in _MASK_DTYPES, f"converts masks to {dtype}")
        return replace(state, floats=(Cast(name).op(at),))
    if dtype is None or state.is_beside:
        return state
    if state.kind == "pil":
        _refuse(not is_to_dtype, "does not accept PIL images")
        return state  # ToDtype leaves everything but tensors as it is
    if dtype == getattr(torch, state.dtype):
        return state
    _refuse(state.dtype != "uint8", f"converts {state.dtype} to {dtype}")
    scaling = "multiply" if is_v2(step) else "divide"
    return _cast(at, state, dtype, "none" if is_to_dtype and not step.scale else scaling)


def _cast(at: int, state: State, dtype: Any, scaling: str) -> State:
    _refuse(_dtype_name(dtype) not in _FLOATS, f"converts to {dtype}")
    return state.add(Cast(_dtype_name(dtype), scaling).op(at))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _normalize(step: Any, at: int, state: State) -> State:
    _refuse(state.kind == "pil", "does not accept PIL images")
    _refuse(not state.floats, "does not accept uint8")
    _refuse(state.is_noisy and state.is_erased, "comes after random values")
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
        return op if op.n[_ERASE_MODE] else replace(op, fill=_normalize_each(op.fill, mean, std))
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
    _refuse(_colours(state).kind != "pil", "does not accept tensors")
    if known_name(step) == "timm.AutoAugment":
        policies = [[read_timm_op(op) for op in policy] for policy in step.policy]
        return state.add(choice(at, policies, _shares(len(policies)), "STEP_TIMM"))
    for layer in range(step.num_layers):
        _refuse(
            step.choice_weights is not None and step.num_layers > 1, "chooses without replacement"
        )
        policies = [[read_timm_op(op)] for op in step.ops]
        upto = _shares(len(policies), step.choice_weights)
        state = state.add(choice(child(at, layer), policies, upto, "STEP_TIMM"))
    return state


_Reader = Callable[[Any, int, State], State]


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
        return _colours(state).add(_number(code, at, _domain(step, state), number, number))

    return _sometimes(reader)


def _flip(vertical: bool) -> _Reader:
    return lambda step, at, state: _movable(state).add(
        Op("STEP_FLIP", at, (int(vertical),), (float(step.p),))
    )


READERS: dict[str, _Reader] = {
    # Geometry
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
    "RandomGrayscale": _sometimes(_random_grayscale),
    "RandomInvert": _value("OP_INVERT"),
    "RandomPhotometricDistort": _photometric_distort,
    "RandomPosterize": _value("OP_POSTERIZE", "bits"),
    "RandomSolarize": _value("OP_SOLARIZE", "threshold"),
    **dict.fromkeys(("RandomErasing", "timm.RandomErasing"), _erasing),
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


# Arguments


def pair(size: Any) -> tuple[int, int]:
    values = [size] if isinstance(size, int) else list(size)
    _refuse(
        len(values) not in (1, 2) or not all(isinstance(v, int) for v in values),
        f"has size={size!r}",
    )
    return values[0], values[-1]


def interpolation_name(mode: Any) -> str:
    name = _PIL_INTERPOLATIONS[mode] if isinstance(mode, int) else str(getattr(mode, "value", mode))
    _refuse(name not in (*_PIL_INTERPOLATIONS, "nearest-exact"), f"has interpolation={mode!r}")
    return name


def _refuse(wrong: Any, reason: str) -> None:
    if wrong:
        raise UnknownStepError(reason)


def _uint8(state: State) -> State:
    _refuse(state.floats, f"comes after the conversion to {state.dtype}")
    return state


def _colours(state: State) -> State:
    _refuse(state.channels not in (None, 1, 3), f"gets images of {state.channels} channels")
    return _uint8(state)


def _movable(state: State) -> State:
    """Geometry written after the conversion is done before it; erased rectangles and noise would not move along."""
    _refuse(state.is_erased or state.is_noisy, "comes after erasing or noise among floats")
    return state


def _of_kind(value: Any, state: State, what: str) -> Any:
    """What a step of v2 says of such a sample, where it has a dict by types."""
    if not isinstance(value, dict):
        return value
    kind = "PIL.Image" if state.kind == "pil" else tensor_class(state.kind)
    for key, given in value.items():
        if kind in (key, getattr(key, "__module__", None)):
            return given
    _refuse("others" not in value, f"has a dict of {what} with none for such samples")
    return value["others"]


def _domain(step: Any, state: State) -> Domain:
    if state.kind == "pil":
        return "pil"
    return "v2" if is_v2(step) else "v1"


def _filters(step: Any, state: State, interpolation: Any) -> tuple[str, str]:
    _uint8(state)
    if state.is_beside:
        return "NEAREST", "V2_DOMAIN"
    domain, name = _domain(step, state), interpolation_name(interpolation)
    _refuse(
        domain != "pil" and name not in _TENSOR_INTERPOLATIONS,
        f"resizes tensors with interpolation={name!r}",
    )
    _refuse(
        domain != "pil" and "nearest" not in name and not step.antialias,
        "resizes tensors without antialias",
    )
    return name.upper().replace("-", "_"), domain_name(domain)


def _warped(step: Any, state: State) -> dict[str, Any]:
    """What core.h calls "warp", from ``n[0]`` on, and the fill."""
    _colours(state)
    domain, name = _domain(step, state), interpolation_name(step.interpolation)
    name = "nearest" if state.is_beside else name
    if name not in ("nearest", "bilinear", "bicubic") or (domain != "pil" and name == "bicubic"):
        raise UnknownStepError(f"has interpolation={name!r}")
    is_filled = _drawn_fill(step, state) is not None
    numbers = (
        0,
        name.upper().replace("-", "_"),
        domain_name(domain),
        int(is_v2(step)),
        int(is_filled),
        0,
    )
    return {"n": numbers, "fill": _fill(step, state, "pil", "constant") if is_filled else (0,)}


def _border(step: Any, state: State) -> tuple[tuple[str, str], Fill]:
    """Mode and domain, and the fill. Padding after a conversion is done before it, where that gives the same."""
    _movable(state)
    domain, mode = _domain(step, state), step.padding_mode
    _refuse(mode not in MODES, f"has padding_mode={mode!r}")
    fill = _fill(step, state, domain, mode)
    if state.floats and mode == "constant" and (any(fill) or state.is_normalized):
        raise UnknownStepError(
            f"pads with a constant after {'Normalize' if state.is_normalized else 'the conversion to float'}"
        )
    return (f"PAD_{mode.upper()}", domain_name(domain)), fill


def _borders(padding: Any) -> tuple[int, int, int, int]:
    values = [0] if padding is None else [padding] if isinstance(padding, int) else list(padding)
    if len(values) not in (1, 2, 4) or not all(isinstance(v, int) and v >= 0 for v in values):
        raise UnknownStepError(f"has padding={padding!r}")
    left, top, right, bottom = values * (4 // len(values))
    return left, top, right, bottom


def _drawn_fill(step: Any, state: State) -> Any:
    """What a step fills with: v2's look at ``_fill``, which they made of ``fill``, and never at that again."""
    return _of_kind(getattr(step, "_fill", step.fill), state, "fill values")


def _fill(step: Any, state: State, domain: Domain, mode: str) -> Fill:
    fill = _drawn_fill(step, state)
    is_sequence = isinstance(fill, (list, tuple))
    _refuse(is_sequence and state.is_beside, f"has fill={step.fill!r} for masks")
    if is_sequence and (
        domain == "v1" or (domain == "v2" and mode != "constant" and len(fill) > 1)
    ):
        raise UnknownStepError(f"has fill={step.fill!r} for tensors")
    if mode != "constant":
        return (0,)
    values = tuple(fill) if is_sequence else (0 if fill is None else fill,)
    whole = tuple(int(v) for v in values)
    if not whole or len(whole) > 4 or not all(0 <= v <= 255 for v in whole):
        raise UnknownStepError(f"has fill={step.fill!r}, outside of 0 to 255")
    return whole


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)
