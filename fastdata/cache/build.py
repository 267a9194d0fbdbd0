"""Serving from the cache of a dataset: found, brought up to date or written once among any number of processes.

A writer puts files under new names beside those that are in use, and last renames a manifest that names them into its
place: killed at any moment it leaves the cache as it was. What it left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from fastdata.cache.manifest import (
    Columns,
    Manifest,
    Part,
    SampleFile,
    Skipped,
    marks_in,
    open_part,
    read_settled,
    strays_in,
    target_columns,
    targets_of,
)
from fastdata.cache.origin import Listing, describe_codec, hash_key, unchanged
from fastdata.codecs import Codec, codec_of, find_codec
from fastdata.errors import CacheError, SampleError
from fastdata.images import SampleSpec, SourceDecoder
from fastdata.memory import StoragePlan, format_bytes
from fastdata.prepare import (
    Ingested,
    KeptSamples,
    Options,
    Prepared,
    ReadPath,
    Steps,
    choices_for,
    forecast,
    ingest,
    look_longer,
    try_all,
    warn_of_skipped,
)
from fastdata.report import log
from fastdata.shared import SampleTable
from fastdata.sources import FileBytes, FileSource, Source
from fastdata.stores.files import free_bytes, naming_full_disk
from fastdata.stores.writers import DenseWriter, RaggedWriter, ShapesDifferError, Writer

SOURCE = "source"
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
        road: of the samples.
        options: as given by the user, with ``cache_dir``.
        table: paths and targets where they are known beforehand; else they are kept in the cache.
        listing: the files, where samples are files.
        key: what they depend on besides their files.
        root: folder of the files; empty where there is none.
        home: folder of the cache.
    """

    road: ReadPath
    options: Options
    table: SampleTable | None
    listing: Listing | None
    key: dict[str, str]
    root: str
    home: Path

    @property
    def coders(self) -> list[Codec | SourceDecoder]:
        """Those that a cache's own words may not be enough to make."""
        given, decoder = self.options.codec, self.road.decoder
        codecs = given if isinstance(given, (tuple, list)) else () if given in ("auto", SOURCE) else (given,)
        return [*map(find_codec, codecs), *([] if decoder is None else [decoder])]


class Found(NamedTuple):
    """A cache held against the samples as they are now.

    folder: of the cache. manifest, columns: its own. match: int64 (N,), for each sample its index when the cache was
    written, or -1 where it is not up to date. rows: int64 (parts, N), the row of each sample; -1 where it was left out
    or is not up to date. marks: files that name damaged rows.
    """

    folder: Path
    manifest: Manifest
    columns: Columns
    match: np.ndarray
    rows: np.ndarray
    marks: Sequence[Path] = ()


def prepare_on_disk(
    road: ReadPath,
    options: Options,
    table: SampleTable | None,
    *,
    opened: str,
    steps: str,
    listing: Listing | None,
    root: str,
) -> Prepared:
    """Serve from the cache of these samples; write it first, or what of it is missing.

    ``opened`` and ``steps`` say what opens and what prepares them; the rest is as in ``_Wanted``.

    Raises:
        SampleError: a sample cannot be prepared.
        CacheError: the cache cannot be written.
        ValueError: samples or targets cannot be kept in files.
    """
    assert options.cache_dir is not None
    key = {"source": opened, "prepare": steps, "codec": describe_codec(options.codec)}
    root = os.path.abspath(os.path.expanduser(root)) if root else ""
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
    cache_dir = Path(options.cache_dir).expanduser().absolute()
    home = cache_dir / f"{stem}-{hash_key({**key, 'root': root})}"
    wanted = _Wanted(road, options, table, listing, key, root, home)
    prepared, why = _opened(wanted)
    if prepared is None:
        with _writable(cache_dir, why or "it holds no cache of these samples that is up to date"), locked(home):
            prepared, why = _opened(wanted)  # another process may have written it meanwhile
            if prepared is None:
                _write(wanted, why)
                prepared, why = _opened(wanted)
        if prepared is None:
            raise CacheError(f"{home} was written but cannot be read: {why or 'files changed meanwhile'}")
        warn_of_skipped(prepared.skipped, len(road.source))
    return prepared


def _opened(wanted: _Wanted) -> tuple[Prepared | None, str]:
    """What a complete cache serves, or why it cannot; no reason where there is none or some samples are stale."""
    try:
        return read_settled(wanted.home, partial(_serve_complete, wanted)), ""
    except FileNotFoundError:
        return None, ""
    except CacheError as damaged:
        return None, str(damaged)


def _serve_complete(wanted: _Wanted, manifest: Manifest, columns: Columns) -> Prepared | None:
    found = _hold_against(wanted, manifest, columns)
    if (found.match < 0).any():
        return None
    _relabel(wanted, found)
    prepared = serve(found, wanted.coders, wanted.table)
    if strays_in(found.folder, manifest.file_names()):  # of a writer that died after its work was done
        with contextlib.suppress(OSError, Timeout), locked(wanted.home, wait=False):
            _sweep(wanted.home)
    return prepared


def _hold_against(wanted: _Wanted, manifest: Manifest, columns: Columns) -> Found:
    """A cache against the samples as they are now; CacheError where it is another one's."""
    folder, count = wanted.home, len(wanted.road.source)
    if manifest.key != wanted.key or (wanted.listing is not None and "paths" not in columns):
        raise CacheError(f"{folder} was made in another way")
    if wanted.listing is not None:
        match = unchanged(wanted.listing, columns)
    elif manifest.count == count:
        match = np.arange(count)
    else:
        raise CacheError(f"{folder} holds {manifest.count} samples, but there are {count} now")
    rows, marks = columns["rows"], marks_in(folder)
    is_bad = np.zeros(manifest.count, np.bool_)
    if wanted.options.on_error == "raise":
        is_bad |= rows[0] < 0
    for _, name, row in marks:
        for part, part_rows in zip(manifest.parts, rows, strict=True):
            names = [file.name for file in part.files]
            if name in names:
                is_bad |= part_rows == row + sum(file.rows for file in part.files[: names.index(name)])
    if not manifest.count:
        return Found(folder, manifest, columns, match, np.full((len(rows), count), -1))
    match = np.where((match >= 0) & ~is_bad[match], match, -1)
    rows = np.where(match >= 0, rows[:, match], -1)
    return Found(folder, manifest, columns, match, rows, [path for path, _, _ in marks])


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
    log.info("the labels in %s are brought up to date", found.folder)
    with contextlib.suppress(OSError, Timeout), locked(wanted.home, wait=False):
        if Manifest.read(found.folder) == old:
            new = replace(old, generation=old.generation + 1, classes=table.class_to_idx)
            new.write(found.folder, {**others, **targets})
            _sweep(found.folder)


def _plain(column: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return column.dtype.str, column.shape, column.tobytes()


def serve(found: Found, known: Sequence[Codec | SourceDecoder], table: SampleTable | None) -> Prepared:
    """Map the samples of a cache that are up to date and were not left out.

    Args:
        found: what of the cache is to be served.
        known: what may decode a part, beside fastdata's own codecs.
        table: of all samples; None makes one of the targets that the cache keeps.
    """
    folder, manifest, kept = found.folder, found.manifest, np.flatnonzero(found.rows[0] >= 0)
    if not len(kept):
        raise CacheError(f"{folder} holds no sample")
    with contextlib.ExitStack() as cleanup:
        stores = []
        for part, rows in zip(manifest.parts, found.rows, strict=True):
            stores.append(open_part(folder, part, found.columns, rows[kept], _coder_of(folder, part, known)))
            cleanup.callback(stores[-1].close)
        if table is None:
            table = SampleTable(kept_targets(found, kept))
        elif len(kept) < len(table):
            table = table.reduced_to(kept.tolist())
        cleanup.pop_all()
    what = "+".join(dict.fromkeys(store.codec for store in stores))
    reason = f"storage='disk': {format_bytes(manifest.size_bytes)} {what} in {folder}"
    log.info("%s", reason)
    return Prepared(
        storage_plan=StoragePlan(storage="disk", reason=reason, codec=None if what == "raw" else what),
        contents=KeptSamples(tuple(stores), table, manifest.is_tuple, manifest.target_is_part),
        skipped=_skipped_of(found),
    )


def _coder_of(folder: Path, part: Part, known: Sequence[Codec | SourceDecoder]) -> Codec | SourceDecoder | None:
    """What encodes and decodes a part; None where it is raw."""
    if part.codec is None:
        return None
    is_source = part.codec["name"] == SOURCE
    for coder in known:
        if is_source if isinstance(coder, SourceDecoder) else coder.settings() == part.codec:
            return coder
    its_dataset = f"open that, with cache_dir={str(folder.parent)!r}"
    if is_source:
        raise CacheError(
            f"{folder} holds image files as they are, and what prepares them on every read is known to their dataset "
            f"alone; {its_dataset}, or build a cache with another codec"
        )
    try:
        return codec_of(part.codec)
    except ValueError as unknown:
        raise CacheError(
            f"{folder} cannot be opened on its own: {unknown}. A codec object of your own is known to the dataset that "
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
    folder = wanted.home
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)  # workers of a writer that was killed live on for a second, and write on to files without a name
    try:
        found = None
        if not why:
            with contextlib.suppress(FileNotFoundError):
                found = read_settled(folder, partial(_hold_against, wanted))
        if found is not None and _is_worth_updating(found):
            reason = "their files are new, were changed, or could not be prepared before"
            if found.marks:
                reason = f"{len(found.marks)} were found damaged in the cache"
            missing, count = int((found.match < 0).sum()), len(found.match)
            log.warning("%d of %d samples are prepared anew: %s", missing, count, reason)
            part_bytes = [part.size_bytes * missing // max(part.rows, 1) for part in found.manifest.parts]
            try:
                _fill(wanted, found, part_bytes)
                return
            except ShapesDifferError:
                why = "the changed samples have other shapes than those in the cache"
            _sweep(folder)
        elif found is not None:
            why = f"{int((found.match < 0).sum())} of its samples are not up to date"
        if why:
            log.warning("the cache is written anew: %s", why)
        _fill(wanted, *_begin(wanted))
    finally:  # what went out of use, or what an error or Ctrl-C left half done
        with contextlib.suppress(OSError):
            _sweep(folder)
            folder.rmdir()  # where nothing is in it


def _is_worth_updating(found: Found) -> bool:
    parts, count = found.manifest.parts, len(found.match)
    missing = int((found.match < 0).sum())
    rows_then = max(part.rows for part in parts) + missing
    is_room = max(len(part.files) for part in parts) < _MOST_FILES
    return is_room and missing <= _MOST_CHANGED * count and count >= (1 - _MOST_CHANGED) * rows_then


def _sweep(folder: Path) -> None:
    """Remove the files of a cache that its manifest does not name; none of one that cannot be read, maybe just now."""
    belong: set[str] = set()
    with contextlib.suppress(CacheError):
        with contextlib.suppress(FileNotFoundError):
            belong = Manifest.read(folder).file_names()
        for path in strays_in(folder, belong):
            path.unlink()


def _begin(wanted: _Wanted) -> tuple[Found, Sequence[int]]:
    """A cache that has no samples yet, and about how many bytes those of each part will take."""
    source, count = wanted.road.source, len(wanted.road.source)
    expected = forecast(source, wanted.road.prepare)
    if not expected.target_is_part:
        with contextlib.closing(SampleTable([sample.target for sample in expected.looked_at])) as table:
            target_columns(table, np.arange(len(table)))  # an error now, if they cannot be kept
    numbers = [int(number) for name in os.listdir(wanted.home) for number in re.findall(r"-(\d{5})[.-]", name)]
    codecs, part_bytes = _choose_codecs(wanted, expected.specs, expected.part_bytes)
    parts = tuple(
        Part(name=f"part{number}", spec=spec, codec=codec, files=())
        for number, (spec, codec) in enumerate(zip(expected.specs, codecs, strict=True))
    )
    manifest = Manifest(
        key=wanted.key,
        root=wanted.root,
        generation=max(numbers, default=-1),
        count=count,
        parts=parts,
        is_tuple=expected.is_tuple,
        target_is_part=expected.target_is_part,
    )
    return Found(wanted.home, manifest, {}, np.full(count, -1), np.full((len(parts), count), -1)), part_bytes


def _fill(wanted: _Wanted, found: Found, part_bytes: Sequence[int]) -> None:
    """Prepare the samples that a cache lacks into one more file for each part, and let it hold them from now on.

    Args:
        wanted: the samples.
        found: what of them is there.
        part_bytes: about what those that are missing take.

    Raises:
        ShapesDifferError: they have other shapes than those that are there.
    """
    folder, manifest, missing = wanted.home, found.manifest, np.flatnonzero(found.match < 0)
    prefix = f"{manifest.generation + 1:05}"
    ingested, parts, writers = _ingest(wanted, manifest.parts, part_bytes, missing, prefix)
    rows, kept = found.rows.copy(), missing[ingested.kept]
    columns = {name: column for name, column in found.columns.items() if name.startswith("part")}
    for number, (part, writer, store) in enumerate(zip(parts, writers, ingested.stores, strict=False)):
        store.close()
        rows[number, kept] = part.rows + (np.array(ingested.kept) if part.is_table else np.arange(len(kept)))
        for name, column in writer.columns.items():
            old = columns.get(f"{part.name}.{name}", column[:0])
            if old.shape[1:] != column.shape[1:]:
                raise ShapesDifferError
            columns[f"{part.name}.{name}"] = np.concatenate((old, column))
        path = _path_of(folder, part, prefix)
        new = SampleFile(name=path.name, size_bytes=store.size_bytes, rows=len(writer.columns["sums"]))
        parts[number] = replace(part, files=(*part.files, new))
    columns |= {"rows": rows, **(wanted.listing or {})}
    columns |= _targets(wanted, found, rows, dict(zip(kept.tolist(), ingested.targets, strict=False)))
    skipped = [*_skipped_of(found), *(_renumbered(error, missing) for error in ingested.skipped)]
    replace(
        manifest,
        generation=manifest.generation + 1,
        count=rows.shape[1],
        classes=None if wanted.table is None else wanted.table.class_to_idx,
        parts=tuple(parts),
        skipped=tuple(Skipped(index=error.index, path=error.path, message=str(error)) for error in skipped),
    ).write(folder, columns)
    for mark in found.marks:  # whose rows no sample uses any more; a killed run leaves that to the next
        mark.unlink(missing_ok=True)


def _path_of(folder: Path, part: Part, prefix: str) -> Path:
    return folder / f"{part.name}-{prefix}.{'npy' if part.is_table else 'bin'}"


def _targets(wanted: _Wanted, found: Found, rows: np.ndarray, fresh: dict[int, Any]) -> Columns:
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


def _ingest(
    wanted: _Wanted, parts: Sequence[Part], part_bytes: Sequence[int], chosen: np.ndarray, prefix: str
) -> tuple[Ingested, list[Part], list[Writer]]:
    """Prepare samples into new files of these parts, which come back ragged if the samples turn out to be."""
    options, road, folder = wanted.options, wanted.road, wanted.home
    coders = [_coder_of(folder, part, wanted.coders) for part in parts]
    source, prepare, parts = road.source, road.prepare, list(parts)
    if any(isinstance(coder, SourceDecoder) for coder in coders):
        assert isinstance(source, FileSource)
        source, prepare = FileBytes(source), Steps(())
    is_all = not any(part.files for part in parts)
    writers: list[Writer] = []

    def make_writers(any_shapes: bool) -> list[Writer]:
        if any_shapes:
            if not is_all:
                raise ShapesDifferError
            parts[:] = [replace(part, spec=replace(part.spec, shape=None)) for part in parts]
            _sweep(folder)
        writers.clear()
        with contextlib.ExitStack() as cleanup:
            for part, coder, need_bytes in zip(parts, coders, part_bytes, strict=True):
                path, is_certain = _path_of(folder, part, prefix), is_all and part.spec.shape == road.shape
                if part.is_table:
                    writers.append(DenseWriter(part.spec, len(chosen), path))
                else:
                    sizes = {"first_bytes": need_bytes, "length": len(chosen)}
                    writers.append(RaggedWriter(part.spec, coder, is_certain, path, **sizes))
                cleanup.callback(writers[-1].close)
            cleanup.pop_all()
        return writers

    try:
        ingested = ingest(
            source if is_all else _ChosenSource(source, chosen.tolist()),
            prepare,
            make_writers,
            options,
            with_targets=wanted.table is None,
            description=f"storage='disk': {'' if is_all else f'{len(chosen)} changed samples '}to {folder}",
            may_skip_all=not is_all,
        )
    except SampleError as error:
        raise _renumbered(error, chosen) from error.__cause__
    return ingested, parts, writers


class _ChosenSource:
    """Some of a source's samples, under numbers of their own."""

    def __init__(self, source: Source, chosen: list[int]) -> None:
        self._source, self._chosen = source, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def read(self, index: int) -> tuple[Any, Any]:
        return self._source.read(self._chosen[index])

    def path(self, index: int) -> str | None:
        return self._source.path(self._chosen[index])


def _renumbered(error: SampleError, chosen: np.ndarray) -> SampleError:
    index = int(chosen[error.index])
    message = str(error).replace(f"sample {error.index}", f"sample {index}", 1)
    return SampleError(message, index=index, path=error.path)


def _choose_codecs(
    wanted: _Wanted, specs: Sequence[SampleSpec], raw_bytes: Sequence[int]
) -> tuple[Sequence[dict[str, Any] | None], Sequence[int]]:
    """Keep samples raw where the disk has room for them, else by the fastest lossless codec, or as the user says.

    Returns:
        The settings of what encodes each part, None for raw ones, and about what all its samples take.
    """
    road, codec, raw = wanted.road, wanted.options.codec, [None] * len(specs)
    free = max(free_bytes(wanted.home) - _SPARE_BYTES, 0)
    is_free = codec == "auto"
    if is_free and sum(raw_bytes) <= free:
        return raw, raw_bytes
    trials = try_all(road, wanted.options, look_longer(road))
    usable = [trial for trial in trials if trial.obstacle is None]
    if not is_free and not usable:
        raise ValueError(f"codec={codec!r} is not possible here: {trials[0].obstacle}")
    fitting = [trial for trial in usable if not is_free or (trial.lossless and trial.need_bytes <= free)]
    if not fitting:
        return raw, raw_bytes  # its writer says need, free and cure
    best = max(fitting, key=lambda trial: trial.decode_per_s)
    if is_free:
        log.info("codec=%r: raw %s, %s free", best.codec, format_bytes(sum(raw_bytes)), format_bytes(free))
    if best.codec == SOURCE:
        return [{"name": SOURCE}], best.part_bytes
    return [dict(codec.settings()) for codec in choices_for(codec, len(specs))[best.codec]], best.part_bytes


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
        if isinstance(problem, (CacheError, SampleError)):
            raise
        shown = f"cache_dir={str(cache_dir)!r}"
        if problem.errno in (errno.ENOTDIR, errno.EEXIST):
            raise CacheError(f"{shown} is no folder: {problem.filename} is a file. Name another one.") from problem
        if problem.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise CacheError(
            f"{shown} cannot be written ({problem.strerror}), and {why}. Name a folder that can be written, or run "
            "`fastdata build` where it can."
        ) from problem
