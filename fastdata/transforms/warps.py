"""Rotation, affine maps and perspective: for each sample the matrix from the image wanted to the one there is.

Shape letters: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdata.core import Code
from fastdata.transforms.ops import INTERPOLATIONS, Domain, Drawing, Floats, Op, Size, fills

Float64s = npt.NDArray[np.float64]
Center = tuple[float, float] | None
_PILLOW_PLACES = 15
"""To which Image.rotate rounds sine and cosine."""


def add_matrix(
    drawing: Drawing,
    matrix_BN: Float64s,
    *,
    interpolation: Any,
    fill: tuple[float, ...] | None,
    domain: Domain,
    size: tuple[Any, Any] | None = None,
) -> None:
    """Add a map by its 6 numbers, or 8 of a perspective.

    Args:
        drawing: of the batch.
        matrix_BN: as Pillow's ``Image.transform`` takes it, or torchvision's ``_affine_grid``, ``_perspective_grid``.
        interpolation: by name, or numbers of the core (B,).
        fill: of what comes from outside; None: black, and for tensors blended with it at the edge.
        domain: whose pixels.
        size: (h, w) wanted; None: the size stays.
    """
    height, width = size or (drawing.height_B, drawing.width_B)
    which = INTERPOLATIONS.index(interpolation) if isinstance(interpolation, str) else interpolation
    code = Code.AFFINE if matrix_BN.shape[1] == 6 else Code.PERSPECTIVE
    numbers = {0: height, 1: width, 6: which, 7: fill is not None}
    drawing.add(code, numbers, {**dict(enumerate(matrix_BN.T)), **fills(fill or (0.0,))}, domain)
    if size is not None:
        drawing.resized(height, width)


def add_affine(
    drawing: Drawing,
    angle_B: Floats,
    translate: tuple[Floats, Floats] = (0.0, 0.0),
    *,
    scale: Floats = 1.0,
    shear: tuple[Floats, Floats] = (0.0, 0.0),
    center: Center = None,
    **rest: Any,
) -> None:
    """Add torchvision's ``affine``: degrees clockwise, pixels, a factor, degrees of shear."""
    middle = (drawing.width_B * 0.5, drawing.height_B * 0.5)
    cx, cy = middle if center is None else center
    if rest["domain"] != "pil":  # tensors: from the centre of the image
        cx, cy = (0.0, 0.0) if center is None else (center[0] - middle[0], center[1] - middle[1])
    add_matrix(drawing, _inverse_affine(angle_B, (cx, cy), translate, scale, shear), **rest)


def add_rotation(
    drawing: Drawing, angle_B: Float64s, *, expand: bool = False, center: Center = None, **rest: Any
) -> None:
    """Add torchvision's ``rotate``: degrees counterclockwise, of PIL images by ``Image.rotate``."""
    if rest["domain"] != "pil":
        with drawing.only(angle_B % 360 != 0):
            add_affine(drawing, -angle_B, center=center, **rest)
        return
    angle_B = np.asarray(angle_B) % 360.0
    height_B, width_B = drawing.height_B, drawing.width_B
    turns_B = (angle_B % 90 == 0) & ((angle_B % 180 == 0) | expand | (height_B == width_B)) & (center is None)
    for quarters in (1, 2, 3):
        with drawing.only(turns_B & (angle_B == 90 * quarters)):
            if not drawing.is_idle:
                drawing.add(Code.TURN, {0: quarters})
                if quarters != 2:
                    drawing.resized(width_B, height_B)
    with drawing.only(~turns_B):
        if not drawing.is_idle:
            matrix_B6, size = _pillow_rotation(angle_B, height_B, width_B, expand, center)
            add_matrix(drawing, matrix_B6, size=size, **rest)


def _pillow_rotation(
    angle_B: Float64s, height_B: Floats, width_B: Floats, expand: bool, center: Center
) -> tuple[Float64s, tuple[Any, Any] | None]:
    """``Image.rotate`` of Pillow's Image.py: the matrix, and the size if it expands."""
    radians_B = -np.radians(angle_B)
    cosine_B, sine_B = (_rounded(as_python(function, radians_B)) for function in (math.cos, math.sin))
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


def as_python(function: Callable[[float], float], values: Floats) -> Any:
    """Ask Python's own function, as torchvision and Pillow do: NumPy's may differ in the last bit, and so a pixel."""
    if isinstance(values, float):
        return function(values)
    return np.array([function(value) for value in np.ravel(values).tolist()]).reshape(np.shape(values))


def _rounded(values_B: Float64s) -> Float64s:
    return np.array([round(value, _PILLOW_PLACES) for value in values_B.tolist()])


def _inverse_affine(
    angle_B: Floats,
    center: tuple[Floats, Floats],
    translate: tuple[Floats, Floats],
    scale: Floats,
    shear: tuple[Floats, Floats],
) -> Float64s:
    """``_get_inverse_affine_matrix`` of torchvision's transforms/functional.py."""
    rotation, sx, sy = np.radians(angle_B), np.radians(shear[0]), np.radians(shear[1])
    (cx, cy), (tx, ty) = center, translate
    (cosine, sine), turned = (partial(as_python, function) for function in (math.cos, math.sin)), rotation - sy
    tangent, squeezed = as_python(math.tan, sx), cosine(sy)
    a = cosine(turned) / squeezed
    b = -cosine(turned) * tangent / squeezed - sine(rotation)
    c = sine(turned) / squeezed
    d = -sine(turned) * tangent / squeezed + cosine(rotation)
    matrix = [d / scale, -b / scale, -c / scale, a / scale]
    x = matrix[0] * (-cx - tx) + matrix[1] * (-cy - ty) + cx
    y = matrix[2] * (-cx - tx) + matrix[3] * (-cy - ty) + cy
    rows = np.broadcast_arrays(matrix[0], matrix[1], x, matrix[2], matrix[3], y)
    return np.stack(rows, axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Warp(Op):
    interpolation: str
    fill: tuple[float, ...] | None
    domain: Domain

    @property
    def rest(self) -> dict[str, Any]:
        return {"interpolation": self.interpolation, "fill": self.fill, "domain": self.domain}

    def channels_after(self, channels: int) -> int:
        if self.fill is not None and len(self.fill) not in (1, channels):
            raise ValueError(f"fill={self.fill} has {len(self.fill)} values, but the images have {channels} channels.")
        return channels


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation(_Warp):
    """RandomRotation: degrees counterclockwise, uniform."""

    degrees: tuple[float, float]
    expand: bool
    center: Center

    def draw(self, drawing: Drawing) -> None:
        angle_B = drawing.uniform(self.position, 0, *self.degrees)
        add_rotation(drawing, angle_B, expand=self.expand, center=self.center, **self.rest)

    def size_after(self, size: Size | None) -> Size | None:
        return None if self.expand else size


@dataclass(frozen=True, kw_only=True, slots=True)
class Affine(_Warp):
    """RandomAffine; what is None is left as it is."""

    degrees: tuple[float, float]
    translate: tuple[float, float] | None
    scale: tuple[float, float] | None
    shear: tuple[float, ...]
    center: Center

    def draw(self, drawing: Drawing) -> None:
        at = self.position
        angle_B = drawing.uniform(at, 0, *self.degrees)
        translate: tuple[Floats, Floats] = (0.0, 0.0)
        if self.translate is not None:
            most = (self.translate[0] * drawing.width_B, self.translate[1] * drawing.height_B)
            translate = (
                np.rint(drawing.uniform(at, 1, -most[0], most[0])),
                np.rint(drawing.uniform(at, 2, -most[1], most[1])),
            )
        scale = 1.0 if self.scale is None else drawing.uniform(at, 3, *self.scale)
        ranges = [self.shear[k : k + 2] for k in range(0, len(self.shear), 2)]
        shear = [drawing.uniform(at, 4 + k, low, high) for k, (low, high) in enumerate(ranges)]
        both: Any = (*shear, 0.0, 0.0)[:2]
        add_affine(drawing, angle_B, translate, scale=scale, shear=both, center=self.center, **self.rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Perspective(_Warp):
    """RandomPerspective, applied to every sample; ``distortion`` is the share of half a side that a corner moves by."""

    distortion: float

    def draw(self, drawing: Drawing) -> None:
        height_B, width_B = drawing.height_B, drawing.width_B
        reach_v = (self.distortion * (height_B // 2)).astype(np.int64) + 1
        reach_h = (self.distortion * (width_B // 2)).astype(np.int64) + 1
        corners = []  # top left, top right, bottom right, bottom left
        for number, (right, bottom) in enumerate(((False, False), (True, False), (True, True), (False, True))):
            x_B = drawing.integers(self.position, 2 * number, reach_h)
            y_B = drawing.integers(self.position, 2 * number + 1, reach_v)
            corners.append((x_B + right * (width_B - reach_h), y_B + bottom * (height_B - reach_v)))
        add_matrix(drawing, _perspective(corners, height_B, width_B), **self.rest)


def _perspective(corners: list[tuple[Any, Any]], height_B: Any, width_B: Any) -> Float64s:
    """``_get_perspective_coeffs`` of torchvision's transforms/functional.py, which rounds to float32."""
    zero_B, one_B = np.zeros(len(height_B)), np.ones(len(height_B))
    ends = ((zero_B, zero_B), (width_B - 1, zero_B), (width_B - 1, height_B - 1), (zero_B, height_B - 1))
    rows, wanted = [], []
    for (x, y), (to_x, to_y) in zip(corners, ends, strict=True):
        rows.append(np.stack([x, y, one_B, zero_B, zero_B, zero_B, -to_x * x, -to_x * y], axis=1))
        rows.append(np.stack([zero_B, zero_B, zero_B, x, y, one_B, -to_y * x, -to_y * y], axis=1))
        wanted += [to_x, to_y]
    equations_B88 = np.stack(rows, axis=1)
    solution_B8 = (np.linalg.pinv(equations_B88) @ np.stack(wanted, axis=1)[:, :, None])[:, :, 0]
    coefficients_B8: Float64s = solution_B8.astype(np.float32).astype(np.float64)
    return coefficients_B8
