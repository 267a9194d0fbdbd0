"""Image files as a source, on this machine or behind a URL.

Lists of paths and targets may have millions of rows in shared memory: they are read by index, never
copied as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from fastdata.errors import with_retries
from fastdata.machine.tables import ListView
from fastdata.paths import read_whole
from fastdata.pixels.decode import Loader
from fastdata.pixels.openings import Opening, opening_of
from fastdata.sources.local_files import fleeting_folder
from fastdata.sources.remote import Place, stat_files
from fastdata.sources.requests import Requests

if TYPE_CHECKING:
    from fastdata.sources.source import Indices, ItemKeys, Pair

_T = TypeVar("_T")


@dataclass(eq=False, repr=False)
class FileSource:
    """One file per sample, on this machine or behind a URL.

    Args:
        paths: path or URL of each sample. Read by index only, as ``targets`` and ``stat`` are.
        targets: target of each sample.
        loader: opens a file by its path. If it is the user's own, it gets the path of a temporary
            copy of a remote file. None: samples are the bytes of the files.
        place: folder of all or most remote files; None for files of this machine. Expected files
            are fetched together, in the background.
        stat: size and tag of each remote file, int64 (N, 2); -1 if unknown. A file that comes in
            another size was changed since it was listed, which is an error.
    """

    paths: Sequence[str]
    targets: Sequence[Any]
    loader: Loader | None
    place: Place | None = None
    stat: np.ndarray | Mapping[int, np.ndarray] | None = None
    requests: Requests = field(default_factory=Requests)
    keys: ClassVar[ItemKeys | None] = None

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def is_remote(self) -> bool:
        return self.place is not None

    @property
    def opening(self) -> Opening | None:
        return opening_of(self.loader)

    def read(self, index: int) -> Pair:
        path = self.paths[index]
        target = self.targets[index]
        if self.loader is not None and not self.is_remote:
            return with_retries(self.loader, path), target
        [data] = self.read_files([index])
        if self.loader is None:
            return np.frombuffer(data, np.uint8), target
        if self.opening is not None:
            return self.opening.decode(data), target
        # A loader of the user's own opens paths only.
        with fleeting_folder() as folder:
            copied = folder / f"sample{os.path.splitext(path)[1]}"
            copied.write_bytes(data)
            return self.loader(str(copied)), target

    def expect(self, indices: Indices) -> None:
        if self.is_remote:
            self.requests.expect(indices, self._submit)

    def path(self, index: int) -> str:
        return self.paths[index]

    def read_files(self, indices: Indices) -> list[bytes]:
        """Return the bytes of these files."""
        if self.is_remote:
            return [self.requests.take(index, self._submit).result() for index in indices]
        return with_retries(read_whole, chosen(self.paths, indices))

    def _submit(self, index: int) -> Future[bytes]:
        assert self.place is not None
        # Most files are below one place; a manifest may list others, too.
        place, name = self.place.locate(self.paths[index])
        assert self.stat is not None
        size = int(self.stat[index][0])
        return place.submit(name, size_bytes=None if size < 0 else size)

    def columns_of(self, indices: Indices) -> dict[str, Any]:
        """Return the fields with these samples only, by index, for another process."""
        # A task of a cluster gets its own samples, and not the list of all of them.
        columns = {"paths": self.paths, "targets": self.targets, "stat": self.stat}
        return {
            name: {index: column[index] for index in indices}
            for name, column in columns.items()
            if column is not None
        }

    def listing(self) -> np.ndarray | None:
        """Return sizes and tags of remote files, int64 (2, N); None for files of this machine."""
        if self.place is None:
            return None
        stat: np.ndarray = np.array(self.stat).T
        # Paths that a dataset of the user's own has added were not seen in any listing.
        unlisted = np.flatnonzero(stat[0] < 0).tolist()
        if unlisted:
            files = map(self.place.locate, chosen(self.paths, unlisted))
            stat[:, unlisted] = np.array(stat_files(files)).T
        return stat


def chosen(column: Sequence[_T], indices: Indices) -> list[_T]:
    """Return the values of these samples."""
    if isinstance(column, ListView):  # takes half the time of single indices
        return column.chosen(indices)
    return [column[index] for index in indices]
