"""Indices of a sampler as an ``IndexBatch``: samples, and which visit to each it is."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from fastdata.datasets.visits import REPEAT_SHIFT, IndexBatch, count_earlier, occurrences, positions
from fastdata.loaders.parts import Parts
from fastdata.machine.ranks import Rank


def _gives_each_once(sampler: Any) -> bool:
    """True if it is certain that no index comes twice in an epoch."""
    inner = sampler.sampler if type(sampler) is BatchSampler else None
    if type(inner) is RandomSampler:
        return not inner.replacement and inner.num_samples == len(inner.data_source)
    return type(inner) is SequentialSampler


def index_batches(
    parts: Parts, sampler: Any, epoch: int, seed: int, rank: Rank
) -> Callable[[Any], Any]:
    """Return a function that makes an ``IndexBatch`` of the indices that a sampler gave.

    A sample that comes several times in an epoch gets another visit each time. These are numbered
    by the marks of a RankSampler, or by how often the index came before; and by the place in a
    ``Subset`` that has the sample several times.

    Args:
        parts: the datasets.
        sampler: the sampler that gives the batches.
        epoch: the epoch that draws follow.
        seed: the seed that draws follow.
        rank: distinguishes ranks that may read the same samples.
    """
    subset = parts.subset
    count = parts.index_count
    length = count if subset is None else len(subset)
    earlier: Any = None  # for each index, the number of smaller ones of the same sample
    copies = 1
    if subset is not None and count:
        earlier = count_earlier(np.zeros(count, np.uint32), subset % count)
        copies += int(earlier.max(initial=0))
    seen = None
    if copies > 1 or not _gives_each_once(sampler):
        seen = np.zeros(length, np.uint32)

    def draw(indices: Any) -> Any:
        if not hasattr(indices, "__iter__"):
            return indices  # the dataset raises torch's error
        # Read once: a second pass may give other indices, or none. A plain list, because array()
        # takes twice as long for a subclass.
        listed = indices if type(indices) is list else list(indices)
        try:
            index_B = np.asarray(array("q", listed))
            if (index_B.view(np.uint64) >= length).any():
                index_B = positions(index_B, length)
        except (IndexError, OverflowError, TypeError, ValueError):
            return indices  # the dataset's own __getitem__ takes them, or it raises
        visit_B = np.zeros(len(index_B), np.int64)  # np.full takes two calls more
        visit_B += epoch
        if seen is not None:
            before_B = count_earlier(seen, index_B)
            for row, occurrence in occurrences(listed):
                before_B[row] = occurrence
            if copies > 1:
                before_B = before_B * copies + earlier[index_B]
            # Ranks that overlap count separately: rank r of W has the repeats r, r + W, ...
            visit_B += before_B * rank.world_size + rank.rank << REPEAT_SHIFT
        if subset is not None:
            index_B = subset[index_B]
            listed = index_B.tolist()
            index_B = positions(index_B, count)
        return IndexBatch.of(listed, index_B, visit_B, seed)

    return draw
