"""Rows of a batch mixed with each other, as MixUp and CutMix do: values, and how they are applied.

Shape letters: B batch, S staged samples, C channels, K classes, h w size served.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fastdata.pixels.arrays import Array, Int64s
from fastdata.pixels.core.calls import Blending, describe_output
from fastdata.pixels.core.library import load
from fastdata.pixels.steps import Step, compile_table, flatten_steps

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Shares and boxes by which each row of a batch is mixed with another row, its partner.

    Dimension B may be 1, if the values are the same for all rows.

    Attributes:
        is_mirrored: the partner of row b is row B - 1 - b, as in timm; otherwise the row before it,
            as in torchvision.
        shares: float64 (B, 2), factors of a row's own image and of its partner's; None if images
            are not added.
        boxes: int64 (B, 4), (top, left, bottom, right) of the pixels that are copied from the
            partner; None if no pixels are copied.
        label_shares: float32 (B, 2), factors of the row's own label and of its partner's.
    """

    is_mirrored: bool
    shares: Tensor | None = None
    boxes: Tensor | None = None
    label_shares: Tensor

    @property
    def keeps_images(self) -> bool:
        """True if only labels change."""
        return self.shares is None and self.boxes is None

    def partners_of(self, rows_B: Tensor) -> Tensor:
        """Return the partner's value for each row of a tensor."""
        if self.is_mirrored:
            return rows_B.flip(0)
        return rows_B.roll(1, 0)

    def partners_of_array(self, rows_B: Array) -> Array:
        """Return the partner's value for each row of an array."""
        if self.is_mirrored:
            return rows_B[::-1]
        return np.roll(rows_B, 1)

    def images(self, images_BChw: Tensor) -> Tensor:
        """Return mixed images, on their device. Half floats are rounded once, at the end."""
        partners_BChw = self.partners_of(images_BChw)
        mixed_BChw = images_BChw
        if self.shares is not None:
            wide = torch.promote_types(images_BChw.dtype, torch.float32)
            shares_B2111 = self.shares.to(wide).reshape(-1, 2, 1, 1, 1)
            own_share, partner_share = shares_B2111.unbind(1)
            sum_BChw = partners_BChw * partner_share + images_BChw * own_share
            mixed_BChw = sum_BChw.to(images_BChw.dtype)
        if self.boxes is not None:
            is_partners_B1hw = _is_inside(self.boxes, images_BChw)
            mixed_BChw = torch.where(is_partners_B1hw, partners_BChw, mixed_BChw)
        return mixed_BChw

    def labels(self, labels_B: Tensor, classes: int, off: float, on: float) -> Tensor:
        """Return mixed label vectors, float32 (B, classes), on the device of the labels.

        Args:
            labels_B: class numbers, int64, each in [0, classes). They are not checked here.
            classes: number of classes.
            off: value of all other classes in a label vector, before it is mixed.
            on: value of the label's own class.
        """
        if labels_B.device.type == "cpu":
            mixed = self._labels_on_cpu(labels_B.numpy(), classes, off, on)
            return torch.from_numpy(mixed)
        shape = (len(labels_B), classes)
        own_BK = torch.full(shape, off, dtype=torch.float32, device=labels_B.device)
        own_BK.scatter_(1, labels_B[:, None], on)
        partners_BK = self.partners_of(own_BK)
        own_share_B1, partner_share_B1 = self.label_shares[:, :, None].unbind(1)
        return partners_BK * partner_share_B1 + own_BK * own_share_B1

    def _labels_on_cpu(self, label_B: Array, classes: int, off: float, on: float) -> Array:
        # Only up to three values of a row differ from the rest. torch would make four passes over
        # all values, with threads that compete with the loader's own threads for the cores.
        count = len(label_B)
        values_2 = np.array([off, on], np.float32)
        shares_B2 = self.label_shares.expand(count, 2).numpy()
        own_B2 = shares_B2[:, :1] * values_2
        partner_B2 = shares_B2[:, 1:] * values_2
        # Values of a class: the first index is 1 if it is the partner's class, the second index is
        # 1 if it is the row's own.
        value_B22 = partner_B2[:, :, None] + own_B2[:, None, :]
        partner_label_B = self.partners_of_array(label_B)
        is_same_B = (partner_label_B == label_B).astype(np.int64)
        row_B = np.arange(count)
        mixed_BK = np.zeros((count, classes), np.float32)
        if off:
            mixed_BK += value_B22[:, 0, :1]
        mixed_BK[row_B, partner_label_B] = value_B22[row_B, 1, is_same_B]
        mixed_BK[row_B, label_B] = value_B22[row_B, is_same_B, 1]
        return mixed_BK


def _is_inside(boxes_B4: Tensor, images_BChw: Tensor) -> Tensor:
    """Return a mask (B, 1, h, w) of the pixels of images that are in their boxes."""
    height, width = images_BChw.shape[-2:]
    boxes_B411 = boxes_B4[:, :, None, None]
    top_B11, left_B11, bottom_B11, right_B11 = boxes_B411.unbind(1)
    y_h1 = torch.arange(height, device=images_BChw.device)[:, None]
    x_w = torch.arange(width, device=images_BChw.device)
    is_row_Bh1 = (y_h1 >= top_B11) & (y_h1 < bottom_B11)
    is_column_B1w = (x_w >= left_B11) & (x_w < right_B11)
    is_inside_Bhw = is_row_Bh1 & is_column_B1w
    return is_inside_Bhw[:, None]


class RowBlender:
    """Describes mixed rows for the core, which mixes and converts them in one pass.

    Args:
        cast: the conversion of uint8 to the dtype of the batch; None if rows are not converted.
        dtype: dtype of the batch, such as ``"float32"``.
    """

    def __init__(self, cast: Step | None, dtype: str) -> None:
        self._converts = cast is not None
        plain = Step("cast", {"dtype": dtype.upper(), "scaling": "SCALE_NONE"})
        self._table = compile_table(flatten_steps((cast or plain,)))

    def blending(
        self, blend: Blend, staged_SChw: Array, places_B: Int64s, order_B: Int64s, out: Array
    ) -> Blending:
        """Return records of the mixed rows of a batch, which the core writes to ``out``.

        The core makes sample ``order_B[k]`` as number k, in place ``places_B[order_B[k]]`` of
        ``staged_SChw``. It writes a row as soon as the row's own sample and its partner are made.
        """
        row_B = np.arange(len(order_B))
        partner_B = blend.partners_of_array(row_B)
        number_B = np.empty_like(row_B)
        number_B[order_B] = row_B
        partner_number_B = number_B[partner_B]
        after_B = np.maximum(number_B, partner_number_B)
        address: int = staged_SChw.ctypes.data
        sample_bytes = staged_SChw[0].nbytes
        own_B = address + places_B * sample_bytes
        rows = np.zeros(len(row_B), load().records["Blended"])
        rows["row"] = row_B
        rows["after"] = after_B
        rows["own"] = own_B
        rows["partner"] = own_B[partner_B]
        rows["share"] = 1
        if blend.shares is not None:
            rows["share"], rows["partner_share"] = blend.shares.numpy().T
        if blend.boxes is not None:
            _write_boxes(blend.boxes.numpy(), rows["box"])
        serving = after_B.argsort(kind="stable")
        output = describe_output(self._table, out)
        return Blending(rows[serving], output, converts=self._converts)


def _write_boxes(boxes_B4: Array, records_B: Array) -> None:
    """Write boxes to records ``Box`` of the core."""
    top, left, bottom, right = boxes_B4.T
    records_B["top"] = top
    records_B["left"] = left
    records_B["height"] = bottom - top
    records_B["width"] = right - left


def serving_order(count: int, *, is_mirrored: bool) -> tuple[Int64s, Int64s]:
    """Return an order in which samples are made, and a place for each; places are used again.

    In this order each sample comes next to its partner, so both are still in their places when
    their row is written.
    """
    row_B = np.arange(count)
    if is_mirrored:
        # From both ends of the batch.
        ends_B2 = np.stack([row_B, row_B[::-1]], axis=1)
        order_B = ends_B2.ravel()[:count]
        is_second_half_B = 2 * row_B >= count
        return order_B, is_second_half_B.astype(np.int64)
    # Two places in turns. Row 0 mixes the first sample with the last one, so the first sample
    # keeps a place of its own until the end.
    places_B = 1 + row_B % 2
    places_B[:1] = 0
    return row_B, places_B
