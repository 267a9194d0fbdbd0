"""Any dataset, prepared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from fastdata.cache import describe_dataset, find_cache, list_paths, open_cache
from fastdata.dataset import PreparedDataset
from fastdata.decode import Bound
from fastdata.ingest import OnError
from fastdata.options import Options
from fastdata.report import warn_user
from fastdata.sources import DatasetSource, Source
from fastdata.transforms.steps import flatten, is_random

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CachedDataset"]


class CachedDataset(PreparedDataset):
    """Any map-style dataset of (sample, target), prepared once and kept in shared memory.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` giving (PIL image | tensor | array, target). Read once, from forked
            worker processes, so that what its own transforms draw would stay the same: those of torchvision that are
            random are refused, those that fastdata does not know are warned of. The sample may be a tuple of these,
            and the target an image or array too, such as a mask: all of them are stored.
        prepare: called on each sample before it is stored, e.g. ``lambda image: image.convert("RGB")``.
        transform: as torchvision's. Its leading deterministic steps run once per sample, before it is stored; see
            ``plan``.
        target_transform: called on each target when it is read.
        transforms: in place of both, called with sample and target together, as torchvision's: for masks.
        storage: ``"shared"`` keeps prepared samples in shared memory; ``"compressed"`` keeps them encoded there, and
            decodes on every read; ``"disk"`` keeps them in ``cache_dir``; ``"none"`` keeps nothing and prepares on
            every read; ``"auto"`` is ``"disk"`` where ``cache_dir`` is given, else takes the first of the others that
            fits the memory budget. ``"device"``: like ``"shared"``, and each ``CudaPrefetcher`` copies all of them to
            its GPU once, to gather batches there; never chosen by ``"auto"``.
        codec: how ``"compressed"`` samples, or those on disk, are encoded. ``"source"``: their own files as they are,
            prepared on every read. ``"lz4"``, ``"zstd"``: lossless. ``"jpeg"``: lossy. An object with
            ``encode(array) -> bytes`` and ``decode(memoryview, out)``. A tuple of these, one for each part of a sample.
            ``"auto"``: the lossless one that decodes fastest of those that fit, tried on samples of the data, see
            ``storage_report``; on disk none where samples fit as they are.
        resize: size in pixels that images are resized to before they are stored, as torchvision's ``Resize``: an int
            for the shorter side, or (height, width); or ``"short:320"``, ``"long:500"``: at most that, never enlarged.
        fill: ``"eager"`` prepares all samples now, ``"lazy"`` each on its first read. ``"auto"`` is lazy where the
            memory that samples need follows from the transform, as it may for image files, and eager elsewhere.
        memory_limit: the most memory to use: bytes, ``"8GiB"``, or a fraction of what is free.
        progress: show a progress bar on standard error.
        seed: of the random draws of batch ops. ``None`` takes the base seed that torch's loaders draw in each epoch,
            so that ``torch.manual_seed`` and ``generator=`` decide; with a number draws depend on it, the epoch and the
            sample only.
        batch_ops: ``"auto"`` runs known random transforms on whole batches, with fastdata's own draws; ``"off"`` runs
            them per sample exactly as written.
        on_error: ``"raise"``, or ``"skip"`` to leave out samples that cannot be prepared, with one warning.
        num_workers: processes that prepare; default: all usable cores.
        cache_dir: folder that keeps prepared samples for the next run, which maps them into memory and prepares only
            those whose file has changed since. The page cache holds one copy for all workers, ranks and runs. It is
            found by the prepare part, the codec and the files (relative path, size, time); any number of datasets may
            share a folder. Not with a ``storage`` in memory. Every sample is held against a checksum when it is first
            read.
        cache_key: stands for what fastdata cannot see: the samples of a dataset that does not list its files in
            ``samples``, and lambdas in ``prepare``. Change it whenever these change.

    ``CachedDataset.from_cache`` opens what ``cache_dir`` keeps without ``dataset``.

    Raises:
        SampleError: a sample cannot be read or prepared; names its path and index.
        CacheError: ``cache_dir`` cannot be written, or its disk is full.
        MemoryBudgetError: ``storage="shared"`` does not fit; raised before anything is allocated.

    A pickled dataset is a handle of a few hundred bytes plus the transforms; it opens only on the same machine, while
    the process that made it lives. ``close()`` gives the memory back; so does dropping the last reference.

    Example:
        >>> import torch
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
        >>> with CachedDataset(squares, progress=False) as dataset:
        ...     images, targets = dataset.__getitems__([1, 3]).stacked
        >>> images.shape, targets
        (torch.Size([2, 3, 4, 4]), tensor([1, 9]))
    """

    root: str
    """Of ``from_cache``: the folder of the files when the cache was written; empty where samples were no files."""

    def __init__(
        self,
        dataset: Any,
        *,
        prepare: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        storage: Literal["auto", "device", "shared", "compressed", "disk", "none"] = "auto",
        codec: Any = "auto",
        resize: Bound | None = None,
        fill: Literal["auto", "eager", "lazy"] = "auto",
        memory_limit: int | float | str | None = None,
        progress: bool = True,
        seed: int | None = None,
        batch_ops: Literal["auto", "off"] = "auto",
        on_error: OnError = "raise",
        num_workers: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_key: str | None = None,
    ) -> None:
        options = Options(
            storage=storage,
            codec=codec,
            resize=resize,
            fill=fill,
            memory_limit=memory_limit,
            progress=progress,
            seed=seed,
            batch_ops=batch_ops,
            on_error=on_error,
            num_workers=num_workers,
            cache_dir=cache_dir,
            cache_key=cache_key,
        )
        self.transforms = _checked(transforms, transform, target_transform)
        source = DatasetSource(dataset)
        if storage != "none":
            _refuse_frozen_draws(dataset)
        root, listing = "", None
        if cache_dir is not None:
            paths = [path for index in range(len(source)) if (path := source.path(index)) is not None]
            if paths and len(paths) == len(source):
                root = _common_folder(paths)
                listing = list_paths(paths, root)
        self._build(source, options, transform, target_transform, prepare=prepare, listing=listing, root=root)

    @classmethod
    def from_cache(
        cls,
        path: str | os.PathLike[str],
        *,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        as_tensors: bool = False,
        seed: int | None = None,
        batch_ops: Literal["auto", "off"] = "auto",
    ) -> Self:
        """Open a cache on its own: the dataset and the files that it was made from need not be there.

        Serves what was kept when the cache was last brought up to date, in that order; ``skipped`` lists what was left
        out. Where samples are files, ``samples``, ``classes`` and ``class_to_idx`` are those of the dataset then, and
        ``root`` is the folder that it had.

        Args:
            path: a cache, or the ``cache_dir`` that holds only this one. Any dataset or ``fastdata build`` may have
                written it, but not with ``codec="source"`` or a codec object of your own.
            transform: called on each sample as the cache holds it. All of its steps run when a sample is read; those
                that fastdata knows on whole batches.
            target_transform: called on each target when it is read.
            transforms: in place of both, called with sample and target together.
            as_tensors: give images as tensors (C, H, W) of their stored pixels, those of torchvision's
                ``PILToTensor``, and not as PIL images, which a ``transform`` would have to make tensors of.
            seed: of the random draws of batch ops; see the class.
            batch_ops: ``"off"`` runs known random transforms per sample exactly as written.

        Raises:
            FileNotFoundError: there is no cache.
            ValueError: there are several; says which.
            CacheError: it is damaged, or cannot be served without its dataset; says how to open it.

        Example:
            >>> import tempfile, torch
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     CachedDataset(squares, cache_dir=folder, cache_key="squares", progress=False).close()
            ...     with CachedDataset.from_cache(folder) as dataset:
            ...         print(len(dataset), list(dataset.targets))
            5 [0, 1, 4, 9, 16]
        """
        dataset = cls.__new__(cls)
        dataset.transforms = _checked(transforms, transform, target_transform)
        dataset._prepared = 0, ""
        dataset._begin(Options(seed=seed, batch_ops=batch_ops), transform, target_transform)
        prepared, manifest = open_cache(find_cache(path), as_tensors=as_tensors)
        dataset.root, dataset._is_upright = manifest.root, "PIL.ImageOps.exif_transpose" in manifest.key["prepare"]
        dataset._serve(prepared, source=None)
        return dataset

    def _source_text(self, source: Source) -> str:
        assert isinstance(source, DatasetSource)
        return describe_dataset(source.dataset, self._options.cache_key)


def _checked(transforms: Any, transform: Any, target_transform: Any) -> Any:
    """``transforms`` as given.

    Raises:
        ValueError: it is not given alone.
    """
    if transforms is not None and (transform is not None or target_transform is not None):
        raise ValueError("transforms= takes sample and target together; give it alone, or transform= and the like")
    return transforms


def _refuse_frozen_draws(dataset: Any) -> None:
    """See to it that what a dataset draws at random is not drawn once and kept.

    Raises:
        ValueError: it, or one inside of it, has a transform that is known to be random; says how to move it out.
    """
    steps = {id(step): (owner, name, step) for owner, name, step in _own_steps(dataset)}.values()
    texts = {True: "", None: ""}
    for owner, name, step in steps:
        drawn = is_random(step)
        if drawn or (drawn is None and name != "target_transform"):  # labels are renamed, not augmented
            texts[drawn] += f"{', ' if texts[drawn] else ''}{' '.join(repr(step).split())} in {owner}.{name}"
    if texts[True]:
        raise ValueError(
            f"{texts[True]}: random, but samples are kept as they are first read, so that every epoch would see the "
            "same draws. Make the dataset without it, and give it to CachedDataset as transform=, or as transforms= "
            "where it takes the target too; or use storage='none'."
        )
    if texts[None]:
        warn_user(
            f"{texts[None]}: not known to fastdata. If it draws at random, every epoch sees the same draws, because "
            "samples are kept as they are first read. Make the dataset without it, and give it to CachedDataset as "
            "transform= or transforms=; or as prepare= if it does the same each time."
        )


def _own_steps(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Steps of the transforms of a dataset and of those inside of it: class, name of the attribute, step."""
    owner = type(dataset).__name__
    for name in ("transforms", "transform", "target_transform"):
        call: Any = getattr(dataset, name, None)
        if type(call).__name__ != "StandardTransform":
            yield from ((owner, name, step) for step in flatten(call))
        elif _reads_transforms(dataset):
            yield from ((owner, "transforms", step) for step in flatten(call.transform))
            yield from ((owner, "target_transform", step) for step in flatten(call.target_transform))
    parts = getattr(dataset, "datasets", None)
    parts = parts.values() if isinstance(parts, dict) else parts if isinstance(parts, (list, tuple)) else ()
    for part in (getattr(dataset, "dataset", None), *parts):
        if part is not None:
            yield from _own_steps(part)


def _reads_transforms(dataset: Any) -> bool:
    """Whether a torchvision dataset uses ``transforms``; others have it too, with what ``transform`` was at first."""
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    return "transforms" in getattr(code, "co_names", ())


def _common_folder(paths: list[str]) -> str:
    """The folder that holds all files; empty where they have none in common."""
    try:
        return os.path.commonpath({os.path.dirname(path) for path in paths})
    except ValueError:  # some paths are relative and some are not, or they lie on several drives
        return ""
