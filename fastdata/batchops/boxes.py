"""RandomResizedCrop on whole batches that lie on a device: two passes of weighted sums, and no loop over samples.

Shape letters: N stored samples, B batch, C channels, H W size before, h w size after, D draws, K taps, l length of a
resized line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fastdata.batchops.kernels import Constants, WindowKernel, take
from fastdata.batchops.resample import draw_boxes, pillow_chooses_order
from fastdata.batchops.weights import Arithmetic, LineWeights, weigh_lines
from fastdata.batchops.windows import Size
from fastdata.draws import UInt64s
from fastdata.plan.ops import RandomResizedCrop

__all__ = ["BoxKernel"]

Tensor = torch.Tensor
Int64s = npt.NDArray[np.int64]

BOX_DRAWS = 5


class BoxKernel:
    """RandomResizedCrop, and what mirrors or crops its result, in the same passes.

    The weights of a line depend on nothing but the length of the box there, so tables of them are constants, and each
    sample looks its own up. First all rows of the image are resized, then the columns of that: for each tap a gather,
    and a multiplication that adds it to a sum of 32 bits, then a shift. In bytes moved for each pixel of H x w, and
    again of h x w: 11 for a tap and 1 more in all, or 9 for a filter with negative weights. For 256 x 256 to 224 x 224,
    with 3 taps, that is 34 * (H * w + h * w) * C bytes a sample.

    Pillow begins with the columns of boxes that shrink mostly in height. Such samples are turned before and turned back
    afterwards, so that all take the same road: 3 bytes more for each pixel of H x W and of h x w.

    Args:
        op: what to do.
        size: (H, W).
        after: a stage without borders that follows, or None.
    """

    def __init__(self, op: RandomResizedCrop, size: Size, after: WindowKernel | None) -> None:
        self._op, self._stored, self._after = op, size, after
        self.size: Size = after.size if after else (op.height, op.width)
        self.draws = BOX_DRAWS + (after.draws if after else 0)
        self._along_rows = _Axis(weigh_lines(op, size[1], op.width), size[1])
        self._along_columns = _Axis(weigh_lines(op, size[0], op.height), size[0])
        self._turns = op.domain == "pil" and size[0] > op.height and pillow_chooses_order()
        self._constants = Constants(rows=np.arange(op.height), columns=np.arange(op.width))

    def draw(self, keys_B: UInt64s, index_B: Int64s) -> list[Int64s]:
        """Top, left, height, width and whether to turn it, then what the stage after it draws."""
        box = draw_boxes(self._op, *self._stored, keys_B)
        shrinks_v, shrinks_h = box[2] - self._op.height, box[3] - self._op.width
        turned_B = self._turns & (shrinks_v > 0) & (shrinks_v > 2 * shrinks_h)
        return [*box, turned_B.astype(np.int64), *(self._after.draw(keys_B, index_B) if self._after else ())]

    def run(self, stored_NCHW: Tensor, index_B: Tensor | None, draws_DB: Tensor, channels_last: bool) -> Tensor:
        """See ``Kernel``."""
        constants = self._constants.on(stored_NCHW.device)
        row_Bh, column_Bw = constants["rows"][None], constants["columns"][None]
        if self._after:
            row_Bh, column_Bw = self._after.positions(draws_DB[BOX_DRAWS:])
        top_B, left_B, height_B, width_B, turned_B = draws_DB[:BOX_DRAWS]
        across = self._along_rows.taps(left_B, width_B, column_Bw)
        down = self._along_columns.taps(top_B, height_B, row_Bh)
        if across.arithmetic == "index":
            return take(stored_NCHW, index_B, down.pixels[0], across.pixels[0], channels_last)
        if not self._turns:
            return _resize(stored_NCHW, index_B, across, down, channels_last)
        turned_B = turned_B.to(torch.bool)
        stored_BCHW = stored_NCHW if index_B is None else stored_NCHW.index_select(0, index_B)
        first, second = _choose(turned_B, down, across), _choose(turned_B, across, down)
        square = _resize(_turn(stored_BCHW, turned_B), None, first, second, False)
        return _turn(square, turned_B)[..., : self.size[0], : self.size[1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Taps:
    """Which pixels make up each pixel of a resized line, and how; l is its length.

    Attributes:
        arithmetic: see ``LineWeights``.
        pixels: int64 (K, B, l).
        weights: int32 or float32 (K, B, l).
        half: (B,), where the sum begins, so that what is cut off rounds it.
        bits: int32 (B,), to cut off.
        overshoots: whether what is left may lie outside of 0 to 255.
    """

    arithmetic: Arithmetic
    pixels: Tensor
    weights: Tensor
    half: Tensor
    bits: Tensor
    overshoots: bool

    def weigh(self, taps: Iterable[Tensor], weights: Tensor, *, is_last: bool, channels_last: bool = False) -> Tensor:
        """Sum up what was gathered for each tap by its weights, which broadcast to it."""
        total = self.half[:, None, None, None]
        for number, (tap, weight) in enumerate(zip(taps, weights, strict=True)):
            total = total.addcmul_(tap, weight) if number else torch.addcmul(total, tap, weight)
        if self.arithmetic == "float" and not is_last:
            return total
        layout = torch.channels_last if channels_last else torch.contiguous_format
        if self.arithmetic == "float":
            return total.round_().clamp_(0, 255).to(torch.uint8, memory_format=layout)
        # Narrowed on the way to memory; what may lie outside of uint8 does not lie outside of int16.
        narrow = torch.int16 if self.overshoots else torch.uint8
        shifted = torch.empty(total.shape, dtype=narrow, device=total.device, memory_format=layout)
        torch.bitwise_right_shift(total, self.bits[:, None, None, None], out=shifted)
        return shifted.clamp_(0, 255).to(torch.uint8) if self.overshoots else shifted


class _Axis:
    """The weights of one axis, on any device."""

    def __init__(self, lines: LineWeights, stored_px: int) -> None:
        self._arithmetic, self._last_px = lines.arithmetic, stored_px - 1
        self._resized_px = lines.starts.shape[1]
        self._overshoots = lines.overshoots
        self._constants = Constants(
            starts=lines.starts.reshape(-1),
            weights=lines.weights.reshape(len(lines.weights), -1),
            taps=np.arange(len(lines.weights))[:, None, None],
            half=lines.half,
            bits=lines.bits,
        )

    def taps(self, first_B: Tensor, length_B: Tensor, position_Bl: Tensor) -> _Taps:
        """Look up the taps for those positions of the resized lines, of boxes that begin at ``first``."""
        constants = self._constants.on(first_B.device)
        place_Bl = (length_B * self._resized_px)[:, None] + position_Bl
        start_Bl = constants["starts"][place_Bl] + first_B[:, None]
        return _Taps(
            arithmetic=self._arithmetic,
            pixels=(start_Bl + constants["taps"]).clamp_(max=self._last_px),
            weights=constants["weights"][:, place_Bl],
            half=constants["half"][length_B],
            bits=constants["bits"][length_B],
            overshoots=self._overshoots,
        )


def _resize(stored_NCHW: Tensor, index_B: Tensor | None, first: _Taps, second: _Taps, channels_last: bool) -> Tensor:
    """Resize every row, then the columns of that."""
    every_row = torch.arange(stored_NCHW.shape[2], device=stored_NCHW.device).expand(len(first.bits), -1)
    wide_BCHw = first.weigh(
        (take(stored_NCHW, index_B, every_row, column_Bw) for column_Bw in first.pixels),
        first.weights[:, :, None, None, :],
        is_last=False,
    )
    return second.weigh(
        (_take_rows(wide_BCHw, row_Bh) for row_Bh in second.pixels),
        second.weights[:, :, None, :, None],
        is_last=True,
        channels_last=channels_last,
    )


def _turn(batch_BCHW: Tensor, turned_B: Tensor) -> Tensor:
    """Exchange rows and columns of some samples; all become squares."""
    height, width = batch_BCHW.shape[2:]
    side = max(height, width)
    if height != width:
        batch_BCHW = torch.nn.functional.pad(batch_BCHW, (0, side - width, 0, side - height))
    # The result lies in memory as what stands first.
    return torch.where(~turned_B[:, None, None, None], batch_BCHW, batch_BCHW.transpose(2, 3))


def _choose(turned_B: Tensor, turned: _Taps, straight: _Taps) -> _Taps:
    """One's taps for samples that are turned, the other's for the rest, where neither is shorter."""
    most_K = max(len(turned.pixels), len(straight.pixels))
    most_l = max(turned.pixels.shape[2], straight.pixels.shape[2])

    def widen(taps_KBl: Tensor) -> Tensor:
        return torch.nn.functional.pad(taps_KBl, (0, most_l - taps_KBl.shape[2], 0, 0, 0, most_K - len(taps_KBl)))

    def choose(one_KBl: Tensor, other_KBl: Tensor) -> Tensor:
        return torch.where(turned_B[:, None], widen(one_KBl), widen(other_KBl))

    return replace(
        straight,
        overshoots=turned.overshoots or straight.overshoots,
        pixels=choose(turned.pixels, straight.pixels),
        weights=choose(turned.weights, straight.weights),
    )


def _take_rows(source_BCHw: Tensor, row_Bh: Tensor) -> Tensor:
    """Gather whole rows."""
    count, channels, height, width = source_BCHw.shape
    first = torch.arange(0, count * channels * height, height, device=source_BCHw.device)
    lines = first.view(count, channels, 1) + row_Bh[:, None, :]
    return source_BCHw.view(-1, width).index_select(0, lines.view(-1)).view(*lines.shape, width)
