"""The user's transform: its split in three parts, its steps, and running them on whole batches.

``compose`` says which steps a transform has, ``steps`` reads torchvision's and
timm's as ``ops``, ``plan`` splits a transform, ``program`` runs its batch part.
"""

from fastdata.pixels.compose import AlternatingFlip, Views
from fastdata.pixels.plan import (
    StandardTransform,
    TransformPlan,
    describe_steps,
    leading_steps,
    plan_pairs,
    plan_transform,
    prepare_key,
    split_upright,
)

__all__ = [
    "AlternatingFlip",
    "StandardTransform",
    "TransformPlan",
    "Views",
    "describe_steps",
    "leading_steps",
    "plan_pairs",
    "plan_transform",
    "prepare_key",
    "split_upright",
]
