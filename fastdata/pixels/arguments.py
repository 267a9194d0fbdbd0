"""Reading the arguments of the user's transforms as fields of steps.

An argument that the core cannot run raises an ``UnknownStepError``; the transform then runs as the
user wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdata.pixels.known import is_v2
from fastdata.pixels.samples import tensor_class
from fastdata.pixels.state import State, UnknownStepError, need_colours, need_movable, need_uint8
from fastdata.pixels.steps import Fields, Fill

MODES = ("constant", "edge", "reflect", "symmetric")

# In the order of Pillow's numbers, which older code passes instead of an InterpolationMode.
_PIL_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_TENSOR_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")
_INTERPOLATION = "has an interpolation that is not supported"


def several(value: Any) -> Sequence[Any]:
    """Return an argument as a sequence; it may be one value, a sequence, or a config's list."""
    is_one = isinstance(value, str) or not isinstance(value, Sequence)
    return (value,) if is_one else value


def pair(size: Any) -> tuple[int, int]:
    values = several(size)
    if len(values) not in (1, 2) or not all(isinstance(value, int) for value in values):
        raise UnknownStepError("has a size that is not supported")
    return values[0], values[-1]


def size_fields(size: Any) -> Fields:
    height, width = pair(size)
    return {"height": height, "width": width}


def interpolation_name(mode: Any) -> str:
    name = _PIL_INTERPOLATIONS[mode] if isinstance(mode, int) else str(getattr(mode, "value", mode))
    if name not in (*_PIL_INTERPOLATIONS, "nearest-exact"):
        raise UnknownStepError(_INTERPOLATION)
    return name


def value_for(value: Any, state: State) -> Any:
    """Return the value of an argument for a sample: v2 also accepts a dict from types to values."""
    if not isinstance(value, dict):
        return value
    # Keys are classes, or "others". Pillow's class is recognised by its module, without an import.
    kind = "PIL.Image" if state.kind == "pil" else tensor_class(state.kind)
    for key, given in value.items():
        if kind in (key, getattr(key, "__module__", None)):
            return given
    if "others" not in value:
        raise UnknownStepError("has a dict without a value for such samples")
    return value["others"]


def domain_of(transform: Any, state: State) -> str:
    """Return the library whose pixels a transform makes, by its name in records.h."""
    if state.kind == "pil":
        return "PIL_DOMAIN"
    return "V2_DOMAIN" if is_v2(transform) else "V1_DOMAIN"


def read_filter(transform: Any, state: State, interpolation: Any) -> Fields:
    """Read the interpolation of a transform that resizes, and its domain."""
    need_uint8(state)
    name = interpolation_name(interpolation)
    if state.is_mask:
        if name == "nearest-exact":  # some versions of torchvision also use it for masks
            raise UnknownStepError(_INTERPOLATION)
        return {"interpolation": "NEAREST", "domain": "V2_DOMAIN"}
    # Pillow always smooths when it shrinks; torchvision smooths tensors only if antialias is true.
    if state.kind != "pil":
        if name not in _TENSOR_INTERPOLATIONS:
            raise UnknownStepError(_INTERPOLATION)
        if "nearest" not in name and not transform.antialias:
            raise UnknownStepError("resizes tensors without antialias")
    return {
        "interpolation": name.upper().replace("-", "_"),
        "domain": domain_of(transform, state),
    }


def read_warp(transform: Any, state: State) -> tuple[Fields, Fill]:
    """Read the fields of a ``Warp``, and the fill."""
    need_colours(state)
    name = "nearest" if state.is_mask else interpolation_name(transform.interpolation)
    served = ["nearest", "bilinear"]
    if state.kind == "pil":
        served.append("bicubic")
    if name not in served:
        raise UnknownStepError(_INTERPOLATION)
    fill = _read_fill(transform, state, "PIL_DOMAIN", "constant")
    fields = {
        "interpolation": name.upper(),
        "domain": domain_of(transform, state),
        "is_v2": is_v2(transform),
        "has_fill": fill is not None,
    }
    return fields, fill or (0,)


def read_border(transform: Any, state: State) -> tuple[Fields, Fill]:
    """Read the fields of a ``Border``, and the fill.

    The core pads uint8. A pad after the conversion to floats is read only if padding before the
    conversion gives the same values.
    """
    need_movable(state)
    domain = domain_of(transform, state)
    mode = transform.padding_mode
    if mode not in MODES:
        raise UnknownStepError("has a padding_mode that is not supported")
    fill = _read_fill(transform, state, domain, mode)
    changes = mode == "constant" and (state.is_normalized or any(fill or ()))
    if state.floats and changes:
        raise UnknownStepError("pads with a constant after the conversion to floats")
    left, top, right, bottom = read_lengths(transform.padding)
    fields = {
        "left": left,
        "top": top,
        "right": right,
        "bottom": bottom,
        "mode": f"PAD_{mode.upper()}",
        "domain": domain,
    }
    return fields, fill or (0,)


def read_lengths(padding: Any) -> tuple[int, ...]:
    """Return the lengths of four borders, in torchvision's order."""
    values = several(padding or 0)
    are_whole = all(isinstance(value, int) and value >= 0 for value in values)
    if len(values) not in (1, 2, 4) or not are_whole:
        raise UnknownStepError("has a padding that is not supported")
    return tuple(values) * (4 // len(values))


def _read_fill(transform: Any, state: State, domain: str, mode: str) -> Fill | None:
    # Transforms of v2 compute `_fill` from `fill` once, and read only `_fill` afterwards.
    fill = value_for(getattr(transform, "_fill", transform.fill), state)
    if fill is None:
        return None
    values = several(fill)
    # For tensors v1 accepts one number only, as does v2 in all modes except "constant".
    is_one = mode != "constant" and len(values) > 1 and domain == "V2_DOMAIN"
    is_number = state.is_mask or is_one or domain == "V1_DOMAIN"
    if is_number and values is fill:
        raise UnknownStepError("has a fill for each channel of tensors")
    if mode != "constant":
        return None
    levels = tuple(map(int, values))
    if domain == "PIL_DOMAIN" and state.kind != "pil" and levels != tuple(values):
        raise UnknownStepError("fills tensors with fractions of a level")  # warps would round them
    if len(levels) not in (1, state.channels or len(levels)):
        raise UnknownStepError("has a fill for another number of channels")
    if not 1 <= len(levels) <= 4 or not all(0 <= level <= 255 for level in levels):
        raise UnknownStepError("has a fill outside of 0 to 255")
    return levels
