"""Datasets of image files: a folder per class, or a list of paths and labels."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastdata.datasets.dataset import PreparedDataset
from fastdata.errors import is_url
from fastdata.machine.shared import ArrayBlock, SampleTable
from fastdata.pixels import describe_steps
from fastdata.pixels.images import IMAGE_EXTENSIONS, load_image
from fastdata.sources import (
    FileSource,
    Source,
    find_classes,
    read_manifest,
    scan_folder,
)
from fastdata.sources.remote import Place
from fastdata.stores.options import DatasetOptions, Options, read_options, with_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fastdata.stores.build import Listing


class _ImageFiles(PreparedDataset):
    """What datasets of image files have in common."""

    root: str | os.PathLike[str]
    _place: Place | None = None
    """That remote files lie below; and ``_facts`` of them."""
    _facts: ArrayBlock | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if any(base.__name__ == "VisionDatasetTVTensorWrapper" for base in cls.__bases__):
            # torchvision's wrap_dataset_for_transforms_v2, which leaves image classification as it
            # is
            cls.__new__ = _unwrapped  # type: ignore[method-assign, assignment]

    def _build_files(
        self,
        paths: list[str],
        targets: Sequence[Any],
        class_to_idx: dict[str, int] | None,
        loader: Callable[[str], Any] | None,
        options: Options,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
    ) -> None:
        self._loader = loader or load_image
        table = SampleTable(targets, paths=paths, class_to_idx=class_to_idx)
        if self._place is not None:
            listed = self._place.listed
            names = [self._place.locate(path)[1] for path in paths]
            known = [listed[name][1:] if name in listed else (-1, -1) for name in names]
            sizes, tags = np.array(known, np.int64).reshape(-1, 2).T
            self._facts = ArrayBlock({"sizes": sizes, "tags": tags})
            self._place.listed = {}
        self._build(self._files_of(table), options, transform, target_transform, table=table)

    def _list_files(self, source: Source) -> tuple[Listing | None, str]:
        from fastdata.stores.build import list_paths

        root, table = os.fspath(self.root), self._stored.table
        assert isinstance(source, FileSource)
        assert table is not None
        return list_paths(table.all_paths(), root, source.listing()), root

    def _describe_source(self, source: Source, listing: Listing | None) -> str:
        opened = describe_steps([self._loader], self._stored.options.cache_key)
        return f"{opened}, {self._list_name}" if self._list_name else opened

    def _files_of(self, table: SampleTable) -> FileSource:
        return FileSource(table.paths, table.targets, self._loader, self._place, self._facts)

    def _origin(self) -> Source:
        """The files, which copies in other processes know too."""
        table = self._stored.table
        return self._stored.samples if table is None else self._files_of(table)

    def _narrow(self, index: Sequence[int]) -> Source:
        table = self._files("samples")
        self._list(list(map(table.path, index)), list(map(table.target, index)))
        return self._origin()

    def _relist(self, name: str, listed: Sequence[Any]) -> None:
        self._handle()
        if self._was_read or self.filled_share() > 0 or len(self._views) > 1:
            super()._relist(name, listed)
        paths = self._files(name).all_paths()
        if name == "samples":
            self._list([path for path, _ in listed], [target for _, target in listed])
        elif len(listed) == len(paths):
            self._list(paths, listed)
        else:
            raise ValueError(
                f"{len(listed)} targets for {len(paths)} samples. For fewer samples assign "
                "samples, which bring their targets."
            )
        if self._stored.after is None:
            self._serve(self._stored)
        else:
            self._prepare_again()

    def _list(self, paths: list[str], targets: Sequence[Any]) -> None:
        """Have these files in place of those listed so far, with what is known of them."""
        before = self._files("samples")
        if self._facts is not None:
            rows = {path: row for row, path in enumerate(before.all_paths())}
            index = np.array([rows.get(path, -1) for path in paths], np.int64)
            facts = {name: np.append(column, -1)[index] for name, column in self._facts.items()}
            self._facts = ArrayBlock(facts)
        table = SampleTable(targets, paths=paths, class_to_idx=before.class_to_idx)
        files = self._files_of(table)
        self._stored = replace(self._stored, samples=files, source=files, table=table)

    @property
    def loader(self) -> Callable[[str], Any]:
        """What opens a file. It may be replaced where nothing is kept."""
        return self._loader

    @loader.setter
    def loader(self, loader: Callable[[str], Any]) -> None:
        if self._stored.kept is not None:
            raise ValueError(
                "samples are kept as the loader that the dataset was made with opens them, and "
                "another one would not be asked for them. Make a new dataset with loader=, or one "
                "with storage='none'."
            )
        self._loader = loader
        source = self._origin()
        self._stored = replace(self._stored, samples=source, source=source)
        self._compile()

    def _extra_repr(self) -> list[str]:
        return [f"Root location: {self.root}"]


def _unwrapped(cls: type, dataset: _ImageFiles, target_keys: Any = None) -> _ImageFiles:
    """Give the dataset itself in place of what ``wrap_dataset_for_transforms_v2`` makes of it."""
    if target_keys is not None:
        raise ValueError(
            f"target_keys={target_keys!r} is for targets that are dicts, not "
            f"{type(dataset).__name__}'s"
        )
    return dataset


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
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        loader: Callable[[str], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(ImageFolder, options, self._writing)
        self.root = os.path.expanduser(root) if isinstance(root, str) else root
        if is_url(root):
            self._place = Place(root, chosen.storage_options)
            self.root = self._place.url
        usual, names = vars(ImageFolder), ("extensions", "find_classes", "make_dataset")
        is_usual = all(inspect.getattr_static(self, name) is usual[name] for name in names)
        self._list_name = "" if is_valid_file is None and is_usual else None
        _, class_to_idx = self.find_classes(self._place or self.root)
        samples = self.make_dataset(
            self._place or self.root,
            class_to_idx=class_to_idx,
            extensions=self.extensions if is_valid_file is None else None,
            is_valid_file=is_valid_file,
            allow_empty=allow_empty,
        )
        paths, targets = [path for path, _ in samples], [target for _, target in samples]
        self._build_files(paths, targets, class_to_idx, loader, chosen, transform, target_transform)

    @staticmethod
    def make_dataset(
        directory: str | os.PathLike[str],
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

    def find_classes(self, directory: str | os.PathLike[str]) -> tuple[list[str], dict[str, int]]:
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
        manifest: str | os.PathLike[str] | Any,
        *,
        root: str | os.PathLike[str] | None = None,
        file: str = "file",
        label: str | Sequence[str] | None = "label",
        id: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        loader: Callable[[str], Any] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(ImageManifest, options, self._writing)
        is_path = isinstance(manifest, str | os.PathLike)
        beside = os.path.dirname(os.fsdecode(manifest)) if is_path else ""
        listed = read_manifest(manifest, root, file, label, id, chosen.storage_options)
        # Of one is enough: most lie side by side.
        url = next((path for path in listed.paths if "://" in path), "")
        if url and is_url(url):
            folders = [folder for folder in (root, beside) if folder is not None and is_url(folder)]
            self._place = Place([*folders, os.path.dirname(url)][0], chosen.storage_options)
            self.root = self._place.url
        else:
            self.root = Place(beside).url if root is None else os.fspath(root)
        self._list_name = None
        if is_path:
            is_beside = Place(beside).url == Place(self.root).url
            self._list_name = os.path.basename(manifest) if is_beside else Place(manifest).url
        classes = (
            None if listed.classes is None else {name: i for i, name in enumerate(listed.classes)}
        )
        self._build_files(
            listed.paths,
            listed.targets,
            classes,
            loader,
            chosen,
            transform,
            target_transform,
        )
