"""What samples are before a step, and what its attributes say, or why it has to run as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdata.pixels.compose import is_v2
from fastdata.pixels.images import Form, tensor_class
from fastdata.pixels.ops import MODES, Fill, Op, child

_PIL_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_INTERPOLATION = "has an interpolation that is not served"
_TENSOR_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")


class UnknownStepError(Exception):
    """A step that must run as the user wrote it; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What a sample is before a step, and the ops that made it so."""

    kind: Form
    channels: int | None = None
    at: int = 0
    """The number that the step's draws have."""
    ops: tuple[Op, ...] = ()
    """On uint8."""
    floats: tuple[Op, ...] = ()
    """The conversion to floats, normalised or not, and the erasing and noise behind it."""
    is_beside: bool = False
    """Whether it is the mask of an image, that v2 takes the same steps with."""

    @property
    def all_ops(self) -> tuple[Op, ...]:
        return (*self.ops, *self.floats)

    @property
    def dtype(self) -> str:
        return str(self.floats[0].n[0]).lower() if self.floats else "uint8"

    @property
    def is_normalized(self) -> bool:
        return bool(self.floats and self.floats[0].v)

    def add(self, op: Op) -> State:
        if op.code == "OP_CAST" or (self.floats and op.code in ("OP_ERASE", "OP_NOISE")):
            return replace(self, floats=(*self.floats, op))
        # What moves pixels is done before the conversion, with which it commutes: its reader admits
        # nothing else.
        return replace(self, ops=(*self.ops, op))

    def op(
        self,
        code: str,
        n: Iterable[int | str] = (),
        v: Iterable[float] = (),
        fill: Fill = (0,),
        children: Iterable[Op] = (),
    ) -> Op:
        """The op of a step."""
        return Op(code, self.at, tuple(n), tuple(map(float, v)), fill, tuple(children))

    def inner(self, number: int = 0) -> State:
        """The same for what a step does within itself, whose draws have numbers of their own."""
        return replace(self, at=child(self.at, number))


def refuse(wrong: Any, reason: str) -> None:
    if wrong:
        raise UnknownStepError(reason)


def need_uint8(state: State) -> None:
    refuse(state.floats, "comes after the conversion to floats")


def need_colours(state: State) -> None:
    refuse(state.channels not in (None, 1, 3), "gets images of other than 1 or 3 channels")
    need_uint8(state)


def need_movable(state: State) -> None:
    """Geometry is done before the conversion; erased rectangles and noise would not move along."""
    refuse(state.floats[1:], "comes after erasing or noise among floats")


# Arguments


def several(value: Any) -> Sequence[Any]:
    """An argument that may be one value or several of them, in a list or the list of a config."""
    is_one = isinstance(value, str) or not isinstance(value, Sequence)
    return (value,) if is_one else value


def pair(size: Any) -> tuple[int, int]:
    values = several(size)
    is_known = len(values) in (1, 2) and all(isinstance(value, int) for value in values)
    refuse(not is_known, "has a size that is not served")
    return values[0], values[-1]


def interpolation_name(mode: Any) -> str:
    name = _PIL_INTERPOLATIONS[mode] if isinstance(mode, int) else str(getattr(mode, "value", mode))
    refuse(name not in (*_PIL_INTERPOLATIONS, "nearest-exact"), _INTERPOLATION)
    return name


def value_for(value: Any, state: State) -> Any:
    """What a step of v2 says of such a sample, where it has a dict by types."""
    if not isinstance(value, dict):
        return value
    kind = "PIL.Image" if state.kind == "pil" else tensor_class(state.kind)
    for key, given in value.items():
        if kind in (key, getattr(key, "__module__", None)):
            return given
    refuse("others" not in value, "has a dict with nothing for such samples")
    return value["others"]


def domain_of(step: Any, state: State) -> str:
    """Whose pixels a step makes, by its name in core.h."""
    if state.kind == "pil":
        return "PIL_DOMAIN"
    return "V2_DOMAIN" if is_v2(step) else "V1_DOMAIN"


def read_filters(step: Any, state: State, interpolation: Any) -> tuple[str, str]:
    """Interpolation and domain of what resizes."""
    need_uint8(state)
    if state.is_beside:
        return "NEAREST", "V2_DOMAIN"
    name = interpolation_name(interpolation)
    if state.kind != "pil":
        is_known = name in _TENSOR_INTERPOLATIONS
        refuse(not is_known, _INTERPOLATION)
        is_sharp = "nearest" in name or step.antialias
        refuse(not is_sharp, "resizes tensors without antialias")
    return name.upper().replace("-", "_"), domain_of(step, state)


def read_warp(step: Any, state: State) -> tuple[tuple[int | str, ...], Fill]:
    """What core.h calls "warp", behind whether it expands, and the fill."""
    need_colours(state)
    name = "nearest" if state.is_beside else interpolation_name(step.interpolation)
    served = ("nearest", "bilinear", "bicubic") if state.kind == "pil" else ("nearest", "bilinear")
    refuse(name not in served, _INTERPOLATION)
    fill = _read_fill(step, state, "PIL_DOMAIN", "constant")
    has_center = bool(getattr(step, "center", None))
    how = (domain_of(step, state), is_v2(step), fill is not None, has_center)
    return (getattr(step, "expand", False), name.upper(), *how), fill or (0,)


def read_border(step: Any, state: State) -> tuple[tuple[str, str], Fill]:
    """Mode, domain and fill; padding is done before a conversion, where that is the same."""
    need_movable(state)
    domain = domain_of(step, state)
    mode = step.padding_mode
    refuse(mode not in MODES, "has a padding_mode that is not served")
    fill = _read_fill(step, state, domain, mode)
    changes = mode == "constant" and (state.is_normalized or any(fill or ()))
    refuse(state.floats and changes, "pads with a constant after the conversion to floats")
    return (f"PAD_{mode.upper()}", domain), fill or (0,)


def read_borders(padding: Any) -> tuple[int, ...]:
    """Left, top, right and bottom."""
    values = several(padding or 0)
    are_whole = all(isinstance(value, int) and value >= 0 for value in values)
    refuse(len(values) not in (1, 2, 4) or not are_whole, "has a padding that is not served")
    return tuple(values) * (4 // len(values))


def _read_fill(step: Any, state: State, domain: str, mode: str) -> Fill | None:
    """What a step fills with: v2's look at ``_fill``, which they made of ``fill`` once."""
    fill = value_for(getattr(step, "_fill", step.fill), state)
    if fill is None:
        return None
    values = several(fill)
    is_one = mode != "constant" and len(values) > 1 and domain == "V2_DOMAIN"
    is_number = state.is_beside or is_one or domain == "V1_DOMAIN"
    refuse(is_number and values is fill, "has a fill for each channel of tensors")
    if mode != "constant":
        return None
    levels = tuple(map(int, values))
    is_known = 1 <= len(levels) <= 4 and all(0 <= level <= 255 for level in levels)
    refuse(not is_known, "has a fill outside of 0 to 255")
    return levels
