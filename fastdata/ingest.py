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
from typing import Any, Literal

import numpy as np

from fastdata.crew import run_tasks
from fastdata.decode import sample_error, to_stored
from fastdata.errors import IngestError, SampleError
from fastdata.report import log, progress_bar
from fastdata.sources import Source
from fastdata.spec import Form, SampleSpec
from fastdata.stores.base import Store
from fastdata.stores.writers import DenseWriter, Place, RaggedWriter, ShapesDifferError, Writer, padded_bytes

__all__ = ["Forecast", "Ingested", "OnError", "forecast", "ingest"]

OnError = Literal["raise", "skip"]

_SAMPLES_PER_TASK = 8
_PROBES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a store of a source will look like, told from a few samples spread over it.

    Args:
        spec: dense if all samples looked at have one shape.
        need_bytes: exact for dense samples, else the mean of those looked at times N.
    """

    spec: SampleSpec
    need_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingested:
    """A filled, sealed store.

    Args:
        store: the samples.
        kept: their positions in the source, in order.
        targets: one per kept sample, as the source gave them; None if they were not asked for.
        skipped: an error per sample left out.
    """

    store: Store
    kept: Sequence[int]
    targets: list[Any] | None
    skipped: list[SampleError]


def forecast(source: Source, prepare: Callable[[Any], Any]) -> Forecast:
    """Prepare a few samples to learn shape, dtype and size of all.

    Raises:
        SampleError: none of the samples looked at can be read; the first one's error.
    """
    count = len(source)
    if count == 0:
        return Forecast(spec=SampleSpec(shape=(0,), dtype="uint8", form="array"), need_bytes=0)
    prepared: list[np.ndarray] = []
    errors: list[SampleError] = []
    form: Any = None
    for index in sorted({round(k * (count - 1) / _PROBES) for k in range(_PROBES + 1)}):
        try:
            array, form, _ = _prepared(source, prepare, index)
            prepared.append(array)
        except SampleError as error:
            errors.append(error)
    if not prepared:
        raise errors[0]
    shapes = {array.shape for array in prepared}
    spec = SampleSpec(shape=shapes.pop() if len(shapes) == 1 else None, dtype=prepared[0].dtype.name, form=form)
    mean_bytes = sum(padded_bytes(array.nbytes) for array in prepared) / len(prepared)
    return Forecast(spec=spec, need_bytes=spec.sample_bytes * count if spec.is_dense else math.ceil(mean_bytes * count))


def ingest(
    source: Source,
    prepare: Callable[[Any], Any],
    expected: Forecast,
    *,
    limit_bytes: int,
    workers: int,
    with_targets: bool = True,
    on_error: OnError = "raise",
    progress: bool = True,
    description: str = "fastdata",
) -> Ingested:
    """Fill a store with every sample of a source.

    Args:
        source: read from the workers, each sample once.
        prepare: called on each sample; gives a PIL image, an array or a tensor.
        expected: from ``forecast``. Samples that turn out to differ in shape make the store ragged.
        limit_bytes: the most the store may take.
        workers: processes or threads; 1 prepares in this process.
        with_targets: whether to bring the targets back.
        on_error: ``"raise"`` at the first sample that cannot be prepared, or ``"skip"`` and list it.
        progress: whether to show a progress bar.
        description: in front of the bar.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        MemoryBudgetError: ragged samples turned out larger than ``limit_bytes``.
        IngestError: a worker died, or no sample at all could be prepared.
    """

    def fill(writer: Writer) -> Ingested:
        job = _Job(source, prepare, writer, with_targets)
        tasks = [range(i, min(i + _SAMPLES_PER_TASK, length)) for i in range(0, length, _SAMPLES_PER_TASK)]
        filled = _Filled(length, on_error)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(writer.close)
            with (
                contextlib.closing(run_tasks(job, tasks, workers)) as finished,
                progress_bar(length, description, enabled=progress) as bar,
            ):
                for results in finished:
                    filled.enter(results)
                    bar.update(len(results))
            ingested = filled.finish(writer, with_targets)
            cleanup.pop_all()
        return ingested

    length = len(source)
    if expected.spec.is_dense:
        try:
            return fill(DenseWriter(expected.spec, length))
        except ShapesDifferError as found:
            log.info("%s; samples are stored one by one with their own shapes", found)
    ragged = SampleSpec(shape=None, dtype=expected.spec.dtype, form=expected.spec.form)
    return fill(RaggedWriter(ragged, first_bytes=expected.need_bytes, limit_bytes=limit_bytes))


class _Filled:
    """What is known of the samples written so far; compact, because there may be millions."""

    def __init__(self, length: int, on_error: OnError) -> None:
        self._on_error = on_error
        self._places = np.full(length, -1, np.int64)
        self._shapes: np.ndarray | None = None
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
            self._places[index], shape = outcome
            self._note_shape(index, shape)
            if target is not None:
                self._targets[index] = target

    def finish(self, writer: Writer, with_targets: bool) -> Ingested:
        """Seal the store over the samples that were written."""
        kept = np.flatnonzero(self._places >= 0)
        errors = [self._errors[index] for index in sorted(self._errors)]
        if errors and not len(kept):
            raise IngestError(f"none of the {len(errors)} samples can be prepared; the first: {errors[0]}")
        assert self._shapes is not None
        return Ingested(
            store=writer.finish(self._places[kept], self._shapes[kept]),
            kept=kept.tolist(),
            targets=[pickle.loads(self._targets[index]) for index in kept.tolist()] if with_targets else None,
            skipped=errors,
        )

    def _note_shape(self, index: int, shape: tuple[int, ...]) -> None:
        if self._shapes is None:
            self._shapes = np.zeros((len(self._places), len(shape)), np.int32)
        if len(shape) != self._shapes.shape[1]:
            raise IngestError(
                f"sample {index} has {len(shape)} dimensions, those before it {self._shapes.shape[1]}; make them alike"
            )
        self._shapes[index] = shape


_Result = tuple[int, "Place | SampleError", "bytes | None"]
"""Index of a sample, what became of it, its pickled target if it is wanted."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What a worker does with a run of sample numbers."""

    source: Source
    prepare: Callable[[Any], Any]
    writer: Writer
    with_targets: bool

    def __call__(self, indices: range) -> list[_Result]:
        return [self._one(index) for index in indices]

    def _one(self, index: int) -> _Result:
        try:
            array, form, target = _prepared(self.source, self.prepare, index)
            self._check_type(index, array, form)
        except SampleError as error:
            return index, error, None
        place = self.writer.write(index, array)
        return index, place, pickle.dumps(target, protocol=5) if self.with_targets else None

    def _check_type(self, index: int, array: np.ndarray, form: str) -> None:
        spec = self.writer.spec
        if (array.dtype.name, form) != (spec.dtype, spec.form):
            found, usual = f"a {array.dtype.name} {form} sample", f"{spec.dtype} {spec.form} ones"
            cause = TypeError(f"it is {found} among {usual}; give all samples one type in prepare=")
            raise sample_error(self.source.path(index), index, cause)


def _prepared(source: Source, prepare: Callable[[Any], Any], index: int) -> tuple[np.ndarray, Form, Any]:
    """Read and prepare one sample; every failure of either is a SampleError that names it."""
    try:
        sample, target = source.read(index)
        array, form = to_stored(prepare(sample))
    except (MemoryError, SampleError):
        raise
    except Exception as cause:  # user code and decoders raise anything; all of it is named and kept
        raise sample_error(source.path(index), index, cause) from cause
    return array, form, target
