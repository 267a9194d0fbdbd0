"""Readers of the transforms that fastdata knows: ``READERS`` has one function for each name.

A reader takes the attributes of the user's object and returns its step, or raises an
``UnknownStepError`` with the reason why the object must run as the user wrote it. If the object
also changes the kind of the samples, the reader returns their new state instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from fastdata.pixels import albumentations_readers, colours, conversions, geometry
from fastdata.pixels.albumentations_objects import names_in
from fastdata.pixels.colours import VALUES
from fastdata.pixels.compose import flatten_transform, joint_transforms
from fastdata.pixels.known import is_v2, known_name
from fastdata.pixels.own_transforms import LONG_MASK, AlbumentationsTransform, Views
from fastdata.pixels.policies import POLICIES, read_policy, read_timm_policies
from fastdata.pixels.state import Reader, State, UnknownStepError
from fastdata.pixels.steps import Step, Steps

_MOVING = names_in(
    "CenterCrop ConvertImageDtype Pad RandomAffine RandomApply RandomChoice RandomCrop "
    "RandomHorizontalFlip RandomOrder RandomPerspective RandomResize RandomResizedCrop "
    "RandomRotation RandomShortestSize RandomVerticalFlip Resize ToDtype"
)
"""Transforms of v2 that also change masks, with the image's draws; others leave masks unchanged."""


def recognise(transform: Any, state: State) -> State:
    """Read one of the user's objects, and return the state after it.

    Raises:
        UnknownStepError: it must run as the user wrote it.
    """
    name = known_name(transform)
    read = READERS.get(name, colours.read_published)
    if type(transform) is Views:
        raise UnknownStepError("makes several views, which only the last transform may do")
    try:
        if type(transform) is AlbumentationsTransform:
            read = albumentations_readers.read_wrapped
        elif transform is LONG_MASK:
            read = conversions.read_long_mask
        elif state.is_mask and name in READERS:
            read = _read_for_mask
        elif state.kind in ("hwc", "hw") and name in ("ToImage", "ToPILImage", "ToTensor"):
            state = replace(state, kind="pil")  # in a store, arrays and PIL images are equal planes
        elif state.kind in ("array", "hwc", "hw", "plane", "mask", "video"):
            why = "gets samples of a kind that batch ops do not support"
            raise UnknownStepError(why if name else "is not a known batch op")
        found = read(transform, state)
    # Attributes may be missing or of any type: in other versions of a library, or because the user
    # changed them. Then the object runs as it was written.
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as unread:
        raise UnknownStepError(f"has arguments that are not supported: {unread}") from unread
    after = state.add(found) if isinstance(found, Step) else found
    return replace(after, at=state.at + 1)


def _read_for_mask(transform: Any, state: State) -> Step | State:
    """Read a transform of v2 for the mask of an image."""
    name = known_name(transform)
    if not is_v2(transform):
        raise UnknownStepError("is not of torchvision.transforms.v2, so it cannot take masks")
    if name in POLICIES:
        raise UnknownStepError("does not accept masks")
    if name == "ToPureTensor":
        return replace(state, kind="tensor")
    is_moved = name in _MOVING and state.kind == "mask"
    return READERS[name](transform, state) if is_moved else state


def _read_identity(transform: Any, state: State) -> State:
    return state


# Transforms of transforms


def _read_apply(transform: Any, state: State) -> Step:
    return state.maybe(_inner(transform.transforms, state.inner()), transform.p)


def _read_choice(transform: Any, state: State) -> Step:
    return state.choice(_inner_each(transform, state), transform.p)


def _read_order(transform: Any, state: State) -> Step:
    return state.in_order(_inner_each(transform, state))


def _inner_each(transform: Any, state: State) -> list[Steps]:
    parts = enumerate(transform.transforms)
    return [_inner([part], state.inner(number)) for number, part in parts]


def _inner(transforms: Iterable[Any], state: State) -> Steps:
    """Read transforms that run on some samples only, and so must not change the kind of sample."""
    # All samples of a batch must have one kind, dtype and number of channels.
    before = replace(state.inner(), steps=())
    after = before
    parts_of = joint_transforms if state.is_mask else flatten_transform
    for part in chain.from_iterable(map(parts_of, transforms)):
        try:
            after = recognise(part, after)
        except UnknownStepError as unknown:
            raise UnknownStepError(f"contains {type(part).__name__}, which {unknown}") from unknown
    if replace(after, steps=(), at=before.at) != before:
        raise UnknownStepError("changes the kind of only some samples")
    return after.steps


def _sometimes(read: Callable[[Any, State], Step]) -> Reader:
    """Return a reader for a transform that has a probability ``p``."""

    def reader(transform: Any, state: State) -> Step:
        return state.maybe([read(transform, state.inner())], transform.p)

    return reader


READERS: dict[str, Reader] = {
    # Geometry
    "AlternatingFlip": geometry.read_flip,
    "CenterCrop": geometry.read_center_crop,
    "CoverBucket": geometry.read_cover_bucket,
    "CropToBucket": geometry.read_bucket_crop,
    "Pad": geometry.read_pad,
    "RandomAffine": geometry.read_affine,
    "RandomCrop": geometry.read_random_crop,
    "RandomCropToBucket": geometry.read_bucket_crop,
    "RandomHorizontalFlip": geometry.read_flip,
    "RandomPerspective": _sometimes(geometry.read_perspective),
    "RandomResize": geometry.read_resize,
    "RandomResizedCrop": geometry.read_resized_crop,
    "RandomRotation": geometry.read_rotation,
    "RandomShortestSize": geometry.read_resize,
    "RandomVerticalFlip": geometry.read_flip,
    "Resize": geometry.read_resize,
    "timm.RandomResizedCropAndInterpolation": geometry.read_resized_crop,
    # Values
    **dict.fromkeys(VALUES, _sometimes(colours.read_value)),
    "ColorJitter": colours.read_jitter,
    "GaussianBlur": colours.read_blur,
    "GaussianNoise": colours.read_noise,
    "Grayscale": colours.read_grayscale,
    "RGB": colours.read_rgb,
    "RandomChannelPermutation": colours.read_permute,
    "RandomErasing": colours.read_erasing,
    "RandomGrayscale": _sometimes(colours.read_grey),
    "RandomPhotometricDistort": colours.read_photometric_distort,
    "timm.RandomErasing": colours.read_timm_erasing,
    # Policies, and transforms of transforms
    **dict.fromkeys(POLICIES, read_policy),
    "RandomApply": _read_apply,
    "RandomChoice": _read_choice,
    "RandomOrder": _read_order,
    "timm.AutoAugment": read_timm_policies,
    "timm.RandAugment": read_timm_policies,
    # The kind of a sample
    "ConvertImageDtype": conversions.read_dtype,
    "Identity": _read_identity,
    "Normalize": conversions.read_normalize,
    "PILToTensor": conversions.read_to_tensor,
    "ToDtype": conversions.read_dtype,
    "ToImage": conversions.read_to_image,
    "ToPILImage": conversions.read_to_pil,
    "ToPureTensor": conversions.read_to_pure_tensor,
    "ToTensor": conversions.read_to_tensor,
    "timm.MaybePILToTensor": conversions.read_to_tensor,
    "timm.MaybeToTensor": conversions.read_to_tensor,
    "timm.ToNumpy": conversions.read_to_tensor,
}


def moves_pixels(transform: Any) -> bool:
    """Return True for a known transform that moves pixels, each channel alike."""
    read = READERS.get(known_name(transform))
    return read is not None and read.__module__ == geometry.__name__


def moves_masks(transform: Any) -> bool:
    """Return True for a known transform that also moves the mask of an image, if it gets one."""
    if type(transform) is AlbumentationsTransform:
        return "mask" in getattr(transform.transform, "available_keys", ())
    return moves_pixels(transform)
