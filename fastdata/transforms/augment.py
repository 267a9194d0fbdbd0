"""Warps, and what draws among them and colours: the policies of torchvision (RandAugment, AugMix and others) and timm.

A warp is for each sample the matrix from the image wanted to the one there is. The tables of magnitudes are those of
the user's own step, asked for each size of image; none is repeated here.

Shape letters: B batch, N ops to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.core import Code
from fastdata.draws import draw_uniform
from fastdata.transforms.ops import INTERPOLATIONS, Domain, Drawing, Fill, Flags, Float64s, Int64s, child

Center = tuple[float, float] | None
Pair = tuple[Any, Any]
_PILLOW_PLACES = 15
"""To which Image.rotate rounds sine and cosine."""
_FACTORS = {
    "Brightness": Code.BRIGHTNESS,
    "Color": Code.SATURATION,
    "Contrast": Code.CONTRAST,
    "Sharpness": Code.SHARPNESS,
}
_PLAIN = {"AutoContrast": Code.AUTOCONTRAST, "Equalize": Code.EQUALIZE, "Invert": Code.INVERT}
_CODES = {**_FACTORS, **_PLAIN, "Posterize": Code.POSTERIZE, "Solarize": Code.SOLARIZE}
_WARPS = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_TIMM_CODES = {**_CODES, "Desaturate": Code.SATURATION, "SolarizeAdd": Code.SOLARIZE_ADD}
_TIMM_CODES |= dict.fromkeys(("GaussianBlur", "GaussianBlurRand"), Code.BOX_BLUR)
_FUSED_ROWS = 1 << 10
_GAMMA_TRIES = 8
_AUTO_BINS = 10


# Warps


def draw_rotation(drawing: Drawing, at: int, degrees: Pair, **warp: Any) -> None:
    add_rotation(drawing, drawing.uniform(at, 0, *degrees), **warp)


def draw_affine(
    drawing: Drawing, at: int, degrees: Pair, translate: Pair, scale: Pair, shear: Sequence[Pair], **warp: Any
) -> None:
    """RandomAffine; ``translate`` in shares of the width and height, ``shear`` in degrees along x and y."""
    angle_B, scale_B = drawing.uniform(at, 0, *degrees), drawing.uniform(at, 3, *scale)
    most_x, most_y = translate[0] * drawing.width_B, translate[1] * drawing.height_B
    moved = np.rint(drawing.uniform(at, 1, -most_x, most_x)), np.rint(drawing.uniform(at, 2, -most_y, most_y))
    sheared = drawing.uniform(at, 4, *shear[0]), drawing.uniform(at, 5, *shear[1])
    add_affine(drawing, angle_B, moved, scale_B, sheared, **warp)


def draw_perspective(drawing: Drawing, at: int, distortion: float, **warp: Any) -> None:
    """RandomPerspective; ``distortion`` is the share of half a side that a corner moves by."""
    height_B, width_B = drawing.height_B, drawing.width_B
    reach_v = (distortion * (height_B // 2)).astype(np.int64) + 1
    reach_h = (distortion * (width_B // 2)).astype(np.int64) + 1
    moved = (draw_uniform(drawing.keys_B, at, range(8)) * ([reach_h, reach_v] * 4)).astype(np.int64)
    corners = []  # top left, top right, bottom right, bottom left
    for number, (right, bottom) in enumerate(((False, False), (True, False), (True, True), (False, True))):
        x_B, y_B = moved[2 * number : 2 * number + 2]
        corners.append((x_B + right * (width_B - reach_h), y_B + bottom * (height_B - reach_v)))
    add_matrix(drawing, _perspective(drawing, corners), **warp)


def add_matrix(
    drawing: Drawing, matrix_BN: Float64s, *, interpolation: Any, fill: Fill | None, domain: Domain, size: Any = None
) -> None:
    """Add a map by its 6 numbers, or 8 of a perspective, as Image.transform, _affine_grid, _perspective_grid take them.

    ``interpolation`` is a name, or numbers of the core (B,); ``fill`` None: black, and for tensors blended with it at
    the edge; ``size`` (h, w) None: it stays.
    """
    height, width = size or (drawing.height_B, drawing.width_B)
    which = INTERPOLATIONS.index(interpolation) if isinstance(interpolation, str) else interpolation
    code = Code.AFFINE if matrix_BN.shape[1] == 6 else Code.PERSPECTIVE
    fuses = domain != "pil" and _torch_fuses()
    drawing.add(code, (height, width, fuses, 0, 0, 0, which, fill is not None), matrix_BN.T, domain, fill or (0,))
    if size is not None:
        drawing.resized(height, width, is_drawn=True)


@cache
def _torch_fuses() -> bool:
    """Whether torch's product of large matrices rounds a multiplication and an addition as one, as MKL on some CPUs.

    (1 + 2**-12)**2 - (1 + 2**-11) is 2**-24, and 0 where the square is rounded first.
    """
    row = torch.tensor([-1 - 2**-11, 1 + 2**-12, 1.0])
    column = torch.tensor([[1.0], [1 + 2**-12], [0.0]]).expand(1, 3, 2)
    return bool(row.expand(1, _FUSED_ROWS, 3).bmm(column).any())


def add_affine(
    drawing: Drawing,
    angle_B: Any,
    translate: Pair,
    scale: Any,
    shear: Pair,
    *,
    is_v2: bool,
    center: Center = None,
    **warp: Any,
) -> None:
    """``_get_inverse_affine_matrix`` of torchvision's v1 or v2: one matrix, rounded in another order."""
    middle: Pair = (drawing.width_B * 0.5, drawing.height_B * 0.5)
    cx, cy = middle
    if warp["domain"] != "pil":  # tensors: from the centre of the image
        cx, cy = (0.0, 0.0) if center is None else (center[0] - middle[0], center[1] - middle[1])
    elif center is not None:
        cx, cy = center
    rotation, sx, sy = np.radians(angle_B), np.radians(shear[0]), np.radians(shear[1])
    (tx, ty), turned = translate, rotation - sy
    cosine, sine = partial(as_python, math.cos), partial(as_python, math.sin)
    tangent, squeezed = as_python(math.tan, sx), cosine(sy)
    a = cosine(turned) / squeezed
    c = sine(turned) / squeezed
    if is_v2:
        b = -(a * tangent + sine(rotation))
        d = cosine(rotation) - c * tangent
    else:
        b = -cosine(turned) * tangent / squeezed - sine(rotation)
        d = -sine(turned) * tangent / squeezed + cosine(rotation)
    matrix = [d / scale, -b / scale, -c / scale, a / scale]
    if is_v2:
        x = cx - matrix[0] * (cx + tx) - matrix[1] * (cy + ty)
        y = cy - matrix[2] * (cx + tx) - matrix[3] * (cy + ty)
    else:
        x = matrix[0] * (-cx - tx) + matrix[1] * (-cy - ty) + cx
        y = matrix[2] * (-cx - tx) + matrix[3] * (-cy - ty) + cy
    rows = np.broadcast_arrays(matrix[0], matrix[1], x, matrix[2], matrix[3], y)
    add_matrix(drawing, np.stack(rows, axis=1), **warp)


def add_rotation(
    drawing: Drawing,
    angle_B: Float64s,
    *,
    expand: bool = False,
    center: Center = None,
    is_v2: bool = False,
    **warp: Any,
) -> None:
    if warp["domain"] != "pil":
        moved: dict[str, Any] = {
            "translate": (0.0, 0.0),
            "scale": 1.0,
            "shear": (0.0, 0.0),
            "is_v2": is_v2,
            "center": center,
        }
        turned_B = angle_B % 360 != 0
        drawing.each((turned_B, lambda part: add_affine(part, -part.of(angle_B), **moved, **warp)))
        return
    which_B = warp.pop("interpolation")
    angle_B = np.asarray(angle_B) % 360.0
    is_square_B = (drawing.height_B == drawing.width_B) | expand
    quarters_B = np.where((angle_B % 180 == 0) | ((angle_B % 90 == 0) & is_square_B), angle_B // 90, 4)
    quarters_B = quarters_B if center is None else np.full_like(angle_B, 4)

    def turn(part: Drawing, quarters: int) -> None:
        part.add(Code.TURN, [quarters])
        if expand and quarters != 2:
            part.resized(part.width_B, part.height_B)

    def rotate(part: Drawing) -> None:
        matrix_B6, size = _pillow_rotation(part.of(angle_B), part.height_B, part.width_B, expand, center)
        interpolation = which_B if isinstance(which_B, str) else part.of(which_B)
        add_matrix(part, matrix_B6, size=size, interpolation=interpolation, **warp)

    turns = [(quarters_B == k, partial(turn, quarters=k)) for k in (1, 2, 3)]
    drawing.each(*turns, (quarters_B == 4, rotate))


def _pillow_rotation(
    angle_B: Float64s, height_B: Any, width_B: Any, expand: bool, center: Center
) -> tuple[Float64s, Pair | None]:
    """``Image.rotate`` of Pillow's Image.py: the matrix, and the size if it expands."""
    radians_B = -np.radians(angle_B)
    cosine_B, sine_B = (
        np.array([round(value, _PILLOW_PLACES) for value in as_python(function, radians_B).tolist()])
        for function in (math.cos, math.sin)
    )
    cx, cy = (width_B / 2, height_B / 2) if center is None else center
    x_B = cosine_B * -cx + sine_B * -cy + 0.0 + cx
    y_B = -sine_B * -cx + cosine_B * -cy + 0.0 + cy
    size = None
    if expand:
        corners = [(0.0, 0.0), (width_B, 0.0), (width_B, height_B), (0.0, height_B)]
        xs = np.stack([cosine_B * x + sine_B * y + x_B for x, y in corners])
        ys = np.stack([-sine_B * x + cosine_B * y + y_B for x, y in corners])
        wide_B, high_B = (np.ceil(each.max(axis=0)) - np.floor(each.min(axis=0)) for each in (xs, ys))
        dx, dy = -(wide_B - width_B) / 2.0, -(high_B - height_B) / 2.0
        x_B, y_B = cosine_B * dx + sine_B * dy + x_B, -sine_B * dx + cosine_B * dy + y_B
        size = high_B.astype(np.int64), wide_B.astype(np.int64)
    return np.stack([cosine_B, sine_B, x_B, -sine_B, cosine_B, y_B], axis=1), size


def as_python(function: Callable[[float], float], values: Any) -> Any:
    """Python's own functions, whose last bits may be others than NumPy's."""
    if isinstance(values, float):
        return function(values)
    return np.array([function(value) for value in values.tolist()])


def _perspective(drawing: Drawing, corners: list[Pair]) -> Float64s:
    """``_get_perspective_coeffs`` of torchvision's transforms/functional.py, by its solver, all samples in one call."""
    height_B, width_B = drawing.height_B, drawing.width_B
    zero_B, one_B = np.zeros(len(height_B)), np.ones(len(height_B))
    ends = ((zero_B, zero_B), (width_B - 1, zero_B), (width_B - 1, height_B - 1), (zero_B, height_B - 1))
    rows, wanted = [], []
    for (x, y), (to_x, to_y) in zip(corners, ends, strict=True):
        rows.append(np.stack([x, y, one_B, zero_B, zero_B, zero_B, -to_x * x, -to_x * y], axis=1))
        rows.append(np.stack([zero_B, zero_B, zero_B, x, y, one_B, -to_y * x, -to_y * y], axis=1))
        wanted += [to_x, to_y]
    equations_B88 = np.stack(rows, axis=1)
    if drawing.is_probe:
        return np.zeros((len(height_B), 8))
    try:
        # Torchvision's solver: another one's last bits move pixels, as what it gives is rounded to float32.
        solved = torch.linalg.lstsq(
            torch.from_numpy(equations_B88), torch.from_numpy(np.stack(wanted, axis=1))[:, :, None], driver="gels"
        )
    except torch.linalg.LinAlgError as cause:  # type: ignore[attr-defined]
        b = int(np.linalg.matrix_rank(equations_B88).argmin())
        raise ValueError(
            f"RandomPerspective drew corners of sample {drawing.index_B[b]}, {height_B[b]} x {width_B[b]} px, that lie "
            "on a line, as torchvision's does of small images. Use larger ones or a smaller distortion_scale."
        ) from cause
    coefficients_B8: Float64s = solved.solution[:, :, 0].float().double().numpy()
    return coefficients_B8


# Policies of torchvision


class Space:
    """What a step of torchvision, the user's own, chooses from, and how far: it depends on the size of the image.

    ``bins`` are the magnitudes of each op, ``warp`` what all its warps have in common.
    """

    def __init__(self, step: Any, warp: dict[str, Any]) -> None:
        self.step, self.warp = step, warp
        self.bins = getattr(step, "num_magnitude_bins", _AUTO_BINS)
        self._tables: dict[tuple[int, int], dict[str, tuple[Float64s, bool]]] = {}

    def table(self, height: int, width: int) -> dict[str, tuple[Float64s, bool]]:
        """Names of ops, the same for all sizes -> magnitudes (bins,), 0 where it has none, and if it takes a sign."""
        size, step, bins = (height, width), self.step, self.bins
        if size not in self._tables:
            if hasattr(step, "_AUGMENTATION_SPACE"):  # v2
                every = getattr(step, "all_ops", True)
                space = step._AUGMENTATION_SPACE if every else step._PARTIAL_AUGMENTATION_SPACE
                drawn = {name: (function(bins, height, width), signed) for name, (function, signed) in space.items()}
            elif hasattr(step, "magnitude") or hasattr(step, "policies") or hasattr(step, "severity"):
                drawn = step._augmentation_space(bins, size)
            else:
                drawn = step._augmentation_space(bins)
            unknown = [name for name in drawn if name not in _CODES and name not in _WARPS]
            if unknown:
                raise ValueError(
                    f"{type(step).__name__} has the op {unknown[0]!r}, which is not known. Use batch_ops='off'."
                )
            self._tables[size] = {
                name: (np.zeros(bins) + (0.0 if values is None else values.double().numpy()), bool(signed))
                for name, (values, signed) in drawn.items()
            }
        return self._tables[size]


def draw_augment(drawing: Drawing, at: int, space: Space) -> None:
    """RandAugment, TrivialAugmentWide or AutoAugment."""
    step = space.step
    policies = getattr(step, "policies", None) or getattr(step, "_policies", None)
    if policies:
        policy_B = drawing.integers(at, 0, len(policies))
        for place in range(2):
            names, p, bins = zip(*(policy[place] for policy in policies), strict=True)
            applied_B = drawing.uniform(at, 1 + 2 * place) < np.array(p)[policy_B]
            bin_B = np.array([bin or 0 for bin in bins])[policy_B]
            drawn = policy_B, bin_B, drawing.uniform(at, 2 + 2 * place) < 0.5
            _add(drawing, space, names, drawn, applied_B)
        return
    fixed = getattr(step, "magnitude", None)
    for first in range(0, 4 * getattr(step, "num_ops", 1), 4):
        bin_B = drawing.integers(at, first + 1, space.bins) if fixed is None else np.full(len(drawing.keys_B), fixed)
        _draw_one(drawing, at, first, space, bin_B, True)


def draw_aug_mix(drawing: Drawing, at: int, space: Space) -> None:
    """A weighted sum of the image and of chains of ops over it."""
    step = space.step
    kept_2B = draw_shares(drawing, at, 0, 2, step.alpha)
    share_WB = draw_shares(drawing, at, 100, step.mixture_width, step.alpha) * kept_2B[1]
    drawing.add(Code.MIX_BEGIN, v=[kept_2B[0]])
    for chain, share_B in enumerate(share_WB):
        here = child(at, chain)
        depth_B = drawing.integers(here, 0, 3) + 1
        for depth in range(step.chain_depth if step.chain_depth > 0 else 3):
            bin_B = drawing.integers(here, 4 * depth + 5, step.severity)
            _draw_one(drawing, here, 4 * depth + 4, space, bin_B, (depth < depth_B) | (step.chain_depth > 0))
        drawing.add(Code.MIX_ADD, v=[share_B])
    drawing.add(Code.MIX_END)


def draw_shares(drawing: Drawing, at: int, first: int, count: int, alpha: float) -> Float64s:
    """Draw from a Dirichlet distribution, (count, B)."""
    gamma_NB = np.stack([_draw_gamma(drawing, at, first + 4 * _GAMMA_TRIES * k, alpha) for k in range(count)])
    share_NB: Float64s = gamma_NB / gamma_NB.sum(axis=0)
    return share_NB


def _draw_gamma(drawing: Drawing, at: int, first: int, alpha: float) -> Float64s:
    """Gamma(alpha) by G. Marsaglia and W. Tsang, "A simple method for generating gamma variables", 2000."""
    d = max(alpha, alpha + 1 if alpha < 1 else alpha) - 1 / 3
    result_B = np.full(len(drawing.keys_B), d)
    pending_B = np.ones(len(drawing.keys_B), bool)
    for draw in range(first, first + 4 * _GAMMA_TRIES - 4, 4):
        normal_B = drawing.normal(at, draw)
        cube_B = np.maximum(1 + normal_B / np.sqrt(9 * d), 0.0) ** 3
        with np.errstate(divide="ignore"):
            bound_B = normal_B**2 / 2 + d - d * cube_B + d * np.log(cube_B)
            accepted_B = pending_B & (cube_B > 0) & (np.log(1 - drawing.uniform(at, draw + 2)) < bound_B)
        result_B = np.where(accepted_B, d * cube_B, result_B)
        pending_B &= ~accepted_B
    if alpha < 1:
        result_B = result_B * (1 - drawing.uniform(at, first + 4 * _GAMMA_TRIES - 4)) ** (1 / alpha)
    return result_B


def _draw_one(drawing: Drawing, at: int, first: int, space: Space, bin_B: Int64s, applied_B: Any) -> None:
    names = [*space.table(1, 1)]
    which_B, negative_B = drawing.integers(at, first, len(names)), drawing.uniform(at, first + 2) < 0.5
    _add(drawing, space, names, (which_B, bin_B, negative_B), applied_B)


def _add(
    drawing: Drawing, space: Space, names: Sequence[str], drawn: tuple[Int64s, Int64s, Flags], applied_B: Any
) -> None:
    """Where it is applied, one of the named ops; ``drawn`` are which, its magnitude, and whether that is negative."""
    which_B, bin_B, negative_B = drawn
    sizes, table_B = np.unique(drawing.height_B << 32 | drawing.width_B, return_inverse=True)
    tables = [space.table(size >> 32, size & 0xFFFFFFFF) for size in sizes.tolist()]
    level_B = np.array([[table[name][0] for name in names] for table in tables])[table_B, which_B, bin_B]
    signed_B = np.array([tables[0][name][1] for name in names])[which_B]
    level_B = np.where(signed_B & negative_B, -level_B, level_B)
    code_B = np.array([int(_CODES.get(name, 0)) for name in names])[which_B]
    warp = space.warp

    def of(*some: str) -> Any:
        return applied_B & np.array([name in some for name in names])[which_B]

    def change(part: Drawing) -> None:
        change_B, threshold_B = part.of(level_B), part.of(level_B)
        threshold_B = threshold_B * (255.0 if hasattr(space.step, "_AUGMENTATION_SPACE") else 1.0)
        if warp["domain"] != "pil":
            threshold_B = threshold_B.astype(np.float32)  # as torch compares it with uint8
        value_B = np.where(part.of(of("Solarize")), threshold_B, 1.0 + change_B)
        part.add(part.of(code_B), [change_B], [value_B], warp["domain"])

    def move(part: Drawing) -> None:
        amount_B, is_sheared_B, is_x_B = (part.of(each) for each in (level_B, shears_B, of("ShearX", "TranslateX")))
        angle_B = np.degrees(as_python(math.atan, amount_B)) * is_sheared_B
        pixels_B = np.trunc(amount_B) * ~is_sheared_B
        # A translation is the same about any centre.
        along = [(values_B * is_x_B, values_B * ~is_x_B) for values_B in (pixels_B, angle_B)]
        add_affine(part, np.zeros_like(amount_B), along[0], 1.0, along[1], center=(0.0, 0.0), **warp)

    shears_B = of("ShearX", "ShearY")
    drawing.each(
        (applied_B & (code_B > 0), change),
        (shears_B | of("TranslateX", "TranslateY"), move),
        (of("Rotate"), lambda part: add_rotation(part, part.of(level_B), **warp)),
    )


# Policies of timm


class TimmOp(NamedTuple):
    """One ``AugmentOp`` of timm's data/auto_augment.py, on PIL images."""

    name: str
    p: float
    magnitude: float  # its mean
    deviation: float  # of the magnitude, normal; infinite: it is uniform between 0 and ``magnitude``
    most: float  # bound of the magnitude
    fill: Fill
    interpolations: tuple[int, ...]  # numbers of the core, one of which is drawn
    translate: float  # most pixels, or share of the image, that a translation moves by


def read_timm_op(op: Any) -> TimmOp:
    """Take what an ``AugmentOp`` says.

    Raises:
        ValueError: its name is not known.
    """
    is_relative = op.name.endswith("Rel")
    base = op.name.removesuffix("Increasing").removesuffix("Original").removesuffix("Rel")
    if base not in _TIMM_CODES and base not in _WARPS[1:]:
        raise ValueError(f"the op {op.name!r} is not known")
    resample, fill = op.kwargs["resample"], op.kwargs["fillcolor"]
    several = resample if isinstance(resample, (list, tuple)) else (resample,)
    names = ("nearest", "lanczos", "bilinear", "bicubic")
    return TimmOp(
        op.name,
        float(op.prob),
        float(op.magnitude),
        float(op.magnitude_std),
        float(op.magnitude_max or 10.0),
        tuple(map(float, fill if isinstance(fill, (list, tuple)) else (fill,))),
        tuple(INTERPOLATIONS.index(names[int(mode)]) for mode in several),
        float(op.hparams.get(*(("translate_pct", 0.45) if is_relative else ("translate_const", 250)))),
    )


def draw_timm(drawing: Drawing, at: int, policies: tuple[tuple[TimmOp, ...], ...], upto: tuple[float, ...]) -> None:
    """One of timm's policies, each op of it with a probability; ``upto``: where in [0, 1) that of each policy ends."""
    policy_B = np.searchsorted(upto, drawing.uniform(at, 0), side="right")
    for place in range(max(map(len, policies))):
        first = 1 + 8 * place
        ops = [policy[place] if place < len(policy) else policy[0]._replace(p=0.0) for policy in policies]
        p_B, mean_B, deviation_B, most_B = np.array([op[1:5] for op in ops]).T[:, policy_B]
        applied_B = drawing.uniform(at, first) < p_B
        is_uniform_B = np.isinf(deviation_B)
        spread_B = np.where(is_uniform_B, 0.0, deviation_B) * drawing.normal(at, first + 1)
        level_B = np.where(is_uniform_B, drawing.uniform(at, first + 3, 0.0, mean_B), mean_B + spread_B)
        level_B = np.clip(level_B, 0.0, most_B) / 10.0
        signed_B = np.where(drawing.uniform(at, first + 4) > 0.5, -level_B, level_B)
        parts = [
            (applied_B & (policy_B == number), partial(_add_timm, at=at, first=first, op=op, both=(level_B, signed_B)))
            for number, op in enumerate(ops)
        ]
        drawing.each(*parts)


def _add_timm(drawing: Drawing, at: int, first: int, op: TimmOp, both: tuple[Float64s, Float64s]) -> None:
    """``LEVEL_TO_ARG`` and ``NAME_TO_OP``; ``both`` are shares of 10 without and with a sign."""
    level_B, signed_B = map(drawing.of, both)
    base, is_increasing = op.name.removesuffix("Increasing").removesuffix("Original"), op.name.endswith("Increasing")
    number_B: Any = 0
    value_B: Any = 0.0
    if base in _FACTORS:
        value_B = np.maximum(0.1, 1.0 + signed_B * 0.9) if is_increasing else level_B * 1.8 + 0.1
    elif base == "Desaturate":
        value_B = 1.0 - np.clip(0.5 + 0.5 * level_B, 0.5, 1.0)
    elif base == "Posterize":
        bits_B = (level_B * 4).astype(np.int64)
        number_B = np.minimum(8, 4 - bits_B if is_increasing else bits_B + 4 * op.name.endswith("Original"))
    elif base == "Solarize":
        threshold_B = np.minimum(256, (level_B * 256).astype(np.int64))
        value_B = 256 - threshold_B if is_increasing else threshold_B
    elif base == "SolarizeAdd":
        number_B = np.minimum(128, level_B * 110)
    elif base == "GaussianBlur":
        value_B = np.clip(0.1 + 1.9 * level_B, 0.1, 2.0)
    elif base == "GaussianBlurRand":
        value_B = drawing.uniform(at, first + 5, 0.1, 2.0 * np.clip(level_B, 0.0, 1.0))
    elif base not in _PLAIN:
        which_B = drawing.integers(at, first + 6, len(op.interpolations))
        _warp_timm(drawing, op, signed_B, np.array(op.interpolations)[which_B])
        return
    drawing.add(_TIMM_CODES[base], (number_B, 128), [value_B])


def _warp_timm(drawing: Drawing, op: TimmOp, signed_B: Float64s, interpolation_B: Int64s) -> None:
    warp: dict[str, Any] = {"interpolation": interpolation_B, "fill": op.fill, "domain": "pil"}
    if op.name == "Rotate":
        add_rotation(drawing, signed_B * 30.0, **warp)
        return
    matrix_B6 = np.zeros((len(signed_B), 6))
    matrix_B6[:, (0, 4)] = 1.0
    if op.name.startswith("Shear"):
        matrix_B6[:, 1 if op.name == "ShearX" else 3] = signed_B * 0.3
    else:
        is_x, is_relative = op.name.startswith("TranslateX"), op.name.endswith("Rel")
        length_B = (drawing.width_B if is_x else drawing.height_B) if is_relative else 1
        matrix_B6[:, 2 if is_x else 5] = signed_B * op.translate * length_B
    add_matrix(drawing, matrix_B6, **warp)
