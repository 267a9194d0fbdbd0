"""Transforms that fastdata defines, and wrappers for transforms of albumentations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastdata.pixels.albumentations_objects import short_text

if TYPE_CHECKING:
    from fastdata.pixels.plan import Transform


@dataclass(frozen=True, slots=True)
class StandardTransform:
    """A transform for the sample and one for the target, called with both, as in torchvision."""

    transform: Transform | None
    target_transform: Transform | None

    def __call__(self, sample: Any, target: Any) -> tuple[Any, Any]:
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target


class Views:
    """Several transforms of one image, for contrastive training: returns a list of their results.

    As ``transform=`` of a fastdata dataset, or as the last transform of a Compose, it makes each
    batch a list of stacked tensors, one for each transform. Their shapes may differ. All views are
    made from the same prepared sample, each with its own random draws. In other datasets it is an
    ordinary callable.

    Args:
        transforms: each is called with the image. The same transform may be given several times.

    Raises:
        ValueError: there is no transform.

    Example:
        >>> crops = Views(lambda image: image + 1, *[lambda image: image * 2] * 2)
        >>> crops(5)
        [6, 10, 10]
    """

    def __init__(self, *transforms: Any) -> None:
        if not transforms:
            raise ValueError("Views() needs one transform or more, but got none")
        self.transforms = transforms
        self.type: type = list  # tuple if it stands for a callable of the user that returns one

    def __call__(self, image: Any) -> Any:
        return self.type(run_transforms(transform, image) for transform in self.transforms)

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.transforms))})"


class AlternatingFlip:
    """Mirror each image left to right in every second epoch; half of the images begin mirrored.

    Write it into a transform instead of ``RandomHorizontalFlip``. Two successive epochs always
    show both sides of each image, while ``RandomHorizontalFlip`` shows half of the images with the
    same side twice (K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv
    2404.00498). Epochs are counted if the dataset has a ``seed``; otherwise set them with
    ``loader.set_epoch(epoch)``.

    Outside fastdata's datasets a transform does not get index and epoch, so images are mirrored at
    random with a probability of one half.

    Example:
        >>> image = torch.arange(3).view(1, 1, 3)
        >>> AlternatingFlip()(image).flatten().tolist() in ([0, 1, 2], [2, 1, 0])
        True
    """

    __torchvision_equal__ = "AlternatingFlip"

    def __call__(self, image: Any) -> Any:
        if torch.rand(()) < 0.5:
            return image
        if isinstance(image, torch.Tensor):
            return image.flip(-1)
        return image.transpose(0)  # Pillow's FLIP_LEFT_RIGHT

    def __repr__(self) -> str:
        return "AlternatingFlip()"


def run_transforms(transform: Any, sample: Any) -> Any:
    """Call a transform, or all transforms of a tuple one after the other."""
    for each in transform if type(transform) is tuple else (transform,):
        sample = each(sample)
    return sample


@dataclass(frozen=True)
class AlbumentationsTransform:
    """A wrapper that lets a transform of albumentations take and return an image.

    albumentations itself takes arrays by name and returns dicts.
    """

    transform: Any

    def __call__(self, image: Any) -> Any:
        return self.transform(image=np.asarray(image))["image"]

    def __repr__(self) -> str:
        return short_text(self.transform)


class LongMask:
    """Stands for ``mask.long()`` in a callable of the user that takes image and mask."""

    def __repr__(self) -> str:
        return "mask.long()"


LONG_MASK = LongMask()


@dataclass(frozen=True)
class AlbumentationsPair:
    """A wrapper that lets a transform of albumentations take an image and its target.

    The target is a mask, a list of masks, or a dict with names that albumentations knows, such as
    ``bboxes``. For a dict, everything that albumentations returns except the image is the new
    target.
    """

    transform: Any

    def __call__(self, image: Any, target: Any) -> tuple[Any, Any]:
        if isinstance(target, dict):
            made = self.transform(image=np.asarray(image), **target)
            return made.pop("image"), made
        name, given = "mask", target
        if isinstance(target, (list, tuple)):
            name, given = "masks", [np.asarray(mask) for mask in target]
        made = self.transform(image=np.asarray(image), **{name: np.asarray(given)})
        return made["image"], type(target)(made[name]) if name == "masks" else made[name]

    def __repr__(self) -> str:
        return short_text(self.transform)
