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
    """Any map-style dataset of (sample, target) pairs or of dicts, prepared once and stored.

    Args:
        dataset: object with ``__len__`` and ``__getitem__``, which returns (PIL image | tensor |
            array, target). Or the path or URL of WebDataset's tars, a pattern such as
            ``"train-{000..009}.tar"``, or a list of these. For other formats see
            docs/other-datasets.md. Collect an iterable dataset first: ``list(dataset)``. Each item
            is read once, by the threads or processes of ``prepare_workers``. A dataset that makes
            random choices is refused, because every epoch would see the same ones; see ``frozen``.
            Items and batches keep the form that the dataset gives them, but an item that is a list
            becomes a tuple. Other forms of items:

            * The sample may be a tuple of images, and the target may be an image or array too, such
              as a mask. All of them are stored.
            * Three or more values: the only image is the sample, else the first value. An image or
              tensor alone has no target.
            * A dict or dataclass: its only image is the sample. If there are several, it is the one
              called ``image``, ``images``, ``img``, ``pixel_values``, ``input``, ``inputs`` or
              ``x``.
            * A namedtuple stays a namedtuple if its class can be found by module and name.

            If the dataset calls its own ``transform`` last on an item, as torchvision's datasets
            do, the transform is taken over as ``transform=``, if it is random or can run on whole
            batches. Attributes that fastdata does not define, such as ``classes``, are those of
            this dataset.
        columns: names of sample and target in items that are dicts, such as
            ``{"sample": "image", "target": "label"}``. Items are then pairs. A list of names for
            the target makes it a dict.
        prepare: function that is called once on each sample, before ``resize`` and the transform,
            such as ``lambda image: image.convert("RGB")``.
        transform: transform of each sample, as for torchvision's datasets. Its first known steps
            that are not random run once per sample, before it is stored; see ``plan``.
        target_transform: function that is called on each target when it is read.
        transforms: function that is called with sample and target together, for masks and boxes,
            as for torchvision's datasets; not together with the other two. Known steps of v2 run
            on whole batches of images with a ``tv_tensors.Mask``.
        frozen: True to accept a dataset that makes random choices, and store one random version of
            each item for all epochs. Default: such a dataset is a ValueError, or only a warning
            with a ``cache_key``. To find out, a few items are read several times.
        options: see ``DatasetOptions``.

    ``CachedDataset.from_cache`` opens a cache in ``cache_dir`` without ``dataset``.

    Raises:
        TypeError: ``dataset`` has no ``__getitem__`` or ``__len__``, or its items differ in form.
        ValueError: ``dataset`` makes random choices, or arguments contradict each other.
        SampleError: a sample cannot be read or prepared. It has the path and index of the sample.
        IngestError: too many samples are damaged, or the machine has reached a limit.
        RemoteError: a server, disk or mount does not answer.
        CacheError: ``cache_dir`` cannot be written, or its disk is full.
        MemoryBudgetError: ``storage="shared"`` does not fit. Raised before anything is allocated.

    If the transform gives all samples one size, each is prepared when it is first read. Without a
    transform all are prepared at the first read, and else when the dataset is made. You get errors
    of samples then. A pickled dataset is a handle of a few hundred bytes plus the transforms. It
    opens only on the same machine, while the process that made it exists. ``close()`` frees the
    memory, and so does deleting the last reference.

    Example:
        >>> import torch
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
        >>> with CachedDataset(squares) as dataset:
        ...     images, targets = dataset.__getitems__([1, 3]).stacked
        >>> images.shape, targets
        (torch.Size([2, 3, 4, 4]), tensor([1, 9]))
    """

    root: str
    """Folder of the files when the cache was written; "" if samples were not files. Only a dataset
    from ``from_cache`` has it."""

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
        # Python, pickle and torch look up private names to find protocols. torch and fastdata look
        # up the other three names to find wrappers, but this dataset is not a wrapper.
        inside = None
        if not name.startswith("_") and name not in ("dataset", "datasets", "indices"):
            source = self._fastdata.stored.source
            inside = source.dataset if isinstance(source, DatasetSource) else None
        if hasattr(inside, name):
            return getattr(inside, name)
        also = (
            "" if inside is None else f", and {kind_of(inside)} inside it does not have it either"
        )
        raise AttributeError(f"{kind_of(self)} has no attribute {name}{also}")

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

        The dataset has the samples that the latest build or update stored, in the same order.
        ``skipped`` lists those that were left out. If samples are files, ``samples``, ``classes``
        and ``class_to_idx`` are those of the original dataset, and ``root`` is its folder. The
        files need not exist any more.

        Args:
            path: path or URL of a cache, or of a ``cache_dir`` that holds only this cache. Any
                dataset or ``fastdata build`` may have written it, but not with ``codec="source"``
                or your own codec object.
            transform: transform of each stored sample. All of its steps run when a sample is read;
                known steps run on whole batches.
            target_transform: function that is called on each target when it is read.
            transforms: function that is called with sample and target together; not together with
                the other two.
            as_tensors: True to return images as tensors (C, H, W), as torchvision's ``PILToTensor``
                does (usually uint8), instead of PIL images.
            seed: as for ``CachedDataset``.
            batch_ops: as for ``CachedDataset``.
            return_index: as for ``CachedDataset``.
            storage_options: as for ``CachedDataset``, if the path is a URL.
            local_cache: as for ``CachedDataset``, if the path is a URL.

        Raises:
            FileNotFoundError: there is no cache at the path.
            ValueError: the folder holds several caches. The message lists them.
            CacheError: the cache is damaged, or cannot be opened without its dataset.

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
            "transforms= is called with sample and target together, so it cannot be combined with "
            "transform= or target_transform=; leave one or the other out"
        )
    return Transforms(transform, target_transform, transforms)
