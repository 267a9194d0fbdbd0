"""The reader of an epoch: it reads batches, and is frozen when the epoch begins.

A batch has a column for each view of the images, or one of images and one of masks. The core reads
a whole column if all samples come out in the same shape. Otherwise, and if samples are not stored,
they are read one by one. Unknown steps run on each sample, and then the core runs on their results.
A single sample is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from fastdata.datasets.batch import SampleBatch
from fastdata.datasets.buffers import allocate_batch, new_buffer, rows_of
from fastdata.datasets.column import Column
from fastdata.datasets.mixed_sizes import check_alike
from fastdata.datasets.reading import Reading
from fastdata.datasets.visits import IndexBatch
from fastdata.errors import ChannelsError, MixedSizesError, SampleError
from fastdata.faults import fault_of, sample_error
from fastdata.pixels.arrays import Array
from fastdata.pixels.core.calls import Blending
from fastdata.pixels.samples import batch_of_form, without_exif
from fastdata.pixels.steps import Step
from fastdata.sources.files import FileSource
from fastdata.sources.source import with_index
from fastdata.stores.preparer import NO_FAULT_OF_A_SAMPLE, open_files

if TYPE_CHECKING:
    from fastdata.datasets.buffers import Allocate, Output


class Reader(Reading):
    """Reads batches of the samples that it holds. Safe to use from several threads at once."""

    @cached_property
    def without_cast(self) -> tuple[Reader, list[Step | None]]:
        """A reader without the final float casts, and the casts. Needs ``obstacle`` to be None."""
        columns, casts = zip(*map(Column.without_cast, self.columns), strict=True)
        return replace(self, columns=columns), list(casts)

    # Batches and items

    def __call__(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> Any:
        """Return a whole batch: images (B, *shape) and collated targets.

        ``obstacle`` must be None. The images are in one piece of memory from ``allocate``.
        """
        return self.to_batch(self.read_batch(batch, allocate, self.targets.collated))

    def to_batch(self, columns: list[Any]) -> Any:
        """Turn the columns of ``read_batch`` into a batch as ``default_collate`` returns it."""
        index_B = None
        if self.has_index:
            *columns, index_B = columns
        *views, targets = columns
        images = views if self.plan.views else views[0]  # even a single view is in a list
        keys = self.stored.samples.keys
        batch = [images, targets] if keys is None else keys.join(images, targets, list)
        return batch if index_B is None else with_index(batch, index_B, list)

    def items(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> list[Any]:
        """Return a ``SampleBatch`` if samples are pairs with images of one shape, else a list."""
        columns = self._read_columns(batch, allocate, is_alone=False)
        images, *_, targets = columns
        is_pair = self.keys is None and not self.has_index
        if self.plan.views or not is_pair or not isinstance(images, torch.Tensor):
            return self._to_items(columns)
        if self.has_target_column:
            kind, target_kind = self._classes
            return SampleBatch(images, targets, rows_of(targets, target_kind), kind)
        return SampleBatch(images, None, targets, self._classes[0])

    def item(self, batch: IndexBatch) -> Any:
        """Return the item of a batch of one. Its sample may have any shape."""
        return self._to_items(self._read_columns(batch, new_buffer, is_alone=self._are_ragged))[0]

    def _to_items(self, columns: list[Any]) -> list[Any]:
        """Return the items of a batch."""
        if self.has_index:
            *columns, index_B = columns
            indices = torch.as_tensor(index_B).tolist()
            return list(map(with_index, self._without_index(columns), indices))
        return self._without_index(columns)

    def _without_index(self, columns: list[Any]) -> list[Any]:
        *views, targets = [
            rows_of(column, kind) if isinstance(column, torch.Tensor) else column
            for column, kind in zip_longest(columns, self._classes)
        ]
        images: Iterable[Any] = views[0]
        if self.plan.views:
            images = map(self.plan.views_type, zip(*views, strict=True))
        pairs: Iterable[Any] = zip(images, targets, strict=True)
        if self.pair_transform is not None:
            pairs = map(self.pair_transform, images, targets)
        keys = self.stored.samples.keys
        return list(pairs) if keys is None else [keys.join(*pair) for pair in pairs]

    def _read_columns(self, batch: IndexBatch, allocate: Allocate, *, is_alone: bool) -> list[Any]:
        """Read a batch as ``read_batch`` does, or else as lists of samples.

        With ``is_alone``, samples are read one by one, because they may differ in shape.
        """
        sources = None
        if self.obstacle_if_alike is None and not is_alone:
            if not self.outputs:
                sources = self.open(batch)
            with suppress(MixedSizesError):
                return self.read_batch(batch, allocate, self.targets.of_each, sources)
        targets = None
        if self.programs:
            is_alone = is_alone or not self.outputs
            columns = self._read_served(batch, sources, is_alone=is_alone)
        else:
            if self.stored.is_remote:
                self.expect(batch)
            read = self._read_source if self.kept is None else self.kept.read
            pairs = map(read, batch.positions.tolist())
            samples, targets = map(list, zip(*pairs, strict=True))
            columns = [samples] * len(self.columns)  # each view begins with the same samples
        if self.kept is not None and not self.is_upright:
            # Stored images have lost their EXIF data, which the user's steps may look for.
            columns = [list(map(without_exif, samples)) for samples in columns]
        if self.pair_transform is None:
            if len(columns) > 1:
                allocate = new_buffer  # a ring leases only one piece of memory for a batch
            columns = [
                column.finish(samples, batch, allocate)
                for column, samples in zip(self.columns, columns, strict=True)
            ]
        if not self.has_target_column:
            columns.append(self.targets.of_each(batch, targets))
        if self.has_index:
            columns.append(batch.positions.tolist())
        return columns

    def _read_served(
        self, batch: IndexBatch, sources: Sequence[Any] | None, *, is_alone: bool
    ) -> list[list[Any]]:
        """Return the samples of each column after the batch ops."""
        if not is_alone:
            outs = allocate_batch(len(batch), self.outputs, new_buffer)
            self.read_into(outs, batch)
            rows = [[out[b, ...] for b in range(len(out))] for out in outs]
        elif self.kept is not None:
            with self.kept.naming_damage():
                rows = [column.read_alone(self.kept, batch) for column in self.columns]
        else:
            [images] = sources or self.open(batch)
            draws = batch.positions, batch.visits, batch.seed
            rows = [program.run_each(images, *draws) for program in self.programs]
        return list(map(Column.show, self.columns, rows))

    def _read_source(self, index: int) -> tuple[Any, Any]:
        """Read and prepare a sample that is not stored; return sample and target."""
        source = self.stored.samples
        try:
            sample, target = source.read(index)
        except NO_FAULT_OF_A_SAMPLE:
            raise
        except Exception as cause:
            # The user's own dataset raises its own errors.
            is_file = isinstance(source, FileSource) or isinstance(cause, OSError)
            if is_file or fault_of(cause) == "machine":
                raise sample_error(source.path(index), index, cause) from cause
            raise
        return self.prepare(sample), target

    # Whole columns

    def read_batch(
        self,
        batch: IndexBatch,
        allocate: Allocate,
        targets_of: Callable[[IndexBatch], Any],
        sources: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Read the columns of a whole batch: images of each view, then the targets.

        Args:
            batch: indices of the samples, and the numbers that determine their draws.
            allocate: function that returns memory for the images.
            targets_of: function that returns the targets of a batch.
            sources: result of ``open``, if the caller has it.

        Raises:
            MixedSizesError: the samples come out in several shapes.
        """
        outputs = self.outputs
        if not outputs:  # the shape follows from the samples
            sources = sources or self.open(batch)
            outputs = self._outputs_of(batch, sources)
        is_last = batch.channels_last and self.can_write_channels_last
        outs = self.allocate(len(batch), outputs, allocate, channels_last=is_last)
        self.read_into(outs, batch, None, sources)
        columns = self.as_tensors(outs)
        if not self.has_target_column:
            columns.append(targets_of(batch))
        if self.has_index:
            columns.append(torch.tensor(batch.positions))
        return columns

    def allocate(
        self, count: int, outputs: list[Output], allocate: Allocate, *, channels_last: bool
    ) -> list[Array]:
        """Return an array (count, C, h, w) for each column; see ``allocate_batch``."""
        # Arrays (H, W, C) have this layout in any case, even if the user did not request it.
        lays_last = [True] * len(self.columns) if channels_last else self.are_hwc
        return allocate_batch(count, outputs, allocate, channels_last=lays_last)

    def as_tensors(self, outs: list[Array]) -> list[Any]:
        """Return tensors over the memory of ``allocate``, shaped like stacked samples."""
        # NumPy has no bfloat16, so each tensor is viewed as its real dtype.
        columns = list(map(torch.Tensor.view, map(torch.from_numpy, outs), self.dtypes))
        return list(map(batch_of_form, columns, self.kinds)) if self.has_arrays else columns

    def open(self, batch: IndexBatch) -> Sequence[Any]:
        """Return the sources of the parts of a batch: stores, or opened files."""
        if self.kept is not None:
            return self.kept.stores
        if self.stored.is_remote:
            self.expect(batch)
        indices = batch.positions.tolist()
        return (open_files(self.stored.samples, indices, upright=self.is_upright),)

    def shapes_of(self, batch: IndexBatch, sources: Sequence[Any]) -> list[Array]:
        """Return the shapes of a batch's samples after the batch ops, (B, D) for each column."""
        return [column.shapes_of(sources[column.part], batch.positions) for column in self.columns]

    def _outputs_of(self, batch: IndexBatch, sources: Sequence[Any]) -> list[Output]:
        """Return the shape and dtype of each column of a batch; see ``read_batch``."""
        shapes = self.shapes_of(batch, sources)
        for shapes_BD in shapes:
            check_alike(shapes_BD, lambda b: self.name_of(batch, b))
        pairs = zip(shapes, self.alike, strict=True)
        return [(tuple(shapes_BD[0].tolist()), dtype) for shapes_BD, (_, dtype) in pairs]

    def name_of(self, batch: IndexBatch, b: int) -> str:
        """Return the name of a sample of a batch for messages: its index and its file."""
        index = int(batch.positions[b])
        path = self.stored.samples.path(index)
        return f"sample {index}" if path is None else f"sample {index} ({path})"

    def read_into(
        self,
        outs: list[Array],
        batch: IndexBatch,
        rows_B: Array | None = None,
        sources: Sequence[Any] | None = None,
        blending: Blending | None = None,
    ) -> None:
        """Read a batch's images into arrays of ``allocate_batch``.

        Args:
            outs: array for each column.
            batch: indices of the samples, and the numbers that determine their draws.
            rows_B: row of the arrays for each sample, if it is not the sample's row in the batch.
            sources: result of ``open``, if the caller has it.
            blending: mix of each sample with another; a row is written as soon as both are read.
        """
        index_B = batch.positions
        kept = self.stored.kept
        if sources is None:
            if self.stored.is_remote:
                self.expect(batch)
            sources = self.open(batch) if kept is None else kept.stores
        pairs = list(zip(self.programs, outs, strict=True))
        try:
            for part, columns in self._columns_of_parts:
                # One call for all views, so that no sample is decoded twice.
                (program, out), *others = pairs[columns]
                source = sources[part]
                visits_B = batch.visits
                program.run(source, index_B, visits_B, batch.seed, out, rows_B, others, blending)
        except (SampleError, ChannelsError):
            # Entered only after an error: a context manager takes three calls in every batch.
            if kept is None:
                raise
            with kept.naming_damage():
                raise

    def expect(self, batch: IndexBatch) -> None:
        """Begin to fetch all samples of a batch at once, if they are remote."""
        if self.stored.filled_share() < 1:
            self.stored.samples.expect(batch.positions.tolist())
