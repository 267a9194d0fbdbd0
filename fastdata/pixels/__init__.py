"""The user's transform, cut in what runs once, on whole batches, and per sample.

``compose`` says which steps a transform has, ``steps`` reads torchvision's and timm's as ``ops``,
``program`` runs what is left for whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from textwrap import shorten
from typing import Any

from fastdata.pixels.arguments import interpolation_name, pair, several
from fastdata.pixels.compose import (
    Views,
    flatten,
    is_preparable,
    is_random,
    is_reforming,
    joint_steps,
    known_name,
    run_steps,
)
from fastdata.pixels.describe import describe as describe_step
from fastdata.pixels.describe import name_of
from fastdata.pixels.images import Form
from fastdata.pixels.readers import recognise
from fastdata.pixels.state import State, UnknownStepError
from fastdata.pixels.steps import Steps

Step = Callable[[Any], Any]
PairStep = Callable[[Any, Any], Any]
_SHOWN_LETTERS = 100
"""Of a step within a reason."""


@dataclass(frozen=True, slots=True)
class StandardTransform:
    """torchvision's: a transform of the sample and one of the target, called with both."""

    transform: Step | None
    target_transform: Step | None

    def __call__(self, sample: Any, target: Any) -> tuple[Any, Any]:
        if self.transform is not None:
            sample = self.transform(sample)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return sample, target


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TransformPlan:
    """A transform in three parts; made by ``plan_transform``, printed by ``print(dataset.plan)``.

    Attributes:
        prepare: the user's own leading deterministic objects; run once per sample, before it is
            stored.
        batch_ops: what runs on whole batches.
        per_sample: the user's own objects that run on each sample, as they are.
        kind: what a sample is after the batch ops.
        batch_texts: the steps behind ``batch_ops``, as the user wrote them.
        reason: why the first of ``per_sample`` is no batch op; empty if there is none.
        last: the plan of those steps at the end of ``per_sample`` that are known again: they run on
            whole batches where the steps before them give PIL images.
        views: the plans of several views of each sample, in place of all but ``prepare``, which
            they share; each may have steps per sample of its own.
        made: of what type several views of a sample are, list or tuple.
        mask: what becomes of the mask beside an image, where one transform takes both.
        beforehand: the dataset's own ``prepare=`` and ``resize=``, which run before the ``prepare``
            part.
        may_draw: True if one of ``batch_ops`` draws random numbers, or is not known not to.
    """

    kind: Form
    prepare: tuple[Step, ...] = ()
    batch_ops: Steps = ()
    per_sample: tuple[Step, ...] = ()
    batch_texts: tuple[str, ...] = ()
    reason: str = ""
    last: TransformPlan | None = None
    views: tuple[TransformPlan, ...] = ()
    made: type = list
    mask: TransformPlan | None = None
    beforehand: tuple[Step, ...] = ()
    may_draw: bool = False

    @property
    def is_batched(self) -> bool:
        """Whether whole batches can be served as one tensor, without Python work per sample."""
        return self.obstacle is None

    @property
    def obstacle(self) -> str | None:
        """Why batches cannot be served as one tensor; None if they can."""
        if self.per_sample:
            step = shorten(text_of_step(self.per_sample[0]), _SHOWN_LETTERS, placeholder=" ...")
            return f"{step} {self.reason}"
        for number, view in enumerate(self.views):
            if view.obstacle:
                return f"in view {number} {view.obstacle}"
        is_pil = self.kind == "pil" and not self.views
        return "the transform ends with a PIL image" if is_pil else None

    @property
    def each(self) -> tuple[TransformPlan, ...]:
        """The plan of each view; this one where there are none."""
        return self.views or (self,)

    @property
    def end_kind(self) -> Form | None:
        """What samples are after all steps, as far as that is known; views each know their own."""
        if self.last:
            return self.last.kind
        return None if self.per_sample else self.kind

    @property
    def unknown(self) -> tuple[Step, ...]:
        """The steps per sample, but for those of ``last``."""
        known = len(self.last.batch_texts) if self.last else 0
        return self.per_sample[: len(self.per_sample) - known]

    def run_unknown(self, sample: Any) -> Any:
        """Run the per sample part, but for its last steps, on a sample of ``kind``."""
        return run_steps(self.unknown, sample)

    def run_last(self, sample: Any) -> Any:
        """Run the last steps as they are written, on a sample that ``last`` is not for."""
        return run_steps(self.per_sample[len(self.unknown) :], sample)

    def __repr__(self) -> str:
        prepare = ", ".join(map(text_of_step, (*self.beforehand, *self.prepare))) or "-"
        lines = [f"prepare, once per sample:     {prepare}"]
        for number, view in enumerate(self.each):
            first = f"view {number}, on whole batches:     "
            if not self.views:
                first = "batch ops, on whole batches:  "
            unknown = ", ".join(map(text_of_step, view.unknown)) or "-"
            lines.append(f"{first}{', '.join(view.batch_texts) or '-'}")
            lines.append(f"per sample, as written:       {unknown}")
            if view.per_sample:
                lines.append(f"    because {view.obstacle}")
            elif view.obstacle:
                lines.append(f"    served one by one, because {view.obstacle}")
            if view.last:
                lines.append(f"after them, on whole batches:  {', '.join(view.last.batch_texts)}")
        if self.mask:
            lines.append(f"    masks are moved along:        nearest, served as {self.mask.kind}")
        return "\n".join(lines)


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
    steps = flatten(transform)
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
    steps: tuple[Step, ...], prepared: int, first: int, state: State, reason: str, only_last: bool
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
        batch_texts=tuple(map(text_of_step, rest[:known])),
        reason=reason if rest[known:] else "",
        last=last,
        may_draw=_may_draw(rest[:known]),
    )


def _read(steps: Sequence[Step], state: State) -> tuple[int, State, str]:
    """How many steps are known, the state after these, and why the next one is not."""
    for number, step in enumerate(steps):
        try:
            state = recognise(step, state)
        except UnknownStepError as unknown:
            return number, state, str(unknown)
    return len(steps), state, ""


def _read_last(steps: Sequence[Step], skipped: int, at: int, before: State) -> TransformPlan | None:
    """Plan the steps that are known again behind one that is not, if that keeps PIL images."""
    if before.kind != "pil":
        return None
    for start in range(skipped, len(steps)):
        nothing = State(kind="pil", channels=before.channels, at=at + start)
        _, state, reason = _read(steps[start:], nothing)
        if not reason and state.kind != "pil":
            texts = tuple(map(text_of_step, steps[start:]))
            return TransformPlan(
                kind=state.kind,
                batch_ops=state.all_steps,
                batch_texts=texts,
                may_draw=_may_draw(steps[start:]),
            )
    return None


def _may_draw(steps: Iterable[Step]) -> bool:
    return any(is_random(step) is not False for step in steps)


def leading_steps(transform: Any, prepared: int | None = None) -> tuple[Step, ...]:
    """The steps that samples are stored after: those that may be, or as many as ``prepared``."""
    return _leading(_each_view(flatten(transform)), prepared)


def _each_view(steps: tuple[Step, ...]) -> list[tuple[Step, ...]]:
    """The steps of each view that they end with, or of the only one."""
    *before, views = steps or (None,)
    if not isinstance(views, Views):
        return [steps]
    return [(*before, *flatten(transform)) for transform in views.transforms]


def _leading(each: list[tuple[Step, ...]], prepared: int | None) -> tuple[Step, ...]:
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


def _are_alike(steps: tuple[Step, ...]) -> bool:
    is_one = all(step is steps[0] for step in steps)
    return is_one or len({describe_step(step, "") for step in steps}) == 1


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
    steps = joint_steps(transforms)
    image = _read(steps, State(kind=form, channels=channels))
    mask = _read(steps, State(kind="mask", channels=1, is_beside=True))
    known, _, reason = min(image, mask, key=lambda read: read[0])
    kind = image[1].kind
    if obstacle:
        reason = f"runs as written, because {obstacle}"
    elif reason and len(steps) > 1:
        reason = f"contains {text_of_step(steps[known])}, which {reason}"
    elif not reason and kind == "pil":
        reason = "leaves images that are PIL's"
    if reason:
        return TransformPlan(per_sample=(transforms,), kind=form, reason=reason)
    return TransformPlan(
        batch_ops=image[1].all_steps,
        kind=kind,
        batch_texts=tuple(map(text_of_step, steps)),
        mask=TransformPlan(batch_ops=mask[1].all_steps, kind=mask[1].kind),
        may_draw=_may_draw(steps),
    )


def split_upright(transform: Any) -> tuple[bool, tuple[Step, ...]]:
    """Whether a transform begins with ``PIL.ImageOps.exif_transpose``, and its other steps."""
    steps = flatten(transform)
    upright = bool(steps) and known_name(steps[0]) == "exif_transpose"
    return upright, steps[upright:]


# Steps as text


def describe_steps(
    steps: Iterable[Any], cache_key: str | None = None, *, is_pil: bool = False
) -> str:
    """Text that is equal, in any process, for steps that do the same; empty for none.

    ``cache_key`` is as in ``describe``. Resize and centre crop of samples that are PIL images have
    one text whoever wrote them: torchvision v1, v2, or ``resize=``.
    """
    texts = []
    for step in steps:
        text = _geometry_text(step) if is_pil else None
        is_pil = text is not None
        texts.append(text or _text_of_known(step) or _text_of_any(step, cache_key))
    return " | ".join(texts)


def _text_of_known(step: Any) -> str | None:
    """Return class and attributes of a step that is known; None where these show an address."""
    if not known_name(step):
        return None
    held = getattr(step, "__dict__", {}).items()
    shown = {name: it for name, it in held if name[0] != "_" and name != "training"}
    text = f"{type(step)} {shown or repr(step)}"
    return None if " at 0x" in text else text


def _text_of_any(step: Any, cache_key: str | None) -> str:
    name = getattr(step, "__qualname__", type(step).__qualname__)
    return name_of(step) or f"{name} {describe_step(step, cache_key)}"


def _geometry_text(step: Any) -> str | None:
    name = known_name(step)
    if name == "CenterCrop":
        return f"centre crop {pair(step.size)}"
    if name != "Resize" or step.max_size is not None:
        return None
    smooth = interpolation_name(step.interpolation)
    if smooth not in ("bilinear", "bicubic"):
        return None
    sides = several(step.size)
    size = sides[0] if len(sides) == 1 else pair(sides)
    return f"resize {size} {smooth}"


def text_of_step(step: Any) -> str:
    try:
        shown = repr(step)
    except Exception:  # noqa: BLE001  # the repr of a user's own step may raise anything
        shown = type(step).__name__
    return " ".join(shown.split()).replace("( ", "(").replace(" )", ")")
