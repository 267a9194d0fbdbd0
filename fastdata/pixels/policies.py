"""Readers of automatic augmentation: the policies of torchvision and timm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from fastdata.pixels.arguments import interpolation_name, read_warp, several
from fastdata.pixels.arrays import Float64s
from fastdata.pixels.known import known_name
from fastdata.pixels.state import State, UnknownStepError, need_colours
from fastdata.pixels.steps import Step

POLICIES = ("AugMix", "AutoAugment", "RandAugment", "TrivialAugmentWide")

_KINDS = {
    "Identity": "NO_KIND",
    "AutoContrast": "AUTOCONTRAST",
    "Brightness": "BRIGHTNESS",
    "Color": "SATURATION",
    "Contrast": "CONTRAST",
    "Desaturate": "SATURATION",
    "Equalize": "EQUALIZE",
    "GaussianBlur": "BOX_BLUR",
    "GaussianBlurRand": "BOX_BLUR",
    "Invert": "INVERT",
    "Posterize": "POSTERIZE",
    "Rotate": "ROTATE",
    "Sharpness": "SHARPNESS",
    "ShearX": "SHEAR_X",
    "ShearY": "SHEAR_Y",
    "Solarize": "SOLARIZE",
    "SolarizeAdd": "SOLARIZE_ADD",
    "TranslateX": "TRANSLATE_X",
    "TranslateY": "TRANSLATE_Y",
}
"""Kinds in records.h, by the names of ops in the policies of torchvision and timm."""


def read_policy(transform: Any, state: State) -> Step:
    """Read RandAugment, TrivialAugmentWide, AutoAugment or AugMix of torchvision."""
    name = known_name(transform)
    is_mix = name == "AugMix"  # it turns PIL images into tensors before it changes them
    warp, fill = read_warp(transform, replace(state, kind="tensor") if is_mix else state)
    policy = {
        "warp": warp,
        "bins": _bins_of(transform),
        "has_shares": hasattr(transform, "_AUGMENTATION_SPACE"),  # of v2
    }
    if name == "AutoAugment":
        step = state.step("policies", policy=policy)
    elif is_mix:
        step = state.step(
            "aug_mix",
            policy=policy,
            chains=transform.mixture_width,
            severity=transform.severity,
            depth=transform.chain_depth,
            alpha=transform.alpha,
        )
    else:
        step = state.step(
            "augment",
            policy=policy,
            count=getattr(transform, "num_ops", 1),
            bin=getattr(transform, "magnitude", -1),
        )
    levels = partial(_levels, transform)
    return replace(step, fill=fill, children=_magnitudes(transform), levels=levels)


def _magnitudes(transform: Any) -> tuple[Step, ...]:
    """Read the ops that a policy chooses from: its whole space, or AutoAugment's pairs."""
    space = _augmentation_space(transform, 1, 1)
    rows = list(space)
    policies: Any = getattr(transform, "policies", None) or getattr(transform, "_policies", ())
    chosen = [*chain.from_iterable(policies)] or [(row, 1, None) for row in rows]
    steps = []
    for name, p, bin in chosen:
        _, is_signed = space[name]
        fields = {
            "kind": _KINDS[name],
            "is_signed": is_signed,
            "bin": bin or 0,
            "row": rows.index(name),
            "p": p,
        }
        steps.append(Step("magnitude", fields))
    return tuple(steps)


def _bins_of(transform: Any) -> int:
    return getattr(transform, "num_magnitude_bins", 10)


def _augmentation_space(
    transform: Any, height: int, width: int
) -> Mapping[str, tuple[torch.Tensor | None, bool]]:
    """Return for each op its magnitudes, and True if they get a random sign."""
    bins = _bins_of(transform)
    with torch.device("cpu"):  # the user's default device may be a GPU
        if hasattr(transform, "_AUGMENTATION_SPACE"):  # v2
            space = transform._AUGMENTATION_SPACE
            if not getattr(transform, "all_ops", True):
                space = transform._PARTIAL_AUGMENTATION_SPACE
            return {name: (make(bins, height, width), sign) for name, (make, sign) in space.items()}
        sizes = () if known_name(transform) == "TrivialAugmentWide" else ((height, width),)
        return dict(transform._augmentation_space(bins, *sizes))


def _levels(transform: Any, height: int, width: int) -> Float64s:
    """Return magnitudes (names, bins) for images of a size; 0 for ops without magnitudes."""
    # The user's own object computes them: the pixels depend on torch's rounding, and a version may
    # have other magnitudes.
    space = _augmentation_space(transform, height, width)
    levels = np.zeros((len(space), _bins_of(transform)))
    for row, (values, _) in zip(levels, space.values(), strict=True):
        if values is not None:
            row[:] = values.tolist()  # of any dtype
    return levels


def read_timm_policies(transform: Any, state: State) -> Step | State:
    need_colours(state)
    if state.kind != "pil":
        raise UnknownStepError("does not accept tensors")
    if known_name(transform) == "timm.AutoAugment":
        policies = [list(map(_timm_op, policy)) for policy in transform.policy]
        return state.choice(policies, name="timm")
    weights = transform.choice_weights
    if weights is not None and transform.num_layers > 1:
        raise UnknownStepError("chooses without replacement")
    ops = [[_timm_op(op)] for op in transform.ops]
    for layer in range(transform.num_layers):
        state = state.add(state.inner(layer).choice(ops, weights, "timm"))
    return state


def _timm_op(op: Any) -> Step:
    """Read an ``AugmentOp`` of timm's data/auto_augment.py, on PIL images."""
    # The ending of the name decides how a level becomes an argument (LEVEL_TO_ARG in that file).
    name, ending = re.findall("(.*?)(Increasing|Original|Rel|)$", op.name)[0]
    is_relative = ending == "Rel"
    modes = several(op.kwargs["resample"])
    translation = op.hparams.get("translate_const", 250)
    if is_relative:
        translation = op.hparams.get("translate_pct", 0.45)
    fields = {
        "kind": _KINDS[name],
        "increases": ending == "Increasing",
        "is_original": ending == "Original",
        "is_relative": is_relative,
        "desaturates": name == "Desaturate",
        "draws_radius": name == "GaussianBlurRand",
        "interpolations": len(modes),
        "interpolation": [interpolation_name(int(mode)).upper() for mode in modes],
        "p": op.prob,
        "magnitude": op.magnitude,
        "deviation": op.magnitude_std,
        "most": op.magnitude_max or 10,
        "translation": translation,
    }
    fill = tuple(map(float, several(op.kwargs["fillcolor"])))
    return Step("timm_op", fields, fill=fill)
