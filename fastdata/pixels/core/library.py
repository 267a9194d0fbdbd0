"""The library of the compiled core: opening it, and its records, numbers and functions.

The library is plain C without Python's C API. It is opened by ctypes, which releases the GIL during
each call. hatch_build.py makes one library for each level of instruction set and puts it into the
wheel, or next to the C files of an editable install. Importing this file opens no library.
Everything that Python and C share is written once, in records.h; the library exports it as text,
and this file makes NumPy dtypes from it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Dtype = np.dtype[np.void]

ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_TYPES: Mapping[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """An opened library, with the definitions of records.h that it was compiled with.

    Attributes:
        functions: the library; its functions release the GIL.
        numbers: number of each enumerator; codes have names as in core.h, such as ``STEP_PAD``.
        records: dtype of each record. ``STEP``, ``OP`` and ``REFUSAL`` have a nested record for
            each code, all in the same memory, as in a C union.
        reasons: names of the nested records of ``REFUSAL``, from number 1 on.
        output: the record ``Output`` as a ctypes structure.
        refusal: type of the memory for a ``REFUSAL``.
    """

    functions: ctypes.CDLL
    numbers: Mapping[str, int]
    records: Mapping[str, Dtype]
    reasons: tuple[str, ...]
    output: type[ctypes.Structure]
    refusal: type[ctypes.Array[ctypes.c_byte]]


@functools.cache
def load() -> Core:
    """Return the library; it is opened once per process.

    Raises:
        OSError: fastdata has no library for this machine.
    """
    return open_library(Path(__file__).parent)


def obstacle() -> str | None:
    """Return why the library cannot be loaded, or None if it can."""
    try:
        load()
    except OSError as error:
        return str(error)
    return None


def open_library(folder: Path) -> Core:
    """Open the library with the highest level of instruction set that this CPU supports.

    Raises:
        OSError: there is none, or it was built from other sources.
    """
    files = {int(file.stem[-1]): file for file in folder.glob(f"core-level?{ENDING}")}
    if not files:
        if (folder.parents[2] / "pyproject.toml").exists():
            raise OSError(
                f"fastdata was imported from its source folder, {folder.parents[2]}, which has no "
                "compiled core. Install it (pip install .), and start Python in another folder."
            )
        raise OSError(
            f"fastdata was installed without its compiled core: {folder} has no "
            f"core-level*{ENDING}. pip builds it on x86-64 (Linux, Windows) and arm64 (Linux, "
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
    # Functions of an old library next to newer sources may take other arguments, and crash. A wheel
    # has the libraries without the sources.
    sources = sorted(folder.glob("*.[ch]"))
    checksum = zlib.crc32(b"".join(map(Path.read_bytes, sources)))
    if sources and library.fastdata_sources() & 0xFFFFFFFF != checksum:
        raise OSError(
            f"{file} was built from other sources than the C files next to it. Install fastdata "
            "again."
        )
    return _read_layout(library)


def _read_layout(library: ctypes.CDLL) -> Core:
    """Read records.h as text from the library: each line has a kind, a name and C code."""
    numbers: dict[str, int] = {}
    records: dict[str, Dtype] = {}
    heads: dict[str, Dtype] = {}
    members: dict[str, dict[str, Dtype]] = {"STEP": {}, "OP": {}, "REFUSAL": {}}
    library.fastdata_layout.restype = ctypes.c_char_p
    text: bytes = library.fastdata_layout()
    for line in text.decode().splitlines():
        kind, name, body = line.split("|")
        if kind == "FUNCTION":
            _declare(library, name, body)
        elif kind == "ENUM":
            numbers.update(zip(body.split(", "), itertools.count(), strict=False))
        elif kind == "RECORD":
            records[name] = _record(body, records)
        elif name:
            numbers[f"{kind}_{name.upper()}"] = len(members[kind])
            members[kind][name] = _record(body, records)
        else:
            heads[kind] = _record(body, records)
    unions = {kind: _union(heads[kind], members[kind]) for kind in members}
    _check_sizes(library, [*unions.values(), *records.values()])
    return Core(
        functions=library,
        numbers=numbers,
        records=records | unions,
        reasons=tuple(members["REFUSAL"]),
        output=_structure(records["Output"]),
        refusal=ctypes.c_byte * unions["REFUSAL"].itemsize,
    )


def _declare(library: ctypes.CDLL, head: str, arguments: str) -> None:
    """Declare a function's types: without them ctypes would pass pointers as 32 bits."""
    result, name = head.split()
    function = getattr(library, name)
    function.restype = _TYPES[result]
    function.argtypes = [
        ctypes.c_void_p if "*" in argument else _TYPES[argument.split()[0]]
        for argument in arguments.split(",")
    ]


def _record(text: str, known: Mapping[str, Dtype]) -> Dtype:
    """Return the dtype of a C struct with fields such as ``int32_t top, left; double fill[4];``."""
    fields: list[tuple[str, Any, tuple[int, ...]]] = []
    for declaration in text.split(";")[:-1]:
        pointer = re.search(r"\*(\w+)", declaration)  # also a pointer to a function
        if pointer:
            fields.append((pointer[1], np.uintp, ()))
            continue
        kind, names = declaration.split(maxsplit=1)
        for name, length in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            shape = (int(length),) if length else ()
            fields.append((name, _TYPES.get(kind) or known[kind], shape))
    return np.dtype(fields, align=True)


def _union(head: Dtype, members: Mapping[str, Dtype]) -> Dtype:
    """Return the dtype of a union: the shared fields first, then all members in the same place."""
    places: Any = dict(head.fields or {})
    places |= {name: (dtype, head.itemsize) for name, dtype in members.items()}
    union: Dtype = np.dtype(places)
    return union


def _structure(dtype: Dtype) -> type[ctypes.Structure]:
    convert: Any = np.ctypeslib.as_ctypes_type  # its type hints do not include records
    made: type[ctypes.Structure] = convert(dtype)
    return made


def _check_sizes(library: ctypes.CDLL, made: Sequence[Dtype]) -> None:
    library.fastdata_sizes.restype = ctypes.POINTER(ctypes.c_int64)
    sizes = library.fastdata_sizes()[: len(made)]
    # If C aligned fields differently from NumPy, they would be read from wrong places.
    if sizes != [dtype.itemsize for dtype in made]:
        raise OSError(f"{library._name} has records of {sizes} bytes, but {made} were read")
