"""Looking over caches: what is there, whether it is sound, and what can go."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import Timeout

from fastdata.cache.folders import PARTIAL, REPLACED, locked, remove_strays, strays_in
from fastdata.cache.manifest import MANIFEST, Manifest
from fastdata.cache.opening import map_shards, read_columns
from fastdata.cache.recall import read_listing, read_rows
from fastdata.cache.targets import read_classes, read_targets
from fastdata.errors import CacheError
from fastdata.memory import format_bytes
from fastdata.stores.disk import DAMAGE_PREFIX, checksum

__all__ = ["Found", "Removal", "cache_folders", "inspect_caches", "prune_caches", "verify_cache"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A cache, or what is left of one.

    Args:
        folder: where it is.
        manifest: what it holds; None if that cannot be read.
        problem: why it cannot be used, in one line; empty if nothing is known against it.
    """

    folder: Path
    manifest: Manifest | None
    problem: str = ""

    @property
    def garbage_rows(self) -> int:
        """Rows of all parts that no sample uses any more."""
        if self.manifest is None:
            return 0
        rows = read_rows(self.folder, self.manifest)
        return sum(part.rows for part in self.manifest.parts) - int((rows >= 0).sum())

    def __str__(self) -> str:
        if self.manifest is None:
            return f"{self.folder}\n  cannot be read: {self.problem}; the next run writes it anew"
        manifest = self.manifest
        classes = read_classes(self.folder, manifest)
        lines = [
            str(self.folder),
            f"  samples    {manifest.count - len(manifest.skipped):,}, {len(manifest.skipped):,} left out",
            *([] if classes is None else [f"  classes    {len(classes):,}"]),
            f"  size       {format_bytes(manifest.size_bytes)}, {self.garbage_rows:,} rows not in use",
            f"  made from  {manifest.root or '(a dataset)'}",
            f"  opened by  {manifest.key.get('source', '')}",
            f"  prepared   {manifest.key.get('prepare') or '-'}",
        ]
        for part in manifest.parts:
            shape = "x".join(map(str, part.spec.shape)) if part.spec.shape is not None else "of many shapes"
            codec = "raw" if part.codec is None else " ".join(f"{name}={value}" for name, value in part.codec.items())
            shards = _count(len(part.shards), "shard")
            lines.append(f"  {part.name:<9}  {part.spec.dtype} {shape}, {codec}, {shards}")
        return "\n".join([*lines, f"  problem    {self.problem}"] if self.problem else lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """Something that was removed, or would be."""

    path: Path
    reason: str
    size_bytes: int


def inspect_caches(folder: Path) -> list[Found]:
    """Read the manifests of a cache, or of all caches in a ``cache_dir``.

    Raises:
        FileNotFoundError: there is none.
    """
    return [_look(path) for path in cache_folders(folder)]


def cache_folders(folder: Path) -> list[Path]:
    """The folder of a cache, or of all caches in a ``cache_dir``.

    Raises:
        FileNotFoundError: there is none.
    """
    folders = [folder] if (folder / MANIFEST).exists() else sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if not folders:
        raise FileNotFoundError(f"{folder} is no cache and holds none: there is no {MANIFEST} in it or one below it")
    return folders


def _look(folder: Path) -> Found:
    try:
        manifest = Manifest.read(folder)
        for part in manifest.parts:
            read_columns(folder, part)
            map_shards(folder, part).close()
        rows = read_rows(folder, manifest)
        if "paths" in manifest.arrays:
            read_listing(folder, manifest)
        if manifest.target_kind is not None:
            read_targets(folder, manifest, int((rows[0] >= 0).sum()))
        read_classes(folder, manifest)
    except (CacheError, FileNotFoundError, KeyError) as problem:
        return Found(folder=folder, manifest=None, problem=str(problem))
    marks = len(list(folder.glob(f"{DAMAGE_PREFIX}*")))
    damage = f"damaged: {_count(marks, 'row')}, which the next run prepares anew" if marks else ""
    return Found(folder=folder, manifest=manifest, problem=damage)


def verify_cache(found: Found) -> list[str]:
    """Read every sample of a cache and hold it against its checksum; a line for each that is damaged.

    They are marked, so that the next run prepares them anew.
    """
    manifest, folder = found.manifest, found.folder
    if manifest is None:
        return [found.problem]
    damaged: list[str] = []
    for part, rows in zip(manifest.parts, read_rows(folder, manifest), strict=True):
        columns, _ = read_columns(folder, part)
        with contextlib.closing(map_shards(folder, part)) as shards:
            for index in np.argsort(rows, kind="stable").tolist():
                row = int(rows[index])
                if row < 0:
                    continue
                start, size = int(columns["offsets"][row]), int(columns["sizes"][row])
                data = shards.shards[int(columns["shards"][row])][start : start + size]
                if checksum(data) != int(columns["sums"][row]):
                    cure = _mark(folder / f"{DAMAGE_PREFIX}{part.name}-{row}")
                    damaged.append(f"{folder}: sample {index}, {part.name}, row {row} is damaged; {cure}")
    return damaged


def _mark(mark: Path) -> str:
    """Mark a damaged row; what comes of it."""
    try:
        mark.touch()
    except OSError as problem:
        return f"that cannot be noted ({problem.strerror}): verify it where the cache can be written"
    return "the next run prepares it anew"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def prune_caches(cache_dir: Path, *, gone: bool = False, dry_run: bool = False) -> list[Removal]:
    """Remove what no run can use any more; what another process is writing is left alone.

    That is: what writers left that died, and caches that cannot be read.

    Args:
        cache_dir: holds caches.
        gone: also caches of folders that are not there now, which can only be opened on their own.
        dry_run: only say what would go.

    Raises:
        CacheError: the folder cannot be written.
    """
    removals: list[Removal] = []
    for folder in sorted(path for path in cache_dir.iterdir() if path.is_dir()):
        home = folder.with_name(folder.name.removesuffix(PARTIAL).removesuffix(REPLACED))
        if folder == home and not (folder / MANIFEST).exists():
            continue
        removals += _prune_alone(folder, home, gone=gone, dry_run=dry_run)
    removals += _prune_scans(cache_dir, dry_run=dry_run)
    return removals


def _prune_alone(folder: Path, home: Path, *, gone: bool, dry_run: bool) -> list[Removal]:
    """Prune one folder if nobody is writing it.

    Raises:
        CacheError: it cannot be written.
    """
    try:
        with locked(home, wait=False):
            return _prune_one(folder, is_leftover=folder != home, gone=gone, dry_run=dry_run)
    except Timeout:
        return []
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        if dry_run:  # without a lock, which cannot be made there
            return _prune_one(folder, is_leftover=folder != home, gone=gone, dry_run=True)
        raise CacheError(
            f"{folder} cannot be removed or changed ({problem.strerror}). Prune it where, and as who, it can be."
        ) from problem


def _prune_one(folder: Path, *, is_leftover: bool, gone: bool, dry_run: bool) -> list[Removal]:
    found = _look(folder)
    reason = ""
    if is_leftover:
        reason = "left by a writer that died"
    elif found.manifest is None:
        reason = f"cannot be read: {found.problem}"
    elif gone and found.manifest.root and not os.path.isdir(found.manifest.root):
        reason = f"{found.manifest.root} is not there"
    if reason:
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if not dry_run:
            shutil.rmtree(folder)
        return [Removal(path=folder, reason=reason, size_bytes=size_bytes)]
    assert found.manifest is not None
    strays = strays_in(folder, found.manifest)
    size_bytes = sum(path.stat().st_size for path in strays)
    if strays and not dry_run:
        remove_strays(folder, found.manifest)
    reason = f"{_count(len(strays), 'file')} left by a writer that died"
    return [Removal(path=folder, reason=reason, size_bytes=size_bytes)] if strays else []


def _prune_scans(cache_dir: Path, *, dry_run: bool) -> list[Removal]:
    removals = []
    for path in sorted(cache_dir.glob("scan-*.new")):
        removals.append(Removal(path=path, reason="left by a writer that died", size_bytes=path.stat().st_size))
        if not dry_run:
            path.unlink(missing_ok=True)
    return removals
