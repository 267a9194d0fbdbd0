"""The batch ops of a plan on the CPU: one call of the compiled core draws and makes a batch.

Shape letters: B batch, C channels, H W stored size, h w size in the batch, D dimensions.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from fastdata.pixels.arrays import Array, Int32s, Int64s, Shape
from fastdata.pixels.core.calls import (
    Blending,
    CoreError,
    Keys,
    Samples,
    Table,
    describe_output,
    draw,
    serve,
    solve_perspectives,
)
from fastdata.pixels.decode import OpenedImages
from fastdata.pixels.readable import Readable
from fastdata.pixels.refusals import error_of
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.scratch import Scratch
from fastdata.pixels.steps import Step, Steps, compile_table, flatten_steps

_AHEAD = 4  # number of encoded samples that are decoded before each call of the core
_PREPARED_BYTES = 4 << 20  # memory of the images that one call prepares
_MOST_CHANNELS = 4  # most channels for channels_last: MAX_CHANNELS of core.h
_MOST_LEVELS = 1000  # number of image sizes whose magnitudes are kept, unless a batch needs more


class Program:
    """Batch ops of a plan, compiled for samples of a spec. Safe from several threads at once.

    Random draws are a pure function of (seed, visit, index), so a sample is the same alone and in
    any batch.

    Args:
        steps: the batch ops.
        spec: shape, dtype and form of the stored samples.

    Raises:
        ValueError: there are batch ops, but the samples are not uint8 images (C, H, W).
    """

    def __init__(self, steps: Steps, spec: SampleSpec) -> None:
        dimensions = (2, 3) if spec.form == "mask" else (3,)
        has_planes = spec.shape is None or len(spec.shape) in dimensions
        if steps and not (has_planes and spec.dtype == "uint8"):
            raise ValueError(
                f"batch ops need uint8 images (C, H, W), but the samples are {spec.dtype} of "
                f"shape {spec.shape}. Use batch_ops=False."
            )
        self._steps = steps
        self._spec = spec
        self._stored = spec.shape and _planes(spec.shape)
        dtype = spec.dtype
        for step in steps:
            if step.name == "cast":
                dtype = step.fields["dtype"].lower()
        self._torch_dtype = dtype
        # NumPy has no bfloat16; uint16 holds its bits.
        self._dtype = np.dtype(dtype.replace("bfloat16", "uint16"))
        self._scratch = Scratch()

    @functools.cached_property
    def _every(self) -> list[Step]:
        """All steps, in the order of the table."""
        return flatten_steps(self._steps)

    @functools.cached_property
    def _table(self) -> Table:
        return compile_table(self._every)

    @functools.cached_property
    def _has_perspectives(self) -> bool:
        return "perspective" in [step.name for step in self._every]

    def __reduce__(self) -> Any:
        return Program, (self._steps, self._spec)

    @property
    def served_dtype(self) -> torch.dtype:
        """The dtype of the tensors of a batch."""
        found: torch.dtype = getattr(torch, self._torch_dtype)
        return found

    def without_cast(self) -> tuple[Program, Step | None]:
        """Return this program without its final conversion to floats, and that step (or None)."""
        if not self._steps or self._steps[-1].name != "cast":
            return self, None
        return Program(self._steps[:-1], self._spec), self._steps[-1]

    def output(
        self, sample_shape: Shape, *, is_of_all: bool = False
    ) -> tuple[Shape, np.dtype[Any]] | None:
        """Return shape and dtype of each sample in a batch; None if samples differ in shape.

        Args:
            sample_shape: shape of any stored sample; its channels are those of all samples.
            is_of_all: True if all stored samples have this shape.

        Raises:
            ChannelsError: a step is for another number of channels.
        """
        shape = sample_shape if is_of_all else self._spec.shape
        if self._steps:
            size = (0, 0) if shape is None else shape[-2:]
            [after] = self.served_shapes(np.array([(*sample_shape[:-2], *size)], np.int32))
            shape = tuple(after.tolist()) if after[-2] else None
        return None if shape is None else (shape, self._dtype)

    def served_shapes(self, shapes_BD: Int32s) -> Int32s:
        """Return the shapes of samples after the steps, for shapes of stored samples.

        A size that is not known, or that is drawn at random, is 0.
        """
        if not self._steps:
            return shapes_BD
        count, dimensions = shapes_BD.shape
        probe_B3 = np.ones((count, 3), np.int32)
        probe_B3[:, -dimensions:] = shapes_BD
        # A probe only computes shapes, so any keys will do.
        keys = _keys_of(0, 0, np.arange(count))
        _, after_B3, _ = self._draw(keys, probe_B3, is_probe=True)
        return after_B3[:, -dimensions:]

    def can_write_channels_last(self, shape: Shape) -> bool:
        """Return True if samples of this shape can be written to channels_last memory."""
        return bool(self._steps) and len(shape) == 3 and shape[0] <= _MOST_CHANNELS

    @property
    def can_blend(self) -> bool:
        """True if rows of a batch can be blended while its samples are made."""
        return bool(self._steps) or self._spec.dtype == "uint8"

    def run(
        self,
        source: Readable | Samples,
        index_B: Int64s,
        visits_B: int | Int64s,
        seed: int,
        out_BChw: Array,
        rows_B: Int64s | None = None,
        others: Sequence[_Pair] = (),
        blending: Blending | None = None,
    ) -> None:
        """Make a batch in the caller's memory.

        Args:
            source: a store, or opened images that are not stored, one for each index.
            index_B: indices of the samples.
            visits_B: visits of the samples, as in ``IndexBatch``: one for all, or one for each.
            seed: seed of the random draws.
            out_BChw: memory with shape and dtype of ``output``, filled completely. C-contiguous, or
                channels_last if ``can_write_channels_last``.
            rows_B: rows of ``out_BChw`` to write the samples to; all other rows are left unchanged.
                None writes sample ``b`` to row ``b``.
            others: other programs, with their memory, that make the same samples. No sample is
                decoded twice for them.
            blending: rows to blend from the samples, which must be images. Each is written as soon
                as its samples are made.

        Raises:
            ValueError: an image is smaller than its crop, or has another shape than ``out_BChw``
                has room for; or the arrays differ in length, or a row is not in ``out_BChw``.
            Exception: opened images raised it for a damaged file.
        """
        pairs: list[_Pair] = []
        for program, out in ((self, out_BChw), *others):
            # Samples without steps are only copied, unless rows are blended, or the memory is
            # channels_last: the core does both.
            needs_core = blending is not None or not out.flags.c_contiguous
            if program._steps or isinstance(source, Samples) or needs_core:
                pairs.append((program, out))
            elif rows_B is None:
                source.gather_into(index_B, out)
            else:
                for row, index in zip(rows_B.tolist(), index_B.tolist(), strict=True):
                    source.read_into(index, out[row])
        if pairs and len(index_B):
            keys = _keys_of(seed, visits_B, index_B)
            if isinstance(source, Samples):
                _serve(pairs, source, keys, rows_B, blending=blending)
            else:
                self._serve_store(pairs, source, keys, rows_B, blending)

    def run_one(self, store: Readable, index: int, visit: int | Int64s, seed: int) -> Array:
        """Return one sample in new memory: the pixels it has in a batch, in its own shape."""
        if not self._steps:
            return np.array(store.read(index))
        shape = store.shape(index)
        index_1 = np.array([index], np.int64)
        shapes_13 = np.array([_planes(shape)], np.int32)
        _, [after], _ = self._draw(_keys_of(seed, visit, index_1), shapes_13)
        out_1Chw = np.empty((1, *after.tolist()), self._dtype)
        self.run(store, index_1, visit, seed, out_1Chw)
        served: Array = out_1Chw[0] if len(shape) == 3 else out_1Chw[0, 0]
        return served

    def run_each(
        self, images: Samples, index_B: Int64s, visits_B: int | Int64s, seed: int
    ) -> list[Array]:
        """Return each image of a batch in its own memory and its own shape."""
        keys = _keys_of(seed, visits_B, index_B)
        _, shapes_B3, _ = self._draw(keys, images.shapes_B3)
        rows_B = np.zeros(len(index_B), np.int64)
        served = []
        for b, shape in enumerate(shapes_B3.tolist()):
            out_1Chw = np.empty((1, *shape), self._dtype)
            _serve([(self, out_1Chw)], images, keys, rows_B, [(b, b + 1)])
            served.append(out_1Chw[0])
        return served

    def prepare(self, images: Samples) -> Iterator[Array]:
        """Yield arrays of prepared images (N, C, h, w), in the order of ``images``.

        The steps must draw nothing at random. Images that follow each other are in one array if
        they have one size after the steps, up to a few MiB of pixels. The next array reuses the
        memory of the array before it.
        """
        numbers_B = np.arange(len(images.shapes_B3), dtype=np.int64)
        keys = _keys_of(0, 0, numbers_B)
        _, shapes_after_B3, _ = self._draw(keys, images.shapes_B3)
        end = 0
        for shape, alike in itertools.groupby(map(tuple, shapes_after_B3.tolist())):
            begin = end
            end += len(list(alike))
            count = max(_PREPARED_BYTES // math.prod(shape), 1)
            for first in range(begin, end, count):
                last = min(first + count, end)
                out = self._scratch.take("prepared", (last - first, *shape))
                _serve([(self, out)], images, keys, numbers_B - first, [(first, last)])
                yield out

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int, shapes_B3: Int32s) -> Array:
        """Return the drawn ops of samples with these shapes (C, H, W): records ``OP`` (B, S)."""
        return self._draw(_keys_of(seed, visits_B, index_B), shapes_B3)[0]

    def _draw(
        self, keys: Keys, shapes_B3: Int32s, *, is_probe: bool = False
    ) -> tuple[Array, Int32s, Table]:
        """Return the drawn ops, the shapes after all steps, and a table with all their levels."""
        table = self._table
        while True:
            try:
                return *draw(table, keys, shapes_B3, is_probe=is_probe), table
            except CoreError as refused:
                # Not `self._table`: other threads replace it, without the sizes of this batch.
                table = self._answer(refused, table, keys, shapes_B3)

    def _answer(self, refused: CoreError, table: Table, keys: Keys, shapes_B3: Int32s) -> Table:
        """Return a table with the magnitudes of one more image size, so that the core can continue.

        Raises:
            ValueError: the core refused a sample for another reason.
        """
        step = self._every[refused.step]
        if refused.reason != "levels" or step.levels is None:
            b = refused.place
            raise error_of(step, refused, int(keys.indices[b]), shapes_B3[b]) from None
        height, width = refused.numbers["height"], refused.numbers["width"]
        # A call may need as many as it has samples. With less room it would drop the first sizes
        # for the last ones, and never end.
        policies = sum(each.levels is not None for each in self._every)
        most = max(_MOST_LEVELS, len(shapes_B3) * policies)
        levels = dict(table.levels) if len(table.levels) < most else {}
        levels[refused.step, height, width] = step.levels(height, width)
        # Other threads may be using the old table in a call, so it is replaced, not changed.
        self._table = made = table.with_levels(levels)
        return made

    def as_tensor(self, served: Array) -> torch.Tensor:
        """Return a tensor over the same memory, with ``served_dtype``."""
        return torch.from_numpy(served).view(self.served_dtype)

    def _serve_store(
        self,
        pairs: list[_Pair],
        store: Readable,
        keys: Keys,
        rows_B: Int64s | None,
        blending: Blending | None,
    ) -> None:
        """Make samples of a store: from its pixels, its JPEG files, or samples that it decodes."""
        index_B = keys.indices
        indices = index_B.tolist()
        if self._stored is None:
            shapes_B3 = np.array([_planes(store.shape(index)) for index in indices], np.int32)
        else:
            # This takes a fifth of the time of np.full.
            shapes_B3 = np.array([self._stored], np.int32).repeat(len(indices), 0)
        if store.gives_views:
            views = Samples(store.addresses(index_B), shapes_B3)
            _serve(pairs, views, keys, rows_B, blending=blending)
            return
        files = store.jpeg_files(index_B)
        if files is not None:
            images = OpenedImages(*files, lambda b: store.read(indices[b]), shapes_B3)
            _serve(pairs, images, keys, rows_B, blending=blending)
            return
        samples = Samples(np.empty(len(indices), np.int64), shapes_B3)
        spans = self._decode(store, indices, samples)
        _serve(pairs, samples, keys, rows_B, spans, blending=blending)

    def _decode(
        self, store: Readable, indices: list[int], samples: Samples
    ) -> Iterator[tuple[int, int]]:
        """Decode a few samples at a time, so that the core reads them while they are in the cache.

        Yields the span [first, last) of the samples that are in memory until the next ``next``.
        """
        for first in range(0, len(indices), _AHEAD):
            last = min(first + _AHEAD, len(indices))
            for b in range(first, last):
                index = indices[b]
                pixels = self._scratch.take(f"decoded {b - first}", store.shape(index))
                store.read_into(index, pixels)
                samples.sources_B[b] = pixels.ctypes.data
            yield first, last


_Pair = tuple[Program, Array]
"""A program, and the memory that it fills."""


def _serve(
    pairs: list[_Pair],
    samples: Samples,
    keys: Keys,
    rows_B: Int64s | None = None,
    spans: Iterable[tuple[int, int]] | None = None,
    *,
    blending: Blending | None = None,
) -> None:
    """Make samples with several programs; one call of the core for each span [first, last).

    If the core refuses a sample, the reason is removed if possible, and the call is repeated from
    that sample on. The pixels are the same, because the draws of a sample depend only on its keys.
    """
    outputs = _describe_outputs(pairs, samples, keys)
    for first, last in spans or [(0, len(keys.indices))]:
        while True:
            try:
                serve(
                    samples,
                    keys,
                    outputs,
                    rows=rows_B,
                    first=first,
                    last=last,
                    blending=blending,
                )
                break
            except CoreError as refused:
                first = refused.place
                if isinstance(samples, OpenedImages) and refused.reason == "file":
                    samples.leave_to_pillow(first)
                else:
                    program = pairs[refused.program][0]
                    program._answer(refused, program._table, keys, samples.shapes_B3)
                outputs = _describe_outputs(pairs, samples, keys)


def _describe_outputs(pairs: list[_Pair], samples: Samples, keys: Keys) -> list[ctypes.Structure]:
    outputs = []
    for program, out in pairs:
        solved_BS8 = None
        table = program._table
        if program._has_perspectives:
            ops_BS, _, table = program._draw(keys, samples.shapes_B3)
            solved_BS8 = solve_perspectives(ops_BS)
        outputs.append(describe_output(table, out, solved_BS8))
    return outputs


def _keys_of(seed: int, visits_B: int | Int64s, index_B: Int64s) -> Keys:
    """Return the keys of samples; one visit may be given for all."""
    if not isinstance(visits_B, np.ndarray):
        visits_B = np.full(len(index_B), visits_B)
    visits_B = np.ascontiguousarray(visits_B, np.int64)
    return Keys(seed, visits_B, np.ascontiguousarray(index_B, np.int64))


def _planes(shape: Shape) -> Shape:
    """Return a shape as (C, H, W); the shape of a mask may be (H, W)."""
    return (1, *shape)[-3:]
