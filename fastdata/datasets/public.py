"""The datasets that users make: of image files, and of any other map-style dataset.

``ImageFolder`` lists a folder per class, ``ImageManifest`` paths and labels; ``CachedDataset``
prepares the samples of another dataset once, and refuses what must not be prepared once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastdata.datasets.dataset import PreparedDataset
from fastdata.datasets.reader import Stored
from fastdata.errors import AnyPath, is_url, kind_of, local_path, refuse_secrets
from fastdata.machine.shared import ListView, SampleTable
from fastdata.pixels import PairStep, Step, describe_steps
from fastdata.pixels.compose import flatten, is_random
from fastdata.pixels.describe import describe_dataset, unwrapped
from fastdata.pixels.images import IMAGE_EXTENSIONS, Loader, load_image
from fastdata.report import warn_user
from fastdata.sources import (
    DatasetSource,
    FileSource,
    Source,
    chosen_keys,
    find_classes,
    read_manifest,
    scan_folder,
)
from fastdata.sources.remote import Place, StorageChoice
from fastdata.stores.prepare import DatasetOptions, Options, read_options, with_options

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from fastdata.stores.build import Described, Listing


_UNKNOWN = (-1, -1)
"""Size and tag of a remote file."""


def _facts_of_files(
    paths: Sequence[str], listed: Mapping[str, tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return size and tag of each remote file.

    Raises:
        ValueError: a URL that no listing of ours has holds a secret.
    """
    for index, path in enumerate(paths):
        if path not in listed:
            refuse_secrets(path, f"sample {index}")
    return [listed.get(path, _UNKNOWN) for path in paths]


class _Shown(PreparedDataset):
    """What torchvision's datasets show of their samples: lists, and a text."""

    @property
    def targets(self) -> ListView[Any]:
        """Target of every sample, before ``target_transform``.

        Read-only once a sample was read or prepared; before that they may be assigned.
        """
        return ListView(self._reader.length, lambda index: self._handle().stored_target(index))

    @targets.setter
    def targets(self, targets: Sequence[Any]) -> None:
        self._relist("targets", targets)

    @property
    def samples(self) -> ListView[tuple[str, Any]]:
        """(path, target) of every sample, in torchvision's order; only where samples are files.

        Read-only once one was read or prepared; before that they may be assigned.
        """
        return self._files("samples").pairs

    @samples.setter
    def samples(self, samples: Sequence[tuple[str, Any]]) -> None:
        self._relist("samples", samples)

    imgs = samples

    def _relist(self, name: str, _: Sequence[Any]) -> None:
        raise AttributeError(
            f"{name} of {kind_of(self)} cannot be assigned: samples are kept by their number. Take "
            "some of them by torch.utils.data.Subset(dataset, indices), other labels by "
            "target_transform= or by ImageManifest([(path, label), ...])."
        )

    @cached_property
    def classes(self) -> list[str]:
        """Class names, sorted; only where samples are files. Empty if labels are plain numbers.

        They may be assigned, such as names to show; the samples stay as they are.
        """
        return list(self._files("classes").class_to_idx or ())

    @cached_property
    def class_to_idx(self) -> dict[str, int]:
        """Number of each class; only where samples are files. It may be assigned, too."""
        return self._files("class_to_idx").class_to_idx or {}

    def _files(self, asked_for: str) -> SampleTable:
        self._handle()
        table = self._stored.table
        # So that hasattr says what it would of torchvision's own.
        if table is None or not table.has_paths:
            raise AttributeError(
                f"{type(self).__name__} has no {asked_for}: it does not list files"
            )
        return table

    def __repr__(self) -> str:
        stored = self._stored
        kept = self.storage_plan.reason.replace("; ", "\n")
        if stored.kept is not None and self.filled_share() < 1:
            kept += f"\n{self.filled_share():.0%} prepared so far, the rest on first read"
        shown = {
            "Storage": kept if self._handle.reader is not None else "closed",
            "Transform": self._transform,
            "Target transform": self.target_transform,
            "Transforms": self._pair_transform,
        }
        lines = [f"Dataset {type(self).__name__}", f"Number of datapoints: {len(self)}"]
        lines += self._extra_repr()
        for title, value in shown.items():
            if value is not None:
                indent = " " * len(f"    {title}: ")
                lines.append(f"{title}: {value}".replace("\n", f"\n{indent}"))
        return "\n    ".join(lines)

    def _extra_repr(self) -> list[str]:
        return []


class _ImageFiles(_Shown):
    """What datasets of image files have in common."""

    root: AnyPath
    _place: Place | None = None
    """That remote files lie below."""

    def _build_files(
        self,
        paths: list[str],
        targets: Sequence[Any],
        class_to_idx: dict[str, int] | None,
        loader: Loader | None,
        options: Options,
        transform: Step | None,
        target_transform: Step | None,
    ) -> None:
        self._loader = loader or load_image
        facts = None
        if self._place is not None:
            facts = _facts_of_files(paths, self._place.listed)
            self._place.listed = {}
        table = SampleTable(targets, paths=paths, class_to_idx=class_to_idx, facts=facts)
        self._build(self._files_of(table), options, transform, target_transform, files=table)

    def _describe(self, source: Source) -> Described:
        from fastdata.stores.build import list_paths

        root = os.fspath(self.root)
        table = self._stored.table
        assert isinstance(source, FileSource)
        assert table is not None
        opened = describe_steps([self._loader], self._stored.options.cache_key)
        opened = f"{opened}, {self._list_name}" if self._list_name else opened
        return opened, list_paths(table.all_paths(), root, source.listing()), root

    def _files_of(self, table: SampleTable) -> FileSource:
        return FileSource(table.paths, table.targets, self._loader, self._place, table.facts)

    def _origin(self) -> Source:
        """The files, which copies in other processes know too."""
        table = self._stored.table
        return self._stored.samples if table is None else self._files_of(table)

    def _relist(self, name: str, listed: Sequence[Any]) -> None:
        self._handle()
        if self._was_read or self.filled_share() > 0:
            super()._relist(name, listed)
        before = self._files(name)
        paths = before.all_paths()
        targets = listed
        if name == "samples":
            paths = [path for path, _ in listed]
            targets = [target for _, target in listed]
        elif len(listed) != len(paths):
            raise ValueError(
                f"{len(listed)} targets for {len(paths)} samples. For fewer samples assign "
                "samples, which bring their targets."
            )
        facts = None
        if before.facts is not None:
            known = dict(zip(before.all_paths(), before.facts.tolist(), strict=True))
            facts = _facts_of_files(paths, known)
        table = SampleTable(targets, paths=paths, class_to_idx=before.class_to_idx, facts=facts)
        self._let_go(replace(self._stored, source=self._files_of(table), files=table))
        if self._stored.after is None:
            self._serve(self._stored)
        else:
            self._prepare_again()

    @property
    def loader(self) -> Loader:
        """What opens a file."""
        return self._loader

    def _extra_repr(self) -> list[str]:
        return [f"Root location: {self.root}"]


@with_options
class ImageFolder(_ImageFiles):
    """torchvision's ``ImageFolder``: a folder of images per class, prepared once and kept.

    Args:
        root: holds one folder per class; may be a URL such as ``s3://bucket/train``, see
            ``storage_options``.
        transform: as torchvision's. Its leading deterministic steps run once per image, before it
            is stored; see ``print(dataset.plan)``.
        target_transform: called on each class number when it is read.
        loader: opens one path; default: as torchvision's own, the same pixels. The ``decode_image``
            of torchvision and torchcodec are known too, see docs/differences.md.
        is_valid_file: tells image files from others; default: by extension.
        allow_empty: accept class folders without images.
        options: see ``DatasetOptions``.

    Attributes:
        classes: sorted class names.
        class_to_idx: class name -> class number.
        samples: list-like of (path, class number); ``imgs`` is the same. May be assigned until the
            first sample is read or prepared.
        targets: list-like of class numbers; may be assigned as long.
        skipped: with ``on_error="skip"``, the errors of the images left out.

    Raises:
        FileNotFoundError: no class folder, or one without images; as torchvision's.
        SampleError: an image cannot be read.
        MemoryBudgetError: ``storage="shared"`` does not fit.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     for name in ("cat", "dog"):
        ...         (pathlib.Path(root) / name).mkdir()
        ...         Image.new("RGB", (6, 5)).save(pathlib.Path(root) / name / "0.png")
        ...     dataset = ImageFolder(root).prepare()
        >>> dataset.classes, dataset.targets, dataset[1][0].size
        (['cat', 'dog'], [0, 1], (6, 5))
    """

    extensions = IMAGE_EXTENSIONS

    def __init__(
        self,
        root: AnyPath,
        transform: Step | None = None,
        target_transform: Step | None = None,
        loader: Loader | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(ImageFolder, options, self._writing)
        self.root = local_path(root) if isinstance(root, str) else root
        if is_url(root):
            self._place = Place(root, chosen.storage_options)
            self.root = self._place.url
        is_usual = (
            is_valid_file is None
            and self.extensions is IMAGE_EXTENSIONS
            and self.make_dataset is ImageFolder.make_dataset
            and type(self).find_classes is ImageFolder.find_classes
        )
        self._list_name = "" if is_usual else None
        classes, class_to_idx = self.find_classes(self._place or self.root)
        if classes != list(class_to_idx or ()):
            self.classes = classes
        samples = self.make_dataset(
            self._place or self.root,
            class_to_idx=class_to_idx,
            extensions=self.extensions if is_valid_file is None else None,
            is_valid_file=is_valid_file,
            allow_empty=allow_empty,
        )
        paths = [path for path, _ in samples]
        targets = [target for _, target in samples]
        self._build_files(paths, targets, class_to_idx, loader, chosen, transform, target_transform)

    @staticmethod
    def make_dataset(
        directory: AnyPath,
        class_to_idx: dict[str, int],
        extensions: str | tuple[str, ...] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> list[tuple[str, int]]:
        """(path, class number) of every sample, as torchvision's; override it to list others.

        Raises:
            ValueError: ``class_to_idx`` is empty or None, or both or none of ``extensions`` and
                ``is_valid_file`` are given.
            FileNotFoundError: a class has no valid file.
        """
        if class_to_idx is None:
            raise ValueError("The class_to_idx parameter cannot be None.")
        return scan_folder(directory, class_to_idx, extensions, is_valid_file, allow_empty)

    def find_classes(self, directory: AnyPath) -> tuple[list[str], dict[str, int]]:
        """Class names and their numbers; override it to choose which folders are classes.

        Raises:
            FileNotFoundError: there is no class folder.
        """
        return find_classes(directory)


@with_options
class ImageManifest(_ImageFiles):
    r"""Image files listed with their labels in a CSV file, a pandas frame, or a list.

    Args:
        manifest: the path or URL of a CSV file (comma-separated UTF-8, with a header line); a
            pandas frame; or a list of (path, label), of (path, label, id) with ``id``, and of paths
            with ``label=None``. Paths may be URLs.
        root: folder that relative paths start from; default: the CSV file's own, else the current
            one.
        file: name of the column of paths.
        label: name of the column of labels; of several, or of one of lists, for a vector; None
            where there are none.
        id: name of a column to pass through beside the label, such as the key of a submission. It
            may be ``file``'s.
        target_transform: called on each target when it is read, with ``id`` on both.
        transform, loader: see ``ImageFolder``.
        options: see ``DatasetOptions``.

    A target, and what a batch of them is, follows from all labels together:

    * whole numbers: an int, as it stands; int64 (B,).
    * numbers of which one has a decimal point: a float; float64 (B,), as ``default_collate`` has
      it.
    * names: an int, the name's place in ``classes``, which are sorted; int64 (B,).
    * several labels: a tensor, int64 if all are whole numbers, else float32; (B, labels).
    * ``label=None``: the id; without ``id`` the sample's place in the manifest, from 0; int64 (B,).
    * with ``id`` and ``label``: a tuple (label, id); a list of both.

    Ids are texts as the CSV file has them ("007"), or the values of the frame or list; a batch of
    texts is a tuple.

    Raises:
        ValueError: a value or column is missing or malformed; names line and column.
        SampleError: an image cannot be read.
        MemoryBudgetError: ``storage="shared"`` does not fit.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Image.new("RGB", (6, 5)).save(f"{root}/a.png")
        ...     _ = pathlib.Path(root, "train.csv").write_text("file,label\na.png,cat\n")
        ...     dataset = ImageManifest(f"{root}/train.csv")
        >>> dataset.classes, len(dataset)
        (['cat'], 1)
    """

    def __init__(
        self,
        manifest: AnyPath | Any,
        *,
        root: AnyPath | None = None,
        file: str = "file",
        label: str | Sequence[str] | None = "label",
        id: str | None = None,
        transform: Step | None = None,
        target_transform: Step | None = None,
        loader: Loader | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(ImageManifest, options, self._writing)
        is_path = isinstance(manifest, str | os.PathLike)
        beside = os.path.dirname(os.fsdecode(manifest)) if is_path else ""
        listed = read_manifest(manifest, root, file, label, id, chosen.storage_options)
        # Of one is enough: most lie side by side.
        url = next((path for path in listed.paths if "://" in path), "")
        if is_url(url):
            folder = next(filter(is_url, (root or "", beside)), os.path.dirname(url))
            self._place = Place(folder, chosen.storage_options)
            self.root = self._place.url
        else:
            self.root = Place(beside).url if root is None else os.fspath(root)
        self._list_name = None
        if is_path:
            is_beside = Place(beside).url == Place(self.root).url
            self._list_name = os.path.basename(manifest) if is_beside else Place(manifest).url
        self._build_files(
            listed.paths,
            listed.targets,
            listed.class_to_idx,
            loader,
            chosen,
            transform,
            target_transform,
        )


# Any map-style dataset


@with_options
class CachedDataset(_Shown):
    """Any map-style dataset of (sample, target) or of dicts, prepared once and kept.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` giving (PIL image | tensor | array, target).
            Read once, from forked worker processes, so that what its own transforms draw would stay
            the same: those of torchvision that are random are refused, those that fastdata does not
            know are warned of. The sample may be a tuple of these, and the target an image or array
            too, such as a mask: all of them are stored. Of an item of three or more values the
            first is the sample; an image or tensor alone has no target. Of an item that is a dict
            the one value that is an image is the sample, and the target that of the other key, or a
            dict of several; items and batches are dicts of the same keys then. Namedtuples stay of
            their class, where it can be found by its module and name. Or the path or URL
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
        prepare: Step | None = None,
        transform: Step | None = None,
        target_transform: Step | None = None,
        transforms: PairStep | None = None,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(CachedDataset, options, self._writing)
        chosen_columns = None if columns is None else chosen_keys(columns)
        self._pair_transform = _checked(transforms, transform, target_transform)
        each = dataset if isinstance(dataset, list) and dataset else [dataset]
        if all(isinstance(path, (str, os.PathLike)) for path in each):
            # 20 ms, which only files of others take.
            from fastdata.sources.formats import open_dataset

            only = None if chosen_columns is None else chosen_columns.names
            found = open_dataset(dataset, chosen.storage_options, only)
            dataset = dataset if found is None else found
        source = DatasetSource(dataset, chosen_columns)
        if chosen.storage != "none":
            _refuse_frozen_draws(dataset)
        self._build(source, chosen, transform, target_transform, prepare=prepare)

    def _describe(self, source: Source) -> Described:
        cache_key = self._stored.options.cache_key
        assert isinstance(source, DatasetSource)
        listing, root = _list_files(source)
        *_, inner = unwrapped(source.dataset)
        if cache_key is None and listing is None and not hasattr(inner, "_fastdata_identity"):
            raise ValueError(
                f"cache_dir= must know in the next run whether the samples of "
                f"{type(inner).__name__} are still the same, but it does not list their files in "
                "an attribute samples. Give cache_key='a name' and change it whenever the data "
                "change."
            )
        described = describe_dataset(source.dataset, cache_key)
        opened = described if source.columns is None else f"{described} {source.columns}"
        return opened, listing, root

    @classmethod
    def from_cache(
        cls,
        path: AnyPath,
        *,
        transform: Step | None = None,
        target_transform: Step | None = None,
        transforms: PairStep | None = None,
        as_tensors: bool = False,
        seed: int | None = None,
        batch_ops: bool = True,
        storage_options: StorageChoice = None,
        local_cache: AnyPath | None = None,
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
                ``fastdata.stores.prepare.DatasetOptions``.
            batch_ops: False runs known random transforms per sample exactly as written.
            storage_options: for a URL; see ``fastdata.stores.prepare.DatasetOptions``.
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
        from fastdata.stores.cache import find_cache, open_cache

        dataset = cls.__new__(cls)
        dataset._pair_transform = _checked(transforms, transform, target_transform)
        dataset._transform = transform
        dataset.target_transform = target_transform
        home = find_cache(path, storage_options)
        prepared, manifest = open_cache(home, as_tensors=as_tensors, local_cache=local_cache)
        dataset.root = manifest.root
        dataset._serve(
            Stored(
                options=Options(seed=seed, batch_ops=batch_ops),
                prepared=prepared,
                after=(0, "", ""),
                is_upright="PIL.ImageOps.exif_transpose" in manifest.key["prepare"],
            )
        )
        return dataset


def _list_files(source: Source) -> tuple[Listing | None, str]:
    """The files of samples, and their folder; none where samples are no files."""
    from fastdata.stores.build import list_paths

    paths = list(filter(None, map(source.path, range(len(source)))))
    if not paths or len(paths) < len(source):
        return None, ""
    root = ""
    # Not of relative paths and others, or on several drives.
    with contextlib.suppress(ValueError):
        root = os.path.commonpath({os.path.dirname(path) for path in paths})
    listing = list_paths(paths, root)
    # Of names of another kind, such as keys of an LMDB, no size is known.
    return (None, "") if (listing.facts[0] < 0).all() else (listing, root)


def _checked(transforms: Any, transform: Any, target_transform: Any) -> Any:
    if transforms is not None and (transform is not None or target_transform is not None):
        raise ValueError(
            "transforms= takes sample and target together; give it alone, or transform= and the "
            "like"
        )
    return transforms


_USUAL_NAMES = ("transforms", "transform", "target_transform")


def _refuse_frozen_draws(dataset: Any) -> None:
    """Refuse what a dataset, or one inside of it, draws at random: it would be kept."""
    random: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for owner, name, step in _own_steps(dataset):
        text = f"{' '.join(repr(step).split())} in {owner}.{name}"
        drawn = is_random(step)
        if drawn and name in _USUAL_NAMES:
            random[text] = None
        # Under another name it may stay unused; labels are renamed, not augmented.
        elif drawn or (drawn is None and name in ("transforms", "transform", "set_transform")):
            unknown[text] = None
    if random:
        raise ValueError(
            f"{', '.join(random)}: random, but samples are kept as they are first read, so that "
            "every epoch would see the same draws. Make the dataset without it, and give it to "
            "CachedDataset as transform=, or as transforms= where it takes the target too; or use "
            "storage='none'."
        )
    if unknown:
        warn_user(
            f"{', '.join(unknown)}: what it does is not known to fastdata. If it draws at random, "
            "every epoch sees the same draws, because samples are kept as they are first read. "
            "Make the dataset without it, and give it to CachedDataset as transform= or "
            "transforms=; or as prepare= if it does the same each time."
        )


def _own_steps(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """Of a dataset's transforms and of those inside it: whose, under which name, the step."""
    calls = {name: getattr(dataset, name, None) for name in _USUAL_NAMES}
    both: Any = calls["transforms"]
    if type(both).__name__ == "StandardTransform":
        del calls["transforms"]
        code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
        if "transforms" in getattr(code, "co_names", ()):  # else its dataset asks for each
            calls = {"transforms": both.transform, "target_transform": both.target_transform}
    shown = getattr(dataset, "format", None)
    if isinstance(shown, dict) and shown.get("type") == "custom":  # Hugging Face's
        calls["set_transform"] = shown.get("format_kwargs", {}).get("transform")
    for name, call in getattr(dataset, "__dict__", {}).items():
        if name not in _USUAL_NAMES and callable(call):
            calls[name] = call
    owner = type(dataset).__name__
    yield from ((owner, name, step) for name, call in calls.items() for step in flatten(call))
    parts = getattr(dataset, "datasets", None)
    parts = list(parts.values()) if isinstance(parts, dict) else parts
    each = parts if isinstance(parts, (list, tuple)) else ()
    for part in (getattr(dataset, "dataset", None), *each):
        if part is not None:
            yield from _own_steps(part)
