"""Batches of images of one size, with different sizes in different batches.

``ResizeToBucket`` gives each image one of a few sizes that is close to its aspect ratio.
``BucketSampler`` makes batches of images that have the same size after the transform.

Shape letters: N samples, D dimensions, B batches of an epoch, K buckets.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdata.datasets.sizes import served_shapes
from fastdata.datasets.visits import RepeatedIndex, count_earlier
from fastdata.errors import counted
from fastdata.loaders.bucket_sizes import find_buckets, sized_parts
from fastdata.loaders.orders import checksum, draw_sequence, shuffled, sort_by_keys, weighted
from fastdata.loaders.samplers import RankSampler
from fastdata.pixels.buckets import ResizeToBucket
from fastdata.pixels.random_numbers import draw_uniform, sample_keys
from fastdata.report import warn_user

if TYPE_CHECKING:
    from fastdata.loaders.orders import Float64s, Int64s
    from fastdata.loaders.samplers import StateDict, Uneven
    from fastdata.pixels.arrays import Int32s

# A script can import everything that it needs for buckets from here.
__all__ = ["BucketSampler", "ResizeToBucket", "find_buckets"]

_BATCH_SALT = 0x6275636B6574


class BucketSampler(RankSampler):
    """Batches of samples that have one shape after the transform, for ``batch_sampler=``.

    All ranks draw the same batches, and rank r of W takes the batches r, r + W, ... All ranks get
    the same number of batches. Epochs are counted, and a state can be resumed on any number of
    ranks, as with ``RankSampler``. The shapes of all samples are computed without decoding, from
    the transform that the dataset has when the sampler is made. With ``storage="none"`` the headers
    of all files are read.

    Args:
        dataset: a dataset of fastdata, also in ``Subset`` or ``ConcatDataset``; or the shapes of
            all samples of any dataset, an array with a row for each sample, such as (height,
            width).
        batch_size: number of samples in a batch. The last batch of each shape may be smaller.
        weights: one number for each sample, to draw by weight with replacement, as ``weighted``
            does. Then all batches are full.
        num_samples: number of samples of all ranks in an epoch, with ``weights``; by default that
            of the dataset.
        shuffle: False to keep the dataset's order within each shape, and to sort batches by their
            first samples.
        drop_last: leave out batches that are not full (the last one of each shape).
        seed: seed of the order.
        uneven: treatment of batches that ranks cannot divide evenly, as ``RankSampler`` treats
            samples.
        rank: as for ``RankSampler``.
        world_size: as for ``RankSampler``.

    Raises:
        TypeError: the shapes are not known: it is neither a dataset of fastdata nor an array.
        ValueError: the transform draws sizes at random, or a size is not known before the sample is
            read; or a weight is not valid.

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
        samples = len(shapes_ND)
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
        if weights is None:
            sizes_K = np.bincount(self._bucket_N)
            _warn_of_small_batches(sizes_K, size)
        else:
            order = weighted(weights)  # this checks them
            self._identity |= order.identity
            self._weights = np.asarray(weights, np.float64)
            if len(self._weights) != samples:
                raise ValueError(
                    f"there are {len(self._weights)} weights for "
                    f"{counted(samples, 'sample')}: give one for each"
                )
            drawn = samples if num_samples is None else operator.index(num_samples)
            sizes_K = np.array([drawn])  # any batch may be of any bucket
        batches_K = sizes_K // size if drop_last else -(-sizes_K // size)
        batches = int(batches_K.sum())
        super().__init__(
            order=shuffled(batches, shuffle)._replace(length=samples),
            seed=seed,
            uneven=uneven,
            rank=rank,
            world_size=world_size,
        )

    @property
    def identity(self) -> StateDict:
        """All values, except the epoch, that decide the batches."""
        return super().identity | self._identity

    def order(self, epoch: int) -> Int64s:
        """Return the numbers of all ranks' batches of an epoch, in their order."""
        return np.arange(self.order_length)

    def batches(self, epoch: int) -> list[Int64s]:
        """Return all ranks' batches of an epoch, in their order."""
        if self._weights is not None:
            return list(self._draw_by_weight(self._weights, epoch))
        found = []
        for members in self._members(epoch):
            found += self._cut(members)
        if not self._is_shuffled:
            return sorted(found, key=operator.itemgetter(0))
        numbers = np.arange(len(found))
        in_order = sort_by_keys(numbers, self.seed ^ _BATCH_SALT, epoch)
        return [found[number] for number in in_order.tolist()]

    def _members(self, epoch: int) -> list[Int64s]:
        """Return the samples of each bucket, in the order of an epoch."""
        count = len(self._bucket_N)
        everything = draw_sequence(count, self.seed, epoch, count)
        if self._is_shuffled:
            everything = shuffled(count).draw(self.seed, epoch, count)
        bucket_N = self._bucket_N[everything]
        by_bucket = everything[np.argsort(bucket_N, kind="stable")]
        ends_K = np.cumsum(np.bincount(bucket_N))
        return np.split(by_bucket, ends_K[:-1])

    def _cut(self, members: Int64s) -> list[Int64s]:
        """Return the batches of one bucket."""
        starts = range(0, len(members), self.batch_size)
        batches = [members[start : start + self.batch_size] for start in starts]
        if self._drops_last:
            return [batch for batch in batches if len(batch) == self.batch_size]
        return batches

    def _draw_by_weight(self, weights: Float64s, epoch: int) -> Int64s:
        """Draw a bucket for each batch by its weight, and samples from it: (B, batch_size)."""
        # Each sample is a piece of a line, as long as its weight; buckets follow one another.
        chosen = np.flatnonzero(weights)
        chosen = chosen[np.argsort(self._bucket_N[chosen], kind="stable")]
        ends = np.cumsum(weights[chosen] / weights.max())
        lasts_K = np.flatnonzero(np.diff(self._bucket_N[chosen], append=-1))
        firsts_K = np.append(0, lasts_K[:-1] + 1)
        bucket_ends_K = ends[lasts_K]
        bucket_starts_K = np.append(0, ends)[firsts_K]
        # A random place on the line chooses the bucket of a batch.
        number_B = np.arange(self.order_length)
        keys_B = sample_keys(self.seed ^ _BATCH_SALT, epoch, number_B)
        place_B = draw_uniform(keys_B, 0, 0) * ends[-1]
        drawn_B = np.searchsorted(bucket_ends_K, place_B, side="right")
        drawn_B = drawn_B.clip(max=len(lasts_K) - 1)
        start_B1 = bucket_starts_K[drawn_B][:, None]
        length_B1 = bucket_ends_K[drawn_B][:, None] - start_B1
        # Random places within the bucket choose the samples.
        shares = [draw_uniform(keys_B, 1, number) for number in range(self.batch_size)]
        places = start_B1 + np.stack(shares, axis=1) * length_B1
        pieces = np.searchsorted(ends, places, side="right")
        # Rounding must not choose a sample of a neighbouring bucket.
        first_B1 = firsts_K[drawn_B][:, None]
        last_B1 = lasts_K[drawn_B][:, None]
        samples: Int64s = chosen[np.clip(pieces, first_B1, last_B1)]
        return samples

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]  # batches, not samples
        numbers, own = self._begin_epoch()
        batches = self.batches(self.epoch)
        ordered = [batches[number] for number in numbers.tolist()]
        samples = np.concatenate([np.empty(0, np.int64), *ordered])
        # Samples that are repeated are marked, as by RankSampler.
        counts_N = np.zeros(len(self._bucket_N), np.uint32)
        earlier = count_earlier(counts_N, samples)
        ends = np.cumsum([len(batch) for batch in ordered])
        for place in range(len(ordered))[own]:
            end = ends[place]
            start = end - len(ordered[place])
            marks = earlier[start:end].tolist()
            indices = samples[start:end].tolist()
            yield list(map(RepeatedIndex.mark, indices, marks))


def _shapes_of(dataset: Any) -> Int32s:
    """Return the shapes of all samples after the transform: (N, D)."""
    if _is_array(dataset):
        return np.asarray(dataset)
    parts = sized_parts(dataset)
    shapes = [served_shapes(part) for part in parts.datasets]
    if len({each.shape[1] for each in shapes}) > 1:
        raise ValueError("the datasets serve samples of different numbers of dimensions")
    shapes_ND = np.concatenate(shapes)
    if parts.subset is not None:
        shapes_ND = shapes_ND[parts.subset]
    is_known_N = shapes_ND.all(axis=1)
    if not is_known_N.all():
        raise ValueError(
            f"the size of sample {int(is_known_N.argmin())} after the transform is drawn at "
            "random, but a batch needs samples of one size. End the transform with a crop or a "
            "resize, such as ResizeToBucket."
        )
    return shapes_ND


def _is_array(given: Any) -> bool:
    """Return True for an array of shapes, or a list of them."""
    if isinstance(given, np.ndarray):
        return given.ndim == 2
    if not isinstance(given, (list, tuple)) or not given:
        return False
    row = given[0]
    return isinstance(row, (list, tuple)) and all(isinstance(side, int) for side in row)


def _warn_of_small_batches(sizes_K: Int64s, batch_size: int) -> None:
    """Warn if the batches of all buckets are less than half full."""
    samples = int(sizes_K.sum())
    batches = int((-(-sizes_K // batch_size)).sum())
    whole_batches = -(-samples // batch_size)
    if 2 * samples < batches * batch_size and batches > 2 * whole_batches:
        per_batch = samples / batches
        warn_user(
            f"{counted(samples, 'sample')} have {len(sizes_K):,} shapes after the transform, so a "
            f"batch of batch_size={batch_size} has {per_batch:.1f} on average. Begin the transform "
            "with ResizeToBucket, which gives them a few sizes."
        )
