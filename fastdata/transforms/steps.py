"""The steps that fastdata knows, recognised by class name and read as ops: torchvision's, v1 and v2, and timm's.

Neither is ever imported: a step counts as theirs only if its class is exactly one of theirs, so that a user's subclass
stays the user's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from fastdata.core import Code
from fastdata.spec import Form
from fastdata.transforms.augment import Augment, AugMix, TimmOp
from fastdata.transforms.ops import (
    INTERPOLATIONS,
    Blur,
    Borders,
    Cast,
    CenterCrop,
    Choice,
    Domain,
    Erase,
    Flip,
    Grayscale,
    Noise,
    Normalize,
    Op,
    Order,
    Pad,
    PadMode,
    Permute,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Value,
    child,
)
from fastdata.transforms.warps import Affine, Perspective, Rotation

_DETERMINISTIC = frozenset({"Resize", "CenterCrop", "Grayscale", "Pad", "RGB", "Identity", "exif_transpose"})
_REFORMING = frozenset({"ToImage", "PILToTensor", "ToPureTensor", "timm.MaybePILToTensor"})
_REPEATABLE = frozenset(
    {
        *_DETERMINISTIC,
        *_REFORMING,
        *("ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat", "ConvertImageDtype", "FiveCrop"),
        *("LinearTransformation", "Normalize", "SanitizeBoundingBoxes", "SanitizeKeyPoints", "SetClampingMode"),
        *("TenCrop", "ToDtype", "ToPILImage", "ToTensor", "UniformTemporalSubsample"),
    }
)
"""Torchvision's steps that do the same to the same sample each time."""
_RANDOM = frozenset(
    {
        *("AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianNoise", "MixUp"),
        *("RandAugment", "ScaleJitter", "TrivialAugmentWide"),
    }
)
"""Those that draw, beside all whose names begin with Random."""
_RANGES = {"GaussianBlur": "sigma", "JPEG": "quality", "RandomRotation": "degrees"}
"""Those that draw from a range, and the attribute that holds it."""
_PIL_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_TENSOR_INTERPOLATIONS = frozenset({"nearest", "nearest-exact", "bilinear", "bicubic"})
_FLOATS = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class UnknownStepError(Exception):
    """A step that must run as the user wrote it; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a sample is before a step; ``is_noisy`` once random numbers lie among its floats."""

    kind: Form
    dtype: str = "uint8"
    channels: int | None = None
    is_normalized: bool = False
    is_erased: bool = False
    is_noisy: bool = False


_Read = tuple[tuple[Op, ...], State]


def flatten(transform: Any) -> tuple[Any, ...]:
    """List the steps of a transform: of nested Compose and Sequential, of several in a tuple, a single one, or None."""
    if transform is None:
        return ()
    if type(transform) is tuple:
        return tuple(step for part in transform for step in flatten(part))
    if known_name(transform) == "Compose":
        return tuple(step for part in transform.transforms for step in flatten(part))
    if type(transform) is torch.nn.Sequential:
        return tuple(step for part in transform for step in flatten(part))
    return (transform,)


def fingerprint(transform: Any) -> tuple[Any, ...]:
    """What a plan of the transform follows from: its steps, and the arguments of those that are recognised.

    Cheap, so that it can be asked before every batch whether something was changed in place.
    """
    atoms: list[Any] = []
    for step in flatten(transform):
        atoms.append(step)
        if known_name(step) in _KNOWN:
            values = getattr(step, "__dict__", {}).values()  # fastdata's own equals have slots and are frozen
            atoms.extend(values)
            for value in values:
                kind = type(value)  # isinstance with Tensor would take longer than all the rest
                if kind is list:
                    atoms.extend(value)
                elif kind is torch.Tensor or kind is np.ndarray:
                    atoms.append(np.asarray(value).tobytes())
    return tuple(atoms)


def is_same(fingerprint: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether nothing was changed between two fingerprints."""
    return len(fingerprint) == len(other) and all(
        mine is theirs or (type(mine) is bytes and mine == theirs)
        for mine, theirs in zip(fingerprint, other, strict=True)
    )


def known_name(step: Any) -> str | None:
    """Class name of torchvision's own transforms, of timm's after ``"timm."``, name of ImageOps' functions; else None.

    A class that says ``__torchvision_equal__ = "RandomCrop"`` is taken at its word: same attributes, same pixels.
    """
    kind = type(step)
    if getattr(step, "__module__", None) == "PIL.ImageOps":
        return str(step.__name__)
    if kind.__module__.startswith("torchvision.transforms"):
        return kind.__name__
    if kind.__module__.startswith("timm.data"):
        return f"timm.{kind.__name__}"
    name: str | None = vars(kind).get("__torchvision_equal__")  # vars: a subclass is not equal any more
    return name


def is_preparable(step: Any) -> bool:
    """Whether a step may run once per sample, before it is stored: it is deterministic and keeps uint8."""
    return known_name(step) in _DETERMINISTIC or is_reforming(step)


def is_random(step: Any) -> bool | None:
    """Whether a step draws at random; None where that is not known."""
    name = known_name(step)
    if name is None:
        return None
    if name in _RANGES:
        return len(set(getattr(step, _RANGES[name]))) > 1
    if name in _RANDOM or name.removeprefix("timm.").startswith("Rand") or name == "timm.AutoAugment":
        return True
    return False if name in _REPEATABLE else None


def is_reforming(step: Any) -> bool:
    """Whether a step changes what a uint8 sample is, and none of its values."""
    name = known_name(step)
    return name in _REFORMING or (name in ("ToDtype", "ConvertImageDtype") and step.dtype == torch.uint8)


def recognise(step: Any, position: int, state: State) -> _Read:
    """Read one step as ops.

    Args:
        step: one of the user's objects.
        position: its place in the flattened transform.
        state: what a sample is before it.

    Returns:
        The ops, and what a sample is after them.

    Raises:
        UnknownStepError: it has to run as it is.
    """
    reader = _READERS.get(known_name(step) or "")
    if reader is None:
        raise UnknownStepError("is not a known batch op")
    if state.kind in ("array", "mask", "video"):
        raise UnknownStepError(f"gets {state.kind}s, which are no images to batch ops")
    try:
        return reader(step, position, state)
    except (AttributeError, TypeError, ValueError) as unread:
        raise UnknownStepError(f"has arguments that are not served: {unread}") from unread


# Readers of one class each: (step, position, state) -> (ops, state after)


def _flip(step: Any, position: int, state: State) -> _Read:
    _check_movable(state)
    return (Flip(position=position, vertical="Vertical" in type(step).__name__, p=float(step.p)),), state


def _center_crop(step: Any, position: int, state: State) -> _Read:
    _check_movable(state)
    if state.is_normalized:
        raise UnknownStepError("may pad with 0 after Normalize")
    height, width = pair(step.size)
    return (CenterCrop(position=position, height=height, width=width),), state


def _pad(step: Any, position: int, state: State) -> _Read:
    domain = _domain(step, state)
    fill = _fill(step, domain, _mode(step))
    _check_commutes(step, fill, state)
    op = Pad(position=position, borders=_borders(step.padding), mode=_mode(step), fill=fill, domain=domain)
    return (op,), state


def _random_crop(step: Any, position: int, state: State) -> _Read:
    _check_movable(state)
    domain = _domain(step, state)
    height, width = pair(step.size)
    borders = _borders(step.padding)
    if _is_v2(step) and step.padding is not None:
        left, right, top, bottom = step.padding
        borders = _borders((left, top, right, bottom))
    pads = any(borders) or bool(step.pad_if_needed)
    mode = _mode(step) if pads else "constant"
    fill = _fill(step, domain, mode) if pads else (0,)
    if pads:
        _check_commutes(step, fill, state)
    before: tuple[Op, ...] = ()
    if not _is_v2(step) and mode != "constant" and any(borders) and step.pad_if_needed:
        # v1 pads the padded image again, v2 pads once by the sum; it shows in all modes but constant.
        before = (Pad(position=position, borders=borders, mode=mode, fill=fill, domain=domain),)
        borders = (0, 0, 0, 0)
    crop = RandomCrop(
        position=position,
        height=height,
        width=width,
        borders=borders,
        pad_if_needed=bool(step.pad_if_needed),
        mode=mode,
        fill=fill,
        domain=domain,
    )
    return (*before, crop), state


def _resampled(step: Any, state: State, interpolation: Any) -> dict[str, Any]:
    """What all that resize have in common."""
    _check_uint8(state)
    domain, name = _domain(step, state), interpolation_name(interpolation)
    if domain != "pil" and name not in _TENSOR_INTERPOLATIONS:
        raise UnknownStepError(f"resizes tensors with interpolation={name!r}")
    antialias = domain == "pil" or bool(step.antialias)
    return {"interpolation": name, "antialias": antialias, "domain": domain}


def _resized_crop(step: Any, position: int, state: State) -> _Read:
    names = step.interpolation
    several = tuple(names) if isinstance(names, (list, tuple)) else (names,)  # timm draws one of two
    (height, width), scale, ratio = pair(step.size), _range(step.scale), _range(step.ratio)
    if ratio[0] <= 0:
        raise UnknownStepError(f"has ratio={ratio}")
    crops = [
        RandomResizedCrop(
            position=position, height=height, width=width, scale=scale, ratio=ratio, **_resampled(step, state, name)
        )
        for name in several
    ]
    if len(crops) == 1:
        return tuple(crops), state
    return (_one_of([(crop,) for crop in crops], child(position, 0)),), state


def _resize(step: Any, position: int, state: State) -> _Read:
    common = _resampled(step, state, step.interpolation)
    name = known_name(step)
    if name == "RandomResize":
        return (Resize(position=position, shorter=tuple(range(step.min_size, step.max_size)), **common),), state
    if name == "RandomShortestSize":
        sizes = tuple(step.min_size)
        return (Resize(position=position, shorter=sizes, longest=step.max_size, by_factor=True, **common),), state
    if isinstance(step.size, str):  # fastdata's own
        bound, _, number = step.size.partition(":")
        return (Resize(position=position, shorter=(int(number),), bound=bound, **common),), state
    sides = [step.size] if isinstance(step.size, int) else list(step.size or [])
    if len(sides) == 2:
        return (Resize(position=position, size=pair(sides), **common),), state
    if len(sides) != 1:
        raise UnknownStepError(f"has size={step.size!r}")
    return (Resize(position=position, shorter=(int(sides[0]),), longest=step.max_size, **common),), state


def _grayscale(step: Any, position: int, state: State) -> _Read:
    _check_colours(state)
    channels, domain = step.num_output_channels, _domain(step, state)
    if channels not in (1, 3):
        raise UnknownStepError(f"has num_output_channels={channels!r}")
    op = Grayscale(position=position, channels=channels, domain=domain)
    return (op,), replace(state, channels=op.channels_after(state.channels or 3))


def _random_grayscale(step: Any, position: int, state: State) -> _Read:
    _check_colours(state)
    gray = Grayscale(position=child(position, 0), channels=0, domain=_domain(step, state))
    return (_sometimes(step.p, (gray,), position),), state


def _value(code: int, attribute: str | None, number: str | None = None) -> Callable[[Any, int, State], _Read]:
    """Reader of a step that applies one code with probability ``p``."""

    def read(step: Any, position: int, state: State) -> _Read:
        _check_colours(state)
        value = 0.0 if attribute is None else float(getattr(step, attribute))
        whole = 0 if number is None else int(getattr(step, number))
        op = Value(position=position, code=code, domain=_domain(step, state), low=value, high=value, number=whole)
        return (_sometimes(step.p, (op,), position),), state

    return read


def _jitters(step: Any, position: int, state: State) -> list[Op | None]:
    """Brightness, contrast, saturation and hue of a step that has ranges of these; None for those that it leaves."""
    _check_colours(state)
    codes = (Code.BRIGHTNESS, Code.CONTRAST, Code.SATURATION, Code.HUE)
    ops: list[Op | None] = []
    for number, (code, name) in enumerate(zip(codes, ("brightness", "contrast", "saturation", "hue"), strict=True)):
        limits = getattr(step, name)
        if limits is None:
            ops.append(None)
            continue
        low, high = _range(limits)
        ops.append(Value(position=child(position, number), code=code, domain=_domain(step, state), low=low, high=high))
    return ops


def _color_jitter(step: Any, position: int, state: State) -> _Read:
    ops = tuple((op,) for op in _jitters(step, position, state) if op is not None)
    return (Order(position=position, ops=ops),) if ops else (), state


def _photometric_distort(step: Any, position: int, state: State) -> _Read:
    ops = [cast("Op", op) for op in _jitters(step, position, state)]
    sometimes = [_sometimes(step.p, (op,), child(position, 10 + k)) for k, op in enumerate(ops)]
    contrast, middle = sometimes[1], (sometimes[2], sometimes[3])
    order = _one_of([(contrast, *middle), (*middle, contrast)], child(position, 20))
    permute = _sometimes(step.p, (Permute(position=child(position, 21)),), child(position, 22))
    return (sometimes[0], order, permute), state


def _permute(step: Any, position: int, state: State) -> _Read:
    _check_uint8(state)
    if (state.channels or 3) > 4:
        raise UnknownStepError(f"permutes {state.channels} channels")
    return (Permute(position=position),), state


def _blur(step: Any, position: int, state: State) -> _Read:
    _check_colours(state)
    width, height = step.kernel_size
    return (Blur(position=position, kernel_width=width, kernel_height=height, sigma=_range(step.sigma)),), state


def _noise(step: Any, position: int, state: State) -> _Read:
    if state.kind == "pil":
        raise UnknownStepError("does not accept PIL images")
    if state.is_normalized or state.is_erased:
        raise UnknownStepError("comes after Normalize or erasing")
    if state.dtype == "uint8":
        _check_colours(state)
        return (Noise(position=position, mean=step.mean, sigma=step.sigma, clip=bool(step.clip)),), state
    op = Noise(position=position, mean=step.mean, sigma=step.sigma, clip=bool(step.clip), scale=(1.0,), low=(0.0,))
    return (op,), replace(state, is_noisy=True)


def _erasing(step: Any, position: int, state: State) -> _Read:
    if state.kind == "pil":
        raise UnknownStepError("does not accept PIL images")
    if known_name(step) == "timm.RandomErasing":
        if step.num_splits > 1:
            raise UnknownStepError("erases only some splits of a batch")
        low, high = step.log_aspect_ratio
        fill: tuple[float, ...] | None = None if step.per_pixel or step.rand_color else (0.0,)
        erase = Erase(
            position=position,
            p=float(step.probability),
            scale=(step.min_area, step.max_area),
            ratio=(math.exp(low), math.exp(high)),
            fill=fill,
            per_pixel=bool(step.per_pixel),
            counts=(step.min_count, step.max_count),
        )
    else:
        value = step.value
        is_random = value is None or isinstance(value, str)
        values = () if is_random else tuple(value) if isinstance(value, (list, tuple)) else (value,)
        fill = None if is_random else tuple(map(float, values))
        scale, ratio = _range(step.scale), _range(step.ratio)
        erase = Erase(position=position, p=float(step.p), scale=scale, ratio=ratio, fill=fill)
    if state.dtype == "uint8" and (fill is None or not all(0 <= v <= 255 for v in fill)):
        raise UnknownStepError("erases uint8 with random values, or with others than 0 to 255")
    return (erase,), replace(state, is_erased=True, is_noisy=state.is_noisy or fill is None)


def _rotation(step: Any, position: int, state: State) -> _Read:
    if step.expand and _domain(step, state) != "pil":
        raise UnknownStepError("expands tensors")
    op = Rotation(
        position=position,
        degrees=_range(step.degrees),
        expand=bool(step.expand),
        center=_center(step),
        **_warped(step, state),
    )
    return (op,), state


def _affine(step: Any, position: int, state: State) -> _Read:
    op = Affine(
        position=position,
        degrees=_range(step.degrees),
        translate=None if step.translate is None else _range(step.translate),
        scale=None if step.scale is None else _range(step.scale),
        shear=tuple(map(float, step.shear or ())),
        center=_center(step),
        **_warped(step, state),
    )
    return (op,), state


def _perspective(step: Any, position: int, state: State) -> _Read:
    op = Perspective(position=position, distortion=float(step.distortion_scale), **_warped(step, state))
    return (_sometimes(step.p, (op,), child(position, 0)),), state


def _warped(step: Any, state: State) -> dict[str, Any]:
    """What all warps have in common."""
    _check_colours(state)
    domain, name = _domain(step, state), interpolation_name(step.interpolation)
    if name not in ("nearest", "bilinear", "bicubic") or (domain != "pil" and name == "bicubic"):
        raise UnknownStepError(f"has interpolation={name!r}")
    fill = None if step.fill is None else _fill(step, "pil", "constant")
    return {"domain": domain, "interpolation": name, "fill": fill}


def _center(step: Any) -> tuple[float, float] | None:
    return None if step.center is None else _range(step.center)


def _auto_augment(step: Any, position: int, state: State) -> _Read:
    common = _warped(step, state)
    if known_name(step) == "AugMix" and common["domain"] == "pil":
        common["domain"] = "v2" if _is_v2(step) else "v1"  # it makes tensors of PIL images
    kind = AugMix if known_name(step) == "AugMix" else Augment
    return (kind(position=position, step=step, **common),), state


def _timm_op(op: Any, position: int, state: State) -> Op:
    _check_colours(state)
    if state.kind != "pil":
        raise UnknownStepError("does not accept tensors")
    return TimmOp.read(op, position)


def _timm_rand_augment(step: Any, position: int, state: State) -> _Read:
    layers = []
    for layer in range(step.num_layers):
        if step.choice_weights is not None and step.num_layers > 1:
            raise UnknownStepError("chooses without replacement")
        at = child(position, layer)
        ops = [(_timm_op(op, child(at, number), state),) for number, op in enumerate(step.ops)]
        layers.append(_one_of(ops, at, step.choice_weights))
    return tuple(layers), state


def _timm_auto_augment(step: Any, position: int, state: State) -> _Read:
    policies = [
        tuple(_timm_op(op, child(child(position, k), j), state) for j, op in enumerate(policy))
        for k, policy in enumerate(step.policy)
    ]
    return (_one_of(policies, position),), state


# Steps of steps


def _inner(steps: Sequence[Any], position: int, state: State) -> tuple[Op, ...]:
    """Ops of steps that only some samples take, and so leave what a sample is as it was."""
    ops: list[Op] = []
    after = state
    for number, step in enumerate(step for part in steps for step in flatten(part)):
        try:
            more, after = recognise(step, child(position, number), after)
        except UnknownStepError as unknown:
            raise UnknownStepError(f"contains {type(step).__name__}, which {unknown}") from unknown
        ops.extend(more)
    if after != state:
        raise UnknownStepError("changes what only some samples are")
    return tuple(ops)


def _apply(step: Any, position: int, state: State) -> _Read:
    return (_sometimes(step.p, _inner(list(step.transforms), position, state), position),), state


def _choice(step: Any, position: int, state: State) -> _Read:
    inner = [_inner([part], child(position, number), state) for number, part in enumerate(step.transforms)]
    return (_one_of(inner, position, step.p),), state


def _order(step: Any, position: int, state: State) -> _Read:
    inner = [_inner([part], child(position, number), state) for number, part in enumerate(step.transforms)]
    return (Order(position=position, ops=tuple(inner)),), state


def _sometimes(p: float, ops: tuple[Op, ...], position: int) -> Op:
    return Choice(position=position, sequences=(ops,), upto=(float(p),))


def _one_of(sequences: Sequence[tuple[Op, ...]], position: int, weights: Any = None) -> Op:
    shares = [1.0] * len(sequences) if weights is None else [float(weight) for weight in weights]
    upto = [sum(shares[: number + 1]) / sum(shares) for number in range(len(shares))]
    return Choice(position=position, sequences=tuple(sequences), upto=(*upto[:-1], 1.0))


# Forms and floats


def _reform(kind: Form | None) -> Callable[[Any, int, State], _Read]:
    """Reader of a step that changes what a sample is, and none of its values."""

    def read(step: Any, position: int, state: State) -> _Read:
        return (), state if kind is None else replace(state, kind=kind)

    return read


def _to_tensor(step: Any, position: int, state: State) -> _Read:
    if state.kind != "pil":
        return _pass_through(step, state)
    dtype = _float_name(torch.get_default_dtype())
    return (Cast(position=position, dtype=dtype, scaling="divide"),), replace(state, kind="tensor", dtype=dtype)


def _pil_to_tensor(step: Any, position: int, state: State) -> _Read:
    if state.kind != "pil":
        return _pass_through(step, state)
    return (), replace(state, kind="tensor")


def _to_numpy(step: Any, position: int, state: State) -> _Read:
    raise UnknownStepError("makes NumPy arrays (timm's fast collate then stacks them); use MaybePILToTensor")


def _to_pure_tensor(step: Any, position: int, state: State) -> _Read:
    return (), replace(state, kind="tensor" if state.kind == "image" else state.kind)


def _dtype(step: Any, position: int, state: State) -> _Read:
    is_to_dtype = known_name(step) == "ToDtype"
    dtype = step.dtype
    if isinstance(dtype, dict):
        raise UnknownStepError("has a dict of dtypes")
    if state.kind == "pil":
        if is_to_dtype:  # leaves everything but tensors as it is
            return (), state
        raise UnknownStepError("does not accept PIL images")
    if dtype == getattr(torch, state.dtype):
        return (), state
    if state.dtype != "uint8":
        raise UnknownStepError(f"converts {state.dtype} to {dtype}")
    name = _float_name(dtype)
    scaling: Literal["divide", "multiply", "none"] = "multiply" if _is_v2(step) else "divide"
    if is_to_dtype and not step.scale:
        scaling = "none"
    return (Cast(position=position, dtype=name, scaling=scaling),), replace(state, dtype=name)


def _normalize(step: Any, position: int, state: State) -> _Read:
    if state.kind == "pil" or state.dtype == "uint8":
        raise UnknownStepError("does not accept PIL images" if state.kind == "pil" else "does not accept uint8")
    if state.is_noisy and state.is_erased:
        raise UnknownStepError("comes after random values")
    dtype = getattr(torch, state.dtype)
    mean, std = (torch.as_tensor(values, dtype=dtype).reshape(-1).tolist() for values in (step.mean, step.std))
    lengths_agree = len(mean) == len(std) or 1 in (len(mean), len(std))
    if not (lengths_agree and all(map(math.isfinite, (*mean, *std))) and all(std)):
        raise UnknownStepError(f"has mean={step.mean} and std={step.std}")
    count = max(len(mean), len(std))
    op = Normalize(
        position=position,
        mean=tuple(mean) * (count // len(mean)),
        std=tuple(std) * (count // len(std)),
        widens=_is_v2(step) and not step.inplace,
    )
    return (op,), replace(state, is_normalized=True)


_READERS: dict[str, Callable[[Any, int, State], _Read]] = {
    "AugMix": _auto_augment,
    "AutoAugment": _auto_augment,
    "CenterCrop": _center_crop,
    "ColorJitter": _color_jitter,
    "ConvertImageDtype": _dtype,
    "GaussianBlur": _blur,
    "GaussianNoise": _noise,
    "Grayscale": _grayscale,
    "Identity": _reform(None),
    "Normalize": _normalize,
    "PILToTensor": _pil_to_tensor,
    "Pad": _pad,
    "RandAugment": _auto_augment,
    "RandomAdjustSharpness": _value(Code.SHARPNESS, "sharpness_factor"),
    "RandomAffine": _affine,
    "RandomApply": _apply,
    "RandomAutocontrast": _value(Code.AUTOCONTRAST, None),
    "RandomChannelPermutation": _permute,
    "RandomChoice": _choice,
    "RandomCrop": _random_crop,
    "RandomEqualize": _value(Code.EQUALIZE, None),
    "RandomErasing": _erasing,
    "RandomGrayscale": _random_grayscale,
    "RandomHorizontalFlip": _flip,
    "RandomInvert": _value(Code.INVERT, None),
    "RandomOrder": _order,
    "RandomPerspective": _perspective,
    "RandomPhotometricDistort": _photometric_distort,
    "RandomPosterize": _value(Code.POSTERIZE, None, "bits"),
    "RandomResize": _resize,
    "RandomResizedCrop": _resized_crop,
    "RandomRotation": _rotation,
    "RandomShortestSize": _resize,
    "RandomSolarize": _value(Code.SOLARIZE, "threshold"),
    "RandomVerticalFlip": _flip,
    "Resize": _resize,
    "ToDtype": _dtype,
    "ToImage": _reform("image"),
    "ToPureTensor": _to_pure_tensor,
    "ToTensor": _to_tensor,
    "TrivialAugmentWide": _auto_augment,
    "timm.AutoAugment": _timm_auto_augment,
    "timm.MaybePILToTensor": _pil_to_tensor,
    "timm.MaybeToTensor": _to_tensor,
    "timm.RandAugment": _timm_rand_augment,
    "timm.RandomErasing": _erasing,
    "timm.RandomResizedCropAndInterpolation": _resized_crop,
    "timm.ToNumpy": _to_numpy,
}

_KNOWN = frozenset({*_READERS, *_DETERMINISTIC, *_REFORMING})


# Arguments


def pair(size: Any) -> tuple[int, int]:
    """(height, width) of a size given as one number, or as one or two in a sequence."""
    values = [size] if isinstance(size, int) else list(size)
    if len(values) not in (1, 2) or not all(isinstance(v, int) for v in values):
        raise UnknownStepError(f"has size={size!r}")
    return values[0], values[-1]


def interpolation_name(mode: Any) -> str:
    """Name of a filter as torchvision has it, given by that name, by PIL's number, or as torchvision's enum."""
    name = _PIL_INTERPOLATIONS[mode] if isinstance(mode, int) else str(getattr(mode, "value", mode))
    if name not in INTERPOLATIONS:
        raise UnknownStepError(f"has interpolation={mode!r}")
    return name


def _is_v2(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms.v2")


def _domain(step: Any, state: State) -> Domain:
    if state.kind == "pil":
        return "pil"
    return "v2" if _is_v2(step) else "v1"


def _pass_through(step: Any, state: State) -> _Read:
    if not (_is_v2(step) or known_name(step) in ("timm.MaybeToTensor", "timm.MaybePILToTensor")):
        raise UnknownStepError("does not accept tensors")
    return (), state


def _check_uint8(state: State) -> None:
    if state.dtype != "uint8":
        raise UnknownStepError(f"comes after the conversion to {state.dtype}")


def _check_colours(state: State) -> None:
    _check_uint8(state)
    if state.channels not in (None, 1, 3):
        raise UnknownStepError(f"gets images of {state.channels} channels")


def _check_movable(state: State) -> None:
    """Geometry written after the conversion is done before it; erased rectangles and noise would not move along."""
    if state.dtype != "uint8" and (state.is_erased or state.is_noisy):
        raise UnknownStepError("comes after erasing or noise among floats")


def _check_commutes(step: Any, fill: tuple[float, ...], state: State) -> None:
    """Padding after a conversion is done before it, where that gives the same."""
    _check_movable(state)
    if state.dtype != "uint8" and _mode(step) == "constant" and (any(fill) or state.is_normalized):
        raise UnknownStepError(
            f"pads with a constant after {'Normalize' if state.is_normalized else 'the conversion to float'}"
        )


def _mode(step: Any) -> PadMode:
    if step.padding_mode not in ("constant", "edge", "reflect", "symmetric"):
        raise UnknownStepError(f"has padding_mode={step.padding_mode!r}")
    return cast("PadMode", step.padding_mode)


def _borders(padding: Any) -> Borders:
    """Left, top, right, bottom from what torchvision accepts."""
    values = [0] if padding is None else [padding] if isinstance(padding, int) else list(padding)
    if len(values) not in (1, 2, 4) or not all(isinstance(v, int) and v >= 0 for v in values):
        raise UnknownStepError(f"has padding={padding!r}")
    left, top, right, bottom = values * (4 // len(values))
    return left, top, right, bottom


def _fill(step: Any, domain: Domain, mode: PadMode) -> tuple[float, ...]:
    fill = step.fill
    if isinstance(fill, dict):
        raise UnknownStepError("has a dict of fill values")
    is_sequence = isinstance(fill, (list, tuple))
    if is_sequence and (domain == "v1" or (domain == "v2" and mode != "constant" and len(fill) > 1)):
        raise UnknownStepError(f"has fill={fill!r} for tensors")
    if mode != "constant":
        return (0,)
    values = tuple(fill) if is_sequence else (0 if fill is None else fill,)
    whole = tuple(int(v) for v in values)
    if not whole or len(whole) > 4 or not all(0 <= v <= 255 for v in whole):
        raise UnknownStepError(f"has fill={fill!r}, outside of 0 to 255")
    return whole


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)


def _float_name(dtype: Any) -> str:
    if dtype not in _FLOATS:
        raise UnknownStepError(f"converts to {dtype}")
    return _FLOATS[dtype]
