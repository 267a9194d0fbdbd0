"""What a cache still knows of a dataset: which samples are up to date, and where they lie."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdata.cache.listing import Listing
from fastdata.cache.manifest import Manifest, read_array
from fastdata.cache.targets import read_targets
from fastdata.errors import CacheError, SampleError
from fastdata.ingest import Ingested
from fastdata.stores.disk import DAMAGE_PREFIX
from fastdata.table import PackedPaths, SampleTable

__all__ = ["Recalled", "listing_arrays", "read_listing", "read_rows", "recall", "recall_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled:
    """A cache held against the samples as they are now.

    Args:
        folder: of the cache.
        manifest: its manifest.
        match: int64 (N,), for each sample its index when the cache was written, or -1 where it is not up to date.
        rows: int64 (parts, N), the row of each sample; -1 where it was left out or is not up to date.
        marks: files that name damaged rows.
    """

    folder: Path
    manifest: Manifest
    match: np.ndarray
    rows: np.ndarray
    marks: tuple[Path, ...]

    @property
    def missing(self) -> np.ndarray:
        """The samples that are not up to date."""
        return np.flatnonzero(self.match < 0)

    @property
    def is_complete(self) -> bool:
        """Whether every sample is up to date."""
        return bool((self.match >= 0).all())

    def reason(self) -> str:
        """Why some samples are not up to date, in a few words."""
        if self.marks:
            return f"{len(self.marks)} were found damaged in the cache"
        return "their files are new, were changed, or could not be prepared before"

    def skipped(self) -> list[SampleError]:
        """The errors of up to date samples that were left out."""
        now = {int(then): i for i, then in enumerate(self.match.tolist()) if then >= 0} if self.manifest.skipped else {}
        errors = []
        for entry in self.manifest.skipped:
            index = now.get(int(entry["index"]))
            if index is not None and self.rows[0, index] < 0:
                errors.append(SampleError(str(entry["message"]), index=index, path=entry["path"]))
        return sorted(errors, key=lambda error: error.index)

    def stored_targets(self, kept: np.ndarray) -> Any:
        """The targets of these samples, which the cache keeps: numbers in one array, else a list.

        Raises:
            CacheError: they are damaged, or not there.
        """
        manifest = self.manifest
        if manifest.target_is_part:
            return np.zeros(len(kept), np.int64)
        is_kept = read_rows(self.folder, manifest)[0] >= 0
        stored = read_targets(self.folder, manifest, int(is_kept.sum()))
        chosen = (np.cumsum(is_kept) - 1)[self.match[kept]]
        return stored[chosen] if isinstance(stored, np.ndarray) else [stored[i] for i in chosen.tolist()]

    def merged_targets(self, rows: np.ndarray, missing: np.ndarray, ingested: Ingested) -> list[Any]:
        """Targets of all samples that have rows now: those of the cache, and the new ones."""
        assert ingested.targets is not None
        fresh = dict(zip(missing[ingested.kept].tolist(), ingested.targets, strict=True))
        old = np.flatnonzero((self.match >= 0) & (self.rows[0] >= 0))
        with contextlib.closing(SampleTable(self.stored_targets(old))) as table:
            known = dict(zip(old.tolist(), table.targets, strict=True))
        return [fresh[i] if i in fresh else known[i] for i in np.flatnonzero(rows[0] >= 0).tolist()]


def recall(folder: Path, manifest: Manifest, listing: Listing | None, count: int, *, is_strict: bool) -> Recalled:
    """Hold a cache against the samples as they are now.

    Args:
        folder: of the cache.
        manifest: its manifest.
        listing: the files; None where the samples are no files.
        count: number of samples.
        is_strict: whether samples that were left out are to be tried again.

    Raises:
        CacheError: the cache is damaged, or is of other samples.
    """
    rows = read_rows(folder, manifest)
    if listing is not None:
        match = listing.unchanged_in(read_listing(folder, manifest))
    elif manifest.count == count:
        match = np.arange(count)
    else:
        raise CacheError(f"{folder} holds {manifest.count} samples, but there are {count} now")
    marks = tuple(sorted(folder.glob(f"{DAMAGE_PREFIX}*")))
    is_bad = np.zeros(manifest.count, np.bool_)
    if is_strict:
        is_bad |= (rows < 0).any(axis=0)
    for mark in marks:
        name, _, row = mark.name.removeprefix(DAMAGE_PREFIX).rpartition("-")
        for number, part in enumerate(manifest.parts):
            if name == part.name and row.isdecimal():
                is_bad |= rows[number] == int(row)
    match = np.where((match >= 0) & ~is_bad[match], match, -1) if manifest.count else match
    now = np.where(match >= 0, rows[:, match], -1) if manifest.count else np.full((len(rows), count), -1)
    return Recalled(folder=folder, manifest=manifest, match=match, rows=now, marks=marks)


def recall_all(folder: Path, manifest: Manifest) -> Recalled:
    """Take a cache's own samples for those of now, damaged ones included.

    Raises:
        CacheError: the cache is damaged.
    """
    rows = read_rows(folder, manifest)
    return Recalled(folder=folder, manifest=manifest, match=np.arange(manifest.count), rows=rows, marks=())


def read_rows(folder: Path, manifest: Manifest) -> np.ndarray:
    """The row of every sample in each part, int64 (parts, count); -1 where it was left out.

    Raises:
        CacheError: they are damaged.
    """
    try:
        return read_array(folder, manifest.arrays["rows"], "int64", (len(manifest.parts), manifest.count))
    except KeyError:
        raise CacheError(f"{folder} does not say where its samples are") from None


def listing_arrays(listing: Listing) -> dict[str, np.ndarray]:
    """A listing as arrays to be kept."""
    paths = listing.paths
    return {"paths": paths.blob, "ends": paths.ends, "file_sizes": listing.sizes, "mtimes_ns": listing.mtimes_ns}


def read_listing(folder: Path, manifest: Manifest) -> Listing:
    """The files that a cache was made from.

    Raises:
        CacheError: they are damaged, or were not files.
    """
    try:
        files = [manifest.arrays[name] for name in ("ends", "file_sizes", "mtimes_ns")]
        blob = read_array(folder, manifest.arrays["paths"], "uint8", (-1,))
    except KeyError:
        raise CacheError(f"{folder} does not say which files it was made from") from None
    ends, sizes, mtimes_ns = (read_array(folder, file, "int64", (manifest.count,)) for file in files)
    if len(ends) and (ends[0] < 0 or ends[-1] != len(blob) or (np.diff(ends) < 0).any()):
        raise CacheError(f"{folder} has file names that overlap")
    return Listing(paths=PackedPaths(blob, ends), sizes=sizes, mtimes_ns=mtimes_ns)
