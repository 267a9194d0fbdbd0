"""The steps of a transform as values, and what each draws for a batch: columns of the core's records.

An op knows nothing of torchvision's classes and touches no pixel. ``Drawing`` collects the records of a batch while its
ops draw, one after the other, and keeps the sizes that the images have so far.

``position`` numbers an op's random draws. ``domain`` tells which of torchvision's functions the user would have run:
``"pil"`` on PIL images, ``"v1"`` or ``"v2"`` on tensors.

Shape letters: B batch, C channels, N ops to choose from.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fastdata.core import RECORD, Code
from fastdata.decode import pillow_chooses_order
from fastdata.draws import UInt64s, draw_integers, draw_uniform, sample_keys

Domain = Literal["pil", "v1", "v2"]
PadMode = Literal["constant", "edge", "reflect", "symmetric"]
Borders = tuple[int, int, int, int]
"""Pixels at the left, top, right and bottom, in torchvision's order."""
Size = tuple[int, int]
Int64s = npt.NDArray[np.int64]
Lengths: TypeAlias = "int | Int64s"
Floats: TypeAlias = "float | npt.NDArray[Any]"
Flags = npt.NDArray[np.bool_]

DOMAINS = ("pil", "v1", "v2")
MODES = ("constant", "edge", "reflect", "symmetric")
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos", "nearest-exact")
"""In the core's order."""
TRIES = 10
_CHILDREN = 1 << 10


def child(position: int, number: int) -> int:
    """Position of an op inside of another one."""
    return (position + 1) * _CHILDREN + number


def step_position(position: int) -> int:
    """Position of the step that an op belongs to, however deep inside of it."""
    while position >= _CHILDREN:
        position = position // _CHILDREN - 1
    return position


class Drawing:
    """The records of a batch while they are drawn.

    Args:
        keys_B: from ``draws.sample_keys``.
        index_B: positions of the samples, for errors.
        height_B: of the samples as stored.
        width_B: likewise.
        channels: of all samples.
    """

    def __init__(self, keys_B: UInt64s, index_B: Int64s, height_B: Int64s, width_B: Int64s, channels: int) -> None:
        self.keys_B, self.index_B, self.channels = keys_B, index_B, channels
        self.height_B, self.width_B = height_B, width_B
        self._columns: list[npt.NDArray[Any]] = []
        self._chosen_B: Flags | None = None
        self._shared: list[npt.NDArray[Any]] | None = None

    def records(self) -> npt.NDArray[Any]:
        """All records: (B, columns)."""
        if not self._columns:
            return np.zeros((len(self.keys_B), 0), RECORD)
        return np.stack(self._columns, axis=1)

    def uniform(self, op: int, draw: int, low: Floats = 0.0, high: Floats = 1.0) -> npt.NDArray[np.float64]:
        """Draw number ``draw`` of an op for each sample, in [low, high)."""
        return low + draw_uniform(self.keys_B, op, draw) * (np.asarray(high) - low)

    def normal(self, op: int, draw: int) -> npt.NDArray[np.float64]:
        """Draws ``draw`` and the next one as a standard normal number, by Box and Muller."""
        radius_B = np.sqrt(-2.0 * np.log(1.0 - self.uniform(op, draw)))
        normal_B: npt.NDArray[np.float64] = radius_B * np.cos(2.0 * np.pi * self.uniform(op, draw + 1))
        return normal_B

    def integers(self, op: int, draw: int, count_B: Lengths) -> Int64s:
        """Draw integers in [0, count)."""
        return draw_integers(self.keys_B, op, draw, count_B)

    @contextmanager
    def only(self, chosen_B: Flags) -> Iterator[None]:
        """What is added meanwhile is for the chosen samples; none of the others change."""
        outer = self._chosen_B
        self._chosen_B = chosen_B if outer is None else outer & chosen_B
        try:
            yield
        finally:
            self._chosen_B = outer

    @property
    def is_idle(self) -> bool:
        """Whether no sample is chosen."""
        return self._chosen_B is not None and not self._chosen_B.any()

    def add(
        self,
        code: int | Int64s,
        n: Mapping[int, Any] | None = None,
        v: Mapping[int, Any] | None = None,
        domain: Any = 0,
    ) -> None:
        """Add a record for each chosen sample; the numbers are those that core.h names, one each or one for all."""
        shared = self._shared
        column = np.zeros(len(self.keys_B), RECORD) if not shared else shared[0]
        where: Any = True if self._chosen_B is None else self._chosen_B
        numbers, values = column["n"], column["v"]
        np.copyto(column["code"], code, where=where)
        np.copyto(numbers[:, 8], DOMAINS.index(domain) if isinstance(domain, str) else domain, where=where)
        for place, number in (n or {}).items():
            np.copyto(numbers[:, place], number, where=where, casting="unsafe")
        for place, value in (v or {}).items():
            np.copyto(values[:, place], value, where=where)
        if not shared:
            self._columns.append(column)
            if shared is not None:
                shared.append(column)

    @contextmanager
    def one_column(self) -> Iterator[None]:
        """What is added meanwhile, for samples of which no two are the same, shares a column."""
        self._shared = []
        try:
            yield
        finally:
            self._shared = None

    def resized(self, height: Lengths, width: Lengths) -> None:
        """Say what size the chosen samples have now."""
        if self._chosen_B is None:
            self.height_B, self.width_B = (np.broadcast_to(n, self.keys_B.shape) for n in (height, width))
        else:
            self.height_B = np.where(self._chosen_B, height, self.height_B)
            self.width_B = np.where(self._chosen_B, width, self.width_B)

    def window(
        self,
        height: Lengths,
        width: Lengths,
        top: Lengths = 0,
        left: Lengths = 0,
        borders: tuple[Lengths, ...] = (0, 0, 0, 0),
        mode: PadMode = "constant",
        fill: tuple[float, ...] = (0,),
        domain: Domain = "pil",
    ) -> None:
        """Cut a window out of the image with borders around it.

        Raises:
            ValueError: it is larger than that, or torch would refuse to reflect so far.
        """
        before_left, before_top, after_right, after_bottom = borders
        bordered_h, bordered_w = self.height_B + before_top + after_bottom, self.width_B + before_left + after_right
        self.refuse(
            (bordered_h < height) | (bordered_w < width),
            lambda b: (
                f"Required crop size {_pick((height, width), b)} is larger than input image size "
                f"{_pick((bordered_h, bordered_w), b)} of sample {self.index_B[b]}. "
                "Use pad_if_needed=True, a smaller crop, or a Resize before it."
            ),
        )
        if domain != "pil" and mode in ("reflect", "symmetric"):  # PIL images reflect again and again
            least = 1 if mode == "reflect" else 0
            reach_h, reach_v = np.maximum(before_left, after_right), np.maximum(before_top, after_bottom)
            self.refuse(
                (reach_h > self.width_B - least) | (reach_v > self.height_B - least),
                lambda b: (
                    f"padding {_pick(borders, b)} (left, top, right, bottom) in mode {mode!r} is too large for the "
                    f"image size {_pick((self.height_B, self.width_B), b)} of sample {self.index_B[b]}. "
                    "Use padding_mode='edge' or a smaller padding."
                ),
            )
        numbers = {**dict(enumerate(borders)), 4: top, 5: left, 6: height, 7: width}
        self.add(Code.WINDOW, numbers, fills(fill), MODES.index(mode) << 8)
        self.resized(height, width)

    def refuse(self, wrong_B: Flags, words: Callable[[int], str]) -> None:
        """Raise ValueError for the first chosen sample that is wrong."""
        wrong_B = wrong_B if self._chosen_B is None else wrong_B & self._chosen_B
        if wrong_B.any():
            raise ValueError(words(int(np.argmax(wrong_B))))


def fills(fill: tuple[float, ...]) -> dict[int, float]:
    """One value for each channel, where records have them."""
    return {8 + c: fill[min(c, len(fill) - 1)] for c in range(4)}


def _pick(numbers: tuple[Lengths, ...], b: int) -> tuple[int, ...]:
    return tuple(int(n[b] if isinstance(n, np.ndarray) and n.ndim else n) for n in numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One step."""

    position: int

    def draw(self, drawing: Drawing) -> None:
        """Add the step's records."""

    def size_after(self, size: Size | None) -> Size | None:
        """(h, w) after it, of (H, W) before; None where that is not the same for all samples."""
        return size

    def channels_after(self, channels: int) -> int:
        """Channels after it.

        Raises:
            ValueError: it is for another number of channels.
        """
        return channels


# Geometry


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filled(Op):
    """What may show a border; ``fill`` has one value or one for each channel."""

    fill: tuple[float, ...] = (0,)
    domain: Domain

    def channels_after(self, channels: int) -> int:
        if len(self.fill) not in (1, channels):
            raise ValueError(f"fill={self.fill} has {len(self.fill)} values, but the images have {channels} channels.")
        return channels


@dataclass(frozen=True, kw_only=True, slots=True)
class Pad(_Filled):
    """Add borders."""

    borders: Borders
    mode: PadMode

    def draw(self, drawing: Drawing) -> None:
        left, top, right, bottom = self.borders
        height_B, width_B = drawing.height_B + top + bottom, drawing.width_B + left + right
        drawing.window(height_B, width_B, 0, 0, self.borders, self.mode, self.fill, self.domain)

    def size_after(self, size: Size | None) -> Size | None:
        left, top, right, bottom = self.borders
        return None if size is None else (size[0] + top + bottom, size[1] + left + right)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomCrop(Pad):
    """A window at a random place of the (padded) image."""

    height: int
    width: int
    pad_if_needed: bool

    def draw(self, drawing: Drawing) -> None:
        left, top, right, bottom = self.borders
        more_v: Lengths = 0
        more_h: Lengths = 0
        if self.pad_if_needed:  # torchvision adds the missing length on both sides: the place of the image stays random
            more_v = np.maximum(self.height - (drawing.height_B + top + bottom), 0)
            more_h = np.maximum(self.width - (drawing.width_B + left + right), 0)
        borders = (left + more_h, top + more_v, right + more_h, bottom + more_v)
        room_v = drawing.height_B + borders[1] + borders[3] - self.height + 1
        room_h = drawing.width_B + borders[0] + borders[2] - self.width + 1
        y_B = drawing.integers(self.position, 0, room_v)
        x_B = drawing.integers(self.position, 1, room_h)
        drawing.window(self.height, self.width, y_B, x_B, borders, self.mode, self.fill, self.domain)

    def size_after(self, size: Size | None) -> Size | None:
        return self.height, self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class CenterCrop(Op):
    """The window in the middle; an image that is too small is padded with 0 first."""

    height: int
    width: int

    def draw(self, drawing: Drawing) -> None:
        miss_v = np.maximum(self.height - drawing.height_B, 0)
        miss_h = np.maximum(self.width - drawing.width_B, 0)
        # Halves to the even number, as Python's round, which torchvision takes.
        top_B = np.rint((drawing.height_B + miss_v - self.height) / 2).astype(np.int64)
        left_B = np.rint((drawing.width_B + miss_h - self.width) / 2).astype(np.int64)
        borders = (miss_h // 2, miss_v // 2, (miss_h + 1) // 2, (miss_v + 1) // 2)
        drawing.window(self.height, self.width, top_B, left_B, borders)

    def size_after(self, size: Size | None) -> Size | None:
        return self.height, self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip(Op):
    """Mirror left and right, or top and bottom, with probability ``p``."""

    vertical: bool
    p: float

    def draw(self, drawing: Drawing) -> None:
        flipped_B = drawing.uniform(self.position, 0) < self.p
        drawing.add(Code.WINDOW, {6: drawing.height_B, 7: drawing.width_B}, domain=flipped_B * (1 + self.vertical))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Resampled(Op):
    interpolation: str
    antialias: bool
    domain: Domain

    def _resize(self, drawing: Drawing, box: tuple[Lengths, ...], height: Lengths, width: Lengths) -> None:
        numbers = {**dict(enumerate(box)), 4: height, 5: width, 6: INTERPOLATIONS.index(self.interpolation)}
        domain = DOMAINS.index(resize_domain(self.domain, self.interpolation))
        drawing.add(Code.RESIZE, {**numbers, 7: self.antialias}, domain=domain + 256 * pillow_chooses_order())
        drawing.resized(height, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomResizedCrop(_Resampled):
    """A random box, resized."""

    height: int
    width: int
    scale: tuple[float, float]
    ratio: tuple[float, float]

    def draw(self, drawing: Drawing) -> None:
        low, high = min(self.ratio), max(self.ratio)
        height_B, width_B = drawing.height_B, drawing.width_B
        shape_B = width_B / height_B
        h_B = np.where(shape_B < low, np.rint(width_B / low).astype(np.int64), height_B)
        w_B = np.where(shape_B > high, np.rint(height_B * high).astype(np.int64), width_B)
        central = np.stack([(height_B - h_B) // 2, (width_B - w_B) // 2, h_B, w_B])
        box = draw_boxes(drawing, self.position, self.scale, self.ratio, central, wide=True)
        self._resize(drawing, tuple(box), self.height, self.width)

    def size_after(self, size: Size | None) -> Size | None:
        return self.height, self.width


def draw_boxes(
    drawing: Drawing,
    position: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    otherwise: Int64s,
    *,
    wide: bool,
    first: int = 0,
) -> Int64s:
    """Draw boxes as torchvision's RandomResizedCrop and RandomErasing do: ten tries to fit into the image.

    Args:
        drawing: knows the sizes of the images.
        position: of the op.
        scale: their share of the area.
        ratio: width / height if ``wide``, else height / width; uniform in its logarithm.
        otherwise: int64 (4, B), what is taken where no try fits.
        wide: whether a box may be as large as the image.
        first: number of the first draw.

    Returns:
        int64 (4, B): top, left, height, width in pixels.
    """
    boxes: Int64s = otherwise.copy()
    keys_B, heights, widths = drawing.keys_B, drawing.height_B, drawing.width_B
    logarithms = np.log(ratio)
    pending = np.arange(len(keys_B))
    for draw in range(first, first + 4 * TRIES, 4):
        H, W, keys = heights[pending], widths[pending], keys_B[pending]
        area = H * W * (scale[0] + draw_uniform(keys, position, draw) * (scale[1] - scale[0]))
        stretch = np.exp(logarithms[0] + draw_uniform(keys, position, draw + 1) * (logarithms[1] - logarithms[0]))
        sides = np.rint(np.sqrt(area * stretch)).astype(np.int64), np.rint(np.sqrt(area / stretch)).astype(np.int64)
        w, h = sides if wide else sides[::-1]
        fits = (w > 0) & (w <= W) & (h > 0) & (h <= H) if wide else (w < W) & (h < H)
        H, W, keys, h, w = H[fits], W[fits], keys[fits], h[fits], w[fits]
        top = draw_integers(keys, position, draw + 2, H - h + 1)
        left = draw_integers(keys, position, draw + 3, W - w + 1)
        boxes[:, pending[fits]] = top, left, h, w
        pending = pending[~fits]
        if not len(pending):
            break
    return boxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize(_Resampled):
    """A new size: ``size``, or one in which the shorter side has one of several lengths.

    Attributes:
        size: (h, w); None: the shorter side is drawn from ``shorter``.
        longest: the longer side is no longer than that; None for any length.
        by_factor: both sides are multiplied and cut, as RandomShortestSize does.
        bound: of the ``"short"`` or the ``"long"`` side, which is in ``shorter`` then; nothing is enlarged.
    """

    size: Size | None = None
    shorter: tuple[int, ...] = ()
    longest: int | None = None
    by_factor: bool = False
    bound: str = ""

    def draw(self, drawing: Drawing) -> None:
        height_B, width_B = drawing.height_B, drawing.width_B
        new_h: Lengths
        new_w: Lengths
        if self.size is not None:
            new_h, new_w = self.size
        else:
            which_B = drawing.integers(self.position, 0, len(self.shorter)) if len(self.shorter) > 1 else 0
            new_h, new_w = self._sides(height_B, width_B, np.array(self.shorter)[which_B])
        self._resize(drawing, (0, 0, height_B, width_B), new_h, new_w)

    def _sides(self, height_B: Int64s, width_B: Int64s, shorter_B: Int64s) -> tuple[Lengths, Lengths]:
        short_B, long_B = np.minimum(height_B, width_B), np.maximum(height_B, width_B)
        if self.bound == "long":
            shorter_B = np.maximum(1, (shorter_B * short_B / long_B).astype(np.int64))
        if self.bound:
            shorter_B = np.minimum(shorter_B, short_B)
        if self.by_factor:
            factor_B = shorter_B / short_B
            if self.longest is not None:
                factor_B = np.minimum(factor_B, self.longest / long_B)
            return (height_B * factor_B).astype(np.int64), (width_B * factor_B).astype(np.int64)
        longer_B = (shorter_B * long_B / short_B).astype(np.int64)
        if self.longest is not None:
            too_long_B = longer_B > self.longest
            shorter_B = np.where(too_long_B, (self.longest * shorter_B / longer_B).astype(np.int64), shorter_B)
            longer_B = np.where(too_long_B, self.longest, longer_B)
        if self.bound == "long":
            longer_B = np.minimum(self.shorter[0], long_B)
        is_wide_B = width_B > height_B
        return np.where(is_wide_B, shorter_B, longer_B), np.where(is_wide_B, longer_B, shorter_B)

    def size_after(self, size: Size | None) -> Size | None:
        if self.size is not None or size is None or len(self.shorter) > 1:
            return self.size
        height, width = self._sides(np.array([size[0]]), np.array([size[1]]), np.array(self.shorter))
        return int(np.ravel(height)[0]), int(np.ravel(width)[0])


@functools.cache
def resize_domain(domain: Domain, interpolation: str) -> Domain:
    """Whose arithmetic resizes: torchvision's v2 takes float32 (v1's way) where torch has no fast kernel for uint8."""
    if domain != "v2" or interpolation != "bilinear":
        return domain
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in ("aarch64", "arm64")
    return "v2" if fast else "v1"


# Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Value(Op):
    """One number between two, or that number: brightness, contrast, saturation, hue, sharpness, a threshold.

    Attributes:
        code: of the core.
        low: of the number, uniform.
        high: likewise.
        number: a whole number that the code needs.
    """

    code: int
    domain: Domain
    low: float = 0.0
    high: float = 0.0
    number: int = 0

    def draw(self, drawing: Drawing) -> None:
        value_B: Any = self.low
        if self.low != self.high:
            value_B = drawing.uniform(self.position, 0, self.low, self.high)
        drawing.add(self.code, {0: self.number}, {0: value_B}, self.domain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grayscale(Op):
    """Luma in one or three equal channels, or 0: in as many as there are."""

    channels: int
    domain: Domain

    def draw(self, drawing: Drawing) -> None:
        drawing.channels = after = self.channels_after(drawing.channels)
        drawing.add(Code.GRAYSCALE, {0: after if self.channels else 0}, domain=self.domain)

    def channels_after(self, channels: int) -> int:
        if self.domain == "v1" and channels == 1:
            return 1  # v1 leaves such tensors as they are
        return self.channels or channels


@dataclass(frozen=True, kw_only=True, slots=True)
class Blur(Op):
    """torchvision's GaussianBlur, with one sigma for both axes."""

    kernel_width: int
    kernel_height: int
    sigma: tuple[float, float]

    def draw(self, drawing: Drawing) -> None:
        width, height = self.kernel_width, self.kernel_height
        drawing.refuse(
            (drawing.width_B <= width // 2) | (drawing.height_B <= height // 2),
            lambda b: (
                f"GaussianBlur with kernel_size=({width}, {height}) needs images of more than {height // 2} x "
                f"{width // 2} px (height x width), but sample {drawing.index_B[b]} has {drawing.height_B[b]} x "
                f"{drawing.width_B[b]}. Use a smaller kernel or a larger resize."
            ),
        )
        sigma_B = drawing.uniform(self.position, 0, *self.sigma)
        drawing.add(Code.BLUR, {0: width, 1: height}, {0: sigma_B, 1: sigma_B})


@dataclass(frozen=True, kw_only=True, slots=True)
class Permute(Op):
    """The channels in random order."""

    def draw(self, drawing: Drawing) -> None:
        drawing.add(Code.PERMUTE, dict(enumerate(draw_order(drawing, self.position, drawing.channels).T)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise(Op):
    """Normal noise on uint8, or if ``scale`` is given on the floats served.

    Attributes:
        scale: what a Normalize after it multiplies the noise by, for each channel.
        low: what it makes of 0, where values are clipped, for each channel.
    """

    mean: float
    sigma: float
    clip: bool
    scale: tuple[float, ...] = ()
    low: tuple[float, ...] = ()

    def draw(self, drawing: Drawing) -> None:
        values = {0: self.mean, 1: self.sigma}
        for c in range(4 if self.scale else 0):
            values |= {2 + c: self.scale[min(c, len(self.scale) - 1)], 6 + c: self.low[min(c, len(self.low) - 1)]}
        drawing.add(Code.NOISE, {0: self.clip, **key_halves(drawing.keys_B, self.position)}, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Erase(Op):
    """Random rectangles.

    Attributes:
        p: how often.
        scale: their share of the area.
        ratio: of height to width.
        fill: one value or one for each channel, in the units of what is erased; None for normal numbers.
        per_pixel: whether these are drawn for each pixel, or one for each channel.
        counts: fewest and most rectangles, which share the area.
    """

    p: float
    scale: tuple[float, float]
    ratio: tuple[float, float]
    fill: tuple[float, ...] | None
    per_pixel: bool = True
    counts: tuple[int, int] = (1, 1)

    def draw(self, drawing: Drawing) -> None:
        fewest, most = self.counts
        erased_B = drawing.uniform(self.position, 0) < self.p
        count_B = fewest + drawing.integers(self.position, 1, most - fewest + 1)
        nothing = np.zeros((4, len(erased_B)), np.int64)
        mode = 0 if self.fill is not None else 1 if self.per_pixel else 2
        for number in range(most):
            with drawing.only(erased_B & (number < count_B)):
                box = self._boxes(drawing, count_B, nothing, 2 + 4 * TRIES * number)
                numbers = {**dict(enumerate(box)), 6: mode, **key_halves(drawing.keys_B, child(self.position, number))}
                drawing.add(Code.ERASE, numbers, fills(self.fill or (0,)))

    def _boxes(self, drawing: Drawing, count_B: Int64s, nothing: Int64s, first: int) -> Int64s:
        boxes = nothing
        for count in np.unique(count_B).tolist():
            scale = (self.scale[0] / count, self.scale[1] / count)
            drawn = draw_boxes(drawing, self.position, scale, self.ratio, nothing, wide=False, first=first)
            boxes = np.where(count_B == count, drawn, boxes)
        return boxes

    def channels_after(self, channels: int) -> int:
        if self.fill is not None and len(self.fill) not in (1, channels):
            raise ValueError(f"erasing has {len(self.fill)} values, but the images have {channels} channels.")
        return channels


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast(Op):
    """uint8 to floating point; ``scaling`` is how torchvision maps 255 to 1, if it does."""

    dtype: str
    scaling: Literal["divide", "multiply", "none"]

    def draw(self, drawing: Drawing) -> None:
        drawing.add(Code.CAST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalize(Op):
    """(x - mean) / std per channel; ``widens`` says that one channel becomes as many as there are means."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    widens: bool

    def channels_after(self, channels: int) -> int:
        means = len(self.mean)
        if means in (1, channels):
            return channels
        if channels != 1 or not self.widens:
            raise ValueError(f"Normalize has {means} means, but the images have {channels} channels.")
        return means


# Ops of ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Op):
    """One of several sequences of ops, or with a probability none.

    Attributes:
        sequences: of ops.
        upto: where in [0, 1) the probability of each ends; what lies beyond the last is for none.
    """

    sequences: tuple[tuple[Op, ...], ...]
    upto: tuple[float, ...]

    def draw(self, drawing: Drawing) -> None:
        chosen_B = np.searchsorted(self.upto, drawing.uniform(self.position, 0), side="right")
        for number, sequence in enumerate(self.sequences):
            draw_some(drawing, sequence, chosen_B == number)

    def size_after(self, size: Size | None) -> Size | None:
        sizes = {self._size(sequence, size) for sequence in self.sequences}
        if self.upto[-1] < 1:
            sizes.add(size)
        return sizes.pop() if len(sizes) == 1 else None

    def _size(self, sequence: tuple[Op, ...], size: Size | None) -> Size | None:
        for op in sequence:
            size = op.size_after(size)
        return size


@dataclass(frozen=True, kw_only=True, slots=True)
class Order(Op):
    """Several ops in random order."""

    ops: tuple[tuple[Op, ...], ...]

    def draw(self, drawing: Drawing) -> None:
        for which_B in draw_order(drawing, self.position, len(self.ops)).T:
            for number, sequence in enumerate(self.ops):
                draw_some(drawing, sequence, which_B == number)

    def size_after(self, size: Size | None) -> Size | None:
        keeps = all(op.size_after((97, 89)) == (97, 89) for sequence in self.ops for op in sequence)
        return size if keeps else None


def draw_some(drawing: Drawing, sequence: tuple[Op, ...], chosen_B: Flags) -> None:
    """Draw ops for some samples."""
    with drawing.only(chosen_B):
        if not drawing.is_idle:
            for op in sequence:
                op.draw(drawing)


def draw_order(drawing: Drawing, position: int, count: int) -> Int64s:
    """Permutations of ``count`` numbers, each equally likely: (B, count)."""
    order_BN: Int64s = np.argsort(np.stack([drawing.uniform(position, k) for k in range(count)], axis=1), axis=1)
    return order_BN


def key_halves(keys_B: UInt64s, position: int) -> dict[int, npt.NDArray[np.int32]]:
    """The key of each sample's noise, where records have it."""
    halves = (keys_B ^ sample_keys(position, 0, np.zeros(1, np.int64))).view(np.int32).reshape(-1, 2)
    return {4: halves[:, 0], 5: halves[:, 1]}
