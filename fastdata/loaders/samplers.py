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

from fastdata.datasets.visits import RepeatedIndex, count_earlier
from fastdata.machine.ranks import find_rank
from fastdata.pixels.random_numbers import draw_integers, draw_uniform, sample_keys

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
StateDict = dict[str, Any]
"""Of plain values."""
Uneven = Literal["pad", "drop", "keep"]

_SHUFFLE_SALT = 0x73687566666C65  # keeps orders apart from what transforms draw with the same seed
_CHOICE_SALT = 0x63686F696365
_ROUND_SALT = 0x726F756E64
_CHUNK_SALT = 0x6F72646572
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
        identity={"order": "weighted", "weights": _checksum(given)},
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
            "targets": _checksum(classes),
        },
    )


def _draw_balanced(classes: Int64s, replacement: bool, seed: int, epoch: int, count: int) -> Int64s:
    counts = np.bincount(classes)
    rounds = -(-count // len(counts))
    keys = sample_keys(seed ^ _ROUND_SALT, epoch, np.arange(rounds * len(counts)))
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


def chunked(
    length: int,
    *,
    shuffle: bool = True,
    piece_samples: int = 1,
    chunk_samples: int = 1,
    drop_last: bool = False,
    world_size: int = 1,
) -> Order:
    """Return an order of chunks of neighbouring samples; each rank has as many of its own.

    If shuffled, the samples are cut into pieces of neighbours, the pieces are put in random order,
    each rank takes a stretch of them, and within each chunk of the stretch samples are mixed. With
    pieces of one sample that is a random permutation of all.

    Args:
        length: of the dataset.
        shuffle: False for the order of the dataset.
        piece_samples: neighbours that stay together until they are mixed within their chunk.
        chunk_samples: number of samples among which pieces are mixed.
        drop_last: whether ranks drop samples that cannot be divided evenly; else the first samples
            are repeated.
        world_size: number of ranks.

    Example:
        >>> chunked(5, shuffle=False, world_size=2).draw(0, 0, 6)[1::2]
        array([1, 3, 0])
        >>> sorted(chunked(5, piece_samples=2, chunk_samples=4).draw(0, 0, 5).tolist())
        [0, 1, 2, 3, 4]
    """
    spare = 0 if drop_last else world_size - 1
    count = (length + spare) // world_size * world_size
    draw = partial(draw_sequence, length)
    if shuffle:
        draw = partial(_draw_chunked, length, piece_samples, chunk_samples, world_size)
    return Order(
        draw=draw,
        length=length,
        num_samples=count,
        most=count,
        identity={
            "length": length,
            "shuffle": shuffle,
            "piece_samples": piece_samples,
            "chunk_samples": chunk_samples if piece_samples > 1 else None,
            "drop_last": drop_last,
            "world_size": world_size,
        },
    )


def _draw_chunked(
    length: int, piece: int, chunk: int, world_size: int, seed: int, epoch: int, count: int
) -> Int64s:
    seed ^= _CHUNK_SALT
    stream = sort_by_keys(np.arange(-(-length // piece)), seed, epoch)
    stream = (stream[:, None] * piece + np.arange(piece)).ravel()
    stream = stream[stream < length]  # the last piece may be shorter
    by_rank = np.resize(stream, (world_size, count // world_size))
    if piece > 1:
        for row in by_rank:
            for start in range(0, len(row), chunk):
                some = slice(start, start + chunk)
                row[some] = sort_by_keys(
                    row[some], seed, epoch, length
                )  # by other keys than pieces
    order: Int64s = by_rank.T.ravel()
    return order


class RankSampler(DistributedSampler[int]):
    """Each rank's share of an epoch: a ``DistributedSampler`` that counts epochs and resumes.

    ``DataLoader(distributed="auto")`` makes one. All ranks must give the same arguments except
    ``rank``. ``set_epoch`` chooses the coming epochs, until it is called again; else each ``iter``
    is the next epoch, once its first index is asked for.

    Args:
        dataset: the dataset, or its length; not needed with an ``order``.
        num_samples: samples of all ranks in an epoch, if not all samples of the order.
        order: an order by ``weighted(...)``, ``balanced(...)``, ``repeated(...)`` or ``mixed(...)``;
            by default all samples once.
        shuffle: False for the order of the dataset, if there is no ``order``.
        seed: of the order.
        uneven: treatment of samples that cannot be divided evenly. ``"pad"``: the first samples of
            the epoch are repeated, ``"drop"``: the last ones are left out; both as in torch.
            ``"keep"``: each comes once, and some ranks have one more than others. That is for
            evaluation: ranks that wait for each other in each step would hang. The state is then
            that of rank 0.
        rank: by default that of ``torch.distributed``, or of the launcher's variables, or 0.
        world_size: number of ranks, with the same default.

    Attributes:
        epoch: of the latest iterator, or before the first one and after ``set_epoch`` of the next.
        position: samples of all ranks in that epoch that came before its iterator began: 0 except
            after a resume.
        num_samples: samples of this rank in a whole epoch; ``len`` too, also when it is resumed.
        total_size: samples of all ranks in an epoch.
        is_set: True if ``set_epoch`` chose the epoch.
        has_begun: True if an iterator has begun the epoch.

    A sample that comes again in an epoch is marked, so that it gets other draws, on whatever rank.
    An ``Order`` of your own is divided and resumed like those of fastdata. A sampler that was made
    without other ranks looks for ranks again when an epoch begins: Lightning starts ranks after the
    loaders were made.

    Raises:
        ValueError: there is no such rank, or the order has fewer than ``num_samples``.

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
        """Return the samples of an epoch of all ranks, in their order: int64 (n,)."""
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
        """Return how many of so many coming samples of all ranks are one rank's."""
        first = {"pad": 0, "drop": self.num_replicas - 1, "keep": rank}[self.uneven]
        return max(-(-(samples - first) // self.num_replicas), 0)

    # Epochs and states

    @property
    def identity(self) -> StateDict:
        """All values that the order depends on, except the epoch; equal in a state's sampler."""
        return {
            "sampler": type(self).__name__,
            "samples": self.order_length,
            "length": self._order.length,
            "seed": self.seed,
            **self._order.identity,
        }

    def set_epoch(self, epoch: int) -> None:
        """Choose the coming epoch; a loaded one goes on if it is the same."""
        if epoch != self.epoch:
            self.epoch = operator.index(epoch)
            self.position = 0
            self.has_begun = False
        self.is_set = True

    def coming(self) -> StateDict:
        """Return the state that the next iterator begins with."""
        if self.has_begun:
            return self._state(self.epoch + (not self.is_set), 0)
        return self._state(self.epoch, self.position)

    def _state(self, epoch: int, position: int) -> StateDict:
        return {"epoch": epoch, "position": operator.index(position), "order": self.identity}

    def state_dict(
        self,
        batches: int = 0,
        batch_size: int = 1,
        *,
        drop_last: bool = False,
        begun: StateDict | None = None,
    ) -> StateDict:
        """Return the position in the epoch, as a dict of plain values, the same on every rank.

        fastdata's DataLoader includes it in its own state. torch's loader reads ahead, so that only
        the training loop can count its batches: ``sampler.state_dict(batches=step,
        batch_size=loader.batch_size)``.

        Args:
            batches: number of batches that this rank got since the latest iterator began. After the
                last one the state is the beginning of the next epoch.
            batch_size: samples in each batch of one rank.
            drop_last: the loader's, which decides which batch is the last one.
            begun: the state that the iterator began with, if not the latest one.
        """
        begun = begun or self._state(self.epoch, self.position)
        epoch = begun["epoch"]
        position = begun["position"]
        left = self._share_of(self.order_length - position, rank=0)  # rank 0 has the most
        if not drop_last:
            left += batch_size - 1
        if batches and batches >= left // batch_size:
            return self._state(epoch + 1, 0)
        return self._state(epoch, position + batches * batch_size * self.num_replicas)

    def load_state_dict(self, state: StateDict) -> None:
        """Let the next iterator go on where ``state`` was taken, with any ranks and batch size.

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

    def resume(self, state: StateDict) -> bool:
        """Load a state, unless ``set_epoch`` chose another epoch; return True if it was loaded."""
        is_set = self.is_set
        if is_set and self.epoch != state["epoch"]:
            return False
        self.load_state_dict(state)
        self.is_set = is_set
        return True


def name_differences(saved: StateDict, own: StateDict) -> str:
    """Return how the values of a state differ from one's own; empty if they do not."""
    return "; ".join(
        f"{name} is {own.get(name)!r}, in the state {saved.get(name)!r}"
        for name in {**saved, **own}
        if own.get(name) != saved.get(name)
    )


def _checksum(values: npt.NDArray[Any]) -> str:
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
