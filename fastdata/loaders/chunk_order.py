"""The order of a ``ChunkedLoader``: chunks of neighbouring samples, mixed within each chunk."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from fastdata.loaders.orders import Order, draw_sequence, sort_by_keys

if TYPE_CHECKING:
    from fastdata.loaders.orders import Int64s

_CHUNK_SALT = 0x6F72646572


def chunked(
    length: int,
    *,
    shuffle: bool = True,
    piece_samples: int = 1,
    chunk_samples: int = 1,
    drop_last: bool = False,
    world_size: int = 1,
) -> Order:
    """Return an order of chunks; all ranks get equally many samples, in chunks of their own.

    To shuffle, the dataset is cut into pieces of neighbouring samples, and the pieces are put in
    random order. Each rank takes an equal stretch of them and cuts it into chunks; the samples of a
    chunk are mixed. With pieces of one sample this is a random permutation of all samples.

    Args:
        length: number of samples in the dataset.
        shuffle: False keeps the order of the dataset.
        piece_samples: number of neighbouring samples in a piece.
        chunk_samples: number of samples in a chunk.
        drop_last: True if samples that cannot be divided evenly among ranks are left out; False if
            the first samples are repeated.
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
    # Shuffle the pieces, then list their samples in a row.
    stream = sort_by_keys(np.arange(-(-length // piece)), seed, epoch)
    stream = (stream[:, None] * piece + np.arange(piece)).ravel()
    stream = stream[stream < length]  # the last piece may be shorter
    # Each rank takes one stretch, so that its chunks consist of neighbours. np.resize repeats the
    # first samples, or leaves out the last ones.
    by_rank = np.resize(stream, (world_size, count // world_size))
    if piece > 1:
        for row in by_rank:
            for start in range(0, len(row), chunk):
                in_chunk = slice(start, start + chunk)
                # Keys from `length` on: those below it were used for the pieces.
                row[in_chunk] = sort_by_keys(row[in_chunk], seed, epoch, length)
    # Transposed, because the RankSampler of rank r takes the places r, r + W, r + 2 W, ...
    order: Int64s = by_rank.T.ravel()
    return order
