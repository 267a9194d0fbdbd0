"""The samples of a dataset: how they are prepared and read, and what goes to other processes.

A dataset holds one ``DatasetSamples`` as its only private attribute, so that subclasses may use any
other name. How samples were prepared and how they are read are values: ``Stored`` and ``Reader``.
"""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fastdata.datasets.batch import (
    OWN_ITEM,
    REPEAT_SHIFT,
    IndexBatch,
    as_numbers,
    count_repetitions,
    draw_seed,
    positions,
)
from fastdata.datasets.origin import Origin
from fastdata.datasets.reader import Reader, Stored, compile_reader
from fastdata.datasets.watch import Watch
from fastdata.errors import StoreGoneError
from fastdata.machine import StoragePlan, StorageReport
from fastdata.machine.shared import ArrayBlock, SampleTable
from fastdata.pixels import PairStep, StandardTransform, Step, describe_steps, leading_steps
from fastdata.pixels.compose import known_name
from fastdata.pixels.images import tensor_class
from fastdata.report import log, warn_user
from fastdata.sources import DatasetSource, FileSource, Source
from fastdata.stores.prepare import OldSamples, Prepared, prepare_storage, report_storage
from fastdata.stores.writers import read_path

OTHER_LISTS = (
    "Take some of the samples by torch.utils.data.Subset(dataset, indices), other labels by "
    "target_transform= or by ImageManifest([(path, label), ...])."
)
"""What to do instead of assigning samples or targets."""


class ReaderHandle:
    """The reader of a dataset, until the dataset is closed; then ``reader`` is None."""

    def __init__(
        self,
        reader: Reader | None,
        gone: str = "the dataset was closed; create it again to read from it",
    ) -> None:
        self.reader = reader
        self._gone = gone

    def __call__(self) -> Reader:
        """Return the reader. Hold it while a batch is read: it keeps the memory valid.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        reader = self.reader
        if reader is None:
            raise StoreGoneError(self._gone)
        return reader


def nothing_kept(reason: str) -> Prepared:
    """Return the value for samples that are not stored."""
    return Prepared(storage_plan=StoragePlan(storage="none", reason=reason))


def not_yet_prepared() -> Prepared:
    """Return the value for samples that are prepared later."""
    return nothing_kept("chosen at the first read, or once there is a transform")


def _unprepared(stored: Stored, source: Source) -> Stored:
    """Return samples that are still to be prepared."""
    files = stored.table if isinstance(source, FileSource) else None
    prepared = replace(stored.prepared, kept=None)
    return replace(stored, source=source, files=files, prepared=prepared, after=None)


class DatasetSamples:
    """The samples of one dataset, as they are prepared and read.

    It pickles as a handle of the stored samples, which another process of the same machine opens.
    A deep copy in this process shares them.

    Attributes:
        class_name: of the dataset, for messages.
        own_method: method of a subclass that makes the items; see ``own_reader`` in dataset.py.
        origin: where samples come from.
        stored: how samples are prepared; once the dataset is closed, how they were.
        transform, target_transform: of the user.
        pair_transform: of the user, for sample and target together, instead of the other two.
        reader: the latest reader; once the dataset is closed, the last one without its memory.
        handle: the handle of that reader.
        epoch: as set by ``set_epoch``, also for worker processes that persist; None until then.
        was_read: True if samples were read since they were prepared.
    """

    reader: Reader
    handle: ReaderHandle
    _watch: Watch

    def __init__(
        self,
        *,
        class_name: str,
        own_method: str | None,
        origin: Origin,
        stored: Stored,
        transform: Step | None,
        target_transform: Step | None,
        pair_transform: PairStep | None = None,
    ) -> None:
        self.class_name = class_name
        self.own_method = own_method
        self.origin = origin
        self.stored = stored
        self.transform = transform
        self.target_transform = target_transform
        self.pair_transform = pair_transform
        self.epoch: ArrayBlock | None = None
        self.was_read = False
        self._begin()
        self._open()

    def _begin(self) -> None:
        """Set what every copy has of its own."""
        self._lock = threading.RLock()  # held by the thread that changes the samples
        # Of this reader and of earlier ones, which epochs that have begun hold.
        self._handles: weakref.WeakSet[ReaderHandle] = weakref.WeakSet()

    def _open(self) -> None:
        """Prepare the samples now, or leave that to the first read or the next transform.

        timm assigns a transform later: as decoded, samples may take ten times as much memory as
        after its steps.
        """
        stored = self.stored
        options = stored.options
        is_asked_for = options.cache_dir is not None or options.on_error == "skip"
        stores_nothing = options.storage == "none" or len(stored.samples) == 0
        knows_steps = self.transform is not None or stored.files is None
        if stored.after is None and (knows_steps or is_asked_for or stores_nothing):
            self._prepare()
        else:
            self._serve(stored)

    # Reading

    def refresh(self) -> None:
        """Bring the reader up to date; steps of the transform may have been changed in place."""
        reader = self.handle.reader or self.handle()
        if self.stored.after is None:
            self._end_waiting()
            reader = self.reader
        self.was_read = True
        if self._watch.is_changed():
            self._compile()
        elif self.target_transform is not reader.target_transform:
            self._read_by(replace(reader, target_transform=self.target_transform))

    def fresh_reader(self) -> Reader:
        """Return the reader of an epoch that begins now.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        self.refresh()
        return self.handle()

    def stored_target(self, index: int) -> Any:
        return self.handle().stored_target(index)

    def drawing(self, indices: Sequence[int], reader: Reader) -> IndexBatch:
        """Return the batch of these indices with what its random draws follow.

        A loader of fastdata's gives an ``IndexBatch``, which holds that already. Other reads draw
        a seed from torch's generator, unless the dataset has a ``seed`` and a ``set_epoch``.
        """
        if not isinstance(indices, (list, np.ndarray, torch.Tensor)):
            indices = list(indices)  # read once: a second pass may give other indices, or none
        index_B = positions(as_numbers(indices), reader.length)
        if isinstance(indices, IndexBatch) and np.array_equal(index_B, indices.positions):
            return indices  # not changed by a method of a subclass
        item = OWN_ITEM.get()
        if item is not None and item.seed is not None:
            return IndexBatch.of(indices, index_B, item.visits(index_B), item.seed)
        before_B = count_repetitions(indices, index_B)
        epoch = self.epoch_number
        seed = self.stored.options.seed
        if seed is None or epoch is None:
            seed = draw_seed() if reader.may_draw else 0
        visit_B = (before_B << REPEAT_SHIFT) + (epoch or 0)
        return IndexBatch.of(indices, index_B, visit_B, seed)

    @property
    def epoch_number(self) -> int | None:
        """The epoch that the user set; None if loaders count theirs."""
        return None if self.epoch is None else int(self.epoch["epoch"][0])

    def set_epoch(self, epoch: int) -> None:
        self.handle()
        if self.epoch is None:
            self.epoch = ArrayBlock.of({"epoch": np.zeros(1, np.int64)}, seal=False)
        self.epoch["epoch"][0] = epoch

    def close(self) -> None:
        """Give the memory back. A batch that is being read is read to its end."""
        for handle in set(self._handles):
            handle.reader = None  # the memory goes with the last batch that is being read from it
        self._let_go(replace(self.stored, source=None, files=None))
        self.epoch = None

    @property
    def is_closed(self) -> bool:
        return self.handle.reader is None

    def files(self, name: str) -> SampleTable:
        """Return the table of the files, for the attribute ``name`` of the dataset.

        Raises:
            AttributeError: samples are not files, so that ``hasattr`` is False.
        """
        self.handle()
        table = self.stored.table
        if table is None or not table.has_paths:
            raise AttributeError(
                f"this {self.class_name} has no attribute {name}: it does not list files"
            )
        return table

    def source(self) -> Source:
        """Return what samples are read from; the stored samples if nothing else is known."""
        return self.origin.source(self.stored)

    def report(self) -> StorageReport:
        self.handle()
        source = self.source()
        stored = self.stored
        steps = () if source is stored.kept else (*stored.first_steps, *self.reader.plan.prepare)
        return report_storage(read_path(source, steps), stored.options)

    # Changes

    @property
    def transforms(self) -> PairStep | None:
        """What is called with sample and target, as torchvision's datasets show it."""
        has_none = self.transform is None and self.target_transform is None
        if self.pair_transform is not None or has_none:
            return self.pair_transform
        return StandardTransform(self.transform, self.target_transform)

    def assign_transform(self, transform: Step | None) -> None:
        """Serve another transform; if that fails, nothing is changed."""
        self.handle()
        with self._changing() as before:
            self.transform = transform
            self._bring_up(before)

    def assign_pair_transform(self, transforms: PairStep | None) -> None:
        """Serve another transform of sample and target; if that fails, nothing is changed."""
        self.handle()
        with self._changing() as before:
            self.pair_transform = transforms
            self._bring_up(before)

    def relist(self, name: str, listed: Sequence[Any]) -> None:
        """Refuse other samples or targets; see ``FileSamples``."""
        raise AttributeError(
            f"{name} of this {self.class_name} cannot be assigned: its items come from another "
            f"dataset. {OTHER_LISTS}"
        )

    def view(self, transform: Step | None) -> DatasetSamples:
        """Return the same samples under another transform; both hold the memory."""
        self.handle()
        other = self._copied()
        other.was_read = True  # maybe through this one
        other.assign_transform(transform)
        return other

    def _copied(self) -> DatasetSamples:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._begin()
        other.epoch = self.epoch and ArrayBlock.of(self.epoch, seal=False)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> DatasetSamples:
        """Copy the user's transforms and a dataset that is read, but share the stored samples.

        A copy made by way of pickle would lose ``storage_options``, which may be secret.
        """
        self.handle()
        other = self._copied()
        names = ["transform", "target_transform", "pair_transform"]
        vars(other).update({name: copy.deepcopy(getattr(self, name), memo) for name in names})
        if self.stored.kept is None and isinstance(self.stored.source, DatasetSource):
            source = copy.deepcopy(self.stored.source, memo)
            other.stored = replace(self.stored, source=source)
        other._compile()
        return other

    def prepare(self) -> None:
        """Prepare all samples now; if that fails, nothing is changed."""
        self.handle()
        with self._changing() as before:
            options = replace(self.stored.options, at_once=True)
            if self.stored.after is None:
                self.stored = replace(self.stored, options=options)
                self._end_waiting()
            elif self.stored.kept is not None and self.stored.filled_share() < 1:
                self.stored = replace(self.stored, options=options)
                self._prepare_again(before)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """Put everything back as it was if the block raises; gives the attributes from before."""
        with self._lock:
            before = dict(vars(self))
            try:
                yield before
            except BaseException:
                vars(self).update(before)
                raise

    def _bring_up(self, before: dict[str, Any]) -> None:
        """Serve the transform, from samples that are prepared after its first steps."""
        after = self.stored.after
        if after is None and self.transform is not None:
            self._end_waiting()
        elif after is None or not self._is_outdated(*after):
            self._compile()
        else:
            _, key, text = after
            if self.stored.filled_share() > 0 and (self.was_read or key):
                log.warning(
                    "samples are prepared again: the new transform does not begin with %s",
                    text or "no step",
                )
            self._prepare_again(before)

    def _is_outdated(self, count: int, key: str, _: str) -> bool:
        """True if samples are stored after other steps, or a better store may be made unnoticed.

        timm makes a dataset without a transform and assigns one later: images were kept whole, and
        none was read yet.
        """
        stored = self.stored
        if (
            stored.kept is not None
            and describe_steps(leading_steps(self.transform, count), "") != key
        ):
            return True
        # After other steps samples may fit, or take less.
        may_gain = stored.filled_share() == 0 or (not key and not self.was_read)
        if stored.kept is None:
            may_gain = stored.options.storage == "auto" and self.reader.length > 0
        # A worker process cannot share a store with the others.
        may_gain &= stored.source is not None and get_worker_info() is None
        return may_gain and describe_steps(leading_steps(self.transform), "") != key

    # Preparing

    def _end_waiting(self) -> None:
        """Prepare samples that waited for their first read or a transform."""
        with self._lock:
            if self.stored.after is not None:  # another thread was first
                return
            if get_worker_info() is None:
                self._prepare()
                return
            reason = (
                "storage='none': the first read came in a worker process, which cannot share what "
                "it prepares"
            )
            warn_user(
                f"{reason}. Files are decoded at each read. Give the dataset a transform, call its "
                "prepare(), or read it by fastdata.DataLoader."
            )
            self.stored = replace(self.stored, prepared=nothing_kept(reason), after=(0, "", ""))
            self._compile()

    def _prepare_again(self, before: dict[str, Any]) -> None:
        """Prepare samples in place of others.

        The old ones stay until the new ones are there, so that nothing is lost if that fails. Where
        memory is too small for both, the old ones go first, and are prepared again if they are read
        after a failure.

        Args:
            before: from ``_changing``.
        """
        source = self.source()
        if source is self.stored.kept:
            self._compile()  # raises: samples cannot be prepared again
            return
        kept = before["stored"].kept
        size_bytes = 0 if kept is None else sum(store.size_bytes for store in kept.stores)
        del kept  # nothing here may hold the old samples
        self.stored = _unprepared(self.stored, source)
        self._prepare(OldSamples(size_bytes, partial(self._drop, before)))

    def _drop(self, before: dict[str, Any]) -> None:
        """Forget the old samples. Epochs that have begun hold them to their end."""
        old = _unprepared(before["stored"], before["origin"].source(before["stored"]))
        self._read_by(replace(before["reader"], stored=old))
        before.update(stored=old, reader=self.reader, handle=self.handle)

    def _prepare(self, replaced: OldSamples | None = None) -> None:
        """Choose where samples are stored, and store them."""
        old = self.stored
        options = old.options
        source = old.source
        assert source is not None
        leading = leading_steps(self.transform)
        path = read_path(source, (*old.first_steps, *leading))
        if options.cache_dir is None or len(source) == 0:
            prepared = prepare_storage(path, options, old.files, replaced)
        else:
            # filelock, which only caches need, takes 20 ms to import.
            from fastdata.stores.build import prepare_on_disk

            prepared = prepare_on_disk(
                path,
                options,
                old.files,
                self.origin.describe(old, source),
                is_own_list=self.origin.is_own_list,
            )
        if isinstance(source, FileSource):  # it does not list those that were left out before
            skipped = (*old.prepared.skipped, *prepared.skipped)
            prepared = replace(prepared, skipped=skipped)
        self.was_read = False
        after = len(leading), describe_steps(leading, ""), ", ".join(map(repr, leading))
        is_upright = "exif_transpose" in map(known_name, path.prepare.steps)
        self._serve(replace(old, prepared=prepared, after=after, is_upright=is_upright))

    def _serve(self, stored: Stored) -> None:
        self.stored = stored
        self._compile()

    def _compile(self) -> None:
        own = self.own_method
        reader = compile_reader(
            self.stored,
            transform=self.transform,
            target_transform=self.target_transform,
            pair_transform=self.pair_transform,
            own=f"{self.class_name} has a {own} of its own" if own else "",
        )
        unknown = (step for view in reader.plan.each for step in view.unknown)
        self._watch = Watch((self.transform, self.pair_transform), unknown)
        self._read_by(reader)

    def _read_by(self, reader: Reader) -> None:
        """Have coming epochs read by it; those that have begun go on as they did."""
        self.reader = reader
        self.handle = ReaderHandle(reader)
        self._handles.add(self.handle)

    def _let_go(self, stored: Stored) -> None:
        """Drop the memory of the samples; ``stored`` is what stays known of them."""
        self.stored = replace(stored, prepared=replace(stored.prepared, kept=None))
        self.reader = replace(self.reader, stored=self.stored)

    # Other processes

    def __getstate__(self) -> dict[str, Any]:
        self.refresh()  # raises here, not in the other process, what the copy cannot serve
        stored = self.stored
        kept = stored.kept
        stores = () if kept is None else kept.stores
        opened: Any = {
            "stored": replace(
                stored,
                # An executor stays with the process that has it.
                options=replace(stored.options, engine="local", shard_bytes=None),
                source=stored.source if kept is None else None,
                prepared=replace(stored.prepared, skipped=()),
            ),
            "epoch": self.epoch,
        }
        if get_spawning_popen() is not None:
            # An error while a process starts would end it without a word. So it is raised when the
            # process reads.
            opened = bytes(ForkingPickler.dumps(opened))
        names = ["class_name", "own_method", "origin", "was_read"]
        names += ["transform", "target_transform", "pair_transform"]
        return {
            # Unpickling it imports the classes of samples.
            "imported": [tensor_class(store.spec.form) for store in stores],
            "opened": opened,
            **{name: getattr(self, name) for name in names},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        del state["imported"]
        opened = state.pop("opened")
        vars(self).update(state)
        self._begin()
        try:
            vars(self).update(pickle.loads(opened) if isinstance(opened, bytes) else opened)
            self._compile()
        except StoreGoneError as gone:
            self.handle = ReaderHandle(None, str(gone))
