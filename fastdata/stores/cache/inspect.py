"""Caches without the dataset that they were made from: opened alone, looked over, verified, pruned."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout

from fastdata.errors import CacheError, counted, is_url, refuse_remote
from fastdata.machine.memory import format_bytes
from fastdata.machine.shared import PackedPaths, SampleTable
from fastdata.sources.remote import Place
from fastdata.stores.cache.build import damaged_files, lock_file, locked, serve, stored_targets
from fastdata.stores.cache.manifest import (
    MANIFEST,
    Cache,
    Manifest,
    Mirroring,
    orphans_in,
    read_settled,
)
from fastdata.stores.prepare import Prepared
from fastdata.stores.readers import UndecodableError


def find_cache(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Path | Place:
    """The cache that a path or URL means: its own folder, or a ``cache_dir`` that holds only this one.

    Raises:
        FileNotFoundError: there is no cache.
        CacheError: none of the caches there can be read.
        ValueError: there are several; says which.
        RemoteError: the place cannot be reached.
    """
    home = Place(path, storage_options)
    folders = _cache_folders(home)
    if len(folders) == 1:
        return folders[0] if home.is_remote else Path(folders[0].url)
    readable: list[Place] = []
    lines = ""
    for folder in folders:
        try:
            manifest = Manifest.read(folder)
        except CacheError as damaged:
            lines += f"\n  {folder}: cannot be read: {damaged}"
            continue
        readable.append(folder)
        made_from, prepared = (
            manifest.root or "a dataset",
            manifest.key.get("prepare") or "as they are",
        )
        lines += f"\n  {folder}: {counted(manifest.count, 'sample')} of {made_from}, prepared: {prepared}, "
        lines += f"codec: {manifest.key.get('codec')}"
    if len(readable) == 1:
        return readable[0] if home.is_remote else Path(readable[0].url)
    if readable:
        raise ValueError(
            f"{home} holds {len(readable)} caches; give the folder of the one that you mean:{lines}"
        )
    raise CacheError(f"{home} holds no cache that can be read; build it again:{lines}")


def _cache_folders(home: Place) -> list[Place]:
    own, below = home.submit_facts(MANIFEST), list[Place]()
    with contextlib.suppress(FileNotFoundError):
        below = [home.below(name) for name in home.folders()]
    if own.result()[0] >= 0:
        return [home]
    asked = [place.submit_facts(MANIFEST) for place in below]
    folders = [place for place, facts in zip(below, asked, strict=True) if facts.result()[0] >= 0]
    if not folders:
        raise FileNotFoundError(
            f"{home} is no cache and holds none: there is no {MANIFEST} in it or one below it"
        )
    return folders


def open_cache(
    home: Path | Place, *, as_tensors: bool = False, mirroring: Mirroring | None = None
) -> tuple[Prepared, Manifest]:
    """Map a cache and all that it knows of its samples; also gives its manifest. Nobody prepares or writes anything.

    Args:
        home: folder of the cache.
        mirroring: where one behind a URL is mirrored.
        as_tensors: give images as tensors of their stored pixels, not as PIL images.

    Raises:
        CacheError: it is damaged, or cannot be served without its dataset.
    """
    return read_settled(home, partial(_serve_alone, as_tensors=as_tensors), mirroring)


def _serve_alone(cache: Cache, *, as_tensors: bool) -> tuple[Prepared, Manifest]:
    manifest, rows = cache.manifest, cache.columns["rows"]
    kept = np.flatnonzero(cache.columns["is_kept"][rows])
    has_paths = "paths" in cache.columns and not (manifest.target_is_part or manifest.mask_places)
    paths = _paths_of(cache, kept) if has_paths else None
    table = SampleTable(
        stored_targets(cache, rows[kept]), paths=paths, class_to_idx=manifest.classes
    )
    if as_tensors:
        parts = tuple(
            replace(part, spec=replace(part.spec, form="tensor"))
            if part.spec.form == "pil"
            else part
            for part in manifest.parts
        )
        cache = cache._replace(manifest=replace(manifest, parts=parts))
    return serve(cache, rows, (), table), manifest


def _paths_of(cache: Cache, kept: np.ndarray) -> PackedPaths:
    packed = PackedPaths(cache.columns["paths"], cache.columns["ends"])
    root = os.path.join(os.fsencode(cache.manifest.root), b"")
    starts = np.concatenate([[0], packed.ends[:-1]]).astype(np.int64)
    is_absolute = (packed.blob[starts[starts < len(packed.blob)]] == ord(os.sep)).any()
    if len(kept) == len(packed) and not is_absolute:
        return replace(packed, prefix=root)
    names = packed.names()
    return PackedPaths.of([os.fsdecode(os.path.join(root, names[i])) for i in kept.tolist()])


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """A cache, or what is left of one.

    Args:
        folder: where it is.
        manifest: what it holds; None if that cannot be read.
        problem: why it cannot be used, in one line; empty if nothing is known against it.
    """

    folder: Path | Place
    manifest: Manifest | None
    problem: str = ""

    def __str__(self) -> str:
        if self.manifest is None:
            return f"{self.folder}\n  cannot be read: {self.problem}; the next run writes it anew"
        manifest = self.manifest
        lines = [
            str(self.folder),
            f"  samples    {manifest.count - len(manifest.skipped):,}, {len(manifest.skipped):,} left out",
            *([] if manifest.classes is None else [f"  classes    {len(manifest.classes):,}"]),
            f"  size       {format_bytes(manifest.size_bytes)} in {_count(len(manifest.shards), 'shard')}",
            f"  made from  {manifest.root or '(a dataset)'}",
            f"  opened by  {manifest.key.get('source', '')}",
            f"  prepared   {manifest.key.get('prepare') or '-'}",
        ]
        for number, part in enumerate(manifest.parts):
            shape = (
                "x".join(map(str, part.spec.shape))
                if part.spec.shape is not None
                else "of many shapes"
            )
            codec = (
                "raw"
                if part.codec is None
                else " ".join(f"{name}={value}" for name, value in part.codec.items())
            )
            lines.append(f"  part{number:<5}  {part.spec.dtype} {shape}, {codec}")
        return "\n".join([*lines, f"  problem    {self.problem}"] if self.problem else lines)


def inspect_caches(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> list[Inspected]:
    """Read all but the samples of a cache, or of all caches in a ``cache_dir``; FileNotFoundError if there is none."""
    places = _cache_folders(Place(path, storage_options))
    return [_look(place if place.is_remote else Path(place.url)) for place in places]


def _look(folder: Path | Place) -> Inspected:
    def use(cache: Cache) -> Manifest:
        for number in range(len(cache.manifest.parts)):
            cache.open_part(number, np.flatnonzero(cache.columns["is_kept"]), None).close()
        return cache.manifest

    try:
        manifest = read_settled(folder, use)
    except (CacheError, FileNotFoundError) as unreadable:
        return Inspected(folder=folder, manifest=None, problem=str(unreadable))
    damaged = len(damaged_files(folder)) if isinstance(folder, Path) else 0
    problem = (
        f"damaged: {_count(damaged, 'file')}, which the next run writes anew" if damaged else ""
    )
    return Inspected(folder=folder, manifest=manifest, problem=problem)


def verify_cache(found: Inspected) -> list[str]:
    """Read every sample of a cache and hold it against its checksum; a line for each that is damaged.

    Their files are marked, so that the next run writes them anew.
    """
    if found.manifest is None:
        return [found.problem]
    return read_settled(found.folder, _verify)


def _verify(cache: Cache) -> list[str]:
    lines = []
    kept = np.flatnonzero(cache.columns["is_kept"])
    positions = np.argsort(cache.columns["rows"])
    for number in range(len(cache.manifest.parts)):
        with contextlib.closing(cache.open_part(number, kept, None)) as store:
            for k, row in enumerate(kept.tolist()):
                try:
                    store.check(np.array([k]))
                except UndecodableError as damaged:
                    lines.append(f"sample {positions[row]}, part{number}, is damaged: {damaged}")
    return lines


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """Something that was removed, or would be."""

    path: Path
    reason: str
    size_bytes: int


def prune_caches(cache_dir: Path, *, gone: bool = False, dry_run: bool = False) -> list[Removal]:
    """Remove what no run can use any more: what writers left that died, and caches that cannot be read.

    What another process is writing is left alone.

    Args:
        cache_dir: holds caches.
        gone: also caches of folders that are not there now, which can only be opened on their own.
        dry_run: only say what would go.
    """
    refuse_remote(cache_dir)
    if not cache_dir.is_dir():
        raise FileNotFoundError(f"{cache_dir} is no folder: give the one that keeps caches")
    removals = []
    for folder in sorted(
        path for path in cache_dir.iterdir() if path.is_dir() and not path.is_symlink()
    ):
        if not (folder / MANIFEST).exists() and not lock_file(folder).exists():
            continue  # none of ours
        try:
            with locked(folder, wait=False):
                removals += _prune(folder, gone=gone, dry_run=dry_run)
        except Timeout:
            continue
        except OSError as problem:
            if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            if not dry_run:
                what = f"{folder} cannot be removed or changed ({problem.strerror})"
                raise CacheError(f"{what}. Prune it where, and as who, it can be.") from problem
            # Without a lock, which cannot be made there.
            removals += _prune(folder, gone=gone, dry_run=True)
    return removals


def _prune(folder: Path, *, gone: bool, dry_run: bool) -> list[Removal]:
    found = _look(folder)
    reason = ""
    if not (folder / MANIFEST).exists():
        reason = "left by a writer that died"
    elif found.manifest is None:
        reason = f"cannot be read: {found.problem}"
    elif (
        gone
        and found.manifest.root
        and not (is_url(found.manifest.root) or os.path.isdir(found.manifest.root))
    ):
        reason = f"{found.manifest.root} is not there"
    if reason or found.manifest is None:
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if not dry_run:
            shutil.rmtree(folder)
        return [Removal(path=folder, reason=reason, size_bytes=size_bytes)]
    orphans = orphans_in(folder, found.manifest.file_names())
    if not orphans:
        return []
    size_bytes = sum(path.stat().st_size for path in orphans)
    for path in orphans if not dry_run else ():
        path.unlink()
    reason = f"{_count(len(orphans), 'file')} left by a writer that died"
    return [Removal(path=folder, reason=reason, size_bytes=size_bytes)]
