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
    expected: Forecast, options: Options, table: SampleTable | None, known: Sequence[Any]
) -> Leader | Follower | None:
    """Return the leader of the ranks, or what it prepared; None if each rank is on its own."""
    run = find_run()
    shared_run = run or future_run()
    if shared_run is None:
        return None
    try:
        return lead_or_follow(shared_run, _key(expected, options, table), known)
    except ValueError as refused:
        if run is not None:
            warn_user(f"each rank prepares and holds samples of its own: {refused}")
        return None


def _key(expected: Forecast, options: Options, table: SampleTable | None) -> str:
    """Return a key that ranks with the same samples share, for their n-th dataset of these.

    Raises:
        ValueError: something cannot be described, and no ``cache_key`` stands for it.
    """
    preparer = expected.preparer
    source = preparer.source
    name = options.cache_key
    chosen = [options.storage, options.codec, options.at_once, options.on_error]
    seen: list[Any] = [*chosen, options.memory_limit, name, expected.count, repr(expected.parts)]
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
"""How many datasets this process has made, by key. A second one with the same key must not follow
the first, which this process leads."""


def _describe(dataset: Any, cache_key: str | None) -> str:
    try:
        return describe_dataset(dataset, cache_key)
    except ValueError:
        if not is_listed(dataset):
            raise
        return describe_dataset(dataset, cache_key="")  # by its lists of samples and targets
