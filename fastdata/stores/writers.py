"""From a source to stores, in memory or files, by any worker: all samples now, or on first read.

Samples are read, prepared and taken apart into parts, each of which a ``Writer`` puts into a store.

All at once by threads where the core prepares them, by processes where somebody else's code does.
Whatever happens, a killed worker or Ctrl-C included, no worker outlives it and unfinished memory is
freed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
from fastdata.machine import limits
from fastdata.machine.blocks import ArrayBlock, Block
from fastdata.machine.units import format_bytes
from fastdata.machine.workers import run_tasks
from fastdata.pixels.arrays import Array, Bytes, Shape
from fastdata.pixels.core import library
from fastdata.pixels.decode import OpenedImages
from fastdata.pixels.known import known_name
from fastdata.pixels.openings import Opening
from fastdata.pixels.plan import Step
from fastdata.pixels.program import Program
from fastdata.pixels.samples import Form, SampleSpec, is_image, is_pil, to_stored
from fastdata.pixels.split import plan_transform, split_upright
from fastdata.report import log, progress_bar
from fastdata.sources.files import FileSource
from fastdata.sources.source import Source
from fastdata.stores.readers import DiskFile, Layout, ShapesDifferError, Store, checksum
from fastdata.stores.source_codec import SourceDecoder

if TYPE_CHECKING:
    from fastdata.stores.codecs import Codec
    from fastdata.stores.prepare import Options

_FETCHED_AT_ONCE = 128
"""Samples that a worker asks a network for at once."""
RAGGED_ALIGN_BYTES = 64
"""Raw samples of many shapes begin at multiples of this."""
_GROWTH_BYTES = 1 << 18
"""The least by which a file grows. It grows by a 32nd of itself once that is more."""
_AT_ONCE = 16
"""Samples that are read together."""
NO_LIMIT = 1 << 62
_USED = "used bytes"
_Made = TypeVar("_Made")
_Answer = TypeVar("_Answer")


# Reading samples


class ReadSample(NamedTuple):
    """A prepared sample, taken apart.

    Attributes:
        number: index of the sample in its source.
        parts: values of each part, and what it was.
        target: without its images, which are parts; None for files, whose table has the targets.
        layout: tells how the parts are put together again.
    """

    number: int
    parts: Sequence[tuple[Array, Form]]
    target: Any
    layout: Layout


class SampleRun(NamedTuple):
    """Prepared samples of one shape, taken apart.

    Attributes:
        numbers: indices of the samples in their source.
        parts: values (n, *shape) of each part, and what it was.
        targets: see ``ReadSample``.
        layout: see ``ReadSample``.
    """

    numbers: Sequence[int]
    parts: Sequence[tuple[Array, Form]]
    targets: Sequence[Any]
    layout: Layout = Layout()

    def copies(self) -> list[ReadSample]:
        """Return each sample in memory of its own."""
        samples = []
        for k, number in enumerate(self.numbers):
            parts = [(values[k, ...].copy(), form) for values, form in self.parts]
            samples.append(ReadSample(number, parts, self.targets[k], self.layout))
        return samples


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of a transform that run one after the other; it pickles if they do."""

    steps: tuple[Step, ...]

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample


@dataclass(frozen=True)
class FilePreparer:
    """Prepares an image file by the compiled core: bytes to planes (C, h, w), uint8.

    Args:
        prepare: yields planes (n, C, h, w), uint8, for each run of opened images of one size. The
            memory is reused for the next run.
        opening: of the loader that this replaces.
        upright: True if images are first turned as their EXIF says.
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
    """Where samples come from, and what is done to each before it is stored.

    Attributes:
        source: reads the samples.
        prepare: steps that run on each of them.
        shape: of every prepared sample, if it follows from the steps.
        by_core: opens and prepares samples without the GIL; None if Python code does.
    """

    source: Source
    prepare: Steps
    shape: Shape | None = None
    by_core: FilePreparer | None = None

    @property
    def decoder(self) -> SourceDecoder | None:
        """What prepares a file's bytes; None for other samples, and for a user's own loader."""
        if self.by_core is not None:
            is_whole = not (self.prepare.steps or self.by_core.upright)
            return SourceDecoder(self.by_core, Steps(()), makes_jpeg_files=is_whole)
        opening = self.source.opening
        return None if opening is None else SourceDecoder(opening.decode, self.prepare)


def read_path(source: Source, steps: tuple[Step, ...]) -> ReadPath:
    """Choose how samples are read and prepared: by the core if it can run all steps on files."""
    as_written = ReadPath(source, Steps(steps))
    opening = source.opening
    # torchvision resizes tensors without the rounding between rows and columns that the core has.
    if opening is None or (steps and opening.form == "tensor"):
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
"""Errors that already name a sample, or that no sample is at fault for."""


@contextlib.contextmanager
def naming_sample(source: Source, index: int, *, is_read: bool = False) -> Iterator[None]:
    """Turn an error into one that names the sample's path and index; see ``sample_error``."""
    try:
        yield
    except NO_FAULT_OF_A_SAMPLE:
        raise
    except Exception as cause:  # user code and decoders raise anything; all of it is named and kept
        raise sample_error(source.path(index), index, cause, is_read=is_read) from cause


def open_files(source: FileSource, indices: Sequence[int], *, upright: bool) -> OpenedImages:
    """Read image files for the core.

    Raises:
        SampleError: a file cannot be read, or its image cannot be decoded.
    """
    try:
        files = source.read_files(indices)
    except OSError:  # of one file: read them one by one to find it
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


def read_samples(path: ReadPath, indices: Sequence[int]) -> Iterator[SampleRun | SampleError]:
    """Yield runs of prepared samples, in order, and the error in place of a sample that failed.

    A run may use the memory of the run before.
    """
    for first in range(0, len(indices), _AT_ONCE):
        group = indices[first : first + _AT_ONCE]
        done = 0
        if path.by_core is not None:
            # After an error the rest is read one by one, which tells whose error it is.
            with contextlib.suppress(SampleError, ValueError):
                for run in _read_together(path, path.by_core, group):
                    done += len(run.numbers)
                    yield run
        for index in group[done:]:
            try:
                run = _read_one(path, index)
            except SampleError as error:
                yield error
            else:
                yield run


def _read_together(
    path: ReadPath, by_core: FilePreparer, indices: Sequence[int]
) -> Iterator[SampleRun]:
    source = path.source
    assert isinstance(source, FileSource)
    images = open_files(source, indices, upright=by_core.upright)
    form = by_core.opening.form
    first = 0
    for planes in by_core.prepare(images):
        last = first + len(planes)
        yield SampleRun(indices[first:last], [(planes, form)], [None] * len(planes))
        first = last


def _read_one(path: ReadPath, index: int) -> SampleRun:
    """Read and prepare a sample, and take it apart; images of its target come last."""
    with naming_sample(path.source, index):
        sample, target = path.source.read(index)
    with naming_sample(path.source, index, is_read=True):
        prepared = path.prepare(sample)
        is_tuple = isinstance(prepared, (tuple, list))
        parts = list(map(to_stored, prepared if is_tuple else [prepared]))
        if isinstance(path.source, FileSource):
            target = None
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
        return SampleRun(
            [index], [(values[None], form) for values, form in parts], [target], layout
        )


# Writers


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """One part of all samples, such as the image, as it is stored.

    Args:
        spec: of the samples as they are served; dense if all have one shape.
        dimensions: number of axes of each sample.
        codec: settings of the codec; None for raw samples.
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
        """True if raw samples are rows of one array, which on disk is a ``.npy`` file."""
        return self.codec is None and self.spec.is_dense


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterPlan(StoredPart):
    """A part of all samples, and how its store is written.

    Args:
        coder: encodes samples; None for raw ones. A ``SourceDecoder`` keeps the files' bytes as
            they are, and each is prepared when it is read.
        path: of the new file on disk; None for memory.
        limit_bytes: the most that may be reserved.
    """

    coder: Codec | SourceDecoder | None = None
    path: Path | None = None
    limit_bytes: int = NO_LIMIT


def write_any_shapes(
    write: Callable[[Sequence[WriterPlan]], _Made], plans: Sequence[WriterPlan]
) -> _Made:
    """Write samples as planned; if one has another shape, again with a shape for each."""
    with contextlib.suppress(ShapesDifferError):
        return write(plans)
    return write([replace(plan, spec=replace(plan.spec, shape=None)) for plan in plans])


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes samples into a file, from any thread of any process that it was sent to.

    In a table each sample has its place. Others are stored in the order in which they are written,
    and the file grows as their sizes become known.

    Args:
        plan: of the store.
        file: of the samples.
        index: of the store, as ``Store`` has it.
    """

    plan: WriterPlan
    file: Block
    index: ArrayBlock

    @classmethod
    def open(cls, plan: WriterPlan, length: int) -> Writer:
        """Create a file for so many samples; all of a table is reserved."""
        spec = plan.spec
        index: dict[str, Array] = {
            "offsets": np.zeros(length, np.int64),
            "sizes": np.zeros(length, np.int64),
            "shapes": np.zeros((length, plan.dimensions), np.int32),
            _USED: np.zeros(1, np.int64),
        }
        head = np.zeros(0, np.uint8)
        size_bytes = 1  # an empty file cannot be mapped
        if plan.is_table and spec.shape is not None:
            head = _array_head((length, *spec.shape), spec.dtype)
            size_bytes = head.size + length * spec.sample_bytes
            index["offsets"] += head.size + np.arange(length) * spec.sample_bytes
            index["sizes"] += spec.sample_bytes
            index["shapes"] += np.array(spec.shape, np.int32)
        if plan.path is None:
            index["is_there"] = np.zeros(length, np.bool_)  # for ``LazyStore``
            file = Block.create(size_bytes)
        else:
            index["sums"] = np.zeros(length, np.uint32)
            file = DiskFile.reserve(plan.path, size_bytes)
        file.write(0, head)
        return cls(plan, file, ArrayBlock.of(index, seal=False))

    def write(self, row: int, samples: Array, form: Form, shape: Shape | None = None) -> None:
        """Encode and store samples of one shape (n, *shape); more than one only in a table.

        Args:
            row: of the first sample in the store.
            samples: their values, or the bytes of a file for a ``SourceDecoder``.
            form: what they were.
            shape: of the prepared sample, if it is known before the file is decoded.

        Raises:
            TypeError: the samples have another type than the others.
            MemoryBudgetError: there is no room left within the limit.
            ShapesDifferError: they do not have the common shape, or have another number of
                dimensions than the others.
            CacheError: the disk is full.
        """
        plan = self.plan
        spec = plan.spec
        data = np.ascontiguousarray(samples)
        if isinstance(plan.coder, SourceDecoder):
            shape = shape or plan.coder.sample(data[0].data).shape
        else:
            shape = samples.shape[1:]
            if samples.dtype != spec.dtype or form != spec.form:
                raise TypeError(
                    f"it is of {samples.dtype} {form}, the others are of {spec.dtype} {spec.form}; "
                    "give all samples one type in prepare="
                )
            if plan.coder is not None:
                encoded = plan.coder.encode(data[0, ...])  # an array, if it has no axes, too
                data = np.frombuffer(encoded, np.uint8)[None]
        if spec.shape not in (None, shape) or len(shape) != plan.dimensions:
            others = spec.shape or f"{plan.dimensions} dimensions"
            raise ShapesDifferError(
                f"sample {row} has shape {shape}, those before it {others}; give all samples as "
                "many dimensions in prepare="
            )
        index = self.index
        if not plan.is_table:
            index["offsets"][row] = self._take(data.nbytes)
            index["sizes"][row] = data.nbytes
            index["shapes"][row] = shape
        self.file.write(index["offsets"][row].item(), data)
        if "sums" in index:
            count = len(data)
            octets = data.reshape(-1).view(np.uint8).reshape(count, data.nbytes // count)
            index["sums"][row : row + count] = list(map(checksum, octets))

    def _take(self, size_bytes: int) -> int:
        """Take so many bytes of the file for a sample; return the first of them."""
        coder = self.plan.coder
        limit_bytes = self.plan.limit_bytes
        align_bytes = RAGGED_ALIGN_BYTES if coder is None else 1
        used = self.index[_USED]
        # The file and what is used of it belong to all processes that write.
        with self.index.block.hold(0):
            start: int = used.item()
            end = start + -(-size_bytes // align_bytes) * align_bytes
            if end > limit_bytes:
                what = "prepared samples of many shapes"
                if coder is not None:
                    what = f"samples encoded by codec={coder.name!r}"
                raise MemoryBudgetError(
                    f"{what} need more than the {format_bytes(limit_bytes)} that is free"
                )
            if end > self.file.reserved_bytes():
                self.file.resize(min(end + max(end // 32, _GROWTH_BYTES), limit_bytes))
            used[0] = end
        return start

    def finish(self, rows: Array) -> Store:
        """Seal the file; return a store of the samples in these rows, all that were written."""
        self.index.pop("is_there", None)
        used_bytes = self.index.pop(_USED).item()
        if not self.plan.is_table:
            self.file.resize(max(used_bytes, 1))
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


def _array_head(shape: Shape, dtype: str) -> Bytes:
    """Return what ``np.save`` writes before such an array: a multiple of 64 bytes."""
    head = io.BytesIO()
    described = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, described)
    return np.frombuffer(head.getvalue(), np.uint8)


_Opened = TypeVar("_Opened", bound="Store | Writer | Block")


def open_all(opening: Iterable[_Opened]) -> list[_Opened]:
    """Open all that an iterable yields; if one cannot be opened, close the others."""
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

    Attributes:
        path: reads and prepares samples.
        writers: one for each part.
        first_index: the sample of row 0.
    """

    path: ReadPath
    writers: list[Writer]
    first_index: int = 0

    @classmethod
    def open(cls, path: ReadPath, plans: Sequence[WriterPlan], indices: range) -> WritePath:
        """Open a writer for each part of these samples."""
        writers = open_all(Writer.open(plan, len(indices)) for plan in plans)
        if any(isinstance(plan.coder, SourceDecoder) for plan in plans):
            assert isinstance(path.source, FileSource)
            # Files are stored as they are; the copy shares the requests that are under way.
            path = ReadPath(replace(path.source, loader=None), Steps(()), path.shape)
        return cls(path, writers, indices[0])

    def write(self, indices: Sequence[int]) -> Written:
        """Read, prepare and write samples; this process must have the writers."""
        source = self.path.source
        source.expect(indices)
        written = Written({}, {})
        are_tables = all(writer.plan.is_table for writer in self.writers)
        for read in read_samples(self.path, indices):
            if isinstance(read, SampleError):
                written.errors[read.index - self.first_index] = read.with_traceback(None)
                continue
            count = len(read.numbers)
            # Tables take neighbours in one call.
            are_neighbours = read.numbers[-1] - read.numbers[0] == count - 1
            size = count if are_tables and are_neighbours else 1
            for first in range(0, count, size):
                row = read.numbers[first] - self.first_index
                targets = read.targets[first : first + size]
                parts = [(values[first : first + size], form) for values, form in read.parts]
                try:
                    with naming_sample(source, read.numbers[first]):
                        self._write_parts(row, parts)
                except SampleError as error:
                    written.errors[row] = error.with_traceback(None)  # which holds this frame
                else:
                    written.targets.update(enumerate(targets, row))
        return written

    def _write_parts(self, row: int, parts: Sequence[tuple[Array, Form]]) -> None:
        if len(parts) != len(self.writers):
            raise TypeError(
                f"it has {len(parts)} parts among samples of {len(self.writers)}; give all "
                "samples one type in prepare="
            )
        for writer, (values, form) in zip(self.writers, parts, strict=True):
            writer.write(row, values, form, self.path.shape)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class Written(NamedTuple):
    """Targets of the samples that were written, and errors of the others, by row."""

    targets: dict[int, Any]
    errors: dict[int, SampleError]


def ingest(
    path: ReadPath, plans: Sequence[WriterPlan], indices: range, options: Options
) -> tuple[list[Store], Written]:
    """Fill sealed stores, one for each part, with samples of a source; each is read once.

    Args:
        path: reads and prepares the samples.
        plans: of the writers, one for each part.
        indices: of the samples, in the order of the stores' rows.
        options: of the dataset.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        MemoryBudgetError: samples are larger than expected, and exceed the writers' limit.
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
        done = run_preparing(to_write.write, tasks, path, plans, options)
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


def run_preparing(
    job: Callable[[Any], _Answer],
    tasks: Sequence[Any],
    path: ReadPath,
    plans: Sequence[WriterPlan],
    options: Options,
) -> Generator[_Answer, None, None]:
    """Run a job that prepares samples over tasks, in threads or processes; see ``run_tasks``."""
    from fastdata.stores.codecs import OwnCodec  # most scripts need no codec

    has_own_codec = any(isinstance(plan.coder, OwnCodec) for plan in plans)
    # A user's dataset or function may keep something from one line to the next, such as the
    # position of a file, and torch calls it from one thread only.
    has_own_steps = path.source.opening is None or not all(map(known_name, path.prepare.steps))
    return run_tasks(
        job,
        tasks,
        min(ingest_workers(options), len(tasks)),
        forks=path.by_core is None or has_own_codec,  # Python code holds the GIL
        is_thread_safe=not has_own_steps and not has_own_codec,
        cores=options.cores,
    )


def ingest_workers(options: Options) -> int:
    """Return how many workers prepare samples, at most."""
    if options.prepare_workers is None:
        return limits.usable_cores(len(options.cores) or None)
    return options.prepare_workers


_MOST_SKIPPED = 10
"""So many may be left out of any dataset; of a large one 1 %."""
_SKIPPED_IN_A_ROW = 100
"""So many in a row mean that a folder is gone, most likely."""


def check_skipped(errors: dict[int, SampleError], count: int) -> None:
    """Raise IngestError if ``on_error="skip"`` would leave out more than single samples.

    Args:
        errors: by number of the sample, the latest one last.
        count: of all samples.
    """
    latest = next(reversed(errors), 0)
    in_a_row = range(latest, latest - _SKIPPED_IN_A_ROW, -1)
    if len(errors) > max(_MOST_SKIPPED, count // 100):
        found = f"{len(errors):,} of {count:,} samples cannot be prepared, more than 1 %"
    elif all(row in errors for row in in_a_row):
        found = f"{_SKIPPED_IN_A_ROW} samples in a row, up to {latest}, cannot be prepared"
    else:
        return
    first = errors[min(errors)]
    raise IngestError(
        f"on_error='skip' leaves out single damaged samples, but {found}. The first: {first}"
    ) from first


class LazyStore(Store):
    """Samples of one shape, each of which is prepared and written by its first reader.

    Other readers of the same sample wait. A reader that dies leaves it to the next one.
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
        """Prepare and write the samples that are not there yet.

        Raises:
            SampleError: a sample cannot be read or prepared; the others stay.
        """
        missing = np.unique(index_B[~self._is_there[index_B]]).tolist()
        if not missing:
            return
        # The kernel frees these locks if this process is killed: the next reader goes on.
        with self.index.block.hold(*missing):
            # Another reader may have prepared some before it gave up its locks.
            left = [index for index in missing if not self._is_there[index]]
            written = self._to_write.write(left)
            # Set after the pixels are written, so that a reader who sees it finds them.
            self._is_there[list(written.targets)] = True
        for error in written.errors.values():
            raise error

    def __reduce__(self) -> Any:
        return LazyStore, (self._to_write,)
