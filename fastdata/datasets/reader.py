"""Reading: what an epoch is served from, frozen when it begins, and the memory of batches.

A ``Reader`` holds samples, program and targets as one value, so that nothing that is assigned to
the dataset meanwhile reaches an epoch, and the memory that samples lie in. ``compile_reader`` makes
it when a dataset is made, when another transform is assigned, and when an epoch or ``dataset[i]``
follows a change in place. Who reads takes it from a ``ReaderHandle`` for as long as one batch
takes; closing the dataset empties that, and the memory goes with the last batch that is being read.

There is one road. A batch has a column for each view of its samples, or for images and masks. A
column is read whole by the core where all samples are served in one shape; else they are read one
by one, as those are that are kept nowhere. Steps that are not known run on each sample then, and
the core again on what they leave. One sample is a batch of one.

Fresh memory makes batches slow: every page is faulted in and cleared before it is written. A
``BatchRing`` hands out the same few buffers again and again, once their last tensors have died.

Shape letters: B batch, C channels, H W size sent, h w size served.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.datasets.batch import IndexBatch, SampleBatch, rows_of
from fastdata.errors import ChannelsError, SampleError, fault_of, sample_error
from fastdata.machine.tables import SampleTable, collate_targets
from fastdata.pixels.arrays import Array, Shape
from fastdata.pixels.core import library
from fastdata.pixels.core.calls import Samples
from fastdata.pixels.plan import PairStep, Step, TransformPlan
from fastdata.pixels.program import Program
from fastdata.pixels.samples import (
    SampleSpec,
    addresses_of,
    decoded_shape,
    present,
    shown_class,
    tensor_class,
    to_stored,
    without_exif,
)
from fastdata.pixels.split import plan_pairs, plan_transform, split_upright
from fastdata.pixels.steps import Step as CoreStep
from fastdata.pixels.transform_keys import describe_steps
from fastdata.sources.files import FileSource
from fastdata.sources.source import ItemKeys, Source
from fastdata.stores.kept import KeptSamples
from fastdata.stores.options import Options
from fastdata.stores.prepare import Prepared
from fastdata.stores.read_path import NO_FAULT_OF_A_SAMPLE, Steps, open_files
from fastdata.stores.store import Store

ALIGN_BYTES = 64
_DECODED = SampleSpec(shape=None, dtype="uint8", form="pil")

Output = tuple[Shape, np.dtype[Any]]
Allocate = Callable[[int], memoryview]


def allocate_batch(
    count: int, outputs: list[Output], allocate: Allocate, *, channels_last: bool = False
) -> list[Array]:
    """Memory for so many samples of each shape and dtype, all in one piece.

    (B, C, h, w) may lie as (B, h, w, C).
    """
    pieces = []
    end = 0
    for shape, dtype in outputs:
        length = count * math.prod(shape)
        pieces.append((shape, dtype, length, end))
        end += -(-length * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
    memory = allocate(end)
    arrays = []
    for shape, dtype, length, start in pieces:
        values = np.frombuffer(memory, dtype, length, start)
        if channels_last:
            channels, height, width = shape
            arrays.append(values.reshape(count, height, width, channels).transpose(0, 3, 1, 2))
        else:
            arrays.append(values.reshape(count, *shape))
    return arrays


def new_buffer(size_bytes: int) -> memoryview:
    """Memory that nobody takes back."""
    return np.empty(size_bytes, np.uint8).data


@dataclass(frozen=True)
class LeadingSteps:
    """The leading steps of a transform that samples are stored after.

    Attributes:
        count: number of steps.
        key: text that is equal for steps that do the same; empty for none.
        text: shown in errors.
    """

    count: int = 0
    key: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """How the samples of a dataset were prepared.

    Attributes:
        options: of the dataset.
        prepared: what is kept, and why.
        source: what samples are read from, to prepare them again; copies in other processes may not
            know it where samples are kept.
        files: paths and targets, where they are known beforehand.
        first_steps: the dataset's ``prepare=`` and ``resize=``, which run before the transform.
        after: the steps of the transform that samples are stored after, or did not fit after; None
            before they are prepared.
        is_upright: whether samples were turned as their EXIF says, so that nothing of it is missed.
        is_remote: whether samples that are not kept are fetched from behind a URL.
    """

    options: Options
    prepared: Prepared
    source: Source | None = None
    files: SampleTable | None = None
    first_steps: tuple[Step, ...] = ()
    after: LeadingSteps | None = None
    is_upright: bool = False
    is_remote: bool = False

    @cached_property
    def kept(self) -> KeptSamples | None:
        return self.prepared.kept

    @property
    def obstacle(self) -> str | None:
        """Why no step runs on whole batches, whatever the transform; None if some may."""
        return library.obstacle() if self.options.batch_ops else "batch_ops=False"

    @cached_property
    def samples(self) -> Any:
        """Kept ones, or what they are read from; None once the dataset is closed."""
        return self.source if self.kept is None else self.kept

    @cached_property
    def table(self) -> SampleTable | None:
        """Paths and targets; None where they are asked of the source."""
        return self.files if self.kept is None else self.kept.table

    def filled_share(self, index: Array | None = None) -> float:
        """Share of the samples, or of those of ``index``, that are kept already."""
        return 0.0 if self.kept is None else self.kept.images.filled_share(index)


@dataclass(frozen=True)
class Transforms:
    """The user's transforms of a dataset's items.

    Attributes:
        of_sample: called with each sample.
        of_target: called with each target.
        of_both: called with sample and target together, instead of the other two.
    """

    of_sample: Step | None = None
    of_target: Step | None = None
    of_both: PairStep | None = None


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of all samples.

    Attributes:
        stored: the samples.
        transform: the user's ``target_transform``, if it is called with targets alone.
    """

    stored: Stored
    transform: Step | None

    @cached_property
    def numbers(self) -> Array | None:
        """The targets of all samples, if each is a number that is served as it is."""
        table = self.stored.table
        kept = self.stored.kept
        # A table has numbers, too, where targets are images.
        has_images = kept is not None and kept.target_parts > 0
        if has_images or self.transform is not None or table is None:
            return None
        return table.columns["targets"] if table.target_kind == "number" else None

    @property
    def _listing(self) -> KeptSamples | SampleTable | None:
        """The list of targets; None if a target is known only once its sample is read."""
        kept = self.stored.kept
        return self.stored.table if kept is None else kept

    def stored_target(self, index: int) -> Any:
        """Return the target of one sample before ``transform``."""
        listing = self._listing
        return self.stored.samples.read(index)[1] if listing is None else listing.target(index)

    def of_each(self, batch: IndexBatch, read: list[Any] | None = None) -> list[Any]:
        """Return the target of each sample in a batch.

        ``read`` are those before ``transform``, if they were read together with the samples.
        """
        if self.numbers is not None:
            return list(self.numbers[batch.positions].tolist())
        targets = list(map(self.stored_target, batch.positions.tolist())) if read is None else read
        return targets if self.transform is None else list(map(self.transform, targets))

    def collated(self, batch: IndexBatch) -> Any:
        """Return what ``default_collate`` makes of the targets of a batch."""
        if self.numbers is not None:
            return torch.from_numpy(self.numbers[batch.positions])
        if self._listing is None or self.transform is not None:
            return collate_targets(self.of_each(batch))
        return self._listing.collated_targets(batch.positions)


class Column(NamedTuple):
    """One column of a batch: a view of the images, or their masks.

    Attributes:
        plan: of the transform.
        program: reads samples and runs the batch ops; None where samples are read one by one.
        part: number of the stored part of samples that the program reads.
        shape: of any sample before the batch ops.
        output: shape and dtype of every sample served; None where they differ.
        last: runs the ops behind steps that are not known.
    """

    plan: TransformPlan
    program: Program | None = None
    part: int = 0
    shape: Shape = ()
    output: Output | None = None
    last: Program | None = None

    def without_cast(self) -> tuple[Column, CoreStep | None]:
        """Return this column without its final float cast, and that cast (None without one)."""
        assert self.program is not None
        program, cast = self.program.without_cast()
        output = program.output(self.shape)  # the cast may make three channels of one
        return self._replace(program=program, output=output), cast

    def read_alone(self, kept: KeptSamples, batch: IndexBatch) -> list[Array]:
        """Read samples one by one, each in whatever shape it has."""
        assert self.program is not None
        read = partial(self.program.run_one, kept.stores[self.part], seed=batch.seed)
        return list(map(read, batch.positions.tolist(), batch.visits))

    def show(self, rows: Iterable[Array]) -> list[Any]:
        """Return samples after the batch ops in the form that the next step expects."""
        kind = self.plan.kind
        if self.program is None or kind in ("pil", "array"):
            return [present(row, kind) for row in rows]
        made = tensor_class(kind)
        return [self.program.as_tensor(row).as_subclass(made) for row in rows]

    def finish(self, samples: list[Any], batch: IndexBatch, allocate: Allocate) -> Any:
        """Run the steps that are not known, and those behind them on the whole batch if possible.

        Returns:
            A tensor of the whole batch, or a list of samples.
        """
        plan = self.plan
        samples = list(map(plan.run_unknown, samples))
        if self.last is None:
            return samples
        shapes = set(map(decoded_shape, samples))
        shape = shapes.pop() if len(shapes) == 1 else None
        output = None
        try:
            if shape is not None:
                output = self.last.output(shape, is_of_all=True)
        except ChannelsError as wrong:
            wrong.index = int(batch.positions[0])
            raise
        if output is None:
            return list(map(plan.run_last, samples))
        decoded = [to_stored(image)[0] for image in samples]
        shapes_B3 = np.array([shape] * len(decoded), np.int32)
        images = Samples(addresses_of(decoded), shapes_B3)
        [out] = allocate_batch(len(samples), [output], allocate)
        self.last.run(images, batch.positions, batch.visits, batch.seed, out)
        return self.last.as_tensor(out)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """Reads batches of the samples that it holds; safe from several threads at once.

    Attributes:
        stored: the samples, and how they were prepared.
        length: number of samples.
        target_transform: the user's.
        pair_transform: the user's, of sample and target together, where it runs on each sample.
        plan: of the transform.
        columns: of each batch.
        prepare: steps that run on single samples that are not stored.
        is_upright: True if EXIF has turned samples that are stored, or turns files that are read.
        own: describes the method of a subclass that makes each item; empty if there is none.
    """

    stored: Stored
    length: int
    target_transform: Step | None
    pair_transform: PairStep | None
    plan: TransformPlan
    columns: tuple[Column, ...]
    prepare: Steps
    is_upright: bool
    own: str

    # What follows from these

    @cached_property
    def kept(self) -> KeptSamples | None:
        """The samples, if they are stored."""
        return self.stored.kept

    @property
    def keys(self) -> ItemKeys | None:
        """Names of the values of an item that is not a pair; known once an item was read."""
        return getattr(self.stored.samples, "keys", None)  # a closed dataset has no samples

    @cached_property
    def targets(self) -> Targets:
        """The targets of all samples."""
        is_joint = self.pair_transform is not None
        return Targets(self.stored, None if is_joint else self.target_transform)

    @cached_property
    def has_target_column(self) -> bool:
        """True if the last column serves the targets, such as masks."""
        return self.columns[-1].part > 0

    @cached_property
    def obstacle(self) -> str | None:
        """Why whole batches need Python work per sample; None if they do not."""
        if self.own:
            return self.own
        if self.kept is not None and self.kept.is_tuple:
            return "samples have several parts, such as image and mask"
        if self.kept is None and self.columns[0].program is None:
            return "storage='none' prepares every sample when it is read"
        if self.pair_transform is not None:
            return f"samples have several parts, such as image and mask, and {self.plan.obstacle}"
        if not self.plan.is_batched:
            return f"the transform works per sample: {self.plan.obstacle}"
        if not self.outputs:
            return (
                "prepared samples differ in shape; a crop or resize to one size would make them "
                "batches"
            )
        return None

    @cached_property
    def outputs(self) -> list[Output]:
        """Shape and dtype of each column; empty if samples of one column differ."""
        outputs = [column.output for column in self.columns if column.output is not None]
        return outputs if len(outputs) == len(self.columns) else []

    @cached_property
    def may_draw(self) -> bool:
        """True if a step that runs on whole batches may draw random numbers."""
        plans = [column.plan for column in self.columns]
        plans += [plan.last for plan in plans if plan.last]
        return any(plan.may_draw for plan in plans)

    @cached_property
    def programs(self) -> list[Program]:
        """The program of each column; empty if samples are read one by one."""
        return [column.program for column in self.columns if column.program is not None]

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """The dtype of the tensors of each column."""
        return [program.served_dtype for program in self.programs]

    @cached_property
    def _columns_of_parts(self) -> list[tuple[int, slice]]:
        """The stored parts that are read, and the neighbouring columns that are read from each."""
        parts = [column.part for column in self.columns]
        ends = {part: k for k, part in enumerate(parts, 1)}
        return [(part, slice(end - parts.count(part), end)) for part, end in ends.items()]

    @cached_property
    def _classes(self) -> list[type]:
        """The class of the samples of each column."""
        return [shown_class(column.plan.end_kind or "tensor") for column in self.columns]

    @cached_property
    def _are_ragged(self) -> bool:
        """True if samples may differ in shape: each can be read alone, but they cannot be stacked."""
        if self.kept is None:
            return False
        return not (self.outputs and all(store.spec.is_dense for store in self.kept.stores))

    @cached_property
    def without_cast(self) -> tuple[Reader, list[CoreStep | None]]:
        """This reader without final float casts, and the casts; only if there is no obstacle."""
        columns, casts = zip(*map(Column.without_cast, self.columns), strict=True)
        return replace(self, columns=columns), list(casts)

    @cached_property
    def can_write_channels_last(self) -> bool:
        pairs = zip(self.programs, self.outputs, strict=False)
        return all(program.can_write_channels_last(shape) for program, (shape, _) in pairs)

    @property
    def served_bytes(self) -> int | None:
        """Bytes of each sample in a whole batch; None if there are no whole batches."""
        if self.obstacle is not None:
            return None
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.outputs)

    @property
    def image_form(self) -> str:
        """Class, shape and dtype of each image in a whole batch."""
        forms = []
        for kind, (shape, _), dtype in zip(self._classes, self.outputs, self.dtypes, strict=True):
            forms.append(f"{kind.__name__}{shape} of {str(dtype)[6:]}")
        return ", ".join(forms) + (f" in {self.keys}" if self.keys else "")

    # Batches and items

    def __call__(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> Any:
        """Return a whole batch: images (B, *shape) and collated targets.

        Only if there is no obstacle. ``allocate`` gives the memory.
        """
        return self.to_batch(self.read_batch(batch, allocate, self.targets.collated))

    def to_batch(self, columns: list[Any]) -> Any:
        """Turn the columns of ``read_batch`` into what ``default_collate`` gives."""
        *views, targets = columns
        images = views if self.plan.views else views[0]
        keys = self.stored.samples.keys
        return [images, targets] if keys is None else keys.join(images, targets, list)

    def items(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> list[Any]:
        """Return a ``SampleBatch`` if samples are pairs with images of one shape, else a list."""
        columns = self._read_columns(batch, allocate, is_alone=not self.outputs)
        images, *_, targets = columns
        if self.plan.views or self.keys is not None or not isinstance(images, torch.Tensor):
            return self._to_items(columns)
        if self.has_target_column:
            kind, target_kind = self._classes
            return SampleBatch(images, targets, rows_of(targets, target_kind), kind)
        return SampleBatch(images, None, targets, self._classes[0])

    def item(self, batch: IndexBatch) -> Any:
        """Return sample and target of a batch of one, in whatever shape the sample has."""
        return self._to_items(self._read_columns(batch, new_buffer, is_alone=self._are_ragged))[0]

    def _to_items(self, columns: list[Any]) -> list[Any]:
        """Return the items of a batch."""
        *views, targets = [
            rows_of(column, kind) if isinstance(column, torch.Tensor) else column
            for column, kind in zip_longest(columns, self._classes)
        ]
        images: Iterable[Any] = views[0]
        if self.plan.views:
            images = map(self.plan.made, zip(*views, strict=True))
        pairs: Iterable[Any] = zip(images, targets, strict=True)
        if self.pair_transform is not None:
            pairs = map(self.pair_transform, images, targets)
        keys = self.stored.samples.keys
        return list(pairs) if keys is None else [keys.join(*pair) for pair in pairs]

    def _read_columns(self, batch: IndexBatch, allocate: Allocate, *, is_alone: bool) -> list[Any]:
        """Read a batch as ``read_batch`` does, or as lists of samples where it cannot.

        ``is_alone`` has samples read one by one, because they may differ in shape.
        """
        if self.obstacle is None and not is_alone:
            return self.read_batch(batch, allocate, self.targets.of_each)
        targets = None
        if self.programs:
            columns = self._read_served(batch, is_alone=is_alone)
        else:
            if self.stored.is_remote:
                self.expect(batch)
            read = self._read_source if self.kept is None else self.kept.read
            pairs = map(read, batch.positions.tolist())
            samples, targets = map(list, zip(*pairs, strict=True))
            columns = [samples] * len(self.columns)
        if self.kept is not None and not self.is_upright:
            # Stored images have lost the EXIF that a step of the user's may look for.
            columns = [list(map(without_exif, samples)) for samples in columns]
        if self.pair_transform is None:
            if len(columns) > 1:
                allocate = new_buffer  # a ring leases one piece of memory for a batch
            columns = [
                column.finish(samples, batch, allocate)
                for column, samples in zip(self.columns, columns, strict=True)
            ]
        if not self.has_target_column:
            columns.append(self.targets.of_each(batch, targets))
        return columns

    def _read_served(self, batch: IndexBatch, *, is_alone: bool) -> list[list[Any]]:
        """Return the samples of each column after the batch ops."""
        if is_alone and self.kept is not None:
            with self.kept.naming_damage():
                rows = [column.read_alone(self.kept, batch) for column in self.columns]
        else:
            outs = allocate_batch(len(batch), self.outputs, new_buffer)
            self.read_into(outs, batch)
            rows = [[out[b, ...] for b in range(len(out))] for out in outs]
        return list(map(Column.show, self.columns, rows))

    def _read_source(self, index: int) -> tuple[Any, Any]:
        """Read and prepare a sample that is not stored; return it and its target."""
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
        self, batch: IndexBatch, allocate: Allocate, targets_of: Callable[[IndexBatch], Any]
    ) -> list[Any]:
        """Read the columns of a whole batch: images of each view, then the targets."""
        is_last = batch.channels_last and self.can_write_channels_last
        outs = allocate_batch(len(batch), self.outputs, allocate, channels_last=is_last)
        self.read_into(outs, batch)
        columns = list(map(torch.Tensor.view, map(torch.from_numpy, outs), self.dtypes))
        if not self.has_target_column:
            columns.append(targets_of(batch))
        return columns

    def read_into(self, outs: list[Array], batch: IndexBatch, rows_B: Array | None = None) -> None:
        """Read a batch's images into arrays of ``allocate_batch``.

        ``rows_B`` are the rows to write to where the arrays are for a larger batch.
        """
        if self.stored.is_remote:
            self.expect(batch)
        index_B = batch.positions
        kept = self.stored.kept
        sources: Sequence[Any]
        if kept is None:
            opened = open_files(self.stored.samples, index_B.tolist(), upright=self.is_upright)
            sources = (opened,)
        else:
            sources = kept.stores
        pairs = list(zip(self.programs, outs, strict=True))
        try:
            for part, columns in self._columns_of_parts:
                # One call for all views, so that no sample is decoded twice.
                (program, out), *others = pairs[columns]
                source = sources[part]
                program.run(source, index_B, batch.visits, batch.seed, out, rows_B, others)
        except (SampleError, ChannelsError):
            if kept is None:
                raise
            with kept.naming_damage():
                raise

    def expect(self, batch: IndexBatch) -> None:
        """Begin to fetch all samples of a batch from where they are remote."""
        if self.stored.filled_share() < 1:
            self.stored.samples.expect(batch.positions.tolist())


# From how samples were prepared and the user's transform to a reader

Compiled = tuple[TransformPlan, tuple[Column, ...]]


def compile_reader(stored: Stored, transforms: Transforms, *, own: str) -> Reader:
    """Compile the user's transforms for samples as they are stored.

    ``own`` describes the method of a subclass that makes each item; empty if there is none.

    Raises:
        ValueError: the transform does not begin with the steps that samples are stored after.
    """
    beforehand = steps = stored.first_steps
    is_upright = stored.is_upright
    transform = transforms.of_sample
    pair_transform = transforms.of_both
    if pair_transform is not None:
        plan, columns = _compile_pairs(stored, pair_transform)
    elif stored.kept is not None:
        plan, columns = _compile_kept(stored, stored.kept, transform)
    elif (decoding := _compile_files(stored, transform)) is not None:
        is_upright, (plan, columns) = decoding
        beforehand = ()
    else:
        plan = plan_transform(transform, only_last=True, obstacle=stored.obstacle)
        columns = tuple(map(_unread_column, plan.each))
        steps = (*steps, *plan.prepare)
    return Reader(
        stored=stored,
        length=len(stored.samples),
        target_transform=transforms.of_target,
        pair_transform=pair_transform if plan.per_sample else None,
        plan=replace(plan, beforehand=beforehand),
        columns=columns,
        prepare=Steps(steps),
        is_upright=is_upright,
        own=own,
    )


def _unread_column(plan: TransformPlan) -> Column:
    """Of samples that are read one by one."""
    return Column(plan, last=Program(plan.last.batch_ops, _DECODED) if plan.last else None)


def _column(plan: TransformPlan, store: Store | None = None) -> Column:
    """Of kept samples, or of files as they are decoded."""
    shape = (3, 1, 1) if store is None else store.shape(0)
    program = Program(plan.batch_ops, _DECODED if store is None else store.spec)
    output = program.output(shape)
    return _unread_column(plan)._replace(program=program, shape=shape, output=output)


def _compile_kept(stored: Stored, kept: KeptSamples, transform: Any) -> Compiled:
    store = kept.images
    dimensions = len(store.shape(0))
    obstacle = stored.obstacle
    if kept.is_tuple:
        obstacle = obstacle or "samples have several parts"
    elif dimensions != 3:
        obstacle = obstacle or f"samples have {dimensions} dimensions"
    after = stored.after
    assert after is not None
    plan = plan_transform(
        transform,
        prepared=after.count,
        form=store.spec.form,
        dtype=store.spec.dtype,
        channels=_channels_of(store) if dimensions == 3 else None,
        obstacle=obstacle,
    )
    if describe_steps(plan.prepare, "") != after.key:
        raise ValueError(
            f"samples are stored after {after.text or 'no step'}, but the transform now begins with "
            f"{', '.join(map(repr, plan.prepare)) or 'none'}. Give it the same first steps, or "
            "assign another transform to dataset.transform in the process that made the "
            "dataset, which prepares samples again."
        )
    # Views that begin with steps of the user's own share what is read.
    are_unread = plan.views and not plan.is_batched and not any(it.batch_texts for it in plan.each)
    if kept.is_tuple or are_unread:
        return plan, tuple(map(_unread_column, plan.each))
    with kept.naming_damage():
        return plan, tuple(_column(view, store) for view in plan.each)


def _compile_files(stored: Stored, transform: Any) -> tuple[bool, Compiled] | None:
    """What makes batches of files as they are read, by all steps; None where that cannot be."""
    opening = stored.samples.opening
    if opening is None or opening.channels is None or library.obstacle() is not None:
        return None
    is_upright, steps = split_upright((*stored.first_steps, transform))
    plan = plan_transform(
        steps,
        form=opening.form,
        channels=opening.channels,
        obstacle=stored.obstacle,
        prepared=0,
        first=is_upright - len(stored.first_steps),
    )
    if not plan.is_batched:
        return None
    columns = tuple(map(_column, plan.each))
    if not all(column.output for column in columns):
        return None
    return is_upright or opening.is_upright, (plan, columns)


def _compile_pairs(stored: Stored, transforms: PairStep) -> Compiled:
    """Of what takes sample and target: one column of images and one of masks."""
    kept = stored.kept
    obstacle = stored.obstacle
    if kept is None or not kept.target_is_part:
        plan = plan_pairs(transforms, obstacle="only images with a tv_tensors.Mask are served")
        return plan, (Column(plan),)
    image, mask, *_ = kept.stores
    shapes = image.shape(0), mask.shape(0)
    kinds = image.spec.dtype, mask.spec.dtype, mask.spec.form, len(shapes[0])
    if kinds != ("uint8", "uint8", "mask", 3) or shapes[1][:-2] not in ((), (1,)):
        obstacle = (
            "only uint8 images with a uint8 tv_tensors.Mask of one channel are served, "
            f"not {image.spec.dtype} {shapes[0]} with {mask.spec.dtype} {shapes[1]}"
        )
    differ = (image.shapes[:, -2:] != mask.shapes[:, -2:]).any(axis=1)
    if obstacle is None and differ.any():
        obstacle = f"the mask of sample {differ.argmax()} is not as large as its image"
    channels = _channels_of(image)
    plan = plan_pairs(transforms, form=image.spec.form, channels=channels, obstacle=obstacle)
    if plan.mask is None:
        return plan, (Column(plan),)
    return plan, (_column(plan, image), _column(plan.mask, mask)._replace(part=1))


def _channels_of(images: Store) -> int | None:
    """Of all images; None where they differ."""
    channels = images.shapes[:, 0]
    first = int(channels[0])
    return first if (channels == first).all() else None


# Memory that is reused


class Lease(weakref.ref[np.ndarray]):
    """A reference to an array that was leased; its callback runs no line of Python.

    In one, Ctrl-C would be an error that is printed and forgotten, and the training loop would go
    on.
    """

    __slots__ = ("buffer", "set_state")
    buffer: Array
    set_state: Callable[[int], None]


class BatchRing:
    """Up to ``slots`` buffers, each lent as an array until that array dies.

    They are ordinary memory, or ``allocate(size_bytes)`` gives a uint8 array of that size; it is
    called from the threads that take.
    Safe from several threads: a buffer is taken and given back by single deque operations, because
    an array may die at any moment, also in a thread that is just taking one.
    """

    def __init__(self, slots: int, allocate: Callable[[int], Array] | None = None) -> None:
        self._allocate = allocate or partial(np.empty, dtype=np.uint8)
        self._free: deque[Lease | None] = deque([None] * slots)  # None: of no buffer yet
        self._leases: dict[int, Lease] = {}  # by id, those that came back too
        self._slots = slots
        self.fresh_count = 0  # how often all slots were lent and the batch got memory of its own

    def __reduce__(self) -> Any:
        """A copy lends memory of its own."""
        return BatchRing, (self._slots,)

    @property
    def bytes_held(self) -> int:
        return sum(lease.buffer.nbytes for lease in list(self._leases.values()))

    def lease(self, size_bytes: int) -> memoryview:
        """Memory that is lent as long as anything over it lives."""
        try:
            lease = self._free.pop()
        except IndexError:
            self.fresh_count += 1
            return new_buffer(size_bytes)
        buffer = None if lease is None else self._leases.pop(id(lease)).buffer
        if buffer is None or buffer.nbytes < size_bytes:
            buffer = self._allocate(size_bytes)
        leased = buffer[:size_bytes]
        lease = Lease(leased, self._free.append)
        lease.buffer = buffer
        self._leases[id(lease)] = lease
        return leased.data  # arrays over it refer to it, those over the array to the buffer
