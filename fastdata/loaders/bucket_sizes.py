"""Sizes of buckets that fit the images of a dataset: ``find_buckets``.

Shape letters: N samples, V different values, C clusters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdata.datasets.sizes import image_sizes
from fastdata.errors import kind_of
from fastdata.loaders.parts import Parts

if TYPE_CHECKING:
    from fastdata.loaders.orders import Float64s, Int64s
    from fastdata.pixels.arrays import Array
    from fastdata.pixels.buckets import Bucket

_RATIO_STEP = 0.01


def find_buckets(dataset: Any, count: int, pixels: int, multiple_of: int = 64) -> list[Bucket]:
    """Return sizes of buckets, (height, width), that fit the images of a dataset.

    Pass them to ``ResizeToBucket``. Their aspect ratios make the mean of (log(ratio of the image) -
    log(ratio of its bucket))^2 as small as possible. All ranks get the same sizes.

    Args:
        dataset: a dataset of fastdata, also in ``Subset`` or ``ConcatDataset``. Sizes are those
            of its stored images, or those in the headers of its files.
        count: largest number of buckets. There are fewer if the images have fewer ratios.
        pixels: approximate number of pixels of each bucket, such as ``512 * 512``.
        multiple_of: heights and widths are multiples of this number.

    Raises:
        TypeError: it is not a dataset of fastdata.
        ValueError: a number is below 1, or the sizes of the images are not known.

    Example:
        >>> import torch
        >>> from fastdata import CachedDataset
        >>> shapes = [(3, 40, 60), (3, 60, 40), (3, 41, 60), (3, 50, 50)]
        >>> images = [(torch.zeros(shape, dtype=torch.uint8), 0) for shape in shapes]
        >>> find_buckets(CachedDataset(images), 3, pixels=32 * 32, multiple_of=8)
        [(40, 24), (32, 32), (24, 40)]
    """
    if count < 1 or multiple_of < 1 or pixels < 1:
        raise ValueError(
            f"count={count}, pixels={pixels}, multiple_of={multiple_of}: all must be 1 or more"
        )
    ratios_V, counts_V = _log_ratios(dataset)
    clusters = min(count, len(ratios_V))
    means_C = _cluster(ratios_V, counts_V, clusters)
    found: list[Bucket] = []
    for ratio in np.exp(means_C).tolist():
        height = _rounded(math.sqrt(pixels / ratio), multiple_of)
        width = _rounded(math.sqrt(pixels * ratio), multiple_of)
        if (height, width) not in found:
            found.append((height, width))
    return found


def _rounded(side: float, multiple_of: int) -> int:
    """Return the nearest positive multiple."""
    multiples = round(side / multiple_of)
    return max(multiples, 1) * multiple_of


def _log_ratios(dataset: Any) -> tuple[Float64s, Int64s]:
    """Return the sorted, rounded logarithms of the images' width / height, and their counts."""
    parts = sized_parts(dataset)
    sizes = [image_sizes(part) for part in parts.datasets]
    sizes_N2 = np.concatenate(sizes)
    if parts.subset is not None:
        sizes_N2 = sizes_N2[parts.subset]
    height_N, width_N = sizes_N2.T
    log_N = np.log(width_N / height_N)
    steps_N = np.round(log_N / _RATIO_STEP)
    steps_V, counts_V = np.unique(steps_N, return_counts=True)
    return steps_V * _RATIO_STEP, counts_V


def _cluster(values_V: Float64s, counts_V: Int64s, clusters: int) -> Float64s:
    """Return the means of the clusters of sorted values with the least sum of squared distances."""
    # Dynamic programming over the first values and clusters. It is exact, because values have one
    # dimension: a cluster is a range of the sorted values.
    mean_VV, cost_VV = _spans(values_V, counts_V)
    best_V = cost_VV[0]
    begins = []
    for _ in range(1, clusters):
        # Add one cluster; each row is a value at which it may begin.
        before_V = np.append(np.inf, best_V[:-1])
        total_VV = before_V[:, None] + cost_VV
        begins.append(total_VV.argmin(axis=0))
        best_V = total_VV.min(axis=0)
    means = []
    last = len(values_V) - 1
    for begin_V in reversed(begins):
        first = begin_V[last]
        means.append(mean_VV[first, last])
        last = first - 1
    means.append(mean_VV[0, last])
    means.reverse()
    return np.array(means)


def _spans(values_V: Float64s, counts_V: Int64s) -> tuple[Array, Array]:
    """Return mean and sum of squared distances of the values from each row to each column."""
    moments_3V = np.stack([counts_V, counts_V * values_V, counts_V * values_V**2])
    sums_3V = np.cumsum(moments_3V, axis=1)
    sums_before_3V = np.pad(sums_3V, ((0, 0), (1, 0)))[:, :-1]
    moments_3VV = sums_3V[:, None, :] - sums_before_3V[:, :, None]
    weight_VV, first_VV, second_VV = moments_3VV
    is_span_VV = weight_VV > 0
    mean_VV = np.zeros_like(first_VV)
    np.divide(first_VV, weight_VV, where=is_span_VV, out=mean_VV)
    distance_VV = second_VV - first_VV * mean_VV
    cost_VV = np.where(is_span_VV, distance_VV, np.inf)
    return mean_VV, cost_VV


def sized_parts(dataset: Any) -> Parts:
    """Return the fastdata datasets in a dataset.

    Raises:
        TypeError: there are none, so the sizes of its samples are not known.
    """
    parts = Parts.find(dataset)
    if not parts.datasets:
        raise TypeError(
            f"the sizes of the samples of {kind_of(dataset)} are not known: it is not a dataset of "
            "fastdata. Wrap it in fastdata.CachedDataset. (BucketSampler also takes an array of "
            "the shapes, (N, D).)"
        )
    return parts
