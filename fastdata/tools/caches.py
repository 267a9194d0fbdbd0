"""``fastdata build``, ``inspect`` and ``prune``: caches that outlive a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastdata.datasets.public import ImageFolder
from fastdata.errors import CacheError, SampleError, counted
from fastdata.machine.units import format_bytes
from fastdata.paths import AnyPath, is_url
from fastdata.report import as_text
from fastdata.sources.remote import Place, StorageChoice
from fastdata.stores.build import lock_of
from fastdata.stores.cache import INDEX, Cache, cache_places
from fastdata.stores.codecs import KNOWN_CODECS
from fastdata.tools import add_json, check_folder, positive, write_json

# Inspect


class Inspected(NamedTuple):
    """A cache, or what is left of one.

    Attributes:
        folder: path or URL of the cache.
        facts: its contents and origin; empty if it cannot be read.
        problems: samples whose bytes have changed, or why the cache cannot be used.
    """

    folder: str
    facts: dict[str, Any]
    problems: list[str]

    def __str__(self) -> str:
        # A cache may be another user's, and a terminal executes control characters.
        facts = [(f"  {name}", _printable(str(fact))) for name, fact in self.facts.items()]
        problems = [f"  {_printable(problem)}" for problem in self.problems]
        return as_text([_printable(self.folder), *facts, *problems])


def _printable(text: str) -> str:
    """Escape characters that move a terminal's cursor, name its window and the like."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def inspect_caches(
    path: AnyPath, storage_options: StorageChoice = None, *, verify: bool = False
) -> list[Inspected]:
    """Read all but the samples of a cache, or of all caches in a ``cache_dir``.

    Args:
        path: a cache, or the folder that holds caches.
        storage_options: for a URL.
        verify: read all samples, too. The next run writes a damaged shard again.

    Raises:
        FileNotFoundError: there is no cache.
    """
    return [_inspect(place, verify=verify) for place in cache_places(Place(path, storage_options))]


def _inspect(place: Place, *, verify: bool = False) -> Inspected:
    problems = []
    try:
        cache = Cache.read(place)
        if cache.lacks_receipts():
            problems.append("a shard is damaged, which the next run writes again")
        for number in range(len(cache.manifest.parts)):
            with contextlib.closing(cache.open_part(number, None)) as store:
                for k, row in enumerate(cache.kept.tolist() if verify else ()):
                    try:
                        store.ensure(np.array([k]))
                    except SampleError as wrong:
                        problems.append(f"sample {row}, part{number}, is damaged: {wrong}")
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
        facts["verified"] = "every sample is as it was written"
    return Inspected(str(place), facts, problems)


# Prune


class Removal(NamedTuple):
    """A cache that was removed, or would be without ``dry_run``."""

    path: Path
    reason: str
    size_bytes: int


def prune_caches(cache_dir: Path, *, gone: bool = False, dry_run: bool = False) -> list[Removal]:
    """Remove caches that no run can use: those that cannot be read, and leftovers of killed writers.

    A cache that cannot be locked stays: another process is writing it, or it is another user's.

    Args:
        cache_dir: holds caches.
        gone: also remove caches of folders that do not exist now. ``from_cache`` could open them.
        dry_run: only return what would be removed.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    check_folder(cache_dir, "one that keeps caches")
    removals = []
    for folder in sorted(cache_dir.iterdir()):
        lock = lock_of(folder)
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
    """Return why no run can use a cache; empty if it is sound."""
    if not (folder / INDEX).exists():
        return "left by a writer that died"
    inspected = _inspect(Place(folder))
    if not inspected.facts:
        return f"cannot be read: {inspected.problems[0]}"
    root = inspected.facts["root"]
    if gone and root and not is_url(root) and not os.path.isdir(root):
        return f"{root} is not there"
    return ""


# The commands


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--storage-options",
        type=_json,
        metavar="FILE",
        help="JSON of fsspec's options for URLs, such as credentials",
    )


def _json(text: str) -> dict[str, Any]:
    try:
        return {**json.loads(Path(text).read_text("utf-8"))}
    except (OSError, ValueError, TypeError) as problem:
        raise argparse.ArgumentTypeError(
            f'{text} holds no JSON object, such as {{"anon": true}}: {problem}'
        ) from None


def add_build(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("root", metavar="FOLDER", help="class folders of images")
    add("cache_dir", metavar="CACHE", help="folder that keeps caches")
    add(
        "--resize",
        type=positive,
        metavar="PX",
        help="length of the shorter side; default: as it is",
    )
    add(
        "--crop",
        dest="transform",
        type=side,
        metavar="PX",
        help="side of the square cut out of the centre; default: all",
    )
    add(
        "--codec",
        choices=("auto", "source", *KNOWN_CODECS),
        default="auto",
        help="default: auto, which is raw if the disk has room",
    )
    add(
        "--on-error",
        choices=("raise", "skip"),
        default="raise",
        help="if a file is no image: stop, or leave it out; default: %(default)s",
    )
    add(
        "--prepare-workers",
        type=positive,
        metavar="N",
        help="processes; by default all usable cores",
    )
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="prepare by this machine, or by a Ray cluster (extra: ray); default: %(default)s",
    )
    add(
        "--shard-size",
        dest="shard_bytes",
        metavar="SIZE",
        help="write shards of this size to twice as much, such as 256MiB; a stopped build "
        "continues after the last one",
    )
    add_storage_options(parser)


def side(text: str) -> Any:
    """Parse the side of a square, and return torchvision's step that cuts it out of the centre."""
    from torchvision.transforms import CenterCrop  # 1 s, which only this option takes

    return CenterCrop(positive(text))


def build(options: argparse.Namespace) -> int:
    if not is_url(options.root):
        check_folder(options.root)
    with ImageFolder.build_cache(**vars(options)) as dataset:
        print(f"{counted(len(dataset), 'sample')}; {dataset.storage_plan.reason}")
    return 0


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", metavar="CACHE", help="a cache, or a folder of caches")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every sample and mark damaged ones, which the next run prepares again",
    )
    add_storage_options(parser)
    add_json(parser)


def inspect(options: argparse.Namespace) -> int:
    """Show caches; return 1 if one is damaged."""
    caches = inspect_caches(options.cache, options.storage_options, verify=options.verify)
    for cache in caches:
        print(cache)
    write_json({"caches": [cache._asdict() for cache in caches]}, options)
    return int(any(cache.problems for cache in caches))


def add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", type=Path, metavar="CACHE", help="folder of caches")
    parser.add_argument(
        "--gone", action="store_true", help="also caches of folders that do not exist now"
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")


def prune(options: argparse.Namespace) -> int:
    removals = prune_caches(options.cache, gone=options.gone, dry_run=options.dry_run)
    for removal in removals:
        print(f"{removal.path}: {removal.reason} ({format_bytes(removal.size_bytes)})")
    if not removals:
        print("nothing to remove: there are no leftovers, and each cache can be read")
        return 0
    size = format_bytes(sum(removal.size_bytes for removal in removals))
    print(f"{size} {'would be removed' if options.dry_run else 'removed'}")
    return 0
