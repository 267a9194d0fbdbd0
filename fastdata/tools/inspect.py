"""``fastdata inspect``: show the contents of caches, and find damage."""

from __future__ import annotations

import argparse
import contextlib
from typing import NamedTuple

import numpy as np

from fastdata.errors import CacheError, SampleError
from fastdata.machine.units import format_bytes
from fastdata.paths import AnyPath
from fastdata.report import as_text
from fastdata.sources.remote import Place
from fastdata.sources.storage_options import StorageChoice
from fastdata.stores.cache import Cache
from fastdata.stores.find import cache_places
from fastdata.tools.arguments import add_storage_options
from fastdata.tools.figures import add_json, write_json


class Inspected(NamedTuple):
    """A cache that was inspected, or the remains of one.

    Attributes:
        folder: path or URL of the cache.
        facts: its contents and origin, by name; empty if it cannot be read.
        problems: a text for each damaged sample, or the reason why the cache cannot be used.
    """

    folder: str
    facts: dict[str, object]
    problems: list[str]

    def __str__(self) -> str:
        # A cache may come from another user, and control characters could change the terminal.
        facts = [(f"  {name}", _printable(str(fact))) for name, fact in self.facts.items()]
        problems = [f"  {_printable(problem)}" for problem in self.problems]
        return as_text([_printable(self.folder), *facts, *problems])


def _printable(text: str) -> str:
    """Escape control characters, such as those that move the cursor or rename the window."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def inspect_caches(
    path: AnyPath, storage_options: StorageChoice = None, *, verify: bool = False
) -> list[Inspected]:
    """Return the contents of a cache, or of all caches in a ``cache_dir``.

    Args:
        path: a cache, or the folder that holds caches.
        storage_options: options of fsspec for a URL.
        verify: True to read all samples and compare their checksums as well. The next run that
            uses the cache writes damaged shards again.

    Raises:
        FileNotFoundError: there is no cache.
    """
    return [
        inspect_place(place, verify=verify) for place in cache_places(Place(path, storage_options))
    ]


def inspect_place(place: Place, *, verify: bool = False) -> Inspected:
    """Return the contents of one cache; see ``inspect_caches``."""
    problems = []
    try:
        cache = Cache.read(place)
        # When a sample is found damaged, the manifest of its shard is removed.
        if cache.lacks_shard_manifests():
            problems.append("a shard is damaged; the next run writes it again")
        for number in range(len(cache.manifest.parts)):
            # Opening checks the files. Samples are checked one by one, so that all damage is found.
            with contextlib.closing(cache.open_part(number, None)) as store:
                for k, row in enumerate(cache.kept.tolist() if verify else ()):
                    try:
                        store.ensure(np.array([k]))
                    except SampleError as wrong:
                        problems.append(f"sample {row}, part{number}, is damaged: {wrong}")
                    if place.is_remote:  # the cache may be larger than the disk for its segments
                        store.evict(np.array([k]))
        size = format_bytes(cache.size_bytes)
    except (CacheError, FileNotFoundError) as unreadable:
        return Inspected(str(place), {}, [str(unreadable)])
    facts = {
        "samples": len(cache.kept),
        "left out": len(cache.skipped),
        "classes": len(cache.manifest.classes or ()),
        "size": size,
        "shards": len(cache.shard_names),
        "root": cache.manifest.root,
        **cache.manifest.key,
    }
    if verify and not problems:
        facts["verified"] = "all samples are unchanged since they were written"
    return Inspected(str(place), facts, problems)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fastdata inspect``."""
    parser.add_argument("cache", metavar="CACHE", help="a cache, or a folder of caches")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="also read every sample, and mark damaged ones: the next run prepares them again",
    )
    add_storage_options(parser)
    add_json(parser)


def inspect(options: argparse.Namespace) -> int:
    """Print the contents of caches; return 1 if one is damaged."""
    caches = inspect_caches(options.cache, options.storage_options, verify=options.verify)
    for cache in caches:
        print(cache)
    write_json({"caches": [cache._asdict() for cache in caches]}, options)
    return int(any(cache.problems for cache in caches))
