"""Find caches, and open one without the dataset that it was made from."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fastdata.machine.tables import Packed, SampleTable
from fastdata.paths import AnyPath
from fastdata.sources.remote import MISSING, Place, stat_files
from fastdata.sources.storage_options import StorageChoice
from fastdata.stores.cache import INDEX, Cache
from fastdata.stores.prepare import Prepared

if TYPE_CHECKING:
    from fastdata.stores.manifest import Manifest


def find_cache(path: AnyPath, storage_options: StorageChoice = None) -> Place:
    """Return the cache at a path or URL, or the only one in that folder.

    Raises:
        FileNotFoundError: there is no cache.
        ValueError: there are several; names them.
        RemoteError: the place cannot be reached.
    """
    places = cache_places(Place(path, storage_options))
    if len(places) > 1:
        found = ", ".join(map(str, places))
        raise ValueError(
            f"{path} holds {len(places)} caches; give the folder of the one that you mean, of "
            f"those that `fastdata inspect` shows: {found}"
        )
    return places[0]


def cache_places(home: Place) -> list[Place]:
    """Return the place itself, if it is a cache, or else all caches in it."""
    # Asked first, because some servers do not list folders.
    if stat_files([(home, INDEX)]) != [MISSING]:
        return [home]
    places = []
    with suppress(FileNotFoundError):
        places = list(map(home.below, home.folders()))
    stats = stat_files((place, INDEX) for place in places)
    found = [place for place, stat in zip(places, stats, strict=True) if stat != MISSING]
    if not found:
        raise FileNotFoundError(
            f"{home} is not a cache and does not hold one: {INDEX} is missing in it and in the "
            "folders below it. "
            "Give the cache_dir= that a dataset was made with, or build one with `fastdata build`."
        )
    return found


def open_cache(
    place: Place, *, as_tensors: bool = False, local_cache: AnyPath | None = None
) -> tuple[Prepared, Manifest]:
    """Map a cache with the targets and paths of its samples; also return its manifest.

    Args:
        place: of the cache.
        as_tensors: give images as tensors of their stored pixels, not as PIL images.
        local_cache: folder for copies of a cache behind a URL.

    Raises:
        CacheError: the cache is damaged, or cannot be served without its dataset.
    """
    cache = Cache.read(place)
    manifest = cache.manifest
    paths = None
    prefix = b""
    if "paths" in cache.columns and not manifest.layout.target_parts:
        paths = Packed(cache.columns["paths"], cache.columns["ends"])
        if not os.path.isabs(paths[0]):
            prefix = os.path.join(os.fsencode(manifest.root), b"")
    table = SampleTable(cache.targets, paths=paths, prefix=prefix, class_to_idx=manifest.classes)
    prepared = cache.serve((), table, local_cache)
    # The stored bytes are planes (C, H, W) in both cases; the form only says what is made of them.
    for store in prepared.kept.stores if prepared.kept and as_tensors else ():
        if store.spec.form == "pil":
            store.spec = replace(store.spec, form="tensor")
    return prepared, manifest
