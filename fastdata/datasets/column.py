"""Columns: a batch has one for each view of its images, or one for images and one for masks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastdata.datasets.buffers import allocate_batch
from fastdata.datasets.visits import IndexBatch
from fastdata.errors import ChannelsError
from fastdata.pixels.arrays import Array, Shape
from fastdata.pixels.core.calls import Samples
from fastdata.pixels.own_transforms import AlbumentationsTransform
from fastdata.pixels.plan import TransformPlan
from fastdata.pixels.program import Program
from fastdata.pixels.samples import (
    addresses_of,
    as_kind,
    batch_of_form,
    decoded_shape,
    from_stored,
    to_stored,
)
from fastdata.pixels.steps import Step
from fastdata.stores.kept import KeptSamples

if TYPE_CHECKING:
    from fastdata.datasets.buffers import Allocate, Output
    from fastdata.stores.store import Store


class Column(NamedTuple):
    """One column of a batch: a view of the images, or their masks.

    Attributes:
        plan: plan of the transform.
        program: program that reads samples and runs the batch ops; None if samples are read one by
            one.
        part: number of the stored part of samples that the program reads.
        shape: shape of one of the samples before the batch ops.
        output: shape and dtype of every sample after the batch ops; None if samples differ.
        alike: shape and dtype, after the batch ops, of a sample that has ``shape`` before them;
            None if sizes are drawn at random.
        last: program of the known ops that follow unknown steps.
    """

    plan: TransformPlan
    program: Program | None = None
    part: int = 0
    shape: Shape = ()
    output: Output | None = None
    alike: Output | None = None
    last: Program | None = None

    def without_cast(self) -> tuple[Column, Step | None]:
        """Return this column without its final float cast, and the cast (None if it has none)."""
        assert self.program is not None
        program, cast = self.program.without_cast()
        return self.read_by(program, self.shape), cast

    def read_by(self, program: Program, shape: Shape) -> Column:
        """Return this column with a program, for samples of which one has this shape."""
        return self._replace(
            program=program,
            shape=shape,
            output=program.output(shape),
            alike=program.output(shape, is_of_all=True),
        )

    def shapes_of(self, source: Samples | Store, index_B: Array) -> Array:
        """Return the shapes of samples after the batch ops, int32 (B, D)."""
        assert self.program is not None
        shapes_BD = source.shapes_B3 if isinstance(source, Samples) else source.shapes[index_B]
        return self.program.served_shapes(shapes_BD)

    def read_alone(self, kept: KeptSamples, batch: IndexBatch) -> list[Array]:
        """Read samples one by one. They may differ in shape."""
        assert self.program is not None
        # Ops draw from (seed, visit, index), so the pixels are the same as in a whole batch.
        read = partial(self.program.run_one, kept.stores[self.part], seed=batch.seed)
        return list(map(read, batch.positions.tolist(), batch.visits))

    def show(self, rows: Iterable[Array]) -> list[Any]:
        """Return samples after the batch ops in the form that the next step expects."""
        kind = self.plan.kind
        if self.program is None or kind in ("pil", "array", "hwc", "hw", "plane"):
            return [from_stored(row, kind) for row in rows]
        return [as_kind(self.program.as_tensor(row), kind) for row in rows]

    def finish(self, samples: list[Any], batch: IndexBatch, allocate: Allocate) -> Any:
        """Run the unknown steps on each sample, then the last ones on the batch if possible.

        Returns:
            A tensor of the whole batch, or a list of samples.
        """
        plan = self.plan
        samples = list(map(plan.run_unknown, samples))
        if self.last is None:
            return samples
        # The core runs the rest in one call if all samples are images of one shape. If not, the
        # user's own transform objects run on each sample.
        assert plan.last is not None
        takes_arrays = type(plan.last.batched[0]) is AlbumentationsTransform
        shapes = {decoded_shape(sample, is_array=takes_arrays) for sample in samples}
        shape = shapes.pop() if len(shapes) == 1 else None
        if takes_arrays and shape is not None and shape[0] != self.shape[0]:
            shape = None  # these steps were compiled for another number of channels
        output = None
        try:
            if shape is not None:
                output = self.last.output(shape, is_of_all=True)
        except ChannelsError as wrong:
            wrong.index = int(batch.positions[0])  # all samples have the same shape
            raise
        if output is None:
            return list(map(plan.run_last, samples))
        decoded = [to_stored(image)[0] for image in samples]
        shapes_B3 = np.array([shape] * len(decoded), np.int32)
        images = Samples(addresses_of(decoded), shapes_B3)
        kind = plan.last.kind
        [out] = allocate_batch(len(samples), [output], allocate, channels_last=[kind == "hwc"])
        self.last.run(images, batch.positions, batch.visits, batch.seed, out)
        return batch_of_form(self.last.as_tensor(out), kind)
