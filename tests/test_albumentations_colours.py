"""albumentations' transforms of values and colours: pixels, draws, and the reasons for those that run per sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from albumentations_cases import (
    Served,
    albumentations,
    assert_alike,
    assert_pixels,
    images,
    parameters,
    refusal_of,
    serve,
)
from fastdata.pixels.core.library import load
from fastdata.pixels.opencv_variants import matching
from fastdata.pixels.state import UnknownStepError
from fastdata.pixels.steps import Step

__all__ = ["CASES", "NOISE", "assert_drawn_alike", "assert_noise_alike"]

A = albumentations

SIZES = ((9, 12), (31, 64), (7, 45), (33, 70), (8, 8), (20, 33), (5, 129))
"""Sizes with rows of whole vectors of OpenCV, and others."""
DRAWS = 800


def of_none(ops: Any, shape: Any) -> dict[str, Any]:
    return {}


def of_linear(ops: Any, shape: Any) -> dict[str, Any]:
    op = ops[0]["cv_linear"]
    return {"alpha": float(op["alpha"]), "beta": float(op["beta"]) * 255}


def of_safe_linear(ops: Any, shape: Any) -> dict[str, Any]:
    safe = albumentations.augmentations.pixel.functional.get_safe_brightness_contrast_params
    alpha, beta = safe(*of_linear(ops, shape).values(), 255)
    return {"alpha": float(alpha), "beta": float(beta)}


def amounts(ops: Any, shape: Any) -> Any:
    return ops[0]["cv_channels"]["amount"][: (*shape, 1)[2]]


def of_gamma(ops: Any, shape: Any) -> dict[str, Any]:
    return {"gamma": float(amounts(ops, shape)[0])}


def of_solarize(ops: Any, shape: Any) -> dict[str, Any]:
    return {"threshold": float(ops[0]["value"]["amount"]) / 255}


def of_bits(ops: Any, shape: Any) -> dict[str, Any]:
    return {"num_bits": int(amounts(ops, shape)[0])}


def of_bits_of_each(ops: Any, shape: Any) -> dict[str, Any]:
    return {"num_bits": amounts(ops, shape).astype(int).tolist()}


def of_rgb_shift(ops: Any, shape: Any) -> dict[str, Any]:
    return {"noise_map": np.array(amounts(ops, shape))}


def of_multiplier(ops: Any, shape: Any) -> dict[str, Any]:
    return {"multiplier": np.squeeze(amounts(ops, shape).astype(np.float32))}


def of_shuffle(ops: Any, shape: Any) -> dict[str, Any]:
    is_grey = len(shape) == 2
    return {"channels_shuffled": None if is_grey else ops[0]["permute"]["from"][:3].tolist()}


def of_drop(ops: Any, shape: Any) -> dict[str, Any]:
    return {"channels_to_drop": np.flatnonzero(ops[0]["cv_drop"]["is_dropped"]).tolist()}


def of_shifts(ops: Any, shape: Any) -> dict[str, Any]:
    op = ops[0]["cv_hsv"]
    names = {"hue_shift": "hue", "sat_shift": "saturation", "val_shift": "value"}
    # A grey image has no hue, and albumentations warns.
    is_grey = len(shape) == 2
    return {
        name: 0.0 if is_grey and name != "val_shift" else float(op[field])
        for name, field in names.items()
    }


def of_jitter(ops: Any, shape: Any) -> dict[str, Any]:
    numbers = load().numbers
    found: dict[str, Any] = {}
    for op in ops:
        if op["code"] == numbers["OP_CV_LINEAR"]:
            name = "contrast" if op["cv_linear"]["added"] else "brightness"
            found[name] = float(op["cv_linear"]["alpha"])
        elif op["code"] == numbers["OP_CV_HSV"]:
            found["hue"] = float(op["cv_hsv"]["hue"]) / 180
        else:
            found["saturation"] = float(op["cv_saturation"]["factor"])
    order = ["brightness", "contrast", "saturation", "hue"]
    return {**{name: found[name] for name in order}, "order": [order.index(name) for name in found]}


def of_mask(ops: Any, shape: Any) -> dict[str, Any]:
    return {"mask": None}


def of_limit(ops: Any, shape: Any) -> dict[str, Any]:
    return {"clip_limit": float(ops[0]["cv_clahe"]["limit"])}


Case = tuple[Callable[[], Any], Callable[[Any, Any], dict[str, Any]]]
CASES: dict[str, Case] = {
    "AutoContrast": (lambda: A.AutoContrast(p=1), of_none),
    "AutoContrast, pil": (lambda: A.AutoContrast(method="pil", p=1), of_none),
    "AutoContrast, cutoff": (lambda: A.AutoContrast(cutoff=7.5, p=1), of_none),
    "AutoContrast, pil, cutoff": (lambda: A.AutoContrast(3, method="pil", p=1), of_none),
    "CLAHE": (lambda: A.CLAHE(p=1), of_limit),
    "CLAHE, other tiles": (lambda: A.CLAHE((2.0, 40.0), tile_grid_size=(3, 5), p=1), of_limit),
    "ChannelDropout": (lambda: A.ChannelDropout((1, 2), fill=77.9, p=1), of_drop),
    "ChannelShuffle": (lambda: A.ChannelShuffle(p=1), of_shuffle),
    "ColorJitter": (lambda: A.ColorJitter(p=1), of_jitter),
    "ColorJitter, strong": (lambda: A.ColorJitter((0, 2), (0, 3.0), (0, 4.0), 0.1, p=1), of_jitter),
    "Equalize": (lambda: A.Equalize(p=1), of_mask),
    "Equalize, pil": (lambda: A.Equalize("pil", p=1), of_mask),
    "Equalize, luma": (lambda: A.Equalize(by_channels=False, p=1), of_mask),
    "Equalize, pil, luma": (lambda: A.Equalize("pil", by_channels=False, p=1), of_mask),
    "HueSaturationValue": (lambda: A.HueSaturationValue(p=1), of_shifts),
    "HueSaturationValue, far": (lambda: A.HueSaturationValue(180, 255, 255, p=1), of_shifts),
    "HueSaturationValue, hue": (lambda: A.HueSaturationValue((-9, 9), 0, 0, p=1), of_shifts),
    "InvertImg": (lambda: A.InvertImg(p=1), of_none),
    "MultiplicativeNoise": (lambda: A.MultiplicativeNoise((0.3, 1.7), p=1), of_multiplier),
    "MultiplicativeNoise, each": (
        lambda: A.MultiplicativeNoise(per_channel=True, p=1),
        of_multiplier,
    ),
    "Posterize": (lambda: A.Posterize((1, 7), p=1), of_bits),
    "Posterize, each": (lambda: A.Posterize([(1, 3), (4, 7), (2, 2)], p=1), of_bits_of_each),
    "RGBShift": (lambda: A.RGBShift(p=1), of_rgb_shift),
    "RGBShift, shares": (lambda: A.RGBShift(1.0, (0.2, 0.9), (-0.5, 0.0), p=1), of_rgb_shift),
    "RandomBrightnessContrast": (lambda: A.RandomBrightnessContrast(p=1), of_linear),
    "RandomBrightnessContrast, far": (
        lambda: A.RandomBrightnessContrast((-1, 0.3), (-1.5, 3.0), p=1),
        of_linear,
    ),
    "RandomBrightnessContrast, safe": (
        lambda: A.RandomBrightnessContrast(0.5, 1.5, ensure_safe_range=True, p=1),
        of_safe_linear,
    ),
    "RandomGamma": (lambda: A.RandomGamma(p=1), of_gamma),
    "RandomGamma, none": (lambda: A.RandomGamma((100, 100), p=1), of_gamma),
    "Solarize": (lambda: A.Solarize(p=1), of_solarize),
    "Solarize, drawn": (lambda: A.Solarize((0.1, 0.9), p=1), of_solarize),
    "ToGray": (lambda: A.ToGray(p=1), of_none),
    "ToGray, one channel": (lambda: A.ToGray(num_output_channels=1, p=1), of_none),
    "ToGray, from_lab": (lambda: A.ToGray(method="from_lab", p=1), of_none),
    "ToGray, desaturation": (lambda: A.ToGray(method="desaturation", p=1), of_none),
    "ToGray, average": (lambda: A.ToGray(1, method="average", p=1), of_none),
    "ToGray, max": (lambda: A.ToGray(method="max", p=1), of_none),
}
"""Transforms, and how the parameters of their ``apply`` follow from the drawn ops and the shape."""
FOR_COLOURS = ("ToGray", "ChannelDropout", "Posterize, each")
VARIED = [name for name, (_, of) in CASES.items() if of not in (of_none, of_mask)]


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_apply(name: str, channels: int) -> None:
    """Pixels equal those of ``apply`` with the same parameters exactly, for noise and smooth images of odd sizes."""
    if channels == 1 and name.startswith(FOR_COLOURS):
        pytest.skip("is for images of three channels")
    make, of = CASES[name]
    assert_pixels(make(), images(*SIZES, channels=channels), of)


@pytest.mark.parametrize("channels", [3, 1])
def test_brightness_may_be_a_share_of_the_mean(channels: int) -> None:
    """The mean is that of the image after the steps before it, over all channels."""
    transform = A.RandomBrightnessContrast(0.9, brightness_by_max=False, p=1)
    arrays = images(*SIZES, channels=channels)
    ops = Served(transform, arrays[0]).ops(arrays[0].shape, len(arrays))[:, 0]["cv_linear"]
    for array, pixels, op in zip(arrays, serve(transform, arrays), ops, strict=True):
        beta = float(op["beta"]) * np.mean(array)
        wanted = transform.apply(array, alpha=float(op["alpha"]), beta=beta)
        assert np.array_equal(pixels, wanted)


def test_tables_follow_each_other() -> None:
    """Several transforms in a row give the same as albumentations' code, run one after the other."""
    steps = [A.InvertImg(p=1), A.RandomGamma((70, 70), p=1), A.Posterize(3, p=1)]
    steps += [
        A.Equalize(p=1),
        A.ToGray(p=1),
        A.RandomBrightnessContrast((0.1, 0.1), (0.3, 0.3), p=1),
    ]
    transform = A.Compose(steps)
    arrays = images(*SIZES)
    for array, pixels in zip(arrays, serve(transform, arrays), strict=True):
        assert np.array_equal(pixels, transform(image=array)["image"])


# Draws


def outcome(value: Any) -> list[float]:
    """Return a parameter as numbers: whole numbers of a list together are one."""
    if isinstance(value, list):
        return [sum(each * 10**k for k, each in enumerate(sorted_drops(value)))]
    return [] if value is None else np.atleast_1d(value).tolist()


def sorted_drops(value: list[int]) -> list[int]:
    """Return the channels that are dropped in their order, and other lists as they are."""
    return value if len(value) > 2 else sorted(value)


def assert_drawn_alike(name: str, count: int) -> None:
    """Compare the distribution of each parameter with albumentations'."""
    make, of = CASES[name]
    [array, _] = images((6, 7))
    ops = Served(make(), array).ops(array.shape, count)
    theirs = parameters(make(), array, count)
    ours = [of(row, array.shape) for row in ops]
    for key in ours[0]:
        columns = [np.array([outcome(params[key]) for params in side]).T for side in (ours, theirs)]
        assert columns[0].size
        for mine, other in zip(*columns, strict=True):
            assert_alike(mine, other)


@pytest.mark.parametrize("name", VARIED)
def test_parameters_are_drawn_alike(name: str) -> None:
    """Each parameter has the distribution that it has in albumentations."""
    assert_drawn_alike(name, DRAWS)


NOISE = {
    "GaussNoise": lambda: A.GaussNoise(std_range=(0.1, 0.1), p=1),
    "GaussNoise, mean": lambda: A.GaussNoise((0.05, 0.05), mean_range=(0.1, 0.1), p=1),
    "GaussNoise, shared": lambda: A.GaussNoise((0.1, 0.1), per_channel=False, p=1),
    "MultiplicativeNoise": lambda: A.MultiplicativeNoise(
        (0.4, 1.6), per_channel=True, elementwise=True, p=1
    ),
    "MultiplicativeNoise, shared": lambda: A.MultiplicativeNoise((0.4, 1.6), elementwise=True, p=1),
}
"""Transforms that draw a number for each value or pixel."""


def assert_noise_alike(name: str, count: int) -> None:
    """Compare noise on a grey image: the distribution of single values, and of pairs of neighbours."""
    transform = NOISE[name]()
    array = np.full((16, count // 16, 3), 120, np.uint8)
    [params] = parameters(transform, array, 1)
    wanted = transform.apply(array.copy(), **{key: params[key] for key in params if key != "shape"})
    [made] = serve(transform, [array])
    is_shared = name.endswith("shared")
    for c in range(1 if is_shared else 3):
        assert_alike(made[..., c], wanted[..., c])
    assert (made == made[..., :1]).all() == (wanted == wanted[..., :1]).all() == is_shared
    numbers = made[..., 0].astype(float) - made[..., 0].mean()
    others = [numbers[1:] * numbers[:-1], numbers[:, 1:] * numbers[:, :-1]]
    if not is_shared:
        others.append(numbers * (made[..., 1].astype(float) - made[..., 1].mean()))
    for products in others:
        assert abs(products.mean()) < 4 * products.std() / products.size**0.5


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_drawn_alike(name: str) -> None:
    """Noise has albumentations' distribution, and its numbers are independent."""
    assert_noise_alike(name, 8000)


def test_noise_differs_from_sample_to_sample() -> None:
    """The deviation of noise is drawn for each sample, within its range."""
    array = np.full((16, 16, 3), 120, np.uint8)
    transform = A.GaussNoise(p=1)
    ops = Served(transform, array).ops(array.shape, 200)[:, 0]["cv_noise"]
    assert_alike(ops["sigma"], np.linspace(0.2, 0.44, 200))
    assert len({pixels.tobytes() for pixels in serve(transform, [array] * 20)}) == 20


# What is not served

REFUSED = {
    "may drop as many channels": lambda: A.ChannelDropout((1, 3)),
    "has a fill outside of 0 to 255": lambda: A.ChannelDropout(fill=300),
    "equalizes only the pixels of a mask": lambda: A.Equalize(mask=np.ones((4, 4), np.uint8)),
    "ignores a value": lambda: A.AutoContrast(ignore=3),
    "makes grey by method='pca'": lambda: A.ToGray(method="pca", p=1),
    "makes neither 1 nor 3 channels": lambda: A.ToGray(4, p=1),
    "changes the kind of only some samples": lambda: A.ToGray(1, p=0.5),
    "resizes its noise": lambda: A.GaussNoise(noise_scale_factor=0.5),
    "comes after the conversion to floats": lambda: A.Compose(
        [A.ToFloat(), A.RandomBrightnessContrast()]
    ),
    "for another number of channels": lambda: A.Posterize([(3, 3), (4, 4), (5, 5), (6, 6)]),
    "a number of tiles": lambda: A.CLAHE(tile_grid_size=(100, 100)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_says_why(reason: str) -> None:
    """A transform with unsupported arguments runs per sample, and the plan gives the reason."""
    assert reason in refusal_of(REFUSED[reason]())


def test_channels_are_not_dropped_of_grey_images() -> None:
    """Albumentations raises an error for grey images, so its own code runs."""
    assert "may drop as many channels" in refusal_of(A.ChannelDropout(), channels=1)


def saturated(image: np.ndarray, *, fuses: bool) -> np.ndarray:
    """Return 1.3 of an image less 0.3 of its grey, rounded once or twice."""
    factor, rest = np.float32([1.3, 1 - 1.3])
    grey = (image.astype(int) @ (9798, 19235, 3735) + 16384 >> 15)[..., np.newaxis]
    taken = grey.astype(np.float32) * rest
    kept = image.astype(np.float64 if fuses else np.float32) * factor
    return np.clip(np.rint((kept + taken).astype(np.float32)), 0, 255).astype(np.uint8)


def test_the_variant_of_the_installed_opencv_is_found() -> None:
    """The image shows which rounding OpenCV uses; a build whose pixels no variant has is refused."""
    fused, plain = (Step("cv_saturation", {"factor": (1.3, 1.3), "fuses": n}) for n in (1, 0))
    for step in (fused, plain):
        apply = partial(saturated, fuses=bool(step.fields["fuses"]))
        assert matching(apply, [fused, plain]) is step
    with pytest.raises(UnknownStepError, match="differs in this build of OpenCV"):
        matching(lambda image: image, [fused, plain])
