"""The files that a cache is made from: their names, sizes and times."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastdata.faults import fault_of, with_retries
from fastdata.machine.limits import usable_cores
from fastdata.machine.workers import run_tasks
from fastdata.paths import local_path

_FILES_PER_TASK = 50_000
"""Number of files in a task: few enough to share the work, many enough to be worth a task."""

_CHARACTERS = 16
"""Length of a digest."""


class Listing(NamedTuple):
    """The files that samples are made from, one for each sample.

    Attributes:
        paths: path of each file, relative to the root if the file is below it.
        stats: int64 (2, N): the size of each file in bytes, and its last change in nanoseconds, or
            a tag that changes with its content; -1 for a missing file.
    """

    paths: list[bytes]
    stats: npt.NDArray[np.int64]

    def digest(self, rows: slice, basis: bytes = b"") -> str:
        """Return a digest of some files, and of ``basis``."""
        return short_digest(basis, *self.paths[rows], self.stats[:, rows].tobytes())


Described = tuple[str, Listing | None, str]
"""Description of a dataset for a cache: a text that is equal for equal samples and code that opens
them; the files, if samples are files; and their folder, or ""."""


def list_paths(
    paths: Sequence[str], root: str, stats: npt.NDArray[np.int64] | None = None
) -> Listing:
    """List the files of a dataset.

    Args:
        paths: path of each file.
        root: folder to which paths become relative, or "".
        stats: int64 (2, N) for remote files, see ``Listing``; local files are looked up.
    """
    prefix = os.fsencode(os.path.join(local_path(root), "")) if root else b""
    # A relative root may have absolute paths below it.
    full = os.fsencode(os.path.join(os.path.abspath(local_path(root)), "")) if root else b""
    names = [os.fsencode(path).removeprefix(prefix).removeprefix(full) for path in paths]
    if stats is None:  # in processes, because it takes seconds for 1,300,000 files
        indices = range(len(paths))
        tasks = [indices[first : first + _FILES_PER_TASK] for first in indices[::_FILES_PER_TASK]]
        workers = usable_cores() if len(tasks) > 4 else 0
        # A task has no paths: they would be copied to its process, and be shown in its errors.
        with closing(run_tasks(partial(_stat_files, paths), tasks, workers)) as found:
            stats = np.concatenate([np.zeros((0, 2), np.int64), *found]).T
    return Listing(names, stats)


def _stat_files(paths: Sequence[str], indices: range) -> npt.NDArray[np.int64]:
    """Return the sizes and times of some files, int64 (N, 2); -1 for one that does not exist."""
    stats = np.full((len(indices), 2), -1, np.int64)
    for row, index in enumerate(indices):
        try:
            found = with_retries(os.stat, paths[index])
        except (OSError, ValueError) as problem:  # no such file, or not the name of a file
            if fault_of(problem) == "machine":  # the file may exist, and its shard may be valid
                raise
        else:
            stats[row] = found.st_size, found.st_mtime_ns
    return stats


def short_digest(*parts: bytes) -> str:
    """Return the first 64 bits of the SHA-256 of several parts, as hexadecimal digits.

    Only the last part may hold a zero byte, because that separates the parts. 64 bits are enough:
    two names are equal by chance with probability 2**-64, and a deliberate collision gains nothing.
    """
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:_CHARACTERS]
