"""The compiled core as a library: the file that is opened, and its records, numbers and functions.

The library is plain C without Python's C API, opened by ctypes, which releases the GIL for each
whole call. hatch_build.py makes one library for each level of instruction set and puts it next to
the C files. No library is opened on import. All that Python and C share is written once, in
records.h; the library exports it as text, and here it becomes NumPy dtypes.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Dtype = np.dtype[np.void]

ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_KINDS = {
    "int32_t": np.dtype(np.int32),
    "int64_t": np.dtype(np.int64),
    "uint64_t": np.dtype(np.uint64),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}
_UNIONS = ("STEP", "OP", "REFUSAL")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The names of records.h, as the opened library was compiled with them.

    Attributes:
        numbers: the number of each enumerator; codes as in core.h, such as ``STEP_PAD``.
        records: the dtype of each record. ``STEP``, ``OP`` and ``REFUSAL`` have a nested record for
            each code, in the same memory.
        reasons: names of the records of refusals, from number 1 on.
        output: ``Output`` as a ctypes structure.
        refusal: memory for a ``REFUSAL``.
    """

    numbers: Mapping[str, int]
    records: Mapping[str, Dtype]
    reasons: tuple[str, ...]
    output: type[ctypes.Structure]
    refusal: type[ctypes.Array[ctypes.c_byte]]


@functools.cache
def load() -> ctypes.CDLL:
    """Open the library, once in a process.

    Raises:
        OSError: there is none for this machine.
    """
    return open_library(Path(__file__).parent)


@functools.cache
def layout() -> Layout:
    """Return the records and numbers of the library that ``load`` opens."""
    return _read_layout(load())


def obstacle() -> str | None:
    """Return why the library cannot be loaded, or None if it can."""
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
    # A stale library next to newer sources would be called with arguments that it does not have.
    sources = b"".join(map(Path.read_bytes, sorted(folder.glob("*.[ch]"))))
    if library.fastdata_sources() & 0xFFFFFFFF != zlib.crc32(sources):
        raise OSError(
            f"{file} was built from other sources than those next to it: install fastdata again."
        )
    _declare_functions(library)
    return library


def _lines_of(library: ctypes.CDLL) -> list[list[str]]:
    """Return kind, name and text of each entry of records.h."""
    library.fastdata_layout.restype = ctypes.c_char_p
    text: bytes = library.fastdata_layout()
    return [line.split("|") for line in text.decode().splitlines()]


def _declare_functions(library: ctypes.CDLL) -> None:
    for kind, head, arguments in _lines_of(library):
        if kind == "FUNCTION":
            result, name = head.split()
            function = getattr(library, name)
            function.restype = _ctype(result)
            function.argtypes = [_ctype(argument) for argument in arguments.split(",")]


def _ctype(text: str) -> Any:
    """Return the ctypes type of an argument such as ``int64_t count``; pointers are addresses."""
    if "*" in text:
        return ctypes.c_void_p
    name = text.split()[0].removesuffix("_t")
    return None if name == "void" else getattr(ctypes, f"c_{name}")


def _read_layout(library: ctypes.CDLL) -> Layout:
    numbers: dict[str, int] = {}
    records: dict[str, Dtype] = {}
    unions: dict[str, dict[str, Dtype]] = {kind: {} for kind in _UNIONS}
    for kind, name, text in _lines_of(library):
        if kind == "ENUM":
            names = text.split(", ")
            numbers.update(zip(names, range(len(names)), strict=True))
        elif kind == "RECORD":
            records[name] = _record(text, records)
        elif kind in unions:
            unions[kind][name] = _record(text, records)
    merged = {kind: _union(members) for kind, members in unions.items()}
    _check_sizes(library, [*merged.values(), *records.values()])
    for kind, members in unions.items():
        # The first member holds the fields that all of them have, and has no code.
        codes = [f"{kind}_{name.upper()}" for name in [*members][1:]]
        numbers.update(zip(codes, range(len(codes)), strict=True))
    return Layout(
        numbers=numbers,
        records=records | merged,
        reasons=tuple(unions["REFUSAL"])[1:],
        output=_structure(records["Output"]),
        refusal=ctypes.c_byte * merged["REFUSAL"].itemsize,
    )


def _record(text: str, known: Mapping[str, Dtype]) -> Dtype:
    """Make a dtype of the fields of a C struct, such as ``int32_t top, left; double fill[4];``."""
    fields: list[tuple[str, Any, tuple[int, ...]]] = []
    for declaration in text.split(";")[:-1]:
        pointer = re.search(r"\*(\w+)", declaration)  # of a function, too
        if pointer:
            fields.append((pointer[1], np.dtype(np.uintp), ()))
            continue
        kind, names = declaration.split(maxsplit=1)
        dtype = _KINDS.get(kind) or known[kind]
        for name, length in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
            shape = (int(length),) if length else ()
            fields.append((name, dtype, shape))
    return np.dtype(fields, align=True)


def _union(members: Mapping[str, Dtype]) -> Dtype:
    """Put all members but the first, whose fields they share, in one place behind it."""
    head, *others = members.values()
    assert head.names is not None
    assert head.fields is not None
    shared = head.names
    names = [*shared, *[*members][1:]]
    formats = [head[name] for name in shared] + others
    offsets = [head.fields[name][1] for name in shared] + [head.itemsize] * len(others)
    size = head.itemsize + max(member.itemsize for member in others)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


def _structure(dtype: Dtype) -> type[ctypes.Structure]:
    convert: Any = np.ctypeslib.as_ctypes_type  # whose types know no records
    made: type[ctypes.Structure] = convert(dtype)
    return made


def _check_sizes(library: ctypes.CDLL, made: list[Dtype]) -> None:
    library.fastdata_sizes.restype = ctypes.POINTER(ctypes.c_int64)
    sizes = library.fastdata_sizes()[: len(made)]
    if sizes != [dtype.itemsize for dtype in made]:
        raise OSError(f"{library._name} has records of {sizes} bytes, but {made} were read")
