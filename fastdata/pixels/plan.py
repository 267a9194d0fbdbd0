"""The parts of a user's transform: steps that run once, on whole batches, and per sample."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from textwrap import shorten
from types import FunctionType
from typing import Any

from fastdata.pixels.draws import is_random
from fastdata.pixels.known import known_name
from fastdata.pixels.own_transforms import run_transforms
from fastdata.pixels.samples import Form
from fastdata.pixels.steps import Steps

Transform = Callable[[Any], Any]
PairTransform = Callable[[Any, Any], Any]
NOT_STORED = "storage='none' prepares every sample when it is read"
"""Reason why known transforms run per sample if samples are not stored."""
_SHOWN_LETTERS = 100
"""Most letters of a transform's text in a reason."""
_SHOWN_MASKS = {
    "hw": "as albumentations moves masks, as arrays (H, W)",
    "plane": "as albumentations moves masks, as tensors (H, W)",
}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TransformPlan:
    """A transform in three parts; ``plan_transform`` makes it, ``print(dataset.plan)`` shows it.

    Attributes:
        prepare: your first transforms that are known and not random. They run once per sample,
            before it is stored.
        batched: your transforms that run on whole batches.
        per_sample: your transforms that run on each sample, as you wrote them.
        reason: why the first of ``per_sample`` does not run on whole batches; empty if there is
            none.
        last: plan of the known transforms at the end of ``per_sample``. They run on whole batches
            if the transforms before them return PIL images.
        batch_ops: the records of the compiled core that ``batched`` was turned into.
        kind: form of a sample after ``batched``, such as ``"pil"`` or ``"tensor"``.
        views: plans of several views of each sample. They share ``prepare``, and replace the other
            parts; each view may have its own transforms per sample.
        views_type: type of the collection of views that a sample becomes, list or tuple.
        mask: plan of the mask that belongs to an image, if the transform takes both.
        beforehand: the dataset's own ``prepare=`` and ``resize=``, which run before ``prepare``.
        is_prepared: False if ``prepare`` runs on every read: nothing is stored, or the files are.
    """

    kind: Form
    prepare: tuple[Transform, ...] = ()
    batch_ops: Steps = ()
    per_sample: tuple[Transform, ...] = ()
    batched: tuple[Transform, ...] = ()
    reason: str = ""
    last: TransformPlan | None = None
    views: tuple[TransformPlan, ...] = ()
    views_type: type = list
    mask: TransformPlan | None = None
    beforehand: tuple[Transform, ...] = ()
    is_prepared: bool = True

    @property
    def may_draw(self) -> bool:
        """True unless all ``batch_ops`` are known to draw no random numbers."""
        return any(is_random(transform) is not False for transform in self.batched)

    @property
    def is_batched(self) -> bool:
        """True if whole batches can be made as one tensor, without Python code per sample."""
        return self.obstacle is None

    @property
    def obstacle(self) -> str | None:
        """The reason why batches cannot be made as one tensor; None if they can."""
        if self.per_sample and self.reason != NOT_STORED:
            first = text_of_transform(self.per_sample[0])
            return f"{shorten(first, _SHOWN_LETTERS, placeholder=' ...')} {self.reason}"
        for number, view in enumerate(self.views):
            if view.obstacle:
                return f"in view {number} {view.obstacle}"
        is_pil = self.kind == "pil" and not self.views
        return self.reason or ("the transform ends with a PIL image" if is_pil else None)

    @property
    def each(self) -> tuple[TransformPlan, ...]:
        """The plan of each view, or this plan alone."""
        return self.views or (self,)

    @property
    def end_kind(self) -> Form | None:
        """The form of samples after all transforms; None if it is not known."""
        if self.last:
            return self.last.kind
        return None if self.per_sample else self.kind

    @property
    def unknown(self) -> tuple[Transform, ...]:
        """The transforms of ``per_sample`` before those of ``last``."""
        known = len(self.last.batched) if self.last else 0
        return self.per_sample[: len(self.per_sample) - known]

    def run_unknown(self, sample: Any) -> Any:
        """Run the unknown transforms on a sample of ``kind``."""
        return run_transforms(self.unknown, sample)

    def run_last(self, sample: Any) -> Any:
        """Run the last transforms as the user wrote them, on a sample that is not a PIL image."""
        return run_transforms(self.per_sample[len(self.unknown) :], sample)

    def __repr__(self) -> str:
        when = "once per sample:" if self.is_prepared else "on every read:  "
        lines = [f"prepare, {when}     {_texts((*self.beforehand, *self.prepare))}"]
        for number, view in enumerate(self.each):
            name = f"view {number}" if self.views else "batch ops"
            lines.append(f"{name + ', on whole batches:':30}{_texts(view.batched)}")
            lines.append(f"per sample, as written:       {_texts(view.unknown)}")
            if view.obstacle:
                how = "" if view.per_sample else "one by one, "
                lines.append(f"    {how}because {view.obstacle}")
            if view.last:
                lines.append(f"after them, on whole batches:  {_texts(view.last.batched)}")
        if self.mask:
            how = _SHOWN_MASKS.get(self.mask.kind, f"nearest, as {self.mask.kind}")
            lines.append(f"    masks move with images:       {how}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return a table for notebooks: a column for each of the three parts, a line for a step."""
        first = _lines((*self.beforehand, *self.prepare))
        rows = []
        for view in self.each:
            batched = _lines((*view.batched, *(view.last.batched if view.last else ())))
            unknown = _lines(view.unknown)
            if view.obstacle:
                unknown += f"<br><i>because {escape(view.obstacle)}</i>"
            rows.append((first, batched, unknown))
        # By default, notebooks align the text of a table to the right.
        cell = '<td style="text-align:left; vertical-align:top">{}</td>'
        cells = "".join(f"<tr>{''.join(map(cell.format, row))}</tr>" for row in rows)
        when = "once per image" if self.is_prepared else "on every read"
        titles = (when, "on whole batches", "per sample, in Python")
        head = "".join(f'<th style="text-align:left">{title}</th>' for title in titles)
        return f"<table><tr>{head}</tr>{cells}</table>"


def _lines(transforms: tuple[Transform, ...]) -> str:
    """Return HTML with a line for each transform."""
    return "<br>".join(escape(text_of_transform(each)) for each in transforms) or "-"


def _texts(transforms: tuple[Transform, ...]) -> str:
    return ", ".join(map(text_of_transform, transforms)) or "-"


def text_of_transform(transform: Any) -> str:
    """Return the ``repr`` of a transform on one line; for a function its name, file and line."""
    if known_name(transform) == "Lambda":
        return f"Lambda({text_of_transform(transform.lambd)})"
    if type(transform) is FunctionType:
        code = transform.__code__
        place = f"{os.path.basename(code.co_filename)}, line {code.co_firstlineno}"
        return f"{transform.__qualname__} ({place})"
    try:
        shown = repr(transform)
    except Exception:  # noqa: BLE001  # the repr of a transform of the user may raise anything
        shown = type(transform).__name__
    return " ".join(shown.split()).replace("( ", "(").replace(" )", ")")
