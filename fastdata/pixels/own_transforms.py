"""Transforms that fastdata defines, and wrappers that give others' transforms one interface."""

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
    """A transform of the sample and one of the target, called with both, as in torchvision."""

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

    As ``transform=``, or as the last transform of a Compose, it gives batches that are lists of one
    stacked tensor per transform. Their shapes may differ. All views are made from the same prepared
    sample, each with its own random draws. Elsewhere, such as in torchvision's datasets, it is an
    ordinary callable.

    Args:
        transforms: each is called with the image; the same one may be given several times.

    Example:
        >>> crops = Views(lambda image: image + 1, *[lambda image: image * 2] * 2)
        >>> crops(5)
        [6, 10, 10]
    """

    def __init__(self, *transforms: Any) -> None:
        if not transforms:
            raise ValueError("Views() needs one transform or more, but got none")
        self.transforms = transforms
        self.type: type = list  # what the user's own callable returned, else a list

    def __call__(self, image: Any) -> Any:
        return self.type(run_transforms(transform, image) for transform in self.transforms)

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.transforms))})"


class AlternatingFlip:
    """Mirror each image left to right in every second epoch; half of the images begin mirrored.

    Any two epochs in a row show both sides of each image, but ``RandomHorizontalFlip`` shows half
    of the images twice alike (K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv
    2404.00498). A dataset with a ``seed`` counts the epochs; otherwise give them by
    ``loader.set_epoch(epoch)``.

    Outside of fastdata's batches, where a transform gets neither index nor epoch, half of the
    images are mirrored at random.

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
    """Call a transform, or the transforms of a tuple one after the other."""
    for each in transform if type(transform) is tuple else (transform,):
        sample = each(sample)
    return sample


@dataclass(frozen=True)
class AlbumentationsTransform:
    """A transform of albumentations, which takes arrays by name and returns dicts.

    The wrapper takes and returns an image, as torchvision's transforms do.
    """

    transform: Any

    def __call__(self, image: Any) -> Any:
        return self.transform(image=np.asarray(image))["image"]

    def __repr__(self) -> str:
        return short_text(self.transform)


class LongMask:
    """The ``mask.long()`` of a callable of image and mask, which is seen through."""

    def __repr__(self) -> str:
        return "mask.long()"


LONG_MASK = LongMask()


@dataclass(frozen=True)
class AlbumentationsPair:
    """A transform of albumentations for an image and its target, such as a mask.

    A target that is a dict has the names that albumentations knows, such as ``bboxes``; all that
    albumentations returns beside the image is the target again.
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
