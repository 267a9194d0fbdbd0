"""The package's CUDA kernel, loaded and launched by the driver's library.

The package has the kernel as PTX, an assembly that every later driver compiles for its GPU. So
neither a compiler nor the CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastdata.report import log

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
PTX = Path(__file__).with_name("cut_kernel.ptx")
THREADS = 256
"""Number of threads of a block."""
MOST_BLOCKS = 65_535
"""Most blocks of a grid along its second axis. If pixels need more, a thread makes several."""
FUNCTIONS = {
    "cuInit": "i",
    "cuDeviceGet": "pi",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxPushCurrent_v2": "p",
    "cuCtxPopCurrent_v2": "p",
    "cuModuleLoadData": "pp",
    "cuModuleGetFunction": "ppp",
    # The function, its grid, its blocks, bytes of shared memory, stream, arguments, other options.
    "cuLaunchKernel": "piiiiiiippp",
}
"""Functions of the driver, and their arguments: integers and pointers."""
_TYPES: dict[str, Any] = {"i": ctypes.c_int, "p": ctypes.c_void_p}


class Kernel:
    """The kernel on one device. It stays loaded until the process ends.

    Args:
        number: number of the device.

    Attributes:
        is_right: results of the comparisons with torch's ops, by dtype and memory format.

    Raises:
        OSError: there is no driver's library.
        RuntimeError: the driver is too old for the PTX, or has failed.
    """

    def __init__(self, number: int) -> None:
        self.is_right: dict[Any, bool] = {}
        self._library = ctypes.CDLL(LIBRARY)
        for name, kinds in FUNCTIONS.items():
            getattr(self._library, name).argtypes = [_TYPES[kind] for kind in kinds]
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        # The context that torch uses, too.
        self._context = self._make("cuDevicePrimaryCtxRetain", device)
        with self._current_context():
            module = self._make("cuModuleLoadData", PTX.read_bytes())
            self._function = self._make("cuModuleGetFunction", module, b"fastdata_cut")

    def launch(self, arguments: ctypes.Structure, samples: int, pixels: int, stream: int) -> None:
        """Queue the kernel on a stream, with threads for all pixels of all samples.

        The arguments are copied. The memory that they point to is used until the kernel is done.

        Raises:
            RuntimeError: the kernel could not be launched.
        """
        blocks = min(-(-pixels // THREADS), MOST_BLOCKS)
        shape = (samples, blocks, 1, THREADS, 1, 1)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        with self._current_context():
            self._call("cuLaunchKernel", self._function, *shape, 0, stream, pointers, None)

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        """Make the device's context current in the calling thread, which may have none."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._make("cuCtxPopCurrent_v2")

    def _make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(name, ctypes.byref(made), *arguments)
        return made

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name} of the CUDA driver returned error {result}")


@functools.cache
def find_kernel(number: int) -> Kernel | None:
    """Return the kernel on a device; None if it cannot be loaded, for a reason that is logged."""
    try:
        if torch.version.hip:
            raise OSError("this build of torch is for ROCm")
        return Kernel(number)
    except (OSError, AttributeError, RuntimeError) as error:
        log.info("batches are cut by ops of torch on device %d: %s", number, error)
        return None
