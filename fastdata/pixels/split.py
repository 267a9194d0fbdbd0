"""Splitting the user's transform into steps that run once, on whole batches, and per sample."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fastdata.pixels.compose import flatten_transform, joint_transforms
from fastdata.pixels.draws import is_random
from fastdata.pixels.fingerprint import fingerprint
from fastdata.pixels.known import is_preparable, is_reforming, known_name
from fastdata.pixels.own_transforms import Views
from fastdata.pixels.plan import NOT_STORED, TransformPlan, text_of_transform
from fastdata.pixels.readers import moves_pixels, recognise
from fastdata.pixels.samples import Form
from fastdata.pixels.state import State, UnknownStepError

if TYPE_CHECKING:
    from fastdata.pixels.plan import Transform


def plan_transform(transform: Any) -> TransformPlan:
    """Split a transform into steps that run once, on whole batches, and on each sample.

    ``print(dataset.plan)`` shows the plan of a dataset that you have. This shows that of a
    transform alone, for RGB images: PIL images, or arrays (H, W, 3) for albumentations.

    Args:
        transform: a Compose of torchvision (v1 or v2, nested or not) or albumentations, a single
            transform, ``nn.Sequential``, or None.

    Example:
        >>> plan = plan_transform(None)
        >>> plan.is_batched, plan.obstacle
        (False, 'the transform ends with a PIL image')
    """
    return split_transform(transform, channels=3)


def split_transform(
    transform: Any,
    *,
    form: Form = "pil",
    dtype: str = "uint8",
    channels: int | None = None,
    prepared: int | None = None,
    obstacle: str | None = None,
    only_last: bool = False,
    first: int = 0,
) -> TransformPlan:
    """Split a transform as ``plan_transform`` does, for samples of any form.

    Args:
        transform: as for ``plan_transform``.
        form: form of the samples, in the source or in the store; both give the same plan.
        dtype: dtype of stored samples; batch ops need uint8.
        channels: number of channels of stored samples, None if they differ. Changes of colours need
            1 or 3.
        prepared: number of transforms at the beginning that were already applied to stored samples.
            All others run when samples are read.
        obstacle: why batch ops cannot run at all, for example on this machine. All transforms after
            the prepare part then run per sample.
        only_last: True if only the known transforms at the end may be batch ops, for samples that
            are read one by one.
        first: number of the draws of the first transform; those of the next are counted from it.
    """
    reason = ""
    if obstacle:
        reason = f"runs as written, because {obstacle}"
    elif dtype != "uint8":
        reason = f"gets {dtype} samples, but batch ops need uint8"
    transforms = flatten_transform(transform)
    each = _each_view(transforms)
    prepare = _leading(each, prepared)
    plans = []
    for view in each:
        state = State(kind=form, channels=channels, at=first)
        plans.append(_plan(view, len(prepare), state, reason, only_last=only_last))
        first += len(view)  # so that no two views draw the same numbers
    *before, views = transforms or (None,)
    if not isinstance(views, Views):
        return plans[0]
    # Each view has its own draws, but a random transform before them must be drawn once for all.
    if all(is_random(shared) is False for shared in before):
        return TransformPlan(prepare=prepare, kind=form, views=tuple(plans), views_type=views.type)
    return TransformPlan(
        prepare=prepare,
        per_sample=transforms[len(prepare) :],
        kind=form,
        reason="comes before views, which must not share a random step; put it into each view",
        views_type=views.type,
    )


def plan_pairs(
    transforms: Any,
    *,
    form: Form = "pil",
    channels: int | None = None,
    mask_form: Form = "mask",
    obstacle: str | None = None,
) -> TransformPlan:
    """Plan a transform that takes an image and its mask: it runs on whole batches, or not at all.

    Args:
        transforms: a transform of v2 or albumentations, or any callable that takes both.
        form: form of images.
        channels: number of channels of images; None if they differ.
        mask_form: form of masks.
        obstacle: why batch ops cannot run at all.
    """
    singles = joint_transforms(transforms)
    image = _read(singles, State(kind=form, channels=channels))
    mask = _read(singles, State(kind=mask_form, channels=1, is_mask=True))
    # Image and mask share their draws, so a step that is unknown for one of them ends both.
    known, _, reason = min(image, mask, key=lambda read: read[0])
    kind = image[1].kind
    if obstacle:
        reason = f"runs as written, because {obstacle}"
    elif reason and len(singles) > 1:
        reason = f"contains {text_of_transform(singles[known])}, which {reason}"
    elif not reason and kind == "pil":
        reason = "leaves images as PIL images"
    if reason:
        return TransformPlan(per_sample=(transforms,), kind=form, reason=reason)
    return TransformPlan(
        batch_ops=image[1].all_steps,
        kind=kind,
        batched=singles,
        mask=TransformPlan(batch_ops=mask[1].all_steps, kind=mask[1].kind),
    )


def leading_transforms(transform: Any, prepared: int | None = None) -> tuple[Transform, ...]:
    """Return the transforms at the beginning that run before samples are stored.

    ``prepared`` is their number; by default these are all that may run once.
    """
    return _leading(_each_view(flatten_transform(transform)), prepared)


def find_late_rgb(transform: Any) -> Transform | None:
    """Return the step that makes images RGB after a random crop or the like, if there is one.

    Run before these steps, it runs once per sample, all images of a batch have the same number of
    channels, and any mode can be stored. Pixels of grey and RGB images stay equal. Those of other
    modes may change where a step interpolates (Pillow takes the nearest pixel of a palette).
    """
    transforms = flatten_transform(transform)
    moving = list(takewhile(moves_pixels, transforms))
    if all(map(is_preparable, moving)) or len(moving) == len(transforms):
        return None
    following = transforms[len(moving)]
    return following if known_name(following) == "RGB" else None


def split_upright(transform: Any) -> tuple[bool, tuple[Transform, ...]]:
    """Return True if ``PIL.ImageOps.exif_transpose`` comes first, and the transforms after it."""
    transforms = flatten_transform(transform)
    upright = bool(transforms) and known_name(transforms[0]) == "exif_transpose"
    return upright, transforms[upright:]


def _plan(
    transforms: tuple[Transform, ...], prepared: int, state: State, reason: str, *, only_last: bool
) -> TransformPlan:
    """Plan transforms of which the first ``prepared`` have run.

    ``reason`` is the reason why none of the others may be a batch op; empty if they may.
    """
    rest = transforms[prepared:]
    for transform in transforms[:prepared]:
        # There is no reader for exif_transpose: it does not change the form.
        with suppress(UnknownStepError):
            # ToPILImage needs a number of channels. Which one it is does not change the kind.
            after = recognise(transform, State(kind=state.kind, channels=3))
            state = replace(state, kind=after.kind)
    first = state.at + prepared
    state = replace(state, at=first)
    known = 0
    last = None
    if not reason:
        known, read, reason = _read(rest, state)
        if not only_last:
            state = read
        elif not reason:
            known, reason = 0, NOT_STORED
        elif known:
            known, reason = 0, "gets samples that are read one by one"
        last = _read_last(rest, known + (not only_last), first, state)
    return TransformPlan(
        prepare=transforms[:prepared],
        batch_ops=state.all_steps,
        per_sample=rest[known:],
        kind=state.kind,
        batched=rest[:known],
        reason=reason if only_last or rest[known:] else "",
        last=last,
    )


def _read(transforms: Sequence[Transform], state: State) -> tuple[int, State, str]:
    """Return how many transforms are known, the state after them, and why the next is unknown."""
    for number, transform in enumerate(transforms):
        try:
            state = recognise(transform, state)
        except UnknownStepError as unknown:
            return number, state, str(unknown)
    return len(transforms), state, ""


def _read_last(
    transforms: tuple[Transform, ...], skipped: int, at: int, before: State
) -> TransformPlan | None:
    """Plan the known transforms at the end, after the last unknown one; None if there are none.

    An unknown transform is assumed to return samples of the form that it takes: PIL images, or
    arrays for albumentations.
    """
    if before.kind not in ("pil", "hwc", "hw"):
        return None
    # Draws are numbered by the transform's place, wherever the last part begins.
    for start in range(skipped, len(transforms)):
        last = transforms[start:]
        begin = State(kind=before.kind, channels=before.channels, at=at + start)
        _, state, reason = _read(last, begin)
        if not reason and state.kind != "pil":
            return TransformPlan(kind=state.kind, batch_ops=state.all_steps, batched=last)
    return None


def _each_view(transforms: tuple[Transform, ...]) -> list[tuple[Transform, ...]]:
    """Return the transforms of each view if the last transform is ``Views``; else all as one."""
    *before, views = transforms or (None,)
    if not isinstance(views, Views):
        return [transforms]
    return [(*before, *flatten_transform(view)) for view in views.transforms]


def _leading(each: list[tuple[Transform, ...]], prepared: int | None) -> tuple[Transform, ...]:
    """Return the first transforms of all views: as many as may run once, or ``prepared``."""
    transforms = each[0]
    if len(each) > 1:
        alike = takewhile(_are_alike, zip(*each, strict=False))
        transforms = tuple(first for first, *_ in alike)
    if prepared is not None:
        return transforms[:prepared]
    leading = tuple(takewhile(is_preparable, transforms))
    # A change of type at the end is not prepared: it would only change the form of stored samples.
    while leading and is_reforming(leading[-1]):
        leading = leading[:-1]
    return leading


def _are_alike(transforms: tuple[Transform, ...]) -> bool:
    is_one = all(transform is transforms[0] for transform in transforms)
    return is_one or len({fingerprint(transform, "") for transform in transforms}) == 1
