"""Prepare: Source -> decode, resize -> Store, once per dataset, on all usable cores. The only writer of stores.

``prepare_storage`` forecasts what samples will take, tries codecs where that matters, acts out the
choice of memory.py and goes on to the next one where samples turn out larger. ``ingest`` fills the
stores: this process hands runs of sample numbers to workers.py and shows progress; workers read,
    prepare and write straight into the stores' memory.
Whatever happens, a killed worker or Ctrl-C included, no worker outlives it and unfinished memory is
freed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fastdata.errors import (
    CacheError,
    ChannelsError,
    IngestError,
    MemoryBudgetError,
    RemoteError,
    SampleError,
    sample_error,
)
from fastdata.machine import memory
from fastdata.machine.memory import (
    STORAGES,
    Budget,
    CodecTrial,
    StoragePlan,
    StorageReport,
    budget_bytes,
    choose_storage,
    parse_bytes,
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
from fastdata.machine.shared import SampleTable, collate_targets
from fastdata.machine.workers import run_tasks
from fastdata.pixels import core, plan_transform, shape_after, split_upright
from fastdata.pixels.describe import describe, describe_dataset, is_listed
from fastdata.pixels.images import (
    Bound,
    Form,
    OpenedImages,
    Planes,
    PlanesLoader,
    SampleSpec,
    SourceDecoder,
    decode_by_pillow,
    decoder_of,
    is_image,
    is_pil,
    jpeg_obstacle,
    mode_of,
    present,
    to_stored,
)
from fastdata.pixels.program import Program
from fastdata.report import log, progress_bar, warn_user
from fastdata.sources import DatasetSource, FileSource, ItemKeys, RemoteFiles, Source
from fastdata.sources.remote import StorageOptions
from fastdata.stores.readers import Decoder, FileStore, Store, UndecodableError
from fastdata.stores.writers import (
    ALIGN_BYTES,
    Extent,
    LazyFill,
    ShapesDifferError,
    Writer,
    WriterPlan,
    open_writers,
)

OnError = Literal["raise", "skip"]
_SOURCE = "source"
_CHOICES = {
    "storage": STORAGES,
    "fill": ("auto", "eager", "lazy"),
    "batch_ops": ("auto", "off"),
    "on_error": ("raise", "skip"),
    "share": ("auto", "off"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the user chooses of any dataset; ``fastdata.datasets.dataset.DatasetOptions`` documents it."""

    storage: Literal["auto", "device", "shared", "compressed", "disk", "none"] = "auto"
    codec: Any = "auto"
    resize: Bound | None = None
    fill: Literal["auto", "eager", "lazy"] = "auto"
    memory_limit: int | float | str | None = None
    progress: bool = True
    seed: int | None = None
    batch_ops: Literal["auto", "off"] = "auto"
    on_error: OnError = "raise"
    num_workers: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_key: str | None = None
    storage_options: Mapping[str, Any] | None = None
    local_cache: str | os.PathLike[str] | None = None
    local_limit: int | float | str | None = None
    share: Literal["auto", "off"] = "auto"
    return_index: bool = False
    engine: Literal["local", "ray"] | Executor = "local"
    shard_bytes: int | str | None = None

    def __post_init__(self) -> None:
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, choices))}"
                )
        for name in ("num_workers", "seed"):
            number = getattr(self, name)
            if number is not None and not isinstance(number, Integral):
                raise TypeError(f"{name}={number!r} is no whole number")
        if self.num_workers is not None and self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers} is below 0")
        if isinstance(self.codec, str) and self.codec not in ("auto", _SOURCE):
            from fastdata.stores.codecs import KNOWN_CODECS

            if self.codec not in KNOWN_CODECS:
                known = ", ".join(map(repr, ("auto", _SOURCE, *KNOWN_CODECS)))
                raise ValueError(
                    f"codec={self.codec!r} is not one of {known}, nor an object with encode and decode"
                )
        if self.fill == "lazy" and self.on_error == "skip":
            raise ValueError(
                "fill='lazy' finds a damaged sample only when it is read, too late for on_error='skip'; "
                "use fill='eager', or on_error='raise'"
            )
        if self.fill == "lazy" and self.storage == "device":
            raise ValueError(
                "storage='device' copies all samples to the GPU at once, and fill='lazy' does not have them yet; use "
                "fill='eager', or storage='shared'"
            )
        if self.cache_dir is None and self.storage == "disk":
            raise ValueError("storage='disk' keeps samples in a folder; name it with cache_dir=")
        if self.cache_dir is not None and self.storage not in ("auto", "disk"):
            raise ValueError(
                f"cache_dir= keeps samples on disk, from where the page cache serves them; storage={self.storage!r} "
                "does not. Leave one of them out; codec= compresses on disk as well."
            )
        if self.cache_dir is not None and self.fill == "lazy":
            raise ValueError(
                "fill='lazy' prepares samples in memory; a cache is written whole. Leave out fill=."
            )
        if self.engine not in ("local", "ray") and not isinstance(self.engine, Executor):
            raise ValueError(
                f"engine={self.engine!r} is not 'local', 'ray', or a concurrent.futures.Executor"
            )
        if self.cache_dir is None and (self.engine != "local" or self.shard_bytes is not None):
            raise ValueError(
                "engine= and shard_bytes= say how a cache is written; they need cache_dir="
            )
        if (
            self.shard_bytes is not None and parse_bytes(self.shard_bytes, of=0) < 1
        ):  # a share of nothing
            raise ValueError(
                f"shard_bytes={self.shard_bytes!r} is no size: give bytes as an int, or text as '256MiB'"
            )


# One sample


class Part(NamedTuple):
    array: np.ndarray
    form: Form  # what the values were


class ReadSample(NamedTuple):
    """One prepared sample, taken apart.

    Most samples have one part. A tuple such as (image, mask) has one for each; a target that is an
    image or an array of two or more dimensions is the last part, and ``target`` None.
    """

    position: int
    parts: tuple[Part, ...]
    target: Any
    is_tuple: bool
    target_is_part: bool
    mask_places: tuple[int, ...] = ()

    def copied(self) -> ReadSample:
        """In memory of its own."""
        return self._replace(parts=tuple(Part(array.copy(), form) for array, form in self.parts))


@dataclass(frozen=True, slots=True)
class Steps:
    steps: tuple[Callable[[Any], Any], ...]

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample


class ReadPath(NamedTuple):
    """Where samples come from, and what is done to each before it is stored.

    ``open_bytes`` makes of a file's bytes what the source makes of the file; None where the samples
    are no files, or are opened by the user's own loader. ``shape`` is that of every prepared
    sample, where it follows from the steps.
    """

    source: Source
    prepare: Steps
    open_bytes: Callable[[memoryview], Any] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def decoder(self) -> SourceDecoder | None:
        return None if self.open_bytes is None else SourceDecoder(self.open_bytes, self.prepare)


def read_path(
    source: Source, steps: tuple[Callable[[Any], Any], ...], *, pixels_only: bool = True
) -> ReadPath:
    """How samples are read and prepared: image files by the compiled core, where it knows all steps.

    ``pixels_only``: nothing else is wanted of images, because they are to be stored.
    """
    if not isinstance(source, FileSource):
        return ReadPath(source=source, prepare=Steps(steps))
    loader = source.loader
    open_bytes = decoder_of(loader)
    shape = None if open_bytes is None else shape_after(steps)
    if pixels_only and open_bytes is not None:
        upright, served = split_upright(steps)
        plan = plan_transform(served, channels=3, prepared=0)
        is_known, obstacle = plan.kind == "pil" and not plan.per_sample, core.obstacle()
        if is_known and obstacle is not None:
            log.info("Pillow prepares the images, which takes longer: %s", obstacle)
        elif is_known:
            if jpeg_obstacle():
                log.info(
                    "Pillow decodes the images, whole, which takes longer: %s", jpeg_obstacle()
                )
            spec = SampleSpec(shape=None, dtype="uint8", form="pil")
            loader, steps = PlanesLoader(Program(plan.batch_ops, spec).prepare, upright), ()
            open_bytes = loader.decode
    return ReadPath(
        source=source.opened_by(loader), prepare=Steps(steps), open_bytes=open_bytes, shape=shape
    )


def open_files(source: FileSource, indices: Sequence[int], *, upright: bool) -> OpenedImages:
    """The files of samples, for the core; what is wrong with one is a SampleError that names path and index."""

    def named(index: int, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return read(*arguments, **options)
        except (MemoryError, RemoteError):  # a network that is down is no sample's fault
            raise
        except Exception as cause:  # damaged files make decoders raise anything
            raise sample_error(source.path(index), index, cause) from cause

    def by_pillow(b: int) -> np.ndarray:
        pixels: np.ndarray = named(
            indices[b], decode_by_pillow, io.BytesIO(files[b]), upright=upright
        )
        return pixels

    files = [named(index, source.read_bytes, index) for index in indices]
    return OpenedImages(files, by_pillow, upright=upright)


def read_sample(source: Source, prepare: Callable[[Any], Any], index: int) -> ReadSample:
    """Read and prepare one sample; whatever goes wrong is a SampleError that names path and index."""
    is_read = False
    try:
        sample, target = source.read(index)
        is_read = True
        return take_apart(index, prepare(sample), target)
    except (MemoryError, SampleError, RemoteError):
        raise
    except Exception as cause:  # user code and decoders raise anything; all of it is named and kept
        raise sample_error(source.path(index), index, cause, is_read=is_read) from cause


def take_apart(index: int, prepared: Any, target: Any) -> ReadSample:
    is_tuple = isinstance(prepared, (tuple, list))
    parts = [Part(*to_stored(part)) for part in (prepared if is_tuple else [prepared])]
    target_is_part = is_image(target)
    places = (
        tuple(k for k, value in enumerate(target) if is_pil(value)) if type(target) is tuple else ()
    )
    masks = [target] if target_is_part else [target[place] for place in places]
    parts += [Part(*to_stored(mask, is_mask=True)) for mask in masks]
    if places:
        target = tuple(None if k in places else value for k, value in enumerate(target))
    return ReadSample(
        index, tuple(parts), None if target_is_part else target, is_tuple, target_is_part, places
    )


class WritePath(NamedTuple):
    """The way of one sample from its source through ``prepare`` to the writers of its parts."""

    source: Source
    prepare: Callable[[Any], Any]
    writers: tuple[Writer, ...]
    forks: bool = True
    """Whether samples are written by processes: not where all is done without the GIL."""

    @classmethod
    def open(cls, path: ReadPath, plans: Sequence[WriterPlan], length: int) -> WritePath:
        """With a new writer for each part; the files themselves are read where they are to be kept as they are."""
        return cls.over(path, open_writers(plans, length))

    @classmethod
    def over(cls, path: ReadPath, writers: tuple[Writer, ...]) -> WritePath:
        source, prepare = path.source, path.prepare
        forks = needs_processes(path, [writer.plan for writer in writers])
        if any(isinstance(writer.plan.codec, SourceDecoder) for writer in writers):
            assert isinstance(source, FileSource)
            source, prepare = source.as_bytes(), Steps(())
        return cls(source, prepare, writers, forks)

    def read_all(self, indices: Sequence[int]) -> Iterator[ReadSample | SampleError]:
        """Read and prepare samples, or say what is wrong with them; each may lie over the one before."""
        for first in range(0, len(indices), _AT_ONCE):
            group, count = indices[first : first + _AT_ONCE], 0
            with contextlib.suppress(
                SampleError, ValueError
            ):  # one after the other tells whose that is
                for sample in self._read_together(group):
                    count += 1
                    yield sample
            for index in group[count:]:
                try:
                    yield self.read(index)
                except SampleError as error:
                    yield error

    def _read_together(self, indices: Sequence[int]) -> Iterator[ReadSample]:
        """Image files that the core prepares; none of others."""
        source = self.source
        if isinstance(source, FileSource) and isinstance(source.loader, PlanesLoader):
            images = open_files(source, indices, upright=source.loader.upright)
            for index, pixels in zip(indices, source.loader.prepare(images), strict=True):
                yield take_apart(index, Planes(pixels), source.targets[index])

    def read(self, index: int) -> ReadSample:
        """Read and prepare one sample; a SampleError, too, if it is not of the type that the stores keep."""
        sample, problem = read_sample(self.source, self.prepare, index), None
        if len(sample.parts) != len(self.writers):
            problem = f"it has {len(sample.parts)} parts among samples of {len(self.writers)}"
        for (array, form), writer in zip(sample.parts, self.writers, strict=False):
            if (array.dtype.name, form) != (writer.spec.dtype, writer.spec.form):
                problem = f"it is of {array.dtype} {form}, the others are of {writer.spec.dtype} {writer.spec.form}"
        if problem is not None:
            cause = TypeError(f"{problem}; give all samples one type in prepare=")
            raise sample_error(self.source.path(index), index, cause)
        return sample

    def write(self, sample: ReadSample, row: int | None = None) -> list[Extent]:
        """Put the parts of one sample into the stores, at its position if at no other row.

        What is no error of a writer is a SampleError.
        """
        index, pairs = sample.position, zip(self.writers, sample.parts, strict=True)
        try:
            return [
                writer.write(index if row is None else row, part.array) for writer, part in pairs
            ]
        except (CacheError, MemoryError, ShapesDifferError):
            raise
        except Exception as cause:  # an encoder raises anything; all of it is named and kept
            raise sample_error(self.source.path(index), index, cause) from cause


def needs_processes(path: ReadPath, plans: Sequence[WriterPlan]) -> bool:
    """Whether preparing samples takes the GIL, because somebody else's code does it."""
    is_ours = isinstance(path.source, FileSource) and isinstance(path.source.loader, PlanesLoader)
    return not is_ours or any(_is_own(plan.codec) for plan in plans)


def _is_own(codec: Decoder | None) -> bool:
    """Whether a codec is an object of the user's."""
    if codec is None or isinstance(codec, SourceDecoder):
        return False
    from fastdata.stores.codecs import OwnCodec

    return isinstance(codec, OwnCodec)


# All samples


class Forecast(NamedTuple):
    """What the stores of a source will look like, told from a few samples spread over it.

    ``specs`` are dense if all samples looked at have one shape; ``part_bytes``, of each part of all
    samples as they are, is exact then, else the mean of those looked at times N.
    """

    specs: tuple[SampleSpec, ...]
    part_bytes: tuple[int, ...]
    looked_at: tuple[ReadSample, ...] = ()
    is_tuple: bool = False
    target_is_part: bool = False
    keys: ItemKeys | None = None
    mask_places: tuple[int, ...] = ()

    @property
    def need_bytes(self) -> int:
        return sum(self.part_bytes)

    def column(self, part: int) -> list[np.ndarray]:
        return [sample.parts[part].array for sample in self.looked_at]


def forecast(source: Source, prepare: Callable[[Any], Any], *, probes: int = 8) -> Forecast:
    """Prepare ``probes`` + 1 samples; the first one's error is raised if none of them can be."""
    count = len(source)
    if count == 0:
        return Forecast(
            specs=(SampleSpec(shape=(0,), dtype="uint8", form="array"),), part_bytes=(0,)
        )
    samples: list[ReadSample] = []
    errors: list[SampleError] = []
    source.expect(_spread(count, probes))
    for index in _spread(count, probes):
        try:
            samples.append(read_sample(source, prepare, index))
        except SampleError as error:
            errors.append(error)
    if not samples:
        raise errors[0]
    first = samples[0]
    alike = tuple(sample for sample in samples if len(sample.parts) == len(first.parts))
    specs: list[SampleSpec] = []
    part_bytes: list[int] = []
    for column in zip(*(sample.parts for sample in alike), strict=True):
        (array, form), shapes = column[0], {part.array.shape for part in column}
        spec = SampleSpec(
            shape=array.shape if len(shapes) == 1 else None, dtype=array.dtype.name, form=form
        )
        padded_bytes = sum(-(-part.array.nbytes // ALIGN_BYTES) * ALIGN_BYTES for part in column)
        specs.append(spec)
        part_bytes.append(
            spec.sample_bytes * count
            if spec.is_dense
            else math.ceil(padded_bytes / len(column) * count)
        )
    return Forecast(
        specs=tuple(specs),
        part_bytes=tuple(part_bytes),
        looked_at=alike,
        is_tuple=first.is_tuple,
        target_is_part=first.target_is_part,
        keys=source.keys,
        mask_places=first.mask_places,
    )


def _spread(count: int, probes: int) -> list[int]:
    return sorted({round(k * (count - 1) / probes) for k in range(probes + 1)})


class Ingested(NamedTuple):
    """Filled, sealed stores, one for each part."""

    stores: tuple[FileStore, ...]
    kept: np.ndarray  # int64, rows that samples were written to
    targets: list[Any]  # of those kept, as the source gave them; empty if they were not asked for
    skipped: list[SampleError]  # one for each of the others


_AT_ONCE = 16
_FETCHED_PER_TASK = 128
"""Where reading is waiting for a network: what a worker asks for at once."""
_Written: TypeAlias = "SampleError | bytes | None"


class _Task(NamedTuple):
    """Samples at some positions of a source, for the rows from ``first_row`` on."""

    first_row: int
    positions: Sequence[int]

    def __str__(self) -> str:
        if isinstance(self.positions, range):
            return f"samples {self.positions[0]} to {self.positions[-1]}"
        return f"samples {', '.join(map(str, self.positions))}"


def ingest(
    path: ReadPath,
    plans: Sequence[WriterPlan],
    options: Options,
    *,
    with_targets: bool,
    chosen: Sequence[int] | None = None,
    cores: Collection[int] = (),
) -> Ingested:
    """Fill stores with every sample of a source, each read once; or with some: ``chosen[row]`` becomes row ``row``.

    There is a plan for each part of samples; if these turn out to differ in shape, stores are
    written for any shapes. Of chosen samples, beside which there are others, none need be fit, but
    all must have the planned shapes. Where ``cores`` are given they are used in place of this
    process's.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        MemoryBudgetError: samples turned out larger than the writers may store.
        IngestError: a worker died, or no sample at all could be prepared.
        ShapesDifferError: a chosen sample has another shape.
    """
    positions = range(len(path.source)) if chosen is None else chosen
    while True:
        with contextlib.ExitStack() as cleanup:
            to_write = WritePath.open(path, plans, len(positions))
            for writer in to_write.writers:
                cleanup.callback(writer.close)
            try:
                targets, errors = _write_all(
                    to_write, positions, options, with_targets=with_targets, cores=cores
                )
            except ShapesDifferError as found:
                if chosen is not None:
                    raise
                if not any(plan.spec.is_dense for plan in plans):
                    raise IngestError(f"{found}; make them alike") from None
                log.info("%s; samples are stored one by one with their own shapes", found)
                plans = [plan.of_any_shapes() for plan in plans]
                continue
            skipped = [errors[row] for row in sorted(errors)]
            kept = np.delete(np.arange(len(positions)), sorted(errors))
            if not len(kept) and chosen is None:
                raise IngestError(
                    f"none of the {len(skipped)} samples can be prepared; the first: {skipped[0]}"
                )
            stores = tuple(writer.finish(kept) for writer in to_write.writers if len(kept))
            if stores:
                cleanup.pop_all()
            return Ingested(
                stores, kept, [pickle.loads(targets[row]) for row in sorted(targets)], skipped
            )


def _write_all(
    to_write: WritePath,
    positions: Sequence[int],
    options: Options,
    *,
    with_targets: bool,
    cores: Collection[int],
) -> tuple[dict[int, bytes], dict[int, SampleError]]:
    """Write samples by all workers; give pickled targets and errors, by row."""
    length, size = len(positions), _FETCHED_PER_TASK if is_fetched(to_write.source) else _AT_ONCE
    tasks = [_Task(first, positions[first : first + size]) for first in range(0, length, size)]
    workers = ingest_workers(options, cores) if len(tasks) > 1 else 0
    workers = 0 if workers == 1 else min(workers, len(tasks))
    job = writing_job(to_write, with_targets=with_targets)
    targets: dict[int, bytes] = {}
    errors: dict[int, SampleError] = {}
    with (
        contextlib.closing(
            run_tasks(job, tasks, workers, forks=to_write.forks, cores=cores)
        ) as finished,
        progress_bar(length, f"preparing {length:,} images", enabled=options.progress) as bar,
    ):
        for results in finished:
            for row, result in results:
                if isinstance(result, bytes):
                    targets[row] = result
                elif result is not None:
                    errors[row] = result
                    if options.on_error == "raise":
                        raise result
            bar.update(len(results))
    return targets, errors


def ingest_workers(options: Options, cores: Collection[int] = ()) -> int:
    return (
        memory.usable_cores(len(cores) or None)
        if options.num_workers is None
        else options.num_workers
    )


def is_fetched(source: Source) -> bool:
    """Whether reading a sample is waiting for a network."""
    return isinstance(source, RemoteFiles) or (
        isinstance(source, DatasetSource) and source.is_remote
    )


def writing_job(
    to_write: WritePath, *, with_targets: bool
) -> Callable[[_Task], list[tuple[int, _Written]]]:
    """What a worker does: write the samples of a task; give, by row, their pickled targets, errors, or nothing."""

    def job(task: _Task) -> list[tuple[int, _Written]]:
        results: list[tuple[int, _Written]] = []
        to_write.source.expect(task.positions)
        for row, sample in enumerate(to_write.read_all(task.positions), task.first_row):
            try:
                if isinstance(sample, SampleError):
                    raise sample
                to_write.write(sample, row)
                results.append(
                    (row, pickle.dumps(sample.target, protocol=5) if with_targets else None)
                )
            except SampleError as error:
                results.append((row, error))
        for writer in to_write.writers:
            writer.flush()
        return results

    return job


# What is kept


@dataclass(frozen=True, slots=True)
class KeptSamples:
    """The kept samples of a dataset, one store for each of their parts, and their targets; a source of them, too.

    Samples are tuples of parts if ``is_tuple``. The targets are the last part if
    ``target_is_part``, else the table's; of those that are tuples, the images at ``mask_places``
    are the last parts.
    """

    stores: tuple[Store, ...]
    table: SampleTable | Any
    """Or what has its ``has_paths``, ``path``, ``target``, ``collated_targets``, ``close`` and
    length."""
    is_tuple: bool = False
    target_is_part: bool = False
    keys: ItemKeys | None = None
    shared_by: Leader | None = None
    """What tells other ranks of the machine where they lie."""
    mask_places: tuple[int, ...] = ()

    @property
    def images(self) -> Store:
        """The first part; without the detour over what fills it, once all of it is there."""
        return self.stores[0].settled

    def filled_share(self, index: np.ndarray | None = None) -> float:
        """How many of the samples, or of those of ``index``, are kept already; 1 unless they are prepared lazily."""
        return self.stores[0].filled_share(index)

    def __len__(self) -> int:
        return len(self.table)

    def expect(self, indices: Sequence[int]) -> None:
        for store in self.stores:
            store.expect(indices)

    def path(self, index: int) -> str | None:
        return self.table.path(index) if self.table.has_paths else None

    def read(self, index: int) -> tuple[Any, Any]:
        return self.sample(index), self.target(index)

    def sample(self, index: int) -> Any:
        """One sample as it was before it was stored, a tuple if it was one; its memory is the caller's own."""
        stores = self.stores[: len(self.stores) - self.target_is_part - len(self.mask_places)]
        parts = tuple(self._owned(store, index) for store in stores)
        return parts if self.is_tuple else parts[0]

    def target(self, index: int) -> Any:
        if self.target_is_part:
            return self._owned(self.stores[-1], index)
        if not self.mask_places:
            return self.table.target(index)
        values, stores = list(self.table.target(index)), self.stores[-len(self.mask_places) :]
        for place, store in zip(self.mask_places, stores, strict=True):
            values[place] = self._owned(store, index)
        return tuple(values)

    def collated_targets(self, index_B: np.ndarray) -> Any:
        """What ``default_collate`` makes of the targets of a batch."""
        if self.mask_places:
            return collate_targets([self.target(index) for index in index_B.tolist()])
        if not self.target_is_part:
            return self.table.collated_targets(index_B)
        store = self.stores[-1]
        if store.spec.shape is None or store.spec.form == "pil":
            return collate_targets([self.target(index) for index in index_B.tolist()])
        out = np.empty((len(index_B), *store.spec.shape), store.spec.dtype)
        with self.naming_damage():
            store.gather_into(index_B, out)
        return torch.from_numpy(out)

    def _owned(self, store: Store, index: int) -> Any:
        with self.naming_damage():
            array = store.read(index)
        return present(array.copy() if store.gives_views else array, store.spec.form)

    @contextlib.contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Raise a SampleError that says which sample is damaged, in place of a store's own error."""
        try:
            yield
        except UndecodableError as damaged:
            path = self.path(damaged.index)
            if (
                damaged.codec == _SOURCE and damaged.__cause__ is not None
            ):  # the decoder's own complaint of the file
                raise sample_error(path, damaged.index, damaged.__cause__) from damaged.__cause__
            name = f"sample {damaged.index}" if path is None else f"sample {damaged.index}, {path},"
            cure = "" if damaged.is_on_disk else "; make the dataset again to mend it"
            text = f"{name} cannot be read from the store: {damaged}. The others can{cure}."
            raise SampleError(text, index=damaged.index, path=path) from damaged
        except ChannelsError as wrong:
            raise SampleError(
                wrong.reason, index=wrong.index, path=self.path(wrong.index)
            ) from wrong

    def modes(self) -> list[str]:
        """How many samples are of which of PIL's modes, and the first of each; empty where that is not known."""
        store = self.images
        shapes = store.shapes() if store.spec.form == "pil" else None
        if shapes is None or len(shapes) == 0:
            return []
        found = zip(*np.unique(shapes[:, 0], return_index=True, return_counts=True), strict=True)
        said = []
        for channels, first, count in found:
            where = ", ".join(filter(None, [f"sample {first}", self.path(int(first))]))
            said.append(
                f"{count:,} of mode {mode_of(int(channels), store.spec.dtype)} (first: {where})"
            )
        return said

    def end_sharing(self) -> None:
        if self.shared_by is not None:
            self.shared_by.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a dataset serves from; nothing kept where the source is to be asked."""

    storage_plan: StoragePlan
    kept: KeptSamples | None = None
    skipped: list[SampleError] = field(default_factory=list)


# The choice of storage, acted out

_LAZY_SLACK = 1.1
_LAZY_FLOOR_BYTES = 1 << 20
"""Reserved beyond what samples of unknown size are expected to take, because every process maps it
once."""


def prepare_storage(
    path: ReadPath, options: Options, table: SampleTable | None, by: Sequence[Any] = ()
) -> Prepared:
    """Decide where samples are kept; keep them there unless the decision is ``"none"``.

    ``table`` has paths and targets where they are known beforehand; else targets come from the
    source. ``by`` are the steps and the loader that samples are read and prepared by.
    """
    if options.storage == "none" or len(path.source) == 0:
        if options.on_error == "skip":
            warn_user(
                "on_error='skip' leaves out what cannot be prepared; storage='none' finds out only when it reads"
            )
        plan = StoragePlan(
            storage="none", reason="storage='none': samples are prepared on every read"
        )
        return Prepared(storage_plan=plan)
    preparation = _Preparation(path, options, table)
    return preparation.run() if options.share == "off" else preparation.run_with_others(by)


class _Preparation:
    """One run of ``prepare_storage``; codecs are tried when it is first needed."""

    def __init__(self, path: ReadPath, options: Options, table: SampleTable | None) -> None:
        self._path, self._options, self._table = path, options, table
        self._expected, self._budget = forecast(path.source, path.prepare), _budget(options)
        self._trials: list[CodecTrial] | None = None
        self._cores: Collection[int] = ()

    def run_with_others(self, by: Sequence[Any]) -> Prepared:
        """Prepare, or have it from, or together with, the other ranks of this machine that make the same dataset."""
        run = find_run() or run_to_be()
        if run is None:
            return self.run()
        try:
            key = self._key(by)
        except ValueError as refused:
            if find_run() is not None:
                warn_user(f"each rank prepares and holds samples of its own: {refused}")
                self._budget = _budget(replace(self._options, share="off"))
            return self.run()
        known = self._known()
        place = lead_or_follow(run, key, known)
        if isinstance(place, Follower):
            return self._attached(place.value, place.leader)
        if place is None:
            self._budget = _budget(replace(self._options, share="off"))
            return self.run()
        self._cores = cores_of_job()
        try:
            prepared = self.run()
            if prepared.kept is None:
                place.close()
            else:
                place.tell(prepared, known)
        except BaseException:
            place.close()
            raise
        return _shared_by(place, prepared)

    def _attached(self, prepared: Prepared, host: str) -> Prepared:
        if self._table is not None and prepared.kept is not None:
            self._table.close()  # there is the host's
        warn_of_skipped(prepared.skipped, len(self._path.source))
        reason = f"{prepared.storage_plan.reason}; one copy for the ranks of this machine, prepared with {host}"
        log.info("%s", reason)
        return replace(prepared, storage_plan=prepared.storage_plan._replace(reason=reason))

    def _key(self, by: Sequence[Any]) -> str:
        """What all have in common who have the same samples, and have made as many such datasets before.

        Raises:
            ValueError: that cannot be told of something, and no ``cache_key`` stands for it.
        """
        from fastdata.stores.codecs import describe_codec

        options, path, looked_at = self._options, self._path, self._expected.looked_at
        words: list[Any] = [
            options.storage,
            describe_codec(options.codec, options.cache_key),
            options.fill,
            options.on_error,
            options.memory_limit,
        ]
        words += [
            options.cache_key,
            len(path.source),
            self._expected.specs,
            describe(list(by), options.cache_key),
        ]
        if isinstance(path.source, DatasetSource):
            words += [_describe(path.source.dataset, options.cache_key), path.source.columns]
        digest = hashlib.blake2b(repr(words).encode(), digest_size=16)
        for column in self._table.columns() if self._table is not None else ():
            digest.update(np.ascontiguousarray(column).data)
        for sample in looked_at:
            digest.update(repr(sample.position).encode())
            for leaf in (
                *(part.array for part in sample.parts),
                *pytree.tree_leaves(sample.target),
            ):
                digest.update(_bytes_of(leaf))
        key = digest.hexdigest()
        _MADE[key] += 1
        return f"{key} {_MADE[key]}"

    def _known(self) -> dict[str, Any]:
        """The user's own objects, of which every rank has its own."""
        path = self._path
        codecs = {f"codec {k}": codec for k, codec in enumerate(_listed(self._options.codec))}
        steps = {"prepare": path.prepare, "open_bytes": path.open_bytes}
        source = {name: getattr(path.source, name, None) for name in ("loader", "dataset")}
        return {
            **steps,
            **source,
            **{name: it for name, it in codecs.items() if not isinstance(it, str)},
        }

    def run(self) -> Prepared:
        plan = self._choose(self._expected.need_bytes)
        while plan.storage != "none":
            log.info("%s", plan.reason)
            try:
                return self._fill(plan)
            except MemoryBudgetError as error:  # samples turned out larger than those looked at
                others = [trial for trial in self._tried() if trial.codec != plan.codec]
                if self._options.storage != "auto":
                    raise MemoryBudgetError(
                        f"{error}. {would_fit(others, self._budget)}"
                    ) from error
                self._trials = others
                log.info("%s; the next storage is tried", error)
            plan = self._choose(self._budget.bytes + 1)
        warn_user(
            f"{plan.reason}. Every epoch decodes again; cache_dir= or a smaller resize= may help."
        )
        return Prepared(storage_plan=plan)

    def _choose(self, raw_bytes: int) -> StoragePlan:
        options, budget = self._options, self._budget
        trials = (
            self._tried() if options.storage == "compressed" or raw_bytes > budget.bytes else []
        )
        return choose_storage(
            options.storage, raw_bytes, budget, trials, only_lossless=options.codec == "auto"
        )

    def _tried(self) -> list[CodecTrial]:
        if self._trials is None:
            self._trials = try_all(self._path, look_longer(self._path), self._options.codec)
        return self._trials

    def _fill(self, plan: StoragePlan) -> Prepared:
        path, options, table, expected = self._path, self._options, self._table, self._expected
        skipped: list[SampleError] = []
        is_certain = plan.codec is None and path.shape is not None and table is not None
        is_certain = is_certain and plan.storage != "device"  # all of them are copied there at once
        if options.fill == "lazy" or (
            options.fill == "auto" and is_certain and options.on_error == "raise"
        ):
            table = _table_beforehand(path.source, expected.looked_at) if table is None else table
            to_write = WritePath.open(
                path, self._writer_plans(plan, is_lazy=True), len(path.source)
            )
            stores: tuple[Store, ...] = LazyFill(to_write, len(path.source)).stores()
        else:
            ingested = ingest(
                path,
                self._writer_plans(plan),
                options,
                with_targets=table is None,
                cores=self._cores,
            )
            stores, skipped = ingested.stores, ingested.skipped
            warn_of_skipped(skipped, len(path.source))
            if table is None:
                table = SampleTable(ingested.targets)
            elif skipped:
                table = table.reduced_to(ingested.kept.tolist())
        kinds = expected.is_tuple, expected.target_is_part, expected.keys
        samples = KeptSamples(stores, table, *kinds, mask_places=expected.mask_places)
        return Prepared(storage_plan=plan, kept=samples, skipped=skipped)

    def _writer_plans(self, plan: StoragePlan, *, is_lazy: bool = False) -> list[WriterPlan]:
        expected, path, part_bytes = self._expected, self._path, self._expected.part_bytes
        if plan.codec is not None:
            part_bytes = next(
                trial.part_bytes for trial in self._tried() if trial.codec == plan.codec
            )
        coders = coders_of(plan.codec, path, self._options.codec, len(part_bytes))
        free_bytes, plans = self._budget.bytes - sum(part_bytes), []
        parts = expected.looked_at[0].parts
        for part, spec, coder, first_bytes in zip(
            parts, expected.specs, coders, part_bytes, strict=True
        ):
            limit_bytes = max(free_bytes + first_bytes, 1)
            if is_lazy:
                first_bytes = limit_bytes = min(
                    int(first_bytes * _LAZY_SLACK) + _LAZY_FLOOR_BYTES, limit_bytes
                )
            writer_plan = WriterPlan(
                spec=spec,
                dimensions=part.array.ndim,
                codec=coder,
                is_certain=spec.shape == path.shape,
                first_bytes=first_bytes,
                limit_bytes=limit_bytes,
            )
            plans.append(writer_plan)
        return plans


def _shared_by(place: Leader | None, prepared: Prepared) -> Prepared:
    return (
        prepared
        if prepared.kept is None
        else replace(prepared, kept=replace(prepared.kept, shared_by=place))
    )


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


def _bytes_of(leaf: Any) -> Any:
    if isinstance(leaf, (np.ndarray, torch.Tensor)):
        with contextlib.suppress(
            TypeError, ValueError, RuntimeError
        ):  # bfloat16, gradients: not for NumPy
            return np.ascontiguousarray(leaf).tobytes()
    return repr(leaf).encode()


def _listed(codec: Any) -> Sequence[Any]:
    return codec if isinstance(codec, (tuple, list)) else [codec]


def _budget(options: Options) -> Budget:
    ranks = 1 if options.share == "auto" and find_run() is not None else local_ranks()
    return budget_bytes(memory.available_bytes(), options.memory_limit, ranks=ranks)


def warn_of_skipped(skipped: Sequence[SampleError], count: int) -> None:
    if skipped:
        left_out = f"{len(skipped)} of {count} samples cannot be prepared and were left out"
        warn_user(f"{left_out}; dataset.skipped lists them. The first: {skipped[0]}")


def _table_beforehand(source: Source, looked_at: Sequence[ReadSample]) -> SampleTable:
    """The targets that a dataset lists, if they are those that its items have."""
    targets: Any = getattr(getattr(source, "dataset", None), "targets", None)
    if hasattr(targets, "tolist"):
        targets = targets.tolist()
    if targets is None or len(targets) != len(source):
        raise ValueError(
            "fill='lazy' needs the targets before samples are read, but the dataset has no attribute targets with one "
            "for each of its samples. Use fill='eager'."
        )
    if looked_at[0].target_is_part or looked_at[0].mask_places:
        raise ValueError(
            "fill='lazy' keeps images, and targets that are images too only with fill='eager'. Use that."
        )
    for sample in looked_at:
        if not np.array_equal(targets[sample.position], sample.target):
            raise ValueError(
                f"fill='lazy' takes the dataset's own list of targets, but that has {targets[sample.position]!r} where "
                f"item {sample.position} has {sample.target!r}, perhaps through a target_transform. Use fill='eager'."
            )
    return SampleTable(list(targets))


# Codecs tried on a few of the user's samples: how small they make them, and how fast they give them
# back

_TRIAL_SAMPLES = 24
_SECOND_PART = "zstd"
_ROUNDS = 3
_FILE_SIZES = 256


def _choices(codec: Any, path: ReadPath, parts: int) -> dict[str, tuple[Decoder | None, ...]]:
    """What ``codec=`` leaves open: by name what encodes each part of samples; None for files that cannot be kept."""
    choices: dict[str, tuple[Decoder | None, ...]] = (
        {_SOURCE: (path.decoder,)} if codec in ("auto", _SOURCE) else {}
    )
    from fastdata.stores.codecs import find_codec

    if codec == "auto":
        others = (find_codec(_SECOND_PART),) * (parts - 1)
        found = [(find_codec(name), *others) for name in ("lz4", "zstd", "jpeg")]
    elif isinstance(codec, (tuple, list)):
        if len(codec) != parts:
            raise ValueError(
                f"codec= has {len(codec)} codecs, but samples have {parts} parts; give one for each"
            )
        found = [tuple(map(find_codec, codec))]
    else:
        found = [] if codec == _SOURCE else [(find_codec(codec),) * parts]
    return choices | {
        "+".join(dict.fromkeys(codec.name for codec in codecs)): codecs for codecs in found
    }


def coders_of(
    name: str | None, path: ReadPath, codec: Any, parts: int
) -> tuple[Decoder | None, ...]:
    """What encodes each part of samples by the choice of this name that ``codec=`` leaves open; None: nothing does."""
    return (None,) * parts if name is None else _choices(codec, path, parts)[name]


def look_longer(path: ReadPath) -> Forecast:
    """Sizes of encoded samples vary more than their shapes do."""
    return forecast(path.source, path.prepare, probes=_TRIAL_SAMPLES)


def try_all(path: ReadPath, expected: Forecast, *codecs: Any) -> list[CodecTrial]:
    """Encode and decode the samples looked at, on one core, by every codec that one of ``codec=`` leaves open."""
    choices: dict[str, tuple[Decoder | None, ...]] = {}
    for codec in codecs:
        for name, coders in _choices(codec, path, len(expected.specs)).items():
            choices.setdefault(name, coders)
    return [_try(name, coders, path, expected) for name, coders in choices.items()]


def report_storage(path: ReadPath, options: Options) -> StorageReport:
    expected = look_longer(path)
    return StorageReport(
        raw_bytes=expected.need_bytes,
        budget=_budget(options),
        trials=tuple(try_all(path, expected, "auto", options.codec)),
        looked_at=len(expected.looked_at),
    )


def _try(
    name: str, coders: Sequence[Decoder | None], path: ReadPath, expected: Forecast
) -> CodecTrial:
    obstacle, known = (
        _obstacle(coders, path, expected),
        [coder for coder in coders if coder is not None],
    )
    lossless = all(coder.lossless for coder in known)
    if obstacle is not None:
        return CodecTrial(codec=name, obstacle=obstacle, lossless=lossless)
    columns = [list(map(np.ascontiguousarray, expected.column(part))) for part in range(len(known))]
    part_bytes, raw_bytes, encoded_bytes, seconds = [], 0, 0, 0.0
    for coder, samples in zip(known, columns, strict=True):
        encodings, sizes = _encoded(coder, samples, path, expected)
        part_bytes.append(math.ceil(sum(sizes) / len(sizes) * len(path.source)))
        raw_bytes += sum(sample.nbytes for sample in samples)
        encoded_bytes += sum(map(len, encodings))
        seconds += _decode_s(coder, encodings, samples)
    return CodecTrial(
        codec=name,
        part_bytes=tuple(part_bytes),
        ratio=raw_bytes / max(encoded_bytes, 1),
        decode_per_s=len(columns[0]) / seconds,
        lossless=lossless,
    )


def _obstacle(coders: Sequence[Decoder | None], path: ReadPath, expected: Forecast) -> str | None:
    for part, (coder, spec) in enumerate(zip(coders, expected.specs, strict=False)):
        if coder is None or isinstance(coder, SourceDecoder):
            if len(expected.specs) > 1:
                return "samples have several parts"
            if not isinstance(path.source, FileSource):
                return "the samples are no files"
            return "files are opened by your own loader=" if coder is None else None
        shapes = dict.fromkeys(array.shape for array in expected.column(part))
        obstacle = next(
            filter(None, (coder.obstacle(replace(spec, shape=shape)) for shape in shapes)), None
        )
        if obstacle is not None and part:
            names = ", ".join(
                map(repr, [getattr(coders[0], "name", ""), *[_SECOND_PART] * (len(coders) - 1)])
            )
            obstacle += (
                f" (part {part + 1} of each sample; one codec for each part: codec=({names}))"
            )
        if obstacle is not None:
            return obstacle
    return None


def _encoded(
    coder: Decoder, samples: Sequence[np.ndarray], path: ReadPath, expected: Forecast
) -> tuple[Sequence[bytes | memoryview], Sequence[int]]:
    """Samples looked at as they would be kept, and the sizes from which those of all are told."""
    if not isinstance(coder, SourceDecoder):
        encodings = list(map(coder.encode, samples))
        return encodings, list(map(len, encodings))
    assert isinstance(path.source, FileSource)
    files = path.source.as_bytes()
    sizes = [path.source.size_bytes(index) for index in _spread(len(files), _FILE_SIZES)]
    return [files.read(sample.position)[0].data for sample in expected.looked_at], sizes


def _decode_s(
    decoder: Decoder, encodings: Sequence[bytes | memoryview], samples: Sequence[np.ndarray]
) -> float:
    outs, times = list(map(np.zeros_like, samples)), []
    for _ in range(1 if isinstance(decoder, SourceDecoder) else _ROUNDS):
        begun = time.perf_counter()
        for encoding, out in zip(encodings, outs, strict=True):
            decoder.decode(memoryview(encoding), out)
        times.append(time.perf_counter() - begun)
    return max(min(times), 1e-9)
