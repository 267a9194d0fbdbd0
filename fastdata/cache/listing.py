"""Which files there are, how large and of when: what a cache is held against in the next run.

A folder of class folders is listed once; after that only its directories' times are asked, and every file for its size
and time, which the listing does not tell. 1,300,000 files are a matter of seconds and of a few arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from filelock import BaseFileLock, FileLock, Timeout

from fastdata.crew import run_tasks
from fastdata.machine import usable_cores
from fastdata.sources import scan_folder
from fastdata.table import PackedPaths

__all__ = ["Listing", "list_folder", "list_paths"]

Int64s = npt.NDArray[np.int64]

_FILES_PER_TASK = 50_000
_SETTLED_NS = 2_000_000_000
"""A directory that changed less than so long before it was listed may change again within one tick of its clock."""
_SCAN_PREFIX = "scan-"
_NO_FILE = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of a dataset, one for each sample.

    Args:
        paths: relative to the root where they lie below it; the prefix is the root's.
        sizes: bytes of each file; -1 where there is none.
        mtimes_ns: when each file was last written.
        targets: class number of each, where the folder tells it.
    """

    paths: PackedPaths
    sizes: Int64s
    mtimes_ns: Int64s
    targets: Int64s | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def unchanged_in(self, old: Listing) -> Int64s:
        """For each file its index in an older listing, or -1 where it is not there or was written since."""
        if np.array_equal(self.paths.ends, old.paths.ends) and np.array_equal(self.paths.blob, old.paths.blob):
            match = np.arange(len(self))
        else:
            index = {name: i for i, name in enumerate(old.paths.names())}
            match = np.array([index.get(name, -1) for name in self.paths.names()], np.int64)
        if len(old):
            same = (self.sizes == old.sizes[match]) & (self.mtimes_ns == old.mtimes_ns[match]) & (self.sizes >= 0)
        else:
            same = np.zeros(len(self), np.bool_)
        return np.where(same & (match >= 0), match, -1)


def list_folder(
    root: str, class_to_idx: dict[str, int], extensions: Any, allow_empty: bool, cache_dir: str | os.PathLike[str]
) -> Listing:
    """List a folder of class folders as ``scan_folder`` does, from the last listing if no directory has changed since.

    Args:
        root: see ``scan_folder``, like the three after it.
        class_to_idx: see there.
        extensions: see there.
        allow_empty: see there.
        cache_dir: where the listing is kept for the next run, if it can be written.
    """
    prefix = os.path.join(os.path.expanduser(root), "")
    question = json.dumps([os.path.abspath(prefix), sorted(class_to_idx.items()), extensions, allow_empty])
    file = Path(cache_dir, f"{_SCAN_PREFIX}{hashlib.sha256(question.encode()).hexdigest()[:12]}.npz")
    scan = _read_scan(file, prefix)
    if scan is None:
        scan = _scan(prefix, class_to_idx, extensions, allow_empty)
        _write_scan(file, scan)
    else:
        _remove_part(file)
    paths = PackedPaths(scan["paths"], scan["ends"], os.fsencode(prefix))
    sizes, mtimes_ns = _ask_files(paths)
    return Listing(paths=paths, sizes=sizes, mtimes_ns=mtimes_ns, targets=scan["targets"])


def list_paths(paths: Sequence[str], root: str) -> Listing:
    """Ask for size and time of files given by path; those below ``root`` are listed relative to it."""
    prefix = os.path.join(os.path.expanduser(root), "") if root else ""
    full = PackedPaths.of(paths)
    sizes, mtimes_ns = _ask_files(full)
    relative = PackedPaths.of([path.removeprefix(prefix) for path in paths])
    return Listing(paths=relative, sizes=sizes, mtimes_ns=mtimes_ns)


def _scan(prefix: str, class_to_idx: dict[str, int], extensions: Any, allow_empty: bool) -> dict[str, np.ndarray]:
    begun_ns = time.time_ns()
    folders: list[str] = []
    samples = scan_folder(prefix, class_to_idx, extensions, None, allow_empty, visited=folders)
    start = len(prefix)
    packed = PackedPaths.of([path[start:] for path, _ in samples])
    listed = PackedPaths.of([folder[start:] for folder in folders])
    times = _times_of(prefix, folders)
    return {
        "paths": packed.blob,
        "ends": packed.ends,
        "targets": np.array([target for _, target in samples], np.int64),
        "folders": listed.blob,
        "folder_ends": listed.ends,
        "folder_mtimes_ns": np.where(times >= begun_ns - _SETTLED_NS, _NO_FILE, times),
    }


def _times_of(prefix: str, folders: list[str]) -> Int64s:
    """When entries were last made or removed in each folder; -2 where there is none."""
    times = []
    for folder in folders:
        try:
            times.append(os.stat(os.path.join(prefix, folder)).st_mtime_ns)
        except OSError:
            times.append(-2)
    return np.array(times, np.int64)


def _read_scan(file: Path, prefix: str) -> dict[str, np.ndarray] | None:
    """The last listing, if every directory is as it was then."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            scan = dict(stored)
        folders = PackedPaths(scan["folders"], scan["folder_ends"]).names()
        is_whole = len(scan["targets"]) == len(scan["ends"]) and _is_packed(scan["paths"], scan["ends"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if not is_whole:
        return None
    times = _times_of(prefix, list(map(os.fsdecode, folders)))
    return scan if np.array_equal(times, scan["folder_mtimes_ns"]) else None


def _is_packed(blob: np.ndarray, ends: np.ndarray) -> bool:
    if blob.dtype != np.uint8 or ends.dtype != np.int64 or blob.ndim != 1 or ends.ndim != 1:
        return False
    return bool(not len(ends) or (ends[0] >= 0 and ends[-1] == len(blob) and (np.diff(ends) >= 0).all()))


def _write_scan(file: Path, scan: dict[str, np.ndarray]) -> None:
    """Keep a listing; a folder that cannot be written only costs the time of the next one."""
    with contextlib.suppress(OSError, Timeout):  # another process writes the same one
        file.parent.mkdir(parents=True, exist_ok=True)
        with _writer_lock(file):
            try:
                with _part_of(file).open("wb") as stream:
                    _write_arrays(stream, scan)
                os.replace(_part_of(file), file)
            finally:
                _part_of(file).unlink(missing_ok=True)


def _remove_part(file: Path) -> None:
    """Remove what a process left that was killed when it wrote a listing."""
    if _part_of(file).exists():
        with contextlib.suppress(OSError, Timeout), _writer_lock(file):
            _part_of(file).unlink(missing_ok=True)


def _part_of(file: Path) -> Path:
    return file.with_suffix(".new")


def _writer_lock(file: Path) -> BaseFileLock:
    return FileLock(file.with_name(f".{file.stem}.lock"), timeout=0)


def _write_arrays(stream: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    """Write an ``.npz`` as ``np.savez`` does, which would pickle what is no plain array."""
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _ask_files(paths: PackedPaths) -> tuple[Int64s, Int64s]:
    """Size and time of every file; in several processes where there are very many."""
    count = len(paths)
    sizes, mtimes_ns = np.full(count, _NO_FILE, np.int64), np.full(count, _NO_FILE, np.int64)
    tasks = [range(i, min(i + _FILES_PER_TASK, count)) for i in range(0, count, _FILES_PER_TASK)]
    with contextlib.closing(run_tasks(_Asking(paths), tasks, usable_cores() if len(tasks) > 4 else 1)) as answers:
        for first, asked in answers:
            sizes[first : first + asked.shape[1]], mtimes_ns[first : first + asked.shape[1]] = asked
    return sizes, mtimes_ns


@dataclass(frozen=True, slots=True)
class _Asking:
    """Asks for size and time of a run of files: (its first, int64 (2, files))."""

    paths: PackedPaths

    def __call__(self, files: range) -> tuple[int, Int64s]:
        ends = self.paths.ends[files.start : files.stop]
        first = int(self.paths.ends[files.start - 1]) if files.start else 0
        blob = self.paths.blob[first : int(ends[-1])].tobytes()
        stops = (ends - first).tolist()
        prefix = self.paths.prefix
        names = [prefix + blob[start:stop] for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
        try:
            asked = [(found.st_size, found.st_mtime_ns) for found in map(os.stat, names)]
        except (OSError, ValueError):
            asked = list(map(_ask, names))
        return files.start, np.array(asked, np.int64).reshape(-1, 2).T


def _ask(name: bytes) -> tuple[int, int]:
    try:
        found = os.stat(name)
    except (OSError, ValueError):  # no such file, or a name that cannot be one
        return _NO_FILE, _NO_FILE
    return found.st_size, found.st_mtime_ns
