"""The order of a ``ChunkedLoader``: chunks of neighbouring samples, in which samples are mixed."""

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
    # Pieces of neighbours in random order, then all their samples in a row.
    stream = sort_by_keys(np.arange(-(-length // piece)), seed, epoch)
    stream = (stream[:, None] * piece + np.arange(piece)).ravel()
    stream = stream[stream < length]  # the last piece may be shorter
    # A stretch of the pieces for each rank, so that its chunks are of neighbours; padded or cut.
    by_rank = np.resize(stream, (world_size, count // world_size))
    if piece > 1:
        for row in by_rank:
            for start in range(0, len(row), chunk):
                some = slice(start, start + chunk)
                # The keys of samples begin where those of pieces have ended.
                row[some] = sort_by_keys(row[some], seed, epoch, length)
    # A RankSampler of rank r takes the places r, r + W, ...
    order: Int64s = by_rank.T.ravel()
    return order
