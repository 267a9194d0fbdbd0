"""What a dataset serves from a cache: the stores of its parts, and the table of paths and targets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from fastdata.cache.coding import Coders
from fastdata.cache.opening import open_part
from fastdata.cache.recall import Recalled
from fastdata.contents import Contents
from fastdata.errors import CacheError
from fastdata.memory import format_bytes
from fastdata.preparation import Prepared
from fastdata.report import log
from fastdata.storage import StoragePlan
from fastdata.stores.disk import DiskStore
from fastdata.table import SampleTable

__all__ = ["map_found"]


def map_found(found: Recalled, coders: Coders, make_table: Callable[[np.ndarray], SampleTable]) -> Prepared:
    """Map the samples of a cache that are up to date and were not left out.

    Args:
        found: what of the cache is to be served.
        coders: what decodes each part; None for raw ones.
        make_table: makes the table of chosen samples.

    Raises:
        CacheError: files are missing or damaged, or there is no sample.
    """
    manifest = found.manifest
    kept = np.flatnonzero(found.rows[0] >= 0)
    stores: list[DiskStore] = []
    with contextlib.ExitStack() as cleanup:
        for part, rows, coder in zip(manifest.parts, found.rows, coders, strict=True):
            stores.append(open_part(found.folder, part, rows[kept], coder))
            cleanup.callback(stores[-1].close)
        if not len(kept):
            raise CacheError(f"{found.folder} holds no sample")
        table = make_table(kept)
        cleanup.pop_all()
    what = "+".join(dict.fromkeys(part.codec["name"] if part.codec else "raw" for part in manifest.parts))
    plan = StoragePlan(
        storage="disk",
        reason=f"storage='disk': {format_bytes(manifest.size_bytes)} {what} in {found.folder}",
        codec=None if what == "raw" else what,
    )
    log.info("%s", plan.reason)
    contents = Contents(tuple(stores), table, manifest.is_tuple, manifest.target_is_part)
    return Prepared(storage_plan=plan, contents=contents, table=table, skipped=found.skipped())
