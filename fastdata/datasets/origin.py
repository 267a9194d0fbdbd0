"""Where the samples of a dataset come from: their source, and how a cache describes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastdata.datasets.reader import Stored
from fastdata.errors import AnyPath, refuse_secrets
from fastdata.machine.shared import SampleTable
from fastdata.pixels import describe_steps
from fastdata.pixels.describe import describe_dataset, unwrapped
from fastdata.pixels.images import Loader
from fastdata.sources import DatasetSource, FileSource, Source
from fastdata.sources.remote import Place

if TYPE_CHECKING:
    from fastdata.stores.build import Described, Listing


_UNKNOWN = (-1, -1)
"""Size and tag of a remote file that was not listed."""


def facts_of_files(
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


class Origin(Protocol):
    """The origin of samples.

    ``is_own_list`` is True if code of the user's lists the samples, so that other lists of the same
    root need caches of their own.
    """

    @property
    def is_own_list(self) -> bool: ...

    def source(self, stored: Stored) -> Source:
        """Return what samples are read from; the stored samples if nothing else is known."""
        ...

    def describe(self, stored: Stored, source: Source) -> Described:
        """Describe the samples for a cache: text, their files and their folder."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileOrigin:
    """Image files, each opened by ``loader``.

    Attributes:
        loader: opens a file.
        root: folder of the files.
        place: the folder or URL that remote files are below; None for files of this machine.
        list_name: name of the file that lists the samples. Empty if a folder is listed, None if
            code of the user's makes the list.
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
        return FileSource(table.paths, table.targets, self.loader, self.place, table.facts)

    def source(self, stored: Stored) -> Source:
        # Copies in other processes have no source, but they have the table.
        return stored.samples if stored.table is None else self.files(stored.table)

    def describe(self, stored: Stored, source: Source) -> Described:
        from fastdata.stores.build import list_paths

        root = os.fspath(self.root)
        assert isinstance(source, FileSource)
        assert stored.table is not None
        opened = describe_steps([self.loader], stored.options.cache_key)
        opened = f"{opened}, {self.list_name}" if self.list_name else opened
        return opened, list_paths(stored.table.all_paths(), root, source.listing()), root


@dataclass(frozen=True)
class ItemOrigin:
    """Items of any map-style dataset, or a cache that is opened on its own."""

    is_own_list = False

    def source(self, stored: Stored) -> Source:
        source: Source = stored.samples if stored.source is None else stored.source
        return source

    def describe(self, stored: Stored, source: Source) -> Described:
        cache_key = stored.options.cache_key
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


def _list_files(source: Source) -> tuple[Listing | None, str]:
    """Return the files of samples and their folder; no listing if samples are not files."""
    from fastdata.stores.build import list_paths

    paths = list(filter(None, map(source.path, range(len(source)))))
    if not paths or len(paths) < len(source):
        return None, ""
    root = ""
    # Relative and absolute paths together, or several drives, have no common folder.
    with contextlib.suppress(ValueError):
        root = os.path.commonpath({os.path.dirname(path) for path in paths}) or os.curdir
    listing = list_paths(paths, root)
    # Names that are not files, such as the keys of an LMDB, have no size.
    return (None, "") if (listing.facts[0] < 0).all() else (listing, root)
