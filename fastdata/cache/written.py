"""What a writer has added to a cache: files, and what the index is to hold of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastdata.cache.manifest import SampleFile
from fastdata.errors import SampleError
from fastdata.images import SampleSpec
from fastdata.prepare import Ingested
from fastdata.stores.files import DiskFile
from fastdata.stores.writers import WriterPlan


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
