"""Datasets: torch map-style datasets of samples, kept or read anew, and a compiled transform.

What stands here makes them, reads from them, and takes them to other processes. How samples were
prepared, and how they are served, are values: ``Stored`` and ``Reader``. What is shown of samples,
and the datasets that users make, are in public.py.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from enum import Enum
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from fastdata.datasets.batch import (
    OWN_ITEM,
    REPEAT_SHIFT,
    IndexBatch,
    OwnItem,
    as_numbers,
    count_within,
    draw_seed,
    occurrences,
    positions,
)
from fastdata.datasets.reader import Reader, Stored, compile_reader, fresh
from fastdata.datasets.ring import ring_of
from fastdata.errors import SampleError, StoreGoneError
from fastdata.machine import StoragePlan, StorageReport
from fastdata.machine.shared import ArrayBlock, SampleTable
from fastdata.pixels import (
    PairStep,
    StandardTransform,
    Step,
    TransformPlan,
    leading_steps,
    prepare_key,
)
from fastdata.pixels.compose import LIBRARIES, known_name, outside_of
from fastdata.pixels.images import Resize, tensor_class
from fastdata.report import log, warn_user
from fastdata.sources import FileSource, Source
from fastdata.stores.prepare import Options, Prepared, prepare_storage, report_storage
from fastdata.stores.readers import KeptSamples
from fastdata.stores.writers import read_path

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from typing_extensions import Self

    from fastdata.stores.build import Described


class ReaderHandle:
    """A reader, for as long as the dataset that it is of is open; then None."""

    def __init__(
        self,
        reader: Reader | None,
        gone: str = "the dataset was closed; create it again to read from it",
    ) -> None:
        self.reader = reader
        self._gone = gone

    def __call__(self) -> Reader:
        """What to read a batch by, which its memory stays valid with.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        reader = self.reader
        if reader is None:
            raise StoreGoneError(self._gone)
        return reader


_ENDING = threading.RLock()
"""Held where a dataset's first read has it prepared: by one of several threads."""


def _nothing_kept(reason: str) -> Prepared:
    return Prepared(storage_plan=StoragePlan(storage="none", reason=reason))


_OWN = {"_reader", "_handle", "_handles", "_watch", "_writing", "_stored", "_epoch"}
"""What copies in other processes have of their own, or get apart."""


class _Opened(Dataset[Any]):
    """How samples are prepared, who holds them how long, and what goes to another process."""

    target_transform: Step | None
    _epoch: ArrayBlock | None = None
    """As set by ``set_epoch``, for worker processes that persist too; None where loaders count
    theirs."""
    _transform: Step | None
    _pair_transform: PairStep | None = None
    """Takes sample and target together, in place of the two transforms of one of them."""
    _stored: Stored
    """How samples were prepared; once the dataset is closed, how they were."""
    _reader: Reader
    """What is served now, and how; once the dataset is closed, how it was."""
    _handle: ReaderHandle
    """It, for those who read by it; and those that epochs began with before."""
    _handles: weakref.WeakSet[ReaderHandle]
    _writing: Mapping[str, Any] = {}
    """Engine and size of shards of a cache, where these were given."""
    _was_read = False
    _list_name: str | None = ""
    """Of the file that lists the samples, which may change; empty where a folder does, None for a
    list made by code."""

    @classmethod
    def build_cache(
        cls,
        *arguments: Any,
        engine: Literal["local", "ray"] | Executor = "local",
        shard_bytes: int | str | None = None,
        **options: Any,
    ) -> Self:
        """Make a dataset with ``cache_dir=``, and say what writes the cache; returns the dataset.

        Args:
            *arguments: of the dataset.
            engine: ``"local"``, this machine; ``"ray"``, a Ray cluster (extra ``ray``); or any
                ``concurrent.futures.Executor``. All write the same shards, from which a build that
                was stopped goes on.
            shard_bytes: about how large a shard is: bytes, or ``"256MiB"``. Default: 16 to 64 MiB,
                or as much as 200 shards take.
            **options: of the dataset.
        """
        dataset = cls.__new__(cls)
        dataset._writing = {"engine": engine, "shard_bytes": shard_bytes}
        dataset.__init__(*arguments, **options)  # type: ignore[misc]
        return dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that random draws follow, until it is set again.

        It has this effect where a loader of fastdata's reads, and with ``seed=`` in all other
        reads too. Without ``seed=`` these follow torch's generator.
        """
        self._handle()
        if self._epoch is None:
            self._epoch = ArrayBlock({"epoch": np.zeros(1, np.int64)}, seal=False)
        self._epoch["epoch"][0] = epoch

    def close(self) -> None:
        """Give the memory back, unless other views are open; idempotent.

        Batches already served stay valid, and a batch that is being read is read to its end. An
        epoch that runs ends with StoreGoneError.
        """
        for handle in set(self._handles):
            handle.reader = None  # the memory goes with the last batch that is being read from it
        self._let_go(replace(self._stored, source=None, files=None))
        self._epoch = None

    def _let_go(self, stored: Stored) -> None:
        """Hold the memory of no samples; what is known of them is ``stored``."""
        self._stored = replace(stored, prepared=replace(stored.prepared, kept=None))
        self._reader = replace(self._reader, stored=self._stored)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        self._refresh()  # what a copy cannot serve is said here, not where it is opened
        stored = self._stored
        kept = stored.kept
        stores = () if kept is None else kept.stores
        opened: Any = {
            "_stored": replace(
                stored,
                # An executor stays with the process that has it.
                options=replace(stored.options, engine="local", shard_bytes=None),
                source=stored.source if kept is None else None,
                prepared=replace(stored.prepared, skipped=()),
            ),
            "_epoch": self._epoch,
        }
        if get_spawning_popen() is not None:
            # An error while a process starts would end it, and nobody would be told why: it is
            # raised when it reads.
            opened = bytes(ForkingPickler.dumps(opened))
        return {
            # Unpickling it imports what samples are.
            "_imported": [tensor_class(store.spec.form) for store in stores],
            "_opened": opened,
            **{name: it for name, it in vars(self).items() if name not in _OWN},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        del state["_imported"]
        opened = state.pop("_opened")
        self.__dict__.update(state)
        self._handles = weakref.WeakSet()
        try:
            self.__dict__.update(pickle.loads(opened) if isinstance(opened, bytes) else opened)
            self._compile()
        except StoreGoneError as gone:
            self._handle = ReaderHandle(None, str(gone))

    # Preparing

    def _build(
        self,
        source: Source,
        options: Options,
        transform: Step | None,
        target_transform: Step | None,
        *,
        prepare: Step | None = None,
        files: SampleTable | None = None,
    ) -> None:
        """Choose the storage and fill it; ``files``: paths and targets, where known beforehand."""
        self._transform = transform
        self.target_transform = target_transform
        steps = () if prepare is None else (prepare,)
        if options.resize is not None:
            steps = (*steps, Resize(options.resize))
        self._stored = Stored(
            source=source,
            files=files,
            options=options,
            first_steps=steps,
            prepared=_nothing_kept("chosen at the first read, or once there is a transform"),
            is_remote=source.is_remote,
        )
        is_asked_for = options.cache_dir is not None or options.on_error == "skip"
        takes_nothing = options.storage == "none" or len(source) == 0
        # timm assigns one later: as decoded, samples may take ten times as much as after its steps.
        if transform is not None or files is None or is_asked_for or takes_nothing:
            self._prepare()
        else:
            self._serve(self._stored)

    def _end_waiting(self) -> None:
        """Prepare samples now that one is read, or there is a transform."""
        with _ENDING:
            if self._stored.after is not None:  # another thread was first
                return
            if get_worker_info() is None:
                self._prepare()
            else:
                reason = (
                    "storage='none': the first read came in a worker process, which has nobody to "
                    "share with"
                )
                warn_user(
                    f"{reason}. Files are decoded at each read. Give the {type(self).__name__} a "
                    "transform, or call its prepare(), or read it by fastdata.DataLoader."
                )
                nothing = _nothing_kept(reason)
                self._stored = replace(self._stored, prepared=nothing, after=(0, "", ""))
                self._compile()

    def _prepare(self) -> None:
        old = self._stored
        options = old.options
        source = old.source
        assert source is not None
        leading = leading_steps(self._transform)
        path = read_path(source, (*old.first_steps, *leading))
        if options.cache_dir is None or len(source) == 0:
            prepared = prepare_storage(path, options, old.files)
        else:
            # 20 ms with filelock, which only caches take.
            from fastdata.stores.build import prepare_on_disk

            prepared = prepare_on_disk(
                path,
                options,
                old.files,
                self._describe(source),
                is_own_list=self._list_name is None,
            )
        if isinstance(source, FileSource):  # which lacks those that were left out before
            skipped = (*old.prepared.skipped, *prepared.skipped)
            prepared = replace(prepared, skipped=skipped)
        self._was_read = False
        after = len(leading), prepare_key(leading), ", ".join(map(repr, leading))
        is_upright = "exif_transpose" in map(known_name, path.prepare.steps)
        self._serve(replace(old, prepared=prepared, after=after, is_upright=is_upright))

    def _describe(self, source: Source) -> Described:
        raise NotImplementedError

    def _serve(self, stored: Stored) -> None:
        self._stored = stored
        self._handles = weakref.WeakSet()
        self._compile()

    def _compile(self) -> None:
        own = own_reader(self)
        reader = compile_reader(
            self._stored,
            transform=self._transform,
            target_transform=self.target_transform,
            pair_transform=self._pair_transform,
            own=f"{type(self).__name__} has a {own} of its own" if own else "",
        )
        unknown = (step for view in reader.plan.each for step in view.unknown)
        self._watch = Watch((self._transform, self._pair_transform), unknown)
        self._read_by(reader)

    def _read_by(self, reader: Reader) -> None:
        """Have coming epochs read by it; those that have begun go on as they did."""
        self._reader = reader
        self._handle = ReaderHandle(reader)
        self._handles.add(self._handle)

    def _refresh(self) -> None:
        """Serve what the transform says now, whose steps may have been changed in place."""
        reader = self._handle.reader or self._handle()
        if self._stored.after is None:
            self._end_waiting()
            reader = self._reader
        self._was_read = True
        if self._watch.is_changed():
            self._compile()
        elif self.target_transform is not reader.target_transform:
            self._read_by(replace(reader, target_transform=self.target_transform))

    def _origin(self) -> Source:
        """What samples were read from, where that is still known, else the kept samples."""
        stored = self._stored
        return stored.samples if stored.source is None else stored.source


class PreparedDataset(_Opened):
    """What all fastdata datasets are, once their source is known; made by its subclasses only.

    A subclass of these may have a ``__getitem__``, ``__getitems__`` or ``__len__`` of its own, over
    those here: then they are asked for every batch, and what an index means is theirs to say.
    """

    # Three verbs

    def __len__(self) -> int:
        return self._reader.length

    def __getitem__(self, index: int) -> Any:
        """Sample and target, transformed as the transforms say; a dict where items are dicts.

        Raises:
            IndexError: ``index`` is not in [-N, N).
        """
        if OWN_ITEM.get() is None:  # else the epoch began with it, and other threads read
            self._refresh()
        reader = self._handle.reader or self._handle()
        return reader.item(self._drawing([index], reader))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A whole batch: a ``SampleBatch`` if the transform allows, else a list of samples."""
        batch = indices if isinstance(indices, IndexBatch) else None
        # Else the epoch began with it, and other threads read.
        if batch is None or get_worker_info() is not None:
            self._refresh()
        if own_reader(self) != "__getitem__":
            reader = self._handle()
            ring = ring_of(self)
            batch = self._drawing(indices, reader)
            return reader.items(batch, fresh if ring is None else ring.take)
        if batch is None:
            return [self[index] for index in indices]
        return copy_context().run(self._own_items, batch)

    def _own_items(self, batch: IndexBatch) -> list[Any]:
        seed = None if self._stored.options.seed is None else batch.seed
        items = []
        for row, index in enumerate(batch):
            item = OwnItem(int(batch.positions[row]), int(batch.visits[row]), seed)
            OWN_ITEM.set(item)
            items.append(self[index])
        return items

    def _drawing(self, indices: Sequence[int], reader: Reader) -> IndexBatch:
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
        before_B = count_within(index_B, np.zeros(len(index_B), np.int64))
        for row, occurrence in occurrences(indices):  # other ranks may have the same sample
            before_B[row] = occurrence
        epoch = epoch_of(self)
        seed = self._stored.options.seed
        if seed is None or epoch is None:
            seed = draw_seed() if reader.may_draw else 0
        visit_B = (before_B << REPEAT_SHIFT) + (epoch or 0)
        return IndexBatch.of(indices, index_B, visit_B, seed)

    def reader(self) -> Reader:
        """What a coming epoch is served by: frozen, and it holds the memory of the samples.

        Raises:
            StoreGoneError: the dataset was closed.
        """
        self._refresh()
        return self._handle()

    # What torchvision's datasets show

    @property
    def transform(self) -> Step | None:
        return self._transform

    @transform.setter
    def transform(self, transform: Step | None) -> None:
        self._assign("_transform", transform)

    @property
    def transforms(self) -> PairStep | None:
        """Called with sample and target: the user's ``transforms=``, or both other transforms."""
        has_none = self._transform is None and self.target_transform is None
        if self._pair_transform is not None or has_none:
            return self._pair_transform
        return StandardTransform(self._transform, self.target_transform)

    @transforms.setter
    def transforms(self, transforms: PairStep | None) -> None:
        self._assign("_pair_transform", transforms)

    def _assign(self, name: str, value: Any) -> None:
        """Serve what another transform says; nothing is changed if that cannot be."""
        self._handle()
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            self._bring_up()
        except BaseException:
            setattr(self, name, before)
            raise

    def with_transform(self, transform: Step | None) -> Self:
        """A second view of the same samples, under another transform, as for validation.

        A transform that begins with other steps than those that samples are stored after gets a
        store of its own. The memory is given back when the last view is closed or let go.

        Example:
            >>> import torch
            >>> from fastdata import CachedDataset
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with CachedDataset(squares) as train:
            ...     val = train.with_transform(lambda image: image / 2)
            ...     print(train[3][0].max().item(), val[3][0].max().item())
            3 1.5
        """
        self._handle()
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other._handles = weakref.WeakSet()
        other._epoch = self._epoch and ArrayBlock(self._epoch, seal=False)
        other._was_read = True  # by the first view, maybe
        other.transform = transform
        return other

    def __copy__(self) -> Self:
        return self.with_transform(self._transform)

    def _bring_up(self) -> None:
        """Serve what the transform says, from samples that are prepared after its first steps."""
        after = self._stored.after
        if after is None and self._transform is not None:
            self._end_waiting()
        elif after is None or not self._is_outdated(*after):
            self._compile()
        else:
            _, key, text = after
            if self.filled_share() > 0 and (self._was_read or key):
                log.warning(
                    "samples are prepared again: the new transform does not begin with %s",
                    text or "no step",
                )
            self._prepare_again()

    def _prepare_again(self) -> None:
        source = self._origin()
        if source is self._stored.kept:
            self._compile()  # which says what is wrong
            return
        self._handle = ReaderHandle(None)
        files = self._stored.table if isinstance(source, FileSource) else None
        self._let_go(replace(self._stored, source=source, files=files, after=None))
        self._prepare()

    def _is_outdated(self, count: int, key: str, _: str) -> bool:
        """Whether the store is after other steps than the transform's, or a better one is unused.

        timm makes a dataset without a transform and assigns one later: images were kept whole, and
        nobody has read any.
        """
        stored = self._stored
        if stored.kept is not None and prepare_key(leading_steps(self._transform, count)) != key:
            return True
        # After other steps samples may fit, or take less.
        may_gain = stored.filled_share() == 0 or (not key and not self._was_read)
        if stored.kept is None:
            may_gain = stored.options.storage == "auto" and self._reader.length > 0
        # A worker process has nobody to share a store of its own with.
        may_gain &= stored.source is not None and get_worker_info() is None
        return may_gain and prepare_key(leading_steps(self._transform)) != key

    def prepare(self) -> Self:
        """Prepare all samples now, none on their first read; returns the dataset.

        Example:
            >>> import torch
            >>> from fastdata import CachedDataset
            >>> squares = [(torch.full((3, 4, 4), i, dtype=torch.uint8), i * i) for i in range(5)]
            >>> with CachedDataset(squares).prepare() as dataset:
            ...     dataset.filled_share()
            1.0
        """
        self._handle()
        options = replace(self._stored.options, at_once=True)
        if self._stored.after is None:
            self._stored = replace(self._stored, options=options)
            self._end_waiting()
        elif self._stored.kept is not None and self.filled_share() < 1:
            self._stored = replace(self._stored, options=options)
            self._prepare_again()
        return self

    # What is kept, and why

    @property
    def plan(self) -> TransformPlan:
        return self._reader.plan

    @property
    def storage(self) -> str:
        return self.storage_plan.storage

    @property
    def storage_plan(self) -> StoragePlan:
        return self._stored.prepared.storage_plan

    @property
    def skipped(self) -> list[SampleError]:
        """With ``on_error="skip"``, the errors of the samples left out."""
        return list(self._stored.prepared.skipped)

    def filled_share(self) -> float:
        """Share of the samples that are kept already."""
        return self._stored.filled_share()

    def storage_report(self) -> StorageReport:
        """Try every codec on samples spread over the dataset; to be printed.

        Takes about a second: up to 25 samples are read, encoded and decoded.
        """
        self._handle()  # which says that it was closed
        source = self._origin()
        stored = self._stored
        steps = () if source is stored.kept else (*stored.first_steps, *self.plan.prepare)
        return report_storage(read_path(source, steps), stored.options)

    @property
    def _fastdata_identity(self) -> Any:
        """What stands for this dataset where another one is made of it."""
        source = self._origin()
        kind = type(self)
        if not kind.__module__.startswith("fastdata.") or isinstance(source, KeptSamples):
            raise TypeError(f"a {kind.__name__} is a subclass, or a copy in another process")
        calls = self._transform, self.target_transform, self._pair_transform
        made = self._stored.first_steps, *calls
        if isinstance(source, FileSource):
            return made, list(source.paths), list(source.targets), source.loader
        return made, vars(source)


# Changes in place

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, ModuleType, Enum)
_ARRAYS = (torch.Tensor, np.ndarray)


class Watch:
    """What transforms consisted of when they were compiled, to notice changes in place."""

    def __init__(self, calls: tuple[Any, ...], unknown: Iterable[Any]) -> None:
        """Note what there is; not what is in unknown steps, which run as they are."""
        met = {id(step): step for step in unknown}
        self._outside: list[tuple[Any, Any]] = []
        held = _held_by(calls, met, self._outside)
        self._parts = [part for part in held if isinstance(part, (dict, list))]
        self._copies = [part.copy() for part in self._parts]  # with the same objects in them
        self._arrays = [array for array in held if isinstance(array, _ARRAYS)]
        self._octets = list(map(_octets, self._arrays))
        self._float = torch.get_default_dtype()  # of ToTensor

    def is_changed(self) -> bool:
        if torch.get_default_dtype() != self._float:
            return True
        try:
            # Quick: all that is in a part is the same object.
            if self._parts != self._copies:
                return True
            for call, read in self._outside:
                if outside_of(call) != read:
                    return True
        except (TypeError, ValueError, RuntimeError):  # arrays cannot be compared so
            return True
        return list(map(_octets, self._arrays)) != self._octets


def _held_by(values: Iterable[Any], met: dict[int, Any], outside: list[Any]) -> list[Any]:
    """These, all that is in them, and what their code reads: each once, and none met before."""
    queue = list(values)
    held = []
    for value in queue:  # which grows
        if id(value) in met or isinstance(value, _ATOMS):
            continue
        met[id(value)] = value
        held.append(value)
        if isinstance(value, dict):
            queue.extend(value.values())
        elif isinstance(value, (list, tuple)):
            queue.extend(value)
        elif not isinstance(value, _ARRAYS):
            queue.append(getattr(value, "__dict__", None))
            if callable(value) and not type(value).__module__.startswith(LIBRARIES):
                outside.append((value, outside_of(value)))
                queue.extend(outside[-1][1].values())
    return held


def _octets(array: Any) -> bytes:
    try:
        return np.asarray(array).tobytes()
    except (TypeError, RuntimeError):  # of bfloat16, or on a device
        return b""


# For loaders: no part of the face


latest_reader: Callable[[PreparedDataset], Reader] = attrgetter("_reader")
"""What was served last, even if the transform was changed since; not to be held."""

handle_of: Callable[[PreparedDataset], ReaderHandle] = attrgetter("_handle")
"""What an epoch that begins now reads by, until the dataset is closed."""


def own_reader(dataset: Dataset[Any]) -> str | None:
    """The method of a subclass that knows what an index means; None if it is a sample's number."""
    kind: Any = type(dataset)
    if kind.__getitem__ is not PreparedDataset.__getitem__:
        return "__getitem__"
    return "__getitems__" if kind.__getitems__ is not PreparedDataset.__getitems__ else None


def index_count(dataset: PreparedDataset) -> int:
    """Indices from 0 to this, exclusive, may be asked for."""
    return len(dataset) if own_reader(dataset) else dataset._reader.length


def epoch_of(dataset: PreparedDataset) -> int | None:
    """As the user set it; None where loaders count theirs."""
    return None if dataset._epoch is None else int(dataset._epoch["epoch"][0])
