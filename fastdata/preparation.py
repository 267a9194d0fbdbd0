"""The decision where prepared samples are kept, and keeping them there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastdata import machine
from fastdata.errors import SampleError
from fastdata.ingest import Ingested, forecast, ingest
from fastdata.memory import StoragePlan, budget_bytes, choose_storage
from fastdata.options import Options
from fastdata.report import log, warn_user
from fastdata.sources import Source
from fastdata.stores.base import Store
from fastdata.table import SampleTable

__all__ = ["Prepared", "Steps", "prepare_storage"]


@dataclass(frozen=True, slots=True)
class Steps:
    """Functions called one after the other."""

    steps: tuple[Callable[[Any], Any], ...]

    def __call__(self, sample: Any) -> Any:
        """Put one sample through all of them."""
        for step in self.steps:
            sample = step(sample)
        return sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a dataset serves from.

    Args:
        storage_plan: the storage that was chosen, and why.
        store: the samples, or None if they are kept nowhere.
        table: their paths and targets, or None if they are to be asked of the source.
        skipped: an error per sample left out.
    """

    storage_plan: StoragePlan
    store: Store | None
    table: SampleTable | None
    skipped: list[SampleError] = field(default_factory=list)


def prepare_storage(source: Source, prepare: Steps, options: Options, table: SampleTable | None) -> Prepared:
    """Decide where samples are kept; keep them there unless the decision is ``"none"``.

    Args:
        source: the samples.
        prepare: what is done to each before it is stored.
        options: as given by the user.
        table: paths and targets where they are known beforehand; else targets come from the source.

    Raises:
        SampleError: a sample cannot be prepared.
        MemoryBudgetError: they do not fit where the user wants them.
    """
    if options.storage == "none" or len(source) == 0:
        if options.on_error == "skip":
            warn_user("on_error='skip' leaves out what cannot be prepared; storage='none' finds out only when it reads")
        plan = StoragePlan(storage="none", reason="storage='none': samples are prepared on every read")
        return Prepared(storage_plan=plan, store=None, table=table)
    expected = forecast(source, prepare)
    budget = budget_bytes(machine.available_bytes(), options.memory_limit)
    plan = choose_storage(options.storage, expected.need_bytes, budget)
    if plan.storage == "none":
        warn_user(f"{plan.reason}. Every epoch decodes again; a smaller resize= may fit.")
        return Prepared(storage_plan=plan, store=None, table=table)
    log.info("%s", plan.reason)
    ingested = ingest(
        source,
        prepare,
        expected,
        limit_bytes=budget.bytes,
        workers=machine.usable_cores() if options.num_workers is None else options.num_workers,
        with_targets=table is None,
        on_error=options.on_error,
        progress=options.progress,
        description=plan.reason,
    )
    if ingested.skipped:
        warn_user(
            f"{len(ingested.skipped)} of {len(source)} samples cannot be prepared and were left out; "
            f"dataset.skipped lists them. The first: {ingested.skipped[0]}"
        )
    return Prepared(storage_plan=plan, store=ingested.store, table=_table_of(ingested, table), skipped=ingested.skipped)


def _table_of(ingested: Ingested, table: SampleTable | None) -> SampleTable:
    """The table of the samples that were kept."""
    if table is None:
        return SampleTable(ingested.targets or [])
    if not ingested.skipped:
        return table
    with contextlib.closing(table):
        paths, targets = [table.path(i) for i in ingested.kept], [table.target(i) for i in ingested.kept]
        return SampleTable(targets, paths=paths, class_to_idx=table.class_to_idx)
