"""Serving from the cache of a dataset: found, or written, once among any number of processes.

A cache is shards and an index that names them, renamed into its place last: a writer that is
killed at any moment leaves it as it was, and the shards that it has completed. A build cuts the
samples into shards, and writes those that are not there: all of a new cache, those with changed
files of an old one, the rest of one that was stopped. The process that called gathers their
receipts, and it alone makes them a cache.

A task reads, prepares and writes one shard, on this machine or by any executor: the bytes are the
same, whoever writes them. Last it writes a receipt, ``shard-<name>.npz``, of what the index is to
hold: a shard whose receipt and files are there is complete, and is not written again.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import pickle
import re
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import asdict, dataclass, replace
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout

from fastdata.errors import (
    CacheError,
    IngestError,
    RemoteError,
    SampleError,
    fault_of,
    with_retries,
)
from fastdata.machine.budget import CodecTrial, fitting
from fastdata.machine.limits import usable_cores
from fastdata.machine.tables import Packed, SampleTable
from fastdata.machine.units import parse_bytes
from fastdata.machine.workers import attempt, run_tasks, settle
from fastdata.paths import is_url, local_path
from fastdata.pixels.transform_keys import describe_steps
from fastdata.report import log, progress_bar
from fastdata.sources.files import FileSource
from fastdata.sources.local_files import fleeting_folder, made_by_this_user
from fastdata.sources.remote import Place
from fastdata.sources.storage_options import options_travel
from fastdata.stores.cache import (
    INDEX,
    VERSION,
    Cache,
    Columns,
    Manifest,
    as_list,
    mirror_folder,
    pack_targets,
)
from fastdata.stores.codecs import describe_codec, find_codec
from fastdata.stores.disk import receipt_name
from fastdata.stores.disk_file import free_bytes, naming_full_disk
from fastdata.stores.frozen import refuse_draws
from fastdata.stores.ingest import Written, ingest, ingest_workers, run_preparing
from fastdata.stores.kept import Layout
from fastdata.stores.prepare import (
    Forecast,
    Options,
    Prepared,
    forecast,
    probe_more,
    try_codecs,
    warn_of_skipped,
)
from fastdata.stores.read_path import ReadPath, read_samples
from fastdata.stores.store import Store
from fastdata.stores.writer import StoredPart, WriterPlan, write_any_shapes

_SPARE_BYTES = 256 << 20
"""Free space that codec="auto" leaves on the disk."""
_MOST_SHARDS = 200
"""Every process keeps a descriptor open for each file, and 1,024 is a usual limit."""
_LEAST_BYTES = 16 << 20
"""Size of the smallest shards; a smaller one is not worth a task."""
_GOOD_BYTES = 32 << 20
"""Size of shards once there are ``_GOOD_SHARDS``, which is enough for all workers."""
_GOOD_SHARDS = 64
_FILES_PER_TASK = 50_000
_CHARACTERS = 16
"""Length of a fingerprint."""
_RAY_RETRIES = 10
"""Retries of a task whose node was lost."""


def prepare_on_disk(
    path: ReadPath,
    options: Options,
    table: SampleTable | None,
    described: Described,
    *,
    is_own_list: bool = False,
) -> Prepared:
    """Serve from the cache of these samples; write the cache, or its missing shards, first.

    Args:
        path: reads and prepares a sample.
        options: of the dataset, with ``cache_dir``.
        table: paths and targets, if they are known beforehand; else the cache stores the targets.
        described: describes the samples.
        is_own_list: True if code of the user's chose the files, so that other files below the same
            root have caches of their own.

    Raises:
        SampleError: a sample cannot be prepared.
        CacheError: the cache cannot be written.
        ValueError: samples or targets cannot be kept in files.
    """
    assert options.cache_dir is not None
    opened, listing, root = described
    is_pil = getattr(path.source.opening, "form", None) == "pil"
    key = {
        "source": opened,
        "prepare": describe_steps(path.prepare.steps, options.cache_key, is_pil=is_pil),
        "codec": describe_codec(options.codec, options.cache_key),
    }
    if root and not is_url(root):
        root = os.path.abspath(local_path(root))
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
    basis = json.dumps({**key, "root": root}, sort_keys=True).encode()
    name = f"{stem}-{fingerprint(basis)}"
    content = str(len(path.source))
    if listing is not None:
        content = listing.fingerprint(slice(None))
        if is_own_list:
            name += f"-{fingerprint(*listing.paths)}"
    place = Place(options.cache_dir, options.storage_options).below(name)
    build = _Build(
        path=path,
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
    try:
        return build.open()
    except (FileNotFoundError, CacheError) as obstacle:
        reason = str(obstacle)
    with locked(build.home, reason):
        prepared = build.open_or_write()
    warn_of_skipped(prepared.skipped, len(path.source))
    return prepared


def lock_of(home: Path) -> FileLock:
    """Return the lock that the writer of a cache holds, a file next to the cache."""
    return FileLock(home.with_name(f".{home.name}.lock"))


def locked(home: Path, reason: str) -> AbstractContextManager[Any]:
    """Hold the lock of a cache's writer, which the system frees when its holder dies.

    Raises:
        CacheError: the folder cannot be written; says the ``reason`` why it has to be.
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
            "Name a folder that can be written, or run `fastdata build` where it can."
        ) from problem


class Listing(NamedTuple):
    """The files that samples are made from, one for each.

    Attributes:
        paths: their names, relative to the root if they are below it.
        stats: int64 (2, N), the size of each file and the time of its last change, or a tag that
            stands for its content; -1 where there is no file.
    """

    paths: list[bytes]
    stats: npt.NDArray[np.int64]

    def fingerprint(self, rows: slice, basis: bytes = b"") -> str:
        """Return a fingerprint of some files and of what else depends on them."""
        return fingerprint(basis, *self.paths[rows], self.stats[:, rows].tobytes())


Described = tuple[str, Listing | None, str]
"""A dataset for a cache: text that is equal for equal samples; their files and folder, if any."""


def list_paths(
    paths: Sequence[str], root: str, stats: npt.NDArray[np.int64] | None = None
) -> Listing:
    """List the files of a dataset; of remote ones ``stats`` are known."""
    prefix = os.fsencode(os.path.join(local_path(root), "")) if root else b""
    # A relative root may have absolute paths below it.
    full = os.fsencode(os.path.join(os.path.abspath(local_path(root)), "")) if root else b""
    names = [os.fsencode(path).removeprefix(prefix).removeprefix(full) for path in paths]
    if stats is None:  # takes seconds for 1,300,000 files
        tasks = [paths[i : i + _FILES_PER_TASK] for i in range(0, len(paths), _FILES_PER_TASK)]
        workers = usable_cores() if len(tasks) > 4 else 0
        with closing(run_tasks(_stat_files, tasks, workers)) as found:
            stats = np.concatenate([np.zeros((0, 2), np.int64), *found]).T
    return Listing(names, stats)


def _stat_files(paths: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return size and time of files, (N, 2)."""
    stats = np.full((len(paths), 2), -1, np.int64)
    for row, path in enumerate(paths):
        try:
            found = with_retries(os.stat, path)
        except (OSError, ValueError) as problem:  # no such file, or not the name of a file
            if fault_of(problem) == "machine":
                raise
        else:
            stats[row] = found.st_size, found.st_mtime_ns
    return stats


def fingerprint(*parts: bytes) -> str:
    """Return a short SHA-256 of several texts, none of which holds a zero byte but the last."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:_CHARACTERS]


def samples_per_shard(count: int, need_bytes: int, shard_bytes: int | str | None) -> int:
    """Return how many of ``count`` samples, which take about ``need_bytes``, a shard holds.

    It is a power of 2, so that the borders of shards stay when a few samples come or go.
    """
    if shard_bytes is None:
        size_bytes = min(max(need_bytes / _GOOD_SHARDS, _LEAST_BYTES), _GOOD_BYTES)
    else:
        size_bytes = max(parse_bytes(shard_bytes, of=0), 1)
    shards = min(math.ceil(need_bytes / size_bytes), _MOST_SHARDS, count)
    rows = math.ceil(count / max(shards, 1))
    return 1 << (rows - 1).bit_length()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Build:
    """A cache of a dataset, which is opened, or built where it is missing.

    Args:
        path: reads and prepares a sample.
        options: of the dataset, with ``cache_dir``.
        table: paths and targets, if they are known beforehand; else the cache stores the targets.
        listing: the files, if samples are files.
        manifest: of the cache, without its parts.
        place: of the cache.
        home: its path on this machine. For a cache behind a URL the lock is named after it.
    """

    path: ReadPath
    options: Options
    table: SampleTable | None
    listing: Listing | None
    manifest: Manifest
    place: Place
    home: Path

    def open(self) -> Prepared:
        """Serve from the cache.

        Raises:
            FileNotFoundError: there is no cache that is up to date, or a sample that was left out
                can be read now.
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
        if found != (self.manifest.key, self.manifest.content) or cache.lacks_receipts():
            return False
        if self.place.is_remote or os.access(self.place.url, os.W_OK):
            return may_stay_out(self.path, self.options, cache.skipped)
        return not cache.skipped or self.options.on_error == "skip"

    def _serve(self, cache: Cache) -> Prepared:
        options = self.options
        own = [find_codec(codec) for codec in options.codecs if not isinstance(codec, str)]
        return cache.serve([*own, self.path.decoder], self.table, options.local_cache)

    def open_or_write(self) -> Prepared:
        """Serve from the cache; build it first if it is not up to date. The lock is held."""
        try:
            return self.open()  # another process may have written it meanwhile
        except FileNotFoundError:
            pass
        except CacheError as damage:
            log.warning("the cache is written again: %s", str(damage))
        # Behind a URL readers do not hold files open: those of the previous index stay for them.
        before: set[str] = set()
        if self.place.is_remote:
            with suppress(FileNotFoundError, CacheError):
                before = Cache.read(self.place).file_names()
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
        """Remove all files that are not needed, if they are this user's and behind no link."""
        with suppress(OSError):
            for name in filterfalse(is_needed, file_sizes(self.place)):
                path = Path(self.place.url, name)
                is_linked = path.is_symlink() or path.parent.is_symlink()
                if self.place.is_remote or (not is_linked and made_by_this_user(path)):
                    self.place.remove(name)

    # What is to be written

    def _write(self) -> Cache:
        """Write the missing shards, and then the index of all."""
        refuse_draws(self.path.source, self.options)
        expected = forecast(self.path)
        targets = [read.target for read in expected.probed]
        if self.table is not None:
            targets = [self.table.target(read.number) for read in expected.probed]
        pack_targets(targets)  # an error now, if they cannot be kept
        trial = self._choose_codec(expected)
        return write_any_shapes(
            lambda plans: self._write_as(plans, expected.layout, trial.need_bytes),
            expected.plan_writers(trial),
        )

    def _choose_codec(self, expected: Forecast) -> CodecTrial:
        """Return the user's codec; for "auto" raw if the disk has room, else the best lossless one."""
        codec = self.options.codec
        if codec != "auto":
            [trial] = try_codecs(probe_more(self.path), codec)
            if trial.obstacle is not None:
                raise ValueError(f"codec={codec!r} is not possible here: {trial.obstacle}")
            return trial
        free = free_bytes(self.home) + sum(file_sizes(self.place).values()) - _SPARE_BYTES
        # A bucket is never full.
        if self.place.is_remote or expected.raw.need_bytes <= free:
            return expected.raw
        fits = fitting(try_codecs(probe_more(self.path), codec), free, only_lossless=True)
        return fits[0] if fits else expected.raw  # writing it raises an error with figures

    def _write_as(self, plans: Sequence[WriterPlan], layout: Layout, need_bytes: int) -> Cache:
        parts = tuple(
            StoredPart(spec=plan.spec, dimensions=plan.dimensions, codec=plan.codec)
            for plan in plans
        )
        manifest = replace(self.manifest, parts=parts, layout=layout)
        tasks = self._cut(manifest, need_bytes)
        writer = ShardWriter(
            path=self.path,
            plans=plans,
            options=self.options,
            manifest=replace(manifest, classes=None),  # which may be many, for each receipt
            place=self.place,
        )
        shards = writer.write_all(tasks)
        cache = Cache(place=self.place, manifest=manifest, columns=self._concatenate(shards))
        self.place.write(INDEX, cache.pack())
        return cache

    def _cut(self, manifest: Manifest, need_bytes: int) -> list[ShardTask]:
        """Cut samples into runs, each named after all that its bytes depend on."""
        content = manifest.content if self.listing is None else ""
        parts = list(map(asdict, manifest.parts))
        basis = json.dumps([VERSION, manifest.key, content, parts], sort_keys=True)
        samples = range(len(self.path.source))
        size = samples_per_shard(len(samples), need_bytes, self.options.shard_bytes)
        listing = self.listing or Listing([], np.zeros((2, 0), np.int64))
        tasks = []
        for first in samples[::size]:
            rows = slice(first, first + size)
            name = listing.fingerprint(rows, f"{basis} {rows}".encode())
            tasks.append(ShardTask(name, samples[rows]))
        return tasks

    def _concatenate(self, shards: Sequence[Cache]) -> Columns:
        """Return the columns of all shards, with the targets and paths of their samples."""
        columns: Columns = {
            "skipped.json": [each for shard in shards for each in shard.columns["skipped.json"]]
        }
        names = ["shards.names", "shards.rows", "shards.bytes", "kept"]  # others may be there
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
            if any(map(os.path.isabs, paths)):  # a file is not below the root
                paths = [os.path.join(os.fsencode(self.manifest.root), path) for path in paths]
            packed = Packed.of(paths)
            columns |= {"paths": packed.blob, "ends": packed.ends}
        return columns


def file_sizes(place: Place) -> dict[str, int]:
    """Return the sizes of the files in a place, by name."""
    found = place.find().result()
    return {name: size for name, (size, _) in found.items() if "/" not in name}


def _is_complete(name: str) -> bool:
    """Return True for files of complete shards, which a stopped build leaves to the next one."""
    return "-" in name or name == INDEX


def may_stay_out(
    path: ReadPath, options: Options, skipped: Sequence[SampleError], first_index: int = 0
) -> bool:
    """Return True if samples may be left out, and none of those left out can be read now.

    Samples whose bytes are damaged are not tried again. ``first_index`` is added to the index of
    each error.
    """
    if skipped and options.on_error != "skip":
        return False
    left_out = [first_index + error.index for error in skipped if error.may_pass]
    with suppress(RemoteError, IngestError):  # the machine or network fails: not now
        return all(isinstance(read, SampleError) for read in read_samples(path, left_out))
    return True


class ShardTask(NamedTuple):
    """A shard that is to be written.

    Args:
        name: fingerprint of the shard.
        positions: indices of its samples in the source.
        columns: paths and targets of these samples, for a process that does not have all.
    """

    name: str
    positions: range
    columns: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"samples {self.positions[0]} to {self.positions[-1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardWriter:
    """Writes shards, in this or any other process.

    Args:
        path: reads and prepares a sample.
        plans: plan for each part of a shard.
        options: of the dataset.
        manifest: of the cache, without classes.
        place: of the cache.
    """

    path: ReadPath
    plans: Sequence[WriterPlan]
    options: Options
    manifest: Manifest
    place: Place

    def __call__(self, task: ShardTask) -> bytes:
        """Write the files of a shard, and last its receipt, which is returned."""
        path = self.path
        if multiprocessing.parent_process() is not None:
            # There is a process for each core, and a forked OpenMP pool would hang.
            torch.set_num_threads(1)
        if task.columns is not None:
            assert isinstance(path.source, FileSource)
            path = path._replace(source=replace(path.source, **task.columns))
        with ExitStack() as cleanup:
            folder = Path(self.place.url)
            if self.place.is_remote:
                folder = cleanup.enter_context(fleeting_folder())
            # Two tasks may write the same shard, as after a lost node: each writes files of its own
            # and renames them in the end. Their bytes are equal, so the order does not matter.
            fresh = uuid.uuid4().hex
            new_paths = [folder / f"{fresh}.{number}" for number in range(len(self.plans))]
            plans = [
                replace(plan, path=new) for plan, new in zip(self.plans, new_paths, strict=True)
            ]
            stores, written = ingest(path, plans, task.positions, self.options)
            for store in stores:
                cleanup.callback(store.close)
            shard = self._make_index(task, stores, written)
            receipt = shard.pack()
            for new, [name] in zip(new_paths, shard.files(), strict=True):
                if self.place.is_remote:
                    self.place.upload(name, new)
                else:
                    new.replace(folder / name)
            self.place.write(receipt_name(task.name), receipt)
        return receipt

    def _make_index(self, task: ShardTask, stores: Sequence[Store], written: Written) -> Cache:
        kept = np.zeros(len(task.positions), bool)
        kept[list(written.targets)] = True
        errors = [error for _, error in sorted(written.errors.items())]
        columns: Columns = {
            "shards.names": np.array([task.name], "S16"),
            "shards.rows": np.array([len(kept)]),
            "shards.bytes": np.array([[store.size_bytes for store in stores]]),
            "kept": kept,
            "skipped.json": [[error.path, str(error), error.may_pass] for error in errors],
        }
        for number, store in enumerate(stores):
            columns |= {f"part{number}.{name}": column for name, column in store.index.items()}
        columns |= pack_targets(list(written.targets.values()))
        return Cache(place=self.place, manifest=self.manifest, columns=columns)

    def write_all(self, tasks: Sequence[ShardTask]) -> list[Cache]:
        """Write all shards that are not complete.

        Raises:
            SampleError: a sample cannot be prepared; names its path and index.
            IngestError: a worker of this machine was lost; what is done stays. An executor raises
                errors of its own.
            ShapesDifferError: a sample has another shape.
            ValueError: the code that prepares samples cannot be pickled.
        """
        complete = self._complete(tasks)
        left = [task for task in tasks if task.name not in complete]
        missing = sum(len(task.positions) for task in left)
        count = tasks[-1].positions.stop
        if complete:
            log.warning(
                "%d of %d samples are prepared: those of new or changed files, of damaged shards, "
                "or that a stopped build has left",
                missing,
                count,
            )
        with (
            closing(self._run(left)) as written,
            progress_bar(count, f"preparing {count:,} images") as bar,
        ):
            bar.update(count - missing)
            for data in written:
                shard = Cache.unpack(self.place, data)
                complete[shard.shard_names[0]] = shard
                bar.update(len(shard.columns["kept"]))
        return [complete[task.name] for task in tasks]

    def _complete(self, tasks: Sequence[ShardTask]) -> dict[str, Cache]:
        """Return the shards that are complete already, by name."""
        sizes = file_sizes(self.place)
        found = [task for task in tasks if receipt_name(task.name) in sizes]
        asked = [self.place.submit(receipt_name(task.name)) for task in found]
        complete = {}
        for task, receipt in zip(found, asked, strict=True):
            with suppress(Exception):  # reading somebody else's bytes may raise anything
                shard = Cache.unpack(self.place, receipt.result())
                is_whole = all(files.items() <= sizes.items() for files in shard.files())
                is_whole &= shard.shard_names == [task.name]
                first = task.positions[0]
                if is_whole and may_stay_out(self.path, self.options, shard.skipped, first):
                    complete[task.name] = shard
        return complete

    def _run(self, tasks: Sequence[ShardTask]) -> Generator[bytes, None, None]:
        """Write shards, and yield the receipt of each when it is written."""
        workers = ingest_workers(self.options)
        engine = self.options.engine
        one_each = replace(self.options, prepare_workers=1, engine="local")
        alone = replace(self, options=one_each)
        if engine != "local":
            yield from run_elsewhere(alone, tasks, engine)
        elif 1 < workers <= len(tasks):
            yield from run_preparing(alone, tasks, self.path, self.plans, self.options)
        else:  # fewer shards than workers: all workers prepare one shard after the other
            yield from map(self, tasks)


def run_elsewhere(
    writer: ShardWriter, tasks: Sequence[ShardTask], engine: str | Executor
) -> Iterator[bytes]:
    """Write shards by an executor or by Ray, and yield the receipt of each when it is written."""
    source = writer.path.source
    if isinstance(source, FileSource):  # a task carries the files of its own samples only
        tasks = [task._replace(columns=source.columns_of(task.positions)) for task in tasks]
        no_files = replace(source, **source.columns_of(()))
        writer = replace(writer, path=writer.path._replace(source=no_files))
    opened: AbstractContextManager[Callable[[ShardTask], Future[bytes]]]
    if isinstance(engine, Executor):
        packed = _pickled(writer)
        opened = nullcontext(lambda task: engine.submit(_attempt, packed, task))
    else:
        opened = _ray(writer)
    with opened as submit:
        running: list[Future[bytes]] = []
        try:
            running.extend(map(submit, tasks))
            for future in as_completed(running):
                yield settle(future.result())
        finally:
            # Shards that are being written now are completed, and stay for the next build.
            wait([future for future in running if not future.cancel()])


def _attempt(packed: bytes, task: ShardTask) -> bytes:
    """Write a shard in an executor. Errors are returned, so that those raised are the executor's."""
    return attempt(lambda task: pickle.loads(packed)(task), task)


def _pickled(writer: ShardWriter) -> bytes:
    """Pickle a writer, with its ``storage_options``; a ValueError says what cannot be pickled."""
    try:
        with options_travel():
            return pickle.dumps(writer)
    except Exception as problem:  # pickling runs code of the user's
        raise ValueError(
            "engine= runs your loader and transform in other processes, but they cannot be "
            f"pickled: {problem}. Use functions of a module instead of lambdas and of functions "
            "within others; or engine='local', which forks, or engine='ray', which sends their "
            "code."
        ) from problem


@contextmanager
def _ray(writer: ShardWriter) -> Iterator[Callable[[ShardTask], Future[bytes]]]:
    """Submit tasks to the Ray cluster that this process is connected to, or that RAY_ADDRESS names.

    If there is none, one is started on this machine and ended afterwards. A task whose node was
    lost is run again on another one; tasks that are not done in the end are cancelled.
    """
    try:
        import ray
    except ImportError as missing:
        raise ImportError(
            "engine='ray' needs Ray, which is not installed: pip install 'fastdata[ray]'"
        ) from missing
    is_connected = ray.is_initialized()
    if not is_connected:
        ray.init(log_to_driver=False, logging_level="error")
    refs: list[Any] = []
    try:
        with options_travel():
            packed = ray.put(ray.cloudpickle.dumps(writer))  # each node fetches it once
        write = ray.remote(num_cpus=1, max_retries=_RAY_RETRIES)(_attempt)

        def submit(task: ShardTask) -> Future[bytes]:
            ref = write.remote(packed, task)
            refs.append(ref)
            future: Future[bytes] = ref.future()
            return future

        yield submit
    finally:
        for ref in refs:
            ray.cancel(ref)
        if not is_connected:
            ray.shutdown()
