"""Datasets of image files: a folder per class, or a CSV file of paths and labels."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from fastdata import core
from fastdata.cache import Listing, describe_call, list_folder, list_paths
from fastdata.dataset import PreparedDataset
from fastdata.decode import (
    IMAGE_EXTENSIONS,
    Bound,
    FastLoader,
    Interpolation,
    PixelLoader,
    Resize,
    decoder_of,
    load_image,
    to_image,
)
from fastdata.ingest import OnError
from fastdata.options import Options
from fastdata.preparation import Road, Steps
from fastdata.sources import FileSource, Source, find_classes, read_manifest, scan_folder
from fastdata.spec import SampleSpec
from fastdata.table import SampleTable
from fastdata.transforms import plan_transform, read_center_crop, read_resize, shape_after
from fastdata.transforms.cpu import Program

__all__ = ["ImageFolder", "ImageManifest"]


_FAST_ALONE = "fast_decode=True speeds up fastdata's own loader and cannot be combined with loader="


class _ImageFiles(PreparedDataset):
    """What datasets of image files have in common."""

    root: str | os.PathLike[str]
    _table: SampleTable

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if any(base.__name__ == "VisionDatasetTVTensorWrapper" for base in cls.__bases__):
            # torchvision's wrap_dataset_for_transforms_v2, which leaves image classification as it is
            cls.__new__ = _unwrapped  # type: ignore[method-assign, assignment]

    def _build_files(
        self,
        table: SampleTable,
        loader: Callable[[str], Any] | None,
        options: Options,
        transform: Callable[[Any], Any] | None,
        target_transform: Callable[[Any], Any] | None,
        listing: Listing | None = None,
    ) -> None:
        if loader is not None and options.fast_decode:
            raise ValueError(_FAST_ALONE)
        self._loader = loader or load_image
        self._table, root = table, os.fspath(self.root)
        if listing is None and options.cache_dir is not None:
            listing = list_paths(table.paths, root)
        self._build(self._origin(), options, transform, target_transform, table=table, listing=listing, root=root)

    @property
    def loader(self) -> Callable[[str], Any]:
        """What opens a file. It may be replaced where nothing is kept."""
        return self._loader

    @loader.setter
    def loader(self, loader: Callable[[str], Any]) -> None:
        if self._contents is not None:
            raise ValueError(
                "samples are kept as the loader that the dataset was made with opens them, and another one would not "
                "be asked for them. Make a new dataset with loader=, or one with storage='none'."
            )
        if self._options.fast_decode:
            raise ValueError(_FAST_ALONE)
        self._loader = loader
        self._source = self._origin()
        self._compile()

    def _source_text(self, source: Source) -> str:
        text = describe_call(self._loader, self._options.cache_key)
        return f"{text}, fast_decode" if self._options.fast_decode else text

    def _origin(self) -> FileSource:
        return FileSource(self._table.paths, self._table.targets, self._loader)

    def _trial_road(self) -> Road:
        return self._road(self._origin(), (*self._first_steps, *self._plan.prepare))

    def _road(self, source: Source, steps: tuple[Callable[[Any], Any], ...], *, stores: bool = True) -> Road:
        assert isinstance(source, FileSource)
        loader: Callable[[str], Any] = source.loader
        open_bytes, shape = decoder_of(loader), None
        if open_bytes is not None:
            shape = shape_after(steps)
        if self._options.fast_decode:
            loader, steps = _fast_loader(steps)
            open_bytes = loader.decode
        elif stores and open_bytes is not None:
            plan = plan_transform(steps, channels=3, prepared=0)
            if plan.kind == "pil" and not plan.per_sample and core.obstacle() is None:
                spec = SampleSpec(shape=None, dtype="uint8", form="pil")
                loader, steps = PixelLoader(Program(plan.batch_ops, spec).prepare), ()
                open_bytes = loader.decode
        source = FileSource(source.paths, source.targets, loader)
        return Road(source=source, prepare=Steps(steps), open_bytes=open_bytes, shape=shape)

    @property
    def _decodes_itself(self) -> bool:
        return decoder_of(self.loader) is not None and not self._options.fast_decode

    def _extra_repr(self) -> list[str]:
        return [f"Root location: {self.root}"]


def _unwrapped(cls: type, dataset: _ImageFiles, target_keys: Any = None) -> _ImageFiles:
    """Give the dataset itself in place of what ``wrap_dataset_for_transforms_v2`` makes of it.

    Raises:
        ValueError: as torchvision's, for datasets whose targets have no keys.
    """
    if target_keys is not None:
        raise ValueError(f"target_keys={target_keys!r} is for targets that are dicts, not {type(dataset).__name__}'s")
    return dataset


def _fast_loader(steps: tuple[Callable[[Any], Any], ...]) -> tuple[FastLoader, tuple[Callable[[Any], Any], ...]]:
    """Fold the leading resize, and the centre crop after it, into the loader; return the steps that are left."""
    first, *rest = steps or (None,)
    resize: tuple[Bound, Interpolation] | None = (
        (first.size, "bilinear") if isinstance(first, Resize) else read_resize(first)
    )
    if resize is None or isinstance(resize[0], str):
        raise ValueError(
            "fast_decode=True needs to know the size that images are resized to: begin the transform with a bilinear "
            "or bicubic Resize, or give resize=."
        )
    crop = read_center_crop(rest[0]) if rest else None
    if crop is not None:
        rest = rest[1:]
    return FastLoader(resize[0], resize[1], crop), (to_image, *rest) if rest else ()


class ImageFolder(_ImageFiles):
    """torchvision's ``ImageFolder``: one folder of images per class, prepared once and kept in shared memory.

    Args:
        root: holds one folder per class.
        transform: as torchvision's. Its leading deterministic steps run once per image, before it is stored; see
            ``print(dataset.plan)``.
        target_transform: called on each class number when it is read.
        loader: opens one path; default: as torchvision's own, the same pixels.
        is_valid_file: tells image files from others; default: by extension.
        allow_empty: accept class folders without images.
        storage: see ``CachedDataset``, like every argument from here to ``num_workers``.
        codec: see there.
        resize: see there.
        fill: see there.
        memory_limit: see there.
        progress: see there.
        seed: see there.
        batch_ops: see there.
        on_error: see there.
        fast_decode: prepare about twice as fast with slightly different pixels: JPEGs much larger than the size they
            are resized to are decoded at a fraction of their size, and torch's kernel resizes. See
            ``fastdata.decode.load_resized`` for how far they differ.
        num_workers: see there.
        cache_dir: see there. The listing of the folder is kept as well, and holds while no directory's time changes.
        cache_key: see there; it also stands for a ``loader`` that is a lambda.

    Attributes:
        classes: sorted class names.
        class_to_idx: class name -> class number.
        samples: list-like of (path, class number); ``imgs`` is the same.
        targets: list-like of class numbers.
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
        ...     dataset = ImageFolder(root, progress=False)
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
        *,
        storage: Literal["auto", "device", "shared", "compressed", "disk", "none"] = "auto",
        codec: Any = "auto",
        resize: Bound | None = None,
        fill: Literal["auto", "eager", "lazy"] = "auto",
        memory_limit: int | float | str | None = None,
        progress: bool = True,
        seed: int | None = None,
        batch_ops: Literal["auto", "off"] = "auto",
        on_error: OnError = "raise",
        fast_decode: bool = False,
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
            fast_decode=fast_decode,
            num_workers=num_workers,
            cache_dir=cache_dir,
            cache_key=cache_key,
        )
        self.root = os.path.expanduser(root) if isinstance(root, str) else root
        _, class_to_idx = self.find_classes(self.root)
        listing = None
        if cache_dir is not None and is_valid_file is None and self.make_dataset is ImageFolder.make_dataset:
            listing = list_folder(os.fspath(self.root), class_to_idx, self.extensions, allow_empty, cache_dir)
            assert listing.targets is not None
            table = SampleTable(listing.targets, paths=listing.paths, class_to_idx=class_to_idx)
        else:
            extensions = None if is_valid_file is not None else self.extensions
            samples = self.make_dataset(
                self.root,
                class_to_idx=class_to_idx,
                extensions=extensions,
                is_valid_file=is_valid_file,
                allow_empty=allow_empty,
            )
            paths, targets = [path for path, _ in samples], [target for _, target in samples]
            table = SampleTable(targets, paths=paths, class_to_idx=class_to_idx)
        self._build_files(table, loader, options, transform, target_transform, listing)

    @staticmethod
    def make_dataset(
        directory: str | os.PathLike[str],
        class_to_idx: dict[str, int],
        extensions: str | tuple[str, ...] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> list[tuple[str, int]]:
        """(path, class number) of every sample; override it to list them yourself. As torchvision's.

        Raises:
            ValueError: ``class_to_idx`` is empty or None, or both or none of ``extensions`` and ``is_valid_file`` are
                given.
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


class ImageManifest(_ImageFiles):
    r"""Image files listed in a CSV file with a header line.

    Args:
        csv_path: comma-separated UTF-8.
        root: folder that relative paths start from; default: the CSV file's own.
        file: name of the column of paths.
        label: name of the column of labels: whole numbers, taken as they are, or names, numbered in sorted order.
        transform: see ``ImageFolder``, like every argument from here on.
        target_transform: see there.
        loader: see there.
        storage: see there.
        codec: see there.
        resize: see there.
        fill: see there.
        memory_limit: see there.
        progress: see there.
        seed: see there.
        batch_ops: see there.
        on_error: see there.
        fast_decode: see there.
        num_workers: see there.
        cache_dir: see there.
        cache_key: see there.

    Raises:
        ValueError: the CSV file is malformed; names line and column.
        SampleError: an image cannot be read.
        MemoryBudgetError: ``storage="shared"`` does not fit.

    Example:
        >>> import pathlib, tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as root:
        ...     Image.new("RGB", (6, 5)).save(f"{root}/a.png")
        ...     _ = pathlib.Path(root, "train.csv").write_text("file,label\na.png,cat\n")
        ...     dataset = ImageManifest(f"{root}/train.csv", progress=False)
        >>> dataset.classes, len(dataset)
        (['cat'], 1)
    """

    def __init__(
        self,
        csv_path: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        file: str = "file",
        label: str = "label",
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        loader: Callable[[str], Any] | None = None,
        storage: Literal["auto", "device", "shared", "compressed", "disk", "none"] = "auto",
        codec: Any = "auto",
        resize: Bound | None = None,
        fill: Literal["auto", "eager", "lazy"] = "auto",
        memory_limit: int | float | str | None = None,
        progress: bool = True,
        seed: int | None = None,
        batch_ops: Literal["auto", "off"] = "auto",
        on_error: OnError = "raise",
        fast_decode: bool = False,
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
            fast_decode=fast_decode,
            num_workers=num_workers,
            cache_dir=cache_dir,
            cache_key=cache_key,
        )
        self.root = os.fspath(root) if root is not None else os.path.dirname(os.path.abspath(csv_path))
        manifest = read_manifest(csv_path, root, file, label)
        classes = None if manifest.classes is None else {name: i for i, name in enumerate(manifest.classes)}
        table = SampleTable(manifest.targets, paths=manifest.paths, class_to_idx=classes)
        self._build_files(table, loader, options, transform, target_transform)
