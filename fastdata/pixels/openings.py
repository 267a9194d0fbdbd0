"""Loaders of image files that fastdata knows, so that the compiled core can decode instead."""

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
    """A known loader, and the samples that it makes from image files.

    Args:
        loader: function that makes a sample from a file's bytes.
        form: ``"pil"`` for PIL images, ``"tensor"`` for tensors of uint8 (C, H, W).
        is_upright: True if it turns images by the orientation in their EXIF.
        channels: number of channels of any JPEG; None if gray JPEGs have one and others three.
    """

    loader: Loader = decode_image
    form: Form = "pil"
    is_upright: bool = False
    channels: int | None = 3

    def decode(self, data: Buffer) -> Any:
        """Return the sample that the loader makes from a file's bytes."""
        if self.form == "pil":
            return self.loader(data)
        # A copy, because torch warns if a tensor's memory is read-only.
        return self.loader(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))

    def decode_pixels(self, data: Buffer, *, upright: bool) -> Array:
        """Return the sample as pixels, uint8 (C, H, W).

        Args:
            data: the file's bytes.
            upright: True to turn PIL images by the orientation in their EXIF.

        Raises:
            TypeError: the loader makes a tensor of another kind.
        """
        sample = self.decode(data)
        if self.form == "pil":
            from PIL import ImageOps

            return to_stored(ImageOps.exif_transpose(sample) if upright else sample)[0]
        if sample.dtype is not torch.uint8 or sample.ndim != 3:
            raise TypeError(
                f"the loader decodes it to {sample.dtype} {list(sample.shape)}, but fastdata needs "
                "uint8 (C, H, W) from this loader. Pass loader= a function of your own that calls "
                "it."
            )
        return np.ascontiguousarray(sample.numpy())


_OF_PIL = Opening()
_TENSOR_LOADERS = {
    ("torchvision", "decode_image"),
    ("torchcodec", "decode_image"),
    ("torchcodec", "decode_jpeg"),
}
"""Package and name of functions that decode files to tensors; ``_probe`` checks their pixels."""


def opening_of(loader: Loader | None) -> Opening | None:
    """Return the ``Opening`` of a loader if fastdata knows it, else None."""
    if loader is load_image:
        return _OF_PIL
    # By name, because neither package is imported here. A partial may set the mode, so look inside.
    called = loader.func if isinstance(loader, functools.partial) else loader
    package = str(getattr(called, "__module__", "")).partition(".")[0]
    is_known = (package, getattr(called, "__name__", "")) in _TENSOR_LOADERS
    return _probe(loader) if is_known else None


@functools.cache
def _probe(loader: Loader) -> Opening | None:
    """Return the ``Opening`` of a loader of tensors; None if its pixels differ from Pillow's.

    Versions differ in their pixels, so the loader is tried on two small files.
    """
    probes = [_make_probe("RGB"), _make_probe("L")]
    opening = Opening(loader, "tensor")
    try:
        with warnings.catch_warnings():
            # torchvision 0.29 warns in torchvision.io; ``python -W error`` would raise that.
            warnings.simplefilter("ignore")
            found = [opening.decode_pixels(data, upright=False) for data in probes]
    except Exception:  # noqa: BLE001  # a version whose arguments differ may raise anything
        return None
    # The probe is wider than high until it is turned.
    _, height, width = found[0].shape
    is_upright = height > width
    wanted = [_OF_PIL.decode_pixels(data, upright=is_upright) for data in probes]
    # For a gray file Pillow makes three equal planes, and the loader may make one.
    channels = len(found[1])
    wanted[1] = wanted[1][:channels]
    if not all(map(np.array_equal, wanted, found)):
        return None
    return replace(opening, is_upright=is_upright, channels=3 if channels == 3 else None)


def _make_probe(mode: str) -> bytes:
    """Return a JPEG with colours at half the resolution, and an EXIF that turns it sideways."""
    from PIL import Image

    # Odd sides and noise make differences visible: padding at the edges, and upscaling of colours.
    noise = np.random.default_rng(0).integers(0, 256, (21, 35, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees
    stream = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(stream, "JPEG", exif=exif)
    return stream.getvalue()
