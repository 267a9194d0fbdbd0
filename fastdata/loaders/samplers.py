"""Orders of an epoch, shared out to any number of ranks; for torch's loader too.

The order of an epoch is that of all ranks together, a pure function of (seed, epoch). Of W ranks,
rank r takes the places r, r + W, ... in it, so that each step of batches of B takes the next W * B
places. Where an epoch stands is then one number, whatever the ranks, workers and batches are that
go on with it.

A ``RankSampler`` shares out an ``Order``, of which ``shuffled``, ``weighted``, ``balanced``,
``repeated`` and ``mixed`` make some, and ``chunked`` that of a ``ChunkedLoader``.

Shape letters: N samples of a dataset, n of an epoch.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Dataset, DistributedSampler, Subset

from fastdata.datasets.batch import RepeatedIndex, count_earlier
from fastdata.machine.processes import find_rank
from fastdata.pixels.core import draw_integers, draw_uniform, sample_keys

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
State = dict[str, Any]
"""Of plain values."""
Uneven = Literal["pad", "drop", "keep"]

_SHUFFLE_SALT = 0x73687566666C65  # keeps orders apart from what transforms draw with the same seed
_CHOICE_SALT = 0x63686F696365
_ROUND_SALT = 0x726F756E64
_CHUNK_SALT = 0x6F72646572
_PART_SALT = 0x6D69786564


class Order(NamedTuple):
    """Which samples an epoch has, of all ranks, and in which order: for ``RankSampler(order=...)``.

    Attributes:
        draw: called with seed, epoch and n, gives int64 (n,), the samples in their order.
        length: of the dataset, N.
        num_samples: n, where nobody asks for another.
        most: n, at most.
        identity: what ``draw`` follows from besides, as plain values: a state is of samplers equal
            in these.
    """

    draw: Callable[[int, int, int], Int64s]
    length: int
    num_samples: int
    most: float
    identity: State


def shuffled(dataset: Sized | int, shuffle: bool = True) -> Order:
    """All samples once, shuffled, or in the order of the dataset.

    Args:
        dataset: or its length.
        shuffle: whether to shuffle.
    """
    length = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
    draw = partial(_draw_shuffled if shuffle else _draw_sequence, length)
    return Order(draw, length, length, length, {"shuffle": shuffle})


def _draw_shuffled(length: int, seed: int, epoch: int, count: int) -> Int64s:
    return _sort(np.arange(length), seed ^ _SHUFFLE_SALT, epoch)[:count]


def _sort(samples: Int64s, seed: int, epoch: int, first_key: int = 0) -> Int64s:
    """Put samples in the random order of their keys."""
    return samples[np.argsort(sample_keys(seed, epoch, samples + first_key), kind="stable")]


def _draw_sequence(length: int, seed: int, epoch: int, count: int) -> Int64s:
    return np.resize(np.arange(length), count)


def weighted(weights: Any) -> Order:
    """Samples drawn by their weights: a ``WeightedRandomSampler`` for ranks, and resumable.

    Args:
        weights: (N,), of each sample, not negative; a sample with none never comes. One that comes
            again in an epoch draws other augmentations.

    Raises:
        ValueError: a weight is negative or not finite, or all are zero.

    Example:
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
    identity = {"order": "weighted", "weights": _checksum(given)}
    return Order(partial(_draw_weighted, given), len(given), len(given), math.inf, identity)


def _draw_weighted(weights: Float64s, seed: int, epoch: int, count: int) -> Int64s:
    chosen = np.flatnonzero(weights)
    ends = np.cumsum(weights[chosen] / weights.max())  # whose sum is finite
    drawn: Float64s = (
        draw_uniform(sample_keys(seed ^ _CHOICE_SALT, epoch, np.arange(count)), 0, 0) * ends[-1]
    )
    return chosen.take(np.searchsorted(ends, drawn, side="right"), mode="clip")


def balanced(targets: Any, replacement: bool = False) -> Order:
    """Every class equally often: rounds in each of which all classes come once, in random order.

    Args:
        targets: (N,), the class of each sample, or a dataset that has them as ``targets``; of a
            ``Subset``, its own, of a ``ConcatDataset`` those of its parts.
        replacement: whether a sample may come again in an epoch, which has as many samples as the
            dataset then. Else it has at most as many of each class as the smallest one has, other
            ones of the larger classes each time.

    Example:
        >>> targets = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
        >>> sampler = RankSampler(order=balanced(targets), rank=0, world_size=1)
        >>> np.bincount(targets[list(sampler)]).tolist()
        [2, 2, 2]
    """
    _, classes = np.unique(_targets_of(targets), return_inverse=True)
    draw = partial(_draw_balanced, classes, replacement)
    identity = {"order": "balanced", "replacement": replacement, "targets": _checksum(classes)}
    counts = np.bincount(classes)
    once = len(counts) * int(counts.min())
    count, most = (len(classes), math.inf) if replacement else (once, once)
    return Order(draw, len(classes), count, most, identity)


def _draw_balanced(classes: Int64s, replacement: bool, seed: int, epoch: int, count: int) -> Int64s:
    counts = np.bincount(classes)
    rounds = -(-count // len(counts))
    keys = sample_keys(seed ^ _ROUND_SALT, epoch, np.arange(rounds * len(counts)))
    drawn = np.argsort(keys.reshape(-1, len(counts)), kind="stable").ravel()[:count]
    everything = _draw_shuffled(len(classes), seed, epoch, len(classes))
    members = everything[np.argsort(classes[everything], kind="stable")]  # of all classes in a row
    which = np.arange(count) // len(counts)
    if replacement:
        which = draw_integers(keys[:count], 1, 0, counts[drawn])
    return members.take((np.cumsum(counts) - counts)[drawn] + which)


def repeated(dataset: Sized | int, repeats: int = 3, shuffle: bool = True) -> Order:
    """Repeated augmentation: each sample several times in a row, so that ranks share its copies.

    As timm's ``RepeatAugSampler`` and DeiT's ``RASampler`` (M. Berman et al., "MultiGrain", 2019;
    E. Hoffer et al., "Augment your batch", CVPR 2020). Each copy draws augmentations of its own. An
    epoch has as many samples as the dataset, so that it has as many batches as ever;
    ``num_samples=repeats * len(dataset)`` has all copies.

    Args:
        dataset: or its length.
        repeats: of each sample.
        shuffle: whether to shuffle.

    Example:
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
    return np.repeat(once(seed, epoch, -(-count // repeats)), repeats)[:count]


def mixed(
    datasets: Sequence[Sized | int],
    weights: Sequence[float] | None = None,
    stop: Literal["first", "all"] = "first",
) -> Order:
    """Samples of several datasets in fixed shares: the order of a ``ConcatDataset`` of them.

    Each dataset is shuffled by itself, and again each time that all of its samples have come.
    Shares are exact, to a sample, in each epoch; which dataset comes when is random.

    Args:
        datasets: of the ``ConcatDataset``, in its order; or their lengths.
        weights: the share of each, of any sum; by default they are equal.
        stop: an epoch ends when the ``"first"`` of the datasets has been read whole, so that no
            sample comes twice, or when ``"all"`` of them have.

    Raises:
        ValueError: a weight is not above zero, or not finite; a dataset is empty; there are not as
            many weights as datasets.

    Example:
        >>> order = mixed([100, 1000], weights=[0.25, 0.75])
        >>> indices = np.array(list(RankSampler(order=order, rank=0, world_size=1)))
        >>> len(indices), int((indices < 100).sum())
        (400, 100)
    """
    lengths = np.array([shuffled(each).length for each in datasets])
    given = np.ones(len(lengths)) if weights is None else np.asarray(weights, np.float64)
    is_matching = given.shape == lengths.shape
    if not is_matching or not (np.isfinite(given) & (given > 0) & (lengths > 0)).all():
        raise ValueError(
            f"weights={given.tolist()} of datasets of {lengths.tolist()} samples: one for each is "
            "needed, finite and above zero, and no dataset may be empty"
        )
    # Exact numbers, as they are written: 0.7 is 7/10. Rounded ones would give one sample too many.
    exact = [Fraction(repr(weight)) for weight in given.tolist()]
    shares = [weight / sum(exact) for weight in exact]
    whole = [length / share for length, share in zip(lengths.tolist(), shares, strict=True)]
    count = math.floor(min(whole)) if stop == "first" else math.ceil(max(whole))
    identity = {"order": "mixed", "lengths": lengths.tolist(), "weights": given.tolist()}
    return Order(
        partial(_draw_mixed, lengths, shares), int(lengths.sum()), count, math.inf, identity
    )


def _draw_mixed(
    lengths: Int64s, shares: list[Fraction], seed: int, epoch: int, count: int
) -> Int64s:
    parts = []
    first = 0
    for number, taken in enumerate(_takes(lengths.tolist(), shares, count)):
        length = int(lengths[number])
        rounds = [
            _draw_shuffled(length, _derived_seed(seed, number, again), epoch, length)
            for again in range(-(-taken // length) or 1)
        ]
        parts.append(first + np.concatenate(rounds)[:taken])
        first += length
    return np.concatenate(parts)[_draw_shuffled(count, seed, epoch, count)]


def _takes(lengths: list[int], shares: list[Fraction], count: int) -> list[int]:
    """Divide ``count`` samples among datasets: each share is rounded down or up to a sample.

    The dataset that is read whole first is rounded up before others, then those of the largest
    remainders. So with ``stop="first"`` no dataset gives more samples than it has, and one gives
    all; with ``stop="all"`` each gives all.
    """
    exact = [share * count for share in shares]
    takes = [math.floor(each) for each in exact]
    numbers = range(len(shares))
    soonest = min(numbers, key=lambda number: lengths[number] / shares[number])
    remainders = [each - taken for each, taken in zip(exact, takes, strict=True)]
    if remainders[soonest]:
        remainders[soonest] = Fraction(1)  # before all others
    by_remainder = sorted(numbers, key=lambda number: -remainders[number])
    for number in by_remainder[: count - sum(takes)]:
        takes[number] += 1
    return takes


def _derived_seed(seed: int, number: int, again: int) -> int:
    """The seed of a dataset's order, in each round that begins again with its first sample."""
    return int(sample_keys(seed ^ _PART_SALT, number, np.array([again]))[0])


def chunked(
    length: int,
    *,
    shuffle: bool = True,
    piece_samples: int = 1,
    chunk_samples: int = 1,
    drop_last: bool = False,
    world_size: int = 1,
) -> Order:
    """Chunks of neighbouring samples, of which each rank has its own; equally many for each rank.

    Shuffled, the samples are cut into pieces of neighbours, the pieces are put in random order,
    each rank takes a stretch of them, and within each chunk of the stretch samples are mixed. With
    pieces of one sample that is a random permutation of all.

    Args:
        length: of the dataset.
        shuffle: whether samples are shuffled at all.
        piece_samples: neighbours that stay together until they are mixed within their chunk.
        chunk_samples: over how many samples pieces are mixed.
        drop_last: whether ranks drop what cannot be shared out evenly; else samples are repeated.
        world_size: number of ranks.

    Example:
        >>> chunked(5, shuffle=False, world_size=2).draw(0, 0, 6)[1::2]
        array([1, 3, 0])
        >>> sorted(chunked(5, piece_samples=2, chunk_samples=4).draw(0, 0, 5).tolist())
        [0, 1, 2, 3, 4]
    """
    identity = locals() | {"chunk_samples": chunk_samples if piece_samples > 1 else None}
    spare = 0 if drop_last else world_size - 1
    count = (length + spare) // world_size * world_size
    draw = partial(_draw_sequence, length)
    if shuffle:
        draw = partial(_draw_chunked, length, piece_samples, chunk_samples, world_size)
    return Order(draw, length, count, count, identity)


def _draw_chunked(
    length: int, piece: int, chunk: int, world_size: int, seed: int, epoch: int, count: int
) -> Int64s:
    seed ^= _CHUNK_SALT
    stream = _sort(np.arange(-(-length // piece)), seed, epoch)
    stream = (stream[:, None] * piece + np.arange(piece)).ravel()
    stream = stream[stream < length]  # the last piece may be shorter
    by_rank = np.resize(stream, (world_size, count // world_size))
    if piece > 1:
        for row in by_rank:
            for start in range(0, len(row), chunk):
                some = slice(start, start + chunk)
                row[some] = _sort(row[some], seed, epoch, length)  # by other keys than pieces
    order: Int64s = by_rank.T.ravel()
    return order


class RankSampler(DistributedSampler[int]):
    """Each rank's share of an epoch: a ``DistributedSampler`` that counts epochs and resumes.

    ``DataLoader(distributed="auto")`` makes it. All ranks must give the same arguments but
    ``rank``. ``set_epoch`` decides which epoch comes, until it is set again; else each ``iter`` is
    the next one, once its first index is asked for.

    Args:
        dataset: or its length; not needed where there is an ``order``.
        num_samples: of an epoch of all ranks, where that are not all samples of the order.
        order: as ``weighted(...)``, ``balanced(...)``, ``repeated(...)`` make it; by default all
            samples once.
        shuffle: else, where there is no ``order``, samples come in that of the dataset.
        seed: of the order.
        uneven: what becomes of samples that cannot be shared out evenly. ``"pad"``: the first of
            the epoch are repeated, ``"drop"``: the last are left out; both as torch's. ``"keep"``:
            each comes once, and some ranks have one more than others: for evaluation, as ranks that
            wait for each other in each step would wait for ever; a state is that of rank 0.
        rank: by default that of ``torch.distributed``, or of the launcher's variables; 0 where
            there is neither.
        world_size: number of ranks; by default of the same.

    Attributes:
        epoch: of the latest iterator, or before the first one and after ``set_epoch`` of the next.
        position: how many samples of all ranks were consumed of that epoch before its iterator
            began: none, but after a resume.
        num_samples: of this rank, in a whole epoch; ``len`` too, also of one that is resumed.
        total_size: of all ranks.
        is_set: whether ``set_epoch`` chose the epoch.
        has_begun: whether an iterator has begun it.

    A sample that comes again in an epoch is told apart, so that it draws anew, whichever rank that
    is on. An ``Order`` of your own is shared out and resumed as those here are. A sampler that was
    alone when it was made looks for ranks again when an epoch begins: Lightning makes ranks of
    processes whose loaders are there already.

    Raises:
        ValueError: there is no such rank, or there are fewer than ``num_samples``.

    Example:
        >>> [list(RankSampler(5, shuffle=False, rank=rank, world_size=2)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
        >>> sampler = RankSampler(6, rank=0, world_size=2)
        >>> state = sampler.state_dict(batches=2, batch_size=1)  # 4 of the 6 samples, on two ranks
        >>> alone = RankSampler(6, rank=0, world_size=1)
        >>> alone.load_state_dict(state)
        >>> list(alone) == alone.order(epoch=0)[4:].tolist()
        True
    """

    def __init__(
        self,
        dataset: Sized | int | None = None,
        num_samples: int | None = None,
        *,
        order: Order | None = None,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if order is None:
            if dataset is None:
                raise TypeError("RankSampler needs a dataset, its length, or an order=")
            order = shuffled(dataset, shuffle)
        length = order.num_samples if num_samples is None else operator.index(num_samples)
        if not 0 <= length <= order.most:
            raise ValueError(
                f"num_samples={num_samples}, but an epoch of this order has at most {order.most} "
                "samples"
            )
        self._order = order
        self._given = rank, world_size
        self.order_length = length
        self.uneven = uneven
        self.position = 0
        self.is_set = False
        self.has_begun = False
        numbers: Any = range(length)  # torch's own asks for its length only
        super().__init__(numbers, 1, 0, shuffle, operator.index(seed), uneven == "drop")
        self.find_ranks()

    def find_ranks(self) -> None:
        if self.num_replicas == 1:
            self.rank, self.num_replicas = map(operator.index, find_rank(*self._given))
        self.num_samples = self._share_of(self.order_length, self.rank)
        is_kept = self.uneven == "keep"
        self.total_size = self.order_length if is_kept else self.num_samples * self.num_replicas

    def order(self, epoch: int) -> Int64s:
        """The samples of an epoch, of all ranks, in the order in which they come: int64 (n,)."""
        return self._order.draw(self.seed, epoch, self.order_length)

    def __iter__(self) -> Iterator[int]:
        if self.has_begun:
            self.epoch += not self.is_set
            self.position = 0
        self.has_begun = True
        self.find_ranks()
        order = self.order(self.epoch)
        count = self._share_of(len(order) - self.position, self.rank)
        end = self.position + count * self.num_replicas
        order = np.resize(order, max(end, len(order)))  # its first ones are repeated to pad it
        own = slice(self.position + self.rank, end, self.num_replicas)
        # Python's numbers one by one: a list of them takes four times the memory.
        indices = iter(order[own].data)
        if count and np.bincount(order).max() > 1:  # some come again
            earlier = count_earlier(np.zeros(self._order.length, np.uint32), order)
            indices = map(RepeatedIndex.mark, indices, earlier[own].data)
        yield from self._waited_for(indices, order[own])

    def _waited_for(self, indices: Iterator[int], _: Int64s) -> Iterator[int]:
        return indices  # nothing is waited for

    def __len__(self) -> int:
        if not self.has_begun:
            self.find_ranks()
        return self.num_samples

    def _share_of(self, samples: int, rank: int) -> int:
        """How many of the coming samples of all ranks are this rank's."""
        first = {"pad": 0, "drop": self.num_replicas - 1, "keep": rank}[self.uneven]
        return max(-(-(samples - first) // self.num_replicas), 0)

    # Epochs and states

    @property
    def identity(self) -> State:
        """What the order follows from besides the epoch: a state is of samplers equal in these."""
        return {
            "sampler": type(self).__name__,
            "samples": self.order_length,
            "length": self._order.length,
            "seed": self.seed,
            **self._order.identity,
        }

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes; one that was loaded goes on if it is the same."""
        if epoch != self.epoch:
            self.epoch = operator.index(epoch)
            self.position = 0
            self.has_begun = False
        self.is_set = True

    def coming(self) -> State:
        """The state of what the next iterator will begin with."""
        if self.has_begun:
            return self._state(self.epoch + (not self.is_set), 0)
        return self._state(self.epoch, self.position)

    def _state(self, epoch: int, position: int) -> State:
        return {"epoch": epoch, "position": operator.index(position), "order": self.identity}

    def state_dict(
        self,
        batches: int = 0,
        batch_size: int = 1,
        *,
        drop_last: bool = False,
        begun: State | None = None,
    ) -> State:
        """Return where the epoch stands, as a dict of plain values, the same on every rank.

        fastdata's DataLoader holds it in its own state. torch's reads ahead, so that only the
        training loop knows how far it is: ``sampler.state_dict(batches=step,
        batch_size=loader.batch_size)``.

        Args:
            batches: that this rank has got since the latest iterator began. After the last one the
                state is the beginning of the next epoch.
            batch_size: samples in each, on one rank.
            drop_last: the loader's, which decides what batch is the last one.
            begun: the state that the iterator began in, where that is not the latest one.
        """
        begun = begun or self._state(self.epoch, self.position)
        epoch = begun["epoch"]
        position = begun["position"]
        left = self._share_of(self.order_length - position, rank=0)  # who has the most
        if batches and batches >= (left if drop_last else left + batch_size - 1) // batch_size:
            return self._state(epoch + 1, 0)
        return self._state(epoch, position + batches * batch_size * self.num_replicas)

    def load_state_dict(self, state: State) -> None:
        """Let the next iterator go on where ``state`` was taken, whatever ranks and batches are.

        Raises:
            ValueError: the state is of a sampler with another order.
        """
        differing = name_differences(state.get("order", {}), self.identity)
        if differing:
            raise ValueError(
                f"the state is of a sampler with another order: {differing}. Make the sampler as "
                "it was."
            )
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.has_begun = False
        self.is_set = False


def name_differences(saved: State, own: State) -> str:
    """What differs between a state and what it is loaded into; empty if nothing does."""
    return "; ".join(
        f"{name} is {own.get(name)!r}, in the state {saved.get(name)!r}"
        for name in {**saved, **own}
        if own.get(name) != saved.get(name)
    )


def _checksum(values: npt.NDArray[Any]) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x} of {len(values)}"


def _targets_of(source: Any) -> npt.NDArray[Any]:
    """The targets of a dataset, behind any ``Subset`` and ``ConcatDataset`` too."""
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
