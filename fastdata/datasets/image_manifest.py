"""``ImageManifest``: image files listed with their labels in a CSV file, a frame or a list."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastdata.datasets.files import FileOrigin
from fastdata.datasets.image_files import ImageFiles, file_samples
from fastdata.paths import AnyPath, is_url
from fastdata.pixels.decode import Loader, load_image
from fastdata.pixels.plan import Transform
from fastdata.sources.manifest import read_manifest
from fastdata.sources.remote import Place
from fastdata.stores.options import DatasetOptions, read_options, with_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


@with_options
class ImageManifest(ImageFiles):
    r"""Image files listed with their labels in a CSV file, a pandas or Polars frame, or a list.

    Args:
        manifest: path or URL of a CSV file (comma-separated UTF-8, with a header line); a frame; or
            a list of (path, label), of (path, label, id) if ``id`` is given, or of paths if
            ``label=None``. Paths may be URLs.
        root: folder from which relative paths start. Default: the folder of the CSV file; without a
            CSV file the current folder.
        file: name of the column of paths.
        label: name of the column of labels. Names of several columns, or one column of lists, make
            each target a vector. None if there are no labels.
        id: name of a column to return together with the label, such as the key of a submission. It
            may be the column of paths.
        target_transform: function that is called on each target when it is read; with ``id``, on
            the tuple (label, id).
        transform, loader: see ``ImageFolder``.
        options: see ``DatasetOptions``.

    All labels together decide the type of a target, and of a batch of targets:

    * whole numbers: an int; int64 (B,).
    * numbers, at least one with a decimal point: a float; float64 (B,), as ``default_collate``
      makes it. Most losses need ``targets.float()``.
    * names: an int, the name's position in the sorted ``classes``; int64 (B,).
    * several labels: a tensor, int64 if all are whole numbers, else float32; (B, labels).
    * ``label=None``: the id, or without ``id`` the sample's position in the manifest, from 0; int64
      (B,) if it is a number.
    * with ``id`` and ``label``: a tuple (label, id); a list of both.

    Ids are strings as in the CSV file ("007"), or the values of the frame or list. A batch of
    strings is a tuple. Blanks at the ends of paths, names and ids are part of them.

    Raises:
        ValueError: a value or column is missing or malformed. The message names line and column.
        SampleError: an image cannot be read; raised here, or by its first read.
        Exception: the other errors of ``CachedDataset``.

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
        transform: Transform | None = None,
        target_transform: Transform | None = None,
        loader: Loader | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        chosen = read_options(ImageManifest, options)
        is_path = isinstance(manifest, str | os.PathLike)
        csv_folder = os.path.dirname(os.fsdecode(manifest)) if is_path else ""
        listed = read_manifest(manifest, root, file, label, id, chosen.storage_options)
        # The first URL is enough, because most files are in one folder.
        url = next((path for path in listed.paths if ":/" in path and is_url(path)), "")
        place = None
        if url:
            folder = next(filter(is_url, (root or "", csv_folder)), os.path.dirname(url))
            place = Place(folder, chosen.storage_options)
            self.root = place.url
        else:
            self.root = Place(csv_folder).url if root is None else os.fspath(root)
        list_name = None
        if is_path:
            is_in_root = Place(csv_folder).url == Place(self.root).url
            list_name = os.path.basename(manifest) if is_in_root else Place(manifest).url
        origin = FileOrigin(
            loader=loader or load_image, root=self.root, place=place, list_name=list_name
        )
        self._fastdata = file_samples(self, origin, listed, chosen, transform, target_transform)
