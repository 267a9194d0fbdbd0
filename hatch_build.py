"""Compile fastdata/pixels/core/*.c with ziglang, and put a library for each level of instruction set into the wheel.

The libraries do not use Python's C API, so one wheel is for all versions of Python. To build for another platform than
this machine's, set FASTDATA_WHEEL to a key of TARGETS; "any" builds a wheel without libraries.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

# Level 4 also has VBMI, which reads bytes from a table of 128 in one instruction: tables are applied 7 times as fast.
# The compiler is told to use vectors of 512 bits; by default it prefers 256.
X86_64 = {2: "x86_64_v2", 3: "x86_64_v3", 4: "x86_64_v4+avx512vbmi -mprefer-vector-width=512"}

# Platform of a wheel -> its name in zig, the ending of a library, and the CPU for each level of fastdata_cpu_level.
TARGETS = {
    "manylinux2014_x86_64": ("x86_64-linux-gnu.2.17", ".so", X86_64),
    "manylinux2014_aarch64": ("aarch64-linux-gnu.2.17", ".so", {1: "generic"}),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", ".dylib", {1: "apple_m1"}),
    "win_amd64": ("x86_64-windows-gnu", ".dll", X86_64),
}

# -ffp-contract=off: products and sums are fused only where the source does so. Then every level gives the same pixels.
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-fvisibility=hidden",
]


class CoreHook(BuildHookInterface[Any]):
    """Add the libraries to a wheel, or put them next to their sources for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written."""
        self.work = tempfile.TemporaryDirectory(prefix="fastdata-core-")
        here = (tag.platform for tag in sys_tags() if tag.platform in TARGETS)
        platform = os.environ.get("FASTDATA_WHEEL") or next(here, "any")
        if platform == "any":
            self.app.display_warning(
                f"built without the compiled core, which exists only for {', '.join(TARGETS)}"
            )
            return
        if importlib.util.find_spec("ziglang") is None:
            raise RuntimeError(
                "fastdata's C core is compiled by the package ziglang, which is not installed. Leave "
                "out --no-build-isolation, so that pip installs it while it builds, or install it: "
                f"pip install '{self.config['dependencies'][0].partition(';')[0]}'."
            )
        core = Path(self.root, "fastdata", "pixels", "core")
        for library in compile_core(core, Path(self.work.name), *TARGETS[platform]):
            if version == "editable":
                # Removed first, not overwritten: a process that has loaded the old file keeps it.
                (core / library.name).unlink(missing_ok=True)
                shutil.copy(library, core)
            else:
                build_data["force_include"][str(library)] = f"fastdata/pixels/core/{library.name}"
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}

    def finalize(self, *_: Any) -> None:
        """Remove the compiled libraries, which the wheel now contains."""
        self.work.cleanup()


def compile_core(
    core: Path, work: Path, target: str, ending: str, cpus: dict[int, str]
) -> list[Path]:
    """Compile the libraries into ``work``, which also holds the compiler's cache, and return them.

    The compiler is called once per source and level, because it would make a single object from
    several sources. As many calls as there are cores run at once, but at most 8: each takes up to
    200 MB of memory.
    """
    files = sorted(core.glob("*.[ch]"))
    checksum = zlib.crc32(b"".join(file.read_bytes() for file in files))
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target]
    compiler = [*zig, *FLAGS, f"-DFASTDATA_SOURCES={checksum}u", "-c"]
    cache = str(work / "cache")
    caches = {"ZIG_LOCAL_CACHE_DIR": cache, "ZIG_GLOBAL_CACHE_DIR": cache}
    run = functools.partial(subprocess.run, env=os.environ | caches, check=True)
    commands = []
    objects: dict[Path, list[str]] = {work / f"core-level{level}{ending}": [] for level in cpus}
    for (library, compiled), cpu in zip(objects.items(), cpus.values(), strict=True):
        for source in (file for file in files if file.suffix == ".c"):
            compiled.append(str(work / f"{library.stem}.{source.stem}.o"))
            commands.append([*compiler, *f"-mcpu={cpu}".split(), str(source), "-o", compiled[-1]])
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        list(pool.map(run, commands))
    for library, compiled in objects.items():
        # Linked without -mcpu: then zig compiles its own part of a library, which takes minutes
        # for Windows, only for the first library.
        run([*zig, "-O3", "-shared", "-s", "-Wl,-z,defs", *compiled, "-lm", "-o", str(library)])
    return list(objects)
