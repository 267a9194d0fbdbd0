"""How the ops of a plan become as few stages as possible, and what each stage is before any pixel is touched.

Shape letters: B batch, h w size served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from fastdata.batchops.pixels import check_reflects
from fastdata.batchops.values import Values, gray_channels
from fastdata.batchops.windows import (
    Length,
    Padding,
    Size,
    WindowOp,
    Windows,
    joins,
    padding_of,
    place_windows,
    size_after,
)
from fastdata.draws import UInt64s
from fastdata.plan.ops import Cast, Grayscale, Normalize, Op, RandomResizedCrop, Reform
from fastdata.spec import SampleSpec

__all__ = [
    "Stage",
    "WindowStage",
    "channels_after",
    "check_fill",
    "fuse_ops",
    "place_stage",
    "size_after_stage",
    "values_of",
]


@dataclass(frozen=True, slots=True)
class WindowStage:
    """Crops, flips and at most one padding: one window per sample."""

    ops: tuple[WindowOp, ...]
    padding: Padding


Stage = WindowStage | RandomResizedCrop | Grayscale


def fuse_ops(ops: tuple[Op, ...], spec: SampleSpec) -> tuple[Stage, ...]:
    """Group what touches no values into as few stages as possible.

    What comes after the conversion to floats is done before it: the plan admits only what commutes with it.
    """
    stages: list[Stage] = []
    run: list[WindowOp] = []
    size = cast("Size | None", None if spec.shape is None else spec.shape[1:])

    def end_run() -> None:
        if run:
            stages.append(WindowStage(tuple(run), padding_of(tuple(run)) or Padding()))
            run.clear()

    for op in ops:
        if isinstance(op, (Reform, Cast, Normalize)):
            continue
        if isinstance(op, (RandomResizedCrop, Grayscale)):
            end_run()
            stages.append(op)
            size = size_after_stage(op, size)
            continue
        if not joins(run, op, size):
            end_run()
        run.append(op)
        size = size_after(op, size)
    end_run()
    return tuple(stages)


def values_of(ops: tuple[Op, ...]) -> Values | None:
    """Give the conversion to floats with all the normalisations after it; None if there is none."""
    normalizations = tuple(op for op in ops if isinstance(op, Normalize))
    for op in ops:
        if isinstance(op, Cast):
            return Values(op, normalizations)
    return None


def size_after_stage(stage: Stage, size: Size | None) -> Size | None:
    """(h, w) after a stage; None if it is not the same for all samples."""
    if isinstance(stage, RandomResizedCrop):
        return stage.height, stage.width
    if isinstance(stage, WindowStage):
        for op in stage.ops:
            size = size_after(op, size)
    return size


def place_stage(
    stage: WindowStage, size: tuple[Length, Length], keys_B: UInt64s, index_B: npt.NDArray[np.int64]
) -> Windows:
    """Draw the windows of a batch.

    Args:
        stage: which.
        size: heights and widths before it.
        keys_B: from ``draws.sample_keys``.
        index_B: positions of the samples, for errors.

    Raises:
        ValueError: an image is smaller than its crop, or than torch needs for its reflection.
    """
    windows = place_windows(stage.ops, *size, keys_B, index_B)
    check_reflects(stage.padding, size, windows.borders, index_B)
    return windows


def channels_after(stages: tuple[Stage, ...], values: Values | None, channels: int) -> int:
    """Channels served for samples of so many.

    Raises:
        ValueError: a fill or a normalisation is for another number of channels.
    """
    for stage in stages:
        if isinstance(stage, WindowStage):
            check_fill(stage.padding, channels)
        elif isinstance(stage, Grayscale):
            channels = gray_channels(stage, channels)
    if values is None or values.channels in (1, channels):
        return channels
    if channels != 1 or not values.widens:
        raise ValueError(f"Normalize has {values.channels} means, but the images have {channels} channels.")
    return values.channels


def check_fill(padding: Padding, channels: int) -> None:
    """Refuse a fill that has not one value for all channels or one for each."""
    if len(padding.fill) not in (1, channels):
        raise ValueError(
            f"fill={padding.fill} has {len(padding.fill)} values, but the images have {channels} channels."
        )
