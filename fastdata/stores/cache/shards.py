"""Writing shards, by this machine or by any executor: the same bytes, whoever writes them and however often.

A task reads, prepares and writes one shard. Last it writes a receipt, ``shard-<name>.npz``, of what
the index is to
hold: a shard whose receipt and files are there is done, and stays when a build is stopped. The
    process that called
gathers the receipts, and it alone makes them a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import platform
import re
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.errors import CacheError, IngestError
from fastdata.machine.memory import parse_bytes
from fastdata.machine.shared import PackedPaths, SampleTable
from fastdata.machine.workers import run_tasks
from fastdata.report import log, progress_bar
from fastdata.sources import FileSource, Source
from fastdata.sources.remote import Place, fleeting_folder
from fastdata.stores.cache.engines import run_on
from fastdata.stores.cache.manifest import (
    DAMAGED,
    VERSION,
    Columns,
    Part,
    Shard,
    Skipped,
    file_name,
    json_column,
    pack_columns,
    target_columns,
    targets_of,
    unpack_columns,
)
from fastdata.stores.files import DiskFile
from fastdata.stores.fill import Ingested, ingest, ingest_workers, needs_processes
from fastdata.stores.prepare import Options
from fastdata.stores.readers import DAMAGE_PREFIX
from fastdata.stores.samples import ReadPath
from fastdata.stores.writers import WriterPlan

MOST_SHARDS = 200
"""Every process keeps a descriptor open for each file, and 1,024 is a usual limit."""
_LEAST_BYTES, _GOOD_BYTES = 16 << 20, 64 << 20
"""Of a shard: less is too little to hand out as a task, and from these on it may be more."""
_GOOD_SHARDS = 64
_CRC_BYTES = 4
_NAME_CHARACTERS = 16
_RECEIPT = re.compile(r"shard-([0-9a-f]{16})\.npz")
_OF_SHARD = re.compile(r"(?:shard|part\d+)-([0-9a-f]{16})\.\w+")


def samples_per_shard(count: int, need_bytes: int, shard_bytes: int | str | None) -> int:
    """How many of so many samples, which take about ``need_bytes``, a shard has, whoever is to write them."""
    if shard_bytes is None:
        good = max(
            min(max(need_bytes / _GOOD_SHARDS, _LEAST_BYTES), _GOOD_BYTES), need_bytes / MOST_SHARDS
        )
        shards = min(math.ceil(need_bytes / good), MOST_SHARDS, count)
    else:
        shards = min(math.ceil(need_bytes / parse_bytes(shard_bytes, of=0)), count)
        if shards > MOST_SHARDS:
            raise ValueError(
                f"shard_bytes={shard_bytes!r} makes {shards:,} files of each part, which every process that reads the "
                f"cache opens; {MOST_SHARDS} are possible. Give more bytes, or leave it out."
            )
    return math.ceil(count / max(shards, 1))


def done_files(names: Iterable[str]) -> set[str]:
    """Of the files of a cache those of shards that are done, receipts included, while no manifest names them."""
    names = list(names)
    done = {match[1] for name in names if (match := _RECEIPT.fullmatch(name))}
    return {name for name in names if (match := _OF_SHARD.fullmatch(name)) and match[1] in done}


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
    positions: Sequence[int]
    columns: Mapping[str, Any] | None = None

    @property
    def receipt_name(self) -> str:
        return f"shard-{self.name}.npz"

    def __str__(self) -> str:
        return f"shard {self.number}, samples {self.positions[0]} to {self.positions[-1]}"


def make_tasks(
    missing: np.ndarray, size: int, words: Sequence[Any], listing: Mapping[str, np.ndarray] | None
) -> list[Task]:
    """Cut samples into runs, named after all that their bytes depend on.

    Args:
        missing: int64, positions of the samples.
        size: of a run.
        words: plain values that the samples depend on besides their files.
        listing: the files, where samples are files.
    """
    names = [] if listing is None else PackedPaths(listing["paths"], listing["ends"]).names()
    basis = hashlib.sha256(json.dumps([VERSION, *words], sort_keys=True).encode())
    tasks = []
    for number, first in enumerate(range(0, len(missing), size)):
        positions = missing[first : first + size]
        digest = basis.copy()
        if listing is None:
            digest.update(positions.data)
        else:
            digest.update(b"\0".join(names[i] for i in positions.tolist()))
            digest.update(listing["file_sizes"][positions].data)
            digest.update(listing["mtimes_ns"][positions].data)
        tasks.append(Task(number, digest.hexdigest()[:_NAME_CHARACTERS], _as_range(positions)))
    return tasks


def _as_range(positions: np.ndarray) -> Sequence[int]:
    first, last = int(positions[0]), int(positions[-1])
    return range(first, last + 1) if last - first + 1 == len(positions) else positions.tolist()


class Written(NamedTuple):
    """What a receipt says.

    Args:
        shard: for the manifest.
        columns: of the index, by row of the shard.
        targets: of the rows that are kept; none if the cache is not to have them from the source.
        skipped: the others, by row of the shard.
        host: the machine that has written it.
        seconds: from when to when, by its clock.
    """

    shard: Shard
    columns: Columns
    targets: list[Any]
    skipped: list[Skipped]
    host: str
    seconds: tuple[float, float]


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
        begun_s = time.time()
        path = self.path
        if multiprocessing.parent_process() is not None:
            # There is a process for each core; and a forked OpenMP pool would hang.
            torch.set_num_threads(1)
        if isinstance(path.source, FileSource) and task.columns is not None:
            path = path._replace(source=path.source.over(task.columns))
        with contextlib.ExitStack() as cleanup:
            folder = self._folder(cleanup)
            attempt = folder / uuid.uuid4().hex  # there may be several of one shard
            plans = [
                replace(plan, path=Path(f"{attempt}.{k}")) for k, plan in enumerate(self.plans)
            ]
            ingested = ingest(
                path, plans, self.options, with_targets=self.with_targets, chosen=task.positions
            )
            paths = []
            for store in ingested.stores:
                cleanup.callback(store.close)
                assert isinstance(store.files[0], DiskFile)
                paths.append(store.files[0].path)
                cleanup.callback(paths[-1].unlink, missing_ok=True)
            receipt = self._receipt(ingested, task, (begun_s, time.time()))
            for number, file in enumerate(paths):
                name = file_name(number, self.parts[number], task.name)
                if self.place.is_remote:
                    self.place.upload(name, file)
                else:
                    os.replace(file, folder / name)
                    self.place.remove(f"{DAMAGE_PREFIX}{name}")  # of the one before
            self.place.write(task.receipt_name, receipt)
        return task.number, receipt

    def _folder(self, cleanup: contextlib.ExitStack) -> Path:
        if self.place.is_remote:
            return cleanup.enter_context(fleeting_folder())
        folder = Path(self.place.url)
        if not folder.is_dir():
            where = f"{folder} is not there on {platform.node()}"
            raise CacheError(
                f"{where}: the machines of engine= must share cache_dir=, or it must be a URL"
            )
        return folder

    def _receipt(self, ingested: Ingested, task: Task, seconds: tuple[float, float]) -> bytes:
        rows, kept = len(task.positions), ingested.kept
        columns: Columns = {"is_kept": np.isin(np.arange(rows), kept)}
        for number, plan in enumerate(self.plans):
            empty = {"sums": np.zeros(rows, np.uint64)}
            if not plan.is_table:
                empty |= {"offsets": np.zeros(rows, np.int64), "sizes": np.zeros(rows, np.int64)}
                empty["shapes"] = np.zeros((rows, plan.dimensions), np.int32)
            for name, column in empty.items():
                if len(kept):
                    column[kept] = ingested.stores[number].index[name]
                columns[f"part{number}.{name}"] = column
        if self.with_targets:
            with contextlib.closing(SampleTable(ingested.targets)) as table:
                columns |= target_columns(table, np.arange(len(table)))
        left_out = np.flatnonzero(~columns["is_kept"]).tolist()
        facts = {
            "name": task.name,
            "sizes": [store.size_bytes for store in ingested.stores] or [0] * len(self.plans),
            "skipped": [
                (row, error.path, str(error))
                for row, error in zip(left_out, ingested.skipped, strict=True)
            ],
            "host": platform.node(),
            "seconds": seconds,
        }
        data = pack_columns({**columns, "facts.json": json_column(facts)})
        return data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little")

    def unpack(self, receipt: bytes, task: Task) -> Written:
        """What a receipt says; one of ``DAMAGED`` for what cannot be of this shard."""
        data, crc32 = receipt[:-_CRC_BYTES], receipt[-_CRC_BYTES:]
        if zlib.crc32(data).to_bytes(_CRC_BYTES, "little") != crc32:
            raise ValueError("its checksum does not fit")
        columns = unpack_columns(data)
        facts = columns.pop("facts.json")
        targets = targets_of(columns) if self.with_targets else []
        written = Written(
            Shard(name=facts["name"], rows=len(columns["is_kept"]), sizes=tuple(facts["sizes"])),
            {name: column for name, column in columns.items() if not name.startswith("targets.")},
            targets.tolist() if isinstance(targets, np.ndarray) else targets,
            [
                Skipped(row=row, path=path, message=message)
                for row, path, message in facts["skipped"]
            ],
            facts["host"],
            tuple(facts["seconds"]),
        )
        if (written.shard.name, written.shard.rows) != (task.name, len(task.positions)):
            raise ValueError("it is of other samples")
        return written


def write_shards(writer: ShardWriter, tasks: Sequence[Task], options: Options) -> list[Written]:
    """Write all shards that are not there yet.

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
    done = _done_before(writer, tasks, options)
    if done:
        log.info("%d of %d shards are there from a build that was stopped", len(done), len(tasks))
    left = [task for task in tasks if task.number not in done]
    count = sum(len(task.positions) for task in tasks)
    by_host = defaultdict[str, list[Written]](list)
    with (
        contextlib.closing(_run(writer, left, options)) as receipts,
        progress_bar(count, f"preparing {count:,} images", enabled=options.progress) as bar,
    ):
        bar.update(count - sum(len(task.positions) for task in left))
        try:
            for number, receipt in receipts:
                done[number] = writer.unpack(receipt, tasks[number])
                by_host[done[number].host].append(done[number])
                bar.update(done[number].shard.rows)
        except IngestError as lost:
            if not done:
                raise
            there = f"{len(done)} of {len(tasks)} shards are done ({', '.join(map(str, sorted(done)))}) and stay"
            raise IngestError(f"{str(lost).rstrip('.')}. {there}; run again to go on") from lost
    for host, theirs in sorted(by_host.items()):
        seconds = max(each.seconds[1] for each in theirs) - min(each.seconds[0] for each in theirs)
        samples = sum(each.shard.rows for each in theirs)
        log.info(
            "%s prepared %d samples, %.0f a second, as %d shards",
            host,
            samples,
            samples / seconds,
            len(theirs),
        )
    sizes = _sizes_in(writer.place)
    for task in tasks:
        if not _is_there(writer, done[task.number], sizes):
            raise IngestError(
                f"{task} was written but is not in {writer.place}: the machines of engine= must share cache_dir=, or "
                "it must be a URL; and one process at a time may build a cache"
            )
    return [done[task.number] for task in tasks]


def _done_before(
    writer: ShardWriter, tasks: Sequence[Task], options: Options
) -> dict[int, Written]:
    sizes = _sizes_in(writer.place)
    begun = [task for task in tasks if task.receipt_name in sizes]
    receipts = [writer.place.submit(task.receipt_name) for task in begun]
    done = {}
    for task, receipt in zip(begun, receipts, strict=True):
        with contextlib.suppress(*DAMAGED):
            written = writer.unpack(receipt.result(), task)
            is_whole = options.on_error == "skip" or not written.skipped
            if is_whole and _is_there(writer, written, sizes):
                done[task.number] = written
    return done


def _sizes_in(place: Place) -> dict[str, int]:
    return {entry.name: entry.size_bytes for entry in place.find()}


def _is_there(writer: ShardWriter, written: Written, sizes: Mapping[str, int]) -> bool:
    for number, size in enumerate(written.shard.sizes):
        name = file_name(number, writer.parts[number], written.shard.name)
        if f"{DAMAGE_PREFIX}{name}" in sizes or sizes.get(name, 0) != size:
            return False
    return True


def _run(
    writer: ShardWriter, tasks: Sequence[Task], options: Options
) -> Generator[tuple[int, bytes], None, None]:
    """Write shards in any order; yield number and receipt of each."""
    workers, source = ingest_workers(options), writer.path.source
    if options.engine != "local":
        if isinstance(source, FileSource):  # a task has the files of its own samples only
            sent = source.over(source.columns_of(()))
            writer = replace(writer, path=writer.path._replace(source=sent))
        yield from run_on(options.engine, writer, tasks, partial(_with_files, source))
    elif 1 < workers <= len(tasks):
        forks = needs_processes(writer.path, writer.plans)
        yield from run_tasks(writer, tasks, workers, forks=forks)
    else:  # too few to go round: all workers at one after the other
        alone = replace(writer, options=replace(writer.options, num_workers=workers))
        yield from map(alone, tasks)


def _with_files(source: Source, task: Task) -> Task:
    return (
        task._replace(columns=source.columns_of(task.positions))
        if isinstance(source, FileSource)
        else task
    )
