"""Readers of albumentations' transforms that resize, or crop and resize."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdata.pixels.arguments import several
from fastdata.pixels.known import known_name
from fastdata.pixels.opencv_filters import opencv_filter
from fastdata.pixels.state import Reader, State, UnknownStepError, need_movable, need_uint8
from fastdata.pixels.steps import Fields, Step

_AREA = 3  # cv2.INTER_AREA


def _filters(transform: Any, state: State) -> Fields:
    """Return the interpolation for an image or its mask; it may depend on whether it shrinks."""
    need_uint8(state)
    chosen = transform.mask_interpolation if state.is_mask else transform.interpolation
    areas = ("image_mask",) if state.is_mask else ("image", "image_mask")
    by_area = transform.area_for_downscale in areas
    if by_area:
        opencv_filter(_AREA)
    return {"interpolation": opencv_filter(chosen), "shrinks_by_area": by_area}


def _crop_filters(transform: Any, state: State) -> Fields:
    filters = _filters(transform, state)
    if state.is_mask and filters["shrinks_by_area"]:
        # albumentations' _get_interpolation_for_resize also uses area for masks that are enlarged.
        return {"interpolation": opencv_filter(_AREA)}
    return filters


def _read_resize(transform: Any, state: State) -> Step:
    filters = _filters(transform, state)
    return state.step("resize", height=transform.height, width=transform.width, **filters)


def _read_max_size(transform: Any, state: State) -> Step:
    """Read LongestMaxSize and SmallestMaxSize."""
    height, width = transform.max_size_hw or (None, None)
    lengths = several(transform.max_size) if transform.max_size is not None else ()
    return state.step(
        "max_size",
        height=height or 0,
        width=width or 0,
        is_smallest=known_name(transform) == "A.SmallestMaxSize",
        children=[Step("length", {"px": int(length)}) for length in lengths],
        **_filters(transform, state),
    )


def _read_scale(transform: Any, state: State) -> Step:
    low, high = transform.scale_limit
    return state.step("scale", low=low, high=high, **_filters(transform, state))


def _read_resized_crop(transform: Any, state: State) -> Step:
    height, width = transform.size
    if transform.ratio[0] <= 0:
        raise UnknownStepError("has a ratio that is not supported")
    return state.step(
        "resized_crop",
        height=height,
        width=width,
        scale=transform.scale,
        ratio=transform.ratio,
        log_ratio=np.log(transform.ratio).tolist(),
        **_crop_filters(transform, state),
    )


def _read_sized_crop(transform: Any, state: State) -> Step:
    height, width = transform.size
    least, most = transform.min_max_height
    if least > most or int(least * transform.w2h_ratio) < 1:
        raise UnknownStepError("may draw crops without pixels")
    return state.step(
        "sized_crop",
        height=height,
        width=width,
        least=least,
        most=most,
        ratio=transform.w2h_ratio,
        **_crop_filters(transform, state),
    )


def _read_border_crop(transform: Any, state: State) -> Step:
    need_movable(state)
    sides = (
        transform.crop_left,
        transform.crop_top,
        transform.crop_right,
        transform.crop_bottom,
    )
    return state.step("border_crop", margin=sides)


READERS: dict[str, Reader] = {
    "A.LongestMaxSize": _read_max_size,
    "A.RandomCropFromBorders": _read_border_crop,
    "A.RandomResizedCrop": _read_resized_crop,
    "A.RandomScale": _read_scale,
    "A.RandomSizedCrop": _read_sized_crop,
    "A.Resize": _read_resize,
    "A.SmallestMaxSize": _read_max_size,
}
"""A reader for each transform, by its name with ``A.`` before it."""
