"""Serving from the cache of a dataset: found, or written, once among any number of processes.

A cache is shards and an index that names them, renamed into its place last: a writer that is
killed at any moment leaves it as it was, and the shards that it has completed. A build cuts the
samples into shards by their files, and writes those that are not there: all of a new cache, those
with changed files of an old one, the rest of one that was stopped. The process that called gathers
their receipts, and it alone makes them a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from fastdata.errors import CacheError, FastDataError, IngestError, is_url
from fastdata.machine.memory import fastest_fitting, format_bytes
from fastdata.machine.shared import PackedPaths, SampleTable
from fastdata.report import log
from fastdata.sources.remote import Place, made_by_this_user
from fastdata.stores.cache import (
    INDEX,
    Cache,
    Index,
    Manifest,
    as_list,
    coder_of,
    mirror_folder,
    pack_targets,
    read_cache,
)
from fastdata.stores.codecs import describe_codec, find_codec
from fastdata.stores.options import Options
from fastdata.stores.prepare import (
    Forecast,
    Prepared,
    forecast,
    look_longer,
    try_codecs,
    warn_of_skipped,
)
from fastdata.stores.readers import Decoder, free_bytes, naming_full_disk, receipts_in
from fastdata.stores.samples import SOURCE, ReadPath
from fastdata.stores.shards import (
    MOST_SHARDS,
    Listing,
    ShardWriter,
    fingerprint,
    make_tasks,
    samples_per_shard,
    sizes_in,
    write_shards,
)
from fastdata.stores.writers import WriterPlan, write_any_shapes

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
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
    """

    path: ReadPath
    options: Options
    table: SampleTable | None
    listing: Listing | None
    content: str
    key: dict[str, str]
    root: str
    place: Place

    @property
    def home(self) -> Path:
        """Of a cache behind a URL only what its lock on this machine is named after."""
        if self.place.is_remote:
            return mirror_folder(self.options.local_cache) / self.place.url.rpartition("/")[2]
        return Path(self.place.url)

    @property
    def coders(self) -> list[Decoder]:
        """Those that a cache's own words may not be enough to make."""
        given = [codec for codec in self.options.codecs if codec not in ("auto", SOURCE)]
        coders: list[Decoder] = list(map(find_codec, given))
        return coders if self.path.decoder is None else [*coders, self.path.decoder]


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
        content = fingerprint(*paths, listing.sizes, listing.times)
        names += [fingerprint(*paths)] * is_own_list
    name = "-".join([stem, *(each[:_CACHE_CHARACTERS] for each in names)])
    wanted = _Wanted(
        path=path,
        options=options,
        table=table,
        listing=listing,
        content=content,
        key=key,
        root=root,
        place=Place(options.cache_dir, options.storage_options).below(name),
    )
    prepared, damage = _open(wanted)
    if prepared is not None:
        return prepared
    needed = damage or "it holds no cache of these samples that is up to date"
    with _writable(wanted.home.parent, needed), locked(wanted.home):
        prepared, damage = _open(wanted)  # another process may have written it meanwhile
        if prepared is None:
            if damage:
                log.warning("the cache is written anew: %s", damage)
            _write(wanted)
            prepared, damage = _open(wanted)
    if prepared is None:
        why = damage or "files changed meanwhile"
        raise CacheError(f"{wanted.place} was written but cannot be read: {why}")
    warn_of_skipped(prepared.skipped, len(path.source))
    return prepared


def _open(wanted: _Wanted) -> tuple[Prepared | None, str]:
    """What a cache serves that is up to date, or else how it is damaged, if it is."""

    def serve_current(cache: Cache) -> Prepared | None:
        index = cache.index
        is_stale = (
            (index.manifest.key, index.manifest.content) != (wanted.key, wanted.content)
            or (index.skipped and wanted.options.on_error == "raise")
            # Somebody has found a shard damaged.
            or not (wanted.place.is_remote or index.receipts() <= receipts_in(wanted.home))
        )
        return None if is_stale else cache.serve(wanted.coders, wanted.table)

    try:
        return read_cache(wanted.place, serve_current, wanted.options.local_cache), ""
    except FileNotFoundError:
        return None, ""
    except CacheError as damaged:
        return None, str(damaged)


def lock_file(home: Path) -> Path:
    return home.with_name(f".{home.name}.lock")


@contextlib.contextmanager
def locked(home: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a cache's writer; TimeoutError if not to wait.

    The system frees it when its holder dies.
    """
    lock = FileLock(lock_file(home))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise
        log.warning("another process is writing %s; this one waits for it", home)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writable(cache_dir: Path, why: str) -> Iterator[None]:
    """Make a folder; a CacheError says of one that cannot be written why it has to be."""
    try:
        with naming_full_disk(cache_dir / "any"):
            cache_dir.mkdir(parents=True, exist_ok=True)
            yield
    except OSError as problem:
        is_refused = problem.errno in REFUSED
        if isinstance(problem, FastDataError) or not (is_refused or problem.filename):
            raise
        shown = f"cache_dir={str(cache_dir)!r}"
        if problem.errno in (errno.ENOTDIR, errno.EEXIST):
            raise CacheError(
                f"{shown} is no folder: {problem.filename} is a file. Name another one."
            ) from problem
        raise CacheError(
            f"{shown} cannot be written ({problem.strerror}), and {why}. Name a folder that can be "
            "written, or run `fastdata build` where it can."
        ) from problem


def _write(wanted: _Wanted) -> None:
    """Bring the cache up to date. Under the lock."""
    home = wanted.home
    is_here = not wanted.place.is_remote
    if is_here:
        home.mkdir(parents=True, exist_ok=True)
        for path in [] if home.is_symlink() else home.glob("*.*"):
            with contextlib.suppress(OSError):
                path.rmdir()  # a file may have to take its place
    is_done = False
    try:
        _fill(wanted, *(_continue(wanted) or _begin(wanted)))
        is_done = True
    finally:
        # What went out of use, or what an error or Ctrl-C left half done.
        with contextlib.suppress(OSError):
            if is_done or is_here:  # elsewhere another machine may be writing
                sweep(wanted.place, keep_complete=not is_done)
            if is_here:
                home.rmdir()  # where nothing is in it


def sweep(place: Place, *, keep_complete: bool = False, dry_run: bool = False) -> dict[str, int]:
    """Remove the files of a cache that its index does not name; gives their sizes.

    None of a cache that cannot be read, maybe just now; none of another user or behind a link.

    Args:
        place: of the cache.
        keep_complete: leave shards that are complete, of a build that is not.
        dry_run: only look.
    """
    sizes = sizes_in(place)
    names = set(sizes)
    try:
        names -= Cache.read(place).index.file_names()
    except FileNotFoundError:
        pass
    except CacheError:
        return {}
    if keep_complete:
        complete = {_shard_of(name) for name in sizes if name.startswith("shard-")}
        names = {name for name in names if _shard_of(name) not in complete}
    orphans = {name: sizes[name] for name in sorted(names) if _is_removable(place, name)}
    if not dry_run:
        place.remove(*orphans)
    return orphans


def _shard_of(name: str) -> str:
    return name.partition("-")[2].partition(".")[0]


def _is_removable(place: Place, name: str) -> bool:
    path = Path(place.url, name)
    is_linked = path.is_symlink() or path.parent.is_symlink()
    return place.is_remote or (not is_linked and made_by_this_user(path))


# What is to be written


def _continue(wanted: _Wanted) -> tuple[Manifest, list[WriterPlan]] | None:
    """As ``_begin``, another cache like the one that is there; None where it is none or grew."""
    try:
        index = Cache.read(wanted.place, wanted.options.local_cache).index
        manifest = index.manifest
        plans = [
            WriterPlan(
                part=part,
                coder=coder_of(wanted.place, part, wanted.coders),
                first_bytes=sum(files.values()),
            )
            for part, files in zip(manifest.parts, index.files(), strict=True)
        ]
    except (FileNotFoundError, CacheError):
        return None
    most = manifest.shard_rows * MOST_SHARDS * 2
    is_alike = manifest.key == wanted.key and 0 < len(wanted.path.source) <= most
    return (manifest, plans) if is_alike else None


def _begin(wanted: _Wanted) -> tuple[Manifest, list[WriterPlan]]:
    """The manifest of a new cache, and how its parts are written."""
    expected = forecast(wanted.path)
    if not expected.layout.target_is_part:  # an error now, if they cannot be kept
        pack_targets(expected.targets)
    plans = _plan_writers(wanted, expected)
    need_bytes = sum(plan.first_bytes for plan in plans)
    shard_bytes = wanted.options.shard_bytes
    manifest = Manifest(
        key=wanted.key,
        root=wanted.root,
        parts=tuple(plan.part for plan in plans),
        shard_rows=samples_per_shard(len(wanted.path.source), need_bytes, shard_bytes),
        layout=expected.layout,
    )
    return manifest, plans


def _plan_writers(wanted: _Wanted, expected: Forecast) -> list[WriterPlan]:
    """Keep samples raw where the disk has room, else by a lossless codec, or as the user says."""
    codec = wanted.options.codec
    is_free = codec == "auto"
    free = max(free_bytes(wanted.home) - _SPARE_BYTES, 0) if is_free else None
    # A bucket is never full.
    if free is not None and (wanted.place.is_remote or expected.need_bytes <= free):
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


def _fill(wanted: _Wanted, manifest: Manifest, plans: Sequence[WriterPlan]) -> None:
    """Write the shards that are not there, and let the cache hold all from now on."""
    shards = write_any_shapes(partial(_write_missing, wanted, manifest), plans)
    manifest = replace(
        shards[0].manifest,
        content=wanted.content,
        classes=None if wanted.table is None else wanted.table.class_to_idx,
    )
    index = Index.join(manifest, shards)
    kept = index.kept.tolist()
    if not kept:
        first = index.skipped[0]
        raise IngestError(
            f"none of the {len(index.skipped)} samples can be prepared; the first: {first}"
        )
    columns = index.columns
    if wanted.table is None:
        columns |= pack_targets([target for each in shards for target in as_list(each.targets)])
    else:
        columns |= pack_targets(list(map(wanted.table.target, kept)))
    if wanted.listing is not None:
        paths = _paths_of(wanted.listing, wanted.root, kept)
        columns |= {"paths": paths.blob, "ends": paths.ends}
    with naming_full_disk(wanted.home):
        wanted.place.write(INDEX, index.pack())


def _paths_of(listing: Listing, root: str, kept: Sequence[int]) -> PackedPaths:
    """Names relative to the root; or absolute ones, if one of them is that of a file elsewhere."""
    names = listing.paths.names()
    paths = [os.fsdecode(names[row]) for row in kept]
    if any(map(os.path.isabs, paths)):
        paths = [os.path.join(root, path) for path in paths]
    return PackedPaths.of(paths)


def _write_missing(wanted: _Wanted, manifest: Manifest, plans: Sequence[WriterPlan]) -> list[Index]:
    path = wanted.path
    if wanted.options.on_error == "skip":
        path = path._replace(shape=None)  # files are opened, to leave some out
    manifest = replace(manifest, parts=tuple(plan.part for plan in plans))
    words = [manifest.key, *map(dataclasses.asdict, manifest.parts)]
    tasks = make_tasks(len(path.source), manifest.shard_rows, words, wanted.listing)
    writer = ShardWriter(
        path=path,
        plans=[replace(plan, first_bytes=plan.first_bytes // len(tasks)) for plan in plans],
        manifest=manifest,
        place=wanted.place,
        options=Options(on_error=wanted.options.on_error, prepare_workers=1),
    )
    return write_shards(writer, tasks, wanted.options)
