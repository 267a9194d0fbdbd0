"""A driver's library for the simulated device, compiled from C: it runs the package's kernel on the CPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fastdata.loaders import driver
from simcuda import sim

__all__ = ["FakeDriver", "find_driver"]

FLAGS = "-std=gnu11 -O2 -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Wextra -Werror -shared"
NUMBERS, POINTERS = 15, 8
"""The arguments are fifteen numbers; a pointer to what is written; and seven to what is read, or null."""


class FakeDriver:
    """The library. Each launch is queued on its stream of the simulated device."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self._queue = kind(self._launch)  # kept for the library
        address = ctypes.cast(self._queue, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self._library, "fake_queue").value = address

    def fail(self, name: str = "") -> None:
        """Let a function of the driver fail from now on."""
        (ctypes.c_char * 64).in_dll(self._library, "fake_failing").value = name.encode()

    def spoil(self, *, is_on: bool) -> None:
        """Let the kernel make wrong pixels from now on."""
        ctypes.c_int.in_dll(self._library, "fake_spoils").value = is_on

    @property
    def depth(self) -> int:
        """How many contexts are pushed and not popped."""
        return int(self._library.fake_depth())

    def _launch(self, stream: int | None, launch: int, size_bytes: int) -> None:
        copy = ctypes.create_string_buffer(ctypes.string_at(launch, size_bytes), size_bytes)
        out, *pointers = (ctypes.c_uint64 * POINTERS).from_buffer(copy, 8 * NUMBERS)
        sim().launch_at(
            stream or 0,
            lambda: self._library.fake_run(copy),
            reads=list(filter(None, pointers)),
            writes=[out],
        )


@functools.cache
def find_driver() -> FakeDriver | None:
    """Compile the library; None without a C compiler that has float16."""
    found = [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc"])
    folder = tempfile.TemporaryDirectory(prefix="fastdata-driver-")
    find_driver.folder = folder  # type: ignore[attr-defined]  # removed as the process ends
    caches = {f"ZIG_{place}_CACHE_DIR": folder.name for place in ("LOCAL", "GLOBAL")}
    run = functools.partial(subprocess.run, env=os.environ | caches, capture_output=True)
    probe = Path(folder.name, "probe.c")
    probe.write_text("_Float16 half(float value) { return (_Float16)value; }\n")
    library = Path(folder.name, "driver.so")
    for compiler in found:
        command = [*compiler, *FLAGS.split()]
        if run([*command, str(probe), "-o", str(library)], check=False).returncode == 0:
            source = Path(__file__).with_name("fake_driver.c")
            include = f"-I{Path(driver.__file__).parent}"
            done = run([*command, include, str(source), "-lm", "-o", str(library)], check=False)
            assert not done.returncode, done.stderr.decode()
            return FakeDriver(library)
    return None
