"""Finding the cache of a dataset, writing it once among any number of processes, and bringing it up to date."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout

from fastdata import machine
from fastdata.cache.chosen import ChosenSource, renumbered
from fastdata.cache.coding import CacheWriter, Coders, Coding, choose_coding, coder_of, make_writer, make_writers
from fastdata.cache.folders import (
    PARTIAL,
    REPLACED,
    beside,
    locked,
    remove_folder,
    remove_strays,
    workers_file,
    writable,
    written_through,
)
from fastdata.cache.keys import describe_codec, hash_key
from fastdata.cache.listing import Listing
from fastdata.cache.manifest import MANIFEST, Manifest, Part, is_written, sync_folder, write_columns
from fastdata.cache.mapped import map_found
from fastdata.cache.recall import Recalled, listing_arrays, recall
from fastdata.cache.targets import LABELS, keep_labels, keep_targets
from fastdata.codecs import SourceDecoder
from fastdata.errors import CacheError, SampleError
from fastdata.ingest import Forecast, Ingested, forecast, ingest, read_sample
from fastdata.options import Options
from fastdata.preparation import Prepared, Road, Steps, warn_of_skipped
from fastdata.report import log
from fastdata.sources import FileBytes, FileSource, Source
from fastdata.stores.writers import ShapesDifferError
from fastdata.table import SampleTable

__all__ = ["CacheOrigin", "prepare_on_disk"]

_MOST_CHANGED = 0.5
_MOST_SHARDS = 256
_NOT_THERE = "it holds no cache of these samples that is up to date"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOrigin:
    """What a dataset's samples come from.

    Args:
        root: folder of the files; empty where there is none.
        source: what opens them, as text; see ``fastdata.cache.keys``.
        steps: what prepares them, as text.
        listing: the files; None where the samples are no files.
    """

    root: str
    source: str
    steps: str
    listing: Listing | None


def prepare_on_disk(road: Road, options: Options, table: SampleTable | None, origin: CacheOrigin) -> Prepared:
    """Serve from the cache of these samples; write it first, or what of it is missing.

    Args:
        road: the samples.
        options: as given by the user, with ``cache_dir``.
        table: paths and targets where they are known beforehand; else they are kept in the cache.
        origin: what tells this cache from others.

    Raises:
        SampleError: a sample cannot be prepared.
        CacheError: the cache cannot be written.
        ValueError: samples or targets cannot be kept in files.
    """
    cache = _Cache(road, options, table, origin)
    return cache.opened() or cache.written()


class _Cache:
    """The cache of one dataset."""

    def __init__(self, road: Road, options: Options, table: SampleTable | None, origin: CacheOrigin) -> None:
        assert options.cache_dir is not None
        self._road, self._options, self._table, self._origin = road, options, table, origin
        self._cache_dir = Path(options.cache_dir).expanduser().absolute()
        self._key = {"source": origin.source, "prepare": origin.steps, "codec": describe_codec(options.codec)}
        self._root = root = os.path.abspath(os.path.expanduser(origin.root)) if origin.root else ""
        stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
        self._home = self._cache_dir / f"{stem}-{hash_key({**self._key, 'root': root})}"
        self._why = ""

    # Reading

    def opened(self) -> Prepared | None:
        """Serve from a cache that is up to date; None if there is none."""
        found = self._recall(self._home)
        if found is not None and not found.is_complete:
            return None
        for candidate in [found] if found is not None else self._moved():
            if candidate is found:
                self._relabel(candidate)
            try:
                prepared = self._open(candidate)
            except CacheError as damaged:
                self._why = str(damaged)
            else:
                if candidate is found:
                    self._tidy(candidate)
                return prepared
        return None

    def _relabel(self, found: Recalled) -> None:
        """Keep the labels of now where other ones are kept of the same files, or damaged ones; if nobody is writing."""
        old, table = found.manifest, self._table
        if table is None or not np.array_equal(found.match, np.arange(old.count)):
            return
        kind, columns = keep_labels(table, np.flatnonzero(found.rows[0] >= 0))
        if all(is_written(found.folder, old.arrays.get(name), columns.get(name)) for name in LABELS):
            return
        log.info("the labels in %s are brought up to date", found.folder)
        with contextlib.suppress(OSError, Timeout), locked(self._home, wait=False):
            if Manifest.read(found.folder) == old:
                others = {name: file for name, file in old.arrays.items() if name not in LABELS}
                arrays = others | write_columns(found.folder, old.generation + 1, columns)
                replace(old, generation=old.generation + 1, arrays=arrays, target_kind=kind).write(found.folder)

    def _tidy(self, found: Recalled) -> None:
        """Remove what a writer left that died after its work was done, if nobody is writing now."""
        belong = found.manifest.file_names()
        beside_it = [beside(self._home, suffix) for suffix in (PARTIAL, REPLACED)]
        is_tidy = not any(map(os.path.exists, [*beside_it, workers_file(self._home)]))
        if is_tidy and all(name in belong for name in os.listdir(found.folder)):
            return
        with contextlib.suppress(OSError, Timeout), locked(self._home, wait=False):
            remove_strays(found.folder, Manifest.read(found.folder))
            for folder in beside_it:
                shutil.rmtree(folder, ignore_errors=True)

    def _recall(self, folder: Path) -> Recalled | None:
        try:
            manifest = Manifest.read(folder)
            if manifest.key != self._key:
                raise CacheError(f"{folder} was made in another way")
            is_strict = self._options.on_error == "raise"
            return recall(folder, manifest, self._origin.listing, len(self._road.source), is_strict=is_strict)
        except FileNotFoundError:
            return None
        except CacheError as damaged:
            self._why = str(damaged)
            return None

    def _moved(self) -> Iterator[Recalled]:
        """Caches of the very same files under another root."""
        if self._origin.listing is None or not self._cache_dir.is_dir():
            return
        for path in sorted(self._cache_dir.glob(f"*/{MANIFEST}")):
            if path.parent == self._home or path.parent.suffix in (PARTIAL, REPLACED):
                continue
            with contextlib.suppress(CacheError, OSError):
                if Manifest.read(path.parent).key == self._key:
                    found = self._recall(path.parent)
                    if found is not None and found.is_complete:
                        yield found

    def _open(self, found: Recalled) -> Prepared:
        """Map what was found complete."""
        return map_found(found, self._coders(found.manifest), lambda kept: self._table_of(found, kept))

    def _coders(self, manifest: Manifest) -> Coders:
        return tuple(coder_of(part, number, self._road, self._options) for number, part in enumerate(manifest.parts))

    def _table_of(self, found: Recalled, kept: np.ndarray) -> SampleTable:
        table = self._table
        if table is None:
            return SampleTable(found.stored_targets(kept))
        return table if len(kept) == len(table) else table.reduced_to(kept.tolist())

    # Writing

    def written(self) -> Prepared:
        """Write what is missing, unless another process does so meanwhile, and serve from it."""
        with writable(self._cache_dir, lambda: self._why or _NOT_THERE), locked(self._home):
            self._why = ""
            found = self._recall(self._home)
            if found is None:
                found = self._adopt()
            prepared = self._open_if(found)
            if prepared is not None:
                return prepared
            if found is None or self._why or not self._update(found):
                self._build(found)
            for suffix in (PARTIAL, REPLACED):
                shutil.rmtree(beside(self._home, suffix), ignore_errors=True)
            done = self._recall(self._home)
            if done is None or not done.is_complete:
                raise CacheError(
                    f"{self._home} was written but cannot be read: {self._why or 'files changed meanwhile'}"
                )
            prepared = self._open(done)
        warn_of_skipped(prepared.skipped, len(self._road.source))
        return prepared

    def _open_if(self, found: Recalled | None) -> Prepared | None:
        if found is None or not found.is_complete:
            return None
        try:
            return self._open(found)
        except CacheError as damaged:
            self._why = str(damaged)
            return None

    def _adopt(self) -> Recalled | None:
        """Give a cache its name that was complete when its writer died."""
        why, partial = self._why, beside(self._home, PARTIAL)
        if self._recall(partial) is None:
            self._why = why
            return None
        self._take_place()
        return self._recall(self._home)

    def _take_place(self) -> None:
        """Rename the new cache to its name; what had it before is moved aside first."""
        partial, replaced = beside(self._home, PARTIAL), beside(self._home, REPLACED)
        shutil.rmtree(replaced, ignore_errors=True)
        if self._home.exists():
            os.rename(self._home, replaced)
        os.rename(partial, self._home)
        sync_folder(self._cache_dir)
        shutil.rmtree(replaced, ignore_errors=True)

    def _build(self, found: Recalled | None) -> None:
        """Prepare all samples into a folder beside, and rename it when it is complete."""
        if self._why:
            log.warning("the cache is written anew: %s", self._why)
        elif found is not None:
            log.warning("the cache is written anew: %s of its samples are not up to date", found.missing.size)
        partial = beside(self._home, PARTIAL)
        remove_folder(partial)
        partial.mkdir(parents=True)
        try:
            expected = forecast(self._road.source, self._road.prepare)
            if not expected.target_is_part:
                keep_targets([sample.target for sample in expected.looked_at])
            coding = choose_coding(self._road, self._options, expected, self._cache_dir)
            source, prepare = self._road_of(coding.coders)
            writers: list[CacheWriter] = []

            def start(any_shapes: bool) -> Sequence[CacheWriter]:
                shutil.rmtree(partial)
                partial.mkdir()
                writers[:] = make_writers(partial, expected, coding, len(source), self._road.shape, any_shapes)
                return writers

            ingested = self._ingest(partial, source, prepare, start, f"to {self._home}")
            _close(ingested)
            rows = np.full((len(writers), len(source)), -1, np.int64)
            rows[:, ingested.kept] = [writer.rows for writer in writers]
            parts = tuple(writer.part for writer in writers)
            self._write_manifest(partial, parts, rows, ingested.targets, ingested.skipped, expected)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._take_place()

    def _update(self, found: Recalled) -> bool:
        """Prepare the samples that are not up to date into shards of their own; False where all are better written."""
        manifest, missing = found.manifest, found.missing
        rows_then = max(part.rows for part in manifest.parts) + missing.size
        shards_then = max(len(part.shards) for part in manifest.parts) + 1
        if missing.size > _MOST_CHANGED * len(self._road.source) or shards_then > _MOST_SHARDS:
            return False
        if len(self._road.source) < (1 - _MOST_CHANGED) * rows_then:
            return False
        log.warning("%d of %d samples are prepared anew: %s", missing.size, found.rows.shape[1], found.reason())
        remove_strays(found.folder, manifest)
        try:
            return self._add(found)
        finally:  # what went out of use, or what an error or Ctrl-C left half done
            with contextlib.suppress(OSError):
                remove_strays(found.folder, Manifest.read(found.folder))

    def _add(self, found: Recalled) -> bool:
        """Write shards of the samples that are not up to date; False where they do not go with the others."""
        manifest, missing = found.manifest, found.missing
        coders = self._coders(manifest)
        source, prepare = self._road_of(coders)
        writers: list[CacheWriter] = []

        def start(any_shapes: bool) -> Sequence[CacheWriter]:
            if any_shapes:
                raise ShapesDifferError("the changed samples have other shapes than those in the cache")
            for number, (part, coder) in enumerate(zip(manifest.parts, coders, strict=True)):
                share = int(sum(shard.size_bytes for shard in part.shards) / max(part.rows, 1) * missing.size)
                coding = Coding((coder,), (part.codec,), (share,))
                writers.append(make_writer(found.folder, number, part.spec, coding, missing.size, part.next_shard))
            return writers

        try:
            chosen = ChosenSource(source, missing.tolist())
            what = f"{missing.size} changed samples to {self._home}"
            is_any_left = bool((found.rows >= 0).any())
            ingested = self._ingest(found.folder, chosen, prepare, start, what, may_skip_all=is_any_left)
        except ShapesDifferError as differ:
            self._why = str(differ)
            return False
        except SampleError as error:
            read_sample(source, prepare, missing[error.index])  # raises it again with the sample's own number
            raise
        _close(ingested)
        rows, parts = found.rows.copy(), manifest.parts
        if ingested.kept:
            for number, (writer, part) in enumerate(zip(writers, parts, strict=True)):
                rows[number, missing[ingested.kept]] = writer.rows + part.rows
            pairs = zip(parts, writers, strict=True)
            parts = tuple(replace(part, shards=(*part.shards, *writer.part.shards)) for part, writer in pairs)
        skipped = [renumbered(error, int(missing[error.index])) for error in ingested.skipped]
        targets = None if ingested.targets is None else found.merged_targets(rows, missing, ingested)
        self._write_manifest(found.folder, parts, rows, targets, [*found.skipped(), *skipped], manifest)
        for mark in found.marks:  # those whose rows no sample uses any more; a killed run leaves that to the next
            mark.unlink(missing_ok=True)
        return True

    def _road_of(self, coders: Coders) -> tuple[Source, Steps]:
        source = self._road.source
        if any(isinstance(coder, SourceDecoder) for coder in coders):
            assert isinstance(source, FileSource)
            return FileBytes(source), Steps(())
        return source, self._road.prepare

    def _ingest(
        self, folder: Path, source: Source, prepare: Steps, make_writers: Any, what: str, *, may_skip_all: bool = False
    ) -> Ingested:
        options = self._options
        with written_through(folder):
            return ingest(
                source,
                prepare,
                make_writers,
                workers=machine.usable_cores() if options.num_workers is None else options.num_workers,
                with_targets=self._table is None,
                on_error=options.on_error,
                progress=options.progress,
                description=f"storage='disk': {what}",
                may_skip_all=may_skip_all,
            )

    def _write_manifest(
        self,
        folder: Path,
        parts: tuple[Part, ...],
        rows: np.ndarray,
        targets: list[Any] | None,
        skipped: Sequence[SampleError],
        like: Forecast | Manifest,
    ) -> None:
        generation = like.generation + 1 if isinstance(like, Manifest) else 0
        target_kind: str | None = None
        columns: dict[str, np.ndarray] = {}
        if self._table is not None:
            target_kind, columns = keep_labels(self._table, np.flatnonzero(rows[0] >= 0))
        elif targets is not None and not like.target_is_part:
            target_kind, columns = keep_targets(targets)
        if self._origin.listing is not None:
            columns |= listing_arrays(self._origin.listing)
        arrays = write_columns(folder, generation, columns | {"rows": rows})
        Manifest(
            key=self._key,
            root=self._root,
            generation=generation,
            count=rows.shape[1],
            arrays=arrays,
            target_kind=target_kind,
            parts=parts,
            is_tuple=like.is_tuple,
            target_is_part=like.target_is_part,
            skipped=[{"index": error.index, "path": error.path, "message": str(error)} for error in skipped],
        ).write(folder)


def _close(ingested: Ingested) -> None:
    for store in ingested.stores:
        store.close()
