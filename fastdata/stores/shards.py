"""Shards of a cache, each written by one task, in this or any other process.

The bytes of a shard depend only on its samples, not on the process that writes them. A task writes
the shard manifest, ``shard-<name>.npz``, last. So a shard whose manifest and files exist is
complete, and is not written again.
"""

from __future__ import annotations

import math
import multiprocessing
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastdata.errors import IngestError, RemoteError, SampleError
from fastdata.machine.units import parse_bytes
from fastdata.report import log, progress_bar
from fastdata.sources.files import FileSource
from fastdata.sources.local_files import fleeting_folder
from fastdata.sources.remote import Place
from fastdata.stores.cache import Cache
from fastdata.stores.disk import shard_manifest_name
from fastdata.stores.engines import run_elsewhere
from fastdata.stores.ingest import (
    Written,
    check_skipped,
    ingest,
    ingest_workers,
    run_preparing,
    sizes_of,
)
from fastdata.stores.manifest import Manifest
from fastdata.stores.options import Options
from fastdata.stores.preparer import Preparer, read_samples
from fastdata.stores.store import Store
from fastdata.stores.targets import Columns, pack_targets
from fastdata.stores.writer import WriterPlan

_MOST_SHARDS = 200
"""The most shards: a process keeps a descriptor open for each file, and often 1,024 is the limit.
"""

_LEAST_BYTES = 16 << 20
"""Size of the smallest shards. A smaller one is not worth a task."""

_GOOD_BYTES = 32 << 20
"""Size of shards once there are ``_GOOD_SHARDS``, which are enough for all workers."""

_GOOD_SHARDS = 64


def samples_per_shard(count: int, need_bytes: int, shard_bytes: int | str | None) -> int:
    """Return the number of samples in a shard.

    It is a power of 2, so that the borders of shards stay when a few samples come or go.

    Args:
        count: number of all samples.
        need_bytes: about the size of all samples.
        shard_bytes: about the size of a shard that the user wants; None for the default.
    """
    if shard_bytes is None:
        # A small dataset has few shards, a larger one 64 that grow, then more of the same size.
        size_bytes = min(max(need_bytes / _GOOD_SHARDS, _LEAST_BYTES), _GOOD_BYTES)
    else:
        size_bytes = max(parse_bytes(shard_bytes, of=0), 1)
    shards = min(math.ceil(need_bytes / size_bytes), _MOST_SHARDS, count)
    rows = math.ceil(count / max(shards, 1))
    return 1 << (rows - 1).bit_length()


def file_sizes(place: Place) -> dict[str, int]:
    """Return the sizes of the files in a place, by name."""
    return {name: size for name, (size, _) in place.find().result().items() if "/" not in name}


def may_stay_out(
    preparer: Preparer, options: Options, skipped: Sequence[SampleError], first_index: int = 0
) -> bool:
    """Return True if samples may be left out, and none of those left out can be read now.

    Args:
        preparer: reader and preparer of the samples.
        options: options of the dataset.
        skipped: errors of the samples that were left out.
        first_index: number that is added to the index of each error.
    """
    if skipped and options.on_error != "skip":
        return False
    # A missing file may exist now, but damaged bytes stay damaged.
    left_out = [first_index + error.index for error in skipped if error.may_pass]
    with suppress(RemoteError, IngestError):  # the machine or network fails: no sample can be read
        return all(isinstance(read, SampleError) for read in read_samples(preparer, left_out))
    return True


class ShardTask(NamedTuple):
    """A shard to write.

    Args:
        name: fingerprint of the shard.
        positions: indices of its samples in the source.
        columns: paths and targets of these samples, for a process without those of all samples.
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
        preparer: reader and preparer of the samples.
        plans: plan for each part of a shard.
        options: options of the dataset.
        manifest: manifest of the cache, without classes.
        place: folder or URL of the cache.
        count: number of all samples. The preparer may have only those of one shard.
    """

    preparer: Preparer
    plans: Sequence[WriterPlan]
    options: Options
    manifest: Manifest
    place: Place
    count: int

    def __call__(self, task: ShardTask) -> bytes:
        """Write the files of a shard, then its manifest, and return the manifest's bytes."""
        preparer = self.preparer
        if multiprocessing.parent_process() is not None:
            # An executor has a process for each core, and OpenMP's threads do not survive a fork:
            # an operation would wait for them forever.
            torch.set_num_threads(1)
        if task.columns is not None:
            assert isinstance(preparer.source, FileSource)
            preparer = preparer._replace(source=replace(preparer.source, **task.columns))
        with ExitStack() as unfinished, ExitStack() as cleanup:
            folder = Path(self.place.url)
            if self.place.is_remote:
                folder = cleanup.enter_context(fleeting_folder())
            # Two tasks may write the same shard, for example after a node was lost. Each writes
            # files with unique names and renames them at the end. Their bytes are equal, so any
            # order is right.
            plans = [replace(plan, path=folder / uuid.uuid4().hex) for plan in self.plans]
            stores, written = ingest(preparer, plans, task.positions, self.options, self.count)
            for store in stores:
                cleanup.callback(store.close)
            shard = self._make_index(task, stores, written)
            packed = shard.pack()
            for plan, [name] in zip(plans, shard.files(), strict=True):
                assert plan.path
                if self.place.is_remote:
                    self.place.upload(name, plan.path)
                else:
                    plan.path.replace(folder / name)
                    unfinished.callback(self.place.remove, name)
            # The manifest is written last, so that the files exist if it does.
            self.place.write(shard_manifest_name(task.name), packed)
            unfinished.pop_all()
        return packed

    def _make_index(self, task: ShardTask, stores: Sequence[Store], written: Written) -> Cache:
        """Make the index of a shard that was just written."""
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
            SampleError: a sample cannot be prepared. It has the path and index of the sample.
            IngestError: a worker of this machine was lost, or too many samples would be left out.
                Finished shards stay. Other executors raise their own errors.
            ShapesDifferError: a sample has another shape.
            ValueError: the code that prepares samples cannot be pickled.
        """
        complete = self._complete(tasks)
        left = [task for task in tasks if task.name not in complete]
        missing = sum(len(task.positions) for task in left)
        first_index = {task.name: task.positions[0] for task in tasks}
        skipped: dict[int, SampleError] = {}
        if complete:
            log.warning(
                "preparing %d of %d samples: those of new or changed files, of damaged shards, or "
                "those missing after a stopped build",
                missing,
                self.count,
            )
        with (
            closing(self._run(left)) as written,
            progress_bar(self.count, f"preparing {self.count:,} images") as bar,
        ):
            new = (Cache.unpack(self.place, data) for data in written)
            for shard in chain(list(complete.values()), new):
                [name] = shard.shard_names
                complete[name] = shard
                # Checked over all shards, and before the index is written: the next run opens a
                # cache that has an index without another check.
                skipped |= {first_index[name] + error.index: error for error in shard.skipped}
                check_skipped(skipped, self.count)
                bar.update(len(shard.columns["kept"]))
            bar.set_description(f"prepared {self.count:,} images", refresh=False)
            bar.set_postfix_str(f"on disk, {sizes_of(self.plans[0])}", refresh=False)
        return [complete[task.name] for task in tasks]

    def _complete(self, tasks: Sequence[ShardTask]) -> dict[str, Cache]:
        """Return the shards that are complete already, by name."""
        # One listing, and then all manifests at once, because each answer of a server takes a
        # while.
        sizes = file_sizes(self.place)
        found = [task for task in tasks if shard_manifest_name(task.name) in sizes]
        requests = [self.place.submit(shard_manifest_name(task.name)) for task in found]
        complete = {}
        for task, request in zip(found, requests, strict=True):
            with suppress(Exception):  # damaged bytes may raise anything
                shard = Cache.unpack(self.place, request.result())
                is_whole = all(files.items() <= sizes.items() for files in shard.files())
                is_whole &= shard.shard_names == [task.name]
                first = task.positions[0]
                if is_whole and may_stay_out(self.preparer, self.options, shard.skipped, first):
                    complete[task.name] = shard
        return complete

    def _run(self, tasks: Sequence[ShardTask]) -> Generator[bytes, None, None]:
        """Write shards, and yield the manifest of each written shard."""
        workers = ingest_workers(self.options)
        engine = self.options.engine
        # Workers that write different shards at the same time use one thread each. An executor
        # cannot be pickled, so it is not sent with the tasks.
        one_each = replace(self.options, prepare_workers=1, engine="local")
        alone = replace(self, options=one_each)
        if engine != "local":
            yield from run_elsewhere(alone, tasks, engine)
        elif 1 < workers <= len(tasks):
            yield from run_preparing(alone, tasks, self.preparer, self.plans, self.options)
        else:  # fewer shards than workers: all workers prepare one shard after the other
            yield from map(self, tasks)
