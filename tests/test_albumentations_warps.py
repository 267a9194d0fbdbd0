"""albumentations' warps: the pixels of the installed OpenCV, and albumentations' draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from albumentations_cases import Served, albumentations, images, refusal_of, serve
from fastdata import CachedDataset, DataLoader
from fastdata.pixels import opencv_warps
from fastdata.pixels.state import UnknownStepError

A = albumentations
cv2 = pytest.importorskip("cv2")

SIZES = ((40, 31), (33, 147), (6, 5), (1, 9), (19, 16))
BORDERS = (0, 1, 2, 3, 4)
NEAREST, LINEAR, AREA = 0, 1, 3


def fixed(**changes: Any) -> Any:
    """Return an Affine that draws the same numbers each time."""
    steady: dict[str, Any] = {
        "rotate": (23.0, 23.0),
        "scale": {"x": (1.2, 1.2), "y": (0.8, 0.8)},
        "translate_px": {"x": (3, 3), "y": (-2, -2)},
        "shear": {"x": (7.0, 7.0), "y": (-4.0, -4.0)},
    }
    return A.Affine(**{**steady, **changes}, p=1)


def shift_scale_rotate(**arguments: Any) -> Any:
    with pytest.warns(UserWarning, match="special case of Affine"):
        return A.ShiftScaleRotate(**arguments, p=1)


STEADY = {
    "Affine": lambda: fixed(),
    "Affine, filled": lambda: fixed(fill=117.0),
    "Affine, filled by one value": lambda: fixed(fill=(117.0,)),
    "Pad, filled by one value": lambda: A.Pad(3, fill=(117.0,), p=1),
    "Affine, area": lambda: fixed(interpolation=AREA, scale=(0.3, 0.3)),
    "Affine, in a larger frame": lambda: fixed(fit_output=True, fill=9.0),
    "Affine, in parts of the side": lambda: fixed(
        translate_px=None, translate_percent={"x": (-0.31, -0.31), "y": (0.17, 0.17)}
    ),
    "Affine, far": lambda: fixed(scale=(0.11, 0.11), border_mode=4),
    "Affine, further than 16 bits": lambda: fixed(scale=(0.0007, 0.0007), border_mode=3),
    "Affine, one quarter": lambda: A.Affine(rotate=(90, 90), fit_output=True, p=1),
    "Affine, nothing": lambda: A.Affine(fit_output=True, p=1),
    "Rotate": lambda: A.Rotate((-61, -61), border_mode=2, p=1),
    "Rotate, cropped": lambda: A.Rotate((17, 17), crop_border=True, p=1),
    "Rotate, half cropped": lambda: A.Rotate((-45, -45), crop_border=True, p=1),
    "SafeRotate": lambda: A.SafeRotate((33, 33), border_mode=0, fill=200.0, p=1),
    **{f"border {mode}": lambda mode=mode: fixed(border_mode=mode) for mode in BORDERS},
    **{
        f"nearest, border {mode}": lambda mode=mode: fixed(interpolation=NEAREST, border_mode=mode)
        for mode in BORDERS
    },
}


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("case", STEADY)
def test_pixels_are_those_of_albumentations(case: str, channels: int) -> None:
    """Pixels and sizes equal albumentations' exactly."""
    transform = STEADY[case]()
    sizes = SIZES[:2] if "cropped" in case else SIZES  # of others no pixel would be left
    arrays = images(*sizes, channels=channels)
    for array, pixels in zip(arrays, serve(transform, arrays), strict=True):
        wanted = transform(image=array.copy())["image"]
        assert pixels.shape == wanted.shape
        assert np.array_equal(pixels, wanted)


@pytest.mark.parametrize("make", [shift_scale_rotate, lambda: A.SafeRotate(p=1)])
def test_drawn_maps_give_the_pixels_of_warp_affine(make: Any) -> None:
    """Pixels equal those of OpenCV's warpAffine, called with the map that was drawn."""
    arrays = images((37, 52))[:1] * 12
    transform = make()
    ops = Served(transform, arrays[0]).ops(arrays[0].shape, 12)["cv_warp"][:, 0]
    for array, pixels, op in zip(arrays, serve(transform, arrays), ops, strict=True):
        matrix = op["map"][:6].reshape(2, 3)
        flags = transform.interpolation | cv2.WARP_INVERSE_MAP
        border = transform.border_mode
        wanted = cv2.warpAffine(array, matrix, (52, 37), flags=flags, borderMode=border)
        assert np.array_equal(pixels, wanted)
    assert len(np.unique(ops["map"], axis=0)) == 12


PERSPECTIVES = {
    "": {},
    "in its own size": {"keep_size": False},
    "expanded": {"fit_output": True},
    "expanded in its own size": {"fit_output": True, "keep_size": False, "border_mode": 4},
    "nearest": {"interpolation": NEAREST, "border_mode": 1},
    "filled in its first channel": {"fill": 90.0, "scale": (0.2, 0.3)},
    "filled by one value": {"fill": (90.0,), "scale": (0.2, 0.3)},
    "filled": {"fill": (1.0, 2.0, 3.0), "scale": (0.2, 0.3), "fit_output": True},
}


@pytest.mark.parametrize("case", PERSPECTIVES)
def test_perspectives_give_the_pixels_of_apply(case: str) -> None:
    """Pixels equal those of ``apply``, called with the inverse of the map that was drawn."""
    transform = A.Perspective(**PERSPECTIVES[case], p=1)
    arrays = images((37, 52), (37, 52), (37, 52))
    ops = Served(transform, arrays[0]).ops(arrays[0].shape, len(arrays))["cv_warp"][:, 0]
    served = serve(transform, arrays)
    transform.interpolation |= cv2.WARP_INVERSE_MAP
    transform.keep_size = False
    for array, pixels, op in zip(arrays, served, ops, strict=True):
        size = {"max_height": op["height"], "max_width": op["width"]}
        wanted = transform.apply(array, op["map"].reshape(3, 3), **size)
        assert np.array_equal(pixels, wanted)


def test_masks_are_moved_with_their_images() -> None:
    """Masks are moved by the map of their image, with their own interpolation and fill."""
    [array, _] = images((30, 41))
    items = [(array, array[..., 0].copy())] * 6
    for image_interpolation in (NEAREST, LINEAR):
        transform = shift_scale_rotate(
            rotate_limit=(10, 80), interpolation=image_interpolation, fill=255.0, fill_mask=255.0
        )
        with CachedDataset(items, transforms=A.Compose([transform])) as dataset:
            assert dataset.plan.is_batched, dataset.plan.obstacle
            [[batch, masks]] = DataLoader(dataset, batch_size=6)
        are_equal = np.array_equal(batch[..., 0].numpy(), masks.numpy())
        assert are_equal == (image_interpolation == NEAREST)


REFUSED = {
    "has an interpolation that is not supported": lambda: A.Rotate(interpolation=4),
    "comes after the conversion to floats": lambda: A.Compose([A.Normalize(), A.SafeRotate()]),
    "has a fill that is not a uint8 value": lambda: A.Affine(fill=0.5),
    "has a fill for another number of channels": lambda: A.Rotate(fill=(1.0, 2.0)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_says_why(reason: str) -> None:
    """A transform with unsupported arguments runs per sample, and the plan gives the reason."""
    assert reason in refusal_of(REFUSED[reason]())


def test_another_opencv_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no program of the core gives the pixels of the installed OpenCV, warps run per sample."""
    warp = cv2.warpAffine
    monkeypatch.setattr(cv2, "warpAffine", lambda *args, **named: warp(*args, **named) ^ 1)
    opencv_warps.opencv_program.cache_clear()
    with pytest.raises(UnknownStepError, match="differs in this build of OpenCV"):
        opencv_warps.opencv_program()
    assert "differs in this build of OpenCV" in refusal_of(A.Rotate())
    opencv_warps.opencv_program.cache_clear()
