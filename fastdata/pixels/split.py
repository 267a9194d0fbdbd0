"""Cut the user's transform in what runs once, on whole batches, and per sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from fastdata.pixels.compose import flatten_transform, joint_transforms
from fastdata.pixels.draws import is_random
from fastdata.pixels.fingerprint import fingerprint
from fastdata.pixels.known import is_preparable, is_reforming, known_name
from fastdata.pixels.own_transforms import Views
from fastdata.pixels.plan import TransformPlan, text_of_transform
from fastdata.pixels.readers import recognise
from fastdata.pixels.samples import Form
from fastdata.pixels.state import State, UnknownStepError

if TYPE_CHECKING:
    from fastdata.pixels.plan import Transform


def plan_transform(
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
    """Cut a transform in what runs once per sample, on whole batches, and per sample.

    Args:
        transform: a torchvision Compose (v1 or v2, nested or not), a single transform,
            ``nn.Sequential``, or None.
        form: what the samples are: those of the source or, the same in effect, those in the store.
        dtype: of the stored samples; batch ops know uint8 only.
        channels: of the stored samples, where they are known; colours need 1 or 3.
        prepared: how many of the leading steps samples are stored after, where they are stored
            already; all others run when they are read.
        obstacle: why there are no batch ops, as on this machine: all but the prepare part runs per
            sample.
        only_last: have no batch ops but the known steps at the end, behind some that are unknown.
        first: number that random draws know the first step by.

    Example:
        >>> plan = plan_transform(None)
        >>> plan.is_batched, plan.obstacle
        (False, 'the transform ends with a PIL image')
    """
    reason = ""
    if obstacle:
        reason = f"runs as written, because {obstacle}"
    elif dtype != "uint8":
        reason = f"gets {dtype} samples, and batch ops know uint8 only"
    steps = flatten_transform(transform)
    each = _each_view(steps)
    prepare = _leading(each, prepared)
    plans = []
    for view in each:
        state = State(kind=form, channels=channels)
        plans.append(_plan(view, len(prepare), first, state, reason, only_last))
        first += len(view)
    *before, views = steps or (None,)
    if not isinstance(views, Views):
        return plans[0]
    if all(is_random(step) is False for step in before):
        return TransformPlan(prepare=prepare, kind=form, views=tuple(plans), made=views.kind)
    return TransformPlan(
        prepare=prepare,
        per_sample=steps[len(prepare) :],
        kind=form,
        reason="leads to views that share a random step; write it in each of them",
        made=views.kind,
    )


def _plan(
    steps: tuple[Transform, ...],
    prepared: int,
    first: int,
    state: State,
    reason: str,
    only_last: bool,
) -> TransformPlan:
    """Plan steps of which so many are prepared; a reason says why none is a batch op."""
    rest = steps[prepared:]
    for step in steps[:prepared]:
        with suppress(UnknownStepError):  # which are of ImageOps, or change nothing of such samples
            state = replace(state, kind=recognise(step, State(kind=state.kind)).kind)
    state = replace(state, at=first + prepared)
    known = 0
    last = None
    if not reason:
        if only_last:
            reason = "gets samples that are read one by one"
        else:
            known, state, reason = _read(rest, state)
        last = _read_last(rest, known + (not only_last), first + prepared, state)
    return TransformPlan(
        prepare=steps[:prepared],
        batch_ops=state.all_steps,
        per_sample=rest[known:],
        kind=state.kind,
        batch_texts=tuple(map(text_of_transform, rest[:known])),
        reason=reason if rest[known:] else "",
        last=last,
        may_draw=_may_draw(rest[:known]),
    )


def _read(steps: Sequence[Transform], state: State) -> tuple[int, State, str]:
    """How many steps are known, the state after these, and why the next one is not."""
    for number, step in enumerate(steps):
        try:
            state = recognise(step, state)
        except UnknownStepError as unknown:
            return number, state, str(unknown)
    return len(steps), state, ""


def _read_last(
    steps: Sequence[Transform], skipped: int, at: int, before: State
) -> TransformPlan | None:
    """Plan the steps that are known again behind one that is not, if that keeps PIL images."""
    if before.kind != "pil":
        return None
    for start in range(skipped, len(steps)):
        nothing = State(kind="pil", channels=before.channels, at=at + start)
        _, state, reason = _read(steps[start:], nothing)
        if not reason and state.kind != "pil":
            texts = tuple(map(text_of_transform, steps[start:]))
            return TransformPlan(
                kind=state.kind,
                batch_ops=state.all_steps,
                batch_texts=texts,
                may_draw=_may_draw(steps[start:]),
            )
    return None


def _may_draw(steps: Iterable[Transform]) -> bool:
    return any(is_random(step) is not False for step in steps)


def leading_transforms(transform: Any, prepared: int | None = None) -> tuple[Transform, ...]:
    """The steps that samples are stored after: those that may be, or as many as ``prepared``."""
    return _leading(_each_view(flatten_transform(transform)), prepared)


def _each_view(steps: tuple[Transform, ...]) -> list[tuple[Transform, ...]]:
    """The steps of each view that they end with, or of the only one."""
    *before, views = steps or (None,)
    if not isinstance(views, Views):
        return [steps]
    return [(*before, *flatten_transform(transform)) for transform in views.transforms]


def _leading(each: list[tuple[Transform, ...]], prepared: int | None) -> tuple[Transform, ...]:
    """The steps that all views begin with, and that may run once; or as many as ``prepared``."""
    steps = each[0]
    if len(each) > 1:
        alike = takewhile(_are_alike, zip(*each, strict=False))
        steps = tuple(first for first, *_ in alike)
    if prepared is not None:
        return steps[:prepared]
    leading = tuple(takewhile(is_preparable, steps))
    while leading and is_reforming(leading[-1]):  # a part of it only if more geometry follows
        leading = leading[:-1]
    return leading


def _are_alike(steps: tuple[Transform, ...]) -> bool:
    is_one = all(step is steps[0] for step in steps)
    return is_one or len({fingerprint(step, "") for step in steps}) == 1


def plan_pairs(
    transforms: Any, *, form: Form = "pil", channels: int | None = None, obstacle: str | None = None
) -> TransformPlan:
    """Plan a transform of v2 that takes an image and its mask: all on whole batches, or none.

    Args:
        transforms: the transform, or any callable that takes both.
        form: what images are.
        channels: of images, where they are known.
        obstacle: why it runs as written in any case.
    """
    steps = joint_transforms(transforms)
    image = _read(steps, State(kind=form, channels=channels))
    mask = _read(steps, State(kind="mask", channels=1, is_beside=True))
    known, _, reason = min(image, mask, key=lambda read: read[0])
    kind = image[1].kind
    if obstacle:
        reason = f"runs as written, because {obstacle}"
    elif reason and len(steps) > 1:
        reason = f"contains {text_of_transform(steps[known])}, which {reason}"
    elif not reason and kind == "pil":
        reason = "leaves images that are PIL's"
    if reason:
        return TransformPlan(per_sample=(transforms,), kind=form, reason=reason)
    return TransformPlan(
        batch_ops=image[1].all_steps,
        kind=kind,
        batch_texts=tuple(map(text_of_transform, steps)),
        mask=TransformPlan(batch_ops=mask[1].all_steps, kind=mask[1].kind),
        may_draw=_may_draw(steps),
    )


def split_upright(transform: Any) -> tuple[bool, tuple[Transform, ...]]:
    """Whether a transform begins with ``PIL.ImageOps.exif_transpose``, and its other steps."""
    steps = flatten_transform(transform)
    upright = bool(steps) and known_name(steps[0]) == "exif_transpose"
    return upright, steps[upright:]
