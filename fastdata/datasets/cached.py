"""``CachedDataset``: any map-style dataset, prepared once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastdata.datasets.dataset import PreparedDataset, own_method
from fastdata.datasets.lifting import lift_transforms
from fastdata.datasets.origin import ItemOrigin
from fastdata.datasets.preparing import to_prepare
from fastdata.datasets.samples import DatasetSamples
from fastdata.datasets.stored import LeadingSteps, Stored, Transforms
from fastdata.errors import kind_of
from fastdata.paths import AnyPath
from fastdata.pixels.plan import PairTransform, Transform
from fastdata.pixels.split import find_late_rgb
from fastdata.sources.items import DatasetSource
from fastdata.sources.source import chosen_keys
from fastdata.sources.storage_options import StorageChoice
from fastdata.sources.tars import open_tars
from fastdata.stores.frozen import refuse_random_steps
from fastdata.stores.options import DatasetOptions, Options, read_options, with_options

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


@with_options
class CachedDataset(PreparedDataset):
    """Any map-style dataset of (sample, target) or of dicts, prepared once and kept.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` giving (PIL image | tensor | array, target).
            Each item is read once, in forked worker processes, so that what it draws at random
            would stay the same: a dataset that draws is refused, see ``frozen``. The sample may be
            a tuple of these, and the target an image or array too, such as a mask: all of them are
            stored. Of an item of three or more values the first is the sample, and of (label,
            image) the image; an image or tensor alone has no target. Of an item that is a dict the
            one value that is an image is the sample, and the target that of the other key, or a
            dict of several; items and batches are dicts of the same keys then. Namedtuples stay of
            their class, where it can be found by its module and name. Or the path or URL of
            WebDataset's tars, a pattern such as ``"train-{000..009}.tar"``, or a list of these. For
            other formats see docs/other-datasets.md. Its own ``transform``, if it is called last on
            what was read, as torchvision's datasets do, is taken over as ``transform=`` is: where
            it draws at random, or can run on whole batches. Attributes that are not fastdata's,
            such as ``classes``, are those of this dataset.
        columns: of items that are dicts the names of those that are sample and target, such as
            ``{"sample": "image", "target": "label"}``; items are pairs then, and a list of names
            makes the target a dict.
        prepare: called on each sample before it is stored, e.g. ``lambda image:
            image.convert("RGB")``.
        transform: as torchvision's. Its leading deterministic steps run once per sample, before it
            is stored; see ``plan``.
        target_transform: called on each target when it is read.
        transforms: called with sample and target together instead of both others, as torchvision's:
            for masks and boxes. One of v2's known steps, on images with a ``tv_tensors.Mask``, runs
            on whole batches.
        frozen: accept a dataset that draws at random when it is read, and keep one draw of each
            item for all epochs. Default: such a dataset is a ValueError. To find out, a few items
            are read several times; with a ``cache_key`` it is only a warning.
        options: see ``DatasetOptions``.

    ``CachedDataset.from_cache`` opens a cache in ``cache_dir`` without ``dataset``.

    Raises:
        SampleError: a sample cannot be read or prepared; names its path and index.
        CacheError: ``cache_dir`` cannot be written, or its disk is full.
        MemoryBudgetError: ``storage="shared"`` does not fit; raised before anything is allocated.

    A pickled dataset is a handle of a few hundred bytes plus the transforms; it opens only on the
    same machine, while the process that made it lives. ``close()`` gives the memory back, and so
    does deleting the last reference.

    Example:
        >>> import torch
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
        >>> with CachedDataset(squares) as dataset:
        ...     images, targets = dataset.__getitems__([1, 3]).stacked
        >>> images.shape, targets
        (torch.Size([2, 3, 4, 4]), tensor([1, 9]))
    """

    root: str
    """The folder of the files when the cache was written, of a dataset by ``from_cache``. Empty if
    samples were not files."""

    def __init__(
        self,
        dataset: Any,
        *,
        prepare: Transform | None = None,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        transforms: PairTransform | None = None,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        frozen: bool = False,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(CachedDataset, options)
        chosen_columns = None if columns is None else chosen_keys(columns)
        chosen_transforms = _chosen_transforms(transform, target_transform, transforms)
        each = dataset if isinstance(dataset, list) and dataset else [dataset]
        if all(isinstance(path, (str, os.PathLike)) for path in each):
            only = None if chosen_columns is None else chosen_columns.names
            tars = open_tars(dataset, chosen.storage_options, only)
            dataset = dataset if tars is None else tars
        if chosen.storage != "none" and not frozen:
            own = (transform, target_transform, transforms, prepare, chosen.resize)
            has_own = any(value is not None for value in own)
            lifted = None if has_own else lift_transforms(dataset)
            if lifted is not None:
                dataset, chosen_transforms = lifted
            # Stored samples would show the same draws in every epoch.
            refuse_random_steps(dataset)
        if prepare is None and chosen.storage != "none":
            prepare = find_late_rgb(chosen_transforms.of_sample)
        source = DatasetSource(dataset, chosen_columns)
        self._fastdata = DatasetSamples(
            class_name=type(self).__name__,
            own_method=own_method(type(self)),
            origin=ItemOrigin(),
            stored=to_prepare(source, replace(chosen, frozen=frozen), prepare=prepare),
            transforms=chosen_transforms,
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dataset inside, such as ``classes`` or ``data``."""
        # Private names are those by which Python, pickle and torch ask for protocols. The others
        # are those by which torch and fastdata look into wrappers: this is none.
        inside = None
        if not name.startswith("_") and name not in ("dataset", "datasets", "indices"):
            source = self._fastdata.stored.source
            inside = source.dataset if isinstance(source, DatasetSource) else None
        if hasattr(inside, name):
            return getattr(inside, name)
        told = "" if inside is None else f", and neither has {kind_of(inside)} inside it"
        raise AttributeError(f"{kind_of(self)} has no attribute {name}{told}")

    @classmethod
    def from_cache(
        cls,
        path: AnyPath,
        *,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        transforms: PairTransform | None = None,
        as_tensors: bool = False,
        seed: int | None = None,
        batch_ops: bool = True,
        return_index: bool = False,
        storage_options: StorageChoice = None,
        local_cache: AnyPath | None = None,
    ) -> Self:
        """Open a cache on its own, without the dataset and the files that it was made from.

        It has the samples of the last update of the cache, in that order; ``skipped`` lists those
        that were left out. If samples are files, ``samples``, ``classes`` and ``class_to_idx`` are
        those of the dataset then, and ``root`` is its folder. The files need not exist any more.

        Args:
            path: a cache, or the ``cache_dir`` that holds only this one, or the URL of such. Any
                dataset or ``fastdata build`` may have written it, but not with ``codec="source"``
                or a codec object of your own.
            transform: called on each sample as it is in the cache. All of its steps run when a
                sample is read; known ones run on whole batches.
            target_transform: called on each target when it is read.
            transforms: called with sample and target together, instead of both others.
            as_tensors: give images as tensors (C, H, W) of their stored pixels, equal to those of
                torchvision's ``PILToTensor``, instead of PIL images.
            seed: of the random draws of batch ops; see
                ``fastdata.stores.options.DatasetOptions``.
            batch_ops: False runs known random transforms per sample exactly as written.
            return_index: add the index of each sample to its item.
            storage_options: for a URL; see ``fastdata.stores.options.DatasetOptions``.
            local_cache: as there.

        Raises:
            FileNotFoundError: the path is not that of a cache.
            ValueError: the folder holds several caches; the error names them.
            CacheError: the cache is damaged, or cannot be served without its dataset.

        Example:
            >>> import tempfile, torch
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     CachedDataset(squares, cache_dir=folder, cache_key="squares").close()
            ...     with CachedDataset.from_cache(folder) as dataset:
            ...         print(len(dataset), list(dataset.targets))
            5 [0, 1, 4, 9, 16]
        """
        from fastdata.stores.find import find_cache, open_cache

        # Without ``__init__``, which needs a dataset to read from.
        dataset = cls.__new__(cls)
        chosen_transforms = _chosen_transforms(transform, target_transform, transforms)
        home = find_cache(path, storage_options)
        prepared, manifest = open_cache(home, as_tensors=as_tensors, local_cache=local_cache)
        dataset.root = manifest.root
        dataset._fastdata = DatasetSamples(
            class_name=cls.__name__,
            own_method=own_method(cls),
            origin=ItemOrigin(),
            stored=Stored(
                options=Options(seed=seed, batch_ops=batch_ops, return_index=return_index),
                prepared=prepared,
                after=LeadingSteps(),
                is_upright="PIL.ImageOps.exif_transpose" in manifest.key["prepare"],
            ),
            transforms=chosen_transforms,
        )
        return dataset


def _chosen_transforms(
    transform: Transform | None,
    target_transform: Transform | None,
    transforms: PairTransform | None,
) -> Transforms:
    if transforms is not None and (transform is not None or target_transform is not None):
        raise ValueError(
            "transforms= is called with sample and target together; give it alone, or give "
            "transform= and target_transform= instead"
        )
    return Transforms(transform, target_transform, transforms)
