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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.datasets.batch import IndexBatch, SampleBatch, rows_of
from fastdata.errors import ChannelsError, SampleError, fault_of, sample_error
from fastdata.machine.shared import SampleTable, collate_targets
from fastdata.pixels import (
    PairStep,
    Step,
    TransformPlan,
    describe_steps,
    plan_pairs,
    plan_transform,
    split_upright,
)
from fastdata.pixels.core import Array, Shape, library
from fastdata.pixels.core.calls import Samples
from fastdata.pixels.images import (
    SampleSpec,
    addresses_of,
    decoded_shape,
    present,
    shown_class,
    tensor_class,
    to_stored,
    without_exif,
)
from fastdata.pixels.program import Program
from fastdata.pixels.steps import Step as CoreStep
from fastdata.sources import FileSource, ItemKeys, Source
from fastdata.stores.prepare import Options, Prepared
from fastdata.stores.readers import KeptSamples, Store
from fastdata.stores.writers import NO_FAULT_OF_A_SAMPLE, Steps, open_files

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
        after: how many leading steps of the transform samples are stored after, or did not fit
            after, their key, and their text for errors; None before they are prepared.
        is_upright: whether samples were turned as their EXIF says, so that nothing of it is missed.
        is_remote: whether samples that are not kept are fetched from behind a URL.
    """

    options: Options
    prepared: Prepared
    source: Source | None = None
    files: SampleTable | None = None
    first_steps: tuple[Step, ...] = ()
    after: tuple[int, str, str] | None = None
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


class Column(NamedTuple):
    """How one column of a batch is made: a view of its samples, or images or masks.

    Attributes:
        plan: of the transform.
        program: reads samples and runs the batch ops; None where they are read one by one.
        shape: of any sample before.
        output: shape and dtype of every sample served; None where they differ.
        last: runs the ops behind steps that are not known.
    """

    plan: TransformPlan
    program: Program | None = None
    shape: Shape = ()
    output: Output | None = None
    last: Program | None = None

    def without_cast(self) -> tuple[Column, CoreStep | None]:
        """Return this column without its final float cast, and that cast (None without one)."""
        assert self.program is not None
        program, cast = self.program.without_cast()
        # Which may make three channels of one.
        return self._replace(program=program, output=program.output(self.shape)), cast

    def shown(self, served: Iterable[Array]) -> list[Any]:
        """Samples after the batch ops, as the rest of the transform wants them."""
        kind = self.plan.kind
        if self.program is None or kind in ("pil", "array"):
            return [present(sample, kind) for sample in served]
        made = tensor_class(kind)
        return [self.program.as_tensor(sample).as_subclass(made) for sample in served]

    def finished(self, samples: list[Any], batch: IndexBatch, allocate: Allocate) -> Any:
        """What unknown steps, and those behind them, make of samples: whole where that can be."""
        last = self.last
        if self.plan.per_sample:
            samples = list(map(self.plan.run_unknown, samples))
        if last is None:
            return samples
        shapes = set(map(decoded_shape, samples))
        shape = shapes.pop() if len(shapes) == 1 else None
        try:
            output = None if shape is None else last.output(shape, is_of_all=True)
        except ChannelsError as wrong:
            wrong.index = int(batch.positions[0])
            raise
        if shape is None or output is None:
            return list(map(self.plan.run_last, samples))
        decoded = [to_stored(image)[0] for image in samples]
        [out] = allocate_batch(len(samples), [output], allocate)
        images = Samples(addresses_of(decoded), np.array([shape] * len(decoded), np.int32))
        last.run(images, batch.positions, batch.visits, batch.seed, out)
        return last.as_tensor(out)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """Serves batches of what it holds; safe from several threads at once.

    Attributes:
        stored: the samples, and how they were prepared.
        length: how many samples there are.
        target_transform: the user's.
        pair_transform: the user's, of sample and target together, where it runs on each sample.
        plan: of the transform.
        columns: of each batch.
        prepare: what is done to single samples that are kept nowhere.
        is_upright: whether EXIF has turned samples that are stored, or turns files that are read.
        own: which method of a subclass is asked for each item; empty where there is none.
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
        """The samples, where they are kept."""
        return self.stored.kept

    @property
    def keys(self) -> ItemKeys | None:
        """What items are that are no pairs; where none are kept, known once one was read."""
        return getattr(self.stored.samples, "keys", None)  # none are left of a closed dataset

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
        """Of every column; empty where samples differ in one."""
        outputs = [column.output for column in self.columns if column.output is not None]
        return outputs if len(outputs) == len(self.columns) else []

    @cached_property
    def may_draw(self) -> bool:
        """True if what runs on whole batches may draw random numbers."""
        plans = [column.plan for column in self.columns]
        plans += [plan.last for plan in plans if plan.last]
        return any(plan.may_draw for plan in plans)

    @cached_property
    def programs(self) -> list[Program]:
        """Of every column; empty where samples are read one by one."""
        return [column.program for column in self.columns if column.program is not None]

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """Of what every column serves."""
        return [program.served_dtype for program in self.programs]

    @cached_property
    def _classes(self) -> list[type]:
        """Of what each column serves, in lists of samples."""
        return [shown_class(column.plan.end_kind or "tensor") for column in self.columns]

    @cached_property
    def _are_ragged(self) -> bool:
        """Whether one that differs from all others may be served alone, though not in a batch."""
        if self.kept is None:
            return False
        return not (self.outputs and all(store.spec.is_dense for store in self.kept.stores))

    @cached_property
    def without_cast(self) -> tuple[Reader, list[CoreStep | None]]:
        """Return this reader without final float casts, and the casts; only without obstacle."""
        columns, casts = zip(*map(Column.without_cast, self.columns), strict=True)
        return replace(self, columns=columns), list(casts)

    @cached_property
    def can_write_channels_last(self) -> bool:
        pairs = zip(self.programs, self.outputs, strict=False)
        return all(program.can_write_channels_last(shape) for program, (shape, _) in pairs)

    @property
    def served_bytes(self) -> int | None:
        """Bytes of each sample in a whole batch; None where there are no whole batches."""
        if self.obstacle is not None:
            return None
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.outputs)

    @property
    def image_form(self) -> str:
        """Shape and type of each image in a whole batch."""
        forms = []
        for column, (shape, _), dtype in zip(self.columns, self.outputs, self.dtypes, strict=True):
            forms.append(f"{shown_class(column.plan.kind).__name__}{shape} of {str(dtype)[6:]}")
        return ", ".join(forms) + (f" in {self.keys}" if self.keys else "")

    # Batches and items

    def __call__(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> Any:
        """Images (B, *shape) and collated targets; only if there is no obstacle.

        Memory is what ``allocate`` gives.
        """
        return self.to_batch(self.read_batch(batch, allocate, self.targets))

    def to_batch(self, parts: list[Any]) -> Any:
        """A batch of ``read_batch`` as ``default_collate`` gives it."""
        *views, targets = parts
        images = views if self.plan.views else views[0]
        keys = self.stored.samples.keys
        return [images, targets] if keys is None else keys.join(images, targets, list)

    def items(self, batch: IndexBatch, allocate: Allocate = new_buffer) -> list[Any]:
        """A ``SampleBatch`` where samples are pairs with images of one shape, else a list."""
        parts = self._parts(batch, allocate, is_alone=not self.outputs)
        images, *_, targets = parts
        if self.plan.views or self.keys is not None or not isinstance(images, torch.Tensor):
            return self._listed(parts)
        kind, *of_masks = self._classes
        if self.plan.mask:
            return SampleBatch(images, targets, rows_of(targets, *of_masks), kind)
        return SampleBatch(images, None, targets, kind)

    def item(self, batch: IndexBatch) -> Any:
        """Sample and target of a batch of one, in whatever shape it has."""
        return self._listed(self._parts(batch, new_buffer, is_alone=self._are_ragged))[0]

    def _listed(self, parts: list[Any]) -> list[Any]:
        """The items of a batch."""
        *views, targets = [
            rows_of(part, kind) if isinstance(part, torch.Tensor) else part
            for part, kind in zip_longest(parts, self._classes)
        ]
        images: Iterable[Any] = views[0]
        if self.plan.views:
            images = map(self.plan.made, zip(*views, strict=True))
        pairs: Iterable[Any] = zip(images, targets, strict=True)
        if self.pair_transform is not None:
            pairs = map(self.pair_transform, images, targets)
        keys = self.stored.samples.keys
        return list(pairs) if keys is None else [keys.join(*pair) for pair in pairs]

    def _parts(self, batch: IndexBatch, allocate: Allocate, *, is_alone: bool) -> list[Any]:
        """As of ``read_batch``; but lists of what differs, or is shown to the user's steps."""
        plan = self.plan
        if self.obstacle is None and not is_alone:
            return self.read_batch(batch, allocate, self.targets_of)
        kept = self.kept
        index_B = batch.positions.tolist()
        targets = None
        if not self.programs:
            if self.stored.is_remote:
                self.expect(batch)
            read = self._from_source if kept is None else kept.read
            samples, targets = map(list, zip(*map(read, index_B), strict=True))
            columns = [samples] * len(self.columns)
        else:
            if is_alone and kept is not None:
                stores = kept.stores if plan.mask else repeat(kept.images)
                pairs = list(zip(index_B, batch.visits, strict=True))
                with kept.naming_damage():
                    rows = [
                        [program.run_one(store, index, visit, batch.seed) for index, visit in pairs]
                        for program, store in zip(self.programs, stores, strict=False)
                    ]
            else:
                outs = allocate_batch(len(batch), self.outputs, new_buffer)
                self.read_into(outs, batch)
                rows = [[out[b, ...] for b in range(len(out))] for out in outs]
            columns = list(map(Column.shown, self.columns, rows))
        if kept is not None and not self.is_upright:
            # They tell nothing of an EXIF that they were not turned by.
            columns = [list(map(without_exif, samples)) for samples in columns]
        if plan.mask:
            return columns
        if self.pair_transform is None:
            # Of the ring there is one piece of memory a batch.
            allocate = new_buffer if len(columns) > 1 else allocate
            columns = [
                column.finished(samples, batch, allocate)
                for column, samples in zip(self.columns, columns, strict=True)
            ]
        return [*columns, self.targets_of(batch, targets)]

    def _from_source(self, index: int) -> tuple[Any, Any]:
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

    # Targets

    @cached_property
    def _listing(self) -> KeptSamples | SampleTable | None:
        """What lists targets; None where only reading samples tells them."""
        return self.stored.table if self.kept is None else self.kept

    @cached_property
    def numbers(self) -> Array | None:
        """The targets of all samples, where each is a number and batches need nothing else."""
        table = self.stored.table
        # A cache has numbers where targets are images.
        is_image = self.kept is not None and (self.kept.target_is_part or self.kept.mask_places)
        if is_image or self.target_transform is not None or table is None:
            return None
        return table.columns["targets"] if table.target_kind == "number" else None

    def targets(self, batch: IndexBatch) -> Any:
        """What ``default_collate`` makes of the targets of a batch."""
        if self.numbers is not None:
            return torch.from_numpy(self.numbers[batch.positions])
        if self._listing is None or self.target_transform is not None:
            return collate_targets(self.targets_of(batch))
        return self._listing.collated_targets(batch.positions)

    def targets_of(self, batch: IndexBatch, read: list[Any] | None = None) -> list[Any]:
        """The target of each sample; ``read``: those before ``target_transform``, where known."""
        if self.numbers is not None:
            return list(self.numbers[batch.positions].tolist())
        targets = list(map(self.stored_target, batch.positions.tolist())) if read is None else read
        if self.target_transform is not None and self.pair_transform is None:
            targets = list(map(self.target_transform, targets))
        return targets

    def stored_target(self, index: int) -> Any:
        listing = self._listing
        return self.stored.samples.read(index)[1] if listing is None else listing.target(index)

    # Whole columns

    def read_batch(
        self, batch: IndexBatch, allocate: Allocate, targets_of: Callable[[IndexBatch], Any]
    ) -> list[Any]:
        """Images of each view, and behind these the targets, or masks."""
        is_last = batch.channels_last and self.can_write_channels_last
        outs = allocate_batch(len(batch), self.outputs, allocate, channels_last=is_last)
        self.read_into(outs, batch)
        parts = list(map(torch.Tensor.view, map(torch.from_numpy, outs), self.dtypes))
        return parts if self.plan.mask else [*parts, targets_of(batch)]

    def read_into(self, outs: list[Array], batch: IndexBatch, rows_B: Array | None = None) -> None:
        """Read a batch's images into arrays of ``allocate_batch``.

        ``rows_B`` are the rows to write to where the arrays are for a larger batch.
        """
        if self.stored.is_remote:
            self.expect(batch)
        index_B = batch.positions
        drawn_by = batch.visits, batch.seed
        (program, out), *others = zip(self.programs, outs, strict=True)
        kept = self.kept
        if kept is None:
            images = open_files(self.stored.samples, index_B.tolist(), upright=self.is_upright)
            program.run(images, index_B, *drawn_by, out, rows_B, others)
            return
        try:
            if self.plan.mask:
                mask_program, masks = others.pop()
                mask_program.run(kept.stores[1], index_B, *drawn_by, masks, rows_B)
            program.run(kept.stores[0], index_B, *drawn_by, out, rows_B, others)
        except (SampleError, ChannelsError):
            with kept.naming_damage():
                raise

    def expect(self, batch: IndexBatch) -> None:
        """Have what is fetched for these samples fetched at once."""
        if self.stored.filled_share() < 1:
            self.stored.samples.expect(batch.positions.tolist())


# From how samples were prepared and the user's transform to a reader

Compiled = tuple[TransformPlan, tuple[Column, ...]]


def compile_reader(
    stored: Stored,
    *,
    transform: Any,
    target_transform: Step | None,
    pair_transform: PairStep | None,
    own: str,
) -> Reader:
    """Compile the user's transforms for samples as they are stored.

    Raises:
        ValueError: the transform does not begin with the steps that samples are stored after.
    """
    beforehand = steps = stored.first_steps
    is_upright = stored.is_upright
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
        target_transform=target_transform,
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
    assert stored.after is not None
    count, key, text = stored.after
    plan = plan_transform(
        transform,
        prepared=count,
        form=store.spec.form,
        dtype=store.spec.dtype,
        channels=_channels_of(store) if dimensions == 3 else None,
        obstacle=obstacle,
    )
    if describe_steps(plan.prepare, "") != key:
        raise ValueError(
            f"samples are stored after {text or 'no step'}, but the transform now begins with "
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
    return plan, tuple(map(_column, (plan, plan.mask), kept.stores))


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
