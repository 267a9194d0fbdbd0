"""Orders of the samples of an epoch, for all ranks together, for a ``RankSampler``.

Shape letters: N samples of a dataset, n samples of an epoch.
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

from fastdata.errors import check_choices
from fastdata.pixels.random_numbers import draw_integers, draw_uniform, sample_keys

if TYPE_CHECKING:
    from fastdata.loaders.samplers import StateDict


Int64s = npt.NDArray[np.int64]

Float64s = npt.NDArray[np.float64]


# Salts make the draws of an order independent of the transforms' draws with the same seed.
_SHUFFLE_SALT = 0x73687566666C65

_CHOICE_SALT = 0x63686F696365

_ROUND_SALT = 0x726F756E64

_PART_SALT = 0x6D69786564


class Order(NamedTuple):
    """The samples of an epoch for all ranks together, for ``RankSampler(order=...)``.

    Attributes:
        draw: function of (seed, epoch, n) that returns the samples in order: int64 (n,), each in
            [0, N). It must be pure: equal arguments give equal samples.
        length: number of samples in the dataset, N.
        num_samples: default of n.
        most: maximum of n; ``math.inf`` if samples may come again.
        identity: plain values that ``draw`` also depends on. A state can only be resumed with equal
            ones.
    """

    draw: Callable[[int, int, int], Int64s]
    length: int
    num_samples: int
    most: float
    identity: StateDict


def shuffled(dataset: Sized | int, shuffle: bool = True) -> Order:
    """Return an order in which each sample comes once.

    Args:
        dataset: the dataset, or its length.
        shuffle: False keeps the order of the dataset.
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
    # Sorted by keys of fastdata's own generator, so that NumPy's version does not change the order.
    return sort_by_keys(np.arange(length), seed ^ _SHUFFLE_SALT, epoch)[:count]


def sort_by_keys(samples: Int64s, seed: int, epoch: int, first_key: int = 0) -> Int64s:
    """Return samples in random order: that of their random keys."""
    keys = sample_keys(seed, epoch, samples + first_key)
    return samples[np.argsort(keys, kind="stable")]


def draw_sequence(length: int, seed: int, epoch: int, count: int) -> Int64s:
    return np.resize(np.arange(length), count)


def weighted(weights: Any) -> Order:
    """Return an order drawn by weights, like ``WeightedRandomSampler``, for ranks and resumable.

    A sample that is drawn again in an epoch gets other random augmentations.

    Args:
        weights: numbers (N,), one for each sample, not negative, of any sum. A sample with weight
            zero is never drawn.

    Raises:
        ValueError: a weight is negative or not finite, all are zero, or a sample has several.

    Example:
        >>> from fastdata.loaders.samplers import RankSampler
        >>> order = weighted([0.0, 1.0, 3.0])
        >>> sampler = RankSampler(order=order, num_samples=4000, rank=0, world_size=1)
        >>> counts = np.bincount(list(sampler))
        >>> int(counts[0]), bool(2900 < counts[2] < 3100)
        (0, True)
    """
    given = np.asarray(weights, np.float64)
    is_right = np.isfinite(given) & (given >= 0) & given.any() & (given.ndim == 1)
    if not is_right.all():
        wrong = is_right.argmin()
        raise ValueError(
            f"weight {wrong} is {given[wrong]}, but each must be a number, finite and not "
            "negative, and at least one of them above zero"
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
    """Return an order with equally many samples of each class.

    The order consists of rounds: in each round every class comes once, in random order.

    Args:
        targets: the class of each sample, an array (N,); or a dataset with an attribute
            ``targets``, also one inside a ``Subset`` or ``ConcatDataset``.
        replacement: True if a sample may come again in an epoch, which then has as many samples as
            the dataset. False takes from each class as many samples as the smallest class has;
            each epoch takes other samples of the larger classes.

    Raises:
        ValueError: a dataset has no ``targets``, or samples have several targets each.

    Example:
        >>> from fastdata.loaders.samplers import RankSampler
        >>> targets = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
        >>> sampler = RankSampler(order=balanced(targets), rank=0, world_size=1)
        >>> np.bincount(targets[list(sampler)]).tolist()
        [2, 2, 2]
    """
    given = _targets_of(targets)
    if given.ndim != 1:
        raise ValueError(
            f"the targets have the shape {given.shape}, but each sample needs one class. Pass the "
            "class of each sample, as an array (N,)."
        )
    _, classes = np.unique(given, return_inverse=True)
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
    # Each row is one round: the classes in random order.
    orders = np.argsort(keys.reshape(-1, len(counts)), kind="stable")
    drawn = orders.ravel()[:count]  # the class of each place
    everything = _draw_shuffled(len(classes), seed, epoch, len(classes))
    by_class = np.argsort(classes[everything], kind="stable")  # stable: keeps the shuffled order
    members = everything[by_class]  # all samples of class 0, then of class 1, and so on
    firsts = np.cumsum(counts) - counts
    number_in_class = np.arange(count) // len(counts)
    if replacement:
        number_in_class = draw_integers(keys[:count], 1, 0, counts[drawn])
    return members.take(firsts[drawn] + number_in_class)


def repeated(dataset: Sized | int, repeats: int = 3, shuffle: bool = True) -> Order:
    """Return an order for repeated augmentation: each sample comes several times in a row.

    The copies are divided among ranks, as in timm's ``RepeatAugSampler`` and DeiT's ``RASampler``
    (M. Berman et al., "MultiGrain", 2019; E. Hoffer et al., "Augment your batch", CVPR 2020). Each
    copy gets its own random augmentations. An epoch has as many samples as the dataset, so that the
    number of batches does not change; ``num_samples=repeats * len(dataset)`` gives all copies.

    Args:
        dataset: the dataset, or its length.
        repeats: number of copies of each sample.
        shuffle: False keeps the order of the dataset.

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
    """Return an order that mixes several datasets in fixed shares, for a ``ConcatDataset`` of them.

    Each dataset is shuffled on its own, and shuffled again each time all of its samples have come.
    In each epoch the shares are exact, up to rounding to whole samples; the datasets are mixed at
    random.

    Args:
        datasets: the datasets of the ``ConcatDataset``, in the same order, or their lengths.
        weights: weight of each dataset; its share is its weight divided by their sum. By default
            all are equal.
        stop: ``"first"`` ends an epoch when one of the datasets has been read completely, so that
            no sample comes twice; ``"all"`` ends it when all of them have.

    Raises:
        ValueError: a weight is not finite or not above zero, a dataset is empty, the numbers of
            weights and datasets differ, or ``stop`` is another value.

    Example:
        >>> from fastdata.loaders.samplers import RankSampler
        >>> order = mixed([100, 1000], weights=[0.25, 0.75])
        >>> indices = np.array(list(RankSampler(order=order, rank=0, world_size=1)))
        >>> len(indices), int((indices < 100).sum())
        (400, 100)
    """
    check_choices({"stop": ("first", "all")}, stop=stop)
    lengths = [shuffled(each).length for each in datasets]
    if weights is None:
        weights = [1.0] * len(lengths)
    given = [float(weight) for weight in weights]
    is_right = len(given) == len(lengths) and min(given) > 0 and math.isfinite(sum(given))
    if not is_right or min(lengths) == 0:
        raise ValueError(
            f"weights={given} for datasets of {lengths} samples: each dataset needs one weight, "
            "finite and above zero, and no dataset may be empty"
        )
    # Exact fractions of the numbers as they are written: 0.7 is 7/10. With floats, rounding could
    # give one sample too many.
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
        zip(lengths, _sample_counts(lengths, shares, count), strict=True)
    ):
        again = 0
        while left > 0:  # each turn shuffles the whole dataset again
            round_seed = sample_keys(seed ^ _PART_SALT, number, np.array([again]))
            parts.append(first + _draw_shuffled(length, int(round_seed[0]), epoch, left))
            left -= length
            again += 1
        first += length
    # The shares are exact; the datasets are mixed at random.
    return np.concatenate(parts)[_draw_shuffled(count, seed, epoch, count)]


def _sample_counts(lengths: list[int], shares: list[Fraction], count: int) -> list[int]:
    """Divide ``count`` samples among datasets; each share is rounded down or up to whole samples.

    The dataset that would be read completely first is rounded up before all others, then those with
    the largest remainders. So with ``stop="first"`` no dataset gives more samples than it has, and
    one gives all of them; with ``stop="all"`` each gives all.
    """
    takes = [math.floor(share * count) for share in shares]
    remainders = [share * count % 1 for share in shares]
    numbers = range(len(shares))
    soonest = min(numbers, key=lambda number: lengths[number] / shares[number])
    if remainders[soonest]:
        remainders[soonest] = Fraction(1)  # sorts before all others
    by_remainder = sorted(numbers, key=lambda number: -remainders[number])
    for number in by_remainder[: count - sum(takes)]:
        takes[number] += 1
    return takes


def checksum(values: npt.NDArray[Any]) -> str:
    """Return the CRC-32 of an array, and its length, as text for an ``identity``."""
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x} of {len(values)}"


def _targets_of(source: Any) -> npt.NDArray[Any]:
    """Return the targets of a dataset, also of one inside a ``Subset`` or ``ConcatDataset``."""
    if isinstance(source, Subset):
        return _targets_of(source.dataset)[np.asarray(source.indices, np.int64)]
    if isinstance(source, ConcatDataset):
        return np.concatenate([_targets_of(part) for part in source.datasets])
    found = getattr(source, "targets", source)
    if isinstance(found, Dataset):  # np.asarray would read and decode all samples
        raise ValueError(
            f"{type(found).__name__} has no attribute targets. Pass the class of each sample "
            "instead, as an array (N,)."
        )
    return np.asarray(found)
