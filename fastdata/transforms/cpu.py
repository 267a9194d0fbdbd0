"""A plan's batch ops on the CPU: a batch is drawn in NumPy and served by the compiled core in one call.

Shape letters: B batch, C channels, H W stored size, h w size served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastdata import core
from fastdata.draws import sample_keys
from fastdata.scratch import Scratch
from fastdata.spec import SampleSpec
from fastdata.transforms.ops import Cast, Drawing, Erase, Noise, Normalize, Op, Size
from fastdata.transforms.plan import TransformPlan

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Shape = tuple[int, ...]

_AHEAD = 4
"""Encoded samples that are decoded before the core takes them."""
_FLOAT16S = {"float16": np.dtype("float16"), "bfloat16": np.dtype("uint16")}


class Readable(Protocol):
    """The face of a store that serving needs; see ``fastdata.stores.base.Store``."""

    @property
    def spec(self) -> SampleSpec: ...
    @property
    def gives_views(self) -> bool: ...
    def shape(self, index: int, /) -> tuple[int, ...]: ...
    def read(self, index: int, /) -> npt.NDArray[Any]: ...
    def read_into(self, index: int, out: npt.NDArray[Any], /) -> None: ...
    def gather_into(self, index_B: npt.NDArray[np.int64], out_B: npt.NDArray[Any], /) -> None: ...


def compile_ops(plan: TransformPlan, spec: SampleSpec) -> Program:
    """Compile the batch ops of a plan for samples of one spec.

    Raises:
        ValueError: the samples are no uint8 images (C, H, W).
    """
    ops = plan.batch_ops
    if ops and (spec.dtype != "uint8" or (spec.shape is not None and len(spec.shape) != 3)):
        raise ValueError(
            f"batch ops need uint8 images (C, H, W), but the samples are {spec.dtype} of shape {spec.shape}. "
            "Use batch_ops='off'."
        )
    return Program(ops, spec)


class Program:
    """Batch ops ready to run; made by ``compile_ops``, safe from several threads at once.

    Draws are a pure function of (seed, visit, index): a sample comes out the same alone and in any batch.

    Args:
        ops: of a plan.
        spec: of the samples.
    """

    def __init__(self, ops: tuple[Op, ...], spec: SampleSpec) -> None:
        self._given, self._spec = ops, spec
        self._ops, self._normalizations = finish_noise(ops)
        self._cast = next((op for op in ops if isinstance(op, Cast)), None)
        self._values: dict[int, core.Values] = {}
        self._scratch = Scratch()

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self._given, self._spec)

    def output(self, sample_shape: Shape | None) -> tuple[Shape, np.dtype[Any]] | None:
        """Shape and dtype of each served sample; None if the shape is not the same for all of them.

        Args:
            sample_shape: of a stored sample; for ragged samples that of any, whose channels count for all.

        Raises:
            ValueError: an op is for another number of channels.
        """
        if not self._given:
            return None if self._spec.shape is None else (self._spec.shape, self._dtype)
        if sample_shape is None:
            return None
        size: Size | None = None if self._spec.shape is None else (self._spec.shape[1], self._spec.shape[2])
        for op in self._given:
            size = op.size_after(size)
        channels = self._channels(sample_shape[0])
        return None if size is None else ((channels, *size), self._dtype)

    def run(self, store: Readable, index_B: Int64s, visits_B: int | Int64s, seed: int, out_BChw: Array) -> None:
        """Serve a batch into the caller's memory.

        Args:
            store: its samples have the program's spec.
            index_B: which samples.
            visits_B: what draws are made from, as of ``fastdata.visits``: one for all samples, or one for each.
            seed: of the draws.
            out_BChw: C-contiguous, of the shape and dtype that ``output`` says; filled completely.

        Raises:
            ValueError: an image is smaller than its crop, or not of the shape that ``out`` has room for.
        """
        if not out_BChw.flags.c_contiguous:
            raise ValueError("the memory for a batch must be C-contiguous")
        if not self._given:
            store.gather_into(index_B, out_BChw)
        elif len(index_B):
            shapes_B3 = self._shapes(store, index_B)
            drawing = self._draw(index_B, visits_B, seed, shapes_B3)
            self._serve(store, index_B, shapes_B3, drawing, out_BChw)

    def run_one(self, store: Readable, index: int, visit: int | Int64s, seed: int) -> Array:
        """Serve one sample in fresh memory: the pixels that it has in a batch, in whatever shape it has."""
        index_B = np.array([index], np.int64)
        if not self._given:
            copy: Array = store.read(index).copy()
            return copy
        shapes_B3 = self._shapes(store, index_B)
        drawing = self._draw(index_B, visit, seed, shapes_B3)
        out = np.empty((1, *self._shape_after(drawing, shapes_B3, 0)), self._dtype)
        self._serve(store, index_B, shapes_B3, drawing, out)
        one: Array = out[0]
        return one

    def run_decoded(
        self, images: Sequence[Array], index_B: Int64s, visits_B: int | Int64s, seed: int, out_BChw: Array
    ) -> None:
        """Serve a batch of images as they are decoded, uint8 (H, W, C) each, C-contiguous; else as ``run``."""
        if len(images):
            shapes_B3 = np.array([image.shape for image in images], np.int32)[:, (2, 0, 1)].copy()
            drawing = self._draw(index_B, visits_B, seed, shapes_B3)
            self._check_size(drawing, shapes_B3, out_BChw.shape[1:])
            self._call(_addresses_of(images), shapes_B3, drawing, out_BChw, interleaved=True)

    def prepare(self, pixels_HWC: Array) -> Array:
        """Serve one decoded image in fresh memory; for ops that draw nothing."""
        shapes_B3 = np.array([pixels_HWC.shape], np.int32)[:, (2, 0, 1)].copy()
        drawing = self._draw(np.zeros(1, np.int64), 0, 0, shapes_B3)
        out = np.empty((1, *self._shape_after(drawing, shapes_B3, 0)), self._dtype)
        self._call(_addresses_of([pixels_HWC]), shapes_B3, drawing, out, interleaved=True)
        one: Array = out[0]
        return one

    @property
    def _dtype(self) -> np.dtype[Any]:
        name = self._cast.dtype if self._cast else self._spec.dtype
        return _FLOAT16S.get(name) or np.dtype(name)

    def as_tensor(self, served: Array) -> torch.Tensor:
        """What was served as a tensor over the same memory; NumPy has no bfloat16, and holds its bits."""
        tensor = torch.from_numpy(served)
        return tensor.view(torch.bfloat16) if self._cast and self._cast.dtype == "bfloat16" else tensor

    def _channels(self, channels: int) -> int:
        for op in self._given:
            channels = op.channels_after(channels)
        return channels

    def _shapes(self, store: Readable, index_B: Int64s) -> npt.NDArray[np.int32]:
        if self._spec.shape is not None:
            return np.tile(np.array(self._spec.shape, np.int32), (len(index_B), 1))
        return np.array([store.shape(i) for i in index_B.tolist()], np.int32)

    def _draw(self, index_B: Int64s, visits_B: int | Int64s, seed: int, shapes_B3: npt.NDArray[np.int32]) -> Drawing:
        _, height_B, width_B = shapes_B3.T.astype(np.int64)
        drawing = Drawing(sample_keys(seed, visits_B, index_B), index_B, height_B, width_B, int(shapes_B3[0, 0]))
        for op in self._ops:
            op.draw(drawing)
        return drawing

    def _serve(
        self,
        store: Readable,
        index_B: Int64s,
        shapes_B3: npt.NDArray[np.int32],
        drawing: Drawing,
        out_BChw: Array,
    ) -> None:
        self._check_size(drawing, shapes_B3, out_BChw.shape[1:])
        if store.gives_views:
            sources_B, _kept = _addresses(store, index_B)
            self._call(sources_B, shapes_B3, drawing, out_BChw)
            return
        decoded = [self._scratch.take(f"decoded {b % _AHEAD}", store.shape(i)) for b, i in enumerate(index_B.tolist())]
        sources_B = _addresses_of(decoded)
        for first in range(0, len(decoded), _AHEAD):  # a few at a time, while their pixels are in the cache
            last = min(first + _AHEAD, len(decoded))
            for b in range(first, last):
                store.read_into(int(index_B[b]), decoded[b])
            self._call(sources_B, shapes_B3, drawing, out_BChw, first=first, last=last)

    def _call(
        self,
        sources_B: Int64s,
        shapes_B3: npt.NDArray[np.int32],
        drawing: Drawing,
        out_BChw: Array,
        **part: Any,
    ) -> None:
        shape = out_BChw.shape[1:]
        values = self._values_of(shape[0])
        try:
            core.serve(sources_B, shapes_B3, drawing.records(), values, out_BChw.ctypes.data, shape, **part)
        except core.CoreError as refused:
            if refused.reason != "shape":
                raise
            b = refused.place
            found = (int(shapes_B3[b, 0]), int(drawing.height_B[b]), int(drawing.width_B[b]))
            raise _wrong_shape(drawing.index_B[b], found, shape) from None

    def _check_size(self, drawing: Drawing, shapes_B3: npt.NDArray[np.int32], wanted: Shape) -> None:
        wrong_B = (drawing.height_B != wanted[1]) | (drawing.width_B != wanted[2])
        if wrong_B.any():
            b = int(np.argmax(wrong_B))
            raise _wrong_shape(drawing.index_B[b], self._shape_after(drawing, shapes_B3, b), wanted)

    def _shape_after(self, drawing: Drawing, shapes_B3: npt.NDArray[np.int32], b: int) -> Shape:
        return self._channels(int(shapes_B3[b, 0])), int(drawing.height_B[b]), int(drawing.width_B[b])

    def _values_of(self, channels: int) -> core.Values:
        """How values become what is served; asked of torchvision's own arithmetic, for all 256 of them."""
        if channels not in self._values:
            if self._cast is None:
                self._values[channels] = core.make_values("uint8", np.zeros((channels, 256)))
            else:
                self._values[channels] = _make_floats(self._cast, self._normalizations, channels)
        return self._values[channels]


def _make_floats(cast: Cast, normalizations: tuple[Normalize, ...], channels: int) -> core.Values:
    """Torchvision's conversion and normalisation as a table, and as a formula where there is at most one Normalize."""
    computed = np.float64 if cast.dtype == "float64" else np.float32
    table = np.broadcast_to(np.arange(256, dtype=computed), (channels, 256))
    divides, factor = cast.scaling == "divide", computed(1.0)
    if divides:
        factor = computed(255)
        table = table / factor
    elif cast.scaling == "multiply":
        factor = computed(1 / 255)
        table = table * factor
    mean_C = std_C = None
    for step in normalizations:
        mean_C, std_C = (np.broadcast_to(np.array(each, computed), channels) for each in (step.mean, step.std))
        table = (table - mean_C[:, None]) / std_C[:, None]
    formula = (divides, float(factor), mean_C, std_C) if len(normalizations) < 2 and computed is np.float32 else None
    return core.make_values(cast.dtype, table.astype(np.float64), formula)


def finish_noise(ops: tuple[Op, ...]) -> tuple[tuple[Op, ...], tuple[Normalize, ...]]:
    """Ops that draw, those among floats in the units that are served; and the normalisations, done with the cast."""
    drawn: list[Op] = []
    normalizations = []
    in_floats = False
    for op in ops:
        in_floats |= isinstance(op, Cast)
        if not isinstance(op, Normalize):
            # What moves pixels is done before the conversion, with which it commutes: the plan admits nothing else.
            place = len(drawn) if isinstance(op, (Cast, Erase, Noise)) else _first_cast(drawn)
            drawn.insert(place, op)
            continue
        normalizations.append(op)
        drawn = [_normalized(each, op) if k > _first_cast(drawn) else each for k, each in enumerate(drawn)]
    if drawn and isinstance(drawn[-1], Cast):
        drawn.pop()  # nothing follows it
    return tuple(drawn), tuple(normalizations)


def _first_cast(ops: list[Op]) -> int:
    return next((k for k, op in enumerate(ops) if isinstance(op, Cast)), len(ops))


def _normalized(op: Op, step: Normalize) -> Op:
    """An op among floats after a Normalize that comes later."""
    count = len(step.mean)

    def each(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[min(c, len(values) - 1)] for c in range(max(count, len(values))))

    def shifted(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(
            (v - step.mean[min(c, count - 1)]) / step.std[min(c, count - 1)] for c, v in enumerate(each(values))
        )

    if isinstance(op, Erase) and op.fill is not None:
        return replace(op, fill=shifted(op.fill))
    if isinstance(op, Noise):
        scale = tuple(v / step.std[min(c, count - 1)] for c, v in enumerate(each(op.scale)))
        return replace(op, scale=scale, low=shifted(op.low))
    return op


def _addresses(store: Readable, index_B: Int64s) -> tuple[Int64s, list[Array]]:
    """Where samples lie, and what must be kept meanwhile."""
    addresses = getattr(store, "addresses", None)
    if addresses is not None:
        return addresses(index_B), []
    kept = [store.read(i) for i in index_B.tolist()]
    return _addresses_of(kept), kept


def _addresses_of(samples: Sequence[Array]) -> Int64s:
    return np.array([sample.__array_interface__["data"][0] for sample in samples], np.int64)


def _wrong_shape(index: int, found: Shape, wanted: Shape) -> ValueError:
    return ValueError(
        f"sample {int(index)} comes out as {found}, but the batch has room for {wanted} each. "
        "Crop or resize to one size, and convert all images to one number of channels."
    )
