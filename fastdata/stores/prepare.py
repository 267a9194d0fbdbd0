"""Prepare samples once: options, a look at a few samples, the choice of a storage, and its filling.

``forecast`` tells from a few what all samples will take, codecs are tried where that matters,
``choose_storage`` of the machine decides, and the next choice is made where samples turn out
larger. Ranks of one machine that make the same dataset share what one of them prepares.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypedDict,
    TypeVar,
    get_args,
)

import numpy as np

from fastdata.errors import MemoryBudgetError, SampleError
from fastdata.machine import limits
from fastdata.machine.budget import (
    Budget,
    CodecTrial,
    StoragePlan,
    StorageReport,
    budget_bytes,
    choose_storage,
    would_fit,
)
from fastdata.machine.ranks import (
    Follower,
    Leader,
    cores_of_job,
    find_run,
    lead_or_follow,
    local_ranks,
    run_to_be,
)
from fastdata.machine.tables import SampleTable
from fastdata.paths import AnyPath
from fastdata.pixels.arrays import Array
from fastdata.pixels.fingerprint import describe
from fastdata.pixels.resize import Bound
from fastdata.pixels.samples import SampleSpec
from fastdata.report import log, warn_user
from fastdata.sources.files import FileSource
from fastdata.sources.identity import describe_dataset, is_listed
from fastdata.sources.items import DatasetSource
from fastdata.sources.storage_options import StorageOptions
from fastdata.stores.frozen import refuse_draws
from fastdata.stores.ingest import WritePath, check_skipped, ingest
from fastdata.stores.kept import KeptSamples, Layout
from fastdata.stores.lazy import LazyStore
from fastdata.stores.read_path import ReadPath, ReadSample, read_samples
from fastdata.stores.source_codec import SourceDecoder
from fastdata.stores.store import SOURCE, Decoder, Store
from fastdata.stores.writer import NO_LIMIT, RAGGED_ALIGN_BYTES, WriterPlan, write_any_shapes

Coders: TypeAlias = "tuple[Decoder | None, ...]"
"""Coders of the parts of samples; None for a raw part."""


Storage = Literal["auto", "device", "shared", "compressed", "disk", "none"]
OnError = Literal["raise", "skip"]
_Dataset = TypeVar("_Dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a dataset: ``DatasetOptions`` with their defaults, and a few internal ones."""

    storage: Storage = "auto"
    codec: Any = "auto"
    resize: Bound | None = None
    cache_dir: AnyPath | None = None
    cache_key: str | None = None
    memory_limit: int | float | str | None = None
    storage_options: Mapping[str, Any] | None = None
    local_cache: AnyPath | None = None
    seed: int | None = None
    on_error: OnError = "raise"
    prepare_workers: int | None = None
    batch_ops: bool = True
    frozen: bool = False
    """Of ``CachedDataset``: keep one draw of each item of a dataset that draws at random."""
    at_once: bool = False
    """True if all samples are prepared now, and none on its first read."""
    cores: Collection[int] = ()
    """Cores of all ranks, if this process prepares for all of them."""
    engine: str | Executor = "local"
    """Writes a cache; see ``build_cache`` of datasets."""
    shard_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                listed = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={value!r} is not one of {listed}")
        if not isinstance(self.batch_ops, bool):
            raise TypeError(f"batch_ops={self.batch_ops!r} is neither True nor False")
        for name in ("prepare_workers", "seed"):
            value = getattr(self, name)
            if not isinstance(value, Integral | None):
                raise TypeError(f"{name}={value!r} is neither an int nor None")
        if self.prepare_workers is not None and self.prepare_workers < 0:
            raise ValueError(
                f"prepare_workers={self.prepare_workers} is less than 0; leave it out to use all "
                "usable cores"
            )
        for codec in self.codecs:
            if codec not in ("auto", SOURCE):
                from fastdata.stores.codecs import find_codec

                find_codec(codec)
        if self.cache_dir is None and self.storage == "disk":
            raise ValueError("storage='disk' keeps samples in a folder; name it with cache_dir=")
        if self.cache_dir is not None and self.storage not in ("auto", "disk"):
            raise ValueError(
                "cache_dir= keeps samples on disk, from where the page cache serves them; "
                f"storage={self.storage!r} does not. Leave one of them out; codec= compresses on "
                "disk as well."
            )
        if self.engine not in ("local", "ray") and not isinstance(self.engine, Executor):
            raise ValueError(
                f"engine={self.engine!r} is not 'local', 'ray', or a concurrent.futures.Executor"
            )
        if self.cache_dir is None and (self.engine != "local" or self.shard_bytes is not None):
            raise ValueError("build_cache() writes a cache; name its folder with cache_dir=")

    @property
    def codecs(self) -> Sequence[Any]:
        """The codecs of the parts, or the one codec of all parts."""
        return self.codec if isinstance(self.codec, (tuple, list)) else (self.codec,)


_CHOICES = {"storage": get_args(Storage), "on_error": get_args(OnError)}


class DatasetOptions(TypedDict, total=False):
    """The keyword arguments that all fastdata datasets share; ``Options`` has their defaults.

    Attributes:
        storage: ``"shared"`` keeps prepared samples in shared memory; ``"compressed"`` keeps them
            encoded there, and decodes on every read; ``"disk"`` keeps them in ``cache_dir``;
            ``"none"`` keeps nothing and prepares on every read; ``"auto"`` (default) is ``"disk"``
            where ``cache_dir`` is given, else takes the first of the others that fits the memory
            budget. ``"device"``: like ``"shared"``, and each ``CudaPrefetcher`` copies all of them
            to its GPU once, to gather batches there; never chosen by ``"auto"``.
        codec: how ``"compressed"`` samples, or those on disk, are encoded. ``"source"``: their own
            files as they are, prepared on every read. ``"lz4"``, ``"zstd"``: lossless. ``"jpeg"``:
            lossy. An object with ``encode(array) -> bytes`` and ``decode(memoryview, out)``. A
            tuple of these, one for each part of a sample. ``"auto"`` (default): the lossless one
            that decodes fastest of those that fit, tried on samples of the data, see
            ``storage_report``; on disk none where samples fit as they are.
        resize: size in pixels that images are resized to before they are stored, as torchvision's
            ``Resize``: an int for the shorter side, or (height, width); or ``"short:320"``,
            ``"long:500"``: at most that, never enlarged. Default: images stay as large as they are.
        memory_limit: the most memory to use: bytes, ``"8GiB"``, or a fraction of what is free.
            Default: what this process may take, less a reserve of 10 %.
        seed: of the random draws of batch ops. ``None`` (default) takes the base seed that torch's
            loaders draw in each epoch, so that ``torch.manual_seed`` and ``generator=`` decide;
            with a number draws depend on it, the epoch and the sample only. The epoch is that of
            fastdata's loader, or of ``set_epoch``; reads without either draw from torch's
            generator.
        batch_ops: run known random transforms on whole batches, with fastdata's own draws; False
            runs them per sample exactly as written. Default: True.
        on_error: ``"raise"`` (default), or ``"skip"`` to leave out samples that cannot be prepared,
            with one warning. More than 1 % of the samples (and more than 10), or 100 in a row, is
            an error all the same.
        prepare_workers: threads that prepare, or forked processes where code of your own reads or
            prepares samples; default: all usable cores. Where no process can be forked (macOS,
            Windows) code of your own runs in this thread alone.
        cache_dir: folder that keeps prepared samples for the next run (default: none does), which
            maps them into memory and prepares only those whose file has changed since. The page
            cache holds one copy for all workers, ranks and runs. It is found by the prepare part,
            the codec and the files (relative path, size, time); any number of datasets may share a
            folder. Not with a ``storage`` in memory. Every sample is held against a checksum when
            it is first read.
        cache_key: stands for what fastdata cannot see: the samples of a dataset that does not list
            its files in ``samples``, and what only C code knows of steps and loaders. Change it
            whenever these change. Default: none.
        storage_options: for URLs, of files and of ``cache_dir``: what their file system in fsspec
            takes, such as credentials. They get into no pickle, cache or message. Default: what
            fsspec is configured for.
        local_cache: folder in which all runs and ranks of a machine keep what they need of caches
            behind URLs; by default ``~/.cache/fastdata/remote``. It takes up to half of what is
            free there; what was needed least lately leaves first.
    """

    storage: Storage
    codec: Any
    resize: Bound | None
    cache_dir: AnyPath | None
    cache_key: str | None
    memory_limit: int | float | str | None
    storage_options: Mapping[str, Any] | None
    local_cache: AnyPath | None
    seed: int | None
    on_error: OnError
    prepare_workers: int | None
    batch_ops: bool


def with_options(dataset: type[_Dataset]) -> type[_Dataset]:
    """Add each option, with default and meaning, to the signature and the docstring of a class."""
    init: Any = dataset.__init__
    shown = inspect.signature(init)
    defaults = inspect.signature(Options).parameters
    *own, _ = shown.parameters.values()  # which is **options
    options = [defaults[name] for name in DatasetOptions.__annotations__]
    init.__signature__ = shown.replace(parameters=[*own, *options])
    meanings = (inspect.getdoc(DatasetOptions) or "").partition("Attributes:\n")[2]
    text = inspect.getdoc(dataset) or ""
    dataset.__doc__ = text.replace("    options: see ``DatasetOptions``.", meanings)
    return dataset


def read_options(dataset: type, given: Mapping[str, Any]) -> Options:
    """Return the options that a constructor was given.

    In addition to ``DatasetOptions`` these may be ``engine`` and ``shard_bytes`` of ``build_cache``.

    Raises:
        TypeError: there is no such option; suggests one with a similar name.
    """
    for name in given.keys() - {*DatasetOptions.__annotations__, "engine", "shard_bytes"}:
        close = get_close_matches(name, inspect.signature(dataset).parameters, n=1)
        advice = f"help({dataset.__name__}) lists those it has."
        if close:
            advice = f"Did you mean {close[0]}=?"
        raise TypeError(f"{dataset.__name__}() has no argument {name}=. {advice}")
    return Options(**given)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The expected stores of a source, from a few samples that are spread over it.

    Attributes:
        path: reads samples.
        count: of all samples.
        probed: the few samples, raw.
        parts: a plan for each part; dense if the samples probed have one shape.
        raw: the size of all samples without a codec: exact if they are dense, else an estimate.
        layout: of the samples.
    """

    path: ReadPath
    count: int
    probed: list[ReadSample]
    parts: list[WriterPlan]
    raw: CodecTrial
    layout: Layout

    def plan_writers(self, trial: CodecTrial, limit_bytes: int = NO_LIMIT) -> list[WriterPlan]:
        """Plan the stores of all samples, encoded as in a trial, or raw."""
        spare_bytes = limit_bytes - trial.need_bytes
        plans = []
        for part, coder, size in zip(self.parts, trial.coders, trial.part_bytes, strict=True):
            codec = None if coder is None else dict(coder.settings())
            limit = max(spare_bytes + size, 1)
            plans.append(replace(part, codec=codec, coder=coder, limit_bytes=limit))
        return plans


def forecast(path: ReadPath, *, probes: int = 8) -> Forecast:
    """Prepare ``probes`` + 1 samples, and tell the size and form of all from them.

    Raises:
        SampleError: none of them can be prepared; this is the error of the first.
    """
    count = len(path.source)
    indices = sorted({round(k * (count - 1) / probes) for k in range(probes + 1)})
    path.source.expect(indices)
    probed: list[ReadSample] = []
    errors = []
    for read in read_samples(path, indices):
        if isinstance(read, SampleError):
            errors.append(read)
        elif not probed or len(read.parts) == len(probed[0].parts):
            probed += read.copies()
    if not probed:
        raise errors[0]
    parts = []
    part_bytes = []
    for number, (first, form) in enumerate(probed[0].parts):
        samples = [read.parts[number][0] for read in probed]
        shape = None
        align_bytes = RAGGED_ALIGN_BYTES
        if len({sample.shape for sample in samples}) == 1:
            shape = first.shape
            align_bytes = 1
        total_bytes = sum(-(-sample.nbytes // align_bytes) * align_bytes for sample in samples)
        part_bytes.append(math.ceil(total_bytes / len(samples) * count))
        spec = SampleSpec(shape=shape, dtype=first.dtype.name, form=form)
        parts.append(WriterPlan(spec=spec, dimensions=first.ndim))
    return Forecast(
        path=path,
        count=count,
        probed=probed,
        parts=parts,
        raw=CodecTrial("raw", tuple(part_bytes), coders=(None,) * len(parts)),
        layout=replace(probed[0].layout, keys=path.source.keys),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Prepared samples of a dataset, and why they are stored where they are.

    Attributes:
        storage_plan: the choice of storage.
        kept: stored samples; None if each read goes to the source.
        skipped: errors of the samples that were left out.
    """

    storage_plan: StoragePlan
    kept: KeptSamples | None = None
    skipped: Sequence[SampleError] = ()


class OldSamples(NamedTuple):
    """Samples that stay in memory until new ones are prepared; ``drop`` frees the memory."""

    size_bytes: int
    drop: Callable[[], None]


def prepare_storage(
    path: ReadPath,
    options: Options,
    table: SampleTable | None,
    old: OldSamples | None = None,
) -> Prepared:
    """Decide where samples are stored; store them there unless the decision is ``"none"``.

    Args:
        path: reads and prepares a sample.
        options: of the dataset.
        table: paths and targets where they are known beforehand; else targets come from the source.
        old: samples that these replace. They are dropped first if both do not fit into memory raw.
    """
    if options.storage == "none" or not len(path.source):
        if options.on_error == "skip":
            warn_user(
                "on_error='skip' leaves out what cannot be prepared; storage='none' finds out only "
                "when it reads"
            )
        reason = "storage='none': samples are prepared on every read"
        return Prepared(storage_plan=StoragePlan(storage="none", reason=reason))
    refuse_draws(path.source, options)
    expected = forecast(path)
    # Every rank has these objects itself: they are not sent, because they may not pickle.
    known = [getattr(path.source, name, None) for name in ("loader", "dataset", "place")]
    known += [path.prepare, *options.codecs]
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
    with ExitStack() as cleanup:
        cleanup.callback(met.close)
        prepared = _store_in_memory(expected, replace(options, cores=cores_of_job()), table, old)
        if prepared.kept is not None:
            met.tell(prepared, known)
            cleanup.pop_all()
            prepared = replace(prepared, kept=replace(prepared.kept, shared_by=met))
    return prepared


def _store_in_memory(
    expected: Forecast,
    options: Options,
    table: SampleTable | None,
    old: OldSamples | None,
) -> Prepared:
    budget = _budget(options, is_shared=bool(options.cores))
    need_bytes = expected.raw.need_bytes
    if old is not None and need_bytes + old.size_bytes > budget.bytes:
        old.drop()
        budget = _budget(options, is_shared=bool(options.cores))
    trials = None
    refused = ""
    while True:
        if trials is None and (options.storage == "compressed" or need_bytes > budget.bytes):
            trials = try_codecs(probe_more(expected.path), options.codec)
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
            return _write(
                expected, options, table, plan, expected.plan_writers(trial, budget.bytes)
            )
        except MemoryBudgetError as error:  # samples are larger than those that were probed
            trials = trials or try_codecs(probe_more(expected.path), options.codec)
            trials = [it for it in trials if it is not trial]
            if options.storage != "auto":
                raise MemoryBudgetError(
                    f"{str(error).rstrip('.')}. {would_fit(trials, budget)}"
                ) from error
            refused = str(error).partition(". ")[0]
            need_bytes = budget.bytes + 1


def _write(
    expected: Forecast,
    options: Options,
    table: SampleTable | None,
    plan: StoragePlan,
    plans: Sequence[WriterPlan],
) -> Prepared:
    path = expected.path
    indices = range(expected.count)
    stores: list[Store]
    skipped = []
    # Samples wait for their first read where their size is certain and none is left out; those of
    # a device are copied there at once.
    is_certain = path.by_core is not None and path.shape is not None and plan.storage == "shared"
    may_wait = is_certain and options.on_error == "raise" and not options.at_once
    if may_wait and table is not None:
        stores = [LazyStore(WritePath.open(path, plans, indices))]
    else:
        stores, written = write_any_shapes(
            lambda plans: ingest(path, plans, indices, options), plans
        )
        skipped = list(written.errors.values())
        warn_of_skipped(skipped, len(indices))
        if table is None:
            table = SampleTable(list(written.targets.values()))
        elif skipped:
            table = table.reduced_to(list(written.targets))
    return Prepared(
        storage_plan=plan,
        kept=KeptSamples(tuple(stores), table, **vars(expected.layout)),
        skipped=skipped,
    )


def share_with_ranks(
    expected: Forecast, options: Options, table: SampleTable | None, known: Sequence[Any]
) -> Leader | Follower | None:
    """Return the leader of the ranks, or what it prepared; None if each rank is on its own."""
    run = find_run()
    to_be = run or run_to_be()
    if to_be is None:
        return None
    try:
        return lead_or_follow(to_be, _key(expected, options, table), known)
    except ValueError as refused:
        if run is not None:
            warn_user(f"each rank prepares and holds samples of its own: {refused}")
        return None


def _key(expected: Forecast, options: Options, table: SampleTable | None) -> str:
    """Return a key that ranks with the same samples share, for their n-th dataset of these.

    Raises:
        ValueError: something cannot be described, and no ``cache_key`` stands for it.
    """
    path = expected.path
    source = path.source
    name = options.cache_key
    chosen = [options.storage, options.codec, options.at_once, options.on_error]
    seen: list[Any] = [*chosen, options.memory_limit, name, expected.count, repr(expected.parts)]
    seen += [path.prepare.steps, getattr(source, "loader", None)]
    if isinstance(source, DatasetSource):
        seen += [_describe(source.dataset, name), repr(source.columns)]
    if table is not None:
        seen += table.columns.values()
    for read in expected.probed:
        seen += [read.number, read.target, *(array for array, _ in read.parts)]
    key = describe(seen, name)
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


def _budget(options: Options, *, is_shared: bool) -> Budget:
    return budget_bytes(
        limits.available_bytes(), options.memory_limit, ranks=1 if is_shared else local_ranks()
    )


def warn_of_skipped(skipped: Sequence[SampleError], count: int) -> None:
    if skipped:
        check_skipped({error.index: error for error in skipped}, count)
        warn_user(
            f"{len(skipped)} of {count} samples cannot be prepared and were left out; "
            f"dataset.skipped lists them. The first: {skipped[0]}"
        )


_TRIAL_SAMPLES = 24


def probe_more(path: ReadPath) -> Forecast:
    """Forecast from more samples, because their encoded sizes vary more than their shapes."""
    return forecast(path, probes=_TRIAL_SAMPLES)


def report_storage(path: ReadPath, options: Options) -> StorageReport:
    expected = probe_more(path)
    return StorageReport(
        raw_bytes=expected.raw.need_bytes,
        budget=_budget(options, is_shared=find_run() is not None),
        trials=tuple(try_codecs(expected, "auto", options.codec)),
        looked_at=len(expected.probed),
    )


def try_codecs(expected: Forecast, *codecs: Any) -> list[CodecTrial]:
    """Encode and decode the probed samples, on one core, with each codec that ``codec=`` allows."""
    choices: dict[str, Coders] = {}
    for codec in codecs:
        choices = _coders_by_name(codec, expected) | choices
    return [_try(name, coders, expected) for name, coders in choices.items()]


def _coders_by_name(codec: Any, expected: Forecast) -> dict[str, Coders]:
    """Return the choices that ``codec=`` allows, each with a coder for every part."""
    from fastdata.stores.codecs import KNOWN_CODECS, find_codec

    parts = len(expected.parts)
    if codec == SOURCE:
        return {SOURCE: (expected.path.decoder,)}
    if codec == "auto":
        choices = _coders_by_name(SOURCE, expected)
        for name in KNOWN_CODECS:
            choices |= _coders_by_name((name, *["zstd"] * (parts - 1)), expected)
        return choices
    each = codec if isinstance(codec, (tuple, list)) else [codec] * parts
    if len(each) != parts:
        raise ValueError(
            f"codec= has {len(each)} codecs, but samples have {parts} parts; give one for each"
        )
    coders = tuple(map(find_codec, each))
    return {"+".join(dict.fromkeys(coder.name for coder in coders)): coders}


def _try(name: str, coders: Coders, expected: Forecast) -> CodecTrial:
    lossless = all(coder is None or coder.lossless for coder in coders)
    trial = CodecTrial(name, coders=coders, lossless=lossless)
    count = len(expected.probed)
    part_bytes = []
    seconds = 0.0
    for number, coder in enumerate(coders):
        samples = [read.parts[number][0] for read in expected.probed]
        try:
            encoded = _encode(coder, samples, expected)
        except (ImportError, ValueError) as obstacle:
            return trial._replace(obstacle=str(obstacle))
        part_bytes.append(math.ceil(sum(map(len, encoded)) / count * expected.count))
        assert coder is not None
        out = np.empty_like(samples[0])
        coder.decode(memoryview(encoded[0]), out)  # warms up
        begun = time.perf_counter()
        for data, sample in zip(encoded, samples, strict=True):
            coder.decode(memoryview(data), np.empty_like(sample))
        seconds += time.perf_counter() - begun
    return trial._replace(
        part_bytes=tuple(part_bytes),
        ratio=expected.raw.need_bytes / max(sum(part_bytes), 1),
        decode_per_s=count / max(seconds, 1e-9),
    )


def _encode(coder: Decoder | None, samples: Sequence[Array], expected: Forecast) -> list[bytes]:
    """Encode one part of the probed samples; a ValueError says why that is not possible."""
    if coder is None:
        raise ValueError("samples are not files, or your own loader= opens them")
    if not isinstance(coder, SourceDecoder):
        return [coder.encode(sample) for sample in samples]
    if len(expected.parts) > 1:
        raise ValueError("samples have several parts")
    source = expected.path.source
    assert isinstance(source, FileSource)
    return source.read_files([read.number for read in expected.probed])
