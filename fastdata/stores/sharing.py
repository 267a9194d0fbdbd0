"""One copy of prepared samples for all ranks of a machine that make the same dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastdata.machine.ranks import Follower, Leader, find_run, future_run, lead_or_follow
from fastdata.machine.tables import SampleTable
from fastdata.pixels.fingerprint import fingerprint
from fastdata.report import warn_user
from fastdata.sources.identity import describe_dataset, is_listed
from fastdata.sources.items import DatasetSource

if TYPE_CHECKING:
    from fastdata.stores.forecast import Forecast
    from fastdata.stores.options import Options


def share_with_ranks(
    expected: Forecast, options: Options, table: SampleTable | None, known: Sequence[object]
) -> Leader | Follower | None:
    """Meet the other ranks of this machine that make the same dataset.

    Args:
        expected: forecast of the samples, which is part of their key.
        options: options of the dataset.
        table: paths and targets, if they are known beforehand.
        known: objects that every rank has already, and that are not sent.

    Returns:
        A Leader if this process prepares for all ranks, a Follower with the leader's samples, or
        None if each rank prepares its own samples.
    """
    run = find_run()
    # Lightning starts the other ranks later, as children of this process.
    shared_run = run or future_run()
    if shared_run is None:
        return None
    try:
        return lead_or_follow(shared_run, _key(expected, options, table), known)
    except ValueError as refused:
        if run is not None:
            warn_user(f"each rank prepares and holds its own copy of the samples: {refused}")
        return None


def _key(expected: Forecast, options: Options, table: SampleTable | None) -> str:
    """Return a key that is equal on all ranks for the n-th dataset of the same samples.

    The probed samples are part of it, so that ranks do not share if they read different files under
    equal names, or draw differently.

    Raises:
        ValueError: something cannot be described, and no ``cache_key`` stands for it.
    """
    preparer = expected.preparer
    source = preparer.source
    name = options.cache_key
    chosen = [options.storage, options.codec, options.at_once, options.on_error]
    seen: list[object] = [*chosen, options.memory_limit, name, expected.count, repr(expected.parts)]
    seen += [preparer.prepare.steps, getattr(source, "loader", None)]
    if isinstance(source, DatasetSource):
        seen += [_describe(source.dataset, name), repr(source.columns)]
    if table is not None:
        seen += table.columns.values()
    for read in expected.probed:
        seen += [read.number, read.target, *(array for array, _ in read.parts)]
    key = fingerprint(seen, name)
    _MADE[key] += 1
    return f"{key} {_MADE[key]}"


_MADE: Counter[str] = Counter()
"""Number of datasets that this process has made, by key. A second dataset with the same key must
not follow the first one, whose leader is this process itself."""


def _describe(dataset: Any, cache_key: str | None) -> str:
    """Describe a dataset by everything in it, or by its lists of samples and targets."""
    try:
        return describe_dataset(dataset, cache_key)
    except ValueError:
        if not is_listed(dataset):
            raise
        return describe_dataset(dataset, cache_key="")
