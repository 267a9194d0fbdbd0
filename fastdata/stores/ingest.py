"""Fill stores with the samples of a source, by threads or processes.

Threads prepare samples if the compiled core does the work, processes if Python code does. No worker
outlives the call, even if one is killed or the user presses Ctrl-C, and the memory of unfinished
stores is freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fastdata.errors import IngestError, SampleError
from fastdata.faults import OR_SKIP
from fastdata.machine import limits
from fastdata.machine.units import format_bytes
from fastdata.machine.workers import run_tasks
from fastdata.pixels.arrays import Array
from fastdata.pixels.known import known_name
from fastdata.pixels.samples import Form
from fastdata.report import progress_bar
from fastdata.sources.files import FileSource
from fastdata.stores.preparer import READ_AT_ONCE, Preparer, Steps, naming_sample, read_samples
from fastdata.stores.source_codec import SourceDecoder
from fastdata.stores.store import Store
from fastdata.stores.writer import Writer, open_all

if TYPE_CHECKING:
    from fastdata.stores.options import Options
    from fastdata.stores.writer import WriterPlan


_FETCHED_AT_ONCE = 128
"""Number of samples that a worker requests from a network at once."""
_MOST_SKIPPED = 10
"""Number of samples that may be left out of any dataset; of a large one, 1 % may."""
_SKIPPED_IN_A_ROW = 100
"""If this many neighbours cannot be prepared, most likely a whole folder is gone."""

_Task = TypeVar("_Task")
_Answer = TypeVar("_Answer")


class StoreFiller(NamedTuple):
    """Reads and prepares samples, and writes their parts to new stores.

    Attributes:
        preparer: reader and preparer of the samples.
        writers: writer of each part.
        first_index: index of the sample in row 0.
    """

    preparer: Preparer
    writers: list[Writer]
    first_index: int = 0

    @classmethod
    def open(cls, preparer: Preparer, plans: Sequence[WriterPlan], indices: range) -> StoreFiller:
        """Open a writer for each part of these samples."""
        writers = open_all(Writer.open(plan, len(indices)) for plan in plans)
        if any(isinstance(plan.coder, SourceDecoder) for plan in plans):
            assert isinstance(preparer.source, FileSource)
            # With loader=None the source returns the bytes of the files, which are stored. This
            # copy of the source shares the pending requests for remote files.
            preparer = Preparer(replace(preparer.source, loader=None), Steps(()), preparer.shape)
        return cls(preparer, writers, indices[0])

    def write(self, indices: Sequence[int]) -> Written:
        """Read, prepare and write samples; return their targets and errors."""
        source = self.preparer.source
        source.expect(indices)
        written = Written({}, {})
        are_tables = all(writer.plan.is_table for writer in self.writers)
        for read in read_samples(self.preparer, indices):
            if isinstance(read, SampleError):
                written.errors[read.index] = read.with_traceback(None)
                continue
            count = len(read.numbers)
            # Neighbours go to a table in one call, which is one write to the file. Otherwise
            # samples are written one by one, so that an error of an encoder belongs to one sample.
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
                    # The traceback would keep this frame alive, and with it the open writers.
                    written.errors[read.numbers[first]] = error.with_traceback(None)
                else:
                    written.targets.update(enumerate(targets, row))
        return written

    def _write_parts(self, row: int, parts: Sequence[tuple[Array, Form]]) -> None:
        if len(parts) != len(self.writers):
            raise TypeError(
                f"it has {len(parts)} parts, but other samples have {len(self.writers)}; let the "
                "dataset, or prepare= of CachedDataset, return the same number for all samples"
            )
        for writer, (values, form) in zip(self.writers, parts, strict=True):
            writer.write(row, values, form, self.preparer.shape)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class Written(NamedTuple):
    """Targets of the samples that were written, by row, and errors of the others, by index."""

    targets: dict[int, Any]
    errors: dict[int, SampleError]


def ingest(
    preparer: Preparer,
    plans: Sequence[WriterPlan],
    indices: range,
    options: Options,
    count: int,
) -> tuple[list[Store], Written]:
    """Fill sealed stores, one for each part, with samples of a source; each is read once.

    Args:
        preparer: reader and preparer of the samples.
        plans: plan for the writer of each part.
        indices: indices of the samples, in the order of the stores' rows.
        options: options of the dataset.
        count: number of all samples of the dataset. At most 1 % of them may be left out.

    Raises:
        SampleError: a sample cannot be prepared. It has the path and index of the sample.
        MemoryBudgetError: samples are larger than expected, and exceed the writers' limit.
        IngestError: a worker died.
        ShapesDifferError: a sample has another shape than planned; see ``write_any_shapes``.
    """
    if options.on_error == "skip":
        preparer = preparer._replace(shape=None)  # opens each file, to find those to leave out
    size = _FETCHED_AT_ONCE if preparer.source.is_remote else READ_AT_ONCE
    tasks = [indices[first : first + size] for first in range(0, len(indices), size)]
    all_written = Written({}, {})
    with contextlib.ExitStack() as cleanup:
        filler = StoreFiller.open(preparer, plans, indices)
        cleanup.callback(filler.close)
        done = run_preparing(filler.write, tasks, preparer, plans, options)
        bar = progress_bar(len(indices), f"preparing {len(indices):,} images")
        with contextlib.closing(done), bar:
            for targets, errors in done:
                for error in errors.values():
                    if options.on_error == "raise":
                        raise error
                    # The text names the cause. The cause itself would keep frames alive, and with
                    # them the stores that are open here.
                    error.__cause__ = error.__context__ = None
                all_written.targets.update(targets)
                all_written.errors.update(errors)
                check_skipped(all_written.errors, count)
                bar.update(len(targets) + len(errors))
            kept = np.array(list(all_written.targets), np.int64)
            stores = [writer.finish(kept) for writer in filler.writers]
            bar.set_description(f"prepared {len(kept):,} images", refresh=False)
            total_bytes = sum(store.size_bytes for store in stores)
            bar.set_postfix_str(
                f"{format_bytes(total_bytes)} in shared memory, {sizes_of(plans[0])}",
                refresh=False,
            )
        cleanup.pop_all()
    return stores, all_written


def sizes_of(images: WriterPlan) -> str:
    """Return a text with the size of the stored images, for the end of a progress bar."""
    shape = images.spec.shape
    if shape is None:
        return "kept at their own sizes"
    return f"kept at {'x'.join(map(str, shape[-2:]))}"


def run_preparing(
    job: Callable[[_Task], _Answer],
    tasks: Sequence[_Task],
    preparer: Preparer,
    plans: Sequence[WriterPlan],
    options: Options,
) -> Generator[_Answer, None, None]:
    """Run a job that prepares samples over tasks, in threads or processes; see ``run_tasks``."""
    coders = [plan.coder for plan in plans if plan.coder is not None]
    has_own_codec = False
    if coders:
        from fastdata.stores.codecs import OwnCodec  # not at the top: most scripts need no codec

        has_own_codec = any(isinstance(coder, OwnCodec) for coder in coders)
    # A user's dataset or function may keep state between two lines, such as the position in a file.
    # torch calls it from one thread only, so it need not be thread-safe.
    has_own_steps = preparer.source.opening is None or not all(
        map(known_name, preparer.prepare.steps)
    )
    return run_tasks(
        job,
        tasks,
        min(ingest_workers(options), len(tasks)),
        forks=preparer.by_core is None or has_own_codec,  # Python code holds the GIL
        is_thread_safe=not has_own_steps and not has_own_codec,
        cores=options.cores,
    )


def ingest_workers(options: Options) -> int:
    """Return the largest number of workers that may prepare samples."""
    if options.prepare_workers is None:
        return limits.usable_cores(len(options.cores) or None)
    return options.prepare_workers


def check_skipped(errors: dict[int, SampleError], count: int) -> None:
    """Raise an IngestError if ``on_error="skip"`` would leave out too many samples.

    Args:
        errors: error of each sample that was left out, by its index; the latest is last.
        count: number of all samples of the dataset.
    """
    latest = next(reversed(errors), 0)
    in_a_row = range(latest, latest - _SKIPPED_IN_A_ROW, -1)
    if len(errors) > max(_MOST_SKIPPED, count // 100):
        found = f"{len(errors):,} of {count:,} samples cannot be prepared, more than 1 %"
    elif all(index in errors for index in in_a_row):
        found = f"{_SKIPPED_IN_A_ROW} samples in a row, up to {latest}, cannot be prepared"
    else:
        return
    first = errors[min(errors)]
    raise IngestError(
        f"on_error='skip' is for single damaged samples, but {found}. The first: "
        f"{str(first).replace(OR_SKIP, '')}"
    ) from first
