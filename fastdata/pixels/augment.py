"""Reads the policies of torchvision (RandAugment, AugMix and others) and of timm as ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdata.pixels import core
from fastdata.pixels.ops import Float64s, Op, Size

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


def read_augment(step: Any, at: int, warp: dict[str, Any]) -> Op:
    """RandAugment, TrivialAugmentWide, AutoAugment or AugMix; ``warp`` is what all its warps have in common."""
    space = Space(step)
    magnitudes = space.magnitudes()
    is_share = int(hasattr(step, "_AUGMENTATION_SPACE"))  # thresholds, of v2
    common: dict[str, Any] = {"at": at, "fill": warp["fill"], "about": space}
    policies = getattr(step, "policies", None) or getattr(step, "_policies", None)
    if policies:
        pairs = tuple(_policy(magnitudes, *each) for policy in policies for each in policy)
        return Op(
            "STEP_POLICIES", n=(*warp["n"], 0, space.bins, 0, is_share), children=pairs, **common
        )
    children = tuple(magnitudes.values())
    if hasattr(step, "severity"):
        counts = (step.mixture_width, space.bins, step.severity, is_share, max(0, step.chain_depth))
        return Op(
            "STEP_AUG_MIX",
            n=(*warp["n"], *counts),
            v=(float(step.alpha),),
            children=children,
            **common,
        )
    fixed = getattr(step, "magnitude", -1)
    drawn = (getattr(step, "num_ops", 1), space.bins, fixed, is_share)
    return Op("STEP_AUGMENT", n=(*warp["n"], *drawn), children=children, **common)


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
