"""Preparation of a dataset's samples by the leading steps of its transform.

Each function takes a ``Stored`` and returns another one, or decides something about it. The wing
``stores`` does the work.
"""

from __future__ import annotations

from dataclasses import replace

from torch.utils.data import get_worker_info

from fastdata.datasets.origin import Origin
from fastdata.datasets.stored import LeadingSteps, Stored
from fastdata.machine.budget import StoragePlan
from fastdata.machine.tables import SampleTable
from fastdata.pixels.known import known_name
from fastdata.pixels.plan import Transform
from fastdata.pixels.resize import Resize
from fastdata.pixels.split import leading_transforms
from fastdata.pixels.transform_keys import describe_transforms
from fastdata.report import warn_user
from fastdata.sources.files import FileSource
from fastdata.sources.source import Source
from fastdata.stores.options import Options
from fastdata.stores.prepare import OldSamples, Prepared, prepare_storage
from fastdata.stores.preparer import choose_preparer


def to_prepare(
    source: Source,
    options: Options,
    *,
    prepare: Transform | None = None,
    files: SampleTable | None = None,
) -> Stored:
    """Return samples that are not prepared yet.

    Args:
        source: source of the samples.
        options: options of the dataset.
        prepare: the user's ``prepare=``, the first step; None if there is none.
        files: paths and targets, if they are known beforehand.
    """
    steps = () if prepare is None else (prepare,)
    if options.resize is not None:
        steps = (*steps, Resize(options.resize))
    return Stored(
        source=source,
        files=files,
        options=options,
        first_steps=steps,
        prepared=_nothing_kept("chosen at the first read, or once there is a transform"),
        is_remote=source.is_remote,
    )


def may_wait(stored: Stored, transform: Transform | None) -> bool:
    """Return True if samples are prepared only at the first read, or when a transform is assigned.

    timm makes a dataset of files without a transform and assigns one later. Before its steps,
    decoded samples may take ten times as much memory as after them.
    """
    options = stored.options
    if transform is not None or stored.files is None or len(stored.samples) == 0:
        return False
    return options.cache_dir is None and options.on_error != "skip" and options.storage != "none"


def prepare_samples(
    stored: Stored, origin: Origin, transform: Transform | None, replaced: OldSamples | None = None
) -> Stored:
    """Choose where samples are stored, and store them after the leading steps of a transform.

    ``replaced`` are older samples. Their memory may be freed first if it is too small for both.
    """
    options = stored.options
    source = stored.source
    assert source is not None
    leading = leading_transforms(transform)
    preparer = choose_preparer(source, (*stored.first_steps, *leading))
    if options.cache_dir is None or len(source) == 0:
        prepared = prepare_storage(preparer, options, stored.files, replaced)
    else:
        # filelock, which only caches need, takes 20 ms to import.
        from fastdata.stores.build import prepare_on_disk

        described = origin.describe(stored, source)
        prepared = prepare_on_disk(
            preparer, options, stored.files, described, is_own_list=origin.is_own_list
        )
    if isinstance(source, FileSource):  # files that were left out before are no longer in its list
        skipped = (*stored.prepared.skipped, *prepared.skipped)
        prepared = replace(prepared, skipped=skipped)
    is_upright = "exif_transpose" in map(known_name, preparer.prepare.steps)
    after = LeadingSteps(
        len(leading), describe_transforms(leading, ""), ", ".join(map(repr, leading))
    )
    return replace(stored, prepared=prepared, after=after, is_upright=is_upright)


def leave_in_worker(stored: Stored) -> Stored:
    """Return samples that are not stored, and warn: their first read came in a worker process."""
    reason = (
        "storage='none': the first read came in a worker process, which cannot share the samples "
        "that it prepares"
    )
    warn_user(
        f"{reason}. Files are decoded on every read. Give the dataset a transform, call its "
        "prepare(), or read it with fastdata.DataLoader."
    )
    return replace(stored, prepared=_nothing_kept(reason), after=LeadingSteps())


def is_outdated(stored: Stored, transform: Transform | None, *, was_read: bool) -> bool:
    """Return True if samples should be prepared again for another transform.

    This is necessary if they are stored after other steps. It is worthwhile if no sample was read
    yet and a better store is possible: timm makes a dataset without a transform and assigns one
    later, and until then images may be stored at full size.
    """
    after = stored.after
    assert after is not None
    if (
        stored.kept is not None
        and describe_transforms(leading_transforms(transform, after.count), "") != after.key
    ):
        return True
    # A worker process cannot share a new store with the other workers.
    if stored.source is None or get_worker_info() is not None:
        return False
    # After other steps, samples may fit into memory, or take less of it.
    if stored.kept is None:
        may_gain = stored.options.storage == "auto" and len(stored.samples) > 0
    else:
        may_gain = stored.filled_share() == 0 or (not after.key and not was_read)
    return may_gain and describe_transforms(leading_transforms(transform), "") != after.key


def unprepared(stored: Stored, source: Source) -> Stored:
    """Return the same samples as not prepared yet, to be read from ``source``."""
    files = stored.table if isinstance(source, FileSource) else None
    prepared = replace(stored.prepared, kept=None)
    return replace(stored, source=source, files=files, prepared=prepared, after=None)


def _nothing_kept(reason: str) -> Prepared:
    """Return a ``Prepared`` without stored samples."""
    return Prepared(storage_plan=StoragePlan(storage="none", reason=reason))
