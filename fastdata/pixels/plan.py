"""A transform in parts: what runs once, on whole batches, and per sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from fastdata.pixels.own_transforms import run_transforms
from fastdata.pixels.samples import Form
from fastdata.pixels.steps import Steps

Transform = Callable[[Any], Any]

PairTransform = Callable[[Any, Any], Any]

_SHOWN_LETTERS = 100
"""Of a step within a reason."""


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
    prepare: tuple[Transform, ...] = ()
    batch_ops: Steps = ()
    per_sample: tuple[Transform, ...] = ()
    batch_texts: tuple[str, ...] = ()
    reason: str = ""
    last: TransformPlan | None = None
    views: tuple[TransformPlan, ...] = ()
    made: type = list
    mask: TransformPlan | None = None
    beforehand: tuple[Transform, ...] = ()
    may_draw: bool = False

    @property
    def is_batched(self) -> bool:
        """Whether whole batches can be served as one tensor, without Python work per sample."""
        return self.obstacle is None

    @property
    def obstacle(self) -> str | None:
        """Why batches cannot be served as one tensor; None if they can."""
        if self.per_sample:
            step = shorten(
                text_of_transform(self.per_sample[0]), _SHOWN_LETTERS, placeholder=" ..."
            )
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
    def unknown(self) -> tuple[Transform, ...]:
        """The steps per sample, but for those of ``last``."""
        known = len(self.last.batch_texts) if self.last else 0
        return self.per_sample[: len(self.per_sample) - known]

    def run_unknown(self, sample: Any) -> Any:
        """Run the per sample part, but for its last steps, on a sample of ``kind``."""
        return run_transforms(self.unknown, sample)

    def run_last(self, sample: Any) -> Any:
        """Run the last steps as they are written, on a sample that ``last`` is not for."""
        return run_transforms(self.per_sample[len(self.unknown) :], sample)

    def __repr__(self) -> str:
        prepare = ", ".join(map(text_of_transform, (*self.beforehand, *self.prepare))) or "-"
        lines = [f"prepare, once per sample:     {prepare}"]
        for number, view in enumerate(self.each):
            first = f"view {number}, on whole batches:     "
            if not self.views:
                first = "batch ops, on whole batches:  "
            unknown = ", ".join(map(text_of_transform, view.unknown)) or "-"
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


def text_of_transform(step: Any) -> str:
    try:
        shown = repr(step)
    except Exception:  # noqa: BLE001  # the repr of a user's own step may raise anything
        shown = type(step).__name__
    return " ".join(shown.split()).replace("( ", "(").replace(" )", ")")
