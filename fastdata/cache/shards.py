"""Caches that are written as shards, by any number of processes and machines.

The samples that are to be written are cut into runs. A task reads, prepares and writes one run, in order and in one
process, so that the bytes of its files follow from the plan alone, whoever runs it and however often. Last it writes a
receipt, ``shard-<plan>-00003.npz``, of what the index is to hold: a shard whose receipt and files are there is done,
and stays when a build is stopped. The process that called gathers the receipts, and it alone makes them a cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import platform
import re
import time
import uuid
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.cache.engines import run_on
from fastdata.cache.manifest import VERSION, Columns, SampleFile, target_columns, targets_of
from fastdata.errors import CacheError, IngestError, SampleError
from fastdata.images import SampleSpec
from fastdata.memory import parse_bytes
from fastdata.prepare import Ingested, Options, ReadPath, ingest, ingest_workers
from fastdata.remote import Place, fleeting_folder
from fastdata.report import log, progress_bar
from fastdata.shared import SampleTable
from fastdata.sources import FileSource
from fastdata.stores.files import DiskFile
from fastdata.stores.writers import ShapesDifferError, WriterPlan

_LEAST_BYTES, _GOOD_BYTES = 16 << 20, 64 << 20
"""Of a shard: less is too little to hand out as a task, and from these on it may be more."""
_GOOD_SHARDS, _MOST_SHARDS = 64, 200
_CRC_BYTES = 4
_RECEIPT = re.compile(r"shard-([0-9a-f]{8})-(\d{5})\.npz")
_OF_SHARD = re.compile(r"(?:shard|part\d+-\d{5})-([0-9a-f]{8})-(\d{5})\.\w+")
_DAMAGED = (ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile)


def samples_per_shard(count: int, need_bytes: int, shard_bytes: int | str | None, most_shards: int) -> int:
    """How many of so many samples, which take about ``need_bytes``, a shard has, whoever is to write them."""
    if shard_bytes is None:
        good = max(min(max(need_bytes / _GOOD_SHARDS, _LEAST_BYTES), _GOOD_BYTES), need_bytes / _MOST_SHARDS)
        shards = min(math.ceil(need_bytes / good), most_shards, count)
    else:
        shards = min(math.ceil(need_bytes / parse_bytes(shard_bytes, of=0)), count)
        if shards > most_shards:
            raise ValueError(
                f"shard_bytes={shard_bytes!r} makes {shards:,} files of each part, which every process that reads the "
                f"cache opens; {most_shards} are possible. Give more bytes, or leave it out."
            )
    return math.ceil(count / max(shards, 1))


def unfinished(names: Iterable[str]) -> set[str]:
    """Of the files of a cache those of shards that are done, receipts included, while no manifest names them."""
    names = list(names)
    done = {match.groups() for name in names if (match := _RECEIPT.fullmatch(name))}
    return {name for name in names if (match := _OF_SHARD.fullmatch(name)) and match.groups() in done}


class WrittenPart(NamedTuple):
    """New files of a part, their columns by row, and the row of each kept sample, int64, counted over these files."""

    spec: SampleSpec
    files: tuple[SampleFile, ...]
    columns: dict[str, np.ndarray]
    rows: np.ndarray


class Written(NamedTuple):
    """What was written: ``kept``, int64, places among the samples that were to be; no parts if none was kept."""

    parts: tuple[WrittenPart, ...]
    kept: np.ndarray
    targets: list[Any]
    skipped: list[SampleError]


def written_of(ingested: Ingested, plans: Sequence[WriterPlan], count: int) -> Written:
    """What ``ingest`` has made of so many samples; its stores are closed."""
    parts, kept = [], ingested.kept
    for plan, store in zip(plans, ingested.stores, strict=False):
        with contextlib.closing(store):
            (file,), is_table = store.files, plan.codec is None and store.spec.is_dense
            assert isinstance(file, DiskFile)
            # in a table all have a row, those that were left out, too
            rows, length = (kept, count) if is_table else (np.arange(len(kept)), len(kept))
            columns = {}
            for name in ("sums",) if is_table else ("sums", "offsets", "sizes", "shapes"):
                found = store.index[name]
                columns[name] = np.zeros((length, *found.shape[1:]), found.dtype)
                columns[name][rows] = found
            files = (SampleFile(name=file.path.name, size_bytes=store.size_bytes, rows=length),)
            parts.append(WrittenPart(store.spec, files, columns, rows))
    return Written(tuple(parts), kept, ingested.targets, ingested.skipped)


def joined(written: Sequence[Written], counts: Sequence[int]) -> Written:
    """All of it as one, in this order; ``counts``: of so many samples each."""
    firsts, parts = np.cumsum([0, *counts]), []
    for column in zip(*(each.parts for each in written if each.parts), strict=True):
        before = np.cumsum([0, *(part.files[0].rows for part in column)])
        rows = [first + part.rows for first, part in zip(before, column, strict=False)]
        columns = {name: np.concatenate([part.columns[name] for part in column]) for name in column[0].columns}
        files = tuple(file for part in column for file in part.files)
        parts.append(WrittenPart(column[0].spec, files, columns, np.concatenate(rows)))
    kept = [first + each.kept for first, each in zip(firsts, written, strict=False)]
    targets = [target for each in written for target in each.targets]
    return Written(tuple(parts), np.concatenate(kept), targets, [error for each in written for error in each.skipped])


# Shards


class _Shard(NamedTuple):
    """A run of samples; with what is known of them on the way to a process that does not have it."""

    number: int
    positions: Sequence[int]
    columns: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return f"shard {self.number}, samples {self.positions[0]} to {self.positions[-1]}"


class _Done(NamedTuple):
    """A shard that was written: its receipt, by whom, and from when to when by that machine's clock."""

    shard: int
    receipt: bytes
    host: str
    begun_s: float
    ended_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What the tasks of a build have in common.

    Args:
        path: of the samples.
        plans: of each part of a shard; the names of its files begin with their paths.
        place: where files go.
        plan: stands for all that the bytes of a shard depend on.
        options: of a task.
        with_targets: whether receipts keep targets.
    """

    path: ReadPath
    plans: tuple[WriterPlan, ...]
    place: Place
    plan: str
    options: Options
    with_targets: bool

    def receipt_name(self, shard: _Shard) -> str:
        return f"shard-{self.plan}-{shard.number:05}.npz"

    def __call__(self, shard: _Shard) -> _Done:
        """Write one shard: its files, and then its receipt."""
        begun_s, path, place = time.time(), self.path, self.place
        if multiprocessing.parent_process() is not None:
            torch.set_num_threads(1)  # there is a process for each core; and a forked OpenMP pool would hang
        if isinstance(path.source, FileSource) and shard.columns is not None:
            path = path._replace(source=path.source.over(shard.columns))
        with contextlib.ExitStack() as cleanup:
            folder = Path(place.url)
            if place.is_remote:
                folder = cleanup.enter_context(fleeting_folder())
            elif not folder.is_dir():
                where = f"{folder} is not there on {platform.node()}"
                raise CacheError(f"{where}: the machines of engine= must share cache_dir=, or it must be a URL")
            attempt = uuid.uuid4().hex  # there may be several of one shard
            plans = [replace(it, path=folder / f"{attempt}.{it.path}-{shard.number:05}") for it in self.plans]
            ingested = ingest(path, plans, self.options, with_targets=self.with_targets, chosen=shard.positions)
            written = written_of(ingested, plans, len(shard.positions))
            files = [folder / file.name for part in written.parts for file in part.files]
            for file in files:
                cleanup.callback(file.unlink, missing_ok=True)
            for file in files:
                name = file.name.partition(".")[2]
                if place.is_remote:
                    place.upload(name, file)
                else:
                    os.replace(file, folder / name)
            receipt = _pack(written, with_targets=self.with_targets)
            place.write(self.receipt_name(shard), receipt)
        return _Done(shard.number, receipt, platform.node(), begun_s, time.time())

    def unpack(self, receipt: bytes, shard: _Shard) -> Written:
        """What a receipt says; one of ``_DAMAGED`` for what cannot be of this shard."""
        data = receipt[:-_CRC_BYTES]
        if zlib.crc32(data).to_bytes(_CRC_BYTES, "little") != receipt[-_CRC_BYTES:]:
            raise ValueError("its checksum does not fit")
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            columns = Columns((name, np.asarray(column)) for name, column in stored.items())
        columns.texts = {name: json.loads(it.tobytes()) for name, it in columns.items() if name.endswith(".json")}
        kept, facts, parts = columns["kept"], columns.texts["facts.json"], []
        for number, (plan, size) in enumerate(zip(self.plans, facts["file_bytes"], strict=False)):
            prefix = f"part{number}."
            mine = {name.removeprefix(prefix): it for name, it in columns.items() if name.startswith(prefix)}
            name = f"{plan.path}-{shard.number:05}{'.npy' if plan.is_table else '.bin'}"
            file = SampleFile(name=name, size_bytes=size, rows=len(mine["sums"]))
            rows = kept if plan.is_table else np.arange(len(kept))
            parts.append(WrittenPart(plan.spec, (file,), mine, rows))
        skipped = [SampleError(text, index=index, path=path) for index, path, text in facts["skipped"]]
        found = targets_of(columns) if self.with_targets else []
        targets = found.tolist() if isinstance(found, np.ndarray) else found
        samples = sorted([*(shard.positions[k] for k in kept.tolist()), *(error.index for error in skipped)])
        if samples != list(shard.positions) or len(targets) != len(kept) * self.with_targets:
            raise ValueError("it is of other samples")
        return Written(tuple(parts), kept, targets, skipped)


def _pack(written: Written, *, with_targets: bool) -> bytes:
    columns = {"kept": written.kept}
    for number, part in enumerate(written.parts):
        columns |= {f"part{number}.{name}": column for name, column in part.columns.items()}
    if with_targets:
        with contextlib.closing(SampleTable(written.targets)) as table:
            columns |= target_columns(table, np.arange(len(table)))
    skipped = [(error.index, error.path, str(error)) for error in written.skipped]
    facts = {"file_bytes": [part.files[0].size_bytes for part in written.parts], "skipped": skipped}
    columns["facts.json"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    stream = io.BytesIO()
    np.savez(stream, **columns)  # type: ignore[arg-type]  # of numbers, which are not pickled
    return stream.getvalue() + zlib.crc32(stream.getbuffer()).to_bytes(_CRC_BYTES, "little")


def write_shards(
    path: ReadPath,
    plans: Sequence[WriterPlan],
    options: Options,
    place: Place,
    *,
    basis: Mapping[str, Any],
    with_targets: bool,
    most_shards: int,
    chosen: Sequence[int] | None = None,
) -> Written:
    """Write every sample of a source, or those chosen, as shards; go on with what a build that was stopped has done.

    Args:
        path: of the samples.
        plans: of each part; the names of its files begin with their paths, and all samples take ``first_bytes``.
        options: as given by the user.
        place: folder of the cache.
        basis: what the samples depend on: texts, numbers and arrays.
        with_targets: whether targets are to be given.
        most_shards: as many files may be added to a part.
        chosen: beside which there are others in the cache: all must have the planned shapes.

    Raises:
        SampleError: a sample cannot be prepared; names its path and index.
        IngestError: a worker was lost, or no sample at all could be prepared. What is done stays.
        ShapesDifferError: a chosen sample has another shape.
        ValueError: what prepares samples cannot be pickled, or shards would be too many.
    """
    positions = range(len(path.source)) if chosen is None else chosen
    need_bytes, asked = sum(plan.first_bytes for plan in plans), options.shard_bytes
    most_shards = min(most_shards, _MOST_SHARDS)
    if asked is not None and chosen is not None:  # for the files that there are already the user is not to blame
        asked = max(parse_bytes(asked, of=0), math.ceil(need_bytes / most_shards))
    size = samples_per_shard(len(positions), need_bytes, asked, most_shards)
    shards = [_Shard(k, positions[first : first + size]) for k, first in enumerate(range(0, len(positions), size))]
    basis = {**basis, "size": size, "on_error": options.on_error, "positions": chosen, "with_targets": with_targets}
    task = Options(on_error=options.on_error, num_workers=1, progress=False)
    may_differ = chosen is None and any(plan.spec.is_dense for plan in plans)
    jobs = []
    for variant in (plans, [plan.of_any_shapes() for plan in plans])[: 1 + may_differ]:
        plan, first = _plan_of(basis, variant), [max(it.first_bytes // len(shards), 1) for it in variant]
        share = [
            replace(it, path=Path(f"{it.path}-{plan}"), first_bytes=n) for it, n in zip(variant, first, strict=True)
        ]
        job = _Job(path=path, plans=tuple(share), place=place, plan=plan, options=task, with_targets=with_targets)
        jobs.append(job)
    receipts = {entry.name: match[1] for entry in place.find() if (match := _RECEIPT.fullmatch(entry.name))}
    place.remove(*(name for name, plan in receipts.items() if plan not in [job.plan for job in jobs]))
    if jobs[-1].plan in receipts.values():
        jobs = jobs[-1:]  # that shapes differ was found before
    while True:
        try:
            written = joined(_build(jobs[0], shards, options), [len(shard.positions) for shard in shards])
        except ShapesDifferError as found:
            if chosen is not None:
                raise
            if len(jobs) == 1:
                raise IngestError(f"{found}; make them alike") from None
            log.info("%s; samples are stored one by one with their own shapes", found)
            jobs = jobs[1:]
            continue
        if not written.parts and chosen is None:
            skipped = written.skipped
            raise IngestError(f"none of the {len(skipped)} samples can be prepared; the first: {skipped[0]}")
        return written


def _plan_of(basis: Mapping[str, Any], plans: Sequence[WriterPlan]) -> str:
    codecs = [None if plan.codec is None else plan.codec.settings() for plan in plans]
    words = [VERSION, [(asdict(plan.spec), str(plan.path)) for plan in plans], codecs]
    digest = hashlib.sha256(json.dumps(words).encode())
    for name, value in sorted(basis.items()):
        digest.update(f"{name} ".encode())
        digest.update(np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else repr(value).encode())
    return digest.hexdigest()[:8]


def _build(job: _Job, shards: Sequence[_Shard], options: Options) -> list[Written]:
    """Write the shards that are not there yet."""
    place, done = job.place, dict[int, Written]()

    def are_there(written: Written, sizes: Mapping[str, int]) -> bool:
        return all(sizes.get(file.name) == file.size_bytes for part in written.parts for file in part.files)

    sizes = {entry.name: entry.size_bytes for entry in place.find()}
    receipts = {shard: place.submit(name) for shard in shards if (name := job.receipt_name(shard)) in sizes}
    for shard, receipt in receipts.items():
        with contextlib.suppress(*_DAMAGED):
            if are_there(written := job.unpack(receipt.result(), shard), sizes):
                done[shard.number] = written
    if done:
        log.info("%d of %d shards are there from a build that was stopped", len(done), len(shards))
    left, source = [shard for shard in shards if shard.number not in done], job.path.source
    count, by_host = sum(len(shard.positions) for shard in shards), defaultdict[str, list[_Done]](list)
    sent = job
    if isinstance(source, FileSource):  # a task has the files of its own samples only
        sent = replace(job, path=job.path._replace(source=source.over(source.columns_of(()))))

    def full(shard: _Shard) -> _Shard:
        return shard._replace(columns=source.columns_of(shard.positions)) if isinstance(source, FileSource) else shard

    with (
        contextlib.closing(
            run_on(options.engine, job if options.engine == "local" else sent, left, ingest_workers(options), full)
        ) as answers,
        progress_bar(count, f"preparing {count:,} images", enabled=options.progress) as bar,
    ):
        bar.update(count - sum(len(shard.positions) for shard in left))
        try:
            for answer in answers:
                shard = shards[answer.shard]
                done[shard.number] = job.unpack(answer.receipt, shard)
                by_host[answer.host].append(answer)
                bar.update(len(shard.positions))
        except IngestError as lost:
            there = f"{len(done)} of {len(shards)} shards are done ({', '.join(map(str, sorted(done)))}) and stay"
            raise IngestError(f"{lost}. {there if done else 'No shard is done'}; run again to go on") from lost
    for host, its in sorted(by_host.items()):
        seconds = max(it.ended_s for it in its) - min(it.begun_s for it in its)
        samples = sum(len(shards[it.shard].positions) for it in its)
        log.info("%s prepared %d samples, %.0f a second, as %d shards", host, samples, samples / seconds, len(its))
    sizes = {entry.name: entry.size_bytes for entry in place.find()}
    for shard in shards:
        if not are_there(done[shard.number], sizes):
            raise IngestError(
                f"{shard} was written but is not in {place}: the machines of engine= must share cache_dir=, or it must "
                "be a URL; and one process at a time may build a cache"
            )
    return [done[shard.number] for shard in shards]
