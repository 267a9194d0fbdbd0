"""RandomResizedCrop: which box, and resizing it as torchvision does.

Shape letters: B batch, C channels, H W size of the source, h w size served.
"""

from __future__ import annotations

import functools
import math
import platform

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fastdata.batchops.pixels import Bytes
from fastdata.batchops.windows import Length
from fastdata.draws import UInt64s, draw_integers, draw_uniform
from fastdata.plan.ops import RandomResizedCrop

__all__ = ["BANDS_APART", "PIL_FILTERS", "draw_boxes", "pillow_chooses_order", "resize_into", "resizes_in_float"]

Int64s = npt.NDArray[np.int64]

TRIES = 10
PIL_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "nearest-exact": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
    "lanczos": Image.Resampling.LANCZOS,
}
BANDS_APART = (1, 3)
"""Channel counts whose bands Pillow resizes independently; it multiplies the others by their alpha first."""


def draw_boxes(op: RandomResizedCrop, height_B: Length, width_B: Length, keys_B: UInt64s) -> Int64s:
    """Draw boxes as torchvision's ``RandomResizedCrop.get_params``: ten tries, then the largest central box.

    Returns:
        int64 (4, B): top, left, height, width in pixels, inside of the image.
    """
    heights = np.broadcast_to(np.asarray(height_B, np.int64), keys_B.shape)
    widths = np.broadcast_to(np.asarray(width_B, np.int64), keys_B.shape)
    boxes = _central_boxes(op, heights, widths)
    pending = np.arange(len(keys_B))
    for attempt in range(TRIES):
        H, W, keys = heights[pending], widths[pending], keys_B[pending]
        h, w = _draw_shapes(op, H * W, keys, 4 * attempt)
        fits = (w > 0) & (w <= W) & (h > 0) & (h <= H)
        H, W, keys, h, w = H[fits], W[fits], keys[fits], h[fits], w[fits]
        top = draw_integers(keys, op.position, 4 * attempt + 2, H - h + 1)
        left = draw_integers(keys, op.position, 4 * attempt + 3, W - w + 1)
        boxes[:, pending[fits]] = top, left, h, w
        pending = pending[~fits]
        if not len(pending):
            break
    return boxes


def resize_into(crop_Chw: Bytes, op: RandomResizedCrop, out_Chw: Bytes) -> None:
    """Resize a box to the op's size, with the pixels of torchvision's ``resized_crop`` in the op's domain."""
    if crop_Chw.shape[1:] == out_Chw.shape[1:]:
        out_Chw[...] = crop_Chw
    elif op.domain == "pil":
        _resize_pil(crop_Chw, op, out_Chw)
    else:
        _resize_tensor(crop_Chw, op, out_Chw)


def resizes_in_float(op: RandomResizedCrop) -> bool:
    """Whether torchvision converts tensors to float32 before it resizes them."""
    return op.domain == "v1" or (op.interpolation == "bilinear" and not _has_uint8_bilinear())


def _draw_shapes(op: RandomResizedCrop, area_B: Int64s, keys_B: UInt64s, draw: int) -> tuple[Int64s, Int64s]:
    low, high = op.scale
    target_area = area_B * (low + draw_uniform(keys_B, op.position, draw) * (high - low))
    log_low, log_high = math.log(op.ratio[0]), math.log(op.ratio[1])
    ratio = np.exp(log_low + draw_uniform(keys_B, op.position, draw + 1) * (log_high - log_low))
    w = np.rint(np.sqrt(target_area * ratio)).astype(np.int64)
    h = np.rint(np.sqrt(target_area / ratio)).astype(np.int64)
    return h, w


def _central_boxes(op: RandomResizedCrop, heights: Int64s, widths: Int64s) -> Int64s:
    low, high = min(op.ratio), max(op.ratio)
    ratio = widths / heights
    h = np.where(ratio < low, np.rint(widths / low).astype(np.int64), heights)
    w = np.where(ratio > high, np.rint(heights * high).astype(np.int64), widths)
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w])


def _resize_pil(crop_Chw: Bytes, op: RandomResizedCrop, out_Chw: Bytes) -> None:
    size, resample = (op.width, op.height), PIL_FILTERS[op.interpolation]
    if crop_Chw.shape[0] not in BANDS_APART:
        image = Image.fromarray(np.ascontiguousarray(crop_Chw.transpose(1, 2, 0)))
        out_Chw[...] = np.asarray(image.resize(size, resample)).transpose(2, 0, 1)
        return
    # Cropped first: with resize(box=...) the filter would reach beyond the edges of the box.
    for plane, out in zip(crop_Chw, out_Chw, strict=True):
        out[...] = np.asarray(Image.fromarray(np.ascontiguousarray(plane)).resize(size, resample))


def _resize_tensor(crop_Chw: Bytes, op: RandomResizedCrop, out_Chw: Bytes) -> None:
    """Resize a tensor as torchvision does: v1 in float32, v2 in uint8 where torch has a fast kernel for it."""
    smooth = op.interpolation in ("bilinear", "bicubic")
    source = torch.from_numpy(np.require(crop_Chw, requirements=["C", "W"]))[None]  # torch warns of memory only read
    in_float = resizes_in_float(op)
    result = torch.nn.functional.interpolate(
        source.to(torch.float32) if in_float else source,
        size=[op.height, op.width],
        mode=op.interpolation,
        align_corners=False if smooth else None,
        antialias=op.antialias and smooth,
    )
    if in_float:
        result = result.clamp(0, 255).round().to(torch.uint8)
    out_Chw[...] = result[0].numpy()


@functools.lru_cache(maxsize=1)
def pillow_chooses_order() -> bool:
    """Whether this Pillow resizes columns first where more than twice as much height as width is lost.

    Older ones, up to 12 at least, always resize rows first. Each pass rounds to uint8, so it shows in the last bit.
    ``horizontal_first`` in Pillow's src/libImaging/Resample.c is the source of the rule.
    """
    probe = Image.fromarray((np.arange(48) ** 2 * 37 % 256).astype(np.uint8).reshape(12, 4))
    whole, columns_first, rows_first = (
        image.resize((3, 3), Image.Resampling.BILINEAR).tobytes()
        for image in (probe, *(probe.resize(size, Image.Resampling.BILINEAR) for size in ((4, 3), (3, 12))))
    )
    return whole == columns_first != rows_first


@functools.lru_cache(maxsize=1)
def _has_uint8_bilinear() -> bool:
    """Tell what torchvision's ``_do_native_uint8_resize_on_cpu`` tells."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in ("aarch64", "arm64")
