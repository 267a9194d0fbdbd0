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

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from dataclasses import asdict, dataclass, replace
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
    is_url,
    local_path,
    with_retries,
)
from fastdata.machine import CodecTrial, fitting, parse_bytes, usable_cores
from fastdata.machine.processes import attempt, run_tasks, settle
from fastdata.machine.shared import Packed, SampleTable
from fastdata.pixels import describe_steps
from fastdata.report import log, progress_bar
from fastdata.sources import FileSource
from fastdata.sources.remote import Place, fleeting_folder, made_by_this_user, options_travel
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
from fastdata.stores.frozen import refuse_draws
from fastdata.stores.prepare import (
    Forecast,
    Options,
    Prepared,
    forecast,
    look_longer,
    try_codecs,
    warn_of_skipped,
)
from fastdata.stores.readers import Layout, free_bytes, naming_full_disk, receipt_name
from fastdata.stores.writers import (
    ReadPath,
    StoredPart,
    WriterPlan,
    ingest,
    ingest_workers,
    is_thread_safe,
    needs_processes,
    read_samples,
    write_any_shapes,
)

_SPARE_BYTES = 256 << 20
"""Left on the disk where the choice is ours."""
_CACHE_CHARACTERS = 12
"""Of a fingerprint, in a name."""
_MOST_SHARDS = 200
"""Every process keeps a descriptor open for each file, and 1,024 is a usual limit."""
_LEAST_BYTES = 16 << 20
"""Of a shard: less is too little to hand out as a task. Up to twice as much is."""
_GOOD_BYTES = 32 << 20
"""From these on a shard may be more, where there are enough for all workers."""
_GOOD_SHARDS = 64
_SHARD_CHARACTERS = 16
"""Of a fingerprint, in a name."""
_FILES_PER_TASK = 50_000
_NO_FILE = -1
_RAY_RETRIES = 10
"""Of a task whose node was lost."""


# Found, or written


def prepare_on_disk(
    path: ReadPath,
    options: Options,
    table: SampleTable | None,
    described: Described,
    *,
    is_own_list: bool = False,
) -> Prepared:
    """Serve from the cache of these samples; write it first, or what of it is missing.

    ``is_own_list`` says that somebody chose the files, so that others over the same root have
    caches of their own; the rest is as in ``_Build``.

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
    root = os.path.abspath(local_path(root)) if root and not is_url(root) else root
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", os.path.basename(root)).strip(".-") or "samples"
    names = [_fingerprint(json.dumps({**key, "root": root}, sort_keys=True).encode())]
    content = str(len(path.source))
    if listing is not None:
        paths = listing.paths.ends.tobytes() + listing.paths.blob.tobytes()
        content = _fingerprint(paths + listing.facts.tobytes())
        names += [_fingerprint(paths)] * is_own_list
    name = "-".join([stem, *(each[:_CACHE_CHARACTERS] for each in names)])
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
    return FileLock(home.with_name(f".{home.name}.lock"))


def locked(home: Path, reason: str) -> contextlib.AbstractContextManager[Any]:
    """Hold the lock of a cache's writer, which the system frees when its holder dies.

    A CacheError says for what reason it has to be written where it cannot be.
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


# The files that a cache is made from: their names, sizes and times


class Listing(NamedTuple):
    """The files that samples are made from, one for each.

    Args:
        paths: their names, relative to the root where they lie below it.
        facts: int64 (2, N), sizes, -1 where there is no file, and times of the last change, or what
            else stands for their content.
    """

    paths: Packed
    facts: npt.NDArray[np.int64]


Described = tuple[str, Listing | None, str]
"""Of a dataset: text, the same where samples are; their files and folder, if any."""


def list_paths(
    paths: Sequence[str], root: str, facts: npt.NDArray[np.int64] | None = None
) -> Listing:
    """List the files of a dataset; of remote ones ``facts`` are known."""
    prefix = os.fsencode(os.path.join(local_path(root), "")) if root else b""
    # A relative root may have absolute paths below it.
    full = os.fsencode(os.path.join(os.path.abspath(local_path(root)), "")) if root else b""
    packed = Packed.of(os.fsencode(path).removeprefix(prefix).removeprefix(full) for path in paths)
    if facts is None:  # 1,300,000 are a matter of seconds
        tasks = [paths[i : i + _FILES_PER_TASK] for i in range(0, len(paths), _FILES_PER_TASK)]
        workers = usable_cores() if len(tasks) > 4 else 0
        with contextlib.closing(run_tasks(_ask, tasks, workers)) as answers:
            facts = np.array([each for answer in answers for each in answer], np.int64)
        facts = facts.reshape(-1, 2).T
    return Listing(packed, facts)


def _ask(paths: Sequence[str]) -> list[tuple[int, int]]:
    facts = []
    for path in paths:
        try:
            found = with_retries(os.stat, path)
        except (OSError, ValueError) as problem:  # no such file, or a name that cannot be one
            if fault_of(problem) == "machine":
                raise
            facts.append((_NO_FILE, _NO_FILE))
        else:
            facts.append((found.st_size, found.st_mtime_ns))
    return facts


def _fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def samples_per_shard(count: int, need_bytes: int, shard_bytes: int | str | None) -> int:
    """How many of so many samples, which take about ``need_bytes``, a shard has.

    A power of 2, so that cuts stay where they are when a few samples come or go.
    """
    if shard_bytes is None:
        size_bytes = min(max(need_bytes / _GOOD_SHARDS, _LEAST_BYTES), _GOOD_BYTES)
    else:
        size_bytes = max(parse_bytes(shard_bytes, of=0), 1)
    shards = min(math.ceil(need_bytes / size_bytes), _MOST_SHARDS, count)
    rows = math.ceil(count / max(shards, 1))
    return 1 << (rows - 1).bit_length()


# The build


@dataclass(frozen=True, kw_only=True, slots=True)
class _Build:
    """A cache that samples are served from, and that is written where it is not there.

    Args:
        path: that samples are read by.
        options: as given by the user, with ``cache_dir``.
        table: paths and targets where they are known beforehand; else the cache keeps targets.
        listing: the files, where samples are files.
        manifest: of the cache, which knows its parts once it is written.
        place: of the cache.
        home: the same here; of a cache behind a URL what its lock on this machine is named after.
    """

    path: ReadPath
    options: Options
    table: SampleTable | None
    listing: Listing | None
    manifest: Manifest
    place: Place
    home: Path

    def open(self, *, try_again: bool = True) -> Prepared:
        """Serve from the cache.

        Raises:
            FileNotFoundError: there is none that is up to date; with ``try_again`` also if samples
                that were left out, for a reason that may pass, can be read now.
            CacheError: it is damaged.
        """
        options = self.options
        wanted = self.manifest
        own = [find_codec(codec) for codec in options.codecs if not isinstance(codec, str)]
        with contextlib.suppress(FileNotFoundError):
            cache = Cache.read(self.place)
            found = cache.manifest
            is_current = (found.key, found.content) == (wanted.key, wanted.content)
            is_whole = is_current and _allows(options, cache) and not cache.lacks_receipts()
            if is_whole and not (try_again and self._can_read_more(cache)):
                table = SampleTable(cache.targets) if self.table is None else self.table
                return cache.serve([*own, self.path.decoder], table, options.local_cache)
        raise FileNotFoundError("it holds no cache of these samples that is up to date")

    def open_or_write(self) -> Prepared:
        try:
            return self.open()  # another process may have written it meanwhile
        except FileNotFoundError:
            pass
        except CacheError as damage:
            log.warning("the cache is written anew: %s", str(damage))
        # Behind a URL nobody holds a file open: those of the index before stay for who reads them.
        before: set[str] = set()
        if self.place.is_remote:
            with contextlib.suppress(FileNotFoundError, CacheError):
                before = Cache.read(self.place).file_names()
        try:
            with naming_full_disk(self.home):
                if not self.place.is_remote:
                    self.home.mkdir(exist_ok=True)
                cache = self._write()
        finally:
            # Of workers that were ended; "-" is in the names of what is complete.
            self._sweep(lambda name: "-" in name or name == INDEX)
            with contextlib.suppress(OSError):
                self.home.rmdir()  # where nothing is in it
        self._sweep((before | cache.file_names()).__contains__)
        return self.open(try_again=False)

    def _can_read_more(self, cache: Cache) -> bool:
        """Return True if a sample that was left out can be read now, and written."""
        is_writable = self.place.is_remote or os.access(self.place.url, os.W_OK)
        return is_writable and _can_read_any(self.path, cache.skipped)

    def _sweep(self, is_needed: Callable[[str], bool]) -> None:
        """Remove all other files that are this user's."""
        with contextlib.suppress(OSError):
            for name in itertools.filterfalse(is_needed, _file_sizes(self.place)):
                path = Path(self.place.url, name)
                is_linked = path.is_symlink() or path.parent.is_symlink()
                if self.place.is_remote or (not is_linked and made_by_this_user(path)):
                    self.place.remove(name)

    # What is to be written

    def _write(self) -> Cache:
        """Write the shards that are not there, and let the cache hold all from now on."""
        refuse_draws(self.path.source, self.options)
        expected = forecast(self.path)
        targets = [read.target for read in expected.probed]
        if self.table is not None:
            targets = [self.table.target(read.number) for read in expected.probed]
        pack_targets(targets)  # an error now, if they cannot be kept
        planned = expected.plan_writers(self._choose_codec(expected))
        return write_any_shapes(lambda plans: self._write_as(plans, expected.layout), planned)

    def _choose_codec(self, expected: Forecast) -> CodecTrial:
        """Samples raw where the disk has room, else by a lossless codec, or as the user says."""
        codec = self.options.codec
        free = math.inf
        if codec == "auto":
            free = free_bytes(self.home) + sum(_file_sizes(self.place).values()) - _SPARE_BYTES
            # A bucket is never full.
            if self.place.is_remote or expected.raw.need_bytes <= free:
                return expected.raw
        trials = try_codecs(look_longer(self.path), codec)
        fits = fitting(trials, free, only_lossless=codec == "auto")
        if not fits and codec != "auto":
            raise ValueError(f"codec={codec!r} is not possible here: {trials[0].obstacle}")
        # Raw says need, free and cure.
        return fits[0] if fits else expected.raw

    def _write_as(self, plans: Sequence[WriterPlan], layout: Layout) -> Cache:
        parts = tuple(
            StoredPart(spec=plan.spec, dimensions=plan.dimensions, codec=plan.codec)
            for plan in plans
        )
        manifest = replace(self.manifest, parts=parts, layout=layout)
        tasks = self._cut(manifest, sum(plan.first_bytes for plan in plans))
        path = self.path
        if self.options.on_error == "skip":  # files are opened, to leave some out
            path = path._replace(shape=None)
        writer = _ShardWriter(
            path=path,
            plans=[replace(plan, first_bytes=plan.first_bytes // len(tasks)) for plan in plans],
            options=self.options,
            manifest=replace(manifest, classes=None),  # which may be many, for each receipt
            place=self.place,
        )
        shards = writer.write_all(tasks)
        cache = Cache(place=self.place, manifest=manifest, columns=self._join(shards))
        self.place.write(INDEX, cache.pack())
        return cache

    def _cut(self, manifest: Manifest, need_bytes: int) -> list[_Task]:
        """Runs of samples, each named after all that its bytes depend on."""
        paths = []
        content = manifest.content
        if self.listing is not None:
            paths = self.listing.paths.all()
            content = ""
        words = [VERSION, manifest.key, content, *map(asdict, manifest.parts)]
        basis = json.dumps(words, sort_keys=True).encode()
        samples = range(len(self.path.source))
        size = samples_per_shard(len(samples), need_bytes, self.options.shard_bytes)
        tasks = []
        for first in samples[::size]:
            run = slice(first, first + size)
            name = _fingerprint(basis + str(run).encode() + b"\0".join(paths[run]))
            if self.listing is not None:
                name = _fingerprint(name.encode() + self.listing.facts[:, run].tobytes())
            tasks.append(_Task(name[:_SHARD_CHARACTERS], samples[run]))
        return tasks

    def _join(self, shards: Sequence[Cache]) -> Columns:
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
        if self.table is None:
            targets = [target for shard in shards for target in as_list(shard.targets)]
        else:
            targets = list(map(self.table.target, kept))
        columns |= pack_targets(targets)
        if self.listing is not None:
            listed = self.listing.paths.all()
            paths = [listed[row] for row in kept]
            if any(map(os.path.isabs, paths)):  # of a file elsewhere
                paths = [os.path.join(os.fsencode(self.manifest.root), path) for path in paths]
            packed = Packed.of(paths)
            columns |= {"paths": packed.blob, "ends": packed.ends}
        return columns


def _file_sizes(place: Place) -> dict[str, int]:
    """Of the files that are there, by name."""
    found = place.find().result()
    return {name: size for name, (size, _) in found.items() if "/" not in name}


def _allows(options: Options, cache: Cache) -> bool:
    return not cache.skipped or options.on_error == "skip"


def _can_read_any(path: ReadPath, skipped: Iterable[SampleError], first_index: int = 0) -> bool:
    """Return True if a sample that was left out, for a reason that may pass, can be read now.

    ``first_index`` is the sample whose error would have index 0.
    """
    left_out = [first_index + error.index for error in skipped if error.may_pass]
    with contextlib.suppress(RemoteError, IngestError):  # the machine fails: they stay left out
        read = itertools.chain.from_iterable(read_samples(path, left_out))
        return any(not isinstance(each, SampleError) for each in read)
    return False


# Shards


class _Task(NamedTuple):
    """A shard that is to be written.

    Args:
        name: its fingerprint.
        positions: of its samples in the source.
        columns: of these, on the way to a process that does not have those of all.
    """

    name: str
    positions: range
    columns: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"samples {self.positions[0]} to {self.positions[-1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShardWriter:
    """What writes shards, in this or any other process.

    Args:
        path: that samples are read by.
        plans: of each part of a shard.
        options: of the dataset.
        manifest: of each receipt.
        place: of the cache.
    """

    path: ReadPath
    plans: Sequence[WriterPlan]
    options: Options
    manifest: Manifest
    place: Place

    def __call__(self, task: _Task) -> bytes:
        """Write the files of a shard, and then its receipt, which it gives."""
        path = self.path
        if multiprocessing.parent_process() is not None:
            # There is a process for each core; and a forked OpenMP pool would hang.
            torch.set_num_threads(1)
        if isinstance(path.source, FileSource) and task.columns is not None:
            path = path._replace(source=replace(path.source, **task.columns))
        with contextlib.ExitStack() as cleanup:
            folder = Path(self.place.url)
            if self.place.is_remote:
                folder = cleanup.enter_context(fleeting_folder())
            fresh = uuid.uuid4().hex  # there may be several of one shard
            plans = [
                replace(plan, path=folder / f"{fresh}.{number}")
                for number, plan in enumerate(self.plans)
            ]
            stores, written = ingest(path, plans, task.positions, self.options)
            kept = np.zeros(len(task.positions), bool)
            kept[list(written.targets)] = True
            columns = {
                "shards.names": np.array([task.name], "S16"),
                "shards.rows": np.array([len(kept)]),
                "shards.bytes": np.array([[store.size_bytes for store in stores]]),
                "kept": kept,
                "skipped.json": [
                    [error.path, str(error), error.may_pass]
                    for _, error in sorted(written.errors.items())
                ],
            }
            for number, store in enumerate(stores):
                cleanup.callback(store.close)
                columns |= {f"part{number}.{name}": it for name, it in store.index.items()}
            columns |= pack_targets(list(written.targets.values()))
            shard = Cache(place=self.place, manifest=self.manifest, columns=columns)
            receipt = shard.pack()
            for plan, [name] in zip(plans, shard.files(), strict=True):
                assert plan.path is not None
                if self.place.is_remote:
                    self.place.upload(name, plan.path)
                else:
                    plan.path.replace(folder / name)
            self.place.write(receipt_name(task.name), receipt)
        return receipt

    def write_all(self, tasks: Sequence[_Task]) -> list[Cache]:
        """Write all shards that are not complete.

        Raises:
            SampleError: a sample cannot be prepared; names its path and index.
            IngestError: a worker of this machine was lost; what is done stays. An executor raises
                errors of its own.
            ShapesDifferError: a sample has another shape.
            ValueError: what prepares samples cannot be pickled.
        """
        complete = self._complete(tasks)
        left = [task for task in tasks if task.name not in complete]
        missing = sum(len(task.positions) for task in left)
        count = tasks[-1].positions.stop
        if complete:
            log.warning(
                "%d of %d samples are prepared: those of new or changed files, of damaged shards, "
                "or that a build that was stopped has left",
                missing,
                count,
            )
        with (
            contextlib.closing(self._run(left)) as written,
            progress_bar(count, f"preparing {count:,} images") as bar,
        ):
            bar.update(count - missing)
            for data in written:
                shard = Cache.unpack(self.place, data)
                complete[shard.shard_names[0]] = shard
                bar.update(len(shard.columns["kept"]))
        return [complete[task.name] for task in tasks]

    def _complete(self, tasks: Sequence[_Task]) -> dict[str, Cache]:
        """The shards of tasks that need not be written, by name."""
        sizes = _file_sizes(self.place)
        found = [task for task in tasks if receipt_name(task.name) in sizes]
        asked = [(task, self.place.submit(receipt_name(task.name))) for task in found]
        complete = {}
        for task, receipt in asked:
            with contextlib.suppress(Exception):  # bytes of others raise anything
                shard = Cache.unpack(self.place, receipt.result())
                is_whole = all(files.items() <= sizes.items() for files in shard.files())
                if is_whole and _allows(self.options, shard) and shard.shard_names == [task.name]:
                    complete[task.name] = shard
        for task in tasks:
            skipped = complete[task.name].skipped if task.name in complete else ()
            if _can_read_any(self.path, skipped, task.positions[0]):
                del complete[task.name]
        return complete

    def _run(self, tasks: Sequence[_Task]) -> Generator[bytes, None, None]:
        """Write shards, and yield the receipt of each when it is written."""
        workers = ingest_workers(self.options)
        engine = self.options.engine
        one_each = replace(self.options, prepare_workers=1, engine="local")
        alone = replace(self, options=one_each)
        if engine != "local":
            yield from _run_elsewhere(alone, tasks, engine)
        elif 1 < workers <= len(tasks):
            yield from run_tasks(
                alone,
                tasks,
                workers,
                forks=needs_processes(self.path, self.plans),
                is_thread_safe=is_thread_safe(self.path, self.plans),
            )
        else:  # too few to go round: all workers at one after the other
            yield from map(self, tasks)


# Tasks of a build that run elsewhere


def _run_elsewhere(
    writer: _ShardWriter, tasks: Sequence[_Task], engine: str | Executor
) -> Iterator[bytes]:
    source = writer.path.source
    if isinstance(source, FileSource):  # a task has the files of its own samples only
        tasks = [task._replace(columns=source.columns_of(task.positions)) for task in tasks]
        no_files = replace(source, **source.columns_of(()))
        writer = replace(writer, path=writer.path._replace(source=no_files))
    opened: _Submit = _ray(writer)
    if isinstance(engine, Executor):
        packed = _pickled(writer)
        opened = contextlib.nullcontext(lambda task: engine.submit(_attempt, packed, task))
    running: list[Future[bytes]] = []
    with opened as submit:
        try:
            running.extend(map(submit, tasks))
            for future in as_completed(running):
                yield settle(future.result())
        finally:
            # What is being written now stays, too.
            wait([future for future in running if not future.cancel()])


def _attempt(packed: bytes, task: _Task) -> bytes:
    """What an executor runs: its errors are answers, so that all others are the executor's."""
    return attempt(lambda task: pickle.loads(packed)(task), task)


def _pickled(writer: _ShardWriter) -> bytes:
    try:
        with options_travel():
            return pickle.dumps(writer)
    except Exception as problem:  # pickling runs code of the user's
        raise ValueError(
            "engine= sends what reads and prepares samples to other processes, which cannot be "
            f"pickled: {problem}. Use functions of a module in place of lambdas and of functions "
            "within others; or engine='local', which forks, or engine='ray', which sends their "
            "code."
        ) from problem


_Submit = contextlib.AbstractContextManager[Callable[[_Task], "Future[bytes]"]]


@contextlib.contextmanager
def _ray(writer: _ShardWriter) -> Iterator[Callable[[_Task], Future[bytes]]]:
    """Submit tasks to the Ray cluster that this process is connected to, or RAY_ADDRESS has.

    Where there is none it starts one here, which ends with it. A task whose node was lost is run
    again on another one; what is not done in the end is cancelled.
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
            packed = ray.put(ray.cloudpickle.dumps(writer))  # which each node fetches once
        write = ray.remote(num_cpus=1, max_retries=_RAY_RETRIES)(_attempt)

        def submit(task: _Task) -> Future[bytes]:
            refs.append(write.remote(packed, task))
            future: Future[bytes] = refs[-1].future()
            return future

        yield submit
    finally:
        for ref in refs:
            ray.cancel(ref)
        if not is_connected:
            ray.shutdown()
