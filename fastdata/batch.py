"""Batches of samples: the list torch's collate expects, which remembers the stacked tensors behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

__all__ = ["IndexBatch", "SampleBatch", "collate", "collate_targets"]

_T = TypeVar("_T")


class IndexBatch(list[int]):
    """The sample indices of one batch, and what the samples' random draws are made from.

    Args:
        indices: as the sampler gave them, or those in the fastdata dataset where that lies behind a ``Subset``.
        positions: int64 (B,), the same, none of them negative.
        visits: int64 (B,), which visit to each sample this is: the epoch, and how often the sample came before in the
            same epoch (as with ``WeightedRandomSampler``).
        seed: the dataset's, or the epoch's base seed.
    """

    def __init__(self, indices: Iterable[int], positions: np.ndarray, visits: np.ndarray, seed: int) -> None:
        super().__init__(indices)
        self.positions, self.visits, self.seed = positions, visits, seed


class Sample(tuple[Any, ...]):
    """One (image, target) of a ``SampleBatch``: a tuple whose class tells ``default_collate`` how to collate a list."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class SampleBatch(list[Any]):
    """A list of (image, target) samples that are views of one stacked tensor.

    torch's ``default_collate`` and ``fastdata.collate`` take the stacked tensors as they are, so that a ``collate_fn``
    that calls the former, as those of MixUp and CutMix do, copies nothing.

    Args:
        images: (B, C, h, w); sample i is a view of ``images[i]``.
        targets: what ``default_collate`` makes of the targets: int64 (B,) for class numbers.
        each_target: one Python object per sample.
        image_class: of the images in the list, such as ``tv_tensors.Image``.

    Attributes:
        stacked: ``[images, targets]``, or None once the list was changed and no longer says the same.
    """

    stacked: list[Any] | None

    def __init__(
        self,
        images: torch.Tensor,
        targets: Any,
        each_target: Iterable[Any],
        image_class: type[torch.Tensor] = torch.Tensor,
    ) -> None:
        each_image: Iterable[torch.Tensor] = images.unbind(0)
        if image_class is not torch.Tensor:
            each_image = [image.as_subclass(image_class) for image in each_image]
        super().__init__(map(Sample, zip(each_image, each_target, strict=True)))
        self.stacked = [images, targets]
        default_collate_fn_map.setdefault(Sample, _collate_samples)  # torch's own way to say how a class is collated

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _forgetting(change: Callable[..., _T]) -> Callable[..., _T]:
    def changed(self: SampleBatch, *args: Any, **kwargs: Any) -> _T:
        self.stacked = None
        return change(self, *args, **kwargs)

    changed.__name__, changed.__doc__ = change.__name__, change.__doc__
    return changed


for _name in (
    *("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "extend", "insert"),
    *("pop", "remove", "clear", "reverse", "sort"),
):
    setattr(SampleBatch, _name, _forgetting(getattr(list, _name)))


def collate(samples: list[Any]) -> Any:
    """Turn a list of samples into a batch, as ``torch.utils.data.default_collate`` does, without copying a SampleBatch.

    Example:
        >>> images = torch.zeros(2, 3, 4, 4)
        >>> batch = SampleBatch(images, torch.tensor([0, 1]), [0, 1])
        >>> collate(batch)[0] is images
        True
    """
    if isinstance(samples, SampleBatch) and samples.stacked is not None:
        return samples.stacked
    return default_collate(samples)


def _collate_samples(samples: list[Any], *, collate_fn_map: Any = None) -> Any:
    if isinstance(samples, SampleBatch) and samples.stacked is not None:
        return samples.stacked
    return default_collate([tuple(sample) for sample in samples])


def collate_targets(targets: list[Any]) -> Any:
    """Make of a batch's targets what ``default_collate`` makes of them in samples, where strings become a tuple."""
    return default_collate([(target,) for target in targets])[0]
