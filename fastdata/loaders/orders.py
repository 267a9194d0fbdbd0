"""Orders of an epoch, of all ranks together, for a ``RankSampler``.

Shape letters: N samples of a dataset, n of an epoch.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Sequence, Sized
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastdata.pixels.random_numbers import draw_integers, draw_uniform, sample_keys

if TYPE_CHECKING:
    from fastdata.loaders.samplers import StateDict


Int64s = npt.NDArray[np.int64]

Float64s = npt.NDArray[np.float64]


_SHUFFLE_SALT = 0x73687566666C65  # keeps orders apart from what transforms draw with the same seed

_CHOICE_SALT = 0x63686F696365

_ROUND_SALT = 0x726F756E64

_PART_SALT = 0x6D69786564


class Order(NamedTuple):
    """The samples of an epoch of all ranks, in their order: for ``RankSampler(order=...)``.

    Attributes:
        draw: called with seed, epoch and n, returns int64 (n,), the samples in their order.
        length: of the dataset, N.
        num_samples: the default of n.
        most: the maximum of n.
        identity: plain values that ``draw`` also depends on: a state is resumed by a sampler with
            equal ones.
    """

    draw: Callable[[int, int, int], Int64s]
    length: int
    num_samples: int
    most: float
    identity: StateDict


def shuffled(dataset: Sized | int, shuffle: bool = True) -> Order:
    """Return an order of all samples once, shuffled, or as in the dataset.

    Args:
        dataset: the dataset, or its length.
        shuffle: whether to shuffle.
    """
    length = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
    draw = partial(_draw_shuffled if shuffle else draw_sequence, length)
    return Order(
        draw=draw,
        length=length,
        num_samples=length,
        most=length,
        identity={"shuffle": shuffle},
    )


def _draw_shuffled(length: int, seed: int, epoch: int, count: int) -> Int64s:
    # Sorted by keys of the core, so that the order is the same with any version of NumPy.
    return sort_by_keys(np.arange(length), seed ^ _SHUFFLE_SALT, epoch)[:count]


def sort_by_keys(samples: Int64s, seed: int, epoch: int, first_key: int = 0) -> Int64s:
    """Put samples in the random order of their keys."""
    keys = sample_keys(seed, epoch, samples + first_key)
    return samples[np.argsort(keys, kind="stable")]


def draw_sequence(length: int, seed: int, epoch: int, count: int) -> Int64s:
    return np.resize(np.arange(length), count)


def weighted(weights: Any) -> Order:
    """Return an order drawn by weights: a ``WeightedRandomSampler`` for ranks, and resumable.

    Args:
        weights: (N,), of each sample, not negative; a sample of weight zero is never drawn. A
            sample that is drawn again in an epoch gets other augmentations.

    Raises:
        ValueError: a weight is negative or not finite, or all are zero.

    Example:
        >>> from fastdata.loaders.samplers import RankSampler
        >>> order = weighted([0.0, 1.0, 3.0])
        >>> sampler = RankSampler(order=order, num_samples=4000, rank=0, world_size=1)
        >>> counts = np.bincount(list(sampler))
        >>> int(counts[0]), bool(2900 < counts[2] < 3100)
        (0, True)
    """
    given = np.asarray(weights, np.float64)
    is_right = np.isfinite(given) & (given >= 0) & given.any()
    if not is_right.all():
        wrong = is_right.argmin()
        raise ValueError(
            f"weight {wrong} is {given[wrong]}; weights must be finite, not negative, and one "
            "above zero"
        )
    return Order(
        draw=partial(_draw_weighted, given),
        length=len(given),
        num_samples=len(given),
        most=math.inf,
        identity={"order": "weighted", "weights": checksum(given)},
    )


def _draw_weighted(weights: Float64s, seed: int, epoch: int, count: int) -> Int64s:
    chosen = np.flatnonzero(weights)
    ends = np.cumsum(weights[chosen] / weights.max())  # divided, so that the sum is finite
    keys = sample_keys(seed ^ _CHOICE_SALT, epoch, np.arange(count))
    drawn: Float64s = draw_uniform(keys, 0, 0) * ends[-1]
    places = np.searchsorted(ends, drawn, side="right")
    return chosen.take(places, mode="clip")


def balanced(targets: Any, replacement: bool = False) -> Order:
    """Return an order of rounds, in each of which all classes come once, in random order.

    Args:
        targets: (N,), the class of each sample, or a dataset that has them as ``targets``, also
            in a ``Subset`` or ``ConcatDataset``.
        replacement: True if a sample may come again in an epoch, which then has as many samples as
            the dataset. Else it has at most as many samples of each class as the smallest class,
            and other samples of the larger classes in each epoch.

    Example:
        >>> from fastdata.loaders.samplers import RankSampler
        >>> targets = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
        >>> sampler = RankSampler(order=balanced(targets), rank=0, world_size=1)
        >>> np.bincount(targets[list(sampler)]).tolist()
        [2, 2, 2]
    """
    _, classes = np.unique(_targets_of(targets), return_inverse=True)
    count = len(classes)
    most = math.inf
    if not replacement:
        counts = np.bincount(classes)
        count = len(counts) * int(counts.min())
        most = count
    return Order(
        draw=partial(_draw_balanced, classes, replacement),
        length=len(classes),
        num_samples=count,
        most=most,
        identity={
            "order": "balanced",
            "replacement": replacement,
            "targets": checksum(classes),
        },
    )


def _draw_balanced(classes: Int64s, replacement: bool, seed: int, epoch: int, count: int) -> Int64s:
    counts = np.bincount(classes)
    rounds = -(-count // len(counts))
    keys = sample_keys(seed ^ _ROUND_SALT, epoch, np.arange(rounds * len(counts)))
    # In each row the classes in random order: one round.
    orders = np.argsort(keys.reshape(-1, len(counts)), kind="stable")
    drawn = orders.ravel()[:count]  # the class of each place
    everything = _draw_shuffled(len(classes), seed, epoch, len(classes))
    by_class = np.argsort(classes[everything], kind="stable")
    members = everything[by_class]  # the samples of all classes in a row
    firsts = np.cumsum(counts) - counts
    which = np.arange(count) // len(counts)
    if replacement:
        which = draw_integers(keys[:count], 1, 0, counts[drawn])
    return members.take(firsts[drawn] + which)


def repeated(dataset: Sized | int, repeats: int = 3, shuffle: bool = True) -> Order:
    """Return an order for repeated augmentation: each sample several times in a row.

    Ranks share the copies, as with timm's ``RepeatAugSampler`` and DeiT's ``RASampler`` (M. Berman
    et al., "MultiGrain", 2019; E. Hoffer et al., "Augment your batch", CVPR 2020). Each copy draws
    augmentations of its own. An epoch has as many samples as the dataset, so that its number of
    batches stays the same; ``num_samples=repeats * len(dataset)`` has all copies.

    Args:
        dataset: the dataset, or its length.
        repeats: number of copies of each sample.
        shuffle: whether to shuffle.

    Example:
        >>> from fastdata.loaders.samplers import RankSampler
        >>> order = repeated(6, 3, shuffle=False)
        >>> [list(RankSampler(order=order, rank=rank, world_size=3)) for rank in range(3)]
        [[0, 1], [0, 1], [0, 1]]
    """
    once = shuffled(dataset, shuffle)
    return once._replace(
        draw=partial(_draw_repeated, once.draw, repeats),
        most=repeats * once.length,
        identity={"order": "repeated", "repeats": repeats} | once.identity,
    )


def _draw_repeated(
    once: Callable[..., Int64s], repeats: int, seed: int, epoch: int, count: int
) -> Int64s:
    chosen = once(seed, epoch, -(-count // repeats))
    return np.repeat(chosen, repeats)[:count]


def mixed(
    datasets: Sequence[Sized | int],
    weights: Sequence[float] | None = None,
    stop: Literal["first", "all"] = "first",
) -> Order:
    """Return an order of several datasets in fixed shares, for a ``ConcatDataset`` of them.

    Each dataset is shuffled by itself, and again each time that all of its samples have come.
    Shares are exact, to a sample, in each epoch; the datasets are mixed at random.

    Args:
        datasets: those of the ``ConcatDataset``, in its order; or their lengths.
        weights: the share of each, of any sum; by default they are equal.
        stop: an epoch ends when the ``"first"`` of the datasets has been read whole, so that no
            sample comes twice, or when ``"all"`` of them have.

    Raises:
        ValueError: a weight is not above zero, or not finite; a dataset is empty; there are not as
            many weights as datasets.

    Example:
        >>> from fastdata.loaders.samplers import RankSampler
        >>> order = mixed([100, 1000], weights=[0.25, 0.75])
        >>> indices = np.array(list(RankSampler(order=order, rank=0, world_size=1)))
        >>> len(indices), int((indices < 100).sum())
        (400, 100)
    """
    lengths = [shuffled(each).length for each in datasets]
    if weights is None:
        weights = [1.0] * len(lengths)
    given = [float(weight) for weight in weights]
    is_right = len(given) == len(lengths) and min(given) > 0 and math.isfinite(sum(given))
    if not is_right or min(lengths) == 0:
        raise ValueError(
            f"weights={given} of datasets of {lengths} samples: one for each is needed, finite and "
            "above zero, and no dataset may be empty"
        )
    # Exact numbers, as they are written: 0.7 is 7/10. Rounded ones would give one sample too many.
    exact = [Fraction(repr(weight)) for weight in given]
    shares = [weight / sum(exact) for weight in exact]
    ends = [length / share for length, share in zip(lengths, shares, strict=True)]
    count = math.floor(min(ends)) if stop == "first" else math.ceil(max(ends))
    return Order(
        draw=partial(_draw_mixed, lengths, shares),
        length=sum(lengths),
        num_samples=count,
        most=math.inf,
        identity={"order": "mixed", "lengths": lengths, "weights": given},
    )


def _draw_mixed(
    lengths: list[int], shares: list[Fraction], seed: int, epoch: int, count: int
) -> Int64s:
    parts = [np.empty(0, np.int64)]
    first = 0
    for number, (length, left) in enumerate(
        zip(lengths, _takes(lengths, shares, count), strict=True)
    ):
        again = 0
        while left > 0:  # a round begins again with the first sample of the dataset
            round_seed = sample_keys(seed ^ _PART_SALT, number, np.array([again]))
            parts.append(first + _draw_shuffled(length, int(round_seed[0]), epoch, left))
            left -= length
            again += 1
        first += length
    # The shares are exact; the datasets are mixed at random.
    return np.concatenate(parts)[_draw_shuffled(count, seed, epoch, count)]


def _takes(lengths: list[int], shares: list[Fraction], count: int) -> list[int]:
    """Divide ``count`` samples among datasets: each share is rounded down or up to a sample.

    The dataset that is read whole first is rounded up before others, then those of the largest
    remainders. So with ``stop="first"`` no dataset gives more samples than it has, and one gives
    all; with ``stop="all"`` each gives all.
    """
    takes = [math.floor(share * count) for share in shares]
    remainders = [share * count % 1 for share in shares]
    numbers = range(len(shares))
    soonest = min(numbers, key=lambda number: lengths[number] / shares[number])
    if remainders[soonest]:
        remainders[soonest] = Fraction(1)  # before all others
    by_remainder = sorted(numbers, key=lambda number: -remainders[number])
    for number in by_remainder[: count - sum(takes)]:
        takes[number] += 1
    return takes


def checksum(values: npt.NDArray[Any]) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x} of {len(values)}"


def _targets_of(source: Any) -> npt.NDArray[Any]:
    """Return the targets of a dataset, also of one in a ``Subset`` or ``ConcatDataset``."""
    if isinstance(source, Subset):
        return _targets_of(source.dataset)[np.asarray(source.indices, np.int64)]
    if isinstance(source, ConcatDataset):
        return np.concatenate([_targets_of(part) for part in source.datasets])
    found = getattr(source, "targets", source)
    if isinstance(found, Dataset):  # of which an array would be all samples, decoded
        raise ValueError(
            f"{type(found).__name__} has no targets; give the class of each sample, an array (N,)"
        )
    return np.asarray(found)
