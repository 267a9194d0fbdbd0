"""Transforms of fastdata, and the calls of those that torchvision and albumentations define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from fastdata.pixels.plan import Step


@dataclass(frozen=True, slots=True)
class StandardTransform:
    """torchvision's: a transform of the sample and one of the target, called with both."""

    transform: Step | None
    target_transform: Step | None

    def __call__(self, sample: Any, target: Any) -> tuple[Any, Any]:
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target


class Views:
    """Several transforms of one image: what each makes of it, in a list, for contrastive training.

    As ``transform=`` or the last step of one, batches are lists of one stacked tensor for each
    transform, whose shapes need not agree. All of them are made of the same prepared samples, by
    draws of their own. Anywhere else, as in torchvision's datasets, it is a callable like others.

    Args:
        transforms: each is called with the image; one may stand there several times.

    Example:
        >>> crops = Views(lambda image: image + 1, *[lambda image: image * 2] * 2)
        >>> crops(5)
        [6, 10, 10]
    """

    def __init__(self, *transforms: Any) -> None:
        if not transforms:
            raise ValueError("Views() needs one transform or more")
        self.transforms = transforms
        self.kind: type = list

    def __call__(self, image: Any) -> Any:
        return self.kind(run_steps(transform, image) for transform in self.transforms)

    def __repr__(self) -> str:
        return f"Views({', '.join(map(repr, self.transforms))})"


class AlternatingFlip:
    """Mirror each image left to right in every second epoch: half of them begin with it.

    So any two epochs in a row show both sides of each image, where ``RandomHorizontalFlip`` shows
    half of the images twice alike (K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU",
    arXiv 2404.00498). Epochs are those of the random draws: a dataset with a ``seed`` counts them,
    else ``loader.set_epoch(epoch)`` says them.

    Outside of fastdata's batches, where a step is told neither index nor epoch, half of the images
    are mirrored at random.

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


def run_steps(transform: Any, sample: Any) -> Any:
    """Call a transform, or those of a tuple one after the other."""
    for step in transform if type(transform) is tuple else (transform,):
        sample = step(sample)
    return sample


@dataclass(frozen=True)
class AlbumentationsStep:
    """An albumentations transform, which takes arrays by name and gives dicts, as a step."""

    step: Any

    def __call__(self, image: Any) -> Any:
        return self.step(image=np.asarray(image))["image"]

    def __repr__(self) -> str:
        return repr(self.step)
