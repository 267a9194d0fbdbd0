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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
RECORD = np.dtype([("code", "<i4"), ("n", "<i4", 9), ("v", "<f8", 12)])
"""``Op`` of core.h: one step for one sample."""
OUTPUTS = {"uint8": 0, "float32": 1, "float64": 2, "float16": 3, "bfloat16": 4}
"""What can be served."""
REASONS = ("", "memory", "outside", "shape", "op", "file")

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
        *((name, ctypes.c_void_p) for name in ("sources_B", "sizes_B", "turns_B", "jpeg", "shapes_B3")),
        *((name, ctypes.c_void_p) for name in ("ops_SB", "out_B", "rows_B")),
        *((name, ctypes.c_int32) for name in ("samples", "steps", "interleaved", "channels", "height", "width")),
        ("values", Values),
        ("next", ctypes.c_void_p),
    )


class Jpeg(ctypes.Structure):
    """``Jpeg`` of core.h: libjpeg-turbo's functions, and the library that they are of."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("create", "read_header", "start", "crop", "skip", "read")),
        *((name, ctypes.c_void_p) for name in ("is_read", "resync", "destroy")),
        ("version", ctypes.c_int32),
    )
    library: ctypes.CDLL


_JPEG_NAMES = {"create": "CreateDecompress", "start": "start_decompress", "is_read": "input_complete"}
_JPEG_NAMES |= {"crop": "crop_scanline", "skip": "skip_scanlines", "read": "read_scanlines"}
_JPEG_NAMES |= {"read_header": "read_header", "resync": "resync_to_restart", "destroy": "destroy_decompress"}
"""Field of ``Jpeg`` -> the function's name, without ``jpeg_``."""


class Files(NamedTuple):
    """Samples (B,) that are JPEG files: how many bytes each has, 0 of one that is pixels; its EXIF orientation."""

    jpeg: Jpeg
    sizes: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int32]


class Served(NamedTuple):
    """What a batch is served as: what is done to its samples (S, B), and the address of (B, *shape) that is filled."""

    records: npt.NDArray[Any]
    values: Values
    out: int
    shape: tuple[int, ...]


class CoreError(Exception):
    """The core refused the sample at ``place`` of a batch; ``reason`` is one of ``REASONS``, but ``"memory"``."""

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
    if library.fastdata_sources() != zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))):
        raise OSError(f"{file} was built of other sources than those beside it: install fastdata again.")
    library.fastdata_serve.restype = ctypes.c_int64
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.fastdata_serve.argtypes = (address, count, count)
    library.fastdata_jpeg_headers.argtypes = (address, address, count, address)
    library.fastdata_jpeg_decode.argtypes = (address, address, count, number, number, number, number, address)
    return library


def open_jpeg(path: str) -> Jpeg:
    """Find libjpeg-turbo among the libraries that the one at ``path`` is linked to; OSError where it is not."""
    jpeg = Jpeg()
    jpeg.library = ctypes.CDLL(path)
    for field, name in _JPEG_NAMES.items():
        function = getattr(jpeg.library, f"jpeg_{name}", None)
        if function is None:
            raise OSError(f"{path} is not linked to a shared libjpeg-turbo: it knows no jpeg_{name}")
        setattr(jpeg, field, ctypes.cast(function, ctypes.c_void_p).value)
    jpeg.version = load().fastdata_jpeg_version(ctypes.byref(jpeg))
    if not jpeg.version:
        raise OSError(f"the libjpeg of {path} has another binary interface than versions 62 and 80")
    return jpeg


def jpeg_headers(
    sources_B: npt.NDArray[np.int64], sizes_B: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Channels, height and width (B, 3) of files as their pixels lie in them, and EXIF orientations (B,).

    0 channels: no JPEG file, or none that the core decodes. Orientation 0: not clear.
    """
    headers_B4 = np.empty((len(sources_B), 4), np.int32)
    addresses = (array.ctypes.data for array in (sources_B, sizes_B))
    load().fastdata_jpeg_headers(*addresses, len(sources_B), headers_B4.ctypes.data)
    return np.ascontiguousarray(headers_B4[:, :3]), np.ascontiguousarray(headers_B4[:, 3])


def decode_jpeg(
    jpeg: Jpeg, source: int, size_bytes: int, out: npt.NDArray[np.uint8], *, interleaved: bool = False
) -> bool:
    """Decode a file of the size of ``out``, (C, H, W) or interleaved; False where its header or data are not in order.

    3 channels come of any file, 1 of a grey one.
    """
    channels, height, width = (out.shape[2], *out.shape[:2]) if interleaved else out.shape
    where = (ctypes.byref(jpeg), source, size_bytes, channels, height, width, interleaved, out.ctypes.data)
    return bool(load().fastdata_jpeg_decode(*where))


def serve(
    sources_B: npt.NDArray[np.int64],
    shapes_B3: npt.NDArray[np.int32],
    every: Sequence[Served],
    *,
    files: Files | None = None,
    rows_B: npt.NDArray[np.int64] | None = None,
    first: int = 0,
    last: int | None = None,
    interleaved: bool = False,
) -> None:
    """Serve samples [first, last) of a batch of uint8, each as all that ``every`` asks for, which is filled completely.

    ``sources_B`` are the addresses of the samples, ``shapes_B3`` channels, height and width of each. Samples lie as
    (C, H, W) in memory, ``interleaved`` ones as (H, W, C); or they are ``files``. With ``rows_B`` only these rows are
    filled of what may have more than B.

    Raises:
        CoreError: a sample does not come out in that shape, its records do not fit it, or its file is not in order.
        MemoryError: there is no memory for an image.
    """
    samples, rows = len(sources_B), None if rows_B is None else rows_B.ctypes.data
    encoded: tuple[Any, ...] = (None, None, None)
    if files is not None:
        encoded = (files.sizes.ctypes.data, files.turns.ctypes.data, ctypes.addressof(files.jpeg))
    where = (sources_B.ctypes.data, *encoded, shapes_B3.ctypes.data)
    batches: list[Batch] = []
    for records_SB, values, out, shape in reversed(every):
        what = (records_SB.ctypes.data, out, rows, samples, len(records_SB), interleaved, *shape, values)
        batches.append(Batch(*where, *what, ctypes.addressof(batches[-1]) if batches else None))
    outcome = load().fastdata_serve(ctypes.byref(batches[-1]), first, samples if last is None else last)
    if outcome < 0:
        return
    place, reason = divmod(outcome, 8)
    if REASONS[reason] == "memory":
        raise MemoryError(f"there is no memory for the intermediate images of sample {place} of a batch")
    raise CoreError(place, REASONS[reason])
