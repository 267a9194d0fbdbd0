"""The steps of a transform as values, and the table that they are compiled to, which the core draws.

An op is a record of core/core.h: what its numbers mean, what it draws, and what it does to pixels
stand there and in the C files. Nothing here draws or touches a pixel.

Shape letters: B batch, S ops of a sample, k perspectives of a sample, P perspectives of a batch.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdata.errors import ChannelsError, counted
from fastdata.pixels import core
from fastdata.pixels.images import pillow_chooses_order

Size = tuple[int, int]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
Fill = tuple[float, ...]
"""One value, or one for each channel."""

MODES = ("constant", "edge", "reflect", "symmetric")
_CHILDREN = 1 << 10
_NUMBERS = (1 << 54) - 33
"""A prime number of numbers, as many as draws tell apart: those of steps nested deeper are folded
into these."""
_FUSED_ROWS = 1 << 10
_MOST_LEVELS = 1000
"""Sizes of images whose magnitudes are kept."""


@dataclass(frozen=True, slots=True)
class Op:
    """A step as core.h describes it by ``code``; names in ``n`` stand for their numbers there.

    ``about`` is what the core is not told: of a cast how values become floats, of a policy its
    magnitudes.
    """

    code: str
    at: int = 0
    n: tuple[int | str, ...] = ()
    v: tuple[float, ...] = ()
    fill: Fill = (0,)
    children: tuple[Op, ...] = ()
    about: Any = None


@dataclass(frozen=True, slots=True)
class Cast:
    """uint8 to another dtype.

    ``scaling`` is how 255 becomes 1: ``"divide"``, ``"multiply"``, or ``"none"``: it does not.
    ``normalizations`` are mean and std, and whether one channel becomes as many as there are means.
    """

    dtype: str
    scaling: str = "none"
    normalizations: tuple[tuple[Fill, Fill, bool], ...] = ()

    def op(self, at: int) -> Op:
        checks = [
            Op("STEP_NORMALIZE", at, (len(mean), int(widens)))
            for mean, _, widens in self.normalizations
        ]
        return Op("OP_CAST", at, children=tuple(checks), about=self)


def child(at: int, number: int) -> int:
    """The number of what a step draws within itself, or of a step within it."""
    return ((at + 1) * _CHILDREN + number) % _NUMBERS


def step_number(at: int) -> int:
    """The place in the transform of a step, by a number of it or of its children."""
    while at >= _CHILDREN:
        at = at // _CHILDREN - 1
    return at


def sequence(ops: Sequence[Op], *v: float) -> Op:
    return Op("STEP_SEQUENCE", v=v, children=tuple(ops))


def choice(
    at: int, sequences: Sequence[Sequence[Op]], upto: Sequence[float], code: str = "STEP_CHOICE"
) -> Op:
    """One of several sequences of ops, or none; ``upto``: where in [0, 1) the probability of each ends."""
    return Op(code, at, children=tuple(map(sequence, sequences, upto)))


class Table:
    """Ops compiled for the core, safe from several threads at once."""

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self._ops = [sequence(ops)]
        steps = []
        for op in self._ops:  # which grows as it is walked
            steps.append(_step(op, len(self._ops)))
            self._ops.extend(op.children)
        self._steps = np.array(steps, core.STEP)
        self._levels: list[tuple[int, int, int, Float64s]] = []
        self.has_perspectives = any(op.code == "OP_PERSPECTIVE" for op in self._ops)
        self.record = self._compile(self._levels)

    def _compile(self, levels: list[tuple[int, int, int, Float64s]]) -> core.Table:
        domains = {op.n[2] for op in self._ops if len(op.n) > 2}
        records = [(*which, array.size, array.ctypes.data) for *which, array in levels]
        table = core.make_table(
            self._steps,
            np.array(records, core.LEVELS),
            fuses=not domains.isdisjoint(("V1_DOMAIN", "V2_DOMAIN")) and _torch_fuses(),
            resizes_fast=_torch_resizes_fast(),
            chooses_order=pillow_chooses_order(),
        )
        table.kept += tuple(levels)
        return table

    def draw(self, keys: core.Keys, shapes_B3: Int32s) -> tuple[npt.NDArray[Any], Int32s]:
        """What is done to samples of these shapes (C, H, W), ``core.OP`` (B, S), and shapes behind that.

        Raises:
            ValueError: a step is not for such a sample.
        """
        while True:
            try:
                return core.draw(self.record, keys, shapes_B3)
            except core.CoreError as refused:
                if not self.is_answered(refused):
                    b = refused.place
                    raise self.refusal(refused, int(keys.indices[b]), shapes_B3[b]) from None

    def size_after(self, channels: int, size: Size | None) -> tuple[int, Size | None]:
        """Channels, and size (h, w), that ops make of images; no size where it is not the same for all of them.

        Raises:
            ChannelsError: an op is for another number of channels.
        """
        shape = np.array([(channels, *(size or (0, 0)))], np.int32)
        zero = np.zeros(1, np.int64)
        try:
            _, shapes_after = core.draw(self.record, core.Keys(0, zero, zero), shape, is_probe=True)
        except core.CoreError as refused:
            raise self.refusal(refused, 0, shape[0]) from None
        channels, height, width = shapes_after[0].tolist()
        return channels, ((height, width) if height else None)

    def solve(self, keys: core.Keys, shapes_B3: Int32s) -> Float64s | None:
        """Coefficients of the perspectives of samples (B, k, 8); None where there are none.

        Raises:
            ValueError: corners of a sample lie on a line.
        """
        if not self.has_perspectives:
            return None
        ops_BS, _ = self.draw(keys, shapes_B3)
        is_warped_BS = ops_BS["code"] == core.constants()["OP_PERSPECTIVE"]
        count_B = is_warped_BS.sum(axis=1)
        solved_Bk8 = np.zeros((len(ops_BS), max(1, count_B.max(initial=0)), 8))
        place_B, _ = np.nonzero(is_warped_BS)
        number_P = np.concatenate([np.arange(count) for count in count_B])
        solved_Bk8[place_B, number_P] = _solve_perspectives(
            ops_BS[is_warped_BS], keys.indices[place_B]
        )
        return solved_Bk8

    def is_answered(self, refused: core.CoreError) -> bool:
        """Whether what the core lacked is there now, so that it can be called again: magnitudes for a size."""
        if refused.reason != "NEEDS_LEVELS":
            return False
        height, width = refused.numbers[:2]
        levels = self._ops[refused.step].about.levels(height, width)
        known = self._levels if len(self._levels) < _MOST_LEVELS else []
        known = [*known, (refused.step, height, width, levels)]
        self.record = self._compile(known)  # calls that run have the one before
        self._levels = known
        return True

    def refusal(self, refused: core.CoreError, index: int, shape: Sequence[int]) -> ValueError:
        """What is wrong with a sample of this shape, for its user."""
        op, n = self._ops[refused.step], refused.numbers
        if refused.reason == "REFUSED_CHANNELS":
            return _wrong_channels(op, n[0], index)
        if refused.reason == "REFUSED_CROP":
            return ValueError(
                f"Required crop size {n[:2]} is larger than input image size {n[2:4]} of sample {index}. "
                "Use pad_if_needed=True, a smaller crop, or a Resize before it."
            )
        if refused.reason == "REFUSED_BORDER":
            mode = str(op.n[4]).removeprefix("PAD_").lower()
            return ValueError(
                f"padding {n[:4]} (left, top, right, bottom) in mode {mode!r} is too large for the image size {n[4:]} "
                f"of sample {index}. Use padding_mode='edge' or a smaller padding."
            )
        if refused.reason == "REFUSED_BLUR":
            width, height = map(int, op.n[:2])
            return ValueError(
                f"GaussianBlur with kernel_size=({width}, {height}) needs images of more than {height // 2} x "
                f"{width // 2} px (height x width), but sample {index} has {n[0]} x {n[1]}. Use a smaller kernel or a "
                "larger resize."
            )
        why = _REFUSALS.get(refused.reason, f"{op.code} asks for more than the core has room for")
        stored = tuple(map(int, shape))
        return ValueError(
            f"sample {index}, of shape {stored}, cannot be served: {why}. Use batch_ops=False, or leave it out."
        )


_REFUSALS = {
    "REFUSED_OUTSIDE": "a step would leave no pixel of it",
    "REFUSED_OP": "a step is not for its number of channels",
}


def _step(op: Op, first: int) -> tuple[Any, ...]:
    numbers = core.constants()
    n = [numbers[value] if isinstance(value, str) else value for value in op.n]
    fill = op.fill * (4 // len(op.fill)) if len(op.fill) != 3 else (*op.fill, op.fill[-1])
    if len(op.children) > np.iinfo(np.int32).max or len(fill) != 4:
        raise ValueError(f"{op.code} has {len(op.fill)} values to fill with")
    columns = ([*n, *[0] * (12 - len(n))], [*op.v, *[0.0] * (12 - len(op.v))], list(fill))
    return (
        numbers[op.code],
        first if op.children else 0,
        len(op.children),
        len(op.fill),
        op.at,
        *columns,
    )


def _wrong_channels(op: Op, channels: int, index: int) -> ChannelsError:
    needs = f"fill={op.fill} has {len(op.fill)} values"
    if op.code == "STEP_NORMALIZE":
        needs = f"Normalize has {op.n[0]} means"
    elif op.code == "OP_ERASE":
        needs = f"erasing has {len(op.fill)} values"
    cure = (
        "Give all images one number of channels, as prepare=lambda image: image.convert('RGB') does"
    )
    return ChannelsError(f"it has {counted(channels, 'channel')}, but {needs}. {cure}.", index)


@functools.cache
def _torch_fuses() -> bool:
    """Whether torch's product of large matrices rounds a multiplication and an addition as one, as MKL on some CPUs.

    (1 + 2**-12)**2 - (1 + 2**-11) is 2**-24, and 0 where the square is rounded first.
    """
    row = torch.tensor([-1 - 2**-11, 1 + 2**-12, 1.0])
    column = torch.tensor([[1.0], [1 + 2**-12], [0.0]]).expand(1, 3, 2)
    return bool(row.expand(1, _FUSED_ROWS, 3).bmm(column).any())


def _torch_resizes_fast() -> bool:
    """Whether torch has a fast kernel for uint8: torchvision's v2 takes float32, v1's way, where it has not."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in (
        "aarch64",
        "arm64",
    )


def _solve_perspectives(warps_P: npt.NDArray[Any], index_P: Int64s) -> Float64s:
    """``_get_perspective_coeffs`` of torchvision's transforms/functional.py, all in one call of its own solver.

    Another solver's last bits move pixels, as what it gives is rounded to float32.
    """
    height_P, width_P = warps_P["n"][:, 0], warps_P["n"][:, 1]
    equations_P88, wanted_P8 = np.zeros((len(warps_P), 8, 8)), np.zeros((len(warps_P), 8))
    for corner, (is_right, is_bottom) in enumerate(((0, 0), (1, 0), (1, 1), (0, 1))):
        x_P, y_P = warps_P["v"][:, 2 * corner], warps_P["v"][:, 2 * corner + 1]
        for axis, end_P in enumerate((is_right * (width_P - 1), is_bottom * (height_P - 1))):
            row = equations_P88[:, 2 * corner + axis]
            row[:, 3 * axis], row[:, 3 * axis + 1], row[:, 3 * axis + 2] = x_P, y_P, 1
            row[:, 6], row[:, 7] = -end_P * x_P, -end_P * y_P
            wanted_P8[:, 2 * corner + axis] = end_P
    try:
        solved = torch.linalg.lstsq(
            torch.from_numpy(equations_P88), torch.from_numpy(wanted_P8)[:, :, None], driver="gels"
        )
    except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
        p = int(np.linalg.matrix_rank(equations_P88).argmin())
        raise ValueError(
            f"RandomPerspective drew corners of sample {index_P[p]}, {height_P[p]} x {width_P[p]} px, that lie on a "
            "line, as torchvision's does of small images. Use larger ones or a smaller distortion_scale."
        ) from cause
    coefficients_P8: Float64s = solved.solution[:, :, 0].float().double().numpy()
    return coefficients_P8
