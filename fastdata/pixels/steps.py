"""The steps that fastdata knows, recognised by class name and read as ops: torchvision's, v1 and v2, and timm's.

Neither is ever imported: a step counts as theirs only if its class is exactly one of theirs, so
that a user's subclass stays the user's.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastdata.pixels.augment import read_augment, read_timm_op
from fastdata.pixels.callables import (
    DINO_BLUR,
    MOCO_BLUR,
    VICREG_BLUR,
    VICREG_SOLARIZATION,
    is_like,
    read_calls,
)
from fastdata.pixels.images import Form, tensor_class
from fastdata.pixels.ops import MODES, Cast, Domain, Fill, Op, child, choice, domain_name, sequence

_DETERMINISTIC = frozenset(
    {"Resize", "CenterCrop", "Grayscale", "Pad", "RGB", "Identity", "exif_transpose"}
)
_REFORMING = frozenset({"ToImage", "PILToTensor", "ToPureTensor", "timm.MaybePILToTensor"})
_REPEATABLE = {
    *(
        "ClampBoundingBoxes",
        "ClampKeyPoints",
        "ConvertBoundingBoxFormat",
        "ConvertImageDtype",
        "FiveCrop",
    ),
    *(
        "LinearTransformation",
        "Normalize",
        "SanitizeBoundingBoxes",
        "SanitizeKeyPoints",
        "SetClampingMode",
        "TenCrop",
    ),
    *(
        "ToDtype",
        "ToPILImage",
        "ToTensor",
        "UniformTemporalSubsample",
        *_DETERMINISTIC,
        *_REFORMING,
    ),
}
"""Torchvision's steps that do the same to the same sample each time."""
_RANDOM = {
    *(
        "AugMix",
        "AutoAugment",
        "ColorJitter",
        "CutMix",
        "ElasticTransform",
        "GaussianNoise",
        "MixUp",
        "ScaleJitter",
    )
}
"""Those that draw, beside all whose names begin with Rand or Trivial."""
_RANGES = {"GaussianBlur": "sigma", "JPEG": "quality", "RandomRotation": "degrees"}
"""Those that draw from a range, and the attribute that holds it."""
_PIL_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
_TENSOR_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic")
_MASK_DTYPES = {
    torch.int64: "int64",
    torch.int32: "int32",
    torch.float32: "float32",
    torch.uint8: "uint8",
}
_ERASE_MODE = 6
"""Place among an erasing's numbers of what it fills with: 0, its fill; 1 and 2, normal numbers."""
_FLOATS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class Views:
    """Several transforms of one image: what each makes of it, in a list, as contrastive training takes it.

    As ``transform=`` or the last step of one, batches are lists of one stacked tensor for each
    transform, whose shapes need not agree. All of them are made of the same prepared samples, by
    draws of their own. Anywhere else, as in torchvision's datasets, it is a callable like others.

    Args:
        transforms: each is called with the image; one may stand there several times.

    Example:
        >>> crops = Views(lambda image: image + 1, *[lambda image: image * 2] * 2)
        >>> crops(5)
        [6, 10, 10]
    """

    def __init__(self, *transforms: Any) -> None:
        if not transforms:
            raise ValueError("Views() needs one transform or more")
        self.transforms = transforms
        self.kind: type = list

    def __call__(self, image: Any) -> Any:
        return self.kind(run_steps(transform, image) for transform in self.transforms)

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.transforms))})"


def run_steps(transform: Any, sample: Any) -> Any:
    """Call a transform, or those of a tuple one after the other."""
    for step in transform if type(transform) is tuple else (transform,):
        sample = step(sample)
    return sample


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


def flatten(transform: Any) -> tuple[Any, ...]:
    """List the steps of a transform: of nested Compose and Sequential, of several in a tuple, a single one, or None.

    Functions, and objects with a ``__call__`` or ``forward`` of their own, are seen through where
    they do nothing but call steps one after the other, as a lambda around a Compose and
    torchvision's reference presets. One that returns several such results, as MoCo's two crops, is
    read as ``Views``.
    """
    if transform is None:
        return ()
    is_sequence = type(transform) is torch.nn.Sequential and not _changed_part(
        transform, torch.nn.Module
    )
    parts: Any = transform if is_sequence or type(transform) is tuple else None
    name = None if parts is not None else known_name(transform)
    if name == "Compose":
        parts = transform.transforms
    elif name == "ImageClassification" or type(transform).__module__.startswith("albumentations."):
        if transform not in _INSTEAD:
            _INSTEAD[transform] = _preset_steps(transform) if name else (_Named(transform),)
        parts = _INSTEAD[transform]
    elif name == "Lambda" and getattr(transform, "types", (object,)) == (object,):
        parts = _called(transform.lambd)
    elif name is None and parts is None:
        parts = _called(transform)
    return (
        (transform,) if parts is None else tuple(step for part in parts for step in flatten(part))
    )


def joint_steps(transforms: Any) -> tuple[Any, ...]:
    """The steps of v2's nested Compose: whatever else ``flatten`` sees through takes one sample at a time."""
    if known_name(transforms) != "Compose" or not _is_v2(transforms):
        return (transforms,)
    return tuple(step for part in transforms.transforms for step in joint_steps(part))


_INSTEAD: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""Steps that stand for one of the user's; kept, so that they are the same at each call."""


def _preset_steps(preset: Any) -> tuple[Any, ...]:
    """The steps of what ``weights.transforms()`` gives, torchvision's transforms/_presets.py."""
    theirs = sys.modules["torchvision.transforms"]  # which the preset is a part of
    resize = theirs.Resize(
        preset.resize_size, interpolation=preset.interpolation, antialias=preset.antialias
    )
    convert = theirs.PILToTensor(), theirs.ConvertImageDtype(torch.float)
    return (
        resize,
        theirs.CenterCrop(preset.crop_size),
        *convert,
        theirs.Normalize(preset.mean, preset.std),
    )


@dataclass(frozen=True)
class _Named:
    """An albumentations transform, which takes arrays by name and gives dicts, as a step."""

    step: Any

    def __call__(self, image: Any) -> Any:
        return self.step(image=np.asarray(image))["image"]

    def __repr__(self) -> str:
        return repr(self.step)


def _called(call: Any) -> tuple[Any, ...] | None:
    """What a callable calls one after the other, where it does nothing else; None where it does or nothing is known."""
    function, owner = (
        (call.__func__, call.__self__) if isinstance(call, MethodType) else (call, None)
    )
    if not isinstance(function, FunctionType):
        kind, owner = type(call), call
        function = getattr(kind, "__call__", None)  # noqa: B004
        if function is torch.nn.Module.__call__:
            function = None if _changed_part(call, torch.nn.Module) else kind.forward
    read = read_calls(function, owner) if isinstance(function, FunctionType) else None
    if read is None:
        return None
    made, each = read
    if made is None:
        return each[0]
    views = Views(*each)
    views.kind = made
    return (views,)


_OF_STEPS = {"RandomApply", "RandomChoice", "RandomOrder"}


def known_name(step: Any) -> str | None:
    """Class name of torchvision's own transforms, of timm's after ``"timm."``, name of ImageOps' functions; else None.

    A step that was changed on the object itself is nobody's but the user's. A class that says
    ``__torchvision_equal__ = "RandomCrop"`` is taken at its word: same attributes, same pixels.
    """
    kind = type(step)
    if getattr(step, "__module__", None) == "PIL.ImageOps":
        return str(step.__name__)
    if kind.__module__.startswith("torchvision.transforms"):
        return None if _changed_part(step, kind) else kind.__name__
    if kind.__module__.startswith("timm.data"):
        return None if _changed_part(step, kind) else f"timm.{kind.__name__}"
    # Vars: a subclass is not equal any more.
    name: str | None = vars(kind).get("__torchvision_equal__")
    return name


def _changed_part(step: Any, kind: type) -> str:
    """What an object has in the place of its class's, or what runs around it as a hook; empty if nothing."""
    held: dict[str, Any] = getattr(step, "__dict__", {})
    names = _names_of(kind)
    if not names.isdisjoint(held):
        return next(name for name in held if name in names)
    return "forward hook" if held.get("_forward_pre_hooks") or held.get("_forward_hooks") else ""


@cache
def _names_of(kind: type) -> frozenset[str]:
    return frozenset(dir(kind))


def is_preparable(step: Any) -> bool:
    """Whether a step may run once per sample, before it is stored: it is deterministic and keeps uint8."""
    return known_name(step) in _DETERMINISTIC or is_reforming(step)


def is_random(step: Any) -> bool | None:
    """Whether a step draws at random; None where that is not known."""
    if type(step) is Views:
        drawn = {is_random(each) for transform in step.transforms for each in flatten(transform)}
        return True if True in drawn else None if None in drawn else False
    name = known_name(step)
    if name is None:
        return None
    if name in _RANGES:
        return len(set(getattr(step, _RANGES[name]))) > 1
    plain = name.removeprefix("timm.")
    if plain in _RANDOM or plain.startswith(("Rand", "Trivial")):
        return True
    return False if name in _REPEATABLE else None


def is_reforming(step: Any) -> bool:
    """Whether a step changes what a uint8 sample is, and none of its values."""
    name = known_name(step)
    return name in _REFORMING or (
        name in ("ToDtype", "ConvertImageDtype") and step.dtype == torch.uint8
    )


def recognise(step: Any, at: int, state: State) -> State:
    """Read one of the user's objects: the state after it, with its ops, whose draws ``at`` numbers.

    Raises:
        UnknownStepError: it has to run as it is.
    """
    reader = READERS.get(known_name(step) or "")
    _refuse(type(step) is Views, "gives several views, which only the last step may")
    if reader is None and _published_values(step):
        reader = _published
    if reader is None:
        if type(step).__module__.startswith(("torchvision.transforms", "timm.data")):
            changed = _changed_part(step, type(step))
            _refuse(changed, f"has a {changed} of its own, which fastdata does not see through")
        inner = next((name for name in ("transforms", "transform") if hasattr(step, name)), None)
        hidden = f", and does more than to call its {inner!r}; give that itself" if inner else ""
        raise UnknownStepError(f"is not a known batch op{hidden}")
    if state.is_beside:
        reader = _beside(step, state)
    elif state.kind in ("array", "mask", "video"):
        raise UnknownStepError(f"gets {state.kind}s, which are no images to batch ops")
    try:
        return reader(step, at, state)
    except (AttributeError, TypeError, ValueError) as unread:
        raise UnknownStepError(f"has arguments that are not served: {unread}") from unread


_CUTTING = {
    *(
        "CenterCrop",
        "Pad",
        "RandomCrop",
        "RandomHorizontalFlip",
        "RandomResize",
        "RandomResizedCrop",
    ),
    *(
        "RandomShortestSize",
        "RandomVerticalFlip",
        "Resize",
        "RandomApply",
        "RandomChoice",
        "RandomOrder",
        "ToDtype",
    ),
}
_WARPING = {"RandomAffine", "RandomPerspective", "RandomRotation"}
"""With the former what v2 does to masks as well, drawn once for both; others leave these as they
are."""


def _beside(step: Any, state: State) -> _Reader:
    """The reader of what v2 does to a mask beside its image."""
    name = known_name(step) or ""
    _refuse(not _is_v2(step), "is not of torchvision.transforms.v2, and takes no masks")
    _refuse(READERS[name] is _auto_augment, "does not accept masks")
    if name == "ToPureTensor":
        return lambda step, at, state: replace(state, kind="tensor")
    moves = name in _CUTTING | _WARPING and state.kind == "mask"
    return READERS[name] if moves else lambda step, at, state: state


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
    if _is_v2(step) and step.padding is not None:
        left, right, top, bottom = step.padding
        borders = _borders((left, top, right, bottom))
    pads_more = bool(step.pad_if_needed)
    border: tuple[str, str] = ("PAD_CONSTANT", "PIL_DOMAIN")
    fill: Fill = (0,)
    if pads_more or any(borders):
        border, fill = _border(step, state)
        if not _is_v2(step) and border[0] != "PAD_CONSTANT" and any(borders) and pads_more:
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


# Published callables of PIL images: the op, the range of its number, and the probability

_PUBLISHED: dict[str, Callable[[Any], tuple[str, float, float, float]]] = {
    MOCO_BLUR: lambda held: ("OP_BOX_BLUR", held.sigma[0], held.sigma[1], 1.0),
    VICREG_BLUR: lambda held: ("OP_BOX_BLUR", 0.1, 2.0, held.p),
    VICREG_SOLARIZATION: lambda held: ("OP_SOLARIZE", 128.0, 128.0, held.p),
    DINO_BLUR: lambda held: ("OP_BOX_BLUR", held.radius_min, held.radius_max, held.prob),
}


def _published_values(step: Any) -> Callable[[Any], tuple[str, float, float, float]] | None:
    return next((values for source, values in _PUBLISHED.items() if is_like(step, source)), None)


def _published(step: Any, at: int, state: State) -> State:
    values = _published_values(step)
    assert values is not None
    code, low, high, p = values(SimpleNamespace(**vars(step)))
    _refuse(_colours(state).kind != "pil" or state.is_beside, "takes PIL images only")
    _refuse(not 0 <= low <= high, f"blurs by {low} to {high} px")
    number = _number(code, child(at, 0), "pil", float(low), float(high))
    return state.add(choice(at, [(number,)], [float(p)]))


_INSTEAD_OF = {
    "gaussianblur": "torchvision.transforms.GaussianBlur(23, (0.1, 2.0)), its kernel a tenth of the side,",
    "solarization": "torchvision.transforms.RandomSolarize(128, p)",
    "solarize": "torchvision.transforms.RandomSolarize(128, p)",
    "equalize": "torchvision.transforms.RandomEqualize(p)",
}


def cure_for(step: Any) -> tuple[str, Views | None]:
    """What to write in the place of a step that is not served, as far as its names tell; and the views it may hold."""
    inner = step.transforms if known_name(step) in _OF_STEPS else ()
    for part in (step, *flatten(tuple(inner))):
        kind: Any = type(part)
        called = part if isinstance(part, FunctionType) else kind.__call__
        words = {
            kind.__name__,
            *(called.__code__.co_names if isinstance(called, FunctionType) else ()),
        }
        names = {word.lower() for word in words}
        found = next((served for name, served in _INSTEAD_OF.items() if name in names), None)
        if found:
            return f"Write {found} in its place, which is served.", None
    held = {
        name: value
        for name, value in getattr(step, "__dict__", {}).items()
        if known_name(value) == "Compose"
    }
    if held and known_name(step) is None:
        each = "*[its {}] * 2" if len(held) == 1 else ", ".join(["its {}"] * len(held))
        views = Views(*held.values(), *(held.values() if len(held) == 1 else ()))
        return (
            f"If it makes views of an image, write fastdata.Views({each.format(*held)}) in its place.",
            views,
        )
    return "", None


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
        _refuse(not (_is_v2(step) or name.startswith("Maybe")), "does not accept tensors")
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
        _refuse(state.floats or dtype not in _MASK_DTYPES, f"converts masks to {dtype}")
        return replace(state, floats=(Cast(_MASK_DTYPES[dtype]).op(at),))
    if dtype is None or state.is_beside:
        return state
    if state.kind == "pil":
        _refuse(not is_to_dtype, "does not accept PIL images")
        return state  # ToDtype leaves everything but tensors as it is
    if dtype == getattr(torch, state.dtype):
        return state
    _refuse(state.dtype != "uint8", f"converts {state.dtype} to {dtype}")
    scaling = "multiply" if _is_v2(step) else "divide"
    return _cast(at, state, dtype, "none" if is_to_dtype and not step.scale else scaling)


def _cast(at: int, state: State, dtype: Any, scaling: str) -> State:
    _refuse(dtype not in _FLOATS, f"converts to {dtype}")
    return state.add(Cast(_FLOATS[dtype], scaling).op(at))


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
    normalization = tuple(mean), tuple(std), _is_v2(step) and not step.inplace
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


_KNOWN = frozenset({*READERS, *_DETERMINISTIC, *_REFORMING})


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


def _core_filter(name: str) -> str:
    return name.upper().replace("-", "_")


def _refuse(wrong: Any, reason: str) -> None:
    if wrong:
        raise UnknownStepError(reason)


def _is_v2(step: Any) -> bool:
    return type(step).__module__.startswith("torchvision.transforms.v2")


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
    return "v2" if _is_v2(step) else "v1"


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
    return _core_filter(name), domain_name(domain)


def _warped(step: Any, state: State) -> dict[str, Any]:
    """What core.h calls "warp", from ``n[0]`` on, and the fill."""
    _colours(state)
    domain, name = _domain(step, state), interpolation_name(step.interpolation)
    name = "nearest" if state.is_beside else name
    if name not in ("nearest", "bilinear", "bicubic") or (domain != "pil" and name == "bicubic"):
        raise UnknownStepError(f"has interpolation={name!r}")
    is_filled = _drawn_fill(step, state) is not None
    numbers = (0, _core_filter(name), domain_name(domain), int(_is_v2(step)), int(is_filled), 0)
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
