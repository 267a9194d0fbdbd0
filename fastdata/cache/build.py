"""Serving from the cache of a dataset: found, brought up to date or written once among any number of processes.

A writer puts files under new names beside those that are in use, and last renames a manifest that names them into its
place: killed at any moment it leaves the cache as it was. What it left is removed by the next one.
"""

from __future__ import annotations

import contextlib
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

from fastdata.cache.manifest import (
    MANIFEST,
    Columns,
    Manifest,
    Mirroring,
    Part,
    Skipped,
    marks_in,
    open_part,
    read_settled,
    strays_in,
    target_columns,
    targets_of,
)
from fastdata.cache.shards import Written, unfinished, write_shards, written_of
from fastdata.codecs import codec_of, describe_codec, find_codec
from fastdata.errors import CacheError, FastDataError, SampleError, is_url
from fastdata.memory import StoragePlan, fastest_fitting, format_bytes, usable_cores
from fastdata.prepare import (
    Forecast,
    KeptSamples,
    Options,
    Prepared,
    ReadPath,
    coders_of,
    forecast,
    ingest,
    look_longer,
    try_all,
    warn_of_skipped,
)
from fastdata.remote import Place, made_by_this_user
from fastdata.report import log
from fastdata.shared import PackedPaths, SampleTable
from fastdata.stores.files import free_bytes, naming_full_disk
from fastdata.stores.readers import Decoder
from fastdata.stores.writers import ShapesDifferError, WriterPlan
from fastdata.workers import run_tasks

Int64s = npt.NDArray[np.int64]
Listing = Mapping[str, np.ndarray]

SOURCE = "source"
_NAME_CHARACTERS = 12
_FILES_PER_TASK = 50_000
_NO_FILE = -1
_MOST_CHANGED = 0.5
_MOST_FILES = 256
"""Of a part: every process keeps descriptors open for each, and 1,024 is a usual limit."""
_SPARE_BYTES = 256 << 20
"""Left on the disk where the choice is ours."""
_SAY_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The samples that are to be served: where they come from, and where their cache is if there is one.

    Args:
        path: that samples are read by.
        options: as given by the user, with ``cache_dir``.
        table: paths and targets where they are known beforehand; else they are kept in the cache.
        listing: the files, where samples are files.
        key: what they depend on besides their files.
        root: folder of the files; empty where there is none.
        place: of the cache.
        family: what the names of the caches of other lists over the same root begin with; empty where there are none.
    """

    path: ReadPath
    options: Options
    table: SampleTable | None
    listing: Listing | None
    key: dict[str, str]
    root: str
    place: Place
    family: str = ""

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
    def is_sharded(self) -> bool:
        """Whether it is written as shards: by other machines, to one, or because the user says so."""
        return self.options.engine != "local" or self.options.shard_bytes is not None or self.place.is_remote

    @property
    def coders(self) -> list[Decoder]:
        """Those that a cache's own words may not be enough to make."""
        given, decoder = self.options.codec, self.path.decoder
        codecs = given if isinstance(given, (tuple, list)) else () if given in ("auto", SOURCE) else (given,)
        return [*map(find_codec, codecs), *([] if decoder is None else [decoder])]


class Found(NamedTuple):
    """A cache held against the samples as they are now.

    place: of the cache. manifest, columns: its own. match: int64 (N,), for each sample its index when the cache was
    written, or -1 where it is not up to date. rows: int64 (parts, N), the row of each sample; -1 where it was left out
    or is not up to date. marks: files that name damaged rows.
    """

    place: Place
    manifest: Manifest
    columns: Columns
    match: np.ndarray
    rows: np.ndarray
    marks: Sequence[Path] = ()


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

    ``opened`` and ``steps`` say what opens and what prepares them, ``is_own_list`` that somebody chose the files, so
    that others over the same root have caches of their own; the rest is as in ``_Wanted``.

    Raises:
        SampleError: a sample cannot be prepared.
        CacheError: the cache cannot be written.
        ValueError: samples or targets cannot be kept in files.
    """
    assert options.cache_dir is not None
    key = {"source": opened, "prepare": steps, "codec": describe_codec(options.codec, options.cache_key)}
    root = os.path.abspath(os.path.expanduser(root)) if root and not is_url(root) else root
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
    text = json.dumps({**key, "root": root}, sort_keys=True)
    name, family = f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:_NAME_CHARACTERS]}", ""
    if listing is not None and is_own_list:
        digest = hashlib.sha256(listing["ends"].data)
        digest.update(listing["paths"].data)
        name, family = f"{name}-{digest.hexdigest()[:_NAME_CHARACTERS]}", name
    place = Place(options.cache_dir, options.storage_options).below(name)
    wanted = _Wanted(path, options, table, listing, key, root, place, family)
    prepared, why = _opened(wanted)
    if prepared is None:
        home, needed = wanted.home, why or "it holds no cache of these samples that is up to date"
        with _writable(home.parent, needed), locked(home):
            prepared, why = _opened(wanted)  # another process may have written it meanwhile
            if prepared is None:
                _write(wanted, why)
                prepared, why = _opened(wanted)
        if prepared is None:
            raise CacheError(f"{wanted.place} was written but cannot be read: {why or 'files changed meanwhile'}")
        warn_of_skipped(prepared.skipped, len(path.source))
    return prepared


def _opened(wanted: _Wanted) -> tuple[Prepared | None, str]:
    """What a complete cache serves, or why it cannot; no reason where there is none or some samples are stale."""
    try:
        return read_settled(wanted.place, partial(_serve_complete, wanted), wanted.mirroring), ""
    except FileNotFoundError:
        return None, ""
    except CacheError as damaged:
        return None, str(damaged)


def _serve_complete(wanted: _Wanted, manifest: Manifest, columns: Columns) -> Prepared | None:
    found = _hold_against(wanted, manifest, columns)
    if (found.match < 0).any():
        return None
    if wanted.place.is_remote:
        return serve(found, wanted.coders, wanted.table)
    _relabel(wanted, found)
    prepared = serve(found, wanted.coders, wanted.table)
    if strays_in(wanted.home, manifest.file_names()):  # of a writer that died after its work was done
        with contextlib.suppress(OSError, Timeout), locked(wanted.home, wait=False):
            _sweep(wanted.place)
    return prepared


def _hold_against(wanted: _Wanted, manifest: Manifest, columns: Columns) -> Found:
    """A cache against the samples as they are now; CacheError where it is another one's."""
    place, count = wanted.place, len(wanted.path.source)
    if manifest.key != wanted.key or (wanted.listing is not None and "paths" not in columns):
        raise CacheError(f"{place} was made in another way")
    if wanted.listing is not None:
        match = unchanged(wanted.listing, columns)
    elif manifest.count == count:
        match = np.arange(count)
    else:
        raise CacheError(f"{place} holds {manifest.count} samples, but there are {count} now")
    rows, marks = columns["rows"], [] if place.is_remote else marks_in(wanted.home)
    is_bad = np.zeros(manifest.count, np.bool_)
    if wanted.options.on_error == "raise":
        is_bad |= rows[0] < 0
    for _, name, row in marks:
        for part, part_rows in zip(manifest.parts, rows, strict=True):
            names = [file.name for file in part.files]
            if name in names:
                is_bad |= part_rows == row + sum(file.rows for file in part.files[: names.index(name)])
    match = np.where(np.append(is_bad, True)[match], -1, match)  # -1 finds what is appended
    rows = np.append(rows, np.full((len(rows), 1), -1), axis=1)[:, match]
    return Found(place, manifest, columns, match, rows, [path for path, _, _ in marks])


def _relabel(wanted: _Wanted, found: Found) -> None:
    """Keep the labels of now where other ones are kept of the same files; if nobody is writing."""
    old, table = found.manifest, wanted.table
    if table is None or not np.array_equal(found.match, np.arange(old.count)):
        return
    targets = target_columns(table, np.flatnonzero(found.rows[0] >= 0))
    others = {name: column for name, column in found.columns.items() if not name.startswith("targets.")}
    kept = {name: column for name, column in found.columns.items() if name not in others}
    are_same = {name: _plain(it) for name, it in kept.items()} == {name: _plain(it) for name, it in targets.items()}
    if are_same and old.classes == table.class_to_idx:
        return
    log.info("the labels in %s are brought up to date", wanted.place)
    with contextlib.suppress(OSError, Timeout), locked(wanted.home, wait=False):
        if Manifest.read(wanted.place) == old:
            new = replace(old, generation=old.generation + 1, classes=table.class_to_idx)
            new.write(wanted.place, {**others, **targets})
            _sweep(wanted.place)


def _plain(column: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return column.dtype.str, column.shape, column.tobytes()


def serve(found: Found, known: Sequence[Decoder], table: SampleTable | None) -> Prepared:
    """Map the samples of a cache that are up to date and were not left out.

    Args:
        found: what of the cache is to be served.
        known: what may decode a part, beside fastdata's own codecs.
        table: of all samples; None makes one of the targets that the cache keeps.
    """
    place, manifest, kept = found.place, found.manifest, np.flatnonzero(found.rows[0] >= 0)
    if not len(kept):
        raise CacheError(f"{place} holds no sample")
    with contextlib.ExitStack() as cleanup:
        stores = []
        for part, rows in zip(manifest.parts, found.rows, strict=True):
            coder = _coder_of(place, part, known)
            stores.append(open_part(Path(place.url), part, found.columns, rows[kept], coder))
            cleanup.callback(stores[-1].close)
        if table is None:
            table = SampleTable(kept_targets(found, kept))
        elif len(kept) < len(table):
            table = table.reduced_to(kept.tolist())
        cleanup.pop_all()
    what = "+".join(dict.fromkeys(store.codec for store in stores))
    reason = f"storage='disk': {format_bytes(manifest.size_bytes)} {what} in {place}"
    log.info("%s", reason)
    kinds = manifest.is_tuple, manifest.target_is_part, manifest.keys
    return Prepared(
        storage_plan=StoragePlan(storage="disk", reason=reason, codec=None if what == "raw" else what),
        kept=KeptSamples(tuple(stores), table, *kinds, mask_places=manifest.mask_places),
        skipped=_skipped_of(found),
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


def kept_targets(found: Found, kept: np.ndarray) -> Any:
    """The targets of these samples, which the cache keeps: numbers in one array, else a list."""
    if found.manifest.target_is_part:
        return np.zeros(len(kept), np.int64)
    stored = targets_of(found.columns)
    chosen = (np.cumsum(found.columns["rows"][0] >= 0) - 1)[found.match[kept]]
    return stored[chosen] if isinstance(stored, np.ndarray) else [stored[i] for i in chosen.tolist()]


def _skipped_of(found: Found) -> list[SampleError]:
    then = {entry.index: entry for entry in found.manifest.skipped}
    left_out = np.flatnonzero((found.match >= 0) & (found.rows[0] < 0)).tolist() if then else []
    pairs = [(i, then[int(found.match[i])]) for i in left_out if int(found.match[i]) in then]
    return [SampleError(entry.message, index=i, path=entry.path) for i, entry in pairs]


def _write(wanted: _Wanted, why: str) -> None:
    """Bring the cache up to date; or write all of it, where there is a reason why it cannot be used. Under the lock."""
    folder, place, is_done, found = wanted.home, wanted.place, False, None
    if not place.is_remote:  # there another machine may be writing
        folder.mkdir(parents=True, exist_ok=True)
        # workers of a writer that was killed live on for a second, and write on to files without a name
        _sweep(place, with_shards=not wanted.is_sharded)
    try:
        if not why:
            with contextlib.suppress(FileNotFoundError):
                found = read_settled(place, partial(_hold_against, wanted), wanted.mirroring)
            found = found or _borrowed(wanted)
        if found is not None and _is_worth_updating(found):
            reason = "their files are new, were changed, or could not be prepared before"
            if found.marks:
                reason = f"{len(found.marks)} were found damaged in the cache"
            missing, count = int((found.match < 0).sum()), len(found.match)
            if missing:
                log.warning("%d of %d samples are prepared anew: %s", missing, count, reason)
            part_bytes = [part.size_bytes * missing // max(part.rows, 1) for part in found.manifest.parts]
            try:
                _fill(wanted, found, part_bytes)
                is_done = True
                return
            except ShapesDifferError:
                why = "the changed samples have other shapes than those in the cache"
            if not place.is_remote:
                _sweep(place)
        elif found is not None:
            why = f"{int((found.match < 0).sum())} of its samples are not up to date"
        if why:
            log.warning("the cache is written anew: %s", why)
        _fill(wanted, *_begin(wanted))
        is_done = True
    finally:  # what went out of use, or what an error or Ctrl-C left half done; shards that are done stay until all are
        with contextlib.suppress(OSError):
            if is_done or not place.is_remote:
                _sweep(place, with_shards=is_done or not wanted.is_sharded)
            if not place.is_remote:
                folder.rmdir()  # where nothing is in it


def _borrowed(wanted: _Wanted) -> Found | None:
    """What the cache of another list over the same root has of these samples, its files linked into this one's folder.

    Files of a cache never change, so that both may have them; whoever is removed leaves them to the other.
    """
    best: Found | None = None
    folders = wanted.home.parent.glob(f"{wanted.family}-*") if wanted.family and not wanted.place.is_remote else ()
    for folder in folders:
        other = replace(wanted, place=Place(folder))
        with contextlib.suppress(CacheError, FileNotFoundError):
            found = read_settled(folder, partial(_hold_against, other))
            if best is None or (found.match >= 0).sum() > (best.match >= 0).sum():
                best = found
    if best is None or not _is_worth_updating(best):
        return None
    lender = Path(best.place.url)
    with contextlib.suppress(OSError, Timeout), locked(lender, wait=False):  # one without links is prepared from files
        for name in best.manifest.file_names() - {MANIFEST, best.manifest.index_name}:
            os.link(lender / name, wanted.home / name)
        log.info("%s takes over files of %s", wanted.place, lender)
        return best._replace(place=wanted.place, marks=())
    return None


def _is_worth_updating(found: Found) -> bool:
    parts, count = found.manifest.parts, len(found.match)
    missing = int((found.match < 0).sum())
    rows_then = max(part.rows for part in parts) + missing
    is_room = max(len(part.files) for part in parts) < _MOST_FILES
    return is_room and missing <= _MOST_CHANGED * count and count >= (1 - _MOST_CHANGED) * rows_then


def _sweep(place: Place, *, with_shards: bool = True) -> None:
    """Remove the files of a cache that its manifest does not name; none of one that cannot be read, maybe just now.

    ``with_shards``: those too that are done, of a build that is not.
    """
    belong: set[str] = set()
    with contextlib.suppress(CacheError):
        with contextlib.suppress(FileNotFoundError):
            belong = Manifest.read(place).file_names()
        names = {entry.name for entry in place.find() if "/" not in entry.name}
        strays = names - belong
        if not place.is_remote:
            strays = {path.name for path in strays_in(Path(place.url), belong) if made_by_this_user(path)}
        place.remove(*sorted(strays if with_shards else strays - unfinished(names)))


def _begin(wanted: _Wanted) -> tuple[Found, Sequence[int]]:
    """A cache that has no samples yet, and about how many bytes those of each part will take."""
    source, count = wanted.path.source, len(wanted.path.source)
    expected = forecast(source, wanted.path.prepare)
    if not expected.target_is_part:
        with contextlib.closing(SampleTable([sample.target for sample in expected.looked_at])) as table:
            target_columns(table, np.arange(len(table)))  # an error now, if they cannot be kept
    names = {entry.name for entry in wanted.place.find()}
    found = [re.search(r"-(\d{5})[.-]", name) for name in sorted(names - unfinished(names))]
    numbers = [int(match[1]) for match in found if match]
    choice, part_bytes = _choose_codec(wanted, expected)
    coders = coders_of(choice, wanted.path, wanted.options.codec, len(expected.specs))
    parts = tuple(
        Part(name=f"part{number}", spec=spec, codec=None if coder is None else dict(coder.settings()), files=())
        for number, (spec, coder) in enumerate(zip(expected.specs, coders, strict=True))
    )
    shapes = [np.zeros((0, part.array.ndim), np.int32) for part in expected.looked_at[0].parts]
    pairs = zip(parts, shapes, strict=True)
    columns = Columns({f"{part.name}.shapes": none for part, none in pairs if not part.is_table})
    manifest = Manifest(
        key=wanted.key,
        root=wanted.root,
        generation=max(numbers, default=-1),
        count=count,
        parts=parts,
        is_tuple=expected.is_tuple,
        target_is_part=expected.target_is_part,
        mask_places=expected.mask_places,
        keys=expected.keys,
    )
    return Found(wanted.place, manifest, columns, np.full(count, -1), np.full((len(parts), count), -1)), part_bytes


def _fill(wanted: _Wanted, found: Found, part_bytes: Sequence[int]) -> None:
    """Prepare the samples that a cache lacks into one more file for each part, and let it hold them from now on.

    Args:
        wanted: the samples.
        found: what of them is there.
        part_bytes: about what those that are missing take.

    Raises:
        ShapesDifferError: they have other shapes than those that are there.
    """
    manifest, missing = found.manifest, np.flatnonzero(found.match < 0)
    is_all = not any(part.files for part in manifest.parts)
    plans = [
        WriterPlan(
            spec=part.spec,
            dimensions=0 if part.is_table else found.columns[f"{part.name}.shapes"].shape[1],
            codec=_coder_of(wanted.place, part, wanted.coders),
            is_certain=is_all and part.spec.shape == wanted.path.shape,
            path=Path(f"{part.name}-{manifest.generation + 1:05}"),
            first_bytes=first_bytes,
        )
        for part, first_bytes in zip(manifest.parts, part_bytes, strict=True)
    ]
    chosen = None if is_all else missing.tolist()
    with_targets = wanted.table is None and not manifest.target_is_part
    if not len(missing):
        written = Written((), missing, [], [])
    elif wanted.is_sharded:
        written = write_shards(
            wanted.path,
            plans,
            wanted.options,
            wanted.place,
            basis={**manifest.key, "count": len(found.match), **(wanted.listing or {})},
            with_targets=with_targets,
            most_shards=_MOST_FILES - max(len(part.files) for part in manifest.parts),
            chosen=chosen,
        )
    else:
        plans = [replace(plan, path=wanted.home / str(plan.path)) for plan in plans]
        ingested = ingest(wanted.path, plans, wanted.options, with_targets=with_targets, chosen=chosen)
        written = written_of(ingested, plans, len(missing))
    parts, rows, kept = list(manifest.parts), found.rows.copy(), missing[written.kept]
    columns = {name: column for name, column in found.columns.items() if name.startswith("part")}
    for number, (part, fresh) in enumerate(zip(manifest.parts, written.parts, strict=False)):
        rows[number, kept] = part.rows + fresh.rows
        parts[number] = replace(part, spec=fresh.spec, files=(*part.files, *fresh.files))
        for name, column in fresh.columns.items():
            old = columns.get(f"{part.name}.{name}", column[:0])
            columns[f"{part.name}.{name}"] = np.concatenate((old, column))
    columns |= {"rows": rows, **(wanted.listing or {})}
    columns |= _targets(wanted, found, rows, dict(zip(kept.tolist(), written.targets, strict=False)))
    skipped = [*_skipped_of(found), *written.skipped]
    replace(
        manifest,
        generation=manifest.generation + 1,
        count=rows.shape[1],
        classes=None if wanted.table is None else wanted.table.class_to_idx,
        parts=tuple(parts),
        skipped=tuple(Skipped(index=error.index, path=error.path, message=str(error)) for error in skipped),
    ).write(wanted.place, columns)
    for mark in found.marks:  # whose rows no sample uses any more; a killed run leaves that to the next
        mark.unlink(missing_ok=True)


def _targets(wanted: _Wanted, found: Found, rows: np.ndarray, fresh: dict[int, Any]) -> dict[str, np.ndarray]:
    """The targets of all samples that are in the cache now, those that were just prepared by their index."""
    chosen = np.flatnonzero(rows[0] >= 0)
    if wanted.table is not None:
        return target_columns(wanted.table, chosen)
    if found.manifest.target_is_part:
        return {}
    old = np.flatnonzero(found.rows[0] >= 0)
    if len(old):
        stored = kept_targets(found, old)
        fresh |= zip(old.tolist(), stored.tolist() if isinstance(stored, np.ndarray) else stored, strict=True)
    with contextlib.closing(SampleTable([fresh[i] for i in chosen.tolist()])) as table:
        return target_columns(table, np.arange(len(chosen)))


def _choose_codec(wanted: _Wanted, expected: Forecast) -> tuple[str | None, Sequence[int]]:
    """Keep samples raw where the disk has room for them, else by the fastest lossless codec, or as the user says.

    Returns:
        The name of what encodes them, None for raw ones, and about how many bytes all samples take of each part.
    """
    codec, raw = wanted.options.codec, (None, expected.part_bytes)
    is_free, free = codec == "auto", max(free_bytes(wanted.home) - _SPARE_BYTES, 0)
    if is_free and wanted.place.is_remote:  # which is never full
        return raw
    if is_free and expected.need_bytes <= free:
        return raw
    trials = try_all(wanted.path, look_longer(wanted.path), codec)
    best = fastest_fitting(trials, free if is_free else None, only_lossless=is_free)
    if best is None and not is_free:
        raise ValueError(f"codec={codec!r} is not possible here: {trials[0].obstacle}")
    if best is None:
        return raw  # its writer says need, free and cure
    if is_free:
        log.info("codec=%r: raw %s, %s free", best.codec, format_bytes(expected.need_bytes), format_bytes(free))
    return best.codec, best.part_bytes


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
                sizes = [entry.stat().st_size for entry in os.scandir(home)] if home.is_dir() else []
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
            raise CacheError(f"{shown} is no folder: {problem.filename} is a file. Name another one.") from problem
        raise CacheError(
            f"{shown} cannot be written ({problem.strerror}), and {why}. Name a folder that can be written, or run "
            "`fastdata build` where it can."
        ) from problem


# The files that a cache is made from: their names, sizes and times


def list_paths(paths: Sequence[str], root: str, facts: Int64s | None = None) -> Listing:
    """The files of a dataset, one for each sample: their names, sizes and times.

    ``paths``, uint8, has the names end to end, relative to the root where they lie below it, and ``ends``, int64 (N,),
    where each ends; ``file_sizes`` and ``mtimes_ns``, int64 (N,), are -1 where there is no file. Of remote files
    ``facts`` has both, (2, N), of which the second stand for their content.
    """
    prefix = os.path.join(os.path.expanduser(root), "") if root else ""
    sizes, mtimes_ns = _ask_files(paths) if facts is None else facts
    packed = PackedPaths.of([os.fspath(path).removeprefix(prefix) for path in paths])
    return {"paths": packed.blob, "ends": packed.ends, "file_sizes": sizes, "mtimes_ns": mtimes_ns}


def unchanged(new: Listing, old: Listing) -> Int64s:
    """For each file its index in an older listing, or -1 where it is not there or was written since."""
    if np.array_equal(new["ends"], old["ends"]) and np.array_equal(new["paths"], old["paths"]):
        match = np.arange(len(new["ends"]))
    else:
        index = {name: i for i, name in enumerate(PackedPaths(old["paths"], old["ends"]).names())}
        names = PackedPaths(new["paths"], new["ends"]).names()
        match = np.array([index.get(name, -1) for name in names], np.int64)
    if not len(old["ends"]):
        return match
    same = (match >= 0) & (new["file_sizes"] >= 0)
    for name in ("file_sizes", "mtimes_ns"):
        same &= new[name] == old[name][match]
    return np.where(same, match, -1)


def _ask_files(paths: Sequence[str]) -> Int64s:
    """Size and time of each file, int64 (2, files); 1,300,000 are a matter of seconds."""
    count = len(paths)
    asked = np.full((2, count), _NO_FILE, np.int64)
    tasks = [range(i, min(i + _FILES_PER_TASK, count)) for i in range(0, count, _FILES_PER_TASK)]

    def ask(files: range) -> tuple[range, Int64s]:
        return files, np.array([_ask(paths[i]) for i in files], np.int64).T

    with contextlib.closing(run_tasks(ask, tasks, usable_cores() if len(tasks) > 4 else 0)) as answers:
        for files, answer in answers:
            asked[:, files.start : files.stop] = answer
    return asked


def _ask(name: str) -> tuple[int, int]:
    try:
        found = os.stat(name)
    except (OSError, ValueError):  # no such file, or a name that cannot be one
        return _NO_FILE, _NO_FILE
    return found.st_size, found.st_mtime_ns
