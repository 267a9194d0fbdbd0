"""What samples are before a step, and what its attributes say, or why it has to run as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdata.pixels.compose import is_v2
from fastdata.pixels.images import Form, tensor_class
from fastdata.pixels.ops import MODES, Cast, Fill, Op

_PIL_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_TENSOR_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")
ERASE_MODE = 6
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
    def all_ops(self) -> tuple[Op, ...]:
        return (*self.ops, *self.floats)

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
            op.code == "OP_NOISE" or (op.code == "OP_ERASE" and op.n[ERASE_MODE])
            for op in self.floats
        )

    def add(self, op: Op) -> State:
        if op.code == "OP_CAST" or (self.floats and op.code in ("OP_ERASE", "OP_NOISE")):
            return replace(self, floats=(*self.floats, op))
        # What moves pixels is done before the conversion, with which it commutes: its reader admits
        # nothing else.
        return replace(self, ops=(*self.ops, op))


# Arguments


def pair(size: Any) -> tuple[int, int]:
    values = [size] if isinstance(size, int) else list(size)
    refuse(
        len(values) not in (1, 2) or not all(isinstance(v, int) for v in values),
        f"has size={size!r}",
    )
    return values[0], values[-1]


def interpolation_name(mode: Any) -> str:
    name = _PIL_INTERPOLATIONS[mode] if isinstance(mode, int) else str(getattr(mode, "value", mode))
    refuse(name not in (*_PIL_INTERPOLATIONS, "nearest-exact"), f"has interpolation={mode!r}")
    return name


def refuse(wrong: Any, reason: str) -> None:
    if wrong:
        raise UnknownStepError(reason)


def need_uint8(state: State) -> State:
    refuse(state.floats, f"comes after the conversion to {state.dtype}")
    return state


def need_colours(state: State) -> State:
    refuse(state.channels not in (None, 1, 3), f"gets images of {state.channels} channels")
    return need_uint8(state)


def need_movable(state: State) -> State:
    """Geometry written after the conversion is done before it; erased rectangles and noise would not move along."""
    refuse(state.is_erased or state.is_noisy, "comes after erasing or noise among floats")
    return state


def value_for(value: Any, state: State, what: str) -> Any:
    """What a step of v2 says of such a sample, where it has a dict by types."""
    if not isinstance(value, dict):
        return value
    kind = "PIL.Image" if state.kind == "pil" else tensor_class(state.kind)
    for key, given in value.items():
        if kind in (key, getattr(key, "__module__", None)):
            return given
    refuse("others" not in value, f"has a dict of {what} with none for such samples")
    return value["others"]


def domain_of(step: Any, state: State) -> str:
    """Whose pixels a step makes, by its name in core.h."""
    if state.kind == "pil":
        return "PIL_DOMAIN"
    return "V2_DOMAIN" if is_v2(step) else "V1_DOMAIN"


def read_filters(step: Any, state: State, interpolation: Any) -> tuple[str, str]:
    need_uint8(state)
    if state.is_beside:
        return "NEAREST", "V2_DOMAIN"
    name = interpolation_name(interpolation)
    if state.kind != "pil":
        is_known = name in _TENSOR_INTERPOLATIONS
        refuse(not is_known, f"resizes tensors with interpolation={name!r}")
        is_sharp = "nearest" in name or step.antialias
        refuse(not is_sharp, "resizes tensors without antialias")
    return name.upper().replace("-", "_"), domain_of(step, state)


def read_warp(step: Any, state: State) -> tuple[tuple[int | str, ...], Fill]:
    """What core.h calls "warp", from ``n[0]`` on, and the fill."""
    need_colours(state)
    name = "nearest" if state.is_beside else interpolation_name(step.interpolation)
    served = ("nearest", "bilinear", "bicubic") if state.kind == "pil" else ("nearest", "bilinear")
    refuse(name not in served, f"has interpolation={name!r}")
    is_filled = _drawn_fill(step, state) is not None
    fill = _read_fill(step, state, "PIL_DOMAIN", "constant") if is_filled else (0,)
    return (0, name.upper(), domain_of(step, state), int(is_v2(step)), int(is_filled), 0), fill


def read_border(step: Any, state: State) -> tuple[tuple[str, str], Fill]:
    """Mode and domain, and the fill; padding is done before a conversion, where that is the same."""
    need_movable(state)
    domain = domain_of(step, state)
    mode = step.padding_mode
    refuse(mode not in MODES, f"has padding_mode={mode!r}")
    fill = _read_fill(step, state, domain, mode)
    if state.floats and mode == "constant":
        refuse(state.is_normalized, "pads with a constant after Normalize")
        refuse(any(fill), "pads with a constant after the conversion to float")
    return (f"PAD_{mode.upper()}", domain), fill


def read_borders(padding: Any) -> tuple[int, int, int, int]:
    values = [0] if padding is None else [padding] if isinstance(padding, int) else list(padding)
    if len(values) not in (1, 2, 4) or not all(isinstance(v, int) and v >= 0 for v in values):
        raise UnknownStepError(f"has padding={padding!r}")
    left, top, right, bottom = values * (4 // len(values))
    return left, top, right, bottom


def _drawn_fill(step: Any, state: State) -> Any:
    """What a step fills with: v2's look at ``_fill``, which they made of ``fill``, and never at that again."""
    return value_for(getattr(step, "_fill", step.fill), state, "fill values")


def _read_fill(step: Any, state: State, domain: str, mode: str) -> Fill:
    fill = _drawn_fill(step, state)
    is_sequence = isinstance(fill, (list, tuple))
    refuse(is_sequence and state.is_beside, f"has fill={step.fill!r} for masks")
    is_long = is_sequence and mode != "constant" and len(fill) > 1
    for_tensors = (is_sequence and domain == "V1_DOMAIN") or (is_long and domain == "V2_DOMAIN")
    refuse(for_tensors, f"has fill={step.fill!r} for tensors")
    if mode != "constant":
        return (0,)
    values = tuple(fill) if is_sequence else (0 if fill is None else fill,)
    whole = tuple(int(v) for v in values)
    if not whole or len(whole) > 4 or not all(0 <= v <= 255 for v in whole):
        raise UnknownStepError(f"has fill={step.fill!r}, outside of 0 to 255")
    return whole


def read_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = values
    return float(low), float(high)
