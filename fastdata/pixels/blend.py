"""Rows of a batch mixed with each other, as MixUp and CutMix do: values, and how they are applied.

Shape letters: B batch, S staged samples, C channels, h w size served.
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
    """Shares and boxes by which each row of a batch is mixed with its partner, another row.

    A dimension B may be 1, if it is the same for all rows.

    Attributes:
        is_mirrored: the partner of row b is row B - 1 - b, as in timm; otherwise the row before it,
            as in torchvision.
        shares: float64 (B, 2), what a row's own image and its partner's are multiplied by; None if
            images are not added.
        boxes: int64 (B, 4), (top, left, bottom, right) of the pixels that are the partner's; None
            if no pixels are.
        label_shares: float32 (B, 2), what both labels are multiplied by.
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
        return rows_B.flip(0) if self.is_mirrored else rows_B.roll(1, 0)

    def images(self, images_BChw: Tensor) -> Tensor:
        """Return mixed images, on their device. Half floats are rounded once, at the end."""
        partners_BChw = self.partners_of(images_BChw)
        mixed = images_BChw
        if self.shares is not None:
            wide = torch.promote_types(images_BChw.dtype, torch.float32)
            own, other = self.shares.to(wide)[:, :, None, None, None].unbind(1)
            mixed = (partners_BChw * other + images_BChw * own).to(images_BChw.dtype)
        if self.boxes is not None:
            mixed = torch.where(self._is_partners(images_BChw), partners_BChw, mixed)
        return mixed

    def _is_partners(self, images_BChw: Tensor) -> Tensor:
        """Return a mask (B, 1, h, w) of the pixels in the boxes."""
        assert self.boxes is not None
        height, width = images_BChw.shape[-2:]
        top, left, bottom, right = self.boxes[:, :, None].unbind(1)
        y_h = torch.arange(height, device=images_BChw.device)
        x_w = torch.arange(width, device=images_BChw.device)
        is_row = (y_h >= top) & (y_h < bottom)
        is_column = (x_w >= left) & (x_w < right)
        return is_row[:, None, :, None] & is_column[:, None, None, :]

    def labels(self, labels_B: Tensor, classes: int, off: float, on: float) -> Tensor:
        """Return float32 (B, classes): labels as ``on`` among ``off``, mixed, on their device."""
        if labels_B.device.type == "cpu":
            return torch.from_numpy(self._labels_on_cpu(labels_B.numpy(), classes, off, on))
        options = {"dtype": torch.float32, "device": labels_B.device}
        each = torch.full((len(labels_B), classes), off, **options)  # type: ignore[call-overload]
        each.scatter_(1, labels_B[:, None], on)
        own, other = self.label_shares[:, :, None].unbind(1)
        mixed: Tensor = self.partners_of(each) * other + each * own
        return mixed

    def _labels_on_cpu(self, label_B: Array, classes: int, off: float, on: float) -> Array:
        # One to three values of a row differ. torch would make four passes over all of them, by
        # threads that a loader's own threads take the cores of.
        values = np.array([off, on], np.float32)
        own_B1, other_B1 = self.label_shares.expand(len(label_B), 2).numpy().T[:, :, None]
        # Of a class, by whether it is the partner's and whether it is the row's own.
        value_B22 = (values[:, None] * other_B1[:, None]) + (values * own_B1)[:, None]
        partner_B = label_B[::-1] if self.is_mirrored else np.roll(label_B, 1)
        is_same_B = (partner_B == label_B).astype(np.int64)
        row_B = np.arange(len(label_B))
        made = np.zeros((len(label_B), classes), np.float32)
        if off:
            made += value_B22[:, 0, :1]
        made[row_B, partner_B] = value_B22[row_B, 1, is_same_B]
        made[row_B, label_B] = value_B22[row_B, is_same_B, 1]
        return made


class RowBlender:
    """Mixed rows of a batch for the core, which writes them in the same pass as it converts them.

    Args:
        cast: the conversion of uint8 to what is served; None for rows that are served as they are.
        dtype: of the batch, such as ``"float32"``.
    """

    def __init__(self, cast: Step | None, dtype: str) -> None:
        self._converts = cast is not None
        plain = Step("cast", {"dtype": dtype.upper(), "scaling": "SCALE_NONE"})
        self._table = compile_table(flatten_steps((cast or plain,)))

    def blending(
        self, blend: Blend, staged_SChw: Array, places_B: Int64s, order_B: Int64s, out: Array
    ) -> Blending:
        """Return the rows of a batch, made of samples that are staged in the order of ``out``.

        Sample ``order_B[k]`` is served as number k, to ``places_B[order_B[k]]``; a row is written
        once its own sample and its partner's are there.
        """
        row_B = np.arange(len(order_B))
        partner_B = row_B[::-1] if blend.is_mirrored else np.roll(row_B, 1)
        number_B = np.empty_like(row_B)
        number_B[order_B] = row_B
        after_B = np.maximum(number_B, number_B[partner_B])
        rows = np.zeros(len(row_B), load().records["Blended"])
        address: int = staged_SChw.ctypes.data
        own_B = address + places_B * staged_SChw[0].nbytes
        rows["row"] = row_B
        rows["after"] = after_B
        rows["own"] = own_B
        rows["partner"] = own_B[partner_B]
        rows["share"] = 1
        if blend.shares is not None:
            rows["share"], rows["partner_share"] = blend.shares.numpy().T
        if blend.boxes is not None:
            top, left, bottom, right = blend.boxes.numpy().T
            box = rows["box"]
            box["top"] = top
            box["left"] = left
            box["height"] = bottom - top
            box["width"] = right - left
        rows = rows[after_B.argsort(kind="stable")]
        return Blending(rows, describe_output(self._table, out), converts=self._converts)


def serving_order(count: int, *, is_mirrored: bool) -> tuple[Int64s, Int64s]:
    """Return an order to serve a batch in, and the place of each sample among few that are reused.

    The samples of a row are then at their places when it is written: each sample next to its
    partner.
    """
    row_B = np.arange(count)
    if is_mirrored:
        # From both ends of the batch.
        order_B = np.stack([row_B, row_B[::-1]], 1).ravel()[:count]
        return order_B, (2 * row_B >= count).astype(np.int64)
    # Two places in turns; row 0, which is made of the first and the last sample, waits for that.
    return row_B, np.where(row_B, 1 + row_B % 2, 0)
