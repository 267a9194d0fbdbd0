"""The sampler that divides an epoch among ranks; it also works with torch's loader.

There is one order for all ranks together, a pure function of (seed, epoch). Rank r of W ranks takes
the places r, r + W, r + 2 W, ... of it, so that one step with batches of B samples takes the next
W * B places. The position in an epoch is therefore one number, which does not depend on the number
of ranks, workers or samples in a batch.

Shape letters: n samples of an epoch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from torch.utils.data import DistributedSampler

from fastdata.datasets.visits import RepeatedIndex, count_earlier
from fastdata.errors import check_choices
from fastdata.loaders.orders import balanced, mixed, repeated, shuffled, weighted
from fastdata.machine.ranks import find_rank

if TYPE_CHECKING:
    from fastdata.loaders.orders import Int64s, Order

# Scripts import RankSampler and its orders from here.
__all__ = [
    "RankSampler",
    "StateDict",
    "Uneven",
    "balanced",
    "mixed",
    "repeated",
    "shuffled",
    "weighted",
]

StateDict = dict[str, Any]
"""A state made of plain values, which JSON can store."""

Uneven = Literal["pad", "drop", "keep"]


class RankSampler(DistributedSampler[int]):
    """A ``DistributedSampler`` that counts epochs and can be resumed.

    ``DataLoader(distributed="auto")`` makes one. All ranks must pass the same arguments, except
    ``rank``. Each ``iter`` is the next epoch, which begins at its first ``next``. After a call of
    ``set_epoch``, each ``iter`` is that epoch, until another one is set.

    Args:
        dataset: the dataset, or its length; not needed with an ``order``.
        num_samples: number of samples in an epoch, of all ranks together; by default the order's.
        order: an order made by ``weighted(...)``, ``balanced(...)``, ``repeated(...)`` or
            ``mixed(...)``; by default each sample comes once.
        shuffle: False keeps the order of the dataset; only used without an ``order``.
        seed: seed of the order.
        uneven: what happens to samples that cannot be divided evenly. ``"pad"`` repeats the first
            samples of the epoch, ``"drop"`` leaves out the last ones; both as in torch. ``"keep"``
            gives each sample once, so that some ranks get one more than others. That is for
            evaluation: in training, ranks wait for each other in every step, and would hang. With
            ``"keep"``, resume from the state of rank 0.
        rank: number of this rank; by default that of ``torch.distributed``, or of the launcher's
            environment variables, or 0.
        world_size: number of ranks, with the same default; 1 if there is no launcher.

    Attributes:
        epoch: epoch of the latest iterator; before the first iterator, or after ``set_epoch``, the
            epoch of the next one.
        position: number of samples of that epoch, of all ranks together, before the place where
            its iterator begins: 0 unless it was resumed.
        num_samples: number of samples of this rank in a whole epoch, which is also ``len``, even if
            the epoch is resumed.
        total_size: number of samples in an epoch, of all ranks together.
        is_set: True if ``set_epoch`` chose the epoch.
        has_begun: True if an iterator has begun the epoch.

    A sample that comes again in an epoch gets other random numbers, on whichever rank it comes. You
    can pass an ``Order`` of your own: it is divided and resumed like those of fastdata. A sampler
    that found no other ranks looks for them again when an epoch begins, because Lightning starts
    ranks after the loaders were made.

    Raises:
        ValueError: ``rank`` is not below ``world_size``, the order has fewer than ``num_samples``,
            or ``uneven`` is another value.

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
                f"num_samples={length}, but an epoch of this order has at most {order.most} samples"
            )
        check_choices({"uneven": get_args(Uneven)}, uneven=uneven)
        self._order = order
        self._given = rank, world_size
        self.order_length = length
        self.uneven = uneven
        self.position = 0
        self.is_set = False
        self.has_begun = False
        numbers: Any = range(length)  # torch's constructor only reads its length
        super().__init__(numbers, 1, 0, shuffle, operator.index(seed), uneven == "drop")
        self.find_ranks()

    def find_ranks(self) -> None:
        """Look for other ranks, unless there are some already, and compute this rank's share."""
        if self.num_replicas == 1:
            self.rank, self.num_replicas = map(operator.index, find_rank(*self._given))
        self.num_samples = self._share_of(self.order_length, self.rank)
        is_kept = self.uneven == "keep"
        self.total_size = self.order_length if is_kept else self.num_samples * self.num_replicas

    def order(self, epoch: int) -> Int64s:
        """Return the samples of an epoch for all ranks together, in order: int64 (n,)."""
        return self._order.draw(self.seed, epoch, self.order_length)

    def __iter__(self) -> Iterator[int]:
        order, own = self._begin_epoch()
        # A memoryview makes Python's integers one by one; a list takes four times the memory.
        indices = iter(order[own].data)
        if len(order) and np.bincount(order).max() > 1:
            # Mark samples that come again. All ranks are counted, so that no two copies of a sample
            # get the same draws.
            earlier = count_earlier(np.zeros(self._order.length, np.uint32), order)
            indices = map(RepeatedIndex.mark, indices, earlier[own].data)
        yield from self._when_loaded(indices, order[own])

    def _begin_epoch(self) -> tuple[Int64s, slice]:
        """Begin an epoch: return its order, padded if needed, and the places of this rank in it."""
        if self.has_begun:
            self.epoch += not self.is_set
            self.position = 0
        self.has_begun = True
        self.find_ranks()
        order = self.order(self.epoch)
        count = self._share_of(len(order) - self.position, self.rank)
        end = self.position + count * self.num_replicas
        order = np.resize(order, max(end, len(order)))  # padded by its first samples
        return order, slice(self.position + self.rank, end, self.num_replicas)

    def _when_loaded(self, indices: Iterator[int], samples: Int64s) -> Iterator[int]:
        """Return the indices of this rank's ``samples``; a subclass may wait before each one."""
        return indices

    def __len__(self) -> int:
        if not self.has_begun:
            self.find_ranks()
        return self.num_samples

    def _share_of(self, samples: int, rank: int) -> int:
        """Return how many of the coming ``samples`` a rank gets."""
        first = {"pad": 0, "drop": self.num_replicas - 1, "keep": rank}[self.uneven]
        return max(-(-(samples - first) // self.num_replicas), 0)

    # Epochs and states

    @property
    def identity(self) -> StateDict:
        """The values that the order depends on, except the epoch: a state must have the same."""
        return {
            "sampler": type(self).__name__,
            "samples": self.order_length,
            "length": self._order.length,
            "seed": self.seed,
            **self._order.identity,
        }

    def set_epoch(self, epoch: int) -> None:
        """Choose the coming epoch; a loaded state is continued if it is of the same epoch."""
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

        fastdata's DataLoader includes it in its own state. torch's loader reads ahead, so only the
        training loop can count its batches: ``sampler.state_dict(batches=step,
        batch_size=loader.batch_size)``.

        Args:
            batches: number of batches that this rank got since the latest iterator began. After the
                last batch the state is the beginning of the next epoch.
            batch_size: samples in each batch of one rank.
            drop_last: the loader's ``drop_last``, which decides which batch is the last one.
            begun: the state that the iterator began with; by default that of the latest iterator.
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
        """Continue at the position of ``state``, with any number of ranks and any batch size.

        Raises:
            ValueError: the state comes from a sampler with another order.
        """
        differing = name_differences(state.get("order", {}), self.identity)
        if differing:
            raise ValueError(
                f"the state comes from a sampler with another order: {differing}. Make the sampler "
                "as it was when the state was saved."
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
    """Return the values that differ between a state and a sampler or loader, as text."""
    return "; ".join(
        f"{name} is {own.get(name)!r}, in the state {saved.get(name)!r}"
        for name in {**saved, **own}
        if own.get(name) != saved.get(name)
    )
