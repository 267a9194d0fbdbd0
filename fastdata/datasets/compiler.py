"""The compiler: from prepared samples and the user's transforms to a reader."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastdata.datasets.column import Column
from fastdata.datasets.reader import Reader
from fastdata.pixels.core import library
from fastdata.pixels.plan import PairTransform, TransformPlan
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.split import plan_pairs, plan_transform, split_upright
from fastdata.pixels.transform_keys import describe_transforms
from fastdata.stores.kept import KeptSamples
from fastdata.stores.preparer import Steps
from fastdata.stores.store import Store

if TYPE_CHECKING:
    from fastdata.datasets.stored import Stored, Transforms

_DECODED = SampleSpec(shape=None, dtype="uint8", form="pil")


# From how samples were prepared and the user's transform to a reader

Compiled = tuple[TransformPlan, tuple[Column, ...]]


def compile_reader(stored: Stored, transforms: Transforms, *, own: str) -> Reader:
    """Compile the user's transforms for samples as they are stored.

    ``own`` describes the method of a subclass that makes each item; empty if there is none.

    Raises:
        ValueError: the transform does not begin with the steps that samples are stored after.
    """
    beforehand = steps = stored.first_steps
    is_upright = stored.is_upright
    transform = transforms.of_sample
    pair_transform = transforms.of_both
    if pair_transform is not None:
        plan, columns = _compile_pairs(stored, pair_transform)
    elif stored.kept is not None:
        plan, columns = _compile_kept(stored, stored.kept, transform)
    elif (decoding := _compile_files(stored, transform)) is not None:
        is_upright, (plan, columns) = decoding
        beforehand = ()
    else:
        plan = plan_transform(transform, only_last=True, obstacle=stored.obstacle)
        columns = tuple(map(_unread_column, plan.each))
        steps = (*steps, *plan.prepare)
    return Reader(
        stored=stored,
        length=len(stored.samples),
        target_transform=transforms.of_target,
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


def _column(plan: TransformPlan, store: Store | None = None) -> Column:
    """Of kept samples, or of files as they are decoded."""
    shape = (3, 1, 1) if store is None else store.shape(0)
    program = Program(plan.batch_ops, _DECODED if store is None else store.spec)
    output = program.output(shape)
    return _unread_column(plan)._replace(program=program, shape=shape, output=output)


def _compile_kept(stored: Stored, kept: KeptSamples, transform: Any) -> Compiled:
    store = kept.images
    dimensions = len(store.shape(0))
    obstacle = stored.obstacle
    if kept.is_tuple:
        obstacle = obstacle or "samples have several parts"
    elif dimensions != 3:
        obstacle = obstacle or f"samples have {dimensions} dimensions"
    after = stored.after
    assert after is not None
    plan = plan_transform(
        transform,
        prepared=after.count,
        form=store.spec.form,
        dtype=store.spec.dtype,
        channels=_channels_of(store) if dimensions == 3 else None,
        obstacle=obstacle,
    )
    if describe_transforms(plan.prepare, "") != after.key:
        raise ValueError(
            f"samples are stored after {after.text or 'no step'}, but the transform now begins with "
            f"{', '.join(map(repr, plan.prepare)) or 'none'}. Give it the same first steps, or "
            "assign another transform to dataset.transform in the process that made the "
            "dataset, which prepares samples again."
        )
    # Views that begin with steps of the user's own share what is read.
    are_unread = plan.views and not plan.is_batched and not any(it.batch_texts for it in plan.each)
    if kept.is_tuple or are_unread:
        return plan, tuple(map(_unread_column, plan.each))
    with kept.naming_damage():
        return plan, tuple(_column(view, store) for view in plan.each)


def _compile_files(stored: Stored, transform: Any) -> tuple[bool, Compiled] | None:
    """What makes batches of files as they are read, by all steps; None where that cannot be."""
    opening = stored.samples.opening
    if opening is None or opening.channels is None or library.obstacle() is not None:
        return None
    is_upright, steps = split_upright((*stored.first_steps, transform))
    plan = plan_transform(
        steps,
        form=opening.form,
        channels=opening.channels,
        obstacle=stored.obstacle,
        prepared=0,
        first=is_upright - len(stored.first_steps),
    )
    if not plan.is_batched:
        return None
    columns = tuple(map(_column, plan.each))
    if not all(column.output for column in columns):
        return None
    return is_upright or opening.is_upright, (plan, columns)


def _compile_pairs(stored: Stored, transforms: PairTransform) -> Compiled:
    """Of what takes sample and target: one column of images and one of masks."""
    kept = stored.kept
    obstacle = stored.obstacle
    if kept is None or not kept.target_is_part:
        plan = plan_pairs(transforms, obstacle="only images with a tv_tensors.Mask are served")
        return plan, (Column(plan),)
    image, mask, *_ = kept.stores
    shapes = image.shape(0), mask.shape(0)
    kinds = image.spec.dtype, mask.spec.dtype, mask.spec.form, len(shapes[0])
    if kinds != ("uint8", "uint8", "mask", 3) or shapes[1][:-2] not in ((), (1,)):
        obstacle = (
            "only uint8 images with a uint8 tv_tensors.Mask of one channel are served, "
            f"not {image.spec.dtype} {shapes[0]} with {mask.spec.dtype} {shapes[1]}"
        )
    differ = (image.shapes[:, -2:] != mask.shapes[:, -2:]).any(axis=1)
    if obstacle is None and differ.any():
        obstacle = f"the mask of sample {differ.argmax()} is not as large as its image"
    channels = _channels_of(image)
    plan = plan_pairs(transforms, form=image.spec.form, channels=channels, obstacle=obstacle)
    if plan.mask is None:
        return plan, (Column(plan),)
    return plan, (_column(plan, image), _column(plan.mask, mask)._replace(part=1))


def _channels_of(images: Store) -> int | None:
    """Of all images; None where they differ."""
    channels = images.shapes[:, 0]
    first = int(channels[0])
    return first if (channels == first).all() else None
