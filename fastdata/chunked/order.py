"""The order of an epoch: a pure function of (seed, epoch), and how far from a global shuffle it is.

Shape letters: N samples of the dataset, n of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastdata.draws import sample_keys

__all__ = ["EpochOrder", "ShuffleQuality", "plan_epoch", "shuffle_quality"]

Int64s = npt.NDArray[np.int64]

_ORDER_SALT = 0x6F72646572
"""Keeps the order apart from what transforms draw with the same seed."""
_KEYS_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """What the order of every epoch follows from.

    Args:
        length: number of samples, N.
        shuffle: whether they are shuffled at all.
        seed: of the order.
        piece_samples: samples that stay together until they are mixed within their chunk; 1 shuffles globally.
        chunk_samples: over how many samples pieces are mixed.
        drop_last: whether ranks drop what cannot be shared out evenly; else the first samples are repeated.
        rank: the one whose share is wanted.
        world_size: number of ranks.
    """

    length: int
    shuffle: bool = True
    seed: int = 0
    piece_samples: int = 1
    chunk_samples: int = 1
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    @property
    def rank_samples(self) -> int:
        """Samples that each rank gets in an epoch, n."""
        return self.length // self.world_size if self.drop_last else -(-self.length // self.world_size)


def plan_epoch(order: EpochOrder, epoch: int) -> Int64s:
    """Positions in the dataset in the order in which one rank sees them: int64 (n,).

    Over all ranks each position comes once, but for those dropped or repeated to give all ranks equally many.

    Shuffled, the samples are cut into pieces that lie side by side in the dataset, the pieces are put in random order,
    each rank takes a stretch of them, and within each chunk of the stretch the samples are mixed. With pieces of one
    sample that is a random permutation of all. In order, rank r takes every ``world_size``-th sample from the r-th on,
    as torch's ``DistributedSampler``.

    Example:
        >>> plan_epoch(EpochOrder(length=5, shuffle=False, rank=1, world_size=2), 0)
        array([1, 3, 0])
        >>> sorted(plan_epoch(EpochOrder(length=5, piece_samples=2, chunk_samples=4), 0).tolist())
        [0, 1, 2, 3, 4]
    """
    count = order.rank_samples
    if not order.shuffle:
        everything = np.arange(order.length, dtype=np.int64)
        return np.resize(everything, count * order.world_size)[order.rank :: order.world_size]
    stream = _shuffle_pieces(order, epoch)
    if order.world_size > 1:
        stream = np.resize(stream, count * order.world_size)[order.rank * count : (order.rank + 1) * count]
    if order.piece_samples > 1:
        _mix_chunks(order, epoch, stream)
    return stream


def _shuffle_pieces(order: EpochOrder, epoch: int) -> Int64s:
    size = order.piece_samples
    pieces = np.argsort(_piece_keys(order, epoch, -(-order.length // size)), kind="stable")
    if size == 1:
        return pieces
    stream = (pieces[:, None] * size + np.arange(size)).reshape(-1)
    return stream[stream < order.length]  # the last piece may be shorter


def _mix_chunks(order: EpochOrder, epoch: int, stream: Int64s) -> None:
    """Shuffle within each chunk, in place; keys of samples are those behind the keys of all pieces."""
    for start in range(0, len(stream), order.chunk_samples):
        chunk = stream[start : start + order.chunk_samples]
        chunk[:] = chunk[np.argsort(_keys(order, epoch, chunk + order.length), kind="stable")]


def _piece_keys(order: EpochOrder, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    """The keys of all pieces, in steps: hashing takes several times the memory of what comes out."""
    keys = np.empty(count, np.uint64)
    for start in range(0, count, _KEYS_AT_ONCE):
        end = min(start + _KEYS_AT_ONCE, count)
        keys[start:end] = _keys(order, epoch, np.arange(start, end, dtype=np.int64))
    return keys


def _keys(order: EpochOrder, epoch: int, index: Int64s) -> npt.NDArray[np.uint64]:
    return sample_keys(order.seed ^ _ORDER_SALT, epoch, index)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleQuality:
    """How far from a global shuffle an order is: 1 is as good as one, 0 is the source's own order.

    ``value = (D_source - D) / (D_source - D_global)``, cut to [0, 1], where D is the mean over the batches of an epoch
    of the Kolmogorov-Smirnov distance between the source positions in the batch and the uniform distribution over the
    dataset, and D_source and D_global are the same of the unshuffled order and of a global shuffle. D is small where
    each batch is drawn from all over the data. It is what matters for data sorted by class or by time: the distance
    bounds how far the share of any stretch of the data in a batch is from its share in the whole.

    Args:
        value: in [0, 1].
        batch_distance: D of the order.
        global_distance: D of a global shuffle; not 0, because a batch is a sample.
        source_distance: D of the source's order.
    """

    value: float
    batch_distance: float
    global_distance: float
    source_distance: float

    def __str__(self) -> str:
        return (
            f"shuffle quality {self.value:.3f} (1 = global shuffle, 0 = source order): batches are "
            f"{self.batch_distance:.3f} from an even draw of the data (Kolmogorov-Smirnov); "
            f"of a global shuffle {self.global_distance:.3f}, in source order {self.source_distance:.3f}"
        )


def shuffle_quality(order: EpochOrder, epoch: int, batch_size: int) -> ShuffleQuality:
    """Measure one rank's order of one epoch; reads no data. See ``ShuffleQuality`` for the measure.

    Example:
        >>> shuffle_quality(EpochOrder(length=1000), 0, batch_size=10).value
        1.0
        >>> shuffle_quality(EpochOrder(length=1000, shuffle=False), 0, batch_size=10).value
        0.0
    """
    ours = _batch_distance(plan_epoch(order, epoch), order.length, batch_size)
    best = _batch_distance(_alike(order, shuffle=True), order.length, batch_size)
    worst = _batch_distance(_alike(order, shuffle=False), order.length, batch_size)
    span = worst - best
    value = 1.0 if order.shuffle and (span <= 0 or order.piece_samples == 1) else (worst - ours) / max(span, 1e-12)
    return ShuffleQuality(
        value=min(max(value, 0.0), 1.0), batch_distance=ours, global_distance=best, source_distance=worst
    )


def _alike(order: EpochOrder, *, shuffle: bool) -> Int64s:
    """As many samples in the source's order, or globally shuffled."""
    plain = EpochOrder(length=order.length, shuffle=shuffle, seed=order.seed)
    return np.resize(plan_epoch(plain, 0), order.rank_samples)


def _batch_distance(positions: Int64s, length: int, batch_size: int) -> float:
    """Mean Kolmogorov-Smirnov distance of the full batches from the uniform distribution on [0, length)."""
    size = max(min(batch_size, len(positions)), 1)
    full = len(positions) // size
    if not full:
        return 0.0
    reached = (np.sort(positions[: full * size].reshape(full, size), axis=1) + 0.5) / length
    above = np.arange(1, size + 1) / size - reached
    below = reached - np.arange(size) / size
    return float(np.maximum(above, below).max(axis=1).mean())
