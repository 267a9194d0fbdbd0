"""From how samples were prepared and the user's transform to the ``Reader`` that serves them.

``compile_reader`` decides all that cannot change while neither is changed: it runs when a dataset
is made, when another transform is assigned, and when an epoch begins after one was changed in
place, which ``Watch`` notices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastdata.datasets.reader import Column, Reader
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
from fastdata.pixels.images import Array, SampleSpec
from fastdata.pixels.plan import PairStep, Step
from fastdata.pixels.program import Program
from fastdata.sources import Source
from fastdata.stores.prepare import Options, Prepared
from fastdata.stores.readers import Store
from fastdata.stores.samples import KeptSamples, Steps

_DECODED = SampleSpec(shape=None, dtype="uint8", form="pil")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """How the samples of a dataset were prepared.

    Attributes:
        source: what samples are read from, to prepare them again; copies in other processes may not
            know it where samples are kept.
        files: paths and targets, where they are known beforehand.
        options: of the dataset.
        prepared: what is kept, and why.
        first_steps: the dataset's ``prepare=`` and ``resize=``, which run before the transform.
        after: how many leading steps of the transform samples are stored after, or did not fit
            after, their key, and their text for errors; None before they are prepared.
        is_upright: whether samples were turned as their EXIF says, so that nothing of it is missed.
        is_remote: whether samples that are not kept are fetched from behind a URL.
    """

    source: Source | None
    files: SampleTable | None
    options: Options
    prepared: Prepared
    first_steps: tuple[Step, ...] = ()
    after: tuple[int, str, str] | None = None
    is_upright: bool = False
    is_remote: bool = False

    @property
    def kept(self) -> KeptSamples | None:
        return self.prepared.kept

    @property
    def samples(self) -> Any:
        """Kept ones, or what they are read from; None once the dataset is closed."""
        return self.source if self.kept is None else self.kept

    @property
    def table(self) -> SampleTable | None:
        """Paths and targets; None where they are asked of the source."""
        return self.files if self.kept is None else self.kept.table

    def filled_share(self, index: Array | None = None) -> float:
        """Share of the samples, or of those of ``index``, that are kept already."""
        return 0.0 if self.kept is None else self.kept.filled_share(index)

    def split(self, transform: Any, **facts: Any) -> TransformPlan:
        """Split a transform; a ValueError if it does not begin with the stored steps."""
        if self.kept is None or self.after is None:
            return plan_transform(transform, **facts)
        count, key, text = self.after
        plan = plan_transform(transform, prepared=count, **facts)
        if prepare_key(plan.prepare) != key:
            raise ValueError(
                f"samples are stored after {text or 'no step'}, "
                "but the transform now begins with "
                f"{', '.join(map(repr, plan.prepare)) or 'none'}. Give it the same first steps, or "
                "assign another transform to dataset.transform in the process that made the "
                "dataset, which prepares samples again."
            )
        return plan

    def is_to_prepare_again(self, transform: Any, *, was_read: bool) -> bool:
        """Whether the store is after other steps than the transform's, or a better one is unused.

        timm makes a dataset without a transform and assigns one later: images were kept whole, and
        nobody has read any.
        """
        assert self.after is not None
        count, key, _ = self.after
        if self.kept is not None and prepare_key(leading_steps(transform, count)) != key:
            return True
        # After other steps samples may fit, or take less.
        may_gain = self.filled_share() == 0 or (not key and not was_read)
        if self.kept is None:
            may_gain = self.options.storage == "auto" and len(self.samples) > 0
        is_known = may_gain and self.source is not None
        return is_known and prepare_key(leading_steps(transform)) != key


def compile_reader(
    stored: Stored,
    *,
    transform: Any,
    target_transform: Step | None,
    pair_transform: PairStep | None,
    own: str,
) -> Reader:
    """Compile the user's transforms for samples as they are stored.

    Raises:
        ValueError: the transform does not begin with the steps that samples are stored after.
    """
    beforehand = steps = stored.first_steps
    is_upright = stored.is_upright
    if pair_transform is not None:
        plan, columns = _compile_pairs(stored, pair_transform)
    elif stored.kept is not None:
        plan, columns = _compile_kept(stored, stored.kept, transform)
    elif (decoding := _compile_files(stored, transform)) is not None:
        is_upright, plan, columns = decoding
        beforehand = ()
    else:
        known: Any = "last" if stored.options.batch_ops else "off"
        plan = stored.split(transform, batch_ops=known, obstacle=core.obstacle())
        columns = tuple(map(_unread_column, plan.each))
        steps = (*steps, *plan.prepare)
    return Reader(
        stored=stored,
        length=len(stored.samples),
        target_transform=target_transform,
        pair_transform=pair_transform if plan.per_sample else None,
        plan=replace(plan, beforehand=beforehand),
        columns=columns,
        prepare=Steps(steps),
        is_upright=is_upright,
        own=own,
    )


def _unread_column(plan: TransformPlan) -> Column:
    """Of samples that are read one by one."""
    return Column(plan, last=Program(plan.last.batch_ops, _DECODED) if plan.last else None)


def _column(plan: TransformPlan, spec: SampleSpec, shape: tuple[int, ...]) -> Column:
    program = Program(plan.batch_ops, spec)
    return _unread_column(plan)._replace(program=program, output=program.output(shape))


def _compile_kept(
    stored: Stored, kept: KeptSamples, transform: Any
) -> tuple[TransformPlan, tuple[Column, ...]]:
    store = kept.images
    spec, shape = store.spec, store.shape(0)
    is_image = len(shape) == 3
    obstacle = "samples have several parts" if kept.is_tuple else core.obstacle()
    plan = stored.split(
        transform,
        form=spec.form,
        dtype=spec.dtype,
        batch_ops="auto" if stored.options.batch_ops else "off",
        channels=_channels_of(store) if is_image else None,
        obstacle=obstacle or (None if is_image else f"samples have {len(shape)} dimensions"),
    )
    # Views that begin with steps of the user's own share what is read.
    are_unread = plan.views and not plan.is_batched and not any(it.batch_texts for it in plan.each)
    if kept.is_tuple or are_unread:
        return plan, tuple(map(_unread_column, plan.each))
    with kept.naming_damage():
        return plan, tuple(_column(view, spec, shape) for view in plan.each)


def _compile_files(
    stored: Stored, transform: Any
) -> tuple[bool, TransformPlan, tuple[Column, ...]] | None:
    """What makes batches of files as they are read, by all steps; None where that cannot be."""
    opening = stored.samples.opening
    if opening is None or opening.channels is None or core.obstacle() is not None:
        return None
    is_upright, steps = split_upright((*stored.first_steps, transform))
    plan = plan_transform(
        steps,
        form=opening.form,
        channels=opening.channels,
        batch_ops="auto" if stored.options.batch_ops else "off",
        prepared=0,
        first=is_upright - len(stored.first_steps),
    )
    if not plan.is_batched:
        return None
    columns = tuple(_column(view, _DECODED, (3, 1, 1)) for view in plan.each)
    if not all(column.output for column in columns):
        return None
    return is_upright or opening.is_upright, plan, columns


def _compile_pairs(
    stored: Stored, transforms: PairStep
) -> tuple[TransformPlan, tuple[Column, ...]]:
    """Of what takes sample and target: one column of images and one of masks."""
    kept = stored.kept
    obstacle = core.obstacle() if stored.options.batch_ops else "batch_ops=False"
    if kept is None or not kept.target_is_part:
        plan = plan_pairs(transforms, obstacle="only images with a tv_tensors.Mask are served")
        return plan, (Column(plan),)
    image, mask = kept.stores[0], kept.stores[1]
    shapes = image.shape(0), mask.shape(0)
    if (image.spec.dtype, mask.spec.dtype, mask.spec.form) != ("uint8", "uint8", "mask"):
        obstacle = "only uint8 images with a uint8 tv_tensors.Mask are served"
    if obstacle is None and (len(shapes[0]) != 3 or shapes[1][:-2] not in ((), (1,))):
        obstacle = f"images of shape {shapes[0]} and masks of {shapes[1]} are not served"
    obstacle = obstacle or _size_obstacle(image, mask)
    channels = _channels_of(image)
    plan = plan_pairs(transforms, form=image.spec.form, channels=channels, obstacle=obstacle)
    if plan.mask is None:
        return plan, (Column(plan),)
    stores = zip((plan, plan.mask), kept.stores, shapes, strict=False)
    return plan, tuple(_column(each, store.spec, shape) for each, store, shape in stores)


def _size_obstacle(image: Store, mask: Store) -> str | None:
    """Which sample's mask is not as large as its image, whose draws it takes."""
    wrong = np.flatnonzero((image.shapes[:, -2:] != mask.shapes[:, -2:]).any(axis=1)).tolist()
    for index in wrong[:1]:
        return (
            f"sample {index} has an image of {image.shape(index)[-2:]} and a mask of "
            f"{mask.shape(index)[-2:]} (height, width)"
        )
    return None


def _channels_of(images: Store) -> int | None:
    """Of all images; None where they differ."""
    if images.spec.shape is not None:
        return images.spec.shape[0]
    channels = np.unique(images.shapes[:, 0]).tolist()
    return channels[0] if len(channels) == 1 else None
