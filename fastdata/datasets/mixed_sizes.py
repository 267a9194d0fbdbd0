"""The error for a batch with samples that differ in shape: it names two of them, and the cure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fastdata.datasets.trees import leaves_of
from fastdata.errors import MixedSizesError
from fastdata.pixels.arrays import Array

_Named = tuple[str, Sequence[int]]
"""Name of a sample in a message, and the sample's shape."""

_UNEQUAL = "stack expects each tensor to be equal size"
"""The beginning of torch's error for tensors of several shapes."""


def check_alike(shapes_BD: Array, name_of: Callable[[int], str]) -> None:
    """Check that all samples of a batch have the same shape.

    Args:
        shapes_BD: shape of each sample.
        name_of: function that returns the name of the sample in a row of the batch.

    Raises:
        MixedSizesError: the shapes differ.
    """
    differs_B = (shapes_BD != shapes_BD[0]).any(axis=1)
    if differs_B.any():
        one, other = ((name_of(b), shapes_BD[b].tolist()) for b in (0, int(differs_B.argmax())))
        raise _error_of(one, other)


def name_unequal(error: RuntimeError, read: Callable[[], Sequence[Any]]) -> None:
    """Raise a better error than torch's if collating failed because of different shapes.

    Args:
        error: error that collating has raised. Nothing happens if it has another cause.
        read: function that returns the samples, or the targets, of the batch.

    Raises:
        MixedSizesError: it names two samples of the batch and their shapes.
    """
    if _UNEQUAL not in str(error):
        return
    first, *others = map(_shapes_in, read())
    for place, shapes in enumerate(others, 1):
        for one, other in zip(first, shapes, strict=False):
            if one != other:
                raise _error_of(
                    ("sample 0 of the batch", one), (f"sample {place}", other)
                ) from None


def _shapes_in(sample: Any) -> list[Sequence[int]]:
    arrays = leaves_of(sample, lambda it: isinstance(it, (torch.Tensor, np.ndarray)))
    return [array.shape for array in arrays]


def _error_of(one: _Named, other: _Named) -> MixedSizesError:
    named = [f"{name} is {tuple(shape)}" for name, shape in (one, other)]
    cure = (
        "Give all images (and masks) the same size in the transform, such as by Resize((height, "
        "width)) or RandomResizedCrop; or put images of one size into each batch with "
        "fastdata.loaders.buckets.BucketSampler; or pad them in collate_fn="
    )
    # Images (C, H, W) that are grey, RGB or RGBA. Boxes (N, 4) differ in their first number, too.
    channels = {shape[0] for _, shape in (one, other) if len(shape) == 3}
    if channels in ({1, 3}, {1, 4}, {3, 4}):
        cure = (
            "Give all images the same number of channels: by .convert('RGB') in the dataset or its "
            "loader=, or by Grayscale(3) as the first step of the transform"
        )
    return MixedSizesError(f"{_UNEQUAL}, but {' and '.join(named)}. {cure}.")
