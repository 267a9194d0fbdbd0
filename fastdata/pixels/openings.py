"""Loaders that fastdata knows, whose images the compiled core may decode in their place."""

from __future__ import annotations

import functools
import io
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastdata.pixels.arrays import Array
from fastdata.pixels.decode import decode_image, load_image
from fastdata.pixels.samples import to_stored

if TYPE_CHECKING:
    from fastdata.pixels.decode import Buffer, Loader
    from fastdata.pixels.samples import Form


@dataclass(frozen=True, slots=True)
class Opening:
    """How a loader that fastdata knows opens image files.

    Args:
        loader: makes a sample of a file's bytes.
        form: of samples: PIL images, or tensors, uint8 (C, H, W).
        is_upright: whether it turns images as their EXIF says.
        channels: that it makes of every JPEG; None where a gray one has one, others three.
    """

    loader: Loader = decode_image
    form: Form = "pil"
    is_upright: bool = False
    channels: int | None = 3

    def decode(self, data: Buffer) -> Any:
        """What the loader makes of a file of these bytes."""
        if self.form == "pil":
            return self.loader(data)
        return self.loader(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))

    def decode_pixels(self, data: Buffer, *, upright: bool) -> Array:
        """The same as pixels (C, H, W), of a PIL image turned as EXIF says if it is ``upright``."""
        sample = self.decode(data)
        if self.form == "pil":
            from PIL import ImageOps

            return to_stored(ImageOps.exif_transpose(sample) if upright else sample)[0]
        if sample.dtype is not torch.uint8 or sample.ndim != 3:
            raise TypeError(
                f"it is decoded to {sample.dtype} {list(sample.shape)}, and of a loader that "
                "fastdata knows it takes uint8 (C, H, W) only. Give a function of your own that "
                "calls it as loader=."
            )
        return np.ascontiguousarray(sample.numpy())


_OF_PIL = Opening()

_TENSOR_LOADERS = {
    ("torchvision", "decode_image"),
    ("torchcodec", "decode_image"),
    ("torchcodec", "decode_jpeg"),
}
"""Package and name of functions that may be loaders that fastdata knows."""


def opening_of(loader: Loader | None) -> Opening | None:
    """How a loader opens files, where fastdata can do the same; None for others' loaders."""
    if loader is load_image:
        return _OF_PIL
    called = loader.func if isinstance(loader, functools.partial) else loader
    package = str(getattr(called, "__module__", "")).partition(".")[0]
    is_known = (package, getattr(called, "__name__", "")) in _TENSOR_LOADERS
    return _probe(loader) if is_known else None


@functools.cache
def _probe(loader: Loader) -> Opening | None:
    """What a loader of tensors does with JPEG files; None if its pixels are not Pillow's."""
    probes = [_make_probe("RGB"), _make_probe("L")]
    opening = Opening(loader, "tensor")
    try:
        with warnings.catch_warnings():
            # torchvision 0.29 warns in torchvision.io, which is an error under ``python -W error``.
            warnings.simplefilter("ignore")
            found = [opening.decode_pixels(data, upright=False) for data in probes]
    except Exception:  # noqa: BLE001  # of a version that takes something else
        return None
    _, height, width = found[0].shape
    is_upright = height > width
    wanted = [_OF_PIL.decode_pixels(data, upright=is_upright) for data in probes]
    channels = len(found[1])
    wanted[1] = wanted[1][:channels]
    if not all(map(np.array_equal, wanted, found)):
        return None
    return replace(opening, is_upright=is_upright, channels=3 if channels == 3 else None)


def _make_probe(mode: str) -> bytes:
    """A JPEG file whose colours lie at half the size, turned on its side by its EXIF."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (21, 35, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(stream, "JPEG", exif=exif)
    return stream.getvalue()
