"""The compiler: from stored samples and the user's transforms to a reader.

The plans of ``pixels`` decide which steps run on whole batches. The compiler chooses one of four
ways to read: pairs of image and mask, stored samples, files that the core decodes, and any other
source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fastdata.datasets.column import Column
from fastdata.datasets.reader import Reader
from fastdata.pixels.albumentations_objects import is_of_albumentations
from fastdata.pixels.compose import joint_transforms
from fastdata.pixels.core import library
from fastdata.pixels.known import known_name
from fastdata.pixels.own_transforms import AlbumentationsPair, AlbumentationsTransform, LongMask
from fastdata.pixels.plan import PairTransform, Transform, TransformPlan
from fastdata.pixels.program import Program
from fastdata.pixels.samples import SampleSpec
from fastdata.pixels.split import plan_pairs, split_transform, split_upright
from fastdata.pixels.transform_keys import describe_transforms
from fastdata.stores.kept import KeptSamples
from fastdata.stores.preparer import Steps
from fastdata.stores.source_codec import SOURCE
from fastdata.stores.store import Store

if TYPE_CHECKING:
    from fastdata.datasets.stored import Stored, Transforms

_DECODED = SampleSpec(shape=None, dtype="uint8", form="pil")


class Compiled(NamedTuple):
    """The parts of a reader that follow from the transform."""

    plan: TransformPlan
    columns: tuple[Column, ...]
    is_upright: bool


def compile_reader(stored: Stored, transforms: Transforms, *, own: str) -> Reader:
    """Compile the user's transforms for the samples of a dataset.

    ``own`` describes the method of a subclass that makes each item; it is empty if there is none.

    Raises:
        ValueError: the transform does not begin with the steps after which samples are stored.
    """
    transform = transforms.of_sample
    pair_transform = transforms.of_both
    if is_of_albumentations(pair_transform):
        pair_transform = AlbumentationsPair(pair_transform)
    if pair_transform is not None:
        compiled = _compile_pairs(stored, pair_transform)
    elif stored.kept is not None:
        compiled = _compile_kept(stored, stored.kept, transform)
    else:
        compiled = _compile_files(stored, transform) or _compile_source(stored, transform)
    plan = compiled.plan
    return Reader(
        stored=stored,
        length=len(stored.samples),
        target_transform=transforms.of_target,
        pair_transform=pair_transform if plan.per_sample else None,
        plan=plan,
        columns=compiled.columns,
        prepare=Steps((*plan.beforehand, *plan.prepare)),
        is_upright=compiled.is_upright,
        own=own,
    )


def _compile_pairs(stored: Stored, transforms: PairTransform) -> Compiled:
    """Compile a transform of image and mask: a column for each, or one if it runs per sample."""
    kept = stored.kept
    if kept is None or not kept.target_is_part:
        wanted = "a mask (H, W)" if _takes_arrays(transforms) else "a tv_tensors.Mask"
        plan = plan_pairs(transforms, obstacle=f"only images with {wanted} run on whole batches")
        return _compiled(stored, plan, [Column(plan)])
    image, mask, *_ = kept.stores
    plan = plan_pairs(
        transforms,
        form=image.spec.form,
        channels=_channels_of(image),
        mask_form=mask.spec.form,
        obstacle=_pair_obstacle(image, mask, transforms) or stored.obstacle,
    )
    columns = [Column(plan)]
    if plan.mask is not None:
        columns = [_read_by_core(plan, image), _read_by_core(plan.mask, mask)._replace(part=1)]
    return _compiled(stored, plan, columns)


def _takes_arrays(transforms: PairTransform) -> bool:
    """Return True if a transform of image and mask consists of albumentations' transforms."""
    kinds = (AlbumentationsTransform, LongMask)
    return all(type(each) in kinds for each in joint_transforms(transforms))


def _pair_obstacle(image: Store, mask: Store, transforms: PairTransform) -> str | None:
    """Return why stored images and masks cannot run on whole batches; None if they can.

    Return None also for a function of the user: ``plan_pairs`` gives a reason for unknown steps.
    """
    if not any(map(known_name, joint_transforms(transforms))):
        return None
    shapes = image.shape(0), mask.shape(0)
    kinds = image.spec.dtype, mask.spec.dtype, len(shapes[0])
    is_array = _takes_arrays(transforms)
    is_mask = mask.spec.form in (("pil", "hw") if is_array else ("mask",))
    if kinds != ("uint8", "uint8", 3) or not is_mask or shapes[1][:-2] not in ((), (1,)):
        wanted = "mask (H, W)" if is_array else "tv_tensors.Mask of one channel"
        return (
            f"only uint8 images with a uint8 {wanted} run on whole batches, "
            f"not {image.spec.dtype} {shapes[0]} with {mask.spec.dtype} {shapes[1]}"
        )
    # Image and mask use the same random numbers, which have the same effect only on equal sizes.
    differ = (image.shapes[:, -2:] != mask.shapes[:, -2:]).any(axis=1)
    if differ.any():
        return f"the mask of sample {differ.argmax()} is not as large as its image"
    return None


def _compile_kept(stored: Stored, kept: KeptSamples, transform: Transform | None) -> Compiled:
    """Compile a transform for samples that are stored after its first steps."""
    store = kept.images
    dimensions = len(store.shape(0))
    obstacle = stored.obstacle
    if kept.is_tuple:
        obstacle = obstacle or "samples have several parts"
    elif dimensions != 3:
        obstacle = obstacle or f"samples have {dimensions} dimensions"
    after = stored.after
    assert after is not None
    plan = split_transform(
        transform,
        prepared=after.count,
        form=store.spec.form,
        dtype=store.spec.dtype,
        channels=_channels_of(store) if dimensions == 3 else None,
        obstacle=obstacle,
    )
    if describe_transforms(plan.prepare, "") != after.key:
        raise ValueError(
            f"samples are stored after {after.text or 'no step'}, but the transform now begins "
            "with "
            f"{', '.join(map(repr, plan.prepare)) or 'none'}. Give it the same first steps, or "
            "assign another transform to dataset.transform in the process that made the "
            "dataset: that prepares the samples again."
        )
    # If all views begin with the user's own steps, samples are read once for all views.
    has_batch_ops = any(view.batched for view in plan.each)
    if kept.is_tuple or (plan.views and not plan.is_batched and not has_batch_ops):
        return _compiled(stored, plan, map(_read_one_by_one, plan.each))
    with kept.naming_damage():
        return _compiled(stored, plan, [_read_by_core(view, store) for view in plan.each])


def _compile_files(stored: Stored, transform: Transform | None) -> Compiled | None:
    """Compile all steps for files that the core decodes; None if they do not give whole batches."""
    opening = stored.samples.opening
    if opening is None or opening.channels is None or library.obstacle() is not None:
        return None
    is_upright, steps = split_upright((*stored.first_steps, transform))
    plan = split_transform(
        steps,
        form=opening.form,
        channels=opening.channels,
        obstacle=stored.obstacle,
        prepared=0,
        # Steps keep the numbers that they have for stored samples, so their draws are the same.
        first=is_upright - len(stored.first_steps),
    )
    if not plan.is_batched:
        return None
    columns = tuple(map(_read_by_core, plan.each))
    if not all(column.alike for column in columns):
        return None
    return Compiled(plan, columns, is_upright or opening.is_upright)


def _compile_source(stored: Stored, transform: Transform | None) -> Compiled:
    """Compile a transform for samples that are read and prepared one by one."""
    plan = split_transform(transform, only_last=True, obstacle=stored.obstacle)
    return _compiled(stored, plan, map(_read_one_by_one, plan.each))


def _compiled(stored: Stored, plan: TransformPlan, columns: Iterable[Column]) -> Compiled:
    is_prepared = stored.kept is not None and stored.prepared.storage_plan.codec != SOURCE
    plan = replace(plan, beforehand=stored.first_steps, is_prepared=is_prepared)
    return Compiled(plan, tuple(columns), stored.is_upright)


def _read_one_by_one(plan: TransformPlan) -> Column:
    """Return a column of samples that are read one by one."""
    last = Program(plan.last.batch_ops, _DECODED) if plan.last else None
    return Column(plan, last=last)


def _read_by_core(plan: TransformPlan, store: Store | None = None) -> Column:
    """Return a column that the core reads, from a store or from files that it decodes."""
    shape = (3, 1, 1) if store is None else store.shape(0)
    program = Program(plan.batch_ops, _DECODED if store is None else store.spec)
    return _read_one_by_one(plan).read_by(program, shape)


def _channels_of(images: Store) -> int | None:
    """Return the number of channels of all images; None if they differ."""
    channels = images.shapes[:, 0]
    first = int(channels[0])
    return first if (channels == first).all() else None
