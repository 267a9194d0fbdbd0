"""Warnings of loaders that read samples one by one, or the same ones on every rank."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import Dataset, IterableDataset, RandomSampler, Subset

from fastdata.datasets.dataset import PreparedDataset
from fastdata.datasets.samples import DatasetSamples
from fastdata.loaders.parts import Parts
from fastdata.machine.ranks import find_rank
from fastdata.pixels.draws import is_random, may_draw
from fastdata.report import warn_user

_WARNED: weakref.WeakSet[DatasetSamples] = weakref.WeakSet()
"""Datasets whose obstacle to whole batches was warned of."""

_HINTED: set[type] = set()
"""Classes of datasets that ``CachedDataset`` was suggested for."""


def warn_of_ranks(sampler: Any) -> None:
    """Warn of a sampler by which every rank reads all samples."""
    ranks = find_rank().world_size
    if type(sampler) is RandomSampler and ranks > 1:
        warn_user(
            f"this is one of {ranks} ranks, and each of them reads all samples of the dataset, "
            "because the loader's sampler does not divide them. Give the loader "
            "distributed='auto', or a sampler that knows its rank."
        )


def warn_of_samples(dataset: Dataset[Any], parts: Parts) -> None:
    """Warn once for each dataset that is read sample by sample."""
    # Once for each dataset, not for each loader: scripts make a loader for every epoch or fold.
    new = [part for part in parts.datasets if part._fastdata not in _WARNED]
    _WARNED.update(part._fastdata for part in new)
    notice = next(filter(None, map(_fallback_notice, new)), "")
    if not parts.datasets and not isinstance(dataset, IterableDataset):
        notice = _wrapped_notice(dataset)
        if not notice:
            _hint_at_caching(dataset)
    if notice:
        warn_user(f"batches are not served whole: {notice}")


def _hint_at_caching(dataset: Any) -> None:
    """Say once for each class of datasets how its items can be read only once."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    kind = type(inner)
    # Of other datasets nothing tells that images are decoded: they may hold numbers or texts.
    has_transform = hasattr(inner, "transform") or hasattr(inner, "transforms")
    if kind in _HINTED or not has_transform:
        return
    _HINTED.add(kind)
    made = f"CachedDataset({kind.__name__}(...))"
    before = ""
    if inner is not dataset:
        before = f" Make it before {type(dataset).__name__} or random_split takes a part of it."
    warn_user(
        f"nothing is cached, so this loader reads as fast as torch's. {made} reads each item once, "
        f"and runs its transform on whole batches.{before} workers='process' says that this is "
        "meant."
    )


def _fallback_notice(dataset: PreparedDataset) -> str:
    """Return which code of the user's runs on each sample, and the cure; empty if none does."""
    own = dataset._fastdata.own_method
    if own:
        return (
            f"{type(dataset).__name__}.{own} is called for each sample. Move its work to "
            "transform= or target_transform=; return_index=True adds the index."
        )
    reader = dataset._fastdata.reader
    plan = reader.plan
    kept = reader.kept
    # Not if the user asked for it, if files are decoded in each epoch anyway, if samples have
    # several parts, or if no step runs in Python.
    is_known = not any(view.per_sample for view in plan.each)
    is_asked_for = not reader.stored.options.batch_ops or reader.pair_transform is not None
    if is_asked_for or kept is None or kept.is_tuple or is_known:
        return ""
    if reader.stored.obstacle is not None:  # there is no core, which says what to do
        return f"{plan.obstacle}".removesuffix(".")
    [view, *_] = [view for view in plan.each if view.per_sample]
    unknown = view.per_sample[0]
    cures = []
    draws = is_random(unknown)
    if draws is False or (draws is None and not may_draw(unknown, from_torch=False)):
        cures.append("Give it as prepare= if it does the same each time.")
    if view.kind not in ("pil", "hwc", "hw"):
        cures.append("Give it as CudaPrefetcher(transform=) if it can take whole batches.")
    cures.append("docs/served-steps.md has the steps that fastdata runs on whole batches.")
    return f"{plan.obstacle}, so that it runs in Python on each sample. {' '.join(cures)}"


def _wrapped_notice(dataset: Any) -> str:
    """Return how to get whole batches if another dataset reads a fastdata dataset by samples."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    for inner in (*getattr(dataset, "datasets", ()), *getattr(dataset, "__dict__", {}).values()):
        if isinstance(inner, Dataset) and Parts.find(inner).datasets:
            name = type(inner).__name__
            return (
                f"{type(dataset).__name__} asks its {name} for each sample. Give the loader the "
                f"{name} itself, with transform= or target_transform= for changes to its items, and "
                "return_index=True for their index. Make a CachedDataset of any other dataset in "
                "the same ConcatDataset."
            )
    return ""
