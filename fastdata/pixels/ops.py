"""The steps of a transform as values, how they are read, and the table that they are compiled to.

An op is a record of core/core.h: what its numbers mean, what it draws, and what it does to pixels
stand there and in the C files. Nothing here draws or touches a pixel.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fastdata.errors import ChannelsError, counted
from fastdata.pixels import core
from fastdata.pixels.compose import is_v2
from fastdata.pixels.core import CONSTANTS, Float64s, Levels
from fastdata.pixels.images import Form, pillow_chooses_order, tensor_class

Fill = tuple[float, ...]
"""One value, or one for each channel."""

MODES = ("constant", "edge", "reflect", "symmetric")
_CHILDREN = 1 << 10
_NUMBERS = (1 << 54) - 33
"""A prime number of numbers, as many as draws tell apart: those of steps nested deeper are folded
into these."""
_FUSED_ROWS = 1 << 10


@dataclass(frozen=True, slots=True)
class Op:
    """A step as core.h describes it by ``code``; names in ``n`` stand for their numbers there.

    ``levels`` gives a policy's magnitudes for a height and a width.
    """

    code: str
    at: int = 0
    n: tuple[int | str, ...] = ()
    v: tuple[float, ...] = ()
    fill: Fill = (0,)
    children: Ops = ()
    levels: Callable[[int, int], Float64s] | None = None


Ops = tuple[Op, ...]


def child(at: int, number: int) -> int:
    """The number of what a step draws within itself, or of a step within it."""
    return ((at + 1) * _CHILDREN + number) % _NUMBERS


def step_number(at: int) -> int:
    """The place in the transform of a step, by a number of it or of its children."""
    while at >= _CHILDREN:
        at = at // _CHILDREN - 1
    return at


def sequence(ops: Iterable[Op], *v: float) -> Op:
    return Op("STEP_SEQUENCE", v=v, children=tuple(ops))


def maybe(state: State, ops: Iterable[Op], p: float) -> Op:
    """Ops with a probability."""
    return state.op("STEP_CHOICE", children=[sequence(ops, float(p))])


def choice(
    state: State, sequences: Sequence[Iterable[Op]], weights: Any = None, code: str = "STEP_CHOICE"
) -> Op:
    """One of several sequences of ops; of each is told where in [0, 1) its share ends."""
    ends = np.cumsum(np.ones(len(sequences)) if weights is None else weights, dtype=np.float64)
    shares = (ends / ends[-1]).tolist()
    return state.op(code, children=map(sequence, sequences, shares))


def in_order(state: State, sequences: Iterable[Iterable[Op]]) -> Op:
    """Several sequences of ops in random order."""
    return state.op("STEP_ORDER", children=map(sequence, sequences))


def flattened(ops: Ops) -> list[Op]:
    """All ops in the order of their records: their sequence, then children, level by level."""
    every = [sequence(ops)]
    for op in every:  # which grows as it is walked
        every.extend(op.children)
    return every


def compiled(every: Sequence[Op], levels: Levels) -> core.Table:
    """The table of ops, and of what is known of their magnitudes."""
    records = np.zeros(len(every), core.STEP)
    first = 1
    for record, op in zip(records, every, strict=True):
        record["code"] = CONSTANTS[op.code]
        record["at"] = op.at
        record["first"] = first
        record["count"] = len(op.children)
        record["fills"] = len(op.fill)
        record["n"][: len(op.n)] = [CONSTANTS[n] if isinstance(n, str) else n for n in op.n]
        record["v"][: len(op.v)] = op.v
        record["fill"] = np.resize(op.fill, 4)
        first += len(op.children)
    is_torchs = any("V1_DOMAIN" in op.n or "V2_DOMAIN" in op.n for op in every)
    return core.make_table(
        records,
        levels,
        fuses=is_torchs and _torch_fuses(),
        # Torch has no kernel for uint8 elsewhere, and v2 takes float32.
        resizes_fast=platform.machine() in ("aarch64", "arm64")
        or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"),
        chooses_order=pillow_chooses_order(),
    )


# What samples are before a step, and what its attributes say

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
    ops: Ops = ()
    """On uint8."""
    floats: Ops = ()
    """The conversion to floats, normalised or not, and the erasing and noise behind it."""
    is_beside: bool = False
    """Whether it is the mask of an image, that v2 takes the same steps with."""

    @property
    def all_ops(self) -> Ops:
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


def need_tensor(state: State) -> None:
    if state.kind == "pil":
        raise UnknownStepError("does not accept PIL images")


def need_uint8(state: State) -> None:
    if state.floats:
        raise UnknownStepError("comes after the conversion to floats")


def need_colours(state: State) -> None:
    if state.channels not in (None, 1, 3):
        raise UnknownStepError("gets images of other than 1 or 3 channels")
    need_uint8(state)


def need_movable(state: State) -> None:
    """Geometry is done before the conversion; erased rectangles and noise would not move along."""
    if state.floats[1:]:
        raise UnknownStepError("comes after erasing or noise among floats")


# Arguments


def several(value: Any) -> Sequence[Any]:
    """An argument that may be one value or several of them, in a list or the list of a config."""
    is_one = isinstance(value, str) or not isinstance(value, Sequence)
    return (value,) if is_one else value


def pair(size: Any) -> tuple[int, int]:
    values = several(size)
    if len(values) not in (1, 2) or not all(isinstance(value, int) for value in values):
        raise UnknownStepError("has a size that is not served")
    return values[0], values[-1]


def interpolation_name(mode: Any) -> str:
    name = _PIL_INTERPOLATIONS[mode] if isinstance(mode, int) else str(getattr(mode, "value", mode))
    if name not in (*_PIL_INTERPOLATIONS, "nearest-exact"):
        raise UnknownStepError(_INTERPOLATION)
    return name


def value_for(value: Any, state: State) -> Any:
    """What a step of v2 says of such a sample, where it has a dict by types."""
    if not isinstance(value, dict):
        return value
    kind = "PIL.Image" if state.kind == "pil" else tensor_class(state.kind)
    for key, given in value.items():
        if kind in (key, getattr(key, "__module__", None)):
            return given
    if "others" not in value:
        raise UnknownStepError("has a dict with nothing for such samples")
    return value["others"]


def domain_of(step: Any, state: State) -> str:
    """Whose pixels a step makes, by its name in core.h."""
    if state.kind == "pil":
        return "PIL_DOMAIN"
    return "V2_DOMAIN" if is_v2(step) else "V1_DOMAIN"


def read_filters(step: Any, state: State, interpolation: Any) -> tuple[str, str]:
    """Interpolation and domain of what resizes."""
    need_uint8(state)
    name = interpolation_name(interpolation)
    if state.is_beside:
        if name == "nearest-exact":  # which some versions do to masks, too
            raise UnknownStepError(_INTERPOLATION)
        return "NEAREST", "V2_DOMAIN"
    if state.kind != "pil":
        if name not in _TENSOR_INTERPOLATIONS:
            raise UnknownStepError(_INTERPOLATION)
        if "nearest" not in name and not step.antialias:
            raise UnknownStepError("resizes tensors without antialias")
    return name.upper().replace("-", "_"), domain_of(step, state)


def read_warp(step: Any, state: State) -> tuple[tuple[int | str, ...], Fill]:
    """What core.h calls "warp", behind whether it expands, and the fill."""
    need_colours(state)
    name = "nearest" if state.is_beside else interpolation_name(step.interpolation)
    served = ("nearest", "bilinear", "bicubic") if state.kind == "pil" else ("nearest", "bilinear")
    if name not in served:
        raise UnknownStepError(_INTERPOLATION)
    fill = _read_fill(step, state, "PIL_DOMAIN", "constant")
    has_center = bool(getattr(step, "center", None))
    how = (domain_of(step, state), is_v2(step), fill is not None, has_center)
    return (getattr(step, "expand", False), name.upper(), *how), fill or (0,)


def read_border(step: Any, state: State) -> tuple[tuple[str, str], Fill]:
    """Mode, domain and fill; padding is done before a conversion, where that is the same."""
    need_movable(state)
    domain = domain_of(step, state)
    mode = step.padding_mode
    if mode not in MODES:
        raise UnknownStepError("has a padding_mode that is not served")
    fill = _read_fill(step, state, domain, mode)
    changes = mode == "constant" and (state.is_normalized or any(fill or ()))
    if state.floats and changes:
        raise UnknownStepError("pads with a constant after the conversion to floats")
    return (f"PAD_{mode.upper()}", domain), fill or (0,)


def read_borders(padding: Any) -> tuple[int, ...]:
    """Left, top, right and bottom."""
    values = several(padding or 0)
    are_whole = all(isinstance(value, int) and value >= 0 for value in values)
    if len(values) not in (1, 2, 4) or not are_whole:
        raise UnknownStepError("has a padding that is not served")
    return tuple(values) * (4 // len(values))


def _read_fill(step: Any, state: State, domain: str, mode: str) -> Fill | None:
    """What a step fills with: v2's look at ``_fill``, which they made of ``fill`` once."""
    fill = value_for(getattr(step, "_fill", step.fill), state)
    if fill is None:
        return None
    values = several(fill)
    is_one = mode != "constant" and len(values) > 1 and domain == "V2_DOMAIN"
    is_number = state.is_beside or is_one or domain == "V1_DOMAIN"
    if is_number and values is fill:
        raise UnknownStepError("has a fill for each channel of tensors")
    if mode != "constant":
        return None
    levels = tuple(map(int, values))
    if domain == "PIL_DOMAIN" and state.kind != "pil" and levels != tuple(values):
        raise UnknownStepError("fills tensors with parts of a level")  # which warps round
    if len(levels) not in (1, state.channels or len(levels)):
        raise UnknownStepError("has a fill for another number of channels")
    if not 1 <= len(levels) <= 4 or not all(0 <= level <= 255 for level in levels):
        raise UnknownStepError("has a fill outside of 0 to 255")
    return levels


# What is wrong with a sample

_NOT_SERVED = (
    "sample {{index}}, of shape {{shape}}, cannot be served: {}. Use batch_ops=False, or leave it "
    "out."
)
_REFUSALS = {
    "REFUSED_CROP": (
        "Required crop size ({n[0]}, {n[1]}) is larger than input image size ({n[2]}, {n[3]}) of "
        "sample {index}. Use pad_if_needed=True, a smaller crop, or a Resize before it."
    ),
    "REFUSED_BORDER": (
        "padding ({n[0]}, {n[1]}, {n[2]}, {n[3]}) (left, top, right, bottom) in mode {mode!r} is "
        "too large for the image size ({n[4]}, {n[5]}) of sample {index}. Use padding_mode='edge' "
        "or a smaller padding."
    ),
    "REFUSED_BLUR": (
        "GaussianBlur with kernel_size=({op.n[0]}, {op.n[1]}) needs larger images than sample "
        "{index}, which has {n[0]} x {n[1]} px. Use a smaller kernel or a larger resize."
    ),
    "REFUSED_SHAPE": (
        "sample {index} comes out as ({n[0]}, {n[1]}, {n[2]}), but the batch has room for "
        "({n[3]}, {n[4]}, {n[5]}) each. Crop or resize to one size, and give all images one number "
        "of channels: by Grayscale(3), or a CachedDataset's prepare=lambda image: "
        "image.convert('RGB')."
    ),
    "REFUSED_OUTSIDE": _NOT_SERVED.format("a step would leave no pixel of it"),
    "REFUSED_OP": _NOT_SERVED.format("a step is not for its number of channels"),
    "REFUSED_TABLE": _NOT_SERVED.format("it asks for more than the core has room for"),
}


def refusal_of(op: Op, refused: core.CoreError, index: int, shape: Sequence[int]) -> ValueError:
    """What is wrong with a sample of this shape, for its user."""
    n = refused.numbers
    if refused.reason == "REFUSED_CHANNELS":
        needs = f"fill={op.fill} has {len(op.fill)} values"
        if op.code == "OP_CAST":
            needs = f"Normalize has {op.n[2]} means"
        elif op.code == "OP_ERASE":
            needs = f"erasing has {len(op.fill)} values"
        return ChannelsError(
            f"it has {counted(n[0], 'channel')}, but {needs}. Give as many as there are "
            "channels, and all images one number of these: by Grayscale(3), or a CachedDataset's "
            "prepare=lambda image: image.convert('RGB').",
            index,
        )
    mode = str(op.n[4]).removeprefix("PAD_").lower() if len(op.n) > 4 else ""
    stored = tuple(map(int, shape))
    text = _REFUSALS[refused.reason]
    return ValueError(text.format(op=op, n=n, index=index, mode=mode, shape=stored))


# What the pixels of this machine depend on


@functools.cache
def _torch_fuses() -> bool:
    """Whether torch's product of large matrices rounds once for a product and its addition.

    MKL does on some CPUs.

    (1 + 2**-12)**2 - (1 + 2**-11) is 2**-24, and 0 where the square is rounded first.
    """
    make = functools.partial(torch.tensor, dtype=torch.float32, device="cpu")
    row = make([-1 - 2**-11, 1 + 2**-12, 1.0])
    column = make([[1.0], [1 + 2**-12], [0.0]]).expand(1, 3, 2)
    return bool(row.expand(1, _FUSED_ROWS, 3).bmm(column).any())
