"""The origin of a dataset's samples: their source, and its description for a cache."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

from fastdata.datasets.stored import Stored
from fastdata.sources.identity import describe_dataset, unwrapped
from fastdata.sources.items import DatasetSource
from fastdata.sources.source import Source

if TYPE_CHECKING:
    from fastdata.stores.listing import Described, Listing


class Origin(Protocol):
    """The origin of samples.

    ``is_own_list`` is True if the user's code lists the samples. Then each list of files below the
    same root has its own cache.
    """

    @property
    def is_own_list(self) -> bool: ...

    def source(self, stored: Stored) -> Source:
        """Return the source of the samples, or the stored samples if nothing else is left."""
        ...

    def describe(self, stored: Stored, source: Source) -> Described:
        """Describe the samples for a cache: text, their files and their folder."""
        ...


@dataclass(frozen=True)
class ItemOrigin:
    """The origin of items of any map-style dataset, or of a cache that is opened on its own."""

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
                "with cache_dir= the next run has to find out if the samples of "
                f"{type(inner).__name__} are still the same, but its files are not listed in an "
                "attribute samples. Give cache_key='a name', and change it whenever the data "
                "change."
            )
        described = describe_dataset(source.dataset, cache_key)
        opened = described if source.columns is None else f"{described} {source.columns}"
        return opened, listing, root


def _list_files(source: DatasetSource) -> tuple[Listing | None, str]:
    """Return the files of samples and their folder; no listing if samples are not files."""
    from fastdata.stores.listing import list_paths

    files = list(map(source.paths, range(len(source))))
    if not files or not all(files):
        return None, ""
    paths, *others = zip_longest(*files, fillvalue="")
    root = ""
    # A mixture of relative and absolute paths, or of drives, has no common folder.
    with contextlib.suppress(ValueError):
        root = os.path.commonpath({os.path.dirname(path) for path in paths}) or os.curdir
    listing = list_paths(paths, root)
    # If no name is that of a file, they are something else, such as the keys of an LMDB.
    if (listing.stats[0] < 0).all():
        return None, ""
    # A sample is prepared again also if another of its files changes, such as its mask. A text that
    # is not the name of a file, such as a label, adds nothing.
    for column in others:
        listing.stats[:] += list_paths(column, "").stats.clip(0)
    return listing, root
