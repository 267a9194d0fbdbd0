"""The datasets that users make: of image files, and of any other map-style dataset.

``ImageFolder`` lists a folder per class, ``ImageManifest`` paths and labels; ``CachedDataset``
prepares the samples of another dataset once, and refuses what must not be prepared once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastdata.datasets.dataset import PreparedDataset, own_reader
from fastdata.datasets.files import FileOrigin, FileSamples, facts_of_files
from fastdata.datasets.origin import ItemOrigin
from fastdata.datasets.preparing import to_prepare
from fastdata.datasets.reader import LeadingSteps, Stored, Transforms
from fastdata.datasets.samples import DatasetSamples
from fastdata.machine.tables import SampleTable
from fastdata.paths import AnyPath, is_url, local_path
from fastdata.pixels.decode import IMAGE_EXTENSIONS, Loader, load_image
from fastdata.pixels.plan import PairStep, Step
from fastdata.sources.folders import find_classes, scan_folder
from fastdata.sources.items import DatasetSource
from fastdata.sources.manifest import Listed, read_manifest
from fastdata.sources.remote import Place
from fastdata.sources.source import chosen_keys
from fastdata.sources.storage_options import StorageChoice
from fastdata.sources.tars import open_tars
from fastdata.stores.frozen import refuse_random_steps
from fastdata.stores.options import DatasetOptions, Options, read_options, with_options

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class ImageFiles(PreparedDataset):
    """The base of datasets of image files."""

    root: AnyPath
    _fastdata: FileSamples

    @property
    def loader(self) -> Loader:
        """Opens a file, by its path. It may be assigned before a sample is read or prepared."""
        return self._fastdata.origin.loader

    @loader.setter
    def loader(self, loader: Loader) -> None:
        if "_fastdata" in vars(self):  # else ``__init__`` replaces it, as torchvision's does
            self._fastdata.assign_loader(loader)

    def extra_repr(self) -> str:
        return f"Root location: {self.root}"


def file_samples(
    dataset: PreparedDataset,
    origin: FileOrigin,
    listed: Listed,
    options: Options,
    transform: Step | None,
    target_transform: Step | None,
) -> FileSamples:
    """Return the samples of a dataset of image files."""
    facts = None
    if origin.place is not None:
        facts = facts_of_files(listed.paths, origin.place.listed)
        origin.place.listed = {}
    table = SampleTable(
        listed.targets, paths=listed.paths, class_to_idx=listed.class_to_idx, facts=facts
    )
    return FileSamples(
        class_name=type(dataset).__name__,
        own_method=own_reader(dataset),
        origin=origin,
        stored=to_prepare(origin.files(table), options, files=table),
        transforms=Transforms(transform, target_transform),
    )


@with_options
class ImageFolder(ImageFiles):
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
        chosen = read_options(ImageFolder, options)
        folder: AnyPath = local_path(root) if isinstance(root, str) else root
        place = None
        if is_url(root):
            place = Place(root, chosen.storage_options)
            folder = place.url
        self.root = folder
        is_usual = (
            is_valid_file is None
            and self.extensions is IMAGE_EXTENSIONS
            and self.make_dataset is ImageFolder.make_dataset
            and type(self).find_classes is ImageFolder.find_classes
        )
        classes, class_to_idx = self.find_classes(place or folder)
        if classes != list(class_to_idx or ()):
            self.classes = classes
        samples = self.make_dataset(
            place or folder,
            class_to_idx=class_to_idx,
            extensions=self.extensions if is_valid_file is None else None,
            is_valid_file=is_valid_file,
            allow_empty=allow_empty,
        )
        paths = [path for path, _ in samples]
        targets = [target for _, target in samples]
        origin = FileOrigin(
            loader=loader or load_image,
            root=folder,
            place=place,
            list_name="" if is_usual else None,
        )
        listed = Listed(paths, targets, class_to_idx)
        self._fastdata = file_samples(self, origin, listed, chosen, transform, target_transform)

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
class ImageManifest(ImageFiles):
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
    texts is a tuple. Blanks at the ends of paths, names and ids are part of them.

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
        chosen = read_options(ImageManifest, options)
        is_path = isinstance(manifest, str | os.PathLike)
        beside = os.path.dirname(os.fsdecode(manifest)) if is_path else ""
        listed = read_manifest(manifest, root, file, label, id, chosen.storage_options)
        # The first is enough: most files are in one place.
        url = next((path for path in listed.paths if "://" in path), "")
        place = None
        if is_url(url):
            folder = next(filter(is_url, (root or "", beside)), os.path.dirname(url))
            place = Place(folder, chosen.storage_options)
            self.root = place.url
        else:
            self.root = Place(beside).url if root is None else os.fspath(root)
        list_name = None
        if is_path:
            is_beside = Place(beside).url == Place(self.root).url
            list_name = os.path.basename(manifest) if is_beside else Place(manifest).url
        origin = FileOrigin(
            loader=loader or load_image, root=self.root, place=place, list_name=list_name
        )
        self._fastdata = file_samples(self, origin, listed, chosen, transform, target_transform)


# Any map-style dataset


@with_options
class CachedDataset(PreparedDataset):
    """Any map-style dataset of (sample, target) or of dicts, prepared once and kept.

    Args:
        dataset: has ``__len__`` and ``__getitem__`` giving (PIL image | tensor | array, target).
            Each item is read once, in forked worker processes, so that what it draws at random
            would stay the same: a dataset that draws is refused, see ``frozen``. The sample may be
            a tuple of these, and the target an image or array too, such as a mask: all of them are
            stored. Of an item of three or more values the first is the sample; an image or tensor
            alone has no target. Of an item that is a dict the one value that is an image is the
            sample, and the target that of the other key, or a dict of several; items and batches
            are dicts of the same keys then. Namedtuples stay of their class, where it can be found
            by its module and name. Or the path or URL of WebDataset's tars, a pattern such as
            ``"train-{000..009}.tar"``, or a list of these. For other formats see
            docs/other-datasets.md.
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
        frozen: accept a dataset that draws at random when it is read, and keep one draw of each
            item for all epochs. Default: such a dataset is a ValueError. To find out, a few items
            are read several times; with a ``cache_key`` it is only a warning.
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
        source = DatasetSource(dataset, chosen_columns)
        if chosen.storage != "none" and not frozen:
            refuse_random_steps(dataset)
        self._fastdata = DatasetSamples(
            class_name=type(self).__name__,
            own_method=own_reader(self),
            origin=ItemOrigin(),
            stored=to_prepare(source, replace(chosen, frozen=frozen), prepare=prepare),
            transforms=chosen_transforms,
        )

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
        from fastdata.stores.find import find_cache, open_cache

        dataset = cls.__new__(cls)
        chosen_transforms = _chosen_transforms(transform, target_transform, transforms)
        home = find_cache(path, storage_options)
        prepared, manifest = open_cache(home, as_tensors=as_tensors, local_cache=local_cache)
        dataset.root = manifest.root
        dataset._fastdata = DatasetSamples(
            class_name=cls.__name__,
            own_method=own_reader(dataset),
            origin=ItemOrigin(),
            stored=Stored(
                options=Options(seed=seed, batch_ops=batch_ops),
                prepared=prepared,
                after=LeadingSteps(),
                is_upright="PIL.ImageOps.exif_transpose" in manifest.key["prepare"],
            ),
            transforms=chosen_transforms,
        )
        return dataset


def _chosen_transforms(
    transform: Step | None, target_transform: Step | None, transforms: PairStep | None
) -> Transforms:
    if transforms is not None and (transform is not None or target_transform is not None):
        raise ValueError(
            "transforms= takes sample and target together; give it alone, or transform= and the "
            "like"
        )
    return Transforms(transform, target_transform, transforms)
