"""The decision where prepared samples are kept, and keeping them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fastdata import machine
from fastdata.codecs import SourceDecoder
from fastdata.contents import Contents
from fastdata.errors import MemoryBudgetError, SampleError
from fastdata.ingest import Forecast, Ingested, ReadSample, SampleRoad, forecast, ingest
from fastdata.lazy import LazyFill
from fastdata.memory import Budget, budget_bytes
from fastdata.options import Options
from fastdata.report import log, warn_user
from fastdata.sources import FileBytes, FileSource, Source
from fastdata.spec import SampleSpec
from fastdata.storage import CodecTrial, StoragePlan, StorageReport, choose_storage, would_fit
from fastdata.stores.writers import DenseWriter, EncodedWriter, FileWriter, RaggedWriter, Writer
from fastdata.table import SampleTable
from fastdata.trial import choices_for, try_codecs, try_source

__all__ = [
    "Prepared",
    "Road",
    "Steps",
    "look_longer",
    "prepare_storage",
    "report_storage",
    "try_all",
    "warn_of_skipped",
]

_TRIAL_SAMPLES = 24
_SOURCE = "source"
_LAZY_SLACK = 1.1
_LAZY_FLOOR_BYTES = 1 << 20
"""Reserved beyond what samples of unknown size are expected to take, because every process maps it once."""


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
class Road:
    """Where samples come from, and what is done to each before it is stored.

    Args:
        source: the samples.
        prepare: what is done.
        open_bytes: makes of a file's bytes what the source makes of the file; None where the samples are no files, or
            are opened by the user's own loader.
        shape: of every prepared sample, where that follows from the steps; else None.
    """

    source: Source
    prepare: Steps
    open_bytes: Callable[[memoryview], Any] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def decoder(self) -> SourceDecoder | None:
        """What prepares a sample from its file's bytes, where that is possible."""
        return None if self.open_bytes is None else SourceDecoder(self.open_bytes, self.prepare)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a dataset serves from.

    Args:
        storage_plan: the storage that was chosen, and why.
        contents: the samples, or None if they are kept nowhere.
        table: their paths and targets, or None if they are to be asked of the source.
        skipped: an error per sample left out.
    """

    storage_plan: StoragePlan
    contents: Contents | None = None
    table: SampleTable | None
    skipped: list[SampleError] = field(default_factory=list)


def prepare_storage(road: Road, options: Options, table: SampleTable | None) -> Prepared:
    """Decide where samples are kept; keep them there unless the decision is ``"none"``.

    Args:
        road: the samples.
        options: as given by the user.
        table: paths and targets where they are known beforehand; else targets come from the source.

    Raises:
        SampleError: a sample cannot be prepared.
        MemoryBudgetError: they do not fit where the user wants them.
        ValueError: the codec that the user wants cannot encode them.
    """
    if options.storage == "none" or len(road.source) == 0:
        if options.on_error == "skip":
            warn_user("on_error='skip' leaves out what cannot be prepared; storage='none' finds out only when it reads")
        plan = StoragePlan(storage="none", reason="storage='none': samples are prepared on every read")
        return Prepared(storage_plan=plan, table=table)
    return _Preparation(road, options, table).run()


class _Preparation:
    """One run of ``prepare_storage``; codecs are tried when it is first needed."""

    def __init__(self, road: Road, options: Options, table: SampleTable | None) -> None:
        self._road, self._options, self._table = road, options, table
        self._expected = forecast(road.source, road.prepare)
        self._budget = _budget(options)
        self._trials: list[CodecTrial] | None = None

    def run(self) -> Prepared:
        """Fill the first storage that turns out to fit."""
        plan = self._choose(self._expected.need_bytes)
        while plan.storage != "none":
            log.info("%s", plan.reason)
            try:
                return self._fill(plan)
            except MemoryBudgetError as error:
                plan = self._next(plan, error)
        warn_user(f"{plan.reason}. Every epoch decodes again; cache_dir= or a smaller resize= may help.")
        return Prepared(storage_plan=plan, table=self._table)

    def _choose(self, raw_bytes: int) -> StoragePlan:
        options, budget = self._options, self._budget
        trials = self._tried() if options.storage == "compressed" or raw_bytes > budget.bytes else []
        return choose_storage(options.storage, raw_bytes, budget, trials, only_lossless=options.codec == "auto")

    def _next(self, failed: StoragePlan, error: MemoryBudgetError) -> StoragePlan:
        """What to try after samples turned out larger than those looked at.

        Raises:
            MemoryBudgetError: nothing, because the user wants this storage; says what would fit.
        """
        others = [trial for trial in self._tried() if trial.codec != failed.codec]
        if self._options.storage != "auto":
            raise MemoryBudgetError(f"{error}. {would_fit(others, self._budget)}") from error
        self._trials = others
        log.info("%s; the next storage is tried", error)
        return self._choose(self._budget.bytes + 1)

    def _tried(self) -> list[CodecTrial]:
        if self._trials is None:
            self._trials = try_all(self._road, self._options, look_longer(self._road))
        return self._trials

    def _fill(self, plan: StoragePlan) -> Prepared:
        source, prepare = self._road.source, self._road.prepare
        if plan.codec == _SOURCE:
            assert isinstance(source, FileSource)
            source, prepare = FileBytes(source), Steps(())
        if self._is_lazy(plan):
            return self._fill_lazily(plan, source, prepare)
        options, table, expected = self._options, self._table, self._expected
        ingested = ingest(
            source,
            prepare,
            lambda any_shapes: self._writers(plan, any_shapes),
            workers=machine.usable_cores() if options.num_workers is None else options.num_workers,
            with_targets=table is None,
            on_error=options.on_error,
            progress=options.progress,
            description=plan.reason,
        )
        warn_of_skipped(ingested.skipped, len(source))
        kept = _table_of(ingested, table)
        contents = Contents(ingested.stores, kept, expected.is_tuple, expected.target_is_part)
        return Prepared(storage_plan=plan, contents=contents, table=kept, skipped=ingested.skipped)

    def _is_lazy(self, plan: StoragePlan) -> bool:
        """Whether samples are prepared on their first read: on request, or where what they need is certain."""
        options = self._options
        is_certain = plan.codec is None and self._road.shape is not None and self._table is not None
        is_certain = is_certain and plan.storage != "device"  # all of them are copied there at once
        return options.fill == "lazy" or (options.fill == "auto" and is_certain and options.on_error == "raise")

    def _fill_lazily(self, plan: StoragePlan, source: Source, prepare: Steps) -> Prepared:
        table = _table_beforehand(source, self._expected.looked_at) if self._table is None else self._table
        writers = self._writers(plan, any_shapes=False)
        try:
            dimensions = [sample.array.ndim for sample in self._expected.looked_at[0].parts]
            fill = LazyFill(SampleRoad(source, prepare, tuple(writers)), len(source), dimensions)
            stores = fill.stores()
        except BaseException:
            for writer in writers:
                writer.close()
            raise
        contents = Contents(stores, table, self._expected.is_tuple, self._expected.target_is_part)
        return Prepared(storage_plan=plan, contents=contents, table=table)

    def _writers(self, plan: StoragePlan, any_shapes: bool) -> list[Writer]:
        """Make the writer of each part, for samples of any shapes if they turned out not to have the expected ones."""
        makers = self._raw_writer if plan.codec is None else self._encoding_writer
        writers: list[Writer] = []
        try:
            for part, spec in enumerate(self._expected.specs):
                if any_shapes:
                    spec = replace(spec, shape=None)
                writers.append(makers(plan, part, spec))
        except BaseException:
            for writer in writers:
                writer.close()
            raise
        return writers

    def _raw_writer(self, plan: StoragePlan, part: int, spec: SampleSpec) -> Writer:
        part_bytes = self._expected.part_bytes
        if spec.is_dense:
            return DenseWriter(spec, len(self._road.source))
        return RaggedWriter(spec, **self._room(plan, part_bytes, part))

    def _encoding_writer(self, plan: StoragePlan, part: int, spec: SampleSpec) -> Writer:
        trial = next(trial for trial in self._tried() if trial.codec == plan.codec)
        room = self._room(plan, trial.part_bytes, part)
        if plan.codec == _SOURCE:
            assert self._road.decoder is not None
            return FileWriter(spec, self._road.decoder, is_certain=spec.shape == self._road.shape, **room)
        choices = choices_for(self._options.codec, len(self._expected.specs))
        choice = next(choice for choice in choices if choice.name == plan.codec)
        return EncodedWriter(spec, choice.codecs[part], **room)

    def _room(self, plan: StoragePlan, part_bytes: Sequence[int], part: int) -> dict[str, int]:
        """What is reserved for a part at first, and at most: what the other parts are expected to leave."""
        limit_bytes = max(self._budget.bytes - sum(part_bytes) + part_bytes[part], 1)
        if not self._is_lazy(plan):
            return {"first_bytes": part_bytes[part], "limit_bytes": limit_bytes}
        reserved_bytes = min(int(part_bytes[part] * _LAZY_SLACK) + _LAZY_FLOOR_BYTES, limit_bytes)
        return {"first_bytes": reserved_bytes, "limit_bytes": reserved_bytes}


def warn_of_skipped(skipped: Sequence[SampleError], count: int) -> None:
    """Say how many of the samples were left out, if any."""
    if skipped:
        warn_user(
            f"{len(skipped)} of {count} samples cannot be prepared and were left out; dataset.skipped lists them. "
            f"The first: {skipped[0]}"
        )


def report_storage(road: Road, options: Options) -> StorageReport:
    """Try all codecs on samples of the source, spread over it.

    Raises:
        SampleError: none of the samples looked at can be read.
    """
    expected = look_longer(road)
    trials = try_all(road, replace(options, codec="auto"), expected)
    given = [] if options.codec == "auto" else try_all(road, options, expected)
    names = {trial.codec for trial in trials}
    return StorageReport(
        raw_bytes=expected.need_bytes,
        budget=_budget(options),
        trials=(*trials, *(trial for trial in given if trial.codec not in names)),
        looked_at=len(expected.looked_at),
    )


def _budget(options: Options) -> Budget:
    return budget_bytes(machine.available_bytes(), options.memory_limit, ranks=machine.local_ranks())


def look_longer(road: Road) -> Forecast:
    """Sizes of encoded samples vary more than their shapes do."""
    return forecast(road.source, road.prepare, probes=_TRIAL_SAMPLES)


def try_all(road: Road, options: Options, expected: Forecast) -> list[CodecTrial]:
    """Try the codecs that the user leaves open."""
    trials: list[CodecTrial] = []
    if options.codec in ("auto", _SOURCE):
        trials.append(_try_source(road, expected))
    if options.codec != _SOURCE:
        choices = choices_for(options.codec, len(expected.specs))
        trials += [try_codecs(choice, expected, len(road.source)) for choice in choices]
    return trials


def _try_source(road: Road, expected: Forecast) -> CodecTrial:
    obstacle = None
    if len(expected.specs) > 1:
        obstacle = "samples have several parts"
    elif not isinstance(road.source, FileSource):
        obstacle = "the samples are no files"
    elif road.decoder is None:
        obstacle = "files are opened by your own loader="
    if obstacle is not None:
        return CodecTrial(codec=_SOURCE, obstacle=obstacle)
    assert road.decoder is not None
    assert isinstance(road.source, FileSource)
    return try_source(road.decoder, FileBytes(road.source), expected)


def _table_beforehand(source: Source, looked_at: Sequence[ReadSample]) -> SampleTable:
    """The targets of a dataset that lists them.

    Raises:
        ValueError: it does not, or lists others than its items have, so that only reading the samples would tell.
    """
    targets: Any = getattr(getattr(source, "dataset", None), "targets", None)
    if hasattr(targets, "tolist"):
        targets = targets.tolist()
    if targets is None or len(targets) != len(source):
        raise ValueError(
            "fill='lazy' needs the targets before samples are read, but the dataset has no attribute targets with one "
            "for each of its samples. Use fill='eager'."
        )
    for sample in looked_at:
        if not np.array_equal(targets[sample.position], sample.target):
            raise ValueError(
                f"fill='lazy' takes the dataset's own list of targets, but that has {targets[sample.position]!r} where "
                f"item {sample.position} has {sample.target!r}, perhaps through a target_transform. Use fill='eager'."
            )
    return SampleTable(list(targets))


def _table_of(ingested: Ingested, table: SampleTable | None) -> SampleTable:
    """The table of the samples that were kept."""
    if table is None:
        return SampleTable(ingested.targets or [])
    return table.reduced_to(ingested.kept) if ingested.skipped else table
