"""Prepare: look at a few samples of a source, choose where they are kept, and fill that.

``forecast`` tells from a few what all samples will take, codecs are tried where that matters,
``choose_storage`` of memory.py decides, and the next choice is made where samples turn out larger.
Ranks of one machine that make the same dataset share what one of them prepares.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fastdata.errors import MemoryBudgetError, SampleError
from fastdata.machine import memory
from fastdata.machine.memory import (
    Budget,
    CodecTrial,
    StoragePlan,
    StorageReport,
    budget_bytes,
    choose_storage,
    would_fit,
)
from fastdata.machine.processes import (
    Follower,
    cores_of_job,
    find_run,
    lead_or_follow,
    local_ranks,
    run_to_be,
)
from fastdata.machine.shared import SampleTable
from fastdata.pixels.describe import describe, describe_dataset, is_listed
from fastdata.pixels.images import SampleSpec, SourceDecoder
from fastdata.report import log, warn_user
from fastdata.sources import DatasetSource, FileSource
from fastdata.stores.options import Options
from fastdata.stores.readers import Decoder, Store
from fastdata.stores.samples import (
    SOURCE,
    KeptSamples,
    Layout,
    ReadPath,
    ReadSamples,
    read_samples,
)
from fastdata.stores.writers import (
    ALIGN_BYTES,
    NO_LIMIT,
    LazyStore,
    StoredPart,
    WriterPlan,
    check_skipped,
    ingest,
    write_any_shapes,
)

Coders: TypeAlias = "tuple[Decoder | None, ...]"
"""What encodes each part of samples."""


# A few samples


class Forecast(NamedTuple):
    """What the stores of a source will look like, told from a few samples spread over it.

    ``specs`` are dense if all samples that were probed have one shape; ``part_bytes``, of each part
    of all samples as they are, is exact then, else the mean of those probed times N.
    """

    path: ReadPath
    probed: tuple[ReadSamples, ...]
    specs: tuple[SampleSpec, ...] = ()
    part_bytes: tuple[int, ...] = ()

    @property
    def first(self) -> ReadSamples:
        return self.probed[0]

    @property
    def layout(self) -> Layout:
        first = self.first
        return Layout(
            is_tuple=first.is_tuple,
            target_is_part=first.target_is_part,
            keys=self.path.source.keys,
            mask_places=first.mask_places,
        )

    @property
    def need_bytes(self) -> int:
        return sum(self.part_bytes)

    @property
    def targets(self) -> list[Any]:
        return [target for read in self.probed for target in read.targets]

    def samples(self, part: int) -> list[np.ndarray]:
        return [sample for read in self.probed for sample in read.parts[part].array]

    def plan_writers(
        self,
        coders: Coders | None = None,
        part_bytes: Sequence[int] = (),
        limit_bytes: int = NO_LIMIT,
    ) -> list[WriterPlan]:
        """Of stores for all samples, which take about so many bytes; without coders raw ones."""
        if coders is None:
            coders = (None,) * len(self.specs)
            part_bytes = self.part_bytes
        spare_bytes = limit_bytes - sum(part_bytes)
        each = zip(self.specs, self.first.parts, coders, part_bytes, strict=True)
        return [
            WriterPlan(
                part=StoredPart(
                    spec=spec,
                    dimensions=part.array.ndim - 1,
                    codec=None if coder is None else dict(coder.settings()),
                ),
                coder=coder,
                first_bytes=first_bytes,
                limit_bytes=max(spare_bytes + first_bytes, 1),
            )
            for spec, part, coder, first_bytes in each
        ]


def forecast(path: ReadPath, *, probes: int = 8) -> Forecast:
    """Prepare ``probes`` + 1 samples; the first one's error is raised if none of them can be."""
    count = len(path.source)
    indices = _spread(count, probes)
    path.source.expect(indices)
    probed: list[ReadSamples] = []
    errors: list[SampleError] = []
    for read in read_samples(path, indices):
        if isinstance(read, SampleError):
            errors.append(read)
        elif not probed or len(read.parts) == len(probed[0].parts):
            probed.append(read.copied())
    if not probed:
        raise errors[0]
    expected = Forecast(path, tuple(probed))
    specs: list[SampleSpec] = []
    part_bytes: list[int] = []
    for number, (array, form) in enumerate(expected.first.parts):
        samples = expected.samples(number)
        is_dense = len({sample.shape for sample in samples}) == 1
        step_bytes = 1 if is_dense else ALIGN_BYTES
        sizes = [-(-sample.nbytes // step_bytes) * step_bytes for sample in samples]
        shape = samples[0].shape if is_dense else None
        specs.append(SampleSpec(shape=shape, dtype=array.dtype.name, form=form))
        part_bytes.append(math.ceil(sum(sizes) / len(sizes) * count))
    return expected._replace(specs=tuple(specs), part_bytes=tuple(part_bytes))


def _spread(count: int, probes: int) -> list[int]:
    return sorted({round(k * (count - 1) / probes) for k in range(probes + 1)})


# The choice of storage, acted out


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a dataset serves from; nothing kept where the source is to be asked."""

    storage_plan: StoragePlan
    kept: KeptSamples | None = None
    skipped: list[SampleError] = field(default_factory=list)


def prepare_storage(
    path: ReadPath, options: Options, table: SampleTable | None, by: Sequence[Any] = ()
) -> Prepared:
    """Decide where samples are kept; keep them there unless the decision is ``"none"``.

    ``table`` has paths and targets where they are known beforehand; else targets come from the
    source. ``by`` are the steps and the loader that samples are read and prepared by.
    """
    if options.storage != "none" and len(path.source) > 0:
        preparation = _Preparation(path, options, table)
        return preparation.run() if options.alone else preparation.run_with_others(by)
    if options.on_error == "skip":
        warn_user(
            "on_error='skip' leaves out what cannot be prepared; storage='none' finds out only "
            "when it reads"
        )
    reason = "storage='none': samples are prepared on every read"
    return Prepared(storage_plan=StoragePlan(storage="none", reason=reason))


class _Preparation:
    """One run of ``prepare_storage``; codecs are tried when it is first needed."""

    def __init__(self, path: ReadPath, options: Options, table: SampleTable | None) -> None:
        self._path = path
        self._options = options
        self._table = table
        self._expected = forecast(path)
        self._run = None if options.alone else find_run()
        self._budget = _budget(options, self._run)
        self._trials: list[CodecTrial] | None = None
        self._cores: Collection[int] = ()

    def run(self) -> Prepared:
        plan = self._choose(self._expected.need_bytes)
        while plan.storage != "none":
            log.info("%s", plan.reason)
            try:
                return self._fill(plan)
            except MemoryBudgetError as error:  # samples turned out larger than those looked at
                others = [trial for trial in self._tried() if trial.codec != plan.codec]
                if self._options.storage != "auto":
                    cures = would_fit(others, self._budget)
                    said = str(error).rstrip(".")
                    raise MemoryBudgetError(f"{said}. {cures}") from error
                self._trials = others
                log.info("%s; the next storage is tried", error)
            plan = self._choose(self._budget.bytes + 1)
        cure = "Every epoch decodes again; cache_dir= or a smaller resize= may help."
        warn_user(f"{plan.reason}. {cure}")
        return Prepared(storage_plan=plan)

    def _choose(self, raw_bytes: int) -> StoragePlan:
        storage = self._options.storage
        is_tried = storage == "compressed" or raw_bytes > self._budget.bytes
        trials = self._tried() if is_tried else []
        only_lossless = self._options.codec == "auto"
        return choose_storage(storage, raw_bytes, self._budget, trials, only_lossless=only_lossless)

    def _tried(self) -> list[CodecTrial]:
        if self._trials is None:
            self._trials = try_all(look_longer(self._path), self._options.codec)
        return self._trials

    def _fill(self, plan: StoragePlan) -> Prepared:
        path = self._path
        table = self._table
        expected = self._expected
        plans = expected.plan_writers(limit_bytes=self._budget.bytes)
        if plan.codec is not None:
            part_bytes = {it.codec: it.part_bytes for it in self._tried()}[plan.codec]
            choices = coders_by_name(self._options.codec, expected)
            plans = expected.plan_writers(choices[plan.codec], part_bytes, self._budget.bytes)
        stores: tuple[Store, ...]
        skipped: list[SampleError] = []
        if table is not None and self._is_lazy(plan):
            stores = (LazyStore.open(path, plans[0]),)
        else:
            indices = range(len(path.source))
            ingested = write_any_shapes(
                lambda plans: ingest(path, plans, indices, self._options, self._cores), plans
            )
            stores = ingested.stores
            skipped = ingested.skipped
            warn_of_skipped(skipped, len(indices))
            if table is None:
                table = SampleTable(ingested.targets)
            elif skipped:
                table = table.reduced_to(ingested.kept.tolist())
        kept = KeptSamples(tuple(stores), table, **vars(expected.layout))
        return Prepared(storage_plan=plan, kept=kept, skipped=skipped)

    def _is_lazy(self, plan: StoragePlan) -> bool:
        """Whether samples wait for their first read: where what they take is certain."""
        options, path = self._options, self._path
        is_asked_for = options.on_error == "raise" and not options.at_once
        # All of them are copied to a device at once.
        is_raw = plan.codec is None and plan.storage != "device"
        return is_asked_for and is_raw and path.by_core is not None and path.shape is not None

    # With the other ranks of this machine that make the same dataset

    def run_with_others(self, by: Sequence[Any]) -> Prepared:
        """Prepare for them, or have it from the one that does."""
        run = self._run or run_to_be()
        if run is None:
            return self.run()
        known = self._known()
        place = None
        try:
            place = lead_or_follow(run, self._key(by), known)
        except ValueError as refused:
            if self._run is not None:
                warn_user(f"each rank prepares and holds samples of its own: {refused}")
        if isinstance(place, Follower):
            return self._attached(place.value, place.leader)
        if place is None:
            self._budget = _budget(self._options, None)
            return self.run()
        self._cores = cores_of_job()
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(place.close)
            prepared = self.run()
            if prepared.kept is None:
                return prepared
            place.tell(prepared, known)
            cleanup.pop_all()
        return replace(prepared, kept=replace(prepared.kept, shared_by=place))

    def _attached(self, prepared: Prepared, leader: str) -> Prepared:
        if self._table is not None and prepared.kept is not None:
            self._table.close()  # there is the leader's
        warn_of_skipped(prepared.skipped, len(self._path.source))
        plan = prepared.storage_plan
        sharing = f"one copy for the ranks of this machine, prepared with {leader}"
        plan = plan._replace(reason=f"{plan.reason}; {sharing}")
        log.info("%s", plan.reason)
        return replace(prepared, storage_plan=plan)

    def _key(self, by: Sequence[Any]) -> str:
        """What all have in common who have the same samples, and made as many such datasets before.

        Raises:
            ValueError: that cannot be told of something, and no ``cache_key`` stands for it.
        """
        from fastdata.stores.codecs import describe_codec

        options = self._options
        source = self._path.source
        name = options.cache_key
        words: list[Any] = [
            options.storage,
            options.at_once,
            options.on_error,
            options.memory_limit,
            name,
        ]
        words += [describe_codec(options.codec, name), describe(list(by), name)]
        words += [len(source), self._expected.specs]
        if isinstance(source, DatasetSource):
            words += [_describe(source.dataset, name), source.columns]
        digest = hashlib.blake2b(repr(words).encode(), digest_size=16)
        for column in self._table.columns() if self._table is not None else ():
            digest.update(np.ascontiguousarray(column).data)
        for read in self._expected.probed:
            digest.update(repr((list(read.indices), list(read.targets))).encode())
            for part in read.parts:
                digest.update(part.array.tobytes())
        key = digest.hexdigest()
        _MADE[key] += 1
        return f"{key} {_MADE[key]}"

    def _known(self) -> list[Any]:
        """The user's own objects, of which every rank has its own."""
        path = self._path
        codec = self._options.codec
        codecs = codec if isinstance(codec, (tuple, list)) else [codec]
        own = [getattr(path.source, name, None) for name in ("loader", "dataset")]
        return [*own, path.prepare, *codecs]


_MADE: Counter[str] = Counter()
"""Datasets that this process has made, by key: it must not share with itself, to whom it would
answer."""


def _describe(dataset: Any, cache_key: str | None) -> str:
    try:
        return describe_dataset(dataset, cache_key)
    except ValueError:
        if not is_listed(dataset):
            raise
        return describe_dataset(dataset, cache_key="")  # by what it lists


def _budget(options: Options, run: str | None) -> Budget:
    ranks = local_ranks() if run is None else 1
    return budget_bytes(memory.available_bytes(), options.memory_limit, ranks=ranks)


def warn_of_skipped(skipped: Sequence[SampleError], count: int) -> None:
    if skipped:
        check_skipped({error.index: error for error in skipped}, count)
        left_out = f"{len(skipped)} of {count} samples cannot be prepared and were left out"
        warn_user(f"{left_out}; dataset.skipped lists them. The first: {skipped[0]}")


# Codecs, tried on a few samples: how small they make them, and how fast they give them back

_TRIAL_SAMPLES = 24
_ROUNDS = 3
_FILE_SIZES = 256


def look_longer(path: ReadPath) -> Forecast:
    """Sizes of encoded samples vary more than their shapes do."""
    return forecast(path, probes=_TRIAL_SAMPLES)


def report_storage(path: ReadPath, options: Options) -> StorageReport:
    expected = look_longer(path)
    return StorageReport(
        raw_bytes=expected.need_bytes,
        budget=_budget(options, None if options.alone else find_run()),
        trials=tuple(try_all(expected, "auto", options.codec)),
        looked_at=len(expected.targets),
    )


def coders_by_name(codec: Any, expected: Forecast) -> dict[str, Coders]:
    """What ``codec=`` leaves open: what encodes each part; None where files cannot be kept."""
    from fastdata.stores.codecs import find_codec

    parts = len(expected.specs)
    choices: dict[str, Coders] = {}
    if codec in ("auto", SOURCE):
        choices[SOURCE] = (expected.path.decoder,)
    if isinstance(codec, (tuple, list)):
        if len(codec) != parts:
            what = f"codec= has {len(codec)} codecs, but samples have {parts} parts"
            raise ValueError(f"{what}; give one for each")
        found = [list(map(find_codec, codec))]
    elif codec == "auto":
        others = [find_codec("zstd")] * (parts - 1)
        found = [[find_codec(name), *others] for name in ("lz4", "zstd", "jpeg")]
    else:
        found = [] if codec == SOURCE else [[find_codec(codec)] * parts]
    for coders in found:
        choices["+".join(dict.fromkeys(coder.name for coder in coders))] = tuple(coders)
    return choices


def try_all(expected: Forecast, *codecs: Any) -> list[CodecTrial]:
    """Encode and decode the samples probed, on one core, by all that ``codec=`` leaves open."""
    choices: dict[str, Coders] = {}
    for codec in codecs:
        choices = coders_by_name(codec, expected) | choices
    return [_try(name, coders, expected) for name, coders in choices.items()]


def _try(name: str, coders: Coders, expected: Forecast) -> CodecTrial:
    obstacle = _obstacle(coders, expected)
    lossless = all(coder is None or coder.lossless for coder in coders)
    if obstacle is not None:
        return CodecTrial(codec=name, obstacle=obstacle, lossless=lossless)
    part_bytes = []
    raw_bytes = 0
    encoded_bytes = 0
    seconds = 0.0
    for part, coder in enumerate(coders):
        samples = [np.ascontiguousarray(array) for array in expected.samples(part)]
        if isinstance(coder, SourceDecoder):
            encodings, mean_bytes = _files(expected)
        else:
            assert coder is not None
            encodings = [memoryview(coder.encode(sample)) for sample in samples]
            mean_bytes = sum(map(len, encodings)) / len(encodings)
        part_bytes.append(math.ceil(mean_bytes * len(expected.path.source)))
        raw_bytes += sum(sample.nbytes for sample in samples)
        encoded_bytes += sum(map(len, encodings))
        seconds += _decode_s(coder, encodings, samples)
    return CodecTrial(
        codec=name,
        part_bytes=tuple(part_bytes),
        ratio=raw_bytes / max(encoded_bytes, 1),
        decode_per_s=len(expected.targets) / seconds,
        lossless=lossless,
    )


def _obstacle(coders: Coders, expected: Forecast) -> str | None:
    for part, coder in enumerate(coders):
        if coder is None or isinstance(coder, SourceDecoder):
            if len(expected.specs) > 1:
                return "samples have several parts"
            if not isinstance(expected.path.source, FileSource):
                return "the samples are no files"
            return "files are opened by your own loader=" if coder is None else None
        for shape in dict.fromkeys(array.shape for array in expected.samples(part)):
            obstacle = coder.obstacle(replace(expected.specs[part], shape=shape))
            if obstacle is not None and part:
                names = (getattr(coders[0], "name", ""), *["zstd"] * (len(coders) - 1))
                each = f"one codec for each part: codec={names}"
                obstacle += f" (part {part + 1} of each sample; {each})"
            if obstacle is not None:
                return obstacle
    return None


def _files(expected: Forecast) -> tuple[list[memoryview], float]:
    """The files of the samples probed, and the mean size of more of them."""
    source = expected.path.source
    assert isinstance(source, FileSource)
    files = source.as_bytes()
    sizes = [files.size_bytes(index) for index in _spread(len(files), _FILE_SIZES)]
    indices = [index for read in expected.probed for index in read.indices]
    encodings = [files.read(index)[0].data for index in indices]
    return encodings, sum(sizes) / len(sizes)


def _decode_s(
    decoder: Decoder, encodings: Sequence[memoryview], samples: Sequence[np.ndarray]
) -> float:
    outs = list(map(np.zeros_like, samples))
    times = []
    for _ in range(1 if isinstance(decoder, SourceDecoder) else _ROUNDS):
        begun = time.perf_counter()
        for encoding, out in zip(encodings, outs, strict=True):
            decoder.decode(encoding, out)
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)
