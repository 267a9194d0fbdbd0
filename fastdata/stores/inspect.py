"""Caches without the dataset that they were made from: opened alone, looked over, pruned."""

from __future__ import annotations

import contextlib
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
from fastdata.stores.build import REFUSED, lock_file, locked, sweep
from fastdata.stores.cache import INDEX, OLD_INDEX, Cache, LocalCache, Manifest, read_cache
from fastdata.stores.prepare import Prepared
from fastdata.stores.readers import UndecodableError, receipts_in


def find_cache(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Place:
    """The cache that a path or URL means: itself, or the only one in it that can be read.

    Raises:
        FileNotFoundError: there is no cache.
        CacheError: none of the caches there can be read.
        ValueError: there are several; says which.
        RemoteError: the place cannot be reached.
    """
    home = Place(path, storage_options)
    places = _cache_places(home)
    if len(places) == 1:
        return places[0]
    found = [_look(place) for place in places]
    readable = [place for place, each in zip(places, found, strict=True) if each.manifest]
    if len(readable) == 1:
        return readable[0]
    lines = "".join(f"\n  {each.folder}: {each.summary}" for each in found)
    if readable:
        raise ValueError(
            f"{home} holds {len(readable)} caches; give the folder of the one that you mean:{lines}"
        )
    raise CacheError(f"{home} holds no cache that can be read; build it again:{lines}")


def _cache_places(home: Place) -> list[Place]:
    """The place itself, if it is a cache, or else all caches in it."""
    below: list[Place] = []
    with contextlib.suppress(FileNotFoundError):
        below = [home.below(name) for name in home.folders()]
    names = INDEX, OLD_INDEX
    asked = [(place, [place.submit_facts(name) for name in names]) for place in [home, *below]]
    places = [place for place, facts in asked if any(each.result()[0] >= 0 for each in facts)]
    if not places:
        raise FileNotFoundError(
            f"{home} is no cache and holds none: there is no {INDEX} in it or one below it"
        )
    return [home] if home in places else places


def open_cache(
    place: Place, *, as_tensors: bool = False, local_cache: LocalCache = None
) -> tuple[Prepared, Manifest]:
    """Map a cache and all that it knows of its samples; also gives its manifest.

    Args:
        place: of the cache.
        as_tensors: give images as tensors of their stored pixels, not as PIL images.
        local_cache: folder that holds what is needed of one behind a URL.

    Raises:
        CacheError: it is damaged, or cannot be served without its dataset.
    """
    return read_cache(place, partial(_serve_alone, as_tensors=as_tensors), local_cache)


def _serve_alone(cache: Cache, *, as_tensors: bool) -> tuple[Prepared, Manifest]:
    index = cache.index
    manifest = index.manifest
    has_masks = manifest.layout.target_is_part or manifest.layout.mask_places
    paths = None if has_masks or "paths" not in index.columns else _paths_of(cache)
    table = SampleTable(index.targets, paths=paths, class_to_idx=manifest.classes)
    if as_tensors:
        parts = tuple(
            replace(part, spec=replace(part.spec, form="tensor"))
            if part.spec.form == "pil"
            else part
            for part in manifest.parts
        )
        cache = replace(cache, index=replace(index, manifest=replace(manifest, parts=parts)))
    return cache.serve((), table), manifest


def _paths_of(cache: Cache) -> PackedPaths:
    columns = cache.index.columns
    paths = PackedPaths(columns["paths"], columns["ends"])
    root = os.path.join(os.fsencode(cache.index.manifest.root), b"")
    are_absolute = os.path.isabs(paths.blob[: int(paths.ends[0])].tobytes())
    return paths if are_absolute else replace(paths, prefix=root)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """A cache, or what is left of one.

    Args:
        folder: where it is.
        manifest: what its samples are; None if that cannot be read.
        samples: of what it was made from.
        skipped: those of them that were left out.
        shards: that the others lie in.
        size_bytes: of these.
        problem: why it cannot be used, in one line; empty if nothing is known against it.
        damaged: samples whose bytes are not those that were written; None if nobody has looked.
    """

    folder: str
    manifest: Manifest | None = None
    samples: int = 0
    skipped: int = 0
    shards: int = 0
    size_bytes: int = 0
    problem: str = ""
    damaged: list[str] | None = None

    @property
    def summary(self) -> str:
        if self.manifest is None:
            return f"cannot be read: {self.problem}"
        key = self.manifest.key
        made_from = f"{counted(self.samples, 'sample')} of {self.manifest.root or 'a dataset'}"
        steps = key["prepare"] or "as they are"
        return f"{made_from}, prepared: {steps}, codec: {key['codec']}"

    def __str__(self) -> str:
        manifest = self.manifest
        if manifest is None:
            return f"{self.folder}\n  {self.summary}; the next run writes it anew"
        facts = {"samples": f"{self.samples - self.skipped:,}, {self.skipped:,} left out"}
        if manifest.classes is not None:
            facts["classes"] = f"{len(manifest.classes):,}"
        facts["size"] = f"{format_bytes(self.size_bytes)} in {counted(self.shards, 'shard')}"
        facts["made from"] = manifest.root or "(a dataset)"
        facts["opened by"] = manifest.key["source"]
        facts["prepared"] = manifest.key["prepare"] or "-"
        for number, part in enumerate(manifest.parts):
            shape = "of many shapes"
            if part.spec.shape is not None:
                shape = "x".join(map(str, part.spec.shape))
            codec = " ".join(f"{name}={value}" for name, value in (part.codec or {}).items())
            facts[f"part{number}"] = f"{part.spec.dtype} {shape}, {codec or 'raw'}"
        if self.problem:
            facts["problem"] = self.problem
        if self.damaged == []:
            facts["verified"] = "every sample is as it was written"
        lines = [f"{name:10} {fact}" for name, fact in facts.items()]
        return "\n  ".join([self.folder, *lines, *(self.damaged or ())])


def inspect_caches(
    path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    verify: bool = False,
) -> list[Inspected]:
    """Read all but the samples of a cache, or of all caches in a ``cache_dir``.

    Args:
        path: a cache, or what holds caches.
        storage_options: for a URL.
        verify: read all samples, too. A shard that is damaged is written anew by the next run.

    Raises:
        FileNotFoundError: there is none.
    """
    places = _cache_places(Place(path, storage_options))
    return [_look(place, verify=verify) for place in places]


def _look(place: Place, *, verify: bool = False) -> Inspected:
    try:
        return read_cache(place, partial(_inspect, verify=verify))
    except (CacheError, FileNotFoundError) as unreadable:
        return Inspected(folder=str(place), problem=str(unreadable))


def _inspect(cache: Cache, *, verify: bool) -> Inspected:
    index = cache.index
    kept = index.kept.tolist()
    damaged = []
    for number in range(len(index.manifest.parts)):
        with contextlib.closing(cache.open_part(number, None)) as store:
            for k, row in enumerate(kept if verify else ()):
                try:
                    store.ensure(np.array([k]))
                except UndecodableError as wrong:
                    damaged.append(f"sample {row}, part{number}, is damaged: {wrong}")
    problem = ""
    if not cache.place.is_remote:
        missing = index.receipts() - receipts_in(Path(cache.place.url))
        shards = counted(len(missing), "shard")
        problem = f"damaged: {shards}, which the next run writes anew" if missing else ""
    return Inspected(
        folder=str(cache.place),
        manifest=index.manifest,
        samples=len(index.columns["kept"]),
        skipped=len(index.skipped),
        shards=len(index.shard_names),
        size_bytes=index.size_bytes,
        problem=problem,
        damaged=damaged if verify else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """Something that was removed, or would be."""

    path: Path
    reason: str
    size_bytes: int


def prune_caches(cache_dir: Path, *, gone: bool = False, dry_run: bool = False) -> list[Removal]:
    """Remove what no run can use: what writers left that died, and caches that cannot be read.

    What another process is writing is left alone.

    Args:
        cache_dir: holds caches.
        gone: also caches of folders that are not there now, which can only be opened on their own.
        dry_run: only say what would go.
    """
    refuse_remote(cache_dir)
    if not cache_dir.is_dir():
        raise FileNotFoundError(f"{cache_dir} is no folder: give the one that keeps caches")
    removals: list[Removal] = []
    for folder in sorted(cache_dir.iterdir()):
        is_ours = lock_file(folder).exists() or _is_cache(folder)
        if folder.is_symlink() or not folder.is_dir() or not is_ours:
            continue
        try:
            with locked(folder, wait=False):
                removals += _prune(folder, gone=gone, dry_run=dry_run)
        except Timeout:
            continue
        except OSError as problem:
            if problem.errno not in REFUSED:
                raise
            if not dry_run:
                raise CacheError(
                    f"{folder} cannot be removed or changed ({problem.strerror}). Prune it where, "
                    "and as who, it can be."
                ) from problem
            # Without a lock, which cannot be made there.
            removals += _prune(folder, gone=gone, dry_run=True)
    return removals


def _is_cache(folder: Path) -> bool:
    return (folder / INDEX).exists() or (folder / OLD_INDEX).exists()


def _prune(folder: Path, *, gone: bool, dry_run: bool) -> list[Removal]:
    place = Place(folder)
    found = _look(place)
    root = "" if found.manifest is None else found.manifest.root
    reason = ""
    if not _is_cache(folder):
        reason = "left by a writer that died"
    elif found.manifest is None:
        reason = f"cannot be read: {found.problem}"
    elif gone and root and not is_url(root) and not os.path.isdir(root):
        reason = f"{root} is not there"
    if reason:
        size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if not dry_run:
            shutil.rmtree(folder)
        return [Removal(path=folder, reason=reason, size_bytes=size_bytes)]
    orphans = sweep(place, dry_run=dry_run)
    reason = f"{counted(len(orphans), 'file')} left by a writer that died"
    return (
        [Removal(path=folder, reason=reason, size_bytes=sum(orphans.values()))] if orphans else []
    )
