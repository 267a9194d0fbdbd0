"""From a source to stores, in memory or files, by any worker: all samples now, or on first read.

Samples are read, prepared and taken apart into parts, each of which a ``Writer`` puts into a store.

All at once by threads where the core prepares them, by processes where somebody else's code does.
Whatever happens, a killed worker or Ctrl-C included, no worker outlives it and unfinished memory is
freed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fastdata.errors import (
    CacheError,
    IngestError,
    MemoryBudgetError,
    RemoteError,
    SampleError,
    sample_error,
)
from fastdata.machine import format_bytes, limits
from fastdata.machine.shared import ArrayBlock, Block
from fastdata.machine.workers import run_tasks
from fastdata.pixels import Step, plan_transform, split_upright
from fastdata.pixels.compose import known_name
from fastdata.pixels.core import Array, Shape, library
from fastdata.pixels.images import (
    Form,
    OpenedImages,
    Opening,
    SampleSpec,
    SourceDecoder,
    is_image,
    is_pil,
    to_stored,
)
from fastdata.pixels.program import Program
from fastdata.report import log, progress_bar
from fastdata.sources import FileSource, Source
from fastdata.stores.readers import DiskFile, Layout, ShapesDifferError, Store, checksum

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec
    from fastdata.stores.prepare import Options

_FETCHED_AT_ONCE = 128
"""Where reading is waiting for a network: what a worker asks for at once."""
ALIGN_BYTES = 64
"""Each raw sample of a shape of its own begins at a multiple of these."""
_FIRST_BYTES = 64 << 20
"""Set aside at once, which the others wait for."""
_AT_ONCE = 16
"""Samples that are read together."""
NO_LIMIT = 1 << 62
_USED = "used bytes"
_Made = TypeVar("_Made")


# Reading samples


class ReadSample(NamedTuple):
    """A prepared sample, taken apart: of each part its values, and what it was.

    Its target has None where that is a part. Of files it is None: their table has the targets.
    """

    number: int
    parts: Sequence[tuple[Array, Form]]
    target: Any = None
    layout: Layout = Layout()


@dataclass(frozen=True, slots=True)
class Steps:
    steps: tuple[Step, ...]

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample


@dataclass(frozen=True)
class FilePreparer:
    """Prepares an image file by the core, without an image in between: planes (C, h, w), uint8.

    Args:
        prepare: of opened images makes planes (n, C, h, w), uint8, of neighbours of one size; they
            stay until the next are asked for.
        opening: of the loader that it stands for.
        upright: whether images are turned as their EXIF says first.
    """

    prepare: Callable[[OpenedImages], Iterator[Array]]
    opening: Opening
    upright: bool = False

    def __call__(self, data: bytes | memoryview) -> Array:
        def by_pillow(_: int) -> Array:
            return self.opening.decode_pixels(data, upright=self.upright)

        images = OpenedImages.of_files(
            [data], by_pillow, upright=self.upright, channels=self.opening.channels
        )
        return np.array(next(self.prepare(images))[0])


class ReadPath(NamedTuple):
    """Where samples come from, and what is done to each before it is stored."""

    source: Source
    prepare: Steps
    shape: Shape | None = None
    """Of every prepared sample, where it follows from the steps."""

    by_core: FilePreparer | None = None
    """What opens and prepares samples without the GIL; None where it is others' code."""

    @property
    def decoder(self) -> SourceDecoder | None:
        """Prepares the bytes of files; None where samples are none, or are opened by others."""
        if self.by_core is not None:
            is_whole = not (self.prepare.steps or self.by_core.upright)
            return SourceDecoder(self.by_core, Steps(()), makes_jpeg_files=is_whole)
        opening = self.source.opening
        return None if opening is None else SourceDecoder(opening.decode, self.prepare)


def read_path(source: Source, steps: tuple[Step, ...]) -> ReadPath:
    """How samples to be stored are read: image files by the core, where it knows all steps."""
    as_written = ReadPath(source, Steps(steps))
    opening = source.opening
    if opening is None or (steps and opening.form == "tensor"):  # whose resize the core rounds
        return as_written
    obstacle = library.obstacle()
    if obstacle is not None:
        log.info("Pillow prepares the images, which takes longer: %s", obstacle)
        return as_written
    upright, served = split_upright(steps)
    plan = plan_transform(served, form=opening.form, channels=opening.channels, prepared=0)
    if plan.kind != opening.form or plan.per_sample:
        return as_written
    program = Program(plan.batch_ops, SampleSpec(shape=None, dtype="uint8", form="pil"))
    output = None if opening.channels is None else program.output((opening.channels, 1, 1))
    by_core = FilePreparer(program.prepare, opening, upright or opening.is_upright)
    return as_written._replace(by_core=by_core, shape=None if output is None else output[0])


NO_FAULT_OF_A_SAMPLE = (
    MemoryError,
    SampleError,
    IngestError,
    RemoteError,
    CacheError,
    ShapesDifferError,
)
"""Errors that name what they are of, or that no sample is to blame for."""


@contextlib.contextmanager
def naming_sample(source: Source, index: int, *, is_read: bool = False) -> Iterator[None]:
    """Make what goes wrong with a sample an error that names its path and index.

    A SampleError, if it is the sample that is at fault.
    """
    try:
        yield
    except NO_FAULT_OF_A_SAMPLE:
        raise
    except Exception as cause:  # user code and decoders raise anything; all of it is named and kept
        raise sample_error(source.path(index), index, cause, is_read=is_read) from cause


def open_files(source: FileSource, indices: Sequence[int], *, upright: bool) -> OpenedImages:
    """The files of samples, for the core; what is wrong with one is a SampleError."""
    try:
        files = source.read_files(indices)
    except OSError:  # of one of them
        files = []
        for index in indices:
            with naming_sample(source, index):
                files += source.read_files([index])

    opening = source.opening
    assert opening is not None

    def by_pillow(b: int) -> Array:
        with naming_sample(source, indices[b]):
            return opening.decode_pixels(files[b], upright=upright)

    return OpenedImages.of_files(files, by_pillow, upright=upright, channels=opening.channels)


def read_samples(
    path: ReadPath, indices: Sequence[int]
) -> Iterator[Sequence[ReadSample | SampleError]]:
    """Read and prepare samples, in order, or say what is wrong with one.

    They come in runs, each of which may lie over those before.
    """
    for first in range(0, len(indices), _AT_ONCE):
        group = indices[first : first + _AT_ONCE]
        done = 0
        if path.by_core is not None:
            # One after the other tells whose an error is.
            with contextlib.suppress(SampleError, ValueError):
                for run in _read_together(path, path.by_core, group):
                    done += len(run)
                    yield run
        for index in group[done:]:
            try:
                yield [_read_one(path, index)]
            except SampleError as error:
                yield [error]


def _read_together(
    path: ReadPath, by_core: FilePreparer, indices: Sequence[int]
) -> Iterator[list[ReadSample]]:
    source = path.source
    assert isinstance(source, FileSource)
    images = open_files(source, indices, upright=by_core.upright)
    form = by_core.opening.form
    numbers = iter(indices)
    for planes in by_core.prepare(images):
        yield [ReadSample(next(numbers), [(pixels, form)]) for pixels in planes]


def _read_one(path: ReadPath, index: int) -> ReadSample:
    """A sample of its parts, with those of its target behind them."""
    with naming_sample(path.source, index):
        sample, target = path.source.read(index)
    with naming_sample(path.source, index, is_read=True):
        prepared = path.prepare(sample)
        is_tuple = isinstance(prepared, (tuple, list))
        parts = list(map(to_stored, prepared if is_tuple else [prepared]))
        if isinstance(path.source, FileSource):
            return ReadSample(index, parts, layout=Layout(is_tuple=is_tuple))
        target_is_part = is_image(target)
        places: tuple[int, ...] = ()
        if target_is_part:
            parts.append(to_stored(target, is_mask=True))
            target = None
        elif type(target) is tuple:
            places = tuple(k for k, value in enumerate(target) if is_pil(value))
            parts += [to_stored(target[k], is_mask=True) for k in places]
            target = tuple(None if is_pil(value) else value for value in target)
        layout = Layout(is_tuple=is_tuple, target_is_part=target_is_part, mask_places=places)
        return ReadSample(index, parts, target, layout)


# Writers


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """One part of samples, such as the image, as it is stored.

    Args:
        spec: of the samples as they are served; dense if all have one shape.
        dimensions: of their shapes.
        codec: settings of what encodes them; None if they are raw.
    """

    spec: SampleSpec
    dimensions: int
    codec: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        dtype = np.dtype(self.spec.dtype)
        if dtype.hasobject or not dtype.itemsize or dtype.name != self.spec.dtype:
            raise ValueError(f"samples of {self.spec} are not known")

    @property
    def is_table(self) -> bool:
        """Whether samples are one array (rows, *shape), raw; on disk a ``.npy`` file."""
        return self.codec is None and self.spec.is_dense


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterPlan(StoredPart):
    """A part of samples, and how its store is to be written.

    Args:
        coder: encodes it. A ``SourceDecoder`` keeps files' bytes as they are: each is prepared when
            it is read.
        path: of the new file on disk; None for memory.
        first_bytes: about what samples take, unless they are a table.
        limit_bytes: the most that may be reserved.
    """

    coder: Codec | SourceDecoder | None = None
    path: Path | None = None
    first_bytes: int = 1
    limit_bytes: int = NO_LIMIT


def write_any_shapes(
    write: Callable[[Sequence[WriterPlan]], _Made], plans: Sequence[WriterPlan]
) -> _Made:
    """Write samples as planned, or else one by one with their own shapes."""
    with contextlib.suppress(ShapesDifferError):
        return write(plans)
    return write([replace(plan, spec=replace(plan.spec, shape=None)) for plan in plans])


@dataclass(frozen=True, slots=True)
class Writer:
    """Puts samples into a file, from any thread, or process that has it.

    In a table each has its place. All others lie in the order in which they are written, and the
    file grows as their sizes become known.

    Args:
        plan: of the store.
        file: that is written to.
        index: of the store, as ``Store`` has it.
    """

    plan: WriterPlan
    file: Block
    index: ArrayBlock

    @classmethod
    def open(cls, plan: WriterPlan, length: int) -> Writer:
        """Of a new file with so many rows."""
        spec = plan.spec
        index = {"offsets": np.zeros(length, np.int64)}
        # What ``np.save`` writes before an array (rows, *shape): a multiple of 64 bytes.
        head = io.BytesIO()
        if plan.codec is None and spec.shape is not None:
            what = {"descr": np.dtype(spec.dtype).str, "fortran_order": False}
            what["shape"] = (length, *spec.shape)
            np.lib.format.write_array_header_1_0(head, what)
            index["offsets"] += head.tell() + np.arange(length) * spec.sample_bytes
            size_bytes = head.tell() + length * spec.sample_bytes
        else:
            index["sizes"] = np.zeros(length, np.int64)
            index["shapes"] = np.zeros((length, plan.dimensions), np.int32)
            size_bytes = max(min(plan.first_bytes, plan.limit_bytes, _FIRST_BYTES), 1)
            index[_USED] = np.zeros(1, np.int64)
        if plan.path is None:
            index["is_there"] = np.zeros(length, np.bool_)  # for ``LazyStore``
            file = Block.create(size_bytes)
        else:
            index["sums"] = np.zeros(length, np.uint32)
            file = DiskFile.reserve(plan.path, size_bytes)
        file.write(0, np.frombuffer(head.getvalue(), np.uint8))
        return cls(plan, file, ArrayBlock.of(index, seal=False))

    def write(self, row: int, array: Array, form: Form, shape: Shape | None = None) -> None:
        """Store a sample, as it is or encoded; of a file that is kept ``shape`` may be known.

        Raises:
            TypeError: it is of another type than the others.
            MemoryBudgetError: there is no room left within the limit.
            ShapesDifferError: it is not of the common shape, or has more or fewer dimensions than
                the others.
            CacheError: the disk is full.
        """
        spec = self.plan.spec
        coder = self.plan.coder
        data = np.ascontiguousarray(array)
        if isinstance(coder, SourceDecoder):
            shape = shape or coder.sample(data.data).shape
        else:
            shape = array.shape  # of no axes too, where ``data`` has one
            if data.dtype != spec.dtype or form != spec.form:
                raise TypeError(
                    f"it is of {data.dtype} {form}, the others are of {spec.dtype} {spec.form}; "
                    "give all samples one type in prepare="
                )
            if coder is not None:
                data = np.frombuffer(coder.encode(data.reshape(shape)), np.uint8)
        dimensions = self.plan.dimensions
        if spec.shape not in (None, shape) or len(shape) != dimensions:
            others = spec.shape or f"{dimensions} dimensions"
            raise ShapesDifferError(
                f"sample {row} has shape {shape}, those before it {others}; give all samples as "
                "many dimensions in prepare="
            )
        index = self.index
        if "sizes" in index:
            index["offsets"][row] = self._take(data.nbytes)
            index["sizes"][row] = data.nbytes
            index["shapes"][row] = shape
        self.file.write(index["offsets"][row].item(), data)
        if "sums" in index:
            index["sums"][row] = checksum(data.reshape(-1).view(np.uint8))

    def _take(self, size_bytes: int) -> int:
        """The first byte of so many that are nobody else's."""
        coder = self.plan.coder
        limit_bytes = self.plan.limit_bytes
        align_bytes = ALIGN_BYTES if coder is None else 1
        used = self.index[_USED]
        with self.index.block.hold(0):
            start: int = used.item()
            end = start + -(-max(size_bytes, 1) // align_bytes) * align_bytes
            if end > limit_bytes:
                what = "prepared samples of many shapes"
                if coder is not None:
                    what = f"samples encoded by codec={coder.name!r}"
                raise MemoryBudgetError(
                    f"{what} need more than the {format_bytes(limit_bytes)} that is free"
                )
            if end > self.file.reserved_bytes():
                self.file.resize(min(end + end // 32, limit_bytes))
            used[0] = end
        return start

    def finish(self, rows: Array) -> Store:
        """Seal the file, and give the samples in these rows, all that were written, as a store."""
        self.index.pop("is_there", None)
        if not self.plan.is_table:
            used_bytes = self.index.pop(_USED).item()
            self.file.resize(max(used_bytes, 1))  # nothing cannot be mapped
        self.file.seal()
        index = ArrayBlock.of({name: column[rows] for name, column in self.index.items()})
        self.index.close()
        return Store((self.file,), self.plan.spec, index, self.plan.coder)

    def close(self) -> None:
        """Give up what was written, a file on disk included. Idempotent."""
        self.file.close()
        self.index.close()
        if self.plan.path is not None:
            self.plan.path.unlink(missing_ok=True)


_Opened = TypeVar("_Opened", bound="Store | Writer | Block")


def open_all(opening: Iterable[_Opened]) -> list[_Opened]:
    """All that an iterable opens; none stays open where one cannot be."""
    opened = []
    with contextlib.ExitStack() as cleanup:
        for each in opening:
            cleanup.callback(each.close)
            opened.append(each)
        cleanup.pop_all()
    return opened


# From a source to the writers of its samples' parts


class WritePath(NamedTuple):
    """The way of samples from their source to the writers of their parts.

    ``first_index`` is the sample of row 0.
    """

    path: ReadPath
    writers: list[Writer]
    first_index: int = 0

    @classmethod
    def open(cls, path: ReadPath, plans: Sequence[WriterPlan], indices: range) -> WritePath:
        """With a new writer for each part of these samples."""
        writers = open_all(Writer.open(plan, len(indices)) for plan in plans)
        if any(isinstance(plan.coder, SourceDecoder) for plan in plans):
            assert isinstance(path.source, FileSource)
            # Files as they are; what the one expects the other reads.
            path = ReadPath(replace(path.source, loader=None), Steps(()), path.shape)
        return cls(path, writers, indices[0])

    def write(self, indices: Sequence[int]) -> Written:
        """Read, prepare and write samples."""
        self.path.source.expect(indices)
        written = Written({}, {})
        parts = len(self.writers)
        runs = read_samples(self.path, indices)
        for index, read in zip(indices, itertools.chain.from_iterable(runs), strict=True):
            row = index - self.first_index
            try:
                if isinstance(read, SampleError):
                    raise read
                try:
                    if len(read.parts) != parts:
                        raise TypeError(
                            f"it has {len(read.parts)} parts among samples of {parts}; give all "
                            "samples one type in prepare="
                        )
                    for writer, (array, form) in zip(self.writers, read.parts, strict=True):
                        writer.write(row, array, form, self.path.shape)
                except NO_FAULT_OF_A_SAMPLE:
                    raise
                except Exception as cause:  # encoders raise anything; all of it is named and kept
                    raise sample_error(self.path.source.path(index), index, cause) from cause
                written.targets[row] = read.target
            except SampleError as error:
                written.errors[row] = error.with_traceback(None)  # which holds this frame
        return written

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class Written(NamedTuple):
    """The targets of samples that were written, and what is wrong with the others, by row."""

    targets: dict[int, Any]
    errors: dict[int, SampleError]


def needs_processes(path: ReadPath, plans: Sequence[WriterPlan]) -> bool:
    """Whether preparing samples takes the GIL, because somebody else's code does it."""
    return path.by_core is None or any(getattr(plan.coder, "is_own", False) for plan in plans)


def is_thread_safe(path: ReadPath, plans: Sequence[WriterPlan]) -> bool:
    """True if no code of the user's reads, prepares or encodes samples.

    A user's dataset or function may keep something from one line to the next, such as the position
    of a file, and torch calls it from one thread only.
    """
    is_own = path.source.opening is None or not all(map(known_name, path.prepare.steps))
    return not is_own and not any(getattr(plan.coder, "is_own", False) for plan in plans)


# All now


def ingest(
    path: ReadPath, plans: Sequence[WriterPlan], indices: range, options: Options
) -> tuple[list[Store], Written]:
    """Fill stores with samples of a source, each read once: sealed ones, one for each part.

    Args:
        path: that samples are read by.
        plans: of each part of samples.
        indices: of the samples, in the order of the stores' rows.
        options: of the dataset.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        MemoryBudgetError: samples turned out larger than the writers may store.
        IngestError: a worker died.
        ShapesDifferError: a sample has another shape than planned; see ``write_any_shapes``.
    """
    if options.on_error == "skip":
        path = path._replace(shape=None)  # files are opened, to leave some out
    size = _FETCHED_AT_ONCE if path.source.is_remote else _AT_ONCE
    tasks = [indices[first : first + size] for first in range(0, len(indices), size)]
    all_written = Written({}, {})
    with contextlib.ExitStack() as cleanup:
        to_write = WritePath.open(path, plans, indices)
        cleanup.callback(to_write.close)
        done = run_tasks(
            to_write.write,
            tasks,
            min(ingest_workers(options), len(tasks)),
            forks=needs_processes(path, plans),
            is_thread_safe=is_thread_safe(path, plans),
            cores=options.cores,
        )
        bar = progress_bar(len(indices), f"preparing {len(indices):,} images")
        with contextlib.closing(done), bar:
            for targets, errors in done:
                for error in errors.values():
                    if options.on_error == "raise":
                        raise error
                    # Its text tells the cause, whose frames hold what is open here.
                    error.__cause__ = error.__context__ = None
                all_written.targets.update(targets)
                all_written.errors.update(errors)
                check_skipped(all_written.errors, len(indices))
                bar.update(len(targets) + len(errors))
        kept = np.array(list(all_written.targets), np.int64)
        stores = [writer.finish(kept) for writer in to_write.writers]
        cleanup.pop_all()
    return stores, all_written


def ingest_workers(options: Options) -> int:
    if options.prepare_workers is None:
        return limits.usable_cores(len(options.cores) or None)
    return options.prepare_workers


_SKIPPED_AT_LEAST = 10
"""That may be left out of any dataset, however few samples it has."""
_SKIPPED_IN_A_ROW = 100
"""A folder that is gone, most likely."""


def check_skipped(errors: dict[int, SampleError], count: int) -> None:
    """Raise IngestError where ``on_error="skip"`` would leave out more than single samples.

    ``errors``: by number of the sample, the latest one last; ``count``: of all samples.
    """
    latest = next(reversed(errors), 0)
    in_a_row = range(latest, latest - _SKIPPED_IN_A_ROW, -1)
    if len(errors) > max(_SKIPPED_AT_LEAST, count // 100):
        found = f"{len(errors):,} of {count:,} samples cannot be prepared, more than 1 %"
    elif all(row in errors for row in in_a_row):
        found = f"{_SKIPPED_IN_A_ROW} samples in a row, up to {latest}, cannot be prepared"
    else:
        return
    first = errors[min(errors)]
    raise IngestError(
        f"on_error='skip' leaves out single damaged samples, but {found}. The first: {first}"
    ) from first


# Each on its first read


class LazyStore(Store):
    """Samples of one shape, each of which is prepared and written by whoever reads it first.

    Others who want the same one wait. A reader that dies leaves it to the next one.
    """

    def __init__(self, to_write: WritePath) -> None:
        [writer] = to_write.writers
        super().__init__((writer.file,), writer.plan.spec, writer.index)
        self._to_write = to_write
        self._is_there = writer.index["is_there"]  # (N,), for every process to see

    def expect(self, indices: Sequence[int]) -> None:
        missing = [index for index in indices if not self._is_there[index]]
        self._to_write.path.source.expect(missing)

    def filled_share(self, index_B: Array | None = None) -> float:
        is_there = self._is_there if index_B is None else self._is_there[index_B]
        return float(np.count_nonzero(is_there) / max(is_there.size, 1))

    def ensure(self, index_B: Array) -> None:
        """See to it that samples are there.

        Raises:
            SampleError: one cannot be read or prepared; what is there of the others stays.
        """
        missing = np.unique(index_B[~self._is_there[index_B]]).tolist()
        if not missing:
            return
        with self.index.block.hold(*missing):
            left = [index for index in missing if not self._is_there[index]]
            written = self._to_write.write(left)
            self._is_there[list(written.targets)] = True
        for error in written.errors.values():
            raise error

    def close(self) -> None:
        super().close()
        self._to_write.close()

    def __reduce__(self) -> Any:
        return LazyStore, (self._to_write,)
