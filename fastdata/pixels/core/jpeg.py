"""JPEG files that the core decodes, through the libjpeg-turbo that Pillow is linked to."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdata.pixels.arrays import Bytes, Int32s, Int64s
from fastdata.pixels.core.library import load


class Jpeg:
    """Functions of the libjpeg-turbo that a library is linked to, as the core calls them.

    Raises:
        OSError: the library at ``path`` is linked to none, or to one with another interface.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._functions = np.zeros((), load().records["Jpeg"])
        *names, _ = self._functions.dtype.names or ()
        for name in names:
            function = getattr(self._library, f"jpeg_{name}", None)
            if function is None:
                raise OSError(
                    f"{path} is not linked to a shared libjpeg-turbo: it has no jpeg_{name}"
                )
            self._functions[name] = ctypes.cast(function, ctypes.c_void_p).value
        self.address: int = self._functions.ctypes.data
        self._functions["version"] = load().functions.fastdata_jpeg_version(self.address)
        if not self._functions["version"]:
            raise OSError(
                f"the libjpeg of {path} has another binary interface than versions 62 and 80"
            )

    def decode(self, file: Bytes, out_CHW: Bytes) -> bool:
        """Decode a file; return False if it has another shape, or its data are damaged.

        Raises:
            ValueError: ``out_CHW`` is not uint8 (C, H, W) that is C-contiguous.
        """
        if out_CHW.dtype != np.uint8 or out_CHW.ndim != 3 or not out_CHW.flags.c_contiguous:
            raise ValueError(
                f"the memory for a JPEG is {out_CHW.dtype} of shape {out_CHW.shape} and strides "
                f"{out_CHW.strides}, but it must be C-contiguous uint8 (C, H, W)"
            )
        is_decoded = load().functions.fastdata_jpeg_decode(
            self.address, file.ctypes.data, file.size, *out_CHW.shape, out_CHW.ctypes.data
        )
        return bool(is_decoded)


def jpeg_headers(
    files_B: Int64s,
    sizes_B: Int64s,
    *,
    upright: bool = False,
    channels: int | None = None,
    most_pixels: float = np.inf,
) -> tuple[Int32s, Int32s]:
    """Read the headers of files at these addresses: shapes (B, 3), and how files are turned (B,).

    A turn is an EXIF orientation if images are to be ``upright``, else 1, which is none; it is 0
    for a file that the core does not decode. With ``channels`` None gray files have one channel.
    """
    count = len(files_B)
    if len(sizes_B) != count:
        raise ValueError(
            f"{count} JPEG files came with {len(sizes_B)} sizes, but each needs one. "
            "Pass arrays of one length."
        )
    shapes_B3 = np.empty((count, 3), np.int32)
    turns_B = np.empty(count, np.int32)
    load().functions.fastdata_jpeg_headers(
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
