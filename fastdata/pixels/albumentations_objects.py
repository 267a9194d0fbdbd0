"""Objects of albumentations: which of its transforms are known, and why others are not.

The known transforms are those of version 2.0.8. A transform of a later version is known if it has
the attributes of 2.0.8, because another attribute may change what it does. The version is read from
the module that the user imported; nothing here imports it.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

PACKAGE = "albumentations."
_SERVED = (2, 0, 8)


def names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMMON = names_in(
    "p params processors seed random_generator py_random invalid_args _strict _key2func "
    "_additional_targets _available_keys"
)
"""Attributes of every transform."""
_UNSETTLED = names_in(
    "applied_in_replay check_each_transform deterministic main_compose replay_mode save_key"
)
"""Attributes that an object has only after certain methods were called."""
_COMPOSED = "transforms mask_interpolation save_applied_params"
_PADDED = "border_mode fill fill_mask"
_CROPPED = f"{_PADDED} pad_if_needed pad_position"
_SIZED = "area_for_downscale interpolation mask_interpolation"
_WARPED = f"{_PADDED} interpolation mask_interpolation"
_MAPPED = (
    f"{_WARPED} balanced_scale fit_output keep_ratio rotate rotate_method scale shear "
    "translate_percent translate_px"
)

_ATTRIBUTES = {
    # Transforms of transforms
    "Compose": f"{_COMPOSED} _images_was_list _masks_was_list is_check_args is_check_shapes",
    "NoOp": "",
    "OneOf": f"{_COMPOSED} transforms_ps",
    "OneOrOther": _COMPOSED,
    "RandomOrder": f"{_COMPOSED} n replace",
    "Sequential": _COMPOSED,
    "SomeOf": f"{_COMPOSED} n replace",
    # Geometry, and the kind of a sample
    "CenterCrop": f"{_CROPPED} height width",
    "Crop": f"{_CROPPED} x_max x_min y_max y_min",
    "D4": "",
    "FromFloat": "dtype max_value",
    "HorizontalFlip": "",
    "Normalize": "denominator max_pixel_value mean mean_np normalization std",
    "Pad": f"{_PADDED} padding",
    "PadIfNeeded": f"{_PADDED} padding min_height min_width pad_height_divisor pad_width_divisor "
    "position",
    "RandomCrop": f"{_CROPPED} height width",
    "RandomRotate90": "",
    "SquareSymmetry": "",
    "ToFloat": "max_value",
    "ToTensorV2": "transpose_mask",
    "Transpose": "",
    "VerticalFlip": "",
    # Sizes
    "LongestMaxSize": f"{_SIZED} max_size max_size_hw",
    "RandomCropFromBorders": "crop_bottom crop_left crop_right crop_top",
    "RandomResizedCrop": f"{_SIZED} ratio scale size",
    "RandomScale": f"{_SIZED} scale_limit",
    "RandomSizedCrop": f"{_SIZED} min_max_height size w2h_ratio",
    "Resize": f"{_SIZED} height width",
    "SmallestMaxSize": f"{_SIZED} max_size max_size_hw",
    # Values
    "AutoContrast": "cutoff ignore method",
    "CLAHE": "clip_limit tile_grid_size",
    "ChannelDropout": "channel_drop_range fill",
    "ChannelShuffle": "",
    "ColorJitter": "brightness contrast hue saturation transforms",
    "Equalize": "by_channels mask mask_params mode",
    "GaussNoise": "mean_range noise_scale_factor per_channel std_range",
    "HueSaturationValue": "hue_shift_limit sat_shift_limit val_shift_limit",
    "ISONoise": "color_shift intensity",
    "InvertImg": "",
    "MultiplicativeNoise": "elementwise multiplier per_channel",
    "Posterize": "num_bits",
    "RGBShift": "approximation b_shift_limit g_shift_limit noise_params noise_type r_shift_limit "
    "spatial_mode",
    "RandomBrightnessContrast": "brightness_by_max brightness_limit contrast_limit "
    "ensure_safe_range",
    "RandomGamma": "gamma_limit",
    "Solarize": "threshold_range",
    "ToGray": "method num_output_channels",
    # Neighbours and rectangles
    "Blur": "blur_limit",
    "CoarseDropout": "fill fill_mask hole_height_range hole_width_range num_holes_range",
    "Downscale": "interpolation_pair scale_range",
    "GaussianBlur": "blur_limit sigma_limit",
    "GridDropout": "fill fill_mask holes_number_xy random_offset ratio shift_xy unit_size_range",
    "ImageCompression": "compression_type quality_range",
    "MedianBlur": "blur_limit",
    "MotionBlur": "allow_shifted angle_range blur_limit direction_range",
    "Sharpen": "alpha kernel_size lightness method sigma",
    "UnsharpMask": "alpha blur_limit sigma_limit threshold",
    # Warps
    "Affine": _MAPPED,
    "ElasticTransform": f"{_WARPED} alpha approximate keypoint_remapping_method noise_distribution "
    "same_dxdy sigma",
    "GridDistortion": f"{_WARPED} distort_limit keypoint_remapping_method normalized num_steps",
    "OpticalDistortion": f"{_WARPED} distort_limit keypoint_remapping_method mode",
    "Perspective": f"{_WARPED} fit_output keep_size scale",
    "Rotate": f"{_WARPED} crop_border limit rotate_method",
    "SafeRotate": f"{_MAPPED} limit",
    "ShiftScaleRotate": f"{_MAPPED} rotate_limit scale_limit shift_limit_x shift_limit_y",
}
"""The known transforms of 2.0.8, and their attributes in addition to ``_COMMON``."""
_STEADY = names_in(
    "AutoContrast CenterCrop Crop Equalize FromFloat HorizontalFlip InvertImg LongestMaxSize NoOp "
    "Normalize Pad PadIfNeeded Resize SmallestMaxSize ToFloat ToGray ToTensorV2 Transpose "
    "VerticalFlip"
)
"""Transforms that always do the same, if they are applied to every sample."""
_UNSHOWN = names_in("additional_targets is_check_shapes save_applied_params seed strict")
_CHOOSING = names_in("OneOf OneOrOther RandomOrder SomeOf")


def is_of_albumentations(value: Any) -> bool:
    # Some types, such as that of Cython's functions, have a descriptor there instead of a text.
    return str(type(value).__module__).startswith(PACKAGE)


def name_in_albumentations(transform: Any) -> str:
    """Return the class name of an object of albumentations; an empty text if it is not known."""
    name = type(transform).__name__
    return name if name in _ATTRIBUTES and not albumentations_obstacle(transform) else ""


def albumentations_obstacle(transform: Any) -> str:
    """Return why an object of albumentations cannot be a batch op; empty if it may be one."""
    name = type(transform).__name__
    held = vars(transform)
    version = _version()
    kind: Any = type(transform)
    replaced = sorted(_methods(kind) & held.keys())
    if replaced:
        return f"has a method {replaced[0]} of its own"
    if name not in _ATTRIBUTES or not is_of_albumentations(transform):
        return "is not a known batch op"
    if version == _SERVED:
        return ""
    shown = ".".join(map(str, version))
    if version < _SERVED:
        return f"is from albumentations {shown}, but batch ops need 2.0.8 or later"
    wanted = _COMMON | names_in(_ATTRIBUTES[name])
    if hasattr(transform, "transforms") and "save_applied_params" in wanted:
        wanted -= names_in("params invalid_args _key2func _strict")
    differing = sorted((held.keys() ^ wanted) - _UNSETTLED - {"_strict"})
    if not differing:
        return ""
    return (
        f"is from albumentations {shown}, where its attributes differ from those in 2.0.8: "
        f"{', '.join(differing)}"
    )


def varies(transform: Any) -> bool | None:
    """Return True if a transform of albumentations draws random numbers; None if not known."""
    name = name_in_albumentations(transform)
    if not name:
        return None
    if transform.p < 1 or name in _CHOOSING:
        return True
    if name in ("Compose", "Sequential"):
        parts = set(map(varies, transform.transforms))
        return next((answer for answer in (True, None) if answer in parts), False)
    is_chosen = isinstance(getattr(transform, "max_size", None), (list, tuple))
    pads = getattr(transform, "pad_if_needed", True)
    places = (getattr(transform, "position", ""), pads and getattr(transform, "pad_position", ""))
    return name not in _STEADY or is_chosen or "random" in places


def _version() -> tuple[int, ...]:
    text = str(getattr(sys.modules.get("albumentations"), "__version__", ""))
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def short_text(transform: Any) -> str:
    """Return the ``repr`` of a transform without the arguments that have their default value."""
    kind = type(transform)
    shown = []
    for name, parameter in inspect.signature(kind).parameters.items():
        value = getattr(transform, name, parameter.default)
        if name == "transforms":
            shown.append(f"[{', '.join(map(short_text, value))}]")
        is_equal = repr(value) == repr(parameter.default)
        is_equal = is_equal or (isinstance(value, (int, float)) and value == parameter.default)
        if name != "transforms" and not is_equal and name not in _UNSHOWN:
            shown.append(f"{name}={value!r}")
    return f"{kind.__name__}({', '.join(shown)})"


@cache
def _methods(kind: Any) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def settings_of(transform: Any) -> dict[str, Any]:
    """Return the attributes that a call does not change; they show if the user has changed one."""
    moving = {"params", "processors", "random_generator", "py_random", "_key2func"}
    return {name: value for name, value in vars(transform).items() if name not in moving}
