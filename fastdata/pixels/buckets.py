"""``ResizeToBucket``: resize and crop images to the one of a few sizes that fits their shape best.

core/buckets.c does the same for whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from fastdata.errors import kind_of
from fastdata.pixels.samples import is_pil

Bucket = tuple[int, int]
"""Height and width of a bucket, in pixels."""


class ResizeToBucket:
    """Resize and crop each image to one of a few sizes (buckets): the one that crops the least.

    An image is resized until it just covers its bucket; then the longer side is cropped. The
    pixels are those of torchvision's ``Resize`` and ``CenterCrop``, or ``RandomCrop``. To make
    batches of images of one size, use ``fastdata.loaders.buckets.BucketSampler``. In fastdata's
    datasets the resize and a centre crop run once per image, before it is stored, if no random
    step comes before them.

    Args:
        sizes: (height, width) of each bucket in pixels; ``find_buckets`` finds buckets that fit a
            dataset. If an image fits two buckets equally well, the first is used.
        crop: ``"center"`` crops both sides equally, ``"random"`` draws the place of the crop.
        interpolation: ``"bilinear"``, ``"bicubic"``, or another that torchvision supports for such
            images.

    Raises:
        ValueError: there is no size, or one is not a pair of whole numbers above zero.

    Example:
        >>> image = torch.zeros(3, 60, 90, dtype=torch.uint8)
        >>> to_bucket = ResizeToBucket([(32, 32), (24, 40), (40, 24)])
        >>> to_bucket(image).shape
        torch.Size([3, 24, 40])
    """

    __torchvision_equal__ = "Compose"

    def __init__(
        self,
        sizes: Iterable[Sequence[int]],
        crop: Literal["center", "random"] = "center",
        interpolation: str = "bilinear",
    ) -> None:
        chosen = _checked(sizes)
        crops = {"center": CropToBucket, "random": RandomCropToBucket}
        if crop not in crops:
            raise ValueError(f"crop={crop!r} is neither 'center' nor 'random'")
        self.transforms = (CoverBucket(chosen, interpolation), crops[crop](chosen))

    @property
    def sizes(self) -> tuple[Bucket, ...]:
        """The sizes of the buckets, (height, width) of each."""
        return self.transforms[1].sizes

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image

    def __repr__(self) -> str:
        return f"ResizeToBucket({list(self.sizes)})"


def _checked(sizes: Iterable[Sequence[int]]) -> tuple[Bucket, ...]:
    """Return sizes as pairs (height, width).

    Raises:
        ValueError: one is not a size, or there are none.
    """
    given: list[Any] = list(sizes)
    for size in given:
        is_pair = isinstance(size, Sequence) and len(size) == 2
        if not (is_pair and all(isinstance(side, int) and side > 0 for side in size)):
            raise ValueError(
                f"{size} is not the size of a bucket. Give (height, width) in pixels: two whole "
                "numbers above zero."
            )
    if not given:
        raise ValueError(
            "there are no buckets. Give the sizes of one or more, such as [(512, 512), (448, 576)]."
        )
    return tuple((height, width) for height, width in given)


class CoverBucket:
    """Resize an image until it just covers its bucket."""

    __torchvision_equal__ = "CoverBucket"
    antialias = True

    def __init__(self, sizes: tuple[Bucket, ...], interpolation: str) -> None:
        self.sizes = sizes
        self.interpolation = interpolation

    def __call__(self, image: Any) -> Any:
        size = cover_size(size_of(image), self.sizes)
        return image if size == size_of(image) else _resized(image, size, self.interpolation)

    def __repr__(self) -> str:
        return f"CoverBucket({list(self.sizes)}, {self.interpolation!r})"


class CropToBucket:
    """Crop an image that covers its bucket to the bucket's size, in the middle."""

    __torchvision_equal__ = "CropToBucket"

    def __init__(self, sizes: tuple[Bucket, ...]) -> None:
        self.sizes = sizes

    def __call__(self, image: Any) -> Any:
        height, width = size_of(image)
        covered = [
            (h, w)
            for h, w in self.sizes
            if (height == h and width >= w) or (width == w and height >= h)
        ]
        h, w = find_bucket((height, width), covered or self.sizes)
        top = self.place(height - h)
        left = self.place(width - w)
        if is_pil(image):
            return image.crop((left, top, left + w, top + h))
        return image[..., top : top + h, left : left + w]

    def place(self, free_px: int) -> int:
        """Return the first row or column of the crop, one of ``free_px`` + 1 possible ones."""
        return round(free_px / 2)  # rounds halves to the even number, as torchvision does

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sizes)})"


class RandomCropToBucket(CropToBucket):
    """Crop an image that covers its bucket to the bucket's size, at a random place."""

    __torchvision_equal__ = "RandomCropToBucket"

    def place(self, free_px: int) -> int:
        return int(torch.randint(0, free_px + 1, ()))


def find_bucket(size: Bucket, sizes: Iterable[Bucket]) -> Bucket:
    """Return the bucket that crops the least of an image of ``size``, the first of equals."""

    def kept_share(bucket: Bucket) -> float:
        across = size[1] * bucket[0]
        down = size[0] * bucket[1]
        return min(across, down) / max(across, down)

    return max(sizes, key=kept_share)


def cover_size(size: Bucket, sizes: Iterable[Bucket]) -> Bucket:
    """Return the size of an image after a resize to the smallest size that covers its bucket."""
    height, width = find_bucket(size, sizes)
    across = size[1] * height
    down = size[0] * width
    if across > down:
        return height, math.floor(across / size[0] + 0.5)
    return math.floor(down / size[1] + 0.5), width


def size_of(image: Any) -> Bucket:
    """Return height and width of a PIL image or an image tensor.

    Raises:
        TypeError: it is neither.
    """
    if is_pil(image):
        return image.height, image.width
    if not isinstance(image, torch.Tensor) or image.ndim < 3:
        raise TypeError(
            f"ResizeToBucket needs PIL images or tensors (C, H, W), but got {kind_of(image)}"
        )
    return image.shape[-2], image.shape[-1]


def _resized(image: Any, size: Bucket, interpolation: str) -> Any:
    """Resize an image as torchvision does."""
    if is_pil(image):
        from PIL import Image

        height, width = size
        return image.resize((width, height), getattr(Image.Resampling, interpolation.upper()))
    # As ``resize`` of torchvision's transforms/_functional_tensor.py.
    floats = image[None].float() if image.ndim == 3 else image.float()
    made = torch.nn.functional.interpolate(floats, size, mode=interpolation, antialias=True)
    if image.dtype == torch.uint8:
        made = made.clamp(0, 255).round()
    return made.to(image.dtype).reshape(*image.shape[:-2], *size)
