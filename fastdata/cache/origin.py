"""The files that a cache is made from: their names, sizes and times."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fastdata.memory import usable_cores
from fastdata.shared import PackedPaths
from fastdata.workers import run_tasks

Int64s = npt.NDArray[np.int64]
Listing = Mapping[str, np.ndarray]

_NAME_CHARACTERS = 12
_FILES_PER_TASK = 50_000
_NO_FILE = -1


def list_paths(paths: Sequence[str], root: str) -> Listing:
    """The files of a dataset, one for each sample: their names, sizes and times.

    ``paths``, uint8, has the names end to end, relative to the root where they lie below it, and ``ends``, int64 (N,),
    where each ends; ``file_sizes`` and ``mtimes_ns``, int64 (N,), are -1 where there is no file.
    """
    prefix = os.path.join(os.path.expanduser(root), "") if root else ""
    sizes, mtimes_ns = _ask_files(paths)
    packed = PackedPaths.of([os.fspath(path).removeprefix(prefix) for path in paths])
    return {"paths": packed.blob, "ends": packed.ends, "file_sizes": sizes, "mtimes_ns": mtimes_ns}


def unchanged(new: Listing, old: Listing) -> Int64s:
    """For each file its index in an older listing, or -1 where it is not there or was written since."""
    if np.array_equal(new["ends"], old["ends"]) and np.array_equal(new["paths"], old["paths"]):
        match = np.arange(len(new["ends"]))
    else:
        index = {name: i for i, name in enumerate(PackedPaths(old["paths"], old["ends"]).names())}
        names = PackedPaths(new["paths"], new["ends"]).names()
        match = np.array([index.get(name, -1) for name in names], np.int64)
    if not len(old["ends"]):
        return match
    same = (match >= 0) & (new["file_sizes"] >= 0)
    for name in ("file_sizes", "mtimes_ns"):
        same &= new[name] == old[name][match]
    return np.where(same, match, -1)


def _ask_files(paths: Sequence[str]) -> Int64s:
    """Size and time of each file, int64 (2, files); 1,300,000 are a matter of seconds."""
    count = len(paths)
    asked = np.full((2, count), _NO_FILE, np.int64)
    tasks = [range(i, min(i + _FILES_PER_TASK, count)) for i in range(0, count, _FILES_PER_TASK)]

    def ask(files: range) -> tuple[range, Int64s]:
        return files, np.array([_ask(paths[i]) for i in files], np.int64).T

    with contextlib.closing(run_tasks(ask, tasks, usable_cores() if len(tasks) > 4 else 1)) as answers:
        for files, answer in answers:
            asked[:, files.start : files.stop] = answer
    return asked


def _ask(name: str) -> tuple[int, int]:
    try:
        found = os.stat(name)
    except (OSError, ValueError):  # no such file, or a name that cannot be one
        return _NO_FILE, _NO_FILE
    return found.st_size, found.st_mtime_ns


def hash_key(key: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_NAME_CHARACTERS]
