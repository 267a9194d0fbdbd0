"""Reading: what an epoch is served from, frozen when it begins.

A ``Reader`` holds samples, program and targets as one value, so that nothing that is assigned to the dataset meanwhile
reaches an epoch: shapes, memory and program are of one piece. It also holds the memory that samples lie in. Who reads
takes it from a ``Lease`` for as long as one batch takes; closing the dataset ends the lease, and the memory goes with
the last batch that is being read.

Shape letters: B batch, C channels, H W size sent, h w size served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import current_process
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fastdata.batch import IndexBatch, SampleBatch, SharedVisits, as_numbers, stacked
from fastdata.errors import ChannelsError, RemoteError, StoreGoneError, counted, sample_error
from fastdata.images import (
    Form,
    OpenedImages,
    Planes,
    decoded_shape,
    present,
    shown_class,
    tensor_class,
    to_image,
    without_exif,
)
from fastdata.prepare import KeptSamples, ReadPath, open_files
from fastdata.ring import BatchRing
from fastdata.shared import SampleTable, collate_targets
from fastdata.sources import FileSource, IndexedKeys, ItemForm, ItemKeys, Source
from fastdata.transforms import TransformPlan
from fastdata.transforms.cpu import Program
from fastdata.transforms.device import DeviceProgram

CLOSED = "the dataset was closed; create it again to read from it"
_ALIGN_BYTES = 64


class Lane(NamedTuple):
    """What makes one of the tensors of a whole batch."""

    program: Program | None  # runs the batch ops; None where there are none
    output: tuple[tuple[int, ...], np.dtype[Any]] | None  # of every sample served; None where they differ
    part: int = 0  # of a sample that it reads


class Lease:
    """A reader, for as long as the dataset that it is of is open."""

    def __init__(self, reader: Reader | None, gone: str = "") -> None:
        self._reader, self._gone = reader, gone

    def __call__(self) -> Reader:
        """What to read a batch by, which its memory stays valid with.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        reader = self._reader
        if reader is None:
            raise StoreGoneError(self._gone)
        return reader

    def end(self, why: str) -> None:
        self._gone = why
        self._reader = None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """All that batches are made of; safe from several threads at once.

    Attributes:
        samples: kept ones, or what they are read from.
        table: paths and targets; None where they are asked of the source.
        plan: of the transform.
        lanes: one for each view of a sample, or for image and mask.
        lasts: of each view, run the batch ops after steps that are not known.
        path: of single samples that are kept nowhere.
        pair_transform: takes sample and target together.
        outputs: of every lane; None where samples differ in one.
        obstacle: why whole batches cannot be served as one tensor; None if they can.
        is_upright: whether samples were turned as their EXIF says before they were stored.
        is_remote: whether samples that are not kept are fetched from behind a URL.
        return_index: whether items have their sample's index as their last value.
    """

    samples: KeptSamples | Source
    table: SampleTable | None
    visits: SharedVisits | None
    seed: int | None
    plan: TransformPlan
    lanes: tuple[Lane, ...]
    outputs: list[tuple[tuple[int, ...], np.dtype[Any]]] | None
    lasts: tuple[Program | None, ...]
    path: ReadPath | None
    target_transform: Callable[[Any], Any] | None
    pair_transform: Callable[[Any, Any], Any] | None
    is_upright: bool
    is_remote: bool
    return_index: bool
    obstacle: str | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "obstacle", self._find_obstacle())

    def _find_obstacle(self) -> str | None:
        kept, plan = self.kept, self.plan
        if kept is None and self.lanes[0].program is None:
            return "storage='none' prepares every sample when it is read"
        if kept is not None and kept.is_tuple:
            return "samples have several parts, such as image and mask"
        if self.pair_transform is not None and plan.per_sample:
            return f"samples have several parts, such as image and mask, and {plan.obstacle}"
        if not plan.is_batched:
            return f"the transform works per sample: {plan.obstacle}"
        if self.outputs is None:
            return "prepared samples differ in shape; a crop or resize to one size would make them batches"
        return None

    @property
    def kept(self) -> KeptSamples | None:
        return self.samples if isinstance(self.samples, KeptSamples) else None

    @property
    def item_keys(self) -> ItemForm | None:
        """What items are that are no pairs, as far as that is known."""
        keys = self.samples.keys
        return IndexedKeys(keys) if self.return_index else keys

    def emptied(self) -> Reader:
        """What is left of it once there is nothing to read any more: how it was read."""
        gone = GoneSamples(len(self.samples), self.samples.keys)
        return replace(self, samples=gone, table=None, visits=None, path=None)

    # Whole batches

    def items(self, batch: IndexBatch, ring: BatchRing | None = None) -> list[Any]:
        """A ``SampleBatch`` if the transform allows, else a list of samples."""
        if self.obstacle is None:
            return self.sample_batch(batch, ring)
        self.expect(batch)
        if self.pair_transform is not None:
            return [self.item(batch, k) for k in range(len(batch))]
        plan = self.plan
        columns: Any  # the samples of each view
        if self.lanes[0].program is None or self.outputs is None or self.kept is None:
            rows, targets = map(list, zip(*(self._read(batch, k) for k in range(len(batch))), strict=True))
            columns = list(zip(*rows, strict=True))
        else:  # what comes before the first step that is not served
            columns = list(map(self._shown, self._read_tensors(batch, None), plan.each))
            targets = [self.stored_target(index) for index in batch.positions.tolist()]
        columns = [list(map(view.run_unknown, column)) for view, column in zip(plan.each, columns, strict=True)]
        if self.target_transform is not None:
            targets = [self.target_transform(target) for target in targets]
        targets = list(map(self._beside, targets, batch.positions.tolist()))
        images = self._run_last(columns, batch, ring)
        if images is not None:
            return self.as_batch(images, lambda: targets, plan.end_kind)
        columns = [list(map(view.run_last, column)) for view, column in zip(plan.each, columns, strict=True)]
        samples = map(self._together, zip(*columns, strict=True))
        return list(map(self._join, samples, targets))

    def read_batch(self, batch: IndexBatch, ring: BatchRing | None = None) -> Any:
        """Images (B, *shape) and what ``default_collate`` makes of the targets; only if there is no obstacle.

        Memory comes from ``ring``, or is fresh.
        """
        tensors = self._read_tensors(batch, ring)
        return self.joined(tensors, lambda: self.read_targets(batch))

    def sample_batch(self, batch: IndexBatch, ring: BatchRing | None = None) -> SampleBatch:
        return self.as_batch(self._read_tensors(batch, ring), lambda: self.targets_of(batch))

    def joined(self, tensors: list[torch.Tensor], read_targets: Callable[[], Any]) -> Any:
        """The batch of these tensors, one for each view, and of their targets; masks are tensors among them."""
        images: Any = tensors if self.plan.views else tensors[0]
        return stacked(images, tensors[1] if self.plan.mask else read_targets(), self.item_keys)

    def as_batch(
        self, tensors: list[torch.Tensor], read_targets: Callable[[], list[Any]], kind: Form | None = None
    ) -> SampleBatch:
        """As ``joined``, with a list of the samples."""
        plan, keys = self.plan, self.item_keys
        image_class = shown_class(kind or plan.kind)
        if plan.mask:
            masks = [mask.as_subclass(tensor_class(plan.mask.kind)) for mask in tensors[1].unbind(0)]
            return SampleBatch(tensors[0], tensors[1], masks, image_class, keys)
        images = tensors if plan.views else tensors[0]
        return SampleBatch(images, None, read_targets(), image_class, keys, plan.made)

    def read_targets(self, batch: IndexBatch) -> Any:
        """What ``default_collate`` makes of the targets of a batch."""
        listed = self.table if self.kept is None else self.kept
        if listed is None or self.target_transform is not None:
            return collate_targets(self.targets_of(batch))
        targets = listed.collated_targets(batch.positions)
        return [targets, torch.tensor(batch.positions)] if self.return_index else targets

    def targets_of(self, batch: IndexBatch) -> list[Any]:
        indices = batch.positions.tolist()
        targets = [self._target(index) for index in indices]
        return list(zip(targets, indices, strict=True)) if self.return_index else targets

    def room(self, count: int, ring: BatchRing | None) -> list[np.ndarray]:
        """Memory for a whole batch of so many samples: for each view of images, or for images and masks."""
        outputs = self.outputs
        assert outputs is not None
        return _take([((count, *shape), dtype) for shape, dtype in outputs], ring)

    def read_into(self, outs: list[np.ndarray], batch: IndexBatch, rows_B: np.ndarray | None = None) -> None:
        """Read the images of a batch into ``room`` for it; or for a larger one, where ``rows_B`` says which rows."""
        self.expect(batch)
        kept = self.kept
        pairs: list[Any] = [(lane.program, out) for lane, out in zip(self.lanes, outs, strict=True)]
        if kept is not None:
            if self.plan.mask:
                self._refuse_other_sizes(batch.positions)
                _serve_into([pairs.pop()], kept, batch, rows_B, part=1)
            _serve_into(pairs, kept, batch, rows_B)
        else:
            program, out = pairs[0]
            images = self.open_files(batch.positions.tolist())
            program.run_images(images, batch.positions, batch.visits, batch.seed, out, rows_B, pairs[1:])

    def as_tensors(self, outs: list[np.ndarray]) -> list[torch.Tensor]:
        pairs = zip((lane.program for lane in self.lanes), outs, strict=True)
        return [torch.from_numpy(out) if program is None else program.as_tensor(out) for program, out in pairs]

    def read_for_device(
        self, program: DeviceProgram, batch: IndexBatch, ring: BatchRing, *, only_places: bool
    ) -> DeviceBatch:
        """Read a batch without its batch ops, but with what those draw; only where samples are kept.

        With ``only_places`` the samples' positions in the store stand for them.
        """
        self.expect(batch)
        kept, index_B = self.kept, batch.positions
        assert kept is not None
        draws, samples = program.draw(index_B, batch.visits, batch.seed), index_B.copy()
        if not only_places:
            samples = ring.take((len(index_B), *program.sent_shape), np.dtype(np.uint8))
            _serve_into([(program.host, samples)], kept, batch)
        return DeviceBatch(torch.from_numpy(samples), draws, self.read_targets(batch), self.item_keys)

    def _read_tensors(self, batch: IndexBatch, ring: BatchRing | None) -> list[torch.Tensor]:
        outs = self.room(len(batch), ring)
        self.read_into(outs, batch)
        return self.as_tensors(outs)

    def _run_last(
        self, columns: Sequence[Sequence[Any]], batch: IndexBatch, ring: BatchRing | None
    ) -> list[torch.Tensor] | None:
        """Whole batches of what steps that are not known gave for each view; None where one view cannot be one.

        Known steps behind them run here; a view that has none of either is stacked.
        """
        views = self.plan.each
        tensors: list[torch.Tensor] = []
        if not any(self.lasts):
            return None
        for view, last, samples in zip(views, self.lasts, columns, strict=True):
            shapes = {decoded_shape(sample) if view.per_sample else sample.shape for sample in samples}
            shape = shapes.pop() if len(shapes) == 1 else None
            if shape is not None and not view.per_sample:
                tensors.append(torch.stack(list(samples)))
                continue
            if last is None or shape is None:
                return None
            with ChannelsError.naming(int(batch.positions[0])):
                output = last.output(shape, is_of_all=True)
            if output is None:
                return None
            decoded = [np.ascontiguousarray(image).reshape(*shape[1:], shape[0]) for image in samples]
            # Of the ring there is one piece of memory a batch.
            take = np.empty if ring is None or len(views) > 1 else ring.take
            out = take((len(samples), *output[0]), output[1])
            last.run_images(OpenedImages.decoded(decoded), batch.positions, batch.visits, batch.seed, out)
            tensors.append(last.as_tensor(out))
        return tensors

    def expect(self, batch: IndexBatch) -> None:
        """Have what is fetched for these samples fetched at once."""
        if self.is_remote and (self.kept is None or self.kept.filled_share() < 1):
            self.samples.expect(batch.positions.tolist())

    def _refuse_other_sizes(self, index_B: np.ndarray) -> None:
        """Raise ValueError where a mask is not as large as its image: what is drawn for one would not fit the other."""
        kept = self.kept
        assert kept is not None
        image, mask = kept.stores
        is_dense = image.spec.shape is not None and mask.spec.shape is not None
        for index in index_B[:1].tolist() if is_dense else index_B.tolist():
            sizes = image.shape(index)[-2:], mask.shape(index)[-2:]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"sample {index} has an image of {sizes[0]} and a mask of {sizes[1]} (height, width); a transform "
                    "of both needs one size."
                )

    def open_files(self, indices: Sequence[int]) -> OpenedImages:
        """The files of samples that are kept nowhere, as they are to be served."""
        return open_files(cast("FileSource", self.samples), indices, upright=self.is_upright)

    # One sample

    def item(self, batch: IndexBatch, k: int) -> Any:
        """Sample and target ``k`` of a batch."""
        one, plan = slice(k, k + 1), self.plan
        samples, target = self._read(batch, k)
        if plan.mask:
            return self._join(samples[0], target)
        if self.pair_transform is not None:
            transformed: tuple[Any, Any] = self.pair_transform(samples[0], target)
            return transformed if self.item_keys is None else self._join(*transformed)
        samples = [view.run_unknown(sample) for view, sample in zip(plan.each, samples, strict=True)]
        alone = IndexBatch([batch[k]], batch.positions[one], batch.visits[one], batch.seed)
        images = self._run_last([[sample] for sample in samples], alone, None)
        if images is None:
            samples = [view.run_last(sample) for view, sample in zip(plan.each, samples, strict=True)]
        else:
            samples = [image[0].as_subclass(tensor_class(plan.end_kind or "tensor")) for image in images]
        target = target if self.target_transform is None else self.target_transform(target)
        return self._join(self._together(samples), self._beside(target, int(batch.positions[k])))

    def _beside(self, target: Any, index: int) -> Any:
        """What a sample's item has beside it."""
        return (target, index) if self.return_index else target

    def _join(self, sample: Any, target: Any) -> Any:
        keys = self.item_keys
        return (sample, target) if keys is None else keys.join(sample, target)

    def _read(self, batch: IndexBatch, k: int) -> tuple[list[Any], Any]:
        """A sample as it is before the steps that are not known, for each view, and its target before any."""
        index, one, plan = int(batch.positions[k]), slice(k, k + 1), self.plan
        kept, program, path = self.kept, self.lanes[0].program, self.path
        alone = IndexBatch([index], batch.positions[one], batch.visits[one], batch.seed)
        if path is not None and program is None:
            try:
                sample, target = path.source.read(index)
            except RemoteError:  # a network that is down is no sample's fault
                raise
            except OSError as cause:
                raise sample_error(path.source.path(index), index, cause) from cause
            sample = path.prepare(sample)
            return [to_image(sample) if isinstance(sample, Planes) else sample] * len(plan.each), target
        target = self.stored_target(index)
        if kept is not None and program is None:
            sample = kept.sample(index)
            return [sample if self.is_upright else without_exif(sample)] * len(plan.each), target
        if kept is None:
            served = self._read_tensors(alone, None)
        else:
            served = [image[None] for image in self._read_alone(kept, index, batch.visits[k], batch.seed)]
        if plan.mask:
            target = served.pop()[0].as_subclass(tensor_class(plan.mask.kind))
        return [self._shown(images, view)[0] for images, view in zip(served, plan.each, strict=True)], target

    def _read_alone(self, kept: KeptSamples, index: int, visit: int, seed: int) -> list[torch.Tensor]:
        """What ``_read_tensors`` gives of one sample, in whatever shape it has."""
        if self.plan.mask:
            self._refuse_other_sizes(np.array([index]))
        served = []
        with kept.naming_damage():
            for program, _, part in self.lanes:
                assert program is not None
                served.append(program.as_tensor(program.run_one(kept.stores[part].settled, index, visit, seed)))
        return served

    def _together(self, samples: Iterable[Any]) -> Any:
        """The only one of a sample's views, or all of them, as the transform gives them."""
        return self.plan.made(samples) if self.plan.views else next(iter(samples))

    def _shown(self, served: torch.Tensor, plan: TransformPlan) -> list[Any]:
        """Samples after the batch ops, as the rest of the transform wants them."""
        if plan.kind != "pil":
            kind = tensor_class(plan.kind)
            return [image.as_subclass(kind) for image in served.unbind(0)]
        images = [present(image, plan.kind) for image in served.numpy()]
        return images if self.is_upright else list(map(without_exif, images))

    def stored_target(self, index: int) -> Any:
        if isinstance(self.samples, KeptSamples):
            return self.samples.target(index)
        return self.samples.read(index)[1] if self.table is None else self.table.target(index)

    def _target(self, index: int) -> Any:
        target = self.stored_target(index)
        return target if self.target_transform is None else self.target_transform(target)

    # What random draws are made from

    def seed_of(self, base_seed: int) -> int:
        """What they are made from in an epoch of this base seed: the user's ``seed``, if there is one."""
        return base_seed if self.seed is None else self.seed

    def visit(self, indices: Sequence[int]) -> IndexBatch:
        """The batch of these indices, for readers that no loader of fastdata's tells their visits."""
        index_B = positions(as_numbers(indices), len(self.samples))
        if isinstance(indices, IndexBatch) and np.array_equal(index_B, indices.positions):  # else it was changed
            return indices
        # The base seed of the iterator of torch's that reads in this process, and a number that tells it from others:
        # torch starts an iterator's workers one after the other, and multiprocessing numbers processes as they are made
        worker = get_worker_info()
        base_seed = reader = torch.initial_seed()
        if worker is not None:
            base_seed, reader = worker.seed - worker.id, worker.id - getattr(current_process(), "_identity", (0,))[-1]
        if self.seed is not None:
            reader = 0  # all draw from one seed
        draws = self.lanes[0].program is not None or any(self.lasts)
        if not draws or self.visits is None:
            visits_B = np.zeros_like(index_B)
        else:
            visits_B = self.visits.take(index_B, reader, indices)
        return IndexBatch(indices, index_B, visits_B, self.seed_of(base_seed))


def positions(index_B: np.ndarray, length: int) -> np.ndarray:
    """Check that indices (int64, B) are in [-length, length) and make negative ones count from the end."""
    if not (index_B.view(np.uint64) >= length).any():  # as unsigned numbers, negative ones are too large as well
        return index_B
    wrong = index_B[(index_B < -length) | (index_B >= length)]
    if len(wrong):
        raise IndexError(f"index {wrong[0]} is out of range for a dataset of {counted(length, 'sample')}")
    return np.where(index_B < 0, index_B + length, index_B)


class DeviceBatch(NamedTuple):
    """A batch that a ``DeviceProgram`` makes the images of. All its tensors have one row for each sample.

    ``samples`` are uint8 (B, C, H, W) as stored or as the core made them, or int64 (B,), where they lie in a copy of
    the store on the device; ``draws`` int16 (B, windows, 4), None where samples are served as they are sent.
    """

    samples: torch.Tensor
    draws: torch.Tensor | None
    targets: Any
    keys: ItemForm | None


def _serve_into(
    pairs: list[Any], kept: KeptSamples, batch: IndexBatch, rows_B: np.ndarray | None = None, part: int = 0
) -> None:
    """Serve a part of a batch's samples by each program, or as stored where that is None, into its memory."""
    store = kept.stores[part].settled
    (program, out), *others = [(program or Program((), store.spec), out) for program, out in pairs]
    with kept.naming_damage():
        program.run(store, batch.positions, batch.visits, batch.seed, out, rows_B, others)


def _take(wanted: list[tuple[tuple[int, ...], np.dtype[Any]]], ring: BatchRing | None) -> list[np.ndarray]:
    """Memory for arrays of these shapes and dtypes: one piece of the ring's, or fresh."""
    take = np.empty if ring is None else ring.take
    if len(wanted) == 1:
        return [take(*wanted[0])]
    counts = [math.prod(shape) for shape, _ in wanted]
    sizes = [count * dtype.itemsize for count, (_, dtype) in zip(counts, wanted, strict=True)]
    ends = np.cumsum([-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes]).tolist()
    # By its buffer: a view of an array refers to what lies behind that, and the ring would take the memory back.
    whole = take((ends[-1],), np.dtype(np.uint8)).data
    parts = zip(wanted, counts, [0, *ends], strict=False)
    return [np.frombuffer(whole, dtype, count, start).reshape(shape) for (shape, dtype), count, start in parts]
