"""Caches without the dataset that they were made from: opened alone, looked over, pruned."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from fastdata.errors import CacheError, SampleError, counted, is_url, refuse_remote
from fastdata.machine.memory import format_bytes
from fastdata.machine.shared import PackedPaths, SampleTable
from fastdata.sources.remote import Place
from fastdata.stores.build import lock_file
from fastdata.stores.cache import INDEX, VERSION, Cache, LocalCache, Manifest, read_cache
from fastdata.stores.prepare import Prepared
from fastdata.stores.readers import receipts_in


def find_cache(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Place:
    """The cache that a path or URL means: itself, or the only one in it.

    Raises:
        FileNotFoundError: there is no cache.
        ValueError: there are several; says which.
        RemoteError: the place cannot be reached.
    """
    places = _cache_places(Place(path, storage_options))
    if len(places) > 1:
        found = "\n".join(map(str, map(_look, places)))
        raise ValueError(
            f"{path} holds {len(places)} caches; give the folder of the one that you mean:\n{found}"
        )
    return places[0]


def _cache_places(home: Place) -> list[Place]:
    """The place itself, if it is a cache, or else all caches in it."""
    places = [home]
    with contextlib.suppress(FileNotFoundError):
        places += [home.below(name) for name in home.folders()]
    asked = [place.submit_facts(INDEX) for place in places]
    found = [each for each, facts in zip(places, asked, strict=True) if facts.result()[0] >= 0]
    if not found:
        raise FileNotFoundError(
            f"{home} is no cache and holds none: there is no {INDEX} in it or one below it, as "
            f"caches of version {VERSION} have; older ones are to be built again"
        )
    return [home] if home in found else found


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

    def serve(cache: Cache) -> tuple[Prepared, Manifest]:
        manifest = cache.manifest
        has_masks = manifest.layout.target_is_part or manifest.layout.mask_places
        paths = None if has_masks or "paths" not in cache.columns else _paths_of(cache)
        table = SampleTable(cache.targets, paths=paths, class_to_idx=manifest.classes)
        if as_tensors:
            parts = []
            for part in manifest.parts:
                is_pil = part.spec.form == "pil"
                spec = replace(part.spec, form="tensor") if is_pil else part.spec
                parts.append(replace(part, spec=spec))
            cache = replace(cache, manifest=replace(manifest, parts=tuple(parts)))
        return cache.serve((), table, local_cache), manifest

    return read_cache(place, serve)


def _paths_of(cache: Cache) -> PackedPaths:
    paths = PackedPaths(cache.columns["paths"], cache.columns["ends"])
    if os.path.isabs(paths.blob[: int(paths.ends[0])].tobytes()):
        return paths
    return replace(paths, prefix=os.path.join(os.fsencode(cache.manifest.root), b""))


# Looked over


class Inspected(NamedTuple):
    """A cache, or what is left of one.

    Attributes:
        folder: where it is.
        facts: what it holds and is made from; none of one that cannot be read.
        problem: why it cannot be used; empty if nothing is known against it.
        damaged: samples whose bytes are not those that were written; None if nobody has looked.
    """

    folder: str
    facts: dict[str, Any]
    problem: str
    damaged: list[str] | None

    def __str__(self) -> str:
        lines = [f"{name:10} {fact}" for name, fact in self.facts.items()]
        if self.problem:
            lines.append(f"problem    {self.problem}; the next run writes it anew")
        if self.damaged == []:
            lines.append("verified   every sample is as it was written")
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
        return Inspected(str(place), {}, str(unreadable), None)


def _inspect(cache: Cache, *, verify: bool) -> Inspected:
    manifest = cache.manifest
    damaged = []
    for number in range(len(manifest.parts)):
        with contextlib.closing(cache.open_part(number, None)) as store:
            for k, row in enumerate(cache.kept.tolist() if verify else ()):
                try:
                    store.ensure(np.array([k]))
                except SampleError as wrong:
                    damaged.append(f"sample {row}, part{number}, is damaged: {wrong}")
    problem = ""
    if not cache.place.is_remote:
        missing = cache.receipts() - receipts_in(Path(cache.place.url))
        problem = f"{counted(len(missing), 'shard')} damaged" if missing else ""
    facts = {
        "samples": len(cache.kept),
        "left out": len(cache.skipped),
        "classes": len(manifest.classes or ()),
        "size": format_bytes(cache.size_bytes),
        "shards": len(cache.shard_names),
        "root": manifest.root,
        **manifest.key,
    }
    return Inspected(str(cache.place), facts, problem, damaged if verify else None)


# Pruned


class Removal(NamedTuple):
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
    removals: list[Removal] = []
    for folder in sorted(cache_dir.iterdir()):
        is_ours = (folder / INDEX).exists() or lock_file(folder).exists()
        if is_ours and folder.is_dir() and not folder.is_symlink():
            with contextlib.suppress(Timeout), FileLock(lock_file(folder), timeout=0):
                removals += _prune(folder, gone=gone, dry_run=dry_run)
    return removals


def _prune(folder: Path, *, gone: bool, dry_run: bool) -> list[Removal]:
    found = _look(Place(folder))
    root = found.facts.get("root")
    if not (folder / INDEX).exists():
        reason = "left by a writer that died"
    elif not found.facts:
        reason = f"cannot be read: {found.problem}"
    elif gone and root and not is_url(root) and not os.path.isdir(root):
        reason = f"{root} is not there"
    else:
        return []
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if not dry_run:
        shutil.rmtree(folder)
    return [Removal(folder, reason, size_bytes)]
