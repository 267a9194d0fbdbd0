"""``fastdata prune``: remove caches that no run can use."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from fastdata.machine.units import format_bytes
from fastdata.paths import is_url
from fastdata.sources.remote import Place
from fastdata.stores.build import lock_of
from fastdata.stores.cache import INDEX
from fastdata.tools.arguments import check_folder
from fastdata.tools.inspect import inspect_place


class Removal(NamedTuple):
    """A cache that was removed, or that would be removed without ``dry_run``."""

    path: Path
    reason: str
    size_bytes: int


def prune_caches(cache_dir: Path, *, gone: bool = False, dry_run: bool = False) -> list[Removal]:
    """Remove caches that no run can use: unreadable ones, and unfinished ones of killed writers.

    A cache that cannot be locked is kept: another process is writing it, or it belongs to another
    user.

    Args:
        cache_dir: folder of caches.
        gone: True to also remove caches of image folders that do not exist now, although
            ``from_cache`` could open them.
        dry_run: True to only return what would be removed.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    check_folder(cache_dir, "a folder of caches, as given to cache_dir=")
    removals = []
    for folder in sorted(cache_dir.iterdir()):
        lock = lock_of(folder)
        # Never follow a link, which may lead anywhere. A folder without index and lock is not a
        # cache.
        is_ours = (folder / INDEX).exists() or os.path.exists(lock.lock_file)
        if not is_ours or not folder.is_dir() or folder.is_symlink():
            continue
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock.acquire(timeout=0))
            except OSError:  # also Timeout: another process holds the lock
                continue
            reason = _fault(folder, gone=gone)
            if reason:
                files = filter(Path.is_file, folder.rglob("*"))
                size_bytes = sum(path.stat().st_size for path in files)
                removals.append(Removal(folder, reason, size_bytes))
                if not dry_run:
                    shutil.rmtree(folder)
    return removals


def _fault(folder: Path, *, gone: bool) -> str:
    """Return why no run can use a cache; empty if it can be used."""
    if not (folder / INDEX).exists():
        return "unfinished: the process that wrote it has ended"
    inspected = inspect_place(Place(folder))
    if not inspected.facts:
        return f"cannot be read: {inspected.problems[0]}"
    root = str(inspected.facts["root"])
    if gone and root and not is_url(root) and not os.path.isdir(root):
        return f"its images are gone: {root} does not exist"
    return ""


def add_prune(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``fastdata prune``."""
    parser.add_argument("cache", type=Path, metavar="CACHE", help="folder of caches")
    parser.add_argument(
        "--gone",
        action="store_true",
        help="also remove caches whose folder of images does not exist now",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be removed, and remove nothing"
    )


def prune(options: argparse.Namespace) -> int:
    """Remove caches and print them; return the exit status."""
    removals = prune_caches(options.cache, gone=options.gone, dry_run=options.dry_run)
    for removal in removals:
        print(f"{removal.path}: {removal.reason} ({format_bytes(removal.size_bytes)})")
    if not removals:
        print(f"nothing to remove in {options.cache}")
        return 0
    print(
        format_bytes(sum(removal.size_bytes for removal in removals)),
        "would be removed" if options.dry_run else "removed",
    )
    return 0
