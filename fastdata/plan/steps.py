"""torchvision's transforms, recognised by class name: which are deterministic, and which op each one is.

torchvision itself is never imported: a step counts as its own only if its class is exactly one of torchvision's, so
that a user's subclass stays the user's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from fastdata.plan.ops import (
    Borders,
    Cast,
    CenterCrop,
    Domain,
    Flip,
    Grayscale,
    Normalize,
    Op,
    Pad,
    PadMode,
    RandomCrop,
    RandomResizedCrop,
    Reform,
)
from fastdata.spec import Form

__all__ = [
    "State",
    "UnknownStepError",
    "fingerprint",
    "flatten",
    "interpolation_name",
    "is_preparable",
    "is_random",
    "is_reforming",
    "is_same",
    "pair",
    "recognise",
    "torchvision_name",
]

_DETERMINISTIC = frozenset({"Resize", "CenterCrop", "Grayscale", "Pad", "RGB", "Identity", "exif_transpose"})
_REFORMING = frozenset({"ToImage", "PILToTensor", "ToPureTensor"})
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
_FLOATS = {torch.float32: "float32", torch.float64: "float64"}


class UnknownStepError(Exception):
    """A step that must run as the user wrote it; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a sample is before a step."""

    kind: Form
    dtype: str = "uint8"
    is_normalized: bool = False


def flatten(transform: Any) -> tuple[Any, ...]:
    """List the steps of a transform: of nested Compose and Sequential, a single one, or None."""
    if transform is None:
        return ()
    if torchvision_name(transform) == "Compose":
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
        if torchvision_name(step) in _KNOWN:
            values = getattr(step, "__dict__", {}).values()  # those with slots are fastdata's own, and frozen
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


def torchvision_name(step: Any) -> str | None:
    """Class name of torchvision's own transforms, v1 or v2, and name of the functions of PIL's ImageOps; else None.

    A class that says ``__torchvision_equal__ = "RandomCrop"`` is taken at its word: same attributes, same pixels.
    """
    kind = type(step)
    if getattr(step, "__module__", None) == "PIL.ImageOps":
        return str(step.__name__)
    if kind.__module__.startswith("torchvision.transforms"):
        return kind.__name__
    name: str | None = vars(kind).get("__torchvision_equal__")  # vars: a subclass is not equal any more
    return name


def is_preparable(step: Any) -> bool:
    """Whether a step may run once per sample, before it is stored: it is deterministic and keeps uint8."""
    return torchvision_name(step) in _DETERMINISTIC or is_reforming(step)


def is_random(step: Any) -> bool | None:
    """Whether a step draws at random; None where that is not known."""
    name = torchvision_name(step)
    if name is None:
        return None
    if name in _RANGES:
        return len(set(getattr(step, _RANGES[name]))) > 1
    if name in _RANDOM or name.startswith("Random"):
        return True
    return False if name in _REPEATABLE else None


def is_reforming(step: Any) -> bool:
    """Whether a step changes what a uint8 sample is, and none of its values."""
    name = torchvision_name(step)
    return name in _REFORMING or (name in ("ToDtype", "ConvertImageDtype") and step.dtype == torch.uint8)


def recognise(step: Any, position: int, state: State) -> tuple[tuple[Op, ...], State]:
    """Translate one step into ops.

    Args:
        step: one of the user's objects.
        position: its place in the flattened transform.
        state: what a sample is before it.

    Returns:
        The ops, and what a sample is after them.

    Raises:
        UnknownStepError: it has to run as it is.
    """
    name = torchvision_name(step)
    reader = _READERS.get(name or "")
    if reader is None:
        raise UnknownStepError("is not a known batch op")
    if state.kind in ("array", "mask", "video"):
        raise UnknownStepError(f"gets {state.kind}s, which are no images to batch ops")
    try:
        return reader(step, position, state)
    except (AttributeError, TypeError, ValueError) as unread:
        raise UnknownStepError(f"has arguments that are not served: {unread}") from unread


# Readers of one class each: (step, position, state) -> (ops, state after)

_Read = tuple[tuple[Op, ...], State]


def _read_flip(step: Any, position: int, state: State) -> _Read:
    vertical = torchvision_name(step) == "RandomVerticalFlip"
    return (Flip(position=position, vertical=vertical, p=float(step.p)),), state


def _read_center_crop(step: Any, position: int, state: State) -> _Read:
    if state.is_normalized:
        raise UnknownStepError("may pad with 0 after Normalize")
    height, width = pair(step.size)
    return (CenterCrop(height=height, width=width),), state


def _read_pad(step: Any, position: int, state: State) -> _Read:
    domain = _domain(step, state)
    fill = _fill(step, domain)
    _check_commutes(step, fill, state)
    return (Pad(borders=_borders(step.padding), mode=_mode(step), fill=fill, domain=domain),), state


def _read_random_crop(step: Any, position: int, state: State) -> _Read:
    domain = _domain(step, state)
    height, width = pair(step.size)
    borders = _borders(step.padding)
    if _is_v2(step) and step.padding is not None:
        left, right, top, bottom = step.padding
        borders = _borders((left, top, right, bottom))
    pads = any(borders) or bool(step.pad_if_needed)
    mode = _mode(step) if pads else "constant"
    fill = _fill(step, domain) if pads else (0,)
    if pads:
        _check_commutes(step, fill, state)
    before: tuple[Op, ...] = ()
    if not _is_v2(step) and mode != "constant" and any(borders) and step.pad_if_needed:
        # v1 pads the padded image again, v2 pads once by the sum; it shows in all modes but constant.
        before = (Pad(borders=borders, mode=mode, fill=fill, domain=domain),)
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


def _read_resized_crop(step: Any, position: int, state: State) -> _Read:
    _check_uint8(state)
    domain = _domain(step, state)
    interpolation = interpolation_name(step.interpolation)
    if domain != "pil" and interpolation not in _TENSOR_INTERPOLATIONS:
        raise UnknownStepError(f"resizes tensors with interpolation={interpolation!r}")
    (height, width), scale, ratio = pair(step.size), _range(step.scale), _range(step.ratio)
    if ratio[0] <= 0:
        raise UnknownStepError(f"has ratio={ratio}")
    op = RandomResizedCrop(
        position=position,
        height=height,
        width=width,
        scale=scale,
        ratio=ratio,
        interpolation=interpolation,
        antialias=bool(step.antialias) or domain == "pil",
        domain=domain,
    )
    return (op,), state


def _read_grayscale(step: Any, position: int, state: State) -> _Read:
    _check_uint8(state)
    if step.num_output_channels not in (1, 3):
        raise UnknownStepError(f"has num_output_channels={step.num_output_channels!r}")
    return (Grayscale(channels=step.num_output_channels, domain=_domain(step, state)),), state


def _read_identity(step: Any, position: int, state: State) -> _Read:
    return (Reform(),), state


def _read_to_tensor(step: Any, position: int, state: State) -> _Read:
    if state.kind != "pil":
        return _pass_through(step, state)
    dtype = _float_name(torch.get_default_dtype())
    return (Cast(dtype=dtype, scaling="divide"),), replace(state, kind="tensor", dtype=dtype)


def _read_pil_to_tensor(step: Any, position: int, state: State) -> _Read:
    if state.kind != "pil":
        return _pass_through(step, state)
    return (Reform(),), replace(state, kind="tensor")


def _read_to_image(step: Any, position: int, state: State) -> _Read:
    return (Reform(),), replace(state, kind="image")


def _read_to_pure_tensor(step: Any, position: int, state: State) -> _Read:
    return (Reform(),), replace(state, kind="tensor" if state.kind == "image" else state.kind)


def _read_dtype(step: Any, position: int, state: State) -> _Read:
    is_to_dtype = torchvision_name(step) == "ToDtype"
    if isinstance(step.dtype, dict):
        raise UnknownStepError("has a dict of dtypes")
    if state.kind == "pil":
        if is_to_dtype:  # leaves everything but tensors as it is
            return (Reform(),), state
        raise UnknownStepError("does not accept PIL images")
    if step.dtype == getattr(torch, state.dtype):
        return (Reform(),), state
    if state.dtype != "uint8":
        raise UnknownStepError(f"converts {state.dtype} to {step.dtype}")
    dtype = _float_name(step.dtype)
    scaling: Literal["divide", "multiply", "none"] = "multiply" if _is_v2(step) else "divide"
    if is_to_dtype and not step.scale:
        scaling = "none"
    return (Cast(dtype=dtype, scaling=scaling),), replace(state, dtype=dtype)


def _read_normalize(step: Any, position: int, state: State) -> _Read:
    if state.kind == "pil" or state.dtype == "uint8":
        raise UnknownStepError("does not accept PIL images" if state.kind == "pil" else "does not accept uint8")
    dtype = getattr(torch, state.dtype)
    mean, std = (torch.as_tensor(values, dtype=dtype).reshape(-1).tolist() for values in (step.mean, step.std))
    lengths_agree = len(mean) == len(std) or 1 in (len(mean), len(std))
    if not (lengths_agree and all(map(math.isfinite, (*mean, *std))) and all(std)):
        raise UnknownStepError(f"has mean={step.mean} and std={step.std}")
    count = max(len(mean), len(std))
    op = Normalize(
        mean=tuple(mean) * (count // len(mean)),
        std=tuple(std) * (count // len(std)),
        widens=_is_v2(step) and not step.inplace,
    )
    return (op,), replace(state, is_normalized=True)


_READERS = {
    "CenterCrop": _read_center_crop,
    "ConvertImageDtype": _read_dtype,
    "Grayscale": _read_grayscale,
    "Identity": _read_identity,
    "Normalize": _read_normalize,
    "PILToTensor": _read_pil_to_tensor,
    "Pad": _read_pad,
    "RandomCrop": _read_random_crop,
    "RandomHorizontalFlip": _read_flip,
    "RandomResizedCrop": _read_resized_crop,
    "RandomVerticalFlip": _read_flip,
    "ToDtype": _read_dtype,
    "ToImage": _read_to_image,
    "ToPureTensor": _read_to_pure_tensor,
    "ToTensor": _read_to_tensor,
}

_KNOWN = frozenset({*_READERS, *_DETERMINISTIC, *_REFORMING})


# Arguments


def pair(size: Any) -> tuple[int, int]:
    """(height, width) of a size given as one number, or as one or two in a sequence."""
    values = [size] if isinstance(size, int) else list(size)
    if len(values) not in (1, 2) or not all(isinstance(v, int) for v in values):
        raise UnknownStepError(f"has size={size!r}")
    return values[0], values[-1]


def _is_v2(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms.v2")


def _domain(step: Any, state: State) -> Domain:
    if state.kind == "pil":
        return "pil"
    return "v2" if _is_v2(step) else "v1"


def _pass_through(step: Any, state: State) -> _Read:
    if not _is_v2(step):
        raise UnknownStepError("does not accept tensors")
    return (Reform(),), state


def _check_uint8(state: State) -> None:
    if state.dtype != "uint8":
        raise UnknownStepError(f"comes after the conversion to {state.dtype}")


def _check_commutes(step: Any, fill: tuple[int, ...], state: State) -> None:
    """Padding after a conversion is done before it, where that gives the same."""
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


def _fill(step: Any, domain: Domain) -> tuple[int, ...]:
    fill = step.fill
    if isinstance(fill, dict):
        raise UnknownStepError("has a dict of fill values")
    is_sequence = isinstance(fill, (list, tuple))
    if is_sequence and (domain == "v1" or (domain == "v2" and _mode(step) != "constant" and len(fill) > 1)):
        raise UnknownStepError(f"has fill={fill!r} for tensors")
    if _mode(step) != "constant":
        return (0,)
    values = tuple(fill) if is_sequence else (0 if fill is None else fill,)
    whole = tuple(int(v) for v in values)
    if not whole or not all(0 <= v <= 255 for v in whole):
        raise UnknownStepError(f"has fill={fill!r}, outside of 0 to 255")
    return whole


def interpolation_name(mode: Any) -> str:
    """Name of a filter as torchvision has it, given by that name, by PIL's number, or as torchvision's enum."""
    if isinstance(mode, int):
        return _PIL_INTERPOLATIONS[mode]
    return str(getattr(mode, "value", mode))


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)


def _float_name(dtype: Any) -> Literal["float32", "float64"]:
    if dtype not in _FLOATS:
        raise UnknownStepError(f"converts to {dtype}")
    return cast('Literal["float32", "float64"]', _FLOATS[dtype])
