"""Batches as lists of samples that are views of stacked tensors, and how they are collated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from fastdata.datasets.buffers import rows_of
from fastdata.machine.tables import collate_targets

Collate = Callable[[Any], Any]


class Sample(tuple[Any, ...]):
    """One (image, target) of a ``SampleBatch``. ``default_collate`` recognises it by its class."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        """Pickle as a plain tuple."""
        return tuple, (tuple(self),)


class SampleBatch(list[Any]):
    """A list of (image, target) samples that are views of one stacked tensor.

    torch's ``default_collate`` and ``fastdata.collate`` return the stacked tensors. So a
    ``collate_fn`` that calls one of them, as those of MixUp and CutMix do, copies nothing. If
    another sample was put into the list, all samples are stacked as usual.

    Args:
        images: images of the batch, (B, C, h, w); sample i is a view of ``images[i]``.
        targets: collated targets, such as int64 (B,) for class numbers. None if they are collated
            only when ``stacked`` is used.
        each_target: target of each sample, as a Python object.
        image_class: class of the images in the list, such as ``tv_tensors.Image`` or
            ``np.ndarray``.

    Attributes:
        parts: these arguments.
    """

    def __init__(
        self,
        images: torch.Tensor,
        targets: Any,
        each_target: Iterable[Any],
        image_class: type[torch.Tensor] | type[np.ndarray] = torch.Tensor,
    ) -> None:
        each_target = list(each_target)
        self.parts = images, targets, each_target, image_class
        pairs = zip(rows_of(images, image_class), each_target, strict=True)
        super().__init__(map(Sample, pairs))
        self._made_of = list(self)
        # torch's table of functions that collate a class. It is changed here and not at import, so
        # that importing fastdata does not change torch.
        default_collate_fn_map.setdefault(Sample, _collate_samples)

    @property
    def is_intact(self) -> bool:
        """True if the list still consists of the samples that it was made with."""
        are_same = all(map(operator.is_, self, self._made_of))
        return are_same and len(self) == len(self._made_of)

    @property
    def is_stacked(self) -> bool:
        """True if samples are still views of one tensor."""
        return self.is_intact and self.parts[3] is not np.ndarray

    @property
    def stacked(self) -> Any:
        """``[images, targets]``; None if another sample was put into the list.

        Targets that cannot be collated raise the error of ``default_collate``.
        """
        if not self.is_intact:
            return None
        images, targets, each_target, _ = self.parts
        return [images, collate_targets(each_target) if targets is None else targets]

    def __reduce__(self) -> Any:
        """Pickle as a plain list."""
        return list, (list(self),)


def collate(samples: list[Any]) -> Any:
    """Turn samples into a batch as ``default_collate`` does, but do not copy a ``SampleBatch``.

    Args:
        samples: samples of one kind, as for ``default_collate``.

    Example:
        >>> images = torch.zeros(2, 3, 4, 4)
        >>> batch = SampleBatch(images, torch.tensor([0, 1]), [0, 1])
        >>> collate(batch)[0] is images
        True
    """
    try:
        return default_collate(samples)  # calls ``_collate_samples`` for a SampleBatch
    except RuntimeError as error:
        # Imported here, because this module imports ``batch``.
        from fastdata.datasets.mixed_sizes import name_unequal

        name_unequal(error, lambda: samples)
        raise


def _collate_samples(samples: list[Any], *, collate_fn_map: Any = None) -> Any:
    """Collate a list of ``Sample``; ``default_collate`` finds this function by their class."""
    stacked = samples.stacked if isinstance(samples, SampleBatch) else None
    return default_collate(list(map(tuple, samples))) if stacked is None else stacked
