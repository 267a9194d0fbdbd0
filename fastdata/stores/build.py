"""Serving from the cache of a dataset: found, or written, once among any number of processes.

A cache is shards and an index that names them, renamed into its place last: a writer that is
killed at any moment leaves it as it was, and the shards that it has completed. A build cuts the
samples into shards, and writes those that are not there: all of a new cache, those with changed
files of an old one, the rest of one that was stopped. The process that called gathers their
receipts, and it alone makes them a cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from fastdata.errors import CacheError, is_url
from fastdata.machine.memory import fastest_fitting, format_bytes
from fastdata.machine.shared import PackedPaths, SampleTable
from fastdata.report import log
from fastdata.sources.remote import Place, made_by_this_user
from fastdata.stores.cache import (
    INDEX,
    Cache,
    Columns,
    Manifest,
    as_list,
    mirror_folder,
    pack_targets,
)
from fastdata.stores.codecs import describe_codec, find_codec
from fastdata.stores.prepare import (
    Forecast,
    Options,
    Prepared,
    forecast,
    look_longer,
    try_codecs,
    warn_of_skipped,
)
from fastdata.stores.readers import Decoder, free_bytes, naming_full_disk, receipts_in
from fastdata.stores.samples import ReadPath
from fastdata.stores.shards import (
    Listing,
    ShardWriter,
    fingerprint,
    make_tasks,
    samples_per_shard,
    sizes_in,
    write_shards,
)
from fastdata.stores.writers import WriterPlan, write_any_shapes

_SPARE_BYTES = 256 << 20
"""Left on the disk where the choice is ours."""
_CACHE_CHARACTERS = 12
"""Of a fingerprint, in a name."""


# Found, or written


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """The samples that are to be served, and where their cache is if there is one.

    Args:
        path: that samples are read by.
        options: as given by the user, with ``cache_dir``.
        table: paths and targets where they are known beforehand; else the cache keeps targets.
        listing: the files, where samples are files.
        content: a fingerprint of these, or the number of samples.
        key: what they depend on besides their files.
        root: folder of the files; empty where there is none.
        place: of the cache.
        home: the same here; of a cache behind a URL what its lock on this machine is named after.
    """

    path: ReadPath
    options: Options
    table: SampleTable | None
    listing: Listing | None
    content: str
    key: dict[str, str]
    root: str
    place: Place
    home: Path


def prepare_on_disk(
    path: ReadPath,
    options: Options,
    table: SampleTable | None,
    *,
    opened: str,
    steps: str,
    listing: Listing | None,
    root: str,
    is_own_list: bool = False,
) -> Prepared:
    """Serve from the cache of these samples; write it first, or what of it is missing.

    ``opened`` and ``steps`` say what opens and what prepares them, ``is_own_list`` that somebody
    chose the files, so that others over the same root have caches of their own; the rest is as in
    ``_Wanted``.

    Raises:
        SampleError: a sample cannot be prepared.
        CacheError: the cache cannot be written.
        ValueError: samples or targets cannot be kept in files.
    """
    assert options.cache_dir is not None
    codec = describe_codec(options.codec, options.cache_key)
    key = {"source": opened, "prepare": steps, "codec": codec}
    root = os.path.abspath(os.path.expanduser(root)) if root and not is_url(root) else root
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
    names = [fingerprint(json.dumps({**key, "root": root}, sort_keys=True))]
    content = str(len(path.source))
    if listing is not None:
        paths = listing.paths.ends, listing.paths.blob
        content = fingerprint(*paths, listing.facts)
        names += [fingerprint(*paths)] * is_own_list
    name = "-".join([stem, *(each[:_CACHE_CHARACTERS] for each in names)])
    place = Place(options.cache_dir, options.storage_options).below(name)
    wanted = _Wanted(
        path=path,
        options=options,
        table=table,
        listing=listing,
        content=content,
        key=key,
        root=root,
        place=place,
        home=mirror_folder(options.local_cache) / name if place.is_remote else Path(place.url),
    )
    try:
        return _open(wanted)
    except (FileNotFoundError, CacheError) as obstacle:
        reason = str(obstacle)
    with locked(wanted.home, reason):
        prepared = _open_or_write(wanted)
    warn_of_skipped(prepared.skipped, len(path.source))
    return prepared


def _open(wanted: _Wanted) -> Prepared:
    """Serve from the cache; FileNotFoundError where none is up to date, CacheError of damage."""
    options = wanted.options
    own = [codec for codec in options.codecs if not isinstance(codec, str)]
    coders: list[Decoder] = list(map(find_codec, own))
    if wanted.path.decoder is not None:
        coders.append(wanted.path.decoder)
    with contextlib.suppress(FileNotFoundError):
        cache = Cache.read(wanted.place)
        manifest = cache.manifest
        is_sound = wanted.place.is_remote or cache.receipts() <= receipts_in(wanted.home)
        is_allowed = not cache.skipped or options.on_error == "skip"
        is_current = (manifest.key, manifest.content) == (wanted.key, wanted.content)
        if is_current and is_allowed and is_sound:
            table = SampleTable(cache.targets) if wanted.table is None else wanted.table
            return cache.serve(coders, table, options.local_cache)
    raise FileNotFoundError("it holds no cache of these samples that is up to date")


def _open_or_write(wanted: _Wanted) -> Prepared:
    try:
        return _open(wanted)  # another process may have written it meanwhile
    except FileNotFoundError:
        pass
    except CacheError as damage:
        log.warning("the cache is written anew: %s", str(damage))
    home = wanted.home
    try:
        with naming_full_disk(home):
            if not wanted.place.is_remote:
                home.mkdir(exist_ok=True)
            cache = _write(wanted)
    finally:
        with contextlib.suppress(OSError):
            home.rmdir()  # where nothing is in it
    with contextlib.suppress(OSError):
        _sweep(cache)
    return _open(wanted)


def lock_of(home: Path) -> FileLock:
    return FileLock(home.with_name(f".{home.name}.lock"))


@contextlib.contextmanager
def locked(home: Path, reason: str) -> Iterator[None]:
    """Hold the lock of a cache's writer, which the system frees when its holder dies.

    A CacheError says for what reason it has to be written where it cannot be.
    """
    lock = lock_of(home)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("another process is writing %s; this one waits for it", home)
        lock.acquire()
    except OSError as problem:
        raise CacheError(
            f"cache_dir={str(home.parent)!r} cannot be written ({problem.strerror}), and {reason}. "
            "Name a folder that can be written, or run `fastdata build` where it can."
        ) from problem
    try:
        yield
    finally:
        lock.release()


def _sweep(cache: Cache) -> None:
    """Remove the files that lie beside a cache's own."""
    orphans = sizes_in(cache.place).keys() - cache.file_names()
    cache.place.remove(*[name for name in orphans if _is_removable(cache.place, name)])


def _is_removable(place: Place, name: str) -> bool:
    path = Path(place.url, name)
    is_linked = path.is_symlink() or path.parent.is_symlink()
    return place.is_remote or (not is_linked and made_by_this_user(path))


# What is to be written


def _write(wanted: _Wanted) -> Cache:
    """Write the shards that are not there, and let the cache hold all from now on."""
    path, options = wanted.path, wanted.options
    count = len(path.source)
    expected = forecast(path)
    if not expected.layout.target_is_part:  # an error now, if they cannot be kept
        pack_targets(expected.targets)
    planned = _plan_writers(wanted, expected)
    need_bytes = sum(plan.first_bytes for plan in planned)
    shard_rows = samples_per_shard(count, need_bytes, options.shard_bytes)
    if options.on_error == "skip":
        path = path._replace(shape=None)  # files are opened, to leave some out

    def write(plans: Sequence[WriterPlan]) -> Cache:
        manifest = Manifest(
            key=wanted.key,
            root=wanted.root,
            content=wanted.content,
            classes=None if wanted.table is None else wanted.table.class_to_idx,
            parts=tuple(plan.part for plan in plans),
            layout=expected.layout,
        )
        content = wanted.content if wanted.listing is None else ""
        words = [wanted.key, content, *map(asdict, manifest.parts)]
        tasks = make_tasks(count, shard_rows, words, wanted.listing)
        writer = ShardWriter(
            path=path,
            plans=[replace(plan, first_bytes=plan.first_bytes // len(tasks)) for plan in plans],
            manifest=manifest,
            place=wanted.place,
            options=Options(on_error=options.on_error, prepare_workers=1),
        )
        columns = _join(wanted, write_shards(writer, tasks, options))
        cache = Cache(place=wanted.place, manifest=manifest, columns=columns)
        wanted.place.write(INDEX, cache.pack())
        return cache

    return write_any_shapes(write, planned)


def _join(wanted: _Wanted, shards: Sequence[Cache]) -> Columns:
    """The columns of all shards, with what is known of their samples besides."""
    columns: Columns = {
        "skipped.json": [each for shard in shards for each in shard.columns["skipped.json"]]
    }
    names = ["shards.names", "shards.rows", "shards.bytes", "kept"]  # others may be there
    for number, located in enumerate(shards[0].located):
        names += [f"part{number}.{name}" for name in located if name != "files"]
    for name in names:
        columns[name] = np.concatenate([shard.columns[name] for shard in shards])
    kept = np.flatnonzero(columns["kept"]).tolist()
    if wanted.table is None:
        targets = [target for shard in shards for target in as_list(shard.targets)]
    else:
        targets = list(map(wanted.table.target, kept))
    columns |= pack_targets(targets)
    if wanted.listing is not None:
        listed = wanted.listing.paths.names()
        paths = [os.fsdecode(listed[row]) for row in kept]
        if any(map(os.path.isabs, paths)):  # of a file elsewhere
            paths = [os.path.join(wanted.root, path) for path in paths]
        packed = PackedPaths.of(paths)
        columns |= {"paths": packed.blob, "ends": packed.ends}
    return columns


def _plan_writers(wanted: _Wanted, expected: Forecast) -> list[WriterPlan]:
    """Keep samples raw where the disk has room, else by a lossless codec, or as the user says."""
    codec = wanted.options.codec
    is_free = codec == "auto"
    free = None
    if is_free:
        free = free_bytes(wanted.home) + sum(sizes_in(wanted.place).values()) - _SPARE_BYTES
        # A bucket is never full.
        if wanted.place.is_remote or expected.need_bytes <= free:
            return expected.plan_writers()
    trials = try_codecs(look_longer(wanted.path), codec)
    best = fastest_fitting(trials, free, only_lossless=is_free)
    if best is not None:
        need = format_bytes(expected.need_bytes)
        log.info("codec=%r on disk, where raw samples take %s", best.codec, need)
        return expected.plan_writers(best)
    if not is_free:
        raise ValueError(f"codec={codec!r} is not possible here: {trials[0].obstacle}")
    return expected.plan_writers()  # which says need, free and cure
