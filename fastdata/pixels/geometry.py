"""Readers of transforms that move pixels: crops, flips, borders, sizes and warps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fastdata.pixels.arguments import (
    read_border,
    read_filter,
    read_lengths,
    read_warp,
    several,
    size_fields,
)
from fastdata.pixels.known import is_v2, known_name
from fastdata.pixels.state import State, UnknownStepError, need_movable
from fastdata.pixels.steps import Fields, Fill, Step

_BOUNDS = {
    "RandomShortestSize": "MULTIPLIED_SIZE",
    "short": "SHORT_BOUND",
    "long": "LONG_BOUND",
}
"""Kinds of bounds in records.h, by the name of a transform or the word in ``"short:320"``."""


def read_center_crop(transform: Any, state: State) -> Step:
    if state.is_normalized:
        raise UnknownStepError("comes after Normalize, where it may have to pad")
    need_movable(state)
    return state.step("center_crop", **size_fields(transform.size))


def read_flip(transform: Any, state: State) -> Step:
    need_movable(state)
    name = known_name(transform)
    return state.step(
        "flip",
        is_vertical=name == "RandomVerticalFlip",
        alternates=name == "AlternatingFlip",
        p=getattr(transform, "p", 0),  # AlternatingFlip has no p
    )


def read_pad(transform: Any, state: State) -> Step:
    border, fill = read_border(transform, state)
    return state.step("pad", fill=fill, border=border)


def read_random_crop(transform: Any, state: State) -> Step:
    need_movable(state)
    border: Fields = {}
    fill: Fill = (0,)
    if transform.pad_if_needed or any(read_lengths(transform.padding)):
        border, fill = read_border(transform, state)
    if border and is_v2(transform):
        # Unlike Pad, v2's RandomCrop unpacks its padding as left, right, top, bottom.
        border = {**border, "right": border["top"], "top": border["right"]}
    return state.step(
        "crop",
        fill=fill,
        border=border,
        **size_fields(transform.size),
        pads_if_needed=transform.pad_if_needed,
        is_v2=is_v2(transform),
    )


def read_resized_crop(transform: Any, state: State) -> Step:
    if transform.ratio[0] <= 0:
        raise UnknownStepError("has a ratio that is not supported")
    crops = [
        state.step(
            "resized_crop",
            **size_fields(transform.size),
            **read_filter(transform, state, name),
            scale=transform.scale,
            ratio=transform.ratio,
            log_ratio=np.log(transform.ratio).tolist(),
        )
        for name in several(transform.interpolation)  # timm may draw one of two for each sample
    ]
    if len(crops) == 1:
        return crops[0]
    return state.inner().choice([[crop] for crop in crops])


def read_resize(transform: Any, state: State) -> Step:
    filters = read_filter(transform, state, transform.interpolation)
    name = known_name(transform)
    longest = getattr(transform, "max_size", None) or 0
    if name == "RandomResize":
        sides: Iterable[int] = range(transform.min_size, transform.max_size)
        longest = 0
    elif name == "RandomShortestSize":
        sides = transform.min_size
    elif isinstance(transform.size, str):
        name, _, side = transform.size.partition(":")
        sides = [int(side)]
    else:
        sides = several(transform.size or ())
        if len(sides) == 2 and not longest:
            return state.step("resize", **size_fields(sides), **filters)
        if len(sides) != 1 or 0 < longest <= sides[0]:
            raise UnknownStepError("has a size that is not supported")
    return state.step(
        "resize",
        longest=longest,
        bound=_BOUNDS.get(name, "FREE_SIZE"),
        **filters,
        children=[Step("length", {"px": int(side)}) for side in sides],
    )


def read_cover_bucket(transform: Any, state: State) -> Step:
    filters = read_filter(transform, state, transform.interpolation)
    return state.step("cover_bucket", **filters, children=_bucket_steps(transform))


def read_bucket_crop(transform: Any, state: State) -> Step:
    need_movable(state)
    is_random = known_name(transform) == "RandomCropToBucket"
    return state.step("bucket_crop", is_random=is_random, children=_bucket_steps(transform))


def _bucket_steps(transform: Any) -> list[Step]:
    return [Step("bucket", size_fields(size)) for size in transform.sizes]


def read_rotation(transform: Any, state: State) -> Step:
    if transform.expand and state.kind != "pil":
        raise UnknownStepError("expands tensors")
    warp, fill = read_warp(transform, state)
    return state.step(
        "rotation",
        fill=fill,
        warp=warp,
        expands=transform.expand,
        **_center_fields(transform),
        degrees=transform.degrees,
    )


def read_affine(transform: Any, state: State) -> Step:
    warp, fill = read_warp(transform, state)
    shear = transform.shear or (0, 0)
    return state.step(
        "affine",
        fill=fill,
        warp=warp,
        **_center_fields(transform),
        degrees=transform.degrees,
        translation=transform.translate or (0, 0),
        scale=transform.scale or (1, 1),
        shear_x=shear[:2],
        shear_y=shear[2:],
    )


def read_perspective(transform: Any, state: State) -> Step:
    warp, fill = read_warp(transform, state)
    return state.step("perspective", fill=fill, warp=warp, distortion=transform.distortion_scale)


def _center_fields(transform: Any) -> Fields:
    return {"has_center": bool(transform.center), "center": transform.center or (0, 0)}
