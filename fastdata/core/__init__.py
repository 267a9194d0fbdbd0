"""The door to the compiled core: its library, its records, and the call that serves a batch.

The library is plain C without Python's C API, opened by ctypes, which lets go of the GIL for the whole call. What a
record means stands in core.h, and how a batch is served in serve.c. hatch_build.py makes one library for each level of
instruction set and puts it beside the C files; nothing is opened on import.

Shape letters: B batch, S steps, C channels, H W size before, h w size served.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import platform
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
RECORD = np.dtype([("code", "<i4"), ("n", "<i4", 9), ("v", "<f8", 12)])
"""``Op`` of core.h: one step for one sample."""
OUTPUTS = {"uint8": 0, "float32": 1, "float64": 2, "float16": 3, "bfloat16": 4}
"""What can be served."""
REASONS = ("", "memory", "outside", "shape", "op")

Code = enum.IntEnum(
    "Code",
    "NOTHING WINDOW RESIZE AFFINE PERSPECTIVE TURN BRIGHTNESS CONTRAST SOLARIZE SOLARIZE_ADD POSTERIZE INVERT "
    "AUTOCONTRAST EQUALIZE GRAYSCALE SATURATION HUE SHARPNESS BLUR BOX_BLUR PERMUTE NOISE ERASE "
    "MIX_BEGIN MIX_ADD MIX_END CAST",
    start=0,
)
"""What a record does, in core.h's order."""


class Values(ctypes.Structure):
    """``Values`` of serve.c: how uint8 becomes what is served; ``kept`` are the arrays that it points to."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "by_formula", "divides", "widens")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("mean_C", "std_C", "table_C256")),
    )
    kept: list[Any]


class Batch(ctypes.Structure):
    """``Batch`` of serve.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sources_B", "shapes_B3", "ops_SB", "out_B", "rows_B")),
        *((name, ctypes.c_int32) for name in ("samples", "steps", "interleaved", "channels", "height", "width")),
        ("values", Values),
    )


class CoreError(Exception):
    """The core refused the sample at ``place`` of a batch; ``reason``: ``"outside"``, ``"shape"`` or ``"op"``."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(f"the compiled core refused sample {place} of a batch: {reason}")
        self.place, self.reason = place, reason


@functools.cache
def load() -> ctypes.CDLL:
    """Give the library, opened once; its functions run without the GIL. OSError where there is an obstacle."""
    return open_library(Path(__file__).parent)


def obstacle() -> str | None:
    """Say why the library cannot be loaded, or None if it can."""
    try:
        load()
    except OSError as error:
        return str(error)
    return None


def open_library(folder: Path) -> ctypes.CDLL:
    """Open the library of the highest level of instruction set that this CPU has."""
    files = {int(file.stem[-1]): file for file in folder.glob(f"core-level?{ENDING}")}
    if not files:
        raise OSError(
            f"fastdata was installed without its compiled core: {folder} has no core-level*{ENDING}. pip makes it on "
            f"x86-64 (Linux, Windows) and arm64 (Linux, macOS); this is {sys.platform} on {platform.machine()}."
        )
    level = ctypes.CDLL(str(files[min(files)])).fastdata_cpu_level()
    if level < min(files):
        raise OSError(f"the compiled core needs a CPU with x86-64-v{min(files)}; this one has x86-64-v{level}.")
    file = files[max(each for each in files if each <= level)]
    library = ctypes.CDLL(str(file))
    library.fastdata_sources.restype = ctypes.c_uint32
    library.fastdata_serve.restype = ctypes.c_int64
    library.fastdata_serve.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    if library.fastdata_sources() != zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))):
        raise OSError(f"{file} was built of other sources than those beside it: install fastdata again.")
    return library


def serve(
    sources_B: npt.NDArray[np.int64],
    shapes_B3: npt.NDArray[np.int32],
    records_SB: npt.NDArray[Any],
    values: Values,
    out: int,
    shape: tuple[int, ...],
    *,
    rows_B: npt.NDArray[np.int64] | None = None,
    first: int = 0,
    last: int | None = None,
    interleaved: bool = False,
) -> None:
    """Serve samples [first, last) of a batch of uint8 into ``out``, the address of (B, C, h, w), filled completely.

    ``sources_B`` are the addresses of the samples, ``shapes_B3`` channels, height and width of each, ``records_SB``
    what is done to them, C-contiguous; ``shape`` is (C, h, w). ``interleaved`` samples are (H, W, C) in memory. With
    ``rows_B`` only these rows of ``out``, which may have more than B, are filled.

    Raises:
        CoreError: a sample does not come out in that shape, or its records do not fit it.
        MemoryError: there is no memory for an image.
    """
    arrays = (array.ctypes.data for array in (sources_B, shapes_B3, records_SB))
    rows = None if rows_B is None else rows_B.ctypes.data
    batch = Batch(*arrays, out, rows, len(sources_B), len(records_SB), interleaved, *shape, values)
    outcome = load().fastdata_serve(ctypes.byref(batch), first, len(sources_B) if last is None else last)
    if outcome < 0:
        return
    place, reason = divmod(outcome, 8)
    if REASONS[reason] == "memory":
        raise MemoryError(f"there is no memory for the intermediate images of sample {place} of a batch")
    raise CoreError(place, REASONS[reason])
