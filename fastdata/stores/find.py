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
    """Return the cache at a path or URL, or the only cache in that folder.

    Raises:
        FileNotFoundError: no cache was found.
        ValueError: the folder holds several caches. The message lists them.
        RemoteError: the server cannot be reached.
    """
    places = cache_places(Place(path, storage_options))
    if len(places) > 1:
        raise ValueError(
            f"{path} holds {len(places)} caches. Give the folder of one of them; "
            f"`fastdata inspect` shows what each contains: {', '.join(map(str, places))}"
        )
    return places[0]


def cache_places(home: Place) -> list[Place]:
    """Return ``home`` itself if it is a cache, else all caches in it.

    Raises:
        FileNotFoundError: no cache was found.
    """
    # The folder itself is checked first, because some servers do not list folders.
    if stat_files([(home, INDEX)]) != [MISSING]:
        return [home]
    places = []
    with suppress(FileNotFoundError):
        places = list(map(home.below, home.folders()))
    stats = stat_files((place, INDEX) for place in places)
    found = [place for place, stat in zip(places, stats, strict=True) if stat != MISSING]
    if not found:
        raise FileNotFoundError(
            f"{home} is not a cache and does not hold one: neither this folder nor a folder in it "
            f"has a file {INDEX}. "
            "Give the cache_dir= that a dataset was made with, or build one with `fastdata build`."
        )
    return found


def open_cache(
    place: Place, *, as_tensors: bool = False, local_cache: AnyPath | None = None
) -> tuple[Prepared, Manifest]:
    """Map a cache with the targets and paths of its samples; also return its manifest.

    Args:
        place: folder or URL of the cache.
        as_tensors: return images as tensors of their stored pixels, not as PIL images.
        local_cache: folder for copies of a cache behind a URL.

    Raises:
        FileNotFoundError: the cache does not exist.
        CacheError: the cache is damaged, or cannot be opened without its dataset.
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
    # The stored bytes are planes (C, H, W) in both cases. Only the form of the result changes.
    for store in prepared.kept.stores if prepared.kept and as_tensors else ():
        if store.spec.form == "pil":
            store.spec = replace(store.spec, form="tensor")
    return prepared, manifest
