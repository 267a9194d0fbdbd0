"""The user's transform: its split in three parts, the steps it is made of, and running them on whole batches.

``ops`` and ``augment`` are steps as values, with what each draws for a batch; ``steps`` reads
torchvision's and timm's as such, ``callables`` those of the user's; ``plan`` splits a transform;
``cpu`` and ``device`` run its batch part.
"""

from fastdata.pixels.plan import (
    StandardTransform,
    TransformPlan,
    describe_steps,
    leading_steps,
    plan_pairs,
    plan_transform,
    prepare_key,
    read_center_crop,
    read_resize,
    shape_after,
    split_upright,
)
from fastdata.pixels.steps import Views

__all__ = [
    "StandardTransform",
    "TransformPlan",
    "Views",
    "describe_steps",
    "leading_steps",
    "plan_pairs",
    "plan_transform",
    "prepare_key",
    "read_center_crop",
    "read_resize",
    "shape_after",
    "split_upright",
]
