"""Ingest: Source -> prepare -> Store, once per dataset, on all usable cores. The only writer of a store.

The parent hands out short runs of sample numbers and shows progress; workers read, prepare and write straight into the
shared block. Whatever happens, a killed worker or Ctrl-C included, no worker outlives ``ingest`` and an unfinished
block is freed.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from fastdata.crew import run_tasks
from fastdata.decode import is_image, sample_error, to_stored
from fastdata.errors import CacheError, IngestError, SampleError
from fastdata.report import log, progress_bar
from fastdata.sources import Source
from fastdata.spec import Form, SampleSpec
from fastdata.stores.base import Store
from fastdata.stores.writers import ALIGN_BYTES, Place, Places, ShapesDifferError, Writer

__all__ = ["Forecast", "Ingested", "OnError", "Part", "ReadSample", "SampleRoad", "forecast", "ingest", "read_sample"]

OnError = Literal["raise", "skip"]

_SAMPLES_PER_TASK = 16
_PROBES = 8


class Part(NamedTuple):
    """What is stored of a sample: its values, and what they were."""

    array: np.ndarray
    form: Form


class ReadSample(NamedTuple):
    """One prepared sample, taken apart.

    Most samples have one part. A tuple such as (image, mask) has one for each; a target that is an image or an array of
    two or more dimensions is the last part, and ``target`` None.
    """

    position: int
    parts: tuple[Part, ...]
    target: Any
    is_tuple: bool
    target_is_part: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What the stores of a source will look like, told from a few samples spread over it.

    Args:
        specs: of each part; dense if all samples looked at have one shape.
        part_bytes: of each part as it is; exact for dense ones, else the mean of those looked at times N.
        looked_at: the samples looked at.
        is_tuple: whether samples are tuples of parts.
        target_is_part: whether the last part is the target.
    """

    specs: tuple[SampleSpec, ...]
    part_bytes: tuple[int, ...]
    looked_at: tuple[ReadSample, ...] = ()
    is_tuple: bool = False
    target_is_part: bool = False

    @property
    def need_bytes(self) -> int:
        """Of all parts as they are."""
        return sum(self.part_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingested:
    """Filled, sealed stores.

    Args:
        stores: one for each part of the samples.
        kept: positions in the source of the samples stored, in order.
        targets: one per kept sample, as the source gave them; None if they were not asked for.
        skipped: an error per sample left out.
    """

    stores: tuple[Store, ...]
    kept: Sequence[int]
    targets: list[Any] | None
    skipped: list[SampleError]


def forecast(source: Source, prepare: Callable[[Any], Any], *, probes: int = _PROBES) -> Forecast:
    """Prepare a few samples to learn shape, dtype and size of all.

    Args:
        source: the samples.
        prepare: called on each.
        probes: how many are looked at, less one.

    Raises:
        SampleError: none of the samples looked at can be read; the first one's error.
    """
    count = len(source)
    if count == 0:
        return Forecast(specs=(SampleSpec(shape=(0,), dtype="uint8", form="array"),), part_bytes=(0,))
    samples: list[ReadSample] = []
    errors: list[SampleError] = []
    for index in sorted({round(k * (count - 1) / probes) for k in range(probes + 1)}):
        try:
            samples.append(read_sample(source, prepare, index))
        except SampleError as error:
            errors.append(error)
    if not samples:
        raise errors[0]
    first = samples[0]
    alike = [sample for sample in samples if len(sample.parts) == len(first.parts)]
    columns = list(zip(*(sample.parts for sample in alike), strict=True))
    specs = tuple(_spec_of(column) for column in columns)
    return Forecast(
        specs=specs,
        part_bytes=tuple(map(_part_bytes, specs, columns, [count] * len(specs))),
        looked_at=tuple(alike),
        is_tuple=first.is_tuple,
        target_is_part=first.target_is_part,
    )


def _spec_of(column: tuple[Part, ...]) -> SampleSpec:
    shapes = {part.array.shape for part in column}
    shape = shapes.pop() if len(shapes) == 1 else None
    return SampleSpec(shape=shape, dtype=column[0].array.dtype.name, form=column[0].form)


def _part_bytes(spec: SampleSpec, column: tuple[Part, ...], count: int) -> int:
    if spec.is_dense:
        return spec.sample_bytes * count
    padded = [-(-part.array.nbytes // ALIGN_BYTES) * ALIGN_BYTES for part in column]
    return math.ceil(sum(padded) / len(padded) * count)


def ingest(
    source: Source,
    prepare: Callable[[Any], Any],
    make_writers: Callable[[bool], Sequence[Writer]],
    *,
    workers: int,
    with_targets: bool = True,
    on_error: OnError = "raise",
    progress: bool = True,
    description: str = "fastdata",
    may_skip_all: bool = False,
) -> Ingested:
    """Fill stores with every sample of a source.

    Args:
        source: read from the workers, each sample once.
        prepare: called on each sample; gives a PIL image, an array or a tensor, or a tuple of these.
        make_writers: makes the writer of each part; called again with True, for writers that take samples of any
            shapes, if samples turn out to differ in shape.
        workers: processes or threads; 1 prepares in this process.
        with_targets: whether to bring the targets back.
        on_error: ``"raise"`` at the first sample that cannot be prepared, or ``"skip"`` and list it.
        progress: whether to show a progress bar.
        description: in front of the bar.
        may_skip_all: whether there are other samples, so that none of these need be fit.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        MemoryBudgetError: samples turned out larger than the writers may store.
        IngestError: a worker died, or no sample at all could be prepared.
    """

    def fill(writers: Sequence[Writer]) -> Ingested:
        with contextlib.ExitStack() as cleanup:
            for writer in writers:
                cleanup.callback(writer.close)
            job = _Job(SampleRoad(source, prepare, tuple(writers)), with_targets)
            tasks = [range(i, min(i + _SAMPLES_PER_TASK, length)) for i in range(0, length, _SAMPLES_PER_TASK)]
            filled = _Filled(length, len(writers), on_error, may_skip_all=may_skip_all)
            with (
                contextlib.closing(run_tasks(job, tasks, workers)) as finished,
                progress_bar(length, description, enabled=progress) as bar,
            ):
                for results in finished:
                    filled.enter(results)
                    bar.update(len(results))
            ingested = filled.finish(writers, with_targets)
            if ingested.stores:
                cleanup.pop_all()
        return ingested

    length = len(source)
    try:
        return fill(make_writers(False))
    except ShapesDifferError as found:
        log.info("%s; samples are stored one by one with their own shapes", found)
    return fill(make_writers(True))


class _Filled:
    """What is known of the samples written so far; compact, because there may be millions."""

    def __init__(self, length: int, parts: int, on_error: OnError, *, may_skip_all: bool) -> None:
        self._on_error, self._may_skip_all = on_error, may_skip_all
        self._is_there = np.zeros(length, np.bool_)
        self._starts = np.zeros((parts, length), np.int64)
        self._sizes = np.zeros((parts, length), np.int64)
        self._shapes: dict[int, np.ndarray] = {}  # of each part, once the first sample tells its dimensions
        self._targets: dict[int, bytes] = {}
        self._errors: dict[int, SampleError] = {}

    def enter(self, results: list[_Result]) -> None:
        """Note the results of one task.

        Raises:
            SampleError: a sample failed, and none may.
        """
        for index, outcome, target in results:
            if isinstance(outcome, SampleError):
                if self._on_error == "raise":
                    raise outcome
                self._errors[index] = outcome
                continue
            self._is_there[index] = True
            for part, place in enumerate(outcome):
                self._starts[part, index], self._sizes[part, index], shape = place
                self._note_shape(part, index, shape)
            if target is not None:
                self._targets[index] = target

    def finish(self, writers: Sequence[Writer], with_targets: bool) -> Ingested:
        """Seal the stores over the samples that were written."""
        kept = np.flatnonzero(self._is_there)
        errors = [self._errors[index] for index in sorted(self._errors)]
        if errors and not len(kept):
            if self._may_skip_all:
                return Ingested(stores=(), kept=[], targets=[] if with_targets else None, skipped=errors)
            raise IngestError(f"none of the {len(errors)} samples can be prepared; the first: {errors[0]}")
        stores = [
            writer.finish(Places(self._starts[part, kept], self._sizes[part, kept], self._shapes[part][kept]))
            for part, writer in enumerate(writers)
        ]
        return Ingested(
            stores=tuple(stores),
            kept=kept.tolist(),
            targets=[pickle.loads(self._targets[index]) for index in kept.tolist()] if with_targets else None,
            skipped=errors,
        )

    def _note_shape(self, part: int, index: int, shape: tuple[int, ...]) -> None:
        shapes = self._shapes.get(part)
        if shapes is None:
            shapes = self._shapes[part] = np.zeros((len(self._is_there), len(shape)), np.int32)
        if len(shape) != shapes.shape[1]:
            raise IngestError(
                f"sample {index} has {len(shape)} dimensions, those before it {shapes.shape[1]}; make them alike"
            )
        shapes[index] = shape


_Result = tuple[int, "list[Place] | SampleError", "bytes | None"]
"""Index of a sample, what became of it, its pickled target if it is wanted."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker does with a run of sample numbers."""

    road: SampleRoad
    with_targets: bool

    def __call__(self, indices: range) -> list[_Result]:
        results = [self._one(index) for index in indices]
        self.road.flush()
        return results

    def _one(self, index: int) -> _Result:
        try:
            sample = self.road.read(index)
            places = self.road.write(sample)
        except SampleError as error:
            return index, error, None
        return index, places, pickle.dumps(sample.target, protocol=5) if self.with_targets else None


@dataclass(frozen=True, slots=True)
class SampleRoad:
    """The way of one sample from its source into the stores.

    Args:
        source: the samples.
        prepare: called on each.
        writers: one for each part.
    """

    source: Source
    prepare: Callable[[Any], Any]
    writers: tuple[Writer, ...]

    def read(self, index: int) -> ReadSample:
        """Read and prepare one sample.

        Raises:
            SampleError: it cannot be read or prepared, or is not of the type that the stores keep.
        """
        sample = read_sample(self.source, self.prepare, index)
        self.check(index, sample)
        return sample

    def write(self, sample: ReadSample) -> list[Place]:
        """Put the parts of one sample into the stores.

        Raises:
            SampleError: it cannot be encoded.
            ShapesDifferError: it is not of the common shape.
            MemoryBudgetError: there is no room for it.
        """
        pairs = zip(self.writers, sample.parts, strict=True)
        return [self._write(sample.position, writer, part) for writer, part in pairs]

    def flush(self) -> None:
        """Finish what this thread has written.

        Raises:
            CacheError: a disk is full.
        """
        for writer in self.writers:
            writer.flush()

    def _write(self, index: int, writer: Writer, part: Part) -> Place:
        try:
            return writer.write(index, part.array)
        except (CacheError, MemoryError, ShapesDifferError):
            raise
        except Exception as cause:  # an encoder raises anything; all of it is named and kept
            raise sample_error(self.source.path(index), index, cause) from cause

    def check(self, index: int, sample: ReadSample) -> None:
        """Check that a sample is of the type that the stores keep.

        Raises:
            SampleError: it is not.
        """
        problem = None
        if len(sample.parts) != len(self.writers):
            problem = f"it has {len(sample.parts)} parts among samples of {len(self.writers)}"
        for (array, form), writer in zip(sample.parts, self.writers, strict=False):
            if (array.dtype.name, form) != (writer.spec.dtype, writer.spec.form):
                problem = f"it is a {array.dtype.name} {form} sample among {writer.spec.dtype} {writer.spec.form} ones"
        if problem is not None:
            cause = TypeError(f"{problem}; give all samples one type in prepare=")
            raise sample_error(self.source.path(index), index, cause)


def read_sample(source: Source, prepare: Callable[[Any], Any], index: int) -> ReadSample:
    """Read and prepare one sample.

    Raises:
        SampleError: it cannot be read or prepared; names path and index.
    """
    try:
        sample, target = source.read(index)
        prepared = prepare(sample)
        is_tuple = isinstance(prepared, (tuple, list))
        parts = [Part(*to_stored(part)) for part in (prepared if is_tuple else [prepared])]
        target_is_part = is_image(target)
        if target_is_part:
            parts.append(Part(*to_stored(target)))
    except (MemoryError, SampleError):
        raise
    except Exception as cause:  # user code and decoders raise anything; all of it is named and kept
        raise sample_error(source.path(index), index, cause) from cause
    return ReadSample(index, tuple(parts), None if target_is_part else target, is_tuple, target_is_part)
