"""Prepared samples that outlive the run: caches on disk, found by what they were made from."""

from fastdata.stores.cache.build import list_paths, prepare_on_disk
from fastdata.stores.cache.inspect import find_cache, inspect_caches, open_cache, prune_caches
from fastdata.stores.cache.shards import Listing

__all__ = [
    "Listing",
    "find_cache",
    "inspect_caches",
    "list_paths",
    "open_cache",
    "prepare_on_disk",
    "prune_caches",
]
