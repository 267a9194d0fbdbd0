"""Random numbers from (seed, epoch, index), equal to those that the core draws.

Each sample of each epoch has its own SplitMix64 stream. The stream's start is a hash of (seed,
epoch, index), and its n-th output depends only on that and on n. So a draw is the same in any
process, in any order, and in a batch of any size.

Source of the mixing function and its constants: G. L. Steele, D. Lea, C. H. Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014, with the variant 13 constants of
D. Stafford; C code: https://prng.di.unimi.it/splitmix64.c
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastdata.pixels.arrays import Float64s, Int64s, UInt64s


_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
# The distance in a stream between the first draws of two neighbouring steps. RandomResizedCrop
# draws 40 numbers.
_DRAWS_PER_STEP = 1 << 10


def sample_keys(seed: int, epoch_B: int | Int64s, index_B: Int64s) -> UInt64s:
    """Return the start of each sample's stream: a hash of seed, epoch and index.

    Args:
        seed: any integer; it counts modulo 2**64.
        epoch_B: one epoch for all samples, or one for each.
        index_B: index of each sample.
    """
    keys = _mix(np.array([(seed + _GAMMA) & _MASK], np.uint64))
    for numbers in (epoch_B, index_B):
        keys = _mix(np.atleast_1d(numbers).astype(np.uint64) * np.uint64(_GAMMA) + keys)
    return keys


def draw_uniform(keys_B: UInt64s, step: int, draw: int) -> Float64s:
    """Return draw number ``draw`` of step number ``step`` for each sample, uniform in [0, 1).

    The results are multiples of 2**-53.

    Example:
        >>> batch = draw_uniform(sample_keys(7, 0, np.array([3, 1, 2])), step=0, draw=0)
        >>> alone = draw_uniform(sample_keys(7, 0, np.array([1])), step=0, draw=0)
        >>> bool(batch[1] == alone[0])
        True
    """
    # Output n of a SplitMix64 stream is the hash of its start plus n times gamma.
    offset = (step * _DRAWS_PER_STEP + draw + 1) * _GAMMA & _MASK
    bits_B = _mix(keys_B + np.uint64(offset)) >> 11
    return bits_B.astype(np.float64) * 2.0**-53


def draw_integers(
    keys_B: UInt64s, step: int, draw: int, count_B: int | np.int64 | Int64s
) -> Int64s:
    """Return integers, uniform in [0, count); each count must be at least 1 and far below 2**53."""
    return (draw_uniform(keys_B, step, draw) * count_B).astype(np.int64)


def _mix(bits: UInt64s) -> UInt64s:
    """Apply SplitMix64's mixing function in place; products of uint64 wrap around."""
    bits ^= bits >> 30
    bits *= 0xBF58476D1CE4E5B9
    bits ^= bits >> 27
    bits *= 0x94D049BB133111EB
    bits ^= bits >> 31
    return bits
