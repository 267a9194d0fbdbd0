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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_MASK = (1 << 64) - 1


# What core.h says


@functools.cache
def _header() -> str:
    """Its text without comments."""
    text = (Path(__file__).parent / "core.h").read_text("utf-8")
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@functools.cache
def constants() -> dict[str, int]:
    """The names in its enums: codes, domains, interpolations, paddings, reasons, dtypes."""
    numbers: dict[str, int] = {}
    for names in re.findall(r"enum \{([^}]*)\}", _header()):
        number = -1
        for name, value in re.findall(r"(\w+)(?: = (\w+))?", names):
            number = number + 1 if not value else numbers[value] if value in numbers else int(value)
            numbers[name] = number
    return numbers


_TYPES: dict[str, Any] = {"void": None} | {
    kind: getattr(ctypes, f"c_{kind.removesuffix('_t')}")
    for kind in ("bool", "uint8_t", "int32_t", "uint32_t", "int64_t", "uint64_t", "float", "double")
}
"""By their names in C; a pointer is a ``c_void_p``."""


def _fields_of(record: str, **records: Any) -> list[tuple[str, Any]]:
    """The fields of a record, which may hold some of ``records``."""
    found = re.search(rf"typedef struct(?: \w+)? {{([^}}]*)}} {record};", _header())
    assert found is not None
    fields: list[tuple[str, Any]] = []
    for line in found[1].split(";")[:-1]:
        kind, names = re.sub(r"\b(const|struct) |\)\(.*", "", line).split(maxsplit=1)
        for name in names.split(","):
            word, *length = re.findall(r"(?!const\b)\w+", name)
            field = ctypes.c_void_p if "*" in name else (_TYPES | records)[kind]
            fields.append((word, field * int(length[0]) if length else field))
    return fields


def _array_of(record: str) -> np.dtype[Any]:
    return np.dtype(type(record, (ctypes.Structure,), {"_fields_": _fields_of(record)}))


class Values(ctypes.Structure):
    """How uint8 becomes what is served."""

    _fields_ = _fields_of("Values")


class Table(ctypes.Structure):
    """A transform; ``kept`` are the arrays that it points to."""

    _fields_ = _fields_of("Table", Values=Values)
    kept: tuple[Any, ...]


class Refusal(ctypes.Structure):
    """Why a sample was refused."""

    _fields_ = _fields_of("Refusal")


class Batch(ctypes.Structure):
    """What samples are served as: a table, and room for (B, channels, height, width).

    ``solved_BS8`` is told of what draws perspectives. ``channels_last``: it lies as (B, h, w, C),
    and has MAX_CHANNELS at most. ``kept`` is what it points to; the rest ``serve`` fills.
    """

    _fields_ = _fields_of("Batch")
    kept: tuple[Any, ...]


class Jpeg(ctypes.Structure):
    """Functions of libjpeg-turbo, and the library that they are of."""

    _fields_ = _fields_of("Jpeg")
    library: ctypes.CDLL


MAX_CHANNELS = constants()["MAX_CHANNELS"]
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
    if ctypes.c_uint32(library.fastdata_sources()).value != zlib.crc32(sources):
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

    def __init__(self, place: int, refusal: Refusal) -> None:
        names = list(constants())
        self.reason = names[names.index("OK") + refusal.reason]
        super().__init__(f"the compiled core refused sample {place} of a batch: {self.reason}")
        self.place = place
        self.program: int = refusal.program
        self.step: int = refusal.step
        self.numbers: tuple[int, ...] = tuple(refusal.n)


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
    sources_B: npt.NDArray[np.int64], sizes_B: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Channels, height and width (B, 3) as pixels lie in files, and EXIF orientations (B,).

    0 channels: no JPEG file, or none that the core decodes. Orientation 0: not clear.
    """
    count = len(sources_B)
    headers_B4 = np.empty((count, 4), np.int32)
    load().fastdata_jpeg_headers(sources_B.ctypes, sizes_B.ctypes, count, headers_B4.ctypes)
    return np.ascontiguousarray(headers_B4[:, :3]), np.ascontiguousarray(headers_B4[:, 3])


def decode_jpeg(jpeg: Jpeg, source: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> bool:
    """Decode a file of the size of ``out``, (C, H, W).

    3 channels come of any file, 1 of a grey one. False where its header or data are not in order.
    """
    file = ctypes.byref(jpeg), source.ctypes, source.size
    return bool(load().fastdata_jpeg_decode(*file, *out.shape, out.ctypes))


# Batches


class Files(NamedTuple):
    """Samples (B,) that are JPEG files: bytes of each, 0 of pixels; EXIF orientations."""

    jpeg: Jpeg
    sizes: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int32]


class Samples:
    """Addresses of uint8 samples; channels, height and width of each.

    They lie as (C, H, W) in memory, ``is_interleaved`` ones as (H, W, C); or they are ``files``.
    """

    files: Files | None = None
    is_interleaved = False

    def __init__(self, sources_B: npt.NDArray[np.int64], shapes_B3: npt.NDArray[np.int32]) -> None:
        self.sources_B = sources_B
        self.shapes_B3 = shapes_B3


class Keys(NamedTuple):
    """What samples (B,) draw from."""

    seed: int
    visits: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]


def make_table(
    steps: npt.NDArray[Any],
    levels: Mapping[tuple[int, int, int], npt.NDArray[np.float64]],
    **facts: bool,
) -> Table:
    """A table of steps, with magnitudes by step, height and width; the facts are this machine's."""
    sizes = [(*of, values.size, values.ctypes.data) for of, values in levels.items()]
    records = np.array(sizes, LEVELS)
    table = Table(steps.ctypes.data, records.ctypes.data, len(steps), len(records), **facts)
    table.kept = (steps, records, levels)
    load().fastdata_values(ctypes.byref(table))
    return table


def draw(
    table: Table,
    keys: Keys,
    shapes_B3: npt.NDArray[np.int32],
    *,
    is_probe: bool = False,
    room: int = 8,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Draw samples of these channels, heights and widths.

    Perspectives have their corners. A probe gives no ops and refuses no size. Of it 0 x 0 is a size
    that is not known, or not the same for all draws. There is ``room`` for so many ops at first.

    Returns:
        what is done to each sample, ``OP`` (B, S), rows filled up with OP_NOTHING; and shapes
        behind that.

    Raises:
        CoreError: a step is not for such a sample.
    """
    seed, visits_B, indices_B = keys
    refusal = Refusal()
    after_B3 = np.array(shapes_B3, np.int32, order="C")
    ops_BS = np.empty((len(indices_B), room), OP)
    most = load().fastdata_draw(
        ctypes.byref(table),
        seed & _MASK,
        visits_B.ctypes,
        indices_B.ctypes,
        after_B3.ctypes,
        len(after_B3),
        ops_BS.ctypes,
        room,
        is_probe,
        ctypes.byref(refusal),
    )
    if most < 0:
        raise CoreError(-1 - most, refusal)
    if most > room:
        return draw(table, keys, shapes_B3, room=most)
    return ops_BS[:, :most], after_B3


def equations(ops_P: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """What the coefficients of perspectives solve, eight by nine numbers for each."""
    equations_P89 = np.empty((len(ops_P), 8, 9))
    load().fastdata_equations(ops_P.ctypes, len(ops_P), equations_P89.ctypes)
    return equations_P89


def serve(
    samples: Samples,
    keys: Keys,
    every: Sequence[Batch],
    *,
    rows: npt.NDArray[np.int64] | None = None,
    first: int = 0,
    last: int | None = None,
) -> None:
    """Serve samples [first, last) of a batch, each as all that ``every`` asks for.

    What is asked for is filled completely; with ``rows``, int64 (B,), only these rows of what may
    have more than B.

    Raises:
        CoreError: a sample does not come out in that shape, a step is not for it, or its file is
            not in order.
        MemoryError: there is no memory for an image.
    """
    batch = every[0]  # where the core reads the samples of all
    batch.sources_B = samples.sources_B.ctypes.data
    batch.shapes_B3 = samples.shapes_B3.ctypes.data
    batch.interleaved = samples.is_interleaved
    batch.seed = keys.seed & _MASK
    batch.visits_B = keys.visits.ctypes.data
    batch.indices_B = keys.indices.ctypes.data
    files = samples.files
    if files is not None:
        batch.sizes_B = files.sizes.ctypes.data
        batch.turns_B = files.turns.ctypes.data
        batch.jpeg = ctypes.addressof(files.jpeg)
    if rows is not None:
        for each in every:
            each.rows_B = rows.ctypes.data
    for each, following in pairwise(every):
        each.next = ctypes.addressof(following)
    refusal = Refusal()
    end = len(samples.sources_B) if last is None else last
    place = load().fastdata_serve(ctypes.byref(batch), first, end, ctypes.byref(refusal))
    if place < 0:
        return
    if refusal.reason == constants()["NO_MEMORY"]:
        raise MemoryError(
            f"there is no memory for the intermediate images of sample {place} of a batch"
        )
    raise CoreError(place, refusal)
