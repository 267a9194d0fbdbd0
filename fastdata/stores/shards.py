"""Shards of a cache, written by this machine or by any executor.

A task reads, prepares and writes one shard: the bytes are the same, whoever writes them. Last it
writes a receipt, ``shard-<name>.npz``, of what the index is to hold: a shard whose receipt and
files are there is complete, and is not written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastdata.errors import IngestError
from fastdata.machine.memory import parse_bytes, usable_cores
from fastdata.machine.processes import attempt, run_tasks
from fastdata.machine.shared import PackedPaths
from fastdata.report import log, progress_bar
from fastdata.sources import FileSource
from fastdata.sources.remote import Place, fleeting_folder, options_travel
from fastdata.stores.cache import VERSION, Cache, Columns, Manifest, pack_targets
from fastdata.stores.prepare import Options
from fastdata.stores.readers import receipt_name
from fastdata.stores.samples import ReadPath
from fastdata.stores.writers import WriterPlan, ingest, ingest_workers, needs_processes

_MOST_SHARDS = 200
"""Every process keeps a descriptor open for each file, and 1,024 is a usual limit."""
_LEAST_BYTES = 16 << 20
"""Of a shard: less is too little to hand out as a task."""
_GOOD_BYTES = 64 << 20
"""From these on a shard may be more, where there are enough for all workers."""
_GOOD_SHARDS = 64
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
        facts: int64 (2, N), sizes, -1 where there is no file, and times of the last change, or what
            else stands for their content.
    """

    paths: PackedPaths
    facts: npt.NDArray[np.int64]


def list_paths(
    paths: Sequence[str], root: str, facts: npt.NDArray[np.int64] | None = None
) -> Listing:
    """List the files of a dataset; of remote ones ``facts`` are known."""
    prefix = os.path.join(os.path.expanduser(root), "") if root else ""
    packed = PackedPaths.of([os.fspath(path).removeprefix(prefix) for path in paths])
    if facts is None:  # 1,300,000 are a matter of seconds
        tasks = [paths[i : i + _FILES_PER_TASK] for i in range(0, len(paths), _FILES_PER_TASK)]
        workers = usable_cores() if len(tasks) > 4 else 0
        with contextlib.closing(run_tasks(_ask, tasks, workers)) as answers:
            found = [each for answer in answers for each in answer]
        facts = np.array(found, np.int64).reshape(-1, 2).T
    return Listing(packed, facts)


def _ask(paths: Sequence[str]) -> list[tuple[int, int]]:
    facts = []
    for path in paths:
        try:
            found = os.stat(path)
        except (OSError, ValueError):  # no such file, or a name that cannot be one
            facts.append((_NO_FILE, _NO_FILE))
        else:
            facts.append((found.st_size, found.st_mtime_ns))
    return facts


def fingerprint(*data: str | bytes | np.ndarray) -> str:
    digest = hashlib.sha256()
    for each in data:
        if isinstance(each, np.ndarray):
            each = np.ascontiguousarray(each).tobytes()
        digest.update(os.fsencode(each))
    return digest.hexdigest()


def samples_per_shard(count: int, need_bytes: int, shard_bytes: int | str | None) -> int:
    """How many of so many samples, which take about ``need_bytes``, a shard has."""
    if shard_bytes is None:
        size_bytes = min(max(need_bytes / _GOOD_SHARDS, _LEAST_BYTES), _GOOD_BYTES)
    else:
        size_bytes = parse_bytes(shard_bytes, of=0)
    shards = min(math.ceil(need_bytes / size_bytes), _MOST_SHARDS, count)
    return math.ceil(count / max(shards, 1))


class Task(NamedTuple):
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


def make_tasks(count: int, size: int, words: Sequence[Any], listing: Listing | None) -> list[Task]:
    """Cut samples into runs, each named after all that its bytes depend on.

    Args:
        count: samples.
        size: of a run.
        words: plain values that all samples depend on besides their files.
        listing: the files, where samples are files.
    """
    basis = json.dumps([VERSION, *words], sort_keys=True)
    paths = [] if listing is None else listing.paths.names()
    tasks = []
    for first in range(0, count, size):
        run = slice(first, min(first + size, count))
        name = fingerprint(basis, str(run), b"\0".join(paths[run]))
        if listing is not None:
            name = fingerprint(name, listing.facts[:, run])
        tasks.append(Task(name[:_SHARD_CHARACTERS], range(count)[run]))
    return tasks


def sizes_in(place: Place) -> dict[str, int]:
    return {entry.name: entry.size_bytes for entry in place.find() if "/" not in entry.name}


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

    def __call__(self, task: Task) -> bytes:
        """Write the files of a shard, and then its receipt, which it gives."""
        path = self.path
        is_remote = self.place.is_remote
        if multiprocessing.parent_process() is not None:
            # There is a process for each core; and a forked OpenMP pool would hang.
            torch.set_num_threads(1)
        if isinstance(path.source, FileSource) and task.columns is not None:
            path = path._replace(source=path.source.over(task.columns))
        with contextlib.ExitStack() as cleanup:
            folder = Path(self.place.url)
            if is_remote:
                folder = cleanup.enter_context(fleeting_folder())
            attempt = folder / uuid.uuid4().hex  # there may be several of one shard
            parts = [attempt.with_suffix(f".{number}") for number in range(len(self.plans))]
            for part in parts:
                cleanup.callback(part.unlink, missing_ok=True)
            plans = [replace(plan, path=part) for plan, part in zip(self.plans, parts, strict=True)]
            stores, written = ingest(path, plans, task.positions, self.options)
            kept = np.zeros(len(task.positions), bool)
            kept[list(written.targets)] = True
            columns: Columns = {
                "shards.names": np.array([task.name], "S16"),
                "shards.rows": np.array([len(kept)]),
                "shards.bytes": np.array([[store.size_bytes for store in stores]]),
                "kept": kept,
                "skipped.json": [[error.path, str(error)] for error in written.errors.values()],
                **pack_targets(list(written.targets.values())),
            }
            for number, store in enumerate(stores):
                cleanup.callback(store.close)
                columns |= {f"part{number}.{name}": it for name, it in store.index.items()}
            shard = Cache(place=self.place, manifest=self.manifest, columns=columns)
            receipt = shard.pack()
            for part, [name] in zip(parts, shard.files(), strict=True):
                if is_remote:
                    self.place.upload(name, part)
                else:
                    os.replace(part, folder / name)
            self.place.write(receipt_name(task.name), receipt)
        return receipt


def _find_complete(place: Place, tasks: Sequence[Task], *, with_skipped: bool) -> dict[str, Cache]:
    """The shards that are there, by name."""
    sizes = sizes_in(place)
    begun = [task.name for task in tasks if receipt_name(task.name) in sizes]
    receipts = [place.submit(receipt_name(name)) for name in begun]
    complete = {}
    for name, receipt in zip(begun, receipts, strict=True):
        with contextlib.suppress(Exception):  # bytes of others raise anything
            shard = Cache.unpack(place, receipt.result())
            is_whole = all(files.items() <= sizes.items() for files in shard.files())
            if is_whole and shard.shard_names == [name] and (with_skipped or not shard.skipped):
                complete[name] = shard
    return complete


def write_shards(writer: ShardWriter, tasks: Sequence[Task], options: Options) -> list[Cache]:
    """Write all shards that are not complete.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        IngestError: a worker of this machine was lost; what is done stays. An executor raises
            errors of its own.
        ShapesDifferError: a sample has another shape.
        ValueError: what prepares samples cannot be pickled.
    """
    complete = _find_complete(writer.place, tasks, with_skipped=options.on_error == "skip")
    left = [task for task in tasks if task.name not in complete]
    missing = sum(len(task.positions) for task in left)
    count = tasks[-1].positions.stop
    if complete:
        log.warning(
            "%d of %d samples are prepared: those of new or changed files, of damaged shards, or "
            "that a build that was stopped has left",
            missing,
            count,
        )
    with (
        contextlib.closing(_run(writer, left, options)) as receipts,
        progress_bar(count, f"preparing {count:,} images") as bar,
    ):
        bar.update(count - missing)
        for receipt in receipts:
            shard = Cache.unpack(writer.place, receipt)
            complete[shard.shard_names[0]] = shard
            bar.update(len(shard.columns["kept"]))
    return [complete[task.name] for task in tasks]


def _run(
    writer: ShardWriter, tasks: Sequence[Task], options: Options
) -> Generator[bytes, None, None]:
    """Write shards, and yield the receipt of each when it is written."""
    workers = ingest_workers(options)
    engine = options.engine
    if engine == "local" and 1 < workers <= len(tasks):
        forks = needs_processes(writer.path, writer.plans)
        yield from run_tasks(writer, tasks, workers, forks=forks)
    elif engine == "local":  # too few to go round: all workers at one after the other
        alone = replace(writer, options=replace(writer.options, prepare_workers=workers))
        yield from map(alone, tasks)
    else:
        yield from _run_elsewhere(writer, tasks, engine)


# Tasks of a build that run elsewhere


def _run_elsewhere(
    writer: ShardWriter, tasks: Sequence[Task], engine: str | Executor
) -> Iterator[bytes]:
    source = writer.path.source
    if isinstance(source, FileSource):  # a task has the files of its own samples only
        tasks = [task._replace(columns=source.columns_of(task.positions)) for task in tasks]
        no_files = source.over(source.columns_of(()))
        writer = replace(writer, path=writer.path._replace(source=no_files))
    if isinstance(engine, Executor):
        packed = _pickled(writer)
        yield from _run_by(lambda task: engine.submit(_attempt, packed, task), tasks)
    else:
        with _ray(writer) as submit:
            yield from _run_by(submit, tasks)


def _run_by(submit: Callable[[Task], Future[bytes]], tasks: Sequence[Task]) -> Iterator[bytes]:
    running: list[Future[bytes]] = []
    try:
        running.extend(map(submit, tasks))
        for future in as_completed(running):
            receipt, error, text = pickle.loads(future.result())
            if error is not None:
                raise error from IngestError(text)
            yield receipt
    finally:
        # What is being written now stays, too.
        wait([future for future in running if not future.cancel()])


def _attempt(packed: bytes, task: Task) -> bytes:
    """What an executor runs: its errors are answers, so that all others are the executor's."""
    return attempt(lambda task: pickle.loads(packed)(task), task)


def _pickled(writer: ShardWriter) -> bytes:
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


@contextlib.contextmanager
def _ray(writer: ShardWriter) -> Iterator[Callable[[Task], Future[bytes]]]:
    """Submit tasks to the Ray cluster that this process is connected to, or RAY_ADDRESS has.

    Where there is none it starts one here, which ends with it. A task whose node was lost is run
    again on another one; what is not done in the end is cancelled.
    """
    try:
        import ray
    except ImportError as missing:
        text = "engine='ray' needs Ray, which is not installed: pip install 'fastdata[ray]'"
        raise ImportError(text) from missing
    is_connected = ray.is_initialized()
    if not is_connected:
        ray.init(log_to_driver=False, logging_level="error")
    refs: list[Any] = []
    try:
        with options_travel():
            packed = ray.put(ray.cloudpickle.dumps(writer))  # which each node fetches once
        write = ray.remote(num_cpus=1, max_retries=_RAY_RETRIES)(_attempt)

        def submit(task: Task) -> Future[bytes]:
            refs.append(write.remote(packed, task))
            future: Future[bytes] = refs[-1].future()
            return future

        yield submit
    finally:
        for ref in refs:
            ray.cancel(ref)
        if not is_connected:
            ray.shutdown()
