"""Automatic augmentation: the policies of torchvision (RandAugment, TrivialAugmentWide, AutoAugment, AugMix) and timm.

The tables of magnitudes are those of the user's own step, asked for each size of image; none is repeated here.

Shape letters: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.core import Code
from fastdata.transforms.ops import INTERPOLATIONS, Domain, Drawing, Flags, Op, child
from fastdata.transforms.warps import add_affine, add_matrix, add_rotation, as_python

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

_FACTORS = {
    "Brightness": Code.BRIGHTNESS,
    "Color": Code.SATURATION,
    "Contrast": Code.CONTRAST,
    "Sharpness": Code.SHARPNESS,
}
_PLAIN = {"AutoContrast": Code.AUTOCONTRAST, "Equalize": Code.EQUALIZE, "Invert": Code.INVERT}
_CODES = {**_FACTORS, **_PLAIN, "Posterize": Code.POSTERIZE, "Solarize": Code.SOLARIZE}
_WARPS = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_GAMMA_TRIES = 8
_AUTO_BINS = 10


@dataclass(frozen=True, slots=True)
class Table:
    """What a step of torchvision chooses from, for one size of image.

    Attributes:
        names: of the ops.
        levels: magnitudes (N, bins), 0 where an op has none.
        signed: (N,), whether an op takes a sign.
    """

    names: tuple[str, ...]
    levels: Float64s
    signed: Flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Augment(Op):
    """torchvision's RandAugment, TrivialAugmentWide or AutoAugment.

    Attributes:
        step: the user's own, for its tables.
    """

    step: Any
    domain: Domain
    interpolation: str
    fill: tuple[float, ...] | None
    tables: dict[tuple[int, int], Table] = field(default_factory=dict, compare=False, repr=False)

    def draw(self, drawing: Drawing) -> None:
        policies = getattr(self.step, "policies", None) or getattr(self.step, "_policies", None)
        if policies:
            self._draw_policy(drawing, policies)
            return
        bins, fixed = self.step.num_magnitude_bins, getattr(self.step, "magnitude", None)
        for layer in range(getattr(self.step, "num_ops", 1)):
            bin_B = drawing.integers(self.position, 4 * layer + 1, bins) if fixed is None else np.array(fixed)
            self._draw_one(drawing, self.position, 4 * layer, bins, np.broadcast_to(bin_B, drawing.keys_B.shape))

    def _draw_one(self, drawing: Drawing, position: int, first: int, bins: int, bin_B: Int64s) -> None:
        """One op of all, each equally likely."""
        negative_B = drawing.uniform(position, first + 2) < 0.5
        for table, where_B in self._tables(drawing, bins):
            which_B = drawing.integers(position, first, len(table.names))
            self._add(drawing, table, which_B, table.levels[which_B, bin_B], negative_B, where_B)

    def _draw_policy(self, drawing: Drawing, policies: Any) -> None:
        policy_B = drawing.integers(self.position, 0, len(policies))
        for place in range(2):
            does_B = drawing.uniform(self.position, 1 + 2 * place)
            negative_B = drawing.uniform(self.position, 2 + 2 * place) < 0.5
            for table, where_B in self._tables(drawing, _AUTO_BINS):
                ops = [policy[place] for policy in policies]
                which_B = np.array([table.names.index(name) for name, *_ in ops])[policy_B]
                level_B = np.array([0 if level is None else level for *_, level in ops])[policy_B]
                chosen_B = where_B & (does_B < np.array([p for _, p, _ in ops])[policy_B])
                self._add(drawing, table, which_B, table.levels[which_B, level_B], negative_B, chosen_B)

    def _tables(self, drawing: Drawing, bins: int) -> Iterator[tuple[Table, Flags]]:
        """The step's table for every size of image, and which samples have it."""
        sizes_B = drawing.height_B << 32 | drawing.width_B
        for both in np.unique(sizes_B).tolist():
            size = both >> 32, both & 0xFFFFFFFF
            if size not in self.tables:
                self.tables[size] = self._table(bins, *size)
            yield self.tables[size], sizes_B == both

    def _table(self, bins: int, height: int, width: int) -> Table:
        step = self.step
        if hasattr(step, "_AUGMENTATION_SPACE"):  # v2
            every = getattr(step, "all_ops", True)
            space = step._AUGMENTATION_SPACE if every else step._PARTIAL_AUGMENTATION_SPACE
            drawn = {name: (function(bins, height, width), signed) for name, (function, signed) in space.items()}
        elif hasattr(step, "magnitude") or hasattr(step, "policies") or hasattr(step, "severity"):
            drawn = step._augmentation_space(bins, (height, width))
        else:
            drawn = step._augmentation_space(bins)
        unknown = [name for name in drawn if name not in _CODES and name not in _WARPS]
        if unknown:
            raise ValueError(
                f"{type(step).__name__} has the op {unknown[0]!r}, which is not known. Use batch_ops='off'."
            )
        levels = np.zeros((len(drawn), bins))
        for row, (values, _) in zip(levels, drawn.values(), strict=True):
            row[:] = 0.0 if values is None else values.double().numpy()
        return Table(tuple(drawn), levels, np.array([signed for _, signed in drawn.values()]))

    def _add(
        self,
        drawing: Drawing,
        table: Table,
        which_B: Int64s,
        level_B: Float64s,
        negative_B: Flags,
        chosen_B: Flags,
    ) -> None:
        """``_apply_op`` of torchvision's transforms/autoaugment.py."""
        level_B = np.where(table.signed[which_B] & negative_B, -level_B, level_B)
        rest: dict[str, Any] = {"interpolation": self.interpolation, "fill": self.fill, "domain": self.domain}

        def of(*names: str) -> Flags:
            return np.array([name in names for name in table.names])[which_B]

        code_B = np.array([int(_CODES.get(name, 0)) for name in table.names])[which_B]
        bound = 255.0 if hasattr(self.step, "_AUGMENTATION_SPACE") else 1.0
        threshold_B = level_B * bound
        if self.domain != "pil":
            threshold_B = threshold_B.astype(np.float32)  # as torch compares it with uint8
        value_B = np.where(of("Solarize"), threshold_B, 1.0 + level_B)
        sheared_B, moved_B = of("ShearX", "ShearY"), of("TranslateX", "TranslateY")
        with drawing.one_column():
            with drawing.only(chosen_B & (code_B > 0)):
                drawing.add(code_B, {0: level_B.astype(np.int64)}, {0: value_B}, self.domain)
            with drawing.only(chosen_B & (sheared_B | moved_B)):
                if not drawing.is_idle:
                    angle_B = np.degrees(as_python(math.atan, level_B)) * sheared_B
                    pixels_B = np.trunc(level_B) * moved_B
                    is_x_B = of("ShearX", "TranslateX")
                    shear = (np.where(is_x_B, angle_B, 0.0), np.where(is_x_B, 0.0, angle_B))
                    move = (np.where(is_x_B, pixels_B, 0.0), np.where(is_x_B, 0.0, pixels_B))
                    # A translation is the same about any centre.
                    add_affine(drawing, np.zeros_like(level_B), move, shear=shear, center=(0.0, 0.0), **rest)
            with drawing.only(chosen_B & of("Rotate")):
                if not drawing.is_idle:
                    add_rotation(drawing, level_B, **rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class AugMix(Augment):
    """torchvision's AugMix: a weighted sum of the image and of chains of ops over it."""

    def draw(self, drawing: Drawing) -> None:
        step = self.step
        kept_B2 = self._dirichlet(drawing, 0, 2)
        share_BW = self._dirichlet(drawing, 100, step.mixture_width) * kept_B2[:, 1:]
        drawing.add(Code.MIX_BEGIN, v={0: kept_B2[:, 0]})
        for chain in range(step.mixture_width):
            at = child(self.position, chain)
            depth_B = drawing.integers(at, 0, 3) + 1
            for depth in range(step.chain_depth if step.chain_depth > 0 else 3):
                first = 4 * (depth + 1)
                with drawing.only((depth < depth_B) | (step.chain_depth > 0)):
                    self._draw_one(drawing, at, first, _AUTO_BINS, drawing.integers(at, first + 1, step.severity))
            drawing.add(Code.MIX_ADD, v={0: share_BW[:, chain]})
        drawing.add(Code.MIX_END)

    def _dirichlet(self, drawing: Drawing, first: int, count: int) -> Float64s:
        draws = 4 * _GAMMA_TRIES
        gammas = [_draw_gamma(drawing, self.position, first + draws * k, self.step.alpha) for k in range(count)]
        gamma_BK = np.stack(gammas, axis=1)
        share_BK: Float64s = gamma_BK / gamma_BK.sum(axis=1, keepdims=True)
        return share_BK


def _draw_gamma(drawing: Drawing, position: int, first: int, alpha: float) -> Float64s:
    """Gamma(alpha) by G. Marsaglia and W. Tsang, "A simple method for generating gamma variables", 2000."""
    d = max(alpha, alpha + 1 if alpha < 1 else alpha) - 1 / 3
    result_B = np.full(len(drawing.keys_B), d)
    pending_B = np.ones(len(drawing.keys_B), bool)
    for draw in range(first, first + 4 * _GAMMA_TRIES - 4, 4):
        normal_B = drawing.normal(position, draw)
        cube_B = np.maximum(1 + normal_B / np.sqrt(9 * d), 0.0) ** 3
        with np.errstate(divide="ignore"):
            bound_B = normal_B**2 / 2 + d - d * cube_B + d * np.log(cube_B)
            accepted_B = pending_B & (cube_B > 0) & (np.log(1 - drawing.uniform(position, draw + 2)) < bound_B)
        result_B = np.where(accepted_B, d * cube_B, result_B)
        pending_B &= ~accepted_B
    if alpha < 1:
        result_B = result_B * (1 - drawing.uniform(position, first + 4 * _GAMMA_TRIES - 4)) ** (1 / alpha)
    return result_B


@dataclass(frozen=True, kw_only=True, slots=True)
class TimmOp(Op):
    """One ``AugmentOp`` of timm's data/auto_augment.py, on PIL images.

    Attributes:
        name: as timm's.
        p: how often.
        magnitude: its mean.
        deviation: of the magnitude, normal; infinite: it is uniform between 0 and ``magnitude``.
        most: bound of the magnitude.
        fill: colour of what comes in from outside.
        interpolations: numbers of the core, one of which is drawn.
        translate: most pixels, or share of the image, that a translation moves by.
    """

    name: str
    p: float
    magnitude: float
    deviation: float
    most: float
    fill: tuple[float, ...]
    interpolations: tuple[int, ...]
    translate: float

    @staticmethod
    def read(op: Any, position: int) -> TimmOp:
        """Take what an ``AugmentOp`` says.

        Raises:
            ValueError: its name is not known.
        """
        base = op.name.removesuffix("Increasing").removesuffix("Original").removesuffix("Rel")
        if base not in _TIMM_NAMES:
            raise ValueError(f"the op {op.name!r} is not known")
        hparams, resample = op.hparams, op.kwargs["resample"]
        several = resample if isinstance(resample, (list, tuple)) else (resample,)
        names = ("nearest", "lanczos", "bilinear", "bicubic")
        fill = op.kwargs["fillcolor"]
        is_relative = op.name.endswith("Rel")
        return TimmOp(
            position=position,
            name=op.name,
            p=float(op.prob),
            magnitude=float(op.magnitude),
            deviation=float(op.magnitude_std),
            most=float(op.magnitude_max or 10.0),
            fill=tuple(map(float, fill if isinstance(fill, (list, tuple)) else (fill,))),
            interpolations=tuple(INTERPOLATIONS.index(names[int(mode)]) for mode in several),
            translate=float(hparams.get("translate_pct", 0.45) if is_relative else hparams.get("translate_const", 250)),
        )

    def draw(self, drawing: Drawing) -> None:
        at = self.position
        with drawing.only(drawing.uniform(at, 0) < self.p):
            if drawing.is_idle:
                return
            level_B = np.full(len(drawing.keys_B), self.magnitude)
            if self.deviation == float("inf"):
                level_B = drawing.uniform(at, 1, 0.0, self.magnitude)
            elif self.deviation > 0:
                level_B = self.magnitude + self.deviation * drawing.normal(at, 1)
            level_B = np.clip(level_B, 0.0, self.most) / 10.0
            self._add(drawing, level_B, np.where(drawing.uniform(at, 3) > 0.5, -level_B, level_B))

    def _add(self, drawing: Drawing, level_B: Float64s, signed_B: Float64s) -> None:
        """``LEVEL_TO_ARG`` and ``NAME_TO_OP``; ``level_B`` is a share of 10."""
        name, base = self.name, self.name.removesuffix("Increasing").removesuffix("Original")
        is_increasing = name.endswith("Increasing")
        if base in _PLAIN:
            drawing.add(_PLAIN[base])
        elif base in _FACTORS:
            factor_B = np.maximum(0.1, 1.0 + signed_B * 0.9) if is_increasing else level_B * 1.8 + 0.1
            drawing.add(_FACTORS[base], v={0: factor_B})
        elif base == "Desaturate":
            strength_B = np.clip(0.5 + 0.5 * level_B, 0.5, 1.0)
            drawing.add(Code.SATURATION, v={0: np.clip(1.0 - strength_B, 0.0, 1.0)})
        elif base == "Posterize":
            bits_B = (level_B * 4).astype(np.int64)
            bits_B = 4 - bits_B if is_increasing else bits_B + 4 * name.endswith("Original")
            drawing.add(Code.POSTERIZE, {0: np.minimum(bits_B, 8)})
        elif base == "Solarize":
            threshold_B = np.minimum(256, (level_B * 256).astype(np.int64))
            drawing.add(Code.SOLARIZE, v={0: 256 - threshold_B if is_increasing else threshold_B})
        elif base == "SolarizeAdd":
            drawing.add(Code.SOLARIZE_ADD, {0: np.minimum(128, (level_B * 110).astype(np.int64)), 1: 128})
        elif base.startswith("GaussianBlur"):
            radius_B = np.clip(0.1 + 1.9 * level_B, 0.1, 2.0)
            if base == "GaussianBlurRand":
                radius_B = drawing.uniform(self.position, 5, 0.1, 2.0 * np.clip(level_B, 0.0, 1.0))
            drawing.add(Code.BOX_BLUR, v={0: radius_B})
        else:
            which_B = drawing.integers(self.position, 4, len(self.interpolations))
            self._warp(drawing, signed_B, np.array(self.interpolations)[which_B])

    def _warp(self, drawing: Drawing, signed_B: Float64s, interpolation_B: npt.NDArray[np.int64]) -> None:
        if self.name == "Rotate":
            add_rotation(drawing, signed_B * 30.0, interpolation=interpolation_B, fill=self.fill, domain="pil")
            return
        matrix_B6 = np.zeros((len(signed_B), 6))
        matrix_B6[:, (0, 4)] = 1.0
        is_relative = self.name.endswith("Rel")
        if self.name == "ShearX":
            matrix_B6[:, 1] = signed_B * 0.3
        elif self.name == "ShearY":
            matrix_B6[:, 3] = signed_B * 0.3
        elif self.name.startswith("TranslateX"):
            matrix_B6[:, 2] = signed_B * self.translate * (drawing.width_B if is_relative else 1)
        else:
            matrix_B6[:, 5] = signed_B * self.translate * (drawing.height_B if is_relative else 1)
        add_matrix(drawing, matrix_B6, interpolation=interpolation_B, fill=self.fill, domain="pil")


_TIMM_NAMES = {
    *_FACTORS,
    *_PLAIN,
    *("Desaturate", "Posterize", "Solarize", "SolarizeAdd", "GaussianBlur", "GaussianBlurRand"),
    *("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"),
}
