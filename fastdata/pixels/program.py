"""A plan's batch ops on the CPU: a batch is drawn and served by the compiled core in one call.

Shape letters: B batch, C channels, H W stored size, h w size served.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastdata.pixels import core
from fastdata.pixels.images import OpenedImages, SampleSpec, Scratch, addresses_of
from fastdata.pixels.ops import Cast, Int32s, Int64s, Op, Table

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_AHEAD = 4
"""Encoded samples that are decoded before the core takes them."""
_PREPARED_BYTES = 4 << 20
"""Of images of one size that are prepared by one call."""
_FLOAT16S = {"float16": np.dtype("float16"), "bfloat16": np.dtype("uint16")}


class Readable(Protocol):
    """The face of a store that serving needs."""

    @property
    def spec(self) -> SampleSpec: ...
    @property
    def gives_views(self) -> bool: ...
    def shape(self, index: int, /) -> Shape: ...
    def read(self, index: int, /) -> Array: ...
    def read_into(self, index: int, out: Array, /) -> None: ...
    def read_all(self, index_B: Int64s, /) -> list[Array]: ...
    def gather_into(self, index_B: Int64s, out_B: Array, /) -> None: ...


class Program:
    """Batch ops of a plan for samples of a spec, ready to run, safe from several threads at once.

    Draws are a pure function of (seed, visit, index): a sample comes out the same alone and in any
    batch.

    Raises:
        ValueError: there are batch ops, and the samples are no uint8 images (C, H, W).
    """

    def __init__(self, ops: tuple[Op, ...], spec: SampleSpec) -> None:
        dimensions = (2, 3) if spec.form == "mask" else (3,)
        if ops and (
            spec.dtype != "uint8" or (spec.shape is not None and len(spec.shape) not in dimensions)
        ):
            raise ValueError(
                f"batch ops need uint8 images (C, H, W), but the samples are {spec.dtype} of shape {spec.shape}. "
                "Use batch_ops='off'."
            )
        self._ops, self._spec = ops, spec
        cast = next((op.about for op in ops if op.code == "OP_CAST"), Cast(spec.dtype))
        self._dtype = _FLOAT16S.get(cast.dtype) or np.dtype(cast.dtype)
        self._is_bfloat16 = cast.dtype == "bfloat16"
        # Of masks, to int64.
        self._is_widened = bool(ops) and cast.dtype.upper() not in core.constants()
        self._cast = Cast("uint8") if self._is_widened else cast
        self._values: dict[int, core.Values] = {}
        self._scratch = Scratch()

    @functools.cached_property
    def _table(self) -> Table:
        return Table(self._ops)

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self._ops, self._spec)

    def output(
        self, sample_shape: Shape | None, *, is_of_all: bool = False
    ) -> tuple[Shape, np.dtype[Any]] | None:
        """Shape and dtype of each served sample; None if the shape is not the same for all of them.

        ``sample_shape`` is that of any stored sample, whose channels count for all, or else
        ``is_of_all`` samples.

        Raises:
            ChannelsError: an op is for another number of channels.
        """
        stored = sample_shape if is_of_all else self._spec.shape
        if not self._ops:
            return None if stored is None else (stored, self._dtype)
        if sample_shape is None:
            return None
        known = None if stored is None else (stored[-2], stored[-1])
        channels, size = self._table.size_after(_planes(sample_shape)[0], known)
        return None if size is None else ((channels, *size)[3 - len(sample_shape) :], self._dtype)

    def run(
        self,
        store: Readable,
        index_B: Int64s,
        visits_B: int | Int64s,
        seed: int,
        out_BChw: Array,
        rows_B: Int64s | None = None,
        others: Sequence[tuple[Program, Array]] = (),
    ) -> None:
        """Serve a batch into the caller's memory, C-contiguous, of ``output``'s shape and dtype; filled completely.

        Draws are made from the seed and ``visits_B``, as of ``SharedVisits``: one for all samples,
        or one for each. With ``rows_B`` samples are written to these rows of memory for more, and
        no others. ``others`` serve the same samples into memory of their own, and none is decoded
        again for them.

        Raises:
            ValueError: an image is smaller than its crop, or not of the shape that ``out`` has room
                for.
        """
        with_ops = []
        for program, out in ((self, out_BChw), *others):
            if not out.flags.c_contiguous:
                raise ValueError("the memory for a batch must be C-contiguous")
            if program._ops:
                with_ops.append((program, out))
            elif rows_B is None:
                store.gather_into(index_B, out)
            else:
                for row, index in zip(rows_B.tolist(), index_B.tolist(), strict=True):
                    store.read_into(index, out[row])
        if with_ops and len(index_B):
            self._serve(store, _keys(seed, visits_B, index_B), with_ops, rows_B)

    def run_one(self, store: Readable, index: int, visit: int | Int64s, seed: int) -> Array:
        """Serve one sample in fresh memory: the pixels that it has in a batch, in whatever shape it has."""
        if not self._ops:
            return np.array(store.read(index))
        keys = _keys(seed, visit, np.array([index], np.int64))
        served: Array = self._serve(store, keys, [(self, None)])[0]
        return served if len(store.shape(index)) == 3 else served[0]

    def run_images(
        self,
        images: OpenedImages,
        index_B: Int64s,
        visits_B: int | Int64s,
        seed: int,
        out_BChw: Array | None,
        rows_B: Int64s | None = None,
        others: Sequence[tuple[Program, Array]] = (),
    ) -> Array:
        """Serve a batch of images that were opened but not kept; else as ``run``.

        ``out_BChw`` None: fresh memory for the only image.

        Raises:
            Exception: what ``images`` raise of a damaged one.
        """
        if not len(index_B):
            return np.empty(0, self._dtype) if out_BChw is None else out_BChw
        return _serve_images(
            [(self, out_BChw), *others], images, _keys(seed, visits_B, index_B), rows_B
        )

    def prepare(self, images: OpenedImages) -> Iterator[Array]:
        """Serve images by ops that draw nothing at random, each in its own size, which the next one may lie over."""
        count = len(images.shapes_B3)
        keys = _keys(0, 0, np.arange(count))
        _, shapes_after_B3 = self._table.draw(keys, images.shapes_B3)
        shapes = list(map(tuple, shapes_after_B3.tolist()))
        first = 0
        while first < count:
            shape = shapes[first]
            last = min(first + max(_PREPARED_BYTES // math.prod(shape), 1), count)
            last = next((b for b in range(first, last) if shapes[b] != shape), last)
            out = self._scratch.take("prepared", (last - first, *shape))
            _serve_images([(self, out)], images, keys, np.arange(count) - first, first, last)
            yield from out
            first = last

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int, shapes_B3: Int32s) -> Array:
        """What is done to samples of these shapes (C, H, W), ``core.OP`` (B, S)."""
        return self._table.draw(_keys(seed, visits_B, index_B), shapes_B3)[0]

    def as_tensor(self, served: Array) -> torch.Tensor:
        """What was served as a tensor over the same memory; NumPy has no bfloat16, and holds its bits."""
        tensor = torch.from_numpy(served)
        return tensor.view(torch.bfloat16) if self._is_bfloat16 else tensor

    def _serve(
        self, store: Readable, keys: core.Keys, pairs: Sequence[_Pair], rows_B: Int64s | None = None
    ) -> Array:
        """Serve a batch of a store by several programs; gives the first one's."""
        addresses = getattr(store, "addresses", None)
        kept = store.read_all(keys.indices) if store.gives_views and addresses is None else []
        indices = keys.indices.tolist() if self._spec.shape is None or not store.gives_views else []
        shapes: Shape | Int32s
        if self._spec.shape is not None:
            shapes = _planes(self._spec.shape)
        else:
            each_shape = [image.shape for image in kept] or map(store.shape, indices)
            shapes = np.array(list(map(_planes, each_shape)), np.int32)
        if store.gives_views:
            sources_B = addresses_of(kept) if addresses is None else addresses(keys.indices)
            return _call(pairs, core.Samples(sources_B, shapes), keys, rows_B)
        files = getattr(store, "jpeg_files", lambda _: None)(keys.indices)
        if files is not None:
            shapes_B3 = _each_shape(shapes, len(indices))
            sources_B, sizes_B = files
            images = OpenedImages.stored(
                sources_B, sizes_B, shapes_B3, lambda b: store.read(indices[b])
            )
            return _serve_images(pairs, images, keys, rows_B)
        decoded = [
            self._scratch.take(f"decoded {b % _AHEAD}", store.shape(i))
            for b, i in enumerate(indices)
        ]
        samples = core.Samples(addresses_of(decoded), shapes)
        for first in range(
            0, len(decoded), _AHEAD
        ):  # a few at a time, while their pixels are in the cache
            last = min(first + _AHEAD, len(decoded))
            for b in range(first, last):
                store.read_into(indices[b], decoded[b])
            out = _call(pairs, samples, keys, rows_B, first, last)
        return out

    def _values_for(self, channels: int) -> core.Values:
        if channels not in self._values:
            self._values[channels] = _make_values(channels, self._cast)
        return self._values[channels]


_Pair = tuple[Program, "Array | None"]
"""A program, and the memory that it fills; None: fresh memory for the only sample."""


def _keys(seed: int, visits_B: int | Int64s, index_B: Int64s) -> core.Keys:
    visits = visits_B if isinstance(visits_B, int) else np.ascontiguousarray(visits_B, np.int64)
    return core.Keys(seed, visits, np.ascontiguousarray(index_B, np.int64))


def _call(
    pairs: Sequence[_Pair],
    samples: core.Samples,
    keys: core.Keys,
    rows_B: Int64s | None = None,
    first: int = 0,
    last: int | None = None,
) -> Array:
    """Serve samples [first, last) by several programs in one call of the core; gives the first one's."""
    outs, widened, served = [], [], []
    for program, given in pairs:
        shapes_B3 = (
            _each_shape(samples.shapes, len(keys.indices))
            if given is None or program._table.has_perspectives
            else None
        )
        out = given
        if out is None:
            assert shapes_B3 is not None
            _, shapes_after_B3 = program._table.draw(keys, shapes_B3)
            out = np.empty((1, *shapes_after_B3[0].tolist()), program._dtype)
        outs.append(out)
        made = out
        if program._is_widened:
            made = program._scratch.take("not widened", out.shape)
            widened.append((made, out))
        shape = _planes(out.shape[1:])
        solved = None if shapes_B3 is None else program._table.solve(keys, shapes_B3)
        served.append(
            core.Served(
                program._table.record,
                program._values_for(shape[0]),
                made.ctypes.data,
                shape,
                solved,
            )
        )
    begin = first
    while True:
        try:
            core.serve(samples, keys, served, rows=rows_B, first=begin, last=last)
            break
        except core.CoreError as refused:
            if refused.reason == "REFUSED_FILE":
                raise
            begin, number = refused.place, refused.program
            table = pairs[number][0]._table
            if not table.is_answered(refused):
                raise _refusal(refused, table, samples, keys, served[number].shape) from None
            served[number] = served[number]._replace(table=table.record)
    these = slice(first, last)
    rows = these if rows_B is None else rows_B[these]
    for made, out in widened:
        out[rows] = made[rows]
    return outs[0]


def _serve_images(
    pairs: Sequence[_Pair],
    images: OpenedImages,
    keys: core.Keys,
    rows_B: Int64s | None = None,
    first: int = 0,
    last: int | None = None,
) -> Array:
    while True:
        samples = core.Samples(
            images.sources_B, images.shapes_B3, images.files, images.is_interleaved
        )
        try:
            return _call(pairs, samples, keys, rows_B, first, last)
        except core.CoreError as damaged:
            first = damaged.place
        images.leave_to_pillow(first)


def _refusal(
    refused: core.CoreError, table: Table, samples: core.Samples, keys: core.Keys, shape: Shape
) -> ValueError:
    b = refused.place
    index = int(keys.indices[b])
    if refused.reason != "REFUSED_SHAPE":
        return table.refusal(refused, index, _each_shape(samples.shapes, len(keys.indices))[b])
    return ValueError(
        f"sample {index} comes out as {refused.numbers[:3]}, but the batch has room for {shape} each. "
        "Crop or resize to one size, and give all images one number of channels, as "
        "prepare=lambda image: image.convert('RGB') does."
    )


def _each_shape(shapes: Shape | Int32s, count: int) -> Int32s:
    return shapes if isinstance(shapes, np.ndarray) else np.full((count, 3), shapes, np.int32)


def _make_values(channels: int, cast: Cast) -> core.Values:
    """Let channel c's value x become ``table_C256[c, x]``, by torchvision's own arithmetic.

    The core computes it, as (x / factor - mean) / std in float32, where that gives the very values
    of the table.
    """
    computed = np.float64 if cast.dtype == "float64" else np.float32
    divides, factor = (
        cast.scaling == "divide",
        computed({"divide": 255, "multiply": 1 / 255, "none": 1}[cast.scaling]),
    )
    table_C256 = np.broadcast_to(np.arange(256, dtype=computed), (channels, 256))
    table_C256 = table_C256 / factor if divides else table_C256 * factor
    mean_C, std_C, widens = np.zeros(channels, computed), np.ones(channels, computed), False
    for mean, std, widens_too in cast.normalizations:
        # Where there are more of them than channels, the core refuses the samples.
        mean_C, std_C = (np.resize(np.array(each, computed), channels) for each in (mean, std))
        table_C256, widens = (table_C256 - mean_C[:, None]) / std_C[:, None], widens or widens_too
    kept: list[Array] = [np.array(each, np.float32) for each in (mean_C, std_C)]
    kept.append(np.array(table_C256, np.float64, order="C"))
    addresses = (array.ctypes.data for array in kept)
    dtype = core.constants()[cast.dtype.upper()]
    values = core.Values(dtype, computed is np.float32, divides, widens, factor, *addresses)
    values.kept = kept
    return values


def _planes(shape: Shape) -> Shape:
    """As (C, H, W); a mask may be (H, W)."""
    return shape if len(shape) == 3 else (1, *shape)
