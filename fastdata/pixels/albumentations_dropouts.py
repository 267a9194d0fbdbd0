"""Readers of albumentations' CoarseDropout and GridDropout, which fill rectangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdata.pixels.state import Reader, State, UnknownStepError
from fastdata.pixels.steps import Fields, Fill, Step

_MODES = {"random": "UNIFORM_PIXELS", "random_uniform": "UNIFORM_CHANNELS"}
_MOST_HOLES = 128
_MOST_CELLS = 1024  # along a side, as in cv_dropout.c


def _read_coarse(transform: Any, state: State) -> Step | State:
    fewest, most = transform.num_holes_range
    height, width = transform.hole_height_range, transform.hole_width_range
    if most > _MOST_HOLES:
        raise UnknownStepError(f"makes more than {_MOST_HOLES} holes")
    # If the range of heights reaches 1, both ranges are in pixels.
    return _dropout(
        transform,
        state,
        "coarse_dropout",
        {
            "fewest": fewest,
            "most": most,
            "in_px": height[1] >= 1,
            "height": height,
            "width": width,
        },
    )


def _read_grid(transform: Any, state: State) -> Step | State:
    # albumentations uses the first number for rows, although the name ends in "xy".
    rows, columns = transform.holes_number_xy or (0, 0)
    smallest, end = transform.unit_size_range or (0, 0)
    if max(rows, columns) > _MOST_CELLS or (end and smallest >= end):
        raise UnknownStepError("has a holes_number_xy or a unit_size_range that is not supported")
    return _dropout(
        transform,
        state,
        "grid_dropout",
        {
            "rows": rows,
            "columns": columns,
            "smallest": smallest,
            "end": end,
            "is_random": transform.random_offset,
            "shift_x": transform.shift_xy[0],
            "shift_y": transform.shift_xy[1],
            "ratio": transform.ratio,
        },
    )


def _dropout(transform: Any, state: State, name: str, fields: Fields) -> Step | State:
    """Return a step for an image or its mask; the unchanged state if the mask is not filled."""
    fill = transform.fill_mask if state.is_mask else transform.fill
    if fill is None and state.is_mask:
        return state
    mode = "FILLED"
    values: Fill = (0,)
    if isinstance(fill, str):
        if fill not in _MODES:
            raise UnknownStepError(f"fills by {fill!r}, which is not supported")
        mode = _MODES[fill]
    else:
        values = _fill_values(fill, state)
    # Floats are filled with the given values, whether they are normalised or not.
    return state.step(name, fill=values, mode=mode, is_normalized=True, **fields)


def _fill_values(fill: Any, state: State) -> Fill:
    values = tuple(fill) if isinstance(fill, Sequence) else (fill,)
    # In an image without a channel axis, several values would fill a row.
    most = 1 if state.kind == "hw" else 4
    if len(values) not in (1, state.channels or 1) or len(values) > most:
        raise UnknownStepError("has a fill for another number of channels")
    if state.floats:
        return tuple(map(float, values))
    if not all(0 <= value <= 255 for value in values):
        raise UnknownStepError("has a fill outside of 0 to 255")
    return tuple(float(int(value)) for value in values)


READERS: dict[str, Reader] = {
    "A.CoarseDropout": _read_coarse,
    "A.GridDropout": _read_grid,
}
"""A reader for each transform, by its name with ``A.`` before it."""
