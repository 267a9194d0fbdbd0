"""``plan_transform``: cut the user's transform in what runs once, on whole batches, and per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from textwrap import shorten
from typing import Any, Literal

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
from fastdata.pixels.describe import describe, name_of
from fastdata.pixels.images import Form, Resize
from fastdata.pixels.ops import Op
from fastdata.pixels.state import State, UnknownStepError, interpolation_name, pair
from fastdata.pixels.steps import recognise

Step = Callable[[Any], Any]
_SHOWN_LETTERS = 100
"""Of a step within a reason."""


@dataclass(frozen=True, slots=True)
class StandardTransform:
    """torchvision's: a transform of the sample and one of the target, called with both."""

    transform: Callable[[Any], Any] | None
    target_transform: Callable[[Any], Any] | None

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
        last_steps: how many steps at the end of ``per_sample`` are known again. Where the steps
            before them give PIL images, ``last_ops`` run on whole batches in their place, whose
            samples are of ``last_kind`` then.
        views: the plans of several views of each sample, in place of all but ``prepare``, which
            they share; each may have steps per sample of its own.
        made: of what type several views of a sample are, list or tuple.
        mask: what becomes of the mask beside an image, where one transform takes both.
        beforehand: the dataset's own ``prepare=`` and ``resize=``, which run before the ``prepare``
            part.
    """

    kind: Form
    prepare: tuple[Step, ...] = ()
    batch_ops: tuple[Op, ...] = ()
    per_sample: tuple[Step, ...] = ()
    batch_texts: tuple[str, ...] = ()
    reason: str = ""
    last_steps: int = 0
    last_ops: tuple[Op, ...] = ()
    last_kind: Form = "pil"
    views: tuple[TransformPlan, ...] = ()
    made: type = list
    mask: TransformPlan | None = None
    beforehand: tuple[Step, ...] = ()

    @property
    def is_batched(self) -> bool:
        """Whether whole batches can be served as one tensor, without Python work per sample."""
        return self.obstacle is None

    @property
    def obstacle(self) -> str | None:
        """Why batches cannot be served as one tensor; None if they can."""
        if self.per_sample:
            return f"{shorten(_text(self.per_sample[0]), _SHOWN_LETTERS, placeholder=' ...')} {self.reason}"
        if self.views:
            obstacles = enumerate(view.obstacle for view in self.views)
            return next(
                (f"in view {number} {obstacle}" for number, obstacle in obstacles if obstacle), None
            )
        return "the transform ends with a PIL image" if self.kind == "pil" else None

    @property
    def each(self) -> tuple[TransformPlan, ...]:
        """The plan of each view; this one where there are none."""
        return self.views or (self,)

    @property
    def first_unknown(self) -> Step | None:
        """The first step that runs per sample, in any view; None where there is none."""
        return next((view.per_sample[0] for view in self.each if view.per_sample), None)

    @property
    def end_kind(self) -> Form | None:
        """What samples are after all steps, as far as that is known."""
        if self.views:
            kinds = {view.end_kind for view in self.views}
            return kinds.pop() if len(kinds) == 1 else None
        if self.last_steps:
            return self.last_kind
        return None if self.per_sample else self.kind

    @property
    def _unknown(self) -> tuple[Step, ...]:
        return self.per_sample[: len(self.per_sample) - self.last_steps]

    def run_unknown(self, sample: Any) -> Any:
        """Run the per sample part, but for its last steps, on one sample of ``kind``, after the batch ops."""
        return run_steps(self._unknown, sample)

    def run_last(self, sample: Any) -> Any:
        """Run the last steps as they are written, on a sample that ``last_ops`` are not for."""
        return run_steps(self.per_sample[len(self._unknown) :], sample)

    @property
    def prepare_text(self) -> str:
        """The prepare part as its steps show themselves now; empty if there is none."""
        return ", ".join(map(repr, self.prepare))

    def __repr__(self) -> str:
        prepare = ", ".join(map(_text, (*self.beforehand, *self.prepare))) or "-"
        lines = [f"prepare, once per sample:     {prepare}"]
        for number, view in enumerate(self.views):
            lines += view._serving_lines(f"view {number}, on whole batches:     ")
        lines += [] if self.views else self._serving_lines("batch ops, on whole batches:  ")
        if self.mask:
            lines.append(f"    masks are moved along:        nearest, served as {self.mask.kind}")
        return "\n".join(lines)

    def _serving_lines(self, first: str) -> list[str]:
        lines = [
            f"{first}{', '.join(self.batch_texts) or '-'}",
            f"per sample, as written:       {', '.join(map(_text, self._unknown)) or '-'}",
        ]
        if self.per_sample:
            lines.append(f"    because {self.obstacle}")
            if self.last_steps:
                last = ", ".join(map(_text, self.per_sample[-self.last_steps :]))
                lines.append(f"after them, on whole batches:  {last}")
        elif self.obstacle:
            lines.append(f"    served one by one, because {self.obstacle}")
        return lines


def plan_transform(
    transform: Any,
    *,
    form: Form = "pil",
    dtype: str = "uint8",
    channels: int | None = None,
    batch_ops: Literal["auto", "last", "off"] = "auto",
    prepared: int | None = None,
    obstacle: str | None = None,
    first: int = 0,
) -> TransformPlan:
    """Cut a transform in what runs once per sample, on whole batches, and per sample.

    Args:
        transform: a torchvision Compose (v1 or v2, nested or not), a single transform,
            ``nn.Sequential``, or None.
        form: what the samples are: those of the source or, the same in effect, those in the store.
        dtype: of the stored samples; batch ops know uint8 only.
        channels: of the stored samples, where they are known; colours need 1 or 3.
        batch_ops: ``"off"`` leaves all but the prepare part to run per sample; ``"last"`` all but
            that and the known steps at the end.
        prepared: how many of the leading steps samples are stored after, where they are stored
            already; all others run when they are read.
        obstacle: why there are no batch ops on this machine.
        first: number that random draws know the first step by.

    Example:
        >>> plan = plan_transform(None)
        >>> plan.is_batched, plan.obstacle
        (False, 'the transform ends with a PIL image')
    """
    steps = flatten(transform)
    if steps and isinstance(steps[-1], Views):
        facts: dict[str, Any] = {"form": form, "dtype": dtype, "channels": channels}
        facts |= {"batch_ops": batch_ops, "obstacle": obstacle}
        return _plan_views(steps[:-1], steps[-1], prepared, first, facts)
    leading = _leading(steps) if prepared is None else steps[:prepared]
    state, known, reason = State(kind=form), len(leading), ""
    for step in leading:
        with suppress(UnknownStepError):  # which are of ImageOps, or change nothing of such samples
            state = recognise(step, 0, state)
    state = State(kind=state.kind, channels=channels)
    last_steps, last = 0, state
    if batch_ops == "off":
        reason = "runs as written, because batch_ops=False"
    elif obstacle is not None:
        reason = f"runs as written, because {obstacle}"
    elif batch_ops == "last":
        reason = "gets samples that are read one by one"
        last_steps, last = _read_last(steps, known - 1, first, state)
    elif dtype != "uint8":
        reason = f"gets {dtype} samples, and batch ops know uint8 only"
    while known < len(steps) and not reason:
        try:
            state = recognise(steps[known], first + known, state)
            known += 1
        except UnknownStepError as unknown:
            reason = str(unknown)
            last_steps, last = _read_last(steps, known, first, state)
    return TransformPlan(
        prepare=leading,
        batch_ops=state.all_ops,
        per_sample=steps[known:],
        kind=state.kind,
        batch_texts=tuple(map(_text, steps[len(leading) : known])),
        reason=reason if steps[known:] else "",
        last_steps=last_steps,
        last_ops=last.all_ops if last_steps else (),
        last_kind=last.kind,
    )


def leading_steps(transform: Any, prepared: int | None = None) -> tuple[Step, ...]:
    """The steps that samples are stored after: those that may be, or as many as ``prepared``."""
    steps = flatten(transform)
    if steps and isinstance(steps[-1], Views):
        steps = _common([(*steps[:-1], *flatten(view)) for view in steps[-1].transforms])
    return _leading(steps) if prepared is None else steps[:prepared]


def _leading(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    leading = tuple(takewhile(is_preparable, steps))
    while leading and is_reforming(leading[-1]):  # a part of it only if more geometry follows
        leading = leading[:-1]
    return leading


def _common(each: list[tuple[Step, ...]]) -> tuple[Step, ...]:
    """The steps that several views begin with."""
    alike = takewhile(_are_alike, zip(*each, strict=False))
    return tuple(steps[0] for steps in alike)


def _are_alike(steps: tuple[Step, ...]) -> bool:
    return (
        all(step is steps[0] for step in steps) or len({describe(step, "") for step in steps}) == 1
    )


def prepare_key(steps: Iterable[Step]) -> str:
    """Text that is equal, in any process, for leading steps that do the same; empty if there are none."""
    return " | ".join(map(_state_text, steps))


def _state_text(step: Any) -> str:
    kind = type(step)
    held = {name: value for name, value in getattr(step, "__dict__", {}).items() if name[0] != "_"}
    held.pop("training", None)
    text = f"{kind.__module__}.{kind.__qualname__} {held or repr(step)}"
    return describe(step, "") if " at 0x" in text else text


def _plan_views(
    before: tuple[Step, ...], views: Views, prepared: int | None, first: int, facts: dict[str, Any]
) -> TransformPlan:
    """Plan each view by itself, behind what all of them begin with, with numbers of its own for what it draws."""
    each = [(*before, *flatten(transform)) for transform in views.transforms]
    common = _common(each)
    prepare = _leading(common) if prepared is None else common[:prepared]
    plans: list[TransformPlan] = []
    for steps in each:
        plans.append(plan_transform(steps, prepared=len(prepare), first=first, **facts))
        first += len(steps)
    reason, kinds = "", {plan.end_kind for plan in plans} - {None}
    if any(is_random(step) is not False for step in before):
        reason = "leads to views that share a random step; write it in each of them"
    elif len(kinds) > 1:
        reason = "leads to views of several types"
    if reason:
        rest = Views(*(steps[max(len(before), len(prepare)) :] for steps in each))
        rest.kind = views.kind
        return TransformPlan(
            prepare=prepare,
            per_sample=(*before[len(prepare) :], rest),
            kind=facts["form"],
            reason=reason,
            made=views.kind,
        )
    return TransformPlan(prepare=prepare, kind=plans[0].kind, views=tuple(plans), made=views.kind)


def plan_pairs(
    transforms: Any,
    *,
    form: Form = "pil",
    channels: int | None = None,
    obstacle: str | None = None,
) -> TransformPlan:
    """Plan a transform of v2 that takes an image and the mask beside it: all on whole batches, or none.

    Args:
        transforms: the transform, or any callable that takes both.
        form: what images are.
        channels: of images, where they are known.
        obstacle: why it runs as written in any case.
    """
    steps = joint_steps(transforms)
    image = State(kind=form, channels=channels)
    mask = State(kind="mask", channels=1, is_beside=True)
    reason = f"runs as written, because {obstacle}" if obstacle else ""
    try:
        for at, step in enumerate(() if reason else steps):
            image = recognise(step, at, image)
            mask = recognise(step, at, mask)
    except UnknownStepError as unknown:
        reason = f"contains {_text(step)}, which {unknown}" if len(steps) > 1 else str(unknown)
    if not reason and image.kind == "pil":
        reason = "leaves images that are PIL's"
    if reason:
        return TransformPlan(per_sample=(transforms,), kind=form, reason=reason)
    return TransformPlan(
        batch_ops=image.all_ops,
        kind=image.kind,
        batch_texts=tuple(map(_text, steps)),
        mask=TransformPlan(batch_ops=mask.all_ops, kind=mask.kind),
    )


def _read_last(
    steps: tuple[Step, ...], unknown: int, first: int, before: State
) -> tuple[int, State]:
    """How many steps at the end are known again behind one that is not, if that keeps PIL images; and their ops."""
    nothing = State(kind="pil", channels=before.channels)
    for start in range(unknown + 1, len(steps)) if before.kind == "pil" else ():
        state = nothing
        with suppress(UnknownStepError):
            for at in range(start, len(steps)):
                state = recognise(steps[at], first + at, state)
            if state.kind != "pil":
                return len(steps) - start, state
    return 0, nothing


def split_upright(transform: Any) -> tuple[bool, tuple[Step, ...]]:
    """Whether a transform begins with ``PIL.ImageOps.exif_transpose``, and its other steps."""
    steps = flatten(transform)
    upright = bool(steps) and known_name(steps[0]) == "exif_transpose"
    return upright, steps[upright:]


def read_resize(step: Any) -> tuple[int | tuple[int, int], Literal["bilinear", "bicubic"]] | None:
    """Size, as ``fastdata.pixels.images`` takes it, and filter of a torchvision ``Resize``; None for anything else."""
    if known_name(step) != "Resize" or step.max_size is not None:
        return None
    smooth: Any = interpolation_name(step.interpolation)
    if smooth not in ("bilinear", "bicubic"):
        return None
    sides = [step.size] if isinstance(step.size, int) else list(step.size)
    return (sides[0] if len(sides) == 1 else pair(sides)), smooth


def read_center_crop(step: Any) -> tuple[int, int] | None:
    """(height, width) of a torchvision ``CenterCrop``; None for anything else."""
    return pair(step.size) if known_name(step) == "CenterCrop" else None


def describe_steps(
    steps: Iterable[Any], cache_key: str | None = None, *, is_pil: bool = False
) -> str:
    """Text that is equal for steps that do the same, one after the other; ``cache_key`` as in ``describe``.

    Resize and centre crop of samples that are PIL images have one text whoever wrote them:
    torchvision v1, v2, or ``resize=``.
    """
    texts: list[str] = []
    for step in steps:
        resize = (step.size, "bilinear") if isinstance(step, Resize) else read_resize(step)
        crop = read_center_crop(step)
        is_pil = is_pil and not (resize is None and crop is None)
        if is_pil and resize is not None:
            size, smooth = resize
            texts.append(f"resize {size if isinstance(size, (int, str)) else tuple(size)} {smooth}")
        elif is_pil:
            texts.append(f"centre crop {crop}")
        else:
            name = getattr(step, "__qualname__", type(step).__qualname__)
            texts.append(name_of(step) or f"{name} {describe(step, cache_key)}")
    return " | ".join(texts)


def _text(step: Any) -> str:
    return " ".join(repr(step).split()).replace("( ", "(").replace(" )", ")")
