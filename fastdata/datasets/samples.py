"""The state of a dataset: its samples, their reader, and changes of both.

A dataset has one ``DatasetSamples`` as its only private attribute, so that subclasses may use any
other name. The work is done by the values in it: ``Stored``, ``Transforms`` and ``Reader``.
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
from torch.utils.data import get_worker_info

from fastdata.datasets.compiler import compile_reader
from fastdata.datasets.origin import Origin
from fastdata.datasets.preparing import (
    is_outdated,
    leave_in_worker,
    may_wait,
    prepare_samples,
    unprepared,
)
from fastdata.datasets.reader import Reader
from fastdata.datasets.snapshot import Snapshot
from fastdata.datasets.stored import Stored, Transforms
from fastdata.errors import StoreGoneError
from fastdata.machine.blocks import ArrayBlock
from fastdata.machine.budget import StoragePlan
from fastdata.machine.tables import SampleTable
from fastdata.pixels.plan import Transform
from fastdata.pixels.samples import tensor_class
from fastdata.report import log
from fastdata.sources.items import DatasetSource
from fastdata.sources.source import Source
from fastdata.stores.prepare import OldSamples

OTHER_LISTS = (
    "For some of the samples use torch.utils.data.Subset(dataset, indices), for other labels "
    "target_transform= or ImageManifest([(path, label), ...])."
)
"""Advice instead of assigning samples or targets."""


class ReaderHandle:
    """The reader of a dataset, until the dataset is closed.

    An epoch holds this handle and not the reader, which would keep the samples in memory.

    Attributes:
        reader: the reader; None once the dataset is closed.
        reason: message of the error for a closed dataset.
    """

    def __init__(self, reader: Reader | None, reason: str = "") -> None:
        self.reader = reader
        self.reason = reason

    def __call__(self) -> Reader:
        """Return the reader. Keep it while a batch is read, because it keeps the memory valid.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        reader = self.reader  # read once: another thread may close the dataset
        if reader is None:
            raise StoreGoneError(self.reason)
        return reader


class DatasetSamples:
    """The samples of one dataset, with everything that is needed to prepare and read them.

    It pickles as a handle of the stored samples, which another process of the same machine opens.
    A deep copy in this process shares the memory.

    Attributes:
        class_name: class of the dataset, for messages.
        own_method: name of the method of a subclass that makes the items; None if there is none.
        origin: origin of the samples.
        stored: the samples and their preparation; without memory once the dataset is closed.
        transforms: the user's transforms.
        reader: the latest reader; without memory once the dataset is closed. Do not keep a
            reference to it: it keeps the samples in memory.
        handle: handle of that reader, for an epoch that begins now.
        epoch: epoch of ``set_epoch``, in memory that worker processes share; None before a call.
        was_read: True if samples were read since they were prepared.
    """

    reader: Reader
    handle: ReaderHandle
    _snapshot: Snapshot

    def __init__(
        self,
        *,
        class_name: str,
        own_method: str | None,
        origin: Origin,
        stored: Stored,
        transforms: Transforms,
    ) -> None:
        self.class_name = class_name
        self.own_method = own_method
        self.origin = origin
        self.stored = stored
        self.transforms = transforms
        self.epoch: ArrayBlock | None = None
        self.was_read = False
        self._begin()
        if stored.after is None and not may_wait(stored, transforms.of_sample):
            self._prepare()
        else:
            self._compile()

    def _begin(self) -> None:
        """Set the attributes that a copy does not share."""
        # Held by the thread that changes the samples. If several threads are the first to read a
        # dataset, one of them prepares it, and the others wait.
        self._lock = threading.RLock()
        # Handles of this reader and of earlier ones, which running epochs still hold.
        self._handles: weakref.WeakSet[ReaderHandle] = weakref.WeakSet()

    # Reading

    def refresh(self) -> Reader:
        """Return the reader for an epoch or item that begins now. It includes changes in place.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        reader = self.handle()
        if self.stored.after is None:
            self._end_waiting()
            reader = self.handle()
        self.was_read = True
        if self._snapshot.is_outdated():
            self._compile()
            reader = self.handle()
        return reader

    def stored_target(self, index: int) -> Any:
        return self.handle().targets.stored_target(index)

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
        """Free the memory. Batches that are being read are completed."""
        for handle in set(self._handles):
            handle.reason = "the dataset was closed; create it again to read from it"
            handle.reader = None  # the last batch that is being read frees the memory
        prepared = replace(self.stored.prepared, kept=None)
        self.stored = replace(self.stored, source=None, files=None, prepared=prepared)
        self.reader = replace(self.reader, stored=self.stored)
        self.epoch = None

    @property
    def storage_plan(self) -> StoragePlan:
        return self.stored.prepared.storage_plan

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
        """Return the source of the samples, or the stored samples if nothing else is left."""
        return self.origin.source(self.stored)

    # Changes

    def assign(self, transforms: Transforms) -> None:
        """Replace the transforms; prepare samples again if their first steps differ.

        If that fails, nothing is changed.
        """
        self.handle()
        with self._changing() as before:
            self.transforms = transforms
            transform = transforms.of_sample
            after = self.stored.after
            if after is None and transform is not None:
                self._end_waiting()
            elif after is None or not is_outdated(self.stored, transform, was_read=self.was_read):
                self._compile()
            else:
                if self.stored.filled_share() > 0 and (self.was_read or after.key):
                    log.warning(
                        "samples are prepared again: the new transform does not begin with %s",
                        after.text or "no step",
                    )
                self._prepare_again(before)

    def assign_target_transform(self, transform: Transform | None) -> None:
        self.handle()
        self.transforms = replace(self.transforms, of_target=transform)
        self._read_by(replace(self.reader, target_transform=transform))

    def relist(self, name: str, listed: Sequence[Any]) -> None:
        """Raise an AttributeError: only ``FileSamples`` can replace samples or targets."""
        raise AttributeError(
            f"{name} of this {self.class_name} cannot be assigned: its items come from another "
            f"dataset. {OTHER_LISTS}"
        )

    def view(self, transform: Transform | None) -> DatasetSamples:
        """Return the same samples with another transform. Both hold the memory."""
        self.handle()
        other = self._copied()
        other.was_read = True  # the samples may have been read through this one
        other.assign(replace(other.transforms, of_sample=transform))
        return other

    def _copied(self) -> DatasetSamples:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._begin()
        other.epoch = self.epoch and ArrayBlock.of(self.epoch, seal=False)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> DatasetSamples:
        """Copy the user's transforms, and a dataset that is still read, but share stored samples.

        A copy through pickle would lose ``storage_options``, which may be secret.
        """
        self.handle()
        other = self._copied()
        other.transforms = copy.deepcopy(self.transforms, memo)
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
        """Yield the present attributes, and restore them if the block raises an error."""
        with self._lock:
            before = dict(vars(self))
            try:
                yield before
            except BaseException:
                vars(self).update(before)
                raise

    # Preparing

    def _end_waiting(self) -> None:
        """Prepare samples that waited for their first read or for a transform."""
        with self._lock:
            if self.stored.after is not None:  # another thread has prepared them in the meantime
                return
            if get_worker_info() is None:
                self._prepare()
            else:
                self.stored = leave_in_worker(self.stored)
                self._compile()

    def _prepare_again(self, before: dict[str, Any]) -> None:
        """Replace the stored samples by newly prepared ones.

        The old samples stay until the new ones are complete, so that nothing is lost if this fails.
        If memory is too small for both, the old samples are dropped first. If preparation then
        fails, the next read prepares them again. ``before`` is from ``_changing``.
        """
        source = self.source()
        if source is self.stored.kept:
            self._compile()  # raises, because samples cannot be prepared without a source
            return
        kept = before["stored"].kept
        size_bytes = 0 if kept is None else sum(store.size_bytes for store in kept.stores)
        del kept  # this frame must not hold the old samples while new ones are prepared
        self.stored = unprepared(self.stored, source)
        self._prepare(OldSamples(size_bytes, partial(self._drop, before)))

    def _drop(self, before: dict[str, Any]) -> None:
        """Drop the old samples. Running epochs hold them until they end."""
        old = unprepared(before["stored"], before["origin"].source(before["stored"]))
        self._read_by(replace(before["reader"], stored=old))
        before.update(stored=old, reader=self.reader, handle=self.handle)

    def _prepare(self, replaced: OldSamples | None = None) -> None:
        self.stored = prepare_samples(self.stored, self.origin, self.transforms.of_sample, replaced)
        self.was_read = False
        self._compile()

    def _compile(self) -> None:
        own = self.own_method
        transforms = self.transforms
        reason = f"{self.class_name} has a {own} of its own" if own else ""
        reader = compile_reader(self.stored, transforms, own=reason)
        unknown = [step for view in reader.plan.each for step in view.unknown]
        self._snapshot = Snapshot([transforms.of_sample, transforms.of_both], unknown)
        self._read_by(reader)

    def _read_by(self, reader: Reader) -> None:
        """Use this reader for epochs that begin from now on. Running epochs keep theirs."""
        self.reader = reader
        self.handle = ReaderHandle(reader)
        self._handles.add(self.handle)

    # Other processes

    def __getstate__(self) -> dict[str, Any]:
        self.refresh()  # raises its errors here instead of in the other process
        stored = self.stored
        kept = stored.kept
        stores = () if kept is None else kept.stores
        opened: Any = {
            "stored": replace(
                stored,
                # An executor cannot be sent to another process.
                options=replace(stored.options, engine="local", shard_bytes=None),
                source=stored.source if kept is None else None,
                prepared=replace(stored.prepared, skipped=()),
            ),
            "epoch": self.epoch,
        }
        if get_spawning_popen() is not None:
            # An error while a process starts would end it without a message. So the handles are
            # sent as bytes: ``__setstate__`` opens them, and the error is raised at the first read.
            opened = bytes(ForkingPickler.dumps(opened))
        names = ["class_name", "own_method", "origin", "was_read", "transforms"]
        return {
            # Unpickling these imports the module of the samples' classes, such as tv_tensors.
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
