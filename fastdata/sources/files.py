"""Image files as a source, on this machine or behind a URL.

Lists of paths and targets may have millions of rows in shared memory, so they are read by index and
never copied as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from fastdata.faults import with_retries
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
        paths: path or URL of each sample. Like ``targets`` and ``stat``, it is read by index only.
        targets: target of each sample.
        loader: function that opens a file by its path. For a remote file, a user's own loader gets
            the path of a temporary copy. If it is None, samples are the bytes of the files.
        place: folder of all or most remote files; None for files of this machine. Expected files
            are fetched together, in the background.
        stat: size and tag of each remote file, int64 (N, 2); -1 if unknown. It is an error if a
            file has another size when it is read, because it was changed after it was listed.
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
        # A user's own loader needs a path.
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
        # Most files are in one folder, but a manifest may list others too.
        place, name = self.place.locate(self.paths[index])
        assert self.stat is not None
        size = int(self.stat[index][0])
        return place.submit(name, size_bytes=None if size < 0 else size)

    def columns_of(self, indices: Indices) -> dict[str, Any]:
        """Return fields for a source in another process, which reads only these samples.

        Each list becomes a dict from the index of a sample to its value.
        """
        columns = {"paths": self.paths, "targets": self.targets, "stat": self.stat}
        return {
            name: {index: column[index] for index in indices}
            for name, column in columns.items()
            if column is not None
        }

    def listing(self) -> np.ndarray | None:
        """Return the sizes and tags of remote files, int64 (2, N); None for local files."""
        if self.place is None:
            return None
        stat: np.ndarray = np.array(self.stat).T
        # Paths that a user's own dataset class has added are in no listing.
        unlisted = np.flatnonzero(stat[0] < 0).tolist()
        if unlisted:
            files = map(self.place.locate, chosen(self.paths, unlisted))
            stat[:, unlisted] = np.array(stat_files(files)).T
        return stat


def chosen(column: Sequence[_T], indices: Indices) -> list[_T]:
    """Return the values of a column at these indices."""
    if isinstance(column, ListView):  # takes half the time of single indices
        return column.chosen(indices)
    return [column[index] for index in indices]
