"""What v2 does to the boxes beside images: their ops draw the same for boxes as for images, and move them here.

Coordinates are torchvision's in the format XYXY, to the rounding of float32 in others; whole numbers as CXCYWH may be
off by 1. A RandomCrop that leaves the image as it is cuts off what lies outside of it, too; and a CenterCrop that pads
moves boxes with their pixels, where torchvision's rounds them otherwise.

Shape letters: B batch, M boxes of all its samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastdata.draws import sample_keys
from fastdata.shared import SampleTable
from fastdata.transforms.ops import Borders, Drawing, Flags, Int64s, Op

FORMATS = ("XYXY", "XYWH", "CXCYWH")


class BoxDrawing(Drawing):
    """Moves the boxes of a batch, or of some of its samples, as its ops draw.

    Args:
        boxes_M4: changed in place.
        format: XYXY, XYWH or CXCYWH.
        owner_M: the place in the batch of each box's sample, in order.
        is_clamped: whether what is cut off of an image is cut off of its boxes.
    """

    def __init__(self, *drawing: Any, boxes_M4: Any, owner_M: Int64s, format: str, is_clamped: bool) -> None:
        super().__init__(*drawing)
        self._boxes_M4, self._owner_M, self.format, self._is_clamped = boxes_M4, owner_M, format, is_clamped
        self.is_kept_M = np.ones(len(owner_M), np.bool_)

    def add(self, *_: Any, **__: Any) -> None:
        """Do nothing: of a step that moves nothing."""

    def window(
        self, height: Any, width: Any, top: Any = 0, left: Any = 0, borders: Borders = (0, 0, 0, 0), *_: Any, **__: Any
    ) -> None:
        super().window(height, width, top, left, borders)
        down, right = (np.asarray(n).astype(np.int64) for n in (top, left))  # as the core's records hold them
        self._cut(down - borders[1], right - borders[0], height, width)

    def mirror(self, flipped_B: Flags, bit: int) -> None:
        which_M, place_M = self._mine()
        corners_M4, is_flipped_M = self.corners()[which_M], flipped_B[place_M]
        low, side_B = (0, self.width_B) if bit == 1 else (1, self.height_B)
        mirrored_M2 = side_B[place_M, None].astype(corners_M4.dtype) - corners_M4[:, [low + 2, low]]
        corners_M4[:, [low, low + 2]] = np.where(is_flipped_M[:, None], mirrored_M2, corners_M4[:, [low, low + 2]])
        self._put(which_M, corners_M4)

    def resize(self, box: Int64s | None, height: Any, width: Any, **filters: Any) -> None:
        before_h, before_w = self.height_B, self.width_B
        if box is not None:
            top, left, before_h, before_w = box
            self._cut(top, left, before_h, before_w)
        super().resize(box, height, width, **filters)
        which_M, place_M = self._mine()
        ratio_M2 = np.stack([self.width_B / before_w, self.height_B / before_h], axis=1)[place_M].astype(np.float32)
        floats = self._boxes_M4.dtype if self._boxes_M4.dtype.kind == "f" else np.float32
        self._boxes_M4[which_M] = self._boxes_M4[which_M].astype(floats) * np.tile(ratio_M2, 2)

    def clamp(self) -> None:
        self._cut(0, 0, self.height_B, self.width_B)

    def sanitize(self, min_size: float, min_area: float) -> None:
        """As ``_get_sanitize_bounding_boxes_mask`` of torchvision/transforms/v2/functional/_misc.py."""
        corners_4M = self.corners().T
        x1_M, y1_M, x2_M, y2_M = corners_4M
        w_M, h_M = x2_M - x1_M, y2_M - y1_M
        height_M, width_M = self.height_B[self._owner_M], self.width_B[self._owner_M]
        self.is_kept_M &= (w_M >= min_size) & (h_M >= min_size) & (w_M * h_M >= min_area)
        self.is_kept_M &= (corners_4M >= 0).all(axis=0) & (corners_4M[::2] <= width_M).all(axis=0)
        self.is_kept_M &= (corners_4M[1::2] <= height_M).all(axis=0)

    def convert(self, format: str) -> None:
        corners_M4, self.format = self.corners(), format
        self._put(slice(None), corners_M4)

    def corners(self) -> npt.NDArray[Any]:
        """All boxes as x1, y1, x2, y2."""
        corners_M4: npt.NDArray[Any] = self._boxes_M4.copy()
        position_M2, size_M2 = corners_M4[:, :2], corners_M4[:, 2:]
        if self.format == "CXCYWH":
            position_M2 -= _half(size_M2)
        if self.format != "XYXY":
            size_M2 += position_M2
        return corners_M4

    def _put(self, which_M: Any, corners_M4: npt.NDArray[Any]) -> None:
        position_M2, size_M2 = corners_M4[:, :2], corners_M4[:, 2:]
        if self.format != "XYXY":
            size_M2 -= position_M2
        if self.format == "CXCYWH":
            position_M2 += _half(size_M2)
        self._boxes_M4[which_M] = corners_M4

    def _mine(self) -> tuple[Any, Int64s]:
        """Which boxes are of samples in this part, and the place of each one's sample in it."""
        if isinstance(self._rows, slice):
            return self._rows, self._owner_M
        which_M = np.flatnonzero(np.isin(self._owner_M, self._rows))
        return which_M, np.searchsorted(self._rows, self._owner_M[which_M])

    def _cut(self, top: Any, left: Any, height: Any, width: Any) -> None:
        which_M, place_M = self._mine()
        corners_M4 = self.corners()[which_M]
        for low, start, side in ((0, left, width), (1, top, height)):
            start_M1, side_M1 = (np.broadcast_to(n, len(self.keys_B))[place_M, None] for n in (start, side))
            moved_M2 = corners_M4[:, [low, low + 2]] - start_M1.astype(corners_M4.dtype)
            if self._is_clamped:
                moved_M2 = np.clip(moved_M2, 0, side_M1)
            corners_M4[:, [low, low + 2]] = moved_M2
        self._put(which_M, corners_M4)


def _half(size_M2: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return size_M2 / 2 if size_M2.dtype.kind == "f" else size_M2 // 2


def draw_clamp(drawing: BoxDrawing, at: int) -> None:
    drawing.clamp()


def draw_sanitize(drawing: BoxDrawing, at: int, min_size: float, min_area: float, with_labels: bool) -> None:
    drawing.sanitize(min_size, min_area)


def draw_convert(drawing: BoxDrawing, at: int, format: str) -> None:
    drawing.convert(format)


class BoxProgram:
    """Targets of a batch, whose boxes are moved along with its images.

    Args:
        ops: of v2's steps, as read for boxes.
        table: of boxes, or of dicts one of which is boxes, that ``boxes_obstacle`` has nothing against.
        is_pure: whether boxes become plain tensors.
    """

    def __init__(self, ops: tuple[Op, ...], table: SampleTable, *, is_pure: bool) -> None:
        self._ops, self._table, self._is_pure = ops, table, is_pure
        self._place, self._boxes = _boxes_in(table)
        sifts = any(op.draw is draw_sanitize and op.arguments["with_labels"] for op in ops)
        self._labels = self._find_labels() if sifts else None

    def _find_labels(self) -> Any:
        """As ``_find_labels_default_heuristic`` of torchvision/transforms/v2/_utils.py."""
        places = {
            str(key): place for key, place in zip(self._table.target_keys, self._table.target_places, strict=True)
        }
        exact = [key for key in places if key.lower() == "labels"] or [key for key in places if "label" in key.lower()]
        if not exact or places[exact[0]].target_kind not in ("rows", "tensor"):
            raise ValueError(
                f"SanitizeBoundingBoxes needs a tensor with 'label' in its key, but found {list(places)}. "
                "labels_getter=None is for boxes without labels."
            )
        return exact[0]

    def run(self, index_B: Int64s, visits_B: Int64s, seed: int, height_B: Int64s, width_B: Int64s) -> list[Any]:
        """Move boxes by what is drawn for images of these sizes.

        Raises:
            ValueError: there is not one label for each box.
        """
        boxes, keys_B = self._boxes, sample_keys(seed, visits_B, index_B)
        rows_M4, count_B = boxes.rows_of(index_B)
        owner_M = np.repeat(np.arange(len(index_B)), count_B)
        is_clamped = getattr(boxes.like, "clamping_mode", "soft") is not None
        how = {"format": boxes.like.format.name, "is_clamped": is_clamped}
        drawing = BoxDrawing(keys_B, index_B, height_B, width_B, 1, boxes_M4=rows_M4, owner_M=owner_M, **how)
        drawing.draw(self._ops)
        kept_B = np.bincount(owner_M, drawing.is_kept_M, len(index_B)).astype(np.int64)
        canvas_B2 = np.stack([drawing.height_B, drawing.width_B], axis=1)
        moved = boxes.as_boxes(rows_M4[drawing.is_kept_M], kept_B, canvas_B2, type(boxes.like.format)[drawing.format])
        if self._is_pure:
            moved = [each.as_subclass(torch.Tensor) for each in moved]
        if boxes is self._table:
            return moved
        targets = self._table.targets_of(index_B, {self._place: moved})
        if self._labels is not None:
            each_kept = np.split(drawing.is_kept_M, np.cumsum(count_B)[:-1])
            for index, target, is_kept in zip(index_B.tolist(), targets, each_kept, strict=True):
                labels = target[self._labels]
                if len(labels) != len(is_kept):
                    found = f"sample {index} has {len(is_kept)} boxes and {len(labels)} {self._labels}"
                    raise ValueError(f"{found}; SanitizeBoundingBoxes needs as many.")
                if not is_kept.all():
                    target[self._labels] = labels[torch.from_numpy(is_kept)]
        return targets


def _boxes_in(table: SampleTable) -> tuple[Any, SampleTable]:
    if table.target_kind == "boxes":
        return None, table
    places = zip(table.target_keys, table.target_places, strict=True)
    return next((key, place) for key, place in places if place.target_kind == "boxes")


def boxes_obstacle(table: Any, shapes: npt.NDArray[Any] | None = None) -> str | None:
    """Why boxes among targets are not moved along with images of these shapes in batches; None if they are."""
    kinds = [table.target_kind] if isinstance(table, SampleTable) else []  # as chunks have none
    kinds = [place.target_kind for place in table.target_places] if kinds == ["dict"] else kinds
    if kinds.count("boxes") != 1:
        return (
            "only images with a tv_tensors.Mask are served, or with one tv_tensors.BoundingBoxes, in dicts of the same "
            "keys and of one format and dtype throughout"
        )
    if table.key_of_images is not None:
        return f"targets hold other images, or tensors of several kinds, as {table.key_of_images!r}"
    boxes = _boxes_in(table)[1]
    like = boxes.like
    if shapes is None:
        return "boxes are moved along only with images whose sizes are known: use fill='eager'"
    wrong = np.flatnonzero((boxes.canvas_of(np.arange(len(table))) != shapes[:, -2:]).any(axis=1))
    if len(wrong):
        return f"boxes of sample {wrong[0]} lie on a canvas of another size than its image"
    return None if like.format.name in FORMATS and like.ndim == 2 else f"boxes are of format {like.format.name}"
