"""The door to the compiled core: its library, its records, and the calls that draw and serve a batch.

The library is plain C without Python's C API, opened by ctypes, which lets go of the GIL for the
whole call. What a record means stands in core.h, whose numbers are read from it, and how a batch is
served in serve.c. hatch_build.py makes one library for each level of instruction set and puts it
beside the C files; nothing is opened on import.

Shape letters: B batch, S ops of a sample, C channels, H W size before, h w size served, k
perspectives of a sample.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
OP = np.dtype([("code", "<i4"), ("n", "<i4", 9), ("v", "<f8", 12)])
"""``Op`` of core.h: what is done to one sample."""
STEP = np.dtype(
    [
        *((name, "<i4") for name in ("code", "first", "count", "fills")),
        *(("at", "<i8"), ("n", "<i4", 12), ("v", "<f8", 12), ("fill", "<f8", 4)),
    ]
)
"""``Step`` of core.h: what is drawn for all samples."""
LEVELS = np.dtype(
    [*((name, "<i4") for name in ("step", "height", "width", "count")), ("levels", "<u8")]
)
"""``Levels`` of core.h."""
_MASK = (1 << 64) - 1
_FEW_OPS = 8


class Table(ctypes.Structure):
    """``Table`` of core.h: a transform; ``kept`` are the arrays that it points to."""

    _fields_ = (
        ("steps", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        *(
            (name, ctypes.c_int32)
            for name in ("count", "levels_count", "fuses", "resizes_fast", "chooses_order")
        ),
    )
    kept: tuple[Any, ...]


class Refusal(ctypes.Structure):
    """``Refusal`` of core.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("reason", "program", "step", "padding")),
        ("n", ctypes.c_int64 * 6),
    )


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
        *(
            (name, ctypes.c_void_p)
            for name in ("sources_B", "sizes_B", "turns_B", "jpeg", "shapes_B3")
        ),
        ("seed", ctypes.c_uint64),
        *(
            (name, ctypes.c_void_p)
            for name in ("visits_B", "indices_B", "solved_Bk8", "table", "out_B", "rows_B")
        ),
        ("visit", ctypes.c_int64),
        ("shape", ctypes.c_int32 * 3),
        *(
            (name, ctypes.c_int32)
            for name in ("solved", "interleaved", "channels", "height", "width")
        ),
        ("values", Values),
        ("next", ctypes.c_void_p),
    )


class Jpeg(ctypes.Structure):
    """``Jpeg`` of core.h: libjpeg-turbo's functions, and the library that they are of."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("create", "read_header", "start", "crop", "skip", "read")
        ),
        *((name, ctypes.c_void_p) for name in ("is_read", "resync", "destroy")),
        ("version", ctypes.c_int32),
    )
    library: ctypes.CDLL


_JPEG_NAMES = {
    "create": "CreateDecompress",
    "start": "start_decompress",
    "is_read": "input_complete",
}
_JPEG_NAMES |= {"crop": "crop_scanline", "skip": "skip_scanlines", "read": "read_scanlines"}
_JPEG_NAMES |= {
    "read_header": "read_header",
    "resync": "resync_to_restart",
    "destroy": "destroy_decompress",
}
"""Field of ``Jpeg`` -> the function's name, without ``jpeg_``."""


class Files(NamedTuple):
    """Samples (B,) that are JPEG files: how many bytes each has, 0 of one that is pixels; its EXIF orientation."""

    jpeg: Jpeg
    sizes: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int32]


class Samples(NamedTuple):
    """What is served: addresses of samples, uint8, and channels, height, width of all of them, or int32 (B, 3).

    They lie as (C, H, W) in memory, ``is_interleaved`` ones as (H, W, C); or they are ``files``.
    """

    sources: npt.NDArray[np.int64]
    shapes: tuple[int, ...] | npt.NDArray[np.int32]
    files: Files | None = None
    is_interleaved: bool = False


class Keys(NamedTuple):
    """What samples draw from: one visit for all of them or int64 (B,), and their indices, int64 (B,)."""

    seed: int
    visits: int | npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]


class Served(NamedTuple):
    """What samples are served as, and the address of (B, *shape) that is filled.

    ``solved``, float64 (B, k, 8), are the coefficients of its perspectives.
    """

    table: Table
    values: Values
    out: int
    shape: tuple[int, ...]
    solved: npt.NDArray[np.float64] | None = None


class CoreError(Exception):
    """The core refused the sample at ``place`` of a batch.

    Attributes:
        reason: a name in core.h, but ``"NO_MEMORY"``.
        program: number of the one that refused it.
        step: place in the table of the step that did.
        numbers: what stands beside the reason in core.h.
    """

    def __init__(self, place: int, refusal: Refusal) -> None:
        names = (name for name, number in constants().items() if number == refusal.reason)
        self.reason = next(
            name for name in names if name.startswith(("REFUSED", "NEEDS", "NO_MEMORY"))
        )
        super().__init__(f"the compiled core refused sample {place} of a batch: {self.reason}")
        self.place, self.program, self.step = place, int(refusal.program), int(refusal.step)
        self.numbers: tuple[int, ...] = tuple(refusal.n)


@functools.cache
def constants() -> dict[str, int]:
    """The names in core.h's enums and their numbers: codes, domains, interpolations, paddings, reasons."""
    text = (Path(__file__).parent / "core.h").read_text("utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    numbers: dict[str, int] = {}
    for names in re.findall(r"enum \{([^}]*)\}", text):
        number = -1
        for name, value in re.findall(r"(\w+)(?: = (\w+))?", names):
            number = number + 1 if not value else numbers[value] if value in numbers else int(value)
            numbers[name] = number
    return numbers


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
        raise OSError(
            f"the compiled core needs a CPU with x86-64-v{min(files)}; this one has x86-64-v{level}."
        )
    file = files[max(each for each in files if each <= level)]
    library = ctypes.CDLL(str(file))
    library.fastdata_sources.restype = ctypes.c_uint32
    if library.fastdata_sources() != zlib.crc32(
        b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))
    ):
        raise OSError(
            f"{file} was built of other sources than those beside it: install fastdata again."
        )
    library.fastdata_serve.restype = library.fastdata_draw.restype = ctypes.c_int64
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.fastdata_serve.argtypes = (address, count, count, address)
    library.fastdata_draw.argtypes = (
        address,
        address,
        address,
        count,
        address,
        count,
        ctypes.c_bool,
        address,
    )
    library.fastdata_jpeg_headers.argtypes = (address, address, count, address)
    library.fastdata_jpeg_decode.argtypes = (
        address,
        address,
        count,
        number,
        number,
        number,
        number,
        address,
    )
    return library


def open_jpeg(path: str) -> Jpeg:
    """Find libjpeg-turbo among the libraries that the one at ``path`` is linked to; OSError where it is not."""
    jpeg = Jpeg()
    jpeg.library = ctypes.CDLL(path)
    for field, name in _JPEG_NAMES.items():
        function = getattr(jpeg.library, f"jpeg_{name}", None)
        if function is None:
            raise OSError(
                f"{path} is not linked to a shared libjpeg-turbo: it knows no jpeg_{name}"
            )
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
    jpeg: Jpeg,
    source: int,
    size_bytes: int,
    out: npt.NDArray[np.uint8],
    *,
    interleaved: bool = False,
) -> bool:
    """Decode a file of the size of ``out``, (C, H, W) or interleaved; False where its header or data are not in order.

    3 channels come of any file, 1 of a grey one.
    """
    channels, height, width = (out.shape[2], *out.shape[:2]) if interleaved else out.shape
    where = (
        ctypes.byref(jpeg),
        source,
        size_bytes,
        channels,
        height,
        width,
        interleaved,
        out.ctypes.data,
    )
    return bool(load().fastdata_jpeg_decode(*where))


def make_table(
    steps: npt.NDArray[Any],
    levels: npt.NDArray[Any],
    *,
    fuses: bool,
    resizes_fast: bool,
    chooses_order: bool,
) -> Table:
    """A table of steps, whose levels lie in memory that stays; the facts are of this machine's torch and Pillow."""
    addresses = (steps.ctypes.data, levels.ctypes.data)
    table = Table(*addresses, len(steps), len(levels), fuses, resizes_fast, chooses_order)
    table.kept = (steps, levels)
    return table


def draw(
    table: Table,
    keys_B: npt.NDArray[np.uint64],
    shapes_B3: npt.NDArray[np.int32],
    *,
    is_probe: bool = False,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Draw samples of these channels, heights and widths, by keys of ``draws.sample_keys``.

    Perspectives have their corners where ``serve`` needs their coefficients. A probe gives no ops
    and refuses no size. Of it 0 x 0 is a size that is not known, or not the same for all draws.

    Returns:
        what is done to each sample, ``OP`` (B, S), rows filled up with OP_NOTHING; and shapes
        behind that.

    Raises:
        CoreError: a step is not for such a sample.
    """
    keys_B, room = np.ascontiguousarray(keys_B, np.uint64), 0 if is_probe else _FEW_OPS
    while True:
        shapes_after_B3, refusal = np.array(shapes_B3, np.int32, order="C"), Refusal()
        ops_BS = np.empty((len(keys_B), room), OP)
        addresses = keys_B.ctypes.data, shapes_after_B3.ctypes.data, len(keys_B), ops_BS.ctypes.data
        most = load().fastdata_draw(
            ctypes.byref(table), *addresses, room, is_probe, ctypes.byref(refusal)
        )
        if most < 0:
            raise CoreError(-1 - most, refusal)
        if is_probe or most <= room:
            return ops_BS[:, :most], shapes_after_B3
        room = most


def serve(
    samples: Samples,
    keys: Keys,
    every: Sequence[Served],
    *,
    rows: npt.NDArray[np.int64] | None = None,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Serve samples [first, last) of a batch, each as all that ``every`` asks for, which is filled completely.

    With ``rows``, int64 (B,), only these rows are filled of what may have more than B.

    Raises:
        CoreError: a sample does not come out in that shape, a step is not for it, or its file is
            not in order.
        MemoryError: there is no memory for an image.
    """
    sources, shapes, files, is_interleaved = samples
    seed, visits, indices = keys
    encoded: tuple[Any, ...] = (None, None, None)
    if files is not None:
        encoded = (files.sizes.ctypes.data, files.turns.ctypes.data, ctypes.addressof(files.jpeg))
    shapes_address, shape = (
        (None, shapes) if isinstance(shapes, tuple) else (shapes.ctypes.data, (0, 0, 0))
    )
    visits_address, visit = (None, visits) if isinstance(visits, int) else (visits.ctypes.data, 0)
    where = (
        sources.ctypes.data,
        *encoded,
        shapes_address,
        seed & _MASK,
        visits_address,
        indices.ctypes.data,
    )
    rows_address = None if rows is None else rows.ctypes.data
    batches: list[Batch] = []
    for table, values, out, (channels, height, width), solved in reversed(every):
        coefficients, count = (None, 0) if solved is None else (solved.ctypes.data, solved.shape[1])
        what = (coefficients, ctypes.addressof(table), out, rows_address, visit, shape, count)
        behind = ctypes.addressof(batches[-1]) if batches else None
        batches.append(
            Batch(*where, *what, is_interleaved, channels, height, width, values, behind)
        )
    refusal = Refusal()
    whole = len(sources) if last is None else last
    place = load().fastdata_serve(ctypes.byref(batches[-1]), first, whole, ctypes.byref(refusal))
    if place < 0:
        return
    refused = CoreError(place, refusal)
    if refused.reason == "NO_MEMORY":
        raise MemoryError(
            f"there is no memory for the intermediate images of sample {place} of a batch"
        )
    raise refused
