"""``ImageFolder``: a folder of images per class."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastdata.datasets.files import FileOrigin
from fastdata.datasets.image_files import ImageFiles, file_samples
from fastdata.paths import AnyPath, is_url, local_path
from fastdata.pixels.decode import IMAGE_EXTENSIONS, Loader, load_image
from fastdata.pixels.plan import Transform
from fastdata.sources.folders import find_classes, scan_folder
from fastdata.sources.manifest import Listed
from fastdata.sources.remote import Place
from fastdata.stores.options import DatasetOptions, read_options, with_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@with_options
class ImageFolder(ImageFiles):
    """torchvision's ``ImageFolder``: a folder of images per class, prepared once and stored.

    Args:
        root: folder with one folder per class, or its URL, such as ``s3://bucket/train``; see
            ``storage_options``.
        transform: transform of each image, as for torchvision. Its first known steps that are not
            random run once per image, before it is stored; see ``print(dataset.plan)``.
        target_transform: function that is called on each class number when it is read.
        loader: function that opens a file by its path. Default: one that returns the same pixels as
            torchvision's. The ``decode_image`` of torchvision and torchcodec are fast too, see
            docs/differences.md.
        is_valid_file: function that returns True for the path of an image file. Default: files are
            chosen by their extension.
        allow_empty: True to accept class folders without images.
        options: see ``DatasetOptions``.

    Attributes:
        classes: sorted class names.
        class_to_idx: number of each class, by its name.
        samples: view, like a list, of (path, class number); ``imgs`` is the same. You may assign
            other samples until one is read or prepared.
        targets: view, like a list, of the class numbers. You may assign others, as for ``samples``.
        skipped: with ``on_error="skip"``, the errors of the images that were left out.

    Raises:
        FileNotFoundError: there is no class folder, or one has no images, as in torchvision.
        SampleError: an image cannot be read; raised here, or by its first read.
        Exception: the other errors of ``CachedDataset``.

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
        transform: Transform | None = None,
        target_transform: Transform | None = None,
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
        # The user's code may list other files of the same folder. Then they get their own cache.
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
        """Return (path, class number) of every sample; override it to list other files.

        Raises:
            ValueError: ``class_to_idx`` is empty or None, or ``extensions`` and ``is_valid_file``
                are both given or both missing.
            FileNotFoundError: a class has no valid file.
        """
        if class_to_idx is None:
            raise ValueError("The class_to_idx parameter cannot be None.")
        return scan_folder(directory, class_to_idx, extensions, is_valid_file, allow_empty)

    def find_classes(self, directory: AnyPath) -> tuple[list[str], dict[str, int]]:
        """Return class names and their numbers; override it to choose which folders are classes.

        Raises:
            FileNotFoundError: the folder does not contain a folder.
        """
        return find_classes(directory)
