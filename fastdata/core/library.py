"""Opens the compiled core: the library of the highest level of instruction set that this CPU has.

hatch_build.py makes one library for each level of the C files and puts it beside them. Nothing is opened on import.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import zlib
from pathlib import Path

__all__ = ["load", "obstacle", "open_library"]

ENDING = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def load() -> ctypes.CDLL:
    """Give the library, opened once; its functions run without the GIL. OSError where there is an obstacle."""
    opened = _opened()
    if isinstance(opened, str):
        raise OSError(opened)
    return opened


def obstacle() -> str | None:
    """Say why the library cannot be loaded, or None if it can."""
    opened = _opened()
    return opened if isinstance(opened, str) else None


@functools.cache
def _opened() -> ctypes.CDLL | str:
    try:
        return open_library(Path(__file__).parent)
    except OSError as error:
        return str(error)


def open_library(folder: Path) -> ctypes.CDLL:
    """Open the library of the highest level that this CPU has; OSError says what is missing."""
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
