"""Serving from the cache of a dataset: found, brought up to date or written once among any number of processes.

A cache is shards and a manifest that names them, renamed into its place last: a writer that is
killed at any moment leaves it as it was, and the shards that it has done, which the next one takes
over. A shard stays while the files of all its samples are what they were; the samples of all
others, and new ones, go into new shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from fastdata.errors import CacheError, FastDataError, IngestError, SampleError, is_url
from fastdata.machine.memory import (
    StoragePlan,
    fastest_fitting,
    format_bytes,
    parse_bytes,
    usable_cores,
)
from fastdata.machine.shared import PackedPaths, SampleTable
from fastdata.machine.workers import run_tasks
from fastdata.report import log
from fastdata.sources.remote import Place, made_by_this_user
from fastdata.stores.cache.manifest import (
    Cache,
    Columns,
    Manifest,
    Mirroring,
    Part,
    orphans_in,
    read_settled,
    target_columns,
    targets_of,
)
from fastdata.stores.cache.shards import (
    MOST_SHARDS,
    ShardWriter,
    Written,
    done_files,
    make_tasks,
    samples_per_shard,
    write_shards,
)
from fastdata.stores.codecs import codec_of, describe_codec, find_codec
from fastdata.stores.files import free_bytes, naming_full_disk
from fastdata.stores.prepare import (
    Forecast,
    Options,
    Prepared,
    coders_of,
    forecast,
    look_longer,
    try_all,
    warn_of_skipped,
)
from fastdata.stores.readers import DAMAGE_PREFIX, Decoder
from fastdata.stores.samples import KeptSamples, ReadPath
from fastdata.stores.writers import ShapesDifferError, WriterPlan

Int64s = npt.NDArray[np.int64]
Listing = Mapping[str, np.ndarray]

SOURCE = "source"
_NAME_CHARACTERS = 12
_FILES_PER_TASK = 50_000
_NO_FILE = -1
_SPARE_BYTES = 256 << 20
"""Left on the disk where the choice is ours."""
_SAY_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The samples that are to be served: where they come from, and where their cache is if there is one.

    Args:
        path: that samples are read by.
        options: as given by the user, with ``cache_dir``.
        table: paths and targets where they are known beforehand; else targets are kept in the
            cache.
        listing: the files, where samples are files.
        key: what they depend on besides their files.
        root: folder of the files; empty where there is none.
        place: of the cache.
    """

    path: ReadPath
    options: Options
    table: SampleTable | None
    listing: Listing | None
    key: dict[str, str]
    root: str
    place: Place

    @property
    def home(self) -> Path:
        """Of a cache here; of one behind a URL only what its lock on this machine is named after."""
        if self.place.is_remote:
            return self.mirroring.folder / self.place.url.rpartition("/")[2]
        return Path(self.place.url)

    @property
    def mirroring(self) -> Mirroring:
        return Mirroring(self.options.local_cache, self.options.local_limit)

    @property
    def coders(self) -> list[Decoder]:
        """Those that a cache's own words may not be enough to make."""
        given, decoder = self.options.codec, self.path.decoder
        codecs = (
            given
            if isinstance(given, (tuple, list))
            else ()
            if given in ("auto", SOURCE)
            else (given,)
        )
        return [*map(find_codec, codecs), *([] if decoder is None else [decoder])]


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
    key = {
        "source": opened,
        "prepare": steps,
        "codec": describe_codec(options.codec, options.cache_key),
    }
    root = os.path.abspath(os.path.expanduser(root)) if root and not is_url(root) else root
    name = _name_of(key, root, listing if is_own_list else None)
    place = Place(options.cache_dir, options.storage_options).below(name)
    wanted = _Wanted(path, options, table, listing, key, root, place)
    prepared, why = _opened(wanted)
    if prepared is not None:
        return prepared
    needed = why or "it holds no cache of these samples that is up to date"
    with _writable(wanted.home.parent, needed), locked(wanted.home):
        prepared, why = _opened(wanted)  # another process may have written it meanwhile
        if prepared is None:
            _write(wanted, why)
            prepared, why = _opened(wanted)
    if prepared is None:
        raise CacheError(
            f"{place} was written but cannot be read: {why or 'files changed meanwhile'}"
        )
    warn_of_skipped(prepared.skipped, len(path.source))
    return prepared


def _name_of(key: Mapping[str, str], root: str, listing: Listing | None) -> str:
    """Of the folder of a cache."""
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
    text = json.dumps({**key, "root": root}, sort_keys=True)
    name = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:_NAME_CHARACTERS]}"
    if listing is None:
        return name
    digest = hashlib.sha256(listing["ends"].data)
    digest.update(listing["paths"].data)
    return f"{name}-{digest.hexdigest()[:_NAME_CHARACTERS]}"


# Opening


def _opened(wanted: _Wanted) -> tuple[Prepared | None, str]:
    """What a complete cache serves, or why it cannot; no reason where there is none or some samples are stale."""
    try:
        return read_settled(wanted.place, partial(_serve_complete, wanted), wanted.mirroring), ""
    except FileNotFoundError:
        return None, ""
    except CacheError as damaged:
        return None, str(damaged)


def _serve_complete(wanted: _Wanted, cache: Cache) -> Prepared | None:
    rows = _rows_now(wanted, cache)
    if (rows < 0).any():
        return None
    prepared = serve(cache, rows, wanted.coders, wanted.table)
    # of a writer that died after its work was done
    if not wanted.place.is_remote and orphans_in(wanted.home, cache.manifest.file_names()):
        with contextlib.suppress(OSError, Timeout), locked(wanted.home, wait=False):
            _sweep(wanted.place)
    return prepared


def _rows_now(wanted: _Wanted, cache: Cache) -> Int64s:
    """The row of each sample, or -1 where it is not up to date; CacheError for a cache of other samples."""
    place, manifest, columns = cache.place, cache.manifest, cache.columns
    count = len(wanted.path.source)
    if manifest.key != wanted.key or (wanted.listing is not None and "paths" not in columns):
        raise CacheError(f"{place} was made in another way")
    if wanted.listing is not None:
        match = _match_files(wanted.listing, columns)
    elif manifest.count == count:
        match = np.arange(count)
    else:
        raise CacheError(f"{place} holds {manifest.count} samples, but there are {count} now")
    is_sound = columns["is_kept"] | (wanted.options.on_error == "skip")
    damaged = set() if place.is_remote else damaged_files(wanted.home)
    for first, shard in zip(manifest.first_rows(), manifest.shards, strict=False):
        if damaged & manifest.files(shard).keys():
            is_sound[first : first + shard.rows] = False
    rows = np.append(columns["rows"], -1)[match]  # -1 finds what is appended
    return np.where((rows >= 0) & np.append(is_sound, False)[rows], rows, -1)


def damaged_files(home: Path) -> set[str]:
    """Those in which a reader has found bytes that are not what was written."""
    return {path.name.removeprefix(DAMAGE_PREFIX) for path in home.glob(f"{DAMAGE_PREFIX}*")}


def serve(
    cache: Cache, rows: Int64s, known: Sequence[Decoder], table: SampleTable | None
) -> Prepared:
    """Map the samples of a cache in these rows, but for those that were left out.

    Args:
        cache: as it was read.
        rows: int64 (N,), of each sample.
        known: what may decode a part, beside fastdata's own codecs.
        table: of all samples; None makes one of the targets that the cache keeps.
    """
    place, manifest = cache.place, cache.manifest
    kept = np.flatnonzero(cache.columns["is_kept"][rows])
    if not len(kept):
        raise CacheError(f"{place} holds no sample")
    with contextlib.ExitStack() as cleanup:
        stores = []
        for number, part in enumerate(manifest.parts):
            stores.append(cache.open_part(number, rows[kept], _coder_of(place, part, known)))
            cleanup.callback(stores[-1].close)
        if table is None:
            table = SampleTable(stored_targets(cache, rows[kept]))
        elif len(kept) < len(table):
            table = table.reduced_to(kept.tolist())
        cleanup.pop_all()
    what = "+".join(dict.fromkeys(store.codec for store in stores))
    reason = f"storage='disk': {format_bytes(manifest.size_bytes)} {what} in {place}"
    log.info("%s", reason)
    kinds = manifest.is_tuple, manifest.target_is_part, manifest.keys
    skipped = {entry.row: entry for entry in manifest.skipped}
    pairs = (
        [(i, skipped[row]) for i, row in enumerate(rows.tolist()) if row in skipped]
        if skipped
        else []
    )
    return Prepared(
        storage_plan=StoragePlan(
            storage="disk", reason=reason, codec=None if what == "raw" else what
        ),
        kept=KeptSamples(tuple(stores), table, *kinds, mask_places=manifest.mask_places),
        skipped=[SampleError(entry.message, index=i, path=entry.path) for i, entry in pairs],
    )


def _coder_of(place: Place, part: Part, known: Sequence[Decoder]) -> Decoder | None:
    """What encodes and decodes a part; None where it is raw."""
    if part.codec is None:
        return None
    for coder in known:
        if coder.settings() == part.codec:
            return coder
    its_dataset = f"open that, with cache_dir={place.url.rpartition('/')[0]!r}"
    if part.codec["name"] == SOURCE:
        raise CacheError(
            f"{place} holds image files as they are, and what prepares them on every read is known to their dataset "
            f"alone; {its_dataset}, or build a cache with another codec"
        )
    try:
        return codec_of(part.codec)
    except ValueError as unknown:
        raise CacheError(
            f"{place} cannot be opened on its own: {unknown}. A codec object of your own is known to the dataset that "
            f"the cache was made from: {its_dataset} and codec="
        ) from unknown


def stored_targets(cache: Cache, rows: Int64s) -> Any:
    """The targets of rows that are kept: numbers in one array, else a list."""
    if cache.manifest.target_is_part:
        return np.zeros(len(rows), np.int64)
    stored = targets_of(cache.columns)
    chosen = (np.cumsum(cache.columns["is_kept"]) - 1)[rows]
    return (
        stored[chosen] if isinstance(stored, np.ndarray) else [stored[i] for i in chosen.tolist()]
    )


# Writing


class _Draft(NamedTuple):
    """A cache that lacks some samples.

    Args:
        manifest: with the shards that stay.
        plans: of the files of each part of the samples that it lacks.
        columns: by row of those that stay.
        targets: of the rows that are kept; none where the source has them.
        rows: int64 (N,), of each sample; -1 of those that it lacks.
    """

    manifest: Manifest
    plans: Sequence[WriterPlan]
    columns: Columns
    targets: list[Any]
    rows: Int64s

    def of_any_shapes(self) -> _Draft:
        """The same without any shard, for samples that turned out to differ."""
        parts = [replace(part, spec=replace(part.spec, shape=None)) for part in self.manifest.parts]
        manifest = replace(self.manifest, parts=tuple(parts), shards=(), skipped=())
        plans = [plan.of_any_shapes() for plan in self.plans]
        return _Draft(manifest, plans, {}, [], np.full_like(self.rows, -1))


def _write(wanted: _Wanted, why: str) -> None:
    """Bring the cache up to date; or write all of it, where there is a reason why it cannot be used. Under the lock."""
    is_done = False
    if not wanted.place.is_remote:  # there another machine may be writing
        wanted.home.mkdir(parents=True, exist_ok=True)
        _sweep(wanted.place, is_done=False)
        for path in [] if wanted.home.is_symlink() else wanted.home.glob("*.*"):
            with contextlib.suppress(OSError):
                path.rmdir()  # a file may have to take its place
    try:
        draft = None
        if why:
            log.warning("the cache is written anew: %s", why)
        else:
            with contextlib.suppress(FileNotFoundError):
                draft = read_settled(wanted.place, partial(_draft_of, wanted), wanted.mirroring)
        _fill(wanted, draft or _begin(wanted))
        is_done = True
    finally:  # what went out of use, or what an error or Ctrl-C left half done; shards that are done stay until all are
        with contextlib.suppress(OSError):
            if is_done or not wanted.place.is_remote:
                _sweep(wanted.place, is_done=is_done)
            if not wanted.place.is_remote:
                wanted.home.rmdir()  # where nothing is in it


def _draft_of(wanted: _Wanted, cache: Cache) -> _Draft | None:
    """What may stay of a cache; None where that is nothing."""
    manifest, columns = cache.manifest, cache.columns
    rows = _rows_now(wanted, cache)
    is_current = np.zeros(manifest.count, np.bool_)
    is_current[rows[rows >= 0]] = True
    firsts = manifest.first_rows()[:-1].tolist()
    pairs = zip(firsts, manifest.shards, strict=True)
    staying = [shard for first, shard in pairs if is_current[first : first + shard.rows].all()]
    if len(staying) >= MOST_SHARDS:  # those that updates have left small are joined
        size = samples_per_shard(manifest.count, manifest.size_bytes, None)
        staying = [shard for shard in staying if 4 * shard.rows >= 3 * size]
    if not staying:
        log.warning(
            "the cache is written anew: %d of its samples are not up to date", (rows < 0).sum()
        )
        return None
    stays = np.repeat(
        [shard in staying for shard in manifest.shards], [shard.rows for shard in manifest.shards]
    )
    new_rows = np.append(np.where(stays, np.cumsum(stays) - 1, -1), -1)
    skipped = [
        replace(entry, row=int(new_rows[entry.row]))
        for entry in manifest.skipped
        if stays[entry.row]
    ]
    kept = np.flatnonzero(stays & columns["is_kept"])
    targets = stored_targets(cache, kept) if wanted.table is None else []
    draft = _Draft(
        replace(manifest, shards=tuple(staying), skipped=tuple(skipped)),
        [],
        {name: column[stays] for name, column in columns.items() if _is_by_row(name)},
        targets.tolist() if isinstance(targets, np.ndarray) else targets,
        _without_repeats(new_rows[rows]),
    )
    missing = int((draft.rows < 0).sum())
    reason = "files in their shards are new or changed, or damaged in the cache"
    log.warning("%d of %d samples are prepared anew: %s", missing, len(rows), reason)
    plans = [
        _plan_again(wanted, manifest, number, columns, missing)
        for number in range(len(manifest.parts))
    ]
    return draft._replace(plans=plans)


def _is_by_row(name: str) -> bool:
    return name == "is_kept" or name.startswith("part")


def _without_repeats(rows: Int64s) -> Int64s:
    """A file that is listed twice has a row for each: all but the first are to be prepared."""
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(rows, return_index=True)[1]] = True
    return np.where(is_first, rows, -1)


def _plan_again(
    wanted: _Wanted, manifest: Manifest, number: int, columns: Columns, missing: int
) -> WriterPlan:
    """Of so many more samples of a part of a cache."""
    part = manifest.parts[number]
    size_bytes = sum(shard.sizes[number] for shard in manifest.shards)
    return WriterPlan(
        spec=part.spec,
        dimensions=0 if part.is_table else columns[f"part{number}.shapes"].shape[1],
        codec=_coder_of(wanted.place, part, wanted.coders),
        first_bytes=size_bytes * missing // manifest.count,
    )


def _begin(wanted: _Wanted) -> _Draft:
    """A cache that has no samples yet."""
    source = wanted.path.source
    expected = forecast(wanted.path)
    if not expected.first.target_is_part:
        with contextlib.closing(
            SampleTable([sample.target for sample in expected.looked_at])
        ) as table:
            target_columns(table, np.arange(len(table)))  # an error now, if they cannot be kept
    choice, part_bytes = _choose_codec(wanted, expected)
    coders = coders_of(choice, wanted.path, wanted.options.codec, len(expected.specs))
    parts = tuple(
        Part(spec=spec, codec=None if coder is None else dict(coder.settings()))
        for spec, coder in zip(expected.specs, coders, strict=True)
    )
    plans = [
        WriterPlan(
            spec=part.spec,
            dimensions=0 if part.is_table else looked_at.array.ndim,
            codec=coder,
            is_certain=part.spec.shape == wanted.path.shape,
            first_bytes=first_bytes,
        )
        for part, looked_at, coder, first_bytes in zip(
            parts, expected.first.parts, coders, part_bytes, strict=True
        )
    ]
    manifest = Manifest(
        key=wanted.key,
        root=wanted.root,
        parts=parts,
        shards=(),
        is_tuple=expected.first.is_tuple,
        target_is_part=expected.first.target_is_part,
        mask_places=expected.first.mask_places,
        keys=expected.keys,
    )
    return _Draft(manifest, plans, {}, [], np.full(len(source), -1))


def _choose_codec(wanted: _Wanted, expected: Forecast) -> tuple[str | None, Sequence[int]]:
    """Keep samples raw where the disk has room for them, else by the fastest lossless codec, or as the user says.

    Returns:
        The name of what encodes them, None for raw ones, and about how many bytes all samples take
        of each part.
    """
    codec, raw = wanted.options.codec, (None, expected.part_bytes)
    is_free, free = codec == "auto", max(free_bytes(wanted.home) - _SPARE_BYTES, 0)
    if is_free and (
        wanted.place.is_remote or expected.need_bytes <= free
    ):  # a bucket is never full
        return raw
    trials = try_all(wanted.path, look_longer(wanted.path), codec)
    best = fastest_fitting(trials, free if is_free else None, only_lossless=is_free)
    if best is None and not is_free:
        raise ValueError(f"codec={codec!r} is not possible here: {trials[0].obstacle}")
    if best is None:
        return raw  # its writer says need, free and cure
    if is_free:
        log.info(
            "codec=%r: raw %s, %s free",
            best.codec,
            format_bytes(expected.need_bytes),
            format_bytes(free),
        )
    return best.codec, best.part_bytes


def _fill(wanted: _Wanted, draft: _Draft) -> None:
    """Prepare the samples that a cache lacks into more shards, and let it hold them from now on."""
    try:
        written = _prepare_missing(wanted, draft)
    except ShapesDifferError as found:
        if not any(part.spec.is_dense for part in draft.manifest.parts):
            raise IngestError(f"{found}; make them alike") from None
        if draft.manifest.shards:
            log.warning(
                "the cache is written anew: the changed samples have other shapes than those in the cache"
            )
        log.info("%s; samples are stored one by one with their own shapes", found)
        _fill(wanted, draft.of_any_shapes())
        return
    manifest = _extended(draft.manifest, written)
    first_row, missing = draft.manifest.count, draft.rows < 0
    rows = draft.rows.copy()
    rows[missing] = np.arange(first_row, manifest.count)
    columns: Columns = {"rows": rows, **(wanted.listing or {})}
    by_row = [draft.columns] * bool(first_row) + [each.columns for each in written]
    for name in by_row[-1]:
        columns[name] = np.concatenate([each[name] for each in by_row])
    if not columns["is_kept"].any():
        raise IngestError(
            f"none of the {len(rows)} samples can be prepared; the first: {manifest.skipped[0].message}"
        )
    if wanted.table is not None:
        columns |= target_columns(wanted.table, np.argsort(rows)[columns["is_kept"]])
        manifest = replace(manifest, classes=wanted.table.class_to_idx)
    elif not manifest.target_is_part:
        targets = [*draft.targets, *(target for each in written for target in each.targets)]
        with contextlib.closing(SampleTable(targets)) as table:
            columns |= target_columns(table, np.arange(len(table)))
    manifest.write(wanted.place, columns)


def _prepare_missing(wanted: _Wanted, draft: _Draft) -> list[Written]:
    manifest, missing = draft.manifest, np.flatnonzero(draft.rows < 0)
    need_bytes = sum(plan.first_bytes for plan in draft.plans)
    asked = wanted.options.shard_bytes
    if (
        asked is not None and manifest.shards
    ):  # for the shards that there are already the user is not to blame
        asked = max(parse_bytes(asked, of=0), need_bytes // MOST_SHARDS + 1)
    size = samples_per_shard(len(missing), need_bytes, asked)
    words = [
        manifest.key,
        len(draft.rows) if wanted.listing is None else None,
        *map(dataclasses.asdict, manifest.parts),
    ]
    tasks = make_tasks(missing, size, words, wanted.listing)
    options = Options(on_error=wanted.options.on_error, num_workers=1, progress=False)
    plans = [
        replace(plan, first_bytes=max(plan.first_bytes // len(tasks), 1)) for plan in draft.plans
    ]
    writer = ShardWriter(
        path=wanted.path,
        plans=tuple(plans),
        parts=manifest.parts,
        place=wanted.place,
        options=options,
        with_targets=wanted.table is None and not manifest.target_is_part,
    )
    return write_shards(writer, tasks, wanted.options)


def _extended(manifest: Manifest, written: Sequence[Written]) -> Manifest:
    """With more shards."""
    skipped = list(manifest.skipped)
    first_row = manifest.count
    for each in written:
        skipped += [replace(entry, row=first_row + entry.row) for entry in each.skipped]
        first_row += each.shard.rows
    shards = (*manifest.shards, *(each.shard for each in written))
    return replace(manifest, shards=shards, skipped=tuple(skipped))


def _sweep(place: Place, *, is_done: bool = True) -> None:
    """Remove the files of a cache that its manifest does not name; none of one that cannot be read, maybe just now.

    ``is_done``: those of shards, too, that are done, of a build that is not.
    """
    belong: set[str] = set()
    with contextlib.suppress(CacheError):
        with contextlib.suppress(FileNotFoundError):
            belong = Manifest.read(place).file_names()
        names = {entry.name for entry in place.find() if "/" not in entry.name}
        orphans = names - belong
        if not place.is_remote:
            orphans = {
                path.name for path in orphans_in(Path(place.url), belong) if made_by_this_user(path)
            }
        place.remove(*sorted(orphans if is_done else orphans - done_files(names)))


def lock_file(home: Path) -> Path:
    return home.with_name(f".{home.name}.lock")


@contextlib.contextmanager
def locked(home: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a cache's writer, which the system frees when its holder dies; TimeoutError if not to wait."""
    lock = FileLock(lock_file(home))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise
        log.warning("another process is writing %s; this one waits for it", home)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=_SAY_AGAIN_S)
            except Timeout:
                sizes = (
                    [entry.stat().st_size for entry in os.scandir(home)] if home.is_dir() else []
                )
                log.warning("still waiting: %s are there", format_bytes(sum(sizes)))
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _writable(cache_dir: Path, why: str) -> Iterator[None]:
    """Make a folder if it is not there; a CacheError says of one that cannot be written why it has to be."""
    try:
        with naming_full_disk(cache_dir / "any"):
            cache_dir.mkdir(parents=True, exist_ok=True)
            yield
    except OSError as problem:
        is_refused = problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        if isinstance(problem, FastDataError) or not (is_refused or problem.filename):
            raise
        shown = f"cache_dir={str(cache_dir)!r}"
        if problem.errno in (errno.ENOTDIR, errno.EEXIST):
            raise CacheError(
                f"{shown} is no folder: {problem.filename} is a file. Name another one."
            ) from problem
        raise CacheError(
            f"{shown} cannot be written ({problem.strerror}), and {why}. Name a folder that can be written, or run "
            "`fastdata build` where it can."
        ) from problem


# The files that a cache is made from: their names, sizes and times


def list_paths(paths: Sequence[str], root: str, facts: Int64s | None = None) -> Listing:
    """The files of a dataset, one for each sample: their names, sizes and times.

    ``paths``, uint8, has the names end to end, relative to the root where they lie below it, and
    ``ends``, int64 (N,), where each ends; ``file_sizes`` and ``mtimes_ns``, int64 (N,), are -1
    where there is no file. Of remote files ``facts`` has both, (2, N), of which the second stand
    for their content.
    """
    prefix = os.path.join(os.path.expanduser(root), "") if root else ""
    sizes, mtimes_ns = _ask_files(paths) if facts is None else facts
    packed = PackedPaths.of([os.fspath(path).removeprefix(prefix) for path in paths])
    return {"paths": packed.blob, "ends": packed.ends, "file_sizes": sizes, "mtimes_ns": mtimes_ns}


def _match_files(new: Listing, old: Mapping[str, np.ndarray]) -> Int64s:
    """For each file its index in an older listing, or -1 where it is not there or was written since."""
    if np.array_equal(new["ends"], old["ends"]) and np.array_equal(new["paths"], old["paths"]):
        match = np.arange(len(new["ends"]))
    else:
        index = {name: i for i, name in enumerate(PackedPaths(old["paths"], old["ends"]).names())}
        names = PackedPaths(new["paths"], new["ends"]).names()
        match = np.array([index.get(name, -1) for name in names], np.int64)
    if not len(old["ends"]):
        return match
    is_same = (match >= 0) & (new["file_sizes"] >= 0)
    for name in ("file_sizes", "mtimes_ns"):
        is_same &= new[name] == old[name][match]
    return np.where(is_same, match, -1)


def _ask_files(paths: Sequence[str]) -> Int64s:
    """Size and time of each file, int64 (2, files); 1,300,000 are a matter of seconds."""
    count = len(paths)
    asked = np.full((2, count), _NO_FILE, np.int64)
    tasks = [range(i, min(i + _FILES_PER_TASK, count)) for i in range(0, count, _FILES_PER_TASK)]

    def ask(files: range) -> tuple[range, Int64s]:
        return files, np.array([_ask(paths[i]) for i in files], np.int64).T

    with contextlib.closing(
        run_tasks(ask, tasks, usable_cores() if len(tasks) > 4 else 0)
    ) as answers:
        for files, answer in answers:
            asked[:, files.start : files.stop] = answer
    return asked


def _ask(name: str) -> tuple[int, int]:
    try:
        found = os.stat(name)
    except (OSError, ValueError):  # no such file, or a name that cannot be one
        return _NO_FILE, _NO_FILE
    return found.st_size, found.st_mtime_ns
