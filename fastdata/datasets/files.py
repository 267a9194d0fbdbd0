"""The state of datasets of image files, whose list and loader the user may replace."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastdata.datasets.samples import OTHER_LISTS, DatasetSamples
from fastdata.datasets.stored import Stored
from fastdata.machine.tables import SampleTable
from fastdata.paths import AnyPath, refuse_secrets
from fastdata.pixels.decode import Loader
from fastdata.pixels.transform_keys import describe_transforms
from fastdata.sources.files import FileSource
from fastdata.sources.remote import Place
from fastdata.sources.source import Source

if TYPE_CHECKING:
    from fastdata.stores.listing import Described

_UNKNOWN = (-1, -1)
"""Size and tag of a remote file that was not listed."""


def stat_of_files(
    paths: Sequence[str], listed: Mapping[str, tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the size and tag of each remote file.

    Args:
        paths: URL of each file.
        listed: known sizes and tags, by URL.

    Raises:
        ValueError: a URL that the user has added holds a secret.
    """
    for index, path in enumerate(paths):
        if path not in listed:
            refuse_secrets(path, f"sample {index}: ")
    return [listed.get(path, _UNKNOWN) for path in paths]


@dataclass(frozen=True, kw_only=True)
class FileOrigin:
    """The origin of samples that are image files.

    Attributes:
        loader: function that opens a file.
        root: folder of the files.
        place: URL of the folder that contains remote files; None for files of this machine.
        list_name: name of the file that lists the samples. It is "" if a folder is listed, and None
            if the user's code makes the list.
    """

    loader: Loader
    root: AnyPath
    place: Place | None
    list_name: str | None

    @property
    def is_own_list(self) -> bool:
        return self.list_name is None

    def files(self, table: SampleTable) -> FileSource:
        """Return the source of the files that a table lists."""
        return FileSource(table.paths, table.targets, self.loader, self.place, table.stat)

    def source(self, stored: Stored) -> Source:
        # A copy in another process does not have the source, but it has the table.
        return stored.samples if stored.table is None else self.files(stored.table)

    def describe(self, stored: Stored, source: Source) -> Described:
        from fastdata.stores.listing import list_paths

        root = os.fspath(self.root)
        assert isinstance(source, FileSource)
        assert stored.table is not None
        opened = describe_transforms([self.loader], stored.options.cache_key)
        opened = f"{opened}, {self.list_name}" if self.list_name else opened
        return opened, list_paths(stored.table.all_paths(), root, source.listing()), root


class FileSamples(DatasetSamples):
    """The samples of a dataset of image files.

    The list and the loader may be replaced until a sample is read or prepared, as scripts do with
    torchvision's datasets.
    """

    origin: FileOrigin

    def assign_loader(self, loader: Loader) -> None:
        """Open files with another loader."""
        self._refuse_late("loader")
        self._assign_files(replace(self.origin, loader=loader), self.files("loader"))

    def relist(self, name: str, listed: Sequence[Any]) -> None:
        """Replace the files, or the targets of the same files.

        Args:
            name: ``"samples"`` or ``"targets"``.
            listed: (path, target) of each sample, or the target of each sample.

        Raises:
            AttributeError: samples were already read or prepared.
            ValueError: the number of targets is not that of samples, or a URL holds a secret.
        """
        self._refuse_late(name)
        before = self.files(name)
        paths = before.all_paths()
        targets = listed
        if name == "samples":
            paths = [path for path, _ in listed]
            targets = [target for _, target in listed]
        elif len(listed) != len(paths):
            raise ValueError(
                f"{len(listed)} targets were assigned for {len(paths)} samples. To change the "
                "number of samples, assign samples: these are (path, target) pairs."
            )
        stat = None
        if before.stat is not None:
            known = dict(zip(before.all_paths(), before.stat.tolist(), strict=True))
            stat = stat_of_files(paths, known)
        table = SampleTable(targets, paths=paths, class_to_idx=before.class_to_idx, stat=stat)
        self._assign_files(self.origin, table)

    def _refuse_late(self, name: str) -> None:
        """Raise an AttributeError if samples were already read or prepared."""
        self.handle()
        late = f"{name} of this {self.class_name} cannot be assigned any more: samples were already"
        if self.was_read:
            raise AttributeError(
                f"{late} read. Assign it right after the dataset is made. {OTHER_LISTS}"
            )
        if self.stored.filled_share() > 0:
            assert self.stored.after is not None
            steps = self.stored.after.text
            first = f" after {steps}" if steps else ""
            raise AttributeError(
                f"{late} prepared{first}. Make the dataset without transform=, assign {name}, and "
                "then assign dataset.transform. Or use loader= and your own make_dataset(), which "
                f"are called before samples are prepared. {OTHER_LISTS}"
            )

    def _assign_files(self, origin: FileOrigin, table: SampleTable) -> None:
        with self._changing() as before:
            self.origin = origin
            self.stored = replace(
                self.stored,
                source=origin.files(table),
                files=table,
                prepared=replace(self.stored.prepared, kept=None),
            )
            if self.stored.after is None:  # the first read prepares the new samples
                self._compile()
            else:
                self._prepare_again(before)
