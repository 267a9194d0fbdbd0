"""The steps of a transform as values, and what each draws for a batch: columns of the core's records.

An op knows nothing of torchvision's classes and touches no pixel: it is a ``draw_...`` function and its arguments. Of
these ``at`` numbers its random draws, and ``domain`` tells which of torchvision's functions the user would have run:
``"pil"`` on PIL images, ``"v1"`` or ``"v2"`` on tensors.

Shape letters: B batch, C channels, N ops to choose from, T tries.
"""

from __future__ import annotations

import copy
import functools
import itertools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from fastdata.core import RECORD, Code
from fastdata.draws import UInt64s, draw_integers, draw_uniform, sample_keys
from fastdata.errors import ChannelsError, counted
from fastdata.images import pillow_chooses_order

Domain = Literal["pil", "v1", "v2"]
Size = tuple[int, int]
Range = tuple[float, float]
Flags = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Fill = tuple[float, ...]
"""One value, or one for each channel."""
Borders = tuple[Any, Any, Any, Any]
"""Pixels at the left, top, right and bottom, in torchvision's order: of all samples, or int64 (B,)."""

DOMAINS = ("pil", "v1", "v2")
MODES = ("constant", "edge", "reflect", "symmetric")
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos", "nearest-exact")
"""In the core's order."""
TRIES = 10
_CHILDREN = 1 << 10
_NUMBERS = (1 << 54) - 33
"""A prime number of numbers, as many as ``draws`` tells apart: those of steps nested deeper are folded into these."""
_ANY_PX = 1 << 10
"""Stands for a side that is not known."""


@dataclass(frozen=True, slots=True)
class Op:
    """One step: ``draw(drawing, at, **arguments)`` adds its records."""

    draw: Callable[..., None]
    at: int
    arguments: dict[str, Any]


def child(at: int, number: int) -> int:
    """The number of what a step draws within itself, or of a step within it."""
    return ((at + 1) * _CHILDREN + number) % _NUMBERS


def step_number(at: int) -> int:
    """The place in the transform of a step, by a number of it or of its children."""
    while at >= _CHILDREN:
        at = at // _CHILDREN - 1
    return at


class Drawing:
    """The records of a batch, or of some of its samples, while its ops draw one after the other.

    A probe refuses no size and follows every choice. It keeps the ``size`` (h, w) that all samples have, whatever is
    drawn; None where it differs.

    Args:
        keys_B: from ``draws.sample_keys``.
        index_B: positions of the samples, for errors.
        height_B, width_B: of the samples as stored.
        channels: of all samples.
    """

    def __init__(self, keys_B: UInt64s, index_B: Int64s, height_B: Int64s, width_B: Int64s, channels: int) -> None:
        self.keys_B, self.index_B, self.channels = keys_B, index_B, channels
        self.height_B, self.width_B = height_B, width_B
        self.size: Size | None = None
        self.is_probe = False
        self._root, self._next, self._window = self, 0, -1
        self._records: npt.NDArray[Any] = np.empty((0, len(keys_B)), RECORD)
        self._rows: Any = slice(None)  # of the columns
        self._taken: Any = slice(None)  # of the batch or part that this is a part of

    def draw(self, ops: tuple[Op, ...]) -> None:
        for op in ops:
            op.draw(self, op.at, **op.arguments)

    @property
    def records(self) -> npt.NDArray[Any]:
        """What is done to each sample, (steps, B), once all is drawn."""
        return self._records[: self._next]

    def uniform(self, at: int, draw: int, low: Any = 0.0, high: Any = 1.0) -> Float64s:
        drawn_B: Float64s = low + draw_uniform(self.keys_B, at, draw) * (high - low)
        return drawn_B

    def normal(self, at: int, draw: int) -> Float64s:
        """Draw normal numbers; takes draw + 1 too."""
        radius_B = np.sqrt(-2.0 * np.log(1.0 - self.uniform(at, draw)))
        normal_B: Float64s = radius_B * np.cos(2.0 * np.pi * self.uniform(at, draw + 1))
        return normal_B

    def integers(self, at: int, draw: int, count_B: Any) -> Int64s:
        """Draw integers in [0, count)."""
        return draw_integers(self.keys_B, at, draw, count_B)

    def order(self, at: int, count: int) -> Int64s:
        """Draw permutations, (count, B)."""
        order_NB: Int64s = np.argsort(draw_uniform(self.keys_B, at, range(count)), axis=0)
        return order_NB

    def each(self, *parts: tuple[Flags, Callable[[Drawing], None]], is_whole: bool = False) -> None:
        """Draw for parts of the batch that have no sample in common, all into the same columns.

        ``parts`` are which samples, and what draws for them; ``is_whole``: together they are always the whole batch.
        """
        height_B, width_B, first = self.height_B.copy(), self.width_B.copy(), self._next
        sizes = set() if is_whole else {self.size}
        for chosen_B, draw in parts:
            rows = np.flatnonzero(chosen_B | self.is_probe)
            if not len(rows):
                continue
            part = copy.copy(self)
            part.keys_B, part.index_B = self.keys_B[rows], self.index_B[rows]
            part.height_B, part.width_B = self.height_B[rows], self.width_B[rows]
            part._next, part._window, part._taken = first, -1, rows
            part._rows = rows if isinstance(self._rows, slice) else self._rows[rows]
            draw(part)
            height_B[rows], width_B[rows] = part.height_B, part.width_B
            self._next = max(self._next, part._next)
            sizes.add(part.size)
        self.height_B, self.width_B = height_B, width_B
        self.size = sizes.pop() if len(sizes) == 1 else None

    def of(self, values_B: npt.NDArray[Any]) -> Any:
        """Those of a part, out of the values of what it is a part of."""
        return values_B[self._taken]

    def refuse_channels(self, needs: str) -> NoReturn:
        found = counted(self.channels, "channel")
        cure = "Give all images one number of channels, as prepare=lambda image: image.convert('RGB') does"
        raise ChannelsError(f"it has {found}, but {needs}. {cure}.", int(self.index_B[0]))

    def add(self, code: Any, n: Any = (), v: Any = (), domain: Any = 0, fill: Fill = (0,), name: str = "") -> None:
        """Add a column, whose numbers are those of all samples or (B,).

        Raises:
            ChannelsError: the fill is for another number of channels.
        """
        if len(fill) not in (1, self.channels):
            self.refuse_channels(f"{name or f'fill={fill}'} has {len(fill)} values")
        root, rows = self._root, self._rows
        if self._next == len(root._records):
            more = np.zeros((self._next or 2, len(root.keys_B)), RECORD)
            root._records = np.concatenate([root._records, more]) if self._next else more
        column = root._records[self._next]
        self._next += 1
        column["code"][rows] = code
        column["n"][rows, 8] = DOMAINS.index(domain) if isinstance(domain, str) else domain
        for field, numbers in (("n", n), ("v", v)):
            for place, number in enumerate(numbers):
                column[field][rows, place] = number
        if any(fill):
            column["v"][rows, 8:] = fill * (4 // len(fill)) if len(fill) != 3 else (*fill, fill[-1])

    def resized(self, height: Any, width: Any, *, is_drawn: bool = False) -> None:
        """Say how large images are now: all of them, or (B,); ``is_drawn``: that differs from sample to sample."""
        self.height_B, self.width_B = (np.full(len(self.keys_B), n, np.int64) for n in (height, width))
        if self.is_probe:
            is_known = not is_drawn and (self.size is not None or (isinstance(height, int) and isinstance(width, int)))
            self.size = (int(self.height_B[0]), int(self.width_B[0])) if is_known else None

    def resize(
        self, box: Int64s | None, height: Any, width: Any, *, interpolation: str, domain: Domain, is_drawn: bool = False
    ) -> None:
        """Resize the image, or a box of it: top, left, height, width (4, B)."""
        whose = DOMAINS.index(_resize_domain(domain, interpolation)) + 256 * pillow_chooses_order()
        place: Any = (0, 0, self.height_B, self.width_B) if box is None else box
        self.add(Code.RESIZE, (*place, height, width, INTERPOLATIONS.index(interpolation)), (), whose)
        self.resized(height, width, is_drawn=is_drawn)

    def window(
        self,
        height: Any,
        width: Any,
        top: Any = 0,
        left: Any = 0,
        borders: Borders = (0, 0, 0, 0),
        mode: str = "constant",
        fill: Fill = (0,),
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
        self.add(Code.WINDOW, (*borders, top, left, height, width), (), MODES.index(mode) << 8, fill)
        self._window = self._next
        self.resized(height, width)

    def mirror(self, flipped_B: Flags, bit: int) -> None:
        """Mirror left and right (bit 1) or top and bottom (2), with the window before it if there is one."""
        if self._window == self._next:
            self._root._records[self._next - 1]["n"][self._rows, 8] ^= flipped_B * np.int32(bit)
            return
        self.add(Code.WINDOW, (0, 0, 0, 0, 0, 0, self.height_B, self.width_B), domain=flipped_B * bit)
        self._window = self._next

    def refuse(self, wrong_B: Flags, words: Callable[[int], str]) -> None:
        """Raise ValueError for the first sample that is wrong."""
        if wrong_B.any() and not self.is_probe:
            raise ValueError(words(int(np.argmax(wrong_B))))


def _pick(numbers: tuple[Any, ...], b: int) -> tuple[int, ...]:
    return tuple(int(n[b] if isinstance(n, np.ndarray) and n.ndim else n) for n in numbers)


def size_after(ops: tuple[Op, ...], channels: int, size: Size | None) -> tuple[int, Size | None]:
    """Channels, and size (h, w), that ops make of images; no size where it is not the same for all of them.

    Raises:
        ChannelsError: an op is for another number of channels.
    """
    one, (height, width) = np.zeros(1, np.int64), size or (_ANY_PX, _ANY_PX)
    probe = Drawing(sample_keys(0, 0, one), one, one + height, one + width, channels)
    probe.size, probe.is_probe = size, True
    probe.draw(ops)
    return probe.channels, probe.size


# Geometry


def draw_pad(drawing: Drawing, at: int, borders: Borders, **border: Any) -> None:
    left, top, right, bottom = borders
    height_B, width_B = drawing.height_B + top + bottom, drawing.width_B + left + right
    drawing.window(height_B, width_B, 0, 0, borders, **border)


def draw_crop(
    drawing: Drawing, at: int, height: int, width: int, borders: Borders, pad_if_needed: bool, **border: Any
) -> None:
    left, top, right, bottom = borders
    if pad_if_needed:  # torchvision adds the missing length on both sides: the place of the image stays random
        more_v = np.maximum(height - (drawing.height_B + top + bottom), 0)
        more_h = np.maximum(width - (drawing.width_B + left + right), 0)
        left, top, right, bottom = left + more_h, top + more_v, right + more_h, bottom + more_v
    down_B, right_B = draw_uniform(drawing.keys_B, at, range(2))
    y_B = down_B * (drawing.height_B + (top + bottom - height + 1))
    x_B = right_B * (drawing.width_B + (left + right - width + 1))
    drawing.window(height, width, y_B, x_B, (left, top, right, bottom), **border)


def draw_center_crop(drawing: Drawing, at: int, height: int, width: int) -> None:
    """The window in the middle; an image that is too small is padded with 0 first."""
    miss_v, miss_h = np.maximum(height - drawing.height_B, 0), np.maximum(width - drawing.width_B, 0)
    # Halves to the even number, as Python's round, which torchvision takes.
    top_B = np.rint((drawing.height_B + miss_v - height) / 2).astype(np.int64)
    left_B = np.rint((drawing.width_B + miss_h - width) / 2).astype(np.int64)
    drawing.window(height, width, top_B, left_B, (miss_h // 2, miss_v // 2, (miss_h + 1) // 2, (miss_v + 1) // 2))


def draw_flip(drawing: Drawing, at: int, vertical: bool, p: float) -> None:
    drawing.mirror(drawing.uniform(at, 0) < p, 1 + vertical)


WINDOWS = (draw_pad, draw_crop, draw_center_crop, draw_flip)


@functools.cache
def _resize_domain(domain: Domain, interpolation: str) -> Domain:
    """Whose arithmetic resizes: torchvision's v2 takes float32 (v1's way) where torch has no fast kernel for uint8."""
    if domain != "v2" or interpolation != "bilinear":
        return domain
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in ("aarch64", "arm64")
    return "v2" if fast else "v1"


def draw_resized_crop(
    drawing: Drawing, at: int, height: int, width: int, scale: Range, ratio: Range, **filters: Any
) -> None:
    low, high = min(ratio), max(ratio)
    height_B, width_B = drawing.height_B, drawing.width_B
    shape_B = width_B / height_B
    h_B = np.where(shape_B < low, np.rint(width_B / low).astype(np.int64), height_B)
    w_B = np.where(shape_B > high, np.rint(height_B * high).astype(np.int64), width_B)
    central = np.stack([(height_B - h_B) // 2, (width_B - w_B) // 2, h_B, w_B])
    drawing.resize(draw_boxes(drawing, at, scale, ratio, central, is_crop=True), height, width, **filters)


def draw_boxes(
    drawing: Drawing,
    at: int,
    scale: Range,
    ratio: Range,
    otherwise: Int64s,
    *,
    is_crop: bool,
    first: int = 0,
    share_B: Any = 1,
) -> Int64s:
    """Draw boxes as torchvision's RandomResizedCrop and RandomErasing do: ten tries to fit into the image.

    ``ratio`` is width / height of a crop, else height / width, and uniform in its logarithm. ``otherwise``, (4, B), is
    taken where no try fits; ``share_B`` boxes share ``scale`` of the area; ``first`` is the number of the first draw.

    Returns:
        int64 (4, B): top, left, height, width in pixels.
    """
    boxes: Int64s = otherwise.copy()
    low, high = np.log(ratio)
    pending = np.arange(len(drawing.keys_B))
    area_B = drawing.height_B * drawing.width_B / share_B
    for tries in (range(1), range(1, TRIES)):  # one is enough for most samples
        H, W, keys = drawing.height_B[pending], drawing.width_B[pending], drawing.keys_B[pending]
        draws = range(first + 4 * tries.start, first + 4 * tries.stop)
        sized_T, shaped_T, down_T, right_T = draw_uniform(keys, at, draws).reshape(-1, 4, len(keys)).swapaxes(0, 1)
        area_T = area_B[pending] * (scale[0] + sized_T * (scale[1] - scale[0]))
        stretch_T = np.exp(low + shaped_T * (high - low))
        w, h = np.rint(np.sqrt([area_T * stretch_T, area_T / stretch_T])).astype(np.int64)
        if is_crop:
            fits = (w > 0) & (w <= W) & (h > 0) & (h <= H)
        else:
            w, h = h, w
            fits = (w < W) & (h < H)
        try_, which = fits.argmax(axis=0), np.flatnonzero(fits.any(axis=0))
        chosen = try_[which], which
        h, w = h[chosen], w[chosen]
        top, left = down_T[chosen] * (H[which] - h + 1), right_T[chosen] * (W[which] - w + 1)
        boxes[:, pending[which]] = top.astype(np.int64), left.astype(np.int64), h, w
        pending = np.delete(pending, which)
        if not len(pending):
            break
    return boxes


def draw_resize(
    drawing: Drawing,
    at: int,
    size: Size | None = None,
    shorter: tuple[int, ...] = (),
    longest: int | None = None,
    by_factor: bool = False,
    bound: str = "",
    **filters: Any,
) -> None:
    """A new size (h, w), or one in which the shorter side has one of several lengths, and the longer at most another.

    ``by_factor``: both sides are multiplied and cut, as RandomShortestSize does. ``bound`` is of the ``"short"`` or the
    ``"long"`` side, whose length is in ``shorter`` then; nothing is enlarged.
    """
    height_B, width_B = drawing.height_B, drawing.width_B
    height, width = size or (0, 0)
    is_drawn = len(shorter) > 1
    if size is None:
        which_B = drawing.integers(at, 0, len(shorter)) if is_drawn else 0
        height, width = _sides(height_B, width_B, np.array(shorter)[which_B], longest, by_factor, bound)
    drawing.resize(None, height, width, is_drawn=is_drawn, **filters)


def _sides(height_B: Int64s, width_B: Int64s, shorter_B: Any, longest: int | None, by_factor: bool, bound: str) -> Any:
    short_B, long_B = np.minimum(height_B, width_B), np.maximum(height_B, width_B)
    wanted_B, most = shorter_B, longest or 1 << 40
    if by_factor:
        factor_B = np.minimum(shorter_B / short_B, most / long_B)
        return (height_B * factor_B).astype(np.int64), (width_B * factor_B).astype(np.int64)
    if bound == "long":
        shorter_B = np.maximum(1, (wanted_B * short_B / long_B).astype(np.int64))
    if bound:
        shorter_B = np.minimum(shorter_B, short_B)
    longer_B = (shorter_B * long_B / short_B).astype(np.int64)
    shorter_B = np.where(longer_B > most, (most * shorter_B / longer_B).astype(np.int64), shorter_B)
    longer_B = np.minimum(longer_B, most).astype(np.int64)
    if bound == "long":
        longer_B = np.minimum(wanted_B, long_B)
    is_wide_B = width_B > height_B
    return np.where(is_wide_B, shorter_B, longer_B), np.where(is_wide_B, longer_B, shorter_B)


# Values


def draw_value(drawing: Drawing, at: int, code: int, domain: Domain, low: float = 0.0, high: float = 0.0) -> None:
    """What needs one number, uniform between two: a factor, a threshold, how many bits."""
    value_B: Any = drawing.uniform(at, 0, low, high) if low != high else low
    drawing.add(code, [int(low)], [value_B], domain)


def draw_grayscale(drawing: Drawing, at: int, channels: int, domain: Domain) -> None:
    """Luma in one or three equal channels, or 0: in as many as there are."""
    if domain != "v1" or drawing.channels > 1:  # v1 leaves tensors of one channel as they are
        drawing.channels = channels or drawing.channels
    drawing.add(Code.GRAYSCALE, [drawing.channels], domain=domain)


def draw_blur(drawing: Drawing, at: int, width: int, height: int, sigma: Range) -> None:
    """Torchvision's GaussianBlur, with one sigma for both axes."""
    drawing.refuse(
        (drawing.width_B <= width // 2) | (drawing.height_B <= height // 2),
        lambda b: (
            f"GaussianBlur with kernel_size=({width}, {height}) needs images of more than {height // 2} x "
            f"{width // 2} px (height x width), but sample {drawing.index_B[b]} has {drawing.height_B[b]} x "
            f"{drawing.width_B[b]}. Use a smaller kernel or a larger resize."
        ),
    )
    sigma_B = drawing.uniform(at, 0, *sigma)
    drawing.add(Code.BLUR, (width, height), (sigma_B, sigma_B))


def draw_permutation(drawing: Drawing, at: int) -> None:
    drawing.add(Code.PERMUTE, drawing.order(at, drawing.channels))


def draw_noise(drawing: Drawing, at: int, mean: float, sigma: float, clip: bool, gain: Fill, low: Fill) -> None:
    """Normal noise; what is there goes from ``low`` over ``gain``: of uint8, or of floats and what Normalize made."""
    each = ((*values, *values[-1:] * 4)[:4] for values in (gain, low))
    drawing.add(Code.NOISE, (clip, 0, 0, 0, *_key_halves(drawing.keys_B, at)), (mean, sigma, *itertools.chain(*each)))


def draw_erase(
    drawing: Drawing, at: int, p: float, scale: Range, ratio: Range, fill: Fill | None, per_pixel: bool, counts: Size
) -> None:
    """Random rectangles.

    ``ratio`` is of height to width; ``fill`` in the units of what is erased, None for normal numbers, which are drawn
    for each channel or even ``per_pixel``; ``counts`` are the fewest and most rectangles, which share the area.
    """
    fewest, most = counts
    mode = 0 if fill is not None else 1 if per_pixel else 2
    erased_B = drawing.uniform(at, 0) < p
    count_B = fewest + drawing.integers(at, 1, most - fewest + 1)

    def rectangle(part: Drawing, number: int) -> None:
        nothing, first = np.zeros((4, len(part.keys_B)), np.int64), 2 + 4 * TRIES * number
        box = draw_boxes(part, at, scale, ratio, nothing, is_crop=False, first=first, share_B=part.of(count_B))
        key = _key_halves(part.keys_B, child(at, number)) if mode else (0, 0)
        part.add(Code.ERASE, (*box, *key, mode), fill=fill or (0,), name="erasing")

    for number in range(most):
        drawing.each((erased_B & (number < count_B), functools.partial(rectangle, number=number)))


def _key_halves(keys_B: UInt64s, at: int) -> Any:
    """The low and the high half of what normal numbers follow from, (2, B)."""
    return (keys_B ^ sample_keys(at, 0, np.zeros(1, np.int64))).view(np.int32).reshape(-1, 2).T


def draw_cast(
    drawing: Drawing, at: int, dtype: str, scaling: str, normalizations: tuple[tuple[Fill, Fill, bool], ...] = ()
) -> None:
    """uint8 to floats. ``scaling`` is how 255 becomes 1: ``"divide"``, ``"multiply"`` or ``"none"``, it does not.

    ``normalizations`` are mean and std, and whether one channel becomes as many as there are means.
    """
    for mean, _, widens in normalizations:
        if len(mean) not in (1, drawing.channels):
            if drawing.channels != 1 or not widens:
                drawing.refuse_channels(f"Normalize has {len(mean)} means")
            drawing.channels = len(mean)
    drawing.add(Code.CAST)


# Ops of ops


def draw_choice(drawing: Drawing, at: int, sequences: tuple[tuple[Op, ...], ...], upto: tuple[float, ...]) -> None:
    """One of several sequences of ops, or none; ``upto``: where in [0, 1) the probability of each ends."""
    chosen_B = np.searchsorted(upto, drawing.uniform(at, 0), side="right")
    parts = [(chosen_B == number, functools.partial(Drawing.draw, ops=ops)) for number, ops in enumerate(sequences)]
    drawing.each(*parts, is_whole=upto[-1] >= 1)


def draw_in_order(drawing: Drawing, at: int, ops: tuple[tuple[Op, ...], ...]) -> None:
    """Several sequences of ops in random order."""
    steps = [functools.partial(Drawing.draw, ops=sequence) for sequence in ops]
    for which_B in drawing.order(at, len(ops)):
        drawing.each(*((which_B == number, step) for number, step in enumerate(steps)))
