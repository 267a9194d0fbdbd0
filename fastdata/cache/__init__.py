"""Prepared samples that outlive the run: caches on disk, found again by what they were made from."""

from fastdata.cache.alone import find_cache, open_cache
from fastdata.cache.build import CacheOrigin, prepare_on_disk
from fastdata.cache.keys import describe_call, describe_dataset, describe_steps
from fastdata.cache.listing import Listing, list_folder, list_paths
from fastdata.cache.look import Found, inspect_caches, prune_caches, verify_cache

__all__ = [
    "CacheOrigin",
    "Found",
    "Listing",
    "describe_call",
    "describe_dataset",
    "describe_steps",
    "find_cache",
    "inspect_caches",
    "list_folder",
    "list_paths",
    "open_cache",
    "prepare_on_disk",
    "prune_caches",
    "verify_cache",
]
