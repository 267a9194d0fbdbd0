"""Serving from the cache of a dataset: found, or written, once among any number of processes.

A cache is shards and a manifest that names them, renamed into its place last: a writer that is
killed at any moment leaves it as it was, and the shards that it has completed. A build cuts the
samples into shards by their files, and writes those that are not there: all of a new cache, those
with changed files of an old one, the rest of one that was stopped.

A task reads, prepares and writes one shard, on this machine or by any executor: the bytes are the
same, whoever writes them. Last it writes a receipt, ``shard-<name>.npz``, of what the index is to
hold: a shard whose receipt and files are there is complete. The process that called gathers the
receipts, and it alone makes them a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import platform
import re
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout

from fastdata.errors import CacheError, FastDataError, IngestError, is_url
from fastdata.machine.memory import fastest_fitting, format_bytes, parse_bytes, usable_cores
from fastdata.machine.processes import attempt, run_tasks
from fastdata.machine.shared import PackedPaths, SampleTable
from fastdata.report import log, progress_bar
from fastdata.sources import FileSource
from fastdata.sources.remote import Place, fleeting_folder, made_by_this_user, options_travel
from fastdata.stores.cache import (
    INDEX,
    VERSION,
    Cache,
    Columns,
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
    coders_by_name,
    forecast,
    look_longer,
    try_all,
    warn_of_skipped,
)
from fastdata.stores.readers import (
    Decoder,
    free_bytes,
    naming_full_disk,
    receipt_name,
    receipts_in,
)
from fastdata.stores.samples import SOURCE, ReadPath
from fastdata.stores.writers import (
    WriterPlan,
    ingest,
    ingest_workers,
    needs_processes,
    write_any_shapes,
)

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
MOST_SHARDS = 200
"""Every process keeps a descriptor open for each file, and 1,024 is a usual limit."""
_LEAST_BYTES = 16 << 20
"""Of a shard: less is too little to hand out as a task."""
_GOOD_BYTES = 64 << 20
"""From these on a shard may be more, where there are enough for all workers."""
_GOOD_SHARDS = 64
_SPARE_BYTES = 256 << 20
"""Left on the disk where the choice is ours."""
_CACHE_CHARACTERS = 12
_SHARD_CHARACTERS = 16
"""Of a fingerprint, in a name."""
_FILES_PER_TASK = 50_000
_NO_FILE = -1
_RAY_RETRIES = 10
"""Of a task whose node was lost."""


# The files that a cache is made from: their names, sizes and times


class Listing(NamedTuple):
    """The files that samples are made from, one for each.

    Args:
        paths: their names, relative to the root where they lie below it.
        sizes: int64 (N,), -1 where there is no file.
        times: int64 (N,), of the last change, or what else stands for their content.
    """

    paths: PackedPaths
    sizes: np.ndarray
    times: np.ndarray


def list_paths(
    paths: Sequence[str], root: str, facts: npt.NDArray[np.int64] | None = None
) -> Listing:
    """List the files of a dataset. ``facts`` has sizes and times of remote ones, (2, N)."""
    prefix = os.path.join(os.path.expanduser(root), "") if root else ""
    packed = PackedPaths.of([os.fspath(path).removeprefix(prefix) for path in paths])
    if facts is None:  # 1,300,000 are a matter of seconds
        tasks = [paths[i : i + _FILES_PER_TASK] for i in range(0, len(paths), _FILES_PER_TASK)]
        workers = usable_cores() if len(tasks) > 4 else 0
        with contextlib.closing(run_tasks(_ask, tasks, workers)) as answers:
            facts = np.concatenate([np.zeros((2, 0), np.int64), *answers], axis=1)
    return Listing(packed, *facts)


def _ask(paths: Sequence[str]) -> npt.NDArray[np.int64]:
    facts = []
    for path in paths:
        try:
            found = os.stat(path)
        except (OSError, ValueError):  # no such file, or a name that cannot be one
            facts.append((_NO_FILE, _NO_FILE))
        else:
            facts.append((found.st_size, found.st_mtime_ns))
    sizes_and_times: npt.NDArray[np.int64] = np.array(facts, np.int64).T
    return sizes_and_times


def _fingerprint(*data: str | bytes | np.ndarray) -> str:
    digest = hashlib.sha256()
    for each in data:
        if isinstance(each, np.ndarray):
            each = np.ascontiguousarray(each).tobytes()
        digest.update(os.fsencode(each))
    return digest.hexdigest()


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
        codec = self.options.codec
        given = codec if isinstance(codec, (tuple, list)) else [codec]
        coders: list[Decoder] = [find_codec(it) for it in given if it not in ("auto", SOURCE)]
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
    names = [_fingerprint(json.dumps({**key, "root": root}, sort_keys=True))]
    content = str(len(path.source))
    if listing is not None:
        paths = listing.paths.ends, listing.paths.blob
        content = _fingerprint(*paths, listing.sizes, listing.times)
        names += [_fingerprint(*paths)] * is_own_list
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
    """Remove the files of a cache that its manifest does not name; gives their sizes.

    None of a cache that cannot be read, maybe just now; none of another user or behind a link.

    Args:
        place: of the cache.
        keep_complete: leave shards that are complete, of a build that is not.
        dry_run: only look.
    """
    sizes = _sizes_in(place)
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


def _sizes_in(place: Place) -> dict[str, int]:
    return {entry.name: entry.size_bytes for entry in place.find() if "/" not in entry.name}


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
    trials = try_all(look_longer(wanted.path), codec)
    best = fastest_fitting(trials, free, only_lossless=is_free)
    if best is not None:
        need = format_bytes(expected.need_bytes)
        log.info("codec=%r on disk, where raw samples take %s", best.codec, need)
        coders = coders_by_name(codec, expected)[best.codec]
        return expected.plan_writers(coders, best.part_bytes)
    if not is_free:
        raise ValueError(f"codec={codec!r} is not possible here: {trials[0].obstacle}")
    return expected.plan_writers()  # which says need, free and cure


def samples_per_shard(count: int, need_bytes: int, shard_bytes: int | str | None) -> int:
    """How many of so many samples, which take about ``need_bytes``, a shard has on average."""
    if shard_bytes is None:
        size_bytes = min(max(need_bytes / _GOOD_SHARDS, _LEAST_BYTES), _GOOD_BYTES)
        shards = min(math.ceil(need_bytes / size_bytes), MOST_SHARDS)
    else:
        shards = min(math.ceil(need_bytes / parse_bytes(shard_bytes, of=0)), count)
        if shards > MOST_SHARDS:
            raise ValueError(
                f"shard_bytes={shard_bytes!r} makes {shards:,} files of each part, which every "
                f"process that reads the cache opens; {MOST_SHARDS} are possible. Give more bytes, "
                "or leave it out."
            )
    return math.ceil(count / max(min(shards, count), 1))


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
        columns |= pack_targets(wanted.table.targets.chosen(kept))
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
    tasks = _make_tasks(len(path.source), manifest.shard_rows, words, wanted.listing)
    writer = ShardWriter(
        path=path,
        plans=[replace(plan, first_bytes=plan.first_bytes // len(tasks)) for plan in plans],
        manifest=manifest,
        place=wanted.place,
        options=Options(on_error=wanted.options.on_error, prepare_workers=1),
    )
    return _write_shards(writer, tasks, wanted.options)


# Shards


class Task(NamedTuple):
    """A shard that is to be written.

    Args:
        number: among those of a build.
        name: its fingerprint.
        positions: of its samples in the source.
        columns: of these, on the way to a process that does not have the source.
    """

    number: int
    name: str
    positions: range
    columns: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"shard {self.number}, samples {self.positions[0]} to {self.positions[-1]}"


def _make_tasks(count: int, size: int, words: Sequence[Any], listing: Listing | None) -> list[Task]:
    """Cut samples into runs, each named after all that its bytes depend on.

    Args:
        count: samples.
        size: of a run; of files the mean size.
        words: plain values that all samples depend on besides their files.
        listing: the files, where samples are files.
    """
    basis = json.dumps([VERSION, count if listing is None else 0, *words], sort_keys=True)
    paths = [] if listing is None else listing.paths.names()
    stops = [*range(size, count, size), count] if listing is None else _cut(paths, size)
    tasks: dict[str, Task] = {}
    for start, stop in itertools.pairwise([0, *stops]):
        name = _fingerprint(basis, b"\0".join(paths[start:stop]))
        if listing is not None:
            name = _fingerprint(name, listing.sizes[start:stop], listing.times[start:stop])
        if listing is None or name in tasks:  # of a list that has the same files twice
            name = _fingerprint(name, f"{start} {stop}")
        tasks[name] = Task(len(tasks), name[:_SHARD_CHARACTERS], range(start, stop))
    return list(tasks.values())


def _cut(names: Sequence[bytes], size: int) -> list[int]:
    """Where runs of files end, of ``size`` on average: before the name of the lowest hash in reach.

    So the cuts depend on the files around them alone, and a file that comes or goes changes the run
    that it is in, while those behind it begin and end where they did.
    """
    hashes = np.array([zlib.crc32(name) for name in names], np.uint32)
    least = max(size // 2, 1)
    stops = []
    start = 0
    while len(names) - start > least + size:
        reach = hashes[start + least : start + least + size]
        start += least + int(reach.argmin())
        stops.append(start)
    return [*stops, len(names)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardWriter:
    """Writes shards, in whatever process.

    Args:
        path: of the samples.
        plans: of each part of a shard.
        manifest: of the cache.
        place: where files go.
        options: of a shard.
    """

    path: ReadPath
    plans: Sequence[WriterPlan]
    manifest: Manifest
    place: Place
    options: Options

    def __call__(self, task: Task) -> Task:
        """Write the files of a shard, and then its receipt."""
        path = self.path
        if multiprocessing.parent_process() is not None:
            # There is a process for each core; and a forked OpenMP pool would hang.
            torch.set_num_threads(1)
        if isinstance(path.source, FileSource) and task.columns is not None:
            path = path._replace(source=path.source.over(task.columns))
        attempt = uuid.uuid4().hex  # there may be several of one shard
        with contextlib.ExitStack() as cleanup:
            folder = self._folder(cleanup)
            plans = [
                replace(plan, path=folder / f"{attempt}.{k}") for k, plan in enumerate(self.plans)
            ]
            ingested = ingest(path, plans, task.positions, self.options)
            kept = np.zeros(len(task.positions), bool)
            kept[ingested.kept] = True
            columns: Columns = {
                "shards.names": np.array([task.name], "S16"),
                "shards.rows": np.array([len(kept)]),
                "shards.bytes": np.array([[store.size_bytes for store in ingested.stores]]),
                "kept": kept,
                "skipped.json": [[error.path, str(error)] for error in ingested.skipped],
                **pack_targets(ingested.targets),
            }
            for number, store in enumerate(ingested.stores):
                cleanup.callback(store.close)
                columns |= {f"part{number}.{name}": it for name, it in store.index.items()}
            index = Index(manifest=self.manifest, columns=columns)
            for number, plan in enumerate(plans):
                assert plan.path is not None
                cleanup.callback(plan.path.unlink, missing_ok=True)
                [name] = index.files()[number]
                if self.place.is_remote:
                    self.place.upload(name, plan.path)
                else:
                    os.replace(plan.path, folder / name)
            self.place.write(receipt_name(task.name), index.pack())
        return task

    def _folder(self, cleanup: contextlib.ExitStack) -> Path:
        if self.place.is_remote:
            return cleanup.enter_context(fleeting_folder())
        folder = Path(self.place.url)
        if not folder.is_dir():
            raise CacheError(
                f"{folder} is not there on {platform.node()}: the machines of engine= must share "
                "cache_dir=, or it must be a URL"
            )
        return folder

    def find_complete(self, tasks: Sequence[Task], *, with_skipped: bool) -> dict[int, Index]:
        """The shards that are there, by number."""
        sizes = _sizes_in(self.place)
        begun = [task for task in tasks if receipt_name(task.name) in sizes]
        receipts = [self.place.submit(receipt_name(task.name)) for task in begun]
        complete = {}
        for task, receipt in zip(begun, receipts, strict=True):
            with contextlib.suppress(Exception):  # bytes of others raise anything
                index = Index.unpack(receipt.result())
                is_its_own = index.shard_names == [task.name]
                is_its_own &= index.manifest.parts == self.manifest.parts
                is_its_own &= len(index.columns["kept"]) == len(task.positions)
                is_whole = all(files.items() <= sizes.items() for files in index.files())
                if is_its_own and is_whole and (with_skipped or not index.skipped):
                    complete[task.number] = index
        return complete


def _write_shards(writer: ShardWriter, tasks: Sequence[Task], options: Options) -> list[Index]:
    """Write all shards that are not complete.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        IngestError: a worker was lost. What is done stays.
        ShapesDifferError: a sample has another shape.
        ValueError: what prepares samples cannot be pickled.
    """
    with_skipped = options.on_error == "skip"
    done = set(writer.find_complete(tasks, with_skipped=with_skipped))
    left = [task for task in tasks if task.number not in done]
    missing = sum(len(task.positions) for task in left)
    count = tasks[-1].positions.stop
    if done:
        log.warning(
            "%d of %d samples are prepared: those of new or changed files, of damaged shards, or "
            "that a build that was stopped has left",
            missing,
            count,
        )
    with (
        contextlib.closing(_run(writer, left, options)) as written,
        progress_bar(count, f"preparing {count:,} images") as bar,
    ):
        bar.update(count - missing)
        try:
            for task in written:
                done.add(task.number)
                bar.update(len(task.positions))
        except IngestError as lost:
            if not done:
                raise
            numbers = ", ".join(map(str, sorted(done)))
            raise IngestError(
                f"{str(lost).rstrip('.')}. {len(done)} of {len(tasks)} shards are done ({numbers}) "
                "and stay; run again to go on"
            ) from lost
    complete = writer.find_complete(tasks, with_skipped=with_skipped)
    for task in tasks:
        if task.number not in complete:
            raise IngestError(
                f"{task} was written but is not in {writer.place}: the machines of engine= must "
                "share cache_dir=, or it must be a URL; and one process at a time may build a cache"
            )
    return [complete[task.number] for task in tasks]


def _run(
    writer: ShardWriter, tasks: Sequence[Task], options: Options
) -> Generator[Task, None, None]:
    """Write shards, and yield each when it is written."""
    workers = ingest_workers(options)
    engine = options.engine
    source = writer.path.source
    if engine == "local":
        if 1 < workers <= len(tasks):
            forks = needs_processes(writer.path, writer.plans)
            yield from run_tasks(writer, tasks, workers, forks=forks)
        else:  # too few to go round: all workers at one after the other
            alone = replace(writer, options=replace(writer.options, prepare_workers=workers))
            yield from map(alone, tasks)
        return
    if isinstance(source, FileSource):  # a task has the files of its own samples only
        tasks = [task._replace(columns=source.columns_of(task.positions)) for task in tasks]
        sent = source.over(source.columns_of(()))
        writer = replace(writer, path=writer.path._replace(source=sent))
    if not isinstance(engine, str):
        yield from _run_in(engine, _pickled(writer), tasks)
    elif tasks:
        with _Ray() as ray:
            yield from _run_in(ray, ray.put(writer), tasks)


# Tasks of a build that run elsewhere


def _run_in(executor: Executor, packed: Any, tasks: Sequence[Task]) -> Iterator[Task]:
    running: dict[Future[bytes], Task] = {}
    error = None
    try:
        for task in tasks:
            running[executor.submit(_attempt, packed, task)] = task
        for future in as_completed(running):
            task = running[future]
            _, error, text = pickle.loads(future.result())
            if error is not None:
                break
            yield task
    except Exception as lost:  # an executor raises anything
        what = f"{type(lost).__name__}: {lost}".rstrip(". :")
        name = type(executor).__name__.strip("_")
        raise IngestError(f"{name} has lost {task} ({what})") from lost
    finally:
        # What is being written now stays, too.
        wait([future for future in running if not future.cancel()])
    if error is not None:
        raise error from IngestError(f"in {task}:\n{text}")


def _attempt(packed: bytes, task: Task) -> bytes:
    """What an executor runs: its errors are answers, so that all others are the executor's."""
    return attempt(lambda task: pickle.loads(packed)(task), task)


def _pickled(job: Callable[[Task], Any]) -> bytes:
    try:
        with options_travel():
            return pickle.dumps(job)
    except Exception as problem:  # pickling runs code of the user's
        raise ValueError(
            "engine= sends what reads and prepares samples to other processes, which cannot be "
            f"pickled: {problem}. Use functions of a module in place of lambdas and of functions "
            "within others; or engine='local', which forks, or engine='ray', which sends their "
            "code."
        ) from problem


class _Ray(Executor):
    """The Ray cluster that this process is connected to, or RAY_ADDRESS or this machine has.

    Where there is none it starts one. A task whose node was lost is run again on another one.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as missing:
            text = "engine='ray' needs Ray, which is not installed: pip install 'fastdata[ray]'"
            raise ImportError(text) from missing
        self._ray = ray
        self._refs: list[Any] = []
        self._is_connected = ray.is_initialized()
        if not self._is_connected:
            ray.init(log_to_driver=False, logging_level="error")
        self._task = ray.remote(num_cpus=1, max_retries=_RAY_RETRIES)(_attempt)

    def put(self, job: Callable[[Task], Any]) -> Any:
        """A reference to the pickled job, which each node fetches once."""
        with options_travel():
            return self._ray.put(self._ray.cloudpickle.dumps(job))

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        self._refs.append(self._task.remote(*arguments))
        future: Future[Any] = self._refs[-1].future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what is not done, and let go of the cluster; one that was started here ends."""
        for ref in self._refs:
            self._ray.cancel(ref)
        if not self._is_connected:
            self._ray.shutdown()
