"""Warnings at a loader's first epoch, each with its cure.

Samples are read one by one, or by every rank; or images are moved, but not their masks.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import Dataset, IterableDataset, RandomSampler, Subset

from fastdata.datasets.dataset import PreparedDataset
from fastdata.datasets.samples import DatasetSamples
from fastdata.loaders.parts import Parts
from fastdata.machine.ranks import find_rank
from fastdata.pixels.compose import flatten_transform
from fastdata.pixels.draws import is_random, may_draw
from fastdata.pixels.plan import text_of_transform
from fastdata.pixels.readers import moves_masks
from fastdata.report import warn_user

_WARNED: weakref.WeakSet[DatasetSamples] = weakref.WeakSet()
"""Datasets that were checked already: are they read in whole batches?"""

_MASKED: weakref.WeakSet[DatasetSamples] = weakref.WeakSet()
"""Datasets that were checked already: does a transform move images, but not their masks?"""

_HINTED: set[type] = set()
"""Classes of datasets for which ``CachedDataset`` was suggested already."""


def warn_of_ranks(sampler: Any) -> None:
    """Warn if the sampler makes every rank read all samples."""
    ranks = find_rank().world_size
    if type(sampler) is RandomSampler and ranks > 1:
        warn_user(
            f"this is one of {ranks} ranks, and each of them reads all samples of the dataset, "
            "because the loader's sampler does not divide them among ranks. Give the loader "
            "distributed='auto', or a sampler that divides samples, such as DistributedSampler."
        )


def warn_of_samples(dataset: Dataset[Any], parts: Parts) -> None:
    """Warn once for each dataset that is read sample by sample."""
    # Once for each dataset, not for each loader: scripts make a loader for every epoch or fold.
    new = _unseen(parts, _WARNED)
    notice = next(filter(None, map(_fallback_notice, new)), "")
    if not parts.datasets and not isinstance(dataset, IterableDataset):
        notice = _wrapped_notice(dataset)
        if not notice:
            _hint_at_caching(dataset)
    if notice:
        warn_user(f"samples are read one by one, not in whole batches: {notice}")


def warn_of_masks(parts: Parts) -> None:
    """Warn once for each dataset whose random transform moves images, but not their masks."""
    for dataset in _unseen(parts, _MASKED):
        _warn_of_masks(dataset._fastdata)


def _unseen(parts: Parts, seen: weakref.WeakSet[DatasetSamples]) -> list[PreparedDataset]:
    """Return the datasets that are not in ``seen``, and add them."""
    new = [dataset for dataset in parts.datasets if dataset._fastdata not in seen]
    for dataset in new:
        seen.add(dataset._fastdata)
    return new


def _warn_of_masks(samples: DatasetSamples) -> None:
    """Warn if a random transform of a dataset moves its images, but not their masks."""
    kept = samples.reader.kept
    # With ``target_transform`` the user decides what happens to the masks.
    if kept is None or not kept.target_parts or samples.transforms.of_target is not None:
        return
    for transform in flatten_transform(samples.transforms.of_sample):
        if is_random(transform) and moves_masks(transform):
            warn_user(
                f"transform= gets the image only, so {text_of_transform(transform)} moves the image "
                f"but not the mask (or other image) in the target of {samples.class_name}. Pass "
                "the whole transform as transforms=, with an s, to move both alike (torchvision's "
                "must be of v2). For two random views of an image, return the image once, and pass "
                "transform=Views(transform, transform). A target_transform= turns this warning off."
            )
            return


def _hint_at_caching(dataset: Any) -> None:
    """Warn, once for each class of datasets, that ``CachedDataset`` could store its items."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    kind = type(inner)
    has_transform = hasattr(inner, "transform") or hasattr(inner, "transforms")
    # Another dataset may hold numbers or texts, which gain nothing from a cache. ``CachedDataset``
    # refuses one that draws, for example a random partner for each item.
    holds_images = has_transform or _names(kind, "image", "img", "imread")
    if kind in _HINTED or not holds_images or _names(kind, "rand", "rng"):
        return
    _HINTED.add(kind)
    is_folder = (kind.__module__, kind.__name__) == ("torchvision.datasets.folder", "ImageFolder")
    made = "fastdata.ImageFolder(...)" if is_folder else f"CachedDataset({kind.__name__}(...))"
    then = ", and runs its transform on whole batches" if has_transform else ""
    first = f" Wrap it before {type(dataset).__name__} or random_split takes a part of it."
    before = "" if inner is dataset else first
    warn_user(
        f"nothing is cached, so this loader is only as fast as torch's. {made} reads each item "
        f"once{then}.{before} Pass workers='process' to the loader to turn this warning off."
    )


def _names(kind: type, *words: str) -> bool:
    """Return True if a word is in a name or text of the code that reads an item of a dataset."""
    code = getattr(getattr(kind, "__getitem__", None), "__code__", None)
    if code is None:
        return False
    names = (*code.co_names, *code.co_varnames, *map(str, code.co_consts))
    return any(word in name.lower() for name in names for word in words)


def _fallback_notice(dataset: PreparedDataset) -> str:
    """Return which code of the user runs on each sample, and the cure; empty if none does."""
    own = dataset._fastdata.own_method
    if own:
        return (
            f"{type(dataset).__name__}.{own} is called for each sample. Move its work to "
            "transform= or target_transform=; return_index=True adds the index."
        )
    reader = dataset._fastdata.reader
    plan = reader.plan
    kept = reader.kept
    # No warning if the user asked for it (batch_ops=False), if files are decoded in each epoch
    # anyway, if samples have several parts, if no step runs in Python, or for boxes.
    unknown_views = [view for view in plan.each if view.per_sample]
    is_asked_for = not reader.stored.options.batch_ops
    if is_asked_for or kept is None or kept.is_tuple or not unknown_views:
        return ""
    is_joint = reader.pair_transform is not None
    if is_joint and not kept.target_is_part:
        return ""
    if reader.stored.obstacle is not None:  # there is no core; this text includes the cure
        return f"{plan.obstacle}".removesuffix(".")
    view = unknown_views[0]
    unknown = view.per_sample[0]
    cures = []
    draws = is_joint or is_random(unknown)
    if draws is False or (draws is None and not may_draw(unknown, from_torch=False)):
        cures.append(
            "If it gives the same result each time, run it once: in your loader=, or as prepare= "
            "of CachedDataset."
        )
    if view.kind not in ("pil", "hwc", "hw") and not is_joint:
        cures.append("Pass it to CudaPrefetcher(transform=) if it can take whole batches.")
    cures.append("docs/served-steps.md lists the steps that fastdata runs on whole batches.")
    return f"{plan.obstacle}, so it runs in Python on each sample. {' '.join(cures)}"


def _wrapped_notice(dataset: Any) -> str:
    """Return the cure if another dataset reads a fastdata dataset by samples; else empty."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    for inner in (*getattr(dataset, "datasets", ()), *getattr(dataset, "__dict__", {}).values()):
        if isinstance(inner, Dataset) and Parts.find(inner).datasets:
            name = type(inner).__name__
            return (
                f"{type(dataset).__name__} reads each sample from its {name}. Pass the {name} "
                "itself to the loader; use transform= or target_transform= to change its items, "
                "and return_index=True to get their index. If a ConcatDataset also has other "
                "datasets, wrap these in CachedDataset."
            )
    return ""
