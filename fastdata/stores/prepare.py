"""Prepare samples once: forecast their size, choose a storage, write them there.

``choose_storage`` decides. If samples turn out larger than forecast, it decides again, without the
storage that was too small. Caches on disk are in ``build.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from fastdata.errors import MemoryBudgetError, SampleError
from fastdata.faults import OR_SKIP
from fastdata.machine import limits
from fastdata.machine.budget import (
    Budget,
    StoragePlan,
    StorageReport,
    budget_bytes,
    choose_storage,
    would_fit,
)
from fastdata.machine.ranks import Follower, cores_of_job, find_run, local_ranks
from fastdata.machine.tables import SampleTable
from fastdata.report import log, warn_user
from fastdata.stores.forecast import forecast, probe_more
from fastdata.stores.frozen import refuse_draws
from fastdata.stores.ingest import StoreFiller, ingest
from fastdata.stores.kept import KeptSamples
from fastdata.stores.lazy import LazyStore
from fastdata.stores.preparer import Preparer
from fastdata.stores.sharing import share_with_ranks
from fastdata.stores.store import Store
from fastdata.stores.trials import try_codecs
from fastdata.stores.writer import WriterPlan, write_any_shapes

if TYPE_CHECKING:
    from fastdata.stores.forecast import Forecast
    from fastdata.stores.options import Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Prepared samples of a dataset, with their storage and the reason for it.

    Attributes:
        storage_plan: chosen storage and the reason.
        kept: stored samples; None if every read goes to the source.
        skipped: errors of the samples that were left out.
    """

    storage_plan: StoragePlan
    kept: KeptSamples | None = None
    skipped: Sequence[SampleError] = ()


class OldSamples(NamedTuple):
    """Samples that stay in memory until new ones are prepared. ``drop`` frees their memory."""

    size_bytes: int
    drop: Callable[[], None]


def prepare_storage(
    preparer: Preparer,
    options: Options,
    table: SampleTable | None,
    old: OldSamples | None = None,
) -> Prepared:
    """Decide where samples are stored, and store them there unless the decision is ``"none"``.

    Args:
        preparer: reader and preparer of the samples.
        options: options of the dataset.
        table: paths and targets, if they are known beforehand; else targets come from the source.
        old: samples that these replace. They are dropped first if memory is too small for both.
    """
    if options.storage == "none" or not len(preparer.source):
        if options.on_error == "skip":
            warn_user(
                "on_error='skip' leaves out samples that cannot be prepared, but storage='none' "
                "prepares them only when they are read, so none are left out"
            )
        reason = "storage='none': samples are prepared on every read"
        return Prepared(storage_plan=StoragePlan(storage="none", reason=reason))
    refuse_draws(preparer.source, options)
    expected = forecast(preparer)
    # Every rank has these objects already. They are not sent, because they may not be picklable.
    known = [getattr(preparer.source, name, None) for name in ("loader", "dataset", "place")]
    known += [preparer.prepare, *options.codecs]
    met = share_with_ranks(expected, options, table, known)
    if isinstance(met, Follower):
        prepared: Prepared = met.value
        warn_of_skipped(prepared.skipped, expected.count)
        plan = prepared.storage_plan
        reason = (
            f"{plan.reason}; one copy for the ranks of this machine, prepared with {met.leader}"
        )
        return replace(prepared, storage_plan=plan._replace(reason=reason))
    if met is None:
        return _store_in_memory(expected, options, table, old)
    # The other ranks wait until the leader publishes its samples or leaves. After any error it
    # leaves.
    with ExitStack() as cleanup:
        cleanup.callback(met.close)
        prepared = _store_in_memory(expected, replace(options, cores=cores_of_job()), table, old)
        if prepared.kept is not None:
            met.publish(prepared, known)
            cleanup.pop_all()
            # The samples own the leader, so that ranks can attach as long as the samples exist.
            prepared = replace(prepared, kept=replace(prepared.kept, shared_by=met))
    return prepared


def _store_in_memory(
    expected: Forecast,
    options: Options,
    table: SampleTable | None,
    old: OldSamples | None,
) -> Prepared:
    """Choose a storage in memory and fill it. Choose again if samples need more than forecast."""
    budget = _budget(options, is_shared=bool(options.cores))
    need_bytes = expected.raw.need_bytes
    if old is not None and need_bytes + old.size_bytes > budget.bytes:
        old.drop()
        budget = _budget(options, is_shared=bool(options.cores))
    trials = None
    refused = ""
    # Each round that fails removes one choice: first raw samples, then one codec after the other.
    while True:
        if trials is None and (options.storage == "compressed" or need_bytes > budget.bytes):
            trials = try_codecs(probe_more(expected.preparer), options.codec)
        plan = choose_storage(
            options.storage, need_bytes, budget, trials or (), only_lossless=options.codec == "auto"
        )
        if plan.storage == "none":
            if refused:
                plan = plan._replace(reason=f"storage='none': {refused}")
            warn_user(
                f"{plan.reason}. Every epoch decodes again; cache_dir= or a smaller resize= may "
                "help."
            )
            return Prepared(storage_plan=plan)
        log.info("%s", plan.reason)
        trial = next((it for it in trials or () if it.codec == plan.codec), expected.raw)
        try:
            return _write_stores(
                expected, options, table, plan, expected.plan_writers(trial, budget.bytes)
            )
        except MemoryBudgetError as error:  # other samples are larger than the probed ones
            trials = trials or try_codecs(probe_more(expected.preparer), options.codec)
            trials = [it for it in trials if it is not trial]
            if options.storage != "auto":
                raise MemoryBudgetError(
                    f"{str(error).rstrip('.')}. {would_fit(trials, budget)}"
                ) from error
            refused = str(error).partition(". ")[0]
            need_bytes = budget.bytes + 1  # raw samples do not fit


def _write_stores(
    expected: Forecast,
    options: Options,
    table: SampleTable | None,
    plan: StoragePlan,
    plans: Sequence[WriterPlan],
) -> Prepared:
    """Write samples as planned, or open a store that prepares each when it is first read."""
    preparer = expected.preparer
    indices = range(expected.count)
    stores: list[Store]
    skipped = []
    # Samples wait for their first read only if their size is certain and none may be left out.
    # Samples for a device do not wait, because all are copied there at once.
    is_certain = (
        preparer.by_core is not None and preparer.shape is not None and plan.storage == "shared"
    )
    may_wait = is_certain and options.on_error == "raise" and not options.at_once
    if may_wait and table is not None:
        stores = [LazyStore(StoreFiller.open(preparer, plans, indices))]
    else:
        stores, written = write_any_shapes(
            lambda plans: ingest(preparer, plans, indices, options, expected.count), plans
        )
        skipped = list(written.errors.values())
        warn_of_skipped(skipped, expected.count)
        if table is None:
            table = SampleTable(list(written.targets.values()))
        elif skipped:
            table = table.reduced_to(list(written.targets))
    return Prepared(
        storage_plan=plan,
        kept=KeptSamples(tuple(stores), table, **vars(expected.layout)),
        skipped=skipped,
    )


def _budget(options: Options, *, is_shared: bool) -> Budget:
    """Return the memory that samples may take. It is divided by the ranks that do not share it."""
    return budget_bytes(
        limits.available_bytes(), options.memory_limit, ranks=1 if is_shared else local_ranks()
    )


def warn_of_skipped(skipped: Sequence[SampleError], count: int) -> None:
    """Warn about samples that were left out."""
    if skipped:
        warn_user(
            f"{len(skipped)} of {count} samples cannot be prepared and were left out; "
            f"dataset.skipped lists them. The first: {str(skipped[0]).replace(OR_SKIP, '')}"
        )


def report_storage(preparer: Preparer, options: Options) -> StorageReport:
    """Try every codec on a few samples, and return the results for the user to compare."""
    expected = probe_more(preparer)
    return StorageReport(
        raw_bytes=expected.raw.need_bytes,
        budget=_budget(options, is_shared=find_run() is not None),
        trials=tuple(try_codecs(expected, "auto", options.codec)),
        probed=len(expected.probed),
    )
