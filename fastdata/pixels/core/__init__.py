"""The door to the compiled core: its library, its records, the calls that draw and serve a batch.

The library is plain C without Python's C API, opened by ctypes, which lets go of the GIL for the
whole call. Records and numbers are those of core.h, which is read for them and says what they mean;
serve.c says how a batch is served. hatch_build.py makes one library for each level of instruction
set and puts it beside the C files; no library is opened on import.

Shape letters: B batch, S ops of a sample, C channels, H W size before, h w size served.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
UInt64s = npt.NDArray[np.uint64]
Levels = Mapping[tuple[int, int, int], Float64s]
"""Magnitudes of a policy, by its place in the table, height and width."""
ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


# What core.h says

_HEADER = re.sub(
    r"/\*.*?\*/", "", Path(__file__).with_name("core.h").read_text("utf-8"), flags=re.DOTALL
)
CONSTANTS: dict[str, int] = {}
"""The names in its enums: codes, domains, interpolations, paddings, reasons, dtypes."""
for _names in re.findall(r"enum \{([^}]*)\}", _HEADER):
    _number = -1
    for _name, _value in re.findall(r"(\w+)(?: = (\w+))?", _names):
        _number = int(CONSTANTS.get(_value, _value or _number + 1))
        CONSTANTS[_name] = _number
_TYPES: dict[str, Any] = {"void": None} | {
    kind: getattr(ctypes, f"c_{kind.removesuffix('_t')}")
    for kind in ("bool", "uint8_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "float", "double")
}
"""By their names in C; a pointer is a ``c_void_p``."""


def _fields_of(record: str) -> list[tuple[str, Any]]:
    """The fields of a record, which may hold one before it."""
    [body] = re.findall(rf"typedef struct(?: \w+)? {{([^}}]*)}} {record};", _HEADER)
    fields = []
    for line in body.split(";")[:-1]:
        kind, names = re.sub(r"\b(const|struct) |\)\(.*", "", line).split(maxsplit=1)
        for name in names.split(","):
            word, *length = re.findall(r"(?!const\b)\w+", name)
            field = ctypes.c_void_p if "*" in name else _TYPES[kind]
            fields.append((word, field * int(length[0]) if length else field))
    return fields


def _array_of(record: str) -> np.dtype[Any]:
    return np.dtype(type(record, (ctypes.Structure,), {"_fields_": _fields_of(record)}))


class Values(ctypes.Structure):
    """How uint8 becomes what is served."""

    _fields_ = _fields_of("Values")


_TYPES["Values"] = Values


class Table(ctypes.Structure):
    """A transform; ``kept`` are the arrays that it points to, the last of them by size."""

    _fields_ = _fields_of("Table")
    kept: tuple[Array, Array, Levels]


class Batch(ctypes.Structure):
    """How samples are served: a table, and memory for rows of (channels, height, width).

    Nothing is written beyond the ``out_bytes`` of that memory. A table that draws perspectives
    needs ``solved_BS8``. With ``channels_last`` the memory is (rows, h, w, C), with MAX_CHANNELS
    at most. ``kept`` holds what the pointers refer to.
    """

    _fields_ = _fields_of("Batch")
    kept: list[Any]


class Jpeg(ctypes.Structure):
    """Functions of libjpeg-turbo, and the library that they are of."""

    _fields_ = _fields_of("Jpeg")
    library: ctypes.CDLL


_Refusal = ctypes.c_int64 * 9
"""As core.h has it: the reason, the program, the step, and numbers."""
OP = _array_of("Op")
STEP = _array_of("Step")
LEVELS = _array_of("Levels")


# The library


@functools.cache
def load() -> ctypes.CDLL:
    """Open the library once; its functions run without the GIL. OSError where it cannot be."""
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
            f"fastdata was installed without its compiled core: {folder} has no "
            f"core-level*{ENDING}. pip makes it on x86-64 (Linux, Windows) and arm64 (Linux, "
            f"macOS); this is {sys.platform} on {platform.machine()}."
        )
    lowest = min(files)
    level = ctypes.CDLL(str(files[lowest])).fastdata_cpu_level()
    if level < lowest:
        raise OSError(
            f"the compiled core needs a CPU with x86-64-v{lowest}; this one has x86-64-v{level}."
        )
    file = files[max(each for each in files if each <= level)]
    library = ctypes.CDLL(str(file))
    sources = b"".join(map(Path.read_bytes, sorted(folder.glob("*.[ch]"))))
    if library.fastdata_sources() & 0xFFFFFFFF != zlib.crc32(sources):
        raise OSError(
            f"{file} was built of other sources than those beside it: install fastdata again."
        )
    for made, name, given in re.findall(r"EXPORT (\w+) (\w+)\(([^)]*)\)", sources.decode()):
        function = getattr(library, name)
        function.restype = _TYPES[made]
        function.argtypes = [
            ctypes.c_void_p if "*" in each else _TYPES[each.split()[0]]
            for each in given.split(",")
            if each != "void"
        ]
    return library


class CoreError(Exception):
    """The core refused the sample at ``place`` of a batch.

    Attributes:
        reason: a name in core.h, but ``"NO_MEMORY"``.
        program: number of the one that refused it.
        step: place in the table of the step that did.
        numbers: what stands beside the reason in core.h.
    """

    def __init__(self, place: int, reason: int, program: int, step: int, *numbers: int) -> None:
        names = list(CONSTANTS)
        self.reason = names[names.index("OK") + reason]
        super().__init__(f"the compiled core refused sample {place} of a batch: {self.reason}")
        self.place = place
        self.program = program
        self.step = step
        self.numbers = numbers


# JPEG files


def open_jpeg(path: str) -> Jpeg:
    """Find libjpeg-turbo among what the library at ``path`` is linked to; else OSError."""
    jpeg = Jpeg()
    jpeg.library = ctypes.CDLL(path)
    for name, _ in Jpeg._fields_[:-1]:
        function = getattr(jpeg.library, f"jpeg_{name}", None)
        if function is None:
            raise OSError(
                f"{path} is not linked to a shared libjpeg-turbo: it knows no jpeg_{name}"
            )
        setattr(jpeg, name, ctypes.cast(function, ctypes.c_void_p).value)
    jpeg.version = load().fastdata_jpeg_version(ctypes.byref(jpeg))
    if not jpeg.version:
        raise OSError(f"the libjpeg of {path} has another binary interface than versions 62 and 80")
    return jpeg


def jpeg_headers(
    files_B: Int64s,
    sizes_B: Int64s,
    *,
    upright: bool = False,
    channels: int | None = None,
    most_pixels: float = np.inf,
) -> tuple[Int32s, Int32s]:
    """Shapes (B, 3) that files at these addresses come out in, and how they are turned (B,).

    Turned they are as their EXIF orientations say if ``upright``, else by 1, which is not at all;
    0: a file is none that the core decodes. With ``channels`` None gray ones have one.
    """
    count = len(files_B)
    if len(sizes_B) != count:
        raise ValueError(
            f"{count} JPEG files came with {len(sizes_B)} sizes, but each needs one. "
            "Pass arrays of one length."
        )
    shapes_B3 = np.empty((count, 3), np.int32)
    turns_B = np.empty(count, np.int32)
    load().fastdata_jpeg_headers(
        files_B.ctypes.data,
        sizes_B.ctypes.data,
        count,
        upright,
        channels or 0,
        most_pixels,
        shapes_B3.ctypes.data,
        turns_B.ctypes.data,
    )
    return shapes_B3, turns_B


def decode_jpeg(jpeg: Jpeg, file: Bytes, out_CHW: Bytes) -> bool:
    """Decode a file; False where it is not of that shape, or its data are not in order.

    Raises:
        ValueError: ``out_CHW`` is not uint8 (C, H, W) that is C-contiguous.
    """
    if out_CHW.dtype != np.uint8 or out_CHW.ndim != 3 or not out_CHW.flags.c_contiguous:
        raise ValueError(
            f"the memory for a JPEG is {out_CHW.dtype} of shape {out_CHW.shape} and strides "
            f"{out_CHW.strides}, but it must be C-contiguous uint8 (C, H, W)"
        )
    given = ctypes.byref(jpeg), file.ctypes.data, file.size
    return bool(load().fastdata_jpeg_decode(*given, *out_CHW.shape, out_CHW.ctypes.data))


# Batches


class Samples:
    """Addresses of uint8 samples; channels, height and width of each.

    They lie as (C, H, W) in memory; or they are ``files``: pointers to how the core decodes JPEG
    files, to the bytes of each, 0 of pixels, and to how they are turned.
    """

    files: tuple[Any, Any, Any] = (None, None, None)

    def __init__(self, sources_B: Int64s, shapes_B3: Int32s) -> None:
        self.sources_B = np.ascontiguousarray(sources_B, np.int64)
        self.shapes_B3 = np.ascontiguousarray(shapes_B3, np.int32)


class Keys(NamedTuple):
    """What samples (B,) draw from."""

    seed: int
    visits: Int64s
    indices: Int64s


def make_table(steps: Array, levels: Levels, **facts: bool) -> Table:
    """A table of steps, with magnitudes for some sizes; the facts are this machine's."""
    sizes = [(*of, values.size, values.ctypes.data) for of, values in levels.items()]
    records = np.array(sizes, LEVELS)
    table = Table(steps.ctypes.data, records.ctypes.data, len(steps), len(records), **facts)
    table.kept = (steps, records, levels)
    load().fastdata_values(ctypes.byref(table))
    return table


def draw(
    table: Table, keys: Keys, shapes_B3: Int32s, *, is_probe: bool = False, room: int = 1
) -> tuple[Array, Int32s]:
    """Draw samples of these channels, heights and widths.

    Perspectives have their corners. A probe gives no ops and refuses no size. Of it 0 x 0 is a size
    that is not known, or not the same for all draws. There is ``room`` for so many ops at first.

    Returns:
        what is done to each sample, ``OP`` (B, S), rows filled up with OP_NOTHING; and shapes
        behind that.

    Raises:
        CoreError: a step is not for such a sample.
        ValueError: there is not one key for each shape.
    """
    _check_lengths(keys, shapes_B3)
    refusal = _Refusal()
    after_B3 = np.array(shapes_B3, np.int32, order="C")
    ops_BS = np.empty((len(after_B3), room), OP)
    most = load().fastdata_draw(
        ctypes.byref(table),
        keys.seed,
        keys.visits.ctypes.data,
        keys.indices.ctypes.data,
        after_B3.ctypes.data,
        len(after_B3),
        ops_BS.ctypes.data,
        room,
        is_probe,
        refusal,
    )
    if most < 0:
        raise CoreError(-1 - most, *refusal)
    if most > room:
        return draw(table, keys, shapes_B3, room=most)
    return ops_BS[:, :most], after_B3


def solve_perspectives(ops_BS: Array) -> Float64s:
    """Coefficients (B, S, 8) of what is done to samples, where that is a perspective.

    As ``_get_perspective_coeffs`` of torchvision's transforms/functional.py, all in one call:
    another solver's last bits move pixels, as what it gives is rounded to float32.
    """
    solved_BS8 = np.zeros((*ops_BS.shape, 8))
    is_warp_BS = ops_BS["code"] == CONSTANTS["OP_PERSPECTIVE"]
    ops_P = ops_BS[is_warp_BS]
    equations_P89 = torch.empty((len(ops_P), 8, 9), dtype=torch.float64, device="cpu")
    load().fastdata_equations(ops_P.ctypes.data, len(ops_P), equations_P89.data_ptr())
    try:
        found = torch.linalg.lstsq(equations_P89[..., :8], equations_P89[..., 8:], driver="gels")
    except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
        raise ValueError(
            "RandomPerspective drew corners that lie on a line, as torchvision's does of small "
            "images. Use larger ones or a smaller distortion_scale."
        ) from cause
    solved_BS8[is_warp_BS] = found.solution[..., 0].float()
    return solved_BS8


def serve(
    samples: Samples,
    keys: Keys,
    every: Sequence[Batch],
    *,
    rows: Int64s | None = None,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Serve samples [first, last) of a batch, each as all that ``every`` asks for.

    Sample b is written to row b of the memory for a batch, or to ``rows[b]``. Its row is filled
    completely, and no other memory is written.

    Raises:
        CoreError: a sample does not come out in that shape, a step is not for it, or its file is
            not in order.
        MemoryError: there is no memory for an image.
        ValueError: there is not one key, shape and row for each sample, or no memory for a row.
    """
    count = _check_lengths(keys, samples.shapes_B3)
    last = count if last is None else last
    if rows is not None:
        rows = np.ascontiguousarray(rows, np.int64)
    if len(samples.sources_B) != count or (rows is not None and len(rows) != count):
        given = f"{len(samples.sources_B)} addresses"
        given += "" if rows is None else f" and {len(rows)} rows to write to"
        raise ValueError(
            f"a batch of {count} samples came with {given}, but each sample needs one. "
            "Pass arrays of one length."
        )
    if not 0 <= first <= last <= count:
        raise ValueError(
            f"samples {first} to {last} of a batch of {count} were asked for. "
            f"Ask for a part of 0 to {count}."
        )
    refusal = _Refusal()
    place = load().fastdata_serve(
        samples.sources_B.ctypes.data,
        samples.shapes_B3.ctypes.data,
        *samples.files,
        keys.seed,
        keys.visits.ctypes.data,
        keys.indices.ctypes.data,
        rows if rows is None else rows.ctypes.data,
        # An array of them takes a microsecond more.
        ctypes.byref(every[0]) if len(every) == 1 else (Batch * len(every))(*every),
        len(every),
        first,
        last,
        refusal,
    )
    if place < 0:
        return
    if refusal[0] == CONSTANTS["NO_MEMORY"]:
        raise MemoryError(
            f"there is no memory for the intermediate images of sample {place} of a batch"
        )
    if refusal[0] == CONSTANTS["REFUSED_ROW"]:
        row, rows_there = refusal[3:5]
        raise ValueError(
            f"sample {place} of a batch of {count} is to be written to row {row}, but the memory "
            f"for the batch has {rows_there} rows of its shape and dtype. Give memory with "
            "a row for every sample."
        )
    raise CoreError(place, *refusal)


def _check_lengths(keys: Keys, shapes_B3: Int32s) -> int:
    """Return how many samples there are: the core reads one key and one shape of each."""
    count = len(keys.indices)
    if len(keys.visits) != count or shapes_B3.shape != (count, 3):
        raise ValueError(
            f"a batch of {count} indices came with {len(keys.visits)} visits and shapes "
            f"{shapes_B3.shape}, but every sample needs an index, a visit and a shape "
            "(channels, height, width). Pass arrays of one length."
        )
    return count


# Draws, as draw.c has them

# Each sample of each epoch owns a SplitMix64 stream. Its start is a hash of (seed, epoch, index),
# and its n-th output depends on n only: a draw is the same whoever computes it, in whatever order
# and in however large a batch.
#
# Source of the mixing function and its constants: G. L. Steele, D. Lea, C. H. Flood, "Fast
# splittable pseudorandom number generators", OOPSLA 2014, with the variant 13 constants of
# D. Stafford; C code: https://prng.di.unimi.it/splitmix64.c

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_DRAWS_PER_OP = 1 << 10
"""Distance in its stream between the draws of two neighbouring ops; RandomResizedCrop uses 40, no
op more."""


def sample_keys(seed: int, epoch_B: int | Int64s, index_B: Int64s) -> UInt64s:
    """Hash seed, epoch of all or of each, and position in the dataset into each stream's start.

    The seed counts modulo 2**64.
    """
    keys = _mix(np.array([(seed + _GAMMA) & _MASK], np.uint64))
    for numbers in (epoch_B, index_B):
        keys = _mix(np.atleast_1d(numbers).astype(np.uint64) * np.uint64(_GAMMA) + keys)
    return keys


def draw_uniform(keys_B: UInt64s, op: int, draw: int) -> Float64s:
    """Draw number ``draw`` of op number ``op`` for each sample, uniform in [0, 1).

    They are multiples of 2**-53.

    Example:
        >>> batch = draw_uniform(sample_keys(7, 0, np.array([3, 1, 2])), op=0, draw=0)
        >>> alone = draw_uniform(sample_keys(7, 0, np.array([1])), op=0, draw=0)
        >>> bool(batch[1] == alone[0])
        True
    """
    step = (op * _DRAWS_PER_OP + draw + 1) * _GAMMA & _MASK
    bits_B = _mix(keys_B + np.uint64(step)) >> 11
    return bits_B.astype(np.float64) * 2.0**-53


def draw_integers(keys_B: UInt64s, op: int, draw: int, count_B: int | np.int64 | Int64s) -> Int64s:
    """Draw integers, uniform in [0, count); every count is at least 1 and far below 2**53."""
    return (draw_uniform(keys_B, op, draw) * count_B).astype(np.int64)


def _mix(bits: UInt64s) -> UInt64s:
    """Finalise in place, on uint64 that wraps around."""
    bits ^= bits >> 30
    bits *= 0xBF58476D1CE4E5B9
    bits ^= bits >> 27
    bits *= 0x94D049BB133111EB
    bits ^= bits >> 31
    return bits
