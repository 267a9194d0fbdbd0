"""A plan's batch ops on the CPU: a batch is drawn in NumPy and served by the compiled core in one call.

Shape letters: B batch, C channels, H W stored size, h w size served.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastdata import core
from fastdata.draws import sample_keys
from fastdata.errors import ChannelsError
from fastdata.images import OpenedImages, SampleSpec, Scratch, addresses_of
from fastdata.transforms.ops import Drawing, Fill, Int64s, Op, draw_cast, size_after

Array = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]
Shape = tuple[int, ...]

_AHEAD = 4
"""Encoded samples that are decoded before the core takes them."""
_REFUSALS = {"outside": "a step would leave no pixel of it", "op": "a step is not for its number of channels"}
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

    Draws are a pure function of (seed, visit, index): a sample comes out the same alone and in any batch.

    Raises:
        ValueError: there are batch ops, and the samples are no uint8 images (C, H, W).
    """

    def __init__(self, ops: tuple[Op, ...], spec: SampleSpec) -> None:
        dimensions = (2, 3) if spec.form == "mask" else (3,)
        if ops and (spec.dtype != "uint8" or (spec.shape is not None and len(spec.shape) not in dimensions)):
            raise ValueError(
                f"batch ops need uint8 images (C, H, W), but the samples are {spec.dtype} of shape {spec.shape}. "
                "Use batch_ops='off'."
            )
        self._ops, self._spec = ops, spec
        self._cast = next((op.arguments for op in ops if op.draw is draw_cast), {"dtype": spec.dtype})
        self._dtype = _FLOAT16S.get(self._cast["dtype"]) or np.dtype(self._cast["dtype"])
        self._is_widened = bool(ops) and self._cast["dtype"] not in core.OUTPUTS  # of masks, to int64
        if self._is_widened:
            self._cast = {"dtype": "uint8"}
        self._values: dict[int, core.Values] = {}
        self._scratch = Scratch()

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self._ops, self._spec)

    def output(self, sample_shape: Shape | None, *, is_of_all: bool = False) -> tuple[Shape, np.dtype[Any]] | None:
        """Shape and dtype of each served sample; None if the shape is not the same for all of them.

        ``sample_shape`` is that of any stored sample, whose channels count for all, or else ``is_of_all`` samples.

        Raises:
            ChannelsError: an op is for another number of channels.
        """
        stored = sample_shape if is_of_all else self._spec.shape
        if not self._ops:
            return None if stored is None else (stored, self._dtype)
        if sample_shape is None:
            return None
        known = None if stored is None else (stored[-2], stored[-1])
        channels, size = size_after(self._ops, _planes(sample_shape)[0], known)
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

        Draws are made from the seed and ``visits_B``, as of ``SharedVisits``: one for all samples, or one for each.
        With ``rows_B`` samples are written to these rows of memory for more, and no others.
        ``others`` serve the same samples into memory of their own, and none is decoded again for them.

        Raises:
            ValueError: an image is smaller than its crop, or not of the shape that ``out`` has room for.
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
            self._serve(store, index_B, visits_B, seed, with_ops, rows_B)

    def run_one(self, store: Readable, index: int, visit: int | Int64s, seed: int) -> Array:
        """Serve one sample in fresh memory: the pixels that it has in a batch, in whatever shape it has."""
        if not self._ops:
            return np.array(store.read(index))
        served: Array = self._serve(store, np.array([index], np.int64), visit, seed, [(self, None)])[0]
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
        calls = _drawn([(self, out_BChw), *others], index_B, visits_B, seed, images.shapes_B3)
        _call_images(calls, images, rows_B)
        return calls[0].out

    def prepare(self, images: OpenedImages) -> Iterator[Array]:
        """Serve images by ops that draw nothing at random, each in its own size, which the next one may lie over."""
        count = len(images.shapes_B3)
        drawing = self.draw(np.arange(count), 0, 0, images.shapes_B3)
        sizes = zip(drawing.height_B.tolist(), drawing.width_B.tolist(), strict=True)
        shapes = [(drawing.channels, *size) for size in sizes]
        first = 0
        while first < count:
            shape = shapes[first]
            last = min(first + max(_PREPARED_BYTES // math.prod(shape), 1), count)
            last = next((b for b in range(first, last) if shapes[b] != shape), last)
            out = self._scratch.take("prepared", (last - first, *shape))
            _call_images([_Call(self, drawing, out)], images, np.arange(count) - first, first, last)
            yield from out
            first = last

    def draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int, shapes_B3: Int32s) -> Drawing:
        """Draw a batch of samples of these shapes (C, H, W)."""
        _, height_B, width_B = shapes_B3.T.astype(np.int64)
        drawing = Drawing(sample_keys(seed, visits_B, index_B), index_B, height_B, width_B, int(shapes_B3[0, 0]))
        drawing.draw(self._ops)
        return drawing

    def as_tensor(self, served: Array) -> torch.Tensor:
        """What was served as a tensor over the same memory; NumPy has no bfloat16, and holds its bits."""
        tensor = torch.from_numpy(served)
        return tensor.view(torch.bfloat16) if self._cast["dtype"] == "bfloat16" else tensor

    def _room(self, drawing: Drawing) -> Array:
        return np.empty((1, drawing.channels, int(drawing.height_B[0]), int(drawing.width_B[0])), self._dtype)

    def _serve(
        self,
        store: Readable,
        index_B: Int64s,
        visits_B: int | Int64s,
        seed: int,
        every: Sequence[tuple[Program, Array | None]],
        rows_B: Int64s | None = None,
    ) -> Array:
        """Serve a batch by several programs; gives the first one's."""
        addresses = getattr(store, "addresses", None)
        kept = store.read_all(index_B) if store.gives_views and addresses is None else []
        if self._spec.shape is not None:
            shapes_B3 = np.full((len(index_B), 3), _planes(self._spec.shape), np.int32)
        else:
            shapes = [image.shape for image in kept] or map(store.shape, index_B.tolist())
            shapes_B3 = np.array(list(map(_planes, shapes)), np.int32)
        calls = _drawn(every, index_B, visits_B, seed, shapes_B3)
        if store.gives_views:
            sources_B = addresses_of(kept) if addresses is None else addresses(index_B)
            _call(calls, sources_B, shapes_B3, rows_B=rows_B)
            return calls[0].out
        files = getattr(store, "jpeg_files", lambda _: None)(index_B)
        if files is not None:
            sources_B, sizes_B = files
            images = OpenedImages.stored(sources_B, sizes_B, shapes_B3, lambda b: store.read(int(index_B[b])))
            _call_images(calls, images, rows_B)
            return calls[0].out
        decoded = [self._scratch.take(f"decoded {b % _AHEAD}", store.shape(i)) for b, i in enumerate(index_B.tolist())]
        sources_B = addresses_of(decoded)
        for first in range(0, len(decoded), _AHEAD):  # a few at a time, while their pixels are in the cache
            last = min(first + _AHEAD, len(decoded))
            for b in range(first, last):
                store.read_into(int(index_B[b]), decoded[b])
            _call(calls, sources_B, shapes_B3, rows_B=rows_B, first=first, last=last)
        return calls[0].out

    def _values_for(self, channels: int) -> core.Values:
        if channels not in self._values:
            self._values[channels] = _make_values(channels, **self._cast)
        return self._values[channels]


class _Call(NamedTuple):
    """A program, what it drew for a batch, and the memory that it fills."""

    program: Program
    drawing: Drawing
    out: Array


def _drawn(
    every: Sequence[tuple[Program, Array | None]],
    index_B: Int64s,
    visits_B: int | Int64s,
    seed: int,
    shapes_B3: Int32s,
) -> list[_Call]:
    calls = []
    for program, out in every:
        drawing = program.draw(index_B, visits_B, seed, shapes_B3)
        calls.append(_Call(program, drawing, program._room(drawing) if out is None else out))
    return calls


def _call(calls: Sequence[_Call], sources_B: Int64s, shapes_B3: Int32s, **which: Any) -> None:
    """Serve samples by several programs in one call of the core."""
    served, widened = [], []
    for program, drawing, out in calls:
        made, shape = out, _planes(out.shape[1:])
        if program._is_widened:
            made = program._scratch.take("not widened", out.shape)
            widened.append((made, out))
        served.append(core.Served(drawing.records, program._values_for(shape[0]), made.ctypes.data, shape))
    try:
        core.serve(sources_B, shapes_B3, served, **which)
    except core.CoreError as refused:
        if refused.reason != "file":
            raise _refusal(refused, calls, shapes_B3) from None
        raise
    these = slice(which.get("first"), which.get("last"))
    rows = these if which.get("rows_B") is None else which["rows_B"][these]
    for made, out in widened:
        out[rows] = made[rows]


def _call_images(
    calls: Sequence[_Call],
    images: OpenedImages,
    rows_B: Int64s | None = None,
    first: int = 0,
    last: int | None = None,
) -> None:
    while True:
        where: dict[str, Any] = {
            "files": images.files,
            "interleaved": images.is_interleaved,
            "rows_B": rows_B,
            "first": first,
            "last": last,
        }
        try:
            _call(calls, images.sources_B, images.shapes_B3, **where)
            return
        except core.CoreError as damaged:
            first = damaged.place
        images.leave_to_pillow(first)


def _refusal(refused: core.CoreError, calls: Sequence[_Call], shapes_B3: Int32s) -> ValueError:
    b = refused.place
    number, stored = int(calls[0].drawing.index_B[b]), tuple(shapes_B3[b].tolist())
    if refused.reason != "shape":
        return ValueError(
            f"sample {number}, of shape {stored}, cannot be served: {_REFUSALS[refused.reason]}. Use batch_ops='off', "
            "or leave it out."
        )
    for program, drawing, out in calls:
        with ChannelsError.naming(number):
            channels, _ = size_after(program._ops, stored[0], None)
        found, room = (channels, int(drawing.height_B[b]), int(drawing.width_B[b])), _planes(out.shape[1:])
        if found != room:
            break
    return ValueError(
        f"sample {number} comes out as {found}, but the batch has room for {room} each. "
        "Crop or resize to one size, and give all images one number of channels, as "
        "prepare=lambda image: image.convert('RGB') does."
    )


def _make_values(
    channels: int, dtype: str, scaling: str = "none", normalizations: Sequence[tuple[Fill, Fill, bool]] = ()
) -> core.Values:
    """Let channel c's value x become ``table_C256[c, x]``, by torchvision's own arithmetic.

    The core computes it, as (x / factor - mean) / std in float32, where that gives the very values of the table.
    """
    computed = np.float64 if dtype == "float64" else np.float32
    divides, factor = scaling == "divide", computed({"divide": 255, "multiply": 1 / 255, "none": 1}[scaling])
    table_C256 = np.broadcast_to(np.arange(256, dtype=computed), (channels, 256))
    table_C256 = table_C256 / factor if divides else table_C256 * factor
    mean_C, std_C, widens = np.zeros(channels, computed), np.ones(channels, computed), False
    for mean, std, widens_too in normalizations:
        mean_C, std_C = (np.broadcast_to(np.array(each, computed), channels) for each in (mean, std))
        table_C256, widens = (table_C256 - mean_C[:, None]) / std_C[:, None], widens or widens_too
    kept: list[Array] = [np.array(each, np.float32) for each in (mean_C, std_C)]
    kept.append(np.array(table_C256, np.float64, order="C"))
    addresses = (array.ctypes.data for array in kept)
    values = core.Values(core.OUTPUTS[dtype], computed is np.float32, divides, widens, factor, *addresses)
    values.kept = kept
    return values


def _planes(shape: Shape) -> Shape:
    """As (C, H, W); a mask may be (H, W)."""
    return shape if len(shape) == 3 else (1, *shape)
