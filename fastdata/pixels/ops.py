"""The steps of a transform as values, and the table that they are compiled to.

An op is a record of core/core.h: what its numbers mean, what it draws, and what it does to pixels
stand there and in the C files. Nothing here draws or touches a pixel.

Shape letters: B batch, S ops of a sample, k perspectives of a sample, P perspectives of a batch.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdata.errors import ChannelsError, counted
from fastdata.pixels import core
from fastdata.pixels.images import pillow_chooses_order

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
    magnitudes for a height and a width.
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
            Op("STEP_NORMALIZE", at, (len(mean), widens)) for mean, _, widens in self.normalizations
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


def sequence(ops: Iterable[Op], *v: float) -> Op:
    return Op("STEP_SEQUENCE", v=v, children=tuple(ops))


def maybe(at: int, ops: Iterable[Op], p: float) -> Op:
    """Ops with a probability."""
    return Op("STEP_CHOICE", at, children=(sequence(ops, float(p)),))


def choice(
    at: int, sequences: Sequence[Iterable[Op]], weights: Any = None, code: str = "STEP_CHOICE"
) -> Op:
    """One of several sequences of ops; of each is told where in [0, 1) its share ends."""
    weights = [1.0] * len(sequences) if weights is None else weights
    ends = np.cumsum(np.array(weights, np.float64))
    shares = (ends / ends[-1]).tolist()
    return Op(code, at, children=tuple(map(sequence, sequences, shares)))


def in_order(at: int, sequences: Iterable[Iterable[Op]]) -> Op:
    """Several sequences of ops in random order."""
    return Op("STEP_ORDER", at, children=tuple(map(sequence, sequences)))


class Table:
    """Ops compiled for the core, safe from several threads at once."""

    def __init__(self, ops: tuple[Op, ...]) -> None:
        self._ops = [sequence(ops)]
        for op in self._ops:  # which grows as it is walked
            self._ops.extend(op.children)
        self._steps = _records(self._ops)
        domains = {op.n[2] for op in self._ops if len(op.n) > 2}
        self._fuses = not domains.isdisjoint(("V1_DOMAIN", "V2_DOMAIN")) and _torch_fuses()
        self._levels: dict[tuple[int, int, int], Float64s] = {}
        self.has_perspectives = "OP_PERSPECTIVE" in {op.code for op in self._ops}
        self.record = self._compile(self._levels)

    def _compile(self, levels: dict[tuple[int, int, int], Float64s]) -> core.Table:
        records = [(*of, table.size, table.ctypes.data) for of, table in levels.items()]
        compiled = core.make_table(
            self._steps,
            np.array(records, core.LEVELS),
            fuses=self._fuses,
            resizes_fast=_torch_resizes_fast(),
            chooses_order=pillow_chooses_order(),
        )
        compiled.kept += tuple(levels.values())
        return compiled

    def draw(
        self, keys: core.Keys, shapes_B3: Int32s, *, is_probe: bool = False
    ) -> tuple[npt.NDArray[Any], Int32s]:
        """What is done to samples of these shapes, ``core.OP`` (B, S), and shapes behind that.

        A probe is as of ``core.draw``.

        Raises:
            ValueError: a step is not for such a sample.
        """
        while True:
            try:
                return core.draw(self.record, keys, shapes_B3, is_probe=is_probe)
            except core.CoreError as refused:
                b = refused.place
                self.answer(refused, int(keys.indices[b]), shapes_B3[b])

    def solve(self, keys: core.Keys, shapes_B3: Int32s) -> Float64s:
        """Coefficients of the perspectives of samples (B, k, 8).

        Raises:
            ValueError: corners of a sample lie on a line.
        """
        ops_BS, _ = self.draw(keys, shapes_B3)
        is_warp_BS = ops_BS["code"] == core.constants()["OP_PERSPECTIVE"]
        place_P, _ = np.nonzero(is_warp_BS)
        number_P = (np.cumsum(is_warp_BS, axis=1) - 1)[is_warp_BS]
        most = number_P.max(initial=0) + 1
        solved_Bk8 = np.zeros((len(ops_BS), most, 8))
        solved_Bk8[place_P, number_P] = _solve_perspectives(
            ops_BS[is_warp_BS], keys.indices[place_P]
        )
        return solved_Bk8

    def answer(self, refused: core.CoreError, index: int, shape: Sequence[int]) -> None:
        """Give what the core lacked, magnitudes for a size, so that it can be called again.

        Raises:
            ValueError: it refused a sample of this shape.
        """
        op = self._ops[refused.step]
        if refused.reason != "NEEDS_LEVELS":
            raise _refusal(op, refused, index, shape) from None
        height, width = refused.numbers[:2]
        known = self._levels if len(self._levels) < _MOST_LEVELS else {}
        known = {**known, (refused.step, height, width): op.about(height, width)}
        self.record = self._compile(known)  # calls that run have the one before
        self._levels = known


def _records(ops: Sequence[Op]) -> npt.NDArray[Any]:
    """``STEP`` of each; children follow one another."""
    numbers = core.constants()
    records = np.zeros(len(ops), core.STEP)
    first = 1
    for record, op in zip(records, ops, strict=True):
        record["code"] = numbers[op.code]
        record["at"] = op.at
        record["first"] = first
        record["count"] = len(op.children)
        record["fills"] = len(op.fill)
        record["n"][: len(op.n)] = [numbers[n] if isinstance(n, str) else n for n in op.n]
        record["v"][: len(op.v)] = op.v
        record["fill"] = np.resize(op.fill, 4)
        first += len(op.children)
    return records


# What is wrong with a sample

_REFUSALS = {
    "REFUSED_CROP": (
        "Required crop size ({n[0]}, {n[1]}) is larger than input image size ({n[2]}, {n[3]}) of "
        "sample {index}. Use pad_if_needed=True, a smaller crop, or a Resize before it."
    ),
    "REFUSED_BORDER": (
        "padding ({n[0]}, {n[1]}, {n[2]}, {n[3]}) (left, top, right, bottom) in mode {mode!r} is "
        "too large for the image size ({n[4]}, {n[5]}) of sample {index}. Use padding_mode='edge' "
        "or a smaller padding."
    ),
    "REFUSED_BLUR": (
        "GaussianBlur with kernel_size=({op.n[0]}, {op.n[1]}) needs images of more than "
        "{half[1]} x {half[0]} px (height x width), but sample {index} has {n[0]} x {n[1]}. "
        "Use a smaller kernel or a larger resize."
    ),
    "REFUSED_OUTSIDE": "a step would leave no pixel of it",
    "REFUSED_OP": "a step is not for its number of channels",
}


def _refusal(op: Op, refused: core.CoreError, index: int, shape: Sequence[int]) -> ValueError:
    """What is wrong with a sample of this shape, for its user."""
    words: dict[str, Any] = {"op": op, "n": refused.numbers, "index": index}
    if refused.reason == "REFUSED_CHANNELS":
        return _wrong_channels(op, refused.numbers[0], index)
    if refused.reason == "REFUSED_BORDER":
        words["mode"] = str(op.n[4]).removeprefix("PAD_").lower()
    if refused.reason == "REFUSED_BLUR":
        words["half"] = [int(side) // 2 for side in op.n[:2]]
    text = _REFUSALS.get(refused.reason, "{op.code} asks for more than the core has room for")
    text = text.format(**words)
    if not text.endswith("."):
        stored = tuple(map(int, shape))
        text = (
            f"sample {index}, of shape {stored}, cannot be served: {text}. Use batch_ops=False, or "
            "leave it out."
        )
    return ValueError(text)


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


# What the pixels of this machine depend on


@functools.cache
def _torch_fuses() -> bool:
    """Whether torch's product of large matrices rounds once for a product and its addition.

    MKL does on some CPUs.

    (1 + 2**-12)**2 - (1 + 2**-11) is 2**-24, and 0 where the square is rounded first.
    """
    row = torch.tensor([-1 - 2**-11, 1 + 2**-12, 1.0])
    column = torch.tensor([[1.0], [1 + 2**-12], [0.0]]).expand(1, 3, 2)
    return bool(row.expand(1, _FUSED_ROWS, 3).bmm(column).any())


def _torch_resizes_fast() -> bool:
    """Whether torch has a fast kernel for uint8; v2 takes float32 where it has not."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    return is_arm or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def _solve_perspectives(warps_P: npt.NDArray[Any], index_P: Int64s) -> Float64s:
    """``_get_perspective_coeffs`` of torchvision's transforms/functional.py, all in one call.

    Another solver's last bits move pixels, as what it gives is rounded to float32.
    """
    size_P2 = warps_P["n"][:, 1::-1]  # width, height
    drawn_P42 = warps_P["v"][:, :8].reshape(-1, 4, 2)
    ends_P42 = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * (size_P2[:, None] - 1.0)
    # Of each corner an equation for x and one for y.
    equations_P428 = np.zeros((len(warps_P), 4, 2, 8))
    for axis in range(2):
        equations_P428[:, :, axis, 3 * axis : 3 * axis + 3] = np.insert(drawn_P42, 2, 1, axis=2)
    equations_P428[..., 6:] = -ends_P42[..., None] * drawn_P42[:, :, None]
    equations_P88 = equations_P428.reshape(-1, 8, 8)
    try:
        solved = torch.linalg.lstsq(
            torch.from_numpy(equations_P88),
            torch.from_numpy(ends_P42.reshape(-1, 8, 1)),
            driver="gels",
        )
    except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
        p = int(np.linalg.matrix_rank(equations_P88).argmin())
        width, height = size_P2[p]
        raise ValueError(
            f"RandomPerspective drew corners of sample {index_P[p]}, {height} x {width} px, that "
            "lie on a line, as torchvision's does of small images. Use larger ones or a smaller "
            "distortion_scale."
        ) from cause
    coefficients_P8: Float64s = solved.solution[:, :, 0].float().double().numpy()
    return coefficients_P8
