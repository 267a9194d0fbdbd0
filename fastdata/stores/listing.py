"""The files that a cache is made from: their names, sizes and times."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdata.errors import fault_of, with_retries
from fastdata.machine.limits import usable_cores
from fastdata.machine.workers import run_tasks
from fastdata.paths import local_path

_FILES_PER_TASK = 50_000
"""Files that a worker looks up at once: few enough to share out, many enough to be worth a task."""

_CHARACTERS = 16
"""Length of a digest."""


class Listing(NamedTuple):
    """The files that samples are made from, one for each.

    Attributes:
        paths: their names, relative to the root if they are below it.
        stats: int64 (2, N), the size of each file and the time of its last change, or a tag that
            stands for its content; -1 where there is no file.
    """

    paths: list[bytes]
    stats: npt.NDArray[np.int64]

    def digest(self, rows: slice, basis: bytes = b"") -> str:
        """Return a digest of some files, and of ``basis``."""
        return short_digest(basis, *self.paths[rows], self.stats[:, rows].tobytes())


Described = tuple[str, Listing | None, str]
"""A dataset for a cache: text that is equal for equal samples; their files and folder, if any."""


def list_paths(
    paths: Sequence[str], root: str, stats: npt.NDArray[np.int64] | None = None
) -> Listing:
    """List the files of a dataset. For remote files ``stats`` are given."""
    prefix = os.fsencode(os.path.join(local_path(root), "")) if root else b""
    # A relative root may have absolute paths below it.
    full = os.fsencode(os.path.join(os.path.abspath(local_path(root)), "")) if root else b""
    names = [os.fsencode(path).removeprefix(prefix).removeprefix(full) for path in paths]
    if stats is None:  # takes seconds for 1,300,000 files
        tasks = [paths[i : i + _FILES_PER_TASK] for i in range(0, len(paths), _FILES_PER_TASK)]
        workers = usable_cores() if len(tasks) > 4 else 0
        with closing(run_tasks(_stat_files, tasks, workers)) as found:
            stats = np.concatenate([np.zeros((0, 2), np.int64), *found]).T
    return Listing(names, stats)


def _stat_files(paths: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return size and time of files, (N, 2); -1 for a file that does not exist."""
    stats = np.full((len(paths), 2), -1, np.int64)
    for row, path in enumerate(paths):
        try:
            found = with_retries(os.stat, path)
        except (OSError, ValueError) as problem:  # no such file, or not the name of a file
            if fault_of(problem) == "machine":  # the file may well exist, and its shard be valid
                raise
        else:
            stats[row] = found.st_size, found.st_mtime_ns
    return stats


def short_digest(*parts: bytes) -> str:
    """Return a short SHA-256 of several parts, of which only the last may hold a zero byte.

    64 bits are enough: names differ by chance with 2**-64, and nobody gains from a collision.
    """
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:_CHARACTERS]
