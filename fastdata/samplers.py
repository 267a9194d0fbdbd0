"""Samplers that people write again and again, for any number of ranks, and for torch's loader as for fastdata's.

The order of an epoch is that of all ranks together, a pure function of (seed, epoch). Of W ranks, rank r takes the
places r, r + W, ... in it, so that each step of batches of B takes the next W * B places. Where an epoch stands is then
one number, whatever the ranks, workers and batches are that go on with it.

``EpochSampler`` counts epochs and says where one stands; a ``RankSampler`` shares out an order, and its subclasses have
other orders; a ``BucketSampler`` makes batches.

Shape letters: N samples of an epoch, B batch.
"""

from __future__ import annotations

import copy
import itertools
import operator
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sized
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Dataset, DistributedSampler, Sampler

from fastdata.batch import RepeatedIndex, count_earlier
from fastdata.dataset import PreparedDataset, stored_of
from fastdata.draws import draw_integers, draw_uniform, sample_keys
from fastdata.ranks import find_rank

Int64s = npt.NDArray[np.int64]
Uneven = Literal["pad", "drop", "keep"]

_SHUFFLE_SALT = 0x73687566666C65  # keeps orders apart from what transforms draw with the same seed
_CHOICE_SALT = 0x63686F696365
_ROUND_SALT = 0x726F756E64
_STEP_SALT = 0x73746570


class EpochSampler:
    """Counts its epochs, each ``iter`` one, and says where the latest stands; the base of all samplers here.

    ``set_epoch`` decides which epoch comes, until it is set again, as of torch's ``DistributedSampler``. An epoch
    counts once its first index is asked for.

    Attributes:
        epoch: of the latest iterator, or before the first one and after ``set_epoch`` of the next.
        position: what was consumed of that epoch before its iterator began: nothing, but after a resume.
        rank, num_replicas: the rank and how many there are. One that was alone when it was made looks again when an
            epoch begins: Lightning makes ranks of processes whose loaders are there already.
        is_set: whether ``set_epoch`` chose the epoch.
        has_begun: whether an iterator has begun the epoch.
    """

    epoch = 0
    is_set = has_begun = False
    position: Any
    rank: int
    num_replicas = 1
    _given: tuple[int | None, int | None]  # rank and number of ranks
    _start: ClassVar[Any]  # position of an epoch of which nothing was consumed

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the order follows from besides the epoch, as plain values: a state is of samplers equal in these."""

    @abstractmethod
    def batches_left(self, position: Any, batch_size: int = 1, *, drop_last: bool = False) -> int:
        """How many batches there are from a position on, of the rank that has the most."""

    @abstractmethod
    def advance(self, position: Any, batches: int, batch_size: int) -> Any:
        """The position so many batches of each rank further on."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes; one that was loaded goes on if it is the same."""
        epoch = operator.index(epoch)  # states are of plain values
        if epoch != self.epoch:
            self.epoch, self.position, self.has_begun = epoch, self._start, False
        self.is_set = True

    def coming(self) -> dict[str, Any]:
        """The state of what the next iterator will begin with."""
        epoch, position = self.epoch, self.position
        if self.has_begun:
            epoch, position = epoch + (not self.is_set), self._start
        return self._state(epoch, position)

    def _state(self, epoch: int, position: Any) -> dict[str, Any]:
        return {"epoch": epoch, "position": copy.deepcopy(position), "order": self.identity}

    def find_ranks(self) -> None:
        if self.num_replicas == 1:
            self.rank, self.num_replicas = find_rank(*self._given)

    def _begin(self) -> None:
        begun = self.coming()
        self.find_ranks()
        self.epoch, self.position, self.has_begun = begun["epoch"], begun["position"], True

    def state_dict(self, batches: int = 0, batch_size: int = 1, *, drop_last: bool = False) -> dict[str, Any]:
        """Return where the epoch stands, as a dict of plain values, the same on every rank.

        fastdata's DataLoader holds it in its own state. torch's reads ahead, so that only the training loop knows how
        far it is: ``sampler.state_dict(batches=step, batch_size=loader.batch_size)``.

        Args:
            batches: that this rank has got since the latest iterator began. After the last one the state is the
                beginning of the next epoch.
            batch_size: samples in each, on one rank.
            drop_last: the loader's, which decides what batch is the last one.
        """
        batches, batch_size = operator.index(batches), operator.index(batch_size)
        if not batches:
            return self._state(self.epoch, self.position)
        if batches >= self.batches_left(self.position, batch_size, drop_last=drop_last):
            return self._state(self.epoch + 1, self._start)
        return self._state(self.epoch, self.advance(self.position, batches, batch_size))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on where ``state`` was taken, with any number of ranks and any batch size.

        Raises:
            ValueError: the state is of a sampler with another order.
        """
        saved, own = state.get("order", {}), self.identity
        if saved != own:
            names = [name for name in {**own, **saved} if own.get(name) != saved.get(name)]
            differing = "; ".join(f"{name} is {own.get(name)!r}, in the state {saved.get(name)!r}" for name in names)
            raise ValueError(f"the state is of a sampler with another order: {differing}. Make the sampler as it was.")
        self.epoch, self.position = state["epoch"], copy.deepcopy(state["position"])
        self.has_begun = self.is_set = False


class RankSampler(EpochSampler, DistributedSampler[int]):
    """Each rank's share of a shuffled epoch: a ``DistributedSampler`` that counts its epochs and resumes inside of one.

    ``DataLoader(distributed="auto")`` makes it. All ranks must give the same arguments but ``rank``.

    Args:
        dataset: or its length.
        num_samples: of an epoch of all ranks, where that are not all samples of the dataset.
        shuffle: else samples come in the order of the dataset.
        seed: of the order.
        uneven: what becomes of samples that cannot be shared out evenly. ``"pad"``: the first of the epoch are
            repeated, ``"drop"``: the last are left out; both as torch's. ``"keep"``: each comes once, and some ranks
            have one more than others: for evaluation, as ranks that wait for each other in each step would wait for
            ever; a state is that of rank 0.
        rank: by default that of ``torch.distributed``, or of the launcher's variables; 0 where there is neither.
        world_size: number of ranks; by default of the same.

    Attributes:
        num_samples: of this rank, in a whole epoch; ``len`` too, also of one that is resumed.
        total_size: of all ranks.

    A subclass that has another ``order(epoch)``, and says in ``identity`` what that follows from, is shared out and
    resumed alike. A sample that comes again in it is told apart, so that it draws anew, whichever rank that is on.

    Raises:
        ValueError: there is no such rank, fewer than ``num_samples``, or ``uneven`` is none of the three.

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

    _start = 0
    may_repeat = False
    """Whether there may be more samples in an epoch than in the dataset."""

    def __init__(
        self,
        dataset: Sized | int,
        num_samples: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if uneven not in ("pad", "drop", "keep"):
            raise ValueError(f"uneven={uneven!r} is not one of 'pad', 'drop', 'keep'")
        self.length, self.uneven, self.position = _length_of(dataset), uneven, 0
        self.order_length = self.length if num_samples is None else operator.index(num_samples)
        if not 0 <= self.order_length <= (np.inf if self.may_repeat and self.length else self.length):
            raise ValueError(f"num_samples={num_samples}, of {self.length} samples that come at most once")
        self._given = _plain(rank), _plain(world_size)
        found, seed = find_rank(*self._given), operator.index(seed)
        numbers: Any = range(self.order_length)
        super().__init__(numbers, found.world_size, found.rank, shuffle, seed, drop_last=uneven == "drop")
        self.find_ranks()

    def find_ranks(self) -> None:
        super().find_ranks()
        self.num_samples = self._share_of(self.order_length)
        self.total_size = self.order_length if self.uneven == "keep" else self.num_samples * self.num_replicas

    def order(self, epoch: int) -> Int64s:
        """The samples of an epoch, of all ranks, in the order in which they come: int64 (N,)."""
        return (self._shuffled(epoch) if self.shuffle else np.arange(self.length))[: self.order_length]

    def _shuffled(self, epoch: int) -> Int64s:
        keys = sample_keys(self.seed ^ _SHUFFLE_SALT, epoch, np.arange(self.length))
        return np.argsort(keys, kind="stable")

    def __iter__(self) -> Iterator[int]:
        self._begin()
        order = self.order(self.epoch)
        length, count = len(order), self._share_of(len(order) - self.position)
        place = self.position + self.rank + self.num_replicas * np.arange(count)
        shared = order[place % length].tolist() if count else []
        if not count or (place[-1] < length and np.bincount(order).max() == 1):
            yield from shared
            return
        earlier = count_earlier(np.zeros(self.length, np.uint32), order)[place % length]
        earlier += place // length * np.bincount(order)[shared]  # those that pad come after all others
        yield from map(RepeatedIndex.mark, shared, earlier.tolist())

    def __len__(self) -> int:
        if not self.has_begun:
            self.find_ranks()
        return self.num_samples

    def _share_of(self, samples: int) -> int:
        """How many of the coming samples of all ranks are this rank's."""
        first = {"pad": 0, "drop": self.num_replicas - 1, "keep": self.rank}[self.uneven]
        return max(-(-(samples - first) // self.num_replicas), 0)

    @property
    def identity(self) -> dict[str, Any]:
        named = {"sampler": type(self).__name__, "samples": self.order_length, "length": self.length}
        return named | {"seed": self.seed, "shuffle": self.shuffle}

    def batches_left(self, position: int, batch_size: int = 1, *, drop_last: bool = False) -> int:
        ranks = self.num_replicas
        share = (self.order_length - position + (0 if self.uneven == "drop" else ranks - 1)) // ranks
        return share // batch_size if drop_last else -(-share // batch_size)

    def advance(self, position: int, batches: int, batch_size: int) -> int:
        return position + batches * batch_size * self.num_replicas


class WeightedSampler(RankSampler):
    """Samples drawn by their weights: torch's ``WeightedRandomSampler`` for any number of ranks, and resumable.

    A sample that comes again in an epoch draws other augmentations, whichever ranks that is on.

    Args:
        weights: (N,), of each sample, not negative; a sample with none never comes.
        num_samples: of an epoch of all ranks; by default as many as there are weights, without replacement as many as
            are above zero.
        replacement: whether a sample may come again in an epoch.
        seed, uneven, rank, world_size: as of ``RankSampler``.

    Raises:
        ValueError: a weight is negative or not finite, all are zero, or without replacement there are too few.

    Example:
        >>> sampler = WeightedSampler([0.0, 1.0, 3.0], num_samples=4000, rank=0, world_size=1)
        >>> counts = np.bincount(list(sampler))
        >>> int(counts[0]), bool(2900 < counts[2] < 3100)
        (0, True)
    """

    def __init__(
        self,
        weights: Any,
        num_samples: int | None = None,
        replacement: bool = True,
        *,
        seed: int = 0,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.weights = np.asarray(weights, np.float64)
        if self.weights.ndim != 1:
            raise ValueError(f"weights have the shape {self.weights.shape}; one for each sample is needed")
        wrong = np.flatnonzero(~(np.isfinite(self.weights) & (self.weights >= 0)))
        if len(wrong):
            raise ValueError(f"weight {wrong[0]} is {self.weights[wrong[0]]}; weights must be finite and not negative")
        positive = int(np.count_nonzero(self.weights))
        if not positive:
            raise ValueError(f"all {len(self.weights)} weights are zero; at least one must be above")
        if not replacement and num_samples is not None and num_samples > positive:
            raise ValueError(f"num_samples={num_samples} without replacement, but {positive} weights are above zero")
        self.may_repeat = self.replacement = replacement
        self._data = _checksum(self.weights)
        count = (len(self.weights) if replacement else positive) if num_samples is None else num_samples
        super().__init__(len(self.weights), count, seed=seed, uneven=uneven, rank=rank, world_size=world_size)

    def order(self, epoch: int) -> Int64s:
        seed, chosen = self.seed ^ _CHOICE_SALT, np.flatnonzero(self.weights)
        if self.replacement:
            ends = np.cumsum(self.weights[chosen] / self.weights.max())  # whose sum is finite
            drawn = draw_uniform(sample_keys(seed, epoch, np.arange(self.order_length)), 0, 0) * ends[-1]
            picked: Int64s = chosen[np.minimum(np.searchsorted(ends, drawn, side="right"), len(chosen) - 1)]
            return picked
        # Drawn without replacement, samples come in the order of exponential variates of these rates: P. S. Efraimidis,
        # P. G. Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97, 2006. Their
        # logarithms stay finite, whatever the weights are.
        drawn = draw_uniform(sample_keys(seed, epoch, chosen), 0, 0) + 2.0**-54  # in (0, 1)
        log_waits = np.log(-np.log1p(-drawn)) - np.log(self.weights[chosen])
        first: Int64s = chosen[np.argsort(log_waits, kind="stable")[: self.order_length]]
        return first

    @property
    def identity(self) -> dict[str, Any]:
        return super().identity | {"replacement": self.replacement, "weights": self._data}


class BalancedSampler(RankSampler):
    """Every class equally often: rounds in each of which all classes come once, in random order.

    Args:
        targets: (N,), the class of each sample, or a dataset that has them as ``targets``; of a ``Subset``, its own, of
            a ``ConcatDataset`` those of its parts.
        num_samples: of an epoch of all ranks. By default as many as there are samples; without replacement as many as
            the smallest class has, for each class.
        replacement: whether a sample may come again in an epoch; else other samples of the larger classes come in each.
        seed, uneven, rank, world_size: as of ``RankSampler``.

    Raises:
        ValueError: targets are no classes, or without replacement the smallest class has too few samples.

    Example:
        >>> targets = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, 2])
        >>> sampler = BalancedSampler(targets, rank=0, world_size=1)
        >>> np.bincount(targets[list(sampler)]).tolist()
        [2, 2, 2]
    """

    def __init__(
        self,
        targets: Any,
        num_samples: int | None = None,
        replacement: bool = False,
        *,
        seed: int = 0,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        found = _of_samples(targets, _targets_of)
        if found.ndim != 1 or not len(found):
            raise ValueError(f"targets have the shape {found.shape}; the class of each sample is needed, at least one")
        try:
            classes, of = np.unique(found, return_inverse=True)
        except TypeError as error:
            raise ValueError(f"targets cannot be sorted, as classes are: {error}") from error
        self._class, self._counts = of.astype(np.int64), np.bincount(of)
        smallest = int(self._counts.argmin())
        most = len(classes) * int(self._counts[smallest])
        if not replacement and num_samples is not None and num_samples > most:
            raise ValueError(
                f"num_samples={num_samples} without replacement, but class {classes[smallest]} has "
                f"{self._counts[smallest]} samples, and {len(classes)} classes of as many are {most}. Use "
                "replacement=True, or fewer."
            )
        self.may_repeat = self.replacement = replacement
        self._data = _checksum(self._class)
        count = (len(found) if replacement else most) if num_samples is None else num_samples
        super().__init__(len(found), count, seed=seed, uneven=uneven, rank=rank, world_size=world_size)

    def order(self, epoch: int) -> Int64s:
        classes, seed = len(self._counts), self.seed ^ _ROUND_SALT
        rounds = -(-self.order_length // classes)
        keys = sample_keys(seed, epoch, np.arange(rounds * classes))
        drawn = np.argsort(keys.reshape(rounds, classes), axis=1, kind="stable").reshape(-1)[: self.order_length]
        shuffled = self._shuffled(epoch)
        members = shuffled[np.argsort(self._class[shuffled], kind="stable")]  # of all classes in a row
        which = np.arange(self.order_length) // classes
        if self.replacement:
            which = draw_integers(keys[: self.order_length], 1, 0, self._counts[drawn])
        order: Int64s = members[(np.cumsum(self._counts) - self._counts)[drawn] + which]
        return order

    @property
    def identity(self) -> dict[str, Any]:
        return super().identity | {"replacement": self.replacement, "targets": self._data}


class RepeatSampler(RankSampler):
    """Repeated augmentation: each sample several times in a row of the epoch, so that its copies go to several ranks.

    As timm's ``RepeatAugSampler`` and DeiT's ``RASampler`` (M. Berman et al., "MultiGrain", 2019; E. Hoffer et al.,
    "Augment your batch", CVPR 2020). Each copy draws augmentations of its own.

    Args:
        dataset: or its length.
        repeats: of each sample.
        num_samples: of an epoch of all ranks; by default the length of the dataset, so that an epoch has as many
            batches as ever, of fewer samples. ``repeats * len(dataset)`` has all.
        shuffle, seed, uneven, rank, world_size: as of ``RankSampler``.

    Raises:
        ValueError: ``repeats`` is below 1, or there are fewer than ``num_samples`` copies.

    Example:
        >>> [list(RepeatSampler(6, 3, shuffle=False, rank=rank, world_size=3)) for rank in range(3)]
        [[0, 1], [0, 1], [0, 1]]
    """

    may_repeat = True

    def __init__(
        self,
        dataset: Sized | int,
        repeats: int = 3,
        num_samples: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Uneven = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        length, self.repeats = _length_of(dataset), operator.index(repeats)
        if repeats < 1:
            raise ValueError(f"repeats={repeats} must be at least 1")
        if num_samples is not None and num_samples > repeats * length:
            raise ValueError(f"num_samples={num_samples}, but {length} samples {repeats} times are {repeats * length}")
        super().__init__(
            length, num_samples, shuffle=shuffle, seed=seed, uneven=uneven, rank=rank, world_size=world_size
        )

    def order(self, epoch: int) -> Int64s:
        first = self._shuffled(epoch) if self.shuffle else np.arange(self.length)
        return np.repeat(first[: -(-self.order_length // self.repeats)], self.repeats)[: self.order_length]

    @property
    def identity(self) -> dict[str, Any]:
        return super().identity | {"repeats": self.repeats}


class BucketSampler(EpochSampler, Sampler[list[int]]):
    """Batches of samples of like height and width, so that few pixels are padded; a ``batch_sampler``.

    A shuffled epoch is cut into pools, each pool is halved again and again, by height or width, whichever leaves fewer
    padded pixels, until the parts are batches, and these come in random order. Where the shorter side is 256 pixels and
    the longer one anything up to 500, 1 % of the pixels are padded, in random batches 59 %. Ranks get equally many
    batches, and in one step those of one part, which cost about as much.

    ``collate_fn=functools.partial(fastdata.collate, pad=0)`` pads the images of a batch.

    Args:
        shapes: (N, 2), height and width of each sample in pixels; or a fastdata dataset, or ``Subset`` or
            ``ConcatDataset`` of such, whose stored samples' shapes are known, those before any random step.
        batch_size: samples in a batch of one rank.
        shuffle: else pools are stretches of the dataset, and their batches come as they were parted.
        seed: of the order.
        drop_last: whether to drop what makes no whole batch on every rank, random samples; else the last batches are
            smaller, and fewer than ``world_size`` samples are repeated.
        pool_batches: steps in a pool, at most, of a batch on each rank. With more, fewer pixels are padded, and batches
            are less random.
        rank, world_size: as of ``RankSampler``.

    Raises:
        ValueError: shapes are not (N, 2), or not all are known, or a number is below 1.

    Example:
        >>> shapes = np.array([(2, 4), (4, 2), (2, 4), (4, 2), (4, 2), (2, 4)])
        >>> sampler = BucketSampler(shapes, 3, rank=0, world_size=1)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 2, 5], [1, 3, 4]]
    """

    _start: ClassVar[Any] = []

    def __init__(
        self,
        shapes: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pool_batches: int = 64,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if min(batch_size, pool_batches) < 1:
            raise ValueError(f"batch_size={batch_size} and pool_batches={pool_batches} must be at least 1")
        self._shapes = _of_samples(shapes, _shapes_of)
        self._data = _checksum(self._shapes)
        # Without a public ``drop_last``, for which Lightning would take this for a BatchSampler, and make it anew.
        self.batch_size, self.shuffle, self._drop_last = operator.index(batch_size), shuffle, drop_last
        self.seed, self.pool_batches, self.position = operator.index(seed), operator.index(pool_batches), self._start
        self._given = _plain(rank), _plain(world_size)
        self.find_ranks()

    @property
    def sampler(self) -> BucketSampler:
        """Itself: where Lightning looks for whom to tell the epoch."""
        return self

    def __iter__(self) -> Iterator[list[int]]:
        self._begin()
        epoch, left = self.epoch, np.arange(len(self._shapes))
        if self.shuffle:
            left = np.argsort(sample_keys(self.seed ^ _SHUFFLE_SALT, epoch, left), kind="stable")
        *legs, (*latest, steps) = self._legs(self.position)
        for *leg, taken in legs:
            left = left[~np.isin(left, np.concatenate([*itertools.islice(self._steps(left, epoch, *leg), taken)]))]
        for group in itertools.islice(self._steps(left, epoch, *latest), steps, None):
            share = -(-len(group) // self.num_replicas)
            parts = self._parted(np.resize(group, share * self.num_replicas), share)
            turn = int(sample_keys(self.seed ^ _STEP_SALT, epoch if self.shuffle else 0, group[:1])[0])
            which = (self.rank + turn) % self.num_replicas  # else rank 0 would always have the smaller ones
            batch = parts[which].tolist()
            if share * self.num_replicas > len(group):
                earlier = count_earlier(np.zeros(len(self._shapes), np.uint32), np.concatenate(parts))
                batch = list(map(RepeatedIndex.mark, batch, earlier[which * share : (which + 1) * share].tolist()))
            yield batch

    def __len__(self) -> int:
        if not self.has_begun:
            self.find_ranks()
        return self.batches_left(self._start)

    def _steps(self, left: Int64s, epoch: int, batch_size: int, ranks: int) -> Iterator[Int64s]:
        """What all ranks take in each step, from pools of about as many steps each, so that none is small."""
        size = batch_size * ranks
        steps = len(left) // size if self._drop_last else -(-len(left) // size)
        pools = -(-steps // self.pool_batches)
        ends = [steps * number // pools * size for number in range(pools + 1)] if steps else []
        for start, end in itertools.pairwise(ends):
            if start < end:
                yield from self._groups(left[start:end], size, epoch)

    def _groups(self, pool: Int64s, size: int, epoch: int) -> list[Int64s]:
        """The samples of each step, those of one that is not full at the end: so steps that were taken were full."""
        groups = self._parted(pool, size)
        if not self.shuffle:
            return groups
        keys = sample_keys(self.seed ^ _STEP_SALT, epoch, np.array([group[0] for group in groups]))
        is_short = np.array([len(group) < size for group in groups])
        return [groups[number] for number in np.lexsort((keys, is_short)).tolist()]

    def _parted(self, chosen: Int64s, size: int) -> list[Int64s]:
        """Samples of like shape, ``size`` in each part but the last."""
        parts = -(-len(chosen) // size)
        if parts <= 1:
            return [chosen]
        halves = []
        for axis in (0, 1):
            ordered = chosen[np.argsort(self._shapes[chosen, axis], kind="stable")]
            halves.append((ordered[: parts // 2 * size], ordered[parts // 2 * size :]))
        lower, upper = min(halves, key=lambda pair: sum(map(self._padded_px, pair)))
        return [*self._parted(lower, size), *self._parted(upper, size)]

    def _padded_px(self, chosen: Int64s) -> int:
        return len(chosen) * int(self._shapes[chosen].max(axis=0).prod())

    @property
    def identity(self) -> dict[str, Any]:
        named = {"sampler": type(self).__name__, "shapes": self._data, "seed": self.seed, "shuffle": self.shuffle}
        return named | {"drop_last": self._drop_last, "pool_batches": self.pool_batches}

    def batches_left(self, position: Any, batch_size: int = 1, *, drop_last: bool = False) -> int:
        """How many batches each rank has from a position on: of its own size, whatever is given."""
        samples, size = len(self._shapes), self.batch_size * self.num_replicas
        samples -= sum(int(np.prod(leg)) for leg in position)
        return samples // size if self._drop_last else -(-samples // size)

    def advance(self, position: Any, batches: int, batch_size: int) -> list[list[int]]:
        *legs, latest = self._legs(position)
        latest[2] += batches
        return [*legs, latest] if latest[2] else legs

    def _legs(self, position: Any) -> list[list[int]]:
        """What was taken of an epoch: the size of batches, the ranks, and how many steps of these.

        The latest is this sampler's own, so that it goes on as if it had not been interrupted.
        """
        legs, own = [list(leg) for leg in position], [self.batch_size, self.num_replicas]
        return legs if legs and legs[-1][:2] == own else [*legs, [*own, 0]]


def _checksum(values: npt.NDArray[Any]) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x} of {len(values)}"


def _plain(number: int | None) -> int | None:
    return None if number is None else operator.index(number)


def _length_of(dataset: Sized | int) -> int:
    return len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)


def _of_samples(source: Any, find: Callable[[Any], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """What is found of each sample, behind any ``Subset`` and ``ConcatDataset`` too."""
    if hasattr(source, "indices") and hasattr(source, "dataset"):  # a Subset
        return _of_samples(source.dataset, find)[np.asarray(source.indices, np.int64)]
    if isinstance(source, ConcatDataset):
        return np.concatenate([_of_samples(part, find) for part in source.datasets])
    return find(source)


def _targets_of(source: Any) -> npt.NDArray[Any]:
    found = getattr(source, "targets", source)
    if isinstance(found, Dataset):  # of which an array would be all samples, decoded
        raise ValueError(f"{type(found).__name__} has no targets; give the class of each sample, an array (N,)")
    return np.asarray(found)


def _shapes_of(source: Any) -> Int64s:
    if isinstance(source, PreparedDataset):
        kept = stored_of(source).kept
        shapes = None if kept is None else kept.images.shapes()
        if shapes is None:
            what = "keeps no samples" if kept is None else "prepares samples on their first read"
            raise ValueError(
                f"the dataset {what}, so that not all of their shapes are known yet. Make it with fill='eager' and a "
                "storage, or give shapes=, an array (N, 2) of height and width."
            )
        return np.asarray(shapes[:, -2:], np.int64)
    if isinstance(source, Dataset):
        raise ValueError(
            f"{type(source).__name__} is no fastdata dataset, whose shapes are known; give shapes=, an array (N, 2) of "
            "height and width."
        )
    found = np.asarray(source)
    if found.ndim != 2 or found.shape[1] != 2:
        raise ValueError(f"shapes are {found.shape}; (N, 2) is needed, the height and width of each sample")
    return found.astype(np.int64)
