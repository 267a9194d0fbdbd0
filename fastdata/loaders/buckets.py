"""Batches of images that keep their shape: each batch is of one size.

``ResizeToBucket`` gives each image one of a few sizes, and a ``BucketSampler`` makes batches of
images that come out alike.

Shape letters: N samples, D dimensions, n samples of an epoch, K batches of an epoch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdata.datasets.sizes import image_sizes, served_shapes
from fastdata.datasets.visits import RepeatedIndex, count_earlier
from fastdata.errors import counted, kind_of
from fastdata.loaders.orders import checksum, draw_sequence, shuffled, sort_by_keys, weighted
from fastdata.loaders.parts import Parts
from fastdata.loaders.samplers import RankSampler
from fastdata.pixels.buckets import Bucket, ResizeToBucket
from fastdata.pixels.random_numbers import draw_uniform, sample_keys
from fastdata.report import warn_user

if TYPE_CHECKING:
    from fastdata.loaders.orders import Float64s, Int64s
    from fastdata.loaders.samplers import StateDict, Uneven
    from fastdata.pixels.arrays import Array, Int32s

# A script imports all that it needs for buckets from here.
__all__ = ["BucketSampler", "ResizeToBucket", "find_buckets"]

_BATCH_SALT = 0x6275636B6574
_RATIO_STEP = 0.01


class BucketSampler(RankSampler):
    """Batches of samples that come out of the transform in one shape, for ``batch_sampler=``.

    All ranks draw the same batches, and rank r of W takes the batches r, r + W, ... All get equally
    many. Epochs are counted, and a state resumes on any number of ranks, as with ``RankSampler``.
    The shapes of all samples are those of the dataset's transform when the sampler is made; they
    are known without decoding. With ``storage="none"`` the headers of all files are read.

    Args:
        dataset: a dataset of fastdata, also in ``Subset`` or ``ConcatDataset``; or the shapes of
            all samples of any dataset, an array (N, D).
        batch_size: samples of a batch. The last batch of each shape may be smaller.
        weights: (N,), of each sample, to draw by weight with replacement, as by ``weighted``. All
            batches are whole then.
        num_samples: samples of all ranks in an epoch, with ``weights``; by default N.
        shuffle: False for the order of the dataset within each shape, and of the first samples
            among batches.
        drop_last: leave out batches that are not whole, of each shape the last one.
        seed: of the order.
        uneven: treatment of batches that ranks cannot divide evenly, as ``RankSampler`` treats
            samples.
        rank: as for ``RankSampler``.
        world_size: as for ``RankSampler``.

    Raises:
        TypeError: the shapes are not known: it is neither a dataset of fastdata nor an array.
        ValueError: the transform draws sizes at random, or sizes are not known before they are
            read; or a weight is not right.

    Example:
        >>> shapes = [(4, 6), (6, 4), (4, 6), (6, 4), (4, 6)]
        >>> list(BucketSampler(shapes, 2, shuffle=False))
        [[0, 2], [1, 3], [4]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        weights: Any = None,
        num_samples: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        size = operator.index(batch_size)
        if size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch needs one sample or more")
        shapes_ND = _shapes_of(dataset)
        _, found_N = np.unique(shapes_ND, axis=0, return_inverse=True)
        self._bucket_N = found_N.reshape(-1)
        self.batch_size = size
        self._is_shuffled = shuffle
        self._drops_last = drop_last
        self._weights: Float64s | None = None
        self._identity: StateDict = {
            "batch_size": size,
            "drops_last": drop_last,
            "shapes": checksum(self._bucket_N),
        }
        count_N = np.bincount(self._bucket_N)
        batches = int((count_N // size if drop_last else -(-count_N // size)).sum())
        if weights is not None:
            order = weighted(weights)  # which checks them
            self._weights = np.asarray(weights, np.float64)
            if len(self._weights) != len(shapes_ND):
                raise ValueError(
                    f"there are {len(self._weights)} weights for "
                    f"{counted(len(shapes_ND), 'sample')}: give one for each"
                )
            self._identity |= order.identity
            samples = len(shapes_ND) if num_samples is None else operator.index(num_samples)
            batches = samples // size if drop_last else -(-samples // size)
        else:
            _warn_of_small_batches(count_N, size)
        super().__init__(
            order=shuffled(batches, shuffle)._replace(length=len(shapes_ND)),
            seed=seed,
            uneven=uneven,
            rank=rank,
            world_size=world_size,
        )

    @property
    def identity(self) -> StateDict:
        """All values that the batches depend on, except the epoch."""
        return super().identity | self._identity

    def order(self, epoch: int) -> Int64s:
        """Return the numbers of the batches of an epoch of all ranks, in their order."""
        return np.arange(self.order_length)

    def batches(self, epoch: int) -> list[Int64s]:
        """Return the batches of an epoch of all ranks, in their order."""
        if self._weights is not None:
            return list(self._draw_by_weight(self._weights, epoch))
        everything = draw_sequence(len(self._bucket_N), self.seed, epoch, len(self._bucket_N))
        if self._is_shuffled:
            everything = shuffled(len(everything)).draw(self.seed, epoch, len(everything))
        by_bucket = everything[np.argsort(self._bucket_N[everything], kind="stable")]
        ends = np.cumsum(np.bincount(self._bucket_N))[:-1]
        cut = []
        for members in np.split(by_bucket, ends):
            whole = len(members) // self.batch_size * self.batch_size
            starts = range(self.batch_size, whole + 1, self.batch_size)
            cut += np.split(members, starts)[: -1 if self._drops_last else None]
        found = [batch for batch in cut if len(batch)]
        if not self._is_shuffled:
            return sorted(found, key=operator.itemgetter(0))
        numbers = sort_by_keys(np.arange(len(found)), self.seed ^ _BATCH_SALT, epoch)
        return [found[number] for number in numbers.tolist()]

    def _draw_by_weight(self, weights: Float64s, epoch: int) -> Int64s:
        """Draw a bucket for each batch by its weight, and samples of it: (K, batch_size)."""
        chosen = np.flatnonzero(weights)
        chosen = chosen[np.argsort(self._bucket_N[chosen], kind="stable")]
        # Samples as pieces of a line, bucket by bucket.
        ends = np.cumsum(weights[chosen] / weights.max())
        lasts = np.flatnonzero(np.diff(self._bucket_N[chosen], append=-1))
        firsts = np.append(0, lasts[:-1] + 1)
        keys = sample_keys(self.seed ^ _BATCH_SALT, epoch, np.arange(self.order_length))
        place = draw_uniform(keys, 0, 0) * ends[-1]
        drawn = np.searchsorted(ends[lasts], place, side="right").clip(max=len(lasts) - 1)
        start = np.append(0, ends)[firsts][drawn]
        length = ends[lasts][drawn] - start
        share = np.stack([draw_uniform(keys, 1, b) for b in range(self.batch_size)], axis=1)
        places = np.searchsorted(ends, start[:, None] + share * length[:, None], side="right")
        # Rounding may not lead to a neighbouring bucket.
        samples: Int64s = chosen[np.clip(places, firsts[drawn][:, None], lasts[drawn][:, None])]
        return samples

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]  # batches, not samples
        numbers, own = self._begin_epoch()
        drawn = self.batches(self.epoch)
        every = [drawn[number] for number in numbers.tolist()]
        samples = np.concatenate([np.empty(0, np.int64), *every])
        # Samples that come again are marked, as by a RankSampler.
        earlier = count_earlier(np.zeros(len(self._bucket_N), np.uint32), samples)
        ends = np.cumsum([len(batch) for batch in every])
        for place in range(len(every))[own]:
            batch = slice(ends[place] - len(every[place]), ends[place])
            indices = map(RepeatedIndex.mark, samples[batch].tolist(), earlier[batch].tolist())
            yield list(indices)


def find_buckets(dataset: Any, count: int, pixels: int, multiple_of: int = 64) -> list[Bucket]:
    """Return sizes of buckets that fit the images of a dataset, for ``ResizeToBucket``.

    The aspect ratios are those that keep most of the images (the mean square of the difference of
    logarithms is the least). The result is the same on all ranks.

    Args:
        dataset: a dataset of fastdata, also in ``Subset`` or ``ConcatDataset``. Sizes are those
            of its stored images, or those in the headers of its files.
        count: number of buckets, at most: there are fewer where images have fewer ratios.
        pixels: about how many pixels each bucket has, such as ``512 * 512``.
        multiple_of: divides heights and widths.

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
    parts = _parts_of(dataset)
    sizes_N2 = np.concatenate([image_sizes(part) for part in parts.datasets])
    if parts.subset is not None:
        sizes_N2 = sizes_N2[parts.subset]
    logs = np.log(sizes_N2[:, 1] / sizes_N2[:, 0])
    ratios, counts = np.unique(np.round(logs / _RATIO_STEP) * _RATIO_STEP, return_counts=True)
    found = []
    for ratio in np.exp(_cluster(ratios, counts, min(count, len(ratios)))).tolist():
        sides = math.sqrt(pixels / ratio), math.sqrt(pixels * ratio)
        height, width = (max(round(side / multiple_of), 1) * multiple_of for side in sides)
        found.append((height, width))
    return list(dict.fromkeys(found))


def _cluster(values: Float64s, counts: Int64s, clusters: int) -> Float64s:
    """Return the means of clusters of sorted values with the least sum of squared distances."""
    # Dynamic programming over the first values and clusters: exact, as values are on one line.
    sums = np.cumsum(np.stack([counts, counts * values, counts * values**2]), axis=1)
    sums = np.pad(sums, ((0, 0), (1, 0)))
    weight, first, second = sums[:, None, 1:] - sums[:, :-1, None]  # of values [row, column]
    is_some = weight > 0
    mean = np.divide(first, weight, where=is_some, out=np.zeros_like(first))
    cost = np.where(is_some, second - first * mean, np.inf)
    best = cost[0]
    begins = []
    for _ in range(1, clusters):
        # One cluster more, which begins at a value: row.
        total = np.append(np.inf, best[:-1])[:, None] + cost
        begins.append(total.argmin(axis=0))
        best = total.min(axis=0)
    means = []
    last = len(values) - 1
    for begin in reversed(begins):
        means.append(mean[begin[last], last])
        last = begin[last] - 1
    return np.array([*means, mean[0, last]])[::-1]


def _parts_of(dataset: Any) -> Parts:
    parts = Parts.find(dataset)
    if not parts.datasets:
        raise TypeError(
            f"the sizes of the samples of {kind_of(dataset)} are not known: it is not a dataset of "
            "fastdata. Give fastdata.CachedDataset(...) of it, or an array of the shapes (N, D)."
        )
    return parts


def _shapes_of(dataset: Any) -> Int32s:
    """Return the shapes of all samples, as they are served: (N, D)."""
    if _is_array(dataset):
        return np.asarray(dataset)
    parts = _parts_of(dataset)
    shapes = [served_shapes(part) for part in parts.datasets]
    if len({each.shape[1] for each in shapes}) > 1:
        raise ValueError("the datasets serve samples of different numbers of dimensions")
    shapes_ND = np.concatenate(shapes)
    if parts.subset is not None:
        shapes_ND = shapes_ND[parts.subset]
    if not shapes_ND.all():
        raise ValueError(
            f"sample {int(shapes_ND.all(axis=1).argmin())} comes out in a size that is drawn at "
            "random, so that no batch is of one size. End the transform with a crop or resize, as "
            "ResizeToBucket does."
        )
    return shapes_ND


def _is_array(given: Any) -> bool:
    """Return True for an array of shapes, or a list of them."""
    if isinstance(given, np.ndarray):
        return given.ndim == 2
    row = given[0] if isinstance(given, (list, tuple)) and given else None
    return isinstance(row, (list, tuple)) and all(isinstance(side, int) for side in row)


def _warn_of_small_batches(count_N: Array, batch_size: int) -> None:
    samples = int(count_N.sum())
    batches = int((-(-count_N // batch_size)).sum())
    if samples < batches * batch_size / 2 and batches > 2 * -(-samples // batch_size):
        warn_user(
            f"{counted(samples, 'sample')} come out in {len(count_N):,} shapes, so that a batch of "
            f"batch_size={batch_size} has {samples / batches:.1f} on average. Begin the transform "
            "with ResizeToBucket, which gives them a few sizes."
        )
