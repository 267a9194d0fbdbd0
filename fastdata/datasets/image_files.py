"""The base class of datasets of image files."""

from __future__ import annotations

from fastdata.datasets.dataset import PreparedDataset, is_made, own_method
from fastdata.datasets.files import FileOrigin, FileSamples, stat_of_files
from fastdata.datasets.preparing import to_prepare
from fastdata.datasets.stored import Transforms
from fastdata.machine.tables import SampleTable
from fastdata.paths import AnyPath
from fastdata.pixels.decode import Loader
from fastdata.pixels.plan import Transform
from fastdata.sources.manifest import Listed
from fastdata.stores.options import Options


class ImageFiles(PreparedDataset):
    """The base class of datasets of image files."""

    root: AnyPath
    _fastdata: FileSamples

    @property
    def loader(self) -> Loader:
        """The function that opens a file by its path.

        It may be assigned until a sample is read or prepared.
        """
        return self._fastdata.origin.loader

    @loader.setter
    def loader(self, loader: Loader) -> None:
        if is_made(self):
            self._fastdata.assign_loader(loader)

    def extra_repr(self) -> str:
        return f"Root location: {self.root}"


def file_samples(
    dataset: PreparedDataset,
    origin: FileOrigin,
    listed: Listed,
    options: Options,
    transform: Transform | None,
    target_transform: Transform | None,
) -> FileSamples:
    """Return the samples of a dataset of image files."""
    stat = None
    if origin.place is not None:
        # The listing has the sizes and tags of the files. Later, each would cost a request.
        stat = stat_of_files(listed.paths, origin.place.listed)
        origin.place.listed = {}
    table = SampleTable(
        listed.targets, paths=listed.paths, class_to_idx=listed.class_to_idx, stat=stat
    )
    return FileSamples(
        class_name=type(dataset).__name__,
        own_method=own_method(type(dataset)),
        origin=origin,
        stored=to_prepare(origin.files(table), options, files=table),
        transforms=Transforms(transform, target_transform),
    )
