"""The split of a transform into what runs once, what runs on whole batches, and what runs per sample."""

from fastdata.plan.sizes import read_center_crop, read_resize, shape_after
from fastdata.plan.split import TransformPlan, plan_transform
from fastdata.plan.steps import fingerprint, is_same

__all__ = [
    "TransformPlan",
    "fingerprint",
    "is_same",
    "plan_transform",
    "read_center_crop",
    "read_resize",
    "shape_after",
]
