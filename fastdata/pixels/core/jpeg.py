"""JPEG files for the core, which decodes them with the libjpeg-turbo that Pillow is linked to."""

from __future__ import annotations

import ctypes

import numpy as np

from fastdata.pixels.arrays import Bytes, Int32s, Int64s
from fastdata.pixels.core.library import load


class Jpeg:
    """The functions of the libjpeg-turbo that another library is linked to, for the core.

    Args:
        path: path of that library: Pillow's extension module.

    Raises:
        OSError: the library is not linked to a libjpeg-turbo, or to one with another interface.
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
        """Decode a file; return False if the core cannot, or if the file has another shape.

        After False, ``out_CHW`` may hold a part of the image.

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
    """Read the headers of files in memory.

    Args:
        files_B: addresses of the files.
        sizes_B: their sizes in bytes.
        upright: True to turn images by the orientation in their EXIF.
        channels: number of channels of all images; None keeps one channel for gray files.
        most_pixels: the core does not decode larger images.

    Returns:
        Shapes (B, 3): channels, height and width after turning. And orientations (B,): 1 if an
        image is not turned, 0 if the core cannot decode the file.
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
