"""Code that the tests of albumentations' transforms share: serve images, draw ops, and compare with albumentations.

Images are arrays (H, W, C) or (H, W) of uint8, as albumentations has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from data import ArrayStore
from fastdata.pixels.program import Program
from fastdata.pixels.samples import Form, from_stored, to_stored
from fastdata.pixels.split import split_transform
from fastdata.pixels.state import State
from fastdata.pixels.steps import Step

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # else the import asks the network
albumentations = pytest.importorskip("albumentations")
stats = pytest.importorskip("scipy.stats")

__all__ = [
    "Served",
    "albumentations",
    "assert_alike",
    "assert_pixels",
    "images",
    "normal_numbers",
    "parameters",
    "refusal_of",
    "serve",
]

SEED, EPOCH = 11, 3
LEAST_P = 1e-4
"""Least p-value of a comparison of two distributions. Seeds are fixed, so a comparison fails always or never."""


def images(*sizes: tuple[int, int], channels: int = 3, seed: int = 0) -> list[np.ndarray]:
    """Return for each (height, width) an image of noise and a smooth one."""
    rng = np.random.default_rng(seed)
    found = []
    for height, width in sizes:
        y, x = np.mgrid[0:height, 0:width]
        waves = [127 + 120 * np.sin(x / (3 + k)) * np.cos(y / (5 - k)) for k in range(channels)]
        noise = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
        found += [noise, np.stack(waves, axis=2).astype(np.uint8)]
    return [image[..., 0] if channels == 1 else image for image in found]


class Served:
    """A transform as fastdata serves it, for images of one form and number of channels."""

    def __init__(self, transform: Any, like: np.ndarray) -> None:
        planes, self.form = to_stored(like)
        plan = split_transform(transform, form=self.form, channels=len(planes), prepared=0)
        assert not plan.per_sample, plan.obstacle
        self.kind: Form = plan.kind
        self.steps = plan.batch_ops

    def program(self, arrays: Sequence[np.ndarray]) -> tuple[Program, ArrayStore]:
        store = ArrayStore([to_stored(array)[0] for array in arrays], self.form)
        return Program(self.steps, store.spec), store

    def pixels(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """Return image i as it is served under index i."""
        program, store = self.program(arrays)
        rows = [program.run_one(store, i, EPOCH, SEED) for i in range(len(arrays))]
        return [from_stored(row, self.kind) for row in rows]

    def ops(self, shape: tuple[int, ...], count: int) -> np.ndarray:
        """Return what is drawn for ``count`` images of this shape: records ``OP`` (count, ops).

        The fields of an op are read by names, as ``ops[:, 0]["window"]["box"]["top"]``. The op of
        index i is that of ``pixels`` for image i.
        """
        program, _ = self.program([np.zeros(shape, np.uint8)])
        planes = to_stored(np.zeros(shape, np.uint8))[0].shape
        shapes = np.full((count, 3), planes, np.int32)
        return program.draw(np.arange(count), EPOCH, SEED, shapes)


def serve(transform: Any, arrays: Sequence[np.ndarray]) -> list[Any]:
    """Return the images as fastdata serves them, image i with the draws of index i."""
    return Served(transform, arrays[0]).pixels(arrays)


def normal_numbers(at: int, index: int, shape: tuple[int, int]) -> np.ndarray:
    """Return the normal numbers of the draw ``at`` for one sample, as ``serve`` draws them.

    They are what noise of that draw adds to a black image.
    """
    store = ArrayStore([np.zeros((1, *shape), np.uint8)] * (index + 1), "tensor")
    cast = Step("cast", {"dtype": "FLOAT32", "scaling": "SCALE_DIVIDE"})
    program = Program((cast, Step("noise", {"sigma": 1.0}, at=at)), store.spec)
    return np.asarray(program.run_one(store, index, EPOCH, SEED)).reshape(shape)


def refusal_of(transform: Any, channels: int = 3) -> str:
    """Return why a transform is not served; empty if it is."""
    state = State(kind="hw" if channels == 1 else "hwc", channels=channels)
    plan = split_transform(transform, form=state.kind, channels=channels, prepared=0)
    return plan.obstacle or ""


def assert_pixels(
    transform: Any,
    arrays: Sequence[np.ndarray],
    params_of: Callable[[np.ndarray, tuple[int, ...]], dict[str, Any]],
    *,
    levels: int = 0,
    share: float = 1.0,
) -> None:
    """Compare served images with ``transform.apply``, called with the parameters that fastdata drew.

    ``transform`` is one transform of p=1. ``params_of(ops, shape)`` makes the parameters of
    ``apply`` from the ops of one image, records ``OP`` (ops,). A pixel may be off by ``levels``, in
    at most this ``share`` of the pixels.
    """
    for index, (array, pixels) in enumerate(zip(arrays, serve(transform, arrays), strict=True)):
        ops = Served(transform, array).ops(array.shape, len(arrays))[index]
        wanted = transform.apply(array.copy(), **params_of(ops, array.shape))
        assert (pixels.shape, pixels.dtype) == (wanted.shape, wanted.dtype)
        off = np.abs(pixels.astype(np.float64) - wanted)
        assert off.max() <= levels, f"image {index} of {array.shape} is off by {off.max()}"
        assert (off > 0).mean() <= share, f"{(off > 0).mean():.4f} of image {index} is off"


def parameters(transform: Any, array: np.ndarray, count: int) -> list[dict[str, Any]]:
    """Return the parameters that albumentations draws in ``count`` calls."""
    transform.set_random_seed(7)
    found = []
    for _ in range(count):
        params = transform.update_transform_params(transform.get_params(), {"image": array})
        params |= transform.get_params_dependent_on_data(params, {"image": array})
        found.append(params)
    return found


def assert_alike(ours: Any, theirs: Any) -> None:
    """Assert that two samples of numbers are of one distribution.

    Few different values are compared by chi-square, others by Kolmogorov-Smirnov.
    """
    ours, theirs = np.asarray(ours).ravel(), np.asarray(theirs).ravel()
    values = np.unique(np.concatenate([ours, theirs]))
    if len(values) == 1:
        return
    if len(values) <= 64:
        table = [[(each == value).sum() for value in values] for each in (ours, theirs)]
        p = stats.chi2_contingency(table).pvalue
    else:
        p = stats.ks_2samp(ours, theirs).pvalue
    assert p > LEAST_P, f"the draws are of other distributions (p = {p:.2g})"
