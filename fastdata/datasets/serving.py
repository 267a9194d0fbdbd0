"""From how samples were prepared and the user's transform to the ``Reader`` that serves them.

``compile_reader`` decides all that cannot change while neither is changed: it runs when a dataset
is made, when another transform is assigned, and when an epoch begins after one was changed in
place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdata.datasets.batch import SharedVisits
from fastdata.datasets.reader import Lane, Reader, Watch
from fastdata.errors import SampleError
from fastdata.machine.memory import StoragePlan
from fastdata.machine.shared import SampleTable
from fastdata.pixels import (
    TransformPlan,
    core,
    leading_steps,
    plan_pairs,
    plan_transform,
    prepare_key,
    split_upright,
)
from fastdata.pixels.compose import cure_for, known_name
from fastdata.pixels.images import SampleSpec, opening_of
from fastdata.pixels.program import Program
from fastdata.report import warn_user
from fastdata.sources import FileSource, Source
from fastdata.stores.options import Options
from fastdata.stores.prepare import Prepared
from fastdata.stores.readers import Store
from fastdata.stores.samples import KeptSamples, ReadPath, Steps, is_fetched

Step = Callable[[Any], Any]
_DECODED = SampleSpec(shape=None, dtype="uint8", form="pil")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """How the samples of a dataset were prepared.

    Attributes:
        samples: kept ones, or what they are read from.
        table: paths and targets; None where they are asked of the source.
        source: what samples were read from, to prepare them again; copies in other processes do not
            know it.
        options: of the dataset.
        first_steps: its ``prepare=`` and ``resize=``, which run before the transform.
        storage_plan, skipped: as the dataset shows them.
        after: how many leading steps of the transform samples are stored after, and their key; None
            where none are stored.
        after_text: these steps as they were then, for errors.
        unfit_after: the key of the steps that samples did not fit after, so that ``storage="auto"``
            keeps none.
        is_upright: whether samples were turned as their EXIF says, so that nothing of it is missed.
        is_remote: whether samples that are not kept are fetched from behind a URL.
    """

    samples: KeptSamples | Source
    table: SampleTable | None
    options: Options
    storage_plan: StoragePlan
    source: Source | None = None
    first_steps: tuple[Step, ...] = ()
    skipped: tuple[SampleError, ...] = ()
    after: tuple[int, str] | None = None
    after_text: str = ""
    unfit_after: str | None = None
    is_upright: bool = False
    is_remote: bool = False

    @property
    def kept(self) -> KeptSamples | None:
        return self.samples if isinstance(self.samples, KeptSamples) else None

    def filled_share(self) -> float:
        return 0.0 if self.kept is None else self.kept.filled_share()

    def steps(self, plan: TransformPlan) -> tuple[Step, ...]:
        return (*self.first_steps, *plan.prepare)

    def split(self, transform: Any, **facts: Any) -> TransformPlan:
        """Split a transform; a ValueError if it does not begin with the stored steps."""
        count, key = self.after or (None, None)
        plan = plan_transform(transform, prepared=count, **facts)
        if key is not None and prepare_key(plan.prepare) != key:
            raise ValueError(
                f"samples are stored after {self.after_text or 'no step'}, "
                "but the transform now begins with "
                f"{plan.prepare_text or 'none'}. Give it the same first steps, or assign another "
                "transform to dataset.transform in the process that made the dataset, "
                "which prepares samples again."
            )
        return plan

    def filled(
        self,
        prepared: Prepared,
        source: Source,
        table: SampleTable | None,
        leading: tuple[Step, ...],
    ) -> Stored:
        """This once samples were prepared after ``leading`` steps of the transform."""
        kept, key = prepared.kept, prepare_key(leading)
        is_unfit = kept is None and self.options.storage == "auto" and len(source) > 0
        return replace(
            self,
            samples=source if kept is None else kept,
            table=table if kept is None else kept.table,
            source=source,
            storage_plan=prepared.storage_plan,
            skipped=tuple(prepared.skipped),
            after=None if kept is None else (len(leading), key),
            after_text=", ".join(map(repr, leading)),
            unfit_after=key if is_unfit else None,
            is_upright="exif_transpose" in map(known_name, (*self.first_steps, *leading)),
            is_remote=is_fetched(source),
        )

    def is_to_prepare_again(self, transform: Any, *, was_read: bool) -> bool:
        """Whether the store is after other steps than the transform's, or a better one is unused.

        timm makes a dataset without a transform and assigns one later: images were kept whole, and
        nobody has read any.
        """
        # After other steps samples may fit.
        if self.unfit_after is not None and self.source is not None:
            return prepare_key(leading_steps(transform)) != self.unfit_after
        if self.after is None:
            return False
        count, stored_key = self.after
        if prepare_key(leading_steps(transform, count)) != stored_key:
            return True
        is_unused = self.filled_share() == 0 or (not stored_key and not was_read)
        return (
            is_unused
            and self.source is not None
            and prepare_key(leading_steps(transform)) != stored_key
        )


def compile_reader(
    stored: Stored,
    *,
    transform: Any,
    target_transform: Callable[[Any], Any] | None,
    pair_transform: Callable[[Any, Any], Any] | None,
    visits: SharedVisits,
    own: str,
) -> Reader:
    """Compile the user's transforms for samples as they are stored; see ``Reader``.

    Raises:
        ValueError: the transform does not begin with the steps that samples are stored after.
    """
    options, kept, beforehand = stored.options, stored.kept, stored.first_steps
    path, is_upright = None, stored.is_upright
    if kept is not None:
        lanes, plan = _lanes_of_kept(stored, kept, transform)
    else:
        known: Any = "last" if options.batch_ops else "off"
        plan = stored.split(transform, batch_ops=known, obstacle=core.obstacle())
        is_upright = "exif_transpose" in map(known_name, stored.steps(plan))
        path = ReadPath(stored.samples, Steps(stored.steps(plan)))
        lanes = tuple(map(Lane, plan.each))
        decoding = _decoding(stored, transform) if pair_transform is None else None
        if decoding is not None:
            is_upright, plan, lanes = decoding
            beforehand = ()
    if pair_transform is not None:
        lanes, plan = _lanes_of_pairs(kept, pair_transform, options)
    return Reader(
        samples=stored.samples,
        table=stored.table,
        visits=visits,
        options=options,
        target_transform=target_transform,
        pair_transform=pair_transform if plan.per_sample else None,
        plan=replace(plan, beforehand=beforehand),
        lanes=tuple(
            lane._replace(last=Program(lane.plan.last_ops, _DECODED))
            if lane.plan.last_steps
            else lane
            for lane in lanes
        ),
        watch=Watch(
            (transform, pair_transform), (step for view in plan.each for step in view.per_sample)
        ),
        path=path,
        is_upright=is_upright,
        is_remote=stored.is_remote,
        own=own,
    )


def _lanes_of(
    plan: TransformPlan, spec: SampleSpec, shape: tuple[int, ...], part: int = 0
) -> tuple[Lane, ...]:
    lanes = []
    for view in plan.each:
        program = Program(view.batch_ops, spec)
        lanes.append(Lane(view, program, program.output(shape), part=part))
    return tuple(lanes)


def _lanes_of_kept(
    stored: Stored, kept: KeptSamples, transform: Any
) -> tuple[tuple[Lane, ...], TransformPlan]:
    spec, shape = kept.images.spec, kept.images.shape(0)
    is_image = len(shape) == 3
    obstacle = "samples have several parts" if kept.is_tuple else core.obstacle()
    plan = stored.split(
        transform,
        form=spec.form,
        dtype=spec.dtype,
        batch_ops="auto" if stored.options.batch_ops else "off",
        channels=_channels_of(kept.images) if is_image else None,
        obstacle=obstacle or (None if is_image else f"samples have {len(shape)} dimensions"),
    )
    if any(view.batch_texts for view in plan.each) or (plan.views and plan.is_batched):
        with kept.naming_damage():
            return _lanes_of(plan, spec, shape), plan
    output = (shape, np.dtype(spec.dtype)) if spec.is_dense and not plan.views else None
    return tuple(Lane(view, output=output) for view in plan.each), plan


def _decoding(
    stored: Stored, transform: Any
) -> tuple[bool, TransformPlan, tuple[Lane, ...]] | None:
    """What makes batches of files as they are read, by all steps; None where that cannot be."""
    source = stored.source or stored.samples
    opening = opening_of(source.loader) if isinstance(source, FileSource) else None
    if opening is None or opening.channels is None or core.obstacle() is not None:
        return None
    upright, served = split_upright((*stored.first_steps, transform))
    first = upright - len(stored.first_steps)
    plan = plan_transform(
        served,
        form=opening.form,
        channels=opening.channels,
        batch_ops="auto" if stored.options.batch_ops else "off",
        prepared=0,
        first=first,
    )
    lanes = _lanes_of(plan, _DECODED, (3, 1, 1)) if plan.is_batched else ()
    is_served = lanes and all(lane.output for lane in lanes)
    return (upright or opening.is_upright, plan, lanes) if is_served else None


def _lanes_of_pairs(
    kept: KeptSamples | None, transforms: Any, options: Options
) -> tuple[tuple[Lane, ...], TransformPlan]:
    """Of ``transforms``, which takes sample and target: one for images and one for masks."""
    plan = _plan_pairs(kept, transforms, options)
    if kept is None or plan.per_sample:
        return (Lane(plan),), plan
    lanes = _lanes_of(plan, kept.images.spec, kept.images.shape(0))
    if plan.mask is not None:
        lanes += _lanes_of(plan.mask, kept.stores[1].spec, kept.stores[1].shape(0), part=1)
    return lanes, plan


def _plan_pairs(kept: KeptSamples | None, transforms: Any, options: Options) -> TransformPlan:
    obstacle = core.obstacle() if options.batch_ops else "batch_ops=False"
    if kept is None or not kept.target_is_part:
        return plan_pairs(transforms, obstacle="only images with a tv_tensors.Mask are served")
    image, mask = kept.images, kept.stores[1]
    size = image.shape(0)[1:]
    if (image.spec.dtype, mask.spec.dtype, mask.spec.form) != ("uint8", "uint8", "mask"):
        obstacle = "only uint8 images with a uint8 tv_tensors.Mask are served"
    if obstacle is None and (len(size) != 2 or mask.shape(0)[:-2] not in ((), (1,))):
        obstacle = f"images of shape {image.shape(0)} and masks of {mask.shape(0)} are not served"
    return plan_pairs(
        transforms, form=image.spec.form, channels=_channels_of(image), obstacle=obstacle
    )


def _channels_of(images: Store) -> int | None:
    """Of all images; None where they differ."""
    if images.spec.shape is not None:
        return images.spec.shape[0]
    channels = np.unique(images.shapes()[:, 0]).tolist()
    return channels[0] if len(channels) == 1 else None


# What a user is told


def warn_of_modes(stored: Stored, kept: KeptSamples, transform: Any) -> None:
    modes = kept.modes()
    if len(modes) > 1 and stored.split(transform, form="pil").is_batched:
        warn_user(
            f"images are of several modes, {', '.join(modes)}, and a batch is of one. "
            "Convert them before they are stored: prepare=lambda image: image.convert('RGB')."
        )


def fallback_notice(reader: Reader) -> str:
    """Which code of the user's own runs on each sample unasked, and the cure; else empty."""
    plan = reader.plan
    kept = reader.kept
    unknown = plan.first_unknown
    is_asked_for = not reader.options.batch_ops or reader.pair_transform is not None
    if is_asked_for or kept is None or kept.is_tuple or unknown is None:
        return ""
    cure = cure_for(unknown)
    if not cure and plan.views:
        cure = "Write steps that are served in its place: docs/served-steps.md."
    elif not cure:
        cure = (
            "Give it as prepare= if it does the same each time, or as CudaPrefetcher(transform=) "
            "if it can take whole batches."
        )
    return f"{plan.obstacle}, so that it runs in Python on each sample. {cure}"
