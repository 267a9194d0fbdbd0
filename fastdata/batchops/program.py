"""A plan's batch ops, compiled: stages that fuse what can be fused, run on a whole batch from a store.

Shape letters: B batch, C channels, H W stored size, h w size served.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fastdata.batchops.chunks import MAX_MIRRORED_BYTES, MAX_SAMPLE_BYTES, PLAIN_SHARE, serve_chunks, serve_mirrored
from fastdata.batchops.fuse import (
    Stage,
    WindowStage,
    channels_after,
    check_fill,
    fuse_ops,
    place_stage,
    size_after_stage,
    values_of,
)
from fastdata.batchops.pixels import WORD_BYTES, Bytes
from fastdata.batchops.readable import Readable
from fastdata.batchops.stages import BoxPass, GrayPass, Pass, WindowPass
from fastdata.batchops.windows import Length, Padding, Size, padding_of
from fastdata.draws import UInt64s, sample_keys
from fastdata.plan import TransformPlan
from fastdata.plan.ops import Flip, Grayscale, Op, RandomResizedCrop, Reform
from fastdata.scratch import Scratch
from fastdata.spec import SampleSpec

__all__ = ["Program", "compile_ops"]

Array = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Shape = tuple[int, ...]


def compile_ops(plan: TransformPlan, spec: SampleSpec) -> Program:
    """Compile the batch ops of a plan for samples of one spec.

    Raises:
        ValueError: the samples are no uint8 images (C, H, W).
    """
    ops = plan.batch_ops
    works = any(not isinstance(op, Reform) for op in ops)
    if works and (spec.dtype != "uint8" or (spec.shape is not None and len(spec.shape) != 3)):
        raise ValueError(
            f"batch ops need uint8 images (C, H, W), but the samples are {spec.dtype} of shape {spec.shape}. "
            "Use batch_ops='off'."
        )
    return Program(ops, spec)


class Program:
    """Batch ops ready to run; made by ``compile_ops``, safe from several threads at once.

    Each thread keeps scratch memory of about one image or one chunk of small images. Draws are a pure function of
    (seed, epoch, index): a sample comes out the same alone and in any batch.

    Args:
        ops: of a plan.
        spec: of the samples.
    """

    def __init__(self, ops: tuple[Op, ...], spec: SampleSpec) -> None:
        self._ops = ops
        self._spec = spec
        self._stages = fuse_ops(ops, spec)
        self._values = values_of(ops)
        self._scratch = Scratch()

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, (self._ops, self._spec)

    def output(self, sample_shape: Shape | None) -> tuple[Shape, np.dtype[Any]] | None:
        """Shape and dtype of each served sample; None if the shape is not the same for all of them.

        Args:
            sample_shape: of a stored sample; for ragged samples that of any, whose channels count for all.
        """
        dtype = self._values.dtype if self._values else np.dtype(self._spec.dtype)
        if not self._stages and not self._values:
            return (self._spec.shape, dtype) if self._spec.shape is not None else None
        if sample_shape is None:
            return None
        size = self._spec.shape[1:] if self._spec.shape is not None else None
        for stage in self._stages:
            size = size_after_stage(stage, cast("Size | None", size))
        return None if size is None else ((channels_after(self._stages, self._values, sample_shape[0]), *size), dtype)

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
        if not self._stages and not self._values:
            store.gather_into(index_B, out_BChw)
            return
        keys_B = sample_keys(seed, visits_B, index_B)
        shape = self._spec.shape
        if shape is not None and len(self._stages) <= 1 and len(index_B):
            stage = self._stages[0] if self._stages else WindowStage((), Padding())
            if isinstance(stage, WindowStage) and self._is_small(stage, shape, out_BChw.shape[1:]):
                windows = place_stage(stage, (shape[1], shape[2]), keys_B, index_B)
                check_fill(stage.padding, shape[0])
                serve_chunks(store, index_B, windows, stage.padding, self._values, out_BChw, self._scratch)
                return
            if self._only_mirrors(stage, shape) and self._values is None:
                mirrored_B = place_stage(cast("WindowStage", stage), (shape[1], shape[2]), keys_B, index_B).flip_h
                assert mirrored_B is not None
                serve_mirrored(store, index_B, mirrored_B, out_BChw, self._scratch)
                return
        if store.gives_views:
            sources = [store.read(i) for i in index_B.tolist()]
            self._serve(sources, [source.shape for source in sources], index_B, keys_B, out_BChw)
        else:
            decoded = (self._decode(store, i) for i in index_B.tolist())
            self._serve(decoded, [store.shape(i) for i in index_B.tolist()], index_B, keys_B, out_BChw)

    def run_one(self, store: Readable, index: int, visit: int | Int64s, seed: int) -> Array:
        """Serve one sample in fresh memory: the pixels that it has in a batch, in whatever shape it has."""
        source = store.read(index)
        if not self._stages and not self._values:
            return cast("Array", source.copy())
        index_B = np.array([index], np.int64)
        keys_B = sample_keys(seed, visit, index_B)
        return cast("Array", self._serve([source], [source.shape], index_B, keys_B, None)[0])

    def _decode(self, store: Readable, index: int) -> Bytes:
        """One sample in scratch memory, until the next one."""
        decoded = self._scratch.take("decoded", store.shape(index))
        store.read_into(index, decoded)
        return decoded

    def _serve(
        self,
        sources: Iterable[Bytes],
        shapes: list[Shape],
        index_B: Int64s,
        keys_B: UInt64s,
        out_BChw: Array | None,
    ) -> Array:
        """Run the passes sample by sample; without ``out``, for one sample, make it."""
        height_B: Length = np.array([shape[1] for shape in shapes], np.int64)
        width_B: Length = np.array([shape[2] for shape in shapes], np.int64)
        if self._spec.shape is not None:
            height_B, width_B = self._spec.shape[1:]
        channels = shapes[0][0] if shapes else 0
        passes: list[Pass] = []
        for number, stage in enumerate(self._stages):
            made = self._begin(stage, (height_B, width_B), keys_B, index_B, f"{number} ")
            height_B, width_B = made.size
            passes.append(made)
        if out_BChw is None:
            height, width = (int(np.broadcast_to(n, 1)[0]) for n in (height_B, width_B))
            dtype = self._values.dtype if self._values else np.uint8
            out_BChw = np.empty((1, channels_after(self._stages, self._values, channels), height, width), dtype)
        self._loop(sources, index_B, passes, out_BChw)
        return out_BChw

    def _loop(self, sources: Iterable[Bytes], index_B: Int64s, passes: list[Pass], out_BChw: Array) -> None:
        values, scratch = self._values, self._scratch
        last = len(passes) - 1
        served_shape = out_BChw.shape[1:]
        if self._spec.shape is not None and last == 0 and isinstance(sources, list):
            only = passes[0]
            if isinstance(only, WindowPass) and not only.is_padded:
                only.run_all(sources, values, out_BChw, scratch)
                return
        for b, source in enumerate(sources):
            if source.shape[0] != served_shape[0]:
                self._check_shape(source, index_B[b], served_shape)
            out = out_BChw[b]
            for k, step in enumerate(passes):
                source = step.run(source, b, out if k == last and values is None else None, scratch)
            if source.shape[1:] != served_shape[1:]:
                raise _wrong_shape(index_B[b], source.shape, served_shape)
            if values is not None:
                values.apply(source, out)
            elif source is not out:
                out[...] = source

    def _begin(self, stage: Stage, size: tuple[Length, Length], keys_B: UInt64s, index_B: Int64s, slot: str) -> Pass:
        if isinstance(stage, RandomResizedCrop):
            return BoxPass(stage, *size, keys_B, slot)
        if isinstance(stage, Grayscale):
            return GrayPass(stage, *size, slot)
        return WindowPass(place_stage(stage, size, keys_B, index_B), stage.padding, len(index_B), slot)

    def _only_mirrors(self, stage: Stage, stored_shape: Shape) -> bool:
        """Whether images of medium size are served whole, some mirrored left to right."""
        flips = isinstance(stage, WindowStage) and all(isinstance(op, Flip) and not op.vertical for op in stage.ops)
        return flips and math.prod(stored_shape) <= MAX_MIRRORED_BYTES and stored_shape[-1] % WORD_BYTES == 0

    def _is_small(self, stage: WindowStage, stored_shape: Shape, served_shape: Shape) -> bool:
        """Whether chunks are faster than a loop; measured, see ``chunks``."""
        is_plain = self._values is None and padding_of(stage.ops) is None
        limit = MAX_SAMPLE_BYTES // (PLAIN_SHARE if is_plain else 1)
        return max(math.prod(stored_shape) // 2, math.prod(served_shape)) <= limit

    def _check_shape(self, source: Bytes, index: int, served_shape: Shape) -> None:
        if channels_after(self._stages, self._values, source.shape[0]) != served_shape[0]:
            raise _wrong_shape(index, source.shape, served_shape)


def _wrong_shape(index: int, found: Shape, wanted: Shape) -> ValueError:
    return ValueError(
        f"sample {int(index)} comes out as {found}, but the batch has room for {wanted} each. "
        "Crop or resize to one size, and convert all images to one number of channels."
    )
