"""Reading: what an epoch is served from, frozen when it begins.

A ``Reader`` holds samples, program and targets as one value, so that nothing that is assigned to
the dataset meanwhile reaches an epoch: shapes, memory and program are of one piece. It also holds
the memory that samples lie in. Who reads takes it from a ``ReaderHandle`` for as long as one batch
takes; closing the dataset empties that, and the memory goes with the last batch that is being read.

There is one road. A batch has a column for each view of its samples, or for images and masks. A
column is read whole by the core where all samples are served in one shape; else they are read one
by one, as those are that are kept nowhere. Steps that are not known run on each sample then, and
the core again on what they leave. One sample is a batch of one.

Shape letters: B batch, C channels, H W size sent, h w size served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fastdata.datasets.batch import (
    IndexBatch,
    SampleBatch,
    SharedVisits,
    as_numbers,
    positions,
    rows_of,
    stacked,
)
from fastdata.datasets.ring import Output, Ring, Take, fresh, room
from fastdata.errors import ChannelsError, RemoteError, StoreGoneError, sample_error
from fastdata.machine.shared import SampleTable, collate_targets
from fastdata.pixels import (
    TransformPlan,
)
from fastdata.pixels.compose import cure_for
from fastdata.pixels.device import DeviceProgram, device_obstacle
from fastdata.pixels.images import (
    OpenedImages,
    decoded_shape,
    present,
    shown_class,
    without_exif,
)
from fastdata.pixels.program import Program
from fastdata.sources import FileSource, ItemKeys
from fastdata.stores.options import Options
from fastdata.stores.readers import Store, UndecodableError
from fastdata.stores.samples import KeptSamples, Steps, open_files

if TYPE_CHECKING:
    from fastdata.datasets.serving import Stored

CLOSED = "the dataset was closed; create it again to read from it"


class Column(NamedTuple):
    """How one column of a batch is made: a view of its samples, or images or masks.

    Attributes:
        plan: of the transform.
        program: reads samples and runs the batch ops; None where they are read one by one.
        output: shape and dtype of every sample served; None where they differ.
        store: that samples are read from; None where none are stored.
        last: runs the ops behind steps that are not known.
    """

    plan: TransformPlan
    program: Program | None = None
    output: Output | None = None
    store: Store | None = None
    last: Program | None = None

    def read_alone(self, batch: IndexBatch) -> list[np.ndarray]:
        """What a whole column holds, of samples in whatever shape each has."""
        program, store = self.program, self.store
        assert program is not None
        assert store is not None
        pairs = zip(batch.positions.tolist(), batch.visits, strict=True)
        return [program.run_one(store, index, visit, batch.seed) for index, visit in pairs]

    def shown(self, served: Iterable[np.ndarray]) -> list[Any]:
        """Samples after the batch ops, as the rest of the transform wants them."""
        kind, program = self.plan.kind, self.program
        if kind == "tensor" and program is not None:
            return list(map(program.as_tensor, served))
        return [present(sample, kind) for sample in served]

    def finished(self, samples: list[Any], batch: IndexBatch, take: Take) -> Any:
        """What unknown steps, and those behind them, make of samples: whole where that can be."""
        plan, last = self.plan, self.last
        if plan.per_sample:
            samples = [plan.run_unknown(sample) for sample in samples]
        if last is None:
            return samples
        shapes = set(map(decoded_shape, samples))
        shape = shapes.pop() if len(shapes) == 1 else None
        output = None
        if shape is not None:
            try:
                output = last.output(shape, is_of_all=True)
            except ChannelsError as wrong:
                wrong.index = int(batch.positions[0])
                raise
        if shape is None or output is None:
            return list(map(plan.run_last, samples))
        decoded = [np.ascontiguousarray(image).reshape(*shape[1:], shape[0]) for image in samples]
        [out] = room(len(samples), [output], take)
        images = OpenedImages.decoded(decoded)
        last.run_images(images, batch.positions, batch.visits, batch.seed, out)
        return last.as_tensor(out)


class ReaderHandle:
    """A reader, for as long as the dataset that it is of is open; then None."""

    def __init__(self, reader: Reader | None, gone: str = CLOSED) -> None:
        self.reader = reader
        self._gone = gone

    def __call__(self) -> Reader:
        """What to read a batch by, which its memory stays valid with.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        reader = self.reader
        if reader is None:
            raise StoreGoneError(self._gone)
        return reader


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """Serves batches of what it holds; safe from several threads at once.

    Attributes:
        stored: the samples, and how they were prepared.
        visits: of readers that no loader of ours tells theirs.
        target_transform: the user's.
        pair_transform: the user's, of sample and target together, where it runs on each sample.
        plan: of the transform.
        columns: of each batch.
        prepare: what is done to single samples that are kept nowhere.
        is_upright: whether samples were turned as their EXIF says before they were stored.
        own: which method of a subclass is asked for each item; empty where there is none.
    """

    stored: Stored
    visits: SharedVisits | None
    target_transform: Callable[[Any], Any] | None
    pair_transform: Callable[[Any, Any], Any] | None
    plan: TransformPlan
    columns: tuple[Column, ...]
    prepare: Steps
    is_upright: bool
    own: str

    def emptied(self, stored: Stored) -> Reader:
        """What is left of it once there is nothing to read any more: how it was read."""
        columns = tuple(column._replace(store=None) for column in self.columns)
        return replace(self, stored=stored, columns=columns, visits=None)

    # What follows from these

    @cached_property
    def kept(self) -> KeptSamples | None:
        """The samples, where they are kept."""
        return self.stored.kept

    @cached_property
    def length(self) -> int:
        return len(self.stored.samples)

    @property
    def options(self) -> Options:
        return self.stored.options

    @property
    def keys(self) -> ItemKeys | None:
        """What items are that are no pairs; where none are kept, known once one was read."""
        return self.stored.samples.keys

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
        if not self._outputs:
            return (
                "prepared samples differ in shape; a crop or resize to one size would make them "
                "batches"
            )
        return None

    @cached_property
    def device_obstacle(self) -> str | None:
        """Why batch ops cannot run on the device that batches are sent to; None if they can."""
        if self.obstacle is not None:
            return self.obstacle
        if self.kept is None:
            return "samples are kept nowhere, and files are decoded on the CPU"
        if len(self.columns) > 1:
            return "several views of an image, or image and mask, are made on the CPU"
        return device_obstacle(self.plan, self.kept.images.spec)

    @cached_property
    def _outputs(self) -> list[Output]:
        """Of every column; empty where samples differ in one."""
        outputs = [column.output for column in self.columns if column.output is not None]
        return outputs if len(outputs) == len(self.columns) else []

    @cached_property
    def _are_ragged(self) -> bool:
        """Whether kept samples may differ in shape, even where batches of them do not."""
        stores = [] if self.kept is None else self.kept.stores
        return bool(stores) and not (self._outputs and all(store.spec.is_dense for store in stores))

    @cached_property
    def _programs(self) -> list[Program]:
        return [column.program for column in self.columns if column.program is not None]

    @cached_property
    def _dtypes(self) -> list[torch.dtype]:
        pairs = zip(self._programs, self._outputs, strict=True)
        return [program.as_tensor(np.empty(0, dtype)).dtype for program, (_, dtype) in pairs]

    @cached_property
    def _classes(self) -> list[type]:
        """Of what each column serves, in lists of samples."""
        return [shown_class(column.plan.end_kind or "tensor") for column in self.columns]

    @cached_property
    def can_write_channels_last(self) -> bool:
        pairs = zip(self._programs, self._outputs, strict=False)
        return all(program.can_write_channels_last(shape) for program, (shape, _) in pairs)

    @property
    def served_bytes(self) -> int | None:
        """Bytes of each sample in a whole batch; None where there are no whole batches."""
        if self.obstacle is not None:
            return None
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._outputs)

    @property
    def image_form(self) -> str:
        """Shape and type of each image in a whole batch."""
        forms = [
            f"{shown_class(column.plan.kind).__name__}{shape} of {str(dtype)[6:]}"
            for column, (shape, _), dtype in zip(
                self.columns, self._outputs, self._dtypes, strict=True
            )
        ]
        return ", ".join(forms) + (f" in {self.keys}" if self.keys else "")

    def fallback_notice(self) -> str:
        """Which code of the user's own runs on each sample unasked, and the cure; else empty."""
        plan, kept = self.plan, self.kept
        unknown = plan.first_unknown
        is_asked_for = not self.options.batch_ops or self.pair_transform is not None
        if is_asked_for or kept is None or kept.is_tuple or unknown is None:
            return ""
        cure = cure_for(unknown)
        if not cure and plan.views:
            cure = "Write steps that are served in its place: docs/served-steps.md."
        elif not cure:
            cure = (
                "Give it as prepare= if it does the same each time, or as CudaPrefetcher(transform="
                ") if it can take whole batches."
            )
        return f"{plan.obstacle}, so that it runs in Python on each sample. {cure}"

    def filled_share(self, index: np.ndarray | None = None) -> float:
        """Share of the samples, or of those of ``index``, that are kept already."""
        return 0.0 if self.kept is None else self.kept.filled_share(index)

    # Batches and items

    def __call__(self, batch: IndexBatch, ring: Ring | None = None) -> Any:
        """Images (B, *shape) and collated targets; only if there is no obstacle.

        Memory comes from ``ring``, or is fresh.
        """
        tensors = self._tensors(batch, ring)
        return self.joined(tensors, None if self.plan.mask else self.targets(batch))

    def joined(self, tensors: list[torch.Tensor], targets: Any) -> Any:
        """The batch of these tensors, one for each column, and of targets, unless masks are."""
        images: Any = tensors if self.plan.views else tensors[0]
        return stacked(images, tensors[1] if self.plan.mask else targets, self.keys)

    def items(self, batch: IndexBatch, ring: Ring | None = None) -> list[Any]:
        """A ``SampleBatch`` where all images are of one shape, else a list of samples."""
        columns, targets = self._columns(batch, ring, is_alone=not self._outputs)
        plan, kind = self.plan, self._classes[0]
        if not all(isinstance(column, torch.Tensor) for column in columns):
            return self._listed(columns, targets)
        if plan.mask is not None:
            masks = rows_of(columns[1], self._classes[1])
            return SampleBatch(columns[0], columns[1], masks, kind, self.keys)
        images = columns if plan.views else columns[0]
        return SampleBatch(images, None, targets or [], kind, self.keys, plan.made)

    def item(self, batch: IndexBatch) -> Any:
        """Sample and target of a batch of one, in whatever shape it has."""
        return self._listed(*self._columns(batch, None, is_alone=self._are_ragged))[0]

    def _listed(self, columns: list[Any], targets: list[Any] | None) -> list[Any]:
        """The items of a batch."""
        each = [
            rows_of(column, kind) if isinstance(column, torch.Tensor) else column
            for column, kind in zip(columns, self._classes, strict=True)
        ]
        targets = list(each.pop()) if targets is None else targets
        pairs: Iterable[Any] = zip(each[0], targets, strict=True)
        if self.plan.views:
            pairs = zip(map(self.plan.made, zip(*each, strict=True)), targets, strict=True)
        elif self.pair_transform is not None:
            pairs = map(self.pair_transform, each[0], targets)
        return list(pairs) if self.keys is None else [self.keys.join(*pair) for pair in pairs]

    def _columns(
        self, batch: IndexBatch, ring: Ring | None, *, is_alone: bool
    ) -> tuple[list[Any], list[Any] | None]:
        """What is made of a batch's samples; and their targets, where no column is of masks."""
        if self.obstacle is None and not is_alone:
            return self._tensors(batch, ring), None if self.plan.mask else self.targets_of(batch)
        read, targets = self._read(batch, is_alone=is_alone)
        if self.plan.mask:
            return read, None
        if self.pair_transform is None:
            # Of the ring there is one piece of memory a batch.
            take = fresh if ring is None or len(read) > 1 else ring.take
            pairs = zip(self.columns, read, strict=True)
            read = [column.finished(samples, batch, take) for column, samples in pairs]
        return read, self.targets_of(batch, targets)

    def _read(self, batch: IndexBatch, *, is_alone: bool) -> tuple[list[Any], list[Any] | None]:
        """Each column's samples before unknown steps; and targets, where reading told them."""
        kept, targets = self.kept, None
        if not self._programs:
            if self.stored.is_remote:
                self._expect(batch)
            read = self._from_source if kept is None else kept.read
            pairs = list(map(read, batch.positions.tolist()))
            targets = [target for _, target in pairs]
            columns = [[sample for sample, _ in pairs]] * len(self.columns)
        elif is_alone and kept is not None:
            if self.plan.mask:
                self._refuse_other_sizes(batch.positions)
            with kept.naming_damage():
                columns = [column.shown(column.read_alone(batch)) for column in self.columns]
        else:
            outs = self.room(len(batch), None)
            self.read_into(outs, batch)
            rows = [[out[b, ...] for b in range(len(out))] for out in outs]
            columns = [column.shown(row) for column, row in zip(self.columns, rows, strict=True)]
        if kept is not None and not self.is_upright:
            # They tell nothing of an EXIF that they were not turned by.
            columns = [list(map(without_exif, samples)) for samples in columns]
        return columns, targets

    def _from_source(self, index: int) -> tuple[Any, Any]:
        source = self.stored.samples
        try:
            sample, target = source.read(index)
        except RemoteError:  # a network that is down is no sample's fault
            raise
        except OSError as cause:
            raise sample_error(source.path(index), index, cause) from cause
        return self.prepare(sample), target

    # Targets

    @cached_property
    def _numbers(self) -> np.ndarray | None:
        """The targets of all samples, where each is a number and batches need nothing else."""
        table = self.stored.table
        is_image = self.kept is not None and (self.kept.target_is_part or self.kept.mask_places)
        if is_image or self.target_transform is not None or not isinstance(table, SampleTable):
            return None
        return table.target_array() if table.target_kind == "number" else None

    def targets(self, batch: IndexBatch) -> Any:
        """What ``default_collate`` makes of the targets of a batch."""
        if self._numbers is not None:
            return torch.from_numpy(self._numbers[batch.positions])
        listed = self.kept or self.stored.table
        if listed is None or self.target_transform is not None:
            return collate_targets(self.targets_of(batch))
        return listed.collated_targets(batch.positions)

    def targets_of(self, batch: IndexBatch, read: list[Any] | None = None) -> list[Any]:
        """The target of each sample; ``read``: those before ``target_transform``, where known."""
        if self._numbers is not None:
            return list(self._numbers[batch.positions].tolist())
        targets = list(map(self.stored_target, batch.positions.tolist())) if read is None else read
        if self.target_transform is not None:
            targets = list(map(self.target_transform, targets))
        return targets

    def stored_target(self, index: int) -> Any:
        listed = self.kept or self.stored.table
        return self.stored.samples.read(index)[1] if listed is None else listed.target(index)

    # Whole columns

    def _tensors(self, batch: IndexBatch, ring: Ring | None) -> list[torch.Tensor]:
        outs = self.room(len(batch), ring, channels_last=batch.channels_last)
        self.read_into(outs, batch)
        return self.as_tensors(outs)

    def room(
        self, count: int, ring: Ring | None, *, channels_last: bool = False
    ) -> list[np.ndarray]:
        """Memory for whole batches of so many samples, one for each column."""
        take = fresh if ring is None else ring.take
        channels_last = channels_last and self.can_write_channels_last
        return room(count, self._outputs, take, channels_last=channels_last)

    def read_into(
        self, outs: list[np.ndarray], batch: IndexBatch, rows_B: np.ndarray | None = None
    ) -> None:
        """Read a batch's images into ``room`` for it; or into rows ``rows_B`` of a larger one."""
        if self.stored.is_remote:
            self._expect(batch)
        index_B = batch.positions
        drawn_by = batch.visits, batch.seed
        (program, out), *others = zip(self._programs, outs, strict=True)
        kept = self.kept
        if kept is None:
            files = cast("FileSource", self.stored.samples)
            images = open_files(files, index_B.tolist(), upright=self.is_upright)
            program.run_images(images, index_B, *drawn_by, out, rows_B, others)
            return
        try:
            if self.plan.mask:
                mask_program, masks = others.pop()
                self._refuse_other_sizes(index_B)
                mask_program.run(kept.stores[1], index_B, *drawn_by, masks, rows_B)
            program.run(kept.stores[0], index_B, *drawn_by, out, rows_B, others)
        except (UndecodableError, ChannelsError):
            with kept.naming_damage():
                raise

    def as_tensors(self, outs: list[np.ndarray]) -> list[torch.Tensor]:
        """Over the same memory; NumPy has no bfloat16, and holds its bits."""
        pairs = zip(outs, self._dtypes, strict=True)
        return [torch.from_numpy(out).view(dtype) for out, dtype in pairs]

    def _refuse_other_sizes(self, index_B: np.ndarray) -> None:
        """Raise ValueError where a mask is not as large as its image, whose draws it takes."""
        image, mask = (cast("Store", column.store) for column in self.columns)
        are_dense = image.spec.is_dense and mask.spec.is_dense
        for index in index_B[:1].tolist() if are_dense else index_B.tolist():
            sizes = image.shape(index)[-2:], mask.shape(index)[-2:]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"sample {index} has an image of {sizes[0]} and a mask of {sizes[1]} (height, "
                    "width); a transform of both needs one size."
                )

    def _expect(self, batch: IndexBatch) -> None:
        """Have what is fetched for these samples fetched at once."""
        if self.filled_share() < 1:
            self.stored.samples.expect(batch.positions.tolist())

    def read_for_device(
        self, program: DeviceProgram, batch: IndexBatch, ring: Ring, *, only_places: bool
    ) -> DeviceBatch:
        """Read a batch without its batch ops, but with their draws; only where samples are kept.

        With ``only_places`` the samples' positions in the store stand for them.
        """
        if self.stored.is_remote:
            self._expect(batch)
        kept = self.kept
        assert kept is not None
        index_B = batch.positions
        draws = program.draw(index_B, batch.visits, batch.seed)
        samples = index_B.copy()
        if not only_places:
            [samples] = room(len(index_B), [(program.sent_shape, np.dtype(np.uint8))], ring.take)
            whole = program.host or Program((), kept.images.spec)
            with kept.naming_damage():
                whole.run(kept.images, index_B, batch.visits, batch.seed, samples)
        return DeviceBatch(torch.from_numpy(samples), draws, self.targets(batch), self.keys)

    # What random draws are made from

    def seed_of(self, base_seed: int) -> int:
        """What they are made from in an epoch: the user's ``seed``, else this base seed."""
        return base_seed if self.options.seed is None else self.options.seed

    def visit(self, indices: Sequence[int]) -> IndexBatch:
        """The batch of these indices, for readers that no loader of ours tells their visits."""
        index_B = positions(as_numbers(indices), self.length)
        if isinstance(indices, IndexBatch) and np.array_equal(index_B, indices.positions):
            return indices  # as it was given, and not changed since
        # The base seed of the iterator of torch's that reads in this process, and a number that
        # tells it from others: torch starts an iterator's workers one after the other, and
        # multiprocessing numbers processes as they are made.
        worker = get_worker_info()
        base_seed = reader = torch.initial_seed()
        if worker is not None:
            base_seed = worker.seed - worker.id
            reader = worker.id - getattr(current_process(), "_identity", (0,))[-1]
        if self.options.seed is not None:
            reader = 0  # all draw from one seed
        assert self.visits is not None
        visits_B = self.visits.take(index_B, reader, indices)
        return IndexBatch.of(indices, index_B, visits_B, self.seed_of(base_seed))


class DeviceBatch(NamedTuple):
    """A batch that a ``DeviceProgram`` makes the images of; one row for each sample.

    ``samples`` are uint8 (B, C, H, W) as stored or as the core made them, or int64 (B,), where they
    lie in a copy of the store on the device; ``draws`` int16 (B, h + w), where rows and columns
    come from; None where samples are served as they are sent.
    """

    samples: torch.Tensor
    draws: torch.Tensor | None
    targets: Any
    keys: ItemKeys | None
