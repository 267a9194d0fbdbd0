"""The base class of fastdata's datasets: torch's protocol and torchvision's attributes.

It is thin: ``DatasetSamples`` holds all state and does the work. Its subclasses are the datasets
that users make: ``ImageFolder``, ``ImageManifest`` and ``CachedDataset``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import Dataset, get_worker_info

from fastdata.datasets.added_property import added_property
from fastdata.datasets.buffers import new_buffer
from fastdata.datasets.descriptions import html_of, text_of
from fastdata.datasets.reader import Reader
from fastdata.datasets.samples import DatasetSamples
from fastdata.datasets.transport import ring_of
from fastdata.datasets.visits import OWN_ITEM, IndexBatch, OwnItem, number_visits
from fastdata.errors import SampleError
from fastdata.machine.budget import StoragePlan, StorageReport
from fastdata.machine.tables import ListView
from fastdata.pixels.own_transforms import StandardTransform
from fastdata.pixels.plan import PairTransform, Transform, TransformPlan
from fastdata.sources.files import FileSource
from fastdata.stores.kept import KeptSamples
from fastdata.stores.prepare import report_storage
from fastdata.stores.preparer import choose_preparer

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Self


def _asked_through_wrapper(dataset: PreparedDataset) -> Dataset[Any] | None:
    """Return the wrapper whose ``__getattr__`` gave a method of ``dataset`` to torch, else None."""
    # torch's fetcher, ``Subset`` and ``StackDataset`` call ``__getitems__`` of their dataset if it
    # has this attribute. A wrapper that forwards attributes returns the method of the dataset
    # inside it, and a bound method has no reference to the wrapper. Only the calling frame has one:
    # torch's code has the wrapper in ``dataset`` or ``self.dataset`` (torch 2.0 to 2.13).
    frame = sys._getframe(2)
    if not frame.f_globals.get("__name__", "").startswith("torch.utils.data."):
        return None
    names = frame.f_locals
    asked = names.get("dataset", getattr(names.get("self"), "dataset", dataset))
    return None if asked is dataset else asked


class PreparedDataset(Dataset[Any]):
    """The base class of all fastdata datasets; only its subclasses are instantiated.

    A subclass may have its own ``__getitem__``, ``__getitems__`` or ``__len__``, which are then
    called for every batch. All other state and code is in ``_fastdata``, so that a subclass may use
    any other name. Loaders and tools read this attribute and no other one.
    """

    _fastdata: DatasetSamples

    plan: TransformPlan = added_property(lambda samples: samples.reader.plan)
    """The transform in three parts: run once per sample, on whole batches, and on each sample."""
    storage: str = added_property(lambda samples: samples.storage_plan.storage)
    """The storage of the samples, such as ``"shared"``."""
    storage_plan: StoragePlan = added_property(lambda samples: samples.storage_plan)
    """The storage of the samples, and the reason for it."""
    skipped: list[SampleError] = added_property(
        lambda samples: list(samples.stored.prepared.skipped)
    )
    """The errors of samples that were left out because of ``on_error="skip"``."""

    @classmethod
    def build_cache(
        cls,
        *arguments: Any,
        engine: Literal["local", "ray"] | Executor = "local",
        shard_bytes: int | str | None = None,
        **options: Any,
    ) -> Self:
        """Make a dataset with ``cache_dir=``, and choose which machines write the cache.

        Args:
            *arguments: arguments of the dataset.
            engine: ``"local"`` for this machine; ``"ray"`` for a Ray cluster (extra ``ray``); or
                any ``concurrent.futures.Executor``. All write the same shards, and a build that was
                stopped continues from its shards.
            shard_bytes: approximate size of a shard: bytes, or a text such as ``"256MiB"``.
                Default: 16 to 64 MiB, or more if the cache would have over 200 shards.
            **options: options of the dataset. A subclass with its own ``__init__`` has to pass on
                ``engine`` and ``shard_bytes``, if they are given, with its ``**options``.

        Returns:
            The dataset. All of its samples are in the cache.

        Raises:
            ValueError: ``cache_dir=`` is missing, or ``engine`` is none of these.
            Exception: the errors of the dataset's class.
        """
        if engine != "local":
            options["engine"] = engine
        if shard_bytes is not None:
            options["shard_bytes"] = shard_bytes
        return cls(*arguments, **options)

    # torch's protocol

    def __len__(self) -> int:
        return self._fastdata.reader.length

    def __getitem__(self, index: int) -> Any:
        """Return sample and target, transformed; a dict if items are dicts.

        Raises:
            IndexError: ``index`` is not in [-N, N).
        """
        samples = self._fastdata
        item = OWN_ITEM.get()
        # A call from a subclass's own ``__getitem__``: the epoch has begun with a refresh.
        is_refreshed = item is not None and item.samples is samples
        reader = samples.handle() if is_refreshed else samples.refresh()
        return reader.item(number_visits([index], reader, samples.epoch_number))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a whole batch: a ``SampleBatch`` if the transform allows, else a list.

        If a wrapper has forwarded this method, the wrapper's own ``__getitem__`` makes the items.
        """
        wrapper = _asked_through_wrapper(self)
        if wrapper is not None:
            return [wrapper[index] for index in indices]
        samples = self._fastdata
        # A loader's epoch has begun with a refresh, so its threads need none. But a worker process
        # has its own copy of the dataset, which the user's code may have changed there.
        if not isinstance(indices, IndexBatch) or get_worker_info() is not None:
            samples.refresh()
        if samples.own_method != "__getitem__":
            reader = samples.handle()
            ring = ring_of(self)
            batch = number_visits(indices, reader, samples.epoch_number)
            return reader.items(batch, new_buffer if ring is None else ring.lease)
        if not isinstance(indices, IndexBatch):
            return [self[index] for index in indices]
        # In a copy of the context, so that ``OWN_ITEM`` is set for these items only.
        return copy_context().run(_own_items, self, indices)

    # torchvision's attributes

    @property
    def transform(self) -> Transform | None:
        """The transform of each sample; assign another one to change it from the next epoch on."""
        return self._fastdata.transforms.of_sample

    @transform.setter
    def transform(self, transform: Transform | None) -> None:
        if is_made(self):
            samples = self._fastdata
            samples.assign(replace(samples.transforms, of_sample=transform))

    @property
    def target_transform(self) -> Transform | None:
        """The transform of each target when it is read."""
        return self._fastdata.transforms.of_target

    @target_transform.setter
    def target_transform(self, target_transform: Transform | None) -> None:
        if is_made(self):
            self._fastdata.assign_target_transform(target_transform)

    @property
    def transforms(self) -> PairTransform | None:
        """The transform of sample and target together, or one made of both other transforms."""
        given = self._fastdata.transforms
        if given.of_both is not None or (given.of_sample is None and given.of_target is None):
            return given.of_both
        return StandardTransform(given.of_sample, given.of_target)

    @transforms.setter
    def transforms(self, transforms: PairTransform | None) -> None:
        if is_made(self):
            samples = self._fastdata
            samples.assign(replace(samples.transforms, of_both=transforms))

    @property
    def targets(self) -> ListView[Any]:
        """The target of every sample, before ``target_transform``.

        They may be assigned until a sample is read or prepared.
        """
        samples = self._fastdata
        return ListView(samples.reader.length, samples.stored_target)

    @targets.setter
    def targets(self, targets: Sequence[Any]) -> None:
        if is_made(self):
            self._fastdata.relist("targets", targets)

    @property
    def samples(self) -> ListView[tuple[str, Any]]:
        """(path, target) of every sample, in torchvision's order; only if samples are files.

        They may be assigned until a sample is read or prepared.
        """
        return self._fastdata.files("samples").pairs

    @samples.setter
    def samples(self, samples: Sequence[tuple[str, Any]]) -> None:
        if is_made(self):
            self._fastdata.relist("samples", samples)

    imgs = samples

    @cached_property
    def classes(self) -> list[str]:
        """Class names, sorted; only if samples are files. Empty if labels are plain numbers.

        Other names may be assigned, such as names to show. This does not change the samples.
        """
        return list(self._fastdata.files("classes").class_to_idx or ())

    @cached_property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class; only if samples are files. It may be assigned, too."""
        return self._fastdata.files("class_to_idx").class_to_idx or {}

    def extra_repr(self) -> str:
        """Return lines to show in ``repr``; override it to show others."""
        return ""

    def __repr__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    # fastdata's additions

    def show(self, n: int = 8) -> Any:
        """Return a figure of ``n`` augmented images with their labels; it needs matplotlib.

        Items are spread over the dataset. Images have the colours before ``Normalize``. A notebook
        displays the figure; ``dataset.show().savefig("images.png")`` writes it to a file.
        """
        from fastdata.datasets.showing import show_dataset

        return show_dataset(self, n)

    def reader(self) -> Reader:
        """Return the reader of an epoch that begins now; it holds the memory of the samples.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        return self._fastdata.refresh()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that random numbers depend on, until it is set again.

        fastdata's ``DataLoader`` needs no ``set_epoch``: it counts the epochs itself, and has a
        ``set_epoch`` of its own. Call this one for other reads, such as ``dataset[3]`` or torch's
        loader. They repeat the draws of an epoch only if the dataset has a ``seed=``; otherwise
        each read draws a seed from torch's generator.
        """
        self._fastdata.set_epoch(epoch)

    def with_transform(self, transform: Transform | None) -> Self:
        """Return a view of the same samples with another transform, for example for validation.

        If other steps run once per sample, the view's samples are prepared and stored separately.
        Memory is freed when the dataset and all of its views are closed or deleted.

        Example:
            >>> import torch
            >>> from fastdata import CachedDataset
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with CachedDataset(squares) as train:
            ...     val = train.with_transform(lambda image: image / 2)
            ...     print(train[3][0].max().item(), val[3][0].max().item())
            3 1.5
        """
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other._fastdata = self._fastdata.view(transform)
        return other

    def __copy__(self) -> Self:
        return PreparedDataset.with_transform(self, self._fastdata.transforms.of_sample)

    def prepare(self) -> Self:
        """Prepare all samples now instead of on their first read; return the dataset.

        Example:
            >>> import torch
            >>> from fastdata import CachedDataset
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with CachedDataset(squares).prepare() as dataset:
            ...     dataset.filled_share()
            1.0
        """
        self._fastdata.prepare()
        return self

    def filled_share(self) -> float:
        """Return the share of the samples that are already stored, from 0 to 1."""
        return self._fastdata.stored.filled_share()

    def storage_report(self) -> StorageReport:
        """Try every codec on samples from the whole dataset, and return a report to print.

        It takes about a second: up to 25 samples are read, encoded and decoded.
        """
        samples = self._fastdata
        samples.handle()
        stored = samples.stored
        source = samples.source()
        steps = (*stored.first_steps, *samples.reader.plan.prepare)
        return report_storage(
            choose_preparer(source, () if source is stored.kept else steps), stored.options
        )

    def close(self) -> None:
        """Free the memory of the samples, unless other views are open. Idempotent.

        Batches stay valid, and a batch that is being read is completed. A running epoch ends with a
        StoreGoneError.
        """
        self._fastdata.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _fastdata_identity(self) -> Any:
        """A value that identifies this dataset in the cache key of another dataset that reads it.

        Raises:
            AttributeError: there is no such value, so the other dataset needs a ``cache_key``.
        """
        samples = self._fastdata
        source = samples.source()
        kind = type(self)
        if not kind.__module__.startswith("fastdata.") or isinstance(source, KeptSamples):
            raise AttributeError(f"a {kind.__name__} is a subclass, or a copy in another process")
        stored = samples.stored
        made = stored.first_steps, samples.transforms, *["index"] * stored.options.return_index
        if isinstance(source, FileSource):
            return made, list(source.paths), list(source.targets), source.loader
        return made, vars(source)


def is_made(dataset: PreparedDataset) -> bool:
    """Return False before ``__init__`` has run: like torchvision's, it overwrites attributes."""
    return "_fastdata" in vars(dataset)


def _own_items(dataset: PreparedDataset, batch: IndexBatch) -> list[Any]:
    """Return the items of a subclass's own ``__getitem__``, each with a visit of its own."""
    samples = dataset._fastdata
    seed = None if samples.stored.options.seed is None else batch.seed
    items = []
    for position, visit, index in zip(batch.positions, batch.visits, batch, strict=True):
        OWN_ITEM.set(OwnItem(samples, int(position), int(visit), seed))
        items.append(dataset[index])
    return items


def own_method(kind: type[PreparedDataset]) -> str | None:
    """Return the name of the method of a subclass that makes the items; None if there is none."""
    if kind.__getitem__ is not PreparedDataset.__getitem__:
        return "__getitem__"
    return "__getitems__" if kind.__getitems__ is not PreparedDataset.__getitems__ else None


def index_count(dataset: PreparedDataset) -> int:
    """Return the number of indices that a loader may read; a subclass may define another length."""
    samples = dataset._fastdata
    return len(dataset) if samples.own_method else samples.reader.length
