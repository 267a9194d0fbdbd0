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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from multiprocessing import current_process
from operator import is_not, ne
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fastdata.datasets.batch import (
    IndexBatch,
    SampleBatch,
    SharedVisits,
    are_same,
    as_numbers,
    positions,
    rows_of,
    stacked,
)
from fastdata.datasets.ring import Ring, laid_out
from fastdata.errors import ChannelsError, RemoteError, StoreGoneError, sample_error
from fastdata.machine.shared import SampleTable, collate_targets
from fastdata.pixels import TransformPlan, Views
from fastdata.pixels.compose import flatten
from fastdata.pixels.device import DeviceProgram, device_obstacle
from fastdata.pixels.images import (
    OpenedImages,
    decoded_shape,
    present,
    shown_class,
    without_exif,
)
from fastdata.pixels.program import Program
from fastdata.sources import FileSource, ItemKeys, Source
from fastdata.stores.options import Options
from fastdata.stores.readers import Store, UndecodableError
from fastdata.stores.samples import KeptSamples, ReadPath, open_files

Output = tuple[tuple[int, ...], np.dtype[Any]]
Column = torch.Tensor | list[Any]
CLOSED = "the dataset was closed; create it again to read from it"
_ALIGN_BYTES = 64


class Lane(NamedTuple):
    """What makes one column of a batch."""

    plan: TransformPlan
    program: Program | None = None  # runs the batch ops; None where there are none
    output: Output | None = None  # of every sample served; None where they differ
    last: Program | None = None  # runs the ops behind steps that are not known
    part: int = 0  # of a sample that it reads


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


@dataclass(frozen=True, slots=True)
class GoneSamples:
    """What is left of samples once their dataset is closed."""

    length: int
    keys: ItemKeys | None

    def __len__(self) -> int:
        return self.length

    def read(self, index: int) -> tuple[Any, Any]:
        raise StoreGoneError(CLOSED)

    def expect(self, indices: Sequence[int]) -> None: ...

    def path(self, index: int) -> str | None:
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Columns:
    """What batches are made of, and the columns of each.

    Attributes:
        samples: kept ones, or what they are read from.
        table: paths and targets; None where they are asked of the source.
        options: of the dataset.
        target_transform: the user's.
        pair_transform: the user's, of sample and target together, where it runs on each sample.
        plan: of the transform.
        lanes: one for each view of a sample, or for image and mask.
        watch: notices when the transforms were changed in place.
        path: of single samples that are kept nowhere.
        is_upright: whether samples were turned as their EXIF says before they were stored.
        is_remote: whether samples that are not kept are fetched from behind a URL.
        own: the method of a subclass that is asked for each item in its place; empty where there is
            none.
    """

    samples: KeptSamples | Source
    table: SampleTable | None
    visits: SharedVisits | None
    options: Options
    target_transform: Callable[[Any], Any] | None
    pair_transform: Callable[[Any, Any], Any] | None
    plan: TransformPlan
    lanes: tuple[Lane, ...]
    watch: Watch
    path: ReadPath | None
    is_upright: bool
    is_remote: bool
    own: str

    # What follows from these

    @cached_property
    def kept(self) -> KeptSamples | None:
        """The samples, where they are kept."""
        return self.samples if isinstance(self.samples, KeptSamples) else None

    @cached_property
    def length(self) -> int:
        return len(self.samples)

    @cached_property
    def outputs(self) -> list[Output] | None:
        """Of every lane; None where samples differ in one."""
        outputs = [lane.output for lane in self.lanes if lane.output is not None]
        return outputs if len(outputs) == len(self.lanes) else None

    @cached_property
    def _stores(self) -> tuple[Store, ...]:
        return () if self.kept is None else self.kept.stores

    @cached_property
    def _programs(self) -> list[Program]:
        """Of every lane; one without steps gives samples as they are stored."""
        return [lane.program or Program((), self._stores[0].spec) for lane in self.lanes]

    @cached_property
    def _dtypes(self) -> list[torch.dtype]:
        pairs = zip(self._programs, self.outputs or (), strict=True)
        return [program.as_tensor(np.empty(0, dtype)).dtype for program, (_, dtype) in pairs]

    @cached_property
    def _draws(self) -> bool:
        return any(lane.program is not None or lane.last is not None for lane in self.lanes)

    @cached_property
    def _are_alike(self) -> bool:
        """Whether kept samples are of one shape, which says what each is served as."""
        return self.outputs is not None and all(store.spec.is_dense for store in self._stores)

    # Columns

    def _tensors(self, batch: IndexBatch, ring: Ring | None = None) -> list[torch.Tensor]:
        """Whole batches, one for each lane."""
        outs = self.room(len(batch), ring, channels_last=batch.channels_last)
        self.read_into(outs, batch)
        return self.as_tensors(outs)

    def room(
        self, count: int, ring: Ring | None, *, channels_last: bool = False
    ) -> list[np.ndarray]:
        """Memory for whole batches of so many samples, one for each lane."""
        outputs = self.outputs
        assert outputs is not None
        channels_last = channels_last and self.can_write_channels_last
        if len(outputs) > 1 or (channels_last and ring is None):
            return _carved(count, outputs, ring, channels_last)
        [(shape, dtype)] = outputs
        if ring is None:
            return [np.empty((count, *shape), dtype)]
        return [ring.take((count, *shape), dtype, channels_last)]

    @property
    def can_write_channels_last(self) -> bool:
        pairs = zip(self._programs, self.outputs or (), strict=False)
        return all(program.can_write_channels_last(shape) for program, (shape, _) in pairs)

    def read_into(
        self, outs: list[np.ndarray], batch: IndexBatch, rows_B: np.ndarray | None = None
    ) -> None:
        """Read a batch's images into ``room`` for it; or into rows ``rows_B`` of a larger one."""
        if self.is_remote:
            self._expect(batch)
        programs = self._programs
        index_B = batch.positions
        kept = self.kept
        others = list(zip(programs[1:], outs[1:], strict=True))
        drawn_by = batch.visits, batch.seed
        if kept is None:
            files = cast("FileSource", self.samples)
            images = open_files(files, index_B.tolist(), upright=self.is_upright)
            programs[0].run_images(images, index_B, *drawn_by, outs[0], rows_B, others)
            return
        masks = others.pop() if self.plan.mask else None
        try:
            if masks is not None:
                self._refuse_other_sizes(index_B)
                masks[0].run(self._stores[1], index_B, *drawn_by, masks[1], rows_B)
            programs[0].run(self._stores[0], index_B, *drawn_by, outs[0], rows_B, others)
        except (UndecodableError, ChannelsError):
            with kept.naming_damage():
                raise

    def as_tensors(self, outs: list[np.ndarray]) -> list[torch.Tensor]:
        """Over the same memory; NumPy has no bfloat16, and holds its bits."""
        return [
            torch.from_numpy(out).view(dtype) for dtype, out in zip(self._dtypes, outs, strict=True)
        ]

    # Samples one by one

    def _samples(
        self, batch: IndexBatch, *, is_alone: bool
    ) -> tuple[Sequence[Column], list[Any] | None]:
        """Each lane's samples before unknown steps; and targets, where reading told them."""
        kept = self.kept
        indices = batch.positions.tolist()
        if self.lanes[0].program is not None:
            served: Sequence[Any] = self._alone(batch) if is_alone else self._tensors(batch)
            plans = [lane.plan for lane in self.lanes]
            return list(map(self._shown, served, plans)), None
        if self.is_remote:
            self._expect(batch)
        targets = None
        if kept is None:
            pairs = list(map(self._from_source, indices))
            samples = [sample for sample, _ in pairs]
            targets = [target for _, target in pairs]
        else:
            samples = self._turned(list(map(kept.sample, indices)))
        return [samples] * len(self.lanes), targets

    def _from_source(self, index: int) -> tuple[Any, Any]:
        path = self.path
        assert path is not None
        try:
            sample, target = path.source.read(index)
        except RemoteError:  # a network that is down is no sample's fault
            raise
        except OSError as cause:
            raise sample_error(path.source.path(index), index, cause) from cause
        return path.prepare(sample), target

    def _alone(self, batch: IndexBatch) -> list[list[torch.Tensor]]:
        """What ``_tensors`` gives, of samples in whatever shape each has."""
        kept = self.kept
        assert kept is not None
        if self.plan.mask:
            self._refuse_other_sizes(batch.positions)
        pairs = list(zip(batch.positions.tolist(), batch.visits, strict=True))
        columns: list[list[torch.Tensor]] = []
        with kept.naming_damage():
            for lane, program in zip(self.lanes, self._programs, strict=True):
                store = self._stores[lane.part]
                served = [
                    program.run_one(store, index, visit, batch.seed) for index, visit in pairs
                ]
                columns.append(list(map(program.as_tensor, served)))
        return columns

    def _shown(self, served: Sequence[torch.Tensor], plan: TransformPlan) -> list[Any]:
        """Samples after the batch ops, as the rest of the transform wants them."""
        if plan.kind == "tensor":
            return list(served)
        return self._turned([present(sample.numpy(), plan.kind) for sample in served])

    def _turned(self, samples: list[Any]) -> list[Any]:
        """Kept samples, which tell nothing of an EXIF that they were not turned by."""
        return samples if self.is_upright else list(map(without_exif, samples))

    def _finished(
        self, lane: Lane, samples: Column, batch: IndexBatch, ring: Ring | None
    ) -> Column:
        """What unknown steps, and those behind them, make of samples: whole where that can be."""
        plan = lane.plan
        last = lane.last
        if plan.per_sample:
            samples = [plan.run_unknown(sample) for sample in samples]
        if all(each.last is None for each in self.lanes):
            return samples
        shapes = {decoded_shape(sample) if plan.per_sample else sample.shape for sample in samples}
        shape = shapes.pop() if len(shapes) == 1 else None
        if last is None:
            return samples if shape is None or plan.per_sample else torch.stack(list(samples))
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
        # Of the ring there is one piece of memory a batch.
        take = np.empty if ring is None or len(self.lanes) > 1 else ring.take
        out = take((len(samples), *output[0]), output[1])
        last.run_images(
            OpenedImages.decoded(decoded), batch.positions, batch.visits, batch.seed, out
        )
        return last.as_tensor(out)

    # Files and stores

    def _expect(self, batch: IndexBatch) -> None:
        """Have what is fetched for these samples fetched at once."""
        if self.kept is None or self.kept.filled_share() < 1:
            self.samples.expect(batch.positions.tolist())

    def _refuse_other_sizes(self, index_B: np.ndarray) -> None:
        """Raise ValueError where a mask is not as large as its image, whose draws it takes."""
        kept = self.kept
        assert kept is not None
        image, mask = kept.stores
        is_dense = image.spec.shape is not None and mask.spec.shape is not None
        for index in index_B[:1].tolist() if is_dense else index_B.tolist():
            sizes = image.shape(index)[-2:], mask.shape(index)[-2:]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"sample {index} has an image of {sizes[0]} and a mask of {sizes[1]} (height, "
                    "width); a transform of both needs one size."
                )


class Reader(_Columns):
    """Serves batches of what it holds; safe from several threads at once."""

    def emptied(self) -> Reader:
        """What is left of it once there is nothing to read any more: how it was read."""
        gone = GoneSamples(self.length, self.keys)
        return replace(self, samples=gone, table=None, visits=None, path=None)

    @property
    def keys(self) -> ItemKeys | None:
        """What items are that are no pairs; where none are kept, known once one was read."""
        return self.samples.keys

    @cached_property
    def obstacle(self) -> str | None:
        """Why whole batches need Python work per sample; None if they do not."""
        if self.own:
            return self.own
        if self.kept is None and self.lanes[0].program is None:
            return "storage='none' prepares every sample when it is read"
        if self.kept is not None and self.kept.is_tuple:
            return "samples have several parts, such as image and mask"
        if self.pair_transform is not None:
            return f"samples have several parts, such as image and mask, and {self.plan.obstacle}"
        if not self.plan.is_batched:
            return f"the transform works per sample: {self.plan.obstacle}"
        if self.outputs is None:
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
        if len(self.lanes) > 1:
            return "several views of an image, or image and mask, are made on the CPU"
        return device_obstacle(self.plan, self.kept.images.spec)

    @property
    def served_bytes(self) -> int | None:
        """Bytes of each sample in a whole batch; None where there are no whole batches."""
        if self.obstacle is not None or self.outputs is None:
            return None
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.outputs)

    @property
    def image_form(self) -> str:
        """Shape and type of each image in a whole batch."""
        names = [shown_class(lane.plan.kind).__name__ for lane in self.lanes]
        pairs = zip(names, self.as_tensors(self.room(0, None)), strict=True)
        form = ", ".join(
            f"{name}{tuple(each.shape[1:])} of {str(each.dtype)[6:]}" for name, each in pairs
        )
        return form if self.keys is None else f"{form} in {self.keys}"

    def filled_share(self, index: np.ndarray | None = None) -> float:
        """Share of the samples, or of those of ``index``, that are kept already."""
        return 0.0 if self.kept is None else self.kept.filled_share(index)

    @cached_property
    def _numbers(self) -> np.ndarray | None:
        """The targets of all samples, where each is a number and batches need nothing else."""
        is_image = self.kept is not None and (self.kept.target_is_part or self.kept.mask_places)
        if is_image or self.target_transform is not None or self.keys is not None:
            return None
        is_listed = isinstance(self.table, SampleTable) and self.table.target_kind == "number"
        return cast("SampleTable", self.table).target_array() if is_listed else None

    @cached_property
    def _classes(self) -> list[type]:
        """Of what each lane serves, in lists of samples."""
        return [shown_class(lane.plan.end_kind or "tensor") for lane in self.lanes]

    # Batches and items

    def __call__(self, batch: IndexBatch, ring: Ring | None = None) -> Any:
        """Images (B, *shape) and collated targets; only if there is no obstacle.

        Memory comes from ``ring``, or is fresh.
        """
        tensors = self._tensors(batch, ring)
        if self._numbers is None or len(tensors) > 1:
            return self.joined(tensors, None if self.plan.mask else self.targets(batch))
        return [tensors[0], torch.from_numpy(self._numbers[batch.positions])]

    def items(self, batch: IndexBatch, ring: Ring | None = None) -> list[Any]:
        """A ``SampleBatch`` where all images are of one shape, else a list of samples."""
        if self.pair_transform is not None:
            return self._pairs(batch)
        columns, targets = self._columns(batch, ring, is_alone=self.outputs is None)
        tensors = [column for column in columns if isinstance(column, torch.Tensor)]
        is_whole = len(tensors) == len(columns)
        return self.sample_batch(tensors, targets) if is_whole else self._listed(columns, targets)

    def item(self, batch: IndexBatch) -> Any:
        """Sample and target of a batch of one, in whatever shape it has."""
        if self.pair_transform is not None:
            return self._pairs(batch)[0]
        is_alone = self.kept is not None and not self._are_alike
        return self._listed(*self._columns(batch, None, is_alone=is_alone))[0]

    def joined(self, tensors: list[torch.Tensor], targets: Any) -> Any:
        """The batch of these tensors, one for each lane, and of its targets, unless masks are."""
        images: Any = tensors if self.plan.views else tensors[0]
        return stacked(images, tensors[1] if self.plan.mask else targets, self.keys)

    def sample_batch(self, tensors: list[torch.Tensor], targets: list[Any] | None) -> SampleBatch:
        """As ``joined``, with a list of the samples."""
        plan = self.plan
        kind = self._classes[0]
        if plan.mask is not None:
            masks = rows_of(tensors[1], self._classes[1])
            return SampleBatch(tensors[0], tensors[1], masks, kind, self.keys)
        images = tensors if plan.views else tensors[0]
        return SampleBatch(images, None, targets or [], kind, self.keys, plan.made)

    def targets(self, batch: IndexBatch) -> Any:
        """What ``default_collate`` makes of the targets of a batch."""
        listed = self.table if self.kept is None else self.kept
        if listed is None or self.target_transform is not None:
            return collate_targets(self.targets_of(batch))
        return listed.collated_targets(batch.positions)

    def targets_of(self, batch: IndexBatch, read: list[Any] | None = None) -> list[Any]:
        """The target of each sample; ``read``: those before ``target_transform``, where known."""
        if read is None and self._numbers is not None:
            return list(self._numbers[batch.positions].tolist())
        indices = batch.positions.tolist()
        targets = list(map(self.stored_target, indices)) if read is None else read
        if self.target_transform is not None:
            targets = list(map(self.target_transform, targets))
        return targets

    def stored_target(self, index: int) -> Any:
        if self.kept is not None:
            return self.kept.target(index)
        return self.samples.read(index)[1] if self.table is None else self.table.target(index)

    def _listed(self, columns: Sequence[Column], targets: list[Any] | None) -> list[Any]:
        """The items of a batch."""
        each = [
            rows_of(column, kind) if isinstance(column, torch.Tensor) else column
            for column, kind in zip(columns, self._classes, strict=True)
        ]
        targets = list(each.pop()) if targets is None else targets
        samples = map(self.plan.made, zip(*each, strict=True)) if self.plan.views else each[0]
        return _items(zip(samples, targets, strict=True), self.keys)

    def _pairs(self, batch: IndexBatch) -> list[Any]:
        """The items, by the user's own code for sample and target together."""
        assert self.pair_transform is not None
        [samples], read = self._samples(batch, is_alone=True)
        targets = list(map(self.stored_target, batch.positions.tolist())) if read is None else read
        return _items(map(self.pair_transform, samples, targets), self.keys)

    def _columns(
        self, batch: IndexBatch, ring: Ring | None, *, is_alone: bool
    ) -> tuple[Sequence[Column], list[Any] | None]:
        """What is made of a batch's samples; and their targets, where no column is of masks."""
        read = None
        columns: Sequence[Column]
        if self.obstacle is None and not is_alone:
            columns = self._tensors(batch, ring)
        else:
            columns, read = self._samples(batch, is_alone=is_alone)
            if not self.plan.mask:
                pairs = zip(self.lanes, columns, strict=True)
                columns = [self._finished(lane, samples, batch, ring) for lane, samples in pairs]
        return columns, None if self.plan.mask else self.targets_of(batch, read)

    def read_for_device(
        self, program: DeviceProgram, batch: IndexBatch, ring: Ring, *, only_places: bool
    ) -> DeviceBatch:
        """Read a batch without its batch ops, but with their draws; only where samples are kept.

        With ``only_places`` the samples' positions in the store stand for them.
        """
        if self.is_remote:
            self._expect(batch)
        kept = self.kept
        index_B = batch.positions
        assert kept is not None
        draws = program.draw(index_B, batch.visits, batch.seed)
        samples = index_B.copy()
        if not only_places:
            samples = ring.take((len(index_B), *program.sent_shape), np.dtype(np.uint8))
            whole = program.host or Program((), self._stores[0].spec)
            with kept.naming_damage():
                whole.run(self._stores[0], index_B, batch.visits, batch.seed, samples)
        return DeviceBatch(torch.from_numpy(samples), draws, self.targets(batch), self.keys)

    # What random draws are made from

    def seed_of(self, base_seed: int) -> int:
        """What they are made from in an epoch: the user's ``seed``, else this base seed."""
        return base_seed if self.options.seed is None else self.options.seed

    def visit(self, indices: Sequence[int]) -> IndexBatch:
        """The batch of these indices, for readers that no loader of ours tells their visits."""
        index_B = positions(as_numbers(indices), self.length)
        if isinstance(indices, IndexBatch) and np.array_equal(
            index_B, indices.positions
        ):  # else it was changed
            return indices
        # The base seed of the iterator of torch's that reads in this process, and a number that
        # tells it from others: torch starts an iterator's workers one after the other, and
        # multiprocessing numbers processes as they are made
        worker = get_worker_info()
        base_seed = reader = torch.initial_seed()
        if worker is not None:
            base_seed = worker.seed - worker.id
            reader = worker.id - getattr(current_process(), "_identity", (0,))[-1]
        if self.options.seed is not None:
            reader = 0  # all draw from one seed
        if not self._draws or self.visits is None:
            visits_B = np.zeros_like(index_B)
        else:
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


def _items(pairs: Iterable[Any], keys: ItemKeys | None) -> list[Any]:
    return list(pairs) if keys is None else [keys.join(*pair) for pair in pairs]


def _carved(
    count: int, outputs: list[Output], ring: Ring | None, channels_last: bool
) -> list[np.ndarray]:
    """Memory for so many of each output: one piece of the ring's, or fresh."""
    shapes = [(count, *shape) for shape, _ in outputs]
    sizes = [
        math.prod(shape) * dtype.itemsize for shape, (_, dtype) in zip(shapes, outputs, strict=True)
    ]
    starts = np.cumsum([0, *(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)]).tolist()
    take = np.empty if ring is None else ring.take
    # By its buffer: a view of an array refers to what lies behind that, and the ring would take the
    # memory back.
    whole = take((starts[-1],), np.dtype(np.uint8)).data
    return [
        laid_out(np.frombuffer(whole, dtype, math.prod(shape), start), shape, channels_last)
        for shape, (_, dtype), start in zip(shapes, outputs, starts, strict=False)
    ]


# Changes in place

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, ModuleType, Enum)
_THEIRS = ("torchvision.", "timm.")


class Watch:
    """What transforms consisted of when they were compiled, to notice changes in place."""

    def __init__(self, calls: tuple[Any, ...], unknown: Iterable[Any]) -> None:
        """Note what there is; not what is in unknown steps, which run as they are."""
        self._calls = calls
        self._parts: list[Any] = []  # dicts and lists
        self._arrays: list[Any] = []
        self._steps: list[Any] | None = None  # where code was read to find them
        met = {id(step): step for step in unknown}
        for step in met.values():
            if type(step).__module__.startswith(_THEIRS):  # which may become one that is known
                self._parts.append(vars(step))
        steps = _leaves(calls)
        self._note(list(calls), met)
        if any(id(step) not in met for step in steps):
            self._note(steps, met)
            self._steps = steps
        self._copies = [part.copy() for part in self._parts]  # with the same objects in them
        self._octets = list(map(_octets, self._arrays))

    def _note(self, values: list[Any], met: dict[int, Any]) -> None:
        """Note these, and all that is in them."""
        queue = deque(values)
        while queue:
            value = queue.popleft()
            if id(value) in met or isinstance(value, _ATOMS):
                continue
            met[id(value)] = value
            if isinstance(value, (torch.Tensor, np.ndarray)):
                self._arrays.append(value)
            elif isinstance(value, (dict, list)):
                self._parts.append(value)
                queue.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, tuple):
                queue.extend(value)
            else:
                queue.append(getattr(value, "__dict__", None))

    def is_changed(self, calls: tuple[Any, ...]) -> bool:
        if any(map(is_not, calls, self._calls)):
            return True
        try:
            # Quick: all that is in a part is the same object.
            if any(map(ne, self._parts, self._copies)):
                return True
        except (TypeError, ValueError, RuntimeError):  # arrays cannot be compared so
            return True
        if self._arrays and list(map(_octets, self._arrays)) != self._octets:
            return True
        return self._steps is not None and not are_same(_leaves(calls), self._steps)


def _octets(array: Any) -> bytes:
    try:
        return np.asarray(array).tobytes()
    except (TypeError, RuntimeError):  # of bfloat16, or on a device
        return b""


def _leaves(transform: Any) -> list[Any]:
    """The steps of a transform, with those of each view in the place of ``Views``."""
    leaves: list[Any] = []
    for step in flatten(transform):
        leaves += _leaves(step.transforms) if type(step) is Views else [step]
    return leaves
