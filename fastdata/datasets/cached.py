"""``CachedDataset``: any map-style dataset, prepared once; and what must not be prepared once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastdata.datasets.dataset import PreparedDataset
from fastdata.datasets.serving import Stored
from fastdata.pixels.compose import flatten, is_random
from fastdata.pixels.describe import describe_dataset, unwrapped
from fastdata.report import warn_user
from fastdata.sources import DatasetSource, Source, chosen_keys
from fastdata.stores.options import DatasetOptions, Options, read_options, with_options

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from fastdata.stores.build import Listing


@with_options
class CachedDataset(PreparedDataset):
    """Any map-style dataset of (sample, target) or of dicts, prepared once and kept.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` giving (PIL image | tensor | array, target).
            Read once, from forked worker processes, so that what its own transforms draw would stay
            the same: those of torchvision that are random are refused, those that fastdata does not
            know are warned of. The sample may be a tuple of these, and the target an image or array
            too, such as a mask: all of them are stored. Of an item of three or more values the
            first is the sample; an image or tensor alone has no target. Of an item that is a dict
            the one value that is an image is the sample, and the target that of the other key, or a
            dict of several; items and batches are dicts of the same keys then. Or the path or URL
            of another format's files, a pattern such as ``"train-{000..009}.tar"``, or a list of
            these: WebDataset's tars, Parquet and Arrow; see docs/other-datasets.md.
        columns: of items that are dicts the names of those that are sample and target, such as
            ``{"sample": "image", "target": "label"}``; items are pairs then, and a list of names
            makes the target a dict.
        prepare: called on each sample before it is stored, e.g. ``lambda image:
            image.convert("RGB")``.
        transform: as torchvision's. Its leading deterministic steps run once per sample, before it
            is stored; see ``plan``.
        target_transform: called on each target when it is read.
        transforms: in place of both, called with sample and target together, as torchvision's: for
            masks and boxes. One of v2's known steps, on images with a ``tv_tensors.Mask``, runs on
            whole batches.
        options: see ``DatasetOptions``.

    ``CachedDataset.from_cache`` opens what ``cache_dir`` keeps without ``dataset``.

    Raises:
        SampleError: a sample cannot be read or prepared; names its path and index.
        CacheError: ``cache_dir`` cannot be written, or its disk is full.
        MemoryBudgetError: ``storage="shared"`` does not fit; raised before anything is allocated.

    A pickled dataset is a handle of a few hundred bytes plus the transforms; it opens only on the
    same machine, while the process that made it lives. ``close()`` gives the memory back; so does
    dropping the last reference.

    Example:
        >>> import torch
        >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
        >>> with CachedDataset(squares) as dataset:
        ...     images, targets = dataset.__getitems__([1, 3]).stacked
        >>> images.shape, targets
        (torch.Size([2, 3, 4, 4]), tensor([1, 9]))
    """

    root: str
    """Of ``from_cache``: the folder of the files when the cache was written; empty where samples
    were no files."""

    def __init__(
        self,
        dataset: Any,
        *,
        prepare: Callable[[Any], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        transforms: Callable[[Any, Any], Any] | None = None,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(CachedDataset, options, self._writing)
        chosen_columns = None if columns is None else chosen_keys(columns)
        self._pair_transform = _checked(transforms, transform, target_transform)
        if _are_paths(dataset):
            # 20 ms, which only files of others take.
            from fastdata.sources.formats import open_dataset

            only = None if chosen_columns is None else chosen_columns.names
            found = open_dataset(dataset, chosen.storage_options, only)
            dataset = dataset if found is None else found
        source = DatasetSource(dataset, chosen_columns)
        if chosen.storage != "none":
            _refuse_frozen_draws(dataset)
        self._build(source, chosen, transform, target_transform, prepare=prepare)

    def _list_files(self, source: Source) -> tuple[Listing | None, str]:
        from fastdata.stores.build import list_paths

        found = [source.path(index) for index in range(len(source))]
        paths = [path for path in found if path is not None]
        if not paths or len(paths) < len(found):
            return None, ""
        root = ""
        # Not of relative paths and others, or on several drives.
        with contextlib.suppress(ValueError):
            root = os.path.commonpath({os.path.dirname(path) for path in paths})
        listing = list_paths(paths, root)
        if (listing.sizes < 0).all():  # names of another kind, such as keys of an LMDB
            return None, ""
        return listing, root

    def _describe_source(self, source: Source, listing: Listing | None) -> str:
        cache_key = self._stored.options.cache_key
        assert isinstance(source, DatasetSource)
        *_, inner = unwrapped(source.dataset)
        if cache_key is None and listing is None and not hasattr(inner, "_identity"):
            raise ValueError(
                f"cache_dir= must know in the next run whether the samples of "
                f"{type(inner).__name__} are still the same, but it does not list their files in "
                "an attribute samples. Give cache_key='a name' and change it whenever the data "
                "change."
            )
        described = describe_dataset(source.dataset, cache_key)
        return described if source.columns is None else f"{described} {source.columns}"

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
        batch_ops: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        local_cache: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Open a cache on its own, without the dataset and the files that it was made from.

        Serves what was kept when the cache was last brought up to date, in that order; ``skipped``
        lists what was left out. Where samples are files, ``samples``, ``classes`` and
        ``class_to_idx`` are those of the dataset then, and ``root`` is the folder that it had.

        Args:
            path: a cache, or the ``cache_dir`` that holds only this one, or the URL of such. Any
                dataset or ``fastdata build`` may have written it, but not with ``codec="source"``
                or a codec object of your own.
            transform: called on each sample as the cache holds it. All of its steps run when a
                sample is read; those that fastdata knows on whole batches.
            target_transform: called on each target when it is read.
            transforms: in place of both, called with sample and target together.
            as_tensors: give images as tensors (C, H, W) of their stored pixels, those of
                torchvision's ``PILToTensor``, and not as PIL images, which a ``transform`` would
                have to make tensors of.
            seed: of the random draws of batch ops; see
                ``fastdata.stores.options.DatasetOptions``.
            batch_ops: False runs known random transforms per sample exactly as written.
            storage_options: for a URL; see ``fastdata.stores.options.DatasetOptions``.
            local_cache: as there.

        Raises:
            FileNotFoundError: there is no cache.
            ValueError: there are several; says which.
            CacheError: it is damaged, or cannot be served without its dataset; says how to open it.

        Example:
            >>> import tempfile, torch
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     CachedDataset(squares, cache_dir=folder, cache_key="squares").close()
            ...     with CachedDataset.from_cache(folder) as dataset:
            ...         print(len(dataset), list(dataset.targets))
            5 [0, 1, 4, 9, 16]
        """
        from fastdata.stores.inspect import find_cache, open_cache

        dataset = cls.__new__(cls)
        dataset._pair_transform = _checked(transforms, transform, target_transform)
        dataset._transform, dataset.target_transform = transform, target_transform
        home = find_cache(path, storage_options)
        prepared, manifest = open_cache(home, as_tensors=as_tensors, local_cache=local_cache)
        kept = prepared.kept
        assert kept is not None
        dataset.root = manifest.root
        dataset._serve(
            Stored(
                samples=kept,
                table=kept.table,
                options=Options(seed=seed, batch_ops=batch_ops),
                storage_plan=prepared.storage_plan,
                skipped=tuple(prepared.skipped),
                after=(0, ""),
                is_upright="PIL.ImageOps.exif_transpose" in manifest.key["prepare"],
            )
        )
        return dataset


def _checked(transforms: Any, transform: Any, target_transform: Any) -> Any:
    if transforms is not None and (transform is not None or target_transform is not None):
        raise ValueError(
            "transforms= takes sample and target together; give it alone, or transform= and the "
            "like"
        )
    return transforms


def _are_paths(dataset: Any) -> bool:
    each = dataset if isinstance(dataset, list) and dataset else [dataset]
    return all(isinstance(path, (str, os.PathLike)) for path in each)


_USUAL_NAMES = ("transforms", "transform", "target_transform")


def _refuse_frozen_draws(dataset: Any) -> None:
    """Refuse what a dataset, or one inside of it, draws at random: it would be kept."""
    steps: dict[int, tuple[str, str, Any]] = {}
    for owner, name, step in _own_steps(dataset):
        steps.setdefault(id(step), (owner, name, step))
    texts = {True: "", None: ""}
    for owner, name, step in steps.values():
        # Under another name it may stay unused.
        drawn = is_random(step) if name in _USUAL_NAMES else None
        if drawn or (
            drawn is None and name != "target_transform"
        ):  # labels are renamed, not augmented
            texts[drawn] += (
                f"{', ' if texts[drawn] else ''}{' '.join(repr(step).split())} in {owner}.{name}"
            )
    if texts[True]:
        raise ValueError(
            f"{texts[True]}: random, but samples are kept as they are first read, so that every "
            "epoch would see the same draws. Make the dataset without it, and give it to "
            "CachedDataset as transform=, or as transforms= where it takes the target too; or use "
            "storage='none'."
        )
    if texts[None]:
        advice = (
            f"{texts[None]}: what it does is not known to fastdata. If it draws at random, every "
            "epoch sees the same draws, because samples are kept as they are first read. Make the "
            "dataset without it, and give it to CachedDataset as transform= or transforms=; or as "
            "prepare= if it does the same each time."
        )
        if any(name == "set_transform" for _, name, _ in steps.values()):
            advice += " What set_transform calls takes a batch of items; these take one image."
        warn_user(advice)


def _own_steps(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Of a dataset's transforms and of those inside it: whose, under which name, the step."""
    owner, shown = type(dataset).__name__, getattr(dataset, "format", None)
    if (
        isinstance(shown, dict) and shown.get("type") == "custom"
    ):  # Hugging Face's, by ``set_transform``
        yield owner, "set_transform", shown.get("format_kwargs", {}).get("transform")
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    for name in _USUAL_NAMES:
        call: Any = getattr(dataset, name, None)
        if type(call).__name__ != "StandardTransform":
            yield from ((owner, name, step) for step in flatten(call))
        elif "transforms" in getattr(
            code, "co_names", ()
        ):  # else it holds both, and its dataset asks for each
            yield from ((owner, "transforms", step) for step in flatten(call.transform))
            yield from (
                (owner, "target_transform", step) for step in flatten(call.target_transform)
            )
    for name, call in getattr(dataset, "__dict__", {}).items():
        if name not in _USUAL_NAMES and callable(call):
            yield from ((owner, name, step) for step in flatten(call) if is_random(step))
    parts = getattr(dataset, "datasets", None)
    parts = list(parts.values()) if isinstance(parts, dict) else parts
    each = parts if isinstance(parts, (list, tuple)) else ()
    for part in (getattr(dataset, "dataset", None), *each):
        if part is not None:
            yield from _own_steps(part)
