"""Open the cache of a dataset, and write the cache or its missing shards first.

A cache consists of shards and an index that names them. The index is renamed into its place last.
So a build that is killed at any moment does not change the old cache. The next build uses the
shards that the killed one has completed. A build writes only the missing shards: all of a new
cache, those with changed files of an old one, or the rest of a build that was stopped. The calling
process makes the index of all shards.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout

from fastdata.errors import CacheError
from fastdata.machine.budget import CodecTrial, fitting
from fastdata.machine.tables import Packed, SampleTable
from fastdata.paths import is_url, local_path
from fastdata.pixels.transform_keys import describe_transforms
from fastdata.report import log
from fastdata.sources.local_files import made_by_this_user
from fastdata.sources.remote import Place
from fastdata.stores.cache import INDEX, Cache, mirror_folder
from fastdata.stores.codecs import describe_codec, find_codec
from fastdata.stores.disk_file import free_bytes, naming_full_disk
from fastdata.stores.forecast import Forecast, forecast, probe_more
from fastdata.stores.frozen import refuse_draws
from fastdata.stores.kept import Layout
from fastdata.stores.listing import Listing, short_digest
from fastdata.stores.manifest import VERSION, Manifest
from fastdata.stores.options import Options
from fastdata.stores.prepare import Prepared, warn_of_skipped
from fastdata.stores.preparer import Preparer
from fastdata.stores.shards import (
    ShardTask,
    ShardWriter,
    file_sizes,
    may_stay_out,
    samples_per_shard,
)
from fastdata.stores.targets import Columns, as_list, pack_targets
from fastdata.stores.trials import try_codecs
from fastdata.stores.writer import StoredPart, WriterPlan, write_any_shapes

if TYPE_CHECKING:
    from fastdata.stores.listing import Described


_SPARE_BYTES = 256 << 20
"""Free space that codec="auto" leaves on the disk."""


def prepare_on_disk(
    preparer: Preparer,
    options: Options,
    table: SampleTable | None,
    described: Described,
    *,
    is_own_list: bool = False,
) -> Prepared:
    """Open the cache of these samples; write the cache, or its missing shards, first.

    Args:
        preparer: reader and preparer of the samples.
        options: options of the dataset, with ``cache_dir``.
        table: paths and targets, if they are known beforehand; else the cache stores the targets.
        described: description of the samples.
        is_own_list: True if the user's code chose the files. Then another choice of files below the
            same root has its own cache.

    Raises:
        SampleError: a sample cannot be prepared.
        CacheError: the cache cannot be written.
        ValueError: samples or targets cannot be kept in files.
    """
    assert options.cache_dir is not None
    opening, listing, root = described
    is_pil = getattr(preparer.source.opening, "form", None) == "pil"
    key = {
        "source": opening,
        "prepare": describe_transforms(preparer.prepare.steps, options.cache_key, is_pil=is_pil),
        "codec": describe_codec(options.codec, options.cache_key),
    }
    if root and not is_url(root):
        root = os.path.abspath(local_path(root))
    # There is one cache for each folder and way to prepare it, so that the next build finds the
    # shards whose files are unchanged. ``content`` changes with any of the files.
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
    basis = json.dumps({**key, "root": root}, sort_keys=True).encode()
    name = f"{stem}-{short_digest(basis)}"
    content = str(len(preparer.source))
    if listing is not None:
        content = listing.digest(slice(None))
        if is_own_list:
            name += f"-{short_digest(*listing.paths)}"
    place = Place(options.cache_dir, options.storage_options).below(name)
    build = _Build(
        preparer=preparer,
        options=options,
        table=table,
        listing=listing,
        manifest=Manifest(
            key=key,
            root=root,
            content=content,
            classes=None if table is None else table.class_to_idx,
        ),
        place=place,
        home=mirror_folder(options.local_cache) / name if place.is_remote else Path(place.url),
    )
    # The first attempt takes no lock, so that a cache on a read-only disk can be opened too.
    try:
        return build.open()
    except (FileNotFoundError, CacheError) as obstacle:
        reason = str(obstacle)
    with locked(build.home, reason):
        prepared = build.open_or_write()
    warn_of_skipped(prepared.skipped, len(preparer.source))
    return prepared


def lock_of(home: Path) -> FileLock:
    """Return the lock that the writer of a cache holds, a file next to the cache."""
    return FileLock(home.with_name(f".{home.name}.lock"))


def locked(home: Path, reason: str) -> AbstractContextManager[object]:
    """Hold the lock of a cache's writer. The system releases it if its holder dies.

    Raises:
        CacheError: the folder cannot be written. The message includes the ``reason`` to write it.
    """
    lock = lock_of(home)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire(timeout=0)
    except Timeout:
        log.warning("another process is writing %s; this one waits for it", home)
        return lock.acquire()
    except OSError as problem:
        raise CacheError(
            f"cache_dir={str(home.parent)!r} cannot be written ({problem.strerror}), and {reason}. "
            "Name a folder that can be written, or run `fastdata build` on a machine that can."
        ) from problem


@dataclass(frozen=True, kw_only=True, slots=True)
class _Build:
    """The cache of a dataset, which is opened, or built if it is missing.

    Args:
        preparer: reader and preparer of the samples.
        options: options of the dataset, with ``cache_dir``.
        table: paths and targets, if they are known beforehand; else the cache stores the targets.
        listing: the files, if samples are files.
        manifest: manifest of the cache, without its parts.
        place: folder or URL of the cache.
        home: path of the cache on this machine. For a URL, the lock is named after this path.
    """

    preparer: Preparer
    options: Options
    table: SampleTable | None
    listing: Listing | None
    manifest: Manifest
    place: Place
    home: Path

    def open(self) -> Prepared:
        """Open the cache.

        Raises:
            FileNotFoundError: no cache is up to date, or a sample that was left out can be read
                now.
            CacheError: the cache is damaged.
        """
        with suppress(FileNotFoundError):
            cache = Cache.read(self.place)
            if self._is_current(cache):
                return self._serve(cache)
        raise FileNotFoundError("it holds no cache of these samples that is up to date")

    def _is_current(self, cache: Cache) -> bool:
        """Return True if a cache holds these samples, and nothing can be added to it."""
        found = (cache.manifest.key, cache.manifest.content)
        if found != (self.manifest.key, self.manifest.content) or cache.lacks_shard_manifests():
            return False
        # A cache that cannot be written is opened without the samples that it left out.
        if self.place.is_remote or os.access(self.place.url, os.W_OK):
            return may_stay_out(self.preparer, self.options, cache.skipped)
        return not cache.skipped or self.options.on_error == "skip"

    def _serve(self, cache: Cache) -> Prepared:
        """Map the samples. The user's own codecs and loader decode what they have encoded."""
        options = self.options
        own = [find_codec(codec) for codec in options.codecs if not isinstance(codec, str)]
        return cache.serve([*own, self.preparer.decoder], self.table, options.local_cache)

    def open_or_write(self) -> Prepared:
        """Open the cache; build it first if it is not up to date. The caller holds the lock."""
        try:
            return self.open()  # another process may have written it while this one waited
        except FileNotFoundError:
            pass
        except CacheError as damage:
            log.warning("the cache is written again: %s", str(damage))
        # Readers of a URL hold no files open, so those of the previous index must stay for them.
        before: set[str] = set()
        if self.place.is_remote:
            with suppress(FileNotFoundError, CacheError):
                before = Cache.read(self.place).file_names()
        # The index is replaced last, by renaming. Until then the old cache is unchanged. The files
        # of the old index are removed afterwards; processes that have mapped them keep their bytes.
        needed: Callable[[str], bool] = _is_complete
        try:
            with naming_full_disk(self.home):
                if not self.place.is_remote:
                    self.home.mkdir(exist_ok=True)
                cache = self._write()
            needed = (before | cache.file_names()).__contains__
        finally:
            self._sweep(needed)
            with suppress(OSError):
                self.home.rmdir()  # fails unless the folder is empty
        return self._serve(cache)

    def _sweep(self, is_needed: Callable[[str], bool]) -> None:
        """Remove the files of this user that are not needed, without following links."""
        with suppress(OSError):
            for name in filterfalse(is_needed, file_sizes(self.place)):
                path = Path(self.place.url, name)
                is_linked = path.is_symlink() or path.parent.is_symlink()
                if self.place.is_remote or (not is_linked and made_by_this_user(path)):
                    self.place.remove(name)

    def _write(self) -> Cache:
        """Choose the form of the samples and write them, again if their shapes differ."""
        refuse_draws(self.preparer.source, self.options)
        expected = forecast(self.preparer)
        targets = [read.target for read in expected.probed]
        if self.table is not None:
            targets = [self.table.target(read.number) for read in expected.probed]
        pack_targets(targets)  # if they cannot be stored, raise before anything is prepared
        trial = self._choose_codec(expected)
        return write_any_shapes(
            lambda plans: self._write_shards(plans, expected.layout, trial.need_bytes),
            expected.plan_writers(trial),
        )

    def _choose_codec(self, expected: Forecast) -> CodecTrial:
        """Return the trial of the user's codec. "auto": raw if it fits, else the best lossless."""
        codec = self.options.codec
        if codec != "auto":
            [trial] = try_codecs(probe_more(self.preparer), codec)
            if trial.obstacle is not None:
                raise ValueError(f"codec={codec!r} is not possible here: {trial.obstacle}")
            return trial
        free = free_bytes(self.home) + sum(file_sizes(self.place).values()) - _SPARE_BYTES
        # A bucket is never full. Existing shards count as free, because they are replaced.
        if self.place.is_remote or expected.raw.need_bytes <= free:
            return expected.raw
        fits = fitting(try_codecs(probe_more(self.preparer), codec), free, only_lossless=True)
        return fits[0] if fits else expected.raw  # writing it raises an error with figures

    def _write_shards(self, plans: Sequence[WriterPlan], layout: Layout, need_bytes: int) -> Cache:
        """Write the missing shards of samples in this form, and then the index of all shards."""
        parts = tuple(
            StoredPart(spec=plan.spec, dimensions=plan.dimensions, codec=plan.codec)
            for plan in plans
        )
        manifest = replace(self.manifest, parts=parts, layout=layout)
        tasks = self._cut(manifest, need_bytes)
        writer = ShardWriter(
            preparer=self.preparer,
            plans=plans,
            options=self.options,
            manifest=replace(manifest, classes=None),  # may be long, and each shard has a copy
            place=self.place,
            count=len(self.preparer.source),
        )
        shards = writer.write_all(tasks)
        cache = Cache(place=self.place, manifest=manifest, columns=self._concatenate(shards))
        self.place.write(INDEX, cache.pack())
        return cache

    def _cut(self, manifest: Manifest, need_bytes: int) -> list[ShardTask]:
        """Cut samples into runs, each named after everything that its bytes depend on.

        Positions are part of that. So a file that is added renames its own shard and all later
        ones.
        """
        content = manifest.content if self.listing is None else ""
        parts = list(map(asdict, manifest.parts))
        basis = json.dumps([VERSION, manifest.key, content, parts], sort_keys=True)
        samples = range(len(self.preparer.source))
        size = samples_per_shard(len(samples), need_bytes, self.options.shard_bytes)
        listing = self.listing or Listing([], np.zeros((2, 0), np.int64))
        tasks = []
        for first in samples[::size]:
            rows = slice(first, first + size)
            name = listing.digest(rows, f"{basis} {rows}".encode())
            tasks.append(ShardTask(name, samples[rows]))
        return tasks

    def _concatenate(self, shards: Sequence[Cache]) -> Columns:
        """Return the columns of all shards, with the targets and paths of their samples."""
        columns: Columns = {
            "skipped.json": [each for shard in shards for each in shard.columns["skipped.json"]]
        }
        # Only columns that were checked are used: a manifest may hold others, of any shape.
        names = ["shards.names", "shards.rows", "shards.bytes", "kept"]
        for number, located in enumerate(shards[0].located):
            names += [f"part{number}.{name}" for name in located if name != "files"]
        for name in names:
            columns[name] = np.concatenate([shard.columns[name] for shard in shards])
        kept = np.flatnonzero(columns["kept"]).tolist()
        if self.table is None:
            targets = [target for shard in shards for target in as_list(shard.targets)]
        else:
            targets = list(map(self.table.target, kept))
        columns |= pack_targets(targets)
        if self.listing is not None:
            paths = [self.listing.paths[row] for row in kept]
            # Either all paths are relative to the root or none is: see ``open_cache``.
            if any(map(os.path.isabs, paths)):
                paths = [os.path.join(os.fsencode(self.manifest.root), path) for path in paths]
            packed = Packed.of(paths)
            columns |= {"paths": packed.blob, "ends": packed.ends}
        return columns


def _is_complete(name: str) -> bool:
    """Return True for the index and files of complete shards, which the next build uses.

    Files that a stopped build was still writing have random names without a hyphen.
    """
    return "-" in name or name == INDEX
