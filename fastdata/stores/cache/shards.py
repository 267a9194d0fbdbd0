"""Writing shards, by this machine or by any executor: the same bytes, whoever writes them.

A task reads, prepares and writes one shard. Last it writes a receipt, ``shard-<name>.npz``, of what
the index is to hold: a shard whose receipt and files are there is complete, and is not written
again, whether by a build that goes on after it was stopped or by one that follows changed files.
The process that called gathers the receipts, and it alone makes them a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import platform
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.errors import CacheError, IngestError
from fastdata.machine.memory import parse_bytes
from fastdata.machine.processes import attempt, run_tasks
from fastdata.machine.shared import PackedPaths
from fastdata.report import log, progress_bar
from fastdata.sources import FileSource
from fastdata.sources.remote import Place, fleeting_folder, options_travel
from fastdata.stores.cache.manifest import (
    DAMAGED,
    VERSION,
    Columns,
    Part,
    Shard,
    Skipped,
    as_list,
    column_of,
    file_name,
    json_column,
    pack_columns,
    target_columns,
    targets_of,
    unpack_columns,
)
from fastdata.stores.options import Options
from fastdata.stores.readers import DiskFile, receipt_name
from fastdata.stores.samples import ReadPath
from fastdata.stores.writers import (
    Ingested,
    WriterPlan,
    ingest,
    ingest_workers,
    needs_processes,
)

MOST_SHARDS = 200
"""Every process keeps a descriptor open for each file, and 1,024 is a usual limit."""
_LEAST_BYTES = 16 << 20
"""Of a shard: less is too little to hand out as a task."""
_GOOD_BYTES = 64 << 20
"""From these on a shard may be more, where there are enough for all workers."""
_GOOD_SHARDS = 64
_NAME_CHARACTERS = 16
_RAY_RETRIES = 10
"""Of a task whose node was lost."""


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


class Listing(NamedTuple):
    """The files that samples are made from, one for each.

    Args:
        paths: their names.
        sizes: int64 (N,), -1 where there is no file.
        times: int64 (N,), of the last change, or what else stands for their content.
    """

    paths: PackedPaths
    sizes: np.ndarray
    times: np.ndarray

    def fingerprint(self) -> str:
        return fingerprint(self.paths.blob, self.paths.ends, self.sizes, self.times)


def fingerprint(*data: bytes | np.ndarray) -> str:
    digest = hashlib.sha256()
    for each in data:
        digest.update(each if isinstance(each, bytes) else np.ascontiguousarray(each).data)
    return digest.hexdigest()


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


def make_tasks(count: int, size: int, words: Sequence[Any], listing: Listing | None) -> list[Task]:
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
    tasks: list[Task] = []
    names: set[str] = set()
    for start, stop in zip([0, *stops], stops, strict=False):
        content: list[bytes | np.ndarray] = [basis.encode(), b"\0".join(paths[start:stop])]
        if listing is not None:
            content += [listing.sizes[start:stop], listing.times[start:stop]]
        name = fingerprint(*content)
        if listing is None or name in names:  # of a list that has the same files twice
            name = fingerprint(*content, f"{start} {stop}".encode())
        names.add(name)
        tasks.append(Task(len(tasks), name[:_NAME_CHARACTERS], range(start, stop)))
    return tasks


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


class Written(NamedTuple):
    """What a receipt says.

    Args:
        shard: for the manifest.
        columns: of the index, by sample that was kept; none where no sample was.
        targets: of these; none if the source has those of the cache.
        skipped: the others, by row of the shard.
    """

    shard: Shard
    columns: Columns
    targets: list[Any]
    skipped: list[Skipped]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardWriter:
    """Writes shards, in whatever process.

    Args:
        path: of the samples.
        plans: of each part of a shard.
        parts: for the manifest.
        place: where files go.
        options: of a shard.
        with_targets: whether receipts keep targets.
    """

    path: ReadPath
    plans: tuple[WriterPlan, ...]
    parts: tuple[Part, ...]
    place: Place
    options: Options
    with_targets: bool

    def __call__(self, task: Task) -> tuple[int, bytes]:
        """Write the files of a shard, and then its receipt; gives its number, and that."""
        path = self.path
        if multiprocessing.parent_process() is not None:
            # There is a process for each core; and a forked OpenMP pool would hang.
            torch.set_num_threads(1)
        if isinstance(path.source, FileSource) and task.columns is not None:
            path = path._replace(source=path.source.over(task.columns))
        with contextlib.ExitStack() as cleanup:
            attempt = self._folder(cleanup) / uuid.uuid4().hex  # there may be several of one shard
            plans = [
                replace(plan, path=Path(f"{attempt}.{k}")) for k, plan in enumerate(self.plans)
            ]
            ingested = ingest(
                path, plans, self.options, with_targets=self.with_targets, chosen=task.positions
            )
            files = []
            for store in ingested.stores:
                cleanup.callback(store.close)
                [file] = store.files
                assert isinstance(file, DiskFile)
                cleanup.callback(file.path.unlink, missing_ok=True)
                files.append(file.path)
            for number, file_path in enumerate(files):
                name = file_name(number, self.parts[number], task.name)
                if self.place.is_remote:
                    self.place.upload(name, file_path)
                else:
                    os.replace(file_path, file_path.with_name(name))
            receipt = self._receipt(ingested, task)
            self.place.write(receipt_name(task.name), receipt)
        return task.number, receipt

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

    def _receipt(self, ingested: Ingested, task: Task) -> bytes:
        columns: Columns = {
            f"part{number}.{name}": column
            for number, store in enumerate(ingested.stores)
            for name, column in store.index.items()
        }
        if self.with_targets:
            columns |= target_columns(ingested.targets)
        rows = np.delete(np.arange(len(task.positions)), ingested.kept).tolist()
        facts = {
            "name": task.name,
            "rows": len(task.positions),
            "sizes": [store.size_bytes for store in ingested.stores] or [0] * len(self.plans),
            "skipped": [
                {"row": row, "path": error.path, "message": str(error)}
                for row, error in zip(rows, ingested.skipped, strict=True)
            ],
        }
        return pack_columns({**columns, "facts.json": json_column(facts)})

    def unpack(self, receipt: bytes, task: Task) -> Written:
        """What a receipt says; one of ``DAMAGED`` for what cannot be of this shard."""
        columns = unpack_columns(receipt)
        facts = columns.pop("facts.json")
        if (facts["name"], facts["rows"]) != (task.name, len(task.positions)):
            raise ValueError("it is of other samples")
        skipped = [Skipped(**each) for each in facts.pop("skipped")]
        shard = Shard(**facts)
        count = shard.rows - len(skipped)
        targets = as_list(targets_of(columns, count)) if self.with_targets else []
        of_parts = {name: it for name, it in columns.items() if name.startswith("part")}
        if count:
            column_of(columns, "part0.sums", "uint64", count)
        return Written(shard, of_parts, targets, skipped)


def write_shards(writer: ShardWriter, tasks: Sequence[Task], options: Options) -> list[Written]:
    """Write all shards that are not complete.

    Args:
        writer: of shards.
        tasks: what is to be written.
        options: as given by the user.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        IngestError: a worker was lost. What is done stays.
        ShapesDifferError: a sample has another shape.
        ValueError: what prepares samples cannot be pickled.
    """
    done = _complete(writer, tasks, options)
    left = [task for task in tasks if task.number not in done]
    missing = sum(len(task.positions) for task in left)
    count = sum(len(task.positions) for task in tasks)
    if done:
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
        try:
            for number, receipt in receipts:
                done[number] = writer.unpack(receipt, tasks[number])
                bar.update(done[number].shard.rows)
        except IngestError as lost:
            if not done:
                raise
            numbers = ", ".join(map(str, sorted(done)))
            raise IngestError(
                f"{str(lost).rstrip('.')}. {len(done)} of {len(tasks)} shards are done ({numbers}) "
                "and stay; run again to go on"
            ) from lost
    sizes = sizes_in(writer.place)
    for task in tasks:
        if not _is_there(writer, done[task.number], sizes):
            raise IngestError(
                f"{task} was written but is not in {writer.place}: the machines of engine= must "
                "share cache_dir=, or it must be a URL; and one process at a time may build a cache"
            )
    return [done[task.number] for task in tasks]


def _complete(writer: ShardWriter, tasks: Sequence[Task], options: Options) -> dict[int, Written]:
    """The shards that are there, by number."""
    sizes = sizes_in(writer.place)
    begun = [task for task in tasks if receipt_name(task.name) in sizes]
    receipts = [writer.place.submit(receipt_name(task.name)) for task in begun]
    done = {}
    for task, receipt in zip(begun, receipts, strict=True):
        with contextlib.suppress(*DAMAGED):
            written = writer.unpack(receipt.result(), task)
            is_whole = options.on_error == "skip" or not written.skipped
            if is_whole and _is_there(writer, written, sizes):
                done[task.number] = written
    return done


def sizes_in(place: Place) -> dict[str, int]:
    return {entry.name: entry.size_bytes for entry in place.find() if "/" not in entry.name}


def _is_there(writer: ShardWriter, written: Written, sizes: Mapping[str, int]) -> bool:
    name = written.shard.name
    return all(
        sizes.get(file_name(number, writer.parts[number], name), 0) == size
        for number, size in enumerate(written.shard.sizes)
    )


def _run(
    writer: ShardWriter, tasks: Sequence[Task], options: Options
) -> Generator[tuple[int, bytes], None, None]:
    """Write shards in any order; yield number and receipt of each."""
    workers = ingest_workers(options)
    engine = options.writing.engine
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


def _run_in(executor: Executor, packed: Any, tasks: Sequence[Task]) -> Iterator[tuple[int, bytes]]:
    running: dict[Future[bytes], Task] = {}
    try:
        for task in tasks:
            with _naming_loss(executor, task):
                running[executor.submit(_attempt, packed, task)] = task
        for future in as_completed(running):
            with _naming_loss(executor, running[future]):
                answer = future.result()
            result, error, text = pickle.loads(answer)
            if error is not None:
                raise error from IngestError(f"in {running[future]}:\n{text}")
            yield result
    finally:
        # What is being written now stays, too.
        wait([future for future in running if not future.cancel()])


@contextlib.contextmanager
def _naming_loss(executor: Executor, task: Task) -> Iterator[None]:
    try:
        yield
    except Exception as lost:  # an executor raises anything
        what = f"{type(lost).__name__}: {lost}".rstrip(". :")
        name = type(executor).__name__.strip("_")
        raise IngestError(f"{name} has lost {task} ({what})") from lost


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
