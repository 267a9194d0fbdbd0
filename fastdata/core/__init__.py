"""The door to the compiled core: its records, and the call that serves a batch.

The library is plain C without Python's C API, opened by ctypes, which lets go of the GIL for the whole call. What a
record means stands in core.h, and how a batch is served in serve.c.

Shape letters: B batch, C channels, H W size before, h w size served.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.core.library import load, obstacle

__all__ = ["OUTPUTS", "RECORD", "Batch", "Code", "CoreError", "Values", "load", "make_values", "obstacle", "serve"]

RECORD = np.dtype([("code", "<i4"), ("n", "<i4", 9), ("v", "<f8", 12)])
"""``Op`` of core.h: one step for one sample."""


class Code(enum.IntEnum):
    """What a record does, in core.h's order."""

    NOTHING = 0
    WINDOW = enum.auto()
    RESIZE = enum.auto()
    AFFINE = enum.auto()
    PERSPECTIVE = enum.auto()
    TURN = enum.auto()
    BRIGHTNESS = enum.auto()
    CONTRAST = enum.auto()
    SOLARIZE = enum.auto()
    SOLARIZE_ADD = enum.auto()
    POSTERIZE = enum.auto()
    INVERT = enum.auto()
    AUTOCONTRAST = enum.auto()
    EQUALIZE = enum.auto()
    GRAYSCALE = enum.auto()
    SATURATION = enum.auto()
    HUE = enum.auto()
    SHARPNESS = enum.auto()
    BLUR = enum.auto()
    BOX_BLUR = enum.auto()
    PERMUTE = enum.auto()
    NOISE = enum.auto()
    ERASE = enum.auto()
    MIX_BEGIN = enum.auto()
    MIX_ADD = enum.auto()
    MIX_END = enum.auto()
    CAST = enum.auto()


OUTPUTS = {"uint8": 0, "float32": 1, "float64": 2, "float16": 3, "bfloat16": 4}
"""What can be served."""


class Values(ctypes.Structure):
    """``Values`` of serve.c: how uint8 becomes what is served.

    Made by ``make_values``; keeps the arrays that it points to.
    """

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("by_formula", ctypes.c_int32),
        ("divides", ctypes.c_int32),
        ("normalizes", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("mean_C", ctypes.c_void_p),
        ("std_C", ctypes.c_void_p),
        ("table_C256", ctypes.c_void_p),
    )
    kept: tuple[Any, ...] = ()


class Batch(ctypes.Structure):
    """``Batch`` of serve.c."""

    _fields_ = (
        ("sources_B", ctypes.c_void_p),
        ("shapes_B3", ctypes.c_void_p),
        ("ops_BS", ctypes.c_void_p),
        ("ops_per_sample", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("out_B", ctypes.c_void_p),
        ("channels", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("channels_last", ctypes.c_int32),
        ("values", Values),
    )


class CoreError(Exception):
    """The core refused a sample.

    Attributes:
        place: of the sample in the batch.
        reason: ``"memory"``, ``"outside"``, ``"shape"`` or ``"op"``.
    """

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(f"the compiled core refused sample {place} of a batch: {reason}")
        self.place, self.reason = place, reason


REASONS = ("", "memory", "outside", "shape", "op")


def make_values(
    dtype: str, table_C256: npt.NDArray[np.float64], formula: tuple[bool, float, Any, Any] | None = None
) -> Values:
    """Say how uint8 becomes floats: channel c's value x becomes ``table_C256[c, x]``.

    Args:
        dtype: one of ``OUTPUTS``.
        table_C256: one row for each channel served.
        formula: (divides, factor, mean_C, std_C): where ``(x / factor - mean) / std`` in float32, or with
            ``x * factor``, gives the table's very values, the core computes them, which is faster. ``mean_C`` and
            ``std_C`` may be None.
    """
    table_C256 = np.ascontiguousarray(table_C256, np.float64)
    values = Values(OUTPUTS[dtype], 0, table_C256=table_C256.ctypes.data)
    values.kept = (table_C256,)
    if formula is None:
        return values
    divides, factor, mean_C, std_C = formula
    quick = Values(OUTPUTS[dtype], 1, divides, mean_C is not None, factor, table_C256=table_C256.ctypes.data)
    quick.kept = (table_C256,)
    if mean_C is not None:
        arrays = np.ascontiguousarray(mean_C, np.float32), np.ascontiguousarray(std_C, np.float32)
        quick.mean_C, quick.std_C = arrays[0].ctypes.data, arrays[1].ctypes.data
        quick.kept += arrays
    every_C256 = np.broadcast_to(np.arange(256, dtype=np.uint8), (len(table_C256), 1, 256)).copy()
    outcomes = []
    for each in (values, quick):
        out = np.empty((1, *every_C256.shape), "uint16" if dtype.endswith("16") else dtype)
        sources, shapes = np.array([every_C256.ctypes.data]), np.array([every_C256.shape], np.int32)
        serve(sources, shapes, np.zeros((1, 0), RECORD), each, out.ctypes.data, every_C256.shape)
        outcomes.append(out)
    return quick if np.array_equal(outcomes[0], outcomes[1]) else values


def serve(
    sources_B: npt.NDArray[np.int64],
    shapes_B3: npt.NDArray[np.int32],
    records_BS: npt.NDArray[Any],
    values: Values,
    out: int,
    shape: tuple[int, ...],
    *,
    first: int = 0,
    last: int | None = None,
    channels_last: bool = False,
    interleaved: bool = False,
) -> None:
    """Serve samples [first, last) of a batch.

    Args:
        sources_B: address of each sample, uint8.
        shapes_B3: channels, height and width of each.
        records_BS: what is done to each, C-contiguous.
        values: of what is served.
        out: address of the batch, (B, C, h, w), or (B, h, w, C) if ``channels_last``; filled completely.
        shape: (C, h, w).
        first: where to begin.
        last: where to end; None: at the last sample.
        channels_last: how the batch lies in memory.
        interleaved: samples are (H, W, C) in memory.

    Raises:
        CoreError: a sample does not come out in that shape, or its records do not fit it.
        MemoryError: there is no memory for an image.
    """
    batch = Batch(
        sources_B.ctypes.data,
        shapes_B3.ctypes.data,
        records_BS.ctypes.data,
        records_BS.shape[1],
        interleaved,
        out,
        *shape,
        channels_last,
        values,
    )
    outcome = load().fastdata_serve(ctypes.byref(batch), first, len(sources_B) if last is None else last)
    if outcome < 0:
        return
    place, reason = divmod(outcome, 8)
    if REASONS[reason] == "memory":
        raise MemoryError(f"there is no memory for the intermediate images of sample {place} of a batch")
    raise CoreError(place, REASONS[reason])
