"""The inputs of an epoch's batches as one value, and the properties that follow from them.

A ``Reading`` holds samples, programs and targets. Because it is frozen, later changes of the
dataset do not affect an epoch that has begun, and the memory of the samples stays valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from fastdata.datasets.column import Column
from fastdata.datasets.mixed_sizes import name_unequal
from fastdata.datasets.visits import IndexBatch
from fastdata.machine.tables import SampleTable, collate_targets
from fastdata.pixels.arrays import Array, Shape
from fastdata.pixels.plan import NOT_STORED, PairTransform, Transform, TransformPlan
from fastdata.pixels.program import Program
from fastdata.pixels.samples import Form, shown_class, shown_shape
from fastdata.sources.source import ItemKeys
from fastdata.stores.kept import KeptSamples
from fastdata.stores.preparer import Steps

if TYPE_CHECKING:
    from fastdata.datasets.buffers import Output
    from fastdata.datasets.stored import Stored


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of all samples.

    Attributes:
        stored: the samples.
        transform: the user's ``target_transform``, if it is called with only the target.
    """

    stored: Stored
    transform: Transform | None

    @cached_property
    def numbers(self) -> Array | None:
        """The targets of all samples, if they are numbers and stay unchanged; else None."""
        table = self.stored.table
        kept = self.stored.kept
        # If targets are images, the table has numbers too, but these mean nothing.
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

        ``read`` are the targets before ``transform``, if they were read together with the samples.
        """
        if self.numbers is not None:
            return list(self.numbers[batch.positions].tolist())
        targets = list(map(self.stored_target, batch.positions.tolist())) if read is None else read
        return targets if self.transform is None else list(map(self.transform, targets))

    def collated(self, batch: IndexBatch) -> Any:
        """Return the targets of a batch as ``default_collate`` returns them."""
        if self.numbers is not None:
            return torch.from_numpy(self.numbers[batch.positions])
        try:
            if self._listing is None or self.transform is not None:
                return collate_targets(self.of_each(batch))
            return self._listing.collated_targets(batch.positions)
        except RuntimeError as error:  # targets such as masks may differ in shape
            name_unequal(error, partial(self.of_each, batch))
            raise


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """The samples of an epoch, and everything that is needed to read them.

    Attributes:
        stored: the samples and their preparation.
        length: number of samples.
        target_transform: the user's transform of targets.
        pair_transform: the user's transform of sample and target together, if it runs on each
            sample.
        plan: plan of the transform.
        columns: columns of each batch.
        prepare: steps that run on single samples that are not stored.
        is_upright: True if images are rotated as their EXIF requires, before they are stored or
            when files are read.
        own: description of the method of a subclass that makes each item; "" if there is none.
    """

    stored: Stored
    length: int
    target_transform: Transform | None
    pair_transform: PairTransform | None
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
        """Keys of the values of an item that is not a pair; known once an item was read."""
        return getattr(self.stored.samples, "keys", None)  # a closed dataset has no samples

    @cached_property
    def has_index(self) -> bool:
        """True if items end with their index, which is then the last column."""
        return self.stored.options.return_index

    @cached_property
    def targets(self) -> Targets:
        """The targets of all samples."""
        is_joint = self.pair_transform is not None
        return Targets(self.stored, None if is_joint else self.target_transform)

    @cached_property
    def has_target_column(self) -> bool:
        """True if the last column holds the targets, such as masks."""
        return self.columns[-1].part > 0

    @cached_property
    def obstacle(self) -> str | None:
        """Reason why batches need Python work per sample; None if they do not need it."""
        if self.obstacle_if_alike is None and not self.outputs:
            return (
                "prepared samples differ in shape; with a crop or resize to one size they could be "
                "read in batches"
            )
        return self.obstacle_if_alike

    @cached_property
    def obstacle_if_alike(self) -> str | None:
        """The ``obstacle`` of batches of one shape each, as a ``BucketSampler`` makes them."""
        if self.own:
            return self.own
        if self.kept is not None and self.kept.is_tuple:
            return "samples have several parts, such as image and mask"
        obstacle = self.plan.obstacle
        if obstacle == NOT_STORED:
            return obstacle
        if self.pair_transform is not None:
            return f"samples have several parts, such as image and mask, and {obstacle}"
        if obstacle:
            return f"the transform works per sample: {obstacle}"
        if not all(column.alike for column in self.columns):
            return "the transform ends with a size that is drawn at random"
        return None

    @cached_property
    def outputs(self) -> list[Output]:
        """Shape and dtype of each column; empty if the samples of a column differ."""
        outputs = [column.output for column in self.columns if column.output is not None]
        return outputs if len(outputs) == len(self.columns) else []

    @cached_property
    def kinds(self) -> list[Form]:
        """The form of the samples of each column after the batch ops."""
        return [column.plan.kind for column in self.columns]

    @cached_property
    def are_hwc(self) -> list[bool]:
        """For each column, True if its samples are arrays (H, W, C)."""
        return [kind == "hwc" for kind in self.kinds]

    @cached_property
    def has_arrays(self) -> bool:
        """True if a column's samples have other axes than (C, H, W)."""
        return not {"hwc", "hw", "plane"}.isdisjoint(self.kinds)

    @cached_property
    def alike(self) -> list[Output]:
        """Shape and dtype of each column of a batch with samples of the first sample's shape."""
        return [column.alike for column in self.columns if column.alike is not None]

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
        """Each stored part that is read, with the neighbouring columns that are read from it."""
        parts = [column.part for column in self.columns]
        ends = {part: k for k, part in enumerate(parts, 1)}
        return [(part, slice(end - parts.count(part), end)) for part, end in ends.items()]

    @cached_property
    def _classes(self) -> list[type]:
        """The class of the samples of each column."""
        return [shown_class(column.plan.end_kind or "tensor") for column in self.columns]

    @cached_property
    def _are_ragged(self) -> bool:
        """True if samples may differ in shape: they can be read alone, but not stacked."""
        if self.kept is None:
            return False
        return not (self.outputs and all(store.spec.is_dense for store in self.kept.stores))

    @cached_property
    def can_write_channels_last(self) -> bool:
        """True if the core can write all columns in ``torch.channels_last``."""
        pairs = zip(self.programs, self.alike, strict=False)
        return all(program.can_write_channels_last(shape) for program, (shape, _) in pairs)

    @property
    def served_bytes(self) -> int | None:
        """Bytes of a sample in a whole batch; None if samples are read one by one."""
        if self.obstacle is not None:
            return None
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.outputs)

    @property
    def image_form(self) -> str:
        """Class, shape and dtype of each image in a whole batch."""
        return self._form_of([column.output and column.output[0] for column in self.columns])

    @property
    def kinds_of_images(self) -> str:
        """Class and dtype of each image in a whole batch, without shapes."""
        return self._form_of([None] * len(self.columns))

    def _form_of(self, shapes: Sequence[Shape | None]) -> str:
        forms = []
        # ``outputs`` has NumPy's dtypes, which lack bfloat16.
        for column, shape, dtype in zip(self.columns, shapes, self.dtypes, strict=True):
            kind = column.plan.end_kind or "tensor"
            shown = "" if shape is None else shown_shape(shape, kind)
            forms.append(f"{shown_class(kind).__name__}{shown} of {str(dtype)[6:]}")
        text = ", ".join(forms) + (f" in {self.keys}" if self.keys else "")
        return f"{text} with their index" if self.has_index else text
